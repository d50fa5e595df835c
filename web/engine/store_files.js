/** Keeps packs in the Origin Private File System, through the synchronous handles that workers have. */
import { CHUNK_BYTES } from './pack.js';

/**
 * @typedef {import('./store.js').Backend} Backend
 * @typedef {import('./store.js').Folder} Folder
 * @typedef {import('./store.js').ShardStore} ShardStore
 *
 * @typedef {object} SyncHandle  FileSystemSyncAccessHandle, which TypeScript's DOM types leave to workers
 * @property {(buffer: Uint8Array, options: {at: number}) => number} read
 * @property {(buffer: Uint8Array, options: {at: number}) => number} write
 * @property {(size: number) => void} truncate
 * @property {() => number} getSize
 * @property {() => void} flush
 * @property {() => void} close
 */

const ROOT = 'tercet';

/** @returns {Promise<Backend|null>} null where this thread has no such file system */
export async function openFileSystem() {
  const usable =
    typeof globalThis.FileSystemFileHandle === 'function' && 'createSyncAccessHandle' in FileSystemFileHandle.prototype;
  if (!usable) return null;
  try {
    const top = await navigator.storage.getDirectory();
    await top.getDirectoryHandle(ROOT, { create: true });
    return backend(top);
  } catch {
    // Some browsers have the interface and refuse it in private windows.
    return null;
  }
}

/**
 * @param {FileSystemDirectoryHandle} top
 * @returns {Backend}
 */
function backend(top) {
  return {
    kind: 'files',
    folder: async (path) => folder(await walk(top, path, true)),
    async list(path) {
      const names = [];
      for await (const [name, handle] of entries(await walk(top, path, false).catch(notFound))) {
        if (handle.kind === 'directory') names.push(name);
      }
      return names;
    },
    bytes: async (path) => bytesBelow(await walk(top, path, false).catch(notFound)),
    async remove(path) {
      const parent = await walk(top, path.slice(0, -1), false).catch(notFound);
      await parent?.removeEntry(path[path.length - 1], { recursive: true }).catch(notFound);
    },
  };
}

/**
 * @param {FileSystemDirectoryHandle} top
 * @param {string[]} path
 * @param {boolean} create
 */
async function walk(top, path, create) {
  let handle = top;
  for (const name of [ROOT, ...path]) handle = await handle.getDirectoryHandle(name, { create });
  return handle;
}

/** @param {unknown} error @returns {null} */
function notFound(error) {
  if (/** @type {Error} */ (error).name === 'NotFoundError') return null;
  throw error;
}

/**
 * @param {FileSystemDirectoryHandle|null} directory
 * @returns {AsyncIterable<[string, FileSystemHandle]>|[]}
 */
const entries = (directory) => /** @type {any} */ (directory)?.entries() ?? [];

/** @param {FileSystemDirectoryHandle|null} directory @returns {Promise<number>} */
async function bytesBelow(directory) {
  let sum = 0;
  for await (const [, handle] of entries(directory)) {
    sum +=
      handle.kind === 'directory'
        ? await bytesBelow(/** @type {FileSystemDirectoryHandle} */ (handle))
        : (await /** @type {FileSystemFileHandle} */ (handle).getFile()).size;
  }
  return sum;
}

/**
 * @param {FileSystemDirectoryHandle} directory
 * @returns {Folder}
 */
function folder(directory) {
  return {
    async getFile(name) {
      const handle = await directory.getFileHandle(name).catch(notFound);
      return handle && new Uint8Array(await (await handle.getFile()).arrayBuffer());
    },
    async putFile(name, bytes) {
      const access = await openSync(await directory.getFileHandle(name, { create: true }));
      if (!access) return;
      try {
        access.truncate(0);
        writeAll(access, bytes, 0);
        access.flush();
      } finally {
        access.close();
      }
    },
    async openShard(name) {
      const access = await openSync(await directory.getFileHandle(name, { create: true }));
      return access && shard(access);
    },
  };
}

/**
 * @param {FileSystemFileHandle} handle
 * @returns {Promise<SyncHandle|null>} null if another tab has the file open
 */
async function openSync(handle) {
  try {
    return await /** @type {any} */ (handle).createSyncAccessHandle();
  } catch (error) {
    if (/** @type {Error} */ (error).name === 'NoModificationAllowedError') return null;
    throw error;
  }
}

/**
 * @param {SyncHandle} access
 * @returns {ShardStore}
 */
function shard(access) {
  /** @type {ShardStore['has']} */
  const has = async (index, length) => length > 0 && access.getSize() >= index * CHUNK_BYTES + length;
  return {
    has,
    async get(index, length) {
      if (!(await has(index, length))) return null;
      const bytes = new Uint8Array(length);
      return access.read(bytes, { at: index * CHUNK_BYTES }) === length ? bytes : null;
    },
    put: async (index, bytes) => writeAll(access, bytes, index * CHUNK_BYTES),
    async close() {
      access.flush();
      access.close();
    },
  };
}

/**
 * @param {SyncHandle} access
 * @param {Uint8Array} bytes
 * @param {number} at
 */
function writeAll(access, bytes, at) {
  const written = access.write(bytes, { at });
  // Some browsers write less instead of throwing when the disk is full.
  if (written !== bytes.byteLength) {
    throw new DOMException(`${written} of ${bytes.byteLength} bytes were written`, 'QuotaExceededError');
  }
}
