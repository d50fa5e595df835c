import assert from 'node:assert/strict';
import { test } from 'node:test';

import { StopFilter, createDetokenizer } from '../../web/engine/detokenizer.js';

/** Feeds pieces and gives what is shown after each, then at the end. */
function shown(stops, pieces) {
  const filter = new StopFilter(stops);
  return [...pieces.map((piece) => filter.push(piece)), filter.finish()];
}

test('without stop texts everything is shown at once', () => {
  assert.deepEqual(shown([], ['ab', 'c', '']), ['ab', 'c', '', '']);
});

test('a stop text that comes in pieces is never shown', () => {
  assert.deepEqual(shown(['\nUser:'], ['Hi', '\n', 'Us', 'er', ': more']), ['Hi', '', '', '', '', '']);
});

test('what turns out to be no stop text is shown, and the rest at the end', () => {
  assert.deepEqual(shown(['\nUser:'], ['Hi\nUs', 'ing', '\nUse']), ['Hi', '\nUsing', '', '\nUse']);
});

test('the earliest of several stop texts counts, also when they overlap', () => {
  assert.deepEqual(shown(['cd', 'bcdx'], ['ab', 'cd']), ['a', 'b', '']);
  assert.deepEqual(shown(['bcd', 'c'], ['abcd']), ['a', '']);
  assert.deepEqual(shown(['aab'], ['aa', 'aab!']), ['', 'aa', '']);
  assert.deepEqual(shown(['END'], ['END']), ['', '']);
});

test('after a stop text nothing more is shown', () => {
  const filter = new StopFilter(['.']);
  assert.equal(filter.push('a.b'), 'a');
  assert.ok(filter.stopped);
  assert.equal(filter.push('c'), '');
  assert.equal(filter.finish(), '');
});

/** A SentencePiece-like vocabulary: words with a leading space mark, bytes, one special token. */
const TOKENS = ['<s>', '▁Hello', '▁world', '!', '<0xF0>', '<0x9F>', '<0x98>', '<0x80>', '▁', '<0xC3>'];
const decode = (ids) => {
  let text = '';
  let bytes = [];
  const flush = () => {
    text += new TextDecoder().decode(Uint8Array.from(bytes));
    bytes = [];
  };
  for (const id of ids) {
    const byte = /^<0x(..)>$/.exec(TOKENS[id]);
    if (byte) bytes.push(parseInt(byte[1], 16));
    else {
      flush();
      text += TOKENS[id].replaceAll('▁', ' ');
    }
  }
  flush();
  return text.replace(/^ /, '');
};
const pieces = {
  token: (id) => TOKENS[id],
  isSpecial: (id) => id === 0,
  isAdded: (id) => id === 0,
  byteLevel: false,
  decode,
};

/** @param {number[]} ids */
function streamed(vocabulary, ids) {
  const stream = createDetokenizer(vocabulary);
  return [...ids.map((id) => stream.push(id)), stream.finish()];
}

test('spaces between tokens stay, the one before the first does not', () => {
  assert.deepEqual(streamed(pieces, [0, 1, 2, 3]), ['', 'Hello', ' world', '!', '']);
});

test('byte tokens wait until their character is whole', () => {
  assert.deepEqual(streamed(pieces, [1, 4, 5, 6, 7, 3]), ['Hello', '', '', '', '😀', '!', '']);
  assert.deepEqual(streamed(pieces, [1, 4, 5]), ['Hello', '', '', ''], 'half a character is dropped at the end');
});

test('bytes that become no character do not swallow what follows', () => {
  assert.equal(streamed(pieces, [9, 1, 2]).join(''), '\uFFFD Hello world');
});

test('ids outside of the vocabulary give no text', () => {
  assert.deepEqual(streamed(pieces, [1, 99, 3]), ['Hello', '', '!', '']);
});
