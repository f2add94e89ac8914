"""The rows of an inspection as a table that fits a terminal, and what its columns mean.

Columns that say the same of every layer, or nothing, are left out of the table and told in
sentences below it. Numbers have three or four significant digits; headings two lines.

Two examples. Six layers of twelve heads: no column for the number of heads, and the sentence "Every
layer: 12 heads". A layer with two dead heads: a column for them in every row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["HEADINGS", "MEANINGS", "Compact", "compact", "legend", "narrow_text"]

# Column → heading, the same in the terminal and in reports.
HEADINGS: Mapping[str, str] = {
    "layer": "layer",
    "heads": "heads",
    "groups": "groups",
    "d_k": "d_k",
    "qk_effective_rank": "QK rank",
    "ov_effective_rank": "OV rank",
    "largest_logit_gain": "logit gain",
    "largest_logit": "largest logit",
    "qk_coherence": "QK coh.",
    "ov_coherence": "OV coh.",
    "qk_effective_heads": "QK heads",
    "ov_effective_heads": "OV heads",
    "whitened_qk_effective_rank": "data rank",
    "logit_rms": "data logit",
    "entropy_bound_typical": "entropy bound",
    "near_duplicates": "near dup.",
    "dead_heads": "dead",
    "notes": "notes",
    # of single heads
    "head": "head",
    "group": "group",
    "ov_spectral_norm": "OV norm",
    "nearest_head": "nearest head",
    "nearest_qk_cosine": "its QK cos.",
    "nearest_ov_cosine": "its OV cos.",
    "near_duplicate": "near dup.",
}

MEANINGS: Mapping[str, str] = {
    "groups": "blocks of keys and values",
    "d_k": "width of a head's queries and keys",
    "QK rank": "mean over heads of exp(entropy of σ/Σσ) of the forms B = W_Qᵀ W_K, from 1 to d_k",
    "OV rank": "the same of the maps M = W_O W_V",
    "logit gain": "largest over heads of scale·σ₁(B): the largest logit of two inputs of length 1",
    "largest logit": "what the norm of queries and keys allows at most",
    "QK coh.": "coherence, mean squared cosine between different heads' B: 0 unrelated, 1 copies",
    "OV coh.": "the same between different heads' M",
    "QK heads": "effective heads h²/Σ cos² of B, from 1 (copies) to h (all differ)",
    "OV heads": "the same of M",
    "data rank": "QK rank on your covariance C, of C^½ B C^½",
    "data logit": "largest over heads of the root mean square logit on it",
    "entropy bound": "smallest over heads of the least entropy (nat) of typical rows of 128 logits",
    "near dup.": "pairs of heads whose B and M both have cosines of 0.9 or more",
    "dead": "heads whose M is below a thousandth of the median head's",
    "OV norm": "σ₁(M)",
    "nearest head": "the head that is most alike, with its cosines of B and M",
}

_SIZES = ("heads", "groups", "d_k")
_COUNTS = {"near_duplicates": "near-duplicates", "dead_heads": "dead heads"}


@dataclass(frozen=True)
class Compact:
    """Rows with their short headings, and sentences about what all of them share."""

    rows: tuple[dict[str, object], ...]
    said: tuple[str, ...]


def compact(rows: Sequence[Mapping[str, object]]) -> Compact:
    """The rows without columns that are the same everywhere or empty, which become sentences.

    >>> rows = [{"layer": n, "heads": 2, "qk_coherence": 0.5, "dead_heads": 0} for n in "ab"]
    >>> found = compact(rows)
    >>> found.rows[0], found.said
    ({'layer': 'a', 'QK coh.': 0.5}, ('Every layer: 2 heads.', 'No dead heads.'))
    """
    if not rows:
        return Compact((), ())
    said: list[str] = []
    hidden = {n for n in rows[0] if all(_empty(row[n]) for row in rows)}
    if "group" in rows[0] and all(row["group"] == row["head"] for row in rows):
        hidden.add("group")  # a block of keys and values for each head
    sizes = [n for n in _SIZES if n in rows[0] and len({row[n] for row in rows}) == 1]
    if sizes:
        told = [f"{rows[0][n]} {n}" if n != "d_k" else f"d_k {rows[0][n]}" for n in sizes]
        said.append(f"{'Every layer' if len(rows) > 1 else 'The layer'}: {', '.join(told)}.")
        hidden |= set(sizes)
    none = [n for n in _COUNTS if n in rows[0] and all(row[n] == 0 for row in rows)]
    if none:
        said.append(f"No {', no '.join(_COUNTS[n] for n in none)}.")
        hidden |= set(none)
    notes = [str(row.get("notes") or "").split("; ") for row in rows]
    shared = [part for part in notes[0] if part and all(part in told for told in notes)]
    if shared:
        said.append(f"{'Every layer' if len(rows) > 1 else 'The layer'}: {'; '.join(shared)}.")
    kept = []
    for row, parts in zip(rows, notes, strict=True):
        own = "; ".join(part for part in parts if part not in shared)
        shown = {**row, "notes": own} if "notes" in row else row
        kept.append({HEADINGS.get(n, n): v for n, v in shown.items() if n not in hidden})
    if not any(row.get("notes") for row in kept):
        for row in kept:
            row.pop("notes", None)
    return Compact(tuple(kept), tuple(said))


def legend(headings: Iterable[str]) -> str:
    """One paragraph on what the columns are; empty if none of them needs it.

    >>> legend(["layer", "OV norm"])
    'OV norm: σ₁(M).'
    """
    told = [f"{name}: {MEANINGS[name]}" for name in headings if name in MEANINGS]
    return f"{'; '.join(told)}." if told else ""


def narrow_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows (one at least) in aligned columns under headings of at most two lines.

    Text that follows the last number, such as notes, stands on lines of its own below its row.

    >>> print(narrow_text([{"layer": "a", "logit gain": 1e30, "notes": "odd"}]))
    layer  logit
            gain
    a      1e+30
      odd
    """
    names = [name for name in rows[0] if name != "notes"]
    lines = [""] * (len(rows) + 2)
    for name in names:
        values = [row.get(name) for row in rows]
        text = any(isinstance(v, str) for v in values)
        first, _, second = name.partition(" ")
        cells = [first, second, *map(_cell, values)]
        width = max(map(len, cells))
        for at, cell in enumerate(cells):
            lines[at] += (cell.ljust(width) if text else cell.rjust(width)) + "  "
    if not lines[1].strip():
        del lines[1]
    top = len(lines) - len(rows)
    out = lines[:top]
    for line, row in zip(lines[top:], rows, strict=True):
        out.append(line)
        if row.get("notes"):
            out.append(f"  {row['notes']}")
    return "\n".join(line.rstrip() for line in out)


def _empty(value: object) -> bool:
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or value is False or value == ""


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        if not math.isfinite(value):
            return "–" if math.isnan(value) else "∞"
        # Small ones are as wide as they are long: a digit less keeps the table narrow.
        return f"{value:.4g}" if abs(value) >= 0.1 else f"{value:.3g}"
    return "–" if value is None else str(value)
