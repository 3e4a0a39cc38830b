"""Potentials of other libraries, fitted and calibrated on lists of `ase.Atoms`.

    host = rigidities.ase.mace(model)  # or schnetpack, graphs
    host.fit(train_atoms)  # which carry their energies
    print(host.calibrate(valid_atoms).uq.calibration_report)
    atoms.calc = host.calculator(limits={"energy_std": 0.1})

The error bars are those of the `LastLayerRigidity` in `host.uq`, all of whose methods accept
`host.batches(some_atoms)`. If the fit has weights, predictions with noise need them as well:
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

from ..last_layer.gradients.loss import GradientLoss
from ..last_layer.rigidity import LastLayerRigidity
from ..models.calling import ForwardFunction
from ..models.shadow import placement
from ..notices import missing, notify
from .calculator import WITHOUT_CELL, RigidityCalculator
from .structures import Baseline, baseline_energy, checked_baseline, no_baseline

__all__ = ["Potential", "graphs", "mace", "schnetpack"]


@dataclass
class Potential:
    """A trained potential, with the conversion of `ase.Atoms` to its batches.

    Attributes:
        model: The trained module, which is never changed.
        collate: list of structures -> one batch, a mapping.
        forward: (model, batch) -> energies, or a mapping that contains them.
        output: The key of the energies in such a mapping.
        wrt: The key of the positions in the batch.
        strained: Keys of the entries that move with the positions under a strain, for the stress.
        layer: The readout's layer; by default the last linear map before the output.
        weight: callable(atoms) -> weight of its energy in the training loss; None for one.
        energy_unit: As in `RigidityCalculator`; structures carry eV.
        length_unit: As in `RigidityCalculator`; structures carry Å.
        baseline: As in `RigidityCalculator`.
        energy_key: The energy's key in `atoms.info`; by default the calculator's energy, or
            "energy".
        forces_key: The forces' key in `atoms.arrays`; by default the calculator's forces, or
            "forces".
        batch_size: Structures in a batch.
        uq: The `LastLayerRigidity` of the model.
        labels: The labels of the fit's structures: "energy", perhaps "forces".
        species: Atomic numbers of the fit's structures.
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
        self.uq = LastLayerRigidity(
            self.model, forward=self.forward, layer=self.layer, output=self.output
        )

    def fit(
        self, structures: Iterable[Atoms], *, forces_weight: float | None = None, **options: Any
    ) -> Potential:
        """Fit the error bars on the structures that the model was trained on.

        Args:
            structures: Structures with their energies, and forces if the model was trained on them.
            forces_weight: Weight of the square of one component of a force in the training loss,
                besides `weight`; 0 if the loss had no forces, and `calibrate` is to find their
                scale; None without forces.
            options: Options of `LastLayerRigidity.fit`, which override the choices made here.

        Returns:
            This potential.
        """
        if forces_weight is not None:
            loss = GradientLoss(self.wrt, weight=forces_weight, target="slope")
            options.setdefault("gradient_loss", loss)
        if self.weight is not None:
            options.setdefault("sample_weight", lambda batch: batch["sample_weight"])
        frames = _as_list(structures)
        labels: tuple[str, ...] = ("energy",)
        gradient_loss = options.get("gradient_loss")
        if gradient_loss is not None and gradient_loss.target == "slope":
            labels = ("energy", "forces")
        self.uq.fit(self.batches(frames, labels), **options)
        self.labels = labels
        self.species = set()
        for atoms in frames:
            self.species.update(atoms.numbers.tolist())
        return self

    def calibrate(self, structures: Iterable[Atoms], **options: Any) -> Potential:
        """Calibrate on held-out structures, and on their forces if the fit had them.

        Args:
            structures: Structures with the same labels as those of the fit.
            options: Options of `LastLayerRigidity.calibrate`.

        Returns:
            This potential. The report is `uq.calibration_report`.
        """
        self.uq.calibrate(self.batches(structures, self.labels), **options)
        return self

    def calculator(self, **options: Any) -> RigidityCalculator:
        """A calculator for `atoms.calc`.

        Args:
            options: Options of `RigidityCalculator`, which override those of this potential.
        """
        options.setdefault("wrt", self.wrt)
        options.setdefault("strained", self.strained)
        options.setdefault("energy_unit", self.energy_unit)
        options.setdefault("length_unit", self.length_unit)
        options.setdefault("baseline", self.baseline)
        options.setdefault("species", self.species or None)
        options.setdefault("sample_weight", self.weight)

        def inputs(atoms: Atoms) -> Mapping[str, Any]:
            """The batch of one structure."""
            return self.collate([atoms])

        return RigidityCalculator(self.uq, inputs=inputs, **options)

    def batches(self, structures: Iterable[Atoms], labels: Sequence[str] = ()) -> list[Any]:
        """Structures as `uq` expects them.

        Args:
            structures: Any number of them.
            labels: What the batches contain besides the inputs: "energy", "forces".
        """
        frames = _as_list(structures)
        batches = []
        for start in range(0, len(frames), self.batch_size):
            batch_frames = frames[start : start + self.batch_size]
            batches.append(
                {**self.collate(batch_frames), **self._label_tensors(batch_frames, labels)}
            )
        return batches

    def _label_tensors(self, frames: list[Atoms], labels: Sequence[str]) -> dict[str, Tensor]:
        """Weights, energies (B,) and slopes (N, 3) of structures in the model's units, by key."""
        tensors: dict[str, Tensor] = {}
        if self.weight is not None:
            weights = [self.weight(atoms) for atoms in frames]
            tensors["sample_weight"] = torch.tensor(weights, dtype=torch.float64)
        if "energy" in labels:
            energies = [_label(atoms, "energy", self.energy_key, atoms.info) for atoms in frames]
            baselines = [baseline_energy(self.baseline, atoms) for atoms in frames]
            targets = np.subtract(energies, baselines) / self.energy_unit
            tensors["y"] = torch.tensor(targets, dtype=torch.float64)
        if "forces" in labels:
            forces = [_label(atoms, "forces", self.forces_key, atoms.arrays) for atoms in frames]
            # The derivative of the energy with respect to positions is minus the force.
            slopes = -self.length_unit / self.energy_unit * np.concatenate(forces)
            tensors["slope"] = torch.tensor(slopes, dtype=torch.float64)
        return tensors


def mace(model: Any, *, head: str | None = None, **options: Any) -> Potential:
    """A MACE model.

    The weights are those of MACE's default loss, of energies per atom; for another, pass `weight=`.

    Args:
        model: The model as trained, or a `MACECalculator` around it.
        head: The head of a model with several; by default the calculator's, or the last.
        options: Further attributes of `Potential`.

    Raises:
        ValueError: There are several models, the model is not for Å, or has no such head.
    """
    try:
        from mace import data
        from mace.tools import AtomicNumberTable, torch_geometric, torch_tools
    except ModuleNotFoundError as error:
        missing(error, "pip install mace-torch", "mace")

    if hasattr(model, "models"):  # a calculator
        if len(model.models) > 1:
            raise ValueError(f"Expected one model, got {len(model.models)}. Pass one of .models.")
        if model.length_units_to_A != 1:
            raise ValueError("length_units_to_A must be 1. Pass the model itself if it expects Å.")
        head = head or model.head
        options.setdefault("energy_unit", model.energy_units_to_eV)
        (model,) = model.models
    table = AtomicNumberTable([int(number) for number in model.atomic_numbers])
    cutoff = float(model.r_max)
    heads = list(getattr(model, "heads", ["Default"]))
    head = head or heads[-1]
    if head not in heads:
        raise ValueError(f"Expected one of the model's heads, {heads}, got {head!r}.")
    _, dtype = placement(model)

    def collate(frames: list[Atoms]) -> Mapping[str, Any]:
        unknown: set[str] = set()
        for atoms in frames:
            unknown.update(atoms[~np.isin(atoms.numbers, table.zs)].symbols)
        if unknown:
            raise ValueError(f"This MACE has no {', '.join(sorted(unknown))}. Leave these out.")
        configs = [data.config_from_atoms(atoms, head_name=head) for atoms in frames]
        with torch_tools.default_dtype(dtype):
            atomic_data = [
                data.AtomicData.from_config(config, z_table=table, cutoff=cutoff, heads=heads)
                for config in configs
            ]
            batch: dict[str, Any] = torch_geometric.Batch.from_data_list(atomic_data).to_dict()
        return batch

    def forward(model: nn.Module, batch: Any) -> Any:
        return model(dict(batch), compute_force=False)

    options.setdefault("layer", "readouts")
    options.setdefault("weight", lambda atoms: 1 / len(atoms) ** 2)
    return Potential(
        model,
        collate,
        forward,
        output="energy",
        wrt="positions",
        strained=("cell", "shifts"),
        **options,
    )


def schnetpack(
    model: Any, *, converter: Any = None, output: str = "energy", **options: Any
) -> Potential:
    """A `NeuralNetworkPotential` of schnetpack.

    Args:
        model: The model as trained.
        converter: An `AtomsConverter`; by default with ASE's neighbours within the cutoff of the
            representation.
        output: The key of the energy in what the model returns.
        options: Further attributes of `Potential`.

    Raises:
        TypeError: The model has no representation with a cutoff.
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
        _, dtype = placement(model)
        converter = AtomsConverter(neighbours, dtype=dtype)

    def forward(model: nn.Module, batch: Any) -> Any:
        # A copy of the mapping, since the model adds its results to it.
        return model(dict(batch))

    return Potential(
        model,
        converter,
        forward,
        output=output,
        wrt="_positions",
        strained=("_cell", "_offsets"),
        **options,
    )


def graphs(
    model: nn.Module,
    forward: ForwardFunction | None = None,
    *,
    cutoff: float | None = None,
    **options: Any,
) -> Potential:
    """A model of graphs of atoms, such as those of PyTorch Geometric.

    Args:
        model: The model as trained.
        forward: (model, batch) -> energies; by default `model(z, pos, batch)`, as SchNet and
            DimeNet are called. The batch is a mapping with `z`, `pos`, `cell` (B, 3, 3), `pbc`,
            `batch` and `ptr`, for `torch_geometric.data.Batch(**batch)`; with a cutoff also
            `edge_index` and `shifts`: a pair's vector is `pos[j] - pos[i] + shifts`. Only with a
            `forward` is there a stress.
        cutoff: Distance in Å up to which atoms are neighbours.
        options: Further attributes of `Potential`.
    """
    _, dtype = placement(model)
    length_unit = options.get("length_unit", 1.0)

    def collate(frames: list[Atoms]) -> dict[str, Tensor]:
        if forward is None and any(atoms.pbc.any() for atoms in frames):
            notify(WITHOUT_CELL.format("a forward"))
        numbers = np.concatenate([atoms.numbers for atoms in frames])
        positions = np.concatenate([atoms.positions / length_unit for atoms in frames])
        cells = np.stack([atoms.cell.array / length_unit for atoms in frames])
        counts = torch.tensor([len(atoms) for atoms in frames])
        batch = {
            "z": torch.tensor(numbers),
            "pos": torch.tensor(positions).to(dtype),
            "cell": torch.tensor(cells).to(dtype),
            # Where each structure's atoms begin, (B + 1,), and which structure each belongs to.
            "ptr": nn.functional.pad(counts.cumsum(0), (1, 0)),
            "batch": torch.arange(len(frames)).repeat_interleave(counts),
            "pbc": torch.tensor(np.stack([atoms.pbc for atoms in frames])),
        }
        if cutoff is not None:
            batch.update(_neighbours(frames, batch, cutoff))
        return batch

    if forward is not None:
        options.setdefault("strained", ("cell",) if cutoff is None else ("cell", "shifts"))
    return Potential(model, collate, forward or _plain_forward, **options)


def _plain_forward(model: nn.Module, batch: Any) -> Tensor:
    """The energies of a model that is called as SchNet is."""
    energies: Tensor = model(batch["z"], batch["pos"], batch["batch"])
    return energies.flatten()


def _neighbours(
    frames: list[Atoms], batch: Mapping[str, Tensor], cutoff: float
) -> dict[str, Tensor]:
    """Pairs of neighbours (2, E), and the shifts (E, 3) of the second to its image."""
    pairs = []
    shifts = []
    for atoms, start, cell in zip(frames, batch["ptr"], batch["cell"], strict=False):
        i, j, images = neighbor_list("ijS", atoms, cutoff)
        pairs.append(torch.tensor(np.stack([i, j])) + start)
        shifts.append(torch.tensor(images).to(cell) @ cell)
    return {"edge_index": torch.cat(pairs, 1), "shifts": torch.cat(shifts)}


def _as_list(structures: Iterable[Atoms]) -> list[Atoms]:
    """Structures as a list; refuses a single structure."""
    if hasattr(structures, "positions"):
        raise TypeError("Expected a list of ase.Atoms, got one structure. Put it into a list.")
    return list(structures)


def _label(atoms: Atoms, name: str, key: str | None, entries: Mapping[str, Any]) -> Any:
    """The energy or the forces of a structure, from its calculator, `info` or `arrays`.

    Args:
        atoms: The structure.
        name: "energy" or "forces".
        key: The key of the entry; None for the calculator's value, or the entry named `name`.
        entries: The structure's `info` or `arrays`.

    Raises:
        ValueError: There is no such entry.
    """
    if key is None and atoms.calc is not None:
        with suppress(PropertyNotImplementedError):
            return atoms.calc.get_property(name, atoms)
    key = key or name
    if key not in entries:
        where = "info" if name == "energy" else "arrays"
        raise ValueError(
            f"{atoms.symbols} has no {name}: there is no {key!r} in atoms.{where}. Pass its key "
            f"with {name}_key=, or set a calculator."
        )
    return entries[key]
