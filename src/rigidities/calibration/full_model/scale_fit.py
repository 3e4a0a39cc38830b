r"""Noise, scale and tails of one target together: a regularised likelihood of all its rows.

The squared scale of a Student-t distribution is

$$ s^2 = \bigl(\tfrac{\bar c}{c}\, e^{h} + \alpha^2 q\bigr)\, e^{-\kappa [\text{seen}]}, \qquad
   h = a + w \cdot \phi, $$

with the head's inputs $\phi$ (`prediction.head`), and $\kappa$ for the optimism of rows that were
trained on. Priors: $\kappa \sim N(0, 1)$, narrower below zero;
$\log(\nu - 2) \sim N(\log 6, 1.5^2)$; $\log \alpha^2 \sim N(\cdot, 1.5^2)$ about a first estimate,
since single predictions hardly tell $\alpha^2$ from the noise; w has the precision 2 on the first
three inputs and $\lambda$ on the others, chosen by Laplace's approximation of the evidence. The
maximum is found by L-BFGS with the expected information as the curvature to begin with:
$\log s^2$ has the information $\nu / 2(\nu + 3)$ a row. That matrix is by far the dearest part, so
that one serves for all steps, for the next penalty, and for the folds of a cross-validation. A row
whose target lies at a bound of its support shows the distribution's mass beyond it, not a density
there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...prediction.distribution import Distribution, Gaussian, StudentT
from .descent import minimum
from .target_rows import Rows, mean_q, reach

FIRST = 3
"""Inputs of the head that are no features."""
FIXED = 3
"""Parameters before the weights: a, log alpha^2, kappa."""
PENALTIES = tuple(10 ** (4 - k / 2) for k in range(10))
FIRST_PENALTY = 2.0
TAILS = (math.log(6), 1.5)
"""Prior of log(nu - 2): centre and spread; that of the scale has the same spread."""
WIDE = 3.0
"""Spread of the weak priors of the noise's level, and of the scale in a first estimate."""
PESSIMISM = 0.25
"""Spread of kappa's prior below zero: a few lucky rows do not make training rows pessimistic."""
SHARE = 0.1
"""Of the residuals' variance that the first estimate leaves to the scale at least."""
GAUSSIAN_FAR = 30.0
"""Robust units beyond which a residual counts as one of that size under a distribution without
tails."""
NEGLIGIBLE = 1e-6
"""Of the residuals' variance, what a constant bar leaves to the scale; and its prior's spread."""
_DONE = (1e-6, 0.01)
"""Nats that may be left to gain: per row, and of all rows at most."""
_ROUGHLY = (1e-4, 0.5)
"""The same of two ways to a maximum, until one of them is taken."""
_CLEAR = 0.1
"""Nats by which the evidence must have fallen for smaller penalties not to be tried."""
_NEAR = 0.05  # step of a difference by the tail
_CHUNK = 2048
"""Rows of which the information is summed at once: their inputs fit into a cache."""
_LONGEST = 5.0  # step of a parameter: beyond it the expected information says little
_TAIL_RANGE = (math.log(0.05), math.log(2000))


@dataclass(frozen=True)
class ScaleFit:
    """One maximum.

    Attributes:
        vector: a, log alpha^2, kappa, then w.
        tail: log(nu - 2).
        gaussian: whether the distribution has no tails instead.
        penalty: lambda.
        evidence: log evidence by Laplace, up to a constant; NaN where it was not asked for.
        information: of a row on average, without the priors, (3 + P, 3 + P), at the maximum or near
            it; None where it was not needed.
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
        """Without a tilt."""
        return Gaussian() if self.gaussian else StudentT(self.df)

    @property
    def scale2(self) -> Tensor:
        r"""$\alpha^2$."""
        return self.vector[1].exp()

    @property
    def optimism(self) -> Tensor:
        r"""$\kappa$."""
        return self.vector[2]

    def log_noise(self, inputs: Tensor) -> Tensor:
        """h of rows whose inputs are (n, P)."""
        return self.vector[0] + inputs @ self.vector[FIXED:]

    def squared_scale(self, rows: Rows, log_noise: Tensor) -> Tensor:
        """s^2 of rows, the optimism of seen ones included."""
        noise, rest = self.variances(rows, log_noise)
        return noise + rest

    def variances(self, rows: Rows, log_noise: Tensor) -> tuple[Tensor, Tensor]:
        r"""What noise and what $\alpha^2 q$ add to s^2, each (n,)."""
        factor = torch.where(rows.seen, (-self.optimism).exp(), 1.0)
        return log_noise.exp() * rows.share * factor, self.scale2 * rows.q * factor


@dataclass(frozen=True)
class _Point:
    """Rows under the distribution of one fit.

    Attributes:
        fit: the parameters.
        noise: what noise adds to s^2, (n,).
        s2: squared scales, (n,).
        square: squared residuals in their units, (n,).
        nu: degrees of freedom; infinite for a Gaussian.
    """

    fit: ScaleFit
    noise: Tensor
    s2: Tensor
    square: Tensor
    nu: float

    @property
    def information(self) -> float:
        """Of a row about log s^2."""
        return 0.5 if math.isinf(self.nu) else self.nu / (2 * (self.nu + 3))

    @cached_property
    def fall(self) -> Tensor:
        """Logarithms by which a Student density falls, but for the factor (nu + 1) / 2, (n,)."""
        return torch.log1p(self.square / self.nu)

    @cached_property
    def share(self) -> Tensor:
        """How much of its full weight a Student distribution gives the residual's pull, z^2 / (nu +
        z^2).
        """
        return self.square / (self.nu + self.square)


class _Prior(NamedTuple):
    """Twice the negative logarithm, half its gradient, and the precisions of all parameters."""

    value: Tensor
    slope: Tensor
    precision: Tensor


@dataclass(frozen=True)
class ScaleProblem:
    """The likelihood and its priors.

    Attributes:
        rows: all of them.
        inputs: of the head, (n, P); no columns for a constant noise.
        square: squared residuals, plus a little: one of zero is no certainty.
        centre: prior mean of log alpha^2.
        spread: its prior spread.
        gaussian: whether the distribution has no tails to find.
    """

    rows: Rows
    inputs: Tensor
    square: Tensor
    centre: Tensor
    spread: float = TAILS[1]
    gaussian: bool = False

    def objective(self, fit: ScaleFit, penalty: float) -> float:
        """Negative log posterior, up to what does not depend on the parameters."""
        return self._value(self._at(fit), self._prior(fit.vector, penalty))

    def value_and_gradient(self, fit: ScaleFit, penalty: float) -> tuple[float, Tensor]:
        """The objective, and its gradient by all parameters and then by the tail, (3 + P + 1,)."""
        at, prior = self._at(fit), self._prior(fit.vector, penalty)
        slope = self._slopes(at)
        by_noise = slope * (at.noise / at.s2)  # of the rows' losses by their log-noise, (n,)
        total, by_level = slope.sum(), by_noise.sum()
        fixed = torch.stack([by_level, total - by_level, -(slope @ self._seen)])
        vector = torch.cat([fixed, self.inputs.mT @ by_noise]) + prior.slope
        gradient = torch.cat([vector, vector.new_tensor([self._tail_slope(at)])])
        return self._value(at, prior), gradient

    def _at(self, fit: ScaleFit) -> _Point:
        """What a fit says of the rows."""
        noise, rest = fit.variances(self.rows, fit.log_noise(self.inputs))
        s2 = noise + rest
        square = self.square / s2
        nu = math.inf if self.gaussian else fit.df
        return _Point(replace(fit, gaussian=self.gaussian), noise, s2, square, nu)

    def _value(self, at: _Point, prior: _Prior) -> float:
        """The objective at a point."""
        tail = 0.0 if self.gaussian else 0.5 * ((at.fit.tail - TAILS[0]) / TAILS[1]) ** 2
        return float(self._losses(at).sum() + 0.5 * prior.value) + tail

    def solved(
        self,
        start: ScaleFit,
        penalty: float,
        information: Tensor | None = None,
        done: tuple[float, float] = _DONE,
    ) -> ScaleFit:
        """The maximum for one penalty, from a start, up to what `done` leaves to gain.

        The information (3 + P, 3 + P) of a row near the start is computed where it is not known.
        """
        rows = len(self.rows)
        if information is None:
            information = self.information(start)
        precision = self._prior(start.vector, penalty).precision
        factor = _factor(rows * information + torch.diag(precision))
        tail_curvature = rows * _tail_information(start.df) + TAILS[1] ** -2

        def at(point: Tensor) -> ScaleFit:
            """The parameters, and the tail behind them."""
            vector, tail = point[:-1], float(point[-1])
            return replace(start, vector=vector, tail=tail, gaussian=self.gaussian)

        def inside(point: Tensor) -> Tensor:
            return torch.cat([point[:-1], point[-1:].clamp(*_TAIL_RANGE)])

        def loss(point: Tensor) -> tuple[float, Tensor]:
            return self.value_and_gradient(at(point), penalty)

        def preconditioned(gradient: Tensor) -> Tensor:
            vector = torch.cholesky_solve(gradient[:-1, None], factor)[:, 0]
            return torch.cat([vector, gradient[-1:] / tail_curvature])

        point = torch.cat([start.vector, start.vector.new_tensor([start.tail])])
        best = minimum(
            loss,
            point,
            preconditioned,
            done=min(done[0] * rows, done[1]),
            longest=_LONGEST,
            inside=inside,
        )
        return replace(at(best), penalty=penalty, evidence=math.nan, information=information)

    def best(self, start: ScaleFit, near: float | None = None) -> ScaleFit:
        """The penalty of the greatest evidence, from the largest downwards.

        Or first `near` a penalty that is likely: from the next larger one downwards, and upwards
        where that one is the best. Where the evidence has two peaks, that may be the other one.
        """
        if self.inputs.shape[1] <= FIRST:
            return self.solved(start, FIRST_PENALTY)
        first = max(0, PENALTIES.index(near) - 1) if near in PENALTIES else 0
        begun = self._judged(self.solved(start, PENALTIES[first]))
        best = self._best_of(begun, PENALTIES[first + 1 :])
        if best is begun:
            best = self._best_of(begun, PENALTIES[:first][::-1])
        return best

    def _best_of(self, begun: ScaleFit, penalties: Sequence[float]) -> ScaleFit:
        """The best of the fits along these penalties, until the evidence has clearly fallen."""
        best = last = begun
        for penalty in penalties:
            fit = self._judged(self.solved(last, penalty, last.information))
            if fit.evidence < best.evidence - _CLEAR and best is not last:
                break
            if fit.evidence > best.evidence:
                best = fit
            last = fit
        return best

    def _judged(self, fit: ScaleFit) -> ScaleFit:
        """A maximum with its evidence, and with the information there."""
        information = self.information(fit)
        precision = self._prior(fit.vector, fit.penalty).precision
        curvature = len(self.rows) * information + torch.diag(precision)
        free = max(0, len(fit.vector) - FIXED - FIRST)
        evidence = 0.5 * free * math.log(fit.penalty) - self.objective(fit, fit.penalty)
        evidence -= 0.5 * float(torch.logdet(curvature))
        return replace(fit, evidence=evidence, information=information)

    def _losses(self, at: _Point) -> Tensor:
        """Negative log-likelihoods, (n,), up to the same constant of all distributions."""
        losses = 0.5 * at.s2.log()
        if self.gaussian:
            losses += 0.5 * at.square
        else:
            nu = at.nu
            constant = math.lgamma(nu / 2) - math.lgamma((nu + 1) / 2) + 0.5 * math.log(nu)
            losses += constant + (nu + 1) / 2 * at.fall
        if not len(self._bound):
            return losses
        return losses.index_copy(0, self._bound, self._bound_losses(at, at.fit))

    def _bound_losses(self, at: _Point, fit: ScaleFit) -> Tensor:
        """Of the rows at a bound, under the distribution of a fit."""
        _, mass = self._beyond(at.s2, fit)
        # densities lack the factor 1 / sqrt(pi), or 1 / sqrt(2 pi) for a Gaussian
        lacking = 0.5 * math.log(2 * math.pi if self.gaussian else math.pi)
        return -mass.log() - lacking

    @cached_property
    def _bound(self) -> Tensor:
        """Places of the rows whose target lies at a bound of its support."""
        return self.rows.side.nonzero()[:, 0]

    @cached_property
    def _seen(self) -> Tensor:
        """One for each row that was trained on, else zero, (n,)."""
        return self.rows.seen.to(self.square)

    def _beyond(self, s2: Tensor, fit: ScaleFit) -> tuple[Tensor, Tensor]:
        """Of the rows at a bound: its place z in the distribution, mirrored at an upper one; mass
        below.
        """
        at = self._bound
        z = -self.rows.side[at] * self.rows.residual[at] / s2[at].sqrt()
        return z, fit.distribution.cdf(z).clamp(min=1e-300)

    def _bound_slopes(self, at: _Point) -> tuple[Tensor, Tensor]:
        r"""First and second derivatives by log s^2 of $-\log F(z)$, of the rows at a bound.

        With m = f / F: $z m / 2$ and $-z (m + z m') / 4$, where $m' = m (f'/f - m)$. The second is
        kept between zero and the information of other rows.
        """
        z, mass = self._beyond(at.s2, at.fit)
        ratio = at.fit.distribution.log_density(z).exp() / mass
        fall = -z if self.gaussian else -(at.nu + 1) * z / (at.nu + z.square())
        bend = -0.25 * z * (ratio + z * ratio * (fall - ratio))
        return 0.5 * z * ratio, bend.clamp(0.0, at.information)

    def _prior(self, vector: Tensor, penalty: float) -> _Prior:
        """At a vector of parameters, for a penalty of the weights."""
        precision = vector.new_full((len(vector),), penalty)
        optimism = 1.0 if float(vector[2]) > 0 else PESSIMISM**-2
        precision[:FIXED] = vector.new_tensor([WIDE**-2, self.spread**-2, optimism])
        precision[FIXED : FIXED + FIRST] = FIRST_PENALTY
        off = vector.clone()
        off[:2] -= self._centre
        slope = precision * off
        return _Prior(slope @ off, slope, precision)

    @cached_property
    def _centre(self) -> Tensor:
        """The prior's of a and log alpha^2, (2,)."""
        return torch.stack([self.rows.level.log(), self.centre])

    def _tail_slope(self, at: _Point) -> float:
        """The derivative of the objective by log(nu - 2).

        It is zero for a Gaussian, and where the tail would leave its range: there it rests.
        """
        if self.gaussian:
            return 0.0
        tail, nu = at.fit.tail, at.nu
        half = torch.tensor([nu / 2, (nu + 1) / 2], dtype=torch.float64)
        below, above = torch.digamma(half).tolist()
        slopes = at.fall - (nu + 1) / nu * at.share
        slopes = 0.5 * (nu - 2) * (slopes + (below - above + 1 / nu))
        if len(self._bound):
            near = (replace(at.fit, tail=tail + off) for off in (_NEAR, -_NEAR))
            high, low = (self._bound_losses(at, one) for one in near)
            slopes = slopes.index_copy(0, self._bound, (high - low) / (2 * _NEAR))
        slope = float(slopes.sum()) + (tail - TAILS[0]) / TAILS[1] ** 2
        lowest, highest = _TAIL_RANGE
        outwards = (tail <= lowest and slope > 0) or (tail >= highest and slope < 0)
        return 0.0 if outwards else slope

    def information(self, fit: ScaleFit) -> Tensor:
        """The expected information of a row on average, without the priors, (3 + P, 3 + P)."""
        at = self._at(fit)
        weight = torch.full_like(at.s2, at.information)  # of each row by log s^2
        if len(self._bound):
            weight = weight.index_copy(0, self._bound, self._bound_slopes(at)[1])
        noise, root = at.noise / at.s2, weight.sqrt()
        fixed = torch.stack([noise, 1 - noise, -self._seen], 1) * root[:, None]
        width = FIXED + self.inputs.shape[1]
        total = noise.new_zeros(width, width)
        total[:FIXED, :FIXED] = fixed.mT @ fixed
        if width == FIXED:
            return total / len(self.rows)
        parts = (torch.split(part, _CHUNK) for part in (self.inputs, noise * root, fixed))
        for inputs, scale, beside in zip(*parts, strict=True):
            columns = inputs * scale[:, None]
            total[FIXED:, FIXED:] += columns.mT @ columns
            total[FIXED:, :FIXED] += columns.mT @ beside
        total[:FIXED, FIXED:] = total[FIXED:, :FIXED].mT
        return total / len(self.rows)

    def _slopes(self, at: _Point) -> Tensor:
        """Derivatives of the rows' losses by log s^2, (n,)."""
        slope = 0.5 - 0.5 * (at.square if self.gaussian else (at.nu + 1) * at.share)
        if len(self._bound):
            slope = slope.index_copy(0, self._bound, self._bound_slopes(at)[0])
        return slope


def constant_fit(
    rows: Rows, square: Tensor, *, gaussian: bool, start: ScaleFit | None = None
) -> ScaleFit:
    """A constant noise and the scale, without a head.

    From two starts, since there are two ways: either the noise explains the residuals, or the
    rigidities do; or from that for nearly the same rows.
    """
    square = _counted(square, gaussian=gaussian)
    unit, q = rows.size, mean_q(rows.q[rows.telling])
    centre = (SHARE * unit / q).log()
    problem = ScaleProblem(rows, square.new_zeros(len(rows), 0), square, centre, WIDE, gaussian)
    if start is not None:
        return problem.solved(start, 1.0)
    found = []
    for share in (0.1, 0.9):
        parts = [((1 - share) * rows.level).log(), (share * unit / q).log(), unit.new_zeros(())]
        begun = ScaleFit(torch.stack(parts), TAILS[0])
        found.append(problem.solved(begun, 1.0, done=_ROUGHLY))
    better = min(found, key=lambda fit: problem.objective(fit, 1.0))
    return problem.solved(better, 1.0)


def flat_fit(
    rows: Rows, square: Tensor, *, gaussian: bool, start: ScaleFit | None = None
) -> ScaleFit:
    """A constant noise that explains all residuals alone: the scale is held near zero."""
    centre = (NEGLIGIBLE * rows.size / rows.usual_q).log()
    none = square.new_zeros(len(rows), 0)
    problem = ScaleProblem(rows, none, square, centre, NEGLIGIBLE, gaussian)
    if start is None:
        vector = torch.stack([rows.level.log(), centre, torch.zeros_like(centre)])
        start = ScaleFit(vector, TAILS[0])
    return problem.solved(start, 1.0)


def headed_fit(
    rows: Rows,
    inputs: Tensor,
    square: Tensor,
    constant: ScaleFit,
    *,
    gaussian: bool,
    start: ScaleFit | None = None,
    near: float | None = None,
) -> ScaleFit:
    """A noise that follows the head's inputs (n, P), begun at the constant one.

    The fit of that one centres the prior of the scale. Or begun at `start`, a maximum for nearly
    the same rows, whose penalty is kept. `near` is a likely penalty, as in `ScaleProblem.best`.
    """
    square = _counted(square, gaussian=gaussian)
    centre = torch.maximum(constant.vector[1], (SHARE * rows.size / rows.usual_q).log())
    problem = ScaleProblem(rows, inputs, square, centre, gaussian=gaussian)
    if start is not None:
        return problem.solved(start, start.penalty, start.information)
    vector = torch.cat([constant.vector, inputs.new_zeros(inputs.shape[1])])
    return problem.best(replace(constant, vector=vector), near)


def _factor(curvature: Tensor) -> Tensor:
    """Cholesky's; where rounding leaves no positive matrix, with a little more on its diagonal."""
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(curvature)
    if bool(failed):
        more = 1e-6 * curvature.diagonal().abs().max()
        factor = torch.linalg.cholesky(curvature + more * torch.eye(len(curvature)).to(curvature))
    return factor


def _tail_information(nu: float) -> float:
    r"""The information of a row about $\log(\nu - 2)$."""
    half = torch.tensor([nu / 2, (nu + 1) / 2], dtype=torch.float64)
    first, second = map(float, torch.special.polygamma(1, half))
    about_nu = (first - second) / 4 - (nu + 5) / (2 * nu * (nu + 1) * (nu + 3))
    return max(about_nu, 0.0) * (nu - 2) ** 2


def _counted(square: Tensor, *, gaussian: bool) -> Tensor:
    """Squared residuals (n,) as the distribution counts them: a Gaussian would follow single far
    ones.
    """
    if not gaussian:
        return square
    return square.clamp(max=reach(square.sqrt(), GAUSSIAN_FAR) ** 2)
