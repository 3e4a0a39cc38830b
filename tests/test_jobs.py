"""Parts of an experiment: kept on disk, taken up again, the same however they are run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import jobs
from experiments.jobs import Job, results

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


def test_other_arguments_or_another_device_are_computed_anew(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results("trial", made(log), workers=1)
    other = results("trial", made(log, (1.0, 2.5)), workers=1)
    assert other["first"]["squares"][1] == (2.5 / 3) ** 2
    assert len(calls(log)) == 6
    results("trial", made(log), workers=1)
    assert len(calls(log)) == 6
    monkeypatch.setenv("RIGIDITIES_DEVICE", "cuda")
    results("trial", made(log), workers=1)
    assert len(calls(log)) == 9


def test_changed_code_is_run_again(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results("trial", made(log), workers=1)
    monkeypatch.setattr(jobs.sources, "digest", lambda module: "other text")
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
