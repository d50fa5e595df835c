/** Puts the page together: state, actions, views, and what is kept between visits. */
import { createActions } from './actions.js';
import { createBar } from './bar_view.js';
import { createChat } from './chat_view.js';
import { createComposer } from './composer_view.js';
import { EMPTY, loadConversation, sanitizeConversation, saveConversation } from './conversation.js';
import { byId, button } from './dom.js';
import { createFocusKeeper } from './focus_keeper.js';
import { createFollow } from './follow.js';
import { icon } from './icons.js';
import { NOT_MEASURED, createMeasure } from './measure.js';
import { createModels } from './models.js';
import { createModelsView } from './models_view.js';
import { createNarrator } from './narrator.js';
import { createPanel } from './panel_view.js';
import { NO_ENGINE, createSession } from './session.js';
import { loadSettings, sanitize, saveSettings } from './settings.js';
import { onChangeElsewhere } from './storage.js';
import { createStore } from './store.js';
import { createTurns } from './turns.js';

/** @typedef {import('./types.js').State} State */

const SAVE_EVERY_MS = 400;

/** @type {import('./types.js').Store} */
const store = createStore(/** @type {State} */ ({
  version: document.documentElement.dataset.version ?? '',
  settings: loadSettings(),
  canStore: true,
  support: null,
  models: { status: 'loading', list: [], problem: null },
  plans: {},
  screen: 'choose',
  engine: NO_ENGINE,
  conversation: { ...EMPTY, ...loadConversation() },
  previous: null,
  turn: null,
  trouble: null,
  context: { used: 0 },
  editing: null,
  panel: null,
  measure: NOT_MEASURED,
  kernels: new URLSearchParams(location.search).get('kernels'),
  lastProblem: null,
}));

const models = createModels(store);
const session = createSession(store, models);
const turns = createTurns(store, session);
const measure = createMeasure(store, session);

const scroller = byId('scroller');
const newest = button({ icon: icon('down'), text: 'Jump to the newest text', iconOnly: true, class: 'newest', hidden: true,
  onclick: () => follow.start() });
const follow = createFollow(scroller, () => store.get().screen === 'chat', (following) => {
  newest.hidden = following || store.get().screen !== 'chat';
});
const actions = createActions(store, {
  models, session, turns, measure,
  focusMessage,
  focusPage,
  followText: () => follow.start(),
  toTop: () => follow.toTop(),
});

const composer = createComposer(actions);
const chat = createChat(actions);
const choose = createModelsView(actions);
byId('screen').append(choose.element, chat.element);
byId('dock').append(newest, composer.element);

store.subscribe(createBar(byId('bar'), actions));
store.subscribe(choose.render);
store.subscribe(chat.render);
store.subscribe(composer.render);
store.subscribe(createPanel(byId('panel'), [byId('bar'), byId('main')], actions));
store.subscribe(follow.grown);
store.subscribe(createNarrator());
store.subscribe(createFocusKeeper(keepFocus));

keep();
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape' && !event.isComposing) actions.escape();
});
session.whenLost(() => {
  turns.cutOff();
  measure.cutOff();
});
void models.start().then(actions.resume);
keepPageForOfflineVisits();

/** A browser that cannot, in a private window for one, does without: the page only needs its server then. */
function keepPageForOfflineVisits() {
  navigator.serviceWorker?.register('/sw.js', { updateViaCache: 'none' }).catch(() => undefined);
}

/** Not where that would bring up an on-screen keyboard, and not away from where somebody is typing. */
function focusMessage() {
  const busy = document.activeElement?.closest('aside, form') ?? null;
  if (busy === null && !matchMedia('(pointer: coarse)').matches) composer.focus();
}

function focusPage() {
  scroller.focus({ preventScroll: true });
}

function keepFocus() {
  const { screen, engine } = store.get();
  focusPage();
  if (screen === 'chat' && engine.status === 'ready') focusMessage();
}

/** Keep settings and conversation, not more often than needed, and at once when the page goes away. */
function keep() {
  let { settings, conversation } = store.get();
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  let waiting;

  function write() {
    clearTimeout(waiting);
    waiting = undefined;
    const now = store.get();
    let canStore = true;
    if (now.settings !== settings) canStore = saveSettings(now.settings) && canStore;
    if (now.conversation !== conversation) canStore = saveConversation(now.conversation) && canStore;
    ({ settings, conversation } = now);
    if (canStore !== now.canStore) store.set({ canStore });
  }

  store.subscribe((now) => {
    if (now.settings.theme !== settings.theme) {
      window.dispatchEvent(new CustomEvent('tercet-theme', { detail: now.settings.theme }));
    }
    if (now.settings !== settings) write();
    else if (now.conversation !== conversation) waiting ??= setTimeout(write, SAVE_EVERY_MS);
  });
  window.addEventListener('pagehide', write);
  // Another tab of this page: the same settings and the same conversation, as long as no answer is under way here.
  // What was taken over counts as kept: writing it back could undo what the other tab does next.
  onChangeElsewhere('settings', (value) => {
    settings = sanitize(value);
    window.dispatchEvent(new CustomEvent('tercet-theme', { detail: settings.theme }));
    store.set({ settings });
  });
  onChangeElsewhere('conversation', (value) => {
    if (turns.isAnswering()) return;
    conversation = { ...sanitizeConversation(value), draft: store.get().conversation.draft };
    store.set({ conversation, editing: null, trouble: null });
    void turns.recount();
  });
}
