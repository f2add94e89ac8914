"""`compare`: which heads of two checkpoints are the same, and what moved.

Axes as in `attention_view`. Layers are matched by name (in
order where all names differ), and within a layer the heads of b are
permuted so that the similarity of QK forms and OV maps is largest (linear assignment): an order of
heads means nothing. The change of a head is the relative distance of its forms,
‖B_i - B'_π(i)‖/‖B_i‖ and ‖M_i - M'_π(i)‖/‖M_i‖, with norms in front folded. Under rotary positions
a head has a form B_i(n) for every offset n between query and key: squares and inner products are
averages over all offsets (`invariants.rotary`), not those of a token with itself.

Two examples. A checkpoint and a copy of it with heads in another order, in another basis inside
the heads: nothing moved. One with the queries of head 3 halved: its QK form moved by 0.5.

Forms compare where both models have the residual stream in one basis: after fine-tuning, or along
one training. Two seeds have bases of their own; `basis="own"` compares singular values instead,
which no rotation of the residual stream moves (under rotary positions those at offset zero).
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.base.numerics import threads
from levelhead.base.progress import progress
from levelhead.base.records import Run
from levelhead.inspection.compare_figures import write_comparison, write_series
from levelhead.inspection.folders import refuse_used
from levelhead.inspection.measures import folded_layer, too_large
from levelhead.inspection.rows import frame
from levelhead.inspection.steps import refuse_series_with_b, steps_of
from levelhead.invariants.heads import normalised, participation_ratio
from levelhead.invariants.rotary import is_rotary, rotary_gram, rotary_parts
from levelhead.invariants.spectral import effective_qk
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.checkpoints import Weights, open_weights
from levelhead.weights.gauge import inner_blocks
from levelhead.weights.layouts import Layout, Match, NothingMatched, Skip, match, views

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Basis", "Comparison", "compare", "steps_of"]

Basis = Literal["shared", "own"]
Row = dict[str, Any]
# Below this mean cosine of matched heads, forms are as unrelated as those of two seeds.
_UNRELATED = 0.2
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """What `compare` found.

    Args:
        a, b: the sources; b is None for a series.
        heads: a row for each layer and head, what moved most first.
        layers: a row for each layer (and, of a series, each step).
        skipped: layers that could not be compared, with the reason.
        said: sentences about how far the numbers mean something.
        run: the run folder, if one was written.
    """

    a: str
    b: str | None
    heads: tuple[Row, ...]
    layers: tuple[Row, ...]
    skipped: tuple[Skip, ...] = ()
    said: tuple[str, ...] = ()
    run: Run | None = None

    def rows(self) -> list[Row]:
        """What the command prints: heads of two checkpoints, layers and steps of a series."""
        return list(self.heads if self.b is not None else self.layers)

    @property
    def moved(self) -> bool:
        """Whether some head changed by more than rounding, or stands under another number."""
        return any(row["change"] > _ROUNDING or row["matched"] != row["head"] for row in self.heads)

    def to_frame(self) -> pd.DataFrame:
        """One row for each layer and head of a, largest change first.

        Columns: layer, head, matched (the head of b), qk_change, ov_change (relative distances),
        change (their root mean square), qk_cosine, ov_cosine.
        """
        return frame(self.heads, ["layer", "head", "matched", "qk_change", "ov_change", "change"])

    def layers_frame(self) -> pd.DataFrame:
        """One row for each layer (of a series: layer and step): mean and largest changes."""
        return frame(self.layers, ["layer", "qk_change", "ov_change", "largest_change"])

    def notes(self) -> list[str]:
        """Sentences: what was compared, how far that means something, what was left out."""
        with_what = "its first step" if self.b is None else self.b
        first = f"{self.a} compared with {with_what}."
        return [first, *self.said, *(f"Left out: {skip}." for skip in self.skipped)]

    def __repr__(self) -> str:
        return f"Comparison({self.a!r}, {self.b!r}: {len(self.heads)} heads)"

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes())
        table = frame(self.rows(), ["layer"])
        return f"{table.to_html(index=False, border=0)}<ul>{notes}</ul>"


def compare(
    a: object,
    b: object = None,
    *,
    layers: Sequence[int | str] | None = None,
    layout: Layout | None = None,
    basis: Basis = "shared",
    out: str | os.PathLike[str] | None = None,
    show_progress: bool | None = None,
    **arguments: Any,
) -> Comparison:
    """Match the heads of b with those of a, and tell what moved most.

    Args:
        a, b: as `source` of `inspect`. Without b, a is a folder of `step-…` folders (or files):
            each is compared with the first.
        layers, layout, arguments: as in `inspect`.
        basis: "shared" compares forms; "own" singular values, for models trained apart.
        out, show_progress: as in `inspect`.

    Raises NothingMatched if no layer of a is in b, InputError for a series of fewer than two
    steps, and what `inspect` raises for a source.

    >>> model = torch.nn.MultiheadAttention(8, 2)
    >>> other = {n: t.clone() for n, t in model.state_dict().items()}
    >>> other["in_proj_weight"][:4] *= 0.5      # the queries of head 0
    >>> found = compare(model.state_dict(), other, heads=2)
    >>> [(r["head"], round(r["qk_change"], 6), r["ov_change"] < 1e-9) for r in found.heads]
    [(0, 0.5, True), (1, 0.0, True)]
    """
    if basis not in ("shared", "own"):
        raise InputError(f"basis={basis!r} was given; expected 'shared' or 'own'")
    refuse_series_with_b(a, b)
    refuse_used(out)
    options = {"layers": layers, "layout": layout, **arguments}
    if b is None:
        found = _series(a, basis, options, show_progress)
    else:
        found = _pair(a, b, basis, options, show_progress)
    if out is None:
        return found
    title = "Heads along training" if b is None else "Heads of two checkpoints"
    settings = {"a": found.a, "b": found.b, "basis": basis}
    run = Run.create(out, title=title, command="compare", settings=settings)
    if b is None:
        write_series(run, found.layers)
    else:
        write_comparison(run, found.heads, found.layers, trained_apart=basis == "own")
    run.add_notes(found.notes())
    return Comparison(found.a, found.b, found.heads, found.layers, found.skipped, found.said, run)


# ── two checkpoints, a series ──


def _pair(
    a: object, b: object, basis: Basis, options: Mapping[str, Any], show: bool | None
) -> Comparison:
    one, two = open_weights(a), open_weights(b)
    skipped: list[Skip] = []
    heads: list[Row] = []
    layers: list[Row] = []
    said: list[str] = []
    with progress("layers", len(_held(one, options).plans), enabled=show) as advance:
        for first, second in _together(one, two, options, skipped):
            found = _heads(first, second, basis)
            said += _about_positions(first, second, basis)
            heads += found
            layers.append({"layer": first.name, **_summary(found)})
            advance()
    heads.sort(key=lambda row: -row["change"])
    cosines = [row[name] for row in heads for name in ("qk_cosine", "ov_cosine") if name in row]
    said = list(dict.fromkeys(said))
    if not {p.name for p in _held(one, options).plans} & {
        p.name for p in _held(two, options).plans
    }:
        said.append("No names agree: layers are matched in their order.")
    if cosines and float(np.mean(cosines)) < _UNRELATED:
        said.append(
            f"Matched heads have a mean cosine of {np.mean(cosines):.2g} only: models that were "
            "trained apart have bases of their own, so compare them with basis own."
        )
    left = len({skip.name for skip in skipped if not skip.loose})
    said += _outcome(heads, basis, len(layers), left)
    return Comparison(
        one.where, two.where, tuple(heads), tuple(layers), tuple(skipped), tuple(said)
    )


def _series(
    folder: object, basis: Basis, options: Mapping[str, Any], show: bool | None
) -> Comparison:
    steps = steps_of(folder)
    start = open_weights(steps[0][1])
    skipped: list[Skip] = []
    rows: list[Row] = []
    heads: list[Row] = []
    with progress("steps", len(steps), enabled=show) as advance:
        for number, path in steps:
            for first, second in _together(start, open_weights(path), options, skipped):
                found = _heads(first, second, basis)
                rows.append(
                    {
                        "layer": first.name,
                        "step": number,
                        **_summary(found),
                        **_effective_heads(second),
                    }
                )
                if number == steps[-1][0]:
                    heads += found
            advance()
    heads.sort(key=lambda row: -row["change"])
    order = list(dict.fromkeys(row["layer"] for row in rows))
    rows.sort(key=lambda row: order.index(row["layer"]))
    left = tuple(dict.fromkeys(skipped))
    return Comparison(str(folder), None, tuple(heads), tuple(rows), left)


def _outcome(heads: Sequence[Row], basis: Basis, layers: int, left: int) -> list[str]:
    """A sentence on what moved, or differs, most; `heads` with the largest change first."""
    if not heads:
        return []
    top = heads[0]
    if top["change"] > _ROUNDING:
        what = "Most moved" if basis == "shared" else "Differs most in its singular values"
        size = "of its size" if basis == "shared" else "of their size"
        return [f"{what}: head {top['head']} of {top['layer']}, by {top['change']:.3g} {size}."]
    nothing = "Nothing moved" if basis == "shared" else "No singular value differs"
    if not left:
        return [f"{nothing}, up to rounding."]
    return [
        f"{nothing} in the {layers} layer{'s' if layers > 1 else ''} compared, up to rounding; "
        f"{left} could not be compared."
    ]


def _held(weights: Weights, options: Mapping[str, Any]) -> Match:
    return match(weights, **{n: v for n, v in options.items() if n != "layers"})


def _together(
    one: Weights, two: Weights, options: Mapping[str, Any], skipped: list[Skip]
) -> Iterator[tuple[AttentionView, AttentionView]]:
    """The folded layers of both that belong together and have one shape; others go to `skipped`."""
    partners = _partners(one, two, options)
    rest = {n: v for n, v in options.items() if n != "layers"}
    for first in views(one, skipped=skipped, **options):
        if first.name not in partners:
            skipped.append(Skip(first.name, f"{two.where} has no such layer"))
            continue
        for second in views(two, [partners[first.name]], skipped=skipped, **rest):
            if (reason := _apart(first, second)) is not None:
                skipped.append(Skip(first.name, reason))
                continue
            pair = folded_layer(first)[0], folded_layer(second)[0]
            if any(map(too_large, pair)):
                skipped.append(Skip(first.name, "its weights are too large for their products"))
                continue
            yield pair
    skipped[:] = list(dict.fromkeys(skipped))


def _partners(one: Weights, two: Weights, options: Mapping[str, Any]) -> dict[str, int]:
    """The place in `two` of each layer of `one`: by name, or in order where all names differ.

    Files of other formats name the same layers differently; then as many of them must be there.
    """
    names, known = ([p.name or p.family for p in _held(w, options).plans] for w in (one, two))
    for weights, found in ((one, names), (two, known)):
        if not found:
            next(views(weights, layout=options["layout"]))  # which says what was seen
    shared = {name: known.index(name) for name in names if name in known}
    if not shared and len(names) == len(known):
        return {name: place for place, name in enumerate(names)}
    if not shared:
        raise NothingMatched(
            f"no layer of {one.where} is in {two.where}: the names seen are "
            f"{', '.join(names[:3])} and {', '.join(known[:3])}"
        )
    return shared


def _apart(a: AttentionView, b: AttentionView) -> str | None:
    """Why two layers of one name cannot be compared, or None."""
    shapes = [(v.heads, v.d, v.d_source, v.d_out) for v in (a, b)]
    if shapes[0] != shapes[1]:
        one, two = ((v.heads, v.d) for v in (a, b))
        return f"{one[0]} heads on width {one[1]} against {two[0]} on {two[1]}"
    if _turning(a) != _turning(b):
        return "positions turn other planes of queries and keys"
    if (a.qk_norm is None) != (b.qk_norm is None):
        return "queries and keys are normed in one of both only"
    return None


def _turning(view: AttentionView) -> tuple[int, tuple[int, ...]] | None:
    """How many planes turn and how wide what does not is; None without rotary positions.

    Where the planes lie among the rows (half-split or interleaved) is the file's business.
    """
    if not is_rotary(view):
        return None
    blocks = inner_blocks(view)
    return len(blocks.planes), tuple(map(len, blocks.free))


def _about_positions(a: AttentionView, b: AttentionView, basis: Basis) -> Iterator[str]:
    """What is to be said of rotary positions."""
    if not (is_rotary(a) and is_rotary(b)):
        return
    if basis == "own":
        yield "Rotary positions: singular values are those of a token with itself."
    else:
        yield "Rotary positions: QK forms are compared by averages over all offsets."
    if a.position != b.position:
        yield "Both turn at other frequencies: planes are matched in their order all the same."


# ── heads of one layer ──


def _heads(a: AttentionView, b: AttentionView, basis: Basis) -> list[Row]:
    """Rows of the heads of a, each with its partner in b."""
    with threads(1), torch.no_grad():
        if basis == "own":
            qk = effective_qk(a), effective_qk(b)
            if a.qk_norm is not None:  # sizes are free: compare forms of length one
                qk = _unit(qk[0]), _unit(qk[1])
            return _by_spectra(a.name, qk, (a.ov, b.ov))
        forms = _qk_parts(a), _qk_parts(b)
        maps = [(a.ov, b.ov)]
        if a.qk_norm is not None:
            forms = _of_length_one(forms[0], a.heads), _of_length_one(forms[1], b.heads)
        pairs = list(zip(*forms, strict=True))
        alike = _cross_cosines(pairs, a.heads), _cross_cosines(maps, a.heads)
        partner = _assigned(alike[0] + alike[1])
        change = _change(pairs, partner), _change(maps, partner)
    at = np.arange(a.heads), partner
    return [
        {**row, "qk_cosine": float(c), "ov_cosine": float(m)}
        for row, c, m in zip(
            _rows(a.name, partner, *change), alike[0][at], alike[1][at], strict=True
        )
    ]


def _qk_parts(view: AttentionView) -> tuple[LowRankStack, ...]:
    """What B is made of: itself, or under rotary positions the parts that turn alike."""
    return rotary_parts(view) if is_rotary(view) else (effective_qk(view),)


def _unit(stack: LowRankStack) -> LowRankStack:
    norms = stack.frobenius_norms()
    return stack.scale(1 / torch.where(norms > 0, norms, 1.0))


def _of_length_one(parts: tuple[LowRankStack, ...], heads: int) -> tuple[LowRankStack, ...]:
    sizes = _sizes(parts, heads)
    factor = 1 / torch.where(sizes > 0, sizes, 1.0)
    return tuple(part.scale(factor.repeat_interleave(len(part) // heads)) for part in parts)


def _sizes(parts: Sequence[LowRankStack], heads: int) -> Tensor:
    """Norms [h] of heads whose squares are sums over parts, and slices of one head in a row."""
    squares = [p.frobenius_norms().square().reshape(heads, -1).sum(1) for p in parts]
    return torch.stack(squares).sum(0).sqrt()


def _cross_cosines(
    pairs: Sequence[tuple[LowRankStack, LowRankStack]], heads: int
) -> NDArray[np.float64]:
    """Cosines [h, h] of the heads of both sides."""
    total = torch.zeros(heads, heads, dtype=torch.float64)
    for a, b in pairs:
        left, right = (
            [x.reshape(heads, -1, *x.shape[1:]) for x in stack.expanded(torch.float64)]
            for stack in (a, b)
        )
        for i in range(heads):
            products = [mine[i][None] @ theirs.mT for mine, theirs in zip(left, right, strict=True)]
            total[i] += (products[0] * products[1]).sum((1, 2, 3)).cpu()
    sizes = [_sizes([pair[side] for pair in pairs], heads).cpu() for side in (0, 1)]
    lengths = sizes[0][:, None] * sizes[1][None, :]
    cosines: NDArray[np.float64] = (total / torch.where(lengths > 0, lengths, 1.0)).numpy()
    return cosines


def _change(
    pairs: Sequence[tuple[LowRankStack, LowRankStack]], partner: NDArray[np.intp]
) -> NDArray[np.float64]:
    """‖A_i - A'_π(i)‖/‖A_i‖ [h], from the factors of the difference: no digits cancel."""
    heads, differences = len(partner), []
    for a, b in pairs:
        count = len(a) // heads
        chosen = (partner[:, None] * count + np.arange(count)).reshape(-1).tolist()
        left, right = a.expanded(torch.float64)
        other_left, other_right = b[chosen].expanded(torch.float64)
        differences.append(
            LowRankStack(torch.cat((left, other_left), 1), torch.cat((right, -other_right), 1))
        )
    size = _sizes([a for a, _ in pairs], heads)
    return _relative(_sizes(differences, heads).cpu().numpy(), size.cpu().numpy())


def _by_spectra(
    name: str, qk: tuple[LowRankStack, LowRankStack], ov: tuple[LowRankStack, LowRankStack]
) -> list[Row]:
    """Changes ‖σ - σ'‖/‖σ‖ of singular values, matched so that their sum is smallest."""
    changes = []
    for one, two in (qk, ov):
        s, t = one.singular_values(), two.singular_values()
        width = max(s.shape[1], t.shape[1])
        s, t = (torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in (s, t))
        sizes = torch.linalg.vector_norm(s, dim=-1, keepdim=True)
        changes.append(_relative(torch.cdist(s, t).numpy(), sizes.numpy()))
    partner = _assigned(-(changes[0] + changes[1]))
    at = np.arange(len(partner)), partner
    return list(_rows(name, partner, changes[0][at], changes[1][at]))


def _relative(change: NDArray[np.float64], size: NDArray[np.float64]) -> NDArray[np.float64]:
    """change/size; what came from nothing moved by 1."""
    moved = np.where(change > 0, 1.0, 0.0)
    found: NDArray[np.float64] = np.where(size > 0, change / np.where(size > 0, size, 1.0), moved)
    return found


def _assigned(similarity: NDArray[np.float64]) -> NDArray[np.intp]:
    """The partner of each row, so that the sum of similarities is largest."""
    return np.asarray(linear_sum_assignment(similarity, maximize=True)[1])


def _rows(
    layer: str,
    partner: NDArray[np.intp],
    qk: NDArray[np.float64],
    ov: NDArray[np.float64],
) -> Iterator[Row]:
    for i, (other, one, two) in enumerate(zip(partner, qk, ov, strict=True)):
        yield {
            "layer": layer,
            "head": i,
            "matched": int(other),
            "qk_change": float(one),
            "ov_change": float(two),
            "change": float(np.sqrt((one**2 + two**2) / 2)),
        }


def _summary(rows: Sequence[Row]) -> Row:
    return {
        "qk_change": float(np.mean([row["qk_change"] for row in rows])),
        "ov_change": float(np.mean([row["ov_change"] for row in rows])),
        "largest_change": max(row["change"] for row in rows),
        "permuted": sum(row["matched"] != row["head"] for row in rows),
    }


def _effective_heads(view: AttentionView) -> Row:
    with threads(1), torch.no_grad():
        form = rotary_gram(view) if is_rotary(view) else effective_qk(view).head_gram()
        return {
            f"{name}_effective_heads": float(participation_ratio(normalised(gram)))
            for name, gram in (("qk", form), ("ov", view.ov.head_gram()))
        }
