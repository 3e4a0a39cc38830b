"""`uq.freeze()`: the same numbers as `uq(x)` and `predict`, from a module that looks at nothing."""

import copy
import pickle

import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.posterior.quadratic import QuadraticForm, Split, rounding_bound
from tests.support import zoo
from tests.support.nets import Net, trained
from tests.support.refusals import refused
from tests.support.storms import THREADS, storm

F64 = torch.float64
CALIBRATIONS = {
    "uncalibrated": None,
    "paper": "paper",
    "constant noise": rg.Paper(noise="constant"),
    "bayes, student-t": rg.Paper(noise="bayes", distribution="student-t"),
    "full": "full",
    "full, bounded": rg.Full(support=(-0.5, 0.5)),
    "full, constant noise": rg.Full(noise="constant"),
    "full, no guard": rg.Full(guard=False),
}
LEVELS = (0.05, 0.5, 0.9)
LINEAR = [id for id in zoo.IDS if zoo.build(id).outcome in ("plain", "linear", "part")]
NOT_UNDER_VMAP = "forces_"
STILL_OF_LAYERS = (
    *("learned_scale_of_each_species", "raw_parameter_head_with_its_features"),
    *("block_whose_last_layer_is_linear", "head_with_a_forward_of_its_own"),
    "hook_that_only_looks_at_the_head",
)
"""Readouts whose parameters are named one by one in the zoo, but which end in a linear layer."""


def by_parameters(case):
    """Whether the readout's parameters act in other ways than as a linear layer's."""
    if case.id == "derivatives_of_the_head_inside_forward":
        return True
    return bool(case.raw_parameters) and case.id not in STILL_OF_LAYERS


def clamped(data, bounds):
    return data if bounds is None else (data[0], data[1].clamp(*bounds))


def calibrated(targets=1, method=None, model=None, dtype=torch.float32):
    one = trained(targets)
    train, valid = (tuple(t.to(dtype) for t in part) for part in (one.train, one.valid))
    uq = rg.LastLayerRigidity((model or one.model).to(dtype)).fit(train)
    if method is not None:
        uq.calibrate(clamped(valid, getattr(method, "support", None)), method=method)
    return uq, one.test[0].to(dtype)


def scaled(net):
    """The net in other units, whose output is that of no layer."""
    return Net(lambda net, x: 2 * net.inner(x) + 100, inner=net)


def close(found, expected, rtol=2e-6):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-7)


@pytest.mark.filterwarnings("ignore:The error bars are not calibrated")
@pytest.mark.parametrize("method", CALIBRATIONS.values(), ids=CALIBRATIONS)
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("targets", [1, 2])
def test_a_frozen_module_gives_the_numbers_of_every_calibration(targets, wrapped, method):
    model = scaled(trained(targets).model) if wrapped else None
    if wrapped and getattr(method, "support", None) is not None:
        method = rg.Full(support=(99.0, 101.0))
    uq, x = calibrated(targets, method, model, F64)
    mean, std = uq(x)
    for found, expected in zip(uq.freeze()(x), (mean, std), strict=True):
        close(found, expected, 1e-9)
    p = uq.predict(x)
    frozen = uq.freeze(("quantiles", "noise", "std", "epistemic", "mean"), quantiles=LEVELS)
    quantiles, *others = frozen(x)
    for found, expected in zip(others, (p.noise, std, p.epistemic, mean), strict=True):
        close(found, expected, 1e-8)
    exact = torch.stack([p.quantile(level) for level in LEVELS])
    assert float(((quantiles - exact).abs() / std).max()) < 1e-7


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("support", [None, (-0.5, 0.5)], ids=["free", "bounded"])
@pytest.mark.parametrize("targets", [1, 3])
def test_intervals_of_the_default_are_those_of_predict(targets, support, seed):
    one = trained(targets, seed)
    uq = rg.LastLayerRigidity(one.model).fit(clamped(one.train, support))
    uq.calibrate(clamped(one.valid, support), method=rg.Full(support=support))
    assert uq.distribution.name == "mixture"
    std, found = uq.freeze(("std", "quantiles"))(one.test[0])
    exact = torch.stack(uq.predict(one.test[0]).interval(0.9))
    assert float(((found - exact).abs() / std).max()) < 1e-3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("id", LINEAR)
def test_every_linear_readout_is_frozen_or_refused_by_name(id):
    case = zoo.build(id)
    uq = rg.LastLayerRigidity(case.model, **case.options).fit([case.data])
    if by_parameters(case) or NOT_UNDER_VMAP in id:
        return refused("This model cannot be frozen: its readout", uq.freeze)
    inputs = case.args if case.batch is None else (case.batch,)
    found, expected = uq.freeze()(*inputs, **case.kwargs), uq(*inputs, **case.kwargs)
    coarse = any(p.dtype == torch.bfloat16 for p in case.model.parameters())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0.02 if coarse else 1e-5, atol=0.01 if coarse else 1e-6
        )


def test_a_nonlinear_readout_is_refused():
    case = zoo.build("softplus_after_the_head")
    with pytest.warns(UserWarning, match="not linear"):
        uq = rg.LastLayerRigidity(case.model).fit([case.data])
    with pytest.warns(UserWarning, match="not calibrated"):
        refused("cannot be frozen.*does not enter the output linearly.*linear layer", uq.freeze)


def test_a_model_that_writes_into_its_own_zeros_is_frozen():
    def run(net, x, owner):
        total = torch.zeros(3, 1, dtype=x.dtype)
        total.index_add_(0, owner, net.head(net.trunk(x)))
        return total

    net = Net(run, trunk=nn.Sequential(nn.Linear(4, 8), nn.Tanh()), head=nn.Linear(8, 1)).double()
    args = (torch.randn(12, 4, dtype=F64), torch.arange(12) % 3)
    uq = rg.LastLayerRigidity(net).fit([(*args, torch.randn(3, 1, dtype=F64))])
    with pytest.warns(UserWarning, match="not calibrated"):
        expected = uq(*args)
    for found, other in zip(uq.freeze()(*args), expected, strict=True):
        close(found, other, 1e-8)


def test_a_large_constant_beside_the_readout_costs_no_digits():
    far = Net(lambda net, x: net.inner(x) + 1e3, inner=trained().model)
    uq, x = calibrated(1, rg.Paper(ridge=1.0), far)
    close(uq.freeze()(x)[1], uq(x)[1], 1e-4)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "scaled"])
def test_members_are_those_of_the_ensemble(wrapped):
    model = scaled(trained(2).model) if wrapped else None
    for method in ("paper", "full"):
        uq, x = calibrated(2, method, model, F64)
        draws = [torch.Generator().manual_seed(5) for _ in "12"]
        (members,) = uq.freeze(("members",), members=6, generator=draws[0])(x)
        close(members, uq.ensemble(6, generator=draws[1])(x), 1e-9)


def test_a_function_gives_its_features_in_the_frozen_module_too():
    one = trained(2)
    uq = rg.LastLayerRigidity(one.model, features=lambda m, x: m[:-1](x)).fit(one.train)
    uq.calibrate(one.valid)
    for found, expected in zip(uq.freeze()(one.test[0]), uq(one.test[0]), strict=True):
        close(found, expected)


def test_each_target_may_have_a_gram_of_its_own():
    one = trained(2)
    y = one.train[1].clone()
    y[::3, 0] = 30.0  # beyond the bend of the loss
    uq = rg.LastLayerRigidity(one.model).fit((one.train[0], y), loss="huber")
    uq.calibrate(one.valid, method="paper")
    assert uq.gram.targets == 2
    for found, expected in zip(uq.freeze()(one.test[0]), uq(one.test[0]), strict=True):
        close(found, expected)
    refused("own Gram", uq.freeze, rank=2)


def test_a_known_noise_is_left_to_the_caller():
    one = trained()
    uq = rg.LastLayerRigidity(one.model).fit(one.train)
    uq.calibrate(one.valid, method=rg.Paper(noise=lambda b: torch.ones(len(b[0]))))
    refused("a function of batches, so std cannot.*epistemic", uq.freeze)
    (epistemic,) = uq.freeze(("epistemic",))(one.test[0])
    close(epistemic, uq.predict((one.test[0], one.test[1])).epistemic)


def test_unknown_outputs_are_refused():
    uq, _ = calibrated(1, "paper")
    refused("names from mean.*got \\('variance',\\)", uq.freeze, ("variance",))
    refused("level must lie between 0 and 1", uq.freeze, ("quantiles",), quantiles=(1.0,))


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["paper", "full"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "scaled"])
def test_threads_get_their_own_rows(wrapped, method):
    uq, x = calibrated(1, method, scaled(trained().model) if wrapped else None)
    frozen = uq.freeze()
    batches = [x[i % 64 : i % 64 + 1 + i % 7] for i in range(400)]
    pairs = [(batch, frozen(batch)) for batch in batches]

    def work(number):
        for batch, known in (2 * pairs)[number::THREADS]:
            for one, other in zip(frozen(batch), known, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=0)

    storm(work)


def test_a_snapshot_and_its_model_leave_each_other_alone():
    uq, x = calibrated(1, "paper")
    uq.model.train()
    before = copy.deepcopy(uq.model.state_dict())
    frozen = uq.freeze()
    expected = frozen(x)
    half = copy.deepcopy(frozen).half().train()
    assert not half.training and not any(module.training for module in half.modules())
    assert all(torch.equal(before[name], t) for name, t in uq.model.state_dict().items())
    assert uq.model.training
    with torch.no_grad():
        for parameter in uq.model.parameters():
            parameter += 1
    for found, known in zip(frozen(x), expected, strict=True):
        assert torch.equal(found, known)


@pytest.mark.parametrize("method", ["paper", "full"])
def test_copies_pickles_and_state_dicts_give_the_same(method):
    uq, x = calibrated(2, method)
    frozen = uq.freeze()
    loaded = copy.deepcopy(frozen)
    loaded.load_state_dict({k: torch.zeros_like(v) for k, v in loaded.state_dict().items()})
    assert float(loaded(x)[1].abs().max()) < 1e-6 or method == "full"
    loaded.load_state_dict(frozen.state_dict(), assign=True)
    for again in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen)), loaded):
        for found, known in zip(again(x), frozen(x), strict=True):
            assert torch.equal(found, known)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F64])
def test_a_cast_leaves_the_statistics_their_digits(dtype):
    uq, x = calibrated(1, "full")
    frozen = uq.freeze()
    expected = frozen(x)[1]
    frozen.to(dtype)
    assert {buffer.dtype for buffer in frozen.buffers()} <= {torch.float32, F64}
    std = frozen(x.to(dtype))[1]
    assert std.dtype == dtype
    torch.testing.assert_close(std.float(), expected, rtol=0.05, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_features_are_multiplied_in_float32(dtype):
    uq, x = calibrated(1, "paper")
    form = QuadraticForm.of(uq.posterior, dtype)
    features = uq.features(x).to(dtype)
    assert form.dtype == torch.float32 and form.half is None  # no tensor cores here
    torch.testing.assert_close(
        form(features).double(), uq.posterior.quadratic(features), rtol=form.rounding, atol=0
    )
    assert rounding_bound(uq.posterior, torch.float32) < 0.1 * rounding_bound(uq.posterior, dtype)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize(("dtype", "digits"), [(torch.bfloat16, 2**-16), (torch.float16, 2**-21)])
def test_two_halves_hold_twice_the_digits_whatever_the_size(dtype, digits, size):
    matrix = torch.randn(40, 9, dtype=F64) * size
    split = Split.of(matrix, dtype)
    whole = (split.high.double() + split.low.double()) * split.unit
    assert float((whole - matrix).abs().max()) <= digits * float(matrix.abs().max())
    rows = torch.randn(6, 40).to(dtype)
    product = split.product(rows).double() * split.unit
    assert float((product - rows.double() @ matrix).abs().max()) <= 64 * digits * size


def test_a_split_form_gives_the_same_for_half_and_for_other_features():
    uq, x = calibrated(1, "paper")
    plain = QuadraticForm.of(uq.posterior, torch.float32)
    split = QuadraticForm(plain.factor, torch.float32, 0.0, torch.bfloat16)
    half = uq.features(x)[:, :-1].bfloat16()
    close(split.root(half, ones=True), plain.root(half.float(), ones=True), 1e-3)
    # its blocks have columns of zeros beside them, with which a product may round otherwise
    close(split.root(half.float(), ones=True), plain.root(half.float(), ones=True), 1e-6)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "scaled"])
def test_a_truncation_errs_by_no_more_than_it_says(wrapped):
    model = scaled(trained().model) if wrapped else None
    uq, x = calibrated(1, rg.Paper(noise="constant", ridge=1e-4), model)
    exact = uq.predict(x).epistemic.double()
    for rank in (2, 6):
        frozen = uq.freeze(("epistemic", "std"), rank=rank)
        over = frozen(x)[0].double() / exact - 1
        slack = 2 * frozen.rounding + 1e-6
        assert -slack <= float(over.min()) and float(over.max()) <= frozen.error + slack
        assert f"error={frozen.error:.2g}" in repr(frozen)
    cut = uq.posterior.truncate(6).variance(uq.features(x)).double()[:, 0]
    torch.testing.assert_close(frozen(x)[0].double().squeeze(), cut, rtol=1e-4, atol=0)


def test_an_accuracy_takes_the_rank_it_needs_or_all():
    uq, x = calibrated(1, rg.Paper(ridge=1.0))
    loose = uq.freeze(accuracy=10.0)
    assert 0 < loose.error <= 10.0
    whole = uq.freeze(accuracy=0.0)
    assert whole.error == 0
    close(whole(x)[1], uq(x)[1])
    width = uq.posterior.width
    refused(f"1..{width}, got {width + 1}", uq.freeze, rank=width + 1)


def test_a_small_ridge_is_truncated_in_float64():
    uq, x = calibrated(1, rg.Paper(ridge=1e-8))
    frozen = uq.freeze(rank=4)
    assert F64 in {buffer.dtype for buffer in frozen.buffers()}
    cut = uq.posterior.truncate(4).with_scale(1.0).variance(uq.features(x)).sqrt() * uq.scale
    torch.testing.assert_close(frozen(x)[1].squeeze().double(), cut, rtol=1e-4, atol=0)


def test_a_batch_of_the_fits_kind_goes_through_the_users_forward():
    one = trained()
    uq = rg.LastLayerRigidity(one.model, forward=lambda m, b: 3 * m(b[0])).fit(one.train)
    uq.calibrate(one.valid, method="paper")
    for found, expected in zip(uq.freeze()(one.test[0]), uq(one.test[0]), strict=True):
        close(found, expected)


def test_autocast_does_not_reach_the_statistics():
    uq, x = calibrated(1, "paper")
    frozen = uq.freeze()
    with torch.autocast("cpu", torch.bfloat16):
        for found, expected in zip(frozen(x), uq(x), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_bars_are_differentiable_by_the_inputs():
    uq, x = calibrated(1, "paper", dtype=F64)
    frozen = uq.freeze()
    x = x[:2].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: frozen(x)[1], (x,))


def test_training_rows_say_what_is_familiar():
    uq, _ = calibrated(2, "paper")
    epistemic = uq.predict(trained(2).train[0]).epistemic
    familiar = rg.export.metadata(uq, uq.freeze())["epistemic_q99"]
    close(torch.tensor(familiar), epistemic.quantile(0.99, 0), 1e-4)
    bare = rg.LastLayerRigidity(uq.model).fit(trained(2).train, keep_rows=0)
    with pytest.warns(UserWarning, match="not calibrated"):
        assert rg.export.metadata(bare, bare.freeze())["epistemic_q99"] is None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("targets", [1, 2])
def test_a_wide_readout_is_multiplied_in_blocks(bias, targets):
    one = trained(targets)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wide = nn.Sequential(nn.Linear(4, 200), nn.Tanh(), nn.Linear(200, targets, bias=bias))
    uq = rg.LastLayerRigidity(wide).fit(one.train)
    uq.calibrate(one.valid, method=rg.Paper(ridge=10.0, noise="constant"))
    frozen = uq.freeze()
    assert len([name for name, _ in frozen.norm.named_buffers() if "matrix" in name]) == 4
    for found, expected in zip(frozen(one.test[0]), uq(one.test[0]), strict=True):
        close(found, expected, 5e-6)
    features, level = uq.features(one.test[0]).double(), uq.noise_model.level
    dense = (uq.posterior.variance(features) + level).sqrt()
    torch.testing.assert_close(frozen(one.test[0])[1].double(), dense, rtol=1e-4, atol=0)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "scaled"])
def test_a_first_call_in_inference_mode_does_not_bind_the_next(wrapped):
    uq, x = calibrated(1, "paper", scaled(trained().model) if wrapped else None)
    frozen = uq.freeze()
    with torch.inference_mode():
        expected = frozen(x)
    wanted = x.clone().requires_grad_()
    mean, std = frozen(wanted)
    close((mean.detach(), std.detach())[1], expected[1].clone())
    std.sum().backward()
    assert bool(wanted.grad.isfinite().all())


def test_quantiles_of_one_sample_keep_the_dimension_of_levels():
    """One level and one sample of several rows: (1, 1, 5, 2), whatever looks alike."""
    torch.manual_seed(0)
    x = torch.randn(80, 5, 3)
    y = x.sum(-1, keepdim=True) + 0.1 * torch.randn(80, 5, 2)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    uq = rg.LastLayerRigidity(model, progress=False).fit((x[:40], y[:40]))
    uq.calibrate((x[40:], y[40:]), method="paper")
    frozen = uq.freeze(("mean", "quantiles"), quantiles=(0.9,))
    assert frozen(x[:1])[1].shape == (1, 1, 5, 2)
