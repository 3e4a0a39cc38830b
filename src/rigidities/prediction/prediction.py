r"""A prediction with its error bar: $\mu$, $\alpha^2 q$, noise, and the law around them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..notices import require_level
from .law import Gaussian, Law


@dataclass(frozen=True)
class Prediction:
    r"""Mean and error bar of many predictions; every tensor is shaped like the model's output.

    With `support`, probability that the law puts beyond a bound lies at the bound: quantiles,
    samples, `cdf`, `log_prob`, `crps` and `centre` are those of the bounded law. `variance` and
    `std` are not.

    Attributes:
        mean: what the model predicts.
        epistemic: $\alpha^2 f^\top (G + \varsigma^2 I)^{-1} f$, what more data would shrink: by how
            much the prediction would move, were the model trained again on other rows.
        noise: the rest of the law's second moment, tails and guard included; zero unless
            calibrated.
        rigidity: the paper's $R = 1/q$, unscaled.
        from_inputs: variance that uncertain inputs bring; zero unless asked for.
        law: shape of the predictive law.
        support: the least and the largest value a target can have, None for no bound.
        conformal: what gives `interval` its guarantee, if anything.

    Examples:
        >>> one = torch.ones(1)
        >>> p = Prediction(mean=2 * one, epistemic=9 * one, noise=16 * one, rigidity=one)
        >>> p.std.item(), [round(bound.item(), 2) for bound in p.interval(0.9)]
        (5.0, [-6.22, 10.22])
        >>> round(p.cdf(7 * one).item(), 4), round(p.crps(2 * one).item(), 4)
        (0.8413, 1.1685)
    """

    mean: Tensor
    epistemic: Tensor
    noise: Tensor
    rigidity: Tensor
    from_inputs: Tensor = field(default_factory=lambda: torch.zeros(()))
    law: Law = field(default_factory=Gaussian)
    support: tuple[float | None, float | None] | None = None
    conformal: Any = None

    def __post_init__(self) -> None:
        if self.from_inputs.ndim == 0:
            shaped = self.from_inputs.to(self.epistemic).expand_as(self.epistemic)
            object.__setattr__(self, "from_inputs", shaped)
        low, high = self._bounds
        if not low < high:
            raise ValueError(
                "A support is the least value before the largest, None for no bound, got "
                f"{self.support}."
            )

    @property
    def variance(self) -> Tensor:
        """Of the parts together: the second moment of the law about `mean`."""
        return self.epistemic + self.noise + self.from_inputs

    @property
    def std(self) -> Tensor:
        """Standard deviation of the predictive law, about `mean`."""
        return self.variance.sqrt()

    @property
    def scale(self) -> Tensor:
        r"""The law's unit: $s = \sigma / \sqrt{E z^2}$."""
        second = torch.as_tensor(self.law.second, dtype=torch.float64)
        kind = torch.promote_types(self.variance.dtype, torch.float32)
        return (self.variance.to(kind) / second.to(self.mean.device, kind)).sqrt()

    @property
    def centre(self) -> Tensor:
        """The law's own mean, which a tilt and bounds move away from `mean`."""
        shift = torch.as_tensor(self.law.mean, dtype=torch.float64).to(self.scale)
        for sign, _, law, z in self._ends:
            shift = shift + sign * law.shortfall(z)
        return self.mean + self.scale * shift

    def quantile(self, level: float) -> Tensor:
        """The value with probability `level` below it."""
        require_level(level, "A quantile's")
        z = self.law.quantile(torch.tensor(level, dtype=torch.float64, device=self.mean.device))
        return (self.mean + z.to(self.scale) * self.scale).clamp(*self._bounds)

    def interval(self, level: float = 0.9, *, conformal: bool = False) -> tuple[Tensor, Tensor]:
        """The central interval that holds probability `level`: (low, high).

        Args:
            level: the probability.
            conformal: under the law where False; with the guarantee of the conformal rows where
                True.

        Raises:
            ValueError: the level is none, or there were no conformal rows.
        """
        require_level(level, "An interval's")
        if not conformal:
            return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)
        if self.conformal is None:
            raise ValueError(
                "A conformal interval needs rows that fitted nothing else, and the calibration had "
                "none. Call calibrate(..., conformal=rows)."
            )
        bounds: tuple[Tensor, Tensor] = self.conformal.interval(self, level)
        return bounds

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws of each prediction, (n, ...). They carry no correlations."""
        drawn = self.mean + self.scale * self.law.sample(self.scale, n, generator)
        return drawn.clamp(*self._bounds)

    def log_prob(self, target: Tensor) -> Tensor:
        """Logarithm of the predictive density at the target; of the mass, at a bound."""
        y, (low, high) = self._matched(target), self._bounds
        value = self.law.log_density(self._z(y)) - self.scale.log()
        for _, bound, law, z in self._ends:
            value = torch.where(y == bound, law.cdf(z.double()).log().to(value), value)
        return torch.where((y < low) | (y > high), -math.inf, value)

    def cdf(self, target: Tensor) -> Tensor:
        """Probability of a value up to the target."""
        y, (low, high) = self._matched(target), self._bounds
        below = self.law.cdf(self._z(y))
        return torch.where(y < low, 0, torch.where(y >= high, 1, below))

    def crps(self, target: Tensor) -> Tensor:
        r"""Continuous ranked probability score, $\int (F(x) - 1[x \ge y])^2 dx$."""
        y = self._matched(target)
        inside = y.clamp(*self._bounds)
        score = self.law.crps(self._z(inside))
        for _, _, law, z in self._ends:
            score = score - law.shortfall(z, 2)
        return self.scale * score + (y - inside).abs()

    def tail(self, target: Tensor) -> Tensor:
        r"""How far out a target lies, $2 \min(P(Y \le y), P(Y \ge y))$, at most 1."""
        y, (low, high) = self._matched(target), self._bounds
        mean, scale = self.mean.double(), self.scale.double()
        z = torch.where(y == mean, 0.0, (y.double() - mean) / scale)  # the scale may be zero
        below = torch.where(y < low, 0, torch.where(y >= high, 1, self.law.cdf(z)))
        above = torch.where(y > high, 0, torch.where(y <= low, 1, self.law.mirrored.cdf(-z)))
        return (2 * torch.minimum(below, above)).clamp(max=1)

    def within(self, tail: Tensor) -> tuple[Tensor, Tensor]:
        """The interval of what lies no farther out: (low, high); all there is for a tail of 0."""
        mean, scale, half = self.mean.double(), self.scale.double(), tail.double() / 2
        low = torch.where(half > 0, mean + scale * self.law.quantile(half), -math.inf)
        high = torch.where(half > 0, mean - scale * self.law.mirrored.quantile(half), math.inf)
        return low.to(self.scale).clamp(*self._bounds), high.to(self.scale).clamp(*self._bounds)

    def to(self, device: torch.device | str) -> Prediction:
        """The same on another device."""
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if hasattr(v, "to")}
        return replace(self, **moved, law=self.law.each(lambda tensor: tensor.to(device)))

    @property
    def _bounds(self) -> tuple[float, float]:
        low, high = self.support or (None, None)
        return -math.inf if low is None else low, math.inf if high is None else high

    @property
    def _ends(self) -> list[tuple[int, float, Law, Tensor]]:
        """Sign and value of each bound, and the law and its z seen with that bound below."""
        low, high = self._bounds
        ends = [(1, low, self.law, self._z(low))] if low > -math.inf else []
        return ends + ([(-1, high, self.law.mirrored, -self._z(high))] if high < math.inf else [])

    def _z(self, value: float | Tensor) -> Tensor:
        """A value in the law's units, about the mean."""
        return (value - self.mean.to(self.scale)) / self.scale

    def _matched(self, target: Tensor) -> Tensor:
        """The target shaped like the prediction, single precision at least."""
        if target.shape != self.mean.shape:
            if target.squeeze().shape != self.mean.squeeze().shape:
                raise ValueError(
                    f"The target must be shaped like the prediction, {tuple(self.mean.shape)}, "
                    f"got {tuple(target.shape)}."
                )
            target = target.reshape(self.mean.shape)
        y = target.to(self.scale)
        for bound in self._bounds:  # a target at a bound is there whatever its precision
            y = torch.where(target == bound, bound, y)
        return y

    def __len__(self) -> int:
        return len(self.mean)
