import assert from 'node:assert/strict';
import { test } from 'node:test';

import { createStore } from '../../web/engine/store.js';
import { openMemory } from '../../web/engine/store_memory.js';
import { fails, sha256 } from './helpers.mjs';

const URL_A = 'http://host/packs/a/';
const bytes = (text) => new TextEncoder().encode(text);

test('a pack is found again by URL and by its pack.json, without a network', async () => {
  const store = createStore(openMemory(new Map()));
  const pack = bytes('{"version": 1}');
  assert.equal(await store.latest(URL_A), null);
  assert.equal(await store.find(URL_A, sha256(pack)), null);
  const opened = await store.open(URL_A, sha256(pack));
  assert.equal(await store.latest(URL_A), null, 'before pack.json is there, there is no pack');
  await opened.putFile('pack.json', pack);
  const shard = await opened.openShard('w');
  await shard.put(0, bytes('12345'));
  assert.equal(await shard.has(1, 5), false);
  assert.deepEqual(await shard.get(0, 5), bytes('12345'));
  assert.equal(await shard.get(0, 6), null);
  assert.deepEqual(await store.latest(URL_A), pack);
  assert.equal(await store.bytes(URL_A, sha256(pack)), pack.length + 5);
  assert.equal(await opened.storedBytes(), pack.length + 5);
  assert.equal(await store.latest('http://host/packs/b/'), null);
});

test('a changed pack never mixes with the old one, whose bytes go', async () => {
  const store = createStore(openMemory(new Map()));
  const [old, young] = [bytes('{"a": 1}'), bytes('{"a": 2}')];
  for (const pack of [old, young]) {
    const opened = await store.open(URL_A, sha256(pack));
    assert.equal(await (await opened.openShard('w')).get(0, 3), null);
    await opened.putFile('pack.json', pack);
    await (await opened.openShard('w')).put(0, bytes('abc'));
  }
  assert.deepEqual(await store.latest(URL_A), young);
  assert.equal(await store.find(URL_A, sha256(old)), null);
  assert.ok((await store.stored(URL_A)) < 2 * (young.length + 3) + 32);
});

test('a kept pack.json that is not what it was is not used', async () => {
  const files = new Map();
  const store = createStore(openMemory(files));
  const pack = bytes('{"a": 1}');
  await (await store.open(URL_A, sha256(pack))).putFile('pack.json', pack);
  files.set(
    [...files.keys()].find((name) => name.endsWith('pack.json')),
    bytes('{"a": 3}'),
  );
  assert.equal(await store.latest(URL_A), null);
});

test('removing a pack removes all of it and nothing else', async () => {
  const store = createStore(openMemory(new Map()));
  for (const url of [URL_A, 'http://host/packs/b/']) {
    await (await store.open(url, 'f'.repeat(64))).putFile('x', bytes('xyz'));
  }
  await store.remove(URL_A);
  assert.equal(await store.stored(URL_A), 0);
  assert.ok((await store.stored('http://host/packs/b/')) > 0);
  await store.remove(URL_A);
});

test('a full disk is a typed error', async () => {
  const full = async () => {
    throw new DOMException('no room', 'QuotaExceededError');
  };
  const backend = openMemory(new Map());
  const folder = {
    getFile: async () => null,
    putFile: full,
    openShard: async () => ({ get: async () => null, has: async () => false, put: full, close: async () => {} }),
  };
  const store = createStore({ ...backend, folder: async (path) => (path.length > 2 ? folder : backend.folder(path)) });
  const opened = await store.open(URL_A, 'f'.repeat(64));
  await assert.rejects(opened.putFile('x', bytes('1')), fails('storage-full'));
  await assert.rejects((await opened.openShard('w')).put(0, bytes('1')), fails('storage-full'));
});
