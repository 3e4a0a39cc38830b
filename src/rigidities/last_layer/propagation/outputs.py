r"""The outputs of many batches as one tensor, and how the weights move all of them at once.

With $\xi$ the standard coordinates of the weights (see `joint`) and $y$ all outputs together

$$ y(\xi) = y + T \xi, \qquad T = \partial y / \partial \xi, \qquad \mathrm{Cov}(y) = T T^\top. $$

T has a row per output and a column per coordinate. It is never built: `pull` gives $J T$ for
derivatives J of few quantities by the outputs, `push` gives $T \xi$ for few coordinates, both
batch by batch from the features. Where predictions have a part of their own, $\xi$ ends with the
coordinates of each distinct row: equal rows have the same ones, and err together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...data.batches import Batch
from ...posterior.joint import JointPosterior
from ..readout.reading import Reading, joined, read
from ..readout.tap import AnyTap

KEPT = 1 << 30
"""Bytes of features to keep; those beyond are computed again where the data can be read again."""

Batches = Callable[[], Iterator[Batch]]


def repeatable(data: Any) -> bool:
    """Whether what a user handed in can be read a second time: anything but an iterator."""
    return not isinstance(data, Iterator)


class OwnRows(NamedTuple):
    """What the rows of a batch have of their own: which they are, and the `sizes` of `OwnPart`.

    `identities` are hashes, `numbers` count the distinct rows of all batches.
    """

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
        own: one per batch, where predictions have a part of their own.
    """

    joint: JointPosterior
    tap: AnyTap
    batches: Batches
    readings: tuple[Reading, ...]
    output: Tensor
    own: tuple[OwnRows, ...] = ()

    @classmethod
    def read(
        cls,
        tap: AnyTap,
        joint: JointPosterior,
        batches: Batches,
        *,
        again: bool = True,
        exact: bool = True,
    ) -> JointOutputs:
        """One pass over the data, in a mode that records gradients (forces need it).

        `again` says whether `batches` may be called a second time; else all features are kept.
        `exact` says whether rows are known by their inputs; see `Reading.identities`.
        """
        readings, held = [], 0
        own: list[tuple[Tensor, Tensor]] = []
        for batch in batches():
            reading = read(tap, batch).detached()
            reading.check_targets(joint.targets)
            held += reading.features.nbytes
            if joint.own_part is not None:
                known = reading.identities(batch, exact=exact)
                own.append((known, joint.own_part.sizes(reading.features)))
            if again and held > KEPT:
                reading = replace(reading, features=reading.features.new_empty(0))
            readings.append(reading)
        return cls(joint, tap, batches, tuple(readings), _joined(readings), _numbered(own))

    @property
    def coordinates(self) -> int:
        """Number of independent standard coordinates: of the weights, and of the distinct rows."""
        rows, each = self._own_shape
        return self.joint.coordinates + rows * each

    def pull(self, cotangents: Tensor) -> Tensor:
        """J T: derivatives (Q, *output) by the outputs -> (Q, coordinates) by the coordinates."""
        shape = (len(cotangents), self.joint.coordinates)
        rows = cotangents.new_zeros(shape, dtype=torch.float64)
        own = rows.new_zeros(len(cotangents), *self._own_shape)
        for (part, reading), mine in zip(self._parts(), self._owned(), strict=True):
            slopes = torch.vmap(reading.rows)(cotangents[:, part])
            rows += self.joint.rows(slopes, reading.features)
            if mine is not None and self.joint.own_part is not None:
                added = self.joint.own_part.pulled(mine.sizes, slopes.to(own))
                own.index_add_(1, mine.numbers, added)
        return torch.cat([rows, own.flatten(1)], 1) if self.own else rows

    def push(self, coordinates: Tensor) -> Tensor:
        """T xi: points (n, coordinates) -> changes (n, *output) of the outputs, in float64."""
        shared, own = coordinates.tensor_split([self.joint.coordinates], dim=1)
        weights, own = self.joint.weights(shared), own.reshape(len(own), *self._own_shape)
        moved = weights.new_empty(len(weights), *self.output.shape)
        for (part, reading), mine in zip(self._parts(), self._owned(), strict=True):
            # Float32 would lose the digits of features that the Gram hardly determines.
            change = self.joint.response(reading.features.to(torch.float64), weights)
            if mine is not None and self.joint.own_part is not None:
                change += self.joint.own_part.moved(mine.sizes, own[:, mine.numbers])
            moved[:, part] = reading.unrows(change)
        return moved

    def located(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Each batch's positions (M, K) in the flattened output, features and identities."""
        per_sample = self.output[0].numel()
        for (part, reading), mine in zip(self._parts(), self._owned(), strict=True):
            where = torch.arange(
                part.start * per_sample, part.stop * per_sample, device=self.output.device
            )
            positions = reading.rows(where.reshape(reading.output.shape))
            yield positions, reading.features, None if mine is None else mine.identities

    @property
    def _own_shape(self) -> tuple[int, int]:
        """Distinct rows, and the coordinates of each."""
        if not self.own or self.joint.own_part is None:
            return 0, 0
        rows = 1 + max(int(mine.numbers.max()) for mine in self.own if len(mine.numbers))
        return rows, self.joint.own_part.coordinates(self.own[0].sizes)

    def _owned(self) -> Iterator[OwnRows | None]:
        """For each batch, what its rows have of their own."""
        return iter(self.own or (None,) * len(self.readings))

    def _parts(self) -> Iterator[tuple[slice, Reading]]:
        """Each batch's rows of the output, and its reading with features."""
        start, fresh = 0, None
        for reading in self.readings:
            stop = start + len(reading.output)
            if fresh is None and not reading.features.numel():
                fresh = self._read_again()
            whole = reading if fresh is None else next(fresh)
            yield slice(start, stop), whole
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


def _numbered(own: list[tuple[Tensor, Tensor]]) -> tuple[OwnRows, ...]:
    """The batches' rows with the numbers of the distinct ones."""
    if not own:
        return ()
    known, sizes = zip(*own, strict=True)
    _, numbers = torch.unique(torch.cat(known), return_inverse=True)
    return tuple(map(OwnRows, known, sizes, numbers.split([len(each) for each in known])))


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
