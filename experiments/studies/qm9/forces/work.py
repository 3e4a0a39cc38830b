r"""Error bars of forces: exact, from last-layer ensembles, and by brute force; and their time.

$$ \mathrm{Var}\, F_k = \alpha^2\, g_k^\top (G + \varsigma^2 I)^{-1} g_k, \qquad
   g_k = \partial f / \partial r_k $$

with the features f of the energy. An ensemble of n members estimates its root with a relative
error of $1 / \sqrt{2 n}$. QM9 has no forces, so these are compared with each other.
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
LOOPED = 64
"""Members of the ensemble whose time is measured."""

SMALL = 15
"""Atoms of the largest molecules that brute force checks."""

NEGLIGIBLE = 1e-6
"""Part of a molecule's largest bar: smaller ones, which symmetry makes zero, are not compared."""

FULL = {"molecules": 30, "timed": 8, "repeats": 5}
QUICK = {"molecules": 2, "timed": 1, "repeats": 1}


def energies(net: nn.Module, batch: Batch) -> Tensor:
    """Energies of descriptors, or of positions: what `forward=` wants for both.

    With ``rg.LastLayerRigidity(net, forward=energies)`` a fit on batches of descriptors serves
    ``uq.gradient([positions.batch(...)], wrt="positions")`` as it is.

    Args:
        net: of descriptors.
        batch: of `Environments`, or of `positions.batch`.
    """
    inputs = {name: value for name, value in batch.items() if name not in ("y", "atoms")}
    found: Tensor = FromPositions(net)(**inputs) if "positions" in inputs else net(**inputs)
    return found


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
        uq: fitted and calibrated, made with `forward=energies`.
        structures: test molecules, of which some of all sizes are taken.
        seed: of the choice and of the members.
        molecules: how many to take.
        timed: how many of them to time.
        repeats: of each time.

    Returns:
        "bars", "ensembles" (relative root mean square differences from the exact bars, by members,
        beside those expected), "dense" (the largest relative difference from brute force), "times"
        by size, and "ratio", the exact way's part of the time of the loop, the median over sizes.
    """
    rows = spread(structures, molecules, seed)
    cases = [Case.of(uq, structures.picked(row[None]), seed + int(row)) for row in rows]
    exact = [case.exact() for case in cases]
    small = [k for k, case in enumerate(cases) if case.atoms <= SMALL] or [0]
    places = torch.linspace(0, len(cases) - 1, min(timed, len(cases))).round().long().unique()
    taken = [times(cases[k], repeats) for k in places.tolist()]
    return {
        "bars": [
            {"atoms": case.atoms, "mean": float(std.mean()), "largest": float(std.max())}
            for case, std in zip(cases, exact, strict=True)
        ],
        "ensembles": compared(cases, exact),
        "dense": {
            "difference": max(difference(cases[k].dense(), exact[k]) for k in small),
            "molecules": len(small),
        },
        "times": taken,
        "ratio": median(row["ratios"]["loop"] for row in taken),
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
    """Places of molecules of sizes from the smallest to the largest, each once."""
    order = torch.randperm(len(structures), generator=torch.Generator().manual_seed(seed))
    order = order[structures.counts[order].argsort(stable=True)]
    sizes = structures.counts[order].double()
    free = torch.ones(len(order), dtype=torch.bool)
    found = []
    for size in torch.linspace(float(sizes[0]), float(sizes[-1]), min(count, len(order))):
        place = int((sizes - size).abs().masked_fill(~free, torch.inf).argmin())
        free[place] = False
        found.append(order[place])
    return torch.stack(found)


@dataclass(frozen=True)
class Case:
    """One molecule and the members of an ensemble.

    Attributes:
        uq: fitted and calibrated.
        batch: what `FromPositions` takes.
        members: (n, D), deviations of the last layer's weights.
        inverse: (D, D), of the Gram and the ridge, for brute force.
    """

    uq: rg.LastLayerRigidity
    batch: Batch
    members: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, uq: rg.LastLayerRigidity, molecule: Structures, seed: int) -> Case:
        where = next(uq.model.parameters()).device
        batch = of_positions(molecule, SPECIES, SOAP)
        batch = {name: value.to(where) for name, value in batch.items()}
        draw = torch.Generator().manual_seed(seed)
        members = uq.ensemble(max(MEMBERS), generator=draw).deviations[:, 0]
        eye = torch.eye(uq.gram.width, dtype=torch.float64, device=where)
        return cls(uq, batch, members, torch.linalg.inv(uq.gram.matrix + uq.ridge * eye))

    @property
    def positions(self) -> Tensor:
        return self.batch["positions"]

    @property
    def atoms(self) -> int:
        return len(self.positions)

    def exact(self) -> Tensor:
        """Bars by the library, (A, 3)."""
        return self.uq.gradient([self.batch], wrt="positions", members=0, progress=False).std

    def loop(self, n: int = LOOPED) -> Tensor:
        """Those of n members: one forward pass, and one backward pass a member."""
        x, features = self.graph()
        energies = (features @ self.members[:n].T).unbind()
        slopes = [torch.autograd.grad(one, x, retain_graph=True)[0] for one in energies]
        return torch.stack(slopes).square().mean(0).sqrt()

    def batched(self, n: int = LOOPED) -> Tensor:
        """The same, all backward passes at once."""
        return self._jacobian(self.members[:n]).square().mean(0).sqrt()

    def dense(self) -> Tensor:
        """Brute force: the derivatives of all features, and the inverse of the Gram."""
        slopes = self._jacobian(None)
        q = torch.einsum("cak,cd,dak->ak", slopes, self.inverse, slopes)
        return self.uq.scale * q.sqrt()

    def graph(self) -> tuple[Tensor, Tensor]:
        """The positions, and the features (D,) as a function of them."""
        x = self.positions.clone().requires_grad_()
        return x, features(self.uq.model, {**self.batch, "positions": x})[0]

    def _jacobian(self, directions: Tensor | None) -> Tensor:
        x, found = self.graph()
        values = found if directions is None else found @ directions.T
        units = torch.eye(len(values), dtype=values.dtype, device=values.device)
        slopes: Tensor = torch.autograd.grad(values, x, units, is_grads_batched=True)[0]
        return slopes


def features(net: Any, batch: Batch) -> Tensor:
    """What the readouts of all species see, summed over the atoms of each structure, (N, D).

    Args:
        net: `BehlerParrinello`.
        batch: of positions.
    """
    seen: list[Tensor] = []
    hooks = [
        readout.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        for readout in net.readouts
    ]
    try:
        energies(net, batch)
    finally:
        for hook in hooks:
            hook.remove()
    owners = batch["owners"].split(batch["sizes"].tolist())
    count = len(batch["counts"])
    parts = [
        rows.new_zeros(count, rows.shape[1]).index_add(0, own, rows)
        for rows, own in zip(seen, owners, strict=True)
    ]
    return torch.cat(parts, dim=1)


def compared(cases: Sequence[Case], exact: Sequence[Tensor]) -> list[dict[str, float]]:
    """Ensembles' bars against the exact ones, over all components of all molecules."""
    slopes = [case._jacobian(case.members) for case in cases]
    rows = []
    for n in MEMBERS:
        ratios = []
        for own, std in zip(slopes, exact, strict=True):
            kept = std > NEGLIGIBLE * std.max()
            ratios.append((own[:n].square().mean(0).sqrt()[kept] / std[kept]) - 1)
        error = float(torch.cat(ratios).square().mean().sqrt())
        rows.append({"members": n, "error": error, "expected": (2 * n) ** -0.5})
    return rows


def difference(found: Tensor, exact: Tensor) -> float:
    """The largest relative difference, of bars that are not negligible."""
    kept = exact > NEGLIGIBLE * exact.max()
    return float(((found[kept] - exact[kept]) / exact[kept]).abs().max())


def times(case: Case, repeats: int) -> dict[str, Any]:
    """Milliseconds of each way and the exact one's part of them: medians, measured in turns."""
    ways: Mapping[str, Callable[[], Tensor]] = {
        "exact": case.exact,
        "loop": case.loop,
        "batched": case.batched,
        "dense": case.dense,
    }
    for way in ways.values():
        way()
    rounds = [{name: seconds(way) for name, way in ways.items()} for _ in range(repeats)]
    return {
        "atoms": case.atoms,
        "milliseconds": {name: 1e3 * median(one[name] for one in rounds) for name in ways},
        "ratios": {name: median(one["exact"] / one[name] for one in rounds) for name in ways},
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
        uq = rg.LastLayerRigidity(trained.net.to(device()), forward=energies)
        known, held = data.environments(data.train), data.environments(data.valid)
        uq.fit(known.batches(BATCH), sample_weight=loss_weight, progress=False)
        how = WAYS[MAIN]
        uq.calibrate(held.batches(BATCH), criterion=how.criterion, noise=how.noise, progress=False)
        del known, held
        order = torch.Generator().manual_seed(seed)
        few = data.test[torch.randperm(len(data.test), generator=order)[:1000]]
        return measured(uq, data.molecules.structures.picked(few), seed=seed, **sizes)
