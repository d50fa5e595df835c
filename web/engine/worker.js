/** The engine in a module worker. Only moves messages: what is computed stands in index.js. */
import { TercetError, toMessage } from './errors.js';
import { Engine } from './index.js';

/**
 * @typedef {import('./protocol.js').ToWorker} ToWorker
 * @typedef {import('./protocol.js').FromWorker} FromWorker
 * @typedef {import('./protocol.js').Request} Request
 */

/** @type {Map<number, Engine>} */
const engines = new Map();
/** What is under way, by call. @type {Map<number, AbortController>} */
const running = new Map();

/** @param {FromWorker} message */
const send = (message) => globalThis.postMessage(message);

globalThis.addEventListener('message', async ({ data }) => {
  const message = /** @type {ToWorker} */ (data);
  const { call } = message;
  if (message.kind === 'abort') {
    running.get(call)?.abort();
    return;
  }
  const control = new AbortController();
  running.set(call, control);
  try {
    send({ kind: 'result', call, value: await answer(message, control.signal) });
  } catch (error) {
    send({ kind: 'error', call, error: toMessage(error) });
  } finally {
    running.delete(call);
  }
});

/**
 * @param {Request & {call: number}} message
 * @param {AbortSignal} signal
 * @returns {Promise<unknown>}
 */
async function answer(message, signal) {
  switch (message.kind) {
    case 'support':
      return Engine.support();
    case 'plan':
      return Engine.plan(message.url, { ...message.options, signal });
    case 'stored':
      return Engine.stored(message.url);
    case 'remove':
      return Engine.remove(message.url);
    case 'load':
      return load(message, signal);
    case 'countTokens':
      return engineOf(message).countTokens(message.messages);
    case 'encode':
      return engineOf(message).tokenizer.encode(message.text);
    case 'decode':
      return engineOf(message).tokenizer.decode(message.ids);
    case 'chat':
      return chat(message, signal);
    case 'measure':
      return engineOf(message).measure({
        quick: message.quick,
        signal,
        onProgress: (progress) => send({ kind: 'measuring', call: message.call, progress }),
      });
    case 'dispose':
      return dispose(message.engine);
    default:
      throw new TercetError('internal', `The worker does not know the message ${/** @type {any} */ (message).kind}.`);
  }
}

/**
 * The call's number becomes the engine's.
 * @param {Extract<Request, {kind: 'load'}> & {call: number}} message
 * @param {AbortSignal} signal
 */
async function load({ url, options, call }, signal) {
  const engine = await Engine.load(url, {
    ...options,
    signal,
    onProgress: (event) => send({ kind: 'progress', call, event }),
  });
  if (signal.aborted) {
    await engine.dispose();
    throw new TercetError('aborted', 'Stopped on request.');
  }
  engines.set(call, engine);
  void engine.lost.then((error) => send({ kind: 'lost', engine: call, error: toMessage(error) }));
  return { engine: call, info: engine.info };
}

/**
 * @param {Extract<Request, {kind: 'chat'}> & {call: number}} message
 * @param {AbortSignal} signal
 */
async function chat(message, signal) {
  const stream = await engineOf(message).chat.completions.create({ ...message.request, stream: true, signal });
  send({ kind: 'started', call: message.call });
  for await (const chunk of stream) send({ kind: 'chunk', call: message.call, chunk });
}

/** @param {number} id */
async function dispose(id) {
  await engines.get(id)?.dispose();
  engines.delete(id);
}

/** @param {{engine: number}} message */
function engineOf({ engine: id }) {
  const engine = engines.get(id);
  if (!engine) {
    throw new TercetError('bad-request', 'This engine was disposed of.', { action: 'Load the model again.' });
  }
  return engine;
}
