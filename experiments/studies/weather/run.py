"""Tomorrow's maximum temperature with error bars, over Australia (paper, Sec. 4.4)."""

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
from experiments.studies.weather.work import EMBEDDING, KEPT, SHOWN, judged
from experiments.training.protocol import FORECASTS
from rigidities.calibration.criteria import BIN_SIZE as BINS_OF

SPLITS = 5
BIN_SIZE = 200
PAPER_INPUTS = 26
"""Continuous inputs that the paper counts."""

KINDS = {"raw": False, "standardised": True}
QUICK = {"splits": 2, "epochs": 3, "bin_size": 20, "rows": 300}
FULL = {"splits": SPLITS, "epochs": FORECASTS.epochs, "bin_size": BIN_SIZE, "rows": None}


def run(*, quick: bool, seed: int) -> Outcome:
    """Train, calibrate and judge one net a split and kind of target."""
    sizes = dict(QUICK if quick else FULL)
    splits = sizes.pop("splits")
    names = {kind: [f"{kind} {k}" for k in range(splits)] for kind in KINDS}
    parts = [
        Job(
            names[kind][k],
            judged,
            {"split": k, "seed": seed, "standardised": scaled, **sizes},
            NAMES,
        )
        for kind, scaled in KINDS.items()
        for k in range(splits)
    ]
    found = results("weather", parts, keep=not quick, workers=1 if quick else None)
    nets = {kind: [found[name] for name in of] for kind, of in names.items()}
    numbers = {
        "settings": _settings(nets["raw"][0], splits, sizes),
        "targets": {kind: over_splits(of) for kind, of in nets.items()},
        "standardised_minus_raw": between(nets["standardised"], nets["raw"]),
    }
    return Outcome("Weather: tomorrow's maximum temperature", numbers, page.entries(numbers))


def _settings(net: dict[str, Any], splits: int, sizes: dict[str, Any]) -> dict[str, Any]:
    """All that the text names."""
    return {
        "splits": splits,
        "epochs": sizes["epochs"],
        "bin_size": sizes["bin_size"],
        "rows": net["rows"],
        "inputs": net["inputs"],
        "stations": len(net["stations"]["paper"]),
        "embedding": EMBEDDING,
        "layers": len(FORECASTS.hidden),
        "width": FORECASTS.hidden[0],
        "rate": FORECASTS.rate,
        "decay": FORECASTS.decay,
        "batch": FORECASTS.batch,
        "folds": FOLDS,
        "calibration_bin_size": BINS_OF,
        "paper_inputs": PAPER_INPUTS,
        "kept": KEPT,
    }


LED = ("binned_log_ratio", "gain")
"""Scores of which the page names the best."""


def over_splits(nets: Sequence[Found]) -> Found:
    """Of all nets of one kind, one a split.

    Args:
        nets: the results of `work.judged`.

    Returns:
        "calibrations" with means and standard errors, the choices, and the first net's numbers for
        the figures; "differences" from the paper's calibration and, "from_constant", of the binned
        log ratio from that of the constant bar; "leaders" by score; "stations" over all splits.
    """
    each = {name: [net["calibrations"][name] for net in nets] for name in nets[0]["calibrations"]}
    own = {name: [one["scores"] for one in found] for name, found in each.items()}
    return {
        "calibrations": {name: _together(found) for name, found in each.items()},
        "differences": scores.from_paper(own),
        "from_constant": {name: _from_constant(found) for name, found in each.items()},
        "leaders": {score: leader(own, score, SCORES[score].better) for score in LED},
        "stations": {name: _stations([net["stations"][name] for net in nets]) for name in SHOWN},
        "epoch": [net["epoch"] for net in nets],
        "rows": nets[0]["rows"],
    }


def between(nets: Sequence[Found], other: Sequence[Found]) -> dict[str, Any]:
    """The scores of nets minus those of others on the same splits, of each calibration."""
    return {
        name: scores.paired(
            *([n["calibrations"][name]["scores"] for n in of] for of in (nets, other))
        )
        for name in nets[0]["calibrations"]
    }


def leader(own: Mapping[str, Sequence[Mapping[str, float]]], score: str, better: int) -> Found:
    """The calibration with the best mean, and those that do not clearly differ from it.

    Args:
        own: of each calibration, the scores of all splits.
        score: by which to judge.
        better: 1 where larger is better, -1 where smaller is.

    Returns:
        "name"; "others", [mean, standard error] of their scores minus the leader's, split by
        split; "tied", those of them within two standard errors; "same", those of the same scores.
    """
    values = {name: [one[score] for one in each] for name, each in own.items()}
    name = max(values, key=lambda one: better * sum(values[one]))
    others = {
        other: list(mean_and_error([a - b for a, b in zip(of, values[name], strict=True)]))
        for other, of in values.items()
        if other != name
    }
    same = [other for other in others if values[other] == values[name]]
    tied = [other for other, pair in others.items() if other not in same and not direction(pair)]
    return {"name": name, "others": others, "tied": tied, "same": same}


def _from_constant(each: Sequence[Found]) -> dict[str, list[float]]:
    """The binned log ratio minus that of the constant bar, split by split."""
    name = "binned_log_ratio"
    values = [one["scores"][name] - one["constant"]["scores"][name] for one in each]
    return {name: list(mean_and_error(values))}


def _together(found: Sequence[Found]) -> Found:
    """One calibration of all nets."""
    chosen = [one["chosen"] for one in found]
    numbers = ("ridge", "scale", "noise_variance")
    together: Found = {
        **scores.beside_constant_over_seeds(found),
        "chosen": {
            "ways": Counter(f"{one['criterion']}, {one['noise']}" for one in chosen),
            **{name: median(one[name] for one in chosen) for name in numbers},
        },
    }
    return together | {name: found[0][name] for name in ("bins", "points") if name in found[0]}


def _stations(each: Sequence[Found]) -> Found:
    """Rows of all splits, [mean, standard error] of bar and error, by rising error.

    A station that a split's test rows lack is left out.
    """
    common = [name for name in each[0] if all(name in one for one in each)]
    found = {
        name: {
            "rows": sum(one[name]["rows"] for one in each),
            **{k: list(mean_and_error([o[name][k] for o in each])) for k in ("bar", "rmse")},
        }
        for name in common
    }
    return dict(sorted(found.items(), key=lambda entry: entry[1]["rmse"][0]))
