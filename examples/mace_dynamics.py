"""A MACE whose molecular dynamics stop where it no longer knows the energy.

A small MACE learns energies and forces of shaken crystals of copper, labelled by effective-medium
theory (EMT), for about a minute. Then a crystal is heated under it, with error bars on energy,
forces and stress, until the energy's bar passes its limit.
Needs the extra `ase`, and `pip install mace-torch`.
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
FORCES = 0.1  # weight of a component of a force beside the energy of an atom


def labelled(atoms):
    """With energy and forces by EMT, as files of structures carry them."""
    atoms.calc = EMT()
    labels = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
    atoms.calc = SinglePointCalculator(atoms, **labels)
    return atoms


def crystal(shake):
    """Eight atoms, strained a little and shaken."""
    atoms = bulk("Cu", cubic=True) * (2, 1, 1)
    atoms.set_cell(atoms.cell @ (np.eye(3) + 0.01 * rng.normal(size=(3, 3))), scale_atoms=True)
    atoms.positions += shake * rng.normal(size=atoms.positions.shape)
    return labelled(atoms)


train, valid = ([crystal(rng.uniform(0.01, 0.12)) for _ in range(n)] for n in (48, 40))
mean = np.mean([atoms.get_potential_energy() / len(atoms) for atoms in train])
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
    atomic_energies=np.array([mean]),
    avg_num_neighbors=18.0,
    atomic_numbers=[29],
    correlation=2,
    gate=torch.nn.functional.silu,
    atomic_inter_scale=1.0,
    atomic_inter_shift=0.0,
)

host = mace(model)
batches = host.batches(train, ("energy", "forces"))
optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 30)
for _ in range(30):
    for number in rng.permutation(len(batches)):
        batch = batches[number]
        found = model(dict(batch), training=True)
        energy = (found["energy"] - batch["y"]) / batch["ptr"].diff()
        forces = found["forces"] + batch["slope"]
        optimiser.zero_grad()
        (energy.square().sum() + FORCES * forces.square().sum()).backward()
        optimiser.step()
    schedule.step()

host.fit(train, forces_weight=FORCES)
print(host.calibrate(valid))

atoms = bulk("Cu", cubic=True) * (2, 1, 1)
atoms.calc = host.calculator(limits={"energy_std": 0.05}, force_bars=False)  # but when asked
bath = {"temperature_K": 300, "friction": 0.02 / units.fs}
dynamics = Langevin(atoms, 5 * units.fs, **bath, fixcm=False, rng=rng)


def show(step, atoms, results):
    true = labelled(atoms.copy()).get_potential_energy()
    print(
        f"{step:>4} {atoms.get_temperature():8.0f} {results['energy']:8.3f} +- "
        f"{results['energy_std']:.3f} {abs(results['energy'] - true):8.3f}",
        end="",
    )


print("\nstep   T in K     energy in eV     error   bars: force in eV/Å, stress in GPa")
try:
    for step, _ in enumerate(dynamics.irun(400)):
        if step % 20 == 0:
            forces, stress = (atoms.calc.get_property(f"{n}_std") for n in ("forces", "stress"))
            show(step, atoms, atoms.calc.results)
            force = np.linalg.norm(forces, axis=1).max()
            print(f"{force:10.3f} {stress.max() / units.GPa:10.3f}")
        dynamics.set_temperature(temperature_K=300 + 40 * step)
except UncertainStructureError as stop:
    show("stop", stop.atoms, stop.results)
    print(f"\n{stop}")
