/** Waiting for several things, and stopping early. */
import { throwIfAborted } from './errors.js';

/**
 * For work that cannot be interrupted but may be left alone.
 * @template T
 * @param {Promise<T>} promise
 * @param {AbortSignal} [signal]
 * @returns {Promise<T>} rejects with `aborted` as soon as the signal fires
 */
export async function unlessAborted(promise, signal) {
  throwIfAborted(signal);
  if (!signal) return promise;
  let onAbort = () => {};
  const aborted = new Promise((/** @type {(value: void) => void} */ resolve) => {
    onAbort = resolve;
    signal.addEventListener('abort', onAbort, { once: true });
  });
  try {
    return /** @type {T} */ (await Promise.race([promise, aborted.then(() => throwIfAborted(signal))]));
  } finally {
    signal.removeEventListener('abort', onAbort);
  }
}

/**
 * Run tasks side by side; the first failure stops the others and is thrown once all have ended, so that none of them
 * touches what the caller then takes down.
 * @template T
 * @param {AbortSignal|undefined} outer
 * @param {((signal: AbortSignal) => Promise<T>)[]} tasks
 * @returns {Promise<T[]>}
 */
export async function together(outer, tasks) {
  const stop = new AbortController();
  const signal = outer ? AbortSignal.any([outer, stop.signal]) : stop.signal;
  /** @type {unknown[]} */
  const failures = [];
  const results = await Promise.all(
    tasks.map((task) =>
      task(signal).catch((error) => {
        failures.push(error);
        stop.abort();
      }),
    ),
  );
  if (failures.length) throw failures[0];
  return /** @type {T[]} */ (results);
}

/**
 * Work through a list, a few items at a time; see `together` for failures.
 * @template T
 * @param {T[]} items
 * @param {number} width items at a time
 * @param {AbortSignal|undefined} signal
 * @param {(item: T, signal: AbortSignal) => Promise<unknown>} work
 * @returns {Promise<void>}
 */
export async function inParallel(items, width, signal, work) {
  const waiting = [...items];
  const worker = async (/** @type {AbortSignal} */ inner) => {
    for (let item = waiting.shift(); item !== undefined; item = waiting.shift()) {
      throwIfAborted(inner);
      await work(item, inner);
    }
  };
  await together(signal, new Array(width).fill(worker));
}
