"""The error bar of a mean of many predictions against its error over many retrained nets."""

from __future__ import annotations

from experiments.frame.outcome import Outcome
from experiments.studies.propagation import page
from experiments.studies.propagation.work import Sizes, drawn, summary, trained

FULL = {
    "sets": ("kin8nm", "power", "protein"),
    "groups": (1, 2, 5, 10, 20, 50, 100, 200, 500),
    "epochs": 200,
    "rows": Sizes(),
}
QUICK = {
    "sets": ("kin8nm",),
    "groups": (1, 5, 20),
    "epochs": 20,
    "rows": Sizes(train=120, valid=80, test=20, nets=6),
}


def run(*, quick: bool, seed: int) -> Outcome:
    """Train, calibrate and judge all nets of each set."""
    sizes = QUICK if quick else FULL
    rows, groups, epochs = (sizes[name] for name in ("rows", "groups", "epochs"))
    found = {}
    for name in sizes["sets"]:
        samples = drawn(name, rows, seed)
        nets = trained(*samples.train, epochs=epochs, seed=seed + 1)
        found[name] = summary(nets, samples, groups)
    numbers = {"sets": found, "groups": groups}
    return Outcome("Means of many predictions", numbers, page.entries(numbers, rows, epochs))
