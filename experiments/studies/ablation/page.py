"""The page: what each part brings in the domain, and what happens outside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.frame.figures import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION, panels
from experiments.frame.outcome import Cell, Entry, Found, Picture, Table
from experiments.frame.wording import direction, measured
from experiments.judging.predictive import LEVEL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {
    "paper": "paper's form",
    "floor": "floor",
    "floor_t": "floor, t",
    "head_t": "head, t",
    "all": "head, t, tilt (default)",
    "unguarded": "default without guard",
}
COLOURS = dict(zip(LABELS, (BLACK, GREY, GREEN, ORANGE, BLUE, VERMILION), strict=True))
PARTS = {
    "floor - paper": "constant floor",
    "floor_t - floor": "Student-t",
    "head_t - floor_t": "noise head",
    "all - head_t": "tilt",
    "all - paper": "all together",
    "all - unguarded": "cost of the guard",
}
CALIFORNIA = {"relu": "California, ReLU", "silu": "California, SiLU"}


def entries(found: Found) -> list[Entry]:
    """The page."""
    far = outside(found)
    return [
        INTRODUCTION,
        which_nets(found),
        difference_table(found, "inside"),
        Picture("parts", pictured(found), CAPTION),
        score_table(found, "inside"),
        *([OUTSIDE, outside_table(far), difference_table(far, "outside")] if far else []),
        *([score_table(far, "outside"), auroc_table(far)] if far else []),
        said(found),
    ]


def title(name: str) -> str:
    """Of a set.

    >>> title("uci, yacht"), title("outside, wine"), title("california, relu")
    ('yacht', 'wine, domain', 'California, ReLU')
    """
    study, own = name.split(", ")
    return CALIFORNIA.get(own, own) + (", domain" if study == "outside" else "")


def likelihood(one: Found) -> str:
    """The NLL that counts: of cells where targets lie on a grid."""
    return "cell" if "cell" in one["forms"]["paper"]["inside"] else "nll"


def outside(found: Found) -> Found:
    """The sets with rows outside the domain."""
    return {name: one for name, one in found.items() if "outside" in one["forms"]["paper"]}


def difference_table(found: Found, side: str) -> Table:
    """Of the NLL, part by part."""
    rows: list[list[Cell]] = []
    for name, one in found.items():
        values = [one["differences"][pair][side][likelihood(one)] for pair in PARTS]
        rows.append([title(name), one["nets"], *map(_marked, values)])
    where = "in the domain" if side == "inside" else "outside the domain"
    caption = (
        f"What each part changes in the NLL of test rows {where}, added to what stands left of it: "
        "mean over the nets and corrected standard error; bold where it is better by more than "
        "two of these errors. Wine and naval by cells."
    )
    return Table(["set", "nets", *PARTS.values()], rows, caption)


def score_table(found: Found, side: str) -> Table:
    """CRPS over the paper's, and coverage, of every form."""
    rows: list[list[Cell]] = []
    for name, one in found.items():
        forms = {form: scores[side] for form, scores in one["forms"].items()}
        for label, metric in (
            ("NLL", likelihood(one)),
            ("CRPS", "crps"),
            ("in 90 %", "coverage_90"),
        ):
            digits = _digits(forms["paper"][metric][0])
            cells = [measured(scores[metric], digits) for scores in forms.values()]
            rows.append([title(name), label, *cells])
    where = "in" if side == "inside" else "outside"
    caption = (
        f"Test rows {where} the domain: NLL, CRPS, and the share that the 90 % intervals hold; "
        "means over the nets and standard errors."
    )
    return Table(["set", "", *LABELS.values()], rows, caption)


def outside_table(found: Found) -> Table:
    """What the intervals hold, in and out."""
    rows: list[list[Cell]] = []
    for name, one in found.items():
        cells = [
            measured(one["forms"][form][side]["coverage_90"])
            for form in ("paper", "all", "unguarded")
            for side in ("inside", "outside")
        ]
        rows.append(
            [title(name), *cells, f"{one['forms']['all']['outside']['lowest_coverage']:.3f}"]
        )
    columns = [
        f"{LABELS[form]}, {side}"
        for form in ("paper", "all", "unguarded")
        for side in ("inside", "outside")
    ]
    caption = (
        "Share of the test targets that the 90 % intervals hold, inside and outside the domain: "
        "mean over the nets and standard error; last, the net of the default that holds least."
    )
    return Table(["set", *columns, "lowest of a net"], rows, caption)


def auroc_table(found: Found) -> Table:
    """Telling far rows."""
    rows: list[list[Cell]] = [
        [
            title(name),
            one["rows"]["inside"],
            one["rows"]["outside"],
            measured(one["auroc"]),
            *(measured(one["forms"][form]["auroc"]) for form in ("paper", "all", "unguarded")),
        ]
        for name, one in found.items()
    ]
    columns = ["set", "rows inside", "rows outside", "rigidity"]
    columns += [f"bar of {LABELS[form]}" for form in ("paper", "all", "unguarded")]
    caption = (
        "AUROC: the probability that a test row outside the domain has the smaller rigidity (at "
        "the default's ridge), or the larger bar, than one inside; mean over the nets and standard "
        "error. To find unfamiliar rows ask the rigidity, not the bar."
    )
    return Table(columns, rows, caption)


def pictured(found: Found) -> Figure:
    """Gains in the domain, coverage outside."""
    far = outside(found)
    figure, axes = panels(rows=2 if far else 1, height=3.4)
    for place, form in enumerate(list(LABELS)[1:]):
        pairs = [_against_paper(one, form) for one in found.values()]
        at = [k + 0.13 * (place - 2) for k in range(len(found))]
        axes[0].plot(at, pairs, "o", color=COLOURS[form], ms=5, label=LABELS[form])
    axes[0].axhline(0, color=BLACK, lw=0.8)
    axes[0].set_yscale("symlog", linthresh=0.1)
    axes[0].set_ylim(*(1.2 * end for end in axes[0].get_ylim()))
    axes[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes[0].set_xticks(range(len(found)), [title(name) for name in found], rotation=30, ha="right")
    axes[0].set(ylabel="NLL - paper's form", title="Inside")
    if far:
        for place, form in enumerate(("paper", "all", "unguarded")):
            shares = [one["forms"][form]["outside"]["coverage_90"][0] for one in far.values()]
            at = [k + 0.15 * (place - 1) for k in range(len(far))]
            label = LABELS[form] if form == "paper" else None  # the others stand above
            axes[1].plot(at, shares, "o", color=COLOURS[form], ms=5, label=label)
        axes[1].axhline(LEVEL, color=BLACK, lw=0.8)
        axes[1].set_xticks(range(len(far)), [title(name) for name in far], rotation=30, ha="right")
        axes[1].set(ylabel="held by 90 % intervals", title="Outside", ylim=(0, 1.02))
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def _against_paper(one: Found, form: str) -> float:
    forms, metric = one["forms"], likelihood(one)
    return forms[form]["inside"][metric][0] - forms["paper"]["inside"][metric][0]


def _marked(value: Sequence[float]) -> str:
    text = measured(value)
    return f"**{text}**" if direction(value) < 0 else text


def _digits(size: float) -> int:
    """Three, or more for small values.

    >>> _digits(0.5), _digits(-3.0), _digits(0.0004)
    (3, 3, 6)
    """
    return max(3, 2 - math.floor(math.log10(abs(size)))) if size else 3


INTRODUCTION = """\
The default error bars are the paper's $\\alpha^2 q$ and more: a noise floor, which a head on the
last features makes different from row to row; a Student-t distribution; a tilt of that
distribution, again by a head; and a guard, which widens the bars beyond the rigidities of the
training rows. Here they are put together part by part, on trained nets that stay as they are, with
the library's own calibration each time (`calibrate(valid, criterion="auto", noise=...,
distribution=...)`, guard included), and the guard is taken out of the whole. The paper's form is `criterion="nll"` without noise. Everything
is calibrated on the validation rows that also stopped the training, and judged on test rows."""

CAPTION = (
    "Above: NLL in the domain less that of the paper's form, mean over the nets (of cells on wine "
    "and naval); the axis is linear up to 0.1. Below: what 90 % intervals hold outside the domain; "
    "the line is at 90 %."
)
OUTSIDE = """\
Outside the domain: nets of the sets marked *domain* have seen no row beyond the 80 % quantile of
the first principal direction of the inputs, those of California no row west of the threshold of its
own page. Validation rows come from the domain alone, so that no calibration knows what happens
outside; what a form does there it does by itself."""


def which_nets(found: Found) -> str:
    """Whose they are."""
    fresh = [title(name) for name, one in found.items() if not one["committed"]]
    if not fresh:
        return "All nets come with the project (`experiments/nets/`); nothing was trained here."
    return f"Trained by this run, for want of nets that come with the project: {', '.join(fresh)}."


def said(found: Found) -> str:
    """What the guard costs, and where the default fails."""
    costs = [
        (one["differences"]["all - unguarded"]["inside"][likelihood(one)][0], title(name))
        for name, one in found.items()
    ]
    cost, most = max(costs)
    sentences = [
        f"**What the guard costs.** In the domain at most {cost:.3f} of NLL ({most}), on average "
        f"{math.fsum(value for value, _ in costs) / len(costs):.3f}."
    ]
    if far := outside(found):
        shares = {
            name: one["forms"]["all"]["outside"]["coverage_90"][0] for name, one in far.items()
        }
        worst = min(shares, key=shares.__getitem__)
        paper, bare = (
            far[worst]["forms"][form]["outside"]["coverage_90"][0]
            for form in ("paper", "unguarded")
        )
        where = title(worst).removesuffix(", domain")
        sentences.append(
            f"**Where it fails.** Outside the domain on {where} the default's 90 % "
            f"intervals hold {100 * shares[worst]:.0f} % (the paper's form {100 * paper:.0f} %, "
            f"without the guard {100 * bare:.0f} %): far from all training rows the last layer "
            "alone cannot know how wrong the features are."
        )
    return "\n\n".join(sentences)
