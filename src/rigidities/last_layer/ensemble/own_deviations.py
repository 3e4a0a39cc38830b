r"""What each prediction of a member has of its own: numbers that a hash of its row fixes.

Where the posterior has a part that rows do not share (see `joint`), member n moves at row x by
$f(x) \cdot \delta_n + S_x z_n(x)$. Here $z_n(x) \sim N(0, I)$ hangs on the member's key and the
row's hash alone, so that it is the same in every call, batch and order. To autograd it is a
constant: its derivative is zero. Pairs have opposite numbers, recentred sets lose their mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...data.batches import Batch
from ...data.sketch import hashed_normals
from ...posterior.joint import JointPosterior, OwnPart
from ..readout.reading import Reading

PAIRED = ("antithetic", "symmetric")


class OwnDeviations(NamedTuple):
    """Of a set of members: the two tensors of `OwnPart`, and keys (n, K), of pairs (n / 2, K)."""

    whitening: Tensor
    mixing: Tensor
    keys: Tensor

    @classmethod
    def drawn(
        cls, joint: JointPosterior, n: int, generator: torch.Generator | None
    ) -> OwnDeviations | None:
        """Keys for n members (or pairs); None where predictions share everything."""
        if joint.own is None:
            return None
        device = joint.root.device if generator is None else generator.device
        seeds = torch.randint(1 << 62, (n, joint.targets), device=device, generator=generator)
        return cls(*joint.own, seeds.to(joint.root.device))

    def fits(self, deviations: Tensor) -> bool:
        """Whether it may belong to members of such deviations (n, K, D)."""
        (_, targets, width), kinds = deviations.shape, [tensor.dtype for tensor in self]
        sizes = (self.whitening.shape[-1], len(self.mixing), *self.keys.shape[1:])
        return sizes == (width, targets, targets) and kinds == [torch.float64] * 2 + [torch.int64]

    def __call__(self, reading: Reading, batch: Batch, drawing: str) -> Tensor:
        """(members, M, K) in float64, for the rows of a batch."""
        part = OwnPart(self.whitening, self.mixing)
        sizes, rows = part.sizes(reading.features), reading.identities(batch)
        z = hashed_normals(rows[:, None], self.keys[:, None, : part.coordinates(sizes)])
        if drawing == "recentred":
            z = z - z.mean(0)
        if drawing == "symmetric":
            z = z.sign()
        return part.moved(sizes, torch.cat([z, -z]) if drawing in PAIRED else z)
