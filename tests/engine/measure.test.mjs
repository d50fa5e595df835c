/** The arithmetic of measuring: no GPU. */
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { fitting } from '../../web/engine/measure.js';
import { bytesPerToken, copiesProgram, distinctLinears, layersOf } from '../../web/engine/measure_copies.js';
import { median, spread } from '../../web/engine/measure_timing.js';
import { verifySeconds } from '../../web/engine/measure_verify.js';

const contract = {
  encodings: {
    ternary: { block: 64, block_words: 4, disk_block: 20, disk_block_words: 1 },
    q8: { block: 32, block_words: 8, disk_block: 32, disk_block_words: 8 },
  },
};
/** @param {string} name @param {string} encoding @param {number[]} shape @param {object} more */
const tensor = (name, encoding, shape, more = {}) => ({ name, encoding, shape, scale: null, parts: [], group: 0, ...more });
const parts = { scale: 'parts' };
const tensors = new Map(
  [
    tensor('embed', 'q8', [100, 64], { group: 32 }),
    tensor('head', 'q8', [100, 64], { group: 32 }),
    tensor('0.o', 'ternary', [10, 70], parts),
    tensor('1.o', 'ternary', [10, 70], parts),
    tensor('1.p', 'ternary', [10, 70], { scale: 'group', group: 64 }),
    tensor('gain', 'f32', [64]),
  ].map((one) => [one.name, one]),
);
const value = (/** @type {string} */ dtype, /** @type {number} */ columns) => ({ dtype, shape: ['T', columns] });
const program = {
  values: { h: value('f32', 64), a: value('a8', 70), last: value('f32', 64) },
  caches: { 'k.0': {}, 'v.0': {}, 'k.1': {}, 'v.1': {} },
  body: [
    { op: 'embed', w: 'embed', out: 'h' },
    { op: 'linear', x: 'a', w: '0.o', out: 'h', accumulate: true },
    { op: 'linear', x: 'a', w: '1.o', out: 'h', accumulate: true },
    { op: 'linear', x: 'a', w: '1.p', out: 'h', accumulate: true },
    { op: 'linear', x: 'a', w: '1.o', out: 'h' },
  ],
  logits: [{ op: 'linear', x: 'last', w: 'head', out: 'logits' }],
};

test('the median and the spread of an odd and an even number of timings', () => {
  assert.equal(median([5, 1, 3]), 3);
  assert.equal(median([4, 1, 3, 2]), 2.5);
  assert.equal(spread([2, 1, 3]), 1);
  assert.equal(spread([7]), 0);
});

test('sizes that do not fit become the largest that does, once', () => {
  assert.deepEqual(fitting([128, 1024, 4096], 3840), [128, 1024, 3840]);
  assert.deepEqual(fitting([128, 1024], 64), [64]);
  assert.deepEqual(fitting([8], -3), [1]);
});

test('matrices that differ in size, scales, activations or sum are told apart, layers are not', () => {
  const found = distinctLinears(/** @type {any} */ (program), /** @type {any} */ (tensors));
  assert.deepEqual(
    found.map(({ name, op, dtype, isHead }) => [name, op.w, dtype, isHead]),
    [
      ['o', '0.o', 'a8', false],
      ['p', '1.p', 'a8', false],
      ['o', '1.o', 'a8', false],
      ['head', 'head', 'f32', true],
    ],
  );
  assert.equal(layersOf(/** @type {any} */ (program)), 2);
});

test('a token reads all weights, one row of an embedding that is no head, and the cache', () => {
  const q8 = 100 * 64 + 100 * 2 * 2;
  const ternary = 10 * 2 * 16 + 10 * 4;
  const grouped = 10 * 2 * 16 + 10 * 2 * 2;
  const all = q8 + 2 * ternary + grouped + 4 * 64;
  const bytes = (/** @type {any} */ one) =>
    bytesPerToken(/** @type {any} */ ({ tensors }), one, /** @type {any} */ (contract), 1000, 7);
  assert.equal(bytes(program), all + q8 / 100 + 7000);
  const tied = { ...program, logits: [{ op: 'linear', x: 'last', w: 'embed', out: 'logits' }] };
  assert.equal(bytes(tied), all + q8 + 7000);
  const placed = { ...program, body: [...program.body, { op: 'position', w: 'positions', out: 'h', accumulate: true }] };
  const without = bytes(placed);
  tensors.set('positions', tensor('positions', 'q8', [10, 64], { group: 32 }));
  assert.equal(bytes(placed), without + q8 / 100);
  tensors.delete('positions');
});

test('products go round in the copies; apart each has its output, dependent ones share it', () => {
  const [linear] = distinctLinears(/** @type {any} */ (program), /** @type {any} */ (tensors));
  const { body, logits, random, values } = copiesProgram(linear, { copies: 2, products: 3, tokens: 1 });
  assert.deepEqual(logits.map(({ w, out, accumulate }) => [w, out, accumulate]), [
    ['w.0', 'y.0', true],
    ['w.1', 'y.1', true],
    ['w.0', 'y.2', true],
  ]);
  assert.deepEqual(random.map(({ w, out }) => [w, out]), [['w.0', 'y'], ['w.1', 'y'], ['w.0', 'y']]);
  assert.deepEqual(body.map(({ op }) => op), ['embed', 'quantize']);
  assert.deepEqual(values.x, { dtype: 'a8', shape: ['T', 70] });
  const head = distinctLinears(/** @type {any} */ (program), /** @type {any} */ (tensors))[3];
  assert.deepEqual(copiesProgram(head, { copies: 1, products: 1, tokens: 1 }).body.map(({ op }) => op), ['embed']);
});

/** Stands in for the GPU: it notes what each step began with, and what the step would leave. */
function fakeSession(contextLength, verifies) {
  const step = { size: 16, words: [] };
  const log = [];
  const alive = new Set();
  const queue = {
    writeBuffer: (buffer, _, words) => (buffer.words = [...words]),
    submit: (lists) => lists.forEach((run) => run()),
    onSubmittedWorkDone: async () => undefined,
  };
  const gpu = {
    queue,
    alive: (work) => work,
    filled: (label, data) => {
      const buffer = { size: data.byteLength, words: [...data] };
      alive.add(buffer);
      return buffer;
    },
    free: (buffer) => alive.delete(buffer),
  };
  const encode = (commands, times) => {
    assert.equal(times, 1);
    const work = [() => log.push([...commands, ...step.words]), () => (step.words = [step.words[0] + 1, 1, 1, 1])];
    return {
      copyBufferToBuffer: (from, _, to) => work.push(() => (to.words = [...from.words])),
      finish: () => () => work.forEach((one) => one()),
    };
  };
  const executor = {
    ...{ gpu, encode, verifies, mostVerified: 8, buffers: { run: { step, ids: {} } } },
    commands: (kind, sections, tokens, keys) => [kind, sections.join(), keys],
  };
  return { session: { executor, contextLength }, log, alive };
}

test('steps that verify are timed beside a step of one token, each from the same position', async () => {
  const sizes = { seconds: 0, repeats: 3, budget: 1 };
  for (const [contextLength, verifies, position, tokens] of [
    [512, true, 128, [1, 2, 4, 8]],
    [100, true, 92, [1, 2, 4, 8]],
    [5, true, 0, [1, 2, 4]],
    [512, false, 128, [1]],
  ]) {
    const { session, log, alive } = fakeSession(contextLength, verifies);
    const found = await verifySeconds(session, 128, sizes);
    assert.deepEqual(found.map((one) => one.tokens), tokens);
    assert.ok(found.every(({ seconds }) => seconds >= 0 && Number.isFinite(seconds)));
    const expected = tokens.flatMap((count) => {
      const kind = count === 1 ? 'one' : 'few';
      return Array(4).fill([kind, 'body,logits,greedy', position + count, position, count, count, 0]);
    });
    assert.deepEqual(log, expected);
    assert.equal(alive.size, 0, 'no buffer is left');
  }
});
