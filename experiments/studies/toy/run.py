"""Seven points of cos^2 x, three kinds of models, calibrated error bars (paper, Fig. 1)."""

from __future__ import annotations

from experiments.data.cosine import Sample
from experiments.frame.outcome import Outcome
from experiments.frame.progress import steps
from experiments.studies.toy import page
from experiments.studies.toy.work import curves, fitted_models, scored, summary

FULL, QUICK = {"draws": 20}, {"draws": 2}


def run(*, quick: bool, seed: int) -> Outcome:
    """Fit all models to several draws of the noise; the first draw is the figure."""
    draws = (QUICK if quick else FULL)["draws"]
    samples = [Sample.draw(seed + draw) for draw in range(draws)]
    fits = [
        fitted_models(sample, seed + draw)
        for draw, sample in enumerate(steps(samples, "draws of the noise"))
    ]
    found = {
        fit[0].name: summary([scored(m, s) for m, s in zip(fit, samples, strict=True)])
        for fit in zip(*fits, strict=True)
    }
    numbers = {"models": found, "figure": curves(samples[0], fits[0])}
    return Outcome("Seven points, four error bars", numbers, page.entries(numbers))
