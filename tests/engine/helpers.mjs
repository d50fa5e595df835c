/** Shared by the tests of the engine that run in plain Node. */
import assert from 'node:assert/strict';
import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';

import { checkContract } from '../../web/engine/contract.js';
import { TercetError } from '../../web/engine/errors.js';

export const contract = checkContract(
  JSON.parse(readFileSync(new URL('../../shaders/kernels.json', import.meta.url), 'utf8')),
);

/** Asserts a TercetError by code, and by rule of FORMAT.md where one is given. */
export function fails(code, rule) {
  return (error) => {
    assert.ok(error instanceof TercetError, `expected a TercetError, found ${error?.stack ?? error}`);
    assert.equal(error.code, code, error.message);
    if (rule) assert.equal(error.detail.rule, rule, error.message);
    assert.ok(error.message.length > 10 && error.action.length > 10, 'an error says what happened and what to do');
    return true;
  };
}

export const sha256 = (bytes) => createHash('sha256').update(bytes).digest('hex');

/** Bytes that look random and depend on the seed alone. */
export function noise(length, seed = 1) {
  const bytes = new Uint8Array(length);
  let state = seed >>> 0 || 1;
  for (let index = 0; index < length; index++) {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    bytes[index] = state;
  }
  return bytes;
}

/** A safetensors file: entries of [key, dtype, shape, bytes]. */
export function safetensors(entries, change = (header) => header) {
  const header = {};
  let at = 0;
  for (const [key, dtype, shape, length] of entries) {
    header[key] = { dtype, shape, data_offsets: [at, at + length] };
    at += length;
  }
  let text = JSON.stringify(change(header));
  text += ' '.repeat((8 - (text.length % 8)) % 8);
  const bytes = new Uint8Array(8 + text.length + at);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(text.length), true);
  bytes.set(new TextEncoder().encode(text), 8);
  return bytes;
}

/** pack.json of a model with one matrix and one vector, as good as they come. */
export function goodPack() {
  return {
    format: 'tercet-pack',
    version: 1,
    name: 'm',
    description: '',
    license: '',
    family: 'bitnet',
    source: {},
    activations: 'a8',
    parameters: 100,
    vocab_size: 8,
    context_length: 64,
    bits_per_weight: 2,
    ternary_bits_per_weight: 1.6,
    resident_bytes: 1000,
    kv: { layers: 1, kv_heads: 1, head_dim: 4 },
    bos_id: null,
    eos_ids: [2],
    grade: null,
    chunk_bytes: 4194304,
    shards: [{ file: 'weights-00001.safetensors', bytes: 1000, chunks: ['0'.repeat(64)] }],
    files: Object.fromEntries(
      ['program.json', 'tokenizer.json', 'tokenizer_config.json', 'report.json'].map((name) => [
        name,
        { bytes: 2, sha256: '0'.repeat(64) },
      ]),
    ),
    tensors: {
      w: { encoding: 'ternary', shape: [8, 40], scale: 'parts', parts: [5, 3], slices: [4, 4] },
      g: { encoding: 'f32', shape: [40], slices: [1] },
    },
  };
}

/** The smallest program that has every operation. */
export function goodProgram() {
  return {
    ops_version: 1,
    values: {
      h: { dtype: 'f32', shape: ['T', 8] },
      a: { dtype: 'a8', shape: ['T', 8] },
      qkv: { dtype: 'f32', shape: ['T', 16] },
      q: { dtype: 'f32', shape: ['T', 8] },
      o: { dtype: 'f32', shape: ['T', 8] },
      oa: { dtype: 'a8', shape: ['T', 8] },
      gu: { dtype: 'f32', shape: ['T', 24] },
      ga: { dtype: 'a8', shape: ['T', 12] },
      active: { dtype: 'f32', shape: ['T', 8] },
      hn: { dtype: 'f32', shape: ['R', 8] },
      logits: { dtype: 'f32', shape: ['R', 32] },
    },
    caches: { k: { heads: 1, head_dim: 4 }, v: { heads: 1, head_dim: 4 } },
    tables: { rope: { kind: 'rope', inv_freq: [1, 0.5], scale: 1 } },
    body: [
      { op: 'embed', w: 'embed', out: 'h' },
      { op: 'norm', x: 'h', gain: 'gain', eps: 1e-5, out: 'a' },
      { op: 'linear', x: 'a', w: 'qkv', out: 'qkv' },
      { op: 'rope_append', x: 'qkv', heads: 2, kv_heads: 1, head_dim: 4, rope: 'rope', k: 'k', v: 'v', out: 'q' },
      { op: 'attention', q: 'q', k: 'k', v: 'v', heads: 2, kv_heads: 1, head_dim: 4, scale: 0.5, out: 'o' },
      { op: 'quantize', x: 'o', out: 'oa' },
      { op: 'linear', x: 'oa', w: 'o', out: 'h', accumulate: true },
      { op: 'linear', x: 'a', w: 'gate_up', out: 'gu' },
      { op: 'glu', x: 'gu', act: 'relu2', gain: 'sub', eps: 1e-5, out: 'ga' },
      { op: 'linear', x: 'ga', w: 'down', out: 'h', accumulate: true },
      { op: 'position', w: 'positions', out: 'h', accumulate: true },
      { op: 'activate', x: 'h', act: 'relu', out: 'active' },
    ],
    logits: [
      { op: 'norm', x: 'h', gain: 'gain', eps: 1e-5, out: 'hn' },
      { op: 'linear', x: 'hn', w: 'embed', out: 'logits' },
    ],
    greedy: [{ op: 'argmax', logits: 'logits' }],
    random: [{ op: 'sample', logits: 'logits' }],
  };
}

/** The tensors of goodProgram. */
export const goodTensors = () =>
  new Map(
    Object.entries({
      embed: ['q8', [32, 8]],
      positions: ['f32', [20, 8]],
      gain: ['f32', [8]],
      head: ['f32', [4]],
      qkv: ['ternary', [16, 8]],
      o: ['ternary', [8, 8]],
      gate_up: ['ternary', [24, 8]],
      sub: ['f32', [12]],
      down: ['ternary', [8, 12]],
    }).map(([name, [encoding, shape]]) => [
      name,
      {
        name,
        encoding,
        shape,
        scale: encoding === 'ternary' ? 'row' : null,
        parts: [],
        group: encoding === 'q8' ? 32 : 0,
        slices: [shape.length === 2 ? shape[0] : 1],
      },
    ]),
  );

/** The value at a dotted path changed, or taken out where it becomes undefined. */
export function changed(value, path, to) {
  const copy = structuredClone(value);
  const keys = path.split('/');
  const last = keys.pop();
  const holder = keys.reduce((inner, key) => inner[key], copy);
  if (to === undefined) delete holder[last];
  else holder[last] = to;
  return copy;
}
