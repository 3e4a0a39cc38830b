r"""The full model of `criterion="auto"`, and what is left of it without some of its parts.

For each target: a noise that follows the inputs, plus $\alpha^2 q$, under a Student-t law
(`scale_fit`), a tilt of that law (`tilt_fit`), and a guard outside the data (`prediction.head`).
Training rows enter as if left out. Which parts are kept is decided by `ladder`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..prediction.cosine_tilt import CosineTilt
from ..prediction.head import STEEPEST, Guard, Inputs
from ..prediction.law import Law, StudentT, Tilted
from . import tilt_fit
from .rows import Rows, clipped_mean
from .scale_fit import FIRST, FIXED, ScaleFit, constant_fit, flat_fit, headed_fit
from .tilt_fit import TiltFit

REFERENCE = 0.9
"""Quantile of the left-out training rows' q, beyond which the guard sets in."""
BOUNDS = 0.005
"""Share of the fitted log-noises beyond each of the bounds it is kept within."""
FLOORS = (BOUNDS, 0.25, 0.5, 0.75, 0.9)
"""Quantiles of the fitted log-noises: the first that leaves tails long enough bounds them below."""
FAR_TAIL = 0.01
"""What lies outside of 99 % intervals."""
SHORT = 1.5
"""How many times as much, under the law without its tilt, shows tails that are too short."""
DIRECTIONS = 512
"""Of the features that the head looks at: beyond, the leading principal ones."""
TINY = 1e-6
"""Of the mean squared residual, added to each: one of zero is no certainty."""
COVERED = 0.95
"""Level of the quantile at which the guard's law is as wide as a Gaussian."""


@dataclass(frozen=True)
class Parts:
    """Which of the parts are wanted.

    Attributes:
        head: of the noise, which then follows the inputs.
        tails: of a Student-t law.
        tilt: of that law.
        guard: beyond the training rows.
        rigidity: whether bars follow q among the training rows too.
    """

    head: bool = True
    tails: bool = True
    tilt: bool = True
    guard: bool = True
    rigidity: bool = True


@dataclass(frozen=True)
class TargetFit:
    """The full model of one target.

    Attributes:
        inputs: of the head.
        directions: of the standardised features that were looked at, (D, at most 512); None: all.
        constant: the fit without a head.
        scale: noise, scale and tails.
        bounds: of the log-noise, (2,).
        floor: share of the fitted log-noises that lie below the lower bound.
        middle: its median.
        tilt: None where there is none.
        guard: of one target.
        gap: half the gap between new and training rows, in units of q.
    """

    inputs: Inputs
    directions: Tensor | None
    constant: ScaleFit
    scale: ScaleFit
    bounds: Tensor
    floor: float
    middle: Tensor
    tilt: TiltFit | None
    guard: Guard | None
    gap: Tensor

    @property
    def scale2(self) -> Tensor:
        r"""Of single predictions: how much of their variance other training rows would change.

        The mean of two estimates. The likelihood's hardly tells it from noise. The other is the
        gap between new rows and training rows left out of the readout alone, $e^\kappa$: training
        lowers the errors of its own rows by as much as it raises those of others, so that half of
        the gap is what a net's own weights add to the errors of new rows.
        """
        return 0.5 * (self.scale.scale2 + self.gap)

    @property
    def headed(self) -> bool:
        """Whether the noise follows the inputs."""
        return len(self.scale.vector) > FIXED

    def columns(self, rows: Rows) -> Tensor:
        """Inputs of rows, features in those directions."""
        return columns(self.inputs, self.directions, rows)

    def squared_scale(self, rows: Rows, *, guarded: bool = True) -> Tensor:
        """s^2, of rows as new ones."""
        h = self.scale.log_noise(self.columns(rows)[:, : len(self.scale.vector) - FIXED])
        s2 = h.clamp(*self.bounds).exp() * rows.share + self.scale.scale2 * rows.q
        return s2 + self.guard.variance(rows.q) if guarded and self.guard is not None else s2

    def nll(self, rows: Rows, *, guarded: bool = True, tilted: bool = True) -> Tensor:
        """Of rows as new ones, (n,)."""
        s2 = self.squared_scale(rows, guarded=guarded)
        law = self.scale.law
        if tilted and self.tilt is not None:
            theta = self.tilt(self.columns(rows)).clamp(-STEEPEST, STEEPEST)
            fade = 1 / self.guard.beyond(rows.q) if guarded and self.guard is not None else 1.0
            law = Tilted(self.scale.df, (theta.mT * fade).mT)
        return law_nll(law, rows.residual, s2, rows.side)

    def whole(self, weight: Tensor) -> Tensor:
        """Weights (3 + at most 512, J) as those of all features, (3 + D, J)."""
        if self.directions is None:
            return weight
        return torch.cat([weight[:FIRST], self.directions @ weight[FIRST:]])

    def weights(self, tilts: int) -> tuple[Tensor, Tensor]:
        """Weight (3 + D, 1 + tilts) and constant (1 + tilts,) of a head."""
        a, own = self.scale.vector[0], self.scale.vector[FIXED:, None]
        width = FIRST + len(self.inputs.centre)
        noise = self.whole(own) if len(own) else a.new_zeros(width, 1)
        shape, constant = a.new_zeros(width, tilts), a.new_zeros(tilts)
        if self.tilt is not None:
            shape, constant = self.whole(self.tilt.weight), self.tilt.constant
        return torch.cat([noise, shape], 1), torch.cat([a[None], constant])


def columns(inputs: Inputs, directions: Tensor | None, rows: Rows) -> Tensor:
    """The head's inputs of rows."""
    x = inputs(rows.q, rows.mean, rows.features)
    return x if directions is None else torch.cat([x[:, :FIRST], x[:, FIRST:] @ directions], 1)


def fitted(
    rows: Rows,
    parts: Parts,
    like: TargetFit | None = None,
    *,
    features: tuple[Tensor, Tensor] | None = None,
) -> TargetFit:
    """The full model of one target's rows: left-out training rows and validation rows.

    Of `like`, a fit to nearly the same rows, units, penalties and start are kept. `features` are
    centre and spread of the features, where other targets share them.
    """
    square = rows.residual.square() + TINY * rows.size  # a residual of zero is no certainty
    reference = rows.reference
    if like is None:
        inputs = Inputs.of(rows.telling_reference.q, reference.mean, reference.features)
    else:
        inputs = like.inputs
    if features is not None:
        inputs = replace(inputs, centre=features[0], spread=features[1])
    directions = like.directions if like else _directions(inputs, reference)
    x = columns(inputs, directions, rows)
    begun, start = (like.constant, like.scale) if like else (None, None)
    constant = constant_fit(rows, square, gaussian=not parts.tails, start=begun)
    seen = x if parts.head else x[:, :0]
    if parts.rigidity:
        scale = headed_fit(rows, seen, square, constant, gaussian=not parts.tails, start=start)
    else:
        scale = flat_fit(rows, square, gaussian=not parts.tails, start=start)
    h = scale.log_noise(seen)
    shape = x if parts.tilt and parts.tails else None
    penalty = like.tilt.penalty if like and like.tilt else None
    floors = FLOORS if parts.head and parts.tails else FLOORS[:1]
    for floor in floors:
        bounds = torch.quantile(h, h.new_tensor([floor, 1 - BOUNDS]))
        s2 = scale.squared_scale(rows, h.clamp(*bounds))
        u = scale.law.cdf(rows.residual / s2.sqrt())
        tilt = None if shape is None else tilt_fit.fitted(u, shape, penalty, rows.side)
        if not _short(u, tilt, x, surely=floor == BOUNDS):
            break
    guard = _guard(rows, scale) if parts.guard else None
    gap = -0.5 * torch.expm1(-scale.optimism.clamp(min=0)) * rows.size / rows.usual_q
    gap = gap if bool(rows.seen.any() & ~rows.seen.all()) else scale.scale2  # it is not known
    return TargetFit(
        inputs=inputs,
        directions=directions,
        constant=constant,
        scale=scale,
        bounds=bounds,
        floor=floor,
        middle=h.clamp(*bounds).median(),
        tilt=tilt,
        guard=guard,
        gap=gap,
    )


def _short(u: Tensor, tilt: TiltFit | None, inputs: Tensor, *, surely: bool) -> bool:
    """Whether too many rows lie outside of 99 % intervals, by u (n,) of the untilted law.

    A noise that follows how often targets leave zero, say, is small where they seldom do: those
    that do are then farther out than the law's tails reach. The tilt was fitted to the same rows,
    so that they lie outside of the untilted law too. `surely` asks for more than chance.
    """
    expected = FAR_TAIL * len(u)
    plain = float((torch.minimum(u, 1 - u) < FAR_TAIL / 2).sum())
    if plain <= max(SHORT * expected, expected + 3 * expected**0.5):
        return False
    if tilt is None:
        return True
    tilted = CosineTilt(tilt(inputs).clamp(-STEEPEST, STEEPEST)).cdf(u[:, None])
    outside = float((torch.minimum(tilted, 1 - tilted) < FAR_TAIL / 2).sum())
    return outside > expected + (1.5 * expected**0.5 if surely else 0.0)


def _directions(inputs: Inputs, rows: Rows) -> Tensor | None:
    """The leading principal directions of the standardised features, where there are many."""
    if len(inputs.centre) <= DIRECTIONS:
        return None
    x = inputs(rows.q, rows.mean, rows.features)[:, FIRST:]
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(x.shape[1], DIRECTIONS, generator=generator, dtype=x.dtype).to(x.device)
    for _ in range(3):  # subspace iterations
        found = torch.linalg.qr(x.mT @ (x @ found))[0]
    return found


def _guard(rows: Rows, scale: ScaleFit) -> Guard:
    r"""$\alpha_g^2$: the clipped mean of $r^2/q$, so that 90 % intervals are a Gaussian's.

    Rows whose q is zero say nothing about it.
    """
    held, level = rows.telling_held, torch.tensor(COVERED, dtype=torch.float64)
    if not len(held):  # features are all zero, in every row: a new row's q is in units of one
        one = torch.ones_like(rows.size)
        return Guard(rows.size, one)
    scale2 = clipped_mean(held.residual.square() / held.q)
    if not scale.gaussian:
        scale2 = scale2 * (torch.special.ndtri(level) / StudentT(scale.df).quantile(level)) ** 2
    return Guard(scale2, torch.quantile(rows.telling_reference.q, REFERENCE))


def law_nll(law: Law, residual: Tensor, s2: Tensor, side: Tensor) -> Tensor:
    """Of each row, under a law with that squared scale; at a bound, by its side, of the mass."""
    z = residual / s2.sqrt()
    value = 0.5 * s2.log() - law.log_density(z)
    if bool((side < 0).any()):
        value = torch.where(side < 0, -law.cdf(z).clamp(min=1e-300).log(), value)
    if bool((side > 0).any()):
        value = torch.where(side > 0, -law.mirrored.cdf(-z).clamp(min=1e-300).log(), value)
    return value
