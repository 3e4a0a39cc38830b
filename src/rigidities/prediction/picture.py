"""Predictions as a notebook shows them: a few numbers and a drawing, on light and on dark."""

import math
from typing import Any

_BARS = (
    '<svg viewBox="0 0 360 124" width="360" role="img" aria-label="Sorted predictions with their '
    '90 % intervals" style="max-width:100%;display:block" fill="none" stroke-width="1.2">'
    '<path d="{bars}" stroke="currentColor" opacity=".45"/>'
    '<path d="{line}" stroke="#3b8eea" stroke-width="2"/>'
    '<g fill="currentColor" font-size="10"><text y="12">{top:.3g}</text>'
    '<text y="120">{bottom:.3g}</text></g></svg>'
)


def pair(mean: float, std: float) -> str:
    """Mean and error bar, to two digits of the bar.

    Examples:
        >>> pair(1234.5678, 0.0314), pair(2e-9, 3e-10), pair(51.0, 123.0)
        ('1234.568 ± 0.031', '2e-09 ± 3e-10', '51 ± 123')
    """
    size = math.floor(math.log10(std)) if 0 < std < math.inf else 3
    digits = max(0, 1 - size)
    return f"{mean:.{digits}f} ± {std:.{digits}f}" if digits < 7 else f"{mean:.4g} ± {std:.2g}"


def bars(prediction: Any) -> str:
    """Of (n,) sorted predictions: means as a line, 90 % intervals as thin ones across it."""
    columns = [part.tolist() for part in (*prediction.interval(0.9), prediction.mean)]
    rows = [row for row in zip(*columns, strict=True) if all(map(math.isfinite, row))]
    if not rows:
        return ""
    bottom, top = min(row[0] for row in rows), max(row[1] for row in rows)
    step, unit = 300 / len(rows), 116 / ((top - bottom) or 1)
    drawn = [
        [52 + i * step, *(4 + unit * (top - end) for end in row)] for i, row in enumerate(rows)
    ]
    across = "".join(f"M{x:.1f} {low:.1f}V{high:.1f}" for x, low, high, _ in drawn)
    line = "M" + "L".join(f"{x:.1f} {mean:.1f}" for x, *_, mean in drawn)
    return _BARS.format(bars=across, line=line, top=top, bottom=bottom)


def html(title: str, first: Any, targets: list[Any]) -> str:
    """A table of the first predictions, and the bars of some of each target."""
    columns = [part.tolist() for part in (first.mean, first.std, *first.interval(0.9))]
    rows = "".join(
        f"<tr><td>{pair(mean, std)}</td><td>{low:.4g} … {high:.4g}</td></tr>"
        for mean, std, low, high in zip(*columns, strict=True)
    )
    head = "<tr><th>mean ± std</th><th>90 % interval</th></tr>"
    return f"<div>{title}<table>{head}{rows}</table>{''.join(map(bars, targets))}</div>"
