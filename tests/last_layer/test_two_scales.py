"""One scale for what predictions share, a larger one for single predictions, in one covariance."""

import copy
import functools
import io

import onnxruntime
import pytest
import torch
from scipy.stats import chi2, kstest

import rigidities as rg
from rigidities.calibration.calibration import Calibration
from rigidities.data.hashes import hashed_normals
from rigidities.last_layer import Ensemble, MemberValues
from rigidities.posterior.joint import RowDeviation
from tests.support import zoo
from tests.support.nets import fitted, trained
from tests.support.refusals import refused
from tests.support.tampering import resealed_state
from tests.support.zoo_fits import fitted_to

F64 = torch.float64
close = functools.partial(torch.testing.assert_close, rtol=1e-8, atol=1e-12)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def with_scales(uq, alone, shared):
    """The fit with other scales, (K,) each; no shared one for None."""

    def change(tensors, header):
        tensors["calibration.scale"] = alone
        tensors.pop("calibration.joint", None)
        if shared is not None:
            tensors["calibration.joint"] = shared

    other = copy.deepcopy(uq)
    other.set_extra_state(resealed_state(uq.get_extra_state(), change))
    return other


def in_batches(uq, batch_size):
    """The fit, which reads data in batches of another size."""
    other = copy.copy(uq)
    other.batch_size = batch_size
    return other


def share(uq, ratio):
    """The fit whose predictions share a part of their scale, another for each target."""
    return with_scales(
        uq, uq.scale, torch.linspace(0.5, 1, len(uq.scale) + 1)[:-1] * ratio * uq.scale
    )


@functools.cache
def nets(targets):
    """A net with its two-scale fit in float64, and rows of which some are repeated."""
    net = trained(targets)
    net.model.double()
    net = type(net)(net.model, *(tuple(t.double() for t in pair) for pair in net[1:]))
    x = net.test[0]
    return net, share(fitted(net), 0.8), torch.cat([x[:7], x[3:9], x[:1]])


def dense(targets, x, other=None):
    """The covariance (N K, M K) from float64 features, an inverse and equal inputs."""
    net, uq, _ = nets(targets)
    other = x if other is None else other
    f, g, ft = (
        torch.cat([net.model[:-1](t), torch.ones(len(t), 1, dtype=F64)], 1).detach()
        for t in (x, other, net.train[0])
    )
    residual = (net.train[1] - net.model(net.train[0])).detach()
    unit = residual / residual.norm(dim=0)
    rho = unit.T @ unit
    k = f @ torch.linalg.inv(ft.T @ ft + uq.ridge * torch.eye(25, dtype=F64)) @ g.T
    joint = uq.calibration.joint
    own = (uq.scale**2 - joint**2).sqrt()
    same = (x[:, None] == other).all(-1).double()
    shared = torch.einsum("mn,kl->mknl", k, rho * torch.outer(joint, joint))
    single = torch.einsum("mn,kl->mknl", same * k, rho * torch.outer(own, own))
    return (shared + single).flatten(2).flatten(0, 1)


# --- covariance and propagation -----------------------------------------------------------------


@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_the_covariance_is_the_dense_one_for_repeated_rows_too(targets, batch_size):
    net, uq, x = nets(targets)
    size = len(x) * targets
    uq = in_batches(uq, batch_size)
    found = uq.covariance(x).reshape(size, size)
    close(found, dense(targets, x))
    close(found.diagonal().reshape(-1, targets), uq.predict(x).epistemic)
    y = net.test[0][5:30]
    cross = uq.covariance(x, y).reshape(size, -1)
    close(cross, dense(targets, x, y))


@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("quantities", [3, 200])  # by reverse mode, by forward mode
def test_a_linear_function_is_exact_with_both_scales(targets, batch_size, quantities):
    _, uq, x = nets(targets)
    a = torch.randn(quantities, len(x) * targets, dtype=F64, generator=seeded())
    uq = in_batches(uq, batch_size)
    derived = uq.propagate(lambda y: a @ y.reshape(-1), x)
    expected = a @ dense(targets, x) @ a.T
    close(derived.covariance, expected)
    close(derived.variance, expected.diagonal())


@pytest.mark.parametrize("targets", [1, 3])
def test_a_curved_function_is_exact_to_its_order_with_both_scales(targets):
    net, uq, x = nets(targets)
    fn = lambda y: torch.stack([y.square().sum(), y.flatten().cumprod(0)[2], y.exp().mean()])  # noqa: E731
    uq = in_batches(uq, 5)
    derived = uq.propagate(fn, x, second_order=True)
    point, covariance = net.model(x).detach(), dense(targets, x)
    slope = torch.autograd.functional.jacobian(fn, point).reshape(3, -1)
    close(derived.covariance, slope @ covariance @ slope.T)
    for i in range(3):
        bend = torch.autograd.functional.hessian(lambda y, i=i: fn(y)[i], point)
        bend = bend.reshape(covariance.shape)
        close(derived.shift[i], (bend * covariance).sum() / 2)


def test_a_mean_of_many_predictions_has_the_shared_scale_and_a_single_one_its_own():
    _, uq, _ = nets(1)
    x = torch.randn(3000, 4, dtype=F64, generator=seeded())
    plain = with_scales(uq, uq.calibration.joint, None)
    both, shared = (each.propagate(torch.mean, x) for each in (uq, plain))
    own = (uq.scale**2 - uq.calibration.joint**2) * (1 / uq.predict(x).rigidity).sum() / 3000**2
    close(both.variance, shared.variance + own.squeeze())
    assert float(both.std / shared.std) < 1.2
    close(uq.propagate(lambda y: y[0], x).variance, uq.predict(x).epistemic[0])


LAYOUTS = [
    "mlp_with_several_targets",
    "several_time_steps_and_targets_out",
    "each_target_scaled_by_its_own_std",  # a Gram for each target
    "fewer_targets_than_head_outputs",  # one weight vector behind all
    *zoo.GRAPHS,
]


def zoo_fit(id):
    case = zoo.build(id)
    uq = fitted_to(case, [case.data])
    uq.calibrate(
        [zoo.build(id, draw=1).data], method=rg.Full(ridge=0.01 * float(uq.gram.diagonal.mean()))
    )
    return share(uq, 0.7)


@pytest.mark.parametrize("id", LAYOUTS)
def test_rows_of_every_layout_have_a_part_of_their_own(id):
    uq = zoo_fit(id)
    draws = [zoo.build(id, draw=draw) for draw in (2, 3, 2)]
    data = [draw.data for draw in draws]
    targets, rows = len(uq.scale), []
    for draw, start in zip(draws, (0, 10_000, 0), strict=True):  # the third batch is the first
        number = torch.arange(draw.target.numel() // targets) + start
        rows.append(number.repeat_interleave(targets))
    rows = torch.cat(rows)
    count = len(rows)
    same = (rows[:, None] == rows).double()
    own = (uq.scale**2 - uq.calibration.joint**2).sqrt()
    shared, single = (
        with_scales(uq, scale, None).covariance(data).reshape(count, count)
        for scale in (uq.calibration.joint, own)
    )
    expected = shared + same * single
    tolerance = 1e-9 * float(expected.max())
    close(uq.covariance(data).reshape(count, count), expected, atol=tolerance)
    a = torch.randn(5, count, dtype=F64, generator=seeded())
    derived = uq.propagate(lambda y: a @ y.reshape(-1), data)
    close(derived.covariance, a @ expected @ a.T, atol=tolerance, rtol=1e-7)
    members = uq.ensemble(800, generator=seeded())
    spread = members.propagate(lambda y: a @ y.reshape(-1), data)
    assert float((spread.std / derived.std - 1).abs().max()) < 5 / (2 * 800) ** 0.5


# --- members ------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [1, 3])
def test_members_have_the_analytic_covariance_within_their_own_error(targets):
    net, uq, _ = nets(targets)
    n, x = 4000, net.test[0][:4]
    ens = uq.ensemble(n, generator=seeded())
    got = MemberValues(ens(x).flatten(1))
    root = torch.linalg.cholesky(dense(targets, x))
    whitened = torch.linalg.solve_triangular(root, got.covariance, upper=False)
    whitened = torch.linalg.solve_triangular(root, whitened.mT, upper=False)
    z = (whitened - torch.eye(len(root), dtype=F64)) * (n - 1) ** 0.5
    statistic = float(z.tril(-1).square().sum() + z.diagonal().square().sum() / 2)
    assert 1e-4 < chi2.sf(statistic, len(root) * (len(root) + 1) // 2) < 1 - 1e-4
    close(got.mean, net.model(x).detach().flatten())


def test_a_row_deviates_alike_in_every_batch_and_order():
    net, uq, _ = nets(3)
    x = net.test[0]
    ens = uq.ensemble(generator=seeded())
    whole, order = ens(x), torch.randperm(200, generator=seeded())
    close(ens(x[order]), whole[:, order])
    close(ens(x[5:6]), whole[:, 5:6])
    close(ens(torch.cat([x[:3], x[:3]])), whole[:, [0, 1, 2, 0, 1, 2]])
    close(ens.propagate(lambda y: y, list(x.split(7))).values, whole)
    nearly = x[:1] + 1e-9
    assert float((ens(nearly) - whole[:, :1]).abs().max()) > 1e-3  # another row


def test_float32_rows_deviate_alike_in_every_batch():
    net = trained(3)
    ens = share(fitted(net), 0.8).ensemble(16, generator=seeded())
    x = net.test[0]
    parts = torch.cat([ens(part) for part in x.split(9)], 1)
    torch.testing.assert_close(parts, ens(x), rtol=1e-4, atol=1e-4)


def test_rounding_hardly_turns_targets_behind_one_weight_vector():
    part = RowDeviation(torch.eye(8, dtype=F64)[None], torch.eye(3, dtype=F64))
    features = torch.linalg.qr(torch.randn(50, 8, 3, dtype=F64, generator=seeded())).Q.mT
    rounded = features + 1e-13 * torch.randn(50, 3, 8, dtype=F64, generator=seeded(1))
    close(part.roots(rounded), part.roots(features), atol=1e-9)


def test_the_own_part_has_no_derivative_by_the_inputs():
    net, uq, _ = nets(3)
    shared = with_scales(uq, uq.calibration.joint, None)
    x = net.test[0][:4].clone().requires_grad_()
    slopes = [
        torch.autograd.grad(each.ensemble(3, generator=seeded())(x)[1].sum(), x)[0]
        for each in (uq, shared)
    ]
    close(*slopes)


def test_drawing_twice_gives_the_same_members_and_another_seed_others():
    net, uq, _ = nets(3)
    x = net.test[0][:4]
    one, two, other = (uq.ensemble(4, generator=seeded(seed))(x) for seed in (1, 1, 2))
    assert torch.equal(one, two) and not torch.allclose(one, other)


def test_hashed_numbers_are_independent_and_normal():
    rows, keys = (torch.randint(1 << 62, (n,), generator=seeded(n)) for n in (2000, 50))
    z = hashed_normals(rows[:, None], keys)
    assert kstest(z.flatten().numpy(), "norm").pvalue > 1e-4
    neighbours = hashed_normals(torch.arange(100_000), torch.tensor(0))
    assert kstest(neighbours.numpy(), "norm").pvalue > 1e-4
    for numbers in (z, z.T):
        between = torch.corrcoef(numbers).tril(-1)
        assert float(between.abs().max()) < 6.5 / numbers.shape[1] ** 0.5
    assert torch.equal(z[7:9, 3:5], hashed_normals(rows[7:9, None], keys[3:5]))
    neighbours = hashed_normals(torch.arange(300)[:, None], torch.arange(300))
    assert len(neighbours.unique()) == 300**2


# --- files and graphs ---------------------------------------------------------------------------


def test_files_and_copies_keep_the_own_part(tmp_path):
    net, uq, _ = nets(3)
    x = net.test[0]
    ens = uq.ensemble(6, generator=seeded())
    ens.save(tmp_path / "ens.safetensors")
    again = Ensemble.load(tmp_path / "ens.safetensors", net.model)
    other = with_scales(uq, uq.scale, None).ensemble(4)
    assert other.own is None and not torch.allclose(other(x[:1]), ens(x[:1])[:4])
    other.load_state_dict(ens.state_dict())
    for copied in (again, other, copy.deepcopy(ens)):
        assert torch.equal(copied(x), ens(x))
    other.load_state_dict(with_scales(uq, uq.scale, None).ensemble(4).state_dict())
    assert other.own is None
    cast = copy.deepcopy(ens).to(torch.float64)
    assert all(tensor.dtype == F64 for tensor in cast.own)


@pytest.mark.parametrize("name", ["own.factor", "own.mixing"])
def test_own_parts_that_were_changed_are_refused(name):
    _, uq, _ = nets(3)
    ens = uq.ensemble(4, generator=seeded())
    whole = ens.get_extra_state()
    tensor = whole["tensors"][name]
    missing = {key: value for key, value in whole["tensors"].items() if key != name}
    for tensors in (missing, missing | {name: tensor.float()}, missing | {name: tensor[1:, 1:]}):
        refused("damaged", ens.set_extra_state, whole | {"tensors": tensors})


def test_a_calibration_keeps_its_shared_scale_in_files_and_moves(tmp_path):
    net, uq, x = nets(3)
    chosen = uq.calibration
    again = Calibration.from_state(chosen.header(), chosen.tensors())
    assert torch.equal(again.joint, chosen.joint)
    assert chosen.to(torch.device("meta")).joint.is_meta
    whole = uq.get_extra_state()
    for wrong in (chosen.joint[:2], chosen.joint * torch.nan, chosen.joint.float()):
        tensors = whole["tensors"] | {"calibration.joint": wrong}
        refused("damaged", uq.set_extra_state, whole | {"tensors": tensors})
    uq.save(tmp_path / "uq.safetensors")
    loaded = rg.LastLayerRigidity.load(tmp_path / "uq.safetensors", net.model)
    assert torch.equal(loaded.covariance(x), uq.covariance(x))


needs_export = pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"), reason="export needs PyTorch 2.7 or newer"
)


@pytest.mark.thorough
@needs_export
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@pytest.mark.parametrize(
    ("id", "strict"),
    [("mlp_with_several_targets", False), ("several_time_steps_and_targets_out", True)],
)
def test_an_exported_graph_holds_the_own_part(id, strict):
    ens, case = zoo_fit(id).ensemble(4, generator=seeded()), zoo.build(id)
    rows = torch.export.Dim("rows", min=1, max=4096)
    shapes = {"inputs": tuple({0: rows} for _ in case.args)}
    graph = torch.export.export(ens, case.args, dynamic_shapes=shapes, strict=strict).module()
    expected = ens(*case.args)
    torch.testing.assert_close(graph(*case.args).detach(), expected)
    torch.testing.assert_close(graph(*(t[:3] for t in case.args)).detach(), expected[:, :3])


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("id", "whole"), [("reshaped_output", True), ("scaled_and_shifted_output", False)]
)
def test_a_compiled_graph_holds_the_own_part(id, whole):
    torch._dynamo.reset()
    case = zoo.build(id)
    ens = zoo_fit(id).ensemble(4, generator=seeded())
    compiled = torch.compile(ens, fullgraph=whole, backend="aot_eager")
    torch.testing.assert_close(compiled(*case.args), ens(*case.args))


# Raised inside torch while it converts a graph.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@needs_export
def test_an_onnx_graph_says_that_it_leaves_the_own_part_out():
    net = trained(3)
    uq, x = share(fitted(net), 0.8), net.test[0]
    ens = uq.ensemble(4, generator=seeded())
    shapes = (({0: torch.export.Dim("n")},),)
    with pytest.warns(UserWarning, match="leaves out the part of the spread"):
        program = torch.onnx.export(ens, (x,), dynamo=True, dynamic_shapes=shapes, verbose=False)
    buffer = io.BytesIO()
    program.save(buffer)
    session = onnxruntime.InferenceSession(buffer.getvalue())
    (got,) = session.run(None, {session.get_inputs()[0].name: x[:5].numpy()})
    shared = with_scales(uq, uq.calibration.joint, None).ensemble(4, generator=seeded())
    torch.testing.assert_close(torch.from_numpy(got), shared(x[:5]).detach(), rtol=1e-4, atol=1e-5)


# --- one scale ----------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [1, 3])
def test_equal_scales_are_one_scale(targets):
    _, uq, x = nets(targets)
    one, two = with_scales(uq, uq.scale, None), with_scales(uq, uq.scale, uq.scale)
    a = torch.randn(4, len(x) * targets, dtype=F64, generator=seeded())
    for call in (
        lambda uq: uq.covariance(x),
        lambda uq: uq.propagate(lambda y: a @ y.reshape(-1), x).rows,
        lambda uq: uq.propagate(torch.exp, x, second_order=True).mean,
        lambda uq: uq.ensemble(8, generator=seeded())(x),
    ):
        assert torch.equal(call(one), call(two))


def test_single_quantities_keep_the_scale_of_single_predictions():
    _, uq, x = nets(3)
    one = with_scales(uq, uq.scale, None)
    for call in (
        lambda uq: uq.predict(x).std,
        lambda uq: uq(x)[1],
        lambda uq: uq.gradient(x[:3]).std,
        lambda uq: uq.local(x).std,
        lambda uq: uq.posterior.variance(uq.features(x)),
        lambda uq: uq.select(x, 3).indices,
    ):
        assert torch.equal(call(uq), call(one))
