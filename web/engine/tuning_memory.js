/** What loads chose by timing, kept for an adapter and a pack, as long as the kernels stay what they are. */
import { isObject } from './checks.js';
import { sha256 } from './download.js';

/**
 * @typedef {import('./store.js').Folder} Folder
 * @typedef {import('./tuning.js').Setting} Setting
 * @typedef {{folder: Pick<Folder, 'getFile'|'putFile'>, file: string, version: string}} Memory  version: of the kernels
 */

const FORMAT = 1;
const NAME_LENGTH = 32;
const utf8 = new TextEncoder();

/**
 * @param {import('./prepare.js').Prepared} prepared
 * @param {import('./gpu.js').AdapterInfo|null} adapter
 * @param {AbortSignal} [signal]
 * @returns {Promise<Memory|null>} null: nothing is kept here
 */
export async function openMemory({ store, files, contract, packHash }, adapter, signal) {
  const folder = (await store?.shelf('tuning').catch(() => null)) ?? null;
  if (!folder) return null;
  const timed = contract.kernels.filter((kernel) => kernel.timed?.length || kernel.rival);
  const names = ['kernels.json', ...new Set(timed.map(({ file }) => file))].sort();
  const hashes = await Promise.all(names.map(async (name) => sha256(await files.read(name, signal))));
  const name = await sha256(utf8.encode(JSON.stringify([adapter, packHash])));
  return {
    folder,
    file: `${name.slice(0, NAME_LENGTH)}.json`,
    version: await sha256(utf8.encode(hashes.join())),
  };
}

/**
 * @param {Memory} memory
 * @param {{key: string, settings: Setting[]}[]} kinds
 * @returns {Promise<Map<string, number>>} the setting of each kind that is known; of other or broken files nothing
 */
export async function recall({ folder, file, version }, kinds) {
  /** @type {Map<string, number>} */
  const chosen = new Map();
  try {
    const kept = JSON.parse(new TextDecoder().decode((await folder.getFile(file)) ?? utf8.encode('null')));
    if (!isObject(kept) || kept.format !== FORMAT || kept.version !== version || !isObject(kept.choices)) return chosen;
    for (const { key, settings } of kinds) {
      const index = settings.findIndex((setting) => isSame(setting, kept.choices[key]));
      if (index >= 0) chosen.set(key, index);
    }
  } catch {
    chosen.clear();
  }
  return chosen;
}

/**
 * @param {Memory} memory
 * @param {{key: string, settings: Setting[]}[]} kinds
 * @param {Map<string, number>} chosen
 * @returns {Promise<void>} does not fail: what cannot be kept is measured again
 */
export async function remember({ folder, file, version }, kinds, chosen) {
  const known = kinds.flatMap(({ key, settings }) => {
    const index = chosen.get(key);
    return index === undefined ? [] : [[key, settings[index]]];
  });
  const text = JSON.stringify({ format: FORMAT, version, choices: Object.fromEntries(known) });
  await folder.putFile(file, utf8.encode(text)).catch(() => undefined);
}

/** @param {Setting} setting @param {any} other */
const isSame = ({ kernel, tuned }, other) =>
  isObject(other) &&
  other.kernel === kernel &&
  isObject(other.tuned) &&
  Object.keys(tuned).length === Object.keys(other.tuned).length &&
  Object.entries(tuned).every(([name, value]) => other.tuned[name] === value);
