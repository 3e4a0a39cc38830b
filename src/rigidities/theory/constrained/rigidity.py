"""The curvature of the constrained loss, and the constrained loss along given values.

`constrained_rigidity` minimises the loss, then minimises it again with the prediction held a step h
to either side, for shrinking h, and extrapolates the differences to step zero (`Tableau`).
`constrained_profile` follows the constrained minimum from value to value. Both read their arguments
through `problem.ConstrainedProblem` and solve with `newton`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...any_regressor.curvature.exact_hessian import Regulariser
from ...any_regressor.derivatives.parameters import Subset
from ...any_regressor.derivatives.regressor import Function
from ...losses import LossLike
from ...notices import notify
from .newton import NotConverged, Solution, constrained_minimum, minimum
from .problem import ConstrainedProblem, Expansion

__all__ = [
    "ConstrainedProfile",
    "ConstrainedRigidity",
    "constrained_profile",
    "constrained_rigidity",
]

LEVELS = 24
"""Most halvings of the step."""

NEAR_ITERATIONS = 20
"""Most Newton iterations from the minimum to a prediction held nearby; else it is too far."""

PROFILE_ITERATIONS = 60
"""Most Newton iterations from one value of a profile to the next, before the step is halved."""

FAILURES = 3
"""After this many values in a row that cannot be reached, a profile ends."""

ROUNDING = 1e-12
"""Eigenvalues of the Hessian below this times the largest count as zero."""

LEAK = 1e-6
"""Up to this share of the prediction's gradient may lie along flat directions of the loss."""


@dataclass(frozen=True)
class ConstrainedRigidity:
    r"""The rigidity of one prediction by its definition.

    Attributes:
        rigidity: $R = d\lambda / d\epsilon$, from the multipliers $\lambda = d\mathcal{L}_c /
            d\epsilon$ (envelope theorem), extrapolated to step zero.
        error: Estimate of its relative error.
        from_losses: The same from second differences of the losses, which lose more digits.
        prediction: $\tilde y$ at x at the minimum.
        epsilons: (S,) ascending, the values that the prediction was held at.
        losses: (S,) $\mathcal{L}_c$ there.
        multipliers: (S,) $\lambda$ there.
        parameters: Those of the unconstrained minimum, in the user's container.
        moved: How much the loss fell from the given parameters to that minimum.
    """

    rigidity: float
    error: float
    from_losses: float
    prediction: float
    epsilons: Tensor
    losses: Tensor
    multipliers: Tensor
    parameters: Any
    moved: float


@dataclass(frozen=True)
class ConstrainedProfile:
    r"""$\mathcal{L}_c$ along given values of one prediction.

    Attributes:
        epsilons: (S,) the values, as given.
        losses: (S,) $\mathcal{L}_c$ there.
        multipliers: (S,) its slope $\lambda$ there.
        prediction: $\tilde y$ at x at the minimum.
        minimum: The loss at the minimum.
        parameters: Those of the minimum, in the user's container.
    """

    epsilons: Tensor
    losses: Tensor
    multipliers: Tensor
    prediction: float
    minimum: float
    parameters: Any


@dataclass
class Tableau:
    r"""Differences at shrinking steps h, h/2, h/4, ..., extrapolated to step zero.

    For an even error series $D(h) = D + c_1 h^2 + c_2 h^4 + \ldots$ the tableau
    $A_{i,j} = (4^j A_{i,j-1} - A_{i-1,j-1}) / (4^j - 1)$ over $h_i = h / 2^i$ removes one term per
    column (Richardson; Ridders). Its entries agree better and better, until rounding takes over.
    The value is the entry that agrees best with its neighbours, and its difference from them is the
    error estimate.

    Attributes:
        value: The limit, as far as known.
        error: Estimate of its absolute error.

    Examples:
        >>> tableau = Tableau()
        >>> for h in (1.0, 0.5, 0.25):
        ...     tableau.add((math.exp(h) - math.exp(-h)) / (2 * h))
        >>> round(tableau.value, 5)
        1.0
    """

    value: float = math.nan
    error: float = math.inf
    _last_row: list[float] = field(default_factory=list)
    _best_row: int = 0  # number of the row that holds the value

    def add(self, difference: float) -> None:
        """Add the difference at half the previous step."""
        row = [difference]
        for j, above in enumerate(self._last_row, start=1):
            left = row[-1]
            entry = (4**j * left - above) / (4**j - 1)
            error = max(abs(entry - left), abs(entry - above))
            if error < self.error:
                self.value = entry
                self.error = error
                self._best_row = len(self._last_row) + 1
            row.append(entry)
        if not self._last_row:
            self.value = difference
        self._last_row = row

    @property
    def relative_error(self) -> float:
        """The error relative to the value."""
        return self.error / abs(self.value) if self.value else math.inf

    @property
    def stalled(self) -> bool:
        """Whether three smaller steps in a row did not help: rounding has taken over."""
        rows_since_best = len(self._last_row) - self._best_row
        return self.relative_error < 1e-3 and rows_since_best >= 3


def constrained_rigidity(
    f: Function | nn.Module,
    params: Any = None,
    X: Any = None,
    y: Any = None,
    x: Any = None,
    *,
    loss: LossLike = "mse",
    regulariser: Regulariser | None = None,
    ridge: float = 0.0,
    subset: Subset | None = None,
    sample_weight: Any = None,
    output: int | None = None,
    step: float | None = None,
    tolerance: float = 1e-8,
    max_iterations: int = 200,
) -> ConstrainedRigidity:
    r"""$R = \partial^2 \mathcal{L}_c / \partial\epsilon^2$ of the prediction at one input x.

    The loss is first minimised from the given parameters, then minimised with the prediction held
    at $\tilde y \pm h$, $\pm h/2$, ... All is done in float64 with exact second derivatives.

    Args:
        f: A batched function f(params, *inputs) -> (N,) or (N, K), or an `nn.Module`.
        params: The fitted parameters, a tensor or nested containers of tensors; None for a module.
        X: Training inputs; a tuple of several.
        y: Training targets.
        x: One input, shaped (1, ...) or as a row of X.
        loss: As in `PredictionRigidity`, summed over samples.
        regulariser: A function callable(params) -> number that is added to the loss.
        ridge: $\varsigma^2$, as in `PredictionRigidity`: $\frac12 \varsigma^2 |w - w_0|^2$ about
            the given parameters is added. (Weight decay, about zero, is a regulariser.)
        subset: Names or prefixes of the parameters that may vary, or callable(name) -> bool.
        sample_weight: (N,) weights of the samples in the loss.
        output: Which of several outputs to hold at x.
        step: The first h; by default a third of the prediction's standard error. It is halved until
            the differences agree or rounding takes over.
        tolerance: Largest residual of a solution, relative to the losses' own gradients.
        max_iterations: Iterations of Newton's method for the minimum, at most.

    Returns:
        The rigidity with an estimate of its error, and the solutions that it comes from.

    Raises:
        ValueError: No minimum is near, or the rigidity is zero (a Hessian singular along the
            prediction's gradient) or infinite (the prediction does not depend on the parameters).
        TypeError: An argument is missing, or params are given beside a module.

    Examples:
        >>> x = torch.tensor([0.0, 1.0, 2.0, 3.0])
        >>> line = lambda w, x: w[0] + w[1] * x
        >>> result = constrained_rigidity(line, torch.tensor([1.0, 2.0]), x, 1 + 2 * x, [1.5])
        >>> round(result.rigidity, 9)  # N at the mean of the inputs
        4.0
    """
    _check_complete(f, params, {"X": X, "y": y, "x": x})
    _check_options(tolerance, max_iterations, step)
    problem = ConstrainedProblem.of(
        f,
        params,
        X,
        y,
        x,
        loss=loss,
        regulariser=regulariser,
        ridge=ridge,
        subset=subset,
        sample_weight=sample_weight,
        output=output,
    )
    loss_before = float(problem.total(problem.start))
    problem, optimum = _scaled_minimum(problem, tolerance, max_iterations)
    first_step = _first_step(problem, optimum) if step is None else step
    slopes, curvatures, solutions = _differences(problem, optimum, first_step, tolerance)
    solutions.sort(key=lambda solution: solution.prediction)
    return ConstrainedRigidity(
        rigidity=slopes.value,
        error=slopes.relative_error,
        from_losses=curvatures.value,
        prediction=optimum.prediction,
        epsilons=_column(solutions, "prediction"),
        losses=_column(solutions, "loss"),
        multipliers=_column(solutions, "multiplier"),
        parameters=_parameters(problem, optimum),
        moved=loss_before - optimum.loss,
    )


def constrained_profile(
    f: Function | nn.Module,
    params: Any = None,
    X: Any = None,
    y: Any = None,
    x: Any = None,
    epsilons: Any = None,
    *,
    loss: LossLike = "mse",
    regulariser: Regulariser | None = None,
    ridge: float = 0.0,
    subset: Subset | None = None,
    sample_weight: Any = None,
    output: int | None = None,
    partial: bool = False,
    tolerance: float = 1e-8,
    max_iterations: int = 200,
) -> ConstrainedProfile:
    r"""$\mathcal{L}_c(\epsilon)$ at given values, each solved from the solution at its neighbour.

    The values are visited from the fit outwards and back, and the lower loss is kept. Where there
    are several constrained minima, this finds the lowest that descent reaches; a finer grid may
    find a lower one.

    Args:
        f: As in `constrained_rigidity`.
        params: As in `constrained_rigidity`.
        X: Training inputs.
        y: Training targets.
        x: One input.
        epsilons: (S,) values of the prediction.
        loss: As in `constrained_rigidity`.
        regulariser: As in `constrained_rigidity`.
        ridge: As in `constrained_rigidity`.
        subset: As in `constrained_rigidity`.
        sample_weight: As in `constrained_rigidity`.
        output: As in `constrained_rigidity`.
        partial: Whether values that cannot be reached give NaN instead of an error.
        tolerance: Largest relative residual of a solution.
        max_iterations: Iterations of Newton's method for the minimum, at most.

    Returns:
        The losses and multipliers in the order of the values.

    Raises:
        ValueError: The model cannot predict a value, or no minimum is near.
        TypeError: An argument is missing, or params are given beside a module.
    """
    _check_complete(f, params, {"X": X, "y": y, "x": x, "epsilons": epsilons})
    _check_options(tolerance, max_iterations)
    values = torch.as_tensor(epsilons, dtype=torch.float64).reshape(-1)
    if not len(values) or not bool(values.isfinite().all()):
        raise ValueError(
            f"epsilons must be finite, at least one, got {values.tolist()[:5]} (of {len(values)})."
        )
    problem = ConstrainedProblem.of(
        f,
        params,
        X,
        y,
        x,
        loss=loss,
        regulariser=regulariser,
        ridge=ridge,
        subset=subset,
        sample_weight=sample_weight,
        output=output,
    )
    problem, optimum = _scaled_minimum(problem, tolerance, max_iterations)
    solutions: dict[int, Solution] = {}
    for side in (values >= optimum.prediction, values < optimum.prediction):
        outward = side.nonzero().flatten().tolist()
        outward.sort(key=lambda i: abs(float(values[i]) - optimum.prediction))
        solutions |= _followed(problem, optimum, values, outward, tolerance, partial)
    ordered = [solutions.get(i) for i in range(len(values))]
    return ConstrainedProfile(
        epsilons=values,
        losses=_column(ordered, "loss"),
        multipliers=_column(ordered, "multiplier"),
        prediction=optimum.prediction,
        minimum=optimum.loss,
        parameters=_parameters(problem, optimum),
    )


def _check_complete(f: Any, params: Any, data: dict[str, Any]) -> None:
    """Refuse calls that leave something out, or give params beside a module."""
    names = ", ".join(data)
    if isinstance(f, nn.Module) and params is not None:
        by_name = ", ".join(f"{name}={name}" for name in data)
        raise TypeError(
            f"A module has its own parameters: pass params=None, as in (model, None, {names}), or "
            f"name the others, (model, {by_name})."
        )
    missing = [name for name, value in data.items() if value is None]
    if missing:
        raise TypeError(f"Expected (f, params, {names}), got no {', no '.join(missing)}.")


def _check_options(tolerance: float, max_iterations: int, step: float | None = None) -> None:
    """Refuse options out of their range."""
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must lie between 0 and 1, got {tolerance}.")
    if not max_iterations >= 1:
        raise ValueError(f"max_iterations must be at least 1, got {max_iterations}.")
    if step is not None and not 0 < step < math.inf:
        raise ValueError(f"step must be positive and finite, got {step}.")


def _differences(
    problem: ConstrainedProblem, optimum: Solution, h: float, tolerance: float
) -> tuple[Tableau, Tableau, list[Solution]]:
    """First differences of the multipliers, second differences of the losses, and the solutions."""
    slopes = Tableau()
    curvatures = Tableau()
    solutions = [optimum]
    for _ in range(LEVELS):
        try:
            low = _solution_near(problem, optimum, -h, tolerance)
            high = _solution_near(problem, optimum, h, tolerance)
        except NotConverged:
            # The step is too long for the loss to be smooth: start again with a smaller one.
            slopes = Tableau()
            curvatures = Tableau()
            solutions = [optimum]
            h /= 2
            continue
        solutions += [low, high]
        slopes.add((high.multiplier - low.multiplier) / (2 * h))
        curvatures.add((high.loss - 2 * optimum.loss + low.loss) / h**2)
        if slopes.stalled or slopes.relative_error < 1e-10:
            break
        h /= 2
    if not slopes.relative_error < 0.1:
        raise NotConverged(
            "The constrained loss has no curvature that differences of shrinking steps agree on: "
            f"at the last, {h:.2g}, its slope gives {slopes.value:.6g} within {slopes.error:.2g}. "
            "Pass another step."
        )
    return slopes, curvatures, solutions


def _solution_near(
    problem: ConstrainedProblem, optimum: Solution, shift: float, tolerance: float
) -> Solution:
    """The constrained minimum a shift away from the optimum's prediction, in one step."""
    value = optimum.prediction + shift
    return constrained_minimum(problem, optimum, value, tolerance, NEAR_ITERATIONS, halvings=0)


def _followed(
    problem: ConstrainedProblem,
    optimum: Solution,
    values: Tensor,
    outward: list[int],
    tolerance: float,
    partial: bool,
) -> dict[int, Solution]:
    """Solutions from the minimum outwards and back again, the lower of the two at each value.

    Far out, the branch of solutions that starts at the minimum may no longer be the lowest. On the
    way back, the lower branch is followed further inwards than it was found on the way out.

    Args:
        problem: The loss and the prediction.
        optimum: The minimum.
        values: (S,) values of the prediction.
        outward: Numbers of the values on one side of the minimum, from the nearest on.
        tolerance: Largest relative residual of a solution.
        partial: Whether to leave out values that cannot be reached.

    Returns:
        Solutions by the number of their value.
    """
    solutions: dict[int, Solution] = {}
    reached = optimum
    failures_in_a_row = 0
    for i in outward:
        value = float(values[i])
        try:
            reached = constrained_minimum(problem, reached, value, tolerance, PROFILE_ITERATIONS)
        except NotConverged:
            if not partial:
                raise
            failures_in_a_row += 1
            if failures_in_a_row == FAILURES:
                break
            continue
        solutions[i] = reached
        failures_in_a_row = 0

    inward = [i for i in reversed(outward) if i in solutions]
    for i in inward[1:]:
        value = float(values[i])
        try:
            reached = constrained_minimum(
                problem, reached, value, tolerance, PROFILE_ITERATIONS, halvings=3
            )
        except NotConverged:  # this branch ends here
            reached = solutions[i]
        if solutions[i].loss < reached.loss:
            reached = solutions[i]
        solutions[i] = reached
    return solutions


def _scaled_minimum(
    problem: ConstrainedProblem, tolerance: float, max_iterations: int
) -> tuple[ConstrainedProblem, Solution]:
    """The minimum nearby, and the problem in parameters scaled to unit curvature there.

    Warns where the loss falls much during the minimisation: the result is for that minimum, not for
    the user's parameters.
    """
    start = Expansion(problem, problem.start)
    problem = _rescaled(problem, start.hessian)
    try:
        optimum = minimum(problem, tolerance, max_iterations)
    except NotConverged as failure:
        raise ValueError(
            f"No minimum of the loss was found near the parameters, where its gradient has norm "
            f"{float(start.gradient.norm()):.3g}. Fit further, or add a regulariser. {failure}"
        ) from failure
    if start.loss - optimum.loss > 0.01 * abs(start.loss):
        notify(
            f"The parameters are not a minimum of the loss (gradient norm "
            f"{float(start.gradient.norm()):.3g}): it fell from {start.loss:.6g} to "
            f"{optimum.loss:.6g} when minimised further. The result is for that minimum."
        )
    # Change from units of the curvatures at the start to those at the minimum.
    units = problem.units
    problem = _rescaled(problem, optimum.expansion.hessian / units / units[:, None])
    vector = optimum.expansion.vector * units / problem.units
    optimum = replace(optimum, expansion=Expansion(problem, vector))
    _check_determined(optimum)
    return problem, optimum


def _rescaled(problem: ConstrainedProblem, hessian: Tensor) -> ConstrainedProblem:
    """The problem with each parameter in units of one over the root of its curvature."""
    diagonal = hessian.diagonal().abs()
    floor = 1e-12 * diagonal.max()
    return replace(problem, units=torch.where(diagonal > floor, diagonal, 1.0).rsqrt())


def _check_determined(optimum: Solution) -> None:
    """Refuse a prediction that no parameter moves, or that moves at no cost."""
    gradient = optimum.expansion.prediction_gradient
    if not bool(gradient.any()):
        raise ValueError(
            "The prediction at x does not depend on the parameters: it is infinitely rigid."
        )
    values, vectors = torch.linalg.eigh(optimum.expansion.hessian)
    flat = values <= ROUNDING * values.abs().max()
    leak = (vectors[:, flat].mT @ gradient).norm() / gradient.norm()
    if bool(leak > LEAK):
        raise ValueError(
            f"The Hessian is singular along the prediction's slope ({float(leak):.2g} of it): the "
            "prediction can change at no cost and its rigidity is zero. Add a regulariser or data."
        )


def _first_step(problem: ConstrainedProblem, optimum: Solution) -> float:
    """A third of the prediction's standard error, between 1e-4 and 0.1 of the targets' spread."""
    target = problem.target[:, problem.output_index]
    spread = float(target.std()) if len(target) > 1 else 0.0
    spread = spread or float(target.abs().max()) or 1.0
    expansion = optimum.expansion
    values, vectors = torch.linalg.eigh(expansion.hessian)
    determined = values > ROUNDING * values[-1]
    components = vectors[:, determined].mT @ expansion.prediction_gradient
    q = (components.square() / values[determined]).sum()  # g^T H^-1 g
    standard_error = expansion.gradient_scale * math.sqrt(float(q) / len(target))
    return min(max(standard_error / 3, 1e-4 * spread), 0.1 * spread)


def _parameters(problem: ConstrainedProblem, solution: Solution) -> Any:
    """The parameters of a solution in their container."""
    return problem.regressor.parameters.restore(problem.units * solution.expansion.vector)


def _column(solutions: Sequence[Solution | None], name: str) -> Tensor:
    """One attribute of all solutions, (S,); NaN where there is no solution."""
    return torch.tensor(
        [getattr(solution, name, math.nan) for solution in solutions], dtype=torch.float64
    )
