"""Made-up data: do they obey the equations they are said to be made by?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from levelhead.data.generators import attention_windows, followers
from oracles import samformer as oracle

SIZES = {"channels": 5, "context": 24, "horizon": 6, "width": 4}


def relative_residual(design: np.ndarray, target: np.ndarray) -> float:
    """Size of what least squares leaves of `target`, relative to it."""
    fitted = design @ np.linalg.lstsq(design, target, rcond=None)[0]
    return float(np.linalg.norm(target - fitted) / np.linalg.norm(target))


class Recorder:
    """A generator that remembers what it has drawn."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator
        self.drawn: list[np.ndarray] = []

    def normal(self, size: Any) -> np.ndarray:
        self.drawn.append(self.generator.normal(size=size))
        return self.drawn[-1].copy()


def test_attention_windows_obey_equations_3_and_4(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(np.random.default_rng(3))
    monkeypatch.setattr(np.random, "default_rng", lambda seed: recorder)
    x, y = attention_windows(8, **SIZES, sharpness=2.0, mixing=1.5, noise=0.3)
    raw, frame, turn, value, head, noise = recorder.drawn
    assert raw.shape == x.shape
    assert noise.shape == y.shape
    (frame, _), (turn, _), (value, _) = map(np.linalg.qr, (frame, turn, value))
    parameters = {
        "query": 2.0 * frame,
        "key": frame @ turn,
        "value": value,
        # W_V has orthonormal columns: X W_V W_O is as large as `mixing` times X.
        "output": 1.5 * value.T * (24 / 4) ** 0.5,
        "head": head / 24**0.5,
    }
    tensors = {name: torch.from_numpy(array) for name, array in parameters.items()}
    made = oracle.forecast(torch.from_numpy(x), tensors, revin=False).numpy()
    np.testing.assert_allclose(y, made + 0.3 * noise, rtol=1e-11, atol=1e-11)


def test_logits_have_the_promised_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[np.ndarray] = []
    exp = np.exp

    def spy(shifted: np.ndarray) -> np.ndarray:
        seen.append(shifted.copy())
        return exp(shifted)

    monkeypatch.setattr(np, "exp", spy)
    attention_windows(2000, channels=3, sharpness=5.0)
    (logits,) = seen
    # Differences within a row do not know the maximum that was taken off; 6000 of them.
    apart = np.stack([logits[:, i, (i + 1) % 3] - logits[:, i, (i + 2) % 3] for i in range(3)])
    assert apart.std() / 2**0.5 == pytest.approx(5.0, rel=8 / (2 * 6000) ** 0.5)


def test_the_attended_part_has_the_promised_size() -> None:
    _, still = attention_windows(400, sharpness=1e3, mixing=0.0, noise=0.0)
    _, moved = attention_windows(400, sharpness=1e3, mixing=2.0, noise=0.0)
    # Rows of A are one-hot here: the attended part is as large as 2 X, seen through the head.
    assert (moved - still).std() / still.std() == pytest.approx(2.0, rel=0.1)


def test_rows_are_what_reversible_normalisation_leaves_alone() -> None:
    x, _ = attention_windows(9, **SIZES)
    np.testing.assert_allclose(x.mean(axis=-1), 0.0, atol=1e-14)
    np.testing.assert_allclose(x.std(axis=-1), 1.0, rtol=1e-13)


def test_lines_see_everything_but_the_attention() -> None:
    options = {**SIZES, "noise": 0.0}
    x, y = attention_windows(60, **options, mixing=0.0)
    flat = (x.reshape(-1, 24), y.reshape(-1, 6))
    assert relative_residual(*flat) < 1e-12
    # Flat attention: the attended part is linear in the mean over channels, a line of 2 L inputs.
    x, y = attention_windows(60, **options, sharpness=0.0)
    both = np.concatenate([x, np.broadcast_to(x.mean(axis=1, keepdims=True), x.shape)], axis=-1)
    assert relative_residual(both.reshape(-1, 48), y.reshape(-1, 6)) < 1e-12
    assert relative_residual(x.reshape(-1, 24), y.reshape(-1, 6)) > 0.1
    # Sharp attention: neither helps.
    x, y = attention_windows(60, **options)
    both = np.concatenate([x, np.broadcast_to(x.mean(axis=1, keepdims=True), x.shape)], axis=-1)
    assert relative_residual(both.reshape(-1, 48), y.reshape(-1, 6)) > 0.5


def test_the_noise_has_its_deviation_and_is_added_last() -> None:
    x, clean = attention_windows(300, **SIZES, noise=0.0, seed=4)
    same, noisy = attention_windows(300, **SIZES, noise=0.5, seed=4)
    np.testing.assert_array_equal(x, same)
    count = clean.size  # 9000 draws: the standard error of the deviation is .5/√(2·9000)
    assert (noisy - clean).std() == pytest.approx(0.5, abs=8 * 0.5 / (2 * count) ** 0.5)


def test_followers_repeat_the_leader_exactly() -> None:
    lag = 7
    series = followers(400, channels=5, lag=lag, noise=0.0, seed=2)
    leader = series[0]
    slopes = []
    for follower in series[1:]:
        design = np.stack([leader[:-lag], np.ones(400 - lag)], axis=1)
        assert relative_residual(design, follower[lag:]) < 1e-12
        slopes.append(np.linalg.lstsq(design, follower[lag:], rcond=None)[0][0])
        early = np.stack([leader[: -lag - 1], np.ones(399 - lag)], axis=1)
        assert relative_residual(early, follower[lag + 1 :]) > 0.05
    assert 0.5 <= min(slopes) < max(slopes) <= 2.0
    assert len({round(s, 6) for s in slopes}) == 4


def test_the_leader_is_the_autoregression_it_is_said_to_be() -> None:
    count, radius, period = 20_000, 0.9, 20.0
    leader = followers(count, channels=1, radius=radius, period=period, noise=0.0)[0]
    design = np.stack([leader[1:-1], leader[:-2]], axis=1)
    first, second = np.linalg.lstsq(design, leader[2:], rcond=None)[0]
    error = 8 * ((1 - radius**4) / count) ** 0.5  # Var(φ₂) = (1 - φ₂²)/n for an AR(2)
    assert first == pytest.approx(2 * radius * np.cos(2 * np.pi / period), abs=error)
    assert second == pytest.approx(-(radius**2), abs=error)
    assert leader.std() == pytest.approx(1.0, abs=0.15)


def test_observation_noise_is_separate_in_every_channel() -> None:
    clean = followers(3000, channels=3, noise=0.0, seed=5)
    noise = followers(3000, channels=3, noise=0.2, seed=5) - clean
    error = 8 * 0.2 / (2 * 3000) ** 0.5
    np.testing.assert_allclose(noise.std(axis=1), 0.2, atol=error)
    assert np.abs(np.corrcoef(noise) - np.eye(3)).max() < 8 / 3000**0.5


@pytest.mark.parametrize("make", [attention_windows, followers])
def test_a_seed_decides_everything(make: Any) -> None:
    first, again, other = make(30, seed=1), make(30, seed=1), make(30, seed=2)
    np.testing.assert_array_equal(np.hstack(np.ravel(first[0])), np.hstack(np.ravel(again[0])))
    assert not np.allclose(first[0], other[0])
    assert first[0].dtype == np.float64
