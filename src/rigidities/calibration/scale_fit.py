r"""Noise, scale and tails of one target together: a regularised likelihood of all its rows.

The squared scale of a Student-t law is

$$ s^2 = \bigl(\tfrac{\bar c}{c}\, e^{h} + \alpha^2 q\bigr)\, e^{-\kappa [\text{seen}]}, \qquad
   h = a + w \cdot \phi, $$

with the head's inputs $\phi$ (`prediction.head`), and $\kappa$ for the optimism of rows that were
trained on. Priors: $\kappa \sim N(0, 1)$, narrower below zero;
$\log(\nu - 2) \sim N(\log 6, 1.5^2)$; $\log \alpha^2 \sim N(\cdot, 1.5^2)$ about a first estimate,
since single predictions hardly tell $\alpha^2$ from the noise; w has the precision 2 on the first
three inputs and $\lambda$ on the others, chosen by Laplace's approximation of the evidence. The
maximum is found by Fisher scoring: $\log s^2$ has the information $\nu / 2(\nu + 3)$ a row. A row
whose target lies at a bound of its support shows the law's mass beyond it, not a density there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..prediction.law import Gaussian, Law, StudentT
from .rows import Rows, mean_q, reach

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
"""Robust units beyond which a residual counts as one of that size under a law without tails."""
NEGLIGIBLE = 1e-6
"""Of the residuals' variance, what a constant bar leaves to the scale; and its prior's spread."""
_STEPS, _HALVINGS, _DONE, _NEAR = 40, 12, 1e-6, 0.05
_LONGEST = 5.0  # step of a parameter: beyond it the expected information says little
_TAIL_RANGE = (math.log(0.05), math.log(2000))


@dataclass(frozen=True)
class ScaleFit:
    """One maximum.

    Attributes:
        vector: a, log alpha^2, kappa, then w.
        tail: log(nu - 2).
        gaussian: whether the law has no tails instead.
        penalty: lambda.
        evidence: log evidence by Laplace, up to a constant.
    """

    vector: Tensor
    tail: float
    gaussian: bool = False
    penalty: float = math.nan
    evidence: float = math.nan

    @property
    def df(self) -> float:
        """Degrees of freedom."""
        return 2 + math.exp(self.tail)

    @property
    def law(self) -> Law:
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
        bare = log_noise.exp() * rows.share + self.scale2 * rows.q
        return bare * torch.where(rows.seen, (-self.optimism).exp(), 1.0)


@dataclass(frozen=True)
class ScaleProblem:
    """The likelihood and its priors.

    Attributes:
        rows: all of them.
        inputs: of the head, (n, P); no columns for a constant noise.
        square: squared residuals, plus a little: one of zero is no certainty.
        centre: prior mean of log alpha^2.
        spread: its prior spread.
        gaussian: whether the law has no tails to find.
    """

    rows: Rows
    inputs: Tensor
    square: Tensor
    centre: Tensor
    spread: float = TAILS[1]
    gaussian: bool = False

    def objective(self, fit: ScaleFit, penalty: float) -> Tensor:
        """Negative log posterior, up to what does not depend on the parameters."""
        s2 = fit.squared_scale(self.rows, fit.log_noise(self.inputs))
        value = self._losses(s2, fit.tail).sum() + 0.5 * self._prior(fit.vector, penalty)[0]
        tail = 0.0 if self.gaussian else 0.5 * ((fit.tail - TAILS[0]) / TAILS[1]) ** 2
        return value + tail

    def solved(self, start: ScaleFit, penalty: float) -> ScaleFit:
        """The maximum for one penalty, from a start; with its evidence."""
        fit, value = start, self.objective(start, penalty)
        for _ in range(_STEPS):
            before = value
            gradient, information = self._derivatives(fit, penalty)
            step = torch.linalg.solve(information, gradient)
            step = step * (_LONGEST / step.abs().max().clamp(min=_LONGEST))
            fit = self._tailed(self._descended(fit, step, value, penalty))
            value = self.objective(fit, penalty)
            if not bool(before - value > _DONE * len(self.rows)):
                break
        free = max(0, len(fit.vector) - FIXED - FIRST)
        information = self._derivatives(fit, penalty)[1]
        evidence = float(0.5 * free * math.log(penalty) - value - 0.5 * torch.logdet(information))
        return replace(fit, gaussian=self.gaussian, penalty=penalty, evidence=evidence)

    def best(self, start: ScaleFit) -> ScaleFit:
        """The penalty of the greatest evidence, from the largest downwards."""
        if self.inputs.shape[1] <= FIRST:
            return self.solved(start, FIRST_PENALTY)
        best = fit = self.solved(start, PENALTIES[0])
        for at, penalty in enumerate(PENALTIES[1:]):
            fit = self.solved(fit, penalty)
            best = fit if fit.evidence > best.evidence else best
            if fit.evidence < best.evidence and best.penalty > PENALTIES[at]:
                break
        return best

    def _losses(self, s2: Tensor, tail: float) -> Tensor:
        """Negative log-likelihoods, (n,), up to the same constant of all laws."""
        if self.gaussian:
            losses = 0.5 * s2.log() + 0.5 * self.square / s2
        else:
            nu = torch.tensor(2 + math.exp(tail), dtype=torch.float64)
            constant = torch.lgamma(nu / 2) - torch.lgamma((nu + 1) / 2) + 0.5 * nu.log()
            losses = constant + 0.5 * s2.log() + (nu + 1) / 2 * torch.log1p(self.square / (nu * s2))
        if not len(self._bound):
            return losses
        _, mass = self._beyond(s2, tail)
        # densities lack the factor 1 / sqrt(pi), or 1 / sqrt(2 pi) for a Gaussian
        lacking = 0.5 * math.log(2 * math.pi if self.gaussian else math.pi)
        return losses.index_copy(0, self._bound, -mass.log() - lacking)

    @cached_property
    def _bound(self) -> Tensor:
        """Places of the rows whose target lies at a bound of its support."""
        return self.rows.side.nonzero()[:, 0]

    def _beyond(self, s2: Tensor, tail: float) -> tuple[Tensor, Tensor]:
        """Of the rows at a bound: its place z in the law, mirrored at an upper one; mass below."""
        at = self._bound
        z = -self.rows.side[at] * self.rows.residual[at] / s2[at].sqrt()
        law = Gaussian() if self.gaussian else StudentT(2 + math.exp(tail))
        return z, law.cdf(z).clamp(min=1e-300)

    def _bound_slopes(self, s2: Tensor, fit: ScaleFit, most: float) -> tuple[Tensor, Tensor]:
        r"""First and second derivatives by log s^2 of $-\log F(z)$, the second within 0 and `most`.

        With m = f / F: $z m / 2$ and $-z (m + z m') / 4$, where $m' = m (f'/f - m)$.
        """
        z, mass = self._beyond(s2, fit.tail)
        ratio = replace(fit, gaussian=self.gaussian).law.log_density(z).exp() / mass
        fall = -z if self.gaussian else -(fit.df + 1) * z / (fit.df + z.square())
        bend = -0.25 * z * (ratio + z * ratio * (fall - ratio))
        return 0.5 * z * ratio, bend.clamp(0.0, most)

    def _prior(self, vector: Tensor, penalty: float) -> tuple[Tensor, Tensor, Tensor]:
        """Twice the negative log prior, half its gradient, and its precisions."""
        precision = vector.new_full((len(vector),), penalty)
        optimism = 1.0 if float(vector[2]) > 0 else PESSIMISM**-2
        precision[:FIXED] = vector.new_tensor([WIDE**-2, self.spread**-2, optimism])
        precision[FIXED : FIXED + FIRST] = FIRST_PENALTY
        centre = torch.zeros_like(vector)
        centre[:2] = torch.stack([self.rows.level.log(), self.centre])
        off = vector - centre
        return (precision * off.square()).sum(), precision * off, precision

    def _derivatives(self, fit: ScaleFit, penalty: float) -> tuple[Tensor, Tensor]:
        """Gradient and expected information, by all parameters but the tail."""
        rows, log_noise = self.rows, fit.log_noise(self.inputs)
        s2 = fit.squared_scale(rows, log_noise)
        optimism = torch.where(rows.seen, (-fit.optimism).exp(), 1.0)
        noise = log_noise.exp() * rows.share * optimism / s2
        z2 = self.square / s2
        if self.gaussian:
            slope, information = 0.5 * (1 - z2), 0.5
        else:
            slope = 0.5 - 0.5 * (fit.df + 1) * z2 / (fit.df + z2)
            information = fit.df / (2 * (fit.df + 3))
        weight = torch.full_like(slope, information)
        if len(self._bound):
            own = self._bound_slopes(s2, fit, information)
            slope = slope.index_copy(0, self._bound, own[0])
            weight = weight.index_copy(0, self._bound, own[1])
        fixed = torch.stack([noise, 1 - noise, -rows.seen.to(noise)], 1)
        design = torch.cat([fixed, noise[:, None] * self.inputs], 1)
        _, pull, precision = self._prior(fit.vector, penalty)
        return design.mT @ slope + pull, (design.mT * weight) @ design + torch.diag(precision)

    def _descended(self, fit: ScaleFit, step: Tensor, value: Tensor, penalty: float) -> ScaleFit:
        """The longest of halved steps that goes down; none where there is none."""
        for halving in range(_HALVINGS):
            trial = replace(fit, vector=fit.vector - step * 0.5**halving)
            if bool(self.objective(trial, penalty) < value):  # false for NaN too
                return trial
        return fit

    def _tailed(self, fit: ScaleFit) -> ScaleFit:
        """With a step of Newton's towards the best tail at these scales."""
        if self.gaussian:
            return fit
        s2 = fit.squared_scale(self.rows, fit.log_noise(self.inputs))
        low, here, high = (self._tail_loss(s2, fit.tail + d) for d in (-_NEAR, 0.0, _NEAR))
        slope, bend = (high - low) / (2 * _NEAR), (high - 2 * here + low) / _NEAR**2
        step = -slope / bend if bend > 0 else -math.copysign(1.0, slope)
        tail = min(max(fit.tail + min(max(step, -1.0), 1.0), _TAIL_RANGE[0]), _TAIL_RANGE[1])
        return replace(fit, tail=tail) if self._tail_loss(s2, tail) < here else fit

    def _tail_loss(self, s2: Tensor, tail: float) -> float:
        return float(self._losses(s2, tail).sum() + 0.5 * ((tail - TAILS[0]) / TAILS[1]) ** 2)


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
        found.append(problem.solved(ScaleFit(torch.stack(parts), TAILS[0]), 1.0))
    return min(found, key=lambda fit: float(problem.objective(fit, 1.0)))


def flat_fit(
    rows: Rows, square: Tensor, *, gaussian: bool, start: ScaleFit | None = None
) -> ScaleFit:
    """A constant noise that explains all residuals alone: the scale is held near zero."""
    centre = (NEGLIGIBLE * rows.size / rows.q.mean()).log()
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
) -> ScaleFit:
    """A noise that follows the head's inputs (n, P), begun at the constant one.

    The fit of that one centres the prior of the scale. Or begun at `start`, a maximum for nearly
    the same rows, whose penalty is kept.
    """
    square = _counted(square, gaussian=gaussian)
    centre = torch.maximum(constant.vector[1], (SHARE * rows.size / rows.usual_q).log())
    problem = ScaleProblem(rows, inputs, square, centre, gaussian=gaussian)
    if start is not None:
        return problem.solved(start, start.penalty)
    vector = torch.cat([constant.vector, inputs.new_zeros(inputs.shape[1])])
    return problem.best(replace(constant, vector=vector))


def _counted(square: Tensor, *, gaussian: bool) -> Tensor:
    """Squared residuals (n,) as the law counts them: a Gaussian would follow single far ones."""
    if not gaussian:
        return square
    return square.clamp(max=reach(square.sqrt(), GAUSSIAN_FAR) ** 2)
