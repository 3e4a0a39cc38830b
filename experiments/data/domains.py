"""Domains of a set: which rows a net may learn from, so that others lie outside."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experiments.data import california, uci
from experiments.data.benchmark import Samples, standardised

SETS = (
    *("concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht"),
    "california",
)
"""Sets that are divided into domains."""

OUTSIDE = 0.25
"""Share of the rows beyond a threshold, as nearly as equal values allow."""

CLUSTERS = 5
SMALLEST, LARGEST = 0.05, 0.4
"""Shares of the rows that may be left out."""

KINDS = ("input", "principal direction", "cluster")
PARTS = (0.7, 0.15)
"""Shares of a domain's rows for training and validation; the others are test rows inside."""

ROWS = 6000
"""Of a set, drawn at random where it has more."""


@dataclass(frozen=True)
class Domain:
    """Some rows of a set.

    Attributes:
        kind: one of `KINDS`.
        name: what is left out, such as "input 3, upper".
        inside: which rows lie in it, (n,).
    """

    kind: str
    name: str
    inside: np.ndarray


def read(name: str) -> uci.Rows | california.Rows:
    """A UCI set, or "california"."""
    return california.read() if name == "california" else uci.read(name)


def domains(x: np.ndarray, count: int, seed: int) -> list[Domain]:
    """So many domains of each kind; upper and lower quarters take turns.

    Args:
        x: inputs (n, d).
        count: of each kind.
        seed: of what is drawn: inputs, and the clusters' starts.
    """
    rng = np.random.default_rng([seed, 31])
    centre, spread = x.mean(0), x.std(0)
    varying = np.flatnonzero(spread > 1e-9 * np.abs(centre))
    z = (x[:, varying] - centre[varying]) / spread[varying]
    principal = z @ np.linalg.svd(z - z.mean(0), full_matrices=False)[2][0]
    order = rng.permutation(z.shape[1])
    found = []
    for k in range(count):
        side = "upper" if k % 2 == 0 else "lower"
        # The next input that has a threshold; an input of a few values may have none.
        cuts = ((column, below_threshold(z[:, column], side)) for column in np.roll(order, -k))
        column, inside = next((column, mask) for column, mask in cuts if mask is not None)
        found.append(Domain("input", f"input {varying[column]}, {side}", inside))
        inside = below_threshold(principal, side)
        assert inside is not None, "directions of many inputs have no equal values"
        found.append(Domain("principal direction", f"principal direction, {side}", inside))
        labels = clustered(z, CLUSTERS, rng)
        found.append(Domain("cluster", f"cluster {k}", labels != _cluster(labels, rng)))
    return found


def below_threshold(values: np.ndarray, side: str) -> np.ndarray | None:
    """All rows but the upper or lower quarter, (n,); None where equal values allow no such cut.

    Equal values lie on one side.
    """
    signed = values if side == "upper" else -values
    distinct, counts = np.unique(signed, return_counts=True)
    left_out = 1 - np.cumsum(counts) / len(values)  # with each of the distinct values as the last
    best = int(np.abs(left_out - OUTSIDE).argmin())
    if not SMALLEST < left_out[best] < LARGEST:
        return None
    inside: np.ndarray = signed <= distinct[best]
    return inside


def _cluster(labels: np.ndarray, rng: np.random.Generator) -> int:
    """One that is neither tiny nor most of the set; the smallest where there is none."""
    shares = np.bincount(labels, minlength=CLUSTERS) / len(labels)
    fitting = np.flatnonzero((shares > SMALLEST) & (shares < LARGEST))
    return int(rng.choice(fitting)) if len(fitting) else int(shares.argmin())


def clustered(z: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Labels (n,) by Lloyd's algorithm from `count` rows drawn at random."""
    centres = z[rng.choice(len(z), count, replace=False)]
    for _ in range(50):
        labels = ((z[:, None] - centres) ** 2).sum(-1).argmin(1)
        centres = np.stack(
            [z[labels == c].mean(0) if (labels == c).any() else centres[c] for c in range(count)]
        )
    return labels


@dataclass(frozen=True)
class Divided:
    """The rows of one net for each domain.

    Attributes:
        domains: one a net.
        samples: training, validation and test rows of every net, standardised by its own training
            rows; the test rows inside come before those outside.
        inside: how many test rows of each net lie in its domain.
    """

    domains: list[Domain]
    samples: Samples
    inside: int


def drawn(name: str, count: int, seed: int) -> Divided:
    """Random rows of every domain, cut to the sizes of the smallest."""
    rows = read(name)
    rng = np.random.default_rng([seed, 32])
    some = rng.permutation(len(rows.y))[:ROWS]
    found = domains(rows.x[some], count, seed)
    parts: list[list[np.ndarray]] = [[], [], [], []]
    for domain in found:
        near = rng.permutation(some[domain.inside])
        far = rng.permutation(some[~domain.inside])
        ends = np.cumsum([int(share * len(near)) for share in PARTS])
        for part, places in zip(parts, [*np.split(near, ends), far], strict=True):
            part.append(places)
    lists = [np.stack([one[: min(map(len, part))] for one in part]) for part in parts]
    train, valid, near, far = lists
    test = np.concatenate([near, far], axis=1)
    return Divided(found, standardised(rows, train, valid, test), near.shape[1])
