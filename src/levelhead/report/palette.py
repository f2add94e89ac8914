"""Colours of the page in both schemes, and the arithmetic that keeps text readable on them.

The series colours follow Okabe and Ito (2008), darkened or lightened until each stands out
against its background by 3:1 or more; text stands out by 4.5:1 or more (WCAG 2.2, 1.4.3, 1.4.11).
"""

from __future__ import annotations

__all__ = ["SCHEMES", "blend", "contrast", "inks", "opacity"]

SERIES = 6

SCHEMES: dict[str, dict[str, str]] = {
    "light": {
        "paper": "#fdfdfb",
        "ink": "#1a1e23",
        "muted": "#58616b",
        "rule": "#e4e3dd",
        "axis": "#8a9199",
        "accent": "#0b5a9e",
        "past": "#454c54",
        "best": "#e6eff7",
        "warm": "#a83c00",
        "cool": "#0b4f8a",
        "dark-text": "#000000",
        "light-text": "#ffffff",
        "series-0": "#0b6aae",
        "series-1": "#c44e00",
        "series-2": "#00795a",
        "series-3": "#a4468a",
        "series-4": "#806600",
        "series-5": "#4d5761",
    },
    "dark": {
        "paper": "#14171a",
        "ink": "#e7e5e0",
        "muted": "#a3aab2",
        "rule": "#2b3036",
        "axis": "#767f88",
        "accent": "#6fb6f5",
        "past": "#b9c0c7",
        "best": "#1d3042",
        "warm": "#ffab70",
        "cool": "#7cc0ff",
        "dark-text": "#000000",
        "light-text": "#ffffff",
        "series-0": "#62b2f2",
        "series-1": "#f58a43",
        "series-2": "#34c49a",
        "series-3": "#e08fc4",
        "series-4": "#d9bd3f",
        "series-5": "#aab3bc",
    },
}


def _channels(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return red, green, blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours `#rrggbb`, from 1 to 21 (WCAG 2.2).

    >>> contrast("#000000", "#ffffff")
    21.0
    """

    def luminance(colour: str) -> float:
        shares = [channel / 255 for channel in _channels(colour)]
        linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def blend(below: str, above: str, alpha: float) -> str:
    """Colour seen when `above` lies on `below` with opacity `alpha`.

    >>> blend("#000000", "#ffffff", 0.5)
    '#808080'
    """
    mixed = (
        round(b + alpha * (a - b)) for b, a in zip(_channels(below), _channels(above), strict=True)
    )
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def opacity(share: float) -> float:
    """Opacity of a heatmap cell whose value lies at `share` (0 to 1) of the scale."""
    return 0.05 + 0.95 * share


def inks(hue: str, alpha: float) -> str:
    """Classes that choose black or white text on `hue` at opacity `alpha`, scheme by scheme.

    >>> inks("cool", 0.1), inks("cool", 1.0)
    ('light-dark dark-light', 'light-light dark-dark')
    """
    classes = []
    for scheme, colours in SCHEMES.items():
        cell = blend(colours["paper"], colours[hue], alpha)
        better = max(("dark", "light"), key=lambda ink: contrast(colours[f"{ink}-text"], cell))
        classes.append(f"{scheme}-{better}")
    return " ".join(classes)
