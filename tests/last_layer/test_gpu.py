"""On an accelerator: the same numbers as on the CPU, and files that travel between them."""

import copy

import pytest
import torch
from torch import nn

import rigidities as rg
from tests.support.nets import calibrated, trained

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda():
    assert torch.cuda.is_available(), "these tests need a CUDA device"
    return torch.device("cuda")


def fitted(net, device, **options):
    uq = rg.LastLayerRigidity(net.model.to(device)).fit(net.train, **options)
    uq.calibrate(net.valid, method=rg.Paper(noise="constant"))
    return uq


@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_a_fit_on_the_accelerator_equals_one_on_the_cpu(cuda, loss):
    here, there = fitted(trained(3), "cpu", loss=loss), fitted(trained(3), cuda, loss=loss)
    assert there.gram.device.type == "cuda"
    torch.testing.assert_close(there.gram.matrix.cpu(), here.gram.matrix, rtol=1e-3, atol=1e-3)
    x = trained().test[0]
    torch.testing.assert_close(there(x.to(cuda))[1].cpu(), here(x)[1], rtol=2e-2, atol=1e-3)


def test_statistics_follow_the_model_there_and_back(cuda):
    net = trained()
    uq, x = fitted(net, "cpu"), net.test[0]
    before = uq(x)[1]
    uq.to(cuda)
    assert uq.gram.device.type == "cuda"
    torch.testing.assert_close(uq(x.to(cuda))[1].cpu(), before, rtol=1e-3, atol=1e-5)
    net.model.cpu()
    assert torch.equal(uq(x)[1], before)


def test_a_file_travels_between_devices(cuda, tmp_path):
    net = trained()
    uq, x = fitted(net, cuda), net.test[0]
    uq.save(tmp_path / "uq.safetensors")
    there = uq(x.to(cuda))[1].cpu()
    here = rg.LastLayerRigidity.load(tmp_path / "uq.safetensors", net.model.cpu())
    torch.testing.assert_close(here(x)[1], there, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("batch_size", [None, 7])
def test_the_sample_of_rows_is_that_of_the_cpu_and_follows_the_model(cuda, batch_size):
    here, there = (
        rg.LastLayerRigidity(trained(3).model.to(device), batch_size=batch_size).fit(
            trained(3).train, keep_rows=60
        )
        for device in ("cpu", cuda)
    )
    one, other = (uq._fit.require_state().statistics.kept_rows for uq in (here, there))
    assert one.limit == other.limit and other.rows["features"].is_cuda
    for name, column in one.columns.items():
        found = other.columns[name].cpu()
        torch.testing.assert_close(found, column, rtol=1e-2, atol=1e-2)
    there.cpu()
    assert there._fit.require_state().statistics.kept_rows.rows["features"].device.type == "cpu"


def test_duplicates_are_recognised_across_devices(cuda):
    net = trained()
    uq = fitted(net, "cpu")
    uq.to(cuda)
    with pytest.warns(UserWarning, match="20 of 20 calibration rows"):
        uq.calibrate(tuple(t[:20] for t in net.train), method="paper")


def test_wide_grams_take_the_large_blocks(cuda):
    features = torch.randn(300, 2500, device=cuda)
    gram = rg.Gram(2500, device=cuda)
    gram.update(features)
    torch.testing.assert_close(gram.matrix, features.double().T @ features.double())
    posterior = rg.Posterior.from_gram(gram, ridge=1.0)
    from rigidities.posterior.quadratic import QuadraticForm

    q = QuadraticForm.of(posterior, torch.float64)(features)
    torch.testing.assert_close(q, posterior.quadratic(features), rtol=1e-9, atol=0)


@pytest.mark.parametrize("form", ["dense", "dual", "matrix-free"])
def test_rigidities_by_all_parameters_equal_those_on_the_cpu(cuda, form):
    net = trained(3)
    model, (x, y) = net.model.double(), (t.double() for t in net.train)
    asked = net.test[0].double()
    here = rg.PredictionRigidity(model, ridge=1.0, form=form).fit(x, y).set_scale(1.0)
    there = rg.PredictionRigidity(model.to(cuda), ridge=1.0, form=form)
    there.fit(x.to(cuda), y.to(cuda)).set_scale(1.0)
    variance = there.variance(asked.to(cuda))
    assert variance.device.type == "cuda"
    torch.testing.assert_close(variance.cpu(), here.variance(asked), rtol=1e-4, atol=0)
    covariance = there.covariance(asked[:3].to(cuda), asked[3:5].to(cuda))
    torch.testing.assert_close(
        covariance.cpu(), here.covariance(asked[:3], asked[3:5]), rtol=1e-3, atol=1e-9
    )
    drawn = there.sample(4, torch.Generator().manual_seed(0))
    assert all(leaf.device.type == "cuda" and len(leaf) == 4 for leaf in drawn.values())


@pytest.fixture
def both(cuda):
    """The same fit in float64 on the CPU and on the accelerator, and inputs for each."""
    nets = trained(3), trained(3)
    x = nets[0].test[0].double()
    fits = []
    for net, device in zip(nets, ("cpu", cuda), strict=True):
        data = [tuple(t.double() for t in part) for part in (net.train, net.valid)]
        uq = rg.LastLayerRigidity(net.model.double().to(device)).fit(data[0], loss="mse")
        uq.calibrate(data[1], method=rg.Paper(ridge=0.1))
        fits.append(uq)
    return *fits, x, x.to(cuda)


def test_derivatives_and_propagation_equal_those_on_the_cpu(both):
    here, there, x, moved = both
    close = {"rtol": 1e-6, "atol": 1e-9}
    for ask in (
        lambda uq, x: uq.gradient(x).std,
        lambda uq, x: uq.gradient(x, along=torch.ones(x.shape[1])).std,
        lambda uq, x: uq.covariance(x[:5], x[5:9]),
        lambda uq, x: uq.propagate(lambda y: y.exp().mean(0), x).std,
        lambda uq, x: uq.predict(x, input_covariance=0.01).from_inputs,
        lambda uq, x: uq.ensemble(8)(x).mean(0),  # draws depend on signs of eigenvectors
        lambda uq, x: uq.local(x).share,
    ):
        result = ask(there, moved)
        assert result.device.type == "cuda"
        torch.testing.assert_close(result.cpu(), ask(here, x), **close)


def test_selection_equals_that_on_the_cpu(both):
    here, there, x, moved = both
    for objective in ("logdet", "variance", "top"):
        picks = [
            uq.select(rows, 5, objective=objective) for uq, rows in ((here, x), (there, moved))
        ]
        assert picks[0].indices.tolist() == picks[1].indices.tolist()


def test_an_ensemble_moves_with_its_model(both):
    here, _, x, moved = both
    ens = here.ensemble(8, generator=torch.Generator().manual_seed(0))
    before = ens(x)
    after = ens.to("cuda")(moved)
    assert after.device.type == ens.deviations.device.type == "cuda"
    torch.testing.assert_close(after.cpu(), before, rtol=1e-9, atol=1e-9)


def test_fits_on_different_devices_merge(cuda):
    """A model's fingerprint is the same on every device."""
    net, there = trained(2), trained(2)
    there.model.to(cuda)
    (x, y), (left, right) = net.train, (slice(150), slice(150, 300))
    whole = rg.LastLayerRigidity(net.model).fit((x, y))
    for mine, other in ((net, there), (there, net)):
        one = rg.LastLayerRigidity(mine.model).fit((x[left], y[left]))
        one.merge(rg.LastLayerRigidity(other.model).fit((x[right], y[right])))
        sample, expected = (
            one._fit.require_state().statistics.kept_rows,
            whole._fit.require_state().statistics.kept_rows,
        )
        device = next(mine.model.parameters()).device.type
        assert one.gram.device.type == sample.rows["features"].device.type == device
        assert torch.equal(sample.hashes.cpu(), expected.hashes)
        scale = float(whole.gram.matrix.max())
        near = {"rtol": 1e-3, "atol": 1e-4 * scale}
        torch.testing.assert_close(one.gram.matrix.cpu(), whole.gram.matrix, **near)
        calibrated(one, tuple(part.to(device) for part in net.valid))


def test_novelty_on_the_accelerator_is_that_of_the_cpu(cuda):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(300, 64), nn.Tanh(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 1)
    )
    x, y = torch.randn(3000, 300), torch.randn(3000, 1)
    found = {}
    for device in ("cpu", cuda):
        uq = rg.LastLayerRigidity(copy.deepcopy(model).to(device))
        uq.fit(x[:2000].to(device), y[:2000].to(device), novelty=True)
        uq.calibrate(x[2000:].to(device), y[2000:].to(device), method="paper")
        found[str(device)] = uq.novelty(2 * x.to(device))
    assert found["cuda"].by_layer.is_cuda
    assert found["cuda"].layers == found["cpu"].layers == ("the input", "2", "4")
    torch.testing.assert_close(
        found["cuda"].by_layer.cpu(), found["cpu"].by_layer, rtol=1e-3, atol=1e-4
    )
