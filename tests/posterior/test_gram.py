"""The Gram: sums over rows, whatever the batching, the order or the weights."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rigidities import Gram
from rigidities.posterior.gram import JOINT_TARGETS
from tests.support import oracle
from tests.support.operations import Operations
from tests.support.refusals import refused
from tests.support.tensors import normal

F64 = torch.float64


def gram_of(features, *args, **kwargs):
    gram = Gram(features.shape[-1], **kwargs)
    gram.update(features, *args)
    return gram


def test_matrix_equals_the_dense_product():
    features, weights = normal(50, 7), normal(50, seed=1).abs()
    expected = oracle.gram(features, weights)
    torch.testing.assert_close(gram_of(features, weights).matrix, torch.as_tensor(expected))


@pytest.mark.parametrize("width", [1, 63, 64, 65, 300, 1030])
def test_blocks_of_the_triangle_cover_every_width(width):
    features = normal(20, width)
    torch.testing.assert_close(gram_of(features).matrix, features.T @ features)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=6), st.randoms())
def test_batching_and_order_change_nothing(sizes, random):
    features = normal(sum(sizes), 5)
    parts = list(features.split(sizes))
    random.shuffle(parts)
    gram = Gram(5)
    for part in parts:
        gram.update(part)
    assert gram.count == sum(sizes)
    torch.testing.assert_close(gram.matrix, features.T @ features, rtol=1e-12, atol=1e-10)


def test_two_half_grams_merge_to_the_whole():
    features, weights, residuals = normal(40, 6), normal(40, seed=1).abs(), normal(40, 3, seed=2)
    whole = gram_of(features, weights, residuals)
    half = gram_of(features[:15], weights[:15], residuals[:15])
    half.merge(gram_of(features[15:], weights[15:], residuals[15:]))
    for name, tensor in whole.state().items():
        torch.testing.assert_close(half.state()[name], tensor)


def test_merging_into_an_empty_gram_copies():
    features, residuals = normal(9, 4), normal(9, 1, seed=2)
    merged = Gram(4).merge(gram_of(features, None, residuals))
    torch.testing.assert_close(merged.cross, features.T @ residuals)


def test_downdate_undoes_update():
    features, residuals = normal(60, 5), normal(60, 2, seed=1)
    weights = normal(60, seed=3).abs()
    gram = gram_of(features[:40], weights[:40], residuals[:40])
    before = gram.clone().state()
    gram.update(features[40:], weights[40:], residuals[40:])
    gram.downdate(features[40:], weights[40:], residuals[40:])
    for name, tensor in before.items():
        torch.testing.assert_close(gram.state()[name], tensor, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("weighted", [(False, False), (True, False), (False, True), (True, True)])
def test_a_gram_without_another_equals_the_one_of_the_rows_left(weighted):
    """Each may have one matrix for all targets, or one for each."""
    features, residuals = normal(60, 5), normal(60, 2, seed=1)
    weights = torch.ones(60, 2, dtype=F64)
    own = normal(60, 2, seed=3).abs()
    weights[:40] = own[:40] if weighted[0] else 1.0
    weights[40:] = own[40:] if weighted[1] else 1.0
    whole = Gram(5, targets=2 if weighted[0] else None)
    for part in (slice(0, 40), slice(40, 60)):
        if weighted[part.start > 0] and whole.targets is None:
            whole = whole.expand(2)
        whole.update(features[part], weights[part] if whole.targets else None, residuals[part])
    few = Gram(5, targets=2 if weighted[1] else None)
    few.update(features[40:], weights[40:] if few.targets else None, residuals[40:])
    left = whole.without(few)
    assert left.count == 40 and whole.count == 60 and few.count == 20
    for k in range(2):
        w, f, r = weights[:40, k, None], features[:40], residuals[:40, k]
        matrix = left.matrix if left.targets is None else left.matrix[k]
        torch.testing.assert_close(matrix, f.T @ (w * f))
        torch.testing.assert_close(left.cross[:, k], f.T @ (w[:, 0] * r))
        torch.testing.assert_close(left.square[k, k], r @ (w[:, 0] * r))


@pytest.mark.parametrize("targets", [2, JOINT_TARGETS + 1])
def test_a_sum_of_squares_never_turns_negative(targets):
    features, residuals = normal(9, 3), normal(9, targets, seed=1)
    gram = gram_of(features, None, residuals)
    before = {name: tensor.clone() for name, tensor in gram.state().items()}
    wrong = residuals[:2].clone()
    wrong[:, 1] *= 99
    refused("become negative", gram.downdate, features[:2], None, wrong)
    refused("become negative", gram.without, gram_of(features[:2], None, wrong))
    refused("there are only 9", gram.without, gram_of(normal(10, 3)))
    assert all(torch.equal(gram.state()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("targets", [2, JOINT_TARGETS + 1])
def test_sums_of_residuals_that_rounding_has_eaten_are_dropped(targets):
    features, residuals = normal(9, 3), normal(9, targets, seed=1)
    residuals[0, 1] = 1e9
    left = gram_of(features, None, residuals).without(gram_of(features[:1], None, residuals[:1]))
    assert left.square is None and left.cross is None
    torch.testing.assert_close(left.matrix, features[1:].T @ features[1:])


def test_removing_rows_that_were_never_added_is_refused_and_changes_nothing():
    gram = gram_of(normal(5, 3))
    before = gram.matrix
    refused("never added", gram.downdate, 100 * normal(2, 3, seed=1))
    refused("there are only 5", gram.downdate, normal(6, 3))
    assert torch.equal(gram.matrix, before)
    assert gram.count == 5


def test_duplicated_rows_at_half_weight_are_the_same_gram():
    features = normal(30, 4)
    twice = gram_of(torch.cat([features, features]), torch.full((60,), 0.5))
    torch.testing.assert_close(twice.matrix, gram_of(features).matrix)


def test_float32_features_are_cast_before_the_product():
    features = (1 + 1e-4 * normal(2000, 3)).float()
    exact = features.double().T @ features.double()
    torch.testing.assert_close(gram_of(features).matrix, exact, rtol=1e-14, atol=0)


def test_residual_sums_are_kept():
    features, weights, residuals = normal(30, 4), normal(30, seed=1).abs(), normal(30, 2, seed=2)
    gram = gram_of(features, weights, residuals)
    weighted = weights[:, None] * residuals
    torch.testing.assert_close(gram.cross, features.T @ weighted)
    torch.testing.assert_close(gram.square, residuals.T @ weighted)


def test_residual_sums_are_dropped_when_some_rows_lack_them():
    gram = gram_of(normal(5, 3), None, normal(5, 1))
    gram.update(normal(5, 3))
    gram.update(normal(5, 3), None, normal(5, 1))
    assert gram.cross is None


@pytest.mark.parametrize("targets", [2, JOINT_TARGETS + 1])
@pytest.mark.parametrize("own", [False, True])
def test_residual_sums_follow_a_change_of_the_weights(targets, own):
    features, residuals, change = normal(30, 5), normal(30, targets, seed=1), normal(5, targets)
    weights = normal(30, targets if own else 1, seed=2).abs()
    options = {"targets": targets} if own else {}
    gram = gram_of(features, weights, residuals, **options)
    before = gram.clone()
    wanted = gram_of(features, weights, residuals - features @ change, **options)
    moved = gram.after(change)
    torch.testing.assert_close(moved.cross, wanted.cross, rtol=0, atol=1e-10)
    if own and wanted.square.ndim == 2:
        moved.square, wanted.square = moved.square.diagonal(), wanted.square.diagonal()
    torch.testing.assert_close(moved.square, wanted.square)
    torch.testing.assert_close(moved.matrix, wanted.matrix)
    torch.testing.assert_close(gram.state(), before.state(), rtol=0, atol=0)
    best = gram_of(features, weights, residuals, **options).after(change).after(-change)
    torch.testing.assert_close(best.cross, gram.cross, rtol=0, atol=1e-9)


def test_a_gram_without_residuals_has_none_to_change():
    refused("Pass targets", gram_of(normal(30, 5)).after, normal(5, 1))


def test_residual_moment_is_diagonal_for_very_many_targets():
    residuals = normal(4, JOINT_TARGETS + 1)
    gram = gram_of(normal(4, 2), None, residuals)
    torch.testing.assert_close(gram.square, residuals.square().sum(0))


@pytest.mark.parametrize("own_features", [False, True])
def test_one_gram_per_target_equals_separate_grams(own_features):
    features = normal(25, 3, 4) if own_features else normal(25, 4)
    weights = normal(25, 3, seed=1).abs()
    grams = gram_of(features, weights, targets=3).matrix
    for k in range(3):
        mine = features[:, k] if own_features else features
        torch.testing.assert_close(grams[k], gram_of(mine, weights[:, k]).matrix)


def test_a_shared_gram_expands_to_equal_ones():
    shared = gram_of(normal(25, 4), None, normal(25, 3, seed=1))
    own = shared.expand(3)
    own.update(normal(5, 4, seed=2), normal(5, 3, seed=3).abs(), normal(5, 3, seed=4))
    assert own.count == 30
    torch.testing.assert_close(
        own.matrix[1],
        shared.matrix + gram_of(normal(5, 4, seed=2), normal(5, 3, seed=3).abs()[:, 1]).matrix,
    )


def test_rows_of_zero_weight_are_counted():
    gram = gram_of(normal(6, 2), torch.tensor([1.0, 0, 0, 1, 1, 1]))
    assert int(gram.zeros) == 2 and int(gram.informative) == 4
    own = gram.expand(2)
    own.update(normal(2, 2), torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    own.update(normal(1, 2), torch.zeros(1))
    assert own.zeros.tolist() == [5, 3] and own.informative.tolist() == [4, 6]


def test_rows_may_be_overwritten_after_they_were_added():
    features = normal(3, 2)
    expected = features.T @ features
    gram = gram_of(features)
    features.zero_()
    torch.testing.assert_close(gram.matrix, expected)


@pytest.mark.parametrize(
    ("features", "weights", "match"),
    [
        (normal(3, 5), None, r"features must be \(N, 4\), got \(3, 5\)"),
        (normal(3, 4), normal(2), "weights must be"),
        (normal(3, 4), -torch.ones(3), "not negative"),
        (normal(3, 4), torch.full((3,), torch.nan), "not negative"),
        (normal(3, 4), torch.full((3,), torch.inf), "finite"),
    ],
    ids=["width", "weights", "negative", "nan", "infinite"],
)
def test_wrong_rows_are_refused(features, weights, match):
    gram = Gram(4)
    refused(match, gram.update, features, weights)
    assert gram.count == 0


def test_grams_of_different_shape_do_not_merge():
    refused("different shape", Gram(3).merge, Gram(4))


def test_a_gram_needs_a_width():
    refused("at least 1", Gram, 0)


def test_state_comes_back():
    gram = gram_of(normal(5, 3), None, normal(5, 1))
    again = Gram.from_state(gram.state())
    assert repr(again) == repr(gram) == "Gram(width=3, count=5)"
    assert torch.equal(again.matrix, gram.matrix)


def test_a_copy_in_mixed_precision_goes_its_own_way():
    rows, gram = normal(600, 6, dtype=torch.float32), Gram(6, precision="mixed")
    gram.update(rows)
    clone = gram.clone()
    for one, times in ((gram, 2), (clone, 3)):
        for _ in range(times - 1):
            one.update(rows)
    for one, times in ((gram, 2), (clone, 3)):
        assert one.precision == "mixed"
        torch.testing.assert_close(one.matrix, times * gram_of(rows).matrix, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "wrong", ["weights", "few weights", "few residuals", "wide residuals", "features"]
)
def test_many_rows_that_are_refused_leave_the_gram_as_it_was(wrong):
    """Rows are multiplied in parts, and the fault lies in the last."""
    gram = Gram(3)
    gram.update(torch.ones(5, 3), torch.ones(5), torch.ones(5))
    before, rows = gram.state(), 3000
    passed = {"features": torch.randn(rows, 3), "weights": torch.ones(rows)}
    passed["residuals"] = torch.ones(rows)
    if wrong == "weights":
        passed["weights"][-1] = -1.0
    elif wrong == "features":
        passed["features"] = torch.randn(rows, 4)
    elif wrong == "wide residuals":
        passed["residuals"] = torch.ones(rows, 2)
    else:
        name = wrong.removeprefix("few ")
        passed[name] = passed[name][:-7]
    refused(f"{wrong.split()[-1]} must be", gram.update, **passed)
    for name, tensor in gram.state().items():
        assert torch.equal(tensor, before[name])


# --- how an update works --------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["double", "mixed"])
@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("targets", [None, 2])
def test_a_column_of_ones_and_weights_of_any_batch_leave_no_trace_in_the_next(
    precision, ones, targets
):
    """Rows are laid out in memory that is used again."""
    gram, rows, total = Gram(6, targets=targets, precision=precision), [], []
    for seed, size in enumerate((700, 1024, 3, 1030)):
        features, weights = normal(size, 6, seed=seed, dtype=torch.float32), None
        if ones:
            features[:, -1] = 1
        if seed % 2:
            weights = normal(size, seed=9 + seed).abs()
        gram.update(features[:, :5] if ones else features, weights, ones=ones)
        gram.update(features)
        rows += [features.double(), features.double()]
        total += [torch.ones(size, dtype=F64) if weights is None else weights, torch.ones(size)]
    rows, total = torch.cat(rows), torch.cat(total)
    expected = rows.T @ (rows * total[:, None])
    if targets is not None:
        expected = expected.expand(targets, 6, 6)
    tolerance = 1e-12 if precision == "double" or targets is not None else 1e-6
    torch.testing.assert_close(gram.matrix, expected, rtol=tolerance, atol=1000 * tolerance)


def test_an_update_runs_few_operations_and_reads_no_value():
    features, residuals = normal(1024, 50, dtype=torch.float32), normal(1024, 1)
    for precision, most in (("double", 14), ("mixed", 32)):
        gram = Gram(51, precision=precision)
        for _ in range(10):  # of mixed precision the first are measured
            gram.update(features, None, residuals, ones=True)
        with Operations() as operations:
            gram.update(features, None, residuals, ones=True)
        computing = [name for name in operations.names if name != "slice.Tensor"]  # not a view
        assert len(computing) <= most
        assert not [name for name in operations.names if "scalar_dense" in name or "nonz" in name]


def test_a_gram_pickles_and_copies_without_its_scratch_memory():
    gram = gram_of(normal(1000, 20, dtype=torch.float32))
    assert gram._scratch is not None and gram.clone()._scratch is None
    assert len(pickle.dumps(gram)) < 8 * 20 * 20 + 4000
    assert torch.equal(pickle.loads(pickle.dumps(gram)).matrix, gram.matrix)


def test_rows_may_come_in_every_mode_of_autograd():
    rows = normal(9, 3, dtype=torch.float32).requires_grad_()
    gram = Gram(3)
    with torch.inference_mode():
        gram.update(rows.detach().clone(), None, rows[:, 0])
    gram.update(rows, rows[:, 0].square(), rows[:, 0])
    assert not gram.matrix.requires_grad and not gram.cross.requires_grad
    wide = rows.detach().double()
    expected = wide.T @ (wide * (1 + wide[:, :1].square()))
    torch.testing.assert_close(gram.matrix, expected, rtol=1e-6, atol=1e-6)


def test_no_rows_change_nothing():
    gram = gram_of(normal(5, 3), None, normal(5, 1))
    before = gram.clone().state()
    gram.update(normal(0, 3))
    torch.testing.assert_close(gram.state(), before, rtol=0, atol=0)
