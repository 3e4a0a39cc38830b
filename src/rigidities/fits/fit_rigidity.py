r"""The rigidity of a least-squares fit, from its Jacobian or its parameter covariance.

With rows $g = \partial \tilde y / \partial w$, Jacobian $J$, weights $W$ and penalty $\Sigma$

$$ q(g) = g^\top (J^\top W J + \Sigma)^{-1} g, \qquad R = 1/q, \qquad \sigma^2(g) = s^2 q(g),
   \qquad s^2 = \frac{\sum_i w_i r_i^2}{n - \mathrm{tr} H} $$

where $\mathrm{tr} H = \sum_i w_i q(g_i)$ is the number of parameters when nothing is penalised.
`sources` builds it from a Jacobian or from a covariance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..notices import extra, require_level
from ..posterior.posterior import Posterior
from ..prediction.prediction import Prediction
from .arrays import Values, float64

Model = Callable[[Any], tuple[Tensor, Tensor]]
"""x -> predictions (M,) and their derivatives by the parameters (M, P)."""


def linear_model(rows: Callable[[Any], Tensor], parameters: Tensor) -> Model:
    """Of a fit that is linear in its parameters: x -> rows(x) @ parameters, and the rows."""
    return partial(_linear, rows, parameters)


def _linear(rows: Callable[[Any], Tensor], parameters: Tensor, x: Any) -> tuple[Tensor, Tensor]:
    found = rows(x)
    return found @ parameters, found


@dataclass(frozen=True)
class FitRigidity:
    r"""Error bars of a fit. Tensors come out in float64 on the CPU (`numpy.asarray` takes them).

    Attributes:
        posterior: of the free parameters times `units`; its scale is the residual standard
            deviation s. Use the methods here, which know the units.
        units: (F,) length of each free column of the Jacobian.
        parameters: (P,) the fitted values, or None where they were not given.
        noise: residual variance $s^2$ of an observation of weight one; None where unknown.
        degrees_of_freedom: of $s^2$, n minus the (effective) number of parameters; infinite where
            s was given rather than estimated.
        fixed: parameters that sit at a bound and are held there: no uncertainty.
        model: x -> predictions and their derivatives by the parameters.

    Examples:
        >>> from rigidities.fits import from_jacobian
        >>> line = torch.tensor([[1.0, -1.0], [1.0, 0.0], [1.0, 1.0]])
        >>> fit = from_jacobian(line, residuals=[0.1, -0.2, 0.1])
        >>> fit.degrees_of_freedom, round(fit.noise, 4)
        (1.0, 0.06)
        >>> round(fit.variance([1.0, 0.0]).item(), 12)  # 0.06 / 3: the variance of a mean
        0.02
    """

    posterior: Posterior
    units: Tensor
    parameters: Tensor | None = None
    noise: float | None = None
    degrees_of_freedom: float = math.inf
    fixed: tuple[int, ...] = ()
    model: Model | None = None

    @property
    def width(self) -> int:
        """Number of parameters P, fixed ones included."""
        return len(self.units) + len(self.fixed)

    def variance(self, rows: Values) -> Tensor:
        r"""$s^2 q$ of predictions whose derivatives by the parameters are rows (..., P)."""
        return self.posterior.variance(self._scaled(rows))

    def std(self, rows: Values) -> Tensor:
        """Standard error of predictions with derivatives (..., P): the mean's, without noise."""
        return self.variance(rows).sqrt()

    def rigidity(self, rows: Values) -> Tensor:
        """The paper's R = 1/q, unscaled; infinite where no free parameter matters."""
        return self.posterior.rigidity(self._scaled(rows))

    def covariance(self, rows: Values, other: Values | None = None) -> Tensor:
        """Joint covariance of predictions: (N, P), (M, P) -> (N, M)."""
        right = None if other is None else self._scaled(other)
        return self.posterior.covariance(self._scaled(rows), right)

    @property
    def parameter_covariance(self) -> Tensor:
        """(P, P); zero for fixed parameters."""
        return self.covariance(torch.eye(self.width, dtype=torch.float64))

    @property
    def parameter_std(self) -> Tensor:
        """(P,) standard errors of the parameters; zero for fixed ones."""
        return self.std(torch.eye(self.width, dtype=torch.float64))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n parameter vectors (n, P) about the fitted ones; about zero where those are unknown."""
        draws = torch.zeros(n, self.width, dtype=torch.float64)
        draws[:, self._free] = self.posterior.sample(n, generator) / self.units
        return draws if self.parameters is None else self.parameters + draws

    def predict(self, x: Any, *, noise: bool | Values = False) -> Prediction:
        r"""Predictions of the model at x with their error bars.

        Args:
            x: what the fitted function takes.
            noise: False: the error bar is that of the fitted curve (confidence interval of the
                mean). True: $s^2$ is added, for a new observation of weight one (prediction
                interval). Values: the variance of each new observation.
        """
        if self.model is None:
            raise ValueError(
                "This fit knows no model function. Pass Jacobian rows to variance(), or build the "
                "fit with curve_fit, least_squares(f=...), polyfit or linear."
            )
        mean, rows = self.model(x)
        scaled = self._scaled(rows)
        return Prediction(
            mean=mean,
            epistemic=self.posterior.variance(scaled),
            noise=self._noise(noise, mean),
            rigidity=self.posterior.rigidity(scaled),
        )

    def interval(
        self, x: Any, level: float = 0.9, *, noise: bool | Values = False
    ) -> tuple[Tensor, Tensor]:
        """Student-t interval (low, high) with this fit's degrees of freedom.

        The interval of `predict(x)` is Gaussian: the same for many degrees of freedom, too narrow
        for few. Needs SciPy.
        """
        require_level(level, "An interval's")
        try:
            from scipy.special import stdtrit
        except ImportError as error:
            raise ImportError(
                f"Student's interval needs SciPy: {extra('experiments')}. "
                "The Gaussian one, predict(x).interval(level), does not."
            ) from error
        prediction = self.predict(x, noise=noise)
        half = float(stdtrit(self.degrees_of_freedom, (1 + level) / 2)) * prediction.std
        return prediction.mean - half, prediction.mean + half

    @property
    def _free(self) -> list[int]:
        return [i for i in range(self.width) if i not in self.fixed]

    def _scaled(self, rows: Values) -> Tensor:
        rows = float64(rows, "rows")
        if rows.ndim < 1 or rows.shape[-1] != self.width:
            raise ValueError(
                f"Expected rows with one derivative for each of {self.width} parameters, "
                f"(..., {self.width}), got {tuple(rows.shape)}."
            )
        return rows[..., self._free] / self.units

    def _noise(self, noise: bool | Values, mean: Tensor) -> Tensor:
        if noise is False:
            return torch.zeros_like(mean)
        if noise is True:
            if self.noise is None:
                raise ValueError(
                    "The residual variance of this fit is unknown. Give the data (x, y), the "
                    "residuals or (after a robust loss) scale= when building it, or pass "
                    "noise=variances."
                )
            return torch.full_like(mean, self.noise)
        variances = float64(noise, "noise")
        if bool((variances < 0).any()):
            raise ValueError("Expected variances as noise, got negative values.")
        return variances.expand(mean.shape)
