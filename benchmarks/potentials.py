"""MACE with error bars against its own ASE calculator, in the environment that holds it.

It times energy, forces and stress of crystals of 8 to 192 atoms. The weights are random, which
costs as much as trained ones. Bars of forces and stress stand beside their limit: as many backward
passes, one by one, as there are features or members. The environment is this one, that of the
interpreter which `ZOO_PYTHON` names, or ``.zoo-venv`` (`make zoo`).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rigidities as rg
from benchmarks.frame.apart import ROOT, environment_python, rows_apart
from benchmarks.frame.results import Row, at_most, for_information, not_run
from benchmarks.frame.timing import Task, Timings, figure, interleaved

ENVIRONMENT = ROOT / ".zoo-venv"
VARIABLE = "ZOO_PYTHON"
MISSING = f"mace-torch is not installed: `make zoo`, or name a Python that has it in {VARIABLE}"
PROPERTIES = ("energy", "forces", "stress")
UNIT = "times its own calculator"
MEMBERS = 16
CELLS: dict[int, tuple[int, int, int]] = {
    8: (2, 1, 1),
    32: (2, 2, 2),
    108: (3, 3, 3),
    192: (4, 4, 3),
}
"""Repetitions of the unit cell by the number of atoms."""


def run(*, quick: bool = False) -> list[Row]:
    """Times beside MACE's own calculator, and bars beside brute force."""
    python = interpreter()
    if python is None:
        return [not_run("MACE with error bars against its own calculator", MISSING)]
    return rows_apart(python, "benchmarks.potentials", quick=quick)


def interpreter() -> Path | None:
    """A Python that has MACE, if there is one."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    if find_spec("mace"):
        return Path(sys.executable)
    python = environment_python(ENVIRONMENT)
    if python.exists():
        return python
    return None


def crystal(size: int, seed: int = 0) -> Any:
    """Copper whose atoms are rattled, with a random energy."""
    from ase.build import bulk

    atoms = bulk("Cu", cubic=True) * CELLS[size]
    atoms.rattle(0.05, seed=seed)
    atoms.info["energy"] = float(np.random.default_rng(seed).normal())
    return atoms


def network() -> Any:
    """A MACE of two layers of 32 channels, which has 48 features."""
    from e3nn import o3
    from mace import modules

    interaction = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    return modules.ScaleShiftMACE(
        r_max=4.0,
        num_bessel=8,
        num_polynomial_cutoff=5,
        max_ell=2,
        interaction_cls=interaction,
        interaction_cls_first=interaction,
        num_interactions=2,
        num_elements=1,
        hidden_irreps=o3.Irreps("32x0e + 32x1o"),
        MLP_irreps=o3.Irreps("16x0e"),
        atomic_energies=np.array([-1.0]),
        avg_num_neighbors=18.0,
        atomic_numbers=[29],
        correlation=2,
        gate=torch.nn.functional.silu,
        atomic_inter_scale=0.7,
        atomic_inter_shift=0.1,
    )


def measured(*, quick: bool) -> list[Row]:
    """All rows, in this process."""
    importlib.import_module("tests.foreign.conftest")  # adapts this torch to what MACE expects
    from mace.calculators import MACECalculator

    from rigidities.ase import mace

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    mace_calculator = MACECalculator(models=network(), device="cpu", default_dtype="float64")
    host = mace(mace_calculator).fit([crystal(8, seed) for seed in range(16)])
    host.calibrate([crystal(8, seed) for seed in range(16, 24)], method=rg.Paper(ridge=1e-3))
    table = accuracy_rows(host, mace_calculator)
    for size in [8] if quick else CELLS:
        timings = timed(host, mace_calculator, crystal(size, 99), quick=quick)
        row = at_most(
            f"energy, forces, stress and the energy's bar, {size} atoms",
            timings.ratio("ours", "theirs"),
            1.5,
            UNIT,
            seconds=timings.medians(),
        )
        table.append(row)
        bars = "with all bars of forces and stress"
        features = host.uq.gram.width
        table.append(beside_limit(f"{bars}, exact, {size} atoms", timings, "exact", features))
        work = f"{bars}, of {MEMBERS} members, {size} atoms"
        table.append(beside_limit(work, timings, "members", MEMBERS))
    return table


def beside_limit(work: str, timings: Timings, name: str, passes: int) -> Row:
    """The time of bars, with that of so many backward passes in the same unit."""
    limit = timings.ratio("backward", "theirs", factor=passes).median
    share = timings.ratio(name, "backward", factor=1 / passes)
    if share.median <= 1:
        side = "below"
    else:
        side = "above"
    note = f"Limit, {passes} backward passes: {figure(limit)}. The time is {share} of it, {side}."
    return for_information(
        work,
        timings.ratio(name, "theirs"),
        UNIT,
        note=note,
        backward_passes=passes,
        limit_of_passes=limit,
        share_of_limit=share.median,
    )


def timed(host: Any, mace_calculator: Any, atoms: Any, *, quick: bool) -> Timings:
    """Each calculator on one structure and a backward pass of the model, round by round."""
    calculators = {
        "ours": host.calculator(force_bars=False),
        "exact": host.calculator(members=0),
        "members": host.calculator(members=MEMBERS),
        "theirs": mace_calculator,
    }
    tasks: dict[str, Task] = {}
    for name, calculator in calculators.items():
        tasks[name] = partial(calculator.calculate, atoms, list(PROPERTIES))
    tasks["backward"] = backward_pass(host, atoms)
    return interleaved(tasks, rounds=1 if quick else 7)


def backward_pass(host: Any, atoms: Any, repeats: int = 3) -> Task:
    """Seconds of one backward pass, of the energy by positions and strain, in plain torch."""
    x, strain, energy = strained_energy(host, atoms)

    def task() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            torch.autograd.grad(energy, [x, strain], retain_graph=True)
        return (time.perf_counter() - start) / repeats

    return task


def strained_energy(host: Any, atoms: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, a strain of zero, and the energy with the graph between them."""
    (batch,) = host.batches([atoms])
    x = batch["positions"].clone().requires_grad_()
    strain = torch.zeros(3, 3, requires_grad=True)
    deformation = torch.eye(3) + (strain + strain.mT) / 2
    strained = {
        **batch,
        "positions": x @ deformation,
        "cell": batch["cell"] @ deformation,
        "shifts": batch["shifts"] @ deformation,
    }
    result = host.model(strained, compute_force=False)
    return x, strain, result["energy"].sum()


def accuracy_rows(host: Any, mace_calculator: Any) -> list[Row]:
    """Largest differences from MACE's values, and from bars by the dense Jacobian."""
    atoms = crystal(8, 98)
    calculator = host.calculator()
    differences = []
    for name in PROPERTIES:
        values = np.asarray(calculator.get_property(name, atoms))
        expected = mace_calculator.get_property(name, atoms)
        differences.append(float(np.abs(values - expected).max()) / float(np.abs(values).max()))
    bars = [calculator.results[f"{name}_std"].flatten() for name in ("forces", "stress")]
    error = float(np.abs(np.concatenate(bars) / dense_bars(host, atoms) - 1).max())
    return [
        at_most(
            "energy, forces and stress less MACE's own, 8 atoms",
            max(differences),
            1e-8,
            "relative",
        ),
        at_most("bars of forces and stress less the dense Jacobian's", error, 1e-8, "relative"),
    ]


def dense_bars(host: Any, atoms: Any) -> np.ndarray:
    """Bars of forces and stress by one backward pass for each weight of the readouts."""
    parameters = dict(host.model.named_parameters())
    weights = [parameters[f"readouts.{name}.weight"] for name in ("0.linear", "1.linear_2")]
    for weight in weights:
        weight.requires_grad_(True)
    x, strain, energy = strained_energy(host, atoms)
    by_weight = torch.autograd.grad(energy, weights, create_graph=True)
    features = torch.cat([gradient.flatten() for gradient in by_weight])
    # Voigt's order of the six components of the stress: xx, yy, zz, yz, xz, xy.
    rows, columns = [0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]
    derivatives = []
    for feature in features:
        by_x, by_strain = torch.autograd.grad(feature, [x, strain], retain_graph=True)
        derivatives.append(torch.cat([by_x.flatten(), by_strain[rows, columns]]))
    for weight in weights:
        weight.requires_grad_(False)
    jacobian = torch.stack(derivatives)  # (features, 3 atoms + 6)
    matrix = host.uq.gram.matrix.squeeze() + host.uq.ridge * torch.eye(len(jacobian))
    variance = (jacobian * torch.linalg.solve(matrix, jacobian)).sum(0)
    bars: np.ndarray = (host.uq.scale * variance.sqrt()).numpy()
    bars[x.numel() :] /= atoms.get_volume()
    return bars


def main(quick: int, threads: int) -> None:
    """Print the rows as the last line."""
    torch.set_num_threads(threads)
    print(json.dumps([asdict(row) for row in measured(quick=bool(quick))]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
