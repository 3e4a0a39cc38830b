"""What pages say in passing was measured is what the committed results hold."""

import importlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.numbers_on_pages import unsupported

ROOT = Path(__file__).parents[2]
SETS = "experiments/results/uci/uci.json"
SOURCES = {
    "laplace": [SETS, "benchmarks/results/rivals.json"],
    "ensembles": ["experiments/results/cost/cost.json"],
    "mapie": ["benchmarks/results/trees.json"],
}
VERSIONS = r"(?:PyTorch|laplace-torch) \d+\.\d+"


def prose(name: str) -> str:
    """The page without its blocks of code and output, and without the versions of packages."""
    page = (ROOT / f"docs/coming_from/{name}.md").read_text(encoding="utf-8")
    return re.sub(rf"^```.*?^```|`[^`\n]+`|{VERSIONS}", "", page, flags=re.S | re.M)


def stored(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SOURCES)
def test_every_figure_stands_in_a_committed_result(name: str) -> None:
    figures = re.findall(r"-?\b\d+\.\d+\b", prose(name))
    table = "| figure |\n| --- |\n" + "\n".join(f"| {figure} |" for figure in figures)
    assert len(figures) >= 2
    assert unsupported(table, [stored(path) for path in SOURCES[name]]) == []


def counted(better: str, than: str) -> tuple[int, int]:
    """On how many sets a method is better than another, and worse, by two standard errors.

    By the NLL, of cells where targets lie on a grid.
    """
    differences = [one["paired"][f"{better} - {than}"] for one in stored(SETS).values()]
    pairs = [one.get("cell", one["nll"]) for one in differences]
    return sum(m < -2 * e for m, e in pairs), sum(m > 2 * e for m, e in pairs)


def test_wins_and_losses_against_ensembles_are_counted_right() -> None:
    text = " ".join(prose("ensembles").split())
    assert "protocol on 7 sets and worse on none" in text
    assert counted("best", "deep_ensemble") == (7, 0)
    assert "400 epochs it is better on 5 and worse on 1" in text
    assert counted("best", "deep_ensemble_400") == (5, 1)
    assert "better than those ensembles on 7 sets and worse on none" in text
    assert counted("best_of_five", "deep_ensemble_400") == (7, 0)
    assert "MC dropout, the default on one network is better on 7 and worse on none" in text
    assert counted("best", "mc_dropout") == (7, 0)
    assert "lower than laplace-torch's on all eight" in " ".join(
        (ROOT / "docs/coming_from/laplace.md").read_text(encoding="utf-8").split()
    )
    assert counted("best", "laplace") == (8, 0)


def test_figures_in_the_how_tos_and_the_concepts_are_those_of_the_results() -> None:
    def page(name: str) -> str:
        return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())

    kin8nm = stored("experiments/results/active/active.json")["kin8nm"]
    needed = kin8nm["methods"]["variance"]["labels_to_randoms_last"]
    assert f"needs {round(needed, -1):.0f} labels" in page("how_to/active_learning.md")
    sets = stored("experiments/results/propagation/propagation.json")["sets"]
    ratios = [one["none"]["joint"]["ratio"]["500"] for one in sets.values()]
    assert f"{min(ratios):.0f} to {max(ratios):.0f} times too large" in page("how_to/derived.md")
    evidence = page("evidence.md")
    (held,) = re.findall(r"outside, on average \| \d+ % \| \d+ % \| (\d+ %)", evidence)
    said = f"90 % intervals covered {held} of the values outside"
    assert said in page("concepts/when_bars_fail.md")


def test_what_novelty_sees_is_what_the_study_measured() -> None:
    found = stored("experiments/results/novelty/novelty.json")
    path = ROOT / "docs/concepts/when_bars_fail.md"
    text = " ".join(path.read_text(encoding="utf-8").split())
    wide, narrow = found["all"]["2 x 64 ReLU"], found["all"]["64 and 2 ReLU"]
    hidden = found["kinds"]["layer norm"]["unlike"]["three times as large"]["auroc"]
    digits = found["kinds"]["convolutions"]["unlike"]["fives to nines"]
    assert f"(AUROC {hidden['novelty']:.2f} instead of {hidden['softness']:.2f})" in text
    auroc = narrow["auroc"]
    assert f"({auroc['novelty']:.2f} instead of {auroc['softness']:.2f} on nine sets)" in text
    assert f"{wide['auroc']['novelty']:.2f}" == f"{wide['auroc']['softness']:.2f}"
    assert f"({wide['auroc']['novelty']:.2f} both)" in text
    auroc = digits["auroc"]
    assert f"({auroc['novelty']:.2f} instead of {auroc['softness']:.2f}), but flagged" in text
    assert f"but flagged only {100 * digits['flagged']['outside']:.0f} %" in text
    nets = [one for by_net in found["sets"].values() for one in by_net.values()]
    inside = [one["flagged"]["inside"] for one in nets]
    assert f"{100 * sum(inside) / len(inside):.1f} % of new rows inside" in text
    assert f"up to {100 * max(inside):.1f} %" in text
    outside = sum(one["flagged"]["outside"] for one in nets) / len(nets)
    assert f"and {100 * outside:.0f} % of those outside" in text


def stated(path: str, cell: str) -> list[tuple[str, str]]:
    """Names of constants in a cell, each with its value as text: `HIDDEN` 64 units."""
    number = r"-?\d[\d,]*(?:\.\d+)?(?: to \d+|/log 10)?"
    found = re.findall(rf"`([A-Z_0-9]+)` ({number})", cell)
    assert len(found) == len(re.findall(r"`[A-Z_0-9]+`", cell)), path
    return found


def value_of(text: str) -> list[float]:
    """The numbers that a text gives: 65,536; -10 to 4; 2/log 10."""
    if text.endswith("/log 10"):
        return [float(text.removesuffix("/log 10")) / math.log(10)]
    return [float(number.replace(",", "").rstrip(".")) for number in text.split(" to ")]


def test_the_constants_of_the_error_bars_are_those_of_the_code() -> None:
    page = (ROOT / "docs/error_bars.md").read_text(encoding="utf-8")
    constants = page.split("\n## Constants\n")[1]
    rows = re.findall(r"^\| `([\w/]+)\.py` \| (.+) \|$", constants, re.M)
    assert len(rows) == constants.count(".py` |") > 10
    compared = 0
    for path, cell in rows:
        module = importlib.import_module(f"rigidities.{path.replace('/', '.')}")
        for name, text in stated(path, cell):
            value = getattr(module, name)
            expected = list(value) if isinstance(value, tuple) else [value]
            assert value_of(text) == pytest.approx(expected, rel=1e-6), (path, name)
            compared += 1
        source = (ROOT / f"src/rigidities/{path}.py").read_text(encoding="utf-8")
        for function in re.findall(r"in `(\w+)`", cell):  # numbers without a name of their own
            assert f"def {function}(" in source, function
    assert compared > 40
