"""Cheap sweeps of a Tucker fit of a factored stack: one power step for each mode.

Axes. Slices A_i = l_iᵀ r_i [m, n] with l [·, inner, m], r [·, inner, n]; factors U_0 [h, r_0],
U_1 [m, r_1], U_2 [n, r_2] with orthonormal columns; core [r_0, r_1, r_2].

A power step for mode 1 takes U_1 to an orthonormal basis of (y yᵀ - s) U_1, with y the tensor
contracted with U_0 and U_2. Neither y nor y yᵀ is formed: yᵀ U_1 is the core, and
y yᵀ U_1 = Σ_i l_iᵀ (r_i U_2) D_i with D_i = Σ_a U_0[i, a] core_aᵀ, one product as wide as U_1.
For r_1 = r_2 = m/6 a sweep is a quarter of the work of one of `StackTarget.sweep`, which looks for
the best subspace within a larger space: more of them are needed, in less time.

Two examples. Where y has rank r_1, one step from almost any start is exact. With eigenvalues of
y yᵀ of 1 inside the subspace and ½ outside, a step without shift halves the angle between both,
one with s = ½ makes it vanish.

The shift s is half the smallest Ritz value of the subspace: for eigenvalues outside below it a step
is as good as two without. Steps do not shrink ‖core‖ but for rounding where s = 0; with the shift
they may, by a little, far from a fixed point.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from levelhead.tensors.multilinear import mode_product, squared_norm
from levelhead.tensors.subspaces import leading_subspace

__all__ = ["PowerSweeps"]

_SHIFT = 0.5


class PowerSweeps:
    """Sweeps from `factors`, which are replaced in place.

    left [a, inner, m] and right [b, inner, n] hold blocks that slices may share: slice i is
    left[left_of[i]]ᵀ right[right_of[i]].
    """

    def __init__(
        self,
        left: Tensor,
        right: Tensor,
        left_of: Sequence[int],
        right_of: Sequence[int],
        factors: list[Tensor],
    ) -> None:
        self.factors = factors
        self._blocks = left, right
        self._of = tuple(torch.tensor(list(of), device=left.device) for of in (left_of, right_of))
        self._seen = [left @ factors[1], right @ factors[2]]

    def __call__(self) -> float:
        """One sweep over heads, m and n; the squared norm of the core afterwards."""
        factors = self.factors
        factors[0] = leading_subspace(self._slices(), factors[0].shape[1], 0)
        for side in (0, 1):
            core = mode_product(self._slices(), factors[0].mT, 0)
            factors[1 + side] = self._step(side, core if side == 0 else core.mT)
            self._seen[side] = self._blocks[side] @ factors[1 + side]
        return float(squared_norm(mode_product(self._slices(), factors[0].mT, 0)))

    def _slices(self) -> Tensor:
        """The h slices between U_1 and U_2: [h, r_1, r_2]."""
        return self._seen[0][self._of[0]].mT @ self._seen[1][self._of[1]]

    def _step(self, side: int, core: Tensor) -> Tensor:
        """The next U of `side` from the core [r_0, r_side, r_other]."""
        old, blocks = self.factors[1 + side], self._blocks[side]
        spread = mode_product(core.mT, self.factors[0], 0)
        rows = self._seen[1 - side][self._of[1 - side]] @ spread
        gathered = rows.new_zeros(len(blocks), *rows.shape[1:]).index_add(0, self._of[side], rows)
        image = blocks.flatten(0, 1).mT @ gathered.flatten(0, 1)
        wide = core.movedim(1, 0).flatten(1)
        least = torch.linalg.eigvalsh(wide @ wide.mT)[0].clamp_min(0)
        basis: Tensor = torch.linalg.qr(image - _SHIFT * least * old).Q
        return basis
