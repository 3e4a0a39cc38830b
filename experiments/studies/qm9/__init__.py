"""Molecules of QM9 with a net of atoms: energies, atoms and forces with error bars (Sec. 4.3)."""

from __future__ import annotations

from typing import Any

from experiments.atoms.fitting import PROTOCOL
from experiments.atoms.spectrum import width
from experiments.data.qm9 import NAMES, TRAIN, VALID, read
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Outcome, Picture, Table
from experiments.frame.wording import BEYOND
from experiments.judging import parity
from experiments.studies.qm9 import (
    clusters,
    clusters_page,
    costs,
    first_net,
    forces,
    forces_page,
    learning,
    learning_page,
    novelty_page,
    pictures_page,
    summary,
    tables,
    texts,
)
from experiments.studies.qm9.samples import SOAP, SPECIES
from experiments.studies.qm9.work import judged
from rigidities.calibration.criteria import BIN_SIZE as BINS_OF

TRIAL = {
    "epochs": 40,
    "molecules": 4000,
    "rmse": {"this scaling": 2.07, "one spread a column": 2.16, "times 100": 2.49, "none": 2.96},
}
"""By which the scaling of the descriptors was chosen, once; nothing here computes it again."""

SEEDS = 3
"""Of the learning curves; seeds of other runs begin after them, those of clusters too."""

WHOLE = {"splits": 5, "train": TRAIN, "valid": VALID, "epochs": PROTOCOL.epochs, "bin_size": 100}
WHOLE |= {"molecules": None}
FIRST = (
    "The sections on atoms, on kinds and sizes, and on forces of molecules show the first split's "
    "net, calibrated by the likelihood."
)
QUICK = {"splits": 2, "train": 120, "valid": 60, "epochs": 3, "bin_size": 20, "molecules": 240}


def run(*, quick: bool, seed: int) -> Outcome:
    """Train, calibrate and judge nets of molecules and of clusters."""
    read()  # where the set is made from a package, before parts are named by its checksum
    # one after another: each part uses all cores, and some measure times
    found = results("qm9", parts(quick=quick, seed=seed), keep=not quick, workers=1)
    sizes = QUICK if quick else WHOLE
    nets = [found[f"net {k}"] for k in range(sizes["splits"])]
    energies = summary.over_splits(nets)
    settings = _settings(nets[0], sizes) | {
        "trained_on": energies["trained_on"],
        "noiseless": energies["calibrations"]["evidence"]["chosen"]["noiseless"],
    }
    numbers = {
        "settings": settings,
        "energies": energies,
        "costs": found["costs"],
        "forces": found["forces"],
        "learning": _learning(found, quick),
        "clusters": clusters.together([found[job.name] for job in _cluster_jobs(quick, seed)]),
    }
    numbers = _shorter(numbers)
    return Outcome("QM9: molecules, atoms and forces", numbers, _page(numbers))


def _shorter(found: Any, inside: bool = False) -> Any:
    """The same with three digits of what figures show alone, "points" and "bins"."""
    if isinstance(found, dict):
        shown = ("points", "bins")
        return {key: _shorter(value, inside or key in shown) for key, value in found.items()}
    if isinstance(found, list):
        return [_shorter(value, inside) for value in found]
    return float(f"{found:.3g}") if inside and isinstance(found, float) else found


def _page(numbers: dict[str, Any]) -> list[str | Table | Picture]:
    energies = numbers["energies"]
    ways = energies["calibrations"]
    scores = ways["paper"]["scores"]
    labelled = {tables.LABELS[name]: one for name, one in ways.items()}
    return [
        *texts.opening(numbers["settings"]),
        "## Energies",
        tables.error_table(scores, texts.ERRORS),
        tables.score_table(ways, texts.SCORES),
        texts.closing(energies),
        Picture("bars", parity.pairs(labelled, height=3.3), texts.PARITY),
        tables.difference_table(energies["differences"], texts.DIFFERENCES),
        tables.choice_table(ways, texts.CHOICES),
        "## What the error bars cost",
        tables.cost_table(numbers["costs"], texts.costs(numbers["costs"])),
        FIRST,
        "## Which atoms are uncertain",
        *pictures_page.entries(energies["shown"]),
        *novelty_page.entries(energies["novelty"]),
        *learning_page.entries(numbers["learning"]),
        *forces_page.entries(numbers["forces"]),
        *clusters_page.entries(numbers["clusters"]),
    ]


def parts(*, quick: bool, seed: int) -> list[Job]:
    """All that is computed, in order."""
    sizes = dict(QUICK if quick else WHOLE)
    splits, bin_size = sizes.pop("splits"), sizes.pop("bin_size")
    jobs = [
        Job(f"net {k}", judged, {"split": k, "seed": seed, "bin_size": bin_size, **sizes}, NAMES)
        for k in range(splits)
    ]
    of_forces = {"seed": seed, **sizes, "sizes": forces.QUICK if quick else forces.WHOLE}
    jobs.append(Job("forces", first_net.of_forces, of_forces, NAMES))
    untrained = {name: value for name, value in sizes.items() if name != "epochs"}
    jobs.append(Job("costs", costs.measured, {"seed": seed, **untrained}, NAMES))
    return jobs + _learning_jobs(quick, seed) + _cluster_jobs(quick, seed)


def _learning_jobs(quick: bool, seed: int) -> list[Job]:
    sizes = learning.QUICK if quick else learning.WHOLE
    return [
        Job(
            f"learning, {way} {k}",
            learning.curve,
            {"seed": SEEDS * seed + k, "strategy": way, **sizes},
            NAMES,
        )
        for way in learning.STRATEGIES
        for k in range(1 if quick else SEEDS)
    ]


def _learning(found: dict[str, Any], quick: bool) -> dict[str, Any]:
    curves = {
        way: [value for name, value in found.items() if name.startswith(f"learning, {way} ")]
        for way in learning.STRATEGIES
    }
    return learning.together(curves, learning.QUICK if quick else learning.WHOLE)


def _cluster_jobs(quick: bool, seed: int) -> list[Job]:
    sizes = dict(clusters.QUICK if quick else clusters.WHOLE)
    return [
        Job(f"clusters {k}", clusters.measured, {"seed": SEEDS * seed + k, **sizes})
        for k in range(sizes.pop("seeds"))
    ]


def _chance(repetitions: int) -> float:
    """How often the mean of so many Gaussian numbers lies beyond two of its standard errors."""
    from scipy.stats import t

    return 2 * float(t.sf(BEYOND, max(1, repetitions - 1)))


def _settings(net: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """All that the text names."""
    return {
        **net["molecules"],
        "splits": sizes["splits"],
        "epochs": sizes["epochs"],
        "bin_size": sizes["bin_size"],
        "calibration_bin_size": BINS_OF,
        "trial": TRIAL,
        "patience": PROTOCOL.patience,
        "chance": {"splits": _chance(sizes["splits"]), "three": _chance(3)},
        "species": len(SPECIES),
        "inputs": width(len(SPECIES) * SOAP.radial, SOAP.angular),
        "features": len(SPECIES) * PROTOCOL.hidden[-1],
        "layers": len(PROTOCOL.hidden),
        "width": PROTOCOL.hidden[0],
        "rate": PROTOCOL.rate,
        "decay": PROTOCOL.decay,
        "batch": PROTOCOL.batch,
        "soap": SOAP.parameters(),
    }
