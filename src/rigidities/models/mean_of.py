"""Several trained networks as one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .calling import pick

__all__ = ["MeanOf"]


class MeanOf(nn.Module):
    """The mean of the outputs of several trained models, to be wrapped like any other model.

    It is linear in the readout weights of all models together: one readout, whose features are
    those of all models side by side.

    Args:
        models: One or more models of any architecture that accept the same inputs and return
            outputs of the same shape. They are not copied.
        output: Key, index or attribute of the prediction, if the models return several.

    Raises:
        TypeError: `models` is not a list of modules.

    Examples:
        >>> networks = [nn.Linear(3, 1) for _ in range(5)]
        >>> x = torch.randn(4, 3)
        >>> expected = sum(network(x) for network in networks) / 5
        >>> bool(torch.allclose(MeanOf(networks)(x), expected, atol=1e-6))
        True
    """

    def __init__(self, models: Sequence[nn.Module], *, output: str | int | None = None) -> None:
        super().__init__()
        listed = isinstance(models, (list, tuple, nn.ModuleList)) and len(models) > 0
        if not listed or not all(isinstance(model, nn.Module) for model in models):
            got = [type(model).__name__ for model in models] if listed else type(models).__name__
            raise TypeError(f"MeanOf expects a list of one or more torch.nn.Module, got {got}.")
        self.models = nn.ModuleList(models)
        self.output = output

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """The mean over the models.

        Raises:
            ValueError: The models return outputs of different shapes.
        """
        values = [pick(model(*inputs, **named), self.output) for model in self.models]
        shapes = [tuple(value.shape) for value in values]
        if len(set(shapes)) > 1:
            raise ValueError(f"MeanOf needs outputs of the same shape; its models return {shapes}.")
        return torch.stack(values).mean(0)
