"""Rows as an ASCII table for the terminal and as Markdown for the page of results.

Both have the same columns: work, must, measured, reached and, where a benchmark knows what no code
could go below, two more. The page begins with all figures that were not reached.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.frame.results import Result, Row
from benchmarks.frame.timing import figure

__all__ = ["ascii_table", "markdown", "write_page"]

HEADER = ("work", "must", "measured", "reached")
WIDTHS = (44, 24, 26, 7)
LEAST_HEADER = ("least by flops", "least by bytes")
LEAST_WIDTHS = (8, 8)
VERDICTS = {True: "yes", False: "no", None: "-"}

INTRODUCTION = """\
# Measured

This page shows what the benchmarks measured. `python -m benchmarks` writes it after a run, and
`python -m benchmarks --page` writes it again from the stored results. Do not edit it by hand.

How to read the tables:

- **Times** are ratios within one run: the median over the rounds. The quartiles are in brackets,
  with the ratio of the fastest rounds where it was stored.
- A **bare pass** is the model alone over the same batches.
- **Must** is the limit that was set when the benchmark ran. There is a dash where no limit was set,
  where arithmetic alone rules a limit out, or where another benchmark has the same limit.
- **Least** is the lowest value that any code could reach: the bare pass plus the necessary half of
  one matrix product (*by flops*), or the features read once (*by bytes*).
"""


def cells(row: Row) -> tuple[str, ...]:
    """The four columns that every row has."""
    return (row.work, row.must, row.measured, VERDICTS[row.reached])


def least_cells(row: Row) -> tuple[str, ...]:
    """The two columns of what no code could go below."""
    return tuple(figure(row.least[key]) if key in row.least else "-" for key in ("flops", "bytes"))


def columns(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The header and the cells of all rows, with the least where a row has it."""
    if not any(row.least for row in rows):
        return [HEADER, *(cells(row) for row in rows)]
    return [HEADER + LEAST_HEADER, *(cells(row) + least_cells(row) for row in rows)]


def ascii_table(rows: Sequence[Row]) -> str:
    """Fixed columns, long cells wrapped, notes below their row."""
    header, *lines_of_cells = columns(rows)
    widths = (WIDTHS + LEAST_WIDTHS)[: len(header)]
    rule = "-+-".join("-" * width for width in widths)
    lines = [*_wrapped(header, widths), rule]
    for row, row_cells in zip(rows, lines_of_cells, strict=True):
        lines += _wrapped(row_cells, widths)
        lines += textwrap.wrap(row.note, sum(widths), initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def _wrapped(row_cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """The lines of one row, each cell wrapped to the width of its column."""
    columns_of_lines = [
        textwrap.wrap(text, width) for text, width in zip(row_cells, widths, strict=True)
    ]
    height = max(len(lines) for lines in columns_of_lines)
    padded = [lines + [""] * (height - len(lines)) for lines in columns_of_lines]
    return [" | ".join(map(str.ljust, line, widths)).rstrip() for line in zip(*padded, strict=True)]


def markdown(results: Sequence[Result]) -> str:
    """The page: what was not reached, then one table a benchmark, each with its circumstances."""
    sections = [_section(result) for result in results]
    return "\n".join([INTRODUCTION, _not_reached(results), *sections])


def _not_reached(results: Sequence[Result]) -> str:
    """The figures of all benchmarks that were missed."""
    lines: list[tuple[str, ...]] = []
    for result in results:
        link = f"[{result.name}](#{result.name})"
        lines += [(link, row.work, row.must, row.measured) for row in result.missed]
    if not lines:
        return "All limits were met.\n"
    limited = sum(row.reached is not None for result in results for row in result.rows)
    counted = f"{len(lines)} of {limited} limits were not met, on the machines named below."
    table = _markdown_table([("benchmark", "work", "must", "measured"), *lines])
    return "\n".join(["## Not reached\n", counted + "\n", *table, ""])


def _section(result: Result) -> str:
    """The table of one benchmark, its notes and its circumstances."""
    lines = [f"## {result.name}\n", *_markdown_table(columns(result.rows)), ""]
    notes = [f"- {row.work}: {row.note}" for row in result.rows if row.note]
    if notes:
        lines += [*notes, ""]
    lines += [_circumstances(result), ""]
    return "\n".join(lines)


def _circumstances(result: Result) -> str:
    """The command, the date, the machine and its load in one sentence."""
    run = result.provenance
    machine = f"{run['cpu']}, {run['cores']} cores"
    if "gpu" in run:
        machine += f", {run['gpu']}"
    load = f"load {run['load_before']} before and {run['load_after']} after"
    return (
        f"`{run['command']}`, {run['date']}, {machine}, {run['threads']} threads, "
        f"torch {run['torch']}, {load}."
    )


def _markdown_table(lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose first line is the header."""
    header, *body = ["| " + " | ".join(line) + " |" for line in lines]
    rule = "| --- " * len(lines[0]) + "|"
    return [header, rule, *body]


def write_page(folder: Path, order: Iterable[str]) -> None:
    """Rebuild ``README.md`` from every result that ``folder`` holds, in the order of the names."""
    paths = [folder / f"{name}.json" for name in order]
    results = [Result.load(path) for path in paths if path.exists()]
    (folder / "README.md").write_text(markdown(results), encoding="utf-8")
