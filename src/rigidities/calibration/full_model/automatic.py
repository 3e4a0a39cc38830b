"""`criterion="auto"` for all targets: from the rows to the rung of the ladder that is taken."""

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
from ..calibration import Calibration, Support, Wanted
from ..report import CalibrationReport
from ..residuals import Residuals
from ..search import Evidence, Objective, most_evident_ridge, reported, search
from .ladder import MANY, PAPER, Ladder
from .scale_fit import GAUSSIAN_FAR
from .target_fit import BOUNDS, Parts, TargetFit
from .target_rows import FAR, Rows, clipped_mean, outlying, target_rows

HALF = 0.5
"""Share of their own predictions that training rows may decide, on average.

Beyond it a residual as if left out, r / (1 - c q), is mostly a small number over another."""
FEWEST = 2.0
"""Directions that the data must hold for the paper's form to be taken."""
NARROWEST = 1e-3
"""Of a large q, the least that a held-out row may have for the paper's form to be taken."""


def automatic(
    residuals: Residuals | None,
    seen: Residuals | None,
    eigenvalues: Tensor,
    solved: Callable[[float], Any],
    wanted: Wanted,
    *,
    evidence: Evidence | None = None,
    zero_curvature: int = 0,
    biases: Tensor | None = None,
) -> CalibrationReport:
    """The rung of the ladder that cross-validation takes, from one constant bar to the full model.

    The residuals of validation rows, and those of training rows that the fit has `seen`, keep
    "mean" and "inputs"; None where there are none. Without the evidence of ridges the likelihood
    of the validation rows chooses one. `biases` are the columns of the features that belong to
    biases, if that is known: what they explain of the targets is told from all rows, also where
    some are left out. The rest as in `chosen`.
    """
    ridge, edge = _ridge(residuals, eigenvalues, wanted, evidence)
    most = _largest_ridge(eigenvalues)
    swamping = wanted.ridge is None and ridge > most
    if swamping:
        ridge, edge = most, None
    memorised = 0
    if residuals is not None and seen is not None and leverage(seen, eigenvalues, ridge) > HALF:
        memorised, seen = len(seen.error), None
    rows = _rows(residuals, seen, eigenvalues, ridge, wanted.support)
    remarks = [*_far_rows(residuals, wanted), *_remarks(rows, wanted, memorised)]
    if swamping:
        remarks.append(
            "The best ridge would swamp every direction of the features, and bars would know no "
            f"unfamiliar inputs: it is held at {ridge:.4g}, where the data determine one direction."
        )
    if residuals is None and not wanted.optimism:  # left out, they are as good as new
        rows = [replace(one, seen=torch.zeros_like(one.seen)) for one in rows]
    rows = [one.with_forecast(biases) for one in rows]
    known = seen if residuals is None else residuals
    assert known is not None  # else there are no rows
    typical = known.typical.expand(1, len(rows))
    paper = None if residuals is None else Paper.found(residuals, eigenvalues, wanted)
    shared = all(part is None or part.kept["inputs"].ndim == 2 for part in (residuals, seen))
    features = None
    if shared and len(rows) > 1:  # masked rows of one target are known of another
        inputs = (known if seen is None else seen).kept["inputs"].to(torch.float64)
        features = inputs.mean(0), column_spread(inputs)
    paper_q, barred = None, frozenset[str]()
    if paper is not None:
        paper_q = [q[q.isfinite()] for q in paper.q.unbind(1)]
        few = min(map(len, rows)) < MANY
        if few or not _safe(paper, paper_q, eigenvalues):
            barred = frozenset({PAPER})
    aligned = residuals is not None and bool(residuals.error.isfinite().all())
    ladder = Ladder.of(rows, _parts(rows, wanted), paper_q, features, barred, aligned=aligned)
    rung = ladder.taken
    if paper is not None and rung == PAPER:
        ridge, edge = paper.calibration.ridge, None
        chosen, nll = paper.calibration, paper.nll
        rows = _rows(residuals, None, eigenvalues, ridge, wanted.support)
    else:
        fits = [each[rung] for each in ladder.fits]
        chosen = calibration(fits, ridge, wanted, typical[0], shared=shared)
        nll = ladder.nll(rung)
        remarks += _raised(fits)
    means = ladder.means
    return reported(
        solved(ridge),
        wanted,
        residuals,
        _errors(residuals, rows),
        ladder.gain,
        calibration=_with_joint(chosen, rows, typical),
        at_edge=edge,
        value=means.get(rung, nll),
        nll=nll,
        rung=rung,
        ladder=means,
        zero_curvature=zero_curvature,
        remarks=remarks,
        seen=0 if seen is None else len(seen.error),
    )


def _errors(residuals: Residuals | None, rows: list[Rows]) -> list[Tensor]:
    """Of each target's validation rows, none bounded; of the left-out training rows without any."""
    if residuals is None:
        return [one.held.residual for one in rows]
    return [column[column.isfinite()] for column in residuals.error.unbind(1)]


def _safe(paper: Paper, paper_q: list[Tensor], eigenvalues: Tensor) -> bool:
    """Whether the paper's form may be taken for the held-out rows' q (n,) of each target.

    It has no noise: of rows with hardly any q its bars would be next to nothing, as with trees
    whose leaves the training rows fill. And with fewer than two directions it is nearly constant
    and does not know what is far, which the constant bar does.
    """
    directions = float((eigenvalues / (eigenvalues + paper.calibration.ridge)).sum())
    usual = [float(torch.quantile(q, 0.9)) for q in paper_q]
    least = [float(q.min()) for q in paper_q]
    told = all(low > NARROWEST * high for low, high in zip(least, usual, strict=True))
    return told and directions >= FEWEST


def calibration(
    fits: list[TargetFit], ridge: float, wanted: Wanted, weight: Tensor, *, shared: bool
) -> Calibration:
    """The fits of all targets on one rung as everything after it uses them; no joint scale yet.

    `weight` is the typical one of each target's rows; `shared` says whether targets have the same
    features.
    """
    distribution = _distribution(fits)
    guards = [fit.guard for fit in fits if fit.guard is not None]
    level = torch.stack([fit.middle for fit in fits]).exp()
    level = level * torch.as_tensor(distribution.second).to(level)
    noise: Noise = ConstantNoise(level)
    if wanted.noise is GivenNoise:
        noise = GivenNoise(level, wanted.given)
    elif fits[0].headed:
        noise = FeatureNoise(level)
    weights = zip(
        *(fit.weights(TERMS * isinstance(distribution, Tilted)) for fit in fits), strict=True
    )
    own = (*weights, [fit.bounds for fit in fits], [fit.scale.scale2 for fit in fits])
    return Calibration(
        ridge=ridge,
        scale=torch.stack([fit.scale2 for fit in fits]).sqrt(),
        noise=noise,
        distribution=distribution,
        weight=weight,
        head=Head.of([fit.design.inputs for fit in fits], *own, shared=shared),
        guard=stacked(guards) if guards else None,
        support=wanted.support,
    )


def _distribution(fits: list[TargetFit]) -> Distribution:
    """Around all targets; its tilt is the head's."""
    if fits[0].scale.gaussian:
        return Gaussian()
    each = [fit.scale.df for fit in fits]
    df = torch.tensor(each, dtype=torch.float64) if len(each) > 1 else each[0]
    return StudentT(df) if fits[0].tilt is None else Tilted(df)


def leverage(seen: Residuals, eigenvalues: Tensor, ridge: float) -> float:
    """Mean share of its own prediction that a training row decides, c q."""
    q = seen.quadratic(eigenvalues, eigenvalues.new_tensor([ridge]))[..., 0]
    return float((seen.weight * q).mean())


@dataclass(frozen=True)
class Paper:
    """The paper's form: the likeliest, and its NLL and q (n, K), NaN where masked, of the rows."""

    calibration: Calibration
    nll: float
    q: Tensor

    @classmethod
    def found(cls, residuals: Residuals, eigenvalues: Tensor, wanted: Wanted) -> Paper | None:
        """For validation rows; None where there is none, as with features that are all zero."""
        own = replace(wanted, criterion="nll", noise=NoNoise, distribution=Gaussian(), given=None)
        objective = Objective(residuals, eigenvalues, own)
        if bool(objective.barless.any()):  # it gives rows whose features are zero no bar at all
            return None
        try:
            choice, _ = search(objective, wanted.ridge)
        except ValueError:
            return None
        q = residuals.quadratic(eigenvalues, eigenvalues.new_tensor([choice.ridge]))[..., 0]
        q = torch.where(residuals.error.isfinite(), q, math.nan)
        return cls(objective.calibration(choice), float(objective.nll(choice).nanmean()), q)


def _parts(rows: list[Rows], wanted: Wanted) -> Parts:
    """What is wanted of the full model, and possible; a tilt would learn the targets' grid."""
    tilted = isinstance(wanted.distribution, Tilted) and not any(one.step > 0 for one in rows)
    tails = not isinstance(wanted.distribution, Gaussian)
    return Parts(wanted.noise is FeatureNoise, tails, tilted, wanted.guard)


def _ridge(
    residuals: Residuals | None, eigenvalues: Tensor, wanted: Wanted, evidence: Evidence | None
) -> tuple[float, str | None]:
    """The one given, the most evident, or with a constant noise the likeliest."""
    if wanted.ridge is not None:
        return wanted.ridge, None
    if evidence is not None:
        try:
            ridge, _, edge = most_evident_ridge(evidence, float(eigenvalues.max()))
            return ridge, edge
        except ValueError:
            if residuals is None:
                raise
    if residuals is None:
        raise ValueError(
            "Without validation rows criterion='auto' needs the evidence of the training rows, and "
            "the fit has no residuals or no readout of its own. Call calibrate(x, y)."
        )
    likely = replace(wanted, criterion="nll", noise=ConstantNoise, distribution=Gaussian())
    choice, edge = search(Objective(residuals, eigenvalues, likely), None)
    return choice.ridge, edge


def _largest_ridge(eigenvalues: Tensor) -> float:
    """The ridge at which the data determine one direction; half of one, where there is but one.

    Beyond it the rank is near zero: q follows the length of the features alone.
    """
    lam = eigenvalues.reshape(-1, eigenvalues.shape[-1]).clamp(min=0)  # (K, D)
    if not bool(lam.any()):
        return math.inf  # no ridge changes anything
    least = (lam > 1e-12 * lam.max()).sum(1).clamp(max=2) / 2  # of each target
    low, high = math.log(float(lam.max()) * 1e-12), math.log(float(lam.sum(1).max()) * 4)
    for _ in range(60):  # bisection of the rank, which falls with the ridge
        middle = (low + high) / 2
        rank = (lam / (lam + math.exp(middle))).sum(1)
        if bool((rank >= least).all()):
            low = middle
        else:
            high = middle
    return math.exp(low)


def _rows(
    held: Residuals | None,
    seen: Residuals | None,
    eigenvalues: Tensor,
    ridge: float,
    support: Support | None,
) -> list[Rows]:
    """Of each target: training rows as if left out, then validation rows."""
    found: list[list[Rows]] = []
    for part, known in ((seen, True), (held, False)):
        if part is None:
            continue
        q = part.quadratic(eigenvalues, eigenvalues.new_tensor([ridge]))[..., 0]
        share = part.share if held is None else part.share * held.typical / part.typical
        mean, inputs = (part.kept[name].to(torch.float64) for name in ("mean", "inputs"))
        rows = []
        for k, error in enumerate(part.error.unbind(1)):
            own = inputs if inputs.ndim == 2 else inputs[:, k]
            columns = [t[:, min(k, t.shape[1] - 1)] for t in (q, part.weight, mean, share)]
            rows.append(target_rows([error, *columns, own], seen=known, support=support))
        found.append(rows)
    if not found:
        raise ValueError(
            "There is nothing to calibrate with: no data were given, and the fit kept no rows of "
            "its own. Call calibrate(x, y)."
        )
    joined = [Rows.join(list(parts)) for parts in zip(*found, strict=True)]
    if not all(map(len, joined)):
        raise ValueError("The model fits each row exactly, so none is left out. Calibrate on new.")
    return joined


def _with_joint(calibration: Calibration, rows: list[Rows], typical: Tensor) -> Calibration:
    r"""With the scale of what predictions share, $\alpha_B^2 = \overline{r^2 / (1/c + q)}$.

    That of Bayesian linear regression. A single prediction is at least as uncertain.
    """
    if isinstance(calibration.noise, GivenNoise):
        return calibration
    pairs = zip((one.held for one in rows), typical[0], strict=True)
    squares = (held.residual.square() / (held.share / c + held.q) for held, c in pairs)
    joint = torch.stack([clipped_mean(each).sqrt() for each in squares])
    return replace(calibration, scale=torch.maximum(calibration.scale, joint), joint=joint)


def _far_rows(residuals: Residuals | None, wanted: Wanted) -> list[str]:
    """Validation rows that count for less than they are, by name."""
    if residuals is None:
        return []
    far = GAUSSIAN_FAR if isinstance(wanted.distribution, Gaussian) else FAR
    said: list[str] = []
    for k, error in enumerate(residuals.error.unbind(1)):
        target = f"Target {k}: " if residuals.error.shape[1] > 1 else ""
        said += outlying(error, residuals.kept["number"], far, target)
    return said


def _raised(targets: list[TargetFit]) -> list[str]:
    """That a small noise was raised, since 99 % intervals would have missed too many rows."""
    said = []
    for k, fit in enumerate(targets):
        if fit.floor > BOUNDS:
            which = f"Target {k}: " if len(targets) > 1 else ""
            said.append(
                f"{which}Where the fitted noise is small, 99 % intervals missed too many rows, as "
                "with targets that are mostly one value: the lowest "
                f"{100 * fit.floor:g} % of the noise were raised to one level."
            )
    return said


def _remarks(rows: list[Rows], wanted: Wanted, memorised: int) -> list[str]:
    said = []
    held, seen = (min(int((one.seen == flag).sum()) for one in rows) for flag in (False, True))
    if not held and wanted.optimism:
        said.append(
            "There were no validation rows: training rows as if left out are optimistic for a net "
            "trained end to end. Calibrate on rows that the model has not seen."
        )
    if memorised:
        said.append(
            f"The {memorised} training rows were left aside: they decide most of their own "
            "predictions, so that their residuals say little. The validation rows alone decide."
        )
    elif not seen:
        why = "The fit holds no training rows (sample=0, or a file without rows=True)"
        why = "The noise of training rows is not known" if wanted.given else why
        said.append(f"{why}: the validation rows alone decide.")
    if held and wanted.stopping:
        said.append(wanted.stopping)
    if any(one.step > 0 for one in rows) and isinstance(wanted.distribution, Tilted):
        said.append(
            "The targets lie on a grid that is wide beside the residuals: the distribution has no tilt, "
            "which would learn the grid."
        )
    return said
