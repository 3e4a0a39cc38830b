"""`summary()`: what is known of a fit in a few lines, and what to do next."""

from typing import Any

import pytest
import torch

import rigidities as rg
from rigidities.calibration.methods import Paper
from tests.support.nets import Trained, trained


@pytest.fixture(scope="module")
def net() -> Trained:
    return trained(steps=20)


def lines(uq: Any) -> dict[str, str]:
    """The texts by their names; the first under ''."""
    title, *rest = uq.summary().split("\n")
    assert len(rest) < 12 and all(len(line) < 120 for line in rest)
    return {"": title} | dict(line.split(None, 1) for line in rest)


def plane(net: Trained) -> Any:
    def slope(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x @ w

    return rg.PredictionRigidity(slope, torch.linalg.lstsq(*net.train).solution[:, 0])


def test_an_unfitted_one_says_what_to_call(net):
    found = lines(rg.LastLayerRigidity(net.model))
    count = sum(one.numel() for one in net.model.parameters())
    assert found[""] == f"LastLayerRigidity of Sequential, {count:,} parameters"
    assert "fit(x, y)" in found["fit"] and set(found) == {"", "fit"}
    assert lines(plane(net)) == {"": "PredictionRigidity of slope, 4 parameters"} | {
        "fit": found["fit"]
    }


def test_an_uncalibrated_one_says_so_and_what_it_knows(net):
    uq = rg.LastLayerRigidity(net.model).fit(*net.train, loss="huber")
    found = lines(uq)
    assert found["readout"] == "'4': 25 features, 1 target"
    assert found["fit"] == "300 rows, loss Huber"
    assert found["ridge"] == f"{uq.ridge:.4g}, as given or by default"
    assert "calibrate(x, y)" in found["calibrated"] and "intervals" not in found


def test_a_calibrated_one_says_what_was_chosen_and_how_good_it_is(net):
    uq = rg.LastLayerRigidity(net.model).fit(*net.train)
    report = uq.calibrate(*net.valid, method=Paper(noise="constant")).calibration_report
    found = lines(uq)
    assert found["ridge"] == f'{report.ridge:.4g}, chosen by method "paper", criterion "nll"'
    assert found["scale"] == f"{float(report.scale):.4g}"
    assert found["noise"] == f"constant, variance {float(report.noise_level):.4g}"
    assert found["distribution"] == "gaussian"
    gain = f"{report.gain:.3g} ± {report.gain_error:.2g} nats per row better than one constant bar"
    assert found["calibrated"] == f"on 200 rows, {gain}"
    assert found["intervals"] == "no guarantee; conformalize(x, y) gives one"
    said = len(report.warnings) + len(report.remarks)
    assert said and found["notes"] == f"{said}: print(uq.calibration_report) shows them"


def test_a_loss_that_is_a_function_and_several_targets_are_called_so(net):
    x, y = net.train
    half = lambda p, t: (p - t).square().sum(1)  # noqa: E731
    assert lines(rg.LastLayerRigidity(net.model).fit(x, y, loss=half))["fit"].endswith("a function")
    two = torch.nn.Linear(4, 2)
    found = lines(rg.LastLayerRigidity(two).fit(x, torch.cat([y, y], 1)))
    assert found["readout"].endswith("5 features, 2 targets")


def test_stale_fixed_and_guaranteed_are_told(net):
    uq = rg.LastLayerRigidity(net.model).fit(*net.train)
    uq.calibrate(*net.valid, method=Paper(ridge=0.1)).conformalize(*net.test)
    assert lines(uq)["ridge"] == "0.1, fixed"
    assert lines(uq)["intervals"] == "guaranteed by p.interval(0.9)"
    assert "stale" not in uq.summary()
    uq.partial_fit(*net.test)
    assert "stale" in lines(uq)["calibrated"]
    assert lines(uq)["intervals"].startswith("the guarantee is void: call calibrate and conf")


def test_any_regressor_is_summed_up_alike_and_in_its_repr(net):
    x, y = net.train[0], net.train[1][:, 0]
    pr = plane(net)
    assert repr(pr) == "<PredictionRigidity of slope, 4 parameters: unfitted>"
    pr.fit(x, y)
    assert lines(pr)["form"] == "dense, gauss-newton" and lines(pr)["fit"] == "300 rows, loss MSE"
    assert repr(pr).endswith("parameters: dense form, ridge 0>")
    pr.calibrate(net.valid[0], net.valid[1][:, 0], method=Paper(ridge=0.5))
    assert lines(pr)[
        "ridge"
    ] == "0.5, fixed" and 'calibrated by method "paper", criterion "nll"' in repr(pr)
    assert lines(pr)["intervals"] == "no guarantee; conformalize(x, y) gives one"
