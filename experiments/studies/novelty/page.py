"""The page: tables of what each answer tells, and one figure.

Everything here reads the numbers of `run.numbers`, as the JSON file has them.
"""

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
"""What the page calls the answers."""

SCORE_COLUMNS = (
    *(f"AUROC, {label}" for label in ANSWERS.values()),
    "flagged inside",
    "flagged outside",
    "90 % hold inside",
    "90 % hold outside",
)
"""Heads of the cells of `_score_cells`."""

MARGIN = 0.01
"""By so much of AUROC the rigidity must be better than novelty to be named."""


def entries(numbers: Found) -> list[Entry]:
    """The page."""
    return [
        opening(numbers),
        kind_table(numbers),
        Picture("auroc", auroc_figure(numbers), CAPTION),
        set_table(numbers),
        unseen_table(numbers),
        conclusion(numbers),
    ]


def opening(numbers: Found) -> str:
    """What was done."""
    return (
        "Nets are fitted by `fit(..., novelty=True)`, calibrated by default on rows like those of "
        "the training, and asked rows like these (inside) and others (outside), without labels. "
        "*AUROC*: the probability that an answer is larger for a row outside than for one inside; "
        "0.5 is blind. *Flagged*: above what one calibration row in a hundred is above "
        "(`report.novelty_usual`). *Hold*: what the default's 90 % intervals hold of the true "
        f"values. The sets: {numbers['settings']['nets']} nets on domains as in the study of what "
        "bars hold outside, half of them with a last layer of two units. The other kinds: "
        f"{numbers['settings']['seeds']} nets each."
    )


# --- tables --------------------------------------------------------------------------------------


def kind_table(numbers: Found) -> Table:
    """Networks of each kind, by what is unlike in the rows outside."""
    rows: list[list[Cell]] = []
    for name, kind in numbers["kinds"].items():
        for unlike, means in kind["unlike"].items():
            rows.append([name, unlike, *_score_cells(means), f"`{means['layer']}`"])
    columns = ["net", "outside", *SCORE_COLUMNS, "most telling layer"]
    return Table(columns, rows, KINDS)


def set_table(numbers: Found) -> Table:
    """Each set, and all of them, by architecture."""
    groups = {**numbers["sets"], "all": numbers["all"]}
    rows: list[list[Cell]] = []
    for name, by_architecture in groups.items():
        for architecture, means in by_architecture.items():
            rows.append([name, architecture, *_score_cells(means)])
    return Table(["set", "net", *SCORE_COLUMNS], rows, SETS)


def unseen_table(numbers: Found) -> Table:
    """Failures that have no sign in the inputs."""
    rows: list[list[Cell]] = [
        [name, *_score_cells(means)] for name, means in numbers["unseen"].items()
    ]
    return Table(["outside", *SCORE_COLUMNS], rows, UNSEEN)


def _score_cells(means: Mapping[str, Any]) -> list[Cell]:
    """The cells of `SCORE_COLUMNS`, from the means of `run.mean_of`."""
    values = [means["auroc"][answer] for answer in ANSWERS]
    values += [means["flagged"]["inside"], means["flagged"]["outside"]]
    values += [means["held"]["inside"], means["held"]["outside"]]
    return [f"{value:.3f}" for value in values]


# --- figure --------------------------------------------------------------------------------------


def auroc_figure(numbers: Found) -> Figure:
    """The AUROC of the last layer and of novelty, one line a case."""
    aurocs = _aurocs(numbers)
    figure, (ax,) = panels(columns=1, height=0.36 * len(aurocs) + 1.1)
    places = list(range(len(aurocs), 0, -1))
    for place, auroc in zip(places, aurocs.values(), strict=True):
        ax.plot([auroc["softness"], auroc["novelty"]], [place, place], color=BLACK, lw=0.6)
    for answer, colour in (("softness", ORANGE), ("novelty", BLUE)):
        values = [auroc[answer] for auroc in aurocs.values()]
        ax.plot(values, places, "o", color=colour, label=ANSWERS[answer])
    ax.axvline(0.5, color=BLACK, lw=0.8, ls=":")
    ax.set_yticks(places, list(aurocs))
    ax.set(xlabel="AUROC", xlim=(0.4, 1.02))
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def _aurocs(numbers: Found) -> dict[str, Mapping[str, float]]:
    """The AUROCs of the answers by case: kinds of networks, all sets, unseen failures."""
    aurocs = {}
    for name, kind in numbers["kinds"].items():
        for unlike, means in kind["unlike"].items():
            aurocs[f"{name}: {unlike}"] = means["auroc"]
    for architecture, means in numbers["all"].items():
        aurocs[f"sets, {architecture}"] = means["auroc"]
    for name, means in numbers["unseen"].items():
        aurocs[f"nothing sees: {name}"] = means["auroc"]
    return aurocs


# --- texts ---------------------------------------------------------------------------------------


def conclusion(numbers: Found) -> str:
    """What it comes to."""
    wide, narrow = (means["auroc"] for means in numbers["all"].values())
    sentences = [
        "**What it comes to.** On the sets the last layer's rigidity tells rows outside with an "
        f"AUROC of {wide['softness']:.2f} and novelty with {wide['novelty']:.2f}; where the last "
        f"layer has two units these are {narrow['softness']:.2f} and {narrow['novelty']:.2f}."
    ]
    rigidity_is_better = []
    for name, kind in numbers["kinds"].items():
        for unlike, means in kind["unlike"].items():
            if means["auroc"]["novelty"] < means["auroc"]["softness"] - MARGIN:
                rigidity_is_better.append(f"{name} ({unlike})")
    if rigidity_is_better:
        cases = ", ".join(rigidity_is_better)
        sentences.append(f"The rigidity sees more than novelty of: {cases}.")
    sentences.append(
        "Neither says anything where inputs are as ever and the truth is another: only labels do."
    )
    return " ".join(sentences)


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
