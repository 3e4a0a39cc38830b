"""One network: trained on a split, calibrated in several ways, judged on all test molecules.

`judged` fits the trained network once and calibrates copies of the fit; `predicted` gives means and
bars of all test molecules by every calibration, from which scores, kinds and figures follow.
"""

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
"""How many millielectronvolts a kilocalorie per mole is."""

MAIN = "nll"
"""The calibration that the other sections of the page use."""

BATCH = 512
"""Molecules of a batch."""


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
    """Train one network and judge its error bars; energies in kcal/mol.

    Args:
        split: Which of the seed's splits; first weights and batches depend on it too.
        seed: The seed of the whole study.
        train: Molecules to train on.
        valid: Molecules to validate and calibrate with.
        epochs: Epochs of the training.
        bin_size: Molecules of a bin of the scores.
        molecules: How many molecules are drawn of the set; None for all.

    Returns:
        "calibrations", each with its scores, what it chose and the numbers of the figures;
        "novelty", how the bars follow kinds and sizes; "shown", a few molecules with their atoms.
    """
    with samples.drawn(split, seed, train=train, valid=valid, molecules=molecules) as data:
        keep = molecules is None
        trained = nets.of_split(data, split=split, seed=seed, epochs=epochs, keep=keep)
        train_molecules = data.environments(data.train)
        valid_molecules = data.environments(data.valid)
        uq = rg.LastLayerRigidity(trained.net.to(device()), progress=False)
        uq.fit(train_molecules.batches(BATCH), sample_weight=loss_weight)
        del train_molecules  # gigabytes of descriptors
        calibrations = {
            name: calibrated(uq, valid_molecules, method) for name, method in WAYS.items()
        }
        rows = predicted(calibrations, data)
        constant_bar = metrics.rmse(_mean(uq, valid_molecules), valid_molecules.y.cpu())
        return {
            "epoch": trained.epoch,
            "trained_on": trained.machine,
            "molecules": {
                "train": len(data.train),
                "valid": len(data.valid),
                "test": len(data.test),
            },
            "calibrations": {
                name: {
                    **_scored(rows[name], data, constant_bar, bin_size),
                    "chosen": _chosen(calibrations[name], method),
                }
                for name, method in WAYS.items()
            },
            "novelty": _novelty(rows[MAIN], data),
            "shown": _shown(calibrations[MAIN], rows[MAIN], data),
        }


def calibrated(
    uq: rg.LastLayerRigidity, valid: Environments, method: rg.Paper
) -> rg.LastLayerRigidity:
    """A copy of the fit with ridge, scale and noise from the validation molecules."""
    return copy.deepcopy(uq).calibrate(valid.batches(BATCH), method=method)


def predicted(calibrations: Mapping[str, rg.LastLayerRigidity], data: Samples) -> dict[str, Rows]:
    """Means, bars and targets of all test molecules by every calibration, in their order."""
    # Rows of a table: mean, bar and target.
    tables = {name: torch.empty(3, len(data.test), dtype=torch.float64) for name in calibrations}
    for places, molecules in data.test_parts():
        for name, uq in calibrations.items():
            p = uq.predict(molecules.batches(BATCH), sample_weight=loss_weight)
            tables[name][:, places] = torch.stack([p.mean, p.std, molecules.y]).cpu()
    return {name: Rows(*table) for name, table in tables.items()}


def _scored(rows: Rows, data: Samples, constant: float, bin_size: int) -> dict[str, Any]:
    """The scores beside those of a constant bar, and the numbers of the figures."""
    errors_per_atom = rows.error / data.molecules.structures.counts[data.test]

    def further_scores(std: Tensor) -> dict[str, float]:
        return {
            "mae": metrics.mae(rows.mean, rows.target),
            "rmse_per_atom": float(errors_per_atom.square().mean().sqrt()) * MILLIELECTRONVOLT,
            "floor": floors(rows.error, std, bin_size, seed=0)["shuffled"],
        }

    return {
        **scores.beside_constant(*rows, constant, bin_size, further_scores),
        **scores.pictured(*rows, bin_size),
    }


def _novelty(rows: Rows, data: Samples) -> dict[str, Any]:
    """Errors and bars by the kinds and by the sizes of molecules."""
    train = data.molecules.structures.picked(data.train)
    test = data.molecules.structures.picked(data.test)
    return {
        "kinds": novelty.groups(novelty.kinds(train), novelty.kinds(test), rows.error, rows.std),
        "sizes": novelty.by_size(test, rows.error, rows.std),
    }


def _shown(uq: rg.LastLayerRigidity, rows: Rows, data: Samples) -> list[dict[str, Any]]:
    """The molecules of the figure, with their atoms' error bars."""
    places = torch.cat(list(pictures.chosen(rows.std).values()))
    molecules = data.test[places]
    return pictures.shown(
        uq,
        data.environments(molecules),
        data.molecules.structures.picked(molecules),
        rows.std[places],
        rows.error[places],
    )


def _chosen(uq: rg.LastLayerRigidity, method: rg.Paper) -> dict[str, Any]:
    """What the validation molecules chose; the noise is that of one atom."""
    assert uq.calibration_report is not None
    return {
        "criterion": method.criterion,
        "noise": method.noise,
        "ridge": uq.ridge,
        "scale": float(uq.scale),
        "noise_variance": float(uq.noise_model.level * uq.calibration.weight),  # at weight one
        "effective_rank": uq.calibration_report.effective_rank,
    }


@torch.no_grad()
def _mean(uq: rg.LastLayerRigidity, data: Environments) -> Tensor:
    """Predicted energies without error bars."""
    return torch.cat([fitting.energies(uq.model, batch) for batch in data.batches(BATCH)]).cpu()
