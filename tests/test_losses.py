"""Curvature of losses: closed forms against automatic differentiation, and refusals."""

import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.losses import GaussianNLL, Huber, LogCosh, PoissonNLL, loss_for
from tests.support import oracle
from tests.support.refusals import refused

F64 = torch.float64
Y = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
T = torch.randn(50, 2, generator=torch.Generator().manual_seed(1), dtype=F64).abs()
V = torch.tensor([0.5, 2.0], dtype=F64)

CASES = {
    "huber": (Huber(0.7), lambda y, t: nn.functional.huber_loss(y, t, delta=0.7, reduction="none")),
    "log-cosh": (LogCosh(), lambda y, t: torch.log(torch.cosh(y - t))),
    "poisson": (
        PoissonNLL(),
        lambda y, t: nn.functional.poisson_nll_loss(y, t, log_input=True, reduction="none"),
    ),
    "poisson of a rate": (PoissonNLL(log=False), lambda y, t: y - t * torch.log(y)),
    "gaussian": (GaussianNLL(V), lambda y, t: (y - t) ** 2 / (2 * V)),
}


@pytest.mark.parametrize("name", CASES)
def test_closed_curvature_equals_automatic_differentiation(name):
    loss, function = CASES[name]
    y = Y.abs() + 0.1 if name == "poisson of a rate" else Y
    expected = torch.as_tensor(oracle.curvature(function, y, T))
    torch.testing.assert_close(loss.curvature(y, T, None), expected)
    torch.testing.assert_close(loss_for(function).curvature(y, T, None), expected)


def test_a_third_of_unit_normals_lies_in_hubers_tails():
    r = torch.randn(100_000, 1, generator=torch.Generator().manual_seed(0))
    outside = 1 - loss_for("huber").curvature(r, torch.zeros_like(r), None).mean()
    assert float(outside) == pytest.approx(0.317, abs=0.01)


def test_torch_losses_bring_their_own_curvature():
    loss = loss_for(nn.MSELoss(reduction="none"))
    assert torch.equal(loss.curvature(Y, T, None), torch.full_like(Y, 2.0))


def test_a_per_sample_sum_over_targets_keeps_each_targets_curvature():
    loss = loss_for(lambda y, t: (V * (y - t) ** 2).sum(1) / 2)
    torch.testing.assert_close(loss.curvature(Y, T, None), V.expand(50, 2))


def test_a_loss_that_couples_targets_warns_and_keeps_the_diagonal():
    loss = loss_for(lambda y, t: (y - t).sum(1) ** 2 / 2)
    with pytest.warns(UserWarning, match="couples the targets"):
        torch.testing.assert_close(loss.curvature(Y, T, None), torch.ones_like(Y))


def test_the_variance_of_a_gaussian_loss_may_come_from_the_batch(net3):
    x, y = net3.train
    variance = torch.linspace(1, 2, 300)
    loss = GaussianNLL(lambda batch: variance[: len(batch[0])])
    by_loss = rg.LastLayerRigidity(net3.model).fit([(x, y)], loss=loss).gram
    by_weight = rg.LastLayerRigidity(net3.model).fit([(x, y)], sample_weight=lambda b: 1 / variance)
    torch.testing.assert_close(by_loss.matrix, by_weight.gram.matrix)


@pytest.mark.parametrize("batch_size", [3, 6, 300])
def test_a_variance_per_target_is_never_taken_for_one_per_row(net3, batch_size):
    loss = GaussianNLL(torch.tensor([1.0, 2.0, 4.0]))
    gram = rg.LastLayerRigidity(net3.model, batch_size=batch_size).fit(net3.train, loss=loss).gram
    plain = rg.LastLayerRigidity(net3.model).fit(net3.train).gram.matrix
    torch.testing.assert_close(gram.matrix[2], plain / 4, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss", ["huber", "log-cosh"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_target_that_is_not_finite_is_refused_unless_its_weight_is_zero(net, loss, value):
    x, y = net.train[0], net.train[1].clone()
    y[:100] = value
    refused("Batch 0", rg.LastLayerRigidity(net.model).fit, (x, y), loss=loss)
    known = lambda batch: torch.isfinite(batch[1][:, 0]).double()  # noqa: E731
    masked = rg.LastLayerRigidity(net.model).fit((x, y), loss=loss, sample_weight=known)
    rest = rg.LastLayerRigidity(net.model).fit((x[100:], y[100:]), loss=loss)
    torch.testing.assert_close(masked.gram.matrix, rest.gram.matrix)


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (nn.MSELoss(reduction="mean"), "reduction='none'"),
        (nn.MSELoss(reduction="sum"), "reduction='none'"),
        (lambda y, t: ((y - t) ** 2).mean(1) / len(y), "depends on the rest of its batch"),
        (lambda y, t: torch.ones(len(y)), "through torch operations"),
    ],
    ids=["mean", "sum", "divided by the batch size", "outside torch"],
)
def test_a_loss_that_has_no_curvature_of_each_sample_is_refused_with_the_fix(loss, match):
    refused(match, loss_for(loss).curvature, Y, T, None)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"loss": lambda y, t: torch.cos(3 * (y - t))}, "negative curvature"),
        ({"loss": nn.L1Loss(reduction="none")}, "no curvature"),
        (
            {"sample_weight": lambda b: torch.full((len(b[0]),), torch.inf)},
            "weights must be finite",
        ),
    ],
    ids=["negative", "none", "infinite weight"],
)
def test_a_curvature_that_is_not_positive_and_finite_is_an_error(net, options, match):
    refused(match, rg.LastLayerRigidity(net.model).fit, net.train, **options)


def test_a_variance_that_is_not_positive_is_an_error():
    refused("above zero", GaussianNLL(0.0).curvature, Y, None, None)
