"""`criterion="auto"` for all targets: from the rows to a report on the rung that is taken.

Data flow: the ridge comes from the evidence, or from the likelihood of the validation
rows; at that ridge each target gets its table of rows (`target_rows`); the ladder fits all rungs to
them and takes one (`ladder`); the fits of that rung, or the paper's form, become a `Calibration`,
and that a report.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...prediction.cosine_tilt import TERMS
from ...prediction.distribution import Distribution, Gaussian, StudentT, Tilted
from ...prediction.guards import stacked
from ...prediction.head import Head, column_spread
from ...prediction.noise import ConstantNoise, FeatureNoise, GivenNoise, Noise, NoNoise
from ..calibration import Calibration, CalibrationOptions
from ..report import CalibrationReport
from ..residuals import Residuals
from ..search import Evidence, Objective, completed_report, most_evident_ridge, search
from .ladder import MANY, PAPER, Ladder
from .scale_fit import GAUSSIAN_FAR
from .target_fit import BOUNDS, Components, TargetFit
from .target_rows import FAR, TargetRows, clipped_mean, outlier_remarks, rows_of_targets

LARGEST_LEVERAGE = 0.5
"""Largest mean leverage c q of training rows, the share of its own prediction that a row decides.

Beyond it a left-out residual r / (1 - c q) is mostly the ratio of two small numbers."""
FEWEST_DIRECTIONS = 2.0
"""Directions that the data must determine for the paper's form to be taken."""
NARROWEST = 1e-3
"""Least q of a held-out row, as a share of a large q, for the paper's form to be taken."""


def automatic_report(
    validation: Residuals | None,
    training: Residuals | None,
    eigenvalues: Tensor,
    curvature_at: Callable[[float], Any],
    options: CalibrationOptions,
    *,
    evidence: Evidence | None = None,
    zero_curvature: int = 0,
    biases: Tensor | None = None,
) -> CalibrationReport:
    """The report on the rung that cross-validation takes, from one constant bar to the full model.

    Args:
        validation: Validation rows, with the extra columns "mean" and "inputs"; None where there
            are none.
        training: Training rows that the fit has seen, with the same columns; None without them.
        eigenvalues: As in `search_report`.
        curvature_at: As in `search_report`.
        options: What is asked of the calibration.
        evidence: The negative log evidence of ridges. Without it the likelihood of the validation
            rows chooses the ridge.
        zero_curvature: As in `search_report`.
        biases: The columns of the features that belong to biases, if that is known. The ignorant
            forecast from these columns is fitted to all rows, even where some are left out.
    """
    data = RidgeRows.of(validation, training, eigenvalues, options, evidence, biases)
    paper = None
    if validation is not None:
        paper = PaperForm.likeliest(validation, eigenvalues, options)
    ladder = _ladder(data, paper, eigenvalues, options)
    rung = ladder.taken
    ridge = data.ridge
    edge = data.edge
    rows = data.rows
    remarks = data.remarks
    if paper is not None and rung == PAPER:
        ridge = paper.calibration.ridge
        edge = None
        calibration = paper.calibration
        nll = paper.nll
        rows = rows_of_targets(validation, None, eigenvalues, ridge, options.support)
    else:
        fits = [target_fits[rung] for target_fits in ladder.fits]
        calibration = calibration_of_fits(
            fits, ridge, options, data.typical_weight, shared=data.share_features
        )
        nll = ladder.nll(rung)
        remarks = [*remarks, *_raised_noise_remarks(fits)]
    means = ladder.means
    return completed_report(
        options,
        validation,
        _errors(validation, rows),
        calibration=_with_joint_scale(calibration, rows, data.typical_weight_in_gram),
        curvature=curvature_at(ridge),
        gain=ladder.gain,
        value=means.get(rung, nll),
        nll=nll,
        at_edge=edge,
        zero_curvature=zero_curvature,
        remarks=remarks,
        seen=0 if data.training is None else len(data.training.error),
        ladder=means,
        rung=rung,
    )


# --- the ridge, and the rows at it ----------------------------------------------------------------


@dataclass(frozen=True)
class RidgeRows:
    """The rows of all targets at one ridge, which the full model is fitted to.

    Attributes:
        validation: The validation rows as they were gathered, if any.
        training: The training rows that are used, if any.
        ridge: The ridge.
        edge: The edge of its range that the ridge lies at, as in `search`.
        rows: The rows of each target, with their ignorant forecast.
        remarks: Sentences on the rows and the ridge.
    """

    validation: Residuals | None
    training: Residuals | None
    ridge: float
    edge: str | None
    rows: list[TargetRows]
    remarks: list[str]

    @classmethod
    def of(
        cls,
        validation: Residuals | None,
        training: Residuals | None,
        eigenvalues: Tensor,
        options: CalibrationOptions,
        evidence: Evidence | None,
        biases: Tensor | None,
    ) -> RidgeRows:
        """The rows at the best ridge; the arguments are those of `automatic_report`."""
        ridge, edge = _ridge(validation, eigenvalues, options, evidence)
        largest = _largest_ridge(eigenvalues)
        swamping = options.ridge is None and ridge > largest
        if swamping:
            ridge = largest
            edge = None
        memorised = 0
        if validation is not None and training is not None:
            leverage = _mean_leverage(training, eigenvalues, ridge)
            if leverage > LARGEST_LEVERAGE:
                memorised = len(training.error)
                training = None

        rows = rows_of_targets(validation, training, eigenvalues, ridge, options.support)
        remarks = _outlier_remarks(validation, options)
        remarks += _row_remarks(rows, options, memorised)
        if swamping:
            remarks.append(
                "The best ridge would swamp every direction of the features, and the bars could "
                f"not recognise unfamiliar inputs. The ridge is limited to {ridge:.4g}, where the "
                "data determine one direction."
            )
        if validation is None and not options.optimism:  # left-out rows are as good as new ones
            rows = [replace(table, seen=torch.zeros_like(table.seen)) for table in rows]
        rows = [table.with_forecast(biases) for table in rows]
        return cls(validation, training, ridge, edge, rows, remarks)

    @property
    def typical_weight(self) -> Tensor:
        """The typical weight of the validation rows, or of the training rows without any, (K,)."""
        return self._judged.typical_weight.expand(1, len(self.rows))[0]

    @property
    def typical_weight_in_gram(self) -> Tensor:
        """The same times the units of the targets, (K,)."""
        return self._judged.typical_weight_in_gram.expand(1, len(self.rows))[0]

    @property
    def _judged(self) -> Residuals:
        """The validation rows, or the training rows without any."""
        residuals = self.training if self.validation is None else self.validation
        assert residuals is not None, "else there are no rows"
        return residuals

    @property
    def share_features(self) -> bool:
        """Whether all targets have the same features."""
        for residuals in (self.validation, self.training):
            if residuals is not None and residuals.extra["inputs"].ndim != 2:
                return False
        return True

    @property
    def common_features(self) -> tuple[Tensor, Tensor] | None:
        """Centre and spread (P,) of the features that several targets share; None without such.

        They are taken over all rows: a row that is masked for one target may be known for another.
        """
        if not self.share_features or len(self.rows) == 1:
            return None
        residuals = self.validation if self.training is None else self.training
        assert residuals is not None, "else there are no rows"
        inputs = residuals.extra["inputs"].to(torch.float64)
        return inputs.mean(0), column_spread(inputs)


def _ridge(
    validation: Residuals | None,
    eigenvalues: Tensor,
    options: CalibrationOptions,
    evidence: Evidence | None,
) -> tuple[float, str | None]:
    """The ridge of the options, the most evident one, or the likeliest with a constant noise.

    The second value is the edge of its range that it lies at, as in `search`.
    """
    if options.ridge is not None:
        return options.ridge, None
    if evidence is not None:
        try:
            ridge, _, edge = most_evident_ridge(evidence, float(eigenvalues.max()))
            return ridge, edge
        except ValueError:  # lost to rounding: the likelihood may still tell
            if validation is None:
                raise
    if validation is None:
        raise ValueError(
            "Without validation rows, criterion='auto' needs the evidence of the training rows, "
            "but the fit has no residuals or no readout. Call calibrate(x, y)."
        )
    likelihood = replace(options, criterion="nll", noise=ConstantNoise, distribution=Gaussian())
    choice, edge = search(Objective(validation, eigenvalues, likelihood), None)
    return choice.ridge, edge


def _largest_ridge(eigenvalues: Tensor) -> float:
    """The ridge at which the effective rank is one, or one half where there is only one direction.

    Beyond it the rank is near zero, and q follows only the length of the features.
    """
    eigenvalues = eigenvalues.reshape(-1, eigenvalues.shape[-1]).clamp(min=0)  # (K, D)
    if not bool(eigenvalues.any()):
        return math.inf  # no ridge changes anything
    directions = (eigenvalues > 1e-12 * eigenvalues.max()).sum(1)  # of each target
    least_rank = directions.clamp(max=2) / 2
    low = math.log(float(eigenvalues.max()) * 1e-12)
    high = math.log(float(eigenvalues.sum(1).max()) * 4)
    for _ in range(60):  # bisection of the rank, which falls with the ridge
        middle = (low + high) / 2
        rank = (eigenvalues / (eigenvalues + math.exp(middle))).sum(1)
        if bool((rank >= least_rank).all()):
            low = middle
        else:
            high = middle
    return math.exp(low)


def _mean_leverage(training: Residuals, eigenvalues: Tensor, ridge: float) -> float:
    """The mean share of its own prediction that a training row decides, c q."""
    q = training.quadratic_at(eigenvalues, ridge)
    return float((training.weight * q).mean())


def _errors(validation: Residuals | None, rows: list[TargetRows]) -> list[Tensor]:
    """The errors of each target's validation rows; of left-out training rows where there are none.

    Far errors of validation rows are not bounded here.
    """
    if validation is None:
        return [table.held_out.residual for table in rows]
    return [column[column.isfinite()] for column in validation.error.unbind(1)]


# --- what the ladder compares ---------------------------------------------------------------------


@dataclass(frozen=True)
class PaperForm:
    """The paper's form at its likeliest, for validation rows.

    Attributes:
        calibration: Ridge and scale; it has no noise.
        nll: The NLL per row.
        q: Unscaled variances at its ridge, (n, K); NaN where a target is masked.
    """

    calibration: Calibration
    nll: float
    q: Tensor

    @classmethod
    def likeliest(
        cls, validation: Residuals, eigenvalues: Tensor, options: CalibrationOptions
    ) -> PaperForm | None:
        """The likeliest ridge and scale; None where none exist, as with features of zero."""
        paper_options = replace(
            options,
            criterion="nll",
            noise=NoNoise,
            distribution=Gaussian(),
            noise_function=None,
        )
        objective = Objective(validation, eigenvalues, paper_options)
        if bool(objective.barless.any()):  # it gives rows whose features are zero no bar at all
            return None
        try:
            choice, _ = search(objective, options.ridge)
        except ValueError:
            return None
        q = validation.quadratic_at(eigenvalues, choice.ridge)
        q = torch.where(validation.error.isfinite(), q, math.nan)
        nll = float(objective.nll(choice).nanmean())
        return cls(objective.calibration(choice), nll, q)

    @property
    def q_of_targets(self) -> list[Tensor]:
        """Unscaled variances of each target's rows that are not masked."""
        return [column[column.isfinite()] for column in self.q.unbind(1)]

    def may_be_taken(self, eigenvalues: Tensor) -> bool:
        """Whether it gives every row a usable bar.

        It has no noise: rows with hardly any q would have bars next to zero, as with trees whose
        leaves are full of training rows. With fewer than two directions it is nearly constant and,
        unlike the constant bar, does not grow far from the training rows.
        """
        for q in self.q_of_targets:
            if not float(q.min()) > NARROWEST * float(torch.quantile(q, 0.9)):
                return False
        ridge = self.calibration.ridge
        directions = float((eigenvalues / (eigenvalues + ridge)).sum())
        return directions >= FEWEST_DIRECTIONS


def _ladder(
    data: RidgeRows, paper: PaperForm | None, eigenvalues: Tensor, options: CalibrationOptions
) -> Ladder:
    """All rungs fitted to the rows of each target, and judged."""
    validation = data.validation
    return Ladder.of(
        data.rows,
        _components(data.rows, options),
        paper_q=None if paper is None else paper.q_of_targets,
        features=data.common_features,
        barred=_barred(paper, data.rows, eigenvalues),
        aligned=validation is not None and bool(validation.error.isfinite().all()),
    )


def _barred(paper: PaperForm | None, rows: list[TargetRows], eigenvalues: Tensor) -> frozenset[str]:
    """Rungs that are not to be taken.

    That is the paper's form where there are few rows, or where it gives some rows no usable bar.
    """
    if paper is None:
        return frozenset()
    few = min(map(len, rows)) < MANY
    if few or not paper.may_be_taken(eigenvalues):
        return frozenset({PAPER})
    return frozenset()


def _components(rows: list[TargetRows], options: CalibrationOptions) -> Components:
    """The components of the full model that are asked for, and possible.

    Targets on a grid get no tilt, which would learn the grid.
    """
    on_grid = any(table.grid_step > 0 for table in rows)
    return Components(
        head=options.noise is FeatureNoise,
        tails=not isinstance(options.distribution, Gaussian),
        tilt=isinstance(options.distribution, Tilted) and not on_grid,
        guard=options.guard,
    )


# --- from fits to a calibration -------------------------------------------------------------------


def calibration_of_fits(
    fits: list[TargetFit],
    ridge: float,
    options: CalibrationOptions,
    weight: Tensor,
    *,
    shared: bool,
) -> Calibration:
    """The fits of all targets on one rung as one `Calibration`.

    Args:
        fits: The fit of each target.
        ridge: The ridge at which the rows were taken.
        options: What is asked of the calibration.
        weight: The typical weight of each target's rows, (K,).
        shared: Whether targets have the same features.

    Returns:
        The calibration, without a joint scale yet.
    """
    distribution = _distribution(fits)
    tilts = TERMS if isinstance(distribution, Tilted) else 0
    head_weights = []
    head_constants = []
    for fit in fits:
        head_weight, head_constant = fit.head_weights(tilts)
        head_weights.append(head_weight)
        head_constants.append(head_constant)
    head = Head.of(
        [fit.design.inputs for fit in fits],
        head_weights,
        head_constants,
        [fit.bounds for fit in fits],
        [fit.scale.scale2 for fit in fits],
        shared=shared,
    )
    guards = [fit.guard for fit in fits if fit.guard is not None]
    return Calibration(
        ridge=ridge,
        scale=torch.stack([fit.scale2 for fit in fits]).sqrt(),
        noise=_noise(fits, distribution, options),
        distribution=distribution,
        weight=weight,
        head=head,
        guard=stacked(guards) if guards else None,
        support=options.support,
    )


def _noise(fits: list[TargetFit], distribution: Distribution, options: CalibrationOptions) -> Noise:
    """The noise, whose level is the variance at the median of the fitted log-noises."""
    level = torch.stack([fit.middle for fit in fits]).exp()
    level = level * torch.as_tensor(distribution.second).to(level)
    if options.noise is GivenNoise:
        return GivenNoise(level, options.noise_function)
    if fits[0].headed:
        return FeatureNoise(level)
    return ConstantNoise(level)


def _distribution(fits: list[TargetFit]) -> Distribution:
    """The distribution around all targets; its tilt is the head's."""
    if fits[0].scale.gaussian:
        return Gaussian()
    target_df = [fit.scale.df for fit in fits]
    df: float | Tensor = target_df[0]
    if len(target_df) > 1:
        df = torch.tensor(target_df, dtype=torch.float64)
    return StudentT(df) if fits[0].tilt is None else Tilted(df)


def _with_joint_scale(
    calibration: Calibration, rows: list[TargetRows], weight_in_gram: Tensor
) -> Calibration:
    r"""The calibration with the scale of what predictions share.

    $\alpha_B^2 = \overline{r^2 / (1/c + q)}$ is that of Bayesian linear regression. A single
    prediction is at least as uncertain.

    Args:
        calibration: The calibration without that scale.
        rows: The rows of each target.
        weight_in_gram: The typical weight c of each target's rows in the Gram, (K,).
    """
    if isinstance(calibration.noise, GivenNoise):
        return calibration
    scales = []
    for table, weight in zip(rows, weight_in_gram, strict=True):
        held_out = table.held_out
        variance = held_out.noise_factor / weight + held_out.q
        scales.append(clipped_mean(held_out.residual.square() / variance).sqrt())
    joint = torch.stack(scales)
    return replace(calibration, scale=torch.maximum(calibration.scale, joint), joint=joint)


# --- remarks --------------------------------------------------------------------------------------


def _outlier_remarks(validation: Residuals | None, options: CalibrationOptions) -> list[str]:
    """Remarks that name the validation rows whose far residuals are cut off."""
    if validation is None:
        return []
    far = GAUSSIAN_FAR if isinstance(options.distribution, Gaussian) else FAR
    remarks: list[str] = []
    targets = validation.error.shape[1]
    for target, error in enumerate(validation.error.unbind(1)):
        remarks += outlier_remarks(
            error, validation.extra["number"], far, _target_prefix(target, targets)
        )
    return remarks


def _raised_noise_remarks(fits: list[TargetFit]) -> list[str]:
    """Remarks that a small noise was raised, since 99 % intervals missed too many rows."""
    remarks = []
    for target, fit in enumerate(fits):
        if fit.floor > BOUNDS:
            remarks.append(
                f"{_target_prefix(target, len(fits))}Where the fitted noise was small, 99 % "
                "intervals missed too many rows, as happens if most targets have the same value. "
                f"The lowest {100 * fit.floor:g} % of the noise levels were raised to one level."
            )
    return remarks


def _target_prefix(target: int, targets: int) -> str:
    """Words that name a remark's target; empty where there is one target."""
    return f"Target {target}: " if targets > 1 else ""


def _row_remarks(rows: list[TargetRows], options: CalibrationOptions, memorised: int) -> list[str]:
    """Remarks on what the rows lack, and what follows from it.

    `memorised` is the number of training rows that were left aside.
    """
    held_out_rows = min(int((~table.seen).sum()) for table in rows)
    training_rows = min(int(table.seen.sum()) for table in rows)
    remarks = []
    if not held_out_rows and options.optimism:
        remarks.append(
            "There were no validation rows. Leave-one-out errors of training rows are optimistic "
            "for a network trained end to end. Calibrate on held-out rows."
        )
    if memorised:
        remarks.append(
            f"The {memorised} training rows were not used: each decides most of its own "
            "prediction, so its residual says little. Only the validation rows were used."
        )
    elif not training_rows:
        why = "The fit kept no training rows (sample=0, or a file saved without rows=True)"
        if options.noise_function:
            why = "The noise of training rows is not known"
        remarks.append(f"{why}: only the validation rows were used.")
    if held_out_rows and options.early_stopping_remark:
        remarks.append(options.early_stopping_remark)
    if any(table.grid_step > 0 for table in rows) and isinstance(options.distribution, Tilted):
        remarks.append(
            "The targets lie on a grid that is coarse compared with the residuals. The "
            "distribution has no tilt, because a tilt would learn the grid."
        )
    return remarks
