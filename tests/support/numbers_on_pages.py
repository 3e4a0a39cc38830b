"""Which numbers of a Markdown table are roundings of numbers in a JSON file, and which are not."""

import math
import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

NUMBER = re.compile(r"(?<![\w.])[-−]?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")
RULE = re.compile(r"^\|[\s:|-]+\|$")


def unsupported(page: str, stored: Any) -> list[str]:
    """The numbers in the bodies of the page's tables that no stored number rounds to.

    A percentage may be a hundred times a stored fraction. Sign and rounding are respected.
    """
    values = sorted({*_numbers(stored)})
    missing = []
    for line in table_rows(page):
        for match in NUMBER.finditer(line):
            percent = line[match.end() :].lstrip().startswith("%")
            if not _held(match.group().replace("−", "-"), values, percent=percent):
                missing.append(f"{match.group()} in {line}")
    return missing


def table_rows(page: str) -> Iterator[str]:
    """The lines of all tables below their headers, first cells included."""
    body = False
    for line in page.splitlines():
        if not line.startswith("|"):
            body = False
        elif RULE.match(line):
            body = True
        elif body:
            yield re.sub(r"\]\([^)]*\)|`[^`]*`", "]", line)


def _held(text: str, values: list[float], *, percent: bool) -> bool:
    mantissa, _, exponent = text.partition("e")
    digits = len(mantissa.partition(".")[2])
    half = 0.5 * 10.0 ** (int(exponent or 0) - digits) * (1 + 1e-6)
    candidates = [float(text), float(text) / 100] if percent else [float(text)]
    widths = [half, half / 100]
    return any(
        _near(value, width, values) for value, width in zip(candidates, widths, strict=False)
    )


def _near(value: float, width: float, values: list[float]) -> bool:
    width += 1e-12 * abs(value)  # of arithmetic in binary
    place = bisect_left(values, value - width)
    return place < len(values) and values[place] <= value + width


PLOTTED = {"points", "edges", "counts", "per_split", "each", "each_draw"}
"""What figures show row by row: so many numbers that one of them would always fit."""


def _numbers(stored: Any) -> Iterator[float]:
    if isinstance(stored, dict):
        if {"variance", "mse"} <= stored.keys():  # bins
            return
        for key, value in stored.items():
            if key not in PLOTTED and not key.endswith("_of_each"):
                yield from _numbers(value)
                yield from _numbers(key)
    elif isinstance(stored, list):
        for value in stored:
            yield from _numbers(value)
    elif isinstance(stored, str):
        yield from (float(found) for found in NUMBER.findall(stored.replace("−", "-")))
    elif (
        isinstance(stored, (int, float)) and not isinstance(stored, bool) and math.isfinite(stored)
    ):
        yield float(stored)
