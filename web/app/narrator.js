/** Tells a screen reader what happens on the page, from one state to the next. */
import { announce, createSpeaker } from './announcer.js';
import { loweredWords } from './largest_context.js';
import { PHASES } from './progress.js';
import { summary } from './report_words.js';

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
    const id = turn?.answerId ?? answer?.id;
    const message = conversation.messages.find((one) => one.id === id);
    if (turn && answer?.id !== turn.answerId) {
      answer = { id: turn.answerId, speaker: createSpeaker(message?.content.slice(0, turn.from)) };
    }
    if (!answer) return;
    const { speaker } = answer;
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
    if (engine.status === 'ready' && before.engine.status !== 'ready' && info) {
      announce(`${info.name} is ready.${engine.lowered ? ` ${loweredWords(engine.lowered)}` : ''}`);
    }
  }

  /** What a line in the conversation shows. @param {State} state @param {State} before */
  function tellForgotten({ turn }, before) {
    const earlier = before.turn?.answerId === turn?.answerId ? before.turn?.rolls ?? 0 : 0;
    if (turn && turn.rolls > earlier) announce('The oldest text has left the context.');
  }

  /** @param {State} state @param {State} before */
  function tellMeasure({ measure }, before) {
    if (measure.status === before.measure.status) return;
    if (measure.status === 'running') announce('Measuring.');
    if (measure.status === 'done' && measure.report) announce(summary(measure.report));
  }

  return (state) => {
    tellAnswer(state);
    if (last) {
      tellEngine(state, last);
      tellForgotten(state, last);
      tellMeasure(state, last);
    }
    last = state;
  };
}
