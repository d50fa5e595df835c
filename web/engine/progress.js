/** Progress of a load, by phase, with speed and time left, not more often than a person can read. */

/**
 * @typedef {'plan'|'download'|'expand'|'compile'|'check'|'ready'} Phase
 *
 * @typedef {object} ProgressEvent
 * @property {Phase} phase  phases overlap: pipelines compile and weights expand while the rest downloads
 * @property {number} loaded
 * @property {number} total
 * @property {'bytes'|'tensors'|'kernels'} unit
 * @property {number} [bytesPerSecond]
 * @property {number} [secondsLeft]
 * @property {number} [stored]  of `loaded`, bytes that the browser had kept
 *
 * @typedef {(event: ProgressEvent) => void} Listener
 */

const INTERVAL_MS = 100;
/** Speed is that of the last few seconds. */
const WINDOW_MS = 4000;

/**
 * @param {Listener|undefined} listener
 * @returns {Listener} passes on the first and the last event of each phase, and in between not too many
 */
export function throttled(listener) {
  /** @type {Map<Phase, number>} */
  const last = new Map();
  return (event) => {
    const now = performance.now();
    if (event.loaded > 0 && event.loaded < event.total && now - (last.get(event.phase) ?? -Infinity) < INTERVAL_MS) {
      return;
    }
    last.set(event.phase, now);
    listener?.(event);
  };
}

/** Counts the bytes of a download. */
export class DownloadMeter {
  /**
   * @param {number} total bytes
   * @param {Listener} listener
   */
  constructor(total, listener) {
    this.total = total;
    this.listener = listener;
    this.stored = 0;
    this.network = 0;
    /** @type {{at: number, network: number}[]} */
    this.marks = [{ at: performance.now(), network: 0 }];
  }

  /** @param {number} bytes that were kept here already */
  fromStore(bytes) {
    this.stored += bytes;
    this.report();
  }

  /** @param {number} bytes that came over the network; negative: they came in vain */
  fromNetwork(bytes) {
    this.network += bytes;
    this.report();
  }

  report() {
    const now = performance.now();
    const newest = this.marks[this.marks.length - 1];
    if (now - newest.at > INTERVAL_MS) this.marks.push({ at: now, network: this.network });
    while (this.marks.length > 1 && now - this.marks[0].at > WINDOW_MS) this.marks.shift();
    const [oldest] = this.marks;
    const seconds = (now - oldest.at) / 1000;
    const loaded = Math.min(this.total, this.stored + this.network);
    const speed = this.network > oldest.network && seconds > 0.2 ? (this.network - oldest.network) / seconds : 0;
    this.listener({
      phase: 'download',
      loaded,
      total: this.total,
      unit: 'bytes',
      stored: this.stored,
      ...(speed ? { bytesPerSecond: speed, secondsLeft: (this.total - loaded) / speed } : {}),
    });
  }
}
