"""What the page shows of novelty and size: tables and a figure."""

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
    "Kinds of molecules, the rarest in training first; a molecule is of several kinds. *Bar* is "
    "the root mean square of the estimated errors, *ratio* the RMSE over it; kcal/mol. A ring "
    "counts by the smallest ring through each of its bonds."
)
EVEN = 1.5
"""Ratios of sizes that differ by less are called alike."""

AGREES = "So the paper's words, excellent estimates for molecules of different sizes, hold here."
DIFFERS = (
    "So the paper's words, excellent estimates for molecules of different sizes, do not hold here: "
    "averaged over all molecules the bars are right, but not size by size."
)
SIZES = "The same by the number of atoms."
CAPTION = (
    f"Left: root mean square error and bar of each kind of molecule (at least {FEW} test "
    "molecules) against the share of the kind in training. Right: by the number of atoms."
)


def entries(found: Mapping[str, Any]) -> list[Entry]:
    """The section.

    Args:
        found: "kinds" as `work.groups` gives them, "sizes" as `work.by_size` does.
    """
    return [
        "## New kinds of molecules, small and large ones",
        said(found["kinds"]),
        Table(
            ["kind", "share in training", "test molecules", "RMSE", "bar", "ratio"],
            [
                [row["kind"], f"{100 * row['share']:.2f} %", row["molecules"], *_numbers(row)]
                for row in found["kinds"]
            ],
            KINDS,
        ),
        Table(
            ["atoms", "test molecules", "RMSE", "bar", "ratio"],
            [[row["size"], row["molecules"], *_numbers(row)] for row in found["sizes"]["atoms"]],
            SIZES,
        ),
        by_size(shown(found["sizes"]["atoms"])),
        Picture("novelty", drawn(found), CAPTION),
    ]


def said(rows: Sequence[Row]) -> str:
    """The rarest kind beside the commonest, and the kinds whose bars are furthest from right."""
    rows = shown(rows)
    if len(rows) < 2:
        return "There are too few test molecules of any kind to compare kinds."
    rare, common = rows[0], rows[-1]
    longer = "longer" if rare["bar"] > common["bar"] else "not longer"
    wide = max(rows, key=lambda row: row["ratio"])
    narrow = min(rows, key=lambda row: row["ratio"])
    return (
        f"The rarest kind that the test can judge ({rare['kind']}) has a bar of "
        f"{rare['bar']:.3g} kcal/mol, {longer} than that of the commonest ({common['kind']}, "
        f"{common['bar']:.3g}); their errors are {rare['rmse']:.3g} and {common['rmse']:.3g}. The "
        f"ratio of error to bar is largest for {wide['kind']} ({wide['ratio']:.2f}) and smallest "
        f"for {narrow['kind']} ({narrow['ratio']:.2f})."
    )


def by_size(rows: Sequence[Row]) -> str:
    """How errors and bars follow the size, beside what the paper says of it."""
    if len(rows) < 2:
        return "There are too few test molecules of any size to compare sizes."
    small, large = rows[0], rows[-1]
    common = max(rows, key=lambda row: row["molecules"])
    described = "; ".join(
        f"{row['size']} atoms: RMSE {row['rmse']:.2f}, bar {row['bar']:.2f}, ratio "
        f"{row['ratio']:.2f}"
        for row in (small, common, large)
    )
    spread = max(row["ratio"] for row in rows) / min(row["ratio"] for row in rows)
    return (
        f"**Size.** The smallest, the commonest and the largest molecules that the test can judge "
        f"({described}). Were the bars right at every size, all ratios would be near one; they "
        f"differ by a factor of {spread:.1f}. {AGREES if spread < EVEN else DIFFERS}"
    )


def shown(rows: Sequence[Row]) -> list[Row]:
    """Those with enough test molecules."""
    return [row for row in rows if row["molecules"] >= FEW]


def drawn(found: Mapping[str, Any]) -> Figure:
    """Errors and bars by rarity and by size."""
    figure, (left, right) = panels(columns=2, height=3.4)
    kinds, sizes = shown(found["kinds"]), shown(found["sizes"]["atoms"])
    _both(left, [100 * max(row["share"], 1e-5) for row in kinds], kinds, "")
    left.set(xscale="log", xlabel="share in training, %", ylabel="kcal/mol", title="kinds")
    label_ticks(left)
    _both(right, [row["size"] for row in sizes], sizes, "-")
    right.set(xlabel="atoms", title="sizes", ylim=(0, None))
    left.set_ylim(bottom=0)
    left.legend()
    return figure


def _both(ax: Axes, x: Sequence[float], rows: Sequence[Row], line: str) -> None:
    low, high = ([pick(row["rmse"], row["bar"]) for row in rows] for pick in (min, max))
    ax.vlines(x, low, high, color=GREY, lw=0.8, zorder=1)
    for name, label, colour, marker in (
        ("rmse", "RMSE", VERMILION, "o"),
        ("bar", "bar", BLUE, "D"),
    ):
        y = [row[name] for row in rows]
        ax.plot(x, y, marker + line, color=colour, ms=4.5, lw=1.2, label=label)


def label_ticks(ax: Axes) -> None:
    """Numbers as one writes them, 1, 2 and 5 of each decade."""
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _numbers(row: Row) -> list[Cell]:
    return [row[name] for name in ("rmse", "bar", "ratio")]
