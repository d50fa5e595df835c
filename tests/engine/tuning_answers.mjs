/** For test_twins_tuning.py: what the engine makes of texts that force kernels, and of tables of times. */
import { readFileSync } from 'node:fs';

import { checkContract } from '../../web/engine/contract.js';
import { TercetError } from '../../web/engine/errors.js';
import { parseForced } from '../../web/engine/forced.js';
import { kindOf, settingsOf } from '../../web/engine/tuning.js';
import { chooseFastest } from '../../web/engine/tuning_race.js';

const { texts, races } = JSON.parse(readFileSync(0, 'utf8'));
const contract = checkContract(
  JSON.parse(readFileSync(new URL('../../shaders/kernels.json', import.meta.url), 'utf8')),
);

function forced(text) {
  try {
    const { off, tuned, defaults } = parseForced(text, contract);
    return { off: [...off].sort(), tuned: Object.fromEntries(tuned), defaults };
  } catch (error) {
    return error instanceof TercetError ? error.message : `${error.name}: ${error.message}`;
  }
}

/** Times of a table, of each kind and setting, on a clock that they move. */
async function race({ table, budget }) {
  let clock = 0;
  const log = [];
  const time = async (kind, setting, rounds) => {
    log.push([kind, setting]);
    const took = table[kind][setting] * Math.max(rounds, 0.0625) + 0.125;
    clock += took;
    return took;
  };
  const kinds = table.map((settings, index) => ({ key: `k${index}`, settings }));
  const chosen = await chooseFastest(kinds, time, { budgetMs: budget, now: () => clock });
  return { chosen: Object.fromEntries(chosen), log };
}

process.stdout.write(
  JSON.stringify({
    texts: texts.map(forced),
    races: await Promise.all(races.map(race)),
    settings: Object.fromEntries(contract.kernels.map((kernel) => [kernel.name, settingsOf(kernel)])),
    kinds: [
      kindOf({ kernel: contract.kernels[0], symbols: { ROW_WORDS: 4, OUT_N: 7, K: 9 } }),
      kindOf({ kernel: contract.kernels[0], symbols: { K: 9 } }),
    ],
  }),
);
