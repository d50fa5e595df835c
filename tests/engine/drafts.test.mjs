import assert from 'node:assert/strict';
import { test } from 'node:test';

import { PromptLookup } from '../../web/engine/drafts.js';
import { noise } from './helpers.mjs';

/** By the definition: the last earlier place of the last three tokens, or else of the last two. */
function searched(ids, most) {
  for (const length of [3, 2]) {
    const suffix = ids.slice(-length);
    if (ids.length < length) continue;
    for (let end = ids.length - 2; end >= length - 1; end--) {
      if (!suffix.every((id, index) => ids[end - length + 1 + index] === id)) continue;
      const all = [...ids];
      for (let at = end + 1; all.length < ids.length + most; at++) all.push(all[at]);
      return all.slice(ids.length);
    }
  }
  return [];
}

test('what followed the last three tokens before is proposed, or else what followed the last two', () => {
  const propose = (ids, most = 4) => new PromptLookup().propose(ids, most);
  assert.deepEqual(propose([1, 2, 3, 4, 5, 6, 1, 2, 3], 3), [4, 5, 6]);
  assert.deepEqual(propose([7, 2, 3, 4, 5, 6, 8, 8, 1, 2, 3], 2), [4, 5], 'two tokens');
  assert.deepEqual(propose([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 1), [4], 'three count more than what is later');
  assert.deepEqual(propose([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 1), [5], 'the last of several');
  assert.deepEqual(propose([1, 2, 3, 4, 3]), [], 'one token is not enough');
  assert.deepEqual(propose([5, 5]), []);
  assert.deepEqual(propose([]), []);
  assert.deepEqual(propose([1, 2, 3, 1, 2], 0), []);
});

test('a text that repeats is taken to go on so, as long as is wanted', () => {
  assert.deepEqual(new PromptLookup().propose([9, 4, 4, 4], 5), [4, 4, 4, 4, 4]);
  assert.deepEqual(new PromptLookup().propose([1, 2, 3, 1, 2, 3], 7), [1, 2, 3, 1, 2, 3, 1]);
});

test('as a text grows, and when another one begins alike, it finds what a search would', () => {
  for (let seed = 1; seed <= 20; seed++) {
    const lookup = new PromptLookup();
    let ids = [];
    for (let turn = 0; turn < 6; turn++) {
      const bytes = noise(60, seed * 31 + turn);
      // A new array each turn: the beginning of the last one and something else.
      ids = ids.slice(0, turn % 3 === 2 ? 3 : ids.length - (bytes[0] % 20));
      for (const byte of bytes) {
        ids.push(byte % (turn % 2 ? 3 : 5));
        assert.deepEqual(lookup.propose(ids, 5), searched(ids, 5), `seed ${seed}, turn ${turn}, ${ids}`);
      }
    }
  }
});

test('taking text back leaves nothing behind', () => {
  const lookup = new PromptLookup();
  lookup.propose([1, 2, 3, 1, 2, 3, 1, 2], 1);
  lookup.propose([8], 1);
  assert.deepEqual([lookup.pairs.last.size, lookup.triples.last.size, lookup.ids], [0, 0, [8]]);
});
