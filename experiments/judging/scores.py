"""How good error bars are, beside a constant one: the numbers that every experiment gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.frame.outcome import mean_and_error
from rigidities import metrics

POINTS = 1500
"""Rows that a scatter plot shows: more would hide one another."""


def scores(mean: Tensor, std: Tensor, target: Tensor, bin_size: int) -> dict[str, float]:
    """Of error bars. `offset` is the mean over bins of log10(MSE / variance), with its sign."""
    variance, mse = metrics.binned(mean, std, target, bin_size)
    return {
        "rmse": metrics.rmse(mean, target),
        "nll": metrics.nll(mean, std, target),
        "crps": metrics.crps(mean, std, target),
        "binned_log_ratio": metrics.binned_log_ratio(mean, std, target, bin_size),
        "offset": float((mse / variance).log10().mean()),
        "ence": metrics.ence(mean, std, target, bins=len(variance)),
        "coverage": metrics.coverage(mean, std, target),
        "slope": metrics.slope(mean, std, target, bin_size),
        "decades": metrics.decades(std, bin_size),
        "spearman": metrics.spearman(mean, std, target),
    }


def beside_constant(
    mean: Tensor, std: Tensor, target: Tensor, constant: float, bin_size: int
) -> dict[str, Any]:
    """The scores of the bars and of a constant one, with the gain in NLL over it."""
    flat = torch.full_like(std, constant)
    own, other = (scores(mean, bar, target, bin_size) for bar in (std, flat))
    return {"scores": {**own, "gain": other["nll"] - own["nll"]}, "constant": {"scores": other}}


def bins(mean: Tensor, std: Tensor, target: Tensor, bin_size: int) -> dict[str, Any]:
    """The binned plot's numbers."""
    variance, mse = metrics.binned(mean, std, target, bin_size)
    return {"bin_size": bin_size, "variance": variance, "mse": mse}


def points(mean: Tensor, std: Tensor, target: Tensor, seed: int = 0) -> dict[str, Any]:
    """The scatter plot's numbers, for at most `POINTS` rows drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(std), generator=generator)[:POINTS].sort().values
    return {"std": std[rows], "error": (target - mean).abs()[rows], "rows": len(std)}


def over_seeds(repeated: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """[mean, standard error] of every score over repetitions."""
    return {name: list(mean_and_error([one[name] for one in repeated])) for name in repeated[0]}


def paired(
    repeated: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]
) -> dict[str, list[float]]:
    """[mean, standard error] of the differences, repetition by repetition."""
    differences = [{k: a[k] - b[k] for k in a} for a, b in zip(repeated, other, strict=True)]
    return over_seeds(differences)
