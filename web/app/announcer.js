/** What a screen reader hears: whole sentences, politely, one after the other. */

const KEPT = 8;

const segmenter = 'Segmenter' in Intl ? new Intl.Segmenter('en', { granularity: 'sentence' }) : null;

/** @param {string} text to be said when the reader is free */
export function announce(text) {
  const region = document.getElementById('announcer');
  if (!region || !text) return;
  const line = document.createElement('p');
  line.textContent = text;
  region.append(line);
  while (region.childElementCount > KEPT) region.firstElementChild?.remove();
}

/**
 * Markdown as it is spoken: without its marks, and without code, which nobody can follow by ear.
 * @param {string} markdown
 * @returns {string}
 */
export function speakable(markdown) {
  return markdown
    .replace(/```[\s\S]*?(```|$)/g, '\nCode.\n')
    .replace(/`([^`]*)`/g, '$1')
    .replace(/!?\[([^\]]*)\]\([^)]*\)/g, '$1')
    .replace(/^[ \t]*(#{1,6}|>|[-*+])[ \t]+/gm, '')
    .replace(/(\*\*|__|\*|~~)/g, '');
}

/**
 * @param {string} text
 * @returns {string[]} with the spaces between them, so that joined they are the text
 */
export function sentences(text) {
  if (segmenter) return Array.from(segmenter.segment(text), ({ segment }) => segment);
  return text.match(/[^.!?\n]+[.!?\n]*\s*/g) ?? [];
}

/**
 * Say an answer while it grows: each sentence once, when the next one has begun.
 * @param {string} [before] what was said of it already, when the answer goes on
 * @returns {{grow: (markdown: string) => void, end: (markdown: string) => void}}
 */
export function createSpeaker(before = '') {
  let said = Math.max(0, sentences(speakable(before)).length - 1);
  /** @param {string} markdown @param {boolean} whole */
  function say(markdown, whole) {
    const all = sentences(speakable(markdown));
    const ready = whole ? all.length : all.length - 1;
    const fresh = all.slice(said, ready).map((sentence) => sentence.trim()).filter(Boolean);
    said = Math.max(said, ready);
    if (fresh.length) announce(fresh.join(' '));
  }
  return { grow: (markdown) => say(markdown, false), end: (markdown) => say(markdown, true) };
}
