/**
 * Keeps packs in the browser. A pack is kept under its URL and the SHA-256 of its pack.json, so that a changed pack
 * never mixes with an old one; the newest pack.json of a URL is remembered, so that it opens without a network.
 */
import { TercetError } from './errors.js';
import { sha256 } from './download.js';
import { quota } from './quota.js';
import { openCacheStorage } from './store_cache.js';
import { openFileSystem } from './store_files.js';
import { openMemory } from './store_memory.js';

/**
 * Chunks of one shard. Chunk i lies at i x 4 MiB.
 * @typedef {object} ShardStore
 * @property {(index: number, length: number) => Promise<Uint8Array<ArrayBuffer>|null>} get
 * @property {(index: number, length: number) => Promise<boolean>} has
 * @property {(index: number, bytes: Uint8Array<ArrayBuffer>) => Promise<void>} put
 * @property {() => Promise<void>} close
 *
 * One folder of files: a pack, or the kernels.
 * @typedef {object} Folder
 * @property {(name: string) => Promise<Uint8Array<ArrayBuffer>|null>} getFile
 * @property {(name: string, bytes: Uint8Array<ArrayBuffer>) => Promise<void>} putFile
 * @property {(name: string) => Promise<ShardStore|null>} openShard  null: another tab is writing it
 *
 * Where folders live. Names are made here and need no escaping.
 * @typedef {object} Backend
 * @property {string} kind
 * @property {(path: string[]) => Promise<Folder>} folder  made if it is not there
 * @property {(path: string[]) => Promise<string[]>} list  names of the folders in a folder
 * @property {(path: string[]) => Promise<number>} bytes  of all files below
 * @property {(path: string[]) => Promise<void>} remove
 *
 * @typedef {Folder & {storedBytes: () => Promise<number>}} PackStore
 *
 * @typedef {object} Store  what Engine.load takes as `store`
 * @property {string} kind
 * @property {(url: string, packHash: string) => Promise<PackStore>} open  makes it and drops other versions
 * @property {(url: string, packHash: string) => Promise<PackStore|null>} find  null: nothing is kept of this version
 * @property {(url: string) => Promise<Uint8Array<ArrayBuffer>|null>} latest  pack.json as last opened
 * @property {(url: string, packHash: string) => Promise<number>} bytes  kept of this version
 * @property {(url: string) => Promise<number>} stored  kept of all versions
 * @property {(url: string) => Promise<void>} remove
 * @property {(name: string) => Promise<Folder>} shelf  a folder that belongs to no pack
 */

const KEY_LENGTH = 32;
const LATEST = 'latest';

/**
 * The best storage that this thread may use.
 * @returns {Promise<Store|null>} null outside of browsers: a pack on disk needs no second copy
 */
export async function browserStore() {
  if (!globalThis.location) return null;
  return createStore((await openFileSystem()) ?? (await openCacheStorage()) ?? openMemory());
}

/**
 * @param {Backend} backend
 * @returns {Store}
 */
export function createStore(backend) {
  /** @param {string} text */
  const key = async (text) => (await sha256(new TextEncoder().encode(text))).slice(0, KEY_LENGTH);
  /** @param {string} url */
  const home = async (url) => ['packs', await key(url)];
  /** @param {string[]} path @returns {Promise<PackStore>} */
  const packStore = async (path) => {
    const folder = await guarded(backend.folder(path));
    return {
      getFile: (name) => folder.getFile(name),
      putFile: (name, bytes) => guarded(folder.putFile(name, bytes)),
      openShard: async (name) => guardShard(await guarded(folder.openShard(name))),
      storedBytes: () => backend.bytes(path),
    };
  };

  return {
    kind: backend.kind,
    async open(url, packHash) {
      const path = await home(url);
      const version = packHash.slice(0, KEY_LENGTH);
      for (const other of await backend.list(path)) {
        // A version that another tab has open stays until the next time.
        if (other !== version) await backend.remove([...path, other]).catch(() => undefined);
      }
      const opened = await packStore([...path, version]);
      await guarded(backend.folder(path).then((parent) => parent.putFile(LATEST, new TextEncoder().encode(version))));
      return opened;
    },
    async find(url, packHash) {
      const path = await home(url);
      const version = packHash.slice(0, KEY_LENGTH);
      return (await backend.list(path)).includes(version) ? packStore([...path, version]) : null;
    },
    async latest(url) {
      const path = await home(url);
      if (!(await backend.list(['packs'])).includes(path[1])) return null;
      const version = await (await backend.folder(path)).getFile(LATEST);
      if (!version) return null;
      const name = new TextDecoder().decode(version);
      if (!(await backend.list(path)).includes(name)) return null;
      const pack = await (await backend.folder([...path, name])).getFile('pack.json');
      return pack && (await sha256(pack)).startsWith(name) ? pack : null;
    },
    bytes: async (url, packHash) => backend.bytes([...(await home(url)), packHash.slice(0, KEY_LENGTH)]),
    stored: async (url) => backend.bytes(await home(url)),
    remove: async (url) => backend.remove(await home(url)),
    shelf: (name) => backend.folder(['shelves', name]),
  };
}

/**
 * @template T
 * @param {Promise<T>} writing
 * @returns {Promise<T>} a full disk as `storage-full`
 */
async function guarded(writing) {
  try {
    return await writing;
  } catch (error) {
    if (/** @type {Error} */ (error)?.name !== 'QuotaExceededError') throw error;
    throw new TercetError('storage-full', 'The browser has no room left to keep the model.', {
      detail: (await quota()) ?? {},
      cause: error,
    });
  }
}

/** @param {ShardStore|null} shard @returns {ShardStore|null} */
const guardShard = (shard) => shard && { ...shard, put: (index, bytes) => guarded(shard.put(index, bytes)) };
