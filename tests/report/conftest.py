import pytest

from tests.support.nets import Trained, trained
from tests.support.pages import shorten


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without plotly's script."""
    shorten(monkeypatch)


@pytest.fixture(scope="module")
def net() -> Trained:
    return trained()
