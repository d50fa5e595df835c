/**
 * Measures the page's engine in Node, on Dawn, which is Chrome's WebGPU:
 * `node web/bench/bench.mjs PACK [--context N] [--kv f16] [--chunk N] [--kernels TEXT] [--quick]`. Progress goes to stderr as JSON lines
 * {done, total, label}, the report to stdout as JSON, and an error as one line {error} to stderr, with exit status 1.
 *
 * Dawn's npm package `webgpu` is taken from the folder WEBGPU_NODE, or from web/node_modules.
 */
import { existsSync } from 'node:fs';
import { resolve } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { parseArgs } from 'node:util';

import { FLAGS, openDevice } from './device.mjs';

/** @param {object} line */
const tell = (line) => process.stderr.write(`${JSON.stringify(line)}\n`);

/** @param {string|undefined} text @param {string} option */
function count(text, option) {
  if (text === undefined) return undefined;
  if (!/^[1-9]\d{0,8}$/.test(text)) throw new Error(`--${option} is ${text}, expected a positive integer`);
  return Number(text);
}

async function run() {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      context: { type: 'string' },
      kv: { type: 'string' },
      chunk: { type: 'string' },
      kernels: { type: 'string' },
      quick: { type: 'boolean' },
    },
  });
  if (positionals.length !== 1) throw new Error(`found ${positionals.length} packs, expected one folder`);
  const pack = resolve(positionals[0]);
  const [contextLength, prefillChunk] = [count(values.context, 'context'), count(values.chunk, 'chunk')];
  const modules = process.env.WEBGPU_NODE ?? fileURLToPath(new URL('../node_modules/webgpu', import.meta.url));
  if (!existsSync(modules)) {
    throw new Error(`${modules}: Dawn is not there; run npm ci in web/, or name its folder in WEBGPU_NODE`);
  }
  const device = await openDevice(modules, FLAGS);
  const { Engine } = await import('../engine/index.js');
  const engine = await Engine.load(`${pathToFileURL(pack)}/`, {
    device,
    contextLength,
    prefillChunk,
    kernels: values.kernels,
    kvCache: /** @type {any} */ (values.kv),
    onProgress: ({ phase, loaded, total }) => tell({ done: loaded, total, label: `loading: ${phase}` }),
  });
  return engine.measure({ quick: values.quick, onProgress: tell });
}

try {
  const report = await run();
  // Dawn's own threads would keep the process: it ends when all is written.
  process.stdout.write(`${JSON.stringify(report)}\n`, () => process.exit(0));
} catch (error) {
  const { message, action = '' } = /** @type {any} */ (error);
  process.stderr.write(`${JSON.stringify({ error: `${message} ${action}`.trim() })}\n`, () => process.exit(1));
}
