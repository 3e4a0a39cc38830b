"""The minimum of a smooth function whose curvature is known roughly: preconditioned L-BFGS.

Nocedal and Wright, Numerical Optimization (2006), algorithms 7.4 and 7.5, with a backtracking line
search and coordinates that may rest at a bound.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[[Tensor], tuple[float, Tensor]]
"""A point (P,) to the value there and its gradient (P,)."""

_MEMORY = 20
"""Number of changes of point and gradient that are remembered."""
_TRIALS = 20
"""Largest number of step lengths that are tried."""
_SUFFICIENT = 1e-4
"""Share of the decrease promised by the slope that a step must achieve (Armijo's condition)."""


def minimum(
    loss: Loss,
    start: Tensor,
    preconditioned: Callable[[Tensor], Tensor],
    *,
    done: float,
    longest: float,
    inside: Callable[[Tensor], Tensor] = lambda point: point,
    steps: int = 100,
) -> Tensor:
    """The point where no more than `done` is left to gain, as far as the curvature tells.

    Args:
        loss: The function to minimise. A coordinate with a slope of exactly zero rests: that is how
            the loss says that a bound holds it.
        start: The point to begin at, (P,).
        preconditioned: Divides a gradient by an approximate curvature, which gives Newton's step.
        done: The gain below which nothing more is tried.
        longest: The largest change of a coordinate in one step.
        inside: Moves a point into the bounds, each coordinate by itself.
        steps: The number of steps that are taken at most.
    """
    point = inside(start)
    value, gradient = loss(point)
    changes: list[tuple[Tensor, Tensor]] = []  # of the point, and of the gradient with it
    resting = gradient == 0
    for _ in range(steps):
        step = _quasi_newton_step(gradient, changes, preconditioned)
        step = torch.where(resting, 0.0, step)
        step = step * (longest / float(step.abs().max().clamp(min=longest)))
        if not float(step @ gradient) > 2 * done:  # a quadratic function would fall by half of it
            break
        length = 1.0
        for _ in range(_TRIALS):
            new_point = inside(point - length * step)
            promised = float((point - new_point) @ gradient)
            new_value, new_gradient = loss(new_point)
            if new_value <= value - _SUFFICIENT * promised:  # false for NaN too
                break
            length = _shorter(length, promised, new_value - value)
        else:
            break
        point_change = new_point - point
        gradient_change = new_gradient - gradient
        if float(point_change @ gradient_change) > 0:  # else the curvature would not be positive
            changes = [*changes[1 - _MEMORY :], (point_change, gradient_change)]
        point = new_point
        value = new_value
        gradient = new_gradient
        if not torch.equal(resting, gradient == 0):  # a bound holds a coordinate, or lets it go
            resting = gradient == 0
            changes = []
    return point


def _quasi_newton_step(
    gradient: Tensor,
    changes: list[tuple[Tensor, Tensor]],
    preconditioned: Callable[[Tensor], Tensor],
) -> Tensor:
    """The gradient over a curvature that explains the changes (Nocedal's two loops)."""
    remaining = gradient
    shares = []
    for point_change, gradient_change in reversed(changes):
        share = point_change @ remaining / (point_change @ gradient_change)
        remaining = remaining - share * gradient_change
        shares.append(share)
    step = preconditioned(remaining)
    for (point_change, gradient_change), share in zip(changes, reversed(shares), strict=True):
        back = gradient_change @ step / (point_change @ gradient_change)
        step = step + point_change * (share - back)
    return step


def _shorter(length: float, promised: float, rise: float) -> float:
    """The minimum of the parabola through both ends of a step that was too long.

    `promised` is the decrease that the slope at the start promises, `rise` the actual increase.
    """
    curvature = rise + promised
    best = 0.0
    if curvature > 0:  # NaN is not above zero
        best = 0.5 * length * promised / curvature
    return min(max(best, 0.1 * length), 0.5 * length)
