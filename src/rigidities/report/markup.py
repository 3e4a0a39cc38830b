"""HTML that is escaped unless it says that it is HTML.

`Markup` is text that is HTML already. Everything else that goes into an element is data, and is
escaped: a column called ``<b>`` stays that text.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

_ZERO = 1e-14
"""Below this a number is what rounding left of zero."""
_VOID = {"meta", "input", "br"}


class Markup(str):
    """Text that is HTML."""

    __slots__ = ()


def escaped(value: object) -> Markup:
    """A value as HTML: data are escaped, `Markup` is left alone.

    Examples:
        >>> escaped("a < b"), escaped(Markup("<br>"))
        ('a &lt; b', '<br>')
    """
    return value if isinstance(value, Markup) else Markup(html.escape(str(value)))


def tag(name: str, /, *content: object, **attributes: object) -> Markup:
    """An element with its content.

    Args:
        name: of the element.
        *content: text, which is escaped, and `Markup`.
        **attributes: a trailing underscore is dropped and others become hyphens. True gives an
            attribute without a value, None and False give none.

    Examples:
        >>> tag("p", "1 < 2", class_="note", aria_label='"x"', hidden=None)
        '<p class="note" aria-label="&quot;x&quot;">1 &lt; 2</p>'
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escaped(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{joined(content)}</{name}>")


def joined(parts: Iterable[object]) -> Markup:
    """Parts, one after the other."""
    return Markup("".join(map(escaped, parts)))


def table(
    header: Sequence[object], rows: Iterable[Sequence[object]], *, label: str, classes: str = ""
) -> Markup:
    """A table in a box of its own that scrolls where the page is too narrow for it.

    The first cell of each row is its heading. The box can be reached with the keyboard, where the
    label says what it holds.
    """
    head = tag("tr", *(tag("th", cell, scope="col") for cell in header))
    body = (
        tag("tr", tag("th", first, scope="row"), *(tag("td", cell) for cell in rest))
        for first, *rest in rows
    )
    whole = tag("table", tag("thead", head), tag("tbody", joined(body)), class_=classes or None)
    return tag("div", whole, class_="box", role="region", aria_label=label, tabindex=0)


def embedded(values: Any, name: str) -> Markup:
    r"""JSON inside the page, which no text in it can end or leave.

    Examples:
        >>> embedded(["</script>"], "x")
        '<script type="application/json" id="x">["\\u003c/script>"]</script>'
    """
    text = json.dumps(values, allow_nan=False, separators=(",", ":"))
    return tag("script", Markup(text.replace("<", "\\u003c")), type="application/json", id=name)


def words(key: str) -> str:
    """A key as words.

    Examples:
        >>> words("lowest_coverage")
        'lowest coverage'
    """
    return key.replace("_", " ")


def number(value: float | None, digits: int = 3) -> str:
    """A number for reading: three digits, a dash where there is none.

    Examples:
        >>> number(0.5), number(12345.6), number(-0.0), number(math.nan), number(1.5e-7)
        ('0.500', '12346', '0', '-', '1.50e-07')
        >>> number(999.96), number(150, 2)
        ('1000', '150')
    """
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if abs(value) < _ZERO:
        return "0"
    if 10**digits <= abs(float(f"{value:.{digits - 1}e}")) < 1e7:
        return f"{value:.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def around(value: float, error: float | None) -> str:
    """A mean and its standard error, to two digits of the error.

    Examples:
        >>> around(1.40012, 0.0081), around(123.4, 11.0), around(2.0, None), around(1.5, 0.0)
        ('1.4001 ± 0.0081', '123 ± 11', '2.00', '1.50')
    """
    if error is None or not math.isfinite(value + error) or error <= 1e-6 * abs(value):
        return number(value)
    decimals = max(0, 1 - math.floor(math.log10(error)))
    if decimals > 5:
        return f"{number(value, 4)} ± {number(error, 2)}"
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"
