"""How uncertain a structure may be before a simulation stops."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from ase.calculators.calculator import CalculatorError

from ase import Atoms

BARS = {"energy_std": "eV", "forces_std": "eV/Å"}
"""The error bars among the results, and their units."""


class UncertainStructureError(CalculatorError):
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


def checked_limits(limits: Mapping[str, float]) -> dict[str, float]:
    """Limits of known bars.

    Raises:
        ValueError: one is of no bar, or not positive.
    """
    if unknown := set(limits) - set(BARS):
        raise ValueError(f"limits= knows {', '.join(BARS)}, got {', '.join(sorted(unknown))}.")
    return {name: positive(limit, f"The limit of {name}") for name, limit in limits.items()}


def check_limits(limits: Mapping[str, float], atoms: Atoms, results: Mapping[str, Any]) -> None:
    """Compare the bars among the results with their limits.

    Raises:
        UncertainStructureError: one is larger.
    """
    for name in [name for name in limits if name in results]:
        # one row for the energy, one per atom for forces
        bars = np.linalg.norm(np.atleast_2d(results[name]), axis=1)
        worst = int(bars.argmax())
        if bars[worst] <= limits[name]:
            continue
        what = "the energy"
        if name == "forces_std":
            what = f"the force on atom {worst} ({atoms.symbols[worst]})"
        raise UncertainStructureError(
            f"The error bar of {what} is {bars[worst]:.4g} {BARS[name]}, above the limit "
            f"{name} = {limits[name]:.4g}. The model does not know this structure: label it "
            "(.atoms of this error), add it to the training data and fit again.",
            atoms.copy(),
            dict(results),
        )


def positive(value: float, name: str) -> float:
    """The value, if it is a positive number.

    Raises:
        ValueError: it is not.
    """
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number, got {value}.")
    return float(value)
