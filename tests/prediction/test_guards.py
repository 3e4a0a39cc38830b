"""The guard equals its formulas, number by number, and has the limits that it promises."""

import math
from dataclasses import replace

import pytest
import torch

from rigidities.prediction.guards import POWER, Guard, guard_from
from rigidities.prediction.head import FoldedGuard
from tests.support.refusals import refused
from tests.support.tensors import close, normal

F64 = torch.float64


def number(value: float) -> torch.Tensor:
    return torch.tensor([[value]], dtype=F64)


GUARD = Guard(reference=number(0.5)[0], variance=number(4.0)[0])


def familiarity_of(guard, q, novelty=None):
    return FoldedGuard.of(guard).familiarity(q.log(), novelty)


@pytest.mark.parametrize("q", [0.05, 0.6, 2.0, 400.0])
@pytest.mark.parametrize("moment", [0.01, 100.0])
def test_bars_grow_to_those_of_an_ignorant_forecaster(q, moment):
    distance = 3.0
    rise = max(0.0, 2 * math.log10(q / 0.5))
    familiarity = math.exp(-(rise**POWER))
    ignorant = 4.0 + distance**2
    expected = moment * (1 + ignorant / moment) ** (1 - familiarity)
    found = familiarity_of(GUARD, number(q))
    assert float(found) == pytest.approx(familiarity, abs=1e-12)
    guard = FoldedGuard.of(GUARD)
    assert float(guard.widened(number(moment), found, number(distance))) == pytest.approx(expected)
    if q == 400:
        assert expected == pytest.approx(moment + ignorant)


def test_no_bar_shrinks_and_those_of_usual_rows_stay():
    q = torch.linspace(0, 9, 50, dtype=F64)[:, None]
    moment = normal(50, 1).exp()
    familiarity = familiarity_of(GUARD, q)
    widened = FoldedGuard.of(GUARD).widened(moment, familiarity, normal(50, 1, seed=1))
    assert bool((widened >= moment * (1 - 1e-12)).all())
    inside = q <= 0.5
    assert torch.equal(familiarity[inside], torch.ones_like(familiarity[inside]))
    close(widened[inside], moment[inside])
    # Twice and 3.3 times the reference, as the documentation says.
    at = familiarity_of(GUARD, torch.tensor([[1.0], [1.65]], dtype=F64))[:, 0]
    assert at.tolist() == pytest.approx([0.7, 0.34], abs=0.01)


def test_bars_have_no_corner_where_the_guard_begins():
    """The slope of the familiarity is continuous: at the reference it is zero on both sides."""
    step = 1e-4
    near = familiarity_of(GUARD, 0.5 * torch.tensor([[1 - step], [1.0], [1 + step]], dtype=F64))
    assert float((near - 1).abs().max()) < step**2


ALARMED = replace(GUARD, distances=torch.ones(3, dtype=F64), alarm=torch.tensor(2.0, dtype=F64))


def test_the_larger_of_rigidity_and_novelty_decides():
    q = torch.tensor([[0.5], [5.0], [5.0]], dtype=F64)
    novelty = torch.tensor([[4.0], [3.0], [8.0]])
    found = familiarity_of(ALARMED, q, novelty)
    # Novelty over the alarm, to the third power: 8, 3.4 and 64 times the reference.
    close(found, familiarity_of(ALARMED, 0.5 * torch.tensor([[8.0], [10.0], [64.0]], dtype=F64)))


def test_novelty_below_the_alarm_changes_nothing():
    novelty = torch.tensor([[0.0], [1.0], [2.0]])
    q = number(0.5).expand(3, 1)
    assert familiarity_of(ALARMED, q, novelty).tolist() == [[1.0], [1.0], [1.0]]


def test_an_input_that_lacks_a_number_is_not_familiar():
    novelty = torch.tensor([[math.inf]])
    assert float(familiarity_of(ALARMED, number(0.5), novelty)) == 0


def test_a_row_without_rigidity_is_familiar():
    assert float(familiarity_of(GUARD, number(0.0))) == 1


def test_a_guard_is_kept_and_read_again():
    several = Guard(torch.rand(2), torch.rand(2), torch.rand(3), torch.tensor(1.5))
    for guard in (GUARD, several):
        tensors = guard.tensors()
        again = guard_from(tensors)
        assert again.tensors().keys() == tensors.keys()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in again.tensors().items())
    assert guard_from({}) is None
    message = "The guard of this file has other tensors.*Calibrate again"
    refused(message, guard_from, {"reference": torch.ones(1)})
    refused(message, guard_from, several.tensors() | {"factor": torch.ones(2)})
