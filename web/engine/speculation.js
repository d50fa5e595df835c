/**
 * When guessing pays. Verifying k tokens in one step takes less than k steps, but it has to wait for its result, and
 * only the guesses that were right count. So the cost of both ways is measured, and so is how often guesses are right.
 */
import { checkSampling, samplingWords, seenBits } from './sampling.js';

/**
 * @typedef {import('./drafts.js').DraftSource} DraftSource
 * @typedef {import('./executor.js').Executor} Executor
 * @typedef {import('./ways.js').Ways['speculation']} Way
 */

/** Of guesses, and of a token that comes after them, where nothing is known yet. */
const PRIOR = 0.5;
/** It counts as much as this many observations. */
const PRIOR_WEIGHT = 3;
/** How much a new observation counts at least: of a guess, of a cost. */
const LEARNING = 1 / 16;
const COST_LEARNING = 1 / 8;
/** A pause of the machine is no cost: an observation counts as at most this many times what was expected. */
const OUTLIER = 2;
/** Guessing must win by this, for what is measured is never exact. */
const MARGIN = 1.1;
/** After this many tokens without it a verification is tried, where guesses are good: its cost may have changed. */
const RETRY = 256;
/** Steps of a plain batch where guessing would pay once a guess was right: to know soon that one was. */
const SHORT_BATCH = 8;
/** Verifications between two times of plain steps, where nothing is known yet, and the least. */
const RUN_PRIOR = 2;
const LEAST_RUN = 0.1;

/** Sizes that are timed at load: the extremes first, for there may be no time for more. */
const TIMED = [1, 8, 4, 2];
const ROUNDS = 3;
const PLAIN_STEPS = 8;

/** @param {number} average @param {number} value @param {number} rate */
const towards = (average, value, rate) => average + (value - average) * rate;

/** What steps take on this device, in ms: running averages. */
export class Costs {
  /**
   * @param {number} plain a plain step, while the next ones are on their way already
   * @param {Map<number, number>} measured verifying k tokens, with the wait for the result; k = 1 at least
   * @param {number} most tokens that are ever verified at a time
   */
  constructor(plain, measured, most) {
    this.plain = plain;
    /** By k. @type {number[]} */
    this.verify = [0];
    const sizes = [...measured.keys()].sort((a, b) => a - b);
    for (let k = 1; k <= most; k++) {
      const below = sizes.findLast((size) => size <= k) ?? sizes[0];
      const above = sizes.find((size) => size >= k);
      const [low, high] = [below, above ?? below].map((size) => measured.get(size) ?? 0);
      // Beyond what was measured it is taken that nothing is shared: guessing never pays there.
      if (above === undefined) this.verify.push((low * k) / below);
      else this.verify.push(below === above ? low : low + ((high - low) * (k - below)) / (above - below));
    }
    for (let k = most - 1; k >= 1; k--) this.verify[k] = Math.min(this.verify[k], this.verify[k + 1]);
    /** The device is idle this long when it gets no work before the last token is known here. */
    this.wait = Math.max(0, this.verify[1] - plain);
  }

  /** @param {number} ms */
  sawPlain(ms) {
    this.plain = towards(this.plain, Math.min(ms, OUTLIER * this.plain), COST_LEARNING);
  }

  /** @param {number} k @param {number} ms */
  sawVerify(k, ms) {
    const { verify } = this;
    const cost = towards(verify[k], Math.min(ms, OUTLIER * verify[k]), COST_LEARNING);
    // Fewer tokens never cost more: what one size teaches holds for the others as a bound.
    for (let other = 1; other < verify.length; other++) {
      if (other <= k) verify[other] = Math.min(verify[other], cost);
      else verify[other] = Math.max(verify[other], cost);
    }
    verify[k] = cost;
  }
}

/**
 * Time both ways on the device. Overwrites the start of the cache and what `begin` set.
 * @param {Executor} executor
 * @param {{contextLength: number, vocabulary: number, budgetMs?: number, now?: () => number}} options budgetMs: no step
 *   begins later than this
 * @returns {Promise<Costs>}
 */
export async function measureCosts(
  executor,
  { contextLength, vocabulary, budgetMs = 100, now = () => performance.now() },
) {
  const most = Math.min(executor.mostVerified, contextLength);
  const sizes = TIMED.filter((size) => size <= most);
  const end = now() + budgetMs;
  executor.begin(samplingWords(checkSampling({ seed: 0 })), seenBits([], vocabulary));
  /** The least of each size: a step may be disturbed, and the first ones warm up. @type {Map<number, number>} */
  const measured = new Map();
  let plain = Infinity;
  for (let round = 0; round < ROUNDS; round++) {
    for (const size of sizes) {
      const began = now();
      if (began >= end && measured.size) break;
      const { length } = await executor.verify('random', new Array(size).fill(0), 0, 0);
      const took = now() - began;
      measured.set(size, Math.min(took, measured.get(size) ?? Infinity));
      if (size > 1) continue;
      const steps = Math.min(PLAIN_STEPS, (contextLength - length) >> 1, Math.floor((end - now()) / (2 * took)));
      if (steps >= 1) plain = Math.min(plain, await timePlain(executor, steps, length, now));
    }
  }
  return new Costs(Math.min(plain, ...measured.values()), measured, most);
}

/**
 * @param {Executor} executor
 * @param {number} steps
 * @param {number} position
 * @param {() => number} now
 * @returns {Promise<number>} ms of a step
 */
async function timePlain(executor, steps, position, now) {
  const first = executor.decode('random', steps, position, position);
  const second = executor.decode('random', steps, position + steps, position + steps);
  const [began] = await Promise.all([first.then(now), second]);
  return (now() - began) / steps;
}

/** The guessing of one answer. */
export class Speculation {
  /**
   * @param {Exclude<Way, 'off'>} way
   * @param {DraftSource} source
   * @param {Costs|null} costs may be null where they do not matter
   * @param {number} most tokens that can be verified at a time
   */
  constructor(way, source, costs, most) {
    this.costs = way === 'always' ? null : costs;
    this.source = source;
    /** How often a guess was right after i in a row that were; the last one counts for more too. @type {number[]} */
    this.acceptance = new Array(Math.max(0, most - 1)).fill(PRIOR);
    /** Observations of each, and the prior's. @type {number[]} */
    this.known = this.acceptance.map(() => PRIOR_WEIGHT);
    /**
     * Guesses that are not verified: plain steps show whether they were right.
     * @type {{draft: number[], right: number}|null}
     */
    this.shadow = null;
    /** Of the last tokens, so many were guessed right in a row. */
    this.streak = 0;
    this.plainTokens = 0;
    this.run = 0;
    this.usualRun = RUN_PRIOR;
  }

  /**
   * @param {number} most guesses that there is room for
   * @param {boolean} [drained] whether the device waits already; else guessing has to pay for the wait too
   * @param {number} [streak]
   * @returns {number} guesses to verify, so that the tokens per ms are most; 0: plain steps are better
   */
  length(most, drained = true, streak = this.streak) {
    const { costs, acceptance } = this;
    const limit = Math.min(most, acceptance.length);
    if (!costs) return Math.max(0, limit);
    const switching = drained ? 0 : costs.wait / Math.max(LEAST_RUN, this.usualRun);
    let best = 0;
    let bestRate = 0;
    let tokens = 1;
    let chance = 1;
    for (let guesses = 1; guesses <= limit; guesses++) {
      chance *= acceptance[this.place(streak + guesses - 1)];
      tokens += chance;
      const rate = tokens / (costs.verify[guesses + 1] + switching);
      if (rate <= bestRate) continue;
      best = guesses;
      bestRate = rate;
    }
    if (bestRate * costs.plain > MARGIN) return best;
    // No verification costs less than that of one token.
    const mightPay = tokens * costs.plain > MARGIN * costs.verify[1];
    return mightPay && this.plainTokens >= RETRY ? best : 0;
  }

  /**
   * @param {number[]} ids
   * @param {number} most
   * @param {boolean} drained as in `length`
   * @returns {number[]} guesses that are worth a verification
   */
  draft(ids, most, drained) {
    const wanted = this.length(most, drained);
    if (!wanted) return [];
    const draft = this.source.propose(ids, wanted);
    return draft.slice(0, draft.length < wanted ? this.length(draft.length, drained) : wanted);
  }

  /** @param {number} row guesses that were right in a row @returns {number} where `acceptance` has what follows */
  place(row) {
    return Math.min(row, this.acceptance.length - 1);
  }

  /** @returns {number} the most steps of a plain batch */
  get batch() {
    if (!this.costs) return 1;
    return this.length(Infinity, false, Math.max(1, this.streak)) ? SHORT_BATCH : Infinity;
  }

  /**
   * A plain step chose the last one of these. Whether a guess is right does not depend on how the token is made, so the
   * acceptance is known before anything is verified, and after it has become bad.
   * @param {number[]} ids
   */
  sawToken(ids) {
    if (!this.costs) return;
    this.plainTokens += 1;
    const { shadow } = this;
    const isRight = shadow !== null && ids[ids.length - 1] === shadow.draft[shadow.right];
    if (shadow) this.learn(isRight);
    else this.streak = 0;
    if (shadow && isRight && ++shadow.right < shadow.draft.length) return;
    if (shadow) this.source.settle(shadow.draft, shadow.right);
    const draft = this.source.propose(ids, this.acceptance.length);
    this.shadow = draft.length ? { draft, right: 0 } : null;
  }

  /**
   * @param {number[]} draft
   * @param {number} accepted
   * @param {number} ms that the verification took
   */
  sawVerified(draft, accepted, ms) {
    this.plainTokens = 0;
    this.run += 1;
    this.shadow = null;
    this.source.settle(draft, accepted);
    for (let guess = 0; guess < Math.min(draft.length, accepted + 1); guess++) this.learn(guess < accepted);
    this.costs?.sawVerify(draft.length + 1, ms);
  }

  /** The device waited for guesses, and now it goes on with plain steps. */
  ended() {
    this.usualRun = towards(this.usualRun, this.run, COST_LEARNING);
    this.run = 0;
  }

  /** @param {boolean} isRight the next guess */
  learn(isRight) {
    const place = this.place(this.streak);
    this.known[place] += 1;
    const rate = Math.max(LEARNING, 1 / this.known[place]);
    this.acceptance[place] = towards(this.acceptance[place], isRight ? 1 : 0, rate);
    this.streak = isRight ? this.streak + 1 : 0;
  }
}
