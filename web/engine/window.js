/**
 * A context that is full can go on as a rolling window: the first tokens, which attention leans on whatever they are
 * (Xiao et al. 2023, "attention sinks"), and the last ones stay, and what is between is forgotten.
 *
 * What stays is computed anew at its new positions, by prefill. Turning the stored keys to new positions would be
 * cheaper, but it would round them a second time, to f16 or q8, and again at each roll. This way the cache after a roll
 * equals that of a prompt of the same tokens.
 */

const SINKS = 4;
/** A roll frees this share of the context: more forgets more, less rolls more often. */
const FREED = 1 / 4;

/**
 * @param {number[]} tokens in order; the cache is full of them but for the last one, which was chosen and has no place
 * @param {number} contextLength
 * @returns {number[]} those that stay, the last one among them: at least one, at most `contextLength`
 */
export function rolled(tokens, contextLength) {
  const count = Math.max(1, contextLength - Math.max(1, Math.floor(contextLength * FREED)));
  // In a tiny context the last tokens are worth more than the first.
  const sinks = Math.min(SINKS, count >> 1);
  return [...tokens.slice(0, sinks), ...tokens.slice(tokens.length - (count - sinks))];
}
