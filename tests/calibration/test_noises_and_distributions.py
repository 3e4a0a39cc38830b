"""Another noise or distribution is one class: it calibrates, predicts, saves and reloads by both
façades."""

import math
import pickle
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities import losses
from rigidities.calibration.methods import Paper
from rigidities.prediction import distribution as distributions
from rigidities.prediction import noise as noises
from tests.support.refusals import refused

F64 = torch.float64


class Relative(noises.Noise):
    """A standard deviation in proportion to the prediction."""

    name = "relative"

    @classmethod
    def shape(cls, mean, features):
        return mean.square()


@dataclass(frozen=True)
class Laplace(distributions.Distribution):
    """Of unit variance, times a setting that files must keep."""

    name = "laplace"
    shift: float = 0.0

    def quantile(self, level):
        return (
            self.shift - math.sqrt(0.5) * (level - 0.5).sign() * (1 - 2 * (level - 0.5).abs()).log()
        )

    def log_density(self, z):
        return -math.sqrt(2) * (z - self.shift).abs() - 0.5 * math.log(2)

    def sample(self, like, n, generator):
        return self.quantile(torch.rand((n, *like.shape), generator=generator).to(like))


@pytest.fixture
def registered(monkeypatch):
    for known, kind in ((noises.NOISES, Relative), (distributions.DISTRIBUTIONS, Laplace)):
        monkeypatch.setitem(known, kind.name, None)  # and out again afterwards
    noises.register_noise(Relative)
    distributions.register_distribution(Laplace)


def rows(n, seed):
    """y = 3 + x . w, with Laplacian errors of a tenth of y."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 3, generator=generator, dtype=F64) * 4
    mean = 3 + x @ W
    z = Laplace().sample(mean, 1, generator)[0]
    return x, (mean + 0.1 * mean * z)[:, None]


W = torch.tensor([1.0, 2.0, -0.5], dtype=F64)


class LastLayer:
    """The façade of a model's readout."""

    def __init__(self):
        self.model = nn.Linear(3, 1, dtype=F64)
        with torch.no_grad():
            self.model.weight.copy_(W)
            self.model.bias.fill_(3.0)
        self.uq = rg.LastLayerRigidity(self.model).fit(rows(200, 0))

    def calibrate(self, data, **options):
        return self.uq.calibrate(data, method=Paper(**options)).calibration_report

    def load(self, path):
        return rg.LastLayerRigidity.load(path, self.model)


class AnyRegressor:
    """The façade of any function of parameters."""

    def __init__(self):
        self.params = torch.cat([W, torch.tensor([3.0], dtype=F64)])
        self.uq = rg.PredictionRigidity(self.line, self.params).fit(*rows(200, 0))

    @staticmethod
    def line(w, x):
        return x @ w[:3, None] + w[3]

    def calibrate(self, data, **options):
        return self.uq.calibrate(*data, method=Paper(**options)).calibration_report

    def load(self, path):
        return rg.PredictionRigidity.load(path, self.line, self.params)


FACADES = pytest.mark.parametrize("facade", [LastLayer, AnyRegressor])
X = rows(5, 9)[0]


@pytest.mark.thorough
@FACADES
def test_a_new_noise_and_a_new_distribution_need_a_class_each_and_nothing_else(
    facade, registered, tmp_path
):
    made = facade()
    report = made.calibrate(rows(4000, 1), noise="relative", distribution=Laplace(shift=0.01))
    p, level = made.uq.predict(X), float(made.uq.noise_model.level)
    assert level**0.5 == pytest.approx(0.1, rel=0.05)
    torch.testing.assert_close(p.noise, level * p.mean.square())
    assert (
        p.distribution
        == made.uq.distribution
        == report.calibration.distribution
        == Laplace(shift=0.01)
    )
    torch.testing.assert_close(p.variance, p.epistemic + p.noise)
    x, y = rows(4000, 2)
    low, high = made.uq.predict(x).interval(0.9)
    assert float(((y >= low) & (y <= high)).double().mean()) == pytest.approx(0.9, abs=0.02)
    assert "laplace" in str(report)
    made.uq.save(tmp_path / "uq.safetensors")
    again = made.load(tmp_path / "uq.safetensors")
    assert type(again.noise_model) is Relative and again.distribution == p.distribution
    assert str(again.calibration_report) == str(report)
    for one, other in zip(again.predict(X).interval(0.8), p.interval(0.8), strict=True):
        torch.testing.assert_close(one, other)


@FACADES
def test_the_numerical_scale_of_a_distribution_minimises_its_nll(facade, registered):
    made, data = facade(), rows(300, 3)
    report = made.calibrate(data, distribution="laplace", ridge=1e-3)
    p = made.uq.predict(data[0])
    nll = -p.log_prob(data[1]).mean()
    assert report.nll == pytest.approx(float(nll), rel=1e-9)
    for factor in (0.999, 1.001):
        other = rg.Prediction(
            p.mean, factor * p.epistemic, p.noise, p.rigidity, distribution=p.distribution
        )
        assert -other.log_prob(data[1]).mean() > nll


@FACADES
@pytest.mark.parametrize(
    "distribution", [distributions.StudentT(3.0), distributions.StudentT([4.0]), "student-t"]
)
def test_a_heavy_distribution_is_calibrated_by_its_likelihood_and_kept_in_files(
    facade, distribution, tmp_path
):
    made, data = facade(), rows(300, 3)
    report = made.calibrate(data, distribution=distribution, noise="constant", ridge=1e-3)
    p = made.uq.predict(data[0])
    nll = -p.log_prob(data[1]).mean()
    assert report.nll == pytest.approx(float(nll), rel=1e-9)
    for factor in (0.99, 1.01):
        parts = (factor * p.epistemic, factor * p.noise, p.rigidity)
        assert (
            -rg.Prediction(p.mean, *parts, distribution=p.distribution).log_prob(data[1]).mean()
            > nll
        )
    made.uq.save(tmp_path / "uq.safetensors")
    again = made.load(tmp_path / "uq.safetensors").predict(data[0])
    assert again.distribution == p.distribution and type(again.distribution) is type(p.distribution)
    torch.testing.assert_close(again.quantile(0.9), p.quantile(0.9))


@FACADES
def test_a_file_with_an_unknown_noise_or_distribution_is_refused_with_the_version_to_install(
    facade, registered, tmp_path
):
    for name, options in (
        ("noise", {"noise": "relative"}),
        ("distribution", {"distribution": "laplace"}),
    ):
        made = facade()
        made.calibrate(rows(50, 1), **options)
        made.uq.save(tmp_path / "uq.safetensors")
        known = {"noise": noises.NOISES, "distribution": distributions.DISTRIBUTIONS}[name]
        kept = known.pop(options[name])
        with pytest.raises(ValueError, match=rf"{name} '{options[name]}'.*register.*>={VERSION}"):
            made.load(tmp_path / "uq.safetensors")
        known[options[name]] = kept


VERSION = rg.__version__.replace(".", r"\.")


@FACADES
def test_unknown_names_and_unfit_criteria_are_refused_and_change_nothing(facade, registered):
    made = facade()
    made.calibrate(rows(50, 1))
    before = made.uq.calibration
    for options, match in (
        ({"noise": "pink"}, "Unknown noise 'pink'. Known: none, constant, bayes"),
        ({"noise": "features"}, "are fitted by Full"),
        ({"distribution": "cauchy"}, "Unknown distribution 'cauchy'. Known: gaussian"),
        ({"criterion": "crps"}, "criterion must be one of 'nll', 'bins', 'evidence', 'loo'"),
    ):
        with pytest.raises(ValueError, match=match):
            made.calibrate(rows(50, 1), **options)
    assert made.uq.calibration is before
    made.calibrate(rows(400, 1), criterion="bins", distribution="laplace")
    assert made.uq.distribution == Laplace()


class Nameless(noises.ConstantNoise):
    """Without a name of its own."""


@FACADES
@pytest.mark.parametrize("options", [{"noise": Nameless}, {"distribution": Laplace}], ids=str)
def test_what_files_do_not_know_is_not_saved_under_another_name(facade, options, tmp_path):
    made = facade()
    made.calibrate(rows(50, 1), **options)
    with pytest.raises(ValueError, match=r"A file cannot store.*register it \(register_"):
        made.uq.save(tmp_path / "uq.safetensors")


@FACADES
@pytest.mark.parametrize("ridge", [0.5, np.float32(0.5), torch.tensor(0.5)])
def test_a_ridge_is_any_number_and_said_to_be_fixed(facade, ridge):
    made = facade()
    report = made.calibrate(
        rows(60, 1),
        ridge=ridge,
        noise=made.uq.noise_model,
        distribution=distributions.Gaussian,
    )
    assert made.uq.ridge == 0.5 and "0.5 (fixed)" in str(report)
    assert made.calibrate(rows(60, 1)).fixed is False
    with pytest.raises(ValueError, match="or None to choose it, got 'best'"):
        made.calibrate(rows(60, 1), ridge="best")


@FACADES
def test_both_facades_speak_alike(facade):
    made = facade()
    assert made.uq.calibration_report is None and made.uq.noise_model.name == "none"
    assert (
        made.uq.distribution == distributions.Gaussian() and float(made.uq.noise_model.level) == 0
    )
    report = made.calibrate(rows(60, 1), noise="constant")
    assert made.uq.calibration_report is report and made.uq.ridge == report.ridge
    assert float(made.uq.scale) == float(report.scale)
    assert made.uq.noise_model.name == "constant" and torch.equal(
        made.uq.noise_model.level, report.noise_level
    )
    assert made.calibrate(rows(60, 1)).ridge == made.calibrate(rows(60, 1), ridge=None).ridge
    assert made.calibrate(rows(60, 1), ridge=0.5).ridge == made.uq.ridge == 0.5


def test_the_facades_choose_the_same_for_a_linear_model():
    one, other = LastLayer(), AnyRegressor()
    for options in ({}, {"noise": "constant"}, {"criterion": "bins", "noise": "bayes"}):
        a, b = (made.calibrate(rows(60, 1), **options) for made in (one, other))
        assert a.ridge == pytest.approx(b.ridge, rel=1e-6)
        assert a.nll == pytest.approx(b.nll) and a.nll_constant == pytest.approx(b.nll_constant)
        torch.testing.assert_close(one.uq.predict(X).std, other.uq.predict(X).std)


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda: rg.LastLayerRigidity(nn.Linear(3, 1)), r"fit\(x, y\)"),
        (lambda: rg.PredictionRigidity(AnyRegressor.line, torch.ones(4)), r"fit\(x, y\)"),
    ],
)
def test_what_needs_a_fit_says_so_alike(make, call):
    for ask in (lambda uq: uq.predict(X), lambda uq: uq.noise_model, lambda uq: uq.save("nowhere")):
        with pytest.raises(ValueError, match=f"There is no fit yet. Call {call} first.") as told:
            ask(make())
        assert str(pickle.loads(pickle.dumps(told.value))) == str(told.value)


# --- weights ------------------------------------------------------------------------------------


def weighed(noise, loss="mse", unit=100.0):
    """A linear model whose rows have noise 1 / c, with weights c about a unit."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(600, 3, generator=generator, dtype=F64)
    c = unit * torch.exp(torch.randn(600, 1, generator=generator, dtype=F64))
    model = nn.Linear(3, 1, dtype=F64)
    y = model(x).detach() + torch.randn(600, 1, generator=generator, dtype=F64) / c.sqrt()
    uq = rg.LastLayerRigidity(model, forward=lambda m, b: m(b[0]), target=lambda b: b[1])
    uq.fit([(x[:300], y[:300], c[:300])], loss=loss, sample_weight=lambda b: b[2])
    valid = [(x[300:], y[300:], c[300:])]
    return uq, uq.calibrate(valid, method=Paper(noise=noise)).calibration_report, valid


@pytest.mark.parametrize("noise", ["constant", "bayes", Relative])
def test_a_row_without_a_weight_gets_the_typical_noise(noise, tmp_path):
    uq, report, valid = weighed(noise)
    c = valid[0][2]
    typical = 1 / (1 / c).mean()
    torch.testing.assert_close(uq.calibration.weight, typical[None])
    plain, own = uq.predict(valid), uq.predict(valid, sample_weight=lambda b: b[2])
    torch.testing.assert_close(own.noise, plain.noise * typical / c)
    torch.testing.assert_close(own.epistemic, plain.epistemic)
    if noise == "bayes":
        torch.testing.assert_close(own.noise, uq.scale.square() / c)
    if noise == "constant":  # what the rows of the calibration have in the mean
        torch.testing.assert_close(own.noise.mean(), report.noise_level[0])
        assert 0.5 < float(own.noise.mean() / (1 / c).mean()) < 2
    assert f"for a weight of {float(typical):.4g}, which is assumed for rows" in str(report)
    if noise is not Relative:
        uq.save(tmp_path / "uq")
        options = {"forward": lambda m, b: m(b[0]), "target": lambda b: b[1]}
        again = rg.LastLayerRigidity.load(tmp_path / "uq", uq.model, **options)
        assert torch.equal(again.predict(valid).std, plain.std)
        weight = {"sample_weight": lambda b: b[2]}
        assert torch.equal(again.predict(valid, **weight).std, own.std)
        assert str(again.calibration_report) == str(report)


def test_without_noise_weights_leave_no_word():
    uq, report, valid = weighed("none")
    assert not uq.calibration.weighted and "weight" not in str(report)
    assert "weight" not in uq.calibration.header()
    assert torch.equal(uq.predict(valid, sample_weight=lambda b: b[2]).std, uq.predict(valid).std)


WRONG = r"finite and not negative, got .*weight 0"


@pytest.mark.parametrize("ask", ["fit", "partial_fit", "calibrate", "predict"])
@pytest.mark.parametrize(
    ("value", "message"),
    [(torch.nan, WRONG), (torch.inf, WRONG), (-1.0, WRONG), (None, "sample_weight returned None")],
)
def test_weights_that_are_none_are_refused(ask, value, message):
    uq, report, valid = weighed("constant")
    wrong = valid[0][2].clone()
    wrong[5] = 0.0 if value is None else value
    learnt = uq._fit.require_state()
    weighing = replace(learnt.require_weighing(), sample_weight=lambda b: b[3])
    uq._fit.state = replace(learnt, weighing=weighing)
    batches = [(*valid[0], None if value is None else wrong)]
    options = {"sample_weight": lambda b: b[3]} if ask in {"fit", "predict"} else {}
    refused(message, getattr(uq, ask), batches, **options)
    assert uq.calibration_report is report


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -1.0])
def test_weights_of_a_loss_that_are_none_are_refused_by_calibrate(value):
    class Weighted(losses.MSE):
        weight = staticmethod(lambda batch: batch[-1])

    uq, _, valid = weighed("constant", Weighted())
    wrong = torch.ones_like(valid[0][1])
    wrong[5] = value
    refused(WRONG, uq.calibrate, [(*valid[0], wrong)])
