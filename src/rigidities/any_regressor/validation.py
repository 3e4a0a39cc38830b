r"""Calibration of a rigidity: one pass over new data, and the report.

The dense form has an eigenbasis, so that every ridge can be tried. The other forms keep their
ridge, and so does a fixed one: that reads as one effective eigenvalue $\lambda = s$ with
$q = p / (\lambda + s)$, $p = 2 s q$.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from ..calibration.calibration import CalibrationOptions
from ..calibration.coverage import coverage_remarks
from ..calibration.report import CalibrationReport
from ..calibration.residuals import Gathering
from ..calibration.search import search_report
from ..data.samples import SampleBatch
from ..notices import notify
from .curvature.forms import Form
from .derivatives.differentiation import Differentiation

UNLIKE = 3.0
"""Ratio of best scales beyond which outputs should not share one."""
_REMEDY = "Give f a noise that differs between rows (losses.GaussianNLL), or mend f there."


def calibrated(
    differentiation: Differentiation,
    form: Form,
    batches: Iterable[SampleBatch],
    wanted: CalibrationOptions,
) -> CalibrationReport:
    """Choose scale and noise, and a ridge that is not fixed; see `PredictionRigidity.calibrate`.

    Raises:
        ValueError: no targets, a criterion of the last layer, or what `Gathering` refuses.
    """
    if wanted.criterion in {"evidence", "loo"}:
        raise ValueError(f"criterion={wanted.criterion!r} is for LastLayerRigidity.")
    searching = wanted.ridge is None
    basis = form.eigenbasis if searching else None
    gathered, standard = Gathering(), list[Tensor]()
    for batch in batches:
        prediction, tangents = differentiation(*batch.args, **batch.kwargs)
        target = batch.target_rows(prediction, differentiation.shape)
        if target is None:
            raise ValueError("Calibration needs targets: calibrate(x, y).")
        mean = prediction.to(torch.float64)
        error, shape = target - mean, wanted.noise.shape(mean, None)
        column = None if shape is None else shape.expand(mean.shape).reshape(-1, 1)
        if basis is None:
            power = 2 * _shift(form) * form.quadratic(tangents).reshape(-1, 1)
        else:
            power = basis.projections(tangents.matrix().flatten(0, 1)).square()
        gathered.add(error.reshape(-1, 1), power, shape=column, mean=mean.reshape(-1, 1))
        if differentiation.outputs > 1:  # in units of the unscaled error bars
            standard.append(error / form.quadratic(tangents).sqrt())
    residuals = gathered.residuals()
    effective = residuals.error.new_tensor([2 * _shift(form) - form.ridge])
    eigenvalues = effective if basis is None else basis.eigenvalues
    least = form.least_ridge if searching else -math.inf
    report = search_report(residuals, eigenvalues, form.with_ridge, wanted, least=least)
    report = replace(report, advice=_REMEDY)
    said = coverage_remarks(report, residuals, eigenvalues)
    report = replace(report, remarks=[*report.remarks, *said])
    if standard:
        _compare(torch.cat(standard))
    return report


def _shift(form: Form) -> float:
    """The effective eigenvalue: the ridge, or 1/2 where there is none."""
    return form.ridge or 0.5


def _compare(standard: Tensor) -> None:
    """Warn where the best scales of the outputs (N, K) are so unlike that one cannot serve all."""
    rms = standard.square().mean(0).sqrt()
    ratio = float(rms.max() / rms.clamp(min=torch.finfo(rms.dtype).tiny).min())
    if ratio > UNLIKE:
        notify(
            f"The best scales of the outputs differ by a factor of {ratio:.2g}, and one serves "
            "them all, since they share their parameters. Weigh the outputs in the loss "
            "(GaussianNLL with one variance each), or make a rigidity for each."
        )
