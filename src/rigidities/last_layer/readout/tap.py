r"""Where the features come from: `Tap` turns a model into inputs -> (output, features).

The features of a prediction are its derivatives by the readout's weights,
$f = \partial y / \partial w$. A tap runs a `shadow` of the model with a recorder in place of the
readout head(s); a `Case` (see `cases`) says how the features follow from what was recorded. It
is found on the first batch, and its features checked there by changing the heads' weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...models.calling import FeatureFunction, ForwardFunction, Source
from ...models.directional import normal_like
from ...models.modes import outside_inference_mode
from ...models.shadow import input_names, shadow, unwrapped
from ...notices import notify
from .cases import CASES, Case, Separate, Shared
from .heads import Call, channel_axis, guard, linear_maps, record
from .reading import Reading, Terms
from .search import Found, find_heads


class Tap:
    """Inputs -> (output, features) for one model.

    Use `Tap.find` to make one; then `output, features = tap(*inputs)`.

    Attributes:
        heads: names of the readout heads.
        silent: linear maps that the first batch did not call; a later call is refused.
        case: how the features follow from the heads, by name.
        layout: `shared`, `separate` or `joint`; see `cases`.
        linear: whether the output is linear in the heads' weights.
        input_names: what the model's `forward` calls its inputs.
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
        self.input_names = input_names(model)
        twin = shadow(model)
        guard(twin, self.silent)
        self._model, self._recorders = record(twin, heads)
        self._case: Case = CASES[case]([recorder.head for recorder in self._recorders])

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
            model: the trained model; it is not touched.
            args: positional inputs of the batch.
            kwargs: keyword inputs of the batch.
            layer: name (or names) of the head where the last linear map is not the one wanted.
            features: callable(model, *inputs) -> (N, D), instead of a head.
            forward: callable(model, batch) -> output, instead of calling the model.
            output: field, key or index of the output where the model gives several.

        Raises:
            ValueError: no linear map reaches the output; the message names the way out.
        """
        source, kwargs = Source(forward, features, output), kwargs or {}
        if features is not None:
            return FeatureTap(model, source)
        if layer is None:
            found = find_heads(model, lambda m: source.run(m, args, kwargs))
        else:
            names = list(layer) if isinstance(layer, (list, tuple)) else [layer]
            found = Found(_checked_names(model, names), later=[], silent=[])
        tap = cls(model, source, heads=found.heads, case="plain", silent=found.silent)
        tap._settle(args, kwargs)
        if not tap.linear:
            tap._own_up(found.later)
        return tap

    @property
    def case(self) -> str:
        """Name of the case."""
        return self._case.name

    @property
    def layout(self) -> str:
        """How the features' dimensions and the targets correspond."""
        return self._case.layout

    @property
    def weights(self) -> Tensor:
        """Weights behind the features: (D, K) for `shared` and `separate`, (P, 1) for `joint`."""
        return self._case.columns.weights()

    @property
    def biases(self) -> Tensor | None:
        """Columns of the features that belong to biases; None where that is not known."""
        return getattr(self._case.columns, "biases", None)

    @outside_inference_mode
    def __call__(self, *args: Any, **kwargs: Any) -> Reading:
        """One forward pass."""
        return self._reading(args, kwargs)

    def graph(self, *args: Any, **kwargs: Any) -> Reading:
        """One forward pass whose output and features autograd can differentiate by the inputs."""
        with torch.enable_grad():
            return self._reading(args, kwargs, graph=True)

    def unchecked(self, *args: Any, **kwargs: Any) -> Reading:
        """One forward pass of a plain head without looking at any value.

        The same as a call, for `torch.func`, which allows no such look. It reads versions of
        tensors, which a tracer cannot: `torch.export` and `torch.compile` go by `traced`.
        """
        assert self.case == "plain"
        output, calls = self._run(args, kwargs)
        return Reading(output, calls[0].rows, calls[0].output.shape, channel_axis(calls[0].head))

    def steady(self, *args: Any, **kwargs: Any) -> Callable[..., Reading] | None:
        """The pass as a function that `torch.func` can transform, or None where there is none.

        There is one for a plain head, and for gains that do not depend on the inputs (sums over
        atoms, a change of units); those of the given inputs are kept.

        Args:
            args: inputs, those to differentiate by with `requires_grad`.
            kwargs: likewise.
        """
        if self.case == "plain":
            return self.unchecked
        case = self._case
        if not isinstance(case, Separate):
            return None
        with torch.enable_grad():
            output, calls = self._run(args, kwargs, probing=True)
            found = case.gains(output, calls, graph=True)
        if found is None or any(gain.gain.requires_grad for gain in found):
            return None

        def read(*args: Any, **kwargs: Any) -> Reading:
            return case.gathered(*self._run(args, kwargs), found)

        return read

    def terms(self, *args: Any, **kwargs: Any) -> Terms:
        """The terms that sum to the outputs: atoms of structures, pixels, time steps.

        Raises:
            ValueError: the output is no weighted sum of the head's rows, alike for all targets.
        """
        if not self._case.probes:
            features = self._reading(args, kwargs).features.detach()
            rows = torch.arange(len(features), device=features.device)
            if not self._case.probes:  # else this batch is no plain one
                return Terms(features, rows, torch.zeros_like(rows), len(features))
        case, found = self._case, None
        if isinstance(case, Shared):
            with torch.enable_grad(), _explained():
                output, calls = self._run(args, kwargs, probing=True)
                found = case.gains(output, calls)
        if not isinstance(case, Shared) or found is None:
            raise ValueError(
                f"The output is no sum over rows of {self._names} (case {self.case!r}), so it has "
                "no local terms. Give their features to rigidities.local yourself."
            )
        return case.terms(output, calls, found)

    @property
    def _names(self) -> str:
        return ", ".join(repr(name) if name else "the model itself" for name in self.heads)

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        probing: bool = False,
        changes: list[Tensor] | None = None,
    ) -> tuple[Tensor, list[Call]]:
        """A forward pass with its recorded calls, perhaps with changed head weights."""
        for i, recorder in enumerate(self._recorders):
            recorder.reset(probing=probing, change=None if changes is None else changes[i])
        try:
            output = self.source.run(self._model, args, kwargs)
            calls = [call for recorder in self._recorders for call in recorder.calls]
        finally:
            for recorder in self._recorders:
                recorder.reset()
        if not calls:
            raise ValueError(f"The forward pass did not call {self._names}: name another layer=.")
        return output, calls

    def _reading(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, graph: bool = False
    ) -> Reading:
        reading = None
        if not self._case.probes:
            reading = self._read(*self._run(args, kwargs), graph=graph)
            if reading is None:  # an identity on the first batch (a mask of ones), not on this one
                self._case = CASES["shared"]([recorder.head for recorder in self._recorders])
        if reading is None:
            with torch.enable_grad():
                reading = self._read(*self._run(args, kwargs, probing=True), graph=graph)
        if reading is None:
            self._check_finite(args, kwargs)
            raise ValueError(
                f"What follows {self._names} in this batch no longer has the form found on the "
                f"first batch ({self.case!r}). Pass features= to give the features yourself."
            )
        return reading

    def _check_finite(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """NaN hides the form of what follows the heads: name it instead."""
        with torch.no_grad():
            output, _ = self._run(args, kwargs)
        if not bool(torch.isfinite(output).all()):
            raise ValueError(
                "The model's output for this batch is NaN or infinite. Look at the inputs: are "
                "they finite, and in the units of the training data?"
            )

    def _read(self, output: Tensor, calls: list[Call], *, graph: bool = False) -> Reading | None:
        with _explained():
            return self._case.read(output, calls, graph=graph)

    def _settle(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the first case that fits this batch and check it with changed weights."""
        with torch.enable_grad():
            if self._is_plain(args, kwargs):
                return
            output, calls = self._run(args, kwargs, probing=True)
            if not output.requires_grad:
                raise ValueError(
                    f"The output does not depend on {self._names} through differentiable "
                    "operations (torch.no_grad, detach or NumPy in the forward pass?). Name "
                    "another layer= or pass features=."
                )
            for make in list(CASES.values())[1:]:
                self._case = make([recorder.head for recorder in self._recorders])
                reading = self._read(output, calls)
                if reading is not None:
                    self.linear = self._is_linear(reading, args, kwargs)
                    break

    def _own_up(self, later: list[str]) -> None:
        """Refuse parameters behind a nonlinearity after the heads; otherwise warn."""
        if later:
            raise ValueError(
                f"The parameters {', '.join(map(repr, later))} act after the last linear layer "
                f"({self._names}), and not linearly, so that layer is not the readout. Pass "
                "features=callable(model, *inputs) -> (N, D) (for an output h @ w, the h), or "
                "name the layer= to use all the same."
            )
        notify(
            f"The output is not linear in the weights of {self._names}: its local derivative "
            "is used, so the error bars are first order. Take the output before the "
            "nonlinearity (forward=), or name another layer=."
        )

    def _is_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the output is the head's output to the bit, with its own and other weights."""
        if len(self.heads) > 1:
            return False
        change = _large_change(self.weights, seed=0)
        for changes in (None, [self._case.columns.share(change, 0)]):
            output, calls = self._run(args, kwargs, changes=changes)
            if len(calls) > 1 or not calls[0].passed_on(output):
                return False
        return True

    def _is_linear(self, reading: Reading, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether y(w + d) - y(w) = f . d for large random changes d of the heads' weights."""
        columns = self._case.columns
        if not bool(torch.isfinite(reading.output.detach()).all()):
            return True  # NaN says nothing of linearity, and is refused by the fit
        tolerance = min(0.1, 100 * torch.finfo(reading.output.dtype).eps ** 0.75)
        for seed in (1, 2):
            change = _large_change(columns.weights(), seed)
            changes = [columns.share(change, i) for i in range(len(self.heads))]
            moved, _ = self._run(args, kwargs, changes=changes)
            if moved.shape != reading.output.shape:
                return False
            actual = reading.rows(moved.detach() - reading.output.detach()).to(torch.float64)
            expected = self._case.response(reading.features.detach().to(torch.float64), change)
            size = torch.maximum(actual.abs().max(), expected.abs().max())
            if not bool((actual - expected).abs().max() <= tolerance * size):
                return False
        return True


class FeatureTap:
    """A tap whose features the user computes: callable(model, *inputs) -> (N, D) or (N, K, P)."""

    case = "features"
    linear = True
    weights = None
    biases = None

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
        return self._reading(*args, **kwargs)

    def graph(self, *args: Any, **kwargs: Any) -> Reading:
        """The same, differentiable by the inputs as far as the user's function is."""
        with torch.enable_grad():
            return self._reading(*args, **kwargs)

    def steady(self, *args: Any, **kwargs: Any) -> Callable[..., Reading]:
        """The pass as a function that `torch.func` can transform: no value is looked at."""
        return self._reading

    def terms(self, *args: Any, **kwargs: Any) -> Terms:
        """Refused: what the user's features are sums of is not known.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "With features= the terms of a sum are not known. Give their features to "
            "rigidities.local yourself."
        )

    def _reading(self, *args: Any, **kwargs: Any) -> Reading:
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


AnyTap = Tap | FeatureTap


@contextmanager
def _explained() -> Iterator[None]:
    """Where backward passes through a graph that the model has freed say so."""
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise ValueError(
            "The model's forward pass frees the autograd graph of its output (forces computed "
            "inside forward?). Let it call torch.autograd.grad with retain_graph=True, or "
            "pass features=."
        ) from error


def _large_change(weights: Tensor, seed: int) -> Tensor:
    """Random, large enough to carry the output through whatever nonlinearity may follow."""
    size = float(weights.square().mean().sqrt()) or 1.0
    return normal_like(weights.to(torch.float64), seed) * 10 * size


def _checked_names(model: nn.Module, names: list[Any]) -> list[str]:
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise TypeError(
            f"layer= takes the name of a layer (or names), as in dict(model.named_modules()), "
            f"got {type(wrong[0]).__name__}."
        )
    known = linear_maps(unwrapped(model))
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(
            f"layer={missing[0]!r} is not a linear map of this model. Its linear maps: "
            f"{', '.join(map(repr, known)) or 'none'}."
        )
    return names
