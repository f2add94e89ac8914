"""How often the alarms are right: measured rates that are shipped with the package.

The file `alarm_rates.json` beside this module is written by the harness that measures them:

    {"command": "…", "alarms": {"dead_head": {"planted": 20, "recall": 1.0, "recall_low": 0.83,
     "null_steps": 75000, "false_per_1000": 0.0, "false_high": 0.05}, …}}

`recall_low` and `false_high` are the unfavourable ends of 95 % intervals, of a share
(Clopper-Pearson) and of a Poisson count (Garwood). The harness is `levelhead study alarms`;
`studies.alarms_conclusions.write_rates` also writes the seeds, settings and thresholds of the
measurement into the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources

from levelhead.base.errors import StoredFileError
from levelhead.training.alarm_rules import ALARMS

__all__ = ["NOT_MEASURED", "Rate", "Rates", "shipped_rates"]

NOT_MEASURED = "How often these alarms are right has not been measured for this version."


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Of one alarm: share of planted pathologies it found, false alarms per 1,000 null steps."""

    planted: int
    recall: float
    recall_low: float
    null_steps: int
    false_per_1000: float
    false_high: float


@dataclass(frozen=True)
class Rates:
    """The rates by name of the alarm, and the command that measures them again."""

    alarms: Mapping[str, Rate] = field(default_factory=dict)
    command: str = ""

    def says(self) -> str:
        """One sentence with the worst of them.

        >>> Rates().says()
        'How often these alarms are right has not been measured for this version.'
        """
        if not self.alarms:
            return NOT_MEASURED
        rates = self.alarms.values()
        recall = min(rates, key=lambda rate: rate.recall_low)
        false = max(rates, key=lambda rate: rate.false_high)
        return (
            f"Measured on held-out runs: of planted pathologies each alarm finds at least "
            f"{recall.recall:.0%} (95 % bound {recall.recall_low:.0%}, {recall.planted} runs); "
            f"false alarms per 1,000 steps of healthy runs are at most {false.false_per_1000:.3g} "
            f"(bound {false.false_high:.3g}, {false.null_steps:,} steps)."
        )


def shipped_rates(text: str | None = None) -> Rates:
    """The rates shipped with this version (or those in `text`); empty if there are none.

    Raises `StoredFileError` for a file that is not as the top of the module says.

    >>> shipped_rates('{"alarms": {}}').alarms
    {}
    """
    if text is None:
        file = resources.files("levelhead.training").joinpath("alarm_rates.json")
        if not file.is_file():
            return Rates()
        text = file.read_text(encoding="utf-8")
    try:
        stored = json.loads(text)
        named = {name: stored["alarms"][name] for name in ALARMS if name in stored["alarms"]}
        parts = [part.name for part in fields(Rate)]
        alarms = {n: Rate(**{part: rate[part] for part in parts}) for n, rate in named.items()}
        return Rates(alarms, str(stored.get("command", "")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoredFileError(
            f"alarm_rates.json of the installed package is altered ({error!r}): install it again."
        ) from error
