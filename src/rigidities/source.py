"""How to call a model: the user's own functions, and the mode that derivatives need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .outputs import pick

F = TypeVar("F", bound=Callable[..., Any])
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


def outside_inference_mode(function: F) -> F:
    """Run a function in normal mode, with ordinary copies of inference tensors."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            args, kwargs = tree_map_only(Tensor, _ordinary, (args, kwargs))
            return function(*args, **kwargs)

    return cast("F", run)


def _ordinary(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor
