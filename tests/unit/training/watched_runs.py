"""Readings as a watched run leaves them, made from formulas: healthy, or with one thing wrong.

`batches(...)` gives the Readings of one sampled step after the other; `change(step, values)` may
alter the numbers of a step, a mapping (name, layer, head) → value, before they become Readings.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from levelhead.base.records import Reading

EVERY = 20
Values = dict[tuple[str, str | None, int | None], float]
Change = Callable[[int, Values], None]


def falling(step: int, rng: random.Random) -> float:
    """A loss that comes down from 2.5 to 0.5, with the noise of batches."""
    return 0.5 + 2.0 * math.exp(-step / 300) + rng.gauss(0, 0.02)


def unchanged(step: int, values: Values) -> None:
    """A healthy run."""


def batches(
    change: Change = unchanged,
    *,
    steps: int = 2000,
    every: int = EVERY,
    layers: int = 2,
    heads: int = 3,
    loss: Callable[[int, random.Random], float] = falling,
    seed: int = 0,
) -> Iterator[list[Reading]]:
    """Lists of Readings, one for each sampled step: losses since the last one, then the rest."""
    rng = random.Random(seed)
    losses: list[Reading] = []
    for step in range(1, steps + 1):
        losses.append(Reading("loss", loss(step, rng), "1", {}, step))
        if step % every:
            continue
        values: Values = {
            ("gradient_norm", None, None): 1 + rng.random() / 10,
            ("largest_hessian_eigenvalue", None, None): 20 * (1 + rng.gauss(0, 0.1)),
        }
        for number in range(layers):
            layer = f"layers.{number}"
            values["qk_coherence", layer, None] = 0.05 + 0.005 * rng.random()
            values["ov_coherence", layer, None] = 0.03 + 0.005 * rng.random()
            for head in range(heads):
                values["attention_entropy_share", layer, head] = 0.6 + 0.02 * rng.random()
                values["largest_logit", layer, head] = 8 + rng.random()
                values["map_residual", layer, head] = 0.5 + 0.02 * rng.random()
                values["ov_frobenius_norm", layer, head] = 3 + 0.1 * rng.random()
        change(step, values)
        yield losses + [_reading(key, value, step) for key, value in values.items()]
        losses = []


def _reading(key: tuple[str, str | None, int | None], value: float, step: int) -> Reading:
    name, layer, head = key
    where: dict[str, str | int] = {}
    if layer is not None:
        where["layer"] = layer
    if head is not None:
        where["head"] = head
    return Reading(name, value, "", where, step)
