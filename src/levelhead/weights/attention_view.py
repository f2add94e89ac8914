"""The weights of one attention layer in one convention, and what follows from them.

Axes. h query heads, g key/value groups, d_k the width of queries and keys, d_v that of values;
d is the width of the layer's input, d_source that of the tokens it looks at, d_out that of its
output. `layer_weights` holds the weights, what the layer is, and the conventions in full; an
`AttentionView` is that with what is built on it: symmetries, the balanced gauge, head tensors.

Two examples. A layer without biases and positions is the forms B_i = q_iᵀ k_{g(i)} [d, d_source]
(`.qk`, unscaled) and the maps M_i = o_i v_{g(i)} [d_out, d_source] (`.ov`). With h = 4, g = 2 and
kv_group (0, 0, 1, 1), heads 0 and 1 share the first block of k and v.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.weights import canonical, symmetry_group
from levelhead.weights.layer_weights import LayerWeights

__all__ = ["AttentionView", "HeadMap"]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AttentionView(LayerWeights):
    """One attention layer: q [h,d_k,d], k [g,d_k,d_source], v [g,d_v,d_source], o [h,d_out,d_v].

    Its fields are those of `LayerWeights`, with the same checks.

    Raises InputError for shapes that do not fit together, no heads, or a group out of range.

    >>> view = AttentionView(
    ...     q=torch.ones(2, 1, 3), k=torch.ones(1, 1, 3), v=torch.ones(1, 1, 3),
    ...     o=torch.ones(2, 3, 1))
    >>> view
    AttentionView('attention': 2 heads, 1 group, d_k 1, d_v 1, d 3, full, position none)
    >>> view.kv_group, view.qk.dense()[0]
    ((0, 0), tensor([[1., 1., 1.],
            [1., 1., 1.],
            [1., 1., 1.]]))
    >>> view.symmetry_group().names
    ('qk_gauge', 'vo_gauge', 'head_permutation', 'basis_rotation')
    """

    def symmetry_group(self) -> symmetry_group.SymmetryGroup:
        """The moves that leave this layer's function as it is: `weights.symmetry_group`."""
        return symmetry_group.symmetry_group(self)

    def canonical(
        self,
        *,
        reference: AttentionView | Tensor | None = None,
        tolerance: float | None = None,
    ) -> canonical.CanonicalGauge[AttentionView]:
        """This layer in balanced gauge (`.view`), with σ and their clusters: `weights.canonical`.

        Args and errors as there: a `reference` fixes signs, `tolerance` joins σ to clusters.

        >>> one = torch.ones(1, 1, 2)
        >>> view = AttentionView(q=2 * one, k=8 * one, v=one, o=one.mT)
        >>> view.canonical().view.q.abs()
        tensor([[[4., 4.]]])
        """
        return canonical.canonical(self, reference=reference, tolerance=tolerance)

    def head_tensor(self) -> Tensor:
        """Raw tensor [h, d_k, d, 3], T[i,·,·,c] = (q_i, k_{g(i)}, v_{g(i)})[c]; basis dependent.

        It leaves out o and biases, and repeats shared keys and values. Raises InputError where it
        does not exist: d_v ≠ d_k, or a source of another width.
        """
        if self.d_v != self.d_k:
            raise InputError(
                f"{self.name}: the raw head tensor stacks q, k and v, but values are {self.d_v} "
                f"and keys {self.d_k} wide: look at .qk and .ov"
            )
        if self.d_source != self.d:
            raise InputError(
                f"{self.name}: the raw head tensor stacks q, k and v, but queries read {self.d} "
                f"and keys {self.d_source} numbers a token: look at .qk and .ov"
            )
        full = self.repeat_kv()
        return torch.stack((full.q, full.k, full.v), dim=-1)

    def head_map(self, head: int) -> HeadMap:
        """(x_q, x_k, x_v) ↦ (x_qᵀ B x_k) · M x_v of one head, kept factored."""
        index = self._index(head)
        return HeadMap(self.qk[index], self.ov[index])


@dataclass(frozen=True, eq=False)
class HeadMap:
    """The three-input tensor B ⊗ M of a head: (x_q, x_k, x_v) ↦ (x_qᵀ B x_k) · M x_v.

    `qk` and `ov` are stacks of one slice. Modes: query [d], key [d_source], value [d_source],
    output [d_out]. Gauge invariant.
    """

    qk: LowRankStack
    ov: LowRankStack

    def __call__(self, x_q: Tensor, x_k: Tensor, x_v: Tensor) -> Tensor:
        """x_q [..., d], x_k and x_v [..., d_source]: [..., d_out]."""
        return self.qk.bilinear(x_q, x_k) * self.ov.matvec(x_v)[..., 0, :]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(d, d_source, d_source, d_out)."""
        return self.qk.shape[1], self.qk.shape[2], self.ov.shape[2], self.ov.shape[1]

    def multilinear_rank(self, tolerance: float | None = None) -> tuple[int, int, int, int]:
        """Ranks of the four unfoldings, (rank B, rank B, rank M, rank M); 0 all if B or M is 0.

        >>> one = LowRankStack(torch.ones(1, 2, 3), torch.ones(1, 2, 3))
        >>> HeadMap(one, one).multilinear_rank()
        (1, 1, 1, 1)
        """
        b = self.qk.multilinear_rank(tolerance)[1]
        m = self.ov.multilinear_rank(tolerance)[1]
        return (b, b, m, m) if b and m else (0, 0, 0, 0)

    def norm(self) -> float:
        """‖B‖·‖M‖ (Frobenius), in float64."""
        return float(self.qk.frobenius_norms()[0] * self.ov.frobenius_norms()[0])

    def dense(self) -> Tensor:
        """The tensor [d, d_source, d_source, d_out], multiplied out: for small cases."""
        return torch.einsum("ab,dc->abcd", self.qk.dense()[0], self.ov.dense()[0])
