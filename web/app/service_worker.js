/**
 * Keeps the page itself for a visit without network. The models are kept by the engine, so a conversation can go on.
 *
 * The network comes first: while the server answers, the page is what it serves. `/api/assets` lists what to keep.
 */

const worker = /** @type {any} */ (self);
const CACHE = 'tercet-page';
const PAGE_FOLDERS = ['/app/', '/engine/', '/vendor/', '/shaders/'];
const PAGE_URLS = ['/', '/api/models'];

worker.addEventListener('install', (/** @type {any} */ event) => {
  event.waitUntil(keepPage().then(() => worker.skipWaiting()));
});

worker.addEventListener('activate', (/** @type {any} */ event) => {
  event.waitUntil(worker.clients.claim());
});

worker.addEventListener('fetch', (/** @type {any} */ event) => {
  if (event.request.method === 'GET' && belongsToPage(new URL(event.request.url))) {
    event.respondWith(networkFirst(event.request));
  }
});

async function keepPage() {
  const response = await fetch('/api/assets', { cache: 'no-cache' });
  if (!response.ok) throw new Error(`/api/assets: expected a list, got status ${response.status}`);
  const cache = await caches.open(CACHE);
  await cache.addAll(await response.json());
}

/** @param {URL} url */
function belongsToPage(url) {
  return url.origin === worker.location.origin
    && (PAGE_URLS.includes(url.pathname) || PAGE_FOLDERS.some((folder) => url.pathname.startsWith(folder)));
}

/** @param {Request} request @returns {Promise<Response>} */
async function networkFirst(request) {
  try {
    const response = await fetch(request);
    if (response.ok) await (await caches.open(CACHE)).put(request, response.clone());
    return response;
  } catch (error) {
    const kept = await caches.match(request, { ignoreSearch: true, ignoreVary: true });
    if (kept) return kept;
    throw error;
  }
}
