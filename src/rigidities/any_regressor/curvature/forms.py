r"""Which form of $q = g^\top (H + s I)^{-1} g$ to use, decided before anything is allocated.

| form | unknowns | memory | needs |
| --- | --- | --- | --- |
| dense | P parameters | P^2 | nothing |
| dual | n = N K rows | n^2 and the rows' factors | a ridge, no regulariser |
| matrix-free | P, by iteration | the rows' factors, or nothing | a ridge |

The dense and the dual form are exact up to rounding; the matrix-free one to its tolerance. Of those
that fit, the one with the least arithmetic is taken, and the dense one where parameters are few.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Generator, Tensor

from ...posterior.memory import free_memory
from ...posterior.posterior import Posterior
from ..derivatives.tangents import Tangents

FormName = Literal["auto", "dense", "dual", "matrix-free"]
FORMS = ("auto", "dense", "dual", "matrix-free")

EIGEN_COST = 25
"""Products of P x P matrices that an eigendecomposition takes, times P."""

FEW = 500
"""Up to so many parameters the dense form, which rounds least, takes well under a second."""

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class Form(ABC):
    """A solved curvature: quadratic forms of tangents."""

    name: ClassVar[str]

    if TYPE_CHECKING:  # fields of some forms, properties of others

        @property
        def ridge(self) -> float:
            """s; fixed by the factorisation, where a form says nothing else."""

        @property
        def width(self) -> int:
            """Number of parameters P."""

        @property
        def tolerance(self) -> float:
            """Bound on the relative error of q."""

        @property
        def effective_rank(self) -> float:
            """Directions that the data determine; NaN where that is not known."""

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
        """(N K, R), whose Gram is the unscaled covariance; (P, R) of the parameters themselves."""
        if tangents is None:
            raise ValueError(
                f"The {self.name} form keeps no covariance of the parameters. Use form='dense', "
                "with fewer of them (subset=) if need be, or draw some: sample(1000)."
            )
        values, vectors = torch.linalg.eigh(self.covariance(tangents, tangents))
        above = int((values > -2 * values[0]).sum())  # no less is rounding, as negative ones tell
        kept = slice(-max(1, min(above, self.width)), None)
        return torch.mul(vectors[:, kept], values[kept].clamp(min=0).sqrt())

    @property
    def condition(self) -> float:
        """Condition number, or what the tolerance says of it."""
        return self.tolerance / torch.finfo(torch.float64).eps

    @property
    def eigenbasis(self) -> Posterior:
        """In which every ridge above `least_ridge` can be tried."""
        raise ValueError(self._fixed)

    @property
    def least_ridge(self) -> float:
        """Ridges up to here leave the curvature singular or indefinite."""
        return self.ridge

    def with_ridge(self, ridge: float) -> Form:
        """The same curvature with another ridge, where the form allows it."""
        if ridge != self.ridge:
            raise ValueError(self._fixed)
        return self

    @property
    def _fixed(self) -> str:
        return (
            f"The ridge of the {self.name} form is fixed by its factorisation. Calibrate with the "
            "ridge given to PredictionRigidity, or use form='dense'."
        )


@dataclass(frozen=True)
class Problem:
    """What decides between the forms.

    Attributes:
        parameters: P.
        samples: N, in the training data.
        outputs: K of each.
        numbers: that the tangents of one sample hold.
        itemsize: bytes of one of them.
        ridge: s.
        dual: whether the dual form can express the problem (Gauss-Newton, no regulariser).
        exact: whether the exact Hessian was asked for.
        memory: bytes that may be used.
    """

    parameters: int
    samples: int
    outputs: int
    numbers: int
    itemsize: int
    ridge: float
    dual: bool
    exact: bool
    memory: int

    @property
    def rows(self) -> int:
        """n = N K."""
        return self.samples * self.outputs

    @property
    def held(self) -> int:
        """Bytes of the tangents of all samples."""
        return self.samples * self.numbers * self.itemsize

    def bytes(self, form: str) -> int:
        """Estimated peak of a form.

        The dense form holds the Hessian, its eigenvectors and LAPACK's workspace (six matrices in
        all), the dual one the kernel and its factor. Pieces of the rows, some
        hundreds of MiB, come on top.
        """
        if form == "dense":
            return 6 * 8 * self.parameters**2
        if form == "dual":
            return 2 * 8 * self.rows**2 + self.held
        return 10 * 8 * self.parameters

    def work(self, form: str) -> float:
        """Estimated multiplications of a form."""
        p, n = float(self.parameters), float(self.rows)
        if form == "dense":
            return n * p**2 + EIGEN_COST * p**3
        return n**2 * self.numbers / self.outputs + n**3 / 3


def chosen(problem: Problem, form: FormName) -> str:
    """The form asked for, or the cheapest that fits.

    Raises:
        MemoryError: it does not fit.
        ValueError: it cannot express the problem.
    """
    if form != "auto":
        _check_possible(problem, form)
        _check_fits(problem, form)
        return form
    possible = ["dense", "dual"] if problem.dual and problem.ridge > 0 else ["dense"]
    fitting = [name for name in possible if problem.bytes(name) <= problem.memory]
    if "dense" in fitting and problem.parameters <= FEW:
        return "dense"
    if fitting:
        return min(fitting, key=problem.work)
    if problem.exact or problem.ridge == 0:
        _check_fits(problem, "dense")
    return "matrix-free"


def _check_possible(problem: Problem, form: str) -> None:
    if form == "dense":
        return
    if problem.exact:
        raise ValueError(f"hessian='exact' needs the dense form, got form={form!r}.")
    if problem.ridge == 0:
        raise ValueError(
            f"form={form!r} divides by the ridge: pass ridge > 0 (of the order of the weight decay "
            "times the number of samples, or calibrate it)."
        )
    if form == "dual" and not problem.dual:
        raise ValueError("form='dual' knows no regulariser: use 'dense' or 'matrix-free'.")


def _check_fits(problem: Problem, form: str) -> None:
    needed = problem.bytes(form)
    if needed <= problem.memory:
        return
    remedies = ["fewer parameters (subset=)"]
    if problem.ridge == 0:
        remedies.append("ridge > 0, which allows the dual and the matrix-free form")
    elif not problem.exact and form != "matrix-free":
        remedies.append("form='matrix-free'")
    raise MemoryError(
        f"The {form} form of {problem.parameters:,} parameters and {problem.rows:,} rows needs "
        f"about {readable(needed)}, and {readable(problem.memory)} may be used. Choose "
        f"{', or '.join(remedies)}; or raise memory= (bytes)."
    )


def available(device: torch.device) -> int:
    """Bytes that can still be allocated: of the GPU, or of the machine or its container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    left = [_number(limit) - _number(used) for limit, used in _CGROUPS]
    return min([_machine(), *(int(size) for size in left if 0 < size < float("inf"))])


def readable(size: float) -> str:
    """Bytes for people.

    Examples:
        >>> readable(3 * 2**30), readable(5e5)
        ('3.0 GiB', '488 KiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _machine() -> int:
    if (free := free_memory(torch.device("cpu"))) is not None:
        return free
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):  # not a POSIX system: a cautious guess
        return 4 * 2**30


def _number(path: str) -> float:
    try:
        return float(Path(path).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return float("inf")
