"""Error bars and width: the nets, the trends and the page."""

import json
import math

import pytest
import torch
from experiments.frame.outcome import Outcome
from experiments.studies.width import page as pages
from experiments.studies.width import run as experiment
from experiments.studies.width import trends, work

from experiments.frame import figures, report, wording
from experiments.judging import error_bars
from tests.support.numbers_on_pages import unsupported

pytestmark = [pytest.mark.xdist_group("california"), pytest.mark.usefixtures("synthetic")]

SMALL = {"count": 2, "seed": 0, "epochs": 1, "decay": 1e-3, "bin_size": 50, "most": 300}


def scores(values: dict[int, list[float]]) -> dict[int, list[dict[str, float]]]:
    return {width: [{"nll": value} for value in row] for width, row in values.items()}


def test_a_trend_is_the_mean_of_each_splits_own_rank_correlation() -> None:
    from scipy.stats import spearmanr

    # levels differ much more between the splits than between the widths
    made = {4: [3.0, 103.0, 50.0], 8: [2.0, 102.5, 51.0], 32: [1.0, 102.6, 49.0]}
    found = trends.trend(scores(made), "nll")
    own = [spearmanr([4, 8, 32], [row[k] for row in made.values()]).statistic for k in range(3)]
    assert own == pytest.approx([-1.0, -0.5, -0.5])
    assert found["rank_correlation"] == pytest.approx([-2 / 3, 1 / 6])
    assert found["says"] == "improves"


@pytest.mark.parametrize("ruined", [{}, {8: [1e16] * 3}])
def test_the_slope_is_that_of_the_medians_and_survives_a_ruined_width(ruined) -> None:
    levels, widths = (-1, 0, 2), (4, 8, 16, 32, 64)  # 0.5 per doubling in the median
    made = {w: [0.5 * math.log2(w) + level for level in levels] for w in widths}
    assert trends.trend(scores(made | ruined), "nll")["per_doubling"] == pytest.approx(0.5)


def test_points_beyond_the_axes_are_triangles_at_their_edge() -> None:
    _, (ax,) = figures.panels()
    ax.errorbar([4, 8, 16], [0.0, -1e11, 0.2], [0.1, 1.0, 0.1], marker="o", capsize=2)
    pages._cut(ax, (-0.15, 1.0))
    low, high = ax.get_ylim()
    assert (low, high) == pytest.approx((-0.124, 0.324))
    marks = [line for line in ax.lines if line.get_marker() == "v"]
    assert [(*line.get_xdata(), *line.get_ydata()) for line in marks] == [(8, low)]


def test_the_caption_explains_what_leaves_the_axes_and_nothing_else() -> None:
    triangle, bar = "A triangle at the edge", "A quartile bar that ends at the edge"
    for values, ends, told in (
        ([0.0, 0.1, 0.2], 0.05, set()),
        ([0.0, 0.1, 0.2], [[0.05, 1.0, 0.05], [0.05] * 3], {bar}),
        ([0.0, -1e11, 0.2], [[0.1, 1e11, 0.1], [0.1, 1e12, 0.1]], {triangle, bar}),
    ):
        figure, (ax,) = figures.panels()
        ax.errorbar([4, 8, 16], values, ends, marker="o", capsize=2)
        pages._cut(ax, (-0.15, 1.0))
        caption = pages.quality_caption(pages.beyond_axes(figure))
        assert {phrase for phrase in (triangle, bar) if phrase in caption} == told


def test_one_ruined_net_neither_makes_nor_hides_a_trend() -> None:
    made = {w: [1 - 0.1 * math.log2(w) + 0.01 * k for k in range(8)] for w in (4, 8, 16, 32)}
    clean = trends.trend(scores(made), "nll")
    made[4][3] = 1e16
    found = trends.trend(scores(made), "nll")
    assert found["says"] == clean["says"] == "improves"
    assert found["per_doubling"] == pytest.approx(clean["per_doubling"], abs=0.01)
    assert found["rank_correlation"] == clean["rank_correlation"] == pytest.approx([-1, 0])


def test_medians_are_kept_where_a_bar_close_to_zero_ruins_the_mean() -> None:
    gains = [0.1, 0.2, 0.3, -1e16]
    each = [
        {
            "scores": {"gain": gain, "nll": 1 - gain, "slope": 0.5},
            "constant": {"scores": {"nll": 1.0}},
            "smallest_bar": 1e-9 if gain < 0 else 0.5,
        }
        for gain in gains
    ]
    found = experiment._summary(each)
    assert set(found["scores"]) == {"slope"}
    assert found["median"]["gain"][0] == pytest.approx(0.15)
    assert (found["ruined"], found["least_bar"]) == (1, 1e-9)
    stacks = {4: {"paper": {"each": each}}, 8: {"paper": {"each": each[:3]}}}
    assert experiment._narrow_bars(stacks, "paper") == {"ruined": 1, "least_bar": 1e-9}
    cell = pages.score_cell({"median": {"gain": [0.15, -2.5e15, 0.225]}}, "gain")
    assert cell == "0.150 (-2.5e+15 to 0.225)"


def test_the_smallest_bar_is_relative_to_the_nets_median(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []

    def bars(*arguments: object) -> error_bars.Bars:
        kept.append(original(*arguments))
        return kept[-1]

    original = work.error_bars.bars
    monkeypatch.setattr(work.error_bars, "bars", bars)
    found = work.networks(width=6, **SMALL)
    std = kept[0].std.sort().values
    expected = float(std[0] / std[(len(std) - 1) // 2])
    assert found["paper"]["each"][0]["smallest_bar"] == pytest.approx(expected)


def test_one_split_or_a_large_error_is_no_trend() -> None:
    assert trends.trend(scores({4: [1.0], 8: [2.0]}), "nll")["says"] == "no clear trend"
    assert trends.verdict([1.0, 0.6], 1) == "no clear trend"
    assert trends.verdict([1.0, 0.1], 0) == "grows"


def test_slope_and_coverage_are_followed_by_their_distance() -> None:
    found = trends.with_distances({"slope": 0.6, "coverage": 0.95}, 0.9)
    assert found["slope_error"] == pytest.approx(0.4)
    assert found["coverage_error"] == pytest.approx(0.05)


def test_words_follow_the_numbers() -> None:
    assert "2 clearly improve with the width, 1 clearly get worse" in pages._counted(2, 1)
    assert pages._counted(0, 0).startswith("None")
    assert "4 clearly improve with the width and none gets worse" in pages._counted(4, 0)
    assert "3 clearly get worse with the width and none improves" in pages._counted(0, 3)


def test_the_last_layer_has_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fitted(net: torch.nn.Module, train: object) -> object:
        seen.append(net)
        return original(net, train)

    original = work.error_bars.fitted
    monkeypatch.setattr(work.error_bars, "fitted", fitted)
    found = work.networks(width=6, **SMALL)
    assert len(seen) == 2
    assert seen[0][-1].bias is None
    assert seen[0][0].bias is not None
    assert seen[0][-1].in_features == 6
    assert found["rows"] == {"train": 200, "valid": 200, "test": 300}


def test_a_width_depends_neither_on_its_companions_nor_on_the_order() -> None:
    alone = experiment.numbers(SMALL, (4,), 0, quick=True)
    both = experiment.numbers(SMALL, (4, 8), 0, quick=True)
    assert json.dumps(alone["widths"][4]) == json.dumps(both["widths"][4])
    assert json.dumps(both["widths"][8]) != json.dumps(both["widths"][4])


def test_the_page_gives_every_width_and_its_numbers(outcome: Outcome) -> None:
    numbers = json.loads(report.rendered_numbers(outcome))
    assert list(numbers["widths"]) == [str(width) for width in experiment.QUICK_WIDTHS]
    page = "\n".join(map(str, outcome.page))
    assert unsupported(page, numbers) == []
    assert wording.SHARED_ROWS in page
    assert wording.WHOLE_SCALE in page
    for width in experiment.QUICK_WIDTHS:
        one = numbers["widths"][str(width)]["paper"]
        assert f"| {width} |" in page
        middle, low, high = one["median"]["binned_log_ratio"]
        assert f"{middle:.3f} ({low:.3f} to {high:.3f})" in page
        mean, error = one["scores"]["spearman"]
        assert f"{mean:.3f} ± {error:.3f}" in page
    ruined = numbers["narrow"]["paper"]["ruined"]
    assert f"Of {numbers['settings']['nets']} networks, {ruined} (*paper (bins)*)" in page
    assert [picture.name for picture in outcome.pictures] == ["quality", "binned"]
    for picture in outcome.pictures:
        report.checked_png(picture)


def test_full_sizes_span_four_to_five_hundred_and_twelve() -> None:
    assert [2**k for k in range(2, 10)] == list(experiment.WIDTHS)
    assert set(experiment.SHOWN) <= set(experiment.WIDTHS)
