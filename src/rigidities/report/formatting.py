"""Numbers as text for the page and the console."""

from __future__ import annotations

import math

_ROUNDING_OF_ZERO = 1e-14
"""A number smaller than this is shown as zero: it is rounding."""


def number(value: float | None, digits: int = 3) -> str:
    """Write a number with a few significant digits, and a dash where there is none.

    Args:
        value: The number. None and NaN become a dash.
        digits: How many significant digits to write. Numbers below 1e15 keep all digits before the
            decimal point in any case, in groups of thousands.

    Examples:
        >>> number(0.5), number(12345.6), number(-0.0), number(math.nan), number(1.5e-7)
        ('0.500', '12,346', '0', '-', '1.50e-07')
        >>> number(999.96), number(150, 2), number(3111.4, 4), number(185_200_000)
        ('1,000', '150', '3,111', '185,200,000')
    """
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if abs(value) < _ROUNDING_OF_ZERO:
        return "0"
    # 999.96 must be treated as 1000, so the size is that of the rounded number.
    rounded_size = abs(float(f"{value:.{digits - 1}e}"))
    if 10**digits <= rounded_size < 1e15:
        return f"{value:,.0f}"
    return f"{value:#,.{digits}g}".rstrip(".")


def around(value: float, error: float | None) -> str:
    """Write a mean and its standard error, to two digits of the error.

    Args:
        value: The mean.
        error: Its standard error. The mean stands alone where the error is None, not finite or
            negligible.

    Examples:
        >>> around(1.40012, 0.0081), around(12345.6, 110.0), around(2.0, None), around(1.5, 0.0)
        ('1.4001 ± 0.0081', '12,346 ± 110', '2.00', '1.50')
    """
    if error is None or not math.isfinite(value + error) or error <= 1e-6 * abs(value):
        return number(value)
    decimals = max(0, 1 - math.floor(math.log10(error)))
    if decimals > 5:
        return f"{number(value, 4)} ± {number(error, 2)}"
    return f"{value:,.{decimals}f} ± {error:,.{decimals}f}"


def exact(value: float, digits: int = 6) -> str:
    """Write a number with up to this many significant digits, without zeros that tell nothing.

    Examples:
        >>> exact(0.5), exact(185_200), exact(1_234_567.8), exact(1234.56), exact(1.5e-7)
        ('0.5', '185,200', '1,234,568', '1,234.56', '1.5e-07')
    """
    if 1e3 <= abs(value) < 1e15:
        decimals = max(0, digits - len(str(int(abs(value)))))
        text = f"{value:,.{decimals}f}"
        return text.rstrip("0").rstrip(".") if decimals else text
    return f"{value:.{digits}g}"
