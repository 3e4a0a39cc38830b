r"""Intervals whose coverage is guaranteed: split conformal prediction by the distribution's own
tails.

The score of a row is how far out its target lies in its distribution, $s = |2u - 1|$ with $u =
F(y)$ (Chernozhukov, Wuethrich and Zhu, 2021). Held is the tail
$t = 1 - s = 2 \min(P(Y \le y), P(Y \ge y))$, at most 1: it keeps its digits where s rounds to one,
and is the smallest score between F(y-) and F(y) where a distribution has mass at a bound. Of n rows
that fitted nothing else an interval takes the $\lceil (n+1)\,\mathrm{level} \rceil$-th smallest
score.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..notices import notify, require_level
from ..prediction.prediction import Prediction

LEAST = 50
"""Rows below which groups by the bar are merged, where nothing else is asked for."""

USUAL = 0.9
"""Level for which a report says which groups are too small."""

_SLACK = 1e-6
"""Share by which tails are narrowed: rounding must not push out the row that one came from."""
_MIX = (-7046029254386353131, -4658895280553007687)
_NONE = torch.iinfo(torch.int64).min
_GUARANTEE = (
    "They hold their level on average over draws of calibration and test rows, for rows used in "
    "neither training, stopping nor fitting; not per input."
)

Groups = Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class Conformal:
    """Sorted tails of rows that fitted nothing else, for each target and group.

    Attributes:
        tails: lists one after the other, each falling (its scores rise), (S,).
        counts: rows of each list, (L,).
        place: the list of each target and group, (K, G + 1); last that of all its rows.
        labels: of the groups, rising, (G,); of those by the bar 1, 2, ....
        cuts: of the bar, between its groups, (K, G - 1).
        function: that labels a batch; files do not hold it.
    """

    tails: Tensor
    counts: Tensor
    place: Tensor
    labels: Tensor
    cuts: Tensor | None = None
    function: Groups | None = None

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
        merge_below: int | None = None,
    ) -> Conformal:
        """From predictions of rows that fitted nothing else.

        Args:
            prediction: of any shape.
            target: shaped like it; NaN where masked.
            targets: which target each entry is of, broadcast against the prediction; by default
                its place in the last of several dimensions.
            labels: which group each entry is of, likewise.
            cuts: of the bar, instead of labels; see `bar_cuts`.
            function: that gave the labels.
            merge_below: rows below which groups share one list. By default groups by labels are
                never merged, since their guarantee would be that of the union, and groups by the
                bar are below `LEAST`.
        """
        if merge_below is None:
            merge_below = 0 if cuts is None else LEAST
        tail = prediction.tail(target).detach()
        known, which = ~tail.isnan(), _which(targets, tail)
        if not bool(known.any()) or bool((prediction.mean + prediction.std).isnan().any()):
            raise ValueError("Conformal rows need targets and finite predictions. Clean the data.")
        given = _labels(prediction.std, which, labels, cuts)
        seen: Tensor = torch.unique(given[known & (given != _NONE)])
        if cuts is not None:
            seen = torch.arange(1, cuts.shape[1] + 2, device=cuts.device)
        count, groups, group = int(which.max()) + 1, len(seen), _number(seen, given)[known]
        which = which[known]
        table = (which * (groups + 1) + group).bincount(minlength=count * (groups + 1))
        rows = table.reshape(count, -1)[:, :groups].tolist()
        place = _lists(rows, by_size=cuts is None, merge_below=merge_below)
        places = which.new_tensor(place)
        columns = [places[which, -1], places[which, group]][: 2 if groups else 1]
        lists, tails = torch.cat(columns), tail[known].repeat(len(columns))
        order = tails.argsort(descending=True)
        order = order[lists[order].argsort(stable=True)]
        counts = lists.bincount(minlength=place[-1][-1] + 1)
        return cls(tails[order], counts, places, seen, cuts, function)

    def bound(self, labels: Tensor | None = None, targets: Tensor | None = None) -> BoundConformal:
        """To the rows of a prediction; the arguments are those of `of`."""
        return BoundConformal(self, labels, targets)

    def thresholds(self, level: float) -> Tensor:
        r"""Tail of the $\lceil (n+1)\,\mathrm{level} \rceil$-th score of each list; 0 beyond n."""
        share = _exact(level)
        rank = self.counts.new_tensor([math.ceil((n + 1) * share) for n in self.counts.tolist()])
        at = self.counts.cumsum(0) - self.counts + rank - 1
        tails = torch.cat([self.tails, self.tails.new_zeros(1)])
        return tails[torch.where(rank > self.counts, len(self.tails), at)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Conformal) or {*self.tensors()} != {*other.tensors()}:
            return False
        return all(torch.equal(own, other.tensors()[k]) for k, own in self.tensors().items())

    @property
    def sentences(self) -> list[str]:
        """What a report says of it."""
        rows, groups = self.counts[self.place[:, -1]], len(self.labels)
        least, most = int(rows.min()), int(rows.max())
        said = f"Conformal intervals from {most} rows"
        said += "" if least == most else f" ({least} where most targets are masked)"
        said += f", in {groups} groups{' by the bar' * (self.cuts is not None)}" if groups else ""
        if merged := self._merged():
            said += f"; small ones are merged: {'; '.join(merged)}"
        small = self._too_small(USUAL)
        sentences = [f"{said}. {_GUARANTEE}"]
        if small:
            sentences.append(
                f"Groups too small for {USUAL:.0%} intervals, which need {rows_needed(USUAL)} "
                f"rows: {_listed(small)}. Theirs are infinite. Add rows to them, or merge them: "
                f"calibrate(..., merge_groups={LEAST})."
            )
        return sentences

    def _merged(self) -> list[str]:
        """Groups that share one list, as "1, 4 with 65 rows"."""
        merged = []
        for target, lists in enumerate(self.place[:, :-1]):
            for number in lists.unique().tolist():
                shared = self.labels[lists == number].tolist()
                if len(shared) > 1:
                    names = ", ".join(map(str, shared)) + self._of_target(target)
                    merged.append(f"{names} with {_rows(int(self.counts[number]))}")
        return merged

    def _too_small(self, level: float) -> list[str]:
        """Groups whose list has too few rows for a level, as "3 with 6 rows"."""
        small = []
        for target, lists in enumerate(self.place[:, :-1].tolist()):
            for label, number in zip(self.labels.tolist(), lists, strict=True):
                count = int(self.counts[number])
                if count < rows_needed(level):
                    small.append(f"{label}{self._of_target(target)} with {_rows(count)}")
        return small

    def _of_target(self, target: int) -> str:
        """Which target a group is of, where there are several."""
        return f" of target {target}" if len(self.place) > 1 else ""

    def to(self, device: torch.device | str) -> Conformal:
        """The same on another device."""
        return replace(self, **{name: one.to(device) for name, one in self.tensors().items()})

    def tensors(self) -> dict[str, Any]:
        """The tensors for a file: everything but the function."""
        return {name: one for name, one in vars(self).items() if isinstance(one, Tensor)}


@dataclass(frozen=True)
class BoundConformal:
    """Conformal intervals of the rows of one prediction; see `Conformal.of`."""

    wide: ClassVar[tuple[str, ...]] = ()

    conformal: Conformal
    labels: Tensor | None = None
    targets: Tensor | None = None

    def to(self, device: torch.device | str) -> BoundConformal:
        """The same on another device."""
        return replace(self, **{k: v.to(device) for k, v in vars(self).items() if v is not None})

    def resolved(self, prediction: Prediction) -> BoundConformal:
        """With group and target of each entry, whatever its bar and its place become."""
        which = _which(self.targets, prediction.std)
        labels = _labels(prediction.std, which, self.labels, self.conformal.cuts)
        return BoundConformal(replace(self.conformal, cuts=None), labels, which)

    def interval(self, prediction: Prediction, level: float) -> tuple[Tensor, Tensor]:
        """Of each row's own distribution, between the tails at the threshold of its group: (low,
        high).

        Where a group has too few rows for the level it is the whole line, or the support, and a
        warning names the group. A label that no conformal row had is such a group. Rows without a
        label get the threshold of all rows.
        """
        require_level(level, "An interval's")
        scores, labels, which = vars(self.resolved(prediction)).values()
        group = _number(scores.labels, labels)
        unseen = torch.zeros_like(labels, dtype=torch.bool)
        if len(scores.labels):
            unlabelled = labels == _NONE
            unseen = (group == len(scores.labels)) & ~unlabelled
            if bool(unlabelled.any()):
                notify(
                    "Some rows have no group: their conformal intervals are those of all rows "
                    "together. Pass groups= to load, the function that calibrate was given."
                )
        lists = scores.place[which, group]
        tail = scores.thresholds(level)[lists]
        tail = torch.where(unseen, tail.new_zeros(()), tail)
        if bool((whole := tail == 0).any()):
            counts = torch.where(unseen, 0, scores.counts[lists])
            notify(_why_whole(whole, counts, labels, level, grouped=len(scores.labels) > 0))
        return prediction.within(tail * (1 - _SLACK))


def rows_needed(level: float) -> int:
    r"""Conformal rows that a finite interval takes: the least n with (n + 1) level <= n.

    >>> rows_needed(0.9), rows_needed(0.95)
    (9, 19)
    """
    share = _exact(level)
    return math.ceil(share / (1 - share))


def bar_cuts(std: Tensor | None, groups: int = 5) -> Tensor:
    """Where the bars of training rows (n, K) are cut into equal groups, (K, groups - 1)."""
    if std is None or not len(std):
        raise ValueError(
            "groups='bar' cuts the bar at quantiles of training rows, and the fit kept none. Fit "
            "with sample=8192, or pass groups=callable(batch)."
        )
    last = torch.arange(1, groups, device=std.device) * len(std) // groups
    return std.double().sort(0).values[last].T.contiguous()


def group_labels(function: Groups, batch: Any, output: Tensor) -> Tensor:
    """Labels of a batch by the user's function, one per row, shaped like the model's output."""
    try:
        labels = torch.as_tensor(function(batch), device=output.device)
    except (TypeError, ValueError, RuntimeError):  # strings, None
        labels = output.new_empty(0)
    if labels.is_floating_point() or labels.numel() != len(output):
        raise ValueError(
            f"groups must return one whole number per row, ({len(output)},): 0, 1, 2, ...."
        )
    return labels.long().reshape(-1, *[1] * (output.ndim - 1)).expand(output.shape)


def set_aside(hashes: Tensor, share: float) -> Tensor:
    """Which rows, by their hashes (n,), are kept for conformal scores: n times the share.

    Equal rows stay together, and the order of rows does not matter.
    """
    if not 0 < share < 1:
        raise ValueError(f"conformal= as a share must lie between 0 and 1, got {share}.")
    mixed = hashes * _MIX[0]
    mixed = (mixed ^ (mixed >> 29)) * _MIX[1]  # the sample of training rows takes low hashes
    return mixed <= mixed.sort().values[max(round(share * len(mixed)), 1) - 1]


def _which(targets: Tensor | None, like: Tensor) -> Tensor:
    """The target of each entry."""
    if targets is None:
        targets = torch.arange(like.shape[-1] if like.ndim > 1 else 1, device=like.device)
    return targets.expand(like.shape)


def _labels(std: Tensor, which: Tensor, given: Tensor | None, cuts: Tensor | None) -> Tensor:
    """The label of each entry: that of its bar, the one given, or none."""
    if cuts is not None:
        return 1 + (std.double()[..., None] > cuts[which]).sum(-1)
    return torch.full_like(which, _NONE) if given is None else given.expand(std.shape).contiguous()


def _number(seen: Tensor, given: Tensor) -> Tensor:
    """Where each label stands among those seen; their count, the last column, for others."""
    found = torch.searchsorted(seen, given)
    same = torch.cat([seen, seen.new_full((1,), _NONE)])[found] == given
    return torch.where(same, found, len(seen))


def _exact(level: float) -> Fraction:
    """The level as it is written: 0.9 is nine tenths, whatever its last bit."""
    return Fraction(str(float(level)))


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _listed(names: list[str], most: int = 8) -> str:
    """The first of some names, and how many others there are."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} others"


def _why_whole(
    whole: Tensor, counts: Tensor, labels: Tensor, level: float, *, grouped: bool
) -> str:
    """Why intervals hold everything, with the groups, their rows and the rows they need.

    Args:
        whole: which intervals do.
        counts: conformal rows of each one's list.
        labels: its group.
        level: of the intervals.
        grouped: whether there are groups.
    """
    needed = rows_needed(level)
    begin = f"{int(whole.sum())} of {whole.numel()} conformal intervals hold everything: "
    few = whole & (counts < needed)
    if not bool(few.any()):
        return (
            f"{begin}too many conformal rows have targets that the distribution holds impossible for level "
            f"{level:g}. Check the support and bars of zero."
        )
    if not grouped or bool((labels[few] == _NONE).any()):
        least = _rows(int(counts[few].min()))
        return f"{begin}{least} are too few for level {level:g}, which needs {needed}."
    pairs = torch.unique(torch.stack([labels[few], counts[few]], -1), dim=0).tolist()
    names = _listed([f"{label} with {_rows(count)}" for label, count in pairs])
    return (
        f"{begin}groups too small for level {level:g}, which needs {needed} rows: {names}. Give "
        f"calibrate more conformal rows of them, or merge_groups={LEAST} to merge small groups."
    )


def _lists(table: list[list[int]], *, by_size: bool, merge_below: int) -> list[list[int]]:
    """Numbers of the lists of each target's groups, of those rows (K, G), and of all its rows.

    Neighbours (by size) are together until they have `merge_below` rows; too few at the end join
    those before. With 0 every group has a list of its own.
    """
    place, first = [], 0
    for counts in table:
        numbers, number, held = [0] * len(counts), 0, 0
        for i in sorted(range(len(counts)), key=lambda i: counts[i] if by_size else i):
            numbers[i], held = number, held + counts[i]
            if held >= merge_below:
                number, held = number + 1, 0
        last = max(number - 1, 0)
        place.append([first + min(i, last) for i in numbers] + [first + last + bool(counts)])
        first = place[-1][-1] + 1
    return place
