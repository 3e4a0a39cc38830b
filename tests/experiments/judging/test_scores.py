"""Scores of error bars, how they are chosen, and the pictures drawn from what is kept."""

import itertools
import json
import math
import statistics

import pytest
import torch
from experiments.frame.outcome import plain
from experiments.judging.error_bars import BAYES, BINS, FLOOR, PAPER, SAFE
from matplotlib.collections import PathCollection
from torch import Tensor

import rigidities as rg
from experiments.frame import figures
from experiments.judging import columns, error_bars, parity, scores
from rigidities import LastLayerRigidity, metrics
from tests.support.nets import Trained


def sample(rows: int = 400, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Predictions with right bars."""
    generator = torch.Generator().manual_seed(seed)
    mean, noise = torch.randn(2, rows, generator=generator, dtype=torch.float64)
    std = torch.rand(rows, generator=generator, dtype=torch.float64) + 0.1
    return mean, std, mean + std * noise


# --- scores -------------------------------------------------------------------------------------


def test_the_offset_of_bars_too_small_by_ten_is_two_decades() -> None:
    mean, std, target = sample()
    right, small = (scores.scores(mean, bar, target, 50) for bar in (std, std / 10))
    assert small["offset"] - right["offset"] == pytest.approx(2)
    assert small["binned_log_ratio"] == pytest.approx(small["offset"])
    assert small["coverage"] < 0.3 < 0.85 < right["coverage"]


def test_scores_are_those_of_the_library() -> None:
    mean, std, target = sample()
    found = scores.scores(mean, std, target, 50)
    assert found["ence"] == metrics.ence(mean, std, target, bins=8)
    for name in ("rmse",):
        assert found[name] == getattr(metrics, name)(mean, target)
    for name in ("nll", "crps", "coverage", "spearman"):
        assert found[name] == getattr(metrics, name)(mean, std, target)
    for name in ("binned_log_ratio", "slope"):
        assert found[name] == getattr(metrics, name)(mean, std, target, 50)
    assert found["decades"] == metrics.decades(std, 50)


def test_the_gain_is_over_the_given_constant_bar() -> None:
    mean, std, target = sample()
    found = scores.beside_constant(mean, std, target, 0.7, 50)
    flat = metrics.nll(mean, torch.full_like(std, 0.7), target)
    assert found["scores"]["gain"] == pytest.approx(flat - metrics.nll(mean, std, target))
    assert found["constant"]["scores"]["nll"] == pytest.approx(flat)
    assert found["constant"]["scores"]["decades"] == 0
    assert math.isnan(found["constant"]["scores"]["slope"])
    same = scores.beside_constant(mean, torch.full_like(std, 0.7), target, 0.7, 50)
    assert same["scores"]["gain"] == 0


def test_points_are_drawn_without_repetition_and_keep_their_pairs() -> None:
    rows = scores.POINTS + 100
    std = torch.arange(1.0, rows + 1, dtype=torch.float64)
    found = scores.points(torch.zeros(rows), std, -2 * std)
    assert len(found["std"]) == len(set(found["std"].tolist())) == scores.POINTS
    assert torch.equal(found["error"], 2 * found["std"])
    assert found["rows"] == rows
    assert len(scores.points(std[:9], std[:9], std[:9])["std"]) == 9


def test_bins_are_those_of_the_library() -> None:
    mean, std, target = sample()
    found = scores.bins(mean, std, target, 50)
    variance, mse = metrics.binned(mean, std, target, 50)
    assert found["bin_size"] == 50
    assert torch.equal(found["variance"], variance)
    assert torch.equal(found["mse"], mse)


def test_paired_differences_know_what_repetitions_share() -> None:
    shared = [0.0, 10.0, -7.0, 4.0]
    one = [{"nll": value + 1} for value in shared]
    other = [{"nll": value} for value in shared]
    assert scores.paired(one, other) == {"nll": [1.0, 0.0]}
    mean, error = scores.over_seeds(one)["nll"]
    assert mean == pytest.approx(2.75)
    assert error == pytest.approx(float(torch.tensor(shared).double().std()) / 2)


# --- error bars ---------------------------------------------------------------------------------


def test_bars_are_those_of_the_calibration_asked_for(net: Trained) -> None:
    uq = error_bars.fitted(net.model, net.train)
    found = error_bars.bars(uq, net.valid, net.test[0], BAYES)
    p = uq.predict(net.test[0])
    torch.testing.assert_close(found.std, p.std.double().flatten())
    assert found.chosen["criterion"] == "evidence"
    assert found.chosen["noise_variance"] == pytest.approx(found.chosen["scale"] ** 2)
    assert found.chosen["ridge"] == uq.ridge
    paper = error_bars.bars(uq, net.valid, net.test[0], BINS)
    assert paper.chosen["noise_variance"] == 0
    assert not torch.allclose(paper.std, found.std)


def test_every_validation_row_is_judged_by_a_calibration_without_its_fold(net: Trained) -> None:
    uq = error_bars.fitted(net.model, net.train)
    x, y = net.valid
    for how in (SAFE, PAPER):
        found = error_bars.held_out(uq, net.valid, how)
        nll = error_bars.held_out_nll(uq, net.valid, how)
        for k in range(5):
            rows = list(range(k, len(x), 5))
            others = [row for row in range(len(x)) if row % 5 != k]
            other = LastLayerRigidity(net.model).fit(net.train)
            other.calibrate((x[others], y[others]), method=how)
            p = other.predict(x[rows])
            mean, std, target = (part.double().flatten() for part in (p.mean, p.std, y[rows]))
            torch.testing.assert_close(found[0][rows], mean)
            torch.testing.assert_close(found[1][rows], std)
            by_hand = (2 * math.pi * std**2).log() / 2 + (target - mean) ** 2 / (2 * std**2)
            torch.testing.assert_close(nll[rows], by_hand)


def chosen_by_hand(rows: dict[rg.Paper, list[float]]) -> rg.Paper:
    """The first, or the best by its mean of those better by two standard errors, in plain words."""
    (first, default), *others = rows.items()
    winners = {}
    for how, row in others:
        gains = [a - b for a, b in zip(default, row, strict=True)]
        error = statistics.stdev(gains) / math.sqrt(len(gains))
        if statistics.fmean(gains) > 2 * error:
            winners[how] = statistics.fmean(row)
    return min(winners, key=winners.__getitem__) if winners else first


def made_up(
    monkeypatch: pytest.MonkeyPatch, gains: dict[rg.Paper, tuple[float, float]]
) -> dict[rg.Paper, list[float]]:
    """Rows whose NLL is better than the default's by these means and standard errors, exactly."""
    generator = torch.Generator().manual_seed(0)
    default = torch.randn(100, generator=generator, dtype=torch.float64)
    rows = {SAFE: default}
    for how, (mean, error) in gains.items():
        noise = torch.randn(100, generator=generator, dtype=torch.float64)
        noise = (noise - noise.mean()) / noise.std() * 10
        rows[how] = default - mean - error * noise
    monkeypatch.setattr(error_bars, "held_out_nll", lambda uq, valid, how: rows[how])
    return {how: row.tolist() for how, row in rows.items()}


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ({}, SAFE),
        ({PAPER: (-0.1, 0.01), FLOOR: (-0.2, 0.01)}, SAFE),
        ({PAPER: (0.1, 0.051), FLOOR: (0.3, 0.16)}, SAFE),
        ({PAPER: (0.1, 0.049), FLOOR: (0.05, 0.03)}, PAPER),
        ({PAPER: (0.1, 0.001), FLOOR: (0.3, 0.1)}, FLOOR),
        ({PAPER: (0.1, 0.001), FLOOR: (0.3, 0.16)}, PAPER),
        ({PAPER: (0.1, 0.01), FLOOR: (0.2, 0.01), BINS: (0.3, 0.2)}, FLOOR),
    ],
    ids=[
        *("alone", "others worse", "better within two errors", "one clearly better"),
        *("both clearly: the best mean, not the surest", "the better mean is not clear"),
        "among three",
    ],
)
def test_the_first_is_kept_unless_another_is_clearly_better(
    gains: dict[rg.Paper, tuple[float, float]],
    expected: rg.Paper,
    monkeypatch: pytest.MonkeyPatch,
    net: Trained,
) -> None:
    rows = made_up(monkeypatch, gains)
    monkeypatch.setattr(error_bars, "determined", lambda uq, valid, how: True)
    assert chosen_by_hand(rows) == expected
    for others in itertools.permutations(gains):
        assert error_bars.best(None, net.valid, (SAFE, *others)) == expected


def test_the_rule_holds_for_a_net_whichever_comes_first(net: Trained) -> None:
    uq = error_bars.fitted(net.model, net.train)
    candidates = (SAFE, PAPER, BINS, BAYES)
    rows = {how: error_bars.held_out_nll(uq, net.valid, how).tolist() for how in candidates}
    for first in candidates:
        order = [first, *(how for how in candidates if how != first)]
        expected = chosen_by_hand({how: rows[how] for how in order})
        assert error_bars.best(uq, net.valid, order) == expected


def test_a_better_one_is_not_taken_where_its_ridge_leaves_nothing_determined(
    monkeypatch: pytest.MonkeyPatch, net: Trained
) -> None:
    made_up(monkeypatch, {PAPER: (0.1, 0.01), FLOOR: (0.2, 0.01)})
    monkeypatch.setattr(error_bars, "determined", lambda uq, valid, how: how != FLOOR)
    assert error_bars.best(None, net.valid, (SAFE, PAPER, FLOOR)) == PAPER
    monkeypatch.setattr(error_bars, "determined", lambda uq, valid, how: False)
    assert error_bars.best(None, net.valid, (SAFE, PAPER, FLOOR)) == SAFE


@pytest.mark.filterwarnings("ignore:The calibration rows have an RMS error:UserWarning")
def test_a_ridge_above_all_eigenvalues_determines_nothing(net: Trained) -> None:
    uq = error_bars.fitted(net.model, net.train)
    assert error_bars.determined(uq, net.valid, PAPER)
    x, y = net.valid
    # Residuals as long as the features: the likelihood chooses bars that follow those alone.
    length = uq.features(x).double().norm(dim=1, keepdim=True)
    sign = torch.where(torch.arange(len(x)) % 2 == 0, 1.0, -1.0)[:, None]
    far = uq.predict(x).mean + (sign * length).to(y)
    assert not error_bars.determined(uq, (x, far), PAPER)


def test_calibrations_that_agree_leave_the_first(net: Trained) -> None:
    uq = error_bars.fitted(net.model, net.train)
    assert error_bars.best(uq, net.valid, (PAPER, rg.Paper())) is PAPER
    assert float(error_bars.standing(torch.zeros(4))) == 0
    assert float(error_bars.standing(torch.tensor([1.0, 3.0]))) == pytest.approx(2)
    assert error_bars.CANDIDATES[0] == SAFE == rg.Paper(criterion="evidence", noise="constant")


def test_the_constant_bar_is_the_root_mean_square_residual() -> None:
    assert error_bars.constant(torch.zeros(2, 1), torch.tensor([[3.0], [4.0]])) == 12.5**0.5


# --- pictures -----------------------------------------------------------------------------------


def stored() -> dict[str, dict[str, object]]:
    """The blocks as a JSON file gives them back."""
    rows = sample()
    blocks = {"points": scores.points(*rows), "bins": scores.bins(*rows, 50)}
    return json.loads(json.dumps(plain(blocks)))


def test_a_binned_plot_shows_every_bin_within_its_axes() -> None:
    block = stored()["bins"]
    figure, (ax,) = figures.panels()
    parity.binned(ax, {"one": block, "other": block}, "Title")
    dots = [line for line in ax.lines if line.get_label() in {"one", "other"}]
    assert len(dots) == 2
    for line in dots:
        assert list(line.get_xdata()) == block["variance"]
        assert list(line.get_ydata()) == block["mse"]
    (low, high), values = ax.get_xlim(), block["variance"] + block["mse"]
    assert low < min(values) < max(values) < high
    assert high / low >= 10
    assert ax.get_ylim() == (low, high)
    assert ax.get_legend().get_title().get_text() == "bins of 50"
    assert figures.png(figure)


def test_a_bin_without_an_error_does_not_stretch_the_axes() -> None:
    _, (ax,) = figures.panels()
    parity.binned(ax, {"one": {"bin_size": 4, "variance": [1.0, 2.0], "mse": [0.0, 2.0]}})
    assert ax.get_xlim()[0] > 0.1


def test_pairs_have_rows_above_and_bins_below() -> None:
    block = stored()
    figure = parity.pairs({"in": block, "out": block})
    assert [ax.get_title() for ax in figure.axes] == ["in", "out", "", ""]
    labels = [ax.get_ylabel() for ax in figure.axes]
    assert labels == ["absolute error"] * 2 + ["mean squared error"] * 2
    scatters = [c for c in figure.axes[0].collections if isinstance(c, PathCollection)]
    assert sum(len(c.get_offsets()) for c in scatters) == len(block["points"]["std"])


def test_a_table_has_a_row_for_each_calibration_and_for_the_constant_bar() -> None:
    one = {
        "scores": {"nll": [1.0, 0.1], "gain": [0.5, 0.1]},
        "constant": {"scores": {"nll": [2, 0]}},
    }
    found = columns.score_rows({"paper": one, "best": one}, ("nll", "gain"), first=["a"])
    assert [row[:2] for row in found] == [["a", "paper (bins)"], ["a", "best"], ["a", "constant"]]
    assert found[1][2:] == ["1.000 ± 0.100", "0.500 ± 0.100"]
    assert found[2][2:] == ["2.000 ± 0.000", None]
    assert columns.heads(("nll", "binned_log_ratio")) == ["NLL", "log ratio"]
