/** One measurement: a sentence, bars, the matrices, and the other numbers. Bars only repeat what stands beside them. */
import { h } from './dom.js';
import { decodeBars, facts, limitWords, linearRows, prefillBars, summary } from './report_words.js';

/** @typedef {import('./types.js').MeasureReport} MeasureReport */
/** @typedef {import('./report_words.js').Bar} Bar */

/** @returns {{element: HTMLElement, render: (report: MeasureReport|null) => void}} */
export function createReport() {
  const element = h('div', { class: 'report', hidden: true });
  /** @type {MeasureReport|null} */
  let shown = null;
  return {
    element,
    render(report) {
      element.hidden = report === null;
      if (report === shown) return;
      shown = report;
      element.replaceChildren();
      if (!report) return;
      element.append(...[
        h('p', { class: 'result' }, summary(report)),
        chart('Writing', limitWords(report), decodeBars(report)),
        chart('Reading a prompt', 'Many tokens share what is read once, so reading can pass that limit.',
          prefillBars(report)),
        linears(report),
        h('dl', { class: 'facts' }, ...facts(report).map(([name, value]) =>
          h('div', {}, h('dt', {}, name), h('dd', {}, value)))),
      ].filter((part) => part !== null));
    },
  };
}

/**
 * @param {string} title
 * @param {string} hint
 * @param {Bar[]} bars
 * @returns {HTMLElement|null} null when nothing was measured
 */
function chart(title, hint, bars) {
  if (!bars.length) return null;
  return h('section', {}, h('h3', {}, title),
    h('ul', { class: 'bars', 'aria-label': title }, ...bars.map(bar)), h('p', { class: 'hint' }, hint));
}

/** @param {Bar} bar */
function bar({ label, value, share }) {
  const fill = h('span', { class: 'bar-fill' });
  fill.style.width = `${100 * share}%`;
  const track = h('span', { class: 'bar-track', 'aria-hidden': 'true' }, fill);
  return h('li', {}, h('span', {}, label), h('b', {}, value), track);
}

/** @param {MeasureReport} report */
function linears(report) {
  if (!report.linears.length) return null;
  const head = (/** @type {string} */ text) => h('th', { scope: 'col' }, text);
  return h('section', {}, h('h3', {}, 'Matrices'),
    h('table', { class: 'linears' },
      h('caption', { class: 'hint' }, 'Each kind of matrix of the model by itself, for one token: how fast its weights '
        + 'are read, and the share of what the memory allows.'),
      h('thead', {}, h('tr', {}, head('Matrix'), head('Time'), head('Read'), head('Share'))),
      h('tbody', {}, ...linearRows(report).map(({ name, size, time, speed, share }) => h('tr', {},
        h('th', { scope: 'row' }, ...breakable(name), h('small', {}, size)), h('td', {}, time), h('td', {}, speed),
        h('td', {}, share))))));
}

/** A name that may break after its dots and underscores. @param {string} name */
const breakable = (name) => name.split(/(?<=[._])/).flatMap((part, i) => (i ? [h('wbr'), part] : [part]));
