"""Domains of a set: which rows a network may learn from, so that others lie outside.

Three kinds of domains leave out a quarter of the rows along one input, a quarter along the first
principal direction of the inputs, or a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experiments.data import california, uci
from experiments.data.benchmark import Samples, standardised
from experiments.data.splits import stacked

SETS = (
    *("concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht"),
    "california",
)
"""Sets that are divided into domains."""

OUTSIDE = 0.25
"""Share of the rows beyond a threshold, as nearly as equal values allow."""

CLUSTERS = 5
"""Clusters of a set, of which one is left out."""

SMALLEST = 0.05
"""The smallest share of the rows that may be left out."""

LARGEST = 0.4
"""The largest share of the rows that may be left out."""

KINDS = ("input", "principal direction", "cluster")
"""Kinds of domains."""

PARTS = (0.7, 0.15)
"""Shares of a domain's rows for training and validation; the others are test rows inside."""

ROWS = 6000
"""Rows of a set at most; they are drawn at random where it has more."""


@dataclass(frozen=True)
class Domain:
    """Some rows of a set.

    Attributes:
        kind: One of `KINDS`.
        name: What is left out, such as "input 3, upper".
        inside: Which rows lie in the domain, (n,).
    """

    kind: str
    name: str
    inside: np.ndarray


def read(name: str) -> uci.Rows | california.Rows:
    """A UCI set, or "california"."""
    return california.read() if name == "california" else uci.read(name)


def domains(x: np.ndarray, count: int, seed: int) -> list[Domain]:
    """Domains of each kind; upper and lower quarters take turns.

    Args:
        x: Inputs (n, d).
        count: The number of domains of each kind.
        seed: Seed of what is drawn: the order of the inputs, and the clusters' starts.
    """
    rng = np.random.default_rng([seed, 31])
    centre = x.mean(0)
    spread = x.std(0)
    varying = np.flatnonzero(spread > 1e-9 * np.abs(centre))
    z = (x[:, varying] - centre[varying]) / spread[varying]
    _, _, directions = np.linalg.svd(z - z.mean(0), full_matrices=False)
    principal = z @ directions[0]
    order = rng.permutation(z.shape[1])
    results = []
    for k in range(count):
        side = "upper" if k % 2 == 0 else "lower"

        column, inside = _next_input(z, np.roll(order, -k), side)
        results.append(Domain("input", f"input {varying[column]}, {side}", inside))

        principal_inside = below_threshold(principal, side)
        assert principal_inside is not None, "directions of many inputs have no equal values"
        name = f"principal direction, {side}"
        results.append(Domain("principal direction", name, principal_inside))

        labels = clustered(z, CLUSTERS, rng)
        results.append(Domain("cluster", f"cluster {k}", labels != _cluster(labels, rng)))
    return results


def _next_input(z: np.ndarray, order: np.ndarray, side: str) -> tuple[int, np.ndarray]:
    """The first input in an order that has a threshold, and the rows below it.

    An input of a few values may have none.
    """
    for column in order:
        inside = below_threshold(z[:, column], side)
        if inside is not None:
            return int(column), inside
    raise ValueError("Expected an input with a threshold, got none. Use another set.")


def below_threshold(values: np.ndarray, side: str) -> np.ndarray | None:
    """All rows but the upper or lower quarter, (n,); None where equal values allow no such cut.

    Equal values lie on one side.
    """
    signed = values if side == "upper" else -values
    distinct, counts = np.unique(signed, return_counts=True)
    # The share that is left out where each of the distinct values is the last inside.
    left_out = 1 - np.cumsum(counts) / len(values)
    best = int(np.abs(left_out - OUTSIDE).argmin())
    if not SMALLEST < left_out[best] < LARGEST:
        return None
    inside: np.ndarray = signed <= distinct[best]
    return inside


def _cluster(labels: np.ndarray, rng: np.random.Generator) -> int:
    """A cluster that is neither tiny nor most of the set; the smallest where there is none."""
    shares = np.bincount(labels, minlength=CLUSTERS) / len(labels)
    fitting = np.flatnonzero((shares > SMALLEST) & (shares < LARGEST))
    if len(fitting) == 0:
        return int(shares.argmin())
    return int(rng.choice(fitting))


def clustered(z: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Labels (n,) by Lloyd's algorithm from `count` rows drawn at random."""
    centres = z[rng.choice(len(z), count, replace=False)]
    for _ in range(50):
        labels = ((z[:, None] - centres) ** 2).sum(-1).argmin(1)
        for cluster in range(count):
            members = labels == cluster
            if members.any():  # an empty cluster stays where it is
                centres[cluster] = z[members].mean(0)
    return labels


@dataclass(frozen=True)
class Divided:
    """The rows of one network for each domain.

    Attributes:
        domains: One domain a network.
        samples: Training, validation and test rows of every network, standardised by its own
            training rows. The test rows inside come before those outside.
        inside: The number of test rows of each network that lie in its domain.
    """

    domains: list[Domain]
    samples: Samples
    inside: int


def drawn(name: str, count: int, seed: int) -> Divided:
    """Random rows of every domain, cut to the sizes of the smallest.

    Args:
        name: The name of the set.
        count: The number of domains of each kind.
        seed: Seed of the domains and of the rows.
    """
    rows = read(name)
    rng = np.random.default_rng([seed, 32])
    sample = rng.permutation(len(rows.y))[:ROWS]
    all_domains = domains(rows.x[sample], count, seed)

    train_lists = []
    valid_lists = []
    near_lists = []
    far_lists = []
    for domain in all_domains:
        inside = rng.permutation(sample[domain.inside])
        far_lists.append(rng.permutation(sample[~domain.inside]))
        train_share, valid_share = PARTS
        train_end = int(train_share * len(inside))
        valid_end = train_end + int(valid_share * len(inside))
        train_lists.append(inside[:train_end])
        valid_lists.append(inside[train_end:valid_end])
        near_lists.append(inside[valid_end:])

    near = stacked(near_lists)
    test = np.concatenate([near, stacked(far_lists)], axis=1)
    samples = standardised(rows, stacked(train_lists), stacked(valid_lists), test)
    return Divided(all_domains, samples, near.shape[1])
