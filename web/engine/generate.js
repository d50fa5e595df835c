/** The loop that makes tokens: prompt into the cache, steps ahead of the reader, ids out one by one. */
import { isId, show } from './checks.js';
import { TercetError } from './errors.js';
import { samplingWords, seenBits } from './sampling.js';

/**
 * @typedef {import('./executor.js').Executor} Executor
 * @typedef {import('./sampling.js').Sampling} Sampling
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
 *
 * @typedef {object} Request
 * @property {Sampling} sampling
 * @property {Set<number>} stopIds
 * @property {AbortSignal} [signal]
 * @property {(done: number, total: number) => void} [onPrompt]  tokens of the prompt that are in the cache
 */

/** Batches of steps that are on the GPU at a time: one computes while another is read. */
const DEPTH = 2;
/** A batch takes about this long, so that text comes smoothly and an abort is quick, in ms. */
const BATCH_MS = 25;
const MAX_BATCH = 32;
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
      yield* this.answer([...prompt], request, report);
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
  async *answer(prompt, { sampling, stopIds, signal, onPrompt }, report) {
    const { executor } = this;
    const began = performance.now();
    report.beganMs = began;
    const mode = sampling.temperature > 0 ? 'random' : 'greedy';
    const room = this.contextLength - prompt.length + 1;
    const limit = Math.min(sampling.maxTokens, room);
    executor.begin(samplingWords(sampling), seenBits(prompt, this.vocabulary));
    report.promptTokens = prompt.length;
    report.cachedTokens = this.reuse(prompt);

    const first = await this.readPrompt(prompt, mode, signal, onPrompt);
    if (!first) {
      report.finish = 'abort';
      return;
    }
    /** @type {{ids: Promise<number[]>, steps: number}[]} */
    const pending = [];
    let submitted = 0;
    /** @type {(ids: Promise<number[]>, steps: number) => void} */
    const enqueue = (ids, steps) => {
      // Failures are seen when the batch is read; until then they must not count as unhandled.
      ids.catch(() => undefined);
      pending.push({ ids, steps });
      submitted += steps;
    };
    enqueue(first[0], 1);
    /** @type {number[]} */
    const given = [];
    let resolved = performance.now();
    try {
      while (pending.length) {
        while (pending.length < DEPTH && submitted < limit) {
          const steps = Math.min(this.batch, limit - submitted);
          enqueue(executor.decode(mode, steps, submitted), steps);
        }
        const ids = await pending[0].ids;
        const now = performance.now();
        if (given.length) this.adapt((now - resolved) / pending[0].steps);
        pending.shift();
        resolved = now;
        for (const id of ids) {
          if (signal?.aborted) {
            report.finish = 'abort';
            return;
          }
          if (id === this.invalidId) throw brokenError(prompt.length + given.length);
          given.push(id);
          report.tokens = given.length;
          report.lastMs = performance.now() - began;
          if (given.length === 1) report.firstMs = report.lastMs;
          if (stopIds.has(id)) report.finish = 'stop';
          else if (given.length === limit) {
            report.finish = 'length';
            report.contextFull = limit === room;
          }
          yield id;
          if (report.finish) return;
        }
      }
    } finally {
      await Promise.allSettled(pending.map((batch) => batch.ids));
      // The last chosen token has its place in the cache only if a later step was submitted.
      this.cached = [...prompt, ...given.slice(0, submitted - 1)];
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
   * @param {import('./executor.js').Mode} mode
   * @param {AbortSignal} [signal]
   * @param {Request['onPrompt']} [onPrompt]
   * @returns {Promise<Promise<number[]>[]|null>} the first id, once it is read; null if aborted
   */
  async readPrompt(prompt, mode, signal, onPrompt) {
    for (;;) {
      if (signal?.aborted) return null;
      const start = this.cached.length;
      const end = Math.min(start + this.executor.chunk, prompt.length);
      const isLast = end === prompt.length;
      const step = await this.executor.prefill(prompt.slice(start, end), start, isLast ? mode : null, signal);
      if (!step) return null;
      if (step.ids) return [step.ids];
      this.cached.push(...prompt.slice(start, end));
      onPrompt?.(end, prompt.length);
    }
  }

  /** @param {number} stepMs how long a step of the last batch took */
  adapt(stepMs) {
    const wanted = Math.floor(BATCH_MS / Math.max(stepMs, 0.01));
    this.batch = Math.max(1, Math.min(wanted, this.batch * 2, MAX_BATCH, this.executor.ringSize / RING_SHARE));
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
