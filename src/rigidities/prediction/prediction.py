r"""A prediction with its error bar: $\mu$, $\alpha^2 q$, noise, and the law around them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..notices import require_level
from .law import Gaussian, Law


@dataclass(frozen=True)
class Prediction:
    r"""Mean and error bar of many predictions; every tensor is shaped like the model's output.

    Attributes:
        mean: what the model predicts.
        epistemic: $\alpha^2 f^\top (G + \varsigma^2 I)^{-1} f$, what more data would shrink.
        noise: variance that more data would not shrink; zero unless calibrated.
        rigidity: the paper's $R = 1/q$, unscaled.
        from_inputs: variance that uncertain inputs bring; zero unless asked for.
        law: shape of the predictive law.

    Examples:
        >>> one = torch.ones(1)
        >>> p = Prediction(mean=2 * one, epistemic=9 * one, noise=16 * one, rigidity=one)
        >>> p.std.item(), [round(bound.item(), 2) for bound in p.interval(0.9)]
        (5.0, [-6.22, 10.22])
    """

    mean: Tensor
    epistemic: Tensor
    noise: Tensor
    rigidity: Tensor
    from_inputs: Tensor = field(default_factory=lambda: torch.zeros(()))
    law: Law = field(default_factory=Gaussian)

    def __post_init__(self) -> None:
        if self.from_inputs.ndim == 0:
            shaped = self.from_inputs.to(self.epistemic).expand_as(self.epistemic)
            object.__setattr__(self, "from_inputs", shaped)

    @property
    def variance(self) -> Tensor:
        """Epistemic variance plus noise, plus what uncertain inputs bring."""
        return self.epistemic + self.noise + self.from_inputs

    @property
    def std(self) -> Tensor:
        """Standard deviation of the predictive law."""
        return self.variance.sqrt()

    def quantile(self, level: float) -> Tensor:
        """The value with probability `level` below it."""
        require_level(level, "A quantile's")
        z = self.law.quantile(torch.tensor(level, dtype=torch.float64))
        return self.mean + z.to(self.std) * self.std

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval that holds probability `level`: (low, high)."""
        require_level(level, "An interval's")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws of each prediction, (n, ...). They carry no correlations."""
        return self.mean + self.std * self.law.sample(self.mean, n, generator)

    def log_prob(self, target: Tensor) -> Tensor:
        """Logarithm of the predictive density at the target."""
        if target.shape != self.mean.shape:
            if target.squeeze().shape != self.mean.squeeze().shape:
                raise ValueError(
                    f"The target must be shaped like the prediction, {tuple(self.mean.shape)}, "
                    f"got {tuple(target.shape)}."
                )
            target = target.reshape(self.mean.shape)
        z = (target.to(self.mean) - self.mean) / self.std
        return self.law.log_density(z) - self.std.log()

    def __len__(self) -> int:
        return len(self.mean)
