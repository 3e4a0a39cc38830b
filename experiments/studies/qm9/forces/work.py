r"""Error bars of forces: exact, from last-layer ensembles, and by brute force; and their time.

$$ \mathrm{Var}\, F_k = \alpha^2\, g_k^\top (G + \varsigma^2 I)^{-1} g_k, \qquad
   g_k = \partial f / \partial r_k $$

with the features f of the energy. An ensemble of n members estimates its root with a relative
error of $1 / \sqrt{2 n}$. QM9 has no forces, so these are compared with each other.

`of_forces` fits and calibrates the first split's network. A `Case` is one molecule whose bars can
be computed in all ways; `measured` compares the ways and their times for molecules of all sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import rigidities as rg
from experiments.atoms import nets, samples
from experiments.atoms.batches import Batch, loss_weight
from experiments.atoms.positions import FromPositions
from experiments.atoms.positions import batch as of_positions
from experiments.atoms.samples import SOAP, SPECIES
from experiments.atoms.structures import Structures
from experiments.frame.machine import machine
from experiments.studies.qm9.costs import seconds
from experiments.studies.qm9.work import BATCH, MAIN, WAYS
from experiments.training.protocol import device

MEMBERS = (16, 64, 256)
"""Members of the ensembles that are compared with the exact bars."""

LOOPED = 64
"""Members of the ensemble whose time is measured."""

SMALL = 15
"""Atoms of the largest molecules that brute force checks."""

NEGLIGIBLE = 1e-6
"""Share of a molecule's largest bar: smaller ones, which symmetry makes zero, are not compared."""

FULL = {"molecules": 30, "timed": 8, "repeats": 5}
QUICK = {"molecules": 2, "timed": 1, "repeats": 1}


def energies(net: nn.Module, batch: Batch) -> Tensor:
    """Energies of descriptors, or of positions: what `forward=` wants for both.

    With ``rg.LastLayerRigidity(net, forward=energies)`` a fit on batches of descriptors serves
    ``uq.gradient([positions.batch(...)], wrt="positions")`` as it is.

    Args:
        net: A network of descriptors.
        batch: A batch of `Environments`, or of `positions.batch`.
    """
    inputs = {name: value for name, value in batch.items() if name not in ("y", "atoms")}
    model = FromPositions(net) if "positions" in inputs else net
    energy: Tensor = model(**inputs)
    return energy


def measured(
    uq: rg.LastLayerRigidity,
    structures: Structures,
    *,
    seed: int,
    molecules: int,
    timed: int,
    repeats: int,
) -> dict[str, Any]:
    """Bars of forces in kcal/mol/angstrom, and their time.

    Args:
        uq: Error bars that were fitted and calibrated, made with `forward=energies`.
        structures: Test molecules, of which some of all sizes are taken.
        seed: The seed of the choice and of the members.
        molecules: How many molecules are taken.
        timed: How many of them are timed.
        repeats: How often each of them is timed.

    Returns:
        "bars", "ensembles" (relative root mean square differences from the exact bars, by members,
        beside those expected), "dense" (the largest relative difference from brute force), "times"
        by size, and "ratio", the exact way's share of the time of the loop, the median over sizes.
    """
    rows = spread(structures, molecules, seed)
    cases = [Case.of(uq, structures.picked(row[None]), seed + int(row)) for row in rows]
    exact = [case.exact() for case in cases]

    # Brute force checks small molecules alone: the first case is the smallest.
    small = [k for k, case in enumerate(cases) if case.atoms <= SMALL]
    if not small:
        small = [0]
    dense_differences = [difference(cases[k].dense(), exact[k]) for k in small]

    # Times are measured for evenly spaced cases, from the smallest to the largest.
    places = torch.linspace(0, len(cases) - 1, min(timed, len(cases))).round().long().unique()
    times_of_cases = [times(cases[k], repeats) for k in places.tolist()]
    return {
        "bars": [
            {"atoms": case.atoms, "mean": float(std.mean()), "largest": float(std.max())}
            for case, std in zip(cases, exact, strict=True)
        ],
        "ensembles": compared(cases, exact),
        "dense": {
            "difference": max(dense_differences),
            "molecules": len(small),
        },
        "times": times_of_cases,
        "ratio": median(row["ratios"]["loop"] for row in times_of_cases),
        "settings": {
            "seed": seed,
            "molecules": len(cases),
            "repeats": repeats,
            "looped": LOOPED,
            "features": uq.gram.width,
            "threads": torch.get_num_threads(),
            "machine": machine(),
        },
    }


def spread(structures: Structures, count: int, seed: int) -> Tensor:
    """Places of molecules whose sizes go evenly from the smallest to the largest, none twice."""
    order = torch.randperm(len(structures), generator=torch.Generator().manual_seed(seed))
    order = order[structures.counts[order].argsort(stable=True)]
    sizes = structures.counts[order].double()
    is_free = torch.ones(len(order), dtype=torch.bool)
    chosen = []
    for size in torch.linspace(float(sizes[0]), float(sizes[-1]), min(count, len(order))):
        place = int((sizes - size).abs().masked_fill(~is_free, torch.inf).argmin())
        is_free[place] = False
        chosen.append(order[place])
    return torch.stack(chosen)


@dataclass(frozen=True)
class Case:
    """One molecule and the members of an ensemble.

    Attributes:
        uq: Error bars that were fitted and calibrated.
        batch: The molecule as `FromPositions` takes it.
        members: Deviations of the last layer's weights, (n, D).
        inverse: Inverse of the Gram matrix plus ridge, (D, D), for brute force.
    """

    uq: rg.LastLayerRigidity
    batch: Batch
    members: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, uq: rg.LastLayerRigidity, molecule: Structures, seed: int) -> Case:
        """The case of one molecule; the seed draws the members."""
        where = next(uq.model.parameters()).device
        batch = of_positions(molecule, SPECIES, SOAP)
        batch = {name: value.to(where) for name, value in batch.items()}
        generator = torch.Generator().manual_seed(seed)
        members = uq.ensemble(max(MEMBERS), generator=generator).deviations[:, 0]
        eye = torch.eye(uq.gram.width, dtype=torch.float64, device=where)
        return cls(uq, batch, members, torch.linalg.inv(uq.gram.matrix + uq.ridge * eye))

    @property
    def positions(self) -> Tensor:
        """Positions of the atoms, (A, 3)."""
        return self.batch["positions"]

    @property
    def atoms(self) -> int:
        """The number of atoms."""
        return len(self.positions)

    def exact(self) -> Tensor:
        """Bars by the library, (A, 3)."""
        return self.uq.gradient([self.batch], wrt="positions", members=0).std

    def loop(self, n: int = LOOPED) -> Tensor:
        """Bars from n members, (A, 3): one forward pass, and one backward pass a member."""
        x, features = self.graph()
        energies = (features @ self.members[:n].T).unbind()
        slopes = [torch.autograd.grad(energy, x, retain_graph=True)[0] for energy in energies]
        return torch.stack(slopes).square().mean(0).sqrt()

    def batched(self, n: int = LOOPED) -> Tensor:
        """The same as `loop`, all backward passes at once."""
        return self.slopes(self.members[:n]).square().mean(0).sqrt()

    def dense(self) -> Tensor:
        """Brute force: the derivatives of all features, and the inverse of the Gram."""
        slopes = self.slopes(None)
        q = torch.einsum("cak,cd,dak->ak", slopes, self.inverse, slopes)
        return self.uq.scale * q.sqrt()

    def graph(self) -> tuple[Tensor, Tensor]:
        """The positions, and the features (D,) as a function of them."""
        x = self.positions.clone().requires_grad_()
        return x, features(self.uq.model, {**self.batch, "positions": x})[0]

    def slopes(self, directions: Tensor | None) -> Tensor:
        """Derivatives by the positions of features along directions (n, D), or of all features.

        Returns:
            (n, A, 3), or (D, A, 3) without directions.
        """
        x, features = self.graph()
        values = features if directions is None else features @ directions.T
        units = torch.eye(len(values), dtype=values.dtype, device=values.device)
        slopes: Tensor = torch.autograd.grad(values, x, units, is_grads_batched=True)[0]
        return slopes


def features(net: Any, batch: Batch) -> Tensor:
    """What the readouts of all species see, summed over the atoms of each structure, (N, D).

    Args:
        net: A `BehlerParrinello`.
        batch: A batch of positions.
    """
    inputs_of_readouts: list[Tensor] = []
    hooks = [
        readout.register_forward_pre_hook(lambda _, inputs: inputs_of_readouts.append(inputs[0]))
        for readout in net.readouts
    ]
    try:
        energies(net, batch)
    finally:
        for hook in hooks:
            hook.remove()
    owners_of_species = batch["owners"].split(batch["sizes"].tolist())
    structures = len(batch["counts"])
    sums = []
    for rows, owners in zip(inputs_of_readouts, owners_of_species, strict=True):
        sums.append(rows.new_zeros(structures, rows.shape[1]).index_add(0, owners, rows))
    return torch.cat(sums, dim=1)


def compared(cases: Sequence[Case], exact: Sequence[Tensor]) -> list[dict[str, float]]:
    """Ensembles' bars against the exact ones, over all components of all molecules."""
    slopes_of_cases = [case.slopes(case.members) for case in cases]
    rows = []
    for n in MEMBERS:
        relative_errors = []
        for slopes, std in zip(slopes_of_cases, exact, strict=True):
            matters = std > NEGLIGIBLE * std.max()
            bars = slopes[:n].square().mean(0).sqrt()
            relative_errors.append((bars[matters] / std[matters]) - 1)
        error = float(torch.cat(relative_errors).square().mean().sqrt())
        rows.append({"members": n, "error": error, "expected": (2 * n) ** -0.5})
    return rows


def difference(bars: Tensor, exact: Tensor) -> float:
    """The largest relative difference, of bars that are not negligible."""
    matters = exact > NEGLIGIBLE * exact.max()
    return float(((bars[matters] - exact[matters]) / exact[matters]).abs().max())


def times(case: Case, repeats: int) -> dict[str, Any]:
    """Milliseconds of each way and the exact one's share of them: medians, measured in turns."""
    ways: Mapping[str, Callable[[], Tensor]] = {
        "exact": case.exact,
        "loop": case.loop,
        "batched": case.batched,
        "dense": case.dense,
    }
    for way in ways.values():
        way()  # first calls take longer
    rounds = [{name: seconds(way) for name, way in ways.items()} for _ in range(repeats)]
    return {
        "atoms": case.atoms,
        "milliseconds": {name: 1e3 * median(spent[name] for spent in rounds) for name in ways},
        "ratios": {name: median(spent["exact"] / spent[name] for spent in rounds) for name in ways},
    }


def of_forces(
    *,
    seed: int,
    train: int,
    valid: int,
    epochs: int,
    molecules: int | None,
    sizes: dict[str, int],
) -> dict[str, Any]:
    """Bars of forces of test molecules, exact and from ensembles, and their time.

    Args:
        seed: of the whole.
        train: molecules to train on.
        valid: molecules to validate and calibrate with.
        epochs: of the training.
        molecules: draw so few of the set; None for all.
        sizes: the other arguments of `measured`.
    """
    with samples.drawn(0, seed, train=train, valid=valid, molecules=molecules) as data:
        keep = molecules is None
        trained = nets.of_split(data, split=0, seed=seed, epochs=epochs, keep=keep)
        uq = rg.LastLayerRigidity(trained.net.to(device()), forward=energies, progress=False)
        train_molecules = data.environments(data.train)
        valid_molecules = data.environments(data.valid)
        uq.fit(train_molecules.batches(BATCH), sample_weight=loss_weight)
        uq.calibrate(valid_molecules.batches(BATCH), method=WAYS[MAIN])
        del train_molecules, valid_molecules  # gigabytes of descriptors
        generator = torch.Generator().manual_seed(seed)
        some_molecules = data.test[torch.randperm(len(data.test), generator=generator)[:1000]]
        structures = data.molecules.structures.picked(some_molecules)
        return measured(uq, structures, seed=seed, **sizes)
