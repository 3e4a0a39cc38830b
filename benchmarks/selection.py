"""Choosing new rows from a large pool: time, peak memory, agreement with dense recomputation.

Run as a module (``python -m benchmarks.selection rows width picks number threads``, with the place
of the objective in `OBJECTIVES`) it chooses once and prints seconds and the peak of memory.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

import rigidities as rg
from benchmarks.frame.apart import measured_apart, peak_bytes
from benchmarks.frame.results import Row, at_most, for_information
from benchmarks.frame.timing import clocked
from rigidities import selection

OBJECTIVES: tuple[selection.Objective, ...] = ("logdet", "variance")
LARGEST_ERROR = 1e-9


def run(*, quick: bool = False) -> list[Row]:
    """200 of 100,000 candidates at width 256, with each objective; then a small pool, densely."""
    rows, width, picks = (2_000, 16, 10) if quick else (100_000, 256, 200)
    table = []
    for objective in OBJECTIVES:
        table += timed_rows(rows, width, picks, objective)
    for objective in OBJECTIVES:
        table.append(agreement_row(objective))
    return table


def timed_rows(rows: int, width: int, picks: int, objective: selection.Objective) -> list[Row]:
    """Seconds and peak memory of one choice, in a process of its own."""
    number = OBJECTIVES.index(objective)
    figures = measured_apart("benchmarks.selection", rows, width, picks, number)
    name = f"{picks} of {rows:,} candidates, width {width}, {objective}"
    pool_gib = 4 * rows * (width + 1) / 2**30
    return [
        at_most(f"{name}: time", figures["seconds"], 60, "s", **figures),
        for_information(
            f"{name}: peak memory of the process",
            figures["bytes"] / 2**30,
            "GiB",
            note=f"the pool in float32 takes {pool_gib:.2f} GiB of it, its whitened float64 copy "
            "twice as much",
        ),
    ]


def pool_and_posterior(rows: int, width: int, seed: int = 0) -> tuple[Tensor, rg.Posterior]:
    """Float32 features with a bias column, whose singular values span three decades."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator) * torch.logspace(0, -3, width)
    training_rows = 4 * width
    features = torch.ones(rows + training_rows, width + 1)
    features[:, :-1] = torch.randn(rows + training_rows, width, generator=generator) @ mixing
    gram = rg.Gram(width + 1)
    gram.update(features[rows:])
    ridge = 1e-6 * float(gram.diagonal.mean())
    return features[:rows], rg.Posterior.from_gram(gram, ridge=ridge)


def agreement_row(objective: selection.Objective) -> Row:
    """Largest relative error of the gains against a Gram factorised anew after each pick."""
    pool, posterior = pool_and_posterior(500, 24)
    chosen = selection.greedy(posterior, pool, 30, objective=objective)
    features = pool.double()
    basis = posterior.eigenvectors
    matrix = basis @ (posterior.precisions[:, None] * basis.mT)
    values = [goodness(matrix, features, objective)]
    for f in features[chosen.indices]:
        matrix = matrix + torch.outer(f, f)
        values.append(goodness(matrix, features, objective))
    gains = torch.stack(values).diff()
    error = float((chosen.gains / gains - 1).abs().max())
    work = f"gains of 30 picks, {objective}, against dense recomputation"
    return at_most(work, error, LARGEST_ERROR, "relative")


def goodness(matrix: Tensor, features: Tensor, objective: selection.Objective) -> Tensor:
    """Half the log-determinant, or minus the sum of all variances."""
    if objective == "logdet":
        return torch.logdet(matrix) / 2
    return -(features * torch.linalg.solve(matrix, features.mT).mT).sum()


def main(rows: int, width: int, picks: int, number: int, threads: int) -> None:
    """One choice; prints its seconds and the peak of memory."""
    torch.set_num_threads(threads)
    objective = OBJECTIVES[number]
    pool, posterior = pool_and_posterior(rows, width)
    selection.greedy(posterior, pool[:1000], 2, objective=objective)  # loads what is loaded once
    seconds = clocked(lambda: selection.greedy(posterior, pool, picks, objective=objective))
    print(json.dumps({"seconds": seconds, "bytes": peak_bytes()}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
