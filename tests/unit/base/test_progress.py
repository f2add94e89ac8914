"""The bar shows on a terminal what was done, and nothing anywhere else."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.progress import Task
from rich.text import Text

from levelhead.base.progress import _Rate, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO) -> str:
    """What was written, without the control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make stderr a terminal; in the test itself, for pytest sets its own anew after fixtures."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "140")
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return stream


@pytest.mark.parametrize("enabled", [None, True])
def test_a_terminal_shows_label_count_and_note(
    enabled: bool | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = on_terminal(monkeypatch)
    with progress("windows", 12, enabled=enabled) as advance:
        advance(3)
        advance()
        advance(0, "best error 0.25")
        advance(2)
    text = shown(terminal)
    last = text.rstrip().splitlines()[-1]
    assert "windows" in last
    assert "6/12" in last
    assert "/s" in last
    assert "best error 0.25" in last  # a note stays until the next one
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("enabled", [None, False])
def test_anything_else_stays_silent(
    enabled: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("windows", 12, enabled=enabled) as advance:
        advance(3)
        advance(0, "a note")
    assert capsys.readouterr() == ("", "")


def test_a_terminal_can_be_kept_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with progress("windows", 12, enabled=False) as advance:
        advance(12)
    assert terminal.getvalue() == ""


def test_the_bar_goes_when_the_block_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with pytest.raises(ZeroDivisionError), progress("windows", 12) as advance:
        advance(1 // 0)
    assert terminal.getvalue().rstrip().endswith("\x1b[2K")  # the line is erased
    with progress("again", 2) as advance:
        advance(2)
    assert "2/2" in shown(terminal).split("again")[-1]


def test_a_bar_inside_a_bar_is_a_second_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with progress("cuts", 4) as outer:
        outer(1)
        for _ in range(2):
            with progress("epochs", 9) as inner:
                inner(5, "best error 0.5")
            outer(1)
    text = shown(terminal)
    assert re.search(r"cuts +\S+ 1/4.*\n.*epochs +\S+ 0/9", text)
    assert text.rstrip().splitlines()[-1].count("epochs") == 0  # it goes with its block
    assert "3/4" in text.split("cuts")[-1]
    with progress("after", 2) as advance:  # the display is free again
        advance(2)
    assert "2/2" in shown(terminal).split("after")[-1]


def test_the_rate_is_in_units_per_second() -> None:
    class Measured(Task):
        @property
        def speed(self) -> float | None:
            return measured

    def rendered() -> Text:
        return _Rate().render(Measured(0, "", 10, 0, _get_time=lambda: 0.0))  # type: ignore[arg-type]

    measured: float | None = 12.34
    assert rendered().plain == "12.3/s"
    measured = None
    assert rendered().plain == "–/s"
