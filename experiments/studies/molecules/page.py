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
WITHIN = (0.7, 1.4)
"""Ratios of RMSE and bar that are called right."""

SCORES = (
    *("nll", "crps", "binned_log_ratio", "wide_log_ratio", "coverage_90", "interval_score"),
    *("kurtosis", "spearman"),
)
COMPARED = ("nll", "crps")


def entries(numbers: Found) -> list[Entry]:
    """The page."""
    ways = numbers["calibrations"]
    return [
        *opening(numbers),
        "## All molecules",
        score_table(ways, scores_caption(numbers["settings"])),
        difference_table(numbers["differences"]),
        closing(numbers),
        "## By size",
        said(numbers["range"]),
        size_table(ways, numbers["settings"]["fewest"]),
        Picture("sizes", drawn(ways, numbers["settings"]["fewest"]), CAPTION),
    ]


def score_table(ways: Found, caption: str) -> Table:
    """One row a calibration."""
    rows: list[list[Cell]] = [
        [LABELS[name], *(one["scores"][key] for key in SCORES)] for name, one in ways.items()
    ]
    return Table(["bars", *heads(SCORES)], rows, caption)


def difference_table(differences: Found) -> Table:
    """Calibrations less the paper's, molecule by molecule."""
    rows: list[list[Cell]] = [
        [f"{LABELS[name]} - paper", *(measured(one[key]) for key in COMPARED)]
        for name, one in differences.items()
    ]
    return Table(["bars", *heads(COMPARED)], rows, DIFFERENCES)


def size_table(ways: Found, fewest: int) -> Table:
    """Every size with enough test molecules."""
    each = zip(*(way["sizes"] for way in ways.values()), strict=True)
    rows: list[list[Cell]] = []
    for same in each:
        first = same[0]
        if first["molecules"] >= fewest:
            ratios = [one["ratio"] for one in same]
            coverages = [one["coverage_90"] for one in same]
            rows.append([first["size"], first["molecules"], first["rmse"], *ratios, *coverages])
    names = [LABELS[name] for name in ways]
    heads = [*names, *(f"{name}: in 90 %" for name in names)]
    return Table(["atoms", "test molecules", "RMSE", *heads], rows, SIZES)


def drawn(ways: Found, fewest: int) -> Figure:
    """Error over bar by size, and wide bins."""
    figure, (left, right) = panels(columns=2, height=4.0)
    left.axhspan(*WITHIN, color=GREY, alpha=0.15, lw=0)
    left.axhline(1, color=BLACK, lw=1)
    for (name, way), colour, marker in zip(ways.items(), COLOURS, MARKERS, strict=False):
        own = [one for one in way["sizes"] if one["molecules"] >= fewest]
        points = [one["size"] for one in own], [one["ratio"] for one in own]
        left.plot(*points, f"{marker}-", color=colour, ms=4, lw=1.2, label=LABELS[name])
    left.set(yscale="log", xlabel="atoms", ylabel="RMSE / bar", title="sizes")
    ticks = [0.3, 0.5, 0.7, 1, 1.4, 2, 3]
    left.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    left.minorticks_off()
    left.legend()
    parity.binned(right, {LABELS[name]: way["bins"] for name, way in ways.items()}, "bins")
    return figure


def opening(numbers: Found) -> tuple[str, ...]:
    """What was done."""
    count, settings = numbers["molecules"], numbers["settings"]
    source = (
        "It is committed (`experiments/nets/qm9.safetensors`, float32), so that another "
        "calibration can be judged in minutes"
        if numbers["committed"]
        else "It was trained in this run"
    )
    return (
        f"""\
One net of QM9's first split as in the study [qm9](../qm9/qm9.md), where data, descriptors and
training are described: {count["train"]:,} molecules to train, {count["valid"]:,} to choose the
weights and to calibrate, {count["test"]:,} to test; energies in kcal/mol. {source}; trained on
{numbers["trained_on"]} for {numbers["epochs_done"]} of {settings["epochs"]} epochs, weights of
epoch {numbers["epoch"]}.""",
        """\
Three calibrations of the same fit. *Paper*: ridge and scale by bins, variance α²q, Gaussian.
*Likelihood*: the same two numbers by the Gaussian likelihood. *Auto*: the library's default, noise
that follows the readout's features, a heavy-tailed distribution and a guard for unfamiliar inputs.
The loss weighs a molecule of n atoms by 1 / n, and so does the fit. The readouts have no biases:
the numbers of atoms of each element stand beside the features, as the library finds them.""",
    )


def closing(numbers: Found) -> str:
    """What came out over all molecules."""
    ways, gain = numbers["calibrations"], numbers["differences"]["auto"]
    paper, auto = (ways[name]["scores"] for name in ("paper", "auto"))
    verb = {1: "is worse", -1: "is better", 0: "does not clearly differ"}
    return (
        f"**Auto beside the paper's form.** The NLL {verb[direction(gain['nll'])]} "
        f"({measured(gain['nll'])} a molecule), the CRPS is {auto['crps'] / paper['crps']:.3f} of "
        f"the paper's. In bins of {numbers['settings']['wide']:,} the log ratio is "
        f"{auto['wide_log_ratio']:.3f} (paper {paper['wide_log_ratio']:.3f}), the kurtosis of "
        f"errors over bars {auto['kurtosis']:.1f} (paper {paper['kurtosis']:.1f})."
    )


def said(found: Found) -> str:
    """How far error over bar goes."""
    each = "; ".join(
        f"*{LABELS[name]}* from {one['smallest']:.2f} to {one['largest']:.2f}"
        for name, one in found.items()
    )
    auto = found["auto"]
    right = WITHIN[0] <= auto["smallest"] and auto["largest"] <= WITHIN[1]
    verdict = "at every size" if right else "not at every size"
    return (
        f"**RMSE over bar**, of {auto['sizes']} sizes: {each}. With *auto* it lies between "
        f"{WITHIN[0]} and {WITHIN[1]} {verdict}."
    )


def scores_caption(settings: Found) -> str:
    """What the columns are."""
    return (
        f"Log ratio: the mean of |log10(MSE / variance)| over bins of {settings['bin_size']} "
        f"molecules, and wide bins of {settings['wide']:,}. NLL, CRPS and the 90 % intervals are "
        "those of each calibration's own distribution; *interval score* is of these intervals. *Kurtosis* "
        "is of errors over bars, 3 for a Gaussian."
    )


DIFFERENCES = (
    "Differences molecule by molecule, mean ± standard error over the test molecules of one net."
)
SIZES = (
    "By the number of atoms: RMSE, RMSE over bar (root mean square of the estimated errors) and "
    "what the 90 % intervals hold."
)
CAPTION = (
    "Left: RMSE over bar by the number of atoms; the band is what is called right. Right: mean "
    "squared error against variance in wide bins."
)
