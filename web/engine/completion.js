/**
 * Answers in the shape that other chat APIs have.
 *
 * @typedef {object} Usage
 * @property {number} prompt_tokens
 * @property {number} completion_tokens
 * @property {number} total_tokens
 * @property {number} cached_tokens  of the prompt, reused from the turn before
 * @property {number} prefill_tokens_per_second
 * @property {number} decode_tokens_per_second
 * @property {number} time_to_first_token  seconds
 * @property {number} verify_steps  that verified guesses at several tokens
 * @property {number} drafted_tokens  guesses
 * @property {number} accepted_tokens  guesses that were right
 *
 * @typedef {'stop'|'length'|'abort'} FinishReason
 * What other APIs do not have.
 * @typedef {object} Extra
 * @property {number} seed
 * @property {number} context_used  tokens
 * @property {boolean} context_full  it ended the answer
 * @property {number} context_rolls  how often the oldest text has left it during this answer
 * @property {number} context_forgotten  tokens that left it
 *
 * @typedef {object} ChatCompletionChunk
 * @property {string} id
 * @property {'chat.completion.chunk'} object
 * @property {number} created  seconds since 1970
 * @property {string} model
 * @property {{index: 0, delta: {role?: 'assistant', content?: string}, finish_reason: FinishReason|null}[]} choices
 * @property {Usage} [usage]  in the last chunk
 * @property {Extra} [tercet]  in the first and the last chunk, and whenever text has left the context
 *
 * @typedef {object} ChatCompletion
 * @property {string} id
 * @property {'chat.completion'} object
 * @property {number} created
 * @property {string} model
 * @property {{index: 0, message: {role: 'assistant', content: string}, finish_reason: FinishReason}[]} choices
 * @property {Usage} usage
 * @property {Extra} tercet
 */
import { TercetError } from './errors.js';

/**
 * A stream put together.
 * @param {AsyncGenerator<ChatCompletionChunk, void, void>} chunks
 * @returns {Promise<ChatCompletion>}
 */
export async function collect(chunks) {
  let content = '';
  /** @type {ChatCompletionChunk|null} */
  let last = null;
  for await (const chunk of chunks) {
    content += chunk.choices[0].delta.content ?? '';
    last = chunk;
  }
  const finish = last?.choices[0].finish_reason;
  if (!last?.usage || !last.tercet || !finish) {
    throw new TercetError('internal', 'The answer ended without its last part.');
  }
  return {
    id: last.id,
    object: 'chat.completion',
    created: last.created,
    model: last.model,
    choices: [{ index: 0, message: { role: 'assistant', content }, finish_reason: finish }],
    usage: last.usage,
    tercet: last.tercet,
  };
}
