import assert from 'node:assert/strict';
import { test } from 'node:test';

import { Gpu, adapterOf, requestDevice } from '../../web/engine/gpu.js';
import { limitProblems, planMemory } from '../../web/engine/memory.js';
import { prepareGpu } from '../../web/engine/prepare.js';
import { checkProgram } from '../../web/engine/program.js';
import { featuresBehind } from '../../web/engine/selfcheck.js';
import { contract, fails, goodProgram, goodTensors } from './helpers.mjs';

/** A device of which the test decides what it reports. */
class FakeDevice extends EventTarget {
  constructor({ memory = null, validation = null } = {}) {
    super();
    this.reports = { 'out-of-memory': memory, validation };
    this.scopes = [];
    this.limits = { maxBufferSize: 1 << 28, maxStorageBufferBindingSize: 1 << 27 };
    this.features = new Set();
    this.queue = {};
    this.alive = 0;
    this.lost = new Promise((resolve) => {
      this.lose = resolve;
    });
  }

  createBuffer({ size }) {
    if (size > this.limits.maxBufferSize) throw new RangeError('too large');
    this.alive += 1;
    return {
      size,
      destroy: () => {
        this.alive -= 1;
      },
    };
  }

  pushErrorScope(filter) {
    this.scopes.push(filter);
  }

  async popErrorScope() {
    const report = this.reports[this.scopes.pop()];
    return report && { message: report };
  }

  createShaderModule({ code }) {
    this.reports.validation = code.includes('known') ? null : 'unknown feature';
  }

  destroy() {
    this.destroyed = true;
  }
}

const open = async (reports, owned = false) => {
  const device = new FakeDevice(reports);
  const gpu = new Gpu(device, await adapterOf(device, []), owned);
  return { device, gpu };
};

test('out of memory is a typed error with the bytes, and what was made is freed', async () => {
  const { device, gpu } = await open({ memory: 'no more' });
  const kept = gpu.buffer('kept', 100, 0);
  await assert.rejects(
    gpu.allocate('the weights', 12_000_000, () => [gpu.buffer('a', 10, 0), gpu.buffer('b', 10, 0)]),
    (error) => {
      return fails('out-of-memory')(error) && error.detail.needed === 12_000_000 && error.message.includes('12 MB');
    },
  );
  assert.deepEqual([...gpu.buffers], [kept]);
  assert.equal(device.alive, 1);
});

test('a buffer beyond all limits is out of memory too, a validation error is internal', async () => {
  const { gpu } = await open();
  await assert.rejects(
    gpu.allocate('x', 1 << 29, () => gpu.buffer('a', 1 << 29, 0)),
    fails('out-of-memory'),
  );
  const wrong = await open({ validation: 'bad usage' });
  await assert.rejects(
    wrong.gpu.allocate('x', 10, () => wrong.gpu.buffer('a', 10, 0)),
    fails('internal'),
  );
});

test('buffers that others make meanwhile are not freed with those that failed', async () => {
  const { device, gpu } = await open({ memory: 'no more' });
  const failing = gpu.allocate('x', 10, () => gpu.buffer('a', 10, 0));
  gpu.buffer('other', 10, 0);
  await assert.rejects(failing, fails('out-of-memory'));
  assert.equal(device.alive, 1);
});

test('a lost device ends what waits for it, and everything after', async () => {
  const { device, gpu } = await open();
  const waiting = gpu.alive(new Promise(() => {}));
  device.lose({ reason: 'unknown', message: 'the driver restarted' });
  await assert.rejects(
    waiting,
    (error) => fails('device-lost')(error) && error.message.includes('the driver restarted'),
  );
  assert.equal((await gpu.lost).code, 'device-lost');
  await assert.rejects(gpu.alive(Promise.resolve(1)), fails('device-lost'));
});

test('a failure that comes with a loss is told as the loss', async () => {
  const { device, gpu } = await open();
  const waiting = gpu.alive(Promise.reject(new Error('mapAsync was aborted')));
  setTimeout(() => device.lose({ reason: 'unknown', message: 'gone' }), 5);
  await assert.rejects(waiting, fails('device-lost'));
});

test('an error that nobody asked for makes later results worthless', async () => {
  const { device, gpu } = await open();
  device.dispatchEvent(Object.assign(new Event('uncapturederror'), { error: { message: 'binding too small' } }));
  await assert.rejects(
    gpu.alive(Promise.resolve(1)),
    (error) => fails('internal')(error) && error.message.includes('binding too small'),
  );
});

test('dispose frees all buffers, ends only a device of its own, and is no loss', async () => {
  for (const owned of [true, false]) {
    const { device, gpu } = await open({}, owned);
    gpu.buffer('a', 10, 0);
    gpu.dispose();
    assert.equal(device.alive, 0);
    assert.equal(Boolean(device.destroyed), owned);
    device.lose({ reason: 'destroyed', message: '' });
    const told = await Promise.race([gpu.lost, new Promise((resolve) => setTimeout(() => resolve('nothing'), 20))]);
    assert.equal(told, 'nothing');
    assert.throws(() => gpu.check(), fails('aborted'));
  }
});

test('language features are found by asking the compiler', async () => {
  const { abilities } = await adapterOf(new FakeDevice(), ['known_feature', 'strange_feature']);
  assert.deepEqual([...abilities.language], ['known_feature']);
});

test('a limit that the adapter does not reach is named with both numbers', async () => {
  const adapter = { limits: { maxBufferSize: 100 }, adapter: { features: new Set(), requestDevice: async () => ({}) } };
  await assert.rejects(
    requestDevice(adapter, { maxBufferSize: 200 }, new Set()),
    (error) => fails('limit-too-small')(error) && error.detail.needed === 200 && error.detail.available === 100,
  );
});

test('the memory plan adds up, and what cannot fit is told before a download', () => {
  const program = checkProgram(goodProgram(), contract, goodTensors());
  const pack = { tensors: goodTensors(), vocab_size: 32 };
  const choice = { contextLength: 100, kvCache: 'q8', chunk: 4 };
  const plan = planMemory(pack, program, contract, choice);
  const bytes = {
    embed: 32 * 32 + 32 * 2,
    positions: 20 * 32,
    gain: 32,
    head: 16,
    qkv: 16 * 16 + 64,
    o: 8 * 16 + 32,
    gate_up: 24 * 16 + 96,
    sub: 48,
    down: 8 * 16 + 32,
  };
  assert.equal(
    plan.weightsBytes,
    Object.values(bytes).reduce((sum, size) => sum + size, 0),
  );
  assert.deepEqual([plan.kvBytesPerToken, plan.kvBytes], [16, 1600]);
  // Eight tokens may be verified at once, which is more than the chunk of four.
  const floats = 4 * 8 * (8 + 16 + 8 + 8 + 24 + 8) + 4 * 8 * (8 + 32);
  const integers = 3 * 8 * (64 + 4 + 4);
  const picks = 8 * 8;
  const weights = 8 * 4 * (256 * 2 + 1024);
  const parts = 8 * 2 * 2 * 16 * (4 / 4 + 1);
  assert.equal(plan.workBytes, floats + integers + picks + weights + parts + 8 * 2 * 100);
  assert.equal(plan.totalBytes, plan.weightsBytes + plan.kvBytes + plan.workBytes);
  assert.deepEqual(limitProblems(pack, program, contract, choice, 1 << 20), []);
  const [problem] = limitProblems(pack, program, contract, { ...choice, contextLength: 1000 }, 3000);
  assert.deepEqual([problem.code, problem.needed, problem.available], ['limit-too-small', 4000, 3000]);
  assert.match(problem.message, /750/);
});

test('a renderer on the processor is told from a GPU', async () => {
  for (const [architecture, software] of [['swiftshader', true], ['ampere', false]]) {
    const device = Object.assign(new FakeDevice(), { adapterInfo: { vendor: 'acme', architecture } });
    const { abilities, info } = await adapterOf(device, []);
    assert.equal(info.software, software);
    assert.equal(abilities.software, software);
  }
});

test('a feature that computes wrongly is left alone', async () => {
  const failed = (kernel, code = 'self-check-failed') => featuresBehind(contract, { code, detail: { kernel } });
  assert.deepEqual(failed('linear_ternary_rows'), ['subgroups']);
  assert.deepEqual([failed('linear_ternary'), failed('linear_ternary_rows', 'device-lost')], [[], []]);

  const program = checkProgram(goodProgram(), contract, goodTensors());
  const prepared = { program, contract, pack: { tensors: goodTensors() }, choice: { contextLength: 64, kvCache: 'f16', chunk: 4 } };
  const device = Object.assign(new FakeDevice(), {
    features: new Set(['subgroups', 'timestamp-query']),
    createShaderModule: () => ({}),
  });
  for (const without of [[], ['subgroups']]) {
    const { adapter, planned } = await prepareGpu(prepared, { device, without });
    const used = planned.flatMap((step) => Object.values(step.program).flat()).flatMap(({ variants }) => variants[0]);
    assert.equal(used.some(({ kernel }) => kernel.needs), without.length === 0);
    const expected = ['subgroups', 'timestamp-query'].filter((name) => !without.includes(name));
    assert.deepEqual([...new Gpu(device, adapter, false).abilities.features], expected);
  }
});
