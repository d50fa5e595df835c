/** The header of a safetensors shard, with the caps of packer/FORMAT.md. */
import { isId } from './checks.js';
import { packError } from './errors.js';

/**
 * @typedef {{key: string, dtype: string, shape: number[], begin: number, end: number}} Entry
 *   begin, end: bytes from the start of the file
 */

export const MAX_HEADER_BYTES = 1 << 20;
/** @type {Record<string, number>} */
const BYTES = {
  BOOL: 1,
  U8: 1,
  I8: 1,
  U16: 2,
  I16: 2,
  F16: 2,
  BF16: 2,
  U32: 4,
  I32: 4,
  F32: 4,
  U64: 8,
  I64: 8,
  F64: 8,
};

/**
 * @param {Uint8Array} start the first bytes of the file, the header at least
 * @param {number} fileBytes
 * @param {string} file name for messages
 * @returns {Entry[]} in the order of their bytes
 * @throws {TercetError} with detail.rule `header-size` or `header`
 */
export function parseHeader(start, fileBytes, file) {
  /** @type {(message: string) => never} */
  const fail = (message) => {
    throw packError('header', `${file}: not a valid safetensors file: ${message}.`);
  };
  if (fileBytes < 8 || start.byteLength < 8) {
    throw packError('header-size', `${file}: ${fileBytes} bytes, too short for a safetensors header.`);
  }
  const length = new DataView(start.buffer, start.byteOffset).getBigUint64(0, true);
  if (length > BigInt(MAX_HEADER_BYTES)) {
    throw packError(
      'header-size',
      `${file}: safetensors header of ${length} bytes, expected at most ${MAX_HEADER_BYTES}.`,
    );
  }
  const dataStart = 8 + Number(length);
  if (dataStart > fileBytes || dataStart > start.byteLength) fail(`the header of ${length} bytes ends after the file`);
  if (dataStart % 8) fail(`its data begin at byte ${dataStart}, expected a multiple of 8`);
  /** @type {any} */
  let header;
  try {
    header = JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(start.subarray(8, dataStart)));
  } catch (error) {
    fail(`the header is no JSON (${/** @type {Error} */ (error).message})`);
  }
  if (typeof header !== 'object' || header === null || Array.isArray(header)) fail('the header is no JSON object');
  const entries = Object.entries(header)
    .filter(([key]) => key !== '__metadata__')
    .map(([key, value]) => entry(key, value, dataStart, fail))
    .sort((a, b) => a.begin - b.begin || a.end - b.end);
  let at = dataStart;
  for (const { key, begin, end } of entries) {
    if (begin !== at) fail(`key ${key} begins at byte ${begin - dataStart} of the data, expected ${at - dataStart}`);
    at = end;
  }
  if (at !== fileBytes) fail(`the tensors end at byte ${at}, the file at ${fileBytes}`);
  return entries;
}

/**
 * @param {string} key
 * @param {any} value
 * @param {number} dataStart
 * @param {(message: string) => never} fail
 * @returns {Entry}
 */
function entry(key, value, dataStart, fail) {
  const { dtype, shape, data_offsets: offsets } = value ?? {};
  if (typeof dtype !== 'string' || !Object.hasOwn(BYTES, dtype)) {
    fail(`key ${key} has the dtype ${JSON.stringify(dtype)}`);
  }
  if (!Array.isArray(shape) || !shape.every(isId)) fail(`key ${key} has the shape ${JSON.stringify(shape)}`);
  if (!Array.isArray(offsets) || offsets.length !== 2 || !offsets.every(isId)) {
    fail(`key ${key} has the offsets ${JSON.stringify(offsets)}`);
  }
  const bytes = shape.reduce(
    (/** @type {number} */ product, /** @type {number} */ size) => product * size,
    BYTES[dtype],
  );
  if (offsets[1] - offsets[0] !== bytes) {
    fail(`key ${key} has ${offsets[1] - offsets[0]} bytes, its shape needs ${bytes}`);
  }
  return { key, dtype, shape, begin: dataStart + offsets[0], end: dataStart + offsets[1] };
}
