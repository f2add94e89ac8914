"""Which layers a watcher sees, in words: said at the first sampled step, and when one is lost."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.training.watch_look import Look

__all__ = ["Coverage", "listed", "say_no_step"]


class Coverage:
    """For each layer what is seen of it; filled at the first sampled step."""

    def __init__(self) -> None:
        self.layers: dict[str, str] = {}
        self._told: set[str] = set()

    def begin(self, look: Look, step: int) -> list[str]:
        """Note what the first sampled step has seen; sentences for the run's notes."""
        names = look.layers.names
        weights = "weights" if look.chosen else ""
        for name in names:
            maps = f"maps ({look.seen[name]})" if name in look.seen else ""
            self.layers[name] = " and ".join(filter(None, [weights, maps])) or "norms"
        if not names:
            return ["Watched: no attention layers; losses and norms of the whole model."]
        how = ", ".join(sorted(set(look.seen.values())))
        maps = f"maps of {len(look.seen)} ({how})" if look.seen else "no maps"
        many = "layers" if len(names) > 1 else "layer"
        told = (
            f"Watched from step {step}: {len(names)} attention {many} ({listed(names)}), "
            f"{'weights of all' if look.chosen else 'no weights'}, {maps}."
        )
        return [told, *(f"Not read: {skip}" for skip in look.layers.skipped)]

    def lost(self, look: Look, step: int) -> list[str]:
        """Layers whose maps are missing for the first time, with the reason; one sentence each."""
        gone = {name: why for name, why in look.missing.items() if name not in self._told}
        self._told |= gone.keys()
        for name, why in gone.items():
            self.layers[name] = f"{self.layers.get(name, '')}; no maps: {why}".removeprefix("; ")
        reasons: dict[str, list[str]] = {}
        for name, why in gone.items():
            reasons.setdefault(why, []).append(name)
        return [f"Step {step}: no maps of {listed(n)}: {why}" for why, n in reasons.items()]


def say_no_step(with_optimizer: bool) -> None:
    """Warn that a block saw no step; raises InputError if the loop had to say when it makes one."""
    if not with_optimizer:
        raise InputError(
            "no step was seen: without an optimizer, run.step(loss) has to be called after "
            "each step of the loop; or give watch the optimizer"
        )
    warnings.warn(
        "no step was seen: the optimizer that was given to watch made none; give the one that "
        "the loop steps",
        LevelheadWarning,
        stacklevel=3,
    )


def listed(names: Sequence[str]) -> str:
    """A few names, or the first and the last of many.

    >>> listed(["a", "b"]), listed(["a", "b", "c", "d"])
    ('a, b', 'a … d')
    """
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]}"
