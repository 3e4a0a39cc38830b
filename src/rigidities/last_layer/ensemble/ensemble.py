r"""An ensemble of readouts: many plausible models for the cost of one.

Member $n$ predicts $y(x) + f(x) \cdot \delta_n$ with the features $f = \partial y / \partial w$
and the deviations $\delta_n$ of `members`: one pass of the model and one matrix product whatever
the number of members. Where the output is linear in the readout's weights this is the model with
the weights $w + \delta_n$. Members keep the correlations between predictions, so that any function
of any number of outputs gets its error bar.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..._version import __version__
from ...data.feed import Feed
from ...data.storage import read, write
from ...models.calling import FeatureFunction, ForwardFunction, Source
from ...models.modes import exporting
from ...models.shadow import placement
from ...posterior.joint import JointPosterior
from ..readout.binding import Binding
from ..readout.reading import Reading
from ..readout.tap import AnyTap, Tap
from ..readout.traced import TracedReadout
from .member_values import MemberValues, evaluated
from .members import Drawing, Members

_KIND = "ensemble"


class Ensemble(nn.Module):
    """Members of a last-layer ensemble: `ens(x)` -> (members, *output.shape).

    Differentiable by the inputs where the readout is a plain layer. The model is part of this
    module, as in any wrapper (`to` moves it), but neither its mode nor its gradients are touched.
    Weights that changed since the fit are refused; a compiled or exported graph does not look.
    Inputs are one tuple to an exporter, so that a graph for any number of rows n of one input is

        torch.export.export(ens, (x,), dynamic_shapes=(({0: torch.export.Dim("n")},),))

    Args:
        binding: the tie to the model, with its tap.
        feed: how data reach the model.
        members: the deviations.

    Attributes:
        model: the trained model.
        deviations: (members, targets, features), float64 whatever the module is cast to.
        drawing: how the members were drawn; see `members`.
        missing: share of the training predictions' variance that a symmetric set leaves out.
    """

    deviations: Tensor

    def __init__(self, binding: Binding, feed: Feed, members: Members) -> None:
        super().__init__()
        self.model = binding.model
        self.drawing: Drawing = members.drawing
        self.missing = members.missing
        own = members.deviations.clone(memory_format=torch.contiguous_format)
        self.register_buffer("deviations", own, persistent=False)
        self._binding, self._feed = binding, feed
        self._tap: AnyTap | None = None
        self._graph: TracedReadout | None = None
        self.training = False  # members are always those of eval mode
        self._current()

    def forward(self, *inputs: Any, **keywords: Any) -> Tensor:
        """Outputs of all members, in the model's precision.

        A spread below the rounding of the outputs is lost in it: `propagate` keeps that.
        """
        return outputs(self._reading(inputs, keywords), self.deviations)

    def propagate(
        self,
        fn: Callable[[Tensor], Any],
        x: Any,
        *,
        batch_size: int | None = None,
        progress: bool | None = None,
    ) -> MemberValues:
        """Mean and standard deviation of any function of the outputs, by one call per member.

        For a linear function the mean is exact (unless the draws are independent); the covariance
        is unbiased for random members, exact for a symmetric set of full rank, and a lower bound
        for one of lower rank. A function of second degree has an exact mean in a symmetric set of
        full rank. See `members`.

        Args:
            fn: callable(output) -> tensor, array or number of any fixed shape, differentiable or
                not. The output is that of one member for all of x, batches joined, in float64:
                the model's own precision would round small spreads of large outputs away. A
                function that raises an error there gets float32, then the model's precision;
                the result says which.
            x: inputs, a data set or batches; targets in them are ignored.
            batch_size: rows per batch where the data are not batches already.
            progress: show a bar; by default on a terminal only.

        Raises:
            TypeError: fn returned something that is not a number.
            ValueError: NaN, infinity or shapes that differ between members.
        """
        parts, own = [], torch.float64
        with torch.enable_grad():  # for models that differentiate inside forward
            for batch in self._feed(x, "propagate", batch_size=batch_size, progress=progress):
                reading = self._eager(batch.args, batch.kwargs).detached()
                own = reading.output.dtype
                parts.append(outputs(reading, self.deviations, torch.float64))
        precisions = (torch.float64, torch.promote_types(own, torch.float32), own)
        return evaluated(
            fn, _joined(parts), self.drawing, missing=self.missing, precisions=precisions
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything but the model's weights to a safetensors file, atomically."""
        self._binding.current(thorough=True)
        write(path, {"deviations": self.deviations}, self._header())

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        layer: str | list[str] | None = None,
        features: FeatureFunction | None = None,
        forward: ForwardFunction | None = None,
        target: Callable[[Any], Tensor] | None = None,
        output: str | int | None = None,
    ) -> Ensemble:
        """Read a file for the model it was made with.

        Args:
            path: written by `save`.
            model: with the same weights, on any device.
            layer: as in the fit; not needed, the file knows it.
            features: the function of the fit, which a file does not hold.
            forward: the function of the fit.
            target: the function of the fit.
            output: as in the fit; not needed.

        Raises:
            FileNotFoundError: no such file.
            ValueError: damaged, foreign, or made with another model or other weights.
        """
        tensors, header = read(path)
        members = _members_of(tensors, header)
        chosen = header["readout"].get("output") if output is None else output
        binding = Binding(model, Source(forward, features, chosen), layer)
        binding.restore(header["readout"])
        whole = forward is not None
        feed = Feed(model, whole, target, header.get("inputs"), header.get("apart"))
        own = members.deviations.to(placement(model)[0])
        return cls(binding, feed, replace(members, deviations=own))

    def get_extra_state(self) -> dict[str, Any]:
        """The members and the readout, inside the `state_dict`."""
        return {"tensors": {"deviations": self.deviations}, "header": json.dumps(self._header())}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take up members from a `state_dict`; the weights that come with it are checked later."""
        header = json.loads(state["header"])
        members = _members_of(state["tensors"], header)
        self._restore(self._binding.source, self._binding.layer, header["readout"])
        self.deviations = members.deviations.clone().to(self.deviations.device)
        self.drawing, self.missing = members.drawing, members.missing
        self._feed = replace(self._feed, inputs=header.get("inputs"), apart=header.get("apart"))

    def train(self, mode: bool = True) -> Ensemble:
        """Set the wrapper's flag alone: the model's is the user's, and members use eval."""
        self.training = mode
        return self

    def extra_repr(self) -> str:
        """Sizes and kind."""
        n, targets, features = self.deviations.shape
        missing = f", missing={self.missing:.2g}" if self.missing else ""
        return f"members={n}, targets={targets}, features={features}, {self.drawing}{missing}"

    def __len__(self) -> int:
        return len(self.deviations)

    def __getstate__(self) -> dict[str, Any]:
        # A tap shares the model's memory, which a copy would not: it is built again.
        binding = self._binding
        kept = (binding.source, binding.layer, binding.header())
        return {**self.__dict__, "_binding": kept, "_tap": None, "_graph": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._restore(*state["_binding"])

    def _restore(
        self, source: Source, layer: str | list[str] | None, readout: dict[str, Any]
    ) -> None:
        self._binding = Binding(self.model, source, layer)
        self._binding.restore(readout)
        self._tap = self._graph = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Ensemble:
        exact = self.deviations
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.deviations = exact.to(self.deviations.device)
        self._tap = self._graph = None
        if not self.deviations.is_meta:
            with contextlib.suppress(ValueError):  # a cast that lost digits: the next call says so
                self._current()
        return self

    def _reading(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Reading:
        if not torch.compiler.is_compiling():
            return self._eager(inputs, keywords)
        if self._graph is not None and self._tap is not None and self._tap.case == "plain":
            return self._graph(inputs, keywords)
        if exporting():
            raise ValueError(_refusal(self._tap))
        # Only a plain readout is one graph: any other is read between two graphs.
        between = torch.compiler.disable(self._eager)  # type: ignore[no-untyped-call]
        reading: Reading = between(inputs, keywords)
        return reading

    def _eager(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Reading:
        return self._current()(*inputs, **keywords)

    def _current(self) -> AnyTap:
        tap = self._binding.current()
        if tap is not self._tap:
            self._tap, self._graph = tap, _graph(self.model, tap)
        return tap

    def _header(self) -> dict[str, Any]:
        return {
            "library": __version__,
            "kind": _KIND,
            "readout": self._binding.header(),
            "drawing": self.drawing,
            "missing": self.missing,
            "inputs": self._feed.inputs,
            "apart": self._feed.apart,
        }


def outputs(reading: Reading, deviations: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    r"""Members' outputs $y + f \cdot \delta_n$, (n, *output.shape).

    Args:
        reading: one pass of the model.
        deviations: (n, K, D).
        dtype: of the product and the result; by default the features' and the output's.
    """
    output, features = reading.output, reading.features
    if dtype is not None:
        output, features = output.to(dtype), features.to(dtype)
    _, targets, width = deviations.shape
    inner, axis = reading.inner, reading.axis
    if inner[axis] != targets or features.shape[-1] != width:
        raise ValueError(
            f"The model gives {inner[axis]} targets with {features.shape[-1]} features here, and "
            f"the ensemble has {targets} with {width}. Use the same forward= and output= as in "
            "the fit."
        )
    change = JointPosterior.response(features, deviations)  # (n, M, K)
    others = [size for i, size in enumerate(inner) if i != axis % len(inner)]
    change = change.mT.reshape(len(deviations), targets, *others).movedim(1, axis)
    if inner != output.shape:
        change = change.reshape(len(deviations), *output.shape)
    return output + change.to(output.dtype)


def _graph(model: nn.Module, tap: AnyTap) -> TracedReadout | None:
    return TracedReadout(model, tap) if isinstance(tap, Tap) and tap.case == "plain" else None


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


def _joined(parts: list[Tensor]) -> Tensor:
    """(n, N, ...) from the outputs of consecutive batches."""
    if not parts:
        raise ValueError("There is nothing to propagate: no batches were given.")
    shapes = sorted({tuple(part.shape[2:]) for part in parts})
    if len(shapes) > 1:
        raise ValueError(
            f"The batches' outputs have different shapes per sample, {shapes}, and cannot be "
            "joined. Propagate batch by batch, or give all of x as one batch."
        )
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _members_of(tensors: dict[str, Tensor], header: dict[str, Any]) -> Members:
    """Members of a file or a state dict."""
    if header.get("kind") != _KIND:
        raise ValueError(
            "The file holds no ensemble. Expected one written by Ensemble.save; a fit is read by "
            "LastLayerRigidity.load."
        )
    try:
        return Members(tensors["deviations"], header["drawing"], float(header["missing"]))
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"The ensemble's file is damaged ({error}). Save it again.") from error
