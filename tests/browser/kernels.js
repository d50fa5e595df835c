/** Runs kernel cases with the engine's own executor, for tests/browser/test_kernels.py. */
import { runOn, toBase64 } from '../../web/engine/cases.js';
import { Gpu, adapterOf, requestAdapter } from '../../web/engine/gpu.js';
import { KernelFiles, Kernels, loadContract } from '../../web/engine/kernels.js';

const shaders = new URL('../../shaders/', import.meta.url);

async function open() {
  const contract = await loadContract(shaders);
  const { adapter } = await requestAdapter();
  const wanted = contract.kernels.flatMap(({ needs }) => needs ?? []).filter((name) => adapter.features.has(name));
  const device = await adapter.requestDevice({ requiredFeatures: [...new Set(wanted)] });
  const language = [...new Set(contract.kernels.flatMap((kernel) => kernel.language ?? []))];
  const gpu = new Gpu(device, await adapterOf(device, language), false);
  return new Kernels(gpu, contract, new KernelFiles(shaders));
}

/** @type {Promise<Kernels>|undefined} */
let kernels;

/**
 * @param {import('../../web/engine/cases.js').KernelCase[]} cases
 * @returns {Promise<{outputs?: Record<string, string>, error?: string, seconds: number}[]>} in the same order
 */
globalThis.runCases = async (cases) => {
  kernels ??= open();
  const results = [];
  for (const one of cases) {
    const start = performance.now();
    const seconds = () => (performance.now() - start) / 1000;
    try {
      const bytes = await runOn(await kernels, one);
      const outputs = Object.fromEntries(Object.entries(bytes).map(([name, value]) => [name, toBase64(value)]));
      results.push({ outputs, seconds: seconds() });
    } catch (error) {
      results.push({ error: `${error.name}: ${error.message}`, seconds: seconds() });
    }
  }
  return results;
};
