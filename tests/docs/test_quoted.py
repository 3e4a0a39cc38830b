"""What pages say in passing was measured is what the committed results hold."""

import importlib
import json
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
    assert "protocol on 6 sets and worse on none" in text
    assert counted("best", "deep_ensemble") == (6, 0)
    assert "400 epochs it is better on 4 and worse on 2" in text
    assert counted("best", "deep_ensemble_400") == (4, 2)
    assert "better than those ensembles on 6 sets and worse on none" in text
    assert counted("best_of_five", "deep_ensemble_400") == (6, 0)
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
    assert 0.045 < digits["flagged"]["outside"] < 0.055  # one in twenty
    nets = [one for by_net in found["sets"].values() for one in by_net.values()]
    inside = [one["flagged"]["inside"] for one in nets]
    assert f"{100 * sum(inside) / len(inside):.1f} % of new rows inside" in text
    assert f"up to {100 * max(inside):.1f} %" in text
    outside = sum(one["flagged"]["outside"] for one in nets) / len(nets)
    assert f"and {100 * outside:.0f} % of those outside" in text


def numbers_of(cell: str) -> list[float]:
    """The numbers of a table's cell: 8,192; 0.5 %; ±4, ±6; 10⁻⁶; 3/2; powers of ten in formulas."""
    for words, number in ((r"$\log 6$", "1.791759469"), ("10⁻⁶", "0.000001"), ("3/2", "1.5")):
        cell = cell.replace(words, number)
    cell = re.sub(r"\$10\^\{?([-\d.]+)\}?\$", lambda power: f"{10 ** float(power[1]):.12f}", cell)
    found = [float(word.replace(",", "")) for word in re.findall(r"\d[\d,]*\.?\d*", cell)]
    return [value / 100 for value in found] if "%" in cell else found


def test_the_constants_of_the_error_bars_are_those_of_the_code() -> None:
    page = (ROOT / "docs/error_bars.md").read_text(encoding="utf-8")
    constants = page.split("\n## Constants\n")[1]
    row = r"^\| (`[A-Z_`, ]+`) \| ([^|]+) \| [^|]+ \| `([\w/]+)\.py` \|$"
    rows = re.findall(row, constants, re.M)
    assert len(rows) == constants.count(".py` |") - constants.count("| in `") > 30
    for names, cell, path in rows:
        module = importlib.import_module(f"rigidities.{path.replace('/', '.')}")
        expected: list[float] = []
        for name in re.findall(r"[A-Z_]+", names):
            value = getattr(module, name)
            expected += value if isinstance(value, tuple) else [value]
        if names == "`PENALTIES`":
            expected = [min(expected), max(expected)]
        if names == "`FLOORS`":  # the first one is BOUNDS, which raises nothing
            expected = expected[1:]
        if names == "`DECADES`, `PER_DECADE`":
            expected = [expected[1] - expected[0], expected[2]]
        assert numbers_of(cell) == pytest.approx(expected, rel=1e-6), names
    functions = re.findall(r"^\| in `(\w+)` \|.*\| `([\w/]+\.py)` \|$", constants, re.M)
    assert len(functions) == constants.count("| in `") > 2
    for name, path in functions:  # numbers without a name of their own
        source = (ROOT / "src/rigidities" / path).read_text(encoding="utf-8")
        assert f"def {name}(" in source, name
