"""One pass over the training data: features, curvatures and residuals into the Gram."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..data.batches import TARGET_KEYS, Batch, kind_of
from ..data.row_sample import RowSample, output_hashes
from ..data.sketch import NO_LIMIT, RowSketch
from ..losses import Loss
from ..notices import notify
from ..posterior.gram import Gram
from ..posterior.memory import require_memory
from .gradients.loss import GradientLoss
from .readout.reading import Reading, SampleWeight, read
from .readout.tap import AnyTap

_CHECK_EVERY = 32


@dataclass
class Statistics:
    """Everything that a fit learns from the data.

    Attributes:
        gram: the accumulated rows.
        sketch: hashes of the rows, to recognise them in validation data.
        targets: number of targets K.
        inputs: number of positional inputs of the model, or of a tuple that `forward=` takes.
        kind: of the batches, where known; see `data.batches.kind_of`.
        exact: whether the hashes are of inputs, not of features, which round as the batch wills.
        sample: some of the rows; None where none were asked for or their residuals are not known.
    """

    gram: Gram
    sketch: RowSketch
    targets: int
    inputs: int
    kind: str | None = None
    exact: bool = True
    sample: RowSample | None = None

    def clone(self) -> Statistics:
        """An independent copy."""
        sample = self.sample and self.sample.clone()
        return replace(self, gram=self.gram.clone(), sketch=self.sketch.clone(), sample=sample)

    def without(self, removed: Statistics, *, check: bool) -> Statistics:
        """What is left when rows are taken out, which must be held; `check` asks their hashes."""
        sketch, missing, judged = self.sketch.without(removed.sketch)
        if check and missing:
            share = self.sketch.limit / (1 << 63)
            some = "" if share == 1 else f" that could be judged ({share:.1%} of all)"
            raise ValueError(
                f"{missing} of {judged} rows{some} were never in the fit (or were taken out "
                "already, or had another target). Give rows as they were added, in the same "
                "dtypes, or pass check=False where they cannot be recognised."
            )
        gram, out = self.gram.without(removed.gram), removed.sample
        sample = None if self.sample is None or out is None else self.sample.without(out)[0]
        return replace(self, gram=gram, sketch=sketch, sample=sample)

    def after(self, change: Tensor) -> Statistics:
        """The same rows when the readout's weights have changed by (D, K or 1)."""
        sample = self.sample and self.sample.after(change)
        return replace(self, gram=self.gram.after(change), sample=sample)

    def say_unlabelled(self) -> None:
        """Warn of batches that could have held a target, and did not where it was looked for."""
        if self.gram.cross is None and self.kind in ("mapping", "object"):
            notify(
                "The fit saw no target in its batches and went without: it looks for "
                f"{', '.join(map(repr, TARGET_KEYS))}. Say where it is with target=lambda b: ..., "
                "or that there is none with target=lambda b: None."
            )


@dataclass(frozen=True)
class Weighing:
    """The weight of a row: the loss's curvature times the user's sample weight.

    Attributes:
        loss: of the values.
        sample_weight: callable(batch) -> weights, where the training loss was weighted.
        gradients: the part of the training loss that derivatives by an input had.
    """

    loss: Loss
    sample_weight: SampleWeight | None = None
    gradients: GradientLoss | None = None

    def __call__(
        self, batch: Batch, reading: Reading, target: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The weight, and the user's part in it; each (M, 1) or (M, K), None for all ones."""
        if target is None and self.loss.needs_target:
            raise ValueError("This loss needs targets: give (x, y) batches or target=.")
        rows = reading.rows(reading.output.detach())
        given = user = reading.sample_weights(self.sample_weight, batch)
        own = reading.sample_weights(getattr(self.loss, "weight", None), batch)
        if own is not None:
            given = own if given is None else own * given
        curvature = self.loss.curvature(rows, target, batch.raw)
        if curvature is None:
            return given, user
        if given is not None:  # what the user masks need not have a curvature
            curvature = torch.where(given > 0, curvature, 0.0)
        _check_curvature(curvature)
        return curvature if given is None else curvature * given, user


@torch.enable_grad()  # for models that differentiate inside forward
def accumulate(
    statistics: Statistics | None,
    find: Callable[[Batch], AnyTap],
    batches: Iterable[Batch],
    weighing: Weighing,
    *,
    remove: bool = False,
    check: bool = True,
    sample: RowSample | None = None,
    kind: type[Gram] = Gram,
) -> Statistics:
    """Statistics with the batches' rows added (in place), or without them (in a copy).

    `find` gives the readout for the first batch; `check` refuses to take out what was never added;
    `sample`, still empty, and the `kind` of Gram are those of new statistics.

    Raises:
        ValueError: nothing to add, NaN or infinity, shapes that do not fit, negative curvature;
            with the number of the batch, counted from 0.
    """
    known = statistics if remove else None
    statistics = None if remove else statistics
    if known is not None:
        kind = type(known.gram)
        sample = known.sample and RowSample(known.sample.size, known.sample.limit)
    sums: list[Tensor] = []
    number, tap = -1, None
    for number, batch in enumerate(batches):
        tap = find(batch) if tap is None else tap
        try:
            statistics = _add(statistics, tap, batch, weighing, sums, known, sample, kind)
        except ValueError as error:
            raise ValueError(f"Batch {number}: {error}") from error
        if len(sums) == _CHECK_EVERY:
            _check_finite(sums, number)
    _check_finite(sums, number)
    if statistics is None or number < 0:
        raise ValueError("There are no data: no batch came. Pass at least one row.")
    if known is not None:
        return known.without(statistics, check=check)
    if not bool((statistics.gram.diagonal > 0).any()):
        raise ValueError(
            "The Gram is zero: all features are zero, or the loss has no curvature (an absolute "
            "error has none; use 'huber', 'log-cosh' or 'mse')."
        )
    statistics.sketch.settle()  # before threads share it; the diagonal has settled the Gram
    if statistics.sample is not None:
        statistics.sample.settle()
    return statistics


def _add(
    statistics: Statistics | None,
    tap: AnyTap,
    batch: Batch,
    weighing: Weighing,
    sums: list[Tensor],
    known: Statistics | None,
    sample: RowSample | None,
    kind: type[Gram],
) -> Statistics:
    reading = read(tap, batch)
    if not reading.features.shape[0]:
        raise ValueError("the batch is empty; drop it.")
    target = reading.target_rows(batch.target)
    weights, importance = weighing(batch, reading, target)
    weights = _shared_weights(weights)
    residuals = error = None
    if target is not None:
        residuals = error = target.to(torch.float64) - reading.rows(reading.output.detach())
        if weights is not None:
            residuals = torch.where(weights > 0, error, 0.0)
    if statistics is None:
        statistics = _empty(tap, batch, reading, kind)
        statistics.exact, statistics.sample = known is None or known.exact, sample
    own = (weights, importance)  # before they are laid out for the Gram
    features, weights, residuals = _flat(tap.layout, reading.features, weights, residuals)
    gram = statistics.gram
    if features.shape[-1] != gram.width:
        raise ValueError(
            f"the readout has {features.shape[-1]} features here and {gram.width} in the data "
            "before. All batches must pass through the same readout."
        )
    if weights is not None and weights.shape[1] > 1 and gram.targets is None:
        gram = statistics.gram = gram.expand(weights.shape[1])
    sums.append(_sums(features, residuals))
    gram.update(features, weights, residuals)
    if weighing.gradients is not None:
        for rows in weighing.gradients.rows(tap, batch):
            features, weights, residuals = _flat(tap.layout, *rows)
            sums[-1] += _sums(features, residuals)  # one entry per batch
            gram.update(features, weights, residuals, moments=residuals is not None)
    held = None if known is None else known.sketch
    hashes, statistics.exact = reading.hashes(batch, held, exact=statistics.exact)
    statistics.sketch.add(hashes)
    statistics.sample = _sampled(statistics, reading, hashes, error, *own)
    return statistics


def _sampled(
    statistics: Statistics,
    reading: Reading,
    hashes: Tensor,
    error: Tensor | None,
    weights: Tensor | None,
    importance: Tensor | None,
) -> RowSample | None:
    """The sample with a batch's rows in it; none once rows lack residuals or differ in shape."""
    sample, own = statistics.sample, reading.detached()
    mean = own.rows(own.output)
    alike = mean.shape[1] == statistics.targets and len(mean) % len(hashes) == 0
    if sample is None or error is None or not alike:
        return None
    known = error.isfinite() if importance is None else error.isfinite() & (importance > 0)
    hashes = output_hashes(hashes, len(mean), importance)
    sample.add(
        torch.where(known.any(1), hashes, NO_LIMIT),  # without any target: above every limit
        features=own.features,
        mean=mean,
        residual=torch.where(known, error, torch.nan),
        weight=torch.ones_like(error) if weights is None else weights.expand_as(error),
        importance=importance,
        counts=own.counts,
    )
    return sample


def _empty(tap: AnyTap, batch: Batch, reading: Reading, gram_kind: type[Gram]) -> Statistics:
    targets = reading.inner[reading.axis]
    own = targets if tap.layout == "separate" else None
    width, device = reading.features.shape[-1], reading.features.device
    require_memory(gram_kind.copies, width, own, device)
    gram = gram_kind(width, targets=own, device=device)
    kind, raw = kind_of(batch.raw), batch.raw
    inputs = max(1, len(raw) - 1) if kind.startswith("tuple") else len(batch.args)
    return Statistics(gram, RowSketch(), targets, inputs, kind)


def _flat(
    layout: str, features: Tensor, weights: Tensor | None, residuals: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Joint features: each target's row is a row of the one Gram."""
    if layout != "joint":
        return features, weights, residuals
    rows, targets = features.shape[:2]
    if weights is not None:
        weights = weights.expand(rows, targets).reshape(-1, 1)
    residuals = None if residuals is None else residuals.reshape(-1, 1)
    return features.flatten(0, 1), weights, residuals


def _shared_weights(weights: Tensor | None) -> Tensor | None:
    """One column where all targets have the same weights."""
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


def _sums(features: Tensor, residuals: Tensor | None) -> Tensor:
    """Sums of features and residuals, which NaN or infinity would spoil.

    They are not read yet, so that an accelerator runs on.
    """
    short = torch.finfo(features.dtype).bits < 32
    total = features.detach().sum(dtype=torch.float32 if short else None).to(torch.float64)
    return torch.stack([total, total if residuals is None else residuals.sum()])


def _check_finite(sums: list[Tensor], last: int) -> None:
    """Read the sums of the latest batches, of which `last` is the number of the last."""
    first = last - len(sums) + 1
    read = [pair.tolist() for pair in sums]
    sums.clear()
    for number, pair in enumerate(read, start=first):
        for total, what in zip(pair, ("features", "targets or predictions"), strict=True):
            if not math.isfinite(total):
                raise ValueError(
                    f"Batch {number}: NaN or infinity in the {what}. Clean the data, or check "
                    "that the model has not diverged."
                )
