"""The public contract of `LastLayerRigidity`: its verbs, their options, and what they refuse."""

import copy
import inspect
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn

import rigidities as rg
from tests.support import derivative_oracle as dense
from tests.support.refusals import refused
from tests.support.tensors import close, normal

F64 = torch.float64
REQUIRED = inspect.Parameter.empty


@pytest.fixture
def fit(net):
    return rg.LastLayerRigidity(net.model).fit(net.train)


# --- signatures ---------------------------------------------------------------------------------

SIGNATURES = {
    "__init__": (
        {"model": REQUIRED},
        {
            "layer": None,
            "features": None,
            "forward": None,
            "target": None,
            "output": None,
            "batch_size": None,
            "progress": None,
            "process_group": None,
        },
    ),
    "fit": (
        {"x": REQUIRED, "y": None},
        {
            "loss": "mse",
            "sample_weight": None,
            "gradient_loss": None,
            "keep_rows": 1 << 16,
            "novelty": False,
            "precision": "auto",
        },
    ),
    "partial_fit": ({"x": REQUIRED, "y": None}, {}),
    "forget": ({"x": REQUIRED, "y": None}, {"check": True}),
    "calibrate": (
        {"x": None, "y": None},
        {"method": "full", "train": None, "early_stopped": None},
    ),
    "conformalize": ({"x": REQUIRED, "y": None}, {"groups": None}),
}
"""The parameters that may be given by position, and those by name alone, with their defaults."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_the_contract(name):
    by_position, by_name = {}, {}
    for parameter in inspect.signature(getattr(rg.LastLayerRigidity, name)).parameters.values():
        if parameter.name == "self":
            continue
        group = by_name if parameter.kind is parameter.KEYWORD_ONLY else by_position
        group[parameter.name] = parameter.default
    assert (by_position, by_name) == SIGNATURES[name]
    assert list(by_position) == list(SIGNATURES[name][0])


@pytest.mark.parametrize("name", ["predict", "gradient", "covariance", "propagate", "local"])
def test_no_other_method_asks_how_data_are_passed(name):
    parameters = inspect.signature(getattr(rg.LastLayerRigidity, name)).parameters
    assert not {"batch_size", "progress", "process_group"} & set(parameters)


METHODS = {
    rg.Full: {
        "noise": "features",
        "ridge": None,
        "support": None,
        "guard": True,
        "optimism": True,
    },
    rg.Paper: {
        "criterion": "nll",
        "ridge": None,
        "noise": "none",
        "distribution": "gaussian",
        "support": None,
    },
}


@pytest.mark.parametrize("kind", METHODS)
def test_methods_hold_their_own_options_with_plain_defaults(kind):
    parameters = inspect.signature(kind).parameters.values()
    assert {p.name: p.default for p in parameters} == METHODS[kind]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters)
    assert kind() == kind(**METHODS[kind])


def test_a_loss_of_derivatives_names_an_input_a_weight_and_a_target():
    parameters = inspect.signature(rg.GradientLoss).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "wrt": REQUIRED,
        "weight": 1.0,
        "target": None,
    }


def test_the_papers_name_is_the_same_class():
    assert rg.LLPR is rg.LastLayerRigidity


# --- what the verbs return ----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["full", "paper", rg.Full(), rg.Paper()])
def test_each_verb_returns_the_object_and_the_report_stands_in_it(net, method):
    uq = rg.LastLayerRigidity(net.model)
    assert uq.calibration_report is None
    assert uq.fit(*net.train) is uq
    assert uq.calibration_report is None
    assert uq.calibrate(*net.valid, method=method) is uq
    report = uq.calibration_report
    assert report.rows == len(net.valid[0]) and report.ridge == uq.ridge
    assert uq.conformalize(*net.test) is uq
    assert uq.calibration_report.ridge == report.ridge
    assert uq.calibration.conformal is not None
    assert uq.partial_fit(*net.test) is uq
    assert uq.forget(*net.test) is uq


@pytest.mark.parametrize(("name", "method"), [("full", rg.Full()), ("paper", rg.Paper())])
def test_names_stand_for_the_methods_with_their_defaults(net, fit, name, method):
    by_name, by_object = (
        fit.calibrate(net.valid, method=each).predict(net.test[0]) for each in (name, method)
    )
    assert torch.equal(by_name.std, by_object.std)
    default = fit.calibrate(net.valid).predict(net.test[0])
    assert torch.equal(default.std, by_name.std) == (name == "full")


def test_intervals_carry_the_guarantee_once_rows_were_kept_for_it(net, fit):
    fit.calibrate(net.valid)
    x, y = net.test
    before = fit.predict(x).interval(0.9)
    fit.conformalize(x, y)
    p = fit.predict(x)
    low, high = p.interval(0.9)
    held = ((y >= low) & (y <= high)).float().mean()
    assert 0.9 <= float(held) < 0.94  # of the very rows
    assert not torch.equal(low, before[0])
    for end, other in zip(p.interval(0.9, conformal=False), before, strict=True):
        assert torch.equal(end, other)


# --- what concerns every pass -------------------------------------------------------------------


class Recording(nn.Module):
    """A small net that records how many rows each call has; the library may call a copy of it."""

    sizes: ClassVar[list[int]] = []

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(4, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        self.sizes.append(len(x))
        return self.head(torch.tanh(self.hidden(x)))


PASSES = {
    "fit": lambda uq, x, y: uq.fit(x, y),
    "partial_fit": lambda uq, x, y: uq.partial_fit(x + 1, y),
    "forget": lambda uq, x, y: uq.forget(x, y),
    "calibrate": lambda uq, x, y: uq.calibrate(x + 2, y),
    "conformalize": lambda uq, x, y: uq.conformalize(x + 3, y),
    "predict": lambda uq, x, y: uq.predict(x),
    "predict_with_gradient": lambda uq, x, y: uq.predict_with_gradient(x),
    "gradient": lambda uq, x, y: uq.gradient(x),
    "features": lambda uq, x, y: uq.features(x),
    "local": lambda uq, x, y: uq.local(x),
    "novelty": lambda uq, x, y: uq.novelty(x),
    "covariance": lambda uq, x, y: uq.covariance(x),
    "propagate": lambda uq, x, y: uq.propagate(lambda out: out.sum(), x),
    "select": lambda uq, x, y: uq.select(x, 3),
    "refit": lambda uq, x, y: uq.refit(x + 4, y),
    "plot": lambda uq, x, y: uq.plot(x, y),
}


def recorded(batch_size):
    """A fitted and calibrated object of a model that records sizes, and its rows."""
    Recording.sizes.clear()
    torch.manual_seed(0)
    uq = rg.LastLayerRigidity(Recording(), batch_size=batch_size)
    x, y = torch.randn(50, 4), torch.randn(50, 1)
    uq.fit(x, y, novelty=True).calibrate(x + 2, y, method="paper")
    return uq, x, y


@pytest.mark.filterwarnings("ignore:The calibration rows have an RMS error:UserWarning")
@pytest.mark.parametrize("name", PASSES)
def test_the_batch_size_of_the_object_is_that_of_every_pass(name):
    uq, x, y = recorded(batch_size=8)
    assert max(Recording.sizes) == 8
    Recording.sizes.clear()
    PASSES[name](uq, x, y)
    assert max(Recording.sizes) == 8
    uq, x, y = recorded(batch_size=8)
    Recording.sizes.clear()
    uq.batch_size = 20  # it may be changed between calls
    PASSES[name](uq, x, y)
    assert max(Recording.sizes) == 20


def test_without_a_batch_size_a_loader_keeps_its_own():
    uq, x, _ = recorded(batch_size=None)
    assert max(Recording.sizes) == 50
    Recording.sizes.clear()
    uq.predict(torch.utils.data.DataLoader(x, batch_size=7))
    assert set(Recording.sizes) == {7, 1}


@pytest.mark.parametrize("name", ["fit", "partial_fit", "forget", "calibrate", "predict"])
def test_progress_of_the_object_is_that_of_every_pass(name, capfd):
    for progress in (None, False, True):
        uq, x, y = recorded(batch_size=8)
        uq.progress = progress
        PASSES[name](uq, x, y)
        shown = capfd.readouterr().err
        assert (name in shown) == bool(progress)


def test_a_refitted_object_keeps_how_data_are_passed():
    uq, x, y = recorded(batch_size=8)
    uq.progress = False
    uq.process_group = False
    new = uq.refit(x + 4, y)
    assert (new.batch_size, new.progress, new.process_group) == (8, False, False)


def test_a_loaded_object_takes_options_of_the_constructor(net, fit, tmp_path):
    fit.save(tmp_path / "uq")
    again = rg.LastLayerRigidity.load(tmp_path / "uq", net.model, batch_size=9, progress=False)
    assert (again.batch_size, again.progress, again.process_group) == (9, False, None)


@pytest.mark.parametrize("size", [0, -3, 2.5, "many"])
def test_a_batch_size_that_is_no_number_of_rows_is_refused(net, size):
    message = "batch_size must be a number of rows of at least 1"
    refused(message, rg.LastLayerRigidity, net.model, batch_size=size)
    uq = rg.LastLayerRigidity(net.model)
    uq.batch_size = size
    refused(message, uq.fit, net.train)
    refused("no fit yet", lambda: uq.gram)


# --- bad input ----------------------------------------------------------------------------------

WRONG_METHODS = {
    "a criterion": ("nll", r"got 'nll'\. Pass method=rigidities\.Paper\(criterion='nll'\)"),
    "another word": ("best", "got 'best'"),
    "a class": (rg.Full, r"Call it: Full\(\), with options noise=\.\.\., "),
    "the other class": (rg.Paper, r"Call it: Paper\(\), with options criterion=\.\.\., "),
    "a number": (3, "got 3"),
    "nothing": (None, "got None"),
    "a list": (["full"], r"got \['full'\]"),
}


@pytest.mark.parametrize("id", WRONG_METHODS)
def test_what_is_no_method_is_refused_with_what_is(net, fit, id):
    method, message = WRONG_METHODS[id]
    expected = r"method must be 'full', 'paper', or an object rigidities\.Full\(\.\.\.\) or "
    refused(f"{expected}.*{message}", fit.calibrate, net.valid, method=method)
    assert fit.calibration_report is None


WRONG_OPTIONS = {
    "criterion of Full": (partial(rg.Full, criterion="nll"), TypeError, "'criterion'"),
    "guard of Paper": (partial(rg.Paper, guard=True), TypeError, "'guard'"),
    "optimism of Paper": (partial(rg.Paper, optimism=False), TypeError, "'optimism'"),
    "noise of Full": (
        partial(rg.Full, noise="none"),
        ValueError,
        "noise of Full must be 'features', 'constant' or a function.*got 'none'.*Paper",
    ),
    "noise of Paper": (
        partial(rg.Paper, noise="features"),
        ValueError,
        r"fitted by Full\. Pass method=rigidities\.Full\(\)",
    ),
    "distribution of Paper": (
        partial(rg.Paper, distribution="mixture"),
        ValueError,
        r"fitted by Full\. Pass method=rigidities\.Full\(\)",
    ),
    "distribution of Full": (
        partial(rg.Full, distribution="gaussian"),
        TypeError,
        "unexpected keyword argument 'distribution'",
    ),
    "criterion": (
        partial(rg.Paper, criterion="crps"),
        ValueError,
        "criterion must be one of 'nll', 'bins', 'evidence', 'loo', got 'crps'",
    ),
    "guard": (partial(rg.Full, guard="q"), ValueError, "guard must be True or False, got 'q'"),
    "ridge": (partial(rg.Full, ridge=-1), ValueError, "not negative, or None to choose it, got -1"),
    "support": (partial(rg.Paper, support=(1, 0)), ValueError, r"low below high.*got \(1, 0\)"),
    "by position": (partial(rg.Paper, "nll"), TypeError, "positional argument"),
}


@pytest.mark.parametrize("id", WRONG_OPTIONS)
def test_an_option_that_a_method_does_not_have_is_refused_by_name(id):
    make, error, message = WRONG_OPTIONS[id]
    refused(message, make, error=error)


OPTIONS_OF_METHODS = [
    "criterion",
    "ridge",
    "noise",
    "distribution",
    "support",
    "guard",
    "conformal",
]


@pytest.mark.parametrize("option", OPTIONS_OF_METHODS)
def test_options_of_a_method_are_not_options_of_the_verb(net, fit, option):
    refused(f"'{option}'", fit.calibrate, net.valid, error=TypeError, **{option: None})


def test_verbs_in_the_wrong_order_name_the_one_that_is_missing(net):
    uq = rg.LastLayerRigidity(net.model)
    refused(r"no fit yet\. Call fit\(x, y\) first", uq.calibrate, *net.valid)
    refused(r"no fit yet\. Call fit\(x, y\) first", uq.conformalize, *net.test)
    uq.fit(*net.train)
    refused(r"no calibration yet: call calibrate\(x, y\) first", uq.conformalize, *net.test)
    assert uq.calibration_report is None


def test_a_stale_calibration_is_not_conformalized(net, fit):
    fit.calibrate(*net.valid).partial_fit(net.valid[0] + 1, net.valid[1])
    report = fit.calibration_report
    assert report.stale
    refused(r"[Cc]all calibrate\(x, y\)", fit.conformalize, *net.test)
    assert fit.calibration_report is report
    fit.calibrate(*net.valid).conformalize(*net.test)


@pytest.mark.parametrize("loss", ["pos", 0, {"wrt": "pos"}, rg.GradientLoss])
def test_a_loss_of_derivatives_is_an_object(net, loss):
    uq = rg.LastLayerRigidity(net.model)
    message = r"gradient_loss must be a rigidities\.GradientLoss, such as GradientLoss\(\"pos\""
    refused(message, uq.fit, net.train, gradient_loss=loss, error=TypeError)
    refused("no fit yet", lambda: uq.gram)


def test_derivatives_that_are_only_calibrated_need_their_target():
    refused(
        "weight 0 only calibrates derivatives, and needs their target=",
        partial(rg.GradientLoss, "pos", weight=0),
    )


# --- derivatives that were not trained ----------------------------------------------------------


def run(model, x):
    return model(x)


def test_a_weight_of_zero_calibrates_derivatives_and_leaves_the_gram_alone():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x, y, x_valid, y_valid = (normal(30, n, seed=i) for i, n in enumerate((3, 1, 3, 1)))
    slopes = normal(30, 3, seed=9)
    plain = rg.LastLayerRigidity(model).fit(x, y)
    uq = rg.LastLayerRigidity(model)
    uq.fit(x, y, gradient_loss=rg.GradientLoss(0, weight=0, target=lambda batch: slopes))
    assert torch.equal(uq.gram.matrix, plain.gram.matrix)
    assert torch.equal(uq.gram.cross, plain.gram.cross)
    uq.calibrate(x_valid, y_valid, method=rg.Paper(ridge=0.1))
    # alpha_g^2 is the mean of r^2 / q over the derivatives.
    found = dense.derivatives(model, run, ["2.weight", "2.bias"], x_valid).of_each_row()
    g = found.features.reshape(90, 6)
    inverse = torch.linalg.inv(uq.gram.matrix + 0.1 * torch.eye(6, dtype=F64))
    q = torch.einsum("nd,de,ne->n", g, inverse, g)
    residuals = slopes.reshape(-1) - found.slope.reshape(-1)
    scale = (residuals.square() / q).mean().sqrt()
    close(uq.calibration_report.gradient_scale[0], scale)
    close(uq.gradient(x_valid).std.reshape(-1), scale * q.sqrt())
    plain.calibrate(x_valid, y_valid, method=rg.Paper(ridge=0.1))
    assert plain.calibration_report.gradient_scale is None
    close(plain.gradient(x_valid).std.reshape(-1), plain.scale * q.sqrt())


# --- files --------------------------------------------------------------------------------------


def twice(batch):
    return torch.full((len(batch[0]),), 2.0)


def squared(prediction, target):
    return 0.5 * (prediction - target).square()


@pytest.mark.parametrize(
    "functions",
    [{"sample_weight": twice}, {"loss": squared}, {"loss": squared, "sample_weight": twice}],
    ids=["weight", "loss", "both"],
)
def test_functions_of_the_fit_are_given_again_to_load(net, functions, tmp_path):
    uq = rg.LastLayerRigidity(net.model).fit(*net.train, **functions)
    uq.calibrate(*net.valid, method="paper").save(tmp_path / "uq")
    load = partial(rg.LastLayerRigidity.load, tmp_path / "uq", net.model)
    bare = load()
    assert torch.equal(bare(net.test[0])[1], uq(net.test[0])[1])
    for call in (bare.partial_fit, bare.forget, bare.calibrate):
        refused(r"load\(path, model, loss=\.\.\., sample_weight=\.\.\.", call, *net.test)
    again = load(**{"loss": "mse", **functions})
    close(again.partial_fit(*net.test).gram.matrix, uq.partial_fit(*net.test).gram.matrix)
    again.calibrate(*net.valid, method="paper")
    close(again.scale, uq.calibrate(*net.valid, method="paper").scale)


def test_a_loss_that_a_file_holds_cannot_be_replaced(net, fit, tmp_path):
    fit.save(tmp_path / "uq")
    load = partial(rg.LastLayerRigidity.load, tmp_path / "uq", net.model)
    for functions in ({"loss": "huber"}, {"sample_weight": twice}):
        refused("loss of this fit is already known.*call fit again", load, **functions)
    refused("must be a rigidities.GradientLoss", load, gradient_loss="pos", error=TypeError)


# --- what a review found ------------------------------------------------------------------------


def test_conformal_rows_that_calibrated_the_bars_are_said(net):
    uq = rg.LastLayerRigidity(net.model).fit(net.train).calibrate(net.valid)
    with pytest.warns(UserWarning, match=r"100 % of the conformal rows also calibrated the bars"):
        uq.conformalize(net.valid)
    assert "also calibrated the bars" in str(uq.calibration_report)
    uq.calibrate(net.valid).conformalize(net.test)
    assert "also calibrated the bars" not in str(uq.calibration_report)


def test_few_or_exact_conformal_rows_get_scores(net):
    uq = rg.LastLayerRigidity(net.model).fit(net.train).calibrate(net.valid, method="paper")
    x = net.test[0]
    uq.conformalize(x[:1], net.test[1][:1])  # a single row
    with torch.no_grad():
        exact = net.model(x)
    uq.conformalize(x, exact)  # rows that are predicted exactly
    refused("at least one", uq.conformalize, [])


def test_a_noise_function_is_needed_again_for_conformal_rows_of_a_loaded_fit(net, tmp_path):
    def noise(batch):
        rows = batch[0] if isinstance(batch, tuple) else batch
        return 1 + rows[:, 0] ** 2

    uq = rg.LastLayerRigidity(net.model).fit(net.train)
    uq.calibrate(net.valid, method=rg.Paper(noise=noise)).save(tmp_path / "uq")
    again = rg.LastLayerRigidity.load(tmp_path / "uq", net.model)
    refused(r"noise of this calibration was a function.*load\(", again.conformalize, net.test)
    again = rg.LastLayerRigidity.load(tmp_path / "uq", net.model, noise=noise)
    again.conformalize(net.test)
    uq.conformalize(net.test)
    x = [(net.test[0],)]
    for mine, theirs in zip(uq.predict(x).interval(), again.predict(x).interval(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_loaded_fit_takes_the_whole_of_its_functions_or_none(net, tmp_path):
    def weight(batch):
        return batch[0][:, 0].abs() + 0.5

    path = tmp_path / "uq"
    uq = rg.LastLayerRigidity(net.model).fit(net.train, loss="huber", sample_weight=weight)
    uq.save(path)
    load = rg.LastLayerRigidity.load
    refused("also loss=", load, path, net.model, sample_weight=weight)
    again = load(path, net.model, loss="huber", sample_weight=weight)
    torch.testing.assert_close(
        again.partial_fit(net.test).gram.matrix, uq.partial_fit(net.test).gram.matrix
    )
    rg.LastLayerRigidity(net.model).fit(net.train, loss="huber").save(path)
    load(path, net.model, loss="huber")  # the file holds it: the same is accepted
    refused("already known: .*Huber", load, path, net.model, loss="mse")


def test_the_warning_of_a_stale_calibration_speaks_of_the_guarantee(net):
    uq = rg.LastLayerRigidity(net.model).fit(net.train).calibrate(net.valid).conformalize(net.test)
    with torch.no_grad():
        more = net.test[0] + 1, net.test[1] + 1
    uq.partial_fit(more)
    with pytest.warns(UserWarning, match=r"guarantee of the intervals is void too"):
        uq.predict(net.test[0])


def test_a_copy_leaves_the_group_of_processes_behind(net):
    uq = rg.LastLayerRigidity(net.model, process_group=object()).eval()
    assert copy.deepcopy(uq).process_group is None
    assert (
        copy.deepcopy(rg.LastLayerRigidity(net.model, process_group=False)).process_group is False
    )


def test_values_that_cannot_be_are_refused_where_they_are_given(net):
    with pytest.raises(ValueError, match="batch_size must be a number of rows"):
        rg.LastLayerRigidity(net.model, batch_size=0)
    with pytest.raises(TypeError, match=r"sample_weight must be callable.*got Tensor"):
        rg.LastLayerRigidity(net.model).fit(net.train, sample_weight=torch.ones(len(net.train[0])))
    with pytest.raises(ValueError, match="Pass method='full'"):
        rg.LastLayerRigidity(net.model).fit(net.train).calibrate(net.valid, method="auto")
