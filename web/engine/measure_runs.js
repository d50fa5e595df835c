/** Times the model itself: decode behind a full cache, prompts, and the processor's part, all on random tokens. */
import { throwIfAborted } from './errors.js';
import { newReport } from './generate.js';
import { median, spread } from './measure_timing.js';
import { checkSampling, samplingWords, seenBits } from './sampling.js';

/** @typedef {import('./generate.js').Session} Session */
/** @typedef {import('./measure.js').Sizes} Sizes */

/** Tokens of the run that comes before the timed ones. */
const WARM_TOKENS = 32;
/** A timing of decode takes about this long, where fewer tokens than wanted do. */
const DECODE_SECONDS = 0.5;
const LEAST_TOKENS = 16;
const CPU_STEPS = 16;

export class Runs {
  /**
   * @param {Session} session
   * @param {Sizes} sizes
   * @param {AbortSignal} [signal]
   */
  constructor(session, sizes, signal) {
    this.session = session;
    this.sizes = sizes;
    this.signal = signal;
    this.seed = 1;
  }

  /** Never the same twice, so that nothing of it is in the cache. @param {number} count */
  prompt(count) {
    const { vocabulary } = this.session;
    return Array.from({ length: count }, () => {
      this.seed = (Math.imul(this.seed, 1664525) + 1013904223) >>> 0;
      return Math.floor((this.seed / 2 ** 32) * vocabulary);
    });
  }

  /**
   * @param {number[]} prompt
   * @param {number} tokens
   */
  async run(prompt, tokens) {
    const report = newReport();
    const request = {
      sampling: checkSampling({ temperature: 0, max_tokens: tokens }),
      stopIds: new Set(),
      signal: this.signal,
    };
    for await (const id of this.session.run(prompt, request, report)) void id;
    throwIfAborted(this.signal);
    return report;
  }

  /**
   * Several timings, but not for longer than the budget.
   * @param {() => Promise<number>} timing
   */
  async repeated(timing) {
    const end = performance.now() + 1000 * this.sizes.budget;
    const found = [await timing()];
    while (found.length < this.sizes.repeats && performance.now() < end) found.push(await timing());
    return found;
  }

  /**
   * @param {number} context tokens that are in the cache before
   * @returns {Promise<{context: number, tokensPerSecond: number, spread: number}>}
   */
  async decode(context) {
    const prompt = this.prompt(context);
    /** @param {number} count */
    const rate = async (count) => {
      const { tokens, firstMs, lastMs } = await this.run(prompt, count);
      return (1000 * (tokens - 1)) / (lastMs - firstMs);
    };
    let { tokens } = this.sizes;
    if (this.sizes.repeats > 1) {
      // Fills the cache, and gets the batches of steps to their size.
      const wanted = DECODE_SECONDS * (await rate(Math.min(WARM_TOKENS, tokens)));
      tokens = Math.min(tokens, Math.max(LEAST_TOKENS, Math.ceil(wanted)));
    }
    const rates = await this.repeated(() => rate(tokens));
    return { context, tokensPerSecond: median(rates), spread: spread(rates) };
  }

  /** @param {number} tokens @returns {Promise<number>} seconds to the first token of an answer */
  async prefill(tokens) {
    const seconds = async () => (await this.run(this.prompt(tokens), 1)).firstMs / 1000;
    // The first one warms up: pipelines of this size are used for the first time.
    if (this.sizes.repeats > 1) await seconds();
    return median(await this.repeated(seconds));
  }

  /** @returns {Promise<number>} ms that the processor takes to record and submit a token */
  async cpu() {
    const { executor, vocabulary, contextLength } = this.session;
    const steps = Math.min(CPU_STEPS, this.sizes.tokens, Math.max(1, contextLength - 2));
    executor.begin(samplingWords(checkSampling({ temperature: 0, seed: 0 })), seenBits([], vocabulary));
    const first = await executor.prefill(this.prompt(1), 0, 'greedy', this.signal);
    await first?.ids;
    const times = [];
    for (let chosen = 1; times.length < this.sizes.repeats && chosen + steps < contextLength; chosen += steps) {
      throwIfAborted(this.signal);
      const began = performance.now();
      const ids = executor.decode('greedy', steps, chosen, chosen);
      times.push((performance.now() - began) / steps);
      await ids;
    }
    return median(times);
  }
}
