"""Print the peak resident memory of an automatic fit above the imports, in MB (Linux)."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pandas as pd
import torch

import levelhead.forecasting.forecaster as forecaster


def resident() -> float:
    """Resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def main(path: str, horizon: int) -> None:
    torch.set_num_threads(1)
    base, peak, done = resident(), 0.0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, resident())

    watcher = threading.Thread(target=look)
    watcher.start()
    forecaster.SAMformer(horizon, 512).fit(pd.read_csv(path))
    done.set()
    watcher.join()
    sys.stdout.write(f"{peak - base:.0f}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
