"""Error bars of molecules of every size: the paper's calibrations beside the library's default."""

from __future__ import annotations

from typing import Any

from experiments.atoms.fitting import PROTOCOL
from experiments.data.qm9 import NAMES, TRAIN, VALID, read
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Found, Outcome
from experiments.studies.molecules import page
from experiments.studies.molecules.work import judged
from experiments.training import kept

FULL: dict[str, Any] = {"train": TRAIN, "valid": VALID, "epochs": PROTOCOL.epochs}
FULL |= {"bin_size": 100, "wide": 1000, "molecules": None}
QUICK: dict[str, Any] = {"train": 150, "valid": 100, "epochs": 3, "bin_size": 20, "wide": 40}
QUICK |= {"molecules": 390}

FEWEST = {"quick": 12, "full": 200}
"""Test molecules of a size that is shown."""


def run(*, quick: bool, seed: int) -> Outcome:
    """Calibrate one net in several ways and judge it."""
    read()  # where the set is made from a package, before parts are named by its checksum
    sizes = QUICK if quick else FULL
    asked = {"seed": seed, **sizes, "committed": "" if quick else kept.digest("qm9")}
    found = results("molecules", [Job("net", judged, asked, NAMES)], keep=not quick, workers=1)
    numbers = found["net"] | {"settings": {**sizes, "fewest": FEWEST["quick" if quick else "full"]}}
    numbers |= {"range": ratios(numbers)}
    return Outcome("Molecules of every size", numbers, page.entries(numbers))


def ratios(numbers: Found) -> Found:
    """The smallest and the largest RMSE over bar of the sizes that are shown, by calibration."""
    fewest = numbers["settings"]["fewest"]
    found = {}
    for name, way in numbers["calibrations"].items():
        own = [one for one in way["sizes"] if one["molecules"] >= fewest]
        found[name] = {
            "smallest": min(one["ratio"] for one in own),
            "largest": max(one["ratio"] for one in own),
            "sizes": len(own),
        }
    return found
