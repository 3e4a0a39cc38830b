"""Which rung of the ladder is taken: by left-out rows, and by how many rows there are."""

import pytest
import torch

import rigidities as rg
from rigidities.calibration import CalibrationReport, full
from rigidities.calibration.full import (
    CONSTANT,
    FULL,
    HEAD,
    PAPER,
    Ladder,
    LeftOutScores,
    best_rung,
)
from rigidities.calibration.gain import Gain, error_of_sum
from tests.support.slow_auto import target_view

NONE = frozenset[str]()


def scores(**means: float) -> LeftOutScores:
    """NLL of a hundred rows on each rung, whose differences have a spread of one."""
    spread = torch.linspace(-1, 1, 100, dtype=torch.float64)
    spread = spread / spread.std()
    rungs = {CONSTANT: 0.0, PAPER: 0.0, HEAD: 0.0, FULL: 0.0} | means
    nll = {name: mean + (k * spread) for k, (name, mean) in enumerate(rungs.items())}
    return LeftOutScores(nll, torch.arange(100), torch.arange(100) % 5)


def test_of_many_rows_the_richest_rung_is_taken_unless_it_is_clearly_worse():
    assert best_rung([scores(full=0.1)], NONE, 2.0) == FULL  # its standard errors are 0.1 to 0.3
    assert best_rung([scores(full=0.21)], NONE, 2.0) == HEAD
    everything = dict.fromkeys((PAPER, HEAD, FULL), 1.0)
    assert best_rung([scores(**everything)], NONE, 2.0) == CONSTANT


def test_of_few_rows_a_richer_rung_must_be_better_than_every_simpler_one():
    assert best_rung([scores()], NONE, -1.0) == CONSTANT
    assert best_rung([scores(full=-0.25)], NONE, -1.0) == CONSTANT
    assert best_rung([scores(full=-0.35)], NONE, -1.0) == FULL
    assert best_rung([scores(paper=-0.35, full=-0.35)], NONE, -1.0) == PAPER


def test_a_barred_rung_is_neither_taken_nor_compared_with():
    found = scores(paper=-5.0, full=0.0)
    assert best_rung([found], NONE, 0.0) == PAPER
    assert best_rung([found], frozenset({PAPER}), 0.0) == FULL


def test_not_a_number_is_never_taken():
    found = scores(full=torch.nan)
    assert best_rung([found], NONE, 2.0) == HEAD


def test_errors_of_targets_add_up_on_the_same_rows_and_by_squares_on_others():
    values = [torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]), torch.tensor([0.0, 4.0])]
    each = [float(one.std()) / 2**0.5 for one in values]
    assert error_of_sum(values) == pytest.approx(sum(each))
    expected = ((each[0] + each[2]) ** 2 + each[1] ** 2) ** 0.5
    assert error_of_sum(values, [3, 1, 3]) == pytest.approx(expected)
    gains = [one.repeat(2) for one in values]
    assert Gain.of(gains, [3, 1, 3]).error == pytest.approx(error_of_sum(gains, [3, 1, 3]) / 3)


def many_targets(count: int, rows: int, masked: bool = False) -> rg.LastLayerRigidity:
    """A linear model of that many targets, calibrated on as many rows.

    With `masked` a few rows do not count for the first target.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * rows, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(len(x), count, generator=generator, dtype=torch.float64)
    y = x[:, :1] + (0.2 + x[:, 1:2].abs()) * noise
    model = torch.nn.Linear(3, count).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x[:rows], y[:rows]).solution.mT)
        model.bias.zero_()

    def weight(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        found = torch.ones_like(batch[1])
        found[batch[0][:, 0] > 2.5, 0] = 0.0
        return found

    options = {"sample_weight": weight} if masked else {}
    uq = rg.LastLayerRigidity(model).fit((x[:rows], y[:rows]), **options)
    uq.calibrate((x[rows:], y[rows:]))
    return uq


@pytest.mark.thorough
def test_of_many_targets_each_is_judged_on_one_fold_and_the_bars_are_the_same(monkeypatch):
    found = many_targets(6, 1000)
    monkeypatch.setattr(full, "ENOUGH", 10**9)  # on all folds, as one target is
    every = many_targets(6, 1000)
    assert found.calibration_report.rung == every.calibration_report.rung == FULL
    assert found.calibration_report.gain == pytest.approx(every.calibration_report.gain, abs=0.05)
    assert found.calibration_report.gain_error < 2 * every.calibration_report.gain_error
    torch.testing.assert_close(found.calibration.scale, every.calibration.scale)


@pytest.mark.thorough
def test_many_targets_take_few_fits_more_than_one(monkeypatch):
    """Of six targets with enough rows each is fitted twice, not six times."""
    fits = []
    own = full.rung_fits
    monkeypatch.setattr(full, "rung_fits", lambda *a, **k: fits.append(1) or own(*a, **k))
    many_targets(6, 1000)
    assert len(fits) == 12
    fits.clear()
    many_targets(6, 999)
    assert len(fits) == 36
    fits.clear()
    many_targets(6, 1100, masked=True)  # folds of other rows would be no folds of the same
    assert len(fits) == 36


@pytest.mark.parametrize(("rows", "allowed"), [(10, -1), (150, 0), (225, 1), (300, 2), (9999, 2)])
def test_what_is_allowed_grows_with_the_rows_that_were_fitted_to(rows, allowed):
    one = torch.ones(rows, dtype=torch.float64)
    part = target_view(one, one, one, one[:, None], one, torch.zeros(rows, dtype=torch.bool))
    assert Ladder([part], [], []).allowed == pytest.approx(allowed)


def noise_fit(seed: int, count: int) -> tuple[CalibrationReport, float]:
    """The report of a net of pure noise, calibrated on few rows alone; its gain on fresh rows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200 + count + 2000, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(len(x), 1, generator=generator, dtype=torch.float64)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1)
    ).double()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
        features = model[1](model[0](x[:200]))
        ridge = features.mT @ features + torch.eye(30, dtype=torch.float64)
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
    found = [noise_fit(seed, 40) for seed in range(6)]
    said = sum(report.gain for report, _ in found) / len(found)
    true = sum(gain for _, gain in found) / len(found)
    assert abs(said - true) < 0.1
    assert true > -0.05
    assert sum(bool(report.useless) for report, _ in found) >= 5
