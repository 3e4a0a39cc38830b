r"""A head on frozen features: how the noise and the shape of the distribution follow the input.

For each target the inputs $\phi$ of the head are $\log q$, clipped to $\pm 4$, the prediction,
clipped to its training range, the prediction's square, and the features, clipped to $\pm 6$. All
are standardised on training rows (`Inputs`). One product gives $h = a + w \cdot \phi$, the
logarithm of the noise variance, clipped to the range of its fitted values, and $\theta = c + W
\phi$, the tilt of the distribution, clipped to $\pm 3$ (`Head`). The squared scale of the
distribution is $e^h$ plus a multiple of q. Beyond the training rows a guard (`prediction.guards`)
widens it and lets the tilt fade.

`Head` is what calibration fits and files store. Predictions use a `HeadForm`: head, guard and
distribution folded into as few operations as possible (`FoldedHead`, `FoldedGuard`, `TiltMoments`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .distribution import Distribution, Tilted
from .guards import POWER, SPAN, Guard, unfamiliarity

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
    """The standard deviation of columns; infinite where they are constant up to rounding.

    A column without rows is constant.
    """
    if not values.numel():
        return values.new_full(values.shape[1:], math.inf)
    spread = values.std(0, correction=0)
    size = values.abs().amax(0)
    return torch.where(spread > 5e-7 * size, spread, math.inf)


@dataclass(frozen=True)
class Head:
    """The fitted heads of K targets; files store its tensors under these names.

    Attributes:
        rigidity: Centre and spread of log q, (K, 2); see `Inputs`.
        output: Range and standardisation of the predictions, (K, 5); see `Inputs`.
        centre: Means of the features, (1, D), or (K, D) where each target has features of its own.
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
        of_features = inputs[:1] if shared else inputs
        return cls(
            rigidity=torch.stack([target_inputs.rigidity for target_inputs in inputs]),
            output=torch.stack([target_inputs.output for target_inputs in inputs]),
            centre=torch.stack([target_inputs.centre for target_inputs in of_features]),
            spread=torch.stack([target_inputs.spread for target_inputs in of_features]),
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

    @property
    def tilts(self) -> int:
        """Number of tilts J of each target."""
        return self.constant.shape[1] - 1

    @property
    def has_own_features(self) -> bool:
        """Whether there are several targets, each with features of its own."""
        return len(self.centre) > 1

    def tensors(self) -> dict[str, Tensor]:
        """The fields by name, for files."""
        return dict(vars(self))


# Without eq, a hash is the object's own: compilers of torch before 2.13 hash what they call.
@dataclass(frozen=True, eq=False)
class FoldedHead:
    r"""A `Head` folded for speed: its standardisation goes into weights, constants and bounds.

    J is the number of tilts, 8 or 0.

    Attributes:
        lowest: Features below this are clipped to it, (1, D), or (K, D) where targets have features
            of their own.
        highest: Features above this are clipped to it, (1, D) or (K, D).
        weight: Weights of the features, (D, K (1 + J)), or (K, D, 1 + J) where targets have
            features of their own.
        constant: Constants that are added to the features' product, (K (1 + J),), or
            (K, 1, 1 + J).
        q_low: log q below this is clipped to it, (K, 1).
        q_high: log q above this is clipped to it, (K, 1).
        by_q: Weights of log q, (K, 1 + J).
        mean_rate: Factor of the prediction in the standardised prediction, (K, 1).
        mean_shift: Constant in the standardised prediction, (K, 1).
        mean_low: Standardised predictions below this are clipped to it, (K, 1).
        mean_high: Standardised predictions above this are clipped to it, (K, 1).
        by_mean: Weights of the standardised prediction, (K, 1 + J).
        by_square: Weights of the square of the standardised prediction, (K, 1 + J).
        low: The least h and tilts, (K, 1 + J).
        high: The largest h and tilts, (K, 1 + J).
        scale2: Factor of q in the distribution's squared scale, (K, 1).
    """

    lowest: Tensor
    highest: Tensor
    weight: Tensor
    constant: Tensor
    q_low: Tensor
    q_high: Tensor
    by_q: Tensor
    mean_rate: Tensor
    mean_shift: Tensor
    mean_low: Tensor
    mean_high: Tensor
    by_mean: Tensor
    by_square: Tensor
    low: Tensor
    high: Tensor
    scale2: Tensor

    @classmethod
    def of(cls, head: Head, width: int) -> FoldedHead:
        """Fold a head, in float64: $w (x - c) / s = (w / s) x - (w / s) c$.

        Args:
            head: The head.
            width: How many of its features to keep, D.
        """
        # The features.
        weight = (head.weight[:, 3:].mT / head.spread.unsqueeze(-2)).mT  # (K, D, 1 + J)
        shift = (head.centre.unsqueeze(-2) @ weight).squeeze(-2)  # (K, 1 + J)
        by_q, by_mean, by_square = head.weight[:, :3].unbind(1)  # (K, 1 + J) each
        constant = head.constant - shift - head.output[:, 4:] * by_square
        weight = weight[:, :width]
        largest_deviation = FAR * _zero_if_infinite(head.spread)

        # log q. It is clipped in its own units, so that all else goes into weight and constant.
        q_centre = head.rigidity[:, :1]
        q_rate, q_centre, by_q = _standardised(head.rigidity[:, 1:], q_centre, by_q)
        q_reach = FAR_Q * _zero_if_infinite(head.rigidity[:, 1:])
        by_q = by_q * q_rate
        constant = constant - q_centre * by_q

        # The prediction. It is standardised before it is squared: large means would lose digits.
        lowest_mean, highest_mean, mean_centre, mean_spread = head.output[:, :4, None].unbind(1)
        mean_is_constant = mean_spread.isinf()  # (K, 1)
        mean_rate, mean_centre, by_mean = _standardised(mean_spread, mean_centre, by_mean)
        mean_low = torch.where(mean_is_constant, 0.0, (lowest_mean - mean_centre) * mean_rate)
        mean_high = torch.where(mean_is_constant, 0.0, (highest_mean - mean_centre) * mean_rate)
        by_square = torch.where(mean_is_constant, 0.0, by_square)

        if head.has_own_features:
            constant = constant[:, None]  # (K, 1, 1 + J)
        else:
            weight = weight.movedim(0, 1).flatten(1)  # (D, K (1 + J))
            constant = constant.flatten()
        steepest = torch.full_like(head.constant[:, 1:], STEEPEST)
        return cls(
            lowest=(head.centre - largest_deviation)[:, :width],
            highest=(head.centre + largest_deviation)[:, :width],
            weight=weight,
            constant=constant,
            q_low=q_centre - q_reach,
            q_high=q_centre + q_reach,
            by_q=by_q,
            mean_rate=mean_rate,
            mean_shift=-mean_centre * mean_rate,
            mean_low=mean_low,
            mean_high=mean_high,
            by_mean=by_mean,
            by_square=by_square,
            low=torch.cat([head.bounds[:, :1], -steepest], 1),
            high=torch.cat([head.bounds[:, 1:], steepest], 1),
            scale2=head.scale2[:, None],
        )

    def __call__(self, log_q: Tensor, mean: Tensor, features: Tensor) -> Tensor:
        """h and the tilts of rows, (M, 1 + J) for one target, or (M, K, 1 + J).

        Args:
            log_q: Logarithms of q, (M, 1), or (M, 1 or K, 1). Minus infinity, where q is zero, is
                clipped to the lower end.
            mean: Predictions, (M, 1), or (M, K, 1).
            features: Features, (M, D), or (M, K, D).
        """
        clipped = torch.clamp(features, self.lowest, self.highest)
        if features.ndim == 3:
            by_target = torch.baddbmm(self.constant, clipped.transpose(0, 1), self.weight)
            h_and_tilt = by_target.transpose(0, 1)
        else:
            h_and_tilt = torch.addmm(self.constant, clipped, self.weight)
            if mean.ndim == 3:
                h_and_tilt = h_and_tilt.view(-1, *self.low.shape)
        clipped_log_q = torch.clamp(log_q, self.q_low, self.q_high)
        standard_mean = torch.addcmul(self.mean_shift, mean, self.mean_rate)
        standard_mean = torch.clamp(standard_mean, self.mean_low, self.mean_high)
        mean_slope = torch.addcmul(self.by_mean, standard_mean, self.by_square)
        h_and_tilt = torch.addcmul(h_and_tilt, clipped_log_q, self.by_q)
        h_and_tilt = torch.addcmul(h_and_tilt, standard_mean, mean_slope)
        return torch.clamp(h_and_tilt, self.low, self.high)


@dataclass(frozen=True, eq=False)
class FoldedGuard:
    r"""A `Guard` folded for speed.

    Attributes:
        rate: $1 / q_{ref}$, (K, 1).
        level: $\tau v$, (K, 1).
        distance_rate: $\sqrt\tau$, (K, 1).
        distance_shift: $-\sqrt\tau c$, (K, 1).
        ramp_rate: Factor of log q in the ramp t, (K, 1).
        ramp_shift: Constant in that ramp, (K, 1).
        distance_weight: $\sqrt\tau w$, (D, K), or (K, D) where targets have features of their own;
            None where the forecast is the same for all rows.
        extent_weight: Weights of the features that give the extent, (D, K) or (K, D); None where
            the extent is one. It is given where `distance_weight` is.
    """

    rate: Tensor
    level: Tensor
    distance_rate: Tensor
    distance_shift: Tensor
    ramp_rate: Tensor
    ramp_shift: Tensor
    distance_weight: Tensor | None = None
    extent_weight: Tensor | None = None

    @classmethod
    def of(cls, guard: Guard, width: int, *, own_features: bool) -> FoldedGuard:
        """Fold a guard, in float64.

        Args:
            guard: The guard.
            width: Number of features D.
            own_features: Whether each target has features of its own.
        """
        reference = guard.reference[:, None]
        root_factor = guard.factor[:, None].sqrt()
        distance_weight = None
        extent_weight = None
        if guard.by_feature is not None and guard.extent_weight is not None:
            distance_weight = (root_factor * guard.by_feature)[:, :width]  # (K, D)
            extent_weight = guard.extent_weight[:, :width]
            if not own_features:
                distance_weight = distance_weight.mT  # (D, K)
                extent_weight = extent_weight.mT
        return cls(
            rate=1 / reference,
            level=(guard.factor * guard.variance)[:, None],
            distance_rate=root_factor,
            distance_shift=-root_factor * guard.centre[:, None],
            ramp_rate=torch.full_like(reference, 1 / math.log(SPAN)),
            ramp_shift=-reference.log() / math.log(SPAN),
            distance_weight=distance_weight,
            extent_weight=extent_weight,
        )

    def __call__(
        self, squared_scale: Tensor, q: Tensor, log_q: Tensor, mean: Tensor, features: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The squared scale beyond the training rows, and what tilts are divided by there.

        See `Guard.widened` and `Guard.beyond`. Rows are (M, 1) for one target, or (M, K, 1).

        Args:
            squared_scale: What the head says.
            q: Unscaled variances.
            log_q: Their logarithms.
            mean: Predictions.
            features: Features, (M, D) or (M, K, D).
        """
        distance = torch.addcmul(self.distance_shift, mean, self.distance_rate)
        if self.distance_weight is not None and self.extent_weight is not None:
            distance = distance - _weighted_sum(features, self.distance_weight, like=mean)
            q = unfamiliarity(q, _weighted_sum(features, self.extent_weight, like=mean))
            log_q = q.log()
        level = torch.addcmul(self.level, distance, distance)
        share = torch.addcmul(self.ramp_shift, log_q, self.ramp_rate).clamp(0, 1) ** POWER
        widened = squared_scale * (level / squared_scale).clamp(min=1) ** share
        return widened, (q * self.rate).clamp(min=1)


@dataclass(frozen=True, eq=False)
class TiltMoments:
    """The second moments of tilted distributions.

    Attributes:
        basis: The cosines of the tilt at 64 midpoints, (J, 64).
        values: Numbers at the midpoints that stand for $z^2$, (1, 64), or (K, 64) where the degrees
            of freedom differ; see `cosine_tilt.moment_values`.
    """

    basis: Tensor
    values: Tensor

    def __call__(self, tilt: Tensor) -> Tensor:
        """The second moments (..., 1) of distributions of these tilts, (..., J)."""
        shares = (tilt @ self.basis).softmax(-1)
        # A sum, not a product of matrices: onnxruntime does not broadcast one over no rows.
        return (shares * self.values).sum(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class HeadForm:
    """A head, its guard and its distribution folded into few operations, in one precision.

    All tensors have an axis of targets.

    Attributes:
        head: Gives h and the tilts.
        guard: Widens bars beyond the training rows, if there is one.
        second: The distribution's second moment in units of its squared scale: (K,), or by its
            tilts where it has them.
    """

    head: FoldedHead
    guard: FoldedGuard | None
    second: TiltMoments | Tensor

    @classmethod
    def of(
        cls, head: Head, guard: Guard | None, distribution: Distribution, dtype: torch.dtype
    ) -> HeadForm:
        """Fold a head, its guard and its distribution, in float64; then convert to `dtype`."""
        width = _needed_width(head, guard)
        form = cls(
            head=FoldedHead.of(head, width),
            guard=None,
            second=_second_moment(distribution, head),
        )
        if guard is not None:
            folded = FoldedGuard.of(guard, width, own_features=head.has_own_features)
            form = replace(form, guard=folded)
        tensors = form.tensors().items()
        return cls.from_tensors({name: tensor.to(dtype).contiguous() for name, tensor in tensors})

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that are given, by names that may be those of a module's buffers."""
        tensors = {f"head_{name}": tensor for name, tensor in vars(self.head).items()}
        if self.guard is not None:
            for name, tensor in vars(self.guard).items():
                if tensor is not None:
                    tensors[f"guard_{name}"] = tensor
        if isinstance(self.second, TiltMoments):
            tensors["tilt_basis"] = self.second.basis
            tensors["tilt_values"] = self.second.values
        else:
            tensors["second"] = self.second
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Any]) -> HeadForm:
        """The form whose `tensors` these are."""
        guard = None
        if "guard_rate" in tensors:
            guard = FoldedGuard(
                rate=tensors["guard_rate"],
                level=tensors["guard_level"],
                distance_rate=tensors["guard_distance_rate"],
                distance_shift=tensors["guard_distance_shift"],
                ramp_rate=tensors["guard_ramp_rate"],
                ramp_shift=tensors["guard_ramp_shift"],
                distance_weight=tensors.get("guard_distance_weight"),
                extent_weight=tensors.get("guard_extent_weight"),
            )
        second = tensors.get("second")
        if second is None:
            second = TiltMoments(tensors["tilt_basis"], tensors["tilt_values"])
        return cls(
            head=FoldedHead(**{name: tensors[f"head_{name}"] for name in _NAMES_OF_HEAD}),
            guard=guard,
            second=second,
        )

    def __call__(
        self, q: Tensor, mean: Tensor, features: Tensor, factor: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Squared scale, second moment and tilt of the distributions of M rows.

        Args:
            q: Unscaled variances, (M, 1 or K).
            mean: Predictions, (M, K).
            features: Features, (M, D), or (M, K, D) where each target has its own. Columns beyond
                D are ignored.
            factor: Factor of each row's noise variance, (M, 1 or K), if there is one.

        Returns:
            The distribution's squared scale, (M, K); its second moment in units of that scale,
            (M, K), or (K,) without a tilt; its tilt, (M, K, J), or None without one.
        """
        head = self.head
        dtype = head.scale2.dtype
        q = q.to(dtype)
        mean = mean.to(dtype)
        features = features.to(dtype)
        if factor is not None:
            factor = factor.to(dtype)
        # Behind the axis of targets stands one for h and the tilts. Where there is one target, its
        # axis of length one broadcasts against h and the tilts as it is, and rows stay (M, 1): that
        # saves six operations, which are what a call for few rows costs.
        several = head.scale2.shape[0] > 1
        if several:
            q = q.unsqueeze(-1)
            mean = mean.unsqueeze(-1)
            factor = None if factor is None else factor.unsqueeze(-1)
        elif features.ndim == 3:
            features = features.squeeze(1)
        width = head.lowest.shape[-1]
        if features.shape[-1] != width:
            features = features[..., :width]

        log_q = q.log()
        h_and_tilt = head(log_q, mean, features)
        noise_variance = h_and_tilt[..., :1].exp()
        if factor is not None:
            noise_variance = noise_variance * factor
        squared_scale = torch.addcmul(noise_variance, head.scale2, q)
        beyond = None
        if self.guard is not None:
            squared_scale, beyond = self.guard(squared_scale, q, log_q, mean, features)
        if several:
            squared_scale = squared_scale.squeeze(-1)
        if not isinstance(self.second, TiltMoments):
            return squared_scale, self.second, None

        tilt = h_and_tilt[..., 1:]
        if beyond is not None:
            tilt = tilt / beyond
        second = self.second(tilt)
        if several:
            return squared_scale, second.squeeze(-1), tilt
        return squared_scale, second, tilt.unsqueeze(1)


_NAMES_OF_HEAD = tuple(head_field.name for head_field in fields(FoldedHead))


def _needed_width(head: Head, guard: Guard | None) -> int:
    """How many features a form needs: without a last column of ones, whose weight is zero.

    Callers may leave that column out too. A last column of counts may also be constant among the
    training rows; it stays where the guard reads it.
    """
    width = head.centre.shape[-1]
    if width == 0:
        return 0
    is_constant = bool(head.spread[:, -1:].isinf().all())
    is_read = False
    if guard is not None and guard.extent_weight is not None:
        is_read = bool(guard.extent_weight[:, width - 1 :].any())
    return width - 1 if is_constant and not is_read else width


def _weighted_sum(features: Tensor, weight: Tensor, like: Tensor) -> Tensor:
    """Features (M, D) times weights (D, K), or (M, K, D) times (K, D), summed; shaped like rows."""
    if features.ndim == 3:
        return (features * weight).sum(-1, keepdim=True)
    summed = features @ weight
    return summed.unsqueeze(-1) if like.ndim == 3 else summed


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


def _second_moment(distribution: Distribution, head: Head) -> TiltMoments | Tensor:
    """The second moment of a form, float64."""
    device = head.constant.device
    if head.tilts:
        assert isinstance(distribution, Tilted)
        rule = distribution.rule(torch.float64, device)
        return TiltMoments(rule.basis, rule.values[..., 1])
    second = torch.as_tensor(distribution.second, dtype=torch.float64).to(device)
    return second.expand(head.targets)


def _zero_if_infinite(spread: Tensor) -> Tensor:
    """The spread, or zero where it is infinite."""
    return torch.where(spread.isfinite(), spread, 0.0)
