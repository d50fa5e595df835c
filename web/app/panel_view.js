/** The panel beside the text; on a narrow screen a sheet over it, and then nothing behind it can be reached. */
import { button, h, setAttr, setText } from './dom.js';
import { createDetails } from './details_view.js';
import { icon } from './icons.js';
import { createSettings } from './settings_view.js';
import { createSpeed } from './speed_view.js';

/** @typedef {import('./types.js').State} State */
/** @typedef {import('./actions.js').Actions} Actions */

/** As in layout.css: below this the panel covers the page. */
const NARROW = '(max-width: 60rem)';

/**
 * @param {HTMLElement} panel
 * @param {HTMLElement[]} behind what the sheet covers
 * @param {Actions} actions
 * @returns {(state: State) => void}
 */
export function createPanel(panel, behind, actions) {
  const title = h('h2', { tabindex: '-1' });
  const close = button({ icon: icon('close'), text: 'Close', iconOnly: true, class: 'quiet',
    onclick: () => actions.togglePanel(null) });
  const views = { settings: createSettings(actions), details: createDetails(), speed: createSpeed(actions) };
  const words = { settings: 'Settings', details: 'Details', speed: 'How fast is my GPU?' };
  const body = h('div', { class: 'panel-body' }, ...Object.values(views).map((view) => view.element));
  panel.append(h('header', {}, title, close), body);
  const narrow = matchMedia(NARROW);
  /** @type {State['panel']} */
  let shown = null;
  /** @type {Element|null} */
  let opener = null;

  const cover = () => {
    for (const element of behind) element.inert = shown !== null && narrow.matches;
  };
  narrow.addEventListener('change', cover);

  return (state) => {
    const now = state.panel;
    if (now !== null) {
      setText(title, words[now]);
      setAttr(panel, 'aria-label', words[now]);
      views[now].render(state);
    }
    if (now === shown) return;
    if (shown === null) opener = document.activeElement;
    const hadFocus = panel.contains(document.activeElement);
    shown = now;
    panel.hidden = now === null;
    for (const [name, view] of Object.entries(views)) view.element.hidden = name !== now;
    cover();
    if (now !== null) {
      body.scrollTop = 0;
      title.focus();
    } else if (hadFocus && opener instanceof HTMLElement) {
      opener.focus();
    }
  };
}
