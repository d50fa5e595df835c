/** "How fast is my GPU?": measures, and shows the result in words, as bars, and as a table. */
import { copyText } from './clipboard.js';
import { button, h, setAttr, setText } from './dom.js';
import { icon } from './icons.js';
import { whyNot } from './measure.js';
import { titleOf } from './problems.js';
import { createReport } from './report_view.js';

/** @typedef {import('./types.js').State} State */
/** @typedef {import('./types.js').MeasureState} MeasureState */
/** @typedef {import('./actions.js').Actions} Actions */

/**
 * @param {Actions} actions
 * @returns {{element: HTMLElement, render: (state: State) => void}}
 */
export function createSpeed(actions) {
  const start = button(
    { text: 'Measure', class: 'primary', onclick: actions.measure, 'aria-describedby': 'speed-why' });
  const reason = h('p', { class: 'hint', id: 'speed-why' });
  const running = createRunning(actions);
  const ending = h('p', { class: 'ending-words', role: 'status' });
  const report = createReport();
  const copy = button({ icon: icon('copy'), text: 'Copy as JSON' });
  /** @type {State['measure']['report']} */
  let shown = null;
  copy.addEventListener('click', () => copyText(JSON.stringify(shown, null, 2), copy));
  const element = h('div', { class: 'speed' },
    h('p', {}, 'Runs the loaded model on made-up text and compares it with how fast this device reads its memory, '
      + 'which is what limits it. Nothing is sent.'),
    h('div', { class: 'actions' }, start, reason), running.element, ending, report.element, copy);

  /** @param {State} state */
  function render(state) {
    const { measure, engine, support } = state;
    const why = whyNot(state);
    const isRunning = measure.status === 'running';
    start.disabled = why !== '';
    running.render(measure, start);
    start.hidden = isRunning;
    setText(start, measure.report ? 'Measure again' : 'Measure');
    reason.hidden = isRunning;
    setText(reason, why || howLong((engine.info?.adapter ?? support?.adapter)?.software === true));
    setText(ending, endingWords(measure));
    ending.hidden = ending.textContent === '';
    ending.classList.toggle('error', measure.status === 'failed');
    shown = measure.report;
    report.render(shown);
    copy.hidden = shown === null;
  }
  return { element, render };
}

/** @param {boolean} software */
const howLong = (software) => (software
  ? 'Takes a minute or two without a GPU. Other work on this machine makes the result worse.'
  : 'Takes about half a minute. Other work on this machine makes the result worse.');

/** @param {MeasureState} measure */
function endingWords({ status, problem }) {
  if (status === 'stopped') return 'Stopped before its end: there is no result.';
  if (status !== 'failed') return '';
  if (!problem) return 'The measurement did not end: the connection to the GPU was lost.';
  return [`${titleOf(problem)}.`, problem.message, problem.action].filter(Boolean).join(' ');
}

/** @param {Actions} actions */
function createRunning(actions) {
  const bar = h('progress', { max: '1', value: '0', 'aria-label': 'Measuring' });
  const what = h('span', {});
  const numbers = h('span', { class: 'numbers' });
  const cancel = button({ text: 'Cancel', onclick: actions.stopMeasuring });
  const element = h('div', { class: 'measuring', hidden: true }, bar, h('p', { class: 'now' }, what, numbers),
    cancel);
  return {
    element,
    /**
     * @param {MeasureState} measure
     * @param {HTMLButtonElement} start the button in whose place this stands; the keyboard goes with it
     */
    render({ status, progress }, start) {
      const isRunning = status === 'running';
      const [shown, hidden] = isRunning ? [cancel, start] : [start, cancel];
      const moves = document.activeElement === hidden;
      element.hidden = !isRunning && !moves;
      shown.hidden = false;
      if (moves) shown.focus();
      element.hidden = !isRunning;
      const { done, total, label } = progress ?? { done: 0, total: 0, label: 'starting' };
      const now = label.charAt(0).toUpperCase() + label.slice(1);
      bar.value = total > 0 ? done / total : 0;
      setText(what, now);
      setText(numbers, total > 0 ? `${Math.min(done + 1, total)} of ${total}` : '');
      setAttr(bar, 'aria-valuetext', `${now} ${numbers.textContent}`.trim());
    },
  };
}
