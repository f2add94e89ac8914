"""Every number the package reports about attention weights, with what it is invariant under.

`catalogue()` is the table; a row is an `Invariant`. The rows stand beside their functions: spectra
of heads (`spectral`), of frequencies (`rotary`), comparisons of heads (`heads`, `similarity`),
decompositions (`decompositions`), numbers on data (`whitened`) and basis dependent ones (`raw`).
"""

from __future__ import annotations

from collections.abc import Iterable

from levelhead.base.errors import InputError
from levelhead.invariants import decompositions, raw, rotary, similarity, spectral, whitened
from levelhead.invariants.entry import Invariant, Verdict

__all__ = ["Invariant", "Verdict", "catalogue", "entries"]

_ROWS: tuple[Invariant, ...] = (
    *spectral.ENTRIES,
    *rotary.ENTRIES,
    *similarity.ENTRIES,
    *decompositions.ENTRIES,
    *whitened.ENTRIES,
    *raw.ENTRIES,
)


def catalogue() -> dict[str, Invariant]:
    """All entries by name, in the order in which they are printed.

    >>> entry = catalogue()["qk_spectral_norm"]
    >>> entry.formula, entry.unit, entry.degree, entry.kind
    ('σ_1(B_i)', 'q·k per x²', 2, 'exact')
    """
    return {entry.name: entry for entry in _ROWS}


def entries(names: Iterable[str | Invariant] | None = None) -> tuple[Invariant, ...]:
    """The named entries (entries themselves pass through), all of them for None.

    Raises InputError for an unknown name.
    """
    if names is None:
        return _ROWS
    known = catalogue()
    found = []
    for name in names:
        if isinstance(name, Invariant):
            found.append(name)
        elif name in known:
            found.append(known[name])
        else:
            raise InputError(f"no invariant {name!r}; there are {', '.join(known)}")
    return tuple(found)
