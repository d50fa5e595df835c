/** How fast the GPU reads its memory: the kernel `read_bandwidth` over a buffer that no cache holds. */
import { candidates, dimension, encodeParams, overrideValues, tunedFor, withTuned, workgroups } from './contract.js';
import { TercetError } from './errors.js';
import { USAGE } from './gpu.js';
import { Kernels } from './kernels.js';
import { bindingLimit } from './memory.js';
import { median, timings } from './measure_timing.js';

/**
 * bytesPerSecond: the best timing; medianBytesPerSecond: the middle one.
 * @typedef {{bytesPerSecond: number, medianBytesPerSecond: number, bufferBytes: number}} Bandwidth
 */

/** Workgroups that share a buffer: the best of these counts. */
const READERS = [1024, 4096, 16384];
const VEC4_BYTES = 16;
const LEAST_BYTES = 1 << 20;

/**
 * @param {import('./prepare.js').Prepared} prepared
 * @param {import('./gpu.js').Gpu} gpu
 * @param {import('./measure_timing.js').Noise} noise
 * @param {import('./measure.js').Sizes} sizes
 * @param {AbortSignal} [signal]
 * @returns {Promise<Bandwidth>}
 */
export async function measureBandwidth({ contract, files }, gpu, noise, sizes, signal) {
  const data = await largest(gpu, Math.min(sizes.bufferBytes, bindingLimit(gpu.limits)));
  noise.fill([data], 'bytes');
  const kernels = new Kernels(gpu, contract, files);
  const [kernel] = candidates(contract, 'read_bandwidth', {}, gpu.abilities, [1, 1]);
  const overrides = overrideValues(contract, kernel, tunedFor(kernel, gpu.abilities));
  const { pipeline, layout } = await kernels.compile(kernel, overrides, signal);
  const found = [];
  for (const readers of gpu.abilities.software ? [16] : READERS) {
    const symbols = withTuned(kernel, { N: data.size / VEC4_BYTES, READERS: readers }, overrides);
    const params = gpu.filled('read params', encodeParams(kernel, symbols), USAGE.UNIFORM);
    const sums = gpu.buffer('read sums', 4 * dimension('READERS', symbols), USAGE.STORAGE);
    const group = kernels.bind(kernel, layout, params, params, [{ buffer: data }, { buffer: sums }]);
    const times = await timings(
      gpu,
      () => {
        const encoder = gpu.device.createCommandEncoder();
        const pass = encoder.beginComputePass();
        pass.setPipeline(pipeline);
        pass.setBindGroup(0, group);
        pass.dispatchWorkgroups(...workgroups(kernel, symbols));
        pass.end();
        return encoder;
      },
      sizes,
      signal,
    );
    found.push(times);
  }
  const [best] = found.sort((a, b) => median(a) - median(b));
  gpu.free(data);
  return {
    bytesPerSecond: data.size / Math.min(...best),
    medianBytesPerSecond: data.size / median(best),
    bufferBytes: data.size,
  };
}

/**
 * @param {import('./gpu.js').Gpu} gpu
 * @param {number} bytes wanted; half of it, and so on, where there is no room
 */
async function largest(gpu, bytes) {
  for (let size = Math.floor(bytes / 256) * 256; ; size = Math.floor(size / 512) * 256) {
    try {
      return await gpu.allocate('measuring', size, () =>
        gpu.buffer('read data', size, USAGE.STORAGE | USAGE.COPY_DST),
      );
    } catch (error) {
      const isFull = error instanceof TercetError && error.code === 'out-of-memory';
      if (!isFull || size < LEAST_BYTES) throw error;
    }
  }
}
