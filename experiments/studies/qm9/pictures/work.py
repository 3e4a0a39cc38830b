"""A few test molecules with the uncertainty of each of their atoms: the numbers of a figure.

`chosen` says which molecules, by their bars alone; `shown` collects what the figure draws.
"""

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


def chosen(std: Tensor, each: int = EACH) -> dict[str, Tensor]:
    """Places of the molecules with the smallest, the median and the largest bars.

    Args:
        std: Bars of the test molecules, (N,).
        each: How many molecules of each.

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
        uq: Error bars that were fitted and calibrated, on descriptors.
        test: Descriptors of N test molecules.
        structures: Elements and positions of the same molecules.
        std: Their bars, (N,).
        errors: Their errors, prediction less target, (N,).
        each: Molecules of each of smallest, median and largest bars.

    Returns:
        Of each molecule "which", "formula", "error" and "bar", and in "points", of its atoms,
        "numbers", "positions", "local" (their standard deviations) and "bonds" (pairs of places).
    """
    molecules = []
    for which, places in chosen(std, each).items():
        for place in places.tolist():
            row = torch.tensor([place])
            molecule = structures.picked(row)
            (atoms,) = molecule.as_ase()
            molecules.append(
                {
                    "which": which,
                    "formula": atoms.get_chemical_formula("hill"),
                    "error": float(errors[place]),
                    "bar": float(std[place]),
                    "points": {
                        "numbers": molecule.numbers,
                        "positions": molecule.positions,
                        "local": of_atoms(uq, test.picked(row)),
                        "bonds": novelty.bonds(molecule),
                    },
                }
            )
    return molecules


def of_atoms(uq: rg.LastLayerRigidity, molecules: Environments) -> Tensor:
    """Standard deviations of the atoms' energies, (A,), in the order of the molecules' atoms."""
    rows = torch.arange(len(molecules))
    # The terms come as the readouts saw them, one species after another: `atoms` tells which.
    atoms, _, _ = arranged(molecules.counts, molecules.species, rows, molecules.kinds)
    terms = uq.local([molecules.batch(rows)])
    std = torch.empty(len(atoms), dtype=torch.float64)
    std[atoms] = terms.std[:, 0].detach().cpu().double()
    return std
