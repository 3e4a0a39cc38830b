"""`criterion="auto"` for all targets: the full model, judged against the paper's form."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..prediction.cosine_tilt import TERMS
from ..prediction.head import Guard, Head, column_spread
from ..prediction.law import Gaussian, Law, StudentT, Tilted
from ..prediction.noise import ConstantNoise, FeatureNoise, GivenNoise, NoNoise
from .calibration import Calibration, Support, Wanted
from .choosing import Evidence, reported
from .evidence import most_evident_ridge
from .gathering import Residuals
from .objective import Objective, search
from .report import CalibrationReport
from .rows import FAR, Rows, clipped_mean, outlying, target_rows
from .scale_fit import GAUSSIAN_FAR
from .target_fit import BOUNDS, CLEARLY, LADDER, Parts, TargetFit, fitted, judged, law_nll

FEWEST = 2.0
"""Directions that the data must hold: with fewer the paper's bars do not know what is far."""


@dataclass(frozen=True)
class Full:
    """The full model of all targets: what was fitted, and how it stands against the paper's form.

    Attributes:
        targets: one fit each.
        rows: they were fitted to.
        ladder: mean cross-validated NLL on each rung of `LADDER`; empty without validation rows.
        worse: standard errors by which the full model is worse than the paper's form.
    """

    targets: list[TargetFit]
    rows: list[Rows]
    ladder: dict[str, float]
    worse: float

    @property
    def nll(self) -> float:
        """Per row, on the validation rows."""
        own = [fit.nll(one.held).mean() for fit, one in zip(self.targets, self.rows, strict=True)]
        return float(torch.stack(own).mean())

    @classmethod
    def of(
        cls,
        rows: list[Rows],
        parts: Parts,
        paper_q: Tensor | None,
        features: tuple[Tensor, Tensor] | None,
    ) -> Full:
        """Fitted and judged; `paper_q` (n, K) is that of the validation rows, NaN where masked.

        `features` are centre and spread of those that targets share.
        """
        targets = [fitted(one, parts, features=features) for one in rows]
        columns = () if paper_q is None else paper_q.unbind(1)
        known = [q[q.isfinite()] for q in columns]
        each_target = zip(rows, targets, known, strict=False)  # none without validation rows
        found = [judged(one, fit, parts, q) for one, fit, q in each_target if len(q) > 2]
        if not found:
            return cls(targets, rows, {}, 0.0)
        each = torch.cat(found)
        difference = each[:, -1] - each[:, 0]
        error = difference.std() / len(difference) ** 0.5
        worse = float(difference.mean() / error) if bool(error > 0) else 0.0
        means = torch.stack([one.mean(0) for one in found]).mean(0).tolist()
        return cls(targets, rows, dict(zip(LADDER, means, strict=True)), worse)

    def calibration(
        self, ridge: float, wanted: Wanted, weight: Tensor, *, shared: bool
    ) -> Calibration:
        """As everything after it uses it; without the joint scale."""
        fits, law = self.targets, self._law()
        guards = [(g.scale2, g.reference) for fit in fits if (g := fit.guard) is not None]
        level = torch.stack([fit.middle for fit in fits]).exp()
        level = level * torch.as_tensor(law.second).to(level)
        kinds = {GivenNoise: GivenNoise(level, wanted.given), FeatureNoise: FeatureNoise(level)}
        weights = zip(*(fit.weights(TERMS * isinstance(law, Tilted)) for fit in fits), strict=True)
        own = (*weights, [fit.bounds for fit in fits], [fit.scale.scale2 for fit in fits])
        head = Head.of([fit.inputs for fit in fits], *own, shared=shared)
        scale = torch.stack([fit.scale2 for fit in fits]).sqrt()
        noise = kinds.get(wanted.noise, ConstantNoise(level))
        guard = Guard(*map(torch.stack, zip(*guards, strict=True))) if guards else None
        parts = (ridge, scale, noise, law, weight)
        return Calibration(*parts, head=head, guard=guard, support=wanted.support)

    def _law(self) -> Law:
        """Around all targets; its tilt is the head's."""
        fits = self.targets
        if fits[0].scale.gaussian:
            return Gaussian()
        each = [fit.scale.df for fit in fits]
        df = torch.tensor(each, dtype=torch.float64) if len(each) > 1 else each[0]
        return StudentT(df) if fits[0].tilt is None else Tilted(df)


def automatic(
    residuals: Residuals | None,
    seen: Residuals | None,
    eigenvalues: Tensor,
    solved: Callable[[float], Any],
    wanted: Wanted,
    *,
    evidence: Evidence | None = None,
    zero_curvature: int = 0,
) -> CalibrationReport:
    """The full model, or the paper's form where that is clearly better.

    The residuals of validation rows, and those of training rows that the fit has `seen`, keep
    "mean" and "inputs"; None where there are none. Without the evidence of ridges the likelihood
    of the validation rows chooses one. The rest as in `chosen`.
    """
    ridge, edge = _ridge(residuals, eigenvalues, wanted, evidence)
    rows = _rows(residuals, seen, eigenvalues, ridge, wanted.support)
    remarks = [*_far_rows(residuals, wanted), *_remarks(rows, wanted)]
    if residuals is None and not wanted.optimism:  # left out, they are as good as new
        rows = [replace(one, seen=torch.zeros_like(one.seen)) for one in rows]
    known = seen if residuals is None else residuals
    assert known is not None  # else there are no rows
    typical = known.typical.expand(1, len(rows))
    paper = None if residuals is None else Paper.found(residuals, eigenvalues, wanted)
    shared = all(part is None or part.kept["inputs"].ndim == 2 for part in (residuals, seen))
    features = None
    if shared and len(rows) > 1:  # masked rows of one target are known of another
        inputs = (known if seen is None else seen).kept["inputs"].to(torch.float64)
        features = inputs.mean(0), column_spread(inputs)
    paper_q = None if paper is None else paper.q
    full = Full.of(rows, _parts(rows, wanted), paper_q, features)
    if paper is not None and full.worse > CLEARLY and wanted.given is None:
        plain = replace(wanted, noise=ConstantNoise, law=Gaussian())
        simple = Full.of(rows, _parts(rows, plain), paper_q, features)
        held = float((eigenvalues / (eigenvalues + paper.calibration.ridge)).sum())
        if simple.worse <= CLEARLY or held < FEWEST:
            full, wanted, paper = simple, plain, None
            remarks.append(
                "Noise that follows the features and the shape of the law were left out: with them "
                "the bars are clearly worse on these rows."
            )
    constant = [_constant_nll(one.held) for one in rows]
    if paper is not None and full.worse > CLEARLY:
        ridge, edge, taken = paper.calibration.ridge, None, LADDER[0]
        chosen, nll = paper.calibration, paper.nll
        rows = _rows(residuals, None, eigenvalues, ridge, wanted.support)
    else:
        chosen, taken = full.calibration(ridge, wanted, typical[0], shared=shared), LADDER[-1]
        nll = full.nll
        remarks += _raised(full.targets)
    found: dict[str, Any] = {"calibration": _with_joint(chosen, rows, typical), "at_edge": edge}
    found |= {"value": full.ladder.get(taken, nll), "nll": nll, "ladder": full.ladder}
    found |= {"nll_constant": sum(constant) / len(constant), "zero_curvature": zero_curvature}
    found |= {"seen": 0 if seen is None else len(seen.error), "remarks": remarks}
    return reported(solved(ridge), wanted, residuals, **found)


@dataclass(frozen=True)
class Paper:
    """The paper's form: the likeliest, and its NLL and q (n, K), NaN where masked, of the rows."""

    calibration: Calibration
    nll: float
    q: Tensor

    @classmethod
    def found(cls, residuals: Residuals, eigenvalues: Tensor, wanted: Wanted) -> Paper | None:
        """For validation rows; None where there is none, as with features that are all zero."""
        own = replace(wanted, criterion="nll", noise=NoNoise, law=Gaussian(), given=None)
        objective = Objective(residuals, eigenvalues, own)
        try:
            choice, _ = search(objective, wanted.ridge)
        except ValueError:
            return None
        q = residuals.quadratic(eigenvalues, eigenvalues.new_tensor([choice.ridge]))[..., 0]
        q = torch.where(residuals.error.isfinite(), q, math.nan)
        return cls(objective.calibration(choice), objective.nll(choice)[0], q)


def _parts(rows: list[Rows], wanted: Wanted) -> Parts:
    """What is wanted of the full model, and possible; a tilt would learn the targets' grid."""
    tilted = isinstance(wanted.law, Tilted) and not any(one.step > 0 for one in rows)
    tails = not isinstance(wanted.law, Gaussian)
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
    likely = replace(wanted, criterion="nll", noise=ConstantNoise, law=Gaussian())
    choice, edge = search(Objective(residuals, eigenvalues, likely), None)
    return choice.ridge, edge


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


def _constant_nll(rows: Rows) -> float:
    """NLL per row of the best constant Gaussian bar."""
    mean_square = rows.residual.square().mean().expand(len(rows))
    return float(law_nll(Gaussian(), rows.residual, mean_square, rows.side).mean())


def _far_rows(residuals: Residuals | None, wanted: Wanted) -> list[str]:
    """Validation rows that count for less than they are, by name."""
    if residuals is None:
        return []
    far = GAUSSIAN_FAR if isinstance(wanted.law, Gaussian) else FAR
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


def _remarks(rows: list[Rows], wanted: Wanted) -> list[str]:
    said = []
    held, seen = (min(int((one.seen == flag).sum()) for one in rows) for flag in (False, True))
    if not held and wanted.optimism:
        said.append(
            "There were no validation rows: training rows as if left out are optimistic for a net "
            "trained end to end. Calibrate on rows that the model has not seen."
        )
    if not seen:
        why = "The fit holds no training rows (sample=0, or a file without rows=True)"
        why = "The noise of training rows is not known" if wanted.given else why
        said.append(f"{why}: the validation rows alone decide.")
    if held:
        said.append(
            "Did these validation rows choose the checkpoint (early stopping)? Then their errors "
            "are optimistic, and 90 % intervals may hold up to three per cent too little."
        )
    if any(one.step > 0 for one in rows) and isinstance(wanted.law, Tilted):
        said.append(
            "The targets lie on a grid that is wide beside the residuals: the law has no tilt, "
            "which would learn the grid."
        )
    return said
