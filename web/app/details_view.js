/** The details for a bug report, and a button that copies them. */
import { button, h, setText } from './dom.js';
import { copyText } from './clipboard.js';
import { detailsText } from './details.js';
import { icon } from './icons.js';

/** @typedef {import('./types.js').State} State */

/** @returns {{element: HTMLElement, render: (state: State) => void}} */
export function createDetails() {
  const text = h('pre', { tabindex: '0', 'aria-label': 'Details' });
  const copy = button({ icon: icon('copy'), text: 'Copy the details' });
  copy.addEventListener('click', () => copyText(text.textContent ?? '', copy));
  const element = h('div', { class: 'details' },
    h('p', { class: 'hint' }, 'For a bug report: the device, the versions, the timings. '
      + 'The conversation and the system prompt are not in it.'),
    copy, text);
  return {
    element,
    render(state) {
      setText(text, detailsText(state, {
        agent: navigator.userAgent, secure: window.isSecureContext, screen: `${innerWidth} x ${innerHeight} px`,
      }));
    },
  };
}
