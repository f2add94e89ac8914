"""The moves that leave a given attention layer's function as it is, by name.

Axes as in `attention_view`; h heads in g key/value groups. Which moves there are follows from what
the layer is: its position, its norms, its biases, its weighting. `symmetry_group(view)` lists them
as generators, each with random elements and with a chart around the identity, and says of every
move that is not there why not.

Two examples. Softmax attention without positions and biases has `qk_gauge`, GL(d_k) for each
group, `vo_gauge`, GL(d_v), and `head_permutation`. Rotary positions leave of the first only what
commutes with them, `rotary_gauge`: a complex number for each plane.

`basis_rotation` differs from the others: it moves the layer's input and output as well, and is a
symmetry of the whole model at once. Scales of normed queries and keys hold up to the norms' eps.

Sources: OpenReview KrkbYbK0cH and K1df8mmncF (maximal gauge groups of softmax attention with and
without rotary positions); arXiv 2412.14543 (GL(d_h) per head). What norms, biases and shared keys
add or take away is derived, and checked by Jacobian ranks in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from levelhead.base.errors import InputError
from levelhead.weights import generators_outer, generators_qk
from levelhead.weights.generator import FAMILIES, Generator, Moved
from levelhead.weights.layer_weights import LayerWeights, View

__all__ = ["FAMILIES", "GENERATORS", "Generator", "Moved", "SymmetryGroup", "symmetry_group"]

# Every name a generator can have, with what makes it (or says why it is missing).
GENERATORS: dict[str, Callable[[LayerWeights], Generator | str]] = {
    "qk_gauge": generators_qk.qk_gauge,
    "rotary_gauge": generators_qk.rotary_gauge,
    "qk_rotation": generators_qk.qk_rotation,
    "rotary_phase": generators_qk.rotary_phase,
    "qk_sign": generators_qk.qk_sign,
    "qk_scale": generators_qk.qk_scale,
    "qk_gain": generators_qk.qk_gain,
    "qk_mean": generators_qk.qk_mean,
    "vo_gauge": generators_outer.vo_gauge,
    "key_bias": generators_outer.key_bias,
    "value_bias": generators_outer.value_bias,
    "score_scale": generators_outer.score_scale,
    "input_gain": generators_outer.input_gain,
    "input_mean": generators_outer.input_mean,
    "head_permutation": generators_outer.head_permutation,
    "basis_rotation": generators_outer.basis_rotation,
}


@dataclass(frozen=True, eq=False)
class SymmetryGroup:
    """`generators` of a layer's group, and for every other name the reason why it is `missing`.

    `notes` say where the group is larger than what the generators make.
    """

    generators: tuple[Generator, ...]
    missing: dict[str, str]
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the generators that are there."""
        return tuple(g.name for g in self.generators)

    def __getitem__(self, name: str) -> Generator:
        """The generator of that name. Raises InputError if the layer has none, with the reason."""
        for generator in self.generators:
            if generator.name == name:
                return generator
        if name in self.missing:
            raise InputError(f"this layer has no {name}: {self.missing[name]}")
        raise InputError(f"no generator {name!r}; there are {', '.join(GENERATORS)}")

    @property
    def dimension(self) -> int:
        """Dimension of the Lie group that leaves the layer's function alone.

        Without `basis_rotation`, which moves inputs.
        """
        return sum(g.dimension for g in self.generators if not g.moves_inputs)

    @property
    def fibre_dimension(self) -> int:
        """Dimension of the set of weights near generic ones that compute the same function.

        Smaller than `dimension` where the group does not act freely (d_k > d).
        """
        return sum(g.fibre for g in self.generators if not g.moves_inputs)

    def choose(self, name: str) -> tuple[Generator, ...]:
        """The generators meant by a generator's name, a family's name, or "all".

        Raises InputError for a name that is neither; the answer may be empty.
        """
        if name == "all":
            return self.generators
        if name in GENERATORS:
            return tuple(g for g in self.generators if g.name == name)
        if name in FAMILIES:
            return tuple(g for g in self.generators if g.family == name)
        raise InputError(
            f"no group {name!r}; expected 'all', a family ({', '.join(FAMILIES)}) or one of "
            f"{', '.join(GENERATORS)}"
        )

    def random(
        self, view: View, random: torch.Generator, *, condition: float = 10.0
    ) -> Moved[View]:
        """All generators that leave inputs alone, one after the other, each with a random element.

        `condition` bounds the condition number of every matrix among them.
        """
        out = Moved(view)
        for generator in self.generators:
            if not generator.moves_inputs:
                out = out.then(generator.draw(out.view, random, condition))
        return out


def symmetry_group(view: LayerWeights) -> SymmetryGroup:
    """The group of this layer, from what it is (and from its weights only in one place).

    The one place: a layer behind LayerNorm whose weights are centred has no `input_mean`.

    >>> one = torch.ones(2, 1, 3)
    >>> view = LayerWeights(q=one, k=one, v=one, o=one.mT)
    >>> group = symmetry_group(view)
    >>> group.names
    ('qk_gauge', 'vo_gauge', 'head_permutation', 'basis_rotation')
    >>> group.dimension, group.missing["key_bias"]
    (4, 'there is no bias of keys')
    """
    found, missing = [], {}
    for name, build in GENERATORS.items():
        built = build(view)
        if isinstance(built, str):
            missing[name] = built
        else:
            found.append(built)
    return SymmetryGroup(tuple(found), missing, generators_qk.notes(view))
