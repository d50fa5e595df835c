/** The matrices of a program, and a program of many copies of one of them, with random weights. */
import { USAGE } from './gpu.js';
import { bindingLimit, pieces, rowWords } from './memory.js';
import { isInteger } from './operation_check.js';
import { scaleWords, scalesPerRow } from './tensor_layout.js';

/**
 * @typedef {import('./program.js').Program} Program
 * @typedef {import('./program.js').Operation} Operation
 * @typedef {import('./program.js').Value['dtype']} Dtype
 * @typedef {import('./pack.js').Tensor} Tensor
 * @typedef {import('./pack.js').Pack} Pack
 * @typedef {import('./contract.js').Contract} Contract
 * @typedef {import('./gpu.js').Gpu} Gpu
 * @typedef {import('./measure_timing.js').Noise} Noise
 * @typedef {Map<string, import('./weights.js').Weight>} Weights
 * @typedef {{copies: number, products: number, tokens: number}} Counts  copies: of the weights
 * @typedef {{name: string, op: Operation, dtype: Dtype, tensor: Tensor, isHead: boolean}} Linear
 *   dtype: of the activations; isHead: run for one token only
 */

/** Ids that the little program knows. */
export const VOCABULARY = 64;
const STORAGE = USAGE.STORAGE | USAGE.COPY_DST;

/**
 * One of each kind of matrix: same sizes, encoding, scales and activations.
 * @param {Program} program
 * @param {Map<string, Tensor>} tensors
 * @returns {Linear[]} in the order of the program
 */
export function distinctLinears(program, tensors) {
  /** @type {Map<string, Linear>} */
  const found = new Map();
  for (const section of /** @type {const} */ (['body', 'logits'])) {
    for (const op of program[section]) {
      if (op.op !== 'linear') continue;
      const tensor = /** @type {Tensor} */ (tensors.get(op.w));
      const { dtype } = program.values[op.x];
      const kind = [tensor.encoding, tensor.scale === 'group', tensor.group, dtype, Boolean(op.accumulate), !op.bias];
      const key = [section, tensor.shape, ...kind].join();
      if (found.has(key)) continue;
      const name = section === 'logits' ? 'head' : op.w.split('.').at(-1);
      found.set(key, { name, op, dtype, tensor, isHead: section === 'logits' });
    }
  }
  return [...found.values()];
}

/** Layers of a program: pairs of caches. @param {Program} program */
export const layersOf = ({ caches }) => Math.max(1, Object.keys(caches).length / 2);

/** Bytes of a tensor on the GPU. @param {Tensor} tensor @param {Contract} contract */
export const tensorBytes = (tensor, contract) =>
  tensor.shape.length === 1
    ? 4 * tensor.shape[0]
    : 4 * (tensor.shape[0] * rowWords(tensor, contract).resident + scaleWords(tensor, tensor.shape[0]));

/**
 * What a token must read: all weights once, of what is looked up one row (unless it is the head), and the cache.
 * @param {Pack} pack
 * @param {Program} program
 * @param {Contract} contract
 * @param {number} kvBytesPerToken
 * @param {number} context tokens in the cache
 */
export function bytesPerToken({ tensors }, program, contract, kvBytesPerToken, context) {
  const operations = [...program.body, ...program.logits];
  const multiplied = new Set(operations.filter(({ op }) => op === 'linear').map(({ w }) => w));
  const gathered = new Set(program.body.filter(({ op }) => op === 'embed' || op === 'position').map(({ w }) => w));
  let sum = kvBytesPerToken * context;
  for (const tensor of tensors.values()) {
    const bytes = tensorBytes(tensor, contract);
    sum += gathered.has(tensor.name) && !multiplied.has(tensor.name) ? Math.ceil(bytes / tensor.shape[0]) : bytes;
  }
  return sum;
}

/**
 * `body` makes the activations; `logits` has the products, with outputs of their own; `random` the same with one
 * output `y`, so that each waits for the one before. They go round in the copies of the weights.
 * @param {Linear} linear
 * @param {Counts} counts
 * @returns {Program}
 */
export function copiesProgram({ op, dtype, tensor }, { copies, products }) {
  const [rows, columns] = tensor.shape;
  const isQuantized = isInteger(dtype);
  /** @type {Program['values']} */
  const values = { x: { dtype, shape: ['T', columns] }, y: { dtype: 'f32', shape: ['T', rows] } };
  if (isQuantized) values.h = { dtype: 'f32', shape: ['T', columns] };
  /** @type {Operation[]} */
  const apart = [];
  for (let number = 0; number < products; number++) {
    values[`y.${number}`] = { dtype: 'f32', shape: ['T', rows] };
    apart.push({ ...op, x: 'x', w: `w.${number % copies}`, out: `y.${number}` });
  }
  return {
    ops_version: 1,
    values,
    caches: {},
    tables: {},
    body: [
      { op: 'embed', w: 'table', multiplier: 1, out: isQuantized ? 'h' : 'x' },
      ...(isQuantized ? [{ op: 'quantize', x: 'h', out: 'x' }] : []),
    ],
    logits: apart,
    greedy: [],
    random: apart.map((one) => ({ ...one, out: 'y' })),
  };
}

/**
 * @param {Contract} contract
 * @param {Gpu} gpu
 * @param {Noise} noise
 * @param {Linear} linear
 * @param {number} copies
 * @returns {Weights}
 */
export function makeWeights(contract, gpu, noise, { op, tensor }, copies) {
  /** @type {Weights} */
  const weights = new Map();
  /** @type {(one: Tensor) => void} */
  const add = (one) => {
    const words = rowWords(one, contract).resident;
    const made = pieces(one, contract, bindingLimit(gpu.limits)).map((piece) => ({
      ...piece,
      data: gpu.buffer(one.name, 4 * piece.rows * words, STORAGE),
      scale: scalesPerRow(one) ? gpu.buffer(`${one.name} scales`, 4 * scaleWords(one, piece.rows), STORAGE) : null,
    }));
    noise.fill(made.map(({ data }) => data), dataNoise(one.encoding));
    noise.fill(made.flatMap(({ scale }) => scale ?? []), scaleNoise(one));
    weights.set(one.name, { tensor: one, vector: null, pieces: made });
  };
  for (let copy = 0; copy < copies; copy++) add({ ...tensor, name: `w.${copy}` });
  const [rows, columns] = tensor.shape;
  add({ ...tensor, name: 'table', encoding: 'f32', shape: [VOCABULARY, columns], scale: null, group: 0 });
  if (op.bias) {
    const vector = gpu.buffer(op.bias, 4 * rows, STORAGE);
    noise.fill([vector], 'floats');
    weights.set(op.bias, { tensor: { ...tensor, name: op.bias, encoding: 'f32', shape: [rows] }, vector, pieces: [] });
  }
  return weights;
}

/** @param {Tensor} tensor @returns {import('./measure_timing.js').NoiseKind} */
const scaleNoise = ({ encoding, group }) =>
  encoding === 'nvfp4' || encoding === 'mxfp4' ? 'exponents' : group ? 'halves' : 'floats';

/** @param {string} encoding @returns {import('./measure_timing.js').NoiseKind} */
const dataNoise = (encoding) =>
  encoding === 'ternary' ? 'codes' : encoding === 'f16' ? 'halves' : encoding === 'f32' ? 'floats' : 'bytes';
