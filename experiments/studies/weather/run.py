"""Tomorrow's maximum temperature with error bars, over Australia (paper, Sec. 4.4).

One job a split and kind of target, raw or standardised, trains and judges one network
(`work.judged`). `over_splits` summarises the networks of a kind, `between` compares the kinds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from experiments.data.weather import NAMES
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Found, Outcome, mean_and_error
from experiments.frame.wording import direction
from experiments.judging import scores
from experiments.judging.error_bars import FOLDS
from experiments.judging.scores import SCORES
from experiments.studies.weather import page
from experiments.studies.weather.work import EMBEDDING, KEPT_GAIN, SHOWN, judged
from experiments.training.protocol import FORECASTS
from rigidities.calibration.paper import BIN_SIZE as CALIBRATION_BIN_SIZE

PAPER_INPUTS = 26
"""Continuous inputs that the paper counts."""

KINDS = {"raw": False, "standardised": True}
"""Kinds of targets, and whether they are standardised."""

FULL = {"splits": 5, "epochs": FORECASTS.epochs, "bin_size": 200, "rows": None}
QUICK = {"splits": 2, "epochs": 3, "bin_size": 20, "rows": 300}
"""Splits, epochs of the training, rows of a bin, and rows of each part at most."""

LED = ("binned_log_ratio", "gain")
"""Scores of which the page names the best."""

OfSplits = Sequence[Mapping[str, Any]]
"""One entry a split."""


def run(*, quick: bool, seed: int) -> Outcome:
    """Train, calibrate and judge one network a split and kind of target."""
    sizes = QUICK if quick else FULL
    splits = range(sizes["splits"])
    jobs = []
    for kind, standardised in KINDS.items():
        for split in splits:
            arguments = {
                "split": split,
                "seed": seed,
                "standardised": standardised,
                "epochs": sizes["epochs"],
                "bin_size": sizes["bin_size"],
                "rows": sizes["rows"],
            }
            jobs.append(Job(f"{kind} {split}", judged, arguments, NAMES))
    job_results = results("weather", jobs, keep=not quick, workers=1 if quick else None)
    raw = [job_results[f"raw {split}"] for split in splits]
    standardised_networks = [job_results[f"standardised {split}"] for split in splits]
    numbers = {
        "settings": _settings(raw[0], len(splits), sizes),
        "targets": {
            "raw": over_splits(raw),
            "standardised": over_splits(standardised_networks),
        },
        "standardised_minus_raw": between(standardised_networks, raw),
    }
    return Outcome("Weather: tomorrow's maximum temperature", numbers, page.entries(numbers))


def _settings(network: Mapping[str, Any], splits: int, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """All that the text names."""
    return {
        "splits": splits,
        "epochs": sizes["epochs"],
        "bin_size": sizes["bin_size"],
        "rows": network["rows"],
        "inputs": network["inputs"],
        "stations": len(network["stations"]["paper"]),
        "embedding": EMBEDDING,
        "layers": len(FORECASTS.hidden),
        "width": FORECASTS.hidden[0],
        "rate": FORECASTS.rate,
        "decay": FORECASTS.decay,
        "batch": FORECASTS.batch,
        "folds": FOLDS,
        "calibration_bin_size": CALIBRATION_BIN_SIZE,
        "paper_inputs": PAPER_INPUTS,
        "kept": KEPT_GAIN,
    }


def over_splits(networks: OfSplits) -> Found:
    """Summarise all networks of one kind, one a split.

    Args:
        networks: the results of `work.judged`.

    Returns:
        "calibrations" with means and standard errors, the choices, and the first network's numbers
        for the figures; "differences" from the paper's calibration and, "from_constant", of the
        binned log ratio from that of the constant bar; "leaders" by score; "stations" over all
        splits.
    """
    calibrations = {}
    split_scores = {}
    for name in networks[0]["calibrations"]:
        calibrations[name] = [network["calibrations"][name] for network in networks]
        split_scores[name] = [of_split["scores"] for of_split in calibrations[name]]
    return {
        "calibrations": {name: _summary(of_splits) for name, of_splits in calibrations.items()},
        "differences": scores.from_paper(split_scores),
        "from_constant": {
            name: _from_constant(of_splits) for name, of_splits in calibrations.items()
        },
        "leaders": {score: leader(split_scores, score, SCORES[score].better) for score in LED},
        "stations": {
            name: _stations([network["stations"][name] for network in networks]) for name in SHOWN
        },
        "epoch": [network["epoch"] for network in networks],
        "rows": networks[0]["rows"],
    }


def between(networks: OfSplits, others: OfSplits) -> dict[str, Any]:
    """The scores of networks minus those of others on the same splits, of each calibration."""
    differences = {}
    for name in networks[0]["calibrations"]:
        differences[name] = scores.paired(
            [network["calibrations"][name]["scores"] for network in networks],
            [network["calibrations"][name]["scores"] for network in others],
        )
    return differences


def leader(
    split_scores: Mapping[str, Sequence[Mapping[str, float]]], score: str, better: int
) -> Found:
    """The calibration with the best mean, and those that do not clearly differ from it.

    Args:
        split_scores: of each calibration, the scores of all splits.
        score: the score by which to judge.
        better: 1 where larger is better, -1 where smaller is.

    Returns:
        "name"; "others", [mean, standard error] of their scores minus the leader's, split by
        split; "tied", those of them within two standard errors; "same", those of the same scores.
    """
    values = {
        name: [of_split[score] for of_split in of_splits]
        for name, of_splits in split_scores.items()
    }
    best = max(values, key=lambda name: better * sum(values[name]))
    others = {}
    same = []
    tied = []
    for name, of_splits in values.items():
        if name == best:
            continue
        pairs = zip(of_splits, values[best], strict=True)
        difference = list(mean_and_error([value - of_best for value, of_best in pairs]))
        others[name] = difference
        if of_splits == values[best]:
            same.append(name)
        elif direction(difference) == 0:
            tied.append(name)
    return {"name": best, "others": others, "tied": tied, "same": same}


def _from_constant(splits: OfSplits) -> dict[str, list[float]]:
    """The binned log ratio of a calibration minus that of the constant bar, split by split."""
    name = "binned_log_ratio"
    differences = [
        of_split["scores"][name] - of_split["constant"]["scores"][name] for of_split in splits
    ]
    return {name: list(mean_and_error(differences))}


def _summary(splits: OfSplits) -> Found:
    """One calibration over the splits: scores, choices, and the first split's figure, if any."""
    choices = [of_split["chosen"] for of_split in splits]
    summary: Found = {
        **scores.beside_constant_over_seeds(splits),
        "chosen": {
            "ways": Counter(f"{choice['criterion']}, {choice['noise']}" for choice in choices),
            "ridge": median(choice["ridge"] for choice in choices),
            "scale": median(choice["scale"] for choice in choices),
            "noise_variance": median(choice["noise_variance"] for choice in choices),
        },
    }
    for block in ("bins", "points"):
        if block in splits[0]:
            summary[block] = splits[0][block]
    return summary


def _stations(splits: OfSplits) -> Found:
    """Rows of all splits, [mean, standard error] of bar and error, by rising error.

    A station that a split's test rows lack is left out.
    """
    stations: Found = {}
    for name in splits[0]:
        if all(name in of_split for of_split in splits):
            stations[name] = {
                "rows": sum(of_split[name]["rows"] for of_split in splits),
                "bar": list(mean_and_error([of_split[name]["bar"] for of_split in splits])),
                "rmse": list(mean_and_error([of_split[name]["rmse"] for of_split in splits])),
            }
    return dict(sorted(stations.items(), key=lambda item: item[1]["rmse"][0]))
