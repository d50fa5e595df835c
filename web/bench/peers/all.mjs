/**
 * Runs every peer on this machine, one after the other:
 * `node all.mjs [--quick | --software] [--only MatMulNBits|decode] [--matrices NxK,...] [--tokens 1,512]
 * [--decoder SHAPE] [--context 128] [--seconds LIMIT]`, by default the matrices and decoders of bitnet-2b and
 * smollm2-135m. JSON lines on stdout: the entries of each script and {peer, op, notRun: reason}. On stderr what they
 * tell, and {done, total, label} as JSON lines.
 *
 * A peer that fails, or that the limit ends, is an entry with its reason, too; what it measured before stays.
 */
import { spawn } from 'node:child_process';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

import { FINISHED, packageFolder } from './ort.mjs';

const PEER = 'onnxruntime-web';
/**
 * The type of activations decides which kernels ONNX Runtime picks for its device, so each has its own process. What
 * matters most comes first, for the limit.
 */
const RUNS = [
  { op: 'MatMulNBits', bits: '4', activations: 'f32' },
  { op: 'decode', bits: '4', activations: 'f32' },
  { op: 'MatMulNBits', bits: '4', activations: 'f16' },
  { op: 'decode', bits: '4', activations: 'f16' },
  { op: 'MatMulNBits', bits: '2', activations: 'f32' },
  { op: 'MatMulNBits', bits: '2', activations: 'f16' },
  { op: 'decode', bits: '2', activations: 'f32' },
  { op: 'decode', bits: '2', activations: 'f16' },
];
const TOO_LATE = 'the time that the peers were given was over';
const SCRIPTS = { MatMulNBits: 'matmulnbits.mjs', decode: 'decoder.mjs' };
/** See README.md. */
const NOT_RUN = [
  {
    peer: '@huggingface/transformers',
    op: 'decode',
    notRun:
      'in Node it runs onnxruntime-node, which is native code; in a page it runs onnxruntime-web, whose decoding is ' +
      'timed beside this the way Transformers.js does it',
  },
  {
    peer: '@wllama/wllama',
    op: 'decode',
    notRun: 'it needs a browser with a GPU: its WebGPU backend runs in a web worker, which Node does not have',
  },
];

function readArguments() {
  const { values } = parseArgs({
    options: {
      quick: { type: 'boolean', default: false },
      software: { type: 'boolean', default: false },
      only: { type: 'string' },
      matrices: { type: 'string' },
      tokens: { type: 'string' },
      decoder: { type: 'string' },
      context: { type: 'string' },
      seconds: { type: 'string', default: '900' },
    },
  });
  if (values.only !== undefined && !Object.hasOwn(SCRIPTS, values.only)) {
    throw new Error(`--only: expected one of ${Object.keys(SCRIPTS).join(', ')}, found ${values.only}`);
  }
  if (!/^[1-9]\d{0,5}$/.test(values.seconds)) {
    throw new Error(`--seconds: expected a positive integer, found ${values.seconds}`);
  }
  return values;
}

/** @typedef {ReturnType<typeof readArguments>} Given */
/** @typedef {{op: keyof typeof SCRIPTS, bits: string, activations: string}} Run */

/** @param {Run} run @param {Given} given @returns {string[]} of Node */
function commandLine({ op, bits, activations }, { quick, software, matrices, tokens, decoder, context }) {
  const option = (/** @type {string} */ name, /** @type {string | undefined} */ value) =>
    value === undefined ? [] : [`--${name}`, value];
  const own =
    op === 'decode'
      ? [...option('context', context), ...(decoder ? [decoder] : [])]
      : [...option('tokens', tokens), ...(matrices?.split(',') ?? [])];
  const effort = software ? ['--software'] : quick ? ['--quick'] : [];
  const path = fileURLToPath(new URL(SCRIPTS[op], import.meta.url));
  return [...process.execArgv, path, '--bits', bits, ...(activations === 'f16' ? ['--f16'] : []), ...effort, ...own];
}

/**
 * Passes on what a script writes, and says why if that is not all.
 *
 * @param {Run} run @param {string[]} command @param {number} milliseconds after which it is ended
 * @param {(entry: object) => void} write @returns {Promise<void>}
 */
async function runScript(run, command, milliseconds, write) {
  const child = spawn(process.execPath, command, { stdio: ['ignore', 'pipe', 'pipe', 'ipc'] });
  let last = '';
  let late = false;
  let finished = false;
  const timer = setTimeout(() => {
    late = true;
    child.kill('SIGKILL');
  }, milliseconds);
  child.on('message', (message) => {
    finished = message === FINISHED;
    child.kill('SIGKILL');
  });
  createInterface({ input: /** @type {import('node:stream').Readable} */ (child.stdout) }).on('line', (line) => {
    // Half a line is what a script leaves that is ended while it writes.
    if (line.startsWith('{') && line.endsWith('}')) write(JSON.parse(line));
  });
  createInterface({ input: /** @type {import('node:stream').Readable} */ (child.stderr) }).on('line', (line) => {
    process.stderr.write(`${line}\n`);
    last = line.trim() || last;
  });
  const ending = await new Promise((resolve) => {
    child.on('error', (error) => resolve(error.message));
    child.on('close', (status, signal) => resolve(finished || status === 0 ? '' : last || `ended with ${signal ?? status}`));
  });
  clearTimeout(timer);
  if (ending) write({ peer: PEER, ...run, bits: Number(run.bits), notRun: late ? TOO_LATE : ending });
}

/** Why no run can succeed; empty if they may. */
function missing() {
  try {
    packageFolder('webgpu', 'WEBGPU_NODE');
    packageFolder(PEER, 'ORT_WEB');
    return '';
  } catch (error) {
    return /** @type {Error} */ (error).message;
  }
}

async function main() {
  const given = readArguments();
  const end = performance.now() + 1000 * Number(given.seconds);
  const write = (/** @type {object} */ entry) => process.stdout.write(`${JSON.stringify(entry)}\n`);
  const reason = missing();
  if (reason) write({ peer: PEER, op: 'all', notRun: reason });
  const runs = /** @type {Run[]} */ (reason ? [] : RUNS.filter(({ op }) => op === (given.only ?? op)));
  for (const [done, run] of runs.entries()) {
    const label = `${PEER}: ${run.op}, ${run.bits} bits, ${run.activations}`;
    process.stderr.write(`${JSON.stringify({ done, total: runs.length, label })}\n`);
    const left = end - performance.now();
    if (left <= 0) write({ peer: PEER, ...run, bits: Number(run.bits), notRun: TOO_LATE });
    else await runScript(run, commandLine(run, given), left, write);
  }
  for (const entry of NOT_RUN) if (entry.op === (given.only ?? entry.op)) write(entry);
}

main().catch((error) => {
  process.stderr.write(`${error.message}\n`);
  process.exitCode = 1;
});
