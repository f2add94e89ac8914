"""The catalogue's declarations held against every layer of a checkpoint, and the catalogue as rows.

Two examples. Declared: σ(B_i) does not see `qk_gauge`. Acting with a random element of a layer's
own group shows whether that is so. `assume={"raw_head_spectrum": "gauge"}` says it of a number that
depends on the basis: the same test must find it wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from levelhead.base.errors import InputError
from levelhead.base.numerics import threads
from levelhead.base.progress import progress
from levelhead.inspection.measures import folded_layer
from levelhead.invariants.catalogue import catalogue, entries
from levelhead.invariants.entry import Verdict
from levelhead.invariants.symmetry import Check, Verdicts, verify
from levelhead.weights.checkpoints import open_weights
from levelhead.weights.layouts import Layout, Skip, match, views
from levelhead.weights.symmetry_group import FAMILIES, GENERATORS

__all__ = [
    "CATALOGUE_LEGEND",
    "TABLE_LEGEND",
    "Verification",
    "catalogue_rows",
    "catalogue_text",
    "parse_assumptions",
    "verify_checkpoint",
]

_CELLS = {
    Verdict.INVARIANT: "=",
    Verdict.VARIANT: "moves",
    Verdict.GENERIC: "~",
    Verdict.NOT_APPLICABLE: "",
}
WRONG = "WRONG"
_SYMBOLS = (
    "h heads with forms B_i = W_Q,iᵀ W_K,i and maps M_i = W_O,i W_V,i, σ their singular values; 𝓑 "
    "and 𝓜 stack the forms and the maps, T [h, d_k, d, 3] the weights of queries, keys and values"
)
CATALOGUE_LEGEND = (
    f"{_SYMBOLS}. Generators are moves that leave what the layer computes alone. invariant: the "
    "move leaves the number alone; variant: it moves the number; generic: it does for weights "
    "without structure; by layer: that depends on what the layer is."
)
TABLE_LEGEND = (
    "Columns are moves that leave what the layer computes alone (basis_rotation turns its input "
    "along). = declared invariant, and stood still; moves: declared variant, and moved; ~ moves in "
    "general, not tested; blank: does not exist for this layer; WRONG: the declaration did not "
    f"hold; two signs: layers differ. {_SYMBOLS}."
)


@dataclass(frozen=True, eq=False)
class Verification:
    """The truth tables of a checkpoint's layers, and what of it was left out."""

    where: str
    verdicts: tuple[Verdicts, ...]
    skipped: tuple[Skip, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every declaration held in every layer."""
        return all(verdict.passed for verdict in self.verdicts)

    def failures(self) -> list[str]:
        """A sentence for every declaration that did not hold."""
        return [_sentence(v.layer, c) for v in self.verdicts for c in v.failures]

    def rows(self) -> list[dict[str, Any]]:
        """One row for each layer, number and generator: declared, found, changes, passed."""
        return [
            {
                "layer": verdict.layer,
                "invariant": check.invariant,
                "generator": check.generator,
                "declared": str(check.declared),
                "found": check.found,
                "change": check.change,
                "moment": check.moment,
                "tolerance": check.tolerance,
                "passed": check.passed,
                "reason": check.reason,
            }
            for verdict in self.verdicts
            for check in verdict
        ]

    def table(self) -> list[dict[str, str]]:
        """One row for each number, one column for each generator that some layer has.

        "=" declared invariant and still, "moves" declared variant and moved, "~" not tested (only
        weights with structure hide that it moves), "" not there, "WRONG" where a declaration did
        not hold in some layer. Where layers differ, all cells are given.
        """
        found: dict[str, dict[str, list[str]]] = {}
        for verdict in self.verdicts:
            for check in verdict:
                cell = WRONG if not check.passed else _CELLS[check.declared]
                found.setdefault(check.invariant, {}).setdefault(check.generator, []).append(cell)
        used = [n for n in GENERATORS if any(n in cells for cells in found.values())]
        return [
            {"invariant": name, **{g: _together(cells.get(g, [])) for g in used}}
            for name, cells in found.items()
        ]


def verify_checkpoint(
    source: object,
    *,
    layers: Sequence[int | str] | None = None,
    layout: Layout | None = None,
    invariants: Iterable[str] | None = None,
    assume: Mapping[str, str] | None = None,
    draws: int = 2,
    seed: int = 0,
    show_progress: bool | None = None,
    **arguments: Any,
) -> Verification:
    """Act on every layer of `source` with random elements of its own group, and look what moves.

    Args:
        layers, layout, arguments: as in `inspect`.
        invariants: names of the catalogue; None: all.
        assume: number's name → a generator, a family of them or "all" under which it is taken to
            be invariant, whatever the catalogue says.
        draws: random elements of each generator; `seed`: of what is random.

    Norms in front are folded first. Raises InputError for unknown names, and what `inspect`
    raises for a source.

    >>> import torch
    >>> model = torch.nn.MultiheadAttention(8, 2)
    >>> verify_checkpoint(model, invariants=["qk_spectrum"]).passed
    True
    >>> verify_checkpoint(model, invariants=["raw_head_spectrum"],
    ...                   assume={"raw_head_spectrum": "gauge"}).passed
    False
    """
    chosen = [entry.name for entry in entries(invariants)]
    assume = dict(assume or {})
    _check_assumptions(assume)
    weights = open_weights(source)
    held = match(weights, layout=layout, **arguments)
    skipped: list[Skip] = []
    verdicts = []
    many = len(held.plans) if layers is None else len(layers)
    with progress("layers", many, enabled=show_progress) as advance, threads(1):
        for view in views(weights, layers, layout, skipped=skipped, **arguments):
            folded, _ = folded_layer(view)
            verdicts.append(
                verify(
                    folded,
                    chosen,
                    draws=draws,
                    seed=seed,
                    assume=assume,
                    show_progress=show_progress,
                )
            )
            advance()
    return Verification(held.where, tuple(verdicts), tuple(skipped))


def parse_assumptions(texts: Iterable[str]) -> dict[str, str]:
    """`NAME=GROUP` texts as a mapping. Raises InputError for one that is not like that.

    >>> parse_assumptions(["raw_head_spectrum=gauge"])
    {'raw_head_spectrum': 'gauge'}
    """
    found = {}
    for text in texts:
        name, equals, group = text.partition("=")
        if not (name and equals and group):
            raise InputError(
                f"--assume {text!r} was given: write NAME=GROUP, such as raw_head_spectrum=gauge"
            )
        found[name] = group
    _check_assumptions(found)
    return found


def catalogue_rows(names: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """The catalogue, one row for each entry, with the declared verdict for every generator.

    "by layer": it depends on what the layer is; "not read": the generator moves nothing it reads.
    """
    rows = []
    for entry in entries(names):
        declared = {
            name: str(verdict) if isinstance(verdict := entry.symmetries.get(name), Verdict)
            else "not read" if verdict is None
            else "by layer"
            for name in GENERATORS
        }  # fmt: skip
        rows.append(
            {
                "name": entry.name,
                "formula": entry.formula,
                "unit": entry.unit,
                "kind": entry.kind,
                "gradient": f"not tested: {entry.no_gradient}" if entry.no_gradient else "tested",
                "degree": entry.degree,
                "range": entry.range,
                "source": entry.source,
                **declared,
            }
        )
    return rows


def catalogue_text(names: Iterable[str] | None = None) -> str:
    """The catalogue for a terminal: a paragraph for each entry, generators by their verdict."""
    return "\n\n".join(_paragraph(row) for row in catalogue_rows(names))


# ── parts ──


def _paragraph(row: Mapping[str, Any]) -> str:
    degree = "no degree" if row["degree"] is None else f"degree {row['degree']}"
    lines = [
        f"{row['name']} = {row['formula']}",
        f"    [{row['unit']}], {row['range']}; {row['kind']}, {degree}; {row['source']}",
    ]
    if row["gradient"] != "tested":
        lines.append(f"    gradient {row['gradient']}")
    for verdict in ("invariant", "variant", "generic", "by layer"):
        under = [name for name in GENERATORS if row[name] == verdict]
        if under:
            lines.append(f"    {verdict}: {', '.join(under)}")
    return "\n".join(lines)


def _check_assumptions(assume: Mapping[str, str]) -> None:
    """Names are told before the first layer is read."""
    known = catalogue()
    for name, group in assume.items():
        if name not in known:
            raise InputError(f"no invariant {name!r}; `levelhead invariants` lists them")
        if group not in ("all", *FAMILIES, *GENERATORS):
            raise InputError(
                f"no group {group!r}; expected all, a family ({', '.join(FAMILIES)}) or one of "
                f"{', '.join(GENERATORS)}"
            )


def _together(cells: Sequence[str]) -> str:
    if WRONG in cells:
        return WRONG
    return "/".join(dict.fromkeys(cell for cell in cells if cell))


def _sentence(layer: str, check: Check) -> str:
    declared = f"{check.declared} ({check.reason})" if check.reason else f"{check.declared}"
    if check.declared is Verdict.VARIANT:
        found = "it does not move"
    elif check.change is not None and check.change > check.tolerance:
        found = f"it moves by {check.change:.2g}"
    else:
        found = f"its gradient along the group is {check.moment or 0.0:.2g}"
    return f"{layer}: {check.invariant} is declared {declared} under {check.generator}, but {found}"
