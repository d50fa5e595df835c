/**
 * Times ONNX Runtime Web's MatMulNBits, the linear of its quantized models, with weights and activations on the GPU.
 *
 *   node matmulnbits.mjs [--quick | --software] [--f16] [--bits 4,2] [--tokens 1,512] [NxK ...]    rows x columns
 *
 * JSON lines on stdout, one a measurement; progress on stderr.
 * secondsPerRun: a run of a model of one product, with all that ONNX Runtime does around it.
 * secondsPerNode: (run of a model of `nodes` products - run of one) / (nodes - 1), each with weights of its own, all
 * reading one input and writing one output buffer, so that each waits for the one before: what a product costs inside a
 * model. Both are the fastest of several rounds of replayed runs (`graphCapture`), in full of plain ones too.
 *
 * @import { Initializer } from './onnx.mjs'
 * @import { Effort } from './ort.mjs'
 * @import { Form } from './quantized.mjs'
 */
import { parseArgs } from 'node:util';

import { encodeModel } from './onnx.mjs';
import { EFFORT_OPTIONS, effortOf, gpuTensor, loadOrt, secondsPerRun, writeLines } from './ort.mjs';
import { exactActivations, expectedElement, floats, product, randomMatrix, values, weightBytes } from './quantized.mjs';

const BITNET_2B = ['3840x2560', '2560x2560', '13824x2560', '2560x6912'];
const SMOLLM2_135M = ['960x576', '576x576', '3072x576', '576x1536'];
/** Elements of each product that are compared with their values, from its last token. */
const COMPARED = 16;
/** How far they may be off, relative to the largest: the activations are exact in int8, so only sums are rounded. */
const TOLERANCE = { f32: 1e-4, f16: 2e-2 };

/** @typedef {{ort: any, device: GPUDevice}} Runtime */
/**
 * @typedef {{effort: Effort, dtype: 'f32' | 'f16', bits: number[], tokens: number[], shapes: [number, number][]}} Plan
 * shapes are [rows, columns]
 */

/** @param {string} value @param {string} option @param {(n: number) => boolean} fits @param {string} wanted */
function numbers(value, option, fits, wanted) {
  const list = value.split(/[,x]/).map(Number);
  if (list.every((number) => Number.isInteger(number) && fits(number))) return list;
  throw new Error(`${option}: expected ${wanted}, found ${value}`);
}

/** @returns {Plan} */
function readArguments() {
  const { values: given, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      ...EFFORT_OPTIONS,
      f16: { type: 'boolean', default: false },
      bits: { type: 'string', default: '4,2' },
      tokens: { type: 'string' },
    },
  });
  const { software, f16 } = given;
  const names = positionals.length ? positionals : software ? ['64x256'] : [...BITNET_2B, ...SMOLLM2_135M];
  const shapes = names.map((name) => {
    const shape = numbers(name, 'shape', (n) => n > 0, 'rows x columns, such as 2560x6912');
    if (shape.length !== 2) throw new Error(`shape: expected rows x columns, such as 2560x6912, found ${name}`);
    return /** @type {[number, number]} */ (shape);
  });
  return {
    effort: effortOf(given),
    dtype: f16 ? 'f16' : 'f32',
    bits: numbers(given.bits, '--bits', (n) => [2, 4, 8].includes(n), '2, 4 or 8, separated by commas'),
    tokens: numbers(given.tokens ?? (software ? '1' : '1,512'), '--tokens', (n) => n > 0, 'positive numbers'),
    shapes,
  };
}

/** @param {Form} form @param {Plan['dtype']} dtype @param {number} tokens @param {Initializer[][]} matrices */
const model = (form, dtype, tokens, matrices) => ({
  inputs: [{ name: 'x', dtype, shape: [1, tokens, form.columns] }],
  outputs: matrices.map((_, index) => ({ name: `y${index}`, dtype, shape: [1, tokens, form.rows] })),
  initializers: matrices.flat(),
  nodes: matrices.map((_, index) => product('x', `w${index}`, form, `y${index}`)),
});

/**
 * Refuses a product that is not the one that this file means to time.
 *
 * @param {number[]} found [tokens, rows], the product with the matrix that was multiplied with last
 * @param {Float32Array} x [tokens, columns] @param {Form} form @param {Plan['dtype']} dtype
 * @param {Initializer[][]} matrices of the model, whose nodes ONNX Runtime runs in an order of its own
 */
function check(found, x, form, dtype, matrices) {
  const { rows, columns, bits } = form;
  const compared = Array.from({ length: COMPARED }, (_, index) => Math.floor((index * (rows - 1)) / (COMPARED - 1)));
  const last = compared.map((row) => found[found.length - rows + row]);
  for (const matrix of matrices) {
    const expected = compared.map((row) => expectedElement(x.subarray(-columns), form, matrix, row));
    const bound = TOLERANCE[dtype] * Math.max(...expected.map(Math.abs));
    if (expected.every((value, index) => Math.abs(value - last[index]) <= bound)) return;
  }
  throw new Error(
    `MatMulNBits ${rows}x${columns} with ${bits} bits and ${dtype} activations gave ${last.slice(0, 4)}, ... in rows ` +
      `${compared.slice(0, 4)}, ..., which is the product with none of its ${matrices.length} matrices, ` +
      'so its time is not taken',
  );
}

/**
 * Seconds of a run of a model of one product with each of the matrices.
 *
 * @param {Runtime} runtime @param {Plan} plan @param {Form} form @param {number} tokens
 * @param {Initializer[][]} matrices
 * @param {boolean} graphCapture
 */
async function time({ ort, device }, { dtype, effort }, form, tokens, matrices, graphCapture) {
  const graph = model(form, dtype, tokens, matrices);
  const session = await ort.InferenceSession.create(encodeModel(graph), {
    executionProviders: ['webgpu'],
    preferredOutputLocation: 'gpu-buffer',
    enableGraphCapture: graphCapture,
  });
  const activations = exactActivations(tokens, form.columns);
  // gpuTensor negates.
  const negated = floats(
    activations.map((value) => -value),
    dtype,
  );
  const x = await gpuTensor(ort, dtype, [1, tokens, form.columns], negated);
  const y = await gpuTensor(ort, dtype, [1, tokens, form.rows]);
  const outputs = Object.fromEntries(graph.outputs.map(({ name }) => [name, y.tensor]));
  const seconds = await secondsPerRun(device, () => session.run({ x: x.tensor }, outputs), effort);
  check(values(await y.tensor.getData()), activations, form, dtype, matrices);
  await session.release();
  await x.dispose();
  await y.dispose();
  return seconds;
}

/** @param {Plan} plan @param {Form} form @returns {Initializer[][]} the matrices of the larger model */
function matricesOf({ effort: { cacheBytes, fewestNodes, nodes: most }, dtype }, form) {
  // So many that their weights exceed a GPU's cache, within reason.
  const nodes = Math.min(Math.max(Math.ceil(cacheBytes / weightBytes(form, dtype)), fewestNodes), most);
  return Array.from({ length: nodes }, (_, index) => randomMatrix(`w${index}`, form, dtype, index));
}

/**
 * @param {Runtime} runtime @param {Plan} plan @param {Form} form @param {number} tokens
 * @param {Initializer[][]} matrices of the larger model, whose first is the smaller one's
 */
async function measure(runtime, plan, form, tokens, matrices) {
  const nodes = matrices.length;
  const ways = [];
  let failure = null;
  for (const graphCapture of [true, false]) {
    if (!graphCapture && ways.length && !plan.effort.plainToo) break;
    try {
      const one = await time(runtime, plan, form, tokens, matrices.slice(0, 1), graphCapture);
      const many = await time(runtime, plan, form, tokens, matrices, graphCapture);
      // Negative where noise is larger than what is measured: then nothing was.
      const node = (many - one) / (nodes - 1);
      ways.push({ many, secondsPerRun: one, secondsPerNode: node > 0 ? node : null, nodes, graphCapture });
    } catch (error) {
      // What cannot be replayed may run all the same.
      failure = error;
    }
  }
  if (!ways.length) throw failure;
  const { many, ...best } = ways.reduce((best, way) => (way.many < best.many ? way : best));
  return best;
}

/** One failure must not cost the other measurements. @param {Error} error */
const notRun = (error) => ({ notRun: error.message });

/** @param {Awaited<ReturnType<typeof measure>> | ReturnType<typeof notRun>} times */
function summary(times) {
  if ('notRun' in times) return times.notRun;
  const micro = (/** @type {number | null} */ seconds) =>
    seconds ? `${(seconds * 1e6).toFixed(1)} us` : 'less than the noise';
  return `${micro(times.secondsPerNode)} a product, ${micro(times.secondsPerRun)} a run of one`;
}

async function* measurements() {
  const plan = readArguments();
  const { ort, device, version, adapter } = await loadOrt({ f16: plan.dtype === 'f16' });
  process.stderr.write(`onnxruntime-web ${version} on ${adapter.description}\n`);
  const common = { peer: 'onnxruntime-web', version, device: adapter.description };
  const peer = { ...common, op: 'MatMulNBits', activations: plan.dtype };
  if (plan.dtype === 'f16' && !adapter.f16) {
    for (const bits of plan.bits) yield { ...peer, bits, notRun: 'the device has no shader-f16' };
    return;
  }
  for (const bits of plan.bits) {
    for (const [rows, columns] of plan.shapes) {
      const form = { rows, columns, bits };
      const matrices = matricesOf(plan, form);
      for (const tokens of plan.tokens) {
        const product = { ...peer, ...form, tokens, weightBytes: weightBytes(form, plan.dtype) };
        const times = await measure({ ort, device }, plan, form, tokens, matrices).catch(notRun);
        process.stderr.write(`${rows}x${columns} ${bits} bits ${tokens} tokens: ${summary(times)}\n`);
        yield { ...product, ...times };
      }
    }
  }
}

await writeLines(measurements());
