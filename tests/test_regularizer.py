"""What the ridge stands for: the trainings, the bias, the effects and the page."""

from __future__ import annotations

import doctest
import json
import math
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from experiments import __main__ as command
from experiments import error_bars, figures, report
from experiments import quartiles as spread
from experiments import regularizer as experiment
from experiments.outcome import Outcome, Table
from experiments.regularizer import summary, texts, work

import synthetic_data
from conftest import Trained
from rigidities import LastLayerRigidity

pytestmark = pytest.mark.xdist_group("california")

SMALL = {"count": 2, "seed": 0, "epochs": 6, "hidden": 8, "bin_size": 40, "most": 120}


@pytest.fixture(autouse=True)
def data(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / "synthetic"
    if not (folder / "california_housing.npz").exists():
        synthetic_data.write(folder)
    monkeypatch.setenv("RIGIDITIES_DATA", str(folder))
    return folder


@pytest.fixture
def outcome() -> Outcome:
    with matplotlib.rc_context(figures.style()):
        return experiment.run(quick=True, seed=0)


def entry(ridge: float, **more: float) -> dict[str, Any]:
    """A net whose numbers are all the same but for the ridge."""
    numbers = {
        **dict.fromkeys([*work.JUDGED, "noise", "effective_rank", "log_largest"], 1.0),
        **dict.fromkeys(["at_lower_edge", "at_upper_edge"], 0.0),
        "log_ridge": ridge + 4,
        "log_relative_ridge": ridge,
        **more,
    }
    return dict.fromkeys(work.CALIBRATIONS, numbers)


# --- trainings ----------------------------------------------------------------------------------


def test_copies_enter_the_training_and_the_gram_at_the_same_number_of_steps(monkeypatch) -> None:
    seen = []

    def trained(train: Any, valid: Any, protocol: Any, seeds: Any, what: str) -> Any:
        seen.append((train[0], protocol))
        return original(train, valid, protocol, seeds, what)

    original = work.trained
    monkeypatch.setattr(work, "trained", trained)
    one, two = (work.nets(copies=copies, decay=0.0, **SMALL) for copies in (1, 2))
    (x, first), (xx, second) = seen
    assert torch.equal(xx, torch.cat([x, x], 1))
    assert first.epochs * x.shape[1] == second.epochs * xx.shape[1]
    assert (first.patience, second.patience) == (100, 50)
    assert [entry["rows"]["train"] for entry in (one, two)] == [120, 240]
    largest = [
        sum(10 ** net["nll"]["log_largest"] for net in found["last"]) for found in (one, two)
    ]
    assert largest[1] / largest[0] == pytest.approx(2, rel=0.2)


def test_decay_shrinks_the_weights_and_the_last_weights_differ_from_the_best() -> None:
    free, decayed = (work.nets(copies=1, decay=decay, **SMALL) for decay in (0.0, 50.0))
    for a, b in zip(free["last"], decayed["last"], strict=True):
        assert b["weights"] < 0.7 * a["weights"]
    assert decayed["best"][0]["valid_rmse"] <= decayed["last"][0]["valid_rmse"]


def test_ridges_are_those_that_the_library_chooses(net: Trained) -> None:
    found = work._judged(net.model, net.train, net.valid, net.test, 40)
    uq = LastLayerRigidity(net.model).fit(net.train)
    report_ = uq.calibrate(net.valid, noise="constant")
    one = found["nll, floor"]
    largest = float(torch.linalg.eigvalsh(uq.gram.matrix).max())
    assert one["log_relative_ridge"] == pytest.approx(math.log10(report_.ridge / largest))
    assert one["log_ridge"] == pytest.approx(math.log10(report_.ridge))
    assert one["noise"] == pytest.approx(float(report_.noise) ** 0.5)
    assert found["nll"]["noise"] == 0
    law = torch.distributions.Normal(*uq(net.test[0]))
    nll = -float(law.log_prob(net.test[1]).double().mean())
    assert one["nll"] == pytest.approx(nll, rel=1e-5)


def test_the_bias_is_a_column_of_ones(net: Trained) -> None:
    uq = error_bars.fitted(net.model, net.train)
    found = work.without_bias(uq, net.model, net.train, net.valid, net.test, 40)
    bars = []
    for ones in (True, False):

        def features(model: Any, x: torch.Tensor, ones: bool = ones) -> torch.Tensor:
            hidden = model[:-1](x)
            return torch.cat([hidden, torch.ones(len(x), 1)], 1) if ones else hidden

        other = LastLayerRigidity(net.model, features=features).fit(net.train)
        other.calibrate(net.valid)
        bars.append(other.predict(net.test[0]).std.double().flatten())
    ratio = float((bars[1] / bars[0]).log10().abs().mean())
    assert ratio > 0
    assert found["log_ratio_of_bars"] == pytest.approx(ratio, rel=1e-3)
    assert found["rank_correlation_of_bars"] < 1


# --- summary ------------------------------------------------------------------------------------


def test_effects_are_differences_net_by_net() -> None:
    decays = (0.0, 0.1)
    conditions = {
        summary.name_of(decay, copies, stopping): [
            entry(10 * net + 5 * (decay > 0) + copies + 0.25 * (stopping == "last"))
            for net in range(3)
        ]
        for decay in decays
        for copies in (1, 2)
        for stopping in work.STOPPING
    }
    found = summary.effects(conditions, decays)
    for label, change in {
        "decay 0.1, best": 5,
        "decay 0.1, last": 5,
        "last epoch, decay 0": 0.25,
        "two copies, decay 0.1": 1,
    }.items():
        assert found[label]["bins"]["log_relative_ridge"] == pytest.approx([change, 0])
    assert len(found) == 6


def test_the_floors_effect_is_with_it_minus_without() -> None:
    net = entry(0.0)
    net["nll, floor"] = {**net["nll"], "log_relative_ridge": -3.0, "nll": 0.5}
    found = summary.floor_effects({"a": [net, net]})["a"]
    assert found["nll"]["log_relative_ridge"] == [-3.0, 0.0]
    assert found["nll"]["nll"] == [-0.5, 0.0]
    assert found["bins"]["nll"] == [0.0, 0.0]


def test_medians_and_quartiles_are_those_of_the_nets() -> None:
    values = [float(value) for value in torch.randn(9, generator=torch.Generator().manual_seed(0))]
    middle, low, high = spread.quartiles(values)
    exact = torch.tensor(values, dtype=torch.float64).quantile(
        torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64)
    )
    assert [middle, low, high] == pytest.approx(exact.tolist())
    assert spread.quartiles([2.0]) == [2.0, 2.0, 2.0]
    assert spread.quartiles_of_each([{"a": value, "b": 1.0} for value in values]) == {
        "a": [middle, low, high],
        "b": [1.0, 1.0, 1.0],
    }
    assert summary._pair([1.0, math.nan])[0] != summary._pair([1.0, math.nan])[0]


def test_one_ruined_net_does_not_move_the_biass_nll() -> None:
    biases = [{"nll": nll, "spearman": 0.5} for nll in (0.0, 0.01, 0.02, 0.03, 1e16)]
    found = summary._bias(biases)
    assert found["median"]["nll"] == pytest.approx([0.02, 0.01, 0.03])
    assert (found["ruined"], found["largest_nll"]) == (1, 1e16)
    assert found["spearman"] == [0.5, 0.0]
    assert "nll" not in found


def test_examples_in_docstrings_hold() -> None:
    for module in (summary, spread):
        done = doctest.testmod(module)
        assert (done.failed, done.attempted > 0) == (0, True)


# --- page ---------------------------------------------------------------------------------------


def test_words_follow_the_numbers() -> None:
    assert texts._change([0.5, 0.1]) == "rises (0.50 ± 0.10)"
    assert texts._change([-0.5, 0.1]) == "falls (-0.50 ± 0.10)"
    assert texts._change([0.5, 0.3]).startswith("does not clearly change")


def test_the_page_gives_every_training_and_what_the_control_says(outcome: Outcome) -> None:
    numbers = json.loads(report.rendered_numbers(outcome))
    assert len(numbers["conditions"]) == 2 * len(experiment.QUICK_DECAYS) * len(work.STOPPING)
    page = "\n".join(map(str, outcome.page))
    for name, one in numbers["conditions"].items():
        assert f"| {name} | {one['nll']['log_relative_ridge'][0]:.2f} (" in page
    below = sum(one["nll"]["log_relative_ridge"][0] < 0 for one in numbers["floor"].values())
    assert f"in {below} of\n{len(numbers['floor'])} trainings by the likelihood" in page
    edge = sum(one["nll"]["at_upper_edge"] for one in numbers["conditions"].values())
    assert numbers["at_upper_edge"]["nll"] == edge
    report.checked_png(outcome.pictures[0])
    for table in (block for block in outcome.page if isinstance(block, Table)):
        assert len(table.columns) <= 7
    one = numbers["conditions"]["decay 0, 1 copy, best"]["bias"]
    middle, low, high = one["median"]["nll"]
    assert f"| {middle:.3f} ({low:.3f} to {high:.3f}) | {one['ruined']} |" in page


@pytest.mark.skipif("regularizer" not in command.EXPERIMENTS, reason="not in the list yet")
def test_the_command_runs_it(tmp_path: Path) -> None:
    assert command.main(["regularizer", "--quick", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/regularizer.json").exists()
