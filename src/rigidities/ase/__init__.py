r"""An ASE calculator with error bars for energies, forces and stress.

$$ E = e(r) + \text{baseline}, \qquad F_i = -\frac{\partial e}{\partial r_i}, \qquad
   \mathrm{Var}\, F_i = \alpha_g^2\, g_i^\top (G + \varsigma^2 I)^{-1} g_i, \quad
   g_i = \frac{\partial f}{\partial r_i} $$

with the features f, Gram and scales of a fitted `LastLayerRigidity` around a torch model $e$. The
energy's bar is that of the predictive distribution; the baseline does not change the bars.

    limits = {"energy_std": 0.1, "forces_std": 0.5}
    atoms.calc = RigidityCalculator(uq, species=["H", "C", "O"], limits=limits)
    atoms.get_forces(), atoms.calc.results["forces_std"]

List the `species` of the training data: a network with one readout per element gives an atom of any
other element no energy and no bar.

With `limits`, molecular dynamics, relaxations and path searches stop with an
`UncertainStructureError`. To stop without an error, check each step:

    for _ in dyn.irun(1000):
        if atoms.calc.results["energy_std"] > 0.1:
            break

Bars grow for unfamiliar structures, but perhaps not as fast as the errors. Set limits to a few
times the bars of validation data, so that a run stops at the edge of the training domain.

`mace`, `schnetpack` and `graphs` (PyTorch Geometric and others) accept lists of atoms instead.

ASE's files keep only ASE's own properties: write `with_error_bars(atoms)` to keep the bars.
Needs the extra `ase`.
"""

from __future__ import annotations

from ..notices import extra, missing

try:
    from .calculator import RigidityCalculator, UncertainStructureError, with_error_bars
    from .potentials import Potential, graphs, mace, schnetpack
except ModuleNotFoundError as error:
    missing(error, extra("ase"), "ase")

__all__ = [
    "Potential",
    "RigidityCalculator",
    "UncertainStructureError",
    "graphs",
    "mace",
    "schnetpack",
    "with_error_bars",
]


def __dir__() -> list[str]:
    return sorted(__all__)
