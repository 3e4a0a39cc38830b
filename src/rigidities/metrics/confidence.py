"""Confidence lines for absolute errors on a logarithmic axis.

References:
    Bigi et al., "A prediction rigidity formalism for low-cost uncertainties in trained neural
    networks", 2024, appendix "Plot details".
"""

from __future__ import annotations

import math


def confidence_factors(sigmas: float = 1) -> tuple[float, float]:
    """Multiples of sigma between which |e| lies as often as a Gaussian lies within +- `sigmas`.

    For e ~ N(0, 1) and x = |e|, the density of log x is proportional to x exp(-x^2 / 2), with its
    mode at x = 1. The pair is fixed by its probability and by equal density at both ends:

        erf(high / sqrt 2) - erf(low / sqrt 2) = erf(sigmas / sqrt 2)
        low exp(-low^2 / 2) = high exp(-high^2 / 2)

    With high = low exp(t) the second line gives high^2 = 2 t / (1 - exp(-2 t)); the first is
    solved for t by bisection, to the last bit.

    Returns:
        (low, high), with low < 1 < high.

    Raises:
        ValueError: `sigmas` is not between 0 and 30.

    Examples:
        >>> [round(factor, 4) for factor in confidence_factors(1)]
        [0.3313, 1.8975]
    """
    if not 0 < sigmas <= 30:
        raise ValueError(f"Expected 0 < sigmas <= 30, got {sigmas}. Pass 1, 2 or 3.")
    # probabilities outside, because those inside round to 1 from eight sigmas on
    outside = math.erfc(sigmas / math.sqrt(2))
    narrow, wide = 0.0, 700.0
    while narrow < (middle := (narrow + wide) / 2) < wide:
        if _outside(*_equal_density_pair(middle)) > outside:
            narrow = middle
        else:
            wide = middle
    return _equal_density_pair(wide)


def _equal_density_pair(log_ratio: float) -> tuple[float, float]:
    """(low, high) of equal density on the log axis, where high / low = exp(log_ratio)."""
    high = math.sqrt(2 * log_ratio / -math.expm1(-2 * log_ratio))
    return high * math.exp(-log_ratio), high


def _outside(low: float, high: float) -> float:
    """Probability that |e| < low or |e| > high."""
    return math.erf(low / math.sqrt(2)) + math.erfc(high / math.sqrt(2))
