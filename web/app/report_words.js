/** What a measurement says, in the words and rounded numbers that people read. */
import {
  formatBytes, formatCount, formatDuration, formatPercent, formatRate, formatSeconds, formatSpeed,
} from './format.js';

/** @typedef {import('./types.js').MeasureReport} MeasureReport */
/** One bar: `share` of the full width, 0 to 1. @typedef {{label: string, value: string, share: number}} Bar */
/** @typedef {{name: string, size: string, time: string, speed: string, share: string}} LinearRow */

/** @param {number} value */
const isNumber = (value) => typeof value === 'number' && Number.isFinite(value);

/** @param {number} share */
const clamp = (share) => Math.max(0, Math.min(1, share));

/**
 * The result in two sentences.
 * @param {MeasureReport} report
 */
export function summary({ adapter, bandwidth, limit, decode }) {
  const what = adapter?.software ? 'This processor' : 'This GPU';
  const reads = `${what} reads ${formatSpeed(bandwidth.bytesPerSecond)}.`;
  const [first] = decode;
  if (!first || !isNumber(limit.tokensPerSecond)) return reads;
  return `${reads} The model could reach ${formatRate(limit.tokensPerSecond)} here and reaches `
    + `${formatRate(first.tokensPerSecond)}, ${formatPercent(limit.ratio)}.`;
}

/** What the limit is. @param {MeasureReport} report */
export const limitWords = ({ limit }) =>
  `For each token it must read ${formatBytes(limit.bytesPerToken)}, so memory alone allows at most `
  + `${formatRate(limit.tokensPerSecond)}: the whole width of the bars.`;

/**
 * Writing, against the limit.
 * @param {MeasureReport} report
 * @returns {Bar[]}
 */
export const decodeBars = ({ decode, limit }) =>
  decode.filter((one) => isNumber(one.tokensPerSecond)).map(({ context, tokensPerSecond }) => ({
    label: `after ${formatCount(context)} tokens`,
    value: `${formatRate(tokensPerSecond)}, ${formatPercent(tokensPerSecond / limit.tokensPerSecond)}`,
    share: clamp(tokensPerSecond / limit.tokensPerSecond),
  }));

/**
 * Reading a prompt. Many tokens share what is read, so the limit of writing is none here: the fastest is the width.
 * @param {MeasureReport} report
 * @returns {Bar[]}
 */
export function prefillBars({ prefill, limit }) {
  const known = prefill.filter((one) => isNumber(one.tokensPerSecond));
  const fastest = Math.max(...known.map((one) => one.tokensPerSecond));
  return known.map(({ tokens, tokensPerSecond }) => ({
    label: `${formatCount(tokens)} tokens`,
    value: `${formatRate(tokensPerSecond)}, ${formatTimes(tokensPerSecond / limit.tokensPerSecond)}`,
    share: clamp(tokensPerSecond / fastest),
  }));
}

/** @param {number} factor of the limit of writing */
const formatTimes = (factor) =>
  (factor < 1 ? `${formatPercent(factor)} of the limit` : `${Number(factor.toPrecision(2))} times the limit`);

/**
 * @param {MeasureReport} report
 * @returns {LinearRow[]}
 */
export const linearRows = ({ linears }) => linears.map(({ name, rows, columns, encoding, bytes, seconds, share }) => ({
  name,
  size: `${formatCount(rows)} × ${formatCount(columns)}, ${encoding}`,
  time: formatDuration(seconds),
  speed: formatSpeed(bytes / seconds),
  share: formatPercent(share),
}));

/**
 * The rest, as names and values.
 * @param {MeasureReport} report
 * @returns {[string, string][]}
 */
export function facts(report) {
  const { firstTokenSeconds, loadSeconds, cpuMsPerToken, dispatchesPerToken, dispatchesPerLayer, model, date } = report;
  const constants = constantsWords(report.kernels ?? {});
  /** @type {[string, string|null][]} */
  const all = [
    ['Model', model.name],
    ['Context', `${formatCount(model.contextLength)} tokens, KV cache ${model.kvCache}`],
    ['First word after', isNumber(firstTokenSeconds) ? formatSeconds(firstTokenSeconds) : null],
    ['Load', isNumber(loadSeconds) ? formatSeconds(loadSeconds) : null],
    ['Processor time a token', isNumber(cpuMsPerToken) ? formatDuration(cpuMsPerToken / 1000) : null],
    ['GPU steps a token', isNumber(dispatchesPerToken)
      ? `${formatCount(dispatchesPerToken)}, ${Number(dispatchesPerLayer.toFixed(1))} a layer` : null],
    ['Kernels', constants || null],
    ['Measured', formatDate(date)],
  ];
  return all.flatMap(([name, value]) => (value === null ? [] : [[name, value]]));
}

/** @param {Record<string, Record<string, number>>} kernels of a report: constants by kind of operation */
const constantsWords = (kernels) => Object.entries(kernels).map(([kind, tuned]) =>
  `${kind} ${Object.entries(tuned).map(([name, value]) => `${name}=${value}`).join(' ')}`).join(', ');

/**
 * The constants in force, and where they are from.
 * @param {import('./types.js').Tuning} tuning
 */
export function tuningWords({ kernels, remembered, timed, measureMs }) {
  const from = [];
  if (remembered) from.push(`${remembered} remembered`);
  if (timed) from.push(`${timed} timed in ${measureMs.toFixed(0)} ms`);
  return `${constantsWords(kernels) || 'none'} (${from.join(', ') || 'defaults'})`;
}

/** @param {string} date ISO 8601 */
function formatDate(date) {
  const when = new Date(date);
  if (Number.isNaN(when.getTime())) return date;
  return when.toLocaleString('en-GB', { dateStyle: 'medium', timeStyle: 'short' });
}
