/** One message: a question or an answer, with what can be done with it. */
import { button, h, isSendKey, setText } from './dom.js';
import { copyText } from './clipboard.js';
import { formatRate, plural } from './format.js';
import { icon } from './icons.js';
import { createMade } from './made_view.js';
import { createMarkdown } from './markdown.js';

/** @typedef {import('./types.js').Message} Message */
/** @typedef {import('./types.js').Turn} Turn */
/** @typedef {import('./actions.js').Actions} Actions */
/** @typedef {{last: boolean, lastDropped: boolean, mayAct: boolean, editing: boolean, turn: Turn|null}} Around */

/** @type {Record<import('./types.js').AnswerStatus, string>} */
const ENDINGS = {
  streaming: '',
  finished: '',
  stopped: 'Stopped',
  length: 'Ended at the longest answer of the settings',
  'context-full': 'Cut off: the context is full',
  interrupted: 'Cut off before its end',
  failed: 'Cut off by an error',
};

/**
 * @param {Message} message
 * @param {Actions} actions
 */
export function createMessage(message, actions) {
  const view = message.role === 'user' ? createQuestion(message, actions) : createAnswer(message, actions);
  const divider = h('p', { class: 'divider' }, 'The model no longer sees the messages above.');
  const element = h('li', { class: `message ${message.role}` }, view.element);
  /** @type {Message|null} */
  let shown = null;
  let shownAround = '';
  return {
    element,
    /** @param {Message} now @param {Around} around */
    render(now, around) {
      const key = JSON.stringify(around);
      if (now === shown && key === shownAround) return;
      shown = now;
      shownAround = key;
      element.classList.toggle('dropped', Boolean(now.dropped));
      if (around.lastDropped) element.append(divider);
      else divider.remove();
      view.render(now, around);
    },
  };
}

/**
 * @param {Message} message
 * @param {Actions} actions
 */
function createQuestion(message, actions) {
  const text = h('div', { class: 'bubble' }, message.content);
  const edit = button({ icon: icon('edit'), text: 'Edit and send again', iconOnly: true, class: 'quiet',
    onclick: () => actions.edit(message.id) });
  const copy = button({ icon: icon('copy'), text: 'Copy the question', iconOnly: true, class: 'quiet' });
  copy.addEventListener('click', () => copyText(message.content, copy));
  const read = h('div', { class: 'read' }, h('div', { class: 'tools' }, copy, edit), text);
  const element = h('div', {}, h('h2', { class: 'visually-hidden' }, 'You'), read);
  /** @type {HTMLFormElement|null} */
  let form = null;

  /** @param {Message} _ @param {Around} around */
  function render(_, { mayAct, editing }) {
    edit.disabled = !mayAct;
    read.hidden = editing;
    if (editing && !form) {
      form = createEditor(message, actions);
      element.append(form);
      const area = form.querySelector('textarea');
      area?.focus();
      area?.setSelectionRange(area.value.length, area.value.length);
    } else if (!editing && form) {
      const hadFocus = form.contains(document.activeElement);
      form.remove();
      form = null;
      if (hadFocus) edit.focus();
    }
  }
  return { element, render };
}

/**
 * @param {Message} message
 * @param {Actions} actions
 */
function createEditor(message, actions) {
  const id = `edit-${message.id}`;
  const rows = Math.min(12, message.content.split('\n').length + 1);
  const area = h('textarea', { id, rows, 'aria-describedby': `${id}-hint` });
  area.value = message.content;
  const send = () => actions.editAndResend(message.id, area.value);
  area.addEventListener('keydown', (event) => {
    if (!isSendKey(event)) return;
    event.preventDefault();
    send();
  });
  return h('form', { class: 'editor', onsubmit: (/** @type {Event} */ event) => {
    event.preventDefault();
    send();
  } },
  h('label', { class: 'visually-hidden', for: id }, 'Edit the question'), area,
  h('div', { class: 'actions' },
    h('button', { type: 'submit', class: 'primary' }, 'Send again'),
    button({ text: 'Cancel', onclick: () => actions.edit(null) }),
    h('p', { class: 'muted', id: `${id}-hint` }, 'Everything after this question is replaced.')));
}

/**
 * @param {Message} message
 * @param {Actions} actions
 */
function createAnswer(message, actions) {
  const heading = h('h2', { class: 'visually-hidden' }, message.made?.model || 'Answer');
  const cut = h('p', { class: 'divider', hidden: true }, 'The model no longer sees the beginning of this answer.');
  const text = h('div', { class: 'prose' });
  const markdown = createMarkdown(text);
  const ending = h('span', { class: 'ending' });
  const copy = button({ icon: icon('copy'), text: 'Copy', class: 'quiet' });
  const again = button({ icon: icon('again'), text: 'Regenerate', class: 'quiet', onclick: actions.regenerate });
  const made = createMade(actions);
  // The row has its height from the first word on, so that nothing moves when the answer ends.
  const row = h('div', { class: 'row' }, copy, again, made.summary, ending);
  const element = h('div', {}, heading, cut, text, row, made.element);
  let content = message.content;
  copy.addEventListener('click', () => copyText(content, copy));

  /** @param {Message} now @param {Around} around */
  function render(now, { last, mayAct, turn }) {
    content = now.content;
    markdown(now.content);
    cut.hidden = !now.unread || Boolean(now.dropped);
    const writing = now.status === 'streaming';
    copy.hidden = writing || !content;
    again.hidden = writing || !last;
    again.disabled = !mayAct;
    made.render(writing ? null : now.made ?? null);
    setText(ending, writing ? pace(turn) : emptyOr(now));
  }
  return { element, render };
}

/** @param {Message} message */
function emptyOr({ content, status = 'finished' }) {
  if (content || status !== 'finished') return ENDINGS[status];
  return 'The model ended its answer without a word';
}

/** @param {Turn|null} turn */
function pace(turn) {
  if (!turn || turn.phase === 'reading') return 'Reading';
  const { tokens, tokensPerSecond, rolls } = turn;
  return [`Writing · ${plural(tokens, 'token')}`, tokensPerSecond && formatRate(tokensPerSecond),
    rolls && 'the oldest text has left the context'].filter(Boolean).join(' · ');
}
