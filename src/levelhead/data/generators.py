"""Made-up data in which channels do inform each other, so that attention has something to find.

Axes: a series is `[D, T]`, windows are `[N, D, L]` and their targets `[N, D, H]`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from levelhead.base.errors import InputError

__all__ = ["attention_windows", "followers"]

FloatArray = NDArray[np.float64]


def attention_windows(
    count: int,
    *,
    channels: int = 7,
    context: int = 96,
    horizon: int = 24,
    width: int = 16,
    sharpness: float = 4.0,
    mixing: float = 3.0,
    noise: float = 0.1,
    seed: int = 0,
) -> tuple[FloatArray, FloatArray]:
    """Windows `[N, D, L]` and targets `[N, D, H]` made by SAMformer's own equation (3).

    Y = [X + A(X) X W_V W_O] W + noise with A(X) = softmax(X W_Q W_Kᵀ Xᵀ/√m) (Ilbert et al. 2024,
    eqs. 3-4). The rows of X are normal, each with mean 0 and deviation 1, so that reversible
    normalisation leaves them alone. W_Q and W_K are orthonormal up to scale, with the logits'
    deviation at `sharpness`, which makes rows of A nearly one-hot; `mixing` is the size of the
    attended part relative to X. No line sees which channel a row of A selects.

    >>> x, y = attention_windows(5, seed=1)
    >>> x.shape, y.shape
    ((5, 7, 96), (5, 7, 24))
    """
    if not 1 <= width < context:
        raise InputError(f"width must lie between 1 and context - 1 = {context - 1}, {width} given")
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, channels, context))
    x -= x.mean(axis=-1, keepdims=True)
    x /= x.std(axis=-1, keepdims=True)
    frame, _ = np.linalg.qr(draw.normal(size=(context, width)))
    turn, _ = np.linalg.qr(draw.normal(size=(width, width)))
    # With orthonormal columns X W_Q is standard normal; Q Kᵀ/√m then has deviation one.
    query, key = frame * sharpness, frame @ turn
    value, _ = np.linalg.qr(draw.normal(size=(context, width)))
    output = mixing * value.T * np.sqrt(context / width)
    head = draw.normal(size=(context, horizon)) / np.sqrt(context)
    logits = (x @ query) @ (x @ key).transpose(0, 2, 1) / np.sqrt(width)
    attention = np.exp(logits - logits.max(axis=-1, keepdims=True))
    attention /= attention.sum(axis=-1, keepdims=True)
    y = (x + attention @ (x @ value) @ output) @ head
    return x, y + noise * draw.normal(size=y.shape)


def followers(
    steps: int,
    *,
    channels: int = 7,
    lag: int = 24,
    radius: float = 0.97,
    period: float = 30.0,
    noise: float = 0.05,
    seed: int = 0,
) -> FloatArray:
    """A series `[D, T]`: channel 0 is a smooth AR(2) leader, the others repeat it later.

    The leader is a damped stochastic oscillation (`period` steps, `radius` per step) of deviation
    one; follower i repeats it `lag` steps later and has its own gain, level and noise. With a
    horizon of at most `lag` steps the future of the followers lies in the past of the leader; the
    leader itself stays unpredictable.

    >>> followers(100, seed=1).shape
    (7, 100)
    """
    draw = np.random.default_rng(seed)
    burn = 2000
    first, second = 2 * radius * np.cos(2 * np.pi / period), -(radius**2)
    shocks = draw.normal(size=steps + lag + burn)
    leader = np.zeros_like(shocks)
    for t in range(2, len(leader)):
        leader[t] = first * leader[t - 1] + second * leader[t - 2] + shocks[t]
    leader = leader[burn:] / leader[burn:].std()
    gains = draw.uniform(0.5, 2.0, size=channels - 1)
    levels = draw.normal(size=channels - 1)
    series = np.empty((channels, steps))
    series[0] = leader[lag:]
    series[1:] = levels[:, None] + gains[:, None] * leader[None, :steps]
    return series + noise * draw.normal(size=series.shape)
