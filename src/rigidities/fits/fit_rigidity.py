r"""The rigidity of a least-squares fit, from its Jacobian or its parameter covariance.

With rows $g = \partial \tilde y / \partial w$, Jacobian $J$, weights $W$ and penalty $\Sigma$

$$ q(g) = g^\top (J^\top W J + \Sigma)^{-1} g, \qquad R = 1/q, \qquad \sigma^2(g) = s^2 q(g),
   \qquad s^2 = \frac{\sum_i w_i r_i^2}{n - \mathrm{tr} H} $$

where $\mathrm{tr} H = \sum_i w_i q(g_i)$ is the number of parameters when nothing is penalised.

`FitRigidity` stores a root of the inverse. Where the fit has a function, it also stores a model,
which maps new inputs to predictions and rows g. `sources` builds it from a Jacobian or a
covariance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..notices import extra, needed, require_level
from ..plots import along
from ..posterior.draws import standard_normal
from ..prediction.derived import Derived, correlation
from ..prediction.picture import pair
from ..prediction.prediction import Prediction
from .arrays import Values, as_tensor, column, float64

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["FitRigidity"]

MOST_PRINTED = 12
"""A printed fit shows at most this many parameters."""

Model = Callable[[Any], tuple[Tensor, Tensor]]
"""x -> predictions (M,), and their derivatives with respect to the parameters (M, P)."""


@dataclass(frozen=True)
class LinearModel:
    """The model of a linear fit: rows(x) @ parameters, with the rows as derivatives.

    Attributes:
        rows: x -> design matrix (M, P).
        parameters: (P,).
    """

    rows: Callable[[Any], Tensor]
    parameters: Tensor

    def __call__(self, x: Any) -> tuple[Tensor, Tensor]:
        """Predictions (M,) and their derivatives (M, P)."""
        rows = self.rows(x)
        return rows @ self.parameters, rows


@dataclass(frozen=True)
class FitRigidity:
    r"""Error bars of a fit. Results are float64 tensors on the CPU (`numpy.asarray` accepts them).

    Methods accept x as the fitted function does. A fit without a function (`from_jacobian`,
    `from_covariance`) expects the derivatives of the predictions with respect to the parameters
    instead, (..., P).

    Attributes:
        root: (P, R), a matrix C such that $C C^\top = (J^\top W J + \Sigma)^{-1}$.
        scale: The residual standard deviation s.
        parameters: (P,) the fitted values, or None if they were not given.
        noise: Residual variance $s^2$ of an observation of weight one; None where unknown.
        sigma: Standard deviation of every observation in units of s, which is 1 without weights;
            None if observations differ, or if it is not known.
        degrees_of_freedom: Those of $s^2$: n minus the (effective) number of parameters, or
            infinity where s was given rather than estimated.
        fixed: Numbers of the parameters that are fixed at a bound, without uncertainty.
        model: x -> predictions and their derivatives with respect to the parameters; None if
            unknown.

    Examples:
        >>> from rigidities.fits import from_jacobian
        >>> line = torch.tensor([[1.0, -1.0], [1.0, 0.0], [1.0, 1.0]])
        >>> fit = from_jacobian(line, residuals=[0.1, -0.2, 0.1], parameters=[3.0, 2.0])
        >>> print(fit)
        Fit of 2 parameters
          0: 3.00 ± 0.14
          1: 2.00 ± 0.17
        residual scale 0.2449, 1 degree of freedom
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
        r"""Variance $s^2 q$ of predictions: that of the mean, without noise."""
        return self.scale**2 * self._whitened(x).square().sum(-1)

    def std(self, x: Any) -> Tensor:
        """Standard error of predictions: that of the mean, without noise."""
        return self.variance(x).sqrt()

    def rigidity(self, x: Any) -> Tensor:
        """The paper's R = 1/q, unscaled; infinite where no free parameter matters."""
        return 1 / self._whitened(x).square().sum(-1)

    def covariance(self, x1: Any, x2: Any = None) -> Tensor:
        """Joint covariance (N, M) of N predictions and M others, by default the same ones."""
        left = self._whitened(x1)
        right = self._whitened(x1 if x2 is None else x2)
        if left.ndim == 1:  # one prediction
            left = left[None]
        if right.ndim == 1:
            right = right[None]
        return self.scale**2 * left @ right.mT

    def propagate(self, fn: Callable[[Any], Any], x: Any = None) -> Derived:
        """Mean and standard deviation of a function of the predictions, or of the parameters.

        See `PredictionRigidity.propagate`.

        Args:
            fn: A function of a NumPy array, (M,) or (P,). If it does not accept an array, like
                torch's functions, it is called with a tensor.
            x: Where to predict; None for a function of the parameters.
        """
        if x is None:
            point = self.parameters
            root = self.root
        else:
            point, rows = self._modelled(x)
            root = rows @ self.root
        if point is None:
            raise ValueError(
                "The parameters of this fit are not known. Pass parameters= when you create it."
            )
        centre = point

        def shifted(step: Tensor) -> Any:
            """The function a step away from the point."""
            return _called(fn, centre + step)

        return Derived.by_differences(shifted, self.scale * root.mT)

    @property
    def parameter_covariance(self) -> Tensor:
        """(P, P) covariance of the parameters; zero for fixed ones."""
        return self.scale**2 * self.root @ self.root.mT

    @property
    def parameter_correlation(self) -> Tensor:
        """(P, P) correlations; a fixed parameter is correlated only with itself."""
        return correlation(self.parameter_covariance)

    @property
    def parameter_std(self) -> Tensor:
        """(P,) standard errors of the parameters; zero for fixed ones."""
        return self.scale * self.root.square().sum(1).sqrt()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n parameter vectors (n, P) about the fitted ones, or about zero if unknown."""
        z = standard_normal((n, self.root.shape[1]), self.root.device, generator)
        draws: Tensor = self.scale * z @ self.root.mT
        if self.parameters is None:
            return draws
        return self.parameters + draws

    def predict(self, x: Any, *, noise: bool | Values = False) -> Prediction:
        r"""Predictions of the model at x with their error bars.

        Args:
            x: Inputs, in the form that the fitted function accepts.
            noise: With False, the error bar is that of the fitted curve (confidence interval of the
                mean). With True, it is that of a new observation like those of the fit (prediction
                interval), and the variance is larger by $s^2$; this is refused if observations have
                different sigmas or weights. You can also pass the variance of each new observation,
                which is $s^2 \sigma^2$ for a sigma in the fit's units.

        Raises:
            ValueError: The fit has no model, or its noise is not known.
        """
        mean, rows = self._modelled(x)
        q = (rows @ self.root).square().sum(-1)
        return Prediction(
            mean=mean,
            epistemic=self.scale**2 * q,
            noise=self._noise_variance(noise, mean),
            rigidity=1 / q,
        )

    def interval(
        self, x: Any, level: float = 0.9, *, noise: bool | Values = False
    ) -> tuple[Tensor, Tensor]:
        """Student-t interval (low, high) with this fit's degrees of freedom.

        The interval of `predict(x)` is Gaussian. With many degrees of freedom the two are the same,
        but with few the Gaussian interval is too narrow. This method needs SciPy.

        Args:
            x: Inputs, in the form that the fitted function accepts.
            level: Probability of the interval.
            noise: As in `predict`.
        """
        require_level(level, "An interval's")
        install = extra("experiments") + ", or use the Gaussian predict(x).interval(level)"
        student_quantile = needed("scipy.special", install).stdtrit
        prediction = self.predict(x, noise=noise)
        quantile = float(student_quantile(self.degrees_of_freedom, (1 + level) / 2))
        half_width = quantile * prediction.std
        return prediction.mean - half_width, prediction.mean + half_width

    def plot(
        self,
        x: Any,
        ax: Axes | None = None,
        *,
        data: tuple[Values, Values] | None = None,
        level: float | None = None,
        noise: bool | Values = False,
    ) -> Axes:
        """Draw the fitted curve with its band over one input.

        The two bands are those of 1 and 2 standard errors. With `level` there is a single band,
        that of `interval`.

        Args:
            x: Inputs, one number for each prediction, such as `numpy.linspace(0, 10, 200)`.
            ax: Axes of matplotlib to draw on, new ones by default.
            data: The inputs and targets of the fit, drawn as crosses.
            level: Probability of the band, which then needs SciPy.
            noise: As in `predict`. With True the band is that of new observations.

        Returns:
            The axes. Nothing is shown or saved.

        Raises:
            ImportError: Matplotlib is missing.
            ValueError: The fit has no model, or x has several columns.
        """
        prediction = self.predict(x, noise=noise)
        places = float64(x, "x")
        if places.numel() != len(prediction):
            raise ValueError(
                f"Expected one input for each of {len(prediction)} predictions, got x of shape "
                f"{tuple(places.shape)}. A curve has one input: with several, choose the one to "
                "draw along, fit.predict(x).plot(x=x, along=0)."
            )
        std = prediction.std
        if level is not None:
            # A Gaussian with this standard deviation has the interval of Student's t.
            low, high = self.interval(x, level, noise=noise)
            std = (high - low) / 2 / NormalDist().inv_cdf((1 + level) / 2)
        return along(places, prediction.mean, std, ax=ax, train=data, level=level)

    def __repr__(self) -> str:
        stds = self.parameter_std.tolist()
        lines = ["Fit of 1 parameter" if self.width == 1 else f"Fit of {self.width} parameters"]
        for number, std in enumerate(stds[:MOST_PRINTED]):
            lines.append(f"  {number}: {self._printed_parameter(number, std)}")
        more = self.width - MOST_PRINTED
        if more > 0:
            lines.append(f"  and {more} more: see parameters and parameter_std")
        lines.append(self._printed_scale())
        return "\n".join(lines)

    def _printed_parameter(self, number: int, std: float) -> str:
        """The value of one parameter and its standard error."""
        if self.parameters is None:
            return f"unknown ± {std:.3g}"
        value = float(self.parameters[number])
        if number in self.fixed:
            return f"{value:.6g}, fixed at a bound"
        return pair(value, std)

    def _printed_scale(self) -> str:
        """The residual scale and its degrees of freedom."""
        scale = "unknown" if self.noise is None else f"{self.scale:.4g}"
        if math.isfinite(self.degrees_of_freedom):
            noun = "degree" if self.degrees_of_freedom == 1 else "degrees"
            return f"residual scale {scale}, {self.degrees_of_freedom:.4g} {noun} of freedom"
        if self.noise is None:
            return "residual scale unknown"
        return f"residual scale {scale}, as given"

    def _modelled(self, x: Any) -> tuple[Tensor, Tensor]:
        """Predictions (M,) and their derivatives (M, P); raises ValueError without a model."""
        if self.model is None:
            raise ValueError(
                "The model function of this fit is not known. Pass Jacobian rows to variance(), "
                "or create the fit with curve_fit, least_squares(result, f) or polyfit."
            )
        return self.model(x)

    def _whitened(self, x: Any) -> Tensor:
        """The derivatives times the root, (..., R): their squares add up to q."""
        if self.model is None:
            rows = float64(x, "rows")
        else:
            _, rows = self.model(x)
        if rows.ndim < 1 or rows.shape[-1] != self.width:
            raise ValueError(
                f"Expected rows with one derivative for each of {self.width} parameters, "
                f"(..., {self.width}), got {tuple(rows.shape)}."
            )
        return rows @ self.root

    def _noise_variance(self, noise: bool | Values, mean: Tensor) -> Tensor:
        """Variances (M,) from the option `noise` of `predict`."""
        values = as_tensor(noise)
        if values.dtype == torch.bool and values.ndim == 0:
            if not values:
                return torch.zeros_like(mean)
            return torch.full_like(mean, self._observation_variance())
        if values.numel() == 1:
            variances = float64(values, "noise")
        else:
            variances = column(values, "noise", len(mean))
        if bool((variances < 0).any()):
            raise ValueError("Expected variances as noise, got negative values.")
        return variances.reshape(-1).expand(mean.shape)

    def _observation_variance(self) -> float:
        """Variance of a new observation like those of the fit; an error where those differ."""
        if self.noise is None:
            raise ValueError(
                "The residual variance of this fit is unknown. Pass the data (x, y), the "
                "residuals or (after a robust loss) scale= when you create it, or pass "
                "noise=variances."
            )
        if self.sigma is None:
            raise ValueError(
                "The sigma of a new observation is not known: each observation of this fit has "
                "its own sigma or weight, or these were not given. Pass noise=fit.noise * "
                "sigma_new**2, with sigma_new in the same units (1 / sqrt(weight)); fit.noise is "
                "1 for an absolute sigma."
            )
        return self.noise * self.sigma**2


def _called(fn: Callable[[Any], Any], point: Tensor) -> Any:
    """fn of a NumPy array, or of a tensor where fn does not accept that; as a tensor."""
    try:
        result = fn(point.numpy())
    except (AttributeError, TypeError) as refusal_of_array:
        try:
            result = fn(point)
        except Exception:
            raise refusal_of_array from None
    if result is None:
        return None
    with suppress(TypeError, ValueError):
        return as_tensor(result)
    return result  # `Derived` raises the error
