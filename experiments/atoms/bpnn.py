r"""A Behler-Parrinello network: for each species one network turns descriptors into energies.

$$ E(A) = \sum_{i \in A} w_{s_i} \cdot h_{s_i}(x_i), $$

with $x_i$ the descriptor of atom i, $s_i$ its species, $h_s$ the last hidden layer of that species'
network and $w_s$ its readout. The energy is linear in all readouts together, with the features
$\sum_{i \in A,\, s_i = s} h_s(x_i)$ of every species, one after another.

Reference: J. Behler, M. Parrinello, "Generalized neural-network representation of high-dimensional
potential-energy surfaces" (2007).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

HIDDEN = (64, 64, 64)
"""Widths of the hidden layers."""


class BehlerParrinello(nn.Module):
    """Descriptors of atoms -> energies of structures.

    Args:
        species: The number of species.
        inputs: The number of entries of a descriptor.
        hidden: Widths of the hidden layers.
    """

    def __init__(self, species: int, inputs: int, hidden: tuple[int, ...] = HIDDEN) -> None:
        super().__init__()
        self.nets = nn.ModuleList(_hidden_layers(inputs, hidden) for _ in range(species))
        self.readouts = nn.ModuleList(nn.Linear(hidden[-1], 1, bias=False) for _ in range(species))
        self.register_buffer("level", torch.zeros(inputs))
        self.register_buffer("spread", torch.ones(()))

    def standardise(self, x: Tensor) -> None:
        """Shift and scale what enters the networks.

        Descriptors like these then have mean zero and mean square one. One factor serves all
        entries: those that hardly vary stay small.

        Args:
            x: Descriptors, (A, D).
        """
        self.level.copy_(x.mean(0))
        spread = (x - self.level).square().mean().sqrt()
        self.spread.copy_(torch.where(spread > 0, spread, torch.ones_like(spread)))

    def forward(self, x: Tensor, sizes: Tensor, owners: Tensor, counts: Tensor) -> Tensor:
        """Energies (N,).

        Args:
            x: Descriptors of all atoms, one species after another, (A, D).
            sizes: Numbers of atoms of each species, (S,).
            owners: The structures of the atoms, counted from zero, (A,).
            counts: Numbers of atoms of each structure, (N,).
        """
        standardised = (x - self.level) / self.spread
        species_groups = standardised.split(sizes.tolist())
        atom_energies = [
            readout(net(group))[:, 0]
            for net, readout, group in zip(self.nets, self.readouts, species_groups, strict=True)
        ]
        return x.new_zeros(len(counts)).index_add(0, owners, torch.cat(atom_energies))


def _hidden_layers(inputs: int, hidden: tuple[int, ...]) -> nn.Sequential:
    """Linear layers with an activation after each."""
    layers: list[nn.Module] = []
    for before, after in pairwise((inputs, *hidden)):
        layers += [nn.Linear(before, after), nn.SiLU()]
    return nn.Sequential(*layers)


def drawn(
    species: int, inputs: int, seed: int, hidden: tuple[int, ...] = HIDDEN
) -> BehlerParrinello:
    """A network in float64 with torch's default first weights.

    Args:
        species: The number of species.
        inputs: The number of entries of a descriptor.
        seed: Seed of the weights. The global generator stays as it is.
        hidden: Widths of the hidden layers.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BehlerParrinello(species, inputs, hidden).double()
