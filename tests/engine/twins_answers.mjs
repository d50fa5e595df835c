/** For test_twins.py: the rule that each pack.json or program.json breaks, or null. */
import { readFileSync } from 'node:fs';

import { checkContract } from '../../web/engine/contract.js';
import { TercetError } from '../../web/engine/errors.js';
import { checkPack } from '../../web/engine/pack.js';
import { checkProgram } from '../../web/engine/program.js';

const { manifest, manifests, programs } = JSON.parse(readFileSync(0, 'utf8'));
const contract = checkContract(
  JSON.parse(readFileSync(new URL('../../shaders/kernels.json', import.meta.url), 'utf8')),
);
const { tensors } = checkPack(manifest);

function rule(check) {
  try {
    check();
    return null;
  } catch (error) {
    return error instanceof TercetError ? error.detail.rule : `${error.name}: ${error.message}`;
  }
}

process.stdout.write(
  JSON.stringify({
    manifests: manifests.map((one) => rule(() => checkPack(one))),
    programs: programs.map((one) => rule(() => checkProgram(one, contract, tensors))),
  }),
);
