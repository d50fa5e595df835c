import assert from 'node:assert/strict';
import { test } from 'node:test';

import { checkContext, checkProgram } from '../../web/engine/program.js';
import { changed, contract, fails, goodProgram, goodTensors } from './helpers.mjs';

test('a good program passes', () => {
  assert.equal(checkProgram(goodProgram(), contract, goodTensors()).body.length, 12);
});

const WRONG = [
  ['ops_version', 2, 'ops-version', 'pack-unsupported'],
  ['ops_version', undefined, 'ops-version', 'pack-unsupported'],
  ['body/0/op', 'teleport', 'operation', 'pack-unsupported'],
  ['body/0/op', 'constructor', 'operation', 'pack-unsupported'],
  ['body/0', null, 'operation', 'pack-unsupported'],
  ['body', {}, 'operation'],
  ['random', undefined, 'operation'],
  ['values', [], 'operation'],
  ['caches', undefined, 'operation'],
  ['values/h', { dtype: 'f32', shape: ['T'] }, 'operation'],
  ['values/h/dtype', 'f64', 'operation'],
  ['values/h/shape', ['S', 8], 'operation'],
  ['values/h', null, 'operation'],
  ['caches/k/heads', 0, 'operation'],
  ['caches/k/head_dim', 6, 'program-shape'],
  ['caches/k/head_dim', 260, 'program-shape'],
  ['tables/rope/kind', 'alibi', 'operation'],
  ['tables/rope/inv_freq', [1, 'x'], 'operation'],
  ['tables/rope/scale', undefined, 'operation'],
  ['body/1/eps', undefined, 'operation'],
  ['body/1/eps', '1e-5', 'operation'],
  ['body/3/heads', 1.5, 'operation'],
  ['body/8/act', 'tanh', 'operation'],
  ['body/6/accumulate', 'yes', 'operation'],
  ['body/8/act', 'relu', 'operation'],
  ['body/11/act', 'tanh', 'operation'],
  ['body/10/accumulate', false, 'operation'],
  ['body/10/accumulate', undefined, 'operation'],
  ['body/10/w', 'embed', 'operation'],
  ['body/10/w', 'nothing', 'reference'],
  ['body/10/out', 'active', 'reference'],
  ['body/10/w', 'gain', 'program-shape'],
  ['values/active/shape', ['T', 7], 'program-shape'],
  ['body/4/scale', null, 'operation'],
  ['body/4/window', -1, 'operation'],
  ['body/4/window', 0.5, 'operation'],
  ['body/4/window', 2 ** 31, 'operation'],
  ['body/4/window', null, 'operation'],
  ['body/4/window', true, 'operation'],
  ['body/3/q_gain', 'head', 'operation'],
  ['body/3/k_gain', 'head', 'operation'],
  ['body/3/eps', null, 'operation'],
  ['body/0/w', 'nothing', 'reference'],
  ['body/0/w', undefined, 'reference'],
  ['body/1/gain', undefined, 'reference'],
  ['body/1/x', 'nothing', 'reference'],
  ['body/1/out', 'nothing', 'reference'],
  ['body/3/k', 'nothing', 'reference'],
  ['body/3/rope', 'nothing', 'reference'],
  ['body/3/rope', 'constructor', 'reference'],
  ['body/1/x', 'o', 'reference'],
  ['body/8/x', 'logits', 'reference'],
  ['body/6/out', 'gu', 'reference'],
  ['body/2/w', 'gate_up', 'program-shape'],
  ['body/2/w', 'gain', 'program-shape'],
  ['body/0/w', 'down', 'program-shape'],
  ['body/1/gain', 'sub', 'program-shape'],
  ['body/3/heads', 3, 'program-shape'],
  ['body/3/kv_heads', 2, 'program-shape'],
  ['tables/rope/inv_freq', [1], 'program-shape'],
  ['body/5/out', 'ga', 'program-shape'],
  ['body/8/out', 'a', 'program-shape'],
  ['values/logits/shape', ['T', 32], 'program-shape'],
  ['values/h/shape', ['R', 8], 'program-shape'],
  ['body/5/out', 'h', 'operation'],
  ['body/2/x', 'gu', 'reference'],
];
for (const [path, to, rule, code = 'pack-invalid'] of WRONG) {
  test(`${path} = ${JSON.stringify(to)?.slice(0, 40)} breaks ${rule}`, () => {
    assert.throws(() => checkProgram(changed(goodProgram(), path, to), contract, goodTensors()), fails(code, rule));
  });
}

test('integer activations need a ternary tensor', () => {
  const tensors = goodTensors();
  tensors.get('qkv').encoding = 'q8';
  assert.throws(() => checkProgram(goodProgram(), contract, tensors), fails('pack-invalid', 'operation'));
});

test('integer sums that could overflow are refused', () => {
  const narrow = structuredClone(contract.ops);
  narrow.linear.most_columns.a8 = 7;
  assert.throws(
    () => checkProgram(goodProgram(), { ...contract, ops: narrow }, goodTensors()),
    fails('pack-invalid', 'program-shape'),
  );
});

test('a context has a row for each of its positions', () => {
  checkContext(goodProgram(), goodTensors(), 20);
  assert.throws(() => checkContext(goodProgram(), goodTensors(), 21), fails('pack-invalid', 'program-shape'));
});

const HEAD_GAINS = [
  [{ q_gain: 'head', k_gain: 'nothing' }, 'reference'],
  [{ q_gain: 'gain', k_gain: 'head' }, 'program-shape'],
  [{ q_gain: 'head', k_gain: 'qkv' }, 'program-shape'],
];
for (const [gains, rule] of HEAD_GAINS) {
  test(`gains of heads ${JSON.stringify(gains)} break ${rule}`, () => {
    const program = goodProgram();
    Object.assign(program.body[3], gains);
    assert.throws(() => checkProgram(program, contract, goodTensors()), fails('pack-invalid', rule));
  });
}

/** A norm at the end of the body that adds to a value. */
const adding = (out) => {
  const program = goodProgram();
  program.body.push({ op: 'norm', x: 'h', gain: 'gain', eps: 1e-5, accumulate: true, out });
  return program;
};

test('a window, gains of heads and a norm that adds pass', () => {
  for (const window of [0, 1, 2 ** 31 - 1]) {
    const program = adding('o');
    Object.assign(program.body[3], { q_gain: 'head', k_gain: 'head', eps: 1e-6 });
    program.body[4].window = window;
    checkProgram(program, contract, goodTensors());
  }
});

test('a norm adds to floats alone, and to what was written', () => {
  assert.throws(() => checkProgram(adding('a'), contract, goodTensors()), fails('pack-invalid', 'operation'));
  const program = adding('late');
  program.values.late = { dtype: 'f32', shape: ['T', 8] };
  assert.throws(() => checkProgram(program, contract, goodTensors()), fails('pack-invalid', 'reference'));
});

test('an operation cannot read what it writes', () => {
  const program = changed(goodProgram(), 'logits/0/out', 'h');
  assert.throws(() => checkProgram(program, contract, goodTensors()), fails('pack-invalid', 'reference'));
});

const CHOICE = [
  ['greedy', [], 'operation'],
  ['greedy', [{ op: 'sample', logits: 'logits' }], 'operation'],
  ['random/0/logits', 'hn', 'reference'],
  ['logits/1', { op: 'argmax', logits: 'logits' }, 'reference'],
  ['body/3/v', 'k', 'reference'],
  ['body/1/eps', 1e39, 'operation'],
];
for (const [path, to, rule] of CHOICE) {
  test(`${path} = ${JSON.stringify(to)} breaks ${rule}`, () => {
    assert.throws(
      () => checkProgram(changed(goodProgram(), path, to), contract, goodTensors()),
      fails('pack-invalid', rule),
    );
  });
}

test('embeddings hold one row a logit', () => {
  const program = goodProgram();
  program.body[0].w = 'other';
  const tensors = goodTensors().set('other', { ...goodTensors().get('embed'), shape: [40, 8] });
  assert.throws(() => checkProgram(program, contract, tensors), fails('pack-invalid', 'program-shape'));
});
