/** The conversation, the empty state, a load on its way, and what went wrong. */
import { button, h, setText } from './dom.js';
import { createBrokenStamp, gradeWords, isBroken } from './grade.js';
import { loweredWords } from './largest_context.js';
import { createLoading } from './loading_view.js';
import { createMessage } from './message_view.js';
import { createNotice, reloadWith } from './notice_view.js';
import { whereItRuns } from './platform.js';

/** @typedef {import('./types.js').State} State */
/** @typedef {import('./types.js').Problem} Problem */
/** @typedef {import('./actions.js').Actions} Actions */

export const EXAMPLES = [
  'What is the capital of France?',
  'What is photosynthesis?',
  'Write a Python function that adds two numbers.',
];

/**
 * @param {Actions} actions
 * @returns {{element: HTMLElement, render: (state: State) => void}}
 */
export function createChat(actions) {
  const title = h('h1', { class: 'visually-hidden' });
  const empty = createEmpty(actions);
  const list = h('ol', { class: 'messages', 'aria-label': 'Conversation' });
  const unanswered = h('div', { class: 'unanswered', hidden: true }, h('span', {}, 'This question has no answer yet.'),
    button({ text: 'Answer it', onclick: actions.regenerate }));
  const loading = createLoading(actions);
  const notice = createNotice(() => actions.togglePanel('details', true));
  const element = h('div', { class: 'chat' }, title, empty.element, list, unanswered, loading.element, notice.element);
  /** @type {Map<string, ReturnType<typeof createMessage>>} */
  const views = new Map();

  /** @param {State} state */
  function renderMessages(state) {
    const { messages } = state.conversation;
    const ids = new Set(messages.map((message) => message.id));
    for (const [id, view] of views) {
      if (ids.has(id)) continue;
      view.element.remove();
      views.delete(id);
    }
    messages.forEach((message, index) => {
      let view = views.get(message.id);
      if (!view) {
        view = createMessage(message, actions);
        views.set(message.id, view);
      }
      if (list.children[index] !== view.element) list.insertBefore(view.element, list.children[index] ?? null);
      view.render(message, {
        last: index === messages.length - 1,
        lastDropped: Boolean(message.dropped) && !messages[index + 1]?.dropped,
        mayAct: state.engine.status === 'ready' && !state.turn && state.measure.status !== 'running',
        editing: state.editing === message.id,
        turn: state.turn?.answerId === message.id ? state.turn : null,
      });
    });
  }

  /** @param {State} state */
  function render(state) {
    const { engine, conversation, turn, trouble } = state;
    element.hidden = state.screen !== 'chat';
    if (element.hidden) return;
    setText(title, engine.info ? `Conversation with ${engine.info.name}` : 'Conversation');
    list.hidden = conversation.messages.length === 0;
    empty.render(state);
    renderMessages(state);
    unanswered.hidden = !(engine.status === 'ready' && !turn && !trouble && !state.editing
      && state.measure.status !== 'running'
      && conversation.messages.at(-1)?.role === 'user');
    loading.render(state);
    const kept = conversation.messages.length > 0;
    if (engine.problem) notice.show(engine.problem, engineOffers(state, actions), kept);
    else if (trouble) notice.show(trouble, troubleOffers(state, actions), false);
    else notice.show(null, {});
  }
  return { element, render };
}

/**
 * @param {State} state
 * @param {Actions} actions
 * @returns {import('./notice_view.js').Offers}
 */
function engineOffers({ engine }, actions) {
  const smaller = engine.proposedContext;
  return {
    retry: { run: actions.reload },
    reload: { run: actions.reload, ...(smaller ? { text: 'Reload as it was' } : {}) },
    choose: { run: actions.showModels },
    ...(smaller ? { 'smaller-context': { text: reloadWith(smaller), run: () => actions.reloadWith(smaller) } } : {}),
  };
}

/**
 * @param {State} state
 * @param {Actions} actions
 * @returns {import('./notice_view.js').Offers}
 */
function troubleOffers({ engine, conversation, trouble }, actions) {
  const { contextLength = 0, maxContextLength = 0 } = engine.info ?? {};
  // A context that was lowered is the largest that this device holds.
  const larger = engine.lowered ? 0 : Math.min(maxContextLength, contextLength * 2);
  const questions = conversation.messages.filter(({ role, dropped }) => role === 'user' && !dropped).length;
  return {
    retry: { run: actions.regenerate },
    reload: { run: actions.reload },
    'new-chat': { run: actions.newChat },
    ...(trouble?.detail.alone ? {} : { roll: { run: actions.roll } }),
    ...(questions > 1 ? { 'drop-oldest': { run: actions.dropOldest } } : {}),
    ...(larger > contextLength
      ? { 'larger-context': { text: reloadWith(larger), run: () => actions.reloadWith(larger) } } : {}),
  };
}

/**
 * @param {Actions} actions
 */
function createEmpty(actions) {
  const name = h('h2', {});
  const where = h('span', {});
  const promise = h('span', {});
  const quality = h('p', { class: 'muted' });
  const lowered = h('p', { class: 'muted' });
  const broken = createBrokenStamp();
  const examples = h('ul', { class: 'examples', 'aria-label': 'Examples' }, ...EXAMPLES.map((text) =>
    h('li', {}, button({ text, class: 'example', onclick: () => actions.ask(text) }))));
  const none = h('div', { class: 'actions' },
    button({ text: 'Choose a model', class: 'primary', onclick: actions.showModels }));
  const previous = button({ text: 'Bring back the previous chat', class: 'quiet', onclick: actions.bringBack });
  const element = h('section', { class: 'empty' },
    name, h('p', { class: 'where' }, where, promise), broken, quality, lowered, examples, none, previous);

  /** @param {State} state */
  function render({ engine, conversation, previous: put, support }) {
    const { info } = engine;
    element.hidden = conversation.messages.length > 0 || engine.status === 'loading' || Boolean(engine.problem);
    if (element.hidden) return;
    setText(name, info ? info.name : 'No model is loaded');
    setText(where, info ? `It runs ${whereItRuns(info.adapter ?? support?.adapter)}.` : 'Choose one to begin.');
    setText(promise, info ? 'Nothing you write is sent anywhere.' : '');
    setText(quality, info
      ? `Quality: ${gradeWords(info.grade)}. Small models make mistakes; check what matters.` : '');
    broken.hidden = !isBroken(info?.grade ?? null);
    setText(lowered, engine.lowered ? loweredWords(engine.lowered) : '');
    lowered.hidden = engine.lowered === null;
    examples.hidden = !info;
    none.hidden = Boolean(info);
    previous.hidden = !put;
  }
  return { element, render };
}
