/** Keeps the keyboard somewhere: when the focused control goes away, the focus goes to a place that stays. */

/** @param {Element} element */
const isThere = (element) =>
  element.isConnected && !element.matches(':disabled') && (element.checkVisibility?.() ?? true);

/**
 * @param {() => void} fallback puts the focus somewhere else
 * @returns {() => void} to be called after each rendering
 */
export function createFocusKeeper(fallback) {
  /** @type {Element|null} */
  let focused = null;
  document.addEventListener('focusin', ({ target }) => {
    focused = target instanceof Element ? target : null;
  });
  document.addEventListener('focusout', ({ target }) => {
    // The person left a control that is still there: that is no loss.
    if (target instanceof Element && isThere(target)) focused = null;
  });
  return () => {
    if (!focused || isThere(focused)) return;
    focused = null;
    fallback();
  };
}
