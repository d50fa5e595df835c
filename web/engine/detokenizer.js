/** Text out of token ids as they come: characters are never split, and stop texts never shown. */

/**
 * @typedef {object} Vocabulary  what a detokenizer must know of a tokenizer
 * @property {(id: number) => string|undefined} token
 * @property {(id: number) => boolean} isSpecial  not part of the text
 * @property {(id: number) => boolean} isAdded  stands for itself, not for bytes
 * @property {boolean} byteLevel  whether tokens are bytes written as characters (GPT-2's table)
 * @property {(ids: number[]) => string} decode
 *
 * @typedef {object} Detokenizer
 * @property {(id: number) => string} push  the text that is certain now
 * @property {() => string} finish  what is left; half characters are dropped
 */

/** @param {Vocabulary} vocabulary @returns {Detokenizer} */
export const createDetokenizer = (vocabulary) =>
  vocabulary.byteLevel ? new ByteLevel(vocabulary) : new Window(vocabulary);

/** Bytes by the character that stands for them: GPT-2 writes unprintable bytes as characters from U+0100 on. */
const BYTES = (() => {
  /** @type {Map<string, number>} */
  const table = new Map();
  let shifted = 0x100;
  for (let byte = 0; byte < 256; byte++) {
    const printable = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte !== 0xad);
    table.set(String.fromCharCode(printable ? byte : shifted++), byte);
  }
  return table;
})();

/** Tokens are bytes: the platform's own decoder holds back what is no whole character yet. @implements {Detokenizer} */
class ByteLevel {
  /** @param {Vocabulary} vocabulary */
  constructor(vocabulary) {
    this.vocabulary = vocabulary;
    this.decoder = newDecoder();
  }

  /** @param {number} id */
  push(id) {
    const { vocabulary } = this;
    const token = vocabulary.token(id);
    if (token === undefined || vocabulary.isSpecial(id)) return '';
    if (vocabulary.isAdded(id)) return this.finish() + token;
    return this.decoder.decode(
      Uint8Array.from([...token], (character) => BYTES.get(character) ?? 0),
      { stream: true },
    );
  }

  finish() {
    // What the decoder still holds is half a character: it is not shown.
    this.decoder = newDecoder();
    return '';
  }
}

const newDecoder = () => new TextDecoder('utf-8', { ignoreBOM: true });
const BYTE_TOKEN = /^<0x([0-9A-F]{2})>$/i;

/**
 * Tokens are text, whose spaces depend on their neighbours; characters outside the vocabulary come as byte tokens.
 * The text of a window of tokens is decoded with and without the new ones.
 * @implements {Detokenizer}
 */
class Window {
  /** @param {Vocabulary} vocabulary */
  constructor(vocabulary) {
    this.vocabulary = vocabulary;
    /** Tokens whose text is out; the last few decide about spaces. @type {number[]} */
    this.context = [];
    /** @type {number[]} */
    this.fresh = [];
  }

  /** @param {number} id */
  push(id) {
    if (this.vocabulary.token(id) === undefined || this.vocabulary.isSpecial(id)) return '';
    this.fresh.push(id);
    return isWhole(this.bytesAtEnd()) ? this.flush() : '';
  }

  finish() {
    const half = this.bytesAtEnd();
    if (!isWhole(half)) this.fresh.length -= half.length;
    return this.flush();
  }

  flush() {
    if (!this.fresh.length) return '';
    const before = this.context.length ? this.vocabulary.decode(this.context) : '';
    const all = [...this.context, ...this.fresh];
    const text = this.vocabulary.decode(all).slice(before.length);
    // A window must not begin inside a character, and never be empty: what is first loses its space.
    let start = Math.max(0, all.length - 4);
    while (start > 0 && this.byteOf(all[start]) !== null) start -= 1;
    this.context = all.slice(start);
    this.fresh = [];
    return text;
  }

  /** @returns {number[]} the byte tokens at the end of what is fresh */
  bytesAtEnd() {
    const bytes = [];
    for (let index = this.fresh.length - 1; index >= 0; index--) {
      const byte = this.byteOf(this.fresh[index]);
      if (byte === null) break;
      bytes.unshift(byte);
    }
    return bytes;
  }

  /** @param {number} id */
  byteOf(id) {
    const match = BYTE_TOKEN.exec(this.vocabulary.token(id) ?? '');
    return match && parseInt(match[1], 16);
  }
}

/** Whether bytes end with a whole character, or can become none. @param {number[]} bytes */
function isWhole(bytes) {
  const start = bytes.findLastIndex((byte) => (byte & 0xc0) !== 0x80);
  if (start < 0) return true;
  const lead = bytes[start];
  const length = lead < 0xc2 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 1;
  return bytes.length - start >= length;
}

/** Ends a text at the first stop text and holds back what may become one. */
export class StopFilter {
  /** @param {string[]} stops */
  constructor(stops) {
    this.stops = stops;
    this.held = '';
    this.stopped = false;
  }

  /**
   * @param {string} text
   * @returns {string} what may be shown
   */
  push(text) {
    if (this.stopped) return '';
    this.held += text;
    const found = this.stops.map((stop) => this.held.indexOf(stop)).filter((index) => index >= 0);
    this.stopped = found.length > 0;
    return this.release(this.stopped ? Math.min(...found) : this.held.length - this.longestStart());
  }

  finish() {
    return this.stopped ? '' : this.release(this.held.length);
  }

  /** @param {number} length */
  release(length) {
    const text = this.held.slice(0, length);
    this.held = this.held.slice(length);
    return text;
  }

  /** @returns {number} length of the longest end of the held text with which a stop text begins */
  longestStart() {
    const most = Math.min(this.held.length, Math.max(0, ...this.stops.map((stop) => stop.length - 1)));
    for (let length = most; length > 0; length--) {
      const end = this.held.slice(-length);
      if (this.stops.some((stop) => stop.startsWith(end))) return length;
    }
    return 0;
  }
}
