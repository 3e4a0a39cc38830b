"""What the library says of a package that is missing."""

import re
from pathlib import Path

import pytest

from rigidities.notices import extra, missing

ROOT = Path(__file__).parents[1]


def test_a_hint_names_the_extra_for_an_index_and_for_a_checkout() -> None:
    hint = 'pip install "rigidities[onnx]" (in a checkout: pip install ".[onnx]")'
    assert extra("onnx") == hint


def test_every_extra_that_a_message_names_exists() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"extra\([\"'](\w+)[\"']\)", text)}
    assert len(named) >= 8
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    assert named <= set(re.findall(r"^(\w+) = \[", extras, flags=re.MULTILINE))


@pytest.mark.parametrize("name", ["host", "host.part", "below"])
def test_a_missing_host_is_named_with_what_to_install(name: str) -> None:
    with pytest.raises(
        ModuleNotFoundError, match=r"^This feature of rigidities needs host: pip install host"
    ):
        missing(ModuleNotFoundError("No module", name=name), "pip install host", "host", "below")


def test_what_else_is_missing_is_said_as_it_was() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module$"):
        missing(ModuleNotFoundError("No module", name="other"), "pip install host", "host")
