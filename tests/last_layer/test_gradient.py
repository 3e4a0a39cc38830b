"""Derivatives by the inputs and their error bars, against nested loops of backward passes."""

import functools
import math
import warnings
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.data import DataLoader, TensorDataset

import rigidities as rg
from rigidities.last_layer.gradients import feature_derivatives
from tests.support import derivative_oracle as dense
from tests.support import oracle, zoo
from tests.support.derivative_oracle import wrt
from tests.support.nets import without_forward_mode
from tests.support.refusals import refused
from tests.support.tensors import alike, close
from tests.support.zoo_fits import fitted_to, row_weights

F64 = torch.float64
RIDGE = 0.1
TRAIN, VALID, TEST = (0, 1), 2, 3  # draws of the zoo


@functools.cache
def fitted(id):
    """Fitted to two batches of the zoo and calibrated on a third at a given ridge."""
    uq = fitted_to(zoo.build(id), [zoo.build(id, draw).data for draw in TRAIN])
    uq.calibrate([zoo.build(id, VALID).data], method=rg.Paper(ridge=RIDGE))
    return uq


@functools.cache
def training_rows(id):
    """F, all outputs of all training rows, each times the root of its weight."""
    cases = [zoo.build(id, draw) for draw in TRAIN]
    rows = torch.cat(
        [oracle.rows(oracle.readout_jacobian(c.model, c.call, c.parameters)) for c in cases]
    )
    return row_weights(fitted(id), cases).sqrt()[:, None] * rows


def scales(uq, case):
    """alpha^2 of each output, (N, *outputs)."""
    p = uq.predict([case.data])
    return p.epistemic * p.rigidity


def beside_inputs(per_output, derivative):
    """(N, *outputs) with as many dimensions after them as a derivative (N, *outputs, *inputs)."""
    missing = derivative.ndim - per_output.ndim
    return per_output.reshape(*per_output.shape, *[1] * missing)


# --- every kind of readout ----------------------------------------------------------------------


@functools.cache
def two_samples(id):
    """Two samples (a whole graph) and every derivative of theirs."""
    case = dense.trimmed(zoo.build(id, TEST), 2)
    call = dense.case_call(case)
    return case, dense.derivatives(case.model, call, case.parameters, case.args[0])


@pytest.mark.parametrize("id", dense.IDS)
def test_derivatives_and_their_variances_equal_the_nested_loops(id):
    uq, (case, every) = fitted(id), two_samples(id)
    found = uq.gradient([case.data], wrt(id))
    if id in zoo.GRAPHS:
        expected, scale = every.of_the_sum(), uq.scale.square()
        assert found.mean.shape == case.args[0].shape
    else:
        expected = every.of_each_row()
        scale = beside_inputs(scales(uq, case), expected.slope)
    variance = scale * oracle.quadratic(training_rows(id), expected.features, RIDGE)
    slope = expected.slope if id in zoo.GRAPHS else expected.without_single_outputs().slope
    close(found.mean, slope)
    close(found.variance, variance.reshape(slope.shape))
    assert found.sampling_error == 0


@pytest.mark.parametrize("id", dense.IDS)
def test_a_directional_derivative_and_its_variance_equal_the_nested_loops(id):
    uq, (case, every) = fitted(id), two_samples(id)
    generator = torch.Generator().manual_seed(5)
    v = torch.randn(case.args[0].shape, dtype=F64, generator=generator)
    found = uq.gradient([case.data], wrt(id), along=v)
    expected = every.of_all(v)
    q = oracle.quadratic(training_rows(id), expected.features, RIDGE)
    close(found.mean, expected.slope)
    close(found.variance, q * scales(uq, case))


def mapped(function, width=8):
    """A linear layer, a function and a head, fitted, and inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        run = lambda m, x: m.head(function(m.first(x)))  # noqa: E731
        model = zoo.Net(run, first=nn.Linear(3, 8), head=nn.Linear(width, 1)).double()
    uq = rg.LastLayerRigidity(model).fit((inputs(40, 3, 1), inputs(40, 1, 2)))
    uq.calibrate((inputs(40, 3, 3), inputs(40, 1, 4)), method=rg.Paper(ridge=RIDGE))
    return uq, inputs(5, 3, 5)


Sine = without_forward_mode(torch.sin, torch.cos)


@pytest.mark.parametrize("along", [None, torch.tensor([1.0, -0.5, 2.0], dtype=F64)])
def test_an_operation_without_forward_mode_has_derivatives_too(along):
    uq, x = mapped(Sine.apply)
    twin, _ = mapped(torch.sin)
    alike(uq.gradient(x, along=along), twin.gradient(x, along=along))


class Once(torch.autograd.Function):
    """The identity, without a derivative."""

    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, g):
        raise NotImplementedError("the identity is not differentiated")


class SineOnce(Sine):
    @staticmethod
    def backward(ctx, g):
        return Once.apply(Sine.backward(ctx, g))


def test_an_operation_with_one_derivative_alone_says_so():
    uq, x = mapped(SineOnce.apply)
    twin, _ = mapped(torch.sin)
    alike(uq.gradient(x), twin.gradient(x))
    v = torch.ones(3, dtype=F64)
    refused(r"(?s)second derivative.*without along=", uq.gradient, x, along=v)


def test_a_net_with_one_hidden_layer_has_the_derivative_from_the_textbook():
    uq, x, _ = small(width=6)
    a, b = (p.detach() for p in uq.model[0].parameters())
    w = uq.model[2].weight.detach()[0]
    h, ht = (torch.tanh(t @ a.T + b) for t in (x, inputs(40, 3, 1)))
    slope = (1 - h.square())[:, :, None] * a  # d h_j / d x_i, (N, D, d)
    found = uq.gradient(x)
    close(found.mean, (slope * w[:, None]).sum(1))
    f = torch.cat([ht, torch.ones(40, 1, dtype=F64)], 1)
    g = torch.cat([slope, torch.zeros(len(x), 1, 3, dtype=F64)], 1).mT  # the bias has no slope
    q = dense.variance(f.T @ f, g, RIDGE)
    close(found.variance, uq.scale.square() * q)


@pytest.mark.parametrize(("id", "tolerance"), [("float32_model", 1e-5), ("bfloat16_model", 0.05)])
def test_derivatives_of_a_low_precision_model_keep_its_dtype(id, tolerance):
    uq, case = fitted(id), dense.trimmed(zoo.build(id, TEST), 4)
    found = uq.gradient([case.data])
    dtype = case.args[0].dtype
    assert found.mean.dtype == found.std.dtype == dtype
    call = lambda m, x: m(x)  # noqa: E731
    expected = dense.derivatives(case.model, call, case.parameters, case.args[0])
    expected = expected.of_each_row().without_single_outputs()
    q = oracle.quadratic(training_rows(id), expected.features, RIDGE)
    close(found.mean.double(), expected.slope, tolerance)
    close(found.std.double(), (uq.scale.square() * q).sqrt(), tolerance)


# --- small nets of one's own --------------------------------------------------------------------


class Small(NamedTuple):
    uq: rg.LastLayerRigidity
    x: Tensor
    y: Tensor


def inputs(rows, numbers, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, numbers, generator=generator, dtype=F64)


def small(numbers=3, width=6, targets=1, *, dtype=F64, rows=7, calibrated=True) -> Small:
    """A net with one hidden layer and fresh inputs for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(numbers, width), nn.Tanh(), nn.Linear(width, targets))
    model = model.to(F64)
    sets = [(inputs(40, numbers, seed), inputs(40, targets, seed + 10)) for seed in (1, 2)]
    uq = rg.LastLayerRigidity(model).fit(sets[0])
    if calibrated:
        uq.calibrate(sets[1], method=rg.Paper(ridge=RIDGE))
    return Small(uq, inputs(rows, numbers, 4), inputs(rows, targets, 5))


def variance_by_loops(uq, x, train):
    """alpha^2 q of every derivative of a `small` net by nested loops, and the derivatives."""
    names, call = ["2.weight", "2.bias"], lambda m, x: m(x)
    expected = dense.derivatives(uq.model, call, names, x).of_each_row()
    rows = oracle.rows(dense.features(uq.model, call, names, train))
    q = oracle.quadratic(rows, expected.features, RIDGE)
    scaled = q * uq.scale.square()[:, None]
    return expected.without_single_outputs().slope, scaled


FORWARD, REVERSE = 0.0, math.inf  # what a forward pass costs


@pytest.mark.parametrize("cost", [FORWARD, REVERSE])
@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize(("numbers", "width"), [(2, 12), (12, 3)])
def test_forward_and_reverse_mode_are_both_exact(monkeypatch, numbers, width, targets, cost):
    uq, x, _ = small(numbers, width, targets)
    monkeypatch.setattr(feature_derivatives, "FORWARD_COST", cost)
    found = uq.gradient(x)
    slope, variance = variance_by_loops(uq, x, inputs(40, numbers, 1))
    close(found.mean, slope)
    close(found.variance, variance.reshape(slope.shape))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("numbers", "width"), [(2, 12), (12, 3)])
def test_derivatives_do_not_depend_on_the_mode_of_the_caller(numbers, width, mode):
    uq, x, _ = small(numbers, width)
    expected = uq.gradient(x)
    with mode():
        derivatives = uq.gradient(x)
    close(derivatives.mean, expected.mean)
    close(derivatives.std, expected.std)
    assert bool((derivatives.std > 0).all())


@pytest.mark.parametrize(("numbers", "width", "forward"), [(2, 16, True), (24, 4, False)])
def test_the_mode_with_fewer_passes_is_taken(monkeypatch, numbers, width, forward):
    uq, x, _ = small(numbers, width)
    calls = []
    jvp = torch.func.jvp
    monkeypatch.setattr(torch.func, "jvp", lambda *args: calls.append(1) or jvp(*args))
    uq.gradient(x)
    assert bool(calls) is forward


@pytest.mark.parametrize(("along", "backward"), [(False, 2), (True, 0)])
def test_forward_mode_runs_the_model_twice(monkeypatch, along, backward):
    """Once for the graph, once for all tangents; two backward passes tell the rows apart."""
    uq, x, _ = small(numbers=2, width=16)
    runs, passes = [], []
    grad = torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *args, **options: passes.append(1) or grad(*args, **options)
    )
    activation = nn.Tanh.forward
    monkeypatch.setattr(nn.Tanh, "forward", lambda m, h: runs.append(1) or activation(m, h))
    uq.gradient(x, along=x[0] if along else None)
    assert (len(runs), len(passes)) == (2, backward)


MODES = (
    *("mlp_with_several_targets", "reshaped_output", "several_time_steps_and_targets_out"),
    *("mean_over_time_steps", "sum_over_padded_atoms", "sum_over_atoms_with_species_shifts"),
    *("one_head_for_each_species", "wide_and_deep", "head_called_twice_for_two_targets"),
    *("pointwise_convolution_in_one_dimension", "transformer_with_a_head_on_the_first_token"),
)


@pytest.mark.parametrize("id", MODES)
def test_both_modes_give_the_same_for_other_readouts(monkeypatch, id):
    uq, case = fitted(id), zoo.build(id, TEST)
    found = []
    for cost in (FORWARD, REVERSE):
        monkeypatch.setattr(feature_derivatives, "FORWARD_COST", cost)
        found.append(uq.gradient([case.data], wrt(id)))
    alike(found[0], found[1])


@pytest.mark.parametrize("cost", [FORWARD, REVERSE])
def test_several_outputs_of_several_structures_are_differentiated_by_every_atom(monkeypatch, cost):
    id = "sum_over_atoms_by_index_add"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
        net = zoo.Net(zoo.sum_over_atoms, trunk=trunk, head=nn.Linear(5, 2)).double()
    graphs = [zoo.build(id, draw).data for draw in (*TRAIN, VALID, TEST)]
    for i, g in enumerate(graphs):
        g.energy = inputs(12, 2, i)
    uq = rg.LastLayerRigidity(net, **zoo.build(id).options).fit(graphs[:2])
    uq.calibrate([graphs[2]], method=rg.Paper(ridge=RIDGE))
    monkeypatch.setattr(feature_derivatives, "FORWARD_COST", cost)
    g = graphs[3]
    found = uq.gradient([g], "x")
    a, b = (p.detach() for p in net.trunk[0].parameters())
    slope = (1 - torch.tanh(g.x @ a.T + b).square())[:, :, None] * a  # (atoms, D, 3)
    close(found.mean, torch.einsum("adi,kd->aki", slope, net.head.weight.detach()))
    features = torch.cat([slope, slope.new_zeros(len(slope), 1, 3)], 1).mT
    q = dense.variance(uq.gram.matrix, features, RIDGE)
    close(found.variance, uq.scale.square()[:, None] * q[:, None])


def test_each_target_has_its_own_scale():
    uq, x, _ = small(targets=3)
    found = uq.gradient(x)
    assert found.mean.shape == (7, 3, 3)
    assert len(set(uq.scale.tolist())) == 3
    ratio = (found.variance / uq.scale.square()[:, None]).sqrt()
    close(ratio[:, 0], ratio[:, 1])
    close(ratio[:, 0], ratio[:, 2])


def test_an_interval_holds_its_level_of_a_gaussian():
    uq, x, _ = small()
    found = uq.gradient(x)
    low, high = found.interval(0.9)
    close((high + low) / 2, found.mean)
    close((high - low) / 2, 1.6448536269514722 * found.std)
    assert torch.equal(found.variance, found.std.square())
    refused("between 0 and 1, got 1", found.interval, 1.0)


# --- directions ---------------------------------------------------------------------------------


def test_a_direction_for_one_row_serves_all():
    uq, x, _ = small(targets=2)
    v = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
    one, all_rows = uq.gradient(x, along=v), uq.gradient(x, along=v.expand(7, 3))
    assert one.mean.shape == (7, 2)
    alike(one, all_rows)
    whole = uq.gradient(x)
    close(one.mean, whole.mean @ v)
    assert not torch.allclose(one.variance, whole.variance @ v.square())  # correlated components


def test_a_direction_along_one_axis_gives_that_component():
    uq, x, _ = small()
    whole = uq.gradient(x)
    for i, axis in enumerate(torch.eye(3, dtype=F64)):
        found = uq.gradient(x, along=axis)
        close(found.mean[:, 0], whole.mean[:, i])
        close(found.std[:, 0], whole.std[:, i])


def test_batches_get_their_own_rows_of_a_direction():
    uq, x, _ = small()
    v = inputs(7, 3, 8)
    whole = uq.gradient(x, along=v)
    uq.batch_size = 3
    for parts in (uq.gradient(x, along=v), uq.gradient([x[:2], x[2:]], along=v)):
        alike(parts, whole)


# --- members ------------------------------------------------------------------------------------


def standard_errors(sampled, exact, n):
    """How far sampled variances lie from exact ones, in their standard errors."""
    return ((sampled / exact - 1) / math.sqrt(2 / n)).flatten()


@pytest.mark.parametrize("targets", [1, 3])
def test_drawn_members_scatter_about_the_exact_variance_as_they_should(targets):
    uq, x, _ = small(targets=targets, rows=40)
    exact, n = uq.gradient(x), 400
    found = uq.gradient(x, members=n, generator=torch.Generator().manual_seed(0))
    assert found.sampling_error == pytest.approx(1 / math.sqrt(2 * n))
    close(found.mean, exact.mean)
    z = standard_errors(found.variance, exact.variance, n)
    assert float(z.abs().max()) < 5
    assert 0.3 < float(z.square().mean().sqrt()) < 2


def test_draws_follow_the_generator():
    uq, x, _ = small()
    first, again, other = (
        uq.gradient(x, members=5, generator=torch.Generator().manual_seed(seed)).std
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def crowded():
    """16 mixed targets of 2100 inputs: 9 * 16^2 reverse passes or 2100 forward ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Linear(2100, 8), nn.Tanh())
        head, mix = nn.Linear(8, 16), torch.randn(16, 16)
        run = lambda m, x: m.head(m.trunk(x)) @ m.mix  # noqa: E731
        net = zoo.Net(run, trunk=trunk, head=head, mix=mix).double()
    uq = rg.LastLayerRigidity(net).fit((inputs(60, 2100, 0), inputs(60, 16, 1)))
    uq.calibrate((inputs(20, 2100, 2), inputs(20, 16, 3)), method=rg.Paper(ridge=RIDGE))
    return uq, inputs(2, 2100, 4)


def test_more_than_2048_passes_are_replaced_by_members_with_one_warning():
    uq, x = crowded()
    with pytest.warns(UserWarning, match=r"64 members.*9%.*members=") as caught:
        found = uq.gradient(x)
    assert len(caught) == 1
    uq.gradient(x)  # warnings are errors
    assert found.sampling_error == pytest.approx(1 / math.sqrt(128))
    exact = uq.gradient(x, members=0)
    assert exact.sampling_error == 0
    close(found.mean, exact.mean)
    z = standard_errors(found.variance, exact.variance, 64)
    assert float(z.abs().max()) < 8
    assert 0.3 < float(z.square().mean().sqrt()) < 2


# --- distribution 6: the ensemble's limit
# ----------------------------------------------------------------


@pytest.mark.parametrize("targets", [1, 2])
def test_a_derivatives_variance_is_the_limit_of_members_differentiated_one_by_one(targets):
    uq, x, _ = small(targets=targets, rows=6)
    exact, n = uq.gradient(x), 300
    drawn = uq.posterior.sample(n, generator=torch.Generator().manual_seed(2))
    drawn = drawn.reshape(n, targets, -1)
    slopes = []
    for delta in drawn:
        member = oracle.float64_copy(uq.model)
        with torch.no_grad():
            member[2].weight += delta[:, :-1]
            member[2].bias += delta[:, -1]
        free = x.clone().requires_grad_(True)
        y = member(free)
        each = [
            torch.autograd.grad(y[:, k].sum(), free, retain_graph=True)[0] for k in range(targets)
        ]
        slopes.append(torch.stack(each, 1).reshape(exact.mean.shape))
    stacked = torch.stack(slopes)
    z = (stacked.mean(0) - exact.mean) / (exact.std / math.sqrt(n))
    assert float(z.abs().max()) < 5
    z = standard_errors(stacked.var(0), exact.variance, n)
    assert float(z.abs().max()) < 5


# --- what may not matter ------------------------------------------------------------------------


def test_batches_and_their_containers_do_not_matter():
    uq, x, y = small(targets=2)
    whole = uq.gradient(x)
    dataset = TensorDataset(x, y)
    for data in (
        (x, y),
        dataset,
        DataLoader(dataset, batch_size=2),
        [(x[:3], y[:3]), (x[3:], y[3:])],
        iter([x[:1], x[1:]]),
        x.numpy(),
    ):
        found = uq.gradient(data)
        alike(found, whole)
    for size in (1, 2, 7, 100):
        uq.batch_size = size
        found = uq.gradient(x)
        alike(found, whole)


def test_structures_may_come_one_by_one():
    id = "sum_over_atoms_with_species_shifts"
    uq, g = fitted(id), zoo.build(id, TEST).data
    whole = uq.gradient([g], "x")
    alone = []
    for n in range(g.molecules):
        mine = g.molecule == n
        alone.append(
            zoo.Graph(g.x[mine], g.species[mine], 0 * g.molecule[mine], 1, g.energy[n : n + 1])
        )
    found = uq.gradient(alone, "x")
    alike(found, whole)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_callers_grad_mode_does_not_matter(mode):
    uq, x, _ = small()
    v = torch.ones(3, dtype=F64)

    def everything(x):
        answers = uq.gradient(x), uq.gradient(x, along=v)
        return [t for found in answers for t in (found.mean, found.std)]

    expected = everything(x)
    with mode():
        found = everything(x)
        born_inside = everything(x.clone())
    for a, b, c in zip(expected, found, born_inside, strict=True):
        close(b, a)
        close(c, a)
        assert not b.requires_grad


def settings(model):
    """Each module's attributes, flag and hooks, and every tensor with what autograd knows of it."""
    found = {}
    for name, module in model.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if "hooks" in key}
        found[name] = (type(module), sorted(vars(module)), module.training, hooks)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        grad = None if tensor.grad is None else tensor.grad.clone()
        found[name + "'"] = (id(tensor), tensor._version, tensor.requires_grad, grad)
    return found


CHANGEABLE = (
    *("dropout_and_batch_norm_in_train_mode", "frozen_trunk", "sum_over_atoms_by_index_add"),
    *("spectral_normed_head", "softplus_after_the_head", "targets_mixed_by_a_fixed_matrix"),
)


@pytest.mark.parametrize("id", CHANGEABLE)
def test_the_model_and_its_inputs_are_left_as_they_were(id):
    uq, case = fitted.__wrapped__(id), zoo.build(id, TEST)
    uq.model.train()
    for p in uq.model.parameters():
        p.grad = torch.full_like(p, 7.0) if p.requires_grad else None
    x = case.args[0]
    values = x.clone()
    before = settings(uq.model)
    uq.gradient([case.data], wrt(id))
    uq.gradient([case.data], wrt(id), along=torch.ones(3, dtype=F64))
    uq.gradient([case.data], wrt(id), members=3)
    uq.predict([case.data], input_covariance=0.1, wrt=wrt(id))
    assert str(settings(uq.model)) == str(before)
    assert torch.equal(x, values)
    assert not x.requires_grad
    assert x.grad is None


def test_inputs_that_ask_for_gradients_get_none():
    uq, x, _ = small()
    free = x.clone().requires_grad_(True)
    found = uq.gradient(free)
    assert free.grad is None
    assert free.requires_grad
    assert not found.mean.requires_grad
    close(found.mean, uq.gradient(x).mean)


# --- which input --------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Sequential(nn.Linear(5, 6), nn.Tanh()), nn.Linear(6, 1)

    def forward(self, pos, field):
        return self.head(self.trunk(torch.cat([pos, field], -1)))


class Both(NamedTuple):
    pos: Tensor
    field: Tensor
    y: Tensor


@functools.cache
def paired():
    """A model of two inputs, fitted, and new inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Pair().double()
    sets = [(inputs(30, 3, s), inputs(30, 2, s + 1), inputs(30, 1, s + 2)) for s in (0, 5)]
    uq = rg.LastLayerRigidity(model).fit(sets[0])
    uq.calibrate(sets[1], method=rg.Paper(ridge=RIDGE))
    return uq, sets, Both(inputs(4, 3, 20), inputs(4, 2, 21), inputs(4, 1, 22))


def expected_of_pair(which):
    uq, sets, new = paired()
    names = ["head.weight", "head.bias"]
    calls = {
        "pos": lambda m, x: m(x, new.field.double()),
        "field": lambda m, x: m(new.pos.double(), x),
    }
    found = dense.derivatives(uq.model, calls[which], names, getattr(new, which))
    found = found.of_each_row().without_single_outputs()
    train = oracle.readout_jacobian(uq.model, lambda m: m(*sets[0][:2]), names)
    q = oracle.quadratic(oracle.rows(train), found.features, RIDGE)
    return found.slope, uq.scale.square() * q


@pytest.mark.parametrize(
    ("name", "which"), [(0, "pos"), ("pos", "pos"), (1, "field"), ("field", "field")]
)
def test_an_input_is_named_by_position_or_by_the_name_in_forward(name, which):
    uq, _, new = paired()
    slope, variance = expected_of_pair(which)
    for data in ((new.pos, new.field, new.y), [(new.pos, new.field)]):
        found = uq.gradient(data, name)
        close(found.mean, slope)
        close(found.variance, variance)


@pytest.mark.parametrize("which", ["pos", "field"])
@pytest.mark.parametrize("kind", ["dict", "namedtuple", "object", "list"])
def test_an_input_is_named_within_any_kind_of_batch(kind, which):
    old, sets, new = paired()
    batch = {
        "dict": lambda *parts: Both(*parts)._asdict(),
        "namedtuple": Both,
        "object": lambda *parts: SimpleNamespace(**Both(*parts)._asdict()),
        "list": lambda *parts: list(parts),
    }[kind]

    def part(given, name):
        if kind in ("namedtuple", "object"):
            return getattr(given, name)
        return given[name if kind == "dict" else Both._fields.index(name)]

    uq = rg.LastLayerRigidity(
        old.model,
        forward=lambda m, b: m(part(b, "pos"), part(b, "field")),
        target=lambda b: part(b, "y"),
    )
    uq.fit([batch(*sets[0])]).calibrate([batch(*sets[1])], method=rg.Paper(ridge=RIDGE))
    name = Both._fields.index(which) if kind == "list" else which
    given = batch(*new)
    found = uq.gradient([given], name)
    slope, variance = expected_of_pair(which)
    close(found.mean, slope)
    close(found.variance, variance)
    assert torch.equal(part(given, "pos"), new.pos)


def test_keyword_batches_are_differentiated_by_a_key():
    old, sets, new = paired()
    train, valid = (Both(*parts)._asdict() for parts in sets)
    uq = rg.LastLayerRigidity(old.model).fit([train])
    uq.calibrate([valid], method=rg.Paper(ridge=RIDGE))
    slope, variance = expected_of_pair("field")
    for data in ([{"pos": new.pos, "field": new.field}], new._asdict()):
        found = uq.gradient(data, "field")
        close(found.mean, slope)
        close(found.variance, variance)


def test_the_only_floating_point_input_needs_no_name_and_an_integer_one_is_refused():
    uq, case = fitted("two_inputs"), zoo.build("two_inputs", TEST)
    close(uq.gradient([case.data]).std, uq.gradient([case.data], 0).std)
    for name in (1, "station"):
        refused(r"floating-point|no input", uq.gradient, [case.data], name)


# --- samples that influence one another ---------------------------------------------------------


@pytest.mark.parametrize("rows", [2, 3, 8])
@pytest.mark.parametrize("coupling", dense.COUPLINGS)
def test_samples_that_influence_one_another_are_right_or_refused(coupling, rows):
    old, x, y = small(rows=rows)
    net = zoo.Net(dense.COUPLINGS[coupling], body=oracle.float64_copy(old.model))
    uq = rg.LastLayerRigidity(net).fit((x, y))
    uq.calibrate((inputs(rows, 3, 1), y), method=rg.Paper(ridge=RIDGE))
    try:
        found = uq.gradient(x)
    except ValueError:
        return
    names, call = ["body.2.weight", "body.2.bias"], lambda m, x: m(x)
    expected = dense.derivatives(net, call, names, x).of_the_sum()
    train = oracle.rows(dense.features(net, call, names, x))
    close(found.mean, expected.slope)
    close(found.variance, uq.scale.square() * oracle.quadratic(train, expected.features, RIDGE))


@pytest.mark.parametrize("cost", [FORWARD, REVERSE])
@pytest.mark.parametrize("molecule", [[2, 0, 1, 4, 3], [0, 0, 2, 2, 4], [4, 4, 4, 4, 4]])
def test_as_many_atoms_as_structures_are_still_atoms(monkeypatch, molecule, cost):
    id = "sum_over_atoms_by_index_add"
    uq, case = fitted(id), zoo.build(id)
    monkeypatch.setattr(feature_derivatives, "FORWARD_COST", cost)
    x, index = inputs(5, 3, 6), torch.tensor(molecule)
    found = uq.gradient([zoo.Graph(x, 0 * index, index, 5, inputs(5, 1, 7))], "x")
    call = lambda m, x: m(x, 0 * index, index, 5)  # noqa: E731
    expected = dense.derivatives(case.model, call, case.parameters, x).of_the_sum()
    close(found.mean, expected.slope)
    q = oracle.quadratic(training_rows(id), expected.features, RIDGE)
    close(found.variance, uq.scale.square() * q)


# --- bad input ----------------------------------------------------------------------------------


def test_derivatives_before_a_calibration_warn_once_and_have_scale_one():
    uq, x, _ = small(calibrated=False)
    with pytest.warns(UserWarning, match="not calibrated"):
        found = uq.gradient(x)
    uq.gradient(x)
    names, call = ["2.weight", "2.bias"], lambda m, x: m(x)
    g = dense.derivatives(uq.model, call, names, x).of_each_row().without_single_outputs().features
    rows = oracle.rows(dense.features(uq.model, call, names, inputs(40, 3, 1)))
    close(found.variance, oracle.quadratic(rows, g, uq.ridge), 1e-6)


def test_derivatives_without_a_fit_are_refused():
    with pytest.raises(ValueError, match=r"no fit.*fit\(x, y\)"):
        rg.LastLayerRigidity(nn.Linear(3, 1)).gradient(torch.ones(2, 3))


REFUSED = {
    "unknown_name": (lambda uq, x: uq.gradient(x, "pos"), r"no input 'pos'.*0"),
    "unknown_position": (lambda uq, x: uq.gradient(x, 3), r"no input 3.*0"),
    "integers": (lambda uq, x: uq.gradient(x.long()), r"wrt=.*floating-point"),
    "named_integers": (lambda uq, x: uq.gradient(x.long(), 0), "not a floating-point tensor"),
    "direction_too_long": (
        lambda uq, x: uq.gradient(x, along=torch.ones(4)),
        r"\(7, 3\).*got \(4,\)",
    ),
    "direction_per_sample": (
        lambda uq, x: uq.gradient(x, along=torch.ones(7)),
        r"\(7, 3\).*got \(7,\)",
    ),
    "too_few_directions": (lambda uq, x: uq.gradient(x, along=torch.ones(5, 3)), "5 rows, fewer"),
    "too_many_directions": (
        lambda uq, x: uq.gradient(x, along=torch.ones(9, 3)),
        "9 rows for 7 rows",
    ),
    "direction_with_nan": (
        lambda uq, x: uq.gradient(x, along=torch.full((3,), math.nan)),
        "NaN|finite",
    ),
    "negative_members": (lambda uq, x: uq.gradient(x, members=-1), "got -1"),
    "half_a_member": (lambda uq, x: uq.gradient(x, members=1.5), "got 1.5"),
    "no_rows": (lambda uq, x: uq.gradient(x[:0]), "nothing to differentiate"),
    "no_batches": (lambda uq, x: uq.gradient([]), "nothing to differentiate"),
    "no_batches_along": (
        lambda uq, x: uq.gradient([], along=torch.ones(3)),
        "nothing to differentiate",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_and_leaves_the_object_as_it_was(case):
    uq, x, _ = small()
    call, message = REFUSED[case]
    before = uq.gradient(x).std
    refused(message, call, uq, x, error=(ValueError, TypeError))
    assert torch.equal(uq.gradient(x).std, before)


def test_one_of_several_inputs_must_be_named():
    uq, _, new = paired()
    refused(r"Name the input.*wrt=.*0, 1", uq.gradient, [(new.pos, new.field)])


@pytest.mark.parametrize("id", dense.NOT_DIFFERENTIABLE)
def test_a_model_that_has_no_derivative_by_its_inputs_is_refused_with_a_hint(id):
    uq, case = fitted(id), zoo.build(id, TEST)
    refused(r"wrt=", uq.gradient, [case.data])
    uq.predict([case.data])


FREEING = {
    "grad": lambda y, x: torch.autograd.grad(y, x),
    "backward": lambda y, x: y.backward(),
}
ENERGIES = {
    "sum": (lambda m, x: 2 * m.head(m.trunk(x)).sum((1, 2)), (8, 4, 3)),
    "plain": (lambda m, x: m.head(m.trunk(x)).squeeze(-1), (8, 3)),
    "parameters": (lambda m, x: m.blocks(m.trunk(x)).sum((1, 2)), (8, 4, 3)),
}


@pytest.mark.parametrize("way", FREEING)
@pytest.mark.parametrize("kind", ENERGIES)
def test_a_model_that_frees_its_graph_in_forward_has_the_bars_of_one_that_does_not(kind, way):
    energy, shape = ENERGIES[kind]

    def freeing(m, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.clone().requires_grad_()
            y = energy(m, x)
            FREEING[way](y.sum(), x)
        return y

    parts = {"trunk": zoo.trunk(), "head": zoo.linear(), "blocks": zoo.Blocks()}
    x, y = torch.randn(shape, dtype=F64), torch.randn(8, dtype=F64)
    found = []
    for run in (energy, freeing):
        net = zoo.Net(run, **parts).double()
        uq = rg.LastLayerRigidity(net, layer="blocks" if kind == "parameters" else "head")
        uq.fit((x, y)).calibrate((-x, y), method=rg.Paper(ridge=RIDGE))
        found.append((uq.predict(x).std, uq.gradient(x)))
    (std, expected), (again, got) = found
    close(again, std)
    close(got.mean, expected.mean)
    close(got.std, expected.std)


def test_a_weight_changed_after_the_fit_is_noticed():
    uq, x, _ = small()
    with torch.no_grad():
        uq.model[0].weight.mul_(2)
    refused("changed", uq.gradient, x, error=(ValueError, RuntimeError))


def rigidity(hessian):
    t = torch.linspace(0, 1, 9, dtype=F64)
    regressor = rg.PredictionRigidity(lambda w, t: w[0] * t, t[4:5], hessian=hessian)
    return regressor.fit(t, t / 2).set_scale(1.0).variance(t)


ALONG = torch.ones(3, dtype=F64)
FORWARD_MODES = {
    "gradient": lambda uq, x: uq.gradient(x),
    "along": lambda uq, x: uq.gradient(x, along=ALONG),
    "propagate": lambda uq, x: uq.propagate(lambda y: y.exp().sum(), x, second_order=True),
    "any regressor": lambda uq, x: rigidity("gauss-newton"),
    "exact Hessian": lambda uq, x: rigidity("exact"),
}


@pytest.mark.filterwarnings("error:.torch.jit.script")
@pytest.mark.parametrize("call", FORWARD_MODES.values(), ids=FORWARD_MODES)
def test_torchs_forward_mode_compiles_without_a_word_to_the_user(call, monkeypatch):
    pushed, make_dual = [], forward_ad.make_dual

    def loud(*args, **kwargs):  # as in torch's first forward pass
        pushed.append(warnings.warn("`torch.jit.script` is deprecated.", FutureWarning, 2))
        return make_dual(*args, **kwargs)

    uq, x = mapped(torch.sin)
    monkeypatch.setattr(forward_ad, "make_dual", loud)
    call(uq, x)
    assert pushed


@pytest.mark.parametrize("rows", [1, 4])
def test_a_direction_in_an_input_that_the_output_does_not_follow_is_refused(rows):
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

        def forward(self, x, shift):
            return self.head(torch.tanh(self.trunk(x))) + shift.detach()[:, None]

    data = (torch.randn(40, 3), torch.randn(40))
    held_out = (torch.randn(40, 3), torch.randn(40))
    y = torch.randn(40, 1)
    uq = rg.LastLayerRigidity(Shifted()).fit(data, y).calibrate(held_out, y, method="paper")
    some = tuple(tensor[:rows] for tensor in data)
    options = {"wrt": "shift", "along": torch.ones(())}
    refused("does not depend on this input", uq.gradient, some, **options)
