/** Measuring how fast this device runs the loaded model. The engine measures; this keeps what the page shows of it. */
import { endsEngine, toProblem } from './problems.js';

/** @typedef {import('./types.js').Store} Store */
/** @typedef {import('./types.js').State} State */
/** @typedef {import('./types.js').MeasureState} MeasureState */

/** @type {Readonly<MeasureState>} */
export const NOT_MEASURED = Object.freeze({
  status: /** @type {const} */ ('none'), progress: null, report: null, problem: null,
});

/**
 * Why nothing can be measured now, in words; '' when it can.
 * @param {State} state
 */
export function whyNot({ engine, turn }) {
  if (engine.status === 'loading') return 'The model is still being loaded.';
  if (engine.status !== 'ready') return 'Load a model first: it is measured with one.';
  return turn ? 'An answer is being written. Stop it, or wait for its end.' : '';
}

/**
 * @param {Store} store
 * @param {ReturnType<typeof import('./session.js').createSession>} session
 */
export function createMeasure(store, session) {
  /** @type {AbortController|null} */
  let running = null;
  /** @type {Promise<void>} the end of the latest measurement */
  let settled = Promise.resolve();

  /** @param {Partial<MeasureState>} patch */
  const patch = (patch) => store.set({ measure: { ...store.get().measure, ...patch } });

  async function run() {
    const engine = session.engine();
    if (!engine || running || whyNot(store.get())) return;
    const mine = new AbortController();
    running = mine;
    store.set({ measure: { ...NOT_MEASURED, status: 'running' } });
    try {
      const report = await engine.measure({
        signal: mine.signal,
        // A program on the processor needs minutes for what a GPU does in seconds.
        quick: engine.info.adapter?.software === true,
        onProgress: (progress) => {
          if (running === mine) patch({ progress });
        },
      });
      if (running === mine) end({ status: 'done', report });
    } catch (error) {
      if (running === mine) stumble(error);
    }
  }

  /** @param {Partial<MeasureState>} outcome */
  function end(outcome) {
    running = null;
    store.set({ measure: { ...NOT_MEASURED, ...outcome } });
  }

  /** @param {unknown} error */
  function stumble(error) {
    const problem = toProblem(error);
    if (problem.code === 'aborted') {
      end({ status: 'stopped' });
      return;
    }
    end({ status: 'failed', problem });
    store.set({ lastProblem: problem });
    if (endsEngine(problem)) session.lose(problem);
  }

  return {
    run() {
      settled = run();
      return settled;
    },
    stop: () => running?.abort(),
    isRunning: () => running !== null,
    settled: () => settled,
    /** The engine is gone, and with it whoever would have ended the measurement. */
    cutOff() {
      if (running) end({ status: 'failed', problem: store.get().engine.problem });
    },
  };
}
