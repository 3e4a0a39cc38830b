"""The benchmark's table: rows, units, pairs, the paper's numbers beside ours, and the page."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.baselines.mc_dropout import Predicted
from experiments.data.uci import Rows
from experiments.studies.uci import entries, samples, work
from experiments.studies.uci import page as pages
from experiments.studies.uci import run as experiment
from experiments.data.benchmark import OFFICIAL, RANDOM, standardised
from experiments.training.protocol import Protocol
from torch import nn

from experiments import __main__ as command
from experiments.baselines import laplace, published
from experiments.data import files, uci
from experiments.frame import catalogue
from tests.support import synthetic_data
from tests.support.numbers_on_pages import unsupported


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = synthetic_data.write(tmp_path_factory.mktemp("data"))
    for path in folder.glob("*.npz"):
        files.seal(path)
    return folder


@pytest.fixture
def folder(written: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIGIDITIES_DATA", str(written))
    monkeypatch.delenv("RIGIDITIES_DEVICE", raising=False)
    return written


def small(name: str = "yacht", *, published_lists: bool = True) -> Rows:
    rng = np.random.default_rng(0)
    x = np.concatenate([5 + 2 * rng.normal(size=(40, 2)), np.full((40, 1), 0.1 + 0.2)], 1)
    order = np.stack([rng.permutation(40) for _ in range(3)])
    lists = (order[:, :36], order[:, 36:]) if published_lists else (None, None)
    return Rows(name, x, 100 + 7 * x[:, 0], ("a", "b", "c"), "y", *lists)


# --- rows ----------------------------------------------------------------------------------------


def test_rows_are_standardised_by_the_training_rows_of_their_own_split() -> None:
    rows = small()
    splits = samples.divisions(rows, 3, OFFICIAL, 0)
    train, test = samples.training_lists(splits), samples.test_lists(splits)
    found = standardised(rows, train, test)
    for k in range(3):
        x, y = rows.x[train[k]], rows.y[train[k]]
        expected = (rows.x[test[k], :2] - x[:, :2].mean(0)) / x[:, :2].std(0)
        torch.testing.assert_close(
            found.parts[1][0][k, :, :2], torch.from_numpy(expected).float(), rtol=1e-5, atol=1e-6
        )
        back = found.parts[1][1][k, :, 0].double() * found.unit[k] + y.mean()
        torch.testing.assert_close(back, torch.from_numpy(rows.y[test[k]]), rtol=1e-6, atol=1e-5)
        assert float(found.unit[k]) == pytest.approx(y.std())
    assert len({round(float(unit), 6) for unit in found.unit}) == 3


def test_a_constant_column_stays_small() -> None:
    """0.1 + 0.2 has a mean that rounds; its spread must not be taken for one."""
    rows = small()
    splits = samples.divisions(rows, 3, OFFICIAL, 0)
    found = standardised(rows, samples.training_lists(splits), samples.test_lists(splits))
    assert float(found.parts[0][0][..., 2].abs().max()) < 1e-6


def test_official_splits_keep_the_published_order_and_the_test_rows() -> None:
    rows = small()
    (first, *_) = splits = samples.divisions(rows, 3, OFFICIAL, 5)
    assert (len(first.train), len(first.valid), len(first.test)) == (32, 4, 4)
    assert np.array_equal(samples.training_lists(splits), rows.train_index)
    assert np.array_equal(samples.test_lists(splits), rows.test_index)
    drawn = samples.divisions(rows, 3, RANDOM, 5)
    assert not np.array_equal(samples.test_lists(drawn), rows.test_index)
    assert len(drawn[0].train) == len(first.train)


def test_a_set_without_published_lists_has_random_ones() -> None:
    rows = small(published_lists=False)
    official, random = (samples.divisions(rows, 2, how, 5) for how in (OFFICIAL, RANDOM))
    assert not np.array_equal(samples.test_lists(official), samples.test_lists(random))
    again = samples.divisions(rows, 2, OFFICIAL, 5)
    assert np.array_equal(samples.test_lists(official), samples.test_lists(again))


def test_copies_of_training_rows_are_counted() -> None:
    rows = small()
    (split,) = samples.divisions(rows, 1, OFFICIAL, 0)
    assert samples.copies(rows, [split]) == {"valid": 0.0, "test": 0.0}
    model, copied = split.train[0], split.test[:2]
    rows.x[copied], rows.y[copied] = rows.x[model], rows.y[model]
    rows.x[split.test[2]] = rows.x[model]  # another target: no copy
    found = samples.copies(rows, [split])
    assert found == {"valid": 0.0, "test": pytest.approx(2 / len(split.test))}


def test_the_page_says_which_sets_have_no_published_lists() -> None:
    known, drawn = ({"settings": {"published_lists": yes}} for yes in (True, False))
    assert pages._lists({"yacht": known}) == "the test lists of the published splits"
    mixed = pages._lists({"yacht": known, "wine": drawn})
    assert "those of wine came without them and are split at random" in mixed
    assert "yacht" not in mixed


# --- scores --------------------------------------------------------------------------------------


def test_scores_are_in_the_unit_of_the_target() -> None:
    mean, std, y = torch.tensor([[0.0, 1.0], [0.5, 2.0], [1.0, -1.0]]).double()
    unit = 7.0
    found = work.in_unit(mean, std, y[:, None], unit, {"ridge": 1.0})
    law = torch.distributions.Normal(unit * mean, unit * std)
    assert found["nll"] == pytest.approx(-float(law.log_prob(unit * y).mean()))
    assert found["rmse"] == pytest.approx(unit * math.sqrt((1 + 4) / 2))
    assert found["ridge"] == 1


def test_the_nets_error_bars_share_one_mean(folder: Path) -> None:
    found = work.last_layers("yacht", splits=2, drawing=OFFICIAL, seed=0, epochs=4, laplace=False)
    methods = found["methods"]
    assert set(methods) == {"llpr", "best", "constant"}
    assert methods["llpr"]["rmse"] == methods["best"]["rmse"] == methods["constant"]["rmse"]
    assert methods["llpr"]["nll"] != methods["constant"]["nll"]
    assert methods["llpr"]["noise_variance"] == [0, 0]
    assert all(1 <= epoch <= 4 for epoch in found["epoch"]) and len(found["epoch"]) == 2
    one = work.last_layers("yacht", splits=1, drawing=OFFICIAL, seed=0, epochs=4, laplace=False)
    assert one["methods"]["llpr"]["nll"][0] == pytest.approx(methods["llpr"]["nll"][0], rel=1e-4)
    drawn = work.last_layers("yacht", splits=2, drawing=RANDOM, seed=0, epochs=4, laplace=False)
    assert set(drawn["methods"]) == {"llpr_random"}


@pytest.mark.skipif(not laplace.installed(), reason=f"needs laplace-torch: {laplace.REMEDY}")
def test_laplace_joins_where_it_is_installed(folder: Path) -> None:
    found = work.last_layers("yacht", splits=1, drawing=OFFICIAL, seed=0, epochs=4, laplace=True)
    methods = found["methods"]
    assert methods["laplace"]["rmse"] == pytest.approx(methods["llpr"]["rmse"], rel=1e-5)
    assert math.isfinite(methods["laplace"]["nll"][0])


def test_the_constant_bar_is_the_error_on_the_validation_rows() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    generator = torch.Generator().manual_seed(0)
    parts = [
        (torch.randn(n, 2, generator=generator), torch.randn(n, 1, generator=generator))
        for n in (60, 30, 30)
    ]
    found = dict(work.judged(net.eval(), parts, 1.0, every=True, laplace=False))
    with torch.no_grad():
        error = float((net(parts[1][0]) - parts[1][1]).square().mean().sqrt())
        law = torch.distributions.Normal(net(parts[2][0]), error)
        expected = -float(law.log_prob(parts[2][1]).mean())
    assert found["constant"]["std"] == pytest.approx(error, rel=1e-5)
    assert found["constant"]["nll"] == pytest.approx(expected, rel=1e-5)


def test_dropout_chooses_the_likeliest_pair_of_each_split(folder: Path, monkeypatch) -> None:
    """The likelihoods are handed in: one split prefers the third tau of the second probability."""
    rows = uci.read("yacht")
    lists = samples.training_lists(samples.divisions(rows, 2, OFFICIAL, 0))
    inner = standardised(rows, lists[:, :140], lists[:, 140:])
    seen: dict[str, Any] = {}

    def predicted(stack, part, probability, grid, passes, seed):
        seen.update(probability=probability, grid=grid, rows=part[0].shape, passes=passes)
        likelihood = torch.zeros(8, 3)
        likelihood[1, 2], likelihood[7, 0] = 1.0, 2.0
        return Predicted(torch.zeros(8, 1), likelihood)

    monkeypatch.setattr(work.mc_dropout, "predicted", predicted)
    precisions = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    protocol = Protocol((5,), epochs=1, batch=64)
    probability, precision = work.chosen(inner, precisions, protocol, 0, 12)
    assert probability.tolist() == [0.01, 0.1]
    assert precision.tolist() == [3.0, 1.0]
    assert seen["probability"].tolist() == [0.005, 0.01, 0.05, 0.1] * 2
    assert seen["rows"] == (8, 40, 6) and seen["passes"] == 12
    expected = precisions * inner.unit[1] ** 2
    torch.testing.assert_close(seen["grid"][4], expected)


def test_the_baselines_give_one_score_a_split(folder: Path) -> None:
    common: dict[str, Any] = {"splits": 2, "seed": 0}
    dropped = work.dropout("energy", epochs=30, selecting=5, passes=20, **common)
    scores = dropped["methods"]["mc_dropout"]
    own = work.ensembles("energy", method="deep_ensemble", epochs=30, **common)["methods"]
    for one in (scores, own["deep_ensemble"]):
        assert len(one["rmse"]) == len(one["nll"]) == 2
        assert all(0.1 < value < 2 for value in one["rmse"])  # the target's spread is 1.2
    assert set(scores["precision"]) <= set(work.PRECISIONS["energy"])
    assert set(work.PRECISIONS) == set(uci.SETS)


def test_the_baselines_follow_the_unit_of_the_target(folder: Path, monkeypatch) -> None:
    """Targets in a unit a hundred times smaller: RMSE times 100, NLL plus log 100."""
    rows = uci.read("energy")
    found = []
    for factor in (1.0, 100.0):
        monkeypatch.setattr(uci, "read", lambda name, f=factor: replace(rows, y=f * rows.y))
        monkeypatch.setitem(work.PRECISIONS, "energy", (0.5 / factor**2, 1 / factor**2))
        common: dict[str, Any] = {"splits": 2, "seed": 0, "epochs": 5}
        dropped = work.dropout("energy", selecting=5, passes=20, **common)["methods"]
        own = work.ensembles("energy", method="deep_ensemble", **common)["methods"]
        found.append([dropped["mc_dropout"], own["deep_ensemble"]])
    for small_unit, large_unit in zip(*found, strict=True):
        ratio = np.divide(large_unit["rmse"], small_unit["rmse"])
        shift = np.subtract(large_unit["nll"], small_unit["nll"])
        assert ratio == pytest.approx(100, rel=1e-3)
        assert shift == pytest.approx(math.log(100), rel=1e-2)


# --- the entries ---------------------------------------------------------------------------------


def parts_of(shift: float = 0.0) -> dict[str, dict[str, Any]]:
    base = {"rmse": [1.0, 1.5, 2.0], "nll": [0.5, 0.7, 0.9]}
    better = {"rmse": base["rmse"], "nll": [0.4, 0.6, 0.7], "noise": ["none", "none", "bayes"]}
    rival = {"rmse": [0.5, 3.0, 2.0], "nll": [0.6, 0.9, 1.2 + shift], "precision": [1, 1, 1]}
    return {
        "official": {
            "methods": {"llpr": base, "best": better, "constant": base},
            "epoch": [3, 4, 5],
            "seconds": 1.0,
        },
        "mc_dropout": {"methods": {"mc_dropout": rival}, "seconds": 2.0},
        "random": {"methods": {"llpr_random": base}, "seconds": 1.0},
    }


def found_of(name: str = "yacht") -> dict[str, Any]:
    return entries.entry(parts_of(), name=name, splits=3, rows=40)


def test_differences_are_paired_split_by_split() -> None:
    found = found_of()
    assert found["paired"]["best - llpr"]["rmse"] == [0, 0]
    mean, error = found["paired"]["best - mc_dropout"]["nll"]
    differences = np.array([0.4 - 0.6, 0.6 - 0.9, 0.7 - 1.2])
    assert mean == pytest.approx(differences.mean())
    assert error == pytest.approx(differences.std(ddof=1) / math.sqrt(3))
    assert found["ratio"]["mc_dropout / llpr"][0] == pytest.approx((0.5 + 2 + 1) / 3)
    assert "laplace - llpr" not in found["paired"]
    assert found["llpr"]["nll"] == pytest.approx([0.7, 0.2 / math.sqrt(3)])
    assert found["chosen"]["best"] == {"noise": ["none", "none", "bayes"]}
    assert found["chosen"]["mc_dropout"] == {"precision": 1}


def test_the_comparison_with_the_paper_knows_all_three_errors() -> None:
    found = entries.compared([1.0, 0.03], (1.1, 0.04), 20)
    rounding = 0.01**2 / 12
    assert found["difference"] == pytest.approx(-0.1)
    assert found["sigmas"] == pytest.approx(-0.1 / math.sqrt(0.03**2 + 0.04**2 + rounding))
    assert found["strict"] == pytest.approx(-0.1 / math.sqrt(0.03**2 + 0.02**2 + rounding))
    five = entries.compared([1.0, 0.03], (1.1, 0.04), 5)
    assert five["strict"] == five["sigmas"]
    assert math.isnan(entries.compared([8.9, 0.1], (8.91, None), 1)["sigmas"])


def test_agreement_is_counted_where_it_can_be() -> None:
    found = {"yacht": found_of(), "year": found_of("year")}
    # yacht: RMSE 1.5 +- 0.289 for 1.19 +- 0.16; NLL 0.7 +- 0.115 for 1.58 +- 0.20.
    assert pages.within(found, "llpr") == (1, 2)
    assert [(name, metric) for name, metric, _ in pages.beyond(found, "llpr")] == [("yacht", "nll")]
    assert "1 of the paper's 2 comparable numbers" in pages.reproduced(found)
    assert "outside: yacht NLL by -3.8" in pages.reproduced(found)
    assert "naval" not in pages.reproduced(found)
    assert "16 inputs alone" in pages.reproduced({"naval": found_of("naval")})


def test_the_counts_on_the_page_follow_the_differences() -> None:
    text = pages.compared({"yacht": found_of()})
    assert "best against LLPR: better on 1, worse on 0, undecided on 0" in text
    assert "best against MC dropout: better on 1, worse on 0, undecided on 0" in text
    assert "constant against LLPR: better on 0, worse on 0, undecided on 1" in text
    assert "Laplace" not in text


def test_copies_and_what_is_left_out_are_told() -> None:
    settings = {"mc_dropout": {"steps": 12}, "published_lists": True}
    found = {
        name: found_of() | {"settings": settings, "copies": {"valid": n, "test": n}}
        for name, n in (("wine", 0.245), ("yacht", 0.0))
    }
    text = " ".join(pages.opening(found, 400))
    assert "wine 24.5 % of the test rows and 24.5 % of the validation rows equal" in text
    assert "yacht 0" not in text
    assert all(words in " ".join(text.split()) for words in pages.WORDS.values())
    without = " ".join(pages.opening({"yacht": found["yacht"]}, 400))
    assert "copies" not in without


# --- the run -------------------------------------------------------------------------------------


def test_the_longest_parts_begin_first(folder: Path) -> None:
    ordered = experiment.parts("protein", 5, experiment.Sizes(), 0, with_laplace=False)
    work = {job.name: experiment._work(job, 45_730) for job in ordered}
    assert max(work, key=work.__getitem__) == "protein, deep_ensemble_400"
    assert {job.name.split(", ")[1] for job in ordered} == set(experiment.WORK)
    assert all(json.dumps(dict(job.arguments)) for job in ordered)


def test_a_quick_run_writes_the_table(folder: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        experiment,
        "QUICK",
        experiment.Sizes(("yacht", "naval"), 2, epochs=4, own_epochs=2, selecting=3, passes=5),
    )
    entry = catalogue.Experiment("uci", "the benchmark", 1)
    monkeypatch.setitem(catalogue.EXPERIMENTS, "uci", entry)
    assert command.main(["uci", "--quick", "--out", str(tmp_path)]) == 0
    numbers = json.loads((tmp_path / "uci.json").read_text())
    assert set(numbers) == {"yacht", "naval"}
    one = numbers["yacht"]
    assert one["splits"] == 2 and one["rows"] == 200 and one["inputs"] == 6
    methods = ["llpr", "best", "constant", "mc_dropout", "deep_ensemble", "deep_ensemble_400"]
    for method in [*methods, "llpr_random"]:
        per_split = one["per_split"][method]
        for metric in ("rmse", "nll"):
            assert one[method][metric][0] == pytest.approx(np.mean(per_split[metric]), rel=1e-6)
    assert one["published"]["llpr"] == {k: list(v) for k, v in LLPR_OF_YACHT.items()}
    difference = np.subtract(one["per_split"]["best"]["nll"], one["per_split"]["llpr"]["nll"])
    assert one["paired"]["best - llpr"]["nll"][0] == pytest.approx(difference.mean(), abs=1e-7)
    assert set(one["seconds"]) == set(experiment.WORK)
    assert one["settings"]["mc_dropout"]["steps"] == 2 * 4
    page = (tmp_path / "uci.md").read_text(encoding="utf-8")
    assert unsupported(page, numbers) == []
    page = " ".join(page.split())
    assert "few steps (8 for yacht)" in page
    assert ("pip install laplace-torch" in page) is not laplace.installed()
    assert "*year* is left out" in page


LLPR_OF_YACHT = published.TABLE["yacht"]["llpr"]
