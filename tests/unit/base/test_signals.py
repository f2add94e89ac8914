"""Signals are noted once, and everything is put back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from levelhead.base.signals import noted_signals

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def arrived() -> Iterator[list[int]]:
    """Signals that came through to the handlers from before."""
    seen: list[int] = []
    before = {n: signal.signal(n, lambda number, frame: seen.append(number)) for n in NUMBERS}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def current() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in NUMBERS}


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_signal_is_only_noted(number: int, arrived: list[int]) -> None:
    before = current()
    with noted_signals() as stopped_by:
        assert stopped_by() is None
        os.kill(os.getpid(), number)
        assert stopped_by() == signal.Signals(number).name
        assert stopped_by() == signal.Signals(number).name
    assert arrived == []
    assert current() == before


def test_the_second_signal_acts_as_before(arrived: list[int]) -> None:
    with noted_signals() as stopped_by:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert arrived == [signal.SIGINT]
        assert stopped_by() == "SIGTERM"


def test_handlers_come_back_when_the_block_raises(arrived: list[int]) -> None:
    before = current()
    with pytest.raises(ZeroDivisionError), noted_signals():
        _ = 1 / 0
    assert current() == before
    os.kill(os.getpid(), signal.SIGINT)
    assert arrived == [signal.SIGINT]


def test_nested_blocks_give_the_signal_to_the_inner_one(arrived: list[int]) -> None:
    before = current()
    with noted_signals() as outer:
        with noted_signals() as inner:
            os.kill(os.getpid(), signal.SIGINT)
            assert (inner(), outer()) == ("SIGINT", None)
        os.kill(os.getpid(), signal.SIGTERM)
        assert outer() == "SIGTERM"
    assert arrived == []
    assert current() == before


def test_an_ignored_signal_stays_ignored(arrived: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with noted_signals() as stopped_by:
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped_by() is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopped_by() == "SIGTERM"
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_a_handler_unknown_to_python_is_left_in_place(
    arrived: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda n: None if n == signal.SIGINT else real(n))
    with noted_signals() as stopped_by:
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped_by() is None
    assert arrived == [signal.SIGINT]


def test_other_threads_change_nothing(arrived: list[int]) -> None:
    before = current()
    found: list[Any] = []

    def work() -> None:
        with noted_signals() as stopped_by:
            found.extend([current(), stopped_by()])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before, None]


def test_ctrl_c_in_a_program_of_its_own() -> None:
    code = (
        "import os, signal\n"
        "from levelhead.base.signals import noted_signals\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with noted_signals() as stopped_by:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print(stopped_by(), flush=True)\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n"
        "    print('as before')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split("\n") == ["SIGINT", "as before", ""]
