import assert from 'node:assert/strict';
import { test } from 'node:test';

import { newReport } from '../../web/engine/generate.js';
import { rolled } from '../../web/engine/window.js';
import { FakeExecutor, expected, run, session, sessionOn, sum } from './fake_executor.mjs';

const numbers = (count, first = 0) => Array.from({ length: count }, (_, index) => first + index);

test('the first four and the last tokens stay, and a quarter of the context is free', () => {
  assert.deepEqual(rolled(numbers(17), 16), [0, 1, 2, 3, 9, 10, 11, 12, 13, 14, 15, 16]);
  assert.deepEqual(rolled(numbers(101), 100), [...numbers(4), ...numbers(71, 30)]);
});

test('in a context of any size the last token stays and there is room again', () => {
  for (let length = 1; length <= 40; length++) {
    const tokens = numbers(length + 1);
    const kept = rolled(tokens, length);
    assert.equal(kept.at(-1), length);
    assert.ok(kept.length >= 1 && kept.length <= Math.max(1, length - 1), `${kept.length} of ${length}`);
    assert.equal(new Set(kept).size, kept.length, 'no token twice');
    assert.deepEqual(
      kept,
      kept.toSorted((a, b) => a - b),
    );
  }
});

/** The answer by the definition: after each token that finds no room, the next one is that after the window. */
function rolling(prompt, count, contextLength, next = sum) {
  let window = [...prompt];
  const seen = new Set(prompt);
  const ids = [];
  while (ids.length < count) {
    if (window.length > contextLength) {
      const kept = contextLength - contextLength / 4;
      window = [...window.slice(0, 4), ...window.slice(window.length - (kept - 4))];
    }
    const id = next(window, seen);
    seen.add(id);
    window.push(id);
    ids.push(id);
  }
  return { ids, window };
}

test('after a roll the ids are those after the tokens that stayed', async () => {
  const report = newReport();
  const forgotten = [];
  const subject = session(sum, { contextLength: 16 });
  const read = [];
  const hooks = { onRoll: (count) => forgotten.push(count), onPrompt: (done) => read.push(done) };
  const options = { max_tokens: 30, contextFull: 'roll', ...hooks };
  const { ids, window } = rolling([1, 2, 3, 4, 5, 6], 30, 16);
  assert.deepEqual(await run(subject, [1, 2, 3, 4, 5, 6], options, report), ids);
  assert.deepEqual([report.finish, report.contextFull, report.tokens], ['length', false, 30]);
  assert.deepEqual([report.rolls, report.forgotten, forgotten], [4, 20, [5, 5, 5, 5]]);
  assert.deepEqual(read, [4], 'progress is that of the prompt');
  assert.deepEqual([report.promptTokens, report.cachedTokens], [6, 0]);
  assert.deepEqual(subject.cached, window.slice(0, -1));
  assert.deepEqual(subject.executor.cache.slice(0, subject.cached.length), subject.cached);
});

test('the sinks are not computed again', async () => {
  const { executor } = await rolledSession();
  const again = executor.log.filter(([kind, , position]) => kind === 'prefill' && position === 4);
  assert.equal(again.length, 2);
  assert.equal(executor.log.filter(([kind, , position]) => kind === 'prefill' && position === 0).length, 1);
});

/** After an answer whose window has moved on once; the prompt is read in steps of 4. */
async function rolledSession() {
  const subject = session(sum, { contextLength: 16 });
  await run(subject, [1, 2, 3, 4, 5, 6], { max_tokens: 14, contextFull: 'roll' });
  return subject;
}

test('the next turn is right, and reuses what is at the same place', async () => {
  const subject = await rolledSession();
  const report = newReport();
  assert.deepEqual(
    await run(subject, [1, 2, 3, 4, 5, 6, 7], { max_tokens: 5 }, report),
    expected([1, 2, 3, 4, 5, 6, 7], 5),
  );
  assert.equal(report.cachedTokens, 4);
});

test('a prompt that fills the context rolls after its first token; by default it ends there', async () => {
  const prompt = numbers(16, 1);
  const report = newReport();
  assert.deepEqual(await run(session(sum, { contextLength: 16 }), prompt, {}, report), expected(prompt, 1));
  assert.deepEqual([report.finish, report.contextFull, report.rolls], ['length', true, 0]);
  assert.deepEqual(
    await run(session(sum, { contextLength: 16 }), prompt, { max_tokens: 9, contextFull: 'roll' }),
    rolling(prompt, 9, 16).ids,
  );
});

test('the penalty goes on for tokens that left the window', async () => {
  const next = (ids, seen) => (sum(ids) + 7 * seen.size) % 100;
  const subject = session(next, { contextLength: 16 });
  const { ids } = rolling([1, 2, 3, 4, 5], 60, 16, next);
  assert.deepEqual(await run(subject, [1, 2, 3, 4, 5], { max_tokens: 60, contextFull: 'roll' }), ids);
  assert.equal(subject.executor.seenIds.size, new Set([1, 2, 3, 4, 5, ...ids]).size);
});

test('a stop id ends it in any window, and so does an abort while the window is read again', async () => {
  const { ids } = rolling([1, 2, 3, 4, 5, 6], 60, 16);
  const stop = ids.find((id, index) => index > 25 && ids.indexOf(id) === index) ?? ids[40];
  const report = newReport();
  const subject = session(sum, { contextLength: 16 });
  const given = await run(subject, [1, 2, 3, 4, 5, 6], { stopIds: [stop], contextFull: 'roll' }, report);
  assert.deepEqual(given, ids.slice(0, ids.indexOf(stop) + 1));
  assert.equal(report.finish, 'stop');

  const control = new AbortController();
  const aborted = newReport();
  const executor = new FakeExecutor(sum);
  const other = sessionOn(executor, 16);
  const options = { contextFull: 'roll', signal: control.signal, onRoll: () => control.abort() };
  assert.deepEqual(await run(other, [1, 2, 3, 4, 5, 6], options, aborted), ids.slice(0, 11));
  assert.deepEqual([aborted.finish, other.cached], ['abort', [1, 2, 3, 4]]);
  assert.deepEqual(await run(other, [1, 2, 3, 4, 9], { max_tokens: 4 }), expected([1, 2, 3, 4, 9], 4));
});
