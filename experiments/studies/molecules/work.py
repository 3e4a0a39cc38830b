"""One net, calibrated in several ways and judged on all test molecules, size by size."""

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

WAYS = {"paper": error_bars.BINS, "nll": error_bars.PAPER, "auto": error_bars.AUTO}
"""Calibrations by name."""

BATCH = 512
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
    """Error bars of the first split's net; energies in kcal/mol.

    Args:
        seed: of the split and of a net that is not committed.
        train: molecules of the training and of the fit.
        valid: molecules that chose the weights and calibrate.
        epochs: of the training.
        bin_size: molecules of a bin, and
        wide: of a wide one.
        molecules: draw so few of the set; None for all.
        committed: digest of the committed net, by which results with another one are others.

    Returns:
        "calibrations", each with "scores", what it chose, "sizes" and the numbers of the figure;
        "differences" of scores from the paper's calibration.
    """
    with samples.drawn(net.SPLIT, seed, train=train, valid=valid, molecules=molecules) as data:
        keep = molecules is None
        trained, done = net.of(data, seed=seed, epochs=epochs, keep=keep)
        below = trained.net.to(device())
        known, held = (hidden(below, data.environments(own)) for own in (data.train, data.valid))
        uq = rg.LastLayerRigidity(readouts(below))
        uq.fit(known.batches(BATCH), sample_weight=loss_weight, progress=False)
        ways = {name: calibrated(uq, held, how) for name, how in WAYS.items()}
        rows = predicted(ways, below, data)
        return {
            "committed": done is not None,
            "epochs_done": epochs if done is None else done,
            "epoch": trained.epoch,
            "trained_on": trained.machine,
            "molecules": {name: len(getattr(data, name)) for name in ("train", "valid", "test")},
            "calibrations": {
                name: _described(rows[name], data, bin_size, wide) | {"chosen": _chosen(ways[name])}
                for name in ways
            },
            "differences": {
                name: differences(rows[name], rows["paper"]) for name in ways if name != "paper"
            },
        }


def calibrated(
    uq: rg.LastLayerRigidity, held: Environments, how: error_bars.Calibration
) -> rg.LastLayerRigidity:
    """A copy of the fit, calibrated with the validation molecules."""
    own = copy.deepcopy(uq)
    error_bars.calibrated(own, held.batches(BATCH), how)
    return own


def readouts(net: nn.Module) -> nn.Module:
    """What follows the last hidden layers, a model of its own: all calibrations share the rest."""
    top = bpnn.BehlerParrinello(len(net.readouts), net.readouts[0].in_features).double()
    top.nets = nn.ModuleList(nn.Identity() for _ in net.readouts)
    top.readouts = net.readouts
    return top.eval().to(net.level.device)


@torch.no_grad()
def hidden(net: nn.Module, data: Environments) -> Environments:
    """The same structures, with the last hidden layer of each atom's net as its descriptor."""
    found = data.x.new_empty(len(data.x), net.readouts[0].in_features)
    for kind, own in enumerate(net.nets):
        for atoms in (data.species == kind).nonzero()[:, 0].to(data.x.device).split(CHUNK):
            found[atoms] = own((data.x[atoms] - net.level) / net.spread)
    return replace(data, x=found)


def predicted(
    ways: Mapping[str, rg.LastLayerRigidity], net: nn.Module, data: Samples
) -> dict[str, RowScores]:
    """All test molecules by every calibration, in the order of `data.test`."""
    parts: dict[str, list[RowScores]] = {name: [] for name in ways}
    order = []
    for places, whole in data.test_parts():
        order.append(places)
        part = hidden(net, whole)
        for name, uq in ways.items():
            p = uq.predict(part.batches(BATCH), sample_weight=loss_weight, progress=False)
            parts[name].append(row_scores(p, part.y))
    back = torch.cat(order).argsort()
    return {name: joined(own).picked(back) for name, own in parts.items()}


def joined(parts: Sequence[RowScores]) -> RowScores:
    """Those of several files as one."""
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return RowScores(*(None if own[0] is None else torch.cat(own).cpu() for own in columns))


def scored(rows: RowScores, bin_size: int, wide: int) -> dict[str, float]:
    """How good the bars are over all molecules."""
    all_rows, means = (rows.mean, rows.bar, rows.target), summary(rows)
    kept = {name: value for name, value in means.items() if isinstance(value, float)}
    return kept | {
        "mae": metrics.mae(rows.mean, rows.target),
        "binned_log_ratio": metrics.binned_log_ratio(*all_rows, bin_size),
        "wide_log_ratio": metrics.binned_log_ratio(*all_rows, wide),
        "kurtosis": kurtosis((rows.target - rows.mean) / rows.bar),
        "spearman": metrics.spearman(*all_rows),
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
    return [
        {"size": size, **_size(rows.picked(counts == size))} for size in counts.unique().tolist()
    ]


def _size(rows: RowScores) -> dict[str, Any]:
    rmse, bar = metrics.rmse(rows.mean, rows.target), float(rows.bar.square().mean().sqrt())
    held = float(rows.covered.double().mean())
    found = {"molecules": len(rows.mean), "rmse": rmse, "bar": bar, "ratio": rmse / bar}
    return found | {"coverage_90": held}


def differences(rows: RowScores, paper: RowScores) -> dict[str, list[float]]:
    """[mean, standard error] over molecules of NLL and CRPS less the paper's."""
    pairs = {"nll": (rows.nll, paper.nll), "crps": (rows.crps, paper.crps)}
    return {
        name: list(mean_and_error((own - other).tolist()))
        for name, (own, other) in pairs.items()
        if own is not None and other is not None
    }


def _described(rows: RowScores, data: Samples, bin_size: int, wide: int) -> dict[str, Any]:
    return {
        "scores": scored(rows, bin_size, wide),
        "sizes": sizes(rows, data),
        "bins": scores.bins(rows.mean, rows.bar, rows.target, wide),
    }


def _chosen(uq: rg.LastLayerRigidity) -> dict[str, Any]:
    return {
        "ridge": uq.ridge,
        "scale": float(uq.scale),
        "distribution": type(uq.calibration.distribution).__name__,
    }
