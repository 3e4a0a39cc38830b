"""Where 90 % intervals hold more or less than they promise: in all rows, and in fifths of them.

They may hold 90 % of all rows and of no part. So rows are cut into fifths by their prediction and
by their bar, and each is held against the binomial distribution, with tails for so many looks.
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
from .calibration import Calibration
from .report import CalibrationReport
from .residuals import Residuals

LEVEL, HALF_WIDTH = 0.9, 1.6448536269514722
TAIL, FIFTHS_TAIL = 0.005, 0.001
"""How often right bars are called too narrow, as often too wide: all rows, each of ten fifths."""
GOOD, CAREFUL, BAD = STATUSES = "good", "careful", "bad"
_LITTLE, _MUCH = math.log(1.1), math.log(1.5)
"""Factors of the bars up to which a fault is small, and from which it is grave."""
_FEWEST, _MOST = 10, 1 << 14
"""Rows of a fifth at least; scores that a calibration looks at, at most."""
_NEVER = 37.0
"""The score of what cannot be: 1e-300 in double precision."""
_PLACES = ("lowest", "second", "middle", "fourth", "highest")


class Held(NamedTuple):
    """How many of some rows 90 % intervals hold, what chance allows, and what is wrong.

    `factor` would make the bars hold 90 %, `rms` is that of errors in bars, `side` "narrow" or
    "wide".
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
    def of(cls, columns: Tensor, tail: float = TAIL, where: str = "") -> Held:
        """Of scores, reaches and errors, (3, N), as `Scored` has them."""
        (score, reach, error), count = columns, columns.shape[1]
        inside, (low, high) = int((score.abs() <= HALF_WIDTH).sum()), held_by_chance(count, tail)
        factor, rms = _nine_tenths(reach), float(error.square().mean().sqrt())
        # where all may lie inside by chance, the sum of squares shows bars that are too wide
        squares = score.square().sum()
        chance = torch.special.gammainc(squares.new_tensor(count / 2), squares / 2)
        wide = inside > high or (high == count and bool(chance < tail))
        side = "narrow" if inside < low else "wide" * wide
        return cls(count, inside, low, high, factor, rms, side, where)

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
        counted = f"90 % intervals hold {holds} %, where chance allows {low} to {high} %, and "
        counted = counted if not self.low <= self.inside <= self.high else ""
        errors = f"errors are {self.rms:.2g} bars (RMS)"
        return f"In the {self.where} {counted}{errors}: too {self.side} there."


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


@dataclass(frozen=True)
class Scored:
    """Rows of one target held against their own distribution, and what 90 % intervals hold of them.

    Of a target at a bound of the support, where probability is in a lump, all is that of a
    repeatable draw from what the distribution has beyond the bound.

    Attributes:
        p: the predictions, (N,).
        z: standard normal numbers as likely as the targets: `error`, for a Gaussian distribution.
        error: (y - mean) / std.
        looks: how many targets are looked at, by which tails are divided.
    """

    p: Prediction
    z: Tensor
    error: Tensor
    looks: int = 1

    @classmethod
    def of(cls, p: Prediction, target: Tensor, looks: int = 1) -> Scored:
        """Of predictions that are `judgeable` and their true values."""
        (y, beyond), free = _latent(p, target), _free(p)
        z = error = (y - free.mean) / free.std
        if p.distribution.name != "gaussian":
            place = torch.where(y == free.mean, 0.0, (y - free.mean) / free.scale)
            below, above = free.distribution.cdf(place), free.distribution.mirrored.cdf(-place)
            far = torch.special.ndtri(torch.minimum(below, above).clamp(min=1e-300, max=0.5))
            z = far.copysign(below - above)
        return cls(free, torch.where(beyond, z.sign() * _NEVER, z), error, looks)

    def reach(self, level: float = LEVEL) -> Tensor:
        """What bars must be multiplied with for an interval to end at the target."""
        unit, tiny = self.p.scale / self.p.std, torch.finfo(torch.float64).tiny
        levels = self.error.new_tensor([(1 - level) / 2, (1 + level) / 2])
        low, high = self.p.distribution.quantile(levels[:, None]) * unit
        return torch.maximum(self.error / low.clamp(max=-tiny), self.error / high.clamp(min=tiny))

    @cached_property
    def columns(self) -> Tensor:
        """Scores, reaches and errors, (3, N), for `Held`."""
        never = (self.z.abs() >= _NEVER) * _NEVER
        return torch.stack([self.z, torch.maximum(self.reach(), never), self.error])

    @cached_property
    def held(self) -> Held:
        """Of all rows."""
        return Held.of(self.columns, TAIL / self.looks)

    @cached_property
    def fifths(self) -> list[Held]:
        """Coverage by fifths of the prediction, then of the bar; none of a key that is constant."""
        return list(self._fifths(self.columns))

    @cached_property
    def uneven(self) -> list[Held]:
        """The fifths that are wrong, narrow ones first; none where one factor mends all."""
        if self.held.side and self.fifths:
            factors = [_nine_tenths(self.z.abs()) / HALF_WIDTH, *[self.held.factor] * 2]
            mended = self.columns / self.z.new_tensor(factors)[:, None].clamp(min=1e-9)
            if not any(one.side for one in self._fifths(mended)):
                return []
        found = (one for one in self.fifths if one.side)
        return sorted(found, key=lambda one: (one.side, -one.off))

    def _fifths(self, columns: Tensor) -> Iterator[Held]:
        # equal keys in random order: a table may be sorted by the target
        mixed, tail = _shuffled(len(self.z)).to(self.z.device), FIFTHS_TAIL / self.looks
        for name, key in (("predictions", self.p.mean), ("bars", self.p.std)):
            if len(key) < 5 * _FEWEST or key.max() <= key.min() + 1e-9 * key.abs().max():
                continue
            order = mixed[key[mixed].argsort(stable=True)]
            parts = columns[:, order].tensor_split(5, 1), key[order].tensor_split(5)
            for at, held, keys in zip(_PLACES, *parts, strict=True):
                yield Held.of(held, tail, f"{at} fifth of the {name} ({_values(at, keys)})")


def _nine_tenths(sizes: Tensor) -> float:
    """What nine tenths stay below."""
    return float(sizes.kthvalue(math.ceil(LEVEL * len(sizes))).values)


def _values(at: str, part: Tensor) -> str:
    """Which keys a fifth has; neighbours share one that is repeated."""
    low, high = (f"{float(end):.3g}" for end in (part[0], part[-1]))
    if low == high:
        return low
    return {"lowest": f"up to {high}", "highest": f"from {low}"}.get(at, f"{low} to {high}")


def _shuffled(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


def judgeable(p: Prediction) -> bool:
    """Whether the distribution has probabilities, as one of one's own need not."""
    try:
        p[:1].tail(p.mean[:1])
    except NotImplementedError:
        return False
    return True


def _free(p: Prediction) -> Prediction:
    """The same in double precision and without bounds."""
    tensors = {name: part for name, part in vars(p).items() if isinstance(part, Tensor)}
    own: dict[str, Any] = {name: part.detach().double() for name, part in tensors.items()}
    return replace(
        p, **own, distribution=p.distribution.each(Tensor.detach), support=None, conformal=None
    )


def at_bounds(p: Prediction, target: Tensor) -> tuple[Tensor, Tensor]:
    """Targets in double precision, exactly at bounds that rounding keeps them off; and their sides.

    A side is -1 or 1 at the lower or the upper bound, -2 or 2 beyond it, else 0.
    """
    y, side = p.matched(target.detach()), torch.zeros_like(target, dtype=torch.long)
    for sign, end in zip((-1, 1), p.support or (), strict=False):
        if end is not None:
            past = sign * (y - torch.as_tensor(end, dtype=torch.float64).to(y.device))
            side = torch.where(past > 0, 2 * sign, torch.where(past == 0, sign, side))
    return y, side


def _latent(p: Prediction, target: Tensor) -> tuple[Tensor, Tensor]:
    """Targets with those at a bound drawn from beyond it, and which cannot be."""
    y, side = at_bounds(p, target)
    generator = torch.Generator().manual_seed(0)
    for sign in (-1, 1):
        if bool((at := side == sign).any()):
            part = _free(p[at])
            distribution = part.distribution if sign < 0 else part.distribution.mirrored
            mass = distribution.cdf(-sign * (y[at] - part.mean) / part.scale)
            drawn = mass * (1 - torch.rand(mass.shape, generator=generator).to(mass))
            y[at] = part.mean - sign * part.scale * distribution.quantile(drawn.clamp(min=1e-300))
    return y, side.abs() == 2


def predicted(
    calibration: Calibration, part: Residuals, eigenvalues: Tensor, *, seen: bool = False
) -> Prediction:
    """Gathered rows with their error bars, in the layout of rows (n, K), float64."""
    q = part.quadratic(eigenvalues, eigenvalues.new_tensor([calibration.ridge]))[..., 0]
    q = q / (1 - part.weight * q).clamp(min=1e-3) if seen else q
    mean = part.kept["mean"].to(torch.float64)
    distribution, epistemic = calibration.distribution, calibration.epistemic(q).expand(mean.shape)
    share = part.share * calibration.weight / part.typical
    share = torch.where(share.isfinite(), share, 1.0)  # of weight zero, whose errors are not known
    noise = calibration.noise.level * share
    form = calibration.form(torch.float64)
    if form is not None:
        inputs = part.kept["inputs"].to(torch.float64)
        squared, second, tilt = form(q, mean, inputs, share)
        noise = (squared * second - epistemic).clamp(min=0)
        distribution = calibration.shaped(tilt)
    noise, rigidity = (t.expand(mean.shape) for t in (noise, 1 / q))
    return Prediction(
        mean, epistemic, noise, rigidity, distribution=distribution, support=calibration.support
    )


def remarks(report: CalibrationReport, part: Residuals, lam: Tensor) -> Iterator[str]:
    """On the rows of a calibration: fifths with wrong bars, and a noise that came out as zero."""
    rows = min(len(part.error), max(1, _MOST // part.error.shape[1]))
    part = part.picked(_shuffled(len(part.error)).to(lam.device) < rows)
    chosen, targets = report.calibration, part.error.shape[1]
    p = predicted(chosen, part, lam)
    for k, known in enumerate(part.error.isfinite().unbind(1)):
        if not bool(known.any()):  # masked in all rows that are looked at
            continue
        which = f"Target {k}: " if targets > 1 else ""
        own = p[known, k]
        y = own.mean + part.error[known, k]
        if wrong := Scored.of(own, y, targets).uneven if judgeable(own) else []:
            told = " ".join(one.sentence for one in wrong[:3])
            yield f"{which}{told} {report.remedy('uneven')}"
        if chosen.noise.name != "none" and bool((own.noise / own.variance).median() < 1e-3):
            yield (
                f"{which}The noise came out as practically zero: the scale holds it, and bars will "
                "shrink with more data, noise or no noise. Calibrate on more rows, or fix ridge=."
            )
