/** Runs one kernel on stored inputs and compares: for the self-check at load and for the tests. */
import { elementBytes, elements, encodeParams, overrideValues, withTuned, workgroups } from './contract.js';
import { TercetError } from './errors.js';
import { Gpu, MAP_READ, USAGE, adapterOf } from './gpu.js';
import { KernelFiles, Kernels } from './kernels.js';

/**
 * @typedef {import('./contract.js').Contract} Contract
 * @typedef {import('./contract.js').Kernel} Kernel
 * @typedef {import('./contract.js').Binding} Binding
 * @typedef {Record<string, Uint8Array<ArrayBuffer>>} Buffers  bytes by name of binding
 *
 * Inputs and expected outputs are base64 of little-endian elements.
 * @typedef {object} KernelCase
 * @property {string} name
 * @property {string} kernel
 * @property {import('./contract.js').Symbols} symbols
 * @property {[number, number, number, number]} step  position, tokens, rows, produced
 * @property {Record<string, string>} inputs
 * @property {Record<string, {dtype: string, shape: number[], close?: number}>} outputs
 * @property {Record<string, string>} [expected]
 */

/** Around each output, to see a kernel that writes outside: a multiple of the alignment of bindings. */
const GUARD = 256;
/** No number anybody computes: as f32 -1.3e-15, as u32 2,779,096,485. */
const POISON = 0xa5;

/**
 * Run one case on a caller's device and give back what each output holds.
 * @param {GPUDevice} device
 * @param {Contract} contract
 * @param {KernelCase} kernelCase
 * @param {string|URL} [shadersUrl]
 * @returns {Promise<Record<string, string>>} base64 by name of output
 * @throws {TercetError} `internal` if the kernel wrote outside of its buffers or the GPU reported an error
 */
export async function runCase(device, contract, kernelCase, shadersUrl) {
  const language = [...new Set(contract.kernels.flatMap((kernel) => kernel.language ?? []))];
  const gpu = new Gpu(device, await adapterOf(device, language), false);
  try {
    const outputs = await runOn(new Kernels(gpu, contract, new KernelFiles(shadersUrl)), kernelCase);
    return Object.fromEntries(Object.entries(outputs).map(([name, bytes]) => [name, toBase64(bytes)]));
  } finally {
    gpu.dispose();
  }
}

/**
 * @param {Kernels} kernels
 * @param {KernelCase} kernelCase
 */
export async function compileCase(kernels, kernelCase) {
  const { contract } = kernels;
  const kernel = contract.kernels.find(({ name }) => name === kernelCase.kernel);
  if (!kernel) {
    throw new TercetError(
      'internal',
      `The case ${kernelCase.name} names the kernel ${kernelCase.kernel}, which kernels.json does not have.`,
    );
  }
  const overrides = overrideValues(contract, kernel, kernelCase.symbols);
  return {
    kernel,
    symbols: withTuned(kernel, kernelCase.symbols, overrides),
    ...(await kernels.compile(kernel, overrides)),
  };
}

/**
 * @param {Kernels} kernels
 * @param {KernelCase} kernelCase
 * @returns {Promise<Buffers>}
 */
export async function runOn(kernels, kernelCase) {
  const { gpu } = kernels;
  const { kernel, symbols, pipeline, layout } = await compileCase(kernels, kernelCase);
  /** @type {GPUBuffer[]} */
  const made = [];
  /** @param {GPUBuffer} buffer */
  const keep = (buffer) => {
    made.push(buffer);
    return buffer;
  };
  try {
    const params = keep(gpu.filled('params', encodeParams(kernel, symbols), USAGE.UNIFORM));
    const step = keep(gpu.filled('step', new Uint32Array(kernelCase.step), USAGE.UNIFORM));
    const bound = kernel.bindings.map((binding) => place(gpu, binding, kernelCase, symbols, keep));
    const group = kernels.bind(
      kernel,
      layout,
      params,
      step,
      bound.map((one) => one && { buffer: one.buffer, offset: GUARD, size: one.size }),
    );
    const encoder = gpu.device.createCommandEncoder({ label: kernelCase.name });
    const pass = encoder.beginComputePass({ label: kernelCase.name });
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, group);
    pass.dispatchWorkgroups(...workgroups(kernel, symbols));
    pass.end();
    const written = bound.filter((one) => one !== null).filter(({ binding }) => binding.name in kernelCase.outputs);
    const staging = written.map(({ buffer }) => {
      const copy = keep(gpu.buffer('read-back', buffer.size, USAGE.COPY_DST | USAGE.MAP_READ));
      encoder.copyBufferToBuffer(buffer, 0, copy, 0, buffer.size);
      return copy;
    });
    gpu.queue.submit([encoder.finish()]);
    await gpu.alive(Promise.all(staging.map((copy) => copy.mapAsync(MAP_READ))));
    return Object.fromEntries(
      written.map(({ binding, size }, index) => [binding.name, unguarded(staging[index], size, kernelCase, binding)]),
    );
  } finally {
    for (const buffer of made) gpu.free(buffer);
  }
}

/**
 * A buffer with guards on both sides; poisoned where the case gives no content.
 * @param {Gpu} gpu
 * @param {Binding} binding
 * @param {KernelCase} kernelCase
 * @param {import('./contract.js').Symbols} symbols
 * @param {(buffer: GPUBuffer) => GPUBuffer} keep
 * @returns {{binding: Binding, buffer: GPUBuffer, size: number}|null} null: the variant does not use it
 */
function place(gpu, binding, { name, inputs, outputs }, symbols, keep) {
  const size = elements(binding.shape, symbols) * elementBytes(binding.dtype);
  if (size === 0 || !(binding.name in inputs || binding.name in outputs)) return null;
  const content = new Uint8Array(GUARD + size + GUARD).fill(POISON);
  if (binding.name in inputs) {
    const bytes = fromBase64(inputs[binding.name]);
    if (bytes.byteLength !== size) {
      throw new TercetError(
        'internal',
        `The case ${name} gives ${bytes.byteLength} bytes for ${binding.name}, its shape needs ${size}.`,
      );
    }
    content.set(bytes, GUARD);
  }
  return { binding, size, buffer: keep(gpu.filled(binding.name, content, USAGE.STORAGE | USAGE.COPY_SRC)) };
}

/**
 * @param {GPUBuffer} staging mapped
 * @param {number} size
 * @param {KernelCase} kernelCase
 * @param {Binding} binding
 */
function unguarded(staging, size, kernelCase, binding) {
  const all = new Uint8Array(staging.getMappedRange().slice(0));
  const outside = [...all.subarray(0, GUARD), ...all.subarray(GUARD + size)];
  if (outside.some((byte) => byte !== POISON)) {
    throw new TercetError(
      'internal',
      `The case ${kernelCase.name}: the kernel ${kernelCase.kernel} wrote outside of ${binding.name}.`,
    );
  }
  return all.slice(GUARD, GUARD + size);
}

/** @param {string} text @returns {Uint8Array<ArrayBuffer>} */
export const fromBase64 = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

/** @param {Uint8Array} bytes */
export function toBase64(bytes) {
  let text = '';
  for (let at = 0; at < bytes.length; at += 0x8000) text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  return btoa(text);
}
