"""Two files of results: what `compare` finds, and what counts as a failure."""

from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.before_and_after.__main__ import main
from benchmarks.before_and_after.cases import CASES
from benchmarks.before_and_after.comparison import compared, difference
from benchmarks.before_and_after.problems import problems
from benchmarks.before_and_after.results import Record, Results


def made(**numbers: float) -> Results:
    """Results of a float64 and a float32 model, with some of the numbers replaced."""
    values = {"float64/ridge": 2.0, "float64/mean": [1.0, 100.0], "float32/std": 3.0}
    values |= {name.replace("_", "/"): value for name, value in numbers.items()}
    results = Results()
    for name, value in values.items():
        Record(results).value(name, np.asarray(value))
    return results


def compare(folder: Path, before: Results, after: Results) -> int:
    """The exit status of the command for two results."""
    before.save(folder / "before.npz")
    after.save(folder / "after.npz")
    return main(["compare", str(folder / "before.npz"), str(folder / "after.npz")])


def test_equal_results_pass(tmp_path: Path, capsys) -> None:
    assert compare(tmp_path, made(), made()) == 0
    printed = capsys.readouterr().out
    assert "3 results are in both files." in printed
    assert printed.endswith("No number differs.\n")


def test_a_changed_number_fails_and_is_named(tmp_path: Path, capsys) -> None:
    assert compare(tmp_path, made(), made(float64_ridge=2.0 * (1 + 1e-8))) == 1
    printed = capsys.readouterr().out
    assert "Numbers beyond their limit: 1\n  1e-08  float64/ridge\n" in printed
    assert "float64: largest difference 1e-08 (limit 1e-09), in float64/ridge" in printed


def test_limits_follow_the_precision_of_the_model(tmp_path: Path) -> None:
    assert compare(tmp_path, made(), made(float32_std=3.0 * (1 + 1e-8))) == 0
    assert compare(tmp_path, made(), made(float32_std=3.0 * (1 + 1e-5))) == 1


def test_differences_are_relative_to_the_largest_entry_of_an_array() -> None:
    found = difference("mean", np.array([1.0, 100.0]), np.array([1.5, 100.0]))
    assert found.size == pytest.approx(0.005)


def test_a_missing_number_fails_whichever_state_has_it(tmp_path: Path, capsys) -> None:
    assert compare(tmp_path, made(float64_more=1.0), made()) == 1
    assert "before alone: float64/more" in capsys.readouterr().out
    assert compare(tmp_path, made(), made(float64_more=1.0)) == 1
    assert "after alone: float64/more" in capsys.readouterr().out


@pytest.mark.parametrize("other", [[1.0, np.nan], [1.0, np.inf], [[1.0, 100.0]], [1, 100]])
def test_other_shapes_types_and_places_of_nan_are_differences(other: list) -> None:
    assert difference("mean", np.array([1.0, 100.0]), np.array(other)).size == np.inf


def test_nan_and_infinities_in_the_same_places_are_equal() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 1.0])
    assert difference("mean", values, values.copy()).size == 0
    assert difference("mean", values, -values).size == np.inf


def test_a_case_that_raises_in_one_state_alone_fails() -> None:
    before, after = made(), made()
    for results in (before, after):
        Record(results).attempt("float64/both", lambda: 1 / 0)
    assert not compared(before, after).failed
    Record(after).attempt("float64/one", lambda: 1 / 0)
    comparison = compared(before, after)
    assert comparison.failed
    assert comparison.raised == [
        ("float64/one", "after alone: ZeroDivisionError: division by zero")
    ]


def test_other_words_are_shown_once_a_kind_and_do_not_fail(tmp_path: Path, capsys) -> None:
    before, after = made(), made()
    for number in (1, 2):
        Record(before).value(f"float64/{number}", f"ridge {number}.5\ncriterion auto")
        Record(after).value(f"float64/{number}", f"ridge {number}.5\nmethod full")
    assert compare(tmp_path, before, after) == 0
    printed = capsys.readouterr().out
    assert "Words differ (not a failure): 2 texts, in 1 ways" in printed
    assert "  2 times, first in float64/1\n    - criterion auto\n    + method full\n" in printed


def test_files_without_results_show_nothing(tmp_path: Path) -> None:
    assert compare(tmp_path, Results(), Results()) == 1


def test_two_results_of_one_name_are_refused() -> None:
    with pytest.raises(KeyError, match="Two results are called 'float64/ridge'"):
        Record(made()).value("float64/ridge", 1.0)


def test_cases_name_problems_that_there_are() -> None:
    names = set(problems(torch.float64, 1))
    assert {problem for case in CASES.values() for problem in case.problems} == names
