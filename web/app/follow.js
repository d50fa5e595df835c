/** Scrolling that follows the newest text only while the person is at the bottom. */

const NEAR_BOTTOM_PX = 40;

/**
 * @param {HTMLElement} scroller
 * @param {() => boolean} isText whether the scroller shows a text that grows at its end
 * @param {(following: boolean) => void} onChange
 */
export function createFollow(scroller, isText, onChange) {
  let following = true;

  const toBottom = () => {
    if (isText()) scroller.scrollTop = scroller.scrollHeight;
  };

  // Growing text fires no scroll event, so this hears only the person (and our own jump to the bottom).
  scroller.addEventListener('scroll', () => {
    const distance = scroller.scrollHeight - scroller.clientHeight - scroller.scrollTop;
    const now = distance <= NEAR_BOTTOM_PX;
    if (now !== following) onChange(now);
    following = now;
  }, { passive: true });

  // Not only the text grows: the box shrinks when the composer or the on-screen keyboard needs room.
  new ResizeObserver(() => {
    if (following) toBottom();
  }).observe(scroller);

  return {
    /** After the text has grown. */
    grown() {
      if (following) toBottom();
    },
    /** The person asked for the newest text. */
    start() {
      if (!following) onChange(true);
      following = true;
      toBottom();
    },
    /** A page that is read from its top. */
    toTop() {
      scroller.scrollTop = 0;
    },
  };
}
