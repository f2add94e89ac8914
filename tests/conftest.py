"""Shared fixtures: where real series lie, and a working directory nobody may write to unasked."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder with ETTh1.csv, exchange_rate.csv and weather.csv; not part of the repository."""
    folder = Path(os.environ.get("LEVELHEAD_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "ETTh1.csv").is_file():
        pytest.skip("set LEVELHEAD_DATA to a folder with ETTh1.csv, exchange_rate.csv, weather.csv")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _interruptible():
    """Ctrl-C must reach the tests of it, also where the suite runs in the background of a shell."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _own_working_directory(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    """Run each test in an empty folder and check that nothing was written to it."""
    here = tmp_path_factory.mktemp("cwd")
    monkeypatch.chdir(here)
    yield
    left = sorted(p.name for p in here.iterdir())
    assert not left, f"files written to the working directory unasked: {left}"
