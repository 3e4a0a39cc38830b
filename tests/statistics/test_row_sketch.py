"""Sketches of rows: exact on few rows, unbiased on many, and the same in any order or batch."""

import pytest
import torch

from rigidities.data.hashes import NO_LIMIT, row_hashes
from rigidities.statistics import row_sketch
from rigidities.statistics.row_sketch import RowSketch


def hashes(*tensors):
    return row_hashes(tensors, len(tensors[0]))


def sketch_of(*parts):
    made = RowSketch()
    for part in parts:
        made.add(part)
    return made


def test_shared_rows_are_counted_exactly_while_few():
    x = torch.randn(3000, 4)
    made = sketch_of(*hashes(x).split(100))
    assert made.shared(hashes(torch.cat([x[:50], x[:50] + 1]))) == 50


def test_shared_rows_are_estimated_beyond_the_size(monkeypatch):
    monkeypatch.setattr(row_sketch, "HASHES", 1000)
    x = torch.randn(20_000, 2)
    made = sketch_of(*hashes(x).split(500))
    assert len(made.clone().hashes) == 1000
    both = torch.cat([x[:4000], torch.randn(4000, 2)])
    assert made.shared(hashes(both)) == pytest.approx(4000, rel=0.2)


def test_sketches_merge_and_forget(monkeypatch):
    monkeypatch.setattr(row_sketch, "HASHES", 50)
    h = hashes(torch.randn(300, 2))
    whole, left, right = sketch_of(h), sketch_of(h[:100]), sketch_of(h[100:])
    left.merge(right)
    assert torch.equal(left.clone().hashes, whole.clone().hashes)
    few = sketch_of(h[:10])
    few.merge(whole)
    assert few.clone().hashes.max() < whole.limit
    assert left.without(sketch_of(h)).shared(h) == 0
    twice = sketch_of(h[:10], h[:10])
    assert twice.without(sketch_of(h[:10])).shared(h[:10]) == 10
    again = RowSketch.from_state(whole.state())
    assert again.shared(h) == whole.shared(h) and again.limit == whole.limit


def test_rows_that_are_lacking_are_counted_copy_by_copy(monkeypatch):
    monkeypatch.setattr(row_sketch, "HASHES", 50)
    h, foreign = hashes(torch.randn(300, 2)), hashes(torch.randn(40, 2))
    few = sketch_of(h[:20], h[:10])
    assert few.lacking(sketch_of(h[:20])) == (0, 20)
    assert few.lacking(sketch_of(h[:10], h[:20])) == (0, 30)
    assert few.lacking(sketch_of(h[:12], h[:12], foreign[:5])) == (2 + 5, 29)
    assert RowSketch().lacking(sketch_of(foreign)) == (40, 40)
    whole = sketch_of(h)
    assert whole.lacking(sketch_of(h[::2])) == (0, int((h[::2] < whole.limit).sum()))
    below = int((foreign < whole.limit).sum())
    assert whole.lacking(sketch_of(foreign)) == (below, below)


def test_rows_that_come_one_by_one_do_not_pile_up():
    hashes = torch.randperm(5000) + 1
    one_by_one, at_once = RowSketch(100), RowSketch(100)
    at_once.add(hashes)
    for row in hashes.split(1):
        one_by_one.add(row)
        assert one_by_one._waiting_rows <= 800
    for name, tensor in at_once.state().items():
        assert torch.equal(one_by_one.state()[name], tensor)


def test_an_expected_number_of_rows_saves_work_and_changes_nothing():
    hashes = hashes_of(20_000)
    told, untold = RowSketch(500), RowSketch(500)
    told.expect(20_000, hashes[:1000])
    for part in hashes.split(1000):
        told.add(part)
        untold.add(part)
    assert told._waiting_rows < 800
    for name, tensor in untold.state().items():
        assert torch.equal(told.state()[name], tensor), name


def hashes_of(rows):
    return hashes(torch.randn(rows, 3, generator=torch.Generator().manual_seed(1)))


def test_a_trimmed_sketch_holds_what_is_below_the_limit():
    whole = sketch_of(hashes_of(300))
    limit = int(whole.clone().hashes[100])
    few = whole.trimmed(limit)
    assert torch.equal(few.hashes, whole.hashes[:100]) and few.limit == limit
    assert len(whole.hashes) == 300


def test_a_row_without_a_hash_leaves_nothing_to_judge_by():
    made, other = sketch_of(hashes_of(300)), sketch_of(hashes_of(100))
    made.void()
    made.add(hashes_of(20))
    assert made.limit == 0 and not len(made.clone().hashes)
    assert made.overlap(other) == other.overlap(made) == (0, 0, 0)
    assert made.shared(hashes_of(20)) == 0
    other.merge(made)
    assert other.limit == 0 and not len(other.hashes)
    again = RowSketch.from_state(made.state())
    assert again.limit == 0


def test_a_trimmed_sketch_lets_go_of_the_memory_of_other_rows():
    few = sketch_of(hashes_of(300)).trimmed(NO_LIMIT // 50)
    assert 0 < len(few.hashes) < 100
    for tensor in (few.hashes, few.counts):
        assert tensor.untyped_storage().nbytes() == 8 * len(few.hashes)


def test_of_two_sketches_the_smaller_size_remains():
    large, small = RowSketch(100), RowSketch(10)
    large.add(hashes_of(60))
    small.add(hashes_of(60))
    assert large.merge(small) is large
    assert large.size == 10
    for name, tensor in small.state().items():
        assert name == "counts" or torch.equal(large.state()[name], tensor), name
    assert bool((large.counts == 2).all())


def test_rows_that_come_one_by_one_are_sorted_in_before_they_take_much_memory():
    sketch, whole = RowSketch(), RowSketch()
    hashes = torch.randint(0, 1 << 62, (3000,), generator=torch.Generator().manual_seed(0))
    for row in hashes:
        sketch.add(row[None])
    assert len(sketch.hashes) >= 2000
    whole.add(hashes)
    for one in (sketch, whole):
        one.settle()
    assert torch.equal(sketch.hashes, whole.hashes) and torch.equal(sketch.counts, whole.counts)
