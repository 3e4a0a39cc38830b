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
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..notices import extra, needed, require_level
from ..posterior.draws import standard_normal
from ..prediction.derived import Derived, correlation
from ..prediction.prediction import Prediction
from .arrays import Values, as_tensor, column, float64

Model = Callable[[Any], tuple[Tensor, Tensor]]
"""x -> predictions (M,) and their derivatives by the parameters (M, P)."""


def linear_model(rows: Callable[[Any], Tensor], w: Tensor, x: Any) -> tuple[Tensor, Tensor]:
    """rows(x) @ w, and the rows: `partial(linear_model, rows, w)` is a linear fit's model."""
    found = rows(x)
    return found @ w, found


@dataclass(frozen=True)
class FitRigidity:
    r"""Error bars of a fit. Tensors come out in float64 on the CPU (`numpy.asarray` takes them).

    Methods take x as the fitted function does, and of a fit without one (`from_jacobian`,
    `from_covariance`) the predictions' derivatives by the parameters, (..., P).

    Attributes:
        root: (P, R), whose Gram is $(J^\top W J + \Sigma)^{-1}$.
        scale: the residual standard deviation s.
        parameters: (P,) the fitted values, or None where they were not given.
        noise: residual variance $s^2$ of an observation of weight one; None where unknown.
        sigma: of all observations, in units of s: 1 without weights; None where they differ.
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

    root: Tensor
    scale: float = 1.0
    parameters: Tensor | None = None
    noise: float | None = None
    sigma: float | None = 1.0
    degrees_of_freedom: float = math.inf
    fixed: tuple[int, ...] = ()
    model: Model | None = None

    @property
    def width(self) -> int:
        """Number of parameters P, fixed ones included."""
        return len(self.root)

    def variance(self, x: Any) -> Tensor:
        r"""$s^2 q$ of predictions: the mean's, without noise."""
        return self.scale**2 * self._whitened(x).square().sum(-1)

    def std(self, x: Any) -> Tensor:
        """Standard error of predictions: the mean's, without noise."""
        return self.variance(x).sqrt()

    def rigidity(self, x: Any) -> Tensor:
        """The paper's R = 1/q, unscaled; infinite where no free parameter matters."""
        return 1 / self._whitened(x).square().sum(-1)

    def covariance(self, x1: Any, x2: Any = None) -> Tensor:
        """Joint covariance of N predictions and M others, by default the same: (N, M)."""
        given = [self._whitened(x) for x in (x1, x1 if x2 is None else x2)]
        left, right = (one if one.ndim > 1 else one[None] for one in given)
        return self.scale**2 * left @ right.mT

    def propagate(self, fn: Callable[[Any], Any], x: Any = None) -> Derived:
        """As `PredictionRigidity.propagate`: a function of predictions or, without x, parameters.

        fn takes a NumPy array, (M,) or (P,); where it refuses that, as torch's do, a tensor.
        """
        point, root = self.parameters, self.root
        if x is not None:
            point, rows = self._modelled(x)
            root = rows @ root
        if point is None:
            raise ValueError("This fit knows no parameters. Pass parameters= when building it.")

        def moved(step: Tensor) -> Any:
            try:
                found = fn((point + step).numpy())
            except (AttributeError, TypeError) as first:
                try:
                    found = fn(point + step)
                except Exception:
                    raise first from None
            with suppress(TypeError, ValueError):  # else the refusal is left to `Derived`
                return None if found is None else as_tensor(found)
            return found

        return Derived.by_differences(moved, self.scale * root.mT)

    @property
    def parameter_covariance(self) -> Tensor:
        """(P, P); zero for fixed parameters."""
        return self.scale**2 * self.root @ self.root.mT

    @property
    def parameter_correlation(self) -> Tensor:
        """(P, P); a fixed parameter correlates with itself alone."""
        return correlation(self.parameter_covariance)

    @property
    def parameter_std(self) -> Tensor:
        """(P,) standard errors of the parameters; zero for fixed ones."""
        return self.scale * self.root.square().sum(1).sqrt()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n parameter vectors (n, P) about the fitted ones; about zero where those are unknown."""
        z = standard_normal((n, self.root.shape[1]), self.root.device, generator)
        draws: Tensor = self.scale * z @ self.root.mT
        return draws if self.parameters is None else self.parameters + draws

    def predict(self, x: Any, *, noise: bool | Values = False) -> Prediction:
        r"""Predictions of the model at x with their error bars.

        Args:
            x: what the fitted function takes.
            noise: False: the error bar is that of the fitted curve (confidence interval of the
                mean). True: that of a new observation like those of the fit (prediction interval),
                $s^2$ wider; refused where these have each a sigma or weight of their own. Values:
                the variance of each new observation, $s^2 \sigma^2$ for a sigma in the fit's units.
        """
        mean, rows = self._modelled(x)
        q, added = (rows @ self.root).square().sum(-1), self._noise(noise, mean)
        return Prediction(mean=mean, epistemic=self.scale**2 * q, noise=added, rigidity=1 / q)

    def interval(
        self, x: Any, level: float = 0.9, *, noise: bool | Values = False
    ) -> tuple[Tensor, Tensor]:
        """Student-t interval (low, high) with this fit's degrees of freedom.

        The interval of `predict(x)` is Gaussian: the same for many degrees of freedom, too narrow
        for few. Needs SciPy.
        """
        require_level(level, "An interval's")
        install = extra("experiments") + ", or take the Gaussian predict(x).interval(level)"
        stdtrit = needed("scipy.special", install).stdtrit
        prediction = self.predict(x, noise=noise)
        half = float(stdtrit(self.degrees_of_freedom, (1 + level) / 2)) * prediction.std
        return prediction.mean - half, prediction.mean + half

    def _modelled(self, x: Any) -> tuple[Tensor, Tensor]:
        if self.model is None:
            raise ValueError(
                "This fit knows no model function. Pass Jacobian rows to variance(), or build the "
                "fit with curve_fit, least_squares(f=...), polyfit or linear."
            )
        return self.model(x)

    def _whitened(self, x: Any) -> Tensor:
        """Derivatives by independent standard coordinates of the parameters, (..., R)."""
        rows = float64(x, "rows") if self.model is None else self.model(x)[1]
        if rows.ndim < 1 or rows.shape[-1] != self.width:
            raise ValueError(
                f"Expected rows with one derivative for each of {self.width} parameters, "
                f"(..., {self.width}), got {tuple(rows.shape)}."
            )
        return rows @ self.root

    def _noise(self, noise: bool | Values, mean: Tensor) -> Tensor:
        given = as_tensor(noise)
        if given.dtype == torch.bool and given.ndim == 0:
            if not given:
                return torch.zeros_like(mean)
            if self.noise is None:
                raise ValueError(
                    "The residual variance of this fit is unknown. Give the data (x, y), the "
                    "residuals or (after a robust loss) scale= when building it, or pass "
                    "noise=variances."
                )
            if self.sigma is None:
                raise ValueError(
                    "The sigma of a new observation is not known: those of this fit have each a "
                    "sigma or weight of their own, or were not given. Pass noise=fit.noise * "
                    "sigma_new**2, sigma_new in the units of theirs (1 / sqrt(weight)); fit.noise "
                    "is 1 for an absolute sigma."
                )
            return torch.full_like(mean, self.noise * self.sigma**2)
        one = given.numel() == 1
        variances = float64(given, "noise") if one else column(given, "noise", len(mean))
        if bool((variances < 0).any()):
            raise ValueError("Expected variances as noise, got negative values.")
        return variances.reshape(-1).expand(mean.shape)
