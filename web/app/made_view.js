/** How an answer was made: pace, seed, and every setting, so that it can be made again. */
import { button, h } from './dom.js';
import { formatCount, formatRate, formatSeconds, plural } from './format.js';
import { icon } from './icons.js';

/** @typedef {import('./types.js').Made} Made */
/** @typedef {import('./actions.js').Actions} Actions */

/**
 * @param {Actions} actions
 * @returns {{summary: HTMLButtonElement, element: HTMLElement, render: (made: Made|null) => void}}
 */
export function createMade(actions) {
  const summary = h('button', { type: 'button', class: 'quiet made', 'aria-expanded': 'false',
    onclick: () => open(Boolean(element.hidden)) });
  const element = h('div', { class: 'made-list', hidden: true });
  /** @type {Made|null} */
  let shown = null;

  /** @param {boolean} now */
  function open(now) {
    element.hidden = !now;
    summary.setAttribute('aria-expanded', String(now));
    if (now) element.scrollIntoView({ block: 'nearest' });
  }

  /** @param {Made|null} made */
  function render(made) {
    summary.hidden = made === null;
    if (made === shown) return;
    shown = made;
    if (!made) {
      open(false);
      return;
    }
    const { usage } = made;
    summary.replaceChildren(h('span', {}, usage
      ? `${plural(usage.completion_tokens, 'token')} · ${formatRate(usage.decode_tokens_per_second)}` : 'How it was made'),
    icon('chevron'));
    element.replaceChildren(
      h('dl', {}, ...rows(made).map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value)))),
      button({ text: 'Use these settings', class: 'quiet', onclick: () => actions.useSettings(made) }));
  }
  return { summary, element, render };
}

/** @param {Made} made @returns {[string, string][]} */
function rows(made) {
  const { usage } = made;
  /** @type {[string, string][]} */
  const list = [['Model', made.model], ['Seed', String(made.seed)]];
  if (made.temperature === 0) list.push(['Sampling', 'greedy (temperature 0)']);
  else {
    list.push(['Temperature', String(made.temperature)], ['Top-p', String(made.topP)],
      ['Top-k', made.topK ? String(made.topK) : 'off'], ['Min-p', made.minP ? String(made.minP) : 'off']);
  }
  list.push(['Repetition penalty', String(made.repetitionPenalty)],
    ['Longest answer', made.maxTokens === null ? 'no limit' : plural(made.maxTokens, 'token')],
    ['Context', `${formatCount(made.contextLength)} tokens, KV cache ${made.kvCache}`],
    ['System prompt', made.systemPrompt.trim() ? made.systemPrompt : 'the model’s own']);
  if (made.rolls) list.push(['Rolling window', `moved on ${made.rolls === 1 ? 'once' : `${made.rolls} times`}`]);
  if (usage) {
    list.push(
      ['Prompt', `${plural(usage.prompt_tokens, 'token')}, ${formatCount(usage.cached_tokens)} of them already read`],
      ['Reading', formatRate(usage.prefill_tokens_per_second)],
      ['Writing', formatRate(usage.decode_tokens_per_second)],
      ['First word after', formatSeconds(usage.time_to_first_token)]);
  }
  return list;
}
