"""Clusters of copper and gold labelled by effective-medium theory, and models of them."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from ase.build import bulk
from ase.calculators.emt import EMT
from torch import nn

import rigidities as rg
from ase import Atoms

SPECIES = (29, 79)
CUTOFF = 5.0


def surroundings(positions, numbers):
    """Smooth functions of the distances to the other atoms of each species, (B, n, 16)."""
    n = positions.shape[-2]
    apart = positions[:, :, None] - positions[:, None]
    itself = torch.eye(n, dtype=positions.dtype)
    distance = (apart.square().sum(-1) + itself).sqrt()
    fading = torch.cos(distance.clamp(max=CUTOFF) * torch.pi / CUTOFF) + 1
    centres = torch.linspace(2.0, 4.0, 8, dtype=positions.dtype)
    fading = (fading * (1 - itself))[..., None]
    waves = torch.exp(-4 * (distance[..., None] - centres) ** 2) * fading
    of_species = [(numbers == z).to(positions.dtype)[:, None, :, None] for z in SPECIES]
    return torch.cat([(waves * other).sum(2) for other in of_species], -1)


class Net(nn.Module):
    """A head per species, or one for all; summed over the atoms of one structure or of several."""

    def __init__(self, heads=2, width=12, outputs=1):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, width), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(width, outputs) for _ in range(heads))

    def local(self, positions, numbers):
        hidden = self.trunk(surroundings(positions, numbers))
        if len(self.heads) == 1:
            return self.heads[0](hidden)
        masks = [(numbers == z).to(positions.dtype)[..., None] for z in SPECIES]
        return sum(head(hidden) * mask for head, mask in zip(self.heads, masks, strict=True))

    def forward(self, positions, numbers):
        if positions.ndim == 2:
            positions, numbers = positions[None], numbers[None]
        return self.local(positions, numbers).sum(1).squeeze(-1)


def cluster(rng, spread=0.15):
    """Four atoms about a tetrahedron."""
    corners = 0.93 * np.array([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])
    atoms = Atoms(rng.choice(SPECIES, 4), corners + spread * rng.standard_normal((4, 3)))
    atoms.calc = EMT()
    return atoms


def labelled(count, seed):
    """Positions, numbers, and energies by effective-medium theory."""
    rng = np.random.default_rng(seed)
    structures = [cluster(rng) for _ in range(count)]
    energies = [atoms.get_potential_energy() for atoms in structures]
    return (
        torch.tensor(np.stack([atoms.positions for atoms in structures])),
        torch.tensor(np.stack([atoms.numbers for atoms in structures])),
        torch.tensor(energies, dtype=torch.float64),
    )


def trained(model, data, steps=300):
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(steps):
        optimiser.zero_grad()
        (model(*data[:2]) - data[2]).square().mean().backward()
        optimiser.step()
    return model


TRAIN, VALID = labelled(120, 0), labelled(60, 1)


def fitted(heads, **options):
    with torch.random.fork_rng():
        torch.manual_seed(heads)
        model = trained(Net(heads).double(), TRAIN)
    uq = rg.LastLayerRigidity(model, **options).fit(TRAIN)
    uq.calibrate(VALID, method=rg.Paper(noise="bayes"))
    return uq


class Counting(rg.LastLayerRigidity):
    """Counts what it is asked: predictions alone, and gradients with their bars."""

    predictions = gradients = 0

    def predict(self, *args, **options):
        self.predictions += 1
        return super().predict(*args, **options)

    def predict_with_gradient(self, *args, gradient_bars=True, **options):
        self.gradients += gradient_bars
        return super().predict_with_gradient(*args, gradient_bars=gradient_bars, **options)


@dataclass
class Crystal:
    """A batch object of one periodic structure."""

    pos: torch.Tensor
    cell: torch.Tensor
    y: torch.Tensor | None = None


class Periodic(nn.Module):
    """Pairs within half the cell, nearest images."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))

    def forward(self, pos, cell):
        i, j = torch.triu_indices(len(pos), len(pos), 1)
        apart = (pos[i] - pos[j]) @ torch.linalg.inv(cell)
        apart = (apart - apart.round().detach()) @ cell
        distance = apart.square().sum(-1, keepdim=True).sqrt()
        return self.net(distance - 3).sum(0)


def fitted_crystals(inputs):
    """The periodic model, fitted to shaken crystals as `inputs` gives them, and one of these."""
    rng, rows = np.random.default_rng(3), []
    for _ in range(40):
        atoms = bulk("Cu", cubic=True) * (1, 1, 2)
        atoms.set_cell(atoms.cell * rng.uniform(0.9, 1.1), scale_atoms=True)
        atoms.positions += 0.2 * rng.standard_normal((len(atoms), 3))
        rows.append(replace(inputs(atoms), y=torch.tensor([rng.standard_normal()])))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Periodic().double()
    forward = lambda m, batch: m(batch.pos, batch.cell)  # noqa: E731
    uq = rg.LastLayerRigidity(model, forward=forward, target=lambda batch: batch.y)
    uq.fit(rows[:25]).calibrate(rows[25:], method="paper")
    return uq, atoms
