"""Refusing NaN and infinity in a fit, by batch and row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..data.batches import Batch
from ..data.finiteness import listed, spoilt
from ..statistics.block import BatchRange, Block, DerivativeRows

__all__ = ["FinitenessWatch"]

_LOOK_EVERY = 8
"""Blocks, or pieces of derivatives, after which an accelerator is asked if all was finite."""


class FinitenessWatch:
    """Refuses NaN and infinity in features, targets and predictions, and names batch and rows.

    On a CPU every block is checked at once. An accelerator is asked only after some blocks and at
    the end, because the answer has to wait for all of its computations. Then only the first of the
    rows is known.
    """

    def __init__(self) -> None:
        self._samples_before = 0  # in earlier blocks, on a CPU
        # Answers that have not been read from an accelerator yet: the batches of a block, and three
        # numbers as `_first_wrong_samples` gives them.
        self._unread: list[tuple[BatchRange, Tensor]] = []

    def update(self, block: Block) -> None:
        """Check the rows of a block, now or later."""
        if block.reading.bare_features.device.type == "cpu":
            self.look()
            if not math.isfinite(_total(block)):
                samples = _first_wrong_samples(block).tolist()
                _refuse_wrong(block.batches, samples, block, self._samples_before)
            self._samples_before += block.samples
            return
        self._unread.append((block.batches, _first_wrong_samples(block)))
        if len(self._unread) >= _LOOK_EVERY:
            self.look()

    def noted(
        self, batches: BatchRange, derivatives: Iterable[DerivativeRows]
    ) -> Iterator[DerivativeRows]:
        """The same rows of derivatives, each noted on its way, to be checked in `look`."""
        for rows in derivatives:
            features, _, residuals = rows
            wrong = _first_wrong(_row_sums(features))
            if residuals is not None:
                wrong = torch.maximum(wrong, _first_wrong(_row_sums(residuals)))
            absent = torch.full_like(wrong, -1)  # features and outputs are checked elsewhere
            self._unread.append((batches, torch.stack([absent, absent, wrong])))
            yield rows

    def look(self) -> None:
        """Read the answers for the latest blocks, and raise if anything was not finite."""
        unread = self._unread
        self._unread = []
        if not unread:
            return
        answers = torch.stack([samples for _, samples in unread]).tolist()  # one wait for all
        for (batches, _), samples in zip(unread, answers, strict=True):
            _refuse_wrong(batches, samples)


def _refuse_wrong(
    batches: BatchRange,
    samples: list[int],
    block: Block | None = None,
    samples_before: int | None = None,
) -> None:
    """Raise where there is a sample that is not finite.

    Args:
        batches: The batches of the block.
        samples: Three numbers, as `_first_wrong_samples` gives them.
        block: The block, where it is still in memory: it tells all rows, and which columns are to
            blame.
        samples_before: How many samples came before the block; None if that is not known.
    """
    feature, residual, derivative = samples
    if feature < 0 and residual < 0 and derivative < 0:
        return
    if feature >= 0 and (residual < 0 or feature <= residual):
        number = batches.number(feature)
        culprit = "features"
        columns = [] if block is None else _spoilt_columns(block, batches.samples(number))
        if columns:
            culprit = f"features, from {', '.join(columns)} of the inputs,"
        culprit += " in " + _rows_named(batches, feature, block, samples_before)
    elif residual >= 0:
        number = batches.number(residual)
        culprit = "targets or predictions"
        culprit += " in " + _rows_named(batches, residual, block, samples_before)
    else:
        number = batches.first  # rows of derivatives do not wait with other batches
        culprit = "derivatives with respect to the inputs, or in their targets"
    raise ValueError(
        f"Batch {number}: NaN or infinity in the {culprit}. Clean the data, or check that the "
        "model has not diverged."
    )


def _rows_named(
    batches: BatchRange, first_wrong: int, block: Block | None, samples_before: int | None
) -> str:
    """The rows of a batch that are not finite, counted from 0, for the message.

    Args:
        batches: The batches of the block.
        first_wrong: The first sample of the block that is not finite; the batch is its batch.
        block: The block; None if only the first wrong sample is known.
        samples_before: How many samples came before the block; None if that is not known.
    """
    samples = batches.samples(batches.number(first_wrong))
    size = samples.stop - samples.start
    if block is None:
        return f"row {first_wrong - samples.start} of {size}, and perhaps in others"
    wrong_samples = _wrong_samples(block)
    rows = [row for row in range(size) if samples.start + row in wrong_samples]
    named = f"{len(rows)} of {size} rows ({listed(rows)}"
    before_batch = None if samples_before is None else samples_before + samples.start
    if before_batch:
        over_all = listed([before_batch + row for row in rows])
        named += f"; counted over all batches: {over_all}"
    return f"{named})"


def _total(block: Block) -> float:
    """A sum that is not finite if any number is not; very large numbers may overflow it too."""
    return float(block.reading.bare_features.sum() + _judged_outputs(block).sum())


def _judged_outputs(block: Block) -> Tensor:
    """Residuals of rows that count, (M, K); without targets the predictions."""
    if block.counted_residual is None:
        return block.reading.output_layout.rows(block.reading.output)
    return block.counted_residual


def _first_wrong_samples(block: Block) -> Tensor:
    """The first samples whose features, and whose target or prediction, are not finite.

    Three numbers on the block's device, -1 where there is none. The third is for derivatives.
    """
    rows_per_sample = max(1, block.rows // block.samples)
    sums = torch.stack([_row_sums(block.reading.bare_features), _row_sums(_judged_outputs(block))])
    rows = torch.div(_first_wrong(sums), rows_per_sample, rounding_mode="floor")
    return torch.nn.functional.pad(rows.clamp(max=block.samples - 1), (0, 1), value=-1)


def _wrong_samples(block: Block) -> set[int]:
    """All samples whose features, or whose target or prediction, are not finite."""
    rows_per_sample = max(1, block.rows // block.samples)
    sums = _row_sums(block.reading.bare_features) + _row_sums(_judged_outputs(block))
    samples = (~sums.isfinite()).nonzero().flatten() // rows_per_sample
    return set(samples.clamp(max=block.samples - 1).tolist())


def _row_sums(rows: Tensor) -> Tensor:
    """For each row (n, ...) a number that is finite only if all its numbers are, (n,)."""
    # A sum in float64 reads them once. Numbers beyond 1e300 may overflow it, but so would their
    # squares in the Gram.
    return rows.flatten(1).sum(1, dtype=torch.float64)


def _first_wrong(sums: Tensor) -> Tensor:
    """The places of the first sums (..., n) that are not finite, (...); -1 where all are."""
    wrong = ~sums.isfinite()
    return torch.where(wrong.any(-1), wrong.to(torch.uint8).argmax(-1), -1)


def _spoilt_columns(block: Block, samples: slice) -> list[str]:
    """Names of the inputs' columns that hold NaN or infinity in some samples, where known."""
    inputs = tuple(tensor[samples] for tensor in block.inputs)
    batch = Batch(inputs, {}, None, None, columns=block.columns)
    return sorted(spoilt(batch, None) - {""})
