r"""How the features follow from the heads' recorded calls.

* `plain`: the output is the head's output, perhaps reshaped; the features are the head's input;
* `shared` and `separate`: scaled, gathered, masked or summed outputs, with gains that are the
  same for all targets or not (see `tail`);
* `jacobian`: any tail that treats samples independently, one pass through it per output;
* `dense`: any tail at all;
* `parameters`: heads that are any modules with parameters, one pass per output of the batch.

Layouts of the features, for M output rows and K targets: `shared` (M, D), for all targets alike;
`separate` (M, K, D), each target with features and a weight vector of its own; `joint` (M, K, P),
one weight vector behind all targets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from ...models.directional import pulled, units
from .columns import Columns, ParameterColumns, joint_columns
from .heads import Call, Holder, Recorder, channel_axis, weights
from .reading import Reading, Terms
from .tail import Gain, Pull, gains, pullback, sample_owners

LARGEST = 4 << 30
"""Bytes that a Jacobian of one batch, or the Gram matrix of its columns, may take at most."""


class Case(Protocol):
    """One way from recorded calls to features."""

    name: str
    layout: str
    probes: bool
    columns: Columns
    recorder: type[Recorder]

    def read(self, output: Tensor, calls: list[Call], *, graph: bool = False) -> Reading | None:
        """Features of a pass, or None where the tail has not this form.

        Args:
            output: of the model.
            calls: of the heads.
            graph: keep output and features differentiable by the model's inputs.
        """

    def response(self, features: Tensor, change: Tensor) -> Tensor:
        """Change (M, K) of the output for a change (width, K or 1) of the weights."""


class Plain:
    """The output is the head's output: the features are its input and no derivative is taken."""

    name = "plain"
    layout = "shared"
    probes = False
    recorder = Recorder

    def __init__(self, heads: list[nn.Module]) -> None:
        self.columns = Columns(heads, joint=False)

    def read(self, output: Tensor, calls: list[Call], *, graph: bool = False) -> Reading | None:
        """The head's input, where there is one call whose output is the model's.

        Nothing is detached here: a graph is as cheap as none.
        """
        call = calls[0]
        if len(calls) > 1 or not call.passed_on(output):
            return None
        return Reading(output, call.rows, call.output.shape, channel_axis(call.head))

    def response(self, features: Tensor, change: Tensor) -> Tensor:
        """f . d."""
        return features @ change


class Separate:
    """Gain and owner of each head row, with gains that differ between targets."""

    name = "separate"
    layout = "separate"
    probes = True
    recorder = Recorder

    def __init__(self, heads: list[nn.Module]) -> None:
        self.columns = Columns(heads, joint=False)

    def read(self, output: Tensor, calls: list[Call], *, graph: bool = False) -> Reading | None:
        """Sums of gain times input over the head rows of each output row."""
        found = self.gains(output, calls, graph=graph)
        if found is None:
            return None
        reading = self.gathered(output, calls, found)
        return reading if graph else reading.detached()

    def gains(self, output: Tensor, calls: list[Call], *, graph: bool = False) -> list[Gain] | None:
        """Gain and owner of each call's rows, the gains with one column where all are alike."""
        for view in _views(output, calls[0].head):
            rows = Reading(output, output, *view).rows(output)
            found = gains(rows, pullback(rows, calls, graph=graph))
            if found is None:
                continue
            if len(self.columns.heads) > 1 and len(rows) != len(output):
                owned = (gain.owner.bincount(minlength=len(rows)) for gain in found)
                if not all(bool(each.all()) for each in owned):
                    continue  # heads side by side: each output column is a target of its own
            return self._factored([replace(gain, view=view) for gain in found])
        return None

    def gathered(self, output: Tensor, calls: list[Call], found: list[Gain]) -> Reading:
        """The reading for known gains."""
        inner, axis = found[0].view
        count = output.numel() // inner[axis]
        blocks: dict[int, Tensor] = {}
        for call, gain in zip(calls, found, strict=True):
            part = gain.gain[..., None] * call.rows[:, None]
            _add(blocks, self.columns.heads.index(call.head), _gathered(part, gain.owner, count))
        features = self.columns.assemble(self.columns.complete(blocks))
        return Reading(output, self._squeezed(features), inner, axis)

    def response(self, features: Tensor, change: Tensor) -> Tensor:
        """f_k . d_k."""
        return torch.einsum("mkd,dk->mk", features, change)

    def _factored(self, found: list[Gain]) -> list[Gain] | None:
        return found

    def _squeezed(self, features: Tensor) -> Tensor:
        return features


class Shared(Separate):
    """Gain and owner of each head row, the same for all targets."""

    name = "shared"
    layout = "shared"

    def terms(self, output: Tensor, calls: list[Call]) -> Terms | None:
        """The summands of the features, or None where the tail has not this form."""
        found = self.gains(output, calls)
        if found is None:
            return None
        inner, axis = found[0].view
        parts = []
        for call, gain in zip(calls, found, strict=True):
            head = self.columns.heads.index(call.head)
            rows = gain.gain * call.rows
            features = self.columns.assemble(self.columns.complete({head: rows}))
            parts.append((features, gain.owner, torch.full_like(gain.owner, head)))
        features, owners, heads = (torch.cat(part) for part in zip(*parts, strict=True))
        return Terms(features.detach(), owners, heads, output.numel() // inner[axis])

    def response(self, features: Tensor, change: Tensor) -> Tensor:
        """f . d."""
        return features @ change

    def _factored(self, found: list[Gain]) -> list[Gain] | None:
        if not all(torch.equal(g.gain, g.gain[:, :1].expand_as(g.gain)) for g in found):
            return None
        return [replace(gain, gain=gain.gain[:, :1]) for gain in found]

    def _squeezed(self, features: Tensor) -> Tensor:
        return features[:, 0]


class Jacobian:
    """The tail's Jacobian, sample by sample: one backward pass per output of a sample."""

    name = "jacobian"
    layout = "joint"
    probes = True
    recorder: type[Recorder] = Recorder

    def __init__(self, heads: list[nn.Module]) -> None:
        self.columns = Columns(heads, joint=True)

    def read(self, output: Tensor, calls: list[Call], *, graph: bool = False) -> Reading | None:
        """Jacobians of independent samples."""
        self._check_size(output)
        inner = torch.Size([len(output), output[0].numel()])
        rows = output.reshape(inner)
        pull = pullback(rows, calls, graph=graph)
        owners = sample_owners(rows, pull)
        if owners is None:
            return None
        reading = Reading(output, self._jacobian(rows, calls, pull, owners), inner, -1)
        return reading if graph else reading.detached()

    def response(self, features: Tensor, change: Tensor) -> Tensor:
        """f . d."""
        return (features @ change)[..., 0]

    def _check_size(self, output: Tensor) -> None:
        """Refuse what does not fit into memory before it is computed."""
        width = self.columns.width
        size = max(output.numel() * width * output.element_size(), 8 * width**2)
        if size > LARGEST:
            raise ValueError(
                f"The derivatives of {len(output):,} x {output[0].numel():,} outputs by {width:,} "
                f"weights of the readout and their Gram matrix would take {size / 2**30:,.1f} GiB, "
                f"more than {LARGEST / 2**30:g} GiB. They are needed since what follows the "
                "readout layer mixes its outputs, or because it is no linear layer. Let forward= "
                "return the layer's own output, its dimensions in any order but its outputs in "
                "one of them (undo a flip, a reshape after a transpose, a product: fit "
                "lin(h), not lin(h).reshape(...).mT), name a smaller layer=, pass smaller "
                "batches, or raise rigidities.last_layer.readout.cases.LARGEST."
            )

    def _jacobian(
        self, rows: Tensor, calls: list[Call], pull: Pull, owners: list[Tensor]
    ) -> Tensor:
        """(N, K, P)."""
        outputs = []
        for k in range(rows.shape[1]):
            one = torch.zeros_like(rows)
            one[:, k] = 1
            blocks: dict[int, Tensor] = {}
            for call, owner, gain in zip(calls, owners, pull(one), strict=True):
                part = joint_columns(call.rows[:, :, None] * gain[:, None, :], call.head)
                _add(blocks, self.columns.heads.index(call.head), _gathered(part, owner, len(rows)))
            outputs.append(self.columns.assemble(self.columns.complete(blocks)))
        return torch.stack(outputs, dim=1)


class Dense(Jacobian):
    """The whole Jacobian of the tail: one backward pass per output of the batch."""

    name = "dense"

    def read(self, output: Tensor, calls: list[Call], *, graph: bool = False) -> Reading | None:
        """Jacobian of the batch as a whole."""
        self._check_size(output)
        whole = output.reshape(1, -1)
        owners = [torch.zeros(len(c.rows), dtype=torch.long, device=output.device) for c in calls]
        features = self._jacobian(whole, calls, pullback(whole, calls, graph=graph), owners)
        inner = torch.Size([output.numel(), 1])
        reading = Reading(output, features.movedim(0, 1), inner, -1)
        return reading if graph else reading.detached()


class Parameters(Jacobian):
    """The Jacobian by the heads' own parameters, whatever they compute from them."""

    name = "parameters"
    recorder = Holder

    def __init__(self, heads: list[nn.Module]) -> None:
        self.columns = ParameterColumns(heads)

    def read(self, output: Tensor, calls: list[Call], *, graph: bool = False) -> Reading | None:
        """Jacobian of the batch as a whole, some outputs at once."""
        self._check_size(output)
        inner, values = torch.Size([len(output), output[0].numel()]), output.flatten()
        chunk = max(1, min(64, (1 << 23) // max(self.columns.width, len(values))))
        features = []
        for start in range(0, len(values), chunk):
            some = units(values, start, chunk)
            parts = [[pulled(values, x, some, graph=graph) for x in call.leaves] for call in calls]
            blocks = [torch.cat([part.flatten(1) for part in head], dim=1) for head in parts]
            features.append(self.columns.assemble(blocks))
        reading = Reading(output, torch.cat(features).reshape(*inner, -1), inner, -1)
        return reading if graph else reading.detached()


CASES: dict[str, type[Plain] | type[Separate] | type[Jacobian]] = {
    case.name: case for case in (Plain, Shared, Separate, Jacobian, Dense, Parameters)
}
"""By name, in the order in which they are tried; the last for heads that are no linear maps."""


def _views(output: Tensor, head: nn.Module) -> list[tuple[torch.Size, int]]:
    """How to see the output as (M, K) for a head of K outputs, usual ways first.

    Any dimension but that of the samples may be the targets'.
    """
    targets = weights(head).shape[1]
    if targets == 1:
        return [(torch.Size([output.numel(), 1]), -1)]
    axes = dict.fromkeys((channel_axis(head), -1, *range(-2, -output.ndim, -1)))
    fit = [axis for axis in axes if output.ndim >= -axis and output.shape[axis] == targets]
    return [(output.shape, axis) for axis in fit]


def _gathered(part: Tensor, owner: Tensor, count: int) -> Tensor:
    """Sum head rows into the output rows that own them."""
    if len(part) == count and torch.equal(owner, torch.arange(count, device=owner.device)):
        return part
    return part.new_zeros(count, *part.shape[1:]).index_add(0, owner, part)


def _add(blocks: dict[int, Tensor], key: int, block: Tensor) -> None:
    blocks[key] = blocks[key] + block if key in blocks else block
