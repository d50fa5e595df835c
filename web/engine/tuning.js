/**
 * Chooses the constants of kernels by timing them at load, on the pack's own weights: `timed` constants and `rival`
 * kernels of kernels.json, which change no bit of a result. What was chosen is remembered for the adapter and the pack.
 * The Python twin is shaders/native_tuning.py.
 */
import { commandsFor } from './bindings.js';
import { rivals } from './contract.js';
import { PARALLEL_COMPILES } from './kernels.js';
import { withSetting } from './operations.js';
import { recall, remember } from './tuning_memory.js';
import { BUDGET_MS, chooseFastest } from './tuning_race.js';
import { logitsOf, startsOf } from './verification.js';
import { inParallel, unlessAborted } from './waiting.js';

/**
 * @typedef {import('./contract.js').Contract} Contract
 * @typedef {import('./contract.js').Kernel} Kernel
 * @typedef {import('./operations.js').Variant} Variant
 * @typedef {import('./operations.js').PlannedStep} PlannedStep
 * @typedef {import('./operations.js').PlannedOperation} PlannedOperation
 * @typedef {import('./bindings.js').Command} Command
 * @typedef {import('./executor.js').Executor} Executor
 * @typedef {import('./kernels.js').Kernels} Kernels
 * @typedef {import('./forced.js').Forced} Forced
 *
 * @typedef {{kernel: string, tuned: Record<string, number>}} Setting  a kernel with its timed constants
 *
 * @typedef {object} Kind  operations of a decode step that the same kernel runs, on matrices of one shape
 * @property {string} key
 * @property {Setting[]} settings  to try; the first is the default
 * @property {PlannedOperation[]} operations  of a step; each layer has weights of its own
 *
 * @typedef {object} TuningReport
 * @property {Record<string, Record<string, number>>} kernels  kind -> constants in force
 * @property {number} remembered  kinds that an earlier load chose
 * @property {number} timed  kinds that this load chose; others wait for the next one
 * @property {number} measureMs
 * @property {number} compileMs  of the candidates, while the weights come
 *
 * @typedef {object} Model  what a step of is compared before and after
 * @property {GPUBuffer} logits
 * @property {number} vocabulary
 * @property {number} contextLength
 */

/** Of a kernel: each is compiled. */
const MOST_SETTINGS = 4;
/** Sections whose operations may run again and again: the others count tokens. @type {('body'|'logits')[]} */
const SECTIONS = ['body', 'logits'];

/** @param {Pick<Variant, 'kernel'|'symbols'>} variant */
export const kindOf = ({ kernel, symbols }) =>
  symbols.ROW_WORDS === undefined ? kernel.name : `${kernel.name} ${symbols.OUT_N}x${symbols.K}`;

/** @param {Kernel} kernel @returns {Setting[]} the default first */
export function settingsOf(kernel) {
  /** @type {Record<string, number>[]} */
  let all = [{}];
  for (const name of kernel.timed ?? []) {
    const values = /** @type {Record<string, number[]>} */ (kernel.tuned)[name];
    all = all.flatMap((tuned) => values.map((value) => ({ ...tuned, [name]: value })));
  }
  return all.slice(0, MOST_SETTINGS).map((tuned) => ({ kernel: kernel.name, tuned }));
}

/** @param {PlannedStep[]} planned */
const decodeOperations = (planned) =>
  planned
    .filter(({ kind }) => kind === 'one')
    .map(({ program }) => SECTIONS.flatMap((section) => program[section]));

/**
 * @param {PlannedStep[]} planned  with default constants
 * @param {Contract} contract
 * @param {import('./contract.js').Abilities} abilities
 * @param {Forced} [forced]
 * @returns {Kind[]} those of which more than one setting may be tried
 */
export function kindsOf(planned, contract, abilities, forced) {
  if (abilities.software || forced?.defaults) return [];
  /** @type {Map<string, Kind>} */
  const kinds = new Map();
  for (const operations of decodeOperations(planned)) {
    /** @type {Map<string, PlannedOperation[]>} */
    const here = new Map();
    for (const operation of operations) {
      const key = kindOf(operation.variants[0][0]);
      here.set(key, [...(here.get(key) ?? []), operation]);
    }
    for (const [key, alike] of here) {
      const { kernel, symbols } = alike[0].variants[0][0];
      const free = [kernel, ...rivals(contract, kernel, symbols, abilities, 1)].filter(
        ({ name }) => !forced?.tuned.has(name) && !forced?.off.has(name),
      );
      // Each is compiled: of a rival only its default.
      const settings = free.flatMap((one) => (one === kernel ? settingsOf(one) : settingsOf(one).slice(0, 1)));
      // A kernel that is forced keeps what it was given; without the default nothing can be compared.
      if (free[0] !== kernel || settings.length < 2 || kinds.has(key)) continue;
      kinds.set(key, { key, settings, operations: alike });
    }
  }
  return [...kinds.values()];
}

/** The choices of one load. */
export class Tuning {
  /**
   * @param {Kernels} kernels
   * @param {PlannedStep[]} planned  gets the constants that are chosen
   * @param {{kinds: Kind[], memory: import('./tuning_memory.js').Memory|null}} known
   */
  constructor(kernels, planned, { kinds, memory }) {
    this.kernels = kernels;
    this.planned = planned;
    this.memory = memory;
    this.kinds = kinds;
    /** Setting of each kind that is decided. @type {Map<string, number>} */
    this.chosen = new Map();
    /** Pipelines that did not compile: `key setting`. @type {Set<string>} */
    this.broken = new Set();
    this.remembered = 0;
    this.timed = 0;
    this.measureMs = 0;
    this.compileMs = 0;
  }

  /**
   * With what earlier loads chose.
   * @param {Kernels} kernels
   * @param {PlannedStep[]} planned
   * @param {{forced?: Forced, memory: import('./tuning_memory.js').Memory|null}} options
   */
  static async open(kernels, planned, { forced, memory }) {
    const kinds = kindsOf(planned, kernels.contract, kernels.gpu.abilities, forced);
    const tuning = new Tuning(kernels, planned, { kinds, memory });
    if (memory && kinds.length) {
      tuning.chosen = await recall(memory, kinds);
      tuning.remembered = tuning.chosen.size;
      tuning.apply(tuning.chosen);
    }
    return tuning;
  }

  /** @returns {Kind[]} kinds that nobody has decided */
  get open() {
    return this.kinds.filter(({ key }) => !this.chosen.has(key));
  }

  /**
   * Compile the candidates. One that does not compile is out of the race.
   * @param {AbortSignal} [signal]
   */
  async compile(signal) {
    const began = performance.now();
    const wanted = this.open.flatMap((kind) => kind.settings.map((_, index) => ({ kind, index })));
    await unlessAborted(
      inParallel(wanted, PARALLEL_COMPILES, signal, async ({ kind, index }) => {
        for (const { kernel, overrides } of kind.operations.flatMap((one) => this.variants(one, kind, index)[0])) {
          await this.kernels.compile(kernel, overrides, signal).catch((error) => {
            signal?.throwIfAborted();
            this.kernels.gpu.check();
            if (index === 0) throw error;
            this.broken.add(`${kind.key} ${index}`);
          });
        }
      }),
      signal,
    );
    this.compileMs = wanted.length ? performance.now() - began : 0;
  }

  /**
   * Time what is open and take what is faster, if a step gives the same bits with it.
   * @param {Executor} executor  nothing of its values and caches is kept
   * @param {Model} model
   * @param {{budgetMs?: number, now?: () => number}} [options]
   */
  async run(executor, model, options = {}) {
    const { open } = this;
    if (!open.length) return;
    const began = performance.now();
    const usable = open.map((kind) => ({
      ...kind,
      settings: kind.settings.filter((_, index) => !this.broken.has(`${kind.key} ${index}`)),
    }));
    const lists = await Promise.all(usable.map((kind) => this.commands(executor, kind)));
    executor.gpu.queue.writeBuffer(executor.buffers.run.step, 0, new Uint32Array([0, 1, 1, 0]));
    const now = options.now ?? (() => performance.now());
    const found = await chooseFastest(usable, (kind, index, rounds) => timed(executor, lists[kind][index], rounds, now), {
      budgetMs: BUDGET_MS - (performance.now() - began),
      ...options,
    });
    /** In the numbering of all settings. @type {Map<string, number>} */
    const decided = new Map();
    for (const [index, kind] of open.entries()) {
      const winner = found.get(kind.key);
      if (winner !== undefined) decided.set(kind.key, kind.settings.indexOf(usable[index].settings[winner]));
    }
    await this.take(executor, decided, model);
    this.timed = decided.size;
    this.measureMs = performance.now() - began;
    if (this.memory && decided.size) await remember(this.memory, this.kinds, this.chosen);
  }

  /**
   * @param {Executor} executor
   * @param {Map<string, number>} decided
   * @param {Model} model
   */
  async take(executor, decided, model) {
    if ([...decided.values()].some((index) => index > 0)) {
      const before = await firstLogits(executor, model);
      await executor.rebind(this.planned, this.apply(decided));
      const after = await firstLogits(executor, model);
      if (before.some((word, index) => word !== after[index])) {
        // A device that this makes a difference to runs what the self-check has seen.
        for (const key of decided.keys()) decided.set(key, 0);
        await executor.rebind(this.planned, this.apply(decided));
      }
    }
    for (const [key, index] of decided) this.chosen.set(key, index);
  }

  /**
   * Give the planned operations of decode steps their settings.
   * @param {Map<string, number>} chosen
   * @returns {Set<PlannedOperation>} those that changed
   */
  apply(chosen) {
    /** @type {Set<PlannedOperation>} */
    const changed = new Set();
    for (const kind of this.kinds) {
      const index = chosen.get(kind.key);
      if (index === undefined) continue;
      const keys = new Set(kind.settings.map(({ kernel }) => kernel));
      for (const operation of decodeOperations(this.planned).flat()) {
        const [{ kernel, symbols }] = operation.variants[0];
        // A rival may stand there already.
        if (!keys.has(kernel.name) || kindOf({ kernel: this.kernel(kind.settings[0]), symbols }) !== kind.key) continue;
        operation.variants = this.variants(operation, kind, index);
        changed.add(operation);
      }
    }
    return changed;
  }

  /**
   * @param {PlannedOperation} operation
   * @param {Kind} kind
   * @param {number} index
   * @returns {Variant[][]}
   */
  variants(operation, kind, index) {
    const { contract, gpu } = this.kernels;
    const setting = kind.settings[index];
    return operation.variants.map((piece) =>
      piece.map((variant) => withSetting(contract, gpu.abilities, variant, this.kernel(setting), setting.tuned)),
    );
  }

  /**
   * The dispatches of a kind with each of its settings.
   * @param {Executor} executor
   * @param {Kind} kind
   * @returns {Promise<Command[][]>}
   */
  commands(executor, kind) {
    return Promise.all(
      kind.settings.map(async (_, index) => {
        const bound = kind.operations.map((operation) =>
          executor.binder.operation({ ...operation, variants: this.variants(operation, kind, index) }),
        );
        return commandsFor(await Promise.all(bound), 1, 1, executor.keyChunk);
      }),
    );
  }

  /** @param {Setting} setting @returns {Kernel} */
  kernel({ kernel }) {
    return /** @type {Kernel} */ (this.kernels.contract.kernels.find(({ name }) => name === kernel));
  }

  /** @returns {TuningReport} */
  report() {
    /** @type {Record<string, Record<string, number>>} */
    const kernels = {};
    for (const [variant] of decodeOperations(this.planned).flatMap((all) => all.map(({ variants }) => variants[0]))) {
      const names = variant.kernel.timed ?? [];
      if (names.length) {
        kernels[kindOf(variant)] = Object.fromEntries(names.map((name) => [name, variant.overrides[name]]));
      }
    }
    const { remembered, timed: count, measureMs, compileMs } = this;
    return { kernels, remembered, timed: count, measureMs, compileMs };
  }
}

/**
 * @param {Executor} executor
 * @param {Command[]} commands
 * @param {number} rounds  below one: a part of the commands
 * @param {() => number} now
 */
async function timed(executor, commands, rounds, now) {
  const { gpu } = executor;
  const part = rounds < 1 ? commands.slice(0, Math.max(1, Math.ceil(rounds * commands.length))) : commands;
  const list = executor.encode(part, Math.max(1, Math.round(rounds))).finish();
  const began = now();
  gpu.queue.submit([list]);
  await gpu.alive(gpu.queue.onSubmittedWorkDone());
  return now() - began;
}

/**
 * The logits of one token, before and beyond the number of keys at which steps are rewritten.
 * @param {Executor} executor
 * @param {Model} model
 * @returns {Promise<Uint32Array>}
 */
async function firstLogits(executor, { logits, vocabulary, contextLength }) {
  const starts = startsOf(executor, contextLength, 1);
  const found = new Uint32Array(starts.length * vocabulary);
  for (const [index, start] of starts.entries()) {
    found.set(await logitsOf(executor, logits, 'one', [1 % vocabulary], start, vocabulary), index * vocabulary);
  }
  return found;
}
