/** Everything a person can do, by name. Views call these and nothing else. */
import { DEFAULTS, sanitize } from './settings.js';

/** @typedef {import('./types.js').Store} Store */
/** @typedef {import('./types.js').Settings} Settings */
/** @typedef {import('./types.js').State} State */
/** @typedef {import('./types.js').Model} Model */
/** @typedef {ReturnType<typeof createActions>} Actions */

/** How long after the last key the prompt is counted again. */
const COUNT_AFTER_MS = 250;
/** An answer that does not stop within this time is not waited for. */
const STOP_WITHIN_MS = 2000;

/** @param {number} ms */
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/**
 * @param {Store} store
 * @param {{models: ReturnType<typeof import('./models.js').createModels>,
 *   session: ReturnType<typeof import('./session.js').createSession>,
 *   turns: ReturnType<typeof import('./turns.js').createTurns>,
 *   measure: ReturnType<typeof import('./measure.js').createMeasure>,
 *   focusMessage: () => void, focusPage: () => void, followText: () => void, toTop: () => void}} parts
 */
export function createActions(store, parts) {
  const { models, session, turns, measure, focusMessage, focusPage, followText, toTop } = parts;
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  let counting;
  const countSoon = () => {
    clearTimeout(counting);
    counting = setTimeout(() => void turns.recount(), COUNT_AFTER_MS);
  };

  /** @param {Partial<Settings>} change */
  function setSettings(change) {
    const settings = { ...store.get().settings, ...change };
    store.set({ settings });
    if ('systemPrompt' in change) countSoon();
  }

  /** @param {Model} model */
  async function load(model) {
    const { engine } = store.get();
    if (engine.status === 'ready' && engine.modelId === model.id) {
      showChat();
      return;
    }
    await loadAnyway(model);
  }

  /** @param {Model} model */
  async function loadAnyway(model) {
    turns.stop();
    measure.stop();
    await Promise.race([Promise.all([turns.settled(), measure.settled()]), wait(STOP_WITHIN_MS)]);
    focusPage();
    followText();
    await session.load(model);
    void turns.recount();
    const { engine, screen } = store.get();
    if (engine.status === 'ready' && screen === 'chat') focusMessage();
    else focusPage();
  }

  function reload() {
    const model = models.byId(store.get().engine.modelId);
    if (model) void loadAnyway(model);
  }

  function showChat() {
    store.set({ screen: 'chat' });
    requestAnimationFrame(() => {
      followText();
      focusMessage();
    });
  }

  /** @param {Partial<Pick<Settings, 'contextLength'|'kvCache'>>} change */
  function setMemory(change) {
    setSettings(change);
    void models.plan();
  }

  return {
    load: (/** @type {Model} */ model) => void load(model),
    remove: (/** @type {Model} */ model) => void models.remove(model),
    retryModels: () => void models.retry(),
    cancelLoad: () => session.cancel(),
    reload,
    /** Go on where the last visit ended. */
    resume() {
      const model = session.toResume();
      if (model) void loadAnyway(model);
    },
    reloadWith(/** @type {number} */ contextLength) {
      setMemory({ contextLength });
      reload();
    },
    showModels() {
      store.set({ screen: 'choose' });
      toTop();
      void models.plan();
    },
    showChat,
    setSettings,
    setMemory,
    setGreedy(/** @type {boolean} */ greedy) {
      setSettings({ temperature: greedy ? 0 : DEFAULTS.temperature });
    },
    resetSettings() {
      setSettings({ ...DEFAULTS });
      void models.plan();
    },
    /** Sampling, seed and system prompt of an answer. Memory is left alone: it would need a reload. */
    useSettings(/** @type {import('./types.js').Made} */ made) {
      const { settings } = store.get();
      const { contextLength, kvCache, contextFull, speculation, theme } = settings;
      setSettings({ ...sanitize({ ...made, theme }), contextLength, kvCache, contextFull, speculation });
      store.set({ panel: 'settings' });
    },
    ask(/** @type {string} */ text) {
      if (turns.ask(text)) followText();
    },
    stop: () => turns.stop(),
    regenerate() {
      turns.regenerate();
      followText();
    },
    edit(/** @type {string|null} */ id) {
      store.set({ editing: id });
    },
    editAndResend(/** @type {string} */ id, /** @type {string} */ text) {
      turns.editAndResend(id, text);
      followText();
    },
    setDraft(/** @type {string} */ draft) {
      store.set({ conversation: { ...store.get().conversation, draft } });
      countSoon();
    },
    newChat() {
      turns.newChat();
      showChat();
    },
    bringBack: () => turns.bringBack(),
    dropOldest: () => void turns.dropOldestMessages(),
    /** From now on the oldest text leaves a full context; what the full one stopped goes on. */
    roll() {
      setSettings({ contextFull: 'roll' });
      turns.goOn();
      followText();
    },
    measure: () => void measure.run(),
    stopMeasuring: () => measure.stop(),
    /** Open this panel, close it if it is open (unless `open`), or close any with null. */
    togglePanel(/** @type {State['panel']} */ panel, open = false) {
      store.set({ panel: store.get().panel === panel && !open ? null : panel });
    },
    /** Esc: what is most urgent first. */
    escape() {
      const { editing, panel } = store.get();
      if (turns.isAnswering()) turns.stop();
      else if (measure.isRunning()) measure.stop();
      else if (editing) store.set({ editing: null });
      else if (panel) store.set({ panel: null });
    },
  };
}
