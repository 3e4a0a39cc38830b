"""The figures of the README and of the page on evidence are those of the committed results."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.numbers_on_pages import unsupported

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
MEASURED = re.compile(r"-?\d+\.\d+ ± \d+\.\d+|\d+ %")


def section(path: Path) -> str:
    """The page, or the README's part of it."""
    text = path.read_text(encoding="utf-8")
    if path.name != "README.md":
        return text
    return text[text.index("## Evidence") : text.index("## When not to trust it")]


def numbers(name: str) -> Any:
    return json.loads((RESULTS / name / f"{name}.json").read_text(encoding="utf-8"))


def quoted(page: str) -> str:
    """Everything measured that the text quotes, as the body of a table."""
    return "| figure |\n| --- |\n" + "\n".join(f"| {x} |" for x in MEASURED.findall(page))


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "docs/evidence.md"], ids=str)
def test_tables_and_quoted_figures_are_those_of_the_results(path: Path) -> None:
    page = section(path)
    known = [numbers(name) for name in ("uci", "california", "weather", "width", "qm9")]
    assert len(re.findall(r"^\| \w+ \| -?\d", page, flags=re.MULTILINE)) >= 8
    level = {"level": 0.9}  # of the intervals
    assert unsupported(page, known) == []
    assert unsupported(quoted(page), [*known, level]) == []


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "docs/evidence.md"], ids=str)
def test_the_pictures_are_there(path: Path) -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+\.png)\)", section(path))
    assert len(pictures) == 3
    assert all((path.parent / picture).is_file() for picture in pictures)


def test_wins_and_losses_that_are_counted_follow_from_the_paired_differences() -> None:
    page = section(ROOT / "README.md")
    names = {"LLPR": "llpr", "Laplace": "laplace", "MC dropout": "mc_dropout"}
    for label, method in names.items():
        pairs = [one["paired"][f"best - {method}"]["nll"] for one in numbers("uci").values()]
        better = sum(mean < -2 * error for mean, error in pairs)
        worse = sum(mean > 2 * error for mean, error in pairs)
        said = re.search(rf"{label} on (\d) sets\s+\(worse on (\d)\)", " ".join(page.split()))
        assert said is not None
        assert (int(said[1]), int(said[2])) == (better, worse)
