r"""Derivatives of a user's function of the predictions, by whichever mode fits.

With $J = \partial z / \partial y$ for quantities $z = \mathrm{fn}(y)$ and $H_q$ the second
derivatives of $z_q$: `cotangents` gives rows of J (reverse mode, one pass per quantity),
`pushed` gives $J t$ (forward mode, one pass per direction, all quantities at once), and `bent`
gives $t^\top H_q t$ (forward mode twice).

Derivatives are taken in float64 where the function takes it, whatever the model's precision:
functions that subtract large numbers lose their digits otherwise. One that does not (it
multiplies by a float32 matrix) gets the model's own precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ...models.modes import transformable

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
            rows = _gradients(flat[part], self._point)
            yield part, _finite(rows.flatten(1), start).reshape(rows.shape)

    def pushed(self, tangents: Tensor) -> Tensor:
        """J t by forward mode: (n, *point) -> (n, Q).

        Raises:
            NotImplementedError: the function has no forward mode.
        """
        return _finite(self._mapped(self._along, tangents).mT, 0).mT

    def bent(self, tangents: Tensor) -> Tensor:
        """Second derivatives along directions: (n, *point) -> (n, Q).

        By forward mode twice over, which torch has not right for every operation (layer_norm):
        one direction is checked, and reverse mode taken where it differs.
        """
        try:
            curved = self._mapped(self._twice_along, tangents)
        except NotImplementedError:
            curved = None
        if curved is None or not self._bends_so(tangents[0], curved[0]):
            curved = self._bent_by_reverse_mode(tangents)
        return _finite(curved.mT, 0).mT

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

    def _along(self, tangent: Tensor) -> Tensor:
        return _jvp(self._fn, self._point.detach(), tangent).reshape(-1)

    def _twice_along(self, tangent: Tensor) -> Tensor:
        point = self._point.detach()
        return _jvp(lambda y: _jvp(self._fn, y, tangent), point, tangent).reshape(-1)

    def _mapped(self, one: Function, tangents: Tensor) -> Tensor:
        """`one` for each tangent: at once where the function allows it, else in turn."""
        tangents = tangents.to(self.precision)
        with transformable():
            try:
                found = torch.vmap(one)(tangents)
            except (RuntimeError, ValueError):
                try:
                    found = torch.stack([one(tangent) for tangent in tangents])
                except (RuntimeError, ValueError) as error:
                    raise NotImplementedError(f"fn has no forward mode: {error}") from error
        return found.detach().to(torch.float64)

    def _bends_so(self, tangent: Tensor, curved: Tensor) -> bool:
        """Whether second derivatives (Q,) along a direction are those that reverse mode gives."""
        generator = torch.Generator().manual_seed(0)
        mixture = torch.randn(self.quantities, generator=generator, dtype=torch.float64)
        mixture = mixture.to(self._result)
        tangent, total = tangent.to(self.precision), (mixture * self._result.reshape(-1)).sum()
        (slope,) = torch.autograd.grad(total, self._point, create_graph=True)
        expected = torch.zeros((), dtype=torch.float64)
        if slope.requires_grad:
            (turned,) = torch.autograd.grad(
                slope, self._point, tangent, retain_graph=True, materialize_grads=True
            )
            expected = (turned * tangent).sum()
        terms = mixture * curved.to(mixture)
        tolerance = torch.finfo(self.precision).eps ** 0.5 * float(terms.abs().sum())
        return bool(abs(float(terms.sum()) - float(expected)) <= tolerance)

    def _bent_by_reverse_mode(self, tangents: Tensor) -> Tensor:
        tangents = tangents.to(self.precision)
        curved = tangents.new_zeros(len(tangents), self.quantities)
        for q, quantity in enumerate(self._result.reshape(-1)):
            (slope,) = torch.autograd.grad(
                quantity, self._point, create_graph=True, materialize_grads=True
            )
            if not slope.requires_grad:
                continue  # linear
            for j, tangent in enumerate(tangents):
                (turned,) = torch.autograd.grad(
                    slope, self._point, tangent, retain_graph=True, materialize_grads=True
                )
                curved[j, q] = (turned * tangent).sum()
        return curved.to(torch.float64)


def _jvp(fn: Function, point: Tensor, tangent: Tensor) -> Tensor:
    result: Tensor = torch.func.jvp(fn, (point,), (tangent,))[1]
    return result


def _gradients(flat: Tensor, point: Tensor) -> Tensor:
    """d flat / d point, (q, *point)."""

    def of(result: Tensor, weights: Tensor, batched: bool) -> Tensor:
        return torch.autograd.grad(
            result,
            point,
            weights,
            retain_graph=True,
            is_grads_batched=batched,
            materialize_grads=True,
        )[0]

    eye = torch.eye(len(flat), dtype=flat.dtype, device=flat.device)
    if len(flat) > 1:
        # an operation that cannot be batched is differentiated one by one
        with suppress(RuntimeError, ValueError), transformable():
            return of(flat, eye, True)
    return torch.stack([of(flat, one, False) for one in eye])


def _checked(value: Any) -> Tensor:
    """fn's result at the predictions, if it is one that can have an error bar."""
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
    """Derivatives (q, ...) of the quantities from number `first` on, if all are finite."""
    wrong = ~derivatives.isfinite().all(1)
    if bool(wrong.any()):
        number = first + int(wrong.nonzero()[0])
        raise ValueError(
            f"The derivative of quantity {number} of fn is NaN or infinite at the model's "
            "predictions (a root or a logarithm at zero, or the other branch of torch.where?). "
            + REMEDY
        )
    return derivatives
