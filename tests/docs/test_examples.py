"""Every example runs, and says what it promises."""

import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def printed(name, capsys):
    """What an example prints."""
    (path,) = [path for path in EXAMPLES if path.stem == name]
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out


def numbers(text):
    return [float(number) for number in re.findall(r"-?\d+\.\d+", text)]


def test_a_difference_of_neighbours_is_surer_than_either(plain_torch, capsys):
    lines = printed("derived_quantity", capsys).splitlines()
    rows = {line[:30].strip(): numbers(line[30:]) for line in lines[1:]}
    _, std, members, alone = rows["difference of neighbours"]
    assert std < rows["one prediction"][1] / 3
    assert alone > 3 * std
    assert members == pytest.approx(std, rel=0.2)
    _, std, members, alone = rows["mean over 2000 settings"]
    assert std > 3 * alone
    assert members == pytest.approx(std, rel=0.2)


@pytest.mark.thorough
def test_the_minimum_lies_within_its_error_bar(plain_torch, capsys):
    first, second, true = map(numbers, printed("potential_minimum", capsys).splitlines())
    assert first[0] == pytest.approx(true[0], abs=3 * first[1])
    assert second == pytest.approx(first, rel=0.2)


@pytest.mark.thorough
def test_ninety_percent_intervals_hold_about_ninety_percent_of_the_forces(plain_torch, capsys):
    text = printed("force", capsys)
    inside = [int(share) for share in re.findall(r"(?:energy|forces).* (\d+)%", text)]
    assert len(inside) == 4
    assert all(75 <= share <= 99 for share in inside)
    assert len(re.findall(r"\+- ", text)) == 9


@pytest.mark.thorough
def test_a_greedy_batch_beats_chance_and_the_largest_variances(plain_torch, capsys):
    lines = printed("active_learning", capsys).splitlines()
    mean = {line[:17].strip(): numbers(line)[0] for line in lines[1:]}
    assert mean["greedy"] < 0.9 * min(mean["random"], mean["largest variances"])


def test_dynamics_stop_at_the_limit_and_most_errors_lie_within_two_bars(plain_torch, capsys):
    lines = printed("molecular_dynamics", capsys).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("step"))
    *steps, stop, message = lines[first + 1 :]
    rows = [numbers(line) for line in (*steps, stop)]
    assert len(rows) > 5
    assert sum(error < 2 * bar for _, bar, error, _ in rows) >= 0.75 * len(rows)
    assert all(bar <= 0.1 for _, bar, _, _ in rows[:-1])
    assert stop.startswith("stop") and rows[-1][1] > 0.1
    assert "above the limit energy_std = 0.1" in message


@pytest.mark.skipif(find_spec("mace") is not None, reason="mace-torch is there: make zoo runs it")
def test_without_mace_its_dynamics_say_what_is_missing(plain_torch, capsys):
    with pytest.raises(SystemExit, match="needs mace-torch: pip install mace-torch"):
        printed("mace_dynamics", capsys)


@pytest.mark.thorough
def test_error_bars_that_learn_hold_in_a_drifting_stream_where_fixed_ones_fail(
    plain_torch, capsys, monkeypatch, tmp_path
):
    figure = tmp_path / "stream.png"
    monkeypatch.setattr("sys.argv", ["stream.py", "--minutes", "10", "--out", str(figure)])
    *table, total, advice = printed("stream", capsys).splitlines()
    inside, fixed = (share / 100 for share in numbers(total))
    assert 0.85 < inside < 0.95
    assert fixed < inside - 0.03
    held = [int(line.split()[2]) for line in table[1:]]
    assert len(held) == 10
    assert max(held) < 1.5 * min(held)
    assert "times as wide" in advice
    assert figure.stat().st_size > 1000


def test_every_example_has_a_test():
    text = Path(__file__).read_text(encoding="utf-8")
    alone = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    printing = [path.stem for path in EXAMPLES if path.stem not in alone]
    assert [name for name in printing if f'printed("{name}"' not in text] == []
