/** For test_node.py: measures a pack whole, stopped and during an answer, and tells what is left behind. */
import { readFileSync } from 'node:fs';

import { openDevice } from '../../web/bench/device.mjs';

const device = await openDevice(new URL('../../web/node_modules/webgpu', import.meta.url).pathname);
const { Engine } = await import('../../web/engine/index.js');

const { pack } = JSON.parse(readFileSync(0, 'utf8'));
const engine = await Engine.load(pack, { device, contextLength: 48 });

async function answer() {
  const ids = [];
  for await (const id of engine.generate([1, 2, 3, 4, 5], { temperature: 0, max_tokens: 4, stopIds: [] })) ids.push(id);
  return ids;
}

/** @param {import('../../web/engine/measure.js').MeasureOptions} options */
async function codeOf(options) {
  return engine.measure(options).then(
    () => 'none',
    ({ code }) => code,
  );
}

const before = await answer();
const bytes = [];
const codes = {};
/** @type {Promise<string>|null} */
let asked = null;
const report = await engine.measure({
  onProgress: ({ label }) => {
    if (label.startsWith('the matrix o')) asked = answer().then(String, ({ code }) => code);
  },
});
codes.during = await asked;
const names = report.linears.map(({ name }) => name);
bytes.push(engine.gpu.bytes);
const stop = new AbortController();
codes.aborted = await codeOf({
  signal: stop.signal,
  onProgress: ({ label }) => {
    if (label.startsWith('the matrix o')) stop.abort();
  },
});
codes.before = await codeOf({ signal: AbortSignal.abort() });
bytes.push(engine.gpu.bytes);
const writing = engine.generate([1, 2, 3], { temperature: 0, max_tokens: 4, stopIds: [] });
await writing.next();
codes.meanwhile = await codeOf({});
await writing.return();
const after = await answer();
process.stdout.write(JSON.stringify({ before, after, bytes, names, codes }), () => process.exit(0));
