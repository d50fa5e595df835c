/** The GPU: adapter, device, limits, buffers with an account of them, and what may go wrong with each. */
import { TercetError } from './errors.js';

/**
 * @typedef {{vendor: string, architecture: string, device: string, description: string, software: boolean}} AdapterInfo
 *   software: a program on the processor
 * @typedef {import('./contract.js').Abilities} Abilities
 *
 * What is known before a device is asked for; with a caller's device, of that.
 * @typedef {object} Adapter
 * @property {GPUAdapter|null} adapter
 * @property {GPUSupportedLimits} limits
 * @property {Abilities} abilities
 * @property {AdapterInfo|null} info
 */

/** GPUBufferUsage and GPUMapMode as numbers: Node has no such globals. */
export const USAGE = Object.freeze({ MAP_READ: 1, COPY_SRC: 4, COPY_DST: 8, UNIFORM: 64, STORAGE: 128 });
export const MAP_READ = 1;
export const COMPUTE_STAGE = 4;
/** Between the failure of an operation and the news that the device is lost, in ms. */
const LOSS_MS = 50;

/**
 * @returns {Promise<Adapter>}
 * @throws {TercetError} `webgpu-missing`, `adapter-missing`
 */
export async function requestAdapter() {
  const gpu = globalThis.navigator?.gpu;
  if (!gpu) {
    const insecure = globalThis.isSecureContext === false;
    throw new TercetError(
      'webgpu-missing',
      'This browser does not offer WebGPU to this page.',
      insecure ? { action: 'Open the page over https or from localhost: browsers offer WebGPU only there.' } : {},
    );
  }
  const adapter = await gpu.requestAdapter({ powerPreference: 'high-performance' });
  if (!adapter) throw new TercetError('adapter-missing', 'The browser has WebGPU but found no GPU that it may use.');
  const info = describe(adapter.info);
  return {
    adapter,
    limits: adapter.limits,
    abilities: { features: adapter.features, language: gpu.wgslLanguageFeatures, software: info?.software },
    info,
  };
}

/**
 * A device that the caller made, as in Node.
 * @param {GPUDevice} device
 * @param {string[]} language WGSL language features to ask for: a device has no list of them
 * @returns {Promise<Adapter>}
 */
export async function adapterOf(device, language) {
  const found = new Set();
  for (const name of language) {
    device.pushErrorScope('validation');
    device.createShaderModule({ label: `asks for ${name}`, code: `requires ${name};` });
    if (!(await device.popErrorScope())) found.add(name);
  }
  const info = describe(device.adapterInfo);
  return {
    adapter: null,
    limits: device.limits,
    abilities: { features: device.features, language: found, software: info?.software },
    info,
  };
}

/** Renderers that are programs on the processor. */
const SOFTWARE = /swiftshader|llvmpipe|lavapipe|softpipe|basic render/i;

/** @param {GPUAdapterInfo|undefined} info @returns {AdapterInfo|null} */
function describe(info) {
  if (!info) return null;
  const { vendor = '', architecture = '', device = '', description = '' } = info;
  const software = SOFTWARE.test([vendor, architecture, device, description].join(' '));
  return { vendor, architecture, device, description, software };
}

/**
 * Limits as a plain object.
 * @param {GPUSupportedLimits} limits
 * @returns {Record<string, number>}
 */
export function plainLimits(limits) {
  /** @type {Record<string, number>} */
  const plain = {};
  for (const name in limits) {
    const value = /** @type {any} */ (limits)[name];
    if (typeof value === 'number') plain[name] = value;
  }
  return plain;
}

/**
 * @param {Adapter} adapter
 * @param {Record<string, number>} needed limits above the defaults
 * @param {Set<string>} features wanted where the adapter has them
 * @returns {Promise<GPUDevice>}
 */
export async function requestDevice({ adapter, limits }, needed, features) {
  const found = /** @type {GPUAdapter} */ (adapter);
  for (const [name, value] of Object.entries(needed)) {
    const available = /** @type {any} */ (limits)[name];
    if (available < value) {
      throw new TercetError('limit-too-small', `This GPU allows ${name} of ${available}, ${value} is needed.`, {
        detail: { limit: name, needed: value, available },
      });
    }
  }
  try {
    const wanted = /** @type {GPUFeatureName[]} */ ([...features].filter((name) => found.features.has(name)));
    return await found.requestDevice({ label: 'tercet', requiredLimits: needed, requiredFeatures: wanted });
  } catch (error) {
    throw new TercetError(
      'adapter-missing',
      `The browser did not hand out the GPU (${/** @type {Error} */ (error).message}).`,
      { cause: error },
    );
  }
}

/** A device with all buffers that were made on it. */
export class Gpu {
  /**
   * @param {GPUDevice} device
   * @param {Adapter} adapter
   * @param {boolean} owned whether dispose() ends the device too
   */
  constructor(device, adapter, owned) {
    this.device = device;
    this.queue = device.queue;
    this.limits = device.limits;
    // What the adapter was said to have may be less: features that compute wrongly here are left alone.
    const able = [...adapter.abilities.features].filter((name) => device.features.has(name));
    this.abilities = { ...adapter.abilities, features: new Set(able) };
    this.info = adapter.info;
    this.owned = owned;
    this.disposed = false;
    /** @type {TercetError|null} what makes all further results worthless */
    this.failure = null;
    /** @type {Set<GPUBuffer>} */
    this.buffers = new Set();
    /** Whoever waits for the GPU, to be told when it is gone. @type {Set<(error: TercetError) => void>} */
    this.waiting = new Set();
    /** Resolves when the device is gone for another reason than dispose(). @type {Promise<TercetError>} */
    this.lost = new Promise((resolve) => {
      void device.lost.then(({ reason, message }) => {
        if (this.disposed) return;
        const failure = new TercetError('device-lost', `The GPU was lost (${message || reason}).`, {
          detail: { reason, message },
        });
        this.failure = failure;
        for (const fail of this.waiting) fail(failure);
        resolve(failure);
      });
    });
    this.onError = (/** @type {GPUUncapturedErrorEvent} */ event) => {
      event.preventDefault?.();
      this.failure ??= asFailure(event.error);
    };
    device.addEventListener('uncapturederror', /** @type {EventListener} */ (this.onError));
  }

  /** @returns {number} bytes of all buffers that are alive */
  get bytes() {
    let sum = 0;
    for (const buffer of this.buffers) sum += buffer.size;
    return sum;
  }

  /**
   * @param {string} label
   * @param {number} size bytes
   * @param {number} usage
   */
  buffer(label, size, usage) {
    const buffer = this.device.createBuffer({ label, size: Math.max(16, Math.ceil(size / 4) * 4), usage });
    this.buffers.add(buffer);
    return buffer;
  }

  /**
   * @param {string} label
   * @param {ArrayBuffer|ArrayBufferView<ArrayBuffer>} data a multiple of 4 bytes long
   * @param {number} usage
   */
  filled(label, data, usage) {
    const buffer = this.buffer(label, data.byteLength, usage | USAGE.COPY_DST);
    this.queue.writeBuffer(buffer, 0, /** @type {ArrayBuffer} */ (data));
    return buffer;
  }

  /** @param {GPUBuffer} buffer */
  free(buffer) {
    this.buffers.delete(buffer);
    buffer.destroy();
  }

  /**
   * Run something that allocates; what the GPU says about it becomes an error.
   * @template T
   * @param {string} what for the message
   * @param {number} bytes that it needs
   * @param {() => T} make
   * @returns {Promise<T>}
   * @throws {TercetError} `out-of-memory`, `device-lost`, `internal`
   */
  async allocate(what, bytes, make) {
    const before = new Set(this.buffers);
    this.device.pushErrorScope('validation');
    this.device.pushErrorScope('out-of-memory');
    /** @type {unknown} */
    let thrown;
    /** @type {T|undefined} */
    let made;
    try {
      made = make();
    } catch (error) {
      // Some browsers throw a RangeError for a buffer that is too large, instead of reporting it.
      thrown = error;
    }
    const scopes = [this.device.popErrorScope(), this.device.popErrorScope()];
    const added = [...this.buffers].filter((buffer) => !before.has(buffer));
    const [memory, validation] = await this.alive(Promise.all(scopes));
    const error = memory ?? validation ?? thrown;
    if (!error) return /** @type {T} */ (made);
    for (const buffer of added) this.free(buffer);
    if (error instanceof TercetError || !(memory || thrown instanceof RangeError)) throw asFailure(error);
    throw new TercetError('out-of-memory', `The GPU has no room for ${what} (${sizeText(bytes)} needed).`, {
      detail: { needed: bytes, reason: String(/** @type {any} */ (error).message) },
    });
  }

  /**
   * Wait for the GPU, but not for ever for one that is gone.
   * @template T
   * @param {Promise<T>} promise
   * @returns {Promise<T>}
   */
  async alive(promise) {
    /** @type {(error: TercetError) => void} */
    let fail = () => {};
    const gone = new Promise((/** @type {(value: never) => void} */ _, reject) => {
      fail = reject;
    });
    this.waiting.add(fail);
    try {
      const result = await Promise.race([promise, gone]);
      this.check();
      return result;
    } catch (error) {
      // A lost device also rejects what was pending, and that may be seen first.
      if (!this.failure && !this.disposed) await new Promise((resolve) => setTimeout(resolve, LOSS_MS));
      this.check();
      throw error;
    } finally {
      this.waiting.delete(fail);
    }
  }

  /** @throws {TercetError} if the device is gone or has reported an error */
  check() {
    if (this.disposed) {
      throw new TercetError('aborted', 'The engine was disposed of.', { action: 'Load the model again.' });
    }
    if (this.failure) throw this.failure;
  }

  dispose() {
    this.disposed = true;
    this.device.removeEventListener('uncapturederror', /** @type {EventListener} */ (this.onError));
    for (const buffer of this.buffers) buffer.destroy();
    this.buffers.clear();
    if (this.owned) this.device.destroy();
  }
}

/** @param {unknown} error a GPUError or whatever was thrown */
function asFailure(error) {
  if (error instanceof TercetError) return error;
  const { message = String(error) } = /** @type {Error} */ (error);
  const memory = typeof GPUOutOfMemoryError === 'function' && error instanceof GPUOutOfMemoryError;
  return new TercetError(memory ? 'out-of-memory' : 'internal', `The GPU reported an error: ${message}`, {
    detail: { message },
  });
}

/** @param {number} bytes @returns {string} as people read it */
export function sizeText(bytes) {
  if (bytes < 1e6) return `${(bytes / 1e3).toFixed(1)} KB`;
  return bytes < 1e9 ? `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB` : `${(bytes / 1e9).toFixed(2)} GB`;
}
