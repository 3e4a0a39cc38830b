"""What a calibration says of its own rows: fifths with wrong bars, no noise, rows seen before."""

import pytest
import torch
from torch import Tensor, nn

import rigidities as rg
from rigidities.calibration.methods import Paper

Data = tuple[Tensor, Tensor]


def data(rows: int, growth: float = 0.0, seed: int = 0) -> Data:
    """y = 2 x with a noise that grows with x."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(rows, 1, generator=generator, dtype=torch.float64) - 1
    return x, 2 * x + 0.1 * (growth * x).exp() * torch.randn(x.shape, generator=generator).double()


def fitted(train: Data, *, bias: bool = True) -> rg.LastLayerRigidity:
    """Error bars of the line itself."""
    model = nn.Linear(1, 1, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(2.0)
        if bias:
            model.bias.fill_(0.0)
    return rg.LastLayerRigidity(model).fit(train)


def test_the_report_names_fifths_with_wrong_bars_and_what_helps() -> None:
    valid = data(2000, growth=1.5, seed=1)
    uq = fitted(data(300, growth=1.5))
    said = str(uq.calibrate(valid, method=Paper(noise="constant")).calibration_report)
    assert "  ! In the highest fifth of the predictions (from 1.2" in said
    assert "too narrow there" in said
    assert "calibrate(x, y, method=rg.Full()) the bars follow the inputs" in said
    assert "fifth of" not in str(uq.calibrate(valid).calibration_report)


def test_right_bars_are_not_called_uneven() -> None:
    said = str(
        fitted(data(300))
        .calibrate(data(2000, seed=1), method=Paper(noise="constant"))
        .calibration_report
    )
    assert "fifth of" not in said
    assert "practically zero" not in said


def test_any_regressor_says_so_too() -> None:
    def line(parameters: Tensor, x: Tensor) -> Tensor:
        return x[:, 0] * parameters[0] + parameters[1]

    (x, y), (held, target) = data(300, growth=1.5), data(2000, growth=1.5, seed=1)
    pr = rg.PredictionRigidity(line, torch.tensor([2.0, 0.0], dtype=torch.float64)).fit(x, y[:, 0])
    said = str(pr.calibrate(held, target[:, 0], method=Paper(noise="constant")).calibration_report)
    assert "In the highest fifth of the predictions" in said
    assert "GaussianNLL" in said


def test_a_noise_of_zero_is_said() -> None:
    x, _ = data(600)
    slopes = 2 + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).double()
    both = x, slopes * x  # all that is wrong is the slope, as bars without noise have it
    report = (
        fitted((x[:300], both[1][:300]), bias=False)
        .calibrate((x[300:], both[1][300:]), method=Paper(noise="constant"))
        .calibration_report
    )
    assert "The fitted noise is practically zero" in str(report)


def test_without_noise_the_report_says_what_the_scale_includes() -> None:
    said = str(fitted(data(300)).calibrate(data(400, seed=1), method="paper").calibration_report)
    assert "none: the scale includes the noise" in said


def test_rows_seen_before_are_warned_of_once_and_only_where_they_matter() -> None:
    train, valid = data(300), data(400, seed=1)
    few, many = (
        tuple(torch.cat([old[count:], new[:count]]) for old, new in zip(valid, train, strict=True))
        for count in (2, 40)
    )
    uq = fitted(train)
    report = uq.calibrate(few, method="paper").calibration_report  # warnings are errors here
    assert report.duplicates == 2
    assert report.repeated == []
    with pytest.warns(UserWarning, match=r"40 of 400 .* \(10 %\).* by up to 5.13 %") as warned:
        report = uq.calibrate(many, method="paper").calibration_report
    assert len(warned) == 1
    assert str(report).count("40 of 400") == 1
    assert "  ! 40 of 400 calibration rows are also in the training data" in str(report)
    assert "are also in the training data" in report.warnings[0]


def test_of_many_flattened_outputs_all_are_looked_at() -> None:
    def two(w: Tensor, x: Tensor) -> Tensor:
        return torch.cat([x * w[0], 5 + x * w[1]], 1)

    generator, w = torch.Generator().manual_seed(0), torch.ones(2, dtype=torch.float64)
    x = 2 * torch.rand(9000, 1, generator=generator, dtype=torch.float64) - 1
    z = torch.randn(9000, 2, generator=generator, dtype=torch.float64)
    y = two(w, x) + z * torch.tensor([0.1, 0.25])
    pr = rg.PredictionRigidity(two, w).fit(x[:200], y[:200])
    report = pr.calibrate(x, y, method=Paper(noise="constant")).calibration_report
    assert "In the highest fifth of the predictions" in str(report)  # the second output's
    assert report.remedy("uneven").startswith("Use a noise")
    assert "features" not in str(report)
