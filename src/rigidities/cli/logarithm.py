r"""Predictions of a target whose logarithm was learnt, in the target's own unit.

The model predicts $\log y = m + u t$, where t follows a distribution of location zero and scale
one. Then $y = e^m e^{u t}$. Quantiles are exponentials of quantiles, and probabilities stay as they
are, so that intervals cover as many true values as those of the logarithm do.

`in_target_unit` makes such a prediction:

| value | meaning |
| --- | --- |
| `mean` | $e^m$, the exponential of the predicted logarithm: a typical value, close to the median |
| `std` | $e^m \sinh s$, half the distance from one error bar below to one above on the log scale |
| `centre` | the mean of the distribution, without the outermost 0.2 % on either side |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..prediction.distribution import Distribution
from ..prediction.prediction import Prediction

_ATOMS = 256
"""Values by which a distribution is replaced in moments and scores."""

_LARGEST_EXPONENT = 200.0
"""Exponents are cut here: squares of their exponentials are still finite in double precision."""


def in_target_unit(prediction: Prediction) -> Prediction:
    """The prediction of y, by that of log y.

    A support is that of log y; rigidity and novelty stay as they are.
    """
    log_std = prediction.std.clamp(max=_LARGEST_EXPONENT)
    mean = prediction.mean.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT).exp()
    scale = mean * log_std.sinh()
    share = prediction.epistemic / prediction.variance
    support = prediction.support
    if support is not None:
        support = tuple(_exponential(bound) for bound in support)  # type: ignore[assignment]
    return replace(
        prediction,
        mean=mean,
        epistemic=scale.square() * share,
        noise=scale.square() * (1 - share),
        from_inputs=torch.zeros(()),
        distribution=Exponentiated(
            base=prediction.distribution, unit=prediction.unit, log_std=log_std
        ),
        support=support,
    )


def _exponential(bound: float | Tensor | None) -> float | Tensor | None:
    """Of a bound, if there is one."""
    if bound is None:
        return None
    return torch.as_tensor(bound, dtype=torch.float64).exp()


@dataclass(frozen=True, eq=False)
class Exponentiated(Distribution):
    r"""The distribution of $z = (e^{u t} - 1) / \sinh s$, where t follows another one.

    Attributes:
        base: The distribution of t.
        unit: u, a number, or one for each prediction.
        log_std: s, the error bar of the logarithm, a number, or one for each prediction.
        reflected: Whether it is the distribution of -z instead.
    """

    name = "learnt on a logarithmic scale"

    base: Distribution
    unit: float | Tensor
    log_std: float | Tensor
    reflected: bool = False

    @property
    def mirrored(self) -> Exponentiated:
        """The distribution of -z."""
        return replace(self, reflected=not self.reflected)

    @property
    def mean(self) -> Tensor:
        """E z, over the atoms."""
        values, weights = self._atoms
        return (values * weights).sum(-1)

    def each(self, change: Callable[[Tensor], Tensor]) -> Exponentiated:
        """The distribution with `change` applied to tensors with an entry per prediction."""
        return replace(
            self,
            base=self.base.each(change),
            unit=change(self._unit),
            log_std=change(self._log_std),
        )

    def quantile(self, level: Tensor) -> Tensor:
        """The exponential of the quantile of t."""
        if self.reflected:
            return -self._of_base(-self.base.mirrored.quantile(level))
        return self._of_base(self.base.quantile(level))

    def cdf(self, z: Tensor) -> Tensor:
        """Probability below z, with all digits of small probabilities."""
        if self.reflected:
            t, possible = self._to_base(-z)
            return torch.where(possible, self.base.mirrored.cdf(-t), 1.0)
        t, possible = self._to_base(z)
        return torch.where(possible, self.base.cdf(t), 0.0)

    def log_density(self, z: Tensor) -> Tensor:
        """Logarithm of the density: that of t, times dt/dz."""
        forward = -z if self.reflected else z
        t, possible = self._to_base(forward)
        log_slope = (self._scale / self._unit).log() - self._unit * t
        return torch.where(possible, self.base.log_density(t) + log_slope, -torch.inf)

    def sample(self, like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """Draws for each entry of `like`, (n, ...)."""
        z = self._of_base(self.base.sample(like, n, generator))
        return -z if self.reflected else z

    def shortfall(self, z: Tensor, draws: int = 1) -> Tensor:
        r"""$E \max(z - Z, 0)$ for Z the largest of one or two draws, over the atoms."""
        values, weights = self._atoms  # ascending
        below = weights.cumsum(-1) ** draws
        weights = torch.cat([below[..., :1], below.diff(dim=-1)], -1)
        return ((z[..., None] - values).clamp(min=0) * weights).sum(-1)

    def _of_base(self, t: Tensor) -> Tensor:
        """z by t."""
        exponent = (self._unit * t).clamp(max=2 * _LARGEST_EXPONENT)
        return torch.expm1(exponent) / self._scale

    def _to_base(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """t by z, and whether there is such a t: values of the target are above zero."""
        ratio = z.double() * self._scale
        possible = ratio > -1
        t = torch.log1p(torch.where(possible, ratio, 0.0)) / self._unit
        return t, possible

    @property
    def _unit(self) -> Tensor:
        """u in double precision."""
        return torch.as_tensor(self.unit, dtype=torch.float64)

    @property
    def _log_std(self) -> Tensor:
        """s in double precision."""
        return torch.as_tensor(self.log_std, dtype=torch.float64)

    @property
    def _scale(self) -> Tensor:
        """sinh s."""
        return self._log_std.sinh()

    @property
    def _atoms(self) -> tuple[Tensor, Tensor]:
        """Values of z in ascending order and their weights, (..., atoms) each."""
        level = (torch.arange(_ATOMS, dtype=torch.float64) + 0.5) / _ATOMS
        t = self.base.each(lambda tensor: tensor[..., None, :]).quantile(level)
        weights = torch.full_like(t, 1 / _ATOMS)
        exponent = self._unit[..., None] * t
        values = torch.expm1(exponent.clamp(max=_LARGEST_EXPONENT)) / self._scale[..., None]
        weights = weights.expand(values.shape)
        if self.reflected:
            return -values.flip(-1), weights.flip(-1)
        return values, weights
