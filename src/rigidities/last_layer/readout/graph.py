"""The pass of a model that is safe inside a graph: for `torch.compile`, `torch.export` and ONNX.

A tap looks at values and memory to check itself, which no tracer allows; in a graph nothing is
looked at. Two twins of the model are kept: one whose parameters are frozen aliases, for
compilation, and one that holds the model's own parameters, by whose identity an exporter names
them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ...models.modes import exporting, refuse_transforms
from ...models.shadow import shadow, unwrapped
from .binding import Binding
from .cases import side_by_side
from .heads import Recorder, as_rows, guard, record
from .reading import Reading
from .tap import AnyTap, Tap

Places = list[tuple[dict[str, Any], dict[str, Any]]]


class ReadoutPass:
    """Inputs -> `Reading`: by the tap, which checks the model; in a graph without a look."""

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self._tap: AnyTap | None = None
        self._graph: TracedReadout | None = None

    def __call__(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Reading:
        """One pass."""
        if torch.compiler.is_compiling() and self._graph is not None:
            return self._graph(inputs, keywords)
        if torch.compiler.is_compiling() and exporting():
            raise ValueError(_refusal(self._tap))
        # Only a plain readout is one graph: any other is read between two graphs.
        reading: Reading = self.eager(inputs, keywords)
        return reading

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def eager(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Reading:
        """One pass outside any graph."""
        refuse_transforms()
        reading: Reading = self.current()(*inputs, **keywords)
        return reading

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


class TracedReadout:
    """Inputs -> (output, features) for a plain readout, without a look at any value."""

    def __init__(self, model: nn.Module, tap: Tap) -> None:
        self._source = tap.source
        self._frozen, _ = _twin(model, tap)
        self._named, self._places = _twin(model, tap)
        _bind(self._places)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """One forward pass inside a tracer."""
        if not exporting():
            return self._read(self._frozen, args, kwargs)
        if torch.compiler.is_dynamo_compiling():
            return self._read(self._named, args, kwargs)
        return self._read_stand_ins(args, kwargs)

    def _read_stand_ins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """A non-strict export puts stand-ins into the model while it runs: follow it."""
        own = [dict(mine) for mine, _ in self._places]
        _bind(self._places)
        try:
            return self._read(self._named, args, kwargs)
        finally:
            for (mine, _), tensors in zip(self._places, own, strict=True):
                mine.update(tensors)

    def _read(
        self, twin: tuple[nn.Module, list[Recorder]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Reading:
        model, recorders = twin
        for recorder in recorders:
            recorder.reset()
        output: Tensor = self._source.run(model, args, kwargs)
        calls = [recorder.calls[0] for recorder in recorders]
        rows = [as_rows(call.head, call.input) for call in calls]
        for recorder in recorders:
            recorder.reset()
        return side_by_side(output, calls, rows)


def _twin(model: nn.Module, tap: Tap) -> tuple[tuple[nn.Module, list[Recorder]], Places]:
    """A shadow with its recorders; its parameters and buffers beside the model's, by module."""
    model = unwrapped(model)
    twin = shadow(model)
    places: Places = []
    for mine, theirs in zip(twin.modules(), model.modules(), strict=True):
        places += [(mine._parameters, theirs._parameters), (mine._buffers, theirs._buffers)]
    guard(twin, tap.silent)
    return record(twin, tap.heads), places


def _bind(places: Places) -> None:
    for mine, theirs in places:
        mine.update(theirs)
