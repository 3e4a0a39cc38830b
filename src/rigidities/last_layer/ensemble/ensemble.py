r"""An ensemble of readouts: many plausible models for the cost of one.

Member $n$ predicts $y(x) + f(x) \cdot \delta_n$ with the features $f = \partial y / \partial w$
and the deviations $\delta_n$ of `members`. Whatever the number of members, this takes one pass of
the model and one matrix product. Where the output is linear in the readout's weights this is the
model with the weights $w + \delta_n$. Members keep the correlations between predictions, so any
function of any number of outputs gets an error bar.

An `Ensemble` is the module that users call. `member_outputs` is the computation itself, which
frozen modules use too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...data.batches import Batch, BatchFormat, Feed
from ...data.storage import Snapshot
from ...models.calling import FeatureFunction, ForwardFunction, Source
from ...models.modes import unmixed
from ...models.shadow import placement
from ...notices import notify
from ...posterior.joint import JointPosterior, RowDeviation
from ...readout.reading import Reading, joined_outputs
from ..binding import Binding, UsersModel
from ..wrapper import ModelWrapper
from .member_values import MemberValues, evaluated
from .members import Members, row_points
from .readout_pass import ReadoutPass

__all__ = ["Ensemble"]

NOT_IN_ONNX = (
    "This ONNX graph leaves out the part of the spread that predictions do not share (that part "
    "needs a hash of the inputs). Sums keep their spread, but single predictions look more "
    "certain than they are. torch.export keeps this part."
)


class Ensemble(ModelWrapper):
    """Members of a last-layer ensemble: `ens(x)` -> (members, *output.shape).

    Members are differentiable with respect to the inputs if the readout is a plain layer. The model
    is part of this module, as in any wrapper (`to` moves it), but neither its mode nor its
    gradients are changed. Weights that changed since the fit are refused; a compiled or exported
    graph does not check this. An exporter sees the inputs as one tuple, so a graph for any number
    of rows n of one input is

        torch.export.export(ens, (x,), dynamic_shapes=(({0: torch.export.Dim("n")},),))

    Args:
        binding: Ties the ensemble to the model, with its readout.
        feed: How data reach the model.
        members: The deviations.

    Attributes:
        model: The trained model.
        deviations: (members, targets, features), float64 whatever the module is cast to.
        own: The part of each prediction's deviation that no other prediction shares (see
            `members`); an ONNX graph leaves it out.
    """

    _kind = "ensemble"
    deviations: Tensor
    own_factor: Tensor | None
    own_mixing: Tensor | None

    def __init__(self, binding: Binding, feed: Feed, members: Members) -> None:
        super().__init__(binding.user_model.model)
        self._register(members)
        self._feed = feed
        self._pass = ReadoutPass(binding)
        self.training = False  # members are always those of eval mode
        self._pass.current()

    def forward(self, *inputs: Any, **keywords: Any) -> Tensor:
        """Outputs of all members, in the model's precision.

        A spread below the rounding of the outputs is lost. `propagate` keeps it.
        """
        batch = self._feed.handed(inputs, keywords)
        reading = self._pass(batch.args, batch.kwargs)
        # `len` would make the number of rows a constant of an exported graph.
        batch.check(reading.output.shape[0])
        return self._outputs(reading, batch)

    def propagate(self, fn: Callable[[Tensor], Any], x: Any) -> MemberValues:
        """Mean and standard deviation of any function of the outputs, with one call per member.

        For a linear function the mean is exact, and the covariance is unbiased; see `members`.

        Args:
            fn: callable(output) -> tensor, array or number of any fixed shape, differentiable or
                not. The output is that of one member for all of x, batches joined, in float64:
                the model's own precision would round small spreads of large outputs away. If the
                function raises an error in float64, it gets float32, then the model's precision;
                the result contains the precision that was used.
            x: Inputs, a data set or batches; targets in them are ignored.

        Returns:
            The values of the function for all members, with their moments.

        Raises:
            TypeError: fn returned something that is not a number.
            ValueError: NaN, infinity or shapes that differ between members.
        """
        outputs = []
        model_precision = torch.float64
        with torch.enable_grad():  # for functions that differentiate
            for batch in self._feed(x, "propagate"):
                reading = self._pass.eager(batch.args, batch.kwargs).detached()
                batch.check(len(reading.output))
                model_precision = reading.output.dtype
                outputs.append(self._outputs(reading, batch, torch.float64))
        if not outputs:
            raise ValueError("There is nothing to propagate: no batches were given.")
        remedy = ". Propagate batch by batch, or pass all of x as one batch."
        return evaluated(
            fn,
            joined_outputs(outputs, remedy, dim=1),
            precisions=(
                torch.float64,
                torch.promote_types(model_precision, torch.float32),
                model_precision,
            ),
        )

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
        batch_size: int | None = None,
        progress: bool | None = None,
    ) -> Ensemble:
        """Load a file with the model that was fitted.

        Args:
            path: The path of a file that `save` wrote.
            model: The model with the same weights, on any device.
            layer: As in the fit; not needed, because the file contains it.
            features: The function of the fit, which a file cannot contain.
            forward: The function of the fit.
            target: The function of the fit.
            output: As in the fit; not needed.
            batch_size: As in `LastLayerRigidity`.
            progress: As in `LastLayerRigidity`.

        Returns:
            The ensemble that was saved.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is damaged, of another kind, or made with another model or other
                weights.
        """
        snapshot = Snapshot.read(path, holds=cls._kind)
        if output is None:
            with snapshot.opened():
                output = snapshot.header["readout"]["output"]
        user_model = UsersModel(model, Source(forward, features, output), layer)
        feed = Feed(model, BatchFormat(forward is not None, target), batch_size, progress)
        device, _ = placement(model)
        members = _members_from(snapshot, device)
        return cls(_binding_from(snapshot, user_model), _feed_from(snapshot, feed), members)

    @property
    def own(self) -> RowDeviation | None:
        """What each prediction shares with no other, if anything."""
        if self.own_factor is None or self.own_mixing is None:
            return None
        return RowDeviation(self.own_factor, self.own_mixing)

    def extra_repr(self) -> str:
        """Sizes and kind, for `repr`."""
        n, targets, features = self.deviations.shape
        return f"members={n}, targets={targets}, features={features}"

    def __len__(self) -> int:
        return len(self.deviations)

    def __getstate__(self) -> dict[str, Any]:
        # A pass holds copies of the model, which are built again from the binding.
        return {**self.__dict__, "_pass": self._pass.binding}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._pass = ReadoutPass(state["_pass"])

    def _moved(self) -> None:
        """Rebuild the pass after a move or a cast of the model."""
        self._pass.forget()
        if not self.deviations.is_meta:
            # A cast that lost digits is refused by the next call, with its reason.
            with contextlib.suppress(ValueError):
                self._pass.current()

    def _take(self, snapshot: Snapshot | None) -> None:
        """Replace the members by those of a state dict."""
        if snapshot is None:
            raise ValueError("The state dict is that of an unfitted object, which has no members.")
        # All is read before anything changes: an error leaves the ensemble as it was.
        members = _members_from(snapshot, self.deviations.device)
        binding = _binding_from(snapshot, self._pass.binding.user_model)
        self._feed = _feed_from(snapshot, self._feed)
        self._pass = ReadoutPass(binding)
        self._register(members)

    def _register(self, members: Members) -> None:
        """Hold copies of the members' tensors as buffers."""
        deviation = members.row_deviation
        tensors = {
            "deviations": members.deviations,
            "own_factor": None if deviation is None else deviation.factor,
            "own_mixing": None if deviation is None else deviation.mixing,
        }
        for name, tensor in tensors.items():
            if tensor is not None:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            self.register_buffer(name, tensor, persistent=False)

    def _outputs(self, reading: Reading, batch: Batch, dtype: torch.dtype | None = None) -> Tensor:
        """Outputs of all members for what one pass gave."""
        return member_outputs(reading, batch, self.deviations, self.own, dtype)

    def _snapshot(
        self, *, thorough: bool = False, probes: bool = True, rows: bool = False
    ) -> Snapshot:
        """Members, feed and binding, for a file or a state dict."""
        if rows:
            raise ValueError("An ensemble contains no training rows. Save it without rows=True.")
        binding = self._pass.binding
        if thorough:
            binding.current(thorough=True)
        binding_snapshot = binding.snapshot(probes=probes)
        tensors = {"members.deviations": self.deviations}
        if self.own is not None:
            tensors["own.factor"] = self.own.factor
            tensors["own.mixing"] = self.own.mixing
        header = {
            "kind": self._kind,
            "inputs": self._feed.format.inputs,
            "derivative_target_key": self._feed.format.derivative_target_key,
            "batch": self._feed.format.kind,
        }
        return Snapshot(tensors | binding_snapshot.tensors, header | binding_snapshot.header)


def member_outputs(
    reading: Reading,
    batch: Batch,
    deviations: Tensor,
    row_deviation: RowDeviation | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Members' outputs $y + f \cdot \delta_n$, and what each row shares with no other.

    Args:
        reading: Output and features of the model.
        batch: The model's inputs, by which rows are known again.
        deviations: The members' deviations (n, K, D).
        row_deviation: What rows do not share, if anything.
        dtype: The precision of product and result; None for the features' and the output's.

    Returns:
        (n, *output.shape).

    Raises:
        ValueError: The model gives other targets or features than the members are for.
    """
    output = reading.output
    features = reading.features
    if dtype is not None:
        output = output.to(dtype)
        features = features.to(dtype)
    model_targets = reading.output_layout.targets
    _, targets, width = deviations.shape
    if model_targets != targets or features.shape[-1] != width:
        raise ValueError(
            f"The model gives {model_targets} targets with {features.shape[-1]} features here, "
            f"but the ensemble has {targets} with {width}. Use the same forward= and output= as "
            "in the fit."
        )
    with unmixed(features):
        change = JointPosterior.response(features, deviations)  # (n, M, K)
    shared = output + reading.output_layout.unrows(change).to(output.dtype)
    if row_deviation is None:
        return shared
    if torch.onnx.is_in_onnx_export():
        notify(NOT_IN_ONNX)
        return shared
    hashes = reading.input_hashes(batch)
    z = row_points(deviations, hashes, row_deviation.mixing.shape[1])
    change = row_deviation.moved(row_deviation.roots(reading.features), z)
    return shared + reading.output_layout.unrows(change).to(shared.dtype)


def _members_from(snapshot: Snapshot, device: torch.device) -> Members:
    """The members in a file or a state dict."""
    tensors = snapshot.tensors
    with snapshot.opened():
        row_deviation = None
        if "own.factor" in tensors:
            row_deviation = RowDeviation(
                factor=tensors["own.factor"].to(device),
                mixing=tensors["own.mixing"].to(device),
            )
        return Members(tensors["members.deviations"].to(device), row_deviation)


def _binding_from(snapshot: Snapshot, user_model: UsersModel) -> Binding:
    """The tie to a model, as a file or a state dict describes it."""
    with snapshot.opened():
        return Binding.from_snapshot(user_model, snapshot)


def _feed_from(snapshot: Snapshot, feed: Feed) -> Feed:
    """A feed with the kind of batches that a file or a state dict was made with."""
    header = snapshot.header
    with snapshot.opened():
        batch_format = replace(
            feed.format,
            inputs=header["inputs"],
            derivative_target_key=header["derivative_target_key"],
            kind=header["batch"],
        )
    return replace(feed, format=batch_format)
