r"""Quantities derived from predictions, with first-order error bars: mean and covariance."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...notices import require_level
from ...prediction.law import Gaussian, gaussian_interval


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

    @property
    def first_order_mean(self) -> Tensor:
        """The function of the model's own predictions."""
        return self.mean - self.shift

    def quantile(self, level: float) -> Tensor:
        """The value with probability `level` below it, if the quantity is Gaussian."""
        require_level(level, "A quantile's")
        z = Gaussian().quantile(torch.tensor(level, dtype=torch.float64))
        return self.mean + z.to(self.std) * self.std

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central Gaussian interval that holds probability `level`: (low, high)."""
        return gaussian_interval(self.mean, self.std, level)
