r"""The rungs from one constant bar to the full model of `auto`: cross-validated, and one taken.

Each held-out row is judged by fits without its fold. The richest rung is taken that is not worse
than any simpler one on these left-out rows. How much worse it may be depends on the rows that were
fitted to, held out or trained on: of many by two standard errors, since one regularised model
beats a choice among several; of few it has to show that it is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..prediction.law import Gaussian
from .gain import FEWEST_ROWS, Gain, constant_nll, folds
from .rows import Rows
from .scale_fit import ScaleFit
from .target_fit import Design, Parts, TargetFit, fitted, law_nll

CONSTANT, PAPER, NOISE, TAILS, HEAD, FULL = LADDER = (
    "constant bar",
    "paper",
    "constant noise",
    "heavy tails",
    "noise that follows the inputs",
    "full",
)
"""What cross-validation compares, the simplest first; from the third on each has one part more.

The constant bar has the law's tails and the guard, so that it still grows beyond the data."""
CLEARLY = 2.0
"""Standard errors by which a rung is clearly worse than another."""
CAUTION = 1.0
"""Standard errors by which, of few rows, a rung must be better than all simpler ones."""
FEW, MANY = 150, 300
"""Rows fitted to: of the first number a rung must not be worse than simpler ones, of the second or
more it must not be clearly worse, of fewer it must be better."""

Scores = dict[str, Tensor]
"""NLL of each left-out row (n,) on each rung."""
Fits = dict[str, TargetFit]
"""One target's fit on each rung, but for the paper's form."""
Features = tuple[Tensor, Tensor]
"""Centre and spread of the features that targets share."""


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
    scores: list[Scores]
    barred: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        rows: list[Rows],
        parts: Parts,
        paper_q: Sequence[Tensor] | None,
        features: Features | None,
        barred: frozenset[str] = frozenset(),
    ) -> Ladder:
        """Fitted and judged.

        Args:
            rows: of each target.
            parts: that are wanted.
            paper_q: q of each target's held-out rows at the ridge of the paper's form, if any.
            features: where targets share them.
            barred: as above.
        """
        enough = min(len(one.held) for one in rows) >= FEWEST_ROWS
        fits, scores = [], []
        each_q = [None] * len(rows) if paper_q is None else paper_q
        for one, q in zip(rows, each_q, strict=True):
            directed = parts.head or parts.tilt
            design = Design.of(one, features, directed=directed)
            ready = design.applied(one) if directed else one  # once for all fits and folds
            fits.append(rungs(ready, parts, design=design))
            if enough:
                scores.append(judged(ready, fits[-1], parts, q))
        return cls(rows, fits, scores, barred)

    @property
    def means(self) -> dict[str, float]:
        """Cross-validated NLL per row of each rung; empty where nothing was judged."""
        if not self.scores:
            return {}
        names = self.scores[0]
        return {n: sum(float(one[n].mean()) for one in self.scores) / len(self.rows) for n in names}

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
        differences = [torch.empty_like(one[CONSTANT]) for one in self.scores]
        each_fold = [folds(len(one), one.device) for one in differences]
        for k in range(max(int(fold.max()) for fold in each_fold) + 1):
            others = [
                {name: nll[fold != k] for name, nll in one.items()}
                for one, fold in zip(self.scores, each_fold, strict=True)
            ]
            rung = best_rung(others, self.barred, self.allowed)
            for own, fold, one in zip(differences, each_fold, self.scores, strict=True):
                own[fold == k] = one[rung][fold == k]
        constant = [constant_nll(one.held.residual, one.held.side) for one in self.rows]
        return Gain.of([c - own for c, own in zip(constant, differences, strict=True)])

    @property
    def allowed(self) -> float:
        """Standard errors by which a rung may be worse than simpler ones, by the rows fitted to."""
        rows = min(len(one) for one in self.rows)
        return min(CLEARLY, max(-CAUTION, CLEARLY * (rows - FEW) / (MANY - FEW)))

    def nll(self, rung: str) -> float:
        """Per row, on the held-out rows that the rung was fitted to."""
        pairs = zip(self.fits, self.rows, strict=True)
        return float(torch.stack([fits[rung].nll(one.held).mean() for fits, one in pairs]).mean())


def best_rung(scores: list[Scores], barred: frozenset[str], allowed: float) -> str:
    """The richest rung that is not worse than any simpler one by more than `allowed`.

    Differences are those of left-out rows' NLL in units of their standard error; a negative
    `allowed` asks for a rung that is better by so much. Barred rungs count for nothing.
    """
    names = [name for name in scores[0] if name not in barred]
    for at in range(len(names) - 1, 0, -1):
        if all(_within(scores, names[at], simpler, allowed) for simpler in names[:at]):
            return names[at]
    return names[0]


def _within(scores: list[Scores], rung: str, simpler: str, allowed: float) -> bool:
    """Whether a rung is worse than a simpler one by at most so many standard errors.

    Targets count alike; their standard errors are averaged as if their errors were one another's.
    """
    differences = [one[rung] - one[simpler] for one in scores]
    mean = math.fsum(float(each.mean()) for each in differences)
    error = math.fsum(float(each.std()) / len(each) ** 0.5 for each in differences)
    return mean <= allowed * error  # false for NaN too


def rungs(rows: Rows, parts: Parts, like: Fits | None = None, design: Design | None = None) -> Fits:
    """The fits of one target's rows by their names in `LADDER`, but for the paper's form.

    Those with parts that are not wanted are not among them. `like`, fits to nearly the same rows,
    and `design` as in `fitted`.
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
        near, constant = None if like is None else like[name], constants.get(own.tails)
        found[name] = fitted(rows, own, near, design=design, constant=constant)
        constants[own.tails] = found[name].constant
    if HEAD in wanted and FULL in wanted:
        found[HEAD] = replace(found[FULL], tilt=None)
    return {name: found[name] for name in wanted}


def judged(rows: Rows, whole: Fits, parts: Parts, paper_q: Tensor | None) -> Scores:
    """NLL of each held-out row, left out of its fold, by rungs in the order of `LADDER`.

    Every fold takes the units and penalties of the fits to all rows, `whole`. `paper_q` (n,) is
    q of the held-out rows at the ridge of the paper's form; None where that is not judged.
    """
    held = ~rows.seen if bool((~rows.seen).any()) else rows.seen
    places = held.nonzero()[:, 0]
    fold = folds(len(places), places.device)
    names = [name for name in LADDER if name in whole or (name == PAPER and paper_q is not None)]
    found = {name: rows.q.new_empty(len(places)) for name in names}
    for k in range(int(fold.max()) + 1):
        out = fold == k
        kept = torch.ones_like(rows.seen)
        kept[places[out]] = False
        rest, left = rows[kept], rows[places[out]]
        for name, fit in rungs(rest, parts, whole).items():
            found[name][out] = fit.nll(left)
        if paper_q is not None:
            scale2 = (rows.residual[places[~out]].square() / paper_q[~out]).mean()
            found[PAPER][out] = law_nll(Gaussian(), left.residual, scale2 * paper_q[out], left.side)
    return found
