"""What several studies' tests share: a folder of made-up data."""

from pathlib import Path

import matplotlib
import pytest

from experiments.frame import figures
from tests.support import synthetic_data


@pytest.fixture
def synthetic(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / "synthetic"
    if not (folder / "california_housing.npz").exists():
        synthetic_data.write(folder)
    monkeypatch.setenv("RIGIDITIES_DATA", str(folder))
    return folder


@pytest.fixture
def outcome(request: pytest.FixtureRequest, synthetic: Path) -> object:
    """The quick run of the module's `experiment`, in the style of figures."""
    with matplotlib.rc_context(figures.style()):
        return request.module.experiment.run(quick=True, seed=0)
