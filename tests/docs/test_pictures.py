"""The pictures of the pages on concepts: their script runs, and captions say what it draws."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"


def drawing_module(name: str) -> Iterator[ModuleType]:
    """A module that draws pictures, while a test runs."""
    pytest.importorskip("matplotlib")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS / "pictures"))
        yield importlib.import_module(name)


@pytest.fixture(scope="module")
def concepts() -> Iterator[ModuleType]:
    """The module that draws the pictures of the pages on concepts."""
    yield from drawing_module("concepts")


@pytest.fixture(scope="module")
def error_bars() -> Iterator[ModuleType]:
    """The module that draws the pictures of how bars are made."""
    yield from drawing_module("error_bars")


@pytest.mark.thorough
def test_shares_of_the_caption_about_a_wrong_form_are_those_drawn(plain_torch, concepts) -> None:
    torch.set_default_dtype(torch.float64)
    figure = concepts.misspecified()
    page = " ".join((DOCS / "concepts/when_bars_fail.md").read_text(encoding="utf-8").split())
    said = r"cover (\d+) % of all new rows, but (\d+) % in the outer .* at least (\d+) % in every"
    ((everywhere, outer, least),) = [map(int, one) for one in re.findall(said, page)]
    shares = [bar.get_height() for bar in figure.axes[1].patches]
    concepts.plt.close(figure)
    constant, default = shares[:10], shares[10:]
    assert sum(constant) / 10 == pytest.approx(everywhere, abs=3)
    assert [constant[0], constant[9]] == pytest.approx([outer, outer], abs=12)  # steep there
    assert min(default) == pytest.approx(least, abs=6)


@pytest.mark.thorough
def test_the_mixture_of_the_caption_is_drawn_with_one_peak_and_then_two(
    plain_torch, error_bars
) -> None:
    torch.set_default_dtype(torch.float64)
    figure = error_bars.mixture()
    page = " ".join((DOCS / "error_bars.md").read_text(encoding="utf-8").split())
    assert "One peak at the left input, two at the others" in page
    peaks = []
    for line in figure.axes[1].lines:
        density = torch.as_tensor(line.get_ydata())
        rises = density.diff() > 0
        tall = density[1:-1] > density.max() / 5  # waves are no peaks
        valleys = (~rises[:-1] & rises[1:] & (density[1:-1] < density.max() / 5)).sum()
        assert tall.any()
        peaks.append(int(valleys) + 1)
    error_bars.plt.close(figure)
    assert peaks == [1, 2, 2]


@pytest.mark.slow
def test_the_script_draws_every_committed_picture_anew(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(DOCS / "pictures"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=1200)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (DOCS / "images").glob("*.svg")}
    assert min(path.stat().st_size for path in tmp_path.iterdir()) > 5000
