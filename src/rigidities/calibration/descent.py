"""The minimum of a smooth function whose curvature is known roughly: preconditioned L-BFGS."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Loss = Callable[[Tensor], tuple[float, Tensor]]
"""A point (P,) to the value there and its gradient (P,)."""

_MEMORY, _HALVINGS = 20, 20
_SUFFICIENT = 1e-4
"""Of the decrease that the slope promises, what a step must bring (Armijo's condition)."""


def minimum(
    loss: Loss,
    start: Tensor,
    preconditioned: Callable[[Tensor], Tensor],
    *,
    done: float,
    longest: float,
    steps: int = 100,
) -> Tensor:
    """The point where no more than `done` is left to gain, as far as the curvature tells.

    Args:
        loss: what to minimise.
        start: where to begin, (P,).
        preconditioned: a gradient divided by the curvature, roughly: Newton's step.
        done: gain below which nothing more is tried.
        longest: step of any coordinate.
        steps: that are taken at most.
    """
    point = start
    value, gradient = loss(point)
    changes: list[tuple[Tensor, Tensor]] = []  # of the point, and of the gradient with it
    for _ in range(steps):
        step = _newton_step(gradient, changes, preconditioned)
        step = step * (longest / float(step.abs().max().clamp(min=longest)))
        slope = float(step @ gradient)  # at which the value falls along the step
        if not slope > 2 * done:  # a quadratic function would fall by half of it
            break
        length = 1.0
        for _ in range(_HALVINGS):
            new_point = point - length * step
            new_value, new_gradient = loss(new_point)
            if new_value <= value - _SUFFICIENT * length * slope:  # false for NaN too
                break
            length = _shorter(length, slope, new_value - value)
        else:
            break
        change, bend = new_point - point, new_gradient - gradient
        if float(change @ bend) > 0:
            changes = [*changes[1 - _MEMORY :], (change, bend)]
        point, value, gradient = new_point, new_value, new_gradient
    return point


def _newton_step(
    gradient: Tensor,
    changes: list[tuple[Tensor, Tensor]],
    preconditioned: Callable[[Tensor], Tensor],
) -> Tensor:
    """The gradient over a curvature that explains the changes (Nocedal's two loops)."""
    left, shares = gradient, []
    for change, bend in reversed(changes):
        share = change @ left / (change @ bend)
        left = left - share * bend
        shares.append(share)
    step = preconditioned(left)
    for (change, bend), share in zip(changes, reversed(shares), strict=True):
        step = step + change * (share - bend @ step / (change @ bend))
    return step


def _shorter(length: float, slope: float, rise: float) -> float:
    """The minimum of the parabola through both ends of a step that was too long."""
    bend = rise + slope * length
    best = 0.5 * slope * length**2 / bend if bend > 0 else 0.0  # a rise that is NaN has none
    return min(max(best, 0.1 * length), 0.5 * length)
