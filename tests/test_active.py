"""Active learning: the reader, the batched nets, the paired curves, the page and the example."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments import active, report
from experiments.active import rounds, scores
from experiments.active.nets import Nets, Training, trained
from experiments.active.rounds import METHODS, Protocol, Task, learning_curves
from experiments.data import uci
from torch import nn

pytestmark = pytest.mark.xdist_group("active")

ROOT = Path(__file__).parents[1]
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
    np.savez(folder / f"uci_{name}.npz", **{k: v for k, v in fields.items() if v is not None})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    for name in ("kin8nm", "naval"):
        write(made, name)
    return made


SMALL = replace(active.quickened(Protocol("kin8nm")), pool=200, test=100)


# --- reader -------------------------------------------------------------------------------------


def test_the_folder_is_the_argument_then_the_variable_then_beside(folder, monkeypatch) -> None:
    monkeypatch.delenv(uci.VARIABLE, raising=False)
    assert uci.data_folder() == ROOT.parent / "shared" / "data"
    monkeypatch.setenv(uci.VARIABLE, str(folder))
    assert uci.data_folder() == folder
    assert uci.data_folder("elsewhere") == Path("elsewhere")
    rows = uci.read("kin8nm")
    assert rows.x.shape == (700, 3) and rows.y.shape == (700,)
    assert rows.feature_names == ("a", "b", "constant") and rows.target_name == "y"
    assert rows.test_index.tolist() == [list(range(630, 700))]


def test_a_missing_file_is_named_with_its_source_and_the_variable(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"uci_kin8nm\.npz.*RIGIDITIES_DATA.*OpenML 44980"):
        uci.read("kin8nm", tmp_path)
    with pytest.raises(ValueError, match=r"Unknown set 'boston'\. There are concrete, energy"):
        uci.read("boston", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"'kin8nm' is not at"):
        active.run(quick=True, seed=0, folder=tmp_path)


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "wine", test_index=None)
    with pytest.raises(ValueError, match=r"missing \['test_index'\]"):
        uci.read("wine", tmp_path)
    write(tmp_path, "wine", y=np.zeros(3))
    with pytest.raises(ValueError, match=r"got \(700, 3\) and \(3,\)"):
        uci.read("wine", tmp_path)


@pytest.mark.skipif(uci.missing("kin8nm") is not None, reason="uci_kin8nm.npz is not here")
def test_the_real_kin8nm_is_read_whole() -> None:
    rows = uci.read("kin8nm")
    assert rows.x.shape == (8192, 8) and rows.train_index.shape == (20, 7373)
    assert rows.y.mean() == pytest.approx(0.7143, abs=1e-4)
    task = Task.drawn(rows, Protocol(), seed=0)
    assert len(task.x) == 6000 and len(task.x_test) == 2000


# --- nets ---------------------------------------------------------------------------------------


def test_a_stack_of_nets_equals_torch_modules_and_their_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    nets = Nets.drawn(3, (4, 7, 5, 1), generator)
    x = torch.randn(3, 11, 4, generator=generator)
    for p in (*nets.weights, *nets.biases):
        p.requires_grad_(True)
    nets(x).square().sum().backward()
    for k in range(3):
        linear = [nn.Linear(*w.shape[1:]) for w in nets.weights]
        for layer, w, b in zip(linear, nets.weights, nets.biases, strict=True):
            layer.weight.data, layer.bias.data = w[k].detach().T.clone(), b[k, 0].detach().clone()
        net = nn.Sequential(linear[0], nn.SiLU(), linear[1], nn.SiLU(), linear[2])
        torch.testing.assert_close(nets.one(k)(x[k : k + 1])[0], net(x[k])[:, 0])
        features = nets.one(k).features(x[k : k + 1])[0]
        torch.testing.assert_close(features[:, :-1], net[:-1](x[k]).detach())
        assert features[:, -1].tolist() == [1.0] * 11
        net(x[k]).square().sum().backward()
        for layer, w, b in zip(linear, nets.weights, nets.biases, strict=True):
            torch.testing.assert_close(layer.weight.grad, w.grad[k].T)
            torch.testing.assert_close(layer.bias.grad, b.grad[k, 0])


def test_training_learns_and_copies_differ_by_their_rows_alone() -> None:
    x = torch.randn(2, 80, 1, generator=torch.Generator().manual_seed(0))
    y = torch.sin(x[..., 0])
    how = Training(hidden=(16,), steps=300, batch=32, rate=2e-2)
    x, y = torch.cat([x, x.flip(0)]), torch.cat([y, -y.flip(0)])
    x[3], y[3] = x[1], y[1]
    nets = trained(x, y, how, torch.Generator().manual_seed(1), copies=2)
    assert bool(((nets(x) - y).square().mean(1) < 0.15 * y.var(1)).all())
    torch.testing.assert_close(nets.one(3)(x[1:2]), nets.one(1)(x[1:2]))
    assert not torch.allclose(nets.one(2)(x[:1]), nets.one(0)(x[:1]))
    assert not any(p.requires_grad for p in nets.weights)


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
    net = Nets.drawn(1, (3, 16, 1), torch.Generator().manual_seed(0))
    labelled = torch.arange(10, 50)
    generator = torch.Generator().manual_seed(0)
    rows = rounds.chosen(net, task, labelled, SMALL, method, generator)
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
    net = Nets.drawn(1, (3, 4, 1), torch.Generator().manual_seed(0))
    for p in (*net.weights, *net.biases):
        p.zero_()
    assert rounds.rmse(net, replace(task, unit=3.0)) == pytest.approx(
        3 * float(task.y_test.square().mean().sqrt())
    )


# --- scores and page ----------------------------------------------------------------------------


def test_differences_are_paired_and_labels_are_interpolated() -> None:
    protocol = Protocol(start=100, batch=100, rounds=2, seeds=2)
    random = torch.tensor([[4.0, 6.0], [3.0, 5.0], [2.0, 4.0]])
    better = torch.tensor([[4.0, 6.0], [2.0, 4.0], [1.0, 2.0]])
    curves = {"random": random, "top": random, "logdet": random, "variance": better}
    found = scores.summary(curves, protocol)
    one = found["methods"]["variance"]
    assert one["less_random"] == {"last": (-1.5, 0.5), "all_rounds": (-1.25, 0.25), "better": 2}
    assert one["rmse"][0] == (5.0, 1.0)
    assert one["labels_to_randoms_last"] == 200.0
    assert found["methods"]["random"]["labels_to_randoms_last"] == 300.0
    assert scores.labels_needed([1, 2], [3.0, 2.0], 1.0) is None
    assert scores.labels_needed([100, 200, 300], [3.0, 1.0, 0.5], 2.0) == 150.0
    early = scores.summary({**curves, "random": random.flip(0)}, protocol)
    assert scores.difference_table(early, "").rows[-1][-1] == "all begin below it"
    table = scores.difference_table(found, "")
    assert table.rows[-1][:3] == ["greedy, variance", "-1500.00 ± 500.00", "-1250.00 ± 250.00"]
    assert table.rows[-1][-2:] == ["2 of 2", "200 of 300"]


def test_a_quick_run_keeps_numbers_tables_and_figure(folder: Path, tmp_path: Path) -> None:
    outcome = active.run(quick=True, seed=0, folder=folder)
    report.write("active", outcome, {**WHERE, "minutes": 0.0}, tmp_path)
    stored = json.loads((tmp_path / "active.json").read_text())
    assert list(stored) == ["kin8nm", "naval"]
    page = (tmp_path / "active.md").read_text(encoding="utf-8")
    for one in stored.values():
        assert list(one["methods"]) == list(METHODS)
        mean, error = one["methods"]["variance"]["rmse"][-1]
        assert f"{1000 * mean:.2f} ± {1000 * error:.2f}" in page
    assert (tmp_path / "active-curves.png").stat().st_size > 10_000


def test_the_stored_curves_keep_what_the_page_says() -> None:
    stored = json.loads(STORED.read_text())
    kin8nm, naval = (stored[name]["methods"] for name in ("kin8nm", "naval"))
    for base in scores.BASES:
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
