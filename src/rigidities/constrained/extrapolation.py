r"""Derivatives from differences at shrinking steps, extrapolated to step zero.

For an even error series $D(h) = D + c_1 h^2 + c_2 h^4 + \ldots$ the tableau
$A_{i,j} = (4^j A_{i,j-1} - A_{i-1,j-1}) / (4^j - 1)$ over $h_i = h / 2^i$ removes one term a column
(Richardson; Ridders). Its entries first agree better, then worse, when rounding takes over: the one
that agrees best with its neighbours is taken, and that disagreement is the error estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Tableau:
    """Differences at h, h/2, h/4, ... and their limit.

    Attributes:
        value: the limit, as far as known.
        error: estimate of its absolute error.

    Examples:
        >>> tableau = Tableau()
        >>> for h in (1.0, 0.5, 0.25):
        ...     tableau.add((math.exp(h) - math.exp(-h)) / (2 * h))
        >>> round(tableau.value, 5)
        1.0
    """

    value: float = math.nan
    error: float = math.inf
    _row: list[float] = field(default_factory=list)
    _best: int = 0

    def add(self, difference: float) -> None:
        """The difference at half the step of the one before."""
        row = [difference]
        for j, above in enumerate(self._row, start=1):
            entry = (4**j * row[-1] - above) / (4**j - 1)
            error = max(abs(entry - row[-1]), abs(entry - above))
            if error < self.error:
                self.value, self.error, self._best = entry, error, len(self._row) + 1
            row.append(entry)
        if not self._row:
            self.value = difference
        self._row = row

    @property
    def relative(self) -> float:
        """The error relative to the value."""
        return self.error / abs(self.value) if self.value else math.inf

    @property
    def stalled(self) -> bool:
        """Whether three smaller steps in a row brought nothing: rounding has taken over."""
        return self.relative < 1e-3 and len(self._row) - self._best >= 3
