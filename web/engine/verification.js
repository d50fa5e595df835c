/** Whether this device verifies drafts without changing an answer: the same tokens must give the same bits. */
import { MAP_READ, USAGE } from './gpu.js';

/**
 * @typedef {import('./executor.js').Executor} Executor
 * @typedef {import('./operations.js').StepKind} StepKind
 */

/** One size for each tile of kernels that take several tokens, with a token less than the tile has. */
const SIZES = [3, 7];

/**
 * Compare the logits of tokens that go through the model one by one and several at a time, before and beyond the number
 * of keys at which steps are rewritten.
 * @param {Executor} executor  its cache is overwritten
 * @param {{logits: GPUBuffer, vocabulary: number, contextLength: number}} model
 * @returns {Promise<boolean>}
 */
export async function verifiesExactly(executor, { logits, vocabulary, contextLength }) {
  if (!executor.bound.some(({ kind }) => kind === 'few')) return false;
  const starts = startsOf(executor, contextLength, Math.max(...SIZES));
  for (const start of starts) {
    for (const size of SIZES) {
      const ids = Array.from({ length: size }, (_, index) => (7919 * (index + 1)) % vocabulary);
      const apart = new Uint32Array(size * vocabulary);
      for (const [index, id] of ids.entries()) {
        apart.set(await logitsOf(executor, logits, 'one', [id], start + index, vocabulary), index * vocabulary);
      }
      const together = await logitsOf(executor, logits, 'few', ids, start, vocabulary);
      if (together.some((word, index) => word !== apart[index])) return false;
    }
  }
  // Where nothing can be compared nothing is known.
  return starts.length > 0;
}

/**
 * Positions at which steps are rewritten anew, and the first one.
 * @param {Executor} executor
 * @param {number} contextLength
 * @param {number} tokens  that must have room behind each
 */
export const startsOf = ({ bound }, contextLength, tokens) =>
  [...new Set([0, ...bound.map(({ keys }) => keys)])].filter((start) => start + tokens <= contextLength);

/**
 * The bits of the logits of each token.
 * @param {Executor} executor
 * @param {GPUBuffer} logits
 * @param {StepKind} kind
 * @param {number[]} ids
 * @param {number} position
 * @param {number} vocabulary
 */
export async function logitsOf(executor, logits, kind, ids, position, vocabulary) {
  const { gpu, buffers } = executor;
  gpu.queue.writeBuffer(buffers.run.ids, 0, Uint32Array.from(ids));
  gpu.queue.writeBuffer(buffers.run.step, 0, new Uint32Array([position, ids.length, ids.length, 0]));
  const encoder = executor.encode(executor.commands(kind, ['body', 'logits'], ids.length, position + ids.length), 1);
  const size = 4 * ids.length * vocabulary;
  const staging = gpu.buffer('logits read back', size, USAGE.MAP_READ | USAGE.COPY_DST);
  try {
    encoder.copyBufferToBuffer(logits, 0, staging, 0, size);
    gpu.queue.submit([encoder.finish()]);
    await gpu.alive(staging.mapAsync(MAP_READ));
    return new Uint32Array(staging.getMappedRange()).slice();
  } finally {
    gpu.free(staging);
  }
}
