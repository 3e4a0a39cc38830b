"""Propagation: derived quantities against dense covariances, Monte Carlo and closed forms."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rigidities as rg
from rigidities.last_layer.propagation import outputs as joint_outputs
from rigidities.last_layer.propagation import propagation
from rigidities.last_layer.propagation.outputs import repeatable
from rigidities.prediction.derived import Derived
from tests.support import oracle, zoo
from tests.support.nets import trained, without_forward_mode
from tests.support.readouts import has_one_weight_vector, layers_of
from tests.support.refusals import refused
from tests.support.zoo_fits import fitted_to, row_weights

F64 = torch.float64


class Parts:
    """A fit, whose data are cut into batches of another size in every call."""

    def __init__(self, uq):
        self.uq = uq

    def propagate(self, fn, data, batch_size=None, **options):
        self.uq.batch_size = batch_size
        return self.uq.propagate(fn, data, **options)

    def covariance(self, data, others=None, batch_size=None):
        self.uq.batch_size = batch_size
        return self.uq.covariance(data, others)


def parts_of(net, dtype=None, method="paper", errors=1.0):
    """A fit, and the inputs of its test set.

    `errors` scales those of the validation rows, and with them the scale of the bars.
    """
    model = net.model if dtype is None else net.model.to(dtype)
    sets = [tuple(t if dtype is None else t.to(dtype) for t in pair) for pair in net[1:]]
    uq = rg.LastLayerRigidity(model).fit(sets[0])
    x, y = sets[1]
    mean = model(x).detach()
    uq.calibrate(x, mean + errors * (y - mean), method=method)
    return Parts(uq), sets[2][0]


@functools.cache
def fitted(targets):
    parts, x = parts_of(trained(targets), F64)
    return parts.uq, x


@pytest.fixture
def parts():
    """Of one target, float64."""
    return Parts(fitted(1)[0])


@pytest.fixture
def x():
    return fitted(1)[1]


@pytest.fixture
def three():
    uq, x = fitted(3)
    return Parts(uq), x


def dense_covariance(parts, train, x):
    """Cov of all outputs (N K, N K) of the 4-24-24-K nets, from float64 features and an inverse."""
    model, (xt, yt) = oracle.float64_copy(parts.uq.model), train
    with torch.no_grad():
        f, ft = (
            torch.cat([model[:-1](t.double()), torch.ones(len(t), 1, dtype=F64)], 1)
            for t in (x, xt)
        )
        residual = yt.double() - model(xt.double())
    eye = torch.eye(f.shape[1], dtype=F64)
    inner = f @ torch.linalg.inv(ft.T @ ft + parts.uq.ridge * eye) @ f.T
    rho = torch.from_numpy(np.atleast_2d(uncentred_correlation(residual.numpy())))
    between = rho * torch.outer(parts.uq.scale, parts.uq.scale)
    return torch.einsum("mn,kl->mknl", inner, between).flatten(2).flatten(0, 1)


def uncentred_correlation(residual):
    unit = residual / np.linalg.norm(residual, axis=0)
    return unit.T @ unit


# --- linear functions are exact -----------------------------------------------------------------

MODELS = [id for id in zoo.IDS if zoo.OUTCOMES[id] != "refused" and id not in zoo.PRECISION]


def per_target(jacobian, case, targets):
    """(E, P) by all weights -> (E, D) by the weights of each output's own target."""
    shapes = [zoo_parameter.shape for zoo_parameter in case_parameters(case)]
    blocks = jacobian.split([shape.numel() for shape in shapes], dim=1)
    folded = [
        block.reshape(len(block), targets, -1).sum(1) if shape[0] == targets else block
        for block, shape in zip(blocks, shapes, strict=True)
    ]
    return torch.cat(folded, 1)


def case_parameters(case):
    return oracle.distinct(oracle.float64_copy(case.model), case.parameters)


def zoo_jacobian(case):
    """(E, P) for all outputs of a batch."""
    take = oracle.readout_jacobian if case.differentiable else oracle.difference_jacobian
    jacobian = take(case.model, case.call, case.parameters)
    return jacobian.reshape(-1, jacobian.shape[-1])


@functools.cache
def zoo_parts(id):
    case, valid = zoo.build(id), zoo.build(id, draw=1)
    uq = fitted_to(case, [case.data])
    uq.calibrate([valid.data], method=rg.Paper(ridge=0.01 * float(uq.gram.diagonal.mean())))
    return case, Parts(uq)


def target_of_each(uq, case):
    """The target of each output of a batch, known by its scale: alpha_k^2 is epistemic / q."""
    p = uq.predict([case.data])
    squares = (p.epistemic * p.rigidity).reshape(-1, 1)
    return (squares - uq.scale.square()).abs().argmin(1)


def residual_columns(uq, case):
    """The residuals of a batch (M, K): rows of outputs with one row of features have one q."""
    residual = (case.target - case.call(oracle.float64_copy(case.model))).detach()
    q = (1 / uq.predict([case.data]).rigidity).reshape(len(residual), -1)
    k = target_of_each(uq, case).reshape(q.shape)
    targets, columns = uq.scale.numel(), []
    for errors, sizes, own in zip(residual.reshape(q.shape), q, k, strict=True):
        each = [errors[own == t][sizes[own == t].argsort()] for t in range(targets)]
        columns.append(torch.stack(each, 1))
    return torch.cat(columns)


def zoo_covariance(case, parts, batches):
    """Cov of all outputs of some batches, with no help from the posterior's eigenbasis."""
    uq, joint = parts.uq, has_one_weight_vector(parts.uq)
    targets = uq.scale.numel()

    def rows(case):
        jacobian = zoo_jacobian(case)
        return jacobian if joint or targets == 1 else per_target(jacobian, case, targets)

    train = rows(case)
    f = torch.cat([rows(batch) for batch in batches])
    eye = torch.eye(f.shape[1], dtype=F64)
    if targets == 1:
        inner = f @ torch.linalg.inv(train.T @ train + uq.ridge * eye) @ f.T
        return uq.scale.square() * inner
    k_train = target_of_each(uq, case)
    k = torch.cat([target_of_each(uq, batch) for batch in batches])
    between = torch.outer(uq.scale, uq.scale)[k][:, k]
    if joint:
        gram = train.T @ (row_weights(uq, [case])[:, None] * train)
        return f @ torch.linalg.inv(gram + uq.ridge * eye) @ f.T * between
    if uq.gram.matrix.ndim == 3:
        rho = torch.eye(targets, dtype=F64)
    else:
        rho = torch.from_numpy(uncentred_correlation(residual_columns(uq, case).numpy()))
    inner = torch.zeros(len(f), len(f), dtype=F64)
    for t in range(targets):
        mine = train[k_train == t]
        inverse = torch.linalg.inv(mine.T @ mine + uq.ridge * eye)
        inner = torch.where((k == t)[:, None], f @ inverse @ f.T, inner)
    return inner * between * rho[k][:, k]


@pytest.mark.parametrize("id", MODELS)
def test_a_linear_function_is_exact_for_every_kind_of_readout(id):
    case, parts = zoo_parts(id)
    batches = [zoo.build(id, draw=2), zoo.build(id, draw=3)]
    expected = zoo_covariance(case, parts, batches)
    data, size = [batch.data for batch in batches], len(expected)
    few, many = 3, parts.uq.gram.width * parts.uq.scale.numel() + 3
    matrix = torch.randn(many, size, dtype=F64, generator=torch.Generator().manual_seed(0))
    for quantities in (few, many):  # by reverse mode, by forward mode
        a = matrix[:quantities]
        derived = parts.propagate(lambda y, a=a: a @ y.reshape(-1), data, second_order=True)
        close = torch.testing.assert_close
        close(derived.covariance, a @ expected @ a.T, rtol=1e-7, atol=1e-9 * float(expected.max()))
        close(derived.std, derived.covariance.diagonal().sqrt())
        model = oracle.float64_copy(case.model)
        outputs = torch.cat([batch.call(model).reshape(-1) for batch in batches]).detach()
        close(derived.mean, a @ outputs)
        assert not derived.shift.any()
    whole = parts.covariance(data).reshape(size, size)
    close(whole, expected, rtol=1e-7, atol=1e-9 * float(expected.max()))


def kind_of(uq):
    """How the targets of a fit share features and weights."""
    if not layers_of(uq):
        return "features of the user"
    if uq.scale.numel() == 1:
        return "one target"
    if has_one_weight_vector(uq):
        return "one weight vector"
    return "a Gram for each target" if uq.gram.matrix.ndim == 3 else "one Gram"


@pytest.mark.thorough
def test_all_kinds_of_readouts_are_among_the_models():
    kinds = {kind_of(zoo_parts(id)[1].uq) for id in MODELS}
    assert kinds == {
        *("features of the user", "one target", "one Gram"),
        *("a Gram for each target", "one weight vector"),
    }
    assert {zoo.OUTCOMES[id] for id in MODELS} == {"plain", "linear", "part", "local"}


def test_masked_targets_have_grams_and_error_bars_of_their_own():
    net = trained(targets=2)
    (x, y), model = net.train, net.model.double()
    y = y.double().clone()
    y[::3, 1] = torch.nan
    loss = lambda p, t: torch.where(t.isnan(), 0.0, (p - t.nan_to_num()).square() / 2)  # noqa: E731
    uq = rg.LastLayerRigidity(model).fit((x.double(), y), loss=loss)
    uq.calibrate(tuple(t.double() for t in net.valid), method="paper")
    assert uq.gram.targets == 2
    parts, at = Parts(uq), net.test[0].double()
    derived = parts.propagate(
        lambda p: torch.stack([*p.mean(0), p[:, 0].mean() - p[:, 1].mean()]), at
    )
    f, ft = (
        torch.cat([model[:-1](t), torch.ones(len(t), 1, dtype=F64)], 1).detach()
        for t in (at, x.double())
    )
    known, eye = ~y.isnan(), torch.eye(25, dtype=F64)
    expected = torch.stack(
        [
            uq.scale[k] ** 2
            * f.mean(0)
            @ torch.linalg.inv(ft[known[:, k]].T @ ft[known[:, k]] + uq.ridge * eye)
            @ f.mean(0)
            for k in range(2)
        ]
    )
    torch.testing.assert_close(derived.variance[:2], expected, rtol=1e-8, atol=0)
    torch.testing.assert_close(derived.variance[2], expected.sum(), rtol=1e-8, atol=0)


def test_covariance_has_the_outputs_shape_on_both_sides(parts, x, three):
    assert parts.covariance(x[:7], x[:5]).shape == (7, 5)
    parts, x = three
    dense = dense_covariance(parts, trained(targets=3).train, x)
    found = parts.covariance(x, batch_size=37)
    assert found.shape == (200, 3, 200, 3)
    torch.testing.assert_close(found.reshape(600, 600), dense, rtol=1e-8, atol=1e-12)
    cross = parts.covariance(x[:50], x[30:90], batch_size=17)
    torch.testing.assert_close(cross, found[:50, :, 30:90], rtol=1e-10, atol=1e-14)
    variance = found.reshape(600, 600).diagonal().reshape(200, 3)
    torch.testing.assert_close(variance, parts.uq.predict(x).epistemic, rtol=1e-8, atol=0)


# --- correlations -------------------------------------------------------------------------------


def test_the_difference_of_similar_predictions_has_a_small_error_bar(parts, x):
    near = torch.stack([x[0], x[0] + 1e-3])
    single = parts.propagate(lambda y: y, near).std
    difference = parts.propagate(lambda y: y[0] - y[1], near).std
    assert float(difference) < 0.02 * float(single.min())
    assert float(parts.propagate(lambda y: y[0] + y[1], near).std) > 1.99 * float(single.min())


def test_the_difference_of_two_targets_uses_their_residual_correlation():
    net = trained(targets=3)
    model, x = net.model.double(), net.train[0].double()
    first, second, third = torch.randn(3, len(x), dtype=F64, generator=torch.manual_seed(0))
    residual = torch.stack([first, 0.9 * first + 0.4 * second, third], 1)
    uq = rg.LastLayerRigidity(model).fit(x, model(x).detach() + residual)
    uq.calibrate(tuple(t.double() for t in net.valid), method="paper")
    rho = torch.from_numpy(uncentred_correlation(residual.numpy()))
    std = uq.propagate(lambda y: y[0], x[:1]).std
    both = uq.propagate(lambda y: torch.stack([y[0, 0] - y[0, 1], y[0, 0] - y[0, 2]]), x).std
    assert float(rho[0, 1]) > 0.8
    for k, found in zip((1, 2), both, strict=True):
        expected = std[0] ** 2 + std[k] ** 2 - 2 * rho[0, k] * std[0] * std[k]
        torch.testing.assert_close(found, expected.sqrt())


# --- nonlinear functions ------------------------------------------------------------------------


def curved(y):
    """A ratio, a soft maximum, a product and a trapezoid of an exponential."""
    y = y.reshape(-1)
    return torch.stack(
        [
            y[:40].sum() / (3 + y[40:80].mean()),
            torch.logsumexp(3 * y, 0),
            y[0] * y[7],
            torch.trapezoid(y[:30].exp(), dx=0.1),
        ]
    )


def test_nonlinear_functions_agree_with_many_models_of_drawn_weights():
    net = trained()
    parts, x = parts_of(net, F64, errors=0.05)  # small, so that first order is what is tested
    derived = parts.propagate(curved, x, second_order=True)
    model, (xt, _) = parts.uq.model, net.train
    with torch.no_grad():
        f, ft = (
            torch.cat([model[:-1](t), torch.ones(len(t), 1, dtype=F64)], 1)
            for t in (x, xt.double())
        )
        precision = ft.T @ ft + parts.uq.ridge * torch.eye(25, dtype=F64)
        precision = precision / parts.uq.scale.square()
        root = torch.linalg.cholesky(torch.linalg.inv(precision))
        draws, generator = 40_000, torch.Generator().manual_seed(1)
        moved = torch.randn(draws, 25, dtype=F64, generator=generator) @ root.T @ f.T
        plus, minus = (torch.vmap(curved)(model(x)[:, 0] + sign * moved) for sign in (1, -1))
    std = torch.cat([plus, minus]).std(0)
    assert bool(((derived.std / std - 1).abs() < 4 / math.sqrt(2 * 2 * draws) + 2e-3).all())
    bend = (plus + minus) / 2 - curved(model(x).detach())
    error = bend.std(0) / math.sqrt(draws)
    assert bool(((derived.shift - bend.mean(0)).abs() < 4 * error).all())
    assert bool((derived.shift.abs() > 5 * error).sum() >= 3)
    torch.testing.assert_close(derived.mean - derived.shift, curved(model(x)).detach())


@pytest.mark.parametrize("quantities", [2, 100])
def test_the_second_order_mean_of_a_quadratic_is_exact(three, quantities):
    parts, x = three
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(quantities, 30, 30, dtype=F64, generator=generator)
    b = torch.randn(quantities, 30, dtype=F64, generator=generator)
    fn = lambda y: torch.einsum("i,qij,j->q", y.reshape(-1), a, y.reshape(-1)) + b @ y.reshape(-1)  # noqa: E731
    covariance = dense_covariance(parts, trained(targets=3).train, x[:10])
    derived = parts.propagate(fn, x[:10], second_order=True, batch_size=4)
    mean = fn(parts.uq.model(x[:10])).detach()
    expected = mean + torch.einsum("qij,ij->q", a, covariance)
    torch.testing.assert_close(derived.mean, expected, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(derived.shift, expected - mean, rtol=1e-7, atol=1e-10)
    assert not parts.propagate(fn, x[:10]).shift.any()


# --- distributions
# ---------------------------------------------------------------------------------------


def test_batches_and_order_do_not_matter(three):
    parts, x = three
    once, shuffle = parts.propagate(curved, x), torch.randperm(200, generator=torch.Generator())
    many = parts.propagate(curved, x, batch_size=7)
    torch.testing.assert_close(many.covariance, once.covariance, rtol=1e-10, atol=1e-16)
    torch.testing.assert_close(many.mean, once.mean)
    back = shuffle.argsort()
    other = parts.propagate(lambda y: curved(y[back]), x[shuffle])
    torch.testing.assert_close(other.covariance, once.covariance, rtol=1e-10, atol=1e-16)


def test_forward_and_reverse_mode_agree(parts, x):
    forward = parts.propagate(torch.exp, x)  # more quantities than the readout has weights
    for rows in torch.arange(len(x)).split(20):
        reverse = parts.propagate(lambda y, rows=rows: y[rows].exp(), x)
        expected = forward.covariance[rows][:, rows]
        torch.testing.assert_close(reverse.covariance, expected, rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(
        forward.variance, parts.uq.predict(x).epistemic * (2 * forward.mean.log()).exp()
    )


def test_float32_models_give_float32_with_float64_derivatives():
    exact, x = parts_of(trained(), F64)
    parts, x32 = parts_of(trained(), method=rg.Paper(ridge=exact.uq.ridge))
    got, expected = (p.propagate(curved, z) for p, z in ((parts, x32), (exact, x)))
    assert got.mean.dtype == got.std.dtype == got.covariance.dtype == torch.float32
    assert got.precision == F64
    assert torch.equal(got.mean, curved(parts.uq.model(x32)).detach())
    torch.testing.assert_close(got.std.double(), expected.std, rtol=1e-3, atol=0)


def test_a_function_with_float32_constants_gets_float32_derivatives():
    parts, x = parts_of(trained())
    matrix = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    got = parts.propagate(lambda y: matrix @ y[:, 0], x)
    wide = parts.propagate(lambda y: matrix.to(y.dtype) @ y[:, 0], x)
    assert got.precision == torch.float32 and wide.precision == F64
    torch.testing.assert_close(got.std, wide.std, rtol=1e-5, atol=0)


def test_half_precision_models_get_error_bars_in_float32():
    case = zoo.build("bfloat16_model")
    uq = rg.LastLayerRigidity(case.model).fit([case.data])
    uq.calibrate([zoo.build("bfloat16_model", draw=1).data], method="paper")
    derived = uq.propagate(lambda y: y.mean(), [case.data], second_order=True)
    assert derived.std.dtype == torch.float32
    assert 0 < float(derived.std) < math.inf


def test_the_result_has_the_shape_of_the_function(parts, x):
    derived = parts.propagate(lambda y: y.reshape(4, 5, 10).exp().sum(2), x)
    assert derived.mean.shape == derived.std.shape == derived.shift.shape == (4, 5)
    assert derived.covariance.shape == (20, 20)
    assert parts.propagate(torch.mean, x).std.shape == ()


def test_intervals_are_gaussian():
    derived = Derived.of(torch.tensor(1.0), torch.tensor([[3.0, 4.0]], dtype=F64))
    distribution = torch.distributions.Normal(1.0, 5.0)
    low, high = derived.interval(0.8)
    torch.testing.assert_close(distribution.cdf(high) - distribution.cdf(low), torch.tensor(0.8))
    torch.testing.assert_close(derived.quantile(0.25), distribution.icdf(torch.tensor(0.25)))
    for wrong in (0, 1):
        refused("between 0 and 1", derived.interval, wrong)
        refused("between 0 and 1", derived.quantile, wrong)


# --- functions that ask for another way ---------------------------------------------------------


Square = without_forward_mode(torch.square, lambda y: 2 * y)


def branching(y):
    """Looks at a value, which cannot be batched."""
    return y.square() if float(y.detach().sum()) < math.inf else y


def looping(y):
    """Writes into its input and into a new tensor."""
    y *= 2
    out = torch.zeros_like(y)
    for i in range(len(y)):
        out[i] = y[i] * y[i] / 4
    return out


@pytest.mark.parametrize("rows", [5, 60])
@pytest.mark.parametrize("fn", [Square.apply, branching, looping])
def test_functions_without_a_forward_mode_or_with_writes_are_differentiated_too(parts, x, fn, rows):
    expected = parts.propagate(torch.square, x[:rows], second_order=True)
    derived = parts.propagate(fn, x[:rows], second_order=True)
    for name in ("mean", "variance", "shift", "rows"):
        got, wanted = getattr(derived, name), getattr(expected, name)
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-14)


def test_many_quantities_keep_their_variances_without_their_covariance(parts, x, monkeypatch):
    whole = parts.propagate(torch.exp, x)
    monkeypatch.setattr(propagation, "MEMORY_BYTES", 1000)
    lean = parts.propagate(torch.exp, x)
    torch.testing.assert_close(lean.variance, whole.variance)
    with pytest.raises(ValueError, match="Propagate fewer"):
        _ = lean.covariance


def test_small_chunks_change_nothing(parts, x, monkeypatch):
    whole = parts.propagate(curved, x, second_order=True)
    wide = parts.propagate(torch.exp, x)
    monkeypatch.setattr("rigidities.last_layer.propagation.differential.WORKING_BYTES", 8 * 200 * 3)
    torch.testing.assert_close(parts.propagate(curved, x, second_order=True).shift, whole.shift)
    small = parts.propagate(torch.exp, x)
    torch.testing.assert_close(small.rows, wide.rows)
    torch.testing.assert_close(small.variance, wide.variance)


def test_gradient_modes_do_not_matter(parts, x):
    expected = parts.propagate(curved, x, second_order=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = parts.propagate(curved, x, second_order=True)
        torch.testing.assert_close(got.covariance, expected.covariance)
        torch.testing.assert_close(got.shift, expected.shift)
        assert not got.mean.is_inference()


# --- features beyond the budget -----------------------------------------------------------------


@pytest.mark.parametrize("fn", [curved, torch.exp])
@pytest.mark.parametrize("kept", [0, 39_999])
def test_features_that_were_not_kept_are_read_again(parts, x, monkeypatch, fn, kept):
    calls = []
    hook = parts.uq.model.register_forward_hook(lambda *_: calls.append(1))
    expected = parts.propagate(fn, x, batch_size=16)
    calls.clear()
    monkeypatch.setattr(joint_outputs, "MEMORY_BYTES", kept)
    got = parts.propagate(fn, x, batch_size=16)
    hook.remove()
    torch.testing.assert_close(got.rows, expected.rows, rtol=1e-12, atol=1e-16)
    assert len(calls) == (26 if kept == 0 else 13 + 1)  # 12 batches of 3.2 kB fit


def test_a_generator_is_read_once_and_kept(parts, x, monkeypatch):
    monkeypatch.setattr(joint_outputs, "MEMORY_BYTES", 0)
    expected = parts.propagate(curved, x)
    got = parts.propagate(curved, (batch for batch in x.split(16)))
    torch.testing.assert_close(got.covariance, expected.covariance, rtol=1e-10, atol=1e-16)
    assert not repeatable(iter([1])) and repeatable([1]) and repeatable(x)


def test_another_order_at_the_second_reading_is_refused(parts, x, monkeypatch):
    shuffled = DataLoader(TensorDataset(x), batch_size=16, shuffle=True)
    parts.propagate(torch.mean, shuffled)
    monkeypatch.setattr(joint_outputs, "MEMORY_BYTES", 0)
    refused("does not shuffle", parts.propagate, torch.mean, shuffled)


# --- bad input ----------------------------------------------------------------------------------

BY_MEMBERS = r"different.*uq\.ensemble\(64\)\.propagate\(fn, x\)"
INFINITE = r"derivative of quantity 0 .*"


@pytest.mark.parametrize(
    ("fn", "error", "message"),
    [
        (lambda y: y.detach().sum(), ValueError, BY_MEMBERS),
        (torch.no_grad()(lambda y: y.sum()), ValueError, BY_MEMBERS),
        (lambda y: torch.from_numpy(y.numpy() ** 2), ValueError, BY_MEMBERS),
        (lambda y: torch.from_numpy(y.detach().numpy() ** 2), ValueError, BY_MEMBERS),
        (lambda y: torch.tensor(y.sum().item()), ValueError, BY_MEMBERS),
        (lambda y: (y > 0).to(y.dtype).mean(), ValueError, BY_MEMBERS),
        (lambda y: y.argmax(), TypeError, r"floating-point values, got torch.int64.*ensemble"),
        (lambda y: y.sum().item(), TypeError, r"one tensor, got float.*ensemble"),
        (
            lambda y: (y.sum(), y.mean()),
            TypeError,
            r"one tensor, got tuple. Join several with torch.stack",
        ),
        (lambda y: y.numpy(), TypeError, r"one tensor, got ndarray.*ensemble"),
        (lambda y: torch.fft.fft(y[:, 0]), TypeError, r"got torch.complex128"),
        (lambda y: (y - 100).log(), ValueError, r"NaN or infinity for 200 of 200 quantities"),
        (lambda y: (y - y.detach()).sqrt().sum(), ValueError, INFINITE + "ensemble"),
        (lambda y: (y - y.detach()).sqrt(), ValueError, INFINITE + r"torch.where.*ensemble"),
        (lambda y: y[:0], ValueError, r"at least one value, got shape \(0, 1\)"),
    ],
)
def test_functions_without_a_finite_derivative_are_refused(parts, x, fn, error, message):
    refused(message, parts.propagate, fn, x, error=error)


@pytest.mark.parametrize("fn", [torch.round, lambda y: y.round().sum()])
def test_a_derivative_of_zero_is_said(parts, x, fn):
    with pytest.warns(UserWarning, match=r"exactly zero for (200 of 200|1 of 1) .*uq\.ensemble"):
        derived = parts.propagate(fn, x)
    assert not derived.std.any()


def test_only_the_flat_quantities_are_counted(parts, x):
    flat = int((parts.uq.model(x) < 0).sum())
    with pytest.warns(UserWarning, match=f"exactly zero for {flat} of 200"):
        derived = parts.propagate(torch.relu, x)
    assert int((derived.std == 0).sum()) == flat


@pytest.mark.parametrize("data", [[], torch.zeros(0, 4, dtype=F64), [torch.zeros(0, 4, dtype=F64)]])
def test_empty_data_are_refused(parts, data):
    refused("nothing to propagate", parts.propagate, torch.mean, data)


def test_outputs_that_cannot_be_joined_are_refused():
    net = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1)).double()
    x = torch.randn(6, 4, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    uq = rg.LastLayerRigidity(net).fit((x, x[..., :1])).calibrate((x, x[..., 1:2]), method="paper")
    refused("different shapes per sample", uq.propagate, torch.mean, [x, x[:, :2]])


def test_errors_inside_the_function_come_through(parts, x):

    def wrong(y):
        raise KeyError("energy")

    refused("energy", parts.propagate, wrong, x, error=KeyError)


# --- through the façade -------------------------------------------------------------------------


def test_every_source_and_size_of_batches_gives_the_same(three):
    parts, x = three
    expected = parts.propagate(curved, x, second_order=True)
    for data in (x, (batch for batch in x.split(16)), DataLoader(TensorDataset(x), batch_size=50)):
        got = parts.propagate(curved, data, batch_size=31, second_order=True)
        torch.testing.assert_close(got.covariance, expected.covariance, rtol=1e-9, atol=1e-15)
        torch.testing.assert_close(got.mean, expected.mean)
    for others in (x[5:12], None):
        found = parts.covariance(x[:9], others, batch_size=4)
        torch.testing.assert_close(found, parts.covariance(x[:9], others))


def test_the_zero_derivative_is_said_where_the_user_called(parts, x):
    with pytest.warns(UserWarning, match="exactly zero") as said:
        parts.uq.propagate(torch.round, x)
    assert said[0].filename == __file__


def test_an_uncalibrated_fit_says_so(net):
    uq = rg.LastLayerRigidity(net.model).fit(net.train)
    with pytest.warns(UserWarning, match="not calibrated"):
        uq.propagate(torch.mean, net.test[0])
