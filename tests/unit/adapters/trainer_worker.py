"""One of several processes that train together under LevelheadTrainer; started by the tests.

python trainer_worker.py OUT ACCUMULATION
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from levelhead.adapters.transformers import LevelheadTrainer, WatchCallback

ROWS, STEPS = 12, 3


class Net(nn.Module):
    """Attention in float64 with a loss that is the mean over examples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.attn(x, x, x, need_weights=False)[0].mean((1, 2))
        return {"loss": (torch.tanh(5 * out) - labels).square().mean()}


def collated(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def train(folder: Path, processes: int, accumulate: int) -> list[Tensor]:
    """Weights after each step has seen all rows, in `processes` × `accumulate` parts."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 3, 4, generator=draw, dtype=torch.float64)
    labels = torch.randn(ROWS, generator=draw, dtype=torch.float64)
    model = Net()
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS // processes // accumulate,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo" if processes > 1 else None,
        dataloader_pin_memory=False,
    )
    penalty: Any = lambda: 0.1 * model.attn.in_proj_weight.square().sum()  # noqa: E731
    LevelheadTrainer(
        model,
        arguments,
        train_dataset=[{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)],
        data_collator=collated,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        sam_rho=0.2,
        penalties=[penalty],
        callbacks=[WatchCallback(every=2, out=folder / "run")],
    ).train()
    return [p.detach() for p in model.parameters()]


if __name__ == "__main__":
    out = Path(sys.argv[1])
    found = train(out, int(os.environ["WORLD_SIZE"]), int(sys.argv[2]))
    torch.save(found, out / f"{os.environ['RANK']}.pt")
