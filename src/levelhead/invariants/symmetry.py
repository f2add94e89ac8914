"""Whether the catalogue's declarations hold: acts on a layer and looks what moves.

Two tests for every entry and generator of the layer's own group. The global one draws elements and
compares values. The infinitesimal one differentiates along the group at the identity: for a gauge
of q and k its answer is μ_i = (∂f/∂q_i) q_iᵀ - k_i (∂f/∂k_i)ᵀ, projected on what the layer allows;
it is zero exactly where f is invariant to first order, and one backward pass decides it.

Two examples. σ(B_i) under `qk_gauge`: no value moves by more than 1e-8 of the largest, μ is below
1e-9. The raw head spectrum moves by a tenth: declared invariant, that would be a failure, and so it
would be for a declared variant that never moves.

Everything is computed in float64. μ is relative to ‖∂f/∂w‖‖w‖ over the weights that move; where
that is below a thousandth of f's own scale (f is flat there), to that thousandth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.base.progress import progress
from levelhead.invariants.catalogue import entries
from levelhead.invariants.entry import Invariant, Verdict, square_root
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.symmetry_group import Generator, Moved, SymmetryGroup, symmetry_group

__all__ = ["Check", "Verdicts", "moment", "relative_change", "verify"]

# A declared variant must move by more than this in a draw, and by more than the tolerance.
MOVES = 1e-6
# The infinitesimal test of a declared invariant.
MOMENT = 1e-9
_FLAT = 1e-3


@dataclass(frozen=True)
class Check:
    """One entry under one generator of one layer.

    Args:
        invariant, generator: names.
        declared: what was declared (or assumed); `reason` where it says why.
        change: the largest relative change over the draws; None: not tested.
        moment: relative |μ|; None: the entry or the generator has no gradient test.
        tolerance: that `change` was held against.
        passed: whether the declaration held; True where it says nothing to test.
        found: what the layer showed, in a word: "moved", "still", "zero" (the value is zero, so
            that nothing can be said), or "" if not tested.
    """

    invariant: str
    generator: str
    declared: Verdict
    reason: str
    change: float | None
    moment: float | None
    tolerance: float
    passed: bool
    found: str


@dataclass(frozen=True)
class Verdicts:
    """The truth table of a layer: a `Check` for every entry and generator, in order."""

    layer: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every declaration held."""
        return all(check.passed for check in self.checks)

    @property
    def failures(self) -> tuple[Check, ...]:
        """The declarations that did not hold."""
        return tuple(check for check in self.checks if not check.passed)

    def __getitem__(self, key: tuple[str, str]) -> Check:
        """The check of (invariant, generator). Raises KeyError if there is none."""
        for check in self.checks:
            if (check.invariant, check.generator) == key:
                return check
        raise KeyError(key)

    def __iter__(self) -> Iterator[Check]:
        return iter(self.checks)

    def invariants(self) -> tuple[str, ...]:
        """Names of entries that no generator of this layer moves: what may be called its own."""
        names = dict.fromkeys(check.invariant for check in self.checks)
        told = {c.invariant for c in self.checks if c.declared is not Verdict.INVARIANT}
        return tuple(name for name in names if name not in told)


def verify(
    view: AttentionView,
    invariants: Iterable[str | Invariant] | None = None,
    *,
    draws: int = 2,
    seed: int = 0,
    condition: float = 10.0,
    assume: Mapping[str, str] | None = None,
    covariance: Tensor | None = None,
    show_progress: bool | None = False,
) -> Verdicts:
    """Hold the declarations of `invariants` (all by default) against a layer's own group.

    Fold the norm in front of the layer first (`weights.folding.folded`): unfolded, its gain is one
    more symmetry, under which hardly anything is invariant.

    Args:
        draws: random elements of each generator (one, for the kind "iterative").
        condition: condition number of the matrices among them.
        assume: entry's name → a generator, a family of them or "all" under which it is declared
            invariant, whatever the catalogue says.
        covariance: E[x xᵀ] [d, d] of the layer's input for the kind "data"; random by default.
        show_progress: a bar on stderr over draws and gradients; None: only on a terminal.

    Raises InputError for unknown names, or draws < 1.

    >>> one = torch.eye(6, dtype=torch.float64).reshape(3, 2, 6)
    >>> view = AttentionView(q=one, k=one + one.flip(0), v=one, o=one.mT)
    >>> verify(view, ["qk_spectrum"]).passed
    True
    >>> [c.generator for c in verify(view, ["raw_head_spectrum"],
    ...                              assume={"raw_head_spectrum": "gauge"}).failures]
    ['qk_gauge', 'vo_gauge']
    """
    if draws < 1:
        raise InputError(f"draws={draws} was given; expected at least 1")
    chosen = entries(invariants)
    view = view.map(lambda t: t.detach().double())
    group = symmetry_group(view)
    assumed = _assumed(assume or {}, chosen, group)
    random = torch.Generator().manual_seed(seed)
    root = _random_root(view, random) if covariance is None else square_root(covariance)
    root = root.to(view.q.device)
    there = [entry for entry in chosen if entry.applies(view) is None]
    start = _Values(view, root)
    values = {entry.name: start(entry) for entry in there}
    changes: dict[tuple[str, str], float] = {}
    moments: dict[str, dict[str, float]] = {}
    steps = draws * len(group.generators) + len(there)
    with progress(view.name or "layer", steps, enabled=show_progress) as advance:
        for generator in group.generators:
            for number in range(draws):
                moved = generator.draw(view, random, condition)
                now = _Values(moved.view, _moved_root(moved, root))
                for entry in there:
                    if not generator.moves & entry.reads or (number and entry.kind == "iterative"):
                        continue
                    change = _change(entry, values[entry.name], now(entry), moved)
                    key = entry.name, generator.name
                    changes[key] = max(changes.get(key, 0.0), change)
                advance()
        charts = _Charts(view, group.generators, root)
        for entry in there:
            moments[entry.name] = charts.moment(entry, seed) if entry.gradient else {}
            advance()
    checks = []
    for entry in chosen:
        empty = entry.name in values and not bool((values[entry.name] != 0).any())
        for generator in group.generators:
            key = entry.name, generator.name
            verdict, reason = entry.verdict(view, generator)
            if key in assumed and verdict is not Verdict.NOT_APPLICABLE:
                verdict, reason = Verdict.INVARIANT, "assumed"
            mu = moments.get(entry.name, {}).get(generator.name)
            checks.append(_check(entry, generator, verdict, reason, changes.get(key), mu, empty))
    return Verdicts(view.name, tuple(checks))


def moment(
    entry: Invariant,
    view: AttentionView,
    generators: Sequence[Generator],
    *,
    root: Tensor | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Relative |μ| of an entry along each continuous generator: name → number.

    f is a random combination of the entry's values. All generators are tested in one backward pass.
    """
    return _Charts(view, generators, root).moment(entry, seed)


def relative_change(
    before: Tensor, after: Tensor, span: float | None = None, *, exact: bool = False
) -> float:
    """The largest |after - before| over `span`, or over the largest |before|; inf for NaN.

    Complex values are matched along the last axis, as sets. With `exact` any difference counts as
    at least 1.

    >>> relative_change(torch.tensor([2.0, 4.0]), torch.tensor([2.0, 5.0]))
    0.25
    """
    if before.shape != after.shape:
        return float("inf")
    if before.is_complex():
        after = _matched(before, after)
    difference = (after - before).abs().double()
    if bool(difference.isnan().any()):
        return float("inf")
    largest = float(difference.max())
    if exact:
        return max(1.0, largest) if largest > 0 else 0.0
    scale = span if span is not None else float(before.abs().max())
    return largest / scale if scale > 0 else largest


# ── private ──


def _assumed(
    assume: Mapping[str, str], chosen: Sequence[Invariant], group: SymmetryGroup
) -> set[tuple[str, str]]:
    known = {entry.name for entry in chosen}
    found = set()
    for name, meant in assume.items():
        if name not in known:
            raise InputError(
                f"{name!r} was assumed to be invariant, but is not among the numbers to verify"
            )
        found |= {(name, generator.name) for generator in group.choose(meant)}
    return found


class _Values:
    """Values of entries for one view; what several entries are computed through, once."""

    def __init__(self, view: AttentionView, root: Tensor) -> None:
        self.view, self.root = view, root
        self.shared: dict[Callable[[AttentionView], Any], Any] = {}

    def __call__(self, entry: Invariant) -> Tensor:
        if entry.kind == "data":
            return entry.function(self.view, self.root).detach()
        if entry.through is None:
            return entry.function(self.view).detach()
        if entry.through not in self.shared:
            self.shared[entry.through] = entry.through(self.view)
        return entry.function(self.shared[entry.through]).detach()


@dataclass(frozen=True, eq=False)
class _Chart:
    """A layer at the identity of some generators: `moved` depends on `starts`.

    `tensors` are those of the moved layer by field. There they are the layer's own, and a slope in
    them is a slope in the layer's: going on to the layer itself would cost as much again.
    """

    near: tuple[Generator, ...]
    starts: tuple[Tensor, ...]
    tensors: Mapping[str, list[Tensor]]
    moved: Moved[AttentionView]


class _Charts:
    """Charts of one layer; entries that the same generators move are differentiated in one."""

    def __init__(
        self, view: AttentionView, generators: Sequence[Generator], root: Tensor | None
    ) -> None:
        self.view, self.root = view, root
        self.generators = [g for g in generators if g.near is not None]
        self.made: dict[tuple[str, ...], _Chart] = {}

    def moment(self, entry: Invariant, seed: int) -> dict[str, float]:
        """See `moment`."""
        chart = self._of(entry)
        if not chart.near:
            return {}
        value = self._value(entry, chart.moved)
        random = torch.Generator().manual_seed(seed)
        weights = torch.randn(value.shape, generator=random, dtype=torch.float64)
        f = (weights.to(value.device) * value).sum()
        if not f.requires_grad:
            return {g.name: 0.0 for g in chart.near}
        flat = [t for found in chart.tensors.values() for t in found]
        # The chart's own part of the graph serves the next entry.
        slopes = torch.autograd.grad(
            f, [*chart.starts, *flat], allow_unused=True, retain_graph=True
        )
        along, at = slopes[: len(chart.starts)], iter(slopes[len(chart.starts) :])
        sizes = {
            name: sum(
                float(slope.norm() * t.detach().norm())
                for t in found
                if (slope := next(at)) is not None
            )
            for name, found in chart.tensors.items()
        }
        scale = entry.span if entry.span is not None else float(value.detach().abs().max())
        floor = _FLAT * scale * float(weights.norm())
        out = {}
        for generator, slope in zip(chart.near, along, strict=True):
            size = max(floor, sum(sizes.get(name, 0.0) for name in generator.moves))
            out[generator.name] = 0.0 if slope is None or size == 0 else float(slope.norm()) / size
        return out

    def _of(self, entry: Invariant) -> _Chart:
        near = tuple(g for g in self.generators if g.moves & entry.reads)
        names = tuple(g.name for g in near)
        if names not in self.made:
            leaf = self.view.map(lambda t: t.detach().double().requires_grad_())
            zeros = partial(torch.zeros, dtype=torch.float64, device=self.view.q.device)
            starts = tuple(zeros(g.dimension, requires_grad=True) for g in near)
            moved = Moved(leaf)
            for generator, start in zip(near, starts, strict=True):
                assert generator.near is not None
                moved = moved.then(generator.near(moved.view, start))
            self.made[names] = _Chart(near, starts, _tensors(moved.view), moved)
        return self.made[names]

    def _value(self, entry: Invariant, moved: Moved[AttentionView]) -> Tensor:
        if entry.kind == "data":
            function = entry.smooth or entry.function
            return function(moved.view, _moved_root(moved, self.root))
        if entry.smooth is not None:
            return entry.smooth(moved.view)
        return entry.function(moved.view if entry.through is None else entry.through(moved.view))


def _change(entry: Invariant, before: Tensor, after: Tensor, moved: Moved[AttentionView]) -> float:
    orders = {"head": moved.heads, "group": moved.groups}
    for axis, what in enumerate(entry.per):
        if (order := orders[what]) is not None:
            before = before.index_select(axis, torch.tensor(order, device=before.device))
    return relative_change(before, after, entry.span, exact=entry.kind == "integer")


def _moved_root(moved: Moved[AttentionView], root: Tensor | None) -> Tensor:
    """A L: the root of the moved inputs' covariance."""
    if root is None:
        root = torch.eye(moved.view.d, dtype=torch.float64, device=moved.view.q.device)
    if moved.inputs is not None:
        root = moved.inputs.to(root) @ root
    return root


def _random_root(view: AttentionView, random: torch.Generator) -> Tensor:
    """A root of a random covariance that tokens behind this layer's norm can have."""
    root = torch.randn(view.d, view.d, generator=random, dtype=torch.float64)
    norm = view.input_norm
    if norm.kind == "layer":
        root = root - root.mean(0)
        if norm.gain is not None:
            root = norm.gain.double().cpu()[:, None] * root
    return root / math.sqrt(view.d)


def _check(
    entry: Invariant,
    generator: Generator,
    verdict: Verdict,
    reason: str,
    change: float | None,
    mu: float | None,
    empty: bool,
) -> Check:
    found, passed = "", True
    if change is not None:
        found = "zero" if empty else "moved" if change > entry.tolerance else "still"
    if verdict is Verdict.INVARIANT:
        passed = (change is None or change <= entry.tolerance) and (mu is None or mu <= MOMENT)
    elif verdict is Verdict.VARIANT:
        passed = change is not None and (empty or change > max(MOVES, entry.tolerance))
    return Check(
        entry.name, generator.name, verdict, reason, change, mu, entry.tolerance, passed, found
    )


def _tensors(view: AttentionView) -> dict[str, list[Tensor]]:
    """The tensors of each field of a view, as far as they can be differentiated in."""
    found = {}
    for name, value in vars(view).items():
        inside = [value] if isinstance(value, Tensor) else getattr(value, "__dict__", {}).values()
        tensors = [t for t in inside if isinstance(t, Tensor) and t.requires_grad]
        if tensors:
            found[name] = tensors
    return found


def _matched(before: Tensor, after: Tensor) -> Tensor:
    """`after` with the last axis reordered to lie closest to `before`."""
    rows = before.reshape(-1, before.shape[-1]), after.reshape(-1, after.shape[-1])
    out = rows[1].clone()
    for i, (one, two) in enumerate(zip(*rows, strict=True)):
        cost = (one[:, None] - two[None, :]).abs()
        _, order = linear_sum_assignment(cost.cpu().numpy())
        out[i] = two[torch.as_tensor(order, device=two.device)]
    return out.reshape(after.shape)
