/**
 * A stand-in for /engine/client.js with a script instead of a GPU, so that a test can bring the page into any state.
 *
 * The script is `window.fakeScript`, set before the page loads:
 *   support   what support() gives, on top of a device that can do everything
 *   plans     {url: fields of the plan, or {error}; largest: the longest context that fits}
 *   stored    {url: bytes that are in the browser already}
 *   load      {hold: phase to wait in until window.fake.release(), error: {at: phase, code, message, …}}
 *   replies   one for each answer, the last one again and again:
 *             {text, everyMs, hold: pieces before waiting, finish, contextFull, error: {after: pieces, code, …},
 *              fullAfter: pieces when the context is full: the end, or with a rolling window a roll,
 *              refuse: an error before the first piece}
 *   measure   {hold: number of the step to wait in, error: {at: step, code, …}, report: fields of the report}
 * `window.fake` has `calls` (what the page asked for), `release()` and `lose(message)`.
 */
import { TercetError } from '/engine/errors.js';

const script = globalThis.fakeScript ?? {};
const MEGA = 1e6;
const DOWNLOAD = 42.1 * MEGA;
const SPEED = 12.3 * MEGA;
const PHASES = [['plan', 1, 'bytes'], ['download', DOWNLOAD, 'bytes'], ['expand', 210, 'tensors'],
  ['compile', 23, 'kernels'], ['check', 23, 'kernels'], ['ready', 1, 'kernels']];

const MEASURED = ['reading memory', 'the matrix qkv, 960 x 576', 'writing after 128 tokens', 'reading 512 tokens'];
const linear = (name, rows, columns, encoding, seconds, share) => ({
  name, rows, columns, encoding, bytes: 312e9 * share * seconds, seconds, share, dependentSeconds: 1.2 * seconds,
  batchTokens: 4, batchSeconds: 1.3 * seconds,
});
const ADAPTER = { vendor: 'acme', architecture: 'road-9', device: '', description: 'Acme Road 9' };
const REPORT = {
  date: '2026-12-02T16:20:00Z', adapter: ADAPTER,
  model: {
    name: 'Small chat model 135M', parameters: 134515008, contextLength: 4096, kvCache: 'f16', activations: 'a8',
  },
  bandwidth: { bytesPerSecond: 312.4e9, bufferBytes: 268435456 },
  linears: [
    linear('qkv', 960, 576, 'ternary', 3.1e-6, 0.412), linear('gate_up', 3072, 576, 'ternary', 4.25e-6, 0.613),
    linear('layers.0.feed_forward.down', 576, 1536, 'ternary', 2.0e-6, 0.55),
    linear('embedding', 49152, 576, 'q8', 0.1234e-3, 0.781),
  ],
  decode: [
    { context: 128, tokensPerSecond: 96.04, spread: 0.02 }, { context: 1024, tokensPerSecond: 88.2, spread: 0.01 },
    { context: 4096, tokensPerSecond: 61.7, spread: 0.03 },
  ],
  prefill: [{ tokens: 128, tokensPerSecond: 1203.4 }, { tokens: 512, tokensPerSecond: 4811.9 }],
  firstTokenSeconds: 0.0412, loadSeconds: 1.93, dispatchesPerToken: 304, dispatchesPerLayer: 10, cpuMsPerToken: 0.0831,
  limit: { bytesPerToken: 1.7356e9, tokensPerSecond: 180.3, ratio: 0.5327 }, peers: [],
};

const fake = { calls: [], release: () => {}, lose: () => {}, answers: 0 };
globalThis.fake = fake;

const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const fail = ({ code, message, action, detail }) => new TercetError(code, message, { action, detail });
const storedKey = (url) => `fake.stored ${url}`;
const readStored = (url) => Number(sessionStorage.getItem(storedKey(url)) ?? script.stored?.[url] ?? 0);

const tooLarge = (context, largest) => ({
  code: 'limit-too-small', needed: 384 * context, available: 384 * largest,
  message: `a cache of ${context} tokens (at most ${largest} fit) needs more than this GPU allows.`,
});

/** Until the test lets go, or the page gives up. */
const held = (signal) => new Promise((resolve) => {
  fake.release = resolve;
  signal?.addEventListener('abort', resolve, { once: true });
});

export class EngineClient {
  static async support() {
    return {
      webgpu: true, code: null, message: null,
      adapter: ADAPTER,
      limits: { maxBufferSize: 1073741824, maxStorageBufferBindingSize: 1073741824 },
      features: ['subgroups'],
      ...script.support,
    };
  }

  static async plan(url, { contextLength, kvCache }) {
    const { error, largest = Infinity, ...given } = script.plans?.[url] ?? {};
    if (error) throw fail(error);
    const kvBytesPerToken = { f16: 23040, f32: 46080, q8: 12240 }[kvCache];
    const plan = {
      name: 'A model', downloadBytes: DOWNLOAD, weightsBytes: 61.4 * MEGA, workBytes: 9.2 * MEGA, kvBytesPerToken,
      contextLength, maxContextLength: 8192, fits: true, problems: [], ...given, storedBytes: readStored(url),
    };
    if (contextLength > largest) Object.assign(plan, { fits: false, problems: [tooLarge(contextLength, largest)] });
    plan.kvBytes = plan.kvBytesPerToken * plan.contextLength;
    plan.totalBytes = plan.weightsBytes + plan.kvBytes + plan.workBytes;
    return plan;
  }

  static async load(url, options) {
    const { contextLength, kvCache, kernels, signal, onProgress } = options;
    fake.calls.push({ call: 'load', url, contextLength, kvCache, ...(kernels === undefined ? {} : { kernels }) });
    const { largest } = script.plans?.[url] ?? {};
    if (contextLength > largest) throw fail(tooLarge(contextLength, largest));
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
      activations: 'a8', bitsPerWeight: 2.61, grade: script.grade ?? null, eosIds: [2],
      adapter: script.support?.adapter ?? ADAPTER,
      kernels: ['linear_ternary', 'attention'],
      tuning: {
        kernels: { 'linear_ternary 960x576': { ROWS: 32 } }, remembered: 0, timed: 1, measureMs: 41.3, compileMs: 120,
      },
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
    const rolls = request.contextFull === 'roll';
    const window = Math.floor(0.75 * this.info.contextLength);
    let used = promptTokens;
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
      used += 1;
      if (done !== reply.fullAfter) continue;
      if (!rolls) break;
      used = window;
      yield piece({}, null, { tercet: { context_used: used, context_full: false, context_rolls: 1 } });
    }
    const isFull = reply.fullAfter !== undefined && done >= reply.fullAfter;
    if (this.gone) throw new TercetError('device-lost', 'The driver was reset.');
    const finish = signal?.aborted ? 'abort' : reply.finish ?? (isFull && !rolls ? 'length' : 'stop');
    yield piece({}, finish, {
      usage: {
        prompt_tokens: promptTokens, completion_tokens: done, total_tokens: promptTokens + done, cached_tokens: 0,
        prefill_tokens_per_second: 412.3, decode_tokens_per_second: 38.24, time_to_first_token: 0.214,
      },
      tercet: {
        seed: request.seed, context_used: used,
        context_full: reply.contextFull === true || (isFull && !rolls), context_rolls: isFull && rolls ? 1 : 0,
      },
    });
  }

  async measure({ onProgress, signal, quick }) {
    fake.calls.push({ call: 'measure', quick });
    const { hold, error, report } = script.measure ?? {};
    for (const [done, label] of MEASURED.entries()) {
      onProgress({ done, total: MEASURED.length, label });
      if (hold === done) await held(signal);
      await wait(2);
      if (signal?.aborted) throw new TercetError('aborted', 'Stopped on request.');
      if (this.gone) throw new TercetError('device-lost', 'The driver was reset.');
      if (error?.at === done) throw fail(error);
    }
    return { ...REPORT, ...report };
  }

  async dispose() {
    fake.calls.push({ call: 'dispose' });
  }
}
