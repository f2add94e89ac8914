"""Noise and attacks against closed forms: of linear models the worst change is known."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from sklearn.metrics import f1_score
from torch import Tensor, nn
from torch.nn import functional

from levelhead.base.errors import InputError
from levelhead.evaluation.robustness import accuracy, fgsm, macro_f1, noise_accuracy, pgd

COUNT, SIZE = 200, 6


def linear(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """w [k], x [n, k] and y [n] that x·w tells apart, but for some."""
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(SIZE, generator=draw, dtype=torch.float64)
    x = torch.randn(COUNT, SIZE, generator=draw, dtype=torch.float64)
    noise = 0.3 * torch.randn(COUNT, generator=draw, dtype=torch.float64)
    return w, x, (x @ w + noise > 0).long()


def logits(w: Tensor, x: Tensor) -> Tensor:
    return torch.stack([-(x @ w), x @ w], dim=-1)


def margins(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (2 * y - 1) * (x @ w)


@pytest.mark.parametrize("radius", [0.0, 0.05, 0.3])
def test_a_signed_step_takes_radius_times_the_1_norm_off_a_linear_margin(radius: float) -> None:
    w, x, y = linear()
    moved = fgsm(lambda x: logits(w, x), x, y, radius)
    expected = margins(w, x, y) - radius * w.abs().sum()
    torch.testing.assert_close(margins(w, moved, y), expected, rtol=1e-10, atol=1e-12)
    right = float((expected > 0).double().mean())
    assert accuracy(lambda x: logits(w, x), moved, y) == right


@pytest.mark.parametrize(("norm", "dual"), [("linf", 1), ("l2", 2)])
@pytest.mark.parametrize("seed", [None, 3])
def test_projected_ascent_finds_the_worst_change_of_a_linear_model(
    norm: str, dual: int, seed: int | None
) -> None:
    w, x, y = linear()
    # With steps of the radius what a start has across w is halved at least every time.
    moved = pgd(lambda x: logits(w, x), x, y, 0.3, steps=30, step=0.3, norm=norm, seed=seed)  # type: ignore
    expected = margins(w, x, y) - 0.3 * torch.linalg.vector_norm(w, dual)
    torch.testing.assert_close(margins(w, moved, y), expected, rtol=1e-3, atol=1e-4)
    size = (moved - x).abs().amax(1) if norm == "linf" else (moved - x).norm(dim=1)
    assert float(size.max()) <= 0.3 * (1 + 1e-12)


def test_projected_ascent_is_at_least_as_bad_as_a_signed_step() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(SIZE, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    _, x, y = linear()
    one = fgsm(net, x, y, 0.4)
    # Its first step of the whole radius is the signed step, and it keeps the worst point.
    many = pgd(net, x, y, 0.4, steps=5, step=0.4)
    losses = [functional.cross_entropy(net(at), y, reduction="none") for at in (x, one, many)]
    assert bool((losses[2] >= losses[1] - 1e-12).all())
    assert bool((losses[2] >= losses[0] - 1e-12).all())
    assert bool((losses[2] > losses[1] + 1e-6).any())


def test_changes_keep_to_limits_and_weights_get_no_gradient() -> None:
    torch.manual_seed(0)
    net = nn.Linear(SIZE, 3).double()
    _, x, y = linear()
    x = x.clamp(-1, 1)
    for moved in (
        fgsm(net, x, y, 0.5, limits=(-1.0, 1.0)),
        pgd(net, x, y, 0.5, steps=3, limits=(-1.0, 1.0), seed=1),
    ):
        assert float(moved.abs().max()) <= 1.0
        assert not moved.requires_grad
    assert net.weight.grad is None
    assert not x.requires_grad


def test_tokens_have_classes_of_their_own() -> None:
    w, x, y = linear()
    whole, classes = x.view(20, 10, SIZE), y.view(20, 10)
    moved = fgsm(lambda x: logits(w, x), whole, classes, 0.1)
    single = fgsm(lambda x: logits(w, x), x, y, 0.1)
    torch.testing.assert_close(moved.view(COUNT, SIZE), single)
    # The ball is around the whole example: its 2-norm is over all tokens.
    worst = pgd(lambda x: logits(w, x), whole, classes, 0.1, norm="l2", steps=5)
    assert float((worst - whole).flatten(1).norm(dim=1).max()) <= 0.1 * (1 + 1e-12)
    assert float((worst - whole).norm(dim=2).amax(1).median()) < 0.09


def test_noise_flips_a_linear_answer_as_often_as_the_normal_law_says() -> None:
    w = torch.tensor([0.6, 0.8], dtype=torch.float64)
    x = torch.tensor([[0.6, 0.8]], dtype=torch.float64).expand(20_000, 2)
    y = torch.ones(20_000, dtype=torch.long)
    found = noise_accuracy(lambda x: logits(w, x), x, y, 0.7, draws=2)
    expected = float(stats.norm.cdf(1 / 0.7))
    # A level off by 5 % moves the share by more than eight of these standard errors.
    error = math.sqrt(expected * (1 - expected) / 40_000)
    assert abs(expected - float(stats.norm.cdf(1 / 0.735))) > 6 * error
    assert abs(found - expected) < 4 * error
    assert noise_accuracy(lambda x: logits(w, x), x, y, 0.0) == 1.0


def test_macro_f1_is_that_of_scikit_learn() -> None:
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (30, 5), generator=draw)
    predicted = torch.where(torch.rand(30, 5, generator=draw) < 0.6, y, 2)
    expected = f1_score(y.flatten(), predicted.flatten(), average="macro")
    assert macro_f1(predicted, y, 7) == pytest.approx(expected, rel=1e-12)


def test_what_does_not_fit_is_refused() -> None:
    w, x, y = linear()

    def model(x: Tensor) -> Tensor:
        return logits(w, x)

    with pytest.raises(InputError, match=r"radius=-1\.0 was given"):
        fgsm(model, x, y, -1.0)
    with pytest.raises(InputError, match="norm 'l1' was given"):
        pgd(model, x, y, 0.1, norm="l1")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="steps=0 was given"):
        pgd(model, x, y, 0.1, steps=0)
    with pytest.raises(InputError, match=r"logits \[200, 2\] for classes \[200, 1\]"):
        fgsm(model, x, y[:, None], 0.1)
    with pytest.raises(InputError, match="draws=0 was given"):
        noise_accuracy(model, x, y, 0.1, draws=0)
    with pytest.raises(InputError, match="expected equal shapes"):
        macro_f1(y, y[:-1], 2)
