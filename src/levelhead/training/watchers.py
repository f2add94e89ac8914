"""What is read of a model at a sampled step, as Readings; nothing here changes anything.

Axes as in `attention_view`; h heads. Functions take what there is at that moment (a view, weights
with gradients, the statistics of maps, losses) and give Readings with their place (`where` has
"layer", "head", and "other" or "index" where a number has a second axis) and step.

Two examples. `qk_effective_rank` of a layer with four heads is four Readings, heads 0 to 3.
`gradient_norm` is one Reading for the whole model, without a place, and one for each layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError
from levelhead.base.records import Reading
from levelhead.invariants.catalogue import Invariant, entries
from levelhead.invariants.spectral import THROUGH
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.folding import folded

__all__ = [
    "DEFAULT_INVARIANTS",
    "MAP_NAMES",
    "chosen_invariants",
    "entry_readings",
    "folded_view",
    "frobenius",
    "map_readings",
    "norm_readings",
    "roughness",
    "trainable",
    "weight_readings",
]

# Cheap ones that alarms and figures are built on: ranks, sizes, and how alike the heads are.
DEFAULT_INVARIANTS = (
    "qk_effective_rank",
    "ov_effective_rank",
    "qk_spectral_norm",
    "ov_frobenius_norm",
    "largest_logit_gain",
    "qk_coherence",
    "ov_coherence",
    "qk_effective_heads",
    "ov_effective_heads",
)

# Statistics of maps (fields of `MapStatistics`) → name and unit of their Readings.
MAP_NAMES: Mapping[str, tuple[str, str]] = {
    "entropy": ("attention_entropy", "nat"),
    "entropy_share": ("attention_entropy_share", "1"),
    "entropy_min": ("attention_entropy_min", "1"),
    "largest_logit": ("largest_logit", "1"),
    "top_mass": ("top_mass", "1"),
    "nuclear_norm": ("map_nuclear_norm", "1"),
    "rank": ("map_rank", "1"),
    "effective_rank": ("map_effective_rank", "1"),
    "residual": ("map_residual", "1"),
}

# The catalogue's bound on logits behind a norm is not the largest logit that was seen.
_RENAMED = {"largest_logit": "largest_logit_bound"}


# ── weights ──


def chosen_invariants(names: Iterable[str | Invariant] | None) -> tuple[Invariant, ...]:
    """The entries that are read at each sampled step; None: the default ones.

    Raises InputError for an unknown name, and for entries that need data or a fit.

    >>> [entry.name for entry in chosen_invariants(["qk_rank"])]
    ['qk_rank']
    """
    if isinstance(names, str):
        raise InputError(f"invariants={names!r} was given; expected a sequence of names")
    found = entries(DEFAULT_INVARIANTS if names is None else names)
    for entry in found:
        if entry.kind == "data":
            raise InputError(
                f"{entry.name} needs the covariance of a layer's input, which a watcher does not "
                "keep: inspect a checkpoint with data instead"
            )
        if entry.kind == "iterative":
            raise InputError(
                f"{entry.name} is a fit, which would hold up training: ask for snapshots, which "
                "are analysed by a process of their own"
            )
    return found


def folded_view(view: AttentionView) -> AttentionView:
    """The layer in float64 with the norm in front and the void biases folded, as inspect reads it.

    So invariants are those of the function: a gain in the norm counts, and behind a LayerNorm what
    is constant over the channels does not. A layer that cannot be folded is taken as it is.

    >>> from levelhead.weights.structure import InputNorm
    >>> one = torch.ones(1, 1, 2)
    >>> norm = InputNorm("rms", torch.tensor([2.0, 3.0]))
    >>> folded_view(AttentionView(q=one, k=one, v=one, o=one.mT, input_norm=norm)).q.tolist()
    [[[2.0, 3.0]]]
    """
    wide = view.map(lambda t: t.detach().double())
    try:
        return folded(wide)
    except InputError:  # a bias between low-rank norms
        return wide


def weight_readings(
    view: AttentionView, chosen: Sequence[Invariant], step: int | None
) -> list[Reading]:
    """The chosen entries of one layer as given; those that do not exist for it are left out.

    The work that entries share (spectra, Gram matrices) is done once. Where weights are not finite
    every number is nan. Complex numbers are given by their modulus.

    >>> one = torch.eye(2)[:, None, :]
    >>> view = AttentionView(q=one, k=2 * one, v=one, o=one.mT)
    >>> [(r.where["head"], r.value) for r in
    ...  weight_readings(view, chosen_invariants(["qk_spectral_norm"]), 1)]
    [(0, 2.0), (1, 2.0)]
    """
    finite = all(bool(t.isfinite().all()) for t in (view.q, view.k, view.v, view.o))
    shared = _Remembering(**{f.name: getattr(view, f.name) for f in fields(view)})
    made: dict[Any, Any] = {THROUGH["qk"]: shared.qk, THROUGH["ov"]: shared.ov}

    def given(through: Callable[[AttentionView], Any]) -> Any:
        if through not in made:
            made[through] = through(shared)
        return made[through]

    found: list[Reading] = []
    with torch.no_grad():
        for entry in chosen:
            if entry.applies(view) is not None:
                continue
            place: dict[str, str | int] = {"layer": view.name}
            if finite:
                value = (
                    entry(shared) if entry.through is None else entry.function(given(entry.through))
                )
                found += entry_readings(entry, value, place, step)
            elif entry.per == ("head",):
                nan = torch.full((view.heads,), math.nan)
                found += entry_readings(entry, nan, place, step)
            else:
                found += entry_readings(entry, torch.tensor(math.nan), place, step)
    return found


def entry_readings(
    entry: Invariant,
    value: Tensor,
    place: Mapping[str, str | int],
    step: int | None,
    source: str = "weights",
) -> list[Reading]:
    """One Reading for each number of an entry's value: axes are `entry.per`, then "index"."""
    value = value.abs() if value.is_complex() else value
    axes = [*entry.per[: value.ndim]]
    named = ["other" if axis in axes[:i] else axis for i, axis in enumerate(axes)]
    named += ["index", "index_2"][: value.ndim - len(named)]
    name = _RENAMED.get(entry.name, entry.name)
    numbers = value.double().flatten().tolist()
    return [
        Reading(
            name,
            number,
            entry.unit,
            {**place, **dict(zip(named, _unravel(i, value.shape), strict=True))},
            step,
            source,
        )
        for i, number in enumerate(numbers)
    ]


def _unravel(position: int, shape: Sequence[int]) -> list[int]:
    found = []
    for size in reversed(shape):
        position, index = divmod(position, size)
        found.append(index)
    return found[::-1]


class _RememberedStack(LowRankStack):
    """A stack that computes its singular values and its head Gram matrix once."""

    def singular_values(self, *, dtype: torch.dtype = torch.float64) -> Tensor:
        return self._once("singular_values", dtype)

    def head_gram(self, *, dtype: torch.dtype = torch.float64) -> Tensor:
        return self._once("head_gram", dtype)

    def _core(self, dtype: torch.dtype) -> Tensor:
        return self._once("_core", dtype, keyword=False)

    def _once(self, name: str, dtype: torch.dtype, keyword: bool = True) -> Tensor:
        known: dict[Any, Tensor] = vars(self).setdefault("_known", {})
        if (name, dtype) not in known:
            plain = getattr(super(), name)
            known[name, dtype] = plain(dtype=dtype) if keyword else plain(dtype)
        return known[name, dtype]


class _Remembering(AttentionView):
    """A view whose `qk` and `ov` are made once, and remember."""

    @property
    def qk(self) -> LowRankStack:
        return self._once("qk")

    @property
    def ov(self) -> LowRankStack:
        return self._once("ov")

    def _once(self, name: str) -> LowRankStack:
        known: dict[str, LowRankStack] = vars(self).setdefault("_known", {})
        if name not in known:
            stack: LowRankStack = getattr(super(), name)
            known[name] = _RememberedStack(
                stack.left, stack.right, stack.group, left_group=stack.left_group
            )
        return known[name]


# ── norms ──


def frobenius(tensors: Sequence[Tensor]) -> Tensor:
    """√Σ ‖T‖² over all entries of all tensors: a float64 scalar, 0 for none.

    Norms of single tensors are taken in float32 at least, sparse ones by their values.

    >>> float(frobenius([torch.tensor([3.0]), torch.tensor([[4.0]])]))
    5.0
    """
    norms = _norms(tensors)
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    device = norms[0].device
    joint = torch.stack([norm.to(device, torch.float64) for norm in norms])
    return torch.as_tensor(torch.linalg.vector_norm(joint))


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """‖T‖ of each tensor."""
    dense = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    found: list[Tensor] = []
    # One call for all tensors of a dtype and device.
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(dense):
        groups.setdefault((tensor.dtype, tensor.device), []).append(i)
    by_place: dict[int, Tensor] = {}
    for (dtype, _), places in groups.items():
        wide = dtype if dtype.is_complex or dtype == torch.float64 else torch.float32
        norms = torch._foreach_norm([dense[i] for i in places], 2, dtype=wide)
        by_place |= dict(zip(places, norms, strict=True))
    found = [by_place[i].abs() for i in range(len(dense))]
    return found


def norm_readings(
    name: str,
    tensors: Mapping[str, Tensor],
    layers: Mapping[str, Iterable[str]],
    step: int | None,
    *,
    factor: float = 1.0,
    source: str = "training",
) -> list[Reading]:
    """`name` for all tensors together (no place) and for those of each layer (names of tensors).

    Args:
        tensors: gradients, updates or weights by parameter name; parameters that have none are
            not among them, and count as zero.
        layers: layer → the names of its parameters: its projections with their biases, and the
            gain and bias of the norm in front where the layer is read with one.
        factor: what every norm is multiplied by (the inverse scale of scaled gradients).

    >>> [(r.where, r.value) for r in norm_readings(
    ...     "gradient_norm", {"a": torch.ones(4), "b": torch.zeros(2)}, {"attn": ["b"]}, 1)]
    [({}, 2.0), ({'layer': 'attn'}, 0.0)]
    """
    single = dict(zip(tensors, _norms(list(tensors.values())), strict=True))
    found: list[Tensor] = [frobenius(list(single.values()))]
    for names in layers.values():
        found.append(frobenius([single[n] for n in dict.fromkeys(names) if n in single]))
    device = found[0].device
    values = torch.stack([f.to(device) for f in found]).mul(factor).tolist()
    places: list[dict[str, str | int]] = [{}]
    places += [{"layer": layer} for layer in layers]
    return [
        Reading(name, value, "1", place, step, source)
        for value, place in zip(values, places, strict=True)
    ]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model that training moves, each once, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


# ── maps and losses ──


def map_readings(
    layer: str, statistics: Any, step: int | None, source: str = "maps"
) -> list[Reading]:
    """Statistics of the attention maps of one layer, each [h], as one Reading a head."""
    parts = [getattr(statistics, part).detach().double() for part in MAP_NAMES]
    table = torch.stack(parts).tolist()
    return [
        Reading(name, value, unit, {"layer": layer, "head": head}, step, source)
        for (name, unit), values in zip(MAP_NAMES.values(), table, strict=True)
        for head, value in enumerate(values)
    ]


def roughness(losses: Sequence[float]) -> float:
    """mean |L_{t+1} - 2 L_t + L_{t-1}| / mean |L_t| over consecutive losses; nan for fewer than 3.

    0 for a straight course; a loss that alternates between a - b and a + b has 4 b/a.

    >>> roughness([1.0, 2.0, 3.0]), roughness([3.0, 1.0, 3.0, 1.0])
    (0.0, 2.0)
    """
    if len(losses) < 3:
        return math.nan
    bends = [
        abs(after - 2 * here + before)
        for before, here, after in zip(losses, losses[1:], losses[2:], strict=False)
    ]
    size = sum(map(abs, losses)) / len(losses)
    return sum(bends) / len(bends) / size if size > 0 else 0.0
