r"""Where the features come from: `Tap` turns a model into inputs -> (output, features).

The features of a prediction are its derivatives with respect to the readout's weights, $f =
\partial y / \partial w$ (`FeatureTap`: what a user's function gives). A tap runs a `shadow` of the
model with a recorder in place of the readout head(s); a `Case` (see `cases`) says how the features
follow from what was recorded. The data take this way in every pass:

    inputs -> this thread's shadow -> output and recorded calls of the heads -> case -> `Reading`

Every thread has a shadow with recorders of its own, so that any number of them may call a tap, and
a model may keep what it likes in its attributes during a pass.

A tap is found with a few rows of the first batch where these can be cut out (`Tap.find`): `search`
names the heads, and `_settle` decides which case it is and checks the features by changing the
heads' weights. In all, the model is called this often:

| the output is | calls |
| --- | --- |
| what a layer of torch's own returned, perhaps reshaped | 2: the search, one with other weights |
| linear in the weights of linear layers | 4: the search, a probed pass, two with other weights |
| computed from linear layers, but not linear in their weights | 6 at most: two more for the slope |
| the layer's for its present weights only (behind a clamp that does nothing yet) | 9 at most |
| not a function of the layers' outputs alone, so their parameters are taken | 9 at most |
| read with `features=` | 1 |

The call with other weights is of the few rows too, or of the whole batch where it cannot be cut.
A model that differentiates inside its forward pass may be called once more in the search and in its
first probed pass. `layer=` with modules that are not linear maps, and parameters that reach the
output past the heads, take trials of their own. A model that is not in float64 is checked in a
float64 copy, with as many calls. If the first batch's own pass shows that the few rows did not tell
everything, the readout is searched for again in the whole batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...data.output_layout import OutputLayout
from ...models.calling import (
    ORDINARY_ERRORS,
    FeatureFunction,
    ForwardFunction,
    Inputs,
    Source,
    copied,
)
from ...models.double import InDouble, double_copy, is_double
from ...models.modes import ordinary, outside_inference_mode
from ...models.shadow import input_names, shadow, unwrapped
from ...models.threads import OfThread
from ...notices import notify
from .cases import CASES, Case, Plain, Separate, Shared
from .heads import (
    Call,
    Recorder,
    has_free_weight,
    is_linear_by_class,
    layers_inside,
    linear_maps,
    put_recorders,
    refuse_calls,
    return_linear_maps,
)
from .layers import Layer, find_layers, layers_of_samples, watched
from .probes import FirstPass, first_rows
from .reading import Reading, Terms
from .search import advised_layers, find_heads, is_scripted, left_out_notice, named_heads
from .tail import GraphsKept, RowGains, coarsest_rounding
from .trials import Run, large_change, tolerance

__all__ = ["AnyTap", "FeatureTap", "Tap", "WatchingTap"]

T = TypeVar("T")

_FALSE_DERIVATIVES = (
    "The derivatives of the output with respect to the weights of {} do not predict how the output "
    "changes with them. Does the forward pass write through .data or NumPy, or call a "
    "torch.autograd.Function whose backward is not its derivative (a straight-through estimator)? "
    "Use plain operations of torch there, or pass features=callable(model, *inputs) -> (N, D)."
)


class _NotCalledError(ValueError):
    """A pass did not call any head."""


class WatchingTap(ABC):
    """What `Tap` and `FeatureTap` share: passes during which the model's layers are watched.

    Attributes:
        layers: The layers that are watched, for `novelty`; none by default.
    """

    layers: list[Layer]

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Reading:
        """One forward pass."""

    def row_owners(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """The sample of each row (atom) that the outputs are sums of (R,); None if they are not."""
        return None

    def watch(self, inputs: Inputs) -> None:
        """Find the layers to watch, on a first batch.

        Raises:
            ValueError: There are none.
        """
        args, kwargs = inputs
        self(*args, **kwargs)  # after which the model that runs stays the same
        pattern, model = self._models()
        self.layers = find_layers(
            pattern,
            model,
            read=lambda: len(self(*args, **kwargs).output),
            row_owners=lambda: self.row_owners(*args, **kwargs),
        )
        few_rows = first_rows(inputs)
        if few_rows is not None:
            few_args, few_kwargs = few_rows
            self.layers = layers_of_samples(
                pattern,
                model,
                self.layers,
                whole=lambda: self(*args, **kwargs).output,
                few=lambda: self(*few_args, **few_kwargs).output,
            )
        if not self.layers:
            raise ValueError(
                "novelty=True found no layer to watch: no layer has an input with one row per "
                "sample (inputs with three dimensions, custom modules?). Fit without novelty=True."
            )

    def entering(self, *args: Any, **kwargs: Any) -> tuple[Reading, list[Tensor]]:
        """One forward pass, and the rows (R, columns) that entered each of `layers` in it."""
        pattern, model = self._models()
        with watched(pattern, model, self.layers) as rows:
            reading = self(*args, **kwargs)
        return reading, rows

    @abstractmethod
    def _models(self) -> tuple[nn.Module, nn.Module]:
        """The model as it is, and the one that this thread runs."""


class _CasesOfHeads(dict[str, Case]):
    """The cases of some heads by name, each made when it is first asked for."""

    def __init__(self, heads: list[nn.Module]) -> None:
        super().__init__()
        self._heads = heads

    def __missing__(self, name: str) -> Case:
        self[name] = CASES[name](self._heads)
        return self[name]


@dataclass(frozen=True)
class _Twin:
    """What one thread runs.

    Attributes:
        model: A shadow of the model with recorders in place of the heads.
        recorders: The recorders, in the order of the heads.
        heads: The modules that the recorders stand in for.
        cases: The cases for these heads, by name.
    """

    model: nn.Module
    recorders: list[Recorder]
    heads: list[nn.Module]
    cases: _CasesOfHeads


class Tap(WatchingTap):
    """Inputs -> (output, features) for one model.

    Use `Tap.find` to make one; then `output, features = tap(*inputs)`.

    Args:
        model: The user's model.
        source: How to call it.
        heads: Names of the readout heads.
        case: How the features follow from the heads, by name; see `cases`.
        silent: Names of linear maps that the first batch did not call; a later call is refused.
        linear: Whether the output is linear in the heads' weights.

    Attributes:
        source: As given.
        heads: As given.
        case: As given.
        silent: As given.
        linear: As given.
        layout: `shared`, `separate` or `joint`; see `cases`.
        working_call: The call of the model that the readout was found with, for messages; "" if
            unknown.
        input_names: What the model's `forward` calls its inputs.
        first_pass: The pass that the readout was found with, until somebody takes it.
        notice: What the user should know of the readout; "" if nothing.
        search_whole_batch: Finds the readout in the whole of a batch. It is called if this tap,
            found with a few rows of that batch, cannot read all of it, and is None once the batch
            has been read.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        *,
        heads: list[str],
        case: str,
        silent: Sequence[str] = (),
        linear: bool = True,
    ) -> None:
        self.source = source
        self.heads = heads
        self.case = case
        self.silent = list(silent)
        self.linear = linear
        self.input_names = input_names(model)
        self.layers = []
        self.working_call = ""
        self.first_pass: FirstPass | None = None
        self.notice = ""
        self.search_whole_batch: Callable[[Inputs], AnyTap] | None = None
        # Whether the model differentiates, and frees its graph, inside forward.
        self._frees_graph = False
        # Whether the model runs without gradients, which is faster for some; None until tried.
        self._runs_without_gradients: bool | None = None
        # Whether this tap is of a copy in float64, which is run `InDouble`.
        self._runs_in_double = False
        # Whether the features predict how the output follows a change of the heads' weights.
        self._has_true_features = True
        # Never run: what a pass leaves in it would be copied too.
        self._pattern = shadow(model)
        self._twin = OfThread(self._make_twin)

    # --- finding a readout -----------------------------------------------------------------------

    @classmethod
    @outside_inference_mode
    def find(
        cls,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        layer: str | list[str] | None = None,
        features: FeatureFunction | None = None,
        forward: ForwardFunction | None = None,
        output: str | int | None = None,
    ) -> Tap | FeatureTap:
        """Find the readout on one batch of inputs.

        Args:
            model: The trained model.
            args: Its positional inputs.
            kwargs: Its keyword inputs.
            layer: As in `LastLayerRigidity`.
            features: As in `LastLayerRigidity`.
            forward: As in `LastLayerRigidity`.
            output: As in `LastLayerRigidity`.

        Raises:
            ValueError: No linear map reaches the output; the message names the way out.
        """
        source = Source(forward, features, output)
        tap = cls.find_quietly(model, source, layer, (args, kwargs or {}))
        if tap.notice:
            notify(tap.notice)
        return tap

    @classmethod
    @outside_inference_mode
    def find_quietly(
        cls, model: nn.Module, source: Source, layer: str | list[str] | None, inputs: Inputs
    ) -> Tap | FeatureTap:
        """Find the readout without a warning; the tap's `notice` holds its text, if there is one.

        Args:
            model: The trained model.
            source: How to call it.
            layer: Names of the readout's modules; None to search for them.
            inputs: The inputs of one batch.
        """
        if source.features is not None:
            return FeatureTap.with_first_pass(model, source, inputs)
        if isinstance(unwrapped(model), torch.jit.ScriptModule):
            raise ValueError(
                "A TorchScript module cannot be inspected. Pass features=callable(model, *inputs) "
                "-> (N, D), or wrap the original nn.Module."
            )
        inputs = copied(inputs)  # a model that writes into them is refused, and nothing is lost
        args, kwargs = inputs

        def run(twin: nn.Module) -> Tensor:
            return source.run(twin, args, kwargs, None)

        if layer is None:
            readout = find_heads(model, run)
        else:
            names = list(layer) if isinstance(layer, (list, tuple)) else [layer]
            with torch.enable_grad():
                readout = named_heads(model, _checked_names(model, names), run)

        tap = cls(model, source, heads=readout.heads, case=readout.case, silent=readout.silent)
        tap.working_call = source.call(unwrapped(model), args, kwargs)
        marked_pass = readout.marked_pass
        tap.first_pass = FirstPass(inputs, marked_pass.output, marked_pass.renewed)
        # The class of torch's own layers says what they compute. Anything else is tried out.
        with torch.enable_grad():
            if not (readout.is_returned and tap._heads_are_linear_by_class):
                tap._settle(inputs)
            elif not tap._predicts_change(inputs, marked_pass.output):
                # The forward pass may use the head's weights elsewhere too.
                tap._take_parameters()
                tap._settle(inputs)
        if not tap._has_true_features:
            raise ValueError(_FALSE_DERIVATIVES.format(tap._head_names))
        notices = []
        if not tap.linear:
            notices.append(tap._nonlinear_notice(readout.later, run))
        if readout.left_out:
            notices.append(left_out_notice(model, readout))
        tap.notice = " ".join(notices)
        return tap

    # --- what the readout is ---------------------------------------------------------------------

    @property
    def layout(self) -> str:
        """How the features' dimensions and the targets correspond."""
        return CASES[self.case].layout

    @property
    def weights(self) -> Tensor:
        """Weights behind the features: (D, K) for `shared` and `separate`, (P, 1) for `joint`."""
        return self._case.columns.weights()

    @property
    def biases(self) -> Tensor:
        """Columns of the features that belong to biases."""
        return self._case.columns.biases

    @property
    def _case(self) -> Case:
        return self._twin().cases[self.case]

    @property
    def _heads_are_linear_by_class(self) -> bool:
        return all(is_linear_by_class(head) for head in self._twin().heads)

    @property
    def _head_names(self) -> str:
        """What messages call the heads."""
        return ", ".join(repr(name) if name else "the model itself" for name in self.heads)

    # --- passes ----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Reading:
        """One forward pass."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                args, kwargs = ordinary((args, kwargs))
                return self(*args, **kwargs)
        try:
            return self._reading((args, kwargs))
        except (ValueError, RuntimeError):
            if self.search_whole_batch is None:
                raise
        # The whole batch calls more layers than its first rows did, or what follows the heads does
        # more with it.
        search = self.search_whole_batch
        self.search_whole_batch = None
        tap = search((args, kwargs))
        assert isinstance(tap, Tap)
        self._adopt(tap)
        self.first_pass = tap.first_pass
        if tap.notice and not self.notice:
            notify(tap.notice)
        return self._reading((args, kwargs))

    def graph(self, *args: Any, **kwargs: Any) -> Reading:
        """One forward pass whose output and features autograd can differentiate by the inputs."""
        with torch.enable_grad(), GraphsKept() as graphs:
            reading = self._reading((args, kwargs), graph=True)
        self._frees_graph |= graphs.differentiated
        return reading

    def steady(self, *args: Any, **kwargs: Any) -> Callable[..., Reading] | None:
        """The pass as a function that `torch.func` can transform, or None where there is none.

        There is one for a plain head, and for gains that do not depend on the inputs (sums over
        atoms, a change of units). The gains for the given inputs are then used for all. Inputs to
        differentiate by must have `requires_grad`, so that it shows what depends on them.
        """
        case = self._case
        gains_by_call: list[RowGains] = []
        if isinstance(case, Separate):
            with torch.enable_grad():
                gains = self._probed((args, kwargs), partial(case.row_gains, graph=True))
            if gains is None or any(gains_of_call.gains.requires_grad for gains_of_call in gains):
                return None
            gains_by_call = gains
        elif not isinstance(case, Plain):
            return None

        def read(*args: Any, **kwargs: Any) -> Reading:
            output, calls = self._run((args, kwargs))
            return case.reading(output, calls, gains_by_call)

        return read

    def terms(self, *args: Any, **kwargs: Any) -> Terms:
        """The terms that sum to the outputs: atoms of structures, pixels, time steps.

        Raises:
            ValueError: The output is not a sum over rows of the heads.
        """
        if not CASES[self.case].probes:
            features = self._reading((args, kwargs)).features.detach()
            # The reading may have shown that this batch is not plain, and changed the case.
            if not CASES[self.case].probes:
                rows = torch.arange(len(features), device=features.device)
                return Terms(features, rows, torch.zeros_like(rows), len(features))
        case = self._case
        terms = None
        if isinstance(case, Shared):
            with torch.enable_grad():
                terms = self._probed((args, kwargs), case.terms)
        if terms is None:
            raise ValueError(
                f"The output is not a sum over rows of {self._head_names} (case {self.case!r}), "
                "so it has no local terms. Pass their features to rigidities.local yourself."
            )
        return terms

    def row_owners(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """The sample of each row (atom) that the outputs are sums of (R,); None if they are not.

        It takes a pass of its own, which differentiates what follows the heads.
        """
        case = self._case
        if not isinstance(case, Separate):
            return None

        def sample_of_each_row(output: Tensor, calls: list[Call]) -> Tensor | None:
            gains_by_call = case.row_gains(output, calls)
            if gains_by_call is None:
                return None
            owners = gains_by_call[0].owners  # the output row (`OutputLayout.rows`) of each row
            if any(not torch.equal(gains.owners, owners) for gains in gains_by_call):
                return None  # heads for different rows, as for each species
            output_rows_per_sample = gains_by_call[0].output_layout.row_count // len(output)
            return owners // max(1, output_rows_per_sample)

        with torch.enable_grad():
            return self._probed((args, kwargs), sample_of_each_row)

    def _models(self) -> tuple[nn.Module, nn.Module]:
        return self._pattern, self._twin().model

    def _make_twin(self) -> _Twin:
        """What a thread runs, when it first asks."""
        twin = shadow(self._pattern)
        refuse_calls(twin, self.silent)
        model, recorders = put_recorders(twin, self.heads, CASES[self.case].recorder)
        heads = [recorder.head for recorder in recorders]
        return _Twin(model, recorders, heads, _CasesOfHeads(heads))

    def _reading(self, inputs: Inputs, *, graph: bool = False) -> Reading:
        """The reading of a pass by the tap's case.

        Raises:
            ValueError: The output is not finite, or the tail no longer has the form found before.
        """
        twin = self._twin()
        case = twin.cases[self.case]  # which another thread may change meanwhile
        reading = None
        if not case.probes:
            output, calls = self._unprobed(twin, inputs, graph)
            reading = case.read(output, calls)
            if reading is None:  # an identity on the first batch (a mask of ones), not on this one
                self.case = "shared"
        if reading is None:
            with torch.enable_grad():
                reading = self._probed(inputs, partial(self._case.read, graph=graph))
        if reading is not None:
            return reading
        with torch.no_grad():
            output, _ = self._run(inputs)
        if not bool(torch.isfinite(output).all()):  # which hides the form
            raise ValueError(
                "The model's output for this batch is NaN or infinite. Check that the inputs are "
                "finite and in the units of the training data."
            )
        raise ValueError(
            f"The operations after {self._head_names} differ from those in the first batch "
            f"({self.case!r}). Pass features= to provide the features yourself."
        )

    def _unprobed(self, twin: _Twin, inputs: Inputs, graph: bool) -> tuple[Tensor, list[Call]]:
        """A pass for a case that takes no derivative, with its recorded calls.

        It records no gradients, unless the caller asks for a graph, an input requires a gradient,
        or the model cannot run without them.
        """
        if (
            graph
            or self._runs_without_gradients is False
            or not torch.is_grad_enabled()
            or _some_input_requires_grad(inputs)
        ):
            return self._pass(twin, inputs)
        torch.set_grad_enabled(False)
        try:
            output, calls = self._pass(twin, inputs)
            self._runs_without_gradients = True
            return output, calls
        except RuntimeError:
            if self._runs_without_gradients:
                raise
        finally:
            torch.set_grad_enabled(True)
        self._runs_without_gradients = False
        return self._pass(twin, inputs)

    def _probed(self, inputs: Inputs, read: Callable[[Tensor, list[Call]], T]) -> T:
        """What `read` makes of a probed pass.

        A model that differentiates inside forward may free its graph there. That shows as an error
        of torch, once; from then on the graph is kept.
        """
        try:
            output, calls = self._run(inputs, probing=True)
            return read(output, calls)
        except RuntimeError as error:
            if self._frees_graph or "backward through the graph a second time" not in str(error):
                raise
        self._frees_graph = True
        output, calls = self._run(inputs, probing=True)
        return read(output, calls)

    def _run(
        self, inputs: Inputs, *, probing: bool = False, change: Tensor | None = None
    ) -> tuple[Tensor, list[Call]]:
        """A forward pass with its recorded calls.

        Args:
            inputs: The inputs of the batch.
            probing: Whether to add a zero to each output of the heads, to differentiate by.
            change: What to add to the heads' weights in this pass, (width, K or 1).
        """
        twin = self._twin()
        for i, recorder in enumerate(twin.recorders):
            change_of_head = None
            if change is not None:
                change_of_head = self._case.columns.change_of_head(change, i)
            recorder.reset(probing=probing, change=change_of_head)
        try:
            return self._pass(twin, inputs)
        finally:
            for recorder in twin.recorders:
                recorder.reset()

    def _pass(self, twin: _Twin, inputs: Inputs) -> tuple[Tensor, list[Call]]:
        """A forward pass of a thread's twin, as its recorders are set, with its recorded calls."""
        args, kwargs = inputs
        calls: list[Call] = []
        try:
            if self._frees_graph or self._runs_in_double:
                with (
                    GraphsKept() if self._frees_graph else nullcontext(),
                    InDouble() if self._runs_in_double else nullcontext(),
                ):
                    output = self.source.run(twin.model, args, kwargs, self.working_call)
            else:
                output = self.source.run(twin.model, args, kwargs, self.working_call)
            for recorder in twin.recorders:
                calls += recorder.calls
        finally:
            for recorder in twin.recorders:
                recorder.calls.clear()
        if not calls:
            raise _NotCalledError(
                f"The forward pass did not call {self._head_names}. Name another layer=."
            )
        return output, calls

    # --- which case it is, decided on the first batch --------------------------------------------

    def _settle(self, inputs: Inputs) -> None:
        """Decide which parameters the features belong to, which case it is, and if it is linear.

        This is decided in float64, in a copy if the model has another precision: the tolerance that
        a coarser type needs would hide a mixing of targets. Where there can be no copy, a model in
        half precision takes the general cases alone.
        """
        all_but_plain = list(CASES)[1:]
        if is_double(self._pattern):
            self._choose_case(inputs, all_but_plain)
            return
        judge = self._settled_in_double(inputs)
        if judge is not None:
            self._adopt(judge)
            return
        parameters = [p for p in self._pattern.parameters() if p.is_floating_point()]
        single = torch.finfo(torch.float32).eps
        if all(torch.finfo(parameter.dtype).eps <= single for parameter in parameters):
            self._choose_case(inputs, all_but_plain)
        else:
            self._choose_case(inputs, ["jacobian", "dense"])

    def _settled_in_double(self, inputs: Inputs) -> Tap | None:
        """A tap on a float64 copy of the model, with its case chosen; None if no copy can run."""
        try:
            model = double_copy(self._pattern)
            if model is None:
                return None
            judge = Tap(model, self.source, heads=self.heads, case=self.case, silent=self.silent)
            judge._runs_in_double = True
            with InDouble():
                judge._choose_case(inputs, list(CASES)[1:])
        except Exception:  # no memory, no float64, or code that insists on a type
            return None
        return judge

    def _adopt(self, other: Tap) -> None:
        """Take over the heads and case of another tap on the same model, or on a copy of it."""
        self.heads = other.heads
        self.silent = other.silent
        self.case = other.case
        self.linear = other.linear
        self._has_true_features = other._has_true_features
        self._frees_graph = other._frees_graph
        self._twin = OfThread(self._make_twin)

    def _choose_case(self, inputs: Inputs, cases: list[str]) -> None:
        """Set heads, case and `linear` by what a few passes over some inputs show.

        Args:
            inputs: The inputs of the first batch, or of its first rows.
            cases: The names of the cases to try after `plain`.
        """
        heads = self._twin().heads
        seem_linear = all(is_linear_by_class(head) or has_free_weight(head) for head in heads)
        if self.case != "parameters" and not seem_linear:
            self._take_parameters(opened=True)
        try:
            reading = self._probed(inputs, partial(self._reading_if_linear_maps, ["plain", *cases]))
        except _NotCalledError:  # without gradients, torch has a path around the layers
            self._take_parameters()
            reading = self._probed(inputs, partial(self._first_reading, []))
        if reading is None:  # the heads do not compute what they seem to
            self._take_parameters(opened=True)
            reading = self._probed(inputs, partial(self._first_reading, []))
        self.linear = self._is_linear(reading, inputs)
        if not self.linear and self.case == "plain":
            # The output equals the heads' for these weights only, as behind a clamp.
            reading = self._probed(inputs, partial(self._first_reading, cases))
            self.linear = self._is_linear(reading, inputs)
        if self.linear:
            return
        if self.case != "parameters" and not self._is_derivative(reading, inputs):
            # What the head returned is not all that its weights do: the model differentiates by
            # its inputs through the head, or uses the weights elsewhere.
            self._take_parameters()
            reading = self._probed(inputs, partial(self._first_reading, []))
            self.linear = self._is_linear(reading, inputs)
        if self.case == "parameters" and not self.linear:
            self._has_true_features = self._is_derivative(reading, inputs)

    def _take_parameters(self, *, opened: bool = False) -> None:
        """Differentiate with respect to the parameters of the heads, whatever they compute.

        Args:
            opened: Whether the heads only seem to be linear maps, so that the modules inside them
                that own parameters become the heads.
        """
        if opened:
            layers: list[str] = []
            for name in self.heads:
                layers += layers_inside(self._pattern, name, opened=True)
            self.heads = list(dict.fromkeys(layers))
        self.case = "parameters"
        self._twin = OfThread(self._make_twin)

    def _reading_if_linear_maps(
        self, cases: list[str], output: Tensor, calls: list[Call]
    ) -> Reading | None:
        """The first reading; None if the heads do not compute W f + b of what goes in."""
        certain = self.case == "parameters" or self._heads_are_linear_by_class
        if not certain and not return_linear_maps(calls):
            return None
        return self._first_reading(cases, output, calls)

    def _first_reading(self, cases: list[str], output: Tensor, calls: list[Call]) -> Reading:
        """The reading of a probed pass by the first case that fits, which becomes the tap's.

        Args:
            cases: Names of the cases to try. They are ignored if the case is `parameters` already.
            output: The model's output in the pass.
            calls: The calls of the heads in the pass.
        """
        names = ["parameters"] if self.case == "parameters" else cases
        for name in names:
            if name != "plain" and not output.requires_grad:
                raise ValueError(
                    f"The output does not depend on {self._head_names} through differentiable "
                    "operations (torch.no_grad, detach or NumPy in the forward pass?). Name "
                    "another layer= or pass features=."
                )
            self.case = name
            reading = self._case.read(output, calls)
            if reading is not None:
                return reading
        raise AssertionError("the last case takes any tail")

    def _is_linear(self, reading: Reading, inputs: Inputs) -> bool:
        """Whether y(w + d) - y(w) = f . d for large random changes d of the heads' weights.

        In the case `plain`, the output must equal the heads' for changed weights too, bit by bit.
        """
        case = self._case
        plain = self.case == "plain"
        certain = plain and self._heads_are_linear_by_class
        if not plain and not bool(torch.isfinite(reading.output.detach()).all()):
            return True  # NaN says nothing of linearity, and is refused by the fit
        for seed in (1, 2):
            change = large_change(self.weights, seed)
            changed_output, calls = self._run(inputs, change=change)
            if plain and case.read(changed_output, calls) is None:
                return False
            if certain:  # by the class of the heads
                continue
            if changed_output.shape != reading.output.shape:
                return False
            difference = changed_output.detach() - reading.output.detach()
            actual = reading.output_layout.rows(difference).to(torch.float64)
            expected = case.response(reading.features.detach().to(torch.float64), change)
            rounding = coarsest_rounding([changed_output, *(call.output for call in calls)])
            if not _agree(actual, expected, tolerance(rounding)):
                return False
        return True

    def _predicts_change(self, inputs: Inputs, output: Tensor) -> bool:
        """Whether y(w + d) - y(w) = f . d for a random change d of a plain head's weights.

        The features of a plain head do not depend on its weights, so one pass shows both sides. A
        pass that the model refuses, because it checks its own output, shows nothing.

        Args:
            inputs: The inputs of the first batch, or of its first rows.
            output: The model's output for them.
        """
        change = 0.1 * large_change(self.weights, seed=1)  # of the size of the weights
        try:
            changed_output, calls = self._run(inputs, change=change)
        except ORDINARY_ERRORS:
            return True
        reading = self._case.read(changed_output, calls)
        difference = changed_output.detach().to(torch.float64) - output.to(torch.float64)
        if reading is None or not bool(torch.isfinite(difference).all()):
            return reading is not None  # NaN says nothing, and is refused by the fit
        expected = self._case.response(reading.features.detach().to(torch.float64), change)
        actual = reading.output_layout.rows(difference)
        if _agree(actual, expected, tolerance(coarsest_rounding([changed_output]))):
            return True
        return self._is_random(inputs, output)

    def _is_random(self, inputs: Inputs, output: Tensor) -> bool:
        """Whether another pass gives another output, beyond rounding."""
        again, _ = self._run(inputs)
        difference = (again.detach() - output).abs().max()
        return not bool(difference <= 64 * coarsest_rounding([output]) * output.abs().max())

    def _is_derivative(self, reading: Reading, inputs: Inputs) -> bool:
        """Whether f is the slope of the output along a random direction d of the heads' weights.

        The slope is taken by central differences in float64. A coarser type leaves too few digits,
        and counts as True; so does an output that differs from pass to pass.
        """
        if reading.output.dtype != torch.float64:
            return True
        direction = large_change(self.weights, seed=3)
        step = 1e-6
        ahead, _ = self._run(inputs, change=step * direction)
        behind, _ = self._run(inputs, change=-step * direction)
        slope = reading.output_layout.rows(ahead.detach() - behind.detach()) / (2 * step)
        expected = self._case.response(reading.features.detach().to(torch.float64), direction)
        if _agree(slope, expected, 1e-4):
            return True
        return self._is_random(inputs, reading.output.detach())

    def _nonlinear_notice(self, later: list[str], run: Run) -> str:
        """What to tell of an output that is not linear in the heads' weights.

        Args:
            later: Parameters that act after the heads.
            run: Calls a model on the first batch.

        Raises:
            ValueError: There are such parameters, so that the heads are not the readout.
        """
        if later:
            more = f" and {len(later) - 3} others" if len(later) > 3 else ""
            raise ValueError(
                f"The parameters {', '.join(map(repr, later[:3]))}{more} act after the last "
                f"linear layer ({self._head_names}), in whose weights the output is not linear, so "
                "that layer is not the readout. "
                f"{advised_layers(self._pattern, run)}Or pass "
                "features=callable(model, *inputs) -> (N, D) (for an output h @ w, the h), or "
                "name that layer with layer= to use it anyway."
            )
        return (
            f"The output is not linear in the weights of {self._head_names}. Its local derivative "
            "is used, so the error bars are first order. Use the output before the nonlinearity "
            "(forward=), or name another layer=."
        )


class FeatureTap(WatchingTap):
    """A tap whose features the user computes: callable(model, *inputs) -> (N, D) or (N, K, P).

    Args:
        model: The user's model.
        source: How to call it, and the user's function.
        layout: `shared` for features with two dimensions, `joint` for three; "" before the first
            batch.
    """

    case = "features"
    linear = True
    weights = None
    biases = None

    def __init__(self, model: nn.Module, source: Source, layout: str = "") -> None:
        self.source = source
        self.layout = layout
        self.input_names = input_names(model)
        self.heads: list[str] = []
        self.silent: list[str] = []
        self.layers = []
        self.first_pass: FirstPass | None = None
        self.notice = ""
        # As in `Tap`. It is never called here: there is nothing to search for.
        self.search_whole_batch: Callable[[Inputs], AnyTap] | None = None
        self._pattern = shadow(model)
        self._model = OfThread(partial(shadow, self._pattern))

    @classmethod
    def with_first_pass(cls, model: nn.Module, source: Source, inputs: Inputs) -> FeatureTap:
        """A tap with a first pass, if the model can make one of these inputs."""
        tap = cls(model, source)
        with suppress(Exception):  # the first reading will raise it again
            tap.first_pass = FirstPass.of(model, source, inputs)
        return tap

    @outside_inference_mode
    def __call__(self, *args: Any, **kwargs: Any) -> Reading:
        """One forward pass and one call of the user's function."""
        return self._reading(*args, **kwargs)

    def graph(self, *args: Any, **kwargs: Any) -> Reading:
        """The same, differentiable by the inputs as far as the user's function is."""
        with torch.enable_grad():
            return self._reading(*args, **kwargs)

    def steady(self, *args: Any, **kwargs: Any) -> Callable[..., Reading]:
        """The pass as a function that `torch.func` can transform: no value is looked at."""
        return self._reading

    def terms(self, *args: Any, **kwargs: Any) -> Terms:
        """Refused: what the user's features are sums of is not known."""
        raise ValueError(
            "With features= the terms of a sum are not known. Pass their features to "
            "rigidities.local yourself."
        )

    def _models(self) -> tuple[nn.Module, nn.Module]:
        return self._pattern, self._model()

    def _reading(self, *args: Any, **kwargs: Any) -> Reading:
        """Output and features of one pass, after a check of their shapes."""
        assert self.source.features is not None
        first_batch = not self.layout
        if first_batch:  # on which a model that writes into its inputs is refused
            args, kwargs = copied((args, kwargs))
        working_call = None if first_batch else ""  # see `Source.run`
        output = self.source.run(self._model(), args, kwargs, working_call)
        features = self.source.features(self._model(), *args, **kwargs)
        if not (isinstance(features, Tensor) and features.ndim in (2, 3)):
            got = getattr(features, "shape", type(features).__name__)
            raise ValueError(f"features= must return a tensor (N, D) or (N, K, P), got {got}.")
        layout = "shared" if features.ndim == 2 else "joint"
        if first_batch:
            self.layout = layout
        if layout != self.layout or not _has_a_row_for_each_output(features, output):
            raise ValueError(
                f"features= returned {tuple(features.shape)} for an output of shape "
                f"{tuple(output.shape)}: expected one row of features per row of output."
            )
        rows = features.shape[0]
        inner = torch.Size([rows, output.numel() // rows])
        return Reading(output, features, OutputLayout(output.shape, inner))


AnyTap = Tap | FeatureTap


def _has_a_row_for_each_output(features: Tensor, output: Tensor) -> bool:
    """Whether features (N, D) or (N, K, P) fit an output."""
    rows = features.shape[0]
    if features.ndim == 2:
        return rows in {output.shape[0], output.numel()}
    return rows == output.shape[0] and features.shape[:2].numel() == output.numel()


def _agree(actual: Tensor, expected: Tensor, share: float) -> bool:
    """Whether two tables (M, K) agree within a share of each column's size; NaN does not."""
    size = torch.maximum(actual.abs().amax(0), expected.abs().amax(0))
    return bool(((actual - expected).abs().amax(0) <= share * size).all())


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


def _checked_names(model: nn.Module, names: list[Any]) -> list[str]:
    """The names that a user gave by `layer=`, as the model's modules have them.

    Raises:
        TypeError: A name is not a string.
        ValueError: A name is not that of a module or parameter, or there are no parameters to
            differentiate by.
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                "layer= must be the name of a layer (or several names), as in "
                "dict(model.named_modules()) or dict(model.named_parameters()), got "
                f"{type(name).__name__}."
            )
    if not names:
        raise ValueError("layer=[] names no layer. Name one, or leave layer= out.")
    inner_model = unwrapped(model)
    modules = dict(inner_model.named_modules())
    known = {*modules, *dict(inner_model.named_parameters(remove_duplicate=False))}
    # A compiled module holds the original one under this name.
    names = [f"{name}._orig_mod" if f"{name}._orig_mod" in modules else name for name in names]
    for name in names:
        if name not in known:
            raise ValueError(
                f"layer={name!r} is not a module or parameter of this model. Its linear maps: "
                f"{', '.join(map(repr, linear_maps(inner_model))) or 'none'}."
            )
    for name in names:
        if is_scripted(model, name):
            raise ValueError(
                f"layer={name!r} has parameters inside TorchScript, which cannot be inspected. "
                "Pass features=."
            )
    for name in names:
        if not layers_inside(inner_model, name):
            kind = type(modules.get(name, nn.Parameter())).__name__
            raise ValueError(
                f"layer={name!r} is a {kind} without floating-point "
                "parameters to differentiate with respect to (quantised?). Name the layer of the "
                "model as it was trained, or pass features=."
            )
    return names
