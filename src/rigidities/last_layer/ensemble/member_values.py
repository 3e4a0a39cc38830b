r"""Values of a quantity for each member of an ensemble, and the moments estimated from them.

With values $v_n$, their mean $\bar v$, and units $u$ that are independent (single draws, or the
means of antithetic pairs), U in number,

$$ \hat\sigma^2 = \frac1n \sum_n (v_n - \bar v)^2
   + \frac{1}{U} \cdot \frac{1}{U - 1} \sum_u (\bar v_u - \bar v)^2 $$

is unbiased: the second term corrects for the randomness of the sample mean. For single draws this
is the usual $\frac{1}{n-1}$, for recentred ones too. For pairs the second term vanishes where the
quantity is linear in the outputs. A symmetric set is a quadrature rule: it has weights $1/n$ and no
correction. Below full rank it leaves directions out, so that its variance of a linear quantity is a
lower bound, and it is not known by how much.

`evaluated` calls a user's function once for the output of each member and gives `MemberValues`.
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

__all__ = ["MemberValues"]


@dataclass(frozen=True)
class MemberValues:
    r"""A derived quantity with its uncertainty. All tensors are float64.

    For a quantity that is linear in the outputs, `mean` is the value at the model's own
    prediction exactly unless the draws are independent; `variance` and `covariance` are unbiased
    for random members, exact for a symmetric set of full rank, and a lower bound where `missing`
    is above 0. It contains only the epistemic part, not the noise of single observations.

    Attributes:
        values: The quantity for each member, (members, ...).
        drawing: How the members were drawn; see `members`.
        missing: Share of the training predictions' variance that a symmetric set leaves out. The
            share of the quantity's own variance that is left out may be larger or smaller.
        precision: The precision of the outputs that the quantity was computed from.

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
        if self._units is None:
            return plain
        return plain + self._units.var(0) / len(self._units)

    @property
    def std(self) -> Tensor:
        """Standard deviation."""
        return self.variance.sqrt()

    @property
    def covariance(self) -> Tensor:
        """Covariance (Q, Q) between the Q entries of the quantity, corrected as the variance."""
        plain = _second_moment(self.values) / len(self.values)
        if self._units is None:
            return plain
        units = len(self._units)
        return plain + _second_moment(self._units) / (units * (units - 1))

    @property
    def mean_error(self) -> Tensor:
        r"""Standard error of `mean` from the number of members.

        It is $\hat\sigma / \sqrt n$, or comes from the pairs' means. For recentred draws it is an
        upper bound: recentring has removed the linear part. A symmetric set is not random: 0 at
        full rank, NaN below, where it is not known what the missing directions would add.
        """
        if self._units is None:
            return self._error_of_symmetric_set
        if self.drawing == "antithetic":
            return (self._units.var(0) / len(self._units)).sqrt()
        return self.std / math.sqrt(len(self))

    @property
    def std_error(self) -> Tensor:
        r"""Standard error of `std` from the number of members, for values that are nearly normal.

        It is $\hat\sigma / \sqrt{2 (n - 1)}$, and $\hat\sigma / \sqrt{2 U}$ for U antithetic
        pairs, whose second half says nothing new about the spread. For a symmetric set it is 0 at
        full rank, NaN below, where `std` is a lower bound.
        """
        if self._units is None:
            return self._error_of_symmetric_set
        if self.drawing == "antithetic":
            degrees_of_freedom = len(self._units)
        else:
            degrees_of_freedom = len(self) - 1
        return self.std / math.sqrt(2 * degrees_of_freedom)

    def quantile(self, level: float) -> Tensor:
        """The value with a share `level` of the members below it, interpolated between members.

        Raises:
            ValueError: The level does not lie between 0 and 1, or the set is symmetric.
        """
        require_level(level, "A quantile's")
        if self.drawing == "symmetric":
            raise ValueError(
                "A symmetric set represents a mean and a covariance, not a distribution, so its "
                "members have no quantiles. Use mean and std, or draw the members "
                "(symmetric=False)."
            )
        position = level * (len(self) - 1)
        below = min(int(position), len(self) - 2)
        low, high = self._sorted_values[below : below + 2]
        return torch.lerp(low, high, position - below)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval that covers a share `level` of the members: (low, high).

        Raises:
            ValueError: As `quantile`.
        """
        require_level(level, "An interval's")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def _units(self) -> Tensor | None:
        """The values that are independent, (units, ...); None for a deterministic set.

        They are single draws, or the means of antithetic pairs.
        """
        if self.drawing == "symmetric":
            return None
        if self.drawing != "antithetic":
            return self.values
        half = len(self) // 2
        return (self.values[:half] + self.values[half:]) / 2

    @property
    def _error_of_symmetric_set(self) -> Tensor:
        """0 where the set is complete, else NaN: the error is not known."""
        return torch.full_like(self.mean, math.nan if self.missing else 0.0)

    @cached_property
    def _sorted_values(self) -> Tensor:
        """The values in ascending order of members."""
        return self.values.sort(dim=0).values


def evaluated(
    function: Callable[[Tensor], Any],
    outputs: Tensor,
    drawing: Drawing,
    *,
    missing: float = 0.0,
    precisions: Iterable[torch.dtype] = (torch.float64,),
) -> MemberValues:
    """Call a function once for each member's output, and check what it returns.

    Args:
        function: The function of one member's output.
        outputs: The outputs of all members, (members, ...).
        drawing: How the members were drawn.
        missing: Share of the variance that a symmetric set leaves out.
        precisions: The function gets the outputs in the first of these that it takes; see
            `Ensemble.propagate`.

    Raises:
        TypeError: The function returned something that is not a number.
        ValueError: The values are not finite, or their shapes differ between members.
    """
    first_result, precision = _first_result(function, outputs[0], precisions)
    values = [_real_numbers(first_result, member=0)]
    for member, output in enumerate(outputs[1:], start=1):
        value = _real_numbers(function(output.to(precision)), member)
        if value.shape != values[0].shape:
            raise ValueError(
                f"fn returned shape {tuple(value.shape)} for member {member} and "
                f"{tuple(values[0].shape)} for member 0: expected the same shape for all. Return "
                "a quantity of fixed size (for example a histogram with fixed bins)."
            )
        values.append(value)
    _check_finite(values)
    return MemberValues(torch.stack(values), drawing, missing, precision)


def _check_finite(values: list[Tensor]) -> None:
    """Refuse values with NaN or infinity, by the numbers of their members."""
    wrong = []
    for member, value in enumerate(values):
        if not bool(torch.isfinite(value).all()):
            wrong.append(member)
    if not wrong:
        return
    names = ", ".join(str(member) for member in wrong[:8])
    if len(wrong) > 8:
        names += ", ..."
    raise ValueError(
        f"fn returned NaN or infinity for {len(wrong)} of {len(values)} members ({names}). "
        "Members can lie far from the model's own prediction. Make fn defined there too (no "
        "logarithm or root of a value that may be negative), or return a flag instead of the "
        "value."
    )


def _first_result(
    function: Callable[[Tensor], Any], output: Tensor, precisions: Iterable[torch.dtype]
) -> tuple[Any, torch.dtype]:
    """What fn returns in the first precision that it takes, and that precision.

    An error that another precision cures was one of precision. Any other error is raised as it was
    in the first precision.
    """
    precision, *other_precisions = dict.fromkeys(precisions)
    try:
        # A copy, since fn may write into its input before it fails.
        return function(output.to(precision, copy=True)), precision
    except (RuntimeError, TypeError, ValueError):
        if other_precisions:
            with contextlib.suppress(Exception):
                return _first_result(function, output, other_precisions)
        raise


def _real_numbers(result: Any, member: int) -> Tensor:
    """What fn returned for a member, as a float64 tensor of its own memory."""
    try:
        tensor = torch.as_tensor(result)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"fn returned {type(result).__name__} for member {member}: expected a tensor, an "
            "array or a number."
        ) from error
    if tensor.is_complex():
        raise TypeError(
            f"fn returned complex numbers for member {member}. Return the real and imaginary "
            "parts: torch.view_as_real(z)."
        )
    return tensor.detach().to(torch.float64, copy=True)


def _second_moment(values: Tensor) -> Tensor:
    """Sum over the rows of products of deviations from their mean: (Q, Q)."""
    flat = values.reshape(len(values), math.prod(values.shape[1:]))
    centred = flat - flat.mean(0)
    return centred.mT @ centred
