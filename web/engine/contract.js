/**
 * `shaders/kernels.json`: which kernel runs an operation, with which bindings, parameters, overrides and how many
 * workgroups. Plain data, evaluated here; the Python twin is shaders/contract.py.
 */
import { TercetError } from './errors.js';

/**
 * A number, a symbol, or a quotient rounded up.
 * @typedef {number|string|[number|string|[number|string, number|string], number|string]} Dim
 * @typedef {Record<string, number|string>} Symbols
 * @typedef {readonly [number, number]} Range  least and most
 * @typedef {'read'|'write'|'read_write'} Access
 *
 * @typedef {object} Binding
 * @property {string} name
 * @property {string} from  where an executor takes the buffer from
 * @property {string} dtype
 * @property {Dim[]} shape
 * @property {Access} access
 *
 * @typedef {object} Kernel
 * @property {string} name
 * @property {string} op
 * @property {string} file
 * @property {string[]} uniforms
 * @property {Record<string, (number|string)[]>} when
 * @property {string[]} [needs]  device features
 * @property {string[]} [language]  WGSL language features
 * @property {[string, 'u32'|'f32', Dim][]} params
 * @property {Binding[]} bindings
 * @property {Record<string, Dim>} [overrides]
 * @property {Record<string, number[]>} [tuned]  candidates; the first is the default
 * @property {string[]} [timed]  tuned constants that change no bit of a result, and so may be chosen by timing
 * @property {boolean} [rival]  timed against the first kernel that fits; gives the same bits
 * @property {[Dim, Dim, Dim]} dispatch
 * @property {string} tolerance
 * @property {number[]} [tiles]  most tokens of the kernels that an entry stands for
 *
 * @typedef {object} Rewrite
 * @property {string[]} ops
 * @property {(Record<string, number|string> & {op: string})[]} into
 * @property {boolean} [gpu]  not for CPU renderers
 * @property {number} [most_keys]  that a token of the step may see
 *
 * @typedef {object} OpSpec  the fields of an operation
 * @property {Record<string, string>} [reads]
 * @property {Record<string, string>} [writes]
 * @property {string[]} [weights]
 * @property {string[]} [vectors]
 * @property {string[]} [optional_vectors]
 * @property {Record<string, number|null>} [numbers]  with defaults; null: required
 * @property {string[]} [integers]
 * @property {string[]} [optional_integers]  0 where they are left out
 * @property {Record<string, string[]>} [strings]
 * @property {string[]} [flags]
 * @property {Record<string, number>} [most_columns]  of integer activations, so that no sum overflows
 * @property {string[]} [caches]
 * @property {string[]} [tables]
 * @property {string} [via]  field that names the integer activations between the operations of a rewrite
 *
 * @typedef {{block: number, block_words: number, disk_block: number, disk_block_words: number, group: number,
 *   scale_bytes: number, tensor_scale?: number}} Encoding
 *
 * @typedef {object} Contract
 * @property {number} version
 * @property {number} ops_version
 * @property {Record<string, number>} constants
 * @property {Record<string, Record<string, number>>} enums
 * @property {Record<string, Encoding>} encodings
 * @property {Record<string, OpSpec>} ops
 * @property {Record<string, OpSpec>} inner_ops  operations that rewrites make
 * @property {Rewrite[]} rewrites
 * @property {string[]} utilities
 * @property {Kernel[]} kernels
 *
 * @typedef {{features: ReadonlySet<string>, language: ReadonlySet<string>, software?: boolean}} Abilities
 */

const VERSION = 1;
const MAX_DISPATCH = 65535;
/** Symbols that change from step to step: parameters and overrides, which are fixed at load, must not use them. */
export const STEP_SYMBOLS = Object.freeze(['T', 'X_T', 'R', 'KEYS']);
/** @type {Record<string, number>} */
const BYTES = { u32: 4, i32: 4, f32: 4, 'vec2<u32>': 8, 'vec2<f32>': 8, 'vec4<u32>': 16, 'vec4<f32>': 16 };

/**
 * @param {unknown} json parsed kernels.json
 * @returns {Contract}
 */
export function checkContract(json) {
  const contract = /** @type {Contract} */ (json);
  if (contract?.version !== VERSION || !Array.isArray(contract.kernels)) {
    throw new TercetError('internal', `kernels.json has version ${contract?.version}, this engine reads ${VERSION}.`, {
      action: 'Reload the page without its cache: the engine and its kernels are of different versions.',
    });
  }
  return { ...contract, kernels: contract.kernels.flatMap(tilesOf) };
}

/**
 * One kernel for each number of tokens that an entry with `tiles` is compiled for.
 * @param {Kernel} entry
 * @returns {Kernel[]}
 */
function tilesOf(entry) {
  const { tiles, name, when, overrides } = entry;
  if (!tiles) return [entry];
  return tiles.map((tile, index) => ({
    ...entry,
    name: tile === 1 ? name : `${name}_${tile}`,
    when: {
      ...when,
      T: [(tiles[index - 1] ?? 0) + 1, tile],
      ...(tile > 1 ? { few: [1, 1] } : {}),
    },
    overrides: { ...overrides, TOKENS: tile },
  }));
}

/**
 * Fields of an operation, of programs or of those that rewrites make; none for the utilities.
 * @param {Contract} contract
 * @param {string} name
 * @returns {OpSpec}
 */
export const opSpec = (contract, name) => contract.ops[name] ?? contract.inner_ops[name] ?? {};

/**
 * @param {Dim} dim
 * @param {Symbols} symbols
 * @returns {number}
 */
export function dimension(dim, symbols) {
  if (typeof dim === 'number') return dim;
  if (typeof dim === 'string') {
    const value = symbols[dim];
    if (typeof value !== 'number') {
      throw new TercetError('internal', `kernels.json uses the symbol ${dim}, found ${value}, expected a number.`);
    }
    return value;
  }
  return Math.ceil(dimension(dim[0], symbols) / dimension(dim[1], symbols));
}

/**
 * Number of elements of a binding.
 * @param {Dim[]} shape
 * @param {Symbols} symbols
 */
export const elements = (shape, symbols) =>
  shape.reduce((/** @type {number} */ n, dim) => n * dimension(dim, symbols), 1);

/** @param {string} dtype @returns {number} bytes of one element */
export function elementBytes(dtype) {
  const bytes = BYTES[dtype];
  if (!bytes) {
    throw new TercetError('internal', `kernels.json has the dtype ${dtype}, known are ${Object.keys(BYTES)}.`);
  }
  return bytes;
}

/**
 * The parameter block of a kernel: u32 and f32 scalars, padded to 16 bytes.
 * @param {Kernel} kernel
 * @param {Symbols} symbols
 * @returns {ArrayBuffer}
 */
export function encodeParams(kernel, symbols) {
  const block = new DataView(new ArrayBuffer(Math.max(16, Math.ceil(kernel.params.length / 4) * 16)));
  kernel.params.forEach(([, dtype, dim], index) => {
    const value = dimension(dim, symbols);
    if (dtype === 'f32') block.setFloat32(4 * index, value, true);
    else block.setUint32(4 * index, value, true);
  });
  return block.buffer;
}

/**
 * Override constants: symbols resolved, names of enums turned into numbers. Of tuned ones the first candidate, unless
 * a symbol of the same name says otherwise.
 * @param {Contract} contract
 * @param {Kernel} kernel
 * @param {Symbols} symbols
 * @returns {Record<string, number>}
 */
export function overrideValues(contract, kernel, symbols) {
  /** @type {Record<string, number>} */
  const values = {};
  for (const [name, candidates] of Object.entries(kernel.tuned ?? {})) {
    values[name] = typeof symbols[name] === 'number' ? symbols[name] : candidates[0];
  }
  for (const [name, source] of Object.entries(kernel.overrides ?? {})) {
    const value = typeof source === 'string' ? symbols[source] : dimension(source, symbols);
    const number = typeof value === 'string' ? contract.enums[/** @type {string} */ (source)]?.[value] : value;
    if (number === undefined) {
      throw new TercetError(
        'internal',
        `kernel ${kernel.name}: override ${name} is ${source} = ${value}, which has no number.`,
      );
    }
    values[name] = number;
  }
  return values;
}

/**
 * Tuned overrides for a device that nobody has timed: on a CPU renderer the smallest candidates, for it runs the
 * threads of a workgroup one after another, and idle ones and barriers cost it far more than a GPU.
 * @param {Kernel} kernel
 * @param {Abilities} abilities
 * @returns {Record<string, number>} only those that are not the default
 */
export function tunedFor(kernel, { software }) {
  if (!software) return {};
  return Object.fromEntries(Object.entries(kernel.tuned ?? {}).map(([name, sizes]) => [name, Math.min(...sizes)]));
}

/**
 * The symbols together with the tuned constants, which a dispatch may use.
 * @param {Kernel} kernel
 * @param {Symbols} symbols
 * @param {Record<string, number>} overrides
 * @returns {Symbols}
 */
export function withTuned(kernel, symbols, overrides) {
  const tuned = Object.keys(kernel.tuned ?? {}).map((name) => [name, overrides[name]]);
  return { ...symbols, ...Object.fromEntries(tuned) };
}

/**
 * @param {Kernel} kernel
 * @param {Symbols} symbols with the kernel's tuned constants
 * @returns {[number, number, number]} workgroups, x folded over (x, y) where it is too large for one dimension
 */
export function workgroups(kernel, symbols) {
  const [x, y, z] = kernel.dispatch.map((dim) => dimension(dim, symbols));
  if (x <= MAX_DISPATCH) return [x, y, z];
  const folds = Math.ceil(x / MAX_DISPATCH);
  return [Math.ceil(x / folds), folds * y, z];
}

/**
 * @param {Kernel} kernel
 * @param {number} rows T
 */
export function takesRows(kernel, rows) {
  const range = kernel.when.T;
  return !range || (Number(range[0]) <= rows && rows <= Number(range[1]));
}

/**
 * Whether a kernel runs for any T of a range.
 * @param {Kernel} kernel
 * @param {Range} range
 */
export function takesSome(kernel, [least, most]) {
  const range = kernel.when.T;
  return !range || (Number(range[0]) <= most && Number(range[1]) >= least);
}

/**
 * The kernels that run an operation for the T of a range, in the order in which they are tried.
 * @param {Contract} contract
 * @param {string} op
 * @param {Symbols} symbols
 * @param {Abilities} abilities
 * @param {Range} range
 * @returns {Kernel[]} for each T at least one takes it
 * @throws {TercetError} `feature-missing` if only the device stands in the way, else `pack-unsupported`
 */
export function candidates(contract, op, symbols, abilities, range) {
  const fitting = contract.kernels.filter(
    (kernel) => kernel.op === op && applies(kernel, symbols) && takesSome(kernel, range),
  );
  const able = fitting.filter((kernel) => missing(kernel, abilities).length === 0);
  for (const rows of new Set(range)) {
    if (able.some((kernel) => takesRows(kernel, rows))) continue;
    const blocked = fitting.find((kernel) => takesRows(kernel, rows));
    if (blocked) {
      const names = missing(blocked, abilities);
      throw new TercetError(
        'feature-missing',
        `The operation ${op} needs ${names.join(', ')}, which this browser or GPU does not have.`,
        {
          detail: { op, kernel: blocked.name, missing: names },
        },
      );
    }
    throw new TercetError('pack-unsupported', `No kernel runs the operation ${op} with ${JSON.stringify(symbols)}.`, {
      detail: { rule: 'operation', op },
    });
  }
  return able.filter((kernel, index) => isFirst(kernel, able.slice(0, index), range));
}

/**
 * The kernels that may be timed against one that runs an operation: marked so, and able to take its place.
 * @param {Contract} contract
 * @param {Kernel} chosen
 * @param {Symbols} symbols
 * @param {Abilities} abilities
 * @param {number} rows T
 */
export const rivals = (contract, chosen, symbols, abilities, rows) =>
  contract.kernels.filter(
    (kernel) =>
      kernel.rival &&
      kernel.op === chosen.op &&
      kernel.name !== chosen.name &&
      applies(kernel, symbols) &&
      takesRows(kernel, rows) &&
      missing(kernel, abilities).length === 0,
  );

/**
 * Whether no earlier kernel takes all that this one would: it would be compiled for nothing.
 * @param {Kernel} kernel
 * @param {Kernel[]} earlier
 * @param {Range} range
 */
function isFirst({ when }, earlier, [least, most]) {
  const [from, to] = when.T ?? [least, most];
  const ends = [Math.max(least, Number(from)), Math.min(most, Number(to))];
  return ends.some((rows) => !earlier.some((other) => takesRows(other, rows)));
}

/**
 * @param {Kernel} kernel
 * @param {Symbols} symbols
 */
function applies(kernel, symbols) {
  return Object.entries(kernel.when).every(([symbol, allowed]) => {
    if (symbol === 'T') return true;
    const value = symbols[symbol];
    if (typeof value === 'number') return Number(allowed[0]) <= value && value <= Number(allowed[1]);
    return allowed.includes(value);
  });
}

/**
 * @param {Kernel} kernel
 * @param {Abilities} abilities
 */
const missing = ({ needs = [], language = [] }, abilities) => [
  ...needs.filter((name) => !abilities.features.has(name)),
  ...language.filter((name) => !abilities.language.has(name)),
];
