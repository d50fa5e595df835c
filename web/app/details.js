/** The text of a bug report: the device, the versions, the timings. Never the conversation or the system prompt. */
import { adapterName } from './platform.js';
import { formatBytes } from './format.js';
import { gradeWords } from './grade.js';
import { summary, tuningWords } from './report_words.js';
import { titleOf } from './problems.js';

/** @typedef {import('./types.js').State} State */

/** Limits that decide whether a model fits. */
const LIMITS = ['maxBufferSize', 'maxStorageBufferBindingSize', 'maxStorageBuffersPerShaderStage',
  'maxComputeWorkgroupStorageSize', 'maxComputeInvocationsPerWorkgroup', 'maxComputeWorkgroupsPerDimension'];

/**
 * @param {State} state
 * @param {{agent: string, secure: boolean, screen: string}} browser
 * @returns {string}
 */
export function detailsText(state, browser) {
  return [
    ['Tercet', [`version ${state.version}`]],
    ['Browser', [browser.agent, `secure context: ${browser.secure ? 'yes' : 'no'}`, `window: ${browser.screen}`]],
    ['GPU', gpuLines(state)],
    ['Model', modelLines(state)],
    ['Load', loadLines(state)],
    ['Speed', speedLines(state)],
    ['Last answer', answerLines(state)],
    ['Settings', settingsLines(state)],
    ['Last problem', problemLines(state)],
  ].filter(([, lines]) => lines.length).map(([title, lines]) =>
    `${title}\n${/** @type {string[]} */ (lines).map((line) => `  ${line}`).join('\n')}`).join('\n\n');
}

/** @param {State} state */
function gpuLines({ support }) {
  if (!support) return ['not asked yet'];
  if (!support.webgpu) return [`WebGPU: no (${support.code}) ${support.message ?? ''}`];
  const { adapter, limits, features } = support;
  const lines = [`adapter: ${adapterName(adapter) || 'unnamed'}`];
  if (adapter) lines.push(...Object.entries(adapter).filter(([, value]) => value).map(([k, v]) => `${k}: ${v}`));
  for (const name of LIMITS) if (limits?.[name] !== undefined) lines.push(`${name}: ${limits[name]}`);
  lines.push(`features: ${features.length ? features.join(', ') : 'none'}`);
  return lines;
}

/** @param {State} state */
function modelLines({ engine, models, kernels: forced }) {
  const model = models.list.find((one) => one.id === engine.modelId);
  if (!model) return ['none'];
  const lines = [`${model.name} (${model.id})`, `status: ${engine.status}`,
    `download: ${formatBytes(model.bytes)}, ${model.bits_per_weight} bits a weight, activations ${model.activations}`,
    `quality: ${gradeWords(model.grade)}`];
  if (forced !== null) lines.push(`kernels forced by the address: ${forced}`);
  if (engine.info) {
    const { contextLength, kvCache, weightsBytes, kvBytes, workBytes, kernels } = engine.info;
    lines.push(`context: ${contextLength}, KV cache ${kvCache}`);
    if (engine.lowered) lines.push(`context lowered from ${engine.lowered.asked}: ${engine.lowered.reason}`);
    lines.push(`memory: weights ${formatBytes(weightsBytes)}, KV cache ${formatBytes(kvBytes)}, `
      + `work ${formatBytes(workBytes)}`);
    lines.push(`kernels: ${kernels.join(', ')}`);
    lines.push(`constants of kernels: ${tuningWords(engine.info.tuning)}`);
  }
  return lines;
}

/** @param {State} state */
function loadLines({ engine }) {
  const started = engine.loadMs ?? engine.progress?.startedAt ?? {};
  return Object.entries(started).map(([phase, ms]) => `${phase} began after ${(ms / 1000).toFixed(2)} s`);
}

/** @param {State} state */
const speedLines = ({ measure }) => (measure.report ? [summary(measure.report)] : []);

/** @param {State} state */
function answerLines({ conversation }) {
  const answer = conversation.messages.findLast((message) => message.made);
  if (!answer?.made) return [];
  const { usage, seed } = answer.made;
  const lines = [`status: ${answer.status}`, `seed: ${seed}`];
  if (usage) lines.push(...Object.entries(usage).map(([name, value]) => `${name}: ${value}`));
  return lines;
}

/** @param {State} state */
function settingsLines({ settings }) {
  return Object.entries(settings)
    .filter(([name]) => name !== 'systemPrompt')
    .map(([name, value]) => `${name}: ${value}`)
    .concat(`systemPrompt: ${settings.systemPrompt ? `${settings.systemPrompt.length} characters` : 'empty'}`);
}

/** @param {State} state */
function problemLines({ lastProblem }) {
  if (!lastProblem) return [];
  const { code, message, action, detail } = lastProblem;
  const lines = [`${titleOf(lastProblem)} (${code})`, message];
  if (action) lines.push(action);
  if (Object.keys(detail).length) lines.push(JSON.stringify(detail));
  return lines;
}
