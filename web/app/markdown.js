/** Answers as Markdown. The model's own HTML is shown as text; what is rendered is sanitised as well. */
import DOMPurify from '/vendor/dompurify.js';
import { Marked } from '/vendor/marked.js';
import { button, h } from './dom.js';
import { icon } from './icons.js';
import { copyText } from './clipboard.js';

const TAGS = ['p', 'br', 'strong', 'em', 'del', 'code', 'pre', 'blockquote', 'ul', 'ol', 'li', 'hr', 'a',
  'h3', 'h4', 'h5', 'h6', 'table', 'thead', 'tbody', 'tr', 'th', 'td'];

/** @param {string} text */
const escape = (text) => text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    // HTML in an answer is something the model talks about, never part of this page.
    html: ({ text }) => escape(text),
    // An image would be a request to another host.
    image: ({ href, text }) => escape(text ? `${text} (${href})` : href),
    // The page's own headings are h1 and h2.
    heading({ tokens, depth }) {
      const level = Math.min(6, depth + 2);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>\n`;
    },
    checkbox: ({ checked }) => (checked ? '☑ ' : '☐ '),
  },
});

/**
 * @param {string} html
 * @returns {DocumentFragment}
 */
function sanitize(html) {
  const fragment = DOMPurify.sanitize(html, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ['href', 'title', 'start', 'align'],
    ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
    RETURN_DOM_FRAGMENT: true,
  });
  for (const link of fragment.querySelectorAll('a')) {
    link.setAttribute('target', '_blank');
    link.setAttribute('rel', 'noopener noreferrer');
  }
  for (const pre of fragment.querySelectorAll('pre')) addCopyButton(pre);
  for (const table of fragment.querySelectorAll('table')) {
    const frame = h('div', { class: 'wide', tabindex: '0', role: 'group', 'aria-label': 'Table' });
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

/** @param {HTMLPreElement} pre */
function addCopyButton(pre) {
  const code = pre.textContent ?? '';
  const copy = button({ icon: icon('copy'), text: 'Copy code', iconOnly: true, class: 'quiet copy-code' });
  copy.addEventListener('click', () => copyText(code, copy));
  const frame = h('div', { class: 'code' });
  pre.replaceWith(frame);
  pre.setAttribute('tabindex', '0');
  frame.append(pre, copy);
}

/**
 * A rendering that grows: only the blocks that changed since the last call are replaced, so a selection in the
 * text above stays, and nothing above moves.
 * @param {HTMLElement} element
 * @returns {(text: string) => void}
 */
export function createMarkdown(element) {
  /** @type {{html: string, nodes: ChildNode[]}[]} */
  let blocks = [];
  return function render(text) {
    const pieces = marked.lexer(text).filter((token) => token.type !== 'space').map((token) => marked.parser([token]));
    let same = 0;
    while (same < blocks.length && same < pieces.length && blocks[same].html === pieces[same]) same += 1;
    for (const block of blocks.splice(same)) for (const node of block.nodes) node.remove();
    for (const html of pieces.slice(same)) {
      const fragment = sanitize(html);
      blocks.push({ html, nodes: [...fragment.childNodes] });
      element.append(fragment);
    }
  };
}
