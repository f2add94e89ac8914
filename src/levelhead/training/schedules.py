"""Schedules: how strongly a penalty counts as training goes on, from its step to a factor.

A schedule is any callable from the number of steps done (0 at the first) to a finite factor. Two
examples. `Linear(100)` grows from 0 to 1 within the first hundred steps and stays there.
`Every(10)` is 10 at steps 0, 10, 20, … and 0 in between: the same strength on average at a tenth of
the cost, since a penalty with the factor 0 is not computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from levelhead.base.errors import InputError

__all__ = ["Constant", "Cosine", "Every", "Linear", "Schedule"]

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """The same factor at every step.

    >>> Constant()(7)
    1.0
    """

    factor: float = 1.0

    def __call__(self, step: int) -> float:
        """The factor."""
        return self.factor


@dataclass(frozen=True)
class Linear:
    """From `start` at step 0 to `end` at step `steps`, in a straight line, and constant afterwards.

    Raises InputError for `steps` < 1.

    >>> [Linear(4)(step) for step in (0, 1, 4, 9)]
    [0.0, 0.25, 1.0, 1.0]
    """

    steps: int
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        _positive(self.steps)

    def __call__(self, step: int) -> float:
        """The factor at `step`."""
        share = min(max(step / self.steps, 0.0), 1.0)
        return self.start + (self.end - self.start) * share


@dataclass(frozen=True)
class Cosine:
    """From `start` at step 0 to `end` at step `steps` along half a cosine, constant afterwards.

    Raises InputError for `steps` < 1.

    >>> [round(Cosine(4)(step), 3) for step in (0, 2, 4, 9)]
    [1.0, 0.5, 0.0, 0.0]
    """

    steps: int
    start: float = 1.0
    end: float = 0.0

    def __post_init__(self) -> None:
        _positive(self.steps)

    def __call__(self, step: int) -> float:
        """The factor at `step`."""
        share = min(max(step / self.steps, 0.0), 1.0)
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class Every:
    """`steps` times the factor of `schedule` at every `steps`-th step, 0 at the others.

    Raises InputError for `steps` < 1.

    >>> [Every(3)(step) for step in range(5)]
    [3.0, 0.0, 0.0, 3.0, 0.0]
    """

    steps: int
    schedule: Schedule = Constant()

    def __post_init__(self) -> None:
        _positive(self.steps)

    def __call__(self, step: int) -> float:
        """The factor at `step`."""
        return 0.0 if step % self.steps else self.steps * self.schedule(step)


def _positive(steps: int) -> None:
    if steps < 1:
        raise InputError(f"steps={steps} was given; expected a number of steps of at least 1")
