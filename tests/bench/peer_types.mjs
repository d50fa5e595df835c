/**
 * Logits of one token of the peers' tiny decoder, on the processor with f32 and f16 activations: a machine whose GPU has
 * no shader-f16 cannot try the latter otherwise. `node peer_types.mjs PEERS`, a folder; {f32: [], f16: []} on stdout.
 */
import { pathToFileURL } from 'node:url';

const peers = pathToFileURL(`${process.argv[2]}/`);
const { decoderGraph, SHAPES } = await import(new URL('decoder_graph.mjs', peers));
const { encodeModel } = await import(new URL('onnx.mjs', peers));
const { loadOrt, ORT_TYPES } = await import(new URL('ort.mjs', peers));
const { floats, values } = await import(new URL('quantized.mjs', peers));

const PAST = 8;
const { ort } = await loadOrt();
const shape = SHAPES.tiny;
const logits = {};
for (const dtype of ['f32', 'f16']) {
  const { growing } = decoderGraph(shape, { bits: 4, dtype, capacity: 64 });
  const external = growing.initializers.filter((tensor) => tensor.external);
  const session = await ort.InferenceSession.create(encodeModel(growing), {
    executionProviders: ['wasm'],
    externalData: external.map(({ name, data }) => ({ path: name, data: new Uint8Array(data.buffer) })),
  });
  const number = (value, dims) => new ort.Tensor('int32', Int32Array.of(value), dims);
  const feeds = { ids: number(5, [1, 1]), last: number(PAST, [1]), total: number(PAST + 1, [1]) };
  const zeros = floats(new Float32Array(shape.kvHeads * PAST * shape.headDim), dtype);
  for (const { name } of growing.inputs.slice(3)) {
    feeds[name] = new ort.Tensor(ORT_TYPES[dtype], zeros.slice(), [1, shape.kvHeads, PAST, shape.headDim]);
  }
  const found = await session.run(feeds);
  logits[dtype] = values(found.logits.data);
}
process.stdout.write(JSON.stringify(logits), () => process.exit(0));
