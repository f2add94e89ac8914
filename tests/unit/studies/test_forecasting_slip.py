"""The released de-normalisation, against the broadcast that it comes from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from levelhead.data.windows import Windows
from levelhead.nn.samformer import SAMformerNet
from levelhead.studies.forecasting_slip import slipped_absolute, slipped_errors, slipped_squares

CONTEXT, HORIZON, CHANNELS = 12, 5, 3
EPS = 1e-5


def windows(dtype: torch.dtype = torch.float64, offset: float = 0.0) -> Windows:
    draw = np.random.default_rng(4)
    series = np.cumsum(draw.normal(size=(CHANNELS, 40)), axis=1) + offset
    return Windows(series, CONTEXT, HORIZON, dtype=dtype)


def released(core: np.ndarray, found: Windows, index: list[int]) -> np.ndarray:
    """Residuals [B, B, H, D] as the released layer broadcasts them: `x * stdev[:, :, None]`."""
    rows = np.stack([found.series[:, i : i + CONTEXT + HORIZON].T for i in index])
    x, y = rows[:, :CONTEXT], rows[:, CONTEXT:]
    mean = x.mean(axis=1, keepdims=True)
    stdev = np.sqrt(x.var(axis=1, keepdims=True) + EPS)
    outputs = core.transpose(1, 2, 0)  # [B, H, D]
    return outputs * stdev[:, :, None] + mean[:, :, None] - y


def forecast(count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(5).normal(size=(CHANNELS, count, HORIZON)))


INDEX = [0, 3, 4, 11, 20]


@pytest.mark.parametrize("measure", ["squares", "absolute"])
def test_the_errors_are_those_of_the_released_broadcast(measure: str) -> None:
    found, core = windows(), forecast(len(INDEX))
    residual = released(core.numpy(), found, INDEX)
    assert residual.shape == (5, 5, HORIZON, CHANNELS)
    batch = found.batch(torch.tensor(INDEX))
    if measure == "squares":
        got, expected = slipped_squares(core, batch), (residual**2).mean(axis=(0, 2, 3))
    else:
        got, expected = slipped_absolute(core, batch), np.abs(residual).mean(axis=(0, 2, 3))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)


def test_the_gradient_is_that_of_the_released_loss() -> None:
    found, core = windows(), forecast(len(INDEX)).requires_grad_()
    loss = slipped_squares(core, found.batch(torch.tensor(INDEX))).mean()
    (got,) = torch.autograd.grad(loss, core)
    residual = released(core.detach().numpy(), found, INDEX)
    stdev = np.stack([found.series[:, i : i + CONTEXT] for i in INDEX]).var(axis=2)
    scale = np.sqrt(stdev + EPS)  # [B, D]
    expected = (2 * residual * scale[:, None, None, :]).sum(axis=0) / residual.size
    np.testing.assert_allclose(got.numpy(), expected.transpose(2, 0, 1), rtol=1e-10, atol=1e-15)


def test_a_batch_of_one_is_a_correct_revin() -> None:
    found, core = windows(), forecast(1)
    batch = found.batch(torch.tensor([7]))
    expected = (batch.centred(core) - batch.target).square().mean()
    torch.testing.assert_close(slipped_squares(core, batch)[0], expected, rtol=1e-12, atol=0)


def test_a_level_far_away_costs_no_digits() -> None:
    index = torch.tensor(INDEX)
    core = forecast(len(INDEX)).float()
    near = slipped_squares(core, windows(torch.float32).batch(index))
    far = slipped_squares(core, windows(torch.float32, offset=1e5).batch(index))
    torch.testing.assert_close(far, near, rtol=1e-4, atol=0)


@pytest.mark.parametrize("absolute", [False, True])
def test_windows_are_judged_in_batches_of_neighbours(absolute: bool) -> None:
    found = windows()
    net = SAMformerNet(CONTEXT, HORIZON, CHANNELS, width=2).double()
    got = slipped_errors(net, found, 9, absolute=absolute)
    expected = []
    for start in range(0, len(found), 9):
        index = list(range(start, min(start + 9, len(found))))
        with torch.no_grad():
            core = net.core(found.batch(torch.tensor(index)).context).numpy()
        residual = released(core, found, index)
        residual = np.abs(residual) if absolute else residual**2
        expected += list(residual.mean(axis=(0, 2, 3)))
    assert len(found) % 9  # the last batch is a smaller one
    np.testing.assert_allclose(got, expected, rtol=1e-12)
