r"""Derivatives of predictions with respect to the inputs, with error bars.

$\partial y / \partial x_i$ is linear in the readout's weights with features
$g_i = \partial f / \partial x_i$, so

$$ \mathrm{Var}\, \frac{\partial y}{\partial x_i} = \alpha_g^2\,
   g_i^\top (G + \varsigma^2 I)^{-1} g_i. $$

This is the limit of many last-layer members, each differentiated separately, without their sampling
error. The scale $\alpha_g$ is that of the members, $\alpha$, unless derivatives were calibrated on
their own targets. Then $\alpha_g$ applies to derivatives here, but not to members or `propagate`,
which only use values.

A `Differentiator` holds the posterior; it takes the `FeatureMap` of one batch after the other and
gives a `Gradient` for each. `Gradient.join` makes a single `Gradient` of them.
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
from .feature_derivatives import (
    Projection,
    forward_passes,
    forward_quadratic,
    in_cheaper_mode,
    output_derivatives,
    reverse_quadratic,
)
from .feature_map import FeatureMap

__all__ = ["Gradient"]

EXACT_PASSES = 2048
"""Passes through the trunk for one batch beyond which members are drawn instead."""


@dataclass(frozen=True)
class Gradient:
    """Derivatives with their error bars (the epistemic part).

    Attributes:
        mean: Derivatives of the model's prediction. They are shaped like the input for one output
            per sample, else (N, *output, *input) with the shapes of one sample's output and input.
        std: Their standard deviations; NaN if they were not requested.
        sampling_error: Relative standard error of `std` if members were drawn; 0 if exact.
        summed: Whether the sum of all outputs was differentiated, because the input does not have
            one row per sample, or because its rows act on other samples too.
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
        """The central interval that covers probability `level`.

        Args:
            level: The probability, between 0 and 1.

        Returns:
            The lower and the upper ends, shaped like the mean.
        """
        return gaussian_interval(self.mean, self.std, level)

    @classmethod
    def join(cls, gradients: Sequence[Gradient]) -> Gradient:
        """The derivatives of consecutive batches as one.

        Raises:
            ValueError: There are no batches.
        """
        if not gradients:
            raise ValueError("There is nothing to differentiate: no batches were given.")
        return cls(
            mean=torch.cat([gradient.mean for gradient in gradients]),
            std=torch.cat([gradient.std for gradient in gradients]),
            sampling_error=max(gradient.sampling_error for gradient in gradients),
            summed=any(gradient.summed for gradient in gradients),
        )


def gradient_without_bars(feature_map: FeatureMap) -> Gradient:
    """The derivatives of one batch, with NaN in place of their standard deviations."""
    mean = output_derivatives(feature_map).reshape(feature_map.shape)
    return Gradient(mean, torch.full_like(mean, torch.nan), summed=not feature_map.aligned)


@dataclass(frozen=True)
class Differentiator:
    """Error bars of derivatives for one posterior.

    Attributes:
        posterior: The posterior of the readout's weights.
        form: The posterior's quadratic form in the model's precision.
        scale: The scale of derivatives, one entry per target.
        members: How many members to draw instead of being exact. 0 is always exact, None up to
            `EXACT_PASSES` passes.
        generator: Draws the members.
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

    def __call__(self, feature_map: FeatureMap) -> Gradient:
        """The derivatives of one batch with respect to all numbers of its input."""
        reverse_passes = self._reverse_passes(feature_map)
        members = self.members
        if members is None:
            passes = min(forward_passes(feature_map), reverse_passes)
            members = MEMBERS if passes > EXACT_PASSES else 0
        if members:
            mean, q = reverse_quadratic(feature_map, self._drawn_projection(members))
        else:
            mean, q = in_cheaper_mode(
                feature_map,
                reverse_passes,
                forward=lambda: forward_quadratic(feature_map, self.form),
                reverse=lambda: reverse_quadratic(feature_map, self._exact_projection()),
            )
        variance = feature_map.from_rows(self.scale.square().to(q) * q)
        return Gradient(
            mean=mean.reshape(feature_map.shape),
            std=variance.sqrt().to(mean.dtype).reshape(feature_map.shape),
            sampling_error=(2 * members) ** -0.5 if members else 0.0,
            summed=not feature_map.aligned,
        )

    def directional(self, feature_map: FeatureMap, direction: Tensor) -> Gradient:
        """The derivative of one batch along a direction, shaped like the output."""
        reading = feature_map.along(direction)
        with unmixed(reading.features):
            q = self.form(reading.features)
        if q.ndim == 1:
            q = q[:, None]
        std = (self.scale.square().to(q) * q).sqrt().to(reading.output.dtype)  # (M, 1) or (M, K)
        return Gradient(reading.output, reading.output_layout.unrows(std))

    def _reverse_passes(self, feature_map: FeatureMap) -> int:
        """How many passes through the trunk reverse mode takes for a batch."""
        shared_features = feature_map.features.ndim == 2
        shared_gram = self.posterior.eigenvalues.ndim == 1
        targets = 1 if shared_features and shared_gram else len(self.scale)
        return feature_map.rows_per_sample * targets * self.posterior.width

    def _exact_projection(self) -> Projection:
        r"""Whitens features: $f \mapsto R f$ with $|R f|^2 = q$."""
        return _projection_by(self.posterior.factor.to(self.form.dtype))

    def _drawn_projection(self, members: int) -> Projection:
        r"""Draws $f \cdot \delta w / \sqrt n$: the sum of the squares of n draws estimates q."""
        factor = self.posterior.factor
        shape = (*factor.shape[:-2], members, factor.shape[-1])
        z = standard_normal(shape, factor.device, self.generator)
        drawn = z @ factor / members**0.5
        return _projection_by(drawn.to(self.form.dtype))


def _projection_by(factor: Tensor) -> Projection:
    """The product of features with the rows of (C, D), or of (T, C, D) with one per target."""

    def project(features: Tensor) -> Tensor:
        features = features.to(factor)
        if factor.ndim == 2:
            return features @ factor.mT
        if features.ndim == 2:
            return torch.einsum("md,tcd->mtc", features, factor)
        return torch.einsum("mtd,tcd->mtc", features, factor)

    return project


def with_directions(
    feature_maps: Iterable[FeatureMap], direction: Tensor
) -> Iterator[tuple[Tensor, FeatureMap]]:
    """Each batch's map, preceded by its rows of a direction.

    Args:
        feature_maps: The maps of consecutive batches.
        direction: One row per row of all inputs together, or one direction for all.

    Raises:
        ValueError: The direction does not have as many rows as the inputs.
    """
    share: RowShare | None = None
    direction = torch.as_tensor(direction, dtype=torch.float64)
    for feature_map in feature_maps:
        if share is None:
            has_rows = direction.ndim == feature_map.x.ndim and len(direction) > 1
            share = RowShare(direction, split=has_rows, name="The direction")
        yield share.next(len(feature_map.x)), feature_map
    if share is not None:
        share.check_used_up()
