"""What holds on every page: computed in the page as JavaScript, and the contrast of colours."""

from __future__ import annotations

# Boxes that scroll sideways, or that are wider than the window, which cuts them off.
TOO_WIDE = """() => [...document.querySelectorAll('html, .scroller, .dock, .panel-body, .bar')]
    .filter((box) => box.scrollWidth > Math.max(box.clientWidth, 1) || box.getBoundingClientRect().right > innerWidth)
    .map((box) => box.className || box.tagName)"""
# Controls that a screen reader could not name.
UNNAMED = """() => {
    const named = (id) => document.getElementById(id)?.textContent;
    return [...document.querySelectorAll('button, input, select, textarea, a, progress, [role=meter], aside')]
        .filter((e) => e.checkVisibility())
        .filter((e) => !(e.labels?.length || e.getAttribute('aria-label') || e.innerText?.trim()
            || e.getAttribute('aria-labelledby')?.split(' ').some(named)))
        .map((e) => e.outerHTML);
}"""
# Ids that are there twice.
DOUBLE_IDS = """() => [...document.querySelectorAll('[id]')].map((e) => e.id)
    .filter((id, index, all) => all.indexOf(id) !== index)"""


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio of two #rrggbb colours."""

    def luminance(colour: str) -> float:
        channels = [int(colour.strip()[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)
