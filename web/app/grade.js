/** Words for the quality grade of a pack; BROKEN ones get a stamp that nobody can overlook. */
import { h } from './dom.js';
import { icon } from './icons.js';

/** @type {Record<string, string>} */
const MEANINGS = {
  lossless: 'every weight is the original’s',
  good: 'cannot be told from the original in use',
  usable: 'small differences from the original',
  degraded: 'clearly worse than the original',
  BROKEN: 'does not do what the original does',
};

/** @param {string|null} grade @returns {string} with its meaning, where it is a known one */
export function gradeWords(grade) {
  if (grade === null) return 'not measured';
  return MEANINGS[grade] ? `${grade}: ${MEANINGS[grade]}` : grade;
}

/** @param {string|null} grade */
export const isBroken = (grade) => grade === 'BROKEN';

/** @returns {HTMLElement} hidden until it is wanted */
export function createBrokenStamp() {
  return h('p', { class: 'broken', role: 'note', hidden: true }, icon('warn'),
    h('strong', {}, 'BROKEN'),
    h('span', {}, 'This pack lost too much when it was made and does not answer as its original does. '
      + 'Do not judge the model by it.'));
}
