"""AttentionView: what it refuses, what it derives, and that gradients pass through it."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.canonical import canonical
from levelhead.weights.folding import folded
from levelhead.weights.gauge import act_on_qk
from levelhead.weights.structure import (
    Alibi,
    InputNorm,
    Mask,
    Provenance,
    QKNorm,
    Relative,
    Rope,
)
from levelhead.weights.symmetry_group import symmetry_group
from oracles.attention import attend

H, G, D_K, D_V, D = 4, 2, 6, 5, 8


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def view(**more: object) -> AttentionView:
    given = {
        "q": numbers(H, D_K, D, seed=1),
        "k": numbers(G, D_K, D, seed=2),
        "v": numbers(G, D_V, D, seed=3),
        "o": numbers(H, D, D_V, seed=4),
    }
    return AttentionView(**{**given, **more})  # type: ignore[arg-type]


def test_forms_and_maps_are_the_products_of_each_heads_matrices() -> None:
    a = view()
    assert a.kv_group == (0, 0, 1, 1)
    for i, g in enumerate(a.kv_group):
        assert torch.allclose(a.qk.dense()[i], a.q[i].T @ a.k[g], rtol=1e-13)
        assert torch.allclose(a.ov.dense()[i], a.o[i] @ a.v[g], rtol=1e-13)
    assert a.qk.right.shape[0] == G  # shared blocks stay shared
    assert a.scale == pytest.approx(D_K**-0.5, rel=1e-15)


def test_the_methods_are_the_functions_and_keep_the_class() -> None:
    a = view(name="mine")
    assert a.symmetry_group().names == symmetry_group(a).names
    found, reference = a.canonical(tolerance=0.5), canonical(a, tolerance=0.5)
    assert type(found.view) is AttentionView
    assert found.tolerance == 0.5
    assert torch.equal(found.view.q, reference.view.q)
    flipped = act_on_qk(found.view, -torch.eye(D_K, dtype=torch.float64).expand(G, -1, -1))
    again = flipped.canonical(reference=found.view)
    assert torch.allclose(again.view.q, found.view.q, rtol=1e-10, atol=1e-12)
    for other in (a.head(1), a.repeat_kv(), a.to(torch.float32), folded(a), flipped):
        assert type(other) is AttentionView
    moved = a.symmetry_group()["qk_gauge"].draw(a, torch.Generator().manual_seed(0), 2.0)
    assert type(moved.view) is AttentionView
    assert not torch.allclose(moved.view.q, a.q)


def test_other_groupings_than_neighbours() -> None:
    a = view(kv_group=(1, 0, 1, 0))
    assert (a.members(0), a.members(1)) == ((1, 3), (0, 2))
    assert torch.equal(a.repeat_kv().k, a.k[[1, 0, 1, 0]])
    assert torch.allclose(a.qk.dense()[0], a.q[0].T @ a.k[1])


def test_head_tensor() -> None:
    with pytest.raises(InputError, match="values are 5 and keys 6 wide"):
        view().head_tensor()
    with pytest.raises(InputError, match="queries read 8 and keys 7 numbers"):
        view(k=numbers(G, D_K, 7), v=numbers(G, D_K, 7), o=numbers(H, D, D_K)).head_tensor()
    a = view(v=numbers(G, D_K, D), o=numbers(H, D, D_K))
    raw = a.head_tensor()
    assert raw.shape == (H, D_K, D, 3)
    for i, g in enumerate(a.kv_group):
        for c, part in enumerate((a.q[i], a.k[g], a.v[g])):
            assert torch.equal(raw[i, :, :, c], part)


def test_head_map_is_the_product_of_form_and_map() -> None:
    a = view(q=torch.cat((numbers(H, 2, D), torch.zeros(H, 4, D, dtype=torch.float64)), 1))
    head = a.head_map(3)
    x, y, z = numbers(7, D, seed=7), numbers(7, D, seed=8), numbers(7, D, seed=9)
    b, m = a.q[3].T @ a.k[1], a.o[3] @ a.v[1]
    expected = torch.einsum("ni,ij,nj->n", x, b, y)[:, None] * (z @ m.T)
    assert torch.allclose(head(x, y, z), expected, rtol=1e-12)
    assert torch.allclose(head.dense(), torch.einsum("ab,dc->abcd", b, m))
    assert head.multilinear_rank() == (2, 2, D_V, D_V)
    unfoldings = [head.dense().movedim(i, 0).reshape(D, -1) for i in range(4)]
    assert [int(torch.linalg.matrix_rank(u)) for u in unfoldings] == [2, 2, D_V, D_V]
    assert head.norm() == pytest.approx(float(head.dense().norm()), rel=1e-12)
    assert view(q=torch.zeros(H, D_K, D)).head_map(0).multilinear_rank() == (0, 0, 0, 0)
    with pytest.raises(InputError, match="head 4 was asked for; it has 4"):
        a.head_map(4)


FULL = {
    "q_bias": numbers(H, D_K, seed=11),
    "k_bias": numbers(G, D_K, seed=12),
    "v_bias": numbers(G, D_V, seed=13),
    "mask": Mask(causal=True),
    "qk_norm": QKNorm("rms", "head", numbers(H, D_K, seed=14), numbers(G, D_K, seed=15), 1e-6),
}
POSITIONS = [
    Rope("half", 4, 100.0),
    Alibi((1.0, 0.5, 0.25, 0.125)),
    Relative(numbers(H, 8, seed=16), "t5", True, 5),
]


@pytest.mark.parametrize("position", POSITIONS, ids=lambda p: p.tag)
def test_heads_alone_add_up_to_the_layer(position: object) -> None:
    a = view(**FULL, position=position, o_bias=numbers(D, seed=17))
    x = numbers(6, D, seed=18)
    alone = sum(attend(a.head(i), x) for i in range(H))
    assert torch.allclose(alone + a.o_bias, attend(a, x), rtol=1e-12)
    assert torch.allclose(attend(a.repeat_kv(), x), attend(a, x), rtol=1e-12)
    assert a.head(-1).name == "attention[head 3]"


def test_a_norm_over_all_heads_lets_none_stand_alone() -> None:
    norm = QKNorm("rms", "all", numbers(H, D_K), numbers(G, D_K), 1e-6)
    a = view(qk_norm=norm)
    with pytest.raises(InputError, match="normed over all heads together"):
        a.head(0)
    x = numbers(6, D)
    assert torch.allclose(attend(a.repeat_kv(), x), attend(a, x), rtol=1e-12)
    with pytest.raises(InputError, match="unevenly"):
        replace(a, kv_group=(0, 0, 0, 1)).repeat_kv()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32(dtype: torch.dtype) -> None:
    a = view()
    low = view(**{n: getattr(a, n).to(dtype) for n in "qkvo"})
    assert low.dtype == torch.float32
    assert torch.equal(low.q, a.q.to(dtype).float())
    mixed = view(q=a.q.to(dtype))
    assert mixed.dtype == torch.float64
    with pytest.raises(InputError, match="views are computed in float32 or float64"):
        a.to(dtype)


def test_to_moves_everything_that_is_held() -> None:
    a = view(**FULL, position=POSITIONS[2], input_norm=InputNorm("layer", numbers(D), numbers(D)))
    b = a.to(torch.float32)
    held = [b.q, b.q_bias, b.qk_norm.q_gain, b.position.table, b.input_norm.gain]  # type: ignore[union-attr]
    assert {t.dtype for t in held} == {torch.float32}
    assert b.kv_group == a.kv_group


def test_gradients_reach_live_parameters_of_any_dtype() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        leaf = numbers(H, D_K, D).to(dtype).requires_grad_()
        view(q=leaf).qk.frobenius_norms().sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.dtype == dtype
        assert float(leaf.grad.abs().sum()) > 0


def test_it_can_be_copied_and_pickled() -> None:
    a = view(origins={"q": Provenance("read", "somewhere")})
    for b in (copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        assert torch.equal(a.q, b.q)
        assert b.origin("q") == Provenance("read", "somewhere")
    assert a.origin("k").how == "assumed"
    with pytest.raises(InputError, match="no field 'heads'"):
        a.origin("heads")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"q": numbers(H, D_K, D)[0]}, r"q \[6, 8\] was given; expected \[h, d_k, d\]"),
        ({"q": numbers(0, D_K, D)}, "at least one head"),
        ({"k": numbers(G, 3, D)}, r"k \[2, 3, 8\] does not fit q \[4, 6, 8\]"),
        ({"o": numbers(H, D, 3)}, r"o \[4, 8, 3\] does not fit"),
        ({"q_bias": numbers(H, 2)}, r"expected \[h, d_k\] = \[4, 6\]"),
        ({"o_bias": numbers(3)}, r"expected \[d_out\] = \[8\]"),
        ({"q": numbers(3, D_K, D), "o": numbers(3, D, D_V)}, "3 heads cannot share 2"),
        ({"kv_group": (0, 0, 0, 0)}, "every group of 0 … 1 used"),
        ({"kv_group": (0, 1, 2, 0)}, "every group of 0 … 1 used"),
        ({"kv_group": (0, 1)}, "one group for each of 4 heads"),
        ({"q": [1.0]}, "q is a list, not a tensor"),
        ({"q": torch.ones(H, D_K, D, dtype=torch.int64)}, "q: a tensor of torch.int64"),
        ({"position": Alibi((1.0,))}, "position has 1 heads, the layer 4"),
        ({"position": Rope("half", 8, 10.0)}, "rope rotates dimension 7, but d_k is 6"),
        ({"origins": {"x": Provenance("read", "y")}}, "unknown fields"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_sentence(more: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        view(**more)
    assert str(error.value).startswith("attention: ")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Rope("half", 3, 10.0), "even number"),
        (lambda: Rope("both", 4, 10.0), "'interleaved' or 'half'"),  # type: ignore[arg-type]
        (lambda: Rope("half", 4, 10.0, rescaled=(1.0,)), "1 rope frequencies for width 4"),
    ],
)
def test_rope_refuses(wrong: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        wrong()  # type: ignore[operator]
