/** The settings panel. Each change is kept at once. */
import { button, h, setText } from './dom.js';
import { createChoiceField } from './choice_field.js';
import { loweredWords } from './largest_context.js';
import { createMemoryFields } from './memory_fields.js';
import { contextFor, loweredFor } from './models.js';
import { createNumberField } from './number_field.js';
import { CONTEXT_FULL, NUMBER_FIELDS, THEMES } from './settings.js';

/** @typedef {import('./types.js').State} State */
/** @typedef {import('./types.js').Settings} Settings */
/** @typedef {import('./actions.js').Actions} Actions */

/** Fields that greedy choosing makes meaningless. */
const ONLY_WHEN_SAMPLING = new Set(['temperature', 'topP', 'topK', 'minP', 'seed']);

/**
 * @param {Actions} actions
 * @returns {{element: HTMLElement, render: (state: State) => void}}
 */
export function createSettings(actions) {
  const prompt = createSystemPrompt(actions);
  const greedy = h('input', { type: 'checkbox', id: 'greedy', 'aria-describedby': 'greedy-hint',
    onchange: () => actions.setGreedy(greedy.checked) });
  const numbers = NUMBER_FIELDS.map((field) => createNumberField(field, (value) =>
    actions.setSettings(/** @type {Partial<Settings>} */ ({ [field.key]: value }))));
  const memory = createMemoryFields(actions, 'settings');
  const later = h('div', { class: 'later', role: 'status', hidden: true },
    h('span', {}, 'Takes effect when the model is loaded again.'),
    button({ text: 'Reload the model now', onclick: actions.reload }));
  const lowered = h('p', { class: 'hint', role: 'status' });
  const contextFull = createContextFull(actions);
  const pace = createPace(actions);
  const theme = createTheme(actions);
  const notKept = h('p', { class: 'error', role: 'status', hidden: true },
    'This browser does not let the page keep anything: settings and conversation end with this tab.');
  const element = h('div', { class: 'settings' },
    prompt.element,
    h('fieldset', {}, h('legend', {}, 'How answers are chosen'),
      h('div', { class: 'check' }, greedy, h('label', { for: 'greedy' }, 'Greedy')),
      h('p', { class: 'hint', id: 'greedy-hint' }, 'Always the likeliest token: the same question gives the same answer.'),
      ...numbers.map((number) => number.element)),
    h('fieldset', {}, h('legend', {}, 'Memory'), memory.element, lowered, later),
    contextFull.element, pace.element, theme.element, notKept,
    button({ text: 'Set everything back to the defaults', class: 'quiet', onclick: actions.resetSettings }));

  /** @param {State} state */
  function render(state) {
    const { settings, engine, models } = state;
    prompt.render(settings);
    const isGreedy = settings.temperature === 0;
    greedy.checked = isGreedy;
    for (const number of numbers) {
      number.render(settings[number.key], isGreedy && ONLY_WHEN_SAMPLING.has(number.key));
    }
    const model = models.list.find((one) => one.id === engine.modelId);
    const longest = model?.context ?? Math.max(512, ...models.list.map((one) => one.context));
    memory.render(state, longest);
    const smaller = model ? loweredFor(model, state) : null;
    setText(lowered, smaller ? loweredWords(smaller) : '');
    lowered.hidden = smaller === null;
    const { info } = engine;
    later.hidden = !info || !model || (info.kvCache === settings.kvCache
      && info.contextLength === contextFor(model, state));
    contextFull.render(settings.contextFull);
    pace.render(settings);
    theme.render(settings.theme);
    notKept.hidden = state.canStore;
  }
  return { element, render };
}

/** @param {Actions} actions */
function createSystemPrompt(actions) {
  const area = h('textarea', { id: 'system-prompt', rows: '3', 'aria-describedby': 'system-hint',
    oninput: () => actions.setSettings({ systemPrompt: area.value }) });
  const element = h('div', { class: 'field' },
    h('label', { for: area.id }, 'System prompt'), area,
    h('p', { class: 'hint', id: 'system-hint' }, 'Told to the model before the conversation. Empty: the model’s own.'));
  return {
    element,
    /** @param {Settings} settings */
    render({ systemPrompt }) {
      if (area.value !== systemPrompt) area.value = systemPrompt;
    },
  };
}

/** @param {Actions} actions */
const createTheme = (actions) => createChoiceField({
  name: 'theme', legend: 'Colours', values: THEMES, words: { auto: 'As the system', light: 'Light', dark: 'Dark' },
  onValue: (theme) => actions.setSettings({ theme }),
});

/** @param {Actions} actions */
const createContextFull = (actions) => createChoiceField({
  name: 'context-full', legend: 'When the context is full', values: CONTEXT_FULL,
  words: { stop: 'Stop', roll: 'Rolling window' },
  hint: 'With a rolling window the answer goes on, and the model no longer sees the oldest text.',
  onValue: (contextFull) => actions.setSettings({ contextFull }),
});

/** @param {Actions} actions */
function createPace(actions) {
  const guess = h('input', { type: 'checkbox', id: 'speculation', 'aria-describedby': 'speculation-hint',
    onchange: () => actions.setSettings({ speculation: guess.checked ? 'auto' : 'off' }) });
  const element = h('fieldset', {}, h('legend', {}, 'Speed'),
    h('div', { class: 'check' }, guess, h('label', { for: guess.id }, 'Guess ahead from the conversation')),
    h('p', { class: 'hint', id: 'speculation-hint' }, 'Where an answer repeats what was written, several words are '
      + 'checked at once, if that is faster here; the model still decides on each.'),
    button({ text: 'How fast is my GPU?', onclick: () => actions.togglePanel('speed') }));
  return {
    element,
    /** @param {Settings} settings */
    render({ speculation }) {
      guess.checked = speculation === 'auto';
    },
  };
}
