/**
 * Times decoding of a whole model by ONNX Runtime Web: `node decoder.mjs [--quick] [--f16] [--bits 4,2] [--context 128]
 * [SHAPE ...]`, SHAPE one of decoder_graph.mjs. JSON on stdout, one entry a measurement; progress on stderr.
 *
 * Weights, cache and logits stay on the GPU. The id and the position of the token do not change from run to run,
 * nothing is sampled and nothing read back, which spares ONNX Runtime what a chat has to pay: its tokens per second
 * here are more than a program that uses it gets.
 *
 * @import { Shape } from './decoder_graph.mjs'
 */
import { parseArgs } from 'node:util';

import { decoderGraph, SHAPES } from './decoder_graph.mjs';
import { encodeModel } from './onnx.mjs';
import { gpuTensor, loadOrt, ORT_TYPES, secondsPerRun } from './ort.mjs';
import { values } from './quantized.mjs';

/** Cache rows beyond the context, as an application would leave. */
const SPARE_ROWS = 128;
/** Of the logits of plain and replayed runs, relative to the largest: the same kernels on the same numbers. */
const MOST_DIFFERENCE = 1e-3;

/** @typedef {{quick: boolean, dtype: 'f32' | 'f16', bits: number[], context: number, names: string[]}} Plan */

/** @returns {Plan} */
function readArguments() {
  const { values: given, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      quick: { type: 'boolean', default: false },
      f16: { type: 'boolean', default: false },
      bits: { type: 'string', default: '4,2' },
      context: { type: 'string', default: '128' },
    },
  });
  const names = positionals.length ? positionals : given.quick ? ['tiny'] : ['smollm2-135m', 'bitnet-2b'];
  const unknown = names.find((name) => !Object.hasOwn(SHAPES, name));
  if (unknown) throw new Error(`shape: expected one of ${Object.keys(SHAPES).join(', ')}, found ${unknown}`);
  const bits = given.bits.split(',').map(Number);
  if (!bits.every((count) => [2, 4, 8].includes(count))) {
    throw new Error(`--bits: expected 2, 4 or 8, separated by commas, found ${given.bits}`);
  }
  const context = Number(given.context);
  if (!Number.isInteger(context) || context < 1) {
    throw new Error(`--context: expected a positive number, found ${given.context}`);
  }
  return { quick: given.quick, dtype: given.f16 ? 'f16' : 'f32', bits, context, names };
}

/**
 * @param {{ort: any, device: GPUDevice}} runtime @param {Plan} plan @param {Shape} shape
 * @param {ReturnType<typeof decoderGraph>} graph @param {boolean} graphCapture
 */
async function time({ ort, device }, { quick, dtype, context }, shape, graph, graphCapture) {
  const external = graph.initializers.filter((tensor) => tensor.external);
  const session = await ort.InferenceSession.create(encodeModel(graph), {
    executionProviders: ['webgpu'],
    preferredOutputLocation: 'gpu-buffer',
    enableGraphCapture: graphCapture,
    externalData: external.map(({ name, data }) => ({
      path: name,
      data: new Uint8Array(data.buffer, data.byteOffset, data.byteLength),
    })),
  });
  const cacheShape = [1, shape.kvHeads, context + SPARE_ROWS, shape.headDim];
  /** @type {Awaited<ReturnType<typeof gpuTensor>>[]} */
  const made = [];
  const make = async (/** @type {Parameters<typeof gpuTensor>} */ ...what) => {
    const tensor = await gpuTensor(...what);
    made.push(tensor);
    return tensor.tensor;
  };
  const number = async (/** @type {number[]} */ dims, /** @type {number} */ value) =>
    graphCapture
      ? make(ort, 'i32', dims, Int32Array.of(-value))
      : new ort.Tensor(ORT_TYPES.i32, Int32Array.of(value), dims);
  /** @type {Record<string, any>} */
  const inputs = {
    ids: await number([1, 1], 5),
    last: await number([1], context - 1),
    total: await number([1], context),
  };
  /** @type {Record<string, any>} */
  const outputs = { logits: await make(ort, dtype, [1, 1, shape.vocabulary]) };
  for (let layer = 0; layer < shape.layers; layer++) {
    inputs[`pastKey.${layer}`] = outputs[`key.${layer}`] = await make(ort, dtype, cacheShape);
    inputs[`pastValue.${layer}`] = outputs[`value.${layer}`] = await make(ort, dtype, cacheShape);
  }
  const seconds = await secondsPerRun(device, () => session.run(inputs, outputs), quick);
  const logits = values(await outputs.logits.getData());
  if (!logits.every(Number.isFinite) || logits.every((logit) => logit === logits[0])) {
    throw new Error(`the decoder gave ${logits.slice(0, 4)}, ... as logits: it did not run, so its time is not taken`);
  }
  for (const tensor of made) await tensor.dispose();
  await session.release();
  return { seconds, logits };
}

/** @param {{ort: any, device: GPUDevice}} runtime @param {Plan} plan @param {string} name @param {number} bits */
async function measure(runtime, plan, name, bits) {
  const { dtype, context } = plan;
  const graph = decoderGraph(SHAPES[name], { bits, dtype, capacity: context + SPARE_ROWS });
  const ways = [];
  for (const graphCapture of [false, true]) {
    ways.push({ graphCapture, ...(await time(runtime, plan, SHAPES[name], graph, graphCapture)) });
  }
  const [plain, replayed] = ways;
  const largest = Math.max(...plain.logits.map(Math.abs));
  const differences = plain.logits.map((logit, index) => Math.abs(logit - replayed.logits[index]));
  const difference = Math.max(...differences) / largest;
  if (!(difference <= MOST_DIFFERENCE)) {
    throw new Error(`logits of a replayed run differ from those of a plain one by ${difference} of the largest`);
  }
  const { graphCapture, seconds } = plain.seconds < replayed.seconds ? plain : replayed;
  return { secondsPerRun: seconds, tokensPerSecond: 1 / seconds, graphCapture, weightBytes: graph.bytesPerToken };
}

/** One failure must not cost the other measurements. @param {Error} error */
const notRun = (error) => ({ notRun: error.message });

async function main() {
  const plan = readArguments();
  const { ort, device, version, adapter } = await loadOrt({ f16: plan.dtype === 'f16' });
  process.stderr.write(`onnxruntime-web ${version} on ${adapter.description}\n`);
  const common = { peer: 'onnxruntime-web', version, device: adapter.description };
  const peer = { ...common, op: 'decode', activations: plan.dtype, context: plan.context };
  if (plan.dtype === 'f16' && !adapter.f16) return [{ ...peer, notRun: 'the device has no shader-f16' }];
  const results = [];
  for (const shape of plan.names) {
    for (const bits of plan.bits) {
      const found = await measure({ ort, device }, plan, shape, bits).catch(notRun);
      results.push({ ...peer, shape, bits, ...found });
      const told = 'notRun' in found ? found.notRun : `${found.tokensPerSecond.toFixed(1)} tok/s`;
      process.stderr.write(`${shape} ${bits} bits: ${told}\n`);
    }
  }
  return results;
}

main().then(
  // Dawn and ONNX Runtime keep the process alive.
  (results) => process.stdout.write(`${JSON.stringify(results)}\n`, () => process.exit(0)),
  (error) => process.stderr.write(`${error instanceof Error ? error.message : error}\n`, () => process.exit(1)),
);
