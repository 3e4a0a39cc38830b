r"""The definition of the prediction rigidity, solved numerically.

How much must the loss rise if the prediction at one input is forced to another value?

$$ \mathcal{L}_c(\epsilon) = \min_w \mathcal{L}(w) \quad \text{subject to} \quad
   \tilde y(x_\star, w) = \epsilon, \qquad
   R_\star = \frac{\partial^2 \mathcal{L}_c}{\partial \epsilon^2}
   \Big|_{\epsilon = \tilde y_\star} = \frac{\partial \lambda}{\partial \epsilon}
   \Big|_{\epsilon = \tilde y_\star} $$

(the paper's Sec. 3.2; it writes one derivative where the second is meant). The multiplier $\lambda$
of the constraint is the slope of $\mathcal{L}_c$, and its differences lose fewer digits than second
differences of losses. No expansion is made: the closed form $1 / g^\top H^{-1} g$ with the exact
Hessian must equal this, and the Gauss-Newton form can be compared with it.

- `constrained_profile` computes $\mathcal{L}_c$ at given values.
- `constrained_rigidity` computes its curvature at the minimum.

Both need dense Hessians and many solutions, so they are for small models and checks. The file goes
from the two verbs down to the solver: differences extrapolated to step zero, the loss and the
prediction as functions of one vector (`Problem`), their derivatives at one vector (`Point`), and
Newton's method, whose equations stand before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..any_regressor.curvature.exact_hessian import Penalty, Regulariser
from ..any_regressor.derivatives.parameters import Subset
from ..any_regressor.derivatives.regressor import Function, Regressor
from ..data.samples import doubled
from ..losses import LossLike, ValuedLoss, require_valued, summed_loss
from ..metrics.alignment import as_tensor
from ..models.derivatives import Differentiated
from ..notices import notify
from ..posterior.posterior import check_ridge

__all__ = [
    "ConstrainedProfile",
    "ConstrainedRigidity",
    "constrained_profile",
    "constrained_rigidity",
]

LEVELS = 24
"""Most halvings of the step between differences."""

NEAR_ITERATIONS = 20
"""Most Newton iterations from the minimum to a prediction held nearby; else it is too far."""

PROFILE_ITERATIONS = 60
"""Most Newton iterations from one value of a profile to the next, before the step is halved."""

FAILURES = 3
"""After this many values in a row that cannot be reached, a profile ends."""

ROUNDING = 1e-12
"""Eigenvalues of the Hessian at the minimum below this times the largest count as zero."""

LEAK = 1e-6
"""Up to this share of the prediction's gradient may lie along flat directions of the loss."""

FLAT = 1e-13
"""No Newton step goes along directions with curvatures below this times the largest."""

WEAKEST_DAMPING = 1e-9
"""The smallest nonzero damping. The damping times the largest curvature is added to all."""

STRONGEST_DAMPING = 1e2
"""No larger damping is tried."""

ESCAPE_LENGTHS = (10.0, 1.0, 0.1, 0.01)
"""Lengths of steps that leave a saddle, in units of the gradient's natural size."""


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
    _check_options(tolerance, max_iterations)
    if step is not None and not 0 < step < math.inf:
        raise ValueError(f"step must be positive and finite, got {step}.")
    start = Problem.of(
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
    ).start
    optimum = _optimum(start, tolerance, max_iterations)
    inverse_rigidity = _inverse_rigidity(optimum)
    if step is None:
        step = _first_step(optimum, inverse_rigidity)
    slopes, curvatures, solutions = _differences(optimum, step, tolerance)
    solutions.sort(key=lambda solution: solution.value)
    return ConstrainedRigidity(
        rigidity=slopes.value,
        error=slopes.relative_error,
        from_losses=curvatures.value,
        prediction=optimum.value,
        epsilons=_column([solution.value for solution in solutions]),
        losses=_column([solution.loss for solution in solutions]),
        multipliers=_column([solution.multiplier for solution in solutions]),
        parameters=optimum.parameters,
        moved=start.loss - optimum.loss,
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
    start = Problem.of(
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
    ).start
    optimum = _optimum(start, tolerance, max_iterations)
    _inverse_rigidity(optimum)  # refuses predictions that have no rigidity
    different_values = sorted(set(values.tolist()))
    above = [value for value in different_values if value >= optimum.value]
    below = [value for value in reversed(different_values) if value < optimum.value]
    solutions = {
        **_followed(optimum, above, tolerance, partial),
        **_followed(optimum, below, tolerance, partial),
    }
    losses = []
    multipliers = []
    for value in values.tolist():
        solution = solutions.get(value)
        losses.append(math.nan if solution is None else solution.loss)
        multipliers.append(math.nan if solution is None else solution.multiplier)
    return ConstrainedProfile(
        epsilons=values,
        losses=_column(losses),
        multipliers=_column(multipliers),
        prediction=optimum.value,
        minimum=optimum.loss,
        parameters=optimum.parameters,
    )


def _column(values: list[float]) -> Tensor:
    """Numbers as a float64 vector."""
    return torch.tensor(values, dtype=torch.float64)


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


def _check_options(tolerance: float, max_iterations: int) -> None:
    """Refuse options out of their range."""
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must lie between 0 and 1, got {tolerance}.")
    if not max_iterations >= 1:
        raise ValueError(f"max_iterations must be at least 1, got {max_iterations}.")


# --- the minimum --------------------------------------------------------------------------------


def _optimum(start: Point, tolerance: float, max_iterations: int) -> Point:
    """The minimum near the given parameters, in parameters scaled to unit curvature there.

    Warns where the loss falls much on the way: the result is for that minimum, not for the user's
    parameters.
    """
    try:
        optimum = minimum(_rescaled(start), tolerance, max_iterations)
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
    return _rescaled(optimum)


def _rescaled(point: Point) -> Point:
    """The same point, with each parameter in units of one over the root of its curvature there."""
    units = point.problem.units
    curvatures = (point.hessian.diagonal() / units / units).abs()
    floor = 1e-12 * curvatures.max()
    new_units = torch.where(curvatures > floor, curvatures, 1.0).rsqrt()
    problem = replace(point.problem, units=new_units)
    return Point(problem, point.vector * units / new_units)


def _inverse_rigidity(optimum: Point) -> float:
    r"""$g^\top H^{-1} g$ at the minimum, by which steps are measured.

    Raises:
        ValueError: No parameter moves the prediction, or it moves at no cost.
    """
    gradient = optimum.prediction_gradient
    if not bool(gradient.any()):
        raise ValueError(
            "The prediction at x does not depend on the parameters: it is infinitely rigid."
        )
    curvatures, directions = torch.linalg.eigh(optimum.hessian)
    components = directions.mT @ gradient
    flat = curvatures <= ROUNDING * curvatures.abs().max()
    leak = components[flat].norm() / gradient.norm()
    if bool(leak > LEAK):
        raise ValueError(
            f"The Hessian is singular along the prediction's slope ({float(leak):.2g} of it): the "
            "prediction can change at no cost and its rigidity is zero. Add a regulariser or data."
        )
    return float((components[~flat].square() / curvatures[~flat]).sum())


# --- the curvature, from differences of shrinking steps -------------------------------------------


def _first_step(optimum: Point, inverse_rigidity: float) -> float:
    """A third of the prediction's standard error, between 1e-4 and 0.1 of the targets' spread."""
    problem = optimum.problem
    target = problem.target[:, problem.output_index]
    spread = float(target.std()) if len(target) > 1 else 0.0
    spread = spread or float(target.abs().max()) or 1.0
    standard_error = optimum.gradient_scale * math.sqrt(inverse_rigidity / len(target))
    return min(max(standard_error / 3, 1e-4 * spread), 0.1 * spread)


def _differences(
    optimum: Point, h: float, tolerance: float
) -> tuple[Extrapolation, Extrapolation, list[Point]]:
    """Slopes of the multipliers and curvatures of the losses at step zero, and the solutions."""
    slopes: list[float] = []
    curvatures: list[float] = []
    solutions = [optimum]
    for _ in range(LEVELS):
        try:
            low = constrained_minimum(
                optimum, optimum.value - h, tolerance, NEAR_ITERATIONS, halvings=0
            )
            high = constrained_minimum(
                optimum, optimum.value + h, tolerance, NEAR_ITERATIONS, halvings=0
            )
        except NotConverged:
            # The step is too long for the loss to be smooth: start again with a smaller one.
            slopes = []
            curvatures = []
            solutions = [optimum]
            h /= 2
            continue
        solutions += [low, high]
        slopes.append((high.multiplier - low.multiplier) / (2 * h))
        curvatures.append((high.loss - 2 * optimum.loss + low.loss) / h**2)
        limit = Extrapolation.of(slopes)
        if limit.stalled or limit.relative_error < 1e-10:
            break
        h /= 2
    limit = Extrapolation.of(slopes)
    if not limit.relative_error < 0.1:
        raise NotConverged(
            "The constrained loss has no curvature that differences of shrinking steps agree on: "
            f"at the last, {h:.2g}, its slope gives {limit.value:.6g} within {limit.error:.2g}. "
            "Pass another step."
        )
    return limit, Extrapolation.of(curvatures), solutions


@dataclass(frozen=True)
class Extrapolation:
    r"""Differences at shrinking steps h, h/2, h/4, ..., extrapolated to step zero.

    For an even error series $D(h) = D + c_1 h^2 + c_2 h^4 + \ldots$ the tableau
    $A_{i,j} = (4^j A_{i,j-1} - A_{i-1,j-1}) / (4^j - 1)$ over $h_i = h / 2^i$ removes one term per
    column (Richardson; Ridders). Its entries agree better and better, until rounding takes over.
    The value is the entry that agrees best with its neighbours, and its difference from them is the
    error estimate.

    Attributes:
        value: The limit, as far as known.
        error: Estimate of its absolute error.
        steps_since: How many steps followed the one that gave the value.

    Examples:
        >>> steps = (1.0, 0.5, 0.25)
        >>> limit = Extrapolation.of([(math.exp(h) - math.exp(-h)) / (2 * h) for h in steps])
        >>> round(limit.value, 5)
        1.0
    """

    value: float
    error: float
    steps_since: int

    @classmethod
    def of(cls, differences: Sequence[float]) -> Extrapolation:
        """The limit of differences, the one of the largest step first."""
        value = differences[0] if differences else math.nan
        error = math.inf
        best_row = 0
        row: list[float] = []
        for i, difference in enumerate(differences):
            previous_row = row
            row = [difference]
            for j, above in enumerate(previous_row, start=1):
                left = row[-1]
                entry = (4**j * left - above) / (4**j - 1)
                entry_error = max(abs(entry - left), abs(entry - above))
                if entry_error < error:
                    value = entry
                    error = entry_error
                    best_row = i
                row.append(entry)
        return cls(value, error, len(differences) - 1 - best_row)

    @property
    def relative_error(self) -> float:
        """The error relative to the value."""
        return self.error / abs(self.value) if self.value else math.inf

    @property
    def stalled(self) -> bool:
        """Whether three smaller steps in a row did not help: rounding has taken over."""
        return self.relative_error < 1e-3 and self.steps_since >= 3


# --- the profile, from value to value -------------------------------------------------------------


def _followed(
    optimum: Point, outward: list[float], tolerance: float, partial: bool
) -> dict[float, Point]:
    """Solutions from the minimum outwards and back again, the lower of the two at each value.

    Far out, the branch of solutions that starts at the minimum may no longer be the lowest. On the
    way back, the lower branch is followed further inwards than it was found on the way out.

    Args:
        optimum: The minimum.
        outward: Values on one side of the minimum, from the nearest on.
        tolerance: Largest relative residual of a solution.
        partial: Whether to leave out values that cannot be reached.

    Returns:
        Solutions by their values.
    """
    solutions: dict[float, Point] = {}
    reached = optimum
    failures_in_a_row = 0
    for value in outward:
        try:
            reached = constrained_minimum(reached, value, tolerance, PROFILE_ITERATIONS)
        except NotConverged:
            if not partial:
                raise
            failures_in_a_row += 1
            if failures_in_a_row == FAILURES:
                break
            continue
        solutions[value] = reached
        failures_in_a_row = 0

    for value in list(reversed(solutions))[1:]:
        try:
            reached = constrained_minimum(reached, value, tolerance, PROFILE_ITERATIONS, halvings=3)
        except NotConverged:  # this branch ends here
            reached = solutions[value]
        if solutions[value].loss < reached.loss:
            reached = solutions[value]
        solutions[value] = reached
    return solutions


# --- the loss and the prediction ------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """The summed loss and the prediction at x as functions of one float64 vector.

    Attributes:
        regressor: The model, in float64.
        loss: The loss of one sample.
        inputs: Training inputs.
        target: Training targets, (N, K).
        x: The input x, as a batch of one.
        output_index: Which of the K predictions at x.
        regulariser: A function callable(params) -> number that is added to the loss, or None.
        ridge: Half the ridge times |w - w0|^2 is added too, with the user's parameters w0.
        weight: Weights of the samples, (N, 1), or None.
        units: The vectors here are the parameters divided by these, (P,).
    """

    regressor: Regressor
    loss: ValuedLoss
    inputs: tuple[Tensor, ...]
    target: Tensor
    x: tuple[Tensor, ...]
    output_index: int
    regulariser: Regulariser | None
    ridge: float
    weight: Tensor | None
    units: Tensor

    @classmethod
    def of(
        cls,
        f: Function | nn.Module,
        params: Any,
        X: Any,
        y: Any,
        x: Any,
        *,
        loss: LossLike = "mse",
        regulariser: Regulariser | None = None,
        ridge: float = 0.0,
        subset: Subset | None = None,
        sample_weight: Any = None,
        output: int | None = None,
    ) -> Problem:
        """Check the arguments of `constrained_rigidity` and turn them into float64 tensors.

        Raises:
            ValueError: Shapes do not fit, or values are not finite.
        """
        check_ridge(ridge)
        regressor = Regressor.of(f, params, subset=subset).double()
        inputs = _inputs(X)
        query = _query(x, inputs)
        with torch.no_grad():
            outputs = regressor.outputs(regressor.flat, *inputs)
            prediction = regressor.outputs(regressor.flat, *query)
        if not bool(prediction.isfinite().all()):
            raise ValueError("The prediction at x is NaN or infinite. Check x.")
        if regulariser is not None:
            Penalty(regressor, regulariser)  # raises unless it returns one number
        weight = _weight(sample_weight, len(outputs))
        return cls(
            regressor=regressor,
            loss=require_valued(loss),
            inputs=inputs,
            target=_target(y, outputs, weight),
            x=query,
            output_index=_output_index(output, outputs.shape[1]),
            regulariser=regulariser,
            ridge=float(ridge),
            weight=weight,
            units=torch.ones_like(regressor.flat),
        )

    @property
    def start(self) -> Point:
        """The user's parameters."""
        return Point(self, self.regressor.flat / self.units)

    def parameters(self, vector: Tensor) -> Any:
        """The parameters of a vector in the user's container."""
        return self.regressor.parameters.restore(self.units * vector)

    def outputs(self, vector: Tensor) -> Tensor:
        """Predictions of the training data, (N, K)."""
        return self.regressor.outputs(self.units * vector, *self.inputs)

    def prediction(self, vector: Tensor) -> Tensor:
        """The prediction at x, a scalar."""
        return self.regressor.outputs(self.units * vector, *self.x)[0, self.output_index]

    def losses(self, outputs: Tensor) -> Tensor:
        """The weighted losses of the samples, summed."""
        batch = (*self.inputs, self.target)
        return summed_loss(self.loss, outputs, self.target, self.weight, batch)

    def total(self, vector: Tensor) -> Tensor:
        """The summed loss, the regulariser and the ridge."""
        total = self.losses(self.outputs(vector))
        if self.regulariser is not None:
            total = total + self.regulariser(self.parameters(vector))
        if self.ridge:
            change = self.units * vector - self.regressor.flat
            total = total + 0.5 * self.ridge * change.square().sum()
        return total


def _inputs(X: Any) -> tuple[Tensor, ...]:
    """One input, or a tuple of several, as float64 tensors."""
    columns = X if isinstance(X, tuple) else (X,)
    return tuple(doubled(as_tensor(column)) for column in columns)


def _query(x: Any, training_inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The one input x as a batch of one, shaped like the training inputs."""
    inputs = _inputs(x)
    if len(inputs) != len(training_inputs):
        raise ValueError(
            f"Expected x with {len(training_inputs)} inputs like X, got {len(inputs)}."
        )
    batched = []
    for value, training in zip(inputs, training_inputs, strict=True):
        if value.ndim == training.ndim - 1:
            value = value[None]
        if value.ndim != training.ndim or len(value) != 1:
            raise ValueError(
                "Expected one input x, shaped (1, ...) or as a row of X "
                f"{tuple(training.shape)}, got {tuple(value.shape)}. Call once for each input."
            )
        batched.append(value)
    return tuple(batched)


def _weight(sample_weight: Any, rows: int) -> Tensor | None:
    """Checked weights (N, 1); None without weights."""
    if sample_weight is None:
        return None
    weight = as_tensor(sample_weight).double()
    if weight.numel() != rows or len(weight) != rows:
        raise ValueError(
            f"sample_weight must have one entry per sample, {rows}, got {tuple(weight.shape)}."
        )
    if not bool((weight >= 0).all()) or not bool(weight.isfinite().all()):
        raise ValueError("sample_weight must be finite and not negative.")
    return weight.reshape(rows, 1)


def _target(y: Any, outputs: Tensor, weight: Tensor | None) -> Tensor:
    """Targets (N, K), finite; zero for samples of weight zero, where a NaN must not spread."""
    target = as_tensor(y).to(outputs)
    if target.ndim == 0 or len(target) != len(outputs) or target.numel() != outputs.numel():
        raise ValueError(
            f"Expected one target per prediction: predictions {tuple(outputs.shape)}, targets "
            f"{tuple(target.shape)}."
        )
    target = target.reshape(outputs.shape)
    if weight is not None:
        target = torch.where(weight > 0, target, 0.0)
    if not bool(target.isfinite().all()) or not bool(outputs.isfinite().all()):
        raise ValueError("Targets or predictions contain NaN or infinity. Drop these rows.")
    return target


def _output_index(output: int | None, outputs: int) -> int:
    """The index of the output to hold among `outputs` outputs; by default the only one."""
    if output is None:
        if outputs > 1:
            raise ValueError(
                f"The model has {outputs} outputs. Pass output=k to choose the output that is "
                "held at x."
            )
        return 0
    if not 0 <= output < outputs:
        raise ValueError(f"Expected output in 0..{outputs - 1}, got {output}.")
    return output


# --- Newton's method ----------------------------------------------------------------------------
#
# At a point with loss gradient g, prediction gradient a and multiplier lambda = a.g / a.a, the step
# is a sum of two: one along a, which satisfies the linearised constraint, and one in the null space
# Z of a, which minimises the Lagrangian's quadratic model with W = H - lambda d2y/dw2:
#
#     step = a (epsilon - y) / a.a + Z p,    (Z^T W Z) p = -Z^T (g + W a (epsilon - y) / a.a).
#
# Without a constraint a and the gap epsilon - y count as zero, and every direction is free.
#
# Negative curvatures are replaced by their absolute values, and there is no step along flat
# directions. Steps are damped until they lower either the residual of these equations or the merit
# L + price |epsilon - y|. From a saddle, the search goes on along the most negative curvature.
#
# Differences of multipliers need solutions with nearly all digits: the iteration goes on until
# rounding stops it, at relative residuals of about 1e-15. Solvers that compare only values of the
# merit stop at about 1e-8, and at saddles.


class NotConverged(ValueError):
    """No solution was found."""


@dataclass(frozen=True, eq=False)
class Point:
    """One vector of parameters, with all that a Newton step from there needs.

    Derivatives are computed on first use.

    Attributes:
        problem: The loss and the prediction as functions of a vector.
        vector: The parameters, (P,).
        held: The value at which the prediction is held; None where it is free.
    """

    problem: Problem
    vector: Tensor
    held: float | None = None

    @cached_property
    def _loss(self) -> Differentiated:
        """The summed loss with its derivatives."""
        return Differentiated.of(self.problem.total, self.vector)

    @cached_property
    def _prediction(self) -> Differentiated:
        """The prediction at x with its derivatives."""
        return Differentiated.of(self.problem.prediction, self.vector)

    @property
    def loss(self) -> float:
        """The summed loss."""
        return float(self._loss.value)

    @property
    def gradient(self) -> Tensor:
        """Gradient g of the loss, (P,)."""
        return self._loss.gradient

    @cached_property
    def hessian(self) -> Tensor:
        """Hessian H of the loss, (P, P)."""
        return self._loss.hessian()

    @property
    def prediction_gradient(self) -> Tensor:
        """Gradient of the prediction, (P,)."""
        return self._prediction.gradient

    @property
    def value(self) -> float:
        """The prediction at x; at a solution with a constraint exactly the held value."""
        return float(self._prediction.value) if self.held is None else self.held

    @property
    def parameters(self) -> Any:
        """The parameters in the user's container."""
        return self.problem.parameters(self.vector)

    @cached_property
    def gradient_scale(self) -> float:
        """Length of the losses' derivative with respect to predictions: a natural scale.

        Where all residuals vanish, it is what rounding of the targets leaves of them.
        """
        with torch.no_grad():
            outputs = self.problem.outputs(self.vector)
        length = float(Differentiated.of(self.problem.losses, outputs).gradient.norm())
        return max(length, 1e-12 * (float(self.problem.target.norm()) or 1.0))

    def after(self, step: Tensor) -> Point:
        """The point a step away, with the same constraint."""
        return replace(self, vector=self.vector + step)

    @cached_property
    def gap(self) -> float:
        """How far the prediction is from the held value; zero where it is free."""
        return 0.0 if self.held is None else self.held - float(self._prediction.value)

    @cached_property
    def normal(self) -> Tensor:
        """Gradient a of the constraint, (P,); zero where the prediction is free."""
        return torch.zeros_like(self.vector) if self.held is None else self.prediction_gradient

    @cached_property
    def squared_normal(self) -> float:
        """a.a, the constraint's squared gradient."""
        return float(self.normal.square().sum())

    def share_along_normal(self, vector: Tensor) -> float:
        """The coefficient of a vector along a, a.v / a.a; zero where the prediction is free."""
        return float(self.normal @ vector) / (self.squared_normal or 1.0)

    @cached_property
    def multiplier(self) -> float:
        r"""$\lambda = d \mathcal{L}_c / d\epsilon$; zero where the prediction is free."""
        return self.share_along_normal(self.gradient)

    @cached_property
    def lagrangian_hessian(self) -> Tensor:
        """W, (P, P)."""
        if self.held is None:
            return self.hessian
        return self.hessian - self.multiplier * self._prediction.hessian()

    @cached_property
    def null_space(self) -> Tensor:
        """Z, orthonormal columns; the identity where the prediction is free."""
        if self.held is None:
            return torch.eye(len(self.vector), dtype=self.vector.dtype)
        return _null_space(self.normal)

    @cached_property
    def free_curvatures(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of Z^T W Z, ascending, and its eigenvectors in columns."""
        matrix = self.null_space.mT @ self.lagrangian_hessian @ self.null_space
        curvatures, vectors = torch.linalg.eigh(matrix)
        return curvatures, vectors

    def step(self, damping: float) -> Tensor:
        """The step of the equations above, (P,).

        Args:
            damping: This times the largest |curvature| is added to all, and the step is
                divided by 1 + damping.
        """
        along = self.normal * (self.gap / (self.squared_normal or 1.0))
        push = -self.null_space.mT @ (self.gradient + self.lagrangian_hessian @ along)
        curvatures, vectors = self.free_curvatures
        largest = max(curvatures.abs().tolist(), default=0.0)
        damped_curvatures = curvatures.abs() + damping * largest
        flat = damped_curvatures <= FLAT * largest
        components = vectors.mT @ push / torch.where(flat, math.inf, damped_curvatures)
        return (along + self.null_space @ (vectors @ components)) / (1 + damping)

    @cached_property
    def residual(self) -> float:
        """Length of the vector that vanishes at a solution, in units of a gradient."""
        length = math.sqrt(self.squared_normal)
        if self.held is not None and length < 1e-100:
            return math.inf  # no parameter moves the prediction from here
        across = self.gradient - self.multiplier * self.normal
        return math.hypot(float(across.norm()), self.gap / (length or 1.0))

    def merit(self, price: float) -> float:
        """The loss, plus the price of a violated constraint."""
        return self.loss + price * abs(self.gap)


def minimum(start: Point, tolerance: float, max_iterations: int) -> Point:
    """The minimum near a point, with or without a constraint, by Newton's method.

    The iteration goes on until rounding stops it.

    Args:
        start: The point to start from, held at a value or free.
        tolerance: Largest residual of a solution, in units of the gradient's natural size.
        max_iterations: Most iterations.

    Raises:
        NotConverged: The residual stays above the tolerance.
    """
    at = start
    smallest_residual = at.residual
    damping = 0.0
    price = 0.0  # of a violated constraint in the merit; never lowered, or steps could cycle
    for _ in range(max_iterations):
        if not at.residual < math.inf:
            break
        gradient_after = at.gradient + at.lagrangian_hessian @ at.step(0.0)
        multiplier_after = at.share_along_normal(gradient_after)
        price = max(price, 2 * abs(at.multiplier), 2 * abs(multiplier_after))
        if at.residual <= tolerance * at.gradient_scale:
            dampings = (0.0, 0.0)  # only full steps, until rounding stops them
        else:
            dampings = (damping, STRONGEST_DAMPING)
        improvement = _improved(at, smallest_residual, price, dampings)
        if improvement is None or at.residual <= 1e-3 * at.gradient_scale:
            below_saddle = _escaped(at, price)
            if below_saddle is not None:
                improvement = below_saddle, 0.0
                smallest_residual = math.inf
        if improvement is None:
            break
        at, damping = improvement
        damping = damping / 10 if damping > WEAKEST_DAMPING else 0.0
        smallest_residual = min(at.residual, smallest_residual)

    relative_residual = at.residual / at.gradient_scale
    if not relative_residual <= tolerance:
        raise NotConverged(
            f"Newton's method stopped at a relative residual of {relative_residual:.2g}, above the "
            f"tolerance {tolerance:g}."
        )
    return at


def constrained_minimum(
    start: Point, value: float, tolerance: float, max_iterations: int, halvings: int = 6
) -> Point:
    """The minimum with the prediction held at a value, by steps from a known solution.

    Args:
        start: The solution to start from.
        value: The value at which to hold the prediction.
        tolerance: Largest relative residual of a solution.
        max_iterations: Most iterations for one step. A step that fails is halved.
        halvings: After this many halvings the value is given up as out of reach.

    Raises:
        NotConverged: The value could not be reached.
    """
    reached = start
    step = value - start.value
    smallest_step = abs(step) / 2**halvings
    while reached.value != value:
        aim = reached.value + step
        if abs(value - aim) < smallest_step:
            aim = value
        try:
            reached = minimum(replace(reached, held=aim), tolerance, max_iterations)
        except NotConverged as failure:
            step /= 2
            if not abs(step) >= smallest_step:
                raise NotConverged(
                    f"No parameters were found that predict {value:.6g} at x: from the fitted "
                    f"value {start.value:.6g} the constraint could only be followed to "
                    f"{reached.value:.6g}. The model may be unable to predict that value "
                    "(bounded outputs)."
                ) from failure
        else:
            # The next step is twice as long, but not beyond the value.
            left = value - aim
            step = math.copysign(min(2 * abs(step), abs(left)), left)
    return reached


def _improved(
    at: Point, smallest_residual: float, price: float, dampings: tuple[float, float]
) -> tuple[Point, float] | None:
    """The first acceptable step, with stronger and stronger damping.

    A step is acceptable if it halves the smallest residual so far, or lowers the merit.

    Args:
        at: The point to start from.
        smallest_residual: The smallest residual so far.
        price: Price of the constraint in the merit.
        dampings: The first damping to try, and the last.

    Returns:
        The point after the step, and the damping; None if no step is acceptable.
    """
    merit = at.merit(price)
    damping, strongest = dampings
    while damping <= strongest:
        there = _back_on_constraint(at.after(at.step(damping)))
        # Near a solution, differences of the merit are rounding: only the residual decides.
        merit_counts = 1e-8 * there.gradient_scale < there.residual < math.inf
        lower_merit = merit_counts and there.merit(price) < merit
        if lower_merit or there.residual < 0.5 * smallest_residual:
            return there, damping
        damping = max(4 * damping, WEAKEST_DAMPING)
    return None


def _escaped(at: Point, price: float) -> Point | None:
    """A point below a saddle, along its most negative curvature; None at a minimum."""
    curvatures, vectors = at.free_curvatures
    if not len(curvatures) or bool(curvatures[0] >= -1e-7 * curvatures[-1].abs()):
        return None
    direction = max(at.gradient_scale, 1e-6) * (at.null_space @ vectors[:, 0])
    trials = []
    for length in ESCAPE_LENGTHS:
        for signed_length in (length, -length):
            there = at.after(signed_length * direction)
            trials.append(_back_on_constraint(there, corrections=4, closeness=1e-12))
    best = min(trials, key=lambda there: there.merit(price))
    merit = at.merit(price)
    if best.merit(price) < merit - 1e-9 * abs(merit):
        return best
    return None


def _back_on_constraint(at: Point, corrections: int = 1, closeness: float = 1e-3) -> Point:
    """The point moved back towards the constraint, which a long step leaves by its curvature.

    Args:
        at: The point after a step.
        corrections: Most corrections to make.
        closeness: Distance from the constraint that is near enough, in units of the gradient's
            natural size.
    """
    for _ in range(corrections):
        near = closeness * math.sqrt(at.squared_normal) * at.gradient_scale
        if not abs(at.gap) > near or not 0 < at.squared_normal < math.inf:
            break
        back = at.after(at.gap / at.squared_normal * at.normal)
        if not abs(back.gap) < abs(at.gap):
            break
        at = back
    return at


def _null_space(direction: Tensor) -> Tensor:
    """Orthonormal columns orthogonal to a direction, (P, P - 1), by a Householder reflection."""
    mirror = direction / direction.norm()
    mirror[0] += 1.0 if float(mirror[0]) >= 0 else -1.0
    identity = torch.eye(len(direction), dtype=direction.dtype)
    reflection: Tensor = identity - 2 * torch.outer(mirror, mirror) / mirror.square().sum()
    return reflection[:, 1:]


def __dir__() -> list[str]:
    return sorted(__all__)
