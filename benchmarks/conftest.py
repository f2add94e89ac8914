"""Ratios in one process: ours and the peer take turns, and only their quotient is reported.

Seconds depend on the machine and on what else it does; two things that are timed in turns within a
second of each other share all of that. A row's ratio is the median over rounds of peer / ours.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Rows:
    """The table that is printed at the end."""

    lines: list[tuple[str, str]] = field(default_factory=list)

    def ratio(
        self,
        name: str,
        ours: Callable[[], object],
        peer: Callable[[], object],
        *,
        rounds: int = 9,
        warm: int = 2,
    ) -> float:
        """Time `ours` and `peer` in turns; report and return how many times faster ours is."""
        for _ in range(warm):
            ours()
            peer()
        quotients, own = [], []
        for _ in range(rounds):
            own.append(_seconds(ours))
            quotients.append(_seconds(peer) / own[-1])
        found = statistics.median(quotients)
        spread = f"{min(quotients):.1f}–{max(quotients):.1f}"
        self.note(
            name, f"{found:.1f}x faster ({spread}; ours {1e3 * statistics.median(own):.1f} ms)"
        )
        return found

    def note(self, name: str, text: str) -> None:
        """Report something that is not a ratio of times."""
        self.lines.append((name, text))


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


_ROWS = Rows()


@pytest.fixture
def rows() -> Rows:
    """The table of this run."""
    return _ROWS


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread: the house's unit of comparison."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder with ETTh1.csv; not part of the repository."""
    folder = Path(os.environ.get("LEVELHEAD_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "ETTh1.csv").is_file():
        pytest.skip("set LEVELHEAD_DATA to a folder with ETTh1.csv")
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _ROWS.lines:
        terminalreporter.section("ratios")
        width = max(len(name) for name, _ in _ROWS.lines)
        for name, text in _ROWS.lines:
            terminalreporter.write_line(f"{name:<{width}}  {text}")
