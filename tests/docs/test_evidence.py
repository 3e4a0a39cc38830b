"""The figures of the README and of the page on evidence are those of the committed results."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.numbers_on_pages import unsupported

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
EVIDENCE, SPEED = ROOT / "docs" / "evidence.md", ROOT / "docs" / "speed.md"
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


@pytest.mark.parametrize("path", [ROOT / "README.md", EVIDENCE], ids=str)
def test_tables_and_quoted_figures_are_those_of_the_results(path: Path) -> None:
    page = section(path)
    names = ("uci", "california", "outside", "novelty", "molecules", "weather", "width", "qm9")
    known = [numbers(name) for name in names]
    level = {"level": 0.9}  # of the intervals
    assert MEASURED.findall(page)
    assert unsupported(page, known) == []
    assert unsupported(quoted(page), [*known, level]) == []


def test_the_table_of_the_gap_has_the_means_of_its_experiment() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    summary = numbers("gap")["summary"]
    labels = {"constant bar": "constant", "MAPIE": "mapie", "laplace": "laplace"}
    labels["**rigidities**"] = "rigidities"
    for label, method in labels.items():
        expected = []
        for region in ("inside", "gap"):
            scores = summary[region][method]
            expected.append(f"{100 * scores['coverage'][0]:.0f} %")
            expected.append(f"{scores['width'][0]:.2f}")
            expected.append(f"{scores['nll'][0]:.2f}" if "nll" in scores else "")
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {label}")]
        cells = [cell.strip(" *") for cell in line.split("|")[2:-1]]
        assert cells == expected, label
    assert f"over {len(numbers('gap')['draws'])} random functions" in page


def test_the_tables_and_pictures_are_there() -> None:
    page = section(EVIDENCE)
    assert len(re.findall(r"^\| \w+ \| -?\d", page, flags=re.MULTILINE)) >= 16
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+\.png)\)", page)
    assert len(pictures) == 3
    assert all((EVIDENCE.parent / picture).is_file() for picture in pictures)


@pytest.mark.parametrize("path", [ROOT / "README.md", EVIDENCE], ids=str)
def test_wins_and_losses_that_are_counted_follow_from_the_paired_differences(path: Path) -> None:
    page = " ".join(section(path).split())
    names = {"LLPR": "llpr", "Laplace": "laplace", "MC dropout": "mc_dropout"}
    names |= {"ensembles": "deep_ensemble", "ensembles of 400 epochs": "deep_ensemble_400"}
    for label, method in names.items():
        differences = [one["paired"][f"best - {method}"] for one in numbers("uci").values()]
        # of cells where targets lie on a grid
        pairs = [one.get("cell", one["nll"]) for one in differences]
        better = sum(mean < -2 * error for mean, error in pairs)
        worse = sum(mean > 2 * error for mean, error in pairs)
        said = re.search(rf"{label} on (\d) sets \(worse on (\d)\)", page)
        assert said is not None, label
        assert (int(said[1]), int(said[2])) == (better, worse), label


def test_what_each_experiment_was_computed_with_is_what_its_page_says() -> None:
    part = section(EVIDENCE).partition("## What it was computed with")[2]
    told = {}
    for names, processor, version in re.findall(r"^- (`.+`): (.+), PyTorch (.+)$", part, re.M):
        told |= dict.fromkeys(re.findall(r"`(\w+)`", names), (processor, version))
    assert set(told) == {path.name for path in RESULTS.iterdir()}
    for name, (processor, version) in told.items():
        made = (RESULTS / name / f"{name}.md").read_text(encoding="utf-8").split("Made by")[-1]
        words = re.findall(r"Xeon|EPYC|H200|Neoverse-N1|\d+ (?=thread)", processor)
        assert words and all(word in made for word in words), name
        assert all(f"torch {number}" in made for number in re.findall(r"2\.\d+", version)), name


def test_costs_are_those_that_the_named_benchmark_measured() -> None:
    lines = re.findall(r"^\| .+ \| (.+) \| `([\w-]+)` \| (\w+) \|$", SPEED.read_text(), re.M)
    assert len(lines) >= 10
    processors = {
        "Xeon": "Intel(R) Xeon(R) Processor",
        "EPYC": "AMD EPYC",
        "N1": "aarch64 Neoverse-N1",
    }
    for costs, name, on in lines:
        found = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
        assert unsupported(f"| a |\n| --- |\n| {costs} |", found["rows"]) == []
        made = found["provenance"]
        assert made["cpu"].startswith(processors[on])
        assert (made["cores"], made["threads"]) == (2, 2)
        assert made["torch"].startswith("2.13")


FIT_COLUMNS = (
    "fit, double, list of batches",
    "fit, double, tensors",
    "fit, double, shuffled loader",
    "fit, mixed, list of batches",
    "naive loop, float64",
    "naive loop, float32",
)


def test_the_table_of_fits_holds_the_medians_of_the_results() -> None:
    rows = json.loads((ROOT / "benchmarks/results/speed.json").read_text())["rows"]
    medians = {row["work"]: row["figures"].get("median") for row in rows}
    lines = re.findall(
        r"^\| (\d+,000 rows, width \d+) \| \d+ ms \| (.+) \|$", SPEED.read_text(), re.M
    )
    assert len(lines) == 2
    for net, cells in lines:
        assert cells.split(" | ") == [f"{medians[f'{name}, {net}']:.2f}" for name in FIT_COLUMNS]


MENTIONED = re.compile(r"python -m benchmarks ([\w-]+)")
PAGES = [path for path in (ROOT / "docs").rglob("*.md") if MENTIONED.search(path.read_text())]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_pages_with_figures_of_a_benchmark_say_what_it_ran_on(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    for name in MENTIONED.findall(page):
        made = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["provenance"]
        processor = re.search(r"Xeon|EPYC|Neoverse-N1", made["cpu"])[0]
        assert ("H200" if name == "gpu" else processor) in page
        assert "PyTorch " + ".".join(made["torch"].split(".")[:2]) in page
