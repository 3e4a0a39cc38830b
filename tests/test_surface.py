"""The public surface: what it is, is committed; `dir` shows it and nothing else."""

import importlib
from pathlib import Path

import pytest

from tests.support.surface import MODULES, surface

COMMITTED = Path(__file__).parents[1] / "docs" / "reference" / "surface.txt"


def test_the_public_surface_is_the_committed_one():
    assert surface() == COMMITTED.read_text(), (
        "The public surface has changed. If that is meant, write it down: make surface, commit the "
        "difference, and tell of it in CHANGELOG.md."
    )


@pytest.mark.parametrize("name", MODULES)
def test_dir_of_a_public_module_shows_its_public_names_alone(name):
    module = importlib.import_module(name)
    assert dir(module) == sorted(module.__all__)
    for public in module.__all__:
        assert (getattr(module, public).__doc__ or "").strip(), public
