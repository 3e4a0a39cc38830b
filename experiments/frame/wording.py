"""Numbers in words: lists, means with their errors, and whether two scores differ."""

from __future__ import annotations

import math
from collections.abc import Sequence

from experiments.frame.outcome import with_error

BEYOND = 2
"""Standard errors beyond which two numbers are said to differ."""

LARGE = 1000.0
"""The size from which on numbers are written with a power of ten."""

SHARED_ROWS = (
    "A note on the standard errors: all splits are drawn from one set, so repetitions share rows. "
    "The errors are right for comparisons of methods on these rows. They are somewhat too small "
    "for statements about other data."
)
WHOLE_SCALE = (
    "standardised with the mean and standard deviation of the whole set, as in the paper, so that "
    "test rows contribute to the scale of the inputs"
)


def listed(words: Sequence[str]) -> str:
    """A list in words, with commas, and an "and" before the last.

    >>> listed(["a", "b", "c"]), listed(["a", "b"]), listed(["a"])
    ('a, b and c', 'a and b', 'a')
    """
    if not words:
        raise ValueError("Expected at least one part to list, got none. Leave the clause out.")
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def measured(pair: Sequence[float], digits: int = 3) -> str:
    """A mean and its standard error; a dash where the score is not defined.

    >>> measured([0.9051, 0.0123]), measured([float("nan"), 0.1])
    ('0.905 ± 0.012', '-')
    """
    mean, error = pair
    if math.isnan(mean):
        return "-"
    return with_error(mean, error, digits)


def with_quartiles(values: Sequence[float], digits: int = 2) -> str:
    """Median, lower and upper quartile for a cell.

    >>> with_quartiles([-1.0, -1.5, 0.25])
    '-1.00 (-1.50 to 0.25)'
    >>> with_quartiles([1.5, 1.0, 398874.1])
    '1.50 (1.00 to 4.0e+05)'
    """

    def word(value: float) -> str:
        if abs(value) >= LARGE:
            return f"{value:.1e}"
        return f"{value:.{digits}f}"

    middle, low, high = values
    return f"{word(middle)} ({word(low)} to {word(high)})"


def direction(pair: Sequence[float]) -> int:
    """1 or -1 for a mean clearly above or below zero, beyond two standard errors, 0 otherwise.

    >>> direction([0.1, 0.01]), direction([-0.1, 0.01]), direction([0.1, 0.06])
    (1, -1, 0)
    """
    mean, error = pair
    if not abs(mean) > BEYOND * error:  # the error of a single repetition is nan
        return 0
    return 1 if mean > 0 else -1


def changed(pair: Sequence[float], digits: int = 3) -> str:
    """Whether a score rises or falls, with the numbers.

    >>> changed([-0.5, 0.1], 2)
    'falls (-0.50 ± 0.10)'
    """
    verbs = {1: "rises", -1: "falls", 0: "does not clearly change"}
    return f"{verbs[direction(pair)]} ({measured(pair, digits)})"


def compared(difference: Sequence[float]) -> str:
    """Whether one score is above or below another, by their difference.

    >>> compared([-0.1, 0.01]), compared([0.1, 0.06])
    ('is below', 'does not clearly differ from')
    """
    words = {1: "is above", -1: "is below", 0: "does not clearly differ from"}
    return words[direction(difference)]
