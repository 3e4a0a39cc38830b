"""Small periodic crystals of copper and gold, and a model of their graphs."""

import numpy as np
import torch
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator

from tests.support.nets import derivative_scale

CUTOFF = 3.0
VOIGT = [(0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)]


def crystals(count, seed):
    """Strained and shaken, four atoms in a cell, labelled by effective-medium theory."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        atoms = bulk("Cu", cubic=True)
        atoms.symbols[rng.random(4) < 0.5] = "Au"
        atoms.set_cell(atoms.cell @ (np.eye(3) + 0.03 * rng.normal(size=(3, 3))), scale_atoms=True)
        atoms.positions += 0.1 * rng.normal(size=(4, 3))
        atoms.calc = EMT()
        labels = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
        atoms.calc = SinglePointCalculator(atoms, **labels)
        found.append(atoms)
    return found


class Pairs(torch.nn.Module):
    """A message from each neighbour, a head, and a sum over the graph."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 6)
        self.net = torch.nn.Sequential(torch.nn.Linear(7, 8), torch.nn.Tanh())
        self.head = torch.nn.Linear(8, 1)

    def forward(self, z, vectors, edge_index, batch, count):
        i, j = edge_index
        distance = vectors.norm(dim=-1, keepdim=True)
        fading = (1 + torch.cos(torch.pi * distance / CUTOFF)) / 2
        message = self.net(torch.cat([distance, self.embedding(z[j])], -1)) * fading
        hidden = torch.zeros(len(z), 8, dtype=message.dtype).index_add(0, i, message)
        energies = self.head(hidden)[:, 0]
        return energies.new_zeros(count).index_add(0, batch, energies)


def strained_bars(host, atoms, eps=1e-5):
    """Of the stress, from finite strains of the features and a dense solve."""
    columns = []
    for i, j in VOIGT:
        strain, ends = np.zeros((3, 3)), []
        strain[i, j] += eps / 2
        strain[j, i] += eps / 2
        for sign in (1, -1):
            moved = atoms.copy()
            moved.set_cell(atoms.cell @ (np.eye(3) + sign * strain), scale_atoms=True)
            ends.append(host.uq.features(host.batches([moved])).squeeze().numpy())
        columns.append((ends[0] - ends[1]) / (2 * eps))
    matrix = host.uq.gram.matrix.squeeze().numpy() + host.uq.ridge * np.eye(host.uq.gram.width)
    variance = [g @ np.linalg.solve(matrix, g) for g in columns]
    unit = float(derivative_scale(host.uq)) * host.energy_unit
    return unit * np.sqrt(variance) / atoms.get_volume()
