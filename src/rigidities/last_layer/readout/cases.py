r"""How the features follow from the heads' recorded calls.

* `plain`: the output is the head's output, perhaps reshaped, or the mean of several (`MeanOf`); the
  features are the heads' inputs, side by side;
* `shared` and `separate`: scaled, gathered, masked, permuted or summed outputs, with gains that
  are the same for all targets or not (see `tail`);
* `jacobian`: any tail that treats samples independently, one pass through it per output;
* `dense`: any tail at all;
* `parameters`: heads that are any modules with parameters, one pass per output of the batch.

Layouts of the features, for M output rows and K targets: `shared` (M, D), for all targets alike;
`separate` (M, K, D), each target with features and a weight vector of its own; `joint` (M, K, P),
one weight vector behind all targets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...models.directional import pulled, units
from ...posterior.gram import with_ones
from .columns import Columns, ParameterColumns, joint_columns
from .heads import Call, Holder, Recorder, channel_axis, has_bias, weights
from .reading import Reading, Terms
from .tail import Gain, View, gains, pullback, sample_owners, target_order

LARGEST = 4 << 30
"""Bytes that a Jacobian of one batch, or the Gram matrix of its columns, may take at most."""


class Case(ABC):
    """One way from recorded calls to features.

    Attributes:
        name: by which taps and files know it.
        probes: whether it differentiates what follows the heads: see `Probed`.
        recorder: what stands in for a head.
        table: which columns belong to which.
    """

    name = ""
    layout = "joint"
    probes = False
    recorder: type[Recorder] = Recorder
    table: type[Columns] = Columns

    def __init__(self, heads: list[nn.Module]) -> None:
        self.columns = self.table(heads, joint=self.layout == "joint")

    @abstractmethod
    def read(self, output: Tensor, calls: list[Call], *, graph: bool = False) -> Reading | None:
        """Features of a pass, by a `graph` of the inputs or not; None if the tail is otherwise."""

    def response(self, features: Tensor, change: Tensor) -> Tensor:
        """Change (M, K) of the output for a change (width, K or 1) of the weights."""
        features = features[:, None] if features.ndim == 2 else features
        return torch.einsum("mkd,dk->mk", features, change)

    def _summed(
        self, parts: list[Tensor], calls: list[Call], owners: list[Tensor], count: int
    ) -> Tensor:
        """Features (count, ..., width) from the parts of calls, rows summed into their owners."""
        blocks: dict[int, Tensor] = {}
        for part, call, owner in zip(parts, calls, owners, strict=True):
            i, block = self.columns.heads.index(call.head), _gathered(part, owner, count)
            blocks[i] = blocks[i] + block if i in blocks else block
        return self.columns.assemble(blocks)


class Plain(Case):
    """The output is the mean of the heads' outputs, or one head's: no derivative is taken."""

    name = "plain"
    layout = "shared"

    def __init__(self, heads: list[nn.Module]) -> None:
        super().__init__(heads)
        # Of a single head, for which nothing but the pass itself is to be done in each batch.
        self._axis = channel_axis(heads[0])
        self._bias = has_bias(heads[0])

    def read(self, output: Tensor, calls: list[Call], *, graph: bool = False) -> Reading | None:
        """The heads' inputs, if the output is the mean of what the heads returned, to the bit."""
        heads = self.columns.heads
        if len(calls) != len(heads) or not self.columns.disjoint:
            return None
        first = calls[0].output
        for call, head in zip(calls, heads, strict=True):
            written = call.output._version != call.versions[1]
            if call.head is not head or written or call.output.shape != first.shape:
                return None
        if first.numel() != output.numel():
            return None
        mean = first
        if len(calls) > 1:
            mean = torch.stack([call.output for call in calls]).mean(0)
        same_memory = mean.data_ptr() == output.data_ptr()
        same = same_memory and mean.is_contiguous() and output.is_contiguous()
        if not same and not torch.equal(mean.flatten(), output.flatten()):  # perhaps reshaped
            return None
        if len(calls) == 1 and self._bias:
            return Reading(output, calls[0].inputs, first.shape, self._axis, ones=True)
        return self.gathered(output, calls)

    def gathered(self, output: Tensor, calls: list[Call], _: Sequence[Gain] = ()) -> Reading:
        """The heads' inputs, without a look at any value, which `torch.func` does not allow."""
        return side_by_side(output, calls, [call.inputs for call in calls])


class Probed(Case):
    """A case that differentiates what follows the heads."""

    probes = True

    def read(self, output: Tensor, calls: list[Call], *, graph: bool = False) -> Reading | None:
        """Features of a probed pass, without a graph unless one is asked for."""
        reading = self._read(output, calls, graph)
        return reading if reading is None or graph else reading.detached()

    @abstractmethod
    def _read(self, output: Tensor, calls: list[Call], graph: bool) -> Reading | None: ...


class Separate(Probed):
    """Gain and owner of each head row, with gains that differ between targets."""

    name = "separate"
    layout = "separate"
    _order: Tensor | None = None  # of an earlier batch: a mask may hide it in this one

    def gains(self, output: Tensor, calls: list[Call], *, graph: bool = False) -> list[Gain] | None:
        """Gain and owner of each call's rows, the gains with one column where all are alike."""
        for view in self._views(output, calls):
            rows = Reading(output, output, *view).rows(output)
            found = gains(rows, pullback(rows, calls, graph=graph))
            if found is None:
                continue
            if len(self.columns.heads) > 1 and len(rows) != len(output):
                owned = (gain.owner.bincount(minlength=len(rows)) for gain in found)
                if not all(bool(each.all()) for each in owned):
                    continue  # heads side by side: each output column is a target of its own
            if self.layout == "shared":
                if not all(torch.equal(g.gain, g.gain[:, :1].expand_as(g.gain)) for g in found):
                    return None
                found = [replace(gain, gain=gain.gain[:, :1]) for gain in found]
            self._order = view[2]
            return [replace(gain, view=view) for gain in found]
        return None

    def gathered(self, output: Tensor, calls: list[Call], found: Sequence[Gain]) -> Reading:
        """The reading for known gains: gain times input, summed over each output row's own."""
        inner, axis, order = found[0].view
        pairs = zip(calls, found, strict=True)
        parts = [gain.gain[..., None] * call.rows[:, None] for call, gain in pairs]
        owners = [gain.owner for gain in found]
        features = self._summed(parts, calls, owners, output.numel() // inner[axis])
        counts = self._counts(calls, found, len(features))
        if self.layout == "shared":
            features, counts = features[:, 0], None if counts is None else counts[:, 0]
        return Reading(output, features, inner, axis, order, counts)

    def _counts(self, calls: list[Call], found: Sequence[Gain], count: int) -> Tensor | None:
        r"""$\sum_{r \in m} g_{rk}$ of heads without a bias, (count, K, H); None if all have one."""
        zero = found[0].gain.new_zeros(count, found[0].gain.shape[1])
        sums = {head: zero for head in self.columns.heads if not has_bias(head)}
        for call, gain in zip(calls, found, strict=True):
            if call.head in sums:
                sums[call.head] = sums[call.head] + _gathered(gain.gain, gain.owner, count)
        return torch.stack(list(sums.values()), dim=-1) if sums else None

    def _views(self, output: Tensor, calls: list[Call]) -> Iterator[View]:
        """How to see the output as (M, K): as it is, or each sample in another order.

        Any dimension but that of the samples may be the targets', usual ones first.
        """
        head, order, size = calls[0].head, self._order, output.shape[1:].numel()
        targets = weights(head).shape[1]
        if targets == 1:
            yield torch.Size([output.numel(), 1]), -1, None
            return
        if order is None or len(order) != size:
            for axis in dict.fromkeys((channel_axis(head), -1, *range(-2, -output.ndim, -1))):
                if output.ndim >= -axis and output.shape[axis] == targets:
                    yield output.shape, axis, None
            if size % targets or len(calls) > 1:
                return  # calls side by side: each output column is a target of its own
            flat = output.flatten()
            order = target_order(flat, pullback(flat, calls), size)
        if order is not None:
            inner = torch.Size([len(output), size // targets, targets])
            yield inner, -1, order.to(output.device)

    def _read(self, output: Tensor, calls: list[Call], graph: bool) -> Reading | None:
        found = self.gains(output, calls, graph=graph)
        return None if found is None else self.gathered(output, calls, found)


class Shared(Separate):
    """Gain and owner of each head row, the same for all targets."""

    name = "shared"
    layout = "shared"

    def terms(self, output: Tensor, calls: list[Call]) -> Terms | None:
        """The summands of the features, or None where the tail has not this form."""
        found = self.gains(output, calls)
        if found is None:
            return None
        inner, axis, _ = found[0].view
        parts = []
        for call, gain in zip(calls, found, strict=True):
            head = self.columns.heads.index(call.head)
            features = self.columns.assemble({head: gain.gain * call.rows})
            parts.append((features, gain.owner, torch.full_like(gain.owner, head)))
        features, owners, heads = (torch.cat(part) for part in zip(*parts, strict=True))
        return Terms(features.detach(), owners, heads, output.numel() // inner[axis])


class Jacobian(Probed):
    """The tail's Jacobian, sample by sample: one backward pass per output of a sample."""

    name = "jacobian"
    coupled = False

    def _read(self, output: Tensor, calls: list[Call], graph: bool) -> Reading | None:
        self._check_size(output)
        rows = output.reshape(1 if self.coupled else len(output), -1)
        pull = pullback(rows, calls, graph=graph)
        zeros = (c.output.new_zeros(len(c.rows), dtype=torch.long) for c in calls)
        owners = list(zeros) if self.coupled else sample_owners(rows, pull)
        if owners is None:
            return None
        features = []
        for k in range(rows.shape[1]):
            one = torch.zeros_like(rows)
            one[:, k] = 1
            pairs = zip(calls, pull(one), strict=True)
            blocks = [joint_columns(c.rows[:, :, None] * g[:, None, :], c.head) for c, g in pairs]
            features.append(self._summed(blocks, calls, owners, len(rows)))
        inner = torch.Size([output.numel(), 1]) if self.coupled else rows.shape
        return Reading(output, torch.stack(features, dim=1).reshape(*inner, -1), inner, -1)

    def _check_size(self, output: Tensor) -> None:
        width = self.columns.width
        size = max(output.numel() * width * output.element_size(), 8 * width**2)
        if size > LARGEST:
            raise ValueError(
                f"The derivatives of {len(output):,} x {output[0].numel():,} outputs by {width:,} "
                f"weights of the readout and their Gram matrix would take {size / 2**30:,.1f} GiB, "
                f"more than {LARGEST / 2**30:g} GiB. They are needed since what follows the "
                "readout layer mixes its outputs or selects among them, or because it is no "
                "linear layer. Let forward= return all of the layer's own output, in any order "
                "(fit lin(h), not lin(h)[:, ::2]), name a smaller layer=, pass smaller batches, or "
                "raise rigidities.last_layer.readout.cases.LARGEST."
            )


class Dense(Jacobian):
    """The whole Jacobian of the tail: one backward pass per output of the batch."""

    name = "dense"
    coupled = True


class Parameters(Jacobian):
    """The Jacobian by the heads' own parameters, whatever they compute from them."""

    name = "parameters"
    recorder = Holder
    table = ParameterColumns

    def _read(self, output: Tensor, calls: list[Call], graph: bool) -> Reading | None:
        self._check_size(output)
        inner, values = torch.Size([len(output), output[0].numel()]), output.flatten()
        chunk = max(1, min(64, (1 << 23) // max(self.columns.width, len(values))))
        features = []
        for start in range(0, len(values), chunk):  # some outputs at once
            some = units(values, start, chunk)
            parts = [[pulled(values, x, some, graph=graph) for x in call.leaves] for call in calls]
            blocks = [torch.cat([part.flatten(1) for part in head], dim=1) for head in parts]
            features.append(self.columns.assemble(dict(enumerate(blocks))))
        return Reading(output, torch.cat(features).reshape(*inner, -1), inner, -1)


CASES: dict[str, type[Case]] = {
    case.name: case for case in (Plain, Shared, Separate, Jacobian, Dense, Parameters)
}
"""By name, in the order in which they are tried; the last for heads that are no linear maps."""


def side_by_side(output: Tensor, calls: list[Call], rows: list[Tensor]) -> Reading:
    """The reading of an output that is the mean of the heads' outputs, from the heads' inputs."""
    features, ones = rows[0], len(rows) == 1 and has_bias(calls[0].head)
    if len(rows) > 1:
        pairs = zip(calls, rows, strict=True)
        each = [with_ones(part) if has_bias(call.head) else part for call, part in pairs]
        features = torch.cat(each, dim=1) / len(rows)
    bare = sum(not has_bias(call.head) for call in calls)
    counts = torch.full_like(features[:, :bare], 1 / len(rows)) if bare else None
    inner, axis = calls[0].output.shape, channel_axis(calls[0].head)
    return Reading(output, features, inner, axis, counts=counts, ones=ones)


def _gathered(part: Tensor, owner: Tensor, count: int) -> Tensor:
    if len(part) == count and torch.equal(owner, torch.arange(count, device=owner.device)):
        return part
    return part.new_zeros(count, *part.shape[1:]).index_add(0, owner, part)
