/** For test_twins_speculation.py: the guesses at some texts, and what is verified of answers that are known before. */
import { readFileSync } from 'node:fs';

import { PromptLookup } from '../../web/engine/drafts.js';
import { Costs, Speculation } from '../../web/engine/speculation.js';

const { turns, answers } = JSON.parse(readFileSync(0, 'utf8'));

/** One text after another, each token by token, with the same source. */
function guesses() {
  const lookup = new PromptLookup();
  return turns.map((turn) => {
    const ids = [];
    return turn.map((id) => {
      ids.push(id);
      return lookup.propose(ids, 5);
    });
  });
}

/** What is verified, and what is known after it, step by step. */
function log({ text, prompt, plain, measured, most, always, wave, times }) {
  const costs = new Costs(plain, new Map(measured), most);
  const subject = new Speculation(always ? 'always' : 'auto', new PromptLookup(), costs, most);
  const ids = text.slice(0, prompt);
  const steps = [];
  while (ids.length < text.length) {
    const ms = times[steps.length % times.length];
    const draft = subject.draft(ids, Math.min(most, text.length - ids.length) - 1, steps.length % 3 > 0);
    if (draft.length) {
      let accepted = 0;
      while (accepted < draft.length && draft[accepted] === text[ids.length + accepted]) accepted += 1;
      ids.push(...text.slice(ids.length, ids.length + accepted + 1));
      subject.sawVerified(draft, accepted, ms);
    } else {
      subject.ended();
      const count = Math.min(wave, subject.batch, text.length - ids.length);
      for (let token = 0; token < count; token++) {
        ids.push(text[ids.length]);
        subject.sawToken(ids);
      }
      costs.sawPlain(ms);
    }
    steps.push([draft, ids.length, [...subject.acceptance], subject.streak, subject.usualRun, costs.plain, [...costs.verify]]);
  }
  return steps;
}

process.stdout.write(JSON.stringify({ guesses: guesses(), logs: answers.map(log) }));
