import assert from 'node:assert/strict';
import { test } from 'node:test';

import { pieces } from '../../web/engine/memory.js';
import { checkPack } from '../../web/engine/pack.js';
import { expectedKeys } from '../../web/engine/tensor_layout.js';
import { FakeLoader } from './fake_gpu.mjs';
import { contract, fails, goodPack, noise, safetensors } from './helpers.mjs';

const ITEM = { U8: 1, I8: 1, F16: 2, F32: 4 };

/** Random content for each key; floats are finite. */
function contentOf(pack) {
  const content = new Map();
  for (const [key, { dtype, shape, part }] of expectedKeys(pack)) {
    const bytes = noise(
      shape.reduce((product, size) => product * size, ITEM[dtype]),
      content.size + 1,
    );
    if (part === 'scale' || dtype.startsWith('F')) {
      for (let at = ITEM[dtype] - 1; at < bytes.length; at += ITEM[dtype]) bytes[at] &= 0x3b;
    }
    content.set(key, bytes);
  }
  return content;
}

/** Pushes a shard with these keys in this order, cut into chunks of the given size after the header. */
async function push(loader, pack, keys, content, chunk) {
  const expected = expectedKeys(pack);
  const file = safetensors(
    keys.map((key) => [key, expected.get(key).dtype, expected.get(key).shape, content.get(key).byteLength]),
  );
  let at = file.byteLength - keys.reduce((sum, key) => sum + content.get(key).byteLength, 0);
  const start = at;
  for (const key of keys) {
    file.set(content.get(key), at);
    at += content.get(key).byteLength;
  }
  const take = loader.shard('shard', file.byteLength);
  await take(file.slice(0, start + 5));
  for (let position = start + 5; position < file.byteLength; position += chunk) {
    await take(file.slice(position, position + chunk));
  }
}

function mixedPack() {
  const json = goodPack();
  json.tensors = {
    odd: { encoding: 'ternary', shape: [3, 70], scale: 'group', group: 64, slices: [3] },
    parts: { encoding: 'ternary', shape: [200, 70], scale: 'parts', parts: [150, 50], slices: [90, 110] },
    rows: { encoding: 'ternary', shape: [70, 40], scale: 'row', slices: [1, 69] },
    q8: { encoding: 'q8', shape: [131, 33], slices: [131] },
    q4: { encoding: 'q4', shape: [130, 33], slices: [65, 65] },
    q4a: { encoding: 'q4a', shape: [131, 65], slices: [1, 130] },
    nvfp4: { encoding: 'nvfp4', shape: [131, 33], slices: [67, 64] },
    mxfp4: { encoding: 'mxfp4', shape: [131, 65], slices: [131] },
    f16: { encoding: 'f16', shape: [130, 6], slices: [130] },
    f32: { encoding: 'f32', shape: [5, 6], slices: [5] },
    gain: { encoding: 'f32', shape: [7], slices: [1] },
  };
  return checkPack(json);
}

/** Checks every buffer of the weights against the content. */
function checkWeights(weights, loader, pack, content) {
  for (const { tensor, vector, pieces: cut } of weights.values()) {
    const { name, shape, encoding, scale, group } = tensor;
    const all = (part) =>
      Buffer.concat(
        [...content]
          .filter(([key]) => key === `${name}.${part}` || key.startsWith(`${name}.${part}.`))
          .map(([, bytes]) => Buffer.from(bytes)),
      );
    if (vector) {
      assert.deepEqual(Buffer.from(vector.bytes), all('data'), name);
      continue;
    }
    const data = all('data');
    const rowBytes = data.length / shape[0];
    let scales = scale || group ? all('scale') : null;
    if (scale === 'parts') {
      scales = Buffer.concat(
        tensor.parts.flatMap((rows, part) => new Array(rows).fill(scales.subarray(4 * part, 4 * part + 4))),
      );
    }
    cut.forEach(({ row, rows, data: buffer, scale: scaleBuffer }, index) => {
      const found = encoding === 'ternary' ? loader.expanded.get(`${name}.${index}`) : buffer.bytes;
      assert.deepEqual(
        Buffer.from(found),
        data.subarray(row * rowBytes, (row + rows) * rowBytes),
        `${name} piece ${index}`,
      );
      if (!scales) return;
      const one = scales.length / shape[0];
      const own = encoding === 'nvfp4' ? all('tensor_scale') : Buffer.alloc(0);
      const used = own.length + rows * one;
      assert.equal(scaleBuffer.bytes.byteLength, Math.ceil(used / 4) * 4, `${name} scales ${index}`);
      assert.deepEqual(
        Buffer.from(scaleBuffer.bytes).subarray(0, used),
        Buffer.concat([own, scales.subarray(row * one, (row + rows) * one)]),
        `${name} scales ${index}`,
      );
    });
  }
}

for (const chunk of [7, 64, 1001, 1 << 20]) {
  for (const limit of [4096, 1 << 27]) {
    test(`chunks of ${chunk} bytes and bindings of ${limit} bytes give the same weights`, async () => {
      const pack = mixedPack();
      const content = contentOf(pack);
      const loader = new FakeLoader(contract, pack, limit);
      await loader.allocate(0);
      const keys = [...content.keys()];
      // The odd scales first, so that what follows lies at odd halves of words.
      const first = keys
        .filter((key) => key.startsWith('odd.scale'))
        .concat(keys.filter((key, index) => !key.startsWith('odd.scale') && index % 2 === 0));
      const second = keys.filter((key) => !first.includes(key));
      await Promise.all([push(loader, pack, first, content, chunk), push(loader, pack, second, content, chunk)]);
      const weights = await loader.finish();
      assert.equal(loader.counted, pack.tensors.size);
      checkWeights(weights, loader, pack, content);
      if (limit === 4096) assert.ok(weights.get('q8').pieces.length > 1 && weights.get('parts').pieces.length > 1);
    });
  }
}

test('pieces are whole rows, a multiple of 64 but for the last, and cover the tensor', () => {
  const tensor = { name: 't', encoding: 'q8', shape: [300, 33], scale: null, parts: [], group: 32, slices: [300] };
  assert.deepEqual(pieces(tensor, contract, 64 * 64 * 2 + 63), [
    { row: 0, rows: 128 },
    { row: 128, rows: 128 },
    { row: 256, rows: 44 },
  ]);
  assert.deepEqual(pieces(tensor, contract, 300 * 64), [{ row: 0, rows: 300 }]);
  assert.throws(
    () => pieces(tensor, contract, 64 * 64 - 1),
    (error) => fails('limit-too-small')(error) && error.detail.needed === 4096 && error.detail.available === 4095,
  );
});

test('keys that are missing, doubled, foreign or of another shape are refused', async () => {
  const json = goodPack();
  json.tensors = { a: { encoding: 'f32', shape: [4], slices: [1] }, b: { encoding: 'f32', shape: [4], slices: [1] } };
  const pack = checkPack(json);
  const fresh = async () => {
    const loader = new FakeLoader(contract, pack, 1 << 27);
    await loader.allocate(0);
    return loader;
  };
  const shard = (loader, entries) => {
    const file = safetensors(entries);
    return loader.shard('s', file.byteLength)(file);
  };
  const a = ['a.data.0', 'F32', [4], 16];
  await assert.rejects(
    async () => {
      const loader = await fresh();
      await shard(loader, [a]);
      await loader.finish();
    },
    fails('pack-invalid', 'tensor'),
  );
  await assert.rejects(
    async () => {
      const loader = await fresh();
      await shard(loader, [a]);
      await shard(loader, [a]);
    },
    fails('pack-invalid', 'tensor'),
  );
  await assert.rejects(
    async () => shard(await fresh(), [a, ['c.data.0', 'F32', [4], 16]]),
    fails('pack-invalid', 'extra'),
  );
  await assert.rejects(
    async () => shard(await fresh(), [['a.data.0', 'F32', [2, 2], 16]]),
    fails('pack-invalid', 'tensor'),
  );
  await assert.rejects(
    async () => shard(await fresh(), [['a.data.0', 'I32', [4], 16]]),
    fails('pack-invalid', 'tensor'),
  );
});

test('infinite and NaN scales and vectors are refused', async () => {
  const pack = mixedPack();
  for (const [key, at, byte] of [
    ['gain.data.0', 3, 0x7f],
    ['parts.scale', 3, 0xff],
    ['odd.scale.0', 1, 0x7c],
    ['q8.scale.0', 5, 0xfc],
    ['q4a.scale.1', 5, 0x7c],
    ['nvfp4.scale.0', 4, 0x7f],
    ['nvfp4.scale.1', 4, 0x80],
    ['mxfp4.scale.0', 4, 0xff],
    ['mxfp4.scale.0', 4, 253],
    // Finite, but not 448 times six of it.
    ['nvfp4.tensor_scale', 3, 0x7d],
  ]) {
    const content = contentOf(pack);
    content.get(key)[at] = byte;
    if (at === 3) content.get(key)[2] = 0x80;
    const loader = new FakeLoader(contract, pack, 1 << 27);
    await loader.allocate(0);
    await assert.rejects(push(loader, pack, [...content.keys()], content, 1 << 20), fails('pack-invalid', 'finite'));
  }
});
