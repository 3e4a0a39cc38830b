r"""Calibration of a rigidity: one pass over new data, and the report.

Every prediction gives its error and the powers $p_j$ of its tangent along the eigenvectors of the
Hessian, so that $q = \sum_j p_j / (\lambda_j + s)$ for every ridge s. The `calibration` room then
chooses ridge, scale and noise from these errors and powers.

The dense form has an eigenbasis, and every ridge can be tried. The other forms have a fixed ridge,
and so has a dense form whose ridge the user gave. Then one eigenvalue $\lambda$ and one power p are
made up so that $q = p / (\lambda + s)$: $p = 2 s q$ with $\lambda = s$, or $p = q$ with
$\lambda = 1$ where s is zero.
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
from ..losses import NO_ERROR_BARS, Loss, function_name, is_least_at_target
from ..notices import notify
from .curvature.forms import Form
from .derivatives.differentiation import Differentiation

UNLIKE = 3.0
"""Ratio between the outputs' best scales beyond which they should not share one."""

_REMEDY = "Use a noise that differs between rows (losses.GaussianNLL), or improve f there."


def calibration_report(
    differentiation: Differentiation,
    form: Form,
    batches: Iterable[SampleBatch],
    wanted: CalibrationOptions,
    loss: Loss,
) -> CalibrationReport:
    """Choose scale and noise, and the ridge unless it is fixed; see `PredictionRigidity.calibrate`.

    Args:
        differentiation: How to differentiate the regressor.
        form: The solved curvature, at the fixed ridge if there is one.
        batches: Data that were not used in the fit, with targets.
        wanted: The options of the calibration.
        loss: The loss of the fit.

    Returns:
        The choice, with remarks on how well it fits the data.

    Raises:
        ValueError: There are no targets, the loss is not one of regression, the criterion exists
            for the last layer only, or `Gathering` refuses the errors.
    """
    if wanted.criterion in {"evidence", "loo"}:
        raise ValueError(f"criterion={wanted.criterion!r} is for LastLayerRigidity.")
    ridge_is_searched = wanted.ridge is None
    basis = form.eigenbasis if ridge_is_searched else None
    # lambda + s of the made-up eigenvalue; any positive number will do where the ridge s is 0.
    shifted_eigenvalue = 2 * (form.ridge or 0.5)

    gathered = Gathering()
    standardised: list[Tensor] = []
    for batch in batches:
        prediction, tangents = differentiation(*batch.args, **batch.kwargs)
        target = batch.target_rows(prediction, differentiation.shape)
        if target is None:
            raise ValueError("Calibration needs targets: calibrate(x, y).")
        if not is_least_at_target(loss, target):
            raise ValueError(NO_ERROR_BARS.format(function_name(loss)))
        mean = prediction.to(torch.float64)
        error = target - mean  # (N, K)
        noise_shape = wanted.noise.shape(mean, None)
        if noise_shape is not None:
            noise_shape = noise_shape.expand(mean.shape).reshape(-1, 1)
        if basis is None:
            powers = shifted_eigenvalue * form.quadratic(tangents).reshape(-1, 1)  # (N K, 1)
        else:
            powers = basis.projections(tangents.matrix().flatten(0, 1)).square()  # (N K, P)
        gathered.add(error.reshape(-1, 1), powers, shape=noise_shape, mean=mean.reshape(-1, 1))
        if differentiation.outputs > 1:
            # In units of the unscaled error bars, to compare the outputs below.
            standardised.append(error / form.quadratic(tangents).sqrt())

    residuals = gathered.residuals()
    if basis is None:
        eigenvalues = residuals.error.new_tensor([shifted_eigenvalue - form.ridge])
    else:
        eigenvalues = basis.eigenvalues
    least_ridge = form.least_ridge if ridge_is_searched else -math.inf
    report = search_report(residuals, eigenvalues, form.with_ridge, wanted, least=least_ridge)
    report = replace(report, advice=_REMEDY)
    new_remarks = coverage_remarks(report, residuals, eigenvalues)
    report = replace(report, remarks=[*report.remarks, *new_remarks])
    if standardised:
        _warn_of_unlike_outputs(torch.cat(standardised))
    return report


def _warn_of_unlike_outputs(standardised: Tensor) -> None:
    """Warn where the best scales of the outputs are too different for a common scale.

    Args:
        standardised: Errors in units of their unscaled error bars, (N, K). The root mean square of
            a column is the best scale of that output.
    """
    scales = standardised.square().mean(0).sqrt()
    tiny = torch.finfo(scales.dtype).tiny
    ratio = float(scales.max() / scales.clamp(min=tiny).min())
    if ratio > UNLIKE:
        notify(
            f"The best scales of the outputs differ by a factor of {ratio:.2g}, but they share "
            "their parameters and therefore one scale. Weight the outputs in the loss "
            "(GaussianNLL with one variance each), or use one rigidity per output."
        )
