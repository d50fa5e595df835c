/** One failure: what happened, what it means, and a button for each way to go on. */
import { button, h } from './dom.js';
import { icon } from './icons.js';
import { formatCount } from './format.js';
import { titleOf, waysOf } from './problems.js';

/** @typedef {import('./types.js').Problem} Problem */
/** @typedef {import('./problems.js').Way} Way */

/**
 * What each way does here; a way without an entry is not offered.
 * @typedef {Partial<Record<Way, {text?: string, run: () => void}>>} Offers
 */

/** @type {Record<Way, string>} */
const WORDS = {
  retry: 'Try again',
  reload: 'Reload the model',
  'smaller-context': 'Reload with a smaller context',
  'larger-context': 'Reload with a larger context',
  choose: 'Choose another model',
  'new-chat': 'New chat',
  'drop-oldest': 'Continue without the oldest messages',
  roll: 'Go on with a rolling window',
};

/** @param {number} tokens */
export const reloadWith = (tokens) => `Reload with a context of ${formatCount(tokens)}`;

/**
 * @param {() => void} showDetails
 * @returns {{element: HTMLElement, show: (problem: Problem|null, offers: Offers, kept?: boolean) => void}}
 */
export function createNotice(showDetails) {
  const element = h('section', { class: 'notice', role: 'alert', hidden: true });
  /** @type {string} */
  let shown = '';

  /**
   * @param {Problem|null} problem
   * @param {Offers} offers
   * @param {boolean} [kept] there is a conversation, and it is not lost
   */
  function show(problem, offers, kept = false) {
    element.hidden = problem === null;
    const key = JSON.stringify([problem, kept, Object.entries(offers).map(([way, offer]) => [way, offer?.text])]);
    // An alert is read out again whenever it is written again.
    if (key === shown) return;
    shown = key;
    element.replaceChildren();
    if (!problem) return;
    const buttons = waysOf(problem).flatMap((way) => {
      const offer = offers[way];
      return offer ? [button({ text: offer.text ?? WORDS[way], onclick: offer.run })] : [];
    });
    buttons[0]?.classList.add('primary');
    element.append(
      h('h2', {}, icon('warn'), titleOf(problem)),
      h('p', {}, problem.message),
      ...[problem.action && h('p', {}, problem.action), kept && h('p', {}, 'The conversation is kept.')]
        .filter((line) => line !== '' && line !== false),
      h('div', { class: 'actions' }, ...buttons, button({ text: 'Details', class: 'link', onclick: showDetails })),
    );
  }
  return { element, show };
}
