"""Where the features come from: every model of the zoo against its readout's dense Jacobian."""

import contextlib
import functools
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rigidities as rg
from tests.support import oracle, zoo
from tests.support.readouts import features_of, fitted_on, layers_of
from tests.support.refusals import refused
from tests.support.zoo_fits import fitted_to, row_weights

RIDGE = 0.1
TRAIN, VALID, TEST = (0, 1), 2, 3  # draws
ACCEPTED = [id for id in zoo.IDS if zoo.OUTCOMES[id] != "refused"]
REFUSED = [id for id in zoo.IDS if zoo.OUTCOMES[id] == "refused"]
WARNED = [id for id in zoo.IDS if zoo.OUTCOMES[id] in zoo.WARNINGS]
EXACT = [id for id in ACCEPTED if id not in zoo.PRECISION]


def fitted(case: zoo.Case) -> rg.LastLayerRigidity:
    """Fitted to two batches and calibrated on a third at a given ridge."""
    uq = fitted_to(case, [zoo.build(case.id, draw).data for draw in TRAIN])
    uq.calibrate([zoo.build(case.id, VALID).data], method=rg.Paper(ridge=RIDGE))
    return uq


def jacobian(case: zoo.Case) -> Tensor:
    """d(output)/d(readout weights), by autograd where it can see."""
    derivative = oracle.readout_jacobian if case.differentiable else oracle.difference_jacobian
    return derivative(case.model, case.call, case.parameters)


def expected_quadratic(id: str) -> Tensor:
    """q = j^T (J^T U J + ridge I)^-1 j, with J over all outputs of all training rows.

    U holds the units of targets with one weight vector.
    """
    cases = [zoo.build(id, draw) for draw in TRAIN]
    train = torch.cat([oracle.rows(jacobian(case)) for case in cases])
    weights = row_weights(fitted(cases[0]), cases)
    return oracle.quadratic(train, jacobian(zoo.build(id, TEST)), RIDGE, weights)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, whether saved or not."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def settings(model: nn.Module) -> dict[str, object]:
    """Each module's class, attributes, training flag and hooks, and what autograd knows."""
    found: dict[str, object] = {}
    for name, module in model.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if "hooks" in key}
        found[name] = (type(module), sorted(vars(module)), module.training, hooks)
    for name, tensor in tensors(model).items():
        found[name + "'"] = (id(tensor), tensor.data_ptr(), tensor._version, tensor.requires_grad)
    return found


# --- distribution 7
# --------------------------------------------------------------------------------------


@functools.cache
def prediction_for(id: str) -> rg.Prediction:
    """What the library says about the test batch."""
    return fitted(zoo.build(id)).predict([zoo.build(id, TEST).data])


@pytest.mark.parametrize("id", EXACT)
def test_features_equal_the_readout_jacobian(id):
    prediction = prediction_for(id)
    expected = expected_quadratic(id)
    assert prediction.rigidity.shape == expected.shape
    torch.testing.assert_close(1 / prediction.rigidity, expected, rtol=1e-8, atol=1e-13)


@pytest.mark.parametrize("id", EXACT)
def test_mean_equals_the_models_own_output_in_eval_mode(id):
    test = zoo.build(id, TEST)
    expected = test.call(test.model.eval()).detach()
    torch.testing.assert_close(prediction_for(id).mean, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("id", "tolerance"),
    [
        ("float32_model", 1e-4),
        ("bfloat16_model", 0.1),
        ("bfloat16_head_with_a_float32_tail", 0.1),
    ],
)
def test_low_precision_models_keep_float64_statistics(id, tolerance):
    case = zoo.build(id)
    uq = fitted(case)
    prediction = uq.predict([zoo.build(id, TEST).data])
    assert uq.gram.matrix.dtype == torch.float64
    assert prediction.mean.dtype == case.target.dtype
    q = (1 / prediction.rigidity).double()
    torch.testing.assert_close(q, expected_quadratic(id), rtol=tolerance, atol=0)


def test_a_coarse_head_under_a_fine_tail_keeps_its_rows_apart():
    case = zoo.build("bfloat16_head_with_a_float32_tail")
    x = torch.randn(700, zoo.INPUTS).bfloat16()  # more rows than bfloat16 has whole numbers
    features = features_of(fitted_on(case.model, x), x)
    h = torch.cat([case.model.trunk(x), torch.ones(700, 1)], 1).detach()
    torch.testing.assert_close(features.float(), 2 * h.float())


def test_a_plain_heads_gram_is_that_of_its_input_and_a_one():
    case = zoo.build("mlp_with_several_targets")
    h = case.model.trunk(*case.args)
    features = torch.cat([h, torch.ones(len(h), 1, dtype=h.dtype)], 1).detach()
    gram = rg.LastLayerRigidity(case.model).fit([case.data]).gram
    torch.testing.assert_close(gram.matrix, oracle.gram(features))


# --- forms that a coarse type would blur --------------------------------------------------------


def smoothing(size: int, share: float) -> Tensor:
    """A matrix that gives each entry some of its neighbours'."""
    ones = torch.ones(size - 1)
    return (1 - share) * torch.eye(size) + share / 2 * (ones.diag(1) + ones.diag(-1))


TAILS = {
    "targets_smoothed": lambda m, x: zoo.plain(m, x) @ m.mixing.to(x.dtype),
    "time_steps_smoothed": lambda m, x: (m.head(m.trunk(x[:, None] * m.times)) @ m.one) @ m.mixing,
    "cast_to_float32_first": lambda m, x: zoo.plain(m, x).float() @ m.mixing.float(),
}


def smoothed(tail: str, share: float, dtype: torch.dtype) -> zoo.Net:
    times = torch.linspace(0.5, 1.5, 4)[:, None]
    parts = {"mixing": smoothing(4, share), "times": times, "one": torch.ones(4) / 4}
    return zoo.Net(TAILS[tail], trunk=zoo.trunk(), head=zoo.linear(4), **parts).to(dtype)


def head_jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """d(output)/d(weights of the head), in float64."""
    call = lambda m: m(x.to(next(m.parameters()).dtype))  # noqa: E731
    return oracle.readout_jacobian(model, call, ["head.weight", "head.bias"])


@pytest.mark.parametrize("share", [0.02, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tail", TAILS)
def test_a_smoothing_below_the_models_rounding_is_no_shared_form(tail, dtype, share):
    torch.manual_seed(0)
    model, x = smoothed(tail, share, dtype), torch.randn(6, zoo.INPUTS).to(dtype)
    actual = features_of(fitted_on(model, x), x).double()
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    expected = head_jacobian(model, x)
    assert actual.shape == expected.shape  # a column for every weight
    off = float((actual - expected).norm() / expected.norm())
    assert off < 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_mixing_of_targets_in_units_a_million_apart_is_seen(dtype):
    torch.manual_seed(0)
    mixing = torch.tensor([[1e6, 0.0, 0.0], [0.3, 1.0, 0.0], [0.2, 0.4, 1.0]])
    model = zoo.Net(lambda m, x: m.head(x) @ m.mixing, head=nn.Linear(5, 3), mixing=mixing)
    x = torch.randn(8, 5, dtype=dtype)
    features = features_of(fitted_on(model.to(dtype), x), x)
    torch.testing.assert_close(features.double(), head_jacobian(model, x), rtol=1e-5, atol=1e-7)


def insisting(m: zoo.Net, x: Tensor) -> Tensor:
    """A forward pass that runs in the model's own type alone."""
    if x.dtype != m.head.weight.dtype or m.head.weight.dtype == torch.float64:
        raise RuntimeError("expected the type it was trained in")
    return m.head(x) @ m.mixing


def test_without_a_copy_in_float64_half_precision_takes_the_general_road():
    torch.manual_seed(0)
    half = torch.randn(8, 5).bfloat16()
    for mixing in (smoothing(3, 0.1), 2 * torch.eye(3)):
        model = zoo.Net(insisting, head=nn.Linear(5, 3), mixing=mixing).bfloat16()
        features = features_of(fitted_on(model, half), half)
        assert features.shape == (8, 3, 18)  # a column for every weight
        copied = zoo.Net(lambda m, x: m.head(x) @ m.mixing, head=model.head, mixing=model.mixing)
        expected = head_jacobian(copied, half)
        torch.testing.assert_close(features.double(), expected, rtol=0.01, atol=0)
    x = torch.randn(8, 5)
    model = zoo.Net(insisting, head=nn.Linear(5, 3), mixing=2 * torch.eye(3))
    expected = 2 * torch.cat([x, torch.ones(8, 1)], 1)  # float32 tells that much
    torch.testing.assert_close(features_of(fitted_on(model, x), x), expected)


# --- warnings and refusals ----------------------------------------------------------------------


@pytest.mark.parametrize("id", WARNED)
def test_a_nonlinear_tail_and_a_part_left_out_warn(id):
    case = zoo.build(id)
    with pytest.warns(UserWarning, match=case.match):
        rg.LastLayerRigidity(case.model, **case.options).fit([case.data])


@pytest.mark.parametrize("id", [id for id in ACCEPTED if id not in WARNED])
def test_a_linear_tail_does_not_warn(id):
    case = zoo.build(id)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        uq = rg.LastLayerRigidity(case.model, **case.options).fit([case.data])
    assert [str(warning.message) for warning in caught] == []
    assert uq.gram.count > 0


@pytest.mark.parametrize("id", REFUSED)
def test_a_readout_that_cannot_be_used_is_refused_with_a_hint(id):
    case = zoo.build(id)
    with pytest.raises((ValueError, TypeError), match=case.match):
        rg.LastLayerRigidity(case.model, **case.options).fit([case.data])


def test_a_model_without_linear_layers_is_told_which_modules_end_it():
    model = zoo.build("sum_over_two_readouts_of_which_one_is_nonlinear").model
    model.trunk, model.run = zoo.Blocks(zoo.WIDTH), lambda m, h: m.readouts[0](h) + m.readouts[1](h)
    ends = r"'readouts.0' \(8\), 'readouts.1.2' \(8\)"
    nearest = rf"no linear map.*{ends}.*layer=\[\"readouts.0\", \"readouts.1.2\"\]"
    refused(nearest, fitted_on, model, torch.randn(4, zoo.WIDTH).double())


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("made", ["script", "trace"])
@pytest.mark.filterwarnings("ignore:.torch.jit.trace(_method)?. is:DeprecationWarning")
def test_parameters_in_torchscript_are_neither_recommended_nor_taken(made, before):
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(9, 3)
    inner = torch.jit.script(net) if made == "script" else torch.jit.trace(net, x)
    model = nn.Sequential(*[nn.Linear(3, 3)] * before, inner)
    with pytest.raises(ValueError, match=r"in TorchScript.*features=") as caught:
        fitted_on(model, x)
    assert 'layer="' not in str(caught.value)
    for layer in (f"{before}", f"{before}.2"):
        message = f"'{layer}' has parameters inside TorchScript.*features="
        refused(message, fitted_on, model, x, layer=layer)
    assert torch.equal(features_of(fitted_on(model, x, features=lambda m, x: x), x), x)


def test_a_layer_beside_torchscript_is_recommended_alone():
    class Bent(nn.Bilinear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x, x)

    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(3, 4))), Bent(4, 4, 1))
    refused(r"'1' \(17\); layer=\"1\"", fitted_on, model, torch.randn(9, 3))
    assert layers_of(fitted_on(model, torch.randn(9, 3), layer="1")) == ["1"]


SUGGESTED = {
    "convolution at the end, not the first": (
        lambda m, x: m.conv_out(m.norm(m.time(m.conv_in(x).mT.tanh()).mT.tanh()).tanh()),
        {
            "conv_in": nn.Conv1d(3, 4, 3),
            "time": nn.Linear(4, 4),
            "norm": nn.GroupNorm(2, 4),
            "conv_out": nn.Conv1d(4, 1, 3),
        },
        (6, 3, 9),
        r"'conv_out' \(13\).*layer=\"conv_out\"",
    ),
    "convolution before a bent unit": (
        lambda m, x: m.act(m.conv(m.body(x.mT).mT.tanh())),
        {"act": nn.PReLU(), "body": nn.Linear(3, 4), "conv": nn.Conv1d(4, 1, 3)},
        (6, 3, 9),
        r"'conv' \(13\); layer=\"conv\"",
    ),
    "net, not the length of a kernel": (
        lambda m, x: (-(m.net(x) / m.length).square().sum(-1, keepdim=True)).exp() * m.scale,
        {
            "length": nn.Parameter(torch.ones(1, 1)),
            "net": nn.Linear(3, 2),
            "scale": nn.Parameter(torch.ones(1)),
        },
        (6, 3),
        r"'net' \(8\); layer=\"net\"",
    ),
}


@pytest.mark.parametrize("name", SUGGESTED)
def test_the_layer_nearest_to_the_output_is_suggested_with_what_it_holds(name):
    run, parts, shape, match = SUGGESTED[name]
    # Whether a layer acts linearly is tried on the rows at hand: these are the same in every run.
    torch.manual_seed(0)
    for part in parts.values():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    with pytest.raises(ValueError, match=match) as caught:
        fitted_on(zoo.Net(run, **parts), torch.randn(shape))
    assert len(str(caught.value)) < 600


def test_a_table_too_large_to_join_the_readout_is_left_out_and_named():
    case = zoo.build("wide_embedding_and_deep")
    case.model.wide = nn.Embedding(50_000, 1).double()
    with pytest.warns(UserWarning, match="'wide' .50,000 parameters, too many.*layer="):
        uq = rg.LastLayerRigidity(case.model).fit([case.data])
    assert layers_of(uq) == ["head"] and uq.gram.width == zoo.WIDTH + 1


@pytest.mark.parametrize("id", ["wide_convolution_beside_a_shortcut", "wide_embedding_and_deep"])
def test_readouts_of_several_kinds_are_right_in_float32(id):
    case, test = zoo.build(id), zoo.build(id, TEST)
    train = oracle.rows(jacobian(case))
    parts = (case.data, zoo.build(id, VALID).data, test.args)
    single = [tuple(t.float() if t.is_floating_point() else t for t in part) for part in parts]
    uq = rg.LastLayerRigidity(case.model.float()).fit([single[0]])
    uq.calibrate([single[1]], method=rg.Paper(ridge=RIDGE))
    q = (1 / uq.predict([(*single[2], test.target.float())]).rigidity).double()
    expected = oracle.quadratic(train, jacobian(test), RIDGE, row_weights(uq, [case]))
    torch.testing.assert_close(q, expected, rtol=1e-5, atol=0)


def test_a_layer_without_parameters_is_refused():
    uq = rg.LastLayerRigidity(zoo.build("mlp_with_a_column_output").model, layer="trunk.1")
    refused("SiLU without floating-point parameters", uq.fit, (torch.randn(4, 3), torch.randn(4)))


@pytest.mark.parametrize("layer", ["head", None])
def test_a_compiled_head_is_the_layer_inside(layer):
    case, test = (
        zoo.build("scaled_and_shifted_output"),
        zoo.build("scaled_and_shifted_output", TEST),
    )
    expected = fitted(case)(*test.args)[1]
    case.model.head = torch.compile(case.model.head, backend="eager")
    uq = rg.LastLayerRigidity(case.model, layer=layer)
    uq.fit([zoo.build(case.id, draw).data for draw in TRAIN])
    uq.calibrate([zoo.build(case.id, VALID).data], method=rg.Paper(ridge=RIDGE))
    torch.testing.assert_close(uq(*test.args)[1], expected)


# --- what a search and a wide Jacobian take -----------------------------------------------------


class Held(TorchDispatchMode):
    """The most bytes that new tensors held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {k: v for k, v in self.alive.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def deep() -> nn.Module:
    blocks = [
        nn.Sequential(nn.Linear(8, 4096), nn.ReLU(True), nn.Linear(4096, 8)) for _ in range(9)
    ]

    def run(m: zoo.Net, x: Tensor) -> Tensor:
        for block in m.blocks:
            x = x + block(x)
        return 2 * m.head(x)

    return zoo.Net(run, blocks=nn.ModuleList(blocks), head=nn.Linear(8, 1))


def test_the_readout_is_found_within_the_memory_of_a_bare_pass():
    for dtype in (torch.float64, torch.float32):
        model, x = deep().to(dtype), torch.randn(512, 8, dtype=dtype)
        with Held() as bare, torch.no_grad():
            model(x)
        with Held() as searching:
            fitted_on(model, x)
        most = bare.peak
        if dtype == torch.float32:  # the form is decided in a copy of twice the digits
            most = 2 * bare.peak + 8 * sum(p.numel() for p in model.parameters())
        assert searching.peak <= 1.1 * most


@pytest.mark.parametrize(
    ("id", "rows", "width"),
    [
        ("forecast_by_a_head_over_time", zoo.ROWS * 3, zoo.STEPS + 1),
        ("forecast_by_a_trend_and_a_season", zoo.ROWS * zoo.INPUTS, 2 * zoo.STEPS + 2),
    ],
)
def test_a_forecast_by_heads_over_time_has_the_width_of_the_heads(id, rows, width):
    case = zoo.build(id)
    uq = rg.LastLayerRigidity(case.model).fit([case.data])
    assert features_of(uq, [case.data]).shape == (rows, width)
    assert uq.gram.matrix.shape == (width, width)


ORDERS = {
    "flip": lambda y: y.flip(-1),
    "index": lambda y: y[:, [4, 0, 2, 5, 1, 3]],
    "roll": lambda y: 3 * y.roll(1, -1) - 1,
    "transposed table": lambda y: y.reshape(-1, 2, 3).mT,
    "table": lambda y: y.reshape(-1, 2, 3) * 3,
}


@pytest.mark.parametrize(
    "method", [rg.Paper(noise="constant"), rg.Paper(criterion="evidence", noise="bayes")]
)
@pytest.mark.parametrize("order", ORDERS)
def test_another_order_of_the_outputs_changes_nothing_else(order, method):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(60, n, generator=generator).double() for n in (3, 6))
    y = y * torch.arange(1, 7)  # a scale for each target
    net = zoo.Net(zoo.plain, trunk=zoo.trunk(), head=nn.Linear(zoo.WIDTH, 6)).double()
    moved = zoo.Net(lambda m, x: ORDERS[order](zoo.plain(m, x)), trunk=net.trunk, head=net.head)
    stds = []
    for model, target in ((net, y), (moved, ORDERS[order](y))):
        uq = rg.LastLayerRigidity(model).fit((x[:40], target[:40]))
        uq.calibrate((x[40:], target[40:]), method=method)
        stds.append(uq(x)[1])
        assert uq.gram.matrix.shape == (zoo.WIDTH + 1, zoo.WIDTH + 1)
    expected = ORDERS[order](stds[0]) - ORDERS[order](0 * stds[0])
    torch.testing.assert_close(stds[1], expected, rtol=1e-5, atol=0)


def test_an_order_stays_known_where_a_mask_hides_it():
    case, valid = (zoo.build("targets_reordered_after_the_head", draw) for draw in (0, VALID))
    mask = torch.ones(zoo.ROWS, 1).double()
    units = torch.tensor([1.0, 10.0, 100.0]).double()  # noise of another size for each target
    case.model.run = lambda m, x, mask: zoo.plain(m, x).flip(-1) * mask
    uq = rg.LastLayerRigidity(case.model).fit([(*case.args, mask, units * case.target)])
    method = rg.Paper(ridge=RIDGE, noise="constant")
    uq.calibrate([(*valid.args, mask, units * valid.target)], method=method)
    shown, hidden = (uq.predict((*case.args, values)).noise for values in (mask, 0 * mask))
    assert (shown[0].diff() > 0).all()
    torch.testing.assert_close(hidden, shown)


@pytest.mark.parametrize(
    "id", ["two_heads_as_two_time_steps", "two_calls_of_one_head_side_by_side"]
)
def test_heads_beside_one_another_are_targets_of_their_own(id):
    case = zoo.build(id)
    assert fitted(case).scale.shape == (4,)


WIDE = {
    "every_other_head_output": ("head", lambda: zoo.linear(3000), (zoo.ROWS, 1500)),
    "cumulative_sum_over_time": ("head", lambda: zoo.linear(3000), (zoo.ROWS, zoo.STEPS, 3000)),
    "bilinear_map": ("both", lambda: nn.Bilinear(zoo.WIDTH, zoo.INPUTS, 1000), (zoo.ROWS, 1000)),
}
"""Readouts of so many weights that the Gram of all of them would take more than 4 GiB."""


@pytest.mark.parametrize("id", WIDE)
def test_a_jacobian_that_would_not_fit_into_memory_is_refused_with_its_size(id):
    name, wide, shape = WIDE[id]
    case = zoo.build(id)
    setattr(case.model, name, wide().double())
    uq = rg.LastLayerRigidity(case.model, **case.options)
    data = (*case.args, torch.randn(shape).double())
    refused(r"weights of the readout.*GiB.*forward=.*layer=.*batches", uq.fit, [data])


# --- the user's model ---------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("id", zoo.IDS)
def test_the_model_is_left_as_it_was(id, training):
    case = zoo.build(id)
    case.model.train(training)
    for parameter in case.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    bits = {name: tensor.detach().clone() for name, tensor in tensors(case.model).items()}
    before = settings(case.model)
    if case.outcome == "refused":
        with pytest.raises((ValueError, TypeError)):
            fitted(case)
    else:
        fitted(case).predict([zoo.build(id, TEST).data])
    assert settings(case.model) == before
    for name, tensor in tensors(case.model).items():
        assert torch.equal(tensor, bits[name])
        assert tensor.grad is None or (tensor.grad == 0.5).all()
    assert all(parameter.grad is not None for parameter in case.model.parameters())


def test_a_model_with_dropout_predicts_the_same_twice():
    case = zoo.build("dropout_and_batch_norm_in_train_mode")
    uq, data = fitted(case), [zoo.build(case.id, TEST).data]
    first, second = uq.predict(data), uq.predict(data)
    assert torch.equal(first.mean, second.mean) and torch.equal(first.std, second.std)
    assert case.model.training


def test_training_the_wrapper_does_not_train_what_it_wraps():
    case = zoo.build("dropout_and_batch_norm_in_train_mode")
    uq, data = fitted(case), [zoo.build(case.id, TEST).data]
    expected = uq.predict(data).mean
    uq.train()
    assert torch.equal(uq.predict(data).mean, expected)


# --- batches that do not look like the first ----------------------------------------------------


def test_a_smaller_last_batch_changes_nothing():
    whole, parts = zoo.build("sum_over_padded_atoms"), zoo.build("sum_over_padded_atoms")
    pieces = [tuple(t[a:b] for t in parts.data) for a, b in ((0, 7), (7, 11), (11, 12))]
    expected = rg.LastLayerRigidity(whole.model).fit([whole.data]).gram.matrix
    torch.testing.assert_close(rg.LastLayerRigidity(parts.model).fit(pieces).gram.matrix, expected)


def _skipping(m: zoo.Net, x: Tensor, z: Tensor, i: Tensor, n: int) -> Tensor:
    """Behler-Parrinello with heads that are called only when their species occurs."""
    total = x.new_zeros(n, 1)
    for species, (body, head) in enumerate(zip(m.bodies, m.heads, strict=True)):
        mine = z == species
        if mine.any():
            total = total.index_add(0, i[mine], head(body(x[mine])))
    return total


def without_third_species(id: str) -> zoo.Case:
    """A model that skips absent species, and a batch without the third of them."""
    case = zoo.build(id)
    case.model.run = _skipping
    case.batch.species.remainder_(2)
    return case


def test_a_named_head_may_be_absent_from_the_first_batch():
    id = "one_named_head_for_each_species"
    case, second = without_third_species(id), zoo.build(id, 1)
    uq = rg.LastLayerRigidity(case.model, **case.options).fit([case.data, second.data])
    uq.calibrate([zoo.build(id, VALID).data], method=rg.Paper(ridge=RIDGE))
    train = torch.cat([oracle.rows(jacobian(case)), oracle.rows(jacobian(second))])
    expected = oracle.quadratic(train, jacobian(zoo.build(id, TEST)), RIDGE)
    q = 1 / uq.predict([zoo.build(id, TEST).data]).rigidity
    torch.testing.assert_close(q, expected, rtol=1e-8, atol=1e-13)


def test_a_head_that_the_first_batch_does_not_call_is_refused_when_it_is_called():
    case = without_third_species("one_head_for_each_species")
    batches = [case.data, zoo.build(case.id, 1).data]
    refused(r"first batch.*layer=", rg.LastLayerRigidity(case.model, **case.options).fit, batches)


IDENTITY_AT_FIRST = {
    "mask of padded steps": (
        lambda m, x, mask: zoo.plain(m, x) * mask,
        lambda first: torch.ones(6, 5, 1) if first else torch.linspace(0.1, 1, 30).view(6, 5, 1),
    ),
    "gather of samples": (
        lambda m, x, order: zoo.plain(m, x)[order],
        lambda first: torch.arange(6) if first else torch.arange(6).flip(0),
    ),
    "running sum over steps": (
        lambda m, x, steps: zoo.plain(m, x)[:, :steps].cumsum(1),
        lambda first: 1 if first else 5,
    ),
    "doubling": (
        lambda m, x, double: zoo.plain(m, x) * 2 if double else zoo.plain(m, x),
        lambda first: not first,
    ),
}


@pytest.mark.parametrize("tail", IDENTITY_AT_FIRST)
def test_a_tail_that_does_nothing_to_the_first_batch_is_not_forgotten(tail):
    run, extra = IDENTITY_AT_FIRST[tail]
    case = zoo.build("several_time_steps_out")
    case.model.run = lambda m, x, *more: run(m, x, *more).to(x.dtype)

    def batch(draw: int, first: bool = False) -> tuple[Tensor, object, Tensor]:
        x, more = zoo.build(case.id, draw).args[0][:6], extra(first)
        return x, more, torch.randn_like(case.model(x, more)).detach()

    def dense(b: tuple[Tensor, object, Tensor]) -> Tensor:
        return oracle.readout_jacobian(case.model, lambda m: m(*b[:2]), case.parameters)

    train, valid, test = [batch(0, first=True), batch(1)], batch(VALID), batch(TEST)
    with contextlib.suppress(ValueError):  # refusing is as good as being right
        uq = rg.LastLayerRigidity(case.model).fit(train)
        uq.calibrate([valid], method=rg.Paper(ridge=RIDGE))
        q = 1 / uq.predict([test]).rigidity
        rows = torch.cat([oracle.rows(dense(b)) for b in train])
        expected = oracle.quadratic(rows, dense(test), RIDGE)
        torch.testing.assert_close(q, expected, rtol=1e-8, atol=1e-13)


def test_an_output_that_couples_the_rows_of_a_batch_is_right_or_refused():
    case = zoo.build("mlp_with_a_column_output")
    run = lambda m, x: zoo.plain(m, x) - zoo.plain(m, x).mean(0)  # noqa: E731
    case.model.run = run
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            uq = rg.LastLayerRigidity(case.model).fit([case.data])
            uq.calibrate([zoo.build(case.id, VALID).data], method=rg.Paper(ridge=RIDGE))
    except (ValueError, TypeError):
        return
    q = 1 / uq.predict([case.data]).rigidity
    expected = oracle.quadratic(oracle.rows(jacobian(case)), jacobian(case), RIDGE)
    torch.testing.assert_close(q, expected, rtol=1e-8, atol=1e-13)


def test_a_flat_target_for_a_column_output_is_not_broadcast():
    id = "mlp_with_a_column_output"
    case, valid, model = zoo.build(id), zoo.build(id, VALID), zoo.build(id).model
    column = rg.LastLayerRigidity(case.model).fit(case.data)
    flat = rg.LastLayerRigidity(model).fit((*case.args, case.target.squeeze(-1)))
    column.calibrate(valid.data, method=rg.Paper(ridge=RIDGE))
    flat.calibrate((*valid.args, valid.target.squeeze(-1)), method=rg.Paper(ridge=RIDGE))
    torch.testing.assert_close(flat.scale, column.scale)


def test_a_head_input_that_is_overwritten_later_is_not_read_afterwards():
    case, test = (zoo.build("mlp_with_a_column_output", draw) for draw in (0, TEST))

    def run(m: zoo.Net, x: Tensor) -> Tensor:
        h = m.trunk(x)
        y = m.head(h)
        h.zero_()
        return y

    expected = oracle.quadratic(oracle.rows(jacobian(case)), jacobian(test), RIDGE)
    case.model.run = run
    with contextlib.suppress(ValueError):  # refusing is as good as being right
        uq = rg.LastLayerRigidity(case.model).fit([case.data])
        uq.calibrate([zoo.build(case.id, VALID).data], method=rg.Paper(ridge=RIDGE))
        q = 1 / uq.predict([test.data]).rigidity
        torch.testing.assert_close(q, expected, rtol=1e-8, atol=1e-13)


def test_features_of_another_length_than_the_output_are_refused():
    case = zoo.build("raw_parameter_head_with_its_features")
    uq = rg.LastLayerRigidity(case.model, features=lambda m, x: m.trunk(x)[:4])  # a divisor of 12
    refused("features", uq.fit, [case.data])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "id", ["mlp_with_several_targets", "scaled_and_shifted_output", "softplus_after_the_head"]
)
def test_error_bars_do_not_depend_on_the_callers_grad_mode(id, mode):
    case, valid, test = (zoo.build(id, draw) for draw in (0, VALID, TEST))
    expected = fitted(zoo.build(id))(*test.args)[1]
    uq = fitted(case)
    with mode():
        assert torch.equal(uq(*test.args)[1], expected)
    batches = [zoo.build(id, draw).data for draw in TRAIN]
    with mode():
        again = fitted_to(case, batches)
        again.calibrate([valid.data], method=rg.Paper(ridge=RIDGE))
        torch.testing.assert_close(again(*test.args)[1], expected)


# --- weights from the loss ----------------------------------------------------------------------


def huber(prediction: Tensor, target: Tensor) -> Tensor:
    return nn.functional.huber_loss(prediction, target, reduction="none")


def log_cosh(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).cosh().log()


WEIGHTED = [
    *("mlp_with_a_squeezed_output", "mlp_with_several_targets"),
    *("each_target_scaled_by_its_own_std", "several_time_steps_and_targets_out"),
    *("sum_over_padded_atoms", "one_head_for_each_species", "targets_mixed_by_a_fixed_matrix"),
    *("two_heads_as_two_targets", "head_called_twice_for_two_targets"),
    "pointwise_convolution_in_two_dimensions",
]


@pytest.mark.parametrize("loss", [huber, log_cosh])
@pytest.mark.parametrize("id", WEIGHTED)
def test_each_output_weighs_as_the_curvature_of_its_loss(id, loss):
    case, test = zoo.build(id), zoo.build(id, TEST)
    curvature = oracle.curvature(loss, case.call(case.model), case.target)
    weights = curvature.reshape(len(case.target), -1)
    sample = torch.linspace(0.5, 2.0, len(weights), dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*curvature")
        uq = rg.LastLayerRigidity(case.model, **case.options)
        uq.fit([case.data], loss=loss, sample_weight=lambda batch: sample)
    uq.calibrate([zoo.build(id, VALID).data], method=rg.Paper(ridge=RIDGE))
    train, weights = oracle.rows(jacobian(case)), (weights * sample[:, None]).reshape(-1)
    expected = oracle.quadratic(train, jacobian(test), RIDGE, weights)
    q = 1 / uq.predict([test.data]).rigidity
    torch.testing.assert_close(q, expected, rtol=1e-8, atol=1e-13)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_a_compiled_function_among_the_attributes_is_shared_and_not_copied():
    model = zoo.Net(lambda m, x: m.head(m.activation(x)), head=nn.Linear(3, 1))
    model.activation = torch.jit.trace(torch.tanh, torch.zeros(2, 3))
    x = torch.randn(5, 3)
    uq = fitted_on(model, x)
    expected = torch.cat([torch.tanh(x), torch.ones(5, 1)], dim=1)
    torch.testing.assert_close(features_of(uq, x), expected)
    torch.testing.assert_close(uq(x)[0], model(x).detach())


def test_a_batch_that_gives_nan_is_named_and_not_called_another_form():
    run = lambda m, x: m.head(x).sum((1, 2)) * x.mean((1, 2)).square()  # noqa: E731
    uq = fitted_on(zoo.Net(run, head=nn.Linear(3, 1)), torch.randn(4, 6, 3))
    missing = torch.full((4, 6, 3), torch.nan)
    refused("output for this batch is NaN or infinite", features_of, uq, missing)


def test_lists_of_parameters_inside_a_named_module_are_looped_over():
    def run(model, x):
        for weight in model.inner.weights:
            x = (x @ weight).tanh()
        return model.inner.head(x)

    model = zoo.Net(run, inner=nn.Module())
    model.inner.weights = nn.ParameterList([torch.eye(3), torch.ones(3, 3)])
    model.inner.head = nn.Linear(3, 1)
    assert layers_of(fitted_on(model, torch.randn(5, 3), layer="inner")) == ["inner.head"]


def test_modules_that_pass_values_on_in_a_shared_dictionary_keep_it():
    store: dict = {}

    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.store = nn.Linear(3, 5), store

        def forward(self, x):
            self.store["h"] = self.lin(x).tanh()
            return x

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.store = nn.Linear(5, 1), store

        def forward(self, x):
            return self.head(self.store["h"])

    model, x = nn.Sequential(Writes(), Reads()), torch.randn(6, 3)
    uq = rg.LastLayerRigidity(model).fit([(x, torch.randn(6, 1))])
    features = features_of(uq, x)
    assert layers_of(uq) == ["1.head"]
    assert store == {}
    expected = torch.cat([model[0].lin(x).tanh(), torch.ones(6, 1)], dim=1).detach()
    torch.testing.assert_close(features, expected)
