"""Calibration of any regressor: the bars of the last layer alone, noise by input, files, forms."""

import pytest
import torch
from torch import Tensor, nn

import rigidities as rg
from rigidities.any_regressor import rigidity
from rigidities.calibration.gain import folds
from rigidities.calibration.methods import Full, Paper
from rigidities.losses import GaussianNLL
from rigidities.prediction.prediction import Prediction
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
        Full(noise="constant", ridge=0.3),
        Full(noise="constant", ridge=0.3, guard=False),
    ],
    ids=["nll", "bins", "full", "full unguarded"],
)
def test_the_parameters_of_a_last_layer_give_its_bars(method):
    net, train, valid, x = net_and_rows()
    layer = rg.LastLayerRigidity(net).fit(*train, keep_rows=0).calibrate(*valid, method=method)
    pr = rg.PredictionRigidity(net, subset=["2"]).fit(*train).calibrate(*valid, method=method)
    assert pr.calibration_report.steps == layer.calibration_report.steps
    assert pr.ridge == pytest.approx(layer.ridge, rel=1e-6)
    a, b = layer.predict(x), pr.predict(x)
    torch.testing.assert_close(b.std, a.std, rtol=1e-6, atol=0)
    torch.testing.assert_close(b.quantile(0.95), a.quantile(0.95), rtol=1e-6, atol=0)


def test_training_rows_are_left_out_as_those_of_a_last_layer_are():
    net, train, valid, x = net_and_rows()
    method = Full(noise="constant", ridge=0.3)
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


def test_several_outputs_share_one_calibration_and_each_has_its_scores():
    noise = torch.tensor([0.1, 0.28], dtype=F64)

    def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
        x, y = two_rows(count, seed)
        return x, two(W, x) + (y - two(W, x)) / 0.2 * noise

    pr = rg.PredictionRigidity(two, W).fit(*rows(300, 0)).calibrate(*rows(400, 1))
    assert pr.calibration.scale.shape == (1,)
    pr.conformalize(*rows(1000, 2))
    assert "Conformal intervals from 1000 rows" in str(pr.calibration_report)
    assert pr.summary().count("guaranteed") == 1
    x, y = rows(3000, 3)
    p = pr.predict(x)
    assert p.std.shape == y.shape
    low, high = p.interval(0.9, conformal=True)
    for output in range(2):
        inside = (low <= y)[:, output] & (y <= high)[:, output]
        assert float(inside.double().mean()) == pytest.approx(0.9, abs=0.025)


def test_the_outputs_of_a_sample_are_in_one_fold():
    outputs, samples = 5, 23
    number = torch.arange(outputs * samples)
    fold = folds(len(number), sample=number // outputs).reshape(samples, outputs)
    assert torch.equal(fold, (torch.arange(samples) % 5)[:, None].expand_as(fold))
    torn = folds(10, sample=torch.arange(10) // outputs)  # two samples: too few to leave any out
    assert torch.equal(torn, torch.arange(10) % 5)

    # With as many outputs as folds, a fold of rows i K + k would be a whole output.
    def five(w: Tensor, x: Tensor) -> Tensor:
        return (w[0] + w[1] * x)[:, None].expand(-1, 5)

    def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
        x, _ = line_rows(count, seed)
        noise = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed), dtype=F64)
        return x, five(W, x) + noise * torch.tensor([1.0, 1, 1, 1, 2.5], dtype=F64)

    method = Full(noise="constant", ridge=1.0)
    pr = rg.PredictionRigidity(five, W).fit(*rows(200, 0)).calibrate(*rows(200, 1), method=method)
    report = pr.calibration_report
    # Each fold has all outputs, so that one constant bar is as good on left-out rows as on all.
    constant = report.nll + report.gain
    assert constant == pytest.approx(report.nll_constant, abs=0.02)


@pytest.mark.parametrize("form", ["dual", "matrix-free"])
def test_at_a_fixed_ridge_all_forms_have_the_bars_of_the_dense_one(form):
    def bars(form: str) -> Tensor:
        pr = rg.PredictionRigidity(plane, torch.arange(1.0, 6.0, dtype=F64), ridge=0.1, form=form)
        method = Full(ridge=0.1, noise="constant")
        pr.fit(*plane_rows(400, 0)).calibrate(*plane_rows(400, 1), method=method)
        assert pr.ridge == 0.1 and pr.calibration_report.fixed
        x, _ = plane_rows(50, 2)
        return pr.predict(5 * x).std  # also unlike the training rows

    torch.testing.assert_close(bars(form), bars("dense"), rtol=1e-6, atol=0)


def test_training_rows_are_refused_after_a_weighted_fit(tmp_path):
    x, y = line_rows(60, 0)
    pr = rg.PredictionRigidity(line, W).fit(x, y, sample_weight=torch.ones(60, dtype=F64))
    path = tmp_path / "pr.safetensors"
    pr.save(path)
    for fitted in (pr, rg.PredictionRigidity.load(path, line, W)):
        refused("Calibrate without train=", fitted.calibrate, *line_rows(60, 1), train=(x, y))
        fitted.calibrate(*line_rows(60, 1))


def test_a_loaded_file_takes_the_function_of_its_groups(tmp_path):
    def side(batch: tuple[Tensor, ...] | Tensor) -> Tensor:
        x = batch[0] if isinstance(batch, tuple | list) else batch
        return (x > 0).long()

    pr = fitted_line().calibrate(*line_rows(300, 1), method="paper")
    path = tmp_path / "pr.safetensors"
    pr.save(path)
    refused("no groups", rg.PredictionRigidity.load, path, line, W, groups=side)
    pr.conformalize(*line_rows(600, 2), groups=side)
    pr.save(path)
    again = rg.PredictionRigidity.load(path, line, W, groups=side)
    x, _ = line_rows(50, 3)
    for end, expected in zip(again.predict(x).interval(), pr.predict(x).interval(), strict=True):
        torch.testing.assert_close(end, expected)


def test_the_batch_size_holds_in_every_pass():
    sizes: list[int] = []

    def watched(w: Tensor, x: Tensor) -> Tensor:
        if x.ndim:
            sizes.append(len(x))
        return line(w, x)

    pr = rg.PredictionRigidity(watched, W, batch_size=7).fit(*line_rows(40, 0))
    x, y = line_rows(30, 1)
    pr.calibrate(x, y, method="paper", early_stopped=False)
    pr.conformalize(x, y)
    pr.predict(x)
    pr.covariance(x, x)
    assert sizes and max(sizes) <= 7


def test_the_full_method_is_fitted_to_a_bounded_number_of_rows(monkeypatch):
    monkeypatch.setattr(rigidity, "MOST", 100)
    pr = fitted_line().calibrate(*line_rows(500, 1))
    assert pr.calibration_report.rows == 500 and pr.calibration_report.used <= 100
    pr.calibrate(*line_rows(500, 1), method="paper")
    assert pr.calibration_report.used == 500


def test_options_of_a_calibration_are_checked():
    pr = fitted_line()
    refused("calibrate needs held-out rows", pr.calibrate)
    message = "early_stopped must be True, False or None, got 'yes'."
    refused(message, pr.calibrate, *line_rows(60, 1), early_stopped="yes")
    refused("ridge must be a finite number", rg.PredictionRigidity, line, W, ridge=None)
    # A formula has no checkpoint; a module may have one.
    assert "early stopping" not in str(pr.calibrate(*line_rows(60, 1)).calibration_report)
    net, train, valid, _ = net_and_rows()
    module = rg.PredictionRigidity(net, subset=["2"]).fit(*train).calibrate(*valid, method="full")
    assert "early stopping" in str(module.calibration_report)


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


def test_a_picture_shows_the_guarantee_or_the_distribution(monkeypatch):
    pytest.importorskip("matplotlib")
    pr = fitted_line().calibrate(*line_rows(300, 1), method="paper")
    pr.conformalize(*line_rows(300, 2))
    asked = []
    plot = Prediction.plot

    def watched(self: Prediction, *args: object, **options: object) -> object:
        asked.append(options["conformal"])
        return plot(self, *args, **options)

    monkeypatch.setattr(Prediction, "plot", watched)
    for conformal in (None, True, False):
        pr.plot(*line_rows(40, 3), conformal=conformal)
    assert asked == [None, True, False]
