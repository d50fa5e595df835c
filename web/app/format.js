/** Numbers as people read them: rounded, with their unit. */

const LOCALE = 'en';

/**
 * Three significant digits at most: 312 B, 21.4 MB, 1.25 GB (decimal units, as download sizes are given).
 * @param {number} bytes
 * @returns {string}
 */
export function formatBytes(bytes) {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let value = bytes;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${short(value, unit === 0)} ${units[unit]}`;
}

/**
 * Both numbers in the unit of the larger one: "21.4 of 42.1 MB".
 * @param {number} part
 * @param {number} whole
 * @returns {string}
 */
export function formatBytesOf(part, whole) {
  const [wholeNumber, unit] = formatBytes(whole).split(' ');
  const scale = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 }[unit] ?? 1;
  const decimals = (wholeNumber.split('.')[1] ?? '').length;
  return `${(part / scale).toFixed(decimals)} of ${wholeNumber} ${unit}`;
}

/**
 * @param {number} value
 * @param {boolean} [whole] no decimals
 * @returns {string}
 */
function short(value, whole = false) {
  let decimals = 0;
  if (!whole && value < 10) decimals = 2;
  else if (!whole && value < 100) decimals = 1;
  return String(Number(value.toFixed(decimals)));
}

/** @param {number} count @returns {string} "4,096" */
export const formatCount = (count) => new Intl.NumberFormat(LOCALE).format(Math.round(count));

/** @param {number} count @returns {string} "135 million", "2.4 billion" */
export function formatParameters(count) {
  return new Intl.NumberFormat(LOCALE, { notation: 'compact', compactDisplay: 'long', maximumSignificantDigits: 3 })
    .format(count);
}

/** @param {number} perSecond tokens @returns {string} "38 tok/s", "24,300 tok/s" */
export const formatRate = (perSecond) =>
  `${perSecond < 1000 ? short(perSecond) : formatCount(Number(perSecond.toPrecision(3)))} tok/s`;

/** @param {number} bytesPerSecond @returns {string} "12.3 MB/s" */
export const formatSpeed = (bytesPerSecond) => `${formatBytes(bytesPerSecond)}/s`;

/** @param {number} seconds @returns {string} "12 s left", "3 min left" */
export function formatLeft(seconds) {
  if (seconds < 1) return 'less than 1 s left';
  if (seconds < 60) return `${Math.round(seconds)} s left`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min left`;
  return `${short(seconds / 3600)} h left`;
}

/** @param {number} seconds @returns {string} "0.42 s", "12 s" */
export const formatSeconds = (seconds) =>
  seconds < 0.1 ? `${Math.max(1, Math.round(seconds * 1000))} ms` : `${short(seconds)} s`;

/** @param {number} seconds @returns {string} "42 µs", "1.25 ms", "0.42 s" */
export function formatDuration(seconds) {
  if (seconds >= 0.1) return formatSeconds(seconds);
  if (seconds >= 0.001) return `${short(seconds * 1e3)} ms`;
  return `${short(seconds * 1e6)} µs`;
}

/** @param {number} share @returns {string} "53 %", "0.4 %" */
export function formatPercent(share) {
  const percent = 100 * share;
  return `${percent !== 0 && Math.abs(percent) < 1 ? Number(percent.toPrecision(1)) : Math.round(percent)} %`;
}

/** @param {number} bits @returns {string} "2.61 bits a weight" */
export const formatBits = (bits) => `${short(bits)} bits a weight`;

/** @param {number} count @param {string} one @returns {string} "1 token", "48 tokens" */
export const plural = (count, one) => `${formatCount(count)} ${one}${count === 1 ? '' : 's'}`;
