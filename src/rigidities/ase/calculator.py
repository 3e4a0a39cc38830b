"""The calculator: results for ASE, one structure at a time, as far as they may be trusted."""

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
from ..last_layer.rigidity import LastLayerRigidity
from ..models.shadow import input_names, placement
from ..notices import notify
from ..prediction.prediction import Prediction
from . import structures
from .strain import StrainedPositions

BARS = {"energy_std": "eV", "forces_std": "eV/Å", "stress_std": "eV/Å^3"}
"""The error bars among the results, and their units."""
NO_STRESS = (
    "There is no stress: it needs strained=, the names of the inputs that move with the cell "
    "(cell, shift vectors), got {}, and a structure that repeats, with a cell of three vectors."
)
WITHOUT_CELL = (
    "The structure is periodic, and the model is given positions and numbers only. "
    "Pass {} to give it the cell, or set atoms.pbc = False."
)
ROUNDING = 16  # units in the last place by which positions may differ, of single precision or less


class UncertainStructureError(host.CalculatorError):
    """An error bar passed its limit.

    Attributes:
        atoms: a copy of the structure, without a calculator.
        results: energy, forces and bars there, as far as they were asked for.
    """

    def __init__(self, message: str, atoms: Atoms, results: dict[str, Any]) -> None:
        super().__init__(message)
        self.atoms, self.results = atoms, results

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.atoms, self.results)


class RigidityCalculator(host.Calculator):
    r"""Energies (eV), forces (eV/Å) and stress (eV/Å^3) of a torch model for ASE, with error bars.

    `results` holds `energy_std`, the standard deviation of the predictive distribution (with the
    noise, if one was calibrated), and `forces_std`, (n, 3), and `stress_std`, (6,), the epistemic
    part with `uq.gradient_scale`. They come with what they belong to, from one pass of the model;
    asking for the energy alone differentiates nothing. Forces bring the stress, where there is one.

    Args:
        uq: fitted around the model, and calibrated; for one structure the model's output must be
            one number, shaped (1,) or (1, 1).
        inputs: callable(atoms) -> what the model takes for this one structure: a tuple, a mapping
            of keyword inputs, or the batch that `forward` of `uq` takes; where it needs a cell or
            neighbours. By default (positions, numbers), (n, 3) and (n,), in the model's precision
            and units and on its device. Its positions and cell must be in the model's units too,
            `atoms.positions / length_unit`; other positions are refused where forces are asked
            for.
        wrt: position or name of the input that holds the positions; by default the first.
        strained: names of the inputs that move with the positions where a periodic structure is
            strained (`("cell", "shifts")`, vectors in the model's unit of length), for its stress.
        energy_unit: eV per unit of the model's energy (`ase.units.Hartree`).
        length_unit: Å per unit of the model's positions (`ase.units.Bohr`).
        baseline: callable(atoms) -> eV, or {element: eV}, added to the energy: what was subtracted
            before training. It changes neither forces nor bars.
        species: elements the model was trained on, symbols or atomic numbers; others are refused.
            Without it, a model may give an atom of another element no energy and no bar; only a
            structure all of such atoms is found out, and refused.
        limits: {"energy_std": eV, "forces_std": eV/Å, "stress_std": eV/Å^3}, any of them: beyond
            them an `UncertainStructureError` is raised, after `results` is filled, whenever a
            property of that structure is asked for. The bar of an atom's force is
            $\sqrt{\sigma_x^2 + \sigma_y^2 + \sigma_z^2}$, that of the stress likewise over all nine
            components: they do not depend on the axes, and are looked at whenever forces are.
        force_bars: compute the bars of forces and stress with them, which takes one forward pass,
            and as many passes as there are coordinates or features, whichever are fewer: forces
            and stress share them. False: by one backward pass without; bars when
            `get_property("forces_std")` asks for them or `limits` has them.
        members: as in `uq.gradient`; 0 for exact bars of forces however large the structure.
        sample_weight: callable(atoms) -> loss weight of the structure, as in the fit
            (`lambda atoms: 1 / len(atoms)`), to which a calibrated noise is inversely proportional.
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
        _ = uq.gram  # an unfitted one says so
        self.uq, self.inputs, self.wrt, self.members = uq, inputs, wrt, members
        self.force_bars, self.sample_weight = force_bars, sample_weight
        self.strained = (strained,) if isinstance(strained, str) else tuple(strained)
        self.energy_unit = _positive(energy_unit, "energy_unit")
        self.length_unit = _positive(length_unit, "length_unit")
        own = structures.no_baseline if baseline is None else baseline
        self.baseline = structures.checked_baseline(own)
        self.species = None if species is None else set(map(structures.atomic_number, species))
        if unknown := set(limits or {}) - set(BARS):
            raise ValueError(f"limits= knows {', '.join(BARS)}, got {', '.join(sorted(unknown))}.")
        named = (limits or {}).items()
        self.limits = {name: _positive(limit, f"The limit of {name}") for name, limit in named}
        if "stress_std" in self.limits and not self.strained:
            raise ValueError(NO_STRESS.format("none"))
        self._said_periodic = False

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = tuple(host.all_changes),
    ) -> None:
        """Fill `results`; ASE calls it.

        Raises:
            ValueError: the structure is no sensible one, or the model's answer is not.
            PropertyNotImplementedError: it has no stress.
            UncertainStructureError: a bar passed its limit.
        """
        super().calculate(atoms, list(properties), list(system_changes))  # type: ignore[no-untyped-call]
        structure = self.atoms
        if structure is None:
            raise ValueError("There is no structure yet: set atoms.calc and ask the atoms.")
        if system_changes:
            self.results = {}
        structures.check_structure(structure, self.species)
        asked, bars = set(properties), {"forces_std", "stress_std"}
        if asked & {"stress", "stress_std"} and not self._has_stress(structure):
            raise host.PropertyNotImplementedError(NO_STRESS.format(self.strained or "none"))
        if asked & (bars | {"forces", "stress"}):
            known = self.force_bars or bool(bars & (asked | set(self.limits)))
            self.results = {**self._all(structure, bars=known), **self.results}
        elif "energy" not in self.results:
            found = self.uq.predict([self._batch(structure)[0]], **self._options(structure))
            self.results.update(self._energy(found, structure))
        _check_limits(self.limits, structure, self.results)

    def get_property(
        self, name: str, atoms: Atoms | None = None, allow_calculation: bool = True
    ) -> Any:
        """One of the results; ASE calls it.

        Raises:
            UncertainStructureError: a bar passed its limit, now or when it was computed.
        """
        value = super().get_property(name, atoms, allow_calculation)  # type: ignore[no-untyped-call]
        if allow_calculation and self.atoms is not None:  # else a file is written
            _check_limits(self.limits, self.atoms, self.results)
        return value

    def set(self, **parameters: Any) -> dict[str, Any]:
        """Nothing can be set: ASE would keep options that are of no effect.

        Raises:
            TypeError: something is given.
        """
        if parameters:
            what = f"A RigidityCalculator has no parameters to set, got {', '.join(parameters)}"
            raise TypeError(f"{what}. Make a new one: atoms.calc = RigidityCalculator(uq, ...).")
        return {}

    def export_properties(self) -> Properties:
        """Those of the results that ASE has a definition of."""
        return Properties({k: v for k, v in self.results.items() if k in all_outputs})

    def _options(self, atoms: Atoms) -> dict[str, Any]:
        if self.sample_weight is None:
            return {"progress": False}
        own = _positive(self.sample_weight(atoms), "sample_weight")
        weight = torch.tensor([own], dtype=torch.float64)
        return {"progress": False, "sample_weight": lambda _: weight}

    def _energy(self, found: Prediction, atoms: Atoms) -> dict[str, float]:
        if found.mean.numel() != 1:
            raise ValueError(
                "Expected one number for the structure, got an output shaped "
                f"{tuple(found.mean.shape)}. Let the model sum over its atoms, pick the energy "
                "with output= or forward= of LastLayerRigidity, or let inputs= give one structure."
            )
        energy, std = (self.energy_unit * float(value) for value in (found.mean, found.std))
        _check_finite("energy", energy, std)
        if self.species is None and float(found.epistemic) == 0:
            raise ValueError(
                f"The energy's error bar is exactly zero: no readout saw an atom of "
                f"{atoms.symbols}, as if none were of an element the model knows. Name those it "
                "was trained on with species=; zeros of those are believed."
            )
        energy += structures.baseline_energy(self.baseline, atoms)
        return {"energy": energy, "free_energy": energy, "energy_std": std}

    def _all(self, atoms: Atoms, *, bars: bool) -> dict[str, Any]:
        """Energy, forces and stress of one pass, with their bars."""
        given, wrt = self._batch(atoms)
        (batch,) = self.uq.feed.unlabelled()([given], "forces", progress=False)
        slot = self._slot(batch, wrt, atoms)
        options = {"members": self.members, **self._options(atoms)}
        energy, slope = self.uq.predict_with_gradient([given], slot, gradient_bars=bars, **options)
        if bars and not slope.mean.any():  # refuses positions that were detached
            self.uq.predict_with_gradient([given], slot, gradient_bars=False, progress=False)
        results: dict[str, Any] = dict(self._energy(energy, atoms))
        for end, value in (("", slope.mean), ("_std", slope.std))[: 1 + bars]:
            rows = self.energy_unit * value.detach().cpu().double().numpy().reshape(-1, 3)
            forces, stress = rows[: len(atoms)] / self.length_unit, rows[len(atoms) :].flatten()
            results[f"forces{end}"] = forces if end else -forces
            if len(stress):
                results[f"stress{end}"] = stress / atoms.get_volume()
        for name in ("forces", "stress"):
            _check_finite(name, *(value for key, value in results.items() if name in key))
        return results

    def _slot(self, batch: Batch, wrt: InputName, atoms: Atoms) -> Slot:
        """Where the positions stand, with the strain where there is a stress."""
        slot = Slot.find(batch, wrt, self.uq.readout)
        if self.inputs is not None:
            _check_positions(batch, slot, atoms, self.length_unit)
        if slot.get(batch).numel() != 3 * len(atoms):
            raise ValueError(
                f"Expected positions of {len(atoms)} atoms, got an input shaped "
                f"{tuple(slot.get(batch).shape)}. Name the one that holds the positions with wrt=."
            )
        if not self._has_stress(atoms):
            return slot
        others = tuple(Slot.find(batch, name, self.uq.readout) for name in self.strained)
        return StrainedPositions(slot.key, slot.whole, others)

    def _has_stress(self, atoms: Atoms) -> bool:
        return bool(self.strained and atoms.pbc.any() and atoms.cell.rank == 3)

    def _batch(self, atoms: Atoms) -> tuple[Any, InputName]:
        """One structure as `uq` takes it, and where in it the positions stand."""
        given = self._default_inputs(atoms) if self.inputs is None else self.inputs(atoms)
        wrt, feed = self.wrt, self.uq.feed.format
        if isinstance(given, (tuple, list)):
            wrt = 0 if wrt is None else wrt
            if not feed.whole and feed.inputs == 0:  # keywords were fitted
                names = input_names(self.uq.model)
                _check_count(len(given) <= len(names), f"takes {len(names)}", len(given))
                if isinstance(wrt, int) and not 0 <= wrt < len(given):
                    known = ", ".join(names[: len(given)])
                    raise ValueError(f"There is no input {wrt}. Name one of {known} with wrt=.")
                given = dict(zip(names, given, strict=False))
                wrt = names[wrt] if isinstance(wrt, int) else wrt
            elif not feed.whole:
                fitted = f"was fitted with {feed.inputs}"
                _check_count(feed.inputs == len(given), fitted, len(given))
        if isinstance(given, Mapping) and wrt is None:
            wrt = next(iter(given))
        return given, wrt

    def _default_inputs(self, atoms: Atoms) -> tuple[torch.Tensor, torch.Tensor]:
        if atoms.pbc.any() and not self._said_periodic:
            self._said_periodic = True
            notify(WITHOUT_CELL.format("inputs="))
        device, dtype = placement(self.uq.model)
        positions = torch.as_tensor(atoms.positions / self.length_unit, dtype=dtype, device=device)
        return positions, torch.as_tensor(atoms.numbers, dtype=torch.long, device=device)


def with_error_bars(atoms: Atoms) -> Atoms:
    """A copy for files, with the bars in its `info` and energy and forces in its calculator.

    Trajectories and extended XYZ files drop properties that ASE does not know, and keep `info`:
    `trajectory.write(with_error_bars(atoms))`. The bars of forces are there if they were computed.
    No limit is looked at: a structure at which a simulation stopped can be written too.

    Args:
        atoms: with a `RigidityCalculator`.

    Raises:
        TypeError: there is another calculator, or none.
    """
    calculator = atoms.calc
    if not isinstance(calculator, RigidityCalculator):
        what = f"Expected atoms with a RigidityCalculator, got {type(calculator).__name__}"
        raise TypeError(f"{what}. Set atoms.calc = RigidityCalculator(uq).")
    with suppress(UncertainStructureError):  # the results are there
        calculator.get_property("energy_std", atoms)
    results = calculator.results
    kept: Atoms = atoms.copy()
    for name in BARS:  # of a frame that was read from a file, say
        kept.info.pop(name, None)
    kept.info.update({name: results[name] for name in BARS if name in results})
    own = {name: value for name, value in results.items() if name not in BARS}
    kept.calc = SinglePointCalculator(kept, **own)
    return kept


def _check_count(right: bool, expected: str, got: int) -> None:
    if not right:
        what = f"The model {expected} inputs, got {got} for a structure"
        raise ValueError(f"{what}. Pass inputs=lambda atoms: (...) that gives all of them.")


def _check_finite(what: str, *values: Any) -> None:
    for name, numbers in zip((what, f"{what}_std"), values, strict=False):
        if not np.isfinite(numbers).all():
            raise ValueError(
                f"The model's {name} for this structure is NaN or infinite. Look at the positions, "
                "at their unit, and at what the model does with atoms that have no neighbours."
            )


def _check_limits(limits: Mapping[str, float], atoms: Atoms, results: Mapping[str, Any]) -> None:
    for name in [name for name in limits if name in results]:
        # one row for energy and stress, one per atom for forces
        rows = np.atleast_2d(results[name])
        rows = rows[:, [0, 1, 2, 3, 3, 4, 4, 5, 5]] if name == "stress_std" else rows
        bars = np.linalg.norm(rows, axis=1)
        worst = int(bars.argmax())
        if bars[worst] <= limits[name]:
            continue
        what = f"the {name.removesuffix('_std')}"
        if name == "forces_std":
            what = f"the force on atom {worst} ({atoms.symbols[worst]})"
        raise UncertainStructureError(
            f"The error bar of {what} is {bars[worst]:.4g} {BARS[name]}, above the limit "
            f"{name} = {limits[name]:.4g}. The model does not know this structure: label it "
            "(.atoms of this error), add it to the training data and fit again.",
            atoms.copy(),
            dict(results),
        )


def _positive(value: float, name: str) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number, got {value}.")
    return float(value)


def _check_positions(batch: Batch, slot: Slot, atoms: Atoms, length_unit: float) -> None:
    """Forces are derivatives by positions: compare the input with those of the structure.

    It may be shifted as a whole and by vectors of the cell, which changes no derivative. Inputs
    that are not shaped (n, 3) or (1, n, 3) are not looked at.
    """
    given = slot.get(batch).detach()
    if given.shape not in ((len(atoms), 3), (1, len(atoms), 3)):
        return
    eps = max(torch.finfo(given.dtype).eps, torch.finfo(torch.float32).eps)
    found = length_unit * given.cpu().double().numpy().reshape(-1, 3)
    shift = found - atoms.positions
    shift -= shift[0]
    cell, periodic = structures.periodic_cell(atoms)
    images = np.round(np.linalg.solve(cell.T, shift.T).T) * periodic
    off = float(np.abs(shift - images @ cell).max())
    if off > ROUNDING * eps * max(1.0, float(np.abs(atoms.positions).max())):
        raise ValueError(
            f"The input {slot.key!r} is not atoms.positions / length_unit: distances differ by up "
            f"to {off:.3g} Å, and forces would be wrong. Let inputs= give positions and cell in "
            f"the model's unit, with length_unit={length_unit:g} Å per unit, or name the input "
            "that holds the positions with wrt=."
        )
