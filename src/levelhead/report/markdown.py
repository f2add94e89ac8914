"""The report of a run as Markdown, for repositories and wikis: a page, and a folder of drawings.

It says and shows what the HTML page does: tables become Markdown tables, every other Figure one
SVG file with its legend and its own style, which follows the reader's light or dark scheme.

The HTML of `report.figures.draw` is read back, so that there is one place that draws. Lengths are
in units of the view box; a drawing is as wide as the wide one of the page.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib import resources
from itertools import groupby
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from markupsafe import Markup

from levelhead.base.errors import InputError, LevelheadError
from levelhead.base.files import write_atomically
from levelhead.base.records import Figure, Run
from levelhead.report.figures import draw
from levelhead.report.palette import SCHEMES
from levelhead.report.parts import WIDE
from levelhead.report.settings import flat
from levelhead.report.svg import clean, tag, text_width

__all__ = ["write_markdown"]

_LINE, _SWATCH, _GAP, _MARGIN = 20.0, 22.0, 22.0, 8.0


def write_markdown(run: Run | str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Write the report of `run` to the page `out` and drawings to a folder beside; return the page.

    The drawings of `toy.md` lie in the folder `toy`, numbered as the Figures are; files of that
    folder with other names are left alone.

    Raises `StoredFileError` when `run` is a folder that is not a run or holds a bad file,
    `InputError` when `out` is a folder, does not end in .md or lies in no folder, or a Figure does
    not fit its arrays, `LevelheadError` when a file cannot be written.

    >>> import tempfile
    >>> run = Run.create(tempfile.mkdtemp(), title="A <try>", command=None, settings={"seed": 1})
    >>> page = write_markdown(run, run.folder / "try.md")
    >>> page.read_text(encoding="utf-8").splitlines()[0]
    '# A \\\\<try\\\\>'
    """
    page = Path(out)
    if page.is_dir() or page.suffix.lower() != ".md":
        raise InputError(f"{page} was given: the name of a file that ends in .md is expected")
    if not page.parent.is_dir():
        raise InputError(f"there is no folder {page.parent} for the page: make it first")
    if not isinstance(run, Run):
        run = Run.open(run)
    lines = [f"# {_text(run.title)}", ""]
    if run.command:
        lines += [f"`levelhead {_code(run.command)}`, with the settings at the end.", ""]
    lines += [f"- {_text(note)}" for note in run.notes()]
    figures = list(enumerate(run.figures(), 1))
    for fold, group in groupby(figures, key=lambda pair: pair[1].axes.get("fold", "")):
        lines += ["", f"## {_text(fold)}"] if fold else []
        for place, figure in group:
            lines += ["", f"{'###' if fold else '##'} {_text(figure.title)}", ""]
            lines += [_text(figure.says), "", *_shown(figure, run, page, place)]
    lines += ["", "## Settings and versions", "", "| name | value |", "|---|---|"]
    # Where it ran is the reader's of the run folder to know, not that of a page for everybody.
    versions = {name: value for name, value in run.versions.items() if name != "platform"}
    rows = [*flat(run.settings), *versions.items()]
    lines += [f"| {_text(name)} | {_text(str(value))} |" for name, value in rows]
    return write_atomically(page, ("\n".join(lines) + "\n").encode("utf-8"))


def _shown(figure: Figure, run: Run, page: Path, place: int) -> list[str]:
    """The lines that show a Figure; writes its drawing, if it is one."""
    drawn = ElementTree.fromstring(f"<div>{draw(figure, run)}</div>")
    remarks = [_words(found) for found in drawn.iter("p")]
    lines = []
    table = drawn.find(".//table")
    if table is not None:
        lines = _table(table)
    elif (pictures := _pictures(drawn)) != []:
        slug = re.sub(r"[^a-z0-9]+", "-", figure.name.lower()).strip("-") or figure.kind
        name = f"{place:02d}-{slug[:60]}.svg"
        folder = page.with_suffix("")
        if not folder.is_dir():
            try:
                folder.mkdir()
            except OSError as error:
                raise LevelheadError(
                    f"{folder} cannot be made a folder ({error.strerror or error}): choose another "
                    "name for the page"
                ) from error
        write_atomically(folder / name, str(_standalone(drawn, pictures, figure)).encode("utf-8"))
        lines = [f"![{_text(figure.title)}]({quote(f'{folder.name}/{name}')})"]
    scale = drawn.find(".//div[@class='scale']")
    if scale is not None:
        low, high, unit = ([_words(e) for e in scale.findall("span")] + [""])[:3]
        remarks.insert(0, f"Colours from {low} to {high}{' ' if unit else ''}{unit}.")
    said = " ".join(remark for remark in remarks if remark)
    return [*lines, *(["", _text(said)] if said else [])]


# ── tables ──


def _table(table: Element) -> list[str]:
    rows = [[_cell(cell) for cell in row] for row in table.iter("tr")]
    marks = [":--" if i == 0 or cell == "notes" else "--:" for i, cell in enumerate(rows[0])]
    return [_row(rows[0]), _row(marks), *map(_row, rows[1:])]


def _cell(cell: Element) -> str:
    words = _text(_words(cell))
    return f"**{words}**" if cell.get("class") == "best" else words


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


# ── drawings ──


def _pictures(drawn: Element) -> list[tuple[str, Element]]:
    """Name (of a panel, or none) and drawing, each in the wider of the two that a page has."""
    above = {child: parent for parent in drawn.iter() for child in parent}
    found = []
    for picture in drawn.iter("svg"):
        classes = str(picture.get("class")).split()
        if "drawing" in classes and "narrow" not in classes:
            caption = above[picture].find("figcaption")
            found.append(("" if caption is None else _words(caption), picture))
    return found


def _standalone(drawn: Element, pictures: list[tuple[str, Element]], figure: Figure) -> Markup:
    """One SVG: the legend, then the drawings below one another."""
    content, y = _legend(drawn)
    width = max(WIDE, *(float(p.get("width", WIDE)) + 2 * _MARGIN for _, p in pictures))
    for name, picture in pictures:
        if name:
            content.append(tag("text", name, class_="label", x=_MARGIN, y=y + 14))
            y += _LINE
        picture.set("x", f"{_MARGIN:g}")
        picture.set("y", f"{y:g}")
        y += float(picture.get("height", 0)) + _MARGIN
        content.append(Markup(ElementTree.tostring(picture, encoding="unicode")))
    return tag(
        "svg",
        tag("title", figure.title),
        tag("style", Markup(_style())),
        tag("rect", class_="paper", width=width, height=y),
        *content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {y:.0f}",
        width=width,
        height=y,
        class_="drawing",
    )


def _legend(drawn: Element) -> tuple[list[Markup], float]:
    """Swatches with names, in as many rows as they need, and where the next thing begins."""
    x, y = _MARGIN, _MARGIN
    content: list[Markup] = []
    for entry in drawn.findall(".//ul[@class='key']/li"):
        swatch, words = entry.find("svg"), _words(entry)
        room = (_SWATCH + 8 if swatch is not None else 0.0) + text_width(words) + _GAP
        if x > _MARGIN and x + room > WIDE:
            x, y = _MARGIN, y + _LINE
        at = x
        if swatch is not None:
            for name, value in {"x": x, "y": y + 1, "width": _SWATCH, "height": 10}.items():
                swatch.set(name, f"{value:g}")
            content.append(Markup(ElementTree.tostring(swatch, encoding="unicode")))
            at += _SWATCH + 8
        content.append(tag("text", words, class_="label", x=at, y=y + 10))
        x += room
    return content, y + _LINE if content else y


def _style() -> str:
    """Style sheet of a drawing on its own; no sign in it needs escaping in XML."""

    def colours(scheme: str) -> str:
        return "".join(f"--{name}:{value};" for name, value in SCHEMES[scheme].items())

    css = resources.files("levelhead.report").joinpath("drawing.css").read_text(encoding="utf-8")
    return (
        f"svg{{{colours('light')}font:12px system-ui,'DejaVu Sans',sans-serif}}"
        ".light-dark{fill:var(--dark-text)}.light-light{fill:var(--light-text)}"
        f"@media (prefers-color-scheme:dark){{svg{{{colours('dark')}}}"
        ".dark-dark{fill:var(--dark-text)}.dark-light{fill:var(--light-text)}}"
        f".paper{{fill:var(--paper)}}{' '.join(css.split())}"
    )


# ── text ──


def _words(element: Element) -> str:
    """All text below an element but titles, on one line."""
    parts = [element.text or ""]
    for child in element:
        parts += ["" if child.tag == "title" else f" {_words(child)}", child.tail or ""]
    return " ".join("".join(parts).split())


def _text(words: str) -> str:
    """Words that Markdown shows as they are."""
    # An underscore inside of a word is one already.
    escaped = re.sub(r"([\\`*\[\]<>|#~&$]|(?<!\w)_|_(?!\w))", r"\\\1", clean(words))
    return re.sub(r"^(\s*)([-+]|\d+[.)])(?=\s)", _not_a_list, escaped)


def _not_a_list(found: re.Match[str]) -> str:
    sign = found[2]
    return f"{found[1]}{sign[:-1]}\\{sign[-1]}"


def _code(words: str) -> str:
    return clean(words).replace("`", "'")
