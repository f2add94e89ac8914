"""From an AttentionView back into the stored tensors it was cut from.

A plan only cuts and reshapes, so where an entry of a view lies is found by letting the plan cut
numbered tensors: `placement(plan)` gives each stored entry a number of its own, applies the plan,
and reads off which number stands where. A second numbering, shuffled, tells copies from entries
that were computed (products of low-rank projections, the identity in place of a missing output
projection, a gain with one added): those cannot be written.

Two examples. For `nn.MultiheadAttention` the entries of q, k and v lie in in_proj_weight, those of
o, transposed, in out_proj.weight. In a layer whose keys are its queries both fields claim the same
stored entries, and must agree on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.plan import LayerPlan

__all__ = ["Placement", "placement", "write_view", "write_views"]

Target = nn.Module | Mapping[str, Tensor]

_BIASES = ("q_bias", "k_bias", "v_bias", "o_bias")
_OF_NO_ACCOUNT = ("name", "family", "origins")
# Numbers start above the constants that a plan may put in by itself.
_FIRST = 3
# How far two claims on one stored entry may lie apart: rounding of what wrote them.
_AGREE = 1e3


@dataclass(frozen=True, eq=False)
class _Piece:
    """Entries of a field that lie in stored tensor `name`.

    `index` are their flat positions there, `at` those in the field (None: the whole field).
    """

    name: str
    at: Tensor | None
    index: Tensor


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the entries of a plan's view lie in the tensors that the plan reads.

    `pieces`: for each tensor of the view ("q", "o_bias", "position.key", …) its parts by stored
    tensor; `computed`: flat positions of entries that are no plain copy of a stored one.
    """

    plan: LayerPlan
    pieces: Mapping[str, tuple[_Piece, ...]]
    computed: Mapping[str, Tensor]

    def copied(self, name: str) -> bool:
        """Whether every entry of this tensor of the view is a copy of a stored one."""
        return name in self.pieces and self.computed[name].numel() == 0

    def stored(self, name: str) -> tuple[str, ...]:
        """The stored tensors in which a tensor of the view lies."""
        return tuple(piece.name for piece in self.pieces.get(name, ()))


def placement(plan: LayerPlan) -> Placement:
    """Where each entry of the plan's view is stored; costs two readings of tensors of that size.

    >>> from levelhead.weights.layouts import match
    >>> [plan] = match(nn.MultiheadAttention(4, 2)).plans
    >>> found = placement(plan)
    >>> found.copied("q"), found.stored("o")
    (True, ('out_proj.weight',))
    """
    counts = {name: math.prod(plan.shapes[name]) for name in plan.reads}
    total = sum(counts.values())
    generator = torch.Generator().manual_seed(0)
    second = torch.randperm(total, generator=generator)
    numberings = torch.arange(total), second
    one, other = (view_tensors(plan.apply(_numbered(plan, counts, n))) for n in numberings)
    pieces: dict[str, tuple[_Piece, ...]] = {}
    computed: dict[str, Tensor] = {}
    for name, seen in one.items():
        flat, again = seen.reshape(-1) - _FIRST, other[name].reshape(-1) - _FIRST
        inside = (flat >= 0) & (flat < total) & (flat == flat.round())
        number = torch.where(inside, flat, 0).long()
        copy = inside & (second[number] == again)
        computed[name] = (~copy).nonzero()[:, 0]
        pieces[name] = _pieces(number, copy, counts)
    return Placement(plan, pieces, computed)


def _numbered(plan: LayerPlan, counts: Mapping[str, int], numbers: Tensor) -> Any:
    """Stands for the tensors of a layer: each holds its share of `numbers`."""
    parts = torch.split(numbers.double() + _FIRST, list(counts.values()))
    held = {n: p.reshape(plan.shapes[n]) for n, p in zip(counts, parts, strict=True)}
    return held.__getitem__


def _pieces(number: Tensor, copy: Tensor, counts: Mapping[str, int]) -> tuple[_Piece, ...]:
    found: list[_Piece] = []
    start = 0
    whole = bool(copy.all())
    for name, count in counts.items():
        here = copy & (number >= start) & (number < start + count)
        at = here.nonzero()[:, 0]
        if at.numel():
            everything = whole and at.numel() == number.numel()
            found.append(_Piece(name, None if everything else at, number[at] - start))
        start += count
    return tuple(found)


def view_tensors(view: AttentionView) -> dict[str, Tensor]:
    """All tensors of a view by name; those of its structure as "position.key" and the like."""
    return {n: v for n, v in _flat(view).items() if isinstance(v, Tensor)}


def _flat(view: AttentionView) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in fields(view):
        value = getattr(view, item.name)
        if item.name in _OF_NO_ACCOUNT:
            continue
        if is_dataclass(value):
            found[f"{item.name} is a"] = type(value).__name__
            found |= {f"{item.name}.{n}": v for n, v in vars(value).items()}
        else:
            found[item.name] = value
    return found


# ── writing ──


def write_view(
    target: Target, plan: LayerPlan, view: AttentionView, placed: Placement | None = None
) -> tuple[str, ...]:
    """Write a view's tensors into the stored tensors of its layer, in place; which were written.

    Only tensors of which something differs are written, each once, in their own dtype (a
    half-precision tensor rounds). A bias that the view dropped becomes zero. What shares a tensor
    with the layer changes along. If anything is refused, nothing has been written.

    Args:
        target: the module or the mapping of names to tensors that `plan` was matched on.
        plan: the layer, from `layouts.match(target).plans`.
        view: its new weights, of the shapes and kind of `plan.apply`'s.
        placed: `placement(plan)`, if the caller keeps it.

    Raises InputError where the view changes what cannot be written: entries that are computed from
    stored ones, facts that are no tensors, a bias for which the layer has no place, or one stored
    entry in two ways.

    >>> from dataclasses import replace
    >>> from levelhead.weights.layouts import match
    >>> model = nn.MultiheadAttention(4, 2)
    >>> [plan] = match(model).plans
    >>> view = plan.apply(dict(model.named_parameters()).__getitem__)
    >>> write_view(model, plan, replace(view, q=torch.zeros(2, 2, 4)))
    ('in_proj_weight',)
    >>> bool(model.in_proj_weight[:4].any()), bool(model.in_proj_weight[4:].any())
    (False, True)
    """
    return write_views(target, ((placed or placement(plan), view),))


def write_views(
    target: Target, layers: Sequence[tuple[Placement, AttentionView]]
) -> tuple[str, ...]:
    """`write_view` for several layers at once; layers that share a tensor must agree on it.

    Raises InputError as `write_view` does, before anything is written.
    """
    tensors = stored_tensors(target)
    sheets: dict[int, Sheet] = {}
    for placed, view in layers:
        for key, sheet in claims(tensors, placed, view).items():
            if key in sheets:
                sheets[key].agree(sheet, f"{placed.plan.name} and another layer")
                sheets[key].merge(sheet)
            else:
                sheets[key] = sheet
    for placed, view in layers:
        _confirm(sheets, tensors, placed, view_tensors(view))
    commit(sheets.values())
    return tuple(sheet.name for sheet in sheets.values())


def stored_tensors(target: Target) -> dict[str, Tensor]:
    """The tensors of a module or mapping by every name they have."""
    if isinstance(target, nn.Module):
        found: dict[str, Tensor] = dict(target.named_buffers(remove_duplicate=False))
        return found | dict(target.named_parameters(remove_duplicate=False))
    return dict(target)


@dataclass(eq=False)
class Sheet:
    """New values of one stored tensor, flat and in its dtype, and which of them are `claimed`."""

    name: str
    tensor: Tensor
    values: Tensor
    claimed: Tensor

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Sheet:
        """A sheet with the values that are stored, none of them claimed."""
        flat = tensor.detach().reshape(-1).clone()
        return cls(name, tensor, flat, torch.zeros_like(flat, dtype=torch.bool))

    def claim(self, index: Tensor, values: Tensor, who: str) -> None:
        """Set entries; raises InputError where they were claimed with other values."""
        values = values.to(self.values)
        before = self.claimed[index]
        apart = torch.where(before, (self.values[index] - values).abs(), 0)
        self._check(apart, values, who)
        self.values[index] = torch.where(before, self.values[index], values)
        self.claimed[index] = True

    def agree(self, other: Sheet, who: str) -> None:
        """Raise InputError unless both set the same entries to the same values."""
        both = self.claimed & other.claimed
        self._check(torch.where(both, (self.values - other.values).abs(), 0), other.values, who)

    def merge(self, other: Sheet) -> None:
        """Take over what the other claims alone."""
        new = other.claimed & ~self.claimed
        self.values = torch.where(new, other.values, self.values)
        self.claimed |= other.claimed

    def _check(self, apart: Tensor, values: Tensor, who: str) -> None:
        limit = _AGREE * torch.finfo(values.dtype).eps * values.abs().max()
        if bool((apart > limit).any()):
            raise InputError(
                f"{who} share entries of {self.name}, and the views given want different values "
                "there: change them together"
            )


def claims(
    tensors: Mapping[str, Tensor], placed: Placement, view: AttentionView
) -> dict[int, Sheet]:
    """What writing `view` would change, by the stored tensor's id; changes nothing.

    Raises InputError as `write_view` does.
    """
    plan = placed.plan
    with torch.no_grad():
        current = plan.apply(_getter(tensors, plan))
        _check_facts(plan, current, view)
        old, new = view_tensors(current), view_tensors(view)
        for name in new.keys() - old.keys():
            raise InputError(
                f"{plan.name}: the view has {name}, for which the layer has no place: "
                "fold it into what the layer stores"
            )
        sheets: dict[int, Sheet] = {}
        dropped: list[str] = []
        same: list[str] = []
        for name, before in old.items():
            if name not in new:
                if name not in _BIASES:
                    raise InputError(f"{plan.name}: the view lost {name}; expected a tensor")
                dropped.append(name)
                continue
            value = new[name].detach().to(before)
            if value.shape != before.shape:
                raise InputError(
                    f"{plan.name}: {name} {list(value.shape)} was given; the layer's is "
                    f"{list(before.shape)}"
                )
            if torch.equal(value, before):
                same.append(name)
                continue
            _refuse_computed(placed, name, value, before)
            _claim(sheets, tensors, placed, name, value)
        _confirm(sheets, tensors, placed, {name: old[name] for name in same})
        for name in dropped:
            _zero(sheets, tensors, placed, name, old[name])
    return sheets


def _getter(tensors: Mapping[str, Tensor], plan: LayerPlan) -> Callable[[str], Tensor]:
    def get(name: str) -> Tensor:
        if name not in tensors:
            raise InputError(f"{plan.name}: the target has no {name}, which the plan reads")
        return tensors[name].detach()

    return get


def _check_facts(plan: LayerPlan, current: AttentionView, view: AttentionView) -> None:
    """Whatever is no tensor stays: code, not weights, would have to change."""
    theirs, ours = _flat(view), _flat(current)
    for name in (*ours, *(theirs.keys() - ours.keys())):
        given, value = theirs.get(name), ours.get(name)
        if isinstance(given, Tensor) or isinstance(value, Tensor):
            continue
        if given != value:
            raise InputError(
                f"{plan.name}: {name.removesuffix(' is a')} {given!r} was given, but the layer's "
                f"is {value!r}: only tensors can be written back"
            )


def _refuse_computed(placed: Placement, name: str, value: Tensor, before: Tensor) -> None:
    at = placed.computed[name].to(value.device)
    if at.numel() and not torch.equal(value.reshape(-1)[at], before.reshape(-1)[at]):
        raise InputError(
            f"{placed.plan.name}: {at.numel()} entries of {name} are computed from what the layer "
            "stores, not copies of it: a changed one cannot be written back"
        )


def _claim(
    sheets: dict[int, Sheet],
    tensors: Mapping[str, Tensor],
    placed: Placement,
    name: str,
    value: Tensor,
) -> None:
    for piece in placed.pieces[name]:
        tensor = tensors[piece.name]
        if id(tensor) not in sheets:
            sheets[id(tensor)] = Sheet.of(piece.name, tensor)
        who = f"{placed.plan.name}: {name} and another part of the layer"
        sheets[id(tensor)].claim(piece.index.to(tensor.device), _entries(value, piece), who)


def _confirm(
    sheets: Mapping[int, Sheet],
    tensors: Mapping[str, Tensor],
    placed: Placement,
    values: Mapping[str, Tensor],
) -> None:
    """An entry that one field changed and another kept is a contradiction."""
    for name, value in values.items():
        for piece in placed.pieces[name]:
            tensor = tensors[piece.name]
            if (sheet := sheets.get(id(tensor))) is None:
                continue
            index = piece.index.to(tensor.device)
            known = sheet.claimed[index]
            if bool(known.any()):
                entries = _entries(value.detach().to(sheet.values), piece)
                who = f"{placed.plan.name}: {name} and another part or layer"
                sheet.claim(index[known], entries[known], who)


def _entries(value: Tensor, piece: _Piece) -> Tensor:
    flat = value.reshape(-1)
    return flat if piece.at is None else flat[piece.at.to(flat.device)]


def _zero(
    sheets: dict[int, Sheet],
    tensors: Mapping[str, Tensor],
    placed: Placement,
    name: str,
    before: Tensor,
) -> None:
    """A dropped bias becomes zero, unless another field keeps the same entries."""
    if not bool(before.any()):
        return
    _refuse_computed(placed, name, torch.zeros_like(before), before)
    for piece in placed.pieces[name]:
        tensor = tensors[piece.name]
        if id(tensor) not in sheets:
            sheets[id(tensor)] = Sheet.of(piece.name, tensor)
        sheet = sheets[id(tensor)]
        index = piece.index.to(tensor.device)
        index = index[~sheet.claimed[index]]
        sheet.values[index] = 0
        sheet.claimed[index] = True


def commit(sheets: Iterable[Sheet]) -> None:
    """Write the values of sheets into their tensors."""
    with torch.no_grad():
        for sheet in sheets:
            sheet.tensor.copy_(sheet.values.view(sheet.tensor.shape))
