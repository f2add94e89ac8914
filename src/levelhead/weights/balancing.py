"""Moving a live module's attention weights to the balanced gauge, its function unchanged.

Each layer is read, brought to `canonical`'s gauge, and written back by `write_back`. Where the
layer stores an output bias, the bias of values is put into it first: the two are one parameter of
the function (rows of softmax sum to one), and sharpness depends on how they divide it.

What cannot be moved stays, with the reason: a part whose entries are computed from several stored
tensors, and layers that share a stored tensor with something that cannot follow.

Dropout on attention weights breaks "rows sum to one": with it active the function is unchanged on
average only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from levelhead.base.errors import InputError
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.canonical import canonical
from levelhead.weights.folding import fold_value_bias
from levelhead.weights.plan import LayerPlan
from levelhead.weights.write_back import (
    Placement,
    Sheet,
    Target,
    claims,
    commit,
    placement,
    stored_tensors,
    view_tensors,
)

__all__ = ["Balanced", "balance_module", "balanced_view", "plan_balance"]

_COMPUTED = "its weights are computed from others, so there is nothing to write to"
_BLOCKS = {
    "queries and keys": ("q", "k", "q_bias", "k_bias", "position"),
    "values and output": ("o", "v", "v_bias", "o_bias"),
}


@dataclass(frozen=True, eq=False)
class Balanced:
    """What a balancing moves: stored tensors by name, and what stays where it was, with the reason.

    `sheets` hold the new values; `left` maps a layer's name to one clause.
    """

    sheets: Mapping[int, Sheet]
    layers: tuple[str, ...]
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors that are written."""
        return tuple(sheet.tensor for sheet in self.sheets.values())

    @property
    def written(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(sheet.name for sheet in self.sheets.values())


def balance_module(
    target: Target, plans: Sequence[LayerPlan], placed: Sequence[Placement] | None = None
) -> Balanced:
    """Move the layers of `plans` to the balanced gauge in place; the function stays as it is.

    State that an optimizer keeps for the tensors in the result's `written` belongs to the old
    gauge.

    Raises InputError where `target` does not hold what the plans read.

    >>> import torch
    >>> from levelhead.weights.layouts import match, views
    >>> from levelhead.weights.canonical import balance
    >>> model = torch.nn.MultiheadAttention(8, 2)
    >>> moved = balance_module(model, match(model).plans)
    >>> moved.written[0], moved.left
    ('in_proj_weight', {})
    >>> [bool(b.qk.max() < 1e-5) for b in map(balance, views(model))]
    [True]
    """
    found = plan_balance(target, plans, placed)
    commit(found.sheets.values())
    return found


def plan_balance(
    target: Target, plans: Sequence[LayerPlan], placed: Sequence[Placement] | None = None
) -> Balanced:
    """What `balance_module` would write; changes nothing."""
    tensors = stored_tensors(target)
    left: dict[str, str] = {}
    if placed is None:
        computed = [p for p in plans if any(n not in tensors for n in p.reads)]
        left |= {p.name or p.family: _COMPUTED for p in computed if isinstance(target, nn.Module)}
        placed = [placement(p) for p in plans if (p.name or p.family) not in left]
    wanted: list[dict[int, Sheet]] = []
    for place in placed:
        view, reasons = balanced_view(place.plan.apply(lambda n: tensors[n].detach()), place)
        if reasons:
            left[_name(place)] = "; ".join(reasons)
        wanted.append(claims(tensors, place, view))
    readers = _readers(tensors, placed)
    for names, reason in _stuck(_elsewhere(target, placed), placed, wanted, readers):
        for i in names:
            wanted[i] = {}
            left[_name(placed[i])] = reason
    sheets: dict[int, Sheet] = {}
    for mine in wanted:
        sheets = mine | sheets
    moved = tuple(_name(p) for p, mine in zip(placed, wanted, strict=True) if mine)
    return Balanced(sheets, moved, left)


def _name(place: Placement) -> str:
    """The layer's name as its view has it: the plan's where the module is the whole model."""
    return place.plan.name or place.plan.family


def balanced_view(view: AttentionView, placed: Placement) -> tuple[AttentionView, list[str]]:
    """The view in balanced gauge as far as it can be written back, and why the rest stays."""
    reasons: list[str] = []
    raw, written = view, view_tensors(view)
    folds = view.v_bias is not None and view.o_bias is not None
    if folds and view.weighting == "softmax" and view.latent is None:
        view = fold_value_bias(view)
    found = canonical(view)
    view = found.view
    if raw.qk_norm is not None:
        reasons.append("queries and keys are normed, which allows no balancing")
    elif found.qk_kept:
        reasons.append(f"queries and keys of groups {list(found.qk_kept)} are rank-deficient")
    if found.ov_kept:
        reasons.append(f"values of groups {list(found.ov_kept)} are rank-deficient")
    after = view_tensors(view)
    for what, names in _BLOCKS.items():
        mine = [n for n in written if n.split(".")[0] in names]
        changed = [n for n in mine if n not in after or not after[n].equal(written[n])]
        computed = [n for n in changed if not placed.copied(n)]
        if computed:
            reasons.append(
                f"{what} stay as they are, for {computed[0]} is computed from what the layer stores"
            )
            view = replace(view, **{n: getattr(raw, n) for n in names})
    return view, reasons


# ── layers that share tensors ──


def _readers(tensors: Mapping[str, Tensor], placed: Sequence[Placement]) -> dict[int, set[int]]:
    """Which layers (by position) read a stored tensor, by its id."""
    found: dict[int, set[int]] = {}
    for i, place in enumerate(placed):
        for name in place.plan.reads:
            found.setdefault(id(tensors[name]), set()).add(i)
    return found


def _elsewhere(target: Target, placed: Sequence[Placement]) -> dict[int, str]:
    """Tensors that something besides the layers uses, by id, with a name of that use.

    A module that is called from two places is one use under two names.
    """
    known = {name for place in placed for name in place.plan.reads}
    if not isinstance(target, nn.Module):
        return {id(t): name for name, t in target.items() if name not in known}
    uses = (
        (f"{path}.{name}" if path else name, parameter)
        for path, module in target.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    )
    return {id(parameter): name for name, parameter in uses if name not in known}


def _stuck(
    elsewhere: Mapping[int, str],
    placed: Sequence[Placement],
    wanted: Sequence[Mapping[int, Sheet]],
    readers: Mapping[int, set[int]],
) -> list[tuple[set[int], str]]:
    """Sets of layers that must stay together where they are, with the reason."""
    groups = [{i} for i in range(len(placed))]
    reasons: dict[int, str] = {}
    for i, mine in enumerate(wanted):
        for key, sheet in mine.items():
            together = set().union(*(groups[j] for j in readers[key]))
            for j in together:
                groups[j] = together
            if key in elsewhere:
                reasons[i] = f"{sheet.name} is also {elsewhere[key]}, which would change"
            elif not all(_alike(sheet, wanted[j].get(key)) for j in readers[key]):
                reasons[i] = f"{sheet.name} is shared by layers that cannot be balanced together"
    return [(groups[i], reason) for i, reason in reasons.items()]


def _alike(sheet: Sheet, other: Sheet | None) -> bool:
    if other is None or not sheet.claimed.equal(other.claimed):
        return False
    try:
        sheet.agree(other, "")
    except InputError:
        return False
    return True
