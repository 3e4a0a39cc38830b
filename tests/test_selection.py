"""Choosing rows: the fast updates equal a posterior recomputed from scratch after every pick."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rigidities import Gram, Posterior
from rigidities.selection import _SquaredNorms, greedy, top
from tests.support.tensors import normal

F64 = torch.float64
OBJECTIVES = ["logdet", "variance"]


def posterior_of(train, ridge=0.1):
    gram = Gram(train.shape[1])
    gram.update(train)
    return Posterior.from_gram(gram, ridge=ridge)


def brute_force(train, ridge, pool, n, *, objective, weights, costs, chosen, of):
    """Every candidate's gain by adding it to a dense Gram; nothing is updated, all recomputed."""

    def goodness(matrix):
        if objective == "logdet":
            return torch.logdet(matrix) / 2
        return -torch.trace(torch.linalg.solve(matrix, of.T @ of))

    matrix = train.T @ train + ridge * torch.eye(train.shape[1], dtype=F64)
    for s in chosen:
        matrix = matrix + weights[s] * torch.outer(pool[s], pool[s])
    picks, gains = [], []
    for _ in range(n):
        gain = torch.stack(
            [goodness(matrix + w * torch.outer(f, f)) for w, f in zip(weights, pool, strict=True)]
        ) - goodness(matrix)
        score = gain / costs
        score[[*chosen, *picks]] = -math.inf
        s = int(score.argmax())
        picks.append(s)
        gains.append(gain[s])
        matrix = matrix + weights[s] * torch.outer(pool[s], pool[s])
    quadratic = (pool * torch.linalg.solve(matrix, pool.T).T).sum(1)
    return picks, torch.stack(gains), quadratic


@pytest.mark.parametrize("chosen", [[], [3, 11, 7]], ids=["fresh", "some chosen"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weights and costs"])
@pytest.mark.parametrize(
    ("objective", "others"),
    [("logdet", False), ("variance", False), ("variance", True)],
    ids=["logdet", "variance", "variance of others"],
)
def test_picks_and_gains_are_those_of_brute_force(objective, others, weighted, chosen):
    train, pool, of = normal(9, 6), normal(40, 6, seed=1), 3 * normal(4, 6, seed=2)
    weights = normal(40, seed=3).exp() if weighted else torch.ones(40, dtype=F64)
    costs = normal(40, seed=4).exp() if weighted else torch.ones(40, dtype=F64)
    picks, gains, quadratic = brute_force(
        train,
        0.1,
        pool,
        12,
        objective=objective,
        weights=weights,
        costs=costs,
        chosen=chosen,
        of=of if others else pool,
    )
    options = {"weights": weights, "costs": costs} if weighted else {}
    options |= {"of": of} if others else {}
    options |= {"chosen": chosen} if chosen else {}
    found = greedy(posterior_of(train), pool, 12, objective=objective, **options)
    assert found.indices.tolist() == picks
    torch.testing.assert_close(found.gains, gains, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.quadratic, quadratic, rtol=1e-10, atol=0)
    assert found.total == pytest.approx(float(gains.sum()))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(4, 60),
    width=st.integers(1, 8),
    size=st.floats(-3, 3),
)
def test_the_logdet_grows_by_twice_the_gains_and_gains_never_increase(seed, rows, width, size):
    train, pool = normal(5, width, seed=seed), 10**size * normal(rows, width, seed=seed + 1)
    weights, costs = (normal(rows, seed=seed + k).exp() for k in (2, 3))
    gram = Gram(width)
    gram.update(train)
    before = torch.logdet(gram.matrix + 0.1 * torch.eye(width, dtype=F64))
    n = rows // 2
    found = greedy(posterior_of(train), pool, n, weights=weights, costs=costs, objective="logdet")
    gram.update(pool[found.indices], weights[found.indices])
    after = torch.logdet(gram.matrix + 0.1 * torch.eye(width, dtype=F64))
    assert float(after - before) == pytest.approx(2 * found.total, rel=1e-9, abs=1e-9)
    equal = greedy(posterior_of(train), pool, n, objective="logdet")
    assert bool((equal.gains.diff() <= 1e-12).all())
    assert len(set(found.indices.tolist())) == n


def test_the_variance_of_others_falls_by_the_gains():
    train, pool, of = normal(9, 6), normal(40, 6, seed=1), normal(7, 6, seed=2)
    before = posterior_of(train).quadratic(of).sum()
    found = greedy(posterior_of(train), pool, 8, objective="variance", of=of)
    after = posterior_of(torch.cat([train, pool[found.indices]])).quadratic(of).sum()
    assert float(before - after) == pytest.approx(found.total, rel=1e-10)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_planning_in_two_batches_equals_planning_in_one(objective):
    post, pool = posterior_of(normal(9, 6)), normal(50, 6, seed=1)
    whole = greedy(post, pool, 10, objective=objective)
    first = greedy(post, pool, 4, objective=objective)
    second = greedy(post, pool, 6, objective=objective, chosen=first.indices)
    assert torch.equal(torch.cat([first.indices, second.indices]), whole.indices)
    torch.testing.assert_close(torch.cat([first.gains, second.gains]), whole.gains)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_duplicates_are_not_picked_in_a_row_where_top_takes_them_all(objective):
    post = posterior_of(normal(30, 4))
    far, others = torch.tensor([[50.0, 0.0, 0.0, 0.0]], dtype=F64), 3 * normal(20, 4, seed=1)
    pool = torch.cat([far.expand(5, 4), others])
    assert set(top(post.variance(pool), 5).indices.tolist()) == set(range(5))
    equal = greedy(post, pool, 6, objective=objective).indices < 5
    assert bool(equal[0]) and int(equal.sum()) <= 3
    assert not bool((equal[1:] & equal[:-1]).any())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_variances_that_fall_by_twelve_decades_keep_their_digits(objective):
    """Duplicates of a row with q = 1e12 have q = 1 after it, then 1/2, 1/3, ..."""
    post = posterior_of(torch.eye(3, dtype=F64), ridge=0.0)
    pool = torch.zeros(6, 3, dtype=F64)
    pool[:, 0] = math.sqrt(2) * 1e6
    found = greedy(post, pool, 6, objective=objective)
    q = 2e12 / (1 + 2e12 * torch.arange(7, dtype=F64))
    expected = torch.log1p(q[:-1]) / 2 if objective == "logdet" else 6 * -q.diff()
    torch.testing.assert_close(found.gains, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.quadratic, q[-1].expand(6), rtol=1e-9, atol=0)


def test_a_value_that_rose_and_fell_is_computed_anew():
    """What is subtracted is off by a thousandth, as rounding would leave it after 1e13."""
    norms = _SquaredNorms(torch.ones(2, 1, dtype=F64))
    norms.lower(torch.tensor([-1e4, 0.0], dtype=F64), torch.tensor([[1e2]], dtype=F64))
    assert norms.values.tolist() == [10001.0, 1.0]
    norms.lower(
        torch.tensor([1e4 + 0.501, 0.501], dtype=F64), torch.tensor([[math.sqrt(0.5)]], dtype=F64)
    )
    torch.testing.assert_close(norms.values, torch.tensor([0.5, 0.499], dtype=F64))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_ill_conditioned_posteriors_agree_with_a_dense_solve(objective):
    """Rows outside the training span at a tiny ridge: whitened, they are 1e5 long."""
    train, pool = normal(5, 12), normal(60, 12, seed=1)
    found = greedy(posterior_of(train, ridge=1e-10), pool, 30, objective=objective)
    added = torch.cat([train, pool[found.indices], 1e-5 * torch.eye(12, dtype=F64)])
    expected = torch.linalg.solve_triangular(
        torch.linalg.qr(added, mode="r").R.T, pool.T, upper=False
    )
    torch.testing.assert_close(found.quadratic, expected.square().sum(0), rtol=1e-6, atol=0)


def test_more_candidates_than_a_block_with_chosen_rows():
    post, pool = posterior_of(normal(9, 3)), normal(40_000, 3, seed=1, dtype=torch.float32)
    found = greedy(post, pool, 3, objective="variance", chosen=[5, 39_999], of=pool)
    assert found.quadratic.dtype == F64
    kept = [5, 39_999, *found.indices.tolist()]
    after = posterior_of(torch.cat([normal(9, 3), pool[kept].double()])).quadratic(pool)
    torch.testing.assert_close(found.quadratic, after, rtol=1e-10, atol=0)
    before = posterior_of(torch.cat([normal(9, 3), pool[kept[:2]].double()])).quadratic(pool)
    assert float((before - after).sum()) == pytest.approx(found.total, rel=1e-9)


@pytest.mark.parametrize("form", ["complement", "inverse"])
def test_truncated_posteriors_choose_by_their_own_variance(form):
    train, pool = normal(30, 6), normal(20, 6, seed=1)
    post = posterior_of(train).truncate(4, form=form)
    found = greedy(post, pool, 1, objective="logdet")
    q = post.quadratic(pool)
    assert int(found.indices) == int(q.argmax())
    torch.testing.assert_close(found.gains, torch.log1p(q.max())[None] / 2)
    covariance = post.covariance(pool)[:, int(found.indices)]
    torch.testing.assert_close(found.quadratic, q - covariance.square() / (1 + q.max()))


def test_one_target_dimension_a_scale_and_gradients_change_nothing():
    post, pool = posterior_of(normal(9, 4)), normal(20, 4, seed=1)
    expected = greedy(post, pool, 3)
    free = pool[:, None].requires_grad_(True)
    found = greedy(post.with_scale(torch.tensor([3.0, 5.0])), free, 3)
    assert torch.equal(found.indices, expected.indices)
    assert torch.equal(found.gains, expected.gains)
    assert not found.gains.requires_grad


def test_one_number_for_all_weights_is_that_number_for_each():
    post, pool = posterior_of(normal(9, 4)), normal(20, 4, seed=1)
    found = greedy(post, pool, 3, weights=2.5)
    assert torch.equal(found.gains, greedy(post, pool, 3, weights=[2.5] * 20).gains)
    assert not torch.allclose(found.gains, greedy(post, pool, 3).gains)


def test_rows_of_no_weight_come_last_and_gain_nothing():
    post, pool = posterior_of(normal(9, 4)), normal(5, 4, seed=1)
    weights = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])
    found = greedy(post, pool, 5, weights=weights)
    assert set(found.indices[3:].tolist()) == {1, 3}
    assert found.gains[3:].tolist() == [0.0, 0.0]


def test_top_sorts_by_variance_per_cost_and_leaves_out_the_chosen():
    variances = torch.tensor([1.0, 8.0, 3.0, 6.0])
    found = top(variances[:, None], 2, costs=[1, 10, 1, 1], chosen=torch.tensor([2]))
    assert found.indices.tolist() == [3, 0]
    assert found.gains.tolist() == [6.0, 1.0]
    assert found.quadratic is None
    assert top(variances, 4, chosen=[]).indices.tolist() == [1, 3, 2, 0]


POOL = normal(20, 4, seed=1)


def spoilt(row, value=math.nan):
    pool = POOL.clone()
    pool[row, 2] = value
    return pool


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 21}, r"n must lie in 1\.\.20, .* got 21\. Ask for fewer"),
        ({"n": 19, "chosen": [0, 1]}, r"1\.\.18.*\(2 of 20 are already chosen\); got 19"),
        ({"n": 0}, r"n must lie in 1\.\.20.* got 0"),
        ({"features": POOL[:, :3]}, r"features must be \(N, 4\) with N > 0, got \(20, 3\)"),
        ({"features": POOL[0]}, r"features must be \(N, 4\) with N > 0, got \(4,\)"),
        ({"features": POOL[:0]}, r"N > 0, got \(0, 4\)"),
        ({"features": POOL.reshape(10, 2, 4)}, r"got \(10, 2, 4\)\. Choose one target's"),
        ({"features": spoilt(7)}, r"features must be finite, got NaN or infinity in row 7"),
        ({"features": spoilt(3, math.inf)}, r"infinity in row 3"),
        ({"objective": "entropy"}, r"'logdet' or 'variance', got 'entropy'"),
        ({"of": POOL, "objective": "logdet"}, r"`of` needs objective='variance'"),
        ({"of": POOL[:, :2], "objective": "variance"}, r"of must be \(N, 4\)"),
        ({"of": spoilt(2), "objective": "variance"}, r"of must be finite.*row 2"),
        ({"weights": -torch.ones(20)}, r"weights must be finite and not negative, got -1 to -1"),
        ({"weights": torch.full((20,), math.nan)}, r"weights must be finite"),
        ({"weights": torch.ones(19)}, r"weights must be one number or \(20,\), got \(19,\)"),
        ({"costs": torch.zeros(20)}, r"costs must be finite and above zero, got 0 to 0"),
        ({"costs": torch.ones(20, 1)}, r"costs must be one number or \(20,\), got \(20, 1\)"),
        ({"chosen": [20]}, r"chosen must lie in 0\.\.19, got 20 to 20"),
        ({"chosen": [-1, 3]}, r"chosen must lie in 0\.\.19, got -1 to 3"),
        ({"chosen": [4, 4, 5]}, r"repeat a row, got 3 rows of which 2 differ"),
        ({"chosen": torch.ones(20, dtype=torch.bool)}, r"mask\.nonzero\(\)"),
        ({"chosen": [0.5]}, r"chosen must be row numbers"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_bad_input_is_refused_with_its_remedy(options, message):
    options = {"features": POOL, "n": 3, **options}
    with pytest.raises(ValueError, match=message):
        greedy(posterior_of(normal(9, 4)), options.pop("features"), options.pop("n"), **options)


def test_a_gram_per_target_is_refused():
    gram = Gram(4, targets=2)
    gram.update(normal(9, 4), normal(9, 2, seed=1).exp())
    with pytest.raises(ValueError, match=r"one Gram for each of 2 targets.*one"):
        greedy(Posterior.from_gram(gram, ridge=0.1), POOL, 3)


@pytest.mark.parametrize(
    ("variances", "n", "options", "message"),
    [
        (torch.ones(5), 6, {}, r"n must lie in 1\.\.5"),
        (torch.ones(5), 5, {"chosen": [2]}, r"n must lie in 1\.\.4"),
        (torch.ones(5), 0, {}, r"got 0"),
        (torch.ones(5, 2), 1, {}, r"got \(5, 2\)\. With several targets.*variances\.sum\(1\)"),
        (torch.tensor([1.0, math.nan]), 1, {}, r"variances must be finite"),
        (torch.tensor([1.0, -1.0]), 1, {}, r"not negative, got -1 to 1"),
        (torch.ones(5), 1, {"costs": [1.0, 1.0, -1.0, 1.0, 1.0]}, r"costs .* got -1 to 1"),
    ],
)
def test_top_refuses_bad_input(variances, n, options, message):
    with pytest.raises(ValueError, match=message):
        top(variances, n, **options)
