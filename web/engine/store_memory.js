/** Keeps packs as long as the thread lives: where there is no storage, and in tests. */

/**
 * @typedef {import('./store.js').Backend} Backend
 */

/** Larger packs are not kept in memory beside the GPU's copy. */
const MAX_BYTES = 512 << 20;

/**
 * @param {Map<string, Uint8Array<ArrayBuffer>>} [files] by path
 * @returns {Backend}
 */
export function openMemory(files = shared) {
  /** @param {string[]} path */
  const below = (path) => [...files.keys()].filter((name) => name.startsWith(`${path.join('/')}/`));
  /** @param {string} name @param {Uint8Array<ArrayBuffer>} bytes */
  const put = async (name, bytes) => {
    let sum = bytes.byteLength;
    for (const kept of files.values()) sum += kept.byteLength;
    if (sum <= MAX_BYTES) files.set(name, bytes);
  };
  return {
    kind: 'memory',
    async folder(path) {
      const prefix = `${path.join('/')}/`;
      return {
        getFile: async (name) => files.get(prefix + name) ?? null,
        putFile: (name, bytes) => put(prefix + name, bytes),
        openShard: async (name) => ({
          async get(index, length) {
            const bytes = files.get(`${prefix}${name}.${index}`);
            return bytes?.byteLength === length ? bytes : null;
          },
          has: async (index, length) => length > 0 && files.has(`${prefix}${name}.${index}`),
          put: (index, bytes) => put(`${prefix}${name}.${index}`, bytes),
          close: async () => undefined,
        }),
      };
    },
    async list(path) {
      const start = path.join('/').length + 1;
      const rests = below(path)
        .map((name) => name.slice(start))
        .filter((rest) => rest.includes('/'));
      return [...new Set(rests.map((rest) => rest.slice(0, rest.indexOf('/'))))];
    },
    bytes: async (path) => below(path).reduce((sum, name) => sum + (files.get(name)?.byteLength ?? 0), 0),
    async remove(path) {
      for (const name of below(path)) files.delete(name);
    },
  };
}

/** @type {Map<string, Uint8Array<ArrayBuffer>>} */
const shared = new Map();
