"""A tap whose features the user computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...models.calling import Source
from ...models.modes import outside_inference_mode
from ...models.shadow import input_names, shadow
from .reading import Reading, Terms


class FeatureTap:
    """A tap whose features the user computes: callable(model, *inputs) -> (N, D) or (N, K, P)."""

    case = "features"
    linear = True
    weights = None

    def __init__(self, model: nn.Module, source: Source, layout: str = "shared") -> None:
        self.source = source
        self.heads: list[str] = []
        self.silent: list[str] = []
        self.layout = layout
        self.input_names = input_names(model)
        self._model = shadow(model)

    @outside_inference_mode
    def __call__(self, *args: Any, **kwargs: Any) -> Reading:
        """One forward pass and one call of the user's function."""
        return self._reading(args, kwargs)

    def graph(self, *args: Any, **kwargs: Any) -> Reading:
        """The same, differentiable by the inputs as far as the user's function is."""
        with torch.enable_grad():
            return self._reading(args, kwargs)

    def unchecked(self, *args: Any, **kwargs: Any) -> Reading:
        """The same: no value is looked at."""
        return self._reading(args, kwargs)

    def steady(self, *args: Any, **kwargs: Any) -> Callable[..., Reading]:
        """The pass as a function that `torch.func` can transform."""
        return self.unchecked

    def terms(self, *args: Any, **kwargs: Any) -> Terms:
        """Refused: what the user's features are sums of is not known.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "With features= the terms of a sum are not known. Give their features to "
            "rigidities.local yourself."
        )

    def _reading(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        assert self.source.features is not None
        output = self.source.run(self._model, args, kwargs)
        features = self.source.features(self._model, *args, **kwargs)
        if not (isinstance(features, Tensor) and features.ndim in (2, 3)):
            got = getattr(features, "shape", type(features).__name__)
            raise ValueError(f"features= must return a tensor (N, D) or (N, K, P), got {got}.")
        self.layout = "shared" if features.ndim == 2 else "joint"
        rows = features.shape[0]
        per_row = features.ndim == 2 and rows in {output.shape[0], output.numel()}
        per_output = features.ndim == 3 and features.shape[:2].numel() == output.numel()
        if not (per_row or (per_output and rows == output.shape[0])):
            raise ValueError(
                f"features= returned {tuple(features.shape)} for an output of shape "
                f"{tuple(output.shape)}: expected one row of features per row of output."
            )
        return Reading(output, features, torch.Size([rows, output.numel() // rows]), -1)
