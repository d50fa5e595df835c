/** The buffers of a loaded model and the bind groups of its operations, made once at load. */
import { STEP_SYMBOLS, encodeParams, takesRows, workgroups } from './contract.js';
import { TercetError } from './errors.js';
import { USAGE } from './gpu.js';
import { cacheBytes, partsBytes, picksBytes, valueBytes, valueRows, weightsBytes } from './memory.js';
import { SECTIONS } from './program.js';

/**
 * @typedef {import('./contract.js').Contract} Contract
 * @typedef {import('./contract.js').Kernel} Kernel
 * @typedef {import('./contract.js').Symbols} Symbols
 * @typedef {import('./program.js').Program} Program
 * @typedef {import('./program.js').Section} Section
 * @typedef {import('./operations.js').PlannedProgram} PlannedProgram
 * @typedef {import('./operations.js').PlannedOperation} PlannedOperation
 * @typedef {import('./operations.js').Variant} Variant
 * @typedef {import('./weights.js').Weight} Weight
 * @typedef {import('./weights.js').WeightPiece} WeightPiece
 * @typedef {import('./kernels.js').Kernels} Kernels
 * @typedef {import('./gpu.js').Gpu} Gpu
 * @typedef {import('./memory.js').KvKind} KvKind
 * @typedef {{contextLength: number, kvCache: KvKind, chunk: number}} Choice
 * @typedef {Record<string, GPUBuffer>} Planes
 *
 * @typedef {object} Buffers
 * @property {Record<string, Planes>} values
 * @property {Record<string, Planes>} caches
 * @property {Record<string, GPUBuffer>} tables
 * @property {Record<'ids'|'step'|'ring'|'seen'|'sampling'|'picks'|'bins'|'keys'|'parts', GPUBuffer>} run
 *
 * One dispatch, ready to be recorded.
 * @typedef {object} Command
 * @property {GPUComputePipeline} pipeline
 * @property {GPUBindGroup} group
 * @property {number} x
 * @property {number} y
 * @property {number} z
 *
 * A kernel bound to the buffers of an operation, or of one piece of its weights.
 * @typedef {{kernel: Kernel, symbols: Symbols, pipeline: GPUComputePipeline, group: GPUBindGroup}} Bound
 * @typedef {{lastRows: boolean, pieces: Bound[][]}} BoundOperation  pieces: for each, its variants
 */

const { STORAGE, COPY_SRC, COPY_DST, UNIFORM } = USAGE;

/**
 * @param {Gpu} gpu
 * @param {Program} program
 * @param {Contract} contract
 * @param {number} vocabulary
 * @param {Choice} choice
 * @returns {Buffers}
 */
export function makeBuffers(gpu, program, contract, vocabulary, { contextLength, kvCache, chunk }) {
  /** @type {(label: string, sizes: Record<string, number>) => Planes} */
  const planes = (label, sizes) =>
    Object.fromEntries(
      Object.entries(sizes)
        .filter(([, size]) => size > 0)
        .map(([plane, size]) => [plane, gpu.buffer(`${label}.${plane}`, size, STORAGE | COPY_SRC)]),
    );
  /** @type {<T, U>(things: Record<string, T>, make: (name: string, thing: T) => U) => Record<string, U>} */
  const each = (things, make) =>
    Object.fromEntries(Object.entries(things).map(([name, thing]) => [name, make(name, thing)]));
  const weights = weightsBytes(contract, vocabulary);
  return {
    values: each(program.values, (name, value) => planes(name, valueBytes(value, valueRows(value, contract, chunk)))),
    caches: each(program.caches, (name, cache) => {
      const { data, scale } = cacheBytes(cache, kvCache);
      return planes(name, { data: data * contextLength, scale: scale * contextLength });
    }),
    tables: each(program.tables, (name, table) => gpu.filled(name, ropeTable(table, contextLength), STORAGE)),
    run: {
      ids: gpu.buffer('ids', 4 * Math.max(chunk, contract.constants.most_drafted), STORAGE | COPY_DST),
      step: gpu.buffer('step', 16, STORAGE | UNIFORM | COPY_DST | COPY_SRC),
      ring: gpu.buffer('ring', 4 * contract.constants.ring, STORAGE | COPY_SRC),
      seen: gpu.buffer('seen', 4 * Math.ceil(vocabulary / 32), STORAGE | COPY_DST),
      sampling: gpu.buffer('sampling', 32, STORAGE | COPY_DST),
      picks: gpu.buffer('picks', picksBytes(contract, vocabulary), STORAGE),
      bins: gpu.buffer('bins', weights.bins, STORAGE),
      keys: gpu.buffer('keys', weights.keys, STORAGE),
      parts: gpu.buffer('attention parts', partsBytes(program, contract, contextLength), STORAGE),
    },
  };
}

/**
 * cos and sin of f32(position) x frequency, in double precision, times the scale: [S, head_dim / 2, 2].
 * @param {import('./program.js').Table} table
 * @param {number} positions
 */
export function ropeTable({ inv_freq: frequencies, scale }, positions) {
  const table = new Float32Array(2 * positions * frequencies.length);
  let at = 0;
  for (let position = 0; position < positions; position++) {
    for (const frequency of frequencies) {
      const angle = Math.fround(position * Math.fround(frequency));
      table[at++] = Math.cos(angle) * scale;
      table[at++] = Math.sin(angle) * scale;
    }
  }
  return table;
}

/** Binds operations to buffers; pipelines must be compiled or compiling. */
export class Binder {
  /**
   * @param {Kernels} kernels
   * @param {Buffers} buffers
   * @param {Map<string, Weight>} weights
   */
  constructor(kernels, buffers, weights) {
    this.kernels = kernels;
    this.buffers = buffers;
    this.weights = weights;
    /** Parameter blocks by content: layers have the same. @type {Map<string, GPUBuffer>} */
    this.params = new Map();
    /** Vectors that share a binding, by their names. @type {Map<string, GPUBuffer>} */
    this.joined = new Map();
  }

  /**
   * @param {PlannedProgram} planned
   * @returns {Promise<Record<Section, BoundOperation[]>>}
   */
  async program(planned) {
    /** @type {Partial<Record<Section, BoundOperation[]>>} */
    const bound = {};
    for (const section of SECTIONS) {
      bound[section] = await Promise.all(planned[section].map((operation) => this.operation(operation)));
    }
    return /** @type {Record<Section, BoundOperation[]>} */ (bound);
  }

  /**
   * @param {PlannedOperation} operation
   * @returns {Promise<BoundOperation>}
   */
  async operation(operation) {
    const { tensor, label } = operation;
    const pieces = tensor ? this.weight(tensor.name).pieces : [null];
    if (pieces.length !== operation.variants.length) {
      throw new TercetError('internal', `${label} was planned for ${operation.variants.length} pieces of its weight.`);
    }
    const bind = (/** @type {WeightPiece|null} */ piece, /** @type {number} */ index) =>
      Promise.all(operation.variants[index].map((variant) => this.variant(operation, variant, piece)));
    return { lastRows: operation.lastRows, pieces: await Promise.all(pieces.map(bind)) };
  }

  /**
   * @param {PlannedOperation} operation
   * @param {Variant} variant
   * @param {WeightPiece|null} piece
   * @returns {Promise<Bound>}
   */
  async variant(operation, { kernel, overrides, symbols }, piece) {
    const { pipeline, layout } = await this.kernels.compile(kernel, overrides);
    const storage = kernel.bindings.map(({ from }) => {
      const buffer = this.resolve(operation, from, piece);
      return buffer && { buffer };
    });
    const params = this.paramsBuffer(kernel, symbols);
    const group = this.kernels.bind(kernel, layout, params, this.buffers.run.step, storage);
    return { kernel, symbols, pipeline, group };
  }

  /** @param {Kernel} kernel @param {Symbols} symbols */
  paramsBuffer(kernel, symbols) {
    const block = encodeParams(kernel, symbols);
    const key = new Uint32Array(block).join();
    const known = this.params.get(key) ?? this.kernels.gpu.filled(`params of ${kernel.name}`, block, UNIFORM);
    this.params.set(key, known);
    return known;
  }

  /**
   * The buffer that `from` of kernels.json means for an operation.
   * @param {PlannedOperation} operation
   * @param {string} from
   * @param {WeightPiece|null} piece
   * @returns {GPUBuffer|null} null: absent here
   */
  resolve({ op, spec, label }, from, piece) {
    const { values, caches, tables, run } = this.buffers;
    if (from.startsWith('@')) return run[/** @type {keyof Buffers['run']} */ (from.slice(1))];
    if (from.includes('+')) return this.join(from.split('+').map((field) => op[field] ?? null));
    const [field, plane = 'data'] = from.split('.');
    if (spec.weights?.includes(field)) return piece?.[/** @type {'data'|'scale'} */ (plane)] ?? null;
    const name = op[field];
    if ((name ?? null) === null) return null;
    if (spec.vectors?.includes(field) || spec.optional_vectors?.includes(field)) return this.weight(name).vector;
    if (spec.caches?.includes(field)) return caches[name][plane] ?? null;
    if (spec.tables?.includes(field)) return tables[name];
    if (spec.reads?.[field] || spec.writes?.[field]) return values[name][plane] ?? null;
    throw new TercetError('internal', `kernels.json binds ${from}, which ${label} does not have.`);
  }

  /**
   * Vectors one after another in one buffer, for kernels that have a single binding for them.
   * @param {(string|null)[]} names
   * @returns {GPUBuffer|null} null: absent here
   */
  join(names) {
    if (names.includes(null)) return null;
    const key = JSON.stringify(names);
    const known = this.joined.get(key);
    if (known) return known;
    const { gpu } = this.kernels;
    const parts = names.map((name) => /** @type {GPUBuffer} */ (this.weight(/** @type {string} */ (name)).vector));
    const bytes = parts.reduce((sum, { size }) => sum + size, 0);
    const buffer = gpu.buffer(names.join(' and '), bytes, STORAGE | COPY_DST);
    const encoder = gpu.device.createCommandEncoder({ label: buffer.label });
    let at = 0;
    for (const part of parts) {
      encoder.copyBufferToBuffer(part, 0, buffer, at, part.size);
      at += part.size;
    }
    gpu.queue.submit([encoder.finish()]);
    this.joined.set(key, buffer);
    return buffer;
  }

  /** @param {string} name */
  weight(name) {
    return /** @type {Weight} */ (this.weights.get(name));
  }
}

/**
 * The dispatches of some sections for a step of T tokens.
 * @param {BoundOperation[]} operations
 * @param {number} tokens
 * @param {number} rows R
 * @param {number} keys  at least as many as the last token sees
 * @returns {Command[]}
 */
export function commandsFor(operations, tokens, rows, keys) {
  return operations.flatMap(({ lastRows, pieces }) =>
    pieces.map((variants) => {
      const outRows = lastRows ? rows : tokens;
      const bound = variants.find(({ kernel }) => takesRows(kernel, outRows));
      if (!bound) throw new TercetError('internal', `No kernel takes ${outRows} rows.`);
      const { kernel, symbols, pipeline, group } = bound;
      const [x, y, z] = workgroups(kernel, { ...symbols, ...stepSymbols(outRows, tokens, rows, keys) });
      return { pipeline, group, x, y, z };
    }),
  );
}

/** @param {number[]} values in the order of STEP_SYMBOLS */
const stepSymbols = (...values) => Object.fromEntries(STEP_SYMBOLS.map((name, index) => [name, values[index]]));
