r"""The rungs from one constant bar to the full model of `auto`: cross-validated, and one taken.

Each held-out row is judged by fits without its fold. The richest rung is taken that is not worse
than any simpler one on these left-out rows. How much worse it may be depends on the rows that were
fitted to, held out or trained on: of many by two standard errors, since one regularised model
beats a choice among several; of few it has to show that it is better.

All targets take the same rung. Where there are many of them and enough rows, the same of all, each
target is judged on one fold and not on all: the choice then rests on as many left-out rows as that
of one target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...prediction.distribution import Gaussian
from ..gain import FEWEST_ROWS, FOLDS, Gain, constant_nll, error_of_sum, folds
from .scale_fit import ScaleFit
from .target_fit import Design, Parts, TargetFit, distribution_nll, fitted
from .target_rows import Rows

CONSTANT, PAPER, NOISE, TAILS, HEAD, FULL = LADDER = (
    "constant bar",
    "paper",
    "constant noise",
    "heavy tails",
    "noise that follows the inputs",
    "full",
)
"""What cross-validation compares, the simplest first; from the third on each has one part more.

The constant bar has the distribution's tails and the guard, so that it still grows beyond the
data."""
CLEARLY = 2.0
"""Standard errors by which a rung is clearly worse than another."""
CAUTION = 1.0
"""Standard errors by which, of few rows, a rung must be better than all simpler ones."""
FEW, MANY = 150, 300
"""Rows fitted to: of the first number a rung must not be worse than simpler ones, of the second or
more it must not be clearly worse, of fewer it must be better."""
ENOUGH = 200
"""Left-out rows of a target that are enough beside those of other targets."""

Fits = dict[str, TargetFit]
"""One target's fit on each rung, but for the paper's form."""
Features = tuple[Tensor, Tensor]
"""Centre and spread of the features that targets share."""


@dataclass(frozen=True)
class Judged:
    """Held-out rows of one target that were left out of fits, and judged.

    Attributes:
        nll: of each of them (n,) on each rung, in the order of `LADDER`.
        places: where they stand among all held-out rows, (n,).
        fold: with which each was left out, (n,).
        only_fold: the one that was left out; None where all were, one after the other.
    """

    nll: dict[str, Tensor]
    places: Tensor
    fold: Tensor
    only_fold: int | None = None

    def without(self, fold: int) -> Judged | None:
        """The rows that were left out with other folds; None where there are none."""
        others = self.fold != fold
        if not bool(others.any()):
            return None
        nll = {name: each[others] for name, each in self.nll.items()}
        return Judged(nll, self.places[others], self.fold[others], self.only_fold)


@dataclass(frozen=True)
class Ladder:
    """All rungs of all targets.

    Attributes:
        rows: of each target.
        fits: to all of its rows.
        scores: of each target's left-out rows; none where a target has too few.
        barred: rungs that are not to be taken, however good.
    """

    rows: list[Rows]
    fits: list[Fits]
    scores: list[Judged]
    barred: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        rows: list[Rows],
        parts: Parts,
        paper_q: Sequence[Tensor] | None,
        features: Features | None,
        barred: frozenset[str] = frozenset(),
        *,
        aligned: bool = False,
    ) -> Ladder:
        """Fitted and judged.

        Args:
            rows: of each target.
            parts: that are wanted.
            paper_q: q of each target's held-out rows at the ridge of the paper's form, if any.
            features: where targets share them.
            barred: as above.
            aligned: whether all targets have the same held-out rows, none of them masked.
        """
        fewest = min(len(one.held) for one in rows)
        one_fold = aligned and len(rows) >= FOLDS and fewest >= FOLDS * ENOUGH
        fits: list[Fits] = []
        scores = []
        each_q = [None] * len(rows) if paper_q is None else paper_q
        for number, (one, q) in enumerate(zip(rows, each_q, strict=True)):
            directed = parts.head or parts.tilt
            design = Design.of(one, features, directed=directed)
            ready = design.applied(one) if directed else one  # once for all fits and folds
            neighbour = fits[-1] if fits else None
            fits.append(rungs(ready, parts, design=design, neighbour=neighbour))
            if fewest >= FEWEST_ROWS:
                only_fold = number % FOLDS if one_fold else None
                scores.append(judged(ready, fits[-1], parts, q, only_fold))
        return cls(rows, fits, scores, barred)

    @property
    def means(self) -> dict[str, float]:
        """Cross-validated NLL per row of each rung; empty where nothing was judged."""
        if not self.scores:
            return {}
        count = len(self.rows)
        return {
            name: sum(float(one.nll[name].mean()) for one in self.scores) / count
            for name in self.scores[0].nll
        }

    @property
    def taken(self) -> str:
        """The rung to take."""
        if not self.scores:  # nothing shows that a richer one is better
            return list(self.fits[0])[0 if self.allowed < 0 else -1]
        return best_rung(self.scores, self.barred, self.allowed)

    @property
    def gain(self) -> Gain:
        """Over one constant bar, of the rung that the other folds would have taken."""
        if not self.scores:
            return Gain()
        chosen = [torch.empty_like(one.nll[CONSTANT]) for one in self.scores]  # NLL of its rows
        for k in range(max(int(one.fold.max()) for one in self.scores) + 1):
            others = [rest for one in self.scores if (rest := one.without(k)) is not None]
            rung = best_rung(others, self.barred, self.allowed)
            for own, one in zip(chosen, self.scores, strict=True):
                own[one.fold == k] = one.nll[rung][one.fold == k]
        gains = []
        for own, one, rows in zip(chosen, self.scores, self.rows, strict=True):
            constant = constant_nll(rows.held.residual, rows.held.side)
            gains.append(constant[one.places] - own)
        return Gain.of(gains, [one.only_fold for one in self.scores])

    @property
    def allowed(self) -> float:
        """Standard errors by which a rung may be worse than simpler ones, by the rows fitted to."""
        rows = min(len(one) for one in self.rows)
        return min(CLEARLY, max(-CAUTION, CLEARLY * (rows - FEW) / (MANY - FEW)))

    def nll(self, rung: str) -> float:
        """Per row, on the held-out rows that the rung was fitted to."""
        pairs = zip(self.fits, self.rows, strict=True)
        return float(torch.stack([fits[rung].nll(one.held).mean() for fits, one in pairs]).mean())


def best_rung(scores: list[Judged], barred: frozenset[str], allowed: float) -> str:
    """The richest rung that is not worse than any simpler one by more than `allowed`.

    Differences are those of left-out rows' NLL in units of their standard error; a negative
    `allowed` asks for a rung that is better by so much. Barred rungs count for nothing.
    """
    names = [name for name in scores[0].nll if name not in barred]
    for at in range(len(names) - 1, 0, -1):
        if all(_within(scores, names[at], simpler, allowed) for simpler in names[:at]):
            return names[at]
    return names[0]


def _within(scores: list[Judged], rung: str, simpler: str, allowed: float) -> bool:
    """Whether a rung is worse than a simpler one by at most so many standard errors.

    Targets count alike.
    """
    differences = [one.nll[rung] - one.nll[simpler] for one in scores]
    mean = math.fsum(float(each.mean()) for each in differences)
    error = error_of_sum(differences, [one.only_fold for one in scores])
    return mean <= allowed * error  # false for NaN too


def rungs(
    rows: Rows,
    parts: Parts,
    like: Fits | None = None,
    *,
    design: Design | None = None,
    neighbour: Fits | None = None,
) -> Fits:
    """The fits of one target's rows by their names in `LADDER`, but for the paper's form.

    Those with parts that are not wanted are not among them. `like`, fits to nearly the same rows,
    `design` and `neighbour`, fits of another target, as in `fitted`.
    """
    plain = replace(parts, head=False, tilt=False)
    wanted = {CONSTANT: replace(plain, rigidity=False), NOISE: replace(plain, tails=False)}
    if parts.tails:
        wanted[TAILS] = plain
    if parts.head:
        wanted[HEAD] = replace(parts, tilt=False)
    if parts.tilt and parts.tails:
        wanted[FULL] = parts
    found: Fits = {}
    constants: dict[bool, ScaleFit | None] = {}  # with tails and without, for all rungs
    for name, own in wanted.items():
        if name == HEAD and FULL in wanted:
            continue  # it is the full model without its tilt
        found[name] = fitted(
            rows,
            own,
            None if like is None else like[name],
            design=design,
            constant=constants.get(own.tails),
            neighbour=None if neighbour is None else neighbour[name],
        )
        constants[own.tails] = found[name].constant
    if HEAD in wanted and FULL in wanted:
        found[HEAD] = replace(found[FULL], tilt=None)
    return {name: found[name] for name in wanted}


def judged(
    rows: Rows,
    whole: Fits,
    parts: Parts,
    paper_q: Tensor | None,
    only_fold: int | None = None,
) -> Judged:
    """NLL of held-out rows, each left out with its fold.

    Every fold takes the units and penalties of the fits to all rows, `whole`. `paper_q` (n,) is
    q of the held-out rows at the ridge of the paper's form; None where that is not judged. With
    `only_fold` no other fold is left out, and no other row judged.
    """
    held = ~rows.seen if bool((~rows.seen).any()) else rows.seen
    places = held.nonzero()[:, 0]
    fold = folds(len(places), places.device)
    names = [name for name in LADDER if name in whole or (name == PAPER and paper_q is not None)]
    found = {name: rows.q.new_empty(len(places)) for name in names}
    for k in range(int(fold.max()) + 1) if only_fold is None else [only_fold]:
        out = fold == k
        kept = torch.ones_like(rows.seen)
        kept[places[out]] = False
        rest, left = rows[kept], rows[places[out]]
        for name, fit in rungs(rest, parts, whole).items():
            found[name][out] = fit.nll(left)
        if paper_q is not None:
            scale2 = (rows.residual[places[~out]].square() / paper_q[~out]).mean()
            found[PAPER][out] = distribution_nll(
                Gaussian(), left.residual, scale2 * paper_q[out], left.side
            )
    if only_fold is None:
        return Judged(found, torch.arange(len(places), device=fold.device), fold)
    left_out = (fold == only_fold).nonzero()[:, 0]
    nll = {name: each[left_out] for name, each in found.items()}
    return Judged(nll, left_out, fold[left_out], only_fold)
