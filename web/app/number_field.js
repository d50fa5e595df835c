/** A number with its bounds: a field, for some a slider as well, a hint, and an error in words. */
import { h, setAttr, setText } from './dom.js';
import { parseNumber } from './settings.js';

/**
 * @param {import('./settings.js').NumberField} field
 * @param {(value: number|null) => void} onValue called only with values within the bounds
 */
export function createNumberField(field, onValue) {
  const id = `setting-${field.key}`;
  // A text field, because a number field hides what was typed when it is no number.
  const input = h('input', { id, type: 'text', inputmode: field.step === 1 ? 'numeric' : 'decimal', autocomplete: 'off',
    'aria-describedby': `${id}-hint ${id}-error`, onchange: () => take(input.value) });
  const slider = field.slider ? h('input', { type: 'range', min: field.min, max: field.max, step: field.step,
    'aria-label': `${field.label} slider`, oninput: () => take(slider?.value ?? '') }) : null;
  const error = h('p', { class: 'error', id: `${id}-error`, role: 'alert' });
  const element = h('div', { class: 'field number' },
    h('div', { class: 'pair' }, h('label', { for: id }, field.label), input), slider,
    h('p', { class: 'hint', id: `${id}-hint` }, field.hint), error);
  /** @type {number|null|undefined} */
  let shown;

  /** @param {string} text */
  function take(text) {
    const parsed = parseNumber(field, text);
    setText(error, parsed.error ?? '');
    setAttr(input, 'aria-invalid', parsed.error ? 'true' : null);
    if (parsed.error === null) onValue(parsed.value);
  }

  /** @param {number|null} value @param {boolean} disabled */
  function render(value, disabled) {
    input.disabled = disabled;
    if (slider) slider.disabled = disabled;
    if (value === shown) return;
    shown = value;
    input.value = value === null ? '' : String(value);
    if (slider) slider.value = String(value);
    setText(error, '');
    setAttr(input, 'aria-invalid', null);
  }
  return { key: field.key, element, render };
}
