r"""What is new about a molecule: its rings and elements, and how rare they are in the training set.

Everything is read off elements and positions. Two atoms are bonded where they are nearer than
`REACH` times the sum of their covalent radii. Rings are looked for among the heavy atoms: the
smallest ring through each bond, and their number $b - a + c$ (bonds, atoms, connected components).

`kinds` tells which kinds each molecule is of; `groups` and `by_size` compare errors with bars.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.atoms.structures import Structures, spans

REACH = 1.15
"""So no atom of QM9 has more bonds than it can, and no molecule falls apart. At 1.25 carbon atoms
across small bicyclic rings, up to 1.9 angstrom apart, would be bonded too."""

TRIPLE = 1.235
"""Angstrom: carbon is nearer to carbon or nitrogen in a triple bond only."""

LARGEST = 8
"""Atoms of the largest ring that is told from larger ones."""

CHUNK = 2048
"""Molecules that are looked at together."""

ELEMENTS = {"N": 7, "O": 8, "F": 9}

Kinds = dict[str, Tensor]
"""(N,) bool of each kind: whether a molecule is of it."""


@dataclass(frozen=True)
class Graphs:
    """Bonds between the heavy atoms of N molecules, padded to the largest of them.

    Attributes:
        bonds: Whether two heavy atoms are bonded, (N, W, W) bool, symmetric.
        heavy: Heavy atoms of each molecule, (N,).
        triple: Whether a carbon atom has a triple bond, (N,) bool.
        crowded: Whether a nitrogen atom has four neighbours, the cation of a zwitterion, (N,) bool.
    """

    bonds: Tensor
    heavy: Tensor
    triple: Tensor
    crowded: Tensor


def kinds(structures: Structures) -> Kinds:
    """Which kinds each molecule is of; the names are those that a table shows."""
    chunks = [_kinds(chunk) for chunk in _chunks(structures)]
    return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}


def rarity(kinds_train: Kinds) -> dict[str, float]:
    """The share of each kind among the training molecules."""
    return {name: float(mask.double().mean()) for name, mask in kinds_train.items()}


def groups(
    kinds_train: Kinds, kinds_test: Kinds, errors: Tensor, std: Tensor
) -> list[dict[str, Any]]:
    """Errors and bars of the test molecules of each kind, the rarest kind first.

    Args:
        kinds_train: Kinds of the training molecules.
        kinds_test: Kinds of the N test molecules.
        errors: Errors of the test molecules, (N,).
        std: Their bars, (N,).

    Returns:
        Of each kind that the test molecules have: "kind"; "share", in training; "molecules", in
        the test; "rmse"; "bar", root mean square; "ratio" of the two.
    """
    share = rarity(kinds_train)
    names = [name for name in kinds_test if bool(kinds_test[name].any())]
    rarest_first = sorted(names, key=lambda name: share[name])
    return [
        {"kind": name, "share": share[name], **_compared(kinds_test[name], errors, std)}
        for name in rarest_first
    ]


def by_size(structures: Structures, errors: Tensor, std: Tensor) -> dict[str, list[dict[str, Any]]]:
    """The same by the number of "atoms" and of "heavy" atoms of the test molecules."""
    heavy = torch.zeros_like(structures.counts)
    heavy.index_add_(0, structures.owners, (structures.numbers > 1).long())

    def by_count(counts: Tensor) -> list[dict[str, Any]]:
        return [
            {"size": size, **_compared(counts == size, errors, std)}
            for size in counts.unique().tolist()
        ]

    return {"atoms": by_count(structures.counts), "heavy": by_count(heavy)}


def _compared(mask: Tensor, errors: Tensor, std: Tensor) -> dict[str, Any]:
    """Errors and bars of some molecules, root mean squares and their ratio."""
    rmse = float(errors[mask].double().square().mean().sqrt())
    bar = float(std[mask].double().square().mean().sqrt())
    return {"molecules": int(mask.sum()), "rmse": rmse, "bar": bar, "ratio": rmse / bar}


def _chunks(structures: Structures) -> Iterator[Structures]:
    for rows in torch.arange(len(structures)).split(CHUNK):
        yield structures.picked(rows)


def _kinds(structures: Structures) -> Kinds:
    """The kinds of a few molecules."""
    graph = graphs(structures)
    ring_sizes = smallest_rings(graph.bonds)  # (N, W, W)
    ring_count = rings(graph.bonds, graph.heavy)  # (N,)
    in_ring = ring_sizes > 0
    fused_count = rings_of_each_part(in_ring).amax(1)  # of the largest ring system, (N,)
    contains = {symbol: _contains(structures, number) for symbol, number in ELEMENTS.items()}

    kinds_of_molecules = {
        "no ring": ring_count == 0,
        "one ring": ring_count == 1,
        "two rings": ring_count == 2,
        "three rings or more": ring_count > 2,
    }
    for size in range(3, LARGEST + 1):
        kinds_of_molecules[f"{size}-ring"] = (ring_sizes == size).flatten(1).any(1)
    kinds_of_molecules["larger ring"] = (ring_sizes > LARGEST).flatten(1).any(1)
    kinds_of_molecules["two rings that share atoms"] = fused_count == 2
    kinds_of_molecules["three or more rings that share atoms"] = fused_count > 2
    kinds_of_molecules["triple bond"] = graph.triple
    kinds_of_molecules["zwitterion (N with four bonds)"] = graph.crowded
    kinds_of_molecules["only C and H"] = ~(contains["N"] | contains["O"] | contains["F"])
    for symbol, mask in contains.items():
        kinds_of_molecules[f"contains {symbol}"] = mask
    return kinds_of_molecules


def _contains(structures: Structures, number: int) -> Tensor:
    """Whether each molecule has an atom of this number, (N,) bool."""
    mask = torch.zeros(len(structures), dtype=torch.bool)
    mask[structures.owners[structures.numbers == number]] = True
    return mask


# --- bonds and rings -----------------------------------------------------------------------------


def graphs(structures: Structures) -> Graphs:
    """The bonds of some molecules.

    Examples:
        >>> ethene = Structures(
        ...     torch.tensor([6, 6]), torch.tensor([[0.0, 0, 0], [1.33, 0, 0]]), torch.tensor([2])
        ... )
        >>> graphs(ethene).bonds.int().tolist(), graphs(ethene).heavy.tolist()
        ([[[0, 1], [1, 0]]], [2])
    """
    bonded, numbers = _bonded(structures)
    is_close = bonded & (_distances(structures) < TRIPLE)
    is_carbon = numbers == 6
    is_nitrogen = numbers == 7
    triple = is_close & is_carbon[:, :, None] & (is_carbon | is_nitrogen)[:, None, :]
    crowded = is_nitrogen & (bonded.sum(2) >= 4)

    # Heavy atoms come to the front, and as many places are kept as the largest molecule needs.
    is_heavy = numbers > 1
    order = is_heavy.long().argsort(dim=1, descending=True, stable=True)
    width = max(1, int(is_heavy.sum(1).max()))
    order = order[:, :width]
    rows = torch.arange(len(structures))[:, None, None]
    bonds = bonded[rows, order[:, :, None], order[:, None, :]]
    is_heavy_in_order = is_heavy.gather(1, order)
    return Graphs(
        bonds=bonds & is_heavy_in_order[:, :, None] & is_heavy_in_order[:, None, :],
        heavy=is_heavy.sum(1),
        triple=triple.flatten(1).any(1),
        crowded=crowded.any(1),
    )


def bonds(structure: Structures) -> Tensor:
    """The bonds of one molecule as pairs of its atoms, (B, 2), hydrogens included."""
    bonded, _ = _bonded(structure)
    return bonded[0].triu().nonzero()


def _bonded(structures: Structures) -> tuple[Tensor, Tensor]:
    """Which atoms are bonded, (N, W, W) bool, and atomic numbers (N, W), 0 where there is none."""
    from ase.data import covalent_radii

    numbers = _padded(structures, structures.numbers, 0)
    radii = torch.as_tensor(covalent_radii)[numbers]
    bonded = _distances(structures) < REACH * (radii[:, :, None] + radii[:, None, :])
    is_atom = numbers > 0
    bonded &= is_atom[:, :, None] & is_atom[:, None, :]
    bonded.diagonal(dim1=1, dim2=2).fill_(False)
    return bonded, numbers


def _distances(structures: Structures) -> Tensor:
    """Distances between all atoms of a molecule, padded, (N, W, W)."""
    positions = _padded(structures, structures.positions, 0.0)
    return torch.cdist(positions, positions, compute_mode="donot_use_mm_for_euclid_dist")


def _padded(structures: Structures, values: Tensor, fill: float) -> Tensor:
    """Values of all atoms, (A, ...), as a table with a row for each molecule, (N, W, ...)."""
    counts = structures.counts
    table = values.new_full((len(counts), int(counts.max()), *values.shape[1:]), fill)
    table[structures.owners, spans(torch.zeros_like(counts), counts)] = values
    return table


def smallest_rings(bonds: Tensor) -> Tensor:
    """The atoms of the smallest ring through each bond, (N, W, W); 0 where there is none.

    A ring through the bond i-j is a path from i to j without it.

    Examples:
        >>> triangle = ~torch.eye(3, dtype=torch.bool)[None]
        >>> smallest_rings(triangle).unique().tolist()
        [0, 3]
    """
    width = bonds.shape[1]
    sizes = torch.zeros(bonds.shape, dtype=torch.long)
    for i in range(width):
        for j in range(i):
            rows = bonds[:, i, j].nonzero()[:, 0]
            if len(rows):
                path = _path(bonds[rows], i, j)
                sizes[rows, i, j] = path
                sizes[rows, j, i] = path
    return sizes


def _path(bonds: Tensor, i: int, j: int) -> Tensor:
    """Atoms of the shortest path from i to j that is not the bond itself; 0 where none is."""
    bonds = bonds.float()
    bonds[:, i, j] = bonds[:, j, i] = 0
    reached = torch.zeros(bonds.shape[:2])
    reached[:, i] = 1
    size = torch.zeros(len(bonds), dtype=torch.long)
    for steps in range(1, bonds.shape[1]):
        reached = ((reached[:, None, :] @ bonds)[:, 0] + reached).clamp(max=1)
        size[(reached[:, j] > 0) & (size == 0)] = steps + 1
    return size


def rings(bonds: Tensor, heavy: Tensor) -> Tensor:
    """How many independent rings there are, (N,): bonds less atoms plus connected components."""
    padding = bonds.shape[1] - heavy  # each place of padding is a component of one atom
    components = (_components(bonds) == torch.arange(bonds.shape[1])).sum(1) - padding
    return bonds.sum((1, 2)) // 2 - heavy + components


def rings_of_each_part(inside: Tensor) -> Tensor:
    """Rings of each connected component of the bonds that lie in rings, (N, W), by its first atom.

    Components that share an atom are one: fused, bridged and spiro rings count together.
    """
    component = _components(inside)
    zeros = torch.zeros(component.shape, dtype=torch.long)
    atoms = zeros.scatter_add(1, component, torch.ones_like(component))
    bond_ends = zeros.scatter_add(1, component, inside.sum(2))
    # Bonds less atoms plus one; nothing where no component begins.
    return bond_ends // 2 - atoms + (atoms > 0).long()


def _components(bonds: Tensor) -> Tensor:
    """The first atom of each atom's connected component, (N, W)."""
    width = bonds.shape[1]
    label = torch.arange(width).expand(len(bonds), width)
    joined = bonds | torch.eye(width, dtype=torch.bool)
    for _ in range(width - 1):
        label = label[:, None, :].expand_as(joined).masked_fill(~joined, width).amin(2)
    return label
