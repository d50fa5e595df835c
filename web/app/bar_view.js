/** The bar at the top: which model, new chat, speed, settings, details. */
import { button, h, setAttr, setText } from './dom.js';
import { icon } from './icons.js';

/** @typedef {import('./types.js').State} State */
/** @typedef {import('./actions.js').Actions} Actions */

/** @type {Record<import('./types.js').EngineStatus, string>} */
const STATUS_WORDS = { none: '', loading: 'loading', ready: '', lost: 'stopped', failed: 'not loaded' };

/**
 * @param {HTMLElement} bar
 * @param {Actions} actions
 * @returns {(state: State) => void}
 */
export function createBar(bar, actions) {
  const name = h('span', { class: 'model-name' });
  const status = h('span', { class: 'model-status' });
  const model = h('button', { type: 'button', class: 'quiet model-button', onclick: actions.showModels },
    name, status, icon('chevron'));
  const newChat = button({ icon: icon('plus'), text: 'New chat', class: 'quiet', onclick: actions.newChat });
  const speed = panelButton('gauge', 'Speed', () => actions.togglePanel('speed'));
  speed.classList.add('speed-button');
  const settings = panelButton('sliders', 'Settings', () => actions.togglePanel('settings'));
  const details = panelButton('info', 'Details', () => actions.togglePanel('details'));
  bar.append(model, h('div', { class: 'bar-buttons' }, newChat, speed, settings, details));

  return ({ engine, models, panel, conversation, screen }) => {
    const chosen = models.list.find((one) => one.id === engine.modelId);
    const hasName = Boolean(chosen) && engine.status !== 'none';
    setText(name, hasName && chosen ? chosen.name : 'Choose a model');
    setText(status, STATUS_WORDS[engine.status]);
    setAttr(model, 'aria-label', hasName
      ? `Model: ${name.textContent}${status.textContent ? `, ${status.textContent}` : ''}. Choose another` : null);
    setAttr(model, 'aria-current', screen === 'choose' ? 'page' : null);
    newChat.hidden = screen === 'choose' && conversation.messages.length === 0;
    newChat.disabled = screen === 'chat' && conversation.messages.length === 0;
    // Without a model there is nothing to measure.
    speed.hidden = engine.status !== 'ready' && panel !== 'speed';
    setAttr(speed, 'aria-expanded', String(panel === 'speed'));
    setAttr(settings, 'aria-expanded', String(panel === 'settings'));
    setAttr(details, 'aria-expanded', String(panel === 'details'));
  };
}

/**
 * @param {'sliders'|'info'|'gauge'} symbol
 * @param {string} text
 * @param {() => void} onclick
 */
function panelButton(symbol, text, onclick) {
  return button({ icon: icon(symbol), text, class: 'quiet', onclick, 'aria-expanded': 'false',
    'aria-controls': 'panel' });
}
