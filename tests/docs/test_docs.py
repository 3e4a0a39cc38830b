"""The documentation's Python blocks run, page by page, and print what it says they print."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    "any_regressor.md",
    "chemistry.md",
    "classifiers.md",
    "coverage.md",
    "deploy.md",
    "error_bars.md",
    "files.md",
    "frameworks.md",
    "plots.md",
    "propagation.md",
    "report.md",
    "scikit_learn.md",
    "streams.md",
    "theory.md",
    "trees.md",
    "start.md",
    *(f"concepts/{name}.md" for name in ("rigidity", "epistemic_and_noise", "when_bars_fail")),
    *(f"how_to/{name}.md" for name in ("batches", "targets", "skewed", "active_learning")),
    *(f"how_to/{name}.md" for name in ("forces", "derived")),
    *(f"coming_from/{name}.md" for name in ("laplace", "ensembles", "mapie")),
    "coming_from/gaussian_processes.md",
]
EVERY = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))

BLOCK = re.compile(
    r'^```(python|text)(?: title="(one training run|for example)")?\n(.*?)^```',
    flags=re.DOTALL | re.MULTILINE,
)
TRAINED = "one training run"
SHARES = 0.07
"""How far shares may lie apart: four binomial errors of a thousand rows, two of a hundred."""
NUMBER = re.compile(r"(-?\d+\.(\d*)(?:e[-+]\d+)?)(?:(?= \+- (\d+\.\d*)))?")


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """(language, title, text) of the page's blocks of code and of output."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def numbers(text: str) -> list[float]:
    return [float(number) for number, *_ in NUMBER.findall(text)]


def assert_as_shown(printed: str, shown: str, title: str) -> None:
    """Equal numbers or, of a trained net, those of a net from another seed.

    Such a one agrees with the net shown within a factor of three, one unit of the last digit or six
    of the error bars behind it: four standard deviations of the difference of two draws. Shares on
    lines that say what intervals cover agree within 0.07 and a unit of the last digit. Where whole
    texts stand for an example, their lines begin alike.
    """
    if title == "for example":
        assert set(beginnings(shown)) <= set(beginnings(printed)), (printed, shown)
    elif not title:
        assert numbers(printed) == pytest.approx(numbers(shown), rel=0.02, abs=1e-6), shown
    else:
        lines = [found for line in shown.splitlines() for found in allowed(line)]
        assert len(numbers(printed)) == len(lines) > 0, (printed, shown)
        for got, (value, apart, factor) in zip(numbers(printed), lines, strict=True):
            near = abs(got - value) <= apart or 1 / factor <= got / (value or 1e-9) <= factor
            assert near, f"{got}, shown {value}, in\n{printed}\nshown\n{shown}"


def allowed(line: str) -> Iterator[tuple[float, float, float]]:
    """(value, distance, factor) of the numbers of a line: how far another net's may lie."""
    for text, digits, bar in NUMBER.findall(line):
        unit = 1.01 * 10.0 ** -len(digits)
        if re.search(r"\b(?:h[eo]ld|cover\w*)\b", line) and 0 <= float(text) <= 1:
            yield float(text), SHARES + unit, 1.0
        else:
            yield float(text), max(6 * float(bar or 0), unit), 3.0


def beginnings(text: str) -> list[str]:
    """The first words of all lines but the first."""
    return [word for line in text.splitlines()[1:] for word in re.findall(r"[a-zA-Z!]+", line)[:1]]


@pytest.mark.parametrize(
    ("printed", "shown", "title"),
    [
        ("90 % intervals hold 0.80 of all", "90 % intervals hold 0.90 of all", TRAINED),
        ("90 % intervals cover 0.80 of all", "90 % intervals cover 0.90 of all", TRAINED),
        ("0.81 held, 0.5 wide", "0.91 held, 0.5 wide", TRAINED),
        ("covered 0.81", "covered 0.91", TRAINED),
        ("bar 0.31", "bar 0.10", TRAINED),
        ("a\n  Size: 1.0", "a\n  Size: 1.0\n  Use: 2.0", "for example"),
        ("1.0", "1.1", ""),
    ],
)
def test_what_is_far_from_what_is_shown_fails(printed: str, shown: str, title: str) -> None:
    assert_as_shown(shown, shown, title)
    with pytest.raises(AssertionError):
        assert_as_shown(printed, shown, title)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs_and_prints_what_is_shown(
    page: str, plain_torch, pytestconfig, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    printed, compared = "", 0
    for language, title, text in blocks(DOCS / page):
        if language == "python":
            lines: list[str] = []
            namespace["print"] = lambda *words, lines=lines: lines.append(" ".join(map(str, words)))
            exec(compile(text, page, "exec"), namespace)
            printed = "\n".join(lines)
        else:
            compared += 1
            assert numbers(text), text
            if title or not pytestconfig.getoption("--moved-seeds"):  # else of other draws
                assert_as_shown(printed, text, title)
    assert compared == len(re.findall("^```text", (DOCS / page).read_text(), flags=re.M)) > 0


@pytest.mark.parametrize("page", EVERY)
def test_links_and_pictures_exist(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```|`[^`\n]+`", "", text, flags=re.S | re.M)
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", prose)
    assert [link for link in links if not (DOCS / page).parent.joinpath(link).is_file()] == []


@pytest.mark.parametrize("page", EVERY)
def test_anchors_within_a_page_exist(page: str) -> None:
    for target, anchor in re.findall(r"\]\(([\w./]*)#([\w-]+)\)", (DOCS / page).read_text()):
        path = (DOCS / page).parent / target if target else DOCS / page
        text = path.read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert anchor in slugs, f"{page}: {target}#{anchor}"


def test_figures_of_the_experiments_in_the_propagation_page_are_those_of_the_results() -> None:
    results = DOCS.parent / "experiments" / "results"
    page = (DOCS / "propagation.md").read_text(encoding="utf-8")
    sets = json.loads((results / "propagation/propagation.json").read_text())["sets"]
    for way in ("none", "constant", "bayes"):
        ratios = [f"{sets[name][way]['joint']['ratio']['500']:.2f}" for name in sets]
        quoted = r",\s+".join(ratios[:-1]) + r"\s+and\s+" + ratios[-1]
        assert re.search(quoted, page), (way, ratios)
    for kind in ("common", "single"):
        ratios = [f"{sets[name]['auto'][f'ratio_of_{kind}']:.2f}" for name in sets]
        assert f"{', '.join(ratios[:-1])} and {ratios[-1]}" in " ".join(page.split()), kind
    labels = json.loads((results / "active/active.json").read_text())["kin8nm"]
    needed = labels["methods"]["variance"]["labels_to_randoms_last"]
    assert f"it needs {round(needed, -1):.0f} labels" in page


def test_figures_with_errors_in_the_theory_are_those_of_the_results() -> None:
    results = DOCS.parent / "experiments" / "results"
    known = " ".join(path.read_text(encoding="utf-8") for path in results.rglob("*.md"))
    quoted = re.findall(r"-?\d+\.\d+ ± \d+\.\d+", (DOCS / "theory.md").read_text(encoding="utf-8"))
    assert len(quoted) >= 3
    assert [figure for figure in quoted if figure not in known] == []
