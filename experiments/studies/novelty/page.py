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
    "90 % intervals cover inside",
    "90 % intervals cover outside",
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
        "Which rows are unlike the training data? Rigidities of networks are fitted with "
        "`fit(..., novelty=True)` and calibrated with the default on rows like those of training. "
        "Then they judge rows of the same kind (*inside*) and other rows (*outside*), without "
        "labels. *AUROC* (area under the ROC curve): the probability that a score is larger for a "
        "row outside than for a row inside; 0.5 means that the score sees no difference. *First "
        "layer watched* uses the earliest layer alone; *novelty* combines all layers. *Flagged*: "
        "the share of rows whose novelty exceeds that of all but one in a hundred calibration rows "
        "(`report.novelty_usual`). *90 % intervals cover*: the share of the true values that the "
        f"default's intervals cover. {numbers['settings']['nets']} networks on domains of data "
        "sets were judged, as in the study `outside`; half of them have a last layer of two units. "
        f"For each other kind of network, {numbers['settings']['seeds']} networks were judged."
    )


# --- tables --------------------------------------------------------------------------------------


def kind_table(numbers: Found) -> Table:
    """Networks of each kind, by what is unlike in the rows outside."""
    rows: list[list[Cell]] = []
    for name, kind in numbers["kinds"].items():
        for unlike, means in kind["unlike"].items():
            rows.append([name, unlike, *_score_cells(means), f"`{means['layer']}`"])
    columns = ["network", "outside", *SCORE_COLUMNS, "most telling layer"]
    return Table(columns, rows, KINDS)


def set_table(numbers: Found) -> Table:
    """Each set, and all of them, by architecture."""
    groups = {**numbers["sets"], "all": numbers["all"]}
    rows: list[list[Cell]] = []
    for name, by_architecture in groups.items():
        for architecture, means in by_architecture.items():
            rows.append([name, architecture, *_score_cells(means)])
    return Table(["set", "network", *SCORE_COLUMNS], rows, SETS)


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
        aurocs[f"invisible: {name}"] = means["auroc"]
    return aurocs


# --- texts ---------------------------------------------------------------------------------------


def conclusion(numbers: Found) -> str:
    """What it comes to."""
    wide, narrow = (means["auroc"] for means in numbers["all"].values())
    sentences = [
        "**Conclusion.** On the data sets, the last layer's rigidity finds rows outside with an "
        f"AUROC of {wide['softness']:.2f}, and novelty with {wide['novelty']:.2f}. Where the last "
        f"layer has two units, the AUROCs are {narrow['softness']:.2f} and "
        f"{narrow['novelty']:.2f}."
    ]
    rigidity_is_better = []
    for name, kind in numbers["kinds"].items():
        for unlike, means in kind["unlike"].items():
            if means["auroc"]["novelty"] < means["auroc"]["softness"] - MARGIN:
                rigidity_is_better.append(f"{name} ({unlike})")
    if rigidity_is_better:
        cases = ", ".join(rigidity_is_better)
        sentences.append(f"The rigidity sees more than novelty in: {cases}.")
    sentences.append(
        "Neither score notices when the inputs stay the same and the truth changes. Only labels "
        "reveal that."
    )
    return " ".join(sentences)


CAPTION = "How well the last layer and all layers separate rows outside from rows inside."
KINDS = (
    "Other kinds of networks. The rows outside are: inputs three times as large for a layer norm "
    "and a two-unit bottleneck, and unusual values of inputs that do not matter; images of other "
    "digits, of dark digits on light ground and of noise, for a network that predicts the angle by "
    "which a digit was turned; sequences with tokens that never occurred in training, or of a "
    "single repeated token; clusters of atoms that are squeezed, or that contain an atom of an "
    "unseen kind."
)
SETS = (
    "The data sets, mean over the domains. A domain leaves out a quarter along an input or along a "
    "principal direction, or a cluster."
)
UNSEEN = (
    "What no score can see without labels: the inputs are as in training, but the truth has "
    "shifted by one standard deviation, or it depends on an input that never mattered."
)
