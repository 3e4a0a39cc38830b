r"""The full model of `criterion="auto"`, and what is left of it without some of its parts.

For each target: a noise that follows the inputs, plus $\alpha^2 q$, under a Student-t distribution
(`scale_fit`), a tilt of that distribution (`tilt_fit`), and a guard outside the data
(`prediction.guards`).
Training rows enter as if left out. Which parts are kept is decided by `ladder`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ...prediction.cosine_tilt import CosineTilt
from ...prediction.distribution import Distribution, StudentT, Tilted
from ...prediction.guards import Guard, IgnoranceGuard, RigidityGuard
from ...prediction.head import STEEPEST, Inputs
from . import tilt_fit
from .scale_fit import FIRST, FIXED, ScaleFit, constant_fit, flat_fit, headed_fit
from .target_rows import Rows
from .tilt_fit import TiltFit

BOUNDS = 0.005
"""Share of the fitted log-noises beyond each of the bounds it is kept within."""
FLOORS = (BOUNDS, 0.25, 0.5, 0.75, 0.9)
"""Quantiles of the fitted log-noises: the first that leaves tails long enough bounds them below."""
FAR_TAIL = 0.01
"""What lies outside of 99 % intervals."""
SHORT = 1.5
"""How many times as much, under the distribution without its tilt, shows tails that are too
short."""
DIRECTIONS = 512
"""Of the features that the head looks at: beyond, the leading principal ones."""
COVERED = 0.95
"""Level of the quantile at which the guard's distribution is as wide as a Gaussian."""


@dataclass(frozen=True)
class Parts:
    """Which of the parts are wanted.

    Attributes:
        head: of the noise, which then follows the inputs.
        tails: of a Student-t distribution.
        tilt: of that distribution.
        guard: beyond the training rows; "q" for one that grows with q alone.
        rigidity: whether bars follow q among the training rows too.
    """

    head: bool = True
    tails: bool = True
    tilt: bool = True
    guard: bool | Literal["q"] = True
    rigidity: bool = True


@dataclass(frozen=True)
class Design:
    """How rows of one target become the columns that its head looks at.

    Attributes:
        inputs: of the head.
        directions: of the standardised features that are looked at, (D, 512); None: all of them.
    """

    inputs: Inputs
    directions: Tensor | None

    @classmethod
    def of(
        cls, rows: Rows, features: tuple[Tensor, Tensor] | None = None, *, directed: bool = True
    ) -> Design:
        """The design whose units the reference rows fix.

        `features` are centre and spread of the features that targets share; `directed` says whether
        leading directions are needed where there are many features.
        """
        assert rows.columns is None, "these rows have columns of a design already"
        reference = rows.reference
        inputs = Inputs.of(rows.telling_reference.q, reference.mean, reference.features)
        if features is not None:
            inputs = replace(inputs, centre=features[0], spread=features[1])
        return cls(inputs, _directions(inputs, reference) if directed else None)

    def columns(self, rows: Rows) -> Tensor:
        """(n, P), of rows that may have them already, by `applied`."""
        if rows.columns is not None:
            return rows.columns
        columns = self.inputs(rows.q, rows.mean, rows.features)
        if self.directions is None:
            return columns
        return torch.cat([columns[:, :FIRST], columns[:, FIRST:] @ self.directions], 1)

    def applied(self, rows: Rows) -> Rows:
        """The rows with their columns in place of the features."""
        return replace(rows, columns=self.columns(rows), features=rows.features[:, :0])


@dataclass(frozen=True)
class TargetFit:
    """The full model of one target.

    Attributes:
        design: the columns that the head looks at.
        constant: the fit without a head, from which that with one began; None for one constant bar.
        scale: noise, scale and tails.
        bounds: of the log-noise, (2,).
        floor: share of the fitted log-noises that lie below the lower bound.
        middle: its median.
        tilt: None where there is none.
        guard: of one target.
        gap: half the gap between new and training rows, in units of q.
    """

    design: Design
    constant: ScaleFit | None
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

    def squared_scale(self, rows: Rows, *, guarded: bool = True) -> Tensor:
        """s^2, of rows as new ones."""
        seen = self.design.columns(rows) if self.headed else rows.q.new_zeros(len(rows), 0)
        h = self.scale.log_noise(seen)
        s2 = h.clamp(*self.bounds).exp() * rows.share + self.scale.scale2 * rows.q
        if self.guard is None or not guarded:
            return s2
        assert rows.distance is not None, "these rows have no ignorant forecast yet"
        assert rows.extent is not None, "these rows have no ignorant forecast yet"
        return self.guard.widened(s2, rows.q, rows.distance, rows.extent)

    def nll(self, rows: Rows, *, guarded: bool = True, tilted: bool = True) -> Tensor:
        """Of rows as new ones, (n,)."""
        s2 = self.squared_scale(rows, guarded=guarded)
        distribution = self.scale.distribution
        if tilted and self.tilt is not None:
            theta = self.tilt(self.design.columns(rows)).clamp(-STEEPEST, STEEPEST)
            if guarded and self.guard is not None:
                assert rows.extent is not None, "these rows have no ignorant forecast yet"
                theta = (theta.mT / self.guard.beyond(rows.q, rows.extent)).mT
            distribution = Tilted(self.scale.df, theta)
        return distribution_nll(distribution, rows.residual, s2, rows.side)

    def whole(self, weight: Tensor) -> Tensor:
        """Weights (3 + at most 512, J) as those of all features, (3 + D, J)."""
        directions = self.design.directions
        if directions is None:
            return weight
        return torch.cat([weight[:FIRST], directions @ weight[FIRST:]])

    def weights(self, tilts: int) -> tuple[Tensor, Tensor]:
        """Weight (3 + D, 1 + tilts) and constant (1 + tilts,) of a head."""
        a, own = self.scale.vector[0], self.scale.vector[FIXED:, None]
        width = FIRST + len(self.design.inputs.centre)
        noise = self.whole(own) if len(own) else a.new_zeros(width, 1)
        shape, constant = a.new_zeros(width, tilts), a.new_zeros(tilts)
        if self.tilt is not None:
            shape, constant = self.whole(self.tilt.weight), self.tilt.constant
        return torch.cat([noise, shape], 1), torch.cat([a[None], constant])


def fitted(
    rows: Rows,
    parts: Parts,
    like: TargetFit | None = None,
    *,
    design: Design | None = None,
    constant: ScaleFit | None = None,
    neighbour: TargetFit | None = None,
) -> TargetFit:
    """The full model of one target's rows: left-out training rows and validation rows.

    Of `like`, a fit to nearly the same rows, design, penalties and start are kept. Without it the
    design is the one given, or one of these rows. `constant` is the fit without a head, where it is
    known already. Near the penalty of a `neighbour`, the fit of another target, that of this one is
    looked for first.
    """
    if design is None:
        design = Design.of(rows) if like is None else like.design
    x = design.columns(rows) if parts.head or parts.tilt else rows.q.new_zeros(len(rows), 0)
    start, gaussian = like.scale if like else None, not parts.tails
    seen = x if parts.head else x[:, :0]
    if parts.rigidity:
        if constant is None:
            begun = like.constant if like else None
            constant = constant_fit(rows, rows.square, gaussian=gaussian, start=begun)
        scale = headed_fit(
            rows,
            seen,
            rows.square,
            constant,
            gaussian=gaussian,
            start=start,
            near=neighbour.scale.penalty if neighbour else None,
        )
    else:
        scale = flat_fit(rows, rows.square, gaussian=gaussian, start=start)
    h = scale.log_noise(seen) if parts.head else scale.vector[:1]  # one for all rows
    shape = x if parts.tilt and parts.tails else None
    floors = FLOORS if parts.head and parts.tails else FLOORS[:1]
    tilt = None
    for floor in floors:
        bounds = torch.quantile(h, h.new_tensor([floor, 1 - BOUNDS]))
        if shape is None and len(floors) == 1:  # neither a tilt to fit nor another floor to take
            break
        s2 = scale.squared_scale(rows, h.clamp(*bounds))
        u = scale.distribution.cdf(rows.residual / s2.sqrt())
        if shape is not None:
            tilt = tilt_fit.fitted(u, shape, side=rows.side, start=like.tilt if like else None)
        if not _short(u, tilt, x, surely=floor == BOUNDS):
            break
    guard = _guard(rows, scale, parts.guard)
    gap = -0.5 * torch.expm1(-scale.optimism.clamp(min=0)) * rows.size / rows.usual_q
    gap = gap if bool(rows.seen.any() & ~rows.seen.all()) else scale.scale2  # it is not known
    return TargetFit(
        design=design,
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
    """Whether too many rows lie outside of 99 % intervals, by u (n,) of the untilted distribution.

    A noise that follows how often targets leave zero, say, is small where they seldom do: those
    that do are then farther out than the distribution's tails reach. The tilt was fitted to the
    same rows, so that they lie outside of the untilted distribution too. `surely` asks for more
    than chance.
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
    x = inputs.standardised(rows.features)
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(x.shape[1], DIRECTIONS, generator=generator, dtype=x.dtype).to(x.device)
    for _ in range(2):  # subspace iterations; a third changes the NLL by some 1e-5
        found = torch.linalg.qr(x.mT @ (x @ found))[0]
    return found


def _guard(rows: Rows, scale: ScaleFit, kind: bool | Literal["q"]) -> Guard | None:
    """The guard of one target, of the kind that is wanted."""
    if not kind:
        return None
    # The distribution's 90 % interval shall be that of a Gaussian with the variance that the guard
    # sets.
    factor = torch.ones_like(rows.size)
    if not scale.gaussian:
        level = torch.tensor(COVERED, dtype=torch.float64)
        factor = factor * (torch.special.ndtri(level) / StudentT(scale.df).quantile(level)) ** 2
    known = len(rows.telling_held) > 0
    # Where the features are all zero in every row, q of a new row is in units of one.
    one = torch.ones_like(rows.size)
    if kind == "q":
        scale2 = rows.error_per_q if known else rows.size
        return RigidityGuard(rows.high_q if known else one, scale2 * factor)
    forecast = rows.forecast
    assert forecast is not None, "these rows have no ignorant forecast yet"
    return IgnoranceGuard(
        reference=rows.high_unfamiliarity if known else one,
        variance=forecast.variance,
        factor=factor,
        centre=forecast.constant,
        by_feature=forecast.by_feature,
        extent_weight=forecast.extent_weight,
    )


def distribution_nll(
    distribution: Distribution, residual: Tensor, s2: Tensor, side: Tensor
) -> Tensor:
    """Of each row, under a distribution with that squared scale; at a bound, by its side, of the
    mass.
    """
    z = residual / s2.sqrt()
    value = 0.5 * s2.log() - distribution.log_density(z)
    if bool((side < 0).any()):
        value = torch.where(side < 0, -distribution.cdf(z).clamp(min=1e-300).log(), value)
    if bool((side > 0).any()):
        value = torch.where(side > 0, -distribution.mirrored.cdf(-z).clamp(min=1e-300).log(), value)
    return value
