/** One bar out of the engine's phases, some of which run at the same time. */
import { formatBytesOf, formatCount, formatLeft, formatSpeed } from './format.js';

/** @typedef {import('./types.js').Phase} Phase */
/** @typedef {import('./types.js').Progress} Progress */
/** @typedef {import('./types.js').ProgressEvent} ProgressEvent */

/**
 * Share of the bar of each phase: the download is what takes the time.
 * @type {{phase: Phase, weight: number, label: string, short: string}[]}
 */
export const PHASES = [
  { phase: 'plan', weight: 0.01, label: 'Planning memory', short: 'Plan' },
  { phase: 'download', weight: 0.74, label: 'Downloading', short: 'Download' },
  { phase: 'expand', weight: 0.08, label: 'Unpacking the weights on the GPU', short: 'Unpack' },
  { phase: 'compile', weight: 0.1, label: 'Compiling the GPU programs', short: 'Compile' },
  { phase: 'check', weight: 0.07, label: 'Checking each GPU program on this device', short: 'Self-check' },
];

/** @type {Readonly<Progress>} */
export const NO_PROGRESS = Object.freeze({ phases: {}, startedAt: {}, current: /** @type {Phase} */ ('plan'), fraction: 0 });

/** @param {ProgressEvent|undefined} event */
const share = (event) => (event && event.total > 0 ? Math.min(1, event.loaded / event.total) : 0);

/** @param {Progress} progress @param {Phase} phase */
export const isDone = (progress, phase) => share(progress.phases[phase]) === 1;

/**
 * @param {Progress} progress
 * @param {ProgressEvent} event
 * @param {number} now ms since the load began
 * @returns {Progress}
 */
export function advance(progress, event, now) {
  const phases = { ...progress.phases, [event.phase]: event };
  const startedAt = event.phase in progress.startedAt
    ? progress.startedAt : { ...progress.startedAt, [event.phase]: Math.round(now) };
  const sum = PHASES.reduce((total, { phase, weight }) => total + weight * share(phases[phase]), 0);
  // The first unfinished phase is named, so that the text does not flicker between two that run together.
  const open = PHASES.find(({ phase }) => phases[phase] && share(phases[phase]) < 1);
  return {
    phases,
    startedAt,
    current: open?.phase ?? event.phase,
    fraction: event.phase === 'ready' ? 1 : Math.max(progress.fraction, sum),
  };
}

/**
 * @param {Progress} progress
 * @returns {{label: string, numbers: string[]}} what happens now, and its numbers
 */
export function describe(progress) {
  const event = progress.phases[progress.current];
  const label = PHASES.find(({ phase }) => phase === progress.current)?.label ?? 'Starting';
  if (!event || progress.current === 'ready') return { label, numbers: [] };
  if (event.unit !== 'bytes') {
    return { label, numbers: [`${formatCount(event.loaded)} of ${formatCount(event.total)} ${event.unit}`] };
  }
  const numbers = [formatBytesOf(event.loaded, event.total)];
  if (event.bytesPerSecond) numbers.push(formatSpeed(event.bytesPerSecond));
  if (event.secondsLeft !== undefined && Number.isFinite(event.secondsLeft)) numbers.push(formatLeft(event.secondsLeft));
  const fromStorage = event.stored !== undefined && event.stored > 0 && event.loaded <= event.stored;
  return { label: fromStorage ? 'Reading from this browser’s storage' : label, numbers };
}
