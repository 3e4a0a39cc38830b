"""What is computed without `LastLayerRigidity` of one's own: other façades, theory, doors.

A case gets a record, the verbs and the precision of the model. `DOOR_CASES` work in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import rigidities as rg
from benchmarks.before_and_after.cases import record_report, seeded
from benchmarks.before_and_after.problems import F64, Network, plain, table
from benchmarks.before_and_after.results import Record
from benchmarks.before_and_after.verbs import Method, Verbs, paper

REGRESSOR_METHODS: dict[str, Method] = {
    "paper": paper(),
    "constant": paper(noise="constant"),
    "bayes": paper(noise="bayes"),
    "bins": paper(criterion="bins"),
}


# --- PredictionRigidity ---


def curve(w: Tensor, t: Tensor) -> Tensor:
    """A decay to a constant, in three parameters."""
    return w[0] * torch.exp(-w[1] * t) + w[2]


def decay(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Times and noisy values of the curve."""
    t = 4 * torch.rand(rows, generator=seeded(seed), dtype=F64)
    noise = 0.1 * torch.randn(rows, generator=seeded(seed + 1), dtype=F64)
    return t, curve(torch.tensor([3.0, 0.7, 0.5], dtype=F64), t) + noise


def fitted_curve(t: Tensor, y: Tensor) -> Tensor:
    """The parameters of least squares, by Gauss-Newton steps."""
    w = torch.tensor([3.0, 0.7, 0.5], dtype=F64)
    for _ in range(30):
        jacobian = torch.func.jacrev(curve)(w, t)
        w = w + torch.linalg.lstsq(jacobian, (y - curve(w, t))[:, None]).solution[:, 0]
    return w


def of_curve(record: Record, verbs: Verbs, dtype: torch.dtype) -> None:
    """A function of few parameters, in every form of the Hessian."""
    train, valid, test = decay(40, 0), decay(60, 2), decay(10, 4)
    w = fitted_curve(*train).to(dtype)
    train, valid, test = ((t.to(dtype), y.to(dtype)) for t, y in (train, valid, test))
    for hessian in ("gauss-newton", "exact"):
        for form in ("dense", "dual") if hessian == "gauss-newton" else ("dense",):
            regressor = rg.PredictionRigidity(curve, w, hessian=hessian, form=form, ridge=0.01)
            name = f"{hessian}, {form}"
            record.run(name, of_regressor, verbs, regressor, train, valid, test[0])
    regressor = rg.PredictionRigidity(curve, w).fit(train)
    method = paper(distribution="student-t")
    record.run("student-t", calibrated_regressor, verbs, regressor, valid, test[0], method)


def of_network(record: Record, verbs: Verbs, dtype: torch.dtype) -> None:
    """All weights of a network, in forms that must agree."""
    for targets in (1, 3):
        problem = plain(dtype, targets)
        for form in ("dense", "dual"):
            regressor = rg.PredictionRigidity(problem.model, form=form, ridge=1.0)
            name = f"{form}, {targets} targets"
            data = (problem.train, problem.valid, problem.few)
            record.run(name, of_regressor, verbs, regressor, *data)


def of_regressor(
    record: Record, verbs: Verbs, regressor: Any, train: Any, valid: Any, test: Any
) -> None:
    """A fit, its bars, and its calibrations."""
    regressor.fit(train)
    record.fields(regressor, ("ridge", "scale", "gradient_norm", "residual_scale"))
    record.attempt("variance", lambda: regressor.variance(test))
    record.attempt("rigidity", lambda: regressor.rigidity(test))
    record.attempt("covariance", lambda: regressor.covariance(test))
    record.attempt("covariance of two", lambda: regressor.covariance(test, test[:2]))
    record.attempt("sample", lambda: regressor.sample(2, seeded()))
    record.attempt("parameter_std", lambda: regressor.parameter_std)
    record.attempt("propagate", lambda: regressor.propagate(lambda y: y.sum()[None], test).std)
    for name, method in REGRESSOR_METHODS.items():
        record.run(name, calibrated_regressor, verbs, regressor, valid, test, method)


def calibrated_regressor(
    record: Record, verbs: Verbs, regressor: Any, valid: Any, test: Any, method: Method
) -> None:
    """A calibration by the paper's method, and its bars."""
    verbs.calibrate_regressor(regressor, valid, method)
    record_report(record.under("report"), regressor.calibration_report)
    p = regressor.predict(test)
    record.fields(p, ("mean", "std", "epistemic", "noise", "rigidity"))
    record.attempt("interval", lambda: verbs.interval(p, 0.9))
    record.attempt("covariance", lambda: regressor.covariance(test))
    record.attempt("sample", lambda: regressor.sample(2, seeded()))


# --- Theory ---


def kernels(record: Record, verbs: Verbs, dtype: torch.dtype) -> None:
    """Kernels of wide networks, and the processes that they train to."""
    rooms = verbs.kernels
    x, y = (tensor.to(dtype) for tensor in table(8, 1, seed=5))
    for activation in ("relu", "tanh", "gelu"):
        network = rooms.FullyConnected(depth=2, activation=activation, bias_variance=0.1)
        record.attempt(f"{activation}/nngp", lambda network=network: network.nngp(x, x[:3]))
        record.attempt(f"{activation}/ntk", lambda network=network: network.ntk(x, x[:3]))
        series = lambda activation=activation: rooms.dual_series(activation)  # noqa: E731
        record.attempt(f"{activation}/series", series)
    record.attempt("cubic corrections", lambda: tuple(rooms.cubic_corrections(0.9, 0.5, 2)))
    model = Network(2).to(dtype)
    record.attempt("empirical ntk", lambda: rooms.empirical_ntk(model, x))
    record.attempt("empirical nngp", lambda: rooms.empirical_nngp(model, x))
    features = model.trunk(x).detach()
    for time in (0.5, torch.inf):
        process = rooms.last_layer_process_at(time, features[:6], features[6:], y[:6, 0])
        record.under(f"process at {time}").fields(process, ("mean", "variance"))


def constrained(record: Record, verbs: Verbs, dtype: torch.dtype) -> None:
    """The rigidity by its definition."""
    t, y = decay(20, 0)
    w = fitted_curve(t, y)
    at = torch.tensor([1.3], dtype=F64)
    result = verbs.constrained_rigidity(curve, w, t, y, at)
    record.fields(result, ("rigidity", "error", "from_losses", "prediction", "losses"))


def closed_forms(record: Record, verbs: Verbs, dtype: torch.dtype) -> None:
    """Formulae of linear models and of Gaussian processes."""
    forms = verbs.closed_forms
    x, y = (tensor.to(dtype) for tensor in table(20, 1, seed=6))
    new = table(4, 1, seed=7)[0].to(dtype)
    record.attempt("primal", lambda: forms.primal_quadratic(x, new, 0.1))
    record.attempt("dual", lambda: forms.dual_quadratic(x, new, 0.1))
    record.attempt("unexplained", lambda: forms.unexplained(x[:3], new))
    fit = forms.linear_regression(x, y[:, 0], ridge=0.1)
    record_fit_rigidity(record.under("linear regression"), fit, new)
    kernel = forms.GaussianKernel(length=1.5)
    regressors = forms.SubsetOfRegressors(kernel, x[:6].to(F64), 0.1)
    fit = regressors.fit(x.to(F64), y[:, 0].to(F64))
    record_fit_rigidity(record.under("subset of regressors"), fit, new.to(F64))


def record_fit_rigidity(record: Record, fit: Any, x: Any) -> None:
    """The bars of a classical fit."""
    record.fields(fit, ("parameters", "parameter_std", "scale"))
    record.attempt("mean", lambda: fit.predict(x).mean)
    record.attempt("variance", lambda: fit.variance(x))
    record.attempt("rigidity", lambda: fit.rigidity(x))
    record.attempt("interval", lambda: fit.interval(x, 0.9))


# --- Parts that users call by themselves ---


def parts(record: Record, verbs: Verbs, dtype: torch.dtype) -> None:
    """Gram, posterior and selection by themselves."""
    features = table(40, 1, seed=8)[0].to(dtype)
    new = table(5, 1, seed=9)[0].to(dtype)
    weights = 0.5 + features[:, 0].abs().to(F64)
    gram = rg.Gram(features.shape[1])
    gram.update(features, weights)
    record.fields(gram, ("matrix", "count"))
    posterior = rg.Posterior.from_gram(gram, ridge=0.1).with_scale(torch.tensor([0.7], dtype=F64))
    record.fields(posterior, ("eigenvalues", "effective_rank", "condition"))
    rows = new.to(F64)
    record.attempt("variance", lambda: posterior.variance(rows))
    record.attempt("rigidity", lambda: posterior.rigidity(rows))
    record.attempt("covariance", lambda: posterior.covariance(rows))
    record.attempt("sample", lambda: posterior.sample(3, seeded()))
    record.attempt("truncated", lambda: posterior.truncate(2).variance(rows))
    chosen = rg.selection.greedy(posterior, features.to(F64), 4)
    record.under("greedy").fields(chosen, ("indices", "gains"))
    owners = torch.tensor([0, 0, 1, 1, 1])
    record.attempt("shares", lambda: rg.local.shares(posterior, rows, owners))
    mean, std, y = torch.zeros(40, dtype=F64), weights, features[:, 1].to(F64)
    record.attempt("metrics", lambda: rg.metrics.summary(mean, std, y))


def mean_of_networks(record: Record, verbs: Verbs, dtype: torch.dtype) -> None:
    """Several networks as one model."""
    problem = plain(dtype, 1)
    other = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
    with torch.no_grad():
        for number, parameter in enumerate(other.parameters()):
            values = torch.randn(parameter.shape, generator=seeded(number), dtype=F64)
            parameter.copy_(0.3 * values)
    uq = rg.LastLayerRigidity(rg.MeanOf([problem.model, other])).fit(problem.train)
    verbs.calibrate(uq, problem.valid, paper(noise="constant"))
    p = uq.predict(problem.test)
    record.fields(p, ("mean", "std", "epistemic", "noise"))


MODEL_CASES: dict[str, Callable[..., None]] = {
    "regressor/curve": of_curve,
    "regressor/network": of_network,
    "theory/kernels": kernels,
    "theory/constrained": constrained,
    "theory/closed forms": closed_forms,
    "parts": parts,
    "mean of networks": mean_of_networks,
}


# --- Doors, in float64 ---


def numpy_table(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of `table` as arrays, (N, 4) and (N,)."""
    x, y = table(rows, 1, seed)
    return x.numpy(), y[:, 0].numpy()


def regressors_of_scikit_learn(record: Record, verbs: Verbs) -> None:
    """Linear models, kernels, networks and trees, with the default options."""
    from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
    from sklearn.kernel_ridge import KernelRidge
    from sklearn.linear_model import LinearRegression, Ridge
    from sklearn.neural_network import MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    bases = {
        "linear": LinearRegression(),
        "ridge": make_pipeline(StandardScaler(), Ridge(0.5)),
        "kernel ridge": KernelRidge(alpha=0.5, kernel="rbf"),
        "network": MLPRegressor(hidden_layer_sizes=(8,), max_iter=20, random_state=0),
        "forest": RandomForestRegressor(10, min_samples_leaf=10, random_state=0),
        "boosting": HistGradientBoostingRegressor(max_iter=10, max_leaf_nodes=6, random_state=0),
    }
    for name, base in bases.items():
        record.run(name, regressor_of_scikit_learn, verbs, base)
        record.run(f"{name}, prefit", regressor_of_scikit_learn, verbs, base, True)


def regressor_of_scikit_learn(
    record: Record, verbs: Verbs, base: Any, prefit: bool = False
) -> None:
    """One base, trained by the estimator or before it."""
    from rigidities.sklearn import RigidityRegressor

    train, more, test = numpy_table(200, 0), numpy_table(100, 1), numpy_table(12, 2)
    estimator = RigidityRegressor(base, prefit=prefit, random_state=0)
    if prefit:
        base.fit(*train)
        estimator.fit(*more)
    else:
        estimator.fit(*train)
    record.attempt("mean and std", lambda: estimator.predict(test[0], return_std=True))
    record.attempt("interval", lambda: estimator.predict_interval(test[0], 0.9))
    record.attempt("quantiles", lambda: estimator.predict_quantiles(test[0], [0.1, 0.5]))
    record.attempt("log_prob", lambda: estimator.log_prob(*test))
    record.attempt("crps", lambda: estimator.crps(*test))
    record.attempt("score", lambda: estimator.score(*test))
    record.attempt("report", lambda: str(estimator.report_))


def classical_fits(record: Record, verbs: Verbs) -> None:
    """Fits of NumPy and SciPy."""
    from scipy.optimize import curve_fit

    t, y = (tensor.numpy() for tensor in decay(30, 0))
    at = np.linspace(0, 6, 5)
    coefficients = np.polyfit(t, y, 2)
    record_fit_rigidity(record.under("polyfit"), rg.fits.polyfit(coefficients, t, y), at)

    def function(t: Any, a: Any, b: Any, c: Any) -> Any:
        return a * np.exp(-b * t) + c

    popt, pcov = curve_fit(function, t, y, p0=(3.0, 0.7, 0.5))
    fit = rg.fits.curve_fit(function, popt, pcov, x=t, y=y)
    record_fit_rigidity(record.under("curve_fit"), fit, at)


DOOR_CASES: dict[str, Callable[..., None]] = {
    "scikit-learn": regressors_of_scikit_learn,
    "fits": classical_fits,
}
