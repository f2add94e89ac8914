"""RevIN: there and back for every kind of channel, and its formula in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from levelhead.base.errors import InputError
from levelhead.nn.reversible_norm import ReversibleNorm

KINDS = [
    "ordinary",
    "zero",
    "constant",
    "large constant",
    "near-constant",
    "offset",
    "huge",
    "tiny",
]
BACK = {torch.float64: 1e-6, torch.float32: 1e-5}


def channels(length: int = 64) -> np.ndarray:
    """One channel `[8, L]` of each kind."""
    noise = np.random.default_rng(0).normal(size=(8, length))
    level = np.array([3.0, 0.0, -5.3, 1e6 + 0.1, 0.0, 1e6, -1e8, 0.0])
    scale = np.array([1.0, 0.0, 0.0, 0.0, 1e-9, 1.0, 1e8, 1e-3])
    return level[:, None] + scale[:, None] * noise


def norm_of(affine: bool, dtype: torch.dtype, count: int = 8) -> ReversibleNorm:
    norm = ReversibleNorm(count, affine=affine)
    if norm.gain is not None and norm.shift is not None:
        draw = np.random.default_rng(1)
        gain = draw.uniform(0.2, 3.0, size=count) * draw.choice([-1.0, 1.0], size=count)
        norm.gain.data = torch.from_numpy(gain)
        norm.shift.data = torch.from_numpy(draw.normal(size=count))
    return norm.to(dtype)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_there_and_back(affine: bool, dtype: torch.dtype) -> None:
    x = torch.from_numpy(channels()).to(dtype)
    norm = norm_of(affine, dtype)
    z, statistics = norm(x)
    assert z.dtype == dtype
    back = norm.denorm(z, statistics)
    assert back.dtype == dtype
    error = (back.double() - x.double()).abs() / statistics.deviation
    assert dict(zip(KINDS, error.amax(dim=1).tolist(), strict=True)) == {
        kind: pytest.approx(0.0, abs=BACK[dtype]) for kind in KINDS
    }


# In float32 with gains the bound above is all there is: 3e-7 beside a shift of order one is lost.
@pytest.mark.parametrize(
    ("affine", "dtype"),
    [(False, torch.float32), (False, torch.float64), (True, torch.float64)],
)
def test_a_deviation_far_below_eps_survives(affine: bool, dtype: torch.dtype) -> None:
    x = 1e-9 * torch.from_numpy(channels())[:1].to(dtype)
    norm = norm_of(affine, dtype, count=1)
    back = norm.denorm(*norm(x)).detach()
    assert float((back - x).abs().max() / x.std()) < BACK[dtype]


@pytest.mark.parametrize("shape", [(3, 16), (5, 3, 16), (2, 5, 3, 16)])
def test_the_formula_and_its_shapes(shape: tuple[int, ...]) -> None:
    x = 2.0 + 3.0 * np.random.default_rng(2).normal(size=shape)
    norm = norm_of(True, torch.float64, count=3)
    assert norm.gain is not None
    assert norm.shift is not None
    gain, shift = (p.detach().numpy()[:, None] for p in (norm.gain, norm.shift))
    z, statistics = norm(torch.from_numpy(x))
    mean = x.sum(axis=-1, keepdims=True) / 16
    deviation = np.sqrt(((x - mean) ** 2).sum(axis=-1, keepdims=True) / 16 + 1e-5)
    assert statistics.mean.shape == statistics.deviation.shape == (*shape[:-1], 1)
    np.testing.assert_allclose(statistics.mean, mean, rtol=1e-13)
    np.testing.assert_allclose(statistics.deviation, deviation, rtol=1e-13)
    expected = gain * (x - mean) / deviation + shift
    np.testing.assert_allclose(z.detach(), expected, rtol=1e-12, atol=1e-12)
    # The way back holds for any horizon, each window with statistics of its own.
    y = np.random.default_rng(3).normal(size=(*shape[:-1], 7))
    made = norm.denorm(torch.from_numpy(y), statistics).detach()
    np.testing.assert_allclose(made, (y - shift) / gain * deviation + mean, rtol=1e-12, atol=1e-12)


def test_statistics_are_float64_and_know_no_batch_mates() -> None:
    x = 1e6 + torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0))
    norm = ReversibleNorm()
    together = norm.statistics(x)
    assert together.mean.dtype == together.deviation.dtype == torch.float64
    for i in range(4):
        alone = norm.statistics(x[i])
        torch.testing.assert_close(together.mean[i], alone.mean, rtol=1e-15, atol=0)
        torch.testing.assert_close(together.deviation[i], alone.deviation, rtol=1e-12, atol=0)


def test_eps_is_added_to_the_variance() -> None:
    assert ReversibleNorm(eps=0.25).statistics(torch.ones(1, 4)).deviation.item() == 0.5
    assert ReversibleNorm(eps=9.0).statistics(torch.tensor([[-4.0, 4.0]])).deviation.item() == 5.0


def test_a_zero_gain_falls_back_to_the_mean() -> None:
    norm = norm_of(True, torch.float64, count=2)
    assert norm.gain is not None
    with torch.no_grad():
        norm.gain[0] = 0.0
    x = torch.from_numpy(channels()[[0, 5]])
    z, statistics = norm(x)
    back = norm.denorm(z, statistics)
    np.testing.assert_allclose(back[0].detach(), statistics.mean[0].item(), rtol=1e-12)
    np.testing.assert_allclose(back[1].detach(), x[1], rtol=1e-12)
    back.square().sum().backward()
    assert norm.gain.grad is not None
    assert torch.isfinite(norm.gain.grad).all()


def test_gains_start_as_the_identity_and_learn() -> None:
    plain, affine = ReversibleNorm(), ReversibleNorm(3, affine=True)
    assert list(plain.parameters()) == []
    assert [tuple(p.shape) for p in affine.parameters()] == [(3,), (3,)]
    x = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain(x)[0], affine(x)[0])
    affine(x)[0].pow(3).sum().backward()
    assert all(p.grad is not None and bool((p.grad != 0).all()) for p in affine.parameters())


def test_wrong_channels_are_refused() -> None:
    with pytest.raises(InputError, match="needs the number of channels"):
        ReversibleNorm(affine=True)
    with pytest.raises(InputError, match=r"gains for 3 channels, the input has 1: .*affine=False"):
        ReversibleNorm(3, affine=True)(torch.zeros(5, 1, 16))
    z, _ = ReversibleNorm(3)(torch.zeros(5, 7, 16))
    assert z.shape == (5, 7, 16)
