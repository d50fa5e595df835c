import assert from 'node:assert/strict';
import { test } from 'node:test';

import { parseForced } from '../../web/engine/forced.js';
import { planProgram } from '../../web/engine/operations.js';
import { checkProgram } from '../../web/engine/program.js';
import { openMemory as openStore } from '../../web/engine/store_memory.js';
import { createStore } from '../../web/engine/store.js';
import { Tuning, kindsOf, settingsOf } from '../../web/engine/tuning.js';
import { openMemory } from '../../web/engine/tuning_memory.js';
import { chooseFastest } from '../../web/engine/tuning_race.js';
import { contract, goodProgram, goodTensors, sha256 } from './helpers.mjs';

const ABLE = { features: new Set(), language: new Set(['packed_4x8_integer_dot_product']), software: false };
const CHOICE = { contextLength: 1024, kvCache: 'f16', chunk: 4 };
const VOCABULARY = 32;
const OUT = 'quantize_linear 8x8';

function plan(known = contract, abilities = ABLE, forced = undefined) {
  const program = checkProgram(goodProgram(), known, goodTensors());
  return planProgram(program, goodTensors(), known, abilities, { ...CHOICE, forced });
}

/** The contract with a rival of quantize_linear, before or behind all others, that wants a feature. */
function withRival(changes = {}) {
  const plain = contract.kernels.find(({ name }) => name === 'quantize_linear');
  const rival = { ...plain, name: 'quantize_linear_fast', rival: true, needs: ['subgroups'], ...changes };
  const others = contract.kernels.filter(({ needs }) => !needs).map((one) => ({ ...one, rival: undefined }));
  return { ...contract, kernels: [...others, rival] };
}
const WITH_SUBGROUPS = { ...ABLE, features: new Set(['subgroups']) };

/**
 * An executor whose GPU takes `cost(kernel, overrides)` ms for a command, by a clock of its own.
 * bits: what the logits are while these kernels are bound.
 */
class FakeExecutor {
  constructor(tuning, cost, bits = () => 7) {
    Object.assign(this, { tuning, cost, bits, clock: 0, log: [], keyChunk: 128, rebound: 0 });
    this.bound = [{ keys: 512 }, { keys: Infinity }];
    this.buffers = { run: { step: {}, ids: {} } };
    this.now = () => this.clock;
    const group = null;
    this.binder = {
      operation: async ({ lastRows, variants }) => ({
        lastRows,
        pieces: variants.map((piece) => piece.map((one) => ({ ...one, pipeline: one, group }))),
      }),
    };
    this.gpu = {
      info: null,
      queue: {
        writeBuffer() {},
        submit: ([list]) => {
          for (const { kernel, overrides } of list.commands) this.clock += list.times * cost(kernel.name, overrides);
          if (list.commands.length) this.log.push(list);
        },
        onSubmittedWorkDone: async () => {},
      },
      alive: (promise) => promise,
      free() {},
      buffer: (_, size) => ({
        mapAsync: async () => {},
        getMappedRange: () => new Uint32Array(size / 4).fill(bits(tuning.planned)).buffer,
      }),
    };
  }

  encode(commands, times) {
    const list = { commands: commands.map(({ pipeline }) => pipeline), times };
    return { copyBufferToBuffer() {}, finish: () => list };
  }

  commands() {
    return [];
  }

  async rebind(planned, changed) {
    assert.equal(planned, this.tuning.planned);
    assert.ok(changed.size > 0);
    this.rebound += 1;
  }
}

const MODEL = { logits: {}, vocabulary: VOCABULARY, contextLength: CHOICE.contextLength };
const fakeKernels = (known = contract, abilities = ABLE, compile = async () => ({})) => ({
  contract: known,
  compile,
  gpu: { abilities, check() {} },
});

/** A load, from what is remembered to what is measured. */
async function load(cost, { memory = null, known = contract, abilities = ABLE, forced, bits, compile, budgetMs } = {}) {
  const planned = plan(known, abilities, forced);
  const tuning = await Tuning.open(fakeKernels(known, abilities, compile), planned, { forced, memory });
  const executor = new FakeExecutor(tuning, cost, bits);
  await tuning.compile();
  await tuning.run(executor, MODEL, { now: executor.now, ...(budgetMs ? { budgetMs } : {}) });
  return { tuning, executor, report: tuning.report() };
}

/** 32 rows are the best for all that has rows. */
const rowsCost = (name, { ROWS = 32, WORKGROUP }) => 0.1 + 0.02 * Math.abs(ROWS - 32) + (name ? 0 : WORKGROUP);

test('the kinds of a decode step that have something to choose, the default first', () => {
  const kinds = kindsOf(plan(), contract, ABLE);
  assert.deepEqual(
    kinds.map(({ key }) => key).sort(),
    [
      'glu_linear 8x12',
      'linear_float_wide 32x8',
      'linear_ternary 16x8',
      'linear_ternary 24x8',
      'quantize_linear 8x8',
    ],
  );
  for (const { key, settings } of kinds) {
    const { tuned } = contract.kernels.find(({ name }) => name === key.split(' ')[0]);
    assert.ok(settings.length > 1 && settings.length <= 4, key);
    for (const [name, value] of Object.entries(settings[0].tuned)) assert.equal(value, tuned[name][0]);
  }
  const software = { ...ABLE, software: true };
  assert.deepEqual(kindsOf(plan(contract, software), contract, software), [], 'never on a CPU renderer');
});

test('several constants are combined, and no more than a few', () => {
  const kernel = { name: 'x', tuned: { A: [1, 2], B: [3, 4, 5] }, timed: ['A', 'B'] };
  assert.deepEqual(
    settingsOf(kernel).map(({ tuned }) => tuned),
    [{ A: 1, B: 3 }, { A: 1, B: 4 }, { A: 1, B: 5 }, { A: 2, B: 3 }],
  );
  assert.deepEqual(settingsOf({ name: 'y', tuned: { A: [1, 2] } }), [{ kernel: 'y', tuned: {} }]);
});

test('every timed constant of the contract is tuned, and has other values', () => {
  const timed = contract.kernels.filter((kernel) => kernel.timed);
  assert.ok(timed.length >= 6);
  for (const { name, timed: names, tuned } of timed) {
    for (const one of names) assert.ok(tuned[one].length > 1, `${name}.${one}`);
  }
});

test('what is faster is taken, in all decode steps and in no others', async () => {
  const { report, executor, tuning } = await load(rowsCost);
  assert.deepEqual(report.kernels[OUT], { ROWS: 32 });
  assert.equal(report.kernels['linear_float_wide 32x8'].WORKGROUP, 128, 'all alike: the default stays');
  assert.equal(report.timed, tuning.kinds.length);
  assert.equal(executor.rebound, 1);
  for (const { kind, program } of tuning.planned) {
    for (const { kernel, overrides } of program.body.flatMap(({ variants }) => variants.flat())) {
      if (kernel.timed?.includes('ROWS')) assert.equal(overrides.ROWS, kind === 'one' ? 32 : kernel.tuned.ROWS[0]);
    }
  }
});

test('less than the margin changes nothing', async () => {
  const { report, executor } = await load((_, { ROWS }) => (ROWS === 32 ? 0.98 : 1));
  assert.deepEqual(report.kernels[OUT], { ROWS: 24 });
  assert.equal(executor.rebound, 0);
});

test('a device on which it makes a difference keeps the defaults', async () => {
  const rows = (planned) => planned[0].program.body.find(({ op }) => op.op === 'quantize_linear').variants[0][0].overrides.ROWS;
  const { report, executor, tuning } = await load(rowsCost, { bits: rows });
  assert.deepEqual(report.kernels[OUT], { ROWS: 24 });
  assert.equal(executor.rebound, 2);
  assert.ok([...tuning.chosen.values()].every((index) => index === 0));
});

test('a candidate that does not compile is out of the race', async () => {
  const compile = async (_, { ROWS }) => {
    if (ROWS === 32) throw new Error('too many rows');
    return {};
  };
  const { report } = await load(rowsCost, { compile });
  assert.ok(report.kernels[OUT].ROWS !== 32 && report.kernels[OUT].ROWS !== 16, 'the best of the others');
});

test('rivals are tried where the device has what they need', async () => {
  const known = withRival();
  const cost = (name) => (name === 'quantize_linear_fast' ? 0.1 : 1);
  const { report, tuning } = await load(cost, { known, abilities: WITH_SUBGROUPS });
  assert.ok('quantize_linear_fast 8x8' in report.kernels && !(OUT in report.kernels));
  const [{ program }] = tuning.planned;
  assert.equal(program.body.find(({ op }) => op.op === 'quantize_linear').variants[0][0].kernel.name, 'quantize_linear_fast');
  for (const [contractNow, abilities, forced] of [
    [known, ABLE, undefined],
    [withRival({ rival: false }), WITH_SUBGROUPS, undefined],
    [withRival({ when: { ...known.kernels.at(-1).when, activation: ['a16'] } }), WITH_SUBGROUPS, undefined],
    [withRival({ when: { ...known.kernels.at(-1).when, T: [2, 4] } }), WITH_SUBGROUPS, undefined],
    [known, WITH_SUBGROUPS, parseForced('quantize_linear_fast=off', known)],
  ]) {
    const without = await load(cost, { known: contractNow, abilities, forced });
    assert.ok(OUT in without.report.kernels);
    assert.ok(!without.executor.log.some(({ commands }) => commands.some(({ kernel }) => kernel.rival)));
  }
});

test('forced kernels are not timed, and by default none', async () => {
  const forced = parseForced('quantize_linear.ROWS=16', contract);
  const one = await load(rowsCost, { forced });
  assert.deepEqual(one.report.kernels[OUT], { ROWS: 16 });
  assert.ok(one.tuning.kinds.length > 0 && !one.tuning.kinds.some(({ key }) => key.startsWith('quantize_linear')));
  const none = await load(rowsCost, { forced: parseForced('default', contract) });
  assert.deepEqual([none.report.timed, none.executor.log.length], [0, 0]);
  assert.deepEqual(none.report.kernels[OUT], { ROWS: 24 });
});

/** Where choices are kept, as a load of the page opens it. */
async function memoryOf(files, { adapter = null, packHash = 'p', source = 'kernel' } = {}) {
  const read = async (name) => new TextEncoder().encode(`${source} ${name}`);
  const store = createStore(openStore(files));
  return openMemory({ store, files: { read }, contract, packHash }, adapter);
}

test('choices are remembered for the adapter, the pack and the kernels', async () => {
  const files = new Map();
  const first = await load(rowsCost, { memory: await memoryOf(files) });
  assert.equal(files.size, 1);
  const again = await load(() => assert.fail('nothing is measured'), { memory: await memoryOf(files) });
  assert.deepEqual(again.report.kernels, first.report.kernels);
  assert.deepEqual([again.report.remembered, again.report.timed], [first.report.timed, 0]);
  for (const other of [{ adapter: { vendor: 'x' } }, { packHash: 'q' }, { source: 'new kernel' }]) {
    const { report } = await load(rowsCost, { memory: await memoryOf(files, other) });
    assert.deepEqual([report.remembered, report.timed], [0, first.report.timed], JSON.stringify(other));
  }
  assert.equal(files.size, 3, 'what is of other kernels is written over');
});

test('a broken memory is ignored and written anew', async () => {
  const files = new Map();
  await load(rowsCost, { memory: await memoryOf(files) });
  const [[path, good]] = files;
  const kept = JSON.parse(new TextDecoder().decode(good));
  const broken = [
    '',
    '{',
    'null',
    '[]',
    '{"format":1}',
    JSON.stringify({ ...kept, format: 2 }),
    JSON.stringify({ ...kept, choices: 5 }),
    JSON.stringify({ ...kept, choices: { [OUT]: null } }),
    JSON.stringify({ ...kept, choices: { [OUT]: { kernel: 'quantize_linear', tuned: { ROWS: 5 } } } }),
    JSON.stringify({ ...kept, choices: { [OUT]: { kernel: 'linear_ternary', tuned: { ROWS: 32 } } } }),
  ];
  for (const text of broken) {
    files.set(path, new TextEncoder().encode(text));
    const { report } = await load(rowsCost, { memory: await memoryOf(files) });
    assert.equal(report.remembered, 0, text);
    assert.equal(sha256(files.get(path)), sha256(good), text);
  }
  const failing = { folder: { getFile: () => Promise.reject(new Error('gone')), putFile: async () => assert.fail() } };
  failing.folder.putFile = () => Promise.reject(new Error('full'));
  const { report } = await load(rowsCost, { memory: { ...failing, file: 'x', version: 'v' } });
  assert.ok(report.timed > 0);
});

/** Times by a table of ms for each kind and setting, on a clock that they move. */
function table(rows, order = []) {
  let clock = 0;
  const time = async (kind, setting, rounds) => {
    order.push([kind, setting]);
    const took = rows[kind][setting] * (rounds || 0.01) + 0.1;
    clock += took;
    return took;
  };
  const kinds = rows.map((row, index) => ({ key: `k${index}`, settings: row }));
  return { kinds, time, now: () => clock };
}

test('what takes the most time comes first, within the budget', async () => {
  const order = [];
  const rows = [[1, 0.5], [30, 20], [5, 4]];
  const { kinds, time, now } = table(rows, order);
  const all = await chooseFastest(kinds, time, { now, budgetMs: 280 });
  assert.deepEqual([...all], [['k1', 1], ['k2', 1], ['k0', 1]]);
  assert.ok(now() < 280);
  assert.deepEqual(order.slice(0, 4), [[0, 0], [1, 0], [2, 0], [1, 0]]);
  for (const budgetMs of [10, 40, 50, 60, 70, 80]) {
    const short = table(rows);
    const some = await chooseFastest(short.kinds, short.time, { now: short.now, budgetMs });
    assert.ok(some.size < 3 || budgetMs > 60, `${budgetMs} ms`);
    // The first look at a kind has no estimate: it may begin within the budget and end after it.
    assert.ok(short.now() < Math.max(budgetMs, 36.4), `${budgetMs} ms`);
  }
});

test('what did not get its turn is measured at the next load', async () => {
  const files = new Map();
  const loads = [];
  for (let index = 0; index < 8; index++) {
    const { report } = await load(rowsCost, { memory: await memoryOf(files), budgetMs: 45 });
    loads.push(report);
  }
  assert.ok(loads[0].timed > 0 && loads[1].timed > 0, 'not all at once');
  assert.equal(loads[1].remembered, loads[0].timed);
  assert.equal(loads.at(-1).timed, 0);
  assert.deepEqual(loads.at(-1).kernels[OUT], { ROWS: 32 });
});
