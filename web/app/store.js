/**
 * The one place where the page's state lives. Views read it and never change it; actions replace parts of it.
 * @template {object} S
 * @param {S} initial
 */
export function createStore(initial) {
  let state = initial;
  let scheduled = false;
  /** @type {Set<(state: S) => void>} */
  const listeners = new Set();

  function flush() {
    scheduled = false;
    for (const listener of listeners) listener(state);
  }

  // Many changes between two frames (tokens, bytes) become one rendering. A hidden page has no frames.
  function schedule() {
    if (scheduled) return;
    scheduled = true;
    if (document.hidden) setTimeout(flush, 100);
    else requestAnimationFrame(flush);
  }

  return {
    /** @returns {S} */
    get: () => state,
    /** @param {Partial<S>} patch */
    set(patch) {
      state = { ...state, ...patch };
      schedule();
    },
    /** @param {(state: S) => void} listener called at most once a frame */
    subscribe(listener) {
      listeners.add(listener);
      schedule();
    },
  };
}
