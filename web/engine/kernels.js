/** Compiles the kernels of kernels.json: shader modules, explicit layouts, pipelines by kernel and overrides. */
import { checkContract } from './contract.js';
import { TercetError, throwIfAborted } from './errors.js';
import { COMPUTE_STAGE, USAGE } from './gpu.js';
import { MAX_JSON_BYTES, parseJson } from './pack.js';
import { Interrupted, openSource, readAll } from './source.js';

/**
 * @typedef {import('./contract.js').Contract} Contract
 * @typedef {import('./contract.js').Kernel} Kernel
 * @typedef {import('./source.js').Source} Source
 * @typedef {import('./store.js').Folder} Folder
 * @typedef {import('./gpu.js').Gpu} Gpu
 * @typedef {{pipeline: GPUComputePipeline, layout: GPUBindGroupLayout}} Compiled
 */

/** Storage bindings begin here: 0 is `params`, 1 is `step` where a kernel has it. */
export const FIRST_STORAGE = 2;
/** Pipelines that compile at a time: what is not begun costs nothing when a load is cancelled. */
export const PARALLEL_COMPILES = 4;
const SPARE_STRIDE = 256;

/** The files under /shaders/: as they are now, or as they were last time if the network is gone. */
export class KernelFiles {
  /**
   * @param {string|URL} [url] folder with kernels.json; by default beside the engine, in the server as in the repository
   * @param {Folder|null} [shelf] keeps copies
   */
  constructor(
    url = import.meta.url.startsWith('file:')
      ? new URL('../../shaders/', import.meta.url)
      : new URL('../shaders/', import.meta.url),
    shelf = null,
  ) {
    /** @type {Source} */
    this.source = openSource(String(url));
    this.shelf = shelf;
    /** What was read. @type {Map<string, Promise<Uint8Array<ArrayBuffer>>>} */
    this.known = new Map();
  }

  /**
   * @param {string} name
   * @param {AbortSignal} [signal]
   * @returns {Promise<Uint8Array<ArrayBuffer>>}
   */
  read(name, signal) {
    let bytes = this.known.get(name);
    if (!bytes) {
      bytes = this.fetch(name, signal);
      bytes.catch(() => this.known.delete(name));
      this.known.set(name, bytes);
    }
    return bytes;
  }

  /**
   * @param {string} name
   * @param {AbortSignal} [signal]
   * @returns {Promise<Uint8Array<ArrayBuffer>>}
   */
  async fetch(name, signal) {
    try {
      const bytes = await readAll(this.source, name, MAX_JSON_BYTES, signal);
      await this.shelf?.putFile(name, bytes);
      return bytes;
    } catch (error) {
      if (!(error instanceof Interrupted)) throw error;
      const kept = await this.shelf?.getFile(name);
      if (kept) return kept;
      throw new TercetError('download-failed', `The engine's file ${name} did not come (${error.message}).`, {
        cause: error,
      });
    }
  }

  /** @param {string} name @param {AbortSignal} [signal] */
  async json(name, signal) {
    return parseJson(await this.read(name, signal), name);
  }
}

/**
 * @param {string|URL} [shadersUrl]
 * @returns {Promise<Contract>}
 */
export const loadContract = async (shadersUrl) => checkContract(await new KernelFiles(shadersUrl).json('kernels.json'));

/** All that is compiled on one device. */
export class Kernels {
  /**
   * @param {Gpu} gpu
   * @param {Contract} contract
   * @param {KernelFiles} files
   */
  constructor(gpu, contract, files) {
    this.gpu = gpu;
    this.contract = contract;
    this.files = files;
    /** @type {Map<string, Promise<GPUShaderModule>>} */
    this.modules = new Map();
    /** @type {Map<string, GPUBindGroupLayout>} */
    this.layouts = new Map();
    /** @type {Map<string, Promise<Compiled>>} */
    this.pipelines = new Map();
    /** Stands in for bindings that a kernel does not use; one to read, one to write, never in the same role. */
    this.spares = {
      read: gpu.buffer('spare to read', SPARE_STRIDE * 16, USAGE.STORAGE),
      write: gpu.buffer('spare to write', SPARE_STRIDE * 16, USAGE.STORAGE),
    };
  }

  /**
   * The pipeline of a kernel with these overrides; each is compiled once.
   * @param {Kernel} kernel
   * @param {Record<string, number>} overrides
   * @param {AbortSignal} [signal]
   * @returns {Promise<Compiled>}
   */
  compile(kernel, overrides, signal) {
    const key = `${kernel.name} ${JSON.stringify(overrides)}`;
    let compiled = this.pipelines.get(key);
    if (!compiled) {
      compiled = this.build(kernel, overrides, key, signal);
      compiled.catch(() => this.pipelines.delete(key));
      this.pipelines.set(key, compiled);
    }
    return compiled;
  }

  /**
   * @param {Kernel} kernel
   * @param {Record<string, number>} overrides
   * @param {string} label
   * @param {AbortSignal} [signal]
   * @returns {Promise<Compiled>}
   */
  async build(kernel, overrides, label, signal) {
    const module = await this.module(kernel, signal);
    throwIfAborted(signal);
    this.gpu.check();
    const layout = this.layout(kernel);
    const { device } = this.gpu;
    try {
      const pipeline = await device.createComputePipelineAsync({
        label,
        layout: device.createPipelineLayout({ label, bindGroupLayouts: [layout] }),
        compute: { module, entryPoint: 'main', constants: overrides },
      });
      return { pipeline, layout };
    } catch (error) {
      this.gpu.check();
      throw new TercetError(
        'internal',
        `The kernel ${kernel.name} does not compile here: ${/** @type {Error} */ (error).message}`,
        {
          action: 'Update the browser and the graphics driver, and report the fault with the details.',
          detail: { kernel: kernel.name, overrides, adapter: this.gpu.info },
          cause: error,
        },
      );
    }
  }

  /**
   * @param {Kernel} kernel
   * @param {AbortSignal} [signal]
   */
  module({ file, needs }, signal) {
    let module = this.modules.get(file);
    if (!module) {
      module = this.files
        .read(file, signal)
        .then((bytes) =>
          this.gpu.device.createShaderModule({ label: file, code: withFeatures(new TextDecoder().decode(bytes), needs) }),
        );
      module.catch(() => this.modules.delete(file));
      this.modules.set(file, module);
    }
    return module;
  }

  /**
   * Explicit, as kernels.json lists the bindings: compilers disagree about which ones an unused override leaves.
   * @param {Kernel} kernel
   */
  layout(kernel) {
    /** @type {GPUBindGroupLayoutEntry[]} */
    const entries = [];
    const visibility = COMPUTE_STAGE;
    entries.push({ binding: 0, visibility, buffer: { type: 'uniform' } });
    if (kernel.uniforms.includes('step')) entries.push({ binding: 1, visibility, buffer: { type: 'uniform' } });
    kernel.bindings.forEach(({ access }, index) => {
      entries.push({
        binding: FIRST_STORAGE + index,
        visibility,
        buffer: { type: access === 'read' ? 'read-only-storage' : 'storage' },
      });
    });
    const key = JSON.stringify(entries);
    const known = this.layouts.get(key) ?? this.gpu.device.createBindGroupLayout({ label: kernel.name, entries });
    this.layouts.set(key, known);
    return known;
  }

  /**
   * @param {Kernel} kernel
   * @param {GPUBindGroupLayout} layout
   * @param {GPUBuffer} params
   * @param {GPUBuffer} step
   * @param {(GPUBufferBinding|null)[]} storage in the order of kernel.bindings; null: not used by this variant
   */
  bind(kernel, layout, params, step, storage) {
    /** @type {GPUBindGroupEntry[]} */
    const entries = [{ binding: 0, resource: { buffer: params } }];
    if (kernel.uniforms.includes('step')) entries.push({ binding: 1, resource: { buffer: step } });
    kernel.bindings.forEach(({ access }, index) => {
      const binding = FIRST_STORAGE + index;
      const spare = {
        buffer: access === 'read' ? this.spares.read : this.spares.write,
        offset: SPARE_STRIDE * binding,
        size: SPARE_STRIDE,
      };
      entries.push({ binding, resource: storage[index] ?? spare });
    });
    return this.gpu.device.createBindGroup({ label: kernel.name, layout, entries });
  }
}

/**
 * With what Tint wants before a file that uses a feature; naga refuses these lines. Subgroups of one workgroup may take
 * different ways here, which Tint takes for an error unless it is told.
 * @param {string} source
 * @param {string[]} [needs] features
 */
const withFeatures = (source, needs = []) =>
  (needs.includes('subgroups') ? 'enable subgroups;\ndiagnostic(off, subgroup_uniformity);\n' : '') + source;
