"""Rates of the alarms from what planted and null runs left behind, with exact bounds.

Recall is a share of planted runs, with Clopper-Pearson bounds; false alarms are counted over steps
of healthy training (null runs, and planted runs before their onset), with Poisson (Garwood) bounds.
An alarm counts once for each name, layer, head and step since which it holds. Alarms of planted
runs before the onset are false; those after it which the fault does not explain are shown apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from scipy.stats import beta, chi2

from levelhead.base.errors import StoredFileError
from levelhead.base.files import write_json
from levelhead.base.records import Reading, Run
from levelhead.studies.alarms_trainings import NULL
from levelhead.studies.study import Findings, Outcome, Statement, Table
from levelhead.training.alarms import ALARMS, Thresholds

__all__ = [
    "HALVES",
    "HELD_OUT",
    "RECALL",
    "WOLF",
    "conclude",
    "poisson_bounds",
    "share_bounds",
    "write_rates",
]

Half = Literal["development", "held-out"]
HALVES: tuple[Half, ...] = ("development", "held-out")
HELD_OUT = 2000
"""The first seed of the held-out half."""
RECALL, WOLF = 0.95, 0.02
"""The targets: least recall, most false alarms per 1,000 steps."""
_LEVEL = 0.95
_RATE = ("planted", "recall", "recall_low", "null_steps", "false_per_1000", "false_high")


def share_bounds(found: int, of: int, level: float = _LEVEL) -> tuple[float, float]:
    """Clopper-Pearson bounds of a share `found` / `of`; (0, 1) for of = 0.

    >>> [round(bound, 4) for bound in share_bounds(20, 20)]
    [0.8316, 1.0]
    """
    tail = (1 - level) / 2
    low = float(beta.ppf(tail, found, of - found + 1)) if found else 0.0
    high = float(beta.ppf(1 - tail, found + 1, of - found)) if found < of else 1.0
    return low, high


def poisson_bounds(count: int, level: float = _LEVEL) -> tuple[float, float]:
    """Garwood's bounds of the mean of a Poisson count.

    >>> [round(bound, 3) for bound in poisson_bounds(0)]
    [0.0, 3.689]
    """
    tail = (1 - level) / 2
    low = float(chi2.ppf(tail, 2 * count)) / 2 if count else 0.0
    return low, float(chi2.ppf(1 - tail, 2 * count + 2)) / 2


@dataclass(frozen=True)
class _Rate:
    """One alarm in one half: planted and found runs, steps of healthy training, false alarms.

    delays, since [found]: steps from the onset to the alarm, and to where it says that it began;
    harmful: how many of those found were called so.
    """

    planted: int
    found: int
    delays: tuple[float, ...]
    since: tuple[float, ...]
    harmful: int
    steps: float
    false: int

    @property
    def row(self) -> list[float]:
        """Numbers in the order of `_RATE`."""
        recall = self.found / self.planted if self.planted else np.nan
        per = 1000 / self.steps if self.steps else np.nan
        low, _ = share_bounds(self.found, self.planted)
        _, high = poisson_bounds(self.false)
        return [self.planted, recall, low, self.steps, self.false * per, high * per]


def _halved(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, Outcome]]:
    return {
        half: {n: o for n, o in outcomes.items() if n.split("-", 1)[1].startswith(half)}
        for half in HALVES
    }


def _rate(outcomes: Iterable[Outcome], alarm: str) -> _Rate:
    readings = [r for outcome in outcomes for r in outcome.readings]
    mine = [r for r in readings if r.where.get("fault") == alarm]
    found = [r.value for r in mine if r.name == "found"]
    steps = "sharp_steps" if alarm == "sharpness_spike" else "steps"
    return _Rate(
        planted=len(found),
        found=int(sum(found)),
        delays=tuple(r.value for r in mine if r.name == "delay"),
        since=tuple(r.value for r in mine if r.name == "since"),
        harmful=int(sum(r.value for r in mine if r.name == "harmful")),
        steps=sum(r.value for r in readings if r.name == steps),
        false=int(_sum(readings, "false", alarm)),
    )


def _sum(readings: Iterable[Reading], name: str, alarm: str) -> float:
    return sum(r.value for r in readings if r.name == name and r.where.get("alarm") == alarm)


def conclude(
    outcomes: Mapping[str, Outcome], targets: bool, run: Sequence[Half] = HALVES
) -> Findings:
    """Tables of both halves, and a statement for each alarm.

    Args:
        targets: whether these statements must hold; without the held-out half they need not.
        run: the halves that were run.
    """
    halves = _halved(outcomes)
    rates = {h: {a: _rate(o.values(), a) for a in ALARMS} for h, o in halves.items()}
    held = rates["held-out"]
    tables = [_recall(half, rates[half]) for half in reversed(HALVES)]
    tables += [_false(half, halves[half]) for half in reversed(HALVES)]
    tables.append(
        Table(
            "rates",
            "Rates that the reports quote",
            "Held-out half, with the unfavourable ends of 95 % bounds.",
            list(ALARMS),
            list(_RATE),
            np.array([held[a].row for a in ALARMS]),
            row_axis="alarm",
        )
    )
    tables.append(_ways(outcomes.values()))
    tables.append(_also(outcomes.values()))
    must = targets and "held-out" in run
    statements = [_balanced({half: rates[half] for half in run})]
    statements += [_statement(alarm, held[alarm], must) for alarm in ALARMS]
    return Findings(tables=tables, statements=statements, conclusion=[_says(held)])


def _recall(half: str, rates: Mapping[str, _Rate]) -> Table:
    rows = []
    for alarm in ALARMS:
        rate = rates[alarm]
        low, high = share_bounds(rate.found, rate.planted)
        late = np.quantile(rate.delays, [0.5, 0.9]) if rate.delays else (np.nan, np.nan)
        since = np.median(rate.since) if rate.since else np.nan
        recall = rate.found / rate.planted if rate.planted else np.nan
        rows.append([rate.planted, rate.found, recall, low, high, *late, since, rate.harmful])
    columns = ["planted", "found", "recall", "low", "high", "median delay", "90 % delay",
               "median since", "harmful"]  # fmt: skip
    return Table(
        f"recall-{half}",
        f"Planted faults that were found, {half} seeds",
        "Recall with 95 % Clopper-Pearson bounds; delays (of the alarm, and of the step that it "
        "names as the beginning) are in steps from the onset on; harmful: found and called so.",
        list(ALARMS),
        columns,
        np.array(rows, float),
        row_axis="alarm",
    )


def _false(half: str, outcomes: Mapping[str, Outcome]) -> Table:
    kinds = {kind: [o for n, o in outcomes.items() if n.startswith(f"null-{half}-{kind}-")]
             for kind in NULL}  # fmt: skip
    kinds["before the onset"] = [o for n, o in outcomes.items() if n.startswith("planted")]
    kinds["all"] = list(outcomes.values())
    rows = []
    for some in kinds.values():
        readings = [r for outcome in some for r in outcome.readings]
        steps = [sum(r.value for r in readings if r.name == n) for n in ("steps", "sharp_steps")]
        rows.append([*steps, *(_sum(readings, "false", alarm) for alarm in ALARMS)])
    return Table(
        f"false-{half}",
        f"False alarms in healthy training, {half} seeds",
        "Numbers of alarms; sharpness is watched in some of the steps only.",
        list(kinds),
        ["steps", "steps with sharpness", *ALARMS],
        np.array(rows, float),
        row_axis="kind",
    )


def _ways(outcomes: Iterable[Outcome]) -> Table:
    readings = [r for o in outcomes for r in o.readings if r.name in ("found", "delay")]
    ways = sorted({(str(r.where["fault"]), str(r.where["way"])) for r in readings})
    rows = []
    for fault, way in ways:
        mine = [r for r in readings if (r.where["fault"], r.where["way"]) == (fault, way)]
        found = [r.value for r in mine if r.name == "found"]
        delays = [r.value for r in mine if r.name == "delay"]
        rows.append([len(found), sum(found), np.median(delays) if delays else np.nan])
    return Table(
        "ways",
        "Planted faults by how they were done, all seeds",
        "What each way does stands in `studies/alarms_faults.py`.",
        [f"{fault}: {way}" for fault, way in ways],
        ["planted", "found", "median delay"],
        np.array(rows, float).reshape(-1, 3),
        row_axis="fault",
    )


def _also(outcomes: Iterable[Outcome]) -> Table:
    readings = [r for outcome in outcomes for r in outcome.readings if r.name in ("also", "found")]
    rows: list[list[float]] = []
    for fault in ALARMS:
        mine = [r for r in readings if r.where["fault"] == fault]
        runs = sum(r.name == "found" for r in mine)
        also = [r for r in mine if r.name == "also"]
        counts = [float(sum(r.where["alarm"] == a for r in also)) for a in ALARMS]
        strange = sum(r.value for r in also if not r.where["explained"])
        rows.append([float(runs), *counts, strange])
    return Table(
        "also",
        "What else is raised after the onset, all seeds",
        "Runs in which a fault raised other alarms (its own name: in other places, or again); "
        "last column: alarms that are no consequence of the fault.",
        list(ALARMS),
        ["runs", *ALARMS, "unexplained"],
        np.array(rows),
        row_axis="fault",
    )


def _balanced(rates: Mapping[str, Mapping[str, _Rate]]) -> Statement:
    """What makes rates of seven alarms and two halves comparable."""
    planted = {rate.planted for half in rates.values() for rate in half.values()}
    steps = [{rate.steps > 0 for rate in half.values()} for half in rates.values()]
    return Statement(
        name="balanced",
        claim="Each alarm has equally many planted runs in each half, and healthy steps.",
        holds=len(planted) == 1 and 0 not in planted and all(some == {True} for some in steps),
        evidence=f"Planted runs of an alarm in a half: {', '.join(map(str, sorted(planted)))}.",
    )


def _statement(alarm: str, rate: _Rate, expected: bool) -> Statement:
    planted, recall, low, steps, false, high = rate.row
    judged = planted > 0 and steps > 0
    return Statement(
        name=alarm,
        claim=f"The alarm {alarm} finds at least {RECALL:.0%} of what is planted, and is false at "
        f"most {WOLF:g} times in 1,000 steps.",
        holds=bool(recall >= RECALL and false <= WOLF) if judged else None,
        evidence=f"Held-out: {rate.found} of {planted:.0f} found (bound {low:.3f}), {rate.false} "
        f"false alarms in {steps:,.0f} steps, {false:.3g} in 1,000 (bound {high:.3g}).",
        expected=expected,
    )


def _says(rates: Mapping[str, _Rate]) -> str:
    planted = sum(rate.planted for rate in rates.values())
    found = sum(rate.found for rate in rates.values())
    false = sum(rate.false for rate in rates.values())
    steps = max(rate.steps for rate in rates.values())
    return (
        f"Held-out: {found} of {planted} planted faults were found, and all alarms together were "
        f"false {false} times in {steps:,.0f} healthy steps."
    )


# ── what is shipped ──


def write_rates(study: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Write the rates of a finished study in `study` as the JSON file that the package ships.

    Besides the rates it holds the command, the seeds and the thresholds they were measured at.
    Raises StoredFileError if the folder holds no such study.

        write_rates("study-alarms", "src/levelhead/training/alarm_rates.json")
    """
    run = Run.open(study)
    settings = run.settings
    if settings.get("study") != "alarms" or "table.rates" not in run.array_names():
        raise StoredFileError(f"{os.fspath(study)} holds no finished study of the alarms")
    rates = {
        alarm: dict(zip(_RATE, _plain(row), strict=True))
        for alarm, row in zip(ALARMS, run.array("table.rates"), strict=True)
    }
    content = {
        "command": "levelhead study alarms --full",
        "seeds": {
            half: {"planted": _range(first, settings["seeds"]),
                   "null": _range(first, settings["null_seeds"])}
            for half, first in zip(HALVES, (0, HELD_OUT), strict=True)
        },
        "settings": {k: v for k, v in settings.items() if k not in ("study", "keep", "threads")},
        "thresholds": asdict(Thresholds()),
        "alarms": rates,
    }  # fmt: skip
    write_json(Path(path), content)


def _range(first: int, count: int) -> str:
    return f"{first}-{first + count - 1}"


def _plain(row: Sequence[float]) -> list[float | int]:
    values = [float(f"{value:.4g}") for value in row]
    return [int(row[i]) if name in ("planted", "null_steps") else values[i]
            for i, name in enumerate(_RATE)]  # fmt: skip
