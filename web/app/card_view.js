/** One model: what it is, what it needs, whether it runs here, and what can be done with it. */
import { createAbout } from './about_view.js';
import { button, h, setText } from './dom.js';
import { formatBits, formatBytes, formatCount, formatParameters } from './format.js';
import { createBrokenStamp, gradeWords, isBroken } from './grade.js';
import { icon } from './icons.js';
import { loweredWords } from './largest_context.js';
import { estimateMemory } from './models.js';
import { titleOf } from './problems.js';

/** @typedef {import('./types.js').State} State */
/** @typedef {import('./types.js').Model} Model */
/** @typedef {import('./actions.js').Actions} Actions */

/**
 * @param {Model} model
 * @param {Actions} actions
 * @returns {{element: HTMLLIElement, render: (state: State) => void}}
 */
export function createCard(model, actions) {
  const inUse = h('span', { class: 'chip', hidden: true }, 'In use');
  const facts = {
    Parameters: h('dd', {}, formatParameters(model.parameters)),
    Download: h('dd', {}),
    'GPU memory': h('dd', {}),
    Weights: h('dd', {}, formatBits(model.bits_per_weight), h('small', {}, 'embedding included')),
    Quality: h('dd', {}, gradeWords(model.grade)),
    Licence: h('dd', {}, model.license ?? 'not stated'),
  };
  const verdict = h('p', { class: 'verdict' });
  const load = button({ text: 'Load', onclick: () => actions.load(model) });
  const remove = createRemove(model, actions);
  const broken = createBrokenStamp();
  broken.hidden = !isBroken(model.grade);
  const element = h('li', { class: 'card' },
    h('div', { class: 'card-head' }, h('h2', {}, model.name), inUse),
    model.description && h('p', { class: 'description' }, model.description),
    broken,
    h('dl', { class: 'facts' },
      ...Object.entries(facts).map(([name, value]) => h('div', {}, h('dt', {}, name), value))),
    createAbout(model),
    verdict,
    h('div', { class: 'actions' }, load, remove.element));

  /** @param {State} state */
  function render(state) {
    const using = state.engine.modelId === model.id && state.engine.status === 'ready';
    const { plan } = state.plans[model.id] ?? {};
    const stored = plan?.storedBytes ?? 0;
    const whole = plan?.downloadBytes ?? model.bytes;
    inUse.hidden = !using;
    write(facts.Download, formatBytes(whole), storedWords(stored, whole));
    const memory = plan
      ? { bytes: plan.totalBytes, contextLength: plan.contextLength } : estimateMemory(model, state.settings);
    write(facts['GPU memory'], `${plan ? '' : 'about '}${formatBytes(memory.bytes)}`,
      `with a context of ${formatCount(memory.contextLength)}`);
    const { ok, text } = judge(state, model);
    writeVerdict(verdict, ok, text);
    setText(load.lastElementChild ?? load, using ? 'Open the chat' : loadWords(stored, whole));
    load.setAttribute('aria-label', `${load.textContent}: ${model.name}`);
    load.disabled = !using && ok === false;
    load.classList.toggle('primary', load.disabled === false);
    remove.render(stored > 0 && state.engine.status !== 'loading', stored);
  }
  return { element, render };
}

/** @param {HTMLElement} fact @param {string} text @param {string} [note] */
function write(fact, text, note) {
  if (fact.dataset.text === text + note) return;
  fact.dataset.text = text + note;
  fact.replaceChildren(text, ...(note ? [h('small', {}, note)] : []));
}

/** @param {number} stored @param {number} whole */
function storedWords(stored, whole) {
  if (stored <= 0) return '';
  return stored >= whole ? 'stored in this browser' : `${formatBytes(stored)} stored here`;
}

/** @param {number} stored @param {number} whole */
function loadWords(stored, whole) {
  if (stored >= whole) return 'Load';
  return stored > 0 ? 'Continue the download' : 'Download and load';
}

/**
 * Whether this device can run the model, and why not. `ok` is null while nobody knows.
 * @param {State} state
 * @param {Model} model
 * @returns {{ok: boolean|null, text: string}}
 */
function judge({ support, plans, models }, model) {
  if (support && !support.webgpu) return { ok: false, text: 'This browser cannot run it: WebGPU is missing.' };
  const known = plans[model.id];
  if (!support || !known) return { ok: null, text: models.status === 'ready' ? 'Checking this device' : '' };
  if (!known.plan) {
    const { problem } = known;
    return { ok: false, text: problem ? `${titleOf(problem)}. ${problem.message}` : 'This model cannot be read.' };
  }
  if (known.lowered) return { ok: true, text: `This device can run it. ${loweredWords(known.lowered)}` };
  if (known.plan.fits) return { ok: true, text: 'This device can run it.' };
  const reasons = known.plan.problems.map((problem) => problem.message).join(' ');
  return { ok: false, text: `This device cannot run it. ${reasons}` };
}

/** @param {HTMLElement} verdict @param {boolean|null} ok @param {string} text */
function writeVerdict(verdict, ok, text) {
  if (verdict.textContent === text) return;
  verdict.className = `verdict ${ok === null ? '' : ok ? 'good' : 'bad'}`;
  verdict.replaceChildren(...(ok === null ? [text] : [icon(ok ? 'check' : 'warn'), h('span', {}, text)]));
}

/**
 * Removing asks once more, in place: a download may have taken an hour.
 * @param {Model} model
 * @param {Actions} actions
 */
function createRemove(model, actions) {
  const element = h('div', { class: 'remove' });
  let asking = false;
  let stored = 0;

  /** @param {boolean} now */
  function ask(now) {
    asking = now;
    draw();
    element.querySelector('button')?.focus();
  }
  function draw() {
    if (!asking) {
      element.replaceChildren(button({ text: 'Remove from this browser', class: 'quiet',
        'aria-label': `Remove ${model.name} from this browser`, onclick: () => ask(true) }));
      return;
    }
    element.replaceChildren(
      h('span', { role: 'status' }, `Remove ${formatBytes(stored)}?`),
      button({ text: 'Keep', class: 'quiet', onclick: () => ask(false) }),
      button({ text: 'Remove', class: 'quiet danger', onclick: () => {
        asking = false;
        actions.remove(model);
      } }));
  }
  return {
    element,
    /** @param {boolean} shown @param {number} bytes */
    render(shown, bytes) {
      if (shown && (element.childElementCount === 0 || bytes !== stored)) {
        stored = bytes;
        draw();
      }
      if (!shown) element.replaceChildren();
    },
  };
}
