r"""The dense form of a rigidity: the whole Hessian in its eigenbasis.

At ridge 0 a rigidity does not depend on the units of the parameters, and neither should its
rounding: the Hessian is factorised as $D^{-1/2} H D^{-1/2}$ with $D$ its diagonal, and rows are
divided by $D^{1/2}$. With a ridge, whose identity matrix fixes the units, it is taken as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ...posterior.posterior import Posterior, check_ridge
from ..derivatives.tangents import Tangents
from .forms import Form


@dataclass(frozen=True)
class Hessian:
    """A symmetric matrix and where it comes from.

    Attributes:
        matrix: (P, P), regulariser included.
        names: parameters and their sizes, to say which of them the data leave free.
        rows: predictions in the training data, and
        flat: how many of them lie where the loss has no curvature.
        data: the part without the regulariser; None for all of it.
        exact: whether it is the exact Hessian, and
        epsilon: the machine epsilon of what it was summed from.
    """

    matrix: Tensor
    names: list[tuple[str, int]]
    rows: int
    flat: int = 0
    data: Tensor | None = None
    exact: bool = False
    epsilon: float = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class DenseForm(Form):
    """A posterior over all selected parameters.

    Attributes:
        hessian: as it was summed.
        posterior: eigenbasis, of the scaled Hessian where there are units, and ridge; scale 1.
        units: (P,) by which rows are divided; None for none.
    """

    hessian: Hessian
    posterior: Posterior
    units: Tensor | None
    name = "dense"

    @classmethod
    def of(cls, hessian: Hessian, ridge: float) -> DenseForm:
        """Factorise; refuses NaN, and what is singular or indefinite at this ridge."""
        matrix, units = hessian.matrix, None
        if not bool(torch.isfinite(matrix).all()):
            raise ValueError("The Hessian holds NaN or infinity: some derivatives are not finite.")
        if ridge == 0:
            diagonal = matrix.diagonal()
            units = torch.where(diagonal > 0, diagonal, 1.0).sqrt()
            matrix = matrix / units / units[:, None]
        return cls._checked(hessian, replace(_eigenbasis(matrix), ridge=ridge), units)

    @classmethod
    def _checked(cls, hessian: Hessian, posterior: Posterior, units: Tensor | None) -> DenseForm:
        """Refuse what is singular or indefinite."""
        values, ridge = posterior.eigenvalues, posterior.ridge
        lowest, floor = float(values[0]), _floor(hessian, values)
        if lowest + ridge < -floor:
            raise ValueError(_indefinite(hessian))
        if lowest + ridge <= floor:
            raise ValueError(_singular(hessian, ridge))
        return cls(hessian, posterior, units)

    @property
    def ridge(self) -> float:
        """s."""
        return self.posterior.ridge

    @property
    def width(self) -> int:
        """Number of parameters P."""
        return self.posterior.width

    @property
    def tolerance(self) -> float:
        """Machine epsilon times the condition number."""
        return self.hessian.epsilon * self.posterior.condition

    @property
    def condition(self) -> float:
        """Of the matrix that was factorised."""
        return self.posterior.condition

    @cached_property
    def effective_rank(self) -> float:
        r"""Directions that the data determine, $\mathrm{tr}\, G (G + R + s I)^{-1}$."""
        if self.hessian.data is None:
            return self.posterior.effective_rank
        data = self.posterior.whitened(self._scaled(self.hessian.data))
        return float((data * self.root()).sum())

    @cached_property
    def eigenbasis(self) -> Posterior:
        """Of the Hessian in its own units, at ridge 0: every ridge can be tried with it."""
        if self.units is None:
            return replace(self.posterior, ridge=0.0)
        return _eigenbasis(self.hessian.matrix)

    @property
    def least_ridge(self) -> float:
        """Ridges up to here leave the Hessian singular or indefinite."""
        values = self.eigenbasis.eigenvalues
        return _floor(self.hessian, values) - float(values[0])

    def with_ridge(self, ridge: float) -> DenseForm:
        """The same Hessian with another ridge."""
        check_ridge(ridge)
        if ridge == self.ridge:
            return self
        if ridge == 0:
            return DenseForm.of(self.hessian, ridge)
        return DenseForm._checked(self.hessian, replace(self.eigenbasis, ridge=ridge), None)

    def quadratic(self, tangents: Tangents) -> Tensor:
        """q of each prediction, (N, K)."""
        samples, outputs, _ = tangents.shape
        return self.posterior.quadratic(self._rows(tangents)).reshape(samples, outputs)

    def covariance(self, left: Tangents, right: Tangents) -> Tensor:
        """Unscaled covariances between two sets of predictions, (N K, M K)."""
        rows = self._rows(left)
        return self.posterior.covariance(rows, None if right is left else self._rows(right))

    def root(self, tangents: Tangents | None = None) -> Tensor:
        """(N K, R), whose Gram is the unscaled covariance; (P, R) of the parameters themselves."""
        if tangents is not None:
            return self.posterior.whitened(self._rows(tangents))
        return self.posterior.whitened(self._scaled(torch.eye(self.width).to(self.hessian.matrix)))

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        r"""Deviations with covariance $(H + s I)^{-1}$, (n, P)."""
        return self._scaled(self.posterior.sample(n, generator))

    def _rows(self, tangents: Tangents) -> Tensor:
        return self._scaled(tangents.matrix().flatten(0, 1).to(torch.float64))

    def _scaled(self, rows: Tensor) -> Tensor:
        return rows if self.units is None else rows / self.units


def _eigenbasis(matrix: Tensor) -> Posterior:
    values, vectors = torch.linalg.eigh(matrix)
    return Posterior(values, vectors, 0.0, values.new_ones(()))


def _floor(hessian: Hessian, values: Tensor) -> float:
    """What rounding may have added to an eigenvalue."""
    return len(values) * hessian.epsilon * float(values.abs().max())


def _indefinite(hessian: Hessian) -> str:
    values = torch.linalg.eigvalsh(hessian.matrix)
    lowest, largest = float(values[0]), float(values[-1])
    if hessian.exact:
        cause = "so the parameters are no minimum of the loss in that direction. Fit further, use "
        cause += "hessian='gauss-newton'"
    else:
        cause = "which the regulariser brings: its own Hessian is not positive. Use a convex one"
    return (
        f"The Hessian is indefinite: its lowest eigenvalue is {lowest:.3g} (the largest "
        f"{largest:.3g}), {cause}, or pass ridge > {-lowest:.3g}."
    )


def _singular(hessian: Hessian, ridge: float) -> str:
    values = torch.linalg.eigvalsh(hessian.matrix)
    flat = f" {hessian.flat} of them lie where the loss has no curvature." if hessian.flat else ""
    return (
        f"The Hessian is singular at ridge={ridge:g}: {hessian.rows} rows for {len(values)} "
        f"parameters, lowest eigenvalue {float(values[0]):.3g}, largest {float(values[-1]):.3g}."
        f"{flat} Pass ridge > 0, a regulariser, fewer parameters (subset=) or more data."
        f"{'' if hessian.flat == hessian.rows else _idle(hessian)}"
    )


def _idle(hessian: Hessian) -> str:
    """Which parameters have no influence on any training prediction."""
    diagonal = (hessian.matrix if hessian.data is None else hessian.data).diagonal()
    pieces = diagonal.split_with_sizes([size for _, size in hessian.names])
    idle = [
        name
        if not bool(piece.any())
        else f"{name} (entries {_listed((piece == 0).nonzero()[:, 0].tolist())})"
        for (name, _), piece in zip(hessian.names, pieces, strict=True)
        if bool((piece == 0).any())
    ]
    return f" No training prediction depends on {_listed(idle)}." if idle else ""


def _listed(found: Sequence[object]) -> str:
    return ", ".join(map(str, found[:5])) + (", ..." if len(found) > 5 else "")
