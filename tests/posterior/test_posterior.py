"""The posterior: variances equal dense float64 references and textbook limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rigidities import Gram, Posterior
from rigidities.posterior.quadratic import LARGEST_ROUNDING, QuadraticForm, rounding_bound
from tests.support import oracle
from tests.support.refusals import refused
from tests.support.tensors import normal

F64 = torch.float64
TRAIN, TEST = normal(40, 5), normal(8, 5, seed=1)


def gram_of(features, weights=None, **kwargs):
    gram = Gram(features.shape[-1], **kwargs)
    gram.update(features, weights)
    return gram


def with_condition(condition, rows=500, width=20, seed=0):
    """Features whose singular values span the given range."""
    u, _ = torch.linalg.qr(normal(rows, width, seed=seed))
    v, _ = torch.linalg.qr(normal(width, width, seed=seed + 1))
    return u * torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), width, dtype=F64) @ v


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 10.0])
def test_variance_equals_the_dense_reference(ridge):
    train, test = normal(40, 6), normal(9, 6, seed=1)
    posterior = Posterior.from_gram(gram_of(train), ridge=ridge)
    expected = torch.as_tensor(oracle.quadratic(train, test, ridge))
    torch.testing.assert_close(posterior.variance(test), expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(posterior.rigidity(test), 1 / expected, rtol=1e-10, atol=0)


def test_variance_holds_to_a_millionth_at_condition_1e4():
    train, test = with_condition(1e4), with_condition(1e4, rows=50, seed=7)
    posterior = Posterior.from_gram(gram_of(train), ridge=0.0)
    expected = torch.as_tensor(oracle.quadratic(train, test, 0.0))
    torch.testing.assert_close(posterior.variance(test), expected, rtol=1e-6, atol=0)
    assert posterior.condition == pytest.approx(1e8, rel=1e-4)


def test_linear_regression_with_a_penalty_matrix():
    train, test, root = normal(30, 4), normal(5, 4, seed=1), normal(4, 4, seed=2)
    penalty = root @ root.T
    posterior = Posterior.from_gram(gram_of(train), ridge=0.0, penalty=penalty)
    expected = ((test @ torch.linalg.inv(train.T @ train + penalty)) * test).sum(1)
    torch.testing.assert_close(posterior.variance(test), expected)


def test_woodburys_two_forms_agree():
    train, test, s = normal(7, 12), normal(4, 12, seed=1), 0.3
    posterior = Posterior.from_gram(gram_of(train), ridge=s)
    inner = torch.linalg.inv(train @ train.T + s * torch.eye(7, dtype=F64))
    dual = (test.square().sum(1) - ((test @ train.T @ inner) * (test @ train.T)).sum(1)) / s
    torch.testing.assert_close(posterior.variance(test), dual)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.floats(1e-6, 1e3))
def test_adding_data_never_lowers_a_rigidity(rows, ridge):
    few = Posterior.from_gram(gram_of(TRAIN[:rows]), ridge=ridge).rigidity(TEST)
    more = Posterior.from_gram(gram_of(TRAIN), ridge=ridge).rigidity(TEST)
    assert bool((more >= few * (1 - 1e-9)).all())


@settings(max_examples=25, deadline=None)
@given(st.floats(1e-3, 1e3))
def test_scaling_features_and_root_ridge_together_changes_nothing(factor):
    plain = Posterior.from_gram(gram_of(TRAIN), ridge=0.1).variance(TEST)
    scaled = Posterior.from_gram(gram_of(factor * TRAIN), ridge=0.1 * factor**2)
    torch.testing.assert_close(scaled.variance(factor * TEST), plain, rtol=1e-8, atol=0)


def test_permuting_features_changes_nothing():
    train, test, order = normal(40, 5), normal(8, 5, seed=1), torch.randperm(5)
    plain = Posterior.from_gram(gram_of(train), ridge=0.1).variance(test)
    permuted = Posterior.from_gram(gram_of(train[:, order]), ridge=0.1).variance(test[:, order])
    torch.testing.assert_close(permuted, plain)


def test_another_ridge_needs_no_factorisation(monkeypatch):
    posterior = Posterior.from_gram(gram_of(TRAIN), ridge=0.1)
    monkeypatch.setattr(torch.linalg, "eigh", None)
    again = posterior.with_ridge(2.0)
    expected = torch.as_tensor(oracle.quadratic(TRAIN, TEST, 2.0))
    torch.testing.assert_close(again.variance(TEST), expected)


def test_targets_share_the_eigenbasis_each_with_its_scale():
    posterior = Posterior.from_gram(gram_of(TRAIN), ridge=0.1)
    several = posterior.with_scale(torch.tensor([1.0, 2.0, 3.0]))
    q = posterior.variance(TEST)
    torch.testing.assert_close(several.variance(TEST), q[:, None] * torch.tensor([1.0, 4, 9]))
    assert several.eigenvectors is posterior.eigenvectors


def test_covariance_is_the_dense_one():
    train, a, b = normal(40, 5), normal(4, 5, seed=1), normal(3, 5, seed=2)
    posterior = Posterior.from_gram(gram_of(train), ridge=0.1).with_scale(2.0)
    inverse = torch.linalg.inv(train.T @ train + 0.1 * torch.eye(5, dtype=F64))
    torch.testing.assert_close(posterior.covariance(a, b), 4 * a @ inverse @ b.T)
    torch.testing.assert_close(posterior.covariance(a).diagonal(), posterior.variance(a))
    several = posterior.with_scale(torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(several.covariance(a, b)[1], 9 * a @ inverse @ b.T)


@pytest.mark.parametrize("form", ["full", "complement"])
def test_samples_have_the_posterior_covariance(form):
    train, n = normal(40, 4), 200_000
    posterior = Posterior.from_gram(gram_of(train), ridge=5.0).with_scale(2.0)
    if form == "complement":
        posterior = posterior.truncate(2)
    draws = posterior.sample(n, generator=torch.Generator().manual_seed(0))
    expected = posterior.covariance(torch.eye(4, dtype=F64))
    spread = (expected.diagonal()[:, None] * expected.diagonal()).sqrt()
    assert draws.shape == (n, 4)
    assert bool(((draws.T @ draws / n - expected).abs() < 6 * spread / n**0.5).all())


def test_samples_of_several_targets_have_their_own_scales():
    posterior = Posterior.from_gram(gram_of(normal(40, 4)), ridge=5.0)
    draws = posterior.with_scale(torch.tensor([1.0, 10.0])).sample(500)
    assert draws.shape == (500, 2, 4)
    assert 5 < float(draws[:, 1].std() / draws[:, 0].std()) < 20


@pytest.mark.parametrize("form", ["inverse", "complement"])
def test_truncation_at_full_rank_changes_nothing(form):
    test = normal(8, 6, seed=1)
    posterior = Posterior.from_gram(gram_of(normal(40, 6)), ridge=0.1)
    whole = posterior.truncate(6, form=form)
    torch.testing.assert_close(whole.variance(test), posterior.variance(test))
    assert whole.error == 0


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_the_truncated_inverse_bounds_from_below_within_its_error(rank):
    test = normal(2000, 6, seed=1)
    posterior = Posterior.from_gram(gram_of(with_condition(30, width=6)), ridge=0.01)
    cut = posterior.truncate(rank, form="inverse")
    lost = posterior.variance(test) - cut.variance(test)
    largest = test.square().sum(1) / posterior.precisions[0]
    assert bool((lost >= -1e-9).all()) and bool((lost <= cut.error * largest * (1 + 1e-9)).all())
    worst = posterior.eigenvectors[:, rank]
    assert float(posterior.variance(worst) - cut.variance(worst)) == pytest.approx(
        cut.error / float(posterior.precisions[0])
    )


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_the_ridge_only_complement_bounds_from_above_within_its_error(rank):
    test = normal(2000, 6, seed=1)
    posterior = Posterior.from_gram(gram_of(with_condition(30, width=6)), ridge=0.01)
    cut = posterior.truncate(rank)
    ratio = cut.variance(test) / posterior.variance(test)
    assert bool((ratio >= 1 - 1e-9).all()) and bool((ratio <= 1 + cut.error + 1e-9).all())
    worst = posterior.eigenvectors[:, 5 - rank]
    assert float(cut.variance(worst) / posterior.variance(worst)) == pytest.approx(1 + cut.error)


def test_a_rank_can_be_asked_for_by_accuracy():
    posterior = Posterior.from_gram(gram_of(with_condition(1e3)), ridge=1e-4)
    for form in ("inverse", "complement"):
        cut = posterior.truncate(accuracy=0.05, form=form)
        assert cut.error <= 0.05 < posterior.truncate(cut.rank - 1, form=form).error


def test_one_gram_per_target_gives_each_its_own_variance():
    train, test, weights = normal(40, 5), normal(8, 5, seed=1), normal(40, 2, seed=2).abs()
    posterior = Posterior.from_gram(gram_of(train, weights, targets=2), ridge=0.1)
    for k in range(2):
        alone = Posterior.from_gram(gram_of(train, weights[:, k]), ridge=0.1)
        torch.testing.assert_close(posterior.variance(test)[:, k], alone.variance(test))
        form = QuadraticForm.of(posterior, F64)
        torch.testing.assert_close(form(test)[:, k], alone.variance(test))


# --- the fast form ------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 5, 64, 65, 200])
def test_the_triangular_form_equals_the_eigenbasis(width):
    train, test = normal(300, width), normal(11, width, seed=1)
    posterior = Posterior.from_gram(gram_of(train), ridge=0.1)
    torch.testing.assert_close(QuadraticForm.of(posterior, F64)(test), posterior.quadratic(test))


@pytest.mark.parametrize("condition", [10, 1e3, 1e4, 1e6])
def test_rounding_stays_below_its_bound_even_in_the_worst_direction(condition):
    posterior = Posterior.from_gram(gram_of(with_condition(condition)), ridge=0.0)
    test = torch.cat([with_condition(condition, seed=5), posterior.eigenvectors.T]).float()
    exact = posterior.quadratic(test)
    factor = posterior.factor.float()
    error = ((test @ factor.T).square().sum(1) / exact - 1).abs().max()
    assert float(error) <= rounding_bound(posterior, torch.float32)


def test_precision_switches_by_the_bound():
    easy = Posterior.from_gram(gram_of(with_condition(10)), ridge=0.0)
    hard = Posterior.from_gram(gram_of(with_condition(1e6)), ridge=0.0)
    assert QuadraticForm.of(easy, torch.float32).dtype == torch.float32
    form = QuadraticForm.of(hard, torch.float32)
    assert form.dtype == F64 and form.rounding <= LARGEST_ROUNDING
    test = torch.cat([with_condition(1e6, seed=5), hard.eigenvectors.T]).float()
    torch.testing.assert_close(form(test), hard.quadratic(test), rtol=1e-6, atol=0)


@pytest.mark.parametrize("condition", [10, 1e4, 1e6])
def test_the_stated_rounding_covers_gram_product_and_result(condition):
    train = with_condition(condition).float()
    test = torch.cat([with_condition(condition, seed=5), train[:50]]).float()
    posterior = Posterior.from_gram(gram_of(train), ridge=0.0)
    form = QuadraticForm.of(posterior, torch.float32)
    exact = torch.as_tensor(oracle.quadratic(train.double(), test.double(), 0.0))
    error = (form(test).float().double() / exact - 1).abs().max()
    assert float(error) <= form.rounding


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [-1.0, float("nan"), float("inf")])
def test_an_impossible_ridge_is_refused(ridge):
    posterior = Posterior.from_gram(gram_of(normal(40, 3)), ridge=1.0)
    refused("ridge must be finite and not negative", posterior.with_ridge, ridge)


FULL = gram_of(normal(40, 4))
SINGULAR = "Gram is singular: 4 samples for 6 features and ridge=0"


@pytest.mark.parametrize(
    ("gram", "options", "match"),
    [
        (gram_of(normal(4, 6)), {"ridge": 0.0}, SINGULAR),
        (Gram(3), {"ridge": 1.0}, "Gram matrix is zero"),
        (gram_of(torch.full((3, 2), torch.nan)), {"ridge": 1.0}, "NaN or infinity"),
        (FULL, {"ridge": -1.0}, "not negative, got -1"),  # and not called singular
        (FULL, {"ridge": 1.0, "penalty": torch.eye(3)}, r"must be \(4, 4\)"),
        (FULL, {"ridge": 1.0, "penalty": torch.ones(4, 4).triu()}, "symmetric"),
        (FULL, {"ridge": 1.0, "penalty": -torch.eye(4)}, "positive"),
    ],
    ids=["singular", "empty", "NaN", "ridge", "shape", "asymmetric", "negative"],
)
def test_a_gram_without_a_posterior_is_refused_by_its_cause(gram, options, match):
    refused(match, Posterior.from_gram, gram, **options)


def test_wrong_truncations_are_refused():
    posterior = Posterior.from_gram(gram_of(normal(40, 4)), ridge=0.0)
    refused("either a rank or an accuracy", posterior.truncate)
    refused("ridge > 0", posterior.truncate, 2, form="complement")
    refused(r"1\.\.4", posterior.truncate, 5, form="inverse")


def test_a_truncated_posterior_keeps_its_ridge_and_rank():
    posterior = Posterior.from_gram(gram_of(normal(40, 4)), ridge=0.1)
    cut = posterior.truncate(2)
    refused(r"truncated to rank 2. Choose the ridge first", cut.with_ridge, 1.0)
    refused(r"truncated to rank 2. Truncate the whole", cut.truncate, 1)
    assert cut.condition == pytest.approx(float(posterior.precisions[-1] / 0.1))
    assert posterior.truncate(accuracy=1e9).rank == 1


def test_features_that_differ_between_targets_give_one_variance_each():
    posterior = Posterior.from_gram(gram_of(normal(40, 4)), ridge=0.1)
    features = normal(6, 3, 4, seed=1)
    scaled = posterior.with_scale(torch.tensor([1.0, 2.0, 3.0])).variance(features)
    torch.testing.assert_close(scaled, posterior.quadratic(features) * torch.tensor([1.0, 4, 9]))


def test_samples_of_one_gram_per_target_have_its_shape():
    gram = gram_of(normal(40, 4), normal(40, 3, seed=1).abs(), targets=3)
    assert Posterior.from_gram(gram, ridge=0.1).sample(5).shape == (5, 3, 4)


def test_features_of_the_wrong_width_are_refused():
    posterior = Posterior.from_gram(gram_of(normal(40, 4)), ridge=0.0)
    refused("4 columns", posterior.variance, normal(3, 5))
