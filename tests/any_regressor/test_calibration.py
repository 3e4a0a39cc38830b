"""Calibration of any regressor: the bars of the last layer alone, noise by input, files, forms."""

import pytest
import torch
from torch import Tensor, nn

import rigidities as rg
from rigidities.calibration.methods import Full, Paper
from rigidities.losses import GaussianNLL
from tests.support.refusals import refused

F64 = torch.float64


def line(w: Tensor, x: Tensor) -> Tensor:
    return w[0] + w[1] * x


def line_rows(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """y = 1 + 2 x with a noise that grows tenfold from left to right."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(rows, generator=generator, dtype=F64) - 1
    noise = 0.1 * 10 ** (x / 2) * torch.randn(rows, generator=generator, dtype=F64)
    return x, 1 + 2 * x + noise


W = torch.tensor([1.0, 2.0], dtype=F64)


def fitted_line(**options: object) -> rg.PredictionRigidity:
    return rg.PredictionRigidity(line, W, **options).fit(*line_rows(400, 0))


def share_inside(pr: rg.PredictionRigidity, x: Tensor, y: Tensor) -> float:
    low, high = pr.predict(x).interval(0.9)
    return float(((low <= y) & (y <= high)).double().mean())


def net_and_rows() -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """A net with the best last layer, training rows, validation rows and new inputs."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(700, 3, generator=generator, dtype=F64)
    y = x[:, :1].sin() + 0.2 * torch.randn(700, 1, generator=generator, dtype=F64)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    with torch.no_grad():
        for tensor in net[0].parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=F64))
        hidden = torch.cat([net[:2](x[:300]), torch.ones(300, 1, dtype=F64)], 1)
        solution = torch.linalg.lstsq(hidden, y[:300]).solution
        net[2].weight.copy_(solution[:-1].mT)
        net[2].bias.copy_(solution[-1])
    return net, (x[:300], y[:300]), (x[300:600], y[300:600]), x[600:]


@pytest.mark.parametrize(
    "method",
    [
        "paper",
        Paper(criterion="bins", noise="constant", ridge=0.3),
        Full(noise="constant", distribution="gaussian", ridge=0.3),
        Full(noise="constant", distribution="student-t", ridge=0.3, guard=False),
    ],
    ids=["nll", "bins", "full gaussian", "full student-t"],
)
def test_the_parameters_of_a_last_layer_give_its_bars(method):
    net, train, valid, x = net_and_rows()
    layer = rg.LastLayerRigidity(net).fit(*train, keep_rows=0).calibrate(*valid, method=method)
    pr = rg.PredictionRigidity(net, subset=["2"]).fit(*train).calibrate(*valid, method=method)
    assert pr.calibration_report.rung == layer.calibration_report.rung
    assert pr.ridge == pytest.approx(layer.ridge, rel=1e-6)
    a, b = layer.predict(x), pr.predict(x)
    torch.testing.assert_close(b.std, a.std, rtol=1e-6, atol=0)
    torch.testing.assert_close(b.quantile(0.95), a.quantile(0.95), rtol=1e-6, atol=0)


def test_training_rows_are_left_out_as_those_of_a_last_layer_are():
    net, train, valid, x = net_and_rows()
    method = Full(noise="constant", distribution="gaussian", ridge=0.3)
    layer = rg.LastLayerRigidity(net).fit(*train).calibrate(*valid, method=method, train=train)
    pr = rg.PredictionRigidity(net, subset=["2"]).fit(*train)
    pr.calibrate(*valid, method=method, train=train)
    assert pr.calibration_report.seen == layer.calibration_report.seen == 300
    torch.testing.assert_close(pr.predict(x).std, layer.predict(x).std, rtol=1e-6, atol=0)


def test_the_default_learns_a_noise_that_follows_the_inputs(tmp_path):
    pr = fitted_line().calibrate(*line_rows(1500, 1), early_stopped=False)
    report = pr.calibration_report
    assert (
        report.method == "full" and report.criterion is None and pr.noise_model.name == "features"
    )
    assert report.remarks == [] and "chosen by method" in pr.summary()
    std = pr.predict(torch.tensor([-0.9, 0.9], dtype=F64)).std
    assert 5 < float(std[1] / std[0]) < 13  # the truth is 10^0.9, or 7.9
    x, y = line_rows(4000, 2)
    assert share_inside(pr, x, y) == pytest.approx(0.9, abs=0.02)
    for side in (x < -0.5, x > 0.5):
        assert share_inside(pr, x[side], y[side]) == pytest.approx(0.9, abs=0.04)
    far = pr.predict(torch.tensor([30.0], dtype=F64))
    assert float(far.std) > 10 * float(y.std())  # the guard: unlike any training row
    pr.save(tmp_path / "pr.safetensors")
    again = rg.PredictionRigidity.load(tmp_path / "pr.safetensors", line, W)
    assert str(again.calibration_report) == str(report)
    p, loaded = pr.predict(x[:50]), again.predict(x[:50])
    torch.testing.assert_close(loaded.std, p.std)
    torch.testing.assert_close(loaded.quantile(0.9), p.quantile(0.9))


@pytest.mark.parametrize("form", ["dual", "matrix-free"])
def test_forms_without_an_eigenbasis_have_one_noise_and_say_so(form):
    pr = fitted_line(ridge=0.1, form=form).calibrate(*line_rows(600, 1), early_stopped=False)
    assert pr.ridge == 0.1 and pr.noise_model.name == "constant"
    assert f"The {form} form has no eigenbasis" in str(pr.calibration_report)
    x, y = line_rows(3000, 2)
    assert share_inside(pr, x, y) == pytest.approx(0.9, abs=0.03)


def plane(w: Tensor, x: Tensor) -> Tensor:
    return x @ w


def plane_rows(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """A linear model of five parameters, with a noise of 0.3."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 5, generator=generator, dtype=F64)
    noise = 0.3 * torch.randn(rows, generator=generator, dtype=F64)
    return x, x @ torch.arange(1.0, 6.0, dtype=F64) + noise


@pytest.mark.parametrize("loss", ["mse", GaussianNLL(0.09)], ids=["squares", "known noise"])
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_errors_of_parameters_stay_the_textbooks_after_the_full_method(loss, seed):
    x, y = plane_rows(400, seed)
    w = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    pr = rg.PredictionRigidity(plane, w, loss).fit(x, y)
    textbook = pr.parameter_std
    pr.calibrate(*plane_rows(400, seed + 10), method=Full(ridge=pr.ridge))
    assert pr.calibration.joint is not None
    torch.testing.assert_close(pr.parameter_std, textbook, rtol=0.2, atol=0)
    # All that follows from moving the parameters has the same scale.
    new = x[:4]
    covariance = new @ pr.parameter_covariance @ new.mT
    torch.testing.assert_close(pr.covariance(new), covariance)
    torch.testing.assert_close(pr.propagate(lambda y: y, new).covariance, covariance)
    draws = pr.sample(4000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(draws.std(0), pr.parameter_std, rtol=0.1, atol=0)
    assert bool((pr.variance(new) >= covariance.diagonal() * (1 - 1e-9)).all())


def test_errors_of_parameters_by_the_default_have_the_joint_scale():
    x, y = plane_rows(400, 0)
    w = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    pr = rg.PredictionRigidity(plane, w).fit(x, y).calibrate(*plane_rows(400, 10))
    hessian = x.mT @ x + pr.ridge * torch.eye(5, dtype=F64)
    expected = float(pr.calibration.joint) * torch.linalg.inv(hessian).diagonal().sqrt()
    torch.testing.assert_close(pr.parameter_std, expected)
    assert float(pr.calibration.joint) == pytest.approx(0.3, rel=0.1)
    pr.calibrate(*plane_rows(400, 10), method=Paper(noise="constant", ridge=0.0))
    expected = pr.scale * torch.linalg.inv(x.mT @ x).diagonal().sqrt()
    torch.testing.assert_close(pr.parameter_std, expected)


def two(w: Tensor, x: Tensor) -> Tensor:
    return torch.stack([w[0] + w[1] * x, w[0] - w[1] * x], 1)


def two_rows(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    x, _ = line_rows(rows, seed)
    noise = torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return x, two(W, x) + 0.2 * noise


def test_several_outputs_share_one_calibration_and_one_list_of_scores():
    pr = rg.PredictionRigidity(two, W).fit(*two_rows(300, 0)).calibrate(*two_rows(400, 1))
    assert pr.calibration.scale.shape == (1,)
    pr.conformalize(*two_rows(200, 2))
    assert "Conformal intervals from 400 rows" in str(pr.calibration_report)
    assert pr.summary().count("guaranteed") == 1
    x, y = two_rows(3000, 3)
    p = pr.predict(x)
    assert p.std.shape == y.shape
    low, high = p.interval(0.9, conformal=True)
    assert float(((low <= y) & (y <= high)).double().mean()) == pytest.approx(0.9, abs=0.04)


def test_groups_get_their_own_scores_and_another_calibration_drops_them():
    def side(batch: tuple[Tensor, ...] | Tensor) -> Tensor:
        x = batch[0] if isinstance(batch, tuple | list) else batch
        return (x > 0).long()

    pr = fitted_line().calibrate(*line_rows(300, 1), method="paper")
    pr.conformalize(*line_rows(600, 2), groups=side)
    x, y = line_rows(3000, 3)
    low, high = pr.predict(x).interval(0.9, conformal=True)
    inside = ((low <= y) & (y <= high)).double()
    for group in (x <= 0, x > 0):
        assert float(inside[group].mean()) == pytest.approx(0.9, abs=0.05)
    refused("callable", pr.conformalize, *line_rows(50, 2), groups="bar")
    pr.calibrate(*line_rows(300, 1), method="paper")
    assert pr.calibration.conformal is None


def test_what_is_for_the_last_layer_alone_is_refused_by_name():
    pr = fitted_line()
    data = line_rows(60, 1)
    refused("no calibration yet", pr.conformalize, *data)
    for criterion in ("evidence", "loo"):
        message = f"criterion='{criterion}' is for LastLayerRigidity. Use method='full'"
        refused(message, pr.calibrate, *data, method=Paper(criterion=criterion))
    refused("function", pr.calibrate, *data, method=Full(noise=lambda batch: batch[0]))
    refused("train= is for", pr.calibrate, *data, method="paper", train=data)
    refused("outside support", pr.calibrate, *data, method=Full(support=(0.0, 1.0)))
    assert pr.calibration_report is None
