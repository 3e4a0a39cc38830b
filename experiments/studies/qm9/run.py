"""Molecules of QM9 with a net of atoms: energies, atoms and forces with error bars (Sec. 4.3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from experiments.atoms.fitting import PROTOCOL
from experiments.atoms.samples import SOAP, SPECIES
from experiments.atoms.spectrum import width
from experiments.data.qm9 import NAMES, TRAIN, VALID, read
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Found, Outcome
from experiments.frame.wording import BEYOND
from experiments.judging import scores
from experiments.studies.qm9 import costs, page
from experiments.studies.qm9.clusters import work as clusters
from experiments.studies.qm9.forces import work as forces
from experiments.studies.qm9.learning import work as learning
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

FULL = {"splits": 5, "train": TRAIN, "valid": VALID, "epochs": PROTOCOL.epochs, "bin_size": 100}
FULL |= {"molecules": None}
QUICK = {"splits": 2, "train": 120, "valid": 60, "epochs": 3, "bin_size": 20, "molecules": 240}


def run(*, quick: bool, seed: int) -> Outcome:
    """Train, calibrate and judge nets of molecules and of clusters."""
    read()  # where the set is made from a package, before parts are named by its checksum
    # one after another: each part uses all cores, and some measure times
    found = results("qm9", parts(quick=quick, seed=seed), keep=not quick, workers=1)
    sizes = QUICK if quick else FULL
    nets = [found[f"net {k}"] for k in range(sizes["splits"])]
    energies = over_splits(nets)
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
    return Outcome("QM9: molecules, atoms and forces", numbers, page.entries(numbers))


def _shorter(found: Any, inside: bool = False) -> Any:
    """The same with three digits of what figures show alone, "points" and "bins"."""
    if isinstance(found, dict):
        shown = ("points", "bins")
        return {key: _shorter(value, inside or key in shown) for key, value in found.items()}
    if isinstance(found, list):
        return [_shorter(value, inside) for value in found]
    return float(f"{found:.3g}") if inside and isinstance(found, float) else found


def parts(*, quick: bool, seed: int) -> list[Job]:
    """All that is computed, in order."""
    sizes = dict(QUICK if quick else FULL)
    splits, bin_size = sizes.pop("splits"), sizes.pop("bin_size")
    jobs = [
        Job(f"net {k}", judged, {"split": k, "seed": seed, "bin_size": bin_size, **sizes}, NAMES)
        for k in range(splits)
    ]
    of_forces = {"seed": seed, **sizes, "sizes": forces.QUICK if quick else forces.FULL}
    jobs.append(Job("forces", forces.of_forces, of_forces, NAMES))
    untrained = {name: value for name, value in sizes.items() if name != "epochs"}
    jobs.append(Job("costs", costs.measured, {"seed": seed, **untrained}, NAMES))
    return jobs + _learning_jobs(quick, seed) + _cluster_jobs(quick, seed)


def _learning_jobs(quick: bool, seed: int) -> list[Job]:
    sizes = learning.QUICK if quick else learning.FULL
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
    return learning.together(curves, learning.QUICK if quick else learning.FULL)


def _cluster_jobs(quick: bool, seed: int) -> list[Job]:
    sizes = dict(clusters.QUICK if quick else clusters.FULL)
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


MERGED = 10
"""Bins that make one wide bin, in which single large errors count less."""


def over_splits(nets: Sequence[Found]) -> Found:
    """Of all splits; figures, kinds and shown molecules are those of the first.

    Args:
        nets: the results of `work.judged`.

    Returns:
        "calibrations" with [mean, standard error] of every score and the medians of what they
        chose; "differences" from the paper's calibration, split by split.
    """
    each = {name: [net["calibrations"][name] for net in nets] for name in nets[0]["calibrations"]}
    own = {name: [one["scores"] for one in found] for name, found in each.items()}
    return {
        "calibrations": {name: _together(found) for name, found in each.items()},
        "differences": scores.from_paper(own),
        "epochs": [net["epoch"] for net in nets],
        "trained_on": Counter(net["trained_on"] for net in nets),
        "novelty": nets[0]["novelty"],
        "shown": nets[0]["shown"],
    }


def log_ratio(bins: Found, merged: int) -> float:
    """The mean |log10(MSE / variance)| over bins, so many neighbours of which are put together.

    Args:
        bins: with "variance" and "mse" of bins of equal size, in the order of the variances.
        merged: how many make one bin; an incomplete last one is left out.
    """
    variance, mse = (torch.tensor(bins[name], dtype=torch.float64) for name in ("variance", "mse"))
    merged = min(merged, len(variance))
    whole = len(variance) // merged * merged
    means = (part[:whole].reshape(-1, merged).mean(1) for part in (mse, variance))
    return float(torch.div(*means).log10().abs().mean())


def _together(found: Sequence[Found]) -> Found:
    """One calibration of all nets."""
    chosen = [one["chosen"] for one in found]
    wide = [{"wide_log_ratio": log_ratio(one["bins"], MERGED)} for one in found]
    each = [one | {"scores": one["scores"] | more} for one, more in zip(found, wide, strict=True)]
    numbers = ("ridge", "scale", "noise_variance", "effective_rank")
    return {
        **scores.beside_constant_over_seeds(each),
        "chosen": {name: median(one[name] for one in chosen) for name in numbers}
        | {"noiseless": sum(one["noise_variance"] == 0 for one in chosen)},
        "bins": found[0]["bins"],
        "points": found[0]["points"],
    }
