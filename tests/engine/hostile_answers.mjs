/** For test_hostile.py: code and rule with which the engine's reader refuses each pack, or null. */
import { readFileSync } from 'node:fs';

import { shardChunks, smallFile } from '../../web/engine/download.js';
import { TercetError } from '../../web/engine/errors.js';
import { prepare } from '../../web/engine/prepare.js';
import { FakeLoader } from './fake_gpu.mjs';

/** What a load reads, without a GPU. */
async function read(folder) {
  const { source, contract, pack } = await prepare(folder, { store: null });
  const fetching = { source, store: null };
  for (const [name, listed] of Object.entries(pack.files)) await smallFile(name, listed, fetching);
  const loader = new FakeLoader(contract, pack);
  await loader.allocate(0);
  for (const shard of pack.shards) {
    const take = loader.shard(shard.file, shard.bytes);
    for await (const { bytes } of shardChunks(shard, fetching)) await take(bytes);
  }
  await loader.finish();
}

const answers = [];
for (const folder of JSON.parse(readFileSync(0, 'utf8'))) {
  try {
    await read(folder);
    answers.push(null);
  } catch (error) {
    const typed = error instanceof TercetError && error.action;
    answers.push(
      typed ? { code: error.code, rule: error.detail.rule, message: error.message } : { code: String(error) },
    );
  }
}
process.stdout.write(JSON.stringify(answers));
