"""What the ridge stands for: the trainings, the bias, the effects and the page."""

import json
import math
import re
from typing import Any

import pytest
import torch
from experiments.frame.outcome import Outcome, Table
from experiments.judging.stacks import Judged
from experiments.studies.regularizer import page as pages
from experiments.studies.regularizer import run as experiment
from experiments.studies.regularizer import signs, work

import rigidities as rg
from experiments.frame import report, wording
from experiments.judging import error_bars
from experiments.judging import scores as spread
from experiments.training import descent
from rigidities import LastLayerRigidity
from tests.support.nets import Trained
from tests.support.numbers_on_pages import unsupported

pytestmark = [pytest.mark.xdist_group("california"), pytest.mark.usefixtures("synthetic")]

SMALL = {"count": 2, "seed": 0, "epochs": 6, "hidden": 8, "bin_size": 40, "most": 120}


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

    original = descent.trained
    monkeypatch.setattr(descent, "trained", trained)
    one, two = (work.networks(copies=copies, decay=0.0, **SMALL) for copies in (1, 2))
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
    free, decayed = (work.networks(copies=1, decay=decay, **SMALL) for decay in (0.0, 50.0))
    for a, b in zip(free["last"], decayed["last"], strict=True):
        assert b["weights"] < 0.7 * a["weights"]
    assert decayed["best"][0]["valid_rmse"] <= decayed["last"][0]["valid_rmse"]


def test_ridges_are_those_that_the_library_chooses(net: Trained) -> None:
    fitted = error_bars.fitted(net.model, net.train)
    found = work._judged(Judged(net.model, fitted, *net[1:]), 40)
    uq = LastLayerRigidity(net.model).fit(net.train)
    report_ = uq.calibrate(net.valid, method=rg.Paper(noise="constant")).calibration_report
    one = found["nll, floor"]
    largest = float(torch.linalg.eigvalsh(uq.gram.matrix).max())
    assert one["log_relative_ridge"] == pytest.approx(math.log10(report_.ridge / largest))
    assert one["log_ridge"] == pytest.approx(math.log10(report_.ridge))
    assert one["noise"] == pytest.approx(float(report_.noise_level) ** 0.5)
    assert found["nll"]["noise"] == 0
    distribution = torch.distributions.Normal(*uq(net.test[0]))
    nll = -float(distribution.log_prob(net.test[1]).double().mean())
    assert one["nll"] == pytest.approx(nll, rel=1e-5)


def test_the_bias_is_a_column_of_ones(net: Trained) -> None:
    uq = error_bars.fitted(net.model, net.train)
    found = work.without_bias(Judged(net.model, uq, *net[1:]), 40)
    bars = []
    for ones in (True, False):

        def features(model: Any, x: torch.Tensor, ones: bool = ones) -> torch.Tensor:
            hidden = model[:-1](x)
            return torch.cat([hidden, torch.ones(len(x), 1)], 1) if ones else hidden

        other = LastLayerRigidity(net.model, features=features).fit(net.train)
        other.calibrate(net.valid, method="paper")
        bars.append(other.predict(net.test[0]).std.double().flatten())
    ratio = float((bars[1] / bars[0]).log10().abs().mean())
    assert ratio > 0
    assert found["log_ratio_of_bars"] == pytest.approx(ratio, rel=1e-3)
    assert found["rank_correlation_of_bars"] < 1


# --- summary ------------------------------------------------------------------------------------


def test_effects_are_differences_net_by_net() -> None:
    decays = (0.0, 0.1)
    conditions = {
        work.name_of(decay, copies, stopping): [
            entry(10 * net + 5 * (decay > 0) + copies + 0.25 * (stopping == "last"))
            for net in range(3)
        ]
        for decay in decays
        for copies in (1, 2)
        for stopping in work.STOPPING
    }
    found = experiment.effects(conditions, decays)
    for label, change in {
        "decay 0.1, best": 5,
        "decay 0.1, last": 5,
        "last epoch, decay 0": 0.25,
        "two copies, decay 0.1": 1,
    }.items():
        one = found[label]["bins"]["log_relative_ridge"]
        assert one["median"] == pytest.approx([change, change])
        assert (one["up"], one["down"], one["open"]) == (3, 0, 0)
        assert found[label]["bins"]["nll"] == [0.0, 0.0]
    assert len(found) == 6


def test_the_floors_effect_is_with_it_minus_without() -> None:
    net = entry(0.0)
    net["nll, floor"] = {**net["nll"], "log_relative_ridge": -3.0, "nll": 0.5}
    found = experiment.floor_effects({"a": [net, net]})["a"]
    ridge = found["nll"]["log_relative_ridge"]
    assert (ridge["median"], ridge["down"]) == ([-3.0, -3.0], 2)
    assert found["nll"]["nll"] == [-0.5, 0.0]
    assert found["bins"]["nll"] == [0.0, 0.0]


def at_edge(ridge: float) -> dict[str, Any]:
    return entry(ridge, at_upper_edge=1.0)["nll"]


def test_a_change_between_two_ridges_at_the_edge_is_open() -> None:
    low, high, edge = entry(-1.0)["nll"], entry(3.0)["nll"], at_edge(4.0)
    assert signs.range_of_change(edge, low, "log_relative_ridge") == (5.0, math.inf)
    assert signs.range_of_change(low, edge, "log_relative_ridge") == (-math.inf, -5.0)
    assert signs.range_of_change(high, low, "log_relative_ridge") == (4.0, 4.0)
    found = experiment.difference([edge, edge, high, low, low], [low, edge, low, high, low])
    ridge = found["log_relative_ridge"]
    assert [ridge[k] for k in ("up", "down", "same", "open")] == [2, 1, 1, 1]
    # five changes: -4, 0, 4, at least 5, and anything
    assert ridge["median"] == [0.0, 4.0]
    assert signs.counted(ridge) == "2 up, 1 down, 1 same, 1 open"


def test_the_largest_ridge_of_the_search_moves_no_verdict() -> None:
    """Wherever the search ends, as long as it lies above all other ridges."""
    nets = [-1.0, -0.5, 0.0, 0.5, 1.0, -2.0, 2.0, -1.5]
    found = []
    for end in (4.0, 12.0):
        there = [at_edge(end)] * 6 + [entry(ridge)["nll"] for ridge in (1.9, -1.4)]
        here = [entry(ridge)["nll"] for ridge in nets]
        found.append(experiment.difference(there, here)["log_relative_ridge"])
    near, far = ({k: v for k, v in one.items() if k != "median"} for one in found)
    assert near == far
    assert near["says"] == "rises"
    assert found[0]["median"][1] == found[1]["median"][1] == math.inf


@pytest.mark.parametrize("seed", range(6))
def test_the_rank_test_is_scipys_where_nothing_is_cut_off(seed: int) -> None:
    from scipy.stats import wilcoxon

    generator = torch.Generator().manual_seed(seed)
    values = (10 * torch.randn(9, generator=generator).double() + 4).tolist()
    found = signs.signs([(value, value) for value in values])
    assert found["p"] == pytest.approx(wilcoxon(values, method="exact").pvalue)
    assert found["median"] == pytest.approx([sorted(values)[4]] * 2)


def test_bounds_are_taken_against_the_change() -> None:
    ups = [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (4.0, math.inf), (5.0, math.inf)]
    assert signs.rank_test(ups) == 2 / 2**5
    # one fall of at least a little may be the largest of all
    assert signs.rank_test([*ups, (-math.inf, -0.1)]) == signs.rank_test([*ups, (-9.0, -9.0)])
    assert signs.rank_test([*ups, (-0.1, -0.1)]) < signs.rank_test([*ups, (-9.0, -9.0)])
    # an open change is left out, and equal sizes share their rank
    assert signs.rank_test([*ups, (-math.inf, math.inf)]) == signs.rank_test(ups)
    assert signs.rank_test([(1.0, 1.0), (1.0, 1.0), (-1.0, -1.0)]) == 1.0


def test_a_median_at_the_edge_is_at_least_that() -> None:
    ridges = [entry(-1.0)["nll"]] * 3 + [at_edge(4.0)] * 5
    block = experiment._calibration(ridges)
    assert (
        pages.ridge_cell(block, "log_relative_ridge") == "≥ 4.00 (-1.00 to ≥ 4.00); 5 at the edge"
    )
    block = experiment._calibration([entry(ridge)["nll"] for ridge in (1.0, 2.0, 3.0)])
    assert pages.ridge_cell(block, "log_relative_ridge") == "2.00 (1.50 to 2.50)"
    lower = {**entry(-10.0)["nll"], "at_lower_edge": 1.0}
    assert (
        signs.bounded(signs.bounded_quartiles([signs.range_of(lower, "log_ridge")])[0]) == "≤ -6.00"
    )


def test_only_clear_changes_by_a_floor_are_counted() -> None:
    def training(ridges: list[float], nll: list[float]) -> dict[str, Any]:
        ridge = signs.signs([(value, value) for value in ridges])
        return {"nll": {"log_relative_ridge": ridge, "nll": nll}}

    floor = {
        "falls": training([-0.1 * k for k in range(1, 9)], [-0.3, 0.1]),
        "falls too": training([-0.2 * k for k in range(1, 9)], [-0.4, 0.1]),
        "mean falls": training([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, -9.0], [-0.3, 0.2]),
        "rises": training([0.1 * k for k in range(1, 9)], [0.3, 0.1]),
    }
    floor["open"] = {
        "nll": {
            "log_relative_ridge": signs.signs([(-math.inf, math.inf)] * 4 + [(-1.0, -1.0)] * 4),
            "nll": [0.0, 0.0],
        }
    }
    assert experiment.floor_counts(floor, "nll") == {
        "of": 5,
        "falls": 2,
        "rises": 1,
        "open": 1,
        "nll_falls": 2,
        "nll_rises": 1,
    }


def test_edges_are_counted_by_decay() -> None:
    conditions = {
        work.name_of(decay, 1, stopping): [
            entry(4.0, at_upper_edge=float(decay > 0 and stopping == "last")),
            entry(0.0),
        ]
        for decay in (0.0, 0.1)
        for stopping in work.STOPPING
    }
    found = experiment.edge_counts(conditions, (0.0, 0.1), (1,))
    assert {decay: (one["nets"], one["bins"]) for decay, one in found.items()} == {
        "0": (4, 0),
        "0.1": (4, 1),
    }


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
    assert (
        experiment._mean_and_error([1.0, math.nan])[0]
        != experiment._mean_and_error([1.0, math.nan])[0]
    )


def test_one_ruined_net_does_not_move_the_biass_nll() -> None:
    biases = [{"nll": nll, "spearman": 0.5} for nll in (0.0, 0.01, 0.02, 0.03, 1e16)]
    found = experiment._bias(biases)
    assert found["median"]["nll"] == pytest.approx([0.02, 0.01, 0.03])
    assert (found["ruined"], found["largest_nll"]) == (1, 1e16)
    assert found["spearman"] == [0.5, 0.0]
    assert "nll" not in found


# --- page ---------------------------------------------------------------------------------------


def test_words_follow_the_numbers() -> None:
    rise = signs.signs([(float(k), math.inf) for k in range(1, 9)])
    assert pages._moved(rise) == "rises (8 up, 0 down; median ≥ 4.50)"
    assert pages.sign_cell(rise) == "**≥ 4.50; 8 up, 0 down**"
    both = signs.signs([(1.0, 1.0), (-2.0, -2.0)])
    assert pages._moved(both) == "does not clearly change (1 up, 1 down; median -0.50)"
    counts = {"of": 12, "falls": 0, "rises": 0, "open": 0}
    assert "not clear" in pages._conclusion("bins", counts)
    assert "in 4 trainings of 12; in the others" in pages._conclusion(
        "bins", {**counts, "falls": 4}
    )
    assert "in 11 trainings of 12, part" in pages._conclusion("bins", {**counts, "falls": 11})
    assert "no one sign" in pages._conclusion("bins", {**counts, "falls": 11, "rises": 1})
    assert "open" not in pages._ridge_counts(counts)
    assert "in 3 at least half" in pages._ridge_counts({**counts, "open": 3})


def test_the_page_gives_every_training_and_what_the_control_says(outcome: Outcome) -> None:
    numbers = json.loads(report.rendered_numbers(outcome))
    assert len(numbers["conditions"]) == 2 * len(experiment.QUICK_DECAYS) * len(work.STOPPING)
    page = "\n".join(map(str, outcome.page))
    assert unsupported(page, numbers) == []
    for name, one in numbers["conditions"].items():
        assert re.search(rf"\| {re.escape(name)} \| (≥ |≤ )?{_middle(one)} \(", page)
    counts = numbers["floor_counts"]["bins"]
    below = sum(
        one["bins"]["log_relative_ridge"]["says"] == "falls" for one in numbers["floor"].values()
    )
    assert counts["falls"] == below
    assert f"clearly falls in {below} and rises in {counts['rises']} of {counts['of']}" in page
    assert wording.SHARED_ROWS in page
    assert "half the patience" in page
    edge = sum(one["nll"]["at_upper_edge"] for one in numbers["conditions"].values())
    assert numbers["at_upper_edge"]["nll"] == edge
    assert sum(one["nll"] for one in numbers["at_upper_edge_by_decay"].values()) == edge
    report.checked_png(outcome.pictures[0])
    for table in (block for block in outcome.page if isinstance(block, Table)):
        assert len(table.columns) <= 7
    one = numbers["conditions"]["decay 0, 1 copy, best"]["bias"]
    middle, low, high = one["median"]["nll"]
    assert f"| {middle:.3f} ({low:.3f} to {high:.3f}) | {one['ruined']} |" in page


def _middle(one: dict[str, Any]) -> str:
    """The median as the table has it."""
    return re.escape(f"{one['nll']['log_relative_ridge'][0]:.2f}")
