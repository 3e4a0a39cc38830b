r"""A Behler-Parrinello net: one net a species turns descriptors into energies of atoms.

$$ E(A) = \sum_{i \in A} w_{s_i} \cdot h_{s_i}(x_i), $$

with $x_i$ the descriptor of atom i, $s_i$ its species, $h_s$ the last hidden layer of that species'
net and $w_s$ its readout. The energy is linear in all readouts together, with the features
$\sum_{i \in A,\, s_i = s} h_s(x_i)$ of every species, one after another.

Reference: J. Behler, M. Parrinello, "Generalized neural-network representation of high-dimensional
potential-energy surfaces" (2007).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

HIDDEN = (64, 64, 64)


class BehlerParrinello(nn.Module):
    """Descriptors of atoms -> energies of structures.

    Args:
        species: how many there are.
        inputs: numbers of a descriptor.
        hidden: widths of the hidden layers.
    """

    def __init__(self, species: int, inputs: int, hidden: tuple[int, ...] = HIDDEN) -> None:
        super().__init__()
        widths = list(zip((inputs, *hidden), hidden, strict=False))
        self.nets = nn.ModuleList(
            nn.Sequential(*(layer for a, b in widths for layer in (nn.Linear(a, b), nn.SiLU())))
            for _ in range(species)
        )
        self.readouts = nn.ModuleList(nn.Linear(hidden[-1], 1, bias=False) for _ in range(species))
        self.register_buffer("level", torch.zeros(inputs))
        self.register_buffer("spread", torch.ones(()))

    def standardise(self, x: Tensor) -> None:
        """Let the nets see descriptors like these, (A, D), with mean zero and mean square one.

        One factor serves all numbers: those that hardly vary stay small.
        """
        self.level.copy_(x.mean(0))
        spread = (x - self.level).square().mean().sqrt()
        self.spread.copy_(torch.where(spread > 0, spread, torch.ones_like(spread)))

    def forward(self, x: Tensor, sizes: Tensor, owners: Tensor, counts: Tensor) -> Tensor:
        """Energies (N,).

        Args:
            x: (A, D) descriptors of all atoms, one species after another.
            sizes: (S,) atoms of each species.
            owners: (A,) their structures, counted from zero.
            counts: (N,) atoms of each structure.
        """
        groups = ((x - self.level) / self.spread).split(sizes.tolist())
        parts = [
            readout(net(group))[:, 0]
            for net, readout, group in zip(self.nets, self.readouts, groups, strict=True)
        ]
        return x.new_zeros(len(counts)).index_add(0, owners, torch.cat(parts))


def drawn(
    species: int, inputs: int, seed: int, hidden: tuple[int, ...] = HIDDEN
) -> BehlerParrinello:
    """In float64, with torch's default first weights from a seed of their own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BehlerParrinello(species, inputs, hidden).double()
