"""Potentials of other libraries: fitted and calibrated on lists of `ase.Atoms`.

    host = rigidities.ase.mace(model)  # or schnetpack, graphs
    host.fit(train_atoms)  # which carry their energies
    print(host.calibrate(valid_atoms))
    atoms.calc = host.calculator(limits={"energy_std": 0.1})

The error bars are those of the `LastLayerRigidity` in `host.uq`, which takes
`host.batches(some_atoms)` everywhere. Where the fit has weights, so have bars with noise:
`host.uq.predict(batches, sample_weight=lambda batch: batch["sample_weight"])`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
from ..notices import missing, notify
from .calculator import WITHOUT_CELL, RigidityCalculator
from .structures import Baseline, baseline_energy, checked_baseline, no_baseline


@dataclass
class Potential:
    """A trained potential and the way from `ase.Atoms` to its batches.

    Attributes:
        model: the trained module, never changed.
        collate: list of structures -> one batch, a mapping.
        forward: (model, batch) -> energies, or a mapping that holds them at the key `output`.
        wrt: key of the batch that holds positions.
        strained: keys of what moves with them under a strain, for stress.
        layer: of the readout; by default the last linear map before the output.
        weight: callable(atoms) -> weight of its energy in the training loss; None for one.
        energy_unit, length_unit, baseline: as in `RigidityCalculator`; structures carry eV and Å.
        energy_key, forces_key: of `atoms.info` and `atoms.arrays`; by default the calculator's, or
            "energy" and "forces".
        uq: the error bars, around the model; `labels` and `species` are those of the fit.
    """

    model: nn.Module = field(repr=False)
    collate: Callable[[list[Atoms]], Mapping[str, Any]] = field(repr=False)
    forward: ForwardFunction = field(repr=False)
    output: str | None = None
    wrt: str = "pos"
    strained: tuple[str, ...] = ()
    layer: str | list[str] | None = None
    weight: Callable[[Atoms], float] | None = field(default=None, repr=False)
    energy_unit: float = 1.0
    length_unit: float = 1.0
    baseline: Baseline = field(default=no_baseline, repr=False)
    energy_key: str | None = None
    forces_key: str | None = None
    batch_size: int = 8
    uq: LastLayerRigidity = field(init=False, repr=False)
    labels: tuple[str, ...] = field(init=False, default=("energy",))
    species: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.baseline = checked_baseline(self.baseline)
        options: dict[str, Any] = {"layer": self.layer, "output": self.output}
        self.uq = LastLayerRigidity(self.model, forward=self.forward, **options)

    def fit(
        self, train: Iterable[Atoms], *, forces_weight: float | None = None, **options: Any
    ) -> Potential:
        """Accumulate the Gram over the structures that the model was trained on.

        `forces_weight` is that of the square of one component of a force in the training loss,
        beside `weight`; `options` are those of `LastLayerRigidity.fit`, and go first.
        """
        if forces_weight is not None:
            options = {"gradients": self.wrt, "gradient_weight": forces_weight, **options}
        if self.weight is not None:
            options.setdefault("sample_weight", lambda batch: batch["sample_weight"])
        frames, labels = _frames(train), _labelled(options, ("energy",))
        self.uq.fit(self.batches(frames, labels), **options)
        self.labels = labels
        self.species = {int(number) for atoms in frames for number in atoms.numbers}
        return self

    def calibrate(self, valid: Iterable[Atoms], **options: Any) -> CalibrationReport:
        """Calibrate on structures that the model has not seen; forces too, if they were fitted."""
        labels = _labelled(options, self.labels)
        return self.uq.calibrate(self.batches(valid, labels), **options)

    def calculator(self, **options: Any) -> RigidityCalculator:
        """For `atoms.calc`; the options are those of `RigidityCalculator`."""
        known: dict[str, Any] = {"sample_weight": self.weight, "species": self.species or None}
        for name in ("wrt", "strained", "energy_unit", "length_unit", "baseline"):
            known[name] = getattr(self, name)
        inputs = lambda atoms: self.collate([atoms])  # noqa: E731
        return RigidityCalculator(self.uq, inputs=inputs, **{**known, **options})

    def batches(self, frames: Iterable[Atoms], labels: Sequence[str] = ()) -> list[Any]:
        """Structures as `uq` takes them, with those labels ("energy", "forces")."""
        frames, step = _frames(frames), self.batch_size
        parts = [frames[start : start + step] for start in range(0, len(frames), step)]
        return [{**self.collate(part), **self._labels(part, labels)} for part in parts]

    def _labels(self, frames: list[Atoms], names: Sequence[str]) -> dict[str, Tensor]:
        found: dict[str, Any] = {}
        if self.weight is not None:
            found["sample_weight"] = [self.weight(atoms) for atoms in frames]
        if "energy" in names:
            energies = [_label(atoms, "energy", self.energy_key, atoms.info) for atoms in frames]
            fixed = [baseline_energy(self.baseline, atoms) for atoms in frames]
            found["y"] = np.subtract(energies, fixed) / self.energy_unit
        if "forces" in names:
            forces = [_label(atoms, "forces", self.forces_key, atoms.arrays) for atoms in frames]
            found["slope"] = -self.length_unit / self.energy_unit * np.concatenate(forces)
        return {key: torch.tensor(value, dtype=torch.float64) for key, value in found.items()}


def mace(model: Any, *, head: str | None = None, **options: Any) -> Potential:
    """A MACE, as trained, or a `MACECalculator` around it; `options` are those of `Potential`.

    Weights are those of its default loss, of energies per atom; else pass `weight=`. `head` is that
    of a model with several: by default the calculator's, or the last.
    """
    try:
        from mace import data
        from mace.tools import AtomicNumberTable, torch_geometric, torch_tools
    except ModuleNotFoundError as error:
        missing(error, "pip install mace-torch", "mace")

    if hasattr(model, "models"):
        if len(model.models) > 1:
            raise ValueError(f"Expected one model, got {len(model.models)}. Give one of .models.")
        if model.length_units_to_A != 1:
            raise ValueError("length_units_to_A must be 1. Give the model itself, if it is for Å.")
        head, options = head or model.head, {"energy_unit": model.energy_units_to_eV, **options}
        (model,) = model.models
    table = AtomicNumberTable([int(number) for number in model.atomic_numbers])
    heads, (_, dtype) = list(getattr(model, "heads", ["Default"])), placement(model)
    known = {"z_table": table, "cutoff": float(model.r_max), "heads": heads}
    if (head := head or heads[-1]) not in heads:
        raise ValueError(f"Expected one of the model's heads, {heads}, got {head!r}.")

    def collate(frames: list[Atoms]) -> Mapping[str, Any]:
        strange = {symbol for a in frames for symbol in a[~np.isin(a.numbers, table.zs)].symbols}
        if strange:
            raise ValueError(f"This MACE has no {', '.join(sorted(strange))}. Leave these out.")
        configs = [data.config_from_atoms(a, head_name=head) for a in frames]
        with torch_tools.default_dtype(dtype):
            graphs = [data.AtomicData.from_config(config, **known) for config in configs]
            batch: dict[str, Any] = torch_geometric.Batch.from_data_list(graphs).to_dict()
        return batch

    forward = lambda model, batch: model(dict(batch), compute_force=False)  # noqa: E731
    options = {"layer": "readouts", "weight": lambda atoms: 1 / len(atoms) ** 2, **options}
    moved = ("cell", "shifts")
    return Potential(model, collate, forward, "energy", "positions", moved, **options)


def schnetpack(
    model: Any, *, converter: Any = None, output: str = "energy", **options: Any
) -> Potential:
    """A `NeuralNetworkPotential` of schnetpack; `output` is the key of its energy.

    The `converter` is an `AtomsConverter`, by default with ASE's neighbours within the cutoff of
    the representation; `options` are those of `Potential`.
    """
    if converter is None:
        try:
            from schnetpack.interfaces import AtomsConverter
            from schnetpack.transform import ASENeighborList
        except ModuleNotFoundError as error:
            missing(error, "pip install schnetpack", "schnetpack")
        if not hasattr(model, "representation"):
            raise TypeError(f"Expected a NeuralNetworkPotential, got a {type(model).__name__}.")
        neighbours = ASENeighborList(cutoff=float(model.representation.cutoff))
        converter = AtomsConverter(neighbours, dtype=placement(model)[1])

    forward = lambda model, batch: model(dict(batch))  # noqa: E731, it adds its results to it
    moved = ("_cell", "_offsets")
    return Potential(model, converter, forward, output, "_positions", moved, **options)


def graphs(
    model: nn.Module,
    forward: ForwardFunction | None = None,
    *,
    cutoff: float | None = None,
    **options: Any,
) -> Potential:
    """A model of graphs of atoms, as those of PyTorch Geometric, or of lists of systems.

    Args:
        model: as trained.
        forward: (model, batch) -> energies; by default `model(z, pos, batch)`, as SchNet and
            DimeNet are called. The batch is a mapping with `z`, `pos`, `cell` (B, 3, 3), `pbc`,
            `batch` and `ptr`, for `torch_geometric.data.Batch(**batch)`; with a cutoff also
            `edge_index` and `shifts`: a pair's vector is `pos[j] - pos[i] + shifts`. Where it is
            given, there is a stress.
        cutoff: Å up to which atoms are neighbours.
        options: further attributes of `Potential`.
    """
    (_, dtype), unit = placement(model), options.get("length_unit", 1.0)

    def collate(frames: list[Atoms]) -> dict[str, Tensor]:
        if forward is None and any(atoms.pbc.any() for atoms in frames):
            notify(WITHOUT_CELL.format("a forward"))
        columns = [(a.numbers, a.positions / unit, a.cell.array[None] / unit) for a in frames]
        z, pos, cell = (torch.tensor(np.concatenate(part)) for part in zip(*columns, strict=True))
        found = {"z": z, "pos": pos.to(dtype), "cell": cell.to(dtype)}
        counts = torch.tensor([len(atoms) for atoms in frames])
        found["ptr"] = nn.functional.pad(counts.cumsum(0), (1, 0))
        found["batch"] = torch.arange(len(frames)).repeat_interleave(counts)
        found["pbc"] = torch.tensor(np.stack([atoms.pbc for atoms in frames]))
        return found if cutoff is None else found | _neighbours(frames, found, cutoff)

    plain = lambda model, batch: model(batch["z"], batch["pos"], batch["batch"]).flatten()  # noqa: E731
    moved = ("cell",) if cutoff is None else ("cell", "shifts")
    options = {"strained": () if forward is None else moved, **options}
    return Potential(model, collate, forward or plain, **options)


def _neighbours(
    frames: list[Atoms], batch: Mapping[str, Tensor], cutoff: float
) -> dict[str, Tensor]:
    pairs, shifts = [], []
    for atoms, start, cell in zip(frames, batch["ptr"], batch["cell"], strict=False):
        i, j, images = neighbor_list("ijS", atoms, cutoff)
        pairs.append(torch.tensor(np.stack([i, j])) + start)
        shifts.append(torch.tensor(images).to(cell) @ cell)
    return {"edge_index": torch.cat(pairs, 1), "shifts": torch.cat(shifts)}


def _frames(given: Iterable[Atoms]) -> list[Atoms]:
    if hasattr(given, "positions"):
        raise TypeError("Expected a list of ase.Atoms, got one structure: put it into a list.")
    return list(given)


def _labelled(options: dict[str, Any], labels: tuple[str, ...]) -> tuple[str, ...]:
    """What structures must carry; the options are told where the batches have it."""
    if options.get("gradients") is None:
        return labels
    target = options.setdefault("gradient_target", "slope")
    return ("energy", "forces") if target == "slope" else ("energy",)


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
