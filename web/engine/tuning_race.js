/** Which of several settings is the fastest, found within a budget. The Python twin is in shaders/native_tuning.py. */

/** All measuring of a load stays below 300 ms; what did not get its turn keeps its default until the next load. */
export const BUDGET_MS = 280;
/** Of one measurement: long enough to drown what a submit costs. */
const TARGET_MS = 3;
const REPEATS = 3;
const MOST_ROUNDS = 64;
/** What is slower than the best by this factor is not timed again. */
const HOPELESS = 1.25;
/** A candidate must be faster than the default by this share. */
const MARGIN = 0.03;

/**
 * Decide, within a budget, which setting of each kind is the fastest; first for the kinds that take the most time.
 * @param {{key: string, settings: unknown[]}[]} kinds
 * @param {(kind: number, setting: number, rounds: number) => Promise<number>} time  ms of some rounds, or of a part of
 *   one, over all operations of a kind; 0: of one operation
 * @param {{budgetMs?: number, now?: () => number}} [options]
 * @returns {Promise<Map<string, number>>} of the kinds that had their turn
 */
export async function chooseFastest(kinds, time, { budgetMs = BUDGET_MS, now = () => performance.now() } = {}) {
  const end = now() + budgetMs;
  /** @type {{kind: number, took: number}[]} */
  const order = [];
  for (const kind of kinds.keys()) {
    if (now() < end) order.push({ kind, took: await time(kind, 0, 1) });
  }
  order.sort((a, b) => b.took - a.took);
  /** @type {Map<string, number>} */
  const chosen = new Map();
  for (const { kind, took } of order) {
    const { key, settings } = kinds[kind];
    const best = await race(
      settings.length,
      took,
      (setting, rounds) => time(kind, setting, rounds),
      (wanted) => now() + wanted < end,
    );
    if (!best) continue;
    const fastest = best.indexOf(Math.min(...best));
    chosen.set(key, best[fastest] < (1 - MARGIN) * best[0] ? fastest : 0);
  }
  return chosen;
}

/**
 * The best time of each setting.
 * @param {number} count  settings
 * @param {number} took  ms of a round
 * @param {(setting: number, rounds: number) => Promise<number>} time
 * @param {(ms: number) => boolean} hasTime
 * @returns {Promise<number[]|null>} null: the time did not suffice
 */
async function race(count, took, time, hasTime) {
  const rounds = Math.min(MOST_ROUNDS, TARGET_MS / took);
  const best = new Array(count).fill(Infinity);
  let longest = took * rounds;
  // Turn by turn, so that a clock that rises meanwhile serves all alike; the first turn warms up.
  for (let turn = 0; turn <= REPEATS; turn++) {
    for (let setting = 0; setting < count; setting++) {
      if (turn > 1 && best[setting] > HOPELESS * Math.min(...best)) continue;
      if (!hasTime(longest)) return null;
      const found = await time(setting, turn ? rounds : 0);
      if (turn === 0) continue;
      best[setting] = Math.min(best[setting], found);
      longest = Math.max(longest, found);
    }
  }
  return best;
}
