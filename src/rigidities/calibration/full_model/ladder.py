r"""The rungs from one constant bar to the full model of `auto`: cross-validated, and one taken.

Each held-out row is judged by fits without its fold. The richest rung is taken that is not worse
than any simpler one on these left-out rows. How much worse it may be depends on the number of rows
that were fitted to, held out or trained on. With many rows it may be worse by two standard errors,
since one regularised model beats a choice among several; with few it has to be shown to be better.

All targets take the same rung. Where there are many targets with the same rows, and enough rows,
each target is judged on one fold instead of all: the choice then rests on as many left-out rows as
that of one target would.

Data flow: `rung_fits` fits every rung to the rows of one target; `left_out_scores` does
so again without each fold and judges its rows; `Ladder` holds both for all targets, and `best_rung`
chooses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...prediction.distribution import Gaussian
from ..gain import FEWEST_ROWS, FOLDS, Gain, constant_nll, error_of_sum, folds
from ..report import RUNGS
from .scale_fit import ScaleFit
from .target_fit import Components, Design, TargetFit, distribution_nll, fitted_target
from .target_rows import TargetRows

CONSTANT, PAPER, NOISE, TAILS, HEAD, FULL = RUNGS
"""What cross-validation compares, the simplest first.

From the third on, each has one component more than the one before. The constant bar has the
distribution's tails and the guard, so that it still grows beyond the data."""
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

Fits = dict[str, TargetFit]
"""One target's fit on each rung, except the paper's form."""
Features = tuple[Tensor, Tensor]
"""Centre and spread of the features that targets share."""


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

    rows: list[TargetRows]
    fits: list[Fits]
    scores: list[LeftOutScores]
    barred: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        rows: list[TargetRows],
        components: Components,
        paper_q: Sequence[Tensor] | None,
        features: Features | None,
        barred: frozenset[str] = frozenset(),
        *,
        aligned: bool = False,
    ) -> Ladder:
        """The rungs fitted to the rows of each target, and judged.

        Args:
            rows: The rows of each target.
            components: The components that are asked for.
            paper_q: q of each target's held-out rows at the ridge of the paper's form, if any.
            features: The features' centre and spread, where targets share them.
            barred: Rungs that are not to be taken.
            aligned: Whether all targets have the same held-out rows, none of them masked.
        """
        fewest = min(len(table.held_out) for table in rows)
        one_fold_each = aligned and len(rows) >= FOLDS and fewest >= FOLDS * ENOUGH
        fits: list[Fits] = []
        scores = []
        for target, table in enumerate(rows):
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
                    None if paper_q is None else paper_q[target],
                    target % FOLDS if one_fold_each else None,
                )
                scores.append(target_scores)
        return cls(rows, fits, scores, barred)

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
            constant = constant_nll(table.held_out.residual, table.held_out.side)
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
    rows: TargetRows,
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
    rows: TargetRows,
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
    fold = folds(len(held_out_rows), held_out_rows.device)
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
