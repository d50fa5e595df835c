/** Small work on the bytes of weights before they go to the GPU. */
import { packError } from './errors.js';

/** @param {Uint8Array} first @param {Uint8Array} second @returns {Uint8Array<ArrayBuffer>} */
export function joined(first, second) {
  const both = new Uint8Array(first.byteLength + second.byteLength);
  both.set(first);
  both.set(second, first.byteLength);
  return both;
}

/**
 * @param {Uint8Array<ArrayBuffer>} scales f32, one a part
 * @param {number[]} parts rows of each
 * @returns {Uint8Array<ArrayBuffer>} f32, one a row
 */
export function rowsOfParts(scales, parts) {
  const values = new Float32Array(scales.buffer);
  const rows = parts.flatMap((count, index) => new Array(count).fill(values[index]));
  return new Uint8Array(Float32Array.from(rows).buffer);
}

/** @param {Uint8Array<ArrayBuffer>} bytes @returns {Uint8Array<ArrayBuffer>} filled up with zeros */
export const wholeWords = (bytes) =>
  bytes.byteLength % 4 ? joined(bytes, new Uint8Array(4 - (bytes.byteLength % 4))) : bytes;

/** Greatest codes of scales of one byte: E4M3 without a sign, and E8M0 six times which is still an f32. */
const GREATEST = Object.freeze({ nvfp4: 0x7e, mxfp4: 252 });
/** Greatest product of an E2M1 weight and an E4M3 scale. */
const NVFP4_MAX = 6 * 448;

/**
 * No scale that is no number, or whose products are none.
 * @param {import('./pack.js').Tensor} tensor
 * @param {Uint8Array<ArrayBuffer>} scales all of a tensor, or the values of a vector
 * @throws {TercetError} `finite`
 */
export function checkScales({ name, encoding, group }, scales) {
  const isFinite =
    encoding === 'nvfp4'
      ? Number.isFinite(Math.fround(new Float32Array(scales.buffer, 0, 1)[0] * NVFP4_MAX)) &&
        scales.subarray(4).every((code) => code <= GREATEST.nvfp4)
      : encoding === 'mxfp4'
        ? scales.every((code) => code <= GREATEST.mxfp4)
        : allFinite(scales, group > 0);
  if (!isFinite) throw packError('finite', `tensor ${name}: infinite or NaN values.`);
}

/** @param {Uint8Array<ArrayBuffer>} bytes @param {boolean} halves f16, else f32 */
function allFinite({ buffer }, halves) {
  const [words, exponent] = halves ? [new Uint16Array(buffer), 0x7c00] : [new Uint32Array(buffer), 0x7f800000];
  return words.every((/** @type {number} */ word) => (word & exponent) !== exponent);
}
