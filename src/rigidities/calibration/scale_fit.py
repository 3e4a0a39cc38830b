r"""Noise, scale and tails of one target together: a regularised likelihood of all its rows.

The squared scale of a Student-t distribution is

$$ s^2 = \bigl(\tfrac{\bar c}{c}\, e^{h} + \alpha^2 q\bigr)\, e^{-\kappa [\text{seen}]}, \qquad
   h = a + w \cdot \phi, $$

with the head's inputs $\phi$ (`prediction.head`), and $\kappa$ for the optimism of rows that were
trained on. The priors are

- $\kappa \sim N(0, 1)$, narrower below zero;
- $\log(\nu - 2) \sim N(\log 6, 1.5^2)$;
- $\log \alpha^2 \sim N(\cdot, 1.5^2)$ about a first estimate, since single predictions hardly tell
  $\alpha^2$ from the noise;
- w has the precision 2 on the first three inputs and $\lambda$, the penalty, on the others, chosen
  by Laplace's approximation of the evidence.

The maximum is found by L-BFGS with the expected information as the initial curvature: $\log s^2$
has the information $\nu / 2(\nu + 3)$ a row. That matrix is by far the most expensive part, so that
one serves for all steps, for the next penalty, and for the folds of a cross-validation.

A row whose target lies at a bound of its support shows the distribution's mass beyond it, not a
density there.

L-BFGS is that of Nocedal and Wright, Numerical Optimization (2006), algorithms 7.4 and 7.5, with a
backtracking line search; the tail may rest at a bound of its range.

Data flow: `ScaleProblem` holds the rows and priors, gives the objective with its gradient and
information, and finds the maximum for one penalty (`solved`). `constant_fit`, `flat_fit`
and `headed_fit` are the three models that are fitted with it; each returns a `ScaleFit`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..prediction.distribution import Distribution, Gaussian, StudentT
from .robust import mean_q, reach
from .rows import TargetView

FIRST_INPUTS = 3
"""Number of the head's inputs that come before the features: log q, prediction, its square."""
FIXED_PARAMETERS = 3
"""Number of parameters before the weights: a, log alpha^2, kappa."""
PENALTIES = tuple(10 ** (4 - k / 2) for k in range(10))
"""Values of lambda that are tried, the largest first."""
FIRST_PENALTY = 2.0
"""Precision of the weights of the first three inputs."""
TAILS = (math.log(6), 1.5)
"""Prior of log(nu - 2): centre and spread; that of the scale has the same spread."""
WIDE = 3.0
"""Spread of the weak priors of the noise's level, and of the scale in a first estimate."""
PESSIMISM = 0.25
"""Spread of kappa's prior below zero: a few lucky rows do not make training rows pessimistic."""
SHARE = 0.1
"""Least share of the residuals' variance that the first estimate attributes to the scale."""
GAUSSIAN_FAR = 30.0
"""Robust units at which residuals are cut off under a Gaussian."""
NEGLIGIBLE = 1e-6
"""Share of the residuals' variance that a constant bar attributes to the scale.

The prior of log alpha^2 has this number as its spread too, which holds it there."""
_DONE = (1e-6, 0.01)
"""Nats that may be left to gain: per row, and for all rows together at most."""
_ROUGHLY = (1e-4, 0.5)
"""The same while two ways to a maximum are compared, before one of them is taken."""
_CLEAR = 0.1
"""Nats by which the evidence must have fallen for smaller penalties not to be tried."""
_TAIL_STEP = 0.05
"""Step of log(nu - 2) in differences."""
_CHUNK = 2048
"""Rows of which the information is summed at once: their inputs fit into a cache."""
_LONGEST = 5.0
"""Largest step of a parameter: beyond it the expected information says little."""
_TAIL_RANGE = (math.log(0.05), math.log(2000))
"""Range of log(nu - 2)."""
_STEPS = 100
"""Largest number of steps of a descent."""
_MEMORY = 20
"""Number of changes of point and gradient that a descent remembers."""
_TRIALS = 20
"""Largest number of step lengths that are tried."""
_SUFFICIENT = 1e-4
"""Share of the decrease promised by the slope that a step must achieve (Armijo's condition)."""


@dataclass(frozen=True)
class ScaleFit:
    """The parameters of noise, scale and tails.

    Attributes:
        vector: a, log alpha^2, kappa, then w, (3 + P,).
        tail: log(nu - 2).
        gaussian: Whether the distribution is a Gaussian instead of a Student-t; `tail` then has no
            meaning.
        penalty: lambda.
        evidence: The log evidence by Laplace, up to a constant; NaN where it was not asked for.
        information: The information of a row on average, without the priors, (3 + P, 3 + P), at the
            maximum or near it; None where it was not needed.
    """

    vector: Tensor
    tail: float
    gaussian: bool = False
    penalty: float = math.nan
    evidence: float = math.nan
    information: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def df(self) -> float:
        """Degrees of freedom."""
        return 2 + math.exp(self.tail)

    @property
    def distribution(self) -> Distribution:
        """The distribution, without a tilt."""
        return Gaussian() if self.gaussian else StudentT(self.df)

    @property
    def scale2(self) -> Tensor:
        r"""$\alpha^2$."""
        return self.vector[1].exp()

    def log_noise(self, inputs: Tensor) -> Tensor:
        """h of rows whose inputs are (n, P), (n,)."""
        return self.vector[0] + inputs @ self.vector[FIXED_PARAMETERS:]

    def squared_scale(self, rows: TargetView, log_noise: Tensor) -> Tensor:
        """s^2 of rows, the optimism of seen ones included, (n,)."""
        optimism = torch.where(rows.seen, (-self.vector[2]).exp(), 1.0)
        return log_noise.exp() * rows.noise_factor * optimism + self.scale2 * rows.q * optimism


@dataclass(frozen=True)
class _Point:
    """Rows under the distribution of one fit.

    Attributes:
        fit: The parameters.
        noise: What noise adds to s^2, (n,).
        s2: Squared scales, (n,).
        square: Squared residuals z^2 in their units, (n,).
        nu: Degrees of freedom; infinite for a Gaussian.
        log_fall: The logarithm by which a Student density falls, but for the factor (nu + 1) / 2,
            (n,).
        pull: The share of its full weight with which a residual pulls, z^2 / (nu + z^2), (n,).
    """

    fit: ScaleFit
    noise: Tensor
    s2: Tensor
    square: Tensor
    nu: float
    log_fall: Tensor
    pull: Tensor

    @property
    def information(self) -> float:
        """The information of a row about log s^2."""
        return 0.5 if math.isinf(self.nu) else self.nu / (2 * (self.nu + 3))


class _Prior(NamedTuple):
    """The prior at a vector of parameters.

    Attributes:
        value: Twice its negative logarithm.
        slope: Half the gradient of the value, (3 + P,).
        precision: The precisions of all parameters, (3 + P,).
    """

    value: Tensor
    slope: Tensor
    precision: Tensor


@dataclass(frozen=True)
class ScaleProblem:
    """The likelihood of one target's rows and its priors.

    Attributes:
        rows: All rows.
        inputs: The head's inputs, (n, P); no columns for a constant noise.
        square: Squared residuals, plus a little, since a residual of zero does not mean certainty,
            (n,).
        centre: The prior mean of log alpha^2.
        spread: Its prior spread.
        gaussian: Whether the distribution is a Gaussian instead of a Student-t.
    """

    rows: TargetView
    inputs: Tensor
    square: Tensor
    centre: Tensor
    spread: float = TAILS[1]
    gaussian: bool = False

    # --- the maximum ------------------------------------------------------------------------------

    def solved(
        self,
        start: ScaleFit,
        penalty: float,
        information: Tensor | None = None,
        done: tuple[float, float] = _DONE,
        *,
        judged: bool = False,
    ) -> ScaleFit:
        """The maximum for one penalty.

        Args:
            start: Where to begin.
            penalty: lambda.
            information: The information of a row near the start, (3 + P, 3 + P); it is computed
                where it is not known.
            done: Nats that may be left to gain: per row, and for all rows together at most.
            judged: Whether the evidence is wanted, and with it the information at the maximum.
        """
        rows = len(self.rows)
        if information is None:
            information = self.information(start)
        precision = self._prior(start.vector, penalty).precision
        factor = _cholesky(rows * information + torch.diag(precision))
        tail_curvature = rows * _tail_information(start.df) + TAILS[1] ** -2
        least_gain = min(done[0] * rows, done[1])

        # A point of the search is the vector of parameters with the tail behind it, (3 + P + 1,).
        tail = min(max(start.tail, _TAIL_RANGE[0]), _TAIL_RANGE[1])
        fit = replace(start, tail=tail, gaussian=self.gaussian)
        point = torch.cat([fit.vector, fit.vector.new_tensor([fit.tail])])
        value, gradient = self.value_and_gradient(fit, penalty)
        changes: list[tuple[Tensor, Tensor]] = []  # of the point, and of the gradient with it
        resting = gradient == 0  # a slope of exactly zero says that a bound holds the coordinate
        for _ in range(_STEPS):
            step = _quasi_newton_step(gradient, changes, factor, tail_curvature)
            step = torch.where(resting, 0.0, step)
            step = step * (_LONGEST / float(step.abs().max().clamp(min=_LONGEST)))
            # A quadratic function would fall by half of this.
            if not float(step @ gradient) > 2 * least_gain:
                break
            length = 1.0
            for _ in range(_TRIALS):
                new_point = point - length * step
                new_point = torch.cat([new_point[:-1], new_point[-1:].clamp(*_TAIL_RANGE)])
                promised = float((point - new_point) @ gradient)
                new_fit = replace(fit, vector=new_point[:-1], tail=float(new_point[-1]))
                new_value, new_gradient = self.value_and_gradient(new_fit, penalty)
                if new_value <= value - _SUFFICIENT * promised:  # false for NaN too
                    break
                length = _shorter(length, promised, new_value - value)
            else:
                break
            point_change = new_point - point
            gradient_change = new_gradient - gradient
            if float(point_change @ gradient_change) > 0:  # else the curvature is not positive
                changes = [*changes[1 - _MEMORY :], (point_change, gradient_change)]
            point = new_point
            fit = new_fit
            value = new_value
            gradient = new_gradient
            if not torch.equal(resting, gradient == 0):  # a bound holds the tail, or lets it go
                resting = gradient == 0
                changes = []

        evidence = math.nan
        if judged:
            information = self.information(fit)
            precision = self._prior(fit.vector, penalty).precision
            curvature = rows * information + torch.diag(precision)
            penalised = max(0, len(fit.vector) - FIXED_PARAMETERS - FIRST_INPUTS)
            evidence = 0.5 * penalised * math.log(penalty) - self.objective(fit, penalty)
            evidence -= 0.5 * float(torch.logdet(curvature))
        return replace(fit, penalty=penalty, evidence=evidence, information=information)

    # --- the objective, its gradient and its information ------------------------------------------

    def objective(self, fit: ScaleFit, penalty: float) -> float:
        """The negative log posterior, up to what does not depend on the parameters."""
        point = self._point(fit)
        return self._sum(self._losses(point), self._prior(fit.vector, penalty), fit)

    def value_and_gradient(self, fit: ScaleFit, penalty: float) -> tuple[float, Tensor]:
        """The objective, and its gradient by all parameters and then by the tail, (3 + P + 1,)."""
        point = self._point(fit)
        prior = self._prior(fit.vector, penalty)
        slope = self._slopes(point)
        by_noise = slope * (point.noise / point.s2)  # of the rows' losses by their log-noise, (n,)
        by_level = by_noise.sum()
        by_scale = slope.sum() - by_level
        by_optimism = -(slope @ self._seen)
        fixed = torch.stack([by_level, by_scale, by_optimism])
        vector = torch.cat([fixed, self.inputs.mT @ by_noise]) + prior.slope
        gradient = torch.cat([vector, vector.new_tensor([self._tail_slope(point)])])
        return self._sum(self._losses(point), prior, fit), gradient

    def information(self, fit: ScaleFit) -> Tensor:
        """The expected information of a row on average, without the priors, (3 + P, 3 + P)."""
        point = self._point(fit)
        weight = torch.full_like(point.s2, point.information)  # of each row by log s^2
        if len(self._rows_at_bound):
            weight = weight.index_copy(0, self._rows_at_bound, self._bound_slopes(point)[1])
        root = weight.sqrt()
        noise_share = point.noise / point.s2
        # derivatives of log s^2 by a, log alpha^2 and kappa, times the roots, (n, 3)
        fixed = torch.stack([noise_share, 1 - noise_share, -self._seen], 1) * root[:, None]
        width = FIXED_PARAMETERS + self.inputs.shape[1]
        total = noise_share.new_zeros(width, width)
        total[:FIXED_PARAMETERS, :FIXED_PARAMETERS] = fixed.mT @ fixed
        if width == FIXED_PARAMETERS:
            return total / len(self.rows)
        input_chunks = torch.split(self.inputs, _CHUNK)
        factor_chunks = torch.split(noise_share * root, _CHUNK)
        fixed_chunks = torch.split(fixed, _CHUNK)
        for inputs, factor, fixed_chunk in zip(
            input_chunks, factor_chunks, fixed_chunks, strict=True
        ):
            columns = inputs * factor[:, None]  # derivatives by w
            total[FIXED_PARAMETERS:, FIXED_PARAMETERS:] += columns.mT @ columns
            total[FIXED_PARAMETERS:, :FIXED_PARAMETERS] += columns.mT @ fixed_chunk
        total[:FIXED_PARAMETERS, FIXED_PARAMETERS:] = total[FIXED_PARAMETERS:, :FIXED_PARAMETERS].mT
        return total / len(self.rows)

    def _point(self, fit: ScaleFit) -> _Point:
        """The rows under the distribution of a fit."""
        optimism = torch.where(self.rows.seen, (-fit.vector[2]).exp(), 1.0)
        log_noise = fit.vector[0] + self.inputs @ fit.vector[FIXED_PARAMETERS:]
        noise = log_noise.exp() * self.rows.noise_factor * optimism
        s2 = noise + fit.vector[1].exp() * self.rows.q * optimism
        square = self.square / s2
        nu = math.inf if self.gaussian else 2 + math.exp(fit.tail)
        return _Point(
            fit=replace(fit, gaussian=self.gaussian),
            noise=noise,
            s2=s2,
            square=square,
            nu=nu,
            log_fall=torch.log1p(square / nu),
            pull=square / (nu + square),
        )

    def _sum(self, losses: Tensor, prior: _Prior, fit: ScaleFit) -> float:
        """The objective: losses of the rows, and the priors of the parameters and of the tail."""
        value = float(losses.sum() + 0.5 * prior.value)
        if self.gaussian:
            return value
        return value + 0.5 * ((fit.tail - TAILS[0]) / TAILS[1]) ** 2

    def _losses(self, point: _Point) -> Tensor:
        """Negative log-likelihoods of the rows, (n,), up to a constant of the distribution's kind.

        Densities lack the factor 1 / sqrt(pi), or 1 / sqrt(2 pi) for a Gaussian.
        """
        losses = 0.5 * point.s2.log()
        if self.gaussian:
            losses += 0.5 * point.square
        else:
            nu = point.nu
            constant = math.lgamma(nu / 2) - math.lgamma((nu + 1) / 2) + 0.5 * math.log(nu)
            losses += constant + (nu + 1) / 2 * point.log_fall
        if not len(self._rows_at_bound):
            return losses
        return losses.index_copy(0, self._rows_at_bound, self._bound_losses(point, point.fit))

    def _slopes(self, point: _Point) -> Tensor:
        """Derivatives of the rows' losses by log s^2, (n,)."""
        if self.gaussian:
            slope = 0.5 - 0.5 * point.square
        else:
            slope = 0.5 - 0.5 * ((point.nu + 1) * point.pull)
        if len(self._rows_at_bound):
            slope = slope.index_copy(0, self._rows_at_bound, self._bound_slopes(point)[0])
        return slope

    def _tail_slope(self, point: _Point) -> float:
        """The derivative of the objective by log(nu - 2).

        It is zero for a Gaussian, and where the tail would leave its range: there it rests.
        """
        if self.gaussian:
            return 0.0
        tail = point.fit.tail
        nu = point.nu
        half = torch.tensor([nu / 2, (nu + 1) / 2], dtype=torch.float64)
        below, above = torch.digamma(half).tolist()
        slopes = point.log_fall - (nu + 1) / nu * point.pull
        slopes = 0.5 * (nu - 2) * (slopes + (below - above + 1 / nu))
        if len(self._rows_at_bound):  # the mass beyond a bound has no simple derivative by nu
            high = self._bound_losses(point, replace(point.fit, tail=tail + _TAIL_STEP))
            low = self._bound_losses(point, replace(point.fit, tail=tail - _TAIL_STEP))
            slopes = slopes.index_copy(0, self._rows_at_bound, (high - low) / (2 * _TAIL_STEP))
        slope = float(slopes.sum()) + (tail - TAILS[0]) / TAILS[1] ** 2
        lowest, highest = _TAIL_RANGE
        outwards = (tail <= lowest and slope > 0) or (tail >= highest and slope < 0)
        return 0.0 if outwards else slope

    @cached_property
    def _seen(self) -> Tensor:
        """One for each row that was trained on, else zero, (n,)."""
        return self.rows.seen.to(self.square)

    # --- rows at a bound of the support -----------------------------------------------------------

    @cached_property
    def _rows_at_bound(self) -> Tensor:
        """Places of the rows whose target lies at a bound of its support, (B,)."""
        return self.rows.side.nonzero()[:, 0]

    def _mass_beyond(self, s2: Tensor, fit: ScaleFit) -> tuple[Tensor, Tensor]:
        """For the rows at a bound: its place z in the distribution, and the mass beyond it, (B,).

        At an upper bound z is mirrored, so that the mass is always that below z.
        """
        at_bound = self._rows_at_bound
        z = -self.rows.side[at_bound] * self.rows.residual[at_bound] / s2[at_bound].sqrt()
        return z, fit.distribution.cdf(z).clamp(min=1e-300)

    def _bound_losses(self, point: _Point, fit: ScaleFit) -> Tensor:
        """Losses of the rows at a bound, (B,), under the distribution of a fit."""
        _, mass = self._mass_beyond(point.s2, fit)
        # `_losses` leaves out this constant of the densities: for masses it is subtracted.
        constant = 0.5 * math.log(2 * math.pi if self.gaussian else math.pi)
        return -mass.log() - constant

    def _bound_slopes(self, point: _Point) -> tuple[Tensor, Tensor]:
        r"""First and second derivatives by log s^2 of $-\log F(z)$, of the rows at a bound.

        With m = f / F: $z m / 2$ and $-z (m + z m') / 4$, where $m' = m (f'/f - m)$. The second is
        kept between zero and the information of other rows.
        """
        z, mass = self._mass_beyond(point.s2, point.fit)
        ratio = point.fit.distribution.log_density(z).exp() / mass  # m
        if self.gaussian:
            log_density_slope = -z  # f' / f
        else:
            log_density_slope = -(point.nu + 1) * z / (point.nu + z.square())
        second = -0.25 * z * (ratio + z * ratio * (log_density_slope - ratio))
        return 0.5 * z * ratio, second.clamp(0.0, point.information)

    # --- priors -----------------------------------------------------------------------------------

    def _prior(self, vector: Tensor, penalty: float) -> _Prior:
        """The prior at a vector of parameters, for a penalty of the weights."""
        precision = vector.new_full((len(vector),), penalty)
        optimism_precision = 1.0 if float(vector[2]) > 0 else PESSIMISM**-2
        precision[:FIXED_PARAMETERS] = vector.new_tensor(
            [WIDE**-2, self.spread**-2, optimism_precision]
        )
        precision[FIXED_PARAMETERS : FIXED_PARAMETERS + FIRST_INPUTS] = FIRST_PENALTY
        deviation = vector.clone()
        deviation[:2] -= self._prior_centre
        slope = precision * deviation
        return _Prior(slope @ deviation, slope, precision)

    @cached_property
    def _prior_centre(self) -> Tensor:
        """The prior means of a and log alpha^2, (2,)."""
        return torch.stack([self.rows.noise_level.log(), self.centre])


def constant_fit(
    rows: TargetView, square: Tensor, *, gaussian: bool, start: ScaleFit | None = None
) -> ScaleFit:
    """A constant noise and the scale, without a head.

    There are two ways to explain the residuals: by the noise or by q. So the search has two starts.

    Args:
        rows: The rows.
        square: Squared residuals, (n,).
        gaussian: Whether the distribution is a Gaussian instead of a Student-t.
        start: A fit to nearly the same rows, at which the search begins instead.
    """
    square = _bounded_squares(square, gaussian=gaussian)
    mean_square = rows.mean_square
    q = mean_q(rows.q[rows.informative])
    problem = ScaleProblem(
        rows,
        inputs=square.new_zeros(len(rows), 0),
        square=square,
        centre=(SHARE * mean_square / q).log(),
        spread=WIDE,
        gaussian=gaussian,
    )
    if start is not None:
        return problem.solved(start, 1.0)
    fits = []
    for share in (0.1, 0.9):  # of the residuals' variance that is left to the scale
        log_level = ((1 - share) * rows.noise_level).log()
        log_scale2 = (share * mean_square / q).log()
        vector = torch.stack([log_level, log_scale2, mean_square.new_zeros(())])
        fits.append(problem.solved(ScaleFit(vector, TAILS[0]), 1.0, done=_ROUGHLY))
    better = min(fits, key=lambda fit: problem.objective(fit, 1.0))
    return problem.solved(better, 1.0)


def flat_fit(
    rows: TargetView, square: Tensor, *, gaussian: bool, start: ScaleFit | None = None
) -> ScaleFit:
    """A constant noise that explains all residuals by itself: the scale is held near zero.

    The arguments are those of `constant_fit`.
    """
    centre = (NEGLIGIBLE * rows.mean_square / rows.usual_q).log()
    problem = ScaleProblem(
        rows,
        inputs=square.new_zeros(len(rows), 0),
        square=square,
        centre=centre,
        spread=NEGLIGIBLE,
        gaussian=gaussian,
    )
    if start is None:
        vector = torch.stack([rows.noise_level.log(), centre, torch.zeros_like(centre)])
        start = ScaleFit(vector, TAILS[0])
    return problem.solved(start, 1.0)


def headed_fit(
    rows: TargetView,
    inputs: Tensor,
    square: Tensor,
    constant: ScaleFit,
    *,
    gaussian: bool,
    start: ScaleFit | None = None,
    near: float | None = None,
) -> ScaleFit:
    """A noise that follows the head's inputs.

    Args:
        rows: The rows.
        inputs: The head's inputs, (n, P).
        square: Squared residuals, (n,).
        constant: The fit of a constant noise, where the search begins; it centres the prior of the
            scale.
        gaussian: Whether the distribution is a Gaussian instead of a Student-t.
        start: A fit to nearly the same rows. The search begins there instead, with its penalty.
        near: A likely penalty, at which the search for the one of greatest evidence begins.
    """
    square = _bounded_squares(square, gaussian=gaussian)
    least_centre = (SHARE * rows.mean_square / rows.usual_q).log()
    centre = torch.maximum(constant.vector[1], least_centre)
    problem = ScaleProblem(rows, inputs, square, centre, gaussian=gaussian)
    if start is not None:
        return problem.solved(start, start.penalty, start.information)
    vector = torch.cat([constant.vector, inputs.new_zeros(inputs.shape[1])])
    begin = replace(constant, vector=vector)
    if inputs.shape[1] <= FIRST_INPUTS:
        return problem.solved(begin, FIRST_PENALTY)

    # Penalties are tried from the largest downwards. With a likely penalty, they are tried from the
    # next larger one downwards; where that larger one is the best of these, also upwards. Where the
    # evidence has two peaks, the two searches may end at different ones.
    first = 0
    if near in PENALTIES:
        first = max(0, PENALTIES.index(near) - 1)
    first_fit = problem.solved(begin, PENALTIES[first], judged=True)
    best = first_fit
    for penalties in (PENALTIES[first + 1 :], PENALTIES[:first][::-1]):
        last = first_fit
        for penalty in penalties:
            fit = problem.solved(last, penalty, last.information, judged=True)
            if fit.evidence < best.evidence - _CLEAR and best is not last:
                break  # the evidence has clearly fallen
            if fit.evidence > best.evidence:
                best = fit
            last = fit
        if best is not first_fit:
            break
    return best


def _cholesky(curvature: Tensor) -> Tensor:
    """The Cholesky factor; with a larger diagonal where rounding left the matrix indefinite."""
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(curvature)
    if bool(failed):
        shift = 1e-6 * curvature.diagonal().abs().max()
        factor = torch.linalg.cholesky(curvature + shift * torch.eye(len(curvature)).to(curvature))
    return factor


def _tail_information(nu: float) -> float:
    r"""The information of a row about $\log(\nu - 2)$."""
    half = torch.tensor([nu / 2, (nu + 1) / 2], dtype=torch.float64)
    first, second = map(float, torch.special.polygamma(1, half))
    about_nu = (first - second) / 4 - (nu + 5) / (2 * nu * (nu + 1) * (nu + 3))
    return max(about_nu, 0.0) * (nu - 2) ** 2


def _bounded_squares(square: Tensor, *, gaussian: bool) -> Tensor:
    """Squared residuals (n,) as the distribution counts them.

    Single far residuals would dominate a Gaussian, so they are bounded for it.
    """
    if not gaussian:
        return square
    return square.clamp(max=reach(square.sqrt(), GAUSSIAN_FAR) ** 2)


def _quasi_newton_step(
    gradient: Tensor, changes: list[tuple[Tensor, Tensor]], factor: Tensor, tail_curvature: float
) -> Tensor:
    """The gradient over a curvature that explains the changes (Nocedal's two loops).

    Args:
        gradient: The gradient by all parameters and then by the tail, (3 + P + 1,).
        changes: Latest changes of the point, and of the gradient with it.
        factor: The Cholesky factor of the approximate curvature of the parameters.
        tail_curvature: The approximate curvature of the tail.
    """
    remaining = gradient
    shares = []
    for point_change, gradient_change in reversed(changes):
        share = point_change @ remaining / (point_change @ gradient_change)
        remaining = remaining - share * gradient_change
        shares.append(share)
    vector = torch.cholesky_solve(remaining[:-1, None], factor)[:, 0]
    step = torch.cat([vector, remaining[-1:] / tail_curvature])
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
