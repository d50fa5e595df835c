/** Line icons on a 20 by 20 grid, drawn in the current text colour. */

const PATHS = {
  send: ['M10 16V4', 'M4.5 9.5 10 4l5.5 5.5'],
  stop: ['M5.5 5.5h9v9h-9z'],
  plus: ['M10 4v12', 'M4 10h12'],
  sliders: ['M3 6h8', 'M15 6h2', 'M3 14h2', 'M9 14h8', 'M13 4v4', 'M7 12v4'],
  info: ['M10 9.2v4.6', 'M10 6.2v.1', 'M10 17.2a7.2 7.2 0 1 0 0-14.4 7.2 7.2 0 0 0 0 14.4z'],
  chevron: ['M5.5 8 10 12.5 14.5 8'],
  close: ['M5 5l10 10', 'M15 5 5 15'],
  copy: ['M7.5 7.5h8v8h-8z', 'M12.5 7.5v-3h-8v8h3'],
  edit: ['M4 16l.8-3.4L13 4.4l2.6 2.6-8.2 8.2z', 'M11.4 6l2.6 2.6'],
  again: ['M15.6 11.5a5.8 5.8 0 1 1-1.2-5.4', 'M15 3v3.6h-3.6'],
  down: ['M10 4v12', 'M4.5 10.5 10 16l5.5-5.5'],
  gauge: ['M3.6 14.5a7.2 7.2 0 1 1 12.8 0', 'M10 11.2l3.4-3.4'],
  check: ['M4.5 10.5l3.6 3.6 7.4-8'],
  warn: ['M10 3.5 17.5 16.5h-15z', 'M10 8.4v3.8', 'M10 14.3v.1'],
};

/**
 * @param {keyof typeof PATHS} name
 * @returns {SVGElement} decorative: hidden from assistive technology
 */
export function icon(name) {
  const ns = 'http://www.w3.org/2000/svg';
  const svg = document.createElementNS(ns, 'svg');
  svg.setAttribute('viewBox', '0 0 20 20');
  svg.setAttribute('class', 'icon');
  svg.setAttribute('aria-hidden', 'true');
  for (const d of PATHS[name]) {
    const path = document.createElementNS(ns, 'path');
    path.setAttribute('d', d);
    svg.append(path);
  }
  return svg;
}
