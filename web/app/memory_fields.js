/** The two choices that decide how much memory a model takes: context length and KV cache type. */
import { h } from './dom.js';
import { formatCount } from './format.js';
import { KV_CACHES, contextChoices } from './settings.js';

/** @typedef {import('./types.js').State} State */
/** @typedef {import('./actions.js').Actions} Actions */

/** @type {Record<import('./types.js').Settings['kvCache'], string>} */
const KV_WORDS = { f16: '16-bit floats', f32: '32-bit floats (most memory)', q8: '8-bit (least memory)' };

/**
 * @param {Actions} actions
 * @param {string} place makes the ids unique: the fields are on the choosing page and in the settings
 * @returns {{element: HTMLElement, render: (state: State, longest: number) => void}}
 */
export function createMemoryFields(actions, place) {
  const context = h('select', { id: `${place}-context`, onchange: () =>
    actions.setMemory({ contextLength: Number(context.value) }) });
  const cache = h('select', { id: `${place}-kv`, onchange: () =>
    actions.setMemory({ kvCache: KV_CACHES.find((type) => type === cache.value) }) },
  ...KV_CACHES.map((type) => h('option', { value: type }, `${type}: ${KV_WORDS[type]}`)));
  const element = h('div', { class: 'memory-fields' },
    h('div', { class: 'field' },
      h('label', { for: context.id }, 'Context'), context,
      h('p', { class: 'hint' }, 'How much of the conversation the model can read. One token is about ¾ of a word.')),
    h('div', { class: 'field' },
      h('label', { for: cache.id }, 'KV cache'), cache,
      h('p', { class: 'hint' }, 'How the model’s notes on the conversation are stored on the GPU.')));
  let shown = '';

  /** @param {State} state @param {number} longest tokens */
  function render({ settings }, longest) {
    const choices = contextChoices(longest, settings.contextLength);
    if (String(choices) !== shown) {
      shown = String(choices);
      context.replaceChildren(...choices.map((n) => h('option', { value: n }, `${formatCount(n)} tokens`)));
    }
    context.value = String(Math.min(settings.contextLength, longest));
    cache.value = settings.kvCache;
  }
  return { element, render };
}
