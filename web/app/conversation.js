/** The conversation as plain data, and what of it the model is given. Nothing here changes its arguments. */
import { load, save } from './storage.js';

/** @typedef {import('./types.js').Conversation} Conversation */
/** @typedef {import('./types.js').Message} Message */

/** @type {Readonly<Conversation>} */
export const EMPTY = Object.freeze({ messages: [], draft: '' });

/** @returns {string} */
export const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(2)), (n) => n.toString(36)).join('');

/**
 * @param {Message[]} messages
 * @param {string} id
 * @param {Partial<Message>} patch
 * @returns {Message[]} the same array if there is no such message
 */
export function patchMessage(messages, id, patch) {
  if (!messages.some((message) => message.id === id)) return messages;
  return messages.map((message) => (message.id === id ? { ...message, ...patch } : message));
}

/**
 * The messages before this one.
 * @param {Message[]} messages
 * @param {string} id
 * @returns {Message[]}
 */
export function before(messages, id) {
  const index = messages.findIndex((message) => message.id === id);
  return index < 0 ? messages : messages.slice(0, index);
}

/**
 * The question that an answer belongs to.
 * @param {Message[]} messages
 * @param {string} answerId
 * @returns {Message|null}
 */
export function questionOf(messages, answerId) {
  const earlier = before(messages, answerId);
  return earlier.findLast((message) => message.role === 'user') ?? null;
}

/**
 * What is sent to the model: without dropped messages, unread beginnings and empty answers. Chat templates want the
 * roles to take turns, so two questions in a row (the first one's answer never came) become one.
 * @param {Message[]} messages
 * @param {string} systemPrompt
 * @returns {{role: 'system'|'user'|'assistant', content: string}[]}
 */
export function toPrompt(messages, systemPrompt) {
  /** @type {{role: 'system'|'user'|'assistant', content: string}[]} */
  const prompt = [];
  if (systemPrompt.trim()) prompt.push({ role: 'system', content: systemPrompt });
  for (const { role, content: whole, unread = 0, dropped } of messages) {
    const content = whole.slice(unread);
    if (dropped || content === '') continue;
    const last = prompt.at(-1);
    if (last?.role === role) last.content += `\n\n${content}`;
    else prompt.push({ role, content });
  }
  return prompt;
}

/**
 * @param {Message[]} messages
 * @param {import('./types.js').AnswerStatus} status of an answer that nobody goes on writing
 * @returns {Message[]}
 */
export const endStreaming = (messages, status) =>
  messages.map((message) => (message.status === 'streaming' ? { ...message, status } : message));

/**
 * Mark everything before message `index` as no longer sent.
 * @param {Message[]} messages
 * @param {number} index
 * @returns {Message[]}
 */
export const dropBefore = (messages, index) =>
  messages.map((message, i) => (i < index ? { ...message, dropped: true } : message));

/**
 * @param {unknown} value
 * @returns {value is Message}
 */
function isMessage(value) {
  if (typeof value !== 'object' || value === null) return false;
  const { id, role, content } = /** @type {Record<string, unknown>} */ (value);
  return typeof id === 'string' && (role === 'user' || role === 'assistant') && typeof content === 'string';
}

/**
 * A conversation from anything. An answer that was being written when the page closed is marked as cut off.
 * @param {unknown} stored
 * @returns {Conversation}
 */
export function sanitizeConversation(stored) {
  const given = /** @type {Record<string, unknown>} */ (typeof stored === 'object' && stored ? stored : {});
  const messages = Array.isArray(given.messages) ? given.messages.filter(isMessage) : [];
  return {
    messages: endStreaming(messages, 'interrupted'),
    draft: typeof given.draft === 'string' ? given.draft : '',
  };
}

/** @returns {Conversation} */
export const loadConversation = () => sanitizeConversation(load('conversation'));

/** @param {Conversation} conversation @returns {boolean} whether it was kept */
export const saveConversation = (conversation) => save('conversation', conversation);
