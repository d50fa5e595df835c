/** How full the context is, and how to make room in it. */
import { dropBefore, toPrompt } from './conversation.js';

/** @typedef {import('./types.js').Message} Message */
/** @typedef {import('./types.js').State} State */

/** From this share on the page says that the context will be full. */
const NEARLY = 0.8;
/** Fewer tokens than this leave no room for an answer. */
const SMALLEST_ANSWER = 16;
/** After dropping the oldest messages, at least this share is free for what comes. */
const FREE_AFTER_DROP = 0.4;

/**
 * @param {number} used tokens
 * @param {number} total tokens
 * @returns {'ok'|'near'|'full'}
 */
export function contextLevel(used, total) {
  if (total - used < SMALLEST_ANSWER) return 'full';
  return used >= NEARLY * total ? 'near' : 'ok';
}

/**
 * The prompt as it would be sent now, with what is typed so far; null when there is nothing to send.
 * @param {State} state
 * @returns {{role: string, content: string}[]|null}
 */
export function pendingPrompt({ conversation, settings }) {
  const draft = conversation.draft.trim();
  /** @type {Message[]} */
  const messages = draft
    ? [...conversation.messages, { id: 'draft', role: 'user', content: draft }] : conversation.messages;
  return messages.some((message) => !message.dropped) ? toPrompt(messages, settings.systemPrompt) : null;
}

/**
 * Drop whole turns from the oldest on, until enough of the context is free. The last question always stays.
 * @param {Message[]} messages
 * @param {string} systemPrompt
 * @param {number} total tokens
 * @param {(prompt: {role: string, content: string}[]) => Promise<number>} count tokens of a prompt
 * @returns {Promise<{messages: Message[], used: number}>}
 */
export async function dropOldest(messages, systemPrompt, total, count) {
  const questions = messages.flatMap((message, index) => (message.role === 'user' && !message.dropped ? [index] : []));
  let kept = messages;
  let used = 0;
  for (const start of questions.slice(questions.length > 1 ? 1 : 0)) {
    kept = dropBefore(messages, start);
    used = await count(toPrompt(kept, systemPrompt));
    if (used <= (1 - FREE_AFTER_DROP) * total) break;
  }
  return { messages: kept, used };
}
