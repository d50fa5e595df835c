/** How full the context is, and how to make room in it. */
import { dropBefore, patchMessage, toPrompt } from './conversation.js';

/** @typedef {import('./types.js').Message} Message */
/** @typedef {import('./types.js').State} State */
/** Tokens of a prompt. @typedef {(prompt: {role: string, content: string}[]) => Promise<number>} Count */

/** From this share on the page says that the context will be full. */
const NEARLY = 0.8;
/** Fewer tokens than this leave no room for an answer. */
const SMALLEST_ANSWER = 16;
/** After the oldest text has gone, at least this share is free for what comes. */
const FREE_AFTER_DROP = 0.4;
/** The most of an answer that one step of shortening keeps: it must get shorter. */
const SHORTEN_TO = 0.9;
/** Scripts without spaces are cut anywhere. */
const LONGEST_WORD = 40;

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
 * Let the oldest text go until no more than `most` tokens are left: whole turns, and of an answer that is too long by
 * itself its beginning. The last question always stays.
 * @param {Message[]} messages
 * @param {string} systemPrompt
 * @param {number} total tokens
 * @param {Count} count
 * @param {number} [most] tokens
 * @returns {Promise<{messages: Message[], used: number}>}
 */
export async function makeRoom(messages, systemPrompt, total, count, most = (1 - FREE_AFTER_DROP) * total) {
  const questions = messages.flatMap((message, index) => (message.role === 'user' && !message.dropped ? [index] : []));
  let kept = messages;
  let used = 0;
  for (const start of questions.slice(questions.length > 1 ? 1 : 0)) {
    kept = dropBefore(messages, start);
    used = await count(toPrompt(kept, systemPrompt));
    if (used <= most) break;
  }
  const last = kept.at(-1);
  if (last?.role !== 'assistant' || contextLevel(used, total) === 'ok') return { messages: kept, used };
  return shortenAnswer(kept, last, used, most, (list) => count(toPrompt(list, systemPrompt)));
}

/**
 * @param {Message[]} messages
 * @param {Message} answer the last of them
 * @param {number} used tokens
 * @param {number} most tokens
 * @param {(messages: Message[]) => Promise<number>} count
 */
async function shortenAnswer(messages, answer, used, most, count) {
  const { id, content } = answer;
  let unread = answer.unread ?? 0;
  let kept = messages;
  while (used > most && unread < content.length) {
    const keep = Math.floor((content.length - unread) * Math.min(SHORTEN_TO, most / used));
    unread = wordAfter(content, content.length - keep);
    kept = patchMessage(kept, id, { unread });
    used = await count(kept);
  }
  return { messages: kept, used };
}

/** The next beginning of a word, so that none is cut in two. @param {string} text @param {number} from */
function wordAfter(text, from) {
  const gap = text.slice(from, from + LONGEST_WORD).search(/\s/);
  return from + Math.max(0, gap);
}

/**
 * What has left the context, as it was found for these messages, put on the conversation as it is now.
 * @param {Message[]} now
 * @param {Message[]} found
 * @returns {Message[]}
 */
export function forget(now, found) {
  const marks = new Map(found.map(({ id, dropped, unread }) => [id, { dropped, unread }]));
  return now.map((message) => {
    const mark = marks.get(message.id);
    const same = !mark || (mark.dropped === message.dropped && mark.unread === message.unread);
    return same ? message : { ...message, ...mark };
  });
}
