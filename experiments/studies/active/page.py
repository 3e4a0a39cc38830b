"""The page: what was done, the figure of learning curves, and two tables for each set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.frame.figures import BLUE, GREEN, GREY, VERMILION, panels
from experiments.frame.outcome import Entry, Found, Picture, Table
from experiments.studies.active.work import Protocol

NAMES = {
    "random": "random",
    "top": "largest variances",
    "logdet": "greedy, logdet",
    "variance": "greedy, variance",
}
"""What the page calls the methods."""

COLOURS = {"random": GREY, "top": VERMILION, "logdet": GREEN, "variance": BLUE}
MARKERS = {"random": "o", "top": "v", "logdet": "s", "variance": "D"}


def entries(
    numbers: Mapping[str, Found], protocols: Sequence[Protocol], *, quick: bool
) -> list[Entry]:
    """Everything on the page, in reading order.

    Args:
        numbers: What `work.summary` gives, by the name of the set.
        protocols: The settings, in the order of `CLOSING`.
        quick: Whether the numbers are of a quick run, which proves nothing.
    """
    page: list[Entry] = [
        *opening(protocols[0]),
        Picture("curves", drawn(numbers), CAPTION),
    ]
    closing = (QUICK, QUICK) if quick else CLOSING
    for protocol, conclusion in zip(protocols, closing, strict=True):
        name = protocol.name
        differences_caption = DIFFERENCES.format(name=name)
        curves_caption = CURVES.format(name=name, seeds=protocol.seeds)
        page.append(difference_table(numbers[name], differences_caption))
        page.append(curve_table(numbers[name], curves_caption))
        page.append(conclusion)
    return page


def curve_table(numbers: Found, caption: str) -> Table:
    """Test RMSE of every method at every number of labels."""
    methods = numbers["methods"]
    rows = []
    for k, labels in enumerate(numbers["labels"]):
        errors = [_with_error(method["rmse_thousandths"][k]) for method in methods.values()]
        rows.append([str(labels), *errors])
    columns = ["labels", *(NAMES[name] for name in methods)]
    return Table(columns, rows, caption)


def difference_table(numbers: Found, caption: str) -> Table:
    """Paired differences to random choice and to the largest variances."""
    rows = []
    for name, method in numbers["methods"].items():
        if name == "random":
            continue
        less_random = method["less_random"]["thousandths"]
        less_top = method["less_top"]["thousandths"]
        rows.append(
            [
                NAMES[name],
                _with_error(less_random["last"], sign="+"),
                _with_error(less_random["all_rounds"], sign="+"),
                None if name == "top" else _with_error(less_top["last"], sign="+"),
                None if name == "top" else _with_error(less_top["all_rounds"], sign="+"),
                f"{method['less_random']['better']} of {numbers['repetitions']}",
                _labels_needed(method["labels_to_randoms_last"], numbers["labels"]),
            ]
        )
    columns = [
        "choice",
        "minus random, last",
        "all rounds",
        "minus largest variances, last",
        "all rounds",
        "better than random in",
        "labels to reach random's last RMSE",
    ]
    return Table(columns, rows, caption)


def _labels_needed(needed: float | None, labels: list[int]) -> str:
    """With how many labels a curve comes to where random choice ends, in words."""
    if needed is None:
        return "not reached"
    if needed <= labels[0]:
        return "all start below it"
    return f"{needed:.0f} of {labels[-1]}"


def _with_error(pair: tuple[float, float], sign: str = "") -> str:
    """A mean and its standard error, with a sign before positive means for ``sign="+"``."""
    mean, error = pair
    return f"{mean:{sign}.2f} ± {error:.2f}"


def drawn(numbers: Mapping[str, Found]) -> Figure:
    """The figure, one row for each set: RMSE on the left, less random's on the right."""
    figure, axes = panels(columns=2, rows=len(numbers), height=3.1)
    rows_of_axes = zip(axes[::2], axes[1::2], strict=True)
    for (title, setting), (left, right) in zip(numbers.items(), rows_of_axes, strict=True):
        _draw_curves(left, setting)
        _draw_differences(right, setting)
        left.set(title=title, ylabel="test RMSE", xlabel="labelled rows")
        right.set(title="minus random choice, paired", xlabel="labelled rows")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure


def _draw_curves(ax: Axes, setting: Found) -> None:
    """Draw the test RMSE of every method against the number of labels."""
    for name, method in setting["methods"].items():
        mean, error = zip(*method["rmse"], strict=True)
        ax.errorbar(setting["labels"], mean, yerr=error, label=NAMES[name], **_style(name))


def _draw_differences(ax: Axes, setting: Found) -> None:
    """Draw the differences to random choice, taken within repetitions."""
    random = setting["methods"]["random"]["each"]
    ax.axhline(0, color=GREY, lw=1)
    for name, method in setting["methods"].items():
        if name != "random":
            difference = method["each"] - random  # (rounds + 1, repetitions)
            error = difference.std(1) / torch.tensor(difference.shape[1]).sqrt()
            ax.errorbar(setting["labels"], difference.mean(1), yerr=error, **_style(name))


def _style(method: str) -> dict[str, object]:
    """Colour and marker of a method's line."""
    return {"color": COLOURS[method], "marker": MARKERS[method], "ms": 4, "capsize": 2}


def opening(protocol: Protocol) -> list[str]:
    """What was done, with the numbers of the first setting."""
    how = protocol.training
    return [
        f"""\
Which rows of a pool should be labelled next? A network is trained on {protocol.start} random rows
of `{protocol.name}`. Then, {protocol.rounds} times, {protocol.batch} more rows of a pool of
{protocol.pool} are labelled, and a new network is trained from scratch. There are three ways to
choose rows: at random, by the largest variance q = fᵀ(G + ς²I)⁻¹f, or greedily. A greedy choice
takes the earlier picks of the same batch into account. It aims at the most information about the
last layer's weights (*logdet*) or at the smallest total variance over the pool (*variance*). No
choice uses a label. The score is the RMSE on {protocol.test} other rows, in the target's unit.""",
        f"""\
**Networks and error bars.** The networks have hidden layers of
{" and ".join(map(str, how.hidden))} units with SiLU. They are trained for {how.steps} steps of
AdamW on batches of {how.batch}, with learning rate {how.rate:g} on a cosine schedule and weight
decay {how.decay:g}. Inputs are standardised by the pool, the target by the first labels. The
features are the last hidden layer and a constant. The ridge ς² is {protocol.ridge:g} of the mean
diagonal of the Gram matrix. It is never calibrated, because no label can be spared. All networks of
a round train at once, as batched matrix products.""",
        """\
**Pairs.** Within a repetition, all choices share test rows, pool and first rows; within a round,
they share initial weights and the order of batches. Differences are taken within repetitions, and ±
is their standard error. The activation, weight decay, ridge and number of steps were settled on up
to six repetitions with other seeds (1000 to 1005). Four sets were tried there. `kin8nm` is the main
set. `naval` is shown because choosing hurts there. On `protein` and `power` (the latter with half
the rows), no greedy choice differed from random choice by two standard errors, averaged over the
rounds. The gain also depends on the network: with ReLU and a weight decay of 0.5, on `kin8nm`, the
total variance was no better than random choice, and the information was slightly worse.""",
    ]


CAPTION = (
    "Left: test RMSE against the number of labelled rows. Right: the same minus that of random "
    "choice, paired by repetition (below zero is better). Bars are standard errors over the "
    "repetitions."
)

CURVES = "`{name}`: test RMSE in thousandths, mean ± standard error over {seeds} repetitions."

DIFFERENCES = (
    "`{name}`: paired differences in RMSE, in thousandths, after the last round and averaged over "
    "all rounds (negative is better). The last columns count the repetitions in which that average "
    "beats random choice, and the labels that the mean curve needs to reach the final RMSE of "
    "random choice."
)

QUICK = "These are quick settings. They show only that the study runs."

CLOSING = (
    """\
**What to expect.** On `kin8nm`, a smooth function with little noise, the greedy batch for the total
variance reaches the final RMSE of random choice with about a quarter fewer labels. The rows with
the largest variances are *worse* than random choice. The greedy batch for the information is better
than these rows, and slightly better than random choice. A likely reason, not measured here: the
rows with the largest variances are neighbours far out. The information prefers rows that are far
out but apart, and the total variance prefers rows that represent many others.""",
    """\
**Where it does not help.** On `naval`, more labels do not lower the error of random choice, so
there is nothing to gain. Every choice by variance loses, and the total variance loses least. The
error bar measures what the last layer's features leave undetermined, and it takes these features as
given. Choosing rows also makes the training rows unlike the test rows. Before a long campaign,
compare with random rows.""",
)
