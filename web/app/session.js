/** The life of the engine: load, cancel, lose, load again. Holds the one object that is not plain data. */
import { EngineClient } from '/engine/client.js';
import { contextFor } from './models.js';
import { smallerContext, toProblem } from './problems.js';
import { NO_PROGRESS, advance } from './progress.js';
import { load as loadKept, save } from './storage.js';

/** @typedef {import('./types.js').Store} Store */
/** @typedef {import('./types.js').Model} Model */
/** @typedef {import('./types.js').EngineState} EngineState */
/** @typedef {{modelId: string, unfinished: number}} Resume */

/** @type {Readonly<EngineState>} */
export const NO_ENGINE = Object.freeze({
  status: /** @type {const} */ ('none'), modelId: null, info: null, progress: null, problem: null, proposedContext: null,
  lowered: null, loadMs: null,
});

/** A load that got past its download this often without ending has likely taken the tab with it. */
const MOST_UNFINISHED = 2;

/**
 * @param {Store} store
 * @param {ReturnType<typeof import('./models.js').createModels>} models
 */
export function createSession(store, models) {
  /** @type {EngineClient|null} */
  let engine = null;
  /** @type {AbortController|null} */
  let loading = null;
  /** @type {Promise<void>} the end of the latest load, whichever way it ended */
  let settled = Promise.resolve();
  let onLost = () => {};

  /** @param {Partial<EngineState>} patch */
  const patch = (patch) => store.set({ engine: { ...store.get().engine, ...patch } });

  /**
   * Takes the place of the model that is loaded, and of a load under way.
   * @param {Model} model
   * @returns {Promise<void>} never rejects: a failure becomes part of the state
   */
  function load(model) {
    loading?.abort();
    const controller = new AbortController();
    loading = controller;
    store.set({
      screen: 'chat', trouble: null,
      engine: { ...NO_ENGINE, status: 'loading', modelId: model.id, progress: NO_PROGRESS },
    });
    remember(model.id);
    settled = settled.then(() => loadNow(model, controller));
    return settled;
  }

  /**
   * @param {Model} model
   * @param {AbortController} controller
   */
  async function loadNow(model, controller) {
    await dispose();
    const { settings, kernels } = store.get();
    const { lowered } = await models.planFor(model, controller.signal);
    const started = performance.now();
    try {
      const loaded = await EngineClient.load(model.url, {
        contextLength: lowered?.contextLength ?? Math.min(settings.contextLength, model.context),
        kvCache: settings.kvCache,
        ...(kernels === null ? {} : { kernels }),
        signal: controller.signal,
        onProgress: (event) => {
          if (loading !== controller) return;
          const progress = advance(store.get().engine.progress ?? NO_PROGRESS, event, performance.now() - started);
          // From here on memory is filled: if the tab dies now, do not try for ever (see resume).
          if (event.phase === 'expand' && !store.get().engine.progress?.phases.expand) remember(model.id, 1);
          patch({ progress });
        },
      });
      if (loading !== controller) {
        await loaded.dispose();
        return;
      }
      loading = null;
      become(loaded, model, lowered);
    } catch (error) {
      if (loading !== controller) return;
      loading = null;
      fail(error, model);
    }
  }

  /**
   * @param {EngineClient} loaded
   * @param {Model} model
   * @param {import('./types.js').Lowered|null} lowered
   */
  function become(loaded, model, lowered) {
    engine = loaded;
    save('resume', { modelId: model.id, unfinished: 0 });
    const loadMs = store.get().engine.progress?.startedAt ?? null;
    patch({ status: 'ready', info: loaded.info, progress: null, problem: null, lowered, loadMs });
    void loaded.lost.then((reason) => {
      if (engine === loaded) lose(reason);
    });
    void models.plan();
  }

  /**
   * @param {unknown} error
   * @param {Model} model
   */
  function fail(error, model) {
    const problem = toProblem(error);
    save('resume', null);
    void models.plan();
    if (problem.code === 'aborted') {
      store.set({ engine: NO_ENGINE, screen: 'choose' });
      return;
    }
    patch({ status: 'failed', problem, progress: null, proposedContext: proposal(problem, model) });
    store.set({ lastProblem: problem });
  }

  /**
   * @param {import('./types.js').Problem} problem
   * @param {Model} model
   */
  function proposal(problem, model) {
    const perToken = store.get().plans[model.id]?.plan?.kvBytesPerToken ?? null;
    return smallerContext(problem, contextFor(model, store.get()), perToken);
  }

  /**
   * The GPU is gone. What was said stays.
   * @param {unknown} reason
   */
  function lose(reason) {
    const lost = engine;
    engine = null;
    const { modelId } = store.get().engine;
    const model = models.byId(modelId);
    const problem = toProblem(reason);
    patch({ status: 'lost', info: null, problem, proposedContext: model ? proposal(problem, model) : null });
    store.set({ lastProblem: problem });
    onLost();
    void lost?.dispose().catch(() => undefined);
  }

  async function dispose() {
    const old = engine;
    engine = null;
    await old?.dispose().catch(() => undefined);
  }

  /**
   * Keep which model to go on with after a reload.
   * @param {string} modelId
   * @param {number} [more] loads that have begun to fill memory and not ended
   */
  function remember(modelId, more = 0) {
    const kept = readResume();
    save('resume', { modelId, unfinished: (kept?.modelId === modelId ? kept.unfinished : 0) + more });
  }

  /**
   * The model of the last visit, unless loading it is what closed the tab: then the page says so instead.
   * @returns {Model|null}
   */
  function toResume() {
    const kept = readResume();
    const model = models.byId(kept?.modelId ?? null);
    if (!kept || !model || !store.get().support?.webgpu) return null;
    if (kept.unfinished < MOST_UNFINISHED) return model;
    save('resume', null);
    const problem = {
      code: 'load-unfinished', detail: {},
      message: `${model.name} was loaded twice and the page closed before it was ready. `
        + 'The likely reason is that memory ran out.',
      action: 'A smaller context needs less memory.',
    };
    store.set({
      screen: 'chat', lastProblem: problem,
      engine: { ...NO_ENGINE, status: 'failed', modelId: model.id, problem, proposedContext: proposal(problem, model) },
    });
    return null;
  }

  return {
    load,
    toResume,
    lose,
    cancel: () => loading?.abort(),
    /** @param {() => void} callback after the engine was lost */
    whenLost(callback) {
      onLost = callback;
    },
    /** @returns {EngineClient|null} null unless a model is ready */
    engine: () => engine,
  };
}

/** @returns {Resume|null} */
function readResume() {
  const kept = /** @type {Partial<Resume>|null} */ (loadKept('resume'));
  if (typeof kept?.modelId !== 'string' || typeof kept.unfinished !== 'number') return null;
  return { modelId: kept.modelId, unfinished: kept.unfinished };
}
