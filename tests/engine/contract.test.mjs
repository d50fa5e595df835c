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
import { parseForced } from '../../web/engine/forced.js';
import { planProgram } from '../../web/engine/operations.js';
import { checkProgram } from '../../web/engine/program.js';
import { ENCODINGS, fixedGroup, scaleWords } from '../../web/engine/tensor_layout.js';
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
  assert.deepEqual(workgroups(tiled, withTuned(tiled, { N: 130, T: 65 }, { WORKGROUP: 128 })), [3, 1, 2]);
});

test('kernels are chosen by what the symbols say, and by T when a step is recorded', () => {
  const symbols = { encoding: 'ternary', activation: 'a8', scale: 'row', K: 64, N: 8, K_REST: 0, few: 0, software: 0 };
  const names = (changes, range) =>
    candidates(contract, 'linear', { ...symbols, ...changes }, ABLE, range).map(({ name }) => name);
  assert.deepEqual(names({}, [1, 1]), ['linear_ternary']);
  assert.deepEqual(names({}, [2, 128]), ['linear_ternary_tiled']);
  assert.equal(names({ software: 1 }, [2, 128])[0], 'linear_ternary_narrow');
  assert.deepEqual(names({ few: 1 }, [2, 8]), ['linear_ternary_4', 'linear_ternary_8']);
  assert.equal(names({ activation: 'f32' }, [1, 1])[0], 'linear_float_wide');
  assert.equal(names({ activation: 'f32', K: 65, K_REST: 1 }, [1, 1])[0], 'linear_float');
  assert.ok(takesRows(kernel('linear_ternary_4'), 2) && !takesRows(kernel('linear_ternary_4'), 5));
});

test('what the device lacks is named; what no kernel can do is the pack’s fault', () => {
  const symbols = { encoding: 'ternary', activation: 'a8', scale: 'row', K: 64, N: 8, K_REST: 0, few: 0, software: 0 };
  const error = assert.throws(
    () => candidates(contract, 'linear', symbols, { features: new Set(), language: new Set() }, [1, 1]),
    fails('feature-missing'),
  );
  assert.equal(error, undefined);
  assert.throws(
    () => candidates(contract, 'linear', { ...symbols, encoding: 'q8' }, ABLE, [1, 1]),
    fails('pack-unsupported', 'operation'),
  );
});

test('scales lie as the contract says', () => {
  assert.deepEqual(Object.keys(contract.encodings).sort(), [...ENCODINGS].sort());
  for (const [encoding, { group, scale_bytes: bytes, tensor_scale: own = 0 }] of Object.entries(contract.encodings)) {
    assert.equal(fixedGroup(encoding), group);
    const tensor = { name: 't', encoding, shape: [3, 130], scale: null, parts: [], group: group || 64, slices: [3] };
    if (!bytes) continue;
    const words = Math.ceil((3 * Math.ceil(130 / tensor.group) * bytes) / 4);
    assert.equal(scaleWords(tensor, 3), own + words, encoding);
  }
});

test('a contract of another version is refused', () => {
  assert.throws(() => checkContract({ ...contract, version: 2 }), fails('internal'));
  assert.throws(() => checkContract(null), fails('internal'));
});

const CHOICE = { contextLength: 64, kvCache: 'q8', chunk: 16 };

/** The steps that are planned for the good program, by kind; keys below the limit of rewrites. */
function plan(abilities = ABLE, choice = CHOICE) {
  const program = checkProgram(goodProgram(), contract, goodTensors());
  return planProgram(program, goodTensors(), contract, abilities, choice);
}

test('every operation of a program gets its symbols, and no parameter or override changes from step to step', () => {
  const steps = plan();
  assert.deepEqual(
    steps.map(({ kind }) => kind),
    ['one', 'many', 'few'],
  );
  for (const { label, variants } of steps.flatMap(({ program }) => Object.values(program).flat())) {
    for (const variant of variants.flat()) {
      assert.ok(!['T', 'R', 'KEYS'].some((name) => name in variant.symbols), label);
      encodeParams(variant.kernel, variant.symbols);
      for (const { shape } of variant.kernel.bindings) {
        elements(shape, { GROUPS: 0, ...variant.symbols, T: 3, X_T: 3, R: 1 });
      }
    }
  }
  const { program } = steps.find(({ kind }) => kind === 'many');
  const symbols = (section, index) => program[section][index].variants[0][0].symbols;
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
  const kinds = (chunk) => plan(ABLE, { ...CHOICE, chunk }).map(({ kind }) => kind);
  assert.deepEqual(kinds(1), ['one', 'few']);
  assert.deepEqual(
    plan({ ...ABLE, software: true }).map(({ kind }) => kind),
    ['one', 'many'],
  );
  const used = plan().flatMap(({ kind, program }) =>
    program.body.flatMap(({ variants }) => variants.flat().map(({ kernel: { name } }) => `${kind} ${name}`)),
  );
  assert.ok(!used.includes('one linear_ternary_tiled') && used.includes('many linear_ternary_tiled'));
  assert.ok(!used.some((name) => name.includes('narrow')));
});

test('forced kernels are followed, and what cannot be is named', () => {
  const forced = parseForced('norm_linear=off, linear_ternary.ROWS=32', contract);
  const [{ program }] = plan(ABLE, { ...CHOICE, forced });
  const ops = program.body.map(({ op }) => op.op);
  assert.ok(!ops.includes('norm_linear') && ops.includes('linear'));
  const linear = program.body.find(({ op }) => op.op === 'linear');
  assert.equal(linear.variants[0][0].overrides.ROWS, 32);
  assert.deepEqual(parseForced('', contract), { off: new Set(), tuned: new Map(), defaults: false });
  assert.deepEqual(parseForced('default,', contract), { off: new Set(), tuned: new Map(), defaults: true });
  for (const wrong of ['norm_linear', 'nothing=off', 'linear_ternary.ROWS=5', 'linear_ternary.SIZE=4', 'a=b', 7]) {
    assert.throws(() => parseForced(wrong, contract), fails('bad-request'));
  }
});
