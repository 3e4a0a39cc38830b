r"""The dense form of a rigidity: the whole Hessian in its eigenbasis.

At ridge 0 a rigidity does not depend on the units of the parameters, and neither should its
rounding: with D the diagonal of the Hessian, $D^{-1/2} H D^{-1/2}$ is factorised, and rows are
divided by $D^{1/2}$. With a ridge, whose identity matrix fixes the units, the Hessian is factorised
as it is. `posterior.Posterior` does all linear algebra after the factorisation.
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
    """The Hessian of the loss and where it comes from.

    Attributes:
        matrix: (P, P), symmetric, regulariser included.
        names: Names and sizes of the parameters, to say which of them the data do not determine.
        rows: Number of predictions in the training data.
        flat_rows: How many of these predictions lie where the loss has no curvature.
        data: The Hessian without the regulariser; None where there is no regulariser.
        exact: Whether it is the exact Hessian.
        epsilon: Machine epsilon of the numbers it was summed from.
    """

    matrix: Tensor
    names: list[tuple[str, int]]
    rows: int
    flat_rows: int = 0
    data: Tensor | None = None
    exact: bool = False
    epsilon: float = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class DenseForm(Form):
    """A posterior over all selected parameters.

    Attributes:
        hessian: The Hessian as it was summed.
        posterior: Eigenbasis and ridge at scale 1; of the Hessian in these units, if there are any.
        units: The roots of the Hessian's diagonal, by which rows are divided, (P,); None with a
            ridge.
    """

    hessian: Hessian
    posterior: Posterior
    units: Tensor | None
    name = "dense"

    @classmethod
    def of(cls, hessian: Hessian, ridge: float) -> DenseForm:
        """Factorise a Hessian.

        Raises:
            ValueError: It holds NaN, or is singular or indefinite at this ridge.
        """
        matrix = hessian.matrix
        if not bool(torch.isfinite(matrix).all()):
            raise ValueError(
                "The Hessian contains NaN or infinity: some derivatives are not finite."
            )
        units = None
        if ridge == 0:
            diagonal = matrix.diagonal()
            units = torch.where(diagonal > 0, diagonal, 1.0).sqrt()
            matrix = matrix / units / units[:, None]
        posterior = replace(_eigenbasis(matrix), ridge=ridge)
        return cls._positive_definite(hessian, posterior, units)

    @classmethod
    def _positive_definite(
        cls, hessian: Hessian, posterior: Posterior, units: Tensor | None
    ) -> DenseForm:
        """The form; raises ValueError where its Hessian is singular or indefinite."""
        lowest = float(posterior.eigenvalues[0])
        rounding = _rounding(hessian, posterior.eigenvalues)
        if lowest + posterior.ridge < -rounding:
            raise ValueError(_indefinite_message(hessian))
        if lowest + posterior.ridge <= rounding:
            raise ValueError(_singular_message(hessian, posterior.ridge))
        return cls(hessian, posterior, units)

    @property
    def ridge(self) -> float:
        """The ridge s."""
        return self.posterior.ridge

    @property
    def width(self) -> int:
        """Number of parameters P."""
        return self.posterior.width

    @property
    def tolerance(self) -> float:
        """Bound on the relative error of q: machine epsilon times the condition number."""
        return self.hessian.epsilon * self.posterior.condition

    @property
    def condition(self) -> float:
        """Condition number of the matrix that was factorised."""
        return self.posterior.condition

    @cached_property
    def effective_rank(self) -> float:
        r"""Number of directions that the data determine, $\mathrm{tr}\, G (G + R + s I)^{-1}$.

        G is the Hessian of the data alone, R that of the regulariser.
        """
        if self.hessian.data is None:
            return self.posterior.effective_rank
        # tr G A^-1 = tr (G C) C^T with A^-1 = C C^T
        whitened_data = self.posterior.whitened(self._scaled(self.hessian.data))
        return float((whitened_data * self.root()).sum())

    @cached_property
    def eigenbasis(self) -> Posterior:
        """The eigenbasis of the unscaled Hessian, at ridge 0: every ridge can be tried."""
        if self.units is None:
            return replace(self.posterior, ridge=0.0)
        return _eigenbasis(self.hessian.matrix)

    @property
    def least_ridge(self) -> float:
        """At ridges up to this one the Hessian is singular or indefinite."""
        eigenvalues = self.eigenbasis.eigenvalues
        return _rounding(self.hessian, eigenvalues) - float(eigenvalues[0])

    def with_ridge(self, ridge: float) -> DenseForm:
        """The same Hessian with another ridge."""
        check_ridge(ridge)
        if ridge == self.ridge:
            return self
        if ridge == 0:
            return DenseForm.of(self.hessian, ridge)
        posterior = replace(self.eigenbasis, ridge=ridge)
        return DenseForm._positive_definite(self.hessian, posterior, None)

    def quadratic(self, tangents: Tangents) -> Tensor:
        """q of each prediction, (N, K)."""
        samples, outputs, _ = tangents.shape
        return self.posterior.quadratic(self._rows(tangents)).reshape(samples, outputs)

    def covariance(self, left: Tangents, right: Tangents) -> Tensor:
        """Unscaled covariances between two sets of predictions, (N K, M K)."""
        left_rows = self._rows(left)
        if right is left:
            return self.posterior.covariance(left_rows, None)
        return self.posterior.covariance(left_rows, self._rows(right))

    def root(self, tangents: Tangents | None = None) -> Tensor:
        """C such that C C^T is the unscaled covariance, (N K, R); (P, R) for the parameters."""
        if tangents is not None:
            return self.posterior.whitened(self._rows(tangents))
        identity = torch.eye(self.width).to(self.hessian.matrix)
        return self.posterior.whitened(self._scaled(identity))

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        r"""Deviations with covariance $(H + s I)^{-1}$, (n, P)."""
        return self._scaled(self.posterior.sample(n, generator))

    def _rows(self, tangents: Tangents) -> Tensor:
        """Tangents written out in the posterior's units, (N K, P), float64."""
        return self._scaled(tangents.matrix().flatten(0, 1).to(torch.float64))

    def _scaled(self, rows: Tensor) -> Tensor:
        """Rows divided by the units, where there are any."""
        return rows if self.units is None else rows / self.units


def _eigenbasis(matrix: Tensor) -> Posterior:
    """The eigendecomposition of a matrix, as a posterior with ridge 0 and scale 1."""
    values, vectors = torch.linalg.eigh(matrix)
    return Posterior(values, vectors, 0.0, values.new_ones(()))


def _rounding(hessian: Hessian, eigenvalues: Tensor) -> float:
    """A bound on the rounding error of an eigenvalue."""
    return len(eigenvalues) * hessian.epsilon * float(eigenvalues.abs().max())


def _indefinite_message(hessian: Hessian) -> str:
    """Why the Hessian has a negative eigenvalue, and what to do."""
    eigenvalues = torch.linalg.eigvalsh(hessian.matrix)
    lowest = float(eigenvalues[0])
    largest = float(eigenvalues[-1])
    if hessian.exact:
        cause = (
            "so the parameters are not a minimum of the loss in that direction. Fit further, use "
            "hessian='gauss-newton'"
        )
    else:
        cause = (
            "because the Hessian of the regulariser is not positive semi-definite. Use a convex "
            "regulariser"
        )
    return (
        f"The Hessian is indefinite: its lowest eigenvalue is {lowest:.3g} (the largest "
        f"{largest:.3g}), {cause}, or pass ridge > {-lowest:.3g}."
    )


def _singular_message(hessian: Hessian, ridge: float) -> str:
    """Which data or parameters leave the Hessian singular, and what to do."""
    eigenvalues = torch.linalg.eigvalsh(hessian.matrix)
    message = (
        f"The Hessian is singular at ridge={ridge:g}: {hessian.rows} rows for {len(eigenvalues)} "
        f"parameters, lowest eigenvalue {float(eigenvalues[0]):.3g}, largest "
        f"{float(eigenvalues[-1]):.3g}."
    )
    if hessian.flat_rows:
        message += f" {hessian.flat_rows} of them lie where the loss has no curvature."
    message += " Pass ridge > 0, a regulariser, fewer parameters (subset=) or more data."
    if hessian.flat_rows == hessian.rows:
        return message  # no parameter is to blame
    idle = _idle_parameters(hessian)
    if idle:
        message += f" No training prediction depends on {_listed(idle)}."
    return message


def _idle_parameters(hessian: Hessian) -> list[str]:
    """Names of the parameters, or entries of them, that no training prediction depends on."""
    matrix = hessian.matrix if hessian.data is None else hessian.data
    diagonals = matrix.diagonal().split_with_sizes([size for _, size in hessian.names])
    idle = []
    for (name, _), diagonal in zip(hessian.names, diagonals, strict=True):
        if not bool(diagonal.any()):
            idle.append(name)
        elif bool((diagonal == 0).any()):
            entries = (diagonal == 0).nonzero()[:, 0].tolist()
            idle.append(f"{name} (entries {_listed(entries)})")
    return idle


def _listed(items: Sequence[object]) -> str:
    """The first five items, joined by commas."""
    text = ", ".join(str(item) for item in items[:5])
    if len(items) > 5:
        text += ", ..."
    return text
