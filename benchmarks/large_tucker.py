"""Print seconds, error and peak memory of a Tucker fit to a tensor of 7B size (Linux)."""

from __future__ import annotations

import resource
import sys
import time

import torch

from levelhead.tensors.tucker import tucker


def main() -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    x = torch.randn(3, 32, 128, 4096).permute(1, 2, 3, 0)
    began = time.perf_counter()
    fit = tucker(x, (16, 64, 256, 3), tolerance=1e-4)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    sys.stdout.write(
        f"{seconds:.1f} s, {fit.sweeps} sweeps, error {fit.relative_error:.6f}, "
        f"peak {peak:.0f} MB with torch and the tensor\n"
    )


if __name__ == "__main__":
    main()
