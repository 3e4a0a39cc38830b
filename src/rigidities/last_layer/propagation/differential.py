r"""Derivatives of a user's function of the predictions, by whichever mode fits.

With $J = \partial z / \partial y$ for quantities $z = \mathrm{fn}(y)$ and $H_q$ the second
derivatives of $z_q$: `cotangents` gives rows of J (reverse mode, one pass per quantity),
`pushed` gives $J t$ (forward mode, one pass per direction, all quantities at once), and `bent`
gives $t^\top H_q t$.

Derivatives are taken in float64 where the function takes it, whatever the model's precision:
functions that subtract large numbers lose their digits otherwise. One that does not (it
multiplies by a float32 matrix) gets the model's own precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...models.directional import curvatures_along, pulled, push, units, values_at

Function = Callable[[Tensor], Tensor]

WORKING = 1 << 26
"""Bytes of derivatives to hold at a time."""

REMEDY = "Use uq.ensemble(64).propagate(fn, x), which needs no derivative."


class Differential:
    """A function's value at one point and its derivatives there.

    Attributes:
        value: fn(point), in the precision of the point.
        precision: of the derivatives.

    Examples:
        >>> d = Differential(lambda y: y.square().sum(), torch.tensor([1.0, 2.0]))
        >>> d.value.item(), next(d.cotangents())[1].tolist()
        (5.0, [[2.0, 4.0]])
        >>> d.pushed(torch.eye(2).double()).tolist(), d.bent(torch.eye(2).double()).tolist()
        ([[2.0], [4.0]], [[2.0], [2.0]])
    """

    def __init__(self, fn: Function, point: Tensor) -> None:
        # A copy for each call: a function may write into its input.
        self._fn: Function = lambda y: fn(y.clone())
        with torch.no_grad():
            self.value = _checked(self._fn(point))
        self._point, self._result = self._graph(point)
        self.precision = self._point.dtype

    @property
    def quantities(self) -> int:
        """Number of quantities Q."""
        return self.value.numel()

    @property
    def chunk(self) -> int:
        """How many derivatives to hold at a time."""
        numbers = max(self._point.numel(), self.quantities)
        return max(1, WORKING // (numbers * self._point.element_size()))

    def cotangents(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows of J by reverse mode: which quantities, and (q, *point)."""
        flat = self._result.reshape(-1)
        for start in range(0, self.quantities, self.chunk):
            part = slice(start, min(start + self.chunk, self.quantities))
            values = flat[part]
            rows = pulled(values, self._point, units(values, 0, len(values)))
            yield part, _finite(rows.flatten(1), start).reshape(rows.shape)

    def pushed(self, tangents: Tensor) -> Tensor:
        """J t by forward mode: (n, *point) -> (n, Q).

        Raises:
            NotImplementedError: the function has no forward mode.
        """
        tangents, point = tangents.to(self.precision), self._point.detach()
        try:
            found = values_at(lambda t: push(self._fn, point, t).reshape(-1), tangents)
        except (RuntimeError, ValueError) as error:
            raise NotImplementedError(f"fn has no forward mode: {error}") from error
        return _finite(found.detach().to(torch.float64).mT, 0).mT

    def bent(self, tangents: Tensor) -> Tensor:
        """Second derivatives along directions: (n, *point) -> (n, Q)."""
        return _finite(curvatures_along(self._fn, self._point, self._result, tangents).mT, 0).mT

    def _graph(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """The point, in float64 if the function takes it, and the result that hangs on it."""
        try:
            return self._attempt(point.detach().to(torch.float64, copy=True))
        except RuntimeError:
            if point.dtype == torch.float64:
                raise
            return self._attempt(point.detach().clone())

    def _attempt(self, point: Tensor) -> tuple[Tensor, Tensor]:
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
                "fn does not depend on the predictions through differentiable operations "
                "(argmax, a comparison, NumPy, .item(), detach or torch.no_grad in it?). " + REMEDY
            )
        return point, result


def _checked(value: Any) -> Tensor:
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


def _finite(derivatives: Tensor, first: int) -> Tensor:
    wrong = ~derivatives.isfinite().all(1)
    if bool(wrong.any()):
        number = first + int(wrong.nonzero()[0])
        raise ValueError(
            f"The derivative of quantity {number} of fn is NaN or infinite at the model's "
            "predictions (a root or a logarithm at zero, or the other branch of torch.where?). "
            + REMEDY
        )
    return derivatives
