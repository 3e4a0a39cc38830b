r"""The full model of one target, and what is left of it without some of its components.

A noise that follows the inputs, plus $\alpha^2 q$, under a Student-t distribution (`scale_fit`), a
tilt of that distribution (`tilt_fit`), and a guard outside of the data (`prediction.guards`).
Training rows enter as if left out. `full` decides which components are kept.

Data flow: `Design` turns rows into the columns that the head looks at; `fitted_target`
fits scale, bounds of the noise, tilt and guard to them, one after the other; the `TargetFit` that
it returns gives squared scales and negative log-likelihoods of new rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..prediction.cosine_tilt import CosineTilt
from ..prediction.distribution import Distribution, StudentT, Tilted
from ..prediction.guards import Guard
from ..prediction.head import STEEPEST, Inputs
from .rows import TargetView
from .scale_fit import FIRST_INPUTS, FIXED_PARAMETERS, ScaleFit, constant_fit, flat_fit, headed_fit
from .tilt_fit import TiltFit, fitted_tilt

BOUNDS = 0.005
"""Share of the fitted log-noises that lie beyond each of the bounds of the log-noise."""
FLOORS = (BOUNDS, 0.25, 0.5, 0.75, 0.9)
"""Quantiles of the fitted log-noises that are tried as their lower bound, in this order.

The first one that leaves tails long enough is taken."""
FAR_TAIL = 0.01
"""Probability outside of 99 % intervals."""
SHORT = 1.5
"""Multiple of `FAR_TAIL` outside of the untilted 99 % intervals that shows tails too short."""
DIRECTIONS = 512
"""Largest number of features that the head looks at.

Of more features it looks at as many leading principal directions."""
COVERED = 0.95
"""Level of the quantile at which the guard's distribution is as wide as a Gaussian."""


@dataclass(frozen=True)
class Components:
    """Which components of the full model are asked for.

    Attributes:
        head: Whether the noise follows the inputs.
        tails: Whether the distribution is a Student-t.
        tilt: Whether that distribution has a shape of its own.
        guard: Whether bars are widened beyond the training rows.
        rigidity: Whether bars follow q among the training rows too.
    """

    head: bool = True
    tails: bool = True
    tilt: bool = True
    guard: bool = True
    rigidity: bool = True

    @property
    def columns(self) -> bool:
        """Whether anything follows the columns of a design."""
        return self.head or self.tilt


@dataclass(frozen=True)
class Design:
    """How rows of one target become the columns that its head looks at.

    Attributes:
        inputs: How the head's inputs are standardised.
        directions: Directions of the standardised features that are looked at, (D, 512); None
            stands for all features.
    """

    inputs: Inputs
    directions: Tensor | None

    @classmethod
    def of(
        cls,
        rows: TargetView,
        features: tuple[Tensor, Tensor] | None = None,
        *,
        directed: bool = True,
    ) -> Design:
        """The design whose units the reference rows fix.

        Args:
            rows: The rows of one target.
            features: Centre and spread of the features, where targets share them.
            directed: Whether leading directions are needed where there are many features.
        """
        assert rows.columns is None, "these rows have columns of a design already"
        reference = rows.reference
        columns = reference.features
        if not columns.shape[1]:  # without features, a constant column stands in for a moment
            columns = columns.new_zeros(len(columns), 1)
        inputs = Inputs.of(rows.informative_reference.q, reference.mean, columns)
        width = reference.features.shape[1]
        inputs = replace(inputs, centre=inputs.centre[:width], spread=inputs.spread[:width])
        if features is not None:
            centre, spread = features
            inputs = replace(inputs, centre=centre, spread=spread)
        return cls(inputs, _directions(inputs, reference) if directed else None)

    def columns(self, rows: TargetView) -> Tensor:
        """The columns (n, P) of rows; those that `applied` stored with them, if any."""
        if rows.columns is not None:
            return rows.columns
        columns = self.inputs(rows.q, rows.mean, rows.features)
        if self.directions is None:
            return columns
        return torch.cat(
            [columns[:, :FIRST_INPUTS], columns[:, FIRST_INPUTS:] @ self.directions], 1
        )

    def applied(self, rows: TargetView) -> TargetView:
        """The rows with their columns in place of the features."""
        return replace(rows, columns=self.columns(rows), features=rows.features[:, :0])


def _directions(inputs: Inputs, rows: TargetView) -> Tensor | None:
    """The leading principal directions of the standardised features; None where there are few."""
    if len(inputs.centre) <= DIRECTIONS:
        return None
    x = inputs.standardised(rows.features)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(x.shape[1], DIRECTIONS, generator=generator, dtype=x.dtype)
    directions = start.to(x.device)
    for _ in range(2):  # subspace iterations; a third changes the NLL by some 1e-5
        directions = torch.linalg.qr(x.mT @ (x @ directions))[0]
    return directions


@dataclass(frozen=True)
class TargetFit:
    """The full model of one target.

    Attributes:
        design: The columns that the head looks at.
        constant: The fit without a head, at which that with a head began; None for a constant bar.
        scale: Noise, scale and tails.
        bounds: The bounds of the log-noise, (2,).
        floor: The share of the fitted log-noises that lie below the lower bound.
        middle: The median of the log-noise.
        tilt: The tilt; None where there is none.
        guard: The guard; None where there is none.
        gap: Half the gap between new and training rows, in units of q.
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
        r"""The squared scale of single predictions.

        It says how much of their variance other training rows would change. It is the mean of two
        estimates. The likelihood's hardly tells it from noise. The other is the gap between new
        rows and training rows left out of the readout alone, $e^\kappa$: training lowers the errors
        of its own rows by as much as it raises those of others, so that half of the gap is what a
        network's own weights add to the errors of new rows.
        """
        return 0.5 * (self.scale.scale2 + self.gap)

    @property
    def headed(self) -> bool:
        """Whether the noise follows the inputs."""
        return len(self.scale.vector) > FIXED_PARAMETERS

    def squared_scale(self, rows: TargetView, *, guarded: bool = True) -> Tensor:
        """s^2 of rows, taken as new ones (without optimism), (n,)."""
        columns = self.design.columns(rows) if self.headed else _no_columns(rows)
        log_noise = self.scale.log_noise(columns).clamp(*self.bounds)
        s2 = log_noise.exp() * rows.noise_factor + self.scale.scale2 * rows.q
        if self.guard is None or not guarded:
            return s2
        assert rows.distance is not None, "these rows have no ignorant forecast yet"
        assert rows.extent is not None, "these rows have no ignorant forecast yet"
        return self.guard.widened(s2, rows.q, rows.distance, rows.extent)

    def nll(self, rows: TargetView, *, guarded: bool = True, tilted: bool = True) -> Tensor:
        """The negative log-likelihoods of rows, taken as new ones (without optimism), (n,)."""
        s2 = self.squared_scale(rows, guarded=guarded)
        distribution = self.scale.distribution
        if tilted and self.tilt is not None:
            theta = self.tilt(self.design.columns(rows)).clamp(-STEEPEST, STEEPEST)
            if guarded and self.guard is not None:
                assert rows.extent is not None, "these rows have no ignorant forecast yet"
                theta = (theta.mT / self.guard.beyond(rows.q, rows.extent)).mT
            distribution = Tilted(self.scale.df, theta)
        return distribution_nll(distribution, rows.residual, s2, rows.side)

    def head_weights(self, tilts: int) -> tuple[Tensor, Tensor]:
        """Weight (3 + D, 1 + tilts) and constant (1 + tilts,) of a head: noise first, then tilt."""
        noise_constant = self.scale.vector[0]
        noise_weight = self.scale.vector[FIXED_PARAMETERS:, None]
        width = FIRST_INPUTS + len(self.design.inputs.centre)
        if len(noise_weight):
            noise_weight = self._by_feature(noise_weight)
        else:
            noise_weight = noise_constant.new_zeros(width, 1)
        tilt_weight = noise_constant.new_zeros(width, tilts)
        tilt_constant = noise_constant.new_zeros(tilts)
        if self.tilt is not None:
            tilt_weight = self._by_feature(self.tilt.weight)
            tilt_constant = self.tilt.constant
        weight = torch.cat([noise_weight, tilt_weight], 1)
        constant = torch.cat([noise_constant[None], tilt_constant])
        return weight, constant

    def _by_feature(self, weight: Tensor) -> Tensor:
        """Weights of the design's columns (3 + at most 512, J) as those of features, (3 + D, J)."""
        directions = self.design.directions
        if directions is None:
            return weight
        return torch.cat([weight[:FIRST_INPUTS], directions @ weight[FIRST_INPUTS:]])


def fitted_target(
    rows: TargetView,
    components: Components,
    like: TargetFit | None = None,
    *,
    design: Design | None = None,
    constant: ScaleFit | None = None,
    neighbour: TargetFit | None = None,
) -> TargetFit:
    """The full model of one target's rows: left-out training rows and validation rows.

    Args:
        rows: The rows.
        components: The components that are asked for.
        like: A fit to nearly the same rows, whose design, penalties and start are kept.
        design: The design. By default that of `like`, or else a new one for these rows.
        constant: The fit without a head, where it is known already.
        neighbour: The fit of another target. The search for the penalty begins near its penalty.
    """
    if design is None:
        design = Design.of(rows) if like is None else like.design
    columns = design.columns(rows) if components.columns else _no_columns(rows)
    noise_columns = columns if components.head else columns[:, :0]
    if components.rigidity:
        if constant is None:
            constant = constant_fit(
                rows,
                rows.squares,
                gaussian=not components.tails,
                start=None if like is None else like.constant,
            )
        scale = headed_fit(
            rows,
            noise_columns,
            rows.squares,
            constant,
            gaussian=not components.tails,
            start=None if like is None else like.scale,
            near=None if neighbour is None else neighbour.scale.penalty,
        )
    else:
        scale = flat_fit(
            rows,
            rows.squares,
            gaussian=not components.tails,
            start=None if like is None else like.scale,
        )
    log_noise = scale.vector[:1]  # one for all rows
    if components.head:
        log_noise = scale.log_noise(noise_columns)
    shape = _fitted_shape(
        rows, scale, log_noise, columns, components, start=None if like is None else like.tilt
    )
    return TargetFit(
        design=design,
        constant=constant,
        scale=scale,
        bounds=shape.bounds,
        floor=shape.floor,
        middle=log_noise.clamp(*shape.bounds).median(),
        tilt=shape.tilt,
        guard=_guard(rows, scale) if components.guard else None,
        gap=_gap(rows, scale),
    )


def _no_columns(rows: TargetView) -> Tensor:
    """The inputs of a constant noise, (n, 0)."""
    return rows.q.new_zeros(len(rows), 0)


@dataclass(frozen=True)
class _Shape:
    """The bounds of the log-noise (2,), the share of it below the lower one, and the tilt."""

    bounds: Tensor
    floor: float
    tilt: TiltFit | None


def _fitted_shape(
    rows: TargetView,
    scale: ScaleFit,
    log_noise: Tensor,
    columns: Tensor,
    components: Components,
    start: TiltFit | None,
) -> _Shape:
    """The tilt, and the lowest bound of the log-noise that leaves tails long enough.

    Args:
        rows: The rows.
        scale: The fit of noise, scale and tails.
        log_noise: The fitted log-noises, (n,), or (1,) for a constant noise.
        columns: The head's columns, (n, P).
        components: The components that are asked for.
        start: The tilt of nearly the same rows, if that is known.
    """
    tilting = components.tilt and components.tails
    floors = FLOORS if components.head and components.tails else FLOORS[:1]
    tilt = None
    for floor in floors:
        bounds = torch.quantile(log_noise, log_noise.new_tensor([floor, 1 - BOUNDS]))
        if not tilting and len(floors) == 1:  # neither a tilt to fit nor another floor to take
            break
        s2 = scale.squared_scale(rows, log_noise.clamp(*bounds))
        u = scale.distribution.cdf(rows.residual / s2.sqrt())
        if tilting:
            tilt = fitted_tilt(u, columns, side=rows.side, start=start)
        if not _tails_too_short(u, tilt, columns, surely=floor == BOUNDS):
            break
    return _Shape(bounds, floor, tilt)


def _tails_too_short(u: Tensor, tilt: TiltFit | None, columns: Tensor, *, surely: bool) -> bool:
    """Whether too many rows lie outside of 99 % intervals.

    Say targets are mostly zero. Where they seldom differ from zero, a noise that follows the inputs
    is small, and the few that differ lie farther out than the distribution's tails reach. Rows must
    lie outside of the untilted distribution too, since the tilt was fitted to the same rows.

    Args:
        u: The rows' probabilities under the untilted distribution, (n,).
        tilt: The tilt, if there is one.
        columns: The head's columns, (n, P).
        surely: Whether the excess must be larger than chance.
    """
    expected = FAR_TAIL * len(u)
    untilted_outside = float((torch.minimum(u, 1 - u) < FAR_TAIL / 2).sum())
    if untilted_outside <= max(SHORT * expected, expected + 3 * expected**0.5):
        return False
    if tilt is None:
        return True
    tilted = CosineTilt(tilt(columns).clamp(-STEEPEST, STEEPEST)).cdf(u[:, None])
    outside = float((torch.minimum(tilted, 1 - tilted) < FAR_TAIL / 2).sum())
    chance = 1.5 * expected**0.5 if surely else 0.0
    return outside > expected + chance


def _gap(rows: TargetView, scale: ScaleFit) -> Tensor:
    """Half the gap between the errors of new and of training rows, in units of q.

    Where all rows are new or all are training rows it is not known, and the squared scale is
    returned instead.
    """
    if not bool(rows.seen.any() & ~rows.seen.all()):
        return scale.scale2
    optimism = scale.vector[2].clamp(min=0)
    return -0.5 * torch.expm1(-optimism) * rows.mean_square / rows.usual_q


def _guard(rows: TargetView, scale: ScaleFit) -> Guard:
    """The guard of one target."""
    # The factor makes the distribution's 90 % interval that of a Gaussian with the variance that
    # the guard sets.
    factor = torch.ones_like(rows.mean_square)
    if not scale.gaussian:
        level = torch.tensor(COVERED, dtype=torch.float64)
        factor = factor * (torch.special.ndtri(level) / StudentT(scale.df).quantile(level)) ** 2
    # Where the features are all zero in every row, q of a new row is in units of one.
    reference = torch.ones_like(rows.mean_square)
    if len(rows.informative_held_out) > 0:
        reference = rows.high_unfamiliarity
    forecast = rows.forecast
    assert forecast is not None, "these rows have no ignorant forecast yet"
    return Guard(
        reference=reference,
        variance=forecast.variance,
        factor=factor,
        centre=forecast.constant,
        by_feature=forecast.by_feature,
        extent_weight=forecast.extent_weight,
    )


def distribution_nll(
    distribution: Distribution, residual: Tensor, s2: Tensor, side: Tensor
) -> Tensor:
    """The negative log-likelihood of each row, (n,).

    Args:
        distribution: The distribution, in units of its scale.
        residual: Target minus prediction, (n,).
        s2: Squared scales, (n,).
        side: -1 or 1 for a row at a bound, which shows the mass beyond it; else 0, (n,).
    """
    z = residual / s2.sqrt()
    value = 0.5 * s2.log() - distribution.log_density(z)
    if bool((side < 0).any()):
        mass = distribution.cdf(z).clamp(min=1e-300)
        value = torch.where(side < 0, -mass.log(), value)
    if bool((side > 0).any()):
        mass = distribution.mirrored.cdf(-z).clamp(min=1e-300)
        value = torch.where(side > 0, -mass.log(), value)
    return value
