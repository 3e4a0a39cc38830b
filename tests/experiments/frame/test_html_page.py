"""The page of an experiment: what is recognised is drawn, and no number is left out."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from experiments.frame.html_page import experiment_page
from experiments.frame.html_page.__main__ import main
from experiments.frame.html_page.metrics import METRICS
from experiments.frame.html_page.plots import methods_plot

from tests.support.pages import Page, shorten

RESULTS = sorted((Path(__file__).parents[3] / "experiments" / "results").rglob("*.json"))
METHODS = ("llpr", "best", "mc_dropout", "deep_ensemble", "laplace")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without plotly's script."""
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
    return Page(experiment_page(numbers, **options))


def renumbered(entry: Any, numbers: Iterator[int]) -> Any:
    """The same structure with a number of six digits of its own at every leaf."""
    if isinstance(entry, dict):
        return {key: renumbered(value, numbers) for key, value in entry.items()}
    if isinstance(entry, list):
        return [renumbered(value, numbers) for value in entry]
    if isinstance(entry, float) or entry in ("nan", "inf", "-inf"):
        return float(next(numbers))
    return entry if isinstance(entry, (bool, str)) or entry is None else next(numbers)


def leaves(entry: Any) -> Iterator[Any]:
    """Keys and values; of lists the part that a table shows."""
    if isinstance(entry, dict):
        for key, value in entry.items():
            yield key
            # points and bins are drawn, whatever their number
            drawn = key in ("std", "error") and isinstance(value, list)
            yield from value if drawn else leaves(value)
    elif isinstance(entry, list):
        for value in entry[:200]:
            yield from leaves(value)
    elif entry is not None:
        yield entry


def missing(numbers: Any) -> list[Any]:
    """Keys, texts and numbers that the page does not show."""
    found = page(numbers)
    text = found.text.replace("_", " ") + " ".join(found.words)
    labels = {key: metric.label for key, metric in METRICS.items()}
    headings = {"scores", "constant", "bins", "points", "splits", "rows", "std", "error"}
    headings |= {"bin_size", "variance", "mse"}
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)  # without the marks of thousands
    shown = set(map(int, re.findall(r"\d{6,}", plain + json.dumps(found.figures))))
    shown |= {number // 100 for number in shown}  # shares are shown in per cent
    return [
        leaf
        for leaf in leaves(numbers)
        if (
            leaf.replace("_", " ") not in text
            and labels.get(leaf, leaf) not in text
            and leaf not in headings
            if isinstance(leaf, str)
            else int(leaf) not in shown and not isinstance(leaf, bool)
        )
    ]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_leaf_of_a_committed_result_stands_on_its_page(path: Path) -> None:
    numbers = renumbered(json.loads(path.read_text()), itertools.count(100_000))
    assert missing(numbers) == []


def test_what_a_method_has_beside_known_metrics_is_kept() -> None:
    numbers = uci(2)
    numbers["set 0"]["llpr"] |= {"seconds": 12.5, "nll_median": [1, 2], "ridge": {"at_edge": 3}}
    numbers["set 1"]["per_split"] = {"llpr": {"rmse": [1.5, 2.5], "nll": [1.5, 2.5]}}
    assert missing(renumbered(numbers, itertools.count(100_000))) == []


def drawable(entry: Any) -> int:
    """Bins, points and comparisons of methods in some numbers."""
    if not isinstance(entry, dict):
        return 0
    here = set(entry) == {"bin_size", "variance", "mse"} or {"std", "error"} <= set(entry)
    here = here or {"splits", "llpr"} <= set(entry)
    return here + sum(map(drawable, entry.values()))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_committed_result_gives_a_page_with_its_plots(path: Path) -> None:
    numbers = json.loads(path.read_text())
    found = page(numbers, title=path.stem)
    assert path.stem in found.text
    assert len(found.figures) == drawable(numbers)
    assert len(found.rows) > 20


def test_results_with_bins_are_among_those_committed() -> None:
    drawn = {path.stem: drawable(json.loads(path.read_text())) for path in RESULTS}
    assert {"california", "uci", "weather", "width"} <= {
        name for name, count in drawn.items() if count
    }


def score_keys(entry: Any) -> set[str]:
    if not isinstance(entry, dict):
        return set()
    scores = entry.get("scores")
    own = set(scores) if isinstance(scores, dict) else set()
    return own.union(*map(score_keys, entry.values()))


def test_every_score_of_the_committed_results_is_explained() -> None:
    used = set().union(*(score_keys(json.loads(path.read_text())) for path in RESULTS))
    assert {"gain", "offset", "floor"} <= used <= set(METRICS)


def test_plots_come_first_and_each_metric_is_explained_once() -> None:
    (path,) = [path for path in RESULTS if path.stem == "california"]
    found = page(json.loads(path.read_text()))
    order = [found.text.index(words) for words in ("Do larger bars", "What the metrics tell")]
    assert order == sorted(order) < [found.text.index("auroc")]
    assert found.text.count(METRICS["nll"].sentence) == 1
    links = [attributes["href"] for tag, attributes in found.elements if tag == "a"]
    assert links == ["#part0", "#part1", "#part2"]
    parts = [attributes["id"] for tag, attributes in found.elements if tag == "h2"]
    assert links == [f"#{part}" for part in parts]


def test_the_constant_bar_stands_beside_the_bars_it_belongs_to() -> None:
    scores = {name: {"scores": {"nll": k}} for k, name in enumerate("ab")}
    one = {name: {**entry, "constant": {"scores": {"nll": 5}}} for name, entry in scores.items()}
    found = page({"case": one})
    assert found.rows == [
        ["Metric", "a", "b", "constant bar", "Ideal"],
        ["NLL", "0", "1.00", "5.00", "low"],
    ]
    one["b"] = {**scores["b"], "constant": {"scores": {"nll": 6}, "median": 7}}
    found = page({"case": one})
    assert found.rows[0] == ["Metric", "a", "a, constant bar", "b", "b, constant bar", "Ideal"]
    assert found.rows[1] == ["NLL", "0", "5.00", "1.00", "6.00", "low"]
    assert "median: 7" in found.text
    (header, row) = page({"case": one["a"]}).rows
    assert (header[1:3], row[1:3]) == (["these bars", "constant bar"], ["0", "5.00"])


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
    assert points["traces"][""][0]["hovertext"][1].startswith("point 2 of 3 shown<br>bar 2")
    below = points["traces"][""][1]
    assert below["name"] == "below the axis"
    assert below["hovertext"] == [points["traces"][""][0]["hovertext"][2]]
    assert "Shown: 3 of 70 rows." in found.text
    assert found.row("NLL")[1] == "1.250 ± 0.020"
    assert found.row("Coverage")[1:] == ["91.0 %", "90 %"]
    assert found.row("odd")[1] == "3.00"
    assert "rows: 100" in found.text


def test_metrics_of_neighbours_share_a_table() -> None:
    scores = {"llpr": {"scores": {"nll": 1.5}}, "best": {"scores": {"nll": 1.25, "rmse": 2}}}
    found = page({"qm9": {**scores, "empty": {}}})
    assert found.rows[0] == ["Metric", "llpr", "best", "Ideal"]
    assert "Found under" not in found.text
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
    text = experiment_page(numbers, title=evil)
    found = Page(text)
    assert len(found.running) == 2
    assert evil not in text
    assert found.text.count(evil) >= 4
    (trace,) = found.figures["f0"]["traces"]["RMSE"]
    assert trace["y"][0].startswith("&lt;script&gt;")


def test_a_page_without_plots_carries_no_plotly() -> None:
    assert len(Page(experiment_page({"a": 1})).running) == 1


def test_the_number_of_plots_is_bounded() -> None:
    entry = {"bins": {"bin_size": 5, "variance": [1.0, 2.0], "mse": [1.0, 2.0]}}
    found = page({f"case {k}": entry for k in range(100)})
    assert len(found.figures) == 80
    assert "case 99" in found.text


def test_bins_are_known_by_what_they_hold() -> None:
    bins = {"bin_size": 5, "variance": [1.0, 2.0], "mse": [1.0, 2.0]}
    found = page({"shown": {"4": bins, "two_nets": bins}})
    assert len(found.figures) == 2
    assert "Found under “shown”." in found.text
    headings = [word for word in found.words if word in ("4", "two nets")]
    assert headings == ["4", "two nets"]
    assert page({"shown": {"4": {**bins, "more": 1}}}).figures == {}


def test_two_repetitions_are_no_mean_and_error() -> None:
    two = {"llpr": {"rmse": [1.5, 2.5], "n": 2}, "best": {"rmse": [1.0, 2.0], "n": 2}}
    for key in ("per_split", "scores_of_each"):
        cells = page({key: two}).rows
        assert cells[1] == ["llpr", "1.500, 2.500", "2"]
    assert page({"means": two}).rows[1] == ["llpr", "1.5 ± 2.5", "2"]
    text = page({"per_split": {"a": {"scores": {"rmse": [1.5, 2.5]}}}}).text
    assert "1.500, 2.500" in text


def test_alike_mappings_become_one_table_and_lists_columns() -> None:
    values = {"a": {"nll": [1.0, 0.5], "n": 2}, "b": {"nll": [2.0, 0.25], "n": 3}}
    found = page(values)
    assert found.rows == [["", "nll", "n"], ["a", "1.00 ± 0.50", "2"], ["b", "2.00 ± 0.25", "3"]]
    lists = {"x": list(range(300)), "y": [0.5] * 300, "other": [1, 2, 3, 4, 5]}
    found = page(lists)
    assert found.rows[1] == ["0", "0", "0.5000"]
    assert "The first 200 of 300." in found.text
    assert found.rows[-1] == ["4", "5"]


def test_long_names_of_methods_stay_distinct() -> None:
    names = [f"an ensemble of many deep nets, number {k}, of them all" for k in range(12)]
    (trace,) = methods_plot("set", {"NLL": dict.fromkeys(names, (1.0, 0.1))}).traces["NLL"]
    assert len(set(trace.y)) == 12
    assert max(map(len, trace.y)) <= 30


def test_quotes_stay_quotes_in_what_plotly_shows() -> None:
    (trace,) = methods_plot("set", {"NLL": {'"best"': (1.0, 0.1)}}).traces["NLL"]
    assert list(trace.y) == ['"best"']


# --- the command -------------------------------------------------------------------------------


def test_numbers_that_json_does_not_know_are_read(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"scores": {"nll": NaN, "rmse": 2.5, "crps": Infinity}}')
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == f"Wrote {tmp_path / 'p.html'}\n"
    written = Page((tmp_path / "p.html").read_text(encoding="utf-8"))
    assert "p.json" in written.text
    assert written.row("NLL")[1] == "-"
    assert written.row("CRPS")[1] == "∞"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "p.json is damaged or no JSON file"),
        ('{"a": [1, 2', "p.json is damaged or no JSON file"),
        ("[1, 2]", "holds a list. Expected an experiment's numbers"),
        ('{"a": "text"}', "got no number at all"),
        ("[" * 100_000, "damaged"),
        (None, "There is no file"),
    ],
)
def test_a_bad_file_is_explained(content: str | None, words: str, tmp_path, capsys) -> None:
    path = tmp_path / "p.json"
    if content is not None:
        path.write_text(content)
    assert main([str(path), "--out", str(tmp_path / "r.html")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()
