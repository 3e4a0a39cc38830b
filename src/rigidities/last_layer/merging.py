"""Fits to different rows with one model: whether they can be one fit, and that fit.

What a fit knows of its rows are sums, the rows of lowest hash and a sketch of all hashes, so that
the parts of a data set, fitted apart, give the fit to all of it, in any order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeVar

from ..calibration.residuals import Gathering
from ..data.sketch import RowSketch
from ..notices import notify
from .statistics.statistics import Statistics

P = TypeVar("P", Statistics, Gathering)
REMEDIES = {
    "weights": "Load the same weights into every model first; in a job, where batch norms have "
    "other statistics on each process, pass rigidities.whole(model)",
    "readout": "Name the same layer=, forward= and output= everywhere",
    "novelty": "Fit every part with novelty=True, or none, from batches of one form",
    "loss": "Fit every part with the same loss= and weights",
    "precision": "Fit every part with the same precision=",
    "method": "Fit every part with the same method=",
    "sample": "Keep the same sample= of every part",
    "options": "Call it with the same options everywhere",
    "rows": "Fit, load or merge the same on every process first",
    "calibration": "Calibrate together on all processes first",
    "data": "Give batches of one kind to every part",
}
"""What parts must agree in, and what to do where they do not."""

UNJUDGED = (
    "Whether {} share rows cannot be judged: outputs have no input row of their own (atoms of "
    "structures), or batches are objects. Make sure that each row is in one of them alone."
)


def identity(readout: dict[str, Any], statistics: Statistics, loss: Any) -> dict[str, Any]:
    """What parts must agree in, as JSON holds it; `loss` as a file has it, None for functions."""
    gram, own = statistics.gram, dict(readout)
    return {
        "novelty": _by_name(own.pop("watched", [])),
        "weights": own.pop("fingerprint"),
        "readout": own | {"width": gram.width, "targets": statistics.targets},
        "loss": loss,
        "precision": gram.precision,
        "method": gram.stored,
        "data": [statistics.inputs, statistics.kind],
    }


def _by_name(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Layers that are watched, by their names."""
    return {layer["name"]: layer for layer in layers}


def require_alike(parts: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Refuse parts whose `identity` differs; `names` are what errors call them."""
    for what, remedy in REMEDIES.items():
        for part, name in zip(parts, names, strict=True):
            mine, theirs = parts[0].get(what), part.get(what)
            if mine != theirs:
                raise ValueError(
                    f"{names[0]} and {name} differ in their {what}: {_shown(mine, theirs)}. They "
                    f"cannot be one fit. {remedy}."
                )


def _shown(mine: Any, theirs: Any) -> str:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        keys = [key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key)]
        mine, theirs = ({key: one.get(key) for key in sorted(keys)} for one in (mine, theirs))
    return f"{mine!r} and {theirs!r}"


def named(value: Any) -> str:
    """A value as text; functions by their names, by which different processes know them."""
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", repr(value))


def require_apart(sketches: Mapping[str, RowSketch]) -> None:
    """Refuse parts that share a row, as far as the sketches of their rows tell."""
    if any(sketch.limit == 0 for sketch in sketches.values()):
        notify(UNJUDGED.format("the parts"))
        return
    for (name, mine), (other, theirs) in combinations(sketches.items(), 2):
        shared, _, judged = mine.overlap(theirs)
        if shared:
            share = min(mine.limit, theirs.limit) / (1 << 63)
            raise ValueError(
                f"{name} and {other} share rows: {shared} of the {judged} rows of {other} whose "
                f"hashes can be compared ({share:.1%} of all). Merge parts without a row in "
                "common; pass check=False (--allow-overlap) where the data truly repeat rows."
            )


def combined(parts: Iterable[P | None]) -> P | None:
    """The rows of all processes, in the order of ranks; None where none had data.

    Raises:
        ValueError: half of a process's rows, or more, stand in the data of others too.
    """
    whole, repeated, unjudged = None, 0, False
    for rank, part in enumerate(parts):
        if whole is None or part is None:
            whole = part if whole is None else whole
            continue
        shared, once, judged = whole.sketch.overlap(part.sketch)
        if once > 1 and 2 * once >= judged:  # rows that repeat here too are of such data
            raise ValueError(
                f"{shared} of {judged} rows of rank {rank} (of those judged by their hashes) stand "
                "in the data of other ranks too. Give every process its own rows: "
                "rigidities.shard(data), or a loader with sampler=rigidities.ShardSampler(dataset)."
                " To go through all rows in this process alone, pass process_group=False. If the data "
                "repeat rows, fit each part so, and merge them with check=False."
            )
        repeated += shared
        unjudged = unjudged or whole.sketch.limit == 0 or part.sketch.limit == 0
        whole.merge(part)
    if unjudged:
        notify(UNJUDGED.format("processes"))
    if repeated:
        notify(
            f"Some rows ({repeated} by their hashes) stand in the data of several processes, and "
            "count as often. That is right if the data repeat them; a sampler that pads does so "
            "too: use rigidities.ShardSampler."
        )
    return whole
