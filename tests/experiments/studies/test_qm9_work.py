"""The core of the experiment qm9 on made-up molecules: splits, nets on disk, scores, costs."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.atoms.batches import loss_weight
from experiments.atoms.descriptor_files import DescriptorFiles
from experiments.atoms.samples import SOAP, SPECIES, Samples
from experiments.atoms.soap import expansion
from experiments.atoms.spectrum import power_spectrum
from experiments.atoms.structures import indices
from experiments.frame.machine import machine
from experiments.frame.outcome import plain
from experiments.studies.qm9 import costs, work
from experiments.training.loop import Fitted
from torch import Tensor

import rigidities as rg
from experiments.atoms import batches, bpnn, composition, nets, samples, training
from experiments.data import files, qm9
from rigidities import metrics
from tests.support import synthetic_data
from tests.support.tensors import close

pytest.importorskip("featomic")
pytest.importorskip("ase")

F64 = torch.float64
COUNT = 260
SIZES = {"train": 100, "valid": 60}
TEST = 100
ARGUMENTS: dict[str, Any] = {
    "split": 1,
    "seed": 3,
    **SIZES,
    "epochs": 3,
    "bin_size": 20,
    "molecules": None,
}


def made_in(folder: Path, seed: int = 9) -> Path:
    folder.mkdir(parents=True)
    synthetic_data._qm9(folder / "qm9.npz", np.random.default_rng(seed), COUNT)
    files.seal(folder / "qm9.npz")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The made-up set is the one that is found, and the cache is a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("qm9")
        patch.setenv(files.VARIABLE, str(made_in(root / "data")))
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        yield files.cache_folder()


@pytest.fixture(scope="module")
def data(cache: Path) -> Iterator[Samples]:
    with samples.drawn(1, 3, **SIZES) as found:
        yield found


@pytest.fixture(scope="module")
def judged(cache: Path) -> dict[str, Any]:
    """One run, whose net is trained and kept."""
    return work.judged(**ARGUMENTS)


@pytest.fixture(scope="module")
def trained(judged, data: Samples) -> Fitted:
    """The net that was kept."""
    return nets.of_split(data, split=1, seed=3, epochs=3)


def no_training(*_: Any) -> Fitted:
    raise AssertionError("a net was trained")


# --- samples --------------------------------------------------------------------------------------


def test_the_parts_are_the_split_of_the_reader(data: Samples) -> None:
    split = qm9.random(COUNT, 1, 3, **SIZES)
    for part in ("train", "valid", "test"):
        assert getattr(data, part).tolist() == getattr(split, part).tolist()
    assert (len(data.train), len(data.valid), len(data.test)) == (100, 60, TEST)
    assert len(data.molecules) == COUNT


def test_splits_and_seeds_have_parts_of_their_own(cache: Path) -> None:
    found = []
    for split, seed in ((0, 0), (1, 0), (0, 1), (0, 0)):
        with samples.drawn(split, seed, **SIZES) as one:
            found.append(tuple(one.train.tolist()))
    assert len(set(found)) == 3 and found[0] == found[3]


def test_the_baseline_knows_the_training_molecules_alone(data: Samples) -> None:
    rows = data.train
    own = data.molecules.structures.picked(rows)
    expected = composition.fitted(own, data.molecules.energy[rows], SPECIES)
    assert torch.equal(data.baseline.energies, expected.energies)
    every = composition.fitted(data.molecules.structures, data.molecules.energy, SPECIES)
    assert not torch.allclose(data.baseline.energies, every.energies, rtol=1e-6)
    assert SPECIES == (1, 6, 7, 8, 9)


def test_environments_are_the_spectra_and_energies_of_their_molecules(data: Samples) -> None:
    rows = data.valid[[5, 0, 17]]
    found, own = data.environments(rows), data.molecules.structures.picked(rows)
    direct = power_spectrum(expansion(own, SPECIES, SOAP).values)
    close(found.x, direct, 1e-6)
    assert found.x.shape[1] == 2325 and found.x.dtype == F64 and found.kinds == 5
    close(found.y, data.molecules.energy[rows] - data.baseline(own), 1e-10)
    assert torch.equal(found.species, indices(own.numbers, SPECIES))
    assert torch.equal(found.counts, own.counts)


@pytest.mark.parametrize("part", [70, 10_000])
def test_the_test_molecules_come_file_after_file(data: Samples, tmp_path: Path, part: int) -> None:
    folder = data.files.folder if part == 10_000 else tmp_path
    data = replace(data, files=replace(data.files, part=part, folder=folder))
    whole, seen = data.environments(data.test), []
    for places, some in data.test_parts():
        seen += places.tolist()
        own = whole.picked(places)
        close(some.x, own.x, 1e-12)
        close(some.y, own.y, 1e-12)
        assert torch.equal(some.counts, own.counts)
        assert torch.equal(some.species, own.species)
    assert sorted(seen) == list(range(TEST))


def test_spectra_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(23, 6, 25, generator=torch.Generator().manual_seed(0), dtype=F64)
    whole = power_spectrum(values)
    monkeypatch.setattr(samples, "CHUNK", 5)
    assert torch.equal(samples.spectra(values, torch.device("cpu")), whole)


def test_a_few_molecules_leave_nothing_behind(cache: Path) -> None:
    before = sorted(cache.rglob("*"))
    with samples.drawn(0, 5, train=20, valid=10, molecules=50) as few:
        assert len(few.molecules) == 50 and len(few.test) == 20
        assert len(few.environments(few.test)) == 20
        folder = few.files.folder
        assert list(folder.iterdir()) and cache not in folder.parents
    assert not folder.exists() and sorted(cache.rglob("*")) == before
    with samples.drawn(1, 5, train=20, valid=10, molecules=50) as again:
        assert torch.equal(again.molecules.ids, few.molecules.ids)
        assert not torch.equal(again.train, few.train)
    with samples.drawn(0, 6, train=20, valid=10, molecules=50) as other:
        assert not torch.equal(other.molecules.ids, few.molecules.ids)


@pytest.mark.parametrize(("train", "molecules"), [(200, None), (20, 30), (0, None)])
def test_too_few_molecules_for_the_split_are_refused(cache: Path, train, molecules) -> None:
    left = (molecules or COUNT) - train - 60
    said = rf"got {train} for training, 60 for validation and {left} of .*Pass smaller"
    with (
        pytest.raises(ValueError, match=said),
        samples.drawn(0, 0, train=train, valid=60, molecules=molecules),
    ):
        raise AssertionError("it was drawn")


# --- nets on disk ---------------------------------------------------------------------------------


def test_a_net_on_disk_is_the_net_that_was_trained(data: Samples, trained: Fitted) -> None:
    fresh = nets.of_split(data, split=1, seed=3, epochs=3, keep=False)
    assert (fresh.epoch, fresh.loss) == (trained.epoch, trained.loss)
    assert fresh.net.state_dict().keys() == trained.net.state_dict().keys()
    for name, value in trained.net.state_dict().items():
        assert torch.equal(value, fresh.net.state_dict()[name]), name
    assert not trained.net.training
    assert float(trained.net.spread) != 1, "the net sees standardised descriptors"


def test_a_net_is_trained_once(data: Samples, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seeds = []

    def quickly(own: Samples, seed: int, epochs: int) -> Fitted:
        seeds.append((seed, epochs))
        return Fitted(bpnn.drawn(5, 2325, seed), 2, 1 / 3)

    monkeypatch.setattr(training, "trained", quickly)
    first = nets.of_split(data, split=2, seed=7, epochs=9)
    again = nets.of_split(data, split=2, seed=7, epochs=9)
    assert seeds == [(7002, 9)]
    assert (again.epoch, again.loss) == (first.epoch, first.loss) == (2, 1 / 3)
    assert again.machine == first.machine == machine()
    nets.of_split(data, split=2, seed=8, epochs=9)
    nets.of_split(data, split=2, seed=7, epochs=9, keep=False)
    assert seeds[1:] == [(8002, 9), (7002, 9)]
    kept = [path.name for path in (files.cache_folder() / "experiments" / "qm9").iterdir()]
    assert len(kept) == 2 and all(name.startswith("trained-2-") for name in kept)


def test_other_arguments_or_data_are_another_file(cache: Path, tmp_path, monkeypatch) -> None:
    def name() -> str:
        return nets.file(1, 3, 5, [100, 60, TEST]).name

    first = name()
    found = {first, name()}
    assert len(found) == 1
    found |= {nets.file(*a, [100, 60, TEST]).name for a in ((2, 3, 5), (1, 4, 5), (1, 3, 6))}
    found.add(nets.file(1, 3, 5, [101, 60, 99]).name)
    with monkeypatch.context() as patch:
        patch.setenv(files.VARIABLE, str(made_in(tmp_path / "other", seed=1)))
        found.add(name())
    assert len(found) == 6


def test_a_network_of_other_code_serves_and_says_so(
    data: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    net = bpnn.drawn(5, 2325, 0)
    with monkeypatch.context() as before:
        before.setattr(nets, "code", lambda: "other")
        before.setattr(training, "trained", lambda *_: Fitted(net, 2, 1 / 3))
        assert nets.of_split(data, split=2, seed=7, epochs=9).machine == machine()
        assert nets.of_split(data, split=2, seed=7, epochs=9).machine == machine()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(training, "trained", no_training)
    assert nets.of_split(data, split=2, seed=7, epochs=9).machine == f"{machine()}, other code"
    said = "network of split 2 trained by other code: --fresh retrains"
    assert said in capsys.readouterr().out
    with pytest.raises(AssertionError, match="a net was trained"):
        nets.of_split(data, split=2, seed=8, epochs=9)


def test_a_training_that_fails_keeps_nothing(data: Samples, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(training, "trained", no_training)
    with pytest.raises(AssertionError, match="a net was trained"):
        nets.of_split(data, split=1, seed=3, epochs=3)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_training_lowers_the_validation_loss(data: Samples, trained: Fitted) -> None:
    held, known = data.environments(data.valid), data.environments(data.train)
    net = bpnn.drawn(5, 2325, 3001)
    net.standardise(known.x)
    losses = []
    for one in (net, trained.net):
        with torch.no_grad():
            found = torch.cat([one(**without(batch)) for batch in held.batches(64)])
        losses.append(float(((found - held.y).square() / held.counts).mean()))
    assert losses[1] == pytest.approx(trained.loss, rel=1e-10) and losses[1] < losses[0]


def without(batch: batches.Batch) -> batches.Batch:
    return {name: value for name, value in batch.items() if name != "y"}


# --- judged ---------------------------------------------------------------------------------------


def test_the_second_run_takes_the_net_from_disk_and_finds_the_same(judged, monkeypatch) -> None:
    monkeypatch.setattr(training, "trained", no_training)
    assert json.dumps(plain(work.judged(**ARGUMENTS))) == json.dumps(plain(judged))


def test_all_numbers_are_finite(judged) -> None:
    stored = json.dumps(plain(judged), allow_nan=False)
    assert len(re.findall(r"\d+\.\d+", stored)) > 500
    assert judged["molecules"] == {**SIZES, "test": TEST}
    assert 1 <= judged["epoch"] <= ARGUMENTS["epochs"]


@pytest.fixture(scope="module")
def dense(data: Samples, trained: Fitted) -> dict[str, Tensor]:
    """Features and residuals by automatic differentiation, and the Gram of the loss's weights."""
    heads = [readout.weight for readout in trained.net.readouts]
    found: dict[str, Tensor] = {}
    for part in ("train", "valid", "test"):
        own = data.environments(getattr(data, part))
        batch = own.batch(torch.arange(len(own)))
        energy = trained.net(**without(batch))
        rows = [
            torch.cat([g[0] for g in torch.autograd.grad(one, heads, retain_graph=True)])
            for one in energy
        ]
        found |= {part: torch.stack(rows), f"{part} mean": energy.detach(), f"{part} y": own.y}
        found[f"{part} atoms"] = own.counts.double()
    found["gram"] = sum(
        torch.outer(f, f) / n for f, n in zip(found["train"], found["train atoms"], strict=True)
    )
    return found


def dense_std(dense: dict[str, Tensor], chosen: dict[str, float]) -> Tensor:
    """Of the test molecules, from what a calibration chose."""
    ridged = dense["gram"] + chosen["ridge"] * torch.eye(320, dtype=F64)
    f = dense["test"]
    q = (f * torch.linalg.solve(ridged, f.T).T).sum(1)
    variance = chosen["scale"] ** 2 * q + chosen["noise_variance"] * dense["test atoms"]
    return variance.sqrt()


@pytest.mark.parametrize("way", list(work.WAYS))
def test_the_scores_are_those_of_dense_error_bars(judged, dense, way: str) -> None:
    found = judged["calibrations"][way]
    mean, y, std = dense["test mean"], dense["test y"], dense_std(dense, found["chosen"])
    error, own = mean - y, found["scores"]
    expected = {
        "rmse": error.square().mean().sqrt(),
        "mae": error.abs().mean(),
        "nll": (0.5 * (error / std).square() + std.log() + 0.5 * math.log(2 * math.pi)).mean(),
        "coverage": metrics.coverage(mean, std, y),
        "crps": metrics.crps(mean, std, y),
        "binned_log_ratio": metrics.binned_log_ratio(mean, std, y, 20),
        "spearman": metrics.spearman(mean, std, y),
        "rmse_per_atom": (error / dense["test atoms"]).square().mean().sqrt() * 43.3641153,
    }
    for name, value in expected.items():
        assert own[name] == pytest.approx(float(value), rel=1e-6), name
    constant = float((dense["valid mean"] - dense["valid y"]).square().mean().sqrt())
    flat = found["constant"]["scores"]
    nll = 0.5 * error.square().mean() / constant**2 + math.log(constant * math.sqrt(2 * math.pi))
    assert flat["nll"] == pytest.approx(float(nll), rel=1e-9)
    assert own["gain"] == pytest.approx(flat["nll"] - own["nll"], rel=1e-9)
    assert flat["rmse"] == own["rmse"] and flat["mae"] == own["mae"]


def test_the_figures_have_the_numbers_of_the_bars(judged, dense) -> None:
    found = judged["calibrations"]["paper"]
    std, error = dense_std(dense, found["chosen"]), dense["test mean"] - dense["test y"]
    order = std.argsort()
    close(found["bins"]["variance"], std[order].square().reshape(-1, 20).mean(1), 1e-6)
    close(found["bins"]["mse"], error[order].square().reshape(-1, 20).mean(1), 1e-6)
    assert found["points"]["rows"] == TEST
    close(found["points"]["std"], std, 1e-6)
    close(found["points"]["error"], error.abs(), 1e-6)


def test_the_calibrations_differ_and_one_has_noise(judged) -> None:
    chosen = {name: one["chosen"] for name, one in judged["calibrations"].items()}
    assert [chosen[name]["criterion"] for name in ("paper", "nll", "evidence")] == [
        "bins",
        "nll",
        "evidence",
    ]
    assert chosen["paper"]["noise_variance"] == chosen["nll"]["noise_variance"] == 0
    assert chosen["evidence"]["noise_variance"] > 0
    for of in (
        [one["ridge"] for one in chosen.values()],
        [one["scores"]["nll"] for one in judged["calibrations"].values()],
    ):
        assert len(set(of)) == 3


def test_a_calibration_is_that_of_the_library_and_leaves_the_fit_alone(
    judged, data: Samples, trained: Fitted
) -> None:
    known, held = data.environments(data.train), data.environments(data.valid)
    uq = rg.LastLayerRigidity(trained.net)
    uq.fit(known.batches(512), sample_weight=loss_weight)
    own = work.calibrated(uq, held, work.WAYS["nll"])
    assert uq.calibration_report is None and own.calibration_report is not None and own is not uq
    report = uq.calibrate(held.batches(7), method=rg.Paper(noise="none")).calibration_report
    chosen = judged["calibrations"]["nll"]["chosen"]
    assert chosen["ridge"] == pytest.approx(report.ridge, rel=1e-6)
    assert chosen["scale"] == pytest.approx(float(report.scale), rel=1e-6)


def test_bars_do_not_depend_on_files_and_batches(data, trained, tmp_path, monkeypatch) -> None:
    known, held = data.environments(data.train), data.environments(data.valid)
    uq = rg.LastLayerRigidity(trained.net)
    uq.fit(known.batches(512), sample_weight=loss_weight)
    ways = {"evidence": work.calibrated(uq, held, work.WAYS["evidence"])}
    whole = work.predicted(ways, data)["evidence"]
    close(whole.target, data.environments(data.test).y, 1e-10)
    monkeypatch.setattr(work, "BATCH", 9)
    parts = replace(data, files=replace(data.files, part=70, folder=tmp_path))
    other = work.predicted(ways, parts)["evidence"]
    for name in ("mean", "std", "target"):
        close(getattr(other, name), getattr(whole, name), 1e-9)
    close(whole.error, whole.mean - whole.target, 1e-10)


def test_a_quick_run_keeps_no_net(cache: Path, judged) -> None:
    before = sorted(cache.rglob("*"))
    small = {**ARGUMENTS, "train": 40, "valid": 30, "molecules": 120, "epochs": 1}
    found = work.judged(**small)
    assert found["molecules"] == {"train": 40, "valid": 30, "test": 50}
    assert sorted(cache.rglob("*")) == before


# --- costs ----------------------------------------------------------------------------------------


def test_the_costs_are_told_beside_bare_passes(cache: Path, monkeypatch) -> None:
    monkeypatch.setattr(training, "trained", no_training)
    monkeypatch.setattr(samples, "DescriptorFiles", partial(DescriptorFiles, part=50))
    real, parts = costs.prediction_cost, []
    monkeypatch.setattr(costs, "prediction_cost", lambda *a: parts.append(real(*a)) or parts[-1])
    found = costs.measured(seed=0, train=60, valid=40, molecules=130)
    assert found.keys() == {"fit", "predict", "threads", "machine"}
    assert found["fit"].keys() == {"bare", "fit", "ratio", "molecules"}
    assert found["predict"].keys() == {"bare", "bars", "ratio", "molecules"}
    assert (found["fit"]["molecules"], found["predict"]["molecules"]) == (60, 30)
    assert found["threads"] == torch.get_num_threads()
    assert found["fit"]["ratio"] > 1
    predict = found["predict"]
    assert predict["ratio"] == predict["bars"] / predict["bare"] > 0
    assert len(parts) == 3
    for name in ("bare", "bars"):
        assert predict[name] == pytest.approx(sum(part[name] for part in parts))


def ticking(times: Iterator[float]):
    """A clock that does the work and tells the seconds it is given."""

    def seconds(work) -> float:
        work()
        return next(times)

    return seconds


@pytest.fixture
def uq(data: Samples, trained: Fitted) -> rg.LastLayerRigidity:
    known = data.environments(data.train)
    found = rg.LastLayerRigidity(trained.net)
    found.fit(known.batches(50), sample_weight=loss_weight)
    found.calibrate(data.environments(data.valid).batches(50))
    return found


def test_the_cost_of_a_fit_is_the_median_of_ratios(uq, data: Samples, monkeypatch) -> None:
    monkeypatch.setattr(costs, "ROUNDS", 3)
    monkeypatch.setattr(costs, "seconds", ticking(iter([1.0, 2.0, 2.0, 10.0, 4.0, 12.0])))
    parts = list(data.environments(data.train).batches(50))
    expected = {"bare": 2.0, "fit": 10.0, "ratio": 3.0, "molecules": 100}
    assert costs.fit_cost(uq, parts) == expected


def test_the_cost_of_predictions_is_summed_over_the_lists(uq, data: Samples, monkeypatch) -> None:
    monkeypatch.setattr(costs, "LIST", 40)
    monkeypatch.setattr(costs, "PREDICT_BATCH", 16)
    seen: dict[str, list[int]] = {"bare": [], "with_bars": []}
    for name, calls in seen.items():
        monkeypatch.setattr(costs, name, counting(getattr(costs, name), calls))
    monkeypatch.setattr(costs, "seconds", ticking(iter([1.0, 3.0, 2.0, 5.0, 1.0, 7.0])))
    held = data.environments(data.test)
    assert costs.prediction_cost(uq, held) == {"bare": 4.0, "bars": 15.0}
    assert seen["with_bars"] == [40, 40, 20] and seen["bare"] == [40, 40, 40, 20]


def counting(work, calls: list[int]):
    """The same work, with a note of how many molecules it saw."""

    def counted(uq: rg.LastLayerRigidity, parts: list[batches.Batch]) -> None:
        assert all(len(part["counts"]) <= 50 for part in parts)
        calls.append(sum(len(part["counts"]) for part in parts))
        work(uq, parts)

    return counted


def test_the_clock_counts_the_work() -> None:
    done = []
    assert costs.seconds(lambda: done.append(1)) > 0 and done == [1]
