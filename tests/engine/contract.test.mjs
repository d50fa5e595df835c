import assert from 'node:assert/strict';
import { test } from 'node:test';

import {
  candidates,
  checkContract,
  dimension,
  elements,
  encodeParams,
  overrideValues,
  takesRows,
  withTuned,
  workgroups,
} from '../../web/engine/contract.js';
import { planProgram } from '../../web/engine/operations.js';
import { checkProgram } from '../../web/engine/program.js';
import { contract, fails, goodProgram, goodTensors } from './helpers.mjs';

const ABLE = { features: new Set(), language: new Set(['packed_4x8_integer_dot_product']) };
const kernel = (name) => contract.kernels.find((one) => one.name === name);

test('dimensions are numbers, symbols and quotients rounded up', () => {
  const symbols = { K: 130, N: 6, WORKGROUP: 64, word: 'x' };
  assert.equal(dimension(3, symbols), 3);
  assert.equal(dimension('K', symbols), 130);
  assert.equal(dimension(['K', 64], symbols), 3);
  assert.equal(dimension(['K', 'WORKGROUP'], symbols), 3);
  assert.equal(dimension([['K', 64], 2], symbols), 2);
  assert.equal(elements(['N', ['K', 64], 4], symbols), 72);
  assert.throws(() => dimension('M', symbols), fails('internal'));
  assert.throws(() => dimension('word', symbols), fails('internal'));
});

test('parameters lie at 4 x index in little-endian u32 and f32, padded to 16 bytes', () => {
  const block = encodeParams(kernel('attention'), { heads: 9, kv_heads: 3, head_dim: 64, scale: 0.125 });
  assert.deepEqual([...new Uint32Array(block, 0, 3)], [9, 3, 64]);
  assert.equal(new Float32Array(block)[3], 0.125);
  assert.equal(encodeParams(kernel('norm'), { K: 5, eps: 1e-5 }).byteLength, 16);
});

test('overrides are numbers, symbols, names of enums, and tuned values', () => {
  const symbols = { encoding: 'q4', scale: 'group', has_bias: 1, accumulate: 0, N: 6 };
  const found = overrideValues(contract, kernel('linear_float'), symbols);
  assert.deepEqual(found, { WORKGROUP: 64, ENCODING: 2, SCALE_GROUP: 1, BIAS: 1, ACCUMULATE: 0 });
  assert.equal(overrideValues(contract, kernel('linear_float'), { ...symbols, WORKGROUP: 32 }).WORKGROUP, 32);
  assert.throws(
    () => overrideValues(contract, kernel('linear_float'), { ...symbols, encoding: 'q3' }),
    fails('internal'),
  );
});

test('a dispatch too large for x is folded over x and y and covers everything', () => {
  const embed = kernel('embed');
  assert.deepEqual(workgroups(embed, { T: 65535 }), [65535, 1, 1]);
  const [x, y, z] = workgroups(embed, { T: 151936 });
  assert.ok(x <= 65535 && y <= 65535 && z === 1 && x * y >= 151936 && x * y < 151936 + x);
  const tiled = kernel('linear_ternary_tiled');
  assert.deepEqual(workgroups(tiled, withTuned(tiled, { N: 130, T: 9 }, { WORKGROUP: 64 })), [3, 1, 2]);
});

test('kernels are chosen by what the symbols say, and by T when a step is recorded', () => {
  const symbols = { encoding: 'ternary', activation: 'a8', scale: 'row', K: 64, N: 8 };
  const found = candidates(contract, 'linear', symbols, ABLE);
  assert.equal(found.find((one) => takesRows(one, 1)).name, 'linear_ternary');
  assert.equal(found.find((one) => takesRows(one, 2)).name, 'linear_ternary_tiled');
  assert.equal(candidates(contract, 'linear', { ...symbols, activation: 'f32' }, ABLE)[0].name, 'linear_float');
});

test('what the device lacks is named; what no kernel can do is the pack’s fault', () => {
  const symbols = { encoding: 'ternary', activation: 'a8', scale: 'row', K: 64, N: 8 };
  const error = assert.throws(
    () => candidates(contract, 'linear', symbols, { features: new Set(), language: new Set() }),
    fails('feature-missing'),
  );
  assert.equal(error, undefined);
  assert.throws(
    () => candidates(contract, 'linear', { ...symbols, encoding: 'q8' }, ABLE),
    fails('pack-unsupported', 'operation'),
  );
});

test('a contract of another version is refused', () => {
  assert.throws(() => checkContract({ ...contract, version: 2 }), fails('internal'));
  assert.throws(() => checkContract(null), fails('internal'));
});

test('every operation of a program gets its symbols, and no parameter or override changes from step to step', () => {
  const program = checkProgram(goodProgram(), contract, goodTensors());
  const planned = planProgram(program, goodTensors(), contract, ABLE, { contextLength: 64, kvCache: 'q8', chunk: 16 });
  for (const { label, tensor, variants } of Object.values(planned).flat()) {
    const piece = tensor ? { N: tensor.shape[0], ROW0: 0, SCALE_WORDS: 1 } : {};
    for (const variant of variants) {
      assert.ok(!('T' in variant.symbols || 'R' in variant.symbols), label);
      encodeParams(variant.kernel, { ...variant.symbols, ...piece });
      for (const { shape } of variant.kernel.bindings) {
        elements(shape, { GROUPS: 0, ...variant.symbols, ...piece, T: 3, X_T: 3, R: 1 });
      }
    }
  }
  const symbols = (section, index) => planned[section][index].variants[0].symbols;
  assert.equal(symbols('body', 3).KV_WORDS, 1);
  assert.deepEqual(
    [symbols('logits', 0).last_rows, symbols('logits', 1).last_rows, symbols('body', 1).last_rows],
    [1, 1, 0],
  );
  assert.deepEqual(
    [symbols('body', 1).activation, symbols('body', 2).activation, symbols('logits', 1).activation],
    ['a8', 'a8', 'f32'],
  );
  assert.deepEqual([symbols('body', 6).accumulate, symbols('body', 2).accumulate], [1, 0]);
});

test('kernels that no step can use are not compiled', () => {
  const program = checkProgram(goodProgram(), contract, goodTensors());
  const names = (chunk) => {
    const planned = planProgram(program, goodTensors(), contract, ABLE, { contextLength: 64, kvCache: 'f16', chunk });
    return [planned.body[2], planned.logits[1]].map(({ variants }) => variants.map(({ kernel: { name } }) => name));
  };
  assert.deepEqual(names(16), [['linear_ternary', 'linear_ternary_tiled'], ['linear_float']]);
  assert.deepEqual(names(1), [['linear_ternary'], ['linear_float']]);
});
