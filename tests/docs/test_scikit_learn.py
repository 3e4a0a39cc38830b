"""The pictures of the pages on scikit-learn and trees show what their captions say."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:The error bars are not shown"),
]


@pytest.fixture(scope="module")
def pictures() -> Iterator[ModuleType]:
    """The module that draws these pictures."""
    pytest.importorskip("matplotlib")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS / "pictures"))
        yield importlib.import_module("scikit_learn")


def caption(page: str) -> str:
    return " ".join((DOCS / page).read_text(encoding="utf-8").split())


def lines(figure) -> dict[str, np.ndarray]:
    """The drawn lines with labels, as arrays (2, points)."""
    return {line.get_label(): np.asarray(line.get_data()) for line in figure.axes[0].lines}


def test_as_many_true_values_lie_outside_as_the_caption_says(pictures) -> None:
    figure = pictures.intervals()
    outside = lines(figure)["true value, not covered"].shape[1]
    covered = lines(figure)["true value, covered"].shape[1]
    pictures.plt.close(figure)
    assert outside + covered == 111
    assert abs(outside - 11) <= 2
    assert "Eleven lie outside" in caption("scikit_learn.md")


def test_gaussian_bars_cover_what_the_caption_says(pictures) -> None:
    figure = pictures.coverage()
    drawn = lines(figure)
    pictures.plt.close(figure)
    ((level, share),) = re.findall(
        r"at a level of (\d+) % it covers about (\d+) %", caption("scikit_learn.md")
    )
    levels, gaussian = drawn["by a Gaussian distribution"]
    assert np.interp(float(level), levels, gaussian) == pytest.approx(float(share), abs=4)
    levels, guaranteed = drawn["conformal=2000"]
    assert np.abs(guaranteed - levels).max() < 5


def test_bars_of_trees_grow_in_the_gap_and_stay_beyond_the_data(pictures) -> None:
    figure = pictures.trees()
    (band,) = [part for part in figure.axes[0].collections if len(part.get_paths()[0]) > 100]
    x, y = band.get_paths()[0].vertices.T
    pictures.plt.close(figure)
    widths = {place: np.ptp(y[np.abs(x - place) < 0.004]) for place in (-0.3, 0.02, 0.4, 0.55)}
    assert widths[0.55] > 1.5 * widths[0.4]
    assert widths[-0.3] < widths[0.4]
    assert "its bar is that of the edge" in caption("trees.md")
