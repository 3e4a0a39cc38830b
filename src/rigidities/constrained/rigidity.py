"""The curvature of the constrained loss, and the constrained loss along given values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..any_regressor.curvature.exact_hessian import Regulariser
from ..any_regressor.derivatives.parameters import Subset
from ..any_regressor.derivatives.regressor import Function
from ..losses import LossLike
from .newton import NotConverged, Solution, constrained, minimised
from .problem import ConstrainedProblem, Local

LEVELS = 24  # halvings of the step at most
ITERATIONS = 20
"""Of Newton's method from the minimum to a prediction held nearby; more mean that it is too far."""
FOLLOWING = 60  # iterations from one value of a profile to the next; then the step is halved
FAILURES = 3  # values of a profile in a row that cannot be reached: those beyond are not tried
ROUNDING = 1e-12  # eigenvalues of the Hessian below this times the largest count as zero
LEAK = 1e-6  # share of a prediction's slope along flat directions of the loss that counts as none


@dataclass(frozen=True)
class ConstrainedRigidity:
    r"""The rigidity of one prediction by its definition.

    Attributes:
        rigidity: $R = d\lambda / d\epsilon$, from the multipliers $\lambda = d\mathcal{L}_c /
            d\epsilon$ (envelope theorem), extrapolated to step zero.
        error: estimate of its relative error.
        from_losses: the same from second differences of the losses, which lose more digits.
        prediction: $\tilde y$ at x at the minimum.
        epsilons: (S,) ascending, the values that the prediction was held at.
        losses: (S,) $\mathcal{L}_c$ there.
        multipliers: (S,) $\lambda$ there.
        parameters: at the unconstrained minimum, shaped as they were given.
        moved: how much the loss fell from the given parameters to that minimum.
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
        epsilons: (S,) as given.
        losses: (S,) $\mathcal{L}_c$.
        multipliers: (S,) its slope $\lambda$.
        prediction: $\tilde y$ at x at the minimum.
        minimum: the loss there.
        parameters: there, shaped as they were given.
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
    $A_{i,j} = (4^j A_{i,j-1} - A_{i-1,j-1}) / (4^j - 1)$ over $h_i = h / 2^i$ removes one term a
    column (Richardson; Ridders). Its entries first agree better, then worse, when rounding takes
    over: the one that agrees best with its neighbours is taken, and that disagreement is the error
    estimate.

    Attributes:
        value: the limit, as far as known.
        error: estimate of its absolute error.

    Examples:
        >>> tableau = Tableau()
        >>> for h in (1.0, 0.5, 0.25):
        ...     tableau.add((math.exp(h) - math.exp(-h)) / (2 * h))
        >>> round(tableau.value, 5)
        1.0
    """

    value: float = math.nan
    error: float = math.inf
    _row: list[float] = field(default_factory=list)
    _best: int = 0

    def add(self, difference: float) -> None:
        """The difference at half the step of the one before."""
        row = [difference]
        for j, above in enumerate(self._row, start=1):
            entry = (4**j * row[-1] - above) / (4**j - 1)
            error = max(abs(entry - row[-1]), abs(entry - above))
            if error < self.error:
                self.value, self.error, self._best = entry, error, len(self._row) + 1
            row.append(entry)
        if not self._row:
            self.value = difference
        self._row = row

    @property
    def relative(self) -> float:
        """The error relative to the value."""
        return self.error / abs(self.value) if self.value else math.inf

    @property
    def stalled(self) -> bool:
        """Whether three smaller steps in a row brought nothing: rounding has taken over."""
        return self.relative < 1e-3 and len(self._row) - self._best >= 3


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
    at $\tilde y \pm h$, $\pm h/2$, ... All in float64 with exact second derivatives.

    Args:
        f: f(params, *inputs) -> (N,) or (N, K); or an `nn.Module`, with params=None.
        params: fitted parameters, a tensor or nested containers of tensors.
        X: training inputs (a tuple of several), and
        y: targets.
        x: one input, shaped (1, ...) or as a row of X.
        loss: as in `PredictionRigidity`, summed over samples.
        regulariser: callable(params) -> a number added to it.
        ridge: $\varsigma^2$, as in `PredictionRigidity`: $\frac12 \varsigma^2 |w - w_0|^2$ about
            the given parameters is added. (Weight decay, about zero, is a regulariser.)
        subset: names or prefixes of the parameters that may vary, or callable(name) -> bool.
        sample_weight: (N,) weights of the samples in the loss.
        output: which of several outputs to hold at x.
        step: the first h; by default a third of the prediction's standard error. It is halved until
            the differences agree or rounding takes over.
        tolerance: largest residual of a solution, relative to the losses' own gradients.
        max_iterations: of Newton's method for the minimum.

    Raises:
        ValueError: no minimum is near, or the rigidity is zero (a Hessian singular along the
            prediction's slope) or infinite (the parameters have no say in the prediction).

    Examples:
        >>> x = torch.tensor([0.0, 1.0, 2.0, 3.0])
        >>> line = lambda w, x: w[0] + w[1] * x
        >>> result = constrained_rigidity(line, torch.tensor([1.0, 2.0]), x, 1 + 2 * x, [1.5])
        >>> round(result.rigidity, 9)  # N at the mean of the inputs
        4.0
    """
    _check_given(f, params, {"X": X, "y": y, "x": x})
    _check_options(tolerance, max_iterations, step)
    setting: dict[str, Any] = {"loss": loss, "regulariser": regulariser, "ridge": ridge}
    setting |= {"subset": subset, "sample_weight": sample_weight, "output": output}
    problem = ConstrainedProblem.of(f, params, X, y, x, **setting)
    before = float(problem.total(problem.start))
    problem, optimum = _minimum(problem, tolerance, max_iterations)
    h = _first_step(problem, optimum) if step is None else step
    slopes, curvatures, solutions = _differenced(problem, optimum, h, tolerance)
    solutions.sort(key=lambda s: s.prediction)
    names = ("prediction", "loss", "multiplier")
    epsilons, losses, multipliers = (_column(solutions, name) for name in names)
    found = (slopes.value, slopes.relative, curvatures.value, optimum.prediction)
    minimum = (_restored(problem, optimum), before - optimum.loss)
    return ConstrainedRigidity(*found, epsilons, losses, multipliers, *minimum)


def constrained_profile(
    f: Function | nn.Module,
    params: Any = None,
    X: Any = None,
    y: Any = None,
    x: Any = None,
    epsilons: Any = None,
    *,
    partial: bool = False,
    tolerance: float = 1e-8,
    max_iterations: int = 200,
    **setting: Any,
) -> ConstrainedProfile:
    r"""$\mathcal{L}_c(\epsilon)$ at given values, each followed from its neighbour.

    From the fit outwards and back, keeping the lower loss: where several constrained minima compete
    this finds the lowest that descent reaches, and a finer grid can find a lower one.

    Args:
        f: as in `constrained_rigidity`, like
        params: fitted parameters,
        X: training inputs,
        y: targets, and
        x: one input.
        epsilons: (S,) values of the prediction.
        partial: whether values that cannot be reached are nan instead of an error.
        tolerance: largest relative residual.
        max_iterations: of Newton's method for the minimum.
        **setting: loss, regulariser, ridge, subset, sample_weight, output, as in
            `constrained_rigidity`.

    Raises:
        ValueError: a value that the model cannot predict.
    """
    _check_given(f, params, {"X": X, "y": y, "x": x, "epsilons": epsilons})
    _check_options(tolerance, max_iterations)
    values = torch.as_tensor(epsilons, dtype=torch.float64).reshape(-1)
    if not len(values) or not bool(values.isfinite().all()):
        what = "epsilons must be finite, at least one"
        raise ValueError(f"{what}, got {values.tolist()[:5]} (of {len(values)}).")
    problem = ConstrainedProblem.of(f, params, X, y, x, **setting)
    problem, optimum = _minimum(problem, tolerance, max_iterations)
    found: dict[int, Solution] = {}
    for side in (values >= optimum.prediction, values < optimum.prediction):
        outward = side.nonzero().flatten().tolist()
        outward.sort(key=lambda i: abs(float(values[i]) - optimum.prediction))
        found |= _followed(problem, optimum, values, outward, tolerance, partial)
    ordered = [found.get(i) for i in range(len(values))]
    losses, multipliers = (_column(ordered, name) for name in ("loss", "multiplier"))
    minimum = (optimum.prediction, optimum.loss, _restored(problem, optimum))
    return ConstrainedProfile(values, losses, multipliers, *minimum)


def _check_given(f: Any, params: Any, data: dict[str, Any]) -> None:
    """Refuse calls that leave something out, or take a module's params for granted."""
    names = ", ".join(data)
    if isinstance(f, nn.Module) and params is not None:
        by_name = ", ".join(f"{name}={name}" for name in data)
        raise TypeError(
            f"A module brings its own parameters: pass params=None, as in (model, None, {names}), "
            f"or name the others, (model, {by_name})."
        )
    if missing := [name for name, value in data.items() if value is None]:
        raise TypeError(f"Expected (f, params, {names}), got no {', no '.join(missing)}.")


def _check_options(tolerance: float, max_iterations: int, step: float | None = None) -> None:
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must lie between 0 and 1, got {tolerance}.")
    if not max_iterations >= 1:
        raise ValueError(f"max_iterations must be at least 1, got {max_iterations}.")
    if step is not None and not 0 < step < math.inf:
        raise ValueError(f"step must be positive and finite, got {step}.")


def _differenced(
    problem: ConstrainedProblem, optimum: Solution, h: float, tolerance: float
) -> tuple[Tableau, Tableau, list[Solution]]:
    """First differences of the multipliers, second ones of the losses, and their solutions."""
    slopes, curvatures, found = Tableau(), Tableau(), [optimum]
    for _ in range(LEVELS):
        try:
            low, high = (
                constrained(problem, optimum, optimum.prediction + d, tolerance, ITERATIONS, 0)
                for d in (-h, h)
            )
        except NotConverged:  # too far for the loss to be smooth: begin again from here
            slopes, curvatures, found, h = Tableau(), Tableau(), [optimum], h / 2
            continue
        found = [low, *found, high]
        slopes.add((high.multiplier - low.multiplier) / (2 * h))
        curvatures.add((high.loss - 2 * optimum.loss + low.loss) / h**2)
        if slopes.stalled or slopes.relative < 1e-10:
            break
        h /= 2
    if not slopes.relative < 0.1:
        raise NotConverged(
            "The constrained loss has no curvature that differences of shrinking steps agree on: "
            f"at the last, {h:.2g}, its slope gives {slopes.value:.6g} within {slopes.error:.2g}. "
            "Pass another step."
        )
    return slopes, curvatures, found


def _followed(
    problem: ConstrainedProblem,
    optimum: Solution,
    values: Tensor,
    outward: list[int],
    tolerance: float,
    partial: bool,
) -> dict[int, Solution]:
    """Solutions from the minimum outwards and back again, the lower of the two at each value.

    Where the solution that began at the minimum is not the lowest any more, another takes over: the
    way back finds it earlier.
    """
    found, reached, failed = dict[int, Solution](), optimum, 0
    for i in outward:
        try:
            reached = constrained(problem, reached, float(values[i]), tolerance, FOLLOWING)
        except NotConverged:
            if not partial:
                raise
            if (failed := failed + 1) == FAILURES:
                break
            continue
        found[i], failed = reached, 0
    for i in [i for i in reversed(outward) if i in found][1:]:
        try:
            reached = constrained(problem, reached, float(values[i]), tolerance, FOLLOWING, 3)
        except NotConverged:  # this branch ends here
            reached = found[i]
        found[i] = reached = min(reached, found[i], key=lambda s: s.loss)
    return found


def _minimum(
    problem: ConstrainedProblem, tolerance: float, max_iterations: int
) -> tuple[ConstrainedProblem, Solution]:
    """The minimum nearby, in parameters scaled to unit curvature; warns where it is another one."""
    start = Local(problem, problem.start)
    problem = _rescaled(problem, start.hessian)
    try:
        optimum = minimised(problem, tolerance, max_iterations)
    except NotConverged as failure:
        raise ValueError(
            f"No minimum of the loss was found near the parameters, where its gradient has norm "
            f"{float(start.gradient.norm()):.3g}. Fit further, or add a regulariser. {failure}"
        ) from failure
    if start.loss - optimum.loss > 0.01 * abs(start.loss):
        warnings.warn(
            f"The parameters are not a minimum of the loss (gradient norm "
            f"{float(start.gradient.norm()):.3g}): it fell from {start.loss:.6g} to "
            f"{optimum.loss:.6g} when minimised further. The result is for that minimum.",
            stacklevel=3,
        )
    units = problem.units
    problem = _rescaled(problem, optimum.local.hessian / units / units[:, None])
    vector = optimum.local.vector * units / problem.units
    optimum = replace(optimum, local=Local(problem, vector))
    _check_determined(optimum)
    return problem, optimum


def _rescaled(problem: ConstrainedProblem, hessian: Tensor) -> ConstrainedProblem:
    """Parameters in units of the inverse root of their own curvature."""
    diagonal = hessian.diagonal().abs()
    floor = 1e-12 * diagonal.max()
    return replace(problem, units=torch.where(diagonal > floor, diagonal, 1.0).rsqrt())


def _check_determined(optimum: Solution) -> None:
    slope = optimum.local.slope
    if not bool(slope.any()):
        what = "The prediction at x does not depend on the parameters"
        raise ValueError(f"{what}: it is infinitely rigid.")
    values, vectors = torch.linalg.eigh(optimum.local.hessian)
    rounding = ROUNDING * values.abs().max()
    leak = (vectors[:, values <= rounding].mT @ slope).norm() / slope.norm()
    if bool(leak > LEAK):
        raise ValueError(
            f"The Hessian is singular along the prediction's slope ({float(leak):.2g} of it): the "
            "prediction can change at no cost and its rigidity is zero. Add a regulariser or data."
        )


def _first_step(problem: ConstrainedProblem, optimum: Solution) -> float:
    """A third of the prediction's standard error, within 1e-4 and 0.1 of the targets' spread."""
    target = problem.target[:, problem.output]
    spread = float(target.std()) if len(target) > 1 else 0.0
    spread = spread or float(target.abs().max()) or 1.0
    values, vectors = torch.linalg.eigh(optimum.local.hessian)
    known = values > ROUNDING * values[-1]
    share = ((vectors[:, known].mT @ optimum.local.slope).square() / values[known]).sum()
    error = optimum.local.force * math.sqrt(float(share) / len(target))
    return min(max(error / 3, 1e-4 * spread), 0.1 * spread)


def _restored(problem: ConstrainedProblem, solution: Solution) -> Any:
    return problem.regressor.parameters.restore(problem.units * solution.local.vector)


def _column(solutions: Sequence[Solution | None], name: str) -> Tensor:
    """NaN where there is no solution."""
    return torch.tensor([getattr(s, name, math.nan) for s in solutions], dtype=torch.float64)
