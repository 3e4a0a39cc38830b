r"""Quantities derived from predictions or parameters, with first-order error bars.

A quantity $g(a)$ of parameters or predictions with covariance $\Sigma = L L^\top$ has the variance
$|L^\top \nabla g|^2$ to first order. A `Derived` contains the rows $L^\top \nabla g$ of many
quantities, from which their covariance follows as well. The derivatives come from automatic
differentiation (`Derived.of`) or from differences (`Derived.by_differences`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..notices import notify, require_level
from .distribution import Gaussian, gaussian_interval

__all__ = ["Derived", "correlation", "differences"]

STEP = 1 / 8
"""Length of a step of differences in standard deviations: much larger than search tolerances."""

WEIGHTS = (3 / 4, -3 / 20, 1 / 60)
"""Weights of the differences over one, two and three steps to each side.

They are exact for polynomials up to degree 6.
"""


@dataclass(frozen=True)
class Derived:
    r"""The value of a function of many predictions, with its standard deviation.

    It contains only the epistemic variance (the uncertainty of the weights), with all correlations
    between predictions. See `propagation` for what that leaves out.

    Attributes:
        mean: The function of the model's own predictions, plus `shift`.
        variance: Variance to first order, shaped like the mean.
        shift: $\tfrac12 \mathrm{tr}(H \Sigma)$, what curvature adds to the mean; zero unless
            requested.
        rows: Derivatives with respect to independent standard coordinates, (Q, R) for Q quantities,
            in float64; None if they would have needed too much memory.
        precision: Precision of the derivatives: float64 if the function accepts it.

    Examples:
        >>> rows = torch.tensor([[3.0, 4.0], [3.0, 0.0]], dtype=torch.float64)
        >>> d = Derived.of(torch.tensor([10.0, 20.0]), rows)
        >>> d.std.tolist(), d.covariance.tolist()
        ([5.0, 3.0], [[25.0, 9.0], [9.0, 9.0]])
    """

    mean: Tensor
    variance: Tensor
    shift: Tensor
    rows: Tensor | None = field(repr=False)
    precision: torch.dtype = torch.float64

    @classmethod
    def of(
        cls,
        value: Tensor,
        rows: Tensor | None,
        *,
        variance: Tensor | None = None,
        shift: Tensor | None = None,
        precision: torch.dtype = torch.float64,
    ) -> Derived:
        """From the function's value and its derivatives.

        Args:
            value: The function at the model's predictions, of any shape. Variance and shift get its
                dtype, at least float32.
            rows: Derivatives with respect to independent standard coordinates, (Q, R). If None,
                pass `variance`.
            variance: Variances, (Q,); None to compute them from `rows`.
            shift: What curvature adds to the value, (Q,); None for zero.
            precision: Precision of the derivatives.
        """
        if variance is None:
            assert rows is not None
            variance = rows.square().sum(1)
        dtype = torch.promote_types(value.dtype, torch.float32)  # half has too few digits
        if shift is None:
            shift = torch.zeros_like(variance)
            mean = value
        else:
            mean = value + shift.reshape(value.shape).to(dtype)
        return cls(
            mean=mean,
            variance=variance.reshape(value.shape).to(dtype),
            shift=shift.reshape(value.shape).to(dtype),
            rows=rows,
            precision=precision,
        )

    @classmethod
    def by_differences(cls, fn: Callable[[Tensor], Any], directions: Tensor) -> Derived:
        """From differences of a function of deviations.

        A warning is given where fn is not a straight line within its error bar, because a
        first-order error bar is unreliable there.

        Args:
            fn: Takes deviations (M,) from the fitted values and returns real numbers.
            directions: Independent deviations of one standard deviation each, (R, M).
        """
        if len(directions) > directions.shape[1]:
            # Fewer directions with the same covariance.
            directions = torch.linalg.qr(directions, mode="r").R
        value = _real(fn(torch.zeros_like(directions[0])))
        flat_value = value.flatten()

        def flat_fn(deviations: Tensor) -> Tensor:
            return _real(fn(deviations), value).flatten()

        slopes, ends = differences(flat_fn, STEP * directions)
        rows = slopes.mT / STEP
        # How far the values three steps away lie off the straight line, in all directions together.
        reach = len(WEIGHTS)
        line = torch.stack([slopes, -slopes]) * reach
        off_line = (ends - flat_value - line).abs().amax(0).norm(dim=0) / (reach * STEP)
        is_bent = ~(off_line < rows.norm(dim=1) / 2)
        if bool(is_bent.any()):
            if bool((ends == flat_value).all()) and not rows.any():
                finding = "does not vary: a bar of zero is only right for a constant"
            else:
                finding = (
                    "is strongly curved, jumps or does not vary: the first-order error bar is "
                    "unreliable"
                )
            notify(
                f"Within the error bar of {int(is_bent.sum())} of {len(rows)} quantities fn "
                f"{finding}. Avoid coarse grids and rounding, or use the spread of fn over "
                "sample(1000)."
            )
        return cls.of(value, rows)

    @property
    def std(self) -> Tensor:
        """Standard deviation to first order."""
        return self.variance.sqrt()

    @property
    def covariance(self) -> Tensor:
        """Covariance of all quantities, flattened: (Q, Q).

        Raises:
            ValueError: The derivatives were too many to be stored.
        """
        if self.rows is None:
            raise ValueError(
                f"The derivatives of {self.mean.numel()} quantities were not kept, because they "
                "would need more than 1 GiB. Propagate fewer quantities at a time."
            )
        return (self.rows @ self.rows.mT).to(self.variance.dtype)

    def quantile(self, level: float) -> Tensor:
        """The value with probability `level` below it, for a Gaussian quantity."""
        require_level(level, "A quantile's")
        z = Gaussian().quantile(torch.tensor(level, dtype=torch.float64))
        return self.mean + z.to(self.std) * self.std

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central Gaussian interval that covers probability `level`: (low, high)."""
        return gaussian_interval(self.mean, self.std, level)


def differences(fn: Callable[[Tensor], Tensor], steps: Tensor) -> tuple[Tensor, Tensor]:
    """Slopes of a function along several steps, by central differences.

    Args:
        fn: Takes deviations (M,) and returns a tensor of one shape.
        steps: Steps of the differences, (R, M).

    Returns:
        The changes of fn per step, (R, ...), and its values three steps ahead and three steps
        back, (2, R, ...).
    """

    def values(side: int) -> Tensor:
        """fn one, two and three steps to one side, (3, R, ...)."""
        by_count = []
        for count in range(1, len(WEIGHTS) + 1):
            by_count.append(torch.stack([fn(side * count * step) for step in steps]))
        return torch.stack(by_count)

    ahead = values(1)
    back = values(-1)
    slopes = torch.tensordot(ahead.new_tensor(WEIGHTS), ahead - back, 1)
    return slopes, torch.stack([ahead[-1], back[-1]])


def correlation(covariance: Tensor) -> Tensor:
    """The correlations of a covariance (Q, Q).

    A quantity that does not vary correlates only with itself.
    """
    std = covariance.diagonal().sqrt()
    return (covariance / std / std[:, None]).nan_to_num(0.0).clamp(-1, 1).fill_diagonal_(1.0)


def _real(values: Any, like: Tensor | None = None) -> Tensor:
    """What fn returned, in float64.

    Args:
        values: What fn returned.
        like: What fn returned at the fitted values; None where `values` are just that.

    Raises:
        TypeError: It is not a tensor or array of numbers.
        ValueError: It is complex, empty, not finite, or of another shape than `like`.
    """
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        kind = type(values).__name__
        raise TypeError(f"fn must return numbers in one tensor or array, got {kind}.") from None
    has_other_shape = like is not None and tensor.shape != like.shape
    if tensor.is_complex() or not tensor.numel() or has_other_shape:
        raise ValueError(
            f"fn must return real numbers, always of the same shape, got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}."
        )
    if not bool(tensor.isfinite().all()):
        place = "at the fitted values" if like is None else "within half an error bar of them"
        raise ValueError(f"fn returns NaN or infinity {place}. Check where it is defined.")
    return tensor.detach().to(torch.float64)
