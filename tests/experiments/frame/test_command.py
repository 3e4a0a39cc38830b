"""The experiments run, and what they write is whole, plain and complete."""

import json
import os
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from experiments.frame.catalogue import EXPERIMENTS, Experiment
from experiments.frame.jobs import Part
from experiments.frame.outcome import (
    Outcome,
    Picture,
    Table,
    cell,
    mean_and_error,
    plain,
    with_error,
)

from experiments import __main__ as command
from experiments.data import files, uci
from experiments.frame import catalogue, figures, jobs, progress, report
from experiments.frame import outcome as outcomes
from tests.support import synthetic_data
from tests.support.numbers_on_pages import unsupported

ROOT = Path(__file__).parents[3]
JOB = jobs.Job("first", outcomes.mean_and_error, {"values": [1, 3]})
WHERE = {
    "command": "python -m experiments fake",
    "date": "2024-01-01",
    "cpu": "abacus",
    "cores": 1,
    "threads": 1,
    "torch": "2",
    "python": "3",
    "minutes": 1.25,
}


def outcome() -> Outcome:
    figure, (ax,) = figures.panels()
    ax.plot([0, 1])
    numbers = {"a": {"b": torch.tensor([1.0, 2.0])}, "c": float("nan")}
    page = ["Some words.", Table(["x", "y"], [[1, 0.5]], "A table."), Picture("one", figure, "Up.")]
    return Outcome("A title", numbers, page)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """An experiment whose numbers show what the runner set up; gives it another run."""

    class Module:
        @staticmethod
        def run(*, quick: bool, seed: int) -> Outcome:
            drawn = torch.rand(3)
            size = matplotlib.rcParams["font.size"]
            numbers = {"quick": quick, "seed": seed, "drawn": drawn, "size": size}
            return Outcome("Fake", numbers, outcome().page)

    monkeypatch.setitem(EXPERIMENTS, "fake", Experiment("fake", "nothing much", 1))
    monkeypatch.setitem(sys.modules, "experiments.studies.fake.run", Module)
    return lambda run: monkeypatch.setattr(Module, "run", run)


def test_a_run_writes_numbers_page_and_pictures(fake, tmp_path: Path, capsys) -> None:
    assert command.main(["fake", "--quick", "--out", str(tmp_path / "new")]) == 0
    files = {path.name for path in (tmp_path / "new").iterdir()}
    assert files == {"fake.json", "fake.md", "fake-one.png"}
    assert json.loads((tmp_path / "new/fake.json").read_text())["quick"] is True
    said = capsys.readouterr().out
    assert str(tmp_path) in said
    assert "| 1 | 0.500 |" in said
    assert "numbers mean little" in said


def test_a_run_depends_on_its_seed_alone_and_leaves_no_trace(fake, tmp_path: Path) -> None:
    torch.manual_seed(7)
    before, size = torch.get_rng_state(), matplotlib.rcParams["axes.titlelocation"]
    for folder, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        command.main(["fake", "--seed", seed, "--out", str(tmp_path / folder)])
        torch.rand(5)
        assert matplotlib.rcParams["axes.titlelocation"] == size
    a, b, c = (json.loads((tmp_path / f / "fake.json").read_text())["drawn"] for f in "abc")
    assert a == b != c
    torch.manual_seed(7)
    assert torch.equal(before, torch.get_rng_state())


def test_the_page_repeats_the_command_with_its_seed(fake, tmp_path: Path) -> None:
    command.main(["fake", "--quick", "--seed", "5", "--out", str(tmp_path)])
    page = (tmp_path / "fake.md").read_text()
    assert "`python -m experiments fake --quick --seed 5`" in page
    assert str(tmp_path) not in page


def test_quick_results_go_where_git_does_not_look(fake, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(command, "QUICK", tmp_path / "results-quick")
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    command.main(["fake", "--quick"])
    command.main(["fake"])
    assert (tmp_path / "results-quick/.gitignore").read_text() == "*\n"
    assert (tmp_path / "results-quick/fake/fake.json").exists()
    assert (tmp_path / "results/fake/fake.json").exists()


def test_an_unwritable_folder_is_said_before_the_work(fake, tmp_path, monkeypatch, capsys) -> None:
    ran = []
    fake(lambda **_: ran.append(1))
    occupied = tmp_path / "a file"
    occupied.write_text("")
    assert command.main(["fake", "--out", str(occupied / "below")]) == 1
    said = capsys.readouterr().err
    assert "Cannot write results to" in said and "--out DIR" in said
    assert not ran


def test_an_interrupted_run_says_what_is_kept(fake, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def stopped(*, quick: bool, seed: int) -> Outcome:
        jobs.results("fake", [JOB])
        raise KeyboardInterrupt

    fake(stopped)
    assert command.main(["fake", "--out", str(tmp_path / "new")]) == 130
    said = capsys.readouterr().err
    assert "Finished parts are kept (1 so far). The same command continues" in said
    assert not (tmp_path / "new").exists()
    assert command.main(["fake", "--out", str(tmp_path / "new")]) == 130
    assert "1 of 1 parts come from an earlier run" in capsys.readouterr().out
    assert command.main(["fake", "--fresh", "--out", str(tmp_path / "new")]) == 130
    assert "earlier run" not in capsys.readouterr().out


def test_a_page_made_from_parts_of_other_code_says_so(fake, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with monkeypatch.context() as before:
        before.setattr(jobs.sources, "digests", lambda experiment: {"library": "another"})
        jobs.results("fake", [JOB])

    def run(*, quick: bool, seed: int) -> Outcome:
        jobs.results("fake", [JOB])
        return outcome()

    fake(run)
    page = tmp_path / "new/fake.md"
    for _ in range(2):  # using a part does not make it one of today's code
        assert command.main(["fake", "--out", str(page.parent)]) == 0
        said = capsys.readouterr().out
        assert "1 of them were computed by other code: --fresh recomputes" in said
        assert f"({jobs.machine()}, other code: 1) (*other code*: the library" in page.read_text()
    assert command.main(["fake", "--fresh", "--out", str(page.parent)]) == 0
    assert "earlier" not in page.read_text()
    assert command.main(["fake", "--out", str(page.parent)]) == 0
    assert f"found from earlier runs ({jobs.machine()}: 1), 20" in page.read_text()
    assert "other code" not in page.read_text() + capsys.readouterr().out
    assert len(jobs.kept("fake")) == 1


def test_data_and_device_reach_the_experiment_and_are_put_back(fake, tmp_path, monkeypatch) -> None:
    seen = {}

    def run(*, quick: bool, seed: int) -> Outcome:
        seen.update({k: os.environ.get(k) for k in ("RIGIDITIES_DATA", "RIGIDITIES_DEVICE")})
        return outcome()

    fake(run)
    monkeypatch.setenv("RIGIDITIES_DATA", "before")
    monkeypatch.delenv("RIGIDITIES_DEVICE", raising=False)
    folder = ["--out", str(tmp_path / "new")]
    command.main(["fake", "--data", "elsewhere", "--device", "cpu", *folder])
    assert seen == {"RIGIDITIES_DATA": "elsewhere", "RIGIDITIES_DEVICE": "cpu"}
    assert os.environ["RIGIDITIES_DATA"] == "before"
    assert "RIGIDITIES_DEVICE" not in os.environ
    page = (tmp_path / "new/fake.md").read_text()
    assert "fake --device cpu`" in page and "elsewhere" not in page


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there_is_said_without_a_traceback(
    device: str, fake, tmp_path, capsys
) -> None:
    assert command.main(["fake", "--device", device, "--out", str(tmp_path / "new")]) == 1
    said = capsys.readouterr().err
    assert f"Cannot train on --device {device}" in said and "Leave it out" in said
    assert not (tmp_path / "new").exists()


def test_a_quick_run_leaves_the_parts_of_the_whole_one_alone(
    fake, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    jobs.results("fake", [JOB])
    command.main(["fake", "--quick", "--fresh", "--out", str(tmp_path / "new")])
    assert len(jobs.kept("fake")) == 1

    def stopped(**_: object) -> Outcome:
        raise KeyboardInterrupt

    fake(stopped)
    assert command.main(["fake", "--quick", "--out", str(tmp_path / "new")]) == 130
    assert "Nothing was kept or written." in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_said_without_a_traceback(
    fake, tmp_path, monkeypatch, capsys
) -> None:
    occupied = tmp_path / "a file"
    occupied.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(occupied))
    fake(lambda **_: jobs.results("fake", [JOB]))
    assert command.main(["fake", "--out", str(tmp_path / "new")]) == 1
    assert "Set XDG_CACHE_HOME" in capsys.readouterr().err


def test_the_footer_counts_work_of_an_earlier_run_and_names_the_gpu() -> None:
    parts = [Part(0, 60.0 * minutes, name) for minutes, name in ((2, "A"), (3, "B"), (7, "A"))]
    text = report.footer("fake", {**WHERE, "earlier": parts, "gpu": "a card"})
    found = "12.0 minutes of parts found from earlier runs (A: 2; B: 1)"
    assert f"in 1.2 minutes, after {found}" in text
    assert "1 threads, a card, torch 2" in text
    assert "earlier" not in report.footer("fake", {**WHERE, "earlier": []})


def test_altered_data_are_said_without_a_traceback(fake, tmp_path, monkeypatch, capsys) -> None:
    data = synthetic_data.write(tmp_path / "data")
    with (data / "uci_yacht.npz").open("r+b") as file:
        file.seek(300)
        file.write(b"!")
    fake(lambda **_: uci.read("yacht", data))
    assert command.main(["fake", "--out", str(tmp_path / "new")]) == 1
    said = capsys.readouterr().err
    assert "Expected sha256" in said and "uci_yacht.npz" in said


def test_without_a_name_the_experiments_are_listed_with_their_minutes(capsys) -> None:
    assert command.main([]) == 0
    said = capsys.readouterr().out
    assert said.isascii()
    for experiment in EXPERIMENTS.values():
        assert re.search(rf"{experiment.name} +{experiment.minutes:g} min", said)
        assert experiment.summary in said


def test_an_unknown_name_is_refused_with_the_list(capsys) -> None:
    with pytest.raises(SystemExit):
        command.main(["tyo"])
    said = capsys.readouterr().err
    assert "'tyo'" in said
    assert all(name in said for name in EXPERIMENTS)


def test_a_missing_package_is_named_with_the_extra(fake, monkeypatch, tmp_path, capsys) -> None:
    absent = Experiment("fake", "nothing much", 1, needs=("matplotlib", "no_such_package"))
    monkeypatch.setitem(EXPERIMENTS, "fake", absent)
    assert command.main(["fake", "--out", str(tmp_path / "new")]) == 1
    said = capsys.readouterr().err
    assert "needs no_such_package." in said
    assert 'pip install "rigidities[experiments]"' in said
    assert not (tmp_path / "new").exists()


def test_something_else_than_an_outcome_is_refused(fake, monkeypatch, tmp_path) -> None:
    fake(lambda **_: {"a": 1})
    with pytest.raises(TypeError, match=r"must return an Outcome, got dict"):
        command.main(["fake", "--out", str(tmp_path)])


def test_every_name_has_a_module_and_a_line_in_the_readme() -> None:
    readme = (ROOT / "experiments/README.md").read_text()
    for name in EXPERIMENTS:
        assert find_spec(f"experiments.studies.{name}.run"), name
        assert f"| `{name}` |" in readme


def test_json_holds_the_numbers_and_nothing_else() -> None:
    stored = report.rendered_numbers(outcome())
    assert json.loads(stored) == {"a": {"b": [1.0, 2.0]}, "c": "nan"}
    assert b'"b": [1.0, 2.0]' in stored


def test_the_page_shows_everything_in_order() -> None:
    page = report.rendered_page("fake", outcome(), WHERE)
    order = ["# A title", "Some words.", "A table.", "| x | y |", "| 1 | 0.500 |"]
    order += ["![Up.](fake-one.png)", "(fake.json)", "1.2 minutes", "abacus"]
    places = [page.index(part) for part in order]
    assert places == sorted(places)


def test_a_failed_write_leaves_the_folder_as_it_was(tmp_path, monkeypatch) -> None:
    report.write("fake", outcome(), WHERE, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(report, "LARGEST", 100)
    with pytest.raises(ValueError, match=r"at most 0 kB, got 'one' with \d+ kB"):
        report.write("fake", Outcome("Other", {"d": 1}, outcome().page), WHERE, tmp_path)
    with pytest.raises(TypeError, match=r"got object"):
        report.write("fake", Outcome("Other", {"d": object()}), WHERE, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_pictures_are_the_same_bytes_each_time() -> None:
    assert report.checked_png(outcome().pictures[0]) == report.checked_png(outcome().pictures[0])


def test_panels_stay_within_the_width_of_a_page() -> None:
    figure, axes = figures.panels(columns=3, rows=2, width=20, height=2)
    assert figure.get_size_inches().tolist() == [9.0, 4.0]
    assert len(axes) == 6


def test_cells_show_three_digits_and_dashes() -> None:
    values = [0.12345, 12345.0, 7, None, float("nan"), 0.0, 1e-9, "a|b", float("inf")]
    assert [cell(value) for value in values] == [
        *("0.123", "12345", "7", "-", "-", "0", "1.00e-09", "a\\|b", "inf"),
    ]


def test_a_row_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected 2 cells, one for each of x, y; got 1"):
        Table(["x", "y"], [[1]])


def test_standard_errors_are_those_of_a_mean() -> None:
    mean, error = mean_and_error([1.0, 2.0, 3.0, 6.0])
    values = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
    assert (mean, error) == pytest.approx((3.0, float(values.std() / 2)))
    assert with_error(*mean_and_error([2.0])) == "2.00"


def test_numbers_become_plain_with_eight_digits() -> None:
    given = {1: (torch.tensor(1 / 3, dtype=torch.float64), True, None), "b": -float("inf")}
    assert plain(given) == {"1": [0.33333333, True, None], "b": "-inf"}
    with pytest.raises(TypeError, match="keys that are text or numbers"):
        plain({(1, 2): 3})


def test_progress_is_told_without_a_terminal_too(monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    assert list(progress.steps([1, 2], "rounds")) == [1, 2]
    said = capsys.readouterr().err
    assert "rounds: 1 of 2" in said
    assert "rounds: 2 of 2" in said


def table(*cells: str) -> str:
    return "\n".join(["| a 17 |", "| --- |", *(f"| {cell} |" for cell in cells)])


SUPPORTED = [
    ("0.123", {"a": {"b": [1, 0.12345]}}),
    ("-0.50 ± 0.13", {"a": (-0.504, 0.126)}),
    ("−3.1", {"a": -3.14}),
    ("+3.1", {"a": 3.14}),
    ("1.2e-05", {"a": 1.234e-5}),
    ("12.3 %", {"a": 0.1234}),
    ("12.3 %", {"a": 12.34}),
    ("5 of 16, decay 0.1", {"5": "16 nets", "decay 0.1": None}),
    ("decay −2", {"decay −2": "−2"}),
    ("kin8nm, [page 3](4.md#5), `6`", {"page": 3}),
    ("0.12", {"a": 0.125}),
    ("0.13", {"a": 0.125}),
]
OTHERS = [
    ("0.124", {"a": 0.12345}),  # the wrong digit
    ("0.5", {"a": -0.5}),  # the wrong sign
    ("-0.5", {"a": 0.5}),
    ("110", {"a": 109.3}),  # two digits that look like three
    ("12.3", {"a": 0.1234}),  # no percentage
    ("12.4 %", {"a": 0.1234}),
    ("209.08", {"a": 0.20908}),  # thousandths
    ("1.3e-05", {"a": 1.234e-5}),
    ("-5.4e-15", {"a": 5.4e-15}),
    ("1", {"a": True}),
    ("7", {"a": "kin7nm", "b": float("inf")}),
]


@pytest.mark.parametrize(("shown", "stored"), SUPPORTED + OTHERS)
def test_a_rounding_of_a_stored_number_is_supported_and_no_other(shown: str, stored: dict) -> None:
    expected = [] if (shown, stored) in SUPPORTED else [f"{shown.split()[0]} in | {shown} |"]
    assert unsupported(table(shown), plain(stored)) == expected


def test_only_the_bodies_of_tables_are_looked_at_and_every_row_of_them() -> None:
    page = f"In 2024, 3 nets.\n\n{table('1', '2')}\n\n4 more.\n\n{table('1', '5')}\n\n- 6"
    assert unsupported(page, {"a": 1}) == ["2 in | 2 |", "5 in | 5 |"]


@pytest.mark.parametrize("name", [path.name for path in sorted(command.RESULTS.iterdir())])
def test_every_number_in_the_tables_of_committed_results_is_in_their_json(name: str) -> None:
    folder = command.RESULTS / name
    page = (folder / f"{name}.md").read_text(encoding="utf-8")
    stored = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    assert unsupported(page, stored) == []


@pytest.mark.parametrize("name", [path.name for path in sorted(command.RESULTS.iterdir())])
def test_committed_results_are_whole(name: str) -> None:
    folder = command.RESULTS / name
    page = (folder / f"{name}.md").read_text(encoding="utf-8")
    assert name in catalogue.EXPERIMENTS
    assert json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    pictures = {path.name for path in folder.glob("*.png")}
    assert set(re.findall(r"\]\(([^)]+\.png)\)", page)) == pictures
    assert all((folder / file).stat().st_size <= figures.LARGEST for file in pictures)
    assert re.search(rf"`python -m experiments {name}( --seed \d+)?( --device \w+)?`", page)


@pytest.mark.parametrize("name", ["active", "propagation"])
def test_missing_data_are_said_without_a_traceback(name, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RIGIDITIES_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("RIGIDITIES_OFFLINE", "1")
    monkeypatch.setattr(files, "BESIDE", tmp_path)
    assert command.main([name, "--quick", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "uci_kin8nm.npz" in said and "RIGIDITIES_DATA" in said
    assert not (tmp_path / "out").exists()
