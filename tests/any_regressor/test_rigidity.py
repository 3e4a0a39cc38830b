"""`PredictionRigidity` against dense references, distributions and limits."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rigidities as rg
from rigidities.losses import GaussianNLL
from tests.support import rigidity_cases as cases
from tests.support import rigidity_oracle as oracle
from tests.support.rigidity_cases import CASES, X1, fitted
from tests.support.rigidity_oracle import F64

REGULAR = ["straight line", "cubic of a column", "two Gaussians in nested dicts", "two inputs"]
REGULAR += ["lists and tuples", "a named tuple", "three outputs", "net", "net with several outputs"]
"""Cases that need no ridge."""


def shaped(rows, shape):
    return rows.reshape(len(rows), *shape)


# --- oracle: every regressor, both Hessians -------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_gauss_newton_equals_the_sum_of_weighted_outer_products(name):
    s = cases.solved(name)
    ridge = 0.0 if name in REGULAR else 1e-3
    pr = fitted(s, ridge=ridge)
    h = oracle.gauss_newton(s.model, s.case.train, s.target, oracle.LOSSES["mse"])
    expected = shaped(oracle.variance(oracle.ridged(h, ridge), s.new), s.shape)
    variance = pr.variance(*cases.handed(s.case.new))
    assert variance.dtype == F64
    torch.testing.assert_close(variance, expected, rtol=1e-7, atol=0)
    torch.testing.assert_close(
        pr.rigidity(*cases.handed(s.case.new)), 1 / expected, rtol=1e-7, atol=0
    )
    means = oracle.outputs(s.model, *s.case.new).detach()
    torch.testing.assert_close(pr.predict(*cases.handed(s.case.new)).mean, shaped(means, s.shape))


@pytest.mark.parametrize("name", [*REGULAR, "outputs in a matrix", "a layer used twice"])
def test_the_exact_hessian_equals_that_of_the_whole_loss(name):
    s = cases.solved(name, size=0.01)
    ridge = 0.0 if name in REGULAR else 1e-2
    h = oracle.exact_hessian(s.model, s.case.train, s.target, oracle.LOSSES["mse"])
    ridge += max(0.0, -1.1 * float(torch.linalg.eigvalsh(h)[0]))
    expected = oracle.variance(oracle.ridged(h, ridge), s.new)
    variance = fitted(s, hessian="exact", ridge=ridge).variance(*cases.handed(s.case.new))
    torch.testing.assert_close(variance, shaped(expected, s.shape), rtol=1e-6, atol=0)


def test_the_two_hessians_differ_where_residuals_bend_the_model():
    s = cases.solved("two Gaussians in nested dicts", size=0.1)
    variances = [fitted(s, hessian=h).variance(s.case.new[0]) for h in ("gauss-newton", "exact")]
    assert ((variances[0] - variances[1]).abs() > 0.01 * variances[0]).any()


@pytest.mark.parametrize("name", ["two Gaussians in nested dicts", "net with several outputs"])
def test_covariances_equal_the_dense_ones(name):
    s = cases.solved(name)
    pr = fitted(s, ridge=1e-3).set_scale(3.0)
    h = oracle.gauss_newton(s.model, s.case.train, s.target, oracle.LOSSES["mse"])
    h = oracle.ridged(h, 1e-3)
    n, m = len(s.new), len(s.train)
    cross = 9 * oracle.covariance(h, s.new, s.train).reshape(n, *s.shape, m, *s.shape)
    new, train = s.case.new[0], s.case.train[0]
    torch.testing.assert_close(pr.covariance(new, train), cross)
    torch.testing.assert_close(pr.covariance(train, new).reshape(m * s.train.shape[1], -1),
                               cross.reshape(n * s.train.shape[1], -1).mT)  # fmt: skip
    own = pr.covariance(new).reshape(s.new[..., 0].numel(), -1)
    torch.testing.assert_close(own.diagonal(), pr.variance(new).flatten())


def test_float32_models_and_numpy_inputs_are_taken():
    s = cases.solved("net")
    single = copy.deepcopy(s.case.f).float()
    x, y = s.case.train[0].numpy(), s.target.numpy()
    variance = (
        rg.PredictionRigidity(single, ridge=0.1)
        .fit(x, y)
        .set_scale(1.0)
        .variance(s.case.new[0].numpy())
    )
    assert variance.dtype == F64
    expected = fitted(s, ridge=0.1).variance(s.case.new[0])
    torch.testing.assert_close(variance, expected, rtol=1e-4, atol=0)


# --- oracle: losses -------------------------------------------------------------------------------

VARIANCES = torch.tensor([0.5, 2.0, 1.2], dtype=F64)
COUPLING = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, -0.3], [0.0, -0.3, 1.5]], dtype=F64)
PER_ROW = torch.linspace(0.5, 3.0, len(X1), dtype=F64)


def coupled(y, t):
    r = y - t
    return (r @ COUPLING * r).sum(-1) / 2 + (y.sum(-1) - t.sum(-1)).cosh()


TABLE = {
    "mse": ("mse", oracle.LOSSES["mse"]),
    "huber": ("huber", oracle.LOSSES["huber"]),
    "log-cosh": ("log-cosh", oracle.LOSSES["log-cosh"]),
    "poisson": ("poisson", oracle.LOSSES["poisson"]),
    "gaussian": (GaussianNLL(0.3), lambda y, t: ((y - t) ** 2).sum() / 0.6),
    "gaussian per target": (
        GaussianNLL(VARIANCES),
        lambda y, t: ((y - t) ** 2 / (2 * VARIANCES)).sum(),
    ),
    "fourth power": (
        lambda y, t: (y - t) ** 4 / 4 + (y - t) ** 2,
        lambda y, t: ((y - t) ** 4 / 4 + (y - t) ** 2).sum(),
    ),
    "coupled outputs": (coupled, lambda y, t: coupled(y[None], t[None])[0]),
    "torch's Huber": (nn.HuberLoss(reduction="none"), oracle.LOSSES["huber"]),
}


@pytest.mark.filterwarnings("ignore:The parameters are not a minimum")
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("hessian", ["gauss-newton", "exact"])
@pytest.mark.parametrize("name", TABLE)
def test_every_loss_brings_its_curvature(name, hessian, weighted):
    s = cases.solved("three outputs", size=0.8)
    loss, reference = TABLE[name]
    weight = PER_ROW if weighted else None
    curvature = oracle.gauss_newton if hessian == "gauss-newton" else oracle.exact_hessian
    h = curvature(s.model, s.case.train, s.target, reference, weight)
    ridge = 0.1 + max(0.0, -1.1 * float(torch.linalg.eigvalsh(h)[0]))
    pr = rg.PredictionRigidity(s.case.f, s.case.params, loss, hessian, ridge)
    variance = pr.fit(X1, s.target, sample_weight=weight).set_scale(1.0).variance(s.case.new[0])
    torch.testing.assert_close(variance, oracle.variance(oracle.ridged(h, ridge), s.new))


@pytest.mark.parametrize("hessian", ["gauss-newton", "exact"])
@pytest.mark.parametrize("per_output", [False, True], ids=["per sample", "per output"])
def test_variances_that_come_with_the_batch_weigh_its_rows(hessian, per_output):
    s = cases.solved("three outputs", size=0.0)

    def noise(batch):
        v = 1 + batch[0] ** 2
        return v[:, None] * VARIANCES if per_output else v

    pr = rg.PredictionRigidity(s.case.f, s.case.params, GaussianNLL(noise), hessian)
    pr.batch_size = 5
    pr.fit(X1, s.target)
    v = noise((X1,)).reshape(len(X1), -1).expand(-1, 3)
    h = torch.einsum("nkp,nk,nkq->pq", s.train, 1 / v, s.train)
    torch.testing.assert_close(pr.variance(s.case.new[0]), oracle.variance(h, s.new))


@pytest.mark.filterwarnings("ignore:The parameters are not a minimum")
@pytest.mark.parametrize("hessian", ["gauss-newton", "exact"])
@pytest.mark.parametrize("loss", ["mse", "huber", "log-cosh", lambda y, t: (y - t) ** 2])
def test_samples_of_no_weight_may_have_no_target(loss, hessian):
    s = cases.solved("two Gaussians in nested dicts", size=0.01)
    target, weight = s.target.clone(), torch.ones(len(X1), dtype=F64)
    target[3], weight[3] = torch.nan, 0.0
    keep = weight > 0
    options = {"loss": loss, "hessian": hessian, "ridge": 1e-2}
    some = rg.PredictionRigidity(s.case.f, s.case.params, **options)
    some.fit(X1, target, sample_weight=weight).set_scale(1.0)
    rest = (
        rg.PredictionRigidity(s.case.f, s.case.params, **options)
        .fit(X1[keep], target[keep])
        .set_scale(1.0)
    )
    torch.testing.assert_close(some.variance(X1), rest.variance(X1))
    assert some.residual_scale == pytest.approx(rest.residual_scale)


@pytest.mark.parametrize("hessian", ["gauss-newton", "exact"])
def test_the_hessian_of_the_regulariser_is_added(hessian):
    s = cases.solved("two Gaussians in nested dicts", size=0.0)
    # Its slope vanishes at the parameters, its curvature does not.
    centre = s.model.flat

    def regulariser(params):
        w = torch.stack(list(oracle.leaves(params).values()))
        return 0.3 * ((w - centre) ** 2).sum() + ((w - centre)[0] * (w - centre)[1])

    pr = fitted(s, hessian=hessian, regulariser=regulariser)
    h = oracle.gauss_newton(s.model, s.case.train, s.target, oracle.LOSSES["mse"])
    h = h + 0.6 * torch.eye(6, dtype=F64)
    h[0, 1] += 1
    h[1, 0] += 1
    torch.testing.assert_close(pr.variance(s.case.new[0]), oracle.variance(h, s.new)[:, 0])


# --- limits ---------------------------------------------------------------------------------------


def test_both_hessians_agree_where_the_model_is_linear():
    s = cases.solved("cubic of a column", size=0.5)
    variances = [fitted(s, hessian=h).variance(s.case.new[0]) for h in ("gauss-newton", "exact")]
    torch.testing.assert_close(*variances, rtol=1e-10, atol=0)


@pytest.mark.parametrize("loss", ["mse", "log-cosh"])
def test_the_rigidity_is_the_curvature_of_the_constrained_loss(loss):
    s = cases.solved("two Gaussians in nested dicts", size=0.05)
    value = oracle.total_loss(s.model, s.case.train, s.target, oracle.LOSSES[loss])
    best = oracle.newton_minimum(value, s.model.flat)
    params = {"peaks": [dict(zip(("height", "centre", "width"), p, strict=True))
                        for p in best.reshape(2, 3)]}  # fmt: skip
    pr = rg.PredictionRigidity(s.case.f, params, loss, "exact").fit(X1, s.target)
    model = s.model._replace(flat=best)
    x = torch.tensor([0.4], dtype=F64)
    curvature = oracle.curvature_of_the_constrained_loss(
        model, s.case.train, s.target, oracle.LOSSES[loss], (x,), step=1e-3
    )
    assert float(pr.rigidity(x)) == pytest.approx(curvature, rel=1e-4)


def test_fewer_rows_than_parameters_leave_the_unseen_directions_to_the_ridge():
    s = cases.solved("attention")
    rows = s.train[:, 0]
    unseen = torch.eye(rows.shape[1], dtype=F64) - torch.linalg.pinv(rows, rtol=1e-9) @ rows
    limit = torch.einsum("np,pq,nq->n", s.new[:, 0], unseen, s.new[:, 0])
    for ridge, tolerance in ((1e-4, 1e-1), (1e-6, 1e-2), (1e-8, 1e-3)):
        q = fitted(s, ridge=ridge).variance(s.case.new[0])[:, 0]
        torch.testing.assert_close(ridge * q, limit, rtol=tolerance, atol=tolerance * 1e-2)


def test_the_last_layer_alone_is_the_last_layer_form():
    s = cases.solved("net with several outputs")
    model, x, new = s.case.f, s.case.train[0], s.case.new[0]
    last = rg.LastLayerRigidity(model).fit((x, s.target))
    q = last.posterior.with_ridge(1e-2)
    head = nn.Sequential(*list(model)[:-1])
    features = torch.cat([head(new).detach(), torch.ones(len(new), 1, dtype=F64)], 1)
    expected = q.variance(features)
    for form in ("dense", "dual", "matrix-free"):
        pr = rg.PredictionRigidity(model, ridge=1e-2, subset="2", form=form)
        variance = pr.fit(x, s.target).set_scale(1.0).variance(new)
        torch.testing.assert_close(variance, expected.reshape(len(new), -1).expand(-1, 2),
                                   rtol=1e-6, atol=0)  # fmt: skip


@pytest.mark.parametrize(
    ("subset", "names"),
    [
        ("0", {"0.weight", "0.bias"}),
        ("0.bias", {"0.bias"}),
        (["0.bias", "2"], {"0.bias", "2.weight", "2.bias"}),
        (lambda name: name.endswith("weight"), {"0.weight", "2.weight"}),
        (None, {"0.weight", "0.bias", "2.weight", "2.bias"}),
    ],
    ids=["layer", "name", "several", "callable", "all"],
)
def test_a_subset_holds_the_other_parameters_fixed(subset, names):
    case = CASES["net"]
    model = oracle.flat(case.f, keep=lambda name: name in names)
    j, new = oracle.jacobian(model, *case.train), oracle.jacobian(model, *case.new)
    target = oracle.outputs(model, *case.train).detach() - oracle.stationary(j)
    pr = (
        rg.PredictionRigidity(case.f, subset=subset, ridge=1e-3)
        .fit(case.train[0], target)
        .set_scale(1.0)
    )
    h = oracle.ridged(torch.einsum("nkp,nkq->pq", j, j), 1e-3)
    torch.testing.assert_close(pr.variance(case.new[0]), oracle.variance(h, new), rtol=1e-7, atol=0)


# --- distributions
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hessian", ["gauss-newton", "exact"])
def test_neither_batches_nor_their_order_matter(hessian):
    s = cases.solved("net with several outputs", size=0.01)
    x, y, new = s.case.train[0], s.target, s.case.new[0]
    whole = fitted(s, hessian=hessian, ridge=0.1).variance(new)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, y)
    for given_data, size in [
        ((x, y), 7),
        ((x[order], y[order]), 5),
        (([(x[:3], y[:3]), (x[3:], y[3:])],), None),
        ((data,), 4),
        ((DataLoader(data, batch_size=5, shuffle=True),), None),
        (((x.numpy()), y.numpy()), 1),
    ]:
        pr = rg.PredictionRigidity(s.case.f, hessian=hessian, ridge=0.1)
        pr.batch_size = size
        variance = pr.fit(*given_data).set_scale(1.0).variance(new)
        torch.testing.assert_close(variance, whole, rtol=1e-9, atol=0)


finite = st.floats(-3, 3, width=32)


@settings(max_examples=25, deadline=None)
@given(st.lists(finite, min_size=3, max_size=8), st.lists(finite, min_size=1, max_size=4))
def test_adding_data_never_lowers_a_rigidity(first, more):
    w = torch.tensor([0.5, -1.0, 0.3], dtype=F64)

    def f(w, x):
        return w[0] * torch.tanh(w[1] * x) + w[2]

    def rigidity(points):
        x = torch.tensor(points, dtype=F64)
        return rg.PredictionRigidity(f, w, ridge=1e-2).fit(x, f(w, x)).rigidity(X1)

    assert (rigidity(first + more) >= rigidity(first) * (1 - 1e-9)).all()


def test_all_rows_twice_at_half_weight_change_nothing():
    s = cases.solved("two Gaussians in nested dicts")
    x, y = X1.repeat(2), s.target.repeat(2)
    pr = rg.PredictionRigidity(s.case.f, s.case.params)
    for weight in (torch.full_like(x, 0.5), lambda batch: torch.full((len(batch[0]),), 0.5)):
        twice = pr.fit(x, y, sample_weight=weight).set_scale(1.0).variance(s.case.new[0])
        torch.testing.assert_close(twice, fitted(s).variance(s.case.new[0]))


def test_moving_and_stretching_the_targets_of_a_linear_model_leaves_its_rigidity():
    s = cases.solved("cubic of a column")
    r = fitted(s).rigidity(s.case.new[0])
    shifted = s.case.params * -4.0
    shifted[0] += 7
    y = -4.0 * s.target + 7
    moved = rg.PredictionRigidity(s.case.f, shifted).fit(X1, y).rigidity(s.case.new[0])
    torch.testing.assert_close(moved, r)


def test_rescaled_and_permuted_parameters_give_the_same_rigidity():
    s = cases.solved("three outputs")
    turned, stretch = torch.tensor([2, 0, 3, 1]), torch.tensor([3.0, 0.1, 1.0, 20.0], dtype=F64)

    def f(v, x):
        return s.case.f((v * stretch)[turned.argsort()], x)

    params = s.case.params[turned] / stretch
    other = rg.PredictionRigidity(f, params).fit(X1, s.target).rigidity(s.case.new[0])
    torch.testing.assert_close(other, fitted(s).rigidity(s.case.new[0]), rtol=1e-9, atol=0)


@pytest.mark.parametrize("hessian", ["gauss-newton", "exact"])
@pytest.mark.parametrize("ratio", [1e4, 1e9, 1e16])
def test_parameters_in_very_different_units_lose_no_digits(ratio, hessian):
    s, r = cases.solved("straight line"), ratio**0.5

    def f(v, x):
        return v[0] * r + v[1] / r * x

    params = s.case.params * torch.tensor([1 / r, r], dtype=F64)
    other = rg.PredictionRigidity(f, params, hessian=hessian).fit(X1, s.target).set_scale(1.0)
    torch.testing.assert_close(other.variance(X1), fitted(s).variance(X1), rtol=1e-9, atol=0)


def test_scaling_the_predictions_and_the_ridge_together_scales_the_variance():
    s = cases.solved("net")
    a = 100.0
    scaled = cases.Net(lambda m, x: a * m.inner(x), inner=s.case.f)
    pr = (
        rg.PredictionRigidity(scaled, ridge=1e-3 * a**2)
        .fit(s.case.train[0], a * s.target)
        .set_scale(1.0)
    )
    expected = fitted(s, ridge=1e-3).variance(s.case.new[0])  # a^2 from g, a^-2 from H
    torch.testing.assert_close(pr.variance(s.case.new[0]), expected)
