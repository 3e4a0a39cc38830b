r"""Quantities derived from predictions or parameters, with first-order error bars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..notices import notify, require_level
from .distribution import Gaussian, gaussian_interval

STEP = 1 / 8
"""Of a difference, in standard deviations: the tolerance of a search is lost in it."""

WEIGHTS = (3 / 4, -3 / 20, 1 / 60)
"""Of the differences over one, two and three steps to each side: exact up to a step's power 6."""


@dataclass(frozen=True)
class Derived:
    r"""What a function of many predictions gives, with its standard deviation.

    Only the epistemic part is in it: what the weights do not know, with all its correlations
    between predictions. See `propagation` for what that leaves out.

    Attributes:
        mean: the function of the model's own predictions, plus `shift`.
        variance: to first order, shaped like the mean.
        shift: $\tfrac12 \mathrm{tr}(H \Sigma)$, what curvature adds to the mean; zero unless asked
            for.
        rows: derivatives by independent standard coordinates, (Q, R) for Q quantities, in
            float64; None where they would have taken too much memory.
        precision: in which the derivatives were taken: float64 where the function takes it.

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
            value: at the model's predictions, of any shape; its dtype becomes that of the rest.
            rows: (Q, R), or None together with
            variance: (Q,).
            shift: (Q,), or None for zero.
            precision: of the derivatives.
        """
        if variance is None:
            assert rows is not None
            variance = rows.square().sum(1)
        dtype = torch.promote_types(value.dtype, torch.float32)  # half has too few digits
        added = torch.zeros_like(variance) if shift is None else shift
        mean = value if shift is None else value + shift.reshape(value.shape).to(dtype)
        variance, added = (part.reshape(value.shape).to(dtype) for part in (variance, added))
        return cls(mean, variance, added, rows, precision)

    @classmethod
    def by_differences(cls, fn: Callable[[Tensor], Any], directions: Tensor) -> Derived:
        """Of fn(deviations), whose independent standard deviations are the rows (R, M).

        It warns where fn is no straight line within its error bar: there first order says little.
        """
        if len(directions) > directions.shape[1]:
            directions = torch.linalg.qr(directions, mode="r").R
        value = _real(fn(torch.zeros_like(directions[0])))
        slopes, ends = differences(lambda d: _real(fn(d), value).flatten(), STEP * directions)
        rows, reach = slopes.mT / STEP, len(WEIGHTS)
        straight = torch.stack([slopes, -slopes]) * reach
        bends = (ends - value.flatten() - straight).abs().amax(0).norm(dim=0) / (reach * STEP)
        if bool((bent := ~(bends < rows.norm(dim=1) / 2)).any()):
            what = "bends, jumps or does not vary: first order says little"
            if bool((ends == value.flatten()).all()) and not rows.any():
                what = "does not vary: its bar of zero is right for a constant alone"
            notify(
                f"Within the error bar of {int(bent.sum())} of {len(rows)} quantities fn {what}. "
                "Use no coarse grid or rounding, or take the spread of fn over sample(1000)."
            )
        return cls.of(value, rows)

    @property
    def std(self) -> Tensor:
        """Standard deviation to first order."""
        return self.variance.sqrt()

    @property
    def covariance(self) -> Tensor:
        """Between all quantities, flattened: (Q, Q)."""
        if self.rows is None:
            raise ValueError(
                f"The derivatives of {self.mean.numel()} quantities were not kept: they would "
                "take more than 1 GiB. Propagate fewer quantities at a time."
            )
        return (self.rows @ self.rows.mT).to(self.variance.dtype)

    def quantile(self, level: float) -> Tensor:
        """The value with probability `level` below it, if the quantity is Gaussian."""
        require_level(level, "A quantile's")
        z = Gaussian().quantile(torch.tensor(level, dtype=torch.float64))
        return self.mean + z.to(self.std) * self.std

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central Gaussian interval that holds probability `level`: (low, high)."""
        return gaussian_interval(self.mean, self.std, level)


def differences(fn: Callable[[Tensor], Tensor], steps: Tensor) -> tuple[Tensor, Tensor]:
    """Changes of fn per step along each of (R, M), (R, ...), and its values three steps away."""
    ahead, back = (
        torch.stack([torch.stack([fn(side * (k + 1) * step) for step in steps]) for k in range(3)])
        for side in (1, -1)
    )
    slopes = torch.tensordot(ahead.new_tensor(WEIGHTS), ahead - back, 1)
    return slopes, torch.stack([ahead[-1], back[-1]])


def correlation(covariance: Tensor) -> Tensor:
    """Of a covariance (Q, Q); what does not vary correlates with itself alone."""
    std = covariance.diagonal().sqrt()
    return (covariance / std / std[:, None]).nan_to_num(0.0).clamp(-1, 1).fill_diagonal_(1.0)


def _real(values: Any, like: Tensor | None = None) -> Tensor:
    """What fn returned, in float64, if it can have an error bar."""
    try:
        found = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        got = type(values).__name__
        raise TypeError(f"fn must return numbers in one tensor or array, got {got}.") from None
    if found.is_complex() or not found.numel() or (like is not None and found.shape != like.shape):
        got = f"{found.dtype} of shape {tuple(found.shape)}"
        raise ValueError(f"fn must return real numbers, of one shape each time, got {got}.")
    if not bool(found.isfinite().all()):
        where = "at the fitted values" if like is None else "within half an error bar of them"
        raise ValueError(f"fn gives NaN or infinity {where}. Check where it is defined.")
    return found.detach().to(torch.float64)
