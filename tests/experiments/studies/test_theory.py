"""The theory experiments at tiny sizes: the right numbers, and pages that can be written."""

import math
import re
import typing

import matplotlib
import pytest
import torch
from experiments.frame.outcome import Table, plain
from experiments.frame.report import checked_png
from experiments.studies.theory import nets
from experiments.studies.theory import run as theory
from experiments.studies.theory.bayesian import work as bayesian
from experiments.studies.theory.proportional import work as proportional
from experiments.studies.theory.rows import work as rows
from experiments.studies.theory.stopping import work as stopping
from experiments.studies.theory.training import work as training
from experiments.studies.theory.width import work as width

from experiments.frame import figures
from rigidities.theory.kernels import FullyConnected
from tests.support.numbers_on_pages import table_rows, unsupported

F64 = torch.float64


def check_page(name, numbers):
    """Figure, table and text come out of the numbers, and the numbers fit into JSON."""
    with matplotlib.rc_context(figures.style()):
        head, picture, table, text = theory.entries(name, numbers)
        content = checked_png(picture)
    assert isinstance(table, Table) and len(list(table_rows(str(table)))) == len(table.rows) > 0
    assert unsupported(str(table), plain(numbers)) == []
    assert content.startswith(b"\x89PNG")
    check_text(text)
    return head


def check_text(text):
    """Some sentences with numbers in them, all filled in."""
    assert len(text) > 200 and text.rstrip(")\n ").endswith(".")
    assert len(re.findall(r"\d+(?:\.\d+)?", text)) >= 3
    assert not re.search(r"todo|[{}]|\bnan\b|\binf\b", text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No number is in this text. " * 10,
        "1, 2 and 3.",
        "Of 1, 2 and 3 is nan left. " * 10,
        "1, 2, 3 {x}. " * 30,
    ],
)
def test_a_text_without_results_is_noticed(text):
    with pytest.raises(AssertionError):
        check_text(text)


def test_the_constant_is_not_depth_plus_one_and_the_variance_does_not_mind():
    numbers = proportional.measured(**proportional.QUICK, seed=0)
    constants = {name: numbers[name][3]["constant"][0] for name in proportional.ACTIVATIONS}
    assert all(constants[name] > 4 for name in ("erf", "tanh", "sin"))
    assert 2 < constants["gelu"] < 3 < constants["silu"] < 4
    for name in proportional.ACTIVATIONS:
        least = 0.99 if name == "relu" else 0.999
        assert numbers[name][3]["spearman"][0] > least
        assert numbers[name][3]["spread"][0] < 0.05
    check_page("proportional", numbers)


def test_the_ridge_in_all_four_terms_is_the_dense_formula():
    net = FullyConnected(2, "gelu", input_scale=1.0, normalised=True)
    x = nets.sphere(12, 4, nets.generator(0))
    train, cross, own = net.kernels(x[:8]), net.kernels(x[8:], x[:8]), net.diagonal(x[8:]).nngp
    inverse = torch.linalg.inv(train.ntk + 0.3 * torch.eye(8, dtype=F64))
    a = cross.ntk @ inverse
    joint = own.diag() * 0 + net.nngp(x[8:]) + a @ train.nngp @ a.T
    joint = joint - a @ cross.nngp.T - cross.nngp @ a.T
    found = proportional.with_ridge(train, cross, own, 0.3)
    torch.testing.assert_close(found, joint.diagonal())


def test_the_gram_of_the_features_has_the_nngp_as_its_mean():
    x = nets.sphere(5, 3, nets.generator(0))
    grams = []
    for seed in range(300):
        f = nets.last_features(x, [128, 64], "relu", nets.generator(1, seed))
        grams.append(f @ f.T)
    sample = torch.stack(grams)
    exact = FullyConnected(2, "relu", input_scale=1.0, normalised=True).nngp(x)
    error = sample.std(0) / math.sqrt(len(grams))
    assert bool(((sample.mean(0) - exact).abs() < 4.5 * error).all())
    assert bool((error < 0.05).all())


def test_the_error_falls_with_the_root_of_the_width_of_all_layers_only():
    numbers = width.measured((32, 128, 512), seeds=6, seed=0)
    for name in width.ACTIVATIONS:
        whole, last = (numbers[name][grown]["slope"][0] for grown in width.GROWN)
        assert -0.75 < whole < -0.3 and last > whole + 0.1
    check_page("width", numbers)


def test_the_slope_of_a_power_law_is_its_exponent():
    widths = torch.tensor([10, 100, 1000])
    assert width.slope(widths, 3 * widths.to(F64) ** -0.7) == pytest.approx(-0.7)


def test_nothing_is_left_once_rows_outnumber_features():
    numbers = rows.measured((32, 64, 128), seeds=6, seed=0)
    variance, error = numbers["limit"]["variance"], numbers["limit"]["squared_error"]
    assert variance[0] > 1e-3 and variance[1] == variance[2] == 0
    assert error[1] > 5 * max(error[0], error[2])
    right = numbers["ridges"][f"{rows.NOISE**2:g}"]
    ratio = right["variance"] / right["squared_error"]
    assert bool(((ratio > 0.5) & (ratio < 2)).all())
    small = numbers["ridges"][f"{rows.NOISE**2 / 100:g}"]
    assert small["variance"][2] < 0.05 * small["squared_error"][2]
    check_page("rows", numbers)


def test_the_ridge_form_is_ridge_regression():
    g = nets.generator(3)
    f, test, y = (torch.randn(*shape, generator=g, dtype=F64) for shape in ((9, 4), (3, 4), (9,)))
    mean, variance = rows.ridge_form(f, test, y, 0.5)
    inverse = torch.linalg.inv(f.T @ f + 0.5 * torch.eye(4, dtype=F64))
    torch.testing.assert_close(mean, test @ inverse @ f.T @ y)
    torch.testing.assert_close(variance, 0.5 * ((test @ inverse) * test).sum(1))


def test_a_ridge_is_found_again_by_the_match():
    g = nets.generator(4)
    eigenvalues = torch.logspace(-3, 1, 12, dtype=F64)
    power = torch.rand(50, 12, generator=g, dtype=F64)
    variance = 7.0 * (power @ (1 / (eigenvalues + 0.1)))
    found = stopping.match(variance, eigenvalues, power)
    assert found["ridge"] == pytest.approx(0.1, rel=0.03)
    assert found["scale"] == pytest.approx(7.0, rel=0.03) and found["spread"] < 1e-2
    alone = stopping.match(0.1 * variance / 7.0, eigenvalues, power)
    assert alone["ridge_alone"] == pytest.approx(0.1, rel=0.03) and alone["rms_alone"] < 1e-2


def test_a_ridge_imitates_early_times_and_not_late_ones():
    numbers = stopping.measured(rows=128, times=9, seed=0)
    spread = numbers["matches"]["spread"]
    assert spread[0] < 0.01 and spread[-1] > 0.5
    largest = float(numbers["eigenvalues"][-1])
    found = numbers["matches"]
    assert 0.7 < 2 * 0.1 * found["ridge"][0] / largest < 1.1
    assert found["relative_ridge"][0] == pytest.approx(found["ridge"][0] / largest)
    product = 2 * 0.1 * found["ridge"][0] / largest
    assert found["ridge_times_twice_the_time"][0] == pytest.approx(product)
    for group in stopping.GROUPS:
        assert bool((numbers["filter"][group].diff() < 0).all())
        assert numbers["filter"][group][0] < numbers["prior"][group][0]
    check_page("stopping", numbers)


def test_the_net_of_the_theory_has_the_ntk_of_the_theory():
    source = nets.generator(0)
    x, _ = training.data(source)
    x = x[:6]
    runs = []
    for seed in range(8):
        net, scales = training.network(256, nets.generator(5, seed), theory=True)
        runs.append(training.kernel(net, x, "ntk", scales))
    wide = FullyConnected(training.DEPTH, "silu", input_scale=1.0, normalised=True)
    exact = wide.ntk(torch.cat([x, torch.ones(6, 1)], dim=1))  # the first layer's bias
    assert (torch.stack(runs).mean(0) - exact).norm() < 0.1 * exact.norm()


def test_training_moves_the_kernels_less_in_wider_nets_of_the_theory():
    marks = (5, 60)
    ends = []
    for size in (16, 256):
        runs = [
            training.trained(size, marks, training.WAYS[0], nets.generator(6, size, seed))
            for seed in range(2)
        ]
        assert all(run["rmse"][-1] < 0.95 for run in runs)
        ends.append(sum(run["features_change"][-1] + run["ntk_change"][-1] for run in runs))
    assert ends[1] < ends[0] / 2


def test_the_training_section_can_be_written():
    numbers = training.measured((8, 16), (2, 4), seeds=2, seed=0)
    for way in training.WAYS:
        assert all(len(values) == 2 for values in numbers[way][8].values())
        assert numbers[way][8]["features_change"][-1][0] > 0
    check_page("training", numbers)


def test_the_likelihood_is_gaussian_for_the_cubic_alone():
    numbers = bayesian.measured(**bayesian.QUICK, seed=0)
    cubic, bent = (numbers["models"][name]["outside"][0] for name in ("cubic", "two Gaussians"))
    half = cubic["offsets"].square() / 2
    torch.testing.assert_close(cubic["heights"], half, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(cubic["slopes"], cubic["offsets"], rtol=1e-6, atol=1e-9)
    assert cubic["gauss_newton"] == pytest.approx(1)
    assert cubic["levels"]["0.9"]["held"] == pytest.approx(0.9 / math.erf(3 / 2**0.5), abs=1e-3)
    assert bent["total_variation"] > 0.03 > 0.01 > cubic["total_variation"]
    assert bent["levels"]["0.9"]["held"] < 0.9
    middle = bent["offsets"].abs().argmin()
    assert bent["heights"][middle] == pytest.approx(0, abs=1e-8)
    head = check_page("bayesian", numbers)
    assert "1-2-1" in head and "saddles" in head and "x = 1," in head


def test_means_are_over_the_draws_at_the_level_shown():
    def draw(shift):
        ends = {"low": -2.0 + shift, "high": 2.0 + shift, "held": 0.5 + shift}
        levels = {"0.68": dict.fromkeys(ends, 9.0), "0.9": ends}
        keys = ("std", "gauss_newton", "total_variation", "skewness")
        return {**{key: place + shift for place, key in enumerate(keys)}, "levels": levels}

    found = bayesian.averaged([draw(0.0), draw(0.5)])
    assert found == {
        "std": 0.25,
        "gauss_newton": 1.25,
        "total_variation": 2.25,
        "skewness": 3.25,
        "low_90": -1.75,
        "high_90": 2.25,
        "held_90": 0.75,
    }


def test_a_normal_profile_differs_in_nothing():
    grid = torch.linspace(-6, 6, 25, dtype=F64)
    found = bayesian.differences(*bayesian.interpolated(grid, grid.square() / 2, grid))
    assert found["total_variation"] < 1e-8 and abs(found["skewness"]) < 1e-8
    assert found["spread"] == pytest.approx(1, abs=1e-6)
    for level, entry in found["levels"].items():
        assert entry["held"] == pytest.approx(float(level), abs=2e-3)


def test_all_sections_stand_on_one_page(monkeypatch):
    called = []

    class Fake:
        QUICK: typing.ClassVar = {"size": 3}
        HEAD, CAPTION = "## A heading", "a caption"

        @staticmethod
        def measured(*, size, seed):
            called.append((size, seed))
            return {"x": 1.0}

        drawn = table = says = staticmethod(str)

    monkeypatch.setattr(theory, "SECTIONS", dict.fromkeys(theory.SECTIONS, (Fake, Fake)))
    outcome = theory.run(quick=True, seed=5)
    assert set(called) == {(3, 5)}
    assert len(outcome.numbers) == len(called) >= 5
    assert outcome.page.count("## A heading") == len(called)
