"""The path of a batch: through the model, into a block, into the statistics.

`accumulated` is the one loop for every source of data. Each batch passes through the model once,
where the readout gives its outputs and features, and once more where the loss had derivatives by
the inputs. The batch and its pass become a `Block`, whose weights and target have been checked
(`weighed`). Small blocks wait, in memory of our own, until they fill a larger one (`joined`).
Complete blocks go to `Statistics` (the Gram and the products with the residuals, the hashes of
rows, the sample of rows) and to the `FinitenessWatch`. No rows wait anywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from ..data.batches import Batch
from ..data.finiteness import listed, spoilt
from ..data.hashes import row_tensors
from ..losses import MSE, Loss, function_name, is_least_at_target
from ..readout.reading import Reading, SampleWeight
from ..readout.readout import AnyReadout
from ..statistics.block import WIDE_INPUT, BatchRange, Block, DerivativeRows, joined
from ..statistics.statistics import Plan, Statistics
from .gradients.loss import GradientLoss
from .novelty.novelty import Novelty

_LOOK_EVERY = 8
"""Blocks, or pieces of derivatives, after which an accelerator is asked if all was finite."""


@dataclass(frozen=True)
class Weighing:
    """The weight of a row: the loss's curvature times the user's sample weight.

    Attributes:
        loss: The training loss.
        sample_weight: callable(batch) -> weights, where the training loss was weighted.
        gradients: The term of the training loss for derivatives with respect to an input, if there
            was one.
    """

    loss: Loss
    sample_weight: SampleWeight | None = None
    gradients: GradientLoss | None = None

    def __post_init__(self) -> None:
        if self.sample_weight is not None and not callable(self.sample_weight):
            raise TypeError(
                "sample_weight must be callable(batch) -> weights (N,), got "
                f"{type(self.sample_weight).__name__}. Put the weights into the batches, and pass "
                "a function that reads them: sample_weight=lambda batch: batch['weight']."
            )

    @property
    def is_plain(self) -> bool:
        """Whether every row has weight one, whatever it holds."""
        weighted = self.sample_weight is not None or getattr(self.loss, "weight", None) is not None
        return isinstance(self.loss, MSE) and not weighted

    def __call__(
        self, batch: Batch, reading: Reading, target: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The weights of a batch's rows.

        Args:
            batch: The batch, for the user's functions of it.
            reading: The batch's pass through the model.
            target: The target by rows, (M, K); None without.

        Returns:
            The weights in the Gram, and the factor in them that the user's function gave. Each is
            (M, 1) or (M, K), or None where all are one.

        Raises:
            ValueError: The loss needs a target, or has a curvature that is negative or not finite.
        """
        if target is None and self.loss.needs_target:
            raise ValueError("This loss needs targets. Pass (x, y) batches or target=.")
        user_weights = reading.sample_weights(self.sample_weight, batch)
        weights = user_weights
        # A loss may bring weights of its own, such as a mask.
        loss_weights = reading.sample_weights(getattr(self.loss, "weight", None), batch)
        if loss_weights is not None:
            weights = loss_weights if weights is None else loss_weights * weights
        if isinstance(self.loss, MSE):  # its curvature is one
            return weights, user_weights
        predictions = reading.output_layout.rows(reading.output.detach())
        curvature = self.loss.curvature(predictions, target, batch.raw)
        if curvature is None:
            return weights, user_weights
        curvature = curvature.detach()
        if weights is not None:
            # Rows that the user masks need not have a curvature.
            curvature = torch.where(weights > 0, curvature, 0.0)
        _check_curvature(curvature)
        if weights is not None:
            curvature = curvature * weights
        return curvature, user_weights

    def label_loss(self, block: Block) -> str | None:
        """The name of a loss that rows show not to be one of regression; None otherwise."""
        if isinstance(self.loss, MSE) or block.target is None:
            return None
        if is_least_at_target(self.loss, block.reading.output_layout.target_rows(block.target)):
            return None
        return function_name(self.loss)


def _check_curvature(curvature: Tensor) -> None:
    """Refuse a curvature that is not finite, or negative."""
    if not bool(torch.isfinite(curvature).all()):
        raise ValueError("the curvature of the loss is not finite. Check the targets and the loss.")
    smallest = float(curvature.min())
    if smallest < 0:
        raise ValueError(
            f"the loss has negative curvature ({smallest:.3g}) at some predictions. A rigidity "
            "needs a loss that is convex in the prediction: use 'mse', 'huber' or 'log-cosh'."
        )


@torch.enable_grad()  # for models that differentiate inside forward
def accumulated(
    readout: AnyReadout,
    batches: Iterable[Batch],
    weighing: Weighing,
    plan: Plan,
    *,
    into: Statistics | None = None,
    novelty: Novelty | None = None,
    first_reading: Reading | None = None,
) -> Statistics | None:
    """The statistics of the rows of batches.

    Args:
        readout: Reads outputs and features off the model.
        batches: The data.
        weighing: The loss and weights.
        plan: What new statistics keep.
        into: Statistics that the rows are added to, in place; None for new ones. After an error
            they are unusable: pass a copy if they are still needed.
        novelty: Adds up what the passes show beside the readout, in place; None for nothing.
        first_reading: What the readout reads off the first batch, where that is known already.

    Returns:
        The statistics; None where no batch came.

    Raises:
        ValueError: NaN or infinity, shapes that do not fit, or negative curvature. The message
            begins with the number of the batch, or of the batches of a block, counted from 0.
    """
    first, batches = peek(batches)
    if first is None:
        return None
    statistics = into
    watch = FinitenessWatch()
    readings = read(readout, batches, novelty, first_reading)
    for block in joined(weighed(readout, readings, weighing, watch)):
        if statistics is None:
            statistics = Statistics.begin(first, block, plan, weighing.label_loss(block))
        try:
            statistics.update(block)
        except ValueError as error:
            raise ValueError(f"{block.batches.name}: {error}") from error
        watch.update(block)
    watch.look()
    return statistics


def peek(batches: Iterable[Batch]) -> tuple[Batch | None, Iterator[Batch]]:
    """The first batch, None if there is none, and all batches, the first one among them."""
    iterator = iter(batches)
    first = next(iterator, None)
    if first is None:
        return None, iterator
    return first, chain([first], iterator)


def read(
    readout: AnyReadout,
    batches: Iterable[Batch],
    novelty: Novelty | None,
    first_reading: Reading | None,
) -> Iterator[tuple[Batch, Reading]]:
    """Batches, each with what its pass through the model gave.

    Args:
        readout: Reads outputs and features off the model.
        batches: The data.
        novelty: Adds up what the same passes show beside the readout; None for nothing.
        first_reading: What the readout reads off the first batch, where that is known already. A
            novelty has to see that pass, too, so that it is made again.
    """
    for number, batch in enumerate(batches):
        try:
            if novelty is not None:
                reading = novelty.update(readout, batch)
            elif number == 0 and first_reading is not None:
                reading = first_reading
                if batch.rows is not None:
                    batch.check(reading.output.shape[0])
            else:
                reading = readout(batch)
        except ValueError as error:
            raise ValueError(f"Batch {number}: {error}") from error
        yield batch, reading


def weighed(
    readout: AnyReadout,
    readings: Iterable[tuple[Batch, Reading]],
    weighing: Weighing,
    watch: FinitenessWatch,
) -> Iterator[Block]:
    """Batches after their pass through the model, with checked targets and weights.

    Args:
        readout: The readout, which also reads derivatives off the model.
        readings: The batches, and what their passes gave.
        weighing: The loss and weights.
        watch: Notes rows of derivatives, which are computed only while the Gram takes them.
    """
    for number, (batch, reading) in enumerate(readings):
        if number == 0 and weighing.gradients is not None:
            # Derivatives that are only calibrated later need an input that exists, too.
            weighing.gradients.slot(readout, batch)
        try:
            block = _block(readout, batch, reading, number, weighing)
        except ValueError as error:
            raise ValueError(f"Batch {number}: {error}") from error
        if weighing.gradients is not None and weighing.gradients.in_training_loss:
            derivatives = weighing.gradients.rows(readout, batch)
            block = replace(block, derivatives=watch.noted(block.batches, derivatives))
        yield block


def require_rows(statistics: Statistics | None) -> Statistics:
    """The statistics, of which there must be some.

    Raises:
        ValueError: No batch came.
    """
    if statistics is None:
        raise ValueError("There are no data. Pass at least one row.")
    return statistics


def settled(statistics: Statistics | None) -> Statistics:
    """The statistics of all rows, ready to be shared by threads.

    Raises:
        ValueError: No rows were added, or none that could be used.
    """
    statistics = require_rows(statistics)
    statistics.require_finite()
    if not bool((statistics.gram.diagonal > 0).any()):
        raise ValueError(
            "The Gram matrix is zero: all features are zero, or the loss has no curvature (an "
            "absolute error has none; use 'huber', 'log-cosh' or 'mse')."
        )
    statistics.settle()
    return statistics


def _block(
    readout: AnyReadout, batch: Batch, reading: Reading, number: int, weighing: Weighing
) -> Block:
    """What a batch adds to the statistics, after a check of its target and weights."""
    samples = reading.output.shape[0]
    if not samples or not reading.rows.shape[0]:
        raise ValueError("the batch is empty. Leave it out.")
    if reading.rows.requires_grad or reading.output.requires_grad:
        reading = reading.detached()

    target = batch.target
    if target is not None and target.shape != reading.output.shape:
        reading.output_layout.target_rows(target)  # refuses a shape that does not fit
        target = target.reshape(reading.output.shape)

    weights = None
    sample_weight = None
    if not weighing.is_plain:
        target_rows = None if target is None else reading.output_layout.rows(target)
        weights, sample_weight = weighing(batch, reading, target_rows)
        weights = _shared_weights(weights)

    inputs = _rows_of_inputs(batch, samples, reading.output.device)
    block = Block(
        samples=samples,
        rows=reading.rows.shape[0],
        reading=reading,
        target=target,
        weights=weights,
        sample_weight=sample_weight,
        inputs=inputs,
        layout=readout.layout,
        batches=BatchRange(number, (samples,)),
        # The total counts rows of inputs, which are samples only here.
        expected=batch.total if inputs else None,
        columns=batch.columns,
    )
    input_bytes = 0
    for tensor in inputs:
        input_bytes += tensor.nbytes
    if input_bytes > WIDE_INPUT * samples:
        return block.hashed()
    return block


def _shared_weights(weights: Tensor | None) -> Tensor | None:
    """Weights (M, K) as (M, 1) where they are equal for all targets."""
    if weights is None or weights.shape[1] == 1:
        return weights
    first = weights[:, :1]
    if torch.equal(weights, first.expand_as(weights)):
        return first
    return weights


def _rows_of_inputs(batch: Batch, samples: int, device: torch.device) -> list[Tensor]:
    """The tensors of the inputs by which rows are recognised; see `row_tensors`."""
    inputs = batch.inputs if batch.kwargs else batch.args
    # Most inputs are plain tensors, which need no search through containers.
    for tensor in inputs:
        if type(tensor) is not Tensor:
            break
        if tensor.is_nested or tensor.layout is not torch.strided:
            return []
        if tensor.shape[:1] != (samples,):
            return []
    else:
        return list(inputs)
    return row_tensors(inputs, samples, device)


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
        if block.reading.rows.device.type == "cpu":
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
            wrong = _first_wrong(features)
            if residuals is not None:
                wrong = torch.maximum(wrong, _first_wrong(residuals))
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
    return float(block.reading.rows.sum() + _judged_outputs(block).sum())


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
    feature_row = _first_wrong(block.reading.rows)
    output_row = _first_wrong(_judged_outputs(block))
    rows = torch.stack([feature_row, output_row, torch.full_like(feature_row, -1)])
    samples = torch.div(rows, rows_per_sample, rounding_mode="floor")
    return samples.clamp(max=block.samples - 1)


def _wrong_samples(block: Block) -> set[int]:
    """All samples whose features, or whose target or prediction, are not finite."""
    rows_per_sample = max(1, block.rows // block.samples)
    wrong = _is_wrong(block.reading.rows) | _is_wrong(_judged_outputs(block))
    samples = wrong.nonzero().flatten() // rows_per_sample
    return set(samples.clamp(max=block.samples - 1).tolist())


def _is_wrong(rows: Tensor) -> Tensor:
    """Which rows (n, ...) hold NaN or infinity, (n,)."""
    # A row's sum in float64 is finite only if all its numbers are, and reads them once. Numbers
    # beyond 1e300 may overflow it, but so would their squares in the Gram.
    return ~rows.flatten(1).sum(1, dtype=torch.float64).isfinite()


def _first_wrong(rows: Tensor) -> Tensor:
    """The number of the first row (n, ...) that holds NaN or infinity; -1 without one."""
    wrong = _is_wrong(rows)
    first = wrong.to(torch.uint8).argmax()
    return torch.where(wrong[first], first, -1)


def _spoilt_columns(block: Block, samples: slice) -> list[str]:
    """Names of the inputs' columns that hold NaN or infinity in some samples, where known."""
    inputs = tuple(tensor[samples] for tensor in block.inputs)
    batch = Batch(inputs, {}, None, None, columns=block.columns)
    every_row = torch.ones(0, dtype=torch.bool)  # a mask of another length stands for all rows
    return sorted(spoilt(batch, every_row) - {""})
