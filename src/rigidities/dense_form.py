"""The dense form of a rigidity: the whole Hessian in its eigenbasis."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .gram import Gram
from .posterior import Posterior
from .tangents import Tangents


@dataclass(frozen=True)
class DenseForm:
    """A posterior over all selected parameters.

    Attributes:
        posterior: eigenbasis and ridge, scale 1.
        shares: what of each eigenvalue comes from the data, (P,); None for all of it.
    """

    posterior: Posterior
    shares: Tensor | None = None
    name = "dense"

    @classmethod
    def of_rows(cls, gram: Gram, ridge: float, penalty: Tensor | None, names: Names) -> DenseForm:
        """From the weighted rows of the pseudo-Hessian.

        Args:
            gram: of the rows.
            ridge: s.
            penalty: Hessian of the regulariser, (P, P), or None.
            names: parameters and their sizes, to say which of them the data leave free.
        """
        if penalty is None:
            try:
                return cls(Posterior.from_gram(gram, ridge))
            except ValueError as error:
                raise ValueError(f"{error}{_idle(gram.diagonal, names)}") from error
        form = cls.of_matrix(gram.matrix + penalty, ridge, names)
        vectors = form.posterior.eigenvectors
        return replace(form, shares=(vectors * (gram.matrix @ vectors)).sum(0))

    @classmethod
    def of_matrix(cls, matrix: Tensor, ridge: float, names: Names) -> DenseForm:
        """From a symmetric Hessian, which may be indefinite: then it is refused."""
        values, vectors = torch.linalg.eigh(matrix)
        lowest, largest = float(values[0]), float(values[-1])
        floor = len(values) * torch.finfo(torch.float64).eps * max(abs(lowest), abs(largest))
        if lowest + ridge < -floor:
            raise ValueError(
                f"The Hessian is indefinite: its lowest eigenvalue is {lowest:.3g} (the largest "
                f"{largest:.3g}), so the parameters are no minimum of the loss in that direction. "
                f"Fit further, use hessian='gauss-newton', or pass ridge > {-lowest:.3g}."
            )
        if lowest + ridge <= floor:
            raise ValueError(
                f"The Hessian is singular at ridge={ridge:g}: its lowest eigenvalue is "
                f"{lowest:.3g}, the largest {largest:.3g}. Pass ridge > 0, a regulariser or more "
                f"data.{_idle(matrix.diagonal(), names)}"
            )
        return cls(Posterior(values, vectors, ridge))

    @property
    def ridge(self) -> float:
        """s."""
        return self.posterior.ridge

    @property
    def width(self) -> int:
        """Number of parameters P."""
        return self.posterior.width

    def with_ridge(self, ridge: float) -> DenseForm:
        """The same eigenbasis with another ridge."""
        return replace(self, posterior=self.posterior.with_ridge(ridge))

    @property
    def tolerance(self) -> float:
        """Machine epsilon times the condition number."""
        return torch.finfo(torch.float64).eps * self.posterior.condition

    @property
    def effective_rank(self) -> float:
        r"""Directions that the data determine, $\mathrm{tr}\, G (G + R + s I)^{-1}$."""
        if self.shares is None:
            return self.posterior.effective_rank
        return float((self.shares / self.posterior.precisions).sum())

    def quadratic(self, tangents: Tangents) -> Tensor:
        """q of each prediction, (N, K)."""
        samples, outputs, _ = tangents.shape
        return self.posterior.quadratic(_rows(tangents)).reshape(samples, outputs)

    def covariance(self, left: Tangents, right: Tangents) -> Tensor:
        """Unscaled covariances between two sets of predictions, (N K, M K)."""
        return self.posterior.covariance(_rows(left), None if right is left else _rows(right))

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        r"""Deviations with covariance $(H + s I)^{-1}$, (n, P)."""
        return self.posterior.sample(n, generator)


Names = list[tuple[str, int]]


def _rows(tangents: Tangents) -> Tensor:
    return tangents.matrix().flatten(0, 1)


def _idle(diagonal: Tensor, names: Names) -> str:
    """Which parameters have no influence on any training prediction."""
    pieces = diagonal.split_with_sizes([size for _, size in names])
    idle = [
        f"{name} ({int((piece == 0).sum())} of {size})" if bool(piece.any()) else name
        for (name, size), piece in zip(names, pieces, strict=True)
        if bool((piece == 0).any())
    ]
    if not idle:
        return ""
    shown = ", ".join(idle[:5]) + (", ..." if len(idle) > 5 else "")
    return f" No training prediction depends on {shown or 'some parameters'}."
