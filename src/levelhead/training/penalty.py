"""What a penalty is: a weight, a schedule and a number that can be differentiated.

Two examples. `Penalty("x", quantity, 0.5)()` is half of `quantity()`. `a + b` is a penalty again,
stepped and stored as one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError
from levelhead.training.schedules import Constant, Schedule

__all__ = ["Penalty", "PenaltySum", "Quantity", "checked_weight", "is_number"]


class Quantity(Protocol):
    """A number of a model, and what it keeps between calls."""

    def __call__(self) -> Tensor:
        """The number, a scalar on autograd's tape."""

    def advance(self) -> None:
        """What changes when a training step is done."""

    def parameters(self) -> list[nn.Parameter]:
        """The parameters it is a function of and that can learn."""

    def state(self) -> dict[str, Any]:
        """What it keeps: tensors by name."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned."""

    def close(self) -> None:
        """Leave the model as it was before."""


class Penalty:
    """weight · schedule(steps) · value, to be added to a loss; made by `training.penalties`.

    Args:
        name: what it is called in readings.
        quantity: computes the value.
        weight: any finite number ≥ 0.
        symmetry: generators of `weights.symmetry_group` that leave the value alone.
        schedule: steps done → factor; constant by default.

    Raises InputError for a weight that is negative or not finite.

    >>> from levelhead.training.penalties import l2
    >>> from levelhead.training.schedules import Linear
    >>> penalty = l2(nn.MultiheadAttention(4, 1), weight=0.1, schedule=Linear(2))
    >>> float(penalty()), penalty.factor
    (0.0, 0.0)
    >>> penalty.step()
    >>> penalty.factor, bool(penalty() == 0.05 * penalty.value())
    (0.5, True)
    """

    def __init__(
        self,
        name: str,
        quantity: Quantity,
        weight: float,
        symmetry: Iterable[str] = (),
        schedule: Schedule | None = None,
    ) -> None:
        self.name = name
        self.quantity = quantity
        self.weight = checked_weight(weight)
        self.symmetry = tuple(symmetry)
        self.schedule: Schedule = Constant() if schedule is None else schedule
        self.steps = 0

    @property
    def factor(self) -> float:
        """What the schedule says now."""
        return float(self.schedule(self.steps))

    def __call__(self) -> Tensor:
        """weight · factor · value, a scalar; where that factor is 0 nothing is computed."""
        strength = self.weight * self.factor
        if strength == 0:
            return torch.zeros((), device=self._device())
        return strength * self.value()

    def value(self) -> Tensor:
        """The value without weight and schedule, a scalar on autograd's tape."""
        with torch.autocast(self._device().type, enabled=False):
            return self.quantity()

    def step(self) -> None:
        """One training step is done: the schedule and any moving reference go on."""
        self.steps += 1
        self.quantity.advance()

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the value is a function of and that can learn."""
        return self.quantity.parameters()

    def reweighted(self, weight: float, schedule: Schedule | None = None) -> Penalty:
        """The same penalty with another weight (and schedule), at step 0."""
        other = copy.copy(self)
        other.weight, other.steps = checked_weight(weight), 0
        other.schedule = self.schedule if schedule is None else schedule
        return other

    def close(self) -> None:
        """Remove what the penalty has attached to the model (hooks of `entropy_floor`)."""
        self.quantity.close()

    def state_dict(self) -> dict[str, Any]:
        """Steps done, and what is kept between calls; not the weight and the schedule."""
        return {"steps": self.steps, "quantity": self.quantity.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`. Raises InputError for the state of something else."""
        if set(state) != {"steps", "quantity"}:
            raise InputError(f"a state with {sorted(state)} was given; expected that of a penalty")
        self.quantity.load(state["quantity"])
        self.steps = int(state["steps"])

    def __add__(self, other: Penalty | PenaltySum) -> PenaltySum:
        return PenaltySum((self,)) + other

    def __radd__(self, other: object) -> PenaltySum:
        return PenaltySum((self,)).__radd__(other)

    def __repr__(self) -> str:
        return f"Penalty({self.name}, weight {self.weight:g}, step {self.steps})"

    def _device(self) -> torch.device:
        found = next(iter(self.parameters()), None)
        return torch.device("cpu") if found is None else found.device


class PenaltySum:
    """Several penalties as one; `penalties` are its members. Made by `+` and `sum`.

    >>> from levelhead.training.penalties import coherence, l2
    >>> model = nn.MultiheadAttention(8, 2)
    >>> both = coherence(model) + l2(model)
    >>> both
    coherence + l2
    >>> bool(both() == both.penalties[0]() + both.penalties[1]())
    True
    """

    def __init__(self, penalties: Iterable[Penalty] = ()) -> None:
        self.penalties = tuple(penalties)

    @property
    def name(self) -> str:
        """The members' names."""
        return " + ".join(p.name for p in self.penalties)

    @property
    def symmetry(self) -> tuple[str, ...]:
        """The generators that all members are declared invariant under."""
        first, *others = self.penalties
        return tuple(n for n in first.symmetry if all(n in p.symmetry for p in others))

    def __call__(self) -> Tensor:
        """The sum of the members, each with its weight and schedule."""
        return torch.stack([p() for p in self.penalties]).sum()

    def value(self) -> Tensor:
        """Σ weight · value, without schedules."""
        return torch.stack([p.weight * p.value() for p in self.penalties]).sum()

    def step(self) -> None:
        """`step` of every member."""
        for penalty in self.penalties:
            penalty.step()

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all members, each once."""
        return list({id(t): t for p in self.penalties for t in p.parameters()}.values())

    def close(self) -> None:
        """`close` of every member."""
        for penalty in self.penalties:
            penalty.close()

    def state_dict(self) -> dict[str, Any]:
        """The states of the members, in order."""
        return {"penalties": [p.state_dict() for p in self.penalties]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load all members. Raises InputError for another number of them."""
        given = state.get("penalties")
        if not isinstance(given, list) or len(given) != len(self.penalties):
            raise InputError(f"this is not the state of {len(self.penalties)} penalties")
        for penalty, own in zip(self.penalties, given, strict=True):
            penalty.load_state_dict(own)

    def __add__(self, other: Penalty | PenaltySum) -> PenaltySum:
        if isinstance(other, Penalty):
            other = PenaltySum((other,))
        if not isinstance(other, PenaltySum):
            return NotImplemented
        return PenaltySum((*self.penalties, *other.penalties))

    def __radd__(self, other: object) -> PenaltySum:
        return self if other == 0 else NotImplemented  # what `sum` starts from

    def __repr__(self) -> str:
        return self.name


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a real number that is finite: NumPy's count, booleans do not.

    >>> is_number(0.5), is_number(True), is_number("0.5"), is_number(math.inf)
    (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return math.isfinite(value)


def checked_weight(weight: float) -> float:
    """The weight as a float. Raises InputError unless it is finite and at least 0.

    >>> checked_weight(1)
    1.0
    """
    if not (is_number(weight) and weight >= 0):
        raise InputError(f"weight={weight!r} was given; expected a finite number of at least 0")
    return float(weight)
