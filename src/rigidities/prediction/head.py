r"""A head on frozen features: how the noise and the shape of the distribution follow the input.

For each target the inputs $\phi$ of the head are $\log q$, clipped to $\pm 4$, the prediction,
clipped to its training range, the prediction's square, and the features, clipped to $\pm 6$. All
are standardised on training rows (`Inputs`). One product gives $h = a + w \cdot \phi$, the
logarithm of the noise variance, clipped to the range of its fitted values, and $\theta = c + W
\phi$, the tilt of the distribution, clipped to $\pm 3$ (`Head`). The squared scale of the
distribution is $e^h$ plus a multiple of q. Beyond the training rows a guard (`prediction.guards`)
widens it and lets the tilt fade.

`Head` is what calibration fits and files store. Predictions use a `HeadForm`: head, guard and
distribution folded into as few operations as possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .distribution import Distribution, Tilted
from .guards import GROWTH, POWER, SPAN, Guard, IgnoranceGuard, RigidityGuard, unfamiliarity

FAR_Q = 4.0
"""Standardised log q is clipped to plus and minus this."""
FAR = 6.0
"""Standardised features are clipped to plus and minus this."""
STEEPEST = 3.0
"""Tilts are clipped to plus and minus this."""


@dataclass(frozen=True)
class Inputs:
    """How the inputs of one target's head are standardised.

    Attributes:
        rigidity: Centre and spread of log q, (2,).
        output: Lowest, highest, centre and spread of the predictions, and the mean square of the
            standardised predictions, (5,).
        centre: Means of the features, (D,).
        spread: Standard deviations of the features, (D,); infinite where one is constant.
    """

    rigidity: Tensor
    output: Tensor
    centre: Tensor
    spread: Tensor

    @classmethod
    def of(cls, q: Tensor, mean: Tensor, features: Tensor) -> Inputs:
        """The standardisation by training rows, all float64.

        Args:
            q: Unscaled variances above zero, (m,). There may be none.
            mean: Predictions, (n,).
            features: Features, (n, D).
        """
        rigidity = q.new_tensor([0.0, math.inf])
        if len(q):
            log_q = q.log()
            rigidity = torch.stack([log_q.mean(), column_spread(log_q)])
        centre = mean.mean()
        spread = column_spread(mean)
        mean_square = ((mean - centre) / spread).square().mean()
        output = torch.stack([mean.min(), mean.max(), centre, spread, mean_square])
        return cls(rigidity, output, features.mean(0), column_spread(features))

    def __call__(self, q: Tensor, mean: Tensor, features: Tensor) -> Tensor:
        """The standardised inputs of rows, (n, 3 + D)."""
        return torch.cat([self.besides_features(q, mean), self.standardised(features)], -1)

    def besides_features(self, q: Tensor, mean: Tensor) -> Tensor:
        """The inputs that are not features: log q, the prediction and its square, (n, 3)."""
        q_centre, q_spread = self.rigidity
        low, high, mean_centre, mean_spread, mean_square = self.output
        # q may be zero. Its logarithm is then clipped to the lower end.
        far = FAR_Q * _zero_if_infinite(q_spread)
        standard_q = (q.log().clamp(q_centre - far, q_centre + far) - q_centre) / q_spread
        standard_mean = (mean.clamp(low, high) - mean_centre) / mean_spread
        return torch.stack([standard_q, standard_mean, standard_mean.square() - mean_square], -1)

    def standardised(self, features: Tensor) -> Tensor:
        """Features (n, D), in units of their spread and clipped."""
        return ((features - self.centre) / self.spread).clamp(-FAR, FAR)


def column_spread(values: Tensor) -> Tensor:
    """The standard deviation of columns; infinite where they are constant up to rounding."""
    spread = values.std(0, correction=0)
    size = values.abs().amax(0)
    return torch.where(spread > 5e-7 * size, spread, math.inf)


@dataclass(frozen=True)
class Head:
    """The fitted heads of K targets; files store its tensors under these names.

    Attributes:
        rigidity: Centre and spread of log q, (K, 2); see `Inputs`.
        output: Range and standardisation of the predictions, (K, 5); see `Inputs`.
        centre: Means of the features, (D,), or (K, D) where each target has features of its own.
        spread: Standard deviations of the features, likewise.
        weight: Weights of the inputs, (K, 3 + D, 1 + J): w, then W. J is 8, or 0 without a tilt.
        constant: What is added to the product, (K, 1 + J): a, then c.
        bounds: Least and largest h, (K, 2).
        scale2: Factor of q in the distribution's squared scale, (K,).
    """

    rigidity: Tensor
    output: Tensor
    centre: Tensor
    spread: Tensor
    weight: Tensor
    constant: Tensor
    bounds: Tensor
    scale2: Tensor

    @classmethod
    def of(
        cls,
        inputs: Sequence[Inputs],
        weights: Sequence[Tensor],
        constants: Sequence[Tensor],
        bounds: Sequence[Tensor],
        scales2: Sequence[Tensor],
        *,
        shared: bool,
    ) -> Head:
        """The heads of several targets as one.

        Args:
            inputs: How each target's inputs are standardised.
            weights: Weights of each target, (3 + D, 1 + J).
            constants: Constants of each target, (1 + J,).
            bounds: Bounds of h of each target, (2,).
            scales2: Factor of q of each target.
            shared: Whether all targets have the same features and standardise them in the same way.
        """
        if shared:
            centre = inputs[0].centre
            spread = inputs[0].spread
        else:
            centre = torch.stack([target_inputs.centre for target_inputs in inputs])
            spread = torch.stack([target_inputs.spread for target_inputs in inputs])
        return cls(
            rigidity=torch.stack([target_inputs.rigidity for target_inputs in inputs]),
            output=torch.stack([target_inputs.output for target_inputs in inputs]),
            centre=centre,
            spread=spread,
            weight=torch.stack(list(weights)),
            constant=torch.stack(list(constants)),
            bounds=torch.stack(list(bounds)),
            scale2=torch.stack(list(scales2)),
        )

    def to(self, device: torch.device) -> Head:
        """The same head on another device."""
        return Head(**{name: tensor.to(device) for name, tensor in self.tensors().items()})

    @property
    def targets(self) -> int:
        """Number of targets K."""
        return len(self.constant)

    def tensors(self) -> dict[str, Tensor]:
        """The fields by name, for files."""
        return dict(vars(self))


class HeadForm(NamedTuple):
    r"""A head, its guard and its distribution folded for speed: plain tensors in one precision.

    Inside, a quantity such as q is (M, 1) for one target, and (M, K, 1) for several, so that it
    broadcasts against the tensors below. Their shapes are given for K targets; for one target the
    dimension K is missing. J is the number of tilts, 8 or 0.

    Attributes:
        lowest: Features below this are clipped to it, (D,), or (K, D) where targets have features
            of their own.
        highest: Features above this are clipped to it, (D,) or (K, D).
        weight: Weights of the features, (D, K (1 + J)), or (K, D, 1 + J) where targets have
            features of their own.
        constant: Constants that are added to the features' product, (K (1 + J),), or
            (K, 1, 1 + J).
        q_rate: Factor of log q in the standardised log q, (K, 1).
        q_shift: Constant in the standardised log q, (K, 1).
        mean_rate: Factor of the prediction in the standardised prediction, (K, 1).
        mean_shift: Constant in the standardised prediction, (K, 1).
        mean_low: Standardised predictions below this are clipped to it, (K, 1).
        mean_high: Standardised predictions above this are clipped to it, (K, 1).
        by_q: Weights of the standardised log q, (K, 1 + J).
        by_mean: Weights of the standardised prediction, (K, 1 + J).
        by_square: Weights of the square of the standardised prediction, (K, 1 + J).
        low: The least h and tilts, (K, 1 + J).
        high: The largest h and tilts, (K, 1 + J).
        scale2: Factor of q in the distribution's squared scale, (K, 1).
        guard_rate: $1 / q_{ref}$ of the guard, (K, 1); zero without one.
        growth: $\alpha_g^2 q_{ref}$ of a `RigidityGuard`, (K, 1); of shape (0,) without one.
        ignorant_level: $\tau v$ of an `IgnoranceGuard`, (K, 1); of shape (0,) without one.
        distance_rate: $\sqrt\tau$ of an `IgnoranceGuard`, (K, 1); of shape (0,) without one.
        distance_shift: $-\sqrt\tau c$ of an `IgnoranceGuard`, (K, 1); of shape (0,) without one.
        distance_weight: $\sqrt\tau w$ of an `IgnoranceGuard`, (D, K), or (K, D) where targets have
            features of their own; of shape (0,) where the forecast is the same for all rows.
        extent_weight: Weights of the features that give the extent, (D, K) or (K, D); of shape
            (0,) where the extent is one.
        ramp_rate: Factor of log q in the ramp t of an `IgnoranceGuard`, (K, 1); of shape (0,)
            without one.
        ramp_shift: Constant in that ramp, (K, 1); of shape (0,) without one.
        basis: The cosines of the tilt at 64 midpoints, (J, 64).
        second: Without a tilt the distribution's second moment, (K, 1). With a tilt the numbers at
            the midpoints that stand for $z^2$, (64, 1), or (K, 64) where the degrees of freedom
            differ; see `cosine_tilt.moment_values`.
    """

    lowest: Tensor
    highest: Tensor
    weight: Tensor
    constant: Tensor
    q_rate: Tensor
    q_shift: Tensor
    mean_rate: Tensor
    mean_shift: Tensor
    mean_low: Tensor
    mean_high: Tensor
    by_q: Tensor
    by_mean: Tensor
    by_square: Tensor
    low: Tensor
    high: Tensor
    scale2: Tensor
    guard_rate: Tensor
    growth: Tensor
    ignorant_level: Tensor
    distance_rate: Tensor
    distance_shift: Tensor
    distance_weight: Tensor
    extent_weight: Tensor
    ramp_rate: Tensor
    ramp_shift: Tensor
    basis: Tensor
    second: Tensor

    @classmethod
    def of(
        cls, head: Head, guard: Guard | None, distribution: Distribution, dtype: torch.dtype
    ) -> HeadForm:
        """Fold a head, its guard and its distribution, in float64; then convert to `dtype`.

        Standardisation goes into weights and constants: $w (x - c) / s = (w / s) x - (w / s) c$.
        """
        targets, terms = head.constant.shape
        own_features = head.centre.ndim == 2 and targets > 1
        centre = head.centre
        spread = head.spread
        if centre.ndim == 2 and targets == 1:
            centre = centre[0]
            spread = spread[0]
        # A last column of ones has the weight zero and is left out, since callers may leave it out
        # too. A last column of counts may also be constant among the training rows; it stays where
        # the guard reads it.
        width = centre.shape[-1]
        guard_reads_last = isinstance(guard, IgnoranceGuard) and bool(
            guard.extent_weight[:, width - 1 :].any()
        )
        if bool(spread[..., -1:].isinf().all()) and not guard_reads_last:
            width -= 1

        # The features.
        weight = (head.weight[:, 3:].mT / spread.unsqueeze(-2)).mT  # (K, D, 1 + J)
        shift = centre.expand(weight.shape[:2])[:, None] @ weight
        by_q, by_mean, by_square = head.weight[:, :3].unbind(1)  # (K, 1 + J) each
        constant = head.constant - shift[:, 0] - head.output[:, 4:] * by_square
        weight = weight[:, :width]
        if own_features:
            constant = constant[:, None]  # (K, 1, 1 + J)
        else:
            weight = weight.movedim(0, 1).flatten(1)  # (D, K (1 + J))
            constant = constant.flatten()
        largest_deviation = FAR * _zero_if_infinite(spread)

        # log q and the prediction.
        q_rate, q_centre, by_q = _standardised(head.rigidity[:, 1:], head.rigidity[:, :1], by_q)
        lowest_mean, highest_mean, mean_centre, mean_spread = head.output[:, :4, None].unbind(1)
        mean_is_constant = mean_spread.isinf()  # (K, 1)
        mean_rate, mean_centre, by_mean = _standardised(mean_spread, mean_centre, by_mean)
        mean_low = torch.where(mean_is_constant, 0.0, (lowest_mean - mean_centre) * mean_rate)
        mean_high = torch.where(mean_is_constant, 0.0, (highest_mean - mean_centre) * mean_rate)
        by_square = torch.where(mean_is_constant, 0.0, by_square)

        steepest = torch.full_like(head.constant[:, 1:], STEEPEST)
        basis, second = _second_moment(distribution, terms - 1, targets, head.constant.device)

        def by_target(values: Tensor) -> Tensor:
            """Values of the targets (K, n), in the shape that predictions broadcast against."""
            return values if targets > 1 else values[0]

        guard_fields = _folded_guard(
            guard, by_target, width, own_features=own_features, like=q_rate
        )
        form = cls(
            lowest=(centre - largest_deviation)[..., :width],
            highest=(centre + largest_deviation)[..., :width],
            weight=weight,
            constant=constant,
            q_rate=by_target(q_rate),
            q_shift=by_target(-q_centre * q_rate),
            mean_rate=by_target(mean_rate),
            mean_shift=by_target(-mean_centre * mean_rate),
            mean_low=by_target(mean_low),
            mean_high=by_target(mean_high),
            by_q=by_target(by_q),
            by_mean=by_target(by_mean),
            by_square=by_target(by_square),
            low=by_target(torch.cat([head.bounds[:, :1], -steepest], 1)),
            high=by_target(torch.cat([head.bounds[:, 1:], steepest], 1)),
            scale2=by_target(head.scale2[:, None]),
            guard_rate=guard_fields["guard_rate"],
            growth=guard_fields["growth"],
            ignorant_level=guard_fields["ignorant_level"],
            distance_rate=guard_fields["distance_rate"],
            distance_shift=guard_fields["distance_shift"],
            distance_weight=guard_fields["distance_weight"],
            extent_weight=guard_fields["extent_weight"],
            ramp_rate=guard_fields["ramp_rate"],
            ramp_shift=guard_fields["ramp_shift"],
            basis=basis,
            second=second if terms > 1 else by_target(second),
        )
        return cls(*(tensor.to(dtype).contiguous() for tensor in form))

    def __call__(
        self, q: Tensor, mean: Tensor, features: Tensor, factor: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Squared scale, second moment and tilt of the distributions of M rows.

        Args:
            q: Unscaled variances, (M, 1 or K).
            mean: Predictions, (M, K).
            features: Features, (M, D), or (M, K, D) where each target has its own. Columns beyond
                D are ignored.
            factor: Factor of each row's noise variance, (M, 1 or K), if there is one.

        Returns:
            The distribution's squared scale, (M, K); its second moment in units of that scale,
            (M, K), or (K,) without a tilt; its tilt, (M, K, J).
        """
        one_target = self.scale2.ndim == 1
        dtype = self.scale2.dtype
        q = q.to(dtype)
        mean = mean.to(dtype)
        features = features.to(dtype)
        if not one_target:
            q = q.unsqueeze(-1)
            mean = mean.unsqueeze(-1)
        elif features.ndim == 3:
            features = features.squeeze(1)
        width = self.lowest.shape[-1]
        if features.shape[-1] != width:
            features = features[..., :width]
        h_and_tilt = self._linear(features)  # (M, 1 + J), or (M, K, 1 + J)

        # Add the terms of log q and of the prediction to h and the tilts. q may be zero: its
        # logarithm is then clipped to the lower end.
        log_q = q.log()
        standard_q = torch.addcmul(self.q_shift, log_q, self.q_rate).clamp(-FAR_Q, FAR_Q)
        standard_mean = torch.addcmul(self.mean_shift, mean, self.mean_rate)
        standard_mean = torch.clamp(standard_mean, self.mean_low, self.mean_high)
        mean_slope = torch.addcmul(self.by_mean, standard_mean, self.by_square)
        h_and_tilt = torch.addcmul(h_and_tilt, standard_q, self.by_q)
        h_and_tilt = torch.addcmul(h_and_tilt, standard_mean, mean_slope)
        h_and_tilt = torch.clamp(h_and_tilt, self.low, self.high)

        noise_variance = h_and_tilt[..., :1].exp()
        if factor is not None:
            factor = factor.to(dtype)
            noise_variance = noise_variance * (factor if one_target else factor.unsqueeze(-1))
        squared_scale = torch.addcmul(noise_variance, self.scale2, q)

        # The guard.
        if self.extent_weight.numel():
            q = unfamiliarity(q, self._summed(features, self.extent_weight))
            log_q = q.log()
        beyond = (q * self.guard_rate).clamp(min=1)
        if self.growth.numel():
            squared_scale = torch.addcmul(squared_scale, self.growth, beyond**GROWTH - 1)
        if self.ignorant_level.numel():
            squared_scale = self._widened(squared_scale, log_q, mean, features)
        tilt = h_and_tilt[..., 1:] / beyond

        second = self._second(tilt) if tilt.shape[-1] else self.second
        if one_target:
            return squared_scale, second, tilt.unsqueeze(1)
        return squared_scale.squeeze(-1), second.squeeze(-1), tilt

    def _linear(self, features: Tensor) -> Tensor:
        """The constants, plus what features add to h and tilt: (M, 1 + J), or (M, K, 1 + J)."""
        clipped = torch.clamp(features, self.lowest, self.highest)
        if clipped.ndim == 3:
            by_target = torch.baddbmm(self.constant, clipped.transpose(0, 1), self.weight)
            return by_target.transpose(0, 1)
        product = torch.addmm(self.constant, clipped, self.weight)
        return product if self.scale2.ndim == 1 else product.view(-1, *self.low.shape)

    def _widened(
        self, squared_scale: Tensor, log_q: Tensor, mean: Tensor, features: Tensor
    ) -> Tensor:
        """The squared scale beyond the training rows; see `IgnoranceGuard.widened`."""
        distance = torch.addcmul(self.distance_shift, mean, self.distance_rate)
        if self.distance_weight.numel():
            distance = distance - self._summed(features, self.distance_weight)
        level = torch.addcmul(self.ignorant_level, distance, distance)
        share = torch.addcmul(self.ramp_shift, log_q, self.ramp_rate).clamp(0, 1) ** POWER
        return squared_scale * (level / squared_scale).clamp(min=1) ** share

    def _summed(self, features: Tensor, weight: Tensor) -> Tensor:
        """Features times weights (D, K) or (K, D), summed: (M, 1) or (M, K, 1)."""
        if features.ndim == 3:
            return (features * weight).sum(-1, keepdim=True)
        summed = features @ weight
        return summed if self.scale2.ndim == 1 else summed.unsqueeze(-1)

    def _second(self, tilt: Tensor) -> Tensor:
        """The second moments of tilted distributions, (M, 1) or (M, K, 1)."""
        shares = (tilt @ self.basis).softmax(-1)
        if self.second.shape[-1] == 1:
            return shares @ self.second
        # A sum, not a product of matrices: onnxruntime does not broadcast one over no rows.
        return (shares * self.second).sum(-1, keepdim=True)


def _standardised(spread: Tensor, centre: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rate and centre, (K, 1), and weights, (K, 1 + J), of one input.

    A constant input has the weight zero. Its rate is one: times zero, the logarithm of a zero q
    would be NaN.
    """
    is_constant = spread.isinf()
    rate = torch.where(is_constant, 1.0, 1 / spread)
    centre = torch.where(is_constant, 0.0, centre)
    weight = torch.where(is_constant, 0.0, weight)
    return rate, centre, weight


def _folded_guard(
    guard: Guard | None,
    by_target: Callable[[Tensor], Tensor],
    width: int,
    *,
    own_features: bool,
    like: Tensor,
) -> dict[str, Tensor]:
    """The fields of a form that a guard fills, float64; empty tensors where it has none.

    Args:
        guard: The guard, if there is one.
        by_target: Gives values of the targets, (K, n), the shape that the form wants.
        width: Number of features.
        own_features: Whether each target has features of its own.
        like: A tensor (K, 1) on the device of the others.
    """
    empty = like.new_zeros(0)
    fields = {
        "guard_rate": by_target(torch.zeros_like(like)),
        "growth": empty,
        "ignorant_level": empty,
        "distance_rate": empty,
        "distance_shift": empty,
        "distance_weight": empty,
        "extent_weight": empty,
        "ramp_rate": empty,
        "ramp_shift": empty,
    }
    if guard is None:
        return fields
    reference = guard.reference[:, None]
    fields["guard_rate"] = by_target(1 / reference)
    if isinstance(guard, RigidityGuard):
        fields["growth"] = by_target(guard.scale2[:, None] * reference)
        return fields
    factor = guard.factor[:, None]
    fields["ignorant_level"] = by_target(factor * guard.variance[:, None])
    fields["distance_rate"] = by_target(factor.sqrt())
    fields["distance_shift"] = by_target(-factor.sqrt() * guard.centre[:, None])
    fields["ramp_rate"] = by_target(torch.full_like(like, 1 / math.log(SPAN)))
    fields["ramp_shift"] = by_target(-reference.log() / math.log(SPAN))
    if guard.by_feature.numel():
        distance_weight = (factor.sqrt() * guard.by_feature)[:, :width]  # (K, D)
        extent_weight = guard.extent_weight[:, :width]
        if not own_features:
            distance_weight = distance_weight.mT  # (D, K)
            extent_weight = extent_weight.mT
        fields["distance_weight"] = distance_weight
        fields["extent_weight"] = extent_weight
    return fields


def _second_moment(
    distribution: Distribution, tilts: int, targets: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The fields `basis` and `second` of a form, float64."""
    if tilts > 0:
        assert isinstance(distribution, Tilted)
        rule = distribution.rule(torch.float64, device)
        values = rule.values[..., 1]  # (degrees of freedom, 64)
        return rule.basis, values.mT if len(values) == 1 else values
    second = torch.as_tensor(distribution.second, dtype=torch.float64).to(device)
    return second.new_zeros(0, 64), second.expand(targets)[:, None]


def _zero_if_infinite(spread: Tensor) -> Tensor:
    """The spread, or zero where it is infinite."""
    return torch.where(spread.isfinite(), spread, 0.0)
