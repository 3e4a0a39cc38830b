"""The benchmarks run and report; how fast they are is for a quiet machine to say."""

import contextlib
import json
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.frame import dense, ranks, table
from benchmarks.frame.results import (
    Result,
    Row,
    at_least,
    at_most,
    for_information,
    not_run,
    within,
)
from benchmarks.frame.timing import Ratio, Timings, interleaved
from benchmarks.frame.workload import workload
from benchmarks.rivals import laplace as rivals

from benchmarks import gpu

ALWAYS = ("at most 0", "at most 1e-12 of its norm")
"""What must hold at every size: nothing lost, nothing left, the same sums."""


@pytest.fixture(autouse=True)
def threads_are_restored():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def forked(command, **options):
    """A module run as `subprocess.run` would, by a process that has imported torch already."""
    if command[0] != sys.executable:  # another environment
        return subprocess.run(command, **options)
    module, *words = command[2:]
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder, "printed")
        process = ranks.CONTEXT.Process(target=run_module, args=(module, words, printed))
        process.start()
        process.join()
        return SimpleNamespace(returncode=process.exitcode, stdout=printed.read_text(), stderr="")


def run_module(module, words, printed):
    sys.argv = [module, *words]
    with printed.open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_module(module, run_name="__main__")


LONG = dict.fromkeys(
    (
        *("collation", "deep-model", "default", "ensembles", "gpu", "many-rows", "memory"),
        *("propagation", "scale", "selection", "small-tables", "speed", "trees", "whole-net"),
    ),
    pytest.mark.slow,
)
"""Their quick runs take a quarter of a minute each."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The parameters are not a minimum")  # quick sizes train little
@pytest.mark.parametrize("name", [pytest.param(n, marks=LONG.get(n, ())) for n in BENCHMARKS])
def test_quick_run_of_each_benchmark_writes_its_results(
    name: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    if name != "memory":  # which alone waits for a program that starts anew
        monkeypatch.setattr("benchmarks.frame.apart.subprocess", SimpleNamespace(run=forked))
    written = tmp_path / "all.json"
    places = ["--json", str(written), "--results", str(tmp_path)]
    main([name, "--quick", "--threads", "1", *places])

    result = Result.load(tmp_path / f"{name}.json")
    assert json.loads(written.read_text())[0]["name"] == name
    assert result.rows
    assert all(row.work and row.must and row.measured for row in result.rows)
    assert all(row.reached for row in result.rows if row.must in ALWAYS)
    assert {"command", "cpu", "cores", "torch", "date"} <= result.provenance.keys()
    assert f"## {name}" in (tmp_path / "README.md").read_text()
    assert capsys.readouterr().out.isascii()


@pytest.mark.parametrize("row_name", ["Posterior.variance", "uq(x)"])
def test_accuracy_holds_at_the_quick_size_too(row_name: str) -> None:
    rows = [row for row in BENCHMARKS["accuracy"](quick=True) if row.work.startswith(row_name)]
    assert rows
    assert all(row.reached for row in rows)


def test_criterion_holds_at_the_quick_size_too() -> None:
    (row,) = [row for row in BENCHMARKS["calibration"](quick=True) if "criterion" in row.work]
    assert row.reached


def test_missing_rivals_are_reported_with_the_remedy(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rivals, "ENVIRONMENT", tmp_path / ".venv-rivals")
    (row,) = rivals.run(quick=True)
    assert row.reached is None
    assert "make bench" in row.note


def test_unknown_name_is_refused_with_the_choices(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["sped"])
    assert "unknown: sped. Choose from speed" in capsys.readouterr().err


def test_ratio_is_the_median_of_the_rounds() -> None:
    timings = Timings({"a": [1.0, 4.0, 9.0], "b": [1.0, 2.0, 3.0]})
    assert timings.ratio("a", "b") == Ratio(2.0, 1.5, 2.5, 3, fastest=1.0)
    assert timings.ratio("a", "b", factor=10).median == 20.0
    assert Ratio.of([5.0]) == Ratio(5.0, 5.0, 5.0, 1)


def test_fastest_rounds_of_two_tasks_need_not_be_the_same() -> None:
    ratio = Timings({"a": [4.0, 3.0, 8.0], "b": [1.0, 2.0, 2.0]}).ratio("a", "b")
    assert ratio.fastest == 3.0
    assert str(ratio) == "4.00 (2.75 to 4.00; fastest 3.00)"
    assert str(Ratio(2.0, 1.0, 3.0, 5)) == "2.00 (1.00 to 3.00)"


def test_tasks_take_turns_and_a_task_may_time_itself() -> None:
    calls: list[str] = []

    def record(name: str, own: float | None = None) -> float | None:
        calls.append(name)
        return own

    tasks = {"a": lambda: record("a"), "b": lambda: record("b", 7.0)}
    timings = interleaved(tasks, rounds=2, warmups=0)
    assert calls == ["a", "b", "b", "a"]
    assert timings.seconds["b"] == [7.0, 7.0]


def test_limits_decide_from_the_median() -> None:
    ratio = Ratio(2.0, 1.0, 3.0, 5)
    assert at_most("fit", ratio, 2.2).reached
    assert not at_most("fit", ratio, 1.9).reached
    assert at_least("fit", ratio, 1.9).reached
    assert for_information("fit", ratio).reached is None
    assert (
        at_most("fit", ratio, None) == at_least("fit", ratio, None) == for_information("fit", ratio)
    )


def test_two_bounds_decide_and_digits_tell_the_figure_from_its_bound() -> None:
    assert within("coverage", 0.86, (0.86, 0.94)).reached
    missed = within("coverage", 0.8597, (0.86, 0.94))
    assert (missed.must, missed.measured, missed.reached) == ("0.86 to 0.94", "0.8597", False)
    assert at_most("crps", 1.0345, 1.03).measured == "1.034"
    assert at_most("crps", 1.03, 1.03).measured == "1.03"


def test_table_shows_verdicts_and_notes() -> None:
    rows = [Row("fit", "at most 2", "1", True), not_run("rival", "make it with `make bench`")]
    lines = table.ascii_table(rows).splitlines()
    assert lines[2].split("|")[-1].strip() == "yes"
    assert lines[-1].strip() == "make it with `make bench`"


def test_workload_is_the_same_for_the_same_seed() -> None:
    first, second = workload(300, width=8), workload(300, width=8)
    assert torch.equal(first.x, second.x)
    assert torch.equal(first.model(first.x), second.model(second.x))
    assert torch.equal(torch.cat([x for x, _ in first.batches()]), first.x)


def test_table_has_columns_for_limits_where_its_rows_have_some() -> None:
    plain = at_most("fit", 2.0, 2.2)
    assert table.columns([plain]) == [table.HEADER, table.cells(plain)]
    header, bounded, unbounded = table.columns([plain.with_least(flops=1.4, bytes=1.05), plain])
    assert header == (*table.HEADER, "least by flops", "least by bytes")
    assert bounded[-2:] == ("1.40", "1.05")
    assert unbounded[-2:] == ("-", "-")


def test_page_of_results_with_limits_is_read_and_written(tmp_path: Path) -> None:
    circumstances = dict.fromkeys(("command", "date", "cpu", "cores", "threads", "torch"), "?")
    loads = {"load_before": 1, "load_after": 2, "gpu": "a card"}
    rows = [at_most("fit", 2.0, 2.2).with_least(flops=1.4, bytes=1.05)]
    Result("speed", rows, circumstances | loads).save(tmp_path)
    table.write_page(tmp_path, ["speed"])
    lines = (tmp_path / "README.md").read_text().splitlines()
    assert "| fit | at most 2.2 | 2.00 | yes | 1.40 | 1.05 |" in lines
    assert any("a card, ? threads" in line for line in lines)


def test_page_is_written_from_stored_results_and_begins_with_what_was_missed(tmp_path) -> None:
    circumstances = dict.fromkeys(("command", "date", "cpu", "cores", "threads", "torch"), "?")
    rows = [at_most("fit", 2.0, 1.5, "passes"), at_most("predict", 1.0, 1.5)]
    Result("speed", rows, circumstances | {"load_before": 1, "load_after": 2}).save(tmp_path)
    main(["--page", "--results", str(tmp_path)])
    page = (tmp_path / "README.md").read_text()
    top = page[page.index("## Not reached") : page.index("## speed")]
    assert "| [speed](#speed) | fit | at most 1.5 passes | 2.00 |" in top.splitlines()
    assert "1 of 2 limits" in top and "predict" not in top


def test_gpu_benchmark_is_refused_where_there_is_no_such_device(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        main(["gpu"])


def test_variances_that_judge_the_mixed_path_equal_those_by_orthogonal_factors() -> None:
    work = workload(300, width=8)
    train, rows = dense.features(work, work.x), dense.features(work, work.x[:20])
    found = gpu.dense_quadratic(work, work.x[:20], 0.1)
    torch.testing.assert_close(found, dense.quadratic(train, rows, ridge=0.1))
