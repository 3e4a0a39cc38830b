r"""The outputs of many batches as one tensor, and how the weights move all of them at once.

With $\xi$ the standard coordinates of the weights (see `joint`) and $y$ all outputs together

$$ y(\xi) = y + T \xi, \qquad T = \partial y / \partial \xi, \qquad \mathrm{Cov}(y) = T T^\top. $$

T has a row per output and a column per coordinate. It is never built: `JointOutputs.pull` gives
$J T$ for derivatives J of few quantities by the outputs, `JointOutputs.push` gives $T \xi$ for few
coordinates, both batch by batch from the features.

Where each row of outputs has a deviation that it shares with no other (see `joint`), each distinct
row has further coordinates. `DistinctRows` tells which rows are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...data.batches import Batch
from ...posterior.joint import JointPosterior, RowDeviation
from ...readout.reading import Reading, joined_outputs
from ...readout.readout import AnyReadout

MEMORY_BYTES = 1 << 30
"""Bytes of features to keep in memory.

Features beyond this are computed again where the data can be read again.
"""

Batches = Callable[[], Iterator[Batch]]
"""Begins to read the data."""


def repeatable(data: Any) -> bool:
    """Whether a user's data can be read a second time: anything but an iterator can."""
    return not isinstance(data, Iterator)


class DistinctRows(NamedTuple):
    """The M rows of outputs, and the coordinates that each distinct row has for itself.

    Attributes:
        deviation: The posterior of the deviations that rows do not share.
        hashes: A hash of each row, (M,); rows of equal hash are the same row.
        roots: Roots of the rows' quadratic forms, (M, ...); see `RowDeviation.roots`.
        numbers: The number of each row among the distinct ones, (M,).
        shape: Number of distinct rows, and of coordinates of each.
    """

    deviation: RowDeviation
    hashes: Tensor
    roots: Tensor
    numbers: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, deviation: RowDeviation, hashes: list[Tensor], roots: list[Tensor]) -> DistinctRows:
        """From the hashes and roots of all batches."""
        all_hashes = torch.cat(hashes)
        distinct, numbers = torch.unique(all_hashes, return_inverse=True)
        return cls(
            deviation=deviation,
            hashes=all_hashes,
            roots=torch.cat(roots),
            numbers=numbers,
            shape=(len(distinct), deviation.mixing.shape[1]),
        )

    def pull(self, slopes: Tensor) -> Tensor:
        """Derivatives (Q, M, K) by the outputs -> (Q, coordinates) by those of distinct rows."""
        mixing = self.deviation.mixing
        by_row = self.deviation.stretched(self.roots, slopes.to(mixing) @ mixing)
        zeros = by_row.new_zeros(len(by_row), *self.shape)
        return zeros.index_add_(1, self.numbers, by_row).flatten(1)

    def push(self, coordinates: Tensor) -> Tensor:
        """Points (n, coordinates) -> changes (n, M, K) of the outputs."""
        z = coordinates.reshape(-1, *self.shape)[:, self.numbers]
        return self.deviation.moved(self.roots, z)


@dataclass(frozen=True)
class JointOutputs:
    """All outputs of a data set, with the features of each batch or a way to get them again.

    Attributes:
        joint: The posterior of all targets' weights.
        readout: The readout, which runs the model.
        batches: Begins to read the data.
        readings: Those of the first batches. The features of later ones were not kept.
        output: The outputs of all batches, joined along the first dimension.
        distinct: What the rows do not share, if anything.
    """

    joint: JointPosterior
    readout: AnyReadout
    batches: Batches
    readings: tuple[Reading, ...]
    output: Tensor
    distinct: DistinctRows | None = None

    @classmethod
    def read(
        cls, readout: AnyReadout, joint: JointPosterior, batches: Batches, *, again: bool = True
    ) -> JointOutputs:
        """Read the data once.

        Args:
            readout: The readout.
            joint: The posterior of all targets' weights.
            batches: Begins to read the data.
            again: Whether `batches` may be called a second time; else all features are kept.

        Raises:
            ValueError: There are no outputs, or the batches' outputs cannot be joined.
        """
        outputs = []
        readings = []
        hashes = []
        roots = []
        feature_bytes = 0
        for batch in batches():
            reading = readout(batch).detached()
            reading.output_layout.check_targets(joint.targets)
            if joint.row_deviation is not None:
                hashes.append(reading.input_hashes(batch))
                roots.append(joint.row_deviation.roots(reading.features))
            outputs.append(reading.output)
            feature_bytes += reading.features.nbytes
            if feature_bytes <= MEMORY_BYTES or not again:
                readings.append(reading)
        if not sum(output.numel() for output in outputs):
            raise ValueError(
                "There is nothing to propagate: there are no batches, or they have no rows."
            )
        remedy = " into one tensor. Propagate over batches of one shape at a time."
        distinct = None
        if joint.row_deviation is not None:
            distinct = DistinctRows.of(joint.row_deviation, hashes, roots)
        return cls(
            joint=joint,
            readout=readout,
            batches=batches,
            readings=tuple(readings),
            output=joined_outputs(outputs, remedy),
            distinct=distinct,
        )

    @property
    def coordinates(self) -> int:
        """Number of independent standard coordinates: of the weights, and then of the rows."""
        if self.distinct is None:
            return self.joint.coordinates
        return self.joint.coordinates + math.prod(self.distinct.shape)

    def pull(self, cotangents: Tensor) -> Tensor:
        """J T: derivatives (Q, *output) by the outputs -> (Q, coordinates) by the coordinates."""
        shape = (len(cotangents), self.joint.coordinates)
        rows = cotangents.new_zeros(shape, dtype=torch.float64)
        slopes = []
        for samples, _, reading in self._located_readings():
            batch_slopes = torch.vmap(reading.output_layout.rows)(
                cotangents[:, samples]
            )  # (Q, M, K)
            slopes.append(batch_slopes)
            rows += self.joint.rows(batch_slopes, reading.features)
        if self.distinct is None:
            return rows
        return torch.cat([rows, self.distinct.pull(torch.cat(slopes, 1))], 1)

    def push(self, coordinates: Tensor) -> Tensor:
        """T xi: points (n, coordinates) -> changes (n, *output) of the outputs, in float64."""
        of_weights, of_rows = coordinates.tensor_split([self.joint.coordinates], dim=1)
        weights = self.joint.weights(of_weights)
        row_changes = None if self.distinct is None else self.distinct.push(of_rows)
        changes = weights.new_empty(len(weights), *self.output.shape)
        for samples, rows, reading in self._located_readings():
            # Float32 would lose the digits of features that the Gram hardly determines.
            change = self.joint.response(reading.features.to(torch.float64), weights)
            if row_changes is not None:
                change = change + row_changes[:, rows]
            changes[:, samples] = reading.output_layout.unrows(change)
        return changes

    def located_features(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Each batch's features with their place in the output.

        Yields:
            Positions (M, K) in the flattened output, features, and the rows' hashes (M,), None
            where rows share everything.
        """
        positions = torch.arange(self.output.numel(), device=self.output.device)
        positions = positions.reshape(self.output.shape)
        for samples, rows, reading in self._located_readings():
            hashes = None if self.distinct is None else self.distinct.hashes[rows]
            yield reading.output_layout.rows(positions[samples]), reading.features, hashes

    def _located_readings(self) -> Iterator[tuple[slice, slice, Reading]]:
        """Each batch with its features; those that were not kept are computed again.

        Yields:
            The batch's samples in the joined output, its rows of features among those of all
            batches, and its reading.
        """
        first_sample = 0
        first_row = 0
        for reading in chain(self.readings, self._read_again()):
            next_sample = first_sample + len(reading.output)
            next_row = first_row + len(reading.features)
            yield slice(first_sample, next_sample), slice(first_row, next_row), reading
            first_sample = next_sample
            first_row = next_row

    def _read_again(self) -> Iterator[Reading]:
        """The readings of the batches that were not kept, checked against the first pass."""
        done = sum(len(reading.output) for reading in self.readings)
        if done == len(self.output):
            return
        kept = len(self.readings)
        batches = islice(self.batches(), kept, None)
        for number in count(kept):
            batch = next(batches, None)
            reading = None if batch is None else self.readout(batch).detached()
            if reading is None or not _equal_but_for_rounding(
                reading.output, self.output[done : done + len(reading.output)]
            ):
                raise ValueError(
                    f"Batch {number} differs when the data are read a second time, which is "
                    f"necessary for more than {MEMORY_BYTES >> 20} MiB of features. Pass data "
                    "that come in the same order each time (a loader that does not shuffle), or "
                    "fewer rows at a time."
                )
            yield reading
            done += len(reading.output)
            if done == len(self.output):
                return


def _equal_but_for_rounding(output: Tensor, expected: Tensor) -> bool:
    """Whether two passes gave the same; on an accelerator their rounding may differ."""
    if output.shape != expected.shape:
        return False
    tolerance = torch.finfo(expected.dtype).eps ** 0.75 * float(expected.abs().max())
    return bool(((output - expected).abs() <= tolerance).all())
