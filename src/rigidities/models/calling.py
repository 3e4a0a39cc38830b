"""How to call a model: the user's own functions, and the mode that derivatives need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .outputs import pick

FeatureFunction = Callable[..., Any]
ForwardFunction = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Source:
    """How to call a model: the user's `forward`, `features` and `output` choices."""

    forward: ForwardFunction | None = None
    features: FeatureFunction | None = None
    output: str | int | None = None

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The model's output tensor for a batch."""
        result = model(*args, **kwargs) if self.forward is None else self.forward(model, *args)
        return pick(result, self.output)
