/** Chat completions in the shape that other chat APIs have, on top of Session and ChatTokenizer. */
import { collect } from './completion.js';
import { StopFilter } from './detokenizer.js';
import { newReport } from './generate.js';
import { checkSampling } from './sampling.js';
import { checkWays } from './ways.js';

/**
 * @typedef {import('./tokenizer.js').Message} Message
 * @typedef {import('./tokenizer.js').ChatTokenizer} ChatTokenizer
 * @typedef {import('./generate.js').Session} Session
 * @typedef {import('./generate.js').Report} Report
 * @typedef {import('./sampling.js').Sampling} Sampling
 *
 * @typedef {import('./ways.js').Ways} Ways
 *
 * @typedef {{messages: Message[], stream?: boolean, signal?: AbortSignal} & import('./sampling.js').SamplingRequest
 *   & import('./ways.js').WaysRequest & {continue_final_message?: boolean}} ChatRequest  continue_final_message: the last
 *   message is an answer that goes on
 * @typedef {import('./completion.js').ChatCompletion} ChatCompletion
 * @typedef {import('./completion.js').ChatCompletionChunk} ChatCompletionChunk
 * @typedef {import('./completion.js').FinishReason} FinishReason
 * @typedef {import('./completion.js').Usage} Usage
 */

/** `chat.completions.create` of an engine. */
export class Chat {
  /**
   * @param {{session: Session, tokenizer: ChatTokenizer, model: string, eosIds: number[]}} parts
   */
  constructor({ session, tokenizer, model, eosIds }) {
    this.session = session;
    this.tokenizer = tokenizer;
    this.model = model;
    this.stopIds = new Set(eosIds);
    this.completions = { create: this.create.bind(this) };
  }

  /**
   * @overload
   * @param {ChatRequest & {stream: true}} request
   * @returns {Promise<AsyncGenerator<ChatCompletionChunk, void, void>>}
   */
  /**
   * @overload
   * @param {ChatRequest & {stream?: false}} request
   * @returns {Promise<ChatCompletion>}
   */
  /**
   * Checks the request before it answers: a stream that is returned has begun well.
   * @param {ChatRequest} request
   * @returns {Promise<AsyncGenerator<ChatCompletionChunk, void, void>|ChatCompletion>}
   * @throws {TercetError} `bad-request`, `context-too-long`, `busy`
   */
  async create(request) {
    const began = performance.now();
    const sampling = checkSampling(request ?? {});
    const ways = checkWays(request ?? {});
    const prompt = this.tokenizer.prompt(request?.messages, request?.continue_final_message === true);
    this.session.checkPrompt(prompt);
    this.session.checkIdle();
    const chunks = this.chunks(prompt, sampling, ways, request.signal, began);
    return request.stream ? chunks : collect(chunks);
  }

  /** @param {Message[]} messages @returns {number} tokens of the prompt that these messages become */
  countTokens(messages) {
    return this.tokenizer.prompt(messages).length;
  }

  /**
   * @param {number[]} prompt
   * @param {Sampling} sampling
   * @param {Ways} ways
   * @param {AbortSignal|undefined} signal
   * @param {number} began
   * @returns {AsyncGenerator<ChatCompletionChunk, void, void>}
   */
  async *chunks(prompt, sampling, ways, signal, began) {
    const report = newReport();
    const stops = new StopFilter(sampling.stop);
    const text = this.tokenizer.stream();
    const head = {
      id: `chatcmpl-${crypto.randomUUID()}`,
      object: /** @type {const} */ ('chat.completion.chunk'),
      created: Math.floor(Date.now() / 1000),
      model: this.model,
    };
    /** @type {(delta: {role?: 'assistant', content?: string}, finish?: FinishReason|null) => ChatCompletionChunk} */
    const chunk = (delta, finish = null) => ({ ...head, choices: [{ index: 0, delta, finish_reason: finish }] });
    const extra = () => ({
      seed: sampling.seed,
      context_used: prompt.length + report.tokens - report.forgotten,
      context_full: report.contextFull,
      context_rolls: report.rolls,
      context_forgotten: report.forgotten,
    });

    const ids = this.session.run(prompt, { sampling, ...ways, stopIds: this.stopIds, signal }, report);
    let { rolls } = report;
    try {
      let next = await ids.next();
      yield { ...chunk({ role: 'assistant', content: '' }), tercet: extra() };
      while (!next.done && !stops.stopped) {
        if (report.rolls > rolls) yield { ...chunk({}), tercet: extra() };
        rolls = report.rolls;
        const content = this.stopIds.has(next.value) ? '' : stops.push(text.push(next.value));
        if (content) yield chunk({ content });
        if (!stops.stopped) next = await ids.next();
      }
    } finally {
      // Also when the reader walks away: the model is free again, and its cache is in order.
      await ids.return();
    }
    const rest = stops.push(text.finish()) + stops.finish();
    if (rest) yield chunk({ content: rest });
    const finish = stops.stopped ? 'stop' : (report.finish ?? 'abort');
    yield { ...chunk({}, finish), usage: usageOf(report, began), tercet: extra() };
  }
}

/**
 * @param {Report} report
 * @param {number} began
 * @returns {Usage}
 */
function usageOf(report, began) {
  const { promptTokens, cachedTokens, tokens, firstMs, lastMs, beganMs, verifications, drafted, accepted } = report;
  const rate = (/** @type {number} */ count, /** @type {number} */ ms) =>
    count > 0 && ms > 0 ? (1000 * count) / ms : 0;
  return {
    prompt_tokens: promptTokens,
    completion_tokens: tokens,
    total_tokens: promptTokens + tokens,
    cached_tokens: cachedTokens,
    prefill_tokens_per_second: tokens ? rate(promptTokens - cachedTokens, firstMs) : 0,
    decode_tokens_per_second: rate(tokens - 1, lastMs - firstMs),
    time_to_first_token: tokens ? (beganMs + firstMs - began) / 1000 : 0,
    verify_steps: verifications,
    drafted_tokens: drafted,
    accepted_tokens: accepted,
  };
}
