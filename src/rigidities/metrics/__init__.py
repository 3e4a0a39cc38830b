"""How good error bars are, in numbers.

Throughout, mu is the predicted `mean`, sigma the predicted `std`, y the `target`, e = y - mu and
z = e / sigma. Each argument is a tensor, an array or a list. A `Prediction` p may replace mean and
std, as in `nll(p, target)`; likelihood, CRPS, coverage and intervals are then those of its
distribution.

All arguments have the same shape, up to dimensions of size one. They are flattened, and sums are
done in float64 on the CPU. Empty, non-finite or differently shaped input raises ValueError, as does
a `std` below zero, or equal to zero where a division or a logarithm needs it.

References:
    Scores: Gneiting and Raftery, "Strictly proper scoring rules, prediction, and estimation",
        JASA 2007.
    ENCE: Levi et al., "Evaluating and calibrating uncertainty prediction in regression tasks",
        Sensors 2022.
    AUSE: Ilg et al., "Uncertainty estimates and multi-hypotheses networks for optical flow",
        ECCV 2018.
    Bins: Bigi et al., "A prediction rigidity formalism for low-cost uncertainties in trained
        neural networks", 2024.
"""

from .bins import binned, binned_log_ratio, decades, ence, slope
from .ranking import auroc, ause, spearman
from .scores import (
    calibration_curve,
    coverage,
    crps,
    interval_score,
    interval_width,
    mae,
    miscalibration_area,
    nll,
    nll_gain,
    rmse,
    sharpness,
    summary,
)

__all__ = [
    "auroc",
    "ause",
    "binned",
    "binned_log_ratio",
    "calibration_curve",
    "coverage",
    "crps",
    "decades",
    "ence",
    "interval_score",
    "interval_width",
    "mae",
    "miscalibration_area",
    "nll",
    "nll_gain",
    "rmse",
    "sharpness",
    "slope",
    "spearman",
    "summary",
]


def __dir__() -> list[str]:
    return sorted(__all__)
