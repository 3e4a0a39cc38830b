"""Predictions as a notebook shows them: a few numbers and a drawing, on light and on dark."""

import math
from typing import Any

_DRAWING = (
    '<svg viewBox="0 0 360 124" width="360" style="max-width:100%;display:block" fill="none">'
    '<path d="{across}" stroke="currentColor" opacity=".6"/><path d="{along}" stroke="#3b8eea" '
    'stroke-width="2"/><g fill="currentColor" font-size="10"><text y="12">{top:.3g}</text>'
    '<text y="120">{bottom:.3g}</text></g></svg>'
)


def pair(mean: float, std: float) -> str:
    """Mean and error bar, to two digits of the bar.

    Examples:
        >>> pair(1234.5678, 0.0314), pair(2e-9, 3e-10), pair(51.0, 123.0)
        ('1234.568 ± 0.031', '2e-09 ± 3e-10', '51 ± 123')
    """
    digits = _decimals(std) if 0 < std < math.inf else 9
    if digits < 7:
        return f"{mean:.{digits}f} ± {std:.{digits}f}"
    return f"{mean:.4g} ± {std:.2g}"


def off_centre(p: Any) -> list[bool]:
    """Whether the distribution's centre lies more than a tenth of a bar off the mean, per entry.

    Where it does, mean ± std does not describe the intervals.
    """
    off = (p.centre - p.mean).abs() > 0.1 * p.std
    return [bool(entry_is_off) for entry_is_off in off.flatten()]


def entry(mean: float, std: float, centre: float, off: bool) -> str:
    """Mean and error bar, and the distribution's centre where it lies off the mean."""
    text = pair(mean, std)
    if not off:
        return text
    digits = _decimals(std)
    centre_text = f"{centre:.{digits}f}" if digits < 7 else f"{centre:.4g}"
    return f"{text} (centre {centre_text})"


def html(title: str, first: list[Any], ordered: list[Any]) -> str:
    """A table of rows, and drawings of rows in order of their means.

    Args:
        title: Text above the table.
        first: For each target the prediction of the first rows, for the table.
        ordered: For each target the prediction of rows in order of their means, for the drawing.
    """
    columns = [_cells(p) for p in first]
    head = "<tr><th></th>" + "<th>mean ± std</th><th>90 % interval</th>" * len(first) + "</tr>"
    rows = ""
    for number, cells in enumerate(zip(*columns, strict=True)):
        rows += f"<tr><th>{number}</th>{''.join(cells)}</tr>"
    table = f'<table style="color:inherit;font-size:inherit">{head}{rows}</table>'
    drawings = "".join(_drawing(p) for p in ordered)
    return f"<div>{title}{table}{drawings}</div>"


def _decimals(std: float) -> int:
    """Number of decimals that show two digits of a finite bar above zero."""
    return max(0, 1 - math.floor(math.log10(std)))


def _cells(p: Any) -> list[str]:
    """The cells of the table that each row of one target gets."""
    cells = []
    for numbers, centre, off in zip(_rows(p), p.centre.tolist(), off_centre(p), strict=True):
        low, high, mean, std = numbers
        text = entry(mean, std, centre, off)
        cells.append(f"<td>{text}</td><td>{low:.4g} … {high:.4g}</td>")
    return cells


def _rows(p: Any) -> list[tuple[float, ...]]:
    """Low and high of the 90 % interval, mean and std of each row."""
    low, high = p.interval(0.9)
    return list(zip(low.tolist(), high.tolist(), p.mean.tolist(), p.std.tolist(), strict=True))


def _drawing(p: Any) -> str:
    """Means as one line, and 90 % intervals as thin lines across it."""
    rows = [row[:3] for row in _rows(p) if all(map(math.isfinite, row))]
    if not rows:
        return ""
    bottom = min(min(row) for row in rows)
    top = max(max(row) for row in rows)
    # The drawing area spans x from 52 to 352 and y, which points down, from 4 to 120.
    x_step = 300 / len(rows)
    y_unit = 116 / ((top - bottom) or 1)
    intervals = []
    means = []
    for number, row in enumerate(rows):
        x = 52 + number * x_step
        low, high, mean = (4 + y_unit * (top - value) for value in row)
        intervals.append(f"M{x:.1f} {low:.1f}V{high:.1f}")
        means.append(f"{x:.1f} {mean:.1f}")
    return _DRAWING.format(
        across="".join(intervals), along="M" + "L".join(means), top=top, bottom=bottom
    )
