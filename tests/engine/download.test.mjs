import assert from 'node:assert/strict';
import { createServer } from 'node:http';
import { after, before, beforeEach, test } from 'node:test';

import { shardChunks, smallFile } from '../../web/engine/download.js';
import { CHUNK_BYTES } from '../../web/engine/pack.js';
import { openSource } from '../../web/engine/source.js';
import { createStore } from '../../web/engine/store.js';
import { openMemory } from '../../web/engine/store_memory.js';
import { fails, noise, sha256 } from './helpers.mjs';

const FILE = noise(2 * CHUNK_BYTES + 1000);
const SHARD = {
  file: 'weights.safetensors',
  bytes: FILE.byteLength,
  chunks: [0, 1, 2].map((index) => sha256(FILE.subarray(index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES))),
};
const RETRY = { attempts: 3, delayMs: 5, corrupt: 2 };

/** Each request takes the next fault of the script; none is left: answer well. */
let script = [];
let requests = [];
let server;
let base;

function answer(request, response) {
  const fault = script.shift() ?? {};
  requests.push(request.headers.range ?? 'all');
  if (fault.status) {
    response.writeHead(fault.status).end();
    return;
  }
  const file = fault.file ?? FILE;
  const range = fault.ignoreRange ? null : /bytes=(\d+)-(\d+)/.exec(request.headers.range ?? '');
  const [begin, end] = range
    ? [Number(range[1]), Math.min(Number(range[2]) + 1, file.byteLength)]
    : [0, file.byteLength];
  if (range && begin >= file.byteLength) {
    response.writeHead(416).end();
    return;
  }
  const body = Buffer.from(file.subarray(begin, end));
  if (fault.flip !== undefined && fault.flip >= begin && fault.flip < end) body[fault.flip - begin] ^= 1;
  response.writeHead(range ? 206 : 200, {
    'content-length': body.length,
    ...(range ? { 'content-range': fault.range ?? `bytes ${begin}-${end - 1}/${file.byteLength}` } : {}),
  });
  if (fault.cutAfter === undefined) response.end(body);
  else response.write(body.subarray(0, fault.cutAfter), () => setTimeout(() => request.socket.destroy(), 20));
}

before(async () => {
  server = createServer(answer);
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  base = `http://127.0.0.1:${server.address().port}/packs/x/`;
});
after(() => server.close());
beforeEach(() => {
  script = [];
  requests = [];
});

const memory = async (files = new Map()) => createStore(openMemory(files)).open('http://x/', 'a'.repeat(64));

/** What arrives, joined; with the index of chunks that came out of the store. */
async function collect(options = {}) {
  const parts = [];
  const stored = [];
  for await (const chunk of shardChunks(SHARD, { source: openSource(base), store: null, retry: RETRY, ...options })) {
    assert.equal(chunk.index, parts.length);
    parts.push(chunk.bytes);
    if (chunk.stored) stored.push(chunk.index);
  }
  return { bytes: Buffer.concat(parts), stored };
}

const range = (first) => `bytes=${first * CHUNK_BYTES}-${FILE.byteLength - 1}`;

test('a shard comes in one request, in whole chunks', async () => {
  const { bytes } = await collect();
  assert.ok(bytes.equals(FILE));
  assert.deepEqual(requests, [range(0)]);
});

test('a broken connection resumes at the last good chunk', async () => {
  script = [{ cutAfter: CHUNK_BYTES + 5000 }, { cutAfter: 100 }];
  let network = 0;
  const { bytes } = await collect({
    onNetwork: (count) => {
      network += count;
    },
  });
  assert.ok(bytes.equals(FILE));
  assert.deepEqual(requests, [range(0), range(1), range(1)]);
  assert.equal(network, FILE.byteLength, 'bytes that came in vain are taken off again');
});

test('it gives up after as many failures in a row, with the numbers', async () => {
  script = [{ cutAfter: CHUNK_BYTES + 10 }, { status: 500 }, { cutAfter: 0 }];
  await assert.rejects(
    collect(),
    (error) => fails('download-failed')(error) && error.detail.offset === CHUNK_BYTES && error.detail.attempts === 3,
  );
  assert.equal(requests.length, 3);
});

test('what has arrived is kept, and the next load fetches the rest', async () => {
  const files = new Map();
  script = [{ cutAfter: CHUNK_BYTES + 10 }, { status: 500 }, { status: 500 }];
  await assert.rejects(collect({ store: await memory(files) }), fails('download-failed'));
  requests = [];
  const { bytes, stored } = await collect({ store: await memory(files) });
  assert.ok(bytes.equals(FILE));
  assert.deepEqual(stored, [0]);
  assert.deepEqual(requests, [range(1)]);
  requests = [];
  assert.deepEqual((await collect({ store: await memory(files) })).stored, [0, 1, 2]);
  assert.deepEqual(requests, []);
});

test('a corrupt chunk is fetched again and never kept', async () => {
  script = [{ flip: CHUNK_BYTES + 7 }];
  const files = new Map();
  const { bytes } = await collect({ store: await memory(files) });
  assert.ok(bytes.equals(FILE));
  assert.deepEqual(requests, [range(0), range(1)]);
  for (const [name, kept] of files) {
    if (name.includes('weights')) assert.equal(sha256(kept), SHARD.chunks[Number(name.at(-1))]);
  }
});

test('a chunk that stays corrupt is a typed error after bounded attempts', async () => {
  script = new Array(10).fill({ flip: CHUNK_BYTES + 7 });
  await assert.rejects(
    collect(),
    (error) => fails('chunk-corrupt', 'hash')(error) && error.detail.chunk === 1 && error.detail.file === SHARD.file,
  );
  assert.equal(requests.length, 1 + RETRY.corrupt);
});

test('a kept chunk that went bad is fetched again, alone', async () => {
  const files = new Map();
  await collect({ store: await memory(files) });
  const [name] = [...files.keys()].filter((key) => key.endsWith('weights.safetensors.1'));
  files.get(name)[5] ^= 1;
  requests = [];
  const { bytes, stored } = await collect({ store: await memory(files) });
  assert.ok(bytes.equals(FILE));
  assert.deepEqual(stored, [0, 2]);
  assert.deepEqual(requests, [`bytes=${CHUNK_BYTES}-${2 * CHUNK_BYTES - 1}`]);
  assert.equal(sha256(files.get(name)), SHARD.chunks[1]);
});

test('a server without ranges still works, also for a resume', async () => {
  script = [{ ignoreRange: true, cutAfter: CHUNK_BYTES + 10 }, { ignoreRange: true }];
  assert.ok((await collect()).bytes.equals(FILE));
});

test('files that are longer or shorter than listed, or other ranges, are refused at once', async () => {
  for (const fault of [
    { file: FILE.subarray(0, 100) },
    { file: Buffer.concat([FILE, FILE]) },
    { file: FILE.subarray(0, 100), ignoreRange: true },
  ]) {
    script = [fault];
    await assert.rejects(collect(), fails('pack-invalid', 'length'));
  }
  script = [{ range: `bytes 77-${FILE.byteLength - 1}/${FILE.byteLength}` }];
  await assert.rejects(collect(), fails('download-failed'));
  assert.equal(requests.length, 4);
});

test('a missing file is an error at once', async () => {
  script = [{ status: 404 }];
  await assert.rejects(collect(), fails('download-failed', 'missing'));
  script = [{ status: 403 }];
  await assert.rejects(collect(), fails('download-failed'));
  assert.equal(requests.length, 2);
});

test('an abort ends it at once, while waiting as well as while reading', async () => {
  for (const fault of [{ status: 500 }, { cutAfter: 0 }]) {
    script = new Array(20).fill(fault);
    const control = new AbortController();
    setTimeout(() => control.abort(), 60);
    const began = Date.now();
    await assert.rejects(
      collect({ signal: control.signal, retry: { attempts: 20, delayMs: 5000, corrupt: 2 } }),
      fails('aborted'),
    );
    assert.ok(Date.now() - began < 2000);
  }
  script = [];
  const control = new AbortController();
  await assert.rejects(async () => {
    for await (const chunk of shardChunks(SHARD, { source: openSource(base), store: null, signal: control.signal })) {
      if (chunk.index === 0) control.abort();
    }
  }, fails('aborted'));
});

test('small files are checked, fetched again once they are wrong, and kept', async () => {
  const listed = { bytes: FILE.byteLength, sha256: sha256(FILE) };
  const store = await memory();
  const fetching = { source: openSource(base), store, retry: RETRY };
  script = [{ cutAfter: 10 }, { flip: 3 }];
  assert.equal(sha256(await smallFile('tokenizer.json', listed, fetching)), listed.sha256);
  assert.equal(requests.length, 3);
  await smallFile('tokenizer.json', listed, fetching);
  assert.equal(requests.length, 3, 'the second time it comes out of the store');
  script = new Array(5).fill({ flip: 3 });
  await assert.rejects(smallFile('b.json', listed, fetching), fails('pack-invalid', 'hash'));
  script = [{ file: FILE.subarray(0, 9) }];
  await assert.rejects(smallFile('c.json', listed, fetching), fails('pack-invalid', 'length'));
  script = [{ file: Buffer.concat([FILE, FILE]) }];
  await assert.rejects(smallFile('d.json', listed, fetching), fails('pack-invalid', 'length'));
});

test('places that are no packs are refused', () => {
  for (const place of ['ftp://host/pack', 'data:text/plain,x', 'http://[', 'javascript:alert(1)']) {
    assert.throws(() => openSource(place), fails('bad-request'));
  }
  assert.equal(openSource('http://h/packs/a?x=1#y').url, 'http://h/packs/a/');
  assert.equal(openSource('/tmp/pack').url, 'file:///tmp/pack/');
});
