"""Mixed precision: short products, float64 sums, and a bound on what that changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rigidities as rg
from rigidities.posterior import gram as module
from rigidities.posterior.gram import Gram, precision_for
from tests.support.refusals import refused

F64 = torch.float64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def features(rows=6000, width=24, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator)
    return (torch.randn(rows, width, generator=generator) @ mixing / 4).relu().to(dtype)


def both(rows, *, ones=True, batch=500, weights=None):
    grams = []
    for precision in ("mixed", "double"):
        gram = Gram(rows.shape[1] + ones, precision=precision)
        for i in range(0, len(rows), batch):
            own = None if weights is None else weights[i : i + batch]
            gram.update(rows[i : i + batch], own, ones=ones)
        grams.append(gram)
    return grams


def norm(matrix):
    return float(torch.linalg.matrix_norm(matrix))


@pytest.mark.parametrize("ones", [True, False], ids=["ones", "no ones"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_certificate_bounds_the_error_and_does_not_exaggerate(dtype, weighted, ones):
    rows = features(dtype=dtype)
    weights = torch.rand(len(rows)) if weighted else None
    mixed, double = both(rows, ones=ones, weights=weights)
    error = norm(mixed.matrix - double.matrix)
    assert 0 < error <= mixed.rounding_error < 1e-5 * norm(double.matrix)
    assert mixed.rounding_error < 100 * error
    assert double.rounding_error == 0


def test_variances_are_exact_within_the_certificate():
    rows = features(width=40) * torch.logspace(0, -3, 40)
    mixed, double = both(rows, ones=False)
    test = features(rows=300, width=40, seed=5) * torch.logspace(0, -3, 40)
    for ridge in (1e-4, 1e-2, 1.0):
        own, exact = (rg.Posterior.from_gram(gram, ridge) for gram in (mixed, double))
        off = (own.variance(test) / exact.variance(test) - 1).abs().max()
        assert float(off) <= own.doubt
        assert exact.doubt == 0
    assert own.doubt == pytest.approx(mixed.rounding_error / (float(own.eigenvalues[0]) + 1.0))


@given(st.lists(st.integers(1, 2500), min_size=1, max_size=6), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_batching_changes_the_sums_by_less_than_the_certificates(sizes, seed):
    rows = features(sum(sizes), 6, seed=seed)
    pieces = Gram(6, precision="mixed")
    for part in rows.split(sizes):
        pieces.update(part)
    whole, double = both(rows, ones=False, batch=len(rows))
    assert norm(pieces.matrix - double.matrix) <= pieces.rounding_error
    assert norm(pieces.matrix - whole.matrix) <= pieces.rounding_error + whole.rounding_error


def test_halves_merge_and_rows_are_taken_out_within_the_certificate():
    rows = features()
    (left, _), (right, _) = both(rows[:3000]), both(rows[3000:])
    alone, held = left.rounding_error, right.clone()
    merged = left.clone().merge(right)
    _, double = both(rows)
    assert norm(merged.matrix - double.matrix) <= merged.rounding_error
    assert merged.rounding_error == pytest.approx(alone + right.rounding_error, rel=0.5)
    back = merged.without(held)
    assert back.precision == "mixed"
    assert back.rounding_error >= merged.rounding_error  # what was taken out had errors of its own
    assert norm(back.matrix - left.matrix) <= back.rounding_error


def test_float64_features_and_targets_of_their_own_are_multiplied_in_float64():
    rows = features().to(F64)
    mixed, double = both(rows)
    assert torch.equal(mixed.matrix, double.matrix) and mixed.rounding_error == 0
    own = Gram(24, targets=2, precision="mixed")
    own.update(features())
    exact = Gram(24, targets=2)
    exact.update(features())
    assert torch.equal(own.matrix, exact.matrix) and own.rounding_error == 0


def test_a_file_keeps_the_certificate_and_goes_on_alike():
    mixed, _ = both(features())
    state = mixed.state()
    again = Gram.from_state(state)
    assert (again.precision, again.rounding_error) == ("mixed", mixed.rounding_error)
    for part in features(20_000, seed=3).split(500):  # some blocks of these are measured
        for gram in (mixed, again):
            gram.update(part, ones=True)
    for name, tensor in mixed.state().items():
        assert torch.equal(tensor, again.state()[name])


def test_long_blocks_after_short_ones_are_measured_too():
    """A single row is multiplied almost exactly, and tells nothing about sums of many."""
    rows = features(1 + 2 * 1024, 6)
    rows[0] = 1
    gram = Gram(6, precision="mixed")
    for part in rows.split([1, 1024, 1024]):
        gram.update(part)
    _, double = both(rows, ones=False)
    assert norm(gram.matrix - double.matrix) <= gram.rounding_error
    assert gram._longest_measured == 1024


def test_rows_that_start_a_page_apart_are_multiplied_alike():
    rows = features(700, 1024)
    mixed, double = both(rows, batch=300)
    assert (
        0 < norm(mixed.matrix - double.matrix) <= mixed.rounding_error < 1e-5 * norm(double.matrix)
    )


def test_auto_is_double_except_for_half_precision():
    kinds = {
        dtype: precision_for("auto", torch.ones(1, 1, dtype=dtype)) for dtype in (*DTYPES, F64)
    }
    assert [kinds[dtype] for dtype in (*DTYPES, F64)] == ["double", "mixed", "mixed", "double"]


def test_an_unknown_precision_and_a_device_without_float64_are_refused():
    refused("'auto', 'double' or 'mixed', got 'quad'", precision_for, "quad", torch.ones(1, 1))
    refused("'double' or 'mixed', got 'auto'", Gram, 3, precision="auto")

    class OnMps:
        device = torch.device("mps")
        dtype = torch.float32

    refused(r"mps device does not support.*model.cpu\(\)", precision_for, "double", OnMps())


def test_a_device_with_slow_float64_is_told_of_mixed(monkeypatch):
    class OnCuda:
        device, dtype, is_cuda = torch.device("cuda:0"), torch.float32, True

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    with pytest.warns(UserWarning, match=r"slow on A card.*precision='mixed'"):
        assert precision_for("auto", OnCuda()) == "double"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert precision_for("auto", OnCuda()) == "double"


def test_a_side_in_three_parts_keeps_float32s_digits():
    """The way of bfloat16 rows on CUDA, tried on the CPU."""
    rows, side = features(dtype=torch.bfloat16), torch.randn(6000, 2, dtype=F64)
    exact = side.mT @ rows.to(F64)
    error = module._split_times(side.mT, rows) - exact
    assert float(error.abs().max()) < 1e-5 * float(exact.abs().max())


def test_blocks_that_are_exact_by_chance_do_not_certify_the_others():
    rows = torch.randn(20_000, 20)
    rows[:, 1] = rows[:, 0] + 1e-5 * rows[:, 1]
    rows[:16_384] = rows[:16_384].round()  # blocks 1 and 4, which are measured, among them
    mixed, double = both(rows, ones=False)
    assert norm(mixed.matrix - double.matrix) <= mixed.rounding_error


def test_a_calibration_warns_or_refuses_where_mixed_precision_is_too_coarse():
    torch.manual_seed(0)
    x = torch.randn(4000, 4)
    y = x.sin().sum(1, keepdim=True) + 0.1 * torch.randn(4000, 1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 48), torch.nn.Sigmoid(), torch.nn.Linear(48, 1))
    uq = rg.LastLayerRigidity(model).fit((x[:3000], y[:3000]), precision="mixed")
    data, largest = (x[3000:], y[3000:]), float(uq.posterior.eigenvalues.max())
    report = uq.calibrate(data, method=rg.Paper(ridge=1e-2 * largest)).calibration_report
    assert 0 < report.rounding < 1e-3 and "rounding" in str(report) and not report.warnings[1:]
    with pytest.warns(UserWarning, match="mixed precision.*precision='double'"):
        report = uq.calibrate(data, method=rg.Paper(ridge=2e-6 * largest)).calibration_report
    assert 1e-3 < report.rounding < 0.5 and report.warnings
    kept, ridge = uq.calibration_report, 1e-10 * largest
    refused("mixed precision", uq.calibrate, data, method=rg.Paper(ridge=ridge))
    assert uq.calibration_report is kept
    double = rg.LastLayerRigidity(model).fit((x[:3000], y[:3000]))
    assert double.calibrate(data, method=rg.Paper(ridge=ridge)).calibration_report.rounding == 0


@pytest.mark.parametrize("rows", [900, 3000])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_certificate_holds_for_few_blocks_and_one_dominant_feature(rows, weighted):
    for seed in range(12):
        made = torch.Generator().manual_seed(seed)
        f = torch.randn(rows, 16, generator=made)
        f[:, 3] = 30 + f[:, 3]
        weights = torch.full((rows,), 1 + seed / 7) if weighted else None
        mixed, exact = Gram(16, precision="mixed"), Gram(16)
        for part in range(0, rows, 1024):
            w = None if weights is None else weights[part : part + 1024]
            mixed.update(f[part : part + 1024], w)
            exact.update(f[part : part + 1024], w)
        off = torch.linalg.matrix_norm(mixed.matrix - exact.matrix, 2)
        assert float(off) <= mixed.rounding_error


def test_autocast_does_not_reach_the_products():
    f = torch.randn(2000, 12, generator=torch.Generator().manual_seed(0))
    inside, outside = Gram(12, precision="mixed"), Gram(12, precision="mixed")
    outside.update(f, residuals=f[:, :1])
    with torch.autocast("cpu", torch.bfloat16):
        inside.update(f, residuals=f[:, :1])
    for name, tensor in outside.state().items():
        assert torch.equal(inside.state()[name], tensor), name
