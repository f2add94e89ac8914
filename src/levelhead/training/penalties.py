"""Penalties: differentiable numbers of a live model's attention, added to its loss.

    penalty = penalties.coherence(model, weight=0.1, form="qk")
    for x, y in batches:
        loss = criterion(model(x), y) + penalty()       # weight(step) · value
        ...
        optimizer.step()
        penalty.step()                                   # moves schedule and references on

Each reads the weights of now through an AttentionView, in whatever family they are stored, from
factors and never from d × d forms. Its value is the mean over layers of one number per layer, so
a weight means the same for models of any depth. It is computed outside autocast, in the weights'
dtype but float32 at least. Frozen weights get no gradient; weights shared by layers count once.

`symmetry` names the generators of `weights.symmetry_group` under which the value stands still,
whatever the layer. By default (`fold=False`) forms are those of the raw weights, behind whatever
norm stands in front: cheaper, and not the same for two models whose norms' gains lie elsewhere.
`fold=True` puts gains and centring of that norm into the weights first (and sends gradients into
its gain), so that the value speaks of what the layer does to the normed token.

    generator                    the move that leaves the value alone
    qk_gauge, rotary_gauge       (q, k) → (g q, g⁻ᵀ k) in each group; g that rotary commutes with
    qk_rotation, rotary_phase    of those g the orthogonal ones; phases of rotary planes
    qk_sign, qk_scale            signs of channels, sizes of heads: what norms of q and k take away
    qk_gain, qk_mean             their gains, (γ_q, γ_k) → (c γ_q, γ_k/c); means that they remove
    vo_gauge                     (v, o) → (m v, o m⁻¹) in each group
    key_bias, value_bias         a bias of keys, which softmax does not see; v_bias against o_bias
    score_scale                  λ on q·k's form, 1/λ on v·o's, where there is no softmax
    input_gain, input_mean       γ → c γ, W → W/c; what LayerNorm's output cannot meet, u (1/γ)ᵀ
    head_permutation             heads in another order, within groups and with them
    basis_rotation               another orthonormal basis of what the layer reads and writes

Second derivatives of penalties that need singular values are refused: leave them out of the loss
whose Hessian is asked for. At exact collapse every gradient of a head-diversity penalty is zero (a
saddle); any noise leaves it. Near collapse log_det and nuclear_ratio pull hardest; coherence keeps.

**A trap.** ‖UᵀU - I‖² of the head factor U of a Tucker decomposition (HOOI or HOSVD) is not a
penalty: U is orthonormal by construction, whatever the heads are, so the value is zero to 1e-28 and
so is its gradient. Compare heads through the Gram matrix of their forms, as here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError
from levelhead.invariants.entry import Invariant
from levelhead.training import penalty_terms as terms
from levelhead.training.penalty import Penalty, PenaltySum, checked_weight, is_number
from levelhead.training.penalty_layers import LiveLayers
from levelhead.training.penalty_maps import EntropyFloor
from levelhead.training.penalty_quantities import (
    FactorCoherence,
    LayerMean,
    SpectralMean,
    Stability,
)
from levelhead.training.penalty_terms import Form
from levelhead.training.schedules import Schedule
from levelhead.weights.layouts import Layout

__all__ = [
    "Options",
    "Penalty",
    "PenaltySum",
    "coherence",
    "core_sparsity",
    "cp_coherence",
    "entropy_floor",
    "entropy_rank",
    "equal_strength",
    "l2",
    "log_det",
    "nuclear_norm",
    "nuclear_ratio",
    "rank_floor",
    "spectral_norm",
    "stability",
]


class Options(TypedDict, total=False):
    """Arguments that penalties of a model share.

    layers: positions, names or patterns of names of layers; all by default. layout: a family, a
    mapping or a TOML file for models no built-in row knows. schedule: steps done → factor on the
    weight (`training.schedules`), constant by default. fold: see the top of the module. heads,
    kv_heads, head_dim: what neither the model's config nor its modules say.
    """

    layers: Sequence[int | str] | None
    layout: Layout | None
    schedule: Schedule | None
    fold: bool
    heads: int | None
    kv_heads: int | None
    head_dim: int | None


def coherence(
    model: nn.Module, weight: float = 0.1, *, form: Form = "qk", **options: Unpack[Options]
) -> Penalty:
    """Σ_{i≠j} C_ij²/(h(h-1)), the mean squared cosine of heads' forms: 0 different … 1 copies.

    `form`: "qk", "ov", "both" (mean of the two) or "product" (B_i ⊗ M_i). O(h² d_k² d). Raises
    NothingMatched without attention, InputError for a layer of one head or a wrong argument.
    Source: the closed form of its gradient is tested; cosines of forms do not see the gauge.

    >>> model = nn.MultiheadAttention(8, 2)
    >>> penalty = coherence(model, weight=0.5)
    >>> bool(penalty() == 0.5 * penalty.value()), penalty.symmetry[:2]
    (True, ('qk_gauge', 'rotary_gauge'))
    """
    return _of_layers(terms.head_term("coherence", form), model, weight, options)


def log_det(
    model: nn.Module,
    weight: float = 0.1,
    *,
    form: Form = "qk",
    eps: float = 1e-3,
    **options: Unpack[Options],
) -> Penalty:
    """-(1/h) log det(C + εI) + log(1 + ε) of the heads' cosines C, ≥ 0; strongest near collapse.

    Arguments and errors as `coherence`, and InputError for eps ≤ 0.

    >>> log_det(nn.MultiheadAttention(8, 2)).value().item() > 0
    True
    """
    _positive(eps=eps)
    return _of_layers(terms.head_term("log_det", form, eps), model, weight, options)


def nuclear_ratio(
    model: nn.Module,
    weight: float = 0.1,
    *,
    form: Form = "qk",
    eps: float = 1e-3,
    **options: Unpack[Options],
) -> Penalty:
    """1 - (Σ √λ)²/h² with λ the eigenvalues of the heads' cosines: 0 different … 1 - 1/h copies.

    The nuclear norm of the stacked forms' head unfolding over its largest possible value. Arguments
    and errors as `log_det`.

    >>> -1e-6 < nuclear_ratio(nn.MultiheadAttention(8, 2)).value().item() < 0.5
    True
    """
    _positive(eps=eps)
    return _of_layers(terms.head_term("nuclear_ratio", form, eps), model, weight, options)


def entropy_rank(
    model: nn.Module, weight: float = 0.1, *, form: Form = "qk", **options: Unpack[Options]
) -> Penalty:
    """1 - log(effective number of heads)/log h: 0 all count … 1 one is left.

    The number is exp of the entropy of λ(C)/h (Roy & Vetterli 2007). Arguments and errors as
    `coherence`.

    >>> 0 <= entropy_rank(nn.MultiheadAttention(8, 2)).value().item() < 1
    True
    """
    return _of_layers(terms.head_term("entropy_rank", form), model, weight, options)


def rank_floor(
    model: nn.Module,
    weight: float = 1.0,
    *,
    floor: float | None = None,
    form: Form = "qk",
    **options: Unpack[Options],
) -> Penalty:
    """Mean over heads of max(0, 1 - erank(A_i)/floor); 0 once every head has the effective rank.

    erank is exp of the entropy of σ/Σσ, from 1 to d_k. Raises InputError without a floor, for one
    ≤ 1 or one that heads cannot reach, and as `coherence` (form "product" is refused).

    >>> rank_floor(nn.MultiheadAttention(8, 2), floor=1.5).value().item()
    0.0
    """
    terms.sized_stacks(form)
    if not (is_number(floor) and floor > 1):
        raise InputError(
            f"floor={floor!r} was given; expected an effective rank above 1, up to d_k: half of "
            "d_k, say"
        )
    return _of_layers(terms.rank_floor_term(form, floor), model, weight, options)


def nuclear_norm(
    model: nn.Module, weight: float = 1e-3, *, form: Form = "qk", **options: Unpack[Options]
) -> Penalty:
    """Mean over heads of ‖A_i‖_* = Σ σ, which lowers rank; the L2 of factors in balanced gauge.

    Gradient U Vᵀ through the factors, O(h r² d). Raises InputError for form "product", and for "qk"
    under a norm of queries and keys, where B_i has no size.

    >>> model = nn.MultiheadAttention(8, 2)
    >>> bool(nuclear_norm(model).value() >= spectral_norm(model).value())
    True
    """
    return _of_layers(terms.nuclear_term(form), model, weight, options)


def spectral_norm(
    model: nn.Module,
    weight: float = 1e-3,
    *,
    form: Form = "qk",
    iterations: int = 8,
    width: int = 8,
    **options: Unpack[Options],
) -> Penalty:
    """Mean over heads of ‖A_i‖₂, which bounds logits; by warm-started power iteration.

    `iterations` steps on a block of `width` directions at each call (64 at the first), kept
    from call to call and in the state_dict; the value is a lower bound, see
    `tensors.power_iteration` for its error. Raises as `nuclear_norm`, and InputError for fewer
    than one step or direction.

    >>> spectral_norm(nn.MultiheadAttention(8, 2)).value().item() > 0
    True
    """
    if iterations < 1 or width < 1:
        raise InputError(
            f"iterations={iterations} and width={width} were given; expected at least 1"
        )
    term, live = terms.spectral_term(form), _live(model, options)
    quantity = SpectralMean(live, term, terms.sized_stacks(form), iterations, width)
    return _penalty(term, quantity, weight, options)


def core_sparsity(
    model: nn.Module, weight: float = 0.1, *, form: Form = "qk", **options: Unpack[Options]
) -> Penalty:
    """Mean over modes of PR/n of the stacked forms' mode spectra: small means a sparse core.

    PR = (Σσ²)²/Σσ⁴ counts the slices of the higher-order SVD's core [h, d, d] that carry its
    energy; no eigenvalues are needed. O((h r)² d). Raises as `nuclear_norm`.

    >>> 0 < core_sparsity(nn.MultiheadAttention(8, 2)).value().item() <= 1
    True
    """
    terms.sized_stacks(form)
    return _of_layers(terms.core_sparsity_term(form), model, weight, options)


def cp_coherence(
    source: nn.Module | Sequence[Tensor],
    weight: float = 0.1,
    *,
    modes: Sequence[int] = (0,),
    schedule: Schedule | None = None,
) -> Penalty:
    """Mean squared cosine of the columns of CP factors [n_m, R], over `modes`: 0 … 1.

    `source`: the factor matrices themselves, or a module with an attribute `cp_factors` that gives
    them. Of mode 0 it is the head-usage coherence of components, not that of heads, and cannot
    vanish for R > n_0 (Welch: the mean square is at least (R - n)/(n(R - 1))). Raises InputError
    for a model that is not parametrised by CP factors: coherence of a *fitted* decomposition has no
    gradient that reaches weights.

    >>> a = torch.tensor([[1.0, 1.0], [0.0, 1.0]], requires_grad=True)
    >>> cp_coherence([a]).value()
    tensor(0.5000, grad_fn=<MeanBackward0>)
    """
    quantity = FactorCoherence(source, modes)
    symmetry = ("head_permutation", "basis_rotation")
    return Penalty("cp_coherence", quantity, weight, symmetry, schedule)


def entropy_floor(
    model: nn.Module,
    weight: float = 1.0,
    *,
    floor: float = 0.2,
    rows: int | None = None,
    **options: Unpack[Options],
) -> Penalty:
    """Mean over heads of max(0, floor - share), share = mean over rows of H/log(allowed keys).

    share is 0 for one-hot and 1 for uniform attention. It is of the maps of the model's last
    forward with gradients, recomputed eagerly from the q and k that a fused kernel was given:
    O(b h n m) memory, or `rows` evenly spaced queries of them. A training step takes about 40 %
    longer for a small model, 17 % at d 512. Hooks collect maps; `close()` removes those. The value
    is the function's own, so nothing that leaves the function alone moves it. Raises InputError
    when a layer ran no attention that could be seen, and for a floor outside (0, 1].

    >>> model = nn.MultiheadAttention(8, 2, batch_first=True)
    >>> penalty = entropy_floor(model, floor=1.0)
    >>> x = torch.randn(1, 5, 8)
    >>> _ = model(x, x, x)
    >>> 0 <= penalty.value().item() < 1
    True
    """
    if not (is_number(floor) and 0 < floor <= 1):
        raise InputError(f"floor={floor!r} was given; expected a share of entropy above 0, up to 1")
    if rows is not None and rows < 1:
        raise InputError(f"rows={rows} was given; expected at least one row")
    weight = checked_weight(weight)  # before hooks are there
    live = _live(model, options)
    quantity = EntropyFloor(model, live, floor, rows)
    return Penalty("entropy_floor", quantity, weight, quantity.symmetry, options.get("schedule"))


def stability(
    model: nn.Module,
    weight: float = 0.1,
    *,
    quantities: Sequence[str] = ("qk_spectrum", "ov_spectrum"),
    decay: float = 0.99,
    **options: Unpack[Options],
) -> Penalty:
    """Mean of ‖f - f_ref‖²/‖f_ref‖² over `quantities`, names of the catalogue, of each layer.

    f_ref starts as f now and follows at each `step()`: f_ref ← decay·f_ref + (1 - decay)·f. It is
    part of the state_dict. A training step takes about 24 % longer for a small model, 11 % at
    d 512. Raises InputError for entries that do not exist for a layer or have no gradient, and for
    a decay outside [0, 1].

    >>> stability(nn.MultiheadAttention(8, 2)).value().item() < 1e-20
    True
    """
    if not (is_number(decay) and 0 <= decay <= 1):
        raise InputError(f"decay={decay!r} was given; expected a number from 0 to 1")
    quantity = Stability(_live(model, options), tuple(quantities), decay)
    return Penalty("stability", quantity, weight, quantity.symmetry, options.get("schedule"))


def l2(model: nn.Module, weight: float = 1e-4, **options: Unpack[Options]) -> Penalty:
    """‖q‖² + ‖k‖² + ‖v‖² + ‖o‖² of attention weights, mean over layers: the control.

    Not a function of what a layer does (rotations of heads leave it alone, other changes of their
    basis do not). Errors as `coherence`.

    >>> "qk_gauge" in l2(nn.MultiheadAttention(8, 2)).symmetry
    False
    """
    return _of_layers(terms.l2_term(), model, weight, options)


def equal_strength(control: Penalty, penalty: Penalty) -> Penalty:
    """`control` (an `l2`, say) with the weight at which it pulls as hard as `penalty` does now.

    Both gradients of weight·value are taken with respect to the attention weights that `control`
    reads, and their norms made equal; schedules are left out. The result starts at step 0 with
    `penalty`'s schedule. Raises InputError where either has no gradient there.

    >>> model = nn.MultiheadAttention(8, 2)
    >>> control = equal_strength(l2(model), coherence(model, weight=0.3))
    >>> control.name, control.weight > 0
    ('l2', True)
    """
    parameters = control.parameters()
    norms = []
    for each in (control, penalty):
        value = each.weight * each.value()
        slopes: tuple[Tensor | None, ...] = (None,)
        if value.requires_grad and parameters:
            slopes = torch.autograd.grad(value, parameters, allow_unused=True, retain_graph=True)
        found = [s.double().square().sum() for s in slopes if s is not None]
        norms.append(float(torch.stack(found).sum().sqrt()) if found else 0.0)
    if not all(norms):
        flat = control.name if norms[0] == 0 else penalty.name
        raise InputError(
            f"{flat} has no gradient in the attention weights here, so no strength equals its: "
            "compare them where both act"
        )
    return control.reweighted(control.weight * norms[1] / norms[0], penalty.schedule)


# ── private ──


def _live(model: nn.Module, options: Options) -> LiveLayers:
    names = ("heads", "kv_heads", "head_dim")
    known = {*names, "layers", "layout", "schedule", "fold"}
    if unknown := sorted(set(options) - known):
        raise InputError(f"unknown argument {unknown[0]!r}; expected one of {sorted(known)}")
    settings: dict[str, Any] = {n: options.get(n) for n in names}
    return LiveLayers(
        model,
        layers=options.get("layers"),
        layout=options.get("layout"),
        fold=options.get("fold", False),
        settings=settings,
    )


def _of_layers(term: Invariant, model: nn.Module, weight: float, options: Options) -> Penalty:
    return _penalty(term, LayerMean(_live(model, options), term), weight, options)


def _penalty(term: Invariant, quantity: LayerMean, weight: float, options: Options) -> Penalty:
    symmetry = terms.invariant_generators(term.symmetries)
    return Penalty(term.name, quantity, weight, symmetry, options.get("schedule"))


def _positive(**given: float) -> None:
    for name, value in given.items():
        if not (is_number(value) and value > 0):
            raise InputError(f"{name}={value!r} was given; expected a positive number")
