"""Deep ensembles on a set, trained on all rows of the published training lists."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from experiments.baselines import deep_ensemble
from experiments.data import uci
from experiments.studies.uci.samples import (
    OFFICIAL,
    divisions,
    standardised,
    test_lists,
    training_lists,
    width,
)
from rigidities import metrics

PROTOCOLS = {"deep_ensemble": deep_ensemble.OWN, "deep_ensemble_400": deep_ensemble.LONG}


def measured(
    name: str, *, method: str, splits: int, seed: int, epochs: int | None = None
) -> dict[str, Any]:
    """Ensembles of five on the published splits.

    Args:
        name: of the set.
        method: "deep_ensemble" or "deep_ensemble_400": whose protocol.
        splits: how many.
        seed: of the nets.
        epochs: instead of the protocol's.

    Returns:
        ``methods`` as `experiments.studies.uci.nets.measured` has them, and ``seconds``.
    """
    start = time.monotonic()
    rows = uci.read(name)
    found = divisions(rows, splits, OFFICIAL, seed)
    samples = standardised(rows, training_lists(found), test_lists(found))
    members = deep_ensemble.MEMBERS
    x, y = (part.repeat_interleave(members, 0) for part in samples.parts[0])
    seeds = range(seed, seed + splits * members)
    protocol = replace(PROTOCOLS[method], hidden=(width(name),))
    protocol = replace(protocol, epochs=epochs or protocol.epochs)
    stack = deep_ensemble.trained((x, y), protocol, seeds, f"{name}, {method}")
    mean, variance = deep_ensemble.predicted(stack, samples.parts[1][0])
    target = samples.parts[1][1][..., 0].double()
    pairs = list(zip(mean, variance.sqrt(), target, strict=True))
    nll = [metrics.nll(m, std, y) for m, std, y in pairs]
    rmse = [metrics.rmse(m, y) for m, _, y in pairs]
    scores = {
        "rmse": [value * unit for value, unit in zip(rmse, samples.unit.tolist(), strict=True)],
        "nll": [value + unit for value, unit in zip(nll, samples.unit.log().tolist(), strict=True)],
    }
    return {"methods": {method: scores}, "seconds": time.monotonic() - start}
