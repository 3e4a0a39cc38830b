"""Corners of the default calibration: masks, offsets, known noise, rows of no features."""

import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.prediction.law import StudentT, Tilted

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
    report = uq.calibrate(valid)
    known = seen(valid) > 0
    each = -uq.predict(valid[0]).log_prob(valid[1])
    own = torch.stack([each[known[:, k], k].mean() for k in range(2)]).mean()
    assert float(own) == pytest.approx(report.nll, rel=1e-5)


def test_a_far_offset_of_the_targets_is_no_grid():
    near, far = (fitted(offset=b) for b in (0.0, 1e5))
    laws = [
        uq.calibrate(rows(300, 1, offset=b)).calibration.law for uq, b in ((near, 0.0), (far, 1e5))
    ]
    assert all(isinstance(law, Tilted) for law in laws)
    assert laws[0].df == pytest.approx(laws[1].df, rel=1e-2)


def test_a_known_noise_serves_the_likelihood_too():
    uq = fitted()
    uq.calibrate(rows(300, 1), noise=lambda b: (0.2 + 0.3 * b[0][:, 0].abs()) ** 2, criterion="nll")
    x = rows(5, 2)[0]
    p = uq.predict((x,))
    shape = (0.2 + 0.3 * x[:, :1].abs()) ** 2
    torch.testing.assert_close(p.noise, uq.noise.level * shape)


def test_a_law_with_settings_of_its_own_is_refused():
    with pytest.raises(ValueError, match="finds the law's settings itself"):
        fitted().calibrate(rows(50, 1), law=StudentT(4.0))


def test_without_training_rows_the_likelihood_alone_sets_the_scale():
    uq = fitted(sample=0)
    found = uq.calibrate(rows(300, 1)).calibration
    alone = torch.maximum(found.head.scale2.sqrt(), found.joint)
    torch.testing.assert_close(found.scale, alone)


def test_rows_whose_features_are_all_zero_get_finite_bars():
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1, bias=False)).double()
    with torch.no_grad():
        model[0].bias.fill_(-1.0)
    x, y = rows(400, 0)
    uq = rg.LastLayerRigidity(model).fit((x, y))
    uq.calibrate(rows(300, 1))
    p = uq.predict(torch.zeros(2, 3, dtype=F64))
    assert bool(p.std.isfinite().all()) and bool((p.std > 0).all())
