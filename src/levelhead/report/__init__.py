"""From a run folder to one HTML file; reads records only, computes nothing.

`levelhead.report` is a folder and a function at once: `levelhead.report(run)` writes the page, as
`levelhead.report.document.write_report(run)` does. The template library loads when it is called.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from levelhead.base.records import Run

__all__: list[str] = []


class _Report(ModuleType):
    def __call__(
        self, run: Run | str | os.PathLike[str], out: str | os.PathLike[str] | None = None
    ) -> Path:
        """Write the report of `run`; see `levelhead.report.document.write_report`."""
        from levelhead.report.document import write_report

        return write_report(run, out)


sys.modules[__name__].__class__ = _Report
