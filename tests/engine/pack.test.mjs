import assert from 'node:assert/strict';
import { test } from 'node:test';

import { checkPack, parseJson, totalBytes } from '../../web/engine/pack.js';
import { expectedKeys } from '../../web/engine/tensor_layout.js';
import { changed, fails, goodPack } from './helpers.mjs';

test('a good pack passes and unknown fields are ignored', () => {
  const pack = checkPack({ ...goodPack(), something_new: 1 });
  assert.equal(pack.tensors.get('w').scale, 'parts');
  assert.equal(totalBytes(pack), 1008);
});

test('the keys that shards must hold follow from the tensors', () => {
  const json = goodPack();
  json.tensors.r = { encoding: 'ternary', shape: [8, 130], scale: 'row', slices: [3, 5] };
  json.tensors.c = { encoding: 'ternary', shape: [8, 130], scale: 'group', group: 64, slices: [8] };
  json.tensors.e = { encoding: 'q8', shape: [8, 33], slices: [8] };
  json.tensors.f = { encoding: 'q4', shape: [8, 33], slices: [8] };
  json.tensors.d = { encoding: 'f16', shape: [8, 33], slices: [8] };
  json.tensors.i = { encoding: 'q4a', shape: [8, 33], slices: [8] };
  json.tensors.j = { encoding: 'nvfp4', shape: [8, 33], slices: [3, 5] };
  json.tensors.k = { encoding: 'mxfp4', shape: [8, 33], slices: [8] };
  const keys = Object.fromEntries(
    [...expectedKeys(checkPack(json))].map(([key, { dtype, shape, row }]) => [key, `${dtype} ${shape} @${row}`]),
  );
  assert.deepEqual(keys, {
    'w.data.0': 'U8 4,8 @0',
    'w.data.1': 'U8 4,8 @4',
    'w.scale': 'F32 2 @0',
    'g.data.0': 'F32 40 @0',
    'r.data.0': 'U8 3,28 @0',
    'r.scale.0': 'F32 3 @0',
    'r.data.1': 'U8 5,28 @3',
    'r.scale.1': 'F32 5 @3',
    'c.data.0': 'U8 8,28 @0',
    'c.scale.0': 'F16 8,3 @0',
    'e.data.0': 'I8 8,64 @0',
    'e.scale.0': 'F16 8,2 @0',
    'f.data.0': 'U8 8,32 @0',
    'f.scale.0': 'F16 8,2 @0',
    'd.data.0': 'F16 8,36 @0',
    'i.data.0': 'U8 8,32 @0',
    'i.scale.0': 'F16 8,4 @0',
    'j.data.0': 'U8 3,32 @0',
    'j.scale.0': 'U8 3,3 @0',
    'j.data.1': 'U8 5,32 @3',
    'j.scale.1': 'U8 5,3 @3',
    'j.tensor_scale': 'F32 1 @0',
    'k.data.0': 'U8 8,32 @0',
    'k.scale.0': 'U8 8,2 @0',
  });
});

const WRONG = [
  ['format', 'gguf', 'version', 'pack-unsupported'],
  ['version', 2, 'version', 'pack-unsupported'],
  ['name', undefined, 'field'],
  ['name', 3, 'field'],
  ['source', [], 'field'],
  ['activations', 'a4', 'field'],
  ['parameters', 0, 'field'],
  ['parameters', '5', 'field'],
  ['vocab_size', 1.5, 'field'],
  ['bits_per_weight', null, 'field'],
  ['kv', { layers: 1, kv_heads: 1 }, 'field'],
  ['bos_id', -1, 'field'],
  ['grade', 'superb', 'field'],
  ['chunk_bytes', 1048576, 'field'],
  ['shards', {}, 'field'],
  ['shards/0/chunks', ['zz'], 'field'],
  ['shards/0/chunks', [], 'field'],
  ['shards/0/bytes', -1, 'field'],
  ['files/report.json', 'x', 'field'],
  ['eos_ids', [], 'eos'],
  ['eos_ids', [8], 'eos'],
  ['eos_ids', ['2'], 'eos'],
  ['eos_ids', [-1], 'eos'],
  ['shards/0/file', '../secret', 'path'],
  ['shards/0/file', 'a/b', 'path'],
  ['shards/0/file', '.hidden', 'path'],
  ['shards/0/file', 'pack.json', 'path'],
  ['shards/0/file', 'program.json', 'path'],
  ['shards/0/file', 'https:evil', 'path'],
  ['shards/0/file', 'a'.repeat(101), 'path'],
  ['shards/0/bytes', (64 << 20) + 1, 'shard-size'],
  ['files/tokenizer.json', undefined, 'missing'],
  ['files/program.json', undefined, 'missing'],
  ['tensors/w', null, 'field'],
  ['tensors/w/encoding', 'q3', 'encoding', 'pack-unsupported'],
  ['tensors/w/scale', 'column', 'encoding', 'pack-unsupported'],
  ['tensors/w/scale', undefined, 'encoding', 'pack-unsupported'],
  ['tensors/g/encoding', 'f16', 'encoding', 'pack-unsupported'],
  ['tensors/w/shape', [8, 0], 'shape'],
  ['tensors/w/shape', [8, 2 ** 31], 'shape'],
  ['tensors/w/shape', [8, 40, 1], 'shape'],
  ['tensors/w/shape', '8x40', 'shape'],
  ['tensors/w/slices', [4, 5], 'slices'],
  ['tensors/w/slices', [9, -1], 'slices'],
  ['tensors/w/slices', undefined, 'slices'],
  ['tensors/w/parts', [8, 1], 'slices'],
  ['tensors/w', { encoding: 'ternary', shape: [8, 40], scale: 'group', group: 60, slices: [8] }, 'shape'],
];

for (const [path, to, rule, code = 'pack-invalid'] of WRONG) {
  test(`${path} = ${JSON.stringify(to)?.slice(0, 40)} breaks ${rule}`, () => {
    assert.throws(() => checkPack(changed(goodPack(), path, to)), fails(code, rule));
  });
}

test('pack.json must be a JSON object in UTF-8 of at most 16 MiB', () => {
  const bytes = (text) => new TextEncoder().encode(text);
  assert.deepEqual(parseJson(bytes('{"a": 1}'), 'x'), { a: 1 });
  for (const bad of [
    bytes('[1]'),
    bytes('null'),
    bytes('{"a": 1'),
    bytes(''),
    Uint8Array.of(0x7b, 0xff, 0x7d),
    bytes(`{"a": "${'x'.repeat(16 << 20)}"}`),
  ]) {
    assert.throws(() => parseJson(bad, 'x.json'), fails('pack-invalid', 'json'));
  }
});

test('names of tensors cannot reach what objects inherit', () => {
  const json = JSON.parse(
    JSON.stringify(goodPack()).replace('"w":{', '"__proto__":{"encoding":"f32","shape":[4],"slices":[1]},"w":{'),
  );
  assert.ok(checkPack(json).tensors.has('__proto__'));
  assert.equal({}.encoding, undefined);
});
