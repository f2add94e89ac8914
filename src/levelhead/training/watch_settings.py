"""What `watch` was asked for, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from levelhead.base.arguments import is_whole
from levelhead.base.errors import InputError
from levelhead.diagnostics.capture import Probe
from levelhead.invariants.catalogue import Invariant
from levelhead.training.alarms import Thresholds
from levelhead.training.watch_records import Sink
from levelhead.training.watchers import DEFAULT_INVARIANTS, chosen_invariants
from levelhead.weights.layouts import Layout
from levelhead.weights.settings import ALIASES, SETTABLE

__all__ = ["WatchSettings", "check_watch_arguments"]

_MODEL_SETTINGS = {*SETTABLE, *(name for names in ALIASES.values() for name in names)}


@dataclass(frozen=True, eq=False)
class WatchSettings:
    """The arguments of `watch`, which describes them; `check` raises InputError for wrong ones."""

    every: int
    invariants: tuple[Invariant, ...]
    maps: bool
    sharpness: Callable[[], Tensor] | None
    probe_batch: Any
    probes: tuple[Probe, ...]
    layout: Layout | None
    resume: bool | int
    snapshots: int | None
    rho: float
    sinks: tuple[Sink, ...]
    alarms: bool | Thresholds
    title: str | None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def check(self, out: str | Path | None) -> None:
        """Raises InputError for the first argument that cannot be used."""
        _refuse_unknown(self.arguments)
        for sink in self.sinks:
            if not all(callable(getattr(sink, name, None)) for name in ("write", "close")):
                raise InputError(
                    f"sinks holds a {type(sink).__name__}; expected objects with "
                    "write(readings) and close()"
                )
        for name, value in (("every", self.every), ("snapshots", self.snapshots)):
            if not is_whole(value) and not (name == "snapshots" and value is None):
                raise InputError(f"{name}={value!r} was given; expected a whole number from 1 on")
        if self.sharpness is not None and not callable(self.sharpness):
            raise InputError("sharpness is no function; expected one that returns the loss")
        if self.resume is not False and out is None:
            raise InputError("resume was given without out, the folder of the run to go on with")
        if not isinstance(self.resume, bool) and not is_whole(self.resume, least=0):
            raise InputError(
                f"resume={self.resume!r} was given; expected True, or how many steps there were"
            )

    @property
    def need_layers(self) -> bool:
        """Whether anything is asked for that needs attention layers."""
        batch = self.probe_batch is not None
        return bool(self.invariants or self.maps or self.probes or self.snapshots or batch)

    def stored(
        self, model: nn.Module, optimizers: Sequence[object], layers: list[str]
    ) -> dict[str, Any]:
        """What the run folder keeps."""
        layout = self.layout
        return {
            "model": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "layers": layers,
            "optimizer": [type(o).__name__ for o in optimizers],
            "every": self.every,
            "invariants": [entry.name for entry in self.invariants],
            "maps": self.maps,
            "sharpness": self.sharpness is not None,
            "rho": self.rho,
            "probe_batch": self.probe_batch is not None,
            "probes": [type(probe).__name__ for probe in self.probes],
            "layout": None if layout is None else str(getattr(layout, "family", layout)),
            "snapshots": self.snapshots,
            "arguments": {name: str(value) for name, value in self.arguments.items()},
        }


def check_watch_arguments(
    *,
    out: str | Path | None = None,
    every: int = 50,
    invariants: Iterable[str | Invariant] | None = DEFAULT_INVARIANTS,
    maps: bool = True,
    sharpness: Callable[[], Tensor] | None = None,
    probe_batch: Any = None,
    probes: Sequence[Probe] = (),
    layout: Layout | None = None,
    resume: bool | int = False,
    snapshots: int | None = None,
    rho: float = 0.05,
    sinks: Sequence[Sink] = (),
    alarms: bool | Thresholds = True,
    title: str | None = None,
    **arguments: Any,
) -> WatchSettings:
    """The arguments of `watch` but model and optimizer, checked as far as can be without these.

    Raises InputError as `watch` does.

    >>> check_watch_arguments(every=10).every
    10
    """
    chosen = chosen_invariants(() if invariants is None else invariants)
    ways, outlets = _several("probes", probes), _several("sinks", sinks)
    settings = WatchSettings(
        *(every, chosen, maps, sharpness, probe_batch, ways, layout),
        *(resume, snapshots, rho, outlets, alarms, title, arguments),
    )
    settings.check(out)
    return settings


def _several(name: str, given: Any) -> tuple[Any, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InputError(f"{name} is a {type(given).__name__}; expected a list of them")
    return tuple(given)


def _refuse_unknown(arguments: Mapping[str, Any]) -> None:
    for name in arguments:
        if name in _MODEL_SETTINGS:
            continue
        own = check_watch_arguments.__kwdefaults__ or {}
        near = get_close_matches(name, [*own, *sorted(_MODEL_SETTINGS)], 1)
        meant = f"; {near[0]} was meant, perhaps" if near else ""
        raise InputError(
            f"watch has no argument {name!r}{meant}. Besides its own it takes settings of the "
            f"model: {', '.join(SETTABLE)}"
        )
