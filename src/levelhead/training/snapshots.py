"""Snapshots of attention weights, and the process that decomposes them while training goes on.

    snapshots/step-00000500.safetensors   q, k, v, o of every layer, as step 500 started from them,
                                          the norm in front folded
    snapshots/step-00000500.done          its analysis is written
    snapshots/analysis.log                what the process had to say on stderr

`python -m levelhead.training.snapshots RUN` analyses the snapshots that are not done, in order, and
ends. It may be killed and started again at any time; a second one at the same time ends at once.
Its Readings have the writer "analysis"; whole spectra are arrays, `step-00000500/<layer>/<name>`.

Axes as in `invariants.decompositions`: 𝓑 and 𝓜 [h, ·, ·] stack the forms B_i and the maps M_i, from
their factors. Two examples. `qk_head_mode_rank` is 1 for identical heads, and up to h. A Tucker fit
that keeps d_k directions on either side has the error 0 if all heads read the same d_k directions.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from levelhead.base.errors import LevelheadError
from levelhead.base.files import broken_file, write_atomically
from levelhead.base.numerics import threads
from levelhead.base.records import Reading, Run
from levelhead.invariants.catalogue import catalogue
from levelhead.invariants.decompositions import cp_of
from levelhead.invariants.spectral import stack_of
from levelhead.tensors.tucker import tucker_of_stack
from levelhead.training.watch_course import current
from levelhead.training.watchers import entry_readings
from levelhead.weights.attention_view import AttentionView

__all__ = [
    "WRITER",
    "Analysis",
    "analyse",
    "drop_snapshots",
    "layer_analysis",
    "read_snapshot",
    "write_snapshot",
]

WRITER = "analysis"
_FOLDER = "snapshots"
_WEIGHTS = ("q", "k", "v", "o")
_FACTS = ("kv_group", "scale", "cross", "tied", "weighting", "name", "family")
_MODES = {"qk": ("head", "query", "key"), "ov": ("head", "output", "value")}
_CP = ("error", "weights", "head_coherence", "degeneracy")
_ROOT = Path(__file__).resolve().parents[2]


# ── files ──


def write_snapshot(folder: Path, step: int, views: Sequence[AttentionView]) -> Path:
    """Write q, k, v and o of the views beside the run's other files, and rename them into place.

    Raises LevelheadError if the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for i, view in enumerate(views):
        for name in _WEIGHTS:
            tensors[f"{i}.{name}"] = getattr(view, name).detach().cpu().contiguous().clone()
    facts = [{name: getattr(view, name) for name in _FACTS} for view in views]
    content = save(tensors, {"step": str(step), "layers": json.dumps(facts)})
    try:
        (folder / _FOLDER).mkdir(exist_ok=True)
    except OSError as error:
        raise LevelheadError(f"{folder / _FOLDER} cannot be made ({error.strerror})") from error
    return write_atomically(folder / _FOLDER / f"step-{step:08d}.safetensors", content)


def read_snapshot(path: str | os.PathLike[str]) -> tuple[int, list[AttentionView]]:
    """Step and layers of a snapshot. Raises StoredFileError for a file that is damaged.

    A view has the weights and forms of its layer; positions, norms and biases are not kept.
    """
    try:
        with safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            step, facts = int(told["step"]), json.loads(told["layers"])
            views = [
                AttentionView(
                    **{name: file.get_tensor(f"{i}.{name}") for name in _WEIGHTS},
                    **{**fact, "kv_group": tuple(fact["kv_group"])},
                )
                for i, fact in enumerate(facts)
            ]
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise broken_file(path, error) from error
    return step, views


def drop_snapshots(folder: Path, after: int) -> None:
    """Remove the snapshots of steps after `after`, which a resumed run takes again."""
    for path in (folder / _FOLDER).glob("step-*.*"):
        number = path.stem.removeprefix("step-")
        if number.isdecimal() and int(number) > after:
            path.unlink(missing_ok=True)


def _waiting(folder: Path) -> list[Path]:
    """Snapshots that are not analysed, in order."""
    found = sorted((folder / _FOLDER).glob("step-*.safetensors"))
    return [path for path in found if not path.with_suffix(".done").exists()]


# ── what is computed ──


def layer_analysis(
    view: AttentionView, step: int | None
) -> tuple[list[Reading], dict[str, NDArray[np.float64]]]:
    """Readings of one layer's 𝓑 and 𝓜, and the spectra of their modes.

    For each: singular values of the head unfolding, effective ranks exp(-Σ p log p), p = σ/Σσ, of
    all three modes (De Lathauwer et al. 2000; Roy & Vetterli 2007), the relative error of a Tucker
    fit with the ranks (h, d_k, d_k), and the catalogue's CP fit. A layer whose weights are not
    finite has none.
    """
    if not all(bool(getattr(view, name).isfinite().all()) for name in _WEIGHTS):
        return [], {}
    place: dict[str, str | int] = {"layer": view.name}
    entries = catalogue()
    readings: list[Reading] = []
    spectra: dict[str, NDArray[np.float64]] = {}
    which: Literal["qk", "ov"]
    with torch.no_grad(), threads(1):
        for which in ("qk", "ov"):
            stack = stack_of(view, which).to(torch.float64)
            for mode, side in enumerate(_MODES[which]):
                name = f"{which}_stack_{side}_spectrum"
                sigma = stack.mode_singular_values(mode)
                spectra[name] = sigma.numpy()
                rank = _effective_rank(sigma)
                readings.append(
                    Reading(f"{which}_{side}_mode_rank", rank, "1", place, step, "snapshot")
                )
                if mode == 0:
                    readings += entry_readings(entries[name], sigma, place, step, "snapshot")
            width = view.d_k if which == "qk" else view.d_v
            ranks = [
                min(r, n) for r, n in zip((len(stack), width, width), stack.shape, strict=True)
            ]
            error = tucker_of_stack(stack, ranks).relative_error
            readings.append(Reading(f"{which}_tucker_error", error, "1", place, step, "snapshot"))
            fit = cp_of(view, which)
            for part in _CP:
                entry = entries[f"{which}_cp_{part}"]
                readings += entry_readings(entry, entry.function(fit), place, step, "snapshot")
    return readings, spectra


def _effective_rank(sigma: Tensor) -> float:
    total = float(sigma.sum())
    if total <= 0 or not math.isfinite(total):
        return 0.0
    p = sigma / total
    return float((-torch.xlogy(p, p).sum()).exp())


def analyse(folder: str | os.PathLike[str]) -> int:
    """Analyse the snapshots of a run that are not done, in order; returns how many that were.

    Does nothing while another process analyses the same run. A snapshot whose analysis was broken
    off is finished without writing anything twice. Raises StoredFileError for a folder that is no
    run, and for a damaged snapshot, after all others.
    """
    run = Run.open(folder)
    done, broken = 0, {}
    with _alone(run.folder / _FOLDER) as alone:
        # Whatever a killed process left; nobody else writes these Readings.
        past = current(run.readings()) if alone else []
        held = {_key(r) for r in past if r.source == "snapshot"}
        while alone and (waiting := [p for p in _waiting(run.folder) if p not in broken]):
            try:
                _analyse_one(run, waiting[0], held)
                done += 1
            except LevelheadError as error:
                broken[waiting[0]] = error
    for damage in broken.values():
        raise damage
    return done


def _key(reading: Reading) -> tuple[Any, ...]:
    return reading.step, reading.name, tuple(reading.where.items())


def _analyse_one(run: Run, path: Path, held: set[tuple[Any, ...]]) -> None:
    step, views = read_snapshot(path)
    names = set(run.array_names())
    arrays: dict[str, NDArray[np.float64]] = {}
    for view in views:
        readings, spectra = layer_analysis(view, step)
        arrays |= {f"{path.stem}/{view.name}/{name}": values for name, values in spectra.items()}
        run.add_readings([r for r in readings if _key(r) not in held], WRITER)
    run.add_arrays({name: values for name, values in arrays.items() if name not in names})
    write_atomically(path.with_suffix(".done"), b"")


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether no other process holds the folder; it is held until the block ends or the process."""
    lock = _lock()
    if lock is None or not folder.is_dir():
        yield folder.is_dir()
        return
    with open(folder / "analysis.lock", "wb") as file:
        try:
            lock(file.fileno())
        except OSError:
            yield False
            return
        yield True


def _lock() -> Callable[[int], None] | None:
    """The system's lock that ends with its process; None where there is none (Windows)."""
    try:
        import fcntl
    except ImportError:
        return None
    return lambda number: fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)


# ── the process ──


class Analysis:
    """The analysing process of one run, as the watcher sees it; it starts when there is work."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the process that was started last is at work."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process, unless it is at work or nothing waits; does not wait for it.

        Raises LevelheadError if it cannot be started.
        """
        if self.running or not _waiting(self.folder):
            return
        log = self.folder / _FOLDER / "analysis.log"
        try:
            with open(log, "ab") as errors:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "levelhead.training.snapshots", str(self.folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    cwd=self.folder,
                    env=_environment(os.environ),
                    start_new_session=True,  # Ctrl-C is for the training
                )
        except OSError as error:
            raise LevelheadError(
                f"the analysis of snapshots could not be started ({error.strerror or error}): run "
                f"python -m levelhead.training.snapshots {self.folder} later"
            ) from error

    def finish(self, seconds: float) -> bool:
        """Wait at most so long for all snapshots; returns whether they are done.

        A process that needs longer goes on by itself after the training has ended.
        """
        self.start()
        if self._process is not None:
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                # Somebody has to take note of its end.
                Thread(target=self._process.wait, daemon=True).start()
        return not _waiting(self.folder)

    def unfinished(self, seconds: float) -> list[str]:
        """`finish`, and what there is to say if they are not done."""
        if self.finish(seconds):
            return []
        return [
            "The analysis of snapshots was not done when training ended: it goes on by itself, or "
            "with python -m levelhead.training.snapshots and this folder."
        ]


def _environment(outer: Mapping[str, str]) -> dict[str, str]:
    """That of the training, but for one thread, no GPU, and this very package."""
    path = [str(_ROOT), *filter(None, [outer.get("PYTHONPATH")])]
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**outer, **one, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(path)}


def _main(arguments: Sequence[str]) -> Any:
    if len(arguments) != 1:
        return "give one argument: the folder of a watched run"
    if hasattr(os, "nice"):
        os.nice(19)
    try:
        analyse(arguments[0])
    except LevelheadError as error:
        return str(error)
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
