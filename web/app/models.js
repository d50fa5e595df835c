/** The list of models, what each needs on this device, and what is stored of it here. */
import { EngineClient } from '/engine/client.js';
import { largestPlan, lower } from './largest_context.js';
import { toProblem } from './problems.js';

/** @typedef {import('./types.js').Store} Store */
/** @typedef {import('./types.js').Model} Model */
/** @typedef {import('./types.js').PlanState} PlanState */

/** Bytes per value of the KV cache: q8 has one scale for each 32 values. Only until the engine's own plan is there. */
const KV_BYTES = { f16: 2, f32: 4, q8: 1 + 2 / 32 };

/**
 * @param {Model} model
 * @param {import('./types.js').Settings} settings
 * @returns {{bytes: number, contextLength: number}} GPU memory without work buffers
 */
export function estimateMemory(model, { contextLength, kvCache }) {
  const context = Math.min(contextLength, model.context);
  const { layers, kv_heads: heads, head_dim: size } = model.kv;
  return { bytes: model.resident_bytes + 2 * layers * heads * size * KV_BYTES[kvCache] * context, contextLength: context };
}

/**
 * @param {PlanState|undefined} known
 * @param {Model} model
 * @param {import('./types.js').Settings} settings
 * @returns {PlanState|null} null if it is missing or for other settings
 */
function upToDate(known, model, { contextLength, kvCache }) {
  const asked = Math.min(contextLength, model.context);
  return known?.asked === asked && known.kvCache === kvCache ? known : null;
}

/**
 * @param {Model} model
 * @param {import('./types.js').State} state
 * @returns {import('./types.js').Lowered|null} when the context that is chosen does not fit this device
 */
export const loweredFor = (model, { plans, settings }) =>
  upToDate(plans[model.id], model, settings)?.lowered ?? null;

/**
 * @param {Model} model
 * @param {import('./types.js').State} state
 * @returns {number} tokens of the context that the model is loaded with
 */
export const contextFor = (model, state) =>
  loweredFor(model, state)?.contextLength ?? Math.min(state.settings.contextLength, model.context);

/**
 * @param {Store} store
 */
export function createModels(store) {
  let generation = 0;

  async function checkSupport() {
    try {
      store.set({ support: await EngineClient.support() });
    } catch (error) {
      const { code, message } = toProblem(error);
      store.set({ support: { webgpu: false, code, message, adapter: null, limits: null, features: [] } });
    }
  }

  async function fetchList() {
    store.set({ models: { status: 'loading', list: [], problem: null } });
    try {
      const response = await fetch('/api/models', { headers: { accept: 'application/json' } });
      if (!response.ok) throw new Error(`The server answered ${response.status} ${response.statusText} for /api/models.`);
      const list = /** @type {Model[]} */ (await response.json());
      list.sort((a, b) => Number(b.default) - Number(a.default));
      store.set({ models: { status: 'ready', list, problem: null } });
    } catch (error) {
      const problem = {
        ...toProblem(error), code: 'models-unreachable',
        action: 'Check that the server is still running, then try again.',
      };
      store.set({ models: { status: 'failed', list: [], problem }, lastProblem: problem });
    }
  }

  /** Ask the engine what each model needs with the chosen context and KV cache. */
  async function plan() {
    const { models, settings } = store.get();
    const mine = ++generation;
    await Promise.all(models.list.map(async (model) => {
      const state = await planOne(model, settings);
      // A newer choice of context is being planned: this answer is out of date.
      if (mine === generation) store.set({ plans: { ...store.get().plans, [model.id]: state } });
    }));
  }

  /**
   * @param {Model} model
   * @param {import('./types.js').Settings} settings
   * @param {AbortSignal} [signal]
   * @returns {Promise<PlanState>}
   */
  async function planOne(model, { contextLength, kvCache }, signal = undefined) {
    const asked = Math.min(contextLength, model.context);
    const planAt = (/** @type {number} */ length) =>
      EngineClient.plan(model.url, { contextLength: length, kvCache, signal });
    const state = { asked, kvCache, plan: null, lowered: null, problem: null };
    try {
      const chosen = await planAt(asked);
      const smaller = chosen.fits ? null : await largestPlan(chosen, planAt);
      return { ...state, plan: smaller ?? chosen, lowered: smaller && lower(chosen, smaller) };
    } catch (error) {
      return { ...state, problem: toProblem(error) };
    }
  }

  /**
   * What this model is loaded with: the plan that is shown, if it is for the settings as they are now.
   * @param {Model} model
   * @param {AbortSignal} signal
   * @returns {Promise<PlanState>}
   */
  async function planFor(model, signal) {
    const { plans, settings } = store.get();
    return upToDate(plans[model.id], model, settings) ?? planOne(model, settings, signal);
  }

  /** @param {Model} model */
  async function remove(model) {
    try {
      await EngineClient.remove(model.url);
    } catch (error) {
      store.set({ lastProblem: toProblem(error) });
      throw error;
    } finally {
      await plan();
    }
  }

  return {
    async start() {
      await Promise.all([checkSupport(), fetchList()]);
      await plan();
    },
    async retry() {
      await fetchList();
      await plan();
    },
    plan,
    planFor,
    remove,
    /** @param {string|null} id @returns {Model|null} */
    byId: (id) => store.get().models.list.find((model) => model.id === id) ?? null,
  };
}
