r"""The density head: how the distribution of a prediction's error follows the input.

The error of a prediction is $s z$, where z follows a mixture of Student-t distributions with four
degrees of freedom (`prediction.mixture`). A small network gives, for each row, the logarithm h of
the noise variance and the mixture's logits, offsets and log-widths. The squared scale is

$$ s^2 = e^h + \alpha^2 q . $$

The inputs $\phi$ of the network are $\log q$, clipped to $\pm 4$, the prediction less the ignorant
forecast, clipped to its training range, its square, and the features, clipped to $\pm 6$, along
some directions. All are standardised on training rows (`Inputs`). With one hidden layer of H units
it gives $o = c + L^\top \phi + V^\top \mathrm{silu}(b + U^\top \phi)$.

Beyond the training rows a guard (`prediction.guards`) widens the distribution, and its shape fades
to that of a usual row.

For a sum over atoms all rows are intensive, so that a larger structure is not another kind of row:
errors and predictions are divided by the extent, which is the number of atoms relative to a usual
one, q by its square, and the prediction is that beyond what the atoms explain (`Forecast`).

`Head` is what calibration fits and files store. Predictions use a `HeadForm`: head and guard folded
into as few operations as possible (`FoldedNetwork`, `FoldedGuard`).

Shapes: M rows, K targets, D features, H hidden units, J components of the mixture, O = 1 + 3 J
outputs of the network, h first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from .guards import NOVELTY_RISE, POWER, RISE, Guard

FAR_Q = 4.0
"""Standardised log q is clipped to plus and minus this."""
FAR = 6.0
"""Standardised features are clipped to plus and minus this."""
NARROWEST = -1.75
"""Log-widths below this are clipped to it. With narrower components, rounding steers the fit."""
WIDEST = 4.0
"""Log-widths above this are clipped to it."""
FAMILIARITY_BASE = math.exp(-(RISE**POWER))
r"""A row's familiarity is this to the power of the square of $\log(q / q_{ref})$, above zero."""
FIRST_INPUTS = 3
"""Number of inputs that come before the features: log q, prediction, its square."""


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
class Forecast:
    """What an ignorant forecaster says of K targets, and how much rows sum up.

    Attributes:
        centre: The forecast of every row, or the part of it that is the same for all rows, (K,).
        by_feature: Weights of the features in the forecast, (K, D); None where it does not vary.
        extent_weight: Weights of the features that give the extent, (1, D), or (K, D) where each
            target has features of its own; None where the extent is one. The features with a
            weight are counts of what is summed. It is given where `by_feature` is.
    """

    centre: Tensor
    by_feature: Tensor | None = None
    extent_weight: Tensor | None = None

    @property
    def mirrored(self) -> Forecast:
        """The forecast of negated targets."""
        by_feature = None if self.by_feature is None else -self.by_feature
        return replace(self, centre=-self.centre, by_feature=by_feature)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Forecast:
        """The same forecast on another device, or in another precision too."""
        by_feature = self.by_feature
        extent_weight = self.extent_weight
        return Forecast(
            centre=self.centre.to(device, dtype),
            by_feature=None if by_feature is None else by_feature.to(device, dtype),
            extent_weight=None if extent_weight is None else extent_weight.to(device, dtype),
        )

    def over_extent(self, variance: Tensor, features: Tensor) -> Tensor:
        """Variances of rows, (M, 1 or K), as those of the rows over their extent.

        Args:
            variance: A known noise of the rows as they are.
            features: Features, (M, D), or (M, K, D). Columns beyond D are ignored.
        """
        if self.extent_weight is None:
            return variance
        weight = self.extent_weight.to(features)
        return variance / extent_of(features[..., : weight.shape[-1]], weight).square()

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are given, by name, for files."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


def extent_of(features: Tensor, weight: Tensor) -> Tensor:
    """How much rows (M, D) or (M, K, D) sum relative to a usual row, (M, 1 or K).

    Where a readout sums over nothing, the extent is one.
    """
    if features.ndim == 3:
        extent = (features * weight).sum(-1)
    else:
        extent = linear(features, weight)
    return torch.where(extent == 0, 1.0, extent.abs())


def intensive_features(features: Tensor, extent: Tensor, weight: Tensor) -> Tensor:
    """Features over the extent, except for counts: a head may learn from the size itself.

    Args:
        features: Features, (M, D) or (M, K, D).
        extent: Extent of the rows, (M, 1) or (M, K).
        weight: Weights of the features that give the extent, (1, D) or (K, D).
    """
    is_count = (weight != 0).to(features)
    if features.ndim == 3:
        extent = extent.unsqueeze(-1)
    return features / torch.lerp(extent, torch.ones_like(extent), is_count)


@dataclass(frozen=True)
class Network:
    """The network of a head, and how its inputs are standardised, for K targets.

    Attributes:
        rigidity: Centre and spread of log q, (K, 2); see `Inputs`.
        output: Range and standardisation of the predictions, (K, 5); see `Inputs`.
        centre: Means of the features, (1, D), or (K, D) where each target has features of its own.
        spread: Standard deviations of the features, likewise.
        directions: The D' directions along which the network looks at the standardised features,
            (1 or K, D, D').
        weight: Weights of the inputs, (K, 3 + D', H + O): U, then L.
        hidden_constant: b, (K, H).
        hidden_weight: V, (K, H, O).
    """

    rigidity: Tensor
    output: Tensor
    centre: Tensor
    spread: Tensor
    directions: Tensor
    weight: Tensor
    hidden_constant: Tensor
    hidden_weight: Tensor

    @property
    def has_own_features(self) -> bool:
        """Whether there are several targets, each with features of its own."""
        return len(self.centre) > 1


@dataclass(frozen=True)
class Head:
    """The fitted heads of K targets; files store its tensors under these names.

    Attributes:
        constant: The outputs of a usual row, to which those of the network are added, (K, O).
        usual: The outputs of a usual row, (K, O): the median h, and the shape to which shapes fade
            beyond the training rows.
        bounds: Least and largest h, (K, 2).
        scale2: Factor of q in the distribution's squared scale, (K,).
        forecast: The ignorant forecast.
        network: What makes the outputs follow the input; None where they are the same for all rows.
    """

    constant: Tensor
    usual: Tensor
    bounds: Tensor
    scale2: Tensor
    forecast: Forecast
    network: Network | None = None

    @property
    def targets(self) -> int:
        """Number of targets K."""
        return len(self.constant)

    @property
    def components(self) -> int:
        """Number of components J of the mixture."""
        return (self.usual.shape[1] - 1) // 3

    def to(self, device: torch.device) -> Head:
        """The same head on another device."""
        return head_from({name: tensor.to(device) for name, tensor in self.tensors().items()})

    @property
    def mirrored(self) -> Head:
        """The head of negated targets and predictions."""
        network = self.network
        if network is not None:
            low, high, centre, spread, mean_square = network.output.unbind(1)
            weight = network.weight.clone()
            weight[:, 1] *= -1  # of the prediction
            hidden_units = network.hidden_weight.shape[1]
            weight[..., hidden_units:] = self._with_offsets_negated(weight[..., hidden_units:])
            network = replace(
                network,
                output=torch.stack([-high, -low, -centre, spread, mean_square], 1),
                weight=weight,
                hidden_weight=self._with_offsets_negated(network.hidden_weight),
            )
        return replace(
            self,
            constant=self._with_offsets_negated(self.constant),
            usual=self._with_offsets_negated(self.usual),
            forecast=self.forecast.mirrored,
            network=network,
        )

    def _with_offsets_negated(self, outputs: Tensor) -> Tensor:
        """Outputs (..., O), or weights for them, with negated offsets of the components."""
        sign = torch.ones_like(outputs[..., :1]).expand_as(outputs).clone()
        sign[..., 1 + self.components : 1 + 2 * self.components] = -1
        return outputs * sign

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, for files; those of forecast and network have prefixes."""
        tensors = {name: getattr(self, name) for name in ("constant", "usual", "bounds", "scale2")}
        for name, tensor in self.forecast.tensors().items():
            tensors[f"forecast.{name}"] = tensor
        if self.network is not None:
            for name, tensor in vars(self.network).items():
                tensors[f"network.{name}"] = tensor
        return tensors


def head_from(tensors: Mapping[str, Tensor]) -> Head:
    """The head whose `tensors` these are.

    Raises:
        ValueError: The names are not those of a head.
    """
    parts: dict[str, dict[str, Any]] = {"": {}, "forecast": {}, "network": {}}
    for name, tensor in tensors.items():
        prefix, _, field_name = name.rpartition(".")
        parts.setdefault(prefix, {})[field_name] = tensor
    try:
        network = Network(**parts["network"]) if parts["network"] else None
        return Head(**parts[""], forecast=Forecast(**parts["forecast"]), network=network)
    except TypeError as error:
        raise ValueError(
            f"The head of this file has other tensors than a head has here ({error}): the file is "
            "damaged or from another version. Calibrate again."
        ) from error


# Without eq, a hash is the object's own: compilers of torch before 2.13 hash what they call.
@dataclass(frozen=True, eq=False)
class FoldedNetwork:
    r"""A `Network` folded for speed: its standardisation goes into weights, constants and bounds.

    R = H + O is the number of sums over the inputs: those of the hidden units, then the linear part
    of the outputs.

    Attributes:
        lowest: Features below this are clipped to it, (1, D), or (K, D) where targets have features
            of their own.
        highest: Features above this are clipped to it, (1, D) or (K, D).
        weight: Weights of the features, (D, K R), or (K, D, R) where targets have features of their
            own; behind a projection (D', K R).
        constant: Constants that are added to the features' product, (K R,), or (K, 1, R).
        q_low: log q below this is clipped to it, (K, 1).
        q_high: log q above this is clipped to it, (K, 1).
        by_q: Weights of log q, (K, R).
        mean_rate: Factor of the prediction in the standardised prediction, (K, 1).
        mean_shift: Constant in the standardised prediction, (K, 1).
        mean_low: Standardised predictions below this are clipped to it, (K, 1).
        mean_high: Standardised predictions above this are clipped to it, (K, 1).
        by_mean: Weights of the standardised prediction, (K, R).
        by_square: Weights of the square of the standardised prediction, (K, R).
        hidden_weight: Weights of the hidden units, (H, O), or (K, H, O) for several targets.
        projection: The directions along which several targets look at the same features, (D, D');
            None where they are folded into the weights.
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
    hidden_weight: Tensor
    projection: Tensor | None = None

    @classmethod
    def of(cls, head: Head, network: Network, width: int) -> FoldedNetwork:
        """Fold a network, in float64: $w (x - c) / s = (w / s) x - (w / s) c$.

        Args:
            head: The head, whose constants are added.
            network: Its network.
            width: How many of its features to keep, D.
        """
        # The features.
        projection = network.directions / network.spread.unsqueeze(-1)  # (1 or K, D, D')
        weight = network.weight[:, FIRST_INPUTS:]  # (K, D', R)
        shift = (network.centre.unsqueeze(-2) @ projection @ weight).squeeze(-2)  # (K, R)
        projection = projection[:, :width]
        by_q, by_mean, by_square = network.weight[:, :FIRST_INPUTS].unbind(1)  # (K, R) each
        constant = torch.cat([network.hidden_constant, head.constant], 1)
        constant = constant - shift - network.output[:, 4:] * by_square
        largest_deviation = FAR * _zero_if_infinite(network.spread)

        # log q. It is clipped in its own units, so that all else goes into weight and constant.
        q_centre = network.rigidity[:, :1]
        q_rate, q_centre, by_q = _standardised(network.rigidity[:, 1:], q_centre, by_q)
        q_reach = FAR_Q * _zero_if_infinite(network.rigidity[:, 1:])
        by_q = by_q * q_rate
        constant = constant - q_centre * by_q

        # The prediction. It is standardised before it is squared: large means would lose digits.
        lowest_mean, highest_mean, mean_centre, mean_spread = network.output[:, :4, None].unbind(1)
        mean_is_constant = mean_spread.isinf()  # (K, 1)
        mean_rate, mean_centre, by_mean = _standardised(mean_spread, mean_centre, by_mean)
        mean_low = torch.where(mean_is_constant, 0.0, (lowest_mean - mean_centre) * mean_rate)
        mean_high = torch.where(mean_is_constant, 0.0, (highest_mean - mean_centre) * mean_rate)
        by_square = torch.where(mean_is_constant, 0.0, by_square)

        # Many targets look at few directions: to project once is less than to look at all features.
        projects = len(projection) < head.targets and projection.shape[2] < width
        if not projects:
            weight = projection @ weight  # (K, D, R)
        if network.has_own_features:
            constant = constant[:, None]  # (K, 1, R)
        else:
            weight = weight.movedim(0, 1).flatten(1)  # (D or D', K R)
            constant = constant.flatten()
        hidden_weight = network.hidden_weight
        return cls(
            lowest=(network.centre - largest_deviation)[:, :width],
            highest=(network.centre + largest_deviation)[:, :width],
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
            hidden_weight=hidden_weight[0] if head.targets == 1 else hidden_weight,
            projection=projection[0] if projects else None,
        )

    def __call__(self, log_q: Tensor, mean: Tensor, features: Tensor) -> Tensor:
        """The outputs of rows, (M, O) for one target, or (M, K, O).

        Args:
            log_q: Logarithms of q, (M, 1), or (M, 1 or K, 1). Minus infinity, where q is zero, is
                clipped to the lower end.
            mean: Predictions, (M, 1), or (M, K, 1).
            features: Features, (M, D), or (M, K, D).
        """
        clipped = torch.clamp(features, self.lowest, self.highest)
        if self.projection is not None:
            clipped = clipped @ self.projection
        if features.ndim == 3:
            by_target = torch.baddbmm(self.constant, clipped.transpose(0, 1), self.weight)
            sums = by_target.transpose(0, 1)
        else:
            sums = torch.addmm(self.constant, clipped, self.weight)
            if mean.ndim == 3:
                sums = sums.view(-1, *self.by_q.shape)
        clipped_log_q = torch.clamp(log_q, self.q_low, self.q_high)
        standard_mean = torch.addcmul(self.mean_shift, mean, self.mean_rate)
        standard_mean = torch.clamp(standard_mean, self.mean_low, self.mean_high)
        mean_slope = torch.addcmul(self.by_mean, standard_mean, self.by_square)
        sums = torch.addcmul(sums, clipped_log_q, self.by_q)
        sums = torch.addcmul(sums, standard_mean, mean_slope)
        # `split` is one operation, `tensor_split` one for each part.
        hidden, linear = torch.split(sums, list(self.hidden_weight.shape[-2:]), -1)
        if mean.ndim == 3:
            # A transpose right before a product would become one operation of onnxruntime, which
            # ends the process where there are no rows.
            hidden = silu(hidden.transpose(0, 1))
            by_target = torch.baddbmm(linear.transpose(0, 1), hidden, self.hidden_weight)
            return by_target.transpose(0, 1)
        return torch.addmm(linear, silu(hidden), self.hidden_weight)


@dataclass(frozen=True, eq=False)
class FoldedGuard:
    r"""A `Guard` folded for speed.

    Attributes:
        variance: v, (K, 1).
        log_reference: $\log q_{ref}$, (K, 1).
        log_alarm: $\log n_{ref}$, (1, 1); infinite where no layer is watched.
    """

    variance: Tensor
    log_reference: Tensor
    log_alarm: Tensor

    @classmethod
    def of(cls, guard: Guard) -> FoldedGuard:
        """Fold a guard, in float64."""
        alarm = guard.reference.new_tensor(math.inf) if guard.alarm is None else guard.alarm
        return cls(
            variance=guard.variance[:, None],
            log_reference=guard.reference[:, None].log(),
            log_alarm=alarm.log().reshape(1, 1),
        )

    def familiarity(self, log_q: Tensor, novelty: Tensor | None) -> Tensor:
        """$e^{-r^2}$ of rows: one for rows like the training rows, zero far away.

        Args:
            log_q: Logarithms of q, (M, 1) for one target, or (M, K, 1).
            novelty: Novelty of the rows, (M, 1), if it is known.
        """
        log_beyond = log_q - self.log_reference
        if novelty is not None:
            log_relative = NOVELTY_RISE * (novelty.to(log_q).log() - self.log_alarm)
            log_beyond = torch.maximum(log_beyond, log_relative)
        log_beyond = log_beyond.relu()
        # The power of a number is one operation, where scaling, negating and exponentiating are
        # three.
        return torch.pow(FAMILIARITY_BASE, log_beyond**POWER)

    def widened(self, moment: Tensor, familiarity: Tensor, distance: Tensor) -> Tensor:
        r"""The second moment of `Guard`, as $(\sigma^2 + M) (\sigma^2 / (\sigma^2 + M))^f$.

        Args:
            moment: What the head says, in the shape of the familiarity.
            familiarity: f; see `familiarity`.
            distance: Prediction minus forecast, likewise.
        """
        widest = torch.addcmul(self.variance, distance, distance) + moment
        return widest * (moment / widest) ** familiarity


@dataclass(frozen=True, eq=False)
class HeadForm:
    """A head and its guard folded into few operations, in one precision.

    All tensors have an axis of targets.

    Attributes:
        constant: The outputs of a head without a network, (K, O).
        low: The least outputs, (K, O).
        high: The largest outputs, (K, O).
        usual: What shapes fade to, (K, 3 J).
        scale2: Factor of q in the distribution's squared scale, (K, 1).
        forecast: The ignorant forecast.
        network: What makes the outputs follow the input, if they do.
        guard: What widens bars beyond the training rows, if there is one.
    """

    constant: Tensor
    low: Tensor
    high: Tensor
    usual: Tensor
    scale2: Tensor
    forecast: Forecast
    network: FoldedNetwork | None = None
    guard: FoldedGuard | None = None

    @classmethod
    def of(cls, head: Head, guard: Guard | None, dtype: torch.dtype) -> HeadForm:
        """Fold a head and its guard, in float64; then convert to `dtype`."""
        width = _needed_width(head)
        low = torch.full_like(head.constant, -math.inf)
        high = torch.full_like(head.constant, math.inf)
        low[:, 0] = head.bounds[:, 0]
        high[:, 0] = head.bounds[:, 1]
        low[:, 1 + 2 * head.components :] = NARROWEST
        high[:, 1 + 2 * head.components :] = WIDEST
        forecast = head.forecast
        if forecast.by_feature is not None and forecast.extent_weight is not None:
            forecast = Forecast(
                centre=forecast.centre,
                by_feature=forecast.by_feature[:, :width],
                extent_weight=forecast.extent_weight[:, :width],
            )
        form = cls(
            constant=head.constant,
            low=low,
            high=high,
            usual=head.usual[:, 1:],
            scale2=head.scale2[:, None],
            forecast=forecast,
        )
        if head.network is not None:
            form = replace(form, network=FoldedNetwork.of(head, head.network, width))
        if guard is not None:
            form = replace(form, guard=FoldedGuard.of(guard))
        tensors = form.tensors().items()
        return cls.from_tensors({name: tensor.to(dtype).contiguous() for name, tensor in tensors})

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that are given, by names that may be those of a module's buffers."""
        tensors = {name: getattr(self, name) for name in _NAMES_OF_FORM}
        for name, tensor in self.forecast.tensors().items():
            tensors["forecast_" + name] = tensor
        for prefix, component in (("network_", self.network), ("guard_", self.guard)):
            if component is not None:
                for name, tensor in vars(component).items():
                    if tensor is not None:
                        tensors[prefix + name] = tensor
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Any]) -> HeadForm:
        """The form whose `tensors` these are."""
        network = None
        if "network_weight" in tensors:
            names = tuple(name for name in _NAMES_OF_NETWORK if "network_" + name in tensors)
            network = FoldedNetwork(**{name: tensors["network_" + name] for name in names})
        guard = None
        if "guard_variance" in tensors:
            names = _NAMES_OF_GUARD
            guard = FoldedGuard(**{name: tensors["guard_" + name] for name in names})
        names = tuple(name for name in _NAMES_OF_FORECAST if "forecast_" + name in tensors)
        forecast = Forecast(**{name: tensors["forecast_" + name] for name in names})
        of_form = {name: tensors[name] for name in _NAMES_OF_FORM}
        return cls(**of_form, forecast=forecast, network=network, guard=guard)

    def __call__(
        self,
        q: Tensor,
        mean: Tensor,
        features: Tensor,
        factor: Tensor | None = None,
        novelty: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The second moment of each row's error, and the shape of its distribution.

        Args:
            q: As in `moment`, like all others.
            mean: Predictions, (M, K).
            features: Features, (M, D), or (M, K, D).
            factor: Factor of each row's noise variance, (M, 1 or K), if there is one.
            novelty: Novelty of the rows, (M, 1), if it is known.

        Returns:
            The second moment about the prediction, (M, K), and the mixture's logits, offsets and
            log-widths, (M, K, 3 J).
        """
        moment, shape = self._evaluate(q, mean, features, factor, novelty)
        return moment, shape.unsqueeze(1) if shape.ndim == 2 else shape

    def moment(
        self,
        q: Tensor,
        mean: Tensor,
        features: Tensor,
        factor: Tensor | None = None,
        novelty: Tensor | None = None,
    ) -> Tensor:
        """The second moment of each row's error about the prediction, (M, K).

        Args:
            q: Unscaled variances, (M, 1 or K).
            mean: Predictions, (M, K).
            features: Features, (M, D), or (M, K, D) where each target has its own. Columns beyond
                D are ignored.
            factor: Factor of each row's noise variance, (M, 1 or K), if there is one; for sums,
                of the row over its extent.
            novelty: Squared distances of the inputs to the training rows' in units of a usual one,
                (M, 1), if they are known; the guard listens to them.
        """
        return self._evaluate(q, mean, features, factor, novelty)[0]

    def _evaluate(
        self,
        q: Tensor,
        mean: Tensor,
        features: Tensor,
        factor: Tensor | None,
        novelty: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The second moments, (M, K), and the shapes, (M, 3 J) for one target or (M, K, 3 J)."""
        dtype = self.scale2.dtype
        q = q.to(dtype)
        mean = mean.to(dtype)
        features = features.to(dtype)
        if factor is not None:
            factor = factor.to(dtype)
        several = self.scale2.shape[0] > 1
        if not several and features.ndim == 3:
            features = features.squeeze(1)
        width = self._width
        if width is not None and features.shape[-1] != width:
            features = features[..., :width]
        distance = mean - self.forecast.centre
        extent = None
        by_feature = self.forecast.by_feature
        extent_weight = self.forecast.extent_weight
        if by_feature is not None and extent_weight is not None:
            extent = extent_of(features, extent_weight)  # (M, 1 or K)
            distance = (distance - _weighted_sum(features, by_feature)) / extent
            q = q / extent.square()
            features = intensive_features(features, extent, extent_weight)
        # Behind the axis of targets stands one for the outputs. Where there is one target, its axis
        # of length one broadcasts against the outputs as it is, and rows stay (M, 1): that saves
        # operations, which are what a call for few rows costs.
        if several:
            q = q.unsqueeze(-1)
            distance = distance.unsqueeze(-1)
            factor = None if factor is None else factor.unsqueeze(-1)
            novelty = None if novelty is None else novelty.unsqueeze(-1)

        log_q = q.log()
        if self.network is None:
            outputs = self.constant.expand(*distance.shape[:-1], -1)
        else:
            outputs = self.network(log_q, distance, features)
        outputs = torch.clamp(outputs, self.low, self.high)
        h, shape = torch.split(outputs, [1, self.usual.shape[-1]], -1)
        noise_variance = h.exp()
        if factor is not None:
            noise_variance = noise_variance * factor
        squared_scale = torch.addcmul(noise_variance, self.scale2, q)
        if self.guard is None:
            moment = squared_scale * _second_moment(shape)
        else:
            familiarity = self.guard.familiarity(log_q, novelty)
            shape = torch.lerp(self.usual, shape, familiarity * familiarity)
            moment = squared_scale * _second_moment(shape)
            moment = self.guard.widened(moment, familiarity, distance)
        if several:
            moment = moment.squeeze(-1)
        if extent is not None:
            moment = moment * extent.square()
        return moment, shape

    @property
    def _width(self) -> int | None:
        """How many features are read; None where none are."""
        if self.network is not None:
            return self.network.lowest.shape[-1]
        if self.forecast.extent_weight is not None:
            return self.forecast.extent_weight.shape[-1]
        return None


_NAMES_OF_FORM = ("constant", "low", "high", "usual", "scale2")
_NAMES_OF_FORECAST = tuple(forecast_field.name for forecast_field in fields(Forecast))
_NAMES_OF_NETWORK = tuple(network_field.name for network_field in fields(FoldedNetwork))
_NAMES_OF_GUARD = tuple(guard_field.name for guard_field in fields(FoldedGuard))


def _second_moment(shape: Tensor) -> Tensor:
    r"""$E z^2 = \sum_j \pi_j (2 w_j^2 + m_j^2)$ of mixtures of these shapes, (..., 1)."""
    logit, offset, log_width = shape.chunk(3, -1)
    width = log_width.exp()
    # A Student-t with four degrees of freedom has the variance 2.
    squares = torch.addcmul(offset * offset, width, width, value=2)
    return (logit.softmax(-1) * squares).sum(-1, keepdim=True)


def _needed_width(head: Head) -> int:
    """How many features a form needs: without a last column of ones, whose weight is zero.

    Callers may leave that column out too. A last column of counts may also be constant among the
    training rows; it stays where the forecast reads it.
    """
    counts = head.forecast.extent_weight
    if head.network is None:
        return 0 if counts is None else counts.shape[-1]
    width = head.network.centre.shape[-1]
    if width == 0:
        return 0
    is_constant = bool(head.network.spread[:, -1:].isinf().all())
    is_read = counts is not None and bool(counts[:, width - 1 :].any())
    return width - 1 if is_constant and not is_read else width


def _weighted_sum(features: Tensor, weight: Tensor) -> Tensor:
    """Features (M, D) or (M, K, D) times weights (K, D), summed, (M, K)."""
    if features.ndim == 3:
        return (features * weight).sum(-1)
    return linear(features, weight)


def _standardised(spread: Tensor, centre: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rate and centre, (K, 1), and weights, (K, R), of one input.

    A constant input has the weight zero. Its rate is one: times zero, the logarithm of a zero q
    would be NaN.
    """
    is_constant = spread.isinf()
    rate = torch.where(is_constant, 1.0, 1 / spread)
    centre = torch.where(is_constant, 0.0, centre)
    weight = torch.where(is_constant, 0.0, weight)
    return rate, centre, weight


def _zero_if_infinite(spread: Tensor) -> Tensor:
    """The spread, or zero where it is infinite."""
    return torch.where(spread.isfinite(), spread, 0.0)
