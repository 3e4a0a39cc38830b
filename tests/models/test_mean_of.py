"""Several nets as one model: features by brute force, and all that a wrapped model can do."""

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

import rigidities as rg
from tests.support import oracle
from tests.support.nets import Net, data, trained
from tests.support.readouts import layers_of
from tests.support.refusals import refused

X, Y = (tensor.double() for tensor in data(80, 1, seed=5))
VALID = tuple(tensor.double() for tensor in data(60, 1, seed=6))
TEST = data(20, 1, seed=7)[0].double()


def nets() -> list[nn.Module]:
    """Three of different architectures and widths."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wide = nn.Sequential(nn.Linear(4, 12), nn.SiLU(), nn.Linear(12, 1))
        deep = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        deep.append(nn.Linear(6, 1, bias=False))
        scaled = Net(lambda m, x: 3 * m.head(torch.cos(x)) + 1, head=nn.Linear(4, 1))
    return [wide.double(), deep.double(), scaled.double()]


HEADS = ["models.0.2", "models.1.4", "models.2.head"]


@pytest.fixture(scope="module")
def mean() -> rg.MeanOf:
    return rg.MeanOf(nets())


@pytest.fixture
def uq(mean: rg.MeanOf) -> rg.LastLayerRigidity:
    uq = rg.LastLayerRigidity(mean).fit((X, Y))
    uq.calibrate(VALID, method=rg.Paper(criterion="evidence", noise="bayes"))
    return uq


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    names = oracle.head_parameters(model, HEADS)
    return oracle.rows(oracle.readout_jacobian(model, lambda m: m(x), names))


def test_the_output_is_the_mean(mean):
    wanted = torch.stack([model(TEST) for model in mean.models]).mean(0)
    torch.testing.assert_close(mean(TEST), wanted)


def test_it_is_one_readout_whose_features_are_the_members_side_by_side(mean, uq):
    assert layers_of(uq) == HEADS
    torch.testing.assert_close(uq.features(TEST), jacobian(mean, TEST))
    blocks = [model[:-1](TEST) / 3 for model in mean.models[:2]]
    torch.testing.assert_close(uq.features(TEST)[:, :12], blocks[0])
    torch.testing.assert_close(uq.features(TEST)[:, 13:19], blocks[1])


def test_variances_equal_the_dense_ones_though_biases_are_equal_columns(mean, uq):
    wanted = oracle.quadratic(jacobian(mean, X), jacobian(mean, TEST), uq.ridge)
    prediction = uq.predict(TEST)
    torch.testing.assert_close(1 / prediction.rigidity[:, 0], wanted, rtol=1e-7, atol=0)
    refused("singular", uq.calibrate, VALID, method=rg.Full(ridge=0.0))


def test_the_evidence_counts_equal_biases_once(mean, uq):
    f = jacobian(mean, X).numpy()
    target = Y[:, 0].numpy() - (mean(X)[:, 0].detach().numpy() - f @ _weights(mean))
    ridges = uq.ridge * torch.logspace(-1, 1, 41).numpy()
    values = [oracle.restricted_evidence(f, target, float(s), biases=(12, 23)) for s in ridges]
    assert abs(int(torch.tensor(values).argmax()) - 20) <= 1


def _weights(model: nn.Module):
    names = oracle.head_parameters(model, HEADS)
    return torch.cat([model.get_parameter(n).detach().flatten() for n in names]).numpy()


def test_covariance_ensemble_gradient_and_propagation_agree_with_the_dense_posterior(mean, uq):
    inverse = oracle.gram(jacobian(mean, X)) + uq.ridge * torch.eye(24).double()
    wanted = (
        uq.scale.square()
        * jacobian(mean, TEST)
        @ torch.linalg.solve(inverse, jacobian(mean, TEST).mT)
    )
    joint = uq.covariance(TEST)
    torch.testing.assert_close(joint.reshape(20, 20), wanted, rtol=1e-6, atol=1e-12)
    derived = uq.propagate(lambda y: y.mean(), TEST)
    torch.testing.assert_close(derived.std.double(), wanted.mean().sqrt(), rtol=1e-6, atol=0)
    members = uq.ensemble(4000, generator=torch.Generator().manual_seed(0))(TEST)[..., 0]
    ratio = members.var(0) / wanted.diagonal()
    assert float((ratio - 1).abs().max()) < 6 * (2 / 4000) ** 0.5
    x = TEST.clone().requires_grad_()
    (slope,) = torch.autograd.grad(mean(x).sum(), x)
    gradient = uq.gradient(TEST)
    torch.testing.assert_close(gradient.mean.reshape(slope.shape), slope)


def test_files_state_dicts_and_threads_know_it(mean, uq, tmp_path):
    wanted = uq(TEST)
    uq.save(tmp_path / "mean.safetensors")
    loaded = rg.LastLayerRigidity.load(tmp_path / "mean.safetensors", rg.MeanOf(nets()))
    fresh = rg.LastLayerRigidity(rg.MeanOf(nets()))
    fresh.load_state_dict(uq.state_dict())
    for other in (loaded, fresh):
        torch.testing.assert_close(other(TEST), wanted)
    found: list[tuple[Tensor, Tensor]] = []
    threads = [threading.Thread(target=lambda: found.append(uq(TEST))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for one in found:
        torch.testing.assert_close(one, wanted)


PLAIN = [f"models.{i}.{2 * i + 2}" for i in range(2)]


@pytest.fixture
def plain() -> rg.LastLayerRigidity:
    """Of two nets that end in a linear layer."""
    uq = rg.LastLayerRigidity(rg.MeanOf(nets()[:2])).fit((X, Y))
    uq.calibrate(VALID, method=rg.Paper(criterion="evidence", noise="bayes"))
    return uq


def test_nets_that_end_in_a_linear_layer_are_read_without_a_derivative(plain):
    names = oracle.head_parameters(plain.model, PLAIN)
    wanted = oracle.readout_jacobian(plain.model, lambda m: m(TEST), names)
    torch.testing.assert_close(plain.features(TEST), wanted[:, 0])
    x = TEST.clone().requires_grad_()
    assert plain(x)[1].requires_grad


def test_what_they_no_longer_end_in_is_read_by_derivatives():
    def halved(m: Net, x: Tensor) -> Tensor:
        y = m.head(x)
        return y.mul_(0.5) if len(x) % 2 else y  # in place, where the batch is odd

    members = [Net(halved, head=nn.Linear(4, 1).double()) for _ in range(2)]
    uq = rg.LastLayerRigidity(rg.MeanOf(members)).fit((X, Y))
    uq.calibrate(VALID)
    wanted = torch.cat([TEST, torch.ones(20, 1)], dim=1).repeat(1, 2) / 2
    torch.testing.assert_close(uq.features(TEST), wanted)
    torch.testing.assert_close(uq.features(TEST[:19]), wanted[:19] / 2)


def test_nets_that_share_a_head_or_its_weight_have_one_set_of_columns():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        trunks, head = [nn.Linear(4, 6).double() for _ in range(2)], nn.Linear(6, 1).double()
    twin = nn.Linear(6, 1).double()
    twin.weight = head.weight
    pairs = zip(trunks, (head, twin), strict=True)
    for members in (
        [nn.Sequential(trunk, nn.Tanh(), head) for trunk in trunks],
        [nn.Sequential(trunk, nn.Tanh(), own) for trunk, own in pairs],
    ):
        model = rg.MeanOf(members)
        uq = rg.LastLayerRigidity(model).fit((X, Y))
        uq.calibrate(VALID)
        names = ["models.0.2.weight", "models.0.2.bias", "models.1.2.bias"]
        names = names[: 2 + (members[0][2] is not members[1][2])]
        wanted = oracle.readout_jacobian(model, lambda m: m(TEST), names)[:, 0]
        torch.testing.assert_close(uq.features(TEST), wanted)


@pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"), reason="export needs PyTorch 2.7 or newer"
)
def test_it_exports_and_its_ensemble_does(plain):
    program = torch.export.export(copy.deepcopy(plain.model), (TEST,))
    torch.testing.assert_close(program.module()(TEST), plain.model(TEST))
    ensemble = plain.ensemble(4, generator=torch.Generator().manual_seed(0))
    wanted = ensemble(TEST)
    program = torch.export.export(ensemble, (TEST,))
    torch.testing.assert_close(program.module()(TEST), wanted)


def test_it_is_refitted_as_one_readout_by_ridge_regression(mean, uq):
    new = uq.refit()
    rows, old = jacobian(mean, X), torch.from_numpy(_weights(mean))
    penalty = torch.full((24,), new.refitted.ridge).double()
    penalty[[12, 23]] = 0
    system = torch.cat([rows, penalty.sqrt().diag()])
    left = torch.cat([(Y - mean(X))[:, 0].detach(), -penalty.sqrt() * old])
    change = torch.linalg.lstsq(system, left, rcond=1e-13, driver="gelsd").solution
    wanted = mean(TEST)[:, 0].detach() + jacobian(mean, TEST) @ change
    torch.testing.assert_close(new.model(TEST)[:, 0].detach(), wanted, rtol=1e-7, atol=1e-9)
    fresh = rg.LastLayerRigidity(new.model).fit((X, Y))
    torch.testing.assert_close(new.gram.cross, fresh.gram.cross, rtol=0, atol=1e-8)
    torch.testing.assert_close(new.gram.square, fresh.gram.square, rtol=1e-8, atol=0)


def test_several_targets_and_float32_keep_the_fast_case():
    pair = [trained(3, seed=seed, steps=5) for seed in (0, 1)]
    uq = rg.LastLayerRigidity(rg.MeanOf([net.model for net in pair])).fit(pair[0].train)
    uq.calibrate(pair[0].valid)
    assert uq.gram.width == 50
    std = uq(pair[0].test[0].clone().requires_grad_())[1]
    assert std.shape == (200, 3) and std.requires_grad  # as of plain layers alone


def test_inputs_pass_on_by_place_and_by_name_and_keep_the_members_names():
    members = [Net(lambda m, a, b: m.head(a * b), head=nn.Linear(4, 1)) for _ in range(2)]

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 1)

        def forward(self, a: Tensor, pos: Tensor) -> Tensor:
            return self.head(a * pos.cos())

    a, b = TEST.float(), TEST.float().flip(0)
    model = rg.MeanOf(members)
    torch.testing.assert_close(model(a, b), model(a, b=b))
    uq = rg.LastLayerRigidity(rg.MeanOf([Named(), Named()])).fit((a, b, a[:, :1]))
    with pytest.warns(UserWarning, match="not calibrated"):
        by_name = uq.gradient((a, b), wrt="pos")
    torch.testing.assert_close(by_name.mean, uq.gradient((a, b), wrt=1).mean)


def test_a_field_of_several_is_picked_by_output():
    def both(m: Net, x: Tensor) -> dict[str, Tensor]:
        return {"energy": m.head(x), "charge": x}

    members = [Net(both, head=nn.Linear(4, 1)) for _ in range(2)]
    refused("Pass output=", rg.MeanOf(members), TEST.float())
    picked = rg.MeanOf(members, output="energy")
    assert picked(TEST.float()).shape == (20, 1)


def test_what_is_no_list_of_models_is_refused():
    for wrong in ([], nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 1)), None, iter([])):
        refused("expects a list of one or more", rg.MeanOf, wrong, error=TypeError)
    refused(r"got \['Linear', 'function'\]", rg.MeanOf, [nn.Linear(4, 1), data], error=TypeError)
    uneven = rg.MeanOf([nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 2)])
    refused(
        r"outputs of the same shape; its models return \[\(20, 1\), \(20, 1\), \(20, 2\)\]",
        uneven,
        TEST.float(),
    )
