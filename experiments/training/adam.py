r"""Adam with decoupled weight decay, and a learning rate of its own for every net of a stack.

References:
    Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST, SECOND, SMALL = 0.9, 0.999, 1e-8


class Adam:
    r"""The optimiser of a tensor whose rows are nets.

    $m \leftarrow \beta_1 m + (1 - \beta_1) g$, $v \leftarrow \beta_2 v + (1 - \beta_2) g^2$,
    $w \leftarrow (1 - \eta \lambda) w - \eta \hat m / (\sqrt{\hat v} + \epsilon)$.

    Attributes:
        rate: $\eta$, (B, 1); may be changed between steps.
    """

    def __init__(self, weights: Tensor, rate: float, decay: float = 0.0) -> None:
        self.weights, self.decay = weights, decay
        self.rate = torch.full_like(weights[:, :1], rate)
        self._mean, self._square = torch.zeros_like(weights), torch.zeros_like(weights)
        self._work = torch.empty_like(weights)
        self._steps = 0

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        """One step, in place."""
        self._steps += 1
        self._mean.lerp_(gradient, 1 - FIRST)
        self._square.mul_(SECOND).addcmul_(gradient, gradient, value=1 - SECOND)
        if self.decay:
            self.weights.mul_(1 - self.rate * self.decay)
        first, second = 1 - FIRST**self._steps, 1 - SECOND**self._steps
        torch.sqrt(self._square, out=self._work)
        # sqrt(v / c2) + eps = (sqrt(v) + eps sqrt(c2)) / sqrt(c2)
        self._work.add_(SMALL * second**0.5)
        torch.div(self._mean, self._work, out=self._work)
        self.weights.addcmul_(self._work, self.rate, value=-(second**0.5) / first)
