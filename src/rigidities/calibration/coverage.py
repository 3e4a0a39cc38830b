"""Where 90 % intervals cover more or less than they promise: in all rows, and in fifths of them.

Intervals may cover 90 % of all rows and of no part of them. So rows are cut into fifths by their
prediction and by their bar, and each fifth is compared with the binomial distribution. The tails
allow for the number of comparisons.

Data flow: `ScoredRows` turns predictions and true values into scores, standard normal numbers if
the bars are right; `Coverage` counts the scores of all rows or of a fifth, and says what is wrong;
`coverage_remarks` makes sentences of it for a report.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..prediction.prediction import Prediction
from . import words
from .report import CalibrationReport
from .rows import Rows

LEVEL = 0.9
"""The level of the intervals."""
HALF_WIDTH = 1.6448536269514722
"""Half the width of the 90 % interval of a standard normal number."""
TAIL = 0.005
"""Probability that all rows call right bars too narrow, and the same for too wide."""
FIFTHS_TAIL = 0.001
"""The same probability for each of the ten fifths."""
GOOD = "good"
CAREFUL = "careful"
BAD = "bad"
STATUSES = (GOOD, CAREFUL, BAD)
"""How serious a fault is, from none to serious."""

_LITTLE = math.log(1.1)
"""Logarithm of the factor of the bars up to which a fault is small."""
_MUCH = math.log(1.5)
"""Logarithm of the factor of the bars from which on a fault is serious."""
_FEWEST = 10
"""Least number of rows of a fifth."""
_MOST = 1 << 14
"""Largest number of scores that a calibration looks at."""
_NEVER = 37.0
"""The score of an impossible target: about that of a tail of 1e-300."""
_PLACES = ("lowest", "second", "middle", "fourth", "highest")


class Coverage(NamedTuple):
    """How many rows 90 % intervals cover, what chance allows, and what is wrong.

    Attributes:
        rows: How many rows there are.
        inside: How many of them lie inside of their interval.
        low: The least number that chance allows.
        high: The largest number that chance allows.
        factor: The factor by which the bars would have to be multiplied to cover 90 %.
        rms: The root mean square of errors in bars.
        side: "narrow" or "wide" where the bars are wrong beyond chance, else empty.
        where: Which rows these are, in words.
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
    def of(cls, columns: Tensor, tail: float = TAIL, where: str = "") -> Coverage:
        """The coverage of rows.

        Args:
            columns: Scores, reaches and errors, (3, N), as `ScoredRows.columns` has them.
            tail: Probability that right bars are called too narrow, and the same for too wide.
            where: Which rows these are, in words.
        """
        score, reach, error = columns
        rows = columns.shape[1]
        inside = int((score.abs() <= HALF_WIDTH).sum())
        low, high = covered_by_chance(rows, tail)
        # Where all may lie inside by chance, the sum of squares shows bars that are too wide.
        squares = score.square().sum()
        chance = torch.special.gammainc(squares.new_tensor(rows / 2), squares / 2)
        side = ""
        if inside < low:
            side = "narrow"
        elif inside > high or (high == rows and bool(chance < tail)):
            side = "wide"
        return cls(
            rows=rows,
            inside=inside,
            low=low,
            high=high,
            factor=_nine_tenths(reach),
            rms=float(error.square().mean().sqrt()),
            side=side,
            where=where,
        )

    @property
    def off(self) -> float:
        """The size of the logarithm of `factor`: by how much the bars are wrong."""
        return abs(math.log(max(self.factor, 1e-9)))

    @property
    def status(self) -> str:
        """How serious the fault is; `GOOD` where chance explains it."""
        if not self.side or self.off < _LITTLE:
            return GOOD
        return BAD if self.off > _MUCH else CAREFUL

    @property
    def sentence(self) -> str:
        """What is wrong with these rows."""
        counts = ""
        if not self.low <= self.inside <= self.high:
            counts = (
                f"90 % intervals cover {100 * self.inside / self.rows:.3g} % (chance allows "
                f"{100 * self.low / self.rows:.3g} to {100 * self.high / self.rows:.3g} %), and "
            )
        errors = f"errors are {self.rms:.2g} bars (RMS)"
        return f"In the {self.where}, {counts}{errors}: the bars are too {self.side} there."


def covered_by_chance(count: int, tail: float = TAIL) -> tuple[int, int]:
    """The least and the largest number of true values that right 90 % intervals cover by chance.

    They are quantiles of the binomial distribution: fewer has at most the probability `tail`, and
    so has more.

    Examples:
        >>> covered_by_chance(100, 0.025), covered_by_chance(20, 0.025)  # of 20 all may lie inside
        ((84, 95), (15, 20))
    """
    spread = (
        12 * math.sqrt(count * LEVEL * (1 - LEVEL)) + 12
    )  # numbers beyond are practically impossible
    first = max(0, math.floor(LEVEL * count - spread))
    last = min(count, math.ceil(LEVEL * count + spread))
    k = torch.arange(first, last + 1, dtype=torch.float64)
    total = torch.tensor(float(count), dtype=torch.float64)
    log_ways = torch.lgamma(total + 1) - torch.lgamma(k + 1) - torch.lgamma(total - k + 1)
    log_mass = log_ways + k * math.log(LEVEL) + (total - k) * math.log1p(-LEVEL)
    probability = log_mass.exp().cumsum(0)
    low = int((probability < tail).sum())
    high = int((probability < 1 - tail).sum())
    return first + low, first + min(high, last - first)


@dataclass(frozen=True)
class ScoredRows:
    """Rows of one target compared with their own distribution.

    Where a target lies at a bound of the support, which has a finite probability, it is replaced by
    a reproducible draw from the unbounded distribution beyond the bound.

    Attributes:
        p: The predictions, (N,), without bounds.
        z: Scores, (N,): standard normal numbers with the same probability below them as the
            targets. For a Gaussian they are `error`.
        error: (y - mean) / std, (N,).
        looks: How many targets are compared; tails are divided by it.
    """

    p: Prediction
    z: Tensor
    error: Tensor
    looks: int = 1

    @classmethod
    def of(cls, p: Prediction, target: Tensor, looks: int = 1) -> ScoredRows:
        """The scores of predictions that are `judgeable`, by their true values."""
        y, impossible = _drawn_beyond_bounds(p, target)
        unbounded = _without_bounds(p)
        error = (y - unbounded.mean) / unbounded.std
        z = error
        if p.distribution.name != "gaussian":
            in_units = (y - unbounded.mean) / unbounded.unit
            in_units = torch.where(y == unbounded.mean, 0.0, in_units)
            below = unbounded.distribution.cdf(in_units)
            above = unbounded.distribution.mirrored.cdf(-in_units)
            # the smaller tail keeps its digits
            far = torch.special.ndtri(torch.minimum(below, above).clamp(min=1e-300, max=0.5))
            z = far.copysign(below - above)
        z = torch.where(impossible, z.sign() * _NEVER, z)
        return cls(unbounded, z, error, looks)

    def reach(self, level: float = LEVEL) -> Tensor:
        """The factor by which a bar must grow for its interval to end at the target, (N,)."""
        unit = self.p.unit / self.p.std
        tiny = torch.finfo(torch.float64).tiny
        levels = self.error.new_tensor([(1 - level) / 2, (1 + level) / 2])
        low, high = self.p.distribution.quantile(levels[:, None]) * unit
        return torch.maximum(self.error / low.clamp(max=-tiny), self.error / high.clamp(min=tiny))

    @cached_property
    def columns(self) -> Tensor:
        """Scores, reaches and errors, (3, N), for `Coverage`."""
        # An impossible target is out of reach whatever the bar.
        least_reach = (self.z.abs() >= _NEVER) * _NEVER
        return torch.stack([self.z, torch.maximum(self.reach(), least_reach), self.error])

    @cached_property
    def coverage(self) -> Coverage:
        """The coverage of all rows."""
        return Coverage.of(self.columns, TAIL / self.looks)

    @cached_property
    def fifths(self) -> list[Coverage]:
        """Coverage by fifths of the prediction, then of the bar; none for one that is constant."""
        return list(self._fifths(self.columns))

    @cached_property
    def uneven(self) -> list[Coverage]:
        """The fifths with wrong bars, too narrow ones first; none if one factor corrects all."""
        if self.coverage.side and self.fifths:
            bar_factor = self.coverage.factor
            score_factor = _nine_tenths(self.z.abs()) / HALF_WIDTH
            factors = self.z.new_tensor([score_factor, bar_factor, bar_factor])
            mended = self.columns / factors[:, None].clamp(min=1e-9)
            if not any(fifth.side for fifth in self._fifths(mended)):
                return []
        wrong = [fifth for fifth in self.fifths if fifth.side]
        return sorted(wrong, key=lambda fifth: (fifth.side, -fifth.off))

    def _fifths(self, columns: Tensor) -> Iterator[Coverage]:
        """The coverage of each fifth by the predictions, then by the bars."""
        tail = FIFTHS_TAIL / self.looks
        # Equal keys come in random order: a table may be sorted by the target.
        mixed = _shuffled(len(self.z)).to(self.z.device)
        for name, key in (("predictions", self.p.mean), ("bars", self.p.std)):
            if len(key) < 5 * _FEWEST:
                continue
            if key.max() <= key.min() + 1e-9 * key.abs().max():  # practically constant
                continue
            order = mixed[key[mixed].argsort(stable=True)]
            fifth_columns = columns[:, order].tensor_split(5, 1)
            fifth_keys = key[order].tensor_split(5)
            for place, scores, keys in zip(_PLACES, fifth_columns, fifth_keys, strict=True):
                where = f"{place} fifth of the {name} ({_key_range(place, keys)})"
                yield Coverage.of(scores, tail, where)


def _nine_tenths(sizes: Tensor) -> float:
    """The size that nine tenths of the sizes stay below."""
    return float(sizes.kthvalue(math.ceil(LEVEL * len(sizes))).values)


def _key_range(place: str, keys: Tensor) -> str:
    """The range of a fifth's keys, in words; neighbouring fifths may share a repeated key."""
    low = f"{float(keys[0]):.3g}"
    high = f"{float(keys[-1]):.3g}"
    if low == high:
        return low
    if place == "lowest":
        return f"up to {high}"
    if place == "highest":
        return f"from {low}"
    return f"{low} to {high}"


def _shuffled(count: int) -> Tensor:
    """A repeatable permutation."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


def judgeable(p: Prediction) -> bool:
    """Whether the distribution has a `cdf`; one that a user wrote need not have it."""
    try:
        p[:1].tail(p.mean[:1])
    except NotImplementedError:
        return False
    return True


def _without_bounds(p: Prediction) -> Prediction:
    """The prediction in double precision, without bounds and gradients."""
    tensors: dict[str, Any] = {}
    for name, value in vars(p).items():
        if isinstance(value, Tensor):
            tensors[name] = value.detach().double()
    return replace(
        p, **tensors, distribution=p.distribution.each(Tensor.detach), support=None, conformal=None
    )


def at_bounds(p: Prediction, target: Tensor) -> tuple[Tensor, Tensor]:
    """Targets in double precision, moved to a bound that they miss only by rounding; their sides.

    A side is -1 or 1 at the lower or the upper bound, -2 or 2 beyond it, else 0.
    """
    y = p.matched(target.detach())
    side = torch.zeros_like(target, dtype=torch.long)
    for sign, bound in zip((-1, 1), p.support or (), strict=False):
        if bound is not None:
            beyond = sign * (y - torch.as_tensor(bound, dtype=torch.float64).to(y.device))
            side = torch.where(beyond > 0, 2 * sign, torch.where(beyond == 0, sign, side))
    return y, side


def _drawn_beyond_bounds(p: Prediction, target: Tensor) -> tuple[Tensor, Tensor]:
    """Targets with those at a bound drawn from beyond it, and which targets are impossible."""
    y, side = at_bounds(p, target)
    generator = torch.Generator().manual_seed(0)
    for sign in (-1, 1):
        at_bound = side == sign
        if not bool(at_bound.any()):
            continue
        unbounded = _without_bounds(p[at_bound])
        # An upper bound is mirrored, so that the mass beyond is always below the bound.
        distribution = unbounded.distribution if sign < 0 else unbounded.distribution.mirrored
        mass = distribution.cdf(-sign * (y[at_bound] - unbounded.mean) / unbounded.unit)
        level = mass * (1 - torch.rand(mass.shape, generator=generator).to(mass))
        z = distribution.quantile(level.clamp(min=1e-300))
        y[at_bound] = unbounded.mean - sign * unbounded.unit * z
    return y, side.abs() == 2


def coverage_remarks(report: CalibrationReport, rows: Rows, eigenvalues: Tensor) -> list[str]:
    """Sentences on the rows of a calibration: fifths with wrong bars, and a noise of zero.

    Args:
        report: What was chosen.
        rows: The rows, as in `Calibration.prediction`.
        eigenvalues: Those of the Gram, (D,) or (K, D).
    """
    targets = rows.targets
    most = min(len(rows), max(1, _MOST // targets))
    rows = rows.subset(_shuffled(len(rows)).to(eigenvalues.device) < most)
    p = report.calibration.prediction(rows, eigenvalues)
    remarks = []
    for target, finite in enumerate(rows.error.isfinite().unbind(1)):
        if not bool(finite.any()):  # masked in all rows that are looked at
            continue
        which = words.target_prefix(target, targets)
        target_p = p[finite, target]
        y = target_p.mean + rows.error[finite, target]
        uneven = ScoredRows.of(target_p, y, targets).uneven if judgeable(target_p) else []
        if uneven:
            sentences = " ".join(fifth.sentence for fifth in uneven[:3])
            remarks.append(f"{which}{sentences} {report.remedy('uneven')}")
        has_noise = report.calibration.noise.name != "none"
        if has_noise and bool((target_p.noise / target_p.variance).median() < 1e-3):
            remarks.append(
                f"{which}The fitted noise is practically zero: the scale includes it, so bars will "
                "shrink with more data even if the noise does not. Calibrate on more rows, or fix "
                "the ridge: rg.Full(ridge=...)."
            )
    return remarks
