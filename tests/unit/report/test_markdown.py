"""The Markdown page: everything the records hold, nothing that Markdown would read as markup."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from levelhead.base.errors import InputError, LevelheadError
from levelhead.base.records import Figure, Run
from levelhead.report.markdown import write_markdown
from unit.report.examples import hostile_run


def run_with(folder, figures, arrays):
    run = Run.create(folder, title="Try", command="study toy", settings={"a": {"b": 1}})
    run.add_arrays(arrays)
    run.add_figures(figures)
    return run


def cells(line):
    """Cells of a table's line, at the bars that are not escaped."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_a_table_is_a_markdown_table(tmp_path):
    figure = Figure(
        "errors",
        "table",
        "Errors",
        "By arm.",
        {"values": "v"},
        axes={"rows": "arm", "best": "min"},
        labels={"rows": ["a|b", "line"], "columns": ["mse", "mae"], "notes": ["x*y", "–"]},
        units={"mae": "m/s"},
    )
    run = run_with(tmp_path / "run", [figure], {"v": np.array([[0.5, 2.0], [0.25, 3.0]])})
    lines = write_markdown(run, tmp_path / "page.md").read_text(encoding="utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("| arm"))
    assert [cells(line) for line in lines[at : at + 4]] == [
        ["arm", "mse", "mae m/s", "notes"],
        [":--", "--:", "--:", ":--"],
        [r"a\|b", "0.5000", "**2**", r"x\*y"],
        ["line", "**0.2500**", "3", "–"],
    ]
    assert "The smallest value of each column is in bold." in lines
    assert "| a.b | 1 |" in lines
    assert "`levelhead study toy`, with the settings at the end." in lines
    assert not (tmp_path / "page").exists()


def test_a_chart_is_a_file_with_its_legend_and_style(tmp_path):
    names = [f"series number {i}" for i in range(8)]
    figure = Figure(
        "loss",
        "lines",
        "Loss",
        "It falls.",
        {"x": "x", "y": "y"},
        axes={"x": "epoch", "fold": "Curves"},
        labels={"series": names},
    )
    arrays = {"x": np.arange(30.0), "y": np.arange(240.0).reshape(8, 30)}
    run = run_with(tmp_path / "run", [figure], arrays)
    page = write_markdown(run, tmp_path / "page.md").read_text(encoding="utf-8")
    assert "\n## Curves\n" in page
    assert "\n### Loss\n" in page
    assert "![Loss](page/01-loss.svg)" in page
    drawn = ElementTree.parse(tmp_path / "page" / "01-loss.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    legend = [e for e in drawn.findall(f"{space}text") if e.text in names]
    assert [e.text for e in legend] == names
    assert len({e.get("y") for e in legend}) > 1  # eight long names need a second row
    assert all(float(e.get("x")) < 900 for e in legend)
    style = drawn.find(f"{space}style").text
    assert "prefers-color-scheme:dark" in style
    assert ".s5 { stroke: var(--series-5); }" in style
    inner = [e for e in drawn.findall(f"{space}svg") if e.get("class") == "drawing wide"]
    assert len(inner) == 1
    # The legend lies above the drawing, and all of it inside of the picture.
    top, height = float(inner[0].get("y")), float(inner[0].get("height"))
    assert max(float(e.get("y")) for e in legend) < top
    assert top + height <= float(drawn.get("height"))


def test_the_scale_of_a_heatmap_is_said(tmp_path):
    figure = Figure("a", "heatmap", "A", "It.", {"values": "v"}, units={"values": "nat"})
    run = run_with(tmp_path / "run", [figure], {"v": np.array([[0.0, 1.0], [0.5, 0.25]])})
    page = write_markdown(run, tmp_path / "page.md").read_text(encoding="utf-8")
    assert "Colours from 0 to 1.00 nat." in page


def test_hostile_records_make_a_page_that_says_them(tmp_path):
    run = hostile_run(tmp_path / "run")
    page = write_markdown(run, tmp_path / "a page.md").read_text(encoding="utf-8")
    outside = re.sub(r"`[^`\n]*`", "", page)  # a span of code shows what is in it
    assert not re.search(r"(?<!\\)<", outside)
    assert r"\<script\>window.hostile" in page  # said, not dropped
    shown = re.findall(r"\]\((a%20page/[^)]+\.svg)\)", page)
    assert shown
    for name in shown:
        root = ElementTree.parse(tmp_path / name.replace("%20", " ")).getroot()
        tags = {element.tag.rsplit("}", 1)[-1] for element in root.iter()}
        assert "script" not in tags
        assert "foreignObject" not in tags
    tables = [line for line in page.splitlines() if line.startswith("| ")]
    assert tables


def test_it_says_what_is_not_a_page(tmp_path):
    run = Run.create(tmp_path / "run", title="Try", command=None, settings={})
    for wrong in (tmp_path / "page.html", tmp_path):
        with pytest.raises(InputError, match=r"ends in \.md"):
            write_markdown(run, wrong)
    with pytest.raises(InputError, match=r"no folder .*nowhere for the page: make it first"):
        write_markdown(run, tmp_path / "nowhere" / "page.md")


def test_words_are_shown_as_they_are(tmp_path):
    run = Run.create(tmp_path / "run", title="1. first", command=None, settings={})
    run.add_notes(["- minus & $x$", "12) more", "-0.5 stays", "snake_case and _under_"])
    page = write_markdown(run, tmp_path / "page.md").read_text(encoding="utf-8").splitlines()
    assert page[0] == r"# 1\. first"
    assert [line for line in page if line.startswith("- ")] == [
        r"- \- minus \& \$x\$",
        r"- 12\) more",
        "- -0.5 stays",
        r"- snake_case and \_under\_",
    ]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    figure = Figure("a", "heatmap", "A", "It.", {"values": "v"})
    run = run_with(tmp_path / "run", [figure], {"v": np.eye(2)})
    (tmp_path / "page").write_text("in the way")
    with pytest.raises(LevelheadError, match="cannot be made a folder"):
        write_markdown(run, tmp_path / "page.md")
