"""The pictures of the pages on concepts: their script runs, and captions say what it draws."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.thorough
def test_shares_of_the_caption_about_a_wrong_form_are_those_drawn(plain_torch, pictures) -> None:
    torch.set_default_dtype(torch.float64)
    figure = pictures.misspecified()
    page = " ".join((DOCS / "concepts/when_bars_fail.md").read_text(encoding="utf-8").split())
    said = r"hold (\d+) % of all new rows, but (\d+) % in the outer .* at least (\d+) % in every"
    ((everywhere, outer, least),) = [map(int, one) for one in re.findall(said, page)]
    shares = [bar.get_height() for bar in figure.axes[1].patches]
    pictures.plt.close(figure)
    constant, default = shares[:10], shares[10:]
    assert sum(constant) / 10 == pytest.approx(everywhere, abs=3)
    assert [constant[0], constant[9]] == pytest.approx([outer, outer], abs=12)  # steep there
    assert min(default) == pytest.approx(least, abs=6)


@pytest.mark.slow
def test_the_script_draws_every_committed_picture_anew(plain_torch, pictures, tmp_path) -> None:
    pictures.main(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (DOCS / "images").glob("*.svg")}
    assert min(path.stat().st_size for path in tmp_path.iterdir()) > 5000
