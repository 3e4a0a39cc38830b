r"""Intervals whose coverage is guaranteed: split conformal prediction by the law's own tails.

The score of a row is how far out its target lies in its law, $s = |2u - 1|$ with $u = F(y)$
(Chernozhukov, Wuethrich and Zhu, 2021). Held is the tail $t = 1 - s = 2 \min(P(Y \le y),
P(Y \ge y))$, at most 1: it keeps its digits where s rounds to one, and holds for a law with mass at
a bound. Of n rows that fitted nothing else the interval takes the
$\lceil (n + 1) \cdot \mathrm{level} \rceil$-th smallest score.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ..notices import notify, require, require_level
from ..prediction.prediction import Prediction

LEAST = 50
"""Rows below which a group is merged."""

_SLACK = 1e-6
"""Share by which tails are narrowed: rounding must not push out the row that one came from."""
_MIX = (-7046029254386353131, -4658895280553007687)
_GUARANTEE = (
    "They hold their level on average over draws of calibration and test rows, for rows used in "
    "neither training, stopping nor fitting; not per input."
)
_QUESTION = (
    "Did these rows choose the checkpoint (early stopping)? Then they are seen rows, and intervals "
    "hold a few per cent too little: fresh rows moved coverage by +.030 on the energy set."
)

Groups = Callable[[Any], Any]


@dataclass(frozen=True)
class Conformal:
    """Sorted tails of rows that fitted nothing else, for each target and group.

    Attributes:
        tails: lists one after the other, each falling (its scores rise), (S,).
        counts: rows of each list, (L,).
        place: the list of each target and group, (K, G + 1); last that of all its rows.
        cuts: of the bar, between its groups, (K, G - 1).
        labels: rising, of groups by label, (G,).
        function: that labels a batch; files do not hold it.
    """

    tails: Tensor
    counts: Tensor
    place: Tensor
    cuts: Tensor | None = None
    labels: Tensor | None = None
    function: Groups | None = None
    _said: list[str] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        prediction: Prediction,
        target: Tensor,
        *,
        targets: Tensor | None = None,
        labels: Tensor | None = None,
        cuts: Tensor | None = None,
        function: Groups | None = None,
    ) -> Conformal:
        """From predictions of rows that fitted nothing else.

        Args:
            prediction: of any shape, rows first.
            target: shaped like it; NaN where masked.
            targets: which target each entry is of, broadcast against the prediction; by default
                its place in the last of several dimensions.
            labels: group of each row, (N,), or of each entry.
            cuts: of the bar, instead of labels; see `bar_cuts`.
            function: that gave the labels.
        """
        tail = _tail(prediction, target)
        which, known = _which(targets, tail), ~tail.isnan()
        seen = None if labels is None else _like(labels, tail)[known].unique()
        group = _groups(prediction.std, which, labels, cuts, seen)
        count = len(seen) if seen is not None else 0 if cuts is None else cuts.shape[1] + 1
        order = which[known].argsort(stable=True)
        sizes = which[known].bincount(minlength=int(which.max()) + 1).tolist()
        lists: list[Tensor] = []
        place = []
        for own, of in zip(*(t[known][order].split(sizes) for t in (tail, group)), strict=True):
            merged = _merged(of.bincount(minlength=count)[:count].tolist(), by_size=cuts is None)
            place.append([len(lists) + i for i in [*merged, len(set(merged))]])
            numbers = of.new_tensor([*merged, 0])[of]
            parts = [*(own[numbers == i] for i in range(len(set(merged)))), own]
            lists += [part.sort(descending=True).values for part in parts]
        counts = which.new_tensor([len(one) for one in lists])
        return cls(torch.cat(lists), counts, which.new_tensor(place), cuts, seen, function)

    def bound(self, labels: Tensor | None = None, targets: Tensor | None = None) -> BoundConformal:
        """To the rows of a prediction; the arguments are those of `of`."""
        return BoundConformal(self, labels, targets)

    def thresholds(self, level: float) -> Tensor:
        r"""Tail of the $\lceil (n+1)\,\mathrm{level} \rceil$-th score of each list; 0 beyond n."""
        share = Fraction(str(float(level)))  # 0.9 is nine tenths, whatever its last bit
        rank = self.counts.new_tensor([math.ceil((n + 1) * share) for n in self.counts.tolist()])
        at = self.counts.cumsum(0) - self.counts + rank - 1
        tails = torch.cat([self.tails, self.tails.new_zeros(1)])
        return tails[torch.where(rank > self.counts, len(self.tails), at)]

    def cells(self, std: Tensor, labels: Tensor | None, targets: Tensor | None) -> Tensor:
        """The list of each entry of a prediction with that standard deviation."""
        which = _which(targets, std)
        group = _groups(std, which, labels, self.cuts, self.labels)
        if self.labels is not None and not self._said and bool((group == len(self.labels)).any()):
            self._said.append(
                "Some rows have no group, or one that no conformal row had: their intervals are "
                "those of all rows together."
            )
            notify(self._said[0])
        return self.place[which, group]

    @property
    def sentences(self) -> list[str]:
        """What a report says of it."""
        rows = self.counts[self.place[:, -1]]
        fewest, groups = int(rows.min()), self.place.shape[1] - 1
        said = f"Conformal intervals from {int(rows.max())} rows"
        said += "" if fewest == int(rows.max()) else f" ({fewest} where most targets are masked)"
        said += (
            "" if groups == 0 else f", in {groups} groups{' by the bar' * (self.labels is None)}"
        )
        if together := self._together():
            said += f"; those of fewer than {LEAST} rows are merged: {'; '.join(together)}"
        return [f"{said}. {_GUARANTEE}", _QUESTION]

    def _together(self) -> list[str]:
        """Groups that share a list, as "3, 5 with 61"."""
        names = range(1, self.place.shape[1]) if self.labels is None else self.labels.tolist()
        found = []
        for k, lists in enumerate(self.place[:, :-1].tolist()):
            whose = f" of target {k}" if len(self.place) > 1 else ""
            for i in sorted({i for i in lists if lists.count(i) > 1}):
                shared = ", ".join(
                    str(name) for name, j in zip(names, lists, strict=True) if i == j
                )
                found.append(f"{shared}{whose} with {int(self.counts[i])}")
        return found

    def to(self, device: torch.device) -> Conformal:
        """The same on another device."""
        return replace(self, **{name: one.to(device) for name, one in self.tensors().items()})

    def header(self) -> dict[str, Any]:
        """Plain values for a file's header; the tensors go by `tensors`."""
        return {"groups": [name for name in ("cuts", "labels") if getattr(self, name) is not None]}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors for a file."""
        names = ("tails", "counts", "place", *self.header()["groups"])
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_state(cls, header: dict[str, Any], tensors: dict[str, Tensor]) -> Conformal:
        """What `header` and `tensors` came from; refused where they came from none."""
        groups, what = header.get("groups"), "the conformal scores"
        require(groups in ([], ["cuts"], ["labels"]), "the conformal groups")
        tails, counts, place = (tensors[name] for name in ("tails", "counts", "place"))
        require(tails.dtype == torch.float64 and counts.dtype == place.dtype == torch.int64, what)
        require(bool((counts >= 0).all()) and counts.sum() == tails.numel(), what)
        falling = all(bool((one.diff() <= 0).all()) for one in tails.split(counts.tolist()))
        require(falling and bool(((tails >= 0) & (tails <= 1)).all()), what)
        within = bool(((place >= 0) & (place < len(counts))).all())
        (targets, columns), own = place.shape, {name: tensors[name] for name in groups or []}
        shapes = {"cuts": (targets, columns - 2), "labels": (columns - 1,)}
        fits = all(one.shape == shapes[name] for name, one in own.items())
        rising = all(bool((one.diff() >= 0).all()) for one in own.values())
        require(within and fits and rising and (columns == 1 or bool(own)), "the conformal groups")
        return cls(tails, counts, place, **own)


@dataclass(frozen=True)
class BoundConformal:
    """Conformal intervals of the rows of one prediction; the attributes are those of `of`."""

    conformal: Conformal
    labels: Tensor | None = None
    targets: Tensor | None = None

    def interval(self, prediction: Prediction, level: float) -> tuple[Tensor, Tensor]:
        """Of each row's own law, between the tails at the threshold of its group: (low, high).

        Where a group has too few rows for the level it is the whole line, or the support, and a
        warning says so.
        """
        require_level(level, "An interval's")
        cells = self.conformal.cells(prediction.std, self.labels, self.targets)
        tail = self.conformal.thresholds(level)[cells]
        if bool((whole := tail == 0).any()):
            share, rows = Fraction(str(float(level))), self.conformal.counts[cells[whole]]
            notify(
                f"{int(whole.sum())} of {tail.numel()} conformal intervals hold everything: level "
                f"{level:g} takes at least {math.ceil(share / (1 - share))} conformal rows with "
                f"targets that the law holds possible, and here are {int(rows.min())}."
            )
        return _ends(prediction, tail)


def bar_cuts(std: Tensor | None, groups: int = 5) -> Tensor:
    """Where the bars of training rows (n, K) are cut into equal groups, (K, groups - 1)."""
    if std is None or not len(std):
        raise ValueError(
            "groups='bar' cuts the bar at quantiles of training rows, and the fit kept none. Fit "
            "with sample=8192, or pass groups=callable(batch)."
        )
    sizes = (torch.arange(1, groups, device=std.device) * len(std)) // groups
    return std.double().sort(0).values[sizes].T.contiguous()


def group_labels(function: Groups, batch: Any, rows: int, device: torch.device) -> Tensor:
    """Labels (N,) of the rows of a batch by the user's function, in int64."""
    try:
        labels = torch.as_tensor(function(batch))
        sound = not labels.is_floating_point() and labels.numel() == rows
    except (TypeError, ValueError, RuntimeError):
        sound = False
    if not sound:
        raise ValueError(f"groups must return one whole number per row, ({rows},): 0, 1, 2, ....")
    return labels.reshape(rows).to(device, torch.int64)


def set_aside(hashes: Tensor, share: float) -> Tensor:
    """Which rows, by their hashes (n,), are kept for conformal scores: n times the share.

    Equal rows stay together, and the order of rows does not matter.
    """
    if not 0 < share < 1:
        raise ValueError(f"conformal= as a share must lie between 0 and 1, got {share}.")
    mixed = hashes * _MIX[0]
    mixed = (mixed ^ (mixed >> 29)) * _MIX[1]  # the sample of training rows takes low hashes
    aside = mixed <= mixed.sort().values[max(round(share * len(mixed)), 1) - 1]
    if bool(aside.all()):
        raise ValueError(
            f"conformal={share} of {len(hashes)} rows leaves none to calibrate on. Pass more rows."
        )
    return aside


def _tail(prediction: Prediction, target: Tensor) -> Tensor:
    r"""$2 \min(P(Y \le y), P(Y \ge y))$ of each entry, NaN where the target is masked."""
    (mean, scale), (low, high), dtype = _located(prediction)
    y = target.to(mean.device, dtype).double()
    if y.shape != mean.shape:
        raise ValueError(f"Targets must be shaped {tuple(mean.shape)}, got {tuple(y.shape)}.")
    z = torch.where(y == mean, 0.0, (y - mean) / scale)
    below, above = prediction.law.cdf(z), prediction.law.mirrored().cdf(-z)
    below = torch.where(y < low, 0.0, torch.where(y >= high, 1.0, below))
    above = torch.where(y > high, 0.0, torch.where(y <= low, 1.0, above))
    tail = (2 * torch.minimum(below, above)).clamp(max=1)
    if bool((tail.isnan() & ~y.isnan()).any()) or bool(y.isnan().all()):
        raise ValueError("Conformal rows need targets and finite predictions. Clean the data.")
    return torch.where(y.isnan(), torch.nan, tail)


def _ends(prediction: Prediction, tail: Tensor) -> tuple[Tensor, Tensor]:
    """The interval of each law between its two tails of half that probability."""
    (mean, scale), bounds, dtype = _located(prediction)
    law, half = prediction.law, tail * (0.5 - 0.5 * _SLACK)
    low = torch.where(tail > 0, mean + scale * law.quantile(half), -torch.inf)
    high = torch.where(tail > 0, mean - scale * law.mirrored().quantile(half), torch.inf)
    return low.clamp(*bounds).to(dtype), high.clamp(*bounds).to(dtype)


def _located(p: Prediction) -> tuple[tuple[Tensor, Tensor], tuple[float, float], torch.dtype]:
    """Mean and scale in float64, the bounds as the returned precision has them, and that."""
    low, high = p.support or (None, None)
    ends = [-math.inf if low is None else low, math.inf if high is None else high]
    dtype = torch.promote_types(p.mean.dtype, torch.float32)
    least, most = torch.tensor(ends, dtype=dtype).tolist()
    return (p.mean.double(), p.scale.double()), (least, most), dtype


def _like(rows: Tensor, like: Tensor) -> Tensor:
    """One value for each row, or for each entry, in the shape of `like`."""
    rows = rows.reshape(-1, *[1] * (like.ndim - 1)) if rows.ndim == 1 else rows
    return rows.to(like.device).expand(like.shape).contiguous()


def _which(targets: Tensor | None, like: Tensor) -> Tensor:
    """The target of each entry."""
    if targets is None:
        targets = torch.arange(like.shape[-1] if like.ndim > 1 else 1)
    return targets.to(like.device).expand(like.shape)


def _groups(
    std: Tensor, which: Tensor, given: Tensor | None, cuts: Tensor | None, labels: Tensor | None
) -> Tensor:
    """Number of the group of each entry; their count (the last column) for a row in none."""
    if cuts is not None:
        return (std.double()[..., None] > cuts[which]).sum(-1)
    if labels is None or given is None:
        return torch.full_like(which, 0 if labels is None else len(labels))
    given = _like(given, std)
    found = torch.searchsorted(labels, given).clamp(max=len(labels) - 1)
    return torch.where(labels[found] == given, found, len(labels))


def _merged(counts: list[int], *, by_size: bool) -> list[int]:
    """Number of the list of each group: neighbours (by size) together until they have `LEAST`."""
    order = sorted(range(len(counts)), key=lambda i: counts[i] if by_size else i)
    numbers, number, held = [0] * len(counts), 0, 0
    for i in order:
        numbers[i], held = number, held + counts[i]
        if held >= LEAST:
            number, held = number + 1, 0
    return [min(i, max(number - 1, 0)) for i in numbers]  # too few at the end join those before
