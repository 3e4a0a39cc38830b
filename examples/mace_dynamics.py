"""Molecular dynamics with MACE that stop where the model no longer knows the energy.

A small MACE learns energies and forces of shaken copper crystals for about a minute. The labels
come from effective-medium theory (EMT). Then the script heats a crystal, with error bars on energy,
forces and stress, until the error bar of the energy exceeds its limit.
Requires the extra `ase`, and `pip install mace-torch`.
"""

import sys

import numpy as np
import torch

try:
    from e3nn import o3
    from mace import modules
except ImportError as error:
    sys.exit(f"This example needs mace-torch: pip install mace-torch ({error}).")

from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.md.langevin import Langevin

from ase import units
from rigidities.ase import UncertainStructureError, mace

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
rng = np.random.default_rng(0)
FORCES_WEIGHT = 0.1  # of a component of a force, relative to the energy per atom


def labelled(atoms):
    """The same atoms with energy and forces by EMT, stored as in files of structures."""
    atoms.calc = EMT()
    energy = atoms.get_potential_energy()
    forces = atoms.get_forces()
    atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
    return atoms


def shaken_crystal(shake):
    """A labelled crystal of eight atoms, strained a little and shaken by `shake` angstrom."""
    atoms = bulk("Cu", cubic=True) * (2, 1, 1)
    atoms.set_cell(atoms.cell @ (np.eye(3) + 0.01 * rng.normal(size=(3, 3))), scale_atoms=True)
    atoms.positions += shake * rng.normal(size=atoms.positions.shape)
    return labelled(atoms)


train = [shaken_crystal(rng.uniform(0.01, 0.12)) for _ in range(48)]
valid = [shaken_crystal(rng.uniform(0.01, 0.12)) for _ in range(40)]

# The model: a small MACE, added to the mean energy of an atom.
mean_energy = np.mean([atoms.get_potential_energy() / len(atoms) for atoms in train])
interaction = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
model = modules.ScaleShiftMACE(
    r_max=4.0,
    num_bessel=6,
    num_polynomial_cutoff=5,
    max_ell=2,
    interaction_cls=interaction,
    interaction_cls_first=interaction,
    num_interactions=2,
    num_elements=1,
    hidden_irreps=o3.Irreps("8x0e + 8x1o"),
    MLP_irreps=o3.Irreps("8x0e"),
    atomic_energies=np.array([mean_energy]),
    avg_num_neighbors=18.0,
    atomic_numbers=[29],
    correlation=2,
    gate=torch.nn.functional.silu,
    atomic_inter_scale=1.0,
    atomic_inter_shift=0.0,
)

# Train on energies and forces. `batch["slope"]` is the derivative of the energy: minus the force.
host = mace(model)
batches = host.batches(train, ("energy", "forces"))
optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 30)
for _ in range(30):
    for index in rng.permutation(len(batches)):
        batch = batches[index]
        outputs = model(dict(batch), training=True)
        atoms_of_structures = batch["ptr"].diff()
        energy_errors = (outputs["energy"] - batch["y"]) / atoms_of_structures
        force_errors = outputs["forces"] + batch["slope"]
        loss = energy_errors.square().sum() + FORCES_WEIGHT * force_errors.square().sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    schedule.step()

# Error bars, with the same loss as in training.
host.fit(train, forces_weight=FORCES_WEIGHT)
host.calibrate(valid)
print(host.uq.calibration_report)

# Dynamics at a rising temperature that stop at the limit. The error bars of forces cost most. With
# `force_bars=False` they are computed only on request, not in every step.
atoms = bulk("Cu", cubic=True) * (2, 1, 1)
atoms.calc = host.calculator(limits={"energy_std": 0.05}, force_bars=False)
dynamics = Langevin(
    atoms, 5 * units.fs, temperature_K=300, friction=0.02 / units.fs, fixcm=False, rng=rng
)


def print_energy(step, atoms, results):
    """Print the energy with its error bar and its true error, without ending the line."""
    true_energy = labelled(atoms.copy()).get_potential_energy()
    print(
        f"{step:>4} {atoms.get_temperature():8.0f} {results['energy']:8.3f} +- "
        f"{results['energy_std']:.3f} {abs(results['energy'] - true_energy):8.3f}",
        end="",
    )


print("\nstep   T in K     energy in eV     error   bars: force in eV/Å, stress in GPa")
try:
    for step, _ in enumerate(dynamics.irun(400)):
        if step % 20 == 0:
            force_bars = atoms.calc.get_property("forces_std")  # (atoms, 3)
            stress_bars = atoms.calc.get_property("stress_std")
            print_energy(step, atoms, atoms.calc.results)
            largest_force_bar = np.linalg.norm(force_bars, axis=1).max()
            print(f"{largest_force_bar:10.3f} {stress_bars.max() / units.GPa:10.3f}")
        dynamics.set_temperature(temperature_K=300 + 40 * step)
except UncertainStructureError as stop:
    print_energy("stop", stop.atoms, stop.results)
    print(f"\n{stop}")
