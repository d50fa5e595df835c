/** Asking and answering: each function changes the conversation and then lets the model write. */
import { contextFullProblem, madeWith, requestOptions, tooLongAlone, usageOfParts } from './answers.js';
import { pendingPrompt } from './context.js';
import { before, endStreaming, newId, patchMessage, questionOf, toPrompt } from './conversation.js';
import { endsEngine, toProblem } from './problems.js';
import { createRoom } from './room.js';

/** @typedef {import('./types.js').Store} Store */
/** @typedef {import('./types.js').Message} Message */
/** @typedef {import('./types.js').Made} Made */
/** @typedef {import('./types.js').AnswerStatus} AnswerStatus */

/** @type {Record<string, AnswerStatus>} */
const STATUS_OF_FINISH = { stop: 'finished', length: 'length', abort: 'stopped' };

/**
 * @param {Store} store
 * @param {ReturnType<typeof import('./session.js').createSession>} session
 */
export function createTurns(store, session) {
  /** @type {AbortController|null} */
  let answering = null;
  /** @type {Promise<void>} the end of the answer under way */
  let settled = Promise.resolve();
  let counting = 0;
  const room = createRoom(store);

  /** @param {Message[]} messages */
  const setMessages = (messages) =>
    store.set({ conversation: { ...store.get().conversation, messages } });
  /** @param {string} id @param {Partial<Message>} change */
  const patch = (id, change) => setMessages(patchMessage(store.get().conversation.messages, id, change));

  const mayAnswer = () => answering === null && session.engine() !== null && store.get().measure.status !== 'running';

  /**
   * Let the model answer the conversation as it stands.
   * @param {Message} [begun] go on with this answer, the last message
   */
  function answer(begun) {
    const engine = session.engine();
    if (engine && mayAnswer()) settled = answerWith(engine, begun);
    return settled;
  }

  /**
   * @param {import('/engine/client.js').EngineClient} engine
   * @param {Message} [begun]
   */
  async function answerWith(engine, begun) {
    const controller = new AbortController();
    answering = controller;
    const id = begun?.id ?? newId();
    const made = begun?.made ?? madeWith(store.get());
    const { messages } = store.get().conversation;
    if (begun) patch(id, { status: 'streaming' });
    else setMessages([...messages, { id, role: 'assistant', content: '', status: 'streaming', made }]);
    store.set({
      turn: { answerId: id, phase: 'reading', promptTokens: store.get().context.used, tokens: 0, tokensPerSecond: null,
        from: begun?.content.length ?? 0, rolls: 0 },
      trouble: null,
    });
    try {
      const { settings } = store.get();
      const kept = settings.contextFull === 'roll' ? await room.makeWhenFull(engine, messages) : messages;
      if (answering !== controller) return;
      const stream = await engine.chat.completions.create({
        messages: toPrompt(kept, settings.systemPrompt),
        stream: true,
        ...requestOptions(made, settings, Boolean(begun)),
        signal: controller.signal,
      });
      await write(id, made, stream, controller);
    } catch (error) {
      if (answering === controller) stumble(id, error);
    } finally {
      if (answering === controller) endTurn();
    }
  }

  function endTurn() {
    answering = null;
    store.set({ turn: null });
    void recount();
  }

  /** The engine is gone, and with it whoever would have ended the answer. */
  function cutOff() {
    const { turn, conversation: { messages } } = store.get();
    if (!turn) return;
    const begun = messages.find((message) => message.id === turn.answerId)?.content;
    if (begun) patch(turn.answerId, { status: 'interrupted' });
    else setMessages(messages.filter((message) => message.id !== turn.answerId));
    endTurn();
  }

  /**
   * Take the chunks as they come.
   * @param {string} id
   * @param {Made} made
   * @param {AsyncIterable<import('./types.js').Chunk>} stream
   * @param {AbortController} mine
   */
  async function write(id, made, stream, mine) {
    let content = store.get().conversation.messages.find((message) => message.id === id)?.content ?? '';
    let tokens = 0;
    let firstAt = 0;
    for await (const chunk of stream) {
      if (answering !== mine) return;
      const [choice] = chunk.choices;
      const piece = choice?.delta.content ?? '';
      if (piece) {
        content += piece;
        tokens += 1;
        firstAt ||= performance.now();
        patch(id, { content });
        showPace(tokens, performance.now() - firstAt);
      }
      if (chunk.tercet) {
        made = { ...made, seed: chunk.tercet.seed ?? made.seed };
        showContext(chunk.tercet, tokens);
      }
      if (choice?.finish_reason) finish(id, made, chunk, choice.finish_reason);
    }
  }

  /**
   * @param {string} id
   * @param {Made} made
   * @param {import('./types.js').Chunk} chunk the last one
   * @param {string} reason
   */
  function finish(id, made, { usage, tercet }, reason) {
    const full = tercet?.context_full === true;
    const rolls = (made.rolls ?? 0) + (tercet?.context_rolls ?? 0);
    patch(id, {
      status: full ? 'context-full' : STATUS_OF_FINISH[reason] ?? 'finished',
      made: { ...made, usage: usageOfParts(made.usage, usage ?? null), ...(rolls ? { rolls } : {}) },
    });
    if (full) store.set({ trouble: contextFullProblem(room.total()) });
  }

  /**
   * The engine's own count. The page's may be older than what was sent.
   * @param {NonNullable<import('./types.js').Chunk['tercet']>} extra
   * @param {number} answered tokens of the answer so far
   */
  function showContext({ context_used: used = 0, context_rolls: rolls = 0 }, answered) {
    const { turn } = store.get();
    if (!turn) return;
    if (used) store.set({ turn: { ...turn, promptTokens: used - answered, rolls }, context: { used } });
    const engine = session.engine();
    // The engine's window has moved on: show what it does not see any more.
    if (!engine || rolls <= turn.rolls) return;
    void room.make(engine, store.get().conversation.messages, used).then(recount, () => undefined);
  }

  /** @param {number} tokens @param {number} ms since the first one */
  function showPace(tokens, ms) {
    const { turn } = store.get();
    if (!turn) return;
    // The first token marks the start of the clock, so it is not counted in the pace.
    const tokensPerSecond = tokens > 1 && ms > 0 ? ((tokens - 1) * 1000) / ms : null;
    const used = Math.min(turn.promptTokens + tokens, room.total());
    store.set({ turn: { ...turn, phase: 'answering', tokens, tokensPerSecond }, context: { used } });
  }

  /**
   * The answer did not come, or not whole.
   * @param {string} id
   * @param {unknown} error
   */
  function stumble(id, error) {
    const problem = toProblem(error);
    const { messages } = store.get().conversation;
    const begun = messages.find((message) => message.id === id)?.content;
    if (problem.code === 'aborted') {
      patch(id, { status: 'stopped' });
      return;
    }
    if (endsEngine(problem)) {
      session.lose(problem);
      return;
    }
    if (begun) patch(id, { status: 'failed' });
    else setMessages(messages.filter((message) => message.id !== id));
    store.set({ trouble: problem, lastProblem: problem });
  }

  /** Count what the model would be given now, for the meter. Late answers are ignored. */
  async function recount() {
    const engine = session.engine();
    const prompt = pendingPrompt(store.get());
    const mine = ++counting;
    try {
      const used = engine && prompt ? await engine.countTokens(prompt) : 0;
      if (mine === counting && !answering) store.set({ context: { used } });
    } catch {
      // A meter that cannot count keeps its last value; the engine itself checks the length.
    }
  }

  /** Make room, then answer the question that waits, if one does. */
  async function dropOldestMessages() {
    const engine = session.engine();
    if (!engine || !mayAnswer()) return;
    const { messages, used } = await room.make(engine, store.get().conversation.messages);
    store.set({ context: { used } });
    if (used >= room.total()) {
      store.set({ trouble: tooLongAlone(messages, used, room.total()) });
      return;
    }
    store.set({ trouble: null });
    if (messages.at(-1)?.role === 'user') await answer();
  }

  /** With a rolling window: write on where the full context cut the answer off, or answer what was too long. */
  function goOn() {
    const last = store.get().conversation.messages.at(-1);
    if (last?.role === 'user') void answer();
    else if (last?.status === 'context-full') void answer(last);
  }

  return {
    recount,
    dropOldestMessages,
    goOn,
    stop: () => answering?.abort(),
    isAnswering: () => answering !== null,
    cutOff,
    settled: () => settled,
    /** @param {string} text @returns {boolean} whether it was sent */
    ask(text) {
      const content = text.trim();
      if (!content || !mayAnswer()) return false;
      const { messages } = store.get().conversation;
      store.set({ conversation: { messages: [...messages, { id: newId(), role: 'user', content }], draft: '' } });
      void answer();
      return true;
    },
    /** Answer the last question again. */
    regenerate() {
      const last = store.get().conversation.messages.at(-1);
      if (!last || !mayAnswer()) return;
      if (last.role === 'assistant') {
        if (!questionOf(store.get().conversation.messages, last.id)) return;
        setMessages(before(store.get().conversation.messages, last.id));
      }
      void answer();
    },
    /** @param {string} id @param {string} text */
    editAndResend(id, text) {
      const content = text.trim();
      if (!content || !mayAnswer()) return;
      const earlier = before(store.get().conversation.messages, id);
      setMessages([...earlier, { id: newId(), role: 'user', content }]);
      store.set({ editing: null });
      void answer();
    },
    newChat() {
      answering?.abort();
      const { messages } = store.get().conversation;
      store.set({
        conversation: { messages: [], draft: '' },
        previous: messages.length ? endStreaming(messages, 'stopped') : store.get().previous,
        context: { used: 0 }, trouble: null, editing: null,
      });
    },
    bringBack() {
      const { previous, conversation } = store.get();
      if (previous) store.set({ conversation: { ...conversation, messages: previous }, previous: null });
      void recount();
    },
  };
}
