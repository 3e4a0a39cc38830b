"""What to beware of: in the calibration, and in the rows of a report."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration.report import CalibrationReport
from .markup import number
from .rows import Rows
from .scores import bin_sizes
from .verdict import FEW, needed_factor

_FAR = 5.0
"""Multiples of the median bar beyond which a bar is called far out."""
_TAIL = 4.0


@dataclass(frozen=True)
class Caution:
    """Something to beware of.

    Attributes:
        text: sentences.
        grave: why bars with this flaw must not be called trustworthy, as the end of a headline;
            empty where they may be.
    """

    text: str
    grave: str = ""


def cautions(
    rows: Rows, calibration: CalibrationReport | None = None, reference: Tensor | None = None
) -> list[Caution]:
    """What to beware of, the weightiest first.

    Args:
        rows: what the report is about.
        calibration: how the bars were calibrated, where known.
        reference: bars of rows like those of the calibration.
    """
    found = [] if calibration is None else _of_calibration(calibration)
    checks = (
        _few(rows),
        _far_out(rows) if reference is None else _beyond(rows, reference),
        _repeated(rows),
        _outliers(rows),
        _biased(rows),
    )
    return found + [caution for caution in checks if caution]


def _of_calibration(report: CalibrationReport) -> list[Caution]:
    stale = Caution(
        "Data were added or removed since the calibration: calibrate again.",
        "they were calibrated for other data",
    )
    return ([stale] if report.stale else []) + [Caution(text) for text in report.warnings]


def _few(rows: Rows) -> Caution | None:
    if len(rows) < FEW:
        return Caution(f"There are {len(rows)} rows: every figure on this page may be chance.")
    if not bin_sizes(len(rows)):
        return Caution(f"There are {len(rows)} rows, too few for the plot of bins.")
    return None


def _beyond(rows: Rows, reference: Tensor) -> Caution | None:
    """Rows whose bar exceeds what the calibration data had: a sign of unlike inputs."""
    known = len(reference)
    rank = math.ceil(0.999 * known)
    limit = float(reference.kthvalue(rank).values)
    beyond = int((rows.std > limit).sum())
    # the share of like rows beyond this order statistic follows Beta(above, rank): a generous bound
    above = known - rank + 1
    expected = len(rows) * min(1.0, (above + 3 * math.sqrt(above) + 2) / known)
    if beyond <= expected + 3 * math.sqrt(expected):
        return None
    return Caution(
        f"{_share(beyond, rows)} have a bar above {number(limit)}, which 99.9 % of the reference "
        "rows stay below: their inputs are unlike those that the bars were calibrated on.",
        "some rows are unlike those that they were calibrated on",
    )


def _far_out(rows: Rows) -> Caution | None:
    """Without a reference all one can say is that some bars are much larger than most."""
    median = float(rows.std.median())
    far = int((rows.std > _FAR * median).sum())
    if not far:
        return None
    return Caution(
        f"{_share(far, rows)} have a bar more than {_FAR:g} times the median ({number(median)}): "
        "their inputs may be unlike the training data. Look at them in the plots."
    )


def _repeated(rows: Rows) -> Caution | None:
    columns = torch.stack([rows.mean, rows.std, rows.target], 1)
    copies = len(rows) - len(torch.unique(columns, dim=0))
    if copies <= 0.01 * len(rows):
        return None
    return Caution(
        f"{_share(copies, rows)} repeat an earlier row (same prediction, bar and true value): "
        "what chance allows is more than this page says."
    )


def _outliers(rows: Rows) -> Caution | None:
    # bars that are too narrow as a whole do not make tails heavy
    limit = _TAIL * max(1.0, needed_factor(rows))
    beyond = int((rows.z.abs() > limit).sum())
    expected = math.erfc(_TAIL / math.sqrt(2)) * len(rows)
    if beyond < 3 or beyond < 5 * expected:
        return None
    return Caution(
        f"{_share(beyond, rows)} err by more than {limit:.2g} bars, where Gaussian errors would "
        f"give {number(expected, 2)}: the errors have heavy tails, or these rows are faulty."
    )


def _biased(rows: Rows) -> Caution | None:
    mean = float(rows.z.mean())
    spread = float(rows.z.std()) if len(rows) > 1 else math.inf
    if abs(mean) < max(0.1, 4 * spread / math.sqrt(len(rows))):
        return None
    side = "low" if mean > 0 else "high"
    return Caution(
        f"The predictions are too {side} on average, by {number(abs(mean))} bars: bars cannot "
        "mend that, the model can.",
        f"the predictions are too {side} on average",
    )


def _share(count: int, rows: Rows) -> str:
    return f"{count} of {len(rows)} rows ({100 * count / len(rows):.2g} %)"
