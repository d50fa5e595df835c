/**
 * Runs every peer on this machine: `node all.mjs [--quick]`. One JSON array on stdout, of the entries of each script
 * and of {peer, notRun: reason}; progress on stderr. A peer that fails is an entry with its reason, too.
 */
import { spawn } from 'node:child_process';
import { fileURLToPath } from 'node:url';

const QUICK = process.argv.includes('--quick');
/** The type of activations decides which kernels ONNX Runtime picks for its device, so each has its own process. */
const RUNS = [
  { peer: 'onnxruntime-web', op: 'MatMulNBits', script: 'matmulnbits.mjs', options: [] },
  { peer: 'onnxruntime-web', op: 'MatMulNBits', script: 'matmulnbits.mjs', options: ['--f16'] },
  { peer: 'onnxruntime-web', op: 'decode', script: 'decoder.mjs', options: [] },
  { peer: 'onnxruntime-web', op: 'decode', script: 'decoder.mjs', options: ['--f16'] },
];
const NOT_RUN = [
  {
    peer: '@wllama/wllama',
    notRun: 'it needs a browser: its WebGPU backend runs in a web worker, which Node does not have',
  },
];

/**
 * What a script writes, or why it wrote nothing.
 *
 * @param {{peer: string, op: string, script: string, options: string[]}} run @returns {Promise<object[]>}
 */
function entries({ peer, op, script, options }) {
  const path = fileURLToPath(new URL(script, import.meta.url));
  const all = [...process.execArgv, path, ...options, ...(QUICK ? ['--quick'] : [])];
  const child = spawn(process.execPath, all, { stdio: ['ignore', 'pipe', 'pipe'] });
  let [output, errors] = ['', ''];
  child.stdout.setEncoding('utf8').on('data', (text) => (output += text));
  child.stderr.setEncoding('utf8').on('data', (text) => {
    process.stderr.write(text);
    errors = (errors + text).slice(-4000);
  });
  return new Promise((resolve) => {
    child.on('error', (error) => resolve([{ peer, op, options, notRun: error.message }]));
    child.on('close', (status, signal) => {
      const reason = errors.trim().split('\n').at(-1) || `ended with ${signal ?? `status ${status}`}`;
      resolve(status === 0 ? JSON.parse(output) : [{ peer, op, options, notRun: reason }]);
    });
  });
}

const results = [];
for (const run of RUNS) results.push(...(await entries(run)));
process.stdout.write(`${JSON.stringify([...results, ...NOT_RUN], null, 1)}\n`);
