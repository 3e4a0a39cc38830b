"""The way of a batch: through the model, into a block, into the statistics.

`accumulate` is the one loop for every source. Each batch passes the model once (`tap`), which gives
its outputs and features (once more where the loss had derivatives by the inputs). Batch and pass
become a `Block`, whose weights and target have been checked. Blocks go to `Waiting`, where small
ones wait, in memory of our own, until they fill a larger one. Complete blocks go to every part of
the `Statistics` (the Gram and the products with the residuals, the hashes of rows, the sample of
rows) and to the `FinitenessWatch`. No rows wait anywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..data.batches import Batch
from ..data.finiteness import spoilt
from ..losses import MSE, Loss
from .gradients.loss import GradientLoss
from .readout.reading import Reading, SampleWeight
from .readout.tap import AnyTap
from .statistics.block import WIDE_INPUT, BatchRange, Block, DerivativeRows, Waiting
from .statistics.parts import Plan
from .statistics.statistics import Statistics

AfterBlock = Callable[[int, Statistics, Callable[[], None]], None]

_LOOK_EVERY = 8
"""Blocks, or pieces of derivatives, after which an accelerator is asked if all was finite."""


@dataclass(frozen=True)
class Weighing:
    """The weight of a row: the loss's curvature times the user's sample weight.

    Attributes:
        sample_weight: callable(batch) -> weights, where the training loss was weighted.
        gradients: the part of the training loss that derivatives by an input had.
    """

    loss: Loss
    sample_weight: SampleWeight | None = None
    gradients: GradientLoss | None = None

    @property
    def is_plain(self) -> bool:
        """Whether every row has weight one, whatever it holds."""
        weighted = self.sample_weight is not None or getattr(self.loss, "weight", None) is not None
        return isinstance(self.loss, MSE) and not weighted

    def __call__(
        self, batch: Batch, reading: Reading, target: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The weight, and the user's part in it; each (M, 1) or (M, K), None for all ones."""
        if target is None and self.loss.needs_target:
            raise ValueError("This loss needs targets: give (x, y) batches or target=.")
        weights = user_weights = reading.sample_weights(self.sample_weight, batch)
        loss_weights = reading.sample_weights(getattr(self.loss, "weight", None), batch)
        if loss_weights is not None:
            weights = loss_weights if weights is None else loss_weights * weights
        if isinstance(self.loss, MSE):
            return weights, user_weights
        rows = reading.rows(reading.output.detach())
        curvature = self.loss.curvature(rows, target, batch.raw)
        if curvature is None:
            return weights, user_weights
        curvature = curvature.detach()
        if weights is not None:  # what the user masks need not have a curvature
            curvature = torch.where(weights > 0, curvature, 0.0)
        _check_curvature(curvature)
        if weights is not None:
            curvature = curvature * weights
        return curvature, user_weights


@torch.enable_grad()  # for models that differentiate inside forward
def accumulate(
    statistics: Statistics | None,
    find: Callable[[Batch], AnyTap],
    batches: Iterable[Batch],
    weighing: Weighing,
    plan: Plan,
    *,
    counted: int = 0,
    after_block: AfterBlock = lambda batches, statistics, look: None,
    meanwhile: Callable[[], None] = lambda: None,
    read_first: Callable[[Reading], None] = lambda reading: None,
) -> Statistics | None:
    """Statistics with the batches' rows added, in place; None where no batch came, now or before.

    An error leaves the statistics spoilt: give a copy of those that are still needed.

    Args:
        statistics: to add to; None for new ones.
        find: gives the readout for the first batch.
        batches: the data.
        weighing: the loss and weights.
        plan: what new statistics are to keep; its kind of Gram must be that of given ones.
        counted: batches that the statistics hold already: numbers go on from there.
        after_block: is called whenever a block was added, with the number of batches so far, the
            statistics, which hold exactly these, and a function that refuses them if they hold NaN.
        meanwhile: is called after the last batch, if any came, while an accelerator may still be
            at work.
        read_first: is called with what the pass of the first of these batches gave.

    Raises:
        ValueError: NaN or infinity, shapes that do not fit, negative curvature; with the number of
            the batch, or of the batches of a block, counted from 0.
    """
    watch = FinitenessWatch()
    first_batch: Batch | None = None

    def add(block: Block) -> None:
        nonlocal statistics
        if statistics is None:
            assert first_batch is not None
            statistics = Statistics.begin(first_batch, block, plan)
        try:
            statistics.update(block)
        except ValueError as error:
            raise ValueError(f"{block.batches.name}: {error}") from error
        watch.update(block)
        after_block(block.batches.next, statistics, watch.look)

    waiting = Waiting(add, plan.gram.preferred_rows)
    tap: AnyTap | None = None
    number = counted
    for batch in batches:
        if tap is None:
            first_batch = batch
            tap = find(batch)
        try:
            block = _block(tap, batch, number, weighing)
        except ValueError as error:
            raise ValueError(f"Batch {number}: {error}") from error
        if weighing.gradients is not None:
            derivatives = weighing.gradients.rows(tap, batch)
            block = replace(block, derivatives=watch.passing(block.batches, derivatives))
        if number == counted:
            read_first(block.reading)
        waiting.take(block)
        number += 1
    waiting.flush()
    if tap is not None:
        meanwhile()
    watch.look()
    return statistics if tap is not None or counted else None


def _block(tap: AnyTap, batch: Batch, number: int, weighing: Weighing) -> Block:
    """One batch, passed through the model, with its target, weights and what to know it by."""
    layers: list[list[Tensor]] = []
    if tap.layers:
        reading, entering = tap.entering(*batch.args, **batch.kwargs)
        layers.append(entering)
    else:
        reading = tap(*batch.args, **batch.kwargs)
    if batch.rows is not None:
        batch.check(reading.output.shape[0])
    samples = reading.output.shape[0]
    if not samples or not reading.inputs.shape[0]:
        raise ValueError("the batch is empty; drop it.")
    if reading.inputs.requires_grad or reading.output.requires_grad:
        reading = reading.detached()
    target = batch.target
    if target is not None and target.shape != reading.output.shape:
        reading.target_rows(target)  # which checks the shape
        target = target.reshape(reading.output.shape)
    weights = importance = None
    if not weighing.is_plain:
        weights, importance = weighing(batch, reading, reading.target_rows(target))
        weights = _shared_weights(weights)
    inputs = _rows_of_inputs(batch, samples)
    block = Block(
        samples=samples,
        rows=reading.inputs.shape[0],
        reading=reading,
        target=target,
        weights=weights,
        importance=importance,
        inputs=inputs,
        layout=tap.layout,
        batches=BatchRange(number, (samples,)),
        # The total counts rows of inputs, which are samples only here.
        expected=batch.total if inputs else None,
        columns=batch.columns,
        layers=layers,
    )
    wide = 0
    for tensor in inputs:
        wide += tensor.nbytes
    return block.hashed() if wide > WIDE_INPUT * samples else block


def _rows_of_inputs(batch: Batch, samples: int) -> list[Tensor]:
    """The tensors of the inputs, if all have one row per sample; else none."""
    # Most inputs are plain tensors, which need no search through containers.
    inputs = batch.inputs if batch.kwargs else batch.args
    for tensor in inputs:
        if type(tensor) is not Tensor:
            break
        if tensor.is_nested or tensor.layout is not torch.strided:
            return []
        if tensor.shape[:1] != (samples,):
            return []
    else:
        return list(inputs)
    leaves = tree_leaves(inputs)
    for leaf in leaves:
        plain = isinstance(leaf, Tensor) and not leaf.is_nested and leaf.layout is torch.strided
        if not plain or leaf.shape[:1] != (samples,):
            return []
    return leaves


class FinitenessWatch:
    """Refuses NaN and infinity in features, targets and predictions, by the number of the batch.

    A CPU looks at once. An accelerator is asked after some blocks, and at the end: it would have to
    be waited for.
    """

    def __init__(self) -> None:
        self._looks: list[tuple[BatchRange, Tensor]] = []

    def update(self, block: Block) -> None:
        """Look at the rows of a block, now or later."""
        if block.features.device.type == "cpu":
            self.look()
            if not math.isfinite(_total(block)):
                _refuse_wrong(block.batches, _first_wrong_samples(block).tolist(), block)
            return
        self._looks.append((block.batches, _first_wrong_samples(block)))
        if len(self._looks) >= _LOOK_EVERY:
            self.look()

    def passing(
        self, batches: BatchRange, derivatives: Iterable[DerivativeRows]
    ) -> Iterator[DerivativeRows]:
        """The same rows of derivatives, which are looked at later."""
        for rows in derivatives:
            features, _, residuals = rows
            wrong = _first_wrong(features)
            if residuals is not None:
                wrong = torch.maximum(wrong, _first_wrong(residuals))
            none = torch.full_like(wrong, -1)
            self._looks.append((batches, torch.stack([none, none, wrong])))
            yield rows

    def look(self) -> None:
        """Read what an accelerator has found in the latest blocks."""
        looks, self._looks = self._looks, []
        if looks:
            read = torch.stack([samples for _, samples in looks]).tolist()  # one wait for all
            for (batches, _), samples in zip(looks, read, strict=True):
                _refuse_wrong(batches, samples)


def _refuse_wrong(batches: BatchRange, samples: list[int], block: Block | None = None) -> None:
    """Raise where there is a wrong sample, as `_first_wrong_samples` has them.

    The block, where it is still in memory, tells which columns of the inputs are to blame.
    """
    feature, residual, derivative = samples
    if feature < 0 and residual < 0 and derivative < 0:
        return
    if feature >= 0 and (residual < 0 or feature <= residual):
        number = batches.number(feature)
        what = "features"
        names = [] if block is None else _spoilt_columns(block, batches.samples(number))
        if names:
            what = f"features, from {', '.join(names)} of the inputs"
    elif residual >= 0:
        number = batches.number(residual)
        what = "targets or predictions"
    else:
        number = batches.first  # rows of derivatives do not wait with other batches
        what = "derivatives by the inputs, or their targets"
    raise ValueError(
        f"Batch {number}: NaN or infinity in the {what}. Clean the data, or check that the model "
        "has not diverged."
    )


def _total(block: Block) -> float:
    """A sum that NaN or infinity would spoil; numbers near the largest may spoil it too."""
    return float(block.features.sum() + _judged_outputs(block).sum())


def _judged_outputs(block: Block) -> Tensor:
    """Residuals of rows that count, (M, K); without targets the predictions."""
    if block.counted_residual is None:
        return block.reading.rows(block.reading.output)
    return block.counted_residual


def _first_wrong_samples(block: Block) -> Tensor:
    """The first samples with a feature, and with a target or prediction, that is not finite.

    Three numbers on the block's device, -1 where there is none: the third is for derivatives.
    """
    rows_per_sample = max(1, block.rows // block.samples)
    features = _first_wrong(block.features)
    outputs = _first_wrong(_judged_outputs(block))
    first = torch.stack([features, outputs, torch.full_like(features, -1)])
    samples = torch.div(first, rows_per_sample, rounding_mode="floor")
    return samples.clamp(max=block.samples - 1)


def _first_wrong(rows: Tensor) -> Tensor:
    """The number of the first row (n, ...) that holds NaN or infinity; -1 without one."""
    # A sum in float64 is finite if all numbers are (but for numbers beyond 1e300, whose squares
    # are not), and they are read once.
    wrong = ~rows.flatten(1).sum(1, dtype=torch.float64).isfinite()
    first = wrong.to(torch.uint8).argmax()
    return torch.where(wrong[first], first, -1)


def _spoilt_columns(block: Block, samples: slice) -> list[str]:
    """Names of the inputs' columns that hold NaN or infinity in some samples, where known."""
    inputs = tuple(tensor[samples] for tensor in block.inputs)
    batch = Batch(inputs, {}, None, None, columns=block.columns)
    every_row = torch.ones(0, dtype=torch.bool)  # a mask of another length is none
    return sorted(spoilt(batch, every_row) - {""})


def settled(statistics: Statistics | None) -> Statistics:
    """The statistics of all rows, ready to be shared by threads.

    Raises:
        ValueError: nothing was added, or nothing that could be used.
    """
    if statistics is None:
        raise ValueError("There are no data: no batch came. Pass at least one row.")
    statistics.require_finite()
    if not bool((statistics.gram.diagonal > 0).any()):
        raise ValueError(
            "The Gram is zero: all features are zero, or the loss has no curvature (an absolute "
            "error has none; use 'huber', 'log-cosh' or 'mse')."
        )
    statistics.settle()
    return statistics


def _shared_weights(weights: Tensor | None) -> Tensor | None:
    if weights is None or weights.shape[1] == 1:
        return weights
    return weights[:, :1] if torch.equal(weights, weights[:, :1].expand_as(weights)) else weights


def _check_curvature(curvature: Tensor) -> None:
    if not bool(torch.isfinite(curvature).all()):
        raise ValueError("the loss's curvature is not finite; check the targets and the loss.")
    smallest = float(curvature.min())
    if smallest < 0:
        raise ValueError(
            f"the loss has negative curvature ({smallest:.3g}) at some predictions. A rigidity "
            "needs a loss that is convex in the prediction: use 'mse', 'huber' or 'log-cosh'."
        )
