/** Runs each kernel on a stored input and compares: a device that computes wrongly is found before it talks. */
import { compileCase, fromBase64, runOn } from './cases.js';
import { overrideValues } from './contract.js';
import { TercetError, throwIfAborted } from './errors.js';
import { PARALLEL_COMPILES } from './kernels.js';
import { inParallel, together, unlessAborted } from './waiting.js';

/**
 * @typedef {import('./cases.js').KernelCase} KernelCase
 * @typedef {import('./contract.js').Contract} Contract
 * @typedef {import('./kernels.js').Kernels} Kernels
 * @typedef {import('./operations.js').Variant} Variant
 * @typedef {{index: number, found: number, expected: number}} Mismatch
 */

/**
 * @param {Kernels} kernels
 * @param {Variant[]} variants kernels that the pack uses
 * @param {(done: number, total: number) => void} onProgress
 * @param {AbortSignal} [signal]
 * @throws {TercetError} `self-check-failed`
 */
export async function selfCheck(kernels, variants, onProgress, signal) {
  const { cases } = await kernels.files.json('selfcheck.json', signal);
  const tuned = /** @type {KernelCase[]} */ (cases).flatMap((one) => tunedCases(one, variants));
  const chosen = relevantCases(kernels.contract, tuned, variants);
  let done = 0;
  onProgress(done, chosen.length);
  await unlessAborted(
    inParallel(chosen, PARALLEL_COMPILES, signal, (kernelCase) => compileCase(kernels, kernelCase)),
    signal,
  );
  await together(
    signal,
    chosen.map((kernelCase) => async (inner) => {
      throwIfAborted(inner);
      const outputs = await runOn(kernels, kernelCase);
      for (const [name, { dtype, close = 0 }] of Object.entries(kernelCase.outputs)) {
        const mismatch = compare(outputs[name], fromBase64(kernelCase.expected?.[name] ?? ''), dtype, close);
        if (mismatch) throw failure(kernels, kernelCase, name, close, mismatch);
      }
      onProgress(++done, chosen.length);
    }),
  );
}

/**
 * Features without which a load may go on: the kernel that failed the check needs them, and others do without.
 * @param {Contract} contract
 * @param {TercetError} failure
 * @returns {string[]}
 */
export function featuresBehind({ kernels }, { code, detail }) {
  if (code !== 'self-check-failed') return [];
  const { kernel } = /** @type {{kernel: string}} */ (detail);
  return kernels.find(({ name }) => name === kernel)?.needs ?? [];
}

/**
 * A case with the tuned constants that the pack's kernels get here: what is checked is what will run.
 * @param {KernelCase} one
 * @param {Variant[]} variants
 * @returns {KernelCase[]}
 */
function tunedCases(one, variants) {
  /** @type {Map<string, KernelCase>} */
  const found = new Map();
  for (const { kernel, overrides } of variants) {
    if (kernel.name !== one.kernel) continue;
    const tuned = Object.fromEntries(Object.keys(kernel.tuned ?? {}).map((name) => [name, overrides[name]]));
    found.set(JSON.stringify(tuned), { ...one, symbols: { ...one.symbols, ...tuned } });
  }
  return [...found.values()];
}

/**
 * For each kernel, with each choice of encoding, activations and so on that the pack uses: the cases that run exactly
 * a pipeline of the pack; where there is none, those with the same choice; else all of the kernel.
 * @param {Contract} contract
 * @param {KernelCase[]} cases
 * @param {Variant[]} variants
 */
export function relevantCases(contract, cases, variants) {
  /** @type {Map<string, {exact: KernelCase[], alike: KernelCase[], all: KernelCase[]}>} */
  const groups = new Map();
  for (const { kernel, symbols, overrides } of variants) {
    const names = Object.values(kernel.overrides ?? {})
      .filter((name) => typeof name === 'string')
      .filter((name) => typeof symbols[name] === 'string');
    const all = cases.filter((one) => one.kernel === kernel.name);
    const alike = all.filter((one) => names.every((name) => one.symbols[name] === symbols[name]));
    const key = [kernel.name, ...names.map((name) => symbols[name])].join(' ');
    const group = groups.get(key) ?? { exact: [], alike, all };
    const wanted = JSON.stringify(overrides);
    group.exact.push(
      ...alike.filter((one) => JSON.stringify(overrideValues(contract, kernel, one.symbols)) === wanted),
    );
    groups.set(key, group);
  }
  const chosen = [...groups.values()].flatMap(
    ({ exact, alike, all }) => [exact, alike, all].find((some) => some.length) ?? [],
  );
  return [...new Set(chosen)];
}

/**
 * @param {Uint8Array<ArrayBuffer>} found
 * @param {Uint8Array<ArrayBuffer>} expected
 * @param {string} dtype
 * @param {number} close largest difference allowed; 0: the same bits
 * @returns {Mismatch|null} the first element that differs
 */
export function compare(found, expected, dtype, close) {
  const [a, b] = [found, expected].map((bytes) => numbers(bytes, dtype));
  if (a.length !== b.length) return { index: Math.min(a.length, b.length), found: a.length, expected: b.length };
  for (let index = 0; index < b.length; index++) {
    // Written so that NaN never passes.
    const same = close === 0 ? Object.is(a[index], b[index]) : Math.abs(a[index] - b[index]) <= close;
    if (!same) return { index, found: a[index], expected: b[index] };
  }
  return null;
}

/** @param {Uint8Array<ArrayBuffer>} bytes @param {string} dtype */
function numbers({ buffer, byteOffset, byteLength }, dtype) {
  const Type = dtype === 'i32' ? Int32Array : dtype === 'u32' ? Uint32Array : Float32Array;
  return new Type(buffer, byteOffset, byteLength / 4);
}

/**
 * @param {Kernels} kernels
 * @param {KernelCase} kernelCase
 * @param {string} output
 * @param {number} close
 * @param {Mismatch} mismatch
 */
function failure(kernels, { name, kernel }, output, close, { index, found, expected }) {
  return new TercetError(
    'self-check-failed',
    `This device computes wrongly: the kernel ${kernel} gave ${found} instead of ${expected} (element ${index} of ${output}, check ${name}).`,
    // JSON knows no NaN: numbers as text.
    {
      detail: {
        kernel,
        check: name,
        output,
        index,
        found: String(found),
        expected: String(expected),
        allowed: close,
        adapter: kernels.gpu.info,
      },
    },
  );
}
