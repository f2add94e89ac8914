"""The de-normalisation slip of SAMformer's released TensorFlow code, as a loss.

Its RevIN multiplies a forecast `[B, H, D]` by `deviation[:, :, None]`, whose shape is
`[B, 1, 1, D]`. The result is `[B, B, H, D]`: window j with the statistics of each of its
batch-mates i, and the mean squared error against `[B, H, D]` is taken over both,

    L = 1/(B² H D) Σ_i Σ_j ‖s_i f_j + m_i - y_j‖²,

in training and, with batches of neighbouring windows, in validation and test. A correct RevIN has
the terms i = j alone. (Read in the repository romilbert/samformer, `models/utils/rev_in.py` and
`models/base_model.py`.)

Axes: batches are channel-major, `[D, B, ·]`, as `data.windows.Batch` holds them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from levelhead.data.windows import Batch, WindowSource
from levelhead.nn.samformer import SAMformerNet

__all__ = ["slipped_absolute", "slipped_errors", "slipped_squares"]

FloatArray = NDArray[np.float64]


def _levels(core: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """m_i [D, B, 1] and y_j [D, B, H] in the type of `core`, both from the batch's mean level."""
    level = (batch.mean - batch.mean.mean(dim=1, keepdim=True)).to(core)
    return level, batch.target + level


def slipped_squares(core: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Squared error `[B]` of each window, mean over channels, steps and batch-mates.

    `core [D, B, H]` is the normalised forecast. The square is multiplied out over i, so that
    nothing of size B² is formed.
    """
    level, truth = _levels(core, batch)
    scale = batch.deviation
    square = scale.square().mean(dim=1, keepdim=True)
    cross = (scale * level).mean(dim=1, keepdim=True)
    shrunk = scale.mean(dim=1, keepdim=True) * truth
    apart = level.square().mean(dim=1, keepdim=True)
    errors: torch.Tensor = (square * core + 2 * (cross - shrunk)) * core + truth.square() + apart
    return errors.mean(dim=(0, 2))


def slipped_absolute(core: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Absolute error `[B]` of each window, mean over channels, steps and batch-mates."""
    level, truth = _levels(core, batch)
    mates = core.shape[1]
    total = core.new_zeros(mates)
    for i in range(mates):
        made = core * batch.deviation[:, i : i + 1] + level[:, i : i + 1]
        total += (made - truth).abs().mean(dim=(0, 2))
    return total / mates


@torch.no_grad()
def slipped_errors(
    net: SAMformerNet, windows: WindowSource, batch_size: int, *, absolute: bool = False
) -> FloatArray:
    """Errors `[N]` of all windows, in batches of neighbours as the released code judges them."""
    measure = slipped_absolute if absolute else slipped_squares
    found = [
        measure(net.core((batch := windows.batch(index)).context), batch)
        for index in torch.split(torch.arange(len(windows)), batch_size)
    ]
    return torch.cat(found).double().cpu().numpy()
