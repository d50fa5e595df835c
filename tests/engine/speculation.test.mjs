/** When guessing pays: the arithmetic, the measurement at load, and answers on devices with clocks of their own. */
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { newReport } from '../../web/engine/generate.js';
import { Costs, Speculation, measureCosts } from '../../web/engine/speculation.js';
import { FakeExecutor, TimedExecutor, expected, run, sessionOn } from './fake_executor.mjs';
import { noise } from './helpers.mjs';

const near = (found, wanted) => assert.ok(Math.abs(found - wanted) < 1e-9, `${found}, expected ${wanted}`);
const nothing = { propose: () => [], settle() {} };

test('costs between two measured sizes lie on a line, and beyond them nothing is shared', () => {
  assert.deepEqual(new Costs(1, new Map([[8, 9], [1, 2], [4, 5]]), 8).verify, [0, 2, 3, 4, 5, 6, 7, 8, 9]);
  assert.deepEqual(new Costs(1, new Map([[1, 2], [2, 3]]), 4).verify, [0, 2, 3, 4.5, 6]);
  assert.deepEqual(new Costs(1, new Map([[1, 3], [2, 6], [4, 5]]), 4).verify, [0, 3, 5, 5, 5], 'fewer never cost more');
  assert.deepEqual(new Costs(4, new Map([[1, 6]]), 1).wait, 2);
  assert.deepEqual(new Costs(4, new Map([[1, 3]]), 1).wait, 0);
});

test('costs are running averages that a pause of the machine hardly moves', () => {
  const costs = new Costs(8, new Map([[1, 8], [4, 16]]), 4);
  costs.sawPlain(16);
  assert.equal(costs.plain, 9);
  costs.sawPlain(1000);
  assert.equal(costs.plain, 9 + 9 / 8);
  costs.sawVerify(2, 1000);
  near(costs.verify[2], (32 / 3) * (9 / 8));
  costs.sawVerify(3, 0);
  near(costs.verify[3], (40 / 3) * (7 / 8));
  near(costs.verify[2], (40 / 3) * (7 / 8));
  assert.deepEqual([costs.verify[1], costs.verify[4]], [8, 16]);
  costs.sawVerify(3, 20);
  near(costs.verify[3], (40 / 3) * (7 / 8) + (20 - (40 / 3) * (7 / 8)) / 8);
});

/** @param {number[]} acceptance of each guess */
function policy(plain, verify, acceptance) {
  const costs = new Costs(plain, new Map(verify.map((ms, index) => [index + 1, ms])), verify.length);
  const subject = new Speculation('auto', nothing, costs, verify.length);
  subject.acceptance = acceptance;
  return subject;
}

test('so many guesses are verified that the tokens per ms are most', () => {
  // Tokens expected with 1, 2, 3 guesses: 1.8, 2.4, 2.7; for 1.2, 1.5, 1.8 ms.
  assert.equal(policy(1, [1, 1.2, 1.5, 1.8], [0.8, 0.75, 0.5]).length(7), 2);
  assert.equal(policy(1, [1, 1.2, 1.5, 1.6], [0.8, 0.75, 0.5]).length(7), 3);
  assert.equal(policy(1, [1, 1.1, 1.5, 1.8], [0.8, 0.75, 0.5]).length(7), 1);
});

test('there are no more guesses than there is room for', () => {
  const subject = policy(1, [1, 1, 1, 1], [0.8, 0.8, 0.8]);
  assert.deepEqual(
    [7, 3, 2, 1, 0, -1].map((most) => subject.length(most)),
    [3, 3, 2, 1, 0, 0],
  );
});

test('guessing must win by a tenth', () => {
  assert.equal(policy(1, [1, 1.5 / 1.11], [0.5]).length(1), 1);
  assert.equal(policy(1, [1, 1.5 / 1.09], [0.5]).length(1), 0);
});

test('plain steps on their way make the device wait first, which is shared by the verifications that follow', () => {
  const subject = policy(1, [2, 2], [0.4]);
  subject.acceptance = [1];
  subject.costs.verify[2] = 1.5;
  // 2 tokens in 1.5 ms; with the wait of 1 ms for each two verifications in 2 ms.
  assert.equal(subject.length(1, true), 1);
  assert.equal(subject.length(1, false), 0);
  for (let index = 0; index < 16; index++) {
    subject.run = 10;
    subject.ended();
  }
  near(subject.usualRun, 10 - 8 * (7 / 8) ** 16);
  assert.equal(subject.length(1, false), 1);
});

test('a draft that is shorter than was wanted must pay too', () => {
  const source = { propose: (ids, most) => [5, 6].slice(0, most), settle() {} };
  const subject = policy(1, [1, 2.3, 2.3, 2.3], [1, 1, 1]);
  subject.source = source;
  assert.equal(subject.length(3), 3);
  assert.deepEqual(subject.draft([1], 3, true), [5, 6]);
  subject.costs.verify[3] = 2.9;
  assert.deepEqual(subject.draft([1], 3, true), []);
});

test('how often a guess is right is known by how many before it were, in this draft and the last ones', () => {
  const settled = [];
  const subject = policy(1, [1, 1, 1, 1], [0.5, 0.5, 0.5]);
  subject.source = { propose: () => [], settle: (draft, accepted) => settled.push([draft, accepted]) };
  // The prior counts for three, so the first observation for a quarter, the next one for a fifth.
  subject.sawVerified([7, 8, 9], 1, 1);
  assert.deepEqual([subject.acceptance, subject.streak], [[0.625, 0.375, 0.5], 0]);
  subject.sawVerified([7, 8], 2, 1);
  near(subject.acceptance[0], 0.7);
  near(subject.acceptance[1], 0.5);
  assert.equal(subject.streak, 2);
  subject.sawVerified([7, 8, 9], 3, 1);
  near(subject.acceptance[2], 0.75);
  assert.equal(subject.streak, 5);
  subject.known.fill(1000);
  subject.sawVerified([7], 0, 1);
  near(subject.acceptance[2], 0.75 * (15 / 16));
  assert.equal(subject.streak, 0);
  assert.deepEqual(settled, [
    [[7, 8, 9], 1],
    [[7, 8], 2],
    [[7, 8, 9], 3],
    [[7], 0],
  ]);
});

test('after right guesses the chances of those that follow count', () => {
  const subject = policy(1, [1, 1.5, 1.5, 1.5], [0.1, 0.9, 0.9]);
  assert.equal(subject.length(3), 0);
  assert.equal(subject.batch, 8, 'batches are short, to see soon that one was right');
  subject.streak = 1;
  assert.equal(subject.length(3), 3);
  subject.acceptance = [0.1, 0.1, 0.1];
  assert.equal(subject.batch, Infinity);
});

test('plain steps show whether guesses would have been right', () => {
  const settled = [];
  const subject = policy(1, [1, 9, 9, 9], [0.5, 0.5, 0.5]);
  subject.source = {
    propose: (ids, most) => [ids.at(-1) + 1, ids.at(-1) + 2, ids.at(-1) + 3].slice(0, most),
    settle: (draft, accepted) => settled.push([draft, accepted]),
  };
  const ids = [1];
  for (const id of [2, 3, 9, 10]) {
    ids.push(id);
    subject.sawToken(ids);
  }
  // After 2: 3 right, 4 wrong. After 9: 10 right so far.
  near(subject.acceptance[0], 0.7);
  assert.deepEqual([subject.acceptance.slice(1), subject.streak], [[0.375, 0.5], 1]);
  assert.deepEqual(subject.shadow, { draft: [10, 11, 12], right: 1 });
  assert.deepEqual(settled, [[[3, 4, 5], 1]]);
  subject.sawVerified([1], 0, 9);
  near(subject.acceptance[1], 0.3);
  assert.equal(subject.shadow, null);
  subject.streak = 3;
  subject.sawToken(ids);
  assert.equal(subject.streak, 0, 'a token that nobody guessed ends a row');
});

test('after a loss good guesses are tried again rarely, bad ones never', () => {
  const good = policy(1, [1, 3, 3, 3], [0.9, 0.9, 0.9]);
  const bad = policy(1, [1, 3, 3, 3], [0.05, 0.05, 0.05]);
  for (const [subject, after] of [
    [good, 3],
    [bad, 0],
  ]) {
    // 3.44 tokens in 3 ms win, so that it loses at first:
    subject.costs.verify.fill(4, 2);
    for (let token = 0; token < 255; token++) subject.sawToken([1]);
    assert.equal(subject.length(3), 0);
    subject.sawToken([1]);
    assert.equal(subject.length(3), after);
    subject.sawVerified([1], 1, 3);
    assert.equal(subject.length(3), 0);
  }
});

test('`always` asks nobody', () => {
  const subject = new Speculation('always', nothing, new Costs(1, new Map([[1, 99]]), 8), 8);
  assert.deepEqual([subject.length(3), subject.length(9), subject.length(0), subject.batch], [3, 7, 0, 1]);
});

/** What is asked for at load. */
class ColdExecutor extends TimedExecutor {
  begin(sampling, seen) {
    super.begin(sampling, seen);
    this.produced = 0;
    this.pending = 0;
  }

  verify(mode, ids, position, produced) {
    this.log.push(['verify', ids.length, mode, this.now]);
    assert.deepEqual([position, produced], [0, 0]);
    const cold = this.count('verify') === 1 ? 5 : 0;
    Object.assign(this, { filled: 1, produced: 1, cache: [0] });
    return this.submit(this.verifyMs(ids.length) + cold, [0]);
  }
}

const measured = (device, contextLength = 512) =>
  device.timed(() => measureCosts(device, { contextLength, vocabulary: 100, budgetMs: 100 }));

test('costs are measured at load, the first steps not counted', async () => {
  const device = new ColdExecutor(() => 0, { stepMs: 0.5, verifyMs: (k) => 0.5 + k / 8, waitMs: 1 });
  const costs = await measured(device);
  near(costs.plain, 0.5);
  costs.verify.slice(1).forEach((ms, index) => near(ms, 1.5 + (index + 1) / 8));
  assert.equal(device.count('verify'), 12);
  assert.ok(device.now < 100);
});

test('on a slow device the measurement stops in time and takes what it has', async () => {
  for (const [stepMs, sizes] of [
    [30, [1, 8, 4]],
    [70, [1, 8]],
    [400, [1]],
  ]) {
    const device = new ColdExecutor(() => 0, { stepMs, verifyMs: (k) => stepMs + k, waitMs: 1 });
    const costs = await measured(device);
    assert.deepEqual(
      device.log.filter(([kind]) => kind === 'verify').map(([, size]) => size),
      sizes,
    );
    const last = device.log.findLast(([kind]) => kind === 'verify');
    assert.ok(sizes.length === 1 || last[3] < 100, `the last step began at ${last[3]} ms`);
    assert.ok(Number.isFinite(costs.plain) && costs.verify.every(Number.isFinite));
    assert.ok(costs.plain <= costs.verify[1]);
    const subject = new Speculation('auto', nothing, costs, 8);
    if (sizes.length === 1) assert.equal(subject.length(7), 0, 'what was not measured is not hoped for');
  }
});

test('a context of a few tokens is not overrun by the measurement', async () => {
  for (const contextLength of [1, 2, 3, 5]) {
    const device = new ColdExecutor(() => 0, { stepMs: 0.5, verifyMs: (k) => 0.5 + k / 8, waitMs: 1 });
    const costs = await measured(device, contextLength);
    assert.equal(costs.verify.length, 1 + contextLength);
    assert.ok(device.log.every(([kind, size]) => kind !== 'verify' || size <= contextLength));
    assert.ok(device.cache.length <= contextLength);
  }
});

test('the cache is empty after the measurement, and only devices that verify exactly are measured', async () => {
  const device = new ColdExecutor(() => 0, { stepMs: 0.5, verifyMs: (k) => 0.5 + k / 8, waitMs: 1 });
  const subject = sessionOn(device, 512);
  subject.cached = [0, 0, 0];
  await device.timed(() => subject.measureCosts());
  assert.deepEqual([subject.cached, subject.running], [[], false]);
  near(subject.costs.plain, 0.5);
  const other = sessionOn(new FakeExecutor(() => 0), 512);
  await other.measureCosts();
  assert.deepEqual([other.costs, other.executor.log], [null, []]);
});

/** Most pairs of tokens come again, and go on in another way each time. */
const CHANCE = noise(2000, 5);
const random = (ids) => CHANCE[ids.length] % 6;
const SENTENCE = noise(40, 9).map((byte) => 10 + (byte % 60));
const repeating = (ids) => SENTENCE[ids.length % SENTENCE.length];
/** Quotations of 60 tokens of what was written, and 20 new ones between. */
const DOCUMENT = noise(240, 3).map((byte) => 10 + (byte % 60));
const quoting = (ids) => (ids.length % 80 < 60 ? DOCUMENT[ids.length % 240] : 70 + (CHANCE[ids.length] % 30));

const DEVICES = {
  laptop: { stepMs: 20, verifyMs: (k) => 20 + k, waitMs: 2 },
  card: { stepMs: 0.8, verifyMs: (k) => 0.8 + k / 16, waitMs: 1 },
  processor: { stepMs: 50, verifyMs: (k) => 50 * k, waitMs: 0 },
};

/** Simulated ms of an answer of 600 tokens, and its report. */
async function answered(kind, next, speculation) {
  const device = new TimedExecutor(next, DEVICES[kind]);
  const subject = sessionOn(device, 1024);
  const { stepMs, verifyMs, waitMs } = DEVICES[kind];
  subject.costs = new Costs(stepMs, new Map([1, 2, 4, 8].map((k) => [k, verifyMs(k) + waitMs])), 8);
  const report = newReport();
  const prompt = next === quoting ? [...DOCUMENT] : [...SENTENCE];
  const ids = await device.timed(() => run(subject, prompt, { max_tokens: 600, speculation }, report));
  assert.deepEqual(ids, expected(prompt, 600, next));
  return { ms: report.lastMs, report };
}

test('guesses make an answer faster where its text repeats, and never much slower', async () => {
  for (const [kind, next, most] of [
    ['laptop', repeating, 0.3],
    ['laptop', quoting, 0.6],
    ['laptop', random, 1.05],
    ['card', repeating, 0.5],
    ['card', quoting, 0.9],
    ['card', random, 1.03],
    ['processor', repeating, 1.02],
    ['processor', random, 1.02],
  ]) {
    const off = await answered(kind, next, 'off');
    const auto = await answered(kind, next, 'auto');
    assert.ok(auto.ms / off.ms < most, `${kind}, ${next.name}: ${auto.ms} ms against ${off.ms} ms`);
    assert.equal(off.report.verifications, 0);
  }
});
