"""The gap: its functions and rows, its scores against formulas written out here, and its page."""

import json
import math
from pathlib import Path

import pytest
import torch
from experiments.__main__ import RESULTS, main
from experiments.data.gap import Function, Sample
from experiments.studies.gap import work
from experiments.studies.gap.work import Bars

from experiments.baselines import mapie
from experiments.data import gap
from tests.support.numbers_on_pages import unsupported

pytestmark = pytest.mark.xdist_group("gap")


def test_functions_have_the_covariance_of_their_length_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.tensor([[0.0], [gap.LENGTH], [3 * gap.LENGTH]], dtype=torch.float64)
    values = torch.cat([Function.draw(generator)(x) for _ in range(4000)], 1)  # (3, functions)
    expected = torch.exp(-0.5 * (x - x.T).square() / gap.LENGTH**2)
    torch.testing.assert_close(torch.cov(values), expected, rtol=0, atol=0.1)


def test_no_method_is_given_a_row_in_the_gap_and_the_test_is() -> None:
    sample = Sample.draw(3)
    for x, _ in (sample.train, sample.valid, sample.test["inside"]):
        assert float(x.abs().min()) >= 1 and float(x.abs().max()) <= 3
    assert float(sample.test["gap"][0].abs().max()) <= 1
    assert float(sample.test["beyond"][0].abs().min()) >= 3
    assert {len(x) for x, _ in sample.test.values()} == {gap.TEST}


def test_the_noise_is_four_times_as_large_on_the_right() -> None:
    residuals = {}
    for side in (-1, 1):
        errors = []
        for seed in range(5):
            sample = Sample.draw(seed)
            x, y = sample.test["inside"]
            errors.append((y - sample.function(x))[side * x > 0])
        residuals[side] = float(torch.cat(errors).std())
    assert residuals[-1] == pytest.approx(0.05, rel=0.1)
    assert residuals[1] == pytest.approx(0.2, rel=0.1)


def test_scores_are_those_written_out_for_three_rows() -> None:
    x = torch.zeros(3, 1, dtype=torch.float64)
    y = torch.tensor([[0.0], [1.0], [5.0]], dtype=torch.float64)
    network = torch.nn.Linear(1, 1).double().requires_grad_(False)
    network.bias.zero_()

    def method(x: torch.Tensor, y: torch.Tensor) -> Bars:
        ends = torch.tensor([-1.0, 2.0, 1.0]), torch.tensor([1.0, 3.0, 4.0])
        return Bars(low=ends[0].double(), high=ends[1].double(), nll=7.0)

    sample = Sample(gap.Function.draw(torch.Generator()), (x, y), (x, y), {"inside": (x, y)})
    scores = work.scored(network, {"constant": method}, sample)["inside"]
    # The second row lies 1 below its interval and the third 1 above; a miss costs 2 / 0.1.
    expected = {"coverage": 1 / 3, "width": 2.0, "interval_score": 2 + (20 + 20) / 3, "nll": 7.0}
    assert scores["constant"] == pytest.approx(expected)
    assert scores["rmse"] == pytest.approx(math.sqrt(26 / 3))


def test_gaussian_bars_are_those_of_torch() -> None:
    mean, std, y = torch.randn(3, 50, 1, dtype=torch.float64).abs().unbind()
    normal = torch.distributions.Normal(mean, std)
    bars = work.gaussian_bars(mean, std, y)
    fifth_percentile = normal.icdf(torch.tensor(0.05, dtype=torch.float64))
    torch.testing.assert_close(bars.low, fifth_percentile[:, 0])
    torch.testing.assert_close(bars.high, (2 * mean - fifth_percentile)[:, 0])
    assert bars.nll == pytest.approx(-float(normal.log_prob(y).mean()))


def test_the_figure_shows_the_draw_in_the_middle() -> None:
    draws = [{"gap": {"constant": {"nll": nll}}} for nll in (5.0, 1.0, 3.0, 9.0, 2.0)]
    assert work.middle_draw(draws) == 2


@pytest.mark.skipif(not mapie.installed(), reason="MAPIE is not installed: pip install mapie")
def test_mapies_intervals_are_the_conformal_quantile_either_side() -> None:
    sample = Sample.draw(0)
    x, y = sample.valid
    regressor = mapie.fitted(lambda x: x.sin(), sample.valid, 0.9)
    low, high = mapie.intervals(regressor, x)
    rank = math.ceil(0.9 * (len(x) + 1))
    half = (x.sin() - y).abs().flatten().sort().values[rank - 1]
    torch.testing.assert_close(high - low, torch.full_like(low, 2 * float(half)))


@pytest.mark.thorough
def test_a_quick_run_keeps_numbers_table_and_figure(tmp_path: Path) -> None:
    assert main(["gap", "--quick", "--out", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / "gap.json").read_text())
    page = (tmp_path / "gap.md").read_text(encoding="utf-8")
    assert len(stored["draws"]) == 3
    methods = list(stored["figure"]["intervals"])
    assert {"constant", "rigidities"} <= set(methods)
    for method in ("mapie", "laplace"):
        installed = getattr(work, method).installed()
        assert (method in methods) == installed
        assert ("was not installed" in page) or installed
    coverages = [draw["gap"]["rigidities"]["coverage"] for draw in stored["draws"]]
    mean, _ = stored["summary"]["gap"]["rigidities"]["coverage"]
    assert mean == pytest.approx(sum(coverages) / 3, rel=1e-6)
    assert unsupported(page, stored) == []
    assert (tmp_path / "gap-bars.png").stat().st_size > 10_000


def test_the_committed_bars_open_in_the_gap_and_are_narrowest_inside() -> None:
    stored = json.loads((RESULTS / "gap/gap.json").read_text())["summary"]
    inside, hole = stored["inside"], stored["gap"]
    for rival in ("constant", "mapie", "laplace"):
        assert inside["rigidities"]["width"][0] < inside[rival]["width"][0]
        assert inside["rigidities"]["interval_score"][0] < inside[rival]["interval_score"][0]
        assert hole["rigidities"]["interval_score"][0] < hole[rival]["interval_score"][0]
        assert hole[rival]["coverage"][0] < 0.6 < 0.85 < hole["rigidities"]["coverage"][0]
    for rival in ("constant", "laplace"):
        assert inside["rigidities"]["nll"][0] < inside[rival]["nll"][0]
        assert hole["rigidities"]["nll"][0] < hole[rival]["nll"][0]
