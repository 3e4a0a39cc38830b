"""What rows show under a distribution, by SciPy; and the gain over one constant bar."""

import numpy as np
import pytest
import torch
from scipy import stats

from rigidities.calibration.gain import Gain, constant_nll, error_of_sum, folds, row_nll
from rigidities.prediction.distribution import Gaussian
from rigidities.prediction.mixture import Mixture
from tests.support.tensors import close, normal

F64 = torch.float64
SHARE, OFFSET, WIDTH = np.array([0.3, 0.7]), np.array([-0.4, 0.9]), np.array([0.5, 1.4])
MIXTURE = Mixture(*(torch.from_numpy(part) for part in (np.log(SHARE), OFFSET, np.log(WIDTH))))
RESIDUAL = torch.tensor([-40.0, -1.3, 0.0, 0.4, 2.5, 40.0], dtype=F64)
SIDE = torch.tensor([0.0, -1, 1, 0, 1, -1], dtype=F64)


def scipys(name: str, residual: np.ndarray, scale: float) -> np.ndarray:
    """A density or a probability of the mixture, stretched by a scale."""
    t4 = stats.t(4, loc=OFFSET * scale, scale=WIDTH * scale)
    value: np.ndarray = getattr(t4, name)(residual[:, None]) @ SHARE
    return value


@pytest.mark.parametrize("step", [0.0, 0.8])
@pytest.mark.parametrize("bounds", [False, True], ids=["inside", "at bounds"])
def test_a_row_shows_a_density_a_cell_or_the_mass_beyond_a_bound(step, bounds):
    scale, r = 1.7, RESIDUAL.numpy()
    shown = scipys("pdf", r, scale)
    if step:
        below = scipys("cdf", r + step / 2, scale) - scipys("cdf", r - step / 2, scale)
        above = scipys("sf", r - step / 2, scale) - scipys("sf", r + step / 2, scale)
        shown = np.where(r > 0, above, below)
    if bounds:
        beyond = np.where(SIDE < 0, scipys("cdf", r, scale), scipys("sf", r, scale))
        shown = np.where(SIDE == 0, shown, beyond)
    s2 = torch.tensor(scale**2, dtype=F64)
    found = row_nll(MIXTURE, RESIDUAL, s2, SIDE if bounds else None, step)
    np.testing.assert_allclose(found, -np.log(shown), rtol=1e-8)


def test_a_fine_grid_shows_the_density_times_its_step():
    s2, step = torch.tensor(1.7, dtype=F64), 1e-3
    cells = row_nll(MIXTURE, RESIDUAL[1:5], s2, None, step)
    close(cells, row_nll(MIXTURE, RESIDUAL[1:5], s2) - np.log(step), 1e-5)


@pytest.mark.parametrize("step", [0.0, 0.5])
def test_the_constant_bar_is_the_root_mean_square_of_the_other_folds(step):
    error, sample = normal(23), torch.arange(23) // 2
    fold = folds(23, sample=sample)
    found = constant_nll(error, None, sample, step)
    for k in range(23):
        s = float(error[fold != fold[k]].square().mean().sqrt())
        r = float(error[k])
        shown = stats.norm.pdf(r, scale=s)
        if step:
            shown = stats.norm.cdf(r + step / 2, scale=s) - stats.norm.cdf(r - step / 2, scale=s)
        assert float(found[k]) == pytest.approx(-np.log(shown), rel=1e-9)


def test_errors_of_targets_add_up():
    values = [torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]), torch.tensor([0.0, 4.0])]
    each = [float(target.std()) / 2**0.5 for target in values]
    assert error_of_sum(values) == pytest.approx(sum(each))
    gain = Gain.of([target.repeat(2) for target in values])
    assert gain.error == pytest.approx(error_of_sum([v.repeat(2) for v in values]) / 3)


def test_the_row_that_moves_a_gain_most_is_left_out_of_it():
    first, second = normal(30), normal(40, seed=1)
    first[7] = 50.0
    gain = Gain.of([first, second])
    assert gain.mean == pytest.approx(float(first.mean() + second.mean()) / 2)
    others = torch.cat([first[:7], first[8:]])
    assert gain.without == pytest.approx(float(others.mean() + second.mean()) / 2)


def test_too_few_rows_have_no_gain():
    assert np.isnan(Gain.of([torch.zeros(0), normal(9)]).mean)


def test_a_gaussian_row_shows_its_density():
    s2 = 0.1 + normal(5).square()
    expected = -stats.norm.logpdf(RESIDUAL[:5].numpy(), scale=s2.sqrt().numpy())
    np.testing.assert_allclose(row_nll(Gaussian(), RESIDUAL[:5], s2), expected, rtol=1e-10)
