/** Errors that a person can act on. They keep their class and fields across the worker boundary. */

/**
 * @typedef {'webgpu-missing'|'adapter-missing'|'limit-too-small'|'feature-missing'|'out-of-memory'|'device-lost'
 *   |'pack-invalid'|'pack-unsupported'|'download-failed'|'chunk-corrupt'|'storage-full'|'context-too-long'
 *   |'self-check-failed'|'numbers-broken'|'bad-request'|'aborted'|'busy'|'internal'} ErrorCode
 */

/**
 * What to do next where the place that throws knows nothing better.
 * @type {Record<ErrorCode, string>}
 */
const ACTIONS = {
  'webgpu-missing': 'Use a browser with WebGPU: Chrome or Edge 113, Safari 26, Firefox 141, or newer.',
  'adapter-missing': 'Switch on hardware acceleration in the browser, update the graphics driver, and reload the page.',
  'limit-too-small': 'Choose a smaller model or a smaller context.',
  'feature-missing': 'Update the browser, or choose another model.',
  'out-of-memory': 'Close other programs that use the GPU, or choose a smaller context or a smaller model.',
  'device-lost': 'Load the model again. If it happens again, choose a smaller context.',
  'pack-invalid': 'Export or download the pack again.',
  'pack-unsupported': 'Use a newer Tercet, or export the pack again with this one.',
  'download-failed': 'Check the connection and load again: what has arrived is kept.',
  'chunk-corrupt': 'Load again. If it fails again, the file on the server is damaged: export the pack again.',
  'storage-full': 'Remove stored models or free disk space, then load again.',
  'context-too-long': 'Start a new chat, shorten the prompt, or load the model with a longer context.',
  'self-check-failed': 'Update the browser and the graphics driver. Until then this device would give wrong answers.',
  'numbers-broken': 'Ask again. If it fails again, load the model again, or choose the f32 KV cache.',
  'bad-request': 'Correct the request.',
  aborted: 'Start again when you like.',
  busy: 'Wait for the answer that is being written, or abort it.',
  internal: 'Load the model again and report the fault with the details.',
};

/** @type {readonly string[]} */
export const ERROR_CODES = Object.freeze(Object.keys(ACTIONS));

export class TercetError extends Error {
  /**
   * @param {ErrorCode} code
   * @param {string} message what happened, with names and numbers
   * @param {{action?: string, detail?: Record<string, unknown>, cause?: unknown}} [more]
   *   action: what to do next; detail: plain data, may be copied to another thread
   */
  constructor(code, message, { action = ACTIONS[code], detail = {}, cause } = {}) {
    super(message, cause === undefined ? undefined : { cause });
    this.name = 'TercetError';
    this.code = code;
    this.action = action;
    this.detail = detail;
  }
}

/**
 * A pack that breaks a rule of packer/FORMAT.md.
 * @param {string} rule the rule's name there
 * @param {string} message
 * @param {Record<string, unknown>} [detail]
 */
export function packError(rule, message, detail = {}) {
  const newer = ['version', 'ops-version', 'encoding'].includes(rule);
  return new TercetError(newer ? 'pack-unsupported' : 'pack-invalid', message, { detail: { rule, ...detail } });
}

/** @param {AbortSignal|undefined} signal throws `aborted` if it has fired */
export function throwIfAborted(signal) {
  if (signal?.aborted) throw new TercetError('aborted', 'Stopped on request.');
}

/**
 * Any thrown thing as a TercetError.
 * @param {unknown} error
 * @returns {TercetError}
 */
export function toTercetError(error) {
  if (error instanceof TercetError) return error;
  if (error instanceof Error) {
    const code = error.name === 'AbortError' ? 'aborted' : 'internal';
    const { name, stack = '' } = error;
    return new TercetError(code, error.message || name, { cause: error, detail: { name, stack } });
  }
  return new TercetError('internal', String(error));
}

/**
 * @typedef {{code: ErrorCode, message: string, action: string, detail: Record<string, unknown>}} ErrorMessage
 */

/**
 * @param {unknown} error
 * @returns {ErrorMessage} can be posted to another thread
 */
export function toMessage(error) {
  const { code, message, action, detail } = toTercetError(error);
  return { code, message, action, detail: JSON.parse(JSON.stringify(detail)) };
}

/** @param {ErrorMessage} message */
export const fromMessage = ({ code, message, action, detail }) => new TercetError(code, message, { action, detail });
