r"""Which form of $q = g^\top (H + s I)^{-1} g$ to use, decided before anything is allocated.

| form | unknowns | memory | needs |
| --- | --- | --- | --- |
| dense | P parameters | P^2 | nothing |
| dual | n = N K rows | n^2 and the rows' factors | a ridge, no regulariser |
| matrix-free | P, by iteration | the rows' factors, or nothing | a ridge |

The dense and the dual form are exact up to rounding; the matrix-free one to its tolerance.

`Form` is the interface of every solved curvature. `Problem` describes a fit in advance, and
`form_name` chooses from it: the dense form where parameters are few, otherwise the form with the
least arithmetic among those that fit into memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Generator, Tensor

from ...posterior.posterior import Posterior
from ..derivatives.tangents import Tangents

FormName = Literal["auto", "dense", "dual", "matrix-free"]
FORMS = ("auto", "dense", "dual", "matrix-free")

EIGEN_COST = 25
"""Multiplications of an eigendecomposition, in units of P^3."""

FEW = 500
"""Up to this many parameters the dense form, which rounds least, takes well under a second."""


class Form(ABC):
    """A solved curvature, which gives variances and covariances for tangents."""

    name: ClassVar[str]

    # These are fields in some forms and properties in others. Abstract properties would forbid
    # the fields, so they are declared for the type checker only.
    if TYPE_CHECKING:

        @property
        def ridge(self) -> float:
            """The ridge s."""

        @property
        def width(self) -> int:
            """Number of parameters P."""

        @property
        def tolerance(self) -> float:
            """Bound on the relative error of q."""

        @property
        def effective_rank(self) -> float:
            """Number of directions that the data determine; NaN where that is not known."""

    @abstractmethod
    def quadratic(self, tangents: Tangents) -> Tensor:
        """q of each prediction, (N, K)."""

    @abstractmethod
    def covariance(self, left: Tangents, right: Tangents) -> Tensor:
        """Unscaled covariances between two sets of predictions, (N K, M K)."""

    @abstractmethod
    def sample(self, n: int, generator: Generator | None) -> Tensor:
        """Deviations of the parameters with covariance (H + s I)^-1, (n, P)."""

    def root(self, tangents: Tangents | None = None) -> Tensor:
        """A matrix C such that C C^T is the unscaled covariance.

        Args:
            tangents: Tangents of N K predictions; None for the parameters themselves, which only
                the dense form supports.

        Returns:
            (N K, R) for predictions, (P, R) for the parameters.
        """
        if tangents is None:
            raise ValueError(
                f"The {self.name} form keeps no covariance of the parameters. Use form='dense', "
                "with fewer parameters (subset=) if necessary, or draw samples: sample(1000)."
            )
        values, vectors = torch.linalg.eigh(self.covariance(tangents, tangents))
        # A negative lowest eigenvalue shows the size of rounding: only larger ones are kept.
        above_rounding = int((values > -2 * values[0]).sum())
        rank = max(1, min(above_rounding, self.width))
        largest = slice(-rank, None)
        return torch.mul(vectors[:, largest], values[largest].clamp(min=0).sqrt())

    @property
    def condition(self) -> float:
        """Condition number, or an estimate of it from the tolerance."""
        return self.tolerance / torch.finfo(torch.float64).eps

    @property
    def eigenbasis(self) -> Posterior:
        """The eigenbasis, in which every ridge above `least_ridge` can be tried."""
        raise ValueError(self._fixed_ridge_message)

    @property
    def least_ridge(self) -> float:
        """At ridges up to this one the curvature is singular or indefinite."""
        return self.ridge

    def with_ridge(self, ridge: float) -> Form:
        """The same curvature with another ridge, where the form allows it."""
        if ridge != self.ridge:
            raise ValueError(self._fixed_ridge_message)
        return self

    @property
    def _fixed_ridge_message(self) -> str:
        """The message of a form that is asked for another ridge than its own."""
        return (
            f"The ridge of the {self.name} form is fixed by its factorisation. Calibrate with the "
            "ridge given to PredictionRigidity, or use form='dense'."
        )


@dataclass(frozen=True)
class Problem:
    """The sizes and options of a fit from which the form is chosen.

    Attributes:
        parameters: Number of parameters P.
        samples: Number of training samples N.
        outputs: Number of outputs K of each sample.
        numbers_per_sample: How many numbers the tangents of one sample hold.
        itemsize: Bytes of one of these numbers.
        ridge: The ridge s.
        has_dual: Whether the dual form can express the problem (Gauss-Newton, no regulariser).
        exact: Whether the Hessian is the exact one.
        memory: Bytes that may be used.
    """

    parameters: int
    samples: int
    outputs: int
    numbers_per_sample: int
    itemsize: int
    ridge: float
    has_dual: bool
    exact: bool
    memory: int

    @property
    def rows(self) -> int:
        """Number of training predictions n = N K."""
        return self.samples * self.outputs

    @property
    def tangent_bytes(self) -> int:
        """Bytes of the tangents of all samples."""
        return self.samples * self.numbers_per_sample * self.itemsize

    def peak_bytes(self, form: str) -> int:
        """Estimated peak of a form's memory.

        The dense form stores the Hessian, its eigenvectors and LAPACK's workspace (six matrices in
        all), the dual form the kernel and its factor. A few hundred MiB for pieces of the rows are
        not included.
        """
        if form == "dense":
            return 6 * 8 * self.parameters**2
        if form == "dual":
            return 2 * 8 * self.rows**2 + self.tangent_bytes
        return 10 * 8 * self.parameters

    def multiplications(self, form: str) -> float:
        """Estimated arithmetic of the dense or the dual form."""
        p = float(self.parameters)
        n = float(self.rows)
        if form == "dense":
            return n * p**2 + EIGEN_COST * p**3
        return n**2 * self.numbers_per_sample / self.outputs + n**3 / 3


def form_name(problem: Problem, option: FormName) -> str:
    """The name of the form to use: that of the user's option, or for "auto" the cheapest that fits.

    Raises:
        MemoryError: It does not fit into memory.
        ValueError: It cannot express the problem.
    """
    if option != "auto":
        _check_possible(problem, option)
        _check_fits(problem, option)
        return option
    possible = ["dense"]
    if problem.has_dual and problem.ridge > 0:
        possible.append("dual")
    fitting = [name for name in possible if problem.peak_bytes(name) <= problem.memory]
    if "dense" in fitting and problem.parameters <= FEW:
        return "dense"
    if fitting:
        return min(fitting, key=problem.multiplications)
    if problem.exact or problem.ridge == 0:
        # The matrix-free form is not possible either: raise with what the dense form needs.
        _check_fits(problem, "dense")
    return "matrix-free"


def _check_possible(problem: Problem, form: str) -> None:
    """Refuse a form that cannot express the problem."""
    if form == "dense":
        return
    if problem.exact:
        raise ValueError(f"hessian='exact' needs the dense form, got form={form!r}.")
    if problem.ridge == 0:
        raise ValueError(
            f"form={form!r} divides by the ridge: pass ridge > 0 (of the order of the weight decay "
            "times the number of samples, or calibrate it)."
        )
    if form == "dual" and not problem.has_dual:
        raise ValueError(
            "form='dual' does not support a regulariser: use 'dense' or 'matrix-free'."
        )


def _check_fits(problem: Problem, form: str) -> None:
    """Refuse a form that needs more memory than may be used, and name the alternatives."""
    needed = problem.peak_bytes(form)
    if needed <= problem.memory:
        return
    remedies = ["fewer parameters (subset=)"]
    if problem.ridge == 0:
        remedies.append("ridge > 0, which allows the dual and the matrix-free form")
    elif not problem.exact and form != "matrix-free":
        remedies.append("form='matrix-free'")
    raise MemoryError(
        f"The {form} form of {problem.parameters:,} parameters and {problem.rows:,} rows needs "
        f"about {readable_size(needed)}, but only {readable_size(problem.memory)} may be used. "
        f"Choose {', or '.join(remedies)}; or raise memory= (bytes)."
    )


def readable_size(size: float) -> str:
    """A number of bytes in a readable unit.

    Examples:
        >>> readable_size(3 * 2**30), readable_size(5e5)
        ('3.0 GiB', '488 KiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
