/**
 * The engine's API for a page: the same as index.js has, but all work is done in one worker, so that the page never
 * stutters. No GPU and no tokenizer here.
 */
import { collect } from './completion.js';
import { TercetError, fromMessage } from './errors.js';
import { Queue } from './queue.js';
import { requestPersistence } from './quota.js';

/**
 * @typedef {import('./protocol.js').ToWorker} ToWorker
 * @typedef {import('./protocol.js').FromWorker} FromWorker
 * @typedef {import('./protocol.js').Request} Request
 * @typedef {import('./protocol.js').PlainOptions} PlainOptions
 * @typedef {import('./progress.js').ProgressEvent} ProgressEvent
 * @typedef {import('./chat.js').ChatRequest} ChatRequest
 * @typedef {import('./completion.js').ChatCompletionChunk} ChatCompletionChunk
 * @typedef {import('./completion.js').ChatCompletion} ChatCompletion
 * @typedef {import('./tokenizer.js').Message} Message
 * @typedef {import('./index.js').Info} Info
 * @typedef {import('./index.js').Support} Support
 * @typedef {import('./prepare.js').Plan} Plan
 * @typedef {PlainOptions & {onProgress?: (event: ProgressEvent) => void, signal?: AbortSignal}} LoadOptions
 *
 * What waits for messages of a call.
 * @typedef {object} Waiting
 * @property {(value: any) => void} resolve
 * @property {(error: TercetError) => void} reject
 * @property {(event: ProgressEvent) => void} [onProgress]
 * @property {() => void} [onStarted]
 * @property {(chunk: ChatCompletionChunk) => void} [onChunk]
 * @property {(progress: import('./measure.js').MeasureProgress) => void} [onMeasuring]
 */

/** The worker and the calls that it has not answered. */
class Connection {
  constructor() {
    /** @type {Worker|null} */
    this.worker = null;
    this.calls = 0;
    /** @type {Map<number, Waiting>} */
    this.waiting = new Map();
    /** @type {Map<number, (error: TercetError) => void>} */
    this.losses = new Map();
  }

  /**
   * @param {Request} request
   * @param {{signal?: AbortSignal} & Pick<Waiting, 'onProgress'|'onStarted'|'onChunk'|'onMeasuring'>} [hooks]
   * @returns {Promise<any>}
   */
  call(request, { signal, ...hooks } = {}) {
    const worker = (this.worker ??= this.start());
    const call = ++this.calls;
    const abort = () => worker.postMessage({ kind: 'abort', call });
    const answer = new Promise((resolve, reject) => {
      this.waiting.set(call, { resolve, reject, ...hooks });
      signal?.addEventListener('abort', abort, { once: true });
      worker.postMessage({ ...request, call });
      if (signal?.aborted) abort();
    });
    return answer.finally(() => {
      this.waiting.delete(call);
      signal?.removeEventListener('abort', abort);
    });
  }

  start() {
    const worker = new Worker(new URL('./worker.js', import.meta.url), { type: 'module', name: 'tercet' });
    worker.addEventListener('message', ({ data }) => this.receive(data));
    worker.addEventListener('messageerror', () => this.fail('a message from the engine could not be read'));
    worker.addEventListener('error', (event) => this.fail(event.message || 'its code did not load'));
    return worker;
  }

  /** @param {FromWorker} message */
  receive(message) {
    if (message.kind === 'lost') {
      this.losses.get(message.engine)?.(fromMessage(message.error));
      return;
    }
    const waiting = this.waiting.get(message.call);
    switch (message.kind) {
      case 'result':
        return waiting?.resolve(message.value);
      case 'error':
        return waiting?.reject(fromMessage(message.error));
      case 'progress':
        return waiting?.onProgress?.(message.event);
      case 'started':
        return waiting?.onStarted?.();
      case 'chunk':
        return waiting?.onChunk?.(message.chunk);
      case 'measuring':
        return waiting?.onMeasuring?.(message.progress);
    }
  }

  /**
   * The worker is of no use any more: whoever waits learns it, the next call starts a new one.
   * @param {string} reason
   */
  fail(reason) {
    this.worker?.terminate();
    this.worker = null;
    const error = new TercetError('internal', `The engine's worker stopped: ${reason}.`, { detail: { reason } });
    for (const waiting of [...this.waiting.values()]) waiting.reject(error);
    for (const lose of this.losses.values()) lose(error);
    this.losses.clear();
  }
}

const connection = new Connection();

export class EngineClient {
  /** @returns {Promise<Support>} */
  static support() {
    return connection.call({ kind: 'support' });
  }

  /**
   * @param {string} url
   * @param {PlainOptions & {signal?: AbortSignal}} [options]
   * @returns {Promise<Plan>}
   */
  static async plan(url, { signal, ...options } = {}) {
    return connection.call({ kind: 'plan', url: absolute(url), options }, { signal });
  }

  /**
   * @param {string} url
   * @param {LoadOptions} [options]
   * @returns {Promise<EngineClient>}
   */
  static async load(url, { onProgress, signal, ...options } = {}) {
    // Only pages may ask this, workers may not.
    void requestPersistence();
    const { engine, info } = await connection.call(
      { kind: 'load', url: absolute(url), options },
      { signal, onProgress },
    );
    return new EngineClient(engine, info);
  }

  /** @param {string} url @returns {Promise<number>} bytes */
  static async stored(url) {
    return connection.call({ kind: 'stored', url: absolute(url) });
  }

  /** @param {string} url @returns {Promise<void>} */
  static async remove(url) {
    return connection.call({ kind: 'remove', url: absolute(url) });
  }

  /**
   * Use EngineClient.load.
   * @param {number} id
   * @param {Info} info
   */
  constructor(id, info) {
    this.id = id;
    this.info = info;
    /** Resolves when the GPU is lost; never after dispose(). @type {Promise<TercetError>} */
    this.lost = new Promise((resolve) => connection.losses.set(id, resolve));
    this.tokenizer = {
      /** @param {string} text @returns {Promise<number[]>} */
      encode: (text) => connection.call({ kind: 'encode', engine: id, text }),
      /** @param {number[]} ids @returns {Promise<string>} */
      decode: (ids) => connection.call({ kind: 'decode', engine: id, ids }),
    };
    this.chat = { completions: { create: this.create.bind(this) } };
  }

  /** @param {Message[]} messages @returns {Promise<number>} tokens of the rendered prompt */
  async countTokens(messages) {
    return connection.call({ kind: 'countTokens', engine: this.id, messages });
  }

  /**
   * @overload
   * @param {ChatRequest & {stream: true}} request
   * @returns {Promise<AsyncGenerator<ChatCompletionChunk, void, void>>}
   */
  /**
   * @overload
   * @param {ChatRequest & {stream?: false}} request
   * @returns {Promise<ChatCompletion>}
   */
  /**
   * @param {ChatRequest} request
   * @returns {Promise<AsyncGenerator<ChatCompletionChunk, void, void>|ChatCompletion>}
   */
  async create({ signal, stream = false, ...request }) {
    /** @type {Queue<ChatCompletionChunk>} */
    const chunks = new Queue();
    const leave = new AbortController();
    await new Promise((/** @type {(value: void) => void} */ resolve, reject) => {
      connection
        .call(
          { kind: 'chat', engine: this.id, request },
          {
            signal: signal ? AbortSignal.any([signal, leave.signal]) : leave.signal,
            onStarted: resolve,
            onChunk: (chunk) => chunks.push(chunk),
          },
        )
        .then(
          () => chunks.close(),
          (error) => {
            reject(error);
            chunks.close(error);
          },
        );
    });
    const reading = chunks.read(() => leave.abort());
    return stream ? reading : collect(reading);
  }

  /**
   * As `measure` in index.js.
   * @param {import('./measure.js').MeasureOptions} [options]
   * @returns {Promise<import('./measure.js').MeasureReport>}
   */
  async measure({ onProgress, signal, quick } = {}) {
    return connection.call({ kind: 'measure', engine: this.id, quick }, { signal, onMeasuring: onProgress });
  }

  /** Give back all GPU memory. */
  async dispose() {
    connection.losses.delete(this.id);
    await connection.call({ kind: 'dispose', engine: this.id });
  }
}

/** A worker has its own base for relative addresses. @param {string} url */
function absolute(url) {
  try {
    return new URL(url, location.href).href;
  } catch {
    throw new TercetError('bad-request', `${JSON.stringify(url)} is no URL of a pack.`);
  }
}
