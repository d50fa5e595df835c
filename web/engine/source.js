/**
 * Where the bytes of a pack, the kernels and the tokenizer come from: http(s), or files in Node.
 * A source only moves bytes; download.js checks and repeats.
 */
import { TercetError, packError, throwIfAborted } from './errors.js';

/**
 * @typedef {object} Source
 * @property {string} url  absolute, ends with a slash
 * @property {boolean} remote  whether its bytes are worth keeping in the browser's storage
 * @property {(file: string, range: Range|null, signal?: AbortSignal, cache?: RequestCache) => AsyncIterable<Uint8Array>} open
 *   the bytes of the range, or of the whole file; throws Interrupted if they stop coming
 *
 * @typedef {{begin: number, end: number, total: number}} Range  bytes; total: listed length of the file
 */

/** A failure that may be gone the next time. */
export class Interrupted extends Error {}

/** A connection on which nothing comes for so long is taken for broken, in ms. */
const STALL_MS = 30_000;

/**
 * @param {string} place URL of a folder (absolute or relative to the page); in Node also a path
 * @returns {Source}
 */
export function openSource(place) {
  const url = resolve(String(place));
  if (url.protocol === 'file:') {
    return { url: url.href, remote: false, open: (file, range) => readFile(new URL(file, url), range) };
  }
  if (!['http:', 'https:'].includes(url.protocol)) {
    throw new TercetError('bad-request', `A pack's URL starts with http:, https: or file:, found ${url.href}.`);
  }
  return {
    url: url.href,
    remote: true,
    open: (file, range, signal, cache) => fetchRange(new URL(file, url), range, signal, cache),
  };
}

/** @param {string} place */
function resolve(place) {
  const base = globalThis.location?.href ?? `file://${/** @type {any} */ (globalThis).process?.cwd?.() ?? ''}/`;
  try {
    const url = new URL(place, base);
    url.search = '';
    url.hash = '';
    if (!url.pathname.endsWith('/')) url.pathname += '/';
    return url;
  } catch {
    throw new TercetError('bad-request', `${JSON.stringify(place)} is no URL of a pack.`);
  }
}

/**
 * @param {Source} source
 * @param {string} file
 * @param {number} maxBytes
 * @param {AbortSignal} [signal]
 * @param {RequestCache} [cache]
 * @returns {Promise<Uint8Array<ArrayBuffer>>} the whole file
 */
export async function readAll(source, file, maxBytes, signal, cache) {
  const parts = [];
  let length = 0;
  for await (const part of source.open(file, null, signal, cache)) {
    length += part.byteLength;
    // pack.json has no listed length, only a cap.
    if (length > maxBytes) {
      throw packError(file === 'pack.json' ? 'json' : 'length', `${file}: more than ${maxBytes} bytes.`);
    }
    parts.push(part);
  }
  const bytes = new Uint8Array(length);
  let at = 0;
  for (const part of parts) {
    bytes.set(part, at);
    at += part.byteLength;
  }
  return bytes;
}

/**
 * @param {URL} url
 * @param {Range|null} range
 * @param {AbortSignal} [signal]
 * @param {RequestCache} [cache]
 * @returns {AsyncGenerator<Uint8Array>}
 */
async function* fetchRange(url, range, signal, cache = 'default') {
  const name = url.pathname.split('/').at(-1);
  const stall = new AbortController();
  const both = signal ? AbortSignal.any([signal, stall.signal]) : stall.signal;
  let timer = setTimeout(() => stall.abort(), STALL_MS);
  try {
    const headers = range ? { Range: `bytes=${range.begin}-${range.end - 1}` } : undefined;
    const response = await fetch(url, { headers, cache, signal: both, credentials: 'same-origin' });
    let skip = checkResponse(response, range, name ?? url.href);
    let left = range ? range.end - range.begin : Infinity;
    const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
    try {
      while (left > 0) {
        const { done, value } = await reader.read();
        if (done) break;
        clearTimeout(timer);
        timer = setTimeout(() => stall.abort(), STALL_MS);
        const dropped = Math.min(skip, value.byteLength);
        skip -= dropped;
        const part = value.subarray(dropped, Math.min(value.byteLength, dropped + left));
        left -= part.byteLength;
        if (part.byteLength) yield part;
      }
    } finally {
      reader.cancel().catch(() => undefined);
    }
    if (range && left > 0) throw new Interrupted(`${name}: the connection closed ${left} bytes early`);
  } catch (error) {
    throwIfAborted(signal);
    if (error instanceof TercetError || error instanceof Interrupted) throw error;
    // Whatever else fetch throws is a failure of the network, which the standard reports without detail.
    const reason = stall.signal.aborted
      ? `nothing came for ${STALL_MS / 1000} s`
      : /** @type {Error} */ (error).message;
    throw new Interrupted(`${name}: ${reason}`);
  } finally {
    clearTimeout(timer);
  }
}

/**
 * @param {Response} response
 * @param {Range|null} range
 * @param {string} name
 * @returns {number} bytes to skip, where the server sent more than was asked for
 */
function checkResponse(response, range, name) {
  const { status } = response;
  if (status === 404 || status === 410) {
    throw new TercetError(
      'download-failed',
      `${name}: the server has no such file (${response.url}, status ${status}).`,
      {
        action: 'Check the address of the pack and that all of its files are there.',
        detail: { rule: 'missing', file: name, status },
      },
    );
  }
  if (status >= 500 || status === 408 || status === 429) {
    throw new Interrupted(`${name}: the server answered ${status}`);
  }
  if (status === 416 && range) {
    throw packError(
      'length',
      `${name}: the file on the server is shorter than the ${range.total} bytes that pack.json lists.`,
    );
  }
  if (!response.ok || !response.body) {
    throw new TercetError('download-failed', `${name}: the server answered ${status} ${response.statusText}.`, {
      detail: { file: name, status },
    });
  }
  if (!range) return 0;
  const found =
    status === 206
      ? /^bytes (\d+)-\d+\/(\d+|\*)$/.exec(response.headers.get('content-range') ?? '')?.slice(1)
      : ['0', response.headers.get('content-encoding') ? '*' : (response.headers.get('content-length') ?? '*')];
  if (!found || Number(found[0]) > range.begin) {
    throw new TercetError(
      'download-failed',
      `${name}: the server sent another range than ${range.begin}-${range.end - 1}.`,
      { detail: { file: name, status } },
    );
  }
  if (found[1] !== '*' && Number(found[1]) !== range.total) {
    throw packError('length', `${name}: the file on the server has ${found[1]} bytes, pack.json lists ${range.total}.`);
  }
  return range.begin - Number(found[0]);
}

/**
 * Node only.
 * @param {URL} url
 * @param {Range|null} range
 * @returns {AsyncGenerator<Uint8Array>}
 */
async function* readFile(url, range) {
  const name = url.pathname.split('/').at(-1);
  const fs = await import(/** @type {string} */ ('node:fs'));
  try {
    if (range) {
      const { size } = await fs.promises.stat(url);
      if (size !== range.total) throw packError('length', `${name}: ${size} bytes, pack.json lists ${range.total}.`);
    }
    const span = range ? { start: range.begin, end: range.end - 1 } : {};
    yield* fs.createReadStream(url, { ...span, highWaterMark: 1 << 20 });
  } catch (error) {
    if (error instanceof TercetError) throw error;
    throw new TercetError('download-failed', `${url.href}: ${/** @type {Error} */ (error).message}`, {
      action: 'Check the path of the pack and that all of its files are there.',
      detail: { rule: 'missing', file: name },
      cause: error,
    });
  }
}
