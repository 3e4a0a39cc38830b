"""Rows as an ASCII table for the terminal and as Markdown for the results page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks.frame.results import Result, Row

HEADER = ("work", "must", "measured", "reached")
WIDTHS = (44, 24, 26, 7)


def verdict(row: Row) -> str:
    """``yes``, ``no`` or a dash."""
    return {True: "yes", False: "no", None: "-"}[row.reached]


def cells(row: Row) -> tuple[str, str, str, str]:
    """The four columns of a row."""
    return (row.work, row.must, row.measured, verdict(row))


def ascii_table(rows: Sequence[Row]) -> str:
    """Fixed columns, long cells wrapped, notes below their row."""
    rule = "-+-".join("-" * width for width in WIDTHS)
    lines = [*_wrapped(HEADER), rule]
    for row in rows:
        lines += _wrapped(cells(row))
        lines += textwrap.wrap(row.note, sum(WIDTHS), initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def _wrapped(columns: Sequence[str]) -> list[str]:
    pieces = [textwrap.wrap(text, width) for text, width in zip(columns, WIDTHS, strict=True)]
    height = max(map(len, pieces))
    padded = [piece + [""] * (height - len(piece)) for piece in pieces]
    lines = zip(*padded, strict=True)
    return [" | ".join(map(str.ljust, line, WIDTHS)).rstrip() for line in lines]


def markdown(results: Sequence[Result]) -> str:
    """The results page: one table a benchmark, each with its circumstances."""
    parts = [
        "# Measured\n",
        "Written by `python -m benchmarks`; do not edit. Times are ratios within one run: median\n"
        "of the rounds, quartiles in brackets. A *bare pass* is the model alone over the same\n"
        "batches, sliced by hand.\n",
    ]
    return "\n".join(parts + [_section(result) for result in results])


def _section(result: Result) -> str:
    lines = [
        f"## {result.name}\n",
        "| work | must | measured | reached |",
        "| --- | --- | --- | --- |",
    ]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in result.rows]
    notes = [f"- {row.work}: {row.note}" for row in result.rows if row.note]
    where = result.provenance
    lines += [
        "",
        *([*notes, ""] if notes else []),
        f"`{where['command']}`, {where['date']}, {where['cpu']}, {where['cores']} cores, "
        f"{where['threads']} threads, torch {where['torch']}, "
        f"load {where['load_before']} before and {where['load_after']} after.",
        "",
    ]
    return "\n".join(lines)


def write_page(folder: Path, order: Sequence[str]) -> None:
    """Rebuild ``README.md`` from every result that ``folder`` holds."""
    paths = [folder / f"{name}.json" for name in order]
    results = [Result.load(path) for path in paths if path.exists()]
    (folder / "README.md").write_text(markdown(results), encoding="utf-8")
