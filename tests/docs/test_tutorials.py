"""Every tutorial runs as a script, and what it tells is true of its results."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "examples" / "tutorials").glob("*.py"))


def ran(name):
    """The names that a tutorial leaves behind."""
    plt = pytest.importorskip("matplotlib.pyplot")
    (path,) = [path for path in TUTORIALS if path.stem == name]
    with plt.rc_context({"backend": "agg"}):
        return runpy.run_path(str(path), run_name="__main__")


def test_bars_grow_from_the_data_to_the_gap_and_beyond(plain_torch):
    left = ran("first_error_bars")
    among, gap, beyond = left["p"].std[:, 0].tolist()
    assert 0.03 < among < 0.12  # the noise is 0.06
    assert 3 * among < gap < beyond
    assert left["loaded"].scale == left["uq"].scale


@pytest.mark.thorough
def test_patients_with_unusual_columns_are_the_least_rigid(plain_torch):
    left = ran("a_table")
    assert 0.85 < left["covered"] < 0.97
    mean_squares, least_rigid = left["mean_squares"], left["least_rigid"]
    of_all = mean_squares[left["test"].index].mean()
    assert mean_squares[least_rigid.index].mean() > 1.5 * of_all
    assert left["scores"]["ridge"] < left["scores"]["trees"]


def test_the_verdict_trusts_right_bars_alone(plain_torch):
    left = ran("trust_and_verdict")
    assert left["right"].status == "good"
    assert {left[name].status for name in ("narrow", "average")} == {"bad"}
    assert left["skewed"].status == "careful" and "the errors are skewed" in left["skewed"].headline
    sized, even, *_ = left["skewed"].findings
    assert {sized.status, even.status} == {"good"}
    assert left["below"] == 0 < 0.08 < left["above"] < 0.12
    assert 0.88 < left["covered"].mean() < 0.92
    assert left["high"] < 0.8 < 0.99 < left["low"]


def test_error_bars_of_area_and_place_are_their_scatter(plain_torch):
    left = ran("peak_fit")
    said = [left[name].std.item() for name in ("area", "place")]
    assert said == pytest.approx(left["scatter"].tolist(), rel=0.2)
    assert left["naive"] > 1.15 * said[0]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_made_of_cells_and_begins_with_its_title(path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# %% [markdown]\n# # ")
    cells = re.split(r"^# %%.*\n", text, flags=re.M)[1:]
    kinds = re.findall(r"^# %%(.*)$", text, flags=re.M)
    assert {*kinds} == {"", " [markdown]"}
    prose = [cell for cell, kind in zip(cells, kinds, strict=True) if kind]
    assert all(line.startswith("#") for cell in prose for line in cell.strip().splitlines())
    assert f'ran("{path.stem}")' in Path(__file__).read_text(encoding="utf-8")
    assert f": tutorials/{path.stem}.md\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
