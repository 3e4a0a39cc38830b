r"""Newton's method for the minimum and for the constrained minimum.

At a point with loss gradient g, prediction slope a and multiplier $\lambda = a^\top g / a^\top a$
the step has a part along a, which meets the linearised constraint, and a part in the null space Z
of a, which minimises the Lagrangian's quadratic model with $W = H - \lambda \nabla^2 \tilde y$:

$$ \Delta = \frac{\epsilon - \tilde y}{|a|^2}\, a + Z p, \qquad
   (Z^\top W Z)\, p = -Z^\top \Bigl( g + \frac{\epsilon - \tilde y}{|a|^2} W a \Bigr). $$

Negative curvatures count by their size, flat directions are left alone, and steps are damped until
they lower either the residual of these equations or the merit $\mathcal{L} + \mu |\epsilon -
\tilde y|$. A saddle is left along its most negative curvature. Without constraint Z is everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .problem import ConstrainedProblem, Local

FLAT = 1e-13  # curvatures below this times the largest: directions in which nothing happens
WEAKEST, STRONGEST = 1e-9, 1e2
"""Range of the damping that is added to the curvatures, relative to the largest of them."""
LENGTHS = (10.0, 1.0, 0.1, 0.01)  # of steps that leave a saddle, by the losses' derivatives


class NotConverged(ValueError):
    """No solution was found where one was sought."""


@dataclass(frozen=True)
class Solution:
    r"""A stationary point, free or constrained.

    Attributes:
        local: where, with the derivatives there.
        loss: there.
        prediction: at x, exactly the value that was asked for.
        multiplier: $\lambda = d \mathcal{L}_c / d\epsilon$; zero without a constraint.
        residual: of the stationarity conditions, relative to the losses' own gradients.
    """

    local: Local
    loss: float
    prediction: float
    multiplier: float
    residual: float


def minimised(problem: ConstrainedProblem, tolerance: float, max_iterations: int) -> Solution:
    """The minimum of the loss near the given parameters."""
    return _solved(problem, problem.start, None, tolerance, max_iterations)


def constrained(
    problem: ConstrainedProblem,
    start: Solution,
    value: float,
    tolerance: float,
    max_iterations: int,
    halvings: int = 6,
) -> Solution:
    """The minimum with the prediction held at `value`, by steps from a known solution.

    A step that fails is halved; after so many halvings the value counts as out of reach.
    """
    if not math.isfinite(value):  # no sequence of steps ends there
        raise ValueError(f"A prediction can only be held at a finite value, got {value}.")
    reached, step = start, value - start.prediction
    smallest = abs(step) / 2**halvings
    while reached.prediction != value:
        aim = reached.prediction + step
        aim = value if abs(value - aim) < smallest else aim
        try:
            reached = _solved(problem, reached.local.vector, aim, tolerance, max_iterations)
            step = math.copysign(min(2 * abs(step), abs(value - aim)), value - aim)
        except NotConverged as failure:
            step /= 2
            if abs(step) < smallest:
                raise NotConverged(
                    f"No parameters were found that predict {value:.6g} at x: from the fitted "
                    f"{start.prediction:.6g} the constraint could be followed to "
                    f"{reached.prediction:.6g} only. The model may be unable to predict that value "
                    "(bounded outputs)."
                ) from failure
    return reached


def _solved(
    problem: ConstrainedProblem,
    start: Tensor,
    value: float | None,
    tolerance: float,
    max_iterations: int,
) -> Solution:
    """Iterate until rounding stops the descent; refuse a residual above the tolerance."""
    at, floor = Local(problem, start), 1e-12 * (float(problem.target.norm()) or 1.0)
    size = smallest = _residual(at, value)
    shift = price = 0.0
    for _ in range(max_iterations):
        if not size < math.inf:
            break
        near = size <= tolerance * max(at.force, floor)
        price = max(price, 2 * _coming_multiplier(at, value))  # never lower, or steps could cycle
        damping = (0.0, 0.0) if near else (shift, STRONGEST)
        found = _improved(problem, at, value, smallest, price, damping)
        if found is None or size <= 1e-3 * at.force:
            lower = _escaped(problem, at, value, price)
            found, smallest = (found, smallest) if lower is None else ((lower, 0.0), math.inf)
        if found is None:
            break
        at, shift = found[0], found[1] / 10 if found[1] > WEAKEST else 0.0
        size = _residual(at, value)
        smallest = min(size, smallest)
    scale = max(at.force, floor)
    if not size <= tolerance * scale:
        raise NotConverged(
            f"Newton's method stopped at a relative residual of {size / scale:.2g}, above the "
            f"tolerance {tolerance:g}."
        )
    prediction = at.prediction if value is None else value
    return Solution(at, at.loss, prediction, _multiplier(at, value), residual=size / scale)


def _improved(
    problem: ConstrainedProblem,
    at: Local,
    value: float | None,
    smallest: float,
    price: float,
    damping: tuple[float, float],
) -> tuple[Local, float] | None:
    """The first step, ever more damped, with a new smallest residual or a lower merit.

    Of the damping, the first and the strongest to try are given, and that which it took is returned
    with the new point; None if there is none.
    """
    (shift, strongest), merit = damping, _merit(at, value, price)
    while shift <= strongest:
        there = _returned(problem, Local(problem, at.vector + _step(at, value, shift)), value)
        left = _residual(there, value)
        lower = 1e-8 * there.force < left < math.inf and _merit(there, value, price) < merit
        if lower or left < 0.5 * smallest:
            return there, shift
        shift = max(4 * shift, WEAKEST)
    return None


def _escaped(
    problem: ConstrainedProblem, at: Local, value: float | None, price: float
) -> Local | None:
    """Down from a saddle along the direction of most negative curvature; None at a minimum."""
    space, lagrangian = _surface(at, value)
    values, vectors = torch.linalg.eigh(space.mT @ lagrangian @ space)
    if not len(values) or bool(values[0] >= -1e-7 * values[-1].abs()):
        return None
    direction = max(at.force, 1e-6) * (space @ vectors[:, 0])
    trials = [Local(problem, at.vector + t * direction) for k in LENGTHS for t in (k, -k)]
    trials = [_returned(problem, there, value, rounds=4) for there in trials]
    best = min(trials, key=lambda there: _merit(there, value, price))
    merit = _merit(at, value, price)
    return best if _merit(best, value, price) < merit - 1e-9 * abs(merit) else None


def _surface(at: Local, value: float | None) -> tuple[Tensor, Tensor]:
    """The directions that are free, in columns, and the Hessian that counts in them."""
    if value is None:
        return torch.eye(len(at.vector), dtype=at.vector.dtype), at.hessian
    return _null_space(at.slope), at.hessian - _multiplier(at, value) * at.bend


def _returned(
    problem: ConstrainedProblem, at: Local, value: float | None, rounds: int = 1
) -> Local:
    """Back towards the constraint, which a long step leaves by its curvature."""
    for _ in range(rounds if value is not None else 0):
        gap, square = (value or 0.0) - at.prediction, float(at.slope.square().sum())
        far = abs(gap) > 1e-3 * math.sqrt(square) * at.force / 10 ** (3 * (rounds - 1))
        if not far or not 0 < square < math.inf:
            break
        back = Local(problem, at.vector + gap / square * at.slope)
        if not abs((value or 0.0) - back.prediction) < abs(gap):
            break
        at = back
    return at


def _multiplier(at: Local, value: float | None) -> float:
    if value is None:
        return 0.0
    return float(at.slope @ at.gradient / at.slope.square().sum())


def _coming_multiplier(at: Local, value: float | None) -> float:
    """The size of the multiplier here, or after a full step if that is larger."""
    if value is None:
        return 0.0
    _, lagrangian = _surface(at, value)
    after = at.gradient + lagrangian @ _step(at, value, 0.0)
    return max(abs(_multiplier(at, value)), abs(float(at.slope @ after / at.slope.square().sum())))


def _null_space(slope: Tensor) -> Tensor:
    """Orthonormal columns that are orthogonal to the slope, (P, P - 1), by a Householder mirror."""
    mirror = slope / slope.norm()
    mirror[0] += 1.0 if float(mirror[0]) >= 0 else -1.0
    identity = torch.eye(len(slope), dtype=slope.dtype)
    reflection: Tensor = identity - 2 * torch.outer(mirror, mirror) / mirror.square().sum()
    return reflection[:, 1:]


def _step(at: Local, value: float | None, shift: float) -> Tensor:
    if value is None:
        return _descent(at.hessian, -at.gradient, shift)
    along = at.slope * ((value - at.prediction) / float(at.slope.square().sum()))
    space, lagrangian = _surface(at, value)
    push = -space.mT @ (at.gradient + lagrangian @ along)
    step = along + space @ _descent(space.mT @ lagrangian @ space, push, shift)
    return step / (1 + shift)


def _descent(hessian: Tensor, push: Tensor, shift: float) -> Tensor:
    """Solve with curvatures by their size, damped; none along flat directions."""
    if not len(push):
        return push
    values, vectors = torch.linalg.eigh(hessian)
    largest = values.abs().max()
    curvature = values.abs() + shift * largest
    flat = curvature <= FLAT * largest
    components = torch.where(flat, 0.0, (vectors.mT @ push) / torch.where(flat, 1.0, curvature))
    found: Tensor = vectors @ components
    return found


def _residual(at: Local, value: float | None) -> float:
    """Length of what should vanish, in units of a gradient."""
    if value is None:
        return float(at.gradient.norm())
    length = float(at.slope.norm())
    if length < 1e-100:
        return math.inf  # nothing moves the prediction from here
    across = at.gradient - _multiplier(at, value) * at.slope
    return math.hypot(float(across.norm()), (value - at.prediction) / length)


def _merit(at: Local, value: float | None, price: float) -> float:
    return at.loss if value is None else at.loss + price * abs(value - at.prediction)
