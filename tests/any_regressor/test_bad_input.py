"""What `PredictionRigidity` refuses, what it warns of, and what it leaves alone."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.calibration.methods import Paper
from rigidities.losses import GaussianNLL
from tests.support import rigidity_cases as cases
from tests.support import rigidity_oracle as oracle
from tests.support.refusals import refused
from tests.support.rigidity_cases import X1, X2
from tests.support.rigidity_oracle import F64
from tests.support.tensors import line

W = torch.tensor([1.0, 2.0], dtype=F64)
NAN = torch.tensor(torch.nan, dtype=F64)


def fit(f=line, params=W, x=X1, y=None, weight=None, **options):
    target = f(params, x).detach() if y is None else y
    return rg.PredictionRigidity(f, params, **options).fit(x, target, sample_weight=weight)


def replaced(tensor, index, value):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


Y = line(W, X1)


# --- refusals -------------------------------------------------------------------------------------

CONSTRUCTIONS = {
    "no parameters": (lambda: rg.PredictionRigidity(line), ValueError, "fitted parameters"),
    "a module and parameters": (
        lambda: rg.PredictionRigidity(nn.Linear(1, 1), W),
        ValueError,
        "leave params out",
    ),
    "no function": (lambda: rg.PredictionRigidity(3, W), TypeError, "int"),
    "unknown loss": (lambda: rg.PredictionRigidity(line, W, "l2"), ValueError, "l2.*Known"),
    "unknown hessian": (
        lambda: rg.PredictionRigidity(line, W, hessian="fisher"),
        ValueError,
        "fisher",
    ),
    "unknown form": (lambda: rg.PredictionRigidity(line, W, form="qr"), ValueError, "qr.*Known"),
    "negative ridge": (lambda: rg.PredictionRigidity(line, W, ridge=-1.0), ValueError, "ridge"),
    "NaN ridge": (lambda: rg.PredictionRigidity(line, W, ridge=np.nan), ValueError, "ridge"),
    "no tolerance": (lambda: rg.PredictionRigidity(line, W, tolerance=0), ValueError, "tolerance"),
    "integer parameters": (
        lambda: rg.PredictionRigidity(line, torch.tensor([1, 2])),
        ValueError,
        "floating-point",
    ),
    "complex parameters": (
        lambda: rg.PredictionRigidity(line, {"w": W.to(torch.complex128)}),
        TypeError,
        "complex",
    ),
    "NaN in the parameters": (
        lambda: rg.PredictionRigidity(line, replaced(W, 0, NAN)),
        ValueError,
        "NaN",
    ),
    "a subset that names nothing": (
        lambda: rg.PredictionRigidity(line, {"w": W}, subset="v"),
        ValueError,
        "'v'.*There are: w",
    ),
    "a subset that selects nothing": (
        lambda: rg.PredictionRigidity(line, {"w": W}, subset=lambda name: False),
        ValueError,
        "There are: w",
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_a_construction_that_makes_no_sense_is_refused(name):
    construct, kind, message = CONSTRUCTIONS[name]
    refused(message, construct, error=kind)


def wave(w, x):
    return w[0] * torch.sin(x) + w[1] * torch.sin(x)


def halves(w, x):
    return w[0] + w[1] * x.clamp(min=0)


FITS = {
    "one number for the batch": (lambda: fit(lambda w, x: line(w, x).sum(), y=Y), "batched.*14"),
    "outputs of another length": (lambda: fit(lambda w, x: line(w, x)[:-1], y=Y), "batched.*13"),
    "outputs that are no torch": (
        lambda: fit(lambda w, x: torch.as_tensor(line(w, x).detach().numpy()), y=Y),
        "does not depend on its parameters",
    ),
    "a function of single samples": (
        lambda: fit(lambda w, x: line(w, x[0]), y=Y),
        r"torch\.func\.vmap",
    ),
    "samples that see each other": (
        lambda: fit(lambda w, x: w[0] + w[1] * (x - x.mean())),
        "depends on the rest of its batch",
    ),
    "samples that see each other, small": (
        lambda: fit(lambda w, x: 1e-6 * (w[0] + w[1] * (x - x.mean()))),
        "depends on the rest of its batch",
    ),
    "targets of another length": (lambda: fit(y=Y[:-1]), "x has 14 rows and y has 13"),
    "targets of another shape": (lambda: fit(y=torch.stack([Y, Y], 1)), r"\(14, 2\)"),
    "transposed targets": (
        lambda: fit(lambda w, x: w.reshape(2, 3) * x[:, None, None], torch.ones(6, dtype=F64),
                    y=torch.ones(14, 3, 2, dtype=F64)),
        r"\(14, 2, 3\).*\(14, 3, 2\)",
    ),
    "NaN in the inputs": (
        lambda: fit(x=replaced(X1, 3, NAN), y=Y),
        r"1 of 14 rows of a batch \(3\).*Leave these rows out",
    ),
    "NaN in the first input": (
        lambda: fit(x=replaced(X1, 0, NAN), y=Y),
        r"1 of 14 rows of a batch \(0\)",
    ),
    "NaN in the targets": (lambda: fit(y=replaced(Y, 3, NAN)), "not finite.*sample_weight of 0"),
    "NaN in the targets, Huber": (lambda: fit(y=replaced(Y, 3, NAN), loss="huber"), "not finite"),
    "no data": (lambda: fit(x=X1[:0], y=Y[:0]), "no data"),
    "no batches": (lambda: rg.PredictionRigidity(line, W).fit([]), "no data"),
    "a single number": (lambda: fit(x=torch.tensor(1.0), y=torch.tensor([1.0])), "batched"),
    "no targets where they are needed": (
        lambda: rg.PredictionRigidity(line, W, "huber").fit(X1),
        "needs targets",
    ),
    "no targets for the exact Hessian": (
        lambda: rg.PredictionRigidity(line, W, hessian="exact").fit(X1),
        "needs targets",
    ),
    "weights of another length": (lambda: fit(weight=torch.ones(3)), "one entry per sample, 14"),
    "NumPy weights of another length": (lambda: fit(weight=np.ones(30)), "one entry per sample"),
    "one weight for all": (lambda: fit(weight=torch.tensor(2.0)), "one entry per sample"),
    "a callable with one weight": (lambda: fit(weight=lambda b: torch.ones(1)), "per sample"),
    "weights per output of a single output": (
        lambda: fit(weight=torch.ones(14, 3)),
        r"\(14, 3\)",
    ),
    "weights per output of a loss that couples them": (
        lambda: fit(lambda w, x: torch.stack([line(w, x), w[0] * x], 1), weight=torch.ones(14, 2),
                    loss=lambda y, t: (y - t).sum(1) ** 2 + (y[:, 0] - t[:, 0]) ** 2),
        r"\(14, 2\)",
    ),
    "variances per output of a single output": (
        lambda: fit(loss=GaussianNLL(lambda batch: torch.ones(14, 2))),
        r"\(14, 2\)",
    ),
    "variances of more targets than there are": (
        lambda: fit(loss=GaussianNLL(torch.ones(3))),
        "3",
    ),
    "negative weights": (lambda: fit(weight=-torch.ones(14)), "not negative"),
    "NaN weights": (lambda: fit(weight=replaced(torch.ones(14), 2, torch.nan)), "finite"),
    "a concave loss": (
        lambda: fit(y=Y + 3, loss=lambda y, t: torch.log1p((y - t) ** 2)),
        "concave.*hessian='exact'",
    ),
    "a mean loss": (lambda: fit(loss=lambda y, t: ((y - t) ** 2).mean()), "one value per sample"),
    "a mean loss, exact": (
        lambda: fit(loss=lambda y, t: ((y - t) ** 2).mean(), hessian="exact"),
        "one value per sample",
    ),
    "a loss over the batch size, exact": (
        lambda: fit(y=Y + X1**2 / 100, loss=lambda y, t: (y - t) ** 2 / len(y), hessian="exact"),
        "not divided by the batch size",
    ),
    "a variance of zero": (lambda: fit(loss=GaussianNLL(0.0)), "above zero"),
    "a regulariser that is no tensor": (lambda: fit(regulariser=lambda p: 0.0), "one number"),
    "a regulariser of many numbers": (lambda: fit(regulariser=lambda p: p), "one number"),
    "fewer rows than parameters": (lambda: fit(x=X1[:1]), "singular.*ridge > 0"),
    "parameters that act alike": (lambda: fit(wave), "singular.*ridge > 0"),
    "parameters that act alike, exact": (lambda: fit(wave, hessian="exact"), "singular.*ridge > 0"),
    "parameters without influence on the data": (
        lambda: fit(lambda p, x: p["a"] + p["b"] * x.clamp(min=0), {"a": W[0], "b": W[1]},
                    x=-X1.abs()),
        "No training prediction depends on b",
    ),
    "an entry without influence on the data": (
        lambda: fit(halves, x=-X1.abs()),
        r"No training prediction depends on params \(entries? \d",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The parameters are not a minimum")
@pytest.mark.parametrize("name", FITS)
def test_a_fit_that_cannot_be_is_refused_by_its_cause(name):
    attempt, message = FITS[name]
    refused(message, attempt)


@pytest.mark.filterwarnings("ignore:The parameters are not a minimum")
def test_an_indefinite_hessian_names_its_lowest_eigenvalue_and_a_ridge_above_it_helps():
    def f(w, x):
        return w[0] ** 2 * x + w[1]

    params, y = torch.tensor([0.1, 0.0], dtype=F64), 3 * X1  # w[0] would rather be larger
    flat = oracle.flat(f, params)
    h = oracle.exact_hessian(flat, (X1,), y, oracle.LOSSES["mse"])
    lowest = float(torch.linalg.eigvalsh(h)[0])
    assert lowest < -1
    with pytest.raises(ValueError, match=f"indefinite.*{lowest:.3g}.*ridge > {-lowest:.3g}"):
        fit(f, params, y=y, hessian="exact")
    pr = fit(f, params, y=y, hessian="exact", ridge=1 - lowest).set_scale(1.0)
    expected = oracle.variance(oracle.ridged(h, 1 - lowest), oracle.jacobian(flat, X1))[:, 0]
    torch.testing.assert_close(pr.variance(X1), expected)
    refused("ridge", pr.calibrate, X1, y, method=Paper(ridge=0.1))
    assert pr.ridge == 1 - lowest
    assert pr.calibrate(X1, y, method="paper").calibration_report.ridge > -lowest


@pytest.mark.filterwarnings("ignore:The parameters are not a minimum")
@pytest.mark.parametrize("form", ["dense", "matrix-free"])
def test_an_indefinite_regulariser_is_refused(form):
    def regulariser(params):
        return -2.5 * sum((p**2).sum() for p in params.values())

    model = cases.CASES["net"].f
    pr = rg.PredictionRigidity(model, ridge=0.1, regulariser=regulariser, form=form)
    refused(
        "indefinite|not positive",
        lambda: pr.fit(X2, model(X2).detach()).set_scale(1.0).variance(X2),
    )


def test_nothing_can_be_asked_before_a_fit():
    pr = rg.PredictionRigidity(line, W)
    for ask in (
        lambda: pr.variance(X1),
        lambda: pr.rigidity(X1),
        lambda: pr.covariance(X1),
        lambda: pr.predict(X1),
        lambda: pr.sample(2),
        lambda: pr.calibrate(X1, Y, method="paper").calibration_report,
        lambda: pr.residual_scale,
        lambda: pr.form,
        lambda: pr.gradient_norm,
    ):
        refused(r"no fit yet. Call fit\(x, y\) first", ask)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda pr: pr.calibrate(X1, method="paper"), "needs targets"),
        (lambda pr: pr.calibrate(X1[:1], Y[:1], method="paper"), "at least two"),
        (lambda pr: pr.calibrate(X1, Y[:-1], method="paper"), "x has 14 rows and y has 13"),
        (lambda pr: pr.calibrate(X1, replaced(Y, 2, NAN), method="paper"), "finite|NaN"),
        (lambda pr: pr.calibrate(X1, Y, method=Paper(noise="features")), "features"),
        (lambda pr: pr.calibrate(X1, Y, method=Paper(criterion="loo")), "loo"),
        (lambda pr: pr.calibrate(X1, Y, method=Paper(criterion="brier")), "brier"),
        (lambda pr: pr.calibrate(X1, Y, method=Paper(ridge=-1.0)), "ridge"),
        (lambda pr: pr.set_scale(0.0), "positive"),
        (lambda pr: pr.set_scale(torch.inf), "finite"),
        (lambda pr: pr.variance(X1[:0]), "no data"),
    ],
    ids=["no targets", "one row", "lengths", "NaN", "noise", "loo", "criterion", "ridge", "scale",
         "infinite scale", "no inputs"],
)  # fmt: skip
def test_a_refused_question_leaves_the_answers_as_they_were(ask, message):
    pr = fit().set_scale(2.0)
    before = pr.variance(X1)
    refused(message, ask, pr)
    assert torch.equal(pr.variance(X1), before) and pr.scale == 2.0


def test_the_other_forms_keep_their_ridge():
    for form in ("dual", "matrix-free"):
        pr = fit(ridge=0.1, form=form)
        refused(
            f"ridge of the {form} form is fixed",
            pr.calibrate,
            X1,
            Y + 0.1,
            method=Paper(ridge=0.2),
        )
        assert pr.calibrate(X1, Y + 0.1, method="paper").ridge == 0.1


def test_the_residual_scale_needs_targets_and_more_rows_than_parameters():
    with pytest.raises(ValueError, match="No residual degrees of freedom"):
        _ = fit(x=X1[:2]).residual_scale
    with pytest.raises(ValueError, match="targets"):
        _ = rg.PredictionRigidity(line, W).fit(X1).residual_scale


def test_a_failed_fit_leaves_the_last_one_in_place():
    pr = fit().set_scale(2.0)
    before = pr.variance(X1)
    for bad in ((X1, replaced(Y, 0, NAN)), (X1[:1], Y[:1]), (X1, Y[:3])):
        refused(r"finite|singular|rows", pr.fit, *bad)
        assert torch.equal(pr.variance(X1), before) and pr.scale == 2.0


# --- warnings -------------------------------------------------------------------------------------


def test_parameters_that_are_no_minimum_bring_a_warning_with_the_gradients_norm():
    y = Y + 5
    norm = float(torch.stack([(Y - y).sum(), (X1 * (Y - y)).sum()]).norm())
    with pytest.warns(UserWarning, match=f"not a minimum.*norm {norm:.3g}"):
        pr = fit(y=y)
    assert pr.gradient_norm == pytest.approx(norm)
    with pytest.warns(UserWarning, match="not a minimum"):
        fit(y=y, weight=torch.full((14,), 1e-14))


def test_a_minimum_brings_no_warning():
    generator = torch.Generator().manual_seed(0)
    y = Y + 0.5 * torch.randn(14, generator=generator, dtype=F64)
    a = torch.stack([torch.ones_like(X1), X1], 1)
    best = torch.linalg.lstsq(a, y[:, None]).solution[:, 0]
    assert fit(params=best, y=y).gradient_norm < 1e-12
    ridged = torch.linalg.solve(a.T @ a + 3 * torch.eye(2, dtype=F64), a.T @ y)
    fit(params=ridged, y=y, ridge=3.0)  # the ridge was part of the loss
    pr = fit(params=ridged, y=y, regulariser=lambda w: 1.5 * w.square().sum())
    assert pr.gradient_norm < 1e-12
    fit(params=W, y=Y)  # passes through its data


def user_warnings(recorded):
    return [str(w.message) for w in recorded.list if issubclass(w.category, UserWarning)]


@pytest.mark.parametrize("targets", ["net", "net3"])
def test_a_net_trained_by_adam_brings_no_warning(targets, request, recwarn):
    net = request.getfixturevalue(targets)
    rg.PredictionRigidity(net.model, ridge=1.0, form="dual").fit(*net.train)
    assert not user_warnings(recwarn)


@pytest.mark.parametrize("kind", ["dict", "module"])
def test_parameters_that_are_not_used_are_named_and_change_nothing(kind):
    if kind == "dict":
        f, params = (lambda p, x: p["a"] + p["b"] * x), {"a": W[0], "b": W[1]}
        more, x, y = {**params, "idle": torch.ones(3, dtype=F64)}, X1, Y
    else:
        f = nn.Linear(2, 1).double()
        more, params, x, y = None, None, X2, f(X2).detach()
    whole = rg.PredictionRigidity(f, params).fit(x, y).set_scale(1.0).variance(x)
    if kind == "module":
        f = cases.Net(lambda m, x: m.used(x), used=f, idle=nn.Linear(3, 3)).double()
    pr = rg.PredictionRigidity(f, more)
    with pytest.warns(UserWarning, match="does not use.*idle"):
        pr.fit(x, y).set_scale(1.0)
    torch.testing.assert_close(pr.variance(x), whole)
    drawn = pr.sample(4)
    idle = drawn["idle"] if kind == "dict" else drawn["idle.weight"]
    assert idle.shape[0] == 4 and (idle == idle[0]).all()


def test_a_parameter_that_only_a_later_batch_uses_is_kept():
    def call(m, x, z):
        parts = [net(x)[:, 0] * (z == k) for k, net in enumerate(m.nets) if bool((z == k).any())]
        return sum(parts)

    model = cases.Net(call, nets=nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])).double()
    z = torch.arange(24) // 12
    y = model(X2, z).detach()
    whole = rg.PredictionRigidity(model).fit([(X2, z, y)]).set_scale(1.0).variance((X2, z))
    parts = [(X2[:12], z[:12], y[:12]), (X2[12:], z[12:], y[12:])]
    torch.testing.assert_close(
        rg.PredictionRigidity(model).fit(parts).set_scale(1.0).variance((X2, z)), whole
    )


def test_nothing_is_warned_of_in_ordinary_models(recwarn):
    for name in ("weight norm", "attention", "batch norm"):
        s = cases.solved(name)
        rg.PredictionRigidity(s.case.f, ridge=0.1).fit(s.case.train[0], s.target)
        assert not user_warnings(recwarn), name


# --- what is left alone ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["dense", "dual", "matrix-free"])
def test_the_model_is_left_as_it_was(form):
    model = copy.deepcopy(cases.CASES["layer norm and in-place ReLU"].f)
    model.train()
    model[0].weight.requires_grad_(False)
    model[4].weight.grad = torch.ones_like(model[4].weight)
    y = copy.deepcopy(model).eval()(X2).detach()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, target = X2.clone(), y.clone()
    pr = rg.PredictionRigidity(model, ridge=0.1, form=form).fit(x, target).set_scale(1.0)
    variance = pr.variance(x)
    pr.sample(3)
    assert all(m.training for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not model[0].weight.requires_grad and model[0].bias.requires_grad
    assert (model[4].weight.grad == 1).all() and model[4].bias.grad is None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(x, X2) and torch.equal(target, y)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # later changes are not seen
    assert torch.equal(pr.variance(x), variance)


def test_parameters_that_need_gradients_and_later_changes_do_no_harm():
    w = W.clone().requires_grad_()
    pr = rg.PredictionRigidity(line, {"w": w}["w"])
    with torch.no_grad():
        w.zero_()
    variance = pr.fit(X1, Y).set_scale(1.0).variance(X1)
    assert not variance.requires_grad and w.grad is None
    assert torch.equal(variance, fit().set_scale(1.0).variance(X1)) and torch.equal(
        pr.predict(X1).mean, Y
    )


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_gradients_that_are_switched_off_do_no_harm(context):
    s = cases.solved("layer norm and in-place ReLU")
    pr = rg.PredictionRigidity(s.case.f, ridge=0.1)
    variance = pr.fit(X2, s.target).set_scale(1.0).variance(X2)
    with context():
        assert torch.equal(pr.variance(X2), variance)
        assert torch.equal(pr.fit(X2, s.target).set_scale(1.0).variance(X2), variance)
        made_here = (
            rg.PredictionRigidity(s.case.f, ridge=0.1)
            .fit(X2.clone(), s.target.clone())
            .set_scale(1.0)
        )
        assert torch.equal(made_here.variance(X2.clone()), variance)


def test_random_numbers_are_left_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    model = cases.CASES["net"].f
    rg.PredictionRigidity(model, ridge=0.1).fit(X2, model(X2).detach()).set_scale(1.0).variance(X2)
    assert torch.equal(torch.rand(3), expected)
