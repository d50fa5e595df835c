/** The loop that makes tokens: prompt into the cache, steps ahead of the reader, ids out one by one. */
import { isId, show } from './checks.js';
import { PromptLookup } from './drafts.js';
import { TercetError } from './errors.js';
import { samplingWords, seenBits } from './sampling.js';
import { Speculation, measureCosts } from './speculation.js';
import { Steps } from './steps.js';
import { rolled } from './window.js';

/**
 * @typedef {import('./executor.js').Executor} Executor
 * @typedef {import('./executor.js').Mode} Mode
 * @typedef {import('./sampling.js').Sampling} Sampling
 * @typedef {import('./speculation.js').Costs} Costs
 *
 * What is known of a generation; filled in while it runs.
 * @typedef {object} Report
 * @property {number} beganMs  when, by performance.now()
 * @property {number} promptTokens
 * @property {number} cachedTokens  of the prompt, already in the cache
 * @property {number} tokens  given out
 * @property {number} firstMs  from then to the first token
 * @property {number} lastMs  from then to the last token
 * @property {'stop'|'length'|'abort'|null} finish
 * @property {boolean} contextFull  whether the context was the reason of `length`
 * @property {number} rolls  how often the window moved on because the context was full
 * @property {number} forgotten  tokens that left it
 * @property {number} verifications  steps that verified guesses
 * @property {number} drafted  guesses
 * @property {number} accepted  of them, those that were right
 *
 * @typedef {object} Request
 * @property {Sampling} sampling
 * @property {Set<number>} stopIds
 * @property {import('./ways.js').Ways['speculation']} [speculation]  default `off`
 * @property {import('./ways.js').Ways['contextFull']} [contextFull]  default `stop`
 * @property {AbortSignal} [signal]
 * @property {(done: number, total: number) => void} [onPrompt]  tokens of the prompt that are in the cache
 * @property {(forgotten: number) => void} [onRoll]  the window moves on; tokens that leave it
 */

/** A batch takes about this long, so that text comes smoothly and an abort is quick, in ms. */
const BATCH_MS = 25;
/** A prompt is read so many tokens at once at first, more if that takes less than a quarter of READ_MS. */
const FIRST_READ = 128;
/** A chunk of a prompt takes about this long, so that its progress shows, in ms. */
const READ_MS = 250;
/** The ring of ids must outlast all batches that are on their way. */
const RING_SHARE = 4;

/** @returns {Report} */
export const newReport = () => ({
  beganMs: 0,
  promptTokens: 0,
  cachedTokens: 0,
  tokens: 0,
  firstMs: 0,
  lastMs: 0,
  finish: null,
  contextFull: false,
  rolls: 0,
  forgotten: 0,
  verifications: 0,
  drafted: 0,
  accepted: 0,
});

/** One model's cache and the tokens that are in it. One generation at a time. */
export class Session {
  /**
   * @param {Executor} executor
   * @param {{vocabulary: number, contextLength: number, invalidId: number}} model
   */
  constructor(executor, { vocabulary, contextLength, invalidId }) {
    this.executor = executor;
    this.vocabulary = vocabulary;
    this.contextLength = contextLength;
    this.invalidId = invalidId;
    /** Ids whose keys and values are in the cache, from position 0. @type {number[]} */
    this.cached = [];
    this.running = false;
    /** Steps of the next batch, from how long the last ones took. */
    this.batch = 1;
    /** Tokens of the next chunk of a prompt, likewise. */
    this.read = Math.min(FIRST_READ, executor.chunk);
    /** What steps cost here; null: not known, and nothing is guessed unless it must be. @type {Costs|null} */
    this.costs = null;
    this.drafts = new PromptLookup();
  }

  /**
   * Learn whether guessing can pay on this device. The cache is empty afterwards.
   * @param {{budgetMs?: number}} [options] how long it may take, a step more or less
   */
  async measureCosts(options) {
    const { executor, vocabulary, contextLength } = this;
    this.checkIdle();
    this.running = true;
    this.cached = [];
    try {
      this.costs = executor.verifies ? await measureCosts(executor, { vocabulary, contextLength, ...options }) : null;
    } finally {
      this.running = false;
    }
  }

  /** @throws {TercetError} `busy` */
  checkIdle() {
    if (this.running) throw new TercetError('busy', 'The model is already writing an answer.');
  }

  /**
   * @param {number[]} ids
   * @throws {TercetError} `bad-request`, `context-too-long`
   */
  checkPrompt(ids) {
    if (!Array.isArray(ids) || ids.length === 0) {
      throw new TercetError('bad-request', `The prompt is ${show(ids)}, expected a list of token ids, at least one.`);
    }
    const wrong = ids.find((id) => !isId(id) || id >= this.vocabulary);
    if (wrong !== undefined) {
      throw new TercetError(
        'bad-request',
        `The prompt holds the token id ${show(wrong)}, expected integers below ${this.vocabulary}.`,
      );
    }
    if (ids.length > this.contextLength) {
      throw new TercetError(
        'context-too-long',
        `The prompt has ${ids.length} tokens, the context holds ${this.contextLength}.`,
        {
          detail: { needed: ids.length, available: this.contextLength },
        },
      );
    }
  }

  /**
   * Ids one by one, the one that ends the answer included.
   * @param {number[]} prompt
   * @param {Request} request
   * @param {Report} [report]
   * @returns {AsyncGenerator<number, void, void>}
   */
  async *run(prompt, request, report = newReport()) {
    this.checkPrompt(prompt);
    this.checkIdle();
    this.running = true;
    try {
      yield* this.answer(prompt, request, report);
    } catch (error) {
      // Nobody knows what a step that failed has left there.
      this.cached = [];
      throw error;
    } finally {
      this.running = false;
    }
  }

  /**
   * @param {number[]} prompt
   * @param {Request} request
   * @param {Report} report
   * @returns {AsyncGenerator<number, void, void>}
   */
  async *answer(prompt, request, report) {
    const { executor, contextLength, costs } = this;
    const { sampling, speculation: way = 'off', onRoll } = request;
    const speculation =
      executor.verifies && way !== 'off' && (costs || way === 'always')
        ? new Speculation(way, this.drafts, costs, Math.min(executor.mostVerified, contextLength))
        : null;
    report.beganMs = performance.now();
    report.promptTokens = prompt.length;
    // A roll leaves alone what this sets: the penalty goes on for tokens that are forgotten.
    executor.begin(samplingWords(sampling), seenBits(prompt, this.vocabulary));
    for (let window = [...prompt]; ; ) {
      const tokens = yield* this.fillWindow(window, request, speculation, report);
      if (report.finish) return;
      window = rolled(tokens, contextLength);
      const forgotten = tokens.length - window.length;
      report.rolls += 1;
      report.forgotten += forgotten;
      onRoll?.(forgotten);
    }
  }

  /**
   * Ids until the answer ends, or the context is full. In sampling, the random number of a token depends on the seed
   * and its position in the window, so after a roll the numbers come again, for other text.
   * @param {number[]} window
   * @param {Request} request
   * @param {Speculation|null} speculation
   * @param {Report} report `finish` is set once the answer has ended
   * @returns {AsyncGenerator<number, number[], void>} in the end the tokens: the window's and those that were given
   */
  async *fillWindow(window, { sampling, stopIds, signal, onPrompt, contextFull }, speculation, report) {
    const { maxTokens, temperature } = sampling;
    const mode = temperature > 0 ? 'random' : 'greedy';
    const cached = this.reuse(window);
    if (!report.rolls) report.cachedTokens = cached;
    const first = await this.readPrompt(window, mode, signal, report.rolls ? undefined : onPrompt);
    if (!first) {
      report.finish = 'abort';
      return window;
    }
    const limit = Math.min(maxTokens - report.tokens, this.contextLength - window.length + 1);
    const steps = new Steps(this, window, first[0], { mode, limit, speculation, report });
    const { tokens } = steps;
    try {
      while (tokens.length <= this.contextLength) {
        for (const id of await steps.next()) {
          if (signal?.aborted) {
            report.finish = 'abort';
            return tokens;
          }
          if (id === this.invalidId) throw brokenError(tokens.length);
          steps.take(id);
          const now = performance.now();
          report.tokens += 1;
          report.lastMs = now - report.beganMs;
          if (report.tokens === 1) report.firstMs = report.lastMs;
          const isFull = tokens.length > this.contextLength && contextFull !== 'roll';
          if (stopIds.has(id)) report.finish = 'stop';
          else if (report.tokens === maxTokens || isFull) {
            report.finish = 'length';
            report.contextFull = isFull;
          }
          yield id;
          steps.away += performance.now() - now;
          if (report.finish) return tokens;
        }
      }
      return tokens;
    } finally {
      this.cached = await steps.end();
    }
  }

  /**
   * Keep what the cache has in common with the prompt; at least one token is left to compute.
   * @param {number[]} prompt
   * @returns {number} tokens kept
   */
  reuse(prompt) {
    let common = 0;
    while (common < prompt.length - 1 && this.cached[common] === prompt[common]) common++;
    this.cached.length = common;
    return common;
  }

  /**
   * @param {number[]} prompt
   * @param {Mode} mode
   * @param {AbortSignal} [signal]
   * @param {Request['onPrompt']} [onPrompt]
   * @returns {Promise<Promise<number[]>[]|null>} the first id, once it is read; null if aborted
   */
  async readPrompt(prompt, mode, signal, onPrompt) {
    for (;;) {
      if (signal?.aborted) return null;
      const start = this.cached.length;
      const end = Math.min(start + this.read, prompt.length);
      const isLast = end === prompt.length;
      const began = performance.now();
      const step = await this.executor.prefill(prompt.slice(start, end), start, isLast ? mode : null, signal);
      if (!step) return null;
      if (step.ids) return [step.ids];
      this.cached.push(...prompt.slice(start, end));
      this.adaptRead(performance.now() - began);
      onPrompt?.(end, prompt.length);
    }
  }

  /** @param {number} chunkMs how long the last chunk took */
  adaptRead(chunkMs) {
    const { chunk } = this.executor;
    if (chunkMs < READ_MS / 4) this.read = Math.min(2 * this.read, chunk);
    else if (chunkMs > 2 * READ_MS) this.read = Math.min(chunk, Math.max(FIRST_READ, this.read >> 1));
  }

  /** @param {number} stepMs how long a step of the last batch took */
  adapt(stepMs) {
    const wanted = Math.floor(BATCH_MS / Math.max(stepMs, 0.01));
    this.batch = Math.max(1, Math.min(wanted, this.batch * 2, this.executor.ringSize / RING_SHARE));
  }
}

/** @param {number} position */
function brokenError(position) {
  return new TercetError(
    'numbers-broken',
    `The model's numbers are broken: the greatest logit for token ${position} is NaN or infinite.`,
    { detail: { position } },
  );
}
