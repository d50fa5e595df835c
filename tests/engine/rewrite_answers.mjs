/** For test_rewrite.py: what each list of operations becomes. */
import { readFileSync } from 'node:fs';

import { checkContract } from '../../web/engine/contract.js';
import { rewrite } from '../../web/engine/rewrite.js';

const contract = checkContract(
  JSON.parse(readFileSync(new URL('../../shaders/kernels.json', import.meta.url), 'utf8')),
);
const answers = JSON.parse(readFileSync(0, 'utf8')).map(({ ops, later, refused, software, keys }) =>
  rewrite(contract, ops, later, ({ op }) => !refused.includes(op), { software, keys }),
);
process.stdout.write(JSON.stringify(answers));
