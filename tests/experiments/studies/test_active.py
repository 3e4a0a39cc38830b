"""Active learning: the data, the batched nets, the paired curves, the page and the example."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.studies.active import page as pages
from experiments.studies.active import run as experiment
from experiments.studies.active import work
from experiments.studies.active.work import (
    METHODS,
    Protocol,
    Task,
    Training,
    learning_curves,
    trained,
)
from experiments.training.stack import Stack

from experiments.data import files, uci
from experiments.frame import report
from tests.support.numbers_on_pages import unsupported

pytestmark = pytest.mark.xdist_group("active")

ROOT = Path(__file__).parents[3]
STORED = ROOT / "experiments/results/active/active.json"
WHERE = dict.fromkeys(["command", "date", "cpu", "cores", "threads", "torch", "python"], "-")


def write(folder: Path, name: str, rows: int = 700, **changes: object) -> None:
    """A small table in the format of the published files."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 3)) * [1.0, 10.0, 0.0] + [0.0, 5.0, 2.0]
    fields: dict[str, object] = {
        "X": x,
        "y": 4 + 2 * np.sin(x[:, 0]) + 0.1 * x[:, 1],
        "feature_names": np.array(["a", "b", "constant"]),
        "target_name": np.array("y"),
        "train_index": np.arange(rows - 70, dtype=np.int32)[None],
        "test_index": np.arange(rows - 70, rows, dtype=np.int32)[None],
        **changes,
    }
    path = folder / f"uci_{name}.npz"
    np.savez(path, **{k: v for k, v in fields.items() if v is not None})
    files.seal(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    for name in ("kin8nm", "naval"):
        write(made, name)
    return made


SMALL = replace(experiment.QUICK[0], pool=200, test=100)


# --- data ---------------------------------------------------------------------------------------


def test_data_that_are_not_in_the_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"uci_kin8nm\.npz is not in the folder given"):
        experiment.run(quick=True, seed=0, folder=tmp_path)


@pytest.mark.skipif(uci.missing("kin8nm") is not None, reason="uci_kin8nm.npz is not here")
def test_the_real_kin8nm_is_read_whole() -> None:
    rows = uci.read("kin8nm")
    assert rows.x.shape == (8192, 8) and rows.train_index.shape == (20, 7373)
    assert rows.y.mean() == pytest.approx(0.7143, abs=1e-4)
    task = Task.drawn(rows, Protocol(), seed=0)
    assert len(task.x) == 6000 and len(task.x_test) == 2000


# --- nets ---------------------------------------------------------------------------------------


def test_training_learns_and_copies_differ_by_their_rows_alone() -> None:
    x = torch.randn(2, 80, 1, generator=torch.Generator().manual_seed(0))
    y = torch.sin(x[..., 0])
    how = Training(hidden=(16,), steps=300, batch=32, rate=2e-2)
    x, y = torch.cat([x, x.flip(0)]), torch.cat([y, -y.flip(0)])
    x[3], y[3] = x[1], y[1]
    nets = trained(x, y, how, torch.Generator().manual_seed(1), copies=2)
    assert bool(((nets(x)[..., 0] - y).square().mean(1) < 0.5 * y.var(1)).all())
    torch.testing.assert_close(nets.picked([3])(x[1:2]), nets.picked([1])(x[1:2]))
    assert not torch.allclose(nets.picked([2])(x[:1]), nets.picked([0])(x[:1]))


# --- rounds -------------------------------------------------------------------------------------


def test_a_task_is_standardised_without_labels_that_are_not_known(folder: Path) -> None:
    rows = uci.read("kin8nm", folder)
    task = Task.drawn(rows, SMALL, seed=3)
    assert len(task.x) == 200 and len(task.x_test) == 100
    assert not {row[0] for row in task.x.tolist()} & {row[0] for row in task.x_test.tolist()}
    torch.testing.assert_close(task.x[:, :2].mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    assert bool((task.x[:, 2] == 0).all())  # the constant column
    first = task.y[: SMALL.start]
    assert float(first.mean()) == pytest.approx(0, abs=1e-5)
    assert float(first.std()) == pytest.approx(1, rel=1e-5)
    assert not torch.equal(task.y, Task.drawn(rows, SMALL, seed=4).y)


@pytest.mark.parametrize("method", METHODS)
def test_choices_are_unlabelled_different_and_their_methods_own(method: str, folder: Path) -> None:
    task = Task.drawn(uci.read("kin8nm", folder), SMALL, seed=0)
    net = Stack.drawn([0], (3, 16, 1), "silu")
    labelled = torch.arange(10, 50)
    generator = torch.Generator().manual_seed(0)
    rows = work.chosen(net, task, labelled, SMALL, method, generator)
    assert len(set(rows.tolist())) == SMALL.batch
    assert not set(rows.tolist()) & set(labelled.tolist())
    features = net.features(task.x[None])[0].double()
    gram = features[labelled].T @ features[labelled]
    ridge = SMALL.ridge * gram.diagonal().mean() * torch.eye(17)

    def left(picked: torch.Tensor) -> torch.Tensor:
        return gram + ridge + features[picked].T @ features[picked]

    q = (features * torch.linalg.solve(gram + ridge, features.T).T).sum(1)
    q[labelled] = -1
    if method == "top":
        assert set(rows.tolist()) == set(q.topk(SMALL.batch).indices.tolist())
    if method in ("logdet", "variance"):
        others = q.topk(SMALL.batch).indices
        goal = (
            torch.logdet
            if method == "logdet"
            else lambda m: -torch.trace(torch.linalg.solve(m, features.T @ features))
        )
        assert float(goal(left(rows))) > float(goal(left(others)))


def test_curves_start_together_and_depend_on_the_seed_alone(folder: Path) -> None:
    rows = uci.read("kin8nm", folder)
    curves = learning_curves(rows, SMALL, seed=0)
    again = learning_curves(rows, SMALL, seed=0)
    assert list(curves) == list(METHODS)
    for method, curve in curves.items():
        assert curve.shape == (SMALL.rounds + 1, SMALL.seeds)
        assert torch.equal(curve, again[method])
        torch.testing.assert_close(curve[0], curves["random"][0], rtol=1e-5, atol=0)
    assert not torch.equal(curves["random"][1:], curves["variance"][1:])
    other = learning_curves(rows, SMALL, seed=50)
    assert not torch.equal(curves["random"], other["random"])


def test_the_rmse_is_in_the_targets_unit(folder: Path) -> None:
    task = Task.drawn(uci.read("kin8nm", folder), SMALL, seed=0)
    net = Stack.drawn([0], (3, 4, 1), "silu")
    net.flat.zero_()
    assert work.rmse(net, replace(task, unit=3.0)) == pytest.approx(
        3 * float(task.y_test.square().mean().sqrt())
    )


# --- scores and page ----------------------------------------------------------------------------


def test_differences_are_paired_and_labels_are_interpolated() -> None:
    protocol = Protocol(start=100, batch=100, rounds=2, seeds=2)
    random = torch.tensor([[4.0, 6.0], [3.0, 5.0], [2.0, 4.0]])
    better = torch.tensor([[4.0, 6.0], [2.0, 4.0], [1.0, 2.0]])
    curves = {"random": random, "top": random, "logdet": random, "variance": better}
    found = work.summary(curves, protocol)
    one = found["methods"]["variance"]
    assert one["less_random"] == {
        "last": (-1.5, 0.5),
        "all_rounds": (-1.25, 0.25),
        "thousandths": {"last": (-1500.0, 500.0), "all_rounds": (-1250.0, 250.0)},
        "better": 2,
    }
    assert one["rmse"][0] == (5.0, 1.0)
    assert one["rmse_thousandths"][0] == (5000.0, 1000.0)
    assert one["labels_to_randoms_last"] == 200.0
    assert found["methods"]["random"]["labels_to_randoms_last"] == 300.0
    assert work.labels_needed([1, 2], [3.0, 2.0], 1.0) is None
    assert work.labels_needed([100, 200, 300], [3.0, 1.0, 0.5], 2.0) == 150.0
    early = work.summary({**curves, "random": random.flip(0)}, protocol)
    assert pages.difference_table(early, "").rows[-1][-1] == "all start below it"
    table = pages.difference_table(found, "")
    assert table.rows[-1][:3] == ["greedy, variance", "-1500.00 ± 500.00", "-1250.00 ± 250.00"]
    assert table.rows[-1][-2:] == ["2 of 2", "200 of 300"]


def test_a_quick_run_keeps_numbers_tables_and_figure(folder: Path, tmp_path: Path) -> None:
    outcome = experiment.run(quick=True, seed=0, folder=folder)
    report.write("active", outcome, {**WHERE, "minutes": 0.0}, tmp_path)
    stored = json.loads((tmp_path / "active.json").read_text())
    assert list(stored) == ["kin8nm", "naval"]
    page = (tmp_path / "active.md").read_text(encoding="utf-8")
    for one in stored.values():
        assert list(one["methods"]) == list(METHODS)
        mean, error = one["methods"]["variance"]["rmse"][-1]
        assert f"{1000 * mean:.2f} ± {1000 * error:.2f}" in page
    assert unsupported(page, stored) == []
    assert (tmp_path / "active-curves.png").stat().st_size > 10_000


def test_the_stored_curves_keep_what_the_page_says() -> None:
    stored = json.loads(STORED.read_text())
    kin8nm, naval = (stored[name]["methods"] for name in ("kin8nm", "naval"))
    for base in work.BASES:
        for when in ("last", "all_rounds"):
            mean, error = kin8nm["variance"][f"less_{base}"][when]
            assert mean + 3 * error < 0, (base, when)
    mean, error = kin8nm["logdet"]["less_top"]["all_rounds"]
    assert mean + 3 * error < 0
    assert kin8nm["top"]["less_random"]["all_rounds"][0] > 0
    assert kin8nm["variance"]["labels_to_randoms_last"] < 0.8 * stored["kin8nm"]["labels"][-1]
    assert all(
        naval[method]["less_random"]["last"][0] > 0 for method in METHODS if method != "random"
    )
