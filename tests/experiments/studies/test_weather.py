"""The weather experiment: its rows, its net, the choice of calibrations, and what it writes."""

import json
import math
from pathlib import Path

import pytest
import torch
from experiments.frame.catalogue import EXPERIMENTS, Experiment
from experiments.judging.error_bars import BINS, CANDIDATES, FLOOR, PAPER
from experiments.studies.weather import page as pages
from experiments.studies.weather import run as experiment
from experiments.studies.weather import work
from experiments.training.loop import Rows
from torch import Tensor

import rigidities as rg
from experiments import __main__ as command
from experiments.data import weather as records
from experiments.frame import wording
from experiments.judging import error_bars
from rigidities import LastLayerRigidity, metrics
from tests.support import synthetic_data
from tests.support.numbers_on_pages import NUMBER, table_rows, unsupported


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIGIDITIES_DATA", str(synthetic_data.write(tmp_path / "data")))
    monkeypatch.setenv("RIGIDITIES_UNCHECKED", "1")
    return tmp_path


def fitted(rows: int = 600, seed: int = 0) -> tuple[LastLayerRigidity, Rows]:
    """An untrained forecaster whose errors follow its own variances, and validation rows."""
    generator = torch.Generator().manual_seed(seed)
    net = work.forecaster(5, 3, seed).double().eval()

    def inputs(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 5, generator=generator, dtype=torch.float64)
        return x, torch.randint(3, (count,), generator=generator)

    train, valid = inputs(rows), inputs(rows)
    with torch.no_grad():
        uq = LastLayerRigidity(net, progress=False).fit((*train, net(*train)))
        noise = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
        return uq, (*valid, net(*valid) + (0.1 + valid[0][:, :1].abs()) * noise)


def test_records_are_standardised_on_the_training_rows_alone(folder: Path) -> None:
    split = work.drawn(0, 0, standardised=True)
    x, station, y = split.train
    assert x.shape[1] == 22 and station.dtype == torch.int64 and len(split.stations) == 3
    torch.testing.assert_close(x.double().mean(0), torch.zeros(22).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.double().std(0), torch.ones(22).double(), atol=1e-5, rtol=0)
    assert float(y.std()) == pytest.approx(1, abs=1e-5)
    assert not torch.allclose(split.test[0].mean(0), torch.zeros(22), atol=1e-3)


def test_raw_and_standardised_targets_are_the_same_temperatures(folder: Path) -> None:
    raw, scaled = (work.drawn(1, 0, standardised=flag) for flag in (False, True))
    original = records.read()
    places = original.random(1, 0)
    for name in ("train", "valid", "test"):
        degrees = torch.as_tensor(original.y[getattr(places, name)])
        for split in (raw, scaled):
            y = getattr(split, name)[-1].double().flatten()
            torch.testing.assert_close(split.level + split.spread * y, degrees, atol=1e-4, rtol=0)
        assert torch.equal(getattr(raw, name)[0], getattr(scaled, name)[0])
    assert (raw.level, raw.spread) == (0.0, 1.0) and scaled.spread > 1


def test_splits_are_40_30_30_without_a_row_in_common(folder: Path) -> None:
    split = work.drawn(0, 0, standardised=False)
    counts = [len(part[-1]) for part in (split.train, split.valid, split.test)]
    total = len(records.read().y)
    assert sum(counts) == total
    assert counts == pytest.approx([0.4 * total, 0.3 * total, 0.3 * total], abs=1)
    parts = [{tuple(row.tolist()) for row in part[0]} for part in (split.train, split.valid)]
    assert not parts[0] & parts[1]
    assert len(work.drawn(0, 0, standardised=False, rows=50).test[0]) == 50


def test_the_forecast_depends_on_records_and_station() -> None:
    net = work.forecaster(22, 26, seed=0)
    x, station = torch.randn(4, 22), torch.tensor([0, 1, 2, 25])
    with torch.no_grad():
        by_hand = net.head(net.hidden(torch.cat([x, net.stations.weight[station]], dim=1)))
        torch.testing.assert_close(net(x, station), by_hand)
        assert not torch.allclose(net(x, station), net(x, station.flip(0)))
    assert [layer.weight.shape for layer in net.hidden if hasattr(layer, "weight")] == [
        (256, 278),
        (256, 256),
    ]
    assert torch.equal(work.forecaster(22, 26, seed=0).head.weight, net.head.weight)
    assert not torch.equal(work.forecaster(22, 26, seed=1).head.weight, net.head.weight)


def test_a_constant_bar_is_not_chosen_for_its_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A form whose bins are perfect and whose likelihood is a constant bar's is passed over."""
    uq, valid = fitted(400)
    spread = 0.1 + valid[0][:, 0].abs()
    sign = torch.sign(torch.randn(400, generator=torch.Generator().manual_seed(0)))
    target, zero = spread * sign, torch.zeros(400, dtype=torch.float64)
    flat = torch.full_like(target, metrics.rmse(zero, target))
    floor = rg.Paper(criterion="bins", noise="constant")
    given = {PAPER: (zero, 3 * spread), BINS: (zero, 1.3 * spread), floor: (zero, flat)}
    monkeypatch.setattr(work, "held_out", lambda uq, valid, how: given[how])
    rows = (*valid[:-1], target[:, None])
    assert work.best_bins(uq, rows, 400) == BINS
    given[floor] = (zero, spread)
    assert work.best_bins(uq, rows, 400) == floor


@pytest.mark.filterwarnings("ignore:The calibration rows have an RMS error:UserWarning")
def test_the_choice_by_bins_has_the_smallest_held_out_ratio() -> None:
    uq, valid = fitted(300)
    found = work.best_bins(uq, valid, 20)
    target = valid[-1].flatten()
    ratios = {
        how: metrics.binned_log_ratio(*error_bars.held_out(uq, valid, how), target, 20)
        for how in work.CANDIDATES
    }
    assert len(set(ratios.values())) > 1
    assert found == min(ratios, key=ratios.__getitem__)


def test_stations_get_the_root_mean_squares_of_their_own_rows(folder: Path) -> None:
    split = work.drawn(0, 0, standardised=False)
    count = len(split.test[-1])
    station = split.test[1]
    std = 1.0 + station.double()
    bars = error_bars.Bars(torch.zeros(count).double(), std, {})
    found = work._per_station(bars, torch.where(station == 2, -3.0, 4.0).double(), split)
    assert found["Perth"] == {"rows": int((station == 2).sum()), "bar": 3.0, "rmse": 3.0}
    assert found["Albury"]["bar"] == 1.0 and found["Cairns"]["rmse"] == 4.0


def test_scores_are_in_degrees_whatever_the_net_sees(folder: Path) -> None:
    """Rescaled targets with a net rescaled alike give the same scores."""
    raw, scaled = (work.drawn(0, 0, standardised=flag) for flag in (False, True))
    net = work.forecaster(22, 3, seed=0).double().eval()
    found = []
    for split in (raw, scaled):
        rows = (split.train, split.valid, split.test)
        parts = [(part[0].double(), part[1], part[2].double()) for part in rows]
        own = work.WeatherSplit(*parts, split.stations, split.level, split.spread)
        with torch.no_grad():
            net.head.weight.div_(split.spread)
            net.head.bias.sub_(split.level).div_(split.spread)
        uq = LastLayerRigidity(net, progress=False).fit(own.train)
        bars = work._bars(uq, own, FLOOR)
        target = own.degrees(own.test[-1])
        constant = work._constant(uq, own)
        found.append((bars, work._scored(bars, target, constant, 50, "paper")))
    (one, first), (two, second) = found
    assert first["scores"] == pytest.approx(second["scores"], rel=1e-3)
    assert first["constant"]["scores"] == pytest.approx(
        second["constant"]["scores"], rel=1e-3, nan_ok=True
    )
    assert one.chosen["noise_variance"] == pytest.approx(two.chosen["noise_variance"], rel=0.02)


def test_nets_are_put_together_by_means_errors_and_pairs() -> None:
    def net(nll: float, station: float) -> dict:
        chosen = {
            "criterion": "nll",
            "noise": "none",
            "ridge": nll,
            "scale": 1,
            "noise_variance": 0,
        }
        one = {
            "scores": {"nll": nll, "binned_log_ratio": 0.1 * nll, "gain": 1.0},
            "constant": {"scores": {"nll": 9.0, "binned_log_ratio": 0.05}},
            "chosen": chosen,
        }
        other = {**one, "scores": {"nll": 2 * nll, "binned_log_ratio": 0.2 * nll, "gain": 1.0}}
        stations = {"B": {"rows": 2, "bar": 0.5, "rmse": station}}
        stations["A"] = {"rows": 1, "bar": 1.0, "rmse": 1.0}
        return {
            "calibrations": {"paper": one, "best": other},
            "stations": dict.fromkeys(work.SHOWN, stations),
            "epoch": 3,
            "rows": {"train": 1},
        }

    both = [net(1.0, 2.0), net(3.0, 4.0)]
    found = experiment.over_splits(both)
    assert found["calibrations"]["paper"]["scores"]["nll"] == [2.0, 1.0]
    assert found["calibrations"]["paper"]["chosen"]["ways"] == {"nll, none": 2}
    assert found["differences"]["best"]["nll"] == [2.0, 1.0]
    assert set(found["differences"]) == {"best"}
    constant = found["from_constant"]
    assert constant["paper"]["binned_log_ratio"] == pytest.approx([0.15, 0.1])
    assert constant["best"]["binned_log_ratio"] == pytest.approx([0.35, 0.2])
    ratio, gain = (found["leaders"][name] for name in ("binned_log_ratio", "gain"))
    assert (ratio["name"], ratio["tied"], ratio["same"]) == ("paper", ["best"], [])
    assert ratio["others"]["best"] == pytest.approx([0.2, 0.1])
    assert (gain["name"], gain["tied"], gain["same"]) == ("paper", [], ["best"])
    assert list(found["stations"]["paper"]) == ["A", "B"]
    assert found["stations"]["paper"]["B"] == {"rows": 4, "bar": [0.5, 0.0], "rmse": [3.0, 1.0]}
    assert experiment.between(both, both[::-1])["paper"]["nll"] == [0.0, 2.0]


def test_a_winner_by_less_than_its_error_is_called_a_tie() -> None:
    own = {
        "paper": [{"gain": value} for value in (0.10, 0.20, 0.30)],
        "nll": [{"gain": value} for value in (0.10, 0.21, 0.30)],
        "best": [{"gain": value} for value in (0.10, 0.21, 0.30)],
        "best_bins": [{"gain": value} for value in (0.05, 0.14, 0.25)],
    }
    found = experiment.leader(own, "gain", 1)
    assert (found["name"], found["same"], found["tied"]) == ("nll", ["best"], ["paper"])
    assert pages._ties(found) == (
        "*best* has the same value on every split. *paper (bins)* (-0.003 ± 0.003) does not "
        "clearly differ from it. *best by bins* (-0.057 ± 0.007) is clearly behind"
    )
    assert experiment.leader(own, "gain", -1)["name"] == "best_bins"


def test_the_page_says_what_the_papers_recipe_gives() -> None:
    settings = experiment._settings(
        {
            "rows": dict.fromkeys(("train", "valid", "test"), 9),
            "inputs": 22,
            "stations": {"paper": {}},
        },
        2,
        {"epochs": 1, "bin_size": 5},
    )
    text = " ".join(" ".join(pages.opening(settings)).split())
    assert "turns each wind direction into two numbers. This recipe gives 22" in text
    assert "not the 26 that the paper states" in text
    assert "next calendar day at the station" in text
    assert wording.SHARED_ROWS in text


@pytest.mark.slow
def test_a_quick_run_writes_numbers_tables_and_figures(folder: Path, monkeypatch) -> None:
    monkeypatch.setitem(EXPERIMENTS, "weather", Experiment("weather", "tomorrow's maximum", 15))
    monkeypatch.setattr(
        experiment, "QUICK", {"splits": 2, "epochs": 2, "bin_size": 20, "rows": 120}
    )
    assert command.main(["weather", "--quick", "--out", str(folder / "out")]) == 0
    found = json.loads((folder / "out/weather.json").read_text(encoding="utf-8"))
    page = (folder / "out/weather.md").read_text(encoding="utf-8")
    assert set(found["targets"]) == {"raw", "standardised"}
    for kind in found["targets"].values():
        ways = kind["calibrations"]
        assert set(ways) == {"paper", "nll", "best", "best_bins"}
        assert ways["paper"]["chosen"]["ways"] == {"bins, none": 2}
        assert ways["nll"]["chosen"]["ways"] == {"nll, none": 2}
        chosen = ways["best"]["chosen"]["ways"]
        assert set(chosen) <= {f"{one.criterion}, {one.noise}" for one in CANDIDATES}
        for way in ways.values():
            mean, error = way["scores"]["binned_log_ratio"]
            assert math.isfinite(mean) and math.isfinite(error)
        assert len(ways["paper"]["bins"]["variance"]) == 120 // 20
    assert unsupported(page, found) == []
    assert sum(len(NUMBER.findall(row)) for row in table_rows(page)) > 100
