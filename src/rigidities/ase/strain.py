r"""The strain of a periodic structure, as one more input to differentiate by.

A symmetric strain $\varepsilon$ moves positions, cell and shifts of neighbours alike,
$r \mapsto r (1 + \varepsilon)$. With $e = (\varepsilon_{xx}, \varepsilon_{yy}, \varepsilon_{zz},
2 \varepsilon_{yz}, 2 \varepsilon_{xz}, 2 \varepsilon_{xy})$ the stress is $\partial E / \partial e
/ V$ in ASE's order and sign.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..data.batches import Batch
from ..data.slots import Caller, InputName, Slot

VOIGT = (0, 5, 4, 5, 1, 3, 4, 3, 2)
"""Which of the six numbers stands where in the matrix, row by row."""


@dataclass(frozen=True)
class StrainedPositions:
    """Positions (n, 3) of one structure and six numbers of strain, zero, below: (n + 2, 3).

    Attributes:
        positions: where the batch holds them.
        others: where it holds what moves with them: cell, shift vectors.
    """

    positions: Slot
    others: tuple[Slot, ...]

    @classmethod
    def find(
        cls, batch: Batch, wrt: InputName, others: Iterable[InputName], tap: Caller
    ) -> StrainedPositions:
        """By the names of positions and others."""
        moved = tuple(Slot.find(batch, name, tap) for name in others)
        return cls(Slot.find(batch, wrt, tap), moved)

    def get(self, batch: Batch) -> Tensor:
        """Positions and no strain."""
        positions = self.positions.get(batch).reshape(-1, 3)
        return torch.cat([positions, positions.new_zeros(2, 3)])

    def put(self, batch: Batch, tensor: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's inputs, with other positions, strained."""
        halves = tensor.new_tensor([1.0, 1.0, 1.0, 0.5, 0.5, 0.5])
        strain = (tensor[-2:].reshape(6) * halves)[list(VOIGT)].reshape(3, 3)
        positions = tensor[:-2].reshape(self.positions.get(batch).shape)
        values = [positions, *(slot.get(batch) for slot in self.others)]
        for slot, value in zip((self.positions, *self.others), values, strict=True):
            args, kwargs = slot.put(batch, value + value @ strain.to(value.dtype))
            batch = replace(batch, args=args, kwargs=kwargs)
        return batch.args, batch.kwargs
