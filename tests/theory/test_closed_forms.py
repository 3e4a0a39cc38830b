"""Closed forms: linear regression, subset of regressors and Woodbury's identity."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rigidities.theory.closed_forms import (
    GaussianKernel,
    SubsetOfRegressors,
    dual_quadratic,
    kernel_quadratic,
    linear_regression,
    primal_quadratic,
    unexplained,
)
from tests.support.refusals import refused
from tests.support.tensors import normal

F64 = torch.float64


def assert_equal(got, expected, rtol=1e-8, atol=0.0):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=F64), rtol=rtol, atol=atol)


# --- linear regression ---


def penalised(width, seed=2):
    root = normal(width, width, seed=seed)
    return root @ root.T


@pytest.mark.parametrize("weighted", [False, True])
def test_a_penalty_matrix_gives_the_dense_coefficients_and_variance(weighted):
    X, y, x, penalty = normal(30, 4), normal(30, seed=1), normal(6, 4, seed=3), penalised(4)
    w = torch.linspace(0.5, 2, 30, dtype=F64) if weighted else torch.ones(30, dtype=F64)
    fit = linear_regression(
        X, y, penalty=penalty, ridge=0.3, weights=w if weighted else None, scale=0.7
    )
    hessian = X.T @ (w[:, None] * X) + penalty + 0.3 * torch.eye(4, dtype=F64)
    assert_equal(fit.parameters, torch.linalg.solve(hessian, X.T @ (w * y)))
    variance = 0.49 * ((x @ torch.linalg.inv(hessian)) * x).sum(1)
    assert_equal(fit.predict(x).variance, variance)
    assert_equal(fit.predict(x).mean, x @ fit.parameters, rtol=1e-12)
    noise = 0.49 if weighted else True
    assert_equal(fit.predict(x, noise=noise).variance, variance + 0.49)


def test_the_rigidity_is_the_curvature_of_the_penalised_loss():
    X, y, penalty, x = normal(12, 3), normal(12, seed=1), penalised(3), normal(3, seed=4)
    fit = linear_regression(X, y, penalty=penalty)

    def loss(w):
        return 0.5 * (y - X @ w).square().sum() + 0.5 * w @ penalty @ w

    hessian = torch.func.jacrev(torch.func.grad(loss))(fit.parameters)
    assert_equal(fit.rigidity(x[None]), 1 / (x @ torch.linalg.solve(hessian, x))[None])
    assert_equal(torch.func.grad(loss)(fit.parameters), torch.zeros(3), rtol=0, atol=1e-12)


def test_the_penalised_posterior_is_the_bayesian_one():
    X, penalty, sigma = normal(12, 3), penalised(3), 0.5
    prior = sigma**2 * torch.linalg.inv(penalty)  # condition the prior by Kalman's formula
    gain = prior @ X.T @ torch.linalg.inv(X @ prior @ X.T + sigma**2 * torch.eye(12, dtype=F64))
    fit = linear_regression(X, normal(12, seed=1), penalty=penalty, scale=sigma)
    assert_equal(fit.parameter_covariance, prior - gain @ X @ prior, atol=1e-12)


def test_bad_linear_regressions_are_refused():
    refused(
        "3 rows do not determine",
        linear_regression,
        normal(3, 5),
        normal(3),
    )
    refused(r"y of shape \(5,\)", linear_regression, normal(5, 2), normal(4))
    refused("weights >= 0", linear_regression, normal(5, 2), normal(5), weights=-torch.ones(5))


# --- subset of regressors ---


def subset(inputs=1, rows=40, points=9, noise=0.04, length=0.5):
    X = 2 * torch.rand(rows, inputs, generator=torch.Generator().manual_seed(0), dtype=F64)
    y = torch.sin(3 * X).sum(1) + math.sqrt(noise) * normal(rows, seed=1)
    kernel = GaussianKernel(length=length, variance=1.7)
    Z = X[:points] if inputs > 1 else torch.linspace(0, 2, points, dtype=F64)[:, None]
    return SubsetOfRegressors(kernel, Z, noise), X, y, Z


@pytest.mark.parametrize("inputs", [1, 3])
def test_subset_of_regressors_equals_the_dense_formula(inputs):
    model, X, y, Z = subset(inputs)
    x = 2 * torch.rand(20, inputs, generator=torch.Generator().manual_seed(5), dtype=F64)
    Knm, Kmm, k = model.kernel(X, Z), model.kernel(Z, Z), model.kernel(x, Z)
    hessian = Knm.T @ Knm + model.noise * Kmm
    p = model.fit(X, y).predict(x)
    assert_equal(p.epistemic, model.noise * (k @ torch.linalg.inv(hessian) * k).sum(1))
    assert_equal(p.mean, k @ torch.linalg.solve(hessian, Knm.T @ y), atol=1e-10)
    assert_equal(p.rigidity, model.noise / p.epistemic)
    assert model.rank == len(Z) and model.dropped == 0


def sklearn_process(noise, length=0.3):
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel

    kernel = ConstantKernel(1.7, "fixed") * RBF(length, "fixed")
    return GaussianProcessRegressor(kernel, alpha=noise, optimizer=None)


@pytest.mark.parametrize("own_kernel", [True, False], ids=["torch kernel", "sklearn kernel"])
def test_at_its_inducing_points_it_is_the_full_gaussian_process(own_kernel):
    noise, x = 0.01, torch.linspace(0, 3, 8, dtype=F64)
    y, process = torch.sin(x), sklearn_process(noise)
    kernel = GaussianKernel(0.3, 1.7) if own_kernel else process.kernel
    model = SubsetOfRegressors(kernel, x, noise)
    mean, std = process.fit(x[:, None].numpy(), y.numpy()).predict(
        x[:, None].numpy(), return_std=True
    )
    p = model.fit(x, y).predict(x)
    assert_equal(p.std, std)
    assert_equal(p.mean, mean)
    assert_equal(model.unexplained(x), torch.zeros(8), rtol=0, atol=1e-12)


def test_what_is_left_unexplained_is_never_negative():
    points = torch.linspace(0, 3, 12, dtype=torch.float64)
    model = SubsetOfRegressors(GaussianKernel(), inducing=points, noise=0.1)
    at = torch.cat([points, torch.linspace(0, 3, 101, dtype=torch.float64)])
    rest = model.unexplained(at)
    assert bool((rest >= 0).all())
    assert bool((rest == 0).any())  # where the difference itself is below zero by rounding
    assert float(rest.max()) < 1e-6

    def indefinite(X, Z):
        return torch.where(Z.mT == X, 1.0, 2.0).to(torch.float64)

    lying = SubsetOfRegressors(indefinite, inducing=[0.0], noise=0.1)
    refused(r"features carry more.*is -3", lying.unexplained, [1.0])


def test_elsewhere_it_lacks_what_its_points_leave_unexplained():
    noise, x = 0.01, torch.linspace(0, 3, 8, dtype=F64)
    process = sklearn_process(noise).fit(x[:, None].numpy(), torch.sin(x).numpy())
    model = SubsetOfRegressors(GaussianKernel(0.3, 1.7), x, noise)
    at = torch.linspace(-2, 5, 60, dtype=F64)
    mean, std = process.predict(at[:, None].numpy(), return_std=True)
    p = model.fit(x, torch.sin(x)).predict(at)
    assert_equal(p.mean, mean, atol=1e-10)
    assert_equal(p.variance + model.unexplained(at), std**2)
    assert float((p.variance / torch.as_tensor(std) ** 2).min()) < 1e-3


def test_far_from_the_data_its_variance_vanishes_and_the_full_one_does_not():
    noise, x = 0.01, torch.linspace(0, 3, 8, dtype=F64)
    model = SubsetOfRegressors(GaussianKernel(0.3, 1.7), x, noise)
    far = model.fit(x, torch.sin(x)).predict([5.0, 10.0, 40.0])
    process = sklearn_process(noise).fit(x[:, None].numpy(), torch.sin(x).numpy())
    _, std = process.predict(np.array([[5.0], [10.0], [40.0]]), return_std=True)
    assert bool((far.std < 1e-6).all())
    np.testing.assert_allclose(std, math.sqrt(1.7), rtol=1e-6)
    np.testing.assert_allclose(model.unexplained([40.0]), 1.7)


def test_an_ill_conditioned_kernel_keeps_its_digits_and_says_what_it_dropped():
    # 60 crowded points: K_mm has numerical rank 14, and the dense formula has no digit left.
    noise, x = 1e-4, torch.linspace(0, 1, 60, dtype=F64)
    kernel = GaussianKernel(0.5)
    model = SubsetOfRegressors(kernel, x, noise)
    assert model.rank < 25
    assert 0 < model.dropped < 60 * model.floor
    column = x[:, None]
    K = kernel(column, column)
    exact = K - K @ torch.linalg.solve(K + noise * torch.eye(60, dtype=F64), K)
    p = model.fit(x, torch.sin(6 * x)).predict(x)
    assert_equal(p.variance, exact.diagonal(), rtol=1e-6)
    naive = noise * (K @ torch.linalg.pinv(K.T @ K + noise * K, rtol=0.0) * K).sum(1)
    assert float((naive / exact.diagonal() - 1).abs().max()) > 1e-4


def test_joint_covariances_and_samples_are_those_of_the_process():
    model, X, y, Z = subset()
    fit, x = model.fit(X, y), torch.tensor([[0.2], [0.3], [1.9]], dtype=F64)
    Knm, Kmm, k = model.kernel(X, Z), model.kernel(Z, Z), model.kernel(x, Z)
    dense = model.noise * k @ torch.linalg.inv(Knm.T @ Knm + model.noise * Kmm) @ k.T
    assert_equal(fit.covariance(x), dense, atol=1e-10)
    draws = fit.sample(50_000, torch.Generator().manual_seed(0)) @ model.features(x).T
    std = dense.diagonal().sqrt()
    assert float(((draws.T.cov() - dense) / std / std[:, None]).abs().max()) < 0.03
    assert float(((draws.mean(0) - fit.predict(x).mean) / std).abs().max()) < 0.03


def test_bad_kernels_and_noise_are_refused():
    x = torch.linspace(0, 1, 5)
    refused("above zero, got 0", SubsetOfRegressors, GaussianKernel(), x, 0.0)
    with pytest.raises(ValueError, match="positive semi-definite kernel"):
        SubsetOfRegressors(lambda X, Z: -GaussianKernel()(X, Z), x, 1.0).fit(x, x)
    with pytest.raises(ValueError, match=r"kernel to return \(5, 5\) .* got \(5, 1\)"):
        SubsetOfRegressors(lambda X, Z: X, x, 1.0).fit(x, x)
    with pytest.raises(ValueError, match=r"x \(N, d\) or \(N,\), got \(1, 5, 1\)"):
        SubsetOfRegressors(GaussianKernel(), x, 1.0).features(x[None, :, None])
    refused("finite", SubsetOfRegressors(GaussianKernel(), x * math.nan, 1.0).fit, x, x)


# --- Woodbury ---


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.floats(1e-3, 1e3), st.integers(0, 99))
def test_woodburys_forms_agree(rows, width, ridge, seed):
    F, f = normal(rows, width, seed=seed), normal(4, width, seed=seed + 1)
    dense = (f @ torch.linalg.inv(F.T @ F + ridge * torch.eye(width, dtype=F64)) * f).sum(1)
    assert_equal(primal_quadratic(F, f, ridge), dense)
    assert_equal(dual_quadratic(F, f, ridge), dense)
    assert_equal(kernel_quadratic(F @ F.T, F @ f.T, (f * f).sum(1), ridge), dense)


@pytest.mark.parametrize("ridge", [1e-4, 1e-6])
def test_the_limit_of_the_dual_form_is_the_distance_from_the_rows(ridge):
    F, f = normal(5, 9), normal(4, 9, seed=1)
    projected = f.square().sum(1) - ((f @ F.T @ torch.linalg.inv(F @ F.T)) * (f @ F.T)).sum(1)
    assert_equal(unexplained(F, f), projected, rtol=1e-10)
    assert_equal(ridge * dual_quadratic(F, f, ridge), projected, rtol=10 * ridge)
    assert_equal(ridge * primal_quadratic(F, f, ridge), projected, rtol=10 * ridge)


@pytest.mark.parametrize("rows", [9, 30])
def test_nothing_is_unexplained_once_the_rows_span_the_features(rows):
    F, f = normal(rows, 9), normal(4, 9, seed=1)
    assert float(unexplained(F, f).max()) < 1e-24
    assert bool((primal_quadratic(F, f, 0.0) > 0.01).all())  # yet a ridge gives a variance


def test_duplicated_rows_explain_no_more():
    F, f = normal(5, 9), normal(4, 9, seed=1)
    assert_equal(unexplained(torch.cat([F, F, F[:1] + F[1:2]]), f), unexplained(F, f))


def test_bad_quadratics_are_refused():
    F, f = normal(5, 3), normal(4, 3)
    refused(r"expected ridge > 0, got 0\.0.*unexplained", dual_quadratic, F, f, 0.0)
    refused(r"F \(N, D\) and f \(M, D\)", dual_quadratic, F, f[:, :2], 1.0)
    refused(r"kernel \(N, N\) and cross \(N, M\)", kernel_quadratic, F, F @ f.T, torch.ones(4), 1.0)
    refused("singular", primal_quadratic, F[:2], f, 0.0)
