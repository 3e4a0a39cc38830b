"""The page: tables over all nets, by set, domain and architecture; one figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.frame.figures import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION, panels
from experiments.frame.outcome import Cell, Entry, Found, Picture, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {
    "paper": "paper's form",
    "unguarded": "default without a guard",
    "q": 'default, guard="q"',
    "default": "default",
    "constant": "one constant bar",
    "ensemble": "deep ensemble",
}
COLOURS = dict(zip(LABELS, (BLACK, VERMILION, ORANGE, BLUE, GREY, GREEN), strict=True))
COLUMNS = (
    "bars",
    "NLL inside, change",
    "90 % hold inside",
    "90 % hold outside",
    "nets with 85 to 99.5 % outside",
    "NLL outside, mean (median)",
    "interval score outside, ratio",
)
LEVEL = 0.9
SHOWN = ("paper", "q", "default", "constant")
"""Forms of the tables by groups."""


def entries(found: Found) -> list[Entry]:
    """The page."""
    return [
        opening(found),
        form_table(found["all"], ALL),
        Picture("coverage", pictured(found), CAPTION),
        group_table(found["sets"], "set", SETS),
        group_table(found["kinds"], "left out", KINDS),
        group_table(found["nets"], "net", NETS),
        form_table(found["with_ensembles"], ENSEMBLES),
        said(found),
    ]


def opening(found: Found) -> str:
    """What was done."""
    return (
        f"{found['settings']['nets']} nets were trained on a part of a set and judged on the rest: "
        "without the upper or lower quarter along an input (as nearly as equal values allow), the "
        "same along the first principal direction of the inputs, or without one of five k-means "
        "clusters. Nets have one or two "
        "hidden layers of ReLU or SiLU; fits, calibrations and choices of checkpoints see rows of "
        "the domain alone. *Inside* are test rows of the domain, *outside* the rows left out. "
        "Targets are in units of the training targets' spread. The guard's rule and its two "
        "constants were chosen with other nets and splits of the same sets; the principal "
        "directions are the same, and clusters alike. So this is no independent test."
    )


def form_table(forms: Mapping[str, Mapping[str, float]], caption: str) -> Table:
    """Every form over the nets."""
    rows: list[list[Cell]] = [
        [
            LABELS[form],
            f"{one['nll_inside_change']:+.4f}",
            f"{one['coverage_inside']:.3f}",
            f"{one['coverage_outside']:.3f}",
            f"{one['within']:.2f}",
            f"{one['nll_outside']:.2f} ({one['median_nll_outside']:.2f})",
            f"{one['interval_score']:.3f}",
        ]
        for form, one in forms.items()
    ]
    return Table(COLUMNS, rows, caption)


def group_table(groups: Mapping[str, Any], what: str, caption: str) -> Table:
    """Coverage outside, and what the default's guard costs inside, group by group."""
    rows: list[list[Cell]] = []
    for name, forms in groups.items():
        change = forms["default"]["nll_inside_change"]
        shares = [f"{forms[form]['coverage_outside']:.3f}" for form in SHOWN]
        medians = [f"{forms[form]['median_nll_outside']:.2f}" for form in ("q", "default")]
        rows.append([name, f"{change:+.4f}", *shares, *medians])
    columns = [what, "NLL inside, default", *(f"hold outside, {LABELS[form]}" for form in SHOWN)]
    columns += [f"median NLL outside, {LABELS[form]}" for form in ("q", "default")]
    return Table(columns, rows, caption)


def pictured(found: Found) -> Figure:
    """Coverage outside by set, and of all nets in order."""
    figure, axes = panels(columns=2, height=3.6, width_ratios=(1.6, 1))
    sets = found["sets"]
    for place, form in enumerate(SHOWN):
        at = [k + 0.16 * (place - 1.5) for k in range(len(sets))]
        shares = [forms[form]["coverage_outside"] for forms in sets.values()]
        axes[0].plot(at, shares, "o", color=COLOURS[form], ms=5, label=LABELS[form])
        ordered = sorted(one["coverage"][form] for one in found["each"])
        share = [(k + 0.5) / len(ordered) for k in range(len(ordered))]
        axes[1].plot(ordered, share, color=COLOURS[form])
    axes[0].axhline(LEVEL, color=BLACK, lw=0.8)
    axes[0].set_xticks(range(len(sets)), list(sets), rotation=30, ha="right")
    axes[0].set(ylabel="held by 90 % intervals", title="Outside, by set", ylim=(0, 1.02))
    axes[1].axvline(LEVEL, color=BLACK, lw=0.8)
    axes[1].set(xlabel="held by 90 % intervals", ylabel="share of the nets", title="Net by net")
    figure.legend(loc="outside upper center", ncols=len(SHOWN))
    return figure


def said(found: Found) -> str:
    """What it comes to, in sentences that follow the numbers."""
    default, other = found["all"]["default"], found["all"]["q"]
    changes = {name: forms["default"]["nll_inside_change"] for name, forms in found["sets"].items()}
    worst = max(changes, key=changes.__getitem__)
    shares = {name: forms["default"]["coverage_outside"] for name, forms in found["sets"].items()}
    least = min(shares, key=shares.__getitem__)
    better = sum(one["coverage"]["default"] > one["coverage"]["q"] for one in found["each"]) / len(
        found["each"]
    )
    return (
        f"**What it comes to.** Outside, the default's 90 % intervals hold "
        f"{100 * default['coverage_outside']:.0f} % on average, those of a guard by q alone "
        f"{100 * other['coverage_outside']:.0f} %, the paper's form "
        f"{100 * found['all']['paper']['coverage_outside']:.0f} %. Inside, the NLL changes by "
        f"{default['nll_inside_change']:+.4f} on average and by {changes[worst]:+.4f} at worst "
        f"({worst}). The default does not hold more everywhere: it does so for "
        f"{100 * better:.0f} % of the nets, those whose bars by q were far too short, and holds "
        "less where these were enough or too long. What it removes are disasters: the mean NLL "
        f"outside falls from {other['nll_outside']:.2f} to {default['nll_outside']:.2f}, and the "
        f"worst net holds {100 * default['lowest_coverage_outside']:.0f} % instead of "
        f"{100 * other['lowest_coverage_outside']:.0f} %. It holds least on {least}, "
        f"{100 * shares[least]:.0f} %: an average is no promise for one model. The rigidity tells "
        f"rows outside from rows inside with an AUROC of {found['auroc']:.2f} on average."
    )


CAPTION = (
    "What 90 % intervals hold of the targets outside the domain. Left: means over the nets of a "
    "set. Right: all nets in the order of what they hold; a curve that lies left of the line holds "
    "too little."
)
ALL = (
    "All nets. *Change*: NLL of test rows inside less that of the guard by q alone, net by net. "
    "*Ratio*: the interval score (width plus twenty times what a target lies outside), over that "
    "of the guard by q alone, geometric mean; smaller is better."
)
SETS = "By set: the change of the NLL inside by the default's guard, and coverage outside."
KINDS = "By what was left out of the training."
NETS = "By architecture."
ENSEMBLES = (
    "The nets of one layer, beside deep ensembles of five nets with a variance each, trained on "
    "the same rows. Ensembles have other predictions too, so that their NLL and interval score are "
    "those of better or worse models as well as of other bars."
)
