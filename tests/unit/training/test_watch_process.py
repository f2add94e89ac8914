"""Whether the process that trains is still there: itself, one that was killed, and strangers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from levelhead.training.watch_process import PROCESS_FILE, is_running, write_process

WRITE = (
    "import sys, pathlib; from levelhead.training.watch_process import write_process; "
    "write_process(pathlib.Path(sys.argv[1])); print('torch' in sys.modules, flush=True); "
    "sys.stdin.read()"
)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are told apart on POSIX")


def test_this_process_runs_and_without_a_file_nobody_knows(tmp_path: Path) -> None:
    assert is_running(tmp_path) is None
    write_process(tmp_path)
    assert is_running(tmp_path) is True


@pytest.mark.parametrize("reaped", [True, False])
def test_a_killed_process_is_gone(reaped: bool, tmp_path: Path) -> None:
    """Also while its parent has not taken note of it, where the system tells."""
    if not (reaped or Path("/proc/self/stat").exists()):
        pytest.skip("no /proc")
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "False\n"
        assert is_running(tmp_path) is True
        process.kill()
        if reaped:
            process.wait()
        else:
            assert process.stdout.read() == ""  # it has ended: its pipe is closed
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_running(tmp_path) is False
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"host": "elsewhere"}, None),
        ({"namespace": "pid:[1]"}, None),
        ({"pid": "x"}, None),
        ({"start": "1"}, False),  # the number belongs to another process by now
    ],
)
def test_another_machine_and_a_number_used_again(change, expected, tmp_path: Path) -> None:
    if "start" in change and not Path("/proc/self/stat").exists():
        pytest.skip("no /proc")
    write_process(tmp_path)
    told = json.loads((tmp_path / PROCESS_FILE).read_text())
    (tmp_path / PROCESS_FILE).write_text(json.dumps({**told, **change}))
    assert is_running(tmp_path) is expected


def test_an_altered_file_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / PROCESS_FILE).write_text("{")
    assert is_running(tmp_path) is None
