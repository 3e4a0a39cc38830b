"""What several studies' tests share: a folder of made-up data."""

from pathlib import Path

import pytest
from experiments.frame.outcome import Outcome

from experiments import __main__ as command
from tests.support import synthetic_data


@pytest.fixture
def synthetic(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / "synthetic"
    if not (folder / "california_housing.npz").exists():
        synthetic_data.write(folder)
    monkeypatch.setenv("RIGIDITIES_DATA", str(folder))
    return folder


@pytest.fixture
def outcome(
    request: pytest.FixtureRequest,
    synthetic: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Outcome:
    """What the command writes of a quick run of the module's `experiment`."""
    experiment, found = request.module.experiment, []
    run = experiment.run
    monkeypatch.setattr(experiment, "run", lambda **asked: found.append(run(**asked)) or found[0])
    name = experiment.__name__.split(".")[-2]
    assert command.main([name, "--quick", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / f"{name}.json").exists()
    (only,) = found
    return only
