"""The page: scores of all molecules, then of every size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.frame.figures import BLACK, COLOURS, GREY, panels
from experiments.frame.outcome import Cell, Entry, Found, Picture, Table
from experiments.frame.wording import direction, measured
from experiments.judging import parity
from experiments.judging.columns import heads, labels
from experiments.judging.parity import MARKERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = labels(("paper", "nll", "auto"))
"""What the page calls the calibrations."""

RIGHT_RATIOS = (0.7, 1.4)
"""Between these, RMSE over bar is called right."""

SCORES = (
    "nll",
    "crps",
    "binned_log_ratio",
    "wide_log_ratio",
    "coverage_90",
    "interval_score",
    "kurtosis",
    "spearman",
)
COMPARED = ("nll", "crps")
"""Scores whose differences from the paper's are shown."""


def entries(numbers: Found) -> list[Entry]:
    """Everything on the page, in reading order."""
    calibrations = numbers["calibrations"]
    fewest = numbers["settings"]["fewest"]
    return [
        *opening(numbers),
        "## All molecules",
        score_table(calibrations, scores_caption(numbers["settings"])),
        difference_table(numbers["differences"]),
        closing(numbers),
        "## By size",
        range_of_ratios(numbers["range"]),
        size_table(calibrations, fewest),
        Picture("sizes", drawn(calibrations, fewest), CAPTION),
    ]


def score_table(calibrations: Found, caption: str) -> Table:
    """Scores over all molecules, one row for each calibration."""
    rows: list[list[Cell]] = []
    for name, calibration in calibrations.items():
        scores = calibration["scores"]
        rows.append([LABELS[name], *(scores[key] for key in SCORES)])
    return Table(["bars", *heads(SCORES)], rows, caption)


def difference_table(differences: Found) -> Table:
    """Calibrations less the paper's, molecule by molecule."""
    rows: list[list[Cell]] = []
    for name, difference in differences.items():
        cells = [measured(difference[key]) for key in COMPARED]
        rows.append([f"{LABELS[name]} - paper", *cells])
    return Table(["bars", *heads(COMPARED)], rows, DIFFERENCES)


def size_table(calibrations: Found, fewest: int) -> Table:
    """Errors and bars by the number of atoms, where there are enough test molecules."""
    sizes_of_calibrations = [calibration["sizes"] for calibration in calibrations.values()]
    rows: list[list[Cell]] = []
    for blocks in zip(*sizes_of_calibrations, strict=True):  # one block for each calibration
        # Molecules and errors do not depend on the calibration.
        first = blocks[0]
        if first["molecules"] >= fewest:
            ratios = [block["ratio"] for block in blocks]
            coverages = [block["coverage_90"] for block in blocks]
            rows.append([first["size"], first["molecules"], first["rmse"], *ratios, *coverages])
    names = [LABELS[name] for name in calibrations]
    coverage_columns = [f"{name}: in 90 %" for name in names]
    columns = ["atoms", "test molecules", "RMSE", *names, *coverage_columns]
    return Table(columns, rows, SIZES)


def drawn(calibrations: Found, fewest: int) -> Figure:
    """The figure: error over bar by size on the left, wide bins on the right."""
    figure, (left, right) = panels(columns=2, height=4.0)
    left.axhspan(*RIGHT_RATIOS, color=GREY, alpha=0.15, lw=0)
    left.axhline(1, color=BLACK, lw=1)
    styles = zip(calibrations.items(), COLOURS, MARKERS, strict=False)
    for (name, calibration), colour, marker in styles:
        blocks = [block for block in calibration["sizes"] if block["molecules"] >= fewest]
        left.plot(
            [block["size"] for block in blocks],
            [block["ratio"] for block in blocks],
            f"{marker}-",
            color=colour,
            ms=4,
            lw=1.2,
            label=LABELS[name],
        )
    left.set(yscale="log", xlabel="atoms", ylabel="RMSE / bar", title="sizes")
    ticks = [0.3, 0.5, 0.7, 1, 1.4, 2, 3]
    left.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    left.minorticks_off()
    left.legend()
    bins = {LABELS[name]: calibration["bins"] for name, calibration in calibrations.items()}
    parity.binned(right, bins, "bins")
    return figure


def opening(numbers: Found) -> tuple[str, ...]:
    """What was done."""
    count = numbers["molecules"]
    settings = numbers["settings"]
    if numbers["committed"]:
        source = (
            "The network comes with the project (`experiments/nets/qm9.safetensors`, float32), so "
            "that another calibration can be judged in minutes"
        )
    else:
        source = "The network was trained in this run"
    return (
        f"""\
Are the error bars right for small and for large molecules? One network of QM9's first split is
judged. The study [qm9](../qm9/qm9.md) describes data, descriptors and training. There are
{count["train"]:,} molecules for training, {count["valid"]:,} to choose the weights and to
calibrate, and {count["test"]:,} for the test. Energies are in kcal/mol. {source}. It was trained on
{numbers["trained_on"]} for {numbers["epochs_done"]} of {settings["epochs"]} epochs and has the
weights of epoch {numbers["epoch"]}.""",
        """\
Three calibrations use the same fit. *Paper* chooses ridge and scale by bins; its variance is α²q,
and its distribution is Gaussian. *Likelihood* chooses the same two numbers by the Gaussian
likelihood. *Auto* is the library's default: a distribution that follows the
readout's features, and a guard for unfamiliar inputs. The loss weights a molecule of n atoms
by 1 / n, and so does the fit. The readouts have no biases. The library therefore adds the number of
atoms of each element to the features.""",
    )


def closing(numbers: Found) -> str:
    """What came out over all molecules."""
    paper = numbers["calibrations"]["paper"]["scores"]
    auto = numbers["calibrations"]["auto"]["scores"]
    nll_difference = numbers["differences"]["auto"]["nll"]
    verbs = {1: "is worse", -1: "is better", 0: "does not clearly differ"}
    return (
        f"**Auto beside the paper's form.** The NLL {verbs[direction(nll_difference)]} "
        f"({measured(nll_difference)} nats per molecule), and the CRPS is "
        f"{auto['crps'] / paper['crps']:.3f} times the paper's. In bins of "
        f"{numbers['settings']['wide']:,}, the log ratio is "
        f"{auto['wide_log_ratio']:.3f} (paper {paper['wide_log_ratio']:.3f}). The kurtosis of "
        f"errors over bars is {auto['kurtosis']:.1f} (paper {paper['kurtosis']:.1f})."
    )


def range_of_ratios(ranges: Found) -> str:
    """How far RMSE over bar goes over the sizes, by calibration."""
    extremes = "; ".join(
        f"*{LABELS[name]}* from {ratios['smallest']:.2f} to {ratios['largest']:.2f}"
        for name, ratios in ranges.items()
    )
    auto = ranges["auto"]
    low, high = RIGHT_RATIOS
    is_right = low <= auto["smallest"] and auto["largest"] <= high
    verdict = "lies" if is_right else "does not lie"
    return (
        f"**RMSE over bar**, for {auto['sizes']} sizes: {extremes}. With *auto*, this ratio "
        f"{verdict} between {low} and {high} at every size."
    )


def scores_caption(settings: Found) -> str:
    """What the columns are."""
    return (
        f"*Log ratio*: the mean of |log10(MSE / variance)| over bins of {settings['bin_size']} "
        f"molecules, and over wide bins of {settings['wide']:,}. NLL (negative log-likelihood), "
        "CRPS (continuous ranked probability score), 90 % intervals and their *interval score* "
        "refer to each calibration's own distribution. *Kurtosis*: kurtosis of errors over bars, 3 "
        "for a Gaussian."
    )


DIFFERENCES = (
    "Differences molecule by molecule: mean ± standard error over the test molecules of one "
    "network."
)
SIZES = (
    "By the number of atoms: RMSE, RMSE over bar (the root mean square of the estimated errors), "
    "and the coverage of 90 % intervals."
)
CAPTION = (
    "Left: RMSE over bar by the number of atoms; ratios inside the band count as right. Right: "
    "mean squared error against variance in wide bins."
)
