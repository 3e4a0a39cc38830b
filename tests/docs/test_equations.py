"""The table of the paper's equations: complete, and every name and file in it exists."""

import re
from functools import reduce
from pathlib import Path

import pytest

import rigidities as rg

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "rigidities"
PAGE = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| \((\S+)\) \| .+ \| `rg\.(\S+)` \| `(\S+)` \|$", PAGE, flags=re.MULTILINE)


def test_every_equation_has_a_row() -> None:
    assert len(ROWS) == len(re.findall(r"^\| \(", PAGE, flags=re.MULTILINE))
    numbers = list(dict.fromkeys(number for number, _, _ in ROWS))
    assert numbers == [
        *(str(n) for n in range(1, 27)),
        *(f"A.{n}" for n in range(1, 7)),
        *(f"B.{n}" for n in range(1, 13)),
    ]


@pytest.mark.parametrize("name", dict.fromkeys(name for _, name, _ in ROWS))
def test_every_name_is_public(name: str) -> None:
    assert not any(part.startswith("_") for part in name.split("."))
    assert (reduce(getattr, name.split("."), rg).__doc__ or "").strip()


@pytest.mark.parametrize("file", dict.fromkeys(file for _, _, file in ROWS))
def test_every_file_exists(file: str) -> None:
    assert (SOURCE / file).is_file()


@pytest.mark.parametrize(
    ("name", "file"),
    dict.fromkeys((name, file) for _, name, file in ROWS if file.startswith("theory/")),
)
def test_a_name_of_the_theory_is_defined_in_its_file(name: str, file: str) -> None:
    definition = rf"^ *(?:def|class) {name.split('.')[-1]}\b"
    assert re.search(definition, (SOURCE / file).read_text(), flags=re.MULTILINE)
