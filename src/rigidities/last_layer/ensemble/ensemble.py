r"""An ensemble of readouts: many plausible models for the cost of one.

Member $n$ predicts $y(x) + f(x) \cdot \delta_n$ with the features $f = \partial y / \partial w$
and the deviations $\delta_n$ of `members`: one pass of the model and one matrix product whatever
the number of members. Where the output is linear in the readout's weights this is the model with
the weights $w + \delta_n$. Members keep the correlations between predictions, so that any function
of any number of outputs gets its error bar.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...data.batches import Batch, BatchFormat
from ...data.feed import Feed
from ...data.storage import Snapshot
from ...models.calling import FeatureFunction, ForwardFunction, Source
from ...models.modes import unmixed
from ...models.shadow import placement
from ...notices import notify
from ...posterior.joint import JointPosterior, OwnPart
from ..readout.binding import Binding
from ..readout.graph import ReadoutPass
from ..readout.reading import Reading, joined
from ..wrapper import ModelWrapper
from .member_values import MemberValues, evaluated
from .members import Drawing, Members, own_points

_HELD = ("deviations", "own_factor", "own_mixing")
NOT_IN_ONNX = (
    "This ONNX graph leaves out what single predictions do not share (it takes a hash of inputs): "
    "sums keep their spread, single ones look surer. torch.export keeps it."
)


class Ensemble(ModelWrapper):
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
        own: what each prediction has beside them (see `members`); an ONNX graph leaves it out.
    """

    _kind = "ensemble"
    deviations: Tensor
    own_factor: Tensor | None
    own_mixing: Tensor | None

    def __init__(self, binding: Binding, feed: Feed, members: Members) -> None:
        super().__init__(binding.model)
        self._hold(members)
        self._feed, self._pass = feed, ReadoutPass(binding)
        self.training = False  # members are always those of eval mode
        self._pass.current()

    def forward(self, *inputs: Any, **keywords: Any) -> Tensor:
        """Outputs of all members, in the model's precision.

        A spread below the rounding of the outputs is lost in it: `propagate` keeps that.
        """
        batch = self._feed.handed(inputs, keywords)
        reading = self._pass(batch.args, batch.kwargs)
        batch.check(reading.output.shape[0])  # len would fix it in a graph
        return self._outputs(reading, batch)

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
                reading = self._pass.eager(batch.args, batch.kwargs).detached()
                batch.check(len(reading.output))
                own = reading.output.dtype
                parts.append(self._outputs(reading, batch, torch.float64))
        precisions = (torch.float64, torch.promote_types(own, torch.float32), own)
        if not parts:
            raise ValueError("There is nothing to propagate: no batches were given.")
        remedy = ". Propagate batch by batch, or give all of x as one batch."
        whole = joined(parts, remedy, dim=1)
        return evaluated(fn, whole, self.drawing, missing=self.missing, precisions=precisions)

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
        given = Snapshot.read(path, holds=cls._kind)
        chosen = given.header["readout"]["output"] if output is None else output
        binding = Binding(model, Source(forward, features, chosen), layer)
        feed = Feed(model, BatchFormat(forward is not None, target))
        return cls(*_parts_of(given, binding, feed, placement(model)[0]))

    @property
    def own(self) -> OwnPart | None:
        """What each prediction has beside the deviations, if anything."""
        factor, mixing = self.own_factor, self.own_mixing
        return None if factor is None or mixing is None else OwnPart(factor, mixing)

    def extra_repr(self) -> str:
        """Sizes and kind."""
        n, targets, features = self.deviations.shape
        missing = f", missing={self.missing:.2g}" if self.missing else ""
        return f"members={n}, targets={targets}, features={features}, {self.drawing}{missing}"

    def __len__(self) -> int:
        return len(self.deviations)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pass": self._pass.binding}  # what it made is built again

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._pass = ReadoutPass(state["_pass"])

    def _moved(self) -> None:
        self._pass.forget()
        if not self.deviations.is_meta:
            with contextlib.suppress(ValueError):  # a cast that lost digits: the next call says so
                self._pass.current()

    def _take(self, given: Snapshot | None) -> None:
        if given is None:
            raise ValueError("The state dict is one of an unfitted object, which has no members.")
        old, device = self._pass.binding, self.deviations.device
        binding, self._feed, members = _parts_of(given, old, self._feed, device)
        self._pass = ReadoutPass(binding)
        self._hold(members)

    def _hold(self, members: Members) -> None:
        tensors = (members.deviations, *(members.own or (None, None)))
        for name, tensor in zip(_HELD, tensors, strict=True):
            held = None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)
            self.register_buffer(name, held, persistent=False)
        self.drawing: Drawing = members.drawing
        self.missing = members.missing

    def _outputs(self, reading: Reading, batch: Batch, dtype: torch.dtype | None = None) -> Tensor:
        return member_outputs(reading, batch, self.deviations, self.drawing, self.own, dtype)

    def _snapshot(
        self, *, thorough: bool = False, probes: bool = True, rows: bool = False
    ) -> Snapshot:
        if rows:
            raise ValueError("An ensemble holds no training rows. Save it without rows=True.")
        if thorough:
            self._pass.binding.current(thorough=True)
        feed, tie = self._feed, self._pass.binding.snapshot(probes=probes)
        tensors = {"members.deviations": self.deviations}
        if self.own is not None:
            tensors["own.factor"] = self.own.factor
            tensors["own.mixing"] = self.own.mixing
        header = {
            "kind": self._kind,
            "drawing": self.drawing,
            "missing": self.missing,
            "inputs": feed.format.inputs,
            "apart": feed.format.apart,
            "batch": feed.format.kind,
        }
        return Snapshot(tensors | tie.tensors, header | tie.header)


def member_outputs(
    reading: Reading,
    batch: Batch,
    deviations: Tensor,
    drawing: Drawing,
    own: OwnPart | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Outputs of members of this drawing, what each row has of its own included."""
    shared = outputs(reading, deviations, dtype)
    if own is None:
        return shared
    if torch.onnx.is_in_onnx_export():
        notify(NOT_IN_ONNX)
        return shared
    z = own_points(deviations, drawing, reading.identities(batch), own.mixing.shape[1])
    change = own.moved(own.roots(reading.features), z)
    return shared + reading.unrows(change).to(shared.dtype)


def outputs(reading: Reading, deviations: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    r"""Members' outputs $y + f \cdot \delta_n$, (n, *output.shape), for deviations (n, K, D).

    Product and result are in `dtype`, by default the features' and the output's.
    """
    output, features = reading.output, reading.features
    if dtype is not None:
        output, features = output.to(dtype), features.to(dtype)
    given, (_, targets, width) = reading.inner[reading.axis], deviations.shape
    if given != targets or features.shape[-1] != width:
        raise ValueError(
            f"The model gives {given} targets with {features.shape[-1]} features here, and the "
            f"ensemble has {targets} with {width}. Use the same forward= and output= as in the fit."
        )
    with unmixed(features):
        change = JointPosterior.response(features, deviations)  # (n, M, K)
    return output + reading.unrows(change).to(output.dtype)


def _parts_of(
    given: Snapshot, binding: Binding, feed: Feed, device: torch.device
) -> tuple[Binding, Feed, Members]:
    """What a file or a state dict holds, for the model of a tie and the functions of a feed."""
    header = given.header
    deviations = given.tensors["members.deviations"].to(device)
    own = None
    if "own.factor" in given.tensors:
        factor = given.tensors["own.factor"].to(device)
        mixing = given.tensors["own.mixing"].to(device)
        own = OwnPart(factor, mixing)
    batch_format = replace(
        feed.format, inputs=header["inputs"], apart=header["apart"], kind=header["batch"]
    )
    feed = replace(feed, format=batch_format)
    with given.opened():
        members = Members(deviations, header["drawing"], header["missing"], own)
        return binding.taken(given), feed, members
