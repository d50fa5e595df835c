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
function packageFolder(name, variable) {
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

/** A round waits for the GPU once, at its end; it is so long that this does not count. */
const ROUND_SECONDS = 0.2;
const ROUNDS = 3;
const MOST_RUNS = 4000;

/**
 * Seconds of one run, by the fastest round of many runs.
 *
 * @param {GPUDevice} device @param {() => Promise<unknown>} run @param {boolean} quick a short round only
 */
export async function secondsPerRun(device, run, quick) {
  const round = async (/** @type {number} */ runs) => {
    const start = performance.now();
    for (let count = 0; count < runs; count++) await run();
    await device.queue.onSubmittedWorkDone();
    return (performance.now() - start) / 1000 / runs;
  };
  // Compiles, and captures the graph where that is wanted.
  await round(2);
  const first = await round(quick ? 1 : 10);
  const runs = quick ? 2 : Math.min(Math.max(Math.ceil(ROUND_SECONDS / first), 3), MOST_RUNS);
  let best = Infinity;
  for (let count = 0; count < (quick ? 1 : ROUNDS); count++) best = Math.min(best, await round(runs));
  return best;
}
