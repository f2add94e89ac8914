"""The page: one file, nothing loaded from elsewhere, every text escaped, nothing heavy imported."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from levelhead.base.errors import InputError, LevelheadError, StoredFileError
from levelhead.base.records import Figure, Run
from levelhead.report.document import write_report
from unit.report.examples import HOSTILE, hostile_run

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Reader(HTMLParser):
    """Elements, their attributes, and whether they are nested properly."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory) -> str:
    run = hostile_run(tmp_path_factory.mktemp("run") / "run")
    return write_report(run).read_text(encoding="utf-8")


def test_the_page_is_whole_and_loads_nothing(hostile_page):
    reader = Reader(hostile_page)
    assert reader.open == []
    forbidden = {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "image",
        "use",
        "base",
        "form",
    }
    assert not forbidden & set(reader.tags)
    names = {name for name, _ in reader.attributes}
    assert not {"src", "xlink:href", "srcset", "style", "onload", "onerror"} & names
    assert all((value or "").startswith("#") for name, value in reader.attributes if name == "href")
    style = hostile_page[hostile_page.index("<style>") : hostile_page.index("</style>")]
    assert not [word for word in ("url(", "@import", "http", "@font-face") if word in style]


def test_names_arrive_as_text(hostile_page):
    text = " ".join(Reader(hostile_page).text)
    for name in HOSTILE[:6]:
        assert name in text
    assert "\x00" not in hostile_page
    assert "control��[31m and lone surrogate �" in text


def test_every_drawing_is_described(hostile_page):
    parts = hostile_page.split('<svg class="drawing')[1:]
    assert len(parts) > 20
    for part in parts:
        head = part[: part.index("<desc>")]
        assert 'role="img"' in head
        assert 'aria-label="' in head
        assert "<title>" in head


def test_title_notes_and_settings_stand_on_the_page(tmp_path):
    settings = {"horizon": 96, "sam": {"rho": 0.7}, "coverage": [0.8, 0.95], "none": None}
    run = Run.create(tmp_path, title="A title", command="levelhead forecast x", settings=settings)
    run.add_notes(["One.", "Two & three."])
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "<h1>A title</h1>" in page
    assert '<p class="lead">One. Two &amp; three.</p>' in page
    rows = page[page.index('<details class="facts">') :]
    for name, value in {
        "horizon": "96",
        "sam.rho": "0.7",
        "coverage": "0.8, 0.95",
        "none": "–",
        "python": run.versions["python"],
    }.items():
        assert f'<tr><th scope="row">{name}</th><td>{value}</td></tr>' in rows


def test_a_run_without_notes_and_command_has_no_empty_paragraphs(tmp_path):
    run = Run.create(tmp_path, title="Bare", command=None, settings={})
    text = write_report(run).read_text(encoding="utf-8")
    assert '<p class="' not in text
    assert "<caption>Settings</caption>" not in text


def test_the_same_run_gives_the_same_bytes_wherever_it_is_written(tmp_path):
    run = hostile_run(tmp_path / "run")
    first = write_report(run)
    assert first == tmp_path / "run" / "report.html"
    second = write_report(str(run.folder), tmp_path / "other.html")
    assert second == tmp_path / "other.html"
    assert first.read_bytes() == second.read_bytes()


def test_errors_are_one_sentence(tmp_path):
    with pytest.raises(StoredFileError, match="is not a run folder"):
        write_report(tmp_path)
    run = Run.create(tmp_path / "run", title="t", command=None, settings={})
    with pytest.raises(InputError, match=r"ends in \.html is expected"):
        write_report(run, tmp_path)
    with pytest.raises(LevelheadError, match="could not be written"):
        write_report(run, tmp_path / "none" / "x.html")


def test_a_report_needs_nothing_heavy(tmp_path):
    hostile_run(tmp_path / "run")
    code = (
        "import sys; from levelhead.report.document import write_report; "
        "write_report(sys.argv[1]); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "levelhead.report.document" in done.stdout.split()
    assert not {"torch", "pandas", "scipy", "sklearn", "matplotlib"} & set(done.stdout.split())


def test_figures_of_one_fold_lie_in_it_and_long_pages_list_their_parts(tmp_path):
    run = Run.create(tmp_path, title="t", command=None, settings={})
    run.add_arrays({"v": np.ones((1, 1))})

    def figure(name: str, **axes: str) -> Figure:
        return Figure(name, "table", f"Title {name}", "Says.", {"values": "v"}, axes=axes)

    run.add_figures([figure("a"), figure("b", fold="One", open="yes"), figure("c", fold="One")])
    run.add_figures([figure("d", fold="Two")])
    page = write_report(run).read_text(encoding="utf-8")
    assert "<nav" not in page
    one, two = page.index("<summary>One"), page.index("<summary>Two")
    places = [page.index(f"<h2>Title {name}") for name in "abcd"]
    assert places[0] < one < places[1] < places[2] < page.index("</details>") < two < places[3]
    assert [tag.count(" open") for tag in re.findall(r"<details[^>]*>", page)] == [1, 0, 0]
    run.add_figures([figure(f"more {n}") for n in range(5)])
    page = write_report(run).read_text(encoding="utf-8")
    links = re.findall(r'<a href="#(.*?)">(.*?)</a>', page)
    titles = ["Title a", "One", "Two", *(f"Title more {n}" for n in range(5))]
    assert [title for _, title in links] == titles
    assert all(page.count(f'id="{target}"') == 1 for target, _ in links)
