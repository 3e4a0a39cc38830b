"""What the page says around its tables and its figure."""

from __future__ import annotations

from typing import Any

from experiments.studies.cost.nets import Workload
from experiments.studies.cost.tables import digits

Found = dict[str, Any]

COSTS = (
    "Costs in those of the same net without error bars: median over rounds of ratios within a "
    "round (quartiles). Training of rigidities is 1 + (fit + calibrate) / (epochs x one epoch); "
    "that of ensembles N times one member's epoch, at equal numbers of epochs. The paper's table "
    "does not speak of adversarial rows."
)
SECONDS = "Median seconds of one epoch of each kind of net, of our two steps, and of predictions."
CAPTION = (
    "Cost of training and of predictions with error bars, in those of the same net without them, "
    "on a logarithmic axis. Rings: the paper's table. Dots: measured medians, with quartiles where "
    "they are wider than the dots."
)


def opening(works: dict[str, Workload], settings: Found) -> tuple[str, ...]:
    """What was done."""
    listed = "\n".join(f"- *{name}*: {_described(work)}" for name, work in works.items())
    return (
        f"""\
The paper's table of theoretical costs, measured. Two nets, on made-up rows:

{listed}""",
        f"""\
Every task is timed once a round, in turns, over {settings["rounds"]} rounds after one that does not
count, on {settings["threads"]} threads of the CPU. Training is timed by the epoch: of the plain
net with the squared error; of the same net with dropout before every layer; of a net with a mean
and a variance and the Gaussian likelihood, as members of deep ensembles are, without and with
adversarial rows. All methods are given the same number of epochs, so that their ratios need no
whole training; what search for a dropout rate or a noise level costs is left out. Ours adds one
fit and one calibration to a plain training of the stated number of epochs (seconds of one epoch
times their number). Predictions go through the net in blocks of rows and end with a mean and a
variance a row.""",
    )


def closing(found: Found, works: dict[str, Workload]) -> tuple[str, ...]:
    """What came out, with the numbers of this run."""
    return tuple(_said(name, one, works[name]) for name, one in found.items())


def _said(name: str, one: Found, work: Workload) -> str:
    added = one["added_to_training"]["median"]
    return (
        f"*{name}*: fit and calibration take as long as {digits(added)} epochs of "
        f"{work.protocol.epochs}; predictions with error bars cost "
        f"{digits(one['inference']['ours']['median'])} plain ones, against "
        f"{digits(one['inference']['ensemble_5']['median'])} for an ensemble of five and "
        f"{digits(one['inference']['dropout_100']['median'])} for a hundred passes with dropout. "
        f"An epoch of an ensemble's member costs "
        f"{digits(one['member']['variance']['median'])} plain ones, with adversarial rows "
        f"{digits(one['member']['adversarial']['median'])}."
    )


def _described(work: Workload) -> str:
    sizes = "-".join(map(str, (work.inputs, *work.protocol.hidden, 1)))
    activation = {"relu": "ReLU", "silu": "SiLU"}[work.protocol.activation]
    return (
        f"{sizes}, {activation}; {work.train} training, {work.valid} validation and {work.test} "
        f"test rows; AdamW in batches of {work.protocol.batch}, {work.protocol.epochs} epochs; "
        f"predictions in blocks of {work.block}."
    )
