/** One of a few words, side by side. */
import { h } from './dom.js';

/**
 * @template {string} V
 * @param {{name: string, legend: string, hint?: string, values: readonly V[], words: Record<V, string>,
 *   onValue: (value: V) => void}} field
 * @returns {{element: HTMLElement, render: (value: V) => void}}
 */
export function createChoiceField({ name, legend, hint, values, words, onValue }) {
  const inputs = values.map((value) => h('input', { type: 'radio', name, value, id: `${name}-${value}`,
    'aria-describedby': hint ? `${name}-hint` : null, onchange: () => onValue(value) }));
  const element = h('fieldset', {}, h('legend', {}, legend),
    h('div', { class: 'segments' },
      ...inputs.flatMap((input, i) => [input, h('label', { for: input.id }, words[values[i]])])),
    hint && h('p', { class: 'hint', id: `${name}-hint` }, hint));
  return {
    element,
    render(value) {
      for (const input of inputs) input.checked = input.value === value;
    },
  };
}
