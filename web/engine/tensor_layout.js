/** How tensors lie in shards and on the GPU, by encoding. The Python twins: packer/manifest.py, shaders/weights.py. */

/**
 * @typedef {import('./pack.js').Pack} Pack
 * @typedef {import('./pack.js').Tensor} Tensor
 *
 * @typedef {object} Key  what a shard must hold under a key
 * @property {Tensor} tensor
 * @property {'data'|'scale'|'tensor_scale'} part
 * @property {number} row  first row of the slice
 * @property {string} dtype
 * @property {number[]} shape
 *
 * @typedef {{group: number, dtype: string, each: number, bytes: number, own: number}} Grouped
 */

/** dtype and elements a row of each encoding's data. @type {Record<string, (columns: number) => [string, number]>} */
const DATA = {
  ternary: (columns) => ['U8', 4 * Math.ceil(columns / 20)],
  q8: (columns) => ['I8', 32 * Math.ceil(columns / 32)],
  q4: (columns) => ['U8', 16 * Math.ceil(columns / 32)],
  q4a: (columns) => ['U8', 16 * Math.ceil(columns / 32)],
  nvfp4: (columns) => ['U8', 16 * Math.ceil(columns / 32)],
  mxfp4: (columns) => ['U8', 16 * Math.ceil(columns / 32)],
  f16: (columns) => ['F16', 4 * Math.ceil(columns / 4)],
  f32: (columns) => ['F32', 4 * Math.ceil(columns / 4)],
};

export const ENCODINGS = Object.freeze(Object.keys(DATA));

const HALVES = { dtype: 'F16', each: 1, bytes: 2, own: 0 };
/**
 * Scales by groups of columns: columns a group, dtype, scales a group, their bytes, bytes of the tensor's own scale.
 * A ternary tensor chooses its group.
 * @type {Record<string, Grouped>}
 */
const GROUPED = {
  ternary: { group: 0, ...HALVES },
  q8: { group: 32, ...HALVES },
  q4: { group: 32, ...HALVES },
  q4a: { group: 32, dtype: 'F16', each: 2, bytes: 4, own: 0 },
  nvfp4: { group: 16, dtype: 'U8', each: 1, bytes: 1, own: 4 },
  mxfp4: { group: 32, dtype: 'U8', each: 1, bytes: 1, own: 0 },
};

/** Columns that share a scale, where the encoding fixes them; 0: it does not. @param {string} encoding */
export const fixedGroup = (encoding) => GROUPED[encoding]?.group ?? 0;

/** Groups of scales a row. @param {Tensor} tensor a matrix */
export const scalesPerRow = ({ scale, group, shape }) => (group ? Math.ceil(shape[1] / group) : scale ? 1 : 0);

/** Bytes of a row's scales. @param {Tensor} tensor a matrix */
export const scaleRowBytes = (tensor) => scalesPerRow(tensor) * (tensor.group ? GROUPED[tensor.encoding].bytes : 4);

/** Bytes of the scale that all values of a tensor have in common. @param {Tensor} tensor */
export const tensorScaleBytes = ({ encoding }) => GROUPED[encoding]?.own ?? 0;

/** u32 words of the scales of some rows, after the tensor's own. @param {Tensor} tensor @param {number} rows */
export const scaleWords = (tensor, rows) =>
  tensorScaleBytes(tensor) / 4 + Math.ceil((rows * scaleRowBytes(tensor)) / 4);

/**
 * All keys that the shards must hold, once each.
 * @param {Pack} pack
 * @returns {Map<string, Key>}
 */
export function expectedKeys(pack) {
  /** @type {Map<string, Key>} */
  const keys = new Map();
  for (const tensor of pack.tensors.values()) {
    const { name, shape, encoding, scale, group } = tensor;
    if (shape.length === 1) {
      keys.set(`${name}.data.0`, { tensor, part: 'data', row: 0, dtype: 'F32', shape });
      continue;
    }
    const [dtype, width] = DATA[encoding](shape[1]);
    let row = 0;
    tensor.slices.forEach((rows, index) => {
      keys.set(`${name}.data.${index}`, { tensor, part: 'data', row, dtype, shape: [rows, width] });
      if (scale === 'row') {
        keys.set(`${name}.scale.${index}`, { tensor, part: 'scale', row, dtype: 'F32', shape: [rows] });
      } else if (group) {
        const { dtype: scaleType, each } = GROUPED[encoding];
        const scaleShape = [rows, each * scalesPerRow(tensor)];
        keys.set(`${name}.scale.${index}`, { tensor, part: 'scale', row, dtype: scaleType, shape: scaleShape });
      }
      row += rows;
    });
    if (scale === 'parts') {
      keys.set(`${name}.scale`, { tensor, part: 'scale', row: 0, dtype: 'F32', shape: [tensor.parts.length] });
    }
    if (tensorScaleBytes(tensor)) {
      keys.set(`${name}.tensor_scale`, { tensor, part: 'tensor_scale', row: 0, dtype: 'F32', shape: [1] });
    }
  }
  return keys;
}
