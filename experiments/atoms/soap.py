r"""SOAP: the density of neighbours around an atom, expanded by featomic.

Each neighbour j of species b becomes a Gaussian; the density of a species is expanded in radial
functions n and spherical harmonics l, m:

$$ c^{b}_{nlm}(i) = \sum_{j \in b,\, r_{ij} < r_c} \int R_n(r)\, Y_{lm}(\hat r)\,
g(\mathbf r - \mathbf r_{ij})\, d\mathbf r $$

The power spectrum (see `spectrum`) is a quadratic form of these numbers, three times as many, so
the expansion is what is kept.

Reference: A. Bartok, R. Kondor, G. Csanyi, "On representing chemical environments" (2013).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from experiments.atoms.structures import (
    EXTRA,
    StructureError,
    Structures,
    check_apart,
    check_known,
)

CHUNK = 1000
"""Structures that featomic expands at once."""


@dataclass(frozen=True)
class Soap:
    """Parameters of the descriptor; lengths in angstrom. The defaults are the paper's.

    Attributes:
        cutoff: radius beyond which neighbours are not seen.
        radial: radial functions (Gaussian-type orbitals).
        angular: the largest l.
        width: of the Gaussian of a neighbour.
        smoothing: width of the shell in which neighbours fade out.
        rate: c in the weight c / (c + (r / r0)^m) of neighbours at the distance r.
        scale: r0 in it.
        exponent: m in it.
    """

    cutoff: float = 5.0
    radial: int = 6
    angular: int = 4
    width: float = 0.3
    smoothing: float = 1.0
    rate: float = 1.0
    scale: float = 2.0
    exponent: float = 7.0

    def parameters(self) -> dict[str, float]:
        """By name."""
        return asdict(self)

    def of_featomic(self) -> dict[str, Any]:
        """As featomic takes them; it counts radial functions from zero."""
        return {
            "cutoff": {
                "radius": self.cutoff,
                "smoothing": {"type": "ShiftedCosine", "width": self.smoothing},
            },
            "density": {
                "type": "Gaussian",
                "width": self.width,
                "center_atom_weight": 0.0,
                "scaling": {
                    "type": "Willatt2018",
                    "rate": self.rate,
                    "scale": self.scale,
                    "exponent": self.exponent,
                },
            },
            "basis": {
                "type": "TensorProduct",
                "max_angular": self.angular,
                "radial": {"type": "Gto", "max_radial": self.radial - 1},
            },
        }


@dataclass(frozen=True)
class Expansion:
    """The expanded densities of many atoms, and how they move with the atoms.

    With C channels (species of the neighbour, then radial function) and M = (angular + 1)^2
    harmonics (l, then m).

    Attributes:
        values: (A, C, M) float64.
        pairs: (2, P) atoms within the cutoff of each other: the centre and its neighbour.
        slopes: (P, 3, radial, M): derivative of the values of the centre, in the channels of the
            neighbour's species, by the position of the neighbour. By that of the centre it is the
            opposite. Both are None where derivatives were not asked for.
    """

    values: Tensor
    pairs: Tensor | None = None
    slopes: Tensor | None = None


def expansion(
    structures: Structures, species: Sequence[int], soap: Soap, *, slopes: bool = False
) -> Expansion:
    """Expand the densities around all atoms.

    Args:
        structures: of which the atoms are.
        species: atomic numbers of the channels, in this order.
        soap: parameters.
        slopes: also the derivatives by the positions.

    Raises:
        StructureError: no structures, an element that is not among the species, atoms on top of
            each other.
        ImportError: featomic is not installed; the message names the extra.
    """
    if not len(structures):
        raise StructureError("There are no structures to describe: give at least one.")
    check_known(structures, species)
    check_apart(structures)
    chunks = torch.arange(len(structures)).split(CHUNK)
    return _joined(
        [_expanded(structures.picked(rows), species, soap, slopes=slopes) for rows in chunks]
    )


def _joined(parts: Sequence[Expansion]) -> Expansion:
    """Those of several chunks, whose pairs are counted from each chunk's first atom."""
    values = torch.cat([part.values for part in parts])
    pairs, slopes, first = [], [], 0
    for part in parts:
        if part.pairs is None or part.slopes is None:
            return Expansion(values)
        pairs.append(part.pairs + first)
        slopes.append(part.slopes)
        first += len(part.values)
    return Expansion(values, torch.cat(pairs, dim=1), torch.cat(slopes))


@cache
def _calculator(soap: Soap) -> Any:
    """To make one takes longer than to expand a few molecules."""
    try:
        from featomic import SphericalExpansion
    except ImportError as error:
        raise ImportError(f"SOAP descriptors need the package featomic: {EXTRA}") from error
    return SphericalExpansion(**soap.of_featomic())


def _expanded(
    structures: Structures, species: Sequence[int], soap: Soap, *, slopes: bool
) -> Expansion:
    """A few structures at once."""
    calculator = _calculator(soap)
    found = calculator.compute(structures.as_ase(), gradients=["positions"] if slopes else [])
    harmonics = (soap.angular + 1) ** 2
    values = torch.zeros(len(structures.numbers), len(species), soap.radial, harmonics).double()
    pairs, kept = [], []
    moving: dict[tuple[int, int], Tensor] = {}
    for key, block in found.items():
        degree, centre, neighbour = (key[k] for k in ("o3_lambda", "center_type", "neighbor_type"))
        if neighbour not in species or not len(block.samples):
            continue
        orders = slice(degree**2, (degree + 1) ** 2)
        atoms = _atoms(block.samples, structures)
        values[atoms, species.index(neighbour), :, orders] = _tensor(block.values).mT
        if not slopes:
            continue
        gradient = block.gradient("positions")
        ends = torch.stack(
            [atoms[_column(gradient.samples, "sample")], _atoms(gradient.samples, structures)]
        )
        apart = ends[0] != ends[1]
        if (centre, neighbour) not in moving:
            pairs.append(ends[:, apart])
            kept.append(torch.zeros(int(apart.sum()), 3, soap.radial, harmonics).double())
            moving[centre, neighbour] = kept[-1]
        moving[centre, neighbour][..., orders] = _tensor(gradient.values)[apart].mT
    values = values.flatten(1, 2)
    if not slopes:
        return Expansion(values)
    none = torch.zeros(2, 0, dtype=torch.long), values.new_zeros(0, 3, soap.radial, harmonics)
    return Expansion(values, torch.cat([none[0], *pairs], dim=1), torch.cat([none[1], *kept]))


def _atoms(samples: Any, structures: Structures) -> Tensor:
    """Places of the samples' atoms among all."""
    return structures.ends[_column(samples, "system")] + _column(samples, "atom")


def _column(samples: Any, name: str) -> Tensor:
    return torch.as_tensor(samples.column(name).copy(), dtype=torch.long)


def _tensor(values: Any) -> Tensor:
    return torch.as_tensor(values)
