"""Corners of the default calibration: masks, offsets, known noise, rows of no features."""

import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.prediction.mixture import Mixture
from tests.support.refusals import refused

F64 = torch.float64


def rows(n: int, seed: int, targets: int = 1, offset: float = 0.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=F64)
    noise = torch.randn(n, targets, generator=generator, dtype=F64)
    y = offset + x.sum(1, keepdim=True) + (0.2 + 0.3 * x[:, :1].abs()) * noise
    return x, y


def fitted(targets: int = 1, offset: float = 0.0, **options):
    model = nn.Linear(3, targets, dtype=F64)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(offset)
    return rg.LastLayerRigidity(model).fit(rows(400, 0, targets, offset), **options)


def test_masked_targets_share_one_standardisation_of_their_features():
    def seen(b):
        return torch.cat([torch.ones(len(b[0]), 1), (b[0][:, :1] > -0.5)], 1).to(F64)

    model = fitted(2).model
    uq = rg.LastLayerRigidity(model).fit(rows(400, 0, 2), sample_weight=seen)
    valid = rows(300, 1, 2)
    report = uq.calibrate(valid).calibration_report
    known = seen(valid) > 0
    each = -uq.predict(valid[0]).log_prob(valid[1])
    own = torch.stack([each[known[:, k], k].mean() for k in range(2)]).mean()
    # these rows choose the step and the level; the report judges by rows that were left out
    assert report.nll - 0.3 < float(own) < report.nll + 0.02


def test_a_far_offset_of_the_targets_is_no_grid():
    near, far = (fitted(offset=b) for b in (0.0, 1e5))
    x = rows(50, 2)[0]
    bars = []
    for uq, offset in ((near, 0.0), (far, 1e5)):
        uq.calibrate(rows(300, 1, offset=offset))
        assert "grid" not in str(uq.calibration_report)
        bars.append(uq.predict(x).std)
    torch.testing.assert_close(bars[1], bars[0], rtol=1e-3, atol=0)


def test_a_known_noise_serves_the_likelihood_too():
    uq = fitted()
    uq.calibrate(rows(300, 1), method=rg.Paper(noise=lambda b: (0.2 + 0.3 * b[0][:, 0].abs()) ** 2))
    x = rows(5, 2)[0]
    p = uq.predict((x,))
    shape = (0.2 + 0.3 * x[:, :1].abs()) ** 2
    torch.testing.assert_close(p.noise, uq.noise_model.level * shape)


def test_the_distribution_of_the_full_model_is_its_own():
    with pytest.raises(TypeError, match="distribution"):
        rg.Full(distribution="gaussian")
    refused("fitted by Full", rg.Paper, distribution=Mixture)


def test_without_training_rows_the_likelihood_alone_sets_the_scale():
    uq = fitted(keep_rows=0)
    calibration = uq.calibrate(rows(300, 1)).calibration
    head = calibration.head
    rate = head.scale2 * Mixture.of_shape(head.usual[:, 1:]).second
    expected = torch.maximum(rate.sqrt(), calibration.joint)
    torch.testing.assert_close(calibration.scale, expected)


def test_rows_whose_features_are_all_zero_get_finite_bars():
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1, bias=False)).double()
    with torch.no_grad():
        model[0].bias.fill_(-1.0)
    x, y = rows(400, 0)
    uq = rg.LastLayerRigidity(model).fit((x, y))
    uq.calibrate(rows(300, 1))
    p = uq.predict(torch.zeros(2, 3, dtype=F64))
    assert bool(p.std.isfinite().all()) and bool((p.std > 0).all())


class SumOfSet(nn.Module):
    """A sum over those of four members that there are, maybe none: x (n, 4, 3 + 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 12, dtype=F64), nn.Tanh())
        self.head = nn.Linear(12, 1, dtype=F64)

    def forward(self, x):
        return (self.head(self.body(x[..., :3])) * x[..., 3:]).sum(1)


def sets_of_members(n: int, seed: int, model: nn.Module):
    """Targets are the model's own plus noise; a third of the sets are empty."""
    generator = torch.Generator().manual_seed(seed)
    members = torch.randn(n, 4, 3, generator=generator, dtype=F64)
    there = torch.rand(n, 4, 1, generator=generator, dtype=F64) < 0.25
    x = torch.cat([members, there], -1)
    noise = 0.1 * torch.randn(n, 1, generator=generator, dtype=F64)
    return x, model(x).detach() + noise


@pytest.mark.thorough
def test_empty_sets_get_the_noise_and_leave_the_guard_alone():
    torch.manual_seed(0)
    model = SumOfSet()
    train, valid, test = (sets_of_members(n, n, model) for n in (600, 300, 500))
    uq = rg.LastLayerRigidity(model).fit(train)
    uq.calibrate(valid)
    p = uq.predict(test[0])
    empty = p.rigidity.isinf()
    assert 0.2 < float(empty.double().mean()) < 0.5
    assert 0.07 < float(p.std[empty].min()) <= float(p.std[empty].max()) < 0.15
    assert float(p.std.max()) < 0.5
    mean, std = uq.freeze()(test[0])
    torch.testing.assert_close(mean, p.mean)
    torch.testing.assert_close(std, p.std)
    # without the empty sets the guard is the same
    some = [(x[f], y[f]) for x, y in (train, valid) for f in [(x[..., 3] > 0).any(1)]]
    alone = rg.LastLayerRigidity(model).fit(some[0])
    alone.calibrate(some[1], method=rg.Full(ridge=uq.ridge))
    torch.testing.assert_close(
        uq.calibration.guard.reference, alone.calibration.guard.reference, rtol=1e-6, atol=0
    )


def test_a_final_relu_does_not_explode_the_bars():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    model = nn.Sequential(*body, nn.ReLU())
    parts = []
    for seed, n in enumerate((600, 300, 500)):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 3, generator=generator, dtype=F64)
        noise = 0.1 * torch.randn(n, 1, generator=generator, dtype=F64)
        parts.append((x, model(x).detach() + noise))
    uq = rg.LastLayerRigidity(model)
    with pytest.warns(UserWarning, match="nonlinear"):
        uq.fit(parts[0])
    uq.calibrate(parts[1])
    p = uq.predict(parts[2][0])
    assert bool(p.rigidity.isinf().any())
    assert float(p.std.max()) < 1
    assert 0.08 < float(p.std[p.rigidity.isinf()].median()) < 0.13


@pytest.mark.parametrize("noise", ["features", "constant"])
def test_one_outlier_of_any_size_is_bounded_and_named(noise):
    uq, (x, y) = fitted(), rows(200, 1)
    test = rows(400, 2)
    uq.calibrate((x, y), method=rg.Full(noise=noise))
    before = uq.predict(test[0]).std.square().mean().sqrt()
    for size in (1e3, 1e6, 1e30):
        wild = y.clone()
        wild[17] += size
        report = uq.calibrate((x, wild), method=rg.Full(noise=noise)).calibration_report
        after = uq.predict(test[0]).std.square().mean().sqrt()
        assert 0.8 < float(after / before) < 1.3
        assert any("17 (residual" in said for said in report.remarks)


def test_copies_of_one_row_are_refused_and_of_a_few_named():
    uq, (x, y) = fitted(), rows(100, 1)
    uq.calibrate((x, y))
    kept = uq.calibration
    with pytest.raises(ValueError, match="All 100 rows are copies of one"):
        uq.calibrate((x[:1].expand(100, -1), y[:1].expand(100, -1)))
    assert uq.calibration is kept
    few = torch.arange(100) % 7
    with pytest.warns(UserWarning, match="Only 7 of 100 calibration rows are distinct"):
        report = uq.calibrate((x[few], y[few])).calibration_report
    assert any("Only 7 of 100" in said for said in report.remarks)
    half = torch.arange(100) % 50
    assert any(
        "Only 50 of 100" in said
        for said in uq.calibrate((x[half], y[half])).calibration_report.remarks
    )
