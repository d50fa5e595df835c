/** What a model was made from and what it says, as its card tells it. */
import { h } from './dom.js';
import { formatCount, formatParameters, plural } from './format.js';

/** @typedef {import('./types.js').About} About */

/**
 * @param {import('./types.js').Model} model
 * @returns {HTMLDetailsElement|null} closed; null if the pack says nothing of itself
 */
export function createAbout({ name, about }) {
  if (!about) return null;
  return h('details', { class: 'about' },
    h('summary', { 'aria-label': `Where ${name} comes from` }, 'Where it comes from'),
    h('p', {}, about.trained_on),
    figures(about),
    about.notes && h('p', {}, about.notes),
    samples(about));
}

/** @param {About} about */
function figures({ tokens, held_out: heldOut }) {
  const rows = [
    ...(tokens ? [['Trained on', `${formatParameters(tokens)} tokens`, '']] : []),
    ...heldOut.map((one) => [
      'Held-out loss', `${one.loss.toFixed(2)} nats a token`,
      `${one.text}${one.tokens ? `, ${formatCount(one.tokens)} tokens` : ''}`,
    ]),
  ];
  if (!rows.length) return null;
  return h('dl', { class: 'facts' }, ...rows.map(([term, value, note]) =>
    h('div', {}, h('dt', {}, term), h('dd', {}, value, note && h('small', {}, note)))));
}

/** @param {About} about */
function samples({ samples: list, sampling }) {
  if (!list.length) return null;
  return h('section', {},
    h('h3', {}, plural(list.length, 'answer')),
    h('p', { class: 'hint' }, sampling ?? 'As they came.'),
    h('dl', { class: 'samples' }, ...list.flatMap(({ prompt, answer }) => [h('dt', {}, prompt), h('dd', {}, answer)])));
}
