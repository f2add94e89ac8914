"""The studies by name; adding one means adding a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from levelhead.base.errors import InputError
from levelhead.studies.alarms import STUDY as ALARMS
from levelhead.studies.collapse import STUDY as COLLAPSE
from levelhead.studies.forecasting import STUDY as FORECASTING
from levelhead.studies.stability import STUDY as STABILITY
from levelhead.studies.study import Study
from levelhead.studies.toy import STUDY as TOY

__all__ = ["STUDIES", "find_study"]

STUDIES: Mapping[str, Study[Any]] = {
    study.name: study for study in (TOY, FORECASTING, COLLAPSE, STABILITY, ALARMS)
}


def find_study(name: str) -> Study[Any]:
    """The study of that name.

    >>> find_study("toy").title
    'Why transformers fail on a linear problem'
    """
    if name not in STUDIES:
        raise InputError(f"there is no study {name!r}: choose from {', '.join(STUDIES)}")
    return STUDIES[name]
