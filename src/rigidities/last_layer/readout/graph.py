"""A pass of the model that is safe inside a compiled or exported graph."""

from __future__ import annotations

from typing import Any, cast

import torch

from .binding import Binding
from .reading import Reading
from .tap import AnyTap, Tap
from .traced import TracedReadout


class ReadoutPass:
    """Inputs -> `Reading`: by the tap, which checks the model; in a graph without a look at values.

    Args:
        binding: the tie to the model.
    """

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self._tap: AnyTap | None = None
        self._graph: TracedReadout | None = None

    def __call__(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Reading:
        """One pass."""
        if not torch.compiler.is_compiling():
            return self.eager(inputs, keywords)
        if self._graph is not None:
            return self._graph(inputs, keywords)
        if torch.compiler.is_exporting():
            raise ValueError(_refusal(self._tap))
        # Only a plain readout is one graph: any other is read between two graphs.
        between = torch.compiler.disable(self.eager)  # type: ignore[no-untyped-call]
        reading: Reading = between(inputs, keywords)
        return reading

    def eager(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Reading:
        """One pass outside any graph."""
        return self.current()(*inputs, **keywords)

    def current(self) -> AnyTap:
        """The tap, if the model's weights are still those of the fit."""
        tap = self.binding.current()
        if tap is not self._tap:
            plain = isinstance(tap, Tap) and tap.case == "plain"
            self._graph = TracedReadout(self.binding.model, cast("Tap", tap)) if plain else None
            self._tap = tap
        return tap

    def forget(self) -> None:
        """The tap is built again when it is next needed."""
        self._tap = self._graph = None


def _refusal(tap: AnyTap | None) -> str:
    """Why there is no graph, and what to do."""
    if tap is None:
        return "This ensemble has not met its model yet: call ens(x) once before exporting it."
    if tap.case == "features":
        reason = "its features come from the function features="
    else:
        reason = (
            f"what follows the readout layer ({', '.join(tap.heads)}) is differentiated in each "
            f"call (case {tap.case!r})"
        )
    return (
        f"This ensemble cannot be exported: {reason}. Let the model return the output of a linear "
        "layer as it is, fit that model, and scale or sum the members afterwards."
    )
