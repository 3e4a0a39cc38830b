"""The page of an experiment: what is recognised is drawn, and no number is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pages import Page, shorten
from rigidities import report
from rigidities.report import nested

RESULTS = sorted((Path(__file__).parents[1] / "experiments" / "results").rglob("*.json"))
METHODS = ("llpr", "best", "mc_dropout", "deep_ensemble", "laplace")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


def uci(sets: int = 2) -> dict[str, Any]:
    """As the experiment on the UCI sets writes it."""
    return {
        f"set {k}": {
            method: {"rmse": [2 + k + i / 10, 0.1], "nll": [-i / 7, 0.05]}
            for i, method in enumerate(METHODS)
        }
        | {"splits": 20}
        for k in range(sets)
    }


def page(numbers: Any, **options: Any) -> Page:
    return Page(report.experiment(numbers, **options))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_committed_result_gives_a_page_that_names_all_it_holds(path: Path) -> None:
    numbers = json.loads(path.read_text())
    found = page(numbers, title=path.stem)
    assert path.stem in found.text
    for key, value in numbers.items():
        assert key in found.text
        if isinstance(value, dict):
            assert all(inner in found.text for inner in value)
    assert len(found.rows) > 20


def test_methods_on_data_sets_are_compared() -> None:
    found = page(uci(3))
    assert found.rows[1] == ["set 0", "20", *(f"{2 + i / 10:.2f} ± 0.10" for i in range(5))]
    assert len(found.figures) == 3
    figure = found.figures["f1"]
    assert set(figure["traces"]) == {"RMSE", "NLL"}
    (trace,) = figure["traces"]["NLL"]
    assert trace["x"] == pytest.approx([-i / 7 for i in range(5)])
    assert trace["error_x"]["array"] == [0.05] * 5
    assert trace["y"] == list(METHODS)
    (choice,) = [a for tag, a in found.elements if tag == "select"]
    assert choice["data-figures"] == "f0 f1 f2"


def test_a_method_that_lacks_a_metric_leaves_a_gap() -> None:
    numbers = uci(2)
    del numbers["set 1"]["best"]["nll"]
    numbers["set 1"]["laplace"]["rmse"] = ["nan", "nan"]
    numbers["seconds"] = 12.5
    numbers["set 0"]["paired"] = {"best - llpr": {"nll": [-0.125, 0.01], "rmse": [1, 2]}}
    found = page(numbers)
    assert "best - llpr" in found.text
    assert "-0.125 ± 0.010" in found.text
    rows = [row for row in found.rows if row[0] == "set 1"]
    assert [row[3] for row in rows] == ["3.10 ± 0.10", ""]
    assert rows[0][-1] == "-"
    (trace,) = found.figures["f1"]["traces"]["RMSE"]
    assert trace["y"] == list(METHODS[:4])
    assert "seconds: 12.50" in found.text


def test_bins_points_and_scores_are_found_at_any_depth() -> None:
    numbers = {
        "qm9": {
            "llpr": {
                "bins": {"bin_size": 50, "variance": [1.0, 4.0], "mse": [1.5, 3.0]},
                "points": {"std": [1.0, 2.0, 3.0], "error": [-0.5, 1.0, 0.0], "rows": 70},
                "scores": {"nll": [1.25, 0.02], "coverage": 0.91, "odd": 3},
            },
            "rows": 100,
        }
    }
    found = page(numbers)
    assert "qm9 › llpr" in found.text
    binned, points = found.figures["f0"], found.figures["f1"]
    assert binned["traces"]["50"][-1]["x"] == [1.0, 4.0]
    assert binned["traces"]["50"][-1]["y"] == [1.5, 3.0]
    assert points["traces"][""][0]["y"] == [0.5, 1.0, 0.0]
    assert points["traces"][""][0]["hovertext"][1].startswith("row 1<br>bar 2")
    assert "Shown: 3 of 70 rows." in found.text
    assert found.row("NLL")[1] == "1.250 ± 0.020"
    assert found.row("Coverage")[1:] == ["91.0 %", "90 %"]
    assert found.row("odd")[1] == "3.00"
    assert "rows: 100" in found.text


def test_metrics_of_neighbours_share_a_table() -> None:
    scores = {"llpr": {"scores": {"nll": 1.5}}, "best": {"scores": {"nll": 1.25, "rmse": 2}}}
    found = page({"qm9": {**scores, "empty": {}}})
    assert found.rows[0] == ["Metric", "llpr", "best", "Ideal"]
    assert found.row("NLL")[1:] == ["1.50", "1.25", "low"]
    assert found.row("RMSE")[1:] == ["", "2.00", "0"]
    assert "empty" in found.text


@pytest.mark.parametrize(
    "entry",
    [
        {"bins": {"bin_size": 50, "variance": [1.0, 4.0], "mse": [1.5]}},
        {"bins": {"bin_size": 0, "variance": [1.0], "mse": [1.5]}},
        {"bins": {"bin_size": 9, "variance": [0.0], "mse": [1.5]}},
        {"bins": {"bin_size": 9, "variance": [], "mse": []}},
        {"bins": 7},
        {"points": {"std": [1.0, "nan"], "error": [1.0, 2.0]}},
        {"points": {"std": [1.0], "error": [0.0]}},
        {"scores": {"nll": "good", "rmse": 1}},
        {"a": {"splits": 3, "llpr": {"time": 1}}},
    ],
)
def test_what_only_looks_alike_is_listed(entry: dict[str, Any]) -> None:
    found = page(entry)
    assert found.figures == {}
    assert next(iter(entry)) in found.text


def test_names_and_texts_of_an_experiment_stay_text() -> None:
    evil = "<script>window.bad = 1</script>"
    numbers = {evil: {"splits": 2, evil: {"rmse": [1, 0.1]}}, "x": {evil: evil, "n": 1}}
    text = report.experiment(numbers, title=evil)
    found = Page(text)
    assert len(found.running) == 2
    assert evil not in text
    assert found.text.count(evil) >= 4
    (trace,) = found.figures["f0"]["traces"]["RMSE"]
    assert trace["y"][0].startswith("&lt;script&gt;")


def test_a_page_without_plots_carries_no_plotly() -> None:
    assert len(Page(report.experiment({"a": 1})).running) == 1


def test_the_number_of_plots_is_bounded() -> None:
    entry = {"bins": {"bin_size": 5, "variance": [1.0, 2.0], "mse": [1.0, 2.0]}}
    found = page({f"case {k}": entry for k in range(100)})
    assert len(found.figures) == 80
    assert "case 99" in found.text


def test_alike_mappings_become_one_table_and_lists_columns() -> None:
    values = {"a": {"nll": [1.0, 0.5], "n": 2}, "b": {"nll": [2.0, 0.25], "n": 3}}
    found = Page(nested.tables(values))
    assert found.rows == [["", "nll", "n"], ["a", "1.00 ± 0.50", "2"], ["b", "2.00 ± 0.25", "3"]]
    lists = {"x": list(range(300)), "y": [0.5] * 300, "other": [1, 2, 3, 4, 5]}
    found = Page(nested.tables(lists))
    assert found.rows[1] == ["0", "0", "0.5000"]
    assert "The first 200 of 300." in found.text
    assert found.rows[-1] == ["4", "5"]
