"""`RigidityRegressor` against scikit-learn's own checks, statsmodels, dense algebra and torch."""

import math
import pickle

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from lightgbm import LGBMRegressor
from sklearn import config_context
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.cross_decomposition import PLSRegression
from sklearn.decomposition import PCA
from sklearn.dummy import DummyRegressor
from sklearn.ensemble import (
    GradientBoostingRegressor,
    HistGradientBoostingRegressor,
    RandomForestRegressor,
)
from sklearn.exceptions import NotFittedError
from sklearn.feature_selection import SelectFromModel
from sklearn.frozen import FrozenEstimator
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF
from sklearn.kernel_approximation import Nystroem
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import (
    BayesianRidge,
    ElasticNet,
    HuberRegressor,
    Lasso,
    LassoLarsIC,
    LinearRegression,
    LogisticRegression,
    PoissonRegressor,
    QuantileRegressor,
    Ridge,
    RidgeCV,
    SGDRegressor,
)
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.neighbors import KNeighborsRegressor
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    OneHotEncoder,
    PolynomialFeatures,
    PowerTransformer,
    SplineTransformer,
    StandardScaler,
    TargetEncoder,
)
from sklearn.svm import SVR, LinearSVR
from sklearn.tree import DecisionTreeRegressor
from sklearn.utils.estimator_checks import check_estimator

import rigidities as rg
from rigidities.sklearn import RigidityRegressor

pytestmark = pytest.mark.filterwarnings("ignore:The error bars are")  # tables are tiny here

FAST = {"method": "paper", "random_state": 0}


def made(n=80, seed=0, targets=None):
    draws = np.random.default_rng(seed)
    X = draws.normal(size=(n, 3)) * [1.0, 3.0, 0.5] + [0.0, 5.0, -1.0]
    shape = (3,) if targets is None else (3, targets)
    y = X @ draws.normal(size=shape) + 2.0
    return X, y + 0.3 * draws.normal(size=y.shape)


@pytest.fixture(scope="module")
def data():
    return made()


@pytest.fixture(scope="module")
def new():
    return made(15, seed=1)[0]


@pytest.fixture(scope="module")
def net(data):
    return MLPRegressor(hidden_layer_sizes=(8,), solver="lbfgs", max_iter=5000, random_state=0).fit(
        *data
    )


@pytest.fixture(scope="module")
def ridge(data):
    return RigidityRegressor(Ridge(alpha=3.0)).fit(*data)


def quadratic(rows, design, penalty=0.0, weight=None):
    """x^T (X^T W X + penalty)^-1 x, intercept free."""
    ones = [np.column_stack([part, np.ones(len(part))]) for part in (rows, design)]
    weight = np.ones(len(design)) if weight is None else weight
    matrix = ones[1].T * weight @ ones[1]
    matrix[:-1, :-1] += penalty * np.eye(rows.shape[1])
    return np.einsum("nd,dk,nk->n", ones[0], np.linalg.inv(matrix), ones[0])


# What scikit-learn asks of an estimator.


@pytest.mark.filterwarnings("ignore")
def test_it_passes_the_checks_of_scikit_learn():
    check_estimator(RigidityRegressor(Ridge()), on_skip=None)


HELD_OUT = "a share of the rows is held out, so that a row twice is not a row of weight two"
NET = MLPRegressor(hidden_layer_sizes=(5,), solver="lbfgs", max_iter=20, random_state=0)
TREES = HistGradientBoostingRegressor(max_iter=5, min_samples_leaf=3, random_state=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("base", "conformal"),
    [(NET, None), (TREES, None), (Ridge(), 0.2)],
    ids=["net", "trees", "conformal"],
)
@pytest.mark.thorough
def test_others_pass_them_too_but_for_what_holding_rows_out_changes(base, conformal):
    names = [f"check_sample_weight_equivalence_on_{kind}_data" for kind in ("dense", "sparse")]
    expected = dict.fromkeys(names, HELD_OUT)
    reg = RigidityRegressor(base, conformal=conformal, **FAST)
    check_estimator(reg, expected_failed_checks=expected, on_skip=None)


def test_searches_and_cross_validation_reach_the_base(data):
    search = GridSearchCV(
        RigidityRegressor(Ridge(), method="textbook"), {"estimator__alpha": [0.1, 1e6]}, cv=2
    ).fit(*data)
    assert search.best_params_ == {"estimator__alpha": 0.1}
    scores = cross_val_score(make_pipeline(StandardScaler(), search.best_estimator_), *data, cv=2)
    assert min(scores) > 0.9


def test_a_copy_by_pickle_predicts_the_same(ridge, new):
    again = pickle.loads(pickle.dumps(ridge))
    for one, other in zip(again.predict_interval(new), ridge.predict_interval(new), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_clone_is_not_fitted(ridge, new):
    with pytest.raises(NotFittedError):
        clone(ridge).predict(new)
    with pytest.raises(NotFittedError):
        clone(ridge).predict_interval(new)


# Numbers.


@pytest.mark.parametrize("weighted", [False, True])
def test_the_textbook_method_is_statsmodels(data, new, weighted):
    import statsmodels.api as sm

    X, y = data
    weight = np.random.default_rng(2).uniform(0.5, 2.0, len(y)) if weighted else None
    reg = RigidityRegressor(LinearRegression(), method="textbook").fit(X, y, weight)
    host = sm.WLS(y, sm.add_constant(X), 1.0 if weight is None else weight).fit()
    found = host.get_prediction(sm.add_constant(new))
    mean, std = reg.predict(new, return_std=True)
    p = reg.prediction(new)
    np.testing.assert_allclose(mean, found.predicted_mean, rtol=1e-8)
    np.testing.assert_allclose(std, found.se_obs, rtol=1e-8)
    np.testing.assert_allclose(p.epistemic.sqrt(), found.se_mean, rtol=1e-8)
    ends = np.stack(reg.predict_interval(new, 0.8), 1)
    np.testing.assert_allclose(ends, found.conf_int(obs=True, alpha=0.2), rtol=1e-8)
    cov = reg.predict(new, return_cov=True)[1]
    np.testing.assert_allclose(np.sqrt(np.diag(cov)), std, rtol=1e-8)
    np.testing.assert_allclose(reg.predict_quantiles(new, [0.5])[:, 0], mean, rtol=1e-8)
    assert reg.report_ is None and isinstance(reg.uq_, rg.fits.FitRigidity)


def test_the_textbook_variance_of_ridge_is_its_algebra(data, new):
    X, y = data
    reg = RigidityRegressor(Ridge(alpha=3.0), method="textbook").fit(X, y)
    own = quadratic(new, X, 3.0)
    left = len(y) - quadratic(X, X, 3.0).sum()
    noise = np.square(y - reg.predict(X)).sum() / left
    np.testing.assert_allclose(reg.predict(new, return_std=True)[1] ** 2, noise * (1 + own))


@pytest.mark.parametrize("weighted", [False, True])
def test_the_textbook_method_of_bayesian_ridge_has_its_penalty(data, new, weighted):
    X, y = data
    weight = np.random.default_rng(2).uniform(0.5, 2.0, len(y)) if weighted else None
    reg = RigidityRegressor(BayesianRidge(), method="textbook").fit(X, y, weight)
    base = reg.estimator_
    q = 1 / reg.prediction(new).rigidity
    np.testing.assert_allclose(q, quadratic(new, X, base.lambda_ / base.alpha_, weight))


@pytest.mark.parametrize("alpha", [0.0, 2.5])
@pytest.mark.parametrize("intercept", [False, True])
def test_a_coefficient_held_at_zero_has_no_textbook_error(alpha, intercept):
    rng = np.random.default_rng(3)
    X = rng.normal(size=(40, 3))
    y = X @ [1.0, -2.0, 0.5] + 1 + 0.1 * rng.normal(size=40)
    options = {"fit_intercept": intercept, "positive": True}
    base = Ridge(alpha, tol=1e-10, **options) if alpha else LinearRegression(**options)
    with pytest.warns(UserWarning, match=r"Parameters \[1\] are at a bound") as caught:
        reg = RigidityRegressor(base, method="textbook").fit(X, y)
    assert caught[0].filename == __file__
    design = np.c_[X[:, [0, 2]], np.ones(40)][:, : 2 + intercept]
    kept = rg.fits.from_jacobian(
        design, y - reg.predict(X), penalty=np.diag([alpha, alpha, 0.0][: 2 + intercept])
    )
    assert reg.uq_.fixed == (1,) and float(reg.uq_.parameter_std[1]) == 0.0
    np.testing.assert_allclose(reg.prediction(X[:5]).epistemic, kept.variance(design[:5]))
    assert reg.uq_.degrees_of_freedom == pytest.approx(kept.degrees_of_freedom)


def test_the_textbook_method_has_nothing_left_when_every_coefficient_is_held():
    X = np.abs(np.random.default_rng(0).normal(size=(9, 2)))
    base = LinearRegression(positive=True, fit_intercept=False)
    with pytest.raises(ValueError, match="All coefficients are fixed at zero"):
        RigidityRegressor(base, method="textbook").fit(X, -X.sum(1))


OTHER_DATA = {
    "inputs": lambda X, y: (X + 5, y),
    "order": lambda X, y: (X, y[::-1]),
    "rows": lambda X, y: (X[:20], y[:20]),
    "weights": lambda X, y: (X, y, np.linspace(0.5, 2, len(y))),
}


@pytest.mark.parametrize("alpha", [0.0, 2.5])
@pytest.mark.parametrize("change", OTHER_DATA.values(), ids=OTHER_DATA)
def test_textbooks_refuse_rows_that_did_not_train_the_base(data, alpha, change):
    base = (Ridge(alpha) if alpha else LinearRegression()).fit(*data)
    reg = RigidityRegressor(base, prefit=True, valid=None, method="textbook").fit(*data)
    with pytest.raises(ValueError, match=r"do not fit these data.*exactly as they were"):
        reg.fit(*change(*data))


@pytest.mark.parametrize("solver", ["svd", "cholesky", "lsqr", "sparse_cg", "sag", "saga"])
def test_every_solver_and_precision_of_ridge_has_the_textbook_bars(solver):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 4))
    y = X @ [1.0, -1.0, 2.0, 0.3] + 5 + 0.3 * rng.normal(size=60)
    exact = RigidityRegressor(Ridge(1.0), method="textbook").fit(X, y)
    expected = exact.predict(X, return_std=True)[1]
    for dtype in (np.float64, np.float32):
        base = Ridge(1.0, solver=solver, random_state=0)
        reg = RigidityRegressor(base, method="textbook").fit(X.astype(dtype), y.astype(dtype))
        std = reg.predict(X.astype(dtype), return_std=True)[1]
        np.testing.assert_allclose(std, expected, rtol=1e-3)


def test_textbooks_are_for_linear_models_with_one_target_and_one_penalty(data):
    X, y = data
    with pytest.raises(TypeError, match=r"LinearRegression, Ridge.*got Lasso\. Use method='full'"):
        RigidityRegressor(Lasso(0.01), method="textbook").fit(X, y)
    for base, columns in ((Ridge(), X), (LinearRegression(), X[:, :1])):
        with pytest.raises(ValueError, match=r"one target and one alpha.*Fit each target"):
            RigidityRegressor(base, method="textbook").fit(columns, np.c_[y, y])


@pytest.mark.parametrize(
    ("base", "penalty"),
    [
        (Ridge(alpha=30.0), 30.0),
        (RidgeCV(alphas=[7.0]), 7.0),
        (BayesianRidge(), None),
        (make_pipeline(FunctionTransformer(), Ridge(alpha=30.0)), 30.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_penalty_is_the_ridge_and_leaves_the_intercept_free(data, new, base, penalty):
    reg = RigidityRegressor(base).fit(*data)
    own = reg.estimator_
    penalty = own.lambda_ / own.alpha_ if penalty is None else penalty
    expected = quadratic(new, data[0], penalty)
    q = 1 / reg.prediction(new).rigidity.numpy()[:, 0]
    np.testing.assert_allclose(q, expected, rtol=1e-5)


def test_weights_of_rows_are_in_the_gram(data, new):
    X, y = data
    weight = np.random.default_rng(2).uniform(0.5, 2.0, len(y))
    reg = RigidityRegressor(make_pipeline(StandardScaler(with_std=False), Ridge(alpha=3.0)))
    q = 1 / reg.fit(X, y, weight).prediction(new).rigidity.numpy()[:, 0]
    np.testing.assert_allclose(q, quadratic(new, X, 3.0, weight), rtol=1e-5)


def test_least_squares_without_intercept_has_none(data, new):
    X, y = data
    reg = RigidityRegressor(Ridge(alpha=3.0, fit_intercept=False)).fit(X, y)
    matrix = np.linalg.inv(X.T @ X + 3.0 * np.eye(3))
    q = 1 / reg.prediction(new).rigidity.numpy()[:, 0]
    np.testing.assert_allclose(q, np.einsum("nd,dk,nk->n", new, matrix, new), rtol=1e-8)


@pytest.mark.parametrize("base", [Lasso(alpha=0.3), ElasticNet(alpha=0.3), LassoLarsIC("bic")])
def test_coefficients_at_zero_bring_no_variance(data, new, base):
    X = np.column_stack([data[0], np.random.default_rng(3).normal(size=(len(data[0]), 2))])
    reg = RigidityRegressor(base, method=rg.Full(ridge=1e-9), valid=None).fit(X, data[1])
    active = reg.estimator_.coef_ != 0
    assert 0 < active.sum() < 5
    rows = np.column_stack([new, 100 * np.ones((len(new), 2))])
    expected = quadratic(rows[:, active], X[:, active])
    np.testing.assert_allclose(1 / reg.prediction(rows).rigidity.numpy()[:, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("base", [HuberRegressor(), SGDRegressor(loss="huber", epsilon=0.3)])
def test_rows_beyond_a_huber_loss_bring_nothing(data, new, base):
    X = StandardScaler().fit_transform(data[0])
    reg = RigidityRegressor(base, method=rg.Full(ridge=1e-9), valid=None).fit(X, data[1])
    delta = base.epsilon * getattr(reg.estimator_, "scale_", 1.0)
    inside = np.abs(reg.predict(X) - data[1]) <= delta
    assert 0 < inside.sum() < len(X)
    expected = quadratic(new, X[inside])
    np.testing.assert_allclose(1 / reg.prediction(new).rigidity.numpy()[:, 0], expected, rtol=1e-6)


def test_kernel_ridge_has_the_variance_of_a_gaussian_process(data):
    X, y = made(30)
    X, new = X / 2, np.vstack([X[:5] / 2 + 0.1, [[50.0, 0.0, 0.0]]])
    reg = RigidityRegressor(KernelRidge(alpha=0.1, kernel="rbf", gamma=0.5)).fit(X, y)
    host = GaussianProcessRegressor(RBF(1.0), optimizer=None, alpha=0.1).fit(X, y)
    q = 1 / reg.prediction(new).rigidity.numpy()[:, 0]
    variance = host.predict(new, return_std=True)[1] ** 2
    np.testing.assert_allclose(0.1 * q, variance, rtol=1e-7)
    np.testing.assert_allclose(variance[-1], 1.0)  # the prior's, far away


def test_the_net_of_scikit_learn_is_that_of_torch(net, data, new):
    X, y = (torch.as_tensor(part) for part in data)
    layers = [torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)]
    model = torch.nn.Sequential(*layers).double()
    with torch.no_grad():
        for layer, w, b in zip(layers[::2], net.coefs_, net.intercepts_, strict=True):
            layer.weight.copy_(torch.as_tensor(w.T)), layer.bias.copy_(torch.as_tensor(b))
    uq = rg.LastLayerRigidity(model).fit((X[:60], y[:60, None]))
    uq.calibrate((X[60:], y[60:, None]), method="paper")
    reg = RigidityRegressor(net, prefit=True, method="paper")
    reg.fit(data[0][60:], data[1][60:], train=(data[0][:60], data[1][:60]))
    mean, std = reg.predict(new, return_std=True)
    theirs = uq.predict(torch.as_tensor(new))
    np.testing.assert_allclose(mean, theirs.mean[:, 0], rtol=1e-10)
    np.testing.assert_allclose(std, theirs.std[:, 0], rtol=1e-8)


@pytest.mark.parametrize("activation", ["identity", "logistic", "tanh", "relu"])
def test_every_activation_is_read(data, new, activation):
    options = {"activation": activation, "max_iter": 3, "solver": "lbfgs", "random_state": 0}
    reg = RigidityRegressor(MLPRegressor(hidden_layer_sizes=(4, 3), **options), **FAST)
    with pytest.warns(match="lbfgs failed"):
        reg.fit(*data)
    np.testing.assert_allclose(reg.prediction(new).mean[:, 0], reg.predict(new), rtol=1e-9)


def test_a_net_of_skorch_is_read(data, new):
    from skorch import NeuralNetRegressor

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    base = NeuralNetRegressor(module, max_epochs=3, verbose=0, train_split=None)
    X, y = data[0].astype(np.float32), data[1].astype(np.float32)[:, None]
    reg = RigidityRegressor(base, **FAST).fit(X, y)
    mean, std = reg.predict(new.astype(np.float32), return_std=True)
    assert mean.shape == std.shape == (len(new), 1) and (std > 0).all()


def test_trees_have_the_error_bars_of_their_leaves(data, new):
    X, y = data
    base = GradientBoostingRegressor(n_estimators=4, max_depth=2).fit(X[:50], y[:50])
    reg = RigidityRegressor(base, prefit=True, method="paper")
    reg = pickle.loads(pickle.dumps(reg.fit(X[50:], y[50:], train=(X[:50], y[:50]))))
    leaves = [tree.apply(new.astype(np.float32)) for (tree,) in base.estimators_]
    seen = [tree.apply(X[:50].astype(np.float32)) for (tree,) in base.estimators_]
    columns = [(a, n) for a, s in zip(leaves, seen, strict=True) for n in np.unique(s)]
    rows = np.stack([a == n for a, n in columns] + [np.ones(len(new), bool)], 1).astype(float)
    design = np.stack([s == n for s in seen for n in np.unique(s)] + [np.ones(50, bool)], 1)
    matrix = design.astype(float).T @ design + reg.uq_.ridge * np.eye(rows.shape[1])
    q = np.einsum("nd,dk,nk->n", rows, np.linalg.inv(matrix), rows)
    np.testing.assert_allclose(1 / reg.prediction(new).rigidity.numpy()[:, 0], q, rtol=1e-8)


@pytest.mark.filterwarnings("error")
def test_bars_that_rows_held_out_do_not_support_are_warned_of():
    draws = np.random.default_rng(2)  # twenty rows whose gain is below zero
    X, y = draws.normal(size=(100, 3)), draws.normal(size=100)
    reg = RigidityRegressor(RandomForestRegressor(10, random_state=0), random_state=0)
    with pytest.warns(UserWarning, match="one constant bar"):
        reg.fit(X, y)
    assert reg.report_.useless in str(reg.report_)


@pytest.mark.parametrize("seed", range(3))
def test_a_forest_that_reproduces_its_rows_has_bars_as_wide_as_its_errors(seed):
    draws = np.random.default_rng(seed)
    X = draws.random((1100, 5))
    y = X @ [3.0, -2.0, 1.0, 0.0, 0.0] + draws.normal(size=1100)
    reg = RigidityRegressor(RandomForestRegressor(20, random_state=0), random_state=0)
    reg.fit(X[:100], y[:100])
    mean, std = reg.predict(X[100:], return_std=True)
    error = np.sqrt(np.mean((mean - y[100:]) ** 2))
    assert 0.5 < np.sqrt(np.mean(std**2)) / error < 2  # left-out residuals made it four


def test_intervals_hold_what_they_say():
    draws = np.random.default_rng(0)  # left-out rows taken for a net's would give 0.93
    X = draws.normal(size=(2000, 3))
    y = X @ [1.0, 2.0, -1.0] + 0.4 * np.exp(0.7 * X[:, 0]) * draws.normal(size=2000)
    reg = RigidityRegressor(Ridge()).fit(X[:500], y[:500])
    low, high = reg.predict_interval(X[500:], 0.8)
    inside = (low < y[500:]) & (y[500:] < high)
    assert 0.73 < inside.mean() < 0.87
    assert np.corrcoef(high - low, X[500:, 0])[0, 1] > 0.5
    quantiles = reg.predict_quantiles(X[500:], [0.1, 0.5, 0.9])
    assert quantiles.shape == (1500, 3)
    np.testing.assert_allclose(quantiles[:, ::2], np.stack([low, high], 1))


def test_several_targets_have_bars_of_their_own(new):
    X, y = made(targets=2)
    reg = RigidityRegressor(Ridge()).fit(X, y * [1.0, 100.0])
    mean, std = reg.predict(new, return_std=True)
    _, cov = reg.predict(new, return_cov=True)
    assert mean.shape == std.shape == (len(new), 2) and cov.shape == (len(new), len(new), 2)
    assert (std[:, 1] > 30 * std[:, 0]).all()
    for k in range(2):
        np.testing.assert_allclose(np.diag(cov[..., k]), std[:, k] ** 2)
        np.testing.assert_allclose(cov[..., k], cov[..., k].T)
    assert reg.predict_quantiles(new, [0.1, 0.9]).shape == (len(new), 2, 2)


def test_several_targets_of_one_scale_agree_with_one_alone(new):
    X, y = made(targets=2)
    both, one = (RigidityRegressor(Ridge(), **FAST, valid=0.3) for _ in range(2))
    std = both.fit(X, y).predict(new, return_std=True)[1]
    alone = one.fit(X, y[:, 0]).predict(new, return_std=True)[1]
    ratio = std[:, 0] / alone
    assert ratio.std() < 0.05 * ratio.mean()


# Intervals with a guarantee.


def by_hand(base, X, y, new, level, kept, seed=0):
    """Split conformal intervals: mean +- q std, where q is a quantile of |error| / std."""
    X_rest, X_kept, y_rest, y_kept = train_test_split(X, y, test_size=kept, random_state=seed)
    reg = RigidityRegressor(base, method="paper", random_state=seed).fit(X_rest, y_rest)
    mean, std = reg.predict(X_kept, return_std=True)
    scores = np.sort(np.abs(y_kept - mean) / std)
    q = scores[math.ceil((len(scores) + 1) * level) - 1]
    mean, std = reg.predict(new, return_std=True)
    return mean - q * std, mean + q * std


@pytest.mark.parametrize(
    "options", [{"valid": None}, {"method": rg.Paper(criterion="loo")}], ids=str
)
def test_rows_that_trained_the_base_give_no_guarantee(data, options):
    base = Ridge().fit(*data)
    reg = RigidityRegressor(base, prefit=True, conformal=0.3, **options)
    with pytest.raises(ValueError, match="conformal needs rows that did not train the base"):
        reg.fit(*data)
    assert not hasattr(reg, "uq_")


@pytest.mark.parametrize("kept", [0.3, 24])
def test_intervals_with_a_guarantee_are_those_of_split_conformal_prediction(data, new, kept):
    reg = RigidityRegressor(Ridge(), conformal=kept, **FAST).fit(*data)
    for level in (0.5, 0.9):
        expected = by_hand(Ridge(), *data, new, level, kept)
        np.testing.assert_allclose(reg.predict_interval(new, level), expected, rtol=1e-4)
        np.testing.assert_array_equal(
            reg.predict_interval(new, level, conformal=True), reg.predict_interval(new, level)
        )
    by_distribution = reg.predict_interval(new, 0.9, conformal=False)
    quantiles = reg.predict_quantiles(new, [0.05, 0.95])
    np.testing.assert_array_equal(by_distribution, (quantiles[:, 0], quantiles[:, 1]))
    assert not np.allclose(by_distribution, reg.predict_interval(new, 0.9))
    assert "Conformal intervals from 24 rows" in str(reg.report_)


def test_the_guarantee_corrects_a_distribution_that_is_wrong():
    draws = np.random.default_rng(0)
    X = draws.normal(size=(9000, 2))
    y = X @ [1.0, 2.0] + draws.standard_t(2.2, size=9000)  # a Gaussian's 50 % cover about 70 %
    reg = RigidityRegressor(Ridge(), conformal=2000, **FAST).fit(X[:3000], y[:3000])
    shares = []
    for conformal in (False, True):
        low, high = reg.predict_interval(X[3000:], 0.5, conformal=conformal)
        shares.append(np.mean((low <= y[3000:]) & (y[3000:] <= high)))
    assert shares[0] > 0.6
    assert shares[1] == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize(
    ("func", "inverse"), [(np.log, np.exp), (np.reciprocal, np.reciprocal)], ids=["log", "1/y"]
)
def test_a_map_of_the_target_carries_the_guarantee(data, new, func, inverse):
    X = data[0]
    y = np.exp(0.1 * data[1]) + 1.0
    base = TransformedTargetRegressor(Ridge(), func=func, inverse_func=inverse)
    reg = RigidityRegressor(base, conformal=30, **FAST).fit(X, y)
    low, high = reg.predict_interval(new, 0.8)
    assert (low < high).all()
    ends = [inverse(end) for end in by_hand(Ridge(), X, func(y), new, 0.8, 30)]
    np.testing.assert_allclose((low, high), np.sort(ends, 0), rtol=1e-4)


def test_rows_for_the_guarantee_neither_train_nor_calibrate(net, data, new):
    X, y = data
    reg = RigidityRegressor(net, prefit=True, conformal=0.5, **FAST)
    reg.fit(X[60:], y[60:], train=(X[:60], y[:60]))
    assert reg.report_.rows == 10
    forest = RandomForestRegressor(3, random_state=0)
    reg = RigidityRegressor(forest, conformal=20, valid=0.25, **FAST).fit(X, y)
    assert reg.report_.rows == 15  # a quarter of the other 60
    reg = RigidityRegressor(Ridge(), conformal=20, **FAST)
    low, high = reg.fit(X, y).predict_interval(new)
    weighted = reg.fit(X, y, sample_weight=np.ones(len(y))).predict_interval(new)
    np.testing.assert_allclose(weighted, (low, high), rtol=1e-6)


def test_several_targets_have_a_guarantee_each(new):
    X, y = made(targets=2)
    reg = RigidityRegressor(Ridge(), conformal=30, **FAST).fit(X, y * [1.0, 100.0])
    low, high = reg.predict_interval(new, 0.8)
    assert low.shape == high.shape == (len(new), 2)
    _, X_kept, _, y_kept = train_test_split(X, y * [1.0, 100.0], test_size=30, random_state=0)
    low, high = reg.predict_interval(X_kept, 0.8)
    inside = ((low <= y_kept) & (y_kept <= high)).sum(0)
    assert list(inside) == [25, 25]  # the 25th of 31 places, of each target


def test_a_guarantee_that_cannot_be_given_is_refused_with_what_helps(data, new):
    X, y = data
    plain = RigidityRegressor(Ridge(), **FAST).fit(X, y)
    with pytest.raises(ValueError, match=r"Fit with RigidityRegressor\(\.\.\., conformal=0\.2\)"):
        plain.predict_interval(new, conformal=True)
    for conformal in (0, 1.0, -3, 79, True, "0.2"):
        with pytest.raises(ValueError, match="a share of the rows between 0 and 1"):
            RigidityRegressor(Ridge(), conformal=conformal).fit(X, y)
    with pytest.raises(ValueError, match="Leave conformal=None"):
        RigidityRegressor(Ridge(), method="textbook", conformal=0.2).fit(X, y)
    few = RigidityRegressor(Ridge(), conformal=8, **FAST).fit(X, y)
    with pytest.warns(match="level 0.9, which needs 9"):
        low, high = few.predict_interval(new)
    assert np.isneginf(low).all() and np.isposinf(high).all()
    assert np.isfinite(few.predict_interval(new, 0.8)).all()


def test_a_copy_keeps_the_guarantee_and_a_clone_the_parameter(data, new):
    reg = RigidityRegressor(Ridge(), conformal=0.3, **FAST).fit(*data)
    again = pickle.loads(pickle.dumps(reg))
    np.testing.assert_array_equal(again.predict_interval(new), reg.predict_interval(new))
    assert clone(reg).get_params()["conformal"] == 0.3
    assert reg.set_params(conformal=None).fit(*data).uq_.calibration.conformal is None


def test_the_report_asks_about_early_stopping_only_if_the_base_was_trained_before(net, data):
    X, y = data
    question = "choose the checkpoint"
    for options in ({"conformal": 20}, {"valid": 0.2}):
        reg = RigidityRegressor(clone(net), **options, **FAST).fit(X, y)
        assert question not in str(reg.report_)
    reg = RigidityRegressor(net, prefit=True, conformal=10, **FAST)
    assert question in str(reg.fit(X[50:], y[50:], train=(X[:50], y[:50])).report_)


# Pipelines and targets.


def test_a_column_transformer_reads_frames_of_pandas_and_polars(data):
    X, y = data
    columns = {"a": X[:, 0], "b": X[:, 1], "kind": np.where(X[:, 2] > -1, "up", "down")}
    frames = [pd.DataFrame(columns), pl.DataFrame(columns)]
    found = []
    for frame in frames:
        numbers = make_pipeline(SplineTransformer(n_knots=3), PolynomialFeatures(1))
        parts = [("n", numbers, ["a", "b"]), ("k", OneHotEncoder(sparse_output=False), ["kind"])]
        reg = RigidityRegressor(make_pipeline(ColumnTransformer(parts), Ridge()))
        found.append(reg.fit(frame, y).predict(frame[:9], return_std=True))
        assert reg.n_features_in_ == 3 and list(reg.feature_names_in_) == ["a", "b", "kind"]
        with pytest.raises(ValueError, match="unknown categories"):
            reg.predict_interval(frame[:1].assign(kind="new") if frame is frames[0] else PL_NEW)
    np.testing.assert_allclose(found[0], found[1])


PL_NEW = pl.DataFrame({"a": [0.0], "b": [5.0], "kind": ["new"]})


def test_columns_must_keep_names_and_order(data):
    frame = pd.DataFrame(data[0], columns=["a", "b", "c"])
    reg = RigidityRegressor(Ridge(), method="textbook").fit(frame, data[1])
    for wrong in (frame[["b", "a", "c"]], frame.rename(columns={"a": "z"}), frame[["a", "b"]]):
        for method in (reg.predict, reg.predict_interval, reg.prediction):
            with pytest.raises(ValueError, match="feature names"):
                method(wrong)


def test_nystroem_features_are_those_of_the_pipeline(data, new):
    base = make_pipeline(StandardScaler(), Nystroem(n_components=10, random_state=0), Ridge(0.1))
    reg = RigidityRegressor(base).fit(*data)
    fitted = reg.estimator_[:-1]
    expected = quadratic(fitted.transform(new), fitted.transform(data[0]), 0.1)
    q = 1 / reg.prediction(new).rigidity.numpy()[:, 0]
    np.testing.assert_allclose(q, expected, rtol=1e-4)


def test_a_scaled_target_changes_nothing_but_units(data, new):
    plain = RigidityRegressor(LinearRegression(), **FAST).fit(*data)
    base = TransformedTargetRegressor(LinearRegression(), transformer=StandardScaler())
    scaled = RigidityRegressor(base, **FAST).fit(*data)
    for one, other in [
        (scaled.predict(new, return_std=True), plain.predict(new, return_std=True)),
        (scaled.predict(new, return_cov=True), plain.predict(new, return_cov=True)),
        (scaled.predict_interval(new), plain.predict_interval(new)),
    ]:
        for left, right in zip(one, other, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-6)


def test_a_logarithm_makes_the_distribution_lognormal(data, new):
    X, y = data[0], data[1] / 5
    base = TransformedTargetRegressor(Ridge(), func=np.log, inverse_func=np.exp)
    reg = RigidityRegressor(base, **FAST).fit(X, np.exp(y))
    inner = reg.prediction(new)
    mean, std = reg.predict(new, return_std=True)
    m, s = inner.mean.numpy()[:, 0], inner.std.numpy()[:, 0]
    np.testing.assert_allclose(mean, np.exp(m))
    lognormal = np.exp(m + s**2 / 2) * np.sqrt(np.exp(s**2) - 1)
    np.testing.assert_allclose(std, lognormal, rtol=1e-3)
    low, high = reg.predict_interval(new, 0.9)
    ends = [end.numpy()[:, 0] for end in inner.interval(0.9)]
    np.testing.assert_allclose([np.log(low), np.log(high)], ends, rtol=1e-9)
    with pytest.raises(ValueError, match="affine"):
        reg.predict(new, return_cov=True)


def test_a_falling_map_turns_the_quantiles_over(data, new):
    X, y = data[0], np.exp(-data[1] / 5)
    base = TransformedTargetRegressor(Ridge(), func=np.reciprocal, inverse_func=np.reciprocal)
    reg = RigidityRegressor(base, **FAST).fit(X, y)
    quantiles = reg.predict_quantiles(new, [0.1, 0.4, 0.5, 0.8])
    assert (np.diff(quantiles, axis=1) > 0).all()
    inner = reg.prediction(new).quantile(0.9).numpy()[:, 0]
    np.testing.assert_allclose(quantiles[:, 0], 1 / inner)


def test_maps_that_mix_or_fold_targets_are_refused(data):
    mixed = TransformedTargetRegressor(Ridge(), transformer=PCA())
    X, y = made(targets=2)
    with pytest.raises(ValueError, match="each target by itself"):
        RigidityRegressor(mixed).fit(X, y)
    folded = TransformedTargetRegressor(Ridge(), inverse_func=np.square, check_inverse=False)
    with pytest.raises(ValueError, match="only rise or only fall"):
        RigidityRegressor(folded.set_params(func=np.negative)).fit(*data)


@pytest.mark.parametrize("method", ["box-cox", "yeo-johnson"])
def test_quantiles_end_where_a_power_has_no_inverse(method):
    draws = np.random.default_rng(3)
    X, y = draws.normal(size=(60, 2)), draws.exponential(size=60) + 0.01
    base = TransformedTargetRegressor(LinearRegression(), transformer=PowerTransformer(method))
    reg = RigidityRegressor(base, **FAST).fit(X, y)
    inner = reg.prediction(X)
    power, scaler = reg.estimator_.transformer_.lambdas_[0], reg.estimator_.transformer_._scaler
    edge = ((-1 / power) - scaler.mean_[0]) / scaler.scale_[0]
    far = [inner.quantile(level).numpy()[:, 0] for level in (1e-9, 1 - 1e-9)]
    assert (far[0] < edge).any() if method == "box-cox" else (far[1] > edge).any()
    quantiles = reg.predict_quantiles(X, [1e-9, 0.1, 0.5, 0.9, 1 - 1e-9])
    assert np.isfinite(quantiles).all() and (np.diff(quantiles, axis=1) >= 0).all()
    assert np.isfinite(reg.predict(X, return_std=True)[1]).all()


def test_quantiles_do_not_fold_with_the_square_of_a_negative_root():
    draws = np.random.default_rng(3)
    X = draws.normal(size=(200, 2))
    y = draws.poisson(np.exp(0.2 + X[:, 0])).astype(float)
    base = TransformedTargetRegressor(LinearRegression(), func=np.sqrt, inverse_func=np.square)
    reg = RigidityRegressor(base, **FAST).fit(X, y)
    quantiles = reg.predict_quantiles(X, [0.01, 0.1, 0.5, 0.9])
    assert (np.diff(quantiles, axis=1) >= 0).all() and (quantiles[:, 0] == 0).any()


def test_the_textbook_std_of_a_logarithm_is_that_of_its_students_distribution(data, new):
    from scipy.stats import norm

    X, y = data[0][:8], np.exp(data[1][:8] / 5)
    base = TransformedTargetRegressor(LinearRegression(), func=np.log, inverse_func=np.exp)
    reg = RigidityRegressor(base, method="textbook").fit(X, y)
    z = np.linspace(-4, 4, 65)
    values, share = reg.predict_quantiles(new, norm.cdf(z)), norm.pdf(z) / norm.pdf(z).sum()
    expected = np.sqrt(values**2 @ share - (values @ share) ** 2)
    np.testing.assert_allclose(reg.predict(new, return_std=True)[1], expected, rtol=1e-6)
    again = pickle.loads(pickle.dumps(reg))
    np.testing.assert_array_equal(again.predict_quantiles(new, norm.cdf(z)), values)


def test_dummies_of_all_levels_are_refused_with_what_helps(data):
    X = np.where(data[0][:, :1] > 0, "a", "b")
    base = make_pipeline(OneHotEncoder(), LinearRegression())
    with pytest.raises(ValueError, match="drop='first'"):
        RigidityRegressor(base, method="textbook").fit(X, data[1])
    base.set_params(onehotencoder__drop="first")
    RigidityRegressor(base, method="textbook").fit(X, data[1])


# Coverage.


def covered(base, n, p, seeds, signal=0.0):
    found = []
    for seed in seeds:
        draws = np.random.default_rng(seed)
        X = draws.normal(size=(n + 500, p))
        y = signal * X @ np.arange(1, p + 1) + draws.normal(size=n + 500)
        low, high = (
            RigidityRegressor(base, random_state=0).fit(X[:n], y[:n]).predict_interval(X[n:])
        )
        found.append(((low < y[n:]) & (y[n:] < high)).mean())
    return np.mean(found)


@pytest.mark.parametrize("base", [LinearRegression(), Ridge(alpha=0.0)], ids=str)
def test_many_columns_of_noise_do_not_narrow_the_bars_of_least_squares(base):
    assert 0.85 < covered(base, 120, 60, range(3)) < 0.95


def test_kernel_features_of_single_rows_do_not_narrow_the_bars():
    assert 0.82 < covered(KernelRidge(kernel="rbf"), 150, 3, range(2), 2.0) < 0.96


def test_a_base_with_several_penalties_has_rows_held_out():
    X, y = made(targets=2)
    for base in (
        Ridge(alpha=[1.0, 2.0]),
        RidgeCV(alphas=[1e-3, 1e4], alpha_per_target=True),
        LinearRegression(positive=True),
    ):
        target = np.stack([y[:, 0], np.random.default_rng(0).normal(size=len(y))], 1)
        target = target[:, 0] if isinstance(base, LinearRegression) else target
        assert RigidityRegressor(base, random_state=0).fit(X, target).report_.rows == 16


# Trained bases.


def test_a_base_trained_again_is_noticed(data, new):
    X, y = data
    for base in (Ridge(), GradientBoostingRegressor(n_estimators=4, max_depth=2)):
        reg = RigidityRegressor(base.fit(X, y), prefit=True, **FAST).fit(X, y)
        reg.predict_interval(new)
        base.fit(X[:20], y[:20] + 5.0)
        for call in (reg.predict_interval, lambda X, reg=reg: reg.predict(X, return_std=True)):
            with pytest.raises(ValueError, match="changed since fit"):
                call(new)


def test_a_tree_that_memorises_its_rows_is_calibrated_on_others(data):
    reg = RigidityRegressor(DecisionTreeRegressor(random_state=0), random_state=0).fit(*data)
    assert reg.report_.rows == 16 and reg.report_.seen == 0


def test_more_columns_than_rows_are_calibrated_on_others():
    draws = np.random.default_rng(0)
    X, y = draws.normal(size=(60, 80)), draws.normal(size=60)
    reg = RigidityRegressor(LinearRegression(), random_state=0).fit(X, y)
    assert reg.report_.rows == 12 and reg.report_.seen == 0
    assert (reg.predict(X, return_std=True)[1] > 0).all()


def test_a_search_over_kinds_holds_rows_out_where_trees_win(data):
    grid = {"ridge": [GradientBoostingRegressor(n_estimators=3)]}
    base = GridSearchCV(make_pipeline(StandardScaler(), Ridge()), grid, cv=2)
    reg = RigidityRegressor(base, random_state=0).fit(*data)
    assert reg.report_.rows == 16 and reg.estimator_.n_features_in_ == 3


def test_a_frozen_regressor_in_a_pipeline_counts_as_trained(net, data):
    reg = RigidityRegressor(make_pipeline(FunctionTransformer(), FrozenEstimator(net)), **FAST)
    assert reg.fit(*data).report_.rows == 40


def test_names_of_columns_are_those_of_the_last_fit(data, new):
    reg = RigidityRegressor(Ridge(), method="textbook")
    reg.fit(pd.DataFrame(data[0], columns=["a", "b", "c"]), data[1]).fit(*data)
    assert not hasattr(reg, "feature_names_in_") and reg.n_features_in_ == 3
    reg.predict_interval(new)


@pytest.mark.parametrize("columns", [1.0, [1.0, 10.0, 0.1]], ids=["alike", "apart"])
def test_a_ridge_is_in_the_units_of_the_columns(data, new, columns):
    X = data[0] * columns
    own = RigidityRegressor(Ridge(alpha=3.0)).fit(X, data[1]).predict(new, return_std=True)[1]
    given = RigidityRegressor(Ridge(alpha=3.0), method=rg.Full(ridge=3.0)).fit(X, data[1])
    np.testing.assert_allclose(given.predict(new, return_std=True)[1], own)


def test_a_trained_base_is_calibrated_on_rows_it_has_not_seen(net, data, new):
    X, y = made(60, seed=7)
    regs = [
        RigidityRegressor(net, prefit=True, **FAST),
        RigidityRegressor(FrozenEstimator(net), **FAST),
    ]
    first, second = (reg.fit(X, y) for reg in regs)
    assert first.estimator_ is net
    np.testing.assert_array_equal(first.predict(new), net.predict(new))
    std = first.predict(new, return_std=True)[1]
    np.testing.assert_array_equal(second.predict(new, return_std=True)[1], std)
    assert first.uq_.gram.count == 30 and first.report_.rows == 30
    assert RigidityRegressor(net, prefit=True).fit(X, y).report_.seen == 0
    given = RigidityRegressor(net, prefit=True, **FAST).fit(X, y, train=data)
    assert given.uq_.gram.count == 80 and given.report_.rows == 60


def test_left_out_rows_of_a_linear_base_need_no_others(data, ridge):
    assert ridge.report_.rows == 0 and ridge.report_.seen == len(data[0])
    assert not ridge.report_.remarks
    fixed = RigidityRegressor(Ridge().fit(*data), prefit=True, valid=None).fit(*data)
    assert fixed.report_.rows == 0 and fixed.report_.seen == len(data[0])
    held = RigidityRegressor(make_pipeline(TargetEncoder(), Ridge()), random_state=0)
    X = np.column_stack([np.arange(80) % 3, np.arange(80) % 5]).astype(str)
    assert held.fit(X, data[1]).report_.rows == 16  # the encoder has seen the targets
    held = RigidityRegressor(
        make_pipeline(SelectFromModel(Lasso(alpha=0.3)), Ridge()), random_state=0
    )
    assert held.fit(*data).report_.rows == 16
    assert RigidityRegressor(make_pipeline(Ridge())).fit(*data).report_.rows == 0
    assert (
        RigidityRegressor(Ridge(), method=rg.Paper(criterion="loo")).fit(*data).report_.rows == 80
    )


def test_weights_are_routed_as_scikit_learn_is_told(data, new):
    X, y = data
    weight = np.random.default_rng(2).uniform(0.5, 2.0, len(y))
    with config_context(enable_metadata_routing=True):
        base = make_pipeline(PolynomialFeatures(1), Ridge().set_fit_request(sample_weight=True))
        reg = RigidityRegressor(base).fit(X, y, weight)
    expected = make_pipeline(PolynomialFeatures(1), Ridge()).fit(X, y, ridge__sample_weight=weight)
    np.testing.assert_allclose(reg.predict(new), expected.predict(new))


# Bad input.


def test_a_base_that_is_not_trained_is_refused(data):
    with pytest.raises(NotFittedError):
        RigidityRegressor(Ridge(), prefit=True).fit(*data)
    with pytest.raises(ValueError, match="prefit=True"):
        RigidityRegressor(Ridge()).fit(*data, train=data)


@pytest.mark.parametrize(
    ("base", "words"),
    [
        (KNeighborsRegressor(), "KNeighborsRegressor. It has no trained weights"),
        (SVR(), "Use KernelRidge"),
        (make_pipeline(StandardScaler(), LinearSVR()), "LinearSVR. Its loss"),
        (QuantileRegressor(), "no curvature"),
        (GaussianProcessRegressor(), "error bars of its own"),
        (LogisticRegression(), "Expected a regressor, got LogisticRegression"),
        (PLSRegression(2), "PLSRegression. Its directions"),
        ("ridge", "as Ridge.*, got 'ridge'"),
        (None, "got None"),
        (Ridge, "as Ridge"),
        (StandardScaler(), "Expected a regressor, got StandardScaler"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_such_error_bars_is_refused_before_it_is_trained(data, base, words):
    with pytest.raises(TypeError, match=words):
        RigidityRegressor(base).fit(*data)


def test_links_and_losses_that_cannot_be_read_are_refused(data):
    X, y = data[0], np.exp(data[1] / 10)
    with pytest.raises(ValueError, match="PoissonRegressor cannot be read as a linear model"):
        RigidityRegressor(PoissonRegressor(), **FAST).fit(X, y)
    for base in (
        MLPRegressor(hidden_layer_sizes=3, loss="poisson", solver="lbfgs", max_iter=2000),
        SGDRegressor(loss="epsilon_insensitive"),
    ):
        with pytest.raises(ValueError, match=r"with the loss .* squared error"):
            RigidityRegressor(base, **FAST).fit(X, y)
    for base in (
        LGBMRegressor(n_estimators=3, objective="quantile", verbose=-1),
        RandomForestRegressor(n_estimators=3, criterion="absolute_error"),
    ):
        with pytest.raises(ValueError, match=r"with the loss '(quantile|absolute_error)'"):
            RigidityRegressor(base, **FAST).fit(X, y)
    with pytest.raises(ValueError, match="precomputed"):
        RigidityRegressor(KernelRidge(kernel="precomputed")).fit(X @ X.T, y)


class Sorted(TransformerMixin, BaseEstimator):
    def fit(self, X, y=None):
        return self

    def transform(self, X):
        return np.sort(X, axis=0)

    def __sklearn_is_fitted__(self):
        return True


class Turned(Sorted):
    def transform(self, X):
        return X[::-1]


class Fewer(Sorted):
    def transform(self, X):
        return X[1:]


def test_transformers_that_move_or_drop_rows_are_refused(data):
    with pytest.raises(ValueError, match="must not reorder or mix"):
        RigidityRegressor(make_pipeline(Sorted(), Ridge())).fit(*data)
    for base in (make_pipeline(Sorted(), Ridge()), make_pipeline(Turned(), Ridge())):
        with pytest.raises(ValueError, match="must not reorder or mix"):
            RigidityRegressor(base, method="textbook").fit(*data)
    base = make_pipeline(Fewer(), Ridge().fit(*data))
    with pytest.raises(ValueError, match="79 rows for 80"):
        RigidityRegressor(base, prefit=True, valid=None).fit(*data)


def test_bad_numbers_and_options_are_refused_and_change_nothing(data, new):
    X, y = data
    reg = RigidityRegressor(Ridge(), method="textbook").fit(X, y)
    before = reg.predict(new, return_std=True)
    holes = np.where(np.arange(len(y)) == 3, np.nan, y)
    with pytest.raises(ValueError, match=r"Input y contains NaN"):
        reg.fit(X, holes)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        reg.fit(X, y[:-1])
    with pytest.raises(ValueError, match="1 sample"):
        reg.fit(X[:1], y[:1])
    with (
        pytest.warns(match="reproduces its training rows"),
        pytest.raises(ValueError, match="leave-one-out errors do not exist"),
    ):
        RigidityRegressor(LinearRegression(), valid=None).fit(X[:4], y[:4])
    with pytest.raises(ValueError, match="both the rows and train="):
        RigidityRegressor(Ridge().fit(X, y), prefit=True).fit(X, y, train=(X, y, y**2))
    for given in ((X,), X):
        with pytest.raises(ValueError, match="Expected train="):
            RigidityRegressor(Ridge().fit(X, y), prefit=True).fit(X, y, train=given)
    assert RigidityRegressor(Ridge(), valid=np.float32(0.25), **FAST).fit(X, y).report_.rows == 20
    with pytest.raises(ValueError, match="refit=True"):
        RigidityRegressor(GridSearchCV(Ridge(), {"alpha": [1.0]}, refit=False)).fit(X, y)
    with pytest.raises(ValueError, match="larger alpha"):
        RigidityRegressor(KernelRidge(kernel="rbf", gamma=0.01, alpha=1e-10)).fit(X, y)
    for share in (0, 1.5, "some"):
        with pytest.raises(ValueError, match="share between 0 and 1"):
            RigidityRegressor(Ridge(), valid=share).fit(X, y)
    for method in ("nll", rg.Full, 3):
        with pytest.raises(ValueError, match=r"method must be 'full', 'paper'.*also 'textbook'"):
            RigidityRegressor(Ridge(), method=method).fit(X, y)
    with pytest.raises(TypeError, match="Cannot read DummyRegressor"):
        RigidityRegressor(DummyRegressor()).fit(X, y)
    with pytest.raises(ValueError, match="not for both"):
        reg.predict(new, return_std=True, return_cov=True)
    with pytest.raises(ValueError, match="between 0 and 1"):
        reg.predict_interval(new, 90)
    with pytest.raises(ValueError, match="between 0 and 1"):
        reg.predict_quantiles(new, [0.5, 1.5])
    with pytest.raises(ValueError, match="list of levels"):
        reg.predict_quantiles(new, 0.5)
    np.testing.assert_array_equal(reg.predict(new, return_std=True), before)


@pytest.mark.parametrize("offset", [0.0, 3e6])
def test_a_base_is_compared_by_the_spread_of_its_targets(offset):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3))
    y = offset + 4 * (np.sin(2 * x[:, 0]) + 0.1 * rng.normal(size=200))
    first = GradientBoostingRegressor(n_estimators=10, init=Ridge(), random_state=0)
    with pytest.raises(ValueError, match="initial model, Ridge"):
        RigidityRegressor(first, random_state=0).fit(x, y)
    reg = RigidityRegressor(Ridge(), random_state=0).fit(x, y)
    reg.predict(x, return_std=True)
    reg.estimator_.intercept_ += 0.1  # of a spread of 4
    with pytest.raises(ValueError, match="has changed since fit"):
        reg.predict(x, return_std=True)


def test_predictions_far_from_the_training_targets_are_no_change():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3))
    reg = RigidityRegressor(Ridge(), random_state=0).fit(x, 1e-3 * x[:, 0] + 3e6)
    _, std = reg.predict(1e6 * x[:5], return_std=True)
    assert np.isfinite(std).all()


def test_a_host_in_single_precision_may_round_large_targets():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3)).astype(np.float32)
    y = 3e6 + 4 * x[:, 0] + 0.4 * rng.normal(size=200)

    class Rounded(Ridge):
        def predict(self, X):
            return super().predict(X).astype(np.float32)

    mean, std = RigidityRegressor(Rounded(), random_state=0).fit(x, y).predict(x, return_std=True)
    assert mean.dtype == np.float32 and np.isfinite(std).all()


@pytest.mark.filterwarnings("ignore:.*[Ii]ll-conditioned")
def test_a_penalty_that_rounding_hides_is_raised_with_a_word(data, new):
    X, y = data
    steep = np.c_[X[:, :1] * 1e4, X, X[:, :1] + 1e-5 * X[:, 1:2]]
    reg = RigidityRegressor(Ridge(alpha=1e-8), **FAST)
    with pytest.warns(UserWarning, match=r"penalty 1e-08 is lost.*StandardScaler"):
        reg.fit(steep, y)
    assert np.isfinite(reg.predict(steep, return_std=True)[1]).all()
