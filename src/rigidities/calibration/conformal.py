r"""Intervals whose coverage is guaranteed: split conformal prediction by each distribution's tails.

The score of a row is how far out its target lies in its distribution, $s = |2u - 1|$ with $u =
F(y)$ (Chernozhukov, Wuethrich and Zhu, 2021). What is kept is the tail
$t = 1 - s = 2 \min(P(Y \le y), P(Y \ge y))$, at most 1: it keeps its digits where s rounds to one.
Where a distribution has mass at a bound, it belongs to the smallest score between F(y-) and F(y).
With n rows that fitted nothing else, an interval ends at the
$\lceil (n+1)\,\mathrm{level} \rceil$-th smallest score.

Data flow: `Conformal.of` sorts the tails of rows into one list for each target and group (groups
are those of a user's function, or of the bar's size); `Conformal.bound` joins the lists to a
prediction; `BoundConformal.interval` looks up the threshold of each of its rows.
`calibration.conformalized` adds them to a calibration.
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

__all__ = ["BoundConformal", "Conformal", "Groups", "bar_cuts", "rows_needed"]

LEAST = 50
"""Number of rows below which a group by the bar is merged with the next one."""
USUAL = 0.9
"""Level for which a report names the groups that are too small."""

_SLACK = 1e-6
"""Share by which a threshold is lowered, so that rounding does not exclude the row it is from."""
_UNLABELLED = torch.iinfo(torch.int64).min
"""The label of rows without a group."""
_GUARANTEE = (
    "They reach their level on average over draws of calibration and test rows, not for every "
    "single input. The rows must not have been used for training, model selection or fitting."
)

Groups = Callable[[Any], Any]
"""A user's function from a batch to the labels of its rows."""


@dataclass(frozen=True, eq=False)
class Conformal:
    """Sorted tails of rows that fitted nothing else, for each target and group.

    Attributes:
        tails: L lists of tails, one after the other, each in descending order, (S,).
        counts: The number of rows of each list, (L,).
        place: The number of each target's and group's list, (K, G + 1). The last column has the
            lists of all rows of a target.
        labels: The groups' labels, ascending, (G,); groups by the bar have the labels 1, 2, ....
        cuts: Values of the bar that separate groups by the bar, (K, G - 1).
        function: The function that labels a batch; files do not hold it.
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
    ) -> Conformal:
        """The sorted tails of rows that fitted nothing else.

        Args:
            prediction: Predictions of any shape.
            target: True values, shaped like them; NaN where masked.
            targets: The number of each entry's target, broadcast against the prediction; by default
                its place in the last of several dimensions.
            labels: The label of each entry's group, broadcast against the prediction.
            cuts: Cuts of the bar, instead of labels; see `bar_cuts`.
            function: The function that gave the labels.

        Neighbouring groups by the bar share one list until it has `LEAST` rows. Groups by labels
        never do, since their guarantee would be that of the union.

        Raises:
            ValueError: No target is known, or a prediction is not finite.
        """
        tail = prediction.tail(target).detach()
        has_target = ~tail.isnan()
        if not bool(has_target.any()) or bool((prediction.mean + prediction.std).isnan().any()):
            raise ValueError("Conformal rows need targets and finite predictions. Clean the data.")
        target_numbers = _target_numbers(targets, tail)
        entry_labels = _entry_labels(prediction.std, target_numbers, labels, cuts)
        if cuts is None:
            group_names = torch.unique(entry_labels[has_target & (entry_labels != _UNLABELLED)])
        else:
            group_names = torch.arange(1, cuts.shape[1] + 2, device=cuts.device)
        groups = len(group_names)
        group = _group_numbers(group_names, entry_labels)[has_target]
        target_number = target_numbers[has_target]

        # How many rows each target and group has, (K, G); rows without a group fill the column G.
        count = int(target_numbers.max()) + 1
        cells = target_number * (groups + 1) + group
        row_counts = cells.bincount(minlength=count * (groups + 1)).reshape(count, -1)[:, :groups]
        place = _list_numbers(row_counts.tolist(), merge_below=0 if cuts is None else LEAST)
        place_tensor = target_number.new_tensor(place)

        # Each tail goes into the list of all rows of its target, and into that of its group.
        list_numbers = place_tensor[target_number, -1]
        tails = tail[has_target]
        if groups:
            list_numbers = torch.cat([list_numbers, place_tensor[target_number, group]])
            tails = tails.repeat(2)
        # Sorted by list, and in descending order within each list.
        order = tails.argsort(descending=True)
        order = order[list_numbers[order].argsort(stable=True)]
        return cls(
            tails=tails[order],
            counts=list_numbers.bincount(minlength=place[-1][-1] + 1),
            place=place_tensor,
            labels=group_names,
            cuts=cuts,
            function=function,
        )

    def bound(self, labels: Tensor | None = None, targets: Tensor | None = None) -> BoundConformal:
        """The lists for the rows of a prediction; the arguments are those of `of`."""
        return BoundConformal(self, labels, targets)

    def thresholds(self, level: float) -> Tensor:
        r"""The tail of the $\lceil (n+1)\,\mathrm{level} \rceil$-th score of each list, (L,).

        It is 0 where the list has fewer rows than that.
        """
        share = _as_written(level)
        ranks = [math.ceil((n + 1) * share) for n in self.counts.tolist()]
        rank = self.counts.new_tensor(ranks)
        index = self.counts.cumsum(0) - self.counts + rank - 1
        tails = torch.cat([self.tails, self.tails.new_zeros(1)])
        return tails[torch.where(rank > self.counts, len(self.tails), index)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Conformal):
            return False
        tensors = self.tensors()
        other_tensors = other.tensors()
        if set(tensors) != set(other_tensors):
            return False
        return all(torch.equal(tensor, other_tensors[name]) for name, tensor in tensors.items())

    @property
    def sentences(self) -> list[str]:
        """What a report says about the intervals."""
        rows = self.counts[self.place[:, -1]]
        least = int(rows.min())
        most = int(rows.max())
        sentence = f"Conformal intervals from {most} rows"
        if least < most:
            sentence += f" ({least} for the target that is masked most often)"
        if len(self.labels):
            by_bar = "" if self.cuts is None else " by the bar"
            sentence += f", in {len(self.labels)} groups{by_bar}"
        merged = self._merged()
        if merged:
            sentence += f"; small groups are merged: {'; '.join(merged)}"
        sentences = [f"{sentence}. {_GUARANTEE}"]
        small = self._too_small(USUAL)
        if small:
            sentences.append(
                f"Some groups are too small for {USUAL:.0%} intervals, which need "
                f"{rows_needed(USUAL)} rows: {_listed(small)}. Their intervals are infinite. Add "
                "rows to these groups, or give small groups one label."
            )
        return sentences

    def _merged(self) -> list[str]:
        """Groups that share one list, as "1, 4 with 65 rows"."""
        merged = []
        for target, lists in enumerate(self.place[:, :-1]):
            for number in lists.unique().tolist():
                labels = self.labels[lists == number].tolist()
                if len(labels) > 1:
                    names = ", ".join(map(str, labels)) + self._of_target(target)
                    merged.append(f"{names} with {_row_count(int(self.counts[number]))}")
        return merged

    def _too_small(self, level: float) -> list[str]:
        """Groups whose list has too few rows for a level, as "3 with 6 rows"."""
        small = []
        for target, lists in enumerate(self.place[:, :-1].tolist()):
            for label, number in zip(self.labels.tolist(), lists, strict=True):
                count = int(self.counts[number])
                if count < rows_needed(level):
                    small.append(f"{label}{self._of_target(target)} with {_row_count(count)}")
        return small

    def _of_target(self, target: int) -> str:
        """Words that name a group's target; empty where there is one target."""
        return f" of target {target}" if len(self.place) > 1 else ""

    def to(self, device: torch.device | str) -> Conformal:
        """The same on another device."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

    def tensors(self) -> dict[str, Any]:
        """The tensors for a file: everything but the function."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class BoundConformal:
    """Conformal intervals of the rows of one prediction.

    Attributes:
        conformal: The sorted tails.
        labels: The label of each entry's group, as in `Conformal.of`.
        targets: The number of each entry's target, as in `Conformal.of`.
    """

    wide: ClassVar[tuple[str, ...]] = ()

    conformal: Conformal
    labels: Tensor | None = None
    targets: Tensor | None = None

    def to(self, device: torch.device | str) -> BoundConformal:
        """The same on another device."""
        return BoundConformal(
            self.conformal.to(device),
            None if self.labels is None else self.labels.to(device),
            None if self.targets is None else self.targets.to(device),
        )

    def resolved(self, prediction: Prediction) -> BoundConformal:
        """The same with each entry's group and target fixed, whatever bars and places become."""
        target_numbers, labels = self._entries(prediction)
        return BoundConformal(replace(self.conformal, cuts=None), labels, target_numbers)

    def _entries(self, prediction: Prediction) -> tuple[Tensor, Tensor]:
        """Target and label of each entry of a prediction."""
        target_numbers = _target_numbers(self.targets, prediction.std)
        cuts = self.conformal.cuts
        return target_numbers, _entry_labels(prediction.std, target_numbers, self.labels, cuts)

    def interval(self, prediction: Prediction, level: float) -> tuple[Tensor, Tensor]:
        """The interval of each entry, whose ends have the tail that is its group's threshold.

        Where a group has too few rows for the level, the interval is the whole line or the support,
        and a warning names the group. A label that no conformal row had is such a group. Entries
        without a label get the threshold of all rows.

        Args:
            prediction: The prediction.
            level: The share of true values that the intervals are to cover.

        Returns:
            Lower and upper ends.
        """
        require_level(level, "An interval's")
        conformal = self.conformal
        target_numbers, labels = self._entries(prediction)
        group = _group_numbers(conformal.labels, labels)
        unseen = torch.zeros_like(labels, dtype=torch.bool)
        if len(conformal.labels):
            unlabelled = labels == _UNLABELLED
            unseen = (group == len(conformal.labels)) & ~unlabelled
            if bool(unlabelled.any()):
                notify(
                    "Some rows have no group. Their conformal intervals are those of all rows "
                    "together. Pass groups= to load: the function that was passed to conformalize."
                )
        lists = conformal.place[target_numbers, group]
        tail = conformal.thresholds(level)[lists]
        tail = torch.where(unseen, tail.new_zeros(()), tail)
        whole = tail == 0
        if bool(whole.any()):
            counts = torch.where(unseen, 0, conformal.counts[lists])
            grouped = len(conformal.labels) > 0
            notify(_why_whole(whole, counts, labels, level, grouped=grouped))
        return prediction.within(tail * (1 - _SLACK))


def rows_needed(level: float) -> int:
    r"""Number of conformal rows that a finite interval needs: the least n with (n + 1) level <= n.

    >>> rows_needed(0.9), rows_needed(0.95)
    (9, 19)
    """
    share = _as_written(level)
    return math.ceil(share / (1 - share))


def bar_cuts(std: Tensor | None, groups: int = 5) -> Tensor:
    """Where the bars of training rows (n, K) are cut into equal groups, (K, groups - 1).

    Raises:
        ValueError: There are no training rows.
    """
    if std is None or not len(std):
        raise ValueError(
            "groups='bar' uses quantiles of the training rows' bars, but the fit kept no training "
            "rows. Fit without keep_rows=0, or pass groups=callable(batch)."
        )
    last_of_group = torch.arange(1, groups, device=std.device) * len(std) // groups
    return std.double().sort(0).values[last_of_group].T.contiguous()


def group_labels(function: Groups, batch: Any, output: Tensor) -> Tensor:
    """Labels of a batch by the user's function, one per row, shaped like the model's output.

    Raises:
        ValueError: The function does not return one whole number per row.
    """
    try:
        with torch.enable_grad():  # for functions that differentiate
            labels = torch.as_tensor(function(batch), device=output.device)
    except (TypeError, ValueError, RuntimeError):  # strings, None
        labels = output.new_empty(0)
    if labels.is_floating_point() or labels.numel() != len(output):
        raise ValueError(
            f"groups must return one whole number per row, ({len(output)},): 0, 1, 2, ...."
        )
    return labels.long().reshape(-1, *[1] * (output.ndim - 1)).expand(output.shape)


def _target_numbers(targets: Tensor | None, like: Tensor) -> Tensor:
    """The target of each entry: the one given, or its place in the last of several dimensions."""
    if targets is None:
        count = like.shape[-1] if like.ndim > 1 else 1
        targets = torch.arange(count, device=like.device)
    return targets.expand(like.shape)


def _entry_labels(
    std: Tensor, target_numbers: Tensor, labels: Tensor | None, cuts: Tensor | None
) -> Tensor:
    """The label of each entry: that of its bar, the one given, or none."""
    if cuts is not None:
        return 1 + (std.double()[..., None] > cuts[target_numbers]).sum(-1)
    if labels is None:
        return torch.full_like(target_numbers, _UNLABELLED)
    return labels.expand(std.shape).contiguous()


def _group_numbers(group_names: Tensor, labels: Tensor) -> Tensor:
    """The index of each label among the groups' (G,); G, the last column, for other labels."""
    number = torch.searchsorted(group_names, labels)
    padded = torch.cat([group_names, group_names.new_full((1,), _UNLABELLED)])
    return torch.where(padded[number] == labels, number, len(group_names))


def _as_written(level: float) -> Fraction:
    """The level as it is written: 0.9 is nine tenths, whatever its last bit."""
    return Fraction(str(float(level)))


def _row_count(count: int) -> str:
    """A number of rows in words."""
    return "1 row" if count == 1 else f"{count} rows"


def _listed(names: list[str], most: int = 8) -> str:
    """The first of some names, and how many others there are."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} others"


def _why_whole(
    whole: Tensor, counts: Tensor, labels: Tensor, level: float, *, grouped: bool
) -> str:
    """A sentence on why intervals cover everything, with the groups and the rows they need.

    Args:
        whole: Which intervals cover everything.
        counts: The conformal rows of each one's list.
        labels: The group of each one.
        level: The intervals' level.
        grouped: Whether there are groups.
    """
    needed = rows_needed(level)
    begin = f"{int(whole.sum())} of {whole.numel()} conformal intervals are infinite: "
    few = whole & (counts < needed)
    if not bool(few.any()):
        return (
            f"{begin}too many conformal rows have targets that are impossible under the "
            f"distribution for level {level:g}. Check the support, and bars of zero."
        )
    if not grouped or bool((labels[few] == _UNLABELLED).any()):
        least = _row_count(int(counts[few].min()))
        return f"{begin}{least} are too few for level {level:g}, which needs {needed}."
    pairs = torch.unique(torch.stack([labels[few], counts[few]], -1), dim=0).tolist()
    names = _listed([f"{label} with {_row_count(count)}" for label, count in pairs])
    return (
        f"{begin}groups too small for level {level:g}, which needs {needed} rows: {names}. Pass "
        "more rows of these groups to conformalize, or give small groups one label."
    )


def _list_numbers(row_counts: list[list[int]], merge_below: int) -> list[list[int]]:
    """`Conformal.place`: list numbers of each target's groups, then of all its rows, (K, G + 1).

    Args:
        row_counts: The number of rows of each target's groups, (K, G).
        merge_below: Neighbours share a list until it has this many rows. Too few at the end join
            the list before. With 0 every group has a list of its own.
    """
    place = []
    first = 0  # number of the target's first list
    for counts in row_counts:
        numbers = []
        number = 0
        rows = 0
        for count in counts:
            numbers.append(number)
            rows += count
            if rows >= merge_below:
                number += 1
                rows = 0
        last = max(number - 1, 0)
        of_groups = [first + min(number, last) for number in numbers]
        of_all_rows = first + last + 1 if counts else first + last
        place.append([*of_groups, of_all_rows])
        first = of_all_rows + 1
    return place
