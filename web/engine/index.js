/**
 * The Tercet engine: ternary language models on the reader's own GPU.
 *
 *     import { Engine } from '/engine/index.js';
 *     const engine = await Engine.load('/packs/smollm2-135m-ternary/', { onProgress: console.log });
 *     const stream = await engine.chat.completions.create({ messages: [{ role: 'user', content: 'Hello' }], stream: true });
 *     for await (const chunk of stream) console.log(chunk.choices[0].delta.content ?? '');
 *
 * No DOM: runs in a page, in a worker (client.js does that), and in Node with a caller's GPUDevice.
 */
import { Chat } from './chat.js';
import { TercetError, toTercetError } from './errors.js';
import { plainLimits, requestAdapter } from './gpu.js';
import { loadPack } from './load.js';
import { measure } from './measure.js';
import { planOf } from './prepare.js';
import { checkSampling } from './sampling.js';
import { openSource } from './source.js';
import { browserStore } from './store.js';
import { checkWays } from './ways.js';

export { TercetError };

/**
 * @typedef {import('./prepare.js').LoadOptions} LoadOptions
 * @typedef {import('./prepare.js').Plan} Plan
 * @typedef {import('./load.js').Loaded} Loaded
 * @typedef {import('./gpu.js').AdapterInfo} AdapterInfo
 *
 * @typedef {object} Support
 * @property {boolean} webgpu
 * @property {string|null} code  of the error that a load would end with
 * @property {string|null} message
 * @property {AdapterInfo|null} adapter
 * @property {Record<string, number>|null} limits
 * @property {string[]} features
 *
 * @typedef {object} Info
 * @property {string} url
 * @property {string} name
 * @property {string} license
 * @property {number} parameters
 * @property {number} contextLength
 * @property {number} maxContextLength
 * @property {'f16'|'f32'|'q8'} kvCache
 * @property {'a8'|'a16'|'f32'} activations
 * @property {number} weightsBytes
 * @property {number} kvBytes
 * @property {number} workBytes
 * @property {number} bitsPerWeight
 * @property {string|null} grade
 * @property {AdapterInfo|null} adapter
 * @property {number[]} eosIds
 * @property {string[]} kernels
 * @property {import('./tuning.js').TuningReport} tuning  constants of kernels that were chosen by timing, and how long it took
 *
 * onRoll: the context was full and the window moved on; gets the number of tokens that left it.
 * @typedef {import('./sampling.js').SamplingRequest & import('./ways.js').WaysRequest
 *   & {signal?: AbortSignal, stopIds?: Iterable<number>, onRoll?: (forgotten: number) => void}} GenerateOptions
 */

export class Engine {
  /** What this browser and GPU offer. @returns {Promise<Support>} */
  static async support() {
    try {
      const { limits, abilities, info } = await requestAdapter();
      return {
        webgpu: true,
        code: null,
        message: null,
        adapter: info,
        limits: plainLimits(limits),
        features: [...abilities.features],
      };
    } catch (error) {
      const { code, message } = toTercetError(error);
      return { webgpu: false, code, message, adapter: null, limits: null, features: [] };
    }
  }

  /**
   * What a pack needs here; reads pack.json and program.json only.
   * @param {string} url
   * @param {Pick<LoadOptions, 'contextLength'|'kvCache'|'device'|'store'|'shadersUrl'|'signal'|'retry'>} [options]
   * @returns {Promise<Plan>}
   */
  static plan(url, options = {}) {
    return typed(planOf(url, options));
  }

  /**
   * @param {string} url folder of the pack; in Node also a path or a file: URL
   * @param {LoadOptions} [options]
   * @returns {Promise<Engine>}
   * @throws {TercetError}
   */
  static async load(url, options = {}) {
    const began = performance.now();
    const engine = new Engine(await typed(loadPack(url, options)));
    engine.loadSeconds = (performance.now() - began) / 1000;
    return engine;
  }

  /** @param {string} url @returns {Promise<number>} bytes of the pack that the browser keeps */
  static async stored(url) {
    return typed(browserStore().then(async (store) => (store ? store.stored(openSource(url).url) : 0)));
  }

  /** Drop what the browser keeps of the pack. @param {string} url @returns {Promise<void>} */
  static async remove(url) {
    return typed(browserStore().then((store) => store?.remove(openSource(url).url)));
  }

  /**
   * Use Engine.load.
   * @param {Loaded} loaded
   */
  constructor({ prepared, gpu, session, tokenizer, kernels, tuning }) {
    const { pack, memory, choice, source } = prepared;
    this.gpu = gpu;
    this.session = session;
    this.prepared = prepared;
    this.loadSeconds = 0;
    /** @type {Info} */
    this.info = {
      url: source.url,
      name: pack.name,
      license: pack.license,
      parameters: pack.parameters,
      contextLength: choice.contextLength,
      maxContextLength: pack.context_length,
      kvCache: choice.kvCache,
      activations: pack.activations,
      weightsBytes: memory.weightsBytes,
      kvBytes: memory.kvBytes,
      workBytes: memory.workBytes,
      bitsPerWeight: pack.bits_per_weight,
      grade: pack.grade,
      adapter: gpu.info,
      eosIds: pack.eos_ids,
      kernels,
      tuning,
    };
    /** Resolves when the GPU is lost; never after dispose(). @type {Promise<TercetError>} */
    this.lost = gpu.lost;
    this.tokenizer = {
      /** @param {string} text @param {{special?: boolean}} [options] */
      encode: (text, options) => tokenizer.encode(text, options),
      /** @param {number[]} ids */
      decode: (ids) => tokenizer.decode(ids),
    };
    this.chat = new Chat({ session, tokenizer, model: pack.name, eosIds: pack.eos_ids });
  }

  /** @param {import('./tokenizer.js').Message[]} messages @returns {number} tokens of the rendered prompt */
  countTokens(messages) {
    return this.chat.countTokens(messages);
  }

  /**
   * Token ids after a prompt of token ids, the one that ends the answer included.
   * @param {number[]} ids
   * @param {GenerateOptions} [options] sampling and ways as in chat; stopIds: default the model's EOS ids
   * @returns {AsyncGenerator<number, void, void>} ends early, without an error, when the signal fires
   */
  generate(ids, options = {}) {
    const { signal, onRoll, stopIds = this.info.eosIds } = options;
    return this.session.run(ids, {
      sampling: checkSampling(options),
      ...checkWays(options),
      stopIds: new Set(stopIds),
      signal,
      onRoll,
    });
  }

  /**
   * How fast this device runs the model, and how near that is to what its memory allows. Takes seconds; nothing else
   * can be asked meanwhile.
   * @param {import('./measure.js').MeasureOptions} [options] quick: fewer and shorter runs
   * @returns {Promise<import('./measure.js').MeasureReport>}
   * @throws {TercetError} `aborted` when the signal fires, `busy` during an answer
   */
  measure(options = {}) {
    return typed(measure(this, options));
  }

  /** Give back all GPU memory. The engine cannot be used afterwards. */
  async dispose() {
    this.gpu.dispose();
  }
}

/**
 * @template T
 * @param {Promise<T>} promise
 * @returns {Promise<T>} whatever fails does so as a TercetError
 */
async function typed(promise) {
  try {
    return await promise;
  } catch (error) {
    throw toTercetError(error);
  }
}
