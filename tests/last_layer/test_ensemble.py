"""Ensembles of readouts: members, their outputs, what is propagated through them, files, graphs."""

import copy
import io
import re
import subprocess
import sys
import warnings

import numpy as np
import onnxruntime
import pytest
import torch
from scipy.stats import chi2
from torch import nn

import rigidities as rg
from rigidities.last_layer import Ensemble, MemberValues
from rigidities.last_layer.ensemble.members import Members, members
from rigidities.posterior.joint import JointPosterior
from tests.support import oracle, zoo
from tests.support.nets import fitted, trained
from tests.support.readouts import features_of, has_one_weight_vector, layers_of
from tests.support.refusals import refused
from tests.support.tampering import damage, damaged_state
from tests.support.zoo_fits import fitted_to

F64 = torch.float64
ACCEPTED = [id for id in zoo.IDS if zoo.OUTCOMES[id] != "refused"]
EXACT = [id for id in ACCEPTED if id not in zoo.PRECISION]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def joint_of(uq, posterior=None):
    layout = "joint" if has_one_weight_vector(uq) else "shared"
    return JointPosterior.of(uq.posterior if posterior is None else posterior, uq.gram, layout)


def ensemble(uq, n=64, **options):
    options.setdefault("generator", seeded())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The error bars are not calibrated")
        return uq.ensemble(n, **options)


def fitted_case(case):
    """With a scale of one for all targets."""
    return fitted_to(case, [zoo.build(case.id, draw).data for draw in range(2)])


@pytest.fixture(scope="module")
def fit():
    """A fit with three targets that is only read."""
    return fitted(trained(targets=3))


@pytest.fixture(scope="module")
def x():
    return trained(targets=3, steps=0).test[0]


# --- members' outputs against real models -------------------------------------------------------


def changed(clone, names, deviation, joint):
    """The copy with its readout's parameters moved by one member's deviation (K, D)."""
    offset = 0
    for parameter in oracle.distinct(clone, names):
        targets = len(deviation)
        size = parameter.numel() if joint else parameter.numel() // targets
        part = deviation[0 if joint else slice(None), ..., offset : offset + size]
        parameter.data += part.reshape(parameter.shape)
        offset += size
    assert offset == deviation.shape[1]
    return clone


def member_models(case, uq, ens):
    """Real copies of the model with other weights; where that is not linear, the tangent."""
    clone, layers = oracle.float64_copy(case.model), layers_of(uq)
    by_name = bool(case.raw_parameters) or not layers
    names = case.parameters if by_name else oracle.head_parameters(clone, layers)
    base = case.call(clone).detach()
    if case.outcome == "local":
        jacobian = oracle.readout_jacobian(case.model, case.call, names)
        moved = [jacobian @ d[0] for d in ens.deviations]
        return torch.stack([base + change for change in moved])
    copies = [oracle.float64_copy(case.model) for _ in ens.deviations]
    for copied, deviation in zip(copies, ens.deviations, strict=True):
        changed(copied, names, deviation, has_one_weight_vector(uq))
    return torch.stack([case.call(copied).detach() for copied in copies])


@pytest.mark.parametrize("id", EXACT)
def test_members_are_copies_of_the_model_with_other_readout_weights(id):
    case, test = zoo.build(id), zoo.build(id, 7)
    uq = fitted_case(case)
    ens = ensemble(uq, 3)
    batch = (test.data,) if "forward" in case.options else test.args
    keywords = {} if "forward" in case.options else test.kwargs
    got = ens(*batch, **keywords)
    expected = member_models(test, uq, ens)
    size = (expected - expected.mean(0)).abs().max()
    assert float(size) > 0
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9 * float(size))
    whole = ens.propagate(lambda y: y, [test.data])
    torch.testing.assert_close(whole.values, got)


@pytest.mark.parametrize("id", sorted(zoo.PRECISION))
def test_members_have_the_models_precision(id):
    case = zoo.build(id)
    ens = ensemble(fitted_case(case), 4)
    got = ens(*case.args)
    assert got.dtype == case.target.dtype
    expected = member_models(case, fitted_case(case), ens)
    tolerance = 20 * torch.finfo(case.args[0].dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=tolerance)


# --- moments ------------------------------------------------------------------------------------


def exact_covariance(uq, x):
    size = len(x) * len(uq.scale)
    return uq.covariance(x).double().reshape(size, size)


def test_members_have_the_analytic_covariance_within_their_own_error(fit, x):
    n, rows = 4000, x[:4]
    deviations = fit.ensemble(n, generator=seeded()).deviations
    change = torch.einsum("md,nkd->nmk", fit.features(rows).double(), deviations).flatten(1)
    got = MemberValues(change).covariance
    root = torch.linalg.cholesky(exact_covariance(fit, rows))
    whitened = torch.linalg.solve_triangular(root, got, upper=False)
    whitened = torch.linalg.solve_triangular(root, whitened.mT, upper=False)
    # A Wishart matrix: independent entries of variance 1 / m, on the diagonal 2 / m.
    z = (whitened - torch.eye(len(root), dtype=F64)) * (n - 1) ** 0.5
    statistic = float(z.tril(-1).square().sum() + z.diagonal().square().sum() / 2)
    entries = len(root) * (len(root) + 1) // 2
    assert 1e-4 < chi2.sf(statistic, entries) < 1 - 1e-4


def test_the_covariance_converges_with_the_root_of_the_number_of_members(fit, x):
    features = fit.features(x[:5]).double()
    exact = exact_covariance(fit, x[:5])

    def error(n, seed):
        deviations = fit.ensemble(n, generator=seeded(seed)).deviations
        change = torch.einsum("md,nkd->nmk", features, deviations).flatten(1)
        return float((MemberValues(change).covariance - exact).square().sum())

    few, many = (sum(error(n, seed) for seed in range(30)) for n in (50, 800))
    assert 4 * 0.7 < (few / many) ** 0.5 < 4 / 0.7


def test_the_mean_of_the_members_is_the_models_prediction(fit, x):
    deviations = fit.ensemble(12, generator=seeded()).deviations
    assert float(deviations.mean(0).abs().max()) < 1e-12 * float(deviations.abs().max())
    uq, rows = double_fit(targets=3)
    mean = ensemble(uq, 5)(rows).mean(0)
    torch.testing.assert_close(mean, uq.model(rows), rtol=1e-12, atol=1e-12)


def test_members_are_the_generators_draws_minus_their_mean(fit):
    joint = joint_of(fit)
    points = torch.randn(9, joint.coordinates, dtype=F64, generator=seeded(5))
    draws = joint.weights(points)
    found = fit.ensemble(9, generator=seeded(5)).deviations
    assert torch.equal(found, draws - draws.mean(0))


def double_fit(**options):
    net = trained(**options)
    net.model.double()
    doubled = [tuple(t.double() for t in pair) for pair in net[1:]]
    return fitted(type(net)(net.model, *doubled)), doubled[2][0]


@pytest.mark.parametrize(
    ("id", "scales", "atol"),
    [
        ("each_target_scaled_by_its_own_std", None, 1e-12),  # a Gram per target
        ("fewer_targets_than_head_outputs", [1.0, 3.0], 1e-10),  # one weight vector
    ],
)
def test_unit_points_have_the_exact_covariance_for_each_target_with_its_own_scale_too(
    id, scales, atol
):
    case = zoo.build(id)
    uq = fitted_case(case)
    assert has_one_weight_vector(uq) if scales else uq.posterior.eigenvalues.ndim == 2
    scale = torch.tensor(scales) if scales else uq.scale
    joint, features = joint_of(uq, uq.posterior.with_scale(scale)), features_of(uq, [case.data])
    units = joint.weights(torch.eye(joint.coordinates, dtype=F64))
    change = responses(features, units).flatten(1)
    exact = joint.covariance(features).reshape(change.shape[1], -1)
    torch.testing.assert_close(change.mT @ change, exact, rtol=1e-8, atol=atol)


def responses(features, deviations):
    each = features if features.ndim == 3 else features[:, None].expand(-1, deviations.shape[1], -1)
    return torch.einsum("mkd,nkd->nmk", each.double(), deviations)


# --- propagation --------------------------------------------------------------------------------


def test_moments_and_quantiles_are_those_of_the_values(fit, x):
    ens = ensemble(fit, 200)
    spread = ens.propagate(lambda y: y.sum(0), list(x.split(37)))
    values = np.stack([y.numpy().astype(float).sum(0) for y in ens(x).detach()])
    np.testing.assert_allclose(spread.values, values, rtol=1e-4, atol=1e-4)
    values = spread.values.numpy()
    np.testing.assert_allclose(spread.mean, values.mean(0))
    np.testing.assert_allclose(spread.variance, values.var(0, ddof=1))
    np.testing.assert_allclose(spread.std, values.std(0, ddof=1))
    np.testing.assert_allclose(spread.covariance, np.cov(values.T))
    np.testing.assert_allclose(spread.quantile(0.3), np.quantile(values, 0.3, axis=0))
    low, high = spread.interval(0.8)
    np.testing.assert_allclose(low, np.quantile(values, 0.1, axis=0))
    np.testing.assert_allclose(high, np.quantile(values, 0.9, axis=0))
    assert len(spread) == 200 and spread.mean.dtype == F64


def test_models_that_differentiate_themselves_are_propagated_without_gradients_too(net):
    def energy_and_forces(m, x):
        """A plain readout in a model that also differentiates itself, in its caller's mode."""
        x = x.detach().requires_grad_()
        energy = m.head(m.trunk(x))
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return {"energy": energy, "forces": -slope}

    trunk = nn.Sequential(nn.Linear(4, 6), nn.SiLU())
    model = zoo.Net(energy_and_forces, trunk=trunk, head=nn.Linear(6, 1))
    uq = rg.LastLayerRigidity(model, output="energy").fit(net.train)
    ens = ensemble(uq, 4)
    x = net.test[0]
    rows = torch.cat([trunk(x), torch.ones(len(x), 1)], 1).detach()
    torch.testing.assert_close(features_of(uq, x), rows)
    expected = ens.propagate(torch.mean, net.test[0]).values
    with torch.no_grad():
        assert torch.equal(ens.propagate(torch.mean, net.test[0]).values, expected)


def test_every_kind_of_result_is_accepted(fit, x):
    ens = ensemble(fit, 5)
    as_tensor = ens.propagate(lambda y: y.argmax(0), x).values
    assert as_tensor.shape == (5, 3) and as_tensor.dtype == F64
    assert torch.equal(ens.propagate(lambda y: y.numpy().argmax(0), x).values, as_tensor)
    assert torch.equal(ens.propagate(lambda y: y.argmax(0).tolist(), x).values, as_tensor)
    assert ens.propagate(lambda y: float(y.max()), x).values.shape == (5,)
    assert ens.propagate(lambda y: bool(y.max() > 0), x).mean.item() == 1.0
    assert ens.propagate(lambda y: y.numpy().max(), x).covariance.shape == (1, 1)
    assert ens.propagate(lambda y: y.reshape(2, -1)[:, :2], x).covariance.shape == (4, 4)


def differentiated(y):
    y.mul_(2).requires_grad_()
    return torch.autograd.grad(y.square().sum(), y)[0].sum() / 2


def doubled(y):
    """Fails after its write: the matrix is of float32."""
    y.mul_(2)
    return (y @ torch.ones(3, 1)).sum()


@pytest.mark.parametrize("fn", [differentiated, doubled])
def test_a_function_may_overwrite_its_input_which_comes_afresh_where_it_fails(fit, x, fn):
    ens = ensemble(fit, 5)
    expected = ens.propagate(lambda y: 2 * y.sum(), x).values
    torch.testing.assert_close(ens.propagate(fn, x).values, expected, rtol=1e-4, atol=1e-3)


def standard_joint(targets):
    """Independent targets with one weight each, all N(0, 1)."""
    gram = rg.Gram(1)
    gram.update(torch.ones(1, 1))
    post = rg.Posterior.from_gram(gram, ridge=0.0).with_scale(torch.ones(targets))
    return JointPosterior(post, torch.eye(targets, dtype=F64))


def test_few_members_estimate_the_variance_without_bias():
    joint, generator = standard_joint(400), seeded()
    draws = [members(joint, 6, generator=generator) for _ in range(40)]
    z = torch.cat([group.deviations.squeeze(-1) for group in draws], dim=1)
    spread = MemberValues(z)  # mean 0, variance 1
    plain = spread.values.var(0, correction=0)
    error = float(spread.variance.std()) / z.shape[1] ** 0.5
    assert abs(float(spread.variance.mean()) - 1) < 4 * error
    assert abs(float(plain.mean()) - 1) > 10 * error
    assert float(spread.mean.abs().max()) < 1e-12


def test_the_error_of_the_mean_bounds_its_scatter():
    joint, generator = standard_joint(400), seeded()
    draws = [members(joint, 6, generator=generator) for _ in range(40)]
    z = torch.cat([group.deviations.squeeze(-1) for group in draws], dim=1)
    spread = MemberValues(z + 0.2 * z.square())  # the linear part of its mean has no error
    assert 0 < float(spread.mean.std()) < float(spread.mean_error.mean())


def test_the_standard_error_of_the_std_is_the_scatter_of_the_std():
    spread = MemberValues(members(standard_joint(600), 32, generator=seeded()).deviations)
    assert float(spread.variance.mean()) == pytest.approx(1, abs=4 * (2 / 15 / 600) ** 0.5)
    assert float(spread.std_error.mean()) == pytest.approx(float(spread.std.std()), rel=0.12)


# --- precision ----------------------------------------------------------------------------------


def test_small_spreads_of_large_outputs_are_kept(net):
    with torch.no_grad():
        net.model[-1].bias += 1e6
    far = [(inputs, targets + 1e6) for inputs, targets in net[1:]]
    inputs, outputs = far[1][0], net.model(far[1][0]).detach()
    outputs[::4] += 1 / 16  # a unit of float32 beyond 2^19
    uq = rg.LastLayerRigidity(net.model).fit(far[0]).calibrate(inputs, outputs, method="paper")
    x = net.test[0][:20]
    ens = ensemble(uq)
    spread = ens.propagate(lambda y: y.flatten(), x)
    assert spread.precision == F64 and float(spread.std.max()) < 0.06  # half a unit of float32
    exact = responses(uq.features(x), ens.deviations).flatten(1).std(0)
    torch.testing.assert_close(spread.std, exact, rtol=1e-5, atol=0)
    lost = ens(x).double().std(0).flatten()
    assert float((lost / spread.std - 1).abs().max()) > 0.1


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_functions_get_float64_or_the_precision_that_they_take(own):
    case = zoo.build("bfloat16_model") if own == torch.bfloat16 else None
    uq = fitted_case(case) if case else fitted(trained(targets=3))
    inputs = case.args[0] if case else trained(steps=0).test[0]
    ens = ensemble(uq, 4)
    targets = ens.deviations.shape[1]
    for dtype in (F64, torch.float32, own):
        seen, matrix = [], torch.ones(targets, 2, dtype=dtype)

        def product(y, seen=seen, matrix=matrix):
            y.mul_(1)
            seen.append(y.dtype)
            return (y.reshape(-1, len(matrix)) @ matrix).sum(0)

        spread = ens.propagate(product, inputs)
        assert spread.precision == dtype and seen[-4:] == [dtype] * 4
        expected = ens.propagate(lambda y: y.sum().repeat(2), inputs).values
        close = 200 * torch.finfo(dtype).eps
        torch.testing.assert_close(spread.values, expected, rtol=close, atol=close * len(inputs))


def test_errors_that_no_precision_cures_are_the_functions_own(fit, x):
    calls = []

    def broken(y):
        calls.append(y.dtype)
        if len(calls) > 1:
            raise KeyError("later")
        raise RuntimeError("first")

    refused("first", ensemble(fit, 3).propagate, broken, x, error=RuntimeError)
    assert calls == [F64, torch.float32]


@pytest.mark.parametrize("level", [0, 1, -0.1, 1.5])
def test_levels_outside_the_unit_interval_are_refused(level):
    spread = MemberValues(torch.arange(4, dtype=F64))
    refused("between 0 and 1", spread.quantile, level)
    refused("between 0 and 1", spread.interval, level)


@pytest.mark.parametrize(
    ("fn", "error", "match"),
    [
        (lambda y: (y[0] * 0).log() * 0, ValueError, r"NaN or infinity for 6 of 6 members \(0, 1"),
        (lambda y: 1e200 * y[0] * 1e200, ValueError, "Members can lie far"),
        (lambda y: None, TypeError, "NoneType for member 0"),
        (lambda y: "large", TypeError, "str for member 0: expected a tensor"),
        (lambda y: np.array(["large"]), TypeError, "ndarray for member 0"),
        (lambda y: {"a": y}, TypeError, "dict for member 0"),
        (lambda y: torch.complex(y, y), TypeError, "complex"),
        (lambda y: y[y > 0], ValueError, r"returned shape .* for member \d and .* for member 0"),
        (lambda y: 1 / 0, ZeroDivisionError, "division by zero"),
    ],
)
def test_functions_that_return_no_numbers_are_refused(fit, x, fn, error, match):
    refused(match, ensemble(fit, 6).propagate, fn, x, error=error)


def test_the_members_that_failed_are_named(fit, x):
    values = iter([0.0, np.inf, 0.0, np.nan, 0.0, 0.0])
    refused(r"2 of 6 members \(1, 3\)", ensemble(fit, 6).propagate, lambda y: next(values), x)


def test_data_that_cannot_be_joined_are_refused(fit, x):
    ens = ensemble(fit, 4)
    refused("nothing to propagate", ens.propagate, torch.mean, [])
    case = zoo.build("several_time_steps_out")
    ens = ensemble(fitted_case(case), 4)
    x = case.args[0]
    refused("different shapes per sample", ens.propagate, torch.mean, [x, x[:, :2]])


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"n": 0}, "at least 2, got 0"),
        ({"n": -3}, "at least 2, got -3"),
        ({"n": 1}, "two members"),
    ],
)
def test_impossible_sets_are_refused(fit, options, match):
    refused(match, fit.ensemble, **options)


def test_numbers_of_members_are_whole(fit):
    with pytest.raises(TypeError):
        fit.ensemble(8.0)
    assert len(fit.ensemble(np.int64(8))) == 8
    assert len(fit.ensemble()) == 64


@pytest.mark.parametrize(
    ("deviations", "match"),
    [
        (torch.zeros(4, 3, dtype=F64), r"got \(4, 3\)"),
        (torch.zeros(4, 1, 3), "float32"),
        (torch.full((4, 1, 3), torch.nan, dtype=F64), "NaN"),
        (torch.zeros(1, 1, 3, dtype=F64), "two members"),
    ],
)
def test_deviations_that_are_none_are_refused(deviations, match):
    refused(match, Members, deviations)


def test_draws_are_those_of_the_generator(fit):
    first, second = (ensemble(fit, 8, generator=seeded(3)) for _ in range(2))
    assert torch.equal(first.deviations, second.deviations)
    assert not torch.equal(ensemble(fit, 8, generator=seeded(4)).deviations, first.deviations)


# --- as a module --------------------------------------------------------------------------------


def test_outputs_can_be_differentiated_by_the_inputs(fit, x):
    ens = ensemble(fit, 3)
    rows = x[:4].clone().requires_grad_()
    (got,) = torch.autograd.grad(ens(rows)[1, :, 2].sum(), rows)
    step, base = 1e-2, rows.detach()
    for j in range(2):
        shift = torch.zeros_like(base)
        shift[:, j] = step
        difference = (ens(base + shift) - ens(base - shift))[1, :, 2] / (2 * step)
        torch.testing.assert_close(got[:, j], difference.detach(), rtol=0.02, atol=0.02)


def test_modes_without_gradients_change_nothing(fit, x):
    ens = ensemble(fit, 5)
    expected = ens(x)
    with torch.no_grad():
        assert torch.equal(ens(x), expected)
    with torch.inference_mode():
        assert torch.equal(ens(x.clone()), expected)
        values = ens.propagate(torch.mean, x.clone()).values
    assert torch.equal(values, ens.propagate(torch.mean, x).values)


def test_the_model_is_left_alone():
    case = zoo.build("dropout_and_batch_norm_in_train_mode")
    ens = ensemble(fitted_case(case), 4)
    before = copy.deepcopy(case.model.state_dict())
    modes = [m.training for m in case.model.modules()]
    ens.train().eval()
    ens(case.args[0].requires_grad_()).sum().backward()
    ens.propagate(torch.mean, [case.data])
    assert [m.training for m in case.model.modules()] == modes
    assert all(not m._forward_hooks for m in case.model.modules())
    assert all(p.grad is None and p.requires_grad for p in case.model.parameters())
    for name, tensor in case.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_changed_weights_are_refused_and_restored_ones_accepted(net):
    ens = ensemble(fitted(net), 4)
    expected = ens(net.test[0])
    with torch.no_grad():
        net.model[0].weight += 1
    refused("weights have changed since the fit", ens, net.test[0])
    refused("weights have changed since the fit", ens.propagate, torch.mean, net.test[0])
    with torch.no_grad():
        net.model[0].weight -= 1
    assert net.model[0].weight.shape == (24, 4)
    with pytest.raises(ValueError, match="weights have changed"):
        ens(net.test[0])  # rounding: not the same weights
    assert expected.shape == (4, 200, 1)


def test_casts_leave_the_deviations_in_float64(net):
    ens = ensemble(fitted(net), 4)
    exact, before = ens.deviations.clone(), ens(net.test[0])
    ens.to(torch.float64)
    after = ens(net.test[0].double())
    torch.testing.assert_close(after.float(), before, rtol=1e-3, atol=1e-4)
    for cast in (lambda: ens.to(torch.float32), ens.half, ens.bfloat16):
        cast()
        assert ens.deviations.dtype == F64 and torch.equal(ens.deviations, exact)
    refused("a cast that loses digits", ens, net.test[0].bfloat16())
    assert ens.to("meta").deviations.device.type == "meta"


def test_it_says_what_it_is(fit):
    ens = ensemble(fit, 6)
    assert len(ens) == 6
    assert "members=6, targets=3, features=25" in repr(ens)
    assert not ens.training
    assert ens.train().training and ens.train() is ens


# --- files and copies ---------------------------------------------------------------------------


@pytest.fixture
def saved(net, tmp_path):
    ens = ensemble(fitted(net), 6)
    path = tmp_path / "ens.safetensors"
    ens.save(path)
    return ens, path


def test_a_file_gives_the_same_ensemble(net, saved):
    ens, path = saved
    again = Ensemble.load(path, net.model)
    x = net.test[0]
    assert torch.equal(again(x), ens(x))
    assert torch.equal(again.deviations, ens.deviations)
    assert torch.equal(
        again.propagate(torch.mean, x).variance, ens.propagate(torch.mean, x).variance
    )


FILED = [
    "two_inputs",
    "dict_batches_with_labels",
    "output_and_hidden_state_with_a_choice",
    "raw_parameter_head_with_its_features",
    "each_target_scaled_by_its_own_std",
    *zoo.GRAPHS,
]


@pytest.mark.parametrize("id", FILED)
def test_a_file_serves_every_kind_of_batch(id, tmp_path):
    case = zoo.build(id)
    ens = ensemble(fitted_case(case), 4)
    ens.save(tmp_path / "ens.safetensors")
    again = Ensemble.load(tmp_path / "ens.safetensors", case.model, **case.options)
    expected = ens.propagate(lambda y: y, [case.data]).values
    assert torch.equal(again.propagate(lambda y: y, [case.data]).values, expected)
    if id == "two_inputs":  # told apart without a target too
        torch.testing.assert_close(again.propagate(lambda y: y, case.args).values, ens(*case.args))


def test_a_key_that_is_neither_input_nor_target_stays_apart_after_loading(tmp_path):
    x, y = trained().train
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    batch = {"input": x, "y": y, "slope": torch.zeros_like(x)}
    uq = rg.LastLayerRigidity(model)
    uq.fit([batch], gradient_loss=rg.GradientLoss("input", target="slope"))
    ens = ensemble(uq, 4)
    ens.save(tmp_path / "ens.safetensors")
    expected = ens.propagate(torch.mean, [batch]).values
    again = Ensemble.load(tmp_path / "ens.safetensors", model)
    assert torch.equal(again.propagate(torch.mean, [batch]).values, expected)
    other = ensemble(rg.LastLayerRigidity(model).fit([{"input": x, "y": y}]), 4)
    other.load_state_dict(ens.state_dict())
    assert torch.equal(other.propagate(torch.mean, [batch]).values, expected)


def test_files_of_others_are_refused(net, saved, tmp_path):
    _, path = saved
    with pytest.raises(FileNotFoundError):
        Ensemble.load(tmp_path / "none", net.model)
    refused("weights differ", Ensemble.load, path, trained(seed=1).model)
    refused("does not have", Ensemble.load, path, nn.Sequential(nn.Linear(4, 1)))
    refused("fitted without forward=", Ensemble.load, path, net.model, forward=lambda m, b: m(b))
    uq = tmp_path / "uq.safetensors"
    fitted(net).save(uq)
    refused("another kind: expected 'ensemble'.* says 'fit'", Ensemble.load, uq, net.model)
    refused("of another kind", rg.LastLayerRigidity.load, path, net.model)
    path.write_bytes(path.read_bytes()[:-40])
    refused("truncated, damaged", Ensemble.load, path, net.model)


@pytest.mark.parametrize(
    ("tensors", "header", "match"),
    [
        ({"other": torch.zeros(1)}, {}, "a tensor 'other', which its header does not list"),
        ({"members.deviations": torch.zeros(6, 1, 25)}, {}, "deviations' must be float64"),
        ({"members.deviations": torch.zeros(6, 25, dtype=F64)}, {}, r"got float64 \(6, 25\)"),
        ({}, {"readout": {}}, "checksum"),
        ({}, {"inputs": "one"}, "checksum"),
    ],
)
def test_contents_other_than_those_that_were_saved_are_refused(net, saved, tensors, header, match):
    ens, path = saved

    def change(old, said):
        old.update(tensors)
        said.update(header)

    damage(path, change)
    refused(rf"ens\.safetensors.*{match}", Ensemble.load, path, net.model)
    spoilt = damaged_state(ens.get_extra_state(), change)
    refused(f"state dict's ensemble.*{match}", ens.set_extra_state, spoilt)
    refused("no members", ens.set_extra_state, {})


def test_changed_weights_are_not_saved(net, saved):
    ens, path = saved
    net.model[0].weight.data += 1  # leaves no trace but the values
    refused("weights have changed", ens.save, path)


def test_a_state_dict_brings_members_and_weights(net, saved):
    ens, _ = saved
    other = trained(seed=5)
    target = ensemble(fitted(other), 10)
    buffer = io.BytesIO()
    torch.save(ens.state_dict(), buffer)
    buffer.seek(0)
    target.load_state_dict(torch.load(buffer, weights_only=True))
    assert len(target) == 6
    assert torch.equal(target(net.test[0]), ens(net.test[0]))
    assert torch.equal(other.model[0].weight, net.model[0].weight)


def test_members_without_their_weights_are_refused(net, saved):
    ens, _ = saved
    target = ensemble(fitted(trained(seed=5)), 6)
    target.set_extra_state(ens.get_extra_state())
    refused("weights differ", target, net.test[0])


def test_copies_stand_on_their_own(net, saved):
    ens, _ = saved
    x = net.test[0]
    expected = ens(x)
    buffer = io.BytesIO()
    torch.save(ens, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(ens), torch.load(buffer, weights_only=False)]
    with torch.no_grad():
        net.model[0].weight += 1
    for copied in copies:
        assert copied.model is not net.model
        assert torch.equal(copied(x), expected)
        assert copied.propagate(torch.mean, x).mean.shape == ()
        # Arrays become what the copy's own model takes.
        assert copied.double().propagate(torch.mean, x.numpy()).mean.shape == ()
    refused("weights have changed", ens, x)


# --- graphs -------------------------------------------------------------------------------------

TRACED = [
    *("mlp_with_several_targets", "mlp_with_a_squeezed_output", "reshaped_output"),
    *("several_time_steps_and_targets_out", "dropout_and_batch_norm_in_train_mode"),
    *("pointwise_convolution_in_two_dimensions", "two_inputs"),
]
SIDE_EFFECTS = "ignore:While compiling, we found certain side effects:UserWarning"
BATCH = torch.export.Dim("batch", min=1, max=4096)
needs_export = pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"), reason="export needs PyTorch 2.7 or newer"
)


def few(tensors, rows=3):
    return tuple(tensor[:rows] for tensor in tensors)


@pytest.mark.filterwarnings(SIDE_EFFECTS)  # strict export names the recorder, and lets it be
@pytest.mark.parametrize(
    ("id", "strict"), [(id, False) for id in TRACED] + [(id, True) for id in TRACED[3:5]]
)
@needs_export
def test_an_exported_ensemble_gives_the_same_numbers_for_any_batch(id, strict):
    case = zoo.build(id)
    ens = ensemble(fitted_case(case), 4)
    expected = ens(*case.args)
    shapes = {"inputs": tuple({0: BATCH} for _ in case.args)}
    program = torch.export.export(ens, case.args, dynamic_shapes=shapes, strict=strict)
    assert set(program.state_dict) == {f"model.{name}" for name in case.model.state_dict()}
    assert list(program.constants) == ["deviations"]
    graph = program.module()
    torch.testing.assert_close(graph(*case.args).detach(), expected)
    torch.testing.assert_close(graph(*few(case.args)).detach(), expected[:, :3])
    assert torch.equal(ens(*case.args), expected)  # nothing of the tracer is left behind


@needs_export
def test_keywords_can_be_exported_too():
    case = zoo.build("dict_batches_with_labels")
    ens = ensemble(fitted_case(case), 4)
    program = torch.export.export(ens, (), case.kwargs)
    torch.testing.assert_close(program.module()(**case.kwargs).detach(), ens(**case.kwargs))


# Raised inside torch 2.11 while it reads its own file.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
@needs_export
def test_an_exported_ensemble_survives_a_file(fit, x):
    ens = ensemble(fit, 4)
    buffer = io.BytesIO()
    shapes = (({0: torch.export.Dim("n")},),)
    torch.export.save(torch.export.export(ens, (x,), dynamic_shapes=shapes), buffer)
    buffer.seek(0)
    graph = torch.export.load(buffer).module()
    torch.testing.assert_close(graph(x).detach(), ens(x))
    torch.testing.assert_close(graph(x[:3]).detach(), ens(x[:3]))


# Raised inside torch 2.11 while it compiles.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("id", "whole"), [("reshaped_output", True), ("scaled_and_shifted_output", False)]
)
def test_a_compiled_ensemble_is_one_graph_or_compiled_around_its_readout(id, whole):
    torch._dynamo.reset()
    case = zoo.build(id)
    ens = ensemble(fitted_case(case), 4)
    compiled = torch.compile(ens, fullgraph=whole, backend="aot_eager")
    torch.testing.assert_close(compiled(*case.args), ens(*case.args))
    if whole:
        torch.testing.assert_close(compiled(*few(case.args)), ens(*few(case.args)))


# Raised inside torch while it converts a graph.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@needs_export
def test_an_onnx_runtime_gives_the_same_numbers(fit, x):
    ens = ensemble(fit, 6)
    shapes = {"inputs": ({0: BATCH},)}
    program = torch.onnx.export(ens, (x,), dynamo=True, dynamic_shapes=shapes, verbose=False)
    buffer = io.BytesIO()
    program.save(buffer)
    session = onnxruntime.InferenceSession(buffer.getvalue())
    (name,) = [given.name for given in session.get_inputs()]
    for rows in (200, 5):
        (got,) = session.run(None, {name: x[:rows].numpy()})
        torch.testing.assert_close(torch.from_numpy(got), ens(x[:rows]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("id", "match"),
    [
        ("scaled_and_shifted_output", r"\(head\) is differentiated in each call"),
        ("raw_parameter_head_with_its_features", "features="),
        ("mean_over_members", r"\(members\) is differentiated in each call"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
@needs_export
def test_what_cannot_be_exported_says_why(id, match, strict):
    case = zoo.build(id)
    ens = ensemble(fitted_case(case), 4)
    with pytest.raises(Exception, match=f"cannot be exported.*{match}.*fit that model"):
        torch.export.export(ens, case.args, strict=strict)


def test_an_old_torch_says_that_it_cannot_export():
    # The library looks once, when it is imported, how this torch tells that it exports.
    program = """
import torch
newer = torch.compiler.__dict__.pop("is_exporting", None)
import rigidities as rg
if newer is not None:
    torch.compiler.is_exporting = newer
x = torch.randn(20, 3)
uq = rg.LastLayerRigidity(torch.nn.Linear(3, 1)).fit(x, x[:, :1]).calibrate(x, x[:, :1])
ens = uq.ensemble(4)
torch.compiler._is_compiling_flag = True
try:
    ens(x)
except RuntimeError as error:
    print(error)
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.match(r"Export needs PyTorch 2\.7 or newer", result.stdout)


@needs_export
def test_an_ensemble_exports_after_it_was_moved_or_copied(net, x):
    ens = ensemble(fitted(net), 4).double()
    program = torch.export.export(ens, (x.double(),))
    torch.testing.assert_close(program.module()(x.double()).detach(), ens(x.double()))
    copied = copy.deepcopy(ens)
    refused("Call ens\\(x\\) once before", torch.export.export, copied, (x.double(),))
    expected = copied(x.double())
    program = torch.export.export(copied, (x.double(),))
    torch.testing.assert_close(program.module()(x.double()).detach(), expected)
