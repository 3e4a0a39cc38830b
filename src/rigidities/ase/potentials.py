"""Potentials of other libraries: fitted and calibrated on lists of `ase.Atoms`.

    host = rigidities.ase.mace(model)  # or schnetpack, pyg, systems
    host.fit(train_atoms)  # which carry their energies
    print(host.calibrate(valid_atoms))
    atoms.calc = host.calculator(limits={"energy_std": 0.1})

A host knows how its library makes batches of structures and calls its model; the error bars are
those of the `LastLayerRigidity` in `host.uq`, which takes `host.batches(some_atoms)` everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ase.calculators.calculator import PropertyNotImplementedError
from ase.neighborlist import neighbor_list
from torch import Tensor, nn

from ase import Atoms

from ..calibration.report import CalibrationReport
from ..last_layer.rigidity import LastLayerRigidity
from ..models.calling import ForwardFunction
from ..models.shadow import placement
from .calculator import RigidityCalculator
from .structures import Baseline, baseline_energy, checked_baseline, no_baseline

BATCH_SIZE = 8
"""Structures in a batch."""

MACE_INPUTS = {"batch", "cell", "edge_index", "head", "node_attrs", "positions", "ptr", "shifts"}
"""Keys of its batches that an energy is computed from."""


@dataclass
class Potential:
    """A trained potential and the way from `ase.Atoms` to its batches.

    Attributes:
        model: the trained module, never changed.
        collate: structures -> one batch, a mapping.
        forward: (model, batch) -> energies, or a mapping of results in which they stand at
        output: a key.
        wrt: key of the batch that holds positions, and
        strained: of what moves with them under a strain, for stress.
        layer: of the readout; by default the last linear map before the output.
        weight: callable(atoms) -> weight of its energy in the training loss; None for one.
        energy_unit, length_unit, baseline: as in `RigidityCalculator`; energies that structures
            carry are in eV, the baseline is taken off them.
        energy_key, forces_key: of `atoms.info` and `atoms.arrays`; by default the calculator's, or
            "energy" and "forces".
        uq: the error bars, around the model.
        species: atomic numbers that were fitted.
    """

    model: nn.Module
    collate: Callable[[Sequence[Atoms]], Mapping[str, Any]]
    forward: ForwardFunction
    output: str | None = None
    wrt: str = "pos"
    strained: tuple[str, ...] = ()
    layer: str | list[str] | None = None
    weight: Callable[[Atoms], float] | None = None
    energy_unit: float = 1.0
    length_unit: float = 1.0
    baseline: Baseline = no_baseline
    energy_key: str | None = None
    forces_key: str | None = None
    uq: LastLayerRigidity = field(init=False)
    species: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.baseline = checked_baseline(self.baseline)
        self.uq = LastLayerRigidity(
            self.model, layer=self.layer, forward=self.forward, output=self.output
        )

    def fit(
        self,
        train: Sequence[Atoms],
        *,
        forces_weight: float | None = None,
        batch_size: int = BATCH_SIZE,
        **options: Any,
    ) -> Potential:
        """Accumulate the Gram over the structures that the model was trained on.

        Args:
            train: with their energies.
            forces_weight: of the square of one component of a force in the training loss, beside
                `weight`; None where forces were not learnt.
            batch_size: structures at once.
            options: further ones of `LastLayerRigidity.fit`.
        """
        if forces_weight is not None:
            options |= {"gradients": self.wrt, "gradient_weight": forces_weight}
            options["gradient_target"] = "slope"
        if self.weight is not None:
            options["sample_weight"] = lambda batch: batch["sample_weight"]
        self.uq.fit(self._labelled(train, batch_size, forces_weight is not None), **options)
        self.species = {int(number) for atoms in train for number in atoms.numbers}
        return self

    def calibrate(
        self,
        valid: Sequence[Atoms],
        *,
        forces: bool = False,
        batch_size: int = BATCH_SIZE,
        **options: Any,
    ) -> CalibrationReport:
        """Calibrate on structures that the model has not seen; with `forces`, those on theirs."""
        if forces:
            options |= {"gradients": self.wrt, "gradient_target": "slope"}
        return self.uq.calibrate(self._labelled(valid, batch_size, forces), **options)

    def calculator(self, **options: Any) -> RigidityCalculator:
        """For `atoms.calc`; the options are those of `RigidityCalculator`."""
        known: dict[str, Any] = {"sample_weight": self.weight, "species": self.species or None}
        for name in ("wrt", "strained", "energy_unit", "length_unit", "baseline"):
            known[name] = getattr(self, name)
        inputs = lambda atoms: self.collate([atoms])  # noqa: E731
        return RigidityCalculator(self.uq, inputs=inputs, **{**known, **options})

    def batches(self, frames: Sequence[Atoms], batch_size: int = BATCH_SIZE) -> list[Any]:
        """Structures as `uq` takes them, without labels."""
        return [self.collate(part) for part in _parts(frames, batch_size)]

    def _labelled(self, frames: Sequence[Atoms], size: int, forces: bool) -> list[Any]:
        return [
            {**self.collate(part), **self._labels(part, forces)} for part in _parts(frames, size)
        ]

    def _labels(self, frames: Sequence[Atoms], forces: bool) -> dict[str, Tensor]:
        energies = [
            float(_label(atoms, "energy", self.energy_key, atoms.info))
            - baseline_energy(self.baseline, atoms)
            for atoms in frames
        ]
        labels = {"y": torch.tensor(energies, dtype=torch.float64) / self.energy_unit}
        if self.weight is not None:
            labels["sample_weight"] = torch.tensor([self.weight(atoms) for atoms in frames])
        if forces:
            found = [_label(atoms, "forces", self.forces_key, atoms.arrays) for atoms in frames]
            slopes = -self.length_unit / self.energy_unit * np.concatenate(found)
            labels["slope"] = torch.tensor(slopes, dtype=torch.float64)
        return labels


def mace(model: Any, *, head: str | None = None, **options: Any) -> Potential:
    """A MACE that gives energies: a module, or a `MACECalculator` with one.

    Weights are those of its default loss, of energies per atom; else pass `weight=`.

    Args:
        model: as trained, or the calculator around it.
        head: of a model with several; by default the calculator's, or the last one.
        options: further attributes of `Potential`.
    """
    from mace import data
    from mace.tools import AtomicNumberTable, torch_geometric, torch_tools

    if hasattr(model, "models"):
        if len(model.models) > 1:
            raise ValueError(f"Expected one model, got {len(model.models)}. Give one of .models.")
        head, options = head or model.head, {"energy_unit": model.energy_units_to_eV, **options}
        (model,) = model.models
    table = AtomicNumberTable([int(number) for number in model.atomic_numbers])
    heads, (_, dtype) = list(getattr(model, "heads", ["Default"])), placement(model)
    known = {"z_table": table, "cutoff": float(model.r_max), "heads": heads}

    def collate(frames: Sequence[Atoms]) -> Mapping[str, Any]:
        configs = [data.config_from_atoms(a, head_name=head or heads[-1]) for a in frames]
        with torch_tools.default_dtype(dtype):
            graphs = [data.AtomicData.from_config(config, **known) for config in configs]
            whole = torch_geometric.Batch.from_data_list(graphs).to_dict()
        return {key: whole[key] for key in MACE_INPUTS}

    def forward(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        return model(dict(batch), compute_force=False)

    options = {"layer": "readouts", "weight": lambda atoms: 1 / len(atoms) ** 2, **options}
    moved = ("cell", "shifts")
    return Potential(model, collate, forward, "energy", "positions", moved, **options)


def schnetpack(
    model: Any, *, converter: Any = None, output: str = "energy", **options: Any
) -> Potential:
    """A `NeuralNetworkPotential` of schnetpack.

    Args:
        model: as trained; whether it computes forces does not matter.
        converter: an `AtomsConverter`; by default with ASE's neighbours within the
            representation's cutoff.
        output: key of the energy.
        options: further attributes of `Potential`.
    """
    from schnetpack.interfaces import AtomsConverter
    from schnetpack.transform import ASENeighborList

    if converter is None:
        neighbours = ASENeighborList(cutoff=float(model.representation.cutoff))
        converter = AtomsConverter(neighbours, dtype=placement(model)[1])

    def forward(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        return model(dict(batch))  # which it adds its results to

    moved = ("_cell", "_offsets")
    return Potential(model, converter, forward, output, "_positions", moved, **options)


def pyg(
    model: nn.Module,
    *,
    forward: ForwardFunction | None = None,
    cutoff: float | None = None,
    **options: Any,
) -> Potential:
    """A model of PyTorch Geometric's kind: `model(z, pos, batch)`, as its SchNet and DimeNet.

    Args:
        model: as trained.
        forward: (model, batch) -> energies, for another call: a `torch_geometric.data.Batch` with
            `z`, `pos`, `cell` (B, 3, 3), `batch`, and with a cutoff `edge_index` and `shifts`: the
            vector of a pair is `pos[j] - pos[i] + shifts`, for i, j = edge_index. Then there is a
            stress.
        cutoff: Å up to which atoms are neighbours.
        options: further attributes of `Potential`.
    """
    from torch_geometric.data import Batch

    def call(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        if forward is None:
            return model(batch["z"], batch["pos"], batch["batch"]).flatten()
        return forward(model, Batch(**batch))

    moved = ("cell",) if cutoff is None else ("cell", "shifts")
    options = {"strained": () if forward is None else moved, **options}
    return Potential(model, _graphs(model, cutoff, options), call, **options)


def systems(
    model: nn.Module,
    *,
    system: Callable[..., Any],
    forward: Callable[[nn.Module, list[Any]], Tensor],
    **options: Any,
) -> Potential:
    """A model of lists of systems, as those of metatomic: each has types, positions, cell and pbc.

    Args:
        model: as trained.
        system: called with types=, positions=, cell=, pbc= of one structure, as
            `metatomic.torch.System` is; or a function that adds neighbour lists too,
            differentiable by positions and cell.
        forward: (model, systems) -> energies, (N,) or (N, 1).
        options: further attributes of `Potential`.
    """

    def call(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        counts = batch["ptr"].diff().tolist()
        parts = zip(batch["z"].split(counts), batch["pos"].split(counts), strict=True)
        cells = zip(parts, batch["cell"], batch["pbc"], strict=True)
        return forward(
            model, [system(types=z, positions=x, cell=cell, pbc=pbc) for (z, x), cell, pbc in cells]
        )

    options = {"strained": ("cell",), **options}
    return Potential(model, _graphs(model, None, options), call, **options)


def _graphs(
    model: nn.Module, cutoff: float | None, options: Mapping[str, Any]
) -> Callable[[Sequence[Atoms]], dict[str, Tensor]]:
    """Structures -> one graph, see `pyg`, in the model's precision and unit."""
    (_, dtype), unit = placement(model), options.get("length_unit", 1.0)

    def lengths(arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.tensor(np.concatenate(arrays) / unit, dtype=dtype)

    def collate(frames: Sequence[Atoms]) -> dict[str, Tensor]:
        counts = torch.tensor([len(atoms) for atoms in frames])
        ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        found = {
            "z": torch.tensor(np.concatenate([atoms.numbers for atoms in frames])),
            "pos": lengths([atoms.positions for atoms in frames]),
            "cell": lengths([atoms.cell.array[None] for atoms in frames]),
            "pbc": torch.tensor(np.stack([atoms.pbc for atoms in frames])),
            "batch": torch.arange(len(frames)).repeat_interleave(counts),
            "ptr": ptr,
        }
        if cutoff is not None:
            lists = [neighbor_list("ijS", atoms, cutoff) for atoms in frames]
            pairs = zip(lists, ptr.tolist(), strict=False)
            edges = [np.stack([i, j]) + start for (i, j, _), start in pairs]
            found["edge_index"] = torch.tensor(np.concatenate(edges, axis=1))
            cells = zip(lists, frames, strict=True)
            found["shifts"] = lengths([s @ atoms.cell.array for (_, _, s), atoms in cells])
        return found

    return collate


def _parts(frames: Sequence[Atoms], size: int) -> Iterator[list[Atoms]]:
    if isinstance(frames, Atoms):
        raise TypeError("Expected a list of ase.Atoms, got one structure. Put it into a list.")
    frames = list(frames)
    for start in range(0, len(frames), size):
        yield frames[start : start + size]


def _label(atoms: Atoms, name: str, key: str | None, kept: Mapping[str, Any]) -> Any:
    """An energy or forces that a structure carries."""
    if key is None and atoms.calc is not None:
        with suppress(PropertyNotImplementedError):
            return atoms.calc.get_property(name, atoms)
    if (key or name) not in kept:
        where = "info" if name == "energy" else "arrays"
        raise ValueError(
            f"{atoms.symbols} carries no {name}: there is no {key or name!r} in atoms.{where}. "
            f"Name the key that holds it with {name}_key=, or set a calculator."
        )
    return kept[key or name]
