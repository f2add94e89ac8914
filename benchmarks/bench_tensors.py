"""Decompositions and spectra against TensorLy, dense SVDs and two SVDs of the factors.

Tensors are float32 of BERT's size, unless a row says otherwise: standard normal, and the same with
falling spectra in every mode ("smooth"), which is nearer to trained weights. Where two fits are
compared, a row of their relative errors follows.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from levelhead.base.errors import LevelheadWarning
from levelhead.tensors.cp import cp
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.tensors.multilinear import multi_mode_product
from levelhead.tensors.tucker import tucker, tucker_of_stack

LAYERS, HEADS, INNER, WIDTH = 12, 12, 64, 768
KINDS = ["normal", "smooth"]


def head_tensor(kind: str) -> Tensor:
    """[h, r, d, 3] as stored: the axis of length 3 first in memory."""
    torch.manual_seed(0)
    x = torch.randn(3, HEADS, INNER, WIDTH).permute(1, 2, 3, 0)
    if kind == "normal":
        return x
    falls = [
        torch.linalg.qr(torch.randn(n, n)).Q * torch.arange(1, n + 1).float() ** -0.5
        for n in (HEADS, INNER, WIDTH)
    ]
    return multi_mode_product(x, [*falls, None])


def qk_stack(kind: str) -> LowRankStack:
    x = head_tensor(kind)
    return LowRankStack(x[..., 0].contiguous(), x[..., 1].contiguous())


@pytest.fixture
def decomposition():
    """TensorLy's decompositions on torch tensors."""
    tensorly = pytest.importorskip("tensorly")
    with tensorly.backend_context("pytorch"):
        yield pytest.importorskip("tensorly.decomposition")


def error_of(x: Tensor, model: Tensor) -> float:
    wide = x.double()
    return float(((wide - model.double()).square().sum() / wide.square().sum()).sqrt())


@pytest.mark.parametrize("kind", KINDS)
def test_tucker_of_head_tensors(rows, decomposition, kind: str) -> None:
    """TensorLy stops at a change of 1e-4, its default; ours at half of that, at no larger error."""
    x, ranks = head_tensor(kind), (8, 32, 128, 3)
    plain = x.contiguous()
    theirs = decomposition.tucker(plain, ranks)
    name = f"Tucker {ranks} of [12, 64, 768, 3], {kind}"
    for method in ("hooi", "sthosvd"):
        rows.ratio(
            f"{name}: {method} vs TensorLy",
            lambda method=method: tucker(x, ranks, method=method, tolerance=5e-5),
            lambda: decomposition.tucker(plain, ranks),
            rounds=3,
            warm=0,
        )
    fits = {m: tucker(x, ranks, method=m, tolerance=5e-5) for m in ("hooi", "sthosvd")}
    found = ", ".join(f"{m} {fit.relative_error:.6f}" for m, fit in fits.items())
    rows.note(f"{name}: errors", f"{found}, TensorLy {error_of(plain, theirs.to_tensor()):.6f}")


@pytest.mark.parametrize("kind", KINDS)
def test_cp_of_head_tensors(rows, decomposition, kind: str) -> None:
    """100 sweeps each from random factors; the line search gives other, better iterates."""
    x, rank = head_tensor(kind).contiguous(), 32

    def peer():
        return decomposition.parafac(x, rank, n_iter_max=100, init="random", tol=0, random_state=0)

    def ours(line_search: bool = False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LevelheadWarning)
            return cp(x, rank, init="random", sweeps=100, tolerance=0.0, line_search=line_search)

    name = f"CP-ALS R={rank}, 100 sweeps of [12, 64, 768, 3], {kind}"
    rows.ratio(f"{name} vs TensorLy", ours, peer, rounds=2, warm=0)
    rows.ratio(f"{name}, line search vs none", lambda: ours(True), ours, rounds=3, warm=0)
    rows.note(
        f"{name}: errors",
        f"plain {ours().relative_error:.6f}, line search {ours(True).relative_error:.6f}, "
        f"TensorLy {error_of(x, peer().to_tensor()):.6f}",
    )


def two_svds(stack: LowRankStack) -> Tensor:
    """Singular values of a factored product by an SVD of each factor and one of what is between."""
    _, s, v = torch.linalg.svd(stack.left.mT, full_matrices=False)
    p, t, _ = torch.linalg.svd(stack.right, full_matrices=False)
    return torch.linalg.svdvals(s[..., None] * (v @ p) * t[..., None, :])


def test_qk_spectra(rows) -> None:
    """144 heads, 12 layers one after another; ours in float64, the peers in float32."""
    stacks = [qk_stack("normal") for _ in range(LAYERS)]
    name = "QK spectra of 144 heads [768, 768], inner 64, in float64"

    def ours() -> list[Tensor]:
        return [stack.singular_values() for stack in stacks]

    rows.ratio(
        f"{name} vs two SVDs in float32", ours, lambda: [two_svds(s) for s in stacks], rounds=3
    )
    # One layer on both sides: the dense peer takes seconds for each.
    rows.ratio(
        f"{name} vs dense SVD in float32 (a layer)",
        stacks[0].singular_values,
        lambda: torch.linalg.svdvals(stacks[0].dense()),
        rounds=3,
        warm=0,
    )
    exact = torch.linalg.svdvals(stacks[0].to(torch.float64).dense()[:1])[:, :INNER]
    off = ((ours()[0][:1] - exact).abs().max() / exact.max()).item()
    rows.note(f"{name}: largest error against dense float64", f"{off:.1e} of the largest value")


def test_nuclear_norm_with_gradient(rows) -> None:
    """Forward and backward of one layer of 12 heads."""
    stack = qk_stack("normal")
    left, right = (f.clone().requires_grad_() for f in (stack.left, stack.right))

    def ours() -> None:
        LowRankStack(left, right).nuclear_norms().sum().backward()

    def peer() -> None:
        torch.linalg.matrix_norm(left.mT @ right, ord="nuc").sum().backward()

    name = "nuclear norms of 12 QK forms with gradient"
    rows.ratio(f"{name}, float64 vs dense float32", ours, peer, rounds=3, warm=1)


def test_head_gram(rows) -> None:
    stack = qk_stack("normal")

    def peer() -> Tensor:
        flat = stack.dense().flatten(1)
        return flat @ flat.mT

    name = "head Gram of 12 QK forms"
    rows.ratio(f"{name}, float64 vs dense float32", stack.head_gram, peer)
    rows.ratio(
        f"{name}, float32 vs dense float32", lambda: stack.head_gram(dtype=torch.float32), peer
    )


@pytest.mark.parametrize("kind", KINDS)
def test_tucker_of_qk_stacks(rows, decomposition, kind: str) -> None:
    """The [12, 768, 768] tensor from its factors; the peer gets the dense tensor for nothing.

    The randomised mode is asked for a number of sweeps: 6 for an error within 0.3 % of the peer's
    on both spectra, 12 for one within 0.1 %.
    """
    stack, ranks = qk_stack(kind), (8, 128, 128)
    dense = stack.dense()
    name = f"Tucker {ranks} of a QK stack [12, 768, 768], {kind}"

    def peer():
        return decomposition.tucker(dense, ranks)

    options = {
        "hooi": {"tolerance": 5e-5},
        "randomised, 6 sweeps": {"method": "randomised", "sweeps": 6, "tolerance": 0.0},
        "randomised, 12 sweeps": {"method": "randomised", "sweeps": 12, "tolerance": 0.0},
    }
    errors = []
    for label, chosen in options.items():
        rows.ratio(
            f"{name}: {label} vs TensorLy",
            lambda chosen=chosen: tucker_of_stack(stack, ranks, **chosen),
            peer,
            rounds=3,
            warm=0,
        )
        errors.append(f"{label} {tucker_of_stack(stack, ranks, **chosen).relative_error:.6f}")
    theirs = error_of(dense, peer().to_tensor())
    rows.note(f"{name}: errors", f"{', '.join(errors)}, TensorLy {theirs:.6f}")


def test_large_tucker(rows) -> None:
    """Seconds and peak resident memory of a layer of 7B size, the tensor and torch included."""
    script = Path(__file__).with_name("large_tucker.py")
    found = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True
    )
    rows.note("Tucker (16, 64, 256, 3) of [32, 128, 4096, 3], two threads", found.stdout.strip())
