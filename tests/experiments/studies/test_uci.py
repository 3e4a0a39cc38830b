"""The benchmark's table: rows, units, pairs, the paper's numbers beside ours, and the page."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.baselines.mc_dropout import Predicted
from experiments.data.benchmark import OFFICIAL, RANDOM, standardised
from experiments.data.uci import Rows
from experiments.judging.predictive import summary
from experiments.studies.uci import page as pages
from experiments.studies.uci import rivals, summaries, work
from experiments.studies.uci import run as experiment
from experiments.training.protocol import Protocol
from experiments.training.stack import Stack

from experiments import __main__ as command
from experiments.baselines import laplace, published
from experiments.data import benchmark as samples
from experiments.data import files, uci
from experiments.frame import catalogue
from experiments.training import kept
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
    assert samples.copied(rows, split).tolist() == [True, True, False, False]
    rows.x[split.test[3]], rows.y[split.test[3]] = rows.x[split.valid[0]], rows.y[split.valid[0]]
    assert samples.copied(rows, split).tolist() == [True, True, False, True]


def test_the_page_says_which_sets_have_no_published_lists() -> None:
    known, drawn = ({"settings": {"published_lists": yes}} for yes in (True, False))
    assert pages._lists({"yacht": known}) == "the test lists of the published splits"
    mixed = pages._lists({"yacht": known, "wine": drawn})
    assert "some sets came without them and are split at random" in mixed
    assert mixed.endswith("to them: wine)")
    assert "yacht" not in mixed


def test_the_page_says_which_nets_it_trained() -> None:
    def one(official: bool, random: bool) -> dict[str, Any]:
        return {"committed": {"official": official, "five": official, "random": random}}

    whole, drawn, fresh = one(True, True), one(True, False), one(False, False)
    here = "They come with the project (`experiments/nets/`)"
    assert pages._trainer({"yacht": whole}) == f"{here}."
    assert pages._trainer({"yacht": fresh}) == "This run trained them."
    said = pages._trainer({"yacht": whole, "wine": drawn})
    assert said == f"{here}, except those of the random splits of wine, which this run trained."
    assert "except those of year, which" in pages._trainer(
        {"yacht": whole, "year": one(False, True)}
    )


# --- scores --------------------------------------------------------------------------------------


def asked(**others: Any) -> dict[str, Any]:
    return {"splits": 2, "seed": 0, "epochs": 4, "nets": "", "drawing": OFFICIAL, **others}


@cache
def last_layers(splits: int) -> dict[str, Any]:
    return work.last_layers("yacht", **asked(splits=splits))


def test_the_nets_error_bars_share_one_mean(folder: Path) -> None:
    found = last_layers(2)
    common = {key: value for key, value in asked().items() if key != "drawing"}
    methods = dict(found["methods"])
    for method in ("constant", "variance_head", "boosted"):
        methods |= work.other_bars("yacht", method=method, **common)["methods"]
    same = {"llpr", "best", "constant", "floor_t", "variance_head"}
    assert set(methods) == {*same, "best_refitted", "boosted"}
    rmse = {method: [one["all"]["rmse"] for one in splits] for method, splits in methods.items()}
    for method in same:
        assert rmse[method] == pytest.approx(rmse["llpr"], rel=1e-5)
    for other in ("best_refitted", "boosted"):
        assert rmse[other] != pytest.approx(rmse["llpr"], rel=1e-5)
    nll = {m: one[0]["all"]["nll"] for m, one in methods.items() if m != "boosted"}
    assert len({nll[method] for method in ("llpr", "best", "best_refitted", "constant")}) == 4
    assert "nll" not in methods["boosted"][0]["all"] and "cell" not in methods["llpr"][0]["all"]
    assert not found["committed"]
    assert all(1 <= epoch <= 4 for epoch in found["epoch"]) and len(found["epoch"]) == 2


@pytest.mark.slow
def test_a_split_is_judged_the_same_alone_or_in_company(folder: Path) -> None:
    one, two = map(last_layers, (1, 2))
    alone, beside = (found["methods"]["llpr"][0]["all"]["nll"] for found in (one, two))
    assert alone == pytest.approx(beside, rel=1e-4)


def test_random_splits_have_the_papers_bars_alone(folder: Path) -> None:
    drawn = work.last_layers("yacht", **asked(drawing=RANDOM))
    assert set(drawn["methods"]) == {"llpr_random"}


def test_five_nets_are_one_model(folder: Path) -> None:
    found = work.mean_of_five("yacht", splits=2, seed=0, epochs=4, nets="")
    (splits,) = found["methods"].values()
    stacks = [kept.nets("uci", "yacht", m, count=2, epochs=4).stack for m in range(5)]
    for k, split in enumerate(work.split_rows("yacht", 2, OFFICIAL, 0)):
        with torch.no_grad():
            mean = torch.stack([one.module(k)(split.test[0]) for one in stacks]).mean(0)
        error = float((mean - split.test[1]).square().mean().sqrt()) * split.unit
        assert splits[k]["all"]["rmse"] == pytest.approx(error, rel=1e-5)


@pytest.mark.skipif(not laplace.installed(), reason=f"needs laplace-torch: {laplace.REMEDY}")
def test_laplace_joins_where_it_is_installed(folder: Path) -> None:
    common: dict[str, Any] = {"splits": 1, "seed": 0, "epochs": 4, "nets": ""}
    (found, flat) = (
        work.other_bars("yacht", method=method, **common)["methods"][method][0]["all"]
        for method in ("laplace", "constant")
    )
    assert found["rmse"] == pytest.approx(flat["rmse"], rel=1e-5)
    assert math.isfinite(found["nll"]) and found["nll"] != flat["nll"]


@pytest.mark.slow
def test_targets_on_a_grid_are_judged_by_cells(folder: Path, monkeypatch) -> None:
    monkeypatch.setitem(samples.STEPS, "yacht", 0.5)
    split = next(work.split_rows("yacht", 1, OFFICIAL, 0))
    assert split.step == pytest.approx(0.5 / split.unit)
    found = work.last_layers("yacht", **asked(splits=1))["methods"]
    assert all("cell" in splits[0]["all"] for splits in found.values())


def test_the_constant_bar_is_the_error_on_the_validation_rows() -> None:
    stack = Stack.drawn([0], (2, 4, 1))
    net = stack.module(0)
    generator = torch.Generator().manual_seed(0)
    rows = [
        (torch.randn(n, 2, generator=generator), torch.randn(n, 1, generator=generator))
        for n in (60, 30, 30)
    ]
    split = work.SplitRows(*rows, unit=1.0, step=None, copied=torch.zeros(30, dtype=torch.bool))
    found = work.constant(stack, split)
    with torch.no_grad():
        error = float((net(rows[1][0]) - rows[1][1]).square().mean().sqrt())
        distribution = torch.distributions.Normal(net(rows[2][0]), error)
        expected = -float(distribution.log_prob(rows[2][1]).mean())
    assert found.chosen["std"] == pytest.approx(error, rel=1e-5)
    assert summary(found.rows)["nll"] == pytest.approx(expected, rel=1e-5)


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

    monkeypatch.setattr(rivals.mc_dropout, "predicted", predicted)
    precisions = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    protocol = Protocol((5,), epochs=1, batch=64)
    probability, precision = rivals.likeliest(inner, precisions, protocol, 0, 12)
    assert probability.tolist() == [0.01, 0.1]
    assert precision.tolist() == [3.0, 1.0]
    assert seen["probability"].tolist() == [0.005, 0.01, 0.05, 0.1] * 2
    assert seen["rows"] == (8, 40, 6) and seen["passes"] == 12
    expected = precisions * inner.unit[1] ** 2
    torch.testing.assert_close(seen["grid"][4], expected)


def test_the_rivals_give_one_summary_a_split(folder: Path) -> None:
    common: dict[str, Any] = {"first": 0, "splits": 2, "seed": 0, "epochs": 30}
    dropped = rivals.dropout("energy", selecting=5, passes=20, **common)
    own = rivals.ensembles("energy", method="deep_ensemble", **common)
    for part in (dropped, own):
        scores = rivals.split_scores("energy", [part], 0)
        assert len(scores) == 2
        assert all(0.1 < one["all"]["rmse"] < 2 for one in scores)  # the target's spread is 1.2
        assert {"nll", "crps", "coverage_90", "interval_score"} <= set(scores[0]["all"])
    assert set(dropped["chosen"]["precision"].tolist()) <= set(rivals.PRECISIONS["energy"])
    assert set(rivals.PRECISIONS) == set(uci.SETS)


def test_ensembles_of_a_later_split_do_not_depend_on_the_earlier(folder: Path) -> None:
    common: dict[str, Any] = {"method": "deep_ensemble", "seed": 0, "epochs": 3}
    whole = rivals.ensembles("energy", first=0, splits=3, **common)
    last = rivals.ensembles("energy", first=2, splits=1, **common)
    torch.testing.assert_close(last["mean"][0], whole["mean"][2], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(last["std"][0], whole["std"][2], rtol=1e-3, atol=1e-4)
    parts = [rivals.ensembles("energy", first=k, splits=1, **common) for k in range(3)]
    joined, direct = (rivals.split_scores("energy", some, 0) for some in (parts, [whole]))
    for a, b in zip(joined, direct, strict=True):
        assert a["all"]["nll"] == pytest.approx(b["all"]["nll"], rel=1e-2)


def test_the_rivals_follow_the_unit_of_the_target(folder: Path, monkeypatch) -> None:
    """Targets in a unit a hundred times smaller: lengths times 100, NLL plus log 100."""
    rows = uci.read("energy")
    monkeypatch.setitem(samples.STEPS, "energy", 0.1)
    found = []
    for factor in (1.0, 100.0):
        monkeypatch.setattr(uci, "read", lambda name, f=factor: replace(rows, y=f * rows.y))
        monkeypatch.setitem(rivals.PRECISIONS, "energy", (0.5 / factor**2, 1 / factor**2))
        monkeypatch.setitem(samples.STEPS, "energy", 0.1 * factor)
        common: dict[str, Any] = {"first": 0, "splits": 1, "seed": 0, "epochs": 5}
        dropped = rivals.dropout("energy", selecting=5, passes=20, **common)
        own = rivals.ensembles("energy", method="deep_ensemble", **common)
        found.append(
            [rivals.split_scores("energy", [part], 0)[0]["all"] for part in (dropped, own)]
        )
    for small_unit, large_unit in zip(*found, strict=True):
        for length in ("rmse", "crps", "interval_score"):
            assert large_unit[length] == pytest.approx(100 * small_unit[length], rel=1e-3)
        assert large_unit["nll"] - small_unit["nll"] == pytest.approx(math.log(100), rel=1e-2)
        assert large_unit["cell"] == pytest.approx(small_unit["cell"], rel=1e-2)
        assert large_unit["coverage_90"] == small_unit["coverage_90"]


# --- the entries ---------------------------------------------------------------------------------


def scores_of(rmse: list[float], nll: list[float], **chosen: list[Any]) -> list[dict[str, Any]]:
    """One summary a split; "new" rows are a little worse."""
    made = []
    for k, (error, value) in enumerate(zip(rmse, nll, strict=True)):
        one = {"rmse": error, "nll": value, "crps": error / 2, "coverage_90": 0.9}
        one |= {"interval_score": 4 * error}
        one |= {name: [0.9, 0.8, 0.9, 1.0, 0.7 + 0.1 * k] for name in summaries.FIFTHS}
        told = {name: values[k] for name, values in chosen.items()}
        made.append({"all": one, "new": one | {"nll": value + 0.1 * k}, "chosen": told})
    return made


def parts_of(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    rmse, nll = [1.0, 1.5, 2.0], [0.5, 0.7, 0.9]
    base = scores_of(rmse, nll)
    better = scores_of(rmse, [0.4, 0.6, 0.7], ridge=[1.0, 2.0, 3.0])
    rival = scores_of([0.5, 3.0, 2.0], [0.6, 0.9, 1.2])
    monkeypatch.setattr(rivals, "split_scores", lambda name, parts, seed: rival)
    about = {"committed": True, "seconds": 1.0}
    methods = {"llpr": base, "best": better, "constant": base}
    dropped = [{"chosen": {"precision": [k]}, "seconds": 1.0} for k in (1, 2, 3)]
    return {
        "official": [{"methods": methods, "epoch": [3, 4, 5], **about}],
        "five": [{"methods": {"best_of_five": better}, **about, "committed": False}],
        "mc_dropout": dropped,
        "random": [{"methods": {"llpr_random": base}, **about}],
    }


@pytest.fixture
def found_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    listed = {"train": 90, "test": 10}
    about = {"splits": 3, "rows": 40, "listed": listed}
    return lambda name="yacht": summaries.entry(
        parts_of(monkeypatch), name=name, seed=0, about=about
    )


def test_differences_are_paired_split_by_split(found_of) -> None:
    found = found_of()
    assert found["paired"]["best - llpr"]["rmse"] == [0, 0]
    mean, error = found["paired"]["best - mc_dropout"]["nll"]
    differences = np.array([0.4 - 0.6, 0.6 - 0.9, 0.7 - 1.2])
    assert mean == pytest.approx(differences.mean())
    assert error == pytest.approx(differences.std(ddof=1) * math.sqrt(1 / 3 + 1 / 9))
    new = found["paired_new"]["best - mc_dropout"]["nll"]
    assert new == pytest.approx([mean, error])  # all became worse alike
    assert found["new_rows"]["best"]["nll"][0] == pytest.approx(found["best"]["nll"][0] + 0.1)
    assert found["ratio"]["mc_dropout / llpr"]["rmse"][0] == pytest.approx((0.5 + 2 + 1) / 3)
    assert found["ratio"]["best / llpr"]["crps"] == [1, 0]
    assert "laplace - llpr" not in found["paired"]
    assert found["llpr"]["nll"] == pytest.approx([0.7, 0.2 / math.sqrt(3)])
    assert found["llpr"]["fifths_of_bar"] == pytest.approx([0.9, 0.8, 0.9, 1.0, 0.8])
    assert found["chosen"]["best"] == {"ridge": [1.0, 2.0, 3.0]}
    assert found["chosen"]["mc_dropout"] == {"precision": [1, 2, 3]}
    assert found["seconds"]["mc_dropout"] == 3
    assert found["committed"] == {"official": True, "five": False, "random": True}


def test_the_comparison_with_the_paper_knows_all_three_errors() -> None:
    found = summaries.compared([1.0, 0.03], (1.1, 0.04), 20)
    rounding = 0.01**2 / 12
    assert found["difference"] == pytest.approx(-0.1)
    assert found["sigmas"] == pytest.approx(-0.1 / math.sqrt(0.03**2 + 0.04**2 + rounding))
    assert found["strict"] == pytest.approx(-0.1 / math.sqrt(0.03**2 + 0.02**2 + rounding))
    five = summaries.compared([1.0, 0.03], (1.1, 0.04), 5)
    assert five["strict"] == five["sigmas"]
    assert math.isnan(summaries.compared([8.9, 0.1], (8.91, None), 1)["sigmas"])


def test_agreement_is_counted_where_it_can_be(found_of) -> None:
    found = {"yacht": found_of(), "year": found_of("year")}
    # yacht: RMSE 1.5 +- 0.289 for 1.19 +- 0.16; NLL 0.7 +- 0.115 for 1.58 +- 0.20.
    assert pages.agreement(found, "llpr") == (1, 2)
    assert [(name, metric) for name, metric, _ in pages.disagreements(found, "llpr")] == [
        ("yacht", "nll")
    ]
    assert "1 of the paper's 2 comparable numbers" in pages.reproduced(found)
    assert "outside: yacht NLL by -3.8" in pages.reproduced(found)
    assert "naval" not in pages.reproduced(found)
    assert "16 inputs alone" in pages.reproduced({"naval": found_of("naval")})


def test_the_counts_on_the_page_follow_the_differences(found_of) -> None:
    text = pages.comparison_counts({"yacht": found_of()})
    assert "best against LLPR: better on 1, worse on 0, undecided on 0" in text
    assert "best against MC dropout: better on 1, worse on 0, undecided on 0" in text
    assert "constant against LLPR: better on 0, worse on 0, undecided on 1" in text
    assert "Laplace" not in text


def test_copies_and_what_is_left_out_are_told(found_of) -> None:
    settings = {"mc_dropout": {"steps": 12}, "published_lists": True, "epochs": 400}
    found = {
        name: found_of() | {"settings": settings, "copies": {"valid": n, "test": n}}
        for name, n in (("wine", 0.245), ("yacht", 0.0))
    }
    text = " ".join(pages.opening(found))
    assert "24.5 % of the test rows and 24.5 % of the validation rows in wine" in text
    assert "rows in yacht" not in text
    assert "This run trained them" in text  # five nets of each set
    without = " ".join(pages.opening({"yacht": found["yacht"]}))
    assert "copies" not in without


# --- the run -------------------------------------------------------------------------------------


def test_the_worst_of_the_default_is_shown(found_of) -> None:
    found = {"yacht": found_of(), "wine": found_of("wine")}
    found["wine"]["best"]["fifths_of_prediction"][2] = 0.5
    text = pages.failures(found)
    assert "least in fifth 3 by prediction on wine, with 50 %" in text
    assert "loses most" not in text
    found["wine"]["paired"]["best - mc_dropout"]["nll"] = [0.3, 0.1]
    assert "loses most to MC dropout on wine, by 0.30" in pages.failures(found)


def test_the_longest_parts_begin_first(folder: Path) -> None:
    sizes = experiment.Sizes()
    ordered = [
        *experiment.own_jobs("protein", 5, sizes, 0),
        *experiment.rival_jobs("protein", 45_730, 5, sizes, 0),
    ]
    effort = {job.name: experiment.effort(job, 45_730) for job in ordered}
    assert max(effort, key=effort.__getitem__) == "protein, official"
    named = {job.name.split(", ")[1] for job in ordered}
    assert named | {"laplace", "boosted"} == set(experiment.RELATIVE_TIME)
    assert all(json.dumps(dict(job.arguments)) for job in ordered)


def test_parts_of_the_rivals_cover_every_split_once() -> None:
    for rows, splits in ((45_730, 5), (9_568, 20), (300, 20)):
        jobs = experiment.rival_jobs("yacht", rows, splits, experiment.Sizes(), 0)
        for method in summaries.BASELINES:
            own = [job.arguments for job in jobs if job.name.split(", ")[1] == method]
            covered = [one["first"] + k for one in own for k in range(one["splits"])]
            assert covered == list(range(splits))
            assert all(one["splits"] == 1 or one["splits"] * rows <= experiment.MOST for one in own)


@pytest.mark.slow
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
    for method in set(summaries.METHODS) - {"laplace"}:
        per_split = one["per_split"][method]
        for metric in set(summaries.SINGLE) & set(per_split):
            assert one[method][metric][0] == pytest.approx(np.mean(per_split[metric]), rel=1e-3)
    assert "cell" in numbers["naval"]["best"] and "cell" not in one["best"]
    assert one["published"]["llpr"] == {k: list(v) for k, v in LLPR_OF_YACHT.items()}
    difference = np.subtract(one["per_split"]["best"]["nll"], one["per_split"]["llpr"]["nll"])
    assert one["paired"]["best - llpr"]["nll"][0] == pytest.approx(difference.mean(), abs=2e-3)
    assert set(one["seconds"]) | {"laplace"} == set(experiment.RELATIVE_TIME)
    assert one["settings"]["mc_dropout"]["steps"] == 2 * 4
    page = (tmp_path / "uci.md").read_text(encoding="utf-8")
    assert unsupported(page, numbers) == []
    page = " ".join(page.split())
    assert "few steps (8 for yacht)" in page
    assert ("pip install laplace-torch" in page) is not laplace.installed()
    assert "*year* is left out" in page
    assert "This run trained them" in page
    assert "Where it fails" in page


LLPR_OF_YACHT = published.TABLE["yacht"]["llpr"]
