"""Drawings are read back: marks are turned into values through the labels a reader would use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from xml.etree import ElementTree

import numpy as np
import pytest

from levelhead.base.errors import InputError
from levelhead.base.records import Figure, Run
from levelhead.report.figures import draw
from levelhead.report.palette import SCHEMES, SERIES, blend, contrast, inks, opacity
from levelhead.report.svg import shorten, text_width


class Page:
    """A drawing as a tree of elements."""

    def __init__(self, markup: str) -> None:
        self.root = ElementTree.fromstring(f"<page>{markup}</page>")

    def all(self, tag: str, class_: str = "", inside: str = "drawing") -> list:
        """Elements of a tag and class; inside drawings only (of the wide page if there are two)."""
        roots = [e for e in self.root.iter("svg") if inside in e.get("class", "").split()]
        roots = [e for e in roots if "narrow" not in e.get("class", "").split()]
        found = [e for root in roots or [self.root] for e in root.iter(tag)]
        return [e for e in found if not class_ or class_ in e.get("class", "").split()]

    def texts(self, tag: str, class_: str = "") -> list[str]:
        return [e.text or "" for e in self.all(tag, class_)]

    def remark(self) -> str:
        return " ".join(e.text for e in self.root.iter("p") if e.get("class") == "remark")

    def y_value(self, log: bool = False):
        """Map from heights to values, calibrated by two labels beside horizontal rules."""
        rules = self.all("line", "rule")
        labels = [e for e in self.all("text", "tick") if e.get("text-anchor") == "end"]
        heights = np.array([float(e.get("y1")) for e in rules])
        values = np.array([float(e.text.replace("−", "-").replace("\u202f", "")) for e in labels])
        values = np.log(values) if log else values
        slope, start = np.polyfit(heights, values, 1)
        np.testing.assert_allclose(slope * heights + start, values, atol=1e-2 * np.ptp(values))
        return lambda y: np.exp(slope * y + start) if log else slope * y + start


def points(path: str) -> list[np.ndarray]:
    """Pieces of a path, each [n, 2]."""
    pieces = [piece for piece in path.replace("Z", "").split("M") if piece]
    return [np.array(re.findall(r"(-?[\d.]+) (-?[\d.]+)", piece), float) for piece in pieces]


@pytest.fixture
def show(tmp_path):
    """Draw a figure from arrays."""
    run = Run.create(tmp_path, title="t", command=None, settings={})

    def show(kind: str, arrays: Mapping[str, np.ndarray], **parts) -> Page:
        name = f"f{len(run.array_names())}"
        run.add_arrays({f"{name}.{role}": array for role, array in arrays.items()})
        roles = {role: f"{name}.{role}" for role in arrays}
        return Page(draw(Figure(name, kind, "Title", "Says.", roles, **parts), run))

    return show


# ── fan ──


def _fan(channels: int = 1, past: int = 20, ahead: int = 5, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    middle = rng.normal(size=(ahead, channels)) * 3 + 20
    half = np.ones((ahead, channels))
    return {
        "history": rng.normal(size=(past, channels)) * 3 + 20,
        "forecast": middle,
        "lower": np.stack([middle - half, middle - 3 * half]),
        "upper": np.stack([middle + half, middle + 3 * half]),
    }


def test_a_fan_shows_its_numbers_where_they_belong(show):
    arrays = _fan()
    page = show("fan", arrays, labels={"coverage": ["80%", "95%"]})
    value = page.y_value()
    [past] = points(page.all("path", "past")[0].get("d"))
    np.testing.assert_allclose(value(past[:, 1]), arrays["history"][:, 0], atol=0.02)
    [ahead] = points(page.all("path", "ahead")[0].get("d"))
    np.testing.assert_allclose(value(ahead[1:, 1]), arrays["forecast"][:, 0], atol=0.02)
    np.testing.assert_allclose(ahead[0], past[-1])
    steps = np.diff(np.concatenate([past[:, 0], ahead[1:, 0]]))
    np.testing.assert_allclose(steps, steps.mean(), atol=0.11)
    border = float(page.all("line", "border")[0].get("x1"))
    assert past[-1, 0] < border < ahead[1, 0]
    wide, narrow = (points(e.get("d"))[0] for e in page.all("path", "band"))
    for band, at in ((wide, 1), (narrow, 0)):
        upper, lower = value(band[:5, 1]), value(band[:4:-1, 1])
        np.testing.assert_allclose(upper, arrays["upper"][at, :, 0], atol=0.02)
        np.testing.assert_allclose(lower, arrays["lower"][at, :, 0], atol=0.02)


def test_a_legend_names_the_wide_interval_first_and_shows_what_came_only_if_it_is_known(show):
    labels = {"coverage": ["80%", "95%"], "time": [f"2024-01-{day:02}" for day in range(1, 26)]}
    page = show("fan", _fan(), labels=labels)
    names = [e.text for e in page.root.iter("span") if not e.get("title")]
    assert names == ["history", "forecast", "95% interval", "80% interval"]
    assert [e.text for e in page.root.iter("li") if e.get("class")] == ["1 Jan 2024 – 25 Jan 2024"]
    arrays = _fan() | {"actual": np.full((5, 1), 21.0)}
    page = show("fan", arrays, labels=labels)
    assert "what came" in [e.text for e in page.root.iter("span")]
    [seen] = points(page.all("path", "actual")[0].get("d"))
    np.testing.assert_allclose(page.y_value()(seen[:, 1]), 21.0, atol=0.02)


@pytest.mark.parametrize(("channels", "sentence"), [(24, ""), (30, "The first 24 of 30 channels")])
def test_at_most_twenty_four_channels_are_drawn_and_the_rest_is_owned_up_to(
    show, channels, sentence
):
    page = show("fan", _fan(channels))
    captions = [e.find("span").text for e in page.root.iter("figcaption")]
    assert captions == [f"channel {place}" for place in range(1, 25)]
    assert len(page.all("svg")) == 24
    assert page.remark().startswith(sentence)
    assert bool(page.remark()) == bool(sentence)


def test_every_channel_has_its_own_scale_and_unit(show):
    arrays = {role: array * np.array([1.0, 1000.0]) for role, array in _fan(1).items()}
    labels = {"channels": ["a", "b"]}
    page = show("fan", arrays, labels=labels, units={"b": "m/s", "y": "K"})
    assert page.texts("text", "name") == ["K", "m/s"]
    one, other = (e.get("d") for e in page.all("path", "past"))
    heights = [points(d)[0][:, 1] for d in (one, other)]
    np.testing.assert_allclose(heights[0], heights[1], atol=0.2)


def test_gaps_and_empty_channels_are_drawn_as_such(show):
    arrays = _fan(2)
    arrays["history"][5:8, 0] = np.nan
    arrays = {r: np.where([[False, True]], np.nan, a) for r, a in arrays.items()}
    page = show("fan", arrays)
    assert [len(piece) for piece in points(page.all("path", "past")[0].get("d"))] == [5, 12]
    assert "no finite values" in page.texts("text", "tick")


@pytest.mark.parametrize(("past", "ahead"), [(0, 5), (1, 1), (3, 1)])
def test_very_short_fans_can_be_drawn(show, past, ahead):
    page = show("fan", _fan(1, past, ahead))
    assert len(page.all("path", "band")) == 2
    assert len(page.all("path", "ahead")) + len(page.all("circle", "ahead")) == 1


def test_labels_below_an_axis_keep_their_distance(show):
    texts = [f"a rather long name for step {place}" for place in range(25)]
    page = show("fan", _fan(1), labels={"time": texts})
    labels = [e for e in page.all("text", "tick") if e.get("text-anchor") == "middle"]
    assert len(labels) >= 2
    middles = np.array([float(e.get("x")) for e in labels])
    halves = np.array([text_width(e.text) / 2 for e in labels])
    assert (middles[:-1] + halves[:-1] < middles[1:] - halves[1:]).all()
    assert middles[0] - halves[0] >= -0.01
    assert middles[-1] + halves[-1] <= 900.01


# ── lines ──


def test_lines_show_their_numbers_and_break_at_gaps(show):
    x = np.linspace(0, 10, 60)
    y = np.stack([np.sin(x), np.cos(x)])
    y[1, 20:23], y[1, 40], y[1, 42] = np.nan, np.nan, np.nan
    page = show("lines", {"x": x, "y": y, "mark": np.array([5.0])}, axes={"x": "t", "y": "v"})
    first, second = page.all("path", "series")
    value = page.y_value()
    [whole] = points(first.get("d"))
    np.testing.assert_allclose(value(whole[:, 1]), y[0], atol=0.01)
    pieces = points(second.get("d"))
    assert [len(piece) for piece in pieces] == [20, 17, 17]
    np.testing.assert_allclose(value(pieces[1][:, 1]), y[1, 23:40], atol=0.01)
    [lonely] = page.all("circle", "dot")
    np.testing.assert_allclose(value(float(lonely.get("cy"))), y[1, 41], atol=0.01)
    mark = float(page.all("line", "border")[0].get("x1"))
    np.testing.assert_allclose(mark, (whole[0, 0] + whole[-1, 0]) / 2, atol=0.1)
    assert page.texts("text", "name") == ["v", "t"]


def test_what_is_counted_has_no_ticks_between_whole_numbers(show):
    y = np.array([[1.0, 3.0, 2.0]])
    for x, expected in (
        ([0, 1, 2], ["0", "1", "2"]),
        ([1, 2, 3], ["1", "2", "3"]),
        ([0.0, 0.5, 1.0], ["0", "0.1", "0.2"]),
    ):
        page = show("lines", {"x": np.array(x, float), "y": y})
        below = [e.text for e in page.all("text", "tick") if e.get("text-anchor") != "end"]
        assert below[: len(expected)] == expected
        assert len(below) > len(expected) or expected[-1] != "0.2"


def test_a_logarithmic_scale_is_one_and_leaves_out_what_has_no_place(show):
    x = np.arange(1.0, 31.0)
    y = 10.0 ** -(x / 10)[None]
    y[0, 4] = 0.0
    page = show("lines", {"x": x, "y": y}, axes={"y_scale": "log"})
    pieces = points(page.all("path", "series")[0].get("d"))
    shown = page.y_value(log=True)(np.concatenate(pieces)[:, 1])
    np.testing.assert_allclose(shown, np.delete(y[0], 4), rtol=0.02)
    assert page.remark() == "Values left out because they are not positive: 1."


def test_long_lines_keep_their_extremes(show):
    y = np.zeros((1, 100_000))
    y[0, 31_415], y[0, 27_182] = 7.0, -7.0
    page = show("lines", {"x": np.arange(100_000.0), "y": y})
    [path] = points(page.all("path", "series")[0].get("d"))
    assert len(path) < 2000
    value = page.y_value()(path[:, 1])
    np.testing.assert_allclose([value.max(), value.min()], [7.0, -7.0], atol=0.05)


def test_series_beyond_the_colours_are_dashed_and_beyond_twenty_four_left_out(show):
    page = show("lines", {"x": np.arange(50.0), "y": np.ones((30, 1)) * np.arange(50.0)})
    lines = page.all("path", "series")
    looks = {(e.get("class"), e.get("stroke-dasharray")) for e in lines}
    assert len(lines) == len(looks) == 24
    assert [e.get("stroke-dasharray") for e in lines[:SERIES]] == [None] * SERIES
    assert page.remark() == "The first 24 of 30 lines are shown."


@pytest.mark.parametrize(
    ("x", "y"), [(np.zeros(0), np.zeros((1, 0))), (np.ones(2), np.full((1, 2), np.nan))]
)
def test_nothing_to_draw_is_said(show, x, y):
    assert show("lines", {"x": x, "y": y}).remark() == "There is nothing to draw."


# ── heatmap ──


def test_a_heatmap_prints_numbers_up_to_twelve_and_colours_by_value(show):
    values = np.linspace(0.0, 1.0, 12)[None].repeat(12, 0)
    page = show("heatmap", {"values": values}, labels={"columns": list("abcdefghijkl")})
    cells = page.texts("text", "cell")
    assert cells == [f"{v:.2f}" for v in values.ravel()]
    shades = [float(e.get("fill-opacity")) for e in page.all("path")]
    assert len(shades) == 12
    assert (min(shades), max(shades)) == (0.05, 1.0)
    assert page.texts("text", "tick")[12:] == list("abcdefghijkl")
    assert show("heatmap", {"values": np.ones((13, 2))}).texts("text", "cell") == []


def test_a_heatmap_of_both_signs_has_two_hues_around_zero(show):
    page = show("heatmap", {"values": np.array([[-2.0, 1.0, np.nan]])})
    shades = {e.get("class"): float(e.get("fill-opacity")) for e in page.all("path")}
    assert shades == {"cool": 1.0, "warm": pytest.approx(opacity(0.5), abs=0.006)}
    assert page.texts("text", "cell") == ["−2", "1", "–"]
    ends = [e.text for e in page.root.iter("span") if e.text]
    assert ends[:2] == ["−2.00", "2.00"]


def test_numbers_of_extreme_size_share_a_power_of_ten(show):
    page = show("heatmap", {"values": np.array([[3e-7, -1.2e-6]])})
    assert page.texts("text", "cell") == ["0.30", "−1.20"]
    assert page.remark() == "Numbers are multiples of 10⁻⁶."


def test_a_large_heatmap_shows_means_over_blocks(show):
    values = np.arange(300.0 * 200).reshape(300, 200)
    values[0, 0] = np.nan
    page = show("heatmap", {"values": values})
    assert page.remark() == "Each cell is the mean over 3 × 3 values."
    corners = [c for e in page.all("path") for c in e.get("d").split("M")[1:]]
    assert len(corners) == 100 * 67
    shade = {}
    for path in page.all("path"):
        for corner in path.get("d").split("M")[1:]:
            x, y = map(float, re.match(r"([\d.]+) ([\d.]+)", corner).groups())
            shade[y, x] = float(path.get("fill-opacity"))
    rows, columns = sorted({y for y, _ in shade}), sorted({x for _, x in shade})
    for r, c in ((0, 0), (50, 30), (66, 66), (80, 10)):
        mean = np.nanmean(values[3 * r : 3 * r + 3, 3 * c : 3 * c + 3]) / np.nanmax(values)
        assert shade[rows[r], columns[c]] == pytest.approx(opacity(mean), abs=0.025)


# ── table and bars ──


def test_a_table_marks_the_smallest_of_each_column(show):
    values = np.array([[0.36451, 12.0, np.nan], [0.3636, 120000.0, np.nan], [np.nan, 12.0, np.nan]])
    labels = {"rows": ["a", "b", "c"], "columns": ["mse", "n", "none"]}
    arguments = {"labels": labels, "units": {"mse": "K²"}}
    page = show("table", {"values": values}, axes={"best": "min"}, **arguments)
    cells = ["".join(e.itertext()) for e in page.root.iter("td")]
    assert cells == ["0.3645", "12", "–", "0.3636", "120\u202f000", "–", "–", "12", "–"]
    best = ["".join(e.itertext()) for e in page.root.iter("td") if e.get("class") == "best"]
    assert best == ["12", "0.3636", "12"]
    scopes = [(e.get("scope"), "".join(e.itertext())) for e in page.root.iter("th")]
    assert scopes[1:4] == [("col", "mseK²"), ("col", "n"), ("col", "none")]
    assert scopes[4:] == [("row", "a"), ("row", "b"), ("row", "c")]
    page = show("table", {"values": values}, **arguments)
    assert not [e for e in page.root.iter() if e.get("class") == "best"]


def test_a_table_may_end_in_words_and_a_broad_one_is_set_smaller(show):
    labels = {"rows": ["a", "b"], "columns": ["x"], "notes": ["", "two <dead> heads"]}
    page = show("table", {"values": np.ones((2, 1))}, labels=labels)
    cells = [e for e in page.root.iter("td") if e.get("class") == "words"]
    assert [e.text or "" for e in cells] == ["", "two <dead> heads"]
    (head,) = [e for e in page.root.iter("th") if e.get("class") == "words"]
    assert head.text == "notes"
    assert next(page.root.iter("table")).get("class") is None
    broad = show("table", {"values": np.ones((1, 8))})
    assert next(broad.root.iter("table")).get("class") == "broad"
    with pytest.raises(InputError, match="1 labels for 'notes': 2 are expected"):
        show("table", {"values": np.ones((2, 1))}, labels={"notes": ["one"]})


def test_bars_are_as_long_as_their_values(show):
    values, error = np.array([2.0, -1.0, np.nan, 4.0]), np.array([0.5, 0.0, 0.1, 0.0])
    page = show("bars", {"values": values, "error": error}, labels={"names": list("abcd")})
    zero = float(page.all("line", "axis")[0].get("x1"))
    bars = [(float(e.get("x")), float(e.get("width"))) for e in page.all("rect", "bar")]
    widths = np.array([width for _, width in bars])
    np.testing.assert_allclose(widths / widths[0], [1.0, 0.5, 2.0], atol=0.01)
    starts = [start for start, _ in bars]
    np.testing.assert_allclose(starts, [zero, zero - widths[1], zero], atol=0.02)
    [whisker] = page.all("line", "whisker")
    ends = np.array([float(whisker.get("x1")), float(whisker.get("x2"))])
    np.testing.assert_allclose((ends - zero) / widths[0] * 2, [1.5, 2.5], atol=0.01)
    assert page.texts("text", "tick") == ["2.000 ± 0.50", "−1.000", "–", "4.000"]
    many = show("bars", {"values": np.arange(61.0)})
    assert len(many.all("text", "label")) == 60
    assert many.remark() == "The first 60 of 61 bars are shown."


# ── what does not fit is said ──


@pytest.mark.parametrize(
    ("kind", "arrays", "parts", "message"),
    [
        ("lines", {"x": np.ones(3)}, {}, r"no array for 'y'.*\[k, n\]"),
        ("lines", {"x": np.ones(3), "y": np.ones(3)}, {}, r"'y'.*shape \[3\]: \[k, n\]"),
        ("lines", {"x": np.ones(3), "y": np.ones((1, 4))}, {}, r"sizes \[4\].*have \[3\]"),
        ("bars", {"values": np.ones(3)}, {"labels": {"names": ["a"]}}, "1 labels for 'names': 3"),
        ("bars", {"values": np.ones(3), "error": np.ones(2)}, {}, "'error'"),
        ("fan", _fan(2) | {"history": np.ones((4, 3))}, {}, "'history'"),
        ("fan", _fan(2) | {"upper": np.ones((1, 5, 2))}, {}, "'upper'"),
        ("fan", _fan(2) | {"actual": np.ones((4, 2))}, {}, "'actual'"),
        ("fan", _fan(2), {"labels": {"time": ["1", "2"]}}, "2 labels for 'time': 25"),
        ("heatmap", {"values": np.ones(3)}, {}, r"\[r, c\]"),
    ],
)
def test_figures_that_do_not_fit_their_arrays_are_one_sentence(show, kind, arrays, parts, message):
    with pytest.raises(InputError, match=message):
        show(kind, arrays, **parts)


# ── colours and text ──


def test_every_number_in_a_cell_can_be_read_in_both_schemes():
    for hue in ("warm", "cool"):
        for alpha in np.linspace(opacity(0.0), opacity(1.0), 33):
            chosen = dict(part.split("-") for part in inks(hue, alpha).split())
            for scheme, colours in SCHEMES.items():
                cell = blend(colours["paper"], colours[hue], alpha)
                assert contrast(colours[f"{chosen[scheme]}-text"], cell) >= 4.5


def test_text_and_lines_stand_out_from_the_paper():
    # An independent value: WebAIM's checker gives 4.54:1 for #767676 on white.
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.005)
    for colours in SCHEMES.values():
        for name in ("ink", "muted"):
            assert contrast(colours[name], colours["paper"]) >= 4.5
            assert contrast(colours[name], colours["best"]) >= 4.5
        for name in ["accent", "past", "axis", *(f"series-{i}" for i in range(SERIES))]:
            assert contrast(colours[name], colours["paper"]) >= 3.0, name


def test_both_schemes_name_the_same_colours():
    assert SCHEMES["light"].keys() == SCHEMES["dark"].keys()


def test_shortened_text_fits():
    for text in ("temperature", "W" * 40, "iiii" * 30, "气温气温气温气温"):
        for room in (20.0, 50.0, 90.0):
            assert text_width(shorten(text, room)) <= room
