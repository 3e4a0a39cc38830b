r"""Values of a quantity for each member of an ensemble, and the moments estimated from them.

With values $v_n$, their mean $\bar v$, and units $u$ that are independent (single draws, or the
means of antithetic pairs), U in number,

$$ \hat\sigma^2 = \frac1n \sum_n (v_n - \bar v)^2
   + \frac{1}{U} \cdot \frac{1}{U - 1} \sum_u (\bar v_u - \bar v)^2 $$

is unbiased: the second term returns what the sample mean, itself random, took away. For single
draws this is the usual $\frac{1}{n-1}$, for recentred ones too. For pairs the second term
vanishes where the quantity is linear in the outputs. A symmetric set is a quadrature rule: it has
weights $1/n$ and no correction. Below full rank it leaves directions out, so that its variance of
a linear quantity is a lower bound, by an amount that no error here can tell.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...notices import require_level
from .members import Drawing


@dataclass(frozen=True)
class MemberValues:
    r"""A derived quantity with its uncertainty. All tensors are float64.

    For a quantity that is linear in the outputs, `mean` is the value at the model's own
    prediction exactly unless the draws are independent; `variance` and `covariance` are unbiased
    for random members, exact for a symmetric set of full rank, and a lower bound where `missing`
    is above 0. Only the epistemic part is here: the noise of single observations is not.

    Attributes:
        values: (members, ...), shaped like the quantity behind the members.
        drawing: how the members were drawn; see `members`.
        missing: share of the training predictions' variance that a symmetric set leaves out; of
            the quantity's own it may be more or less.
        precision: of the outputs that the quantity was computed from.

    Examples:
        >>> spread = MemberValues(torch.tensor([1.0, 3.0, 2.0, 2.0]).double(), "independent")
        >>> spread.mean.item(), round(spread.variance.item(), 4)  # 2 / (4 - 1)
        (2.0, 0.6667)
    """

    values: Tensor = field(repr=False)
    drawing: Drawing
    missing: float = 0.0
    precision: torch.dtype = torch.float64

    @property
    def mean(self) -> Tensor:
        """Mean over the members."""
        return self.values.mean(0)

    @cached_property
    def variance(self) -> Tensor:
        """Variance, corrected for the finite number of members as the module says."""
        plain = self.values.var(0, correction=0)
        return plain if self._units is None else plain + self._units.var(0) / len(self._units)

    @property
    def std(self) -> Tensor:
        """Standard deviation."""
        return self.variance.sqrt()

    @property
    def covariance(self) -> Tensor:
        """Between the Q entries of the quantity, flattened: (Q, Q), corrected as the variance."""
        plain = _second_moment(self.values) / len(self.values)
        if self._units is None:
            return plain
        units = len(self._units)
        return plain + _second_moment(self._units) / (units * (units - 1))

    @property
    def mean_error(self) -> Tensor:
        r"""Standard error of `mean` from the number of members.

        $\hat\sigma / \sqrt n$, or from the pairs' means; for recentred draws the former is an
        upper bound, whose linear part recentring has removed. A symmetric set is not random: 0
        at full rank, NaN below, where it is not known what the missing directions would add.
        """
        if self._units is None:
            return self._unrandom
        if self.drawing == "antithetic":
            return (self._units.var(0) / len(self._units)).sqrt()
        return self.std / math.sqrt(len(self))

    @property
    def std_error(self) -> Tensor:
        r"""Standard error of `std` from the number of members, for values close to a normal
        distribution.

        $\hat\sigma / \sqrt{2 (n - 1)}$; $\hat\sigma / \sqrt{2 U}$ for U antithetic pairs, of
        which the second half says nothing new about the spread. For a symmetric set 0 at full
        rank, NaN below, where `std` is a lower bound.
        """
        if self._units is None:
            return self._unrandom
        freedom = len(self._units) if self.drawing == "antithetic" else len(self) - 1
        return self.std / math.sqrt(2 * freedom)

    def quantile(self, level: float) -> Tensor:
        """The value with a share `level` of the members below it, interpolated between members."""
        require_level(level, "A quantile's")
        if self.drawing == "symmetric":
            raise ValueError(
                "A symmetric set stands for a mean and a covariance, not for a distribution: its members "
                "have no quantiles. Use mean and std, or draw the members (symmetric=False)."
            )
        place = level * (len(self) - 1)
        below = min(int(place), len(self) - 2)
        low, high = self._ordered[below : below + 2]
        return torch.lerp(low, high, place - below)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval that holds a share `level` of the members: (low, high)."""
        require_level(level, "An interval's")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def _units(self) -> Tensor | None:
        """What is independent: (units, ...); None for a deterministic set."""
        if self.drawing == "symmetric":
            return None
        if self.drawing != "antithetic":
            return self.values
        half = len(self) // 2
        return (self.values[:half] + self.values[half:]) / 2

    @property
    def _unrandom(self) -> Tensor:
        return torch.full_like(self.mean, math.nan if self.missing else 0.0)

    @cached_property
    def _ordered(self) -> Tensor:
        return self.values.sort(dim=0).values


def evaluated(
    function: Callable[[Tensor], Any],
    outputs: Tensor,
    drawing: Drawing,
    *,
    missing: float = 0.0,
    precisions: Iterable[torch.dtype] = (torch.float64,),
) -> MemberValues:
    """Call a function once for each member's output, (members, ...), and check what it returns.

    It gets the outputs in the first of the precisions that it takes; see `Ensemble.propagate`.
    """
    first, precision = _first_result(function, outputs[0], precisions)
    rows = [_numeric(first, 0)]
    for member, output in enumerate(outputs[1:], start=1):
        row = _numeric(function(output.to(precision)), member)
        if row.shape != rows[0].shape:
            raise ValueError(
                f"fn returned shape {tuple(row.shape)} for member {member} and "
                f"{tuple(rows[0].shape)} for member 0: expected the same for all. Return a "
                "quantity of fixed size (a histogram with fixed bins, say)."
            )
        rows.append(row)
    bad = [member for member, row in enumerate(rows) if not bool(torch.isfinite(row).all())]
    if bad:
        named = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
        raise ValueError(
            f"fn returned NaN or infinity for {len(bad)} of {len(rows)} members ({named}). Members "
            "reach further than the model's own prediction: let fn hold there too (no logarithm "
            "or root of what may be negative), or return a flag in place of the value."
        )
    return MemberValues(torch.stack(rows), drawing, missing, precision)


def _first_result(
    function: Callable[[Tensor], Any], output: Tensor, precisions: Iterable[torch.dtype]
) -> tuple[Any, torch.dtype]:
    """What fn returns in the first precision that it takes, and that precision.

    An error that another precision cures was one of precision; any other is raised as it was.
    """
    precision, *others = dict.fromkeys(precisions)
    try:  # with a copy: fn may write into its input before it fails
        return function(output.to(precision, copy=True)), precision
    except (RuntimeError, TypeError, ValueError):
        if others:
            with contextlib.suppress(Exception):
                return _first_result(function, output, others)
        raise


def _numeric(result: Any, member: int) -> Tensor:
    try:
        tensor = torch.as_tensor(result)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"fn returned {type(result).__name__} for member {member}: expected a tensor, an "
            "array or a number."
        ) from error
    if tensor.is_complex():
        raise TypeError(
            f"fn returned complex numbers for member {member}: return real and imaginary part, "
            "torch.view_as_real(z)."
        )
    return tensor.detach().to(torch.float64, copy=True)


def _second_moment(values: Tensor) -> Tensor:
    """Sum over the rows of products of deviations from their mean: (Q, Q)."""
    flat = values.reshape(len(values), math.prod(values.shape[1:]))
    centred = flat - flat.mean(0)
    return centred.mT @ centred
