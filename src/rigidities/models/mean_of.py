r"""`MeanOf`: several trained nets as one model.

The mean of the outputs $\frac1M \sum_m h_m(x)^\top w_m$ is linear in all readout weights together.
It is thus one model with one readout, whose features are those of the members side by side, each
times $1/M$.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .calling import pick


class MeanOf(nn.Module):
    """The mean of the outputs of several trained models, to be wrapped like any other model.

    Args:
        models: one or more, of any architecture; they take the same inputs and give outputs of
            one shape. They are held, not copied.
        output: key, index or attribute of the prediction, where the models return several.

    Examples:
        >>> nets = [nn.Linear(3, 1) for _ in range(5)]
        >>> x = torch.randn(4, 3)
        >>> bool(torch.allclose(MeanOf(nets)(x), sum(net(x) for net in nets) / 5, atol=1e-6))
        True
    """

    def __init__(self, models: Sequence[nn.Module], *, output: str | int | None = None) -> None:
        super().__init__()
        listed = isinstance(models, (list, tuple, nn.ModuleList)) and len(models) > 0
        if not listed or not all(isinstance(model, nn.Module) for model in models):
            got = [type(model).__name__ for model in models] if listed else type(models).__name__
            raise TypeError(f"MeanOf takes a list of one or more torch.nn.Module, got {got}.")
        self.models, self.output = nn.ModuleList(models), output

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """The mean over the models."""
        values = [pick(model(*inputs, **named), self.output) for model in self.models]
        shapes = [tuple(value.shape) for value in values]
        if len(set(shapes)) > 1:
            raise ValueError(f"MeanOf averages outputs of one shape; its models give {shapes}.")
        return torch.stack(values).mean(0)
