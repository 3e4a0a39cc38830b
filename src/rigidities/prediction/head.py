r"""A head on frozen features: how noise and shape of the distribution follow the input.

For each target, with inputs $\phi$ standardised on training rows (log q clipped to $\pm 4$; the
prediction, kept within its training range, and its square; the features clipped to $\pm 6$), one
product gives $h = a + w \cdot \phi$, the logarithm of the noise, kept within the range of its
fitted values, and $\theta = c + W \phi$, the tilt of the distribution, kept within $\pm 3$. Beyond
the training rows the guard (`prediction.guards`) takes over: it widens the bars and lets the tilt
fade.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .distribution import Distribution, Tilted
from .guards import GROWTH, POWER, SPAN, Guard, IgnoranceGuard, RigidityGuard, unfamiliarity

FAR_Q, FAR, STEEPEST = 4.0, 6.0, 3.0


@dataclass(frozen=True)
class Inputs:
    """How one target's inputs are standardised.

    Attributes:
        rigidity: centre and spread of log q.
        output: lowest, highest, centre, spread of the predictions, and the mean of their squares
            once standardised.
        centre: of the features, (D,).
        spread: of the features; infinite where one is constant.
    """

    rigidity: Tensor
    output: Tensor
    centre: Tensor
    spread: Tensor

    @classmethod
    def of(cls, q: Tensor, mean: Tensor, features: Tensor) -> Inputs:
        """From training rows: q above zero (m,), predictions (n,) and features (n, D), float64."""
        rigidity = q.new_tensor([0.0, math.inf])
        if len(q):
            rigidity = torch.stack([q.log().mean(), column_spread(q.log())])
        centre, spread = mean.mean(), column_spread(mean)
        square = ((mean - centre) / spread).square().mean()
        output = torch.stack([mean.min(), mean.max(), centre, spread, square])
        return cls(rigidity, output, features.mean(0), column_spread(features))

    def __call__(self, q: Tensor, mean: Tensor, features: Tensor) -> Tensor:
        """(n, 3 + D)."""
        return torch.cat([self.first(q, mean), self.standardised(features)], -1)

    def first(self, q: Tensor, mean: Tensor) -> Tensor:
        """The inputs that are no features: log q, the prediction and its square, (n, 3)."""
        low, high, centre, spread, square = self.output
        middle, far = self.rigidity[0], FAR_Q * _finite(self.rigidity[1])
        # q may be zero, and its logarithm then lies at the lower end
        a = (q.log().clamp(middle - far, middle + far) - middle) / self.rigidity[1]
        b = (mean.clamp(low, high) - centre) / spread
        return torch.stack([a, b, b.square() - square], -1)

    def standardised(self, features: Tensor) -> Tensor:
        """Features (n, D), in units of their spread and clipped."""
        return ((features - self.centre) / self.spread).clamp(-FAR, FAR)


def column_spread(values: Tensor) -> Tensor:
    """The standard deviation of columns; infinite where they are constant."""
    spread, size = values.std(0, correction=0), values.abs().amax(0)
    return torch.where(spread > 5e-7 * size, spread, math.inf)


@dataclass(frozen=True)
class Head:
    """Of K targets; the tensors stand for files too.

    Attributes:
        rigidity: (K, 2), see `Inputs`.
        output: (K, 5).
        centre: (D,), or (K, D) where targets have features of their own.
        spread: likewise.
        weight: (K, 3 + D, 1 + J): w, then W; J = 0 without a tilt.
        constant: (K, 1 + J).
        bounds: of h, (K, 2).
        scale2: of q in the distribution's squared scale, (K,).
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
    def of(cls, inputs: Sequence[Inputs], *own: Sequence[Tensor], shared: bool) -> Head:
        """Of the targets' inputs, then weight, constant, bounds and scale2 of each.

        `shared` says whether all have the same features, which are then standardised alike.
        """
        columns = zip(*(vars(one).values() for one in inputs), strict=True)
        head = cls(*(torch.stack(list(values)) for values in (*columns, *own)))
        first = inputs[0]
        return replace(head, centre=first.centre, spread=first.spread) if shared else head

    def to(self, device: torch.device) -> Head:
        """The same on another device."""
        return Head(*(tensor.to(device) for tensor in vars(self).values()))

    @property
    def targets(self) -> int:
        """K."""
        return len(self.constant)

    def tensors(self) -> dict[str, Tensor]:
        """For files."""
        return dict(vars(self))


class HeadForm(NamedTuple):
    r"""A head, its guard and its distribution folded for speed: plain tensors in one precision.

    A number that each row has, q say, is (M, 1) for one target, and one that each row and target
    has is (M, K, 1) for several. So it broadcasts against what belongs to the targets, whose shapes
    are given below for K of them; for one target they lack the K. J is the number of tilts, 8 or 0.

    Attributes:
        lowest: Features below it are clipped to it, (D,), or (K, D) for features of their own.
        highest: Features above it are clipped to it, (D,) or (K, D).
        weight: Weights of the features, (D, K (1 + J)), or (K, D, 1 + J) for features of their own.
        constant: What is added to their product, (K (1 + J),), or (K, 1, 1 + J).
        q_rate: Factor that standardises log q, (K, 1).
        q_shift: What is added then, (K, 1).
        mean_rate: Factor that standardises the prediction, (K, 1).
        mean_shift: What is added then, (K, 1).
        mean_low: The least standardised prediction, to which others are clipped, (K, 1).
        mean_high: The largest one, (K, 1).
        by_q: Weights of the standardised log q, (K, 1 + J).
        by_mean: Weights of the standardised prediction, (K, 1 + J).
        by_square: Weights of its square, (K, 1 + J).
        low: The least h and tilts, (K, 1 + J).
        high: The largest ones, (K, 1 + J).
        scale2: Factor of q in the distribution's squared scale, (K, 1).
        guard_rate: $1 / q_{ref}$ of the guard, (K, 1); zero without one.
        growth: $\alpha_g^2 q_{ref}$ of a `RigidityGuard`, (K, 1); of shape (0,) without one.
        ignorant_level: $\tau v$ of an `IgnoranceGuard`, (K, 1); of shape (0,) without one.
        distance_rate: $\sqrt\tau$ of an `IgnoranceGuard`, (K, 1).
        distance_shift: $-\sqrt\tau c$ of an `IgnoranceGuard`, (K, 1).
        distance_weight: Weights of the features in that shift, (D, K), or (K, D) for features of
            their own; of shape (0,) where the shift is the same for all rows.
        extent_weight: Weights of the features that give the extent, (D, K) or (K, D); of shape
            (0,) where it is one.
        ramp_rate: Factor of log q in the guard's exponent, (K, 1).
        ramp_shift: What is added then, (K, 1).
        basis: The basis of the tilt at 64 midpoints, (J, 64).
        second: The distribution's second moment, (K, 1); of a tilted distribution what stands for
            $z^2$ at the midpoints, (64, 1), or (K, 64) where the degrees of freedom differ.
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
        """Standardisation goes into weights and constant, in float64."""
        targets, terms = head.constant.shape
        own_features = head.centre.ndim == 2 and targets > 1
        centre, spread = head.centre, head.spread
        if centre.ndim == 2 and targets == 1:
            centre, spread = centre[0], spread[0]
        # A last column of ones, which may be left out, has the weight zero. A column of counts may
        # be constant among the training rows, but is looked at by a guard.
        width = centre.shape[-1] - bool(spread[..., -1:].isinf().all())
        if isinstance(guard, IgnoranceGuard) and bool(guard.extent_weight[:, width:].any()):
            width = centre.shape[-1]

        weight = (head.weight[:, 3:].mT / spread.unsqueeze(-2)).mT  # (K, D, 1 + J)
        shift = centre.expand(weight.shape[:2])[:, None] @ weight
        by_q, by_mean, by_square = head.weight[:, :3].unbind(1)  # (K, 1 + J) each
        constant = head.constant - shift[:, 0] - head.output[:, 4:] * by_square
        weight = weight[:, :width]
        if not own_features:
            weight, constant = weight.movedim(0, 1).flatten(1), constant.flatten()
        else:
            constant = constant[:, None]

        q_rate, q_centre, by_q = _standardised(head.rigidity[:, 1:], head.rigidity[:, :1], by_q)
        least, most, middle, size = head.output[:, :4, None].unbind(1)  # (K, 1) each
        constant_mean = size.isinf()
        mean_rate, middle, by_mean = _standardised(size, middle, by_mean)
        by_square = torch.where(constant_mean, 0.0, by_square)
        away = FAR * _finite(spread)
        steepest = torch.full_like(head.constant[:, 1:], STEEPEST)
        basis, second = _second_moment(distribution, terms - 1, targets, head.constant.device)

        def each(part: Tensor) -> Tensor:
            """Of each target (K, n), in the shape that single predictions broadcast against."""
            return part if targets > 1 else part[0]

        form = cls(
            lowest=(centre - away)[..., :width],
            highest=(centre + away)[..., :width],
            weight=weight,
            constant=constant,
            q_rate=each(q_rate),
            q_shift=each(-q_centre * q_rate),
            mean_rate=each(mean_rate),
            mean_shift=each(-middle * mean_rate),
            mean_low=each(torch.where(constant_mean, 0.0, (least - middle) * mean_rate)),
            mean_high=each(torch.where(constant_mean, 0.0, (most - middle) * mean_rate)),
            by_q=each(by_q),
            by_mean=each(by_mean),
            by_square=each(by_square),
            low=each(torch.cat([head.bounds[:, :1], -steepest], 1)),
            high=each(torch.cat([head.bounds[:, 1:], steepest], 1)),
            scale2=each(head.scale2[:, None]),
            **_folded_guard(guard, each, width, own_features=own_features, like=q_rate),
            basis=basis,
            second=second if terms > 1 else each(second),
        )
        return cls(*(part.to(dtype).contiguous() for part in form))

    def __call__(
        self, q: Tensor, mean: Tensor, features: Tensor, factor: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Squared scale (M, K) of the distribution, its second moment in these units, and tilt (M,
        K, J).

        The second moment is (M, K), or (K,) where there is no tilt.

        Args:
            q: unscaled variances, (M, 1 or K).
            mean: predictions, (M, K).
            features: (M, D), or (M, K, D) for features of their own; columns beyond D are ignored.
            factor: by which the noise of each row is multiplied, (M, 1 or K), if it is.
        """
        one_target = self.scale2.ndim == 1
        dtype = self.scale2.dtype
        q, mean, features = q.to(dtype), mean.to(dtype), features.to(dtype)
        if not one_target:
            q, mean = q.unsqueeze(-1), mean.unsqueeze(-1)
        elif features.ndim == 3:
            features = features.squeeze(1)
        width = self.lowest.shape[-1]
        if features.shape[-1] != width:
            features = features[..., :width]
        both = self._linear(features)

        # What log q and the prediction say of h and of the tilts. q may be zero, and its logarithm
        # then lies at the lower end.
        log_q = q.log()
        a = torch.addcmul(self.q_shift, log_q, self.q_rate).clamp(-FAR_Q, FAR_Q)
        b = torch.addcmul(self.mean_shift, mean, self.mean_rate)
        b = torch.clamp(b, self.mean_low, self.mean_high)
        both = torch.addcmul(both, a, self.by_q)
        both = torch.addcmul(both, b, torch.addcmul(self.by_mean, b, self.by_square))
        both = torch.clamp(both, self.low, self.high)

        noise = both[..., :1].exp()
        if factor is not None:
            factor = factor.to(dtype)
            noise = noise * (factor if one_target else factor.unsqueeze(-1))
        squared = torch.addcmul(noise, self.scale2, q)
        if self.extent_weight.numel():
            q = unfamiliarity(q, self._summed(features, self.extent_weight))
            log_q = q.log()
        beyond = (q * self.guard_rate).clamp(min=1)
        if self.growth.numel():
            squared = torch.addcmul(squared, self.growth, beyond**GROWTH - 1)
        if self.ignorant_level.numel():
            squared = self._widened(squared, log_q, mean, features)
        tilt = both[..., 1:] / beyond
        second = self._second(tilt) if tilt.shape[-1] else self.second
        if one_target:
            return squared, second, tilt.unsqueeze(1)
        return squared.squeeze(-1), second.squeeze(-1), tilt

    def _linear(self, features: Tensor) -> Tensor:
        """Constants and what features add to h and tilt: (M, 1 + J), or (M, K, 1 + J)."""
        clipped = torch.clamp(features, self.lowest, self.highest)
        if clipped.ndim == 3:
            each = torch.baddbmm(self.constant, clipped.transpose(0, 1), self.weight)
            return each.transpose(0, 1)
        both = torch.addmm(self.constant, clipped, self.weight)
        return both if self.scale2.ndim == 1 else both.view(-1, *self.low.shape)

    def _widened(self, squared: Tensor, log_q: Tensor, mean: Tensor, features: Tensor) -> Tensor:
        """The squared scale beyond the training rows, by the rule of `IgnoranceGuard`."""
        distance = torch.addcmul(self.distance_shift, mean, self.distance_rate)
        if self.distance_weight.numel():
            distance = distance - self._summed(features, self.distance_weight)
        level = torch.addcmul(self.ignorant_level, distance, distance)
        share = torch.addcmul(self.ramp_shift, log_q, self.ramp_rate).clamp(0, 1) ** POWER
        return squared * (level / squared).clamp(min=1) ** share

    def _summed(self, features: Tensor, weight: Tensor) -> Tensor:
        """Features times weights (D, K) or (K, D), summed: (M, 1) or (M, K, 1)."""
        if features.ndim == 3:
            return (features * weight).sum(-1, keepdim=True)
        summed = features @ weight
        return summed if self.scale2.ndim == 1 else summed.unsqueeze(-1)

    def _second(self, tilt: Tensor) -> Tensor:
        """The second moments of tilted distributions, (M, 1) or (M, K, 1)."""
        share = (tilt @ self.basis).softmax(-1)
        if self.second.shape[-1] == 1:
            return share @ self.second
        # A sum, not a product of matrices: onnxruntime does not broadcast one over no rows.
        return (share * self.second).sum(-1, keepdim=True)


def _standardised(spread: Tensor, centre: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rate, centre (K, 1) and weights (K, 1 + J) of an input; without weight where it is constant.

    The rate of a constant input is one: times zero, the logarithm of zero would be NaN.
    """
    constant = spread.isinf()
    rate = torch.where(constant, 1.0, 1 / spread)
    return rate, torch.where(constant, 0.0, centre), torch.where(constant, 0.0, weight)


def _folded_guard(
    guard: Guard | None,
    each: Callable[[Tensor], Tensor],
    width: int,
    *,
    own_features: bool,
    like: Tensor,
) -> dict[str, Tensor]:
    """The fields of a form that a guard fills, float64.

    Args:
        guard: if there is one.
        each: gives a part of each target (K, n) the shape that the form wants.
        width: number of features.
        own_features: whether each target has features of its own.
        like: a tensor (K, 1) on the device of the others.
    """
    nothing = like.new_zeros(0)
    fields = {
        "guard_rate": each(torch.zeros_like(like)),
        "growth": nothing,
        "ignorant_level": nothing,
        "distance_rate": nothing,
        "distance_shift": nothing,
        "distance_weight": nothing,
        "extent_weight": nothing,
        "ramp_rate": nothing,
        "ramp_shift": nothing,
    }
    if guard is None:
        return fields
    reference = guard.reference[:, None]
    fields["guard_rate"] = each(1 / reference)
    if isinstance(guard, RigidityGuard):
        fields["growth"] = each(guard.scale2[:, None] * reference)
        return fields
    factor = guard.factor[:, None]
    fields["ignorant_level"] = each(factor * guard.variance[:, None])
    fields["distance_rate"] = each(factor.sqrt())
    fields["distance_shift"] = each(-factor.sqrt() * guard.centre[:, None])
    fields["ramp_rate"] = each(torch.full_like(like, 1 / math.log(SPAN)))
    fields["ramp_shift"] = each(-reference.log() / math.log(SPAN))
    if guard.by_feature.numel():
        distance_weight = (factor.sqrt() * guard.by_feature)[:, :width]  # (K, D)
        extent_weight = guard.extent_weight[:, :width]
        if not own_features:
            distance_weight, extent_weight = distance_weight.mT, extent_weight.mT
        fields["distance_weight"] = distance_weight
        fields["extent_weight"] = extent_weight
    return fields


def _second_moment(
    distribution: Distribution, tilts: int, targets: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The fields `basis` and `second` of a form, float64."""
    if tilts:
        assert isinstance(distribution, Tilted)
        rule = distribution.rule(torch.float64, device)
        values = rule.values[..., 1]  # (degrees of freedom, 64)
        return rule.basis, values.mT if len(values) == 1 else values
    second = torch.as_tensor(distribution.second, dtype=torch.float64).to(device)
    return second.new_zeros(0, 64), second.expand(targets)[:, None]


def _finite(spread: Tensor) -> Tensor:
    """Zero where it is infinite."""
    return torch.where(spread.isfinite(), spread, 0.0)
