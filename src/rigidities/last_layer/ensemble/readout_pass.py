"""How an ensemble reads a batch: by its readout, or inside a graph by a traced one."""

from __future__ import annotations

from typing import Any

import torch

from ...models.modes import exporting, outside_graphs
from ...readout.copies import TracedReadout
from ...readout.reading import Reading
from ...readout.readout import AnyReadout, Readout
from ..binding import Binding


class ReadoutPass:
    """Inputs -> `Reading`: by the readout, after a check of the model; unchecked inside a graph.

    Args:
        binding: The tie to the model.
    """

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self._readout: AnyReadout | None = None
        self._traced: TracedReadout | None = None

    def __call__(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Reading:
        """One pass."""
        if torch.compiler.is_compiling() and self._traced is not None:
            return self._traced(inputs, keywords)
        if torch.compiler.is_compiling() and exporting():
            raise ValueError(_export_refusal(self._readout))
        # Only a plain readout is one graph: any other is read between two graphs.
        return self.eager(inputs, keywords)

    @outside_graphs
    def eager(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Reading:
        """One pass outside any graph."""
        return self.current().read(inputs, keywords)

    def current(self) -> AnyReadout:
        """The readout, if the model's weights are still those of the fit."""
        readout = self.binding.current()
        if readout is not self._readout:
            self._traced = None
            if isinstance(readout, Readout) and readout.kind == "plain":
                self._traced = TracedReadout(self.binding.user_model.model, readout)
            self._readout = readout
        return readout

    def forget(self) -> None:
        """Drop the readout, which is fetched again when it is next needed."""
        self._readout = None
        self._traced = None


def _export_refusal(readout: AnyReadout | None) -> str:
    """Why an ensemble cannot be exported."""
    if readout is None:
        return "This ensemble has not run its model yet. Call ens(x) once before you export it."
    if readout.kind == "features":
        reason = "its features come from the function features="
    else:
        reason = (
            f"what follows the readout layer ({', '.join(readout.heads)}) is differentiated in "
            "each call"
        )
    return (
        f"This ensemble cannot be exported: {reason}. Let the model return the plain output of a "
        "linear layer, fit that model, and scale or sum the members afterwards."
    )
