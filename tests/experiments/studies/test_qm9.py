"""The experiment qm9 as a whole: what the command writes, how parts are put together."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from experiments.frame.catalogue import EXPERIMENTS
from experiments.studies.qm9 import page as pages
from experiments.studies.qm9 import run as qm9
from experiments.studies.qm9.clusters import work as clusters
from experiments.studies.qm9.novelty import page as novelty_page

from experiments import __main__ as command
from experiments.atoms import nets
from experiments.frame import jobs
from rigidities import metrics
from tests.support import synthetic_data
from tests.support.numbers_on_pages import unsupported


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quick run on made-up molecules."""
    folder = tmp_path_factory.mktemp("qm9")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIGIDITIES_DATA", str(synthetic_data.write(folder / "data")))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(clusters, "COMPARED", 1)
        # two seeds together have tests of their own
        fewer = {"seeds": 1, "train": 8, "valid": 6, "test": 4, "epochs": 2}
        bins = {"force_bin": 20, "energy_bin": 2}
        patch.setattr(clusters, "QUICK", fewer | bins)
        assert command.main(["qm9", "--quick", "--out", str(folder / "out")]) == 0
    assert not (folder / "cache" / "rigidities").exists()  # a quick run keeps nothing
    (page,) = (folder / "out").rglob("qm9.md")
    return page.parent


def test_a_quick_run_writes_a_page_with_every_part(written: Path) -> None:
    page = (written / "qm9.md").read_text(encoding="utf-8")
    for heading in ("Energies", "What the error bars cost", "Which atoms are uncertain"):
        assert f"\n## {heading}\n" in page
    pictures = ("bars", "molecules", "novelty", "learning", "forces", "cluster-bins")
    assert all((written / f"qm9-{name}.png").stat().st_size > 3000 for name in pictures)
    assert page.count("nan") == 0


def test_every_number_of_the_tables_stands_in_the_json(written: Path) -> None:
    stored = json.loads((written / "qm9.json").read_text(encoding="utf-8"))
    assert unsupported((written / "qm9.md").read_text(encoding="utf-8"), stored) == []


def test_both_criteria_and_the_costs_are_there(written: Path) -> None:
    stored = json.loads((written / "qm9.json").read_text(encoding="utf-8"))
    ways = stored["energies"]["calibrations"]
    assert set(ways) == set(pages.LABELS)
    assert {one["chosen"]["scale"] > 0 for one in ways.values()} == {True}
    assert stored["costs"]["fit"]["ratio"] > 1 and stored["costs"]["predict"]["ratio"] > 0.5
    assert stored["forces"]["dense"]["difference"] < 1e-8
    assert stored["settings"]["inputs"] == 2325 and stored["settings"]["features"] == 320


def test_merged_bins_are_those_of_larger_bins() -> None:
    generator = torch.Generator().manual_seed(0)
    std = torch.rand(4000, generator=generator).double() + 0.1
    error = std * torch.randn(4000, generator=generator).double()
    variance, mse = metrics.binned(torch.zeros(4000), std, error, 100)
    bins = {"variance": variance.tolist(), "mse": mse.tolist()}
    for merged in (1, 4, 10):
        expected = metrics.binned_log_ratio(torch.zeros(4000), std, error, 100 * merged)
        assert qm9.log_ratio(bins, merged) == pytest.approx(expected, rel=1e-9)
    assert qm9.log_ratio(bins, 10_000) == pytest.approx(
        abs(math.log10(float(mse.mean() / variance.mean())))
    )


def test_what_is_compared_in_words_follows_the_numbers() -> None:
    score = {name: [0.1, 0.01] for name in (*pages.COLUMNS, "spearman")}
    ways = {name: {"scores": score} for name in pages.LABELS}
    for difference, word in (
        ([0.05, 0.01], "is above"),
        ([0.0, 0.01], "does not clearly differ"),
    ):
        found = {"calibrations": ways, "differences": {"nll": {"binned_log_ratio": difference}}}
        assert word in pages.closing(found)


def test_a_missing_package_is_named_with_its_extra(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "featomic", None)
    missing = EXPERIMENTS["qm9"].missing
    monkeypatch.setattr(
        "experiments.frame.catalogue.find_spec", lambda name: name != "featomic" or None
    )
    assert 'needs featomic. Install: pip install "rigidities[chemistry]"' in str(missing())


def test_the_set_is_read_before_parts_are_named_by_its_checksum(monkeypatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(qm9, "read", lambda: order.append("read"))

    def stop(*args: object, **options: object) -> None:
        order.append("results")
        raise KeyboardInterrupt

    monkeypatch.setattr(qm9, "results", stop)
    with pytest.raises(KeyboardInterrupt):
        qm9.run(quick=True, seed=0)
    assert order == ["read", "results"]


def test_beginning_anew_forgets_trained_nets_too(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = nets.file(0, 0, 300, [1, 1, 1])
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"weights")
    jobs.forget("qm9")
    assert not kept.exists()


def test_ratios_that_differ_between_sizes_contradict_the_paper() -> None:
    rows = [
        {"size": size, "molecules": 50, "rmse": ratio, "bar": 1.0, "ratio": ratio}
        for size, ratio in ((8, 2.5), (18, 1.0), (29, 0.25))
    ]
    said = novelty_page.by_size(rows)
    assert "factor of 10.0" in said and novelty_page.DIFFERS in said
    assert novelty_page.AGREES in novelty_page.by_size([rows[1], rows[1]])


def test_parts_have_names_of_their_own_and_whole_sizes() -> None:
    parts = qm9.jobs(quick=False, seed=0)
    assert len({part.name for part in parts}) == len(parts) == 5 + 2 + 9 + 3
    first = next(part for part in parts if part.name == "net 0")
    assert (first.arguments["train"], first.arguments["valid"]) == (10_000, 10_000)
    assert first.arguments["epochs"] == 300 and first.arguments["molecules"] is None
