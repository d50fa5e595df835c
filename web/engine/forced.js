/**
 * Kernels that a person forces, for debugging: `?kernels=` of the page, the option `kernels` of a load. The Python twin
 * is shaders/forced.py.
 */
import { show } from './checks.js';
import { TercetError } from './errors.js';

/**
 * @typedef {import('./contract.js').Contract} Contract
 * @typedef {{off: ReadonlySet<string>, tuned: ReadonlyMap<string, Record<string, number>>, defaults: boolean}} Forced
 *   by name of kernel: those that are not used, and tuned constants; defaults: nothing is timed or remembered
 */

const SETTING = /^(\w+)(?:=off|\.([A-Z_]+)=([1-9]\d{0,3}))$/;

/**
 * @param {string} text comma-separated: `norm_linear=off` leaves a kernel out, `linear_ternary.ROWS=32` sets a constant,
 *   `default` times nothing
 * @param {Contract} contract
 * @returns {Forced}
 * @throws {TercetError} `bad-request` naming the setting, and what there is
 */
export function parseForced(text, contract) {
  if (typeof text !== 'string') throw refused(`kernels is ${show(text)}, expected a text`);
  /** @type {Set<string>} */
  const off = new Set();
  /** @type {Map<string, Record<string, number>>} */
  const tuned = new Map();
  let defaults = false;
  for (const setting of text.split(',').map((part) => part.trim())) {
    if (!setting) continue;
    if (setting === 'default') {
      defaults = true;
      continue;
    }
    const [, name, constant, value] = SETTING.exec(setting) ?? [];
    if (!name) throw refused(`${show(setting)} is no setting, expected default, KERNEL=off or KERNEL.CONSTANT=NUMBER`);
    const kernel = contract.kernels.find((one) => one.name === name);
    if (!kernel) throw refused(`there is no kernel ${show(name)}; known are ${names(contract)}`);
    if (!constant) {
      off.add(name);
      continue;
    }
    const allowed = kernel.tuned?.[constant];
    if (!allowed?.includes(Number(value))) {
      const known = allowed ? `expected one of ${allowed.join(', ')}` : `which it does not have`;
      throw refused(`${name}.${constant} is ${value}, ${known}`);
    }
    tuned.set(name, { ...tuned.get(name), [constant]: Number(value) });
  }
  return { off, tuned, defaults };
}

/** @param {Contract} contract */
const names = ({ kernels }) => kernels.map(({ name }) => name).join(', ');

/** @param {string} what */
const refused = (what) =>
  new TercetError('bad-request', `The option kernels cannot be followed: ${what}.`, {
    action: 'Correct the option, or leave it out.',
  });
