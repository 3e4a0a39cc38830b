"""Calibration on more rows than are held, or searched with: bounded, and what was chosen told."""

import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.calibration import paper
from rigidities.calibration import rows as tables
from rigidities.calibration.methods import Paper
from rigidities.data.hashes import row_hashes
from rigidities.last_layer import calibration_rows
from rigidities.statistics.row_sketch import RowSketch

F64 = torch.float64


def uq_and_rows(rows=4000, width=6):
    """A linear model, and rows whose errors have a floor beside what the features tell."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=generator, dtype=F64)
    x *= torch.logspace(0, -2, width, dtype=F64)
    noise = torch.randn(rows, 1, generator=generator, dtype=F64)
    model = nn.Linear(width, 1, dtype=F64)
    y = model(x).detach() + (0.3 + x[:, :1].square()) * noise
    return rg.LastLayerRigidity(model).fit((x[:50], y[:50])), (x[50:], y[50:])


@pytest.mark.parametrize(("largest", "rows"), [(12 * 80, 1 << 17), (1 << 27, 80)])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_rows_are_thinned_evenly_and_in_step_with_no_period(monkeypatch, largest, rows, batch):
    monkeypatch.setattr(tables, "LARGEST", largest)
    monkeypatch.setattr(tables, "ROWS", rows)
    monkeypatch.setattr(tables, "_BATCHES", 3)
    collector, index = tables.RowCollector(), torch.arange(1024, dtype=F64)
    for part in index.split(batch):
        collector.add(part[:, None], part[:, None], part[:, None].expand(-1, 4))
    found = collector.table()
    kept = found.error[:, 0]
    assert found.count == 1024 and 32 <= len(kept) <= 80
    assert torch.equal(torch.cat(found.power)[:, 0, 0], kept)
    gaps = kept.diff()
    assert float(gaps.max()) <= 3 * float(gaps.mean())
    for period in (2, 4, 8):  # of outputs, say: none is left out, as every other row would do
        assert len(set((kept % period).tolist())) == period


def by_hash(values, hashes, batch, parts=1):
    """The rows left of those whose every column is their value, by value."""
    collectors = []
    for part, part_hashes in zip(values.chunk(parts), hashes.chunk(parts), strict=True):
        collector = tables.RowCollector(sketch=RowSketch())
        for rows, known in zip(part.split(batch), part_hashes.split(batch), strict=True):
            column = rows[:, None]
            collector.add(column, column, column.expand(-1, 4), hashes=known)
        collectors.append(collector)
    for other in collectors[1:]:
        collectors[0].merge(other)
    found = collectors[0].table(to_fit=False)
    assert torch.equal(torch.cat(found.power)[:, 0, 0], found.error[:, 0])
    assert found.count == len(values)
    return found.error[:, 0].sort().values


@pytest.mark.parametrize("copies", [1, 7, 300])
def test_which_rows_are_left_does_not_depend_on_order_batches_or_processes(monkeypatch, copies):
    monkeypatch.setattr(tables, "ROWS", 200)
    monkeypatch.setattr(tables, "_BATCHES", 3)
    distinct = 2100 // copies
    index = torch.arange(distinct, dtype=F64)
    hashes = row_hashes([index], distinct)
    index, hashes = index.repeat(copies), hashes.repeat(copies)
    expected = by_hash(index, hashes, 2100)
    # Distinct rows are not thinned while there are few, whatever the number of their copies.
    assert len(expected.unique()) == distinct if distinct < 200 else len(expected) > 80
    assert len(expected) <= 220
    for seed, batch, parts in [(0, 1, 1), (1, 50, 1), (2, 300, 1), (3, 20, 3)]:
        order = torch.randperm(len(index), generator=torch.Generator().manual_seed(seed))
        assert torch.equal(by_hash(index[order], hashes[order], batch, parts), expected)


@pytest.mark.parametrize("method", ["full", "paper"])
def test_calibration_is_that_of_the_same_rows_in_any_order(monkeypatch, method):
    monkeypatch.setattr(tables, "ROWS", 1000)
    monkeypatch.setattr(calibration_rows, "MOST", 1000)
    uq, (x, y) = uq_and_rows()
    report = uq.calibrate((x, y), method=method).calibration_report
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    uq.batch_size = 70
    other = uq.calibrate((x[order], y[order]), method=method).calibration_report
    assert report.used == other.used < report.rows == other.rows
    torch.testing.assert_close(report.scale, other.scale, rtol=1e-2, atol=0)


@pytest.mark.parametrize("noise", ["none", "constant", "bayes"])
@pytest.mark.parametrize("criterion", ["nll", "bins", "loo"])
def test_a_search_in_small_parts_chooses_the_same(monkeypatch, criterion, noise):
    uq, rows = uq_and_rows(500)
    data = {"train": rows} if criterion == "loo" else {"x": rows}
    uq.fit(rows) if criterion == "loo" else None
    whole = uq.calibrate(**data, method=Paper(criterion=criterion, noise=noise)).calibration_report
    for name in ("_CELLS", "_TABLE"):
        monkeypatch.setattr(paper, name, 1000)
    monkeypatch.setattr(tables, "_PIECE", 600)
    uq.batch_size = 30
    parts = uq.calibrate(**data, method=Paper(criterion=criterion, noise=noise)).calibration_report
    assert parts.ridge == pytest.approx(whole.ridge, rel=1e-9)
    torch.testing.assert_close(parts.scale, whole.scale, rtol=1e-9, atol=0)
    torch.testing.assert_close(parts.noise_level, whole.noise_level, rtol=1e-9, atol=0)


@pytest.mark.parametrize("ridge", [None, 0.5])
@pytest.mark.parametrize("criterion", ["nll", "bins"])
def test_a_search_with_some_of_the_rows_ends_with_all_of_them(monkeypatch, criterion, ridge):
    uq, rows = uq_and_rows()
    method = Paper(criterion=criterion, noise="constant", ridge=ridge)
    whole = uq.calibrate(rows, method=method).calibration_report
    judged = []
    target = paper.Objective._target_choices
    monkeypatch.setattr(
        paper.Objective,
        "_target_choices",
        lambda self, q, k, kept, *rest: judged.append(kept) or target(self, q, k, kept, *rest),
    )
    price = paper._PRICE_OF_BINS if criterion == "bins" else 1
    candidates = 34 * (57 if ridge is None else 1)
    monkeypatch.setattr(paper, "EFFORT", 1000 * candidates * price)
    some = uq.calibrate(rows, method=method).calibration_report
    assert 990 <= int(judged[0].sum()) <= 1010 and bool(judged[-1].all())
    assert some.nll == pytest.approx(whole.nll, abs=0.05 if criterion == "bins" else 2e-3)
    if criterion == "nll":  # the scale is the best one of all rows
        p = uq.predict(rows[0])
        squares = (rows[1] - p.mean).square() / p.variance
        assert float(squares.mean()) == pytest.approx(1, rel=1e-9)


def test_the_report_tells_how_many_rows_were_used(monkeypatch):
    uq, rows = uq_and_rows()
    whole = uq.calibrate(rows, method="paper").calibration_report
    assert whole.used == whole.rows == 3950 and "of them used" not in str(whole)
    monkeypatch.setattr(tables, "ROWS", 1000)
    some = uq.calibrate(rows, method="paper").calibration_report
    assert some.rows == 3950 and 400 < some.used <= 1000
    assert f"on 3950 validation rows ({some.used} of them used), method" in str(some)
    # Five hundred rows or so give the scale to 3 %; which ones they are is up to their hashes.
    torch.testing.assert_close(some.scale, whole.scale, rtol=0.15, atol=0)


@pytest.mark.parametrize("cut", [210, 500, 790])
def test_two_collectors_merge_to_that_of_one_pass_thinned_alike(monkeypatch, cut):
    monkeypatch.setattr(tables, "ROWS", 800)
    index = torch.arange(1000, dtype=F64)

    def collected(rows):
        found = tables.RowCollector(sketch=RowSketch())
        column = rows[:, None]
        found.add(column, column, column.expand(-1, 4), sample_weight=1 + column % 3)
        return found

    whole = collected(index).table()
    parts = collected(index[:cut]).merge(collected(index[cut:])).table()
    assert len(whole.error) < 600
    for name in ("error", "noise_factor", "typical_weight"):
        assert torch.allclose(getattr(parts, name), getattr(whole, name), rtol=1e-14), name
    assert parts.count == whole.count == 1000


def test_collectors_that_were_thinned_before_merge_to_an_even_one(monkeypatch):
    monkeypatch.setattr(tables, "ROWS", 200)
    found = tables.RowCollector(sketch=RowSketch())
    for rows in torch.arange(2000, dtype=F64).split([900, 1100]):
        part = tables.RowCollector(sketch=RowSketch())
        for few in rows.split(50):
            part.add(few[:, None], few[:, None], few[:, None].expand(-1, 4))
        found.merge(part)
    kept = found.table().error[:, 0]
    assert found.table().count == 2000 and 90 <= len(kept) <= 200
    assert float(kept.diff().max()) <= 4 * float(kept.diff().mean())
