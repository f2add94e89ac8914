"""The numbers of a layer against dense twins, and against its own symmetries."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from levelhead.base.errors import InputError
from levelhead.inspection.measures import COLUMNS, ON_DATA, folded_layer, measure, too_large
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.structure import InputNorm, QKNorm, Rope
from levelhead.weights.symmetry_group import symmetry_group


def layer(h: int = 4, g: int = 4, r: int = 4, d: int = 12, seed: int = 0, **facts) -> AttentionView:
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    return AttentionView(
        q=draw(h, r, d), k=draw(g, r, d), v=draw(g, r, d), o=draw(h, d, r), name="layer", **facts
    )


GAIN = torch.linspace(0.5, 2.0, 12, dtype=torch.float64)
INNER = torch.linspace(0.5, 1.5, 4, dtype=torch.float64)
LAYERS = {
    "plain": layer(),
    "grouped": layer(h=4, g=2),
    "rotary": layer(g=2, position=Rope("half", 4, 100.0)),
    "layer norm": layer(input_norm=InputNorm("layer", GAIN, GAIN - 1, 1e-5)),
    "rms norm": layer(input_norm=InputNorm("rms", GAIN, None, 1e-5)),
    "qk norm": layer(qk_norm=QKNorm("rms", "head", None, None, 1e-6)),
    "qk gains": layer(qk_norm=QKNorm("rms", "head", INNER, INNER.flip(0), 1e-6)),
    "qk layer norm": layer(qk_norm=QKNorm("layer", "head", INNER, INNER.flip(0), 1e-6)),
    "qk norm, rotary": layer(
        g=2, qk_norm=QKNorm("rms", "head", INNER, INNER, 1e-6), position=Rope("half", 4, 100.0)
    ),
    "biased": replace(layer(), q_bias=torch.ones(4, 4), v_bias=torch.ones(4, 4)),
}
every_layer = pytest.mark.parametrize("view", LAYERS.values(), ids=LAYERS)


def moved(view: AttentionView, seed: int) -> tuple[AttentionView, tuple[int, ...]]:
    """The folded layer after random elements of all generators, and where its heads came from."""
    folded, _ = folded_layer(view)
    out = symmetry_group(folded).random(folded, torch.Generator().manual_seed(seed))
    return out.view, out.heads or tuple(range(view.heads))


@every_layer
@pytest.mark.parametrize("seed", [1, 2])
def test_numbers_are_the_layers_own(view: AttentionView, seed: int) -> None:
    before = measure(view)
    other, order = moved(view, seed)
    after = measure(other)
    assert not before.basis_dependent
    for name, value in before.numbers.items():
        assert after.numbers[name] == pytest.approx(value, rel=1e-7), name
    reach = "largest_logit_gain" if view.qk_norm is None else "largest_logit"
    for name in ("qk_effective_rank", "ov_effective_rank", reach):
        expected = before.per_head[name][list(order)]
        np.testing.assert_allclose(after.per_head[name], expected, rtol=1e-7)
    for name in ("qk_cosines", "ov_cosines"):
        expected = getattr(before, name)[np.ix_(order, order)]
        np.testing.assert_allclose(getattr(after, name), expected, atol=1e-8)
    for name in ("qk_spectrum", "ov_spectrum"):
        expected = getattr(before, name)[list(order)]
        np.testing.assert_allclose(getattr(after, name), expected, rtol=1e-6, atol=1e-9)


def test_what_the_group_moves_is_named_and_does_move() -> None:
    view = replace(layer(), weighting="linear")
    before = measure(view)
    assert before.basis_dependent == {"largest_logit_gain": ("score_scale",)}
    folded, _ = folded_layer(view)
    generator = symmetry_group(folded)["score_scale"]
    after = measure(generator.draw(folded, torch.Generator().manual_seed(0), 10.0).view)
    gain, rank = "largest_logit_gain", "qk_effective_rank"
    assert abs(after.numbers[gain] / before.numbers[gain] - 1) > 0.01
    assert after.numbers[rank] == pytest.approx(before.numbers[rank], rel=1e-9)
    assert "largest_logit_gain is basis dependent (score_scale)" in str(before.row()["notes"])


def test_numbers_are_those_of_dense_matrices() -> None:
    view = layer(h=4, g=2, seed=3, input_norm=InputNorm("layer", GAIN, None, 1e-5))
    centre = np.eye(12) - 1 / 12
    into = np.diag(GAIN.numpy()) @ centre
    forms, maps = [], []
    for i, g in enumerate((0, 0, 1, 1)):
        forms.append((view.q[i].numpy() @ into).T @ (view.k[g].numpy() @ into))
        maps.append(view.o[i].numpy() @ view.v[g].numpy() @ into)
    found = measure(view)

    def erank(matrix: np.ndarray) -> float:
        sigma = np.linalg.svd(matrix, compute_uv=False)[:4]
        p = sigma / sigma.sum()
        return math.exp(-(p * np.log(p)).sum())

    def cosines(matrices: list[np.ndarray]) -> np.ndarray:
        flat = np.stack([m.ravel() / np.linalg.norm(m) for m in matrices])
        return flat @ flat.T

    for name, matrices in (("qk", forms), ("ov", maps)):
        c = cosines(matrices)
        ranks = [erank(m) for m in matrices]
        np.testing.assert_allclose(found.per_head[f"{name}_effective_rank"], ranks, rtol=1e-9)
        assert found.numbers[f"{name}_effective_rank"] == pytest.approx(np.mean(ranks), rel=1e-9)
        np.testing.assert_allclose(getattr(found, f"{name}_cosines"), c, atol=1e-12)
        off = [c[i, j] ** 2 for i in range(4) for j in range(4) if i != j]
        assert found.numbers[f"{name}_coherence"] == pytest.approx(np.mean(off), rel=1e-9)
        effective = 16 / (c**2).sum()
        assert found.numbers[f"{name}_effective_heads"] == pytest.approx(effective, rel=1e-9)
    gains = [np.linalg.norm(m, 2) / 2 for m in forms]  # scale 1/√4
    np.testing.assert_allclose(found.per_head["largest_logit_gain"], gains, rtol=1e-9)
    assert found.numbers["largest_logit_gain"] == pytest.approx(max(gains), rel=1e-9)
    assert found.notes == ("LayerNorm folded and centred",)


def test_copies_in_another_basis_are_near_duplicates_and_silent_heads_are_dead() -> None:
    view = layer()
    turn = torch.tensor([[2.0, 1, 0, 0], [0, 1, 0, 1], [0, 0, 3, 0], [1, 0, 0, 1]]).double()
    q, k, o, v = view.q.clone(), view.k.clone(), view.o.clone(), view.v.clone()
    q[2], k[2] = turn @ q[0], torch.linalg.inv(turn).mT @ k[0]
    o[2], v[2] = o[0] @ torch.linalg.inv(turn), turn @ v[0]
    o[3] = 0
    found = measure(replace(view, q=q, k=k, v=v, o=o))
    assert found.near_duplicates == ((0, 2),)
    assert found.dead == (3,)
    rows = found.head_rows()
    assert [row["near_duplicate"] for row in rows] == [True, False, True, False]
    assert [row["dead"] for row in rows] == [False, False, False, True]
    assert (rows[0]["nearest_head"], rows[2]["nearest_head"]) == (2, 0)
    assert rows[0]["nearest_qk_cosine"] == pytest.approx(1, abs=1e-9)
    # The opposite of a form is no copy of it, whatever the maps do.
    q[2], o[2] = -q[2], -o[2]
    assert measure(replace(view, q=q, k=k, v=v, o=o)).near_duplicates == ()


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (
            {"position": Rope("half", 4, 100.0, rescaled=(0.5, 0.5))},
            "some rotary frequencies coincide: their planes also mix, GL(m, C)",
        ),
        (
            {"position": Rope("half", 4, 100.0, scaling="longrope; holds up to 64 tokens")},
            "rotary scaling: longrope; holds up to 64 tokens",
        ),
        (
            {"weighting": "linear"},
            "heads that are nearly of full rank also mix with one another",
        ),
    ],
)
def test_what_the_groups_and_frequencies_do_not_cover_is_said(facts: dict, said: str) -> None:
    assert said in measure(layer(**facts)).notes
    assert said not in measure(layer()).notes


def test_rotary_heads_that_agree_at_one_offset_only_are_no_copies() -> None:
    """q and k of head 1 are turned differently in their planes: B(0) stays, B(n) does not."""
    view = layer(h=2, g=2, position=Rope("half", 4, 100.0))
    swap = torch.eye(4, dtype=torch.float64)[[1, 0, 2, 3]]
    same = replace(
        view,
        q=torch.stack((view.q[0], swap @ view.q[0])),
        k=torch.stack((view.k[0], swap @ view.k[0])),
        v=view.v[[0, 0]],
        o=view.o[[0, 0]],
    )
    found = measure(same)
    assert found.qk_cosines[0, 1] == pytest.approx(1, abs=1e-12)
    assert found.near_duplicates == ()
    assert measure(replace(same, position=layer().position)).near_duplicates == ((0, 1),)


def test_heads_without_a_form_are_named_and_not_in_the_means() -> None:
    view = layer()
    part = measure(replace(view, q=view.q * torch.tensor([1.0, 1, 0, 1]).double()[:, None, None]))
    kept = [0, 1, 3]
    alone = measure(replace(layer(h=3, g=3), q=view.q[kept], k=view.k[kept], v=view.v[kept],
                            o=view.o[kept]))  # fmt: skip
    assert "QK form is zero: head 2, not in the means" in part.notes
    for name in ("qk_effective_rank", "qk_coherence", "qk_effective_heads"):
        assert part.numbers[name] == pytest.approx(alone.numbers[name], rel=1e-12), name
    whole = measure(view)
    assert part.numbers["ov_coherence"] == whole.numbers["ov_coherence"]
    assert not any("zero" in note for note in whole.notes)
    assert part.per_head["qk_effective_rank"][2] == 0


def test_copies_and_dead_heads_are_named_in_the_notes() -> None:
    view = layer()
    same = [0, 1, 0, 3]
    weak = torch.tensor([1.0, 1e-5, 1, 1]).double()[:, None, None]
    found = measure(replace(view, q=view.q[same], k=view.k[same], v=view.v[same],
                            o=view.o[same] * weak))  # fmt: skip
    assert "near-duplicates: heads 0 and 2" in found.notes
    assert "dead: head 1" in found.notes


def test_one_head_and_a_layer_of_zeros_have_numbers() -> None:
    one = measure(layer(h=1, g=1))
    assert (one.numbers["qk_coherence"], one.numbers["qk_effective_heads"]) == (0, 1)
    assert math.isnan(one.head_rows()[0]["nearest_head"])
    zero = measure(layer().map(torch.zeros_like))
    assert zero.dead == (0, 1, 2, 3)
    assert zero.near_duplicates == ()
    assert all(value == 0 for value in zero.numbers.values())


def test_numbers_on_data_use_the_covariance_of_the_unfolded_input() -> None:
    view = layer(input_norm=InputNorm("rms", GAIN, None, 1e-5))
    root = torch.randn(12, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    c = root @ root.mT
    found = measure(view, c)
    logits = torch.einsum("hrd,de,hre->hr", view.q, c, view.q)  # only to see it is on raw weights
    assert logits.shape == (4, 4)
    forms = view.q.mT @ view.k
    half = torch.linalg.cholesky(c)
    expected = torch.linalg.matrix_norm(half.mT @ forms @ half) / 2
    np.testing.assert_allclose(found.per_head["logit_rms"], expected.numpy(), rtol=1e-8)
    assert found.numbers["logit_rms"] == found.per_head["logit_rms"].max()
    ranks, bounds = (
        found.per_head[n] for n in ("whitened_qk_effective_rank", "entropy_bound_typical")
    )
    assert found.numbers["whitened_qk_effective_rank"] == pytest.approx(ranks.mean(), rel=1e-12)
    assert found.numbers["entropy_bound_typical"] == bounds.min()
    with pytest.raises(InputError, match=r"expected \[12, 12\]"):
        measure(view, torch.eye(3))


def test_every_number_has_a_unit_and_a_source_and_too_large_is_noticed() -> None:
    assert measure(layer()).numbers.keys() == COLUMNS.keys() - {"largest_logit"}
    normed = measure(LAYERS["qk norm"]).numbers
    assert normed.keys() == COLUMNS.keys() - {"largest_logit_gain"}
    on_data = measure(layer(), torch.eye(12)).numbers
    assert on_data.keys() == {*COLUMNS, *ON_DATA} - {"largest_logit"}
    assert not too_large(layer())
    assert too_large(layer().map(lambda t: t * 1e80))
