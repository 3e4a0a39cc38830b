"""MACE with error bars against its own ASE calculator, in the environment that holds it.

Energy, forces and stress of crystals of 8 to 192 atoms, one thread or more; the weights are random,
which costs what trained ones cost. Bars of forces and stress are set beside their limit: as many
backward passes, one by one, as there are features or members. The environment is this one, that of
the interpreter which `ZOO_PYTHON` names, or ``.zoo-venv`` (`make zoo`).
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.frame.results import Row, at_most, for_information, not_run
from benchmarks.frame.timing import Task, Timings, figure, interleaved

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / ".zoo-venv"
VARIABLE = "ZOO_PYTHON"
MISSING = f"mace-torch is not installed: `make zoo`, or name a Python that has it in {VARIABLE}"
WORK = ("energy", "forces", "stress")
UNIT = "times its own calculator"
MEMBERS = 16
CELLS = {8: (2, 1, 1), 32: (2, 2, 2), 108: (3, 3, 3), 192: (4, 4, 3)}


def run(*, quick: bool = False) -> list[Row]:
    """Times beside MACE's own calculator, and bars beside brute force."""
    python = interpreter()
    if python is None:
        return [not_run("MACE with error bars against its own calculator", MISSING)]
    words = [str(int(quick)), str(torch.get_num_threads())]
    done = subprocess.run(
        [str(python), "-m", "benchmarks.potentials", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"benchmarks.potentials failed:\n{done.stderr}")
    return [Row(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def interpreter() -> Path | None:
    """A Python that has MACE, if there is one."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    if find_spec("mace"):
        return Path(sys.executable)
    own = ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    return own if own.exists() else None


def crystal(size: int, seed: int = 0) -> Any:
    """Copper, shaken."""
    from ase.build import bulk

    atoms = bulk("Cu", cubic=True) * CELLS[size]
    atoms.rattle(0.05, seed=seed)
    atoms.info["energy"] = float(np.random.default_rng(seed).normal())
    return atoms


def network() -> Any:
    """Two layers of 32 channels, 48 features."""
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


def measured(quick: bool) -> list[Row]:
    """All rows, in this process."""
    importlib.import_module("tests.foreign.conftest")  # what MACE asks of the torch beside it
    from mace.calculators import MACECalculator

    from rigidities.ase import mace

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    own = MACECalculator(models=network(), device="cpu", default_dtype="float64")
    host = mace(own).fit([crystal(8, seed) for seed in range(16)])
    host.calibrate([crystal(8, seed) for seed in range(16, 24)], criterion="nll", ridge=1e-3)
    rows = accuracy(host, own)
    for size in [8] if quick else CELLS:
        timings = timed(host, own, crystal(size, 99), quick)
        energies = "energy, forces, stress and the energy's bar"
        seconds = {name: timings.median(name) for name in timings.seconds}
        ratio = timings.ratio("ours", "theirs")
        rows.append(at_most(f"{energies}, {size} atoms", ratio, 1.5, UNIT, seconds=seconds))
        counts = {"exact": host.uq.gram.width, "members": MEMBERS}
        for name, what in (("exact", "exact"), ("members", f"of {MEMBERS} members")):
            work = f"with all bars of forces and stress, {what}, {size} atoms"
            rows.append(beside_limit(work, timings, name, counts[name]))
    return rows


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


def timed(host: Any, own: Any, atoms: Any, quick: bool) -> Timings:
    """Each calculator on one structure and a backward pass of the model, round by round."""
    kinds = {
        "ours": host.calculator(force_bars=False),
        "exact": host.calculator(members=0),
        "members": host.calculator(members=MEMBERS),
        "theirs": own,
    }
    tasks: dict[str, Task] = {
        name: lambda c=c: c.calculate(atoms, list(WORK)) for name, c in kinds.items()
    }
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
    mixed = torch.eye(3) + (strain + strain.mT) / 2
    moved = {key: batch[key] @ mixed for key in ("cell", "shifts")}
    result = host.model({**batch, "positions": x @ mixed, **moved}, compute_force=False)
    return x, strain, result["energy"].sum()


def accuracy(host: Any, own: Any) -> list[Row]:
    """Largest differences from MACE's values, and from bars by the dense Jacobian."""
    atoms, calculator = crystal(8, 98), host.calculator()
    found = {name: calculator.get_property(name, atoms) for name in WORK}
    apart = max(
        float(np.abs(np.asarray(found[name]) - own.get_property(name, atoms)).max())
        / float(np.abs(np.asarray(found[name])).max())
        for name in WORK
    )
    bars = np.concatenate([calculator.results[f"{name}_std"].flatten() for name in WORK[1:]])
    error = float(np.abs(bars / dense_bars(host, atoms) - 1).max())
    return [
        at_most("energy, forces and stress less MACE's own, 8 atoms", apart, 1e-8, "relative"),
        at_most("bars of forces and stress less the dense Jacobian's", error, 1e-8, "relative"),
    ]


def dense_bars(host: Any, atoms: Any) -> np.ndarray:
    """Of forces and stress, one backward pass for each weight of the readouts."""
    named = dict(host.model.named_parameters())
    weights = [named[f"readouts.{name}.weight"] for name in ("0.linear", "1.linear_2")]
    for weight in weights:
        weight.requires_grad_(True)
    x, strain, energy = strained_energy(host, atoms)
    parts = torch.autograd.grad(energy, weights, create_graph=True)
    features = torch.cat([part.flatten() for part in parts])
    rows = [torch.autograd.grad(one, [x, strain], retain_graph=True) for one in features]
    for weight in weights:
        weight.requires_grad_(False)
    six = [[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
    jacobian = torch.stack([torch.cat([a.flatten(), b[six[0], six[1]]]) for a, b in rows])
    matrix = host.uq.gram.matrix.squeeze() + host.uq.ridge * torch.eye(len(jacobian))
    variance = (jacobian * torch.linalg.solve(matrix, jacobian)).sum(0)
    bars: np.ndarray = (host.uq.gradient_scale * variance.sqrt()).numpy()
    bars[x.numel() :] /= atoms.get_volume()
    return bars


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    print(json.dumps([asdict(row) for row in measured(bool(int(sys.argv[1])))]))
