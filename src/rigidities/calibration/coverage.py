"""Where 90 % intervals hold more or less than they promise: in all rows, and in fifths of them.

They may hold 90 % of all rows and of no part. So rows are cut into fifths by their prediction and
by their bar, and each is held against the binomial distribution, with tails for so many looks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from ..prediction.head import HeadForm
from ..prediction.prediction import Prediction
from .calibration import Calibration
from .gathering import Residuals
from .report import CalibrationReport, remedy

LEVEL, HALF_WIDTH = 0.9, 1.6448536269514722
TAIL, FIFTHS_TAIL = 0.005, 0.001
"""How often right bars are called too narrow, as often too wide: all rows, each of ten fifths."""
GOOD, CAREFUL, BAD = STATUSES = "good", "careful", "bad"
_LITTLE, _MUCH = math.log(1.1), math.log(1.5)
"""Factors of the bars up to which a fault is small, and from which it is grave."""
_FEWEST, _MOST = 10, 1 << 14
"""Rows of a fifth at least; scores that a calibration looks at, at most."""
_PLACES = ("lowest", "second", "middle", "fourth", "highest")


class Held(NamedTuple):
    """How many of some rows 90 % intervals hold, what chance allows, and what is wrong.

    `factor` would make the bars hold 90 %, `rms` is that of the scores, `side` "narrow" or "wide".
    """

    rows: int
    inside: int
    low: int
    high: int
    factor: float
    rms: float
    side: str
    where: str

    @classmethod
    def of(cls, score: Tensor, tail: float = TAIL, where: str = "") -> Held:
        """Of normal scores."""
        count, squares = len(score), score.square()
        inside, (low, high) = int((score.abs() <= HALF_WIDTH).sum()), held_by_chance(count, tail)
        factor = float(score.abs().kthvalue(math.ceil(LEVEL * count)).values) / HALF_WIDTH
        # where all may lie inside by chance, the sum of squares shows bars that are too wide
        chance = torch.special.gammainc(squares.new_tensor(count / 2), squares.sum() / 2)
        wide = inside > high or (high == count and bool(chance < tail))
        side = "narrow" if inside < low else "wide" * wide
        return cls(count, inside, low, high, factor, float(squares.mean().sqrt()), side, where)

    @property
    def off(self) -> float:
        """By how much the bars are wrong, as a logarithm."""
        return abs(math.log(max(self.factor, 1e-9)))

    @property
    def status(self) -> str:
        """By the size of the fault, where there is one beyond chance."""
        small = not self.side or self.off < _LITTLE
        return GOOD if small else BAD if self.off > _MUCH else CAREFUL

    @property
    def sentence(self) -> str:
        """What is wrong with these rows."""
        holds, low, high = (f"{100 * n / self.rows:.3g}" for n in self[1:4])
        return (
            f"In the {self.where} 90 % intervals hold {holds} %, where chance allows {low} to "
            f"{high} %, and errors are {self.rms:.2g} bars (RMS): too {self.side} there."
        )


def held_by_chance(count: int, tail: float = TAIL) -> tuple[int, int]:
    """How few and how many of the true values right 90 % intervals hold.

    Quantiles of the binomial distribution: fewer, as well as more, are as rare as `tail`.

    Examples:
        >>> held_by_chance(100, 0.025), held_by_chance(20, 0.025)  # of 20 all may lie inside
        ((84, 95), (15, 20))
    """
    spread = 12 * math.sqrt(count * LEVEL * (1 - LEVEL)) + 12  # what lies beyond has no weight
    first = max(0, math.floor(LEVEL * count - spread))
    last = min(count, math.ceil(LEVEL * count + spread))
    k = torch.arange(first, last + 1, dtype=torch.float64)
    total = torch.tensor(float(count), dtype=torch.float64)
    ways = torch.lgamma(total + 1) - torch.lgamma(k + 1) - torch.lgamma(total - k + 1)
    chance = (ways + k * math.log(LEVEL) + (total - k) * math.log1p(-LEVEL)).exp().cumsum(0)
    low, high = (int((chance < limit).sum()) for limit in (tail, 1 - tail))
    return first + low, first + min(high, last - first)


def fifths(score: Tensor, mean: Tensor, std: Tensor, tail: float = FIFTHS_TAIL) -> list[Held]:
    """Coverage by fifths of the prediction, then of the bar; none of a key that does not vary."""
    found: list[Held] = []
    for name, key in (("predictions", mean), ("bars", std)):
        if len(key) < 5 * _FEWEST or not bool(key.max() > key.min() + 1e-9 * key.abs().max()):
            continue
        ordered, order = key.sort(stable=True)
        ends = [f"{float(part[0]):.3g}" for part in ordered.tensor_split(5)[1:]]
        between = (" to ".join(pair) for pair in pairwise(ends))
        values = (f"below {ends[0]}", *between, f"above {ends[-1]}")
        where = (f"{at} fifth of the {name} ({v})" for at, v in zip(_PLACES, values, strict=True))
        found += map(Held.of, score[order].tensor_split(5), repeat(tail), where)
    return found


def uneven(score: Tensor, mean: Tensor, std: Tensor, tail: float = FIFTHS_TAIL) -> list[Held]:
    """The fifths that are wrong, the most narrow first; none where one factor mends them all."""
    if len(score) < 5 * _FEWEST:
        return []
    whole = Held.of(score)
    if whole.side and not any(one.side for one in fifths(score / whole.factor, mean, std, tail)):
        return []
    found = (one for one in fifths(score, mean, std, tail) if one.side)
    return sorted(found, key=lambda one: (one.side, -one.off))


def normal_scores(p: Prediction, target: Tensor) -> Tensor:
    """Standard normal numbers as likely as the targets: (y - mean) / std for a Gaussian law.

    Of a target at a bound, where probability is in a lump, a repeatable draw from the lump.
    """
    if p.law.name == "gaussian" and p.support is None:
        return ((target - p.mean) / p.std).double()
    up_to, below = p.cdf(target), p.cdf(target.nextafter(torch.full_like(target, -math.inf)))
    drawn = torch.rand(target.shape, generator=torch.Generator().manual_seed(0)).to(up_to)
    u = (below + drawn * (up_to - below)).double()
    tail = torch.where(up_to - below > 1e-4, 2 * torch.minimum(u, 1 - u), p.tail(target))
    far: Tensor = torch.special.ndtri(tail.clamp(min=1e-300) / 2)
    return far.copysign(u - 0.5)


def predicted(
    calibration: Calibration, part: Residuals, eigenvalues: Tensor, *, seen: bool = False
) -> Prediction:
    """Gathered rows with their error bars, in the layout of rows (n, K), float64."""
    q = part.quadratic(eigenvalues, eigenvalues.new_tensor([calibration.ridge]))[..., 0]
    q = q / (1 - part.weight * q).clamp(min=1e-3) if seen else q
    mean = part.kept["mean"].to(torch.float64)
    law, epistemic = calibration.law, calibration.epistemic(q).expand(mean.shape)
    share = part.share * calibration.weight / part.typical
    share = torch.where(share.isfinite(), share, 1.0)  # of weight zero, whose errors are not known
    noise = calibration.noise.level * share
    if calibration.head is not None:
        inputs = part.kept["inputs"].to(torch.float64)
        h, tilt = HeadForm.of(calibration.head, torch.float64)(q, mean, inputs)
        whole, tilt = calibration.around(q, h, tilt, None, share)
        noise = (whole - epistemic).clamp(min=0)
        law = calibration.shaped(tilt)
    noise, rigidity = (t.expand(mean.shape) for t in (noise, 1 / q))
    return Prediction(mean, epistemic, noise, rigidity, law=law, support=calibration.support)


def remarks(
    report: CalibrationReport, part: Residuals, lam: Tensor, mended: str | None = None
) -> Iterator[str]:
    """On the rows of a calibration: fifths with wrong bars, and a noise that came out as zero."""
    some = torch.arange(len(part.error), device=lam.device) % (1 + part.error.numel() // _MOST) == 0
    part = part.picked(some)
    chosen, targets = report.calibration, part.error.shape[1]
    p, mended = predicted(chosen, part, lam), mended or remedy("uneven", report.has)
    try:
        scores = normal_scores(p, (p.mean + part.error).nan_to_num())
    except NotImplementedError:  # a law of one's own need not have probabilities
        return
    for k, known in enumerate(part.error.isfinite().unbind(1)):
        if not bool(known.any()):  # masked in all rows that are looked at
            continue
        which = f"Target {k}: " if targets > 1 else ""
        z, mean, std = (column[known, k] for column in (scores, p.mean, p.std))
        if wrong := uneven(z, mean, std, FIFTHS_TAIL / targets):
            yield " ".join([which + wrong[0].sentence, *(w.sentence for w in wrong[1:3]), mended])
        if chosen.noise.name != "none" and bool((p.noise / p.variance)[known, k].median() < 1e-3):
            yield (
                f"{which}The noise came out as practically zero: the scale holds it, and bars will "
                "shrink with more data, noise or no noise. Calibrate on more rows, or fix ridge=."
            )
