/** Stands in for the GPU in tests of the loop that makes tokens. */
import assert from 'node:assert/strict';

import { Session, newReport } from '../../web/engine/generate.js';
import { checkSampling } from '../../web/engine/sampling.js';

export const INVALID = 0xffffffff;

/**
 * A "model" whose next id is a function of the ids in its cache and the set of those that occurred, so that a wrong
 * position, a stale cache or a guess that was taken too easily shows as another answer. What it is told is checked
 * against what it holds.
 */
export class FakeExecutor {
  constructor(next, { chunk = 4, verifies = false, wait = setTimeout } = {}) {
    Object.assign(this, { next, chunk, verifies, mostVerified: 8, ringSize: 256, log: [], unread: 0, mostUnread: 0 });
    /** Rows of the cache, of which the first `filled` are valid. */
    Object.assign(this, { wait, cache: [], filled: 0, produced: 0, seenIds: new Set() });
  }

  begin(sampling, seen) {
    this.seen = seen;
    this.seenIds = new Set(
      Array.from({ length: 32 * seen.length }, (_, id) => id).filter((id) => seen[id >>> 5] & (1 << (id & 31))),
    );
  }

  read(ids) {
    this.unread += 1;
    this.mostUnread = Math.max(this.mostUnread, this.unread);
    return new Promise((resolve) =>
      this.wait(() => {
        this.unread -= 1;
        resolve(ids);
      }, 1),
    );
  }

  append(id) {
    this.cache[this.filled] = id;
    this.filled += 1;
  }

  choose() {
    const id = this.next(this.cache.slice(0, this.filled), this.seenIds);
    this.seenIds.add(id);
    this.produced += 1;
    this.pending = id;
    return id;
  }

  async prefill(ids, position, mode) {
    assert.ok(ids.length <= this.chunk && position <= this.filled, 'no hole in the cache');
    this.filled = position;
    this.produced = 0;
    ids.forEach((id) => this.append(id));
    this.log.push(['prefill', ids.length, position, mode]);
    return { ids: mode ? this.read([this.choose()]) : null };
  }

  decode(mode, steps, produced, position) {
    assert.deepEqual([produced, position], [this.produced, this.filled], 'ids since the prompt, tokens in the cache');
    this.log.push(['decode', steps, produced]);
    const ids = Array.from({ length: steps }, () => {
      this.append(this.pending);
      return this.choose();
    });
    return this.read(ids);
  }

  verify(mode, ids, position, produced) {
    assert.equal(this.unread, 0, 'verification begins when all is read');
    assert.deepEqual([produced, position, ids[0]], [this.produced, this.filled, this.pending]);
    assert.ok(ids.length >= 2 && ids.length <= this.mostVerified, `${ids.length} tokens to verify`);
    const chosen = [];
    for (const [row, id] of ids.entries()) {
      if (row > 0 && chosen[row - 1] !== id) break;
      this.append(id);
      chosen.push(this.choose());
    }
    // Rows of guesses that were wrong are in the cache too, behind its end.
    ids.slice(chosen.length).forEach((id, index) => (this.cache[this.filled + index] = id));
    this.log.push(['verify', ids.length, position, chosen.length]);
    return this.read(chosen);
  }

  count(kind) {
    return this.log.filter(([one]) => one === kind).length;
  }
}

/** The sum of all ids before, below 50; deterministic and sensitive to everything. */
export const sum = (ids) => (ids.reduce((total, id, index) => total + id * (index + 1), 7) % 50) + 10;

export const sessionOn = (executor, contextLength = 64) =>
  new Session(executor, { vocabulary: 100, contextLength, invalidId: INVALID });

export const session = (next = sum, options = {}) => sessionOn(new FakeExecutor(next, options), options.contextLength);

/** All ids; `onId` gets each with the number of those so far, and stops the reading by giving true. */
export async function run(subject, prompt, options = {}, report = newReport()) {
  const { stopIds = [], signal, onPrompt, onRoll, onId, speculation, contextFull, ...sampling } = options;
  const request = {
    sampling: checkSampling({ temperature: 0, ...sampling }),
    stopIds: new Set(stopIds),
    ...{ signal, onPrompt, onRoll, speculation, contextFull },
  };
  const ids = [];
  for await (const id of subject.run(prompt, request, report)) {
    ids.push(id);
    if (onId?.(ids.length)) break;
  }
  return ids;
}

/** The answer by the definition, one id at a time. */
export function expected(prompt, count, next = sum) {
  const all = [...prompt];
  const seen = new Set(prompt);
  for (let index = 0; index < count; index++) {
    all.push(next(all, seen));
    seen.add(all.at(-1));
  }
  return all.slice(prompt.length);
}

/**
 * A fake with a clock of its own: steps one after the other, `stepMs` a plain one and `verifyMs(k)` for k tokens, and
 * results that arrive `waitMs` later. Time passes only where somebody waits for a result.
 */
export class TimedExecutor extends FakeExecutor {
  constructor(next, { stepMs, verifyMs, waitMs, ...options }) {
    super(next, { chunk: 512, verifies: true, ...options });
    Object.assign(this, { stepMs, verifyMs, waitMs, now: 0, busyUntil: 0 });
  }

  /** What takes this long is submitted; awaiting the result moves the clock. */
  submit(ms, ids) {
    this.busyUntil = Math.max(this.now, this.busyUntil) + ms;
    const arrives = this.busyUntil + this.waitMs;
    this.unread += 1;
    const wait = () => {
      this.now = Math.max(this.now, arrives);
      this.unread -= 1;
      return ids;
    };
    let asked = null;
    return {
      then: (resolve, reject) => (asked ??= Promise.resolve().then(wait)).then(resolve, reject),
      catch: () => undefined,
    };
  }

  read(ids) {
    return ids;
  }

  async prefill(ids, position, mode) {
    const step = await super.prefill(ids, position, mode);
    return { ids: mode ? this.submit(this.stepMs, step.ids) : null };
  }

  decode(mode, steps, produced, position) {
    return this.submit(steps * this.stepMs, super.decode(mode, steps, produced, position));
  }

  verify(mode, ids, position, produced) {
    return this.submit(this.verifyMs(ids.length), super.verify(mode, ids, position, produced));
  }

  /** `work` with performance.now() of this device. */
  async timed(work) {
    const { now } = performance;
    performance.now = () => this.now;
    try {
      return await work();
    } finally {
      performance.now = now;
    }
  }
}
