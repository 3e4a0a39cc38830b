"""A gap between training rows: four kinds of error bars around one network.

Each draw is another random function. `work` trains one network on it, gives that network all kinds
of error bars, and scores them; the page shows means over the draws and one draw as a picture.
"""

from __future__ import annotations

from experiments.data.gap import Sample
from experiments.frame.outcome import Outcome
from experiments.frame.progress import steps
from experiments.studies.gap import page, work

FULL = {"draws": 20, "steps": work.STEPS}
QUICK = {"draws": 3, "steps": 300}


def run(*, quick: bool, seed: int) -> Outcome:
    """Score all error bars on several random functions; the middle one is the figure."""
    settings = QUICK if quick else FULL
    scores = []
    curves = []
    for draw in steps(range(settings["draws"]), "random functions"):
        sample = Sample.draw(seed + draw)
        network = work.trained_network(sample.train, seed + draw, settings["steps"])
        methods = work.error_bars(network, sample)
        scores.append(work.scored(network, methods, sample))
        curves.append(work.curves(network, methods, sample))

    shown = work.middle_draw(scores)
    numbers = {
        "settings": settings,
        "summary": work.summary(scores),
        "draws": scores,
        "shown": shown,
        "figure": curves[shown],
    }
    return Outcome("A gap between the training rows", numbers, page.entries(numbers))
