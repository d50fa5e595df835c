/** Small work on the bytes of weights before they go to the GPU. */

/** @param {Uint8Array} first @param {Uint8Array} second */
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

/** @param {Uint8Array<ArrayBuffer>} bytes @param {boolean} halves f16, else f32 */
export function allFinite({ buffer }, halves) {
  const [words, exponent] = halves ? [new Uint16Array(buffer), 0x7c00] : [new Uint32Array(buffer), 0x7f800000];
  return words.every((/** @type {number} */ word) => (word & exponent) !== exponent);
}
