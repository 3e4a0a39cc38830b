r"""Derivatives of a user's function of the predictions, by whichever mode fits.

With $J = \partial z / \partial y$ for quantities $z = \mathrm{fn}(y)$ and $H_q$ the second
derivatives of $z_q$, a `Differential` gives:

- `jacobian_rows`: rows of J, by reverse mode, one pass per quantity;
- `jacobian_products`: $J t$, by forward mode, one pass per direction t for all quantities at once;
- `second_derivatives`: $t^\top H_q t$.

Derivatives are taken in float64 where the function takes it, whatever the model's precision:
functions that subtract large numbers lose their digits otherwise. A function that does not take
float64 (because it multiplies by a float32 matrix, say) gets the model's own precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...models.derivatives import curvatures_along, pulled, push, units, values_at

Function = Callable[[Tensor], Tensor]

WORKING_BYTES = 1 << 26
"""Bytes of derivatives in memory at a time."""

REMEDY = "Use uq.ensemble(64).propagate(fn, x), which needs no derivative."


class Differential:
    """A function's value at one point and its derivatives there.

    Args:
        fn: The function, which returns one tensor of real numbers.
        point: Where to evaluate and differentiate it.

    Attributes:
        value: fn(point), in the precision of the point.
        precision: The precision of the derivatives.

    Raises:
        TypeError: The function does not return a tensor of real numbers.
        ValueError: Its value is empty or not finite, or it cannot be differentiated.

    Examples:
        >>> d = Differential(lambda y: y.square().sum(), torch.tensor([1.0, 2.0]))
        >>> d.value.item(), next(d.jacobian_rows())[1].tolist()
        (5.0, [[2.0, 4.0]])
        >>> directions = torch.eye(2).double()
        >>> d.jacobian_products(directions).tolist(), d.second_derivatives(directions).tolist()
        ([[2.0], [4.0]], [[2.0], [2.0]])
    """

    def __init__(self, fn: Function, point: Tensor) -> None:
        # A copy for each call: a function may write into its input.
        self._fn: Function = lambda y: fn(y.clone())
        with torch.no_grad():
            self.value = _checked_value(self._fn(point))
        self._point, self._result = self._graph(point)
        self.precision = self._point.dtype

    @property
    def quantities(self) -> int:
        """Number of quantities Q."""
        return self.value.numel()

    @property
    def chunk(self) -> int:
        """How many derivatives to have in memory at a time."""
        numbers = max(self._point.numel(), self.quantities)
        return max(1, WORKING_BYTES // (numbers * self._point.element_size()))

    def jacobian_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows of J by reverse mode, chunk by chunk.

        Yields:
            The numbers of q quantities, and their derivatives (q, *point).
        """
        flat = self._result.reshape(-1)
        for start in range(0, self.quantities, self.chunk):
            chunk = slice(start, min(start + self.chunk, self.quantities))
            values = flat[chunk]
            rows = pulled(values, self._point, units(values, 0, len(values)))
            yield chunk, _checked_derivatives(rows.flatten(1), start).reshape(rows.shape)

    def jacobian_products(self, tangents: Tensor) -> Tensor:
        """J t by forward mode: directions (n, *point) -> (n, Q) in float64.

        Raises:
            NotImplementedError: The function has no forward mode.
        """
        tangents = tangents.to(self.precision)
        point = self._point.detach()
        try:
            products = values_at(lambda t: push(self._fn, point, t).reshape(-1), tangents)
        except (RuntimeError, ValueError) as error:
            raise NotImplementedError(f"fn has no forward mode: {error}") from error
        by_quantity = products.detach().to(torch.float64).mT
        return _checked_derivatives(by_quantity, 0).mT

    def second_derivatives(self, tangents: Tensor) -> Tensor:
        """Second derivatives along directions: (n, *point) -> (n, Q)."""
        by_quantity = curvatures_along(self._fn, self._point, self._result, tangents).mT
        return _checked_derivatives(by_quantity, 0).mT

    def _graph(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """A copy of the point and the function's value there, with the graph between them.

        The copy is in float64 if the function takes it.
        """
        try:
            return self._recorded(point.detach().to(torch.float64, copy=True))
        except RuntimeError:
            if point.dtype == torch.float64:
                raise
            return self._recorded(point.detach().clone())

    def _recorded(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """The point itself, as a leaf of a graph, and the function's value there."""
        point.requires_grad_(True)
        with torch.enable_grad():
            try:
                result = self._fn(point)
            except RuntimeError as error:
                if "requires grad" not in str(error):
                    raise
                raise ValueError(f"fn cannot be differentiated: {error} {REMEDY}") from error
        if not result.requires_grad:
            raise ValueError(
                "fn does not depend on the predictions through differentiable operations (does it "
                "use argmax, a comparison, NumPy, .item(), detach or torch.no_grad?). " + REMEDY
            )
        return point, result


def _checked_value(value: Any) -> Tensor:
    """What a function returned, if it is a tensor of finite real numbers."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"fn must return one tensor, got {type(value).__name__}. Join several with "
            f"torch.stack or torch.cat; for NumPy or plain numbers: {REMEDY}"
        )
    if not value.is_floating_point():
        raise TypeError(
            f"fn must return real floating-point values, got {value.dtype}, which have no "
            f"derivative. {REMEDY}"
        )
    if not value.numel():
        raise ValueError(f"fn must return at least one value, got shape {tuple(value.shape)}.")
    wrong = ~value.isfinite()
    if bool(wrong.any()):
        raise ValueError(
            f"fn gives NaN or infinity for {int(wrong.sum())} of {value.numel()} quantities at the "
            "model's predictions. Check the predictions and where fn is defined."
        )
    return value.detach()


def _checked_derivatives(derivatives: Tensor, first: int) -> Tensor:
    """Derivatives, one row per quantity from number `first` on, if all are finite."""
    wrong = ~derivatives.isfinite().all(1)
    if bool(wrong.any()):
        number = first + int(wrong.nonzero()[0])
        raise ValueError(
            f"The derivative of quantity {number} of fn is NaN or infinite at the model's "
            "predictions (for example a root or logarithm at zero, or in the other branch of "
            "torch.where). " + REMEDY
        )
    return derivatives
