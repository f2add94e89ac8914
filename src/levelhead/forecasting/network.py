"""Training SAMformer's network on windows of a series."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from levelhead.data.windows import WindowSource
from levelhead.forecasting.candidates import Line, Network, residual_products
from levelhead.nn.samformer import SAMformerNet
from levelhead.training.loop import Closure, History, TrainingSettings, train

__all__ = ["Start", "fit_network", "make_network"]

Start = Literal["linear", "glorot"]


def make_network(
    context: int,
    horizon: int,
    channels: int,
    *,
    seed: int,
    line: Line | None = None,
    device: torch.device | str = "cpu",
    **options: object,
) -> SAMformerNet:
    """A network drawn from `seed` alone; with `line` it starts equal to that line.

    `options` are `SAMformerNet`'s. The global random state is left as it was, and has no say: other
    threads may be drawing from it.
    """
    with torch.random.fork_rng(devices=[]):
        net = SAMformerNet(context, horizon, channels, **options)  # type: ignore[arg-type]
    net.reset_parameters(torch.Generator().manual_seed(int(seed)))
    if line is not None:
        net.start_from_line(line.head)
    return net.to(device)


def fit_network(
    net: SAMformerNet,
    windows: WindowSource,
    validation: WindowSource | None,
    settings: TrainingSettings,
    *,
    state_path: Path | None = None,
    resume: bool = False,
    data: str = "",
    show_progress: bool | None = None,
) -> History:
    """Train `net` on `windows` by the error of the denormalised forecast (mean over D and H)."""

    def batch_loss(index: torch.Tensor) -> Closure:
        batch = windows.batch(index)

        def compute() -> torch.Tensor:
            forecast = batch.centred(net.core(batch.context))
            return torch.nn.functional.mse_loss(forecast, batch.target)

        return compute

    def validate() -> float:
        assert validation is not None
        return float(residual_products([Network(net)], validation).mean())

    judge = validate if validation is not None and len(validation) else None
    return train(
        net,
        batch_loss,
        len(windows),
        judge,
        settings,
        state_path=state_path,
        resume=resume,
        data=data,
        label="SAMformer",
        show_progress=show_progress,
    )
