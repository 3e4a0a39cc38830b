r"""Adam with decoupled weight decay, and a learning rate for every network of a stack.

References:
    Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

BETA_1 = 0.9
BETA_2 = 0.999
EPSILON = 1e-8


class Adam:
    r"""The optimiser of a tensor whose rows are networks.

    $m \leftarrow \beta_1 m + (1 - \beta_1) g$, $v \leftarrow \beta_2 v + (1 - \beta_2) g^2$,
    $w \leftarrow (1 - \eta \lambda) w - \eta \hat m / (\sqrt{\hat v} + \epsilon)$.

    Args:
        weights: $w$, (B, parameters), changed in place.
        rate: The first learning rate $\eta$ of all networks.
        decay: $\lambda$.

    Attributes:
        rate: $\eta$ of each network, (B, 1); may be changed between steps.
    """

    def __init__(self, weights: Tensor, rate: float, decay: float = 0.0) -> None:
        self.weights = weights
        self.decay = decay
        self.rate = torch.full_like(weights[:, :1], rate)
        self._mean = torch.zeros_like(weights)  # m
        self._square = torch.zeros_like(weights)  # v
        self._buffer = torch.empty_like(weights)
        self._steps = 0

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        """Take one step in place, along the gradient (B, parameters)."""
        self._steps += 1
        self._mean.lerp_(gradient, 1 - BETA_1)
        self._square.mul_(BETA_2).addcmul_(gradient, gradient, value=1 - BETA_2)
        if self.decay:
            self.weights.mul_(1 - self.rate * self.decay)

        # Corrections c1 and c2 of the start at zero: m / c1 and v / c2 are unbiased. With
        # sqrt(v / c2) + eps = (sqrt(v) + eps sqrt(c2)) / sqrt(c2) they enter as numbers.
        mean_correction = 1 - BETA_1**self._steps
        square_correction = 1 - BETA_2**self._steps
        torch.sqrt(self._square, out=self._buffer)
        self._buffer.add_(EPSILON * square_correction**0.5)
        torch.div(self._mean, self._buffer, out=self._buffer)
        factor = -(square_correction**0.5) / mean_correction
        self.weights.addcmul_(self._buffer, self.rate, value=factor)
