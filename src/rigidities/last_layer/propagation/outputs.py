r"""The outputs of many batches as one tensor, and how the weights move all of them at once.

With $\xi$ the standard coordinates of the weights (see `joint`) and $y$ all outputs together

$$ y(\xi) = y + T \xi, \qquad T = \partial y / \partial \xi, \qquad \mathrm{Cov}(y) = T T^\top. $$

T has a row per output and a column per coordinate. It is never built: `pull` gives $J T$ for
derivatives J of few quantities by the outputs, `push` gives $T \xi$ for few coordinates, both
batch by batch from the features. Where predictions have a part of their own (see `joint`), each
distinct row has further coordinates: `OwnRows` knows equal ones.
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
    """What M rows have of their own: hashes, roots (see `OwnPart`), numbers of distinct rows."""

    part: OwnPart
    hashes: Tensor
    roots: Tensor
    numbers: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, part: OwnPart, batches: list[tuple[Tensor, Tensor]]) -> OwnRows:
        """From the hashes and roots of all batches."""
        hashes, roots = (torch.cat(each) for each in zip(*batches, strict=True))
        distinct, numbers = torch.unique(hashes, return_inverse=True)
        return cls(part, hashes, roots, numbers, (len(distinct), part.mixing.shape[1]))

    def pull(self, slopes: Tensor) -> Tensor:
        """Derivatives (Q, M, K) by the outputs -> (Q, coordinates) by those of distinct rows."""
        mixing = self.part.mixing
        rows = self.part.stretched(self.roots, slopes.to(mixing) @ mixing)
        return rows.new_zeros(len(rows), *self.shape).index_add_(1, self.numbers, rows).flatten(1)

    def push(self, coordinates: Tensor) -> Tensor:
        """Points (n, coordinates) -> changes (n, M, K)."""
        z = coordinates.reshape(-1, *self.shape)[:, self.numbers]
        return self.part.moved(self.roots, z)


@dataclass(frozen=True)
class JointOutputs:
    """All outputs of a data set, with the features of each batch or a way to get them again.

    Attributes:
        batches: callable that begins to read the data.
        readings: one per batch; without features where they were not kept.
        output: the batches' outputs joined along the first dimension.
        own: what the rows do not share, if anything.
    """

    joint: JointPosterior
    tap: AnyTap
    batches: Batches
    readings: tuple[Reading, ...]
    output: Tensor
    own: OwnRows | None = None

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
                own.append((reading.identities(batch), joint.own.roots(reading.features)))
            if again and held > KEPT:
                reading = replace(reading, inputs=reading.inputs.new_empty(0), ones=False)
            readings.append(reading)
        outputs = [reading.output for reading in readings]
        if not sum(output.numel() for output in outputs):
            raise ValueError("There is nothing to propagate: no batches, or no rows in them.")
        whole = joined(outputs, " into one tensor. Propagate over batches of one shape at a time.")
        rows = OwnRows.of(joint.own, own) if joint.own else None
        return cls(joint, tap, batches, tuple(readings), whole, rows)

    @property
    def coordinates(self) -> int:
        """Number of independent standard coordinates: of the weights, and then of the rows."""
        return self.joint.coordinates + (math.prod(self.own.shape) if self.own else 0)

    def pull(self, cotangents: Tensor) -> Tensor:
        """J T: derivatives (Q, *output) by the outputs -> (Q, coordinates) by the coordinates."""
        shape = (len(cotangents), self.joint.coordinates)
        rows = cotangents.new_zeros(shape, dtype=torch.float64)
        slopes = []
        for part, _, reading in self._parts():
            slopes.append(torch.vmap(reading.rows)(cotangents[:, part]))
            rows += self.joint.rows(slopes[-1], reading.features)
        if self.own is None:
            return rows
        return torch.cat([rows, self.own.pull(torch.cat(slopes, 1))], 1)

    def push(self, coordinates: Tensor) -> Tensor:
        """T xi: points (n, coordinates) -> changes (n, *output) of the outputs, in float64."""
        shared, single = coordinates.tensor_split([self.joint.coordinates], dim=1)
        weights, own = self.joint.weights(shared), self.own and self.own.push(single)
        moved = weights.new_empty(len(weights), *self.output.shape)
        for part, rows, reading in self._parts():
            # Float32 would lose the digits of features that the Gram hardly determines.
            change = self.joint.response(reading.features.to(torch.float64), weights)
            moved[:, part] = reading.unrows(change if own is None else change + own[:, rows])
        return moved

    def located(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Each batch's positions (M, K) in the flattened output, its features and row hashes."""
        places = torch.arange(self.output.numel(), device=self.output.device)
        places = places.reshape(self.output.shape)
        for part, rows, reading in self._parts():
            hashes = None if self.own is None else self.own.hashes[rows]
            yield reading.rows(places[part]), reading.features, hashes

    def _parts(self) -> Iterator[tuple[slice, slice, Reading]]:
        """Each batch's samples in the output, its rows of features, and its whole reading."""
        start, row, fresh = 0, 0, None
        for reading in self.readings:
            stop = start + len(reading.output)
            if fresh is None and not reading.features.numel():
                fresh = self._read_again()
            whole = reading if fresh is None else next(fresh)
            end = row + len(whole.features)
            yield slice(start, stop), slice(row, end), whole
            start, row = stop, end

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


def _same(again: Tensor, first: Tensor) -> bool:
    """Equal but for rounding, which may differ between two passes on an accelerator."""
    if again.shape != first.shape:
        return False
    tolerance = torch.finfo(first.dtype).eps ** 0.75 * float(first.abs().max())
    return bool(((again - first).abs() <= tolerance).all())
