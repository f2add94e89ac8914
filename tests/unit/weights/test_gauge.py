"""Moves of a layer, folding, and the balanced gauge, judged by what the layer computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.canonical import balance, canonical, clusters
from levelhead.weights.folding import (
    centre_output,
    drop_key_bias,
    fold_input_norm,
    fold_value_bias,
    folded,
)
from levelhead.weights.gauge import (
    act_on_qk,
    act_on_vo,
    inner_blocks,
    permute_heads,
    random_linear,
    random_orthogonal,
    rescale_qk_gains,
    rotate_basis,
    shift_key_bias,
    shift_value_bias,
)
from levelhead.weights.structure import InputNorm, Rope
from levelhead.weights.symmetry_group import symmetry_group
from oracles.attention import attend
from oracles.layers import LAYERS, front, gains, input_norm, layer, output

every_layer = pytest.mark.parametrize("name", sorted(LAYERS))


def tokens(view: AttentionView, seed: int = 7) -> tuple[Tensor, Tensor | None]:
    """Tokens of the stream [6, d], and a source [5, d_source] for cross-attention."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(6, view.d, generator=random, dtype=torch.float64)
    source = torch.randn(5, view.d_source, generator=random, dtype=torch.float64)
    return x, source if view.cross else None


def run(view: AttentionView, stream: Tensor, source: Tensor | None) -> Tensor:
    compute = output if view.weighting == "linear" else attend
    return compute(view, front(view, stream), source)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


# ── moves ──


def test_a_generic_map_of_the_inner_basis_breaks_rotary_scores() -> None:
    """T3: what commutes with the planes keeps outputs (test_symmetry_group), GL(d_k) does not."""
    for rope in (Rope("half", 4, 100.0), Rope("interleaved", 4, 100.0)):
        view = layer(position=rope, scale=2.0)
        moved = act_on_qk(view, random_linear(4, 4, torch.Generator().manual_seed(0)))
        assert distance(moved.qk.dense(), view.qk.dense()) < 1e-13
        x, _ = tokens(view)
        assert distance(run(moved, x, None), run(view, x, None)) > 0.1


def test_an_element_for_each_head_breaks_shared_keys() -> None:
    """T4: one element a group keeps every B_i; an own one for each head cannot."""
    view = layer(h=4, g=2, d_k=3)
    elements = random_linear(4, 3, torch.Generator().manual_seed(0))
    torn = replace(view, q=elements @ view.q, k=torch.linalg.inv(elements[::2]).mT @ view.k)
    assert distance(torn.qk.dense(), view.qk.dense()) > 0.1
    kept = act_on_qk(view, elements[::2])
    assert distance(kept.qk.dense(), view.qk.dense()) < 1e-13


def test_a_forgotten_bias_changes_the_output() -> None:
    view = layer(biases="qkvo")
    x, _ = tokens(view)
    moved = act_on_qk(view, random_linear(4, 4, torch.Generator().manual_seed(0)))
    assert distance(run(moved, x, None), run(view, x, None)) < 1e-13
    forgotten = replace(moved, q_bias=view.q_bias)
    assert distance(run(forgotten, x, None), run(view, x, None)) > 0.01


def test_bias_moves_hold_under_softmax_only() -> None:
    shift = torch.ones(4, 4, dtype=torch.float64)
    for view, move, still in (
        (layer(biases="qkvo"), shift_key_bias, True),
        (layer(biases="qkvo"), shift_value_bias, True),
        (layer(biases="qkvo", weighting="linear"), shift_key_bias, False),
        (layer(biases="qkvo", weighting="linear"), shift_value_bias, False),
        (layer(biases="qkvo", soft_cap=0.5, scale=3.0), shift_key_bias, False),
        (layer(biases="qkvo", position=Rope("half", 4, 100.0)), shift_key_bias, False),
    ):
        x, _ = tokens(view)
        change = distance(run(move(view, shift), x, None), run(view, x, None))
        assert change < 1e-13 if still else change > 0.02


def test_moves_are_differentiable_in_weights_and_element() -> None:
    view = layer(h=2, g=1, d_k=2, d=3, biases="qkvo")
    element = random_linear(1, 2, torch.Generator().manual_seed(0), 3.0).requires_grad_()

    def moved(q: Tensor, element: Tensor) -> Tensor:
        new = act_on_vo(act_on_qk(replace(view, q=q), element), element)
        return torch.cat([t.flatten() for t in (new.q, new.k, new.o, new.v_bias)])

    q = view.q.clone().requires_grad_()
    assert torch.autograd.gradcheck(moved, (q, element))


@pytest.mark.parametrize("condition", [1.0, 10.0, 1e4])
def test_random_elements_have_the_condition_they_say(condition: float) -> None:
    random = torch.Generator().manual_seed(0)
    found = torch.linalg.cond(random_linear(5, 4, random, condition))
    torch.testing.assert_close(found, torch.full_like(found, condition), rtol=1e-8, atol=0)
    q = random_orthogonal(3, 4, random)
    torch.testing.assert_close(q @ q.mT, torch.eye(4, dtype=q.dtype).expand(3, 4, 4))
    one = random_linear(200, 1, random, condition).flatten()
    assert one.abs().max() <= condition**0.5 * (1 + 1e-12)
    assert (one < 0).any()
    assert (one > 0).any()


def test_inner_blocks_of_every_kind() -> None:
    assert inner_blocks(LAYERS["plain"](0)).free == ((0, 1, 2, 3),)
    partly = inner_blocks(LAYERS["partly rotary"](0))
    assert (partly.planes, partly.free) == (((1, 3), (2, 4)), ((0, 5, 6),))
    still = inner_blocks(LAYERS["partly still"](0))
    assert (still.planes, still.free) == (((0, 1), (2, 3)), ((4, 5),))
    low = inner_blocks(LAYERS["latent"](0))
    assert (low.planes, low.free) == (((2, 3),), ((0, 1),))
    plain = replace(LAYERS["latent"](0), position=LAYERS["plain"](0).position)
    assert inner_blocks(plain).free == ((2, 3), (0, 1))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda v: act_on_qk(v, torch.ones(4, 4)), r"one matrix for each key/value group"),
        (lambda v: act_on_vo(v, torch.ones(1, 4, 4)), r"\[2, 4, 4\]"),
        (lambda v: permute_heads(v, [0, 2, 1, 3]), "different groups"),
        (lambda v: permute_heads(v, [0, 0, 1, 3]), "permutation of 4 heads"),
        (lambda v: shift_key_bias(v, torch.ones(2, 4)), "no k_bias"),
        (lambda v: shift_value_bias(v, torch.ones(2, 4)), "v_bias and o_bias"),
        (lambda v: rescale_qk_gains(v, torch.ones(4)), "no gains on both sides"),
        (lambda v: random_linear(1, 2, torch.Generator(), 0.5), "at least 1"),
        (
            lambda v: rotate_basis(replace(v, input_norm=InputNorm("rms", v.q[0, 0])), v.q[0]),
            "fold them first",
        ),
    ],
)
def test_moves_that_do_not_fit_are_refused(call, said: str) -> None:
    with pytest.raises(InputError, match=said):
        call(layer(g=2))


def test_a_shared_shift_moves_with_all_groups_or_not_at_all() -> None:
    view = layer(g=2, qk_norm=gains(q_shift=(4,), k_shift=(4,)))
    random = torch.Generator().manual_seed(0)
    one = random_orthogonal(1, 4, random)
    x, _ = tokens(view)
    moved = act_on_qk(view, one.expand(2, 4, 4))
    assert distance(run(moved, x, None), run(view, x, None)) < 1e-13
    with pytest.raises(InputError, match="the same for all groups"):
        act_on_qk(view, random_orthogonal(2, 4, random))


# ── folding ──


@every_layer
def test_folding_keeps_the_output(name: str) -> None:
    """T1: the folded layer behind the bare norm computes what the layer behind its norm does."""
    view = LAYERS[name](2)
    x, source = tokens(view)
    if view.latent is not None and view.input_norm.bias is not None:
        return
    new = folded(view)
    assert new.input_norm.gain is None
    assert new.input_norm.bias is None
    assert distance(run(new, x, source), run(view, x, source)) < 1e-12


def test_folding_does_what_it_says() -> None:
    view = folded(LAYERS["layer norm in front"](0))
    for name in ("q", "k", "v"):
        rows = getattr(view, name)
        assert float(rows.mean(-1).abs().max()) < 1e-15
    assert view.v_bias is None
    assert view.k_bias is not None  # rotary in two of four dimensions
    assert torch.equal(view.k_bias[:, 2:], torch.zeros(4, 2, dtype=torch.float64))
    assert bool((view.k_bias[:, :2] != 0).all())
    assert folded(LAYERS["biased"](0)).k_bias is None
    assert folded(LAYERS["linear"](0)).v_bias is not None
    assert folded(LAYERS["capped"](0)).k_bias is not None


def test_centring_removes_what_the_function_cannot_see() -> None:
    """Without it the spectrum of B holds a part that LayerNorm never lets through."""
    view = LAYERS["centred in front"](0)
    new = fold_input_norm(view)
    assert distance(new.qk.spectral_norms(), view.qk.spectral_norms()) > 0.01
    dense = new.qk.dense()
    assert float(dense.sum(1).abs().max()) < 1e-14
    assert float(dense.sum(2).abs().max()) < 1e-14


def test_what_cannot_be_folded_is_refused() -> None:
    linear = layer(biases="v", weighting="linear")
    with pytest.raises(InputError, match="do not sum to one"):
        fold_value_bias(linear)
    view = LAYERS["latent"](0)
    normed = replace(view, input_norm=InputNorm("layer", None, torch.ones(10)))
    with pytest.raises(InputError, match="low-rank"):
        fold_input_norm(normed)
    assert fold_value_bias(layer()).o_bias is None
    assert drop_key_bias(layer()).k_bias is None


def test_a_centred_writer_is_the_same_to_a_layer_norm_behind_it() -> None:
    view = layer(biases="o")
    x, _ = tokens(view)

    def seen(v: AttentionView) -> Tensor:
        return torch.nn.functional.layer_norm(run(v, x, None), (10,))

    new = centre_output(view)
    torch.testing.assert_close(seen(new), seen(view))
    assert float(new.o.sum(1).abs().max()) < 1e-14


# ── the balanced gauge ──


@every_layer
def test_canonical_gauge_keeps_the_function_and_balances(name: str) -> None:
    """T2, T3, T4: output, forms and maps kept; balance; idempotent up to signs."""
    view = LAYERS[name](3)
    x, source = tokens(view)
    found = canonical(view)
    new = found.view
    assert distance(run(new, x, source), run(view, x, source)) < 1e-11
    assert distance(new.qk.dense(), view.qk.dense()) < 1e-12
    assert distance(new.ov.dense(), view.ov.dense()) < 1e-12
    defects = balance(new)
    assert float(defects.ov.max()) < 1e-12
    if view.qk_norm is None:
        assert float(defects.qk.max()) < 1e-12
        assert found.qk_kept == ()
        assert view.tied or float(balance(view).qk.max()) > 1e-3
    else:
        assert found.qk_kept == tuple(range(view.groups))
        assert torch.equal(new.q, view.q)
    again = canonical(new)
    torch.testing.assert_close(again.qk_values, found.qk_values, rtol=1e-10, atol=1e-12)
    for one, two in ((again.view.q, new.q), (again.view.k, new.k), (again.view.v, new.v)):
        torch.testing.assert_close(one.abs(), two.abs(), rtol=1e-8, atol=1e-9)


@every_layer
def test_canonical_gauge_is_that_of_the_orbit(name: str) -> None:
    """After a random gauge of condition 1000 the same point is found, up to signs."""
    view = LAYERS[name](4)
    if view.qk_norm is not None:
        return
    group = symmetry_group(view)
    random = torch.Generator().manual_seed(1)
    moved = view
    for generator in group.choose("gauge"):
        moved = generator.draw(moved, random, 1e3).view
    one, two = canonical(view), canonical(moved)
    torch.testing.assert_close(one.qk_values, two.qk_values, rtol=1e-9, atol=1e-10)
    aligned = canonical(moved, reference=one.view).view
    for field in ("q", "k", "v", "o", "q_bias"):
        expected, found = getattr(one.view, field), getattr(aligned, field)
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)


def test_canonical_values_are_singular_values_of_dense_forms() -> None:
    """σ by another route: the stacked dense form of each group."""
    view = layer(h=6, g=2, d_k=3, d_v=2)
    found = canonical(view)
    for group in range(2):
        members = view.members(group)
        forms = torch.cat([view.q[i].T @ view.k[group] for i in members])
        maps = torch.cat([(view.o[i] @ view.v[group]) for i in members])
        torch.testing.assert_close(found.qk_values[group], torch.linalg.svdvals(forms)[:3])
        torch.testing.assert_close(found.ov_values[group], torch.linalg.svdvals(maps)[:2])
        gram = found.view.k[group] @ found.view.k[group].T
        torch.testing.assert_close(gram, torch.diag(found.qk_values[group]), atol=1e-12, rtol=0)
    rotary = canonical(LAYERS["interleaved rotary"](0))
    q, k = rotary.view.q, rotary.view.k
    energy = q[:2, 0].square().sum() + q[:2, 1].square().sum()
    torch.testing.assert_close(energy, k[0, :2].square().sum())
    torch.testing.assert_close(rotary.qk_values[0, 0], energy)


def test_canonical_gauge_is_the_shortest_point_of_the_orbit() -> None:
    """½(‖q‖² + ‖k‖²) = ‖B‖_* there, and no random element of the group makes it shorter."""
    view = layer()
    new = canonical(view).view
    nuclear = torch.linalg.matrix_norm(view.qk.dense(), ord="nuc").sum()
    torch.testing.assert_close((new.q.square().sum() + new.k.square().sum()) / 2, nuclear)
    random = torch.Generator().manual_seed(0)
    for condition in (1.01, 2.0, 10.0):
        other = act_on_qk(new, random_linear(4, 4, random, condition))
        assert (other.q.square().sum() + other.k.square().sum()) / 2 > nuclear


def test_rank_deficient_heads_become_zero_rows() -> None:
    view = layer(d_k=4)
    q, k, v = view.q.clone(), view.k.clone(), view.v.clone()
    q[0, 3] = q[0, 0] + q[0, 1]
    k[1, 1:] = 0
    q[2], v[3] = 0, 0
    view = replace(view, q=q, k=k, v=v)
    found = canonical(view)
    assert distance(found.view.qk.dense(), view.qk.dense()) < 1e-12
    for head, rank in ((0, 3), (1, 1), (2, 0), (3, 4)):
        lost = found.view.q[head, rank:].abs().max() if rank < 4 else torch.zeros(())
        assert float(lost) < 1e-7
        assert int((found.qk_values[head] > 1e-12).sum()) == rank
    assert float(found.view.v[3].abs().max()) == 0.0
    x, _ = tokens(view)
    assert distance(run(found.view, x, None), run(view, x, None)) < 1e-12


def test_a_deficient_group_with_biases_to_carry_is_kept_and_named() -> None:
    view = layer(biases="qkvo")
    q = view.q.clone()
    q[1] = 0  # its bias of queries still points at keys
    view = replace(view, q=q)
    found = canonical(view)
    assert found.qk_kept == (1,)
    x, _ = tokens(view)
    assert distance(run(found.view, x, None), run(view, x, None)) < 1e-12
    assert torch.equal(found.view.k[1], view.k[1])
    rotary = replace(layer(biases="q", position=Rope("half", 4, 9.0)), q=q)
    new = canonical(rotary)
    assert distance(run(new.view, x, None), run(rotary, x, None)) < 1e-12


def test_equal_singular_values_are_clusters_and_align_as_such() -> None:
    random = torch.Generator().manual_seed(5)
    u, w = random_orthogonal(2, 10, random)
    values = torch.tensor([3.0, 3.0, 3.0, 1.0], dtype=torch.float64)
    view = layer(h=1)
    view = replace(view, q=(values[:, None] * u[:4])[None], k=w[:4][None])
    one = canonical(view)
    assert one.qk_clusters == (((0, 1, 2), (3,)),)
    assert all(len(c) == 1 for c in one.ov_clusters[0])
    moved = act_on_qk(view, random_linear(1, 4, random))
    aligned = canonical(moved, reference=one.view)
    torch.testing.assert_close(aligned.view.q, one.view.q, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(aligned.view.k, one.view.k, rtol=1e-9, atol=1e-10)
    near = canonical(replace(view, q=view.q * (1 + 1e-4 * torch.arange(4.0)[:, None])))
    assert near.qk_clusters == (((0,), (1,), (2,), (3,)),)
    assert canonical(near.view, tolerance=1e-3).qk_clusters == (((0, 1, 2), (3,)),)


def test_clusters_are_runs() -> None:
    values = torch.tensor([4.0, 3.99, 3.98, 1.0, 0.0])
    assert clusters(values, 0.005) == ((0, 1, 2), (3,), (4,))
    assert clusters(values, 1e-9) == ((0,), (1,), (2,), (3,), (4,))
    assert clusters(torch.zeros(3), 1e-9) == ((0, 1, 2),)
    assert clusters(values, 0.005, (0, 3)) == ((0,), (3,))


def test_a_mean_token_orients_every_component() -> None:
    view = layer(h=4, g=2, biases="qo")
    r = torch.randn(10, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = canonical(view, reference=r).view
    for group in range(2):
        assert bool((sum(found.q[i] @ r for i in view.members(group)) > 0).all())
    assert bool((found.v @ r > 0).all())
    x, _ = tokens(view)
    assert distance(run(found, x, None), run(view, x, None)) < 1e-12
    with pytest.raises(InputError, match=r"a vector \[10\]"):
        canonical(view, reference=r[:3])
    with pytest.raises(InputError, match="one sequence"):
        canonical(LAYERS["cross of one width"](0), reference=r)
    with pytest.raises(InputError, match="other shapes"):
        canonical(view, reference=layer())


def test_rotary_signs_follow_a_reference() -> None:
    view = LAYERS["half rotary"](0)
    one = canonical(view).view
    signs = torch.tensor([-1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    flipped = act_on_qk(one, torch.diag(signs).expand(4, 4, 4))
    aligned = canonical(flipped, reference=one).view
    torch.testing.assert_close(aligned.q, one.q)
    torch.testing.assert_close(aligned.q_bias, one.q_bias)


def test_float32_weights_are_balanced_in_float64_and_given_back() -> None:
    wide = layer(biases="qvo")
    view = wide.to(torch.float32)
    found = canonical(view)
    assert found.view.dtype == torch.float32
    assert found.qk_values.dtype == torch.float64
    torch.testing.assert_close(found.view.qk.dense(), view.qk.dense(), rtol=0, atol=2e-6)
    assert float(balance(found.view).qk.max()) < 1e-6


def test_balance_is_one_sided_where_one_side_is_zero() -> None:
    view = layer()
    empty = replace(view, q=torch.zeros_like(view.q))
    torch.testing.assert_close(balance(empty).qk, torch.ones(4, dtype=torch.float64))
    both = replace(empty, k=torch.zeros_like(view.k))
    torch.testing.assert_close(balance(both).qk, torch.zeros(4, dtype=torch.float64))
    rotary = layer(h=1, d_k=2, position=Rope("half", 2, 9.0))
    turned = replace(rotary, k=rotary.q.flip(1))  # another plane vector of the same length
    assert float(balance(turned).qk) < 1e-15


def test_input_norm_maker_has_eps_zero() -> None:
    """The twins' norms are exact, or the scale symmetries above would be approximate."""
    view = layer(input_norm=input_norm("rms"))
    assert view.input_norm.eps == 0.0
