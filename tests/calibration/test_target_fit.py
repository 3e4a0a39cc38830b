"""The head of one target: its inputs, what is left out of a fit, its units, and its scales."""

import math
from dataclasses import replace

import pytest
import torch

from rigidities.calibration import target_fit
from rigidities.calibration.density_fit import Weights
from rigidities.calibration.methods import Full
from rigidities.calibration.rows import TargetView
from rigidities.calibration.target_fit import (
    Design,
    Plan,
    TargetFit,
    TargetProblem,
    fitted_target,
    splits,
)
from tests.support.density_rows import skewed_draws, target_view
from tests.support.slow_head import SlowRows, slow_outputs, slow_rows
from tests.support.tensors import close, normal

F64 = torch.float64
WIDTH = 4
SHORT = Plan(follows_inputs=True, guarded=True, components=2, most_steps=60, few_steps=60)
CONSTANT = replace(SHORT, follows_inputs=False)


def skewed_rows(
    count: int, seed: int = 0, *, trained: int = 0, luck: float = 1.0, width: int = WIDTH
) -> TargetView:
    """Rows with skewed errors whose spread follows the first feature.

    Args:
        count: Number of rows.
        seed: Of the draws.
        trained: How many of them were trained on.
        luck: Factor of the errors of those.
        width: Number of features.
    """
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, width, generator=generator, dtype=F64)
    features[:, -1] = features[:, -1].exp()  # not symmetric
    log_q, mean = 0.7 * torch.randn(2, count, generator=generator, dtype=F64)
    seen = torch.arange(count) < trained
    residual = (0.5 * features[:, 0]).exp() * skewed_draws(count, generator)
    residual = residual * torch.where(seen, luck, 1.0)
    ones = torch.ones_like(mean)
    view = target_view(residual, log_q.exp() / 20, mean, features, ones, seen)
    return view.with_forecast(None)


def said(fit: TargetFit, rows: TargetView) -> SlowRows:
    """What a fit says of rows, by the head's plain formulas."""
    guard = fit.guard
    return slow_rows(fit.head, guard, 0, rows.q, rows.mean, rows.features, rows.noise_factor)


# --- inputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [WIDTH, 80, 300])
def test_the_head_is_the_network_that_was_fitted_in_the_units_of_the_rows(width):
    """Also where the network looks at 64 directions of more features."""
    problem = TargetProblem(skewed_rows(400, width=width), SHORT, None)
    rows, columns = problem.rows, problem._columns
    assert columns.shape == (400, 3 + min(width, 64))
    constant = problem._constant
    weights = Weights.start(columns, constant)
    weights.vector.add_(0.05 * normal(len(weights.vector), seed=3).float())
    level = 0.3
    head = problem.head(constant, weights, level)
    outputs = slow_outputs(head, 0, rows.q, rows.mean - rows.target.mean(), rows.features)
    expected = weights(columns).double()
    expected[:, 0] += level + float(problem.unit.log())
    close(outputs, expected, 1e-4)
    h = expected[:, 0].sort().values
    assert head.bounds[0].tolist() == pytest.approx([float(h[2]), float(h[-3])], abs=0.1)
    assert float(head.usual[0, 0]) == pytest.approx(float(h[200]), abs=0.02)
    scale2 = (weights.log_scale2[0].double() + level).exp() * problem.unit / rows.usual_q
    assert float(head.scale2[0]) == pytest.approx(float(scale2), rel=1e-6)


def test_of_wide_features_the_directions_of_most_variance_are_looked_at():
    """Subspace iterations find nearly as much variance as the exact ones."""
    features = (
        normal(500, 300) @ torch.diag(0.97 ** torch.arange(300, dtype=F64)) @ normal(300, 300)
    )
    ones = torch.ones(500, dtype=F64)
    rows = target_view(ones, normal(500).exp(), normal(500), features, ones, ones < 0)
    design = Design.of(rows)
    close(design.directions.mT @ design.directions, torch.eye(64, dtype=F64))
    standardised = design.inputs.standardised(features)
    found = (standardised @ design.directions).square().sum()
    best = torch.linalg.svdvals(standardised)[:64].square().sum()
    assert 0.97 < float(found / best) <= 1 + 1e-9


def test_the_order_of_features_does_not_change_the_columns():
    rows = skewed_rows(200)
    order = torch.tensor([2, 0, 3, 1])
    moved = replace(rows, features=rows.features[:, order])
    close(Design.of(moved).columns(moved), Design.of(rows).columns(rows), 1e-5)


# --- what is left out ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trained", "new", "left_out"),
    [
        (0, 50, [10] * 5),
        (300, 50, [10] * 5),
        (300, 3, [1] * 3),
        (300, 2, []),
        (50, 0, [10] * 5),
        (0, 2, []),
        (3000, 200, [200]),
        (3000, 999, [999]),
        (3000, 1000, [200]),
        (3000, 199, [799]),
        (3000, 3, [603]),
        (0, 4000, [800]),
        (4000, 0, [800]),
    ],
)
def test_new_rows_choose_a_fifth_of_many_and_in_turn_where_rows_are_few(trained, new, left_out):
    rows = skewed_rows(trained + new, trained=trained)
    each = splits(rows)
    assert [len(split.left_out) for split in each] == left_out
    for split in each:
        assert not bool(split.fitted[split.left_out].any())
        assert int(split.fitted.sum()) == len(rows) - len(split.left_out)
        if 0 < new < 1000 and len(left_out) == 1:
            assert not bool(split.fitted[~rows.seen].any())  # all new rows judge
        if new and (len(rows) < target_fit.MANY or new >= target_fit.ENOUGH):
            assert not bool(rows.seen[split.left_out].any())
    if len(left_out) > 1:
        together = torch.cat([split.left_out for split in each]).sort().values
        judged = ~rows.seen if new else rows.seen
        assert torch.equal(together, judged.nonzero()[:, 0])


@pytest.mark.parametrize("many", [60, 61])
def test_outputs_of_a_sample_are_left_out_together(many, monkeypatch):
    monkeypatch.setattr(target_fit, "MANY", many)
    sample = torch.arange(60) // 4
    rows = replace(skewed_rows(60), sample=sample)
    each = splits(rows)
    assert len(each) == (1 if many == 60 else 5)
    for split in each:
        assert not set(sample[split.fitted].tolist()) & set(sample[split.left_out].tolist())


@pytest.mark.parametrize(
    ("targets", "rows", "steps"),
    [(1, 2999, 500), (1, 3000, 1500), (6, 3000, 1000), (40, 3000, 500)],
)
def test_paths_are_shorter_for_few_rows_and_for_many_targets(targets, rows, steps):
    tables = [skewed_rows(rows)] * targets
    assert Plan.of(tables, Full(), has_features=True).steps(tables[0]) == steps
    assert Plan.of(tables, Full(noise="constant"), has_features=True).steps(tables[0]) == 0
    assert Plan.of(tables, Full(), has_features=False).steps(tables[0]) == 0


def test_a_target_with_few_rows_leaves_the_path_of_another_as_it_is():
    few, many = skewed_rows(100), skewed_rows(3000)
    plan = Plan.of([few, many], Full(), has_features=True)
    assert (plan.steps(few), plan.steps(many)) == (500, 1500)
    assert plan.components == 2  # heads of one calibration have as many
    assert Plan.of([many, many], Full(), has_features=True).components == 3


# --- scales -------------------------------------------------------------------------------------


def test_bars_follow_the_units_of_targets_and_of_q():
    rows = skewed_rows(150)
    fit = fitted_target(rows, SHORT)
    a, b, c = 64.0, 3.0, 0.25
    scaled = target_view(
        a * rows.residual,
        c * rows.q,
        a * rows.mean + b,
        rows.features,
        rows.noise_factor,
        rows.seen,
    )
    other = fitted_target(scaled.with_forecast(None), SHORT)
    assert other.step == fit.step
    found = said(other, scaled)
    expected = said(fit, rows)
    close(found.moment, a * a * expected.moment, 1e-3)
    close(found.share, expected.share, 1e-3)
    assert float(other.scale2) == pytest.approx(a * a / c * float(fit.scale2), rel=1e-3)


@pytest.mark.parametrize("plan", [SHORT, CONSTANT], ids=["network", "one mixture"])
def test_negated_targets_have_the_mirrored_distribution(plan):
    rows = skewed_rows(150, trained=50)
    found, expected = (said(fitted_target(one, plan), one) for one in (rows.mirrored, rows))
    assert torch.equal(found.moment, expected.moment)
    assert torch.equal(found.share, expected.share)
    assert torch.equal(found.offset, -expected.offset)
    assert float(expected.offset.abs().max()) > 0.3


def test_rows_in_another_order_have_the_same_head():
    rows = skewed_rows(150, trained=50)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    one, other = (fitted_target(r, SHORT).head.tensors() for r in (rows, rows[order]))
    for name, tensor in one.items():
        close(other[name], tensor, 1e-12)


@pytest.mark.parametrize("luck", [0.5, 0.8])
def test_bars_are_those_of_new_rows_where_training_rows_were_lucky(luck, monkeypatch):
    """Training rows choose the form of the head, new rows its level.

    So bars are the same as with training rows whose errors are not smaller.
    """
    monkeypatch.setattr(target_fit, "MANY", 1000)
    monkeypatch.setattr(target_fit, "ENOUGH", 200)
    rows = skewed_rows(1800, trained=1200, luck=luck)
    fit = fitted_target(rows, SHORT)
    new = skewed_rows(4000, seed=1)
    slow = said(fit, new)
    inside = (slow.below(new.target) - 0.5).abs() < 0.45
    assert 0.87 < float(inside.double().mean()) < 0.97
    honest = said(fitted_target(skewed_rows(1800, trained=1200), SHORT), new)
    ratio = (slow.moment / honest.moment).sqrt()
    assert 0.95 < float(ratio.median()) < 1.05
    # Half the gap of the errors is what a network's own weights add: (1 - luck^2) / 2.
    unit = rows.mean_square / rows.usual_q
    assert float(fit.gap / unit) == pytest.approx((1 - luck**2) / 2, abs=0.1)


@pytest.mark.parametrize("alike", ["new", "trained"])
def test_without_both_kinds_of_rows_there_is_no_gap(alike):
    rows = skewed_rows(60, trained=60 if alike == "trained" else 0)
    fit = fitted_target(rows, CONSTANT)
    assert float(fit.gap) == pytest.approx(float(fit.scale2))


def test_the_guard_begins_where_nine_tenths_of_the_rows_end():
    rows = skewed_rows(500)
    guard = fitted_target(rows, CONSTANT).guard
    assert float(guard.reference) == pytest.approx(float(torch.quantile(rows.q, 0.9)))
    assert float(guard.variance) == pytest.approx(float(rows.target.var()), rel=0.05)
    assert fitted_target(rows, replace(CONSTANT, guarded=False)).guard is None


# --- bounds and corners -------------------------------------------------------------------------


def test_the_scale_of_clipped_rows_is_that_of_the_rows_before_they_were_clipped():
    """Rows at a bound show the mass beyond it; to read them as errors makes bars too narrow."""
    count = 2000
    z = 0.7 * normal(count, seed=3)
    ones = torch.ones(count, dtype=F64)
    features = normal(count, 2)
    rows = target_view(z.clamp(min=-0.2), 1e-6 * ones, 0 * ones, features, ones, ones < 0)
    known = replace(rows, side=-(z < -0.2).to(F64)).with_forecast(None)
    plan = replace(CONSTANT, guarded=False)
    found = said(fitted_target(known, plan), known)
    for level in (-0.7, 0.0, 0.7, 1.4):
        truth = float(torch.special.ndtr(torch.tensor(level / 0.7)))
        at = found.below(torch.full_like(z, level))[0]
        if level > -0.2:
            assert float(at) == pytest.approx(truth, abs=0.03)
    assert float(found.moment[0].sqrt()) == pytest.approx(0.7, rel=0.15)
    blind = said(fitted_target(rows.with_forecast(None), plan), rows)
    assert float(blind.moment[0]) < 0.7 * float(found.moment[0])


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("trained", [0, 30])
def test_very_few_rows_have_bars_near_their_errors(count, trained):
    rows = skewed_rows(count + trained, trained=trained)
    fit = fitted_target(rows, SHORT)
    moment = said(fit, rows).moment
    assert bool(moment.isfinite().all()) and math.isfinite(fit.nll)
    assert len(fit.gains) == (count if count >= 3 else 0)
    size = float(rows.residual.square().mean())
    assert 0.05 < float(moment.median()) / size < 20


def test_residuals_of_zero_leave_everything_finite():
    rows = skewed_rows(200)
    some = replace(rows, residual=torch.where(rows.q > rows.q.median(), rows.residual, 0.0))
    fit = fitted_target(some.with_forecast(None), SHORT)
    assert all(bool(tensor.isfinite().all()) for tensor in fit.head.tensors().values())
    assert bool(said(fit, some).moment.isfinite().all())


def test_few_rows_follow_the_inputs_only_where_they_tell_it_clearly():
    """Of 50 rows whose errors follow nothing, hardly ever; 500 of which they do are followed."""
    chances = 0
    for seed in range(6):
        rows = skewed_rows(50, seed)
        noise = normal(50, seed=seed)
        alike = replace(rows, residual=noise, target=rows.mean + noise).with_forecast(None)
        chances += fitted_target(alike, SHORT).step > 0
    assert chances <= 1
    assert fitted_target(skewed_rows(500), SHORT).step > 0


def test_the_allowance_of_few_rows_widens_all_bars(monkeypatch):
    """Beside bars without one."""
    rows = skewed_rows(40)
    plan = replace(CONSTANT, guarded=False)
    wide = fitted_target(rows, plan)
    fitted_level = target_fit.fitted_level
    allowances = []

    def without_allowance(*arguments):
        level, allowance = fitted_level(*arguments)
        allowances.append(allowance)
        return level, 0.0

    monkeypatch.setattr(target_fit, "fitted_level", without_allowance)
    narrow = fitted_target(rows, plan)
    assert 0.03 < allowances[1] < 0.1
    ratio = said(wide, rows).moment / said(narrow, rows).moment
    close(ratio, torch.full_like(ratio, math.exp(allowances[1])), 1e-6)


def test_where_errors_do_not_follow_the_inputs_bars_hardly_do():
    generator = torch.Generator().manual_seed(2)
    rows = skewed_rows(400)
    noise = torch.randn(400, generator=generator, dtype=F64)
    flat = replace(rows, residual=noise, target=rows.mean + noise, q=0.001 * rows.q)
    fit = fitted_target(flat.with_forecast(None), replace(SHORT, guarded=False))
    std = said(fit, flat).moment.sqrt()
    assert float((std / std.median()).log().abs().mean()) < 0.1
    assert float(std.median()) == pytest.approx(1.0, rel=0.15)
