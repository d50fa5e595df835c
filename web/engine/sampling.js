/** Options of a request: checked, with defaults, and as the words that the sampling kernels read. */
import { isId, isNumber, isText, show } from './checks.js';
import { TercetError } from './errors.js';

/**
 * Names and meaning as in other chat APIs.
 * @typedef {object} SamplingRequest
 * @property {number|null} [temperature]  0: always the likeliest token
 * @property {number|null} [top_p]
 * @property {number|null} [top_k]  0: off
 * @property {number|null} [min_p]
 * @property {number|null} [repetition_penalty]
 * @property {number|null} [seed]
 * @property {number|null} [max_tokens]
 * @property {string|string[]|null} [stop]
 *
 * @typedef {object} Sampling
 * @property {number} temperature
 * @property {number} topP
 * @property {number} topK
 * @property {number} minP
 * @property {number} penalty
 * @property {number} seed
 * @property {number} maxTokens  Infinity: until the context is full
 * @property {string[]} stop
 */

/** Stands for "off" where the kernel expects ln(min_p). */
const MIN_P_OFF = -3.0e38;
/** Below it a logit over the temperature could leave float32. */
const LOWEST_TEMPERATURE = 1e-4;
const MAX_STOPS = 16;
const MAX_SEED = Number.MAX_SAFE_INTEGER;

/** Default, least, greatest, and whether it is an integer. @type {Record<string, [number, number, number, boolean]>} */
const RANGES = {
  temperature: [0.7, 0, 100, false],
  top_p: [1, 1e-6, 1, false],
  top_k: [0, 0, 2 ** 31 - 1, true],
  min_p: [0, 0, 1, false],
  repetition_penalty: [1, 0.01, 100, false],
  max_tokens: [Infinity, 1, MAX_SEED, true],
};

/**
 * @param {SamplingRequest} request
 * @returns {Sampling}
 * @throws {TercetError} `bad-request`, naming the option
 */
export function checkSampling(request) {
  const [temperature, topP, topK, minP, penalty, maxTokens] = Object.keys(RANGES).map((name) => inRange(request, name));
  if (temperature > 0 && temperature < LOWEST_TEMPERATURE) {
    throw bad('temperature', temperature, `0 or at least ${LOWEST_TEMPERATURE}`);
  }
  return {
    temperature,
    topP,
    topK,
    minP,
    penalty,
    maxTokens,
    seed: checkSeed(request.seed),
    stop: checkStop(request.stop),
  };
}

/** @param {SamplingRequest} request @param {string} name */
function inRange(request, name) {
  const [fallback, least, greatest, integer] = RANGES[name];
  const value = /** @type {any} */ (request)[name] ?? fallback;
  if (value === fallback) return fallback;
  if (!isNumber(value) || value < least || value > greatest || (integer && !Number.isInteger(value))) {
    throw bad(name, value, `${integer ? 'an integer' : 'a number'} from ${least} to ${greatest}`);
  }
  return value;
}

/** @param {unknown} seed */
function checkSeed(seed) {
  if ((seed ?? null) === null) return crypto.getRandomValues(new Uint32Array(1))[0];
  if (!isId(seed)) throw bad('seed', seed, `an integer from 0 to ${MAX_SEED}`);
  return seed;
}

/** @param {unknown} stop @returns {string[]} */
function checkStop(stop) {
  if ((stop ?? null) === null) return [];
  const list = Array.isArray(stop) ? stop : [stop];
  if (list.length > MAX_STOPS || !list.every((text) => isText(text) && text.length > 0)) {
    throw bad('stop', stop, `a text or at most ${MAX_STOPS} texts, none of them empty`);
  }
  return list;
}

/** @param {string} name @param {unknown} value @param {string} expected */
function bad(name, value, expected) {
  return new TercetError('bad-request', `${name} is ${isNumber(value) ? value : show(value)}, expected ${expected}.`, {
    detail: { option: name },
  });
}

/**
 * The `@sampling` buffer.
 * @param {Sampling} sampling
 * @returns {Uint32Array<ArrayBuffer>} 8 words
 */
export function samplingWords({ temperature, topK, topP, minP, penalty, seed }) {
  const words = new DataView(new ArrayBuffer(32));
  words.setFloat32(0, temperature > 0 ? 1 / temperature : 1, true);
  words.setUint32(4, topK, true);
  words.setFloat32(8, topP, true);
  words.setFloat32(12, minP > 0 ? Math.log(minP) : MIN_P_OFF, true);
  words.setFloat32(16, penalty, true);
  words.setFloat32(20, 1 / penalty, true);
  words.setUint32(24, seed % 2 ** 32, true);
  words.setUint32(28, Math.floor(seed / 2 ** 32), true);
  return new Uint32Array(words.buffer);
}

/**
 * A bit for each token that occurs.
 * @param {Iterable<number>} ids
 * @param {number} vocabulary
 * @returns {Uint32Array<ArrayBuffer>}
 */
export function seenBits(ids, vocabulary) {
  const bits = new Uint32Array(Math.ceil(vocabulary / 32));
  for (const id of ids) bits[id >>> 5] |= 1 << (id & 31);
  return bits;
}
