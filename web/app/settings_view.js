/** The settings panel. Each change is kept at once. */
import { button, h } from './dom.js';
import { createMemoryFields } from './memory_fields.js';
import { createNumberField } from './number_field.js';
import { NUMBER_FIELDS, THEMES } from './settings.js';

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
  const theme = createTheme(actions);
  const notKept = h('p', { class: 'error', role: 'status', hidden: true },
    'This browser does not let the page keep anything: settings and conversation end with this tab.');
  const element = h('div', { class: 'settings' },
    prompt.element,
    h('fieldset', {}, h('legend', {}, 'How answers are chosen'),
      h('div', { class: 'check' }, greedy, h('label', { for: 'greedy' }, 'Greedy')),
      h('p', { class: 'hint', id: 'greedy-hint' }, 'Always the likeliest token: the same question gives the same answer.'),
      ...numbers.map((number) => number.element)),
    h('fieldset', {}, h('legend', {}, 'Memory'), memory.element, later),
    theme.element, notKept,
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
    const { info } = engine;
    later.hidden = !info || (info.kvCache === settings.kvCache
      && info.contextLength === Math.min(settings.contextLength, longest));
    theme.render(settings);
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
function createTheme(actions) {
  const words = { auto: 'As the system', light: 'Light', dark: 'Dark' };
  const inputs = THEMES.map((theme) => h('input', { type: 'radio', name: 'theme', value: theme, id: `theme-${theme}`,
    onchange: () => actions.setSettings({ theme }) }));
  const element = h('fieldset', {}, h('legend', {}, 'Colours'),
    h('div', { class: 'segments' },
      ...inputs.flatMap((input, i) => [input, h('label', { for: input.id }, words[THEMES[i]])])));
  return {
    element,
    /** @param {Settings} settings */
    render({ theme }) {
      for (const input of inputs) input.checked = input.value === theme;
    },
  };
}
