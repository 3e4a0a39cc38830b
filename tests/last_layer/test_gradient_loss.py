"""Fits to values and derivatives, and the derivatives' scale, against sums of outer products."""

import functools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rigidities as rg
from rigidities.calibration.evidence import evidence
from rigidities.last_layer.gradients import feature_derivatives
from tests.support import derivative_oracle as dense
from tests.support import oracle, zoo
from tests.support.derivative_oracle import wrt
from tests.support.nets import calibrated, without_forward_mode
from tests.support.refusals import refused
from tests.support.tensors import close, each_close, normal
from tests.support.zoo_fits import fitted_to, row_weights

F64 = torch.float64
BETA, RIDGE = 0.7, 0.1
NAMES = ["2.weight", "2.bias"]


def run(m, x):
    return m(x)


# --- every kind of readout ----------------------------------------------------------------------

READOUTS = (
    *("mlp_with_a_squeezed_output", "mlp_with_several_targets", "mlp_without_a_bias"),
    *("bare_linear_model", "reshaped_output", "several_time_steps_and_targets_out"),
    *("scaled_and_shifted_output", "each_target_scaled_by_its_own_std"),
    *("each_sample_scaled_by_an_input", "sum_over_padded_atoms", "mean_over_time_steps"),
    *("cumulative_sum_over_time", "transposed_time_steps_and_targets"),
    *("targets_mixed_by_a_fixed_matrix", "sum_over_atoms_with_species_shifts"),
    *("one_head_for_each_species", "two_heads_as_two_targets", "head_called_twice_for_two_targets"),
    *("weight_normed_head", "pointwise_convolution_in_one_dimension"),
    *("raw_parameter_head_with_its_features", "softplus_after_the_head", "product_of_two_heads"),
    *("two_inputs", "transformer_with_a_head_on_the_first_token"),
)


@pytest.mark.parametrize("id", READOUTS)
def test_each_derivative_adds_its_outer_product_to_the_gram(id):
    case, test = (dense.trimmed(zoo.build(id, draw), 4) for draw in (0, 3))
    uq = fitted_to(case, [case.data], gradient_loss=rg.GradientLoss(wrt(id), weight=BETA))
    uq.calibrate([zoo.build(id, 2).data], method=rg.Paper(ridge=RIDGE))
    values = oracle.rows(oracle.readout_jacobian(case.model, case.call, case.parameters))
    slopes = oracle.rows(dense.of_case(case).features)
    weights = torch.cat([torch.ones(len(values)), torch.ones(len(slopes))]).double()
    weights[len(values) :] *= BETA
    units = row_weights(uq, [case])
    if bool((units != 1).any()):  # derivatives of targets with units have these units too
        weights *= torch.cat([units, units.repeat_interleave(len(slopes) // len(values))])
    f = oracle.readout_jacobian(case.model, test.call, case.parameters)
    q = oracle.quadratic(torch.cat([values, slopes]), f, RIDGE, weights)
    close(1 / uq.predict([test.data]).rigidity, q)


def test_a_model_without_a_graph_is_refused_with_a_hint():
    id = "forward_without_gradients_with_its_features"
    case = zoo.build(id)
    uq = rg.LastLayerRigidity(case.model, **case.options)
    loss = rg.GradientLoss(0)
    refused(r"Batch 0.*no_grad.*wrt=", uq.fit, [case.data], gradient_loss=loss)
    uq.fit([case.data])


CHUNKED = (
    *("mlp_with_several_targets", "sum_over_atoms_with_species_shifts"),
    *("several_time_steps_and_targets_out", "each_target_scaled_by_its_own_std"),
    "targets_mixed_by_a_fixed_matrix",
)


@pytest.mark.parametrize("numbers", [1, 300])
@pytest.mark.parametrize("cost", [1e-9, math.inf])
@pytest.mark.parametrize("id", CHUNKED)
def test_forward_and_reverse_mode_add_the_same_rows_in_any_chunks(monkeypatch, id, cost, numbers):
    case = zoo.build(id)
    slope = normal(*dense.of_case(case).slope.shape, seed=0)
    weights = normal(len(slope), seed=1).exp()
    loss = rg.GradientLoss(wrt(id), weight=lambda b: weights, target=lambda b: slope)
    expected, found = (rg.LastLayerRigidity(case.model, **case.options) for _ in range(2))
    expected.fit([case.data], gradient_loss=loss)
    monkeypatch.setattr(feature_derivatives, "FORWARD_COST", cost)
    monkeypatch.setattr(feature_derivatives, "NUMBERS_AT_ONCE", numbers)
    found.fit([case.data], gradient_loss=loss)
    each_close(state(found), state(expected))
    assert found.gram.count == expected.gram.count


def test_an_operation_without_forward_mode_is_counted_once(monkeypatch):
    model, given = net(), data()
    tanh = without_forward_mode(torch.tanh, lambda x: 1 - x.tanh().square())
    own = zoo.Net(lambda m, x: m.head(tanh.apply(m.trunk(x))), trunk=model[0], head=model[2])
    monkeypatch.setattr(feature_derivatives, "FORWARD_COST", 0.0)
    uq = rg.LastLayerRigidity(own).fit(
        (given.x, given.y), gradient_loss=rg.GradientLoss(0, weight=BETA)
    )
    close(uq.gram.matrix, statistic(given)[0].matrix)
    assert uq.gram.count == 15 * 4


# --- nets of one's own --------------------------------------------------------------------------


@functools.cache
def net(targets=1):
    """A net with one hidden layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, targets)).double()


@dataclass
class Data:
    """Inputs, values and derivatives."""

    x: Tensor
    y: Tensor
    slope: Tensor

    @property
    def batch(self):
        return {"input": self.x, "y": self.y, "slope": self.slope}

    def part(self, rows):
        return Data(self.x[rows], self.y[rows], self.slope[rows])


def data(rows=15, targets=1, seed=0):
    slope = normal(rows, targets, 3, seed=seed + 2)
    slope = slope[:, 0] if targets == 1 else slope
    return Data(normal(rows, 3, seed=seed), normal(rows, targets, seed=seed + 1), slope)


def fit(given, targets=1, weight=BETA, **options):
    uq = rg.LastLayerRigidity(net(targets))
    batches = [d.batch for d in given] if isinstance(given, list) else [given.batch]
    loss = rg.GradientLoss("input", weight=weight, target="slope")
    return uq.fit(batches, gradient_loss=loss, **options)


def statistic(given, weight=BETA, targets=1, value_weight=1.0):
    """G, F^T W r and r^T W r of one target after the other, one row after the other."""
    model = net(targets)
    f = torch.cat([torch.tanh(model[0](given.x)), torch.ones(len(given.x), 1)], 1).detach().double()
    slope = dense.derivatives(model, run, NAMES, given.x).of_each_row().slope
    a, h = model[0].weight.detach(), f[:, :-1]
    g = (1 - h.square())[:, :, None] * a  # d h_j / d x_i
    g = torch.cat([g, g.new_zeros(len(g), 1, 3)], 1).mT  # (N, d, D)
    value = given.y - model(given.x).detach()
    error = given.slope.reshape(slope.shape) - slope
    weight = torch.as_tensor(weight, dtype=F64)
    weight = weight[:, None] if weight.ndim == 1 else weight
    value_weight = torch.as_tensor(value_weight, dtype=F64)
    return [
        dense.statistic(
            [
                *dense.each(f, value_weight, value[:, k]),
                *dense.each(g, weight, error[:, k]),
            ]
        )
        for k in range(targets)
    ]


@pytest.mark.parametrize("targets", [1, 3])
def test_residuals_of_derivatives_enter_the_sums(targets):
    given = data(targets=targets)
    uq = fit(given, targets)
    expected = statistic(given, targets=targets)
    for k, one in enumerate(expected):
        close(uq.gram.matrix, one.matrix)
        close(uq.gram.cross[:, k], one.cross)
        close(uq.gram.square.diagonal()[k], one.square)


def test_residuals_of_mixed_targets_enter_the_sums():
    id = "targets_mixed_by_a_fixed_matrix"
    case = zoo.build(id)
    target = normal(12, 3, 3, seed=0)  # (N, targets, inputs)
    uq = rg.LastLayerRigidity(case.model)
    uq.fit([case.data], gradient_loss=rg.GradientLoss(0, weight=BETA, target=lambda b: target))
    f = oracle.readout_jacobian(case.model, case.call, case.parameters)
    g = dense.of_case(case)
    r = case.target - case.model(*case.args).detach()
    one, beta = torch.tensor(1.0), torch.tensor(BETA, dtype=F64)
    units = oracle.own_units(case.target)
    rows = [
        *dense.each(f, one * units, r),
        *dense.each(g.features, beta * units[:, None], target - g.slope),
    ]
    expected = dense.statistic(rows)
    # The library may order the columns of w otherwise: what does not depend on the order.
    close(torch.linalg.eigvalsh(uq.gram.matrix), torch.linalg.eigvalsh(expected.matrix))
    close(uq.gram.cross.norm(), expected.cross.norm())
    close(uq.gram.square.sum(), expected.square)


@pytest.mark.thorough
def test_residuals_and_scales_find_their_target_where_the_outputs_are_in_another_order():
    id = "pointwise_convolution_in_one_dimension"  # outputs (N, targets, steps), rows (N, steps)
    case, valid = zoo.build(id), dense.trimmed(zoo.build(id, 2), 4)
    slopes = [normal(len(c.target), 2, 3, 3, 5, seed=0) for c in (case, valid)]
    slopes[1][:, 1] *= 4.0  # the second target's are worse
    by_rows = {len(slope): slope for slope in slopes}
    loss = rg.GradientLoss(0, weight=BETA, target=lambda batch: by_rows[len(batch[0])])
    uq = rg.LastLayerRigidity(case.model).fit([case.data], gradient_loss=loss)
    f = oracle.rows(oracle.readout_jacobian(case.model, case.call, case.parameters))
    g, r = dense.of_case(case), case.target - case.model(*case.args).detach()
    rows = torch.cat([f, oracle.rows(g.features)])
    weights = torch.ones(len(rows), dtype=F64)
    weights[len(f) :] = BETA
    residuals = torch.cat([r.reshape(-1), (slopes[0] - g.slope).reshape(-1)])
    cross = (weights * residuals) @ rows  # two weight vectors, then two biases
    for k in range(2):
        mine = torch.cat([cross[8 * k : 8 * k + 8], cross[16 + k : 17 + k]])
        close(uq.gram.cross[:, k], mine)
    with pytest.warns(UserWarning, match="144 derivatives"):  # of steps that see not all inputs
        uq.calibrate([valid.data], method=rg.Paper(ridge=RIDGE))
    g = dense.of_case(valid)
    q = oracle.quadratic(rows, g.features, RIDGE, weights)
    moved = q > 0
    error = slopes[1] - g.slope
    expected = [dense.scale(error[:, k][moved[:, k]], q[:, k][moved[:, k]]) for k in range(2)]
    close(uq.calibration_report.gradient_scale, torch.tensor(expected, dtype=F64))


def without_targets(given, targets=1, weight=BETA, batch_size=None):
    uq = rg.LastLayerRigidity(net(targets), batch_size=batch_size)
    return uq.fit((given.x, given.y), gradient_loss=rg.GradientLoss(0, weight=weight))


def test_derivatives_without_targets_in_mappings_raise_no_alarm_about_the_values():
    given = data()
    batch = {"input": given.x, "y": given.y}
    uq = rg.LastLayerRigidity(net())
    uq.fit([batch], gradient_loss=rg.GradientLoss("input", weight=BETA))  # warnings are errors
    close(uq.gram.matrix, without_targets(given).gram.matrix)


@pytest.mark.parametrize("targets", [1, 3])
def test_derivatives_without_targets_leave_the_moments_of_the_values_residuals(targets):
    given, more = data(targets=targets), data(6, targets, seed=5)
    uq = without_targets(given, targets, batch_size=4)
    close(uq.gram.matrix, statistic(given, targets=targets)[0].matrix)
    residual = given.y - uq.model(given.x).detach()
    close(uq.gram.square, residual.T @ residual)
    assert uq.gram.cross is None
    uq.partial_fit((more.x, more.y))
    also = more.y - uq.model(more.x).detach()
    close(uq.gram.square, residual.T @ residual + also.T @ also)
    uq.forget((given.x, given.y))
    close(uq.gram.square, also.T @ also)
    assert uq.gram.cross is None
    again = type(uq.gram).from_state(uq.gram.state())
    assert torch.equal(again.square, uq.gram.square)
    assert again.cross is None
    close(uq.gram.clone().merge(again).square, 2 * also.T @ also)
    older = {name: uq.gram.state()[name] for name in ("matrix", "count", "zeros")}
    assert type(uq.gram).from_state(older).square is None


def test_a_light_weight_of_derivatives_hardly_changes_the_error_bar_of_a_difference():
    given, valid = data(30, 2), data(30, 2, seed=7)
    given.y[:, 1] = given.y[:, 0] + 0.01 * given.y[:, 1]
    given.y += net(2)(given.x).detach()
    difference = lambda y: y[:, 0] - y[:, 1]  # noqa: E731
    plain = rg.LastLayerRigidity(net(2)).fit((given.x, given.y))
    light = without_targets(given, 2, weight=1e-9)
    stds = []
    for uq in (plain, light):
        uq.calibrate((valid.x, valid.y), method=rg.Paper(ridge=RIDGE))
        stds.append(uq.propagate(difference, valid.x[:3]).std)
    close(stds[1], stds[0], 1e-6)
    parts = plain.predict(valid.x[:3]).epistemic.sum(1).sqrt()
    assert bool((stds[0] < 0.5 * parts).all())  # the targets' errors are correlated


@pytest.mark.parametrize("ridge", [0.01, 3.0])
def test_the_evidence_counts_the_derivatives_with_targets(ridge):
    given = data(12)
    uq = fit(given)
    head = uq.model[-1]
    weights = torch.cat([head.weight, head.bias[:, None]], 1).T.detach()  # (D, K)
    value = evidence(uq.gram, rg.Posterior.from_gram(uq.gram, ridge), weights)
    found = value(torch.tensor([ridge, 1.0], dtype=F64))
    f = dense.features(uq.model, run, NAMES, given.x)[:, 0]
    g = dense.derivatives(uq.model, run, NAMES, given.x).of_each_row().features[:, 0]
    rows = torch.cat([f, math.sqrt(BETA) * oracle.rows(g)])
    goal = torch.cat([given.y[:, 0], math.sqrt(BETA) * given.slope.reshape(-1)])
    expected = []
    for s in (ridge, 1.0):
        covariance = torch.eye(len(rows), dtype=F64) + rows @ rows.T / s
        variance = goal @ torch.linalg.solve(covariance, goal) / len(rows)  # at its best
        distribution = torch.distributions.MultivariateNormal(
            torch.zeros_like(goal), variance * covariance
        )
        expected.append(-distribution.log_prob(goal) / len(rows))
    close(found, torch.stack(expected))


def test_the_evidence_without_targets_of_the_derivatives_is_refused_with_the_cause():
    given, valid = data(30), data(30, seed=7)
    with pytest.raises(ValueError, match=r"derivatives without targets.*target="):
        without_targets(given).calibrate((valid.x, valid.y), method=rg.Paper(criterion="evidence"))
    alone = rg.LastLayerRigidity(net()).fit([given.x], gradient_loss=rg.GradientLoss(0))
    by_evidence = rg.Paper(criterion="evidence")
    refused(r"Call fit with \(x, y\)", alone.calibrate, (valid.x, valid.y), method=by_evidence)
    fit(given).calibrate([valid.batch], method=rg.Paper(criterion="evidence"))


def test_the_sum_of_residuals_vanishes_at_the_minimum_of_the_loss():
    given = data(rows=30)
    model = oracle.float64_copy(net())
    f = torch.cat([torch.tanh(model[0](given.x)), torch.ones(30, 1)], 1).detach().double()
    g = dense.derivatives(model, run, NAMES, given.x).of_each_row().features
    rows = torch.cat([f, math.sqrt(BETA) * oracle.rows(g)])
    goal = torch.cat([given.y[:, 0], math.sqrt(BETA) * given.slope.reshape(-1)])
    best = torch.linalg.lstsq(rows, goal[:, None]).solution[:, 0]
    with torch.no_grad():
        model[2].weight[0] = best[:-1]
        model[2].bias[0] = best[-1]
    uq = rg.LastLayerRigidity(model)
    uq.fit([given.batch], gradient_loss=rg.GradientLoss("input", weight=BETA, target="slope"))
    assert float(uq.gram.cross.abs().max()) < 1e-10
    close(uq.gram.square.squeeze(), (goal - rows @ best).square().sum())


def test_a_model_trained_on_values_and_derivatives_has_the_posterior_of_least_squares():
    """Generalised least squares: Cov w = (sum f f^T + beta sum g g^T + s)^-1, for any query."""
    given, new = data(rows=20), data(rows=5, seed=9)
    uq = fit(given)
    uq.calibrate([data(seed=20).batch], method=rg.Paper(ridge=RIDGE))
    inverse = torch.linalg.inv(statistic(given)[0].matrix + RIDGE * torch.eye(7, dtype=F64))
    f = dense.features(uq.model, run, NAMES, new.x)[:, 0]
    g = dense.derivatives(uq.model, run, NAMES, new.x).of_each_row().features[:, 0]
    p, slope = uq.predict(new.x), uq.gradient(new.x)
    close(p.epistemic[:, 0], uq.scale.square() * torch.einsum("nd,de,ne->n", f, inverse, f))
    q = torch.einsum("nid,de,nie->ni", g, inverse, g)
    close(slope.variance, uq.calibration_report.gradient_scale.square() * q)
    without = rg.LastLayerRigidity(uq.model).fit((given.x, given.y))
    without.calibrate((given.x + 1, given.y), method=rg.Paper(ridge=RIDGE))
    assert bool((without.predict(new.x).rigidity < p.rigidity).all())


def test_a_repeated_derivative_weighs_as_often_as_it_is_given():
    given = data()
    doubled = rg.LastLayerRigidity(net()).fit(
        (given.x, given.y), gradient_loss=rg.GradientLoss(0, weight=2.0)
    )
    once = rg.LastLayerRigidity(net()).fit((given.x, given.y), gradient_loss=rg.GradientLoss(0))
    values = rg.LastLayerRigidity(net()).fit((given.x, given.y))
    slopes = once.gram.matrix - values.gram.matrix
    close(doubled.gram.matrix, values.gram.matrix + 2 * slopes)
    assert float(slopes.norm()) > 0.1


# --- weights ------------------------------------------------------------------------------------


def test_each_row_may_have_a_weight_of_its_own():
    given = data()
    weights = torch.arange(15.0, dtype=F64)  # zero for the first
    uq = fit(given, weight=lambda b: weights)
    expected = statistic(given, weights)[0]
    close(uq.gram.matrix, expected.matrix)
    close(uq.gram.cross[:, 0], expected.cross)


def test_each_atom_may_have_a_weight_of_its_own():
    id = "sum_over_atoms_by_index_add"
    case = zoo.build(id)
    per_atom = lambda b: 1.0 / torch.bincount(b.molecule)[b.molecule]  # noqa: E731
    uq = rg.LastLayerRigidity(case.model, **case.options)
    uq.fit([case.data], gradient_loss=rg.GradientLoss("x", weight=per_atom))
    f = oracle.rows(oracle.readout_jacobian(case.model, case.call, case.parameters))
    g = dense.of_case(case).features
    weights = torch.cat([torch.ones(12), per_atom(case.data).repeat_interleave(3)]).double()
    close(uq.gram.matrix, oracle.gram(torch.cat([f, oracle.rows(g)]), weights), 1e-6)


def test_the_weights_of_values_do_not_weigh_derivatives():
    given = data()
    weights = torch.linspace(0, 2, 15, dtype=F64)
    uq = fit(given, sample_weight=lambda b: weights)
    expected = statistic(given, value_weight=weights)[0]
    close(uq.gram.matrix, expected.matrix)
    close(uq.gram.cross[:, 0], expected.cross)


def test_values_with_a_curvature_of_their_own_leave_the_derivatives_their_weight():
    given = data(rows=30, targets=2)
    uq = fit(given, 2, loss=rg.losses.Huber(0.5))
    assert uq.gram.matrix.shape == (2, 7, 7)
    residual = given.y - uq.model(given.x).detach()
    for k in range(2):
        inside = (residual[:, k].abs() < 0.5).double()
        assert 0 < float(inside.mean()) < 1
        expected = statistic(given, targets=2, value_weight=inside)[k]
        close(uq.gram.matrix[k], expected.matrix)


# --- batches and order --------------------------------------------------------------------------


def state(uq):
    return [uq.gram.matrix, uq.gram.cross, uq.gram.square]


def test_batching_and_order_do_not_matter():
    given = data(targets=2)
    whole = state(fit(given, 2))
    order = torch.randperm(15, generator=torch.Generator().manual_seed(0))
    parts = [given.part(order[i : i + 4]) for i in range(0, 15, 4)]
    each_close(state(fit(parts, 2)), whole, 1e-12)
    dataset = TensorDataset(given.x, given.y)
    for train, size in (((given.x, given.y), 4), (DataLoader(dataset, batch_size=2), None)):
        uq = rg.LastLayerRigidity(net(2), batch_size=size)
        uq.fit(train, gradient_loss=rg.GradientLoss(0, weight=BETA))
        close(uq.gram.matrix, whole[0], 1e-12)
        assert uq.gram.count == 15 * 4


def test_partial_fit_and_forget_undo_each_other():
    given, more = data(), data(rows=6, seed=5)
    uq = fit(given)
    before = [t.clone() for t in state(uq)]
    uq.partial_fit([more.batch])
    pairs = zip(vars(given).values(), vars(more).values(), strict=True)
    together = Data(*(torch.cat(pair) for pair in pairs))
    expected = statistic(together)[0]
    close(uq.gram.matrix, expected.matrix)
    close(uq.gram.cross[:, 0], expected.cross)
    assert uq.gram.count == 21 * 4
    uq.forget([more.batch])
    each_close(state(uq), before, 1e-12)
    assert uq.gram.count == 15 * 4


def test_structures_may_come_one_by_one():
    id = "one_head_for_each_species"
    case = zoo.build(id)
    g = case.data
    target = normal(*g.x.shape, seed=0)
    object.__setattr__(g, "slope", target)

    def fitted_to(batches):
        uq = rg.LastLayerRigidity(case.model, layer=list(zoo.SPECIES), **case.options)
        return uq.fit(batches, gradient_loss=rg.GradientLoss("x", target=lambda b: b.slope))

    first = sorted(range(12), key=lambda n: -len(set(g.species[g.molecule == n].tolist())))
    alone = []
    for n in first:
        mine = g.molecule == n
        one = zoo.Graph(g.x[mine], g.species[mine], 0 * g.molecule[mine], 1, g.energy[n : n + 1])
        one.slope = target[mine]
        alone.append(one)
    whole, parts = fitted_to([g]), fitted_to(alone)
    each_close(state(parts), state(whole))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_grad_mode_does_not_matter(mode):
    given = data()
    net()  # not made inside
    expected = state(fit(given))
    with mode():
        uq = fit(given)
        scale = uq.calibrate([data(seed=7).batch], method="paper").calibration_report.gradient_scale
    each_close(state(uq), expected)
    other = fit(given).calibrate([data(seed=7).batch], method="paper")
    close(scale, other.calibration_report.gradient_scale)


def test_the_model_is_left_as_it_was():
    model = oracle.float64_copy(net())
    model.train()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    model[0].requires_grad_(False)
    before = {n: (id(p), p._version, p.requires_grad) for n, p in model.named_parameters()}
    given = data()
    uq = rg.LastLayerRigidity(model).fit(
        [given.batch], gradient_loss=rg.GradientLoss("input", target="slope")
    )
    uq.calibrate([data(seed=7).batch], method="paper")
    uq.forget([given.part(slice(0, 3)).batch])
    after = {n: (id(p), p._version, p.requires_grad) for n, p in model.named_parameters()}
    assert after == before
    assert all(bool((p.grad == 7).all()) for p in model.parameters())
    assert all(module.training for module in model.modules())
    assert not given.x.requires_grad


# --- where the targets stand --------------------------------------------------------------------


def test_targets_of_derivatives_come_from_a_key_an_attribute_or_a_function():
    given = data()
    expected = state(fit(given))
    attribute = rg.LastLayerRigidity(net(), forward=lambda m, b: m(b.x), target=lambda b: b.y)
    attribute.fit([given], gradient_loss=rg.GradientLoss("x", weight=BETA, target="slope"))
    function = rg.LastLayerRigidity(net())
    loss = rg.GradientLoss(0, weight=BETA, target=lambda b: given.slope)
    function.fit([(given.x, given.y)], gradient_loss=loss)
    for uq in (attribute, function):
        each_close(state(uq), expected)


def test_the_key_of_the_derivatives_is_no_input_of_the_model():
    given = data()
    uq = fit(given)
    uq.calibrate([data(seed=7).batch], method="paper")
    close(uq.predict([given.batch]).mean, uq.model(given.x).detach())
    close(uq.gradient([given.batch], "input").std, uq.gradient(given.x).std)


# --- the scale of derivatives -------------------------------------------------------------------


def expected_scale(uq, matrix, valid, targets=1):
    found = dense.derivatives(uq.model, run, NAMES, valid.x).of_each_row()
    model = uq.model
    g = (1 - torch.tanh(model[0](valid.x)).square())[:, :, None] * model[0].weight
    g = torch.cat([g, g.new_zeros(len(g), 1, 3)], 1).mT.detach()
    q = dense.variance(matrix, g, uq.ridge)
    error = valid.slope.reshape(found.slope.shape) - found.slope
    return torch.tensor([dense.scale(error[:, k], q) for k in range(targets)], dtype=F64)


@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("ridge", [None, RIDGE])
def test_the_scale_of_derivatives_comes_from_their_residuals_at_the_chosen_ridge(targets, ridge):
    given, valid = data(40, targets), data(40, targets, seed=7)
    uq = fit(given, targets)
    parts = [valid.part(slice(0, 9)), valid.part(slice(9, 40))]
    report = uq.calibrate(
        [part.batch for part in parts], method=rg.Paper(ridge=ridge)
    ).calibration_report
    expected = expected_scale(uq, uq.gram.matrix, valid, targets)
    close(report.gradient_scale, expected)
    assert not torch.allclose(report.gradient_scale, uq.scale)
    assert f"of derivatives  {float(expected[0]):.4g}" in str(report)
    found = uq.gradient(valid.x[:4]).variance
    unit = rg.LastLayerRigidity(net(targets))
    unit.fit((given.x, given.y), gradient_loss=rg.GradientLoss(0, weight=BETA))
    unit.calibrate((valid.x, valid.y), method=rg.Paper(ridge=uq.ridge))
    ratio = (expected / unit.scale).square()
    close(found, unit.gradient(valid.x[:4]).variance * (ratio[:, None] if targets > 1 else ratio))


@pytest.mark.parametrize("wrt", [0, "input", None])
def test_derivatives_that_were_not_trained_are_calibrated_and_leave_the_gram_alone(wrt):
    given, valid = data(40), data(40, seed=7)
    plain = rg.LastLayerRigidity(net()).fit((given.x, given.y))
    uq = rg.LastLayerRigidity(net())
    loss = rg.GradientLoss(wrt, weight=0, target=lambda b: valid.slope)
    uq.fit((given.x, given.y), gradient_loss=loss)
    each_close(state(uq), state(plain), rtol=0)
    assert uq.gram.count == plain.gram.count == 40
    uq.calibrate((valid.x, valid.y), method="paper")
    plain.calibrate((valid.x, valid.y), method="paper")
    assert torch.equal(uq.scale, plain.scale)
    scale = uq.calibration_report.gradient_scale
    close(scale, expected_scale(uq, uq.gram.matrix, valid))
    close(uq.gradient(valid.x).std, plain.gradient(valid.x).std * scale / plain.scale)


def test_without_targets_derivatives_have_the_scale_of_the_values():
    given, valid = data(40), data(40, seed=7)
    uq = rg.LastLayerRigidity(net()).fit((given.x, given.y), gradient_loss=rg.GradientLoss(0))
    report = uq.calibrate((valid.x, valid.y), method="paper").calibration_report
    assert report.gradient_scale is None
    q = 1 / uq.posterior.rigidity(
        dense.derivatives(uq.model, run, NAMES, valid.x).of_each_row().features
    )
    close(uq.gradient(valid.x).variance, uq.scale.square() * q.reshape(valid.x.shape))
    assert "derivatives" not in str(report)


def test_derivatives_that_no_weight_moves_are_left_out_of_the_scale_with_a_warning():
    run = lambda m, x: m.head(m.trunk(x[:, :2]))  # noqa: E731
    trunk = nn.Sequential(nn.Linear(2, 5), nn.Tanh())
    model = zoo.Net(run, trunk=trunk, head=nn.Linear(5, 1)).double()
    given, valid = data(30), data(30, seed=7)
    loss = rg.GradientLoss(0, weight=0, target=lambda b: valid.slope)
    uq = rg.LastLayerRigidity(model).fit((given.x, given.y), gradient_loss=loss)
    with pytest.warns(UserWarning, match="30 derivatives.*left out"):
        uq.calibrate((valid.x, valid.y), method="paper")
    half = rg.GradientLoss(0, weight=0, target=lambda b: valid.slope[:, :2])
    alone = zoo.Net(lambda m, x: m.head(m.trunk(x)), trunk=trunk, head=model.head)
    same = rg.LastLayerRigidity(alone).fit((given.x[:, :2], given.y), gradient_loss=half)
    same.calibrate((valid.x[:, :2], valid.y), method="paper")
    close(uq.calibration_report.gradient_scale, same.calibration_report.gradient_scale)


def test_forces_of_structures_get_a_scale():
    id = "sum_over_atoms_with_species_shifts"
    case, valid = zoo.build(id), zoo.build(id, 2)
    loss = rg.GradientLoss("x", target=lambda batch: normal(*batch.x.shape, seed=0))
    uq = rg.LastLayerRigidity(case.model, **case.options).fit([case.data], gradient_loss=loss)
    uq.calibrate([valid.data], method=rg.Paper(ridge=RIDGE))
    target = loss.target(valid.data)
    g = dense.of_case(valid)
    f = oracle.rows(oracle.readout_jacobian(case.model, case.call, case.parameters))
    rows = torch.cat([f, oracle.rows(dense.of_case(case).features)])
    q = oracle.quadratic(rows, g.features, RIDGE)
    close(
        uq.calibration_report.gradient_scale,
        torch.tensor([dense.scale(target - g.slope, q)], dtype=F64),
    )


# --- files --------------------------------------------------------------------------------------


def calibrated_fit():
    return calibrated(fit(data(30)), [data(30, seed=7).batch])


@pytest.mark.parametrize("way", ["file", "state_dict"])
def test_a_reloaded_fit_goes_on_with_derivatives(tmp_path, way):
    uq, more = calibrated_fit(), data(5, seed=3)
    if way == "file":
        uq.save(tmp_path / "uq.safetensors")
        again = rg.LastLayerRigidity.load(tmp_path / "uq.safetensors", uq.model)
    else:
        again = rg.LastLayerRigidity(uq.model)
        again.load_state_dict(uq.state_dict())
    assert torch.equal(
        again.calibration_report.gradient_scale, uq.calibration_report.gradient_scale
    )
    assert str(again.calibration_report) == str(uq.calibration_report)
    close(again.gradient(more.x).std, uq.gradient(more.x).std, 1e-12)
    for one in (uq, again):
        one.partial_fit([more.batch])
    each_close(state(again), state(uq), 1e-12)
    for one in (uq, again):
        one.forget([more.batch])
        one.calibrate([data(30, seed=7).batch], method="paper")
    close(again.calibration_report.gradient_scale, uq.calibration_report.gradient_scale, 1e-9)


def test_functions_must_be_given_again_after_loading(tmp_path):
    given, more = data(30), data(5, seed=3)
    loss = rg.GradientLoss(
        "input",
        weight=lambda b: torch.full((len(b["input"]),), 2.0),
        target=lambda b: b["slope"],
    )
    uq = rg.LastLayerRigidity(net(), forward=lambda m, b: m(b["input"]), target=lambda b: b["y"])
    uq.fit([given.batch], gradient_loss=loss)
    uq.calibrate([data(30, seed=7).batch], method="paper")
    uq.save(tmp_path / "uq.safetensors")
    options = {"forward": lambda m, b: m(b["input"]), "target": lambda b: b["y"]}
    load = functools.partial(
        rg.LastLayerRigidity.load, tmp_path / "uq.safetensors", uq.model, **options
    )
    again = load()
    close(again.gradient([more.batch], "input").std, uq.gradient([more.batch], "input").std)
    refused(r"load\(path, model,.*gradient_loss=", again.partial_fit, [more.batch])
    again = load(loss="mse", gradient_loss=loss)
    uq.partial_fit([more.batch])
    again.partial_fit([more.batch])
    each_close(state(again), state(uq), 1e-12)


def test_a_weight_in_a_tensor_is_a_number(tmp_path):
    given = data()
    uq = rg.LastLayerRigidity(net())
    uq.fit(
        (given.x, given.y), gradient_loss=rg.GradientLoss(0, weight=torch.tensor(BETA, dtype=F64))
    )
    close(uq.gram.matrix, statistic(given)[0].matrix)
    uq.save(tmp_path / "uq.safetensors")
    again = rg.LastLayerRigidity.load(tmp_path / "uq.safetensors", uq.model)
    again.forget((given.x[:3], given.y[:3]))
    close(again.gram.matrix, statistic(given.part(slice(3, 15)))[0].matrix)


# --- bad input ----------------------------------------------------------------------------------


def with_nan(t):
    t = t.clone()
    t.view(-1)[0] = math.nan
    return t


BAD_FITS = {
    "zero_weight_alone": ({"weight": 0, "target": None}, r"weight 0.*needs their target="),
    "negative_weight": ({"weight": -1.0}, r"not negative.*got -1"),
    "nan_weight": ({"weight": math.nan}, r"finite.*got nan"),
    "infinite_weight": ({"weight": math.inf}, r"finite.*got inf"),
    "word_for_a_weight": ({"weight": "much"}, r"weight of a GradientLoss.*'?much"),
    "negative_weights": ({"weight": lambda b: -torch.ones(15)}, "negative"),
    "nan_weights": ({"weight": lambda b: torch.full((15,), math.nan)}, "finite"),
    "too_few_weights": ({"weight": lambda b: torch.ones(4)}, r"\(4,\).*15 rows"),
    "unknown_input": ({"wrt": "pos"}, "no input 'pos'"),
    "wrong_shape": ({"target": lambda b: torch.ones(15, 2)}, r"\(15, 2\).*\(15, 3\)"),
    "flat_target": ({"target": lambda b: torch.ones(45)}, r"\(45,\).*\(15, 3\)"),
    "nan_target": ({"target": lambda b: with_nan(data().slope)}, "NaN"),
    "missing_target": ({"target": "forces"}, "forces"),
}


@pytest.mark.parametrize("case", BAD_FITS)
def test_a_bad_fit_is_refused_and_leaves_the_object_as_it_was(case):
    options, message = BAD_FITS[case]
    given, uq = data(), calibrated_fit()
    before, x = [t.clone() for t in state(uq)], normal(3, 3, seed=1)
    std = uq.gradient(x).std
    options = {"wrt": "input", "target": "slope", **options}
    batch = given.batch
    if options["target"] != "slope":
        del batch["slope"]
    refused(message, lambda: uq.fit([batch], gradient_loss=rg.GradientLoss(**options)))
    each_close(state(uq), before, rtol=0)
    assert torch.equal(uq.gradient(x).std, std)
    uq.partial_fit([given.batch])


def test_a_bad_batch_in_the_middle_of_a_partial_fit_changes_nothing():
    uq = calibrated_fit()
    before = [t.clone() for t in state(uq)]
    bad = data(5, seed=4)
    bad.slope = bad.slope[:, :2]
    refused(r"Batch 1.*\(5, 2\)", uq.partial_fit, [data(5, seed=3).batch, bad.batch])
    each_close(state(uq), before, rtol=0)
    assert not uq.calibration_report.stale


BAD_CALIBRATIONS = {
    "missing": (None, "'slope' finds nothing"),
    "wrong_shape": (torch.ones(7, 2), r"\(7, 2\).*\(7, 3\)"),
    "nan": (torch.full((7, 3), math.nan), "NaN"),
}


@pytest.mark.parametrize("weight", [0, BETA])
@pytest.mark.parametrize("case", BAD_CALIBRATIONS)
def test_a_bad_calibration_is_refused_and_leaves_the_last_one(case, weight):
    slope, message = BAD_CALIBRATIONS[case]
    given, valid = data(30), data(7, seed=7)
    uq = fit(given, weight=weight).calibrate([valid.batch], method="paper")
    report, std = uq.calibration_report, uq.gradient(given.x).std
    bad = {"input": valid.x + 1, "y": valid.y, "slope": slope}
    if slope is None:
        del bad["slope"]
    refused(message, uq.calibrate, [bad], method=rg.Paper(ridge=3.0))
    assert uq.calibration_report is report
    assert torch.equal(uq.gradient(given.x).std, std)


@pytest.mark.parametrize("weight", [0, BETA])
def test_an_unknown_input_of_derivatives_is_refused_by_the_fit(weight):
    loss = rg.GradientLoss("pos", weight=weight, target="slope")
    refused("no input 'pos'", rg.LastLayerRigidity(net()).fit, [data().batch], gradient_loss=loss)
