"""Error bars inside and outside the training domain, on California housing (paper, Sec. 4.5).

Two jobs do the work: `work.networks` judges every network's error bars on both sides of the
threshold, `work.histogram` counts the rows on both sides. `numbers` averages over the networks.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from experiments.data.california import NAMES
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Outcome, mean_and_error
from experiments.judging import scores
from experiments.judging.floors import DRAWS
from experiments.studies.california import page, work
from experiments.studies.california.work import CALIBRATIONS, DOMAINS
from experiments.training import kept

FULL = {"count": kept.NETS, "epochs": kept.EPOCHS, "bin_size": 100}
QUICK = {"count": 2, "epochs": 4, "bin_size": 25}
"""Networks, epochs of their training, and rows of a bin."""

HISTOGRAM = 60
"""Bins between -3 and 3; the threshold is an edge."""

OfNetworks = Sequence[dict[str, Any]]
"""One entry a network. For a calibration: the two domains' scores, "auroc"s and "chosen"."""


def run(*, quick: bool, seed: int) -> Outcome:
    """Train on one side of the threshold, judge on both."""
    if quick:
        page_numbers = numbers(QUICK, seed, keep=False)
    else:
        page_numbers = numbers(FULL, seed, keep=True)
    title = "In and out of the domain: California housing"
    return Outcome(title, page_numbers, page.entries(page_numbers))


def numbers(sizes: dict[str, Any], seed: int, *, keep: bool) -> dict[str, Any]:
    """Everything that the page shows.

    Args:
        sizes: `FULL` or `QUICK`.
        seed: the seed of splits and networks.
        keep: whether results are kept on disk.
    """
    arguments = {**sizes, "seed": seed, "digest": kept.digest("california")}
    jobs = [
        Job("nets", work.networks, arguments, NAMES),
        Job("longitude", work.histogram, {"bins": HISTOGRAM}, NAMES),
    ]
    job_results = results("california", jobs, keep=keep, workers=1)
    networks = job_results["nets"]
    protocol = kept.PROTOCOLS[work.NETS]
    return {
        "settings": {
            **sizes,
            "hidden": protocol.hidden[0],
            "decay": protocol.decay,
            "committed": networks["committed"],
            "shown": 0,
            "level": page.LEVEL,
            "farthest": work.FARTHEST,
            "draws": DRAWS,
            "gaussian_kurtosis": 3,
        },
        "rows": {
            "train": networks["train"],
            "valid": networks["valid"],
            "inside": networks["inside"],
            "outside": networks["outside"],
            "smallest_test": min(networks["inside"]),
            "largest_test": max(networks["inside"]),
        },
        "epoch": networks["epoch"],
        "longitude": job_results["longitude"],
        **summary(networks["each"]),
        "limits": limits(networks["limits"]),
        "shown": networks["shown"],
    }


def summary(networks: OfNetworks) -> dict[str, Any]:
    """Averages of every calibration, and its paired differences from the paper's.

    Args:
        networks: one entry a network, with the scores of each calibration.
    """
    by_calibration = {name: [network[name] for network in networks] for name in CALIBRATIONS}
    return {
        "calibrations": {
            name: _averages(of_networks) for name, of_networks in by_calibration.items()
        },
        "differences": {
            name: _differences(of_networks, by_calibration["paper"])
            for name, of_networks in by_calibration.items()
            if name != "paper"
        },
    }


def limits(networks: OfNetworks) -> dict[str, Any]:
    """How close to the line the bars can come, over the networks.

    Args:
        networks: the "limits" of each network.
    """
    kurtoses = [network["kurtosis"] for network in networks]
    return {
        "kurtosis": scores.quartiles(kurtoses),
        "kurtosis_of_each": kurtoses,
        "floors": {
            name: scores.over_seeds([network["floors"][name] for network in networks])
            for name in networks[0]["floors"]
        },
        "hindsight": scores.over_seeds([network["hindsight"] for network in networks]),
    }


def _averages(networks: OfNetworks) -> dict[str, Any]:
    """One calibration over the networks: means, standard errors, medians of its choices."""
    averages: dict[str, Any] = {}
    for domain in DOMAINS:
        coverages = [network[domain]["scores"]["coverage"] for network in networks]
        averages[domain] = {
            **scores.beside_constant_over_seeds([network[domain] for network in networks]),
            "coverage_of_each": coverages,
            "lowest_coverage": min(coverages),
        }
    aurocs = [network["auroc"] for network in networks]
    aurocs_of_rigidity = [network["auroc_of_rigidity"] for network in networks]
    chosen = [network["chosen"] for network in networks]
    averages["auroc"] = list(mean_and_error(aurocs))
    averages["auroc_of_rigidity"] = list(mean_and_error(aurocs_of_rigidity))
    averages["auroc_of_each"] = aurocs
    averages["farthest"] = scores.over_seeds([network["farthest"] for network in networks])
    averages["chosen"] = {
        "ridge": statistics.median(choice["ridge"] for choice in chosen),
        "scale": statistics.median(choice["scale"] for choice in chosen),
        "noise": statistics.median(choice["noise_variance"] for choice in chosen) ** 0.5,
    }
    return averages


def _differences(networks: OfNetworks, paper: OfNetworks) -> dict[str, Any]:
    """The scores of one calibration minus the paper's, network by network."""
    differences: dict[str, Any] = {}
    for domain in DOMAINS:
        differences[domain] = scores.paired(
            [network[domain]["scores"] for network in networks],
            [network[domain]["scores"] for network in paper],
        )
    pairs = zip(networks, paper, strict=True)
    auroc = [network["auroc"] - of_paper["auroc"] for network, of_paper in pairs]
    differences["auroc"] = list(mean_and_error(auroc))
    return differences
