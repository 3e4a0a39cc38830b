"""Ridges that a search may have cut off: what is known of them, and of their changes.

A ridge at the upper end of the search is only known to be at least that large, one at the lower
end at most that small. A mean of such numbers says where the search ends. Medians may still be
known, or bounded, and so may the sign of a change and whether it is larger than another. A change
between two ridges at the same end is open and left out of tests: that is fair, since it is as open
the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.judging.scores import quartiles

Range = tuple[float, float]
"""The least and the most that a number can be; the same twice where it is known."""

Net = Mapping[str, Any]
"""Numbers of a net, "at_lower_edge" and "at_upper_edge" among them."""

LEVEL = 0.05
"""Of the test."""

SAME = 0.005
"""Decades by which a ridge must move to have moved."""

FAR = 1e9
"""Stands for infinity in quartiles, where infinity times a weight of zero would be nan."""


def range_of(net: Net, score: str) -> Range:
    """What is known of a ridge."""
    value = net[score]
    return (
        -math.inf if net["at_lower_edge"] else value,
        math.inf if net["at_upper_edge"] else value,
    )


def range_of_change(there: Net, here: Net, score: str) -> Range:
    """What is known of a difference of two ridges."""
    (a, b), (c, d) = range_of(there, score), range_of(here, score)
    return a - d, b - c


def bounded_quartiles(ranges: Sequence[Range]) -> list[Range]:
    """What is known of median, lower and upper quartile.

    >>> bounded_quartiles([(1, 1), (2, 2), (3, 3), (4, math.inf), (4, math.inf)])
    [(3.0, 3.0), (2.0, 2.0), (4.0, inf)]
    """
    least, most = (
        quartiles([max(-FAR, min(FAR, end)) for end in ends]) for ends in zip(*ranges, strict=True)
    )
    return [(_whole(a), _whole(b)) for a, b in zip(least, most, strict=True)]


def signs(ranges: Sequence[Range]) -> dict[str, Any]:
    """How many rose, fell, stayed, or may have done either, and what a test of ranks says.

    Returns:
        "up", "down", "same" and "open"; the two-sided "p" of `rank_test`; "says": "rises", "falls"
        or "no clear change"; and "median", the least and the most that the median change can be.
    """
    up = sum(low > SAME for low, _ in ranges)
    down = sum(high < -SAME for _, high in ranges)
    same = sum(low >= -SAME and high <= SAME for low, high in ranges)
    rises, falls = rank_test(ranges), rank_test([(-high, -low) for low, high in ranges])
    p = min(rises, falls)
    clear = "rises" if rises < falls else "falls"
    return {
        "up": up,
        "down": down,
        "same": same,
        "open": len(ranges) - up - down - same,
        "p": p,
        "says": clear if p < LEVEL else "no clear change",
        "median": list(bounded_quartiles(ranges)[0]),
    }


def rank_test(ranges: Sequence[Range]) -> float:
    r"""Wilcoxon's signed-rank test for a rise, two-sided and exact.

    Of the changes whose sign is known, $W = \sum_{\text{up}} \operatorname{rank} |change|$, and
    $p = 2 P(W' \ge W)$ with all signs equally likely. Bounds are taken against the rise: changes
    up at their least, changes down at their most.

    >>> rank_test([(1, 1), (2, math.inf), (3, 3), (5, math.inf)]), rank_test([(-1, -1)])
    (0.125, 1.0)
    """
    known = [low for low, _ in ranges if low > SAME] + [low for low, high in ranges if high < -SAME]
    sizes = sorted(map(abs, known))
    # average ranks of ties, doubled to be whole
    doubled = [2 * sizes.index(abs(x)) + sizes.count(abs(x)) + 1 for x in known]
    ways = {0: 1}  # sums of ranks: sign patterns
    for rank in doubled:
        ways = {
            total: ways.get(total, 0) + ways.get(total - rank, 0)
            for total in {*ways, *(one + rank for one in ways)}
        }
    observed = sum(rank for rank, x in zip(doubled, known, strict=True) if x > 0)
    tail = sum(count for total, count in ways.items() if total >= observed)
    return min(1.0, 2 * tail / 2 ** len(known))


def bounded(one: Sequence[float], digits: int = 2) -> str:
    """A number of which the least and the most are known.

    >>> bounded((4, math.inf)), bounded((-1, -1)), bounded((-math.inf, math.inf))
    ('≥ 4.00', '-1.00', 'unknown')
    """
    low, high = one
    least, most = (f"{end:.{digits}f}" for end in one)
    if least == most:
        return least
    if math.isinf(low) and math.isinf(high):
        return "unknown"
    if math.isinf(high):
        return f"≥ {least}"
    if math.isinf(low):
        return f"≤ {most}"
    return f"{least} to {most}"


def counted(change: Mapping[str, Any]) -> str:
    """The counts of `signs` in words.

    >>> counted({"up": 5, "down": 2, "same": 0, "open": 1})
    '5 up, 2 down, 1 open'
    """
    always, sometimes = ("up", "down"), ("same", "open")
    names = [*always, *(name for name in sometimes if change[name])]
    return ", ".join(f"{change[name]} {name}" for name in names)


def _whole(value: float) -> float:
    """Infinity where a quartile holds a part of it."""
    return math.copysign(math.inf, value) if abs(value) > 1e-3 * FAR else value
