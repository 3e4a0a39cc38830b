"""The root of a Gram: the same sums, and error bars where the Gram itself has lost them."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rigidities import Gram, Posterior
from rigidities.posterior import memory
from rigidities.posterior.quadratic import QuadraticForm
from rigidities.posterior.root import RootGram
from tests.support import oracle
from tests.support.operations import Operations
from tests.support.refusals import refused
from tests.support.tensors import close, normal

F64 = torch.float64
WIDTH = 8


def of(kind, features, *args, **options):
    gram = kind(features.shape[-1], **options)
    gram.update(features, *args)
    return gram


def ill(rows, condition, seed=0):
    """Rows whose singular values run over `condition`, along no axis."""
    turn = torch.linalg.qr(normal(WIDTH, WIDTH, seed=99)).Q
    return (
        normal(rows, WIDTH, seed=seed) * condition ** -torch.linspace(0, 1, WIDTH).double() @ turn
    )


def same_sums(found, expected, rtol=1e-10):
    assert (found.count, found.targets) == (expected.count, expected.targets)
    assert torch.equal(found.zeros, expected.zeros)
    for name in ("matrix", "diagonal", "informative", "cross", "square"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if theirs is not None:
            close(ours.double(), theirs.double(), rtol)


# --- the distributions of a Gram
# -------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=6), st.randoms())
def test_batching_and_order_change_nothing(sizes, random):
    features = normal(sum(sizes), 5)
    parts = list(features.split(sizes))
    random.shuffle(parts)
    gram = RootGram(5)
    for part in parts:
        gram.update(part)
    assert torch.equal(gram.root, gram.root.triu())
    same_sums(gram, of(Gram, features))


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("shards", [2, 3])
def test_shards_merge_to_the_whole(rows, shards):
    data = normal(rows, 6), normal(rows, seed=1).relu(), normal(rows, 3, seed=2)
    merged = RootGram(6)
    for part in zip(*(one.tensor_split(shards) for one in data), strict=True):
        merged.merge(of(RootGram, *part))
    same_sums(merged, of(Gram, *data))


def test_a_copy_goes_its_own_way():
    gram = of(RootGram, normal(600, 4))
    clone = gram.clone()
    gram.update(normal(5, 4, seed=1))
    same_sums(clone, of(Gram, normal(600, 4)))
    same_sums(gram, of(Gram, torch.cat([normal(600, 4), normal(5, 4, seed=1)])))


def test_rows_may_be_overwritten_once_they_are_added_and_may_lack_their_ones():
    rows, weights, gram = normal(600, 4), normal(600, seed=1).abs(), RootGram(5)
    mine, bare = rows.clone(), RootGram(4)
    bare.update(mine)
    gram.update(mine, ones=True)
    gram.update(mine, weights, ones=True)
    mine.zero_()
    whole = torch.cat([rows, torch.ones(600, 1)], 1)
    expected = whole.T @ (whole * (1 + weights)[:, None])
    close(gram.matrix, expected)
    close(bare.matrix, rows.T @ rows)


def test_an_update_of_preferred_size_is_factorised_once():
    rows = RootGram.preferred_rows(300)
    assert rows == 600 and RootGram.preferred_rows(5) == 512
    gram = RootGram(300)
    with Operations() as operations:
        gram.update(normal(rows, 300))
    assert operations.names.count("linalg_qr.default") == 1
    close(gram.matrix, normal(rows, 300).T @ normal(rows, 300))


@pytest.mark.parametrize("own", [False, True], ids=["shared features", "own features"])
def test_each_target_has_a_root_of_its_own(own):
    features, weights = normal(30, 5), normal(30, 3, seed=1).abs()
    given = normal(30, 3, 5, seed=3) if own else features
    data = given, weights, normal(30, 3, seed=2)
    ours, theirs = (of(kind, *data, targets=3) for kind in (RootGram, Gram))
    same_sums(ours, theirs)
    same_sums(ours.clone().merge(ours), theirs.clone().merge(theirs))
    same_sums(of(RootGram, features).expand(3), of(Gram, features).expand(3))
    left = ours.clone().merge(of(RootGram, *data, targets=3)).without(ours)
    same_sums(left, theirs, 1e-9)
    q = [Posterior.from_gram(gram, 0.1).quadratic(features) for gram in (ours, theirs)]
    close(*q)


@pytest.mark.parametrize("rows", [4, 20], ids=["fewer rows than features", "more"])
def test_downdate_undoes_update(rows):
    kept, moments = normal(rows, 6), normal(rows, 1, seed=1)
    gram = of(RootGram, kept, None, moments)
    before = gram.clone()
    gram.update(normal(7, 6, seed=2), normal(7, seed=3).abs(), normal(7, 1, seed=4))
    gram.downdate(normal(7, 6, seed=2), normal(7, seed=3).abs(), normal(7, 1, seed=4))
    same_sums(gram, before, 1e-9)


def test_rows_can_leave_until_fewer_are_left_than_features():
    rows = normal(20, 6)
    left = of(RootGram, rows).without(of(RootGram, rows[3:]))
    same_sums(left, of(Gram, rows[:3]), 1e-9)
    assert float(left.without(of(RootGram, rows[:3])).diagonal.max()) < 1e-12


def test_downdating_keeps_what_the_gram_would_lose():
    rows, more, f = ill(40, 1e6), ill(40, 1e6, seed=1), ill(6, 1e6, seed=2)
    left = of(RootGram, torch.cat([rows, more])).without(of(RootGram, more))
    q = Posterior.from_gram(left, 0.0).quadratic(f)
    torch.testing.assert_close(q, oracle.exact_quadratic(rows, f, 0.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [30, 4], ids=["of full rank", "along an open direction"])
def test_rows_that_were_never_added_are_refused(rows):
    gram = of(RootGram, normal(rows, 6))
    before = gram.root.clone()
    refused("never added", gram.downdate, 10 * normal(2, 6, seed=1))
    assert torch.equal(gram.root, before) and gram.count == rows
    refused("Cannot remove 31 rows", gram.downdate, normal(31, 6))


def test_a_row_across_open_directions_alone_was_never_added():
    row = torch.eye(6, dtype=F64)[5:]
    gram = of(RootGram, torch.cat([normal(9, 5), torch.zeros(9, 1)], 1))
    refused("never added", gram.downdate, 1e-3 * row)
    gram.downdate(1e-9 * row)  # which is rounding beside the rows that are held


def test_residuals_follow_the_weights():
    features, residuals, change = normal(30, 5), normal(30, 2, seed=1), normal(5, 2, seed=2)
    moved = of(RootGram, features, None, residuals).after(change)
    same_sums(moved, of(Gram, features, None, residuals - features @ change))


def test_kinds_do_not_mix():
    for one, other in ((Gram, RootGram), (RootGram, Gram)):
        refused(
            "same readout, loss and method", of(one, normal(9, 4)).merge, of(other, normal(9, 4))
        )
        refused(
            "same readout, loss and method", of(one, normal(9, 4)).without, of(other, normal(9, 4))
        )


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [None, 2])
def test_a_state_gives_the_same_root(targets):
    gram = of(RootGram, normal(9, 4), None, normal(9, 2, seed=1), targets=targets)
    again = Gram.from_state(gram.state())
    assert isinstance(again, RootGram) and torch.equal(again.root, gram.root)
    same_sums(again, gram, 0)


# --- posteriors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("penalised", [False, True])
def test_a_good_gram_and_its_root_have_one_posterior(penalised):
    features, half = normal(40, 6), normal(3, 6, seed=1)
    penalty = half.T @ half if penalised else None
    ours, theirs = (
        Posterior.from_gram(of(kind, features), 0.3, penalty) for kind in (RootGram, Gram)
    )
    close(ours.eigenvalues, theirs.eigenvalues)
    close(ours.covariance(features), theirs.covariance(features))
    assert ours.from_root and not theirs.from_root


@pytest.mark.parametrize("condition", [1e2, 1e6, 1e9])
@pytest.mark.parametrize("ridge", [0.0, 1e-14])
def test_a_root_keeps_eight_digits_at_any_condition(condition, ridge):
    """Nine decades leave fewer: epsilon times the condition number, as `rounding` says."""
    features, f = ill(60, condition), torch.cat([ill(6, condition, 1), normal(3, WIDTH, seed=2)])
    gram = RootGram(WIDTH)
    for part in features.split(17):
        gram.update(part)
    posterior = Posterior.from_gram(gram, ridge)
    form, exact = QuadraticForm.of(posterior, F64), oracle.exact_quadratic(features, f, ridge)
    for q in (posterior.quadratic(f), posterior.whitened(f).square().sum(-1), form(f)):
        error = float(((q - exact) / exact).abs().max())
        assert error <= form.rounding
        assert error <= (1e-8 if condition <= 1e6 else 1e-5)
    assert form.rounding <= 100 * torch.finfo(F64).eps * condition


def test_a_penalty_on_a_root_keeps_its_digits():
    features, f = ill(60, 1e6), ill(6, 1e6, 1)
    rows = 1e-6 * torch.eye(WIDTH, dtype=F64)
    posterior = Posterior.from_gram(of(RootGram, features), 0.0, rows.T @ rows)
    exact = oracle.exact_quadratic(torch.cat([features, rows]), f, 0.0)
    torch.testing.assert_close(posterior.quadratic(f), exact, rtol=1e-8, atol=0)


def test_a_gram_refuses_where_float64_is_too_small_and_names_the_root():
    features = ill(60, 1e8)
    message = r"float64 at ridge=1e-16.* rounding\. Pass a ridge above that, call fit\(train, meth"
    refused(message, Posterior.from_gram, of(Gram, features), 1e-16)
    ours = Posterior.from_gram(of(RootGram, features), 1e-16)
    assert ours.rounding_error < 1e-6
    floor = 1e3 * torch.finfo(F64).eps * float(ours.eigenvalues[-1])
    posterior = Posterior.from_gram(of(Gram, features), 1.01 * floor)
    assert posterior.rounding_error < 1e-3
    refused("singular in float64 at ridge", posterior.with_ridge, 0.5 * floor)


def test_a_root_of_too_few_rows_needs_a_ridge():
    gram = of(RootGram, normal(5, 6))
    refused("5 samples for 6 features and ridge=0", Posterior.from_gram, gram, 0.0)
    close(
        Posterior.from_gram(gram, 0.1).quadratic(normal(3, 6, seed=1)),
        oracle.quadratic(normal(5, 6), normal(3, 6, seed=1), 0.1),
    )
    repeated = of(RootGram, normal(9, 3).repeat(1, 2))
    with pytest.raises(ValueError, match="singular in float64 at ridge=0") as caught:
        Posterior.from_gram(repeated, 0.0)
    assert "method" not in str(caught.value)


def test_nan_in_a_root_is_refused():
    gram = of(RootGram, torch.full((3, 2), torch.nan))
    refused("NaN or infinity", Posterior.from_gram, gram, 1.0)


# --- memory -------------------------------------------------------------------------------------


@pytest.fixture
def little(monkeypatch):
    """A machine on which so many bytes are free."""

    def say(free):
        monkeypatch.setattr(memory, "free_memory", lambda device: free)

    return say


def test_a_gram_that_does_not_fit_is_refused_with_what_is_needed_and_free(little):
    little(2 << 30)
    message = r"16,384 wide need 2\.0 GiB on cpu .* and 2\.0 GiB are free"
    memory.require_memory(1, 16_384, None, torch.device("cpu"))
    little((2 << 30) - 1)
    refused(message, Gram, 16_384, error=MemoryError)
    refused(r"4\.0 GiB .* each of 2 targets", RootGram, 16_384, targets=2, error=MemoryError)


@pytest.mark.parametrize("kind", [Gram, RootGram])
def test_a_factorisation_that_does_not_fit_is_refused(little, kind, monkeypatch):
    gram = of(kind, normal(9, 4))
    monkeypatch.setattr(memory, "_SMALL", 0)
    little(8 * 4 * 4 * 3)
    refused(
        "narrower readout .* features= .* device", Posterior.from_gram, gram, 1.0, error=MemoryError
    )


def test_an_unknown_memory_refuses_nothing(little, monkeypatch):
    monkeypatch.setattr(memory, "_SMALL", 0)
    little(None)
    Posterior.from_gram(of(Gram, normal(9, 4)), 1.0)
    assert memory.free_memory(torch.device("meta")) is None


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux tells what is free")
def test_what_is_free_is_told_in_bytes():
    free = memory.free_memory(torch.device("cpu"))
    assert free is not None and 1 << 24 < free < 1 << 50
