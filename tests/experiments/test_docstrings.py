"""What the docstrings of the experiments show is what happens."""

import doctest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOWN = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "experiments").rglob("*.py"))
    if ">>>" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", SHOWN)
def test_the_examples_in_docstrings_hold(module: str) -> None:
    done = doctest.testmod(pytest.importorskip(module))
    assert done.attempted and not done.failed
    assert len(SHOWN) > 15
