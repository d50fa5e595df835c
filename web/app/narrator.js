/** Tells a screen reader what happens on the page, from one state to the next. */
import { announce, createSpeaker } from './announcer.js';
import { PHASES } from './progress.js';

/** @typedef {import('./types.js').State} State */

/** @type {Partial<Record<import('./types.js').AnswerStatus, string>>} */
const SAID_AT_END = {
  stopped: 'Answer stopped.', interrupted: 'The answer was cut off.', failed: 'The answer was cut off.',
};

/** @returns {(state: State) => void} */
export function createNarrator() {
  /** @type {State|null} */
  let last = null;
  /** @type {{id: string, speaker: ReturnType<typeof createSpeaker>}|null} */
  let answer = null;

  /** @type {Set<string>} phases of this load that were told: they overlap, and each is said once */
  let told = new Set();

  /** @param {State} state */
  function tellAnswer({ turn, conversation }) {
    if (turn && answer?.id !== turn.answerId) answer = { id: turn.answerId, speaker: createSpeaker() };
    if (!answer) return;
    const { id, speaker } = answer;
    const message = conversation.messages.find((one) => one.id === id);
    if (turn) {
      if (message) speaker.grow(message.content);
      return;
    }
    if (message) speaker.end(message.content);
    announce(SAID_AT_END[message?.status ?? 'finished'] ?? '');
    answer = null;
  }

  /** @param {State} state @param {State} before */
  function tellEngine({ engine }, before) {
    const { progress, info } = engine;
    if (!progress) told = new Set();
    const phase = PHASES.find((one) => one.phase === progress?.current);
    if (phase && !told.has(phase.phase)) {
      told.add(phase.phase);
      announce(`${phase.label}.`);
    }
    if (engine.status === 'ready' && before.engine.status !== 'ready' && info) announce(`${info.name} is ready.`);
  }

  return (state) => {
    tellAnswer(state);
    if (last) tellEngine(state, last);
    last = state;
  };
}
