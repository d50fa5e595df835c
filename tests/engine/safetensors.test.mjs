import assert from 'node:assert/strict';
import { test } from 'node:test';

import { parseHeader } from '../../web/engine/safetensors.js';
import { fails, safetensors } from './helpers.mjs';

const ENTRIES = [
  ['a', 'U8', [2, 4], 8],
  ['b', 'F32', [3], 12],
  ['c', 'F16', [2, 1], 4],
];
const parse = (bytes) => parseHeader(bytes, bytes.byteLength, 'shard');

test('entries come in the order of their bytes, with offsets in the file', () => {
  const file = safetensors(ENTRIES, ({ a, b, c }) => ({ __metadata__: { format: 'np' }, c, b, a }));
  const start = file.byteLength - 24;
  assert.deepEqual(parse(file), [
    { key: 'a', dtype: 'U8', shape: [2, 4], begin: start, end: start + 8 },
    { key: 'b', dtype: 'F32', shape: [3], begin: start + 8, end: start + 20 },
    { key: 'c', dtype: 'F16', shape: [2, 1], begin: start + 20, end: start + 24 },
  ]);
});

const WRONG = {
  'a gap': (h) => ({ ...h, b: { ...h.b, data_offsets: [9, 21] }, c: { ...h.c, data_offsets: [21, 25] } }),
  'an overlap': (h) => ({ ...h, b: { ...h.b, data_offsets: [4, 16] } }),
  'a tensor past the end': (h) => ({ ...h, c: { ...h.c, data_offsets: [20, 28], shape: [4, 1] } }),
  'bytes that no tensor has': (h) => ({ a: h.a, b: h.b }),
  'a shape that disagrees with the bytes': (h) => ({ ...h, a: { ...h.a, shape: [2, 5] } }),
  'an unknown dtype': (h) => ({ ...h, a: { ...h.a, dtype: 'F4' } }),
  'an inherited dtype': (h) => ({ ...h, a: { ...h.a, dtype: 'constructor' } }),
  'negative offsets': (h) => ({ ...h, a: { ...h.a, data_offsets: [-8, 0] } }),
  'offsets in the wrong order': (h) => ({ ...h, a: { ...h.a, data_offsets: [8, 0] } }),
  'a negative shape': (h) => ({ ...h, a: { ...h.a, shape: [-2, -4] } }),
  'no shape': (h) => ({ ...h, a: { dtype: 'U8', data_offsets: [0, 8] } }),
  'an entry that is null': (h) => ({ ...h, a: null }),
  'a list': () => [],
};
for (const [what, change] of Object.entries(WRONG)) {
  test(`${what} is refused`, () =>
    assert.throws(() => parse(safetensors(ENTRIES, change)), fails('pack-invalid', 'header')));
}

test('the length of the header is checked before anything is read', () => {
  const file = safetensors(ENTRIES);
  const withLength = (length) => {
    const bytes = file.slice();
    new DataView(bytes.buffer).setBigUint64(0, length, true);
    return bytes;
  };
  assert.throws(() => parse(withLength(2n ** 63n)), fails('pack-invalid', 'header-size'));
  assert.throws(() => parse(withLength((1n << 20n) + 8n)), fails('pack-invalid', 'header-size'));
  assert.throws(() => parse(withLength(1n << 19n)), fails('pack-invalid', 'header'));
  assert.throws(() => parse(withLength(8n)), fails('pack-invalid', 'header'));
  assert.throws(() => parse(new Uint8Array(4)), fails('pack-invalid', 'header-size'));
  assert.throws(() => parse(file.subarray(0, 40)), fails('pack-invalid', 'header'));
});

test('data that are not aligned to 8 bytes are refused', () => {
  const file = safetensors(ENTRIES);
  const length = Number(new DataView(file.buffer).getBigUint64(0, true));
  const shifted = new Uint8Array(file.byteLength + 1);
  shifted.set(file.subarray(0, 8 + length));
  shifted[8 + length] = 0x20;
  new DataView(shifted.buffer).setBigUint64(0, BigInt(length + 1), true);
  assert.throws(() => parse(shifted), fails('pack-invalid', 'header'));
});
