/**
 * Brings weights onto the GPU as their bytes arrive: buffers are made before the download, ternary rows are expanded
 * by a kernel, scales by part become scales by row, and nothing larger than a chunk is held on the CPU but scales.
 */
import { encodeParams, workgroups } from './contract.js';
import { packError } from './errors.js';
import { USAGE } from './gpu.js';
import { pieces, rowWords } from './memory.js';
import { expandVariant } from './operations.js';
import { parseHeader } from './safetensors.js';
import { expectedKeys, scaleRowBytes, scaleWords, scalesPerRow, tensorScaleBytes } from './tensor_layout.js';
import { checkScales, joined, rowsOfParts, wholeWords } from './weight_bytes.js';

/**
 * @typedef {import('./pack.js').Pack} Pack
 * @typedef {import('./pack.js').Tensor} Tensor
 * @typedef {import('./tensor_layout.js').Key} Key
 * @typedef {import('./kernels.js').Kernels} Kernels
 * @typedef {import('./memory.js').Piece} Piece
 *
 * @typedef {Piece & {data: GPUBuffer, scale: GPUBuffer|null}} WeightPiece
 * @typedef {{tensor: Tensor, vector: GPUBuffer|null, pieces: WeightPiece[]}} Weight
 *
 * What has arrived of a tensor.
 * @typedef {object} Arrival
 * @property {Weight} weight
 * @property {Uint8Array<ArrayBuffer>} scales  as on disk, the tensor's own first; of a vector its values
 * @property {number} scalesLeft  bytes
 * @property {number[]} dataLeft  bytes of each piece
 * @property {(Promise<GPUBuffer>|null)[]} disk  ternary rows of each piece until they are expanded
 * @property {boolean} counted
 */

const STORAGE = USAGE.STORAGE | USAGE.COPY_DST;
/** The driver copies what is written: more than this is not queued before it has caught up. */
const MAX_QUEUED_BYTES = 32 << 20;

export class WeightLoader {
  /**
   * @param {Kernels} kernels
   * @param {Pack} pack
   * @param {number} limit bytes of a binding
   * @param {(done: number, total: number) => void} onTensor
   */
  constructor(kernels, pack, limit, onTensor) {
    this.kernels = kernels;
    this.gpu = kernels.gpu;
    this.pack = pack;
    this.bindingLimit = limit;
    this.onTensor = onTensor;
    this.keys = expectedKeys(pack);
    /** @type {Set<string>} */
    this.seen = new Set();
    /** @type {Map<string, Arrival>} */
    this.arrivals = new Map();
    this.done = 0;
    this.queued = 0;
  }

  /**
   * Make all buffers, so that a lack of memory shows before the download.
   * @param {number} bytes in all, for the message
   */
  async allocate(bytes) {
    await this.gpu.allocate(`the weights of ${this.pack.name}`, bytes, () => {
      for (const tensor of this.pack.tensors.values()) this.arrivals.set(tensor.name, this.arrival(tensor));
    });
  }

  /**
   * @param {Tensor} tensor
   * @returns {Arrival}
   */
  arrival(tensor) {
    const { name, shape, scale } = tensor;
    if (shape.length === 1) {
      const vector = this.gpu.buffer(name, 4 * shape[0], STORAGE | USAGE.COPY_SRC);
      return arrivalOf({ tensor, vector, pieces: [] }, 4 * shape[0], [], 0);
    }
    const { contract } = this.kernels;
    const words = rowWords(tensor, contract);
    const made = pieces(tensor, contract, this.bindingLimit).map((piece) => ({
      ...piece,
      data: this.gpu.buffer(name, 4 * piece.rows * words.resident, STORAGE),
      scale: scalesPerRow(tensor)
        ? this.gpu.buffer(`${name} scales`, 4 * scaleWords(tensor, piece.rows), STORAGE)
        : null,
    }));
    const scaleBytes = scale === 'parts' ? 4 * tensor.parts.length : shape[0] * scaleRowBytes(tensor);
    const allBytes = tensorScaleBytes(tensor) + scaleBytes;
    return arrivalOf({ tensor, vector: null, pieces: made }, allBytes, made, 4 * words.disk);
  }

  /**
   * A shard, to be given its bytes front to back.
   * @param {string} file
   * @param {number} fileBytes
   * @returns {(bytes: Uint8Array<ArrayBuffer>) => Promise<void>} takes the next chunk; the first one holds the header
   */
  shard(file, fileBytes) {
    /** @type {import('./safetensors.js').Entry[]|null} */
    let entries = null;
    /** @type {Uint8Array<ArrayBuffer>} */
    let carry = new Uint8Array(0);
    let at = 0;
    return async (bytes) => {
      entries ??= this.checkKeys(parseHeader(bytes, fileBytes, file), file);
      const end = at + bytes.byteLength;
      for (const { key, begin, end: keyEnd } of entries) {
        if (keyEnd <= at || begin >= end) continue;
        const from = Math.max(begin, at);
        let part = bytes.subarray(from - at, Math.min(keyEnd, end) - at);
        let offset = from - begin;
        const expected = /** @type {Key} */ (this.keys.get(key));
        if (expected.part === 'data' && expected.tensor.shape.length === 2) {
          // The GPU takes whole words only; what is left of one at the end of a chunk goes before the next chunk.
          if (carry.byteLength) {
            offset -= carry.byteLength;
            part = joined(carry, part);
          }
          carry = part.slice(part.byteLength & ~3);
          part = part.subarray(0, part.byteLength & ~3);
          await this.takeData(expected, offset, part);
        } else {
          await this.takeScales(expected, offset, part);
        }
      }
      at = end;
    };
  }

  /**
   * @param {import('./safetensors.js').Entry[]} entries
   * @param {string} file
   */
  checkKeys(entries, file) {
    for (const { key, dtype, shape } of entries) {
      const expected = this.keys.get(key);
      if (!expected) throw packError('extra', `${file}: the key ${key} belongs to no tensor of pack.json.`);
      if (dtype !== expected.dtype || String(shape) !== String(expected.shape) || this.seen.has(key)) {
        throw packError(
          'tensor',
          `${file}: tensor ${expected.tensor.name}, key ${key}: found ${dtype} [${shape}], expected ${expected.dtype} [${expected.shape}] once.`,
        );
      }
      this.seen.add(key);
    }
    return entries;
  }

  /**
   * Write rows of a matrix, which may lie across two pieces.
   * @param {Key} key
   * @param {number} offset bytes from the start of the slice
   * @param {Uint8Array<ArrayBuffer>} bytes
   */
  async takeData({ tensor, row }, offset, bytes) {
    const arrival = this.arrivalOf(tensor);
    const rowBytes = 4 * rowWords(tensor, this.kernels.contract).disk;
    let at = row * rowBytes + offset;
    for (const [index, piece] of arrival.weight.pieces.entries()) {
      const start = piece.row * rowBytes;
      const length = Math.min(start + piece.rows * rowBytes - at, bytes.byteLength);
      if (length <= 0 || at < start) continue;
      const target =
        tensor.encoding === 'ternary'
          ? await (arrival.disk[index] ??= this.diskBuffer(tensor, piece.rows * rowBytes))
          : piece.data;
      this.gpu.queue.writeBuffer(target, at - start, bytes, 0, length);
      arrival.dataLeft[index] -= length;
      if (arrival.dataLeft[index] === 0 && tensor.encoding === 'ternary') await this.expand(arrival, index);
      bytes = bytes.subarray(length);
      at += length;
      await this.breathe(length);
    }
    this.finishTensor(arrival);
  }

  /** @param {Tensor} tensor @param {number} bytes */
  diskBuffer(tensor, bytes) {
    return this.gpu.allocate(`the tensor ${tensor.name} while it is expanded`, bytes, () =>
      this.gpu.buffer(`${tensor.name} on disk`, bytes, STORAGE),
    );
  }

  /**
   * @param {Arrival} arrival
   * @param {number} index of the piece
   */
  async expand({ weight, disk }, index) {
    const { tensor, pieces: all } = weight;
    const { kernels, gpu } = this;
    const { kernel, overrides, symbols } = expandVariant(kernels.contract, gpu.abilities, tensor, all[index].rows);
    const { pipeline, layout } = await kernels.compile(kernel, overrides);
    const packed = await /** @type {Promise<GPUBuffer>} */ (disk[index]);
    const params = gpu.filled('expand', encodeParams(kernel, symbols), USAGE.UNIFORM);
    const storage = kernel.bindings.map(({ from }) => ({ buffer: from === 'w.disk' ? packed : all[index].data }));
    const encoder = gpu.device.createCommandEncoder({ label: `expand ${tensor.name}` });
    const pass = encoder.beginComputePass();
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, kernels.bind(kernel, layout, params, params, storage));
    pass.dispatchWorkgroups(...workgroups(kernel, symbols));
    pass.end();
    gpu.queue.submit([encoder.finish()]);
    // The GPU keeps destroyed buffers until submitted work is done with them.
    gpu.free(packed);
    gpu.free(params);
    disk[index] = null;
  }

  /**
   * Collect scales, or the values of a vector, until they are complete.
   * @param {Key} key
   * @param {number} offset
   * @param {Uint8Array<ArrayBuffer>} bytes
   */
  async takeScales({ tensor, row, part }, offset, bytes) {
    const arrival = this.arrivalOf(tensor);
    const isRows = part === 'scale' && tensor.scale !== 'parts';
    const start = isRows ? tensorScaleBytes(tensor) + row * scaleRowBytes(tensor) : 0;
    arrival.scales.set(bytes, start + offset);
    arrival.scalesLeft -= bytes.byteLength;
    if (arrival.scalesLeft === 0) {
      this.uploadScales(arrival);
      await this.breathe(arrival.scales.byteLength);
      arrival.scales = new Uint8Array(0);
    }
    this.finishTensor(arrival);
  }

  /** @param {Arrival} arrival */
  uploadScales({ weight: { tensor, vector, pieces: all }, scales }) {
    checkScales(tensor, scales);
    if (vector) {
      this.gpu.queue.writeBuffer(vector, 0, scales);
      return;
    }
    const own = scales.subarray(0, tensorScaleBytes(tensor));
    const rows = tensor.scale === 'parts' ? rowsOfParts(scales, tensor.parts) : scales.subarray(own.byteLength);
    const rowBytes = rows.byteLength / tensor.shape[0];
    for (const { row, rows: count, scale } of all) {
      let part = rows.slice(row * rowBytes, (row + count) * rowBytes);
      if (own.byteLength) part = joined(own, part);
      this.gpu.queue.writeBuffer(/** @type {GPUBuffer} */ (scale), 0, wholeWords(part));
    }
  }

  /** @param {Tensor} tensor */
  arrivalOf(tensor) {
    return /** @type {Arrival} */ (this.arrivals.get(tensor.name));
  }

  /** @param {Arrival} arrival */
  finishTensor(arrival) {
    if (arrival.counted || arrival.scalesLeft || arrival.dataLeft.some(Boolean)) return;
    arrival.counted = true;
    this.done += 1;
    this.onTensor(this.done, this.pack.tensors.size);
  }

  /** Let the GPU catch up. @param {number} bytes */
  async breathe(bytes) {
    this.queued += bytes;
    if (this.queued < MAX_QUEUED_BYTES) return;
    this.queued = 0;
    await this.gpu.alive(this.gpu.queue.onSubmittedWorkDone());
  }

  /**
   * @returns {Promise<Map<string, Weight>>} all weights, by name
   * @throws {TercetError} if a tensor is in no shard
   */
  async finish() {
    for (const [key, { tensor }] of this.keys) {
      if (!this.seen.has(key)) throw packError('tensor', `tensor ${tensor.name}: the key ${key} is in no shard.`);
    }
    await this.gpu.alive(this.gpu.queue.onSubmittedWorkDone());
    return new Map([...this.arrivals].map(([name, { weight }]) => [name, weight]));
  }
}

/**
 * @param {Weight} weight
 * @param {number} scaleBytes
 * @param {Piece[]} cut
 * @param {number} rowBytes
 * @returns {Arrival}
 */
const arrivalOf = (weight, scaleBytes, cut, rowBytes) => ({
  weight,
  scales: new Uint8Array(scaleBytes),
  scalesLeft: scaleBytes,
  dataLeft: cut.map(({ rows }) => rows * rowBytes),
  disk: cut.map(() => null),
  counted: false,
});
