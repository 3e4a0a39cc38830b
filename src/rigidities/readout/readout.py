r"""The readout of a model: which weights come last, and the features behind them.

The features of a prediction are its derivatives by the readout's weights, $f = \partial y /
\partial w$. A `Readout` is a finished, frozen value that `find.find_readout` returns; calling it
with a batch gives a `Reading` and changes nothing. The data take this way in every pass:

    batch -> this thread's shadow of the model -> output and calls of the heads -> `Reading`

The shadow has recorders in place of the readout's heads. Every thread has one of its own, so that
any number of them may call a readout, and a model may keep what it likes in its attributes.

There are three kinds of readouts, and what a user's function gives (`GivenFeatures`):

| kind | the output is | the features |
| --- | --- | --- |
| `plain` | what the head returned, perhaps reshaped; a mean of those | the heads' inputs |
| `tail` | any function of what linear maps returned | derivatives by that, times the inputs |
| `parameters` | any function of any parameters | derivatives, one backward pass an output |

The features have one of three layouts, for M output rows and K targets:

| layout | shape | meaning |
| --- | --- | --- |
| `shared` | (M, D) | the same features for all targets, each with a weight vector of its own |
| `separate` | (M, K, D) | each target has features and a weight vector of its own |
| `joint` | (M, K, P) | one weight vector behind all targets |

A tail whose rows act on one output row each (`tail.row_gains`) is shared or separate. One that
mixes the outputs of a sample is joint, and one in which samples depend on one another is joint and
`coupled` (`tail.samples_reading`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..data.batches import Batch
from ..data.output_layout import OutputLayout
from ..models.calling import Inputs, Source
from ..models.modes import ordinary
from ..models.shadow import input_names, placement, shadow
from ..models.threads import OfThread
from .columns import Columns, ParameterColumns
from .heads import (
    Call,
    ParameterRecorder,
    Recorder,
    put_recorders,
    refuse_calls,
)
from .reading import Reading, Terms
from .tail import (
    GraphsKept,
    RowGains,
    parameters_reading,
    plain_reading,
    row_gains,
    row_terms,
    rows_reading,
    samples_reading,
    shared_gains,
    side_by_side,
)

__all__ = ["AnyReadout", "GivenFeatures", "HeadsNotCalledError", "Readout", "readout_from_header"]


class HeadsNotCalledError(ValueError):
    """A pass did not call any head."""


class Differentiable(NamedTuple):
    """A pass that can be differentiated by the inputs.

    Attributes:
        reading: Output and features, with the graph that autograd follows.
        function: The same pass as a function of the inputs that `torch.func` can transform, which
            looks at no value; None if there is none.
    """

    reading: Reading
    function: Callable[..., Reading] | None


class AnyReadout(ABC):
    """What turns a batch into a `Reading`: a `Readout`, or `GivenFeatures`.

    Attributes:
        source: How the model is called.
        heads: Names of the readout's modules and parameters.
        uncalled: Names of linear maps that the first batch did not call; a later call is refused.
        kind: How the features are found; see the module.
        layout: `shared`, `separate` or `joint`; see the module.
        linear: Whether the output is linear in the weights.
        model: A shadow of the model, which is never run.
        placement: Device and dtype of the model.
        order: The order of a sample's outputs in which the targets stand as in the head; None if
            that is the order they have.
    """

    source: Source
    heads: tuple[str, ...]
    uncalled: tuple[str, ...]
    kind: str
    layout: str
    linear: bool
    model: nn.Module
    placement: tuple[torch.device, torch.dtype]
    order: Tensor | None

    def __call__(self, batch: Batch) -> Reading:
        """One forward pass over a batch, which must give one output per sample."""
        reading = self.read(batch.args, batch.kwargs)
        if batch.samples is not None:
            batch.check(reading.output.shape[0])
        return reading

    @property
    def input_names(self) -> list[str]:
        """What the model's `forward` calls its inputs."""
        return input_names(self.model)

    @property
    @abstractmethod
    def weights(self) -> Tensor | None:
        """Weights behind the features: (D, K), or (P, 1) for `joint`; None if not known."""

    @property
    @abstractmethod
    def biases(self) -> Tensor | None:
        """Columns of the features that belong to biases; None if not known."""

    @property
    @abstractmethod
    def running(self) -> nn.Module:
        """What this thread runs: a shadow of the model, perhaps with recorders in it."""

    @abstractmethod
    def on(self, model: nn.Module) -> AnyReadout:
        """The same readout of a model that was moved, cast or copied."""

    @abstractmethod
    def header(self) -> dict[str, Any]:
        """What a file keeps of the readout beside its order; see `readout_from_header`."""

    @abstractmethod
    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """One forward pass."""

    @abstractmethod
    def differentiable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Differentiable:
        """One pass whose output and features can be differentiated by the inputs."""

    @abstractmethod
    def terms(self, batch: Batch) -> Terms:
        """The terms that sum to the outputs: atoms of structures, pixels, time steps."""

    @abstractmethod
    def row_owners(self, batch: Batch) -> Tensor | None:
        """The sample of each row (atom) that the outputs are sums of (R,); None if they are not."""


@dataclass(frozen=True)
class _RecordedShadow:
    """What one thread runs: a shadow of the model with recorders in place of, or beside, the heads.

    Attributes:
        model: The shadow.
        recorders: The recorders, in the order of the heads.
        columns: Which columns of the features belong to which head.
    """

    model: nn.Module
    recorders: list[Recorder | ParameterRecorder]
    columns: Columns


@dataclass(frozen=True, eq=False)
class Readout(AnyReadout):
    """The last weights of a model, found by `find.find_readout`.

    Attributes:
        model: A shadow of the model as it was found. It is never run, since what a pass leaves in
            it would be copied to all threads.
        source: How to call the model.
        heads: Names of the modules, and parameters, that the readout consists of.
        kind: `plain`, `tail` or `parameters`; see the module.
        layout: `shared`, `separate` or `joint`; see the module.
        linear: Whether the output is linear in the heads' weights.
        uncalled: As in `AnyReadout`.
        coupled: Whether the samples of a batch depend on one another.
        order: The order of a sample's outputs in which the targets stand as in the head; None if
            that is the order they have.
        differentiates: Whether the model differentiates inside its forward pass. Then it may not
            run without gradients, and its graphs are kept, which it might free.
        call: The call of the model that the readout was found with, for messages; "" if unknown.
        placement: Device and dtype of the model.
    """

    model: nn.Module
    source: Source
    heads: tuple[str, ...]
    kind: str
    layout: str
    linear: bool = True
    uncalled: tuple[str, ...] = ()
    coupled: bool = False
    order: Tensor | None = None
    differentiates: bool = False
    call: str = ""
    placement: tuple[torch.device, torch.dtype] = field(init=False)
    _recorded: OfThread[_RecordedShadow] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", placement(self.model))
        object.__setattr__(self, "_recorded", OfThread(self._make_recorded))
        if self.order is not None:
            # One tensor on the model's device for all batches, by which these are joined.
            device, _ = self.placement
            object.__setattr__(self, "order", self.order.to(device))

    # --- what it is ------------------------------------------------------------------------------

    @property
    def weights(self) -> Tensor:
        """Weights behind the features: (D, K) for `shared` and `separate`, (P, 1) for `joint`."""
        return self.columns.weights()

    @property
    def biases(self) -> Tensor:
        """Columns of the features that belong to biases."""
        return self.columns.biases

    @property
    def columns(self) -> Columns:
        """Which columns of the features belong to which head of this thread's shadow."""
        return self._recorded().columns

    @property
    def running(self) -> nn.Module:
        """This thread's shadow of the model, with recorders in place of the heads."""
        return self._recorded().model

    @property
    def head_names(self) -> str:
        """What messages call the heads."""
        return ", ".join(repr(name) if name else "the model itself" for name in self.heads)

    def columns_of(self, heads: list[nn.Module]) -> Columns:
        """The columns of modules that correspond to the heads, as of a copy of the model."""
        if self.kind == "parameters":
            return ParameterColumns(heads, joint=True)
        return Columns(heads, joint=self.layout == "joint")

    def on(self, model: nn.Module) -> Readout:
        """The same readout of a model that was moved, cast or copied."""
        return replace(self, model=shadow(model))

    def header(self) -> dict[str, Any]:
        """What a file keeps of the readout, beside its order."""
        return {
            "layer": list(self.heads),
            "uncalled": list(self.uncalled),
            "kind": self.kind,
            "layout": self.layout,
            "linear": self.linear,
            "coupled": self.coupled,
            "differentiates": self.differentiates,
        }

    # --- passes ----------------------------------------------------------------------------------

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """One forward pass."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                args, kwargs = ordinary((args, kwargs))
                return self.read(args, kwargs)
        if self.kind == "plain":
            recorded = self._recorded()
            was_enabled = torch.is_grad_enabled()
            is_wanted = was_enabled and _some_input_requires_grad((args, kwargs))
            torch.set_grad_enabled(self.differentiates or is_wanted)
            try:
                output, calls = self._pass(recorded, (args, kwargs))
            finally:
                torch.set_grad_enabled(was_enabled)
            reading = plain_reading(output, calls, recorded.columns)
            if reading is not None:
                return reading
            # Nothing followed the heads in the first batch, but something does in this one.
        with torch.enable_grad():
            output, calls = self.recorded_pass((args, kwargs), adds_offsets=True)
            return self.reading_of(output, calls).detached()

    def differentiable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Differentiable:
        """One forward pass whose output and features can be differentiated by the inputs.

        `torch.func` can transform the pass of a plain head, and one with gains that do not depend
        on the inputs (sums over atoms, a change of units). The gains for the given inputs are then
        used for all. Inputs to differentiate by must have `requires_grad`, so that it shows what
        depends on them.
        """
        inputs = (args, kwargs)
        with torch.enable_grad():
            if self.kind == "plain":
                recorded = self._recorded()
                output, calls = self._pass(recorded, inputs, keep_graphs=True)
                reading = plain_reading(output, calls, recorded.columns)
                if reading is not None:
                    return Differentiable(reading, self._plain_pass)
            output, calls, gains_by_call = self._pass_and_gains(inputs, graph=True)
            if gains_by_call is None:
                return Differentiable(self.reading_of(output, calls, graph=True), None)
            reading = rows_reading(output, calls, self.columns, gains_by_call)
        if any(gains.gains.requires_grad for gains in gains_by_call):
            return Differentiable(reading, None)
        return Differentiable(reading, partial(self._pass_with_gains, gains_by_call))

    def terms(self, batch: Batch) -> Terms:
        """The terms that sum to the outputs: atoms of structures, pixels, time steps.

        Raises:
            ValueError: The output is not a sum over rows of the heads.
        """
        inputs = (batch.args, batch.kwargs)
        if self.kind == "plain":
            recorded = self._recorded()
            with torch.set_grad_enabled(self.differentiates):
                output, calls = self._pass(recorded, inputs)
            reading = plain_reading(output, calls, recorded.columns)
            if reading is not None:
                features = reading.features.detach()
                rows = torch.arange(len(features), device=features.device)
                return Terms(features, rows, torch.zeros_like(rows), len(features))
        gains = None
        if self.layout == "shared":
            _, calls, gains = self._pass_and_gains(inputs)
        if gains is None:
            raise ValueError(
                f"The output is not a sum over rows of {self.head_names}, so it has no local "
                "terms. Pass their features to rigidities.local yourself."
            )
        return row_terms(calls, self.columns, gains)

    def row_owners(self, batch: Batch) -> Tensor | None:
        """The sample of each row (atom) that the outputs are sums of (R,); None if they are not.

        It takes a pass of its own, which differentiates what follows the heads.
        """
        if self.kind != "tail" or self.layout == "joint":
            return None
        output, _, gains_by_call = self._pass_and_gains((batch.args, batch.kwargs))
        if gains_by_call is None:
            return None
        owners = gains_by_call[0].owners  # the output row (`OutputLayout.rows`) of each row
        if any(not torch.equal(gains.owners, owners) for gains in gains_by_call):
            return None  # heads for different rows, as for each species
        output_rows_per_sample = gains_by_call[0].output_layout.row_count // len(output)
        return owners // max(1, output_rows_per_sample)

    # --- the steps of a pass, which a search takes one by one ------------------------------------

    def recorded_pass(
        self,
        inputs: Inputs,
        *,
        adds_offsets: bool = False,
        change: Tensor | None = None,
        keep_graphs: bool = False,
    ) -> tuple[Tensor, list[Call]]:
        """The output of a pass, and the calls of the heads in it.

        Args:
            inputs: The inputs of the batch.
            adds_offsets: Whether each head adds a zero to what it returns, to differentiate by.
            change: What to add to the weights in this pass, by column, (width, K or 1).
            keep_graphs: Whether graphs that the model differentiates itself are kept, so that they
                can be differentiated once more.
        """
        recorded = self._recorded()
        try:
            for i, recorder in enumerate(recorded.recorders):
                change_of_head = None
                if change is not None:
                    change_of_head = recorded.columns.change_of_head(change, i)
                recorder.reset(adds_offsets=adds_offsets, change=change_of_head)
            return self._pass(recorded, inputs, keep_graphs=keep_graphs)
        finally:
            for recorder in recorded.recorders:
                recorder.reset()

    def reading_of(self, output: Tensor, calls: list[Call], *, graph: bool = False) -> Reading:
        """The reading of a pass whose heads added offsets, with whatever graph it has.

        Args:
            output: The model's output.
            calls: The calls of the heads.
            graph: Whether the features are to be differentiable by the model's inputs.

        Raises:
            ValueError: The output is not finite or has no graph, or the tail no longer has the form
                found before.
        """
        if not output.requires_grad:
            raise ValueError(
                f"The output of this batch does not depend on {self.head_names} through "
                "differentiable operations, as that of the first batch did. Does the forward pass "
                "detach it, or use torch.no_grad or NumPy, for some inputs? Pass features=."
            )
        columns = self.columns
        reading = None
        if self.kind == "parameters":
            reading = parameters_reading(output, calls, columns, graph=graph)
        elif self.layout == "joint":
            reading = samples_reading(output, calls, columns, coupled=self.coupled, graph=graph)
        else:
            gains = self._gains(output, calls, graph=graph)
            if gains is not None:
                reading = rows_reading(output, calls, columns, gains)
        if reading is not None:
            return reading
        if not bool(torch.isfinite(output.detach()).all()):  # which hides the form
            raise ValueError(
                "The model's output for this batch is NaN or infinite. Check that the inputs are "
                "finite and in the units of the training data."
            )
        raise ValueError(
            f"The operations after {self.head_names} differ from those in the first batch. Pass "
            "features= to provide the features yourself."
        )

    # --- inside ----------------------------------------------------------------------------------

    def _make_recorded(self) -> _RecordedShadow:
        """What a thread runs, when it first asks."""
        model = shadow(self.model)
        refuse_calls(model, self.uncalled)
        kind: type[Recorder] | type[ParameterRecorder] = Recorder
        if self.kind == "parameters":
            kind = ParameterRecorder
        model, recorders = put_recorders(model, list(self.heads), kind)
        columns = self.columns_of([recorder.head for recorder in recorders])
        return _RecordedShadow(model, recorders, columns)

    def _plain_pass(self, *args: Any, **kwargs: Any) -> Reading:
        """A pass in which nothing follows the heads, unchecked, as torch's transforms need it."""
        output, calls = self._pass(self._recorded(), (args, kwargs))
        return side_by_side(output, calls, [call.input_rows for call in calls])

    def _pass_with_gains(
        self, gains_by_call: list[RowGains], /, *args: Any, **kwargs: Any
    ) -> Reading:
        """A pass with known gains, unchecked, as torch's transforms need it."""
        recorded = self._recorded()
        output, calls = self._pass(recorded, (args, kwargs))
        return rows_reading(output, calls, recorded.columns, gains_by_call)

    def _pass_and_gains(
        self, inputs: Inputs, *, graph: bool = False
    ) -> tuple[Tensor, list[Call], list[RowGains] | None]:
        """A pass whose heads added offsets: the output, the calls, and the gains of their rows.

        Args:
            inputs: The inputs of the batch.
            graph: Whether the gains are to be differentiable by the model's inputs.

        Returns:
            The gains are None if rows do not act on one output row each.
        """
        with torch.enable_grad():
            output, calls = self.recorded_pass(inputs, adds_offsets=True, keep_graphs=graph)
            if self.kind == "parameters" or self.layout == "joint":
                return output, calls, None
            return output, calls, self._gains(output, calls, graph=graph)

    def _gains(
        self, output: Tensor, calls: list[Call], *, graph: bool = False
    ) -> list[RowGains] | None:
        """How the rows of each call act on the output; None if not in the readout's layout."""
        gains = row_gains(output, calls, self.columns, order=self.order, graph=graph)
        if gains is None or self.layout == "separate":
            return gains
        return shared_gains(gains)

    def _pass(
        self, recorded: _RecordedShadow, inputs: Inputs, *, keep_graphs: bool = False
    ) -> tuple[Tensor, list[Call]]:
        """A pass of a thread's shadow, as its recorders are set, with their calls."""
        args, kwargs = inputs
        calls: list[Call] = []
        try:
            if self.differentiates or keep_graphs:
                with GraphsKept():
                    output = self.source.run(recorded.model, args, kwargs, self.call)
            else:
                output = self.source.run(recorded.model, args, kwargs, self.call)
            for recorder in recorded.recorders:
                calls += recorder.calls
        finally:
            for recorder in recorded.recorders:
                recorder.calls.clear()
        if not calls:
            raise HeadsNotCalledError(
                f"The forward pass did not call {self.head_names}. Name another layer=."
            )
        return output, calls


@dataclass(frozen=True, eq=False)
class GivenFeatures(AnyReadout):
    """Features that a user's function computes: callable(model, *inputs) -> (N, D) or (N, K, P).

    Attributes:
        model: A shadow of the model, which is never run.
        source: How to call the model, and the user's function.
        layout: `shared` for features with two dimensions, `joint` for three.
        placement: Device and dtype of the model.
    """

    model: nn.Module
    source: Source
    layout: str
    kind: str = field(default="features", init=False)
    heads: tuple[str, ...] = field(default=(), init=False)
    uncalled: tuple[str, ...] = field(default=(), init=False)
    linear: bool = field(default=True, init=False)
    order: Tensor | None = field(default=None, init=False)
    weights: Tensor | None = field(default=None, init=False)
    biases: Tensor | None = field(default=None, init=False)
    placement: tuple[torch.device, torch.dtype] = field(init=False)
    _shadow: OfThread[nn.Module] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", placement(self.model))
        object.__setattr__(self, "_shadow", OfThread(partial(shadow, self.model)))

    @property
    def running(self) -> nn.Module:
        """This thread's shadow of the model."""
        return self._shadow()

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """One forward pass and one call of the user's function."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                args, kwargs = ordinary((args, kwargs))
                return self.read(args, kwargs)
        is_wanted = torch.is_grad_enabled() and _some_input_requires_grad((args, kwargs))
        with torch.enable_grad():  # for models that differentiate inside forward
            reading = self._reading(*args, **kwargs)
        if is_wanted:
            return reading
        return reading.detached()

    def differentiable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Differentiable:
        """The same, differentiable by the inputs as far as the user's function is."""
        with torch.enable_grad():
            return Differentiable(self._reading(*args, **kwargs), self._reading)

    def on(self, model: nn.Module) -> GivenFeatures:
        """The same function for a model that was moved, cast or copied."""
        return GivenFeatures(shadow(model), self.source, self.layout)

    def header(self) -> dict[str, Any]:
        """What a file keeps of it."""
        return {
            "layer": [],
            "uncalled": [],
            "kind": self.kind,
            "layout": self.layout,
            "linear": True,
            "coupled": False,
            "differentiates": False,
        }

    def terms(self, batch: Batch) -> Terms:
        """Refused: what the user's features are sums of is not known."""
        raise ValueError(
            "With features= the terms of a sum are not known. Pass their features to "
            "rigidities.local yourself."
        )

    def row_owners(self, batch: Batch) -> None:
        """None: what the user's features are sums of is not known."""
        return

    def _reading(self, *args: Any, **kwargs: Any) -> Reading:
        """Output and features of one pass, after a check of their shapes."""
        model = self._shadow()
        output = self.source.run(model, args, kwargs)
        features = given_features(self.source, model, args, kwargs)
        if given_layout(features) != self.layout or not _has_a_row_for_each_output(
            features, output
        ):
            raise ValueError(
                f"features= returned {tuple(features.shape)} for an output of shape "
                f"{tuple(output.shape)}: expected one row of features per row of output."
            )
        rows = features.shape[0]
        inner = torch.Size([rows, output.numel() // rows])
        return Reading(output, features, OutputLayout(output.shape, inner))


def readout_from_header(
    model: nn.Module, source: Source, header: dict[str, Any], order: Tensor | None
) -> AnyReadout:
    """The readout that a header and an order describe; see `AnyReadout.header`."""
    if header["kind"] == "features":
        return GivenFeatures(shadow(model), source, header["layout"])
    return Readout(
        model=shadow(model),
        source=source,
        heads=tuple(header["layer"]),
        kind=header["kind"],
        layout=header["layout"],
        linear=header["linear"],
        uncalled=tuple(header["uncalled"]),
        coupled=header["coupled"],
        order=order,
        differentiates=header["differentiates"],
    )


def given_features(
    source: Source, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """What the user's function gives for a batch, which must be a table."""
    assert source.features is not None
    features = source.features(model, *args, **kwargs)
    if not (isinstance(features, Tensor) and features.ndim in (2, 3)):
        got = getattr(features, "shape", type(features).__name__)
        raise ValueError(f"features= must return a tensor (N, D) or (N, K, P), got {got}.")
    return features


def given_layout(features: Tensor) -> str:
    """The layout of features (N, D) or (N, K, P) that a user's function gave."""
    if features.ndim == 2:
        return "shared"
    return "joint"


def _has_a_row_for_each_output(features: Tensor, output: Tensor) -> bool:
    """Whether features (N, D) or (N, K, P) fit an output."""
    rows = features.shape[0]
    if features.ndim == 2:
        return rows in {output.shape[0], output.numel()}
    return rows == output.shape[0] and features.shape[:2].numel() == output.numel()


def _some_input_requires_grad(inputs: Inputs) -> bool:
    """Whether derivatives with respect to an input may be requested."""
    args, kwargs = inputs
    values = [*args, *kwargs.values()]
    for value in values:
        if type(value) is not Tensor:  # a container, perhaps: look into all of them
            leaves = tree_leaves(values)
            return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        if value.requires_grad:
            return True
    return False
