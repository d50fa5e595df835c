/**
 * Light, dark, or as the system has it. A classic script in the head, not a module: it runs before the first
 * paint, so a dark page never flashes white.
 */
(() => {
  const dark = matchMedia('(prefers-color-scheme: dark)');
  let chosen = 'auto';

  function show() {
    const theme = chosen === 'auto' ? (dark.matches ? 'dark' : 'light') : chosen;
    document.documentElement.dataset.theme = theme;
  }

  try {
    chosen = JSON.parse(localStorage.getItem('tercet.settings') ?? '{}').theme ?? 'auto';
  } catch {
    // Nothing stored, or not readable: as the system has it.
  }
  dark.addEventListener('change', show);
  window.addEventListener('tercet-theme', (event) => {
    chosen = /** @type {CustomEvent<string>} */ (event).detail;
    show();
  });
  show();
})();
