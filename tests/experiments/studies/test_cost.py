"""What error bars cost: the methods do what they are timed for, and ratios mean what they say."""

import gc
import json
import math
from collections.abc import Iterator

import pytest
import torch
from benchmarks.frame.timing import Timings
from experiments.frame.catalogue import EXPERIMENTS, Experiment
from experiments.studies.cost import page as pages
from experiments.studies.cost import run as experiment
from experiments.studies.cost import work
from experiments.studies.cost.work import Workload
from experiments.training.protocol import Protocol
from torch import nn

from experiments import __main__ as command
from tests.support.numbers_on_pages import unsupported


@pytest.fixture(autouse=True)
def fast_collections() -> Iterator[None]:
    """Timing collects garbage before every task; what was there before need not be looked at."""
    gc.freeze()
    yield
    gc.unfreeze()


WORK = Workload(
    inputs=3, train=64, valid=32, test=20, block=8, protocol=Protocol(hidden=(16,), batch=16)
)
EPOCHS = WORK.protocol.epochs


def test_the_net_has_its_sizes_and_dropout_before_every_layer() -> None:
    plain, dropped = WORK.net(0), WORK.net(0, outputs=2, dropout=True)
    assert [type(layer) for layer in plain] == [nn.Linear, nn.ReLU, nn.Linear]
    kinds = [type(layer) for layer in dropped]
    assert kinds == [nn.Dropout, nn.Linear, nn.ReLU, nn.Dropout, nn.Linear]
    assert dropped(torch.zeros(4, 3)).shape == (4, 2)
    assert torch.equal(plain[0].weight, WORK.net(0)[0].weight)


def test_the_member_minimises_the_gaussian_likelihood() -> None:
    net, (x, y) = WORK.net(0, outputs=2), WORK.data(10, 0)
    mean, variance = work.moments(net(x).detach())
    distribution = torch.distributions.Normal(mean, variance.sqrt())
    expected = -distribution.log_prob(y).mean() - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(work.gaussian(net, [x], y).detach(), expected)


def test_adversarial_rows_are_moved_along_the_sign_of_the_slope() -> None:
    net, (x, y) = WORK.net(0, outputs=2), WORK.data(10, 0)
    moving = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(work.gaussian(net, [moving], y), moving)
    moved = x + work.STEP * slope.sign()
    expected = (work.gaussian(net, [x], y) + work.gaussian(net, [moved], y)) / 2
    found = work.adversarial(net, [x], y)
    torch.testing.assert_close(found, expected)
    assert float(found.detach()) > float(work.gaussian(net, [x], y).detach())
    weights = list(net.parameters())
    for a, b in zip(
        torch.autograd.grad(found, weights), torch.autograd.grad(expected, weights), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_an_ensemble_is_the_mixture_of_its_members_in_any_blocks() -> None:
    members, (x, _) = [WORK.net(k, outputs=2) for k in range(3)], WORK.data(20, 0)
    mean, variance = work.ensemble(members, x, block=7)
    with torch.no_grad():
        own = [work.moments(net(x)) for net in members]
    means, variances = (torch.stack(part).double() for part in zip(*own, strict=True))
    torch.testing.assert_close(mean.double(), means.mean(0), rtol=1e-5, atol=1e-6)
    second = (variances + means.square()).mean(0) - means.mean(0).square()
    torch.testing.assert_close(variance.double(), second, rtol=1e-4, atol=1e-6)


def test_dropout_makes_as_many_passes_as_it_says_and_none_alike() -> None:
    net, (x, _) = WORK.net(0, dropout=True), WORK.data(20, 0)
    seen = []
    net.register_forward_hook(lambda module, inputs, output: seen.append(output.clone()))
    net.eval()
    mean, variance = work.dropout(net, x, block=20, passes=6)
    assert len(seen) == 6
    values = torch.stack(seen)
    torch.testing.assert_close(mean, values.mean(0))
    torch.testing.assert_close(variance, values.var(0, correction=0))
    assert float((variance > 0).double().mean()) > 0.5
    torch.manual_seed(0)
    assert work.dropout(net, x, block=7, passes=2)[0].shape == (20, 1)
    assert len(seen) == 6 + 2 * 3


def test_plain_predictions_are_the_nets() -> None:
    net, (x, _) = WORK.net(0), WORK.data(20, 0)
    torch.testing.assert_close(work.plain(net, x, 7), net(x).detach())


def test_training_ratios_count_members_and_add_our_two_steps() -> None:
    seconds = {
        "epoch": [1.0, 2.0],
        "epoch, dropout": [1.5, 3.0],
        "epoch, variance": [1.2, 2.4],
        "epoch, adversarial": [3.0, 6.0],
        "fit": [10.0, 20.0],
        "calibrate": [30.0, 60.0],
    }
    found = {name: one.median for name, one in work.training(Timings(seconds), WORK).items()}
    assert found == pytest.approx(
        {
            "none": 1,
            "ours": 1 + 40 / EPOCHS,
            "dropout_10": 1.5,
            "dropout_100": 1.5,
            "ensemble_5": 6,
            "ensemble_10": 12,
            "adversarial_5": 15,
            "adversarial_10": 30,
        }
    )


def test_inference_ratios_are_taken_round_by_round() -> None:
    seconds = {"predictions": [1.0, 2.0], "ours": [1.5, 3.0]}
    seconds |= {"dropout, 10": [10.0, 22.0], "dropout, 100": [100.0, 200.0]}
    seconds |= {"ensemble, 5": [5.0, 10.0], "ensemble, 10": [10.0, 20.0]}
    found = work.inference(Timings(seconds))
    assert found["ours"].median == found["ours"].upper == 1.5
    assert (found["dropout_10"].lower, found["dropout_10"].upper) == (10.25, 10.75)
    assert found["adversarial_5"] == found["ensemble_5"]
    assert set(found) == set(pages.LABELS) == set(pages.THEORY)


def test_more_passes_cost_more() -> None:
    found = work.costs(WORK, rounds=3, seed=0)["inference"]
    order = ["none", "dropout_10", "dropout_100"]
    medians = [found[name]["median"] for name in order]
    assert medians[0] < medians[1] < medians[2]


def test_ratios_near_one_keep_three_decimals() -> None:
    assert pages._ratio({"median": 1.0, "lower": 1.0, "upper": 1.0}) == "1.000"
    assert pages._ratio({"median": 5.5, "lower": 5.0, "upper": 6.0}) == "5.50 (5.00 to 6.00)"


def test_a_quick_run_writes_numbers_tables_and_a_figure(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(EXPERIMENTS, "cost", Experiment("cost", "what error bars cost", 5))
    monkeypatch.setitem(experiment.QUICK, "rows", 100)
    assert command.main(["cost", "--quick", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "cost.json").read_text(encoding="utf-8"))
    page = (tmp_path / "cost.md").read_text(encoding="utf-8")
    assert set(found["nets"]) == {"larger net", "small net"}
    for one in found["nets"].values():
        assert all(seconds > 0 for seconds in one["seconds"].values())
        for phase in ("training", "inference"):
            assert set(one[phase]) == set(pages.LABELS)
            for method, ratio in one[phase].items():
                shown = pages._ratio(ratio)
                assert f"| {pages.LABELS[method]} |" in page and shown in page
    assert unsupported(page, found) == []
    assert "22-256-256-1" in page and "8-50-1" in page
    assert found["paper"]["ensemble_5"] == {"training": 5, "inference": 5}
    assert (tmp_path / "cost-ratios.png").exists()
