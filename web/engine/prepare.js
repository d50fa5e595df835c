/** Everything that can be known, and refused, before a weight is fetched. */
import { isCount, show } from './checks.js';
import { checkContract } from './contract.js';
import { RETRY, sha256, smallFile, wholeFile } from './download.js';
import { TercetError, packError } from './errors.js';
import { adapterOf, requestAdapter, sizeText } from './gpu.js';
import { parseForced } from './forced.js';
import { KernelFiles } from './kernels.js';
import { KV_KINDS, bindingLimit, limitProblems, memoryHint, planMemory } from './memory.js';
import { planProgram } from './operations.js';
import { MAX_JSON_BYTES, checkPack, parseJson, totalBytes } from './pack.js';
import { checkContext, checkProgram, logitsColumns } from './program.js';
import { quota } from './quota.js';
import { openSource } from './source.js';
import { browserStore } from './store.js';

/**
 * @typedef {import('./memory.js').KvKind} KvKind
 * @typedef {import('./memory.js').Problem} Problem
 * @typedef {import('./store.js').Store} Store
 * @typedef {import('./pack.js').Pack} Pack
 *
 * @typedef {object} LoadOptions
 * @property {(event: import('./progress.js').ProgressEvent) => void} [onProgress]
 * @property {AbortSignal} [signal]
 * @property {number} [contextLength]  tokens; default: the model's, at most 4096
 * @property {KvKind} [kvCache]  default f16
 * @property {string} [kernels]  forces kernels, for debugging: `norm_linear=off,linear_ternary.ROWS=32`; `default`: times
 *   nothing
 * @property {number} [prefillChunk]  most tokens of a prompt that are computed at once; default 512, where that is quick
 * @property {string[]} [without]  features of the device that are left alone
 * @property {GPUDevice} [device]  stays the caller's
 * @property {string|URL} [shadersUrl]
 * @property {Store|null} [store]  null: keep nothing
 * @property {import('./download.js').Retry} [retry]
 * @property {number} [maxBindingBytes]  use no larger bindings than this, for drivers that promise more than they hold
 *
 * @typedef {object} Prepared
 * @property {import('./source.js').Source} source
 * @property {Store|null} store
 * @property {KernelFiles} files
 * @property {import('./contract.js').Contract} contract
 * @property {Pack} pack
 * @property {Uint8Array<ArrayBuffer>} packBytes
 * @property {string} packHash
 * @property {import('./program.js').Program} program
 * @property {Uint8Array<ArrayBuffer>} programBytes
 * @property {boolean} programFetched  over the network, not out of the store
 * @property {{contextLength: number, kvCache: KvKind, chunk: number}} choice
 * @property {import('./memory.js').MemoryPlan} memory
 * @property {number} downloadBytes
 * @property {number} storedBytes
 *
 * @typedef {object} Plan  what a person is told before a load
 * @property {string} name
 * @property {number} downloadBytes
 * @property {number} storedBytes
 * @property {number} weightsBytes
 * @property {number} kvBytes
 * @property {number} kvBytesPerToken
 * @property {number} workBytes
 * @property {number} totalBytes
 * @property {number} contextLength
 * @property {number} maxContextLength
 * @property {boolean} fits
 * @property {Problem[]} problems
 */

const DEFAULT_CONTEXT = 4096;
const DEFAULT_CHUNK = 512;
const MAX_CHUNK = 1024;

/**
 * @param {string} url
 * @param {LoadOptions} options
 * @returns {Promise<Prepared>}
 */
export async function prepare(url, options) {
  const { signal, retry } = options;
  const source = openSource(url);
  const store = options.store !== undefined ? options.store : source.remote ? await browserStore() : null;
  const files = new KernelFiles(options.shadersUrl, (await store?.shelf('shaders')) ?? null);
  const [kernelsJson, packBytes] = await Promise.all([
    files.json('kernels.json', signal),
    packJson(source, store, options),
  ]);
  const contract = checkContract(kernelsJson);
  const packHash = await sha256(packBytes);
  const pack = checkPack(parseJson(packBytes, 'pack.json'), `${source.url}pack.json`);
  const kept = (await store?.find(source.url, packHash)) ?? null;
  let programFetched = 0;
  const onNetwork = (/** @type {number} */ bytes) => {
    programFetched += bytes;
  };
  const programBytes = await smallFile('program.json', pack.files['program.json'], {
    source,
    store: kept,
    signal,
    retry,
    onNetwork,
  });
  const program = checkProgram(parseJson(programBytes, 'program.json'), contract, pack.tensors);
  checkContext(program, pack.tensors, pack.context_length);
  if (logitsColumns(program) !== pack.vocab_size) {
    const found = `${logitsColumns(program)} logits, vocab_size is ${pack.vocab_size}`;
    throw packError('program-shape', `${source.url}program.json gives ${found}.`);
  }
  const choice = choose(pack, options);
  return {
    source,
    store,
    files,
    contract,
    pack,
    packBytes,
    packHash,
    program,
    programBytes,
    programFetched: programFetched > 0,
    choice,
    memory: planMemory(pack, program, contract, choice),
    downloadBytes: totalBytes(pack),
    storedBytes: (await kept?.storedBytes()) ?? 0,
  };
}

/**
 * pack.json as it is now, or as it was last time if the network is gone.
 * @param {import('./source.js').Source} source
 * @param {Store|null} store
 * @param {LoadOptions} options
 */
async function packJson(source, store, { signal, retry = RETRY }) {
  const kept = (await store?.latest(source.url)) ?? null;
  try {
    const attempts = kept ? 1 : retry.attempts;
    return await wholeFile(
      'pack.json',
      MAX_JSON_BYTES,
      { source, store: null, signal, retry: { ...retry, attempts } },
      'no-cache',
    );
  } catch (error) {
    const isNetwork = error instanceof TercetError && error.code === 'download-failed' && 'attempts' in error.detail;
    if (kept && isNetwork) return kept;
    throw error;
  }
}

/**
 * @param {Pack} pack
 * @param {LoadOptions} options
 */
function choose(
  pack,
  { contextLength = Math.min(pack.context_length, DEFAULT_CONTEXT), kvCache = 'f16', prefillChunk = DEFAULT_CHUNK },
) {
  if (!isCount(contextLength) || contextLength > pack.context_length) {
    throw new TercetError(
      'bad-request',
      `contextLength is ${show(contextLength)}, expected an integer from 1 to ${pack.context_length}, the model's own.`,
    );
  }
  if (!KV_KINDS.includes(kvCache)) {
    throw new TercetError('bad-request', `kvCache is ${show(kvCache)}, expected one of ${KV_KINDS.join(', ')}.`);
  }
  if (!isCount(prefillChunk) || prefillChunk > MAX_CHUNK) {
    throw new TercetError(
      'bad-request',
      `prefillChunk is ${show(prefillChunk)}, expected an integer from 1 to ${MAX_CHUNK}.`,
    );
  }
  return { contextLength, kvCache, chunk: Math.min(prefillChunk, contextLength) };
}

/**
 * The adapter, and the program planned for it.
 * @param {Prepared} prepared
 * @param {Pick<LoadOptions, 'device'|'maxBindingBytes'|'kernels'|'without'>} options
 */
export async function prepareGpu({ program, pack, contract, choice }, { device, maxBindingBytes, kernels, without = [] }) {
  const forced = kernels === undefined ? undefined : parseForced(kernels, contract);
  const language = [...new Set(contract.kernels.flatMap((kernel) => kernel.language ?? []))];
  const found = device ? await adapterOf(device, language) : await requestAdapter();
  const features = new Set([...found.abilities.features].filter((name) => !without.includes(name)));
  const adapter = { ...found, abilities: { ...found.abilities, features } };
  const limit = bindingLimit(adapter.limits, maxBindingBytes);
  const problems = limitProblems(pack, program, contract, choice, limit);
  return {
    adapter,
    forced,
    // Whoever has problems does not run the plan, whose matrices cannot be cut.
    planned: problems.length ? [] : planProgram(program, pack.tensors, contract, adapter.abilities, { ...choice, limit, forced }),
    problems,
  };
}

/**
 * @param {Prepared} prepared
 * @returns {Promise<Problem|null>}
 */
export async function storageProblem({ store, source, downloadBytes, storedBytes }) {
  if (!store || store.kind === 'memory') return null;
  const needed = Math.max(0, downloadBytes - storedBytes);
  const room = await quota();
  // Other versions of the pack make room for this one.
  const available = (room?.available ?? Infinity) + (await store.stored(source.url)) - storedBytes;
  if (needed <= available) return null;
  return {
    code: 'storage-full',
    message: `The browser has ${sizeText(available)} of storage left for this site, the model needs ${sizeText(needed)}.`,
    needed,
    available,
  };
}

/**
 * @param {string} url
 * @param {LoadOptions} options
 * @returns {Promise<Plan>}
 */
export async function planOf(url, options) {
  const prepared = await prepare(url, options);
  const { pack, memory, choice, downloadBytes, storedBytes } = prepared;
  /** @type {(Problem|null)[]} */
  const problems = [await storageProblem(prepared), memoryHint(memory.totalBytes)];
  try {
    problems.unshift(...(await prepareGpu(prepared, options)).problems);
  } catch (error) {
    if (!(error instanceof TercetError)) throw error;
    problems.unshift({ code: error.code, message: error.message, needed: 0, available: 0 });
  }
  const found = problems.filter((problem) => problem !== null);
  const { weightsBytes, kvBytes, kvBytesPerToken, workBytes } = memory;
  return {
    name: pack.name,
    downloadBytes,
    storedBytes: Math.min(storedBytes, downloadBytes),
    weightsBytes,
    kvBytes,
    kvBytesPerToken,
    workBytes,
    totalBytes: memory.totalBytes,
    contextLength: choice.contextLength,
    maxContextLength: pack.context_length,
    fits: found.length === 0,
    problems: found,
  };
}
