r"""SOAP: the density of neighbours around an atom, expanded by featomic.

Each neighbour j of species b becomes a Gaussian; the density of a species is expanded in radial
functions n and spherical harmonics l, m:

$$ c^{b}_{nlm}(i) = \sum_{j \in b,\, r_{ij} < r_c} \int R_n(r)\, Y_{lm}(\hat r)\,
g(\mathbf r - \mathbf r_{ij})\, d\mathbf r $$

The power spectrum (see `spectrum`) is a quadratic form of these numbers, with three times as many
entries. The expansion is therefore what is kept on disk.

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
        cutoff: The radius beyond which neighbours do not count.
        radial: The number of radial functions (Gaussian-type orbitals).
        angular: The largest l.
        width: The width of the Gaussian of a neighbour.
        smoothing: The width of the shell in which neighbours fade out.
        rate: c in the weight c / (c + (r / r0)^m) of neighbours at the distance r.
        scale: r0 in that weight.
        exponent: m in that weight.
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
        """The parameters by name."""
        return asdict(self)

    def of_featomic(self) -> dict[str, Any]:
        """The parameters as featomic takes them; it counts radial functions from zero."""
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

    There are C channels (species of the neighbour, then radial function) and M = (angular + 1)^2
    harmonics (l, then m).

    Attributes:
        values: The densities, (A, C, M) float64.
        pairs: Atoms within the cutoff of each other, the centre and its neighbour, (2, P). None
            without derivatives.
        slopes: Derivatives of the densities of the centre, in the channels of the neighbour's
            species, by the position of the neighbour, (P, 3, radial, M). By the position of the
            centre they are the opposite. None without derivatives.
    """

    values: Tensor
    pairs: Tensor | None = None
    slopes: Tensor | None = None


def expansion(
    structures: Structures, species: Sequence[int], soap: Soap, *, slopes: bool = False
) -> Expansion:
    """Expand the densities around all atoms.

    Args:
        structures: The structures of the atoms.
        species: Atomic numbers of the channels, in this order.
        soap: Parameters of the descriptor.
        slopes: Whether the derivatives by the positions are wanted too.

    Raises:
        StructureError: There are no structures, an element is not among the species, or atoms are
            on top of each other.
        ImportError: featomic is not installed; the message names the extra.
    """
    if not len(structures):
        raise StructureError("There are no structures to describe: give at least one.")
    check_known(structures, species)
    check_apart(structures)
    chunks = [
        _expanded(structures.picked(rows), species, soap, slopes=slopes)
        for rows in torch.arange(len(structures)).split(CHUNK)
    ]
    return _joined(chunks)


def _joined(chunks: Sequence[Expansion]) -> Expansion:
    """The expansions of several chunks as one.

    The pairs of a chunk are counted from its first atom, those of the result from the first of all.
    """
    values = torch.cat([chunk.values for chunk in chunks])
    pairs = []
    slopes = []
    first_atom = 0
    for chunk in chunks:
        if chunk.pairs is None or chunk.slopes is None:
            return Expansion(values)
        pairs.append(chunk.pairs + first_atom)
        slopes.append(chunk.slopes)
        first_atom += len(chunk.values)
    return Expansion(values, torch.cat(pairs, dim=1), torch.cat(slopes))


@cache
def _calculator(soap: Soap) -> Any:
    """featomic's calculator. Making it takes longer than expanding a few molecules."""
    try:
        from featomic import SphericalExpansion
    except ImportError as error:
        raise ImportError(f"SOAP descriptors need the package featomic: {EXTRA}") from error
    return SphericalExpansion(**soap.of_featomic())


def _expanded(
    structures: Structures, species: Sequence[int], soap: Soap, *, slopes: bool
) -> Expansion:
    """The expansion of a few structures, from the blocks of one call of featomic.

    featomic gives one block for each degree l, species of the centre and species of the neighbour.
    """
    calculator = _calculator(soap)
    gradients = ["positions"] if slopes else []
    blocks = calculator.compute(structures.as_ase(), gradients=gradients)
    harmonics = (soap.angular + 1) ** 2
    values = torch.zeros(len(structures.numbers), len(species), soap.radial, harmonics).double()
    # Pairs and derivatives by the species of centre and neighbour: a pair is the same for all l.
    pairs: dict[tuple[int, int], Tensor] = {}
    derivatives: dict[tuple[int, int], Tensor] = {}
    for key, block in blocks.items():
        degree = key["o3_lambda"]
        kinds = (key["center_type"], key["neighbor_type"])
        neighbour = kinds[1]
        if neighbour not in species or not len(block.samples):
            continue
        orders = slice(degree**2, (degree + 1) ** 2)  # m = -l, ..., l
        atoms = _atoms(block.samples, structures)
        values[atoms, species.index(neighbour), :, orders] = torch.as_tensor(block.values).mT
        if not slopes:
            continue
        gradient = block.gradient("positions")
        centres = atoms[_column(gradient.samples, "sample")]
        neighbours = _atoms(gradient.samples, structures)
        apart = centres != neighbours
        if kinds not in pairs:
            pairs[kinds] = torch.stack([centres, neighbours])[:, apart]
            count = int(apart.sum())
            derivatives[kinds] = torch.zeros(count, 3, soap.radial, harmonics).double()
        derivatives[kinds][..., orders] = torch.as_tensor(gradient.values)[apart].mT
    values = values.flatten(1, 2)
    if not slopes:
        return Expansion(values)
    # Without any pair there would be nothing to concatenate.
    no_pairs = torch.zeros(2, 0, dtype=torch.long)
    no_derivatives = values.new_zeros(0, 3, soap.radial, harmonics)
    return Expansion(
        values=values,
        pairs=torch.cat([no_pairs, *pairs.values()], dim=1),
        slopes=torch.cat([no_derivatives, *derivatives.values()]),
    )


def _atoms(samples: Any, structures: Structures) -> Tensor:
    """Indices of the samples' atoms among all atoms."""
    return structures.ends[_column(samples, "system")] + _column(samples, "atom")


def _column(samples: Any, name: str) -> Tensor:
    """A column of featomic's labels of samples."""
    return torch.as_tensor(samples.column(name).copy(), dtype=torch.long)
