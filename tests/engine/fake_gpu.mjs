/** The part of Gpu that weights are loaded onto, with buffers in memory. */
import assert from 'node:assert/strict';

import { WeightLoader } from '../../web/engine/weights.js';

export class FakeGpu {
  constructor() {
    this.queue = {
      writeBuffer: (buffer, offset, data, start = 0, size = data.byteLength - start) => {
        assert.ok(offset % 4 === 0 && size % 4 === 0, 'the GPU takes whole words');
        assert.ok(offset + size <= buffer.bytes.byteLength, 'inside of the buffer');
        buffer.bytes.set(data.subarray(start, start + size), offset);
      },
      onSubmittedWorkDone: async () => {},
    };
  }

  buffer(label, size) {
    return { label, bytes: new Uint8Array(Math.ceil(size / 4) * 4) };
  }

  allocate(what, bytes, make) {
    return Promise.resolve(make());
  }

  alive(promise) {
    return promise;
  }
}

/** Keeps the disk layout of what would be expanded. */
export class FakeLoader extends WeightLoader {
  constructor(contract, pack, limit = 1 << 27) {
    super({ gpu: new FakeGpu(), contract }, pack, limit, () => {
      this.counted = (this.counted ?? 0) + 1;
    });
    this.expanded = new Map();
  }

  async expand({ weight, disk }, index) {
    this.expanded.set(`${weight.tensor.name}.${index}`, (await disk[index]).bytes);
  }
}
