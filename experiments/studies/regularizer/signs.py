"""Ridges that a search may have cut off: what is known of them, and of their changes.

A ridge at the upper end of the search is only known to be at least that large, one at the lower
end at most that small. A mean of such numbers says where the search ends. Medians may still be
known, or bounded, and so may the sign of a change and whether it is larger than another. A change
between two ridges at the same end is open and left out of tests: that is fair, since it is as open
the other way round.

So every number is a `Range`. `range_of` and `range_of_change` make ranges of ridges, `signs` and
`bounded_quartiles` summarise several, `bounded` and `counted` put them into words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.judging.scores import quartiles

Range = tuple[float, float]
"""The least and the most that a number can be; the same twice where it is known."""

NetworkNumbers = Mapping[str, Any]
"""Numbers of a network, "at_lower_edge" and "at_upper_edge" among them."""

LEVEL = 0.05
"""The level of the test."""

SAME = 0.005
"""Decades by which a ridge must move to have moved."""

FAR = 1e9
"""Stands for infinity in quartiles, where infinity times a weight of zero would be nan."""


def range_of(network: NetworkNumbers, score: str) -> Range:
    """What is known of a ridge."""
    value = network[score]
    least = -math.inf if network["at_lower_edge"] else value
    most = math.inf if network["at_upper_edge"] else value
    return least, most


def range_of_change(there: NetworkNumbers, here: NetworkNumbers, score: str) -> Range:
    """What is known of the ridge `there` minus the ridge `here`."""
    least_there, most_there = range_of(there, score)
    least_here, most_here = range_of(here, score)
    return least_there - most_here, most_there - least_here


def bounded_quartiles(ranges: Sequence[Range]) -> list[Range]:
    """What is known of median, lower and upper quartile.

    >>> bounded_quartiles([(1, 1), (2, 2), (3, 3), (4, math.inf), (4, math.inf)])
    [(3.0, 3.0), (2.0, 2.0), (4.0, inf)]
    """
    least = quartiles([_finite(low) for low, _ in ranges])
    most = quartiles([_finite(high) for _, high in ranges])
    return [(_infinite(low), _infinite(high)) for low, high in zip(least, most, strict=True)]


def _finite(value: float) -> float:
    """The value, or `FAR` for infinity."""
    return max(-FAR, min(FAR, value))


def _infinite(value: float) -> float:
    """Infinity where a quartile contains a share of `FAR`."""
    if abs(value) > 1e-3 * FAR:
        return math.copysign(math.inf, value)
    return value


def signs(ranges: Sequence[Range]) -> dict[str, Any]:
    """Count the changes that rose, fell, stayed, or may have done either, and test their ranks.

    Returns:
        "up", "down", "same" and "open"; the two-sided "p" of `rank_test`; "says": "rises", "falls"
        or "no clear change"; and "median", the least and the most that the median change can be.
    """
    up = sum(low > SAME for low, _ in ranges)
    down = sum(high < -SAME for _, high in ranges)
    same = sum(low >= -SAME and high <= SAME for low, high in ranges)
    p_of_rise = rank_test(ranges)
    p_of_fall = rank_test([(-high, -low) for low, high in ranges])
    p = min(p_of_rise, p_of_fall)
    if p >= LEVEL:
        verdict = "no clear change"
    elif p_of_rise < p_of_fall:
        verdict = "rises"
    else:
        verdict = "falls"
    return {
        "up": up,
        "down": down,
        "same": same,
        "open": len(ranges) - up - down - same,
        "p": p,
        "says": verdict,
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
    # In both directions the lower end is the one against the rise.
    changes = [low for low, high in ranges if low > SAME or high < -SAME]
    sizes = sorted(abs(change) for change in changes)
    # Average ranks of ties, doubled to be whole: of positions i+1 to i+n the sum of both ends.
    doubled_ranks = [
        2 * sizes.index(abs(change)) + sizes.count(abs(change)) + 1 for change in changes
    ]
    # The number of sign patterns for each sum of ranks, one rank added after the other.
    patterns = {0: 1}
    for rank in doubled_ranks:
        totals = {*patterns, *(total + rank for total in patterns)}
        patterns = {
            total: patterns.get(total, 0) + patterns.get(total - rank, 0) for total in totals
        }
    pairs = zip(doubled_ranks, changes, strict=True)
    observed = sum(rank for rank, change in pairs if change > 0)
    tail = sum(count for total, count in patterns.items() if total >= observed)
    return min(1.0, 2 * tail / 2 ** len(changes))


def bounded(limits: Sequence[float], digits: int = 2) -> str:
    """A number of which the least and the most are known, in words.

    >>> bounded((4, math.inf)), bounded((-1, -1)), bounded((-math.inf, math.inf))
    ('≥ 4.00', '-1.00', 'unknown')
    """
    low, high = limits
    least = f"{low:.{digits}f}"
    most = f"{high:.{digits}f}"
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
    """The counts of `signs` in words; "same" and "open" are left out where there are none.

    >>> counted({"up": 5, "down": 2, "same": 0, "open": 1})
    '5 up, 2 down, 1 open'
    """
    clauses = [f"{change['up']} up", f"{change['down']} down"]
    for name in ("same", "open"):
        if change[name]:
            clauses.append(f"{change[name]} {name}")
    return ", ".join(clauses)
