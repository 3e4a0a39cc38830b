"""The pictures of the how-to pages: pages show them all, and they show what their pages say."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"
SHOWN = re.compile(r"!\[([^\]]+)\]\((?:\.\./)?images/([\w-]+)\.svg\)\n\n(.)")


@pytest.fixture(scope="module")
def how_to() -> Iterator[ModuleType]:
    """The module that draws the pictures of the how-to pages."""
    pytest.importorskip("matplotlib")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS / "pictures"))
        yield importlib.import_module("how_to")


def text_of(page: str) -> str:
    """A page on one line."""
    return " ".join((DOCS / page).read_text(encoding="utf-8").split())


def test_every_picture_is_shown_with_a_description_and_a_caption(how_to) -> None:
    shown = {}
    for page in DOCS.rglob("*.md"):
        for description, name, caption in SHOWN.findall(page.read_text(encoding="utf-8")):
            shown[name] = (len(description.split()), caption)
    assert set(how_to.PICTURES) <= set(shown)
    for name in how_to.PICTURES:
        words, caption = shown[name]
        assert words >= 12, name  # of the description
        assert caption == "*", name  # an italic caption follows
        assert (DOCS / "images" / f"{name}.svg").stat().st_size < 150_000, name


def test_curves_of_coverage_are_those_of_the_table(how_to) -> None:
    figure = how_to.evidence()
    default, paper, constant = (line.get_ydata() for line in figure.axes[0].lines[:3])
    how_to.plt.close(figure)
    page = text_of("evidence.md")
    average = r"outside, on average \| (\d+) % \| \d+ % \| (\d+) % \| (\d+) %"
    ((of_paper, of_default, of_constant),) = [
        map(int, found) for found in re.findall(average, page)
    ]
    assert len(default) == 162
    assert round(sum(paper) / 162) == of_paper
    assert round(sum(default) / 162) == of_default
    assert round(sum(constant) / 162) == of_constant
    lowest = re.findall(r"lowest coverage \| \d+ % \| \d+ % \| (\d+) %", page)
    assert [str(round(min(default)))] == lowest


@pytest.mark.parametrize("name", ["speed", "deploy"])
def test_bars_of_costs_stand_in_the_tables_of_the_page_on_speed(how_to, name) -> None:
    figure = how_to.PICTURES[name]()
    costs = [bar.get_width() for axes in figure.axes for bar in axes.patches]
    how_to.plt.close(figure)
    cells = {cell.strip() for cell in (DOCS / "speed.md").read_text(encoding="utf-8").split("|")}
    assert len(costs) >= 6
    for cost in costs:
        roundings = {f"{cost:.0f}", f"{cost:.1f}", f"{cost:.2f}"}
        assert roundings & cells, cost


@pytest.mark.thorough
def test_a_second_run_begins_where_the_first_ended(how_to, plain_torch) -> None:
    torch.set_default_dtype(torch.float64)
    figure = how_to.long_fits()
    first, second = (line.get_ydata() for line in figure.axes[0].lines)
    how_to.plt.close(figure)
    assert first[0] == 0 and second[0] == first[-1] and second[-1] == 20_000
