r"""The ways from the recorded calls of the heads to features.

A *case* takes a model's output and the calls of its heads in one pass, and gives a `Reading`. Which
case a model is depends on its *tail*, what follows the heads (see `tail`):

* `plain`: the output is the head's output, perhaps reshaped, or the mean of several heads'
  (`MeanOf`). The features are the heads' inputs, side by side, and no derivative is taken;
* `shared` and `separate`: the head's outputs are scaled, gathered, masked, permuted or summed, with
  gains that are the same for all targets (`shared`) or not (`separate`);
* `jacobian`: any tail that treats samples independently, one backward pass through it per output
  of a sample;
* `dense`: any tail at all, one backward pass per output of the batch;
* `parameters`: heads that are any modules with parameters, one backward pass per output of the
  batch.

The features have one of three layouts, for M output rows and K targets:

| layout | shape | meaning |
| --- | --- | --- |
| `shared` | (M, D) | the same features for all targets, each with a weight vector of its own |
| `separate` | (M, K, D) | each target has features and a weight vector of its own |
| `joint` | (M, K, P) | one weight vector behind all targets |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...data.output_layout import OutputLayout
from ...models.directional import pulled, units
from ...posterior.gram import with_ones
from .columns import Columns, ParameterColumns, joint_columns
from .heads import Call, ParameterRecorder, Recorder, channel_axis, has_bias, head_weights
from .reading import Reading, Terms
from .tail import RowGains, pullback, row_gains, sample_owners, target_order

LARGEST = 4 << 30
"""Bytes that a Jacobian of one batch, or the Gram matrix of its columns, may take at most."""


class Case(ABC):
    """One way from recorded calls to features.

    Args:
        heads: The modules that are recorded, of one thread's shadow of the model.

    Attributes:
        name: The name by which taps and files know the case.
        layout: The layout of the features; see the module.
        probes: Whether the case differentiates what follows the heads; see `Probed`.
        recorder: What stands in for a head.
        columns: Which columns of the features belong to which head.
    """

    name = ""
    layout = "joint"
    probes = False
    recorder: type[Recorder] = Recorder
    _columns_class: type[Columns] = Columns

    def __init__(self, heads: list[nn.Module]) -> None:
        self.columns = self._columns_class(heads, joint=self.layout == "joint")

    @abstractmethod
    def read(self, output: Tensor, calls: list[Call], *, graph: bool = False) -> Reading | None:
        """Features of one pass.

        Args:
            output: The model's output.
            calls: The calls of the heads in that pass.
            graph: Whether output and features are to be differentiable by the model's inputs.

        Returns:
            The reading, or None if the tail is not of this case.
        """

    def response(self, features: Tensor, change: Tensor) -> Tensor:
        """Change (M, K) of the output for a change (width, K or 1) of the weights."""
        if features.ndim == 2:
            features = features[:, None]
        return torch.einsum("mkd,dk->mk", features, change)

    def _summed_by_owner(
        self, blocks: list[Tensor], calls: list[Call], owners: list[Tensor], count: int
    ) -> Tensor:
        """Features (count, ..., width): each call's rows, summed over the rows of each owner.

        Args:
            blocks: For each call, its head's columns of the features of its R rows,
                (R, ..., columns).
            calls: The calls.
            owners: For each call, the output row that each of its rows belongs to, (R,).
            count: The number of output rows.
        """
        sums_by_head: dict[int, Tensor] = {}
        for block, call, owner in zip(blocks, calls, owners, strict=True):
            i = self.columns.heads.index(call.head)
            sums = _sums_by_owner(block, owner, count)
            sums_by_head[i] = sums_by_head[i] + sums if i in sums_by_head else sums
        return self.columns.assemble(sums_by_head)


class Plain(Case):
    """The output is the mean of the heads' outputs, or one head's: no derivative is taken."""

    name = "plain"
    layout = "shared"

    def __init__(self, heads: list[nn.Module]) -> None:
        super().__init__(heads)
        # Looked up once: with a single head, a batch should cost nothing but the pass itself.
        self._axis = channel_axis(heads[0])
        self._has_bias = has_bias(heads[0])

    def read(self, output: Tensor, calls: list[Call], *, graph: bool = False) -> Reading | None:
        """The heads' inputs, if the output is the mean of what the heads returned, to the bit.

        Each head must have been called once, in order, and what it returned must not have been
        written to since.
        """
        # All in one function, without further Python calls: it runs for every batch.
        heads = self.columns.heads
        if len(calls) != len(heads) or not self.columns.disjoint:
            return None
        first_output = calls[0].output
        for call, head in zip(calls, heads, strict=True):
            written = call.output._version != call.versions[1]
            if call.head is not head or written or call.output.shape != first_output.shape:
                return None
        if first_output.numel() != output.numel():
            return None
        mean = first_output
        if len(calls) > 1:
            mean = torch.stack([call.output for call in calls]).mean(0)
        # The same memory needs no comparison of values, which may have been reshaped.
        same_memory = mean.data_ptr() == output.data_ptr()
        same = same_memory and mean.is_contiguous() and output.is_contiguous()
        if not same and not torch.equal(mean.flatten(), output.flatten()):
            return None
        if len(calls) == 1 and self._has_bias:
            layout = OutputLayout(output.shape, first_output.shape, self._axis)
            return Reading(output, calls[0].inputs, layout, ones=True)
        return self.reading(output, calls)

    def reading(
        self, output: Tensor, calls: list[Call], gains_by_call: Sequence[RowGains] = ()
    ) -> Reading:
        """The heads' inputs, without a look at any value, which `torch.func` does not allow.

        `gains_by_call` is there for `Separate.reading`; a plain case has no gains.
        """
        return side_by_side(output, calls, [call.inputs for call in calls])


class Probed(Case):
    """A case that differentiates what follows the heads, in a pass that was probed."""

    probes = True

    def read(self, output: Tensor, calls: list[Call], *, graph: bool = False) -> Reading | None:
        """Features of a probed pass, without a graph unless one is asked for."""
        reading = self._read(output, calls, graph)
        if reading is None or graph:
            return reading
        return reading.detached()

    @abstractmethod
    def _read(self, output: Tensor, calls: list[Call], graph: bool) -> Reading | None:
        """The reading with whatever graph it has."""


class Separate(Probed):
    """Gain and owner of each head row, with gains that differ between targets."""

    name = "separate"
    layout = "separate"
    # The order of targets in an earlier batch, since a mask may hide it in this one.
    _order: Tensor | None = None

    def row_gains(
        self, output: Tensor, calls: list[Call], *, graph: bool = False
    ) -> list[RowGains] | None:
        """How each call's rows act on the output; None if the tail has no such form.

        In the layout `shared` the gains have a single column.
        """
        for layout in self._layouts(output, calls):
            rows = layout.rows(output)  # (M, K)
            gains_by_call = row_gains(rows, pullback(rows, calls, graph=graph), layout)
            if gains_by_call is None:
                continue
            if len(self.columns.heads) > 1 and not _reach_all_rows(gains_by_call, rows, output):
                continue  # heads side by side: each output column is a target of its own
            if self.layout == "shared":
                if not all(_targets_are_alike(gains) for gains in gains_by_call):
                    return None
                gains_by_call = [
                    replace(gains, gains=gains.gains[:, :1]) for gains in gains_by_call
                ]
            self._order = layout.order
            return gains_by_call
        return None

    def reading(
        self, output: Tensor, calls: list[Call], gains_by_call: Sequence[RowGains]
    ) -> Reading:
        """The reading for known gains: gain times input, summed over the rows of each output."""
        layout = gains_by_call[0].output_layout
        blocks = []
        for call, gains in zip(calls, gains_by_call, strict=True):
            blocks.append(gains.gains[..., None] * call.rows[:, None])  # (R, K or 1, D)
        owners = [gains.owners for gains in gains_by_call]
        features = self._summed_by_owner(blocks, calls, owners, layout.row_count)
        counts = self._counts(calls, gains_by_call, len(features))
        if self.layout == "shared":
            features = features[:, 0]
            if counts is not None:
                counts = counts[:, 0]
        return Reading(output, features, layout, counts)

    def _counts(
        self, calls: list[Call], gains_by_call: Sequence[RowGains], output_rows: int
    ) -> Tensor | None:
        r"""$\sum_{r \in m} g_{rk}$ of heads without a bias, (M, K, H); None if all have one."""
        first = gains_by_call[0].gains
        zero = first.new_zeros(output_rows, first.shape[1])
        sums_by_head = {head: zero for head in self.columns.heads if not has_bias(head)}
        if not sums_by_head:
            return None
        for call, gains in zip(calls, gains_by_call, strict=True):
            if call.head in sums_by_head:
                sums = _sums_by_owner(gains.gains, gains.owners, output_rows)
                sums_by_head[call.head] = sums_by_head[call.head] + sums
        return torch.stack(list(sums_by_head.values()), dim=-1)

    def _layouts(self, output: Tensor, calls: list[Call]) -> Iterator[OutputLayout]:
        """The ways to see the output as (M, K), to be tried one after the other.

        First the output as it is, where any dimension but that of the samples may be the targets',
        usual ones first. Then with the outputs of each sample in another order.
        """
        head = calls[0].head
        targets = head_weights(head).shape[1]
        if targets == 1:
            yield OutputLayout(output.shape, torch.Size([output.numel(), 1]))
            return
        size = output.shape[1:].numel()  # outputs of a sample
        order = self._order
        if order is None or len(order) != size:
            for axis in dict.fromkeys((channel_axis(head), -1, *range(-2, -output.ndim, -1))):
                if output.ndim >= -axis and output.shape[axis] == targets:
                    yield OutputLayout(output.shape, output.shape, axis)
            if size % targets or len(calls) > 1:
                return  # calls side by side: each output column is a target of its own
            flat = output.flatten()
            order = target_order(flat, pullback(flat, calls), size)
        if order is not None:
            inner = torch.Size([len(output), size // targets, targets])
            yield OutputLayout(output.shape, inner, order=order.to(output.device))

    def _read(self, output: Tensor, calls: list[Call], graph: bool) -> Reading | None:
        gains_by_call = self.row_gains(output, calls, graph=graph)
        if gains_by_call is None:
            return None
        return self.reading(output, calls, gains_by_call)


class Shared(Separate):
    """Gain and owner of each head row, the same for all targets."""

    name = "shared"
    layout = "shared"

    def terms(self, output: Tensor, calls: list[Call]) -> Terms | None:
        """The summands of the features, or None where the tail does not have this form."""
        gains_by_call = self.row_gains(output, calls)
        if gains_by_call is None:
            return None
        features, owners, heads = [], [], []
        for call, gains in zip(calls, gains_by_call, strict=True):
            head = self.columns.heads.index(call.head)
            features.append(self.columns.assemble({head: gains.gains * call.rows}))
            owners.append(gains.owners)
            heads.append(torch.full_like(gains.owners, head))
        return Terms(
            features=torch.cat(features).detach(),
            owners=torch.cat(owners),
            heads=torch.cat(heads),
            count=gains_by_call[0].output_layout.row_count,
        )


class Jacobian(Probed):
    """The tail's Jacobian, sample by sample: one backward pass per output of a sample."""

    name = "jacobian"
    coupled = False
    """Whether samples may depend on one another, so that the batch counts as one sample."""

    def _read(self, output: Tensor, calls: list[Call], graph: bool) -> Reading | None:
        """One backward pass for output k of all samples at once; None if samples are coupled."""
        self._check_size(output)
        samples = 1 if self.coupled else len(output)
        rows = output.reshape(samples, -1)
        pull = pullback(rows, calls, graph=graph)
        owners: list[Tensor] | None
        if self.coupled:
            owners = [call.output.new_zeros(len(call.rows), dtype=torch.long) for call in calls]
        else:
            owners = sample_owners(rows, pull)
        if owners is None:
            return None
        features = []
        for k in range(rows.shape[1]):
            unit = torch.zeros_like(rows)
            unit[:, k] = 1
            blocks = []
            for call, gradient in zip(calls, pull(unit), strict=True):
                # The outer product of a row's input and its gradient, (R, D or D+1, K_head).
                products = call.rows[:, :, None] * gradient[:, None, :]
                blocks.append(joint_columns(products, call.head))
            features.append(self._summed_by_owner(blocks, calls, owners, samples))
        inner = torch.Size([output.numel(), 1]) if self.coupled else rows.shape
        layout = OutputLayout(output.shape, inner)
        return Reading(output, torch.stack(features, dim=1).reshape(*inner, -1), layout)

    def _check_size(self, output: Tensor) -> None:
        """Refuse a Jacobian, or a Gram matrix of its columns, that takes too much memory."""
        width = self.columns.width
        size = max(output.numel() * width * output.element_size(), 8 * width**2)
        if size > LARGEST:
            raise ValueError(
                f"The derivatives of {len(output):,} x {output[0].numel():,} outputs with respect "
                f"to {width:,} weights of the readout and their Gram matrix would need "
                f"{size / 2**30:,.1f} GiB, more than {LARGEST / 2**30:g} GiB. They are needed "
                "because the operations after the readout layer mix its outputs or select among "
                "them, or because it is not a linear layer. Let forward= return the layer's whole "
                "output, in any order (fit lin(h), not lin(h)[:, ::2]), name a smaller layer=, "
                "pass smaller batches, or raise rigidities.last_layer.readout.cases.LARGEST."
            )


class Dense(Jacobian):
    """The whole Jacobian of the tail: one backward pass per output of the batch."""

    name = "dense"
    coupled = True


class Parameters(Jacobian):
    """The Jacobian by the heads' own parameters, whatever they compute from them."""

    name = "parameters"
    recorder = ParameterRecorder
    _columns_class = ParameterColumns

    def _read(self, output: Tensor, calls: list[Call], graph: bool) -> Reading | None:
        """One derivative per output of the batch, by all parameters of the heads."""
        self._check_size(output)
        inner = torch.Size([len(output), output[0].numel()])
        values = output.flatten()
        # Several outputs are differentiated at once, as far as memory allows.
        chunk = max(1, min(64, (1 << 23) // max(self.columns.width, len(values))))
        features = []
        for start in range(0, len(values), chunk):
            cotangents = units(values, start, chunk)
            blocks = {}
            for head, call in enumerate(calls):
                gradients = [pulled(values, leaf, cotangents, graph=graph) for leaf in call.leaves]
                flat = [gradient.reshape(len(cotangents), -1) for gradient in gradients]
                blocks[head] = torch.cat(flat, dim=1)
            features.append(self.columns.assemble(blocks))
        layout = OutputLayout(output.shape, inner)
        return Reading(output, torch.cat(features).reshape(*inner, -1), layout)


CASES: dict[str, type[Case]] = {
    case.name: case for case in (Plain, Shared, Separate, Jacobian, Dense, Parameters)
}
"""All cases by name, in the order in which they are tried. The last is for heads that are not
linear maps."""


def side_by_side(output: Tensor, calls: list[Call], rows: list[Tensor]) -> Reading:
    """The reading of an output that is the mean of the heads' outputs.

    Args:
        output: The model's output.
        calls: One for each head.
        rows: The inputs (M, D) of each head.
    """
    count = len(rows)
    if count == 1:
        features = rows[0]
        ones = has_bias(calls[0].head)
    else:
        blocks = []
        for call, block in zip(calls, rows, strict=True):
            blocks.append(with_ones(block) if has_bias(call.head) else block)
        features = torch.cat(blocks, dim=1) / count
        ones = False
    heads_without_bias = sum(not has_bias(call.head) for call in calls)
    counts = None
    if heads_without_bias:
        counts = torch.full_like(features[:, :heads_without_bias], 1 / count)
    layout = OutputLayout(output.shape, calls[0].output.shape, channel_axis(calls[0].head))
    return Reading(output, features, layout, counts=counts, ones=ones)


def _reach_all_rows(gains_by_call: list[RowGains], rows: Tensor, output: Tensor) -> bool:
    """Whether every call acts on every output row, where samples have several of these."""
    if len(rows) == len(output):
        return True
    for gains in gains_by_call:
        rows_of_owner = gains.owners.bincount(minlength=len(rows))
        if not bool(rows_of_owner.all()):
            return False
    return True


def _targets_are_alike(gains: RowGains) -> bool:
    """Whether the gains of each row are the same for all targets."""
    return torch.equal(gains.gains, gains.gains[:, :1].expand_as(gains.gains))


def _sums_by_owner(block: Tensor, owners: Tensor, count: int) -> Tensor:
    """Rows (R, ...) summed into those of the same owner, (count, ...)."""
    if len(block) == count and torch.equal(owners, torch.arange(count, device=owners.device)):
        return block  # each row has an owner of its own
    return block.new_zeros(count, *block.shape[1:]).index_add(0, owners, block)
