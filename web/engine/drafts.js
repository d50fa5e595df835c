/**
 * Guesses at the next tokens, which the model then verifies in one step.
 *
 * @typedef {object} DraftSource  a head of the model that predicts several tokens would be another one
 * @property {(ids: number[], most: number) => number[]} propose  what may follow `ids`, at most `most` tokens, none
 *   when it has no idea. Asked after every token, so it must be quick. From call to call `ids` is the same array,
 *   grown, or else another array.
 * @property {(proposed: number[], accepted: number) => void} settle  what became of a proposal, or of its beginning:
 *   the model itself chose the first `accepted` tokens of it, and not the one after them
 */

/** Above every token id, so that two numbers make one key; with a position it stays below 2^53. */
const BASE = 2 ** 26;

/**
 * The last occurrence of what was written before most often goes on as it did then: code, tables, quotations.
 * Every pair and every triple of tokens leads to where it last ended, so a token costs two look-ups, however long the
 * text is.
 * @implements {DraftSource}
 */
export class PromptLookup {
  constructor() {
    /** What is indexed: the array that was given last, and a copy of its beginning. @type {number[]|null} */
    this.seen = null;
    /** @type {number[]} */
    this.ids = [];
    this.pairs = new Trail();
    this.triples = new Trail();
  }

  /** @param {number[]} ids @param {number} most */
  propose(ids, most) {
    this.read(ids);
    const last = ids.length - 1;
    const match = this.triples.before[last] ?? -1;
    const from = match >= 0 ? match : (this.pairs.before[last] ?? -1);
    /** @type {number[]} */
    const draft = [];
    if (from < 0) return draft;
    // Where what followed reaches the end of the text it goes on with itself: the text repeats with that period.
    for (let at = from + 1; draft.length < most; at++) draft.push(at <= last ? ids[at] : draft[at - last - 1]);
    return draft;
  }

  /** The text is all that it learns from. */
  settle() {}

  /** @param {number[]} ids */
  read(ids) {
    if (ids !== this.seen || ids.length < this.ids.length) {
      let common = 0;
      while (common < this.ids.length && this.ids[common] === ids[common]) common++;
      this.forget(common);
      this.seen = ids;
    }
    for (let at = this.ids.length; at < ids.length; at++) {
      this.ids.push(ids[at]);
      this.pairs.add(at < 1 ? null : ids[at - 1] * BASE + ids[at]);
      // A pair is known by where it ended first: a small number, and the same as long as the pair is there.
      this.triples.add(at < 2 ? null : this.pairs.first[at - 1] * BASE + ids[at]);
    }
  }

  /** @param {number} length what is kept */
  forget(length) {
    this.ids.length = length;
    this.pairs.cut(length);
    this.triples.cut(length);
  }
}

/** Where each key occurred last, and before that: what was added last can be taken back. */
class Trail {
  constructor() {
    /** @type {Map<number, number>} */
    this.last = new Map();
    /** @type {(number|null)[]} */
    this.keys = [];
    /** By position, the last one before it with the same key; -1: none. @type {number[]} */
    this.before = [];
    /** By position, the first one with the same key. @type {number[]} */
    this.first = [];
  }

  /** @param {number|null} key of the next position; null: it has none */
  add(key) {
    const at = this.keys.length;
    const before = key === null ? -1 : (this.last.get(key) ?? -1);
    this.keys.push(key);
    this.before.push(before);
    this.first.push(before < 0 ? at : this.first[before]);
    if (key !== null) this.last.set(key, at);
  }

  /** @param {number} length */
  cut(length) {
    for (let at = this.keys.length - 1; at >= length; at--) {
      const key = this.keys[at];
      if (key === null) continue;
      if (this.before[at] < 0) this.last.delete(key);
      else this.last.set(key, this.before[at]);
    }
    this.keys.length = length;
    this.before.length = length;
    this.first.length = length;
  }
}
