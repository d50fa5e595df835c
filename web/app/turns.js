/** Asking and answering: each function changes the conversation and then lets the model write. */
import { dropOldest, pendingPrompt } from './context.js';
import { before, endStreaming, newId, patchMessage, questionOf, toPrompt } from './conversation.js';
import { toProblem } from './problems.js';

/** @typedef {import('./types.js').Store} Store */
/** @typedef {import('./types.js').Message} Message */
/** @typedef {import('./types.js').Made} Made */
/** @typedef {import('./types.js').AnswerStatus} AnswerStatus */

/** @type {Record<string, AnswerStatus>} */
const STATUS_OF_FINISH = { stop: 'finished', length: 'length', abort: 'stopped' };

/** Failures after which the engine cannot go on by itself. */
const ENDS_ENGINE = new Set(['device-lost', 'out-of-memory']);

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

  /** @param {Message[]} messages */
  const setMessages = (messages) =>
    store.set({ conversation: { ...store.get().conversation, messages } });
  /** @param {string} id @param {Partial<Message>} change */
  const patch = (id, change) => setMessages(patchMessage(store.get().conversation.messages, id, change));

  const mayAnswer = () => answering === null && session.engine() !== null;

  /** Let the model answer the conversation as it stands. */
  function answer() {
    const engine = session.engine();
    if (engine && !answering) settled = answerWith(engine);
    return settled;
  }

  /** @param {import('/engine/client.js').EngineClient} engine */
  async function answerWith(engine) {
    const controller = new AbortController();
    answering = controller;
    const { settings, conversation } = store.get();
    const id = newId();
    const made = madeWith(store.get());
    setMessages([...conversation.messages, { id, role: 'assistant', content: '', status: 'streaming', made }]);
    const prompt = toPrompt(conversation.messages, settings.systemPrompt);
    store.set({
      turn: { answerId: id, phase: 'reading', promptTokens: store.get().context.used, tokens: 0, tokensPerSecond: null },
      trouble: null,
    });
    try {
      const stream = await engine.chat.completions.create({
        messages: prompt,
        stream: true,
        temperature: made.temperature, top_p: made.topP, top_k: made.topK, min_p: made.minP,
        repetition_penalty: made.repetitionPenalty, seed: made.seed,
        ...(made.maxTokens === null ? {} : { max_tokens: made.maxTokens }),
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
    let content = '';
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
        showContext(chunk.tercet.context_used ?? 0, tokens);
      }
      if (choice?.finish_reason) {
        const full = chunk.tercet?.context_full === true;
        const status = full ? 'context-full' : STATUS_OF_FINISH[choice.finish_reason] ?? 'finished';
        patch(id, { status, made: { ...made, usage: chunk.usage ?? null } });
        if (full) store.set({ trouble: contextFull(store.get()) });
      }
    }
  }

  /**
   * The engine's own count. The page's may be older than what was sent.
   * @param {number} used tokens
   * @param {number} answered tokens, of them
   */
  function showContext(used, answered) {
    const { turn } = store.get();
    if (turn && used) store.set({ turn: { ...turn, promptTokens: used - answered }, context: { used } });
  }

  /** @param {number} tokens @param {number} ms since the first one */
  function showPace(tokens, ms) {
    const { turn } = store.get();
    if (!turn) return;
    // The first token marks the start of the clock, so it is not counted in the pace.
    const tokensPerSecond = tokens > 1 && ms > 0 ? ((tokens - 1) * 1000) / ms : null;
    const used = turn.promptTokens + tokens;
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
    if (ENDS_ENGINE.has(problem.code)) {
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
    const { conversation, settings, engine: { info } } = store.get();
    if (!engine || !info || answering) return;
    const { messages, used } = await dropOldest(
      conversation.messages, settings.systemPrompt, info.contextLength, (prompt) => engine.countTokens(prompt));
    setMessages(messages);
    store.set({ context: { used } });
    if (used >= info.contextLength) {
      store.set({ trouble: tooLongAlone(messages, used, info.contextLength) });
      return;
    }
    store.set({ trouble: null });
    if (messages.at(-1)?.role === 'user') await answer();
  }

  return {
    recount,
    dropOldestMessages,
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

/** @param {import('./types.js').State} state @returns {Made} */
function madeWith({ settings, engine }) {
  const { systemPrompt, temperature, topP, topK, minP, repetitionPenalty, maxTokens } = settings;
  return {
    model: engine.info?.name ?? '', contextLength: engine.info?.contextLength ?? 0, kvCache: engine.info?.kvCache ?? '',
    systemPrompt, temperature, topP, topK, minP, repetitionPenalty, maxTokens,
    seed: settings.seed ?? crypto.getRandomValues(new Uint32Array(1))[0], usage: null,
  };
}

/** @param {import('./types.js').State} state @returns {import('./types.js').Problem} */
function contextFull({ engine }) {
  const total = engine.info?.contextLength ?? 0;
  return {
    code: 'context-too-long', detail: { available: total },
    message: `The answer was cut off because all ${total.toLocaleString('en')} tokens of the context are used.`,
    action: 'Begin a new chat, or go on without the oldest messages.',
  };
}

/**
 * @param {Message[]} messages
 * @param {number} needed tokens
 * @param {number} available tokens
 * @returns {import('./types.js').Problem}
 */
function tooLongAlone(messages, needed, available) {
  const what = messages.at(-1)?.role === 'user' ? 'question alone has' : 'question and its answer alone have';
  return {
    code: 'context-too-long', detail: { needed, available },
    message: `The last ${what} ${needed.toLocaleString('en')} tokens; the context holds `
      + `${available.toLocaleString('en')}.`,
    action: 'Shorten the question (Edit and send again), or load the model with a larger context.',
  };
}
