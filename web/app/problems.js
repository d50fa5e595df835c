/** Failures as a person reads them: what happened, and which ways there are to go on. */

/** @typedef {import('./types.js').Problem} Problem */
/** @typedef {'retry'|'reload'|'smaller-context'|'larger-context'|'choose'|'new-chat'|'drop-oldest'|'roll'} Way */

/** @type {Record<string, {title: string, ways: Way[]}>} */
const KNOWN = {
  'webgpu-missing': { title: 'This browser has no WebGPU', ways: [] },
  'adapter-missing': { title: 'The browser found no GPU that it may use', ways: [] },
  'limit-too-small': { title: 'This GPU is too small for this model', ways: ['smaller-context', 'choose'] },
  'feature-missing': { title: 'This GPU lacks something that the model needs', ways: ['choose'] },
  'out-of-memory': { title: 'There is not enough GPU memory', ways: ['smaller-context', 'reload', 'choose'] },
  'device-lost': { title: 'The connection to the GPU was lost', ways: ['reload', 'choose'] },
  'pack-invalid': { title: 'The model’s files are not as they should be', ways: ['retry', 'choose'] },
  'pack-unsupported': { title: 'This page cannot run this model', ways: ['choose'] },
  'download-failed': { title: 'The download stopped', ways: ['retry', 'choose'] },
  'chunk-corrupt': { title: 'A part of the model arrived damaged', ways: ['retry', 'choose'] },
  'storage-full': { title: 'This browser’s storage is full', ways: ['choose', 'retry'] },
  'context-too-long': { title: 'The context is full', ways: ['roll', 'new-chat', 'drop-oldest', 'larger-context'] },
  'self-check-failed': { title: 'This device computes wrongly, so the model is not run', ways: ['choose', 'retry'] },
  'numbers-broken': { title: 'The numbers of the model went wrong', ways: ['retry', 'reload'] },
  'bad-request': { title: 'The model does not take this', ways: [] },
  busy: { title: 'The model is still busy', ways: ['retry'] },
  'load-unfinished': { title: 'The last two loads did not finish', ways: ['smaller-context', 'retry', 'choose'] },
  'models-unreachable': { title: 'The list of models did not come', ways: ['retry'] },
  internal: { title: 'Something went wrong', ways: ['retry', 'choose'] },
};

/**
 * @param {unknown} error anything thrown
 * @returns {Problem}
 */
export function toProblem(error) {
  const given = /** @type {Record<string, unknown>} */ (typeof error === 'object' && error ? error : {});
  const known = typeof given.code === 'string' && given.code in KNOWN;
  return {
    code: typeof given.code === 'string' ? given.code : 'internal',
    message: typeof given.message === 'string' && given.message ? given.message : String(error),
    action: typeof given.action === 'string' ? given.action
      : known ? '' : 'Try again. If it happens again, the details help to find the cause.',
    detail: /** @type {Record<string, unknown>} */ (
      typeof given.detail === 'object' && given.detail ? given.detail : {}),
  };
}

/** @param {Problem} problem @returns {string} one short sentence without its full stop */
export const titleOf = (problem) => (KNOWN[problem.code] ?? KNOWN.internal).title;

/** @param {Problem} problem @returns {Way[]} the first one is the best */
export const waysOf = (problem) => (KNOWN[problem.code] ?? KNOWN.internal).ways;

/** Failures after which the engine cannot go on by itself. */
const ENDS_ENGINE = new Set(['device-lost', 'out-of-memory']);

/** @param {Problem} problem */
export const endsEngine = ({ code }) => ENDS_ENGINE.has(code);

/** Failures that smaller buffers may cure. */
const ABOUT_MEMORY = new Set(['out-of-memory', 'limit-too-small', 'load-unfinished']);

/**
 * A context length to try after memory ran out: the largest half that fits what was available, if that is known.
 * @param {Problem} problem
 * @param {number} contextLength tokens, the one that failed
 * @param {number|null} kvBytesPerToken
 * @returns {number|null} null where a smaller context is no cure
 */
export function smallerContext(problem, contextLength, kvBytesPerToken) {
  if (!ABOUT_MEMORY.has(problem.code)) return null;
  const { needed, available } = problem.detail;
  let proposed = contextLength / 2;
  if (typeof needed === 'number' && typeof available === 'number' && kvBytesPerToken) {
    while (proposed > 512 && needed - (contextLength - proposed) * kvBytesPerToken > available) proposed /= 2;
  }
  return proposed >= 256 ? Math.floor(proposed) : null;
}
