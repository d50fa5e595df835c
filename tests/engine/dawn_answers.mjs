/**
 * For test_dawn.py: loads packs with a real device (Dawn, Chrome's WebGPU) and answers with ids, errors and counts.
 * A question is {jobs: [{pack, options, runs: [{ids, options}], loads, lose}]}; `lose` destroys the device meanwhile.
 */
import { readFileSync } from 'node:fs';

import { create, globals } from '../../web/node_modules/webgpu/index.js';

Object.assign(globalThis, globals);
const { toMessage } = await import('../../web/engine/errors.js');
const { Engine } = await import('../../web/engine/index.js');

// Dawn crashes if its GPU object is collected while devices live.
globalThis.dawn = create([]);

/** Counts the buffers of a device that are alive. */
async function countingDevice() {
  const device = await (await dawn.requestAdapter()).requestDevice();
  const counts = { alive: 0 };
  const make = device.createBuffer.bind(device);
  device.createBuffer = (descriptor) => {
    const buffer = make(descriptor);
    const destroy = buffer.destroy.bind(buffer);
    counts.alive += 1;
    buffer.destroy = () => {
      counts.alive -= 1;
      destroy();
    };
    return buffer;
  };
  return { device, counts };
}

async function generate(engine, { ids, options }, onId = () => {}) {
  const answer = [];
  try {
    for await (const id of engine.generate(ids, options)) {
      answer.push(id);
      onId(answer.length);
    }
  } catch (error) {
    return { ids: answer, error: toMessage(error) };
  }
  return { ids: answer };
}

// One for all jobs: what is compiled on a device, and still referred to, is not compiled there again. A job that loses
// the device comes last.
const { device, counts } = await countingDevice();
const engines = [];

async function work({ pack, options = {}, runs = [], loads = 1, lose = false }) {
  const alive = [];
  const answers = [];
  let info = null;
  let lost = null;
  try {
    for (let load = 0; load < loads; load++) {
      const phases = new Set();
      const engine = await Engine.load(pack, { device, ...options, onProgress: ({ phase }) => phases.add(phase) });
      engines.push(engine);
      void engine.lost.then((error) => {
        lost = error.code;
      });
      info = { ...engine.info, phases: [...phases], buffers: engine.gpu.bytes };
      for (const run of runs) {
        answers.push(
          await generate(engine, run, (count) => {
            if (lose && count === 2) device.destroy();
          }),
        );
      }
      if (lose) await engine.lost;
      await engine.dispose();
      alive.push(counts.alive);
    }
    return { answers, alive, info, lost };
  } catch (error) {
    return { error: toMessage(error), alive: [counts.alive] };
  }
}

const { jobs } = JSON.parse(readFileSync(0, 'utf8'));
const results = [];
for (const job of jobs) results.push(await work(job));
process.stdout.write(JSON.stringify(results), () => process.exit(0));
