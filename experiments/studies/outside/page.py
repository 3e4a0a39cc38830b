"""The page: tables over all networks, by set, domain and architecture; one figure.

Everything here reads the numbers of `run.numbers`, as the JSON file has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.frame.figures import BLACK, BLUE, GREEN, GREY, VERMILION, panels
from experiments.frame.outcome import Cell, Entry, Found, Picture, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {
    "paper": "paper's form",
    "unguarded": "default without a guard",
    "default": "default",
    "constant": "one constant bar",
    "ensemble": "deep ensemble",
}
"""What the page calls the forms."""

COLOURS = {
    "paper": BLACK,
    "unguarded": VERMILION,
    "default": BLUE,
    "constant": GREY,
    "ensemble": GREEN,
}
LEVEL = 0.9
"""The share of the targets that intervals are meant to cover."""

SHOWN = ("paper", "unguarded", "default", "constant")
"""Forms in the figure and in the tables by groups."""

GUARDED_OR_NOT = ("unguarded", "default")
"""Forms whose NLL outside is in the tables by groups."""


def entries(numbers: Found) -> list[Entry]:
    """The page."""
    return [
        opening(numbers),
        form_table(numbers["all"], ALL),
        Picture("coverage", coverage_figure(numbers), CAPTION),
        group_table(numbers["sets"], "set", SETS),
        group_table(numbers["kinds"], "left out", KINDS),
        group_table(numbers["nets"], "network", NETS),
        form_table(numbers["with_ensembles"], ENSEMBLES),
        conclusion(numbers),
        *other_networks(numbers),
    ]


def opening(numbers: Found) -> str:
    """What was done."""
    return (
        f"{numbers['settings']['nets']} networks were trained on a part of a data set, the "
        "*domain*, and judged on the rest. The part left out is one of three kinds: the upper or "
        "lower quarter along an input (as nearly as equal values allow), the upper or lower "
        "quarter along the first principal direction of the inputs, or one of five k-means "
        "clusters. The networks have one or two hidden layers with ReLU or SiLU. Training, "
        "calibration and the choice of checkpoints use rows of the domain only. *Inside* means "
        "test rows of the domain, *outside* means the rows left out. Targets are in units of the "
        "training targets' standard deviation. The *guard* widens the bars of rows that look "
        "unlike the training rows. This is not an independent test: the power of the guard's rule "
        "was chosen on these networks, and its rule with others of the same sets."
    )


def form_table(forms: Mapping[str, Any], caption: str) -> Table:
    """All forms, one a row.

    Args:
        forms: the summaries of `run.summary` by form.
        caption: the text above the table.
    """
    columns = [
        "bars",
        "NLL inside, change",
        "90 % intervals cover inside",
        "90 % intervals cover outside",
        "networks with 85 to 99.5 % outside",
        "NLL outside, mean (median)",
        "interval score outside, ratio",
    ]
    rows: list[list[Cell]] = []
    for form, summary in forms.items():
        rows.append(
            [
                LABELS[form],
                f"{summary['nll_inside_change']:+.4f}",
                f"{summary['coverage_inside']:.3f}",
                f"{summary['coverage_outside']:.3f}",
                f"{summary['within']:.2f}",
                f"{summary['nll_outside']:.2f} ({summary['median_nll_outside']:.2f})",
                f"{summary['interval_score']:.3f}",
            ]
        )
    return Table(columns, rows, caption)


def group_table(groups: Mapping[str, Any], head: str, caption: str) -> Table:
    """Coverage outside, and what the guard costs inside, group by group.

    Args:
        groups: by the name of the group, the summaries of each form.
        head: the head of the groups' column.
        caption: the text above the table.
    """
    columns = [head, "NLL inside, default"]
    columns += [f"coverage outside, {LABELS[form]}" for form in SHOWN]
    columns += [f"median NLL outside, {LABELS[form]}" for form in GUARDED_OR_NOT]
    rows: list[list[Cell]] = []
    for name, forms in groups.items():
        change = forms["default"]["nll_inside_change"]
        coverages = [f"{forms[form]['coverage_outside']:.3f}" for form in SHOWN]
        medians = [f"{forms[form]['median_nll_outside']:.2f}" for form in GUARDED_OR_NOT]
        rows.append([name, f"{change:+.4f}", *coverages, *medians])
    return Table(columns, rows, caption)


def coverage_figure(numbers: Found) -> Figure:
    """Coverage outside: by set, and of all networks in order."""
    figure, (left, right) = panels(columns=2, height=3.6, width_ratios=(1.6, 1))
    sets = numbers["sets"]
    for place, form in enumerate(SHOWN):
        positions = [k + 0.16 * (place - 1.5) for k in range(len(sets))]
        of_sets = [forms[form]["coverage_outside"] for forms in sets.values()]
        left.plot(positions, of_sets, "o", color=COLOURS[form], ms=5, label=LABELS[form])
        # The empirical distribution of the networks' coverages.
        of_networks = sorted(network["coverage"][form] for network in numbers["each"])
        shares = [(k + 0.5) / len(of_networks) for k in range(len(of_networks))]
        right.plot(of_networks, shares, color=COLOURS[form])
    left.axhline(LEVEL, color=BLACK, lw=0.8)
    left.set_xticks(range(len(sets)), list(sets), rotation=30, ha="right")
    left.set(ylabel="coverage of 90 % intervals", title="Outside, by set", ylim=(0, 1.02))
    right.axvline(LEVEL, color=BLACK, lw=0.8)
    right.set(
        xlabel="coverage of 90 % intervals",
        ylabel="share of the networks",
        title="Network by network",
    )
    figure.legend(loc="outside upper center", ncols=len(SHOWN))
    return figure


def conclusion(numbers: Found) -> str:
    """What it comes to, in sentences that follow the numbers."""
    default = numbers["all"]["default"]
    unguarded = numbers["all"]["unguarded"]
    paper = numbers["all"]["paper"]
    changes = {}
    coverages = {}
    for name, forms in numbers["sets"].items():
        changes[name] = forms["default"]["nll_inside_change"]
        coverages[name] = forms["default"]["coverage_outside"]
    worst = max(changes, key=changes.__getitem__)
    least = min(coverages, key=coverages.__getitem__)
    networks = numbers["each"]
    raised = [
        network["coverage"]["default"] > network["coverage"]["unguarded"] for network in networks
    ]
    share_raised = sum(raised) / len(networks)
    return (
        f"**Conclusion.** Outside, the default's 90 % intervals cover "
        f"{100 * default['coverage_outside']:.0f} % of the targets on average. Without the guard "
        f"they cover {100 * unguarded['coverage_outside']:.0f} %, and with the paper's form "
        f"{100 * paper['coverage_outside']:.0f} %. Inside, the guard changes the NLL by "
        f"{default['nll_inside_change']:+.4f} nats per row on average and by {changes[worst]:+.4f} "
        f"at worst ({worst}). It raises the coverage outside for {100 * share_raised:.0f} % of the "
        "networks. Above all it prevents disasters: the mean NLL outside falls from "
        f"{unguarded['nll_outside']:.2f} to {default['nll_outside']:.2f}, and the intervals of the "
        f"worst network cover {100 * default['lowest_coverage_outside']:.0f} % instead of "
        f"{100 * unguarded['lowest_coverage_outside']:.0f} %. Coverage is lowest on {least}, with "
        f"{100 * coverages[least]:.0f} %: an average is no promise for a single model. The "
        "rigidity separates rows outside from rows inside with an AUROC (area under the ROC curve) "
        f"of {numbers['auroc']:.2f} on average."
    )


def other_networks(numbers: Found) -> list[Entry]:
    """The networks of other kinds: text, a table by kind, one by task."""
    kinds = numbers["kinds_of_networks"]
    count = sum(kind["nets"] for kind in kinds.values())
    text = (
        f"**Other networks.** Networks of other kinds ({count} in all) have tasks of their own: "
        "recurrent networks on waves, convolutions on signals and images, and networks with a "
        "layer norm on larger inputs or on domains of a set. None of the numbers above include "
        "them. The last layer of such networks may overlook an unfamiliar input. With "
        "`fit(novelty=True)` the guard also listens to what enters the other layers. Where the "
        "guard sets in and how fast it rises with novelty was chosen with networks of these tasks."
    )
    return [text, kind_table(kinds), task_table(numbers["tasks"])]


def kind_table(kinds: Mapping[str, Any]) -> Table:
    """The default with and without novelty, one kind of networks a row."""
    columns = [
        "networks",
        "coverage inside, without (with) novelty",
        "NLL inside, change (worst)",
        "coverage outside, without novelty (worst)",
        "coverage outside, with novelty (worst)",
        "NLL outside, without novelty",
        "NLL outside, with novelty",
    ]
    rows: list[list[Cell]] = []
    for name, kind in kinds.items():
        without = kind["without"]
        with_novelty = kind["with"]
        rows.append(
            [
                f"{kind['nets']} {name}",
                f"{without['coverage_inside']:.3f} ({with_novelty['coverage_inside']:.3f})",
                f"{kind['nll_inside_change']:+.4f} ({kind['nll_inside_worst']:+.4f})",
                f"{without['coverage_outside']:.3f} ({without['lowest_coverage_outside']:.2f})",
                f"{with_novelty['coverage_outside']:.3f} "
                f"({with_novelty['lowest_coverage_outside']:.2f})",
                f"{without['nll_outside']:.2f}",
                f"{with_novelty['nll_outside']:.2f}",
            ]
        )
    return Table(columns, rows, OTHERS)


def task_table(tasks_by_kind: Mapping[str, Any]) -> Table:
    """Coverage outside, task by task."""
    columns = [
        "network",
        "outside",
        "RMS error outside",
        "coverage without novelty",
        "coverage with novelty",
    ]
    rows: list[list[Cell]] = []
    for tasks in tasks_by_kind.values():
        for task in tasks:
            rows.append(
                [
                    task["net"],
                    task["shift"],
                    f"{task['rmse']:.2f}",
                    f"{task['without']:.3f}",
                    f"{task['with']:.3f}",
                ]
            )
    return Table(columns, rows, TASKS)


CAPTION = (
    "Coverage of 90 % intervals outside the domain. Left: means over the networks of a set. Right: "
    "all networks, sorted by their coverage. Where a curve lies to the left of the line, the "
    "intervals cover too little."
)
ALL = (
    "All networks. *Change*: NLL (negative log-likelihood, nats per row) of test rows inside minus "
    "that of the default without a guard, network by network. *Ratio*: the interval score divided "
    "by that of the default without a guard, as a geometric mean; smaller is better. The interval "
    "score is the width plus twenty times the distance by which a target lies outside the interval."
)
SETS = "By set: how the guard changes the NLL inside, and the coverage outside."
KINDS = "By what was left out of training."
NETS = "By architecture."
ENSEMBLES = (
    "The networks with one hidden layer, beside deep ensembles of five networks that each predict "
    "a mean and a variance, trained on the same rows. Ensembles also have other predictions, so "
    "their NLL and interval score reflect better or worse models as well as other bars."
)
OTHERS = (
    "The default with and without novelty, for other kinds of networks. *Change*: NLL inside with "
    "novelty minus that without. *Worst*: for the NLL the network with the largest change, for "
    "the coverage the network and shift with the lowest."
)
TASKS = (
    "The same networks, task by task. The RMS error is in units of the training targets' standard "
    "deviation. The guard widens bars towards those of a forecaster who knows the spread of the "
    "training targets. Where targets lie far outside that spread, the widest bars are too narrow."
)
