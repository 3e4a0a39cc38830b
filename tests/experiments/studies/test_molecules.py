"""The experiment on molecules of every size: its net, its scores and what the command writes."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from experiments.atoms.batches import loss_weight
from experiments.atoms.nets import Kept
from experiments.atoms.samples import Samples
from experiments.frame.machine import machine
from experiments.judging.predictive import Normal, RowScores, row_scores
from experiments.studies.molecules import net, page, run, work

import rigidities as rg
from experiments import __main__ as command
from experiments.atoms import bpnn, nets, samples
from experiments.judging import error_bars
from rigidities import metrics
from tests.support import synthetic_data
from tests.support.numbers_on_pages import unsupported

pytest.importorskip("featomic")
pytest.importorskip("ase")

SIZES = {"train": 100, "valid": 60, "molecules": 260}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("molecules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIGIDITIES_DATA", str(synthetic_data.write(path / "data")))
        patch.setenv("XDG_CACHE_HOME", str(path / "cache"))
        yield path


@pytest.fixture(scope="module")
def data(folder: Path) -> Iterator[Samples]:
    with samples.drawn(0, 0, **SIZES) as found:
        yield found


@pytest.fixture(scope="module")
def written(folder: Path) -> Path:
    """A quick run on made-up molecules."""
    assert command.main(["molecules", "--quick", "--out", str(folder / "out")]) == 0
    return folder / "out"


@pytest.fixture
def kept(data: Samples) -> Kept:
    """A net with its first weights, as if it had been trained."""
    made = bpnn.drawn(5, 2325, 1)
    made.standardise(data.environments(data.train).x)
    return Kept(made.eval(), 7, 1 / 3, "a GPU")


def rows_of(count: int, seed: int = 0) -> RowScores:
    made = torch.Generator().manual_seed(seed)
    mean, target = torch.randn(2, count, generator=made, dtype=torch.float64)
    bar = 0.5 + torch.rand(count, generator=made, dtype=torch.float64)
    return row_scores(Normal(mean, bar), target)


def test_a_quick_run_fills_its_page(written: Path) -> None:
    text = (written / "molecules.md").read_text(encoding="utf-8")
    stored = json.loads((written / "molecules.json").read_text(encoding="utf-8"))
    assert unsupported(text, stored) == []
    assert "nan" not in text and "The network was trained in this run" in text
    assert (written / "molecules-sizes.png").stat().st_size > 3000
    assert set(stored["calibrations"]) == set(page.LABELS) == set(work.WAYS)
    assert stored["molecules"] == {"train": 150, "valid": 100, "test": 140}
    assert sum(one["molecules"] for one in stored["calibrations"]["auto"]["sizes"]) == 140


def test_the_range_is_that_of_the_sizes_that_are_shown(written: Path) -> None:
    stored = json.loads((written / "molecules.json").read_text(encoding="utf-8"))
    for name, way in stored["calibrations"].items():
        shown = [one["ratio"] for one in way["sizes"] if one["molecules"] >= run.FEWEST["quick"]]
        found = stored["range"][name]
        assert (found["smallest"], found["largest"]) == (min(shown), max(shown))
        assert found["sizes"] == len(shown) < len(way["sizes"])


def test_the_committed_net_is_that_which_was_kept(data, kept, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(net, "PATH", tmp_path / "nets" / "qm9.safetensors")
    net.write(kept, data, seed=0, epochs=5, done=4)
    found, done = net.of(data, seed=0, epochs=5, keep=False)
    assert done == 4 and (found.epoch, found.loss, found.machine) == (7, 1 / 3, "a GPU")
    for name, value in kept.net.state_dict().items():
        assert torch.equal(found.net.state_dict()[name], value.float().double()), name


@pytest.mark.parametrize("other", ["seed", "epochs", "molecules"])
def test_a_net_of_another_question_is_not_taken(data, kept, other, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(net, "PATH", tmp_path / "qm9.safetensors")
    monkeypatch.setattr(nets, "of_split", lambda *_, **asked: Kept(kept.net, 1, 1.0, machine()))
    net.write(kept, data, seed=0, epochs=5, done=4)
    asked = {"seed": 0, "epochs": 5} | ({} if other == "molecules" else {other: 9})
    if other == "molecules":
        with samples.drawn(0, 1, **SIZES) as data:
            found, done = net.of(data, **asked, keep=False)
    else:
        found, done = net.of(data, **asked, keep=False)
    assert done is None and found.epoch == 1


def test_predictions_are_those_of_the_whole_net_in_the_order_of_the_test_molecules(
    data, kept
) -> None:
    parts = [data.environments(rows) for rows in (data.train, data.valid, data.test)]
    uq = rg.LastLayerRigidity(kept.net)
    uq.fit(parts[0].batches(50), sample_weight=loss_weight)
    uq = work.calibrated(uq, parts[1], error_bars.PAPER)
    p = uq.predict(parts[2].batches(30), sample_weight=loss_weight)
    top = rg.LastLayerRigidity(work.readouts(kept.net))
    known, held = (work.hidden(kept.net, part) for part in parts[:2])
    top.fit(known.batches(50), sample_weight=loss_weight)
    ways = {"nll": work.calibrated(top, held, error_bars.PAPER)}
    rows = work.predicted(ways, kept.net, data)["nll"]
    for found, expected in ((rows.mean, p.mean), (rows.bar, p.std), (rows.target, parts[2].y)):
        torch.testing.assert_close(found, expected.double().flatten())


def test_files_are_joined_molecule_by_molecule() -> None:
    whole = rows_of(30)
    parts = [whole.picked(rows) for rows in torch.arange(30).split(11)]
    for name, value in vars(work.joined(parts)).items():
        expected = getattr(whole, name)
        assert value is None if expected is None else torch.equal(value, expected)


def test_scores_are_those_of_the_rows() -> None:
    rows = rows_of(400)
    found = work.scored(rows, 20, 100)
    all_rows = (rows.mean, rows.bar, rows.target)
    assert found["nll"] == pytest.approx(metrics.nll(*all_rows))
    assert found["crps"] == pytest.approx(metrics.crps(*all_rows))
    assert found["wide_log_ratio"] == metrics.binned_log_ratio(*all_rows, 100)
    assert found["binned_log_ratio"] == metrics.binned_log_ratio(*all_rows, 20)
    half = 1.6448536 * rows.bar
    inside = ((rows.target - rows.mean).abs() <= half).double().mean()
    assert found["coverage_90"] == pytest.approx(float(inside))


def test_the_kurtosis_of_a_gaussian_is_three_and_of_heavy_tails_more() -> None:
    made = torch.Generator().manual_seed(0)
    z = torch.randn(200_000, generator=made, dtype=torch.float64)
    assert work.kurtosis(5 * z) == pytest.approx(3, abs=0.05)
    assert work.kurtosis(z**3) > 10


def test_sizes_have_their_own_errors_and_coverage(data) -> None:
    rows = rows_of(len(data.test))
    counts = data.molecules.structures.counts[data.test]
    for one in work.sizes(rows, data):
        own = rows.picked(counts == one["size"])
        assert one["molecules"] == len(own.mean)
        ratio = float(((own.mean - own.target).square().mean() / own.bar.square().mean()).sqrt())
        assert one["ratio"] == pytest.approx(ratio)
        assert one["coverage_90"] == pytest.approx(float(own.covered.double().mean()))


def test_differences_are_paired() -> None:
    one, other = rows_of(50), rows_of(50, seed=1)
    found = work.differences(one, other)["nll"]
    apart = one.nll - other.nll
    error = float(apart.std()) / math.sqrt(50)
    assert found == pytest.approx([float(apart.mean()), error])
    assert work.differences(one, one)["crps"] == [0, 0]


@pytest.mark.skipif(not net.PATH.exists(), reason="the net of QM9 is not here")
def test_the_committed_net_is_small_and_whole() -> None:
    assert net.PATH.stat().st_size < 4e6
    found = nets.read(net.PATH)
    assert sum(value.numel() for value in found.net.parameters()) == 786_240
    assert all(value.isfinite().all() for value in found.net.state_dict().values())
