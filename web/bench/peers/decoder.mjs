/**
 * Times decoding of a whole model by ONNX Runtime Web: `node decoder.mjs [--quick | --software] [--f16] [--bits 4,2]
 * [--context 128] [SHAPE ...]`, SHAPE as in decoder_graph.mjs. JSON lines on stdout, one a measurement; progress on
 * stderr.
 *
 * Weights and cache stay on the GPU. Two ways are timed, as entries of their own:
 * `decode`: what Transformers.js 4.3 does in a page. The cache grows by a row a token, past and present in buffers of
 * their own that go round on the GPU, logits come back, the processor takes the largest, which is the next token.
 * `decode, replayed`: one captured graph on a cache of fixed size, over and over. Token and position stay the same,
 * nothing is chosen and nothing read back: more tokens a second than a program that uses ONNX Runtime gets.
 *
 * @import { Graph } from './onnx.mjs'
 * @import { Effort } from './ort.mjs'
 * @import { Shape } from './decoder_graph.mjs'
 */
import { parseArgs } from 'node:util';

import { decoderGraph, EMBEDDING_ROWS, shapeOf } from './decoder_graph.mjs';
import { encodeModel } from './onnx.mjs';
import { EFFORT_OPTIONS, effortOf, gpuTensor, loadOrt, ORT_TYPES, secondsPerRun, writeLines } from './ort.mjs';
import { values } from './quantized.mjs';

/** Cache rows beyond the context, as an application would leave. */
const SPARE_ROWS = 256;
const FIRST_ID = 5;
/** Of the logits of both ways, relative to the largest: other kernels may run, but on the same numbers. */
const MOST_DIFFERENCE = { f32: 1e-3, f16: 5e-2 };
/** Tokens before a timing of a growing cache, and about how long one lasts. */
const WARM_TOKENS = 4;
const LOOP_SECONDS = 2;
/** Of a timing, however slow they are. */
const LEAST_TOKENS = 3;

/** @typedef {{ort: any, device: GPUDevice}} Runtime */
/** @typedef {{effort: Effort, dtype: 'f32' | 'f16', bits: number[], context: number, names: string[]}} Plan */

/** @returns {Plan} */
function readArguments() {
  const { values: given, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      ...EFFORT_OPTIONS,
      f16: { type: 'boolean', default: false },
      bits: { type: 'string', default: '4,2' },
      context: { type: 'string', default: '128' },
    },
  });
  const names = positionals.length ? positionals : given.software ? ['tiny'] : ['smollm2-135m', 'bitnet-2b'];
  names.forEach(shapeOf);
  const bits = given.bits.split(',').map(Number);
  if (!bits.every((count) => [2, 4, 8].includes(count))) {
    throw new Error(`--bits: expected 2, 4 or 8, separated by commas, found ${given.bits}`);
  }
  const context = Number(given.context);
  if (!Number.isInteger(context) || context < 2) {
    throw new Error(`--context: expected a number from 2 on, found ${given.context}`);
  }
  return { effort: effortOf(given), dtype: given.f16 ? 'f16' : 'f32', bits, context, names };
}

/**
 * @param {any} ort @param {Graph} graph
 * @param {Record<string, unknown>} options
 */
const createSession = (ort, graph, options) =>
  ort.InferenceSession.create(encodeModel(graph), {
    executionProviders: ['webgpu'],
    externalData: graph.initializers
      .filter((tensor) => tensor.external)
      .map(({ name, data }) => ({ path: name, data: new Uint8Array(data.buffer, data.byteOffset, data.byteLength) })),
    ...options,
  });

/** Refuses logits that no run can have given. @param {number[]} logits */
function checkLogits(logits) {
  if (!logits.every(Number.isFinite) || logits.every((logit) => logit === logits[0])) {
    throw new Error(`the decoder gave ${logits.slice(0, 4)}, ... as logits: it did not run, so its time is not taken`);
  }
}

/** Where the largest is. Halves are compared by their bits. @param {ArrayLike<number>} logits */
function largestAt(logits) {
  const halves = logits instanceof Uint16Array;
  let [at, most] = [0, -Infinity];
  for (let index = 0; index < logits.length; index++) {
    const value = halves && logits[index] & 0x8000 ? 0x7fff - logits[index] : logits[index];
    if (value > most) [at, most] = [index, value];
  }
  return at;
}

/**
 * Decoding as Transformers.js does it.
 *
 * @param {Runtime} runtime @param {Plan} plan @param {Shape} shape @param {Graph} graph whose cache grows
 * @returns {Promise<{secondsPerRun: number, tokens: number, logits: number[]}>} logits: of the first token
 */
async function timeLoop({ ort, device }, { effort, dtype, context }, shape, graph) {
  const names = graph.outputs.slice(1).map(({ name }) => name);
  const session = await createSession(ort, graph, {
    preferredOutputLocation: Object.fromEntries(names.map((name) => [name, 'gpu-buffer'])),
  });
  const pastOf = (/** @type {string} */ name) => name.replace('key', 'pastKey').replace('value', 'pastValue');
  const number = (/** @type {number[]} */ dims, /** @type {number} */ value) =>
    new ort.Tensor(ORT_TYPES.i32, Int32Array.of(value), dims);
  let rows = context - 1;
  /** @type {Record<string, any>} */
  let cache = {};
  /** @type {(() => Promise<void>)[]} */
  const made = [];
  for (const name of names) {
    const { tensor, dispose } = await gpuTensor(ort, dtype, [1, shape.kvHeads, rows, shape.headDim]);
    cache[pastOf(name)] = tensor;
    made.push(dispose);
  }
  let id = FIRST_ID;
  const step = async () => {
    const { logits, ...present } = await session.run({
      ids: number([1, 1], id),
      last: number([1], rows),
      total: number([1], rows + 1),
      ...cache,
    });
    if (made.length) for (const dispose of made.splice(0)) await dispose();
    else for (const tensor of Object.values(cache)) tensor.dispose();
    cache = Object.fromEntries(names.map((name) => [pastOf(name), present[name]]));
    rows += 1;
    // The embedding has fewer rows than the vocabulary.
    id = largestAt(logits.data) % EMBEDDING_ROWS;
    return logits.data;
  };
  const logits = values(await step());
  for (let count = 1; count < WARM_TOKENS && effort.tokens > WARM_TOKENS; count++) await step();
  await device.queue.onSubmittedWorkDone();
  let tokens = 0;
  let last;
  const start = performance.now();
  while (tokens < effort.tokens && (tokens < LEAST_TOKENS || performance.now() - start < 1000 * LOOP_SECONDS)) {
    last = await step();
    tokens += 1;
  }
  const seconds = (performance.now() - start) / 1000 / tokens;
  checkLogits(logits);
  checkLogits(values(last));
  const odd = Object.values(cache).find(({ dims, location }) => dims[2] !== rows || location !== 'gpu-buffer');
  if (odd) throw new Error(`a cache has shape ${odd.dims} in ${odd.location}, expected ${rows} rows on the GPU`);
  for (const tensor of Object.values(cache)) tensor.dispose();
  await session.release();
  return { secondsPerRun: seconds, tokens, logits };
}

/**
 * Decoding at its fastest.
 *
 * @param {Runtime} runtime @param {Plan} plan @param {Shape} shape @param {Graph} graph
 * @returns {Promise<{secondsPerRun: number, logits: number[]}>}
 */
async function timeReplay({ ort, device }, { effort, dtype, context }, shape, graph) {
  const session = await createSession(ort, graph, { preferredOutputLocation: 'gpu-buffer', enableGraphCapture: true });
  const cacheShape = [1, shape.kvHeads, context + SPARE_ROWS, shape.headDim];
  /** @type {Awaited<ReturnType<typeof gpuTensor>>[]} */
  const made = [];
  const make = async (/** @type {Parameters<typeof gpuTensor>} */ ...what) => {
    const tensor = await gpuTensor(...what);
    made.push(tensor);
    return tensor.tensor;
  };
  // gpuTensor negates.
  const number = (/** @type {number[]} */ dims, /** @type {number} */ value) =>
    make(ort, 'i32', dims, Int32Array.of(-value));
  /** @type {Record<string, any>} */
  const inputs = {
    ids: await number([1, 1], FIRST_ID),
    last: await number([1], context - 1),
    total: await number([1], context),
  };
  /** @type {Record<string, any>} */
  const outputs = { logits: await make(ort, dtype, [1, 1, shape.vocabulary]) };
  for (let layer = 0; layer < shape.layers; layer++) {
    inputs[`pastKey.${layer}`] = outputs[`key.${layer}`] = await make(ort, dtype, cacheShape);
    inputs[`pastValue.${layer}`] = outputs[`value.${layer}`] = await make(ort, dtype, cacheShape);
  }
  const seconds = await secondsPerRun(device, () => session.run(inputs, outputs), effort);
  const logits = values(await outputs.logits.getData());
  checkLogits(logits);
  for (const tensor of made) await tensor.dispose();
  await session.release();
  return { secondsPerRun: seconds, logits };
}

/** @param {number[]} one @param {number[]} other @param {Plan['dtype']} dtype */
function checkAlike(one, other, dtype) {
  const largest = one.reduce((most, logit) => Math.max(most, Math.abs(logit)), 0);
  const difference = one.reduce((most, logit, at) => Math.max(most, Math.abs(logit - other[at])), 0) / largest;
  if (!(difference <= MOST_DIFFERENCE[dtype])) {
    throw new Error(`logits of a replayed run differ from those of a plain one by ${difference} of the largest`);
  }
}

/** One failure must not cost the other measurements. @param {Error} error */
const notRun = (error) => ({ notRun: error.message });

/**
 * @param {Runtime} runtime @param {Plan} plan @param {Shape} shape @param {number} bits
 * @returns {AsyncGenerator<{op: string} & ({notRun: string} | {secondsPerRun: number, tokensPerSecond: number})>}
 */
async function* measure(runtime, plan, shape, bits) {
  const { dtype, context } = plan;
  const graph = decoderGraph(shape, { bits, dtype, capacity: context + SPARE_ROWS });
  /** @type {number[] | undefined} */
  let expected;
  const loop = timeLoop(runtime, plan, shape, graph.growing);
  const found = await loop.catch(notRun);
  yield { op: 'decode', ...told(found, graph.bytesPerToken) };
  if ('logits' in found) expected = found.logits;
  const replay = timeReplay(runtime, plan, shape, graph).then((times) => {
    // Both start on a cache of zeros, with the same token.
    if (expected) checkAlike(expected, times.logits, dtype);
    return times;
  });
  yield { op: 'decode, replayed', ...told(await replay.catch(notRun), graph.bytesPerToken) };
}

/**
 * @param {{notRun: string} | {secondsPerRun: number, tokens?: number, logits: number[]}} found
 * @param {number} weightBytes
 */
function told(found, weightBytes) {
  if ('notRun' in found) return found;
  const { logits, ...times } = found;
  return { ...times, tokensPerSecond: 1 / times.secondsPerRun, weightBytes };
}

async function* measurements() {
  const plan = readArguments();
  const { ort, device, version, adapter } = await loadOrt({ f16: plan.dtype === 'f16' });
  process.stderr.write(`onnxruntime-web ${version} on ${adapter.description}\n`);
  const common = { peer: 'onnxruntime-web', version, device: adapter.description };
  const peer = { ...common, op: 'decode', activations: plan.dtype, context: plan.context };
  if (plan.dtype === 'f16' && !adapter.f16) {
    for (const bits of plan.bits) yield { ...peer, bits, notRun: 'the device has no shader-f16' };
    return;
  }
  for (const bits of plan.bits) {
    for (const shape of plan.names) {
      for await (const found of measure({ ort, device }, plan, shapeOf(shape), bits)) {
        const summary = 'notRun' in found ? found.notRun : `${found.tokensPerSecond.toFixed(1)} tok/s`;
        process.stderr.write(`${shape}, ${found.op}, ${bits} bits: ${summary}\n`);
        yield { ...peer, shape, bits, ...found };
      }
    }
  }
}

await writeLines(measurements());
