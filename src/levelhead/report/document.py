"""The report of a run: one HTML file that needs no network, no fonts and no script.

It reads records only (settings, notes, arrays, Figures), so that a run can be shown without the
libraries that computed it.
"""

from __future__ import annotations

import os
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from levelhead.base.errors import InputError
from levelhead.base.files import write_atomically
from levelhead.base.records import Run
from levelhead.report.figures import draw
from levelhead.report.palette import SCHEMES
from levelhead.report.settings import flat
from levelhead.report.svg import clean

__all__ = ["write_report"]

# A page of more parts than this begins with a list of them.
MOST_WITHOUT_LIST = 7


def write_report(
    run: Run | str | os.PathLike[str], out: str | os.PathLike[str] | None = None
) -> Path:
    """Write the report of `run` to `out` (default: report.html in its folder); return the path.

    The page shows the title, the notes as one paragraph, the Figures in order, and folded at the
    end the settings and versions. Figures in a row that name the same "fold" among their axes lie
    in one fold of that name, which is open from the start if its first one has the axis "open";
    a page of many parts begins with a list of them. It follows the reader's light or dark scheme,
    prints, and fits screens from 360 pixels up.

    Raises `StoredFileError` when `run` is a folder that is not a run or holds a bad file,
    `InputError` when `out` is a folder or does not end in .html, or a Figure does not fit its
    arrays, `LevelheadError` when the file cannot be written.

    >>> import tempfile
    >>> run = Run.create(tempfile.mkdtemp(), title="A <try>", command=None, settings={})
    >>> path = write_report(run)
    >>> path.name, "A &lt;try&gt;" in path.read_text(encoding="utf-8")
    ('report.html', True)
    """
    if not isinstance(run, Run):
        run = Run.open(run)
    path = run.folder / "report.html" if out is None else Path(out)
    if path.is_dir() or path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"{path} was given: the name of a file that ends in .html is expected")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: clean(value) if type(value) is str else value,
    )
    template = environment.from_string(_stored("report.html.j2"))
    page = template.render(
        title=run.title,
        command=run.command,
        notes=run.notes(),
        parts=_parts(run),
        most_without_list=MOST_WITHOUT_LIST,
        settings=list(flat(run.settings)),
        versions=list(run.versions.items()),
        schemes=SCHEMES,
        drawing_style=Markup(_stored("drawing.css")),
    )
    return write_atomically(path, page.encode("utf-8"))


def _parts(run: Run) -> list[dict[str, Any]]:
    """Runs of Figures that lie in one fold, and Figures outside of any, each as a part."""
    parts: list[dict[str, Any]] = []
    for fold, figures in groupby(run.figures(), key=lambda figure: figure.axes.get("fold", "")):
        sections = [
            {"title": figure.title, "says": figure.says, "drawing": draw(figure, run), "open": o}
            for figure in figures
            for o in ["open" in figure.axes]
        ]
        if fold:
            parts.append({"title": fold, "sections": sections, "open": sections[0]["open"]})
        else:
            parts += [{"title": "", "sections": [section]} for section in sections]
    return parts


def _stored(name: str) -> str:
    return resources.files("levelhead.report").joinpath(name).read_text(encoding="utf-8")
