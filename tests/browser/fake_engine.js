/**
 * A stand-in for /engine/client.js with a script instead of a GPU, so that a test can bring the page into any state.
 *
 * The script is `window.fakeScript`, set before the page loads:
 *   support   what support() gives, on top of a device that can do everything
 *   plans     {url: fields of the plan, or {error}}
 *   stored    {url: bytes that are in the browser already}
 *   load      {hold: phase to wait in until window.fake.release(), error: {at: phase, code, message, …}}
 *   replies   one for each answer, the last one again and again:
 *             {text, everyMs, hold: pieces before waiting, finish, contextFull, error: {after: pieces, code, …},
 *              refuse: an error before the first piece}
 * `window.fake` has `calls` (what the page asked for), `release()` and `lose(message)`.
 */
import { TercetError } from '/engine/errors.js';

const script = globalThis.fakeScript ?? {};
const MEGA = 1e6;
const DOWNLOAD = 42.1 * MEGA;
const SPEED = 12.3 * MEGA;
const PHASES = [['plan', 1, 'bytes'], ['download', DOWNLOAD, 'bytes'], ['expand', 210, 'tensors'],
  ['compile', 23, 'kernels'], ['check', 23, 'kernels'], ['ready', 1, 'kernels']];

const fake = { calls: [], release: () => {}, lose: () => {}, answers: 0 };
globalThis.fake = fake;

const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const fail = ({ code, message, action, detail }) => new TercetError(code, message, { action, detail });
const storedKey = (url) => `fake.stored ${url}`;
const readStored = (url) => Number(sessionStorage.getItem(storedKey(url)) ?? script.stored?.[url] ?? 0);

/** Until the test lets go, or the page gives up. */
const held = (signal) => new Promise((resolve) => {
  fake.release = resolve;
  signal?.addEventListener('abort', resolve, { once: true });
});

export class EngineClient {
  static async support() {
    return {
      webgpu: true, code: null, message: null,
      adapter: { vendor: 'acme', architecture: 'road-9', device: '', description: 'Acme Road 9' },
      limits: { maxBufferSize: 1073741824, maxStorageBufferBindingSize: 1073741824 },
      features: ['subgroups'],
      ...script.support,
    };
  }

  static async plan(url, { contextLength, kvCache }) {
    const { error, ...given } = script.plans?.[url] ?? {};
    if (error) throw fail(error);
    const kvBytesPerToken = { f16: 23040, f32: 46080, q8: 12240 }[kvCache];
    const plan = {
      name: 'A model', downloadBytes: DOWNLOAD, weightsBytes: 61.4 * MEGA, workBytes: 9.2 * MEGA, kvBytesPerToken,
      contextLength, maxContextLength: 8192, fits: true, problems: [], ...given, storedBytes: readStored(url),
    };
    plan.kvBytes = plan.kvBytesPerToken * plan.contextLength;
    plan.totalBytes = plan.weightsBytes + plan.kvBytes + plan.workBytes;
    return plan;
  }

  static async load(url, options) {
    const { contextLength, kvCache, signal, onProgress } = options;
    fake.calls.push({ call: 'load', url, contextLength, kvCache });
    const { hold, error } = script.load ?? {};
    const stored = readStored(url);
    for (const [phase, total, unit] of PHASES) {
      for (const loaded of [0, total / 2, total]) {
        if (signal?.aborted) throw new TercetError('aborted', 'The load was cancelled.');
        const pace = phase === 'download'
          ? { bytesPerSecond: SPEED, secondsLeft: (total - loaded) / SPEED, stored } : {};
        onProgress({ phase, loaded: Math.round(loaded), total, unit, ...pace });
        if (phase === 'download') sessionStorage.setItem(storedKey(url), String(Math.max(stored, loaded)));
        if (loaded === total / 2 && error?.at === phase) throw fail(error);
        if (loaded === total / 2 && hold === phase) await held(signal);
        await wait(1);
      }
    }
    const plan = await EngineClient.plan(url, { contextLength, kvCache });
    return new EngineClient({ ...plan, url, kvCache });
  }

  static stored = async (url) => readStored(url);

  static async remove(url) {
    fake.calls.push({ call: 'remove', url });
    sessionStorage.setItem(storedKey(url), '0');
  }

  constructor({ url, kvCache, contextLength, maxContextLength, weightsBytes, kvBytes, workBytes }) {
    this.info = {
      url, kvCache, contextLength, maxContextLength, weightsBytes, kvBytes, workBytes,
      name: url.includes('large') ? 'Large 2B' : 'Small chat model 135M', license: 'apache-2.0', parameters: 134515008,
      activations: 'a8', bitsPerWeight: 2.61, grade: null, eosIds: [2],
      adapter: { vendor: 'acme', architecture: 'road-9', device: '', description: 'Acme Road 9' },
      kernels: ['linear_ternary', 'attention'],
    };
    this.lost = new Promise((resolve) => {
      fake.lose = (message = 'The driver was reset.') => {
        this.gone = true;
        resolve({ code: 'device-lost', message });
      };
    });
    this.chat = { completions: { create: (request) => this.create(request) } };
  }

  /** Four characters a token and four tokens around each message: close enough for a meter. */
  async countTokens(messages) {
    return messages.reduce((sum, { content }) => sum + 4 + Math.ceil(content.length / 4), 0);
  }

  async create({ signal, ...request }) {
    fake.calls.push({ call: 'create', ...structuredClone(request) });
    const replies = script.replies ?? [{ text: 'The capital of France is Paris.' }];
    const reply = replies[Math.min(fake.answers, replies.length - 1)];
    fake.answers += 1;
    if (reply.refuse) throw fail(reply.refuse);
    const promptTokens = await this.countTokens(request.messages);
    if (promptTokens >= this.info.contextLength) {
      throw new TercetError('context-too-long',
        `The prompt has ${promptTokens} tokens, the context holds ${this.info.contextLength}.`,
        { detail: { needed: promptTokens, available: this.info.contextLength } });
    }
    return this.stream(reply, request, promptTokens, signal);
  }

  async* stream(reply, request, promptTokens, signal) {
    const pieces = reply.text.match(/\s*\S+|\s+$/g) ?? [];
    const piece = (delta, finish_reason = null, more = {}) => ({
      id: 'chatcmpl-1', object: 'chat.completion.chunk', created: 0, model: this.info.name,
      choices: [{ index: 0, delta, finish_reason }], ...more,
    });
    let done = 0;
    yield piece({ role: 'assistant', content: '' }, null, {
      tercet: { seed: request.seed, context_used: promptTokens, context_full: false },
    });
    for (const content of pieces) {
      if (reply.error?.after === done) throw fail(reply.error);
      if (reply.hold === done) await held(signal);
      await wait(reply.everyMs ?? 2);
      // The contract: an abort ends the stream, it is no error.
      if (signal?.aborted || this.gone) break;
      yield piece({ content });
      done += 1;
    }
    if (this.gone) throw new TercetError('device-lost', 'The driver was reset.');
    const finish = signal?.aborted ? 'abort' : reply.finish ?? 'stop';
    yield piece({}, finish, {
      usage: {
        prompt_tokens: promptTokens, completion_tokens: done, total_tokens: promptTokens + done, cached_tokens: 0,
        prefill_tokens_per_second: 412.3, decode_tokens_per_second: 38.24, time_to_first_token: 0.214,
      },
      tercet: { seed: request.seed, context_used: promptTokens + done, context_full: reply.contextFull === true },
    });
  }

  async dispose() {
    fake.calls.push({ call: 'dispose' });
  }
}
