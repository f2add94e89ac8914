"""One of two processes that train under DistributedDataParallel; run by test_ddp.

    python ddp_worker.py RANK FOLDER

writes FOLDER/<rank>.safetensors: for every case of SAM the weights after two steps and the losses,
and an attention layer's weights after each constraint.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from levelhead.training.constraints import GaugeBalance, QKClip
from levelhead.training.sam import SAM

CASES = ("plain", "adaptive", "accumulated", "bucket_views", "scaled", "bfloat16", "infinite")
STEPS = 2


def network() -> nn.Module:
    """A small network in float64 with LayerNorm and dropout 0, always the same."""
    torch.manual_seed(3)
    layers = (nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 2))
    return nn.Sequential(*layers).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(8, 2, generator=generator, dtype=torch.float64)


def trained(case: str, rank: int, processes: int) -> dict[str, Tensor]:
    """Weights and losses after STEPS steps on this process's share of the batch."""
    model: nn.Module = network().float() if case == "bfloat16" else network()
    wrapped = model
    if processes > 1:
        views = case == "bucket_views"
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
    sam = SAM(model.parameters(), torch.optim.AdamW, rho=0.3, adaptive=case == "adaptive", lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if case == "scaled" else None
    share = [part.chunk(processes)[rank] for part in batch()]
    if case == "bfloat16":
        share = [part.float() for part in share]
    pieces = 2 if case == "accumulated" else 1
    parts = list(zip(*(part.chunk(pieces) for part in share), strict=True))
    losses = []
    with sam.ascent_pass(wrapped):
        for _ in range(STEPS):
            loss = sam.step(closure_of(case, wrapped, sam, parts, scaler, processes, rank), scaler)
            losses.append(torch.as_tensor(loss).double())
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return {**weights, "losses": torch.stack(losses), "ascents": torch.tensor(sam.ascent_steps)}


def closure_of(
    case: str,
    model: nn.Module,
    sam: SAM,
    parts: list[tuple[Tensor, ...]],
    scaler: torch.amp.GradScaler | None,
    processes: int,
    rank: int,
) -> Callable[[], Tensor]:
    """The closure of the module's docstring."""

    def closure() -> Tensor:
        sam.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for i, (x, y) in enumerate(parts):
            last = i + 1 == len(parts)
            apart = model.no_sync() if processes > 1 and not last else contextlib.nullcontext()
            with apart:
                with torch.autocast("cpu", torch.bfloat16, enabled=case == "bfloat16"):
                    loss = (model(x) - y).square().mean() / len(parts)
                (loss if scaler is None else scaler.scale(loss)).backward()
            total += loss.detach()
        if case == "infinite" and rank == 0:
            total += float("inf")  # in one process only, with sound gradients
        if processes > 1:
            torch.distributed.all_reduce(total)
        return total / processes

    return closure


# The largest logits that each process saw; the second saw nothing of head 2.
SEEN = ({"torch_mha": [40.0, 1.0, 90.0]}, {"torch_mha": [70.0, 1.0, 0.0]})
THRESHOLD = 10.0


def attention() -> nn.MultiheadAttention:
    torch.manual_seed(5)
    return nn.MultiheadAttention(6, 3, dtype=torch.float64)


def constrained(rank: int) -> dict[str, Tensor]:
    """An attention layer's weights after clipping and after balancing, in this process."""
    model = nn.parallel.DistributedDataParallel(attention())
    clip = QKClip(THRESHOLD)
    clip.observe(SEEN[rank])
    report = clip.apply(model)
    found = {f"clipped/{n}": w.detach().clone() for n, w in model.module.named_parameters()}
    found["clipped/heads"] = torch.tensor([(c.head, c.largest) for c in report.clipped])
    with torch.no_grad():
        model.module.in_proj_weight.add_(1e-7 * rank)  # as if its arithmetic were another
    GaugeBalance().apply(model)
    return found | {f"balanced/{n}": w.detach() for n, w in model.module.named_parameters()}


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    found = {
        f"{case}/{name}": value for case in CASES for name, value in trained(case, rank, 2).items()
    }
    found |= constrained(rank)
    save_file(found, folder / f"{rank}.safetensors")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # Everything is on disk. Threads of torch's reducers that are still there when the interpreter
    # is taken down abort the process now and then ("terminate called without an active exception").
    os._exit(0)


if __name__ == "__main__":
    main()
