"""Which rung of the ladder is taken: by left-out rows, and by how many rows there are."""

import pytest
import torch

import rigidities as rg
from rigidities.calibration.ladder import CONSTANT, FULL, HEAD, PAPER, Ladder, best_rung
from rigidities.calibration.rows import Rows

NONE = frozenset[str]()


def scores(**means: float) -> dict[str, torch.Tensor]:
    """NLL of a hundred rows on each rung, whose differences have a spread of one."""
    spread = torch.linspace(-1, 1, 100, dtype=torch.float64)
    spread = spread / spread.std()
    rungs = {CONSTANT: 0.0, PAPER: 0.0, HEAD: 0.0, FULL: 0.0} | means
    return {name: mean + (k * spread) for k, (name, mean) in enumerate(rungs.items())}


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
    found = scores() | {FULL: torch.full((100,), torch.nan, dtype=torch.float64)}
    assert best_rung([found], NONE, 2.0) == HEAD


@pytest.mark.parametrize(("rows", "allowed"), [(10, -1), (150, 0), (225, 1), (300, 2), (9999, 2)])
def test_what_is_allowed_grows_with_the_rows_that_were_fitted_to(rows, allowed):
    one = torch.ones(rows, dtype=torch.float64)
    part = Rows(one, one, one, one[:, None], one, torch.zeros(rows, dtype=torch.bool))
    assert Ladder([part], [], []).allowed == pytest.approx(allowed)


def noise_fit(seed: int, count: int) -> tuple[rg.CalibrationReport, float]:
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
    uq = rg.LastLayerRigidity(model).fit((x[:200], y[:200]), sample=0, progress=False)
    held, fresh = slice(200, 200 + count), slice(200 + count, None)
    report = uq.calibrate((x[held], y[held]), progress=False)
    p = uq.predict(x[fresh], progress=False)
    plain = torch.distributions.Normal(p.mean, report.constant)
    return report, float((p.log_prob(y[fresh]) - plain.log_prob(y[fresh])).mean())


def test_the_gain_said_of_pure_noise_is_the_one_on_fresh_rows_and_a_warning_comes():
    found = [noise_fit(seed, 40) for seed in range(6)]
    said = sum(report.gain for report, _ in found) / len(found)
    true = sum(gain for _, gain in found) / len(found)
    assert abs(said - true) < 0.1
    assert true > -0.05
    assert sum(bool(report.useless) for report, _ in found) >= 5
