/** Where a person writes: the message, send or stop, and one line about the context and the memory. */
import { button, h, isSendKey, setAttr, setText } from './dom.js';
import { contextLevel } from './context.js';
import { formatBytes, formatCount, formatRate } from './format.js';
import { icon } from './icons.js';

/** @typedef {import('./types.js').State} State */
/** @typedef {import('./actions.js').Actions} Actions */

const TALLEST_PX = 220;
const TALLEST_SHARE = 0.3;

/**
 * @param {Actions} actions
 * @returns {{element: HTMLElement, render: (state: State) => void, focus: () => void}}
 */
export function createComposer(actions) {
  const area = h('textarea', { id: 'message', rows: '1', placeholder: 'Message', 'aria-describedby': 'message-hint',
    enterkeyhint: 'send', autocomplete: 'off' });
  const send = h('button',
    { type: 'submit', class: 'primary round', 'aria-label': 'Send', title: 'Send (Enter)' }, icon('send'));
  const stop = button(
    { icon: icon('stop'), text: 'Stop (Esc)', iconOnly: true, class: 'primary round', onclick: actions.stop });
  const warning = createWarning(actions);
  const status = createStatus();
  const form = h('form', { class: 'composer', onsubmit: (/** @type {Event} */ event) => {
    event.preventDefault();
    submit();
  } },
  h('label', { class: 'visually-hidden', for: 'message' }, 'Message'),
  h('p', { class: 'visually-hidden', id: 'message-hint' },
    'Enter sends, Shift and Enter begin a new line, Escape stops an answer.'),
  area, send, stop);
  const element = h('div', { class: 'column' }, warning.element, form, status.element);

  function submit() {
    actions.ask(area.value);
    area.focus();
  }
  function fit() {
    area.style.height = 'auto';
    area.style.height = `${Math.min(TALLEST_PX, TALLEST_SHARE * innerHeight, area.scrollHeight)}px`;
  }
  area.addEventListener('keydown', (event) => {
    if (!isSendKey(event)) return;
    event.preventDefault();
    submit();
  });
  area.addEventListener('input', () => {
    actions.setDraft(area.value);
    fit();
  });

  /** @param {State} state */
  function render(state) {
    const { engine, conversation, turn } = state;
    element.hidden = state.screen !== 'chat';
    if (element.hidden) return;
    if (area.value !== conversation.draft) {
      area.value = conversation.draft;
      fit();
    }
    const ready = engine.status === 'ready';
    const measuring = state.measure.status === 'running';
    setAttr(area, 'placeholder', measuring ? 'Write while this device is measured'
      : engine.status === 'loading' ? 'Write while the model loads' : 'Message');
    send.disabled = !ready || measuring || conversation.draft.trim() === '';
    send.hidden = turn !== null;
    stop.hidden = turn === null;
    warning.render(state);
    status.render(state);
  }
  return { element, render, focus: () => area.focus() };
}

/**
 * Said before the context is full.
 * @param {Actions} actions
 */
function createWarning(actions) {
  const text = h('span', {});
  const drop = button({ text: 'Continue without the oldest messages', class: 'link', onclick: actions.dropOldest });
  const roll = button({ text: 'Use a rolling window', class: 'link', onclick: actions.roll });
  const element = h('div', { class: 'warning', hidden: true, role: 'status' }, text, roll,
    button({ text: 'New chat', class: 'link', onclick: actions.newChat }), drop);

  /** @param {State} state */
  function render({ engine, context, turn, trouble, conversation, settings }) {
    const total = engine.info?.contextLength ?? 0;
    const level = total ? contextLevel(context.used, total) : 'ok';
    element.hidden = level === 'ok' || turn !== null || trouble !== null;
    if (element.hidden) return;
    const left = Math.max(0, total - context.used);
    const rolls = settings.contextFull === 'roll';
    const words = level === 'near'
      ? `The context is nearly full: room for about ${formatCount(left)} more tokens of questions and answers.`
      : `The context is full: this would take ${formatCount(context.used)} of ${formatCount(total)} tokens.`;
    setText(text, rolls ? `${words} The oldest text will leave it, and the model goes on.` : words);
    roll.hidden = rolls;
    drop.hidden = rolls || conversation.messages.filter(({ role, dropped }) => role === 'user' && !dropped).length < 2;
  }
  return { element, render };
}

function createStatus() {
  const place = h('span', { class: 'place' });
  const bytes = h('b', {});
  const memory = h('span', { class: 'memory' }, bytes, h('span', {}, ' of GPU memory'));
  const pace = h('span', { class: 'pace' });
  const fill = h('span', { class: 'fill' });
  const meter = h('span', { class: 'meter', role: 'meter', 'aria-label': 'Context used', 'aria-valuemin': '0' }, fill);
  const tokens = h('span', {});
  const context = h('span', { class: 'context' }, meter, tokens);
  const element = h('div', { class: 'status' }, place, memory, pace, context);

  /** @param {State} state */
  function render({ engine, turn, context: use, conversation, canStore }) {
    const { info } = engine;
    setText(place, canStore ? 'On this machine, nothing is sent' : 'On this machine, nothing is sent or kept');
    for (const part of [memory, pace, context]) part.hidden = !info;
    if (!info) return;
    setText(bytes, formatBytes(info.weightsBytes + info.kvBytes + info.workBytes));
    const last = conversation.messages.at(-1)?.made?.usage?.decode_tokens_per_second;
    const rate = turn ? turn.tokensPerSecond : last;
    pace.hidden = !rate;
    setText(pace, rate ? formatRate(rate) : '');
    const used = Math.min(use.used, info.contextLength);
    const words = `${formatCount(use.used)} of ${formatCount(info.contextLength)} tokens`;
    setText(tokens, words);
    setAttr(meter, 'aria-valuemax', info.contextLength);
    setAttr(meter, 'aria-valuenow', used);
    setAttr(meter, 'aria-valuetext', words);
    fill.style.width = `${(100 * used) / info.contextLength}%`;
    meter.dataset.level = contextLevel(use.used, info.contextLength);
  }
  return { element, render };
}
