"""A prediction as a value: its entries, other units, several as one, tables and pictures."""

import math
import sys
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch

from rigidities import Prediction, metrics
from rigidities.calibration.conformal import Conformal, bar_cuts
from rigidities.prediction.distribution import Distribution, Gaussian, StudentT
from rigidities.prediction.mixture import Mixture
from tests.support.refusals import refused

F64 = torch.float64
ROWS, TARGETS = 6, 2
LEVEL = 0.8
DRAW = torch.Generator().manual_seed(0)


def drawn(*shape):
    return torch.randn(*shape, generator=DRAW, dtype=F64)


PARTS = [drawn(ROWS, TARGETS), *(0.1 + drawn(4, ROWS, TARGETS).square())]
TARGET = drawn(ROWS, TARGETS)
DEGREES = torch.tensor([3.0, 9.0], dtype=F64)
DISTRIBUTIONS = {
    "gaussian": Gaussian(),
    "t": StudentT(4.0),
    "t-by-target": StudentT(DEGREES),
    "mixture": Mixture(*0.4 * drawn(3, ROWS, TARGETS, 2)),
}
SUPPORTS = {
    "unbounded": None,
    "one-end": (-0.5, None),
    "by-target": (torch.tensor([-0.5, -1.0], dtype=F64), torch.tensor([math.inf, 1.0], dtype=F64)),
}
ALL = pytest.mark.parametrize("support", SUPPORTS.values(), ids=SUPPORTS)
KINDS = pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
INDICES = {
    "slice": np.s_[:4],
    "backwards": torch.tensor([5, 0, 0]),
    "list": [4, 1],
    "mask": np.array([True, False, True, True, False, False]),
    "row": 3,
    "target": np.s_[:, 1],
    "entries": PARTS[0] > 0,
    "one": (2, 1),
    "none": np.s_[:0],
    "new": np.s_[1:, None, ::1],
}


def prediction(distribution, support=None):
    return Prediction(*PARTS, distribution=distribution, support=support)


def with_scores(p, by):
    """With conformal rows in two groups for each target, by label or by the bar."""
    generator = torch.Generator().manual_seed(1)
    many = Prediction.concatenate([p] * 40)
    y = many.sample(1, generator)[0]
    labels = torch.arange(len(y))[:, None].expand(y.shape) % 2
    if by == "bar":
        scores = Conformal.of(many, y, cuts=bar_cuts(many.std, 2))
        return replace(p, conformal=scores.bound())
    scores = Conformal.of(many, y, labels=labels)
    return replace(p, conformal=scores.bound(labels[: len(p)]))


def answers(p, y):
    """Everything that one can ask, one tensor shaped like the prediction each."""
    ends = dict(zip(("low", "high"), p.interval(LEVEL), strict=True))
    asked = {name: getattr(p, name)(y) for name in ("cdf", "log_prob", "crps", "tail")}
    parts = {name: getattr(p, name) for name in ("mean", "std", "centre", "unit", "rigidity")}
    parts |= {name: getattr(p, name) for name in ("epistemic", "noise", "from_inputs")}
    return parts | asked | ends | {"quantile": p.quantile(0.3)}


# --- entries ------------------------------------------------------------------------------------


@KINDS
@ALL
def test_entries_answer_as_they_did_in_the_whole(distribution, support):
    p = prediction(distribution, support)
    whole = answers(p, TARGET)
    for index in INDICES.values():
        some = answers(p[index], TARGET[index])
        for name, value in whole.items():
            torch.testing.assert_close(some[name], value[index], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("by", ["label", "bar"])
@pytest.mark.parametrize(
    "distribution",
    [DISTRIBUTIONS["gaussian"], DISTRIBUTIONS["mixture"]],
    ids=["gaussian", "mixture"],
)
def test_conformal_intervals_follow_entries_and_units(distribution, by):
    p = with_scores(prediction(distribution), by)
    whole = p.interval(LEVEL)
    for index in INDICES.values():
        for some, end in zip(p[index].interval(LEVEL), whole, strict=True):
            torch.testing.assert_close(some, end[index], rtol=1e-9, atol=1e-12)
    low, high = (-2.0 * p + 3.0).interval(LEVEL)
    torch.testing.assert_close((low, high), (3 - 2 * whole[1], 3 - 2 * whole[0]))
    halves = Prediction.concatenate([p[:2], 5 * p[2:]])
    low = torch.cat([whole[0][:2], 5 * whole[0][2:]])
    torch.testing.assert_close(halves.interval(LEVEL)[0], low)


def test_draws_of_an_entry_are_those_of_its_distribution():
    p = prediction(DISTRIBUTIONS["mixture"], (-0.5, None))[3]
    draws = p.sample(4000, torch.Generator().manual_seed(0))
    assert draws.shape == (4000, TARGETS)
    torch.testing.assert_close(
        (draws <= 0.2).double().mean(0), p.cdf(torch.full((2,), 0.2)), atol=0.03, rtol=0
    )


def test_degrees_of_freedom_stay_as_few_as_they_are():
    p = prediction(DISTRIBUTIONS["t-by-target"])
    assert p[:4].distribution.df.tolist() == [[3.0, 9.0]] and p[:, 1].distribution.df == 9.0
    assert Prediction.concatenate([p[:, 1:], p[:, 1:]]).distribution.df == 9.0
    assert prediction(DISTRIBUTIONS["t"])[2:].distribution == StudentT(4.0)


def test_rows_can_be_gone_through_and_a_wrong_place_is_an_index_error():
    p = prediction(Gaussian())
    assert [one.mean.tolist() for one in p] == p.mean.tolist()
    refused("out of bounds", p.__getitem__, 6, error=IndexError)
    refused("shape of the mask", p.__getitem__, torch.ones(5, dtype=torch.bool), error=IndexError)
    assert p.support is None and p[:2].support is None


# --- units --------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [-3.0, torch.tensor([2.0, -0.5])], ids=["number", "targets"])
@KINDS
@ALL
def test_other_units_change_the_distribution_and_nothing_else(distribution, support, factor):
    p, b = prediction(distribution, support), torch.tensor([1.5, -0.5], dtype=F64)
    q, a = p * factor + b, torch.as_tensor(factor, dtype=F64)
    y = a * TARGET + b
    torch.testing.assert_close(q.mean, a * p.mean + b)
    torch.testing.assert_close(q.std, a.abs() * p.std)
    torch.testing.assert_close(q.epistemic, a.square() * p.epistemic)
    torch.testing.assert_close(q.rigidity, p.rigidity)
    torch.testing.assert_close(q.centre, a * p.centre + b)
    torch.testing.assert_close(q.log_prob(y).isfinite(), p.log_prob(TARGET).isfinite())
    torch.testing.assert_close(q.log_prob(y), p.log_prob(TARGET) - a.abs().log().expand_as(y))
    torch.testing.assert_close(q.crps(y), a.abs() * p.crps(TARGET))
    torch.testing.assert_close(q.tail(y), p.tail(TARGET))
    ends = [a * end + b for end in p.interval(LEVEL)]
    torch.testing.assert_close(q.interval(LEVEL), (torch.minimum(*ends), torch.maximum(*ends)))
    inside = p.cdf(TARGET).where(a > 0, 1 - p.cdf(TARGET))
    low, high = p.quantile(1e-9), p.quantile(1 - 1e-9)
    open_ = (low < TARGET) & (high > TARGET)
    torch.testing.assert_close(q.cdf(y)[open_], inside[open_])


def test_a_target_at_a_bound_stays_there_in_other_units():
    for kind in (torch.float32, F64):
        p = Prediction(*(part.to(kind) for part in PARTS), support=(0.1, None))
        y = torch.full((ROWS, TARGETS), 0.1, dtype=kind)
        for factor, shift in ((3.7, 0.3), (-1.1, -0.7)):
            mass = (p * factor + shift).log_prob(y * factor + shift)
            torch.testing.assert_close(mass, p.log_prob(y))


@pytest.mark.parametrize("kind", [torch.float32, F64])
@pytest.mark.parametrize(("least", "mu"), [(0.0, 0.8388), (1.0, 50.3), (0.1, 3.9)])
def test_targets_in_their_own_units_lie_at_the_bound_of_standardised_ones(kind, least, mu):
    """The bound was computed in single precision: what is left of it after the way back is not."""
    mu, spreads = torch.tensor(mu), torch.linspace(0.31, 23.7, 60)
    ones, y = torch.ones(1, dtype=kind), torch.full((1,), least, dtype=kind)
    for sd in spreads:
        bound = float((least - mu) / sd)
        p = Prediction(bound + 0 * ones, ones, 0 * ones, ones, support=(bound, None))
        q = p * sd + mu
        torch.testing.assert_close(q.log_prob(y), -math.log(2) * ones, rtol=1e-4, atol=0)
        torch.testing.assert_close(q.cdf(y), 0.5 * ones, rtol=1e-4, atol=0)
        assert metrics.coverage(q, y) == 1 and (least or q.support == (0.0, None))


def test_a_target_one_step_above_a_bound_is_not_at_it():
    ones = torch.ones(1)
    p = Prediction(100 * ones, ones, 0 * ones, ones, support=(100.0, None))
    for y in (torch.tensor([100.5], dtype=torch.bfloat16), torch.tensor([100.01], dtype=F64)):
        density = torch.distributions.Normal(100.0, 1.0).log_prob(y.float())
        torch.testing.assert_close(p.log_prob(y), density)
    least = Prediction(0.1 * ones, ones, 0 * ones, ones, support=(0.1, None))
    mass = least.log_prob(torch.tensor([0.1], dtype=torch.bfloat16))
    torch.testing.assert_close(mass, -math.log(2) * ones)


@pytest.mark.parametrize("factor", [1.602e-19, 1.380649e-23, 6.022e23])
def test_units_far_from_one_keep_the_bar(factor):
    p = Prediction(*(part.float() for part in PARTS), support=(-0.5, None))
    q = p * factor
    torch.testing.assert_close(q.std / factor, p.std.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close((q.interval()[1] / factor).float(), p.interval()[1])
    refused("square overflows float64", p.__mul__, 1e200)


def test_there_and_back_is_the_same_prediction():
    p = prediction(DISTRIBUTIONS["mixture"], (-0.5, 2.0))
    sd, mu = np.array([2.0, 0.3]), np.array([5.0, -1.0])
    back = ((p * sd + mu) - mu) / sd
    for name, value in answers(p, TARGET).items():
        torch.testing.assert_close(answers(back, TARGET)[name], value)
    negative = -p
    assert (-negative).support == p.support


@pytest.mark.parametrize("of", [float, np.float32, np.array, torch.tensor, int])
def test_numbers_arrays_and_tensors_may_stand_on_either_side(of):
    p, two = prediction(Gaussian()), of(2)
    torch.testing.assert_close((two * p).mean, 2 * p.mean)
    torch.testing.assert_close((two + p).mean, 2 + p.mean)
    torch.testing.assert_close((two - p).mean, 2 - p.mean)
    torch.testing.assert_close((p - two).mean, p.mean - 2)
    torch.testing.assert_close((p / two).std, p.std / 2)
    for found in (p * pd.Series([1.0, 2.0]), pd.Series([1.0, 2.0]) * p):
        torch.testing.assert_close(found.mean, p.mean * torch.tensor([1.0, 2.0]))


def test_single_precision_stays_and_half_becomes_single():
    for kind, found in ((torch.float32, torch.float32), (torch.float16, torch.float32)):
        p = Prediction(*(part.to(kind) for part in PARTS)) * np.array([500.0, 1.0]) + 1e5
        assert {p.mean.dtype, p.std.dtype} == {found} and bool(p.mean.isfinite().all())
    mixed = replace(prediction(Gaussian()), mean=PARTS[0].float()) * 0.1
    torch.testing.assert_close(mixed.std, 0.1 * prediction(Gaussian()).std, rtol=1e-14, atol=0)


def test_numbers_that_leave_no_distribution_are_refused():
    p = prediction(Gaussian())
    for call in (p.__mul__, p.__truediv__):
        refused("finite numbers, and no factor that is zero", call, 0)
        refused("finite numbers, and no factor that is zero", call, [1.0, 0.0])
    refused("finite numbers", p.__mul__, math.nan)
    refused("finite numbers", p.__add__, math.inf)
    refused(r"broadcasts to the prediction's \(6, 2\), got \(3,\)", p.__mul__, torch.ones(3))
    refused(r"\(6, 1\), got \(6,\)", p[:, :1].__add__, torch.ones(6))
    refused("got a Prediction.*uq.propagate", p.__add__, p, error=TypeError)
    refused("got a Prediction.*uq.propagate", p.__sub__, p, error=TypeError)
    refused("got a str", p.__mul__, "2", error=TypeError)
    refused("real number.*complex64", p.__mul__, torch.tensor(1 + 1j), error=TypeError)
    refused("real number.*torch.bool", p.__mul__, torch.tensor(True), error=TypeError)
    with pytest.raises(TypeError, match="unsupported operand"):
        1 / p


# --- several as one -----------------------------------------------------------------------------


@KINDS
@ALL
def test_parts_that_are_joined_are_the_whole(distribution, support):
    p = prediction(distribution, support)
    joined = Prediction.concatenate([p[:1], p[1:1], p[1:4], p[4:]])
    for name, value in answers(p, TARGET).items():
        torch.testing.assert_close(answers(joined, TARGET)[name], value)


def test_rows_keep_their_own_degrees_of_freedom_and_supports():
    first, second = prediction(StudentT(3.0), (0.0, None)), prediction(StudentT(DEGREES))
    both = answers(Prediction.concatenate([first, second]), torch.cat([TARGET, TARGET]))
    for name, value in answers(first, TARGET).items():
        torch.testing.assert_close(both[name], torch.cat([value, answers(second, TARGET)[name]]))


def test_what_cannot_be_one_prediction_is_refused():
    p = prediction(Gaussian())
    refused("list of predictions.*got \\[\\]", Prediction.concatenate, [])
    refused(
        r"rows have the same shape, got \[\(6, 2\), \(6,\)\]", Prediction.concatenate, [p, p[:, 0]]
    )
    refused(r"the same shape, got \[\(\), \(\)\]", Prediction.concatenate, [p[0, 0], p[0, 0]])
    refused(
        "Gaussian and Mixture", Prediction.concatenate, [p, prediction(DISTRIBUTIONS["mixture"])]
    )
    scored = with_scores(p, "label")
    refused("BoundConformal and NoneType", Prediction.concatenate, [scored, p])
    other = replace(scored.conformal.conformal, tails=scored.conformal.conformal.tails / 2)
    other = replace(scored, conformal=replace(scored.conformal, conformal=other))
    refused("same conformal rows", Prediction.concatenate, [scored, other])


def test_a_distribution_of_the_users_own_follows_by_its_settings():
    @dataclass(frozen=True)
    class Uniform(Distribution):
        name, symmetric = "uniform", True
        width: float = 2.0

        def quantile(self, level):
            return self.width * (level - 0.5)

        def log_density(self, z):
            return -torch.as_tensor(self.width).log() + 0 * z

    narrow, wide = prediction(Uniform()), prediction(Uniform(4.0))
    assert narrow[:2].distribution == Uniform() and (-3 * narrow).distribution == Uniform()
    both = Prediction.concatenate([narrow, wide])
    expected = torch.cat([narrow.quantile(0.9), wide.quantile(0.9)])
    torch.testing.assert_close(both.quantile(0.9), expected)


# --- tables -------------------------------------------------------------------------------------


def test_arrays_are_copies_shaped_like_the_output():
    p = prediction(DISTRIBUTIONS["mixture"])
    refused(r"Use p.mean, p.std or p.to_numpy\(\)", np.asarray, p, error=TypeError)
    found = p.to_numpy(LEVEL)
    assert set(found) == {"mean", "std", "low", "high", "epistemic", "noise"}
    for name, array in found.items():
        ends = dict(zip(("low", "high"), p.interval(LEVEL), strict=True))
        expected = ends[name] if name in ends else getattr(p, name)
        np.testing.assert_array_equal(array, expected.numpy())
    found["mean"][:] = 0
    assert not bool((p.mean == 0).any())


def test_tables_have_a_row_a_prediction_and_a_column_a_number():
    p = prediction(DISTRIBUTIONS["mixture"])
    low, high = p.interval(LEVEL)
    frame = p[:, :1].to_pandas(LEVEL, index=list("abcdef"))
    assert list(frame.columns) == ["mean", "std", "low", "high"] and list(frame.index) == [
        *"abcdef"
    ]
    np.testing.assert_allclose(frame["high"], high[:, 0].numpy())
    wide = p.to_pandas(LEVEL)
    assert list(wide.columns)[3:6] == ["high_0", "mean_1", "std_1"]
    np.testing.assert_allclose(wide["low_1"], low[:, 1].numpy())
    named = p.to_polars(LEVEL, names=["height", "weight"])
    assert isinstance(named, pl.DataFrame) and named.columns[4] == "mean_weight"
    np.testing.assert_allclose(named["low_weight"].to_numpy(), low[:, 1].numpy())
    assert p[0, 0].to_pandas().shape == (1, 4) and p[:0].to_polars().shape == (0, 8)
    refused("2 different names, one per target, got", p.to_pandas, names=["height"])
    for table in (p.to_pandas, p.to_polars):
        refused("different names", table, names=["height", "height"])


def test_tables_have_conformal_bounds_where_there_are_any_unless_asked_otherwise():
    plain = prediction(Gaussian())
    p = with_scores(plain, "label")
    low, _ = p.interval(LEVEL, conformal=True)
    by_the_distribution = plain.interval(LEVEL)[0]
    assert not torch.allclose(low, by_the_distribution)
    for conformal, expected in ((None, low), (True, low), (False, by_the_distribution)):
        arrays = p.to_numpy(LEVEL, conformal=conformal)
        np.testing.assert_allclose(arrays["low"], expected)
        frame = p.to_pandas(LEVEL, conformal=conformal)
        np.testing.assert_allclose(frame["low_0"].to_numpy(), expected[:, 0])
        table = p.to_polars(LEVEL, conformal=conformal)
        np.testing.assert_allclose(table["low_0"].to_numpy(), expected[:, 0])
    np.testing.assert_allclose(plain.to_numpy(LEVEL)["low"], by_the_distribution)
    refused("conformalize", plain.to_pandas, conformal=True)


def test_a_missing_library_is_named(monkeypatch):
    for name, remedy in (("pandas", r"rigidities\[tabular\]"), ("polars", "pip install polars")):
        monkeypatch.setitem(sys.modules, name, None)
        call = getattr(prediction(Gaussian()), f"to_{name}")
        refused(remedy, call, error=ModuleNotFoundError)


# --- pictures -----------------------------------------------------------------------------------


def test_a_prediction_says_in_one_line_what_it_is():
    p = Prediction(
        *(torch.tensor(one) for one in ([0.34, -12.0, 5.0, 1.0],) + ([0.01, 4.0, 0.0, 1.0],) * 3)
    )
    assert (
        repr(p)
        == "Prediction of 4 rows: 0.34 ± 0.14, -12.0 ± 2.8, 5 ± 0, ...; distribution gaussian"
    )
    assert repr(p[0]) == "Prediction of 1 row: 0.34 ± 0.14; distribution gaussian"
    assert repr(prediction(Gaussian())).startswith("Prediction of 6 rows x 2: ")


def test_a_prediction_off_its_distributions_centre_shows_both():
    one = torch.ones(3, dtype=torch.float64)
    distribution = Mixture(torch.zeros(2), torch.tensor([0.2, 3.0]), torch.tensor([-1.0, 0.5]))
    p = Prediction(2.33 * one, 0.05 * one, 0.05 * one, one, distribution=distribution)
    assert f"2.33 ± 0.32 (centre {float(p.centre[0]):.2f}), " in repr(p)
    assert f"(centre {float(p.centre[0]):.2f})" in p._repr_html_()
    straight = replace(p, distribution=StudentT(5.0))
    assert "centre" not in repr(straight) + straight._repr_html_()


def test_a_notebook_shows_a_table_and_bars_for_each_target():
    p = prediction(DISTRIBUTIONS["mixture"])
    page = p._repr_html_()
    assert page.count("<svg") == TARGETS and page.count("<tr>") == 6 and "nan" not in page
    low, high = p.interval(0.9)
    assert f"{float(low[0, 0]):.4g} … {float(high[0, 0]):.4g}" in page
    assert "<svg" not in p[:0]._repr_html_()
    unknown = replace(p, mean=p.mean * math.nan)._repr_html_()
    assert "<svg" not in unknown and "nan ± " in unknown
    assert len(Prediction.concatenate([p] * 1000)._repr_html_()) < 12_000
