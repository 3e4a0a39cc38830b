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
    "Scores at the start and after the last round: mean ± standard error over seeds, kcal/mol. "
    "*Largest errors*: the mean of the worst {worst:.0%}. *Rare kinds*: kinds (rings, elements) "
    "that each make up less than {rare:.0%} of the pool. *Bar*: the root mean square of the "
    "estimated errors of the test molecules. *Atoms* and *rare* describe the labelled molecules: "
    "their mean size, and the share of rare kinds."
)
DIFFERENCES = (
    "Scores minus those of random choice, paired by seed: after the last round, and averaged over "
    "all rounds after the start; kcal/mol, below zero is better."
)
CAPTION = (
    "Test errors against the number of labelled molecules, mean and standard error over seeds. "
    "Left: all test molecules. Middle: mean of the largest errors. Right: RMSE minus that of "
    "random choice, paired by seed (below zero is better)."
)


def entries(numbers: Found) -> list[Entry]:
    """The section.

    Args:
        numbers: What `work.together` gives, as JSON holds it.
    """
    return [
        "## Which molecules to label next",
        opening(numbers["settings"]),
        Picture("learning", drawn(numbers), CAPTION),
        difference_table(numbers),
        curve_table(numbers),
        "\n\n".join(conclusions(numbers)),
    ]


def opening(settings: Found) -> str:
    """What was done."""
    return f"""\
At the start, {settings["start"]} random molecules have labels. In each of {settings["rounds"]}
rounds, {settings["batch"]} more are chosen from a pool of {settings["pool"]}. There are three ways
to choose: at random; the molecules with the largest bars; or greedily, where each choice takes the
earlier choices into account, so that the bars of the whole pool become as small as possible. A new
molecule enters the fit with the weight one over its number of atoms, as in the loss. Every network
is trained from scratch with {settings["steps"]} steps on random batches of {settings["step"]}
molecules, whatever the number of labels, so that more labels do not mean more training. The same
{settings["valid"]} further molecules serve all ways of choosing: they reduce the learning rate,
choose the weights and calibrate. The choice never uses the label of a candidate. The linear
baseline comes from the labelled molecules only. Scores come from {settings["test"]} other
molecules. There are {settings["seeds"]} seeds. Each has its own molecules, start and initial
weights, which all ways of choosing share."""


def curve_table(numbers: Found) -> Table:
    """The scores at the start, where all strategies are alike, and at the end."""
    names = [*ERRORS, "bar", "ratio", "atoms", "rare"]
    labels = numbers["labels"]
    start = _cells(numbers["strategies"]["random"], names, 0)
    rows: list[list[Cell]] = [[labels[0], "start", *start]]
    for strategy, curves in numbers["strategies"].items():
        rows.append([labels[-1], NAMES[strategy], *_cells(curves, names, -1)])
    columns = ["labels", "choice", *ERRORS.values(), "bar", "RMSE / bar", "atoms", "rare"]
    return Table(columns, rows, CURVES.format(**numbers["settings"]))


def difference_table(numbers: Found) -> Table:
    """Paired differences to random choice."""
    rows: list[list[Cell]] = []
    for strategy, curves in numbers["strategies"].items():
        if strategy == "random":
            continue
        for when in ("last", "all_rounds"):
            cells = [measured(curves["less_random"][name][when], 2) for name in ERRORS]
            rows.append([NAMES[strategy], when.replace("_", " "), *cells])
    return Table(["choice", "rounds", *ERRORS.values()], rows, DIFFERENCES)


def conclusions(numbers: Found) -> list[str]:
    """One sentence for each way of choosing, by the numbers."""
    sentences = []
    for strategy, curves in numbers["strategies"].items():
        if strategy == "random":
            continue
        less_random = curves["less_random"]
        rmse = compared(less_random["rmse"]["all_rounds"])
        worst = compared(less_random["worst"]["all_rounds"])
        sentences.append(
            f"*{NAMES[strategy]}*: averaged over the rounds, the RMSE {rmse} that of random choice "
            f"and the mean of the largest errors {worst} that of random choice."
        )
    return sentences


def drawn(numbers: Found) -> Figure:
    """The figure: RMSE, largest errors, and the RMSE less random choice's."""
    figure, (left, middle, right) = panels(columns=3, height=3.3)
    labels = numbers["labels"]
    for strategy, curves in numbers["strategies"].items():
        _draw_curve(left, labels, curves["rmse"], strategy)
        _draw_curve(middle, labels, curves["worst"], strategy)
        if strategy != "random":
            _draw_curve(right, labels, curves["less_random"]["rmse"]["rounds"], strategy)
    right.axhline(0, color=GREY, lw=1)
    left.set(title="RMSE", ylabel="kcal/mol")
    middle.set(title=f"largest {numbers['settings']['worst']:.0%} of errors")
    right.set(title="RMSE minus random")
    for ax in (left, middle, right):
        ax.set_xlabel("labelled molecules")
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names))
    return figure


def _draw_curve(ax: Axes, labels: list[int], pairs: list[list[float]], strategy: str) -> None:
    """Draw means with standard errors against the number of labels."""
    mean, error = zip(*pairs, strict=True)
    ax.errorbar(
        labels,
        mean,
        error,
        color=COLOURS[strategy],
        marker=MARKERS[strategy],
        ms=4,
        capsize=2,
        label=NAMES[strategy],
    )


def _cells(curves: Found, names: list[str], round_number: int) -> list[str]:
    """Scores of one round, with their standard errors."""
    return [measured(curves[name][round_number], 2) for name in names]
