"""Domains that nets do not see, and the page on what error bars hold there."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.judging.predictive import row_scores, summary
from experiments.studies.outside import page, run, tasks, work
from experiments.training.descent import trained

import rigidities as rg
from experiments import __main__ as command
from experiments.data import domains, uci
from experiments.judging import error_bars
from tests.support.numbers_on_pages import unsupported


def test_domains_leave_out_a_quarter_or_a_cluster() -> None:
    x = np.random.default_rng(0).normal(size=(400, 5))
    x[:, 2] = 7.0  # has no quarter
    x[:, 3] = np.round(3 * x[:, 3])
    found = domains.domains(x, count=4, seed=0)
    assert [one.kind for one in found[:3]] == list(domains.KINDS)
    for domain in found:
        if domain.kind == "principal direction":
            assert int(domain.inside.sum()) == 300
        if domain.kind == "input":
            column = x[:, int(domain.name.split(",")[0].removeprefix("input "))]
            near, far = column[domain.inside], column[~domain.inside]
            assert near.max() < far.min() if "upper" in domain.name else near.min() > far.max()
    assert 0.05 < float((~found[2].inside).mean()) < 0.4


def test_equal_values_lie_on_one_side_of_a_threshold() -> None:
    values = np.repeat([0.0, 1.0, 2.0], [60, 10, 30])
    upper = domains.below_threshold(values, "upper")
    assert upper is not None and int(upper.sum()) == 70
    assert domains.below_threshold(values, "lower") is None  # 60 % or 40 % would be left out


def test_clusters_are_lloyds() -> None:
    rng = np.random.default_rng(1)
    z = np.concatenate([rng.normal(size=(50, 2)), 20 + rng.normal(size=(70, 2))])
    labels = domains.clustered(z, 2, np.random.default_rng(0))
    assert sorted(np.bincount(labels)) == [50, 70]


def test_no_row_from_outside_is_trained_or_calibrated_on(synthetic: Path) -> None:
    divided = domains.drawn("energy", 1, 3)
    rows = uci.read("energy")
    train, valid, test = (part[1] for part in divided.samples.parts)
    assert test.shape[1] > divided.inside > 0
    for k in range(3):
        unit = float(divided.samples.unit[k])
        seen = torch.cat([train[k], valid[k]])[:, 0].double() * unit
        far = test[k, divided.inside :, 0].double() * unit
        assert len(seen) + divided.inside + len(far) <= len(rows.y)
        assert not bool(torch.isclose(seen[:, None], far, rtol=0, atol=1e-6).any())


@pytest.mark.slow
def test_every_form_is_judged_on_both_sides(synthetic: Path) -> None:
    found = work.judged("energy", count=1, seed=5, steps=4)
    assert len(found["nets"]) == 3 * len(work.NETS)
    first = found["nets"][0]
    assert set(first["forms"]) == {*work.FORMS, "constant", "ensemble"} == set(page.LABELS)
    divided = domains.drawn("energy", 1, 5)
    train, valid, (x, y) = divided.samples.parts
    protocol = work.NETS["50 ReLU"].of_length(train[0].shape[1], 4)
    net = trained(
        train, valid, protocol, range(work.FIRST_SEED + 500, work.FIRST_SEED + 503)
    ).best.module(0)
    uq = error_bars.fitted(net, (train[0][0], train[1][0]))
    uq.calibrate((valid[0][0], valid[1][0]), method=rg.Full(guard=False))
    rows = row_scores(uq.predict(x[0]), y[0])
    near = torch.arange(len(y[0])) < divided.inside
    for side, mask in (("inside", near), ("outside", ~near)):
        scores = summary(rows.picked(mask))
        for name in work.KEPT:
            assert first["forms"]["unguarded"][side][name] == pytest.approx(scores[name])


def net(default: float, other: float) -> dict[str, Any]:
    def side(nll: float, held: float) -> dict[str, float]:
        return {"nll": nll, "coverage_90": held, "interval_score": 2 * held, "rmse": 1.0}

    forms = {form: {"inside": side(1.0, 0.9), "outside": side(2.0, other)} for form in page.LABELS}
    forms["default"] = {"inside": side(1.25, 0.9), "outside": side(1.0, default)}
    return {"forms": forms, "auroc": 0.5, "set": "yacht"}


def test_forms_are_compared_net_by_net() -> None:
    found = run.summary([net(0.9, 0.6), net(1.0, 0.8)], "default")
    assert found["nll_inside_change"] == pytest.approx(0.25)
    assert found["coverage_outside"] == pytest.approx(0.95)
    assert found["within"] == pytest.approx(0.5)  # all is too much
    assert found["interval_score"] == pytest.approx((1.5 * 1.25) ** 0.5)


@pytest.mark.slow
def test_a_quick_run_writes_the_page(synthetic: Path, tmp_path, monkeypatch) -> None:
    sizes = run.Sizes(("energy",), 1, 4, ("recurrent",), 1, 4, kind_tasks=1)
    monkeypatch.setattr(run, "QUICK", sizes)
    assert command.main(["outside", "--quick", "--out", str(tmp_path)]) == 0
    numbers = json.loads((tmp_path / "outside.json").read_text())
    text = (tmp_path / "outside.md").read_text(encoding="utf-8")
    assert unsupported(text, numbers) == []
    assert numbers["settings"]["nets"] == 9 and "9 networks were trained" in text
    assert "Conclusion" in text
    assert "Networks of other kinds (1 in all)" in text
    assert len(numbers["each"]) == 9  # the others are not among them


def other_network(*, without: float, held: float) -> dict[str, Any]:
    def scores(nll: float, held: float) -> dict[str, float]:
        return {"nll": nll, "coverage_90": held, "rmse": 1.0}

    return {
        "net": "LSTM",
        "inside": {"without": scores(1.0, 0.9), "with": scores(1.5, 0.92)},
        "outside": {
            "higher level": {"without": scores(3.0, without), "with": scores(2.0, held)},
            "larger amplitude": {"without": scores(5.0, 0.9), "with": scores(1.0, 1.0)},
        },
    }


def test_kinds_of_networks_are_means_over_networks_and_shifts() -> None:
    networks = [other_network(without=0.1, held=0.6), other_network(without=0.3, held=0.8)]
    found = run.kind_summary(networks)
    assert found["nets"] == 2
    assert found["nll_inside_change"] == pytest.approx(0.5)
    assert found["without"]["coverage_outside"] == pytest.approx((0.1 + 0.9 + 0.3 + 0.9) / 4)
    assert found["with"]["coverage_outside"] == pytest.approx((0.6 + 1.0 + 0.8 + 1.0) / 4)
    assert found["with"]["lowest_coverage_outside"] == pytest.approx(0.6)
    assert found["with"]["coverage_inside"] == pytest.approx(0.92)


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_rows_outside_are_other_rows_with_other_truths(kind: str, synthetic: Path) -> None:
    for name, task_of in tasks.KINDS[kind].items():
        if name.startswith("norm last, ") and not name.endswith("energy"):
            continue  # domains of sets are tested above
        task = task_of(0)
        again = task_of(0)
        assert torch.equal(task.train[0], again.train[0])
        assert task.network(task.inside[0]).shape == task.inside[1].shape
        for x, y in task.outside.values():
            assert x.shape[1:] == task.train[0].shape[1:]
            assert y.shape == (len(x), 1)
            assert not bool((x.flatten(1)[:1] == task.train[0].flatten(1)).all(1).any())


def test_a_wave_goes_on_outside_as_inside() -> None:
    torch.manual_seed(0)
    x, made_of = tasks.sequences(5, amplitude=(2.0, 3.0))
    steps = torch.arange(tasks.STEPS + tasks.AHEAD)
    whole = tasks.wave(made_of, steps)
    assert float((x[..., 0] - whole[:, : tasks.STEPS]).abs().max()) < 6 * tasks.NOISE
    torch.testing.assert_close(tasks.value_ahead(made_of)[:, 0], whole[:, -1])
