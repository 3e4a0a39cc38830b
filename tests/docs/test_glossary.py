"""The glossary is in alphabetical order, and holds the words that readers look for."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "glossary.md"
SOUGHT = [
    "OOD",
    "aleatoric",
    "epistemic",
    "credible interval",
    "confidence interval",
    "prediction interval",
    "posterior",
    "Laplace",
    "calibration",
    "coverage",
    "sharpness",
    "conformal",
    "heteroscedastic",
    "homoscedastic",
    "extrapolation",
    "uncertainty quantification",
    "UQ",
    "held-out rows",
    "network",
    "readout",
]


def entries() -> dict[str, str]:
    """The text of each term."""
    _, *sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    return {section.split("\n")[0]: section.split("\n", 1)[1].strip() for section in sections}


def test_terms_are_in_alphabetical_order() -> None:
    terms = [term.lower() for term in entries()]
    assert terms == sorted(terms)
    assert all(entries().values())


@pytest.mark.parametrize("word", SOUGHT)
def test_a_word_that_readers_look_for_has_an_entry(word: str) -> None:
    assert any(re.search(rf"\b{word}\b", term, flags=re.I) for term in entries())


def test_a_term_that_an_entry_refers_to_has_an_entry() -> None:
    terms = {part.lower() for term in entries() for part in re.split(r", | \(|\)", term)}
    for text in entries().values():
        for reference in re.findall(r"[Ss]ee (?:also )?\*([^*]+)\*", text):
            assert reference.lower() in terms
