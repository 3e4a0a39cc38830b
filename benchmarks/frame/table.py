"""Rows as an ASCII table for the terminal and as Markdown for the results page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks.frame.results import Result, Row
from benchmarks.frame.timing import figure

HEADER = ("work", "must", "measured", "reached")
WIDTHS = (44, 24, 26, 7)
BOUNDS = {"flops": "least by flops", "bytes": "least by bytes"}
"""Columns of the tables that have such limits."""


def verdict(row: Row) -> str:
    """``yes``, ``no`` or a dash."""
    return {True: "yes", False: "no", None: "-"}[row.reached]


def cells(row: Row) -> tuple[str, str, str, str]:
    """The four columns of a row."""
    return (row.work, row.must, row.measured, verdict(row))


def columns(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The header and all cells, with what no code could go below where the rows say it."""
    if not any(row.least for row in rows):
        return [HEADER, *map(cells, rows)]
    bounds = [
        tuple(figure(row.least[k]) if k in row.least else "-" for k in BOUNDS) for row in rows
    ]
    both = [cells(row) + more for row, more in zip(rows, bounds, strict=True)]
    return [HEADER + tuple(BOUNDS.values()), *both]


def ascii_table(rows: Sequence[Row]) -> str:
    """Fixed columns, long cells wrapped, notes below their row."""
    header, *lines_of = columns(rows)
    widths = (*WIDTHS, 8, 8)[: len(header)]
    rule = "-+-".join("-" * width for width in widths)
    lines = [*_wrapped(header, widths), rule]
    for row, line in zip(rows, lines_of, strict=True):
        lines += _wrapped(line, widths)
        lines += textwrap.wrap(row.note, sum(widths), initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def _wrapped(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    pieces = [textwrap.wrap(text, width) for text, width in zip(line, widths, strict=True)]
    height = max(map(len, pieces))
    padded = [piece + [""] * (height - len(piece)) for piece in pieces]
    lines = zip(*padded, strict=True)
    return [" | ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def markdown(results: Sequence[Result]) -> str:
    """The results page: one table a benchmark, each with its circumstances."""
    parts = [
        "# Measured\n",
        "Written by `python -m benchmarks`; do not edit. Times are ratios within one run: median\n"
        "of the rounds; in brackets quartiles, and the ratio of the fastest rounds where it was\n"
        "kept. A *bare pass* is the model alone over the same batches. *Least* is what no code\n"
        "could go below: the bare pass and the half of one product that is needed, or the\n"
        "features read once.\n",
    ]
    return "\n".join(parts + [_section(result) for result in results])


def _section(result: Result) -> str:
    header, *rows = ["| " + " | ".join(line) + " |" for line in columns(result.rows)]
    rule = "| --- " * len(columns(result.rows)[0]) + "|"
    lines = [f"## {result.name}\n", header, rule, *rows]
    notes = [f"- {row.work}: {row.note}" for row in result.rows if row.note]
    where = result.provenance
    lines += [
        "",
        *([*notes, ""] if notes else []),
        f"`{where['command']}`, {where['date']}, {where['cpu']}, {where['cores']} cores, "
        + (f"{where['gpu']}, " if "gpu" in where else "")
        + f"{where['threads']} threads, torch {where['torch']}, "
        f"load {where['load_before']} before and {where['load_after']} after.",
        "",
    ]
    return "\n".join(lines)


def write_page(folder: Path, order: Sequence[str]) -> None:
    """Rebuild ``README.md`` from every result that ``folder`` holds."""
    paths = [folder / f"{name}.json" for name in order]
    results = [Result.load(path) for path in paths if path.exists()]
    (folder / "README.md").write_text(markdown(results), encoding="utf-8")
