"""Several fits to different rows with one model: whether they can become one fit, and that fit.

A fit keeps sums, the lowest hashes and the rows of lowest hash. All of these can be merged, so
the parts of a data set, fitted apart, give the fit to the whole, in any order. `REMEDIES` lists the
properties that the parts must agree in, `require_alike` and `require_apart` refuse parts that do
not belong together, and `combined` merges the parts of the processes of a job.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeVar

from ..calibration.rows import RowCollector
from ..notices import notify
from ..statistics.row_sketch import RowSketch
from ..statistics.statistics import Statistics

P = TypeVar("P", Statistics, RowCollector)

REMEDIES = {
    "weights": (
        "Load the same weights into every model first. In a job where batch norms have different "
        "statistics on each process, first call torch.distributed.broadcast(buffer, src=0) for "
        "every buffer of model.buffers()"
    ),
    "readout": "Name the same layer=, forward= and output= everywhere",
    "novelty": "Fit all parts with novelty=True or none of them, from batches of one form",
    "loss": "Fit every part with the same loss= and weights",
    "precision": "Fit every part with the same precision=",
    "sample": "Use the same keep_rows= for every part",
    "options": "Make the call with the same options everywhere",
    "rows": "First fit, load or merge the same data on every process",
    "calibration": "First calibrate together on all processes",
    "data": "Pass batches of one kind to every part",
}
"""The properties in which parts must agree, and what to do where they do not."""

UNJUDGED = (
    "It was not possible to check whether {} share rows: outputs have no input row of their own "
    "(atoms of structures), or batches are objects. Make sure that each row is in only one of "
    "them."
)


def require_alike(properties: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Refuse parts whose properties differ.

    Args:
        properties: The properties of each part, by the names in `REMEDIES`.
        names: What errors call the parts.

    Raises:
        ValueError: Two parts differ in a property.
    """
    for property_name, remedy in REMEDIES.items():
        first = properties[0].get(property_name)
        for part_properties, name in zip(properties, names, strict=True):
            other = part_properties.get(property_name)
            if first != other:
                raise ValueError(
                    f"{names[0]} and {name} differ in their {property_name}: "
                    f"{_difference(first, other)}. They cannot be merged into one fit. {remedy}."
                )


def _difference(first: Any, other: Any) -> str:
    """Two values as text; of dictionaries, only the entries that differ."""
    if isinstance(first, dict) and isinstance(other, dict):
        keys = [key for key in first.keys() | other.keys() if first.get(key) != other.get(key)]
        keys.sort()
        first = {key: first.get(key) for key in keys}
        other = {key: other.get(key) for key in keys}
    return f"{first!r} and {other!r}"


def as_text(value: Any) -> str:
    """A value as text that is the same on every process: functions without their addresses."""
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", repr(value))


def require_apart(sketches: Mapping[str, RowSketch]) -> None:
    """Refuse parts that share a row, as far as the sketches of their rows tell.

    Args:
        sketches: The sketches, by what errors call the parts.

    Raises:
        ValueError: Two parts share rows.
    """
    if any(sketch.limit == 0 for sketch in sketches.values()):
        notify(UNJUDGED.format("the parts"))
        return
    for (name, sketch), (other_name, other_sketch) in combinations(sketches.items(), 2):
        shared, _, judged = sketch.overlap(other_sketch)
        if shared:
            share = min(sketch.share, other_sketch.share)
            raise ValueError(
                f"{name} and {other_name} share rows: {shared} of the {judged} rows of "
                f"{other_name} whose hashes can be compared ({share:.1%} of all). Merge parts "
                "that have no row in common. If the data really repeat rows, pass check=False "
                "(--allow-overlap)."
            )


def combined(shares: Iterable[P | None], *, silent: bool = False) -> P | None:
    """The rows of all processes as one object; None where no process had data.

    Args:
        shares: The rows of each process, in the order of ranks; None where it had no data. The
            first share that is not None is written to.
        silent: Whether to leave warnings to another process, which has the same shares.

    Raises:
        ValueError: Half of a process's rows, or more, are also in the data of others.
    """
    whole: P | None = None
    repeated = 0
    unjudged = False
    for rank, share in enumerate(shares):
        if share is None:
            continue
        if whole is None:
            whole = share
            continue
        shared, shared_once, judged = whole.sketch.overlap(share.sketch)
        # Rows that repeat within one process too come from data that repeat rows anyway.
        if shared_once > 1 and 2 * shared_once >= judged:
            raise ValueError(
                f"{shared} of {judged} rows of rank {rank} (of those compared by hash) are also "
                "in the data of other ranks. Give every process its own rows: "
                "(x[rank::ranks], y[rank::ranks]) of tensors, or "
                "torch.utils.data.Subset(data, range(rank, len(data), ranks)) of a data set. To "
                "process all rows in this process alone, pass process_group=False. If the data "
                "really repeat rows, fit each part that way and merge the parts with check=False."
            )
        repeated += shared
        if whole.sketch.limit == 0 or share.sketch.limit == 0:
            unjudged = True
        whole.merge(share)
    if silent:
        return whole
    if unjudged:
        notify(UNJUDGED.format("processes"))
    if repeated:
        notify(
            f"Some rows ({repeated}, compared by hash) are in the data of several processes and "
            "count more than once. That is correct if the data really repeat them. If a sampler "
            "pads its data, pass torch.utils.data.Subset(data, range(rank, len(data), ranks)) "
            "instead."
        )
    return whole
