/** Guessing must change no token, no reason of the end, and leave the cache as it says. */
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { newReport } from '../../web/engine/generate.js';
import { Costs } from '../../web/engine/speculation.js';
import { Steps } from '../../web/engine/steps.js';
import { rolled } from '../../web/engine/window.js';
import { FakeExecutor, INVALID, TimedExecutor, expected, run, session, sessionOn, sum } from './fake_executor.mjs';
import { fails, noise } from './helpers.mjs';

const SEEDS = 300;
const PATTERN = [3, 1, 4, 1, 5, 9, 2, 6];
const periodic = (ids) => PATTERN[ids.length % PATTERN.length];
/** Verifying costs what a step does: guesses that are right at times pay. */
const cheap = () => new Costs(1, new Map([[8, 1]]), 8);

/** Numbers that depend on the seed. */
function dice(seed) {
  const bytes = noise(4000, seed * 7919 + 1);
  let at = 100;
  return (sides) => (bytes[at++] * 256 + bytes[at++]) % sides;
}

/** A model of few tokens that mostly follows the last two, and at times everything: guesses are right now and then. */
function model(seed, steady) {
  const hash = (value) => (Math.imul(value ^ (value >>> 15), 0x2c1b3c6d + 2 * seed) >>> 8) % 65536;
  return (ids, seen) => {
    const all = ids.reduce((total, id) => (Math.imul(total, 31) + id) | 0, seed);
    if (hash(all + seen.size) % 100 >= steady) return hash(all) % 7;
    return hash(17 * ids.at(-1) + (ids.at(-2) ?? 0)) % 7;
  };
}

/** The answer by the definition: ids, why it ended, rolls. */
function defined(prompt, next, { contextLength, contextFull, maxTokens, stopIds, abortAfter }) {
  let window = [...prompt];
  const seen = new Set(prompt);
  const ids = [];
  for (let rolls = 0; ; ) {
    if (ids.length === abortAfter) return { ids, finish: 'abort', rolls };
    if (window.length > contextLength) {
      window = rolled(window, contextLength);
      rolls += 1;
    }
    const id = next(window, seen);
    seen.add(id);
    window.push(id);
    ids.push(id);
    if (stopIds.includes(id)) return { ids, finish: 'stop', rolls };
    const isFull = contextFull === 'stop' && window.length > contextLength;
    if (ids.length === maxTokens || isFull) return { ids, finish: 'length', rolls };
  }
}

test('whatever is guessed, the ids are those of one step at a time, over turns, stops, aborts and rolls', async () => {
  const total = { verify: 0, accepted: 0, rolls: 0, abort: 0, stop: 0, length: 0, endsInside: 0 };
  for (let seed = 1; seed <= SEEDS; seed++) {
    const roll = dice(seed);
    const next = model(seed, 50 + roll(51));
    const contextLength = 9 + roll(60);
    const executor = new FakeExecutor(next, { chunk: 1 + roll(9), verifies: true, wait: setImmediate });
    executor.mostVerified = 2 + roll(7);
    const subject = sessionOn(executor, contextLength);
    subject.costs = cheap();
    let prompt = Array.from({ length: 1 + roll(Math.min(12, contextLength)) }, () => roll(7));
    for (let turn = 0; turn < 3; turn++) {
      const way = {
        contextLength,
        contextFull: roll(2) ? 'roll' : 'stop',
        maxTokens: 1 + roll(80),
        stopIds: roll(2) ? [roll(7)] : [],
        abortAfter: roll(4) ? -1 : 1 + roll(20),
      };
      const control = new AbortController();
      const report = newReport();
      const answer = defined(prompt, next, way);
      const ids = await run(
        subject,
        prompt,
        {
          speculation: ['always', 'auto'][roll(2)],
          max_tokens: way.maxTokens,
          contextFull: way.contextFull,
          stopIds: way.stopIds,
          signal: control.signal,
          onId: (count) => void (count === way.abortAfter && control.abort()),
        },
        report,
      );
      const where = `seed ${seed}, turn ${turn}`;
      assert.deepEqual([ids, report.finish], [answer.ids, answer.finish], where);
      const { cached } = subject;
      assert.deepEqual(cached, executor.cache.slice(0, cached.length), where);
      assert.ok(cached.length <= Math.min(executor.filled, contextLength), where);
      const [kind, , position, took] = executor.log.at(-1);
      if (kind === 'verify' && cached.length < position + took) total.endsInside += 1;
      total.accepted += report.accepted;
      total.rolls += report.rolls;
      total[report.finish] += 1;
      prompt = [...prompt, ...ids, roll(7)].slice(0, contextLength - roll(3));
    }
    total.verify += executor.count('verify');
    assert.ok(executor.cache.length <= contextLength, `seed ${seed}: nothing is written beyond the cache`);
  }
  const few = Object.entries(total).filter(([, count]) => count < 10);
  assert.deepEqual(few, [], `all of it happens: ${JSON.stringify(total)}`);
});

test('without a device that verifies exactly, without costs and when it is off, nothing is guessed', async () => {
  for (const [verifies, costs, speculation] of [
    [false, cheap(), 'always'],
    [false, cheap(), 'auto'],
    [true, null, 'auto'],
    [true, cheap(), 'off'],
    [true, cheap(), undefined],
  ]) {
    const subject = session(periodic, { verifies });
    subject.costs = costs;
    await run(subject, [1, 2, 3], { max_tokens: 50, speculation });
    assert.equal(subject.executor.count('verify'), 0, `${verifies} ${costs} ${speculation}`);
  }
  const subject = session(periodic, { verifies: true });
  await run(subject, [1, 2, 3], { max_tokens: 50, speculation: 'always' });
  assert.ok(subject.executor.count('verify') > 3);
});

test('a stop id inside guesses that were right ends the answer there, and the next turn is not misled', async () => {
  // The prompt has a full pattern with the stop id in it, as a chat has the ends of earlier messages.
  const text = [11, 12, 13, 14, 2, 15, 16, 17, 18, 19];
  const next = (ids) => text[ids.length % text.length];
  const subject = session(next, { verifies: true });
  const prompt = [...text, 11, 12];
  const report = newReport();
  const options = { stopIds: [2], speculation: 'always' };
  assert.deepEqual(await run(subject, prompt, options, report), [13, 14, 2]);
  const [kind, , position, took] = subject.executor.log.at(-1);
  assert.ok(kind === 'verify' && position + took > 15, 'tokens after the stop id were accepted too');
  assert.deepEqual(subject.cached, [...prompt, 13, 14, 2], 'the stop id has its place in the cache');
  const follow = [...prompt, 13, 14, 2, 50, 51];
  const after = newReport();
  const more = { ...options, max_tokens: 3, stopIds: [] };
  assert.deepEqual(await run(subject, follow, more, after), expected(follow, 3, next));
  assert.equal(after.cachedTokens, 15);
});

test('walking away in the middle of guesses that were right leaves the cache in order', async () => {
  const subject = session(periodic, { verifies: true, contextLength: 128 });
  const prompt = [...PATTERN, ...PATTERN];
  for (const after of [2, 5, 7, 12]) {
    const ids = await run(subject, prompt, { speculation: 'always', onId: (count) => count === after });
    assert.deepEqual(ids, expected(prompt, after, periodic));
    assert.deepEqual([subject.cached, subject.running], [[...prompt, ...ids].slice(0, subject.cached.length), false]);
    assert.ok(subject.cached.length >= prompt.length + after - 1);
  }
});

test('a broken number that a verification meets is an error, and is not kept', async () => {
  const subject = session((ids) => (ids.length > 30 ? INVALID : periodic(ids)), { verifies: true });
  await assert.rejects(run(subject, [1, 2, 3], { speculation: 'always' }), fails('numbers-broken'));
  assert.deepEqual([subject.cached, subject.running], [[], false]);
});

test('a verification that fails ends the answer with its error', async () => {
  const subject = session(periodic, { verifies: true });
  subject.executor.verify = async () => {
    throw new Error('the device is gone');
  };
  await assert.rejects(run(subject, [1, 2, 3], { speculation: 'always' }), /the device is gone/);
  assert.deepEqual([subject.cached, subject.running], [[], false]);
});

test('batches grow to what takes 25 ms, within a quarter of the ring', () => {
  const subject = session();
  const sizes = (stepMs, count) => Array.from({ length: count }, () => (subject.adapt(stepMs), subject.batch));
  assert.deepEqual(sizes(0.4, 7), [2, 4, 8, 16, 32, 62, 62]);
  assert.deepEqual(sizes(0.05, 2), [64, 64]);
  assert.deepEqual(sizes(10, 1), [2]);
  assert.deepEqual(sizes(100, 1), [1]);
  assert.deepEqual(sizes(0, 2), [2, 4]);
});

test('the ids of a sum, the most sensitive model, with guesses that are never right', async () => {
  const subject = session(sum, { verifies: true, contextLength: 200 });
  subject.drafts = { propose: (ids, most) => new Array(most).fill(5), settle() {} };
  const report = newReport();
  assert.deepEqual(
    await run(subject, [1, 2, 3], { max_tokens: 100, speculation: 'always' }, report),
    expected([1, 2, 3], 100),
  );
  assert.equal(report.accepted, 0);
  // The first token comes from the prompt; the last has no room for guesses.
  assert.equal(report.verifications, 98);
});

test('the policy learns of each plain token, of each verification, and of the end of a run of them', async () => {
  const device = new TimedExecutor(periodic, { stepMs: 1, verifyMs: () => 1, waitMs: 1 });
  const subject = sessionOn(device, 64);
  const told = [];
  // Whether there is a guess when the device waits; the first one is asked for while it does not.
  const plan = [1, 1, 0, 0];
  const speculation = {
    batch: 1,
    draft: (ids, most, drained) => {
      told.push(drained ? 'asked' : 'ahead');
      return drained ? (plan.shift() ? [periodic(ids)] : []) : plan.length === 4 ? [0] : [];
    },
    sawToken: (ids) => told.push(ids.length),
    sawVerified: (draft, accepted, ms) => told.push(`verified ${accepted} of ${draft.length} in ${ms}`),
    ended: () => told.push('ended'),
  };
  const report = newReport();
  await device.timed(async () => {
    const first = await device.prefill([1], 0, 'greedy');
    const steps = new Steps(subject, [1], first.ids, { mode: 'greedy', limit: 12, speculation, report });
    while (steps.tokens.length < 12) for (const id of await steps.next()) steps.take(id);
    await steps.end();
  });
  assert.deepEqual(told, [
    ...['ahead', 2, 'asked', 'verified 1 of 1 in 2', 'asked', 'verified 1 of 1 in 2', 'asked', 'ended'],
    ...[7, 'ahead', 8, 'ahead', 9, 'ahead', 10, 'ahead', 11, 'ahead', 12],
  ]);
});

test('the cost of a plain step is that of the device, not of a slow reader', async () => {
  for (const [pause, cost] of [
    [0, 2],
    [0.5, 2],
    [50, 2.5],
  ]) {
    const device = new TimedExecutor(periodic, { stepMs: 2, verifyMs: () => 9, waitMs: 1 });
    const subject = sessionOn(device, 512);
    subject.costs = new Costs(2.5, new Map([[1, 9]]), 8);
    const onId = () => void (device.now += pause);
    await device.timed(() => run(subject, [1], { max_tokens: 300, onId, speculation: 'off' }));
    const { plain } = subject.costs;
    assert.ok(Math.abs(plain - cost) < 0.1, `${plain} ms with a reader that takes ${pause} ms, expected ${cost}`);
  }
});

test('what reading a prompt takes is not taken for the cost of a step', async () => {
  const device = new TimedExecutor(periodic, { stepMs: 2, verifyMs: () => 9, waitMs: 1 });
  const subject = sessionOn(device, 64);
  subject.costs = new Costs(2.5, new Map([[1, 9]]), 8);
  await device.timed(() => run(subject, [1, 2], { max_tokens: 1 }));
  assert.deepEqual([subject.costs.plain, subject.batch], [2.5, 1]);
});
