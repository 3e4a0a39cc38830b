"""The page: tables of what each answer tells, and one figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.frame.figures import BLACK, BLUE, ORANGE, panels
from experiments.frame.outcome import Cell, Entry, Found, Picture, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ANSWERS = {
    "softness": "last layer (1 / rigidity)",
    "input": "first layer watched",
    "novelty": "novelty",
}
TAIL = ("flagged inside", "flagged outside", "90 % hold inside", "90 % hold outside")


def entries(found: Found) -> list[Entry]:
    """The page."""
    return [
        opening(found),
        kind_table(found),
        Picture("auroc", pictured(found), CAPTION),
        set_table(found),
        unseen_table(found),
        said(found),
    ]


def opening(found: Found) -> str:
    """What was done."""
    return (
        "Nets are fitted by `fit(..., novelty=True)`, calibrated by default on rows like those of "
        "the training, and asked rows like these (inside) and others (outside), without labels. "
        "*AUROC*: the probability that an answer is larger for a row outside than for one inside; "
        "0.5 is blind. *Flagged*: above what one calibration row in a hundred is above "
        "(`report.novelty_usual`). *Hold*: what the default's 90 % intervals hold of the true "
        f"values. The sets: {found['settings']['nets']} nets on domains as in the study of what "
        "bars hold outside, half of them with a last layer of two units. The other kinds: "
        f"{found['settings']['seeds']} nets each."
    )


def _cells(one: Mapping[str, Any]) -> list[Cell]:
    aurocs = [f"{one['auroc'][name]:.3f}" for name in ANSWERS]
    shares = [one["flagged"]["inside"], one["flagged"]["outside"]]
    shares += [one["held"]["inside"], one["held"]["outside"]]
    return [*aurocs, *(f"{share:.3f}" for share in shares)]


def kind_table(found: Found) -> Table:
    """One of each kind of nets."""
    rows: list[list[Cell]] = []
    for name, kind in found["kinds"].items():
        rows += [
            [name, unlike, *_cells(one), f"`{one['layer']}`"]
            for unlike, one in kind["unlike"].items()
        ]
    columns = ["net", "outside", *(f"AUROC, {label}" for label in ANSWERS.values()), *TAIL]
    return Table([*columns, "most telling layer"], rows, KINDS)


def set_table(found: Found) -> Table:
    """By set, and all."""
    rows: list[list[Cell]] = []
    for name, by_net in {**found["sets"], "all": found["all"]}.items():
        rows += [[name, net, *_cells(one)] for net, one in by_net.items()]
    columns = ["set", "net", *(f"AUROC, {label}" for label in ANSWERS.values()), *TAIL]
    return Table(columns, rows, SETS)


def unseen_table(found: Found) -> Table:
    """Failures that have no sign in the inputs."""
    rows: list[list[Cell]] = [[name, *_cells(one)] for name, one in found["unseen"].items()]
    columns = ["outside", *(f"AUROC, {label}" for label in ANSWERS.values()), *TAIL]
    return Table(columns, rows, UNSEEN)


def pictured(found: Found) -> Figure:
    """AUROC of the last layer and of novelty, case by case."""
    cases = {}
    for name, kind in found["kinds"].items():
        for unlike, one in kind["unlike"].items():
            cases[f"{name}: {unlike}"] = one["auroc"]
    for net, one in found["all"].items():
        cases[f"sets, {net}"] = one["auroc"]
    for name, one in found["unseen"].items():
        cases[f"nothing sees: {name}"] = one["auroc"]
    figure, axes = panels(columns=1, height=0.36 * len(cases) + 1.1)
    places = list(range(len(cases), 0, -1))
    for place, one in zip(places, cases.values(), strict=True):
        axes[0].plot([one["softness"], one["novelty"]], [place, place], color=BLACK, lw=0.6)
    for answer, colour in (("softness", ORANGE), ("novelty", BLUE)):
        values = [one[answer] for one in cases.values()]
        axes[0].plot(values, places, "o", color=colour, label=ANSWERS[answer])
    axes[0].axvline(0.5, color=BLACK, lw=0.8, ls=":")
    axes[0].set_yticks(places, list(cases))
    axes[0].set(xlabel="AUROC", xlim=(0.4, 1.02))
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def said(found: Found) -> str:
    """What it comes to."""
    plain, narrow = found["all"].values() if len(found["all"]) == 2 else (None, None)
    text = "**What it comes to.** "
    if plain is not None and narrow is not None:
        text += (
            "On the sets the last layer's rigidity tells rows outside with an AUROC of "
            f"{plain['auroc']['softness']:.2f} and novelty with {plain['auroc']['novelty']:.2f}; "
            "where the last layer has two units these are "
            f"{narrow['auroc']['softness']:.2f} and {narrow['auroc']['novelty']:.2f}. "
        )
    blind = []
    for name, kind in found["kinds"].items():
        for unlike, one in kind["unlike"].items():
            if one["auroc"]["novelty"] < one["auroc"]["softness"] - 0.01:
                blind.append(f"{name} ({unlike})")
    if blind:
        text += f"The rigidity sees more than novelty of: {', '.join(blind)}. "
    return (
        text + "Neither says anything where inputs are as ever and the truth is another: only "
        "labels do."
    )


CAPTION = "How well rows outside are told from rows inside, by the last layer and by all layers."
KINDS = (
    "One of each kind. The rows outside: inputs three times as large behind a layer norm and a "
    "two-unit bottleneck, and inputs that do not matter; images of other digits, of dark on light "
    "and of noise for a net that tells by how much a digit was turned; sequences with tokens that "
    "never came in training, or of one token alone; clusters of atoms that are squeezed, or hold "
    "an atom of an unseen kind."
)
SETS = (
    "The sets, mean over the domains: without a quarter along an input or a direction, or without "
    "a cluster."
)
UNSEEN = (
    "What no answer without labels can see: inputs as in training, and a truth that has moved by "
    "one spread, or that follows an input which never mattered."
)
