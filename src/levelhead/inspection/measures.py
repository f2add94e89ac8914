"""The numbers of one layer, each of them one that the layer's own symmetries leave alone.

Axes as in `attention_view`; h heads. Everything is computed in float64 on the folded layer: the
gain and bias of the norm in front are inside the weights, for spectra of weights that a norm could
rescale would say nothing.

Two examples. A layer without norms of queries and keys has the QK spectrum of B_i. One with such a
norm has it up to a factor only: its gains go into B_i, ranks and cosines stay, and instead of the
largest gain stands the largest logit the norm allows.

What a layer's group moves all the same is kept, and named in `basis_dependent`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.base.numerics import threads
from levelhead.invariants.catalogue import catalogue
from levelhead.invariants.entry import Verdict
from levelhead.invariants.heads import coherence, normalised, participation_ratio
from levelhead.invariants.rotary import rotary_gram
from levelhead.invariants.spectral import effective_qk, largest_logit
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.folding import folded
from levelhead.weights.structure import Disentangled, Rope
from levelhead.weights.symmetry_group import symmetry_group

__all__ = [
    "COLUMNS",
    "DEAD",
    "DUPLICATE",
    "ON_DATA",
    "LayerNumbers",
    "folded_layer",
    "measure",
    "one_thread",
    "too_large",
]

# Two heads are near-duplicates if the cosines of both their forms and their maps reach this.
DUPLICATE = 0.9
# A head is dead if what it writes is smaller than this share of the layer's median head.
DEAD = 1e-3
# Layers wider than this keep all threads busy; narrower ones are faster on one.
_WIDE = 1024
_HUGE = 1e70
# So many heads or pairs are named in a note.
_NAMED = 8

Floats = NDArray[np.float64]

# A layer's numbers: name → unit, what it is, and the entry whose declarations it stands under.
COLUMNS: Mapping[str, tuple[str, str, str]] = {
    "qk_effective_rank": ("1", "mean over heads", "qk_effective_rank"),
    "ov_effective_rank": ("1", "mean over heads", "ov_effective_rank"),
    "largest_logit_gain": ("logit per x²", "largest of the heads", "largest_logit_gain"),
    "largest_logit": ("logit", "largest of the heads, under QK-norm", "largest_logit"),
    "qk_coherence": ("1", "mean squared cosine of B_i and B_j, i ≠ j", "qk_coherence"),
    "ov_coherence": ("1", "mean squared cosine of M_i and M_j, i ≠ j", "ov_coherence"),
    "qk_effective_heads": ("1", "h²/Σ C², C = cosines of B", "qk_effective_heads"),
    "ov_effective_heads": ("1", "h²/Σ C², C = cosines of M", "ov_effective_heads"),
}
# What a covariance adds to them.
ON_DATA: Mapping[str, tuple[str, str, str]] = {
    "whitened_qk_effective_rank": ("1", "mean over heads", "whitened_qk_effective_rank"),
    "logit_rms": ("logit", "largest of the heads", "logit_rms"),
    "entropy_bound_typical": ("nat", "smallest of the heads", "entropy_bound_typical"),
}
_NORMED = "qk_normalised_spectrum"


@dataclass(frozen=True, eq=False)
class LayerNumbers:
    """What was found of one layer.

    Args:
        name, family: the layer and the plan that read it.
        heads, groups, d_k, d_v, d: its sizes.
        numbers: those of `COLUMNS` and `ON_DATA` that the layer has.
        per_head: name → [h]; nan where the number does not exist.
        qk_cosines, ov_cosines: [h, h] of B and M.
        qk_spectrum, ov_spectrum: [h, k], falling; of a normed layer σ/σ_1.
        near_duplicates: pairs of heads; dead: heads.
        basis_dependent: number → the generators of the layer's group that move it.
        normed: whether queries and keys are; then there is `largest_logit` in place of a gain.
        notes: what was done to the layer, what to know of it, and which heads are copies, dead
            or have a form that is zero.
    """

    name: str
    family: str
    heads: int
    groups: int
    d_k: int
    d_v: int
    d: int
    numbers: Mapping[str, float]
    per_head: Mapping[str, Floats]
    qk_cosines: Floats
    ov_cosines: Floats
    qk_spectrum: Floats
    ov_spectrum: Floats
    near_duplicates: tuple[tuple[int, int], ...]
    dead: tuple[int, ...]
    basis_dependent: Mapping[str, tuple[str, ...]]
    normed: bool
    notes: tuple[str, ...]

    def row(self) -> dict[str, object]:
        """One row of `Inspection.to_frame`."""
        dependent = [
            f"{name} is basis dependent ({', '.join(moved)})"
            for name, moved in self.basis_dependent.items()
        ]
        return {
            "layer": self.name,
            "heads": self.heads,
            "groups": self.groups,
            "d_k": self.d_k,
            **dict.fromkeys(COLUMNS, math.nan),
            **self.numbers,
            "near_duplicates": len(self.near_duplicates),
            "dead_heads": len(self.dead),
            "notes": "; ".join([*self.notes, *dependent]),
        }

    def head_rows(self) -> list[dict[str, object]]:
        """The rows of `Inspection.heads_frame`, one for each head."""
        pairs = {i for pair in self.near_duplicates for i in pair}
        return [
            {
                "layer": self.name,
                "head": i,
                **{name: values[i].item() for name, values in self.per_head.items()},
                "near_duplicate": i in pairs,
                "dead": i in self.dead,
            }
            for i in range(self.heads)
        ]


def folded_layer(view: AttentionView) -> tuple[AttentionView, tuple[str, ...]]:
    """The layer in float64 with everything folded, and a note of what that was.

    >>> one = torch.ones(1, 1, 2)
    >>> folded_layer(AttentionView(q=one, k=one, v=one, o=one.mT))[1]
    ()
    """
    view = view.map(lambda t: t.detach().double())
    norm = view.input_norm
    try:
        out = folded(view)
    except InputError as error:
        return view, (str(error).removeprefix(f"{view.name}: "),)
    if norm.kind == "none":
        return out, ()
    if norm.kind == "layer":
        return out, ("LayerNorm folded and centred",)
    return out, ("RMSNorm folded",) if norm.gain is not None else ()


def one_thread(view: AttentionView) -> int | None:
    """1 for layers on which several threads are slower than one, else None: as many as are set."""
    return 1 if view.d <= _WIDE else None


def too_large(layer: AttentionView) -> bool:
    """Whether products of four of the layer's weights would overflow float64."""
    tensors = (layer.q, layer.k, layer.v, layer.o)
    return not all(float(t.abs().max()) <= _HUGE for t in tensors)


def measure(
    view: AttentionView,
    covariance: Tensor | None = None,
    *,
    folding: tuple[AttentionView, tuple[str, ...]] | None = None,
) -> LayerNumbers:
    """The numbers of one layer as it was read, with its norm not folded yet.

    `folding` is what `folded_layer` makes of the view, where that is at hand.

    `covariance` [d, d] is E[x xᵀ] of what its projections read (behind the norm, gain included),
    and adds the numbers on data to `per_head`. Raises InputError for one of another shape.

    >>> one = torch.eye(4).reshape(2, 2, 4)
    >>> numbers = measure(AttentionView(q=one, k=one, v=one, o=one.mT)).numbers
    >>> numbers["qk_effective_rank"], numbers["qk_effective_heads"], numbers["largest_logit_gain"]
    (2.0, 2.0, 0.7071067811865475)
    """
    with threads(one_thread(view)), torch.no_grad():
        layer, notes = folding or folded_layer(view)
        qk, ov = effective_qk(layer), layer.ov
        sigma, rho = qk.singular_values(), ov.singular_values()
        grams = qk.head_gram(), ov.head_gram()
        cosines = normalised(grams[0]), normalised(grams[1])
        # `largest_logit_gain` from the spectrum at hand; a norm bounds logits by itself.
        logits = layer.logit_scale * sigma[:, 0] if layer.qk_norm is None else largest_logit(layer)
        reach = "largest_logit_gain" if layer.qk_norm is None else "largest_logit"
        on_data = _on_data(view, covariance)
        per_head = {
            "group": np.array(layer.kv_group),
            "qk_effective_rank": _array(_effective_ranks(sigma)),
            "ov_effective_rank": _array(_effective_ranks(rho)),
            reach: _array(logits),
            "ov_spectral_norm": _array(rho[:, 0]),
            **_nearest(cosines[0], cosines[1]),
            **on_data,
        }
        dead = _dead(layer, sigma, rho)
        duplicates = _duplicates(layer, *cosines)
        # A head whose form is zero has no rank and no direction: means are over the others.
        living = sigma[:, 0] > 0, rho[:, 0] > 0
        numbers = {
            "qk_effective_rank": _mean_of(per_head["qk_effective_rank"], living[0]),
            "ov_effective_rank": _mean_of(per_head["ov_effective_rank"], living[1]),
            reach: float(logits.max()),
            "qk_coherence": float(coherence(_among(grams[0], living[0]))),
            "ov_coherence": float(coherence(_among(grams[1], living[1]))),
            "qk_effective_heads": float(participation_ratio(cosines[0])),
            "ov_effective_heads": float(participation_ratio(cosines[1])),
            **_summed_up(on_data),
        }
        if layer.qk_norm is not None:
            sigma = sigma / torch.where(sigma[:, :1] > 0, sigma[:, :1], 1.0)
        return LayerNumbers(
            layer.name,
            layer.family,
            layer.heads,
            layer.groups,
            layer.d_k,
            layer.d_v,
            layer.d,
            numbers,
            per_head,
            _array(cosines[0]),
            _array(cosines[1]),
            _array(sigma),
            _array(rho),
            duplicates,
            dead,
            _basis_dependent(layer, numbers),
            layer.qk_norm is not None,
            (*notes, *_facts(layer), *_by_number(duplicates, dead, *living)),
        )


# ── parts ──


def _effective_ranks(sigma: Tensor) -> Tensor:
    """exp of the entropy of σ/Σσ in each row [h], 0 for a row of zeros (Roy & Vetterli 2007)."""
    largest = sigma[:, :1]
    alive = largest[:, 0] > 0
    p = sigma / torch.where(largest > 0, largest, 1.0)
    p = p / torch.where(alive, p.sum(-1), 1.0)[:, None]
    entropy = -torch.xlogy(p, p).sum(-1)
    return torch.where(alive, entropy.exp(), 0.0)


def _mean_of(values: Floats, living: Tensor) -> float:
    chosen = values[living.cpu().numpy()]
    return float(chosen.mean()) if chosen.size else 0.0


def _among(gram: Tensor, living: Tensor) -> Tensor:
    return gram[living][:, living] if bool(living.any()) else gram


def _by_number(
    duplicates: Sequence[tuple[int, int]], dead: Sequence[int], qk: Tensor, ov: Tensor
) -> list[str]:
    """Which heads are near-duplicates, dead, or zero."""
    said = []
    if duplicates:
        pairs = ", ".join(f"{i} and {j}" for i, j in duplicates[:_NAMED])
        said.append(f"near-duplicates: heads {pairs}{_more(len(duplicates), 'pairs')}")
    zero = {"QK form": qk, "OV map": ov}
    for what, living in zero.items():
        heads = torch.nonzero(~living)[:, 0].tolist()
        if heads:
            said.append(f"{what} is zero: {_heads(heads)}, not in the means")
    if dead:
        said.append(f"dead: {_heads(dead)}")
    return said


def _heads(numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, numbers[:_NAMED]))
    return f"head{'s' if len(numbers) > 1 else ''} {named}{_more(len(numbers), 'heads')}"


def _more(count: int, what: str) -> str:
    return f", … ({count} {what})" if count > _NAMED else ""


def _nearest(qk: Tensor, ov: Tensor) -> dict[str, Floats]:
    """The head that is most alike, by the smaller of both cosines, and these cosines."""
    h = len(qk)
    if h == 1:
        none = np.full(1, math.nan)
        return {"nearest_head": none, "nearest_qk_cosine": none, "nearest_ov_cosine": none}
    alike = torch.minimum(qk, ov).clone().fill_diagonal_(-math.inf)
    nearest = alike.argmax(-1)
    at = torch.arange(h), nearest
    return {
        "nearest_head": nearest.numpy(),
        "nearest_qk_cosine": _array(qk[at]),
        "nearest_ov_cosine": _array(ov[at]),
    }


def _on_data(view: AttentionView, covariance: Tensor | None) -> dict[str, Floats]:
    """Numbers of the kind "data": the covariance is that of the unfolded layer's input."""
    if covariance is None:
        return {}
    entries = catalogue()
    found = {}
    for name in ON_DATA:
        entry = entries[name]
        if entry.applies(view) is None:
            found[name] = _array(entry(view, covariance))
        else:
            found[name] = np.full(view.heads, math.nan)
    return found


def _summed_up(on_data: Mapping[str, Floats]) -> dict[str, float]:
    """One number of a layer for each number of its heads, as `ON_DATA` says."""
    how = {"mean over heads": "mean", "largest of the heads": "max", "smallest of the heads": "min"}
    return {n: float(getattr(values, how[ON_DATA[n][1]])()) for n, values in on_data.items()}


def _dead(layer: AttentionView, sigma: Tensor, rho: Tensor) -> tuple[int, ...]:
    """Heads that write next to nothing. Without softmax a head's share lies in B ⊗ M."""
    size = torch.linalg.vector_norm(rho, dim=-1)
    if layer.weighting != "softmax":
        size = size * torch.linalg.vector_norm(sigma, dim=-1)
    return tuple(torch.nonzero(size <= DEAD * size.median())[:, 0].tolist())


def _duplicates(
    layer: AttentionView, qk_cosines: Tensor, ov_cosines: Tensor
) -> tuple[tuple[int, int], ...]:
    """Pairs alike in form and map; under rotary positions in the forms over all offsets as well."""
    alike = torch.minimum(qk_cosines, ov_cosines)
    if isinstance(layer.position, Rope) and bool((alike.triu(1) >= DUPLICATE).any()):
        alike = torch.minimum(alike, normalised(rotary_gram(layer)))
    found = torch.nonzero(alike.triu(1) >= DUPLICATE).tolist()
    return tuple((i, j) for i, j in found)


def _basis_dependent(
    layer: AttentionView, numbers: Mapping[str, float]
) -> dict[str, tuple[str, ...]]:
    """For each number the generators of the layer's group that the catalogue says move it."""
    generators = symmetry_group(layer).generators
    entries = catalogue()
    found = {}
    for name, (_, _, source) in COLUMNS.items():
        if name not in numbers:
            continue
        if layer.qk_norm is not None and not name.startswith(("ov", "largest")):
            # Gains are inside: what is left is declared by the entries of the normed form.
            source = _NORMED
        verdicts = [(g.name, entries[source].verdict(layer, g)[0]) for g in generators]
        moved = tuple(n for n, v in verdicts if v in (Verdict.VARIANT, Verdict.GENERIC))
        if moved:
            found[name] = moved
    return found


def _facts(layer: AttentionView) -> list[str]:
    """What the layer is, as far as it bears on how the numbers are to be read."""
    said = []
    if layer.cross:
        said.append("cross-attention")
    if isinstance(layer.position, Rope):
        said.append("rotary positions: QK numbers are for query and key at the same place")
        if layer.position.scaling is not None:
            said.append(f"rotary scaling: {layer.position.scaling}")
    elif isinstance(layer.position, Disentangled):
        said.append("terms of position are not in B")
    elif layer.position.tag != "none":
        said.append(f"position {layer.position.tag}")
    if layer.qk_norm is not None:
        said.append(
            "QK-norm: its gains are inside the QK numbers, and there is a largest logit in place "
            "of a gain"
        )
    if layer.latent is not None:
        said.append("latent norms: B and M up to a factor of each token")
    if layer.soft_cap is not None:
        said.append(f"logits capped at {layer.soft_cap:g}")
    if layer.weighting != "softmax":
        said.append(f"{layer.weighting} attention")
    return [*said, *layer.symmetry_group().notes]


def _array(tensor: Tensor) -> Floats:
    return tensor.detach().double().cpu().numpy()
