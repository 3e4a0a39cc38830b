"""Molecular dynamics that stop where the network no longer knows the energy.

Effective-medium theory (EMT) labels a cluster of copper and gold. A network learns energies and
forces near the relaxed shape, and then the cluster is heated. ASE asks the calculator for energies
and forces, and gets their error bars too. Requires the extra `ase`.

This seed is an average one. Over the 98 rows that seeds 1 to 6 print, 49 % of the errors lie within
one bar, 92 % within two and 99 % within three. In single runs, the root mean square of the errors
is 0.9 to 1.6 bars.
"""

import numpy as np
import torch
from ase.calculators.emt import EMT
from ase.cluster import Octahedron
from ase.md.langevin import Langevin
from ase.optimize import BFGS

import rigidities as rg
from ase import units
from rigidities.ase import RigidityCalculator, UncertainStructureError

torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
rng = np.random.default_rng(3)
SPECIES = (29, 79)  # copper and gold
GRADIENT_WEIGHT = 0.1  # of the squared error of a derivative, relative to that of an energy
SHELLS = torch.linspace(1.8, 4.5, 10)  # radii in angstrom

# The relaxed cluster: its energy is the zero of all energies.
relaxed = Octahedron("Cu", 2)
relaxed.symbols[3:] = "Au"
relaxed.calc = EMT()
BFGS(relaxed, logfile=None).run(fmax=0.01)
LOWEST = relaxed.get_potential_energy()


def surroundings(positions, numbers):
    """How many neighbours of each species an atom has, in ten smooth shells.

    Positions (B, n, 3) and atomic numbers (B, n) of B clusters give (B, n, 20).
    """
    # An atom is not its own neighbour. Its distance is set to one, because the square root has no
    # derivative at zero.
    itself = torch.eye(positions.shape[1])[..., None]
    squares = (positions[:, :, None] - positions[:, None]).square().sum(-1, keepdim=True)
    distances = (squares + itself).sqrt()  # (B, n, n, 1)
    shells = torch.exp(-6 * (distances - SHELLS) ** 2) * (1 - itself)  # (B, n, n, 10)
    counts = [(shells * (numbers == z)[:, None, :, None]).sum(2) for z in SPECIES]
    return torch.cat(counts, -1)


class Potential(torch.nn.Module):
    """An energy that is a sum over atoms, with a readout for each species."""

    def __init__(self, width=48):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(20, width), torch.nn.SiLU())
        self.readouts = torch.nn.ModuleList(torch.nn.Linear(width, 1) for _ in SPECIES)

    def forward(self, positions, numbers):
        if positions.ndim == 2:  # one structure, as the calculator passes it
            positions, numbers = positions[None], numbers[None]
        features = self.body(surroundings(positions, numbers))  # (B, n, width)
        energy = 0
        for readout, z in zip(self.readouts, SPECIES, strict=True):
            energies_of_atoms = readout(features)[..., 0] * (numbers == z)
            energy = energy + energies_of_atoms.sum(1)
        return energy


def true_energy_and_slope(atoms):
    """Energy above the relaxed cluster and its derivatives by the positions, from EMT."""
    atoms = atoms.copy()
    atoms.calc = EMT()
    return atoms.get_potential_energy() - LOWEST, -atoms.get_forces()


def labelled(rows):
    """Randomly shaken copies of the relaxed cluster, with energies and slopes."""
    batch = {"positions": [], "numbers": [], "y": [], "slope": []}
    for spread in rng.uniform(0.02, 0.15, rows):
        atoms = relaxed.copy()
        atoms.positions += spread * rng.standard_normal(atoms.positions.shape)
        energy, slope = true_energy_and_slope(atoms)
        batch["positions"].append(atoms.positions)
        batch["numbers"].append(atoms.numbers)
        batch["y"].append(energy)
        batch["slope"].append(slope)
    return {name: torch.tensor(np.stack(values)) for name, values in batch.items()}


# Train on energies and forces at once.
train = labelled(150)
valid = labelled(100)
model = Potential()
optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 300)
for _ in range(300):
    positions = train["positions"].clone().requires_grad_()
    energy = model(positions, train["numbers"])
    (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
    energy_loss = (energy - train["y"]).square().sum()
    slope_loss = (slope - train["slope"]).square().sum()
    loss = energy_loss + GRADIENT_WEIGHT * slope_loss
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    schedule.step()

# Error bars of energies and forces, with the same loss as in training.
uq = rg.LastLayerRigidity(model)
uq.fit(train, gradient_loss=rg.GradientLoss("positions", weight=GRADIENT_WEIGHT, target="slope"))
uq.calibrate(valid)
print(uq.calibration_report)


def print_row(step, atoms, results):
    """Print one line of the table: energy, its error bar, its true error, largest bar of a force.

    A force has an error bar in each direction. The bar of a force is the norm of these three.
    """
    energy = results["energy"] - LOWEST
    true_energy, _ = true_energy_and_slope(atoms)
    force_bars = np.linalg.norm(results["forces_std"], axis=1)
    print(
        f"{step:4} {atoms.get_temperature():8.0f} {energy:8.3f} +- {results['energy_std']:.3f} "
        f"{abs(energy - true_energy):8.3f} {force_bars.max():10.3f}"
    )


# Dynamics at a rising temperature. The calculator adds the energy of the relaxed cluster to that of
# the network. It raises an error when the standard deviation of the energy exceeds 0.1 eV.
atoms = relaxed.copy()
atoms.calc = RigidityCalculator(
    uq, species=SPECIES, baseline=lambda _: LOWEST, limits={"energy_std": 0.1}
)
dynamics = Langevin(
    atoms, 5 * units.fs, temperature_K=100, friction=0.02 / units.fs, fixcm=False, rng=rng
)
print("\nstep   T in K     energy in eV     error   largest bar of a force")
try:
    for step, _ in enumerate(dynamics.irun(2000)):
        if step % 10 == 0:
            print_row(step, atoms, atoms.calc.results)
        dynamics.set_temperature(temperature_K=100 + 5 * step)
except UncertainStructureError as stop:
    print_row("stop", stop.atoms, stop.results)
    print(stop)
