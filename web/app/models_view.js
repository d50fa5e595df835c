/** Choosing a model: why nothing runs here if nothing does, the context, the cards. */
import { button, h, setText } from './dom.js';
import { createCard } from './card_view.js';
import { createNotice } from './notice_view.js';
import { icon } from './icons.js';
import { createMemoryFields } from './memory_fields.js';
import { BROWSERS, howToGetWebGpu, whereItRuns } from './platform.js';
import { titleOf } from './problems.js';

/** @typedef {import('./types.js').State} State */
/** @typedef {import('./actions.js').Actions} Actions */

/**
 * @param {Actions} actions
 * @returns {{element: HTMLElement, render: (state: State) => void}}
 */
export function createModelsView(actions) {
  const back = button({ text: 'Back to the chat', class: 'quiet back', onclick: actions.showChat });
  const where = h('span', {});
  const missing = createMissing(actions);
  const notice = createNotice(() => actions.togglePanel('details', true));
  const fields = createMemoryFields(actions, 'choose');
  const list = h('ul', { class: 'cards', 'aria-label': 'Models' });
  const none = h('p', { class: 'muted', hidden: true },
    'The server has no models yet. Make one with “python -m packer export”, then load this page again.');
  const element = h('div', { class: 'choose' },
    back, h('h1', {}, 'Choose a model'),
    h('p', { class: 'lead' }, 'It is downloaded once, kept in this browser, and runs ', where,
      '. Nothing you write is sent anywhere.'),
    missing.element, notice.element, fields.element, list, none);
  /** @type {ReturnType<typeof createCard>[]} */
  let cards = [];
  /** @type {unknown} */
  let shown = null;

  /** @param {State} state */
  function render(state) {
    const { models, engine, conversation, support } = state;
    element.hidden = state.screen !== 'choose';
    if (element.hidden) return;
    if (models.list !== shown) {
      shown = models.list;
      cards = models.list.map((model) => createCard(model, actions));
      list.replaceChildren(...cards.map((card) => card.element));
    }
    back.hidden = !(engine.status === 'ready' || engine.status === 'loading' || conversation.messages.length > 0);
    setText(where, support?.webgpu ? whereItRuns(support.adapter) : 'on this machine’s GPU');
    missing.render(state);
    notice.show(models.problem, { retry: { run: actions.retryModels } });
    fields.element.hidden = models.list.length === 0;
    fields.render(state, Math.max(512, ...models.list.map((model) => model.context)));
    none.hidden = models.status !== 'ready' || models.list.length > 0;
    for (const card of cards) card.render(state);
  }
  return { element, render };
}

/**
 * What to do in a browser without WebGPU.
 * @param {Actions} actions
 */
function createMissing(actions) {
  const element = h('section', { class: 'notice', role: 'alert', hidden: true });
  /** @type {unknown} */
  let shown = null;

  /** @param {State} state */
  function render({ support }) {
    element.hidden = !support || support.webgpu;
    if (element.hidden || !support || support === shown) return;
    shown = support;
    const code = support.code ?? 'webgpu-missing';
    const steps = howToGetWebGpu(code, navigator.userAgent, window.isSecureContext);
    element.replaceChildren(
      h('h2', {}, icon('warn'), titleOf({ code, message: '', action: '', detail: {} })),
      h('p', {}, support.message),
      h('p', {}, 'WebGPU is how a web page computes on the graphics processor. Without it no model runs here; '
        + 'you can still look at the models and read a kept conversation.'),
      h('h3', {}, 'In this browser'),
      h('ol', { class: 'how' }, ...steps.map((step) =>
        h('li', {}, step.text, step.code && ' ', step.code && h('code', {}, step.code)))),
      h('h3', {}, 'Browsers that have it'),
      h('dl', { class: 'browsers' }, ...BROWSERS.flatMap(([name, versions]) => [h('dt', {}, name), h('dd', {}, versions)])),
      h('div', { class: 'actions' }, button({ text: 'Details', class: 'link',
        onclick: () => actions.togglePanel('details', true) })),
    );
  }
  return { element, render };
}
