r"""A net of descriptors as a function of the positions, with exact first derivatives.

featomic gives the expanded densities c and their slopes at the positions $r^0$ of a batch. Around
them

$$ c_i(r) = c_i(r^0) + \sum_{j} \frac{\partial c_i}{\partial r_j} \cdot
\left[(r_j - r^0_j) - (r_i - r^0_i)\right] $$

is right to first order, in plain torch operations: energies and forces at $r = r^0$ are exact, in
forward and in reverse mode, and forces can enter a loss. Second derivatives by the positions, and
energies elsewhere, are not: a structure that has moved needs a batch of its own.
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
        net: of descriptors, such as `BehlerParrinello`.
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
            positions: (A, 3), of atoms one species after another.
            anchor: (A, 3), the same numbers: where the expansion was made.
            values: (A, C, M), the expanded densities there.
            pairs: (P, 2) centre and neighbour.
            slopes: (P, 3, R, M), as in `Expansion`.
            sizes: (S,) atoms of each species.
            owners: (A,) structures of the atoms.
            counts: (N,) atoms of each structure.
        """
        moved = positions - anchor
        centre, neighbour = pairs.unbind(1)
        steps = moved[neighbour] - moved[centre]
        change = (steps[:, :, None] * slopes.flatten(2)).sum(1)  # many tiny products are slower
        kinds, (_, _, radial, harmonics) = len(sizes), slopes.shape
        species = torch.arange(kinds).repeat_interleave(sizes.cpu())
        channel = species.to(neighbour.device)[neighbour]
        shifts = values.new_zeros(len(values) * kinds, radial * harmonics)
        shifts = shifts.index_add(0, centre * kinds + channel, change)
        x = power_spectrum(values + shifts.reshape(len(values), kinds * radial, harmonics))
        energy: Tensor = self.net(x, sizes, owners, counts)
        return energy


def batch(structures: Structures, species: Sequence[int], soap: Soap) -> Batch:
    """What `FromPositions` takes for some structures.

    Args:
        structures: in the order of the energies.
        species: atomic numbers, in the order of the nets.
        soap: parameters of the descriptor.

    Returns:
        The inputs by name, and "atoms": the place of each of their atoms in the structures.
    """
    found = expansion(structures, species, soap, slopes=True)
    assert found.pairs is not None and found.slopes is not None
    every = torch.arange(len(structures))
    places = indices(structures.numbers, species)
    atoms, owners, sizes = arranged(structures.counts, places, every, len(species))
    back = torch.empty_like(atoms)
    back[atoms] = torch.arange(len(atoms))
    return {
        "positions": structures.positions[atoms],
        "anchor": structures.positions[atoms],
        "values": found.values[atoms],
        "pairs": back[found.pairs].mT,
        "slopes": found.slopes,
        "sizes": sizes,
        "owners": owners,
        "counts": structures.counts,
        "atoms": atoms,
    }
