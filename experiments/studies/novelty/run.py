"""What an alarm that watches every layer sees: nine sets, five kinds of networks, and its limits.

There is one job a set, one a kind of networks, and one for failures that no alarm can see; `work`
has all three. `numbers` averages over the networks.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.data import uci
from experiments.data.california import NAMES
from experiments.data.domains import SETS
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Outcome
from experiments.studies.novelty import page, tasks, work

UNSEEN = "what nothing sees"
"""The name of the job on failures without a sign in the inputs."""


@dataclass(frozen=True)
class Sizes:
    """The size of a run.

    Attributes:
        sets: names of the sets.
        count: domains of each kind, of a set.
        set_steps: steps of the training of a set's network.
        kinds: kinds of other networks.
        seeds: networks of each kind.
        steps: steps of their training.
    """

    sets: tuple[str, ...] = SETS
    count: int = 2
    set_steps: int = 6000
    kinds: tuple[str, ...] = tuple(tasks.TASKS)
    seeds: int = 3
    steps: int = 1500


FULL = Sizes()
QUICK = Sizes(
    sets=("yacht",),
    count=1,
    set_steps=60,
    kinds=("layer norm", "graph of atoms"),
    seeds=1,
    steps=40,
)


def run(*, quick: bool, seed: int) -> Outcome:
    """Train, ask, compare."""
    sizes = QUICK if quick else FULL
    jobs = []
    for name in sizes.sets:
        arguments = {"name": name, "count": sizes.count, "seed": seed, "steps": sizes.set_steps}
        data = NAMES if name == "california" else uci.names(name)
        jobs.append(Job(name, work.on_set, arguments, data))
    common = {"seeds": sizes.seeds, "seed": 100 * seed, "steps": sizes.steps}
    for kind in sizes.kinds:
        jobs.append(Job(kind, work.of_kind, {"name": kind, **common}))
    jobs.append(Job(UNSEEN, work.unseen, common))
    job_results = results("novelty", jobs, keep=not quick, workers=1 if quick else None)
    page_numbers = numbers(job_results, sizes, seed)
    return Outcome("Novelty, layer by layer", page_numbers, page.entries(page_numbers))


def numbers(job_results: Mapping[str, Any], sizes: Sizes, seed: int) -> dict[str, Any]:
    """Everything that the page shows.

    Args:
        job_results: the results of the jobs by name.
        sizes: the size of the run.
        seed: its seed.
    """
    sets = {name: job_results[name]["nets"] for name in sizes.sets}
    networks = [network for of_set in sets.values() for network in of_set]
    kinds = {}
    for kind in sizes.kinds:
        kinds[kind] = {
            "layers": job_results[kind]["layers"],
            "unlike": _means_by_difference(job_results[kind]),
        }
    return {
        "settings": {
            "seed": seed,
            "nets": len(networks),
            "seeds": sizes.seeds,
            "hidden": {name: list(protocol.hidden) for name, protocol in work.NETS.items()},
        },
        "all": _means_by_architecture(networks),
        "sets": {name: _means_by_architecture(of_set) for name, of_set in sets.items()},
        "kinds": kinds,
        "unseen": _means_by_difference(job_results[UNSEEN]),
        "seconds": {name: result["seconds"] for name, result in job_results.items()},
    }


def _means_by_architecture(networks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the networks of each architecture on the sets."""
    return {
        architecture: mean_of([network for network in networks if network["net"] == architecture])
        for architecture in work.NETS
    }


def _means_by_difference(result: Mapping[str, Any]) -> dict[str, Any]:
    """Means over the networks of a kind, by what is unlike in the data."""
    return {unlike: mean_of(networks) for unlike, networks in result["unlike"].items()}


def mean_of(networks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over networks, and the most telling layer of the first of them."""
    means: dict[str, Any] = {}
    for block in ("auroc", "flagged", "held"):
        means[block] = {
            name: statistics.fmean(network[block][name] for network in networks)
            for name in networks[0][block]
        }
    means["layer"] = networks[0]["layer"]
    return means
