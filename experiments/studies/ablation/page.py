"""The page: what each part brings in the domain, and what happens outside it.

Everything here reads the entries of `run.entry` by the name of the set, "<study>, <name>", as the
JSON file has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.frame.figures import BLACK, BLUE, ORANGE, VERMILION, panels
from experiments.frame.outcome import Cell, Entry, Found, Picture, Table
from experiments.frame.wording import direction, measured
from experiments.judging.predictive import LEVEL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {
    "paper": "paper's form",
    "mixture": "one mixture",
    "all": "default",
    "unguarded": "default without guard",
}
"""What the page calls the forms."""

COLOURS = {
    "paper": BLACK,
    "mixture": ORANGE,
    "all": BLUE,
    "unguarded": VERMILION,
}
PARTS = {
    "mixture - paper": "one mixture for all rows",
    "all - mixture": "a mixture that follows the inputs",
    "all - paper": "both together",
    "all - unguarded": "cost of the guard",
}
"""What the page calls the differences between forms."""

FAR_FORMS = ("paper", "all", "unguarded")
"""Forms that are shown outside the domain."""

CALIFORNIA = {"relu": "California, ReLU", "silu": "California, SiLU"}


def entries(sets: Found) -> list[Entry]:
    """The page."""
    return [
        INTRODUCTION,
        network_source(sets),
        difference_table(sets, "inside"),
        Picture("parts", gains_and_coverage(sets), CAPTION),
        score_table(sets, "inside"),
        *outside_entries(with_outside_rows(sets)),
        conclusion(sets),
    ]


def outside_entries(far_sets: Found) -> list[Entry]:
    """What the page says of rows outside the domain, where there are some."""
    if not far_sets:
        return []
    return [
        OUTSIDE,
        coverage_table(far_sets),
        difference_table(far_sets, "outside"),
        score_table(far_sets, "outside"),
        auroc_table(far_sets),
    ]


def title(name: str) -> str:
    """What the page calls a set.

    >>> title("uci, yacht"), title("outside, wine"), title("california, relu")
    ('yacht', 'wine, domain', 'California, ReLU')
    """
    study, set_name = name.split(", ")
    label = CALIFORNIA.get(set_name, set_name)
    if study == "outside":
        return f"{label}, domain"
    return label


def likelihood(entry: Found) -> str:
    """The NLL that counts for a set: that of cells where targets lie on a grid."""
    if "cell" in entry["forms"]["paper"]["inside"]:
        return "cell"
    return "nll"


def with_outside_rows(sets: Found) -> Found:
    """The sets with rows outside the domain."""
    return {name: entry for name, entry in sets.items() if "outside" in entry["forms"]["paper"]}


# --- tables --------------------------------------------------------------------------------------


def difference_table(sets: Found, side: str) -> Table:
    """What each part changes in the NLL, "inside" or "outside" the domain."""
    rows: list[list[Cell]] = []
    for name, entry in sets.items():
        differences = [entry["differences"][pair][side][likelihood(entry)] for pair in PARTS]
        cells = [_bold_where_lower(difference) for difference in differences]
        rows.append([title(name), entry["nets"], *cells])
    where = "in the domain" if side == "inside" else "outside the domain"
    caption = (
        f"How much each part changes the NLL of test rows {where} when it joins the parts to its "
        "left: mean over the networks and corrected standard error. Bold changes are improvements "
        "by more than two of these errors. For wine and naval, the NLL is that of cells."
    )
    return Table(["set", "networks", *PARTS.values()], rows, caption)


def score_table(sets: Found, side: str) -> Table:
    """NLL, CRPS and coverage of every form, "inside" or "outside" the domain."""
    rows: list[list[Cell]] = []
    for name, entry in sets.items():
        forms = {form: scores[side] for form, scores in entry["forms"].items()}
        metrics = {"NLL": likelihood(entry), "CRPS": "crps", "coverage": "coverage_90"}
        for label, metric in metrics.items():
            digits = _digits(forms["paper"][metric][0])
            cells = [measured(scores[metric], digits) for scores in forms.values()]
            rows.append([title(name), label, *cells])
    where = "in" if side == "inside" else "outside"
    caption = (
        f"Test rows {where} the domain: NLL, CRPS, and the coverage of 90 % intervals. Means over "
        "the networks and standard errors."
    )
    return Table(["set", "", *LABELS.values()], rows, caption)


def coverage_table(far_sets: Found) -> Table:
    """The share of the targets that the intervals cover, inside and outside."""
    columns = ["set"]
    for form in FAR_FORMS:
        columns += [f"{LABELS[form]}, inside", f"{LABELS[form]}, outside"]
    columns.append("default outside, lowest network")
    rows: list[list[Cell]] = []
    for name, entry in far_sets.items():
        forms = entry["forms"]
        row: list[Cell] = [title(name)]
        for form in FAR_FORMS:
            row.append(measured(forms[form]["inside"]["coverage_90"]))
            row.append(measured(forms[form]["outside"]["coverage_90"]))
        row.append(f"{forms['all']['outside']['lowest_coverage']:.3f}")
        rows.append(row)
    caption = (
        "Share of the test targets that the 90 % intervals cover, inside and outside the domain: "
        "mean over the networks and standard error. The last column is the lowest coverage of a "
        "single network with the default, outside."
    )
    return Table(columns, rows, caption)


def auroc_table(far_sets: Found) -> Table:
    """How well rigidity and bars tell far rows."""
    rows: list[list[Cell]] = []
    for name, entry in far_sets.items():
        of_bars = [measured(entry["forms"][form]["auroc"]) for form in FAR_FORMS]
        counts = entry["rows"]
        rigidity = measured(entry["auroc"])
        rows.append([title(name), counts["inside"], counts["outside"], rigidity, *of_bars])
    columns = ["set", "rows inside", "rows outside", "rigidity"]
    columns += [f"bar of {LABELS[form]}" for form in FAR_FORMS]
    caption = (
        "AUROC (area under the ROC curve): the probability that a test row outside the domain has "
        "a smaller rigidity (at the default's ridge), or a larger bar, than a row inside. Mean "
        "over the networks and standard error. To find unfamiliar rows, use the rigidity, not the "
        "bar."
    )
    return Table(columns, rows, caption)


def _bold_where_lower(difference: Sequence[float]) -> str:
    """The cell of a difference, bold where it is clearly below zero."""
    text = measured(difference)
    if direction(difference) < 0:
        return f"**{text}**"
    return text


def _digits(size: float) -> int:
    """Three decimals, or more for small values.

    >>> _digits(0.5), _digits(-3.0), _digits(0.0004)
    (3, 3, 6)
    """
    if size == 0:
        return 3
    return max(3, 2 - math.floor(math.log10(abs(size))))


# --- figure --------------------------------------------------------------------------------------


def gains_and_coverage(sets: Found) -> Figure:
    """The NLL of all forms inside, and below it the coverage outside, where there are such rows."""
    far_sets = with_outside_rows(sets)
    figure, axes = panels(rows=2 if far_sets else 1, height=3.4)
    _draw_gains(axes[0], sets)
    if far_sets:
        _draw_coverage(axes[1], far_sets)
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def _draw_gains(ax: Axes, sets: Found) -> None:
    """Each form's NLL in the domain less that of the paper's form."""
    for place, form in enumerate(list(LABELS)[1:]):
        gains = [_nll_change(entry, form) for entry in sets.values()]
        positions = [k + 0.13 * (place - 1) for k in range(len(sets))]
        ax.plot(positions, gains, "o", color=COLOURS[form], ms=5, label=LABELS[form])
    ax.axhline(0, color=BLACK, lw=0.8)
    ax.set_yscale("symlog", linthresh=0.1)
    low, high = ax.get_ylim()
    ax.set_ylim(1.2 * low, 1.2 * high)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_xticks(range(len(sets)), [title(name) for name in sets], rotation=30, ha="right")
    ax.set(ylabel="NLL - paper's form", title="Inside")


def _draw_coverage(ax: Axes, far_sets: Found) -> None:
    """What the intervals of some forms cover outside the domain."""
    for place, form in enumerate(FAR_FORMS):
        shares = [entry["forms"][form]["outside"]["coverage_90"][0] for entry in far_sets.values()]
        positions = [k + 0.15 * (place - 1) for k in range(len(far_sets))]
        label = LABELS[form] if form == "paper" else None  # the panel above names the others
        ax.plot(positions, shares, "o", color=COLOURS[form], ms=5, label=label)
    ax.axhline(LEVEL, color=BLACK, lw=0.8)
    names = [title(name) for name in far_sets]
    ax.set_xticks(range(len(far_sets)), names, rotation=30, ha="right")
    ax.set(ylabel="coverage of 90 % intervals", title="Outside", ylim=(0, 1.02))


def _nll_change(entry: Found, form: str) -> float:
    """The mean NLL of a form in the domain less that of the paper's form."""
    metric = likelihood(entry)
    forms = entry["forms"]
    return forms[form]["inside"][metric][0] - forms["paper"]["inside"][metric][0]


# --- texts ---------------------------------------------------------------------------------------


def network_source(sets: Found) -> str:
    """Whether the networks come with the project or were trained by this run."""
    trained_sets = [title(name) for name, entry in sets.items() if not entry["committed"]]
    if not trained_sets:
        return "All networks come with the project (`experiments/nets/`). This run trained none."
    return (
        "Trained by this run, because the project comes without networks for them: "
        f"{', '.join(trained_sets)}."
    )


def conclusion(sets: Found) -> str:
    """What the guard costs, and where the default fails."""
    paragraphs = [_guard_cost(sets)]
    far_sets = with_outside_rows(sets)
    if far_sets:
        paragraphs.append(_worst_outside(far_sets))
    return "\n\n".join(paragraphs)


def _guard_cost(sets: Found) -> str:
    """The largest and the average loss of NLL in the domain."""
    costs = [
        (entry["differences"]["all - unguarded"]["inside"][likelihood(entry)][0], title(name))
        for name, entry in sets.items()
    ]
    largest, set_title = max(costs)
    average = math.fsum(cost for cost, _ in costs) / len(costs)
    return (
        f"**What the guard costs.** In the domain, the guard raises the NLL by at most "
        f"{largest:.3f} nats per row ({set_title}). The average change is {average:.3f}."
    )


def _worst_outside(far_sets: Found) -> str:
    """The set on which the default's intervals cover least outside the domain."""
    coverages = {
        name: {form: entry["forms"][form]["outside"]["coverage_90"][0] for form in FAR_FORMS}
        for name, entry in far_sets.items()
    }
    worst = min(coverages, key=lambda name: coverages[name]["all"])
    coverage = coverages[worst]
    where = title(worst).removesuffix(", domain")
    return (
        f"**Where it fails.** Outside the domain on {where}, the default's 90 % intervals cover "
        f"{100 * coverage['all']:.0f} % of the targets (the paper's form "
        f"{100 * coverage['paper']:.0f} %, the default without the guard "
        f"{100 * coverage['unguarded']:.0f} %). Far from all training rows, the last layer alone "
        "cannot know how wrong the features are."
    )


INTRODUCTION = """\
The library's default error bars start from the paper's form $\\alpha^2 q$, where q is the inverse
of the rigidity, and add three parts:

- noise, and a mixture of Student-t distributions, the same for all rows;
- a small network, by which noise and mixture follow the inputs of each row;
- a guard, which widens the bars of rows that are less rigid than the training rows.

This study adds the parts one by one and finally removes the guard from the whole. The trained
networks stay as they are. Each step uses the library's own calibration: one mixture for all rows is
`calibrate(valid, method=rg.Full(noise="constant"))`, guard included. The paper's form is
`method="paper"`, without noise. All forms are calibrated on the validation rows that also stopped
the training, and judged on test rows. NLL is the negative log-likelihood in nats per row; CRPS is
the continuous ranked probability score. Lower is better for both."""

CAPTION = (
    "Above: NLL in the domain minus that of the paper's form, mean over the networks (NLL of cells "
    "on wine and naval). The axis is linear up to 0.1. Below: coverage of 90 % intervals outside "
    "the domain. The line is at 90 %."
)
OUTSIDE = """\
**Outside the domain.** For the sets marked *domain*, the networks have seen no row beyond the 80 %
quantile along the first principal direction of the inputs. For California, they have seen no row
west of the threshold, which the page on California explains. Validation rows come from the domain
only, so no calibration knows what happens outside."""
