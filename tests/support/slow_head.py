"""The density head again, slowly: plain formulas in float64, one target at a time.

Nothing here is folded, fused or shared with the library: the head's and the guard's tensors are put
into the equations as they are written in `prediction.head` and `prediction.guards`. For a row with
the unscaled variance q, the prediction m and the features f,

    phi = (log q, m, m^2 - mean m^2, f), standardised and clipped, f along some directions,
    o = (h, logits, offsets, log-widths) = c + L phi + V silu(b + U phi),
    s^2 = e^h c + alpha^2 q,

and far from the training rows the guard widens s^2 E z^2 and fades the shape to the usual one. For
sums over atoms all that is done with rows over their extent.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rigidities.prediction.guards import Guard
from rigidities.prediction.head import NARROWEST, WIDEST, Head

F64 = torch.float64


@dataclass(frozen=True)
class SlowRows:
    """What one target's head says of rows.

    Attributes:
        moment: The second moment of the error about the prediction, (M,).
        share: Probabilities of the components, (M, J).
        offset: Their centres in units of s, (M, J).
        width: Their widths in units of s, (M, J).
        mean: The predictions, (M,).
    """

    moment: Tensor
    share: Tensor
    offset: Tensor
    width: Tensor
    mean: Tensor

    @property
    def scale(self) -> Tensor:
        """s, by which the mixture is to be stretched to have this second moment, (M,)."""
        second = (self.share * (2 * self.width**2 + self.offset**2)).sum(1)
        return (self.moment / second).sqrt()

    def below(self, y: Tensor) -> Tensor:
        """The probability of targets up to y, (M,)."""
        z = ((y - self.mean) / self.scale)[:, None]
        t = (z - self.offset) / self.width
        k = t / (4 + t**2).sqrt()
        return (self.share * (0.5 + 0.75 * k - 0.25 * k**3)).sum(1)

    def quantile(self, level: float) -> Tensor:
        """Where `below` is the level, by bisection, (M,)."""
        reach = 1e3 * self.scale * (1 + self.offset.abs().amax(1) + self.width.amax(1))
        low, high = self.mean - reach, self.mean + reach
        for _ in range(120):
            middle = (low + high) / 2
            is_below = self.below(middle) < level
            low = torch.where(is_below, middle, low)
            high = torch.where(is_below, high, middle)
        return (low + high) / 2


def slow_inputs(head: Head, k: int, q: Tensor, distance: Tensor, features: Tensor) -> Tensor:
    """The standardised inputs phi of rows, (M, 3 + D'), column by column."""
    network = head.network
    assert network is not None
    of_features = k if len(network.centre) > 1 else 0

    def standardised(x: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
        return torch.zeros_like(x) if math.isinf(spread) else (x - centre) / spread

    log_q = standardised(q.log(), *network.rigidity[k]).clamp(-4, 4)
    lowest, highest, centre, spread, mean_square = network.output[k]
    m = standardised(distance.clamp(lowest, highest), centre, spread)
    square = torch.zeros_like(m) if math.isinf(spread) else m**2 - mean_square
    of_rows = []
    for j in range(features.shape[1]):
        centre, spread = network.centre[of_features, j], network.spread[of_features, j]
        of_rows.append(standardised(features[:, j], centre, spread).clamp(-6, 6))
    along = torch.stack(of_rows, 1) @ network.directions[of_features]
    return torch.cat([torch.stack([log_q, m, square], 1), along], 1)


def slow_outputs(head: Head, k: int, q: Tensor, distance: Tensor, features: Tensor) -> Tensor:
    """The outputs o of rows before they are clipped, (M, O)."""
    constant = head.constant[k]
    if head.network is None:
        return constant.repeat(len(q), 1)
    phi = slow_inputs(head, k, q, distance, features)
    hidden = head.network.hidden_constant.shape[1]
    weight = head.network.weight[k]
    into_hidden, into_outputs = weight[:, :hidden], weight[:, hidden:]
    x = head.network.hidden_constant[k] + phi @ into_hidden
    silu = x / (1 + (-x).exp())
    return constant + phi @ into_outputs + silu @ head.network.hidden_weight[k]


def slow_rows(
    head: Head,
    guard: Guard | None,
    k: int,
    q: Tensor,
    mean: Tensor,
    features: Tensor,
    factor: Tensor | None = None,
    novelty: Tensor | None = None,
) -> SlowRows:
    """What the head of target k says of rows.

    Args:
        head: The heads of all targets.
        guard: Their guard, if there is one.
        k: The target.
        q: Unscaled variances of the target, (M,).
        mean: Its predictions, (M,).
        features: Its features, (M, D).
        factor: What a unit of noise adds to each row's variance, (M,); one by default.
        novelty: Novelty of the rows, (M,), if it is known.
    """
    factor = torch.ones_like(q) if factor is None else factor
    forecast = head.forecast
    distance = mean - forecast.centre[k]
    extent = torch.ones_like(q)
    if forecast.by_feature is not None:
        weight = forecast.extent_weight[k if len(forecast.extent_weight) > 1 else 0]
        extent = (features @ weight).abs()
        extent[extent == 0] = 1.0
        distance = (distance - features @ forecast.by_feature[k]) / extent
        features = torch.where(weight == 0, features / extent[:, None], features)
    q = q / extent**2

    outputs = slow_outputs(head, k, q, distance, features)
    components = (outputs.shape[1] - 1) // 3
    h = outputs[:, 0].clamp(*head.bounds[k])
    logit, offset, log_width = outputs[:, 1:].split(components, 1)
    log_width = log_width.clamp(NARROWEST, WIDEST)
    if guard is not None:
        unfamiliar = q / guard.reference[k]
        if novelty is not None:
            unfamiliar = torch.maximum(unfamiliar, (novelty / guard.alarm) ** 3)
        rise = 2 * unfamiliar.log10().clamp(min=0)
        familiarity = (-(rise**2)).exp()
        usual = head.usual[k, 1:].split(components)
        fade = (familiarity**2)[:, None]
        logit, offset, log_width = (
            fade * of_row + (1 - fade) * of_usual
            for of_row, of_usual in zip((logit, offset, log_width), usual, strict=True)
        )
    share, width = logit.softmax(1), log_width.exp()
    second = (share * (2 * width**2 + offset**2)).sum(1)
    moment = (h.exp() * factor + head.scale2[k] * q) * second
    if guard is not None:
        ignorant = guard.variance[k] + distance**2
        moment = moment * (1 + ignorant / moment) ** (1 - familiarity)
    return SlowRows(moment * extent**2, share, offset, width, mean)
