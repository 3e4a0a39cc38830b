"""Dense, dual and matrix-free: one answer, three ways; samples, scale and the choice of a way."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.any_regressor.curvature import exact_hessian, pseudo_hessian
from rigidities.calibration.methods import Paper
from rigidities.losses import GaussianNLL
from tests.support import rigidity_cases as cases
from tests.support import rigidity_oracle as oracle
from tests.support.refusals import refused
from tests.support.rigidity_cases import X1, X2, fitted
from tests.support.rigidity_oracle import F64
from tests.support.tensors import line

PER_ROW = torch.linspace(0.5, 3.0, len(X1), dtype=F64)


def wide():
    """A net of 354 parameters with two outputs, its weights, data and new inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)]
        model = nn.Sequential(*layers).double()
    return model, X2, model(X2).detach(), cases.NEW2[:2]


def coupled(y, t):
    r = y - t
    return r.square().sum(-1) + r[..., 0] * r[..., 1] * 0.9


def solved_wide(ridge, weight=None):
    model, x, y, new = wide()
    flat = oracle.flat(model)
    h = oracle.gauss_newton(flat, (x,), y, lambda a, b: coupled(a[None], b[None])[0], weight)
    return oracle.ridged(h, ridge), oracle.jacobian(flat, new)


# --- one answer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["dense", "dual", "matrix-free"])
@pytest.mark.parametrize("name", cases.CASES)
def test_every_form_equals_the_dense_reference(name, form):
    s = cases.solved(name)
    pr = fitted(s, ridge=1e-2, form=form, tolerance=1e-6)
    assert pr.form == form and pr.tolerance <= 1e-6
    h = oracle.ridged(torch.einsum("nkp,nkq->pq", s.train, s.train), 1e-2)
    expected = oracle.variance(h, s.new).reshape(len(s.new), *s.shape)
    new = cases.handed(s.case.new)
    limit = max(pr.tolerance, 1e-9)
    torch.testing.assert_close(pr.variance(*new), expected, rtol=limit, atol=0)
    torch.testing.assert_close(pr.rigidity(*new), 1 / expected, rtol=limit, atol=0)
    # Off the diagonal conjugate gradients promise only the root of their tolerance.
    cross = oracle.covariance(h, s.new, s.train).reshape(
        len(s.new), *s.shape, len(s.train), *s.shape
    )
    pair = (new[0], *cases.handed(s.case.train))
    bound = math.sqrt(limit) * float(cross.abs().max()) if form == "matrix-free" else 1e-9
    torch.testing.assert_close(pr.covariance(*pair), cross, rtol=1e-7, atol=bound)


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("kind", ["stored", "recomputed", "recomputed function", "dense", "dual"])
def test_every_kind_of_rows_carries_weights_and_coupled_outputs(kind, weighted):
    ridge, weight = 5.0, torch.linspace(0.1, 2.0, len(X2), dtype=F64) if weighted else None
    model, x, y, new = wide()
    f, params = model, None
    if kind == "recomputed function":  # a plain function has no linear layers to take factors from
        params = {name: p.detach() for name, p in model.named_parameters()}
        f = lambda p, x: torch.func.functional_call(model, p, x)  # noqa: E731
    form = kind if kind in {"dense", "dual"} else "matrix-free"
    memory = 100 * 354 if kind.startswith("recomputed") else None
    options = {"form": form, "memory": memory, "tolerance": 1e-6}
    pr = rg.PredictionRigidity(f, params, coupled, ridge=ridge, **options)
    pr.batch_size = 7
    pr.fit(x, y, sample_weight=weight).set_scale(1.0)
    if form == "matrix-free":
        assert isinstance(pr._fit.form.rows, list) == (kind == "stored")
    h, j = solved_wide(ridge, weight)
    torch.testing.assert_close(pr.variance(new), oracle.variance(h, j), rtol=1e-6, atol=0)


@pytest.mark.parametrize("tolerance", [1e-4, 1e-8])
def test_conjugate_gradients_stop_below_the_variance_and_within_their_tolerance(tolerance):
    model, x, y, new = wide()
    options = {"form": "matrix-free", "tolerance": tolerance, "memory": 100 * 354}
    pr = rg.PredictionRigidity(model, loss=coupled, ridge=0.05, **options).fit(x, y).set_scale(1.0)
    assert pr.tolerance == tolerance
    h, j = solved_wide(0.05)
    error = 1 - pr.variance(new) / oracle.variance(h, j)
    assert (error > -1e-10).all() and (error < tolerance).all()


def test_a_regulariser_enters_the_matrix_free_form():
    model, x, y, new = wide()
    centre = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def regulariser(params):
        w = torch.cat([p.reshape(-1) for p in params.values()])
        return 0.7 * ((w - centre) ** 2).sum() + ((w - centre)[:5].sum()) ** 2

    both = [
        rg.PredictionRigidity(model, ridge=0.05, regulariser=regulariser, form=form, tolerance=1e-8)
        .fit(x, y)
        .set_scale(1.0)
        for form in ("dense", "matrix-free")
    ]
    torch.testing.assert_close(both[1].variance(new), both[0].variance(new), rtol=1e-6, atol=0)


def test_the_dual_states_a_bound_on_its_rounding():
    model, x, y, new = wide()
    h, j = solved_wide(1e-7)
    pr = (
        rg.PredictionRigidity(model, loss=coupled, ridge=1e-7, form="dual").fit(x, y).set_scale(1.0)
    )
    exact = oracle.variance(h, j)
    assert ((pr.variance(new) / exact - 1).abs() < pr.tolerance + 1e-8).all()
    refused(
        "is negligible compared", rg.PredictionRigidity(model, ridge=1e-14, form="dual").fit, x, y
    )


def test_a_tiny_ridge_costs_a_small_model_no_accuracy():
    x = X1[:6]
    for ridge in (1e-8, 1e-12, 1e-15):
        pr = rg.PredictionRigidity(
            lambda w, x: w[0] + w[1] * x, torch.ones(2, dtype=F64), ridge=ridge
        )
        variance = pr.fit(x, 1 + x).set_scale(1.0).variance(x)
        expected = 1 / 6 + (x - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()
        torch.testing.assert_close(variance, expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("form", ["dense", "dual", "matrix-free"])
def test_float32_tangents_are_used_in_float64(form):
    model, x, y, new = wide()
    single = copy.deepcopy(model).float()
    pr = (
        rg.PredictionRigidity(single, ridge=0.05, form=form)
        .fit(x.float(), y.float())
        .set_scale(1.0)
    )
    flat = oracle.flat(model)
    j = oracle.jacobian(flat, x)
    h = oracle.ridged(torch.einsum("nkp,nkq->pq", j, j), 0.05)
    variance = pr.variance(new.float())
    assert variance.dtype == F64
    torch.testing.assert_close(variance, oracle.variance(h, oracle.jacobian(flat, new)),
                               rtol=1e-4, atol=0)  # fmt: skip


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "named tuple"])
@pytest.mark.parametrize("form", ["dense", "dual", "matrix-free", "exact"])
def test_batches_that_are_cut_into_pieces_give_the_same(kind, form, monkeypatch):
    s = cases.solved("three outputs", size=0.0)
    batch = {
        "tuple": (X1, s.target),
        "list": [X1, s.target],
        "dict": {"x": X1, "y": s.target},
        "named tuple": cases.Pair(X1, s.target),
    }[kind]
    noise = GaussianNLL(lambda b: 1 + (b["x"] if kind == "dict" else b[0]) ** 2)
    how = {"hessian": "exact"} if form == "exact" else {"form": form}
    weight = lambda b: 2 + torch.sin(b["x"] if kind == "dict" else b[0])  # noqa: E731

    def answers():
        pr = rg.PredictionRigidity(s.case.f, s.case.params, noise, ridge=0.1, **how)
        pr.fit([batch], sample_weight=weight)
        return pr.variance(X1), pr.covariance(X1, X1[:3]), torch.tensor(pr.gradient_norm)

    whole = answers()
    for module, name in ((pseudo_hessian, "PIECE"), (exact_hessian, "ROWS")):
        monkeypatch.setattr(module, name, 5 if name == "ROWS" else 480)
    torch.testing.assert_close(answers(), whole)


# --- samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "dual", "matrix-free", "exact"])
def test_samples_have_the_covariance_of_the_parameters(kind):
    s = cases.solved("net", size=0.0)
    ridge = 0.0 if kind == "exact" else 0.2
    options = {"hessian": "exact"} if kind == "exact" else {"form": kind}
    pr = fitted(s, ridge=ridge, **options).set_scale(0.5)
    n = 4000
    drawn = pr.sample(n, torch.Generator().manual_seed(0))
    assert list(drawn) == s.model.names and all(len(leaf) == n for leaf in drawn.values())
    w = torch.cat([leaf.reshape(n, -1) for leaf in drawn.values()], 1)
    h = oracle.ridged(torch.einsum("nkp,nkq->pq", s.train, s.train), ridge)
    covariance = 0.25 * torch.linalg.inv(h)
    # In units of their standard errors, Var(w_i w_j) = c_ii c_jj + c_ij^2 for a Gaussian.
    spread = covariance.diagonal().outer(covariance.diagonal()) + covariance**2
    errors = (torch.cov(w.T) - covariance) / (spread / n).sqrt()
    assert errors.abs().max() < 4.5 and 0.1 < errors.square().mean() < 3
    means = (w.mean(0) - s.model.flat) / (covariance.diagonal() / n).sqrt()
    assert means.abs().max() < 4


def test_samples_of_a_subset_keep_the_rest_and_go_into_vmap():
    s = cases.solved("two Gaussians in nested dicts")
    f, params = s.case.f, s.case.params
    pr = rg.PredictionRigidity(f, params, ridge=1e-2, subset="peaks.1", form="dense")
    pr.fit(X1, s.target)
    drawn = pr.sample(3000, torch.Generator().manual_seed(0))
    fixed = drawn["peaks"][0]["height"]
    assert fixed.shape == (3000,) and (fixed == params["peaks"][0]["height"]).all()
    small = rg.PredictionRigidity(f, params, ridge=1e-2, subset="peaks.1").fit(X1, s.target)
    small.set_scale(1e-3)  # small enough for f to be linear
    y = torch.func.vmap(f, in_dims=(0, None))(small.sample(3000, torch.Generator()), X1)
    assert y.shape == (3000, len(X1))
    ratio = y.var(0) / small.variance(X1)
    assert ((ratio - 1).abs() < 4.5 * math.sqrt(2 / 3000)).all()


def test_samples_leave_what_is_no_parameter_alone():
    def f(p, x):
        return p["w"][0] + p["w"][1] * x ** p["degree"]

    pr = (
        rg.PredictionRigidity(f, {"w": torch.ones(2, dtype=F64), "degree": 2})
        .fit(X1, 1 + X1**2)
        .set_scale(1.0)
    )
    drawn = pr.sample(5)
    assert drawn["degree"] == 2 and drawn["w"].shape == (5, 2)


def test_samples_follow_the_generator():
    pr = fitted(cases.solved("straight line"))
    a, b, c = (pr.sample(3, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


# --- the choice of a form -------------------------------------------------------------------------


def test_the_cheapest_form_that_fits_is_taken():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 80), nn.Tanh(), nn.Linear(80, 80), nn.Linear(80, 1))
    model, x = model.double(), X2
    y = model(x).detach()
    parameters = sum(p.numel() for p in model.parameters())
    dense = 6 * 8 * parameters**2
    for memory, form in ((2 * dense, "dual"), (dense / 2, "dual"), (90 * parameters, "dual"),
                         (100_000, None), (600_000, "matrix-free")):  # fmt: skip
        rows = X2.repeat(20, 1) if form == "matrix-free" else x
        pr = rg.PredictionRigidity(model, ridge=0.1, memory=memory)
        if form is None:
            with pytest.raises(MemoryError):
                rg.PredictionRigidity(model, ridge=0.1, form="dual", memory=memory).fit(x, y)
            continue
        assert pr.fit(rows, model(rows).detach()).form == form
    assert fitted(cases.solved("net"), ridge=0.1).form == "dense"


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"ridge": 0.0}, "ridge > 0"),
        ({"ridge": 0.1, "form": "dense"}, "form='matrix-free'"),
        ({"ridge": 0.1, "form": "dual"}, "form='matrix-free'"),
        ({"ridge": 0.1, "hessian": "exact"}, "subset="),
        ({"ridge": 0.1, "form": "matrix-free", "memory": 1000}, "memory="),
    ],
    ids=["no ridge", "dense", "dual", "exact", "matrix-free"],
)
def test_what_does_not_fit_is_refused_with_its_size(options, remedy):
    model, x, y, _ = wide()
    pr = rg.PredictionRigidity(model, **{"memory": 40_000, **options})
    with pytest.raises(MemoryError, match=r"needs about [\d.]+ (KiB|MiB|GiB)") as caught:
        pr.fit(x, y)
    assert remedy in str(caught.value) and "354 parameters" in str(caught.value)
    refused("no fit yet", pr.variance, x, error=RuntimeError)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"form": "dual"}, "ridge > 0"),
        ({"form": "matrix-free"}, "ridge > 0"),
        ({"form": "dual", "ridge": 1.0, "hessian": "exact"}, "exact"),
        ({"form": "matrix-free", "ridge": 1.0, "hessian": "exact"}, "exact"),
        ({"form": "dual", "ridge": 1.0, "regulariser": lambda p: p.square().sum()}, "regulariser"),
    ],
    ids=["dual without ridge", "matrix-free without ridge", "exact dual", "exact free", "penalty"],
)
def test_a_form_that_cannot_express_the_problem_is_refused(options, cause):
    s = cases.solved("straight line")
    refused(cause, fitted, s, **options)


# --- scale ----------------------------------------------------------------------------------------


def least_squares(x, y, weight=None):
    root = torch.ones_like(x) if weight is None else weight.sqrt()
    a = torch.stack([torch.ones_like(x), x], 1)
    return torch.linalg.lstsq(root[:, None] * a, (root * y)[:, None]).solution[:, 0]


@pytest.mark.parametrize("hessian", ["gauss-newton", "exact"])
@pytest.mark.parametrize("loss", ["mse", GaussianNLL(4.0), "weights"], ids=["OLS", "GLS", "WLS"])
def test_the_residual_scale_is_the_textbooks(loss, hessian):
    generator = torch.Generator().manual_seed(0)
    weight = PER_ROW if loss == "weights" else None
    y = 1 + 2 * X1 + 0.3 * torch.randn(len(X1), generator=generator, dtype=F64)
    w = least_squares(X1, y, weight)
    factor = torch.ones_like(X1) if weight is None else weight
    factor = factor / 4 if isinstance(loss, GaussianNLL) else factor
    s2 = float((factor * (y - line(w, X1)) ** 2).sum()) / (len(X1) - 2)
    pr = rg.PredictionRigidity(line, w, "mse" if loss == "weights" else loss, hessian)
    pr.fit(X1, y, sample_weight=weight)
    assert pr.residual_scale == pytest.approx(math.sqrt(s2))
    a = torch.stack([torch.ones_like(X1), X1], 1)
    cov = s2 * torch.linalg.inv(a.T @ (factor[:, None] * a))
    scaled = pr.set_scale(pr.residual_scale).variance(X1)
    torch.testing.assert_close(scaled, torch.einsum("np,pq,nq->n", a, cov, a))


def test_predictions_without_curvature_are_no_degrees_of_freedom():
    def f(w, x):
        return torch.stack([w[0] + w[1] * x, w[2] * x], 1)

    w = torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    r = torch.zeros(len(X1), 2, dtype=F64)
    r[4, 1] = r[9, 1] = 0.5 / X1[4]  # X1 is symmetric: no slope
    r[0, 1], r[-1, 1] = 10.0, 10.0  # one output beyond Huber's delta, the other not
    pr = rg.PredictionRigidity(f, w, "huber").fit(X1, f(w, X1) + r)
    expected = float((r[[4, 9], 1] ** 2).sum()) / (2 * len(X1) - 2 - 3)
    assert pr.residual_scale == pytest.approx(math.sqrt(expected))


def test_a_ridge_leaves_the_scale_the_effective_degrees_of_freedom():
    s = cases.solved("net", size=0.3)
    h = torch.einsum("nkp,nkq->pq", s.train, s.train)
    rank = float(torch.trace(torch.linalg.solve(oracle.ridged(h, 0.1), h)))
    residual = s.target - oracle.outputs(s.model, *s.case.train).detach()
    expected = math.sqrt(float((residual**2).sum()) / (residual.numel() - rank))
    for form in ("dense", "dual"):
        assert fitted(s, ridge=0.1, form=form).residual_scale == pytest.approx(expected)


def new_data(s, ridge=0.3):
    """Inputs and errors drawn from the predictive distribution with scale 0.7 and noise 0.02."""
    generator = torch.Generator().manual_seed(3)
    x = 4 * torch.rand(100, generator=generator, dtype=F64) - 2
    h = oracle.ridged(torch.einsum("nkp,nkq->pq", s.train, s.train), ridge)
    variance = 0.49 * oracle.variance(h, oracle.jacobian(s.model, x))[:, 0] + 0.02
    return x, variance.sqrt() * torch.randn(100, generator=generator, dtype=F64)


@pytest.mark.parametrize("form", ["dense", "dual", "matrix-free"])
def test_the_nll_scale_is_the_closed_form(form):
    s = cases.solved("two Gaussians in nested dicts")
    x, error = new_data(s)
    pr = fitted(s, ridge=0.05, form=form)
    q = pr.variance(x)
    report = pr.calibrate(
        x, s.case.f(s.case.params, x) + error, method=Paper(ridge=0.05)
    ).calibration_report
    assert pr.scale**2 == pytest.approx(float((error**2 / q).mean()), rel=1e-5)
    nll = 0.5 * (error**2 / (pr.scale**2 * q) + (2 * math.pi * pr.scale**2 * q).log()).mean()
    assert report.nll == pytest.approx(float(nll), rel=1e-5)
    torch.testing.assert_close(pr.variance(x), pr.scale**2 * q)


@pytest.mark.parametrize("noise", ["none", "constant"])
def test_a_searched_ridge_is_no_worse_than_any_on_a_grid(noise):
    s = cases.solved("two Gaussians in nested dicts")
    x, error = new_data(s)
    pr = fitted(s, ridge=0.05, form="dense")
    report = pr.calibrate(
        x, s.case.f(s.case.params, x) + error, method=Paper(noise=noise)
    ).calibration_report
    h = oracle.gauss_newton(s.model, s.case.train, s.target, oracle.LOSSES["mse"])
    j = oracle.jacobian(s.model, x)
    best = math.inf
    for ridge in np.logspace(-6, 4, 41):
        q = oracle.variance(oracle.ridged(h, float(ridge)), j)[:, 0]
        for floor in [0.0] if noise == "none" else [0.0, *np.logspace(-6, 3, 37)]:
            v = q + floor
            alpha2 = float((error**2 / v).mean())
            best = min(best, 0.5 * float(1 + math.log(2 * math.pi * alpha2) + v.log().mean()))
    assert report.nll <= best + 1e-6
    p = pr.predict(x)
    nll = 0.5 * (error**2 / p.variance + (2 * math.pi * p.variance).log()).mean()
    assert report.nll == pytest.approx(float(nll), rel=1e-6)
    assert pr.ridge == report.ridge and (noise == "none") == bool((p.noise == 0).all())


def test_a_set_scale_multiplies_the_variance_and_not_the_rigidity():
    s = cases.solved("net")
    pr, new = fitted(s, ridge=1e-3), s.case.new[0]
    v, r = pr.variance(new), pr.rigidity(new)
    assert pr.set_scale(3.0) is pr and pr.scale == 3.0
    torch.testing.assert_close(pr.variance(new), 9 * v)
    torch.testing.assert_close(pr.rigidity(new), r)
    p = pr.predict(new)
    torch.testing.assert_close(p.std, 3 * v.sqrt())
    assert pr.fit(*cases.handed(s.case.train, s.target)).scale != 3.0
