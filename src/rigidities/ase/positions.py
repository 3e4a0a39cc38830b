"""The input that holds the positions: whether it does, and the energy's derivative by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ase import Atoms

from ..data.batches import Batch
from ..data.slots import InputName, Slot
from ..last_layer import LastLayerRigidity
from ..last_layer.gradients.feature_map import UNCONNECTED
from ..models.modes import outside_inference_mode
from .structures import periodic_cell

ROUNDING = 16
"""Units in the last place by which positions may differ, of single precision or less."""


def slot_of(uq: LastLayerRigidity, given: Any, wrt: InputName) -> tuple[Batch, Slot]:
    """One structure's inputs as the model gets them, and where the positions stand.

    Raises:
        ValueError: there is no such input.
    """
    (batch,) = uq.feed.unlabelled()([given], "forces", progress=False)
    return batch, Slot.find(batch, wrt, uq.readout)


def check_positions(batch: Batch, slot: Slot, atoms: Atoms, length_unit: float) -> None:
    """Forces are derivatives by positions: compare the input with those of the structure.

    It may be shifted as a whole and by vectors of the cell, which changes no derivative. Inputs
    that are not shaped (n, 3) or (1, n, 3) are not looked at.

    Args:
        batch: one structure.
        slot: where its positions stand.
        atoms: the structure.
        length_unit: Å per unit of the input.

    Raises:
        ValueError: they differ.
    """
    given = slot.get(batch).detach()
    if given.shape not in ((len(atoms), 3), (1, len(atoms), 3)):
        return
    eps = max(torch.finfo(given.dtype).eps, torch.finfo(torch.float32).eps)
    found = length_unit * given.cpu().double().numpy().reshape(-1, 3)
    shift = found - atoms.positions
    shift -= shift[0]
    cell, periodic = periodic_cell(atoms)
    images = np.round(np.linalg.solve(cell.T, shift.T).T) * periodic
    off = float(np.abs(shift - images @ cell).max())
    if off > ROUNDING * eps * max(1.0, float(np.abs(atoms.positions).max())):
        raise ValueError(
            f"The input {slot.key!r} is not atoms.positions / length_unit: distances differ by up "
            f"to {off:.3g} Å, and forces would be wrong. Let inputs= give positions and cell in "
            f"the model's unit, with length_unit={length_unit:g} Å per unit, or name the input "
            "that holds the positions with wrt=."
        )


@outside_inference_mode
def slope(uq: LastLayerRigidity, batch: Batch, slot: Slot) -> Tensor:
    """The derivative of the energy by the positions, in one backward pass; no bars.

    Raises:
        ValueError: the energy does not depend on them, as far as autograd knows.
    """
    free = slot.get(batch).detach().clone().requires_grad_()
    args, kwargs = slot.put(batch, free)
    with torch.enable_grad():
        output = uq.readout.graph(*args, **kwargs).output
        found = None
        if output.requires_grad:
            (found,) = torch.autograd.grad(output.sum(), free, allow_unused=True)
    if found is None:
        raise ValueError(UNCONNECTED)
    return found
