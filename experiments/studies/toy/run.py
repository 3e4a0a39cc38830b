"""Seven points of cos^2 x, three kinds of models, calibrated error bars (paper, Fig. 1).

Each draw of the noise gives seven training points. `work` fits four models to every draw and scores
them; the page shows the scores, means over the draws, and the fits of the first draw.
"""

from __future__ import annotations

from experiments.data.cosine import Sample
from experiments.frame.outcome import Outcome
from experiments.frame.progress import steps
from experiments.studies.toy import page
from experiments.studies.toy.work import curves, fitted_models, scored, summary

FULL = {"draws": 20}
QUICK = {"draws": 2}


def run(*, quick: bool, seed: int) -> Outcome:
    """Fit all models to several draws of the noise; the first draw is the figure."""
    settings = QUICK if quick else FULL
    samples = [Sample.draw(seed + draw) for draw in range(settings["draws"])]
    models_of_draws = [
        fitted_models(sample, seed + draw)
        for draw, sample in enumerate(steps(samples, "draws of the noise"))
    ]

    summaries = {}
    for number, first_model in enumerate(models_of_draws[0]):
        scores = [
            scored(models[number], sample)
            for models, sample in zip(models_of_draws, samples, strict=True)
        ]
        summaries[first_model.name] = summary(scores)

    numbers = {"models": summaries, "figure": curves(samples[0], models_of_draws[0])}
    return Outcome("Seven points, four error bars", numbers, page.entries(numbers))
