/** From a program to what the GPU runs: the symbols of each operation and the kernels that may run it. */
import { candidates, overrideValues, takesRows, takesSome, tunedFor, withTuned } from './contract.js';
import { rowWords, scaleWords, scalesPerRow } from './memory.js';
import { isInteger } from './operation_check.js';
import { SECTIONS } from './program.js';

/**
 * @typedef {import('./contract.js').Contract} Contract
 * @typedef {import('./contract.js').Kernel} Kernel
 * @typedef {import('./contract.js').OpSpec} OpSpec
 * @typedef {import('./contract.js').Symbols} Symbols
 * @typedef {import('./contract.js').Abilities} Abilities
 * @typedef {import('./program.js').Program} Program
 * @typedef {import('./program.js').Operation} Operation
 * @typedef {import('./program.js').Section} Section
 * @typedef {import('./pack.js').Tensor} Tensor
 * @typedef {import('./memory.js').KvKind} KvKind
 *
 * @typedef {object} Variant  one kernel that runs an operation for some T
 * @property {Kernel} kernel
 * @property {Record<string, number>} overrides
 * @property {Symbols} symbols  with the tuned constants; those of a piece and of the step come later
 *
 * @typedef {object} PlannedOperation
 * @property {string} label
 * @property {Operation} op
 * @property {OpSpec} spec
 * @property {boolean} lastRows  its rows are R, not T
 * @property {Tensor|null} tensor  the matrix that may be cut into pieces
 * @property {Variant[]} variants  for each T the first that takes it
 *
 * @typedef {Record<Section, PlannedOperation[]>} PlannedProgram
 */

const KV_ELEMENTS_PER_WORD = { f32: 1, f16: 2, q8: 4 };

/**
 * @param {Program} program checked
 * @param {Map<string, Tensor>} tensors
 * @param {Contract} contract
 * @param {Abilities} abilities
 * @param {{contextLength: number, kvCache: KvKind, chunk: number}} choice
 * @returns {PlannedProgram}
 * @throws {TercetError} `feature-missing`, `pack-unsupported`
 */
export function planProgram(program, tensors, contract, abilities, choice) {
  /** @param {Section} section */
  const plan = (section) =>
    program[section].map((op, index) => {
      const spec = contract.ops[op.op];
      const tensor = spec.weights?.length ? (tensors.get(op[spec.weights[0]]) ?? null) : null;
      const symbols = symbolsOf(program, contract, op, spec, tensor, choice);
      const lastRows = (op.out === undefined ? 'R' : program.values[op.out].shape[0]) === 'R';
      // Logits are wanted of one row only, and no step has more tokens than a chunk: kernels for more are not compiled.
      const most = lastRows ? 1 : choice.chunk;
      const kernels = candidates(contract, op.op, symbols, abilities).filter(
        (kernel) => takesRows(kernel, 1) || takesSome(kernel, most),
      );
      const variants = kernels.map((kernel) => variantOf(contract, abilities, kernel, symbols));
      return { label: `${section}[${index}] ${op.op}`, op, spec, lastRows, tensor, variants };
    });
  return /** @type {PlannedProgram} */ (Object.fromEntries(SECTIONS.map((section) => [section, plan(section)])));
}

/**
 * @param {Contract} contract
 * @param {Abilities} abilities
 * @param {Kernel} kernel
 * @param {Symbols} symbols
 * @returns {Variant}
 */
function variantOf(contract, abilities, kernel, symbols) {
  const overrides = overrideValues(contract, kernel, { ...symbols, ...tunedFor(kernel, abilities) });
  return { kernel, overrides, symbols: withTuned(kernel, symbols, overrides) };
}

/**
 * The kernel that turns ternary rows as they lie on disk into the resident layout.
 * @param {Contract} contract
 * @param {Abilities} abilities
 * @param {Tensor} tensor
 * @param {number} rows
 */
export function expandVariant(contract, abilities, tensor, rows) {
  const symbols = { ...tensorSymbols(contract, tensor), N: rows };
  return variantOf(contract, abilities, candidates(contract, 'expand', symbols, abilities)[0], symbols);
}

/**
 * @param {Program} program
 * @param {Contract} contract
 * @param {Operation} op
 * @param {OpSpec} spec
 * @param {Tensor|null} tensor
 * @param {{contextLength: number, kvCache: KvKind}} choice
 * @returns {Symbols}
 */
function symbolsOf(program, contract, op, spec, tensor, { contextLength, kvCache }) {
  /** @type {Symbols} */
  const symbols = { S: contextLength, kv: kvCache, RING: contract.constants.ring, act: 'none' };
  for (const [field, fallback] of Object.entries(spec.numbers ?? {})) symbols[field] = op[field] ?? fallback;
  for (const field of [...(spec.integers ?? []), ...Object.keys(spec.strings ?? {})]) symbols[field] = op[field];
  for (const field of spec.flags ?? []) symbols[field] = Number(op[field] ?? false);
  for (const field of [...(spec.vectors ?? []), ...(spec.optional_vectors ?? [])]) {
    symbols[`has_${field}`] = Number((op[field] ?? null) !== null);
  }
  const out = program.values[op.out];
  const x = program.values[op.x];
  if (out) {
    symbols.OUT_N = out.shape[1];
    symbols.last_rows = Number(out.shape[0] === 'R' && (tensor !== null || x?.shape[0] === 'T'));
  }
  if (tensor) Object.assign(symbols, tensorSymbols(contract, tensor));
  else if (out) symbols.K = out.shape[1];
  // Of a product the activations that come in decide the kernel, of all else those that go out.
  const activation = (tensor && x ? x : out)?.dtype;
  if (activation) {
    symbols.activation = activation;
    symbols.PLANES = isInteger(activation) && activation === 'a16' ? 2 : 1;
  }
  if (spec.caches) {
    const allHeads = op.heads + 2 * op.kv_heads;
    symbols.ALL_HEADS = allHeads;
    symbols.QKV = allHeads * op.head_dim;
    symbols.KV_WORDS = op.head_dim / KV_ELEMENTS_PER_WORD[kvCache];
  }
  if (spec.reads?.logits) symbols.V = program.values[op.logits].shape[1];
  return symbols;
}

/**
 * @param {Contract} contract
 * @param {Tensor} tensor a matrix
 * @returns {Symbols}
 */
function tensorSymbols(contract, tensor) {
  return {
    encoding: tensor.encoding,
    scale: tensor.group ? 'group' : 'row',
    K: tensor.shape[1],
    GROUP: tensor.group,
    GROUPS: scalesPerRow(tensor),
    ROW_WORDS: rowWords(tensor, contract).resident,
  };
}

/**
 * The symbols of a piece of a tensor.
 * @param {Tensor} tensor
 * @param {import('./memory.js').Piece} piece
 * @returns {Symbols}
 */
export const pieceSymbols = (tensor, { row, rows }) => ({ N: rows, ROW0: row, SCALE_WORDS: scaleWords(tensor, rows) });

/** @param {PlannedProgram} planned @returns {Variant[]} one for each kernel and set of overrides */
export function distinctVariants(planned) {
  /** @type {Map<string, Variant>} */
  const found = new Map();
  for (const section of SECTIONS) {
    for (const variant of planned[section].flatMap(({ variants }) => variants)) {
      found.set(`${variant.kernel.name} ${JSON.stringify(variant.overrides)}`, variant);
    }
  }
  return [...found.values()];
}
