"""The experiment on means of many predictions: its nets, its error bars and what it writes."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.frame.outcome import Picture, Table
from experiments.studies.propagation import page as pages
from experiments.studies.propagation import work
from experiments.studies.propagation.run import run
from experiments.studies.propagation.work import CALIBRATIONS, DIFFERENCE, Groups, Samples, Sizes

import rigidities as rg
from experiments.data import files
from experiments.frame import report
from rigidities import LastLayerRigidity
from tests.support.numbers_on_pages import unsupported

SMALL = Sizes(train=150, valid=80, test=20, nets=3)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with one synthetic set under the name of a real one."""
    source = np.random.default_rng(0)
    x = source.normal(size=(600, 3))
    y = np.sin(x[:, 0]) + 0.5 * x[:, 1] + 0.2 * source.normal(size=600)
    index = np.arange(600)[None]
    np.savez(
        tmp_path / "uci_kin8nm.npz",
        X=x,
        y=100 + 10 * y,
        feature_names=np.array(["a", "b", "c"]),
        target_name=np.array("y"),
        train_index=index[:, :540],
        test_index=index[:, 540:],
    )
    files.seal(tmp_path / "uci_kin8nm.npz")
    monkeypatch.setenv("RIGIDITIES_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def drawn(folder: Path) -> Samples:
    return work.drawn("kin8nm", SMALL, seed=0)


def test_every_net_has_rows_of_its_own_and_none_the_common_ones(drawn: Samples) -> None:
    assert drawn.train[0].shape == (3, 150, 3) and drawn.valid[1].shape == (3, 80, 1)
    common = {tuple(row.tolist()) for row in drawn.common}
    assert len(common) == 20
    for net in range(3):
        parts = [
            {tuple(r.tolist()) for r in s[0][net]} for s in (drawn.train, drawn.valid, drawn.test)
        ]
        parts.append(common)
        assert len(set.union(*parts)) == sum(map(len, parts)) == 150 + 80 + 20 + 20
    assert not torch.equal(drawn.train[0][0], drawn.train[0][1])
    assert drawn.spread == pytest.approx(8.8, rel=0.1)
    again = work.drawn("kin8nm", SMALL, seed=0)
    assert torch.equal(again.train[0], drawn.train[0])


def test_too_few_rows_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="Expected at least 2500 rows in 'kin8nm', got 600"):
        work.drawn("kin8nm", Sizes(), seed=0)


def test_training_reduces_the_error_of_every_net(drawn: Samples) -> None:
    trained = work.trained(*drawn.train, epochs=100, seed=1)
    x, y = drawn.test
    for net, rows, target in zip(trained, x, y, strict=True):
        assert float((net(rows).detach() - target).square().mean()) < 0.5 * float(
            target.square().mean()
        )


def test_groups_are_means_and_differences() -> None:
    groups = Groups.of((1, 2, 5), torch.tensor([[0, 3], [2, 4]]), rows=5)
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64)
    split = groups.split(groups.matrix @ values)
    assert split["1"].tolist() == values.tolist()
    assert split["2"].tolist() == [1.5, 6.0]
    assert split["5"].tolist() == pytest.approx([6.2])
    assert split[DIFFERENCE].tolist() == [-7.0, -12.0]


def test_neighbours_are_nearest_and_counted_once() -> None:
    pairs = work.nearest(torch.tensor([[0.0], [1.0], [5.0], [5.5]]))
    assert pairs.tolist() == [[0, 1], [2, 3]]


def test_predicted_variances_are_those_of_the_dense_covariance(drawn: Samples) -> None:
    (net,) = work.trained(drawn.train[0][:1], drawn.train[1][:1], epochs=20, seed=1)
    net = copy.deepcopy(net).double()
    x, valid = drawn.test[0][0].double(), tuple(part[0].double() for part in drawn.valid)
    uq = LastLayerRigidity(net).fit(tuple(part[0].double() for part in drawn.train))
    uq.calibrate(valid, method=rg.Paper(criterion="evidence", noise="constant"))
    groups = Groups.of((1, 4), work.nearest(x), len(x))
    found = work.predicted(uq, x, groups)
    covariance, a = uq.covariance(x), groups.matrix
    noise = float(uq.noise_model.level) * a.square().sum(1)
    assert bool((noise > 0).all())
    expected = {
        "epistemic": (a @ covariance @ a.T).diagonal(),
        "joint": (a @ covariance @ a.T).diagonal() + noise,
        "independent": a.square() @ covariance.diagonal() + noise,
    }
    for rule, variance in expected.items():
        for name, values in groups.split(variance).items():
            torch.testing.assert_close(found[rule][name], values, rtol=1e-6, atol=1e-12)


def test_ratios_and_coverages_are_of_the_errors_given() -> None:
    wrong = {"5": torch.tensor([3.0, -4.0], dtype=torch.float64)}
    variance = {"5": torch.tensor([4.0, 4.0], dtype=torch.float64)}
    found = work.compared(wrong, variance, {"5": 8.0}, unit=10.0)
    assert found["std"]["5"] == 20
    assert found["ratio"]["5"] == 2 / 8
    assert found["coverage"]["5"] == 0.5  # 1.645 * 2 = 3.29


def test_the_spread_is_that_of_the_nets_for_the_same_rows() -> None:
    predictions = torch.tensor([[1.0, 5.0, 0.0], [3.0, 1.0, 2.0]], dtype=torch.float64)
    found = work.retrained(predictions, unit=10.0)
    assert found["common"] == pytest.approx(0.0)
    assert found["single"] == pytest.approx(10 * math.sqrt((2 + 8 + 2) / 3))


def test_the_default_is_judged_on_the_first_nets_by_its_own_covariance(drawn: Samples) -> None:
    nets = work.trained(*drawn.train, epochs=20, seed=1)
    found = work.summary(nets, drawn, (1, 4), first=1)
    assert found["auto"]["nets"] == 1 and found["bayes"]["nets"] == 3
    assert found["independence"] == pytest.approx(math.sqrt(1 - 150 / 580))
    uq = LastLayerRigidity(nets[0], progress=False).fit((drawn.train[0][0], drawn.train[1][0]))
    uq.calibrate((drawn.valid[0][0], drawn.valid[1][0]))
    covariance = uq.covariance(drawn.common).double()
    own = drawn.spread * float(covariance.mean()) ** 0.5
    # A single prediction's is at most the variance of its row.
    single = drawn.spread * float(uq.predict(drawn.common).epistemic.double().mean()) ** 0.5
    assert found["auto"]["common"] == pytest.approx(own, rel=1e-4)
    assert found["auto"]["single"] == pytest.approx(single, rel=1e-4)
    assert found["auto"]["ratio_of_single"] == pytest.approx(single / found["single"], rel=1e-4)


def test_words_tell_which_ratios_lie_where_they_were_to_be() -> None:
    def of(rows: int, ratio: float) -> dict:
        return {"a": {"rows": rows, "auto": {"ratio_of_common": ratio}}}

    said = pages._within(of(10, 0.8), of(20, 1.4), "common")
    assert "from 0.80 to 1.40" in said and said.endswith("all do.")
    said = pages._within(of(10, 0.6), of(20, 1.4), "common")
    assert said.endswith("all do, except 0.60 (a, 10 rows).")


def test_the_advice_names_the_calibrations_that_were_right_on_every_set() -> None:
    def of(*ratios: float) -> dict:
        ways = zip(CALIBRATIONS, ratios, strict=True)
        return {way: {"joint": {"ratio": {"5": ratio}}} for way, ratio in ways}

    found = {"a": of(9, 1, 1, 1, 1), "b": of(1, 0.5, 2, 0.8, 1.2)}
    right = '`noise="bayes", criterion="evidence"` and the default'
    assert pages._right(found, "5").endswith(f"set, {right}")
    assert pages._right({"a": of(9, 9, 9, 9, 9)}, "5").endswith("set, no calibration")


def test_a_quick_run_fills_its_page(folder: Path, tmp_path: Path) -> None:
    outcome = run(quick=True, seed=0)
    tables = [block for block in outcome.page if isinstance(block, Table)]
    assert [len(table.rows) for table in tables] == [
        2,
        *(k * len(CALIBRATIONS) for k in (1, 2, 1, 1)),
    ]
    assert sum(isinstance(block, Picture) for block in outcome.page) == 1
    numbers = json.loads(report.rendered_numbers(outcome))
    one = numbers["sets"]["kin8nm"]
    actual, ratio = one["actual"]["20"], one["none"]["joint"]["ratio"]["20"]
    assert one["none"]["joint"]["std"]["20"] == pytest.approx(actual * ratio, rel=1e-6)
    assert one["none"]["noise"] == 0 < one["bayes"]["noise"]
    common = one["bayes"]["common"] / one["common"]
    assert one["bayes"]["ratio_of_common"] == pytest.approx(common, rel=1e-6)
    more = numbers["larger"]["kin8nm"]
    least = math.sqrt(1 - 240 / 580) * more["auto"]["ratio_of_common"]
    assert more["least"]["common"] == pytest.approx(least, rel=1e-6)
    assert f"{least:.2f} (kin8nm) for means" in pages.spread(numbers["sets"], numbers["larger"])
    assert unsupported("\n\n".join(map(str, tables)), numbers) == []
    assert f"{ratio:.2f} (kin8nm)" in outcome.page[-7]
    report.checked_png(outcome.pictures[0])
