"""How good the error bars of clusters' energies and forces are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import rigidities as rg
from experiments.atoms.batches import Batch
from experiments.judging import scores
from experiments.studies.qm9 import cluster_nets as nets
from rigidities import metrics

Found = dict[str, Any]

QUANTITIES = ("energy", "forces")
LEVELS = (0.68, 0.9, 0.95)
"""Of the intervals whose coverage is given."""

DRAWS = 4
"""Ensembles that are compared with the exact bars."""


@dataclass(frozen=True)
class Bars:
    """Predictions, error bars and the truth of one quantity, each (N,)."""

    mean: Tensor
    std: Tensor
    target: Tensor


def judged(
    uq: rg.LastLayerRigidity,
    criterion: str,
    valid: Sequence[Batch],
    tests: Mapping[str, Sequence[Batch]],
    bins: Mapping[str, int],
    *,
    shown: bool,
) -> Found:
    """Calibrate in one way, and judge energies and forces of all families.

    Args:
        uq: fitted.
        criterion: of the calibration.
        valid: the clusters for it.
        tests: those of each family.
        bins: rows of a bin of either quantity.
        shown: whether the figures show it.

    Returns:
        "families" with the scores of either quantity, and what was "chosen".
    """
    rank = nets.calibrate(uq, valid, criterion).effective_rank
    flat = {what: metrics.rmse(one.mean, one.target) for what, one in bars(uq, valid).items()}
    families = {
        name: {
            what: scored(one, flat[what], bins[what], shown=shown)
            for what, one in bars(uq, batches).items()
        }
        for name, batches in tests.items()
    }
    chosen = {"ridge": uq.ridge, "scale": uq.scale, "gradient_scale": uq.gradient_scale}
    return {
        "families": families,
        "chosen": {name: float(value) for name, value in chosen.items()}
        | {"effective_rank": float(rank), "constant": flat},
    }


def bars(uq: rg.LastLayerRigidity, batches: Sequence[Batch]) -> dict[str, Bars]:
    """Energies and forces; a derivative and its force differ in sign, their bars do not."""
    inputs = nets.bare(batches)
    energy, slope = uq.predict(inputs), uq.gradient(inputs, wrt="positions", members=0)
    found = {
        "energy": (energy.mean, energy.std, nets.joined(batches, "y")),
        "forces": (-slope.mean, slope.std, -nets.joined(batches, "slope")),
    }
    return {what: Bars(*(part.flatten().cpu() for part in of)) for what, of in found.items()}


def scored(of: Bars, constant: float, bin_size: int, *, shown: bool) -> Found:
    """Scores beside a constant bar's, and the numbers of the figures where they are shown."""
    rows = of.mean, of.std, of.target
    found = scores.beside_constant(*rows, constant, bin_size)
    for one, std in ((found, of.std), (found["constant"], torch.full_like(of.std, constant))):
        one["scores"]["bar"] = float(std.square().mean().sqrt())
        for level in LEVELS:
            name = f"coverage_{100 * level:.0f}"
            one["scores"][name] = metrics.coverage(of.mean, std, of.target, level)
    if shown:
        found |= {"bins": scores.bins(*rows, bin_size), "points": scores.points(*rows)}
    return found


def growth(families: Found) -> Found:
    """How many times the bars and errors of far families are those of the training's.

    "share" is the one over the other: below 1 where bars grow less than errors.
    """
    return {
        name: {what: _grown(one[what], families["like"][what]) for what in QUANTITIES}
        for name, one in families.items()
        if name != "like"
    }


def _grown(far: Found, near: Found) -> dict[str, float]:
    bar, rmse = (far["scores"][k] / near["scores"][k] for k in ("bar", "rmse"))
    return {"bar": bar, "rmse": rmse, "share": bar / rmse}


def of_members(
    uq: rg.LastLayerRigidity, batches: Sequence[Batch], members: int, seed: int
) -> Found:
    """Relative errors of the bars that members give, each differentiated by itself.

    Members have the energies' scale, so that it is taken for the exact bars too.
    """
    inputs = nets.bare(batches)
    exact = uq.gradient(inputs, wrt="positions", members=0)
    std = exact.std * (uq.scale / uq.gradient_scale)
    errors = []
    for draw in range(DRAWS):
        ensemble = uq.ensemble(members, generator=torch.Generator().manual_seed(seed + draw))
        slopes = torch.cat([member_slopes(ensemble, batch) for batch in inputs], dim=1)
        spread = (slopes - exact.mean).square().mean(0).sqrt()
        errors.append(float((spread / std - 1).square().mean().sqrt()))
    return {
        "error": sum(errors) / DRAWS,
        "error_of_each": errors,
        "expected": (2 * members) ** -0.5,
        "components": std.numel(),
    }


def member_slopes(ensemble: rg.Ensemble, batch: Batch) -> Tensor:
    """Derivatives of every member by the positions, (members, A, 3).

    A member is the net with other readouts: the deviations hold those of one species after another.
    """
    net = ensemble.model
    heads = {name: p for name, p in net.named_parameters() if "readouts" in name}
    parts = ensemble.deviations.split([head.shape[1] for head in heads.values()], dim=2)
    weights = {name: heads[name].detach() + d for name, d in zip(heads, parts, strict=True)}

    def energy(readouts: dict[str, Tensor], moving: Tensor) -> Tensor:
        inputs = {**batch, "positions": moving}
        found: Tensor = torch.func.functional_call(net, readouts, kwargs=inputs).sum()
        return found

    slope = torch.func.vmap(torch.func.grad(energy, argnums=1), in_dims=(0, None))
    found: Tensor = slope(weights, batch["positions"])
    return found.detach()
