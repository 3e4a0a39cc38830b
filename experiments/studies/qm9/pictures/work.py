"""A few test molecules with the uncertainty of each of their atoms: the numbers of a figure."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rigidities as rg
from experiments.atoms.batches import Environments, arranged
from experiments.atoms.structures import Structures
from experiments.studies.qm9.novelty import work as novelty

EACH = 2
"""Molecules of each of smallest, median and largest bars."""

WHICH = ("smallest", "median", "largest")


def chosen(std: Tensor, each: int = EACH) -> dict[str, Tensor]:
    """Places of the molecules with the smallest, the median and the largest bars.

    Args:
        std: (N,) bars of the test molecules.
        each: how many of each.

    Examples:
        >>> chosen(torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0]), 1)
        {'smallest': tensor([1]), 'median': tensor([4]), 'largest': tensor([0])}
    """
    order = std.argsort(stable=True)
    middle = (len(order) - each) // 2
    return {
        "smallest": order[:each],
        "median": order[middle : middle + each],
        "largest": order[len(order) - each :].flip(0),
    }


def shown(
    uq: rg.LastLayerRigidity,
    test: Environments,
    structures: Structures,
    std: Tensor,
    errors: Tensor,
    *,
    each: int = EACH,
) -> list[dict[str, Any]]:
    """The numbers of the figure, smallest bars first; energies in kcal/mol.

    Args:
        uq: fitted and calibrated, on descriptors.
        test: those of N test molecules.
        structures: the same molecules.
        std: (N,) their bars.
        errors: (N,) their errors, prediction less target.
        each: molecules of each of smallest, median and largest bars.

    Returns:
        Of each molecule "which", "formula", "error" and "bar", and in "points", of its atoms,
        "numbers", "positions", "local" (their standard deviations) and "bonds" (pairs of places).
    """
    found = []
    for which, places in chosen(std, each).items():
        for place in places.tolist():
            row = torch.tensor([place])
            own = structures.picked(row)
            (frame,) = own.as_ase()
            found.append(
                {
                    "which": which,
                    "formula": frame.get_chemical_formula("hill"),
                    "error": float(errors[place]),
                    "bar": float(std[place]),
                    "points": {
                        "numbers": own.numbers,
                        "positions": own.positions,
                        "local": of_atoms(uq, test.picked(row)),
                        "bonds": novelty.bonds(own),
                    },
                }
            )
    return found


def of_atoms(uq: rg.LastLayerRigidity, molecules: Environments) -> Tensor:
    """Standard deviations of the atoms' energies, (A,), in the order of the molecules' atoms.

    The terms come as the readouts saw them: one species after another.
    """
    every = torch.arange(len(molecules))
    atoms, _, _ = arranged(molecules.counts, molecules.species, every, molecules.kinds)
    terms = uq.local([molecules.batch(every)], progress=False)
    found = torch.empty(len(atoms), dtype=torch.float64)
    found[atoms] = terms.std[:, 0].detach().cpu().double()
    return found
