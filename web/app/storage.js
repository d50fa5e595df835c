/** localStorage that may be refused or full: then nothing is kept, and nothing breaks. */

const PREFIX = 'tercet.';

/**
 * @param {string} key
 * @returns {unknown} the stored JSON value, or null
 */
export function load(key) {
  try {
    const text = localStorage.getItem(PREFIX + key);
    return text === null ? null : JSON.parse(text);
  } catch {
    return null;
  }
}

/**
 * @param {string} key
 * @param {unknown} value null removes the key
 * @returns {boolean} whether it was kept
 */
export function save(key, value) {
  try {
    if (value === null) localStorage.removeItem(PREFIX + key);
    else localStorage.setItem(PREFIX + key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/**
 * Call back when another tab of the page changed this key.
 * @param {string} key
 * @param {(value: unknown) => void} callback
 */
export function onChangeElsewhere(key, callback) {
  window.addEventListener('storage', (event) => {
    if (event.key === PREFIX + key) callback(load(key));
  });
}
