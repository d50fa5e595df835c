/**
 * Checks `program.json` against the operations of kernels.json and the pack's tensors, before any shard is fetched.
 * The Python twin is shaders/program.py; the rules are those of packer/FORMAT.md.
 */
import { isFloat, isObject, isSize, show } from './checks.js';
import { TercetError, packError } from './errors.js';
import { OperationCheck } from './operation_check.js';

/**
 * @typedef {import('./contract.js').Contract} Contract
 * @typedef {Record<string, any> & {op: string}} Operation
 * @typedef {{dtype: 'f32'|'a8'|'a16', shape: ['T'|'R', number]}} Value
 * @typedef {{heads: number, head_dim: number}} Cache
 * @typedef {{kind: 'rope', inv_freq: number[], scale: number}} Table
 * @typedef {'body'|'logits'|'greedy'|'random'} Section
 *
 * @typedef {object} Program
 * @property {number} ops_version
 * @property {Record<string, Value>} values
 * @property {Record<string, Cache>} caches
 * @property {Record<string, Table>} tables
 * @property {Operation[]} body
 * @property {Operation[]} logits
 * @property {Operation[]} greedy
 * @property {Operation[]} random
 *
 * @typedef {{encoding: string, shape: number[]}} TensorShape
 */

/** @type {readonly Section[]} */
export const SECTIONS = Object.freeze(['body', 'logits', 'greedy', 'random']);
const DTYPES = ['f32', 'a8', 'a16'];
const MAX_HEAD_DIM = 256;

/**
 * @param {unknown} json parsed program.json
 * @param {Contract} contract
 * @param {Map<string, TensorShape>} tensors
 * @returns {Program}
 * @throws {TercetError} with detail.rule `ops-version`, `operation`, `reference` or `program-shape`
 */
export function checkProgram(json, contract, tensors) {
  const program = /** @type {Program} */ (json);
  if (program?.ops_version !== contract.ops_version) {
    throw packError(
      'ops-version',
      `program.json: ops_version is ${show(program?.ops_version)}, expected ${contract.ops_version}.`,
    );
  }
  checkDeclarations(program);
  /** @type {Set<string>} */
  const written = new Set();
  for (const section of SECTIONS) {
    program[section].forEach((op, index) => {
      const spec = typeof op?.op === 'string' && Object.hasOwn(contract.ops, op.op) ? contract.ops[op.op] : null;
      const where = `program.json: ${section}[${index}] ${show(op?.op)}`;
      if (!spec) {
        throw new TercetError('pack-unsupported', `${where}: this engine does not know the operation.`, {
          detail: { rule: 'operation' },
        });
      }
      new OperationCheck(program, tensors, where, op, spec).run(written);
    });
  }
  checkChoice(program, tensors);
  return program;
}

/**
 * Token choice: one operation each, on the same logits, whose columns are the ids that embeddings hold.
 * @param {Program} program
 * @param {Map<string, TensorShape>} tensors
 */
function checkChoice(program, tensors) {
  const [greedy, random] = /** @type {const} */ ([
    ['greedy', 'argmax'],
    ['random', 'sample'],
  ]).map(([section, name]) => {
    const names = program[section].map(({ op }) => op);
    if (show(names) !== show([name])) {
      throw packError('operation', `program.json: ${section} holds ${show(names)}, expected one ${name}.`);
    }
    return program[section][0].logits;
  });
  if (greedy !== random) {
    throw packError('reference', `program.json: greedy and random read different logits: ${show([greedy, random])}.`);
  }
  const vocabulary = logitsColumns(program);
  for (const section of /** @type {const} */ (['body', 'logits'])) {
    program[section].forEach(({ op, w }, index) => {
      const where = `program.json: ${section}[${index}] ${op}`;
      if (op === 'argmax' || op === 'sample') throw packError('operation', `${where}: not allowed in ${section}.`);
      const rows = op === 'embed' ? tensors.get(w)?.shape[0] : vocabulary;
      if (rows !== vocabulary) {
        throw packError('program-shape', `${where}: ${rows} rows, expected one a logit, ${vocabulary}.`);
      }
    });
  }
}

/**
 * Whether there is a row for each position of the context.
 * @param {Program} program checked
 * @param {Map<string, TensorShape>} tensors
 * @param {number} context tokens
 * @throws {TercetError} with detail.rule `program-shape`
 */
export function checkContext(program, tensors, context) {
  for (const section of SECTIONS) {
    program[section].forEach(({ op, w }, index) => {
      const rows = op === 'position' ? tensors.get(w)?.shape[0] ?? 0 : context;
      if (rows < context) {
        const where = `program.json: ${section}[${index}] ${op}`;
        throw packError('program-shape', `${where}: ${rows} positions, the context is ${context} tokens.`);
      }
    });
  }
}

/** @param {Program} program checked @returns {number} size of the vocabulary that it chooses from */
export const logitsColumns = ({ values, greedy }) => values[greedy[0].logits].shape[1];

/** @param {Program} program */
function checkDeclarations(program) {
  for (const section of SECTIONS) {
    if (!Array.isArray(program[section])) {
      throw packError('operation', `program.json: ${section} is no list of operations.`);
    }
  }
  for (const kind of /** @type {const} */ (['values', 'caches', 'tables'])) {
    if (!isObject(program[kind])) throw packError('operation', `program.json: ${kind} is no object.`);
  }
  for (const [name, value] of Object.entries(program.values)) {
    const { shape } = value ?? {};
    const good = Array.isArray(shape) && shape.length === 2 && ['T', 'R'].includes(shape[0]) && isSize(shape[1]);
    if (!good || !DTYPES.includes(value.dtype)) {
      throw packError(
        'operation',
        `program.json: value ${name} is ${show(value)}, expected a dtype and [T or R, columns].`,
      );
    }
  }
  for (const [name, cache] of Object.entries(program.caches)) {
    if (!isSize(cache?.heads) || !isSize(cache.head_dim)) {
      throw packError('operation', `program.json: cache ${name} is ${show(cache)}, expected heads and head_dim.`);
    }
    if (cache.head_dim % 4 || cache.head_dim > MAX_HEAD_DIM) {
      throw packError(
        'program-shape',
        `program.json: cache ${name} has head_dim ${cache.head_dim}, expected a multiple of 4 up to ${MAX_HEAD_DIM}.`,
      );
    }
  }
  for (const [name, table] of Object.entries(program.tables)) {
    const good =
      table?.kind === 'rope' && Array.isArray(table.inv_freq) && table.inv_freq.every(isFloat) && isFloat(table.scale);
    if (!good) {
      throw packError(
        'operation',
        `program.json: table ${name}: expected the kind rope with inv_freq numbers and a scale.`,
      );
    }
  }
}
