"""One net: trained on a split, calibrated in several ways, judged on all test molecules."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import rigidities as rg
from experiments.atoms import fitting, nets, samples
from experiments.atoms.batches import Environments, loss_weight
from experiments.atoms.samples import Samples
from experiments.data import qm9
from experiments.judging import error_bars, scores
from experiments.judging.floors import floors
from experiments.judging.scores import Rows
from experiments.studies.qm9.novelty import work as novelty
from experiments.studies.qm9.pictures import work as pictures
from experiments.training.protocol import device
from rigidities import metrics

WAYS = {
    "paper": error_bars.BINS,
    "nll": error_bars.PAPER,
    "evidence": error_bars.SAFE,
}
"""Calibrations by name."""

MILLIELECTRONVOLT = 1000 * qm9.ELECTRONVOLT / qm9.KILOCALORIE
"""In a kilocalorie per mole."""

MAIN = "nll"
"""The calibration that the other parts of the page use."""

BATCH = 512


def judged(
    *,
    split: int,
    seed: int,
    train: int,
    valid: int,
    epochs: int,
    bin_size: int,
    molecules: int | None,
) -> dict[str, Any]:
    """Train one net and judge its error bars; energies in kcal/mol.

    Args:
        split: which of the seed's splits; first weights and batches follow it too.
        seed: of the whole.
        train: molecules to train on.
        valid: molecules to validate and calibrate with.
        epochs: of the training.
        bin_size: molecules of a bin of the scores.
        molecules: draw so few of the set; None for all.

    Returns:
        "calibrations", each with its scores, what it chose and the numbers of the figures;
        "novelty", how the bars follow kinds and sizes; "shown", a few molecules with their atoms.
    """
    with samples.drawn(split, seed, train=train, valid=valid, molecules=molecules) as data:
        keep = molecules is None
        trained = nets.of_split(data, split=split, seed=seed, epochs=epochs, keep=keep)
        known, held = data.environments(data.train), data.environments(data.valid)
        uq = rg.LastLayerRigidity(trained.net.to(device()))
        uq.fit(known.batches(BATCH), sample_weight=loss_weight, progress=False)
        del known
        ways = {name: calibrated(uq, held, how) for name, how in WAYS.items()}
        bars = predicted(ways, data)
        constant = metrics.rmse(_mean(uq, held), held.y.cpu())
        return {
            "epoch": trained.epoch,
            "trained_on": trained.machine,
            "molecules": {name: len(getattr(data, name)) for name in ("train", "valid", "test")},
            "calibrations": {
                name: _scored(bars[name], data, constant, bin_size)
                | {"chosen": _chosen(ways[name], WAYS[name])}
                for name in ways
            },
            "novelty": _novelty(bars[MAIN], data),
            "shown": _shown(ways[MAIN], bars[MAIN], data),
        }


def calibrated(
    uq: rg.LastLayerRigidity, held: Environments, how: error_bars.Calibration
) -> rg.LastLayerRigidity:
    """A copy of the fit with ridge, scale and noise from the validation molecules."""
    own = copy.deepcopy(uq)
    own.calibrate(held.batches(BATCH), criterion=how.criterion, noise=how.noise, progress=False)
    return own


def predicted(ways: Mapping[str, rg.LastLayerRigidity], data: Samples) -> dict[str, Rows]:
    """All test molecules, by every calibration."""
    found = {name: torch.empty(3, len(data.test), dtype=torch.float64) for name in ways}
    for places, part in data.test_parts():
        for name, uq in ways.items():
            p = uq.predict(part.batches(BATCH), sample_weight=loss_weight, progress=False)
            found[name][:, places] = torch.stack([p.mean, p.std, part.y]).cpu()
    return {name: Rows(*numbers) for name, numbers in found.items()}


def _scored(rows: Rows, data: Samples, constant: float, bin_size: int) -> dict[str, Any]:
    """The scores beside those of a constant bar, and the numbers of the figures."""
    per_atom = rows.error / data.molecules.structures.counts[data.test]

    def more(std: Tensor) -> dict[str, float]:
        return {
            "mae": metrics.mae(rows.mean, rows.target),
            "rmse_per_atom": float(per_atom.square().mean().sqrt()) * MILLIELECTRONVOLT,
            "floor": floors(rows.error, std, bin_size, seed=0)["shuffled"],
        }

    found = scores.beside_constant(*rows, constant, bin_size, more)
    return found | scores.pictured(*rows, bin_size)


def _novelty(bars: Rows, data: Samples) -> dict[str, Any]:
    """Errors and bars by the kinds and by the sizes of molecules."""
    learnt, others = (data.molecules.structures.picked(rows) for rows in (data.train, data.test))
    kinds = novelty.groups(novelty.kinds(learnt), novelty.kinds(others), bars.error, bars.std)
    return {"kinds": kinds, "sizes": novelty.by_size(others, bars.error, bars.std)}


def _shown(uq: rg.LastLayerRigidity, bars: Rows, data: Samples) -> list[dict[str, Any]]:
    """The molecules of the figure, with their atoms' error bars."""
    places = torch.cat(list(pictures.chosen(bars.std).values()))
    rows = data.test[places]
    few, structures = data.environments(rows), data.molecules.structures.picked(rows)
    return pictures.shown(uq, few, structures, bars.std[places], bars.error[places])


def _chosen(uq: rg.LastLayerRigidity, how: error_bars.Calibration) -> dict[str, Any]:
    """What the validation molecules chose; the noise is that of one atom."""
    assert uq.calibration_report is not None
    return {
        "criterion": how.criterion,
        "noise": how.noise,
        "ridge": uq.ridge,
        "scale": float(uq.scale),
        "noise_variance": float(uq.noise_model.level * uq.calibration.weight),  # at weight one
        "effective_rank": uq.calibration_report.effective_rank,
    }


@torch.no_grad()
def _mean(uq: rg.LastLayerRigidity, data: Environments) -> Tensor:
    return torch.cat([fitting.energies(uq.model, batch) for batch in data.batches(BATCH)]).cpu()
