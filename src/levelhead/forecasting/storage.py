"""A fitted forecaster as two files: model.json and model.safetensors, never pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from levelhead.base.errors import InputError, LevelheadError, StoredFileError
from levelhead.base.files import write_atomically
from levelhead.data.frequency import parse_step, step_name
from levelhead.data.tables import Form, Table
from levelhead.data.windows import Scaler
from levelhead.forecasting.candidates import Blend, Candidate, Line, Network, SeasonalNaive
from levelhead.forecasting.intervals import Conformal
from levelhead.forecasting.selection import Choice
from levelhead.forecasting.state import FittedState
from levelhead.nn.samformer import SAMformerNet

__all__ = ["SCHEMA", "load", "save"]

SCHEMA = 1
_JSON, _ARRAYS = "model.json", "model.safetensors"

# What building a state raises on content that was not written by `save`.
_UNFIT = (LookupError, ValueError, TypeError, ArithmeticError, RuntimeError, AttributeError)

Arrays = dict[str, np.ndarray[Any, Any]]


def save(folder: Path, params: Mapping[str, Any], state: FittedState) -> Path:
    """Write `state` beside the estimator's parameters; each file is complete or absent."""
    arrays: Arrays = {}
    candidate = _candidate_record(state.chosen, arrays, "chosen")
    beside = {n: _candidate_record(c, arrays, f"beside.{n}") for n, c in state.beside.items()}
    arrays |= {"scaler.mean": state.scaler.mean, "scaler.deviation": state.scaler.deviation}
    arrays["tail.values"] = state.tail.values
    if state.conformal is not None:
        arrays["conformal.grid"] = state.conformal.grid
        arrays["conformal.pooled"] = state.conformal.pooled
    record = {
        "schema": SCHEMA,
        "params": _plain(dict(params)),
        "channels": list(state.channels),
        "targets": list(state.targets),
        "context": state.context,
        "horizon": state.horizon,
        "season": state.season,
        "any_channels": state.any_channels,
        "choice": None if state.choice is None else asdict(state.choice),
        "notes": list(state.notes),
        "calibration_windows": None if state.conformal is None else state.conformal.count,
        "candidate": candidate,
        "beside": beside,
        "tail": _table_record(state.tail),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LevelheadError(
            f"{folder} cannot be made a folder ({error.strerror or error}): choose another place"
        ) from error
    packed = save_arrays({k: np.ascontiguousarray(v) for k, v in arrays.items()})
    record["sha256"] = _digest(record, packed)
    write_atomically(folder / _ARRAYS, packed)
    write_atomically(folder / _JSON, json.dumps(record, indent=1).encode())
    return folder


def _digest(record: Mapping[str, Any], packed: bytes) -> str:
    """Of both files: a byte that changed, or halves of two models, would forecast nonsense."""
    own = {k: v for k, v in record.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode() + packed).hexdigest()


def load(folder: Path, *, device: str = "cpu") -> tuple[dict[str, Any], FittedState]:
    """(parameters, state) from a folder that `save` wrote."""
    try:
        record = json.loads((folder / _JSON).read_text(encoding="utf-8"))
        packed = (folder / _ARRAYS).read_bytes()
        arrays = load_arrays(packed)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoredFileError(
            f"{folder} holds no saved forecaster ({Path(error.filename).name} is missing): give "
            "the folder that save() wrote"
        ) from error
    except (ValueError, KeyError, RecursionError, SafetensorError, OSError) as error:
        raise StoredFileError(
            f"{folder} is truncated or damaged ({error}): save the forecaster again"
        ) from error
    if not isinstance(record, dict) or not isinstance(record.get("schema"), int):
        raise StoredFileError(
            f"{folder / _JSON} is not a saved forecaster: it has no schema number"
        )
    if record["schema"] > SCHEMA:
        raise StoredFileError(
            f"{folder} was written by a newer version (schema {record['schema']}, this one reads "
            f"up to {SCHEMA}): upgrade levelhead"
        )
    if record.get("sha256") != _digest(record, packed):
        raise StoredFileError(
            f"{folder} was altered, or its files are not of one model: save the forecaster again"
        )
    try:
        return record["params"], _state(record, arrays, device)
    except _UNFIT as error:
        reason = " ".join(str(error).split())  # torch's span several lines
        raise StoredFileError(
            f"{folder} does not fit together ({type(error).__name__}: {reason}): save the "
            "forecaster again"
        ) from error


def _state(record: dict[str, Any], arrays: Arrays, device: str) -> FittedState:
    channels, targets = tuple(record["channels"]), tuple(record["targets"])
    context, horizon = int(record["context"]), int(record["horizon"])
    conformal = None
    if record["calibration_windows"] is not None:
        grid = _shaped(arrays, "conformal.grid", (None, len(targets), horizon))
        pooled = _shaped(arrays, "conformal.pooled", (len(grid), horizon))
        conformal = Conformal(grid, pooled, int(record["calibration_windows"]))
    tail = _table(record["tail"], _shaped(arrays, "tail.values", (context, len(channels))))
    if set(tail.channels) != set(channels) or not set(targets) <= set(channels):
        raise ValueError("the channels of the table are not those of the model")
    size = (context, horizon)
    chosen = _candidate(record["candidate"], arrays, "chosen", size, device)
    beside = {
        n: _candidate(c, arrays, f"beside.{n}", size, device) for n, c in record["beside"].items()
    }
    return FittedState(
        channels=channels,
        targets=targets,
        context=context,
        horizon=horizon,
        season=int(record["season"]),
        scaler=Scaler(
            _shaped(arrays, "scaler.mean", (len(channels),)),
            _shaped(arrays, "scaler.deviation", (len(channels),)),
        ),
        chosen=chosen,
        conformal=conformal,
        tail=tail,
        any_channels=bool(record["any_channels"]),
        beside=beside,
        choice=None if record["choice"] is None else Choice(**record["choice"]),
        notes=tuple(record["notes"]),
        device=device,
    )


def _shaped(arrays: Arrays, name: str, shape: tuple[int | None, ...]) -> np.ndarray[Any, Any]:
    found = arrays[name]
    if len(found.shape) != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, found.shape, strict=True)
    ):
        raise ValueError(f"array {name} has shape {found.shape}, {shape} was expected")
    return found


def _candidate_record(candidate: Candidate, arrays: Arrays, at: str) -> dict[str, Any]:
    if isinstance(candidate, SeasonalNaive):
        return {"kind": "naive", "season": candidate.season}
    if isinstance(candidate, Line):
        arrays[f"{at}.head"] = candidate.head.cpu().numpy()
        return {"kind": "line", "penalty": candidate.penalty, "name": candidate.name}
    if isinstance(candidate, Network):
        net = candidate.net
        for name, tensor in net.state_dict().items():
            arrays[f"{at}.net.{name}"] = tensor.cpu().numpy()
        return {"kind": "network", "options": net.options}
    assert isinstance(candidate, Blend)
    members = [_candidate_record(m, arrays, f"{at}.{i}") for i, m in enumerate(candidate.members)]
    return {"kind": "blend", "weights": list(candidate.weights), "members": members}


def _candidate(
    record: dict[str, Any], arrays: Arrays, at: str, size: tuple[int, int], device: str
) -> Candidate:
    kind = record["kind"]
    if kind == "naive":
        season = int(record["season"])
        if not 1 <= season <= size[0]:
            raise ValueError(f"season {season} does not fit context {size[0]}")
        return SeasonalNaive(season, size[1])
    if kind == "line":
        head = torch.from_numpy(_shaped(arrays, f"{at}.head", size).copy())
        return Line(head, float(record["penalty"]), record["name"])
    if kind == "network":
        net = SAMformerNet(size[0], size[1], **record["options"])
        prefix = f"{at}.net."
        stored = {
            k.removeprefix(prefix): torch.from_numpy(v.copy())
            for k, v in arrays.items()
            if k.startswith(prefix)
        }
        net.load_state_dict(stored)
        return Network(net.to(device).eval())
    if kind == "blend":
        members = tuple(
            _candidate(m, arrays, f"{at}.{i}", size, device)
            for i, m in enumerate(record["members"])
        )
        if len(members) != len(record["weights"]):
            raise ValueError("a blend needs one weight per member")
        return Blend(members, tuple(float(w) for w in record["weights"]))
    raise ValueError(f"unknown kind of model {kind!r}")


def _table_record(table: Table) -> dict[str, Any]:
    time = table.time
    if isinstance(time, pd.DatetimeIndex):
        stamps: dict[str, Any] = {
            "ticks": time.asi8.tolist(),
            "unit": time.unit,
            "zone": None if time.tz is None else _zone_name(time.tz),
        }
    else:
        stamps = {"ticks": [int(t) for t in time], "unit": None, "zone": None}
    return {
        "channels": list(table.channels),
        "time": stamps,
        "step": step_name(table.step),
        "form": _plain(asdict(table.form)),
    }


def _zone_name(zone: Any) -> str:
    """The name by which a time zone is found again; a clear refusal if it has none."""
    name = str(zone)
    try:
        pd.Timestamp(0, tz=name)
    except (LookupError, ValueError, TypeError) as error:
        raise InputError(
            f"the time zone {name} has no name to store it by: convert the stamps to a named one, "
            "such as 'Europe/Berlin', before the fit"
        ) from error
    return name


def _table(record: dict[str, Any], values: np.ndarray[Any, Any]) -> Table:
    stamps = record["time"]
    time: pd.Index
    if stamps["unit"] is None:
        time = pd.Index(stamps["ticks"], dtype="int64")
    else:
        raw = np.asarray(stamps["ticks"], dtype="int64").view(f"M8[{stamps['unit']}]")
        time = pd.DatetimeIndex(raw)
        if stamps["zone"] is not None:
            time = time.tz_localize("UTC").tz_convert(stamps["zone"])
    if len(time) != len(values):
        raise ValueError(f"{len(time)} stamps for {len(values)} rows")
    form = Form(**{name: _as_tuples(value) for name, value in record["form"].items()})
    step = record["step"]
    return Table(
        np.ascontiguousarray(values),
        tuple(record["channels"]),
        time,
        parse_step(int(step) if stamps["unit"] is None else step, time),
        form,
    )


def _as_tuples(value: Any) -> Any:
    """JSON's lists as the tuples they were: a label of several levels must be hashable again."""
    return tuple(_as_tuples(v) for v in value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """JSON-able copy of parameters: sequences as lists, offsets by name; else a clear refusal."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, pd.tseries.offsets.BaseOffset):
        return step_name(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    raise InputError(
        f"a forecaster with a {type(value).__name__} among its parameters or column names cannot "
        "be saved: use plain text and numbers"
    )
