/** A Dawn device in Node with all that the adapter allows, one for the process. */
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

/** Asked for where the adapter has them. */
const FEATURES = ['subgroups', 'shader-f16', 'timestamp-query'];
/** As large as the adapter allows. */
const LIMITS = [
  'maxBufferSize',
  'maxStorageBufferBindingSize',
  'maxStorageBuffersPerShaderStage',
  'maxComputeWorkgroupStorageSize',
  'maxComputeInvocationsPerWorkgroup',
  'maxComputeWorkgroupSizeX',
];

/**
 * For measuring: a clock without rounding, and no clearing of buffers between products that are timed.
 * Neither changes what a kernel does.
 */
export const FLAGS = ['disable-dawn-features=timestamp_quantization,lazy_clear_resource_on_first_use'];

/**
 * @param {string} modules folder of the npm package `webgpu`
 * @param {string[]} [flags] for Dawn
 * @returns {Promise<GPUDevice>}
 */
export async function openDevice(modules, flags = []) {
  // Vulkan drivers look for a screen and print an error where this is not set.
  process.env.XDG_RUNTIME_DIR ??= tmpdir();
  const { create, globals } = await import(pathToFileURL(join(modules, 'index.js')).href);
  Object.assign(globalThis, globals);
  // Dawn crashes if its GPU object is collected while devices live.
  const holder = /** @type {any} */ (globalThis);
  holder.dawn = create(flags);
  const adapter = /** @type {GPUAdapter|null} */ (
    await holder.dawn.requestAdapter({ powerPreference: 'high-performance' })
  );
  if (!adapter) {
    throw new Error('Dawn found no GPU; install a Vulkan driver, or name one in VK_ICD_FILENAMES');
  }
  return adapter.requestDevice({
    label: 'tercet bench',
    requiredFeatures: /** @type {GPUFeatureName[]} */ (FEATURES.filter((name) => adapter.features.has(name))),
    requiredLimits: Object.fromEntries(LIMITS.map((name) => [name, /** @type {any} */ (adapter.limits)[name]])),
  });
}
