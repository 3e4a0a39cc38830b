"""The section on new kinds of molecules and on their size: tables, texts and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.frame.figures import BLUE, GREY, VERMILION, panels
from experiments.frame.outcome import Cell, Entry, Picture, Table

Row = Mapping[str, Any]

FEW = 30
"""Test molecules below which a root mean square says little: left out of the figure."""

KINDS = (
    "Kinds of molecules, the rarest in training first. A molecule can belong to several kinds. "
    "*Bar*: the root mean square of the estimated errors, in kcal/mol. *Ratio*: the RMSE divided "
    "by the bar. Rings are counted as the smallest ring through each bond."
)
EVEN = 1.5
"""Ratios of sizes that differ by less are called alike."""

AGREES = (
    "The paper's claim of excellent estimates for molecules of different sizes is confirmed here."
)
DIFFERS = (
    "The paper's claim of excellent estimates for molecules of different sizes is not confirmed "
    "here: the bars are right on average over all molecules, but not size by size."
)
SIZES = "The same by the number of atoms."
CAPTION = (
    f"Left: root mean square error and bar of each kind of molecule (at least {FEW} test "
    "molecules) against the share of the kind in training. Right: by the number of atoms."
)


def entries(numbers: Mapping[str, Any]) -> list[Entry]:
    """The section.

    Args:
        numbers: "kinds" as `work.groups` gives them, "sizes" as `work.by_size` does.
    """
    kinds = numbers["kinds"]
    sizes = numbers["sizes"]["atoms"]
    return [
        "## New kinds of molecules, small and large ones",
        by_kind(kinds),
        kind_table(kinds),
        size_table(sizes),
        by_size(with_enough_molecules(sizes)),
        Picture("novelty", drawn(kinds, sizes), CAPTION),
    ]


def kind_table(kinds: Sequence[Row]) -> Table:
    """Errors and bars of every kind."""
    rows: list[list[Cell]] = []
    for row in kinds:
        share = f"{100 * row['share']:.2f} %"
        rows.append([row["kind"], share, row["molecules"], row["rmse"], row["bar"], row["ratio"]])
    columns = ["kind", "share in training", "test molecules", "RMSE", "bar", "ratio"]
    return Table(columns, rows, KINDS)


def size_table(sizes: Sequence[Row]) -> Table:
    """Errors and bars by the number of atoms."""
    rows: list[list[Cell]] = [
        [row["size"], row["molecules"], row["rmse"], row["bar"], row["ratio"]] for row in sizes
    ]
    return Table(["atoms", "test molecules", "RMSE", "bar", "ratio"], rows, SIZES)


def by_kind(kinds: Sequence[Row]) -> str:
    """The rarest kind beside the commonest, and the kinds whose bars are furthest from right."""
    rows = with_enough_molecules(kinds)
    if len(rows) < 2:
        return "There are too few test molecules of any kind to compare kinds."
    rare = rows[0]
    common = rows[-1]
    longer = "longer" if rare["bar"] > common["bar"] else "not longer"
    wide = max(rows, key=lambda row: row["ratio"])
    narrow = min(rows, key=lambda row: row["ratio"])
    return (
        f"The rarest kind that the test can judge ({rare['kind']}) has a bar of "
        f"{rare['bar']:.3g} kcal/mol, {longer} than that of the most common ({common['kind']}, "
        f"{common['bar']:.3g}). Their errors are {rare['rmse']:.3g} and {common['rmse']:.3g}. The "
        f"ratio of error to bar is largest for {wide['kind']} ({wide['ratio']:.2f}) and smallest "
        f"for {narrow['kind']} ({narrow['ratio']:.2f})."
    )


def by_size(rows: Sequence[Row]) -> str:
    """How errors and bars follow the size, beside what the paper says of it."""
    if len(rows) < 2:
        return "There are too few test molecules of any size to compare sizes."
    small = rows[0]
    large = rows[-1]
    common = max(rows, key=lambda row: row["molecules"])
    described = "; ".join(
        f"{row['size']} atoms: RMSE {row['rmse']:.2f}, bar {row['bar']:.2f}, ratio "
        f"{row['ratio']:.2f}"
        for row in (small, common, large)
    )
    ratios = [row["ratio"] for row in rows]
    spread = max(ratios) / min(ratios)
    verdict = AGREES if spread < EVEN else DIFFERS
    return (
        f"**Size.** The smallest, the most common and the largest size that the test can judge: "
        f"{described}. If the bars were right at every size, all ratios would be near one. In "
        f"fact, they differ by a factor of {spread:.1f}. {verdict}"
    )


def with_enough_molecules(rows: Sequence[Row]) -> list[Row]:
    """The kinds or sizes with enough test molecules."""
    return [row for row in rows if row["molecules"] >= FEW]


def drawn(kinds: Sequence[Row], sizes: Sequence[Row]) -> Figure:
    """The figure: errors and bars by rarity and by size."""
    figure, (left, right) = panels(columns=2, height=3.4)
    kinds = with_enough_molecules(kinds)
    sizes = with_enough_molecules(sizes)
    # A kind that the training set does not have gets a place at the left.
    shares = [100 * max(row["share"], 1e-5) for row in kinds]
    _draw_errors_and_bars(left, shares, kinds, line="")
    left.set(xscale="log", xlabel="share in training, %", ylabel="kcal/mol", title="kinds")
    label_ticks(left)
    _draw_errors_and_bars(right, [row["size"] for row in sizes], sizes, line="-")
    right.set(xlabel="atoms", title="sizes", ylim=(0, None))
    left.set_ylim(bottom=0)
    left.legend()
    return figure


def _draw_errors_and_bars(ax: Axes, x: Sequence[float], rows: Sequence[Row], line: str) -> None:
    """Draw root mean square errors and bars, with a thin line between the two of a group."""
    errors = [row["rmse"] for row in rows]
    bars = [row["bar"] for row in rows]
    low = [min(pair) for pair in zip(errors, bars, strict=True)]
    high = [max(pair) for pair in zip(errors, bars, strict=True)]
    ax.vlines(x, low, high, color=GREY, lw=0.8, zorder=1)
    ax.plot(x, errors, "o" + line, color=VERMILION, ms=4.5, lw=1.2, label="RMSE")
    ax.plot(x, bars, "D" + line, color=BLUE, ms=4.5, lw=1.2, label="bar")


def label_ticks(ax: Axes) -> None:
    """Numbers as one writes them, 1, 2 and 5 of each decade."""
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
