/**
 * How fast this device runs the loaded model: what its memory gives, what each matrix, a token and a prompt take, and
 * how near that is to what the memory allows. Uses the loaded model's own session; its cache is filled with random
 * tokens meanwhile and is empty afterwards.
 */
import { throwIfAborted } from './errors.js';
import { measureBandwidth } from './measure_bandwidth.js';
import { bytesPerToken, distinctLinears, layersOf } from './measure_copies.js';
import { measureLinear } from './measure_linear.js';
import { Runs } from './measure_runs.js';
import { Noise } from './measure_timing.js';
import { verifySeconds } from './measure_verify.js';

/**
 * @typedef {import('./prepare.js').Prepared} Prepared
 * @typedef {import('./gpu.js').Gpu} Gpu
 * @typedef {import('./generate.js').Session} Session
 * @typedef {{done: number, total: number, label: string}} MeasureProgress
 * @typedef {{onProgress?: (progress: MeasureProgress) => void, signal?: AbortSignal, quick?: boolean}} MeasureOptions
 *
 * What is measured: the model that `index.js` holds.
 * @typedef {{prepared: Prepared, gpu: Gpu, session: Session, loadSeconds: number,
 *   info: {tuning: import('./tuning.js').TuningReport}}} Measured
 *
 * Keys as in packer/bench_report.py, where their units stand.
 * @typedef {object} MeasureReport
 * @property {string} date
 * @property {'browser'|'node'} backend
 * @property {import('./gpu.js').AdapterInfo|null} adapter
 * @property {{name: string, parameters: number, contextLength: number, kvCache: string, activations: string}} model
 * @property {import('./measure_bandwidth.js').Bandwidth} bandwidth
 * @property {import('./measure_linear.js').LinearReport[]} linears
 * @property {{context: number, tokensPerSecond: number, spread: number}[]} decode
 * @property {{tokens: number, tokensPerSecond: number}[]} prefill
 * @property {import('./measure_verify.js').VerifyReport[]} verify
 * @property {number} firstTokenSeconds
 * @property {number} loadSeconds
 * @property {number} dispatchesPerToken
 * @property {number} dispatchesPerLayer
 * @property {number} cpuMsPerToken
 * @property {{bytesPerToken: number, tokensPerSecond: number, ratio: number}} limit
 * @property {Record<string, Record<string, number>>} kernels
 * @property {object[]} peers
 *
 * How much is measured. seconds: least of one timing; repeats: timings, of which the median counts; budget: seconds
 * after which they are not repeated; copyBytes: of weights that a matrix goes round in; products: of a timing;
 * batch: tokens of a product of many; tokens: of a decode timing.
 * @typedef {{seconds: number, repeats: number, budget: number, bufferBytes: number, copyBytes: number,
 *   products: number, batch: number, tokens: number, contexts: number[], prompts: number[]}} Sizes
 */

/** @type {Record<'full'|'quick'|'software', Sizes>} */
const SIZES = {
  full: {
    seconds: 0.1,
    repeats: 5,
    budget: 4,
    bufferBytes: 1 << 30,
    copyBytes: 256 << 20,
    products: 256,
    batch: 512,
    tokens: 256,
    contexts: [128, 1024, 4096],
    prompts: [128, 512, 2048],
  },
  quick: {
    seconds: 0.03,
    repeats: 3,
    budget: 0.6,
    bufferBytes: 256 << 20,
    copyBytes: 128 << 20,
    products: 128,
    batch: 128,
    tokens: 64,
    contexts: [128, 1024],
    prompts: [128, 512],
  },
  // A program on the processor: its figures say little, but the run must end soon.
  software: {
    seconds: 0,
    repeats: 1,
    budget: 0,
    bufferBytes: 4 << 20,
    copyBytes: 1 << 18,
    products: 1,
    batch: 4,
    tokens: 3,
    contexts: [8],
    prompts: [4],
  },
};

/**
 * @param {Measured} measured
 * @param {MeasureOptions} [options]
 * @returns {Promise<MeasureReport>}
 * @throws {import('./errors.js').TercetError} `aborted`, `busy` and what the GPU may throw
 */
export async function measure(measured, { onProgress, signal, quick = false } = {}) {
  const { prepared, gpu, session, loadSeconds } = measured;
  session.checkIdle();
  const sizes = SIZES[gpu.info?.software ? 'software' : quick ? 'quick' : 'full'];
  const { pack, program, choice, memory, contract } = prepared;
  const linears = distinctLinears(program, pack.tensors);
  const contexts = fitting(sizes.contexts, choice.contextLength - sizes.tokens);
  const prompts = fitting(sizes.prompts, choice.contextLength - 1);
  const stages = new Stages(3 + linears.length + contexts.length + prompts.length, onProgress, signal);
  const device = await measureDevice(measured, linears, sizes, stages, signal);
  const model = await measureModel(session, contexts, prompts, sizes, stages, signal);
  stages.finish();
  const [first] = model.decode;
  const bytes = bytesPerToken(pack, program, contract, memory.kvBytesPerToken, first.context);
  const most = device.bandwidth.bytesPerSecond / bytes;
  return {
    date: new Date().toISOString(),
    backend: /** @type {any} */ (globalThis).process?.versions?.node ? 'node' : 'browser',
    adapter: gpu.info,
    model: {
      name: pack.name,
      parameters: pack.parameters,
      contextLength: choice.contextLength,
      kvCache: choice.kvCache,
      activations: pack.activations,
    },
    bandwidth: device.bandwidth,
    linears: device.linears,
    decode: model.decode,
    prefill: model.prefill,
    verify: model.verify,
    firstTokenSeconds: model.firstTokenSeconds,
    loadSeconds,
    ...dispatches(session, program),
    cpuMsPerToken: model.cpuMsPerToken,
    limit: { bytesPerToken: bytes, tokensPerSecond: most, ratio: first.tokensPerSecond / most },
    kernels: measured.info.tuning.kernels,
    peers: [],
  };
}

/** What is done, one thing after another, and told. */
class Stages {
  /**
   * @param {number} total
   * @param {MeasureOptions['onProgress']} onProgress
   * @param {AbortSignal} [signal]
   */
  constructor(total, onProgress, signal) {
    this.total = total;
    this.onProgress = onProgress;
    this.signal = signal;
    this.done = 0;
  }

  /**
   * @template T
   * @param {string} label
   * @param {() => Promise<T>} work
   */
  async run(label, work) {
    throwIfAborted(this.signal);
    this.tell(label);
    const result = await work();
    this.done += 1;
    return result;
  }

  finish() {
    this.tell('done');
  }

  /** @param {string} label */
  tell(label) {
    this.onProgress?.({ done: this.done, total: this.total, label });
  }
}

/**
 * The memory, and each matrix alone.
 * @param {Measured} measured
 * @param {import('./measure_copies.js').Linear[]} linears
 * @param {Sizes} sizes
 * @param {Stages} stages
 * @param {AbortSignal} [signal]
 */
async function measureDevice({ prepared, gpu, session }, linears, sizes, stages, signal) {
  const before = new Set(gpu.buffers);
  // Nobody may ask the model meanwhile: it would be in the way, and its new buffers would be taken for ours.
  session.running = true;
  try {
    const noise = new Noise(gpu);
    const bandwidth = await stages.run('reading memory', () => measureBandwidth(prepared, gpu, noise, sizes, signal));
    /** @type {import('./measure_linear.js').LinearReport[]} */
    const found = [];
    for (const linear of linears) {
      const [rows, columns] = linear.tensor.shape;
      const timed = await stages.run(`the matrix ${linear.name}, ${rows} x ${columns}`, () =>
        measureLinear(prepared, gpu, noise, linear, sizes, signal),
      );
      found.push({ ...timed, share: timed.bytes / timed.seconds / bandwidth.bytesPerSecond });
    }
    return { bandwidth, linears: found };
  } finally {
    release(gpu, before);
    session.running = false;
  }
}

/**
 * The model as it is used.
 * @param {Session} session
 * @param {number[]} contexts
 * @param {number[]} prompts
 * @param {Sizes} sizes
 * @param {Stages} stages
 * @param {AbortSignal} [signal]
 */
async function measureModel(session, contexts, prompts, sizes, stages, signal) {
  const runs = new Runs(session, sizes, signal);
  try {
    const decode = [];
    for (const context of contexts) {
      decode.push(await stages.run(`writing after ${context} tokens`, () => runs.decode(context)));
    }
    /** @type {number[]} */
    const seconds = [];
    for (const tokens of prompts) {
      seconds.push(await stages.run(`reading ${tokens} tokens`, () => runs.prefill(tokens)));
    }
    const verify = await stages.run('verifying drafts', () => verifySeconds(session, contexts[0], sizes, signal));
    const cpuMsPerToken = await stages.run('work of the processor', () => runs.cpu());
    const prefill = prompts.map((tokens, index) => ({ tokens, tokensPerSecond: tokens / seconds[index] }));
    return { decode, prefill, verify, firstTokenSeconds: seconds[0], cpuMsPerToken };
  } finally {
    session.reuse([]);
  }
}

/**
 * @param {Gpu} gpu
 * @param {Set<GPUBuffer>} before what is kept
 */
function release(gpu, before) {
  for (const buffer of [...gpu.buffers]) if (!before.has(buffer)) gpu.free(buffer);
}

/**
 * The sizes as far as there is room, the largest that fits in place of those that do not.
 * @param {number[]} wanted ascending
 * @param {number} most
 */
export const fitting = (wanted, most) => [...new Set(wanted.map((size) => Math.max(1, Math.min(size, most))))];

/**
 * @param {Session} session
 * @param {import('./program.js').Program} program
 */
function dispatches({ executor }, program) {
  const embeds = program.body.filter(({ op }) => op === 'embed' || op === 'position').length;
  const body = executor.commands('one', ['body'], 1, 1).length;
  return {
    dispatchesPerToken: executor.commands('one', ['body', 'logits', 'greedy'], 1, 1).length,
    dispatchesPerLayer: (body - embeds) / layersOf(program),
  };
}
