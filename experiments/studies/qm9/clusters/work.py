"""Error bars of energies and forces of clusters: one network a seed, judged near and far.

`measured` trains one network, fits its error bars with and without the forces, calibrates them in
several ways (`WAYS`) and judges each on clusters like the training and on three other families.
`together` averages over the seeds.
"""

from __future__ import annotations

import math
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
"""Number of networks; clusters (of the test: of each family); epochs; rows of a bin."""

BATCH = 8
"""Clusters of a training batch."""

CHUNK = 32
"""Clusters of a validation batch."""

ON_CPU = 2
ON_GPU = 64
"""Clusters differentiated at once: of few, forward mode takes least work; many fill a GPU."""

MEMBERS = 64
"""Members of the ensembles that are compared with the exact bars."""

DRAWS = 4
"""Ensembles that are compared with the exact bars."""

COMPARED = 4
"""Batches whose exact bars are compared with those of members."""

QUANTITIES = ("energy", "forces")

LEVELS = (0.68, 0.9, 0.95)
"""Of the intervals whose coverage is given."""

WAYS = {
    "nll": (True, rg.Paper()),
    "by_bins": (True, rg.Paper(criterion="bins")),
    "evidence": (True, rg.Paper(criterion="evidence")),
    "energies_only": (False, rg.Paper()),
}
"""Error bars: whether forces entered the Gram, and the method that chose ridge and scale."""

SHOWN = "nll"
"""The way that the figures show."""

POINTS = 500
"""Single errors that a figure shows at most."""


def measured(
    *, seed: int, train: int, valid: int, test: int, epochs: int, force_bin: int, energy_bin: int
) -> Found:
    """Train one network and judge its error bars; in eV and eV per angstrom.

    Args:
        seed: The seed of clusters, first weights and batches.
        train: Clusters to train on.
        valid: Clusters that choose weights, ridge and scales.
        test: Clusters of each family.
        epochs: Epochs of the training.
        force_bin: Components of a bin of the scores.
        energy_bin: Clusters of a bin of the scores.

    Returns:
        "families", of each the scores of "energy" and "forces" by every way; what was "chosen";
        "growth" of bars and errors from the training's family to others; the "loss" of the
        validation clusters and the "gram", each with the share of the forces; "members" beside the
        exact bars; the best "epoch"; "settings".
    """
    where = device()
    base_seed = 1000 * seed
    train_clusters = clusters(FAMILIES["like"], train, base_seed + 1)
    valid_clusters = clusters(FAMILIES["like"], valid, base_seed + 2)
    test_clusters = {
        name: clusters(family, test, base_seed + 3 + k)
        for k, (name, family) in enumerate(FAMILIES.items())
    }
    baseline = composition.fitted(train_clusters.structures, train_clusters.energy, SPECIES)

    def batches(data: Labelled, size: int) -> list[Batch]:
        return nets.moved(nets.batches(data, baseline, size), where)

    protocol = replace(PROTOCOL, epochs=epochs, batch=BATCH)
    trained = nets.trained(
        batches(train_clusters, BATCH), batches(valid_clusters, CHUNK), base_seed, protocol
    )
    net = trained.net.to(where)

    # Forces need derivatives of the features: other batches than the training's are best.
    size = ON_CPU if where.type == "cpu" else ON_GPU
    train_batches = batches(train_clusters, size)
    valid_batches = batches(valid_clusters, size)
    tests = {name: batches(data, size) for name, data in test_clusters.items()}
    fits = {
        True: nets.fitted(net, train_batches, forces=True),
        False: nets.fitted(net, train_batches, forces=False),
    }
    bins = {"energy": energy_bin, "forces": force_bin}
    judgements = {
        way: judged(fits[forces], method, valid_batches, tests, bins, shown=way == SHOWN)
        for way, (forces, method) in WAYS.items()
    }
    return {
        "families": {name: _by_quantity(judgements, name) for name in FAMILIES},
        "chosen": {way: judgement["chosen"] for way, judgement in judgements.items()},
        "growth": {way: growth(judgement["families"]) for way, judgement in judgements.items()},
        "loss": _loss(net, valid_batches),
        "gram": _gram(fits),
        "members": of_members(fits[True], tests["like"][:COMPARED], MEMBERS, base_seed),
        "epoch": trained.epoch,
        "settings": _settings(train, valid, test, epochs, bins, net),
    }


def together(networks: Sequence[Found]) -> Found:
    """The numbers of all seeds: [mean, standard error] of each; figures show the first seed.

    Adds "differences" of the scores of the other ways from the main one, seed by seed.

    Args:
        networks: What `measured` gives, for each seed.
    """
    without_settings = [
        {key: value for key, value in network.items() if key != "settings"} for network in networks
    ]
    averages: Found = _averaged(without_settings)
    averages["settings"] = {**networks[0]["settings"], "seeds": len(networks)}
    averages["differences"] = {way: _differences(networks, way) for way in WAYS if way != SHOWN}
    return averages


def _differences(networks: Sequence[Found], way: str) -> Found:
    """Scores of one way less those of the main one, seed by seed: by family and quantity."""
    differences: Found = {}
    for name in FAMILIES:
        differences[name] = {}
        for quantity in QUANTITIES:
            blocks = [network["families"][name][quantity] for network in networks]
            differences[name][quantity] = scores.paired(
                [block[way]["scores"] for block in blocks],
                [block[SHOWN]["scores"] for block in blocks],
            )
    return differences


def _averaged(repetitions: Sequence[Any]) -> Any:
    """The same nest of mappings, averaged; what figures show is that of the first repetition."""
    first = repetitions[0]
    if not isinstance(first, Mapping):
        return list(mean_and_error(repetitions))
    averages = {}
    for key, value in first.items():
        if key == "points":
            averages[key] = _some_points(value)
        elif key in ("bins", "error_of_each"):
            averages[key] = value
        else:
            averages[key] = _averaged([repetition[key] for repetition in repetitions])
    return averages


def _some_points(points: Found) -> Found:
    """At most `POINTS` single errors, evenly taken: more would make large files."""
    step = math.ceil(len(points["std"]) / POINTS)
    return {**points, "std": points["std"][::step], "error": points["error"][::step]}


def _by_quantity(judgements: Found, name: str) -> Found:
    """Scores of one family: by quantity, then by way."""
    by_quantity: Found = {}
    for quantity in QUANTITIES:
        by_quantity[quantity] = {
            way: judgement["families"][name][quantity] for way, judgement in judgements.items()
        }
    return by_quantity


def _loss(net: FromPositions, valid: Sequence[Batch]) -> Found:
    """Both terms of the validation loss, and the share of the forces."""
    energies, forces = nets.mean_terms(net, valid)
    return {"energies": energies, "forces": forces, "share": forces / (energies + forces)}


def _gram(fits: Mapping[bool, rg.LastLayerRigidity]) -> Found:
    """The traces that energies and forces give to the Gram, and the share of the forces."""
    both = float(fits[True].gram.diagonal.sum())
    energies = float(fits[False].gram.diagonal.sum())
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


def judged(
    uq: rg.LastLayerRigidity,
    method: rg.Paper,
    valid: Sequence[Batch],
    tests: Mapping[str, Sequence[Batch]],
    bins: Mapping[str, int],
    *,
    shown: bool,
) -> Found:
    """Calibrate in one way, and judge energies and forces of all families.

    Args:
        uq: Error bars that were fitted.
        method: The method of the calibration.
        valid: The clusters for it.
        tests: Test clusters of each family.
        bins: Rows of a bin of either quantity.
        shown: Whether the figures show this way.

    Returns:
        "families" with the scores of either quantity, and what was "chosen".
    """
    report = uq.calibrate(list(valid), method=method).calibration_report
    assert report is not None
    constant_bars = {
        quantity: metrics.rmse(rows.mean, rows.target) for quantity, rows in bars(uq, valid).items()
    }
    families: Found = {}
    for name, batches in tests.items():
        families[name] = {}
        for quantity, rows in bars(uq, batches).items():
            families[name][quantity] = scored(
                rows, constant_bars[quantity], bins[quantity], shown=shown
            )
    return {
        "families": families,
        "chosen": {
            "ridge": float(uq.ridge),
            "scale": float(uq.scale),
            "gradient_scale": float(report.gradient_scale),
            "effective_rank": float(report.effective_rank),
            "constant": constant_bars,
        },
    }


def bars(uq: rg.LastLayerRigidity, batches: Sequence[Batch]) -> dict[str, Rows]:
    """Energies and forces, flat on the CPU: means, bars and targets."""

    def flat(values: Tensor) -> Tensor:
        return values.flatten().cpu()

    inputs = nets.bare(batches)
    energy = uq.predict(inputs)
    slope = uq.gradient(inputs, wrt="positions", members=0)
    # A derivative and its force differ in sign, their bars do not.
    return {
        "energy": Rows(flat(energy.mean), flat(energy.std), flat(nets.joined(batches, "y"))),
        "forces": Rows(flat(-slope.mean), flat(slope.std), flat(-nets.joined(batches, "slope"))),
    }


def scored(rows: Rows, constant: float, bin_size: int, *, shown: bool) -> Found:
    """Scores beside a constant bar's, and the numbers of the figures where they are shown."""

    def further_scores(std: Tensor) -> dict[str, float]:
        further = {"bar": float(std.square().mean().sqrt())}
        for level in LEVELS:
            coverage = metrics.coverage(rows.mean, std, rows.target, level)
            further[f"coverage_{100 * level:.0f}"] = coverage
        return further

    block = scores.beside_constant(*rows, constant, bin_size, further_scores)
    if shown:
        return {**block, **scores.pictured(*rows, bin_size)}
    return block


def growth(families: Found) -> Found:
    """How many times the bars and errors of far families are those of the training's.

    "share" is the one over the other: below 1 where bars grow less than errors.
    """
    near = families["like"]
    ratios: Found = {}
    for name, far in families.items():
        if name == "like":
            continue
        ratios[name] = {}
        for quantity in QUANTITIES:
            far_scores = far[quantity]["scores"]
            near_scores = near[quantity]["scores"]
            bar = far_scores["bar"] / near_scores["bar"]
            rmse = far_scores["rmse"] / near_scores["rmse"]
            ratios[name][quantity] = {"bar": bar, "rmse": rmse, "share": bar / rmse}
    return ratios


def of_members(
    uq: rg.LastLayerRigidity, batches: Sequence[Batch], members: int, seed: int
) -> Found:
    """Relative errors of the bars that members give, each differentiated by itself.

    Members have the energies' scale, so that it is taken for the exact bars too.
    """
    inputs = nets.bare(batches)
    exact = uq.gradient(inputs, wrt="positions", members=0)
    std = exact.std * (uq.scale / uq.calibration_report.gradient_scale)
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

    A member is the network with other readouts. The ensemble's deviations hold those of one species
    after another.
    """
    net = ensemble.model
    readouts = {name: p for name, p in net.named_parameters() if "readouts" in name}
    widths = [readout.shape[1] for readout in readouts.values()]
    deviations = ensemble.deviations.split(widths, dim=2)
    weights = {
        name: readout.detach() + deviation
        for (name, readout), deviation in zip(readouts.items(), deviations, strict=True)
    }

    def energy(readout_weights: dict[str, Tensor], positions: Tensor) -> Tensor:
        inputs = {**batch, "positions": positions}
        total: Tensor = torch.func.functional_call(net, readout_weights, kwargs=inputs).sum()
        return total

    slope_of_member = torch.func.grad(energy, argnums=1)
    slopes_of_members = torch.func.vmap(slope_of_member, in_dims=(0, None))
    slopes: Tensor = slopes_of_members(weights, batch["positions"])
    return slopes.detach()
