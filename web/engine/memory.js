/** What a model needs on the GPU at a context length, before anything is downloaded or allocated. */
import { TercetError } from './errors.js';
import { sizeText } from './gpu.js';
import { isInteger } from './operation_check.js';
import { scaleWords } from './tensor_layout.js';

/**
 * @typedef {import('./pack.js').Pack} Pack
 * @typedef {import('./pack.js').Tensor} Tensor
 * @typedef {import('./program.js').Program} Program
 * @typedef {import('./program.js').Value} Value
 * @typedef {import('./contract.js').Contract} Contract
 * @typedef {'f16'|'f32'|'q8'} KvKind
 * @typedef {{maxStorageBufferBindingSize: number, maxBufferSize: number}} BufferLimits
 * @typedef {{row: number, rows: number}} Piece  rows of a weight tensor that share a buffer
 * @typedef {{data: number, scale: number}} CacheBytes
 *
 * Sizes in bytes.
 * @typedef {object} MemoryPlan
 * @property {number} weightsBytes
 * @property {number} kvBytes
 * @property {number} kvBytesPerToken
 * @property {number} workBytes  values of a step, tables, read-back
 * @property {number} totalBytes
 * @property {number} largestBuffer
 *
 * @typedef {{code: import('./errors.js').ErrorCode, message: string, needed: number, available: number}} Problem
 */

/** Rows of a piece are a multiple of this, so that its scales, four bytes a word, are whole words. */
const PIECE_ROWS = 64;
/** Bytes of a head's key or value, by kind. @type {Record<KvKind, number>} */
const KV_ELEMENT_BYTES = { f32: 4, f16: 2, q8: 1 };
/** @type {readonly KvKind[]} */
export const KV_KINDS = Object.freeze(['f16', 'f32', 'q8']);
const SCALE_BYTES = 4;
/** A GPU that shares the computer's memory gets about this much of it. */
const MEMORY_SHARE = 0.7;
/** Browsers report no more than this much memory, in GiB. */
const MAX_REPORTED_GIB = 8;

/**
 * @param {BufferLimits} limits
 * @param {number} [most] a limit of the caller's own
 * @returns {number} bytes that one binding may have
 */
export const bindingLimit = (limits, most = Infinity) =>
  Math.min(limits.maxStorageBufferBindingSize, limits.maxBufferSize, most);

/**
 * u32 words of a row, resident and on disk.
 * @param {Tensor} tensor a matrix
 * @param {Contract} contract
 */
export function rowWords({ encoding, shape }, contract) {
  const {
    block,
    block_words: words,
    disk_block: diskBlock,
    disk_block_words: diskWords,
  } = contract.encodings[encoding];
  return { resident: Math.ceil(shape[1] / block) * words, disk: Math.ceil(shape[1] / diskBlock) * diskWords };
}

/**
 * Cut a matrix into pieces that one binding can hold.
 * @param {Tensor} tensor
 * @param {Contract} contract
 * @param {number} limit bytes of a binding
 * @returns {Piece[]}
 * @throws {TercetError} `limit-too-small`
 */
export function pieces(tensor, contract, limit) {
  const rows = tensor.shape[0];
  const bytes = 4 * rowWords(tensor, contract).resident;
  if (rows * bytes <= limit) return [{ row: 0, rows }];
  const most = Math.floor(limit / bytes / PIECE_ROWS) * PIECE_ROWS;
  if (most === 0) throw tooSmall(`${PIECE_ROWS} rows of the tensor ${tensor.name}`, PIECE_ROWS * bytes, limit);
  return Array.from({ length: Math.ceil(rows / most) }, (_, index) => ({
    row: index * most,
    rows: Math.min(most, rows - index * most),
  }));
}

/**
 * @param {{heads: number, head_dim: number}} cache
 * @param {KvKind} kind
 * @returns {CacheBytes} of one token
 */
export const cacheBytes = (cache, kind) => ({
  data: cache.heads * cache.head_dim * KV_ELEMENT_BYTES[kind],
  scale: kind === 'q8' ? cache.heads * SCALE_BYTES : 0,
});

/**
 * Bytes of the buffers of a value: one of f32, or the three planes of integer activations.
 * @param {Value} value
 * @param {number} rows
 * @returns {Record<string, number>}
 */
export function valueBytes({ dtype, shape }, rows) {
  const [, columns] = shape;
  if (!isInteger(dtype)) return { data: 4 * rows * columns };
  const blocks = Math.ceil(columns / 64);
  return { q: rows * blocks * 64 * (dtype === 'a16' ? 2 : 1), scale: 4 * rows, sums: 4 * rows * blocks };
}

/**
 * Most rows of a value: of a prompt's step or, where those are more, of a verification.
 * @param {Value} value
 * @param {Contract} contract
 * @param {number} chunk tokens of a prefill step
 */
export const valueRows = ({ shape }, { constants }, chunk) =>
  shape[0] === 'R' ? constants.most_drafted : Math.max(chunk, constants.most_drafted);

/**
 * What `pick` and `draw` leave for `accept`: a key and an id a part and row.
 * @param {Contract} contract
 * @param {number} vocabulary
 */
export function picksBytes(contract, vocabulary) {
  const parts = partSizes(contract).map((part) => Math.ceil(vocabulary / part));
  return 8 * Math.max(...parts) * contract.constants.most_drafted;
}

/**
 * What `weigh` leaves for `draw`, a row: 256 sums of two words a part, and a key a logit.
 * @param {Contract} contract
 * @param {number} vocabulary
 * @returns {{bins: number, keys: number}}
 */
export function weightsBytes(contract, vocabulary) {
  const { most_drafted: rows } = contract.constants;
  const counts = partSizes(contract).map((part) => ({ part, parts: Math.ceil(vocabulary / part) }));
  return {
    bins: 4 * 256 * 2 * rows * Math.max(...counts.map(({ parts }) => parts)),
    keys: 4 * rows * Math.max(...counts.map(({ part, parts }) => part * parts)),
  };
}

/** Logits of a part, of each operation that has parts of them. @param {Contract} contract */
const partSizes = ({ rewrites }) =>
  rewrites.flatMap(({ into }) => into.filter(({ part }) => part).map(({ part }) => Number(part)));

/**
 * What `rope_attention` leaves for `attention_merge`, over all layers the most.
 * @param {Program} program
 * @param {Contract} contract
 * @param {number} contextLength
 */
export function partsBytes({ body }, { constants }, contextLength) {
  const rows = constants.most_drafted * Math.ceil(contextLength / constants.key_chunk);
  const sizes = body
    .filter(({ op }) => op === 'attention')
    .map((op) => 16 * rows * op.heads * (Math.floor(op.head_dim / 4) + 1));
  return Math.max(0, ...sizes);
}

/**
 * @param {Pack} pack
 * @param {Program} program
 * @param {Contract} contract
 * @param {{contextLength: number, kvCache: KvKind, chunk: number}} choice chunk: tokens of a prefill step
 * @returns {MemoryPlan}
 */
export function planMemory(pack, program, contract, { contextLength, kvCache, chunk }) {
  const sizes = { weights: 0, kvPerToken: 0, work: 0, largest: 0 };
  for (const tensor of pack.tensors.values()) {
    const isVector = tensor.shape.length === 1;
    const data = isVector ? 4 * tensor.shape[0] : 4 * tensor.shape[0] * rowWords(tensor, contract).resident;
    sizes.weights += data + (isVector ? 0 : 4 * scaleWords(tensor, tensor.shape[0]));
    sizes.largest = Math.max(sizes.largest, data);
  }
  for (const cache of Object.values(program.caches)) {
    const { data, scale } = cacheBytes(cache, kvCache);
    sizes.kvPerToken += data + scale;
    sizes.largest = Math.max(sizes.largest, data * contextLength);
  }
  for (const table of Object.values(program.tables)) sizes.work += 8 * table.inv_freq.length * contextLength;
  const parts = partsBytes(program, contract, contextLength);
  const { bins, keys } = weightsBytes(contract, pack.vocab_size);
  sizes.work += parts + picksBytes(contract, pack.vocab_size) + bins + keys;
  sizes.largest = Math.max(sizes.largest, parts, bins, keys);
  for (const value of Object.values(program.values)) {
    for (const bytes of Object.values(valueBytes(value, valueRows(value, contract, chunk)))) {
      sizes.work += bytes;
      sizes.largest = Math.max(sizes.largest, bytes);
    }
  }
  const kvBytes = sizes.kvPerToken * contextLength;
  return {
    weightsBytes: sizes.weights,
    kvBytes,
    kvBytesPerToken: sizes.kvPerToken,
    workBytes: sizes.work,
    totalBytes: sizes.weights + kvBytes + sizes.work,
    largestBuffer: sizes.largest,
  };
}

/**
 * What the adapter's limits say against a plan.
 * @param {Pack} pack
 * @param {Program} program
 * @param {Contract} contract
 * @param {{contextLength: number, kvCache: KvKind, chunk: number}} choice
 * @param {number} limit bytes of a binding
 * @returns {Problem[]}
 */
export function limitProblems(pack, program, contract, { contextLength, kvCache, chunk }, limit) {
  /** @type {Problem[]} */
  const problems = [];
  /** @type {(what: string, needed: number) => void} */
  const check = (what, needed) => {
    if (needed <= limit) return;
    const { code, message } = tooSmall(what, needed, limit);
    problems.push({ code, message, needed, available: limit });
  };
  for (const tensor of pack.tensors.values()) {
    if (tensor.shape.length === 2) {
      check(
        `${PIECE_ROWS} rows of the tensor ${tensor.name}`,
        Math.min(PIECE_ROWS, tensor.shape[0]) * 4 * rowWords(tensor, contract).resident,
      );
    }
  }
  const caches = Object.values(program.caches).map((cache) => cacheBytes(cache, kvCache).data);
  const perToken = Math.max(0, ...caches);
  if (perToken * contextLength > limit) {
    check(`a cache of ${contextLength} tokens (at most ${Math.floor(limit / perToken)} fit)`, perToken * contextLength);
  }
  check(`attention over ${contextLength} tokens`, partsBytes(program, contract, contextLength));
  for (const [name, value] of Object.entries(program.values)) {
    const bytes = valueBytes(value, valueRows(value, contract, chunk));
    check(`the value ${name}`, Math.max(...Object.values(bytes)));
  }
  return problems;
}

/**
 * A guess from the size of the computer's memory, where the browser tells it: no browser tells the GPU's.
 * @param {number} totalBytes
 * @returns {Problem|null}
 */
export function memoryHint(totalBytes) {
  const gib = /** @type {any} */ (globalThis.navigator)?.deviceMemory;
  if (typeof gib !== 'number' || gib >= MAX_REPORTED_GIB) return null;
  const available = gib * 2 ** 30 * MEMORY_SHARE;
  if (totalBytes <= available) return null;
  return {
    code: 'out-of-memory',
    message: `This model needs ${sizeText(totalBytes)}; this device likely has less free for the GPU (it reports ${gib} GiB of memory).`,
    needed: totalBytes,
    available,
  };
}

/** @param {string} what @param {number} needed @param {number} available */
function tooSmall(what, needed, available) {
  return new TercetError(
    'limit-too-small',
    `${what} needs a buffer of ${sizeText(needed)}, this GPU allows ${sizeText(available)}.`,
    { detail: { needed, available } },
  );
}
