r"""Scale, noise and, in the dense form, the ridge of a rigidity from new data.

The same criteria as for the last layer (`calibration`). The dense form has an eigenbasis, so that
every ridge can be tried; the other forms keep theirs, which reads as one effective eigenvalue
$\lambda = s$ with $q = p / (\lambda + s)$, $p = 2 s q$.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration.objective import (
    Objective,
    Residuals,
    check_noise,
    constant_nll,
    criterion_for,
    mean_nll,
    search,
)
from ..calibration.report import CalibrationReport
from .curvature.dense_form import DenseForm
from .curvature.forms import Form
from .derivatives.tangents import Tangents

LARGEST = 1 << 27
"""Numbers to keep at most (1 GiB in float64); beyond it every other row is dropped."""


@dataclass
class Rescaling:
    """Errors and what decides their variance, gathered batch by batch.

    Attributes:
        form: the solved curvature.
        searching: whether the ridge is to be chosen.
    """

    form: Form
    searching: bool

    def __post_init__(self) -> None:
        if self.searching and not isinstance(self.form, DenseForm):
            raise ValueError(
                f"The ridge of the {self.form.name} form is fixed by its factorisation. Calibrate "
                "with the ridge given to PredictionRigidity, or use form='dense'."
            )
        self._errors: list[Tensor] = []
        self._powers: list[Tensor] = []
        self._rows, self._stride = 0, 1

    def add(self, error: Tensor, tangents: Tangents) -> None:
        """Errors (N, K) of one batch."""
        error = error.reshape(-1, 1)
        if isinstance(self.form, DenseForm) and self.searching:
            power = self.form.eigenbasis.projections(tangents.matrix().flatten(0, 1)).square()
        else:
            power = 2 * self._shift * self.form.quadratic(tangents).reshape(-1, 1)
        start = -self._rows % self._stride
        self._rows += len(error)
        self._errors.append(error[start :: self._stride].clone())
        self._powers.append(power[start :: self._stride].clone())
        if sum(part.numel() for part in self._powers) > LARGEST:  # every other row will do
            self._errors = [torch.cat(self._errors)[::2].clone()]
            self._powers = [torch.cat(self._powers)[::2].clone()]
            self._stride *= 2

    @property
    def _shift(self) -> float:
        """The effective eigenvalue: the ridge, or 1/2 where there is none."""
        return self.form.ridge or 0.5

    def report(self, criterion: str, noise: str) -> CalibrationReport:
        """Choose and judge."""
        check_noise(noise)
        if criterion in {"evidence", "loo"}:
            raise ValueError(f"criterion={criterion!r} is for LastLayerRigidity.")
        error, power = torch.cat(self._errors), torch.cat(self._powers)
        bad = int((~torch.isfinite(error)).sum())
        if bad:
            raise ValueError(
                f"{bad} of {len(error)} calibration targets or predictions are not finite. Leave "
                "those rows out."
            )
        if len(error) < 2:
            raise ValueError(f"Calibration needs at least two rows, got {len(error)}.")
        ones = torch.ones_like(error)
        data = Residuals(error, power, ones, ones, self._rows)
        ridge = None if self.searching else self.form.ridge
        eigenvalues = self._eigenvalues(error)
        objective = Objective(data, eigenvalues, criterion_for(criterion), noise)
        choice, edge = search(objective, ridge)
        return CalibrationReport(
            ridge=choice.ridge,
            scale=choice.scale2.sqrt(),
            noise=choice.scale2 * choice.floor,
            criterion=criterion,
            value=choice.value,
            at_edge=edge,
            condition=self._condition(choice.ridge),
            effective_rank=self._rank(choice.ridge),
            width=self.form.width,
            nll=mean_nll(data, objective.variance(choice)),
            nll_constant=constant_nll(data),
            rows=self._rows,
        )

    def _eigenvalues(self, like: Tensor) -> Tensor:
        if isinstance(self.form, DenseForm) and self.searching:
            return self.form.eigenbasis.eigenvalues
        return like.new_tensor([2 * self._shift - self.form.ridge])

    def _condition(self, ridge: float) -> float:
        if isinstance(self.form, DenseForm):
            return self.form.with_ridge(ridge).posterior.condition
        return self.form.tolerance / torch.finfo(torch.float64).eps

    def _rank(self, ridge: float) -> float:
        if isinstance(self.form, DenseForm):
            return self.form.with_ridge(ridge).effective_rank
        return float(getattr(self.form, "effective_rank", float("nan")))
