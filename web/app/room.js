/** Room in the context of the loaded model: what has to leave it is found with the engine and marked as left. */
import { contextLevel, forget, makeRoom } from './context.js';
import { tooLongAlone } from './answers.js';
import { toPrompt } from './conversation.js';

/** @typedef {import('./types.js').Store} Store */
/** @typedef {import('./types.js').Message} Message */
/** @typedef {import('/engine/client.js').EngineClient} Engine */

/** @param {Store} store */
export function createRoom(store) {
  const total = () => store.get().engine.info?.contextLength ?? 0;

  /**
   * @param {Engine} engine
   * @param {Message[]} messages
   * @param {number} [most] tokens that stay, at most
   * @returns {Promise<{messages: Message[], used: number}>} tokens
   */
  async function make(engine, messages, most) {
    const { systemPrompt } = store.get().settings;
    const room = await makeRoom(messages, systemPrompt, total(), (prompt) => engine.countTokens(prompt), most);
    const { conversation } = store.get();
    store.set({ conversation: { ...conversation, messages: forget(conversation.messages, room.messages) } });
    return room;
  }

  /**
   * With a rolling window nothing is too long but a question that is so by itself.
   * @param {Engine} engine
   * @param {Message[]} messages
   * @returns {Promise<Message[]>} with what has left the context marked
   * @throws {import('./types.js').Problem} `context-too-long`
   */
  async function makeWhenFull(engine, messages) {
    const prompt = toPrompt(messages, store.get().settings.systemPrompt);
    if (contextLevel(await engine.countTokens(prompt), total()) !== 'full') return messages;
    const room = await make(engine, messages);
    if (room.used >= total()) throw tooLongAlone(messages, room.used, total());
    return room.messages;
  }

  return { make, makeWhenFull, total };
}
