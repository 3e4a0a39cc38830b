"""Seven points of cos^2 x, three kinds of models, calibrated error bars (paper, Fig. 1)."""

from __future__ import annotations

from experiments.frame.outcome import Outcome, Picture
from experiments.frame.progress import steps
from experiments.studies.toy import texts
from experiments.studies.toy.drawing import curves, drawn
from experiments.studies.toy.models import fitted_models
from experiments.studies.toy.points import Sample
from experiments.studies.toy.scores import choice_table, score_table, scored, summary

DRAWS, QUICK_DRAWS = 20, 2
CAPTION = (
    "The first draw: seven noisy points, the fits, and error bars of one and two calibrated "
    "standard deviations. The dashed line is the function without noise."
)


def run(*, quick: bool, seed: int) -> Outcome:
    """Fit all models to several draws of the noise; the first draw is the figure."""
    draws = QUICK_DRAWS if quick else DRAWS
    samples = [Sample.draw(seed + draw) for draw in range(draws)]
    fits = [
        fitted_models(sample, seed + draw)
        for draw, sample in enumerate(steps(samples, "draws of the noise"))
    ]
    shown = curves(samples[0], fits[0])
    found = {
        fit[0].name: summary([scored(m, s) for m, s in zip(fit, samples, strict=True)])
        for fit in zip(*fits, strict=True)
    }
    return Outcome(
        "Seven points, four error bars",
        {"models": found, "figure": shown},
        [
            *texts.OPENING,
            Picture("fits", drawn(shown), CAPTION),
            score_table(found),
            choice_table(found),
            *texts.CLOSING,
        ],
    )
