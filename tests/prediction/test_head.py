"""A folded head, with its guard, equals its plain formulas."""

import math
from dataclasses import replace

import pytest
import torch

from rigidities.prediction.guards import Guard
from rigidities.prediction.head import (
    NARROWEST,
    WIDEST,
    Forecast,
    Head,
    HeadForm,
    Inputs,
    Network,
    column_spread,
    head_from,
)
from tests.support.refusals import refused
from tests.support.slow_head import slow_inputs, slow_rows
from tests.support.tensors import close, normal

F64 = torch.float64
TARGETS, WIDTH, DIRECTIONS, HIDDEN, COMPONENTS = 2, 5, 3, 4, 3
OUTPUTS = 1 + 3 * COMPONENTS
KINDS = pytest.mark.parametrize("kind", ["none", "guard", "novelty", "sums"])


def pair(first: float, second: float) -> torch.Tensor:
    return torch.tensor([first, second], dtype=F64)


def made(
    *, shared: bool, sums: bool = False, follows: bool = True, rows: int = 60
) -> tuple[Head, list[Inputs], torch.Tensor]:
    """A head of random weights on features of which the third is constant, and the features.

    With `sums` the forecast counts with the second feature and the third.
    """
    features = 3 + 2 * normal(rows, TARGETS, WIDTH)
    features[..., 2] = 7.0
    if shared:
        features = features[:, :1].expand(-1, TARGETS, -1)
    q, mean = 0.1 + normal(rows, seed=2).square(), 5 + normal(rows, TARGETS, seed=3)
    inputs = [Inputs.of(q, mean[:, k], features[:, k]) for k in range(TARGETS)]
    of_features = inputs[:1] if shared else inputs
    network = Network(
        rigidity=torch.stack([one.rigidity for one in inputs]),
        output=torch.stack([one.output for one in inputs]),
        centre=torch.stack([one.centre for one in of_features]),
        spread=torch.stack([one.spread for one in of_features]),
        directions=normal(len(of_features), WIDTH, DIRECTIONS, seed=12),
        weight=0.3 * normal(TARGETS, 3 + DIRECTIONS, HIDDEN + OUTPUTS, seed=4),
        hidden_constant=normal(TARGETS, HIDDEN, seed=5),
        hidden_weight=0.5 * normal(TARGETS, HIDDEN, OUTPUTS, seed=6),
    )
    forecast = Forecast(centre=pair(4.0, 6.0))
    if sums:
        extent_weight = torch.zeros(len(of_features), WIDTH, dtype=F64)
        extent_weight[:, 1:3] = 0.1
        by_feature = normal(TARGETS, WIDTH, seed=11) * (extent_weight != 0)
        forecast = Forecast(pair(4.0, 6.0), by_feature, extent_weight)
    head = Head(
        constant=0.2 * normal(TARGETS, OUTPUTS, seed=7),
        usual=0.3 * normal(TARGETS, OUTPUTS, seed=8),
        bounds=torch.tensor([[-1.0, 1.2], [-0.7, 0.9]], dtype=F64),
        scale2=pair(0.8, 1.7),
        forecast=forecast,
        network=network if follows else None,
    )
    return head, inputs, features


GUARD = Guard(
    reference=pair(0.5, 0.1),
    variance=pair(40.0, 70.0),
    distances=torch.ones(2, dtype=F64),
    alarm=torch.tensor(1.4, dtype=F64),
)


@pytest.mark.parametrize("shared", [True, False], ids=["shared features", "own features"])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("follows", [True, False], ids=["network", "constant"])
@KINDS
def test_a_folded_head_equals_the_formulas(shared, dtype, follows, kind):
    """Many of the features, predictions and q are beyond what was seen."""
    head, _, _ = made(shared=shared, sums=kind == "sums", follows=follows)
    rows, guard = 200, None if kind == "none" else GUARD
    features = 3 + 20 * normal(rows, TARGETS, WIDTH, seed=7)
    features = features[:, :1].expand(-1, TARGETS, -1) if shared else features
    q, mean = torch.exp(4 * normal(rows, seed=8)), 5 + 3 * normal(rows, TARGETS, seed=9)
    factor = 1 + normal(rows, 1, seed=10).square()
    novelty = torch.exp(2 * normal(rows, 1, seed=11)) if kind == "novelty" else None
    form = HeadForm.of(head, guard, dtype)
    given = features[:, 0] if shared else features
    of_rows = [one.to(dtype) for one in (q[:, None], mean, given, factor)]
    moment, shape = form(*of_rows, novelty)
    assert moment.dtype == shape.dtype == dtype
    assert torch.equal(form.moment(*of_rows, novelty), moment)
    rtol = 1e-10 if dtype == F64 else 2e-4
    for k in range(TARGETS):
        of_novelty = None if novelty is None else novelty[:, 0]
        slow = slow_rows(head, guard, k, q, mean[:, k], features[:, k], factor[:, 0], of_novelty)
        torch.testing.assert_close(moment[:, k].double(), slow.moment, rtol=rtol, atol=0)
        logit, offset, log_width = shape[:, k].double().split(COMPONENTS, 1)
        close(logit.softmax(1), slow.share, rtol)
        close(offset, slow.offset, rtol)
        torch.testing.assert_close(log_width.exp(), slow.width, rtol=10 * rtol, atol=0)


def test_those_rows_reach_every_bound_of_the_formulas():
    """h at both ends, widths at both ends, and shapes on their way between row and usual row."""
    head, _, _ = made(shared=True)
    wide = replace(head, constant=head.constant.clone())
    wide.constant[:, -2:] = torch.tensor([-9.0, 9.0], dtype=F64)
    q, mean = torch.exp(4 * normal(200, seed=8)), 5 + 3 * normal(200, TARGETS, seed=9)
    features = 3 + 20 * normal(200, WIDTH, seed=7)
    moment, shape = HeadForm.of(wide, GUARD, F64)(q[:, None], mean, features)
    for k in range(TARGETS):
        slow = slow_rows(wide, GUARD, k, q, mean[:, k], features)
        torch.testing.assert_close(moment[:, k], slow.moment, rtol=1e-10, atol=0)
        torch.testing.assert_close(shape[:, k, -3:].exp(), slow.width, rtol=1e-9, atol=0)
    bare = HeadForm.of(wide, None, F64)(q[:, None], mean, features)[1]
    assert float(bare[..., -3:].min()) == NARROWEST
    assert float(bare[..., -3:].max()) == WIDEST
    assert not torch.equal(bare, shape)


def one_target(features: torch.Tensor) -> tuple[Head, Inputs]:
    """The head of one target on these features, and its inputs."""
    q, mean = normal(len(features)).exp(), 5 + normal(len(features), seed=1)
    inputs = Inputs.of(q, mean, features)
    width = features.shape[1]
    network = Network(
        *(tensor[None] for tensor in vars(inputs).values()),
        directions=torch.eye(width, dtype=F64)[None],
        weight=0.3 * normal(1, 3 + width, HIDDEN + OUTPUTS, seed=4),
        hidden_constant=normal(1, HIDDEN, seed=5),
        hidden_weight=normal(1, HIDDEN, OUTPUTS, seed=6),
    )
    head = Head(
        constant=0.2 * normal(1, OUTPUTS, seed=7),
        usual=0.2 * normal(1, OUTPUTS, seed=8),
        bounds=torch.tensor([[-9.0, 9.0]], dtype=F64),
        scale2=torch.ones(1, dtype=F64),
        forecast=Forecast(torch.zeros(1, dtype=F64)),
        network=network,
    )
    return head, inputs


def test_a_last_feature_of_ones_may_be_left_out():
    q, mean, features = normal(60).exp(), 5 + normal(60, seed=1), 3 + 2 * normal(60, 3, seed=2)
    features[:, 2] = 1.0
    head, _ = one_target(features)
    form = HeadForm.of(head, None, F64)
    whole = form(q[:, None], mean[:, None], features)
    without = form(q[:, None], mean[:, None], features[:, :2])
    assert torch.equal(whole[0], without[0]) and torch.equal(whole[1], without[1])
    close(whole[0][:, 0], slow_rows(head, None, 0, q, mean, features).moment)


def test_a_row_without_rigidity_has_the_noise_alone_and_is_like_the_least_rigid_one():
    """Also where all predictions and all q were equal, which then say nothing."""
    features, ones = normal(20, 2), torch.ones(20, dtype=F64)
    head, _ = one_target(features)
    low_q = (head.network.rigidity[0, 0] - 4 * head.network.rigidity[0, 1]).exp()
    form = HeadForm.of(head, None, F64)
    moment, shape = form(0 * ones[:, None], 5 * ones[:, None], features)
    least = slow_rows(
        replace(head, scale2=0 * head.scale2), None, 0, low_q * ones, 5 * ones, features
    )
    close(moment[:, 0], least.moment)
    close(shape[:, 0, :3].softmax(1), least.share)

    alike = Inputs.of(ones, 3 * ones, features)
    units = {name: tensor[None] for name, tensor in vars(alike).items()}
    constant = replace(head, network=replace(head.network, **units))
    found = HeadForm.of(constant, None, F64)(0 * ones[:, None], 7 * ones[:, None], features)
    expected = slow_rows(constant, None, 0, 0 * ones, 7 * ones, features)
    close(found[0][:, 0], expected.moment)


def joined(inputs, q, mean, features):
    return torch.cat([inputs.besides_features(q, mean), inputs.standardised(features)], 1)


def test_inputs_are_standardised_on_their_own_rows_and_equal_the_formulas():
    q, mean, features = normal(60).exp(), 5 + normal(60, seed=1), 3 + 2 * normal(60, 2, seed=2)
    head, inputs = one_target(features)
    phi = joined(inputs, q, mean, features)
    assert float(phi.mean(0).abs().max()) < 1e-12
    close(phi[:, [0, 1, 3, 4]].std(0, correction=0), torch.ones(4, dtype=F64))
    far = [100 * one for one in (q, mean, features)]
    for rows in ((q, mean, features), far):
        close(joined(inputs, *rows), slow_inputs(head, 0, *rows))


def test_constant_predictions_and_rigidities_have_no_input():
    one = torch.ones(20, dtype=F64)
    inputs = Inputs.of(one, 3 * one, normal(20, 2))
    assert bool((inputs.besides_features(7 * one, 9 * one) == 0).all())


@pytest.mark.parametrize("shared", [True, False])
@KINDS
def test_one_target_has_an_axis_of_length_one(shared, kind):
    """The first of two targets, by itself, has the numbers that it has beside the other."""
    head, _, features = made(shared=shared, sums=kind == "sums")
    of_features = ("network.centre", "network.spread", "forecast.extent_weight")
    tensors = {}
    for name, tensor in head.tensors().items():
        tensors[name] = tensor if name in of_features and shared else tensor[:1]
    alone = head_from(tensors)
    guard = guard_alone = None
    if kind != "none":
        guard = GUARD
        guard_alone = replace(GUARD, reference=GUARD.reference[:1], variance=GUARD.variance[:1])
    q, mean = torch.exp(3 * normal(60, 1, seed=8)), 5 + 3 * normal(60, TARGETS, seed=9)
    novelty = torch.exp(normal(60, 1, seed=11)) if kind == "novelty" else None
    both, one = HeadForm.of(head, guard, F64), HeadForm.of(alone, guard_alone, F64)
    given = features[:, 0] if shared else features
    values = both(q, mean, given, None, novelty)
    for features_of_one in (features[:, 0], features[:, :1]):
        found = one(q, mean[:, :1], features_of_one, None, novelty)
        for value, expected in zip(found, values, strict=True):
            close(value, expected[:, :1], 1e-12)


@KINDS
@pytest.mark.parametrize("follows", [True, False], ids=["network", "constant"])
def test_a_form_is_made_again_of_its_tensors(kind, follows):
    head, _, features = made(shared=True, sums=kind == "sums", follows=follows)
    form = HeadForm.of(head, None if kind == "none" else GUARD, F64)
    again = HeadForm.from_tensors(form.tensors())
    assert (again.guard is None) == (kind == "none") and (again.network is None) == (not follows)
    q, mean = torch.exp(3 * normal(60, 1, seed=8)), 5 + 3 * normal(60, TARGETS, seed=9)
    values, expected = (f(q, mean, features[:, 0]) for f in (again, form))
    assert torch.equal(values[0], expected[0]) and torch.equal(values[1], expected[1])


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("follows", [True, False])
def test_a_head_is_made_again_of_its_tensors_and_damaged_ones_are_refused(sums, follows):
    head, _, _ = made(shared=True, sums=sums, follows=follows)
    tensors = head.tensors()
    again = head_from(tensors).tensors()
    assert again.keys() == tensors.keys() and all(again[name] is tensors[name] for name in again)
    message = "damaged or from another version. Calibrate again"
    refused(message, head_from, {name: t for name, t in tensors.items() if name != "scale2"})
    refused(message, head_from, tensors | {"tilt": tensors["constant"]})
    refused(message, head_from, tensors | {"network.tilt": tensors["constant"]})


def test_wider_structures_of_the_same_kind_have_bars_in_proportion():
    """With everything summed twice, mean, features and bars double, and the shape stays.

    Counts themselves are inputs, which here have no weight.
    """
    head, _, features = made(shared=True, sums=True)
    head.network.directions[:, 1:3] = 0
    forecast = replace(head.forecast, centre=torch.zeros(TARGETS, dtype=F64))
    form = HeadForm.of(replace(head, forecast=forecast), GUARD, F64)
    q, mean = torch.exp(normal(60, 1, seed=8)), 5 + 3 * normal(60, TARGETS, seed=9)
    moment, shape = form(q, mean, features[:, 0])
    doubled, same = form(4 * q, 2 * mean, 2 * features[:, 0])
    close(doubled, 4 * moment, 1e-9)
    close(same, shape, 1e-9)


@pytest.mark.parametrize("shape", [(5, 0), (0,), (0, 3)])
def test_columns_without_entries_are_constant_and_do_not_warn(shape):
    spread = column_spread(torch.zeros(shape, dtype=torch.float64))
    assert spread.shape == shape[1:] and bool(spread.isinf().all())


def test_a_sum_of_nothing_has_an_extent_of_one():
    head, _, _ = made(shared=True, sums=True, follows=False)
    features, ones = torch.zeros(1, WIDTH, dtype=F64), torch.ones(1, TARGETS, dtype=F64)
    moment, _ = HeadForm.of(head, GUARD, F64)(0 * ones, ones, features)
    assert bool(moment.isfinite().all()) and bool((moment > 0).all())
    for k in range(TARGETS):
        slow = slow_rows(head, GUARD, k, torch.zeros(1, dtype=F64), ones[:, k], features)
        assert float(moment[0, k]) == pytest.approx(float(slow.moment), rel=1e-10)
        assert not math.isnan(float(slow.moment))
