r"""The outputs of many batches as one tensor, and how the weights move all of them at once.

With $\xi$ the standard coordinates of the weights (see `joint`) and $y$ all outputs together

$$ y(\xi) = y + T \xi, \qquad T = \partial y / \partial \xi, \qquad \mathrm{Cov}(y) = T T^\top. $$

T has a row per output and a column per coordinate. It is never built: `pull` gives $J T$ for
derivatives J of few quantities by the outputs, `push` gives $T \xi$ for few coordinates, both
batch by batch from the features. Where predictions have a part of their own, $\xi$ ends with the
coordinates of each distinct row: equal rows have the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...data.batches import Batch
from ...posterior.joint import JointPosterior, OwnPart
from ..readout.reading import Reading, joined, read
from ..readout.tap import AnyTap

KEPT = 1 << 30
"""Bytes of features to keep; those beyond are computed again where the data can be read again."""

Batches = Callable[[], Iterator[Batch]]


def repeatable(data: Any) -> bool:
    """Whether what a user handed in can be read a second time: anything but an iterator."""
    return not isinstance(data, Iterator)


class OwnRows(NamedTuple):
    """What a batch's rows do not share: hashes, `OwnPart.sizes`, numbers of the distinct rows."""

    part: OwnPart
    identities: Tensor
    sizes: Tensor
    numbers: Tensor


@dataclass(frozen=True)
class JointOutputs:
    """All outputs of a data set, with the features of each batch or a way to get them again.

    Attributes:
        joint: the posterior of the weights.
        tap: the readout.
        batches: callable that begins to read the data.
        readings: one per batch; without features where they were not kept.
        output: the batches' outputs joined along the first dimension.
        own: one per batch; None where all is shared.
        own_shape: how many distinct rows there are, and the coordinates of each.
    """

    joint: JointPosterior
    tap: AnyTap
    batches: Batches
    readings: tuple[Reading, ...]
    output: Tensor
    own: tuple[OwnRows | None, ...]
    own_shape: tuple[int, int]

    @classmethod
    def read(
        cls, tap: AnyTap, joint: JointPosterior, batches: Batches, *, again: bool = True
    ) -> JointOutputs:
        """One pass over the data, in a mode that records gradients (forces need it).

        `again` says whether `batches` may be called a second time; else all features are kept.
        """
        readings, held, own = [], 0, []
        for batch in batches():
            reading = read(tap, batch).detached()
            reading.check_targets(joint.targets)
            held += reading.features.nbytes
            if joint.own is not None:
                own.append((reading.identities(batch), joint.own.sizes(reading.features)))
            if again and held > KEPT:
                reading = replace(reading, features=reading.features.new_empty(0))
            readings.append(reading)
        output, parts = _joined(readings), [None] * len(readings)
        rows, shape = (parts, (0, 0)) if joint.own is None else _numbered(joint.own, own)
        return cls(joint, tap, batches, tuple(readings), output, tuple(rows), shape)

    @property
    def coordinates(self) -> int:
        """Number of independent standard coordinates, of the weights and of the rows."""
        return self.joint.coordinates + math.prod(self.own_shape)

    def pull(self, cotangents: Tensor) -> Tensor:
        """J T: derivatives (Q, *output) by the outputs -> (Q, coordinates) by the coordinates."""
        shape = (len(cotangents), self.joint.coordinates)
        rows = cotangents.new_zeros(shape, dtype=torch.float64)
        added = rows.new_zeros(len(rows), *self.own_shape)
        for part, reading, own in self._parts():
            slopes = torch.vmap(reading.rows)(cotangents[:, part])
            rows += self.joint.rows(slopes, reading.features)
            if own is not None:
                added.index_add_(1, own.numbers, own.part.rows(own.sizes, slopes.to(added)))
        return torch.cat([rows, added.flatten(1)], 1)

    def push(self, coordinates: Tensor) -> Tensor:
        """T xi: points (n, coordinates) -> changes (n, *output) of the outputs, in float64."""
        shared, single = coordinates.tensor_split([self.joint.coordinates], dim=1)
        weights, single = self.joint.weights(shared), single.reshape(len(shared), *self.own_shape)
        moved = weights.new_empty(len(weights), *self.output.shape)
        for part, reading, own in self._parts():
            # Float32 would lose the digits of features that the Gram hardly determines.
            change = self.joint.response(reading.features.to(torch.float64), weights)
            if own is not None:
                change = change + own.part.moved(own.sizes, single[:, own.numbers])
            moved[:, part] = reading.unrows(change)
        return moved

    def located(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Each batch's positions (M, K) in the flattened output, its features and row hashes."""
        per_sample = self.output[0].numel()
        for part, reading, own in self._parts():
            where = torch.arange(
                part.start * per_sample, part.stop * per_sample, device=self.output.device
            )
            rows = reading.rows(where.reshape(reading.output.shape))
            yield rows, reading.features, None if own is None else own.identities

    def _parts(self) -> Iterator[tuple[slice, Reading, OwnRows | None]]:
        """Each batch's rows of the output, its reading with features, and what is its own."""
        start, fresh = 0, None
        for reading, own in zip(self.readings, self.own, strict=True):
            stop = start + len(reading.output)
            if fresh is None and not reading.features.numel():
                fresh = self._read_again()
            whole = reading if fresh is None else next(fresh)
            yield slice(start, stop), whole, own
            start = stop

    def _read_again(self) -> Iterator[Reading]:
        """The readings from the first one without features on, checked against the first pass."""
        batches = self.batches()
        for number, first in enumerate(self.readings):
            batch = next(batches, None)
            if first.features.numel():
                continue
            again = None if batch is None else read(self.tap, batch).detached()
            if again is None or not _same(again.output, first.output):
                raise ValueError(
                    f"Batch {number} differs when the data are read a second time, which "
                    f"more than {KEPT >> 20} MiB of features need. Pass data that come in the same "
                    "order each time (a loader that does not shuffle), or fewer at a time."
                )
            yield again


def _numbered(
    part: OwnPart, own: list[tuple[Tensor, Tensor]]
) -> tuple[list[OwnRows | None], tuple[int, int]]:
    """Hashes and sizes of the batches with the numbers of the distinct rows, and their shape."""
    known, sizes = zip(*own, strict=True)
    distinct, numbers = torch.unique(torch.cat(known), return_inverse=True)
    split = numbers.split([len(each) for each in known])
    rows = [OwnRows(part, *each) for each in zip(known, sizes, split, strict=True)]
    return list(rows), (len(distinct), part.coordinates(sizes[0]))


def _joined(readings: list[Reading]) -> Tensor:
    outputs = [reading.output for reading in readings]
    if not sum(output.numel() for output in outputs):
        raise ValueError("There is nothing to propagate: no batches, or no rows in them.")
    return joined(outputs, " into one tensor. Propagate over batches of one shape at a time.")


def _same(again: Tensor, first: Tensor) -> bool:
    """Equal but for rounding, which may differ between two passes on an accelerator."""
    if again.shape != first.shape:
        return False
    tolerance = torch.finfo(first.dtype).eps ** 0.75 * float(first.abs().max())
    return bool(((again - first).abs() <= tolerance).all())
