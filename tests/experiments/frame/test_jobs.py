"""Parts of an experiment: kept on disk, taken up again, the same however they are run."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.frame.jobs import Job, results

from experiments.frame import jobs

NAMES = ("first", "second", "third")


def squares(name: str, numbers: list[float], log: str) -> dict[str, Any]:
    """The work; it notes that it was called and stops the run where it is told to."""
    with Path(log).open("a") as file:
        file.write(f"{name}\n")
    if Path(log).with_suffix(f".{name}").exists():
        raise KeyboardInterrupt
    values = torch.tensor(numbers, dtype=torch.float64) / 3
    return {"name": name, "squares": values.square(), "none": math.nan, "threads": [1]}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RIGIDITIES_DEVICE", raising=False)
    return tmp_path / "log.txt"


def made(log: Path, numbers: tuple[float, ...] = (1.0, 2.0)) -> list[Job]:
    return [
        Job(name, squares, {"name": name, "numbers": list(numbers), "log": str(log)})
        for name in NAMES
    ]


def calls(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def test_results_are_the_same_kept_or_not_and_come_in_the_order_of_the_jobs(log: Path) -> None:
    fresh = results("trial", made(log), keep=False, workers=1)
    assert jobs.kept("trial") == []
    stored = results("trial", made(log), workers=1)
    assert len(jobs.kept("trial")) == 3
    read = results("trial", made(log), workers=1)
    assert calls(log) == list(NAMES) * 2
    assert list(fresh) == list(stored) == list(read) == list(NAMES)
    for one in (fresh, stored, read):
        assert one["first"]["squares"] == [(1 / 3) ** 2, (2 / 3) ** 2]
        assert math.isnan(one["second"]["none"])
    assert json.dumps(fresh) == json.dumps(stored) == json.dumps(read)


def test_an_interrupted_run_goes_on_where_it_was(log: Path) -> None:
    stop = log.with_suffix(".second")
    stop.touch()
    with pytest.raises(KeyboardInterrupt):
        results("trial", made(log), workers=1)
    assert calls(log) == ["first", "second"]
    stop.unlink()
    found = results("trial", made(log), workers=1)
    assert calls(log) == ["first", "second", "second", "third"]
    assert list(found) == list(NAMES)


def test_other_arguments_are_computed_anew(log: Path) -> None:
    results("trial", made(log), workers=1)
    other = results("trial", made(log, (1.0, 2.5)), workers=1)
    assert other["first"]["squares"][1] == (2.5 / 3) ** 2
    assert len(calls(log)) == 6
    results("trial", made(log), workers=1)
    assert len(calls(log)) == 6


def test_forgetting_removes_one_experiment_alone(log: Path) -> None:
    for experiment in ("trial", "other"):
        results(experiment, made(log), workers=1)
    jobs.forget("trial")
    assert (len(jobs.kept("trial")), len(jobs.kept("other"))) == (0, 3)


def test_two_processes_give_what_one_gives(log: Path) -> None:
    alone = results("trial", made(log), keep=False, workers=1)
    side_by_side = results("trial", made(log), keep=False, workers=2)
    assert json.dumps(alone) == json.dumps(side_by_side)
    assert sorted(calls(log)) == sorted(NAMES * 2)


def test_other_data_are_another_part(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = log.parent / "data"
    data.mkdir()
    monkeypatch.setenv("RIGIDITIES_DATA", str(data))
    parts = [Job(job.name, job.work, job.arguments, ("other.npz", "set.npz")) for job in made(log)]
    results("trial", parts, workers=1)
    (data / "set.npz").write_bytes(b"rows")
    results("trial", parts, workers=1)
    results("trial", parts, workers=1)
    assert calls(log) == list(NAMES) * 2
    (data / "set.npz").write_bytes(b"other rows")
    results("trial", parts, workers=1)
    assert calls(log) == list(NAMES) * 3


def test_parts_of_another_machine_serve_and_are_told(log: Path, monkeypatch) -> None:
    monkeypatch.setattr(jobs, "earlier", [])
    monkeypatch.setattr(jobs, "machine", lambda: "a large card, torch 0.0")
    results("trial", made(log)[:2], workers=1)
    monkeypatch.setattr(jobs, "machine", lambda: "a laptop, torch 0.1")
    results("trial", made(log), workers=1)
    assert [part.machine for part in jobs.earlier] == ["a large card, torch 0.0"] * 2
    results("trial", made(log), workers=1)
    assert [part.machine for part in jobs.earlier[2:]][-1] == "a laptop, torch 0.1"
    assert calls(log) == list(NAMES)


def test_a_cache_that_cannot_be_written_is_said_before_the_work(log: Path, monkeypatch) -> None:
    occupied = log.parent / "a file"
    occupied.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(occupied))
    with pytest.raises(jobs.CacheError, match=r"cannot be kept in .* Set XDG_CACHE_HOME"):
        results("trial", made(log), workers=1)
    assert calls(log) == []
    assert list(results("trial", made(log), keep=False, workers=1)) == list(NAMES)


def ended(name: str) -> str:
    """Work whose process is gone before it is done."""
    if name == "second":
        time.sleep(2)
        os._exit(1)
    return name


def test_a_worker_that_is_gone_is_told_and_the_finished_parts_are_kept(log: Path) -> None:
    parts = [Job(name, ended, {"name": name}) for name in ("second", "first")]
    with pytest.raises(jobs.WorkerError, match="Finished parts are kept, and the same command"):
        results("trial", parts, workers=2)
    assert [path.name.split("-")[0] for path in jobs.kept("trial")] == ["first"]


# --- parts of other code --------------------------------------------------------------------------


def test_parts_of_other_code_serve_and_are_told(log: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(jobs, "earlier", [])
    monkeypatch.setattr(jobs.sources, "digests", lambda experiment: {"library": "old"})
    results("trial", made(log)[:2], workers=1)
    before = {path: path.read_bytes() for path in jobs.kept("trial")}
    monkeypatch.setattr(jobs.sources, "digests", lambda experiment: {"library": "new"})
    results("trial", made(log), workers=1)
    said = capsys.readouterr().out
    assert "2 of 3 parts come from an earlier run" in said
    assert "2 of them were computed by other code: --fresh recomputes" in said
    assert calls(log) == list(NAMES)
    assert before.items() < {path: path.read_bytes() for path in jobs.kept("trial")}.items()
    jobs.earlier.clear()
    results("trial", made(log), workers=1)
    assert [part.other_code for part in jobs.earlier] == [True, True, False]


def test_a_part_records_what_it_was_computed_from(log: Path) -> None:
    results("trial", made(log)[:1], workers=1)
    (path,) = jobs.kept("trial")
    record = json.loads(path.read_text())
    assert record["name"] == "first"
    assert record["work"] == f"{__name__}:squares"
    assert record["arguments"] == {"name": "first", "numbers": [1.0, 2.0], "log": str(log)}
    assert record["data"] == ""
    assert record["code"] == jobs.sources.digests("trial")
    assert record["machine"] == jobs.machine()
