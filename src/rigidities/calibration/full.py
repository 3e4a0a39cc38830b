r"""The full model for all targets: from the rows to a report on it.

Data flow: the ridge comes from the evidence, or from the likelihood of the validation rows; at that
ridge each target has its view of the rows (`rows_of_targets`) and its density head (`target_fit`).
The heads of all targets become a `Calibration`, and that a report (`fit_full`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..prediction.distribution import Gaussian
from ..prediction.guards import Guard
from ..prediction.head import Head, head_from
from ..prediction.mixture import Mixture
from ..prediction.noise import ConstantNoise, FeatureNoise, GivenNoise, Noise
from . import words
from .calibration import Calibration
from .gain import Gain
from .ignorance import extent_weights
from .methods import Full, Support
from .paper import Evidence, Objective, most_evident_ridge, search
from .report import CalibrationReport
from .robust import FAR, clipped_mean, reach
from .rows import Curvature, Rows, TargetView
from .target_fit import Design, Plan, TargetFit, fitted_target

__all__ = ["fit_full"]

LARGEST_LEVERAGE = 0.5
"""Largest mean leverage c q of training rows, the share of its own prediction that a row decides.

Beyond it a left-out residual r / (1 - c q) is mostly the ratio of two small numbers."""
_NAMED_ROWS = 5
"""Largest number of far rows that a remark names."""


def fit_full(
    method: Full,
    validation: Rows | None,
    training: Rows | None,
    posterior: Curvature,
    *,
    evidence: Evidence | None = None,
    biases: Tensor | None = None,
    early_stopped: bool | None = None,
    least_ridge: float = -math.inf,
) -> CalibrationReport:
    """The report on the density heads of all targets.

    Without features ("inputs") in the rows, one distribution serves all rows.

    Args:
        method: What is asked of the calibration.
        validation: Validation rows; None where there are none.
        training: Training rows that the fit has seen; None without them.
        posterior: The eigenvalues of the basis of the rows' powers, and numbers at a ridge.
        evidence: The negative log evidence of ridges. Without it the likelihood of the validation
            rows chooses the ridge.
        biases: The columns of the features that belong to biases, if that is known. The ignorant
            forecast from these columns is fitted to all rows, even where some are left out.
        early_stopped: Whether the validation rows chose the model's checkpoint; None if unknown.
        least_ridge: Ridges up to here are not searched.

    Raises:
        ValueError: There are no rows to fit to, or no ridge can be chosen.
    """
    if method.ridge is not None:
        posterior.with_ridge(method.ridge)  # refuses a ridge that leaves a singular matrix
    eigenvalues = posterior.eigenvalues
    ridge, edge = _ridge(method, validation, eigenvalues, evidence, least_ridge)
    remarks = _far_row_remarks(validation)
    largest = math.inf if method.ridge is not None else _largest_ridge(eigenvalues)
    limited = ridge > largest
    if limited:
        ridge = largest
        edge = None
    memorised = 0
    if validation is not None and training is not None:
        leverage = float((training.weight * training.quadratic_at(eigenvalues, ridge)).mean())
        if leverage > LARGEST_LEVERAGE:
            memorised = len(training)
            training = None
    tables = rows_of_targets(validation, training, eigenvalues, ridge, method.support)
    if limited:
        remarks.append(words.limited_ridge(ridge))
    row_remarks = _row_remarks(tables, memorised, early_stopped, method)
    if not method.optimism:  # left-out rows are as good as new ones
        tables = [replace(table, seen=torch.zeros_like(table.seen)) for table in tables]
    judged = training if validation is None else validation
    reference = validation if training is None else training
    assert judged is not None, "else there are no rows"
    assert reference is not None, "else there are no rows"
    extent_weight = _extent_weights(validation, training, biases)
    known_noise = method.noise_class is GivenNoise
    tables = _with_forecasts(tables, extent_weight, known_noise=known_noise)
    remarks += row_remarks
    if any(table.grid_step > 0 for table in tables):
        remarks.append(words.TARGETS_ON_GRID)

    plan = Plan.of(tables, method, has_features=judged.inputs is not None)
    design = None
    if plan.follows_inputs and reference.shares_inputs:
        design = Design.of(max(tables, key=len).upright.in_order().intensive)
    fits = [fitted_target(table, plan, design) for table in tables]
    calibration = calibration_of_fits(method, fits, ridge, judged)
    if validation is None:  # errors of left-out training rows
        errors = [table.held_out.residual for table in tables]
    else:  # far ones are not bounded here
        errors = [column[column.isfinite()] for column in validation.error.unbind(1)]
    nll = math.fsum(fit.nll for fit in fits) / len(fits)
    return CalibrationReport.of(
        method,
        _with_joint_scale(calibration, tables, judged),
        posterior.with_ridge(ridge),
        validation,
        errors,
        gain=Gain.of([fit.gains for fit in fits]),
        value=nll,
        nll=nll,
        at_edge=edge,
        remarks=remarks,
        seen=0 if training is None else len(training),
        steps=[fit.step for fit in fits],
        early_stopped=early_stopped,
    )


# --- the ridge, and the rows at it ----------------------------------------------------------------


def _ridge(
    method: Full,
    validation: Rows | None,
    eigenvalues: Tensor,
    evidence: Evidence | None,
    least_ridge: float,
) -> tuple[float, str | None]:
    """The ridge of the method, the most evident one, or the likeliest with a constant noise.

    The second value is the edge of its range that it lies at, as in `search`.
    """
    if method.ridge is not None:
        return method.ridge, None
    if evidence is not None:
        try:
            ridge, _, edge = most_evident_ridge(evidence, float(eigenvalues.max()))
            return ridge, edge
        except ValueError:  # lost to rounding: the likelihood may still tell
            if validation is None:
                raise
    if validation is None:
        raise ValueError(
            "Without validation rows, method='full' needs the evidence of the training rows, "
            "but the fit has no residuals or no readout. Call calibrate(x, y)."
        )
    likelihood = Objective(
        validation,
        eigenvalues,
        noise=ConstantNoise,
        distribution=Gaussian(),
        least_ridge=least_ridge,
    )
    choice, edge = search(likelihood, None)
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


def rows_of_targets(
    validation: Rows | None,
    training: Rows | None,
    eigenvalues: Tensor,
    ridge: float,
    support: Support | None,
) -> list[TargetView]:
    """The rows of each target: training rows as if left out, then validation rows.

    Args:
        validation: The validation rows, if any.
        training: Training rows that the fit has seen, if any.
        eigenvalues: Those of the Gram, (D,) or (K, D).
        ridge: The ridge, at which q is taken.
        support: The targets' bounds.

    Raises:
        ValueError: There are no rows, or no training row can be left out.
    """
    views: list[TargetView] = []
    for rows in (training, validation):
        if rows is None:
            continue
        noise_factor = rows.noise_factor
        if validation is not None:  # noise is that of a typical validation row
            noise_factor = noise_factor * validation.typical_weight / rows.typical_weight
        q = rows.quadratic_at(eigenvalues, ridge)
        new_views = [rows.target(k, q, noise_factor, support) for k in range(rows.targets)]
        if views:
            pairs = zip(views, new_views, strict=True)
            new_views = [first.followed_by(second) for first, second in pairs]
        views = new_views
    if not views:
        raise ValueError(
            "There is nothing to calibrate on: no data were given, and the fit kept no rows. Call "
            "calibrate(x, y)."
        )
    if not all(map(len, views)):
        raise ValueError(
            "The model fits every row exactly, so leave-one-out errors do not exist. Calibrate on "
            "held-out rows."
        )
    return views


def _extent_weights(
    validation: Rows | None, training: Rows | None, biases: Tensor | None
) -> list[Tensor | None]:
    """Weights (P,) of the features that give a row's extent, for all targets or for each of them.

    They are None for readouts that do not sum. Rows count whether or not they have every target.

    Args:
        validation: The validation rows, if any.
        training: Training rows that the fit has seen, if any.
        biases: The columns of the features that belong to biases, if that is known.
    """
    inputs = [rows.inputs for rows in (training, validation) if rows is not None]
    of_features = [part for part in inputs if part is not None]  # (n, 1 or K, P) each
    if biases is None or not of_features:
        return [None]
    counts = torch.cat([part[..., biases] for part in of_features]).to(torch.float64)
    each = [extent_weights(of_target) for of_target in counts.unbind(1)]
    if all(weight is None for weight in each):
        return [None]
    # Where other targets are sums, weights of zero say that this one is not.
    weights = counts.new_zeros(len(each), of_features[0].shape[-1])
    for row, weight in zip(weights, each, strict=True):
        if weight is not None:
            row[biases] = weight
    return list(weights)


def _with_forecasts(
    tables: list[TargetView], extent_weight: list[Tensor | None], *, known_noise: bool
) -> list[TargetView]:
    """The rows of each target with their ignorant forecasts.

    Args:
        tables: The rows of each target.
        extent_weight: See `_extent_weights`.
        known_noise: Whether the user's function gives the noise.
    """
    each = extent_weight if len(extent_weight) > 1 else extent_weight * len(tables)
    return [
        table.with_forecast(weight, known_noise=known_noise)
        for table, weight in zip(tables, each, strict=True)
    ]


# --- from fits to a calibration -------------------------------------------------------------------


def calibration_of_fits(
    method: Full, fits: list[TargetFit], ridge: float, rows: Rows
) -> Calibration:
    """The heads of all targets as one `Calibration`, without a joint scale yet.

    Args:
        method: What is asked of the calibration.
        fits: The fit of each target.
        ridge: The ridge at which the rows were taken.
        rows: The rows whose typical weight the noise's level belongs to.
    """
    head = joined_heads([fit.head for fit in fits], shared=rows.shares_inputs)
    noise = _noise(method, head)
    if not any(fit.step for fit in fits):  # the networks of all targets are zero
        head = replace(head, network=None)
    guards = [fit.guard for fit in fits if fit.guard is not None]
    guard = None
    if guards:
        guard = Guard(
            reference=torch.cat([one.reference for one in guards]),
            variance=torch.cat([one.variance for one in guards]),
        )
    return Calibration(
        ridge=ridge,
        scale=torch.stack([fit.scale2 for fit in fits]).sqrt(),
        noise=noise,
        distribution=Mixture.of_shape(head.usual[:, 1:]),
        weight=rows.typical_weight.expand(1, len(fits))[0],
        head=head,
        guard=guard,
        support=method.support,
    )


def joined_heads(heads: Sequence[Head], *, shared: bool) -> Head:
    """Heads of one target each as one.

    Args:
        heads: The heads.
        shared: Whether all targets have the same features, standardised in the same way.
    """
    of_network = ("network.centre", "network.spread", "network.directions")
    of_features = (*of_network, "forecast.extent_weight")
    joined = {}
    for name in heads[0].tensors():
        of_targets = [head.tensors()[name] for head in heads]
        if shared and name in of_features:
            of_targets = of_targets[:1]
        joined[name] = torch.cat(of_targets)
    return head_from(joined)


def _noise(method: Full, head: Head) -> Noise:
    """The noise, whose level is that of a usual row."""
    usual = head.usual
    level = usual[:, 0].exp() * Mixture.of_shape(usual[:, 1:]).second
    if method.noise_function is not None:
        return GivenNoise(level, method.noise_function)
    if head.network is not None:
        return FeatureNoise(level)
    return ConstantNoise(level)


def _with_joint_scale(
    calibration: Calibration, tables: list[TargetView], rows: Rows
) -> Calibration:
    r"""The calibration with the scale of what predictions share.

    $\alpha_B^2 = \overline{r^2 / (1/c + q)}$ is that of Bayesian linear regression. The
    scale of single predictions is at least this.

    Args:
        calibration: The calibration without that scale.
        tables: The rows of each target.
        rows: The rows whose typical weight c in the Gram is meant.
    """
    if isinstance(calibration.noise, GivenNoise):
        return calibration
    weight_in_gram = rows.typical_weight_in_gram.expand(1, len(tables))[0]
    scales = []
    for table, weight in zip(tables, weight_in_gram, strict=True):
        held_out = table.held_out
        variance = held_out.noise_factor / weight + held_out.q
        scales.append(clipped_mean(held_out.residual.square() / variance).sqrt())
    joint = torch.stack(scales)
    return replace(calibration, scale=torch.maximum(calibration.scale, joint), joint=joint)


# --- remarks --------------------------------------------------------------------------------------


def _far_row_remarks(validation: Rows | None) -> list[str]:
    """Remarks that name the validation rows whose far residuals are cut off."""
    if validation is None:
        return []
    remarks = []
    for target, error in enumerate(validation.error.unbind(1)):
        farthest, count = far_rows(error, validation.number)
        if count:
            prefix = words.target_prefix(target, validation.targets)
            remarks.append(words.far_rows(farthest, count, FAR, prefix))
    return remarks


def far_rows(
    error: Tensor, number: Tensor, far: float = FAR
) -> tuple[list[tuple[int, float, float]], int]:
    """The farthest rows of one target beyond its reach, and how many there are.

    Args:
        error: Errors of validation rows, (n,); NaN where the target is masked.
        number: Their places in the data, (n,).
        far: Number of robust units beyond which rows are far.

    Returns:
        Place, residual and its size in robust units of at most five rows; the number of all.
    """
    finite = error.isfinite()
    error = error[finite]
    number = number[finite]
    limit = reach(error, far)
    beyond = (error.abs() > limit).nonzero()[:, 0]
    order = error[beyond].abs().argsort(descending=True)[:_NAMED_ROWS]
    farthest = []
    for i in beyond[order]:
        units = far * float(error[i].abs()) / limit
        farthest.append((int(number[i]), float(error[i]), units))
    return farthest, len(beyond)


def _row_remarks(
    tables: list[TargetView], memorised: int, early_stopped: bool | None, method: Full
) -> list[str]:
    """Remarks on what the rows lack, and what follows from it.

    `memorised` is the number of training rows that were left aside.
    """
    held_out_rows = min(int((~table.seen).sum()) for table in tables)
    training_rows = min(int(table.seen.sum()) for table in tables)
    remarks = []
    if not held_out_rows and method.optimism:
        remarks.append(words.NO_VALIDATION_ROWS)
    remarks += words.training_rows(
        training_rows, memorised, noise_is_given=method.noise_function is not None
    )
    early_stopping = words.early_stopping(early_stopped)
    if held_out_rows and early_stopping:
        remarks.append(early_stopping)
    return remarks
