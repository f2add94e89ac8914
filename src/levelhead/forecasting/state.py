"""What a fitted forecaster knows: enough to forecast any table of its channels, plain data.

Axes and units: tables are `[T, D]` in the user's units; inside, series are `[D, T]`, standardised
by the training rows and in the model's own channel order. That order depends on the channels'
contents, not on their places: a permuted table gives the same arithmetic and bit-equal forecasts.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.data.tables import Table
from levelhead.data.windows import Pairs, Scaler, Windows
from levelhead.forecasting.candidates import Blend, Candidate, Network, chunk_size
from levelhead.forecasting.intervals import Conformal, Scores
from levelhead.forecasting.selection import Choice

__all__ = ["FittedState", "content_order"]

FloatArray = NDArray[np.float64]


def content_order(values: FloatArray, names: Sequence[str]) -> list[int]:
    """Order of channels by the digest of their values `[T, D]`, ties by name.

    >>> a = np.arange(6.0).reshape(3, 2)
    >>> first, second = content_order(a, "ab"), content_order(a[:, ::-1], "ba")
    >>> ["ab"[i] for i in first] == ["ba"[i] for i in second]
    True
    """

    def key(d: int) -> tuple[bytes, str]:
        column = np.ascontiguousarray(values[:, d])
        return hashlib.sha256(column.tobytes()).digest(), names[d]

    return sorted(range(values.shape[1]), key=key)


@dataclass(frozen=True, eq=False)
class FittedState:
    """A chosen candidate with the channels, scales and quantiles around it.

    `channels` are in the model's own order, as are `scaler` and the conformal quantiles (the latter
    for `targets` only, in the same order); `user_channels` are in the order of the fitted table.
    `beside` are the models that every forecast stands beside: the naive one and the line.
    `tail` holds the last `context` rows of the fitted table in the user's form.
    """

    channels: tuple[str, ...]
    targets: tuple[str, ...]
    context: int
    horizon: int
    season: int
    scaler: Scaler
    chosen: Candidate
    conformal: Conformal | None
    tail: Table
    any_channels: bool
    beside: Mapping[str, Candidate] = field(default_factory=dict)
    choice: Choice | None = None
    notes: tuple[str, ...] = ()
    device: str = "cpu"

    @property
    def user_targets(self) -> tuple[str, ...]:
        """Targets in the order of the fitted table."""
        return tuple(c for c in self.tail.channels if c in set(self.targets))

    @property
    def network(self) -> Network | None:
        """The chosen SAMformer, alone or as a member of a blend."""
        members = self.chosen.members if isinstance(self.chosen, Blend) else (self.chosen,)
        return next((m for m in members if isinstance(m, Network)), None)

    def standardise(self, table: Table) -> tuple[FloatArray, tuple[str, ...], Scaler]:
        """(series `[D, T]`, channel names, scaler) of a table, in the model's order.

        Channels that were not fitted are accepted only where no parameter belongs to a channel;
        each is scaled by its own rows.
        """
        if len(table) < self.context:
            raise InputError(
                f"a forecast needs the last {self.context} rows (the fitted context), "
                f"{len(table)} were given"
            )
        names = table.channels
        if set(names) >= set(self.channels):
            extra = [c for c in names if c not in set(self.channels)]
            if not extra:
                index = [names.index(c) for c in self.channels]
                series = self.scaler.apply(np.ascontiguousarray(table.values.T[index]))
                return series, self.channels, self.scaler
        missing = [c for c in self.channels if c not in set(names)]
        if not self.any_channels:
            raise InputError(
                f"the model was fitted on {len(self.channels)} channels and has gains for each; "
                f"the table {_difference(missing, names, self.channels)}: give the fitted "
                "channels, or fit with revin_affine=False and without targets="
            )
        warnings.warn(
            f"the model was fitted on other channels: the table "
            f"{_difference(missing, names, self.channels)}; channels that were not fitted are "
            "scaled by their own rows",
            LevelheadWarning,
            stacklevel=4,
        )
        order = content_order(table.values, names)
        chosen = [names[i] for i in order]
        values = np.ascontiguousarray(table.values.T[order])
        own = Scaler.fit(values[:, -self.context :])
        known = {c: i for i, c in enumerate(self.channels)}
        mean, deviation = own.mean.copy(), own.deviation.copy()
        for d, name in enumerate(chosen):
            if name in known:
                mean[d] = self.scaler.mean[known[name]]
                deviation[d] = self.scaler.deviation[known[name]]
        scaler = Scaler(mean, deviation)
        return scaler.apply(values), tuple(chosen), scaler

    def forecast_windows(
        self, contexts: FloatArray, candidate: Candidate | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """(forecasts `[N, D, H]`, deviations `[N, D, 1]`) of windows `[N, D, L]`, standardised."""
        used = self.chosen if candidate is None else candidate
        empty = np.empty((*contexts.shape[:2], self.horizon))
        # In float64 the naive forecast is exact and so is the line; a network casts for itself.
        pairs = Pairs(contexts, empty, dtype=torch.float64, device=self.device)
        made, scales = [], []
        size = chunk_size(pairs.channels, self.context, self.horizon)
        for index in torch.split(torch.arange(len(pairs)), size):
            batch = pairs.batch(index)
            with torch.no_grad():
                core = used.core(batch.context).double()
            made.append((core * batch.deviation.double() + batch.mean).transpose(0, 1).cpu())
            scales.append(batch.deviation.double().transpose(0, 1).cpu())
        return torch.cat(made).numpy(), torch.cat(scales).numpy()

    def outcomes(
        self,
        series: FloatArray,
        starts: Sequence[int] | range,
        candidates: Sequence[Candidate] | None = None,
    ) -> Iterator[tuple[FloatArray, FloatArray, FloatArray]]:
        """Forecast windows whose outcome is known: `series [D, T]` standardised, in model order.

        Yields (forecasts `[K, B, J, H]`, truths `[B, J, H]`, deviations `[B, J, 1]`) of the J
        targets in pieces, in standardised units, for windows that start at `starts`.
        """
        used = (self.chosen,) if candidates is None else candidates
        judged = [i for i, c in enumerate(self.channels) if c in set(self.targets)]
        windows = Windows(series, self.context, self.horizon, judged=judged, device=self.device)
        size = chunk_size(windows.channels, self.context, self.horizon)
        for index in torch.split(torch.tensor(list(starts), dtype=torch.long), size):
            batch = windows.batch(index)
            level = batch.mean[judged]
            with torch.no_grad():
                made = [batch.centred(c.core(batch.context)).double() + level for c in used]
            truth = batch.target.double() + level
            scale = batch.deviation[judged].double()
            yield (
                torch.stack(made).transpose(1, 2).cpu().numpy(),
                truth.transpose(0, 1).cpu().numpy(),
                scale.transpose(0, 1).cpu().numpy(),
            )

    def scores(self, series: FloatArray, starts: Sequence[int] | range) -> Scores:
        """Conformal scores |y - ŷ|/s `[N, J, H]`, float32, of the windows at `starts`."""
        found = np.empty((len(starts), len(self.targets), self.horizon), dtype=np.float32)
        done = 0
        for made, truth, scale in self.outcomes(series, starts):
            found[done : done + len(truth)] = np.abs(made[0] - truth) / scale
            done += len(truth)
        return found

    def mean_attention(self, network: Network, series: FloatArray) -> FloatArray:
        """Mean A(X) `[D, D]` over at most 64 of the last windows, a tenth of a context apart."""
        view = np.lib.stride_tricks.sliding_window_view(series, self.context, axis=1)
        picked = view[:, :: -max(1, self.context // 10)][:, :64].transpose(1, 0, 2)
        with torch.no_grad():
            maps = network.net.attention(torch.from_numpy(picked.copy()).to(self.device))
        return np.asarray(maps.mean(dim=0).double().cpu().numpy())

    def half_widths(
        self, names: Sequence[str], coverage: float, levels: FloatArray | None = None
    ) -> FloatArray:
        """Half widths `[D, H]` for the named channels, in units of each window's deviation."""
        if self.conformal is None:
            raise InputError(
                "no rows were left to calibrate intervals: fit on more rows, or a shorter horizon"
            )
        own = self.conformal.half_width(coverage, levels)
        pooled = self.conformal.half_width(coverage, pooled=True)
        place = {c: i for i, c in enumerate(self.targets)}
        return np.stack([own[place[c]] if c in place else pooled for c in names])


def _difference(missing: list[str], given: Sequence[str], fitted: Sequence[str]) -> str:
    if missing:
        return f"lacks {', '.join(missing[:5])}"
    extra = [c for c in given if c not in set(fitted)]
    return f"adds {', '.join(extra[:5])}"
