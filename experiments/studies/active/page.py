"""The page: tables, the figure, and the texts around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.frame.figures import BLUE, GREEN, GREY, VERMILION, panels
from experiments.frame.outcome import Entry, Found, Picture, Table
from experiments.studies.active.work import BASES, Protocol

NAMES = {
    "random": "random",
    "top": "largest variances",
    "logdet": "greedy, logdet",
    "variance": "greedy, variance",
}


def entries(
    found: Mapping[str, Found], protocols: Sequence[Protocol], *, quick: bool
) -> list[Entry]:
    """The page."""
    page: list[Entry] = [
        *opening(protocols[0]),
        Picture("curves", drawn(found), CAPTION),
    ]
    for one, said in zip(protocols, (QUICK, QUICK) if quick else CLOSING, strict=True):
        words = {"name": one.name, "seeds": one.seeds}
        page.append(difference_table(found[one.name], DIFFERENCES.format(**words)))
        page.append(curve_table(found[one.name], CURVES.format(**words)))
        page.append(said)
    return page


def curve_table(found: Found, caption: str) -> Table:
    """RMSE at every size."""
    columns = ["labels", *(NAMES[method] for method in found["methods"])]
    rows = [
        [
            str(labels),
            *(_shown(one["rmse_thousandths"][place]) for one in found["methods"].values()),
        ]
        for place, labels in enumerate(found["labels"])
    ]
    return Table(columns, rows, caption)


def difference_table(found: Found, caption: str) -> Table:
    """Paired differences to random choice and to the largest variances."""
    columns = ["choice", "less random, last", "all rounds", "less largest variances, last"]
    columns += ["all rounds", "better than random in", "labels to random's last RMSE"]
    rows = []
    for method, one in found["methods"].items():
        if method == "random":
            continue
        random, top = (one[f"less_{base}"]["thousandths"] for base in BASES)
        pairs = [random["last"], random["all_rounds"]]
        pairs += [top["last"], top["all_rounds"]] if method != "top" else [None, None]
        needed = one["labels_to_randoms_last"]
        rows.append(
            [
                NAMES[method],
                *(None if pair is None else _shown(pair, sign="+") for pair in pairs),
                f"{one['less_random']['better']} of {found['repetitions']}",
                _needed(needed, found["labels"]),
            ]
        )
    return Table(columns, rows, caption)


def _needed(labels: float | None, all_labels: list[int]) -> str:
    if labels is None:
        return "not reached"
    return "all begin below it" if labels <= all_labels[0] else f"{labels:.0f} of {all_labels[-1]}"


def _shown(pair: tuple[float, float], sign: str = "") -> str:
    mean, error = pair
    return f"{mean:{sign}.2f} ± {error:.2f}"


COLOURS = {"random": GREY, "top": VERMILION, "logdet": GREEN, "variance": BLUE}
MARKERS = {"random": "o", "top": "v", "logdet": "s", "variance": "D"}


def drawn(settings: Mapping[str, Found]) -> Figure:
    """One row a setting: RMSE on the left, less random's on the right."""
    figure, axes = panels(columns=2, rows=len(settings), height=3.1)
    for (title, found), left, right in zip(settings.items(), axes[::2], axes[1::2], strict=True):
        _curves(left, found)
        _differences(right, found)
        left.set(title=title, ylabel="test RMSE", xlabel="labelled rows")
        right.set(title="less random choice, paired", xlabel="labelled rows")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure


def _curves(ax: Axes, found: Found) -> None:
    for method, one in found["methods"].items():
        mean, error = zip(*one["rmse"], strict=True)
        ax.errorbar(found["labels"], mean, yerr=error, label=NAMES[method], **_look(method))


def _differences(ax: Axes, found: Found) -> None:
    random = found["methods"]["random"]["each"]
    ax.axhline(0, color=GREY, lw=1)
    for method, one in found["methods"].items():
        if method != "random":
            difference = one["each"] - random
            error = difference.std(1) / torch.tensor(difference.shape[1]).sqrt()
            ax.errorbar(found["labels"], difference.mean(1), yerr=error, **_look(method))


def _look(method: str) -> dict[str, object]:
    return {"color": COLOURS[method], "marker": MARKERS[method], "ms": 4, "capsize": 2}


def opening(protocol: Protocol) -> list[str]:
    """What was done."""
    how = protocol.training
    return [
        f"""\
Which rows of a pool should be labelled next? A net is trained on {protocol.start} random rows of
`{protocol.name}`; then, {protocol.rounds} times, {protocol.batch} more rows of a pool of
{protocol.pool} are labelled and a new net is trained from scratch. The rows are chosen at random,
by the largest variance q = fᵀ(G + ς²I)⁻¹f, or greedily, each pick in the light of those before it
in the same batch: for the information about the last layer's weights (*logdet*) or for the
smallest total variance over the pool (*variance*). No label is used to choose. The score is the
RMSE on {protocol.test} other rows, in the target's unit.""",
        f"""\
**Nets and error bars.** Hidden layers of {" and ".join(map(str, how.hidden))} with SiLU,
{how.steps} steps of AdamW on batches of {how.batch}, learning rate {how.rate:g} on a cosine
schedule, weight decay {how.decay:g}; inputs standardised by the pool, the target by the first
labels. Features are the last hidden layer and a constant; the ridge ς² is {protocol.ridge:g} of the
Gram's mean diagonal, never calibrated, since no label can be spared. All nets of a round train at
once, as batched matrix products.""",
        """\
**Pairs.** In a repetition all choices share test rows, pool, first rows and, in each round, first
weights and order of batches. Differences are taken within repetitions; ± is their standard error.
The activation, weight decay, ridge and number of steps were settled on up to six repetitions with
other seeds (1000 to 1005). Four sets were tried there: `kin8nm`; `naval`, which is shown because
choosing hurts on it; `protein` and `power` (the latter with half the rows), where, averaged over
the rounds, no greedy choice differed from random choice by two standard errors. The gain depends on
the net, too: with ReLU and a weight decay of 0.5 the total variance was no better than random
choice on `kin8nm`, and the information a little worse.""",
    ]


CAPTION = (
    "Test RMSE against the number of labelled rows (left), and its paired difference to random "
    "choice (right; below zero is better). Bars are standard errors over the repetitions."
)

CURVES = "`{name}`: test RMSE in thousandths, mean ± standard error over {seeds} repetitions."

DIFFERENCES = (
    "`{name}`: paired differences of RMSE in thousandths, after the last round and averaged over "
    "all rounds (negative is better); in how many repetitions that average beats random choice; "
    "and how many labels bring the mean curve to where random choice ends."
)

QUICK = "These are quick settings, which show that it runs and nothing else."

CLOSING = (
    """\
**What to expect.** On `kin8nm`, a smooth function with little noise, the greedy batch for the total
variance comes to where random choice ends with about a quarter fewer labels. The largest variances
taken one by one are *worse* than random choice. The greedy batch for the information is better than
they are, and a little better than random choice. A likely reason, not measured here: the largest
variances are neighbours far out, the information asks about rows that are far out but apart, and
the total variance about rows that stand for many.""",
    """\
**Where it does not help.** On `naval` more labels do not lower the error of random choice, so there
is nothing to gain, and every choice by variance loses; the total variance loses least. The error
bar sees what the last layer's features leave undetermined and takes these features as given; a
choice also makes the training rows unlike the test rows. Compare with random rows before a long
campaign.""",
)
