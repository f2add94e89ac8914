"""Thread limits hold inside the block and return afterwards."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from levelhead.base.numerics import threads


def pools() -> dict[str, int]:
    """Threads of every BLAS and OpenMP library that is loaded."""
    return {pool["filepath"]: pool["num_threads"] for pool in threadpool_info()}


@pytest.fixture(autouse=True)
def _two_threads():
    """Start from a number that differs from every limit the tests ask for."""
    before = torch.get_num_threads()
    with threadpool_limits(limits=2):
        torch.set_num_threads(2)
        yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 3])
def test_the_limit_holds_for_torch_and_blas_and_is_lifted(count: int) -> None:
    before = pools()
    assert before
    with threads(count):
        assert torch.get_num_threads() == count
        assert set(pools().values()) == {count}
    assert torch.get_num_threads() == 2
    assert pools() == before


def test_one_thread_is_the_default() -> None:
    with threads():
        assert torch.get_num_threads() == 1


def test_limits_return_when_the_block_raises() -> None:
    before = pools()
    with pytest.raises(ZeroDivisionError), threads(1):
        _ = 1 / 0
    assert torch.get_num_threads() == 2
    assert pools() == before


def test_blocks_nest() -> None:
    with threads(3):
        with threads(1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3


def test_none_leaves_everything_as_it_is() -> None:
    before = pools()
    with threads(None):
        assert torch.get_num_threads() == 2
        assert pools() == before
        torch.set_num_threads(3)
    assert torch.get_num_threads() == 3


_OVERLAP = """
from threading import Event, Thread
import torch
from threadpoolctl import threadpool_info
from levelhead.base.numerics import threads

def blas():
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

def work(i):
    with threads(1):
        entered[i].set()
        leave[i].wait(10)

torch.set_num_threads(2)
before = blas()
entered, leave = [Event() for _ in range(3)], [Event() for _ in range(3)]
workers = [Thread(target=work, args=(i,)) for i in range(3)]
for worker, event in zip(workers, entered):
    worker.start()
    assert event.wait(10)
for i in (1, 0, 2):  # neither the order of entering nor its reverse
    leave[i].set()
    workers[i].join()
assert blas() == before, (blas(), before)
assert torch.get_num_threads() == 2, torch.get_num_threads()
"""


def test_limits_return_when_blocks_of_several_threads_overlap() -> None:
    """In a process of its own: an enclosing limit would keep the blocks from setting theirs."""
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    environment["OPENBLAS_NUM_THREADS"] = "2"
    subprocess.run([sys.executable, "-c", _OVERLAP], check=True, env=environment)
