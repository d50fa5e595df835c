/** The settings: their bounds, their defaults, and how they are kept. */
import { load, save } from './storage.js';

/** @typedef {import('./types.js').Settings} Settings */

/**
 * Numbers a person can set. `optional` ones may be left empty (null).
 * @typedef {{key: 'temperature'|'topP'|'topK'|'minP'|'repetitionPenalty'|'seed'|'maxTokens', label: string,
 *   min: number, max: number, step: number, hint: string, optional?: boolean, slider?: boolean}} NumberField
 */

/** @type {NumberField[]} */
export const NUMBER_FIELDS = [
  { key: 'temperature', label: 'Temperature', min: 0, max: 2, step: 0.05, slider: true,
    hint: 'Higher is more varied, lower is steadier. 0 is greedy.' },
  { key: 'topP', label: 'Top-p', min: 0.01, max: 1, step: 0.01, slider: true,
    hint: 'Choose among the likeliest tokens that together have this probability. 1 is off.' },
  { key: 'minP', label: 'Min-p', min: 0, max: 1, step: 0.01, slider: true,
    hint: 'Drop tokens below this share of the likeliest one. 0 is off.' },
  { key: 'repetitionPenalty', label: 'Repetition penalty', min: 1, max: 2, step: 0.01, slider: true,
    hint: 'Makes tokens that were already used less likely. 1 is off.' },
  { key: 'topK', label: 'Top-k', min: 0, max: 1000, step: 1,
    hint: 'Choose among this many of the likeliest tokens. 0 is off.' },
  { key: 'maxTokens', label: 'Longest answer, in tokens', min: 1, max: 131072, step: 1, optional: true,
    hint: 'Empty: until the model stops or the context ends.' },
  { key: 'seed', label: 'Seed', min: 0, max: 4294967295, step: 1, optional: true,
    hint: 'Empty: a new one for each answer. The same seed and settings give the same answer.' },
];

export const KV_CACHES = /** @type {const} */ (['f16', 'f32', 'q8']);
export const CONTEXT_FULL = /** @type {const} */ (['stop', 'roll']);
export const SPECULATION = /** @type {const} */ (['auto', 'off']);
export const THEMES = /** @type {const} */ (['auto', 'light', 'dark']);

/** @type {Readonly<Settings>} */
export const DEFAULTS = Object.freeze({
  theme: /** @type {const} */ ('auto'),
  systemPrompt: '',
  temperature: 0.7,
  topP: 0.9,
  topK: 0,
  minP: 0,
  repetitionPenalty: 1.15,
  seed: null,
  maxTokens: null,
  contextLength: 4096,
  kvCache: /** @type {const} */ ('f16'),
  contextFull: /** @type {const} */ ('stop'),
  speculation: /** @type {const} */ ('auto'),
});

/**
 * The number a text stands for in this field, or why it is none.
 * @param {NumberField} field
 * @param {string} text
 * @returns {{value: number|null, error: null} | {value: null, error: string}}
 */
export function parseNumber(field, text) {
  const trimmed = text.trim();
  if (trimmed === '' && field.optional) return { value: null, error: null };
  const value = Number(trimmed);
  if (trimmed !== '' && inBounds(field, value)) return { value, error: null };
  const kind = field.step === 1 ? 'a whole number' : 'a number';
  const empty = field.optional ? ', or empty' : '';
  return { value: null, error: `${field.label} is ${kind} from ${field.min} to ${field.max}${empty}.` };
}

/**
 * @param {NumberField} field
 * @param {unknown} value
 * @returns {value is number}
 */
function inBounds(field, value) {
  if (typeof value !== 'number' || !Number.isFinite(value)) return false;
  return value >= field.min && value <= field.max && (field.step !== 1 || Number.isInteger(value));
}

/**
 * Settings from anything: each value that is not valid becomes its default.
 * @param {unknown} stored
 * @returns {Settings}
 */
export function sanitize(stored) {
  const given = /** @type {Record<string, unknown>} */ (typeof stored === 'object' && stored ? stored : {});
  const settings = /** @type {Settings} */ ({ ...DEFAULTS });
  for (const field of NUMBER_FIELDS) {
    const value = given[field.key];
    if (inBounds(field, value)) settings[field.key] = value;
  }
  if (typeof given.systemPrompt === 'string') settings.systemPrompt = given.systemPrompt;
  const context = given.contextLength;
  if (typeof context === 'number' && Number.isInteger(context) && context >= 128) settings.contextLength = context;
  settings.theme = THEMES.find((theme) => theme === given.theme) ?? DEFAULTS.theme;
  settings.kvCache = KV_CACHES.find((type) => type === given.kvCache) ?? DEFAULTS.kvCache;
  settings.contextFull = CONTEXT_FULL.find((way) => way === given.contextFull) ?? DEFAULTS.contextFull;
  settings.speculation = SPECULATION.find((way) => way === given.speculation) ?? DEFAULTS.speculation;
  return settings;
}

/** @returns {Settings} */
export const loadSettings = () => sanitize(load('settings'));

/** @param {Settings} settings @returns {boolean} whether they were kept */
export const saveSettings = (settings) => save('settings', settings);

/**
 * Context lengths to choose from: powers of two up to the model's own, and the model's own.
 * @param {number} longest tokens
 * @param {number} [chosen] kept in the list if it is another number
 * @returns {number[]}
 */
export function contextChoices(longest, chosen) {
  const choices = new Set([longest]);
  for (let length = 512; length < longest; length *= 2) choices.add(length);
  if (chosen && chosen <= longest) choices.add(chosen);
  return [...choices].sort((a, b) => a - b);
}
