/**
 * Runs a program on the GPU. Knows token ids and positions, nothing of text.
 *
 * A step is one command list: body, then logits, then the sampler, which writes the new id where the next step reads
 * it. So several steps go out in one submit, nothing waits for the CPU, and ids are read back late from the ring.
 */
import { Binder, commandsFor } from './bindings.js';
import { TercetError } from './errors.js';
import { MAP_READ, USAGE } from './gpu.js';
import { SECTIONS } from './program.js';

/**
 * @typedef {import('./bindings.js').Command} Command
 * @typedef {import('./bindings.js').Buffers} Buffers
 * @typedef {import('./bindings.js').Choice} Choice
 * @typedef {import('./program.js').Section} Section
 * @typedef {import('./gpu.js').Gpu} Gpu
 * @typedef {import('./bindings.js').BoundOperation} BoundOperation
 * @typedef {import('./operations.js').StepKind} StepKind
 * @typedef {{kind: StepKind, keys: number, program: Record<Section, BoundOperation[]>}} BoundStep
 * @typedef {'greedy'|'random'} Mode
 */

/** Work that is submitted and not finished is kept this short, in ms, so that the rest of the screen stays alive. */
const SLICE_MS = 100;
const MAX_SLICES = 32;
/** Of the step buffer: position, tokens, rows, produced. */
const STEP_BYTES = 16;
const PRODUCED = 3;

export class Executor {
  /**
   * @param {Gpu} gpu
   * @param {Binder} binder
   * @param {BoundStep[]} bound
   * @param {{ring: number, chunk: number, keyChunk: number, mostVerified: number}} sizes ring: ids that it holds; chunk:
   *   most tokens of a prefill step; keyChunk: keys of a workgroup; mostVerified: most tokens of a verification
   */
  constructor(gpu, binder, bound, { ring, chunk, keyChunk, mostVerified }) {
    this.gpu = gpu;
    this.binder = binder;
    this.buffers = binder.buffers;
    this.bound = bound;
    this.ringSize = ring;
    this.chunk = chunk;
    this.keyChunk = keyChunk;
    this.mostVerified = mostVerified;
    /** Whether drafts can be verified: the same tokens give the same bits, alone and together. */
    this.verifies = false;
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
   * @param {import('./operations.js').PlannedStep[]} planned
   * @param {Map<string, import('./weights.js').Weight>} weights
   * @param {Buffers} buffers
   * @param {number} chunk
   */
  static async create(kernels, planned, weights, buffers, chunk) {
    const binder = new Binder(kernels, buffers, weights);
    const bound = await Promise.all(
      planned.map(async ({ kind, keys, program }) => ({ kind, keys, program: await binder.program(program) })),
    );
    const { ring, key_chunk: keyChunk, most_drafted: mostVerified } = kernels.contract.constants;
    return new Executor(kernels.gpu, binder, bound, { ring, chunk, keyChunk, mostVerified });
  }

  /**
   * Take other kernels, or constants, for some operations.
   * @param {import('./operations.js').PlannedStep[]} planned as in `create`, with these operations changed
   * @param {Set<import('./operations.js').PlannedOperation>} changed
   */
  async rebind(planned, changed) {
    for (const [index, { program }] of planned.entries()) {
      for (const section of SECTIONS) {
        const bound = this.bound[index].program[section];
        await Promise.all(
          program[section].map(async (operation, at) => {
            if (changed.has(operation)) bound[at] = await this.binder.operation(operation);
          }),
        );
      }
    }
    this.known.clear();
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
    const kind = ids.length === 1 ? 'one' : 'many';
    const commands = this.commands(kind, mode ? ['body', 'logits', mode] : ['body'], ids.length, position + ids.length);
    const size = Math.ceil(commands.length / this.slices);
    for (let at = 0; at < commands.length; at += size) {
      await this.pace();
      if (signal?.aborted) return null;
      const encoder = this.encode(commands.slice(at, at + size), 1);
      const isLast = at + size >= commands.length;
      if (isLast && mode) return { ids: this.submitAndRead(encoder).then((ring) => this.idsFrom(ring, 0, 1)) };
      queue.submit([encoder.finish()]);
    }
    return { ids: null };
  }

  /**
   * Several steps of one token each, in one submit.
   * @param {Mode} mode
   * @param {number} steps
   * @param {number} produced ids chosen before, since the prompt
   * @param {number} position tokens in the cache before the first step
   * @returns {Promise<number[]>} the ids
   */
  async decode(mode, steps, produced, position) {
    const commands = this.commands('one', ['body', 'logits', mode], 1, position + steps);
    const ring = await this.submitAndRead(this.encode(commands, steps));
    return this.idsFrom(ring, produced, steps);
  }

  /**
   * One step for the token that was chosen last and for drafts after it. What is chosen is what decoding one by one
   * chooses: drafts are taken as long as they are that, and one token comes after them.
   * @param {Mode} mode
   * @param {number[]} ids the last chosen token, which is not in the cache yet, and the drafts; at most `mostVerified`
   * @param {number} position tokens in the cache
   * @param {number} produced ids chosen before, since the prompt
   * @returns {Promise<number[]>} the drafts that were taken and the token after them
   */
  async verify(mode, ids, position, produced) {
    const { queue } = this.gpu;
    queue.writeBuffer(this.buffers.run.ids, 0, Uint32Array.from(ids));
    queue.writeBuffer(this.buffers.run.step, 0, new Uint32Array([position, ids.length, ids.length, produced]));
    const kind = ids.length === 1 ? 'one' : 'few';
    const commands = this.commands(kind, ['body', 'logits', mode], ids.length, position + ids.length);
    const ring = await this.submitAndRead(this.encode(commands, 1));
    const taken = ring[this.ringSize + PRODUCED] - produced;
    return this.idsFrom(ring, produced, taken);
  }

  /**
   * @param {StepKind} kind
   * @param {Section[]} sections
   * @param {number} tokens T, and R in a verification
   * @param {number} keys at least as many as the last token sees
   */
  commands(kind, sections, tokens, keys) {
    // Rounded up to a power of two, so that few lists are made.
    const rounded = Math.max(this.keyChunk, 2 ** Math.ceil(Math.log2(keys)));
    const key = `${kind} ${sections} ${tokens} ${rounded}`;
    const known = this.known.get(key);
    if (known) return known;
    const bound = this.bound.find((step) => step.kind === kind && rounded <= step.keys);
    if (!bound) throw new TercetError('internal', `No kernels run steps of ${kind} tokens here.`);
    const operations = sections.flatMap((section) => bound.program[section]);
    const commands = commandsFor(operations, tokens, kind === 'few' ? tokens : 1, rounded);
    // Of prompts only the usual chunks, so that few lists are kept.
    if (kind !== 'many' || tokens === this.chunk || (tokens & (tokens - 1)) === 0) this.known.set(key, commands);
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
   * @returns {Promise<Uint32Array>} the ring of ids, then the step
   */
  async submitAndRead(encoder) {
    const { gpu, ringSize, buffers } = this;
    const size = 4 * ringSize + STEP_BYTES;
    const staging = this.staging.pop() ?? gpu.buffer('read-back', size, USAGE.MAP_READ | USAGE.COPY_DST);
    encoder.copyBufferToBuffer(buffers.run.ring, 0, staging, 0, 4 * ringSize);
    encoder.copyBufferToBuffer(buffers.run.step, 0, staging, 4 * ringSize, STEP_BYTES);
    gpu.queue.submit([encoder.finish()]);
    await gpu.alive(staging.mapAsync(MAP_READ));
    const words = new Uint32Array(staging.getMappedRange()).slice();
    staging.unmap();
    this.staging.push(staging);
    return words;
  }

  /**
   * @param {Uint32Array} ring
   * @param {number} first number of the first id since the prompt
   * @param {number} count
   */
  idsFrom(ring, first, count) {
    return Array.from({ length: count }, (_, index) => ring[(first + index) % this.ringSize]);
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
