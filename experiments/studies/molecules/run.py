"""Error bars of molecules of every size: the paper's calibrations beside the library's default.

One network of QM9's first split is calibrated in three ways. `work` judges each on all test
molecules; this module adds the range of RMSE over bar, and the page shows both.
"""

from __future__ import annotations

from typing import Any

from experiments.atoms.fitting import PROTOCOL
from experiments.data.qm9 import NAMES, TRAIN, VALID, read
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Found, Outcome
from experiments.studies.molecules import page
from experiments.studies.molecules.work import judged
from experiments.training import kept

FULL: dict[str, Any] = {
    "train": TRAIN,
    "valid": VALID,
    "epochs": PROTOCOL.epochs,
    "bin_size": 100,
    "wide": 1000,
    "molecules": None,
}
QUICK: dict[str, Any] = {
    "train": 150,
    "valid": 100,
    "epochs": 3,
    "bin_size": 20,
    "wide": 40,
    "molecules": 390,
}

FEWEST = {"quick": 12, "full": 200}
"""A size is shown where it has at least so many test molecules."""


def run(*, quick: bool, seed: int) -> Outcome:
    """Calibrate one network in several ways and judge it."""
    # Where the set is made from a package, make it before parts are named by its checksum.
    read()

    settings = QUICK if quick else FULL
    fewest = FEWEST["quick" if quick else "full"]
    committed = "" if quick else kept.digest("qm9")
    arguments = {"seed": seed, **settings, "committed": committed}
    job = Job("net", judged, arguments, NAMES)
    judgement = results("molecules", [job], keep=not quick, workers=1)["net"]

    numbers = {
        **judgement,
        "settings": {**settings, "fewest": fewest},
        "range": ranges(judgement["calibrations"], fewest),
    }
    return Outcome("Molecules of every size", numbers, page.entries(numbers))


def ranges(calibrations: Found, fewest: int) -> Found:
    """The smallest and the largest RMSE over bar of the sizes that are shown, by calibration."""
    ratio_ranges = {}
    for name, calibration in calibrations.items():
        ratios = [size["ratio"] for size in calibration["sizes"] if size["molecules"] >= fewest]
        ratio_ranges[name] = {"smallest": min(ratios), "largest": max(ratios), "sizes": len(ratios)}
    return ratio_ranges
