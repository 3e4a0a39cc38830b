r"""A head on frozen features: how noise and shape of the law follow the input.

For each target, with inputs $\phi$ standardised on training rows (log q clipped to $\pm 4$; the
prediction, kept within its training range, and its square; the features clipped to $\pm 6$), one
product gives $h = a + w \cdot \phi$, the logarithm of the noise, kept within the range of its
fitted values, and $\theta = c + W \phi$, the tilt of the law, kept within $\pm 3$. Beyond the
training rows the guard takes over: it widens the bars with q and lets the tilt fade.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Parts = tuple[Tensor, ...]
FAR_Q, FAR, STEEPEST = 4.0, 6.0, 3.0
GROWTH = 0.8
"""Power of q by which the guard's variance grows beyond its reference."""


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
        low, high, centre, spread, square = self.output
        middle, far = self.rigidity[0], FAR_Q * _finite(self.rigidity[1])
        # q may be zero, and its logarithm then lies at the lower end
        a = (q.log().clamp(middle - far, middle + far) - middle) / self.rigidity[1]
        b = (mean.clamp(low, high) - centre) / spread
        own = torch.stack([a, b, b.square() - square], -1)
        return torch.cat([own, ((features - self.centre) / self.spread).clamp(-FAR, FAR)], -1)


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
        scale2: of q in the law's squared scale, (K,).
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

    def to(self, to: torch.device | torch.dtype) -> Head:
        """The same elsewhere, or in another precision."""
        return Head(*(tensor.to(to) for tensor in vars(self).values()))

    @property
    def targets(self) -> int:
        """K."""
        return len(self.constant)

    def tensors(self) -> dict[str, Tensor]:
        """For files."""
        return dict(vars(self))


@dataclass(frozen=True)
class HeadForm:
    """A head folded for speed, in one precision: inputs are clipped as they are.

    Attributes:
        reach: least and largest features, (D,) or (K, D).
        weight: of the features, (D, K (1 + J)), or (K, D, 1 + J) for features of their own.
        own: least, largest, centre and 1 / spread of log q and the prediction, (K, 2).
        first: weights of these two and of their squares, (K, 4, 1 + J).
        constant: (K, 1, 1 + J).
        bounds: least and largest h and tilt, (K, 1 + J).
    """

    reach: Parts
    weight: Tensor
    own: Parts
    first: Tensor
    constant: Tensor
    bounds: Parts

    @classmethod
    def of(cls, head: Head, dtype: torch.dtype) -> HeadForm:
        """Standardisation goes into weights and constant, in float64."""
        (a, b, both), away = head.weight[:, :3].unbind(1), _finite(head.spread) * FAR
        weight = (head.weight[:, 3:].mT / head.spread.unsqueeze(-2)).mT  # (K, D, 1 + J)
        shift = head.centre.expand(weight.shape[:2])[:, None] @ weight
        constant = head.constant - shift[:, 0] - head.output[:, 4:] * both
        width = head.centre.shape[-1] - bool(head.spread[..., -1:].isinf().all())
        weight = weight[:, :width]  # a last column of ones, which may be left out, has weight zero
        if head.centre.ndim == 1:
            weight = weight.movedim(0, 1).flatten(1)
        middle, far = head.rigidity[:, 0], _finite(head.rigidity[:, 1]) * FAR_Q
        low, high, centre, spread, _ = head.output.unbind(1)
        own = [(middle - far, low), (middle + far, high), (middle, centre)]
        own.append((1 / head.rigidity[:, 1], 1 / spread))
        steepest = torch.full_like(constant[:, 1:], STEEPEST)
        ends = zip(head.bounds.mT[..., None], (-steepest, steepest), strict=True)

        def cast(part: Tensor) -> Tensor:
            return part.to(dtype).contiguous()

        return cls(
            tuple(cast((head.centre + far)[..., :width]) for far in (-away, away)),
            cast(weight),
            tuple(cast(torch.stack(pair, -1)) for pair in own),
            cast(torch.stack([a, b, torch.zeros_like(a), both], 1)),
            cast(constant[:, None]),
            tuple(cast(torch.cat(pair, 1)) for pair in ends),
        )

    def __call__(self, q: Tensor, mean: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """h (M, K) and tilt (M, K, J) of q (M, 1 or K), predictions (M, K) and features."""
        dtype = self.constant.dtype
        low, high, centre, rate = (part[:, None] for part in self.own)  # (K, 1, 2)
        # Targets come first from here on: onnxruntime joins a transpose in front of a product with
        # it, and ends the process for a batch of no rows.
        log_q = q.to(dtype).log().expand_as(mean)
        own = torch.stack([log_q.mT, mean.to(dtype).mT], -1)  # (K, M, 2)
        own = (torch.clamp(own, low, high) - centre) * rate
        own = torch.cat([own, own.square()], -1)
        both = torch.baddbmm(self.constant, own, self.first)  # (K, M, 1 + J)
        width = self.reach[0].shape[-1]
        features = features if features.shape[-1] == width else features[..., :width]
        clipped = torch.clamp(features.to(dtype), *self.reach)
        if clipped.ndim == 3:
            both = torch.baddbmm(both, clipped.transpose(0, 1), self.weight).transpose(0, 1)
        else:
            flat = both.transpose(0, 1).flatten(1)
            both = torch.addmm(flat, clipped, self.weight).view(-1, *self.bounds[0].shape)
        both = torch.clamp(both, *self.bounds)
        return both[..., 0], both[..., 1:]


def _finite(spread: Tensor) -> Tensor:
    """Zero where it is infinite."""
    return torch.where(spread.isfinite(), spread, 0.0)


@dataclass(frozen=True)
class Guard:
    r"""What keeps the bars wide beyond the training rows, whatever the head says there.

    The squared scale gains $\alpha_g^2 q_{ref} [(q/q_{ref})^p - 1]_+$, and the tilt
    is multiplied by $\min(1, q_{ref} / q)$.

    Attributes:
        scale2: $\alpha_g^2$, (K,).
        reference: $q_{ref}$, (K,), a high quantile of left-out training rows.
    """

    scale2: Tensor
    reference: Tensor

    def beyond(self, q: Tensor) -> Tensor:
        r"""$\max(1, q / q_{ref})$ of rows (M, 1 or K)."""
        return (q / self.reference.to(q)).clamp(min=1)

    def variance(self, q: Tensor, beyond: Tensor | None = None) -> Tensor:
        """Of rows (M, 1 or K)."""
        more = (self.beyond(q) if beyond is None else beyond) ** GROWTH - 1
        return (self.scale2 * self.reference).to(q) * more

    def to(self, to: torch.device | torch.dtype) -> Guard:
        """The same elsewhere, or in another precision."""
        return Guard(self.scale2.to(to), self.reference.to(to))

    def tensors(self) -> dict[str, Tensor]:
        """For files."""
        return dict(vars(self))


def widened(
    q: Tensor, noise: Tensor, tilt: Tensor, scale2: Tensor, guard: Guard | None
) -> tuple[Tensor, Tensor]:
    """The law's squared scale (M, K) and tilt of rows, by a head's noise and tilt and a guard."""
    squared = torch.addcmul(noise.to(q), scale2.to(q), q)
    if guard is not None:
        beyond = guard.beyond(q)
        squared = squared + guard.variance(q, beyond)
        tilt = tilt / beyond[..., None].to(tilt)
    return squared, tilt
