/**
 * Brings the files of a pack here: from the store where they are kept already, else from the source. Every byte is
 * checked against its SHA-256 before anyone sees it. Broken connections are resumed at the last good chunk.
 */
import { TercetError, packError, throwIfAborted } from './errors.js';
import { CHUNK_BYTES } from './pack.js';
import { Interrupted, readAll } from './source.js';

/**
 * @typedef {import('./source.js').Source} Source
 * @typedef {import('./pack.js').Shard} Shard
 * @typedef {import('./store.js').PackStore} PackStore
 * @typedef {import('./store.js').ShardStore} ShardStore
 *
 * @typedef {object} Retry
 * @property {number} attempts  failures in a row before giving up
 * @property {number} delayMs  pause after the first failure; doubles with each one
 * @property {number} corrupt  how often one chunk is fetched again before the file is given up
 *
 * @typedef {object} Fetching
 * @property {Source} source
 * @property {PackStore|null} store  null: keep nothing
 * @property {AbortSignal} [signal]
 * @property {Retry} [retry]
 * @property {(bytes: number) => void} [onStored]  bytes that came out of the store
 * @property {(bytes: number) => void} [onNetwork]  bytes that came over the network; negative: they came in vain
 *
 * @typedef {{index: number, bytes: Uint8Array<ArrayBuffer>, stored: boolean}} Chunk
 */

/** @type {Retry} */
export const RETRY = Object.freeze({ attempts: 5, delayMs: 500, corrupt: 2 });
const MAX_DELAY_MS = 8000;

/** A chunk whose bytes are not those that pack.json lists. */
class Corrupt extends Error {}

/**
 * @param {Uint8Array<ArrayBuffer>} bytes
 * @returns {Promise<string>} hex
 */
export async function sha256(bytes) {
  const digest = new Uint8Array(await crypto.subtle.digest('SHA-256', bytes));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, '0')).join('');
}

/**
 * The checked chunks of a shard, front to back; those from the network are put into the store.
 * @param {Shard} shard
 * @param {Fetching} fetching
 * @returns {AsyncGenerator<Chunk>}
 * @throws {TercetError} `download-failed`, `chunk-corrupt`, `pack-invalid` (length), `storage-full`, `aborted`
 */
export async function* shardChunks(shard, fetching) {
  const { store, signal } = fetching;
  const kept = (await store?.openShard(shard.file)) ?? null;
  try {
    const count = shard.chunks.length;
    for (let index = 0; index < count;) {
      throwIfAborted(signal);
      const bytes = await keptChunk(kept, shard, index);
      if (bytes) {
        fetching.onStored?.(bytes.byteLength);
        yield { index: index++, bytes, stored: true };
        continue;
      }
      // What is kept is a prefix of the file, unless a chunk of it went bad: then only that one is fetched.
      const end = kept && (await kept.has(index + 1, lengthOf(shard, index + 1))) ? index + 1 : count;
      for await (const chunk of networkChunks(shard, index, end, fetching)) {
        await kept?.put(chunk.index, chunk.bytes);
        yield chunk;
      }
      index = end;
    }
  } finally {
    await kept?.close();
  }
}

/**
 * @param {ShardStore|null} kept
 * @param {Shard} shard
 * @param {number} index
 * @returns {Promise<Uint8Array<ArrayBuffer>|null>} null if it is not there or no longer what it was
 */
async function keptChunk(kept, shard, index) {
  const bytes = (await kept?.get(index, lengthOf(shard, index))) ?? null;
  return bytes && (await sha256(bytes)) === shard.chunks[index] ? bytes : null;
}

/** @param {Shard} shard @param {number} index */
const lengthOf = (shard, index) => Math.min(CHUNK_BYTES, shard.bytes - index * CHUNK_BYTES);

/**
 * @param {Shard} shard
 * @param {number} first
 * @param {number} end chunk after the last one
 * @param {Fetching} fetching
 * @returns {AsyncGenerator<Chunk>}
 */
async function* networkChunks(shard, first, end, fetching) {
  const { signal, onNetwork, retry = RETRY } = fetching;
  let index = first;
  let failures = 0;
  let corrupt = 0;
  while (index < end) {
    try {
      // After a bad chunk the browser's own cache is not asked again: it may hold the bad bytes.
      for await (const bytes of assemble(shard, index, end, fetching, corrupt ? 'reload' : 'no-store')) {
        if ((await sha256(bytes)) !== shard.chunks[index]) {
          onNetwork?.(-bytes.byteLength);
          throw new Corrupt();
        }
        failures = 0;
        corrupt = 0;
        yield { index: index++, bytes, stored: false };
      }
    } catch (error) {
      if (error instanceof Corrupt) {
        corrupt += 1;
        if (corrupt > retry.corrupt) throw corruptError(shard, index, corrupt);
      } else if (error instanceof Interrupted) {
        failures += 1;
        if (failures >= retry.attempts) throw failedError(shard.file, index * CHUNK_BYTES, failures, error);
        await pause(retry.delayMs * 2 ** (failures - 1), signal);
      } else {
        throw error;
      }
    }
  }
}

/**
 * Whole chunks out of the pieces that arrive.
 * @param {Shard} shard
 * @param {number} index
 * @param {number} end
 * @param {Fetching} fetching
 * @param {RequestCache} cache
 * @returns {AsyncGenerator<Uint8Array<ArrayBuffer>>}
 */
async function* assemble(shard, index, end, { source, signal, onNetwork }, cache) {
  const range = { begin: index * CHUNK_BYTES, end: Math.min(end * CHUNK_BYTES, shard.bytes), total: shard.bytes };
  let chunk = new Uint8Array(lengthOf(shard, index));
  let filled = 0;
  try {
    for await (const part of source.open(shard.file, range, signal, cache)) {
      onNetwork?.(part.byteLength);
      for (let at = 0; at < part.byteLength;) {
        const piece = part.subarray(at, at + chunk.byteLength - filled);
        chunk.set(piece, filled);
        filled += piece.byteLength;
        at += piece.byteLength;
        if (filled < chunk.byteLength) continue;
        filled = 0;
        yield chunk;
        index += 1;
        if (index < end) chunk = new Uint8Array(lengthOf(shard, index));
      }
    }
  } finally {
    if (filled) onNetwork?.(-filled);
  }
}

/**
 * A small file that pack.json lists, checked; kept in the store.
 * @param {string} file
 * @param {{bytes: number, sha256: string}} listed
 * @param {Fetching} fetching
 * @returns {Promise<Uint8Array<ArrayBuffer>>}
 */
export async function smallFile(file, listed, fetching) {
  const { store } = fetching;
  const kept = (await store?.getFile(file)) ?? null;
  if (kept && kept.byteLength === listed.bytes && (await sha256(kept)) === listed.sha256) {
    fetching.onStored?.(kept.byteLength);
    return kept;
  }
  for (let corrupt = 0; ; corrupt++) {
    const bytes = await wholeFile(file, listed.bytes, fetching, corrupt ? 'reload' : 'no-cache');
    if (bytes.byteLength !== listed.bytes) {
      throw packError('length', `${file}: ${bytes.byteLength} bytes, pack.json lists ${listed.bytes}.`, { file });
    }
    if ((await sha256(bytes)) === listed.sha256) {
      await store?.putFile(file, bytes);
      return bytes;
    }
    if (corrupt >= (fetching.retry ?? RETRY).corrupt) {
      throw packError('hash', `${file}: its SHA-256 is not the one that pack.json lists.`, { file });
    }
  }
}

/**
 * @param {string} file
 * @param {number} maxBytes
 * @param {Fetching} fetching
 * @param {RequestCache} cache
 */
export async function wholeFile(file, maxBytes, { source, signal, retry = RETRY, onNetwork }, cache) {
  for (let failures = 1; ; failures++) {
    try {
      const bytes = await readAll(source, file, maxBytes, signal, cache);
      onNetwork?.(bytes.byteLength);
      return bytes;
    } catch (error) {
      if (!(error instanceof Interrupted)) throw error;
      if (failures >= retry.attempts) throw failedError(file, 0, failures, error);
      await pause(retry.delayMs * 2 ** (failures - 1), signal);
    }
  }
}

/**
 * @param {Shard} shard
 * @param {number} index
 * @param {number} times
 */
function corruptError(shard, index, times) {
  return new TercetError(
    'chunk-corrupt',
    `${shard.file}: bytes from ${index * CHUNK_BYTES} arrived ${times} times with another SHA-256 than pack.json lists.`,
    {
      detail: { rule: 'hash', file: shard.file, chunk: index, times },
    },
  );
}

/**
 * @param {string} file
 * @param {number} offset
 * @param {number} attempts
 * @param {Error} cause
 */
function failedError(file, offset, attempts, cause) {
  return new TercetError(
    'download-failed',
    `The download of ${file} stopped at byte ${offset} and did not go on after ${attempts} attempts (${cause.message}).`,
    {
      detail: { file, offset, attempts, reason: cause.message },
      cause,
    },
  );
}

/**
 * @param {number} milliseconds
 * @param {AbortSignal} [signal]
 * @returns {Promise<void>}
 */
function pause(milliseconds, signal) {
  return new Promise((/** @type {(value: void) => void} */ resolve) => {
    const done = () => {
      clearTimeout(timer);
      signal?.removeEventListener('abort', done);
      resolve();
    };
    const timer = setTimeout(done, Math.min(milliseconds, MAX_DELAY_MS));
    signal?.addEventListener('abort', done);
  }).then(() => throwIfAborted(signal));
}
