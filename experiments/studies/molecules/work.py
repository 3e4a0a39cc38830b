"""One network, calibrated in several ways and judged on all test molecules, size by size.

The last hidden layers of all atoms are computed once (`hidden`); the readouts on top of them are a
model of their own (`readouts`), which is fitted once and calibrated in every way of `WAYS`. Test
molecules come in groups that fit into memory; their predictions are put back into one order
(`predicted`), and judged over all molecules (`scored`) and by the number of atoms (`sizes`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import rigidities as rg
from experiments.atoms import bpnn, samples
from experiments.atoms.batches import Environments, loss_weight
from experiments.atoms.samples import Samples
from experiments.frame.outcome import mean_and_error
from experiments.judging import error_bars, scores
from experiments.judging.predictive import RowScores, row_scores, summary
from experiments.studies.molecules import net
from experiments.training.protocol import device
from rigidities import metrics

WAYS = {"paper": error_bars.BINS, "nll": error_bars.PAPER, "auto": error_bars.FULL}
"""Calibrations by name."""

BATCH = 512
"""Molecules of a batch."""

CHUNK = 8192
"""Atoms whose hidden layers are computed at once."""


def judged(
    *,
    seed: int,
    train: int,
    valid: int,
    epochs: int,
    bin_size: int,
    wide: int,
    molecules: int | None,
    committed: str,
) -> dict[str, Any]:
    """Error bars of the first split's network; energies in kcal/mol.

    Args:
        seed: The seed of the split and of a network that is not committed.
        train: Molecules of the training and of the fit.
        valid: Molecules that chose the weights and calibrate.
        epochs: Epochs of the training.
        bin_size: Molecules of a bin.
        wide: Molecules of a wide bin.
        molecules: How many molecules are drawn of the set; None for all.
        committed: Digest of the committed network. It is not read here: it makes results with
            another network another part.

    Returns:
        "calibrations", each with "scores", what it chose, "sizes" and the numbers of the figure;
        "differences" of scores from the paper's calibration.
    """
    with samples.drawn(net.SPLIT, seed, train=train, valid=valid, molecules=molecules) as data:
        trained, epochs_of_committed = net.of(
            data, seed=seed, epochs=epochs, keep=molecules is None
        )
        network = trained.net.to(device())
        uq = rg.LastLayerRigidity(readouts(network), progress=False)
        train_features = hidden(network, data.environments(data.train))
        uq.fit(train_features.batches(BATCH), sample_weight=loss_weight)
        valid_features = hidden(network, data.environments(data.valid))
        calibrations = {
            name: calibrated(uq, valid_features, method) for name, method in WAYS.items()
        }
        rows = predicted(calibrations, network, data)

        is_committed = epochs_of_committed is not None
        return {
            "committed": is_committed,
            "epochs_done": epochs_of_committed if is_committed else epochs,
            "epoch": trained.epoch,
            "trained_on": trained.machine,
            "molecules": {
                "train": len(data.train),
                "valid": len(data.valid),
                "test": len(data.test),
            },
            "calibrations": {
                name: {
                    "scores": scored(rows[name], bin_size, wide),
                    "sizes": sizes(rows[name], data),
                    "bins": scores.bins(rows[name].mean, rows[name].bar, rows[name].target, wide),
                    "chosen": _chosen(calibration),
                }
                for name, calibration in calibrations.items()
            },
            "differences": {
                name: differences(rows[name], rows["paper"])
                for name in calibrations
                if name != "paper"
            },
        }


def calibrated(
    uq: rg.LastLayerRigidity, valid: Environments, method: error_bars.Method
) -> rg.LastLayerRigidity:
    """A copy of the fit, calibrated with the validation molecules."""
    return copy.deepcopy(uq).calibrate(valid.batches(BATCH), method=method)


def readouts(network: nn.Module) -> nn.Module:
    """What follows the last hidden layers, as a model of its own.

    The hidden layers are costly and the same for all calibrations: they are computed once.
    """
    top = bpnn.BehlerParrinello(len(network.readouts), network.readouts[0].in_features).double()
    top.nets = nn.ModuleList(nn.Identity() for _ in network.readouts)
    top.readouts = network.readouts
    return top.eval().to(network.level.device)


@torch.no_grad()
def hidden(network: nn.Module, data: Environments) -> Environments:
    """The same structures, with the last hidden layer of each atom as its descriptor."""
    features = data.x.new_empty(len(data.x), network.readouts[0].in_features)
    for kind, layers in enumerate(network.nets):
        atoms_of_kind = (data.species == kind).nonzero()[:, 0].to(data.x.device)
        for atoms in atoms_of_kind.split(CHUNK):
            features[atoms] = layers((data.x[atoms] - network.level) / network.spread)
    return replace(data, x=features)


def predicted(
    calibrations: Mapping[str, rg.LastLayerRigidity], network: nn.Module, data: Samples
) -> dict[str, RowScores]:
    """All test molecules by every calibration, in the order of `data.test`."""
    rows_of_groups: dict[str, list[RowScores]] = {name: [] for name in calibrations}
    places_of_groups = []
    for places, environments in data.test_parts():
        places_of_groups.append(places)
        features = hidden(network, environments)
        for name, uq in calibrations.items():
            p = uq.predict(features.batches(BATCH), sample_weight=loss_weight)
            rows_of_groups[name].append(row_scores(p, features.y))
    order = torch.cat(places_of_groups).argsort()
    return {name: joined(groups).picked(order) for name, groups in rows_of_groups.items()}


def joined(groups: Sequence[RowScores]) -> RowScores:
    """The rows of several groups, one after the other, on the CPU."""
    columns: dict[str, Tensor | None] = {}
    for name, first in vars(groups[0]).items():
        if first is None:
            columns[name] = None
        else:
            columns[name] = torch.cat([getattr(group, name) for group in groups]).cpu()
    return RowScores(**columns)


def scored(rows: RowScores, bin_size: int, wide: int) -> dict[str, float]:
    """How good the bars are over all molecules."""
    averages = {name: value for name, value in summary(rows).items() if isinstance(value, float)}
    return {
        **averages,
        "mae": metrics.mae(rows.mean, rows.target),
        "binned_log_ratio": metrics.binned_log_ratio(rows.mean, rows.bar, rows.target, bin_size),
        "wide_log_ratio": metrics.binned_log_ratio(rows.mean, rows.bar, rows.target, wide),
        "kurtosis": kurtosis((rows.target - rows.mean) / rows.bar),
        "spearman": metrics.spearman(rows.mean, rows.bar, rows.target),
    }


def kurtosis(z: Tensor) -> float:
    r"""$\overline{z^4} / \overline{z^2}^2$ about zero; 3 for a Gaussian.

    >>> kurtosis(torch.tensor([-1.0, 1.0, 3.0, -3.0]))
    1.64
    """
    square = z.double().square()
    return float(square.square().mean() / square.mean().square())


def sizes(rows: RowScores, data: Samples) -> list[dict[str, Any]]:
    """By the number of atoms: RMSE, bar, their ratio and the coverage of 90 % intervals."""
    counts = data.molecules.structures.counts[data.test]
    sizes_with_scores = []
    for size in counts.unique().tolist():
        rows_of_size = rows.picked(counts == size)
        rmse = metrics.rmse(rows_of_size.mean, rows_of_size.target)
        bar = float(rows_of_size.bar.square().mean().sqrt())
        sizes_with_scores.append(
            {
                "size": size,
                "molecules": len(rows_of_size.mean),
                "rmse": rmse,
                "bar": bar,
                "ratio": rmse / bar,
                "coverage_90": float(rows_of_size.covered.double().mean()),
            }
        )
    return sizes_with_scores


def differences(rows: RowScores, paper: RowScores) -> dict[str, list[float]]:
    """[mean, standard error] over molecules of NLL and CRPS less the paper's.

    A score that either calibration does not have is left out.
    """
    pairs = {"nll": (rows.nll, paper.nll), "crps": (rows.crps, paper.crps)}
    mean_differences = {}
    for name, (score, paper_score) in pairs.items():
        if score is not None and paper_score is not None:
            mean_differences[name] = list(mean_and_error((score - paper_score).tolist()))
    return mean_differences


def _chosen(uq: rg.LastLayerRigidity) -> dict[str, Any]:
    """What a calibration chose."""
    return {
        "ridge": uq.ridge,
        "scale": float(uq.scale),
        "distribution": type(uq.calibration.distribution).__name__,
    }
