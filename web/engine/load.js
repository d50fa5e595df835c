/** Loads a pack: device, pipelines, download, weights, self-check, in parallel where they can be. */
import { makeBuffers } from './bindings.js';
import { shardChunks, smallFile } from './download.js';
import { TercetError, throwIfAborted, toTercetError } from './errors.js';
import { Executor } from './executor.js';
import { Session } from './generate.js';
import { Gpu, requestDevice } from './gpu.js';
import { Kernels, PARALLEL_COMPILES } from './kernels.js';
import { bindingLimit } from './memory.js';
import { distinctVariants, expandVariant } from './operations.js';
import { parseJson } from './pack.js';
import { logitsColumns } from './program.js';
import { prepare, prepareGpu, storageProblem } from './prepare.js';
import { DownloadMeter, throttled } from './progress.js';
import { requestPersistence } from './quota.js';
import { checkSampling, samplingWords, seenBits } from './sampling.js';
import { featuresBehind, selfCheck } from './selfcheck.js';
import { ChatTokenizer } from './tokenizer.js';
import { Tuning } from './tuning.js';
import { openMemory } from './tuning_memory.js';
import { verifiesExactly } from './verification.js';
import { inParallel, together, unlessAborted } from './waiting.js';
import { WeightLoader } from './weights.js';

/**
 * @typedef {import('./prepare.js').LoadOptions} LoadOptions
 * @typedef {import('./prepare.js').Prepared} Prepared
 * @typedef {import('./progress.js').Listener} Listener
 * @typedef {import('./operations.js').PlannedStep} PlannedStep
 *
 * @typedef {object} Loaded
 * @property {Prepared} prepared
 * @property {Gpu} gpu
 * @property {Session} session
 * @property {ChatTokenizer} tokenizer
 * @property {string[]} kernels
 * @property {import('./tuning.js').TuningReport} tuning
 */

const PARALLEL_FILES = 4;
const DEFAULT_BINDING = 128 << 20;
const DEFAULT_BUFFER = 256 << 20;

/**
 * @param {string} url
 * @param {LoadOptions} options
 * @returns {Promise<Loaded>}
 */
export async function loadPack(url, options) {
  const onProgress = throttled(options.onProgress);
  onProgress({ phase: 'plan', loaded: 0, total: 1, unit: 'bytes' });
  const prepared = await prepare(url, options);
  const { adapter, planned, problems, forced } = await prepareGpu(prepared, options);
  const [problem] = [...problems, await storageProblem(prepared)].filter((one) => one !== null);
  if (problem) {
    throw new TercetError(problem.code, problem.message, {
      detail: { needed: problem.needed, available: problem.available },
    });
  }
  const plannedBytes = prepared.packBytes.byteLength + prepared.programBytes.byteLength;
  onProgress({ phase: 'plan', loaded: plannedBytes, total: plannedBytes, unit: 'bytes' });
  throwIfAborted(options.signal);

  const device =
    options.device ?? (await requestDevice(adapter, neededLimits(prepared, adapter.limits), wantedFeatures(prepared)));
  const gpu = new Gpu(device, adapter, !options.device);
  try {
    return await fill(gpu, prepared, { planned, forced }, options, onProgress);
  } catch (error) {
    // A loss also fails whatever was under way: the cause is what the person should read.
    const failure = gpu.failure ?? toTercetError(error);
    gpu.dispose();
    const needs = featuresBehind(prepared.contract, failure);
    if (needs.length) return loadPack(url, { ...options, without: [...(options.without ?? []), ...needs] });
    throw failure;
  }
}

/**
 * @param {Prepared} prepared
 * @param {GPUSupportedLimits} limits
 * @returns {Record<string, number>} limits to ask for: what the pack needs above the defaults, as far as there is
 */
function neededLimits({ memory, contract }, limits) {
  const storage = Math.max(8, ...contract.kernels.map((kernel) => kernel.bindings.length));
  return {
    maxStorageBufferBindingSize: Math.min(
      Math.max(DEFAULT_BINDING, memory.largestBuffer),
      limits.maxStorageBufferBindingSize,
    ),
    maxBufferSize: Math.min(Math.max(DEFAULT_BUFFER, memory.largestBuffer), limits.maxBufferSize),
    maxStorageBuffersPerShaderStage: Math.min(storage, limits.maxStorageBuffersPerShaderStage),
  };
}

/** @param {Prepared} prepared @returns {Set<string>} */
const wantedFeatures = ({ contract }) => new Set(contract.kernels.flatMap((kernel) => kernel.needs ?? []));

/**
 * @param {Gpu} gpu
 * @param {Prepared} prepared
 * @param {{planned: PlannedStep[], forced?: import('./forced.js').Forced}} plan
 * @param {LoadOptions} options
 * @param {Listener} onProgress
 * @returns {Promise<Loaded>}
 */
async function fill(gpu, prepared, { planned, forced }, options, onProgress) {
  const { pack, program, contract, choice, memory, files } = prepared;
  const kernels = new Kernels(gpu, contract, files);
  const limit = bindingLimit(gpu.limits, options.maxBindingBytes);
  const loader = new WeightLoader(kernels, pack, limit, (loaded, total) =>
    onProgress({ phase: 'expand', loaded, total, unit: 'tensors' }),
  );
  await loader.allocate(memory.weightsBytes);
  const vocabulary = logitsColumns(program);
  const buffers = await gpu.allocate(
    `a context of ${choice.contextLength} tokens`,
    memory.kvBytes + memory.workBytes,
    () => makeBuffers(gpu, program, contract, vocabulary, choice),
  );

  const kept = await openMemory(prepared, gpu.info, options.signal);
  const tuning = await Tuning.open(kernels, planned, { forced, memory: kept });
  const variants = usedVariants(prepared, planned, kernels);
  const [tokenizer] = await together(options.signal, [
    (signal) => download(prepared, loader, { ...options, signal }, onProgress),
    async (signal) => {
      await compileAndCheck(kernels, variants, signal, onProgress);
      await tuning.compile(signal);
      return null;
    },
  ]);
  if (!tokenizer) throw new TercetError('internal', 'The load ended without a tokenizer.');
  const executor = await Executor.create(kernels, planned, await loader.finish(), buffers, choice.chunk);
  throwIfAborted(options.signal);
  await warmUp(executor, vocabulary);
  const { contextLength } = choice;
  const logits = buffers.values[program.greedy[0].logits].data;
  await tuning.run(executor, { logits, vocabulary, contextLength });
  throwIfAborted(options.signal);
  executor.verifies = await verifiesExactly(executor, { logits, vocabulary, contextLength });
  throwIfAborted(options.signal);
  const session = new Session(executor, { vocabulary, contextLength, invalidId: contract.constants.invalid_id });
  await session.measureCosts();
  onProgress({ phase: 'ready', loaded: 1, total: 1, unit: 'kernels' });
  const names = [...new Set(variants.map(({ kernel }) => kernel.name))];
  return { prepared, gpu, session, tokenizer, kernels: names, tuning: tuning.report() };
}

/**
 * @param {Prepared} prepared
 * @param {WeightLoader} loader
 * @param {LoadOptions & {signal: AbortSignal}} options
 * @param {Listener} onProgress
 * @returns {Promise<ChatTokenizer>}
 */
async function download(prepared, loader, { signal, retry }, onProgress) {
  const { source, store, pack, packHash, packBytes, programBytes, downloadBytes } = prepared;
  void requestPersistence();
  const kept = (await store?.open(source.url, packHash)) ?? null;
  await kept?.putFile('pack.json', packBytes);
  if (prepared.programFetched) await kept?.putFile('program.json', programBytes);
  const meter = new DownloadMeter(downloadBytes, onProgress);
  meter.fromStore(0);
  if (prepared.programFetched) meter.fromNetwork(programBytes.byteLength);
  else meter.fromStore(programBytes.byteLength);

  /** @type {Map<string, Uint8Array<ArrayBuffer>>} */
  const files = new Map();
  const small = Object.entries(pack.files).filter(([name]) => name !== 'program.json');
  /** @type {((fetching: import('./download.js').Fetching) => Promise<void>)[]} */
  const tasks = [
    ...small.map(([name, listed]) => async (/** @type {import('./download.js').Fetching} */ fetching) => {
      files.set(name, await smallFile(name, listed, fetching));
    }),
    ...pack.shards.map((shard) => async (/** @type {import('./download.js').Fetching} */ fetching) => {
      const take = loader.shard(shard.file, shard.bytes);
      for await (const { bytes } of shardChunks(shard, fetching)) await take(bytes);
    }),
  ];
  const onNetwork = (/** @type {number} */ bytes) => meter.fromNetwork(bytes);
  const onStored = (/** @type {number} */ bytes) => meter.fromStore(bytes);
  await inParallel(tasks, PARALLEL_FILES, signal, (task, inner) =>
    task({ source, store: kept, signal: inner, retry, onNetwork, onStored }),
  );

  /** @param {string} name */
  const json = (name) => parseJson(/** @type {Uint8Array<ArrayBuffer>} */ (files.get(name)), name);
  return new ChatTokenizer(json('tokenizer.json'), json('tokenizer_config.json'));
}

/**
 * @param {Prepared} prepared
 * @param {PlannedStep[]} planned
 * @param {Kernels} kernels
 * @returns {import('./operations.js').Variant[]} `expand` first: weights wait for it
 */
function usedVariants({ pack, contract }, planned, { gpu }) {
  const ternary = [...pack.tensors.values()].find(({ encoding }) => encoding === 'ternary');
  return [...(ternary ? [expandVariant(contract, gpu.abilities, ternary, 1)] : []), ...distinctVariants(planned)];
}

/**
 * @param {Kernels} kernels
 * @param {import('./operations.js').Variant[]} variants
 * @param {AbortSignal} signal
 * @param {Listener} onProgress
 */
async function compileAndCheck(kernels, variants, signal, onProgress) {
  let loaded = 0;
  const report = () => onProgress({ phase: 'compile', loaded, total: variants.length, unit: 'kernels' });
  report();
  await unlessAborted(
    inParallel(variants, PARALLEL_COMPILES, signal, async ({ kernel, overrides }) => {
      await kernels.compile(kernel, overrides, signal);
      loaded += 1;
      report();
    }),
    signal,
  );
  await selfCheck(
    kernels,
    variants,
    (done, total) => onProgress({ phase: 'check', loaded: done, total, unit: 'kernels' }),
    signal,
  );
}

/**
 * One token through the whole model: drivers finish their work on a pipeline at its first use.
 * @param {Executor} executor
 * @param {number} vocabulary
 */
async function warmUp(executor, vocabulary) {
  executor.begin(samplingWords(checkSampling({ seed: 0 })), seenBits([], vocabulary));
  const step = await executor.prefill([0], 0, 'random');
  await step?.ids;
}
