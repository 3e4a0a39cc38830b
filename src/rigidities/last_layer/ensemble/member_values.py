r"""Values of a quantity for each member of an ensemble, and the moments estimated from them.

With values $v_n$ and their mean $\bar v$, the variance

$$ \hat\sigma^2 = \frac{1}{n - 1} \sum_n (v_n - \bar v)^2 $$

is unbiased for a quantity that is linear in the outputs: members are draws minus their mean, which
leaves n - 1 degrees of freedom.

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

__all__ = ["MemberValues"]


@dataclass(frozen=True)
class MemberValues:
    r"""A derived quantity with its uncertainty. All tensors are float64.

    For a quantity that is linear in the outputs, `mean` is exactly the value at the model's own
    prediction, and `variance` and `covariance` are unbiased. It contains only the epistemic part,
    not the noise of single observations.

    Attributes:
        values: The quantity for each member, (members, ...).
        precision: The precision of the outputs that the quantity was computed from.

    Examples:
        >>> spread = MemberValues(torch.tensor([1.0, 3.0, 2.0, 2.0]).double())
        >>> spread.mean.item(), round(spread.variance.item(), 4)  # 2 / (4 - 1)
        (2.0, 0.6667)
    """

    values: Tensor = field(repr=False)
    precision: torch.dtype = torch.float64

    @property
    def mean(self) -> Tensor:
        """Mean over the members."""
        return self.values.mean(0)

    @cached_property
    def variance(self) -> Tensor:
        """Variance, over n - 1."""
        return self.values.var(0)

    @property
    def std(self) -> Tensor:
        """Standard deviation."""
        return self.variance.sqrt()

    @property
    def covariance(self) -> Tensor:
        """Covariance (Q, Q) between the Q entries of the quantity, over n - 1."""
        flat = self.values.reshape(len(self), math.prod(self.values.shape[1:]))
        centred = flat - flat.mean(0)
        return centred.mT @ centred / (len(self) - 1)

    @property
    def mean_error(self) -> Tensor:
        r"""Upper bound on the standard error of `mean` from the number of members.

        It is $\hat\sigma / \sqrt n$. Recentring the members has removed the part of the error that
        is linear in the outputs.
        """
        return self.std / math.sqrt(len(self))

    @property
    def std_error(self) -> Tensor:
        r"""Standard error of `std` from the number of members, for values that are nearly normal.

        It is $\hat\sigma / \sqrt{2 (n - 1)}$.
        """
        return self.std / math.sqrt(2 * (len(self) - 1))

    def quantile(self, level: float) -> Tensor:
        """The value with a share `level` of the members below it, interpolated between members.

        Raises:
            ValueError: The level does not lie between 0 and 1.
        """
        require_level(level, "A quantile's")
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
    def _sorted_values(self) -> Tensor:
        """The values in ascending order of members."""
        return self.values.sort(dim=0).values


def evaluated(
    function: Callable[[Tensor], Any],
    outputs: Tensor,
    *,
    precisions: Iterable[torch.dtype] = (torch.float64,),
) -> MemberValues:
    """Call a function once for each member's output, and check what it returns.

    Args:
        function: The function of one member's output.
        outputs: The outputs of all members, (members, ...).
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
    return MemberValues(torch.stack(values), precision)


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
