/** Times what verifying drafts costs: a step of several tokens beside a step of one. */
import { USAGE } from './gpu.js';
import { median, timings } from './measure_timing.js';

/**
 * @typedef {import('./generate.js').Session} Session
 * @typedef {import('./measure.js').Sizes} Sizes
 * @typedef {{tokens: number, seconds: number}} VerifyReport
 */

/** Tokens of the steps whose costs are compared. */
const VERIFIED = [1, 2, 4, 8];

/**
 * Seconds of a greedy step of one token, and of several that are verified where this device verifies drafts: time on
 * the GPU with many steps in flight, the wait for a result not in it. Overwrites the cache.
 * @param {Session} session
 * @param {number} context  tokens in the cache before, whose numbers do not matter
 * @param {Sizes} sizes
 * @param {AbortSignal} [signal]
 * @returns {Promise<VerifyReport[]>}
 */
export async function verifySeconds({ executor, contextLength }, context, sizes, signal) {
  const { gpu, buffers } = executor;
  const most = executor.verifies ? Math.min(executor.mostVerified, contextLength) : 1;
  const position = Math.max(0, Math.min(context, contextLength - most));
  gpu.queue.writeBuffer(buffers.run.ids, 0, new Uint32Array(most));
  const found = [];
  for (const tokens of VERIFIED.filter((size) => size <= most)) {
    const kind = tokens === 1 ? 'one' : 'few';
    const commands = executor.commands(kind, ['body', 'logits', 'greedy'], tokens, position + tokens);
    const start = gpu.filled('start of a step', new Uint32Array([position, tokens, tokens, 0]), USAGE.COPY_SRC);
    const encode = () => {
      const encoder = executor.encode(commands, 1);
      // The choice moved the position on: the next step begins where this one did.
      encoder.copyBufferToBuffer(start, 0, buffers.run.step, 0, start.size);
      return encoder;
    };
    try {
      gpu.queue.writeBuffer(buffers.run.step, 0, new Uint32Array([position, tokens, tokens, 0]));
      found.push({ tokens, seconds: median(await timings(gpu, encode, sizes, signal)) });
    } finally {
      gpu.free(start);
    }
  }
  return found;
}
