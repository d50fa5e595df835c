/**
 * Turns operations of a program into those that fewer dispatches run: the rewrites of kernels.json. The Python twin is
 * shaders/rewrite.py.
 */
import { opSpec } from './contract.js';

/**
 * @typedef {import('./contract.js').Contract} Contract
 * @typedef {import('./contract.js').Rewrite} Rewrite
 * @typedef {import('./program.js').Operation} Operation
 */

/** Fields that must agree where two operations of a rewrite both have them. */
const SHARED = ['k', 'v', 'heads', 'kv_heads', 'head_dim'];

/**
 * The operations of a section, with the first rewrite that fits at each place.
 * @param {Contract} contract
 * @param {Operation[]} ops
 * @param {Operation[]} later  operations that follow the section; a value that any of them reads is kept
 * @param {(op: Operation) => boolean} runs  a rewrite is left out if one of its operations cannot run
 * @param {{software: boolean, keys: number}} step  software: on a CPU renderer a dispatch costs less than what some
 *   rewrites compute again; keys: most keys that a token of the step sees
 * @returns {Operation[]}
 */
export function rewrite(contract, ops, later, runs, { software, keys }) {
  const rules = contract.rewrites.filter(
    ({ gpu, most_keys: most = keys }) => !(gpu && software) && keys <= most,
  );
  /** @type {Operation[]} */
  const made = [];
  for (let index = 0; index < ops.length; ) {
    const fitting = fittingRewrite(contract, rules, ops, index, later, runs);
    made.push(...(fitting?.inner ?? [ops[index]]));
    index += fitting?.length ?? 1;
  }
  return made;
}

/**
 * @param {Contract} contract
 * @param {Rewrite[]} rules
 * @param {Operation[]} ops
 * @param {number} index
 * @param {Operation[]} later
 * @param {(op: Operation) => boolean} runs
 */
function fittingRewrite(contract, rules, ops, index, later, runs) {
  for (const rule of rules) {
    const { length } = rule.ops;
    const matched = ops.slice(index, index + length);
    if (!matches(contract, rule, matched, [...ops.slice(index + length), ...later])) continue;
    const inner = rule.into.map((pattern) => innerOperation(pattern, matched));
    // WebGPU forbids to read and write one buffer in a dispatch.
    const apart = inner.every((op) => !inputNames(contract, op).includes(op.out));
    if (apart && inner.every(runs)) return { inner, length };
  }
  return null;
}

/**
 * @param {Contract} contract
 * @param {Rewrite} rule
 * @param {Operation[]} matched
 * @param {Operation[]} following
 */
function matches(contract, rule, matched, following) {
  if (matched.length !== rule.ops.length || matched.some(({ op }, index) => op !== rule.ops[index])) return false;
  return matched.slice(1).every((second, index) => {
    const first = matched[index];
    if (!inputNames(contract, second).includes(first.out) || isRead(contract, first.out, following)) return false;
    // What a value held before is part of what is read.
    if (first.accumulate) return false;
    return SHARED.every((field) => !(field in first) || !(field in second) || first[field] === second[field]);
  });
}

/**
 * Names of the values that the fields of an operation give it to read.
 * @param {Contract} contract
 * @param {Operation} op
 * @returns {string[]}
 */
const inputNames = (contract, op) =>
  Object.keys(opSpec(contract, op.op).reads ?? {})
    .filter((field) => field in op)
    .map((field) => op[field]);

/**
 * Names of the values that an operation reads, the one that it adds to included.
 * @param {Contract} contract
 * @param {Operation} op
 */
const readNames = (contract, op) =>
  op.accumulate ? [...inputNames(contract, op), op.out] : inputNames(contract, op);

/**
 * Whether a value is read before it is written again.
 * @param {Contract} contract
 * @param {string} value
 * @param {Operation[]} following
 */
function isRead(contract, value, following) {
  for (const op of following) {
    if (readNames(contract, op).includes(value)) return true;
    if (op.out === value) return false;
  }
  return false;
}

/**
 * The operation that a pattern makes: `1.w` is field w of the second one that matched.
 * @param {Rewrite['into'][number]} pattern
 * @param {Operation[]} matched
 * @returns {Operation}
 */
function innerOperation(pattern, matched) {
  /** @type {Operation} */
  const made = { op: pattern.op };
  for (const [field, source] of Object.entries(pattern)) {
    if (field === 'op') continue;
    if (typeof source !== 'string') {
      made[field] = source;
      continue;
    }
    const [index, name] = source.split('.');
    const value = matched[Number(index)][name] ?? null;
    if (value !== null) made[field] = value;
  }
  return made;
}
