r"""The full model for all targets: from the rows to a report on the rung that is taken.

Data flow: the ridge comes from the evidence, or from the likelihood of the validation rows; at that
ridge each target has its view of the rows (`rows_of_targets`). All rungs, from one constant bar to
the full model, are fitted to them (`rung_fits`, by `target_fit`) and cross-validated
(`left_out_scores`), and one is taken (`best_rung`). The fits of that rung, or the paper's form,
become a `Calibration`, and that a report (`fit_full`).

Each held-out row is judged by fits without its fold. The richest rung is taken that is not worse
than any simpler one on these left-out rows. How much worse it may be depends on the number of rows
that were fitted to, held out or trained on. With many rows it may be worse by two standard errors,
since one regularised model beats a choice among several; with few it has to be shown to be better.

All targets take the same rung. Where there are many targets with the same rows, and enough rows,
each target is judged on one fold instead of all: the choice then rests on as many left-out rows as
that of one target would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..prediction.cosine_tilt import TERMS
from ..prediction.distribution import Distribution, Gaussian, StudentT, Tilted
from ..prediction.guards import stacked
from ..prediction.head import Head, column_spread
from ..prediction.noise import ConstantNoise, FeatureNoise, GivenNoise, Noise, NoNoise
from . import words
from .calibration import Calibration
from .gain import FEWEST_ROWS, FOLDS, Gain, constant_nll, error_of_sum, folds
from .methods import Full, Support
from .paper import Evidence, Objective, most_evident_ridge, search
from .report import CalibrationReport
from .report_numbers import RUNGS
from .robust import FAR, clipped_mean, reach
from .rows import Curvature, Rows, TargetView
from .scale_fit import GAUSSIAN_FAR, ScaleFit
from .target_fit import (
    BOUNDS,
    Components,
    Design,
    TargetFit,
    distribution_nll,
    fitted_target,
)

__all__ = ["fit_full"]

CONSTANT, PAPER, NOISE, TAILS, HEAD, FULL = RUNGS
"""What cross-validation compares, the simplest first.

From the third on, each has one component more than the one before. The constant bar has the
distribution's tails and the guard, so that it still grows beyond the data."""
LARGEST_LEVERAGE = 0.5
"""Largest mean leverage c q of training rows, the share of its own prediction that a row decides.

Beyond it a left-out residual r / (1 - c q) is mostly the ratio of two small numbers."""
FEWEST_DIRECTIONS = 2.0
"""Directions that the data must determine for the paper's form to be taken."""
NARROWEST = 1e-3
"""Least q of a held-out row, as a share of a large q, for the paper's form to be taken."""
CLEARLY = 2.0
"""Standard errors by which a rung is clearly worse than another."""
CAUTION = 1.0
"""Standard errors by which a rung must be better than all simpler ones with very few rows."""
FEW = 150
"""Number of fitted rows at which a rung must not be worse than simpler ones.

With fewer rows it must be better."""
MANY = 300
"""Number of fitted rows from which on a rung must only not be `CLEARLY` worse."""
ENOUGH = 200
"""Number of left-out rows of a target that is enough where other targets are judged too."""
_NAMED_ROWS = 5
"""Largest number of far rows that a remark names."""

Fits = dict[str, TargetFit]
"""One target's fit on each rung, except the paper's form."""
Features = tuple[Tensor, Tensor]
"""Centre and spread of the features that targets share."""


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
    """The report on the rung that cross-validation takes, from one constant bar to the full model.

    Without features ("inputs") in the rows, neither noise nor shape follow them.

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
    remarks = _far_row_remarks(validation, method)
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
    remarks += _row_remarks(method, tables, memorised, early_stopped)
    if limited:
        remarks.append(words.limited_ridge(ridge))
    if validation is None and not method.optimism:  # left-out rows are as good as new ones
        tables = [replace(table, seen=torch.zeros_like(table.seen)) for table in tables]
    tables = [table.with_forecast(biases) for table in tables]
    judged = training if validation is None else validation
    reference = validation if training is None else training
    assert judged is not None, "else there are no rows"
    assert reference is not None, "else there are no rows"
    paper = None
    if validation is not None:
        paper = PaperForm.likeliest(method, validation, eigenvalues, least_ridge)

    # All rungs are fitted to the rows of each target, and judged on left-out rows.
    components = _components(method, judged, tables)
    features = _common_features(reference)
    fewest = min(len(table.held_out) for table in tables)
    one_fold_each = (
        validation is not None
        and bool(validation.error.isfinite().all())
        and len(tables) >= FOLDS
        and fewest >= FOLDS * ENOUGH
    )
    fits: list[Fits] = []
    scores = []
    for target, table in enumerate(tables):
        design = Design.of(table, features, directed=components.columns)
        prepared = table
        if components.columns:  # once for all fits and folds
            prepared = design.applied(table)
        neighbour = fits[-1] if fits else None
        fits.append(rung_fits(prepared, components, design=design, neighbour=neighbour))
        if fewest >= FEWEST_ROWS:
            target_scores = left_out_scores(
                prepared,
                fits[-1],
                components,
                None if paper is None else paper.q_of_target(target),
                target % FOLDS if one_fold_each else None,
            )
            scores.append(target_scores)
    ladder = Ladder(tables, fits, scores, _barred(paper, tables, posterior, method.ridge))

    # The rung that is taken.
    rung = ladder.taken
    if paper is not None and rung == PAPER:
        ridge = paper.calibration.ridge
        edge = None
        calibration = paper.calibration
        nll = paper.nll
        tables = rows_of_targets(validation, None, eigenvalues, ridge, method.support)
    else:
        taken_fits = [target_fits[rung] for target_fits in fits]
        calibration = calibration_of_fits(method, taken_fits, ridge, judged)
        nll = ladder.nll(rung)
        for target, fit in enumerate(taken_fits):
            if fit.floor > BOUNDS:
                prefix = words.target_prefix(target, len(taken_fits))
                remarks.append(words.raised_noise(fit.floor, prefix))
    if validation is None:  # errors of left-out training rows
        errors = [table.held_out.residual for table in tables]
    else:  # far ones are not bounded here
        errors = [column[column.isfinite()] for column in validation.error.unbind(1)]
    means = ladder.means
    return CalibrationReport.of(
        method,
        _with_joint_scale(calibration, tables, judged),
        posterior.with_ridge(ridge),
        validation,
        errors,
        gain=ladder.gain,
        value=means.get(rung, nll),
        nll=nll,
        at_edge=edge,
        remarks=remarks,
        seen=0 if training is None else len(training),
        ladder=means,
        rung=rung,
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


def _common_features(rows: Rows) -> Features | None:
    """Centre and spread (P,) of the features that several targets share; None without such.

    They are taken over all rows: a row that is masked for one target may be known for another.
    """
    if rows.inputs is None or not rows.shares_inputs or rows.targets == 1:
        return None
    inputs = rows.inputs[:, 0].to(torch.float64)
    return inputs.mean(0), column_spread(inputs)


# --- what the rungs are compared with -------------------------------------------------------------


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
        cls, method: Full, validation: Rows, eigenvalues: Tensor, least_ridge: float
    ) -> PaperForm | None:
        """The likeliest ridge and scale; None where none exist, as with features of zero."""
        objective = Objective(
            validation,
            eigenvalues,
            noise=NoNoise,
            distribution=Gaussian(),
            least_ridge=least_ridge,
        )
        if bool(objective.barless.any()):  # it gives rows whose features are zero no bar at all
            return None
        try:
            choice, _ = search(objective, method.ridge)
        except ValueError:
            return None
        q = validation.quadratic_at(eigenvalues, choice.ridge)
        q = torch.where(validation.error.isfinite(), q, math.nan)
        nll = float(objective.nll(choice).nanmean())
        return cls(objective.calibration(choice, method), nll, q)

    def q_of_target(self, target: int) -> Tensor:
        """Unscaled variances of one target's rows that are not masked."""
        column = self.q[:, target]
        return column[column.isfinite()]

    def may_be_taken(self, directions: float) -> bool:
        """Whether it gives every row a usable bar.

        It has no noise: rows with hardly any q would have bars next to zero, as with trees whose
        leaves are full of training rows. With fewer than two directions it is nearly constant and,
        unlike the constant bar, does not grow far from the training rows.

        Args:
            directions: How many directions the data determine at its ridge; NaN where that is not
                known, as for curvatures of very many parameters.
        """
        for target in range(self.q.shape[1]):
            q = self.q_of_target(target)
            if not float(q.min()) > NARROWEST * float(torch.quantile(q, 0.9)):
                return False
        return not directions < FEWEST_DIRECTIONS  # NaN passes


def _barred(
    paper: PaperForm | None,
    tables: list[TargetView],
    posterior: Curvature,
    fixed_ridge: float | None,
) -> frozenset[str]:
    """Rungs that are not to be taken.

    That is the paper's form where there are few rows, or where it gives some rows no usable bar.
    """
    if paper is None:
        return frozenset()
    eigenvalues = posterior.eigenvalues
    if fixed_ridge is not None and eigenvalues.ndim == 1:
        # At a fixed ridge the eigenvalues may stand for all directions together.
        directions = posterior.with_ridge(fixed_ridge).effective_rank
    else:
        ridge = paper.calibration.ridge
        directions = float((eigenvalues / (eigenvalues + ridge)).sum())
    few = min(map(len, tables)) < MANY
    if few or not paper.may_be_taken(directions):
        return frozenset({PAPER})
    return frozenset()


def _components(method: Full, rows: Rows, tables: list[TargetView]) -> Components:
    """The components of the full model that are asked for, and possible.

    Targets on a grid get no tilt, which would learn the grid.
    """
    on_grid = any(table.grid_step > 0 for table in tables)
    has_inputs = rows.inputs is not None
    return Components(
        head=method.noise == "features" and has_inputs,
        tails=method.distribution != "gaussian",
        tilt=method.distribution == "tilted" and has_inputs and not on_grid,
        guard=method.guard,
    )


# --- the rungs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeftOutScores:
    """How well the rungs predict one target's held-out rows that were left out of their fits.

    Attributes:
        nll: The NLL of each row (n,) on each rung, the simplest first.
        places: Where the rows stand among all held-out rows, (n,).
        fold: The fold with which each row was left out, (n,).
        only_fold: The one fold that was left out; None where all were, one after the other.
    """

    nll: dict[str, Tensor]
    places: Tensor
    fold: Tensor
    only_fold: int | None = None

    def without(self, fold: int) -> LeftOutScores | None:
        """The rows that were left out with other folds; None where there are none."""
        others = self.fold != fold
        if not bool(others.any()):
            return None
        return self._subset(others)

    def _subset(self, which: Tensor) -> LeftOutScores:
        """Some of the rows, by booleans (n,)."""
        return LeftOutScores(
            nll={rung: nll[which] for rung, nll in self.nll.items()},
            places=self.places[which],
            fold=self.fold[which],
            only_fold=self.only_fold,
        )


@dataclass(frozen=True)
class Ladder:
    """All rungs of all targets.

    Attributes:
        rows: The rows of each target.
        fits: The fits to all rows of each target.
        scores: The scores of each target's left-out rows; empty where a target has too few.
        barred: Rungs that are not to be taken, however good.
    """

    rows: list[TargetView]
    fits: list[Fits]
    scores: list[LeftOutScores]
    barred: frozenset[str] = frozenset()

    @property
    def means(self) -> dict[str, float]:
        """Cross-validated NLL per row of each rung; empty where nothing was judged."""
        if not self.scores:
            return {}
        means = {}
        for rung in self.scores[0].nll:
            total = sum(float(target_scores.nll[rung].mean()) for target_scores in self.scores)
            means[rung] = total / len(self.rows)
        return means

    @property
    def taken(self) -> str:
        """The rung to take."""
        if self.scores:
            return best_rung(self.scores, self.barred, self.allowed)
        # Nothing was judged: the simplest rung for few rows, else the richest.
        names = list(self.fits[0])
        return names[0] if self.allowed < 0 else names[-1]

    @property
    def gain(self) -> Gain:
        """The gain over one constant bar of the rung that the other folds would have taken."""
        if not self.scores:
            return Gain()
        taken_nll = [torch.empty_like(scores.nll[CONSTANT]) for scores in self.scores]
        count = max(int(scores.fold.max()) for scores in self.scores) + 1
        for k in range(count):
            others = []
            for scores in self.scores:
                other_folds = scores.without(k)
                if other_folds is not None:
                    others.append(other_folds)
            rung = best_rung(others, self.barred, self.allowed)
            for nll, scores in zip(taken_nll, self.scores, strict=True):
                in_fold = scores.fold == k
                nll[in_fold] = scores.nll[rung][in_fold]
        gains = []
        for nll, scores, table in zip(taken_nll, self.scores, self.rows, strict=True):
            held_out = table.held_out
            constant = constant_nll(held_out.residual, held_out.side, held_out.sample)
            gains.append(constant[scores.places] - nll)
        return Gain.of(gains, [scores.only_fold for scores in self.scores])

    @property
    def allowed(self) -> float:
        """Standard errors by which a rung may be worse than simpler ones, by the rows fitted to."""
        rows = min(len(table) for table in self.rows)
        return min(CLEARLY, max(-CAUTION, CLEARLY * (rows - FEW) / (MANY - FEW)))

    def nll(self, rung: str) -> float:
        """The NLL per row on the held-out rows that the rung was fitted to."""
        means = []
        for fits, table in zip(self.fits, self.rows, strict=True):
            means.append(fits[rung].nll(table.held_out).mean())
        return float(torch.stack(means).mean())


def best_rung(scores: list[LeftOutScores], barred: frozenset[str], allowed: float) -> str:
    """The richest rung that is not worse than any simpler one by more than is allowed.

    Args:
        scores: The scores of each target's left-out rows.
        barred: Rungs that are neither taken nor compared with.
        allowed: Standard errors of the difference in NLL by which a rung may be worse; a negative
            number asks for a rung that is better by as much.
    """
    rungs = [rung for rung in scores[0].nll if rung not in barred]
    for place in range(len(rungs) - 1, 0, -1):
        if all(_within(scores, rungs[place], simpler, allowed) for simpler in rungs[:place]):
            return rungs[place]
    return rungs[0]


def _within(scores: list[LeftOutScores], rung: str, simpler: str, allowed: float) -> bool:
    """Whether a rung is worse than a simpler one by at most `allowed` standard errors.

    All targets have equal weight.
    """
    differences = [target_scores.nll[rung] - target_scores.nll[simpler] for target_scores in scores]
    mean = math.fsum(float(rows.mean()) for rows in differences)
    error = error_of_sum(differences, [target_scores.only_fold for target_scores in scores])
    return mean <= allowed * error  # false for NaN too


def rung_fits(
    rows: TargetView,
    components: Components,
    like: Fits | None = None,
    *,
    design: Design | None = None,
    neighbour: Fits | None = None,
) -> Fits:
    """The fits of one target's rows on all rungs but the paper's form.

    Rungs with components that are not asked for are left out.

    Args:
        rows: The rows.
        components: The components that are asked for.
        like: Fits to nearly the same rows, as in `fitted_target`.
        design: The design, as in `fitted_target`.
        neighbour: Fits of another target, as in `fitted_target`.
    """
    components_of = _rung_components(components)  # by rung
    fits: Fits = {}
    # The fits without a head, with tails (True) and without, which several rungs share.
    constants: dict[bool, ScaleFit | None] = {}
    for rung, rung_components in components_of.items():
        if rung == HEAD and FULL in components_of:
            continue  # it is the full model without its tilt
        fits[rung] = fitted_target(
            rows,
            rung_components,
            None if like is None else like[rung],
            design=design,
            constant=constants.get(rung_components.tails),
            neighbour=None if neighbour is None else neighbour[rung],
        )
        constants[rung_components.tails] = fits[rung].constant
    if HEAD in components_of and FULL in components_of:
        fits[HEAD] = replace(fits[FULL], tilt=None)
    return {rung: fits[rung] for rung in components_of}


def _rung_components(components: Components) -> dict[str, Components]:
    """The components of each rung, the simplest first, without those that are not asked for."""
    plain = replace(components, head=False, tilt=False)
    components_of = {
        CONSTANT: replace(plain, rigidity=False),
        NOISE: replace(plain, tails=False),
    }
    if components.tails:
        components_of[TAILS] = plain
    if components.head:
        components_of[HEAD] = replace(components, tilt=False)
    if components.tilt and components.tails:
        components_of[FULL] = components
    return components_of


def left_out_scores(
    rows: TargetView,
    fits: Fits,
    components: Components,
    paper_q: Tensor | None,
    only_fold: int | None = None,
) -> LeftOutScores:
    """The scores of one target's held-out rows, each left out with its fold.

    Args:
        rows: All rows of the target; training rows are left out only where there are no others.
        fits: The fits to all rows, whose units and penalties every fold takes.
        components: The components that are asked for.
        paper_q: q of the held-out rows at the ridge of the paper's form, (n,); None where that is
            not judged.
        only_fold: The one fold that is left out and judged; None for all of them.
    """
    held_out = ~rows.seen if bool((~rows.seen).any()) else rows.seen
    held_out_rows = held_out.nonzero()[:, 0]  # row numbers, (n,)
    sample = None if rows.sample is None else rows.sample[held_out_rows]
    fold = folds(len(held_out_rows), held_out_rows.device, sample)
    judged_folds = [only_fold]
    if only_fold is None:
        judged_folds = list(range(int(fold.max()) + 1))
    nll = {}
    for rung in RUNGS:
        if rung in fits or (rung == PAPER and paper_q is not None):
            nll[rung] = rows.q.new_empty(len(held_out_rows))
    for k in judged_folds:
        in_fold = fold == k
        remaining = torch.ones_like(rows.seen)
        remaining[held_out_rows[in_fold]] = False
        left_out = rows[held_out_rows[in_fold]]
        for rung, fit in rung_fits(rows[remaining], components, fits).items():
            nll[rung][in_fold] = fit.nll(left_out)
        if paper_q is not None:
            # The paper's form has one number to fit besides its ridge: the scale.
            others = rows.residual[held_out_rows[~in_fold]]
            scale2 = (others.square() / paper_q[~in_fold]).mean()
            nll[PAPER][in_fold] = distribution_nll(
                Gaussian(), left_out.residual, scale2 * paper_q[in_fold], left_out.side
            )
    scores = LeftOutScores(nll, torch.arange(len(held_out_rows), device=fold.device), fold)
    if only_fold is None:
        return scores
    return replace(scores._subset(fold == only_fold), only_fold=only_fold)


# --- from fits to a calibration -------------------------------------------------------------------


def calibration_of_fits(
    method: Full, fits: list[TargetFit], ridge: float, rows: Rows
) -> Calibration:
    """The fits of all targets on one rung as one `Calibration`, without a joint scale yet.

    Args:
        method: What is asked of the calibration.
        fits: The fit of each target.
        ridge: The ridge at which the rows were taken.
        rows: The rows whose typical weight the noise's level belongs to.
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
        shared=rows.shares_inputs,
    )
    guards = [fit.guard for fit in fits if fit.guard is not None]
    return Calibration(
        ridge=ridge,
        scale=torch.stack([fit.scale2 for fit in fits]).sqrt(),
        noise=_noise(method, fits, distribution),
        distribution=distribution,
        weight=rows.typical_weight.expand(1, len(fits))[0],
        head=head,
        guard=stacked(guards) if guards else None,
        support=method.support,
    )


def _noise(method: Full, fits: list[TargetFit], distribution: Distribution) -> Noise:
    """The noise, whose level is the variance at the median of the fitted log-noises."""
    level = torch.stack([fit.middle for fit in fits]).exp()
    level = level * torch.as_tensor(distribution.second).to(level)
    if method.noise_function is not None:
        return GivenNoise(level, method.noise_function)
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
    calibration: Calibration, tables: list[TargetView], rows: Rows
) -> Calibration:
    r"""The calibration with the scale of what predictions share.

    $\alpha_B^2 = \overline{r^2 / (1/c + q)}$ is that of Bayesian linear regression. A single
    prediction is at least as uncertain.

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


def _far_row_remarks(validation: Rows | None, method: Full) -> list[str]:
    """Remarks that name the validation rows whose far residuals are cut off."""
    if validation is None:
        return []
    far = GAUSSIAN_FAR if method.distribution == "gaussian" else FAR
    remarks = []
    for target, error in enumerate(validation.error.unbind(1)):
        farthest, count = far_rows(error, validation.number, far)
        if count:
            prefix = words.target_prefix(target, validation.targets)
            remarks.append(words.far_rows(farthest, count, far, prefix))
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
    method: Full, tables: list[TargetView], memorised: int, early_stopped: bool | None
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
    on_grid = any(table.grid_step > 0 for table in tables)
    if on_grid and method.distribution == "tilted":
        remarks.append(words.TARGETS_ON_GRID)
    return remarks
