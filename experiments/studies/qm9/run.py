"""Molecules of QM9 with a network of atoms: energies, atoms and forces with error bars (Sec. 4.3).

The parts of the study are listed by `jobs`: one network for each split (`work`), error bars of
forces (`forces`), costs (`costs`), learning curves (`learning`) and networks of metal clusters
(`clusters`). `over_splits` averages the networks; the page shows all parts in its sections.
"""

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
from rigidities.calibration.paper import BIN_SIZE as BINS_OF

TRIAL = {
    "epochs": 40,
    "molecules": 4000,
    "rmse": {"this scaling": 2.07, "one spread a column": 2.16, "times 100": 2.49, "none": 2.96},
}
"""The trial by which the scaling of the descriptors was chosen; nothing here computes it again."""

SEEDS = 3
"""Seeds of learning curves and of clusters; those of a run with another seed come after them."""

FULL: dict[str, Any] = {
    "splits": 5,
    "train": TRAIN,
    "valid": VALID,
    "epochs": PROTOCOL.epochs,
    "bin_size": 100,
    "molecules": None,
}
QUICK: dict[str, Any] = {
    "splits": 2,
    "train": 120,
    "valid": 60,
    "epochs": 3,
    "bin_size": 20,
    "molecules": 240,
}

MERGED = 10
"""Bins that make one wide bin, in which single large errors count less."""

FIGURE_KEYS = ("points", "bins")
"""Entries that figures alone show."""


def run(*, quick: bool, seed: int) -> Outcome:
    """Train, calibrate and judge networks of molecules and of clusters."""
    # Where the set is made from a package, make it before parts are named by its checksum.
    read()
    # One after another: each part uses all cores, and some measure times.
    parts = results("qm9", jobs(quick=quick, seed=seed), keep=not quick, workers=1)

    settings = QUICK if quick else FULL
    networks = [parts[_network_name(split)] for split in range(settings["splits"])]
    energies = over_splits(networks)
    numbers = {
        "settings": {
            **_settings(networks[0], settings),
            "trained_on": energies["trained_on"],
            "noiseless": energies["calibrations"]["evidence"]["chosen"]["noiseless"],
        },
        "energies": energies,
        "costs": parts["costs"],
        "forces": parts["forces"],
        "learning": _learning_curves(parts, quick=quick),
        "clusters": clusters.together(
            [parts[job.name] for job in _cluster_jobs(quick=quick, seed=seed)]
        ),
    }
    numbers = _with_short_figures(numbers)
    return Outcome("QM9: molecules, atoms and forces", numbers, page.entries(numbers))


def _with_short_figures(numbers: Any, is_figure: bool = False) -> Any:
    """The same numbers, with three digits of what figures alone show."""
    if isinstance(numbers, dict):
        return {
            key: _with_short_figures(value, is_figure or key in FIGURE_KEYS)
            for key, value in numbers.items()
        }
    if isinstance(numbers, list):
        return [_with_short_figures(value, is_figure) for value in numbers]
    if is_figure and isinstance(numbers, float):
        return float(f"{numbers:.3g}")
    return numbers


def jobs(*, quick: bool, seed: int) -> list[Job]:
    """All that is computed, in order."""
    settings = QUICK if quick else FULL
    sizes = {key: settings[key] for key in ("train", "valid", "molecules")}
    epochs = settings["epochs"]

    all_jobs = []
    for split in range(settings["splits"]):
        arguments = {
            "split": split,
            "seed": seed,
            "bin_size": settings["bin_size"],
            "epochs": epochs,
            **sizes,
        }
        all_jobs.append(Job(_network_name(split), judged, arguments, NAMES))
    force_settings = forces.QUICK if quick else forces.FULL
    force_arguments = {"seed": seed, "epochs": epochs, **sizes, "sizes": force_settings}
    all_jobs.append(Job("forces", forces.of_forces, force_arguments, NAMES))
    all_jobs.append(Job("costs", costs.measured, {"seed": seed, **sizes}, NAMES))
    all_jobs += _learning_jobs(quick=quick, seed=seed)
    all_jobs += _cluster_jobs(quick=quick, seed=seed)
    return all_jobs


def _network_name(split: int) -> str:
    return f"net {split}"


def _learning_name(strategy: str, number: int) -> str:
    return f"learning, {strategy} {number}"


def _learning_seeds(quick: bool) -> range:
    return range(1 if quick else SEEDS)


def _learning_jobs(*, quick: bool, seed: int) -> list[Job]:
    """One job for each way of choosing molecules and each seed."""
    settings = learning.QUICK if quick else learning.FULL
    all_jobs = []
    for strategy in learning.STRATEGIES:
        for number in _learning_seeds(quick):
            arguments = {"seed": SEEDS * seed + number, "strategy": strategy, **settings}
            name = _learning_name(strategy, number)
            all_jobs.append(Job(name, learning.curve, arguments, NAMES))
    return all_jobs


def _learning_curves(parts: dict[str, Any], *, quick: bool) -> dict[str, Any]:
    """The learning curves of all seeds, averaged."""
    curves = {
        strategy: [parts[_learning_name(strategy, number)] for number in _learning_seeds(quick)]
        for strategy in learning.STRATEGIES
    }
    return learning.together(curves, learning.QUICK if quick else learning.FULL)


def _cluster_jobs(*, quick: bool, seed: int) -> list[Job]:
    """One job for each network of clusters."""
    settings = clusters.QUICK if quick else clusters.FULL
    sizes = {key: value for key, value in settings.items() if key != "seeds"}
    return [
        Job(f"clusters {number}", clusters.measured, {"seed": SEEDS * seed + number, **sizes})
        for number in range(settings["seeds"])
    ]


def _chance(repetitions: int) -> float:
    """How often the mean of so many Gaussian numbers lies beyond two of its standard errors."""
    from scipy.stats import t

    return 2 * float(t.sf(BEYOND, max(1, repetitions - 1)))


def _settings(network: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """All that the text names."""
    return {
        **network["molecules"],
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


def over_splits(networks: Sequence[Found]) -> Found:
    """The numbers of all splits; figures, kinds and shown molecules are those of the first.

    Args:
        networks: The results of `work.judged`.

    Returns:
        "calibrations" with [mean, standard error] of every score and the medians of what they
        chose; "differences" from the paper's calibration, split by split.
    """
    first = networks[0]
    # Of each calibration a list with one block for each network.
    blocks = {
        name: [network["calibrations"][name] for network in networks]
        for name in first["calibrations"]
    }
    scores_of_splits = {
        name: [block["scores"] for block in blocks_of_splits]
        for name, blocks_of_splits in blocks.items()
    }
    return {
        "calibrations": {name: _averaged(of_splits) for name, of_splits in blocks.items()},
        "differences": scores.from_paper(scores_of_splits),
        "epochs": [network["epoch"] for network in networks],
        "trained_on": Counter(network["trained_on"] for network in networks),
        "novelty": first["novelty"],
        "shown": first["shown"],
    }


def log_ratio(bins: Found, merged: int) -> float:
    """The mean |log10(MSE / variance)| over wide bins, made of neighbouring bins.

    Args:
        bins: "variance" and "mse" of bins of equal size, in the order of the variances.
        merged: How many bins make a wide one; an incomplete last one is left out.
    """
    variance = torch.tensor(bins["variance"], dtype=torch.float64)
    mse = torch.tensor(bins["mse"], dtype=torch.float64)
    merged = min(merged, len(variance))
    whole = len(variance) // merged * merged
    wide_mse = mse[:whole].reshape(-1, merged).mean(1)
    wide_variance = variance[:whole].reshape(-1, merged).mean(1)
    return float((wide_mse / wide_variance).log10().abs().mean())


def _averaged(blocks: Sequence[Found]) -> Found:
    """One calibration over all networks; figures are those of the first."""
    with_wide_bins = []
    for block in blocks:
        wide_log_ratio = log_ratio(block["bins"], MERGED)
        extended_scores = {**block["scores"], "wide_log_ratio": wide_log_ratio}
        with_wide_bins.append({**block, "scores": extended_scores})

    choices = [block["chosen"] for block in blocks]
    chosen: Found = {
        name: median(choice[name] for choice in choices)
        for name in ("ridge", "scale", "noise_variance", "effective_rank")
    }
    chosen["noiseless"] = sum(choice["noise_variance"] == 0 for choice in choices)
    return {
        **scores.beside_constant_over_seeds(with_wide_bins),
        "chosen": chosen,
        "bins": blocks[0]["bins"],
        "points": blocks[0]["points"],
    }
