"""Two files of results, compared name by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import ndiff

import numpy as np

from benchmarks.before_and_after.results import RAISED, Results

LIMITS = {"float64": 1e-9, "float32": 1e-6}
"""The largest relative difference, by the precision of the model, which begins each name."""


@dataclass(frozen=True)
class Difference:
    """A result whose numbers differ.

    Attributes:
        name: The name of the result.
        size: The largest absolute difference over the largest absolute entry. It is infinite where
            shapes, types of numbers, or the places of NaN and infinities differ.
        note: What differs, where it is not the numbers.
    """

    name: str
    size: float
    note: str = ""


@dataclass(frozen=True)
class WordsDiffer:
    """A text that differs.

    Attributes:
        name: The name of the text.
        lines: The lines that differ, marked with "- " before and "+ " after.
    """

    name: str
    lines: tuple[str, ...]

    @property
    def kind(self) -> tuple[str, ...]:
        """The lines without their numbers: texts of one kind differ in the same way."""
        return tuple(re.sub(r"\d[\d.,e+-]*", "#", line) for line in self.lines)


@dataclass(frozen=True)
class Comparison:
    """How two states of the code differ.

    Attributes:
        differences: All results that are in both files, with the sizes of their differences.
        missing: Names of results that are in one file alone, with the state that has them.
        raised: Names of cases that raise an error in one state alone, with that state and error.
        words: Texts that differ.
    """

    differences: list[Difference]
    missing: list[tuple[str, str]] = field(default_factory=list)
    raised: list[tuple[str, str]] = field(default_factory=list)
    words: list[WordsDiffer] = field(default_factory=list)

    @property
    def beyond(self) -> list[Difference]:
        """The differences beyond their limit, the largest first."""
        beyond = [found for found in self.differences if not found.size <= limit(found.name)]
        return sorted(beyond, key=lambda found: -found.size)

    @property
    def failed(self) -> bool:
        """Whether a number has changed, is missing, or has become an error or was one.

        Files that have no result in common show nothing, which is a failure too.
        """
        return bool(self.beyond or self.missing or self.raised or not self.differences)

    def largest(self, precision: str) -> Difference | None:
        """The largest difference among the results of models of a precision."""
        found = [entry for entry in self.differences if precision_of(entry.name) == precision]
        return max(found, key=lambda entry: entry.size, default=None)


def precision_of(name: str) -> str:
    """The precision of the model that gave a result."""
    return name.split("/")[0]


def limit(name: str) -> float:
    """The largest relative difference that counts as none."""
    return LIMITS.get(precision_of(name), LIMITS["float64"])


def compared(before: Results, after: Results) -> Comparison:
    """Compare the results of two states."""
    differences = [
        difference(name, before.numbers[name], after.numbers[name])
        for name in before.numbers
        if name in after.numbers
    ]
    missing = []
    raised = []
    for state, these, others in (("before", before, after), ("after", after, before)):
        missing += [(name, state) for name in these.numbers if name not in others.numbers]
        for name, text in these.words.items():
            if name.endswith(RAISED) and name not in others.words:
                raised.append((name.removesuffix(RAISED), f"{state} alone: {text}"))
    return Comparison(differences, missing, raised, list(words_that_differ(before, after)))


def difference(name: str, before: np.ndarray, after: np.ndarray) -> Difference:
    """The largest absolute difference of two arrays over their largest absolute entry."""
    if before.shape != after.shape:
        return Difference(name, np.inf, f"shape {before.shape} before, {after.shape} after")
    if before.dtype != after.dtype:
        return Difference(name, np.inf, f"{before.dtype} before, {after.dtype} after")
    if before.size == 0:
        return Difference(name, 0.0)
    before, after = before.astype(np.float64), after.astype(np.float64)
    finite = np.isfinite(before)
    # NaN and infinities must stand in the same places with the same signs.
    if not np.array_equal(before[~finite], after[~finite], equal_nan=True):
        return Difference(name, np.inf, "NaN or infinity in other places")
    if not np.isfinite(after[finite]).all():
        return Difference(name, np.inf, "NaN or infinity in other places")
    before, after = before[finite], after[finite]
    distance = np.abs(before - after).max(initial=0.0)
    if distance == 0:
        return Difference(name, 0.0)
    largest = max(np.abs(before).max(), np.abs(after).max())
    return Difference(name, float(distance / largest))


def words_that_differ(before: Results, after: Results) -> Iterator[WordsDiffer]:
    """The texts that differ, or that only one state has."""
    for name in dict.fromkeys([*before.words, *after.words]):
        old = before.words.get(name, "")
        new = after.words.get(name, "")
        if old != new:
            lines = ndiff(old.splitlines(), new.splitlines())
            yield WordsDiffer(name, tuple(line for line in lines if line[0] in "-+"))


def report(before: Results, after: Results, comparison: Comparison) -> str:
    """The comparison as text."""
    lines = [
        *(f"{state}: {described(results)}" for state, results in states(before, after)),
        f"{len(comparison.differences)} results are in both files.",
        "Differences are relative: the largest absolute difference of an array over its largest "
        "absolute entry.",
    ]
    for precision, bound in LIMITS.items():
        largest = comparison.largest(precision)
        if largest is not None:
            lines.append(
                f"{precision}: largest difference {largest.size:.2g} (limit {bound:g}), in "
                f"{largest.name}"
            )
    lines += section(
        "Numbers beyond their limit",
        [f"{found.size:.2g}  {found.name}  {found.note}".rstrip() for found in comparison.beyond],
    )
    lines += section(
        "Results in one file alone",
        [f"{state} alone: {name}" for name, state in comparison.missing],
    )
    lines += section(
        "Cases that raise in one state alone",
        [f"{name}: {text}" for name, text in comparison.raised],
    )
    lines += word_lines(comparison.words)
    lines.append("FAILED" if comparison.failed else "No number differs.")
    return "\n".join(lines)


def states(before: Results, after: Results) -> Iterator[tuple[str, Results]]:
    """The two files with the names that the report gives them."""
    yield "before", before
    yield "after", after


def described(results: Results) -> str:
    """Where results come from, and how many there are."""
    raised = sum(name.endswith(RAISED) for name in results.words)
    about = ", ".join(f"{key} {value}" for key, value in results.about.items())
    counts = f"{len(results.numbers)} numbers, {len(results.words)} texts, {raised} errors"
    return f"{counts}; {about}"


def section(title: str, entries: list[str]) -> list[str]:
    """A heading with its count, and the entries below it."""
    return [f"{title}: {len(entries)}", *(f"  {entry}" for entry in entries)]


def word_lines(words: list[WordsDiffer]) -> list[str]:
    """The texts that differ, one example of each kind."""
    kinds: dict[tuple[str, ...], list[WordsDiffer]] = {}
    for entry in words:
        kinds.setdefault(entry.kind, []).append(entry)
    lines = [f"Words differ (not a failure): {len(words)} texts, in {len(kinds)} ways"]
    for alike in sorted(kinds.values(), key=len, reverse=True):
        lines.append(f"  {len(alike)} times, first in {alike[0].name}")
        lines += [f"    {line}" for line in alike[0].lines]
    return lines
