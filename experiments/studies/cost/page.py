"""The page: the tables of costs beside the paper's, the figure, and texts with the numbers."""

from __future__ import annotations

from typing import Any

from benchmarks.frame.timing import figure as shown
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from experiments.frame.figures import BLACK, BLUE, GREY, VERMILION, panels
from experiments.frame.outcome import Cell, Entry, Found, Picture, Table
from experiments.studies.cost.work import MEMBERS, PASSES, Workload

LABELS = {
    "none": "no error bars",
    **{f"dropout_{n}": f"MC dropout, M = {n}" for n in PASSES},
    **{f"ensemble_{n}": f"deep ensemble, N = {n}" for n in MEMBERS},
    **{f"adversarial_{n}": f"deep ensemble, adversarial rows, N = {n}" for n in MEMBERS},
    "ours": "rigidities",
}
THEORY: dict[str, dict[str, int]] = {
    "none": {"training": 1, "inference": 1},
    **{f"dropout_{n}": {"training": 1, "inference": n} for n in PASSES},
    **{f"ensemble_{n}": {"training": n, "inference": n} for n in MEMBERS},
    **{f"adversarial_{n}": {"training": n, "inference": n} for n in MEMBERS},
    "ours": {"training": 1, "inference": 1},
}
"""The paper's table; it says "about" for the training of MC dropout and for both of the last row,
and does not speak of adversarial rows."""


def entries(numbers: Found, workloads: dict[str, Workload]) -> list[Entry]:
    """Everything on the page, in reading order."""
    costs = numbers["nets"]
    return [
        *opening(workloads, numbers["settings"]),
        Picture("ratios", drawn(costs), CAPTION),
        *(cost_table(name, costs[name]) for name in costs),
        *(_conclusion(name, costs[name], workloads[name]) for name in costs),
        second_table(costs),
    ]


def cost_table(name: str, costs: Found) -> Table:
    """One network: training and inference by every method.

    Args:
        name: The name of the workload.
        costs: What `work.costs` gives for it.
    """
    rows: list[list[Cell]] = []
    for method, label in LABELS.items():
        rows.append(
            [
                label,
                THEORY[method]["training"],
                _ratio(costs["training"][method]),
                THEORY[method]["inference"],
                _ratio(costs["inference"][method]),
            ]
        )
    columns = ["method", "training: paper", "measured", "inference: paper", "measured"]
    return Table(columns, rows, f"**{_label(name)}.** {COSTS}")


def second_table(costs: Found) -> Table:
    """Median seconds of everything that was timed, one column for each workload."""
    seconds_of_workloads = [workload["seconds"] for workload in costs.values()]
    rows = []
    for task in seconds_of_workloads[0]:
        rows.append([task, *(seconds[task] for seconds in seconds_of_workloads)])
    return Table(["seconds of", *map(_label, costs)], rows, SECONDS)


def _label(name: str) -> str:
    """What the page calls a workload.

    >>> _label("larger net")
    'larger network'
    """
    return name.replace("net", "network")


def _ratio(ratio: dict[str, float]) -> str:
    """Median and quartiles; the unit itself has no spread."""
    if ratio["lower"] == ratio["upper"]:
        return digits(ratio["median"])
    return f"{digits(ratio['median'])} ({digits(ratio['lower'])} to {digits(ratio['upper'])})"


def digits(value: float) -> str:
    """Three decimals about one, where a small addition is all there is to see.

    >>> digits(1.00213), digits(5.123), digits(103.4)
    ('1.002', '5.12', '103')
    """
    return f"{value:.3f}" if 0.9 < value < 1.1 else shown(value)


def drawn(costs: dict[str, Any]) -> Figure:
    """The figure: a panel for training and one for inference."""
    figure, axes = panels(columns=2, height=3.8, sharey=True)
    methods = list(LABELS)[::-1]
    heights = range(len(methods))
    for ax, phase in zip(axes, ("training", "inference"), strict=True):
        theory = [THEORY[method][phase] for method in methods]
        ax.plot(theory, heights, "o", mfc="none", mec=BLACK, ms=11, label="paper (theory)")
        styles = zip(costs.items(), (BLUE, VERMILION), (0.12, -0.12), "os", strict=False)
        for (name, workload), colour, shift, marker in styles:
            ratios = [workload[phase][method] for method in methods]
            ax.errorbar(
                [ratio["median"] for ratio in ratios],
                [height + shift for height in heights],
                xerr=[
                    [ratio["median"] - ratio["lower"] for ratio in ratios],
                    [ratio["upper"] - ratio["median"] for ratio in ratios],
                ],
                fmt=marker,
                color=colour,
                ms=4.5,
                lw=1,
                label=_label(name),
            )
        ax.set(xscale="log", title=phase, xlabel="times the plain network's")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.grid(axis="x", which="both", color=GREY, alpha=0.2, lw=0.6)
    axes[0].set_yticks(heights, [LABELS[method] for method in methods])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


COSTS = (
    "Costs relative to the same network without error bars: median over rounds of the ratios "
    "within a round (quartiles in brackets). Training with rigidities is 1 + (fit + calibrate) / "
    "(epochs x one epoch). Training an ensemble is N times one member's epoch, at equal numbers of "
    "epochs. The paper's table does not mention adversarial rows."
)
SECONDS = (
    "Median seconds for one epoch of each kind of network, for our two steps, and for predictions."
)
CAPTION = (
    "Cost of training and of predictions with error bars, relative to the same network without "
    "them, on a logarithmic axis. Rings: the paper's table. Dots: measured medians, with quartiles "
    "where they are wider than the dots."
)


def opening(workloads: dict[str, Workload], settings: Found) -> tuple[str, ...]:
    """What was done."""
    listed = "\n".join(
        f"- *{_label(name)}*: {_described(work)}" for name, work in workloads.items()
    )
    return (
        f"""\
The paper has a table of theoretical costs. This study measures them, for two networks on synthetic
rows:

{listed}""",
        f"""\
Every task is timed once per round, in turns, over {settings["rounds"]} rounds after one that does
not count, on {settings["threads"]} CPU threads. Training is timed by the epoch, for four networks:
the plain network with the squared error; the same network with dropout before every layer; and a
network with a mean, a variance and the Gaussian likelihood (a member of a deep ensemble), without
and with adversarial rows. All methods get the same number of epochs, so the ratios require no
complete training. The cost of a search for a dropout rate or a noise level is left out. Our method
adds one fit and one calibration to a plain training of the stated number of epochs (seconds of one
epoch times their number). Predictions pass through the network in blocks of rows and end with a
mean and a variance per row.""",
    )


def _conclusion(name: str, costs: Found, work: Workload) -> str:
    """What came out for one workload, with the numbers of this run."""
    inference = costs["inference"]
    member = costs["member"]
    return (
        f"*{_label(name)}*: fit and calibration together take as long as "
        f"{digits(costs['added_to_training']['median'])} epochs of "
        f"{work.protocol.epochs}. Predictions with error bars cost as much as "
        f"{digits(inference['ours']['median'])} plain predictions, compared with "
        f"{digits(inference['ensemble_5']['median'])} for an ensemble of five and "
        f"{digits(inference['dropout_100']['median'])} for a hundred passes with dropout. "
        f"An epoch of an ensemble member costs as much as "
        f"{digits(member['variance']['median'])} plain epochs, or "
        f"{digits(member['adversarial']['median'])} with adversarial rows."
    )


def _described(work: Workload) -> str:
    """A workload in words: network, rows and training."""
    sizes = "-".join(map(str, (work.inputs, *work.protocol.hidden, 1)))
    activation = {"relu": "ReLU", "silu": "SiLU"}[work.protocol.activation]
    return (
        f"{sizes}, {activation}; {work.train} training, {work.valid} validation and {work.test} "
        f"test rows; AdamW in batches of {work.protocol.batch}, {work.protocol.epochs} epochs; "
        f"predictions in blocks of {work.block}."
    )
