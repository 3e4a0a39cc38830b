r"""Newton's method for the minimum of the loss and for its constrained minimum.

At a point with loss gradient g, prediction gradient a and multiplier
$\lambda = a^\top g / a^\top a$, the step is a sum of two: one along a, which satisfies the
linearised constraint, and one in the null space Z of a, which minimises the Lagrangian's quadratic
model with $W = H - \lambda \nabla^2 \tilde y$:

$$ \Delta = \frac{\epsilon - \tilde y}{|a|^2}\, a + Z p, \qquad
   (Z^\top W Z)\, p = -Z^\top \Bigl( g + \frac{\epsilon - \tilde y}{|a|^2} W a \Bigr). $$

Negative curvatures are replaced by their absolute values, and there is no step along flat
directions. Steps are damped until they lower either the residual of these equations or the merit
$\mathcal{L} + \mu |\epsilon - \tilde y|$. From a saddle, the search goes on along the most negative
curvature. Without a constraint every direction is free.

Differences of multipliers need solutions with nearly all digits: the iteration goes on until
rounding stops it, at relative residuals of about 1e-15. Solvers that compare only values of the
merit stop at about 1e-8, and at saddles.

`minimum` and `constrained_minimum` are the two entry points. Both run a `_Search`, which knows the
problem and the constraint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .problem import ConstrainedProblem, Expansion

FLAT = 1e-13
"""Directions with curvatures below this times the largest are flat: no step goes along them."""

WEAKEST_DAMPING = 1e-9
"""The smallest nonzero damping. The damping times the largest curvature is added to all."""

STRONGEST_DAMPING = 1e2
"""No larger damping is tried."""

ESCAPE_LENGTHS = (10.0, 1.0, 0.1, 0.01)
"""Lengths of steps that leave a saddle, in units of the gradient's natural size."""


class NotConverged(ValueError):
    """No solution was found."""


@dataclass(frozen=True)
class Solution:
    r"""A stationary point, free or constrained.

    Attributes:
        expansion: The point, with the derivatives there.
        loss: The loss there.
        prediction: The prediction at x; with a constraint exactly the value that was asked for.
        multiplier: $\lambda = d \mathcal{L}_c / d\epsilon$; zero without a constraint.
        residual: Residual of the stationarity conditions, relative to the losses' own gradients.
    """

    expansion: Expansion
    loss: float
    prediction: float
    multiplier: float
    residual: float


def minimum(problem: ConstrainedProblem, tolerance: float, max_iterations: int) -> Solution:
    """The minimum of the loss near the user's parameters.

    Raises:
        NotConverged: The residual stays above the tolerance.
    """
    return _Search(problem, None).solution(problem.start, tolerance, max_iterations)


def constrained_minimum(
    problem: ConstrainedProblem,
    start: Solution,
    value: float,
    tolerance: float,
    max_iterations: int,
    halvings: int = 6,
) -> Solution:
    """The minimum with the prediction held at a value, by steps from a known solution.

    Args:
        problem: The loss and the prediction.
        start: The solution to start from.
        value: The value at which to hold the prediction.
        tolerance: Largest relative residual of a solution.
        max_iterations: Most iterations for one step. A step that fails is halved.
        halvings: After this many halvings the value is given up as out of reach.

    Raises:
        NotConverged: The value could not be reached.
        ValueError: The value is not finite.
    """
    if not math.isfinite(value):  # no sequence of steps ends there
        raise ValueError(f"A prediction can only be held at a finite value, got {value}.")
    reached = start
    step = value - start.prediction
    smallest_step = abs(step) / 2**halvings
    while reached.prediction != value:
        aim = reached.prediction + step
        if abs(value - aim) < smallest_step:
            aim = value
        search = _Search(problem, aim)
        try:
            reached = search.solution(reached.expansion.vector, tolerance, max_iterations)
        except NotConverged as failure:
            step /= 2
            if abs(step) < smallest_step:
                raise NotConverged(
                    f"No parameters were found that predict {value:.6g} at x: from the fitted "
                    f"value {start.prediction:.6g} the constraint could only be followed to "
                    f"{reached.prediction:.6g}. The model may be unable to predict that value "
                    "(bounded outputs)."
                ) from failure
        else:
            # The next step is twice as long, but not beyond the value.
            left = value - aim
            step = math.copysign(min(2 * abs(step), abs(left)), left)
    return reached


@dataclass(frozen=True)
class _Improvement:
    """A better point, and the damping of the step that led there."""

    expansion: Expansion
    damping: float


@dataclass(frozen=True)
class _Search:
    """Newton's method on one problem.

    Attributes:
        problem: The loss and the prediction.
        value: The value at which the prediction is held; None where it is free.
    """

    problem: ConstrainedProblem
    value: float | None

    def solution(self, start: Tensor, tolerance: float, max_iterations: int) -> Solution:
        """Iterate until rounding stops the descent; refuse a residual above the tolerance."""
        at = Expansion(self.problem, start)
        floor = 1e-12 * (float(self.problem.target.norm()) or 1.0)
        residual = self.residual(at)
        smallest_residual = residual
        damping = 0.0
        price = 0.0  # mu, of a violated constraint in the merit
        for _ in range(max_iterations):
            if not residual < math.inf:
                break
            converged = residual <= tolerance * max(at.gradient_scale, floor)
            price = max(price, 2 * self.largest_multiplier(at))  # never lower, or steps could cycle
            if converged:  # only full steps, until rounding stops them
                improvement = self.improved(at, smallest_residual, price, 0.0, 0.0)
            else:
                improvement = self.improved(
                    at, smallest_residual, price, damping, STRONGEST_DAMPING
                )
            if improvement is None or residual <= 1e-3 * at.gradient_scale:
                below_saddle = self.escaped(at, price)
                if below_saddle is not None:
                    improvement = _Improvement(below_saddle, 0.0)
                    smallest_residual = math.inf
            if improvement is None:
                break
            at = improvement.expansion
            damping = improvement.damping / 10 if improvement.damping > WEAKEST_DAMPING else 0.0
            residual = self.residual(at)
            smallest_residual = min(residual, smallest_residual)

        scale = max(at.gradient_scale, floor)
        if not residual <= tolerance * scale:
            raise NotConverged(
                f"Newton's method stopped at a relative residual of {residual / scale:.2g}, above "
                f"the tolerance {tolerance:g}."
            )
        return Solution(
            expansion=at,
            loss=at.loss,
            prediction=at.prediction if self.value is None else self.value,
            multiplier=self.multiplier(at),
            residual=residual / scale,
        )

    def improved(
        self,
        at: Expansion,
        smallest_residual: float,
        price: float,
        weakest: float,
        strongest: float,
    ) -> _Improvement | None:
        """The first acceptable step, with stronger and stronger damping.

        A step is acceptable if it halves the smallest residual so far, or lowers the merit.

        Args:
            at: The point to start from.
            smallest_residual: The smallest residual so far.
            price: Price of the constraint in the merit.
            weakest: The first damping to try.
            strongest: The last damping to try.

        Returns:
            The point after the step; None if no step is acceptable.
        """
        merit = self.merit(at, price)
        damping = weakest
        while damping <= strongest:
            there = Expansion(self.problem, at.vector + self.step(at, damping))
            there = self.moved_to_constraint(there)
            residual = self.residual(there)
            # Near a solution, differences of the merit are rounding: only the residual decides.
            merit_counts = 1e-8 * there.gradient_scale < residual < math.inf
            lower_merit = merit_counts and self.merit(there, price) < merit
            if lower_merit or residual < 0.5 * smallest_residual:
                return _Improvement(there, damping)
            damping = max(4 * damping, WEAKEST_DAMPING)
        return None

    def escaped(self, at: Expansion, price: float) -> Expansion | None:
        """A point below a saddle, along its most negative curvature; None at a minimum."""
        directions, hessian = self.free_directions(at)
        values, vectors = torch.linalg.eigh(directions.mT @ hessian @ directions)
        if not len(values) or bool(values[0] >= -1e-7 * values[-1].abs()):
            return None
        direction = max(at.gradient_scale, 1e-6) * (directions @ vectors[:, 0])
        trials = []
        for length in ESCAPE_LENGTHS:
            for signed_length in (length, -length):
                there = Expansion(self.problem, at.vector + signed_length * direction)
                trials.append(self.moved_to_constraint(there, rounds=4))
        best = min(trials, key=lambda there: self.merit(there, price))
        merit = self.merit(at, price)
        if self.merit(best, price) < merit - 1e-9 * abs(merit):
            return best
        return None

    def free_directions(self, at: Expansion) -> tuple[Tensor, Tensor]:
        """The free directions Z in columns, and the Hessian W that applies in them."""
        if self.value is None:
            return torch.eye(len(at.vector), dtype=at.vector.dtype), at.hessian
        lagrangian_hessian = at.hessian - self.multiplier(at) * at.prediction_hessian
        return _null_space(at.prediction_gradient), lagrangian_hessian

    def moved_to_constraint(self, at: Expansion, rounds: int = 1) -> Expansion:
        """The point moved back towards the constraint, which a long step leaves by its curvature.

        Args:
            at: The point after a step.
            rounds: Most corrections to make. With more, the constraint is met more closely.
        """
        if self.value is None:
            return at
        for _ in range(rounds):
            gap = self.value - at.prediction
            square = float(at.prediction_gradient.square().sum())
            near = 1e-3 * math.sqrt(square) * at.gradient_scale / 10 ** (3 * (rounds - 1))
            if not abs(gap) > near or not 0 < square < math.inf:
                break
            back = Expansion(self.problem, at.vector + gap / square * at.prediction_gradient)
            if not abs(self.value - back.prediction) < abs(gap):
                break
            at = back
        return at

    def multiplier(self, at: Expansion) -> float:
        """lambda = a.g / a.a; zero without a constraint."""
        if self.value is None:
            return 0.0
        return float(_share_along(at.prediction_gradient, at.gradient))

    def largest_multiplier(self, at: Expansion) -> float:
        """The larger of the multiplier's sizes here and after a full step."""
        if self.value is None:
            return 0.0
        _, hessian = self.free_directions(at)
        gradient_after = at.gradient + hessian @ self.step(at, 0.0)
        multiplier_after = float(_share_along(at.prediction_gradient, gradient_after))
        return max(abs(self.multiplier(at)), abs(multiplier_after))

    def step(self, at: Expansion, damping: float) -> Tensor:
        """The step Delta of the module's docstring, (P,)."""
        if self.value is None:
            return _descent(at.hessian, -at.gradient, damping)
        square = float(at.prediction_gradient.square().sum())
        along = at.prediction_gradient * ((self.value - at.prediction) / square)
        directions, hessian = self.free_directions(at)
        push = -directions.mT @ (at.gradient + hessian @ along)
        across = directions @ _descent(directions.mT @ hessian @ directions, push, damping)
        return (along + across) / (1 + damping)

    def residual(self, at: Expansion) -> float:
        """Length of the vector that vanishes at a solution, in units of a gradient."""
        if self.value is None:
            return float(at.gradient.norm())
        length = float(at.prediction_gradient.norm())
        if length < 1e-100:
            return math.inf  # no parameter moves the prediction from here
        across = at.gradient - self.multiplier(at) * at.prediction_gradient
        return math.hypot(float(across.norm()), (self.value - at.prediction) / length)

    def merit(self, at: Expansion, price: float) -> float:
        """The loss, plus the price of a violated constraint."""
        if self.value is None:
            return at.loss
        return at.loss + price * abs(self.value - at.prediction)


def _share_along(direction: Tensor, vector: Tensor) -> Tensor:
    """The coefficient of a vector along a direction, a.v / a.a."""
    return direction @ vector / direction.square().sum()


def _null_space(direction: Tensor) -> Tensor:
    """Orthonormal columns orthogonal to a direction, (P, P - 1), by a Householder reflection."""
    mirror = direction / direction.norm()
    mirror[0] += 1.0 if float(mirror[0]) >= 0 else -1.0
    identity = torch.eye(len(direction), dtype=direction.dtype)
    reflection: Tensor = identity - 2 * torch.outer(mirror, mirror) / mirror.square().sum()
    return reflection[:, 1:]


def _descent(hessian: Tensor, push: Tensor, damping: float) -> Tensor:
    """Solve |H| p = push, damped; zero along flat directions.

    Args:
        hessian: H, (P, P). Its eigenvalues are replaced by their absolute values.
        push: The right-hand side, (P,).
        damping: This times the largest |eigenvalue| is added to all.
    """
    if not len(push):
        return push
    values, vectors = torch.linalg.eigh(hessian)
    largest = values.abs().max()
    curvatures = values.abs() + damping * largest
    flat = curvatures <= FLAT * largest
    safe_curvatures = torch.where(flat, 1.0, curvatures)
    components = torch.where(flat, 0.0, (vectors.mT @ push) / safe_curvatures)
    solution: Tensor = vectors @ components
    return solution
