"""One pass over validation (or training) data, for calibration."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .accumulation import Weighing, batch_hashes, sample_weights, target_rows
from .batches import Batch
from .calibration import Residuals
from .cases import Reading
from .posterior import Posterior
from .readout import AnyTap
from .sketch import RowSketch

LARGEST = 1 << 27
"""Numbers to keep at most (1 GiB in float64); beyond it every other row is dropped."""


def residuals(
    tap: AnyTap,
    batches: Iterable[Batch],
    posterior: Posterior,
    weighing: Weighing,
    *,
    sketch: RowSketch | None = None,
) -> Residuals:
    """Errors, squared components in the posterior's eigenbasis and weights of all rows.

    Args:
        tap: the readout.
        batches: with targets.
        posterior: whose eigenbasis to use.
        weighing: the loss's curvature and sample weights.
        sketch: of the training rows, to count those that stand in both; None not to.
    """
    parts: list[tuple[Tensor, ...]] = []
    rows, samples, stride, held, shared = 0, 0, 1, 0, 0.0
    for number, batch in enumerate(batches):
        reading = tap(*batch.args, **batch.kwargs)
        try:
            part = _part(batch, reading, posterior, weighing)
        except ValueError as problem:
            raise ValueError(f"Batch {number}: {problem}") from problem
        if sketch is not None:
            hashes = batch_hashes(batch, reading)
            samples += hashes.numel()
            shared += sketch.shared(hashes)
        start = -rows % stride
        parts.append(part if stride == 1 else tuple(t[start::stride].clone() for t in part))
        rows += len(part[0])
        held += parts[-1][1].numel()
        if held > LARGEST:
            parts = [tuple(torch.cat(column)[::2].clone() for column in zip(*parts, strict=True))]
            held, stride = parts[0][1].numel(), stride * 2
    if rows < 2:
        raise ValueError(
            f"Calibration needs at least two rows, got {rows}. A few dozen give a usable scale."
        )
    error, power, weight, importance = (torch.cat(column) for column in zip(*parts, strict=True))
    _check_errors(error)
    return Residuals(error, power, weight, importance, rows, samples, shared)


def _part(
    batch: Batch, reading: Reading, posterior: Posterior, weighing: Weighing
) -> tuple[Tensor, ...]:
    """(error, power, weight, importance) of one batch; masked targets have a NaN error."""
    target = target_rows(batch.target, reading)
    if target is None:
        raise ValueError("there is no target; calibration needs (x, y).")
    error = target.to(torch.float64) - reading.rows(reading.output.detach())
    weight = weighing(batch, reading, target)
    weight = error.new_ones(len(error), 1) if weight is None else weight.to(torch.float64)
    importance = sample_weights(weighing.sample_weight, batch, reading)
    importance = error.new_ones(len(error), 1) if importance is None else importance
    error = torch.where(importance > 0, error, torch.nan)
    power = posterior.projections(reading.features.detach()).square()
    wrong = (~torch.isfinite(error) & (weight > 0)).any() | ~torch.isfinite(power).all()
    wrong |= torch.isinf(error).any()
    if bool(wrong):
        raise ValueError("NaN or infinity in the features, targets or predictions. Clean the data.")
    return error, power, weight, importance


def _check_errors(error: Tensor) -> None:
    """Every target must have errors that are known and not all zero."""
    for k, column in enumerate(error.unbind(1)):
        which = "" if error.shape[1] == 1 else f" of target {k}"
        known = column[torch.isfinite(column)]
        if len(known) < 2:
            raise ValueError(
                f"Fewer than two values{which} are known in these data: the rest is masked. "
                "Calibrate on rows where every target is known at least twice."
            )
        if not bool(known.any()):
            raise ValueError(
                f"All residuals{which} are zero: the data are predicted exactly, so there is "
                "nothing to calibrate. Are these the model's own predictions, or a memorised "
                "training set?"
            )
