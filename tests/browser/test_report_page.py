"""The report in headless Chromium: nothing overlaps, nothing overflows, both schemes are served."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from levelhead.report.document import write_report
from levelhead.report.palette import SCHEMES, contrast
from unit.report.examples import hostile_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = (360, 390, 820, 1200, 1600)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SCHEME = {"dark": 0, "light": 1}  # values of Blink's preferredColorScheme

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

# The page under test is not changed: it is shown in frames of several widths (a window cannot be
# narrower than 500 pixels), and the page around them measures what the frames show.
MEASURE = """
function measure(frame) {
  const page = frame.contentDocument, view = frame.contentWindow, width = view.innerWidth;
  for (const fold of page.querySelectorAll('details')) fold.open = true;
  const box = e => e.getBoundingClientRect();
  const shown = e => e.getClientRects().length && box(e).width > 0;
  const overlaps = [], outside = [], colours = new Set();
  let texts = 0, smallest = 99;
  for (const drawing of page.querySelectorAll('svg.drawing')) {
    if (!shown(drawing)) continue;
    const scale = box(drawing).width / drawing.viewBox.baseVal.width;
    smallest = Math.min(smallest, scale * parseFloat(view.getComputedStyle(drawing).fontSize));
    const frame = box(drawing), own = [...drawing.querySelectorAll('text')];
    const boxes = own.map(box);
    own.forEach((text, i) => {
      texts += 1;
      const a = boxes[i], words = text.firstChild.nodeValue;
      if (!text.classList.contains('cell')) colours.add(view.getComputedStyle(text).fill);
      if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.top < frame.top - 1 ||
          a.bottom > frame.bottom + 1) outside.push(['text leaves its drawing', words]);
      for (let j = 0; j < i; j++) {
        const b = boxes[j];
        if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 0.5 &&
            Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1.5)
          overlaps.push([own[j].firstChild.nodeValue, words]);
      }
    });
  }
  for (const e of page.body.querySelectorAll('*')) {
    if (!shown(e) || e.closest('.scroll') && !e.matches('.scroll') || e.closest('svg.drawing')
        && !e.matches('svg.drawing')) continue;
    if (box(e).left < -0.5 || box(e).right > width + 0.5)
      outside.push([e.tagName + '.' + e.className, box(e).right]);
  }
  const texty = [...page.querySelectorAll('h1, h2, p, li span, figcaption span, th, td, small')];
  for (const e of texty) if (shown(e)) colours.add(view.getComputedStyle(e).color);
  return {width, texts, smallest, overlaps, outside, colours: [...colours],
    scrolls: page.documentElement.scrollWidth, hostile: view.hostile ?? null,
    paper: view.getComputedStyle(page.body).backgroundColor,
    drawings: [...page.querySelectorAll('svg.drawing')].filter(shown).length,
    broad: [...page.querySelectorAll('table.broad')].map(
      e => [box(e).width, box(e.parentElement).width + 0.5]),
    odd: page.querySelectorAll('script, img, b, i:not(.ramp)').length};
}
window.addEventListener('load', () => {
  const found = [...document.querySelectorAll('iframe')].map(measure);
  document.body.innerHTML = '<pre id=found></pre>';
  document.getElementById('found').textContent = JSON.stringify(found);
});
"""


@pytest.fixture(scope="module", params=["light", "dark"])
def measured(request, tmp_path_factory) -> tuple[str, list[dict]]:
    """The scheme and, for each width, what the browser shows of a report with hostile names."""
    folder = tmp_path_factory.mktemp("page")
    page = write_report(hostile_run(folder / "run")).read_text(encoding="utf-8")
    frames = "".join(
        f'<iframe srcdoc="{html.escape(page)}" style="width:{width}px;height:900px;border:0">'
        "</iframe>"
        for width in WIDTHS
    )
    around = folder / "around.html"
    around.write_text(
        f"<!doctype html><meta charset=utf-8><body>{frames}<script>{MEASURE}</script>",
        encoding="utf-8",
    )
    dumped = _chromium(folder, request.param, "--dump-dom", around.as_uri())
    found = re.search(r'<pre id="found">(.*?)</pre>', dumped, re.DOTALL)
    assert found, dumped[-2000:]
    return request.param, json.loads(html.unescape(found[1]))


def _chromium(folder: Path, scheme: str, *arguments: str) -> str:
    command = [
        str(CHROMIUM),
        *FLAGS,
        f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={SCHEME[scheme]}",
        "--window-size=1700,1000",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def _hex(colour: str) -> str:
    return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", colour)[:3])


def test_every_width_was_shown_in_the_scheme_asked_for(measured):
    scheme, pages = measured
    assert [page["width"] for page in pages] == list(WIDTHS)
    for page in pages:
        assert _hex(page["paper"]) == SCHEMES[scheme]["paper"]
        assert page["texts"] > 300
        # One drawing for each figure (a table is none), and nine panels more for the large fan.
        assert page["drawings"] == 10 + 9 - 1


def test_a_broad_table_is_seen_whole_on_a_wide_screen(measured):
    for page in measured[1]:
        (sizes,) = page["broad"]
        assert (sizes[0] <= sizes[1]) == (page["width"] >= 1200), page["width"]


def test_no_text_overlaps_another(measured):
    for page in measured[1]:
        assert page["overlaps"] == [], page["width"]


def test_nothing_leaves_its_drawing_or_the_page(measured):
    for page in measured[1]:
        assert page["outside"] == [], page["width"]
        assert page["scrolls"] <= page["width"]


def test_text_in_drawings_stays_legible(measured):
    for page in measured[1]:
        assert page["smallest"] >= 10, page["width"]


def test_text_stands_out_from_the_paper(measured):
    scheme, pages = measured
    for page in pages:
        assert len(page["colours"]) >= 2
        for colour in page["colours"]:
            assert contrast(_hex(colour), SCHEMES[scheme]["paper"]) >= 4.5, colour


def test_names_are_text_and_never_become_elements(measured):
    for page in measured[1]:
        assert page["hostile"] is None
        assert page["odd"] == 0
