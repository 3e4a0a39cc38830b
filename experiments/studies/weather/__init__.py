"""Tomorrow's maximum temperature with error bars, over Australia (paper, Sec. 4.4)."""

from __future__ import annotations

from typing import Any

from experiments.data.weather import NAMES
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Outcome, Picture
from experiments.judging.error_bars import FOLDS
from experiments.studies.weather import drawing, tables, texts
from experiments.studies.weather.choice import KEPT
from experiments.studies.weather.nets import EMBEDDING, PROTOCOL
from experiments.studies.weather.summary import between, over_splits
from experiments.studies.weather.work import judged
from rigidities.calibration.criteria import BIN_SIZE as BINS_OF

SPLITS = 5
BIN_SIZE = 200
PAPER_INPUTS = 26
"""Continuous inputs that the paper counts."""

KINDS = {"raw": False, "standardised": True}
QUICK = {"splits": 2, "epochs": 3, "bin_size": 20, "rows": 300}
WHOLE = {"splits": SPLITS, "epochs": PROTOCOL.epochs, "bin_size": BIN_SIZE, "rows": None}


def run(*, quick: bool, seed: int) -> Outcome:
    """Train, calibrate and judge one net a split and kind of target."""
    sizes = dict(QUICK if quick else WHOLE)
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
    kinds = {kind: over_splits(of) for kind, of in nets.items()}
    differences = between(nets["standardised"], nets["raw"])
    settings = _settings(nets["raw"][0], splits, sizes)
    return Outcome(
        "Weather: tomorrow's maximum temperature",
        {"settings": settings, "targets": kinds, "standardised_minus_raw": differences},
        [
            *texts.opening(settings),
            tables.score_table(kinds, texts.SCORES),
            *texts.closing(kinds),
            Picture("bars", drawing.rows_and_bins(kinds["raw"]), texts.ROWS_CAPTION),
            tables.difference_table(kinds, differences, texts.DIFFERENCES),
            tables.choice_table(kinds, texts.CHOICES),
            Picture(
                "stations",
                drawing.stations(kinds["raw"]["stations"]["paper"]),
                texts.STATION_CAPTION,
            ),
            tables.station_table(kinds["raw"]["stations"]["paper"], texts.STATIONS),
        ],
    )


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
        "layers": len(PROTOCOL.hidden),
        "width": PROTOCOL.hidden[0],
        "rate": PROTOCOL.rate,
        "decay": PROTOCOL.decay,
        "batch": PROTOCOL.batch,
        "folds": FOLDS,
        "calibration_bin_size": BINS_OF,
        "paper_inputs": PAPER_INPUTS,
        "kept": KEPT,
    }
