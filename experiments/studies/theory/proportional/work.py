"""Is the NTK a constant times the NNGP, and does the variance mind? (paper, Sec. 3.5)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from experiments.frame.outcome import mean_and_error
from experiments.frame.progress import steps
from experiments.studies.theory.nets import generator, rank_correlation, sphere
from rigidities.kernels import FullyConnected, Kernels, gaussian_process_at

FULL = {"rows": 200, "draws": 5, "depths": (1, 2, 3, 4)}
QUICK = {"rows": 40, "draws": 2, "depths": (1, 3)}

ACTIVATIONS = ("erf", "tanh", "sin", "silu", "gelu", "relu")
DIMENSION, TEST, RIDGE = 6, 200, 1e-2

SCATTERED = ("erf", "silu", "relu")
SHOWN_DEPTH = 3
"""Of the scatter and the table."""


def measured(rows: int, draws: int, depths: tuple[int, ...], *, seed: int) -> dict[str, Any]:
    """Constant, rank correlation and spread for every activation and depth."""
    found: dict[str, Any] = {
        "setting": {
            "rows": rows,
            "test": TEST,
            "dimension": DIMENSION,
            "draws": draws,
            "ridge": RIDGE,
        }
    }
    for name in steps(ACTIVATIONS, "activations"):
        found[name] = {}
        for depth in depths:
            runs = [compared(name, depth, rows, generator(seed, draw)) for draw in range(draws)]
            entry = {
                key: mean_and_error([run[key] for run in runs])
                for key in runs[0]
                if key not in {"exact", "last_layer"}
            }
            if depth == SHOWN_DEPTH and name in SCATTERED:
                entry |= {key: runs[0][key] for key in ("exact", "last_layer")}
            found[name][depth] = entry
    return found


def compared(name: str, depth: int, rows: int, source: torch.Generator) -> dict[str, Any]:
    """Exact and last-layer variance of one net on one draw of inputs."""
    net = FullyConnected(depth, name, input_scale=1.0, normalised=True)
    x = sphere(rows + TEST, DIMENSION, source)
    train, cross = net.kernels(x[:rows]), net.kernels(x[rows:], x[:rows])
    own = net.diagonal(x[rows:]).nngp
    constant = float((train.nngp * train.ntk).sum() / train.nngp.square().sum())
    exact = variance(train, cross, own)
    last = variance(Kernels(train.nngp, train.nngp), Kernels(cross.nngp, cross.nngp), own)
    ridge = RIDGE * float(train.nngp.diagonal().mean())
    scaled = [Kernels(k.nngp, constant * k.nngp) for k in (train, cross)]
    softened = with_ridge(train, cross, own, constant * ridge)
    replaced = with_ridge(*scaled, own, constant * ridge)
    inverse = torch.linalg.inv(train.nngp + ridge * torch.eye(rows, dtype=torch.float64))
    paper = own - ((cross.nngp @ inverse) * cross.nngp).sum(1)
    distance = (train.ntk - constant * train.nngp).norm() / train.ntk.norm()
    return {
        "constant": constant,
        "misfit": float(distance),
        **comparison("", exact, last),
        **comparison("ridge_", softened, replaced),
        **comparison("inserted_", softened, paper),
        "exact": exact,
        "last_layer": last,
    }


def variance(train: Kernels, cross: Kernels, own: Tensor) -> Tensor:
    """At t = infinity; the targets do not matter."""
    return gaussian_process_at(
        math.inf,
        ntk=(train.ntk, cross.ntk),
        nngp=(train.nngp, cross.nngp, own),
        targets=torch.zeros(len(train.ntk)),
    ).variance


def with_ridge(train: Kernels, cross: Kernels, own: Tensor, ridge: float) -> Tensor:
    """The four terms with K_NTK + ridge in place of K_NTK."""
    a = torch.linalg.solve(
        train.ntk + ridge * torch.eye(len(train.ntk), dtype=torch.float64), cross.ntk.mT
    ).mT
    return own + ((a @ train.nngp - 2 * cross.nngp) * a).sum(1)


def comparison(prefix: str, exact: Tensor, approximate: Tensor) -> dict[str, float]:
    """Order, and mean and spread of the ratio."""
    ratio = (exact / approximate).log()
    return {
        f"{prefix}spearman": rank_correlation(exact, approximate),
        f"{prefix}spread": float(ratio.std()),
        f"{prefix}shift": float(ratio.mean()),
    }
