/**
 * Runs a program on the GPU. Knows token ids and positions, nothing of text.
 *
 * A step is one command list: body, then logits, then the sampler, which writes the new id where the next step reads
 * it. So several steps go out in one submit, nothing waits for the CPU, and ids are read back late from the ring.
 */
import { bindProgram, commandsFor } from './bindings.js';
import { MAP_READ, USAGE } from './gpu.js';

/**
 * @typedef {import('./bindings.js').Command} Command
 * @typedef {import('./bindings.js').Buffers} Buffers
 * @typedef {import('./bindings.js').Choice} Choice
 * @typedef {import('./program.js').Section} Section
 * @typedef {import('./gpu.js').Gpu} Gpu
 * @typedef {'greedy'|'random'} Mode
 */

/** Work that is submitted and not finished is kept this short, in ms, so that the rest of the screen stays alive. */
const SLICE_MS = 100;
const MAX_SLICES = 32;

export class Executor {
  /**
   * @param {Gpu} gpu
   * @param {Buffers} buffers
   * @param {Record<Section, import('./bindings.js').BoundOperation[]>} bound
   * @param {{ring: number, chunk: number}} sizes ring: ids that it holds; chunk: most tokens of a prefill step
   */
  constructor(gpu, buffers, bound, { ring, chunk }) {
    this.gpu = gpu;
    this.buffers = buffers;
    this.bound = bound;
    this.ringSize = ring;
    this.chunk = chunk;
    /** @type {Map<string, Command[]>} */
    this.known = new Map();
    /** @type {GPUBuffer[]} */
    this.staging = [];
    this.slices = 4;
    /** Resolves, with the time, when the submit before the last one is done. @type {Promise<number>} */
    this.fence = Promise.resolve(0);
  }

  /**
   * @param {import('./kernels.js').Kernels} kernels
   * @param {import('./operations.js').PlannedProgram} planned
   * @param {Map<string, import('./weights.js').Weight>} weights
   * @param {Buffers} buffers
   * @param {number} chunk
   */
  static async create(kernels, planned, weights, buffers, chunk) {
    const bound = await bindProgram(kernels, planned, buffers, weights);
    return new Executor(kernels.gpu, buffers, bound, { ring: kernels.contract.constants.ring, chunk });
  }

  /**
   * @param {Uint32Array<ArrayBuffer>} sampling the `@sampling` words
   * @param {Uint32Array<ArrayBuffer>} seen a bit for each token of the prompt
   */
  begin(sampling, seen) {
    this.gpu.queue.writeBuffer(this.buffers.run.sampling, 0, sampling);
    this.gpu.queue.writeBuffer(this.buffers.run.seen, 0, seen);
  }

  /**
   * Put tokens into the cache; after the last ones choose the next token.
   * @param {number[]} ids at most `chunk`
   * @param {number} position of the first one
   * @param {Mode|null} mode null: more of the prompt follows
   * @param {AbortSignal} [signal]
   * @returns {Promise<{ids: Promise<number[]>|null}|null>} once all is submitted: `ids` will be the chosen one, if one
   *   is wanted; null: aborted, and the cache holds nothing of these tokens
   */
  async prefill(ids, position, mode, signal) {
    const { queue } = this.gpu;
    queue.writeBuffer(this.buffers.run.ids, 0, Uint32Array.from(ids));
    queue.writeBuffer(this.buffers.run.step, 0, new Uint32Array([position, ids.length, 1, 0]));
    const commands = this.commands(mode ? ['body', 'logits', mode] : ['body'], ids.length);
    const size = Math.ceil(commands.length / this.slices);
    for (let at = 0; at < commands.length; at += size) {
      await this.pace();
      if (signal?.aborted) return null;
      const encoder = this.encode(commands.slice(at, at + size), 1);
      const isLast = at + size >= commands.length;
      if (isLast && mode) return { ids: this.submitAndRead(encoder, 0, 1) };
      queue.submit([encoder.finish()]);
    }
    return { ids: null };
  }

  /**
   * Several steps of one token each, in one submit.
   * @param {Mode} mode
   * @param {number} steps
   * @param {number} produced ids chosen before, since the prompt
   * @returns {Promise<number[]>} the ids
   */
  decode(mode, steps, produced) {
    return this.submitAndRead(this.encode(this.commands(['body', 'logits', mode], 1), steps), produced, steps);
  }

  /**
   * @param {Section[]} sections
   * @param {number} tokens
   */
  commands(sections, tokens) {
    const key = `${sections} ${tokens}`;
    const known = this.known.get(key);
    if (known) return known;
    const commands = commandsFor(
      sections.flatMap((section) => this.bound[section]),
      tokens,
      1,
    );
    if (tokens === 1 || tokens === this.chunk) this.known.set(key, commands);
    return commands;
  }

  /**
   * @param {Command[]} commands
   * @param {number} times
   */
  encode(commands, times) {
    const encoder = this.gpu.device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    /** @type {GPUComputePipeline|null} */
    let current = null;
    for (let step = 0; step < times; step++) {
      for (const { pipeline, group, x, y, z } of commands) {
        if (pipeline !== current) pass.setPipeline(pipeline);
        current = pipeline;
        pass.setBindGroup(0, group);
        pass.dispatchWorkgroups(x, y, z);
      }
    }
    pass.end();
    return encoder;
  }

  /**
   * @param {GPUCommandEncoder} encoder
   * @param {number} first number of the first id since the prompt
   * @param {number} count
   * @returns {Promise<number[]>}
   */
  async submitAndRead(encoder, first, count) {
    const { gpu, ringSize } = this;
    const staging = this.staging.pop() ?? gpu.buffer('read-back', 4 * ringSize, USAGE.MAP_READ | USAGE.COPY_DST);
    encoder.copyBufferToBuffer(this.buffers.run.ring, 0, staging, 0, 4 * ringSize);
    gpu.queue.submit([encoder.finish()]);
    await gpu.alive(staging.mapAsync(MAP_READ));
    const ring = new Uint32Array(staging.getMappedRange());
    const ids = Array.from({ length: count }, (_, index) => ring[(first + index) % ringSize]);
    staging.unmap();
    this.staging.push(staging);
    return ids;
  }

  /** Wait until at most one submit is unfinished, and learn how long one takes. */
  async pace() {
    const { gpu } = this;
    const before = this.fence;
    const submitted = performance.now();
    this.fence = gpu.queue.onSubmittedWorkDone().then(async () => {
      const done = performance.now();
      const took = done - Math.max(submitted, await before);
      if (took > SLICE_MS) this.slices = Math.min(MAX_SLICES, this.slices * 2);
      else if (took < SLICE_MS / 4) this.slices = Math.max(1, this.slices >> 1);
      return done;
    });
    this.fence.catch(() => undefined);
    await gpu.alive(before);
  }
}
