"""The guard equals its formulas, number by number, and has the limits that it promises."""

import math

import pytest
import torch

from rigidities.prediction.guards import POWER, SPAN, Guard, guard_from, stacked, unfamiliarity
from tests.support.tensors import close, normal

F64 = torch.float64


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=F64)


def one_guard(reference: float = 0.5, variance: float = 4.0, factor: float = 0.9):
    """Of one target."""
    return Guard(number(reference), number(variance), number(factor), number(1.0))


@pytest.mark.parametrize("q", [0.05, 0.6, 2.0, 400.0])
@pytest.mark.parametrize("squared_scale", [0.01, 100.0])
@pytest.mark.parametrize("extent", [1.0, 3.0])
def test_bars_grow_to_those_of_an_ignorant_forecaster(q, squared_scale, extent):
    distance = 3.0
    guard = one_guard()
    widened = guard.widened(number(squared_scale), number(q), number(distance), number(extent))
    level = 0.9 * (4.0 + distance**2)
    share = min(1.0, max(0.0, math.log(q / extent**2 / 0.5) / math.log(SPAN))) ** POWER
    expected = squared_scale * max(1.0, level / squared_scale) ** share
    assert float(widened) == pytest.approx(expected)


def test_no_bar_shrinks_and_those_inside_stay():
    guard = one_guard()
    q = torch.linspace(0, 9, 50, dtype=F64)
    squared_scale = normal(50).exp()
    widened = guard.widened(squared_scale, q, normal(50, seed=1), torch.ones_like(q))
    assert bool((widened >= squared_scale * (1 - 1e-12)).all())
    inside = q <= 0.5
    close(widened[inside], squared_scale[inside])
    close(guard.beyond(q, torch.ones_like(q)), (q / 0.5).clamp(min=1))


def test_nothing_that_was_summed_is_not_unfamiliar():
    q, extent = torch.tensor([0.0, 4.0, 4.0]), torch.tensor([0.0, 1.0, 2.0])
    assert unfamiliarity(q, extent).tolist() == [0.0, 4.0, 1.0]


def test_guards_of_targets_are_stacked_kept_and_read_again():
    with_sums = Guard(
        number(0.1), number(1.0), number(1.0), number(0.0), normal(3), torch.ones(3, dtype=F64)
    )
    both = stacked([one_guard(), with_sums])
    assert both.reference.tolist() == [0.5, 0.1]
    close(both.by_feature, torch.stack([torch.zeros(3, dtype=F64), normal(3)]))
    for guard in (both, stacked([one_guard()])):
        again = guard_from(guard.tensors())
        assert again.tensors().keys() == guard.tensors().keys()
        assert all(torch.equal(t, again.tensors()[name]) for name, t in guard.tensors().items())
    assert stacked([one_guard()]).by_feature is None
    assert guard_from({}) is None
    for missing in ("variance", "extent_weight"):
        damaged = {name: part for name, part in both.tensors().items() if name != missing}
        with pytest.raises(ValueError, match=r"A guard has reference, variance, .*, got"):
            guard_from(damaged)
