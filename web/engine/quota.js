/** How much the browser lets this site keep, and for how long. */

/** @returns {Promise<{used: number, available: number}|null>} bytes; null where the browser does not say */
export async function quota() {
  const { quota: limit, usage } = (await globalThis.navigator?.storage?.estimate?.().catch(() => null)) ?? {};
  return limit === undefined || usage === undefined ? null : { used: usage, available: Math.max(0, limit - usage) };
}

/** Ask the browser not to drop what is kept when the disk fills up. It may ask the person, or say no. */
export async function requestPersistence() {
  await globalThis.navigator?.storage?.persist?.().catch(() => false);
}
