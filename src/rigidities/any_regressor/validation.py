r"""Calibration of a rigidity: one pass over new data, and the report.

Every prediction gives its error and the powers $p_j$ of its tangent along the eigenvectors of the
Hessian, so that $q = \sum_j p_j / (\lambda_j + s)$ for every ridge s. All outputs share one scale,
so each prediction is a row of one target. A method of the `calibration` room then chooses ridge,
scale, noise and distribution from these rows.

The dense form has an eigenbasis, and every ridge can be tried. The other forms have a fixed ridge,
and so has a dense form whose ridge the user gave. Then one eigenvalue $\lambda$ and one power p are
made up so that $q = p / (\lambda + s)$: $p = 2 s q$ with $\lambda = s$, or $p = q$ with
$\lambda = 1$ where s is zero.

The noise of the full model follows the components of the tangents along the leading eigenvectors
(`head_directions`). Forms without an eigenbasis have none, and their noise does not follow the
inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..calibration.conformal import Groups, group_labels
from ..calibration.coverage import coverage_remarks
from ..calibration.full import fit_full
from ..calibration.methods import Full, Method, Support
from ..calibration.paper import fit_paper
from ..calibration.report import CalibrationReport
from ..calibration.rows import RowCollector, Rows, require_within
from ..data.hashes import output_hashes, row_tensors, sample_hashes
from ..data.samples import SampleBatch
from ..losses import NO_ERROR_BARS, Loss, function_name, is_least_at_target
from ..prediction.noise import Noise
from .curvature.forms import Form
from .curvature.loss_terms import loss_terms
from .derivatives.differentiation import Differentiation

UNLIKE = 3.0
"""Ratio between the outputs' best scales beyond which they should not share one."""
MOST = 1 << 15
"""Most rows that the full model is fitted to, as in the last layer."""
MOST_DIRECTIONS = 256
"""Largest number of eigenvectors along which the noise looks at tangents."""

_REMEDY = "Use a noise that differs between rows (losses.GaussianNLL), or improve f there."
_NO_INPUTS = (
    "The {} form has no eigenbasis, so the noise does not follow the inputs. Use form='dense', "
    "with fewer parameters (subset=) if necessary."
)


@dataclass(frozen=True)
class FormCurvature:
    """A form as the `calibration` room sees it.

    Attributes:
        form: The solved curvature.
        eigenvalues: Those of its eigenbasis, or the one that was made up, (D,).
    """

    form: Form
    eigenvalues: Tensor

    @property
    def condition(self) -> float:
        """The condition number at the ridge."""
        return self.form.condition

    @property
    def effective_rank(self) -> float:
        """How many directions the data determine at the ridge; NaN where that is not known."""
        return self.form.effective_rank

    @property
    def width(self) -> int:
        """The number of parameters."""
        return self.form.width

    def with_ridge(self, ridge: float) -> FormCurvature:
        """The same with another ridge."""
        return replace(self, form=self.form.with_ridge(ridge))


@dataclass(frozen=True)
class RegressorRows:
    """Differentiates the regressor at new inputs, and collects the rows of a calibration.

    Attributes:
        differentiation: How to differentiate the regressor.
        form: The solved curvature, at the fixed ridge if there is one.
        loss: The loss of the fit.
        noise: The class of the noise, which gives its shape.
        support: The targets' bounds.
        ridge_is_fixed: Whether the ridge of the form is the only one of interest.
        typical_weight: The weight of a usual prediction in the Hessian.
        directions: Directions of the parameters along which the noise looks at tangents, (P, F);
            None where it does not follow the inputs.
        most: Largest number of rows in memory; by default that of `RowCollector`.
    """

    differentiation: Differentiation
    form: Form
    loss: Loss
    noise: type[Noise]
    support: Support | None
    ridge_is_fixed: bool
    typical_weight: float = 1.0
    directions: Tensor | None = None
    most: int | None = None

    @property
    def curvature(self) -> FormCurvature:
        """The form with the eigenvalues that belong to the rows' powers."""
        if not self.ridge_is_fixed:
            return FormCurvature(self.form, self.form.eigenbasis.eigenvalues)
        shift = self._shifted_eigenvalue - self.form.ridge
        device = self.differentiation.regressor.flat.device
        return FormCurvature(self.form, torch.tensor([shift], dtype=torch.float64, device=device))

    @property
    def _shifted_eigenvalue(self) -> float:
        """lambda + s of the made-up eigenvalue; any positive number will do where s is 0."""
        return 2 * (self.form.ridge or 0.5)

    def rows(
        self,
        batches: Iterable[SampleBatch],
        *,
        trained: bool = False,
        groups: Groups | None = None,
    ) -> tuple[Rows, float]:
        """The rows of one pass over data with targets.

        Args:
            batches: The data.
            trained: Whether the fit has seen them.
            groups: callable(batch) -> labels of samples for conformal scores, if any.

        Returns:
            The rows (N K, 1), and the ratio between the best scales of the outputs.

        Raises:
            ValueError: There are no targets, the loss is not one of regression, or
                `RowCollector` refuses the errors.
        """
        basis = None if self.ridge_is_fixed else self.form.eigenbasis
        collector = RowCollector(self.most)
        standardised = []
        for batch in batches:
            prediction, tangents = self.differentiation(*batch.args, **batch.kwargs)
            target = batch.target_rows(prediction, self.differentiation.shape)
            if target is None:
                raise ValueError("Calibration needs targets: calibrate(x, y).")
            if not is_least_at_target(self.loss, target):
                raise ValueError(NO_ERROR_BARS.format(function_name(self.loss)))
            require_within(target, self.support)
            mean = prediction.to(torch.float64)
            error = target - mean  # (N, K)
            noise_shape = self.noise.shape(mean, None)
            if noise_shape is not None:
                noise_shape = noise_shape.expand(mean.shape).reshape(-1, 1)
            weight = None
            if trained:  # the second derivative of the loss by each prediction
                terms = loss_terms(self.loss, prediction, target, batch.weight, batch.raw)
                weight = terms.diagonal.reshape(-1, 1)
            q = None
            if basis is None or self.differentiation.outputs > 1:
                q = self.form.quadratic(tangents)  # (N, K)
            if basis is None:
                assert q is not None
                powers = self._shifted_eigenvalue * q.reshape(-1, 1)  # (N K, 1)
            else:
                powers = basis.projections(tangents.matrix().flatten(0, 1)).square()  # (N K, P)
            inputs = None
            if self.directions is not None:
                inputs = tangents.matrix().flatten(0, 1).to(self.directions) @ self.directions
            labels = None
            if groups is not None:
                labels = group_labels(groups, batch.raw, prediction).reshape(-1, 1)
            hashes = sample_hashes(
                row_tensors(batch.inputs, len(mean), mean.device), batch.target, len(mean)
            )
            if hashes is not None:
                hashes = output_hashes(hashes, mean.numel(), None)
            collector.add(
                error.reshape(-1, 1),
                mean.reshape(-1, 1),
                powers,
                hashes=hashes,
                weight=weight,
                shape=noise_shape,
                inputs=inputs,
                labels=labels,
            )
            if q is not None and self.differentiation.outputs > 1:
                # In units of the unscaled error bars, to compare the outputs.
                standardised.append(error / q.sqrt())
        least = 1 if groups is not None else 2
        flat = self.differentiation.regressor.flat
        units = torch.full((1, 1), self.typical_weight, dtype=torch.float64, device=flat.device)
        rows = collector.table(
            least=least,
            trained=trained,
            units=units,
            outputs=self.differentiation.outputs,
        )
        return rows, _ratio_of_scales(standardised)


def head_directions(form: Form, method: Method) -> Tensor | None:
    """The leading eigenvectors that the noise of a method follows, (P, F).

    None where it does not follow the inputs, or the form has no eigenbasis.
    """
    if not isinstance(method, Full) or form.name != "dense":
        return None
    if method.noise != "features":
        return None
    return form.eigenbasis.eigenvectors[:, -MOST_DIRECTIONS:]


def report_on(
    method: Method,
    reader: RegressorRows,
    batches: Iterable[SampleBatch],
    train_batches: Iterable[SampleBatch] | None,
    early_stopped: bool | None,
) -> CalibrationReport:
    """Choose scale, noise and distribution, and the ridge unless it is fixed.

    See `PredictionRigidity.calibrate`.

    Args:
        method: What is asked of the calibration.
        reader: Reads rows off the regressor.
        batches: Data that were not used in the fit, with targets.
        train_batches: Data of the fit, if they are to be used too.
        early_stopped: Whether the validation rows chose the parameters; None if unknown.

    Returns:
        The choice, with remarks on how well it fits the data.
    """
    form = reader.form
    rows, ratio = reader.rows(batches)
    least_ridge = form.least_ridge if method.ridge is None else -math.inf
    curvature = reader.curvature
    if isinstance(method, Full):
        training = None
        if train_batches is not None:
            training, _ = reader.rows(train_batches, trained=True)
        report = fit_full(
            method,
            rows,
            training,
            curvature,
            early_stopped=early_stopped,
            least_ridge=least_ridge,
        )
        if training is None:
            # Training rows are an option here, and not missing.
            absent = "The fit kept no training rows"
            remarks = [text for text in report.remarks if not text.startswith(absent)]
            report = replace(report, remarks=remarks)
        if form.name != "dense" and method.noise == "features":
            report = replace(report, remarks=[_NO_INPUTS.format(form.name), *report.remarks])
    else:
        report = fit_paper(method, rows, curvature, least_ridge=least_ridge)
    report = replace(report, advice=_REMEDY, early_stopped=early_stopped)
    remarks = [*report.remarks, *coverage_remarks(report, rows, curvature.eigenvalues)]
    notices = report.notices
    if ratio > UNLIKE:
        notices = (
            *notices,
            f"The best scales of the outputs differ by a factor of {ratio:.2g}, but they share "
            "their parameters and therefore one scale. Weight the outputs in the loss "
            "(GaussianNLL with one variance each), or use one rigidity per output.",
        )
    return replace(report, remarks=remarks, notices=notices)


def _ratio_of_scales(standardised: list[Tensor]) -> float:
    """The ratio between the best scales of the outputs; 1 where there is one output.

    Args:
        standardised: Errors in units of their unscaled error bars, (N, K) of each batch. The root
            mean square of a column is the best scale of that output.
    """
    if not standardised:
        return 1.0
    scales = torch.cat(standardised).square().mean(0).sqrt()
    tiny = torch.finfo(scales.dtype).tiny
    return float(scales.max() / scales.clamp(min=tiny).min())
