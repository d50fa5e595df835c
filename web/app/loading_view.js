/** A model on its way: one bar, the phase, the numbers, and cancel. */
import { button, h, setAttr, setText } from './dom.js';
import { icon } from './icons.js';
import { PHASES, describe, isDone } from './progress.js';

/** @typedef {import('./types.js').State} State */
/** @typedef {import('./actions.js').Actions} Actions */

/**
 * @param {Actions} actions
 * @returns {{element: HTMLElement, render: (state: State) => void}}
 */
export function createLoading(actions) {
  const title = h('h2', {});
  const bar = h('progress', { max: '1', value: '0', 'aria-labelledby': 'loading-title' });
  const label = h('span', { class: 'phase' });
  const numbers = h('span', { class: 'numbers' });
  const steps = PHASES.map(({ phase, short }) => ({
    phase, item: h('li', {}, h('span', { class: 'tick' }, icon('check')), short),
  }));
  const element = h('section', { class: 'loading', hidden: true, 'aria-labelledby': 'loading-title' },
    title, bar, h('p', { class: 'now' }, label, numbers),
    h('ol', { class: 'steps', 'aria-label': 'Steps' }, ...steps.map(({ item }) => item)),
    h('div', { class: 'actions' },
      button({ text: 'Cancel', onclick: actions.cancelLoad }),
      h('p', { class: 'muted' }, 'What has arrived is kept in this browser. The next load goes on from there.')));
  title.id = 'loading-title';

  /** @param {State} state */
  function render({ engine, models }) {
    const { progress } = engine;
    element.hidden = engine.status !== 'loading' || !progress;
    if (element.hidden || !progress) return;
    const model = models.list.find((one) => one.id === engine.modelId);
    setText(title, `Loading ${model?.name ?? 'the model'}`);
    bar.value = progress.fraction;
    const now = describe(progress);
    setText(label, now.label);
    setText(numbers, now.numbers.join(' · '));
    setAttr(bar, 'aria-valuetext', [now.label, ...now.numbers].join(', '));
    for (const { phase, item } of steps) {
      item.classList.toggle('done', isDone(progress, phase));
      setAttr(item, 'aria-current', progress.current === phase ? 'step' : null);
    }
  }
  return { element, render };
}
