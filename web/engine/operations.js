/** From a program to what the GPU runs: the symbols of each operation and the kernels that may run it. */
import { candidates, opSpec, overrideValues, tunedFor, withTuned } from './contract.js';
import { TercetError } from './errors.js';
import { pieces, rowWords } from './memory.js';
import { isInteger } from './operation_check.js';
import { SECTIONS } from './program.js';
import { rewrite } from './rewrite.js';
import { scaleWords, scalesPerRow } from './tensor_layout.js';

/**
 * @typedef {import('./contract.js').Contract} Contract
 * @typedef {import('./contract.js').Kernel} Kernel
 * @typedef {import('./contract.js').OpSpec} OpSpec
 * @typedef {import('./contract.js').Symbols} Symbols
 * @typedef {import('./contract.js').Abilities} Abilities
 * @typedef {import('./contract.js').Range} Range
 * @typedef {import('./program.js').Program} Program
 * @typedef {import('./program.js').Operation} Operation
 * @typedef {import('./program.js').Section} Section
 * @typedef {import('./pack.js').Tensor} Tensor
 * @typedef {import('./memory.js').KvKind} KvKind
 *
 * @typedef {object} Variant  one kernel that runs an operation for some T
 * @property {Kernel} kernel
 * @property {Record<string, number>} overrides
 * @property {Symbols} symbols  with the tuned constants; those of the step come later
 *
 * @typedef {object} PlannedOperation
 * @property {string} label
 * @property {Operation} op
 * @property {OpSpec} spec
 * @property {boolean} lastRows  its rows are R, not T
 * @property {Tensor|null} tensor  the matrix that may be cut into pieces
 * @property {Variant[][]} variants  of each piece; for each T the first that takes it
 *
 * @typedef {Record<Section, PlannedOperation[]>} PlannedProgram
 *
 * Kinds of steps, each with operations of its own: one token; many, of a prompt; a few, that verify drafts, where
 * kernels run the program so. Each for tokens that see few keys and for all others.
 * @typedef {'one'|'many'|'few'} StepKind
 * @typedef {{kind: StepKind, keys: number, program: PlannedProgram}} PlannedStep  keys: most that a token sees
 * @typedef {{contextLength: number, kvCache: KvKind, chunk: number, limit?: number, forced?: import('./forced.js').Forced}} Choice
 *   limit: bytes of a binding
 */

const KV_ELEMENTS_PER_WORD = { f32: 1, f16: 2, q8: 4 };

/**
 * @param {Program} program checked
 * @param {Map<string, Tensor>} tensors
 * @param {Contract} contract
 * @param {Abilities} abilities
 * @param {Choice} choice
 * @returns {PlannedStep[]} of each kind those of fewer keys first
 * @throws {TercetError} `feature-missing`, `pack-unsupported`
 */
export function planProgram(program, tensors, contract, abilities, choice) {
  const most = contract.constants.most_drafted;
  /** @type {Record<StepKind, {tokens: Range, rows: Range}>} */
  const kinds = {
    one: { tokens: [1, 1], rows: [1, 1] },
    many: { tokens: [2, choice.chunk], rows: [1, 1] },
    few: { tokens: [2, most], rows: [2, most] },
  };
  /** @type {PlannedStep[]} */
  const planned = [];
  for (const kind of /** @type {StepKind[]} */ (Object.keys(kinds))) {
    // A CPU renderer has no time to gain from drafts.
    if ((kind === 'many' && choice.chunk < 2) || (kind === 'few' && abilities.software)) continue;
    for (const keys of keyLimits(contract, choice.contextLength)) {
      const planner = new Planner({ program, tensors, contract, abilities, choice }, kind, kinds[kind], keys);
      const made = kind === 'few' ? planner.planIfAble() : planner.plan();
      if (made) planned.push({ kind, keys, program: made });
    }
  }
  return planned;
}

/**
 * Most keys of the steps that are rewritten apart, ascending.
 * @param {Contract} contract
 * @param {number} contextLength
 */
function keyLimits({ rewrites }, contextLength) {
  const limits = rewrites.map(({ most_keys: most }) => most).filter((most) => most !== undefined);
  return [...new Set(limits.filter((most) => most < contextLength)), Infinity].sort((a, b) => a - b);
}

class Planner {
  /**
   * @param {{program: Program, tensors: Map<string, Tensor>, contract: Contract, abilities: Abilities, choice: Choice}} model
   * @param {StepKind} kind
   * @param {{tokens: Range, rows: Range}} sizes  T and R
   * @param {number} keys
   */
  constructor(model, kind, { tokens, rows }, keys) {
    this.model = model;
    this.kind = kind;
    this.tokens = tokens;
    this.rows = rows;
    // Without an upper limit the context is one.
    this.keys = Math.min(keys, model.choice.contextLength);
  }

  /** @returns {PlannedProgram|null} null: no kernels run the program so */
  planIfAble() {
    try {
      return this.plan();
    } catch (error) {
      if (error instanceof TercetError) return null;
      throw error;
    }
  }

  /** @returns {PlannedProgram} */
  plan() {
    return /** @type {PlannedProgram} */ (
      Object.fromEntries(SECTIONS.map((section) => [section, this.section(section)]))
    );
  }

  /** @param {Section} section */
  section(section) {
    const { program, contract, abilities } = this.model;
    const later = section === 'body' ? program.logits : [];
    const ops = rewrite(contract, program[section], later, (op) => this.runs(op), {
      software: Boolean(abilities.software),
      keys: this.keys,
    });
    return ops.map((op, index) => this.operation(op, `${section}[${index}] ${op.op}`));
  }

  /** @param {Operation} op */
  runs(op) {
    try {
      return this.operation(op, op.op).variants.length > 0;
    } catch (error) {
      if (error instanceof TercetError) return false;
      throw error;
    }
  }

  /**
   * @param {Operation} op
   * @param {string} label
   * @returns {PlannedOperation}
   */
  operation(op, label) {
    const { program, tensors, contract, abilities, choice } = this.model;
    const spec = opSpec(contract, op.op);
    const tensor = spec.weights?.length ? (tensors.get(op[spec.weights[0]]) ?? null) : null;
    const symbols = {
      ...symbolsOf(program, contract, op, spec, tensor, choice),
      few: Number(this.kind === 'few'),
      software: Number(abilities.software ?? false),
    };
    const lastRows = (op.out === undefined ? (op.logits ? 'R' : 'T') : program.values[op.out].shape[0]) === 'R';
    const { forced } = choice;
    const left = forced
      ? { ...contract, kernels: contract.kernels.filter(({ name }) => !forced.off.has(name)) }
      : contract;
    const kernels = candidates(left, op.op, symbols, abilities, lastRows ? this.rows : this.tokens);
    const cut = tensor ? pieces(tensor, contract, choice.limit ?? Infinity) : [];
    const known = tensor ? cut.map((piece) => ({ ...symbols, ...pieceSymbols(tensor, piece) })) : [symbols];
    const variants = known.map((all) =>
      kernels.map((kernel) => variantOf(contract, abilities, kernel, { ...all, ...forced?.tuned.get(kernel.name) })),
    );
    return { label, op, spec, lastRows, tensor, variants };
  }
}

/**
 * @param {Contract} contract
 * @param {Abilities} abilities
 * @param {Kernel} kernel
 * @param {Symbols} symbols
 * @returns {Variant}
 */
function variantOf(contract, abilities, kernel, symbols) {
  const overrides = overrideValues(contract, kernel, { ...tunedFor(kernel, abilities), ...symbols });
  return { kernel, overrides, symbols: withTuned(kernel, symbols, overrides) };
}

/**
 * The same operation with another kernel, or other tuned constants.
 * @param {Contract} contract
 * @param {Abilities} abilities
 * @param {Variant} variant
 * @param {Kernel} kernel
 * @param {Record<string, number>} tuned
 * @returns {Variant}
 */
export function withSetting(contract, abilities, variant, kernel, tuned) {
  const symbols = { ...variant.symbols };
  for (const name of Object.keys(variant.kernel.tuned ?? {})) delete symbols[name];
  return variantOf(contract, abilities, kernel, { ...symbols, ...tuned });
}

/**
 * The kernel that turns ternary rows as they lie on disk into the resident layout.
 * @param {Contract} contract
 * @param {Abilities} abilities
 * @param {Tensor} tensor
 * @param {number} rows
 */
export function expandVariant(contract, abilities, tensor, rows) {
  const symbols = { ...tensorSymbols(contract, tensor), ...pieceSymbols(tensor, { row: 0, rows }) };
  return variantOf(contract, abilities, candidates(contract, 'expand', symbols, abilities, [1, 1])[0], symbols);
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
  for (const field of spec.optional_integers ?? []) symbols[field] = op[field] ?? 0;
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
  else if (out) Object.assign(symbols, { K: out.shape[1], K_REST: out.shape[1] % 4 });
  const via = spec.via && program.values[op[spec.via]];
  // Of a product the activations that come in decide the kernel, of all else those that go out.
  const activation = (via || (tensor && x ? x : out))?.dtype;
  if (activation) {
    symbols.activation = activation;
    symbols.PLANES = isInteger(activation) && activation === 'a16' ? 2 : 1;
    if (via) Object.assign(symbols, sharedSymbols(via.shape[1], symbols.PLANES));
  }
  if (op.kv_heads) {
    const allHeads = op.heads + 2 * op.kv_heads;
    const groupHeads = Math.floor(op.heads / op.kv_heads);
    symbols.GROUP_HEADS = groupHeads;
    symbols.GROUP_DIMS = groupHeads * op.head_dim;
    symbols.D_REST = op.head_dim % 16;
    symbols.PART_VECTORS = Math.floor(op.head_dim / 4) + 1;
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
    GROUP_BLOCKS: Math.max(1, Math.floor(tensor.group / 64)),
    K_REST: tensor.shape[1] % 4,
  };
}

/**
 * The integer activations of a token in workgroup memory: vec4s, and bytes with their sums.
 * @param {number} columns
 * @param {number} planes
 */
function sharedSymbols(columns, planes) {
  const blocks = Math.ceil(columns / 64);
  return { Q_VECTORS: 4 * blocks * planes, Q_BYTES: (64 * planes + 4) * blocks };
}

/**
 * The symbols of a piece of a tensor.
 * @param {Tensor} tensor
 * @param {import('./memory.js').Piece} piece
 * @returns {Symbols}
 */
const pieceSymbols = (tensor, { row, rows }) => ({ N: rows, ROW0: row, SCALE_WORDS: scaleWords(tensor, rows) });

/** @param {PlannedStep[]} planned @returns {Variant[]} one for each kernel and set of overrides */
export function distinctVariants(planned) {
  /** @type {Map<string, Variant>} */
  const found = new Map();
  for (const operation of planned.flatMap(({ program }) => SECTIONS.flatMap((section) => program[section]))) {
    for (const variant of operation.variants.flat()) {
      found.set(`${variant.kernel.name} ${JSON.stringify(variant.overrides)}`, variant);
    }
  }
  return [...found.values()];
}
