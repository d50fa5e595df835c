import assert from 'node:assert/strict';
import { test } from 'node:test';

import { checkSampling, samplingWords, seenBits } from '../../web/engine/sampling.js';
import { fails } from './helpers.mjs';

test('defaults are those of the API, and null means the default', () => {
  const { seed, ...rest } = checkSampling({ top_p: null, stop: null, seed: null });
  assert.deepEqual(rest, { temperature: 0.7, topP: 1, topK: 0, minP: 0, penalty: 1, maxTokens: Infinity, stop: [] });
  assert.ok(Number.isInteger(seed) && seed >= 0);
  assert.notEqual(checkSampling({}).seed, checkSampling({}).seed);
});

const WRONG = {
  temperature: [-0.1, 101, NaN, Infinity, '1', true, 1e-300],
  top_p: [0, 1.01, '0.9'],
  top_k: [-1, 1.5, 2 ** 31],
  min_p: [-1, 1.1],
  repetition_penalty: [0, -1, 101],
  max_tokens: [0, -5, 1.5, '7'],
  seed: [-1, 1.5, 2 ** 60, '3', NaN],
  stop: ['', [''], [1], 5, new Array(17).fill('x')],
};
for (const [name, values] of Object.entries(WRONG)) {
  test(`bad values of ${name} are refused by name`, () => {
    for (const value of values) {
      assert.throws(
        () => checkSampling({ [name]: value }),
        (error) => fails('bad-request')(error) && error.message.includes(name) && error.detail.option === name,
      );
    }
  });
}

test('the words of the sampling buffer', () => {
  const words = samplingWords(
    checkSampling({
      temperature: 0.5,
      top_k: 40,
      top_p: 0.9,
      min_p: 0.05,
      repetition_penalty: 1.25,
      seed: 2 ** 40 + 7,
    }),
  );
  const floats = new Float32Array(words.buffer);
  assert.deepEqual(
    [floats[0], words[1], floats[2], floats[3], floats[4], floats[5]],
    [2, 40, 0.9, Math.log(0.05), 1.25, 0.8].map((value, index) => (index === 1 ? value : Math.fround(value))),
  );
  assert.deepEqual([words[6], words[7]], [7, 256]);
  const off = new Float32Array(samplingWords(checkSampling({ temperature: 0, seed: 0 })).buffer);
  assert.deepEqual([off[0], off[3]], [1, Math.fround(-3.0e38)]);
});

test('seen bits', () => {
  assert.deepEqual(
    [...seenBits([0, 31, 32, 69, 69], 70)],
    [0x80000001, 1, 1 << 5].map((word) => word >>> 0),
  );
});
