/** Keeps packs in the Cache API, one entry a chunk: for threads and browsers without synchronous file handles. */

/**
 * @typedef {import('./store.js').Backend} Backend
 * @typedef {import('./store.js').Folder} Folder
 */

const NAME = 'tercet';
/** Entries are named by URLs that no server is ever asked for. */
const ROOT = '/tercet-store';

/** @returns {Promise<Backend|null>} */
export async function openCacheStorage() {
  if (!globalThis.caches || !globalThis.location) return null;
  try {
    return backend(await caches.open(NAME));
  } catch {
    return null;
  }
}

/**
 * @param {Cache} cache
 * @returns {Backend}
 */
function backend(cache) {
  /** @param {string[]} path */
  const address = (path) => new URL([ROOT, ...path].join('/'), location.origin).href;
  /** @param {string[]} path @returns {Promise<string[]>} addresses of all entries below */
  const below = async (path) => {
    const prefix = `${address(path)}/`;
    return (await cache.keys()).map((request) => request.url).filter((url) => url.startsWith(prefix));
  };
  return {
    kind: 'cache',
    folder: async (path) => folder(cache, `${address(path)}/`),
    async list(path) {
      const start = address(path).length + 1;
      const rests = (await below(path)).map((url) => url.slice(start)).filter((rest) => rest.includes('/'));
      return [...new Set(rests.map((rest) => rest.slice(0, rest.indexOf('/'))))];
    },
    async bytes(path) {
      const sizes = await Promise.all(
        (await below(path)).map(async (url) => Number((await cache.match(url))?.headers.get('content-length'))),
      );
      return sizes.reduce((sum, size) => sum + size, 0);
    },
    async remove(path) {
      await Promise.all((await below(path)).map((url) => cache.delete(url)));
    },
  };
}

/**
 * @param {Cache} cache
 * @param {string} prefix
 * @returns {Folder}
 */
function folder(cache, prefix) {
  /** @type {Folder['getFile']} */
  const get = async (name) => {
    const response = await cache.match(prefix + name);
    return response ? new Uint8Array(await response.arrayBuffer()) : null;
  };
  /** @type {Folder['putFile']} */
  const put = (name, bytes) => {
    const headers = { 'content-length': String(bytes.byteLength), 'content-type': 'application/octet-stream' };
    return cache.put(prefix + name, new Response(bytes, { headers }));
  };
  return {
    getFile: get,
    putFile: put,
    openShard: async (name) => ({
      async get(index, length) {
        const bytes = await get(`${name}.${index}`);
        return bytes?.byteLength === length ? bytes : null;
      },
      has: async (index, length) => length > 0 && Boolean(await cache.match(`${prefix}${name}.${index}`)),
      put: (index, bytes) => put(`${name}.${index}`, bytes),
      close: async () => undefined,
    }),
  };
}
