r"""What is new about a molecule: its rings and elements, and how rare they are in the training set.

Everything is read off elements and positions. Two atoms are bonded where they are nearer than
`REACH` times the sum of their covalent radii. Rings are looked for among the heavy atoms: the
smallest ring through each bond, and their number $b - a + c$ (bonds, atoms, connected parts).
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
        bonds: (N, W, W) bool, symmetric.
        heavy: (N,) heavy atoms of each.
        triple: (N,) bool: carbon with a triple bond.
        crowded: (N,) bool: nitrogen with four neighbours, the cation of a zwitterion.
    """

    bonds: Tensor
    heavy: Tensor
    triple: Tensor
    crowded: Tensor


def kinds(structures: Structures) -> Kinds:
    """Which kinds each molecule is of; the names are those that a table shows."""
    parts = [_kinds(part) for part in _chunks(structures)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def rarity(kinds_train: Kinds) -> dict[str, float]:
    """The share of each kind among the training molecules."""
    return {name: float(mask.double().mean()) for name, mask in kinds_train.items()}


def groups(
    kinds_train: Kinds, kinds_test: Kinds, errors: Tensor, std: Tensor
) -> list[dict[str, Any]]:
    """Errors and bars of the test molecules of each kind, the rarest kind first.

    Args:
        kinds_train: of the training molecules.
        kinds_test: of the N test molecules.
        errors: (N,).
        std: (N,) their bars.

    Returns:
        Of each kind that the test molecules have: "kind"; "share", in training; "molecules", in
        the test; "rmse"; "bar", root mean square; "ratio" of the two.
    """
    share = rarity(kinds_train)
    names = [name for name in kinds_test if bool(kinds_test[name].any())]
    return [
        {"kind": name, "share": share[name], **_compared(kinds_test[name], errors, std)}
        for name in sorted(names, key=share.__getitem__)
    ]


def by_size(structures: Structures, errors: Tensor, std: Tensor) -> dict[str, list[dict[str, Any]]]:
    """The same by the number of "atoms" and of "heavy" atoms of the test molecules."""
    heavy = torch.zeros_like(structures.counts)
    heavy.index_add_(0, structures.owners, (structures.numbers > 1).long())
    sizes = {"atoms": structures.counts, "heavy": heavy}
    return {
        name: [
            {"size": size, **_compared(counts == size, errors, std)}
            for size in counts.unique().tolist()
        ]
        for name, counts in sizes.items()
    }


def _compared(mask: Tensor, errors: Tensor, std: Tensor) -> dict[str, Any]:
    rmse, bar = (float(part[mask].double().square().mean().sqrt()) for part in (errors, std))
    return {"molecules": int(mask.sum()), "rmse": rmse, "bar": bar, "ratio": rmse / bar}


def _chunks(structures: Structures) -> Iterator[Structures]:
    for rows in torch.arange(len(structures)).split(CHUNK):
        yield structures.picked(rows)


def _kinds(structures: Structures) -> Kinds:
    graph = graphs(structures)
    sizes = smallest_rings(graph.bonds)
    found = rings(graph.bonds, graph.heavy)
    inside = sizes > 0
    together = rings_of_each_part(inside).amax(1)
    has = {
        symbol: torch.zeros(len(structures), dtype=torch.bool).index_put_(
            (structures.owners[structures.numbers == number],), torch.tensor(True)
        )
        for symbol, number in ELEMENTS.items()
    }
    return {
        "no ring": found == 0,
        "one ring": found == 1,
        "two rings": found == 2,
        "three rings or more": found > 2,
        **{f"{size}-ring": (sizes == size).flatten(1).any(1) for size in range(3, LARGEST + 1)},
        "larger ring": (sizes > LARGEST).flatten(1).any(1),
        "two rings that share atoms": together == 2,
        "three or more rings that share atoms": together > 2,
        "triple bond": graph.triple,
        "zwitterion (N with four bonds)": graph.crowded,
        "only C and H": ~(has["N"] | has["O"] | has["F"]),
        **{f"contains {symbol}": mask for symbol, mask in has.items()},
    }


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
    near, numbers = _bonded(structures)
    close = near & (_distances(structures) < TRIPLE)
    carbon, nitrogen = numbers == 6, numbers == 7
    triple = close & carbon[:, :, None] & (carbon | nitrogen)[:, None, :]
    crowded = nitrogen & (near.sum(2) >= 4)
    heavy = numbers > 1
    first = heavy.long().argsort(dim=1, descending=True, stable=True)  # heavy atoms to the front
    width = max(1, int(heavy.sum(1).max()))
    first = first[:, :width]
    rows = torch.arange(len(structures))[:, None, None]
    bonds = near[rows, first[:, :, None], first[:, None, :]]
    kept = heavy.gather(1, first)
    return Graphs(
        bonds & kept[:, :, None] & kept[:, None, :],
        heavy.sum(1),
        triple.flatten(1).any(1),
        crowded.any(1),
    )


def bonds(structure: Structures) -> Tensor:
    """The bonds of one molecule as pairs of its atoms, (B, 2), hydrogens included."""
    near, _ = _bonded(structure)
    return near[0].triu().nonzero()


def _bonded(structures: Structures) -> tuple[Tensor, Tensor]:
    """(N, W, W) bool for all atoms, and their padded atomic numbers (N, W), 0 where none is."""
    from ase.data import covalent_radii

    numbers = _padded(structures, structures.numbers, 0)
    radii = torch.as_tensor(covalent_radii)[numbers]
    near = _distances(structures) < REACH * (radii[:, :, None] + radii[:, None, :])
    there = numbers > 0
    near &= there[:, :, None] & there[:, None, :]
    near.diagonal(dim1=1, dim2=2).fill_(False)
    return near, numbers


def _distances(structures: Structures) -> Tensor:
    positions = _padded(structures, structures.positions, 0.0)
    return torch.cdist(positions, positions, compute_mode="donot_use_mm_for_euclid_dist")


def _padded(structures: Structures, values: Tensor, fill: float) -> Tensor:
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
    found = torch.zeros(bonds.shape, dtype=torch.long)
    for i in range(width):
        for j in range(i):
            rows = bonds[:, i, j].nonzero()[:, 0]
            if len(rows):
                size = _path(bonds[rows], i, j)
                found[rows, i, j] = found[rows, j, i] = size
    return found


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
    """How many independent rings there are, (N,): bonds less atoms plus connected parts."""
    empty = bonds.shape[1] - heavy  # padding: parts of one atom each
    parts = (_parts(bonds) == torch.arange(bonds.shape[1])).sum(1) - empty
    return bonds.sum((1, 2)) // 2 - heavy + parts


def rings_of_each_part(inside: Tensor) -> Tensor:
    """Rings of each connected part of the bonds that lie in rings, (N, W), by its first atom.

    Parts that share an atom are one: fused, bridged and spiro rings count together.
    """
    part = _parts(inside)
    shape, one = part.shape, torch.ones(part.shape, dtype=torch.long)
    atoms = torch.zeros(shape, dtype=torch.long).scatter_add(1, part, one)
    ends = torch.zeros(shape, dtype=torch.long).scatter_add(1, part, inside.sum(2))
    return ends // 2 - atoms + (atoms > 0).long()


def _parts(bonds: Tensor) -> Tensor:
    """The first atom of each atom's connected part, (N, W)."""
    width = bonds.shape[1]
    label = torch.arange(width).expand(len(bonds), width)
    joined = bonds | torch.eye(width, dtype=torch.bool)
    for _ in range(width - 1):
        label = label[:, None, :].expand_as(joined).masked_fill(~joined, width).amin(2)
    return label
