/** The steps that fill a window: which go to the GPU next, and their ids in order. */

/**
 * @typedef {import('./executor.js').Mode} Mode
 * @typedef {import('./generate.js').Session} Session
 * @typedef {import('./generate.js').Report} Report
 * @typedef {import('./speculation.js').Speculation} Speculation
 *
 * Steps in one submit. follows: whether others were on their way before them, so that the GPU did not wait.
 * @typedef {{ids: Promise<number[]>, steps: number, follows: boolean}} Batch
 */

/** Batches of plain steps that are on the GPU at a time: one computes while another is read. */
const DEPTH = 2;

export class Steps {
  /**
   * @param {Session} session
   * @param {number[]} prompt that is in the cache
   * @param {Promise<number[]>} first the id that was chosen after it
   * @param {{mode: Mode, limit: number, speculation: Speculation|null, report: Report}} options limit: ids that may be
   *   chosen, that first one included; they must have room
   */
  constructor(session, prompt, first, { mode, limit, speculation, report }) {
    this.session = session;
    this.executor = session.executor;
    this.mode = mode;
    this.limit = limit;
    this.speculation = speculation;
    this.report = report;
    /** The prompt and the ids that were taken. */
    this.tokens = [...prompt];
    this.promptLength = prompt.length;
    /** Ids that are chosen, once all that is on its way is done. */
    this.chosen = 0;
    /** @type {Batch[]} */
    this.pending = [];
    /** Whether no plain steps are submitted because a guess waits for those on their way. */
    this.draining = false;
    this.verified = false;
    this.resolved = performance.now();
    /** Time since then in which the reader of the ids was at work, in ms. */
    this.away = 0;
    this.enqueue(first, 1);
  }

  /** The last chosen token has its place in the cache only with a later step. */
  get cachedLength() {
    return this.promptLength + this.chosen - 1;
  }

  /**
   * @param {Promise<number[]>} ids
   * @param {number} steps
   */
  enqueue(ids, steps) {
    // Failures are seen when the batch is read; until then they must not count as unhandled.
    ids.catch(() => undefined);
    this.pending.push({ ids, steps, follows: this.pending.length > 0 });
    this.chosen += steps;
  }

  /** @returns {Promise<number[]>} the next ids; all before them must have been taken, and be fewer than the limit */
  async next() {
    const { speculation, executor, pending } = this;
    const most = Math.min(executor.mostVerified, this.limit - this.chosen) - 1;
    const draft = speculation?.draft(this.tokens, most, !pending.length) ?? [];
    if (!draft.length) this.enqueuePlain();
    else if (!pending.length) return this.verify(draft);
    this.draining = draft.length > 0;
    return this.read();
  }

  enqueuePlain() {
    const { executor, mode, limit, pending, speculation, session } = this;
    if (!pending.length && (this.draining || this.verified)) speculation?.ended();
    const size = Math.min(session.batch, speculation?.batch ?? Infinity);
    while (pending.length < DEPTH && this.chosen < limit) {
      const steps = Math.min(size, limit - this.chosen);
      this.enqueue(executor.decode(mode, steps, this.chosen, this.cachedLength), steps);
    }
  }

  async read() {
    const { pending, session } = this;
    const { ids: promise, steps, follows } = pending[0];
    const ids = await promise;
    const took = performance.now() - this.resolved;
    if (follows) {
      session.adapt(took / steps);
      // A slow reader says nothing about the device.
      if (this.away < took / 2) session.costs?.sawPlain(took / steps);
    }
    pending.shift();
    this.verified = false;
    this.restartClock();
    return ids;
  }

  /** @param {number[]} draft */
  async verify(draft) {
    const { executor, mode, tokens, report } = this;
    const began = performance.now();
    const ids = await executor.verify(mode, [tokens[tokens.length - 1], ...draft], this.cachedLength, this.chosen);
    this.chosen += ids.length;
    this.speculation?.sawVerified(draft, ids.length - 1, performance.now() - began);
    report.verifications += 1;
    report.drafted += draft.length;
    report.accepted += ids.length - 1;
    this.verified = true;
    this.draining = false;
    this.restartClock();
    return ids;
  }

  restartClock() {
    this.resolved = performance.now();
    this.away = 0;
  }

  /** @param {number} id of those that `next` gave */
  take(id) {
    this.tokens.push(id);
    if (!this.verified) this.speculation?.sawToken(this.tokens);
  }

  /** @returns {Promise<number[]>} the tokens that are in the cache, once nothing is on its way any more */
  async end() {
    await Promise.allSettled(this.pending.map(({ ids }) => ids));
    return this.tokens.slice(0, this.cachedLength);
  }
}
