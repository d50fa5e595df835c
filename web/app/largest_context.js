/** The largest context that this device holds, when the one that was chosen is too large for it. */
import { formatBytes, formatCount } from './format.js';

/** @typedef {import('./types.js').Plan} Plan */
/** @typedef {import('./types.js').Lowered} Lowered */

/** Only these depend on the context. */
const ABOUT_SIZE = new Set(['limit-too-small', 'out-of-memory']);
/** Less than this is of no use, in tokens. */
const LEAST = 128;

/**
 * Ask the engine's plan for ever closer contexts: it alone knows every limit.
 * @param {Plan} tooLarge a plan that does not fit
 * @param {(contextLength: number) => Promise<Plan>} planAt
 * @returns {Promise<Plan|null>} the plan of the largest context that fits; null when none does
 */
export async function largestPlan(tooLarge, planAt) {
  if (!tooLarge.problems.every(({ code }) => ABOUT_SIZE.has(code)) || tooLarge.contextLength <= LEAST) return null;
  let best = await planAt(LEAST);
  if (!best.fits) return null;
  let fits = LEAST;
  let fails = tooLarge.contextLength;
  while (fails - fits > 1) {
    const middle = Math.floor((fits + fails) / 2);
    const plan = await planAt(middle);
    if (plan.fits) best = plan;
    [fits, fails] = plan.fits ? [middle, fails] : [fits, middle];
  }
  return best;
}

/**
 * @param {Plan} tooLarge
 * @param {Plan} fitting
 * @returns {Lowered}
 */
export const lower = (tooLarge, fitting) => ({
  asked: tooLarge.contextLength,
  contextLength: fitting.contextLength,
  totalBytes: fitting.totalBytes,
  reason: tooLarge.problems.map((problem) => problem.message).join(' '),
});

/** @param {Lowered} lowered @returns {string} what does not fit, and what is taken instead */
export const loweredWords = ({ asked, contextLength, totalBytes, reason }) =>
  `A context of ${formatCount(asked)} tokens does not fit here: ${reason} It is `
  + `${formatCount(contextLength)} tokens instead, the largest that fits, with ${formatBytes(totalBytes)} of GPU `
  + 'memory in all.';
