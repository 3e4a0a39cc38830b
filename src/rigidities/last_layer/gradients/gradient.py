r"""Derivatives of predictions by the inputs, with error bars.

$\partial y / \partial x_i$ is linear in the readout's weights with features
$g_i = \partial f / \partial x_i$, so

$$ \mathrm{Var}\, \frac{\partial y}{\partial x_i} = \alpha_g^2\,
   g_i^\top (G + \varsigma^2 I)^{-1} g_i $$

the limit of many last-layer members, each differentiated by itself, without their sampling
error. The scale $\alpha_g$ is that of the members, $\alpha$, unless derivatives were calibrated on
targets of their own: then it applies to first and second derivatives here, and not to members
or `propagate`, which know of values alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.slots import RowShare
from ...models.modes import unmixed
from ...posterior.draws import MEMBERS, standard_normal
from ...posterior.posterior import Posterior
from ...posterior.quadratic import QuadraticForm
from ...prediction.distribution import gaussian_interval
from .feature_derivatives import Projection, either, forward_quadratic, passes, reverse_quadratic
from .feature_map import FeatureMap

EXACT_PASSES = 2048
"""Passes through the trunk for one batch beyond which members are drawn instead."""


@dataclass(frozen=True)
class Gradient:
    """Derivatives with their error bars (the epistemic part).

    Attributes:
        mean: derivatives of the model's prediction. Shaped like the input for one output per
            sample, else (N, *output, *input) without the outputs' and inputs' first dimensions.
        std: their standard deviations; NaN where they were not asked for.
        sampling_error: relative standard error of `std` where members were drawn; 0 if exact.
        summed: whether it is the sum of all outputs that was differentiated, because the input has
            not one row per sample, or its rows act on other samples too.
    """

    mean: Tensor
    std: Tensor
    sampling_error: float = 0.0
    summed: bool = False

    @property
    def variance(self) -> Tensor:
        """Square of the standard deviation."""
        return self.std.square()

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval that holds probability `level`: (low, high)."""
        return gaussian_interval(self.mean, self.std, level)

    @classmethod
    def join(cls, parts: Sequence[Gradient]) -> Gradient:
        """Those of consecutive batches as one."""
        if not parts:
            raise ValueError("There is nothing to differentiate: no batches were given.")
        return cls(
            torch.cat([part.mean for part in parts]),
            torch.cat([part.std for part in parts]),
            max(part.sampling_error for part in parts),
            any(part.summed for part in parts),
        )


@dataclass(frozen=True)
class Differentiator:
    """Error bars of derivatives for one posterior.

    Attributes:
        form: the posterior's quadratic form in the model's precision.
        scale: of derivatives, one entry per target.
        members: draw so many instead of being exact; None for exact up to `EXACT_PASSES`, 0 for
            exact always.
    """

    posterior: Posterior
    form: QuadraticForm
    scale: Tensor
    members: int | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        members: object = self.members
        if members is not None and not (isinstance(members, int) and members >= 0):
            raise ValueError(f"members must be 0 (exact) or a number, got {self.members!r}.")

    def __call__(self, point: FeatureMap) -> Gradient:
        """The derivatives of one batch by all numbers of its input."""
        members = self._members(point)
        if members:
            mean, q = reverse_quadratic(point, self._projection(members))
        else:
            mean, q = either(
                point,
                self.posterior.width,
                self._targets(point),
                lambda: forward_quadratic(point, self.form),
                lambda: reverse_quadratic(point, self._projection()),
            )
        variance = self.scale.square().to(q)[:, None] * q
        std = point.by_outputs(variance).sqrt().to(mean.dtype)
        error = (2 * members) ** -0.5 if members else 0.0
        return Gradient(point.shaped(mean), point.shaped(std), error, not point.aligned)

    def directional(self, point: FeatureMap, direction: Tensor) -> Gradient:
        """The derivative of one batch along a direction, shaped like the output."""
        reading = point.along(direction).reading
        with unmixed(reading.features):
            q = self.form(reading.features)
        q = q[:, None] if q.ndim == 1 else q
        std = (self.scale.square().to(q) * q).sqrt().to(reading.output.dtype)
        return Gradient(reading.output, reading.unrows(std))

    def _targets(self, point: FeatureMap) -> int:
        shared = point.reading.features.ndim == 2 and self.posterior.eigenvalues.ndim == 1
        return 1 if shared else len(self.scale)

    def _members(self, point: FeatureMap) -> int:
        if self.members is not None:
            return self.members
        least = min(passes(point, self.posterior.width, self._targets(point)))
        return MEMBERS if least > EXACT_PASSES else 0

    def _projection(self, members: int = 0) -> Projection:
        r"""Whitened features, or independent draws of $f \cdot \delta w$ over the root of n."""
        factor = self.posterior.factor
        if members:
            shape = (*factor.shape[:-2], members, factor.shape[-1])
            z = standard_normal(shape, factor.device, self.generator)
            factor = z @ factor / members**0.5
        factor = factor.to(self.form.dtype)

        def project(features: Tensor) -> Tensor:
            features = features.to(factor)
            if factor.ndim == 2:
                return features @ factor.mT
            pattern = "md,tcd->mtc" if features.ndim == 2 else "mtd,tcd->mtc"
            return torch.einsum(pattern, features, factor)

        return project


def shared_out(maps: Iterable[FeatureMap], given: Tensor) -> Iterator[tuple[Tensor, FeatureMap]]:
    """Each batch with its part of a direction that has one row per input row, or one for all."""
    share: RowShare | None = None
    direction = torch.as_tensor(given, dtype=torch.float64)
    for point in maps:
        if share is None:
            split = direction.ndim == point.point.ndim and len(direction) > 1
            share = RowShare(direction, split=split, name="The direction")
        yield share.next(len(point.point)), point
    if share is not None:
        share.check_used_up()
