/**
 * ONNX Runtime Web with its WebGPU provider, in Node on Dawn.
 *
 * Folders of the npm packages: WEBGPU_NODE (`webgpu`) and ORT_WEB (`onnxruntime-web`), else where npm puts them.
 *
 * @import { DType } from './onnx.mjs'
 */
import { existsSync, readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname, join } from 'node:path';
import { pathToFileURL } from 'node:url';

import { encodeModel } from './onnx.mjs';

/** What ONNX Runtime calls element types. */
export const ORT_TYPES = { f32: 'float32', f16: 'float16', i32: 'int32' };

const MODULE = 'dist/ort.webgpu.min.mjs';
/** Dawn hides shader-f16 on NVIDIA's Vulkan driver unless asked. */
const F16_ON_NVIDIA = 'enable-dawn-features=vulkan_enable_f16_on_nvidia';

/**
 * @param {string} name of a package @param {string} variable of the environment that names its folder
 * @returns {string} its folder
 */
export function packageFolder(name, variable) {
  const named = process.env[variable];
  if (named) {
    if (existsSync(join(named, 'package.json'))) return named;
    throw new Error(`${variable} is ${named}, where no npm package lies: name the folder of ${name}`);
  }
  const require = createRequire(import.meta.url);
  for (const folder of require.resolve.paths(name) ?? []) {
    if (existsSync(join(folder, name, 'package.json'))) return join(folder, name);
  }
  throw new Error(
    `npm package ${name} is not installed: run \`npm ci --ignore-scripts\` in web/ and in web/bench/, ` +
      `or name its folder in ${variable}`,
  );
}

/**
 * Dawn refuses a view on shared memory, which is what ONNX Runtime's WebAssembly heap is.
 *
 * @param {any} queue GPUQueue.prototype
 */
function copySharedMemory(queue) {
  const write = queue.writeBuffer;
  /** @this {any} @param {any} buffer @param {number} offset @param {any} data @param {number[]} range */
  queue.writeBuffer = function (buffer, offset, data, ...range) {
    const memory = ArrayBuffer.isView(data) ? data.buffer : data;
    if (!(memory instanceof SharedArrayBuffer)) return write.call(this, buffer, offset, data, ...range);
    // Offset and size count elements of a typed array, and bytes of anything else.
    const view = /** @type {any} */ (ArrayBuffer.isView(data) ? data : new Uint8Array(memory));
    const [start = 0, length = view.length - start] = range;
    return write.call(this, buffer, offset, view.slice(start, start + length));
  };
}

/**
 * ONNX Runtime, which makes its own device at the first session.
 *
 * @param {{f16?: boolean}} [options] f16: whether the device may offer shader-f16 where that must be asked for.
 *   ONNX Runtime picks other kernels with it, for f32 activations too.
 * @returns {Promise<{ort: any, device: GPUDevice, version: string, adapter: {description: string, f16: boolean}}>}
 */
export async function loadOrt({ f16 = false } = {}) {
  const dawn = join(packageFolder('webgpu', 'WEBGPU_NODE'), 'index.js');
  const { create, globals } = await import(pathToFileURL(dawn).href);
  Object.assign(globalThis, globals);
  copySharedMemory(/** @type {any} */ (globalThis).GPUQueue.prototype);
  const gpu = create(f16 ? [F16_ON_NVIDIA] : []);
  // Node 20 has no navigator, later ones have one without gpu.
  Object.defineProperty(globalThis, 'navigator', { value: { gpu, userAgent: 'Node' }, configurable: true });
  const adapter = await gpu.requestAdapter({ powerPreference: 'high-performance' });
  if (!adapter) throw new Error('Dawn finds no GPU: a Vulkan driver is needed (VK_ICD_FILENAMES names one)');
  const folder = packageFolder('onnxruntime-web', 'ORT_WEB');
  const ort = await import(pathToFileURL(join(folder, MODULE)).href);
  ort.env.logLevel = 'error';
  ort.env.wasm.numThreads = 1;
  // Never released: with its last session ONNX Runtime gives its device up, and a later session fails (1.31.1).
  await negation(ort, 'f32', [1]);
  const { description, vendor, architecture } = adapter.info;
  return {
    ort,
    device: await ort.env.webgpu.device,
    version: JSON.parse(readFileSync(join(folder, 'package.json'), 'utf8')).version,
    adapter: { description: description || `${vendor} ${architecture}`, f16: adapter.features.has('shader-f16') },
  };
}

/** A session whose y, on the GPU, is -x. @param {any} ort @param {DType} dtype @param {readonly number[]} shape */
function negation(ort, dtype, shape) {
  const bytes = encodeModel({
    inputs: [{ name: 'x', dtype, shape }],
    outputs: [{ name: 'y', dtype, shape }],
    initializers: [],
    nodes: [{ op: 'Neg', inputs: ['x'], outputs: ['y'] }],
  });
  return ort.InferenceSession.create(bytes, { executionProviders: ['webgpu'], preferredOutputLocation: 'gpu-buffer' });
}

/**
 * A tensor in a GPU buffer that ONNX Runtime owns: the negative of `data`.
 *
 * ONNX Runtime Web forgets a caller's buffer after each run, so replaying a captured graph on it fails or reads other
 * memory (seen with 1.31.1); buffers that it made itself stay known until their tensor is disposed of.
 *
 * @param {any} ort @param {'f32' | 'f16' | 'i32'} dtype @param {readonly number[]} shape
 * @param {ArrayBufferView} [data] zeros without
 */
export async function gpuTensor(ort, dtype, shape, data) {
  const size = shape.reduce((product, length) => product * length, 1);
  const session = await negation(ort, dtype, shape);
  const zeros = { f32: Float32Array, f16: Uint16Array, i32: Int32Array }[dtype];
  const { y } = await session.run({ x: new ort.Tensor(ORT_TYPES[dtype], data ?? new zeros(size), shape) });
  const dispose = async () => {
    // In this order: the session owns the allocator that the buffer goes back to.
    y.dispose();
    await session.release();
  };
  return { tensor: y, dispose };
}

/**
 * How long is measured. first: runs of the round that tells how many fit a later one, which lasts `roundSeconds` or so:
 * each round waits for the GPU once, at its end, and is so long that this does not count. A matrix goes round in
 * `nodes` copies at most, `cacheBytes` if that is fewer, but no fewer than `fewestNodes`. plainToo: runs that are not
 * replayed are timed as well.
 *
 * @typedef {{first: number, roundSeconds: number, rounds: number, fewestNodes: number, nodes: number,
 *   cacheBytes: number, plainToo: boolean, tokens: number}} Effort tokens: of a timing of decode, at most
 */
/** @type {Record<'full' | 'quick' | 'software', Effort>} */
export const EFFORTS = {
  full: {
    first: 10,
    roundSeconds: 0.2,
    rounds: 3,
    fewestNodes: 16,
    nodes: 256,
    cacheBytes: 128 * 2 ** 20,
    plainToo: true,
    tokens: 128,
  },
  quick: {
    first: 3,
    roundSeconds: 0.05,
    rounds: 2,
    fewestNodes: 4,
    nodes: 64,
    cacheBytes: 64 * 2 ** 20,
    plainToo: false,
    tokens: 48,
  },
  // A program on the processor: its figures say little, but the run must end soon.
  software: {
    first: 1,
    roundSeconds: 0,
    rounds: 1,
    fewestNodes: 4,
    nodes: 4,
    cacheBytes: 0,
    plainToo: false,
    tokens: 3,
  },
};
const LEAST_RUNS = 2;
const MOST_RUNS = 4000;

/** Options of the scripts that name an effort, for parseArgs. */
export const EFFORT_OPTIONS = /** @type {const} */ ({
  quick: { type: 'boolean', default: false },
  software: { type: 'boolean', default: false },
});

/** @param {{quick?: boolean, software?: boolean}} given @returns {Effort} */
export const effortOf = ({ quick, software }) => EFFORTS[software ? 'software' : quick ? 'quick' : 'full'];

/**
 * Seconds of one run, by the fastest round of many runs.
 *
 * @param {GPUDevice} device @param {() => Promise<unknown>} run @param {Effort} effort
 */
export async function secondsPerRun(device, run, { first, roundSeconds, rounds }) {
  const round = async (/** @type {number} */ runs) => {
    const start = performance.now();
    for (let count = 0; count < runs; count++) await run();
    await device.queue.onSubmittedWorkDone();
    return (performance.now() - start) / 1000 / runs;
  };
  // Compiles, and captures the graph where that is wanted.
  await round(2);
  const about = await round(first);
  const runs = Math.min(Math.max(Math.ceil(roundSeconds / about), LEAST_RUNS), MOST_RUNS);
  let best = Infinity;
  for (let count = 0; count < rounds; count++) best = Math.min(best, await round(runs));
  return best;
}

/** What a script tells the process that has started it with a channel, and may end it then. */
export const FINISHED = 'finished';

/**
 * Runs a script: what it yields goes to stdout, a JSON line each as soon as it is known, so that a script that is
 * stopped or crashes keeps what it has measured.
 *
 * @param {AsyncIterable<object>} entries
 */
export async function writeLines(entries) {
  try {
    for await (const entry of entries) process.stdout.write(`${JSON.stringify(entry)}\n`);
    // Dawn and ONNX Runtime keep the process alive, and leaving waits for V8's compiler, which is busy with ONNX Runtime
    // for most of a minute: who started this script need not wait for that.
    process.stdout.write('', () => (process.send ? process.send(FINISHED) : process.exit(0)));
  } catch (error) {
    process.stderr.write(`${error instanceof Error ? error.message : error}\n`, () => process.exit(1));
  }
}
