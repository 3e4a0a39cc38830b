"""The demonstration prints its tables in plain ASCII, writes its figures and is repeatable."""

import math
import sys
from pathlib import Path

import pytest
import torch

from rigidities.cli import demo

# One worker, so that what the tests share runs once.
pytestmark = pytest.mark.xdist_group("demo")

PNG = b"\x89PNG\r\n\x1a\n"


class Ran:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "made" / "here"
        self.texts: list[str] = []
        before = torch.random.get_rng_state()
        self.figures = demo.run(self.folder, seed=0, echo=self.texts.append)
        self.left_the_generator_alone = torch.equal(before, torch.random.get_rng_state())
        self.lines = "\n".join(self.texts).splitlines()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(tmp_path_factory.mktemp("demo"))


def numbers(line: str) -> list[float]:
    return [float(word.rstrip("%")) for word in line.split()[-4:]]


def rows(ran: Ran, label: str) -> list[list[float]]:
    return [numbers(line) for line in ran.lines if line.strip().startswith(label)]


@pytest.mark.thorough
def test_figures_are_written_where_it_says(ran: Ran) -> None:
    assert [figure.name for figure in ran.figures] == ["toy.png", "diabetes.png"]
    for figure in ran.figures:
        assert figure.parent == ran.folder
        assert figure.read_bytes().startswith(PNG)
        assert 10_000 < figure.stat().st_size < 150_000
        assert any(line.strip() == str(figure) for line in ran.lines)


@pytest.mark.thorough
def test_the_toy_figure_says_where_a_rule_begins_to_widen_the_bars() -> None:
    torch.manual_seed(0)
    _, uq, train = demo.toy()
    (axes,) = demo._draw_toy(uq, train).axes
    edges = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"]
    assert len(edges) == 2
    outwards = torch.tensor([[-0.01], [0.01]])  # a step of the grid that is drawn
    at_edges = torch.tensor(edges)[:, None]
    reference = float(uq.calibration.guard.reference)
    assert bool((1 / uq.predict(at_edges).rigidity <= 1.001 * reference).all())
    assert bool((1 / uq.predict(at_edges + outwards).rigidity > 0.999 * reference).all())
    assert "a rule widens the bars" in " ".join(text.get_text() for text in axes.texts)


def test_output_suits_any_terminal(ran: Ran) -> None:
    printed = [line for line in ran.lines if str(ran.folder) not in line]
    assert all(line.isascii() for line in printed)
    assert max(map(len, printed)) <= 88


def test_each_data_set_has_a_row_for_every_score(ran: Ran) -> None:
    for label, _, _ in demo.SCORES:
        assert sum(line.strip().startswith(label) for line in ran.lines) == 2


def test_both_bars_have_the_same_errors(ran: Ran) -> None:
    for inside_constant, inside, outside_constant, outside in rows(ran, "RMSE"):
        assert inside_constant == inside
        assert outside_constant == outside


def test_error_bars_beat_a_constant_one_outside_the_training_range(ran: Ran) -> None:
    for *_, constant, ours in rows(ran, "NLL"):
        assert ours < constant
    for *_, constant, ours in rows(ran, "90 % intervals: coverage"):
        assert abs(ours - 90) < abs(constant - 90)


def test_inside_where_noise_rules_a_constant_bar_is_matched(ran: Ran) -> None:
    constant, ours, *_ = rows(ran, "NLL")[1]
    assert ours == pytest.approx(constant, abs=0.1)


def test_it_ends_with_the_lines_to_type(ran: Ran) -> None:
    assert (
        "rg.LastLayerRigidity(model).fit(x_train, y_train).calibrate(x_valid, y_valid)"
        in ran.texts[-1]
    )
    assert "print(uq.calibration_report)" in ran.texts[-1]
    assert "mean, std = uq(x)" in ran.texts[-1]


def test_the_callers_random_numbers_are_left_alone(ran: Ran) -> None:
    assert ran.left_the_generator_alone


@pytest.mark.thorough
def test_the_same_seed_gives_the_same_nets() -> None:
    def outcome(seed: int) -> demo.Outcome:
        torch.manual_seed(seed)
        return demo.diabetes()

    first, again, other = outcome(1), outcome(1), outcome(2)
    assert torch.equal(first.outside.std, again.outside.std)
    assert not torch.equal(first.outside.mean, other.outside.mean)


@pytest.mark.thorough
def test_diabetes_rows_are_each_scored_once() -> None:
    torch.manual_seed(0)
    outcome = demo.diabetes()
    _, y, shifted = demo._diabetes_rows()
    low = shifted <= shifted.quantile(0.7)
    assert outcome.inside.target.sort().values.tolist() == y[low, 0].sort().values.tolist()
    assert outcome.outside.target.sort().values.tolist() == y[~low, 0].sort().values.tolist()


def test_joined_constant_bars_become_one() -> None:
    one = torch.ones(2)
    parts = [demo.Bars(one, one, size * one, one) for size in (1.0, 7.0)]
    assert demo.Bars.join(parts).constant.tolist() == [5.0] * 4


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (math.nan, ".2f", "-"),
        (-0.001, ".2f", "0.00"),
        (185.4, "#.3g", "185"),
        (0.9, ".1%", "90.0%"),
    ],
)
def test_numbers_are_printed_as(value: float, form: str, text: str) -> None:
    assert demo._number(value, form) == text


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "sklearn" else object())
    with pytest.raises(ModuleNotFoundError, match=r'sklearn.*pip install "rigidities\[demo\]"'):
        demo.run(tmp_path / "out")
    assert not (tmp_path / "out").exists()
