"""Fitted lines against least squares on windows written out one by one, λ against brute force."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from levelhead.base.errors import InputError
from levelhead.forecasting.lines import (
    PENALTIES,
    LineKind,
    fit_line,
    fit_line_to_pairs,
    refit_line,
    refit_line_to_pairs,
)
from levelhead.nn.linear import predict_line
from oracles import forecasting as oracle
from oracles import windows as window_oracle

L, H, TRAIN, END = 12, 4, 150, 200
KINDS: list[LineKind] = ["linear", "linear-revin"]
CENTRE = {"linear": "last", "linear-revin": "mean"}
FLOOR = {"linear": None, "linear-revin": 1.0}


@pytest.fixture(scope="module")
def series() -> np.ndarray:
    values = oracle.waves(END, 3).T
    return (values - values.mean(axis=1, keepdims=True)) / values.std(axis=1, keepdims=True)


def starts(first: int, last: int, *, reach_back: bool) -> list[int]:
    return window_oracle.starts(first, last, L, H, reach_back)


def ridge(series: np.ndarray, at: list[int], penalty: float, kind: LineKind) -> np.ndarray:
    z, y = oracle.stacked(series, L, H, at, CENTRE[kind], FLOOR[kind])
    return oracle.ridge_head(z, y, penalty, CENTRE[kind])


def error(series: np.ndarray, at: list[int], head: np.ndarray) -> float:
    """Unweighted: a line is judged on the series as they are, however its windows weighed."""
    residuals = [c[t : t + L] @ head - c[t + L : t + L + H] for c in series for t in at]
    return float(np.mean(np.square(residuals)))


def relative(curves: list[list[float]]) -> float:
    """The λ of the grid whose mean error relative to each block's best is least."""
    ratios = [np.array(curve) / min(curve) for curve in curves]
    return PENALTIES[int(np.argmin(np.mean(ratios, axis=0)))]


def blocked_choice(
    series: np.ndarray, train: tuple[int, int], validation: tuple[int, int], kind: LineKind
) -> float:
    """λ by brute force: four held-out blocks of the training rows, and the validation rows."""
    edges = [int(e) for e in np.linspace(*train, 5)]
    curves = []
    for a, b in pairwise(edges):
        inside = [t for t in starts(a, b, reach_back=True) if t >= train[0]]
        outside = starts(train[0], a, reach_back=False) + starts(b, train[1], reach_back=False)
        heads = [ridge(series, outside, p, kind) for p in PENALTIES]
        curves.append([error(series, inside, h) for h in heads])
    whole = starts(*train, reach_back=False)
    judged = starts(*validation, reach_back=True)
    curves.append([error(series, judged, ridge(series, whole, p, kind)) for p in PENALTIES])
    return relative(curves)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("train", [(0, TRAIN), (9, TRAIN)])
def test_line_is_the_ridge_at_the_penalty_of_blocked_validation(
    series: np.ndarray, kind: LineKind, train: tuple[int, int]
) -> None:
    line = fit_line(series, L, H, train, (TRAIN, END), kind)
    assert line.penalty == blocked_choice(series, train, (TRAIN, END), kind)
    expected = ridge(series, starts(*train, reach_back=False), line.penalty, kind)
    np.testing.assert_allclose(line.head.numpy(), expected, rtol=0, atol=1e-9)
    assert (line.name, line.parameters) == (kind, L * H)
    np.testing.assert_allclose(line.head.numpy().sum(axis=0), 1.0, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_grid_is_not_left_and_noise_wants_more(series: np.ndarray, kind: LineKind) -> None:
    draw = np.random.default_rng(3)
    noisy = fit_line(draw.normal(size=(3, END)), L, H, (0, TRAIN), (TRAIN, END), kind)
    smooth = fit_line(series, L, H, (0, TRAIN), (TRAIN, END), kind)
    assert PENALTIES[0] <= smooth.penalty < noisy.penalty <= PENALTIES[-1]


def test_rows_behind_validation_change_nothing(series: np.ndarray) -> None:
    other = series.copy()
    other[:, 180:] = 1e3
    one, two = (fit_line(s, L, H, (0, TRAIN), (TRAIN, 180)) for s in (series, other))
    assert one.penalty == two.penalty
    assert torch.equal(one.head, two.head)


@pytest.mark.parametrize("seed", range(3))
def test_a_block_in_which_nothing_moves_does_not_choose_the_penalty(seed: int) -> None:
    """Rounding is all its error: relative to the best of that it would outvote the others."""
    still = oracle.waves(600, 1, seed).T.copy()
    still = (still - still.mean()) / still.std()
    jitter = 1e-9 * np.random.default_rng(seed).normal(size=150 + L)
    still[:, 150 - L : 300] = still[:, [150 - L]] + jitter
    curves = []
    for a, b in [(0, 150), (300, 450), (450, 600)]:
        inside = starts(a, b, reach_back=True)
        outside = starts(0, a, reach_back=False) + starts(b, 600, reach_back=False)
        heads = [ridge(still, outside, p, "linear") for p in PENALTIES]
        curves.append([error(still, inside, head) for head in heads])
    assert fit_line(still, L, H, (0, 600), (600, 600)).penalty == relative(curves)


def test_constant_channels_are_forecast_as_they_are(series: np.ndarray) -> None:
    line = fit_line(np.zeros((1, END)), L, H, (0, TRAIN), (TRAIN, END))
    made = predict_line(np.full(L, 7.0), line.head.numpy(), "last")
    np.testing.assert_allclose(made, 7.0, rtol=1e-12)


def test_few_rows_still_give_a_line(series: np.ndarray) -> None:
    line = fit_line(series[:, : L + H], L, H, (0, L + H), (L + H, L + H))
    assert line.penalty == 1.0
    with pytest.raises(InputError, match=r"15 training rows hold no window of context 12"):
        fit_line(series, L, H, (0, L + H - 1), (TRAIN, END))


@pytest.mark.parametrize("kind", KINDS)
def test_refit_keeps_penalty_and_kind_on_other_rows(series: np.ndarray, kind: LineKind) -> None:
    line = fit_line(series, L, H, (0, TRAIN), (TRAIN, END), kind)
    again = refit_line(line, series, (0, END))
    assert (again.penalty, again.name) == (line.penalty, kind)
    expected = ridge(series, starts(0, END, reach_back=False), line.penalty, kind)
    np.testing.assert_allclose(again.head.numpy(), expected, rtol=0, atol=1e-9)
    assert not torch.equal(again.head, line.head)


# -- windows given one by one ---------------------------------------------------------------------


def cut(series: np.ndarray, at: list[int]) -> tuple[np.ndarray, np.ndarray]:
    contexts = np.stack([series[:, t : t + L] for t in at])
    return contexts, np.stack([series[:, t + L : t + L + H] for t in at])


def pair_error(contexts: np.ndarray, targets: np.ndarray, head: np.ndarray) -> float:
    return float(np.mean((contexts @ head - targets) ** 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("revin", [True, False])
def test_line_for_pairs(series: np.ndarray, kind: LineKind, revin: bool) -> None:
    contexts, targets = cut(series, list(range(100)))
    validating, count = 20, 80
    centre = CENTRE[kind] if revin else None
    floor = FLOOR[kind] if revin else None

    def solved(rows: list[int], penalty: float) -> np.ndarray:
        x, y = contexts[rows].reshape(-1, L), targets[rows].reshape(-1, H)
        if centre is None:
            return np.linalg.solve(x.T @ x + penalty * len(x) * np.eye(L), x.T @ y)
        parts = [
            oracle.stacked(np.hstack([x[[i]], y[[i]]]), L, H, [0], centre, floor)
            for i in range(len(x))
        ]
        z, t = (np.concatenate(p) for p in zip(*parts, strict=True))
        return oracle.ridge_head(z, t, penalty, centre)

    curves = []
    for a in range(0, count, 20):
        inside = list(range(a, a + 20))
        outside = [i for i in range(count) if i not in inside]
        curves.append(
            [pair_error(contexts[inside], targets[inside], solved(outside, p)) for p in PENALTIES]
        )
    fitted, judged = list(range(count)), list(range(count, 100))
    curves.append(
        [pair_error(contexts[judged], targets[judged], solved(fitted, p)) for p in PENALTIES]
    )
    line = fit_line_to_pairs(contexts, targets, validating, kind, revin=revin)
    assert line.penalty == relative(curves)
    expected = solved(fitted, line.penalty)
    np.testing.assert_allclose(line.head.numpy(), expected, rtol=0, atol=1e-9)
    again = refit_line_to_pairs(line, contexts, targets, revin=revin)
    whole = solved(list(range(100)), line.penalty)
    np.testing.assert_allclose(again.head.numpy(), whole, rtol=0, atol=1e-9)
    assert (again.name, again.penalty) == (kind, line.penalty)


def test_pairs_cut_from_a_series_give_the_line_of_the_series(series: np.ndarray) -> None:
    contexts, targets = cut(series, starts(0, TRAIN, reach_back=False))
    line = fit_line(series, L, H, (0, TRAIN), (TRAIN, END))
    again = refit_line_to_pairs(line, contexts, targets)
    np.testing.assert_allclose(again.head.numpy(), line.head.numpy(), atol=1e-10)
