"""Settings of a run as rows, for pages to show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["flat"]


def flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Rows of name and text; nested settings get dotted names.

    >>> list(flat({"sam": {"rho": 0.7}, "layers": [0, 1], "rank": None}))
    [('sam.rho', '0.7'), ('layers', '0, 1'), ('rank', '–')]
    """
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{above}{name}.")
        elif isinstance(value, list):
            yield f"{above}{name}", ", ".join(map(str, value)) or "–"
        else:
            yield f"{above}{name}", "–" if value is None or value == {} else str(value)
