/** Copy to the clipboard, and say so on the button that was pressed. */
import { announce } from './announcer.js';

const SHOWN_MS = 1600;

/**
 * @param {string} text
 * @param {HTMLButtonElement} pressed
 */
export async function copyText(text, pressed) {
  const copied = await write(text);
  announce(copied ? 'Copied.' : 'The browser did not allow copying.');
  pressed.dataset.done = copied ? 'Copied' : 'Not copied';
  setTimeout(() => delete pressed.dataset.done, SHOWN_MS);
}

/** @param {string} text @returns {Promise<boolean>} */
async function write(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return writeOldWay(text);
  }
}

/**
 * Where the clipboard API is missing (a page that was opened over plain http from another machine).
 * @param {string} text
 */
function writeOldWay(text) {
  const focused = document.activeElement;
  const area = document.createElement('textarea');
  area.value = text;
  area.className = 'visually-hidden';
  document.body.append(area);
  area.select();
  const copied = document.execCommand('copy');
  area.remove();
  if (focused instanceof HTMLElement) focused.focus();
  return copied;
}
