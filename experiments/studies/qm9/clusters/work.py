"""Error bars of energies and forces of clusters: one net a seed, judged near and far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

import rigidities as rg
from experiments.atoms import composition
from experiments.atoms.batches import Batch
from experiments.atoms.fitting import PROTOCOL
from experiments.atoms.positions import FromPositions
from experiments.frame.outcome import Found, mean_and_error
from experiments.judging import scores
from experiments.judging.scores import Rows
from experiments.studies.qm9.clusters import nets
from experiments.studies.qm9.clusters.structures import (
    FAMILIES,
    LEAST,
    SPECIES,
    STRAIN,
    Labelled,
    clusters,
)
from experiments.training.protocol import device
from rigidities import metrics

QUICK = {
    "seeds": 2,
    "train": 12,
    "valid": 8,
    "test": 6,
    "epochs": 8,
    "force_bin": 50,
    "energy_bin": 3,
}
FULL = {
    "seeds": 3,
    "train": 500,
    "valid": 250,
    "test": 250,
    "epochs": 250,
    "force_bin": 100,
    "energy_bin": 25,
}
"""Nets; clusters (of the test: of each family); epochs; rows of a bin of the scores."""

BATCH = 8
"""Clusters of a training batch."""

CHUNK = 32
"""Clusters of a validation batch."""

ON_CPU, ELSEWHERE = 2, 64
"""Clusters differentiated at once: of few, forward mode takes least work; many fill a GPU."""

MEMBERS = 64
COMPARED = 4
"""Batches whose exact bars are compared with those of members."""

WAYS = {
    "nll": (True, "nll"),
    "by_bins": (True, "bins"),
    "evidence": (True, "evidence"),
    "energies_only": (False, "nll"),
}
"""Error bars: whether forces entered the Gram, and the criterion that chose ridge and scale."""

POINTS = 500
SHOWN = "nll"
"""In the figures."""


def measured(
    *, seed: int, train: int, valid: int, test: int, epochs: int, force_bin: int, energy_bin: int
) -> Found:
    """Train one net and judge its error bars; in eV and eV per angstrom.

    Args:
        seed: of clusters, first weights and batches.
        train: clusters to train on.
        valid: clusters that choose weights, ridge and scales.
        test: clusters of each family.
        epochs: of the training.
        force_bin: components of a bin of the scores.
        energy_bin: clusters of a bin of the scores.

    Returns:
        "families", of each the scores of "energy" and "forces" by every way; what was "chosen";
        "growth" of bars and errors from the training's family to others; the "loss" of the
        validation clusters and the "gram", each with the share of the forces; "members" beside the
        exact bars; the best "epoch"; "settings".
    """
    own, where = 1000 * seed, device()
    size = ON_CPU if where.type == "cpu" else ELSEWHERE
    learnt, checked = (clusters(FAMILIES["like"], n, own + k) for k, n in ((1, train), (2, valid)))
    baseline = composition.fitted(learnt.structures, learnt.energy, SPECIES)

    def prepared(data: Labelled, size: int = size) -> list[Batch]:
        return nets.moved(nets.batches(data, baseline, size), where)

    protocol = replace(PROTOCOL, epochs=epochs, batch=BATCH)
    trained = nets.trained(prepared(learnt, BATCH), prepared(checked, CHUNK), own, protocol)
    net = trained.net.to(where)
    rows, calibrating = prepared(learnt), prepared(checked)
    tests = {
        name: prepared(clusters(family, test, own + 3 + k))
        for k, (name, family) in enumerate(FAMILIES.items())
    }
    fits = {forces: nets.fitted(net, rows, forces=forces) for forces in (True, False)}
    bins = {"energy": energy_bin, "forces": force_bin}
    ways = {
        way: judged(fits[forces], criterion, calibrating, tests, bins, shown=way == SHOWN)
        for way, (forces, criterion) in WAYS.items()
    }
    return {
        "families": {name: _by_quantity(ways, name) for name in FAMILIES},
        "chosen": {way: one["chosen"] for way, one in ways.items()},
        "growth": {way: growth(one["families"]) for way, one in ways.items()},
        "loss": _loss(net, calibrating),
        "gram": _gram(fits),
        "members": of_members(fits[True], tests["like"][:COMPARED], MEMBERS, own),
        "epoch": trained.epoch,
        "settings": _settings(train, valid, test, epochs, bins, net),
    }


def together(nets: Sequence[Found]) -> Found:
    """Of all seeds: [mean, standard error] of every number; figures show the first seed.

    Adds "differences" of the scores, seed by seed: of the bins' criterion, and of a Gram without
    forces, from the main way.
    """
    kept = {"settings": {**nets[0]["settings"], "seeds": len(nets)}}
    return {**_averaged([{k: net[k] for k in net if k != "settings"} for net in nets]), **kept} | {
        "differences": {
            way: {
                name: {what: _difference(nets, name, what, way) for what in QUANTITIES}
                for name in FAMILIES
            }
            for way in WAYS
            if way != SHOWN
        }
    }


def _difference(nets: Sequence[Found], name: str, what: str, way: str) -> Found:
    one, other = ([net["families"][name][what][w]["scores"] for net in nets] for w in (way, SHOWN))
    return scores.paired(one, other)


def _averaged(repeated: Sequence[Any]) -> Any:
    """The same nest of mappings; single draws and what figures show are those of the first."""
    first = repeated[0]
    if isinstance(first, Mapping):
        return {
            key: _shown(key, value)
            if key in ("bins", "points", "error_of_each")
            else _averaged([one[key] for one in repeated])
            for key, value in first.items()
        }
    return list(mean_and_error(repeated))


def _shown(key: str, value: Any) -> Any:
    """At most `POINTS` single errors, evenly taken: more would make large files."""
    if key != "points":
        return value
    step = -(-len(value["std"]) // POINTS)
    return {**value, **{name: value[name][::step] for name in ("std", "error")}}


def _by_quantity(ways: Found, name: str) -> Found:
    """Scores of one family: by quantity, then by way."""
    return {
        what: {way: one["families"][name][what] for way, one in ways.items()} for what in QUANTITIES
    }


def _loss(net: FromPositions, valid: Sequence[Batch]) -> Found:
    """The two terms of the validation loss."""
    energies, forces = nets.mean_terms(net, valid)
    return {"energies": energies, "forces": forces, "share": forces / (energies + forces)}


def _gram(fits: Mapping[bool, rg.LastLayerRigidity]) -> Found:
    """The traces that energies and forces give to the Gram."""
    both, energies = (float(fits[forces].gram.diagonal.sum()) for forces in (True, False))
    return {"energies": energies, "forces": both - energies, "share": 1 - energies / both}


def _settings(
    train: int, valid: int, test: int, epochs: int, bins: Found, net: FromPositions
) -> Found:
    """All that the page names."""
    return {
        "train": train,
        "valid": valid,
        "test": test,
        "epochs": epochs,
        "bins": bins,
        "batch": BATCH,
        "rate": PROTOCOL.rate,
        "decay": PROTOCOL.decay,
        "layers": len(PROTOCOL.hidden),
        "width": PROTOCOL.hidden[0],
        "features": len(SPECIES) * PROTOCOL.hidden[-1],
        "inputs": len(net.net.level),
        "beta": nets.BETA,
        "soap": nets.SOAP.parameters(),
        "strain": STRAIN,
        "least": LEAST,
        "families": {name: asdict(family) for name, family in FAMILIES.items()},
        "members": MEMBERS,
        "draws": DRAWS,
        "levels": LEVELS,
    }


QUANTITIES = ("energy", "forces")
LEVELS = (0.68, 0.9, 0.95)
"""Of the intervals whose coverage is given."""

DRAWS = 4
"""Ensembles that are compared with the exact bars."""


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


def bars(uq: rg.LastLayerRigidity, batches: Sequence[Batch]) -> dict[str, Rows]:
    """Energies and forces; a derivative and its force differ in sign, their bars do not."""
    inputs = nets.bare(batches)
    energy, slope = uq.predict(inputs), uq.gradient(inputs, wrt="positions", members=0)
    found = {
        "energy": (energy.mean, energy.std, nets.joined(batches, "y")),
        "forces": (-slope.mean, slope.std, -nets.joined(batches, "slope")),
    }
    return {what: Rows(*(part.flatten().cpu() for part in of)) for what, of in found.items()}


def scored(rows: Rows, constant: float, bin_size: int, *, shown: bool) -> Found:
    """Scores beside a constant bar's, and the numbers of the figures where they are shown."""

    def more(std: Tensor) -> dict[str, float]:
        return {"bar": float(std.square().mean().sqrt())} | {
            f"coverage_{100 * level:.0f}": metrics.coverage(rows.mean, std, rows.target, level)
            for level in LEVELS
        }

    found = scores.beside_constant(*rows, constant, bin_size, more)
    return found | scores.pictured(*rows, bin_size) if shown else found


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
