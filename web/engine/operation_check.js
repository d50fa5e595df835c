/** One operation of a program: its fields, what it refers to, and how the shapes hang together. */
import { isFloat, isSize, show } from './checks.js';
import { packError } from './errors.js';

/**
 * @typedef {import('./contract.js').OpSpec} OpSpec
 * @typedef {import('./program.js').Program} Program
 * @typedef {import('./program.js').Operation} Operation
 * @typedef {import('./program.js').Value} Value
 * @typedef {import('./program.js').TensorShape} TensorShape
 * @typedef {Record<string, Value>} Touched  values by the field that names them
 */

/** @param {string} dtype */
export const isInteger = (dtype) => dtype === 'a8' || dtype === 'a16';

export class OperationCheck {
  /**
   * @param {Program} program
   * @param {Map<string, TensorShape>} tensors
   * @param {string} where for messages
   * @param {Operation} op
   * @param {OpSpec} spec
   */
  constructor(program, tensors, where, op, spec) {
    this.program = program;
    this.tensors = tensors;
    this.where = where;
    this.op = op;
    this.spec = spec;
  }

  /** @param {Set<string>} written names of the values written so far; this operation's are added */
  run(written) {
    const { reads = {}, writes = {} } = this.spec;
    this.scalars();
    /** @type {Touched} */
    const touched = {};
    for (const [field, kind] of Object.entries({ ...reads, ...writes })) touched[field] = this.value(field, kind);
    const read = Object.keys(reads).map((field) => this.op[field]);
    const outputs = Object.keys(writes).map((field) => this.op[field]);
    for (const name of outputs) {
      this.expect(!read.includes(name), 'reference', `value ${name} is read and written at once`);
    }
    for (const name of this.op.accumulate ? [...read, ...outputs] : read) {
      this.expect(written.has(name), 'reference', `value ${name} is read before it is written`);
    }
    SHAPES[this.op.op](this, touched);
    for (const name of outputs) written.add(name);
  }

  /**
   * @param {unknown} condition
   * @param {string} rule
   * @param {string} message
   */
  expect(condition, rule, message) {
    if (!condition) throw packError(rule, `${this.where}: ${message}.`);
  }

  /**
   * @param {string} what
   * @param {unknown} found
   * @param {unknown} expected
   */
  equal(what, found, expected) {
    this.expect(
      show(found) === show(expected),
      'program-shape',
      `${what} is ${show(found)}, expected ${show(expected)}`,
    );
  }

  scalars() {
    const { op, spec } = this;
    /** @type {(good: boolean, field: string, expected: string) => void} */
    const expect = (good, field, expected) =>
      this.expect(good, 'operation', `${field} is ${show(op[field])}, expected ${expected}`);
    for (const [field, fallback] of Object.entries(spec.numbers ?? {})) {
      expect(isFloat(op[field] === undefined ? fallback : op[field]), field, 'a number');
    }
    for (const field of spec.integers ?? []) expect(isSize(op[field]), field, 'a positive integer');
    for (const field of spec.optional_integers ?? []) {
      const value = op[field] === undefined ? 0 : op[field];
      expect(value === 0 || isSize(value), field, 'a positive integer, or 0');
    }
    for (const [field, allowed] of Object.entries(spec.strings ?? {})) {
      expect(allowed.includes(op[field]), field, `one of ${allowed.join(', ')}`);
    }
    for (const field of spec.flags ?? []) {
      expect(['undefined', 'boolean'].includes(typeof op[field]), field, 'true or false');
    }
  }

  /**
   * @param {string} field
   * @param {string} kind dtype, `integer` or `any`
   */
  value(field, kind) {
    const value = this.named(this.program.values, field, 'value');
    const right = kind === 'any' || (kind === 'integer' ? isInteger(value.dtype) : value.dtype === kind);
    this.expect(right, 'operation', `${field} is ${value.dtype}, expected ${kind}`);
    return value;
  }

  /**
   * @template T
   * @param {Record<string, T>} things
   * @param {string} field
   * @param {string} what
   * @returns {T}
   */
  named(things, field, what) {
    const name = this.op[field];
    this.expect(
      typeof name === 'string' && Object.hasOwn(things, name),
      'reference',
      `${field} names no ${what}: ${show(name)}`,
    );
    return things[name];
  }

  /**
   * @param {string} field
   * @param {number} dimensions
   */
  tensor(field, dimensions) {
    const name = this.op[field];
    const tensor = typeof name === 'string' ? this.tensors.get(name) : undefined;
    this.expect(tensor, 'reference', `${field} names no tensor: ${show(name)}`);
    const found = /** @type {TensorShape} */ (tensor);
    this.expect(
      found.shape.length === dimensions,
      'program-shape',
      `tensor ${name} has the shape ${show(found.shape)}, expected ${dimensions} dimensions`,
    );
    return found;
  }

  /** @param {string} field @param {number} length */
  vector(field, length) {
    if (!this.spec.vectors?.includes(field) && (this.op[field] ?? null) === null) return;
    this.equal(`the length of ${field}`, this.tensor(field, 1).shape[0], length);
  }

  /** @returns {{heads: number, headDim: number, columns: number}} columns: of queries, keys and values together */
  heads() {
    const { heads, kv_heads: kvHeads, head_dim: headDim } = this.op;
    this.equal('heads modulo kv_heads', heads % kvHeads, 0);
    const fields = this.spec.caches ?? [];
    const caches = fields.map((field) => this.named(this.program.caches, field, 'cache'));
    this.expect(
      new Set(caches).size === caches.length,
      'reference',
      `k and v are the same cache ${this.op[fields[0]]}`,
    );
    for (const [index, field] of fields.entries()) {
      const cache = caches[index];
      this.equal(`cache ${this.op[field]}`, [cache.heads, cache.head_dim], [kvHeads, headDim]);
    }
    return { heads, headDim, columns: (heads + 2 * kvHeads) * headDim };
  }
}

/**
 * How the shapes of each operation hang together.
 * @type {Record<string, (check: OperationCheck, touched: Touched) => void>}
 */
const SHAPES = {
  embed(check, { out }) {
    check.equal('out', out.shape, ['T', check.tensor('w', 2).shape[1]]);
  },
  position(check, { out }) {
    const { encoding, shape } = check.tensor('w', 2);
    check.equal('out', out.shape, ['T', shape[1]]);
    check.expect(encoding === 'f32', 'operation', `positions need a tensor of f32, found ${encoding}`);
    check.expect(check.op.accumulate === true, 'operation', 'accumulate must be true');
  },
  activate(check, { x, out }) {
    check.equal('out', out.shape, x.shape);
  },
  norm(check, { x, out }) {
    check.equal('columns of out', out.shape[1], x.shape[1]);
    check.vector('gain', x.shape[1]);
    check.expect(
      out.dtype === 'f32' || !check.op.accumulate,
      'operation',
      `accumulate needs an out of f32, found ${out.dtype}`,
    );
    if (out.shape[0] !== 'R') sameRows(check, x, out);
  },
  quantize(check, { x, out }) {
    check.equal('out', out.shape, x.shape);
  },
  glu(check, { x, out }) {
    check.equal('columns of x', x.shape[1], 2 * out.shape[1]);
    check.vector('gain', out.shape[1]);
    sameRows(check, x, out);
  },
  linear(check, { x, out }) {
    const { encoding, shape } = check.tensor('w', 2);
    check.equal('columns of x', x.shape[1], shape[1]);
    check.equal('columns of out', out.shape[1], shape[0]);
    check.vector('bias', shape[0]);
    sameRows(check, x, out);
    const most = check.spec.most_columns?.[x.dtype] ?? Infinity;
    check.expect(
      shape[1] <= most,
      'program-shape',
      `${x.dtype} sums of ${shape[1]} columns can overflow, expected at most ${most}`,
    );
    check.expect(
      encoding === 'ternary' || !isInteger(x.dtype),
      'operation',
      `integer activations need a ternary tensor, found ${encoding}`,
    );
  },
  rope_append(check, { x, out }) {
    const { heads, headDim, columns } = check.heads();
    check.equal('x', x.shape, ['T', columns]);
    check.equal('out', out.shape, ['T', heads * headDim]);
    const gains = ['q_gain', 'k_gain'].filter((field) => (check.op[field] ?? null) !== null);
    check.expect(
      gains.length !== 1,
      'operation',
      `found ${gains.join()} alone, expected q_gain and k_gain, or neither`,
    );
    for (const field of gains) check.vector(field, headDim);
    const table = check.named(check.program.tables, 'rope', 'table');
    check.equal(`the length of table ${check.op.rope}`, table.inv_freq.length, headDim / 2);
  },
  attention(check, { q, out }) {
    const { heads, headDim } = check.heads();
    check.equal('q', q.shape, ['T', heads * headDim]);
    check.equal('out', out.shape, ['T', heads * headDim]);
  },
  argmax: (check, { logits }) => check.equal('the leading dimension of logits', logits.shape[0], 'R'),
  sample: (check, { logits }) => check.equal('the leading dimension of logits', logits.shape[0], 'R'),
};

/** @param {OperationCheck} check @param {Value} x @param {Value} out */
const sameRows = (check, x, out) => check.equal('the leading dimension of out', out.shape[0], x.shape[0]);
