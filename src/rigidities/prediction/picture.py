"""Predictions as a notebook shows them: a few numbers and a drawing, on light and on dark."""

import math
from typing import Any

_BARS = (
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
    digits = max(0, 1 - math.floor(math.log10(std))) if 0 < std < math.inf else 9
    return f"{mean:.{digits}f} ± {std:.{digits}f}" if digits < 7 else f"{mean:.4g} ± {std:.2g}"


def off_centre(p: Any) -> list[bool]:
    """Of each entry, whether the distribution's own centre lies off the mean by more than a tenth
    of a bar.

    Then mean ± std is no picture of the intervals.
    """
    off = (p.centre - p.mean).abs() > 0.1 * p.std
    return [bool(one) for one in off.flatten()]


def entry(mean: float, std: float, centre: float, off: bool) -> str:
    """Mean and error bar, and the distribution's centre where it lies off the mean."""
    shown = pair(mean, std)
    if not off:
        return shown
    digits = max(0, 1 - math.floor(math.log10(std)))
    at = f"{centre:.{digits}f}" if digits < 7 else f"{centre:.4g}"
    return f"{shown} (centre {at})"


def html(title: str, first: list[Any], ordered: list[Any]) -> str:
    """A table of the first rows of each target, and drawings of others in order of their means."""
    columns = [
        [
            f"<td>{entry(mean, std, centre, off)}</td><td>{low:.4g} … {high:.4g}</td>"
            for (low, high, mean, std), centre, off in zip(
                _rows(p), p.centre.tolist(), off_centre(p), strict=True
            )
        ]
        for p in first
    ]
    head = "<tr><th></th>" + "<th>mean ± std</th><th>90 % interval</th>" * len(first) + "</tr>"
    rows = "".join(
        f"<tr><th>{i}</th>{''.join(r)}</tr>" for i, r in enumerate(zip(*columns, strict=True))
    )
    table = f'<table style="color:inherit;font-size:inherit">{head}{rows}</table>'
    return f"<div>{title}{table}{''.join(map(_drawing, ordered))}</div>"


def _rows(p: Any) -> list[tuple[float, ...]]:
    parts = (*p.interval(0.9), p.mean, p.std)
    return list(zip(*(part.tolist() for part in parts), strict=True))


def _drawing(p: Any) -> str:
    """Means as a line, 90 % intervals as thin ones across it."""
    rows = [row[:3] for row in _rows(p) if all(map(math.isfinite, row))]
    bottom, top = min(map(min, rows), default=0.0), max(map(max, rows), default=0.0)
    x, y = 300 / max(1, len(rows)), 116 / ((top - bottom) or 1)
    at = [(52 + i * x, *(4 + y * (top - value) for value in row)) for i, row in enumerate(rows)]
    across = "".join(f"M{x:.1f} {low:.1f}V{high:.1f}" for x, low, high, _ in at)
    along = "L".join(f"{x:.1f} {mean:.1f}" for x, *_, mean in at)
    return _BARS.format(across=across, along=f"M{along}", top=top, bottom=bottom) if rows else ""
