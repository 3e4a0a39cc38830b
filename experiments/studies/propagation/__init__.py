"""The error bar of a mean of many predictions against its error over many retrained nets."""

from __future__ import annotations

from experiments.frame.outcome import Outcome, Picture
from experiments.studies.propagation import texts
from experiments.studies.propagation.drawing import drawn as drawn_figure
from experiments.studies.propagation.errors import summary
from experiments.studies.propagation.nets import trained
from experiments.studies.propagation.samples import Sizes, drawn
from experiments.studies.propagation.tables import (
    choice_table,
    difference_table,
    mean_table,
    spread_table,
)

SETS = ("kin8nm", "power", "protein")
GROUPS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
QUICK = Sizes(train=120, valid=80, test=20, nets=6)
QUICK_GROUPS = (1, 5, 20)


def run(*, quick: bool, seed: int) -> Outcome:
    """Train, calibrate and judge all nets of each set."""
    sizes, groups, epochs = (QUICK, QUICK_GROUPS, 20) if quick else (Sizes(), GROUPS, 200)
    found = {}
    for name in SETS[:1] if quick else SETS:
        samples = drawn(name, sizes, seed)
        nets = trained(*samples.train, epochs=epochs, seed=seed + 1)
        found[name] = summary(nets, samples, groups)
    largest = str(groups[-1])
    return Outcome(
        "Means of many predictions",
        {"sets": found, "groups": groups},
        [
            *texts.opening(sizes, epochs),
            Picture("means", drawn_figure(found, groups), texts.CAPTION),
            mean_table(found, largest),
            spread_table(found, largest),
            difference_table(found),
            choice_table(found),
            *texts.closing(found, largest),
        ],
    )
