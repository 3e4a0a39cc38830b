r"""Where the features come from: `Tap` turns a model into inputs -> (output, features).

The features of a prediction are its derivatives by the readout's weights,
$f = \partial y / \partial w$. A tap runs a `shadow` of the model with a recorder in place of the
readout head(s); a `Case` (see `cases`) says how the features follow from what was recorded. Every
thread has a shadow with recorders of its own, so that any number of them may call a tap, and a
model may keep what it likes in its attributes during a pass.

A tap is found with a few rows of the first batch where these can be cut out, and its features are
checked there by changing the heads' weights. How often the model is called for that, all told:

| the output is | calls |
| --- | --- |
| what a layer of torch's own returned, perhaps reshaped | 1: the graph of the search shows it |
| anything else, by linear layers | 4: the search, a probed pass, two with other weights |
| likewise, but not linearly | 6 at most: two more for the slope |
| the layer's for its own weights alone (a clamp that does nothing yet) | 9 at most |
| no function of what the layers return alone, so by their parameters | 9 at most |
| with `features=` | 1 |

A model that differentiates inside its forward pass may be called once more in the search and in its
first probed pass; `layer=` with modules that are no linear maps, and parameters that reach the
output past the heads, take trials of their own. A coarser model than one in float64 is checked in a
copy, with as many calls. If the first batch's own pass shows that the few rows did not tell all,
the readout is searched again in the whole of it.
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

from ...models.calling import FeatureFunction, ForwardFunction, Inputs, Source, copied
from ...models.double import InDouble, double_copy, is_double
from ...models.modes import ordinary, outside_inference_mode
from ...models.shadow import input_names, shadow, unwrapped
from ...models.threads import OfThread
from ...notices import notify
from .cases import CASES, Case, Plain, Separate, Shared
from .heads import (
    Call,
    Recorder,
    guard,
    is_as_it_seems,
    is_certain,
    is_free,
    linear_maps,
    owners,
    record,
)
from .layers import Layer, find_layers, layers_of_samples, watched
from .probes import FirstPass, first_rows
from .reading import Reading, Terms
from .search import find_heads, large_change, left_out, named_heads, nearest, scripted, tolerance
from .tail import GraphsKept, coarsest

T = TypeVar("T")


class Watching(ABC):
    """What `Tap` and `FeatureTap` do alike: passes during which the model's layers are watched.

    Attributes:
        layers: those that are watched, for `novelty`; none by default.
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
            ValueError: there are none.
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
        few = first_rows(inputs)
        if few is not None:
            self.layers = layers_of_samples(
                pattern,
                model,
                self.layers,
                whole=lambda: self(*args, **kwargs).output,
                few=lambda: self(*few[0], **few[1]).output,
            )
        if not self.layers:
            raise ValueError(
                "novelty=True found no layer to watch: nothing that enters one has a row for each "
                "sample (inputs of three dimensions, modules of one's own?). Fit without it."
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


class Tap(Watching):
    """Inputs -> (output, features) for one model.

    Use `Tap.find` to make one; then `output, features = tap(*inputs)`.

    Attributes:
        silent: linear maps that the first batch did not call; a later call is refused.
        case: how the features follow from the heads, by name.
        layout: `shared`, `separate` or `joint`; see `cases`.
        linear: whether the output is linear in the heads' weights.
        worked: the call of the model that the readout was found with, for messages; "" if unknown.
        input_names: what the model's `forward` calls its inputs.
        first_pass: the pass that the readout was found with, until somebody takes it.
        notice: what the user should know of the readout; "" if nothing.
        search: finds the readout in the whole of a batch. It is asked if this tap, found with a few
            rows of that batch, cannot read all of it, and is None once the batch has been read.
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
        self.source, self.heads, self.silent, self.linear = source, heads, list(silent), linear
        self.case, self.worked, self.input_names = case, "", input_names(model)
        self.first_pass: FirstPass | None = None
        self.notice = ""
        self.layers = []
        self.search: Callable[[Inputs], AnyTap] | None = None
        self._frees = False  # whether the model differentiates, and frees its graph, inside forward
        self._quiet: bool | None = None  # whether it runs without gradients, faster for some
        self._in_float64 = False  # whether this tap is of a copy that is run `InDouble`
        self._pattern = shadow(model)  # never run: what a pass leaves in it would be copied too
        self._twin = OfThread(self._make)

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
        """Find the readout on one batch of inputs; the options are those of `LastLayerRigidity`.

        Raises:
            ValueError: no linear map reaches the output; the message names the way out.
        """
        source = Source(forward, features, output)
        tap = cls.found(model, source, layer, (args, kwargs or {}))
        if tap.notice:
            notify(tap.notice)
        return tap

    @classmethod
    @outside_inference_mode
    def found(
        cls, model: nn.Module, source: Source, layer: str | list[str] | None, inputs: Inputs
    ) -> Tap | FeatureTap:
        """The same without a warning: `notice` says what there is to say."""
        if source.features is not None:
            return FeatureTap.found(model, source, inputs)
        if isinstance(unwrapped(model), torch.jit.ScriptModule):
            raise ValueError(
                "A TorchScript module cannot be looked into. Pass features=callable(model, "
                "*inputs) -> (N, D), or wrap the nn.Module that it was made from."
            )

        inputs = copied(inputs)  # a model that writes into them is refused, and nothing is lost

        def run(twin: nn.Module) -> Tensor:
            return source.run(twin, *inputs, None)

        if layer is None:
            found = find_heads(model, run)
        else:
            names = list(layer) if isinstance(layer, (list, tuple)) else [layer]
            with torch.enable_grad():
                found = named_heads(model, _checked_names(model, names), run)
        tap = cls(model, source, heads=found.heads, case=found.case, silent=found.silent)
        tap.worked = source.call(unwrapped(model), *inputs)
        tap.first_pass = FirstPass(inputs, found.marked.output, found.marked.renewed)
        # Of torch's own layers the class says what they compute; all else is tried.
        if not (found.is_returned and all(map(is_certain, tap._heads))):
            with torch.enable_grad():
                tap._settle(inputs)
        if not tap.linear:
            tap.notice = tap._own_up(found.later)
        elif found.left:
            tap.notice = left_out(found)
        return tap

    @property
    def layout(self) -> str:
        """How the features' dimensions and the targets correspond."""
        return CASES[self.case].layout

    @property
    def _heads(self) -> list[nn.Module]:
        return [recorder.head for recorder in self._twin().recorders]

    @property
    def _case(self) -> Case:
        return self._twin().cases[self.case]

    @property
    def weights(self) -> Tensor:
        """Weights behind the features: (D, K) for `shared` and `separate`, (P, 1) for `joint`."""
        return self._case.columns.weights()

    @property
    def biases(self) -> Tensor:
        """Columns of the features that belong to biases."""
        return self._case.columns.biases

    def __call__(self, *args: Any, **kwargs: Any) -> Reading:
        """One forward pass."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                args, kwargs = ordinary((args, kwargs))
                return self(*args, **kwargs)
        try:
            return self._reading((args, kwargs))
        except (ValueError, RuntimeError):
            if self.search is None:
                raise
        # More layers are called than by the few rows, or what follows the heads does more.
        search, self.search = self.search, None
        found = search((args, kwargs))
        assert isinstance(found, Tap)
        self._take(found)
        self.first_pass = found.first_pass
        if found.notice and not self.notice:
            notify(found.notice)
        return self._reading((args, kwargs))

    def graph(self, *args: Any, **kwargs: Any) -> Reading:
        """One forward pass whose output and features autograd can differentiate by the inputs."""
        with torch.enable_grad(), GraphsKept() as kept:
            reading = self._reading((args, kwargs), graph=True)
        self._frees |= kept.met
        return reading

    def steady(self, *args: Any, **kwargs: Any) -> Callable[..., Reading] | None:
        """The pass as a function that `torch.func` can transform, or None where there is none.

        There is one for a plain head, and for gains that do not depend on the inputs (sums over
        atoms, a change of units); those of the given inputs are kept, where the inputs to
        differentiate by have `requires_grad`.
        """
        case, found = self._case, None
        if isinstance(case, Separate):
            with torch.enable_grad():
                found = self._probed((args, kwargs), partial(case.gains, graph=True))
            if found is None or any(gain.gain.requires_grad for gain in found):
                return None
        elif not isinstance(case, Plain):
            return None

        def read(*args: Any, **kwargs: Any) -> Reading:
            return case.gathered(*self._run((args, kwargs)), found or ())

        return read

    def terms(self, *args: Any, **kwargs: Any) -> Terms:
        """The terms that sum to the outputs: atoms of structures, pixels, time steps."""
        if not CASES[self.case].probes:
            features = self._reading((args, kwargs)).features.detach()
            rows = torch.arange(len(features), device=features.device)
            if not CASES[self.case].probes:  # else this batch is no plain one
                return Terms(features, rows, torch.zeros_like(rows), len(features))
        case, found = self._case, None
        if isinstance(case, Shared):
            with torch.enable_grad():
                found = self._probed((args, kwargs), case.terms)
        if found is None:
            raise ValueError(
                f"The output is no sum over rows of {self._names} (case {self.case!r}), so it has "
                "no local terms. Give their features to rigidities.local yourself."
            )
        return found

    def row_owners(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """The sample of each row (atom) that the outputs are sums of (R,); None if they are not.

        It takes a pass of its own, which differentiates what follows the heads.
        """
        case = self._case
        if not isinstance(case, Separate):
            return None

        def rows(output: Tensor, calls: list[Call]) -> Tensor | None:
            found = case.gains(output, calls)
            if found is None:
                return None
            first = found[0].owner  # the output row (see `Reading.rows`) of each of the head's
            if any(not torch.equal(gain.owner, first) for gain in found):
                return None  # heads for different rows, as for each species
            inner, axis, _ = found[0].view
            each = output.numel() // inner[axis] // len(output)
            return first // max(1, each)

        with torch.enable_grad():
            return self._probed((args, kwargs), rows)

    def _models(self) -> tuple[nn.Module, nn.Module]:
        return self._pattern, self._twin().model

    def _make(self) -> _Twin:
        twin = shadow(self._pattern)
        guard(twin, self.silent)
        model, recorders = record(twin, self.heads, CASES[self.case].recorder)
        return _Twin(model, recorders, _Cases([recorder.head for recorder in recorders]))

    @property
    def _names(self) -> str:
        return ", ".join(repr(name) if name else "the model itself" for name in self.heads)

    def _run(
        self, inputs: Inputs, *, probing: bool = False, change: Tensor | None = None
    ) -> tuple[Tensor, list[Call]]:
        """A forward pass with its recorded calls, perhaps with changed head weights."""
        twin = self._twin()
        for i, recorder in enumerate(twin.recorders):
            share = None if change is None else self._case.columns.share(change, i)
            recorder.reset(probing=probing, change=share)
        try:
            return self._pass(twin, inputs)
        finally:
            for recorder in twin.recorders:
                recorder.reset()

    def _pass(self, twin: _Twin, inputs: Inputs) -> tuple[Tensor, list[Call]]:
        """A forward pass of a thread's twin, as its recorders are set, with its recorded calls."""
        calls: list[Call] = []
        try:
            if self._frees or self._in_float64:
                with (
                    GraphsKept() if self._frees else nullcontext(),
                    InDouble() if self._in_float64 else nullcontext(),
                ):
                    output = self.source.run(twin.model, *inputs, self.worked)
            else:
                output = self.source.run(twin.model, *inputs, self.worked)
            for recorder in twin.recorders:
                calls += recorder.calls
        finally:
            for recorder in twin.recorders:
                recorder.calls.clear()
        if not calls:
            raise ValueError(f"The forward pass did not call {self._names}: name another layer=.")
        return output, calls

    def _probed(self, inputs: Inputs, read: Callable[[Tensor, list[Call]], T]) -> T:
        """What is read from a probed pass, also of a model that frees its graph inside forward."""
        try:
            return read(*self._run(inputs, probing=True))
        except RuntimeError as error:
            if self._frees or "backward through the graph a second time" not in str(error):
                raise
        self._frees = True  # from now on its graph is kept
        return read(*self._run(inputs, probing=True))

    def _reading(self, inputs: Inputs, *, graph: bool = False) -> Reading:
        twin = self._twin()
        case = twin.cases[self.case]  # which another thread may change meanwhile
        reading = None
        if not case.probes:
            reading = case.read(*self._unprobed(twin, inputs, graph))
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
                "The model's output for this batch is NaN or infinite. Look at the inputs: are "
                "they finite, and in the units of the training data?"
            )
        raise ValueError(
            f"What follows {self._names} in this batch no longer has the form found on the first "
            f"batch ({self.case!r}). Pass features= to give the features yourself."
        )

    def _unprobed(self, twin: _Twin, inputs: Inputs, graph: bool) -> tuple[Tensor, list[Call]]:
        """A pass without gradients, unless the model, or somebody by an input, wants them."""
        if graph or self._quiet is False or not torch.is_grad_enabled() or _wanted(inputs):
            return self._pass(twin, inputs)
        torch.set_grad_enabled(False)
        try:
            recorded = self._pass(twin, inputs)
            self._quiet = True
            return recorded
        except RuntimeError:
            if self._quiet:
                raise
        finally:
            torch.set_grad_enabled(True)
        self._quiet = False
        return self._pass(twin, inputs)

    def _settle(self, inputs: Inputs) -> None:
        """Decide which parameters the features belong to, which case it is, and if it is linear.

        It is decided in float64, in a copy where the model is coarser: a tolerance that grows with
        the type would swallow a mixing of targets. Where there can be no copy, half precision takes
        the general road.
        """
        if is_double(self._pattern):
            self._choose(inputs, list(CASES)[1:])
            return
        judge = self._in_double(inputs)
        if judge is not None:
            self._take(judge)
            return
        real = [p for p in self._pattern.parameters() if p.is_floating_point()]
        fine = all(_eps(parameter) <= torch.finfo(torch.float32).eps for parameter in real)
        self._choose(inputs, list(CASES)[1:] if fine else ["jacobian", "dense"])

    def _in_double(self, inputs: Inputs) -> Tap | None:
        """A tap on a copy of the model in float64 that has decided; None where none can run."""
        try:
            copy = double_copy(self._pattern)
            if copy is None:
                return None
            judge = Tap(copy, self.source, heads=self.heads, case=self.case, silent=self.silent)
            judge._in_float64 = True
            with InDouble():
                judge._choose(inputs, list(CASES)[1:])
        except Exception:  # no memory, no float64, or code that insists on a type
            return None
        return judge

    def _take(self, other: Tap) -> None:
        """Read as another tap on the same model, or on a copy of it, does."""
        self.linear, self._frees = other.linear, other._frees
        self.heads, self.silent, self.case = other.heads, other.silent, other.case
        self._twin = OfThread(self._make)

    def _choose(self, inputs: Inputs, cases: list[str]) -> None:
        """Set heads, case and `linear` by what a few passes over some inputs show."""
        seeming = all(is_certain(head) or is_free(head) for head in self._heads)
        if self.case != "parameters" and not seeming:
            self._by_parameters(opened=True)
        reading = self._probed(inputs, partial(self._honest_reading, ["plain", *cases]))
        if reading is None:  # the heads do not compute what they seem to
            self._by_parameters(opened=True)
            reading = self._probed(inputs, partial(self._first_reading, []))
        self.linear = self._is_linear(reading, inputs)
        if not self.linear and self.case == "plain":
            # The output is the heads' for these weights alone, as behind a clamp.
            reading = self._probed(inputs, partial(self._first_reading, cases))
            self.linear = self._is_linear(reading, inputs)
        if self.linear or self.case == "parameters" or self._is_derivative(reading, inputs):
            return
        # What the head returned is not all that its weights do: the model differentiates by its
        # inputs through the head, or uses the weights elsewhere.
        self._by_parameters()
        reading = self._probed(inputs, partial(self._first_reading, []))
        self.linear = self._is_linear(reading, inputs)

    def _by_parameters(self, *, opened: bool = False) -> None:
        """Take the derivative by the parameters of the heads, whatever they compute of them."""
        if opened:
            inside = [owners(self._pattern, name, opened=True) for name in self.heads]
            self.heads = list(dict.fromkeys(name for names in inside for name in names))
        self.case = "parameters"
        self._twin = OfThread(self._make)

    def _honest_reading(
        self, cases: list[str], output: Tensor, calls: list[Call]
    ) -> Reading | None:
        """The first reading; None if the heads do not compute W f + b of what goes in."""
        certain = self.case == "parameters" or all(map(is_certain, self._heads))
        if not certain and not is_as_it_seems(calls):
            return None
        return self._first_reading(cases, output, calls)

    def _first_reading(self, cases: list[str], output: Tensor, calls: list[Call]) -> Reading:
        """The reading of a probed pass by the first case that fits, which becomes the tap's."""
        for name in ["parameters"] if self.case == "parameters" else cases:
            if name != "plain" and not output.requires_grad:
                raise ValueError(
                    f"The output does not depend on {self._names} through differentiable "
                    "operations (torch.no_grad, detach or NumPy in the forward pass?). Name "
                    "another layer= or pass features=."
                )
            self.case = name
            reading = self._case.read(output, calls)
            if reading is not None:
                return reading
        raise AssertionError("the last case takes any tail")

    def _own_up(self, later: list[str]) -> str:
        """Refuse parameters behind a nonlinearity after the heads; otherwise a warning."""
        if later:
            more = f" and {len(later) - 3} others" if len(later) > 3 else ""
            raise ValueError(
                f"The parameters {', '.join(map(repr, later[:3]))}{more} act after the last linear "
                f"layer ({self._names}), and not linearly, so that layer is not the readout. "
                f"{nearest(self._pattern, later, self.heads)}Or pass features=callable(model, "
                "*inputs) -> (N, D) (for an output h @ w, the h), or name the layer= to use all "
                "the same."
            )
        return (
            f"The output is not linear in the weights of {self._names}: its local derivative "
            "is used, so the error bars are first order. Take the output before the "
            "nonlinearity (forward=), or name another layer=."
        )

    def _is_linear(self, reading: Reading, inputs: Inputs) -> bool:
        """Whether y(w + d) - y(w) = f . d for large random changes d of the heads' weights.

        A plain output must be the heads' own with the other weights too, to the bit.
        """
        case, plain = self._case, self.case == "plain"
        certain = plain and all(map(is_certain, self._heads))
        if not plain and not bool(torch.isfinite(reading.output.detach()).all()):
            return True  # NaN says nothing of linearity, and is refused by the fit
        for seed in (1, 2):
            change = large_change(self.weights, seed)
            moved, calls = self._run(inputs, change=change)
            if plain and case.read(moved, calls) is None:
                return False
            if certain:  # by the class of the heads
                continue
            if moved.shape != reading.output.shape:
                return False
            actual = reading.rows(moved.detach() - reading.output.detach()).to(torch.float64)
            expected = case.response(reading.features.detach().to(torch.float64), change)
            rounding = coarsest([moved, *(call.output for call in calls)])
            if not _agree(actual, expected, tolerance(rounding)):
                return False
        return True

    def _is_derivative(self, reading: Reading, inputs: Inputs) -> bool:
        """Whether f is the slope of the output along a random direction d of the heads' weights.

        By central differences, in float64; a coarser type leaves no digits to tell.
        """
        if reading.output.dtype != torch.float64:
            return True
        direction = large_change(self.weights, seed=3)
        step = 1e-6
        ahead, _ = self._run(inputs, change=step * direction)
        behind, _ = self._run(inputs, change=-step * direction)
        slope = reading.rows(ahead.detach() - behind.detach()) / (2 * step)
        expected = self._case.response(reading.features.detach().to(torch.float64), direction)
        return _agree(slope, expected, 1e-4)


def _agree(actual: Tensor, expected: Tensor, share: float) -> bool:
    """Whether two tables (M, K) agree within a share of each column's size."""
    size = torch.maximum(actual.abs().amax(0), expected.abs().amax(0))
    return bool(((actual - expected).abs().amax(0) <= share * size).all())  # not of NaN


def _eps(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps


class _Cases(dict[str, Case]):
    """The cases of some heads by name, each made when it is first asked for."""

    def __init__(self, heads: list[nn.Module]) -> None:
        super().__init__()
        self._heads = heads

    def __missing__(self, name: str) -> Case:
        self[name] = CASES[name](self._heads)
        return self[name]


@dataclass(frozen=True)
class _Twin:
    """One thread's shadow of the model, the recorders in it, and the cases made of its heads."""

    model: nn.Module
    recorders: list[Recorder]
    cases: _Cases


class FeatureTap(Watching):
    """A tap whose features the user computes: callable(model, *inputs) -> (N, D) or (N, K, P)."""

    case = "features"
    linear = True
    weights = None
    biases = None

    def __init__(self, model: nn.Module, source: Source, layout: str = "") -> None:
        self.source, self.input_names = source, input_names(model)
        self.heads, self.silent = list[str](), list[str]()
        self.layout = layout  # none before the first batch
        self.layers = []
        self.first_pass: FirstPass | None = None
        self.notice = ""
        self.search: Callable[[Inputs], AnyTap] | None = None  # nothing is found with few rows
        self._pattern = shadow(model)
        self._model = OfThread(partial(shadow, self._pattern))

    @classmethod
    def found(cls, model: nn.Module, source: Source, inputs: Inputs) -> FeatureTap:
        """A tap with a first pass, if the model can make one of these inputs."""
        tap = cls(model, source)
        with suppress(Exception):  # which the first reading will say
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
            "With features= the terms of a sum are not known. Give their features to "
            "rigidities.local yourself."
        )

    def _models(self) -> tuple[nn.Module, nn.Module]:
        return self._pattern, self._model()

    def _reading(self, *args: Any, **kwargs: Any) -> Reading:
        assert self.source.features is not None
        if not self.layout:  # the first batch, on which a model that writes into it is refused
            args, kwargs = copied((args, kwargs))
        output = self.source.run(self._model(), args, kwargs, "" if self.layout else None)
        features = self.source.features(self._model(), *args, **kwargs)
        if not (isinstance(features, Tensor) and features.ndim in (2, 3)):
            got = getattr(features, "shape", type(features).__name__)
            raise ValueError(f"features= must return a tensor (N, D) or (N, K, P), got {got}.")
        layout, rows = "shared" if features.ndim == 2 else "joint", features.shape[0]
        self.layout = self.layout or layout
        per_row = features.ndim == 2 and rows in {output.shape[0], output.numel()}
        per_output = features.ndim == 3 and features.shape[:2].numel() == output.numel()
        fits = per_row or (per_output and rows == output.shape[0])
        if not fits or layout != self.layout:
            raise ValueError(
                f"features= returned {tuple(features.shape)} for an output of shape "
                f"{tuple(output.shape)}: expected one row of features per row of output."
            )
        return Reading(output, features, torch.Size([rows, output.numel() // rows]), -1)


AnyTap = Tap | FeatureTap


def _wanted(inputs: Inputs) -> bool:
    """Whether somebody may ask for derivatives by an input."""
    values = [*inputs[0], *inputs[1].values()]
    for value in values:
        if type(value) is not Tensor:
            leaves = tree_leaves(values)
            return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        if value.requires_grad:
            return True
    return False


def _checked_names(model: nn.Module, names: list[Any]) -> list[str]:
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise TypeError(
            f"layer= takes the name of a layer (or names), as in dict(model.named_modules()), "
            f"got {type(wrong[0]).__name__}."
        )
    known = dict(unwrapped(model).named_modules())
    names = [f"{name}._orig_mod" if f"{name}._orig_mod" in known else name for name in names]
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(
            f"layer={missing[0]!r} is not a module of this model. Its linear maps: "
            f"{', '.join(map(repr, linear_maps(unwrapped(model)))) or 'none'}."
        )
    sealed = [name for name in names if scripted(model, name)]
    if sealed:
        where = f"layer={sealed[0]!r} has parameters inside TorchScript"
        raise ValueError(f"{where}, which cannot be looked into. Pass features=.")
    empty = [name for name in names if not owners(unwrapped(model), name)]
    if empty:
        raise ValueError(
            f"layer={empty[0]!r} is a {type(known[empty[0]]).__name__} without floating-point "
            "parameters by which to differentiate (quantised?). Name the layer of the model as "
            "it was trained, or pass features=."
        )
    return names
