/**
 * `pack.json`: the rules of packer/FORMAT.md that hold before a shard is opened. The Python twin is
 * packer/manifest.py; the names of the rules are the same and stand in detail.rule.
 */
import { isCount, isId, isNumber, isObject, isText, show } from './checks.js';
import { packError } from './errors.js';
import { ENCODINGS, fixedGroup } from './tensor_layout.js';

/**
 * @typedef {{file: string, bytes: number, chunks: string[]}} Shard  chunks: SHA-256 (hex) of each 4 MiB
 * @typedef {{bytes: number, sha256: string}} PackFile
 *
 * @typedef {object} Tensor
 * @property {string} name
 * @property {'ternary'|'q8'|'q4'|'q4a'|'nvfp4'|'mxfp4'|'f16'|'f32'} encoding
 * @property {number[]} shape  [N, K] or [K]
 * @property {'parts'|'row'|'group'|null} scale  of ternary tensors
 * @property {number[]} parts  rows of each part
 * @property {number} group  columns that share a scale; 0: none
 * @property {number[]} slices  rows of each slice
 *
 * @typedef {object} Pack
 * @property {string} name
 * @property {string} description
 * @property {string} license
 * @property {string} family
 * @property {'a8'|'a16'|'f32'} activations
 * @property {number} parameters
 * @property {number} vocab_size
 * @property {number} context_length
 * @property {number} bits_per_weight
 * @property {number|null} ternary_bits_per_weight
 * @property {number} resident_bytes
 * @property {{layers: number, kv_heads: number, head_dim: number}} kv
 * @property {number|null} bos_id
 * @property {number[]} eos_ids
 * @property {string|null} grade
 * @property {Shard[]} shards
 * @property {Record<string, PackFile>} files
 * @property {Map<string, Tensor>} tensors
 */

export const CHUNK_BYTES = 4 << 20;
export const MAX_JSON_BYTES = 16 << 20;
const MAX_SHARD_BYTES = 64 << 20;
const GRADES = ['lossless', 'good', 'usable', 'degraded', 'BROKEN'];
const SCALES = ['parts', 'row', 'group'];
const LISTED = ['program.json', 'tokenizer.json', 'tokenizer_config.json', 'report.json'];
const FILE_NAME = /^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$/;

/** @param {unknown} value */
const isHash = (value) => isText(value) && /^[0-9a-f]{64}$/.test(value);

/** @param {unknown} value */
const isSafe = (value) => isNumber(value) && Math.abs(value) <= Number.MAX_SAFE_INTEGER;

/** @type {Record<string, [(value: any) => boolean, string]>} */
const FIELDS = {
  name: [isText, 'a string'],
  description: [isText, 'a string'],
  license: [isText, 'a string'],
  family: [isText, 'a string'],
  source: [isObject, 'an object'],
  activations: [(value) => ['a8', 'a16', 'f32'].includes(value), 'a8, a16 or f32'],
  parameters: [isCount, 'a positive integer'],
  vocab_size: [isCount, 'a positive integer'],
  context_length: [isCount, 'a positive integer'],
  bits_per_weight: [isSafe, 'a number'],
  ternary_bits_per_weight: [(value) => value === null || isSafe(value), 'a number or null'],
  resident_bytes: [isCount, 'a positive integer'],
  kv: [
    (value) => isObject(value) && ['layers', 'kv_heads', 'head_dim'].every((name) => isCount(value[name])),
    'positive layers, kv_heads and head_dim',
  ],
  bos_id: [(value) => value === null || isId(value), 'an integer or null'],
  eos_ids: [Array.isArray, 'a list of integers'],
  grade: [(value) => value === null || GRADES.includes(value), `null or one of ${GRADES.join(', ')}`],
  chunk_bytes: [(value) => value === CHUNK_BYTES, String(CHUNK_BYTES)],
  shards: [(value) => Array.isArray(value) && value.every(isShard), 'a list of {file, bytes, chunks}'],
  files: [
    (value) =>
      isObject(value) &&
      Object.values(value).every((file) => isObject(file) && isId(file.bytes) && isHash(file.sha256)),
    'an object of {bytes, sha256}',
  ],
  tensors: [isObject, 'an object'],
};

/** @param {any} shard */
function isShard(shard) {
  return (
    isObject(shard) &&
    isText(shard.file) &&
    isCount(shard.bytes) &&
    Array.isArray(shard.chunks) &&
    shard.chunks.every(isHash)
  );
}

/**
 * A JSON object in UTF-8.
 * @param {Uint8Array} bytes
 * @param {string} where file name for messages
 * @returns {Record<string, unknown>}
 */
export function parseJson(bytes, where) {
  if (bytes.byteLength > MAX_JSON_BYTES) {
    throw packError('json', `${where}: ${bytes.byteLength} bytes, expected at most ${MAX_JSON_BYTES}.`);
  }
  let value;
  try {
    value = JSON.parse(new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes));
  } catch (error) {
    throw packError('json', `${where}: not valid JSON (${/** @type {Error} */ (error).message}).`);
  }
  if (!isObject(value)) throw packError('json', `${where}: expected a JSON object, found ${show(value)}.`);
  return value;
}

/**
 * @param {Record<string, any>} json parsed pack.json
 * @param {string} [where] for messages
 * @returns {Pack}
 * @throws {TercetError} with detail.rule
 */
export function checkPack(json, where = 'pack.json') {
  if (json.format !== 'tercet-pack' || json.version !== 1) {
    throw packError(
      'version',
      `${where}: format and version are ${show([json.format, json.version])}, expected ["tercet-pack",1].`,
    );
  }
  for (const [field, [check, expected]] of Object.entries(FIELDS)) {
    if (!Object.hasOwn(json, field)) {
      throw packError('field', `${where}: the field ${field} is missing, expected ${expected}.`);
    }
    if (!check(json[field])) {
      throw packError('field', `${where}: the field ${field} is ${show(json[field])}, expected ${expected}.`);
    }
  }
  if (!json.eos_ids.length || !json.eos_ids.every((/** @type {unknown} */ id) => isId(id) && id < json.vocab_size)) {
    throw packError(
      'eos',
      `${where}: eos_ids is ${show(json.eos_ids)}, expected token ids below ${json.vocab_size}, at least one.`,
    );
  }
  checkFiles(json, where);
  const tensors = new Map(Object.entries(json.tensors).map(([name, entry]) => [name, checkTensor(name, entry, where)]));
  return /** @type {Pack} */ ({ ...json, tensors });
}

/** @param {Record<string, any>} json @param {string} where */
function checkFiles(json, where) {
  const names = new Set();
  for (const name of [...json.shards.map((/** @type {Shard} */ shard) => shard.file), ...Object.keys(json.files)]) {
    if (!FILE_NAME.test(name) || name === 'pack.json' || names.has(name)) {
      throw packError('path', `${where}: the file name ${show(name)} is not allowed or listed twice.`);
    }
    names.add(name);
  }
  for (const name of LISTED) {
    if (!Object.hasOwn(json.files, name)) throw packError('missing', `${where}: files does not list ${name}.`);
  }
  for (const { file, bytes, chunks } of json.shards) {
    if (bytes > MAX_SHARD_BYTES) {
      throw packError('shard-size', `${where}: ${file} has ${bytes} bytes, expected at most ${MAX_SHARD_BYTES}.`);
    }
    const expected = Math.ceil(bytes / CHUNK_BYTES);
    if (chunks.length !== expected) {
      throw packError('field', `${where}: ${file} lists ${chunks.length} chunks, expected ${expected}.`);
    }
  }
}

/**
 * @param {string} name
 * @param {any} entry
 * @param {string} pack
 * @returns {Tensor}
 */
function checkTensor(name, entry, pack) {
  const where = `${pack}: tensor ${name}`;
  if (!isObject(entry)) throw packError('field', `${where}: expected an object, found ${show(entry)}.`);
  const { encoding, shape, scale = null } = entry;
  if (!ENCODINGS.includes(encoding)) {
    throw packError('encoding', `${where}: encoding is ${show(encoding)}, expected one of ${ENCODINGS.join(', ')}.`);
  }
  if (
    !Array.isArray(shape) ||
    shape.length < 1 ||
    shape.length > 2 ||
    !shape.every((size) => isCount(size) && size < 2 ** 31)
  ) {
    throw packError('shape', `${where}: shape is ${show(shape)}, expected one or two positive integers below 2^31.`);
  }
  if (shape.length === 1 && encoding !== 'f32') {
    throw packError('encoding', `${where}: a vector is ${encoding}, expected f32.`);
  }
  if (encoding === 'ternary' ? !SCALES.includes(scale) : scale !== null) {
    throw packError(
      'encoding',
      `${where}: scale is ${show(scale)}, expected ${encoding === 'ternary' ? `one of ${SCALES.join(', ')}` : 'none'}.`,
    );
  }
  if (scale === 'group' && (!isCount(entry.group) || entry.group % 64)) {
    throw packError('shape', `${where}: group is ${show(entry.group)}, expected a multiple of 64.`);
  }
  const rows = shape.length === 2 ? shape[0] : 1;
  return {
    name,
    encoding,
    shape,
    scale,
    parts: scale === 'parts' ? rowCounts(entry.parts, rows, 'parts', where) : [],
    group: scale === 'group' ? entry.group : fixedGroup(encoding),
    slices: rowCounts(entry.slices, rows, 'slices', where),
  };
}

/**
 * @param {any} value
 * @param {number} total
 * @param {string} what
 * @param {string} where
 * @returns {number[]}
 */
function rowCounts(value, total, what, where) {
  const good = Array.isArray(value) && value.every(isCount) && value.reduce((sum, rows) => sum + rows, 0) === total;
  if (!good) {
    throw packError(
      'slices',
      `${where}: ${what} is ${show(value)}, expected positive row counts that add up to ${total}.`,
    );
  }
  return value;
}

/** @param {Pack} pack @returns {number} bytes of all files that pack.json lists */
export function totalBytes(pack) {
  const sizes = [...pack.shards, ...Object.values(pack.files)].map((file) => file.bytes);
  return sizes.reduce((sum, bytes) => sum + bytes, 0);
}
