/** What measuring needs: timings of submitted work, and buffers full of random numbers. */
import { throwIfAborted } from './errors.js';
import { MAP_READ, USAGE as ENGINE_USAGE } from './gpu.js';

/** GPUBufferUsage.QUERY_RESOLVE beside those that the engine needs. */
const USAGE = { ...ENGINE_USAGE, QUERY_RESOLVE: 512 };
/** @typedef {import('./gpu.js').Gpu} Gpu */
/**
 * How random words are made into numbers of an encoding.
 * @typedef {'codes'|'bytes'|'halves'|'floats'|'exponents'} NoiseKind
 */

/** Command lists of a timing, at most: their memory is the driver's. */
const MOST_ROUNDS = 4096;
const NOISE_WORDS = 1 << 20;

/** From a random word. @type {Record<NoiseKind, (word: number) => number>} */
const SHAPES = {
  // Fields of two bits: 3, which is no code, becomes 2.
  codes: (word) => word & ~((word >>> 1) & 0x55555555),
  bytes: (word) => word,
  // Magnitudes from 1/16 to 1/8.
  halves: (word) => (word & 0x83ff83ff) | 0x2c002c00,
  floats: (word) => (word & 0x807fffff) | 0x3d800000,
  // Bytes that are finite as E4M3, as E8M0 and as part of a float.
  exponents: (word) => (word & 0x03030303) | 0x3c3c3c3c,
};

/** Fills buffers with random numbers, on the GPU. */
export class Noise {
  /** @param {Gpu} gpu */
  constructor(gpu) {
    this.gpu = gpu;
    /** @type {Map<string, GPUBuffer>} */
    this.sources = new Map();
    const words = randomWords(NOISE_WORDS);
    for (const [kind, shape] of Object.entries(SHAPES)) {
      this.sources.set(kind, gpu.filled(`noise ${kind}`, words.map(shape), USAGE.COPY_SRC));
    }
  }

  /**
   * @param {GPUBuffer[]} buffers
   * @param {NoiseKind} kind
   */
  fill(buffers, kind) {
    const source = /** @type {GPUBuffer} */ (this.sources.get(kind));
    const encoder = this.gpu.device.createCommandEncoder();
    for (const buffer of buffers) {
      for (let at = 0; at < buffer.size; at += source.size) {
        encoder.copyBufferToBuffer(source, 0, buffer, at, Math.min(source.size, buffer.size - at));
      }
    }
    this.gpu.queue.submit([encoder.finish()]);
  }
}

/** @param {number} count */
function randomWords(count) {
  const words = new Uint32Array(count);
  let state = 0x9e3779b9;
  for (let index = 0; index < count; index++) {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    words[index] = state;
  }
  return words;
}

/**
 * Time work on the GPU: some rounds are recorded first, then all are submitted and waited for. The wait is not taken
 * off, so a timing is made long enough to drown it.
 * @param {Gpu} gpu
 * @param {() => GPUCommandEncoder} encode one round
 * @param {{seconds: number, repeats: number, budget: number}} sizes
 * @param {AbortSignal} [signal]
 * @returns {Promise<number[]>} seconds of a round, of each timing
 */
export async function timings(gpu, encode, { seconds, repeats, budget }, signal) {
  let rounds = 1;
  /** @returns {Promise<number>} seconds */
  const run = async () => {
    throwIfAborted(signal);
    const lists = Array.from({ length: rounds }, () => encode().finish());
    const began = performance.now();
    for (const list of lists) gpu.queue.submit([list]);
    await gpu.alive(gpu.queue.onSubmittedWorkDone());
    return (performance.now() - began) / 1000;
  };
  let took = await run();
  while (took < seconds && rounds < MOST_ROUNDS) {
    rounds = Math.min(MOST_ROUNDS, rounds * Math.max(2, Math.min(16, Math.ceil(seconds / Math.max(took, 1e-4)))));
    took = await run();
  }
  const found = [];
  const end = performance.now() + 1000 * budget;
  do found.push((await run()) / rounds);
  while (found.length < repeats && performance.now() < end);
  return found;
}

/** The GPU's own clock, where the device has the feature `timestamp-query`: no wait of the processor is in it. */
export class GpuClock {
  /** @param {Gpu} gpu @returns {GpuClock|null} */
  static of(gpu) {
    return gpu.device.features.has('timestamp-query') ? new GpuClock(gpu) : null;
  }

  /** @param {Gpu} gpu */
  constructor(gpu) {
    this.gpu = gpu;
    this.marks = gpu.device.createQuerySet({ label: 'clock', type: 'timestamp', count: 2 });
    this.resolved = gpu.buffer('clock', 16, USAGE.QUERY_RESOLVE | USAGE.COPY_SRC);
    this.staging = gpu.buffer('clock read-back', 16, USAGE.MAP_READ | USAGE.COPY_DST);
  }

  /**
   * @param {GPUCommandBuffer} list
   * @param {GPUCommandBuffer} before keeps the GPU busy until all of the list is there
   * @returns {Promise<number>} seconds from its start to its end
   */
  async time(list, before) {
    const { gpu, resolved, staging } = this;
    const last = this.mark(1);
    last.resolveQuerySet(this.marks, 0, 2, resolved, 0);
    last.copyBufferToBuffer(resolved, 0, staging, 0, 16);
    gpu.queue.submit([before, this.mark(0).finish(), list, last.finish()]);
    await gpu.alive(staging.mapAsync(MAP_READ));
    const [began, ended] = new BigUint64Array(staging.getMappedRange());
    staging.unmap();
    return Number(ended - began) / 1e9;
  }

  /** An empty pass that notes the time at its end, when all before it is done. @param {number} index */
  mark(index) {
    const encoder = this.gpu.device.createCommandEncoder();
    encoder.beginComputePass({ timestampWrites: { querySet: this.marks, endOfPassWriteIndex: index } }).end();
    return encoder;
  }

  free() {
    this.marks.destroy();
    this.gpu.free(this.resolved);
    this.gpu.free(this.staging);
  }
}

/** @param {number[]} values not empty */
export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** How far the values lie apart, as a share of the median. @param {number[]} values not empty */
export const spread = (values) => (Math.max(...values) - Math.min(...values)) / median(values);
