/** Small helpers to build and change the DOM. Text always goes in as text. */

/**
 * Build an element. `on…` properties are listeners, `true` sets an empty attribute, `null`, `undefined`
 * and `false` are left out, the rest are attributes.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, unknown>} [props]
 * @param {...(Node|string|null|undefined|false)} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) {
      element.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
    } else {
      element.setAttribute(name, value === true ? '' : String(value));
    }
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/**
 * Write text only when it differs, so that a selection and a live region are left alone.
 * @param {Element} element
 * @param {string} text
 */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Set or remove an attribute, only when it differs.
 * @param {Element} element
 * @param {string} name
 * @param {string|number|boolean|null|undefined} value
 */
export function setAttr(element, name, value) {
  if (value === null || value === undefined || value === false) {
    element.removeAttribute(name);
  } else {
    const text = value === true ? '' : String(value);
    if (element.getAttribute(name) !== text) element.setAttribute(name, text);
  }
}

/**
 * Enter without Shift. An Enter that ends the composition of a character (Japanese, Chinese, …) is not meant to
 * send; Safari tells of it only by the old key code 229.
 * @param {KeyboardEvent} event
 */
export const isSendKey = (event) =>
  event.key === 'Enter' && !event.shiftKey && !event.isComposing && event.keyCode !== 229;

/**
 * The element with this id; the page is broken without it.
 * @param {string} id
 * @returns {HTMLElement}
 */
export function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`index.html has no element with the id "${id}".`);
  return element;
}

/**
 * A quiet button with an icon and a text; with `iconOnly` the text is its accessible name and its tooltip.
 * @param {{icon?: SVGElement, text: string, class?: string, iconOnly?: boolean, onclick?: (event: Event) => void}
 *   & Record<string, unknown>} props
 * @returns {HTMLButtonElement}
 */
export function button({ icon, text, iconOnly, ...rest }) {
  const props = { type: 'button', ...rest };
  if (iconOnly) return h('button', { ...props, 'aria-label': text, title: text }, icon);
  return h('button', props, icon, h('span', {}, text));
}
