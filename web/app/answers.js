/** What an answer is asked for with, and what the page says when the context ends it. Plain data, no state. */
import { formatCount } from './format.js';

/** @typedef {import('./types.js').Made} Made */
/** @typedef {import('./types.js').Message} Message */
/** @typedef {import('./types.js').Problem} Problem */
/** @typedef {import('./types.js').Settings} Settings */
/** @typedef {import('./types.js').State} State */
/** @typedef {import('./types.js').Usage} Usage */

/** @param {State} state @returns {Made} */
export function madeWith({ settings, engine }) {
  const { systemPrompt, temperature, topP, topK, minP, repetitionPenalty, maxTokens } = settings;
  return {
    model: engine.info?.name ?? '', contextLength: engine.info?.contextLength ?? 0, kvCache: engine.info?.kvCache ?? '',
    systemPrompt, temperature, topP, topK, minP, repetitionPenalty, maxTokens,
    seed: settings.seed ?? crypto.getRandomValues(new Uint32Array(1))[0], usage: null,
  };
}

/**
 * Options of a request.
 * @param {Made} made
 * @param {Settings} settings
 * @param {boolean} goesOn the last message is an answer that is to be continued
 */
export const requestOptions = (made, { contextFull, speculation }, goesOn) => ({
  temperature: made.temperature, top_p: made.topP, top_k: made.topK, min_p: made.minP,
  repetition_penalty: made.repetitionPenalty, seed: made.seed,
  ...(made.maxTokens === null ? {} : { max_tokens: made.maxTokens }),
  contextFull, speculation,
  ...(goesOn ? { continue_final_message: true } : {}),
});

/**
 * An answer that went on was made in two parts: its words are counted together, its pace is that of the last part.
 * @param {Usage|null} before
 * @param {Usage|null} last
 * @returns {Usage|null}
 */
export function usageOfParts(before, last) {
  if (!before || !last) return last ?? before;
  const completion = before.completion_tokens + last.completion_tokens;
  return { ...last, completion_tokens: completion, total_tokens: before.prompt_tokens + completion };
}

/**
 * @param {number} total tokens
 * @returns {Problem}
 */
export const contextFullProblem = (total) => ({
  code: 'context-too-long', detail: { available: total },
  message: `The answer was cut off because all ${formatCount(total)} tokens of the context are used.`,
  action: 'With a rolling window the model goes on and no longer sees the oldest text. '
    + 'Or begin a new chat, or go on without the oldest messages.',
});

/**
 * @param {Message[]} messages
 * @param {number} needed tokens
 * @param {number} available tokens
 * @returns {Problem}
 */
export function tooLongAlone(messages, needed, available) {
  const what = messages.at(-1)?.role === 'user' ? 'question alone has' : 'question and its answer alone have';
  return {
    code: 'context-too-long', detail: { needed, available, alone: true },
    message: `The last ${what} ${formatCount(needed)} tokens; the context holds ${formatCount(available)}.`,
    action: 'Shorten the question (Edit and send again), or load the model with a larger context.',
  };
}
