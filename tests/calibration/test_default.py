"""The default calibration as a user sees it: stable, honest about its gain, and on coarse grids."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import rigidities as rg
from rigidities.calibration import CalibrationReport, target_fit
from tests.support.density_rows import skewed_draws

F64 = torch.float64
Data = tuple[Tensor, Tensor]


class Task(NamedTuple):
    model: nn.Module
    train: Data
    valid: Data
    test: Data


def task(
    train: int,
    valid: int,
    *,
    seed: int = 0,
    test: int = 1000,
    noise: float = 0.3,
    unit: float = 1.0,
    rounded: Callable[[Tensor], Tensor] = torch.clone,
    dtype: torch.dtype = F64,
) -> Task:
    """A net with the best last layer, on skewed targets whose spread follows the second input.

    Args:
        train: Number of training rows.
        valid: Number of validation rows.
        seed: Of the draws.
        test: Number of new rows.
        noise: Spread of the noise.
        unit: Factor of the targets.
        rounded: What happens to the targets at last, before the net is fitted.
        dtype: Precision of net and data.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = train + valid + test
    x = torch.randn(rows, 4, generator=generator, dtype=F64)
    spread = noise * (0.5 + 2 * (1.5 * x[:, 1]).sigmoid())
    y = x[:, :1].sin() + (spread * skewed_draws(rows, generator))[:, None]
    y = rounded(unit * y)
    model = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 1)).double()
    with torch.no_grad():
        for tensor in model[0].parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=F64))
        hidden = torch.cat([model[:2](x[:train]), torch.ones(train, 1, dtype=F64)], 1)
        penalty = torch.full((25,), 0.1, dtype=F64)
        penalty[-1] = 0.0  # on a far offset
        gram = hidden.mT @ hidden + penalty.diag()
        centre = y[:train].mean()
        solution = torch.linalg.solve(gram, hidden.mT @ (y[:train] - centre))
        model[2].weight.copy_(solution[:-1].mT)
        model[2].bias.copy_(solution[-1] + centre)
    parts = [(a.to(dtype), b.to(dtype)) for a, b in _split(x, y, train, valid)]
    return Task(model.to(dtype), *parts)


def _split(x: Tensor, y: Tensor, train: int, valid: int) -> list[Data]:
    sizes = [train, valid, len(x) - train - valid]
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits of few rows take few steps, which is enough where the end of a path says no more."""
    monkeypatch.setattr(target_fit, "FEW_STEPS", 60)


def calibrated(given: Task, *, batch_size: int = 512) -> rg.LastLayerRigidity:
    uq = rg.LastLayerRigidity(given.model, batch_size=batch_size).fit(given.train)
    return uq.calibrate(given.valid, early_stopped=False)


def coverage(uq: rg.LastLayerRigidity, given: Task) -> float:
    x, y = given.test
    low, high = uq.predict(x).interval(0.9)
    return float(((low <= y) & (y <= high)).double().mean())


# --- stability ----------------------------------------------------------------------------------


def shaken(rows: Data, generator: torch.Generator) -> Data:
    """The rows in another order, with noise in the last bits of their inputs."""
    x, y = rows
    order = torch.randperm(len(x), generator=generator)
    noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return (x * (1 + torch.finfo(x.dtype).eps * noise))[order], y[order]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("train", "valid"), [(500, 500), (3200, 800)], ids=["1,000 rows", "4,000 rows"]
)
@pytest.mark.parametrize("unit", [1.0, 3.0], ids=["continuous", "whole numbers"])
def test_bars_hardly_depend_on_order_batches_and_last_bits(train, valid, unit):
    """In single precision: bars move by 1 % in the median and by 5 % at most."""
    rounded = torch.clone if unit == 1 else torch.round
    given = task(train, valid, unit=unit, rounded=rounded, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    other = given._replace(
        train=shaken(given.train, generator), valid=shaken(given.valid, generator)
    )
    x, _ = given.test
    first = calibrated(given)
    assert first.calibration_report.varies  # else this would be no test
    bars = [uq.predict(x).std for uq in (first, calibrated(other, batch_size=70))]
    move = (bars[1] / bars[0] - 1).abs()
    assert float(move.median()) < 0.01
    assert float(move.max()) < 0.05


@pytest.mark.usefixtures("brief")
def test_the_order_of_rows_does_not_matter_where_few_of_them_give_the_directions(monkeypatch):
    monkeypatch.setattr(target_fit, "EXACT", 16)
    monkeypatch.setattr(target_fit, "DIRECTION_ROWS", 50)
    given = task(300, 100)
    generator = torch.Generator().manual_seed(1)
    bars = []
    for order in (torch.arange(300), torch.randperm(300, generator=generator)):
        uq = rg.LastLayerRigidity(given.model).fit(given.train, keep_rows=0)
        train = tuple(column[order] for column in given.train)
        uq.calibrate(given.valid, train=train, early_stopped=False)
        bars.append(uq.predict(given.test[0]).std)
    assert float((bars[1] / bars[0] - 1).abs().max()) < 1e-3


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_few_rows_have_the_same_bars_in_another_order(dtype):
    given = task(60, 40, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    other = given._replace(
        train=shaken(given.train, generator), valid=shaken(given.valid, generator)
    )
    x, _ = given.test
    bars = [
        calibrated(one, batch_size=size).predict(x).std for one, size in ((given, 512), (other, 7))
    ]
    assert float((bars[1] / bars[0] - 1).abs().max()) < 0.01


# --- targets on a grid --------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [2.0, 4.0], ids=["coarse", "finer"])
@pytest.mark.parametrize("valid", [300, pytest.param(2000, marks=pytest.mark.thorough)])
def test_intervals_for_whole_numbers_hold_and_the_report_says_that_they_are_a_grid(unit, valid):
    given = task(1200, valid, unit=unit, rounded=torch.round, test=3000)
    uq = calibrated(given)
    assert "The targets lie on a grid" in str(uq.calibration_report)
    assert 0.85 < coverage(uq, given) < 0.97
    x, y = given.test
    p = uq.predict(x)
    # Bars are those of the errors, and nobody takes the grid for knowledge: no spikes at it.
    assert float(p.std.square().mean()) == pytest.approx(
        float((p.mean - y).square().mean()), rel=0.3
    )
    beside = p.log_prob(y) - p.log_prob(y + 0.5 * (p.mean - y).sign())
    assert float(beside.mean()) < 0.7  # nats for half a step


@pytest.mark.usefixtures("brief")
@pytest.mark.usefixtures("brief")
def test_a_grid_is_noticed_without_validation_rows_too():
    given = task(1200, 0, unit=2.0, rounded=torch.round)
    uq = rg.LastLayerRigidity(given.model).fit(given.train).calibrate()
    assert "The targets lie on a grid" in str(uq.calibration_report)
    assert abs(uq.calibration_report.gain) < 0.5  # that of spikes would be above one


@pytest.mark.usefixtures("brief")
def test_the_constant_bar_of_a_report_has_the_scores_of_the_same_rows():
    """Of cells of a grid as well: the probabilities of both, and not a density of one."""
    given = task(300, 200, unit=2.0, rounded=torch.round)
    report = calibrated(given).calibration_report
    assert report.nll_constant - report.nll == pytest.approx(report.gain, abs=1e-12)


@pytest.mark.usefixtures("brief")
def test_training_rows_without_optimism_count_as_new_rows():
    given = task(300, 60)
    uq = rg.LastLayerRigidity(given.model).fit(given.train)
    bars = []
    for optimism in (True, False):
        uq.calibrate(given.valid, method=rg.Full(optimism=optimism), early_stopped=False)
        bars.append(uq.predict(given.test[0]).std)
    assert not torch.allclose(*bars, rtol=1e-3)
    # All rows are new, as if all had been passed as validation rows that the fit has left out.
    assert float((bars[1] / bars[0]).median()) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("offset", [1e6, 1e7])
def test_a_far_offset_is_no_grid_and_changes_no_bar(offset):
    plain = task(200, 200)
    moved = task(200, 200, rounded=lambda y: y + offset)
    uq, other = calibrated(plain), calibrated(moved)
    assert "grid" not in str(other.calibration_report)
    x, _ = plain.test
    bars, others = uq.predict(x).std, other.predict(x).std
    torch.testing.assert_close(others, bars, rtol=0.02, atol=0)
    assert coverage(other, moved) == pytest.approx(coverage(uq, plain), abs=0.01)


# --- what the report claims ---------------------------------------------------------------------


@pytest.mark.thorough
def test_the_gain_is_that_on_new_rows():
    given = task(400, 400, test=4000)
    uq = calibrated(given)
    report = uq.calibration_report
    x, y = given.test
    p = uq.predict(x)
    plain = torch.distributions.Normal(p.mean, report.constant)
    true = float((p.log_prob(y) - plain.log_prob(y)).mean())
    assert true > 0.1 and report.useless == ""
    assert report.gain == pytest.approx(true, abs=3 * report.gain_error)
    assert report.nll == pytest.approx(-float(p.log_prob(y).mean()), abs=0.15)
    assert "the inputs, after" in str(report) and "chosen on left-out rows" in str(report)


def noise_fit(seed: int, count: int) -> tuple[CalibrationReport, float]:
    """The report of a net of pure noise, calibrated on few rows alone; its gain on fresh rows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200 + count + 2000, 4, generator=generator, dtype=F64)
    y = torch.randn(len(x), 1, generator=generator, dtype=F64)
    model = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=F64))
        features = model[1](model[0](x[:200]))
        ridge = features.mT @ features + torch.eye(30, dtype=F64)
        model[2].weight.copy_(torch.linalg.solve(ridge, features.mT @ y[:200]).mT)
        model[2].bias.zero_()
    uq = rg.LastLayerRigidity(model).fit((x[:200], y[:200]), keep_rows=0)
    held, fresh = slice(200, 200 + count), slice(200 + count, None)
    report = uq.calibrate((x[held], y[held])).calibration_report
    p = uq.predict(x[fresh])
    plain = torch.distributions.Normal(p.mean, report.constant)
    return report, float((p.log_prob(y[fresh]) - plain.log_prob(y[fresh])).mean())


@pytest.mark.thorough
def test_the_gain_said_of_pure_noise_is_the_one_on_fresh_rows_and_a_warning_comes():
    found = [noise_fit(seed, 40) for seed in range(4)]
    said = sum(report.gain for report, _ in found) / len(found)
    true = sum(gain for _, gain in found) / len(found)
    assert abs(said - true) < 0.2
    assert true > -0.2
    assert sum(bool(report.useless) for report, _ in found) >= 3


def given_noise(batch: Tensor | Data) -> Tensor:
    x = batch if isinstance(batch, Tensor) else batch[0]
    return 0.1 + 0 * x[:, :1]


@pytest.mark.usefixtures("brief")
def test_the_report_says_what_the_bars_follow_and_why():
    given = task(100, 60)
    uq = calibrated(given)
    constant = uq.calibrate(given.valid, method=rg.Full(noise="constant")).calibration_report
    assert constant.steps == [0] and not constant.varies
    assert "follows         q alone, with one noise for all rows" in str(constant)
    assert "nearly one constant bar" in constant.useless
    assert "not shown" not in constant.useless  # nothing else was tried
    better = replace(constant, gain=0.5, gain_error=0.1, gain_without=0.5)
    assert not better.useless  # bars that follow q alone may be much better than one bar
    assert "method=rg.Full()) the bars follow" in constant.remedy("uneven")

    known = uq.calibrate(given.valid, method=rg.Full(noise=given_noise)).calibration_report
    assert known.varies and "follows         q and the given noise" in str(known)

    few = given._replace(valid=(given.valid[0][:2], given.valid[1][:2]))
    with pytest.warns(UserWarning, match="only 2 held-out rows"):
        report = calibrated(few).calibration_report
    assert "too few to choose more" in str(report)
    assert 'method "full" (NLL' in str(report) and "cross-validated" not in str(report)

    flat = replace(uq.calibrate(given.valid).calibration_report, steps=[0], gain=0.0)
    assert "no step towards the inputs was shown to be better" in str(flat)
    assert "not shown to be better on these rows. Calibrate on more rows." in flat.useless
    assert "groups" in flat.remedy("uneven")
