/**
 * Matrices as MatMulNBits takes them, with random codes.
 *
 * B u8 [rows, blocks, BLOCK * bits / 8]: code i of a block lies in bits (bits * i) % 8 and up of byte bits * i / 8.
 * scales [rows * blocks]; without zero points a weight is (code - 2^(bits - 1)) * scale.
 *
 * @import { DType, Initializer, Operation } from './onnx.mjs'
 * @typedef {{rows: number, columns: number, bits: number}} Form
 */
import { CONTRIB } from './onnx.mjs';

/** Columns that share a scale. */
export const BLOCK = 128;
/** Activations as int8, summed in int32: ONNX Runtime's fastest, and what Tercet does. */
const ACCURACY_LEVEL = 4;

/** @param {Form} form */
export const blocks = ({ columns }) => Math.ceil(columns / BLOCK);

/** Bytes of codes and scales that one product reads. @param {Form} form @param {'f32' | 'f16'} dtype */
export const weightBytes = (form, dtype) =>
  form.rows * blocks(form) * ((BLOCK * form.bits) / 8 + (dtype === 'f16' ? 2 : 4));

/** Words of noise, after which it repeats: a model has hundreds of MB of it. */
const PERIOD = 2 ** 18;

/** Bytes that look random and depend on the seed alone. @param {number} length @param {number} seed */
export function noise(length, seed) {
  const words = new Uint32Array(Math.ceil(length / 4));
  let state = Math.imul(seed + 1, 0x9e3779b1) >>> 0 || 1;
  for (let index = 0; index < Math.min(words.length, PERIOD); index++) {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    words[index] = state;
  }
  for (let filled = PERIOD; filled < words.length; filled *= 2) words.copyWithin(filled, 0, filled);
  return new Uint8Array(words.buffer, 0, length);
}

/**
 * Bits of the nearest half; of two, the larger in size.
 *
 * @param {number} value zero, or in the range of normal halves @returns {number}
 */
export function halfBits(value) {
  if (value === 0) return 0;
  const exponent = Math.floor(Math.log2(Math.abs(value)));
  const fraction = Math.round((Math.abs(value) / 2 ** exponent - 1) * 1024);
  return (value < 0 ? 0x8000 : 0) + (exponent + 15) * 1024 + fraction;
}

/** @param {number} bits of a half @returns {number} */
function halfValue(bits) {
  const exponent = (bits >> 10) & 31;
  const fraction = (bits & 1023) / 1024;
  const value = exponent ? (1 + fraction) * 2 ** (exponent - 15) : fraction * 2 ** -14;
  return bits & 0x8000 ? -value : value;
}

/** Values of a tensor's data, where Node has no array of halves. @param {ArrayLike<number>} data @returns {number[]} */
export const values = (data) => (data instanceof Uint16Array ? Array.from(data, halfValue) : Array.from(data));

/** @param {readonly number[] | Float32Array} values @param {DType} dtype @returns {Float32Array | Uint16Array} */
export const floats = (values, dtype) =>
  dtype === 'f16' ? Uint16Array.from(values, halfBits) : Float32Array.from(values);

/**
 * The two initializers `NAME.codes` and `NAME.scales` of a random matrix. Scales are powers of two, exact in halves.
 *
 * @param {string} name @param {Form} form @param {'f32' | 'f16'} dtype @param {number} seed @returns {Initializer[]}
 */
export function randomMatrix(name, form, dtype, seed) {
  const { rows, bits } = form;
  const blockBytes = (BLOCK * bits) / 8;
  const count = rows * blocks(form);
  const scales = Array.from(noise(count, seed + 1000), (byte) => 2 ** -(7 + (byte & 3)));
  return [
    {
      name: `${name}.codes`,
      dtype: 'u8',
      shape: [rows, blocks(form), blockBytes],
      data: noise(count * blockBytes, seed),
    },
    { name: `${name}.scales`, dtype, shape: [count], data: floats(scales, dtype) },
  ];
}

/**
 * The product with the matrix of that name.
 *
 * @param {string} x @param {string} name @param {Form} form @param {string} out @returns {Operation}
 */
export const product = (x, name, { rows, columns, bits }, out) => ({
  op: 'MatMulNBits',
  domain: CONTRIB,
  inputs: [x, `${name}.codes`, `${name}.scales`],
  outputs: [out],
  attributes: { K: columns, N: rows, bits, block_size: BLOCK, accuracy_level: ACCURACY_LEVEL },
});

/**
 * Activations of which each block has 127/64 and all others are smaller multiples of 1/64: the int8 that they are
 * rounded to are their own values, so a product with them has no error but that of its sums.
 *
 * @param {number} tokens @param {number} columns @returns {Float32Array} [tokens, columns]
 */
export function exactActivations(tokens, columns) {
  const bytes = noise(tokens * columns, 7);
  return Float32Array.from(bytes, (byte, at) => (((at % columns) % 32 ? byte % 255 : 254) - 127) / 64);
}

/**
 * One element of the product, in f64.
 *
 * @param {Float32Array} x [columns] @param {Form} form @param {Initializer[]} matrix @param {number} row
 */
export function expectedElement(x, form, [codes, scales], row) {
  const { columns, bits } = form;
  const bytes = /** @type {Uint8Array} */ (codes.data);
  const count = blocks(form);
  const all = /** @type {Float32Array | Uint16Array} */ (scales.data);
  const factors = values(all.subarray(row * count, (row + 1) * count));
  let sum = 0;
  for (let column = 0; column < columns; column++) {
    // Whole blocks only, so a row's codes follow each other without a gap.
    const bit = (row * count * BLOCK + column) * bits;
    const code = (bytes[bit >> 3] >> (bit & 7)) & (2 ** bits - 1);
    sum += x[column] * (code - 2 ** (bits - 1)) * factors[Math.floor(column / BLOCK)];
  }
  return sum;
}
