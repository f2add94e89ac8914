"""Values of the catalogue against dense twins, on plain and on grouped heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.invariants.catalogue import catalogue, entries
from levelhead.invariants.decompositions import column_coherence, cp_of
from levelhead.invariants.entry import square_root
from levelhead.invariants.raw import core_slice_norms
from levelhead.invariants.similarity import (
    head_clusters,
    principal_cosines,
    procrustes_distances,
)
from levelhead.invariants.spectral import effective_qk, largest_logit
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.tensors.tucker import tucker, tucker_of_stack
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.canonical import canonical
from levelhead.weights.structure import Rope
from oracles import invariants as twin
from oracles.layers import LAYERS, gains, layer

VIEWS = {"plain": layer(5, d_v=3), "grouped": layer(6, h=6, g=2, d_k=3, d=11, biases="qkvo")}
each_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
each_stack = pytest.mark.parametrize("which", ["qk", "ov"])


def value(name: str, view: AttentionView, covariance: Tensor | None = None) -> np.ndarray:
    return catalogue()[name](view, covariance).numpy()


def dense(view: AttentionView, which: str) -> np.ndarray:
    return twin.forms(view) if which == "qk" else twin.maps(view)


def width(view: AttentionView, which: str) -> int:
    return view.d_k if which == "qk" else view.d_v


def same(found: np.ndarray, expected: object, rtol: float = 1e-10) -> None:
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol)


# ── what the gradient test differentiates is the number itself ──


@each_view
@pytest.mark.parametrize(
    ("name", "powers"),
    [
        *((f"qk_stack_{side}_spectrum", (2, 4, 6)) for side in ("head", "query", "key")),
        *((f"ov_stack_{side}_spectrum", (2, 4, 6)) for side in ("head", "output", "value")),
        *((f"{side}_angles", (2, 4)) for side in ("query", "key", "output", "value")),
    ],
)
def test_power_sums_are_those_of_the_values(
    view: AttentionView, name: str, powers: tuple[int, ...]
) -> None:
    entry = catalogue()[name]
    assert entry.smooth is not None
    expected = [(value(name, view) ** p).sum(-1) for p in powers]
    same(entry.smooth(view).numpy(), np.stack(expected), 1e-8)


@pytest.mark.parametrize("name", ["softmax", "grouped"])
def test_energies_of_the_inner_mode_in_balanced_gauge(name: str) -> None:
    view = layer(5) if name == "softmax" else layer(6, h=6, g=2, d_k=3, d=11)
    entry = catalogue()["canonical_inner_spectrum"]
    assert entry.smooth is not None
    same(entry.smooth(view).numpy(), value(entry.name, view) ** 2, 1e-9)


def test_angles_of_deficient_heads_are_not_differentiated() -> None:
    view = layer(5, d_v=3)
    flat = replace(view, q=torch.cat((view.q[:, :1], view.q[:, :1], view.q[:, 2:]), 1))
    entry = catalogue()["query_angles"]
    assert entry.smooth is not None
    assert bool((entry.smooth(flat) == 0).all())


# ── heads one by one ──


@each_view
@each_stack
def test_spectra_and_their_functions(view: AttentionView, which: str) -> None:
    a = dense(view, which)
    sigma = twin.spectra(a, width(view, which))
    same(value(f"{which}_spectrum", view), sigma)
    same(value(f"{which}_nuclear_norm", view), [np.linalg.norm(b, "nuc") for b in a])
    same(value(f"{which}_spectral_norm", view), [np.linalg.norm(b, 2) for b in a])
    same(value(f"{which}_frobenius_norm", view), [np.linalg.norm(b) for b in a])
    same(value(f"{which}_effective_rank", view), [twin.effective_rank(s) for s in sigma])
    same(value(f"{which}_participation_rank", view), (sigma**2).sum(1) ** 2 / (sigma**4).sum(1))
    same(value(f"{which}_reciprocal_condition", view), sigma[:, -1] / sigma[:, 0])
    assert value(f"{which}_rank", view).tolist() == [np.linalg.matrix_rank(b) for b in a]
    same(value(f"{which}_trace", view), [np.trace(b) for b in a])
    found = value(f"{which}_eigenvalues", view)
    for row, b in zip(found, a, strict=True):
        expected = np.linalg.eigvals(b)
        expected = expected[np.abs(expected).argsort()[::-1][: width(view, which)]]
        same(np.sort_complex(row), np.sort_complex(expected), 1e-9)


@each_view
def test_products_gains_and_preferences(view: AttentionView) -> None:
    b, m = twin.forms(view), twin.maps(view)
    same(value("ov_trace_products", view), [[np.trace(x @ y) for y in m] for x in m])
    gain = view.logit_scale * np.array([np.linalg.norm(x, 2) for x in b])
    same(value("largest_logit_gain", view), gain)
    # The gain is reached: the top singular vectors as tokens of length one.
    u, _, v = np.linalg.svd(b[0])
    assert abs(view.logit_scale * u[:, 0] @ b[0] @ v[0] - gain[0]) < 1e-12
    ranks = value("head_map_ranks", view)
    assert ranks.tolist() == [[view.d_k, view.d_k, view.d_v, view.d_v]] * view.heads
    if view.q_bias is not None:
        expected = [
            np.linalg.norm(view.k[g].numpy().T @ view.q_bias[i].numpy())
            for i, g in enumerate(view.kv_group)
        ]
        same(value("key_preference_norm", view), expected)


def test_ranks_of_a_head_map_are_those_of_the_dense_tensor() -> None:
    view = layer(1, h=2, d_k=2, d_v=1, d=4, out=3)
    o = view.o.clone()
    o[1] = 0
    view = replace(view, o=o)
    assert value("head_map_ranks", view).tolist() == [[2, 2, 1, 1], [0, 0, 0, 0]]
    tensor = view.head_map(0).dense().numpy()
    ranks = [
        np.linalg.matrix_rank(np.moveaxis(tensor, k, 0).reshape(tensor.shape[k], -1))
        for k in range(4)
    ]
    assert ranks == [2, 2, 1, 1]


def test_the_normalised_spectrum_holds_gains_and_centring() -> None:
    view = layer(2, g=2, qk_norm=gains("layer", q=(4, 4), k=(2, 4)))
    norm = view.qk_norm
    centre = np.eye(4) - 0.25
    expected = []
    for i, g in enumerate(view.kv_group):
        q = np.diag(norm.q_gain[i].numpy()) @ centre @ view.q[i].numpy()
        k = np.diag(norm.k_gain[g].numpy()) @ centre @ view.k[g].numpy()
        sigma = np.linalg.svd(q.T @ k, compute_uv=False)[:4]
        expected.append(sigma / sigma[0])
    same(value("qk_normalised_spectrum", view), expected)
    plain = layer(2)
    sigma = twin.spectra(twin.forms(plain), 4)
    same(value("qk_normalised_spectrum", plain), sigma / sigma[:, :1])
    assert effective_qk(plain).left is plain.q


@pytest.mark.parametrize("kind", ["rms", "l2", "layer"])
@pytest.mark.parametrize("over", ["head", "all"])
@pytest.mark.parametrize("rope", [None, Rope("half", 4, 10.0, temperature=1.1)])
def test_no_logit_of_normed_queries_and_keys_exceeds_its_bound(kind, over, rope) -> None:
    facts = {} if rope is None else {"position": rope}
    view = layer(3, g=2, qk_norm=gains(kind, over, q=(4, 4), k=(2, 4)), **facts)
    bound = largest_logit(view)
    norm = view.qk_norm
    random = torch.Generator().manual_seed(0)
    worst = torch.zeros(4, dtype=torch.float64)
    for _ in range(400):
        q = torch.randn(4, 4, generator=random, dtype=torch.float64)
        k = q[::2] * torch.tensor([1.0, 1.0, 1.0, 1.0]) if _ % 2 else q[1::2].clone()
        axes = (-1,) if over == "head" else (0, 1)
        rows = []
        for t, gain in ((q, norm.q_gain), (k, norm.k_gain)):
            t = t - t.mean(axes, keepdim=True) if kind == "layer" else t
            size = t.square().sum(axes) if kind == "l2" else t.square().mean(axes)
            rows.append(t / size.sqrt().reshape(-1, 1) * gain)
        turn = torch.eye(4, dtype=torch.float64)
        if rope is not None:
            turn = torch.tensor(twin.rotation(view, _ % 5)) * rope.temperature**2
        for i, g in enumerate(view.kv_group):
            worst[i] = max(worst[i], view.logit_scale * float(rows[0][i] @ turn @ rows[1][g]))
    assert bool((worst <= bound * (1 + 1e-12)).all())
    assert float((worst / bound).max()) > (0.5 if over == "head" else 0.2)


def test_the_bound_of_normed_logits_is_reached_along_one_channel() -> None:
    view = layer(3, qk_norm=gains(q=(4,), k=(4,)))
    product = view.qk_norm.q_gain * view.qk_norm.k_gain
    same(largest_logit(view).numpy(), [0.5 * 4 * float(product.max())] * 4)


# ── pairs of heads ──


@each_view
@pytest.mark.parametrize("which", ["qk", "ov", "both"])
def test_functionals_of_heads(view: AttentionView, which: str) -> None:
    if which == "both":  # T7: the product of both Gram matrices is the Gram of B_i ⊗ M_i
        b, m = twin.forms(view), twin.maps(view)
        stack = np.stack(
            [np.multiply.outer(x, y).reshape(1, -1) for x, y in zip(b, m, strict=True)]
        )
    else:
        stack = dense(view, which)
    g = twin.gram(stack)
    c = twin.cosines(g)
    same(value(f"{which}_gram", view), g)
    assert np.linalg.eigvalsh(value(f"{which}_gram", view))[0] > -1e-12
    same(value(f"{which}_cosines", view), c)
    same(value(f"{which}_coherence", view), twin.coherence(g))
    same(value(f"{which}_effective_heads", view), twin.participation(c))
    same(value(f"{which}_head_participation", view), twin.participation(g))
    same(value(f"{which}_entropy_heads", view), twin.entropy_rank(c))
    same(value(f"{which}_head_entropy_rank", view), twin.entropy_rank(g))
    same(value(f"{which}_log_det", view), twin.log_det(g))
    same(value(f"{which}_nuclear_ratio", view), twin.nuclear_ratio(c))


@each_view
@each_stack
def test_distances_and_angles(view: AttentionView, which: str) -> None:
    a, r = dense(view, which), width(view, which)
    expected = twin.procrustes(a, r)
    stack = view.qk if which == "qk" else view.ov
    same(procrustes_distances(stack).numpy(), expected, 1e-9)
    nuclear = np.array([np.linalg.norm(x, "nuc") for x in a])
    expected = expected / (2 * np.add.outer(nuclear, nuclear))
    same(value(f"{which}_procrustes", view), expected, 1e-9)
    assert value(f"{which}_distinct_heads", view) == view.heads
    sides = {"qk": ("query", "key"), "ov": ("output", "value")}[which]
    for side, end in zip(sides, ("left", "right"), strict=True):
        same(value(f"{side}_angles", view), twin.principal_cosines(a, r, end), 1e-7)


def test_a_deficient_head_spans_fewer_directions() -> None:
    view = layer(0, h=2, d_k=3)
    q = view.q.clone()
    q[0, 2] = q[0, 0]
    found = value("query_angles", replace(view, q=q))
    same(found[0, 0], [1, 1, 0])
    assert found[0, 1, 2] == 0


def test_clusters_join_copies_and_chains() -> None:
    one = torch.ones(1, 1, 2)
    rows = torch.cat((one, 1.005 * one, 1.01 * one, -one, one))
    stack = LowRankStack(rows, one, (0,) * 5)
    assert head_clusters(stack, 1e-9) == (0, 1, 2, 3, 0)
    assert head_clusters(stack, 0.006) == (0, 0, 0, 1, 0)
    zero = LowRankStack(0 * rows, one, (0,) * 5)
    assert head_clusters(zero) == (0,) * 5
    with pytest.raises(InputError, match="'left' or 'right'"):
        principal_cosines(stack, "middle")  # type: ignore[arg-type]


# ── stacked tensors ──


@each_view
@each_stack
def test_mode_spectra_ranks_and_core_slices_of_form_stacks(view, which: str) -> None:
    a = dense(view, which)
    sides = {"qk": ("head", "query", "key"), "ov": ("head", "output", "value")}[which]
    for mode, side in enumerate(sides):
        found = value(f"{which}_stack_{side}_spectrum", view)
        same(found, twin.unfolding_spectrum(a, mode), 1e-7)
    ranks = [np.linalg.matrix_rank(np.moveaxis(a, k, 0).reshape(a.shape[k], -1)) for k in range(3)]
    assert value(f"{which}_stack_ranks", view).tolist() == ranks
    stack = view.qk if which == "qk" else view.ov
    core = tucker_of_stack(stack, ranks, method="sthosvd")
    expected = core.slice_spectral_norms(0, 1).numpy()
    same(value(f"{which}_core_slice_norms", view)[: ranks[0]], expected, 1e-8)
    same(core.core_norms(0).numpy(), value(f"{which}_stack_head_spectrum", view)[: ranks[0]], 1e-7)


@each_stack
def test_cp_entries_are_those_of_the_fit(which: str) -> None:
    view = layer(5, d_v=3)
    fit = cp_of(view, which)
    assert fit.rank == 4
    model = sum(
        w * np.einsum("i,j,k->ijk", *(f[:, r].numpy() for f in fit.factors))
        for r, w in enumerate(fit.weights.numpy())
    )
    a = dense(view, which)
    error = np.linalg.norm(a - model) / np.linalg.norm(a)
    same(value(f"{which}_cp_error", view), error, 1e-9)
    same(value(f"{which}_cp_weights", view), fit.weights.numpy())
    head = fit.factors[0].numpy()
    cosine = np.abs(head.T @ head - np.eye(4)).max()
    same(value(f"{which}_cp_head_coherence", view), cosine)
    expected = [1 / np.linalg.cond(f.numpy()) for f in fit.factors]
    same(value(f"{which}_cp_factor_conditions", view), expected, 1e-8)
    triple = np.prod([f.numpy().T @ f.numpy() for f in fit.factors], axis=0) - 2 * np.eye(4)
    assert value(f"{which}_cp_degeneracy", view) == pytest.approx((triple + 3 * np.eye(4)).min())
    assert column_coherence(torch.ones(3, 1)) == 0


def test_shares_of_q_k_and_v_in_components_of_the_raw_tensor() -> None:
    """A tensor of three components that belong to q, to k, and to k and v alike."""
    random = torch.Generator().manual_seed(1)
    parts = torch.zeros(3, 4, 4, 10, 3, dtype=torch.float64)
    ends = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0.6, 0.8]], dtype=torch.float64)
    for r in range(3):
        a, b, c = (torch.randn(n, generator=random, dtype=torch.float64) for n in (4, 4, 10))
        parts[r] = (3 - r) * torch.einsum("i,j,k,l->ijkl", a, b, c, ends[r])
    t = parts.sum(0)
    view = replace(layer(0), q=t[..., 0], k=t[..., 1], v=t[..., 2])
    fit = cp_of(view, "raw", 3)
    assert fit.relative_error < 1e-4
    shares = {tuple(round(float(x), 2) for x in column) for column in fit.shares().T}
    assert shares == {(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.36, 0.64)}
    assert np.allclose(value("raw_cp_shares", view).sum(0), 1)


def test_raw_numbers_are_those_of_the_raw_tensor() -> None:
    view = layer(7, h=4, g=2, d_k=3)
    t = twin.raw_tensor(view)
    for mode, name in enumerate(("head", "inner", "model", "qkv")):
        same(value(f"raw_{name}_spectrum", view), twin.unfolding_spectrum(t, mode))
        view_grad = view.map(lambda w: w.clone().requires_grad_())
        same(catalogue()[f"raw_{name}_spectrum"](view_grad).detach().numpy()[: len(t)],
             twin.unfolding_spectrum(t, mode)[: len(t)])  # fmt: skip
    ranks = [np.linalg.matrix_rank(np.moveaxis(t, k, 0).reshape(t.shape[k], -1)) for k in range(4)]
    assert value("raw_ranks", view).tolist() == ranks
    assert value("raw_model_rank", view) == ranks[2]
    rows = t.reshape(4, -1)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    same(value("raw_head_cosines", view), rows @ rows.T)
    q, k = view.q.numpy(), view.k.numpy()
    same(value("query_reciprocal_condition", view), [1 / np.linalg.cond(x) for x in q])
    same(value("key_reciprocal_condition", view), [1 / np.linalg.cond(x) for x in k])
    same(value("query_norm", view), [np.linalg.norm(x) for x in q])
    both = [(q[i], k[g]) for i, g in enumerate(view.kv_group)]
    same(value("small_product_norm", view), [np.linalg.norm(x @ y.T, 2) for x, y in both])
    product = [np.linalg.norm(x, 2) * np.linalg.norm(y, 2) for x, y in both]
    same(value("spectral_norm_product", view), product)
    assert (value("spectral_norm_product", view) >= value("qk_spectral_norm", view)).all()
    core = tucker(torch.tensor(t), t.shape, method="sthosvd")
    same(core_slice_norms(view).numpy(), core.slice_spectral_norms(0, 2).numpy(), 1e-9)


def test_in_balanced_gauge_the_bound_of_both_norms_is_that_of_the_form() -> None:
    view = layer(3)
    new = canonical(view).view
    same(value("spectral_norm_product", new), value("qk_spectral_norm", view))
    a = twin.raw_tensor(new)
    same(value("canonical_inner_spectrum", view), twin.unfolding_spectrum(a, 1), 1e-9)
    same(value("canonical_model_spectrum", view), twin.unfolding_spectrum(a, 2), 1e-9)


# ── rotary ──


@pytest.mark.parametrize("kind", ["half", "interleaved"])
def test_rotary_gram_is_the_average_over_offsets(kind: str) -> None:
    """Frequencies 2π/7 and 4π/7 make the average over seven offsets exact; two dimensions rest."""
    turns = (2 * np.pi / 7, 4 * np.pi / 7)
    view = layer(8, h=4, g=2, d_k=6, position=Rope(kind, 4, 10.0, 1, rescaled=turns))
    average = sum(twin.gram(twin.forms_at(view, n)) for n in range(7)) / 7
    same(value("rotary_gram", view), average)
    same(value("rotary_coherence", view), twin.coherence(average))
    # The form at offset zero alone is another thing.
    assert np.abs(twin.gram(twin.forms(view)) / average - 1).max() > 0.1
    energies = []
    for i, g in enumerate(view.kv_group):
        row = []
        for e, o in view.position.planes:
            q = view.q[i, e].numpy() + 1j * view.q[i, o].numpy()
            k = view.k[g, e].numpy() + 1j * view.k[g, o].numpy()
            row.append(np.linalg.norm(np.outer(q.conj(), k)))
        energies.append(row)
    same(value("frequency_energies", view), energies)
    shares = np.array(energies) / np.sum(energies, axis=1, keepdims=True)
    same(value("frequency_shares", view), shares)


def test_gains_before_the_rotation_are_part_of_frequencies() -> None:
    view = LAYERS["normed rotary gains"](0)
    bare = replace(view, qk_norm=None)
    gained = replace(
        bare, q=bare.q * view.qk_norm.q_gain[:, None], k=bare.k * view.qk_norm.k_gain[:, None]
    )
    same(value("frequency_energies", view), value("frequency_energies", gained))
    after = LAYERS["normed after rotary"](0)
    same(value("frequency_energies", after),
         value("frequency_energies", replace(after, qk_norm=None)))  # fmt: skip


# ── the table itself ──


def test_names_are_unique_and_entries_are_found() -> None:
    table = catalogue()
    assert len(table) == len(entries()) > 100
    assert entries(["qk_trace", table["ov_rank"]]) == (table["qk_trace"], table["ov_rank"])
    with pytest.raises(InputError, match="no invariant 'qk_tracé'"):
        entries(["qk_tracé"])


@pytest.mark.parametrize(
    ("name", "layer_name", "said"),
    [
        ("qk_trace", "cross of one width", "read different sequences"),
        ("ov_trace", "cross", "read different sequences"),
        ("ov_eigenvalues", "wide values", r"slices are \[7, 10\]"),
        ("raw_head_spectrum", "wide values", "values are 5 and keys 3 wide"),
        ("raw_head_spectrum", "cross of one width", "do not stack"),
        ("frequency_energies", "plain", "no rotary positions"),
        ("largest_logit_gain", "normed", "have no size"),
        ("largest_logit", "plain", "grow with the input"),
        ("key_preference_norm", "plain", "no bias"),
        ("entropy_bound", "alibi", "depend on positions"),
        ("entropy_bound", "linear", "no distribution"),
        ("entropy_bound", "biased", "bias of queries"),
        ("canonical_inner_spectrum", "half rotary", "all of GL"),
        ("raw_cp_error", "tied", "one parameter"),
    ],
)
def test_what_does_not_exist_for_a_layer_says_why(name: str, layer_name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        catalogue()[name](LAYERS[layer_name](0))


def test_data_entries_ask_for_a_covariance() -> None:
    view = layer()
    entry = catalogue()["logit_rms"]
    with pytest.raises(InputError, match=r"expected \[10, 10\], none was given"):
        entry(view)
    with pytest.raises(InputError, match=r"\[3, 3\] was given"):
        entry(view, torch.eye(3))
    with pytest.raises(InputError, match="eigenvalue -1"):
        square_root(-torch.eye(3))
    with pytest.raises(InputError, match="symmetric"):
        square_root(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
