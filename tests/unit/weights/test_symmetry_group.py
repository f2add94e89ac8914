"""The group of each kind of layer: it keeps outputs, and has the right size: nothing is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.folding import fold_input_norm
from levelhead.weights.structure import Rope
from levelhead.weights.symmetry_group import FAMILIES, GENERATORS, symmetry_group
from oracles.attention import attend
from oracles.layers import LAYERS, front, gains, input_norm, layer, output

# torch.func imports parts of torch that warn about others.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

every_layer = pytest.mark.parametrize("name", sorted(LAYERS))


def tokens(view: AttentionView, seed: int = 7) -> tuple[Tensor, Tensor | None]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(6, view.d, generator=random, dtype=torch.float64)
    source = torch.randn(5, view.d_source, generator=random, dtype=torch.float64)
    return front(view, x), source if view.cross else None


def run(view: AttentionView, x: Tensor, source: Tensor | None) -> Tensor:
    return (output if view.weighting == "linear" else attend)(view, x, source)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def floats(view: AttentionView) -> dict[str, Tensor]:
    """Every tensor that belongs to the layer's parameters, by name."""
    found = {n: getattr(view, n) for n in ("q", "k", "v", "o")}
    found |= {n: getattr(view, n) for n in ("q_bias", "k_bias", "v_bias", "o_bias")}
    for fact in ("qk_norm", "position", "latent", "input_norm"):
        for name, value in vars(getattr(view, fact) or object).items():
            if isinstance(value, Tensor):
                found[f"{fact}.{name}"] = value
    return {n: t for n, t in found.items() if t is not None}


# ── outputs ──


@every_layer
def test_every_generator_keeps_the_output(name: str) -> None:
    """The attention oracle knows nothing of gauges; inputs move where a generator says so."""
    view = LAYERS[name](1)
    x, source = tokens(view)
    before = run(view, x, source)
    random = torch.Generator().manual_seed(3)
    group = symmetry_group(view)
    for generator in group.generators:
        moved = generator.draw(view, random, 10.0)
        new = x if moved.inputs is None else x @ moved.inputs.T
        other = source if source is None or moved.source is None else source @ moved.source.T
        expected = before if moved.output is None else before @ moved.output.T
        assert distance(run(moved.view, new, other), expected) < 1e-12, generator.name
        assert generator.moves_inputs == (generator.name == "basis_rotation")
    moved = group.random(view, random, condition=5.0)
    new = x if moved.inputs is None else x @ moved.inputs.T
    assert distance(run(moved.view, new, source), before) < 1e-12


@every_layer
def test_a_generator_changes_what_it_says_and_nothing_else(name: str) -> None:
    view = LAYERS[name](1)
    random = torch.Generator().manual_seed(3)
    before = floats(view)
    for generator in symmetry_group(view).generators:
        moved = generator.draw(view, random, 10.0).view
        if generator.dimension == 0 and torch.equal(moved.q, view.q):
            continue  # signs may all be drawn as one
        changed = {
            n.partition(".")[0] for n, t in floats(moved).items() if not torch.equal(t, before[n])
        }
        assert changed, generator.name
        assert changed <= generator.moves, generator.name


@every_layer
def test_charts_are_the_identity_at_zero_and_move_freely(name: str) -> None:
    """The rank of a chart's derivative is the dimension of the fibre it accounts for."""
    view = LAYERS[name](1)
    for generator in symmetry_group(view).generators:
        if generator.near is None:
            assert generator.dimension == 0
            continue
        near = generator.near

        def flat(x: Tensor, near=near) -> Tensor:
            return torch.cat([t.flatten() for t in floats(near(view, x).view).values()])

        zero = torch.zeros(generator.dimension, dtype=torch.float64)
        start = torch.cat([t.flatten() for t in floats(view).values()])
        torch.testing.assert_close(flat(zero), start, rtol=1e-13, atol=1e-14)
        jacobian = torch.func.jacrev(flat)(zero)
        values = torch.linalg.svdvals(jacobian)
        if generator.name != "qk_gauge" or view.d_k <= view.d:
            assert float(values[-1]) > 1e-4 * float(values[0]), generator.name
            assert generator.fibre == generator.dimension


# ── T10: fibre dimensions by the rank of the Jacobian ──

SMALL = {"h": 2, "d_k": 2, "d_v": 2, "d": 5}
ROPE = Rope("half", 2, 100.0)
FIBRES: dict[str, tuple[dict, int]] = {
    "softmax": (SMALL, 2 * (4 + 4)),
    "softmax, other sizes": ({"h": 3, "d_k": 2, "d_v": 1, "d": 4}, 3 * (4 + 1)),
    "softmax, wide keys": ({"h": 2, "d_k": 4, "d_v": 1, "d": 3}, 2 * (2 * 4 * 3 - 9 + 1)),
    "biases": (SMALL | {"biases": "qkvo"}, 2 * (4 + 4) + 2 * (2 + 2)),
    "grouped": (SMALL | {"h": 4, "g": 2}, 2 * (4 + 4)),
    "one group": (SMALL | {"h": 3, "g": 1}, 4 + 4),
    "rotary": (SMALL | {"position": ROPE}, 2 * (2 + 4)),
    "rotary, four wide": (
        SMALL | {"d_k": 4, "position": Rope("interleaved", 4, 10.0)},
        2 * (4 + 4),
    ),
    "rotary, grouped": (SMALL | {"h": 4, "g": 2, "position": ROPE}, 2 * (2 + 4)),
    "rotary, biases": (SMALL | {"position": ROPE, "biases": "qkvo"}, 2 * (2 + 4 + 2)),
    "partly rotary": (SMALL | {"d_k": 3, "position": ROPE}, 2 * (2 + 1 + 4)),
    "partly rotary, biases": (
        SMALL | {"d_k": 3, "position": ROPE, "biases": "qkvo"},
        2 * (2 + 1 + 4 + 1 + 2),
    ),
    "normed": (SMALL | {"d_k": 3, "qk_norm": gains()}, 2 * (3 + 2 + 4)),
    "normed, rotary, grouped": (
        SMALL | {"h": 2, "g": 1, "qk_norm": gains(), "position": ROPE},
        1 + 2 + 1 + 4,
    ),
    "normed, rotary": (SMALL | {"qk_norm": gains(), "position": ROPE}, 2 * (1 + 2 + 4)),
    "normed, rotary, gains, grouped": (
        SMALL
        | {
            "g": 1,
            "d_k": 4,
            "d": 6,
            "qk_norm": gains(q=(4,), k=(4,)),
            "position": Rope("half", 4, 10.0),
        },
        2 + 1 + 2 + 4,
    ),
    "normed, shared gains": (
        SMALL | {"d_k": 3, "qk_norm": gains(q=(3,), k=(3,))},
        2 * (2 + 4) + 3,
    ),
    "normed, own gains": (
        SMALL | {"d_k": 3, "qk_norm": gains(q=(2, 3), k=(2, 3))},
        2 * (2 + 4) + 2 * 3,
    ),
    "normed together": (
        SMALL | {"qk_norm": gains("rms", "all", q=(2, 2), k=(2, 2))},
        2 + 2 * 4 + 2 * 2,
    ),
    "normed after rotary": (
        SMALL | {"qk_norm": gains(q=(2,), k=(2,), after_rope=True), "position": ROPE},
        2 * (2 + 4) + 2,
    ),
    "layer normed": (
        SMALL | {"d_k": 4, "d": 4, "qk_norm": gains("layer")},
        2 * (3 + 2 + 4 + 2 * 4),
    ),
    "behind layer norm": (
        SMALL | {"input_norm": input_norm("layer", gain=False, d=5)},
        2 * (4 + 4) + 2 * (2 * 2 + 2),
    ),
    "behind layer norm, grouped": (
        SMALL | {"g": 1, "input_norm": input_norm("layer", gain=False, d=5)},
        4 + 4 + 2 * 2 + 2 + 2,
    ),
    "linear, one head": (
        {"h": 1, "d_k": 2, "d_v": 2, "d": 4, "weighting": "linear"},
        4 + 4 + 1,
    ),
    "linear": (
        {"h": 2, "d_k": 2, "d_v": 2, "d": 5, "weighting": "linear"},
        2 * (4 + 4 + 1),
    ),
    "capped, biases": (SMALL | {"soft_cap": 1.5, "biases": "qkvo"}, 2 * (4 + 4 + 2)),
}


@pytest.mark.parametrize("name", sorted(FIBRES))
def test_fibre_dimension_is_parameters_minus_rank(name: str) -> None:
    """Weights near generic ones with the same function: params - rank of d(output)/d(params)."""
    settings, expected = FIBRES[name]
    view = layer(11, **settings)
    assert symmetry_group(view).fibre_dimension == expected
    # The norm in front is no parameter of the layer, nor is anything that is not a weight.
    names = [n for n in floats(view) if not n.startswith("input_norm")]
    sizes = [floats(view)[n].numel() for n in names]
    random = torch.Generator().manual_seed(5)
    streams = torch.randn(2 + sum(sizes) // (2 * view.d), 5, view.d, generator=random).double()

    def computed(parameters: Tensor) -> Tensor:
        new = rebuilt(view, dict(zip(names, parameters.split(sizes), strict=True)))
        return torch.cat([output(new, front(new, 1.5 * s)).flatten() for s in streams])

    start = torch.cat([floats(view)[n].flatten() for n in names])
    values = torch.linalg.svdvals(torch.func.jacrev(computed)(start))
    rank = len(start) - expected
    assert float(values[rank - 1]) > 1e-6 * float(values[0])
    assert float(values[rank]) < 1e-11 * float(values[0])


def rebuilt(view: AttentionView, parts: dict[str, Tensor]) -> AttentionView:
    """The view with the named parameters replaced, in the order of `floats`."""
    changes: dict[str, object] = {}
    inner: dict[str, Tensor] = {}
    for name, part in parts.items():
        shaped = part.reshape(floats(view)[name].shape)
        if name.startswith("qk_norm."):
            inner[name.partition(".")[2]] = shaped
        else:
            changes[name] = shaped
    if inner:
        changes["qk_norm"] = replace(view.qk_norm, **inner)
    return replace(view, **changes)


# ── which generators, and why not ──


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", "qk_gauge vo_gauge head_permutation basis_rotation"),
        ("biased", "qk_gauge vo_gauge key_bias value_bias head_permutation basis_rotation"),
        ("half rotary", "rotary_gauge vo_gauge value_bias head_permutation basis_rotation"),
        ("partly rotary", "rotary_gauge vo_gauge key_bias value_bias head_permutation "
                          "basis_rotation"),
        ("steep alibi", "qk_gauge vo_gauge basis_rotation"),
        ("normed", "qk_rotation qk_scale vo_gauge value_bias head_permutation basis_rotation"),
        ("normed rotary", "rotary_phase qk_scale vo_gauge head_permutation basis_rotation"),
        ("normed rotary gains", "qk_sign qk_scale qk_gain vo_gauge head_permutation "
                                "basis_rotation"),
        ("normed layer", "qk_rotation qk_scale qk_mean vo_gauge head_permutation basis_rotation"),
        ("tied", "qk_rotation vo_gauge head_permutation basis_rotation"),
        ("linear", "qk_gauge vo_gauge score_scale head_permutation basis_rotation"),
        ("capped", "qk_gauge vo_gauge value_bias head_permutation basis_rotation"),
        ("gain in front", "qk_gauge vo_gauge key_bias value_bias input_gain head_permutation"),
        ("centred in front", "qk_gauge vo_gauge input_mean head_permutation basis_rotation"),
        ("layer norm before", "qk_gauge vo_gauge head_permutation"),
    ],
)  # fmt: skip
def test_generators_follow_from_what_the_layer_is(name: str, expected: str) -> None:
    group = symmetry_group(LAYERS[name](0))
    assert group.names == tuple(expected.split())
    assert set(group.names) | set(group.missing) == set(GENERATORS)
    assert all(group.missing.values())
    assert {g.family for g in group.generators} <= set(FAMILIES)


def test_alibi_only_exchanges_equal_slopes() -> None:
    group = symmetry_group(LAYERS["alibi"](0))  # slopes ½, ¼, ½, ⅛
    random = torch.Generator().manual_seed(0)
    view = LAYERS["alibi"](0)
    assert group["head_permutation"].draw(view, random, 1.0).heads == (2, 1, 0, 3)
    with pytest.raises(InputError, match="no two heads can be exchanged"):
        symmetry_group(LAYERS["steep alibi"](0))["head_permutation"]


def test_heads_move_within_groups_and_groups_of_one_size_move() -> None:
    view = LAYERS["uneven groups"](0)  # sizes 1 and 3
    random = torch.Generator().manual_seed(0)
    draws = {symmetry_group(view)["head_permutation"].draw(view, random, 1.0).heads
             for _ in range(100)}  # fmt: skip
    assert all(heads[0] == 0 for heads in draws)
    assert len(draws) == 5  # all of S_3 but the identity
    even = LAYERS["grouped"](0)
    generator = symmetry_group(even)["head_permutation"]
    moves = [generator.draw(even, random, 1.0) for _ in range(40)]
    assert {m.groups for m in moves} == {(0, 1), (1, 0)}
    assert all(sorted(m.heads) == list(range(6)) for m in moves)


def test_centred_weights_have_no_mean_left() -> None:
    view = LAYERS["centred in front"](0)
    assert "input_mean" in symmetry_group(view).names
    assert "centred" in symmetry_group(fold_input_norm(view)).missing["input_mean"]


def test_groups_are_chosen_by_name_family_or_all() -> None:
    group = symmetry_group(LAYERS["biased"](0))
    assert [g.name for g in group.choose("gauge")] == ["qk_gauge", "vo_gauge"]
    assert [g.name for g in group.choose("bias")] == ["key_bias", "value_bias"]
    assert group.choose("all") == group.generators
    assert group.choose("qk_scale") == ()
    assert group["vo_gauge"].dimension == 64
    with pytest.raises(InputError, match="no group 'gage'"):
        group.choose("gage")
    with pytest.raises(InputError, match="no generator 'gage'"):
        group["gage"]
    with pytest.raises(InputError, match="this layer has no qk_scale: queries and keys"):
        group["qk_scale"]


def test_notes_say_where_the_group_is_larger() -> None:
    twice = layer(position=Rope("half", 4, 10.0, rescaled=(0.5, 0.5)))
    assert "coincide" in symmetry_group(twice).notes[0]
    assert "full rank" in symmetry_group(LAYERS["linear"](0)).notes[0]
    assert symmetry_group(LAYERS["half rotary"](0)).notes == ()


def test_moves_compose() -> None:
    view = LAYERS["grouped"](0)
    random = torch.Generator().manual_seed(4)
    group = symmetry_group(view)
    one = group["head_permutation"].draw(view, random, 1.0)
    two = group["head_permutation"].draw(one.view, random, 1.0)
    both = one.then(two)
    torch.testing.assert_close(both.view.q, view.q[list(both.heads)])
    torch.testing.assert_close(both.view.k, view.k[list(both.groups)])
    turn = group["basis_rotation"].draw(view, random, 1.0)
    again = turn.then(group["basis_rotation"].draw(turn.view, random, 1.0))
    torch.testing.assert_close(again.view.q, view.q @ again.inputs.T)
    c = torch.diag(torch.arange(1.0, 11.0).double())
    expected = torch.linalg.eigvalsh(c)
    torch.testing.assert_close(torch.linalg.eigvalsh(again.covariance(c)), expected)
