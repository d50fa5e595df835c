/**
 * A decoder of the usual kind (RMS norm, rotary grouped attention, gated MLP) out of ONNX Runtime's own operators, with
 * random weights, one token a run. A layer's cache either has a fixed capacity, and past and present are meant to be
 * bound to one buffer, or grows by a row a run.
 *
 * @import { Graph, Initializer, Operation } from './onnx.mjs'
 * @import { Form } from './quantized.mjs'
 * @typedef {{layers: number, hidden: number, heads: number, kvHeads: number, headDim: number, intermediate: number,
 *   vocabulary: number}} Shape
 */
import { CONTRIB } from './onnx.mjs';
import { floats, noise, product, randomMatrix, weightBytes } from './quantized.mjs';

/** @type {Record<string, Shape>} */
export const SHAPES = {
  tiny: { layers: 2, hidden: 128, heads: 4, kvHeads: 2, headDim: 32, intermediate: 256, vocabulary: 256 },
  'smollm2-135m': {
    layers: 30,
    hidden: 576,
    heads: 9,
    kvHeads: 3,
    headDim: 64,
    intermediate: 1536,
    vocabulary: 49152,
  },
  'bitnet-2b': {
    layers: 30,
    hidden: 2560,
    heads: 20,
    kvHeads: 5,
    headDim: 128,
    intermediate: 6912,
    vocabulary: 128256,
  },
};
/**
 * A shape by its name, or by its sizes: layers=2,hidden=128,... with every key of Shape.
 *
 * @param {string} text @returns {Shape}
 */
export function shapeOf(text) {
  if (Object.hasOwn(SHAPES, text)) return SHAPES[text];
  const sizes = Object.fromEntries(text.split(',').map((part) => part.split('=')));
  const keys = Object.keys(SHAPES.tiny);
  if (keys.length !== Object.keys(sizes).length || !keys.every((key) => /^[1-9]\d{0,6}$/.test(sizes[key] ?? ''))) {
    const known = Object.keys(SHAPES).join(', ');
    throw new Error(`shape: expected one of ${known}, or sizes as ${keys.join('=N,')}=N, found ${text}`);
  }
  return /** @type {any} */ (Object.fromEntries(keys.map((key) => [key, Number(sizes[key])])));
}

/** A token reads one row of the embedding, so a few rows stand for all. */
export const EMBEDDING_ROWS = 256;
/** 2 bits would ruin a head, which peers keep at 4 or more. */
const HEAD_BITS = 4;
const EPSILON = 1e-5;
const ROPE_THETA = 10000;

/**
 * @param {Shape} shape
 * @param {{bits: number, dtype: 'f32' | 'f16', capacity: number}} options capacity: cache rows at most
 * @returns {Graph & {bytesPerToken: number, growing: Graph}} bytesPerToken: of weights; growing: the same decoder, whose
 *   cache grows
 */
export function decoderGraph(shape, { bits, dtype, capacity }) {
  const { layers, hidden, heads, kvHeads, headDim, intermediate, vocabulary } = shape;
  /** @type {Initializer[]} */
  const initializers = [];
  /** @type {Operation[]} */
  const nodes = [];
  let bytesPerToken = 0;

  const vector = (/** @type {string} */ name, /** @type {number[]} */ dims, /** @type {readonly number[]} */ data) =>
    initializers.push({ name, dtype, shape: dims, data: floats(data, dtype) });
  const linear = (
    /** @type {string} */ x,
    /** @type {string} */ name,
    /** @type {Form} */ form,
    /** @type {string} */ out,
  ) => {
    const matrix = randomMatrix(name, form, dtype, initializers.length);
    // The sum of so many random weights must neither grow from layer to layer nor vanish.
    const scale = 1 / (2 ** (form.bits - 1) * Math.sqrt(form.columns));
    matrix[1].data = floats(new Float32Array(matrix[1].shape[0]).fill(scale), dtype);
    initializers.push(...matrix.map((tensor) => ({ ...tensor, external: true })));
    nodes.push(product(x, name, form, out));
    bytesPerToken += weightBytes(form, dtype);
  };
  /** to = h + branch, and `to.normed`. @param {string} h @param {string} branch @param {string} to */
  const addNorm = (h, branch, to) =>
    nodes.push({
      op: 'SkipSimplifiedLayerNormalization',
      domain: CONTRIB,
      inputs: [h, branch, 'gain'],
      outputs: [`${to}.normed`, '', '', to],
      attributes: { epsilon: { float: EPSILON } },
    });

  const embedding = Array.from(noise(EMBEDDING_ROWS * hidden, 1), (byte) => (byte - 127.5) / 128);
  vector('embedding', [EMBEDDING_ROWS, hidden], embedding);
  vector('gain', [hidden], Array(hidden).fill(1));
  const angles = rotations(capacity, headDim / 2);
  vector('cos', [capacity, headDim / 2], angles.map((angle) => roundTiny(Math.cos(angle))));
  vector('sin', [capacity, headDim / 2], angles.map((angle) => roundTiny(Math.sin(angle))));
  nodes.push({ op: 'Gather', inputs: ['embedding', 'ids'], outputs: ['h0'], attributes: { axis: 0 } });
  nodes.push({
    op: 'SimplifiedLayerNormalization',
    inputs: ['h0', 'gain'],
    outputs: ['h0.normed'],
    attributes: { axis: -1, epsilon: { float: EPSILON } },
  });
  for (let layer = 0; layer < layers; layer++) {
    const at = (/** @type {string} */ name) => `${name}.${layer}`;
    const [h, middle, next] = [`h${layer}`, at('middle'), `h${layer + 1}`];
    const qkvRows = (heads + 2 * kvHeads) * headDim;
    linear(`${h}.normed`, at('qkv'), { rows: qkvRows, columns: hidden, bits }, at('qkv'));
    nodes.push({
      op: 'GroupQueryAttention',
      domain: CONTRIB,
      inputs: [at('qkv'), '', '', at('pastKey'), at('pastValue'), 'last', 'total', 'cos', 'sin'],
      outputs: [at('attention'), at('key'), at('value')],
      attributes: { num_heads: heads, kv_num_heads: kvHeads, do_rotary: 1 },
    });
    linear(at('attention'), at('o'), { rows: hidden, columns: heads * headDim, bits }, at('o'));
    addNorm(h, at('o'), middle);
    linear(`${middle}.normed`, at('gate'), { rows: intermediate, columns: hidden, bits }, at('gate'));
    linear(`${middle}.normed`, at('up'), { rows: intermediate, columns: hidden, bits }, at('up'));
    nodes.push(
      { op: 'Sigmoid', inputs: [at('gate')], outputs: [at('sigmoid')] },
      { op: 'Mul', inputs: [at('gate'), at('sigmoid')], outputs: [at('silu')] },
      { op: 'Mul', inputs: [at('silu'), at('up')], outputs: [at('glu')] },
    );
    linear(at('glu'), at('down'), { rows: hidden, columns: intermediate, bits }, at('down'));
    addNorm(middle, at('down'), next);
  }
  linear(`h${layers}.normed`, 'head', { rows: vocabulary, columns: hidden, bits: HEAD_BITS }, 'logits');

  const every = Array.from({ length: layers }, (_, layer) => layer);
  const caches = (/** @type {string[]} */ names, /** @type {number | string} */ rows) =>
    every.flatMap((layer) =>
      names.map((name) => ({ name: `${name}.${layer}`, dtype, shape: [1, kvHeads, rows, headDim] })),
    );
  const graph = (/** @type {number | string} */ past, /** @type {number | string} */ present) => ({
    inputs: [
      { name: 'ids', dtype: /** @type {const} */ ('i32'), shape: [1, 1] },
      { name: 'last', dtype: /** @type {const} */ ('i32'), shape: [1] },
      { name: 'total', dtype: /** @type {const} */ ('i32'), shape: [1] },
      ...caches(['pastKey', 'pastValue'], past),
    ],
    outputs: [{ name: 'logits', dtype, shape: [1, 1, vocabulary] }, ...caches(['key', 'value'], present)],
    initializers,
    nodes,
  });
  return { ...graph(capacity, capacity), growing: graph('past', 'present'), bytesPerToken };
}

/** Angles of the rotary embedding, [positions, pairs]. @param {number} positions @param {number} pairs */
function rotations(positions, pairs) {
  return Array.from({ length: positions * pairs }, (_, index) => {
    const pair = index % pairs;
    return Math.floor(index / pairs) / ROPE_THETA ** (pair / pairs);
  });
}

/** Zero for what would be a subnormal half. @param {number} value */
const roundTiny = (value) => (Math.abs(value) < 2 ** -14 ? 0 : value);
