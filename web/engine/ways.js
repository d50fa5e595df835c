/** How an answer is made, apart from the choice of its tokens: the options of a request that say so. */
import { show } from './checks.js';
import { TercetError } from './errors.js';

/**
 * speculation: guess tokens and verify several in a step, which changes no token; `auto`: while it is measured to be
 * faster, `always`: whatever it costs. contextFull: end the answer, or go on as window.js says.
 * @typedef {{speculation: 'auto'|'off'|'always', contextFull: 'stop'|'roll'}} Ways
 * @typedef {{[Option in keyof Ways]?: Ways[Option]|null}} WaysRequest
 */

/** The default comes first. */
const WAYS = /** @type {const} */ ({ speculation: ['auto', 'off', 'always'], contextFull: ['stop', 'roll'] });

/**
 * @param {WaysRequest} request
 * @returns {Ways}
 * @throws {TercetError} `bad-request`, naming the option
 */
export const checkWays = ({ speculation, contextFull }) => ({
  speculation: oneOf('speculation', speculation, WAYS.speculation),
  contextFull: oneOf('contextFull', contextFull, WAYS.contextFull),
});

/**
 * @template {string} T
 * @param {string} option
 * @param {T|null|undefined} value
 * @param {readonly T[]} known
 * @returns {T}
 */
function oneOf(option, value, known) {
  const found = known.find((one) => one === (value ?? known[0]));
  if (found !== undefined) return found;
  const names = known.map((one) => `'${one}'`).join(', ');
  throw new TercetError('bad-request', `${option} is ${show(value)}, expected one of ${names}.`, {
    detail: { option },
  });
}
