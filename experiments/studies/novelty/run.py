"""What an alarm that watches every layer sees: nine sets, five kinds of nets, and its limits."""

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
from experiments.studies.novelty import nets, page, work

UNSEEN = "what nothing sees"


@dataclass(frozen=True)
class Sizes:
    """Of a run.

    Attributes:
        sets: the sets.
        count: domains of each kind, of a set.
        set_steps: of the training of a set's net.
        kinds: nets of other kinds.
        seeds: nets of each kind.
        steps: of their training.
    """

    sets: tuple[str, ...] = SETS
    count: int = 2
    set_steps: int = 6000
    kinds: tuple[str, ...] = tuple(nets.CASES)
    seeds: int = 3
    steps: int = 1500


FULL = Sizes()
QUICK = Sizes(("yacht",), 1, 60, ("layer norm", "graph of atoms"), 1, 40)


def run(*, quick: bool, seed: int) -> Outcome:
    """Train, ask, compare."""
    sizes = QUICK if quick else FULL
    jobs = [
        Job(
            name,
            work.on_set,
            {"name": name, "count": sizes.count, "seed": seed, "steps": sizes.set_steps},
            NAMES if name == "california" else uci.names(name),
        )
        for name in sizes.sets
    ]
    some = {"seeds": sizes.seeds, "seed": 100 * seed, "steps": sizes.steps}
    jobs += [Job(name, work.of_kind, {"name": name, **some}) for name in sizes.kinds]
    jobs.append(Job(UNSEEN, work.unseen, some))
    done = results("novelty", jobs, keep=not quick, workers=1 if quick else None)
    found = numbers(done, sizes, seed)
    return Outcome("Novelty, layer by layer", found, page.entries(found))


def numbers(done: Mapping[str, Any], sizes: Sizes, seed: int) -> dict[str, Any]:
    """Everything that the page shows."""
    sets = {}
    for name in sizes.sets:
        each = done[name]["nets"]
        sets[name] = {net: mean_of([one for one in each if one["net"] == net]) for net in work.NETS}
    every = [one for name in sizes.sets for one in done[name]["nets"]]
    return {
        "settings": {
            "seed": seed,
            "nets": len(every),
            "seeds": sizes.seeds,
            "hidden": {name: list(one.hidden) for name, one in work.NETS.items()},
        },
        "all": {net: mean_of([one for one in every if one["net"] == net]) for net in work.NETS},
        "sets": sets,
        "kinds": {
            name: {
                "layers": done[name]["layers"],
                "unlike": {unlike: mean_of(some) for unlike, some in done[name]["unlike"].items()},
            }
            for name in sizes.kinds
        },
        "unseen": {unlike: mean_of(some) for unlike, some in done[UNSEEN]["unlike"].items()},
        "seconds": {name: part["seconds"] for name, part in done.items()},
    }


def mean_of(nets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over nets, and the layer that was the most telling one for the first of them."""
    found: dict[str, Any] = {}
    for part in ("auroc", "flagged", "held"):
        names = nets[0][part]
        found[part] = {name: statistics.fmean(net[part][name] for net in nets) for name in names}
    found["layer"] = nets[0]["layer"]
    return found
