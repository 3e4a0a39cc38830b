"""The toy experiment: its fits, its error bars and its scores against formulas written out here."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.__main__ import RESULTS, main
from experiments.data.cosine import Points, Sample
from experiments.studies.toy import work
from experiments.studies.toy.work import (
    PRIOR_PRECISION,
    START,
    Model,
    fitted_cubic,
    fitted_gaussians,
    fitted_models,
    gaussians,
)

from experiments.data import cosine
from tests.support.numbers_on_pages import unsupported

pytestmark = pytest.mark.xdist_group("toy")


@pytest.fixture(scope="module")
def sample() -> Sample:
    return Sample.draw(0)


@pytest.fixture(scope="module")
def models(sample: Sample) -> list[Model]:
    return fitted_models(sample, 0)


def likeliest_scale(q: torch.Tensor, errors: torch.Tensor) -> float:
    return math.sqrt(float((errors**2 / q).mean()))


def test_a_draw_has_the_papers_inputs_and_noise() -> None:
    sample = Sample.draw(3)
    assert sample.train.x[:, 0].tolist() == [-0.8, -0.75, 0.0, 0.05, 0.07, 0.7, 0.73]
    noise = torch.cat([Sample.draw(seed).test.y - sample.test.x.cos() ** 2 for seed in range(10)])
    assert float(noise.std()) == pytest.approx(0.01, rel=0.05)
    assert not torch.equal(sample.train.y, Sample.draw(4).train.y)
    assert int((~sample.calibration.inside).sum()) == 8  # as the page says


def test_the_cubic_is_numpys_with_its_standard_errors(sample: Sample) -> None:
    x, y = sample.train.x[:, 0].numpy(), sample.train.y[:, 0].numpy()
    coefficients, unscaled = np.polyfit(x, y, 3, cov="unscaled")
    at = torch.linspace(-1.5, 1.5, 7, dtype=torch.float64)
    rows = np.vander(at.numpy(), 4)
    q = torch.as_tensor(np.einsum("ni,ij,nj->n", rows, unscaled, rows))
    model = fitted_cubic(sample)
    mean, std = model.predict(at[:, None])
    torch.testing.assert_close(mean, torch.as_tensor(np.polyval(coefficients, at.numpy())))
    torch.testing.assert_close(std, model.scale * q.sqrt(), rtol=1e-8, atol=0)
    left = y - np.polyval(coefficients, x)
    assert model.residual_scale == pytest.approx(math.sqrt((left @ left) / 3), rel=1e-8)


def test_the_gaussians_stand_at_the_minimum_of_the_loss_with_their_prior(sample: Sample) -> None:
    model = fitted_gaussians(sample)
    unfitted = gaussians(START, sample.train.x)
    mean, _ = model.predict(sample.train.x)
    error = sample.train.y[:, 0] - mean
    assert float(error.square().sum()) < 1e-3 * float(
        (sample.train.y[:, 0] - unfitted).square().sum()
    )
    assert model.ridge == PRIOR_PRECISION == pytest.approx(1e-4)
    assert model.softness is not None and model.softness < 1e-4


def test_the_gaussians_bars_are_those_of_the_hessian_with_the_prior(sample: Sample) -> None:
    """The bars of the fit are rebuilt from the parameters, which a second fit gives."""
    torch.manual_seed(0)
    x, y = sample.train.x, sample.train.y[:, 0]
    w = START.clone()
    for _ in range(5000):  # damped Gauss-Newton, in place of L-BFGS
        jacobian = torch.autograd.functional.jacobian(lambda p: gaussians(p, x), w)
        slope = jacobian.T @ (gaussians(w, x) - y) + PRIOR_PRECISION * (w - START)
        hessian = jacobian.T @ jacobian + PRIOR_PRECISION * torch.eye(6, dtype=w.dtype)
        step = torch.linalg.solve(hessian + 1e-3 * torch.eye(6, dtype=w.dtype), slope)
        w = w - step
        if float(step.norm()) < 1e-11:
            break
    at = torch.linspace(-1.2, 1.2, 5, dtype=torch.float64)[:, None]
    rows = torch.autograd.functional.jacobian(lambda p: gaussians(p, at), w)
    q = (rows @ torch.linalg.solve(hessian, rows.T)).diagonal()
    model = fitted_gaussians(sample)
    mean, std = model.predict(at)
    torch.testing.assert_close(mean, gaussians(w, at), rtol=0, atol=1e-6)
    torch.testing.assert_close(std / model.scale, q.sqrt(), rtol=1e-4, atol=0)


def test_scales_are_the_likeliest_on_the_calibration_points(sample, models) -> None:
    for model in models:
        mean, std = model.predict(sample.calibration.x)
        errors = sample.calibration.y[:, 0] - mean
        assert likeliest_scale(std.square(), errors) == pytest.approx(1, rel=1e-3), model.name


def test_the_net_is_the_same_in_both_forms_and_its_bars_differ(sample, models) -> None:
    last, every = models[2:]
    (mean, narrow), (again, wide) = last.predict(sample.test.x), every.predict(sample.test.x)
    torch.testing.assert_close(mean, again)
    assert float((narrow / wide).log().std()) > 0.01
    assert last.ridge > 0 and every.ridge > 0


def test_bars_grow_outside_the_points(sample, models) -> None:
    for model in models:
        _, std = model.predict(sample.test.x)
        inside = sample.test.inside
        assert float(std[~inside].mean()) > 1.2 * float(std[inside].mean()), model.name


def test_scores_of_a_known_bar() -> None:
    x = torch.tensor([[0.0], [0.1], [1.0], [1.2]], dtype=torch.float64)
    y = torch.tensor([[1.0], [-1.0], [2.0], [10.0]], dtype=torch.float64)
    every = Points(x, y)
    model = Model("m", lambda x: (torch.zeros(len(x)), torch.full((len(x),), 2.0)), 1.0)
    found = work.scored(replace(model, residual_scale=3.0), Sample(every, every, every))
    assert found["constant_bar"] == pytest.approx(math.sqrt(106 / 4))
    assert found["inside"]["rmse"] == 1.0
    assert found["outside"]["rigidity"]["coverage"] == 0.5
    assert found["outside"]["textbook"]["std"] == pytest.approx(3 * math.sqrt(1 + 2**2))
    assert found["inside"]["constant"]["coverage"] == 1.0


def test_summaries_have_means_standard_errors_and_medians(sample, models) -> None:
    draws = [work.scored(models[0], Sample.draw(seed)) for seed in range(3)]
    summary = work.summary(draws)
    values = torch.tensor([draw["outside"]["rigidity"]["nll"] for draw in draws])
    mean, error = summary["outside"]["rigidity"]["nll"]
    assert mean == pytest.approx(float(values.mean()), rel=1e-5)
    assert error == pytest.approx(float(values.std()) / math.sqrt(3), rel=1e-4)
    assert summary["outside"]["rigidity"]["nll_median"] == pytest.approx(float(values.median()))
    assert summary["each_draw"]["scale"] == [models[0].scale] * 3
    assert "textbook" in summary["inside"]


def test_a_quick_run_keeps_numbers_tables_and_figure(tmp_path: Path) -> None:
    assert main(["toy", "--quick", "--out", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / "toy.json").read_text())
    assert list(stored["models"]) == list(stored["figure"]["models"])
    assert len(stored["models"]) == 4
    drawn = stored["figure"]["models"]["cubic"]
    assert len(stored["figure"]["x"]) == len(drawn["mean"]) == len(drawn["std"])
    page = (tmp_path / "toy.md").read_text(encoding="utf-8")
    for model in stored["models"].values():
        mean, _ = model["outside"]["rigidity"]["coverage"]
        assert f"{mean:.2f} ±" in page
        for key, values in model["each_draw"].items():
            assert model["medians"][key] == pytest.approx(np.median(values), rel=1e-6)
    assert unsupported(page, stored) == []
    assert (tmp_path / "toy-fits.png").stat().st_size > 10_000


def test_the_committed_bars_keep_what_the_page_says() -> None:
    stored = json.loads((RESULTS / "toy/toy.json").read_text())["models"]
    for name, model in stored.items():
        outside = model["outside"]
        assert outside["rigidity"]["nll"][0] < outside["constant"]["nll"][0], name
        assert outside["constant"]["coverage"][0] < 0.75, name
        if name != "cubic":
            for region in work.REGIONS:
                assert model[region]["rigidity"]["coverage"][0] == pytest.approx(0.9, abs=0.05)
    assert stored["two Gaussians"]["draws"] >= 20
    noise = cosine.NOISE
    scale = sorted(stored["two Gaussians"]["each_draw"]["scale"])
    assert 0.5 * noise < scale[len(scale) // 2] < 1.5 * noise
