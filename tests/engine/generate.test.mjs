import assert from 'node:assert/strict';
import { test } from 'node:test';

import { Chat } from '../../web/engine/chat.js';
import { newReport } from '../../web/engine/generate.js';
import { checkSampling } from '../../web/engine/sampling.js';
import { checkWays } from '../../web/engine/ways.js';
import { INVALID, expected, run, session, sum } from './fake_executor.mjs';
import { fails } from './helpers.mjs';

test('ids are those that one step at a time would give, in whatever batches they are made', async () => {
  const subject = session();
  assert.deepEqual(
    await run(subject, [1, 2, 3, 4, 5, 6, 7, 8, 9], { max_tokens: 40 }),
    expected([1, 2, 3, 4, 5, 6, 7, 8, 9], 40),
  );
  const { log, mostUnread } = subject.executor;
  assert.deepEqual(
    log.slice(0, 3).map(([kind, count, at, mode]) => [kind, count, at, mode]),
    [
      ['prefill', 4, 0, null],
      ['prefill', 4, 4, null],
      ['prefill', 1, 8, 'greedy'],
    ],
  );
  assert.ok(
    log.some(([kind, steps]) => kind === 'decode' && steps > 4),
    'a fast device gets several steps a submit',
  );
  assert.equal(mostUnread, 2, 'one batch is computed while another is read');
});

test('it ends exactly at a stop id, which is given out too', async () => {
  const answer = expected([1, 2], 30);
  const report = newReport();
  const stop = answer[5];
  const first = answer.indexOf(stop);
  assert.deepEqual(await run(session(), [1, 2], { stopIds: [stop] }, report), answer.slice(0, first + 1));
  assert.deepEqual([report.finish, report.tokens, report.contextFull], ['stop', first + 1, false]);
});

test('after steps beyond the stop the next turn is as if they had not been', async () => {
  const subject = session();
  const answer = expected([1, 2], 30);
  const given = await run(subject, [1, 2], { stopIds: [answer[7]] });
  const follow = [1, 2, ...given, 3, 4];
  const report = newReport();
  assert.deepEqual(await run(subject, follow, { max_tokens: 5 }, report), expected(follow, 5));
  assert.ok(report.cachedTokens >= 1 + given.length, `${report.cachedTokens} tokens of the turn before are reused`);
});

test('only the longest common prefix is reused, and at least one token is computed', async () => {
  const subject = session();
  await run(subject, [1, 2, 3, 4, 5], { max_tokens: 3 });
  for (const [prompt, cached] of [
    [[1, 2, 9, 4, 5], 2],
    [[1, 2, 9, 4, 5], 4],
    [[1, 2], 1],
    [[7], 0],
  ]) {
    const report = newReport();
    assert.deepEqual(await run(subject, prompt, { max_tokens: 4 }, report), expected(prompt, 4));
    assert.equal(report.cachedTokens, cached);
  }
});

test('max_tokens and the end of the context are both `length`, told apart', async () => {
  const report = newReport();
  assert.equal((await run(session(), [1, 2], { max_tokens: 7 }, report)).length, 7);
  assert.deepEqual([report.finish, report.contextFull], ['length', false]);
  const full = newReport();
  const subject = session(sum, { contextLength: 10 });
  const ids = await run(subject, [1, 2, 3, 4], {}, full);
  assert.deepEqual(ids, expected([1, 2, 3, 4], 7));
  assert.deepEqual([full.finish, full.contextFull], ['length', true]);
  assert.equal(subject.executor.cache.length, 10, 'nothing is written beyond the cache');
});

test('a prompt that does not fit is refused with the numbers, before any work', async () => {
  const subject = session(sum, { contextLength: 4 });
  await assert.rejects(
    run(subject, [1, 2, 3, 4, 5]),
    (error) => fails('context-too-long')(error) && error.detail.needed === 5 && error.detail.available === 4,
  );
  assert.deepEqual(subject.executor.log, []);
  assert.equal((await run(subject, [1, 2, 3, 4])).length, 1);
});

test('bad prompts are refused', async () => {
  for (const prompt of [[], 'text', [1.5], [-1], [100], [null]]) {
    await assert.rejects(run(session(), prompt), fails('bad-request'));
  }
});

test('one generation at a time', async () => {
  const subject = session();
  const first = subject.run([1], { sampling: checkSampling({}), stopIds: new Set() });
  await first.next();
  await assert.rejects(run(subject, [1]), fails('busy'));
  await first.return();
  assert.equal((await run(subject, [1], { max_tokens: 2 })).length, 2);
});

test('an abort ends the answer without an error, in the prompt or in between, and the cache stays good', async () => {
  const subject = session();
  for (const after of [0, 1, 5]) {
    const control = new AbortController();
    const report = newReport();
    const ids = [];
    if (after === 0) control.abort();
    for await (const id of subject.run(
      [1, 2, 3, 4, 5, 6, 7, 8, 9],
      { sampling: checkSampling({ temperature: 0 }), stopIds: new Set(), signal: control.signal },
      report,
    )) {
      ids.push(id);
      if (ids.length === after) control.abort();
    }
    assert.equal(ids.length, after);
    assert.equal(report.finish, 'abort');
    const next = [1, 2, 3, 4, 5, 6, 7, 8, 9, ...ids, 11];
    assert.deepEqual(await run(subject, next, { max_tokens: 3 }), expected(next, 3));
  }
  const control = new AbortController();
  const prompt = Array.from({ length: 20 }, (_, index) => index);
  await run(subject, prompt, { signal: control.signal, onPrompt: (done) => done >= 8 && control.abort() });
  assert.equal(subject.cached.length, 8);
});

test('a prompt is read in larger pieces where that is quick, and in smaller ones where it is not', async () => {
  const subject = session(sum, { contextLength: 1024, chunk: 512 });
  const prompt = Array.from({ length: 900 }, (_, index) => index % 50);
  const sizes = async () => {
    subject.cached = [];
    subject.executor.log = [];
    await run(subject, prompt, { max_tokens: 1 });
    return subject.executor.log.filter(([kind]) => kind === 'prefill').map(([, count]) => count);
  };
  assert.deepEqual(await sizes(), [128, 256, 512, 4]);
  assert.deepEqual(await sizes(), [512, 388]);
  subject.adaptRead(1000);
  assert.deepEqual(await sizes(), [256, 512, 132]);
  for (let slow = 0; slow < 5; slow++) subject.adaptRead(1000);
  assert.equal(subject.read, 128, 'tiles of the kernels stay full');
});

test('broken numbers are a typed error, not text', async () => {
  const subject = session((ids) => (ids.length > 6 ? INVALID : 20));
  await assert.rejects(run(subject, [1, 2, 3]), fails('numbers-broken'));
  assert.equal(subject.running, false);
});

test('what a failed step left in the cache is not used again', async () => {
  const subject = session((ids) => (ids.length === 9 ? INVALID : sum(ids)));
  await assert.rejects(run(subject, [1, 2, 3]), fails('numbers-broken'));
  assert.deepEqual(subject.cached, []);
});

test('the prompt’s tokens are marked as seen', async () => {
  const subject = session();
  await run(subject, [1, 33], { max_tokens: 1 });
  assert.deepEqual([...subject.executor.seen], [2, 2, 0, 0]);
});

/** A chat on the fake: ids are characters of an alphabet, the template is the text itself. */
function chatOf(answer, contextLength = 64) {
  const ids = [...answer].map((letter) => letter.charCodeAt(0) - 32);
  const subject = session((all) => ids[all.length - 2] ?? 99, { contextLength });
  const tokenizer = {
    prompt: (messages) => [...messages[0].content].map((letter) => letter.charCodeAt(0) - 32),
    stream: () => ({ push: (id) => String.fromCharCode(id + 32), finish: () => '' }),
  };
  return new Chat({ session: subject, tokenizer, model: 'fake', eosIds: [99] });
}
const ASK = { messages: [{ role: 'user', content: 'Hi' }], temperature: 0, seed: 5 };

test('a completion has the shape of other chat APIs', async () => {
  const { id, created, usage, ...rest } = await chatOf('Hello you').completions.create(ASK);
  assert.deepEqual(rest, {
    object: 'chat.completion',
    model: 'fake',
    choices: [{ index: 0, message: { role: 'assistant', content: 'Hello you' }, finish_reason: 'stop' }],
    tercet: { seed: 5, context_used: 12, context_full: false, context_rolls: 0, context_forgotten: 0 },
  });
  assert.match(id, /^chatcmpl-/);
  assert.ok(Math.abs(created - Date.now() / 1000) < 5);
  assert.deepEqual(
    [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.cached_tokens],
    [2, 10, 12, 0],
  );
  for (const name of ['prefill_tokens_per_second', 'decode_tokens_per_second', 'time_to_first_token']) {
    assert.ok(usage[name] > 0, name);
  }
});

test('a stream begins with the role and ends with reason and usage', async () => {
  const chunks = [];
  for await (const chunk of await chatOf('abc').completions.create({ ...ASK, stream: true })) chunks.push(chunk);
  assert.deepEqual(chunks[0].choices, [{ index: 0, delta: { role: 'assistant', content: '' }, finish_reason: null }]);
  assert.equal(chunks.map(({ choices }) => choices[0].delta.content ?? '').join(''), 'abc');
  assert.equal(chunks.at(-1).choices[0].finish_reason, 'stop');
  assert.ok(chunks.at(-1).usage && chunks.slice(0, -1).every((chunk) => !chunk.usage));
});

test('a stop text ends the answer before it, frees the model and keeps the cache', async () => {
  const chat = chatOf('one two three four');
  const { choices, usage } = await chat.completions.create({ ...ASK, stop: ['wo t', 'xx'] });
  assert.deepEqual([choices[0].message.content, choices[0].finish_reason], ['one t', 'stop']);
  assert.equal(usage.completion_tokens, 9);
  assert.equal(chat.session.running, false);
  assert.equal((await chat.completions.create(ASK)).choices[0].message.content, 'one two three four');
});

test('walking away from a stream frees the model', async () => {
  const chat = chatOf('one two three four');
  for await (const chunk of await chat.completions.create({ ...ASK, stream: true }))
    if (chunk.choices[0].delta.role) break;
  assert.equal(chat.session.running, false);
});

test('`length` by max_tokens and by the context', async () => {
  const short = await chatOf('abcdef').completions.create({ ...ASK, max_tokens: 3 });
  assert.deepEqual(
    [short.choices[0].message.content, short.choices[0].finish_reason, short.tercet.context_full],
    ['abc', 'length', false],
  );
  const full = await chatOf('abcdef', 4).completions.create(ASK);
  assert.deepEqual(
    [full.choices[0].message.content, full.choices[0].finish_reason, full.tercet.context_full],
    ['abc', 'length', true],
  );
});

test('a rolling window goes on, and a chunk of the stream says that text was forgotten', async () => {
  const chunks = [];
  const chat = chatOf('abc', 8);
  chat.session.executor.next = (all) => all.at(-1) + 1;
  const request = { ...ASK, max_tokens: 12, contextFull: 'roll', stream: true };
  for await (const chunk of await chat.completions.create(request)) chunks.push(chunk);
  assert.equal(chunks.map(({ choices }) => choices[0].delta.content ?? '').join(''), 'jklmnopqrstu');
  const parts = chunks.map(({ choices: [{ delta, finish_reason: finish }], tercet }) =>
    tercet
      ? [finish, tercet.context_used, tercet.context_full, tercet.context_rolls, tercet.context_forgotten]
      : delta.content,
  );
  // The cache has room for 8, so 9 tokens are 3 too many once 2 are to be free. A mark comes with the token after it.
  assert.deepEqual(parts, [
    [null, 3, false, 0, 0],
    ...['j', 'k', 'l', 'm', 'n', 'o', 'p'],
    [null, 7, false, 1, 3],
    ...['q', 'r', 's'],
    [null, 7, false, 2, 6],
    ...['t', 'u'],
    ['length', 8, false, 2, 6],
  ]);
});

test('guesses are counted in the usage, and change nothing', async () => {
  const texts = [];
  for (const speculation of ['off', 'always']) {
    const chat = chatOf('tick tock tick tock tick tock');
    chat.session.executor.verifies = true;
    const { choices, usage } = await chat.completions.create({ ...ASK, speculation });
    texts.push(choices[0].message.content);
    const counts = [usage.verify_steps, usage.drafted_tokens, usage.accepted_tokens];
    if (speculation === 'off') assert.deepEqual(counts, [0, 0, 0]);
    else assert.ok(counts[0] > 0 && counts[1] > counts[2] && counts[2] >= 8, `${counts}`);
  }
  assert.deepEqual(texts, ['tick tock tick tock tick tock', 'tick tock tick tock tick tock']);
});

test('ways of answering that do not exist are refused by name', async () => {
  for (const [option, value] of [
    ['speculation', 'on'],
    ['speculation', true],
    ['contextFull', 'slide'],
  ]) {
    await assert.rejects(
      chatOf('abc').completions.create({ ...ASK, [option]: value }),
      (error) => fails('bad-request')(error) && error.detail.option === option && error.message.includes(option),
    );
  }
  assert.deepEqual(checkWays({ speculation: null }), { speculation: 'auto', contextFull: 'stop' });
});

test('requests are refused before a stream is returned', async () => {
  const chat = chatOf('abc', 4);
  await assert.rejects(chat.completions.create({ ...ASK, temperature: -1, stream: true }), fails('bad-request'));
  await assert.rejects(
    chat.completions.create({ ...ASK, messages: [{ role: 'user', content: 'too long' }], stream: true }),
    fails('context-too-long'),
  );
  const stream = await chat.completions.create({ ...ASK, stream: true });
  await stream.next();
  await assert.rejects(chat.completions.create(ASK), fails('busy'));
  await stream.return();
});

test('an abort gives the text so far with the reason `abort`', async () => {
  const chat = chatOf('abcdefgh');
  const control = new AbortController();
  let text = '';
  let reason;
  for await (const {
    choices: [{ delta, finish_reason: finish }],
  } of await chat.completions.create({ ...ASK, stream: true, signal: control.signal })) {
    text += delta.content ?? '';
    reason = finish;
    if (text === 'abc') control.abort();
  }
  assert.deepEqual([text, reason], ['abc', 'abort']);
  control.abort();
  const answer = await chat.completions.create({ ...ASK, signal: control.signal });
  assert.deepEqual([answer.choices[0].message.content, answer.choices[0].finish_reason], ['', 'abort']);
});
