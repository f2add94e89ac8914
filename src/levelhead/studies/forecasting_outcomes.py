"""The outcomes of the forecasting study, ready to be asked by place, arm and seed.

A place is a set and a horizon. Losses are `[N]`, one for each test window in order of time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.studies.forecasting_data import MADE
from levelhead.studies.forecasting_models import ARMS
from levelhead.studies.study import Outcome

__all__ = ["Losses", "Place", "named", "the_set"]

FloatArray = NDArray[np.float64]
Place = tuple[str, int]


def named(place: Place) -> str:
    """A place in words.

    >>> named(("ETTh1", 96)), named(("made", 6))
    ('ETTh1 96', 'made series 6')
    """
    return f"{'made series' if place[0] == MADE else place[0]} {place[1]}"


def the_set(name: str) -> str:
    """A set in a sentence: its name, but for the series that no file holds.

    >>> the_set("ETTh1"), the_set("made")
    ('ETTh1', 'the made series')
    """
    return "the made series" if name == MADE else name


@dataclass(frozen=True, eq=False)
class Losses:
    """Outcomes by cell, asked for the losses of an arm at a place."""

    settings: Any
    outcomes: Mapping[str, Outcome]

    @property
    def places(self) -> list[Place]:
        """Sets and horizons with at least one finished cell, in the order of the settings."""
        return [
            (name, horizon)
            for name in self.settings.sets
            for horizon in self.settings.horizons
            if self.arms((name, horizon))
        ]

    def arms(self, place: Place) -> list[str]:
        """The arms that finished a cell at `place`."""
        return [arm for arm in self.settings.arms if self.seeds(place, arm)]

    def ranked(self, place: Place) -> list[str]:
        """Those of them that are judged by one loss: without the slip, whose loss is another."""
        return [arm for arm in self.arms(place) if not ARMS[arm].slip]

    def seeds(self, place: Place, arm: str) -> dict[int, Outcome]:
        """Outcomes by seed."""
        cells = {s: f"{place[0]}-{place[1]}-{arm}-{s}" for s in range(self.settings.seeds)}
        return {s: self.outcomes[n] for s, n in cells.items() if n in self.outcomes}

    def values(self, place: Place, arm: str, name: str) -> FloatArray:
        """One reading by seed."""
        return np.array([o.value(name) for o in self.seeds(place, arm).values()])

    def mean(self, place: Place, arm: str, name: str) -> float:
        """Mean of a reading over seeds; nan if there is none."""
        values = self.values(place, arm, name)
        return float(values.mean()) if values.size else float("nan")

    def by_seed(self, place: Place, arm: str) -> dict[int, FloatArray]:
        """Squared errors `[N]` by seed; a closed form has the same ones for every seed."""
        found = {s: o.arrays["squared"] for s, o in self.seeds(place, arm).items()}
        if ARMS[arm].line is not None and found:
            return dict.fromkeys(range(self.settings.seeds), next(iter(found.values())))
        return found

    def limit(self, place: Place, arm: str) -> int:
        """How many epochs a training of `arm` has at most: fewer where it is costly."""
        settings = self.settings
        costly = arm == "temporal" or place[0] in settings.brief
        return min(settings.epochs, settings.costly_epochs) if costly else int(settings.epochs)

    def stopped(self, place: Place, arm: str, seeds: Sequence[int]) -> list[int]:
        """Those of `seeds` whose training ended at a limit that is lower than the study's.

        One whose patience ended in that very epoch would not have gone on.
        """
        limit = self.limit(place, arm)
        runs = self.seeds(place, arm) if limit < self.settings.epochs else {}
        return [s for s in seeds if s in runs and self._went_on(runs[s], limit)]

    def _went_on(self, run: Outcome, limit: int) -> bool:
        """Whether a training of at least `limit` epochs had patience left."""
        done, patience = run.value("epochs"), self.settings.patience
        return done >= limit and (patience == 0 or done - run.value("best_epoch") < patience)
