"""The path of a batch: through the model, into a block, into the statistics.

`accumulated` is the one loop for every source of data. Each batch passes through the model once,
where the readout gives its outputs and features, and once more where the loss had derivatives by
the inputs. The batch and its pass become a `Block`, whose weights and target have been checked
(`weighed`). Small blocks wait, in memory of our own, until they fill a larger one (`joined`).
Complete blocks go to `Statistics` (the Gram and the products with the residuals, the hashes of
rows, the sample of rows) and to the `FinitenessWatch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from ..data.batches import Batch
from ..data.hashes import row_tensors
from ..losses import MSE, Loss, function_name, is_least_at_target
from ..readout.reading import Reading, SampleWeight
from ..readout.readout import AnyReadout
from ..statistics.block import BatchRange, Block, joined
from ..statistics.statistics import Plan, Statistics
from .finiteness_watch import FinitenessWatch
from .gradients.loss import GradientLoss
from .novelty.novelty import Novelty

WIDE_INPUT = 4096
"""Bytes of one sample's inputs beyond which they are hashed at once and not kept: images, say."""


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
                if batch.samples is not None:
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
        try:
            if number == 0 and weighing.gradients is not None:
                # Derivatives that are only calibrated later need an input that exists, too.
                weighing.gradients.slot(readout, batch)
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
    if not bool((statistics.gram_sums.sums.diagonal > 0).any()):
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
    if not samples or not reading.bare_features.shape[0]:
        raise ValueError("the batch is empty. Leave it out.")
    if reading.bare_features.requires_grad or reading.output.requires_grad:
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

    values = batch.args
    if batch.kwargs:
        values = batch.inputs
    inputs = row_tensors(values, samples, reading.output.device)
    block = Block(
        samples=samples,
        rows=reading.bare_features.shape[0],
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
