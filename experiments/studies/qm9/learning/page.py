"""What the page shows of the learning curves."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.frame.figures import BLUE, GREY, VERMILION, panels
from experiments.frame.outcome import Cell, Entry, Found, Picture, Table
from experiments.frame.wording import compared, measured

NAMES = {"random": "random", "greedy": "greedy, total variance", "top": "largest bars"}
COLOURS = {"random": GREY, "greedy": BLUE, "top": VERMILION}
MARKERS = {"random": "o", "greedy": "D", "top": "v"}
ERRORS = {"rmse": "RMSE", "mae": "MAE", "worst": "largest errors", "rmse_rare": "RMSE, rare kinds"}

CURVES = (
    "After the start and after the last round; mean ± standard error over seeds, kcal/mol. "
    "*Largest errors* are the mean of the worst {worst:.0%}; *rare kinds* (rings, elements) make "
    "up less than {rare:.0%} of the pool each; *bar* is the root mean square of the estimated "
    "errors of the test molecules; *atoms* and *rare* describe the labelled molecules: their mean "
    "size and the share of those of a rare kind."
)
DIFFERENCES = (
    "Less random choice, paired by seed: after the last round, and averaged over all rounds after "
    "the start; kcal/mol, below zero is better."
)
CAPTION = (
    "Test errors against the number of labelled molecules, mean and standard error over seeds: all "
    "test molecules (left), the mean of the largest errors (middle), and the paired difference of "
    "the RMSE to random choice (right, below zero is better)."
)


def entries(found: Found) -> list[Entry]:
    """The section.

    Args:
        found: what `work.together` gives, as JSON holds it.
    """
    settings = found["settings"]
    return [
        "## Which molecules to label next",
        opening(settings),
        Picture("learning", drawn(found), CAPTION),
        difference_table(found),
        curve_table(found),
        "\n\n".join(said(found)),
    ]


def opening(settings: Found) -> str:
    """What was done."""
    return f"""\
{settings["start"]} random molecules are labelled at first; in each of {settings["rounds"]} rounds
{settings["batch"]} more of a pool of {settings["pool"]} are chosen: at random, by the largest bars
one by one, or greedily, each in the light of those before it, so that the bars of the whole pool
become smallest. A new molecule counts in the fit with one over its number of atoms, as it does in
the loss. Every net is trained from scratch by {settings["steps"]} steps on random batches of
{settings["step"]} molecules, whatever their number, so that more labels do not mean more training.
{settings["valid"]} further molecules, the same for all ways of choosing, cut the rate, choose the
weights and calibrate. No label of a candidate is used to choose. The linear baseline comes from
the labelled molecules alone. Scores are those of {settings["test"]} other molecules;
{settings["seeds"]} seeds, each with molecules, start and first weights of its own, which the ways
of choosing share."""


def curve_table(found: Found) -> Table:
    """The scores at the start and at the end."""
    columns = [*ERRORS.values(), "bar", "RMSE / bar", "atoms", "rare"]
    names = [*ERRORS, "bar", "ratio", "atoms", "rare"]
    first, last = found["labels"][0], found["labels"][-1]
    rows: list[list[Cell]] = [[first, "start", *_cells(found["strategies"]["random"], names, 0)]]
    for way, one in found["strategies"].items():
        rows.append([last, NAMES[way], *_cells(one, names, -1)])
    return Table(["labels", "choice", *columns], rows, CURVES.format(**found["settings"]))


def difference_table(found: Found) -> Table:
    """Paired differences to random choice."""
    rows: list[list[Cell]] = [
        [
            NAMES[way],
            when.replace("_", " "),
            *(measured(one["less_random"][name][when], 2) for name in ERRORS),
        ]
        for way, one in found["strategies"].items()
        if way != "random"
        for when in ("last", "all_rounds")
    ]
    return Table(["choice", "rounds", *ERRORS.values()], rows, DIFFERENCES)


def said(found: Found) -> list[str]:
    """One sentence a way of choosing, by the numbers."""
    lines = []
    for way, one in found["strategies"].items():
        if way == "random":
            continue
        parts = []
        for name, text in (("rmse", "the RMSE"), ("worst", "the mean of the largest errors")):
            pair = one["less_random"][name]["all_rounds"]
            parts.append(f"{text} {compared(pair)} that of random choice")
        lines.append(f"*{NAMES[way]}*: averaged over the rounds, {' and '.join(parts)}.")
    return lines


def drawn(found: Found) -> Figure:
    """Three panels."""
    figure, (left, middle, right) = panels(columns=3, height=3.3)
    for way, one in found["strategies"].items():
        _curve(left, found["labels"], one["rmse"], way)
        _curve(middle, found["labels"], one["worst"], way)
        if way != "random":
            _curve(right, found["labels"], one["less_random"]["rmse"]["rounds"], way)
    right.axhline(0, color=GREY, lw=1)
    left.set(title="RMSE", ylabel="kcal/mol")
    middle.set(title=f"largest {found['settings']['worst']:.0%} of errors")
    right.set(title="RMSE less random's")
    for ax in (left, middle, right):
        ax.set_xlabel("labelled molecules")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure


def _curve(ax: Axes, labels: list[int], pairs: list[list[float]], way: str) -> None:
    mean, error = zip(*pairs, strict=True)
    ax.errorbar(
        labels, mean, error, color=COLOURS[way], marker=MARKERS[way], ms=4, capsize=2,
        label=NAMES[way],
    )  # fmt: skip


def _cells(one: Found, names: list[str], place: int) -> list[str]:
    return [measured(one[name][place], 2) for name in names]
