"""One of several processes that Lightning trains together; started by the tests.

python lightning_worker.py OUT ACCUMULATION
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from levelhead.adapters.lightning import SharpnessAware, WatchCallback

ROWS, STEPS = 12, 3


class Net(L.LightningModule):
    """Attention in float64 with a loss that is the mean over examples, and a penalty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x, labels = batch
        out = self.attn(x, x, x, need_weights=False)[0].mean((1, 2))
        penalty = 0.1 * self.attn.in_proj_weight.square().sum()
        return (torch.tanh(5 * out) - labels).square().mean() + penalty

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(folder: Path, processes: int, accumulate: int) -> list[Tensor]:
    """Weights after steps that have seen all rows, in `processes` × `accumulate` parts."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 3, 4, generator=draw, dtype=torch.float64)
    labels = torch.randn(ROWS, generator=draw, dtype=torch.float64)
    model = Net()
    together = DDPStrategy(process_group_backend="gloo")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=together if processes > 1 else "auto",
        precision="64-true",
        max_epochs=STEPS,
        accumulate_grad_batches=accumulate,
        callbacks=[WatchCallback(every=2, out=folder / "run"), SharpnessAware(rho=0.2)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    size = ROWS // processes // accumulate
    trainer.fit(model, DataLoader(TensorDataset(x, labels), batch_size=size))
    return [p.detach() for p in model.parameters()]


if __name__ == "__main__":
    out = Path(sys.argv[1])
    found = train(out, int(os.environ["WORLD_SIZE"]), int(sys.argv[2]))
    torch.save(found, out / f"{os.environ['LOCAL_RANK']}.pt")
