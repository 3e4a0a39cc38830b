r"""The strain of a periodic structure, as one more input to differentiate with respect to.

A symmetric strain $\varepsilon$ moves positions, cell and shifts of neighbours alike,
$r \mapsto r (1 + \varepsilon)$. In Voigt's form, $e = (\varepsilon_{xx}, \varepsilon_{yy},
\varepsilon_{zz}, 2 \varepsilon_{yz}, 2 \varepsilon_{xz}, 2 \varepsilon_{xy})$, ASE's stress is
$\partial E / \partial e / V$.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..data.batches import Batch
from ..data.slots import Slot

VOIGT_OF_MATRIX = [0, 5, 4, 5, 1, 3, 4, 3, 2]
"""For each entry of the 3 x 3 matrix, row by row, its number among Voigt's six components."""


@dataclass(frozen=True)
class StrainedPositions(Slot):
    """Positions (n, 3) of one structure, followed by the strain in two more rows: (n + 2, 3).

    Attributes:
        others: Slots of the inputs that move with the positions: cell, shift vectors.
    """

    others: tuple[Slot, ...] = ()

    def get(self, batch: Batch) -> Tensor:
        """The positions, and a strain of zero."""
        positions = super().get(batch).reshape(-1, 3)
        return torch.cat([positions, positions.new_zeros(2, 3)])

    def put(self, batch: Batch, tensor: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's inputs for other positions and a strain.

        Args:
            batch: The structure.
            tensor: Positions and strain, (n + 2, 3).
        """
        # Voigt's shear components are twice those of the matrix.
        halves = tensor.new_tensor([1.0, 1.0, 1.0, 0.5, 0.5, 0.5])
        strain = (tensor[-2:].reshape(6) * halves)[VOIGT_OF_MATRIX].reshape(3, 3)
        positions_slot = Slot(self.key, self.whole)
        positions = tensor[:-2].reshape(positions_slot.get(batch).shape)
        # A dict by slot, so that an input that is named twice is strained once.
        vectors = {positions_slot: positions}
        for slot in self.others:
            vectors[slot] = slot.get(batch)
        for slot, unstrained in vectors.items():
            strained = unstrained + unstrained @ strain.to(unstrained.dtype)
            args, kwargs = slot.put(batch, strained)
            batch = replace(batch, args=args, kwargs=kwargs)
        return batch.args, batch.kwargs
