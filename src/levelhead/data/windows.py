"""Windows of a multivariate series, always as views.

Axes. A series is `[D, T]`: D channels (rows), T steps, each channel contiguous. The window that
starts at step t covers the context t .. t+L-1 and the horizon t+L .. t+L+H-1; windows are counted
by their start. Batches are channel-major, `[D, B, ·]`, so that one window of one channel is one
contiguous row.

Two examples. A series of T = 10 steps with L = 4, H = 2 has the starts 0 .. 4, five windows. A
block of rows 6 .. 9 judged with L = 4, H = 2 has the starts 2 .. 4: its targets lie inside the
block, its contexts may reach back before it, as in the literature.

Centring and scaling are done in float64; only the finished batch is cast to the working type.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from levelhead.base.errors import InputError

__all__ = ["Batch", "Held", "Pairs", "Scaler", "WindowSource", "Windows", "held", "starts_within"]

FloatArray = NDArray[np.float64]

_CHUNK_ELEMENTS = 1 << 21  # float64 elements per pass: about 16 MB of temporary memory


@dataclass(frozen=True, eq=False)
class Scaler:
    """Mean and deviation of each channel, `[D]` and `[D]`, in the series' own units."""

    mean: FloatArray
    deviation: FloatArray

    @classmethod
    def fit(cls, series: FloatArray) -> Scaler:
        """Statistics of `series [D, T]` over T; a constant channel gets deviation 1.

        >>> Scaler.fit(np.array([[1.0, 3.0], [5.0, 5.0]])).deviation
        array([1., 1.])
        """
        mean = series.mean(axis=1)
        deviation = series.std(axis=1)
        # A deviation that is only rounding noise of the offset is a constant channel.
        noise = 64 * np.finfo(np.float64).eps * np.maximum(np.abs(mean), np.abs(series).max(axis=1))
        return cls(mean, np.where(deviation > noise, deviation, 1.0))

    def apply(self, series: FloatArray) -> FloatArray:
        """`(series - mean) / deviation`, shape `[D, T]` in and out, float64."""
        return (series - self.mean[:, None]) / self.deviation[:, None]

    def invert(self, values: FloatArray) -> FloatArray:
        """Back to the series' units; the channel axis is the second to last, `[..., D, n]`."""
        return values * self.deviation[:, None] + self.mean[:, None]


@dataclass(frozen=True, eq=False)
class Batch:
    """B windows, channel-major, with RevIN's normalisation already done in float64.

    `context [D, B, L]` is normalised: mean 0 and deviation 1 per window and channel. `target
    [J, B, H]` is centred by the window's mean but not scaled, for the J judged channels (all, if
    `judged` is None). `mean` and `deviation` are `[D, B, 1]`, float64 and the working type. A
    forecast f of the normalised window is judged as `centred(f) - target`.
    """

    context: torch.Tensor
    target: torch.Tensor
    mean: torch.Tensor
    deviation: torch.Tensor
    judged: torch.Tensor | None = None

    def centred(self, core: torch.Tensor) -> torch.Tensor:
        """Normalised forecasts `[D, B, H]` in the units of `target`, judged channels only."""
        made = core * self.deviation
        return made if self.judged is None else made[self.judged]

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        moved = (self.context, self.target, self.mean, self.deviation, self.judged)
        return Batch(*(t if t is None else t.to(device) for t in moved))  # type: ignore[arg-type]


class WindowSource(Protocol):
    """Anything that hands out normalised batches of windows by position."""

    context: int
    horizon: int

    def __len__(self) -> int: ...

    @property
    def channels(self) -> int:
        """D."""

    @property
    def judged(self) -> torch.Tensor | None:
        """Positions of the channels whose forecasts count, None for all."""

    def batch(self, index: torch.Tensor) -> Batch:
        """The windows at positions `index [B]`; targets of the judged channels only."""


def starts_within(
    start: int, stop: int, context: int, horizon: int, *, reach_back: bool
) -> tuple[int, int]:
    """First start and one past the last of the windows whose targets lie in rows start .. stop-1.

    With `reach_back` the context may use rows before `start` (validation, calibration and test
    rows); without it the whole window lies inside (training rows). Rows that hold no window give an
    empty range that fits any series with these rows.

    >>> starts_within(6, 10, 4, 2, reach_back=True)
    (2, 5)
    >>> starts_within(0, 10, 4, 2, reach_back=False)
    (0, 5)
    >>> starts_within(7, 10, 4, 2, reach_back=False)
    (5, 5)
    """
    end = max(stop - context - horizon + 1, 0)
    return min(max(start - context, 0) if reach_back else start, end), end


class Windows:
    """The windows of `series [D, T]` (float64) whose starts are start .. stop-1.

    Nothing of the series is copied; batches are cut on demand. `eps` is RevIN's: the deviation is
    sqrt(var + eps), in units of the series given.

    >>> w = Windows(np.arange(10.0)[None], context=4, horizon=2)
    >>> len(w), w.batch(torch.tensor([0])).target.flatten().tolist()
    (5, [2.5, 3.5])
    """

    def __init__(
        self,
        series: FloatArray,
        context: int,
        horizon: int,
        start: int = 0,
        stop: int | None = None,
        *,
        judged: Sequence[int] | None = None,
        eps: float = 1e-5,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if series.ndim != 2:
            raise InputError(
                f"windows need a series [channels, steps]; an array with shape {series.shape} was "
                "given: pass channels first"
            )
        last = series.shape[1] - context - horizon + 1
        if stop is None and last < 1:
            raise InputError(
                f"{series.shape[1]} steps hold no window of context {context} and horizon "
                f"{horizon}: give at least {context + horizon} steps or shorten them"
            )
        stop = last if stop is None else stop
        if not 0 <= start <= stop <= max(last, 0):
            raise InputError(
                f"window starts {start} .. {stop} were asked for, but {series.shape[1]} steps hold "
                f"only the starts 0 .. {max(last, 0)} at context {context} and horizon {horizon}"
            )
        self.series = series
        self.context, self.horizon = context, horizon
        self.start, self.stop = start, stop
        self.eps, self.dtype, self.device = eps, dtype, torch.device(device)
        self.judged = None if judged is None else torch.tensor(list(judged))
        tensor, width = _as_tensor(series), context + horizon
        # torch refuses to unfold a series shorter than one window, even for no window at all.
        windows = (
            tensor.unfold(1, width, 1) if last > 0 else tensor.new_empty(len(series), 0, width)
        )
        self._view = windows[:, start:stop]
        self._mean, self._deviation = self._statistics()

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def channels(self) -> int:
        """D."""
        return int(self.series.shape[0])

    def _statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and deviation of every context, `[D, N]` float64, two-pass, in bounded memory."""
        contexts = self._view[..., : self.context]
        mean = torch.empty(contexts.shape[:2], dtype=torch.float64)
        deviation = torch.empty_like(mean)
        chunk = max(1, _CHUNK_ELEMENTS // self.context)
        for d in range(contexts.shape[0]):
            for i in range(0, contexts.shape[1], chunk):
                piece = contexts[d, i : i + chunk]
                variance, centre = torch.var_mean(piece, dim=-1, correction=0)
                mean[d, i : i + chunk] = centre
                deviation[d, i : i + chunk] = (variance + self.eps).sqrt_()
        return mean, deviation

    def batch(self, index: torch.Tensor) -> Batch:
        """The windows with positions `index [B]` (0 is the window that starts at `start`)."""
        rows = self._view[:, index]
        return _make_batch(
            rows[..., : self.context],
            rows[..., self.context :],
            self._mean[:, index].unsqueeze(-1),
            self._deviation[:, index].unsqueeze(-1),
            self.judged,
            self.dtype,
            self.device,
        )


class Pairs:
    """Windows given one by one: `contexts [N, D, L]` and `targets [N, D, H]`, float64.

    With `revin=False` the mean is 0 and the deviation 1: the windows are used as they are.
    """

    def __init__(
        self,
        contexts: FloatArray,
        targets: FloatArray,
        *,
        revin: bool = True,
        judged: Sequence[int] | None = None,
        eps: float = 1e-5,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if contexts.ndim != 3 or targets.ndim != 3 or contexts.shape[:2] != targets.shape[:2]:
            raise InputError(
                "windows [N, D, L] and targets [N, D, H] are needed, shapes "
                f"{contexts.shape} and {targets.shape} were given"
            )
        self.context, self.horizon = contexts.shape[2], targets.shape[2]
        self.dtype, self.device = dtype, torch.device(device)
        self.judged = None if judged is None else torch.tensor(list(judged))
        self._contexts = _as_tensor(contexts).transpose(0, 1)
        self._targets = _as_tensor(targets).transpose(0, 1)
        shape = (*self._contexts.shape[:2], 1)
        self._mean = torch.zeros(shape, dtype=torch.float64)
        self._deviation = torch.ones(shape, dtype=torch.float64)
        if revin and len(self):
            variance, self._mean = torch.var_mean(
                self._contexts, dim=-1, correction=0, keepdim=True
            )
            self._deviation = (variance + eps).sqrt()

    def __len__(self) -> int:
        return int(self._contexts.shape[1])

    @property
    def channels(self) -> int:
        """D."""
        return int(self._contexts.shape[0])

    def batch(self, index: torch.Tensor) -> Batch:
        """The windows with positions `index [B]`."""
        return _make_batch(
            self._contexts[:, index],
            self._targets[:, index],
            self._mean[:, index],
            self._deviation[:, index],
            self.judged,
            self.dtype,
            self.device,
        )


class Held:
    """The windows of `source`, normalised once and kept: the same batches, by a copy of rows.

    For training over many epochs. See `held` for the memory that it takes, on the source's device.
    """

    def __init__(self, source: WindowSource) -> None:
        if not len(source):
            raise InputError("there is no window to hold: shorten context or horizon")
        self.context, self.horizon = source.context, source.horizon
        self.channels, self.judged, self._count = source.channels, source.judged, len(source)
        chunk = max(1, _CHUNK_ELEMENTS // (self.channels * (self.context + self.horizon)))
        self._parts: tuple[torch.Tensor, ...] = ()
        for index in torch.split(torch.arange(self._count), chunk):
            parts = _parts(source.batch(index))
            if not self._parts:
                self._parts = tuple(
                    part.new_empty(len(part), self._count, part.shape[2]) for part in parts
                )
            for kept, part in zip(self._parts, parts, strict=True):
                kept[:, index[0] : index[-1] + 1] = part

    def __len__(self) -> int:
        return self._count

    def batch(self, index: torch.Tensor) -> Batch:
        """The windows at positions `index [B]`."""
        device = self._parts[0].device
        context, target, mean, deviation = (
            part.index_select(1, index.to(device)) for part in self._parts
        )
        judged = None if self.judged is None else self.judged.to(device)
        return Batch(context, target, mean, deviation, judged)


def held(source: WindowSource, limit: int = 512 << 20) -> WindowSource:
    """`source` as `Held` if that takes at most `limit` bytes, else as it is.

    >>> series = np.arange(10.0)[None]
    >>> type(held(Windows(series, context=4, horizon=2))).__name__
    'Held'
    >>> type(held(Windows(series, context=4, horizon=2), limit=100)).__name__
    'Windows'
    """
    if not len(source):
        return source
    one = _parts(source.batch(torch.arange(1)))
    needed = len(source) * sum(part.numel() * part.element_size() for part in one)
    return Held(source) if needed <= limit else source


def _parts(batch: Batch) -> tuple[torch.Tensor, ...]:
    """What of a batch has an axis of windows, its second."""
    return batch.context, batch.target, batch.mean, batch.deviation


def _as_tensor(array: FloatArray) -> torch.Tensor:
    """The same memory as a tensor, float64."""
    if array.dtype != np.float64:
        raise InputError(
            f"windows are cut from float64 arrays, {array.dtype} was given: convert it"
        )
    with warnings.catch_warnings():
        # torch warns that it cannot protect a read-only array; it is only read here.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _make_batch(
    context: torch.Tensor,
    target: torch.Tensor,
    mean: torch.Tensor,
    deviation: torch.Tensor,
    judged: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Batch:
    """Centre in float64, write in the working type, scale in place: one pass over the windows."""
    normalised = torch.empty(context.shape, dtype=dtype)
    torch.sub(context, mean, out=normalised)
    scale = deviation.to(dtype)
    normalised.div_(scale)
    level = mean
    if judged is not None:
        target, level = target[judged], mean[judged]
    centred = torch.empty(target.shape, dtype=dtype)
    torch.sub(target, level, out=centred)
    batch = Batch(normalised, centred, mean, scale, judged)
    return batch if device.type == "cpu" else batch.to(device)
