/**
 * Times the matrices of a program, each alone: a small program of many copies of one product is planned, bound and
 * recorded by the same code that runs models, so what is measured is what runs.
 */
import { makeBuffers } from './bindings.js';
import { TercetError, throwIfAborted } from './errors.js';
import { Executor } from './executor.js';
import { Kernels } from './kernels.js';
import { VOCABULARY, copiesProgram, makeWeights, tensorBytes } from './measure_copies.js';
import { GpuClock, median, timings } from './measure_timing.js';
import { distinctVariants, planProgram } from './operations.js';

/**
 * @typedef {import('./prepare.js').Prepared} Prepared
 * @typedef {import('./measure_copies.js').Linear} Linear
 * @typedef {import('./measure_copies.js').Counts} Counts
 * @typedef {import('./measure_copies.js').Weights} Weights
 * @typedef {import('./gpu.js').Gpu} Gpu
 * @typedef {import('./measure_timing.js').Noise} Noise
 * @typedef {import('./measure.js').Sizes} Sizes
 *
 * Keys as in packer/bench_report.py.
 * @typedef {{name: string, rows: number, columns: number, encoding: string, bytes: number, seconds: number,
 *   dependentSeconds: number, batchTokens: number|null, batchSeconds: number|null}} Timed
 * @typedef {Timed & {share: number}} LinearReport
 */

/** Copies of a matrix, at most: each has buffers and a bind group. */
const MOST_COPIES = 1024;
/** Of all outputs of a timing, about. */
const OUTPUT_BYTES = 64 << 20;

/**
 * @param {Prepared} prepared
 * @param {Gpu} gpu
 * @param {Noise} noise
 * @param {Linear} linear
 * @param {Sizes} sizes
 * @param {AbortSignal} [signal]
 * @returns {Promise<Timed>}
 */
export async function measureLinear(prepared, gpu, noise, linear, sizes, signal) {
  const { name, tensor, isHead } = linear;
  const [rows, columns] = tensor.shape;
  const bytes = tensorBytes(tensor, prepared.contract);
  const copies = Math.max(1, Math.min(MOST_COPIES, Math.ceil(sizes.copyBytes / bytes)));
  const outputBytes = 4 * rows * prepared.contract.constants.most_drafted;
  const products = Math.max(copies, Math.min(sizes.products, Math.ceil(OUTPUT_BYTES / outputBytes)));
  const one = await Bench.create(prepared, gpu, noise, linear, { copies, products, tokens: 1 });
  const dependentSeconds = await one.time('random', sizes, signal);
  const seconds = await one.apart(sizes, signal);
  one.free();
  let batchSeconds = null;
  if (!isHead) {
    const many = await Bench.create(prepared, gpu, noise, linear, { copies: 1, products: 1, tokens: sizes.batch });
    batchSeconds = await many.time('logits', sizes, signal);
    many.free();
  }
  const batchTokens = isHead ? null : sizes.batch;
  const { encoding } = tensor;
  return { name, rows, columns, encoding, bytes, seconds, dependentSeconds, batchTokens, batchSeconds };
}

/** A program of copies of one product, on the GPU. */
class Bench {
  /**
   * @param {Prepared} prepared
   * @param {Gpu} gpu
   * @param {Linear} linear
   * @param {Counts} counts
   * @param {Weights} weights
   */
  constructor(prepared, gpu, linear, counts, weights) {
    this.prepared = prepared;
    this.gpu = gpu;
    this.linear = linear;
    this.counts = counts;
    this.weights = weights;
    this.kernels = new Kernels(gpu, prepared.contract, prepared.files);
    /** @type {Executor|null} */
    this.executor = null;
    /** @type {GPUBuffer[]} */
    this.made = [];
  }

  /**
   * With as many copies as there is room for.
   * @param {Prepared} prepared
   * @param {Gpu} gpu
   * @param {Noise} noise
   * @param {Linear} linear
   * @param {Counts} counts
   * @returns {Promise<Bench>}
   */
  static async create(prepared, gpu, noise, linear, counts) {
    const before = new Set(gpu.buffers);
    const { copies } = counts;
    const bytes = copies * tensorBytes(linear.tensor, prepared.contract);
    try {
      const weights = await gpu.allocate(`measuring ${linear.name}`, bytes, () =>
        makeWeights(prepared.contract, gpu, noise, linear, copies),
      );
      const bench = new Bench(prepared, gpu, linear, counts, weights);
      bench.executor = await bench.outputs();
      bench.made = added(gpu, before);
      return bench;
    } catch (error) {
      for (const buffer of added(gpu, before)) gpu.free(buffer);
      if (!(error instanceof TercetError) || error.code !== 'out-of-memory' || copies === 1) throw error;
      return Bench.create(prepared, gpu, noise, linear, { ...counts, copies: copies >> 1 });
    }
  }

  /**
   * The program with values of its own, among them random rows that are embedded and quantized as the product is to
   * find them.
   * @returns {Promise<Executor>}
   */
  async outputs() {
    const { kernels, gpu, weights, linear } = this;
    const { tokens } = this.counts;
    const { contract, choice } = this.prepared;
    const program = copiesProgram(linear, this.counts);
    const tensors = new Map([...weights].map(([name, { tensor }]) => [name, tensor]));
    const sizes = { contextLength: 1, kvCache: choice.kvCache, chunk: tokens };
    // Drafts are not verified here.
    const planned = planProgram(program, tensors, contract, gpu.abilities, sizes).filter(({ kind }) => kind !== 'few');
    const variants = distinctVariants(planned);
    await Promise.all(variants.map(({ kernel, overrides }) => kernels.compile(kernel, overrides)));
    const buffers = await gpu.allocate(`measuring ${linear.name}`, 0, () =>
      makeBuffers(gpu, program, contract, VOCABULARY, sizes),
    );
    const executor = await Executor.create(kernels, planned, weights, buffers, tokens);
    const ids = Uint32Array.from({ length: tokens }, (_, index) => index % VOCABULARY);
    gpu.queue.writeBuffer(buffers.run.ids, 0, ids);
    gpu.queue.writeBuffer(buffers.run.step, 0, new Uint32Array([0, tokens, 1, 0]));
    gpu.queue.submit([executor.encode(executor.commands(stepKind(tokens), ['body'], tokens, tokens), 1).finish()]);
    return executor;
  }

  /**
   * @param {'logits'|'random'} section outputs apart, or all the same
   * @param {Sizes} sizes
   * @param {AbortSignal} [signal]
   * @returns {Promise<number>} seconds of one product
   */
  async time(section, sizes, signal) {
    const executor = /** @type {Executor} */ (this.executor);
    const commands = executor.commands(stepKind(this.counts.tokens), [section], this.counts.tokens, this.counts.tokens);
    const rounds = await timings(this.gpu, () => executor.encode(commands, 1), sizes, signal);
    return median(rounds) / this.counts.products;
  }

  /**
   * Products that do not wait for each other. A driver that has seen a buffer written waits before it is written again,
   * so each timing has outputs of its own; it is then too short for the processor's clock.
   * @param {Sizes} sizes
   * @param {AbortSignal} [signal]
   * @returns {Promise<number>} seconds of one product
   */
  async apart(sizes, signal) {
    const { gpu } = this;
    const clock = GpuClock.of(gpu);
    if (!clock) return this.time('logits', sizes, signal);
    const found = [];
    for (let repeat = 0; repeat < sizes.repeats; repeat++) {
      throwIfAborted(signal);
      const before = new Set(gpu.buffers);
      const executor = await this.outputs();
      const [list, busy] = ['logits', 'random'].map((section) =>
        executor.encode(executor.commands('one', [/** @type {'logits'|'random'} */ (section)], 1, 1), 1).finish(),
      );
      found.push((await clock.time(list, busy)) / this.counts.products);
      for (const buffer of added(gpu, before)) gpu.free(buffer);
    }
    clock.free();
    // Some drivers have a clock that stands still.
    return median(found) > 0 ? median(found) : this.time('logits', sizes, signal);
  }

  free() {
    for (const buffer of this.made) this.gpu.free(buffer);
  }
}

/** @param {Gpu} gpu @param {Set<GPUBuffer>} before */
const added = ({ buffers }, before) => [...buffers].filter((one) => !before.has(one));

/** @param {number} tokens @returns {import('./operations.js').StepKind} */
const stepKind = (tokens) => (tokens === 1 ? 'one' : 'many');
