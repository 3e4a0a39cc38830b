r"""A network of descriptors as a function of the positions, with exact first derivatives.

featomic gives the expanded densities c and their slopes at the positions $r^0$ of a batch. Around
them

$$ c_i(r) = c_i(r^0) + \sum_{j} \frac{\partial c_i}{\partial r_j} \cdot
\left[(r_j - r^0_j) - (r_i - r^0_i)\right] $$

is right to first order, in plain torch operations. Energies and forces at $r = r^0$ are exact, in
forward and in reverse mode, and forces can enter a loss. Second derivatives by the positions, and
energies elsewhere, are not exact: a structure that has moved needs another batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from experiments.atoms.batches import Batch, arranged
from experiments.atoms.soap import Soap, expansion
from experiments.atoms.spectrum import power_spectrum
from experiments.atoms.structures import Structures, indices


class FromPositions(nn.Module):
    """Positions -> energies, around the positions of the batch.

    Args:
        net: A network of descriptors, such as `BehlerParrinello`.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(
        self,
        positions: Tensor,
        anchor: Tensor,
        values: Tensor,
        pairs: Tensor,
        slopes: Tensor,
        sizes: Tensor,
        owners: Tensor,
        counts: Tensor,
    ) -> Tensor:
        """Energies (N,).

        Args:
            positions: Positions of the atoms, one species after another, (A, 3).
            anchor: The same numbers, where the expansion was made, (A, 3).
            values: The expanded densities there, (A, C, M).
            pairs: Centre and neighbour, (P, 2).
            slopes: Derivatives as in `Expansion`, (P, 3, R, M).
            sizes: Numbers of atoms of each species, (S,).
            owners: The structures of the atoms, (A,).
            counts: Numbers of atoms of each structure, (N,).
        """
        displacement = positions - anchor
        centre, neighbour = pairs.unbind(1)
        step = displacement[neighbour] - displacement[centre]  # (P, 3)
        # A sum of products: many tiny matrix products are slower.
        change = (step[:, :, None] * slopes.flatten(2)).sum(1)  # (P, R M)

        # Add up the changes of each atom's densities, in the channels of the neighbours' species.
        kinds = len(sizes)
        _, _, radial, harmonics = slopes.shape
        species = torch.arange(kinds).repeat_interleave(sizes.cpu())
        neighbour_species = species.to(neighbour.device)[neighbour]
        shifts = values.new_zeros(len(values) * kinds, radial * harmonics)
        shifts = shifts.index_add(0, centre * kinds + neighbour_species, change)
        densities = values + shifts.reshape(len(values), kinds * radial, harmonics)
        x = power_spectrum(densities)
        energy: Tensor = self.net(x, sizes, owners, counts)
        return energy


def batch(structures: Structures, species: Sequence[int], soap: Soap) -> Batch:
    """The inputs of `FromPositions` for some structures.

    Args:
        structures: The structures, in the order of the energies.
        species: Atomic numbers, in the order of the networks.
        soap: Parameters of the descriptor.

    Returns:
        The inputs by name, and "atoms": the index of each of their atoms in the structures.
    """
    densities = expansion(structures, species, soap, slopes=True)
    assert densities.pairs is not None and densities.slopes is not None
    all_rows = torch.arange(len(structures))
    atom_species = indices(structures.numbers, species)
    atoms, owners, sizes = arranged(structures.counts, atom_species, all_rows, len(species))
    # Pairs count atoms in the order of the structures, the batch one species after another.
    place_in_batch = torch.empty_like(atoms)
    place_in_batch[atoms] = torch.arange(len(atoms))
    return {
        "positions": structures.positions[atoms],
        "anchor": structures.positions[atoms],
        "values": densities.values[atoms],
        "pairs": place_in_batch[densities.pairs].mT,
        "slopes": densities.slopes,
        "sizes": sizes,
        "owners": owners,
        "counts": structures.counts,
        "atoms": atoms,
    }
