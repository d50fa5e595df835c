/** Values that one side puts in as they come and the other reads in its own time. */

/** @template T */
export class Queue {
  constructor() {
    /** @type {T[]} */
    this.values = [];
    this.closed = false;
    /** @type {unknown} */
    this.error = undefined;
    this.wake = () => {};
  }

  /** @param {T} value */
  push(value) {
    this.values.push(value);
    this.wake();
  }

  /** @param {unknown} [error] what the reader gets after the last value */
  close(error) {
    this.closed = true;
    this.error = error;
    this.wake();
  }

  /** Wait for a value or the end. @returns {Promise<void>} */
  ready() {
    if (this.values.length || this.closed) return Promise.resolve();
    return new Promise((/** @type {(value: void) => void} */ resolve) => {
      this.wake = resolve;
    });
  }

  /**
   * @param {() => void} onLeave called if the reader stops before the end
   * @returns {AsyncGenerator<T, void, void>}
   */
  async *read(onLeave) {
    try {
      for (;;) {
        await this.ready();
        while (this.values.length) yield /** @type {T} */ (this.values.shift());
        if (!this.closed) continue;
        if (this.error !== undefined) throw this.error;
        return;
      }
    } finally {
      if (!this.closed) onLeave();
      while (!this.closed) {
        this.values.length = 0;
        await this.ready();
      }
    }
  }
}
