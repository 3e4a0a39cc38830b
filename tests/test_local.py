"""Local and component-wise rigidities equal loops over terms, and scikit-matter's numbers."""

import importlib.util
import math
import os
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rigidities import Gram, Posterior, local
from rigidities.posterior.quadratic import LARGEST_ROUNDING, QuadraticForm, rounding_bound
from tests.support.refusals import refused
from tests.support.tensors import normal

F64 = torch.float64
WIDTH, SIZES = 6, [3, 1, 4, 2, 5, 2, 3, 4, 1, 3]
EXACT = {"rtol": 1e-10, "atol": 1e-14}


def owners(sizes):
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


def problem(sizes=SIZES, width=WIDTH, seed=0):
    """Rows of unequal scale with their owners, in no order."""
    scale = torch.logspace(0, 2, width, dtype=F64)
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(seed))
    return (normal(sum(sizes), width, seed=seed) * scale)[order], owners(sizes)[order]


def posterior_of(features, groups, weights=None, ridge=0.1):
    gram = Gram(features.shape[1])
    gram.update(local.sums(features, groups), weights)
    return Posterior.from_gram(gram, ridge=ridge)


FEATURES, GROUPS = problem()
POSTERIOR = posterior_of(FEATURES, GROUPS)


def per_target(posteriors):
    """One posterior with a Gram per target."""
    first = posteriors[0]
    eigenvalues = torch.stack([p.eigenvalues for p in posteriors])
    return Posterior(eigenvalues, torch.stack([p.eigenvectors for p in posteriors]), first.ridge)


# --- the slow references: loops over terms, dense inverses, nothing of the library -------------


def looped_sums(features, groups, count):
    total = np.zeros((count, features.shape[1]))
    for f, group in zip(features.numpy(), groups.tolist(), strict=True):
        total[group] += f
    return total


def looped_inverse(features, groups, weights, ridge):
    hessian = ridge * np.eye(features.shape[1])
    total = looped_sums(features, groups, int(groups.max()) + 1)
    for f, c in zip(total, np.ones(len(total)) if weights is None else weights, strict=True):
        hessian += float(c) * np.outer(f, f)
    return np.linalg.inv(hessian)


def looped_rigidity(rows, inverse, masks):
    """(N, C): each row masked to each component's columns."""
    found = np.full((len(rows), len(masks)), np.inf)
    for i, f in enumerate(rows):
        for c, mask in enumerate(masks):
            q = (mask * f) @ inverse @ (mask * f)
            found[i, c] = 1 / q if q > 0 else np.inf
    return torch.from_numpy(found)


def masks_of(components, width=WIDTH):
    masks = np.zeros((len(components), width))
    for mask, columns in zip(masks, components, strict=True):
        mask[list(columns)] = 1
    return masks


WHOLE = [range(WIDTH)]


@pytest.mark.parametrize("weights", [None, torch.linspace(0, 2, len(SIZES), dtype=F64)])
def test_local_rigidities_equal_a_loop_over_the_terms(weights):
    inverse = looped_inverse(FEATURES, GROUPS, weights, 0.1)
    expected = looped_rigidity(FEATURES.numpy(), inverse, masks_of(WHOLE))[:, 0]
    posterior = posterior_of(FEATURES, GROUPS, weights)
    torch.testing.assert_close(local.rigidity(posterior, FEATURES), expected, **EXACT)
    torch.testing.assert_close(posterior.rigidity(FEATURES), expected, **EXACT)


COMPONENTS = {
    "sizes": ([1, 3, 2], [[0], [1, 2, 3], [4, 5]]),
    "a tensor of sizes": (torch.tensor([1, 3, 2]), [[0], [1, 2, 3], [4, 5]]),
    "an array of sizes": (np.array([1, 3, 2]), [[0], [1, 2, 3], [4, 5]]),
    "slices": ([slice(2), slice(2, None), slice(None, None, 2)], [[0, 1], [2, 3, 4, 5], [0, 2, 4]]),
    "indices": ([torch.tensor([5, 0]), [2, 3], np.array([1])], [[0, 5], [2, 3], [1]]),
    "masks": ([torch.arange(6) < 2, torch.arange(6) > 0], [[0, 1], [1, 2, 3, 4, 5]]),
}


@pytest.mark.parametrize("name", COMPONENTS)
def test_component_rigidities_equal_a_loop_over_terms_and_masks(name):
    components, columns = COMPONENTS[name]
    inverse = looped_inverse(FEATURES, GROUPS, None, 0.1)
    expected = looped_rigidity(FEATURES.numpy(), inverse, masks_of(columns))
    found = local.component_rigidity(POSTERIOR, FEATURES, components)
    torch.testing.assert_close(found, expected, **EXACT)
    total = looped_sums(FEATURES, GROUPS, len(SIZES))
    expected = looped_rigidity(total, inverse, masks_of(columns))
    found = local.component_rigidity(POSTERIOR, FEATURES, components, GROUPS)
    torch.testing.assert_close(found, expected, **EXACT)


def test_shares_equal_the_row_sums_of_the_local_covariance():
    inverse = looped_inverse(FEATURES, GROUPS, None, 0.1)
    dense = FEATURES.numpy() @ inverse @ FEATURES.numpy().T
    same = GROUPS[:, None] == GROUPS
    expected = (torch.from_numpy(dense) * same).sum(1)
    found = local.shares(POSTERIOR, FEATURES, GROUPS)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    sizes = [1, 3, 2]
    by_component = local.shares(POSTERIOR, FEATURES, GROUPS, sizes)
    total = looped_sums(FEATURES, GROUPS, len(SIZES))[GROUPS.numpy()]
    for c, mask in enumerate(masks_of([[0], [1, 2, 3], [4, 5]])):
        expected = ((FEATURES.numpy() * mask) @ inverse * total).sum(1)
        torch.testing.assert_close(
            by_component[:, c], torch.from_numpy(expected), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("condition", [1e2, 1e6, 1e10])
def test_ill_conditioned_grams_keep_their_digits(condition):
    # The reference solves in the exact eigenbasis, where the scales are known.
    width, count = 8, 40
    basis = torch.linalg.qr(normal(width, width)).Q
    lam = torch.logspace(0, -math.log10(condition), width, dtype=F64)
    posterior = Posterior(lam.flip(0), basis.flip(1), 0.0)
    rows = normal(count, width, seed=1)
    coordinates = rows @ basis
    expected = 1 / (coordinates.square() / lam).sum(1)
    torch.testing.assert_close(local.rigidity(posterior, rows), expected, rtol=1e-9, atol=0)
    inverse = (basis / lam) @ basis.mT
    q = torch.einsum("nd,de,ne->n", rows[:, 3:], inverse[3:, 3:], rows[:, 3:])
    found = local.component_rigidity(posterior, rows, [3, 5])[:, 1]
    torch.testing.assert_close(found, 1 / q, rtol=1e-9, atol=0)


# --- scikit-matter -----------------------------------------------------------------------------


class Looped:
    """Its conventions from their definitions: structure means, one global factor, alpha."""

    @staticmethod
    def local_prediction_rigidity(train, test, alpha):
        inverse, factor = Looped.inverse(train, alpha)
        return [[1 / ((x / factor) @ inverse @ (x / factor)) for x in part] for part in test], 0

    @staticmethod
    def componentwise_prediction_rigidity(train, test, alpha, dims):
        inverse, factor = Looped.inverse(train, alpha)
        ends = np.cumsum(dims)
        masks = masks_of([range(end - n, end) for n, end in zip(dims, ends, strict=True)], ends[-1])
        means = [part.mean(0) / factor for part in test]
        terms = [looped_rigidity(part / factor, inverse, masks).numpy() for part in test]
        return looped_rigidity(means, inverse, masks).numpy(), terms, 0

    @staticmethod
    def inverse(train, alpha):
        factor = math.sqrt(np.mean([np.sum(x**2) for part in train for x in part]))
        means = [part.mean(0) / factor for part in train]
        hessian = sum(np.outer(f, f) for f in means) + alpha * np.eye(train[0].shape[1])
        return np.linalg.inv(hessian), factor


needs_skmatter = pytest.mark.skipif(
    importlib.util.find_spec("skmatter") is None
    and (sys.version_info < (3, 11) or "CI" not in os.environ),
    reason="scikit-matter, for Python 3.11, is not installed: make venv",
)


@pytest.fixture(params=["loops", pytest.param("scikit-matter", marks=needs_skmatter)])
def theirs(request):
    return Looped if request.param == "loops" else importlib.import_module("skmatter.metrics")


def structures(count, width, seed):
    generator = np.random.default_rng(seed)
    scale = np.logspace(0, 1, width)
    return [scale * generator.normal(size=(n, width)) for n in generator.integers(2, 9, count)]


def in_their_convention(train, alpha):
    """The recipe of the module's docstring."""
    features = torch.from_numpy(np.concatenate(train))
    sizes = torch.tensor([len(part) for part in train])
    gram = Gram(features.shape[1])
    gram.update(local.sums(features, owners(sizes.tolist())), sizes.double() ** -2)
    return Posterior.from_gram(gram, ridge=alpha * float(features.square().sum(1).mean()))


@pytest.mark.parametrize(("alpha", "width"), [(1e-1, 12), (1e-4, 12), (1e-3, 40)])
def test_local_rigidities_agree_with_scikit_matter(theirs, alpha, width):
    train, test = structures(30, width, 0), structures(12, width, 1)
    expected, _ = theirs.local_prediction_rigidity(train, test, alpha)
    features = torch.from_numpy(np.concatenate(test))
    found = local.rigidity(in_their_convention(train, alpha), features)
    torch.testing.assert_close(found, torch.from_numpy(np.concatenate(expected)), rtol=1e-8, atol=0)


@pytest.mark.parametrize("dims", [[3, 4, 5], [12], [1] * 12])
def test_component_rigidities_agree_with_scikit_matter(theirs, dims):
    train, test = structures(30, 12, 0), structures(12, 12, 1)
    expected, terms, _ = theirs.componentwise_prediction_rigidity(train, test, 1e-3, np.array(dims))
    posterior = in_their_convention(train, 1e-3)
    features = torch.from_numpy(np.concatenate(test))
    sizes = torch.tensor([len(part) for part in test])
    found = local.component_rigidity(posterior, features, dims)
    torch.testing.assert_close(found, torch.from_numpy(np.concatenate(terms)), rtol=1e-8, atol=0)
    found = local.component_rigidity(posterior, features, dims, owners(sizes.tolist()))
    means = sizes[:, None].square() * found
    torch.testing.assert_close(means, torch.from_numpy(expected), rtol=1e-8, atol=0)


@needs_skmatter
def test_scikit_matter_stops_where_a_component_is_absent():
    theirs = importlib.import_module("skmatter.metrics")
    train, test = structures(30, 4, 0), structures(3, 4, 1)
    test[0][0, :2] = 0
    with pytest.raises(ZeroDivisionError):
        theirs.componentwise_prediction_rigidity(train, test, 1e-3, np.array([2, 2]))
    features = torch.from_numpy(np.concatenate(test))
    found = local.component_rigidity(in_their_convention(train, 1e-3), features, [2, 2])
    assert found[0, 0] == math.inf and bool(torch.isfinite(found.flatten()[1:]).all())


# --- distributions
# --------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(0, 1000))
def test_shares_of_a_group_sum_to_its_inverse_rigidity(sizes, seed):
    features, groups = problem(sizes, seed=seed)
    posterior = posterior_of(features, groups)
    q = posterior.quadratic(local.sums(features, groups))
    shares = local.shares(posterior, features, groups)
    tolerance = {"rtol": 1e-9, "atol": 1e-9 * float(shares.abs().max())}
    torch.testing.assert_close(local.sums(shares[:, None], groups)[:, 0], q, **tolerance)
    parts = local.shares(posterior, features, groups, [2, 1, 3])
    torch.testing.assert_close(parts.sum(1), shares, **tolerance)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000))
def test_the_order_of_the_rows_changes_nothing(seed):
    features, groups = problem()
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))
    posterior = posterior_of(features, groups)
    again = posterior_of(features[order], groups[order])
    torch.testing.assert_close(
        local.rigidity(again, features[order]), local.rigidity(posterior, features)[order], **EXACT
    )
    torch.testing.assert_close(
        local.shares(again, features[order], groups[order]),
        local.shares(posterior, features, groups)[order],
        rtol=1e-9,
        atol=1e-12,
    )


def test_a_term_alone_in_its_group_is_the_group():
    features, groups = problem([1] * 20)
    posterior = posterior_of(features, groups)
    q = 1 / local.rigidity(posterior, features)
    torch.testing.assert_close(local.shares(posterior, features, groups), q, **EXACT)
    whole = local.component_rigidity(posterior, features, [WIDTH])
    torch.testing.assert_close(whole[:, 0], 1 / q, **EXACT)


def test_terms_that_only_occur_together_are_held_less_firmly_than_their_sum():
    # Two kinds of terms, always one of each: the data know the sum, the ridge alone the parts.
    features = torch.eye(2, dtype=F64).repeat(50, 1)
    posterior = posterior_of(features, torch.arange(50).repeat_interleave(2), ridge=1e-3)
    whole = posterior.rigidity(torch.ones(1, 2, dtype=F64))
    assert whole.item() == pytest.approx(50, rel=1e-3)
    assert local.rigidity(posterior, features).max().item() == pytest.approx(2e-3, rel=1e-3)


def test_more_data_never_lower_a_local_rigidity():
    some = GROUPS < 6
    few = local.rigidity(posterior_of(FEATURES[some], GROUPS[some]), FEATURES)
    more = local.rigidity(posterior_of(FEATURES, GROUPS), FEATURES)
    assert bool((more >= few * (1 - 1e-9)).all())


def test_the_marginal_posterior_is_the_block_of_the_covariance():
    posterior = posterior_of(FEATURES, GROUPS).with_scale(2.0)
    columns = torch.tensor([4, 1, 2])
    part = local.marginal(posterior, columns)
    block = posterior.covariance(torch.eye(WIDTH, dtype=F64))[columns][:, columns]
    torch.testing.assert_close(part.covariance(torch.eye(3, dtype=F64)), block, **EXACT)
    assert bool((part.eigenvalues.diff() >= 0).all())


# --- streaming, precision, other posteriors ----------------------------------------------------


def test_chunks_change_nothing(monkeypatch):

    def everything():
        return (
            local.sums(FEATURES, GROUPS),
            local.rigidity(POSTERIOR, FEATURES),
            local.component_rigidity(POSTERIOR, FEATURES, [2, 4]),
            local.shares(POSTERIOR, FEATURES, GROUPS, [2, 4]),
        )

    whole = everything()
    monkeypatch.setattr(local, "_ROWS", 3)
    torch.testing.assert_close(everything(), whole, **EXACT)


def test_float32_features_are_summed_and_multiplied_in_float64():
    single = FEATURES.float()
    posterior = posterior_of(single, GROUPS)
    found = local.rigidity(posterior, single)
    assert found.dtype == local.sums(single, GROUPS).dtype == F64
    assert torch.equal(local.sums(single, GROUPS), local.sums(single.double(), GROUPS))
    torch.testing.assert_close(found, local.rigidity(posterior, single.double()), **EXACT)


def test_float32_products_stay_within_their_rounding_bound():
    features, groups = problem([4] * 60)
    posterior = posterior_of(features, groups)
    bound = QuadraticForm.of(posterior, torch.float32).rounding
    whole = local.rigidity(posterior, features)
    rough = local.rigidity(posterior, features, dtype=torch.float32)
    assert rough.dtype == F64 and not torch.equal(rough, whole)
    torch.testing.assert_close(rough, whole, rtol=bound, atol=0)
    exact = local.component_rigidity(posterior, features, [2, 4])
    rough = local.component_rigidity(posterior, features, [2, 4], dtype=torch.float32)
    torch.testing.assert_close(rough, exact, rtol=bound, atol=0)
    assert not torch.equal(rough, exact)


def test_a_float32_product_that_would_round_too_much_is_done_in_float64():
    basis = torch.linalg.qr(normal(4, 4)).Q
    posterior = Posterior(torch.logspace(-12, 2, 4, dtype=F64), basis, 0.0)
    assert rounding_bound(posterior, torch.float32) > LARGEST_ROUNDING
    rows = normal(9, 4, seed=1)
    found = local.rigidity(posterior, rows, dtype=torch.float32)
    assert torch.equal(found, local.rigidity(posterior, rows))


def test_arrays_and_lists_are_taken_too():
    expected = local.shares(POSTERIOR, FEATURES, GROUPS)
    found = local.shares(POSTERIOR, FEATURES.numpy(), GROUPS.tolist())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("form", ["complement", "inverse"])
@pytest.mark.parametrize("rank", [1, 2, 4, 6])
def test_truncated_posteriors_are_taken_as_they_are(form, rank):
    posterior = posterior_of(FEATURES, GROUPS, ridge=10.0).truncate(rank, form=form)
    torch.testing.assert_close(
        local.rigidity(posterior, FEATURES), posterior.rigidity(FEATURES), **EXACT
    )
    found = local.component_rigidity(posterior, FEATURES, [1, 3, 2])
    for c, mask in enumerate(masks_of([[0], [1, 2, 3], [4, 5]])):
        expected = posterior.rigidity(FEATURES * torch.from_numpy(mask))
        torch.testing.assert_close(found[:, c], expected, rtol=1e-8, atol=1e-12)
    part = local.marginal(posterior, slice(1, 4))
    torch.testing.assert_close(part.rigidity(FEATURES[:, 1:4]), found[:, 1], rtol=1e-8, atol=1e-12)
    covariance = posterior.covariance(FEATURES) * (GROUPS[:, None] == GROUPS)
    shares = local.shares(posterior, FEATURES, GROUPS)
    torch.testing.assert_close(shares, covariance.sum(1), rtol=1e-9, atol=1e-12)


def test_one_gram_per_target_gives_a_column_per_target():
    single = [posterior_of(FEATURES, GROUPS, torch.rand(len(SIZES)) + i) for i in range(3)]
    posterior = per_target(single)
    calls = {
        "rigidity": lambda p: local.rigidity(p, FEATURES),
        "components": lambda p: local.component_rigidity(p, FEATURES, [2, 4]),
        "group components": lambda p: local.component_rigidity(p, FEATURES, [2, 4], GROUPS),
        "shares": lambda p: local.shares(p, FEATURES, GROUPS),
        "component shares": lambda p: local.shares(p, FEATURES, GROUPS, [2, 4]),
    }
    for name, call in calls.items():
        expected = torch.stack([call(p) for p in single], dim=-1)
        torch.testing.assert_close(call(posterior), expected, rtol=1e-9, atol=1e-12, msg=name)


# --- what is absent ----------------------------------------------------------------------------


def test_a_group_without_rows_sums_to_zero_and_is_infinitely_rigid():
    found = local.component_rigidity(POSTERIOR, FEATURES, [2, 4], GROUPS, count=len(SIZES) + 2)
    assert local.sums(FEATURES, GROUPS, len(SIZES) + 2)[-2:].abs().sum() == 0
    assert bool((found[-2:] == math.inf).all()) and bool(torch.isfinite(found[:-2]).all())
    shares = local.shares(POSTERIOR, FEATURES, GROUPS, count=len(SIZES) + 2)
    torch.testing.assert_close(shares, local.shares(POSTERIOR, FEATURES, GROUPS))


def test_an_absent_component_or_term_is_infinitely_rigid():
    features, groups = problem()
    posterior = posterior_of(features, groups)
    features[4, :2], features[7] = 0, 0
    found = local.component_rigidity(posterior, features, [2, 4])
    assert found[4, 0] == math.inf and math.isfinite(found[4, 1])
    assert bool((found[7] == math.inf).all())
    assert local.rigidity(posterior, features)[7] == math.inf
    assert local.shares(posterior, features, groups)[7] == 0


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "count", "message"),
    [
        (torch.zeros(2, dtype=torch.long), None, r"must be \(3,\).*got \(2,\).*repeat_interleave"),
        (torch.zeros(3, 1, dtype=torch.long), None, r"must be \(3,\).*got \(3, 1\)"),
        (torch.tensor([0, -1, 0]), None, "must not be negative, got -1"),
        (torch.tensor([0.0, 1.0, 1.0]), None, r"must be integers.*float32.*long\(\)"),
        (torch.tensor([True, False, True]), None, "must be integers.*bool"),
        (torch.tensor([0, 2, 1]), 2, "below count=2, got 2.*count=3"),
    ],
)
def test_groups_that_do_not_add_up_are_refused(groups, count, message):
    features, _ = problem()
    posterior = posterior_of(*problem())
    for call in (
        lambda: local.sums(features[:3], groups, count),
        lambda: local.shares(posterior, features[:3], groups, count=count),
        lambda: local.component_rigidity(posterior, features[:3], [6], groups, count),
    ):
        refused(message, call)


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ([], "components are empty"),
        ([2, 3], r"add up to the posterior's 6 columns, got \[2, 3\].*up to 5"),
        ([0, 6], "must be positive"),
        ([-1, 7], "must be positive"),
        ([slice(0, 2), slice(4, 9)], r"component 1 is out of range: columns are 0\.\.5"),
        ([slice(7, 9)], "component 0 is"),
        ([slice(3, 3)], "component 0 is empty"),
        ([torch.tensor([0, 6])], "component 0 is out of range"),
        ([torch.tensor([-1])], "component 0 is out of range"),
        ([torch.tensor([], dtype=torch.long)], "component 0 is empty"),
        ([torch.zeros(6, dtype=torch.bool)], "component 0 is empty"),
        ([torch.ones(5, dtype=torch.bool)], r"component 0 must be.*mask \(6,\).*bool \(5,\)"),
        ([torch.tensor([0.0, 1.0])], "component 0 must be a slice.*float32"),
        ([slice(0, 2), 4], "component 1 must be a slice"),
        ([[1, 2, 1]], "component 0 names a column twice"),
    ],
)
def test_components_that_are_none_are_refused(components, message):
    refused(message, local.component_rigidity, POSTERIOR, FEATURES, components)
    refused(message, local.shares, POSTERIOR, FEATURES, GROUPS, components)


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ([slice(0, 3), slice(2, 6)], "partition.*column 2 is in 2.*disjoint"),
        ([slice(0, 3), slice(4, 6)], "partition.*column 3 is in 0"),
    ],
)
def test_shares_need_a_partition_and_rigidities_do_not(components, message):
    refused(message, local.shares, POSTERIOR, FEATURES, GROUPS, components)
    assert local.component_rigidity(POSTERIOR, FEATURES, components).shape == (len(GROUPS), 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f[:, :5], r"features must be \(N, 6\).*got \(28, 5\)"),
        (lambda f: f[0], r"features must be \(N, 6\).*got \(6,\)"),
        (lambda f: f[:, None].expand(-1, 3, -1), r"features must be \(N, 6\)"),
        (lambda f: f[:0], "features are empty"),
        (lambda f: f.clone().index_fill_(0, torch.tensor(4), math.nan), "NaN or infinity"),
        (lambda f: f.clone().index_fill_(0, torch.tensor(4), math.inf), "NaN or infinity"),
    ],
)
def test_features_that_do_not_fit_are_refused(change, message):
    posterior, bad = posterior_of(FEATURES, GROUPS), change(FEATURES)
    for call in (
        lambda: local.rigidity(posterior, bad),
        lambda: local.component_rigidity(posterior, bad, [2, 4]),
        lambda: local.component_rigidity(posterior, bad, [2, 4], GROUPS),
        lambda: local.shares(posterior, bad, GROUPS),
    ):
        refused(message, call)


def test_a_single_nan_is_found_wherever_it_stands():
    for column in range(WIDTH):
        bad = FEATURES.clone()
        bad[9, column] = math.nan
        refused(r"NaN or infinity \(first in row or group 9\)", local.rigidity, POSTERIOR, bad)
        refused("NaN or infinity", local.sums, bad, GROUPS)
