/**
 * Writes ONNX models: as much of protobuf and of onnx.proto as the peers' models need, so that a machine
 * without Python's `onnx` can make them.
 *
 * @typedef {'f32' | 'f16' | 'u8' | 'i32' | 'i64'} DType
 * @typedef {{name: string, dtype: DType, shape: readonly (number | string)[]}} Value
 * @typedef {{name: string, dtype: DType, shape: readonly number[], data: ArrayBufferView,
 *   external?: boolean}} Initializer external: the data lies beside the model, in a file of the tensor's name
 * @typedef {number | {float: number} | string} Attribute a number is an int, as nearly all of them are
 * @typedef {{op: string, inputs: readonly string[], outputs: readonly string[], domain?: string,
 *   attributes?: Record<string, Attribute>}} Operation
 * @typedef {{inputs: readonly Value[], outputs: readonly Value[], initializers: readonly Initializer[],
 *   nodes: readonly Operation[]}} Graph
 */

/** The domain of ONNX Runtime's own operators. */
export const CONTRIB = 'com.microsoft';

const IR_VERSION = 10;
const OPSET = 21;
const CONTRIB_OPSET = 1;
/** TensorProto.DataType */
const DATA_TYPES = { f32: 1, u8: 2, i32: 6, i64: 7, f16: 10 };
/** AttributeProto.AttributeType */
const ATTRIBUTE_TYPES = { float: 1, int: 2, string: 3 };
/** TensorProto.DataLocation */
const EXTERNAL_LOCATION = 1;
const LENGTH_DELIMITED = 2;
const FIXED_32 = 5;

/** @typedef {Uint8Array[]} Parts what was encoded so far, joined once at the end: weights are not copied on the way */

/** @param {number} value an integer @returns {Uint8Array} */
function varint(value) {
  const bytes = [];
  let rest = BigInt.asUintN(64, BigInt(value));
  while (rest > 127n) {
    bytes.push(Number(rest & 127n) | 128);
    rest >>= 7n;
  }
  bytes.push(Number(rest));
  return Uint8Array.from(bytes);
}

/** @param {number} field @param {number} value @returns {Parts} */
const int = (field, value) => [varint(field * 8), varint(value)];

/** @param {number} field @param {Parts} parts @returns {Parts} */
function message(field, parts) {
  const bytes = parts.reduce((sum, part) => sum + part.length, 0);
  return [varint(field * 8 + LENGTH_DELIMITED), varint(bytes), ...parts];
}

/** @param {number} field @param {string} value @returns {Parts} */
const text = (field, value) => message(field, [new TextEncoder().encode(value)]);

/** @param {number} field @param {number} value @returns {Parts} */
const float = (field, value) => [
  varint(field * 8 + FIXED_32),
  new Uint8Array(Float32Array.of(value).buffer),
];

/** @param {[string, Attribute]} entry @returns {Parts} AttributeProto */
function attribute([name, value]) {
  const named = text(1, name);
  if (typeof value === 'number') return [...named, ...int(3, value), ...int(20, ATTRIBUTE_TYPES.int)];
  if (typeof value === 'string') return [...named, ...text(4, value), ...int(20, ATTRIBUTE_TYPES.string)];
  return [...named, ...float(2, value.float), ...int(20, ATTRIBUTE_TYPES.float)];
}

/** @param {Operation} node @param {number} index @returns {Parts} NodeProto */
function nodeProto({ op, inputs, outputs, domain = '', attributes = {} }, index) {
  return [
    ...inputs.flatMap((name) => text(1, name)),
    ...outputs.flatMap((name) => text(2, name)),
    ...text(3, `${op}.${index}`),
    ...text(4, op),
    ...Object.entries(attributes).flatMap((entry) => message(5, attribute(entry))),
    ...text(7, domain),
  ];
}

/** @param {Initializer} tensor @returns {Parts} TensorProto */
function tensorProto({ name, dtype, shape, data, external }) {
  const raw = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
  const entry = (/** @type {string} */ key, /** @type {string} */ value) =>
    message(13, [...text(1, key), ...text(2, value)]);
  return [
    ...shape.flatMap((size) => int(1, size)),
    ...int(2, DATA_TYPES[dtype]),
    ...text(8, name),
    ...(external
      ? [...entry('location', name), ...entry('length', `${raw.length}`), ...int(14, EXTERNAL_LOCATION)]
      : message(9, [raw])),
  ];
}

/** @param {Value} value @returns {Parts} ValueInfoProto */
function valueInfo({ name, dtype, shape }) {
  const dimensions = shape.flatMap((size) => message(1, typeof size === 'number' ? int(1, size) : text(2, size)));
  const tensorType = [...int(1, DATA_TYPES[dtype]), ...message(2, dimensions)];
  return [...text(1, name), ...message(2, message(1, tensorType))];
}

/**
 * The bytes of a ModelProto.
 *
 * @param {Graph} graph @returns {Uint8Array}
 */
export function encodeModel({ inputs, outputs, initializers, nodes }) {
  const graph = [
    ...nodes.flatMap((node, index) => message(1, nodeProto(node, index))),
    ...text(2, 'peer'),
    ...initializers.flatMap((tensor) => message(5, tensorProto(tensor))),
    ...inputs.flatMap((value) => message(11, valueInfo(value))),
    ...outputs.flatMap((value) => message(12, valueInfo(value))),
  ];
  const opset = (/** @type {string} */ domain, /** @type {number} */ version) =>
    message(8, [...text(1, domain), ...int(2, version)]);
  const model = [
    ...int(1, IR_VERSION),
    ...message(7, graph),
    ...opset('', OPSET),
    ...opset(CONTRIB, CONTRIB_OPSET),
  ];
  return join(model);
}

/** @param {Parts} parts @returns {Uint8Array} */
function join(parts) {
  const joined = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    joined.set(part, at);
    at += part.length;
  }
  return joined;
}
