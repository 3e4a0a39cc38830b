"""The calculator: results for ASE, one structure at a time, up to limits on their error bars.

ASE asks for properties of a structure. `RigidityCalculator.calculate` checks the structure, turns
it into the model's inputs and predicts the energy. If forces or stress are requested, it
differentiates the energy with respect to positions and strain in the same pass. It fills `results`
in eV and Å, and raises an `UncertainStructureError` if an error bar exceeds its limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from ase.calculators import calculator as host
from ase.calculators.singlepoint import SinglePointCalculator
from ase.outputs import Properties, all_outputs

from ase import Atoms

from ..data.batches import Batch
from ..data.slots import InputName, Slot
from ..last_layer.doors import feed_of
from ..last_layer.rigidity import LastLayerRigidity
from ..models.shadow import input_names, placement
from ..notices import notify
from ..prediction.prediction import Prediction
from . import structures
from .strain import StrainedPositions

BARS = {"energy_std": "eV", "forces_std": "eV/Å", "stress_std": "eV/Å^3"}
"""The error bars among the results, and their units."""

NO_STRESS = (
    "There is no stress. It needs strained=, the names of the inputs that move with the cell "
    "(cell, shift vectors), got {}, and a periodic structure with a cell of three vectors."
)
WITHOUT_CELL = (
    "The structure is periodic, but the model gets positions and atomic numbers only. Pass {} so "
    "that it gets the cell, or set atoms.pbc = False."
)
ROUNDING = 16
"""How many units in the last place, of float32 or a coarser dtype, positions may differ by."""

STRESS_COMPONENTS = [0, 1, 2, 3, 3, 4, 4, 5, 5]
"""For each of the nine components of the stress, its number among Voigt's six."""

__all__ = ["RigidityCalculator", "UncertainStructureError", "with_error_bars"]


class UncertainStructureError(host.CalculatorError):
    """An error bar exceeds its limit.

    Attributes:
        atoms: A copy of the structure, without a calculator.
        results: Energy, forces and bars of the structure, as far as they were computed.
    """

    def __init__(self, message: str, atoms: Atoms, results: dict[str, Any]) -> None:
        super().__init__(message)
        self.atoms = atoms
        self.results = results

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.atoms, self.results)


class RigidityCalculator(host.Calculator):
    r"""Energies (eV), forces (eV/Å) and stress (eV/Å^3) of a torch model for ASE, with error bars.

    `results` contains `energy_std`, the standard deviation of the predictive distribution (with the
    noise, if one was calibrated). It also contains `forces_std`, (n, 3), and `stress_std`, (6,),
    the epistemic part with the scale of derivatives. Each bar is computed together with its
    property, in one pass of the model. Nothing is differentiated if only the energy is requested.
    The stress, if the structure has one, is computed with the forces.

    Args:
        uq: A fitted and calibrated object for the model. For one structure the model's output must
            be one number, shaped (1,) or (1, 1).
        inputs: callable(atoms) -> the model's inputs for this one structure, if it needs a cell or
            neighbours: a tuple, a mapping of keyword inputs, or the batch that `forward` of `uq`
            expects. Positions and cell must be in the model's units, `atoms.positions /
            length_unit`; other positions are refused if forces are requested. By default
            (positions, numbers), (n, 3) and (n,), in the model's precision and units and on its
            device.
        wrt: Position or name of the input that contains the positions; by default the first.
        strained: Names of the inputs that move with the positions where a periodic structure is
            strained (`("cell", "shifts")`, vectors in the model's unit of length), for its stress.
        energy_unit: eV per unit of the model's energy (`ase.units.Hartree`).
        length_unit: Å per unit of the model's positions (`ase.units.Bohr`).
        baseline: callable(atoms) -> eV, or {element: eV}, added to the energy: what was subtracted
            before training. It changes neither forces nor bars.
        species: Elements that the model was trained on, as symbols or atomic numbers; others are
            refused. Without it, a model may give an atom of another element no energy and no bar.
            This is detected, and refused, only if all atoms of a structure are of such elements.
        limits: {"energy_std": eV, "forces_std": eV/Å, "stress_std": eV/Å^3}, any of them. Beyond
            them an `UncertainStructureError` is raised, after `results` is filled, whenever a
            property of that structure is requested. The bar of an atom's force is $\sqrt{\sigma_x^2
            + \sigma_y^2 + \sigma_z^2}$, and that of the stress is the same over all nine
            components. Neither depends on the axes; both are checked whenever forces are computed.
        force_bars: Whether to compute the bars of forces and stress along with them. That needs one
            forward pass, and as many passes as there are coordinates or features, whichever is
            smaller; forces and stress share them. With False there is one backward pass, and bars
            are computed only for `get_property("forces_std")` or if `limits` needs them.
        members: As in `uq.gradient`; 0 for exact bars of forces however large the structure is.
        sample_weight: callable(atoms) -> loss weight of the structure, as in the fit
            (`lambda atoms: 1 / len(atoms)`), to which a calibrated noise is inversely proportional.

    Raises:
        TypeError: `uq` is not a LastLayerRigidity.
        ValueError: A unit or limit is not positive, or a limit is not known.
    """

    implemented_properties: list[str] = ["energy", "free_energy", "forces", "stress", *BARS]  # noqa: RUF012

    def __init__(
        self,
        uq: LastLayerRigidity,
        *,
        inputs: Callable[[Atoms], Any] | None = None,
        wrt: InputName = None,
        strained: Iterable[InputName] = (),
        energy_unit: float = 1.0,
        length_unit: float = 1.0,
        baseline: structures.Baseline | None = None,
        species: Iterable[int | str] | None = None,
        limits: Mapping[str, float] | None = None,
        force_bars: bool = True,
        members: int | None = None,
        sample_weight: Callable[[Atoms], float] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if not isinstance(uq, LastLayerRigidity):
            raise TypeError(
                f"uq must be a LastLayerRigidity, got {type(uq).__name__}. Wrap the trained model: "
                "LastLayerRigidity(model).fit(x, y)."
            )
        _ = uq.gram  # raises if uq is not fitted
        self.uq = uq
        self.inputs = inputs
        self.wrt = wrt
        self.members = members
        self.force_bars = force_bars
        self.sample_weight = sample_weight
        self.strained = (strained,) if isinstance(strained, str) else tuple(strained)
        self.energy_unit = _positive(energy_unit, "energy_unit")
        self.length_unit = _positive(length_unit, "length_unit")
        if baseline is None:
            baseline = structures.no_baseline
        self.baseline = structures.checked_baseline(baseline)
        self.species: set[int] | None = None
        if species is not None:
            self.species = {structures.atomic_number(element) for element in species}
        self.limits = _checked_limits(limits or {})
        if "stress_std" in self.limits and not self.strained:
            raise ValueError(NO_STRESS.format("none"))
        self._noticed_periodic = False

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = tuple(host.all_changes),
    ) -> None:
        """Fill `results`; called by ASE.

        Args:
            atoms: The structure; by default the latest one.
            properties: Which properties are wanted.
            system_changes: What has changed since the last call; if empty, results are kept.

        Raises:
            ValueError: The structure or the model's output makes no sense.
            PropertyNotImplementedError: The structure has no stress.
            UncertainStructureError: A bar exceeds its limit.
        """
        super().calculate(atoms, list(properties), list(system_changes))  # type: ignore[no-untyped-call]
        structure = self.atoms
        if structure is None:
            raise ValueError(
                "There is no structure yet. Set atoms.calc and ask the atoms for a property."
            )
        if system_changes:
            self.results = {}
        structures.check_structure(structure, self.species)
        wanted = set(properties)
        if wanted & {"stress", "stress_std"} and not self._has_stress(structure):
            raise host.PropertyNotImplementedError(NO_STRESS.format(self.strained or "none"))
        if wanted & {"forces", "stress", "forces_std", "stress_std"}:
            wanted_bars = {"forces_std", "stress_std"} & (wanted | set(self.limits))
            bars = self.force_bars or bool(wanted_bars)
            # Results that are there already take precedence.
            self.results = {**self._all_results(structure, bars=bars), **self.results}
        elif "energy" not in self.results:
            batch, _ = self._batch(structure)
            prediction = self.uq.predict([batch], sample_weight=self._weight_function(structure))
            self.results.update(self._energy_results(prediction, structure))
        _check_limits(self.limits, structure, self.results)

    def get_property(
        self, name: str, atoms: Atoms | None = None, allow_calculation: bool = True
    ) -> Any:
        """One of the results; called by ASE.

        Args:
            name: The property.
            atoms: The structure; by default the latest one.
            allow_calculation: Whether to compute a missing property; otherwise it is None.

        Raises:
            UncertainStructureError: A bar exceeds its limit, now or when it was computed.
        """
        value = super().get_property(name, atoms, allow_calculation)  # type: ignore[no-untyped-call]
        # ASE writes files without calculation, and limits must not stop that.
        if allow_calculation and self.atoms is not None:
            _check_limits(self.limits, self.atoms, self.results)
        return value

    def set(self, **parameters: Any) -> dict[str, Any]:
        """Refuse parameters: ASE would store options that have no effect.

        Raises:
            TypeError: There are parameters.
        """
        if parameters:
            raise TypeError(
                f"A RigidityCalculator has no parameters to set, got {', '.join(parameters)}. "
                "Create a new one: atoms.calc = RigidityCalculator(uq, ...)."
            )
        return {}

    def export_properties(self) -> Properties:
        """The results that ASE defines."""
        defined = {name: v for name, v in self.results.items() if name in all_outputs}
        return Properties(defined)

    def _weight_function(self, atoms: Atoms) -> Callable[[Any], torch.Tensor] | None:
        """The loss weight of a structure, as `uq` takes it: callable(batch) -> (1,)."""
        if self.sample_weight is None:
            return None
        value = _positive(self.sample_weight(atoms), "sample_weight")
        weight = torch.tensor([value], dtype=torch.float64)
        return lambda batch: weight

    def _energy_results(self, prediction: Prediction, atoms: Atoms) -> dict[str, float]:
        """The energy and its error bar in eV, with the baseline.

        Raises:
            ValueError: They are not finite, not of one structure, or of unknown elements.
        """
        if prediction.mean.numel() != 1:
            raise ValueError(
                "Expected one number for the structure, got an output shaped "
                f"{tuple(prediction.mean.shape)}. Let the model sum over its atoms, pick the "
                "energy with output= or forward= of LastLayerRigidity, or let inputs= return one "
                "structure."
            )
        energy = self.energy_unit * float(prediction.mean)
        std = self.energy_unit * float(prediction.std)
        _check_finite("energy", energy)
        _check_finite("energy_std", std)
        if self.species is None and float(prediction.epistemic) == 0:
            raise ValueError(
                "The energy's error bar is exactly zero: no readout got an atom of "
                f"{atoms.symbols}, as if the model knew none of its elements. List the elements "
                "that it was trained on with species=; error bars of zero are then accepted for "
                "them."
            )
        energy += structures.baseline_energy(self.baseline, atoms)
        return {"energy": energy, "free_energy": energy, "energy_std": std}

    def _all_results(self, atoms: Atoms, *, bars: bool) -> dict[str, Any]:
        """Energy, forces and stress from one pass.

        Args:
            atoms: The structure.
            bars: Whether forces and stress come with their error bars.
        """
        raw, wrt = self._batch(atoms)
        (batch,) = feed_of(self.uq).unlabelled()([raw], "forces")
        slot = self._slot(batch, wrt, atoms)
        energy, gradient = self.uq.predict_with_gradient(
            [raw],
            slot,
            gradient_bars=bars,
            members=self.members,
            sample_weight=self._weight_function(atoms),
        )
        if bars and not gradient.mean.any():
            # All slopes are zero: perhaps the model detaches the positions. A call without bars
            # raises an error in that case.
            self.uq.predict_with_gradient([raw], slot, gradient_bars=False)
        results: dict[str, Any] = dict(self._energy_results(energy, atoms))
        slopes, strain_slopes = self._position_and_strain_rows(gradient.mean, atoms)
        results["forces"] = -slopes
        if len(strain_slopes):
            results["stress"] = strain_slopes / atoms.get_volume()
        if bars:
            slope_bars, strain_bars = self._position_and_strain_rows(gradient.std, atoms)
            results["forces_std"] = slope_bars
            if len(strain_bars):
                results["stress_std"] = strain_bars / atoms.get_volume()
        for name in ("forces", "forces_std", "stress", "stress_std"):
            if name in results:
                _check_finite(name, results[name])
        return results

    def _position_and_strain_rows(
        self, gradient: torch.Tensor, atoms: Atoms
    ) -> tuple[np.ndarray, np.ndarray]:
        """Slopes along positions (n, 3) in eV/Å, and along the strain (6,) or (0,) in eV."""
        rows = self.energy_unit * gradient.detach().cpu().double().numpy().reshape(-1, 3)
        return rows[: len(atoms)] / self.length_unit, rows[len(atoms) :].flatten()

    def _slot(self, batch: Batch, wrt: InputName, atoms: Atoms) -> Slot:
        """The slot of the positions in a batch, with the strain where there is a stress."""
        slot = Slot.find(batch, wrt, self.uq.readout)
        if self.inputs is not None:
            _check_positions(batch, slot, atoms, self.length_unit)
        if slot.get(batch).numel() != 3 * len(atoms):
            raise ValueError(
                f"Expected positions of {len(atoms)} atoms, got an input shaped "
                f"{tuple(slot.get(batch).shape)}. Name the input that contains the positions with "
                "wrt=."
            )
        if not self._has_stress(atoms):
            return slot
        others = tuple(Slot.find(batch, name, self.uq.readout) for name in self.strained)
        return StrainedPositions(slot.key, slot.whole, others)

    def _has_stress(self, atoms: Atoms) -> bool:
        """Whether the stress of a structure can be computed."""
        return bool(self.strained and atoms.pbc.any() and atoms.cell.rank == 3)

    def _batch(self, atoms: Atoms) -> tuple[Any, InputName]:
        """One structure as `uq` takes it, and the position or name of the positions' input."""
        raw = self._default_inputs(atoms) if self.inputs is None else self.inputs(atoms)
        wrt = self.wrt
        if isinstance(raw, (tuple, list)):
            if wrt is None:
                wrt = 0
            batch_format = feed_of(self.uq).format
            if not batch_format.whole and batch_format.inputs == 0:
                return self._by_keyword(raw, wrt)
            if not batch_format.whole and batch_format.inputs != len(raw):
                raise ValueError(_wrong_count(f"was fitted with {batch_format.inputs}", len(raw)))
        if isinstance(raw, Mapping) and wrt is None:
            wrt = next(iter(raw))
        return raw, wrt

    def _by_keyword(self, inputs: Sequence[Any], wrt: str | int) -> tuple[dict[str, Any], str]:
        """Positional inputs by keyword, as in the fit, and the keyword of the positions."""
        names = input_names(self.uq.model)
        if len(inputs) > len(names):
            raise ValueError(_wrong_count(f"takes {len(names)}", len(inputs)))
        if isinstance(wrt, int):
            if not 0 <= wrt < len(inputs):
                choices = ", ".join(names[: len(inputs)])
                raise ValueError(f"There is no input {wrt}. Name one of {choices} with wrt=.")
            wrt = names[wrt]
        return dict(zip(names, inputs, strict=False)), wrt

    def _default_inputs(self, atoms: Atoms) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions (n, 3) in the model's unit, and atomic numbers (n,)."""
        if atoms.pbc.any() and not self._noticed_periodic:
            self._noticed_periodic = True
            notify(WITHOUT_CELL.format("inputs="))
        device, dtype = placement(self.uq.model)
        positions = torch.as_tensor(atoms.positions / self.length_unit, dtype=dtype, device=device)
        return positions, torch.as_tensor(atoms.numbers, dtype=torch.long, device=device)


def with_error_bars(atoms: Atoms) -> Atoms:
    """A copy for files, with the bars in its `info` and energy and forces in its calculator.

    Trajectories and extended XYZ files drop properties that ASE does not define, but keep `info`:
    `trajectory.write(with_error_bars(atoms))`. Bars of forces are included if they were computed.
    Limits are ignored, so that the structure at which a simulation stopped can be written as well.

    Args:
        atoms: A structure with a `RigidityCalculator`.

    Raises:
        TypeError: There is another calculator, or none.
    """
    calculator = atoms.calc
    if not isinstance(calculator, RigidityCalculator):
        raise TypeError(
            f"Expected atoms with a RigidityCalculator, got {type(calculator).__name__}. Set "
            "atoms.calc = RigidityCalculator(uq)."
        )
    with suppress(UncertainStructureError):  # the results are there
        calculator.get_property("energy_std", atoms)
    results = calculator.results
    labelled: Atoms = atoms.copy()
    for name in BARS:
        # A structure that was read from a file may have old bars.
        labelled.info.pop(name, None)
        if name in results:
            labelled.info[name] = results[name]
    ase_results = {name: value for name, value in results.items() if name not in BARS}
    labelled.calc = SinglePointCalculator(labelled, **ase_results)
    return labelled


def _wrong_count(expected: str, got: int) -> str:
    """The message where a structure gives a different number of inputs than the model takes."""
    return (
        f"The model {expected} inputs, got {got} for a structure. Pass inputs=lambda atoms: (...) "
        "that returns all of them."
    )


def _check_finite(name: str, values: Any) -> None:
    """Refuse a result that is NaN or infinite."""
    if not np.isfinite(values).all():
        raise ValueError(
            f"The model's {name} for this structure is NaN or infinite. Check the positions, "
            "their unit, and what the model does with atoms that have no neighbours."
        )


def _checked_limits(limits: Mapping[str, float]) -> dict[str, float]:
    """Limits of error bars by name; refuses unknown names and limits that are not positive."""
    unknown = set(limits) - set(BARS)
    if unknown:
        raise ValueError(f"limits= accepts {', '.join(BARS)}, got {', '.join(sorted(unknown))}.")
    return {name: _positive(limit, f"The limit of {name}") for name, limit in limits.items()}


def _check_limits(limits: Mapping[str, float], atoms: Atoms, results: Mapping[str, Any]) -> None:
    """Raise an `UncertainStructureError` where an error bar among the results exceeds its limit."""
    for name, limit in limits.items():
        if name not in results:
            continue
        # One row for the energy and for the stress, one per atom for forces.
        rows = np.atleast_2d(results[name])
        if name == "stress_std":
            rows = rows[:, STRESS_COMPONENTS]
        bars = np.linalg.norm(rows, axis=1)
        worst = int(bars.argmax())
        if bars[worst] <= limit:
            continue
        if name == "forces_std":
            quantity = f"the force on atom {worst} ({atoms.symbols[worst]})"
        else:
            quantity = f"the {name.removesuffix('_std')}"
        raise UncertainStructureError(
            f"The error bar of {quantity} is {bars[worst]:.4g} {BARS[name]}, above the limit "
            f"{name} = {limit:.4g}. The structure is unfamiliar to the model. Label it (.atoms of "
            "this error), add it to the training data and fit again.",
            atoms.copy(),
            dict(results),
        )


def _positive(value: float, name: str) -> float:
    """The number, after a check that it is positive and finite."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number, got {value}.")
    return float(value)


def _check_positions(batch: Batch, slot: Slot, atoms: Atoms, length_unit: float) -> None:
    """Compare the input that contains the positions with those of the structure.

    Forces are derivatives with respect to positions. The input may be shifted as a whole and by
    vectors of the cell, which changes no derivative. Inputs that are not shaped (n, 3) or (1, n, 3)
    are not checked.

    Args:
        batch: The structure as the model takes it.
        slot: The slot of the positions in the batch.
        atoms: The structure.
        length_unit: Å per unit of the model's positions.

    Raises:
        ValueError: They differ by more than rounding.
    """
    inputs = slot.get(batch).detach()
    if inputs.shape not in ((len(atoms), 3), (1, len(atoms), 3)):
        return
    eps = max(torch.finfo(inputs.dtype).eps, torch.finfo(torch.float32).eps)
    positions = length_unit * inputs.cpu().double().numpy().reshape(-1, 3)
    shift = positions - atoms.positions
    shift -= shift[0]
    cell, periodic = structures.periodic_cell(atoms)
    images = np.round(np.linalg.solve(cell.T, shift.T).T) * periodic
    off = float(np.abs(shift - images @ cell).max())
    if off > ROUNDING * eps * max(1.0, float(np.abs(atoms.positions).max())):
        raise ValueError(
            f"The input {slot.key!r} is not atoms.positions / length_unit: distances differ by up "
            f"to {off:.3g} Å, and forces would be wrong. Let inputs= return positions and cell in "
            f"the model's unit, with length_unit={length_unit:g} Å per unit, or name the input "
            "that contains the positions with wrt=."
        )
