"""A sample of rows: those of lowest hash, whatever the order, the batches, merges and removals."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rigidities as rg
from rigidities.calibration.rows import fewer_copies
from rigidities.data.hashes import NO_LIMIT, output_hashes
from rigidities.data.output_layout import OutputLayout
from rigidities.readout.reading import Reading
from rigidities.statistics import row_sketch
from rigidities.statistics.block import BatchRange, Block
from rigidities.statistics.row_sketch import KeptRows
from rigidities.statistics.statistics import Plan
from tests.support.refusals import refused


def add(sample, hashes, weighted=False):
    """Rows whose every column tells the hash."""
    hashes = torch.tensor(hashes, dtype=torch.int64).reshape(-1)
    block = block_of(hashes, weighted)
    if len(hashes):
        sample.update(block)
    return block


def block_of(hashes, weighted=False):
    columns = columns_of(hashes)
    mean = columns["mean"]
    layout = OutputLayout(mean.shape, mean.shape)
    reading = Reading(mean, columns["features"], layout, bias_counts=columns["bias_counts"])
    block = Block(
        samples=len(hashes),
        rows=len(hashes),
        reading=reading,
        target=mean.double() + columns["residual"],
        weights=columns["weight"],
        sample_weight=columns["weight"] + 1 if weighted else None,
        inputs=[],
        batches=BatchRange(0, (len(hashes),)),
        known_hashes=hashes,
    )
    if weighted:
        vars(block)["output_row_hashes"] = hashes  # which the sample weight would change
    return block


def columns_of(hashes):
    own = hashes[:, None].double()
    columns = {"features": own.float() * torch.tensor([1.0, 2, 3]), "mean": own.float() + 1}
    return columns | {"residual": own + 2, "weight": own + 3, "bias_counts": hashes[:, None] + 5}


def sample_of(hashes, size, batch=4):
    made = KeptRows(size)
    for start in range(0, max(1, len(hashes)), batch):
        add(made, hashes[start : start + batch])
    made.settle()
    return made


def merged(sample, other):
    sample.merge(other)
    return sample


def waiting(sample):
    return len(sample.hashes) + sample._waiting_rows


def lowest(hashes, size, limit=NO_LIMIT):
    """Copies by hash and the limit, one by one."""
    copies = Counter(h for h in hashes if h < limit)
    ordered = sorted(copies)
    limit = ordered[size] if len(ordered) > size else limit
    return {h: copies[h] for h in ordered if h < limit}, limit


def check(sample, expected):
    sample.settle()
    copies, limit = expected
    assert sample.limit == limit
    assert dict(zip(sample.hashes.tolist(), sample.counts.tolist(), strict=True)) == copies
    assert sample.hashes.tolist() == sorted(copies)
    whole = columns_of(torch.tensor(list(copies), dtype=torch.int64))
    for name, column in sample.columns.items():
        assert torch.equal(column, whole[name]), name
    if copies:
        assert len(sample.rows["mean"]) == sum(copies.values())


HASHES = st.lists(st.integers(0, 40), max_size=60)
SIZES = st.integers(1, 12)


@settings(deadline=None)
@given(HASHES, SIZES, st.integers(1, 20), st.randoms())
def test_order_and_batches_do_not_change_the_rows_of_lowest_hash(hashes, size, batch, random):
    shuffled = random.sample(hashes, len(hashes))
    for given_ in (hashes, shuffled):
        check(sample_of(given_, size, batch), lowest(hashes, size))


def test_of_a_large_batch_only_what_fits_is_copied():
    sample = KeptRows(5)
    add(sample, list(range(1000, 0, -1)))
    assert waiting(sample) == 5
    add(sample, list(range(1000, 0, -1)))
    check(sample, lowest([*range(1, 1001)] * 2, 5))


@settings(deadline=None)
@given(HASHES, HASHES, SIZES, SIZES)
def test_two_samples_merge_to_that_of_the_union(left, right, size, other):
    both = merged(sample_of(left, size), sample_of(right, size))
    check(both, lowest(left + right, size))
    few = sample_of(right, other)
    both = merged(sample_of(left, size), few)
    check(both, lowest(left + right, min(size, other), few.limit))


@settings(deadline=None)
@given(HASHES, SIZES, st.data())
def test_what_is_taken_out_leaves_all_other_rows_below_the_limit(hashes, size, data):
    chosen = data.draw(st.lists(st.booleans(), min_size=len(hashes), max_size=len(hashes)))
    out = [h for h, gone in zip(hashes, chosen, strict=True) if gone]
    rest = [h for h, gone in zip(hashes, chosen, strict=True) if not gone]
    whole = sample_of(hashes, size)
    removed = KeptRows(size, whole.limit)
    add(removed, out)
    check(whole.without(removed), (lowest(rest, 99, whole.limit)[0], whole.limit))
    check(whole, lowest(hashes, size))
    check(merged(whole.without(removed), removed), lowest(hashes, size))


def test_rows_that_were_never_held_are_passed_over():
    whole, removed = sample_of([3, 1, 4, 4], 9), sample_of([1, 1, 5, 4], 9)
    assert whole.lacking(removed) == (2, 4)
    left = whole.without(removed)
    check(left, ({3: 1, 4: 1}, NO_LIMIT))


def test_wide_rows_are_fewer(monkeypatch):
    # Features, mean, residual, weight, count of the bias; hash and count.
    bytes_per_row = 3 * 4 + 4 + 8 + 8 + 8 + 16
    monkeypatch.setattr(row_sketch, "MOST_BYTES", 6 * bytes_per_row)
    block = block_of(torch.arange(3))
    # Room for an eighth more, which may wait after a pass.
    assert KeptRows.begin(block, 12, NO_LIMIT).size == 5
    assert KeptRows.begin(block, 3, NO_LIMIT).size == 3
    assert KeptRows.begin(block, 0, NO_LIMIT) is None


def test_a_known_number_of_rows_spares_copies_and_changes_no_row():
    hashes = torch.randint(0, NO_LIMIT, (5000,), generator=torch.Generator().manual_seed(0))
    without = sample_of(hashes.tolist(), 64, batch=100)
    samples = []
    for order in (hashes, hashes.flip(0), hashes.sort().values):
        sample = KeptRows(64)
        copied = 0
        for rows in order.split(100):
            before = sample._waiting_rows
            sample.expect(5000, rows)
            add(sample, rows.tolist())
            copied += max(0, sample._waiting_rows - before)
        sample.settle()
        assert copied < 1000
        samples.append(sample)
    for sample in samples:
        assert torch.equal(sample.hashes, without.hashes) and sample.limit == without.limit
        assert torch.equal(sample.columns["features"], without.columns["features"])


@pytest.mark.parametrize(("distinct", "kept"), [(20, 20), (2000, 51)])
def test_copies_of_rows_leave_the_same_rows_in_any_order(distinct, kept):
    """Twenty distinct rows are all kept, and of many a fixed share, whatever comes first."""
    generator = torch.Generator().manual_seed(1)
    some = torch.randint(0, NO_LIMIT, (distinct,), generator=generator)
    copies = some.repeat(6000 // distinct)
    shuffled = copies[torch.randperm(len(copies), generator=generator)]
    samples = []
    for order in (copies, copies.sort().values, shuffled):
        for batch in (13, 500):
            sample = KeptRows(2000)
            for rows in order.split(batch):
                sample.expect(len(copies), rows)
                add(sample, rows.tolist())
            sample.settle()
            samples.append(sample)
    for sample in samples:
        assert torch.equal(sample.hashes, samples[0].hashes)
        assert torch.equal(sample.counts, samples[0].counts)
    assert len(samples[0].hashes) >= kept


def test_few_copies_are_taken_of_each_row_where_there_are_too_many():
    hashes = torch.randint(0, NO_LIMIT, (40,), generator=torch.Generator().manual_seed(2))
    sample = sample_of(hashes.repeat(50).tolist(), 100, batch=200)
    assert len(sample.rows["mean"]) == 2000
    rows = sample.repeated(fewer_copies(sample.hashes, sample.counts, 400))["mean"]
    copies = torch.unique(rows, return_counts=True)[1]
    assert len(copies) == 40 and set(copies.tolist()) <= {10, 11} and len(rows) <= 440


def test_sorting_waits_until_rows_are_read():
    sample = KeptRows(100)
    add(sample, [5, 3, 9])
    sample.compact()
    assert sample._waiting_rows == 3
    assert sample.rows["mean"].reshape(-1).tolist() == [4, 6, 10]
    full = KeptRows(8)
    add(full, list(range(8)))
    add(full, list(range(100, 102)))
    full.compact()
    assert full._waiting_rows == 0 and full.hashes.tolist() == list(range(8))


def test_rows_are_copied_when_they_come_in():
    sample = KeptRows()
    add(sample, [2, 1]).reading.bare_features.zero_()
    check(sample, ({1: 1, 2: 1}, NO_LIMIT))


def test_memory_stays_bounded_while_rows_come_in():
    g, sample = torch.Generator().manual_seed(0), KeptRows(10)
    most = 0
    for _ in range(300):
        add(sample, torch.randint(0, 1 << 40, (7,), generator=g).tolist())
        most = max(most, waiting(sample))
    sample.settle()
    assert most < 60 and len(sample.hashes) == 10
    for _ in range(300):
        add(sample, [1, 2, 3] * 3)
        most = max(most, waiting(sample))
    sample.settle()
    assert most < 60 and sample.counts[:3].tolist() == [900] * 3


def test_a_copy_goes_its_own_way():
    sample = sample_of([5, 6], 9)
    copy = sample.clone()
    add(copy, [1])
    check(copy, ({1: 1, 5: 1, 6: 1}, NO_LIMIT))
    check(sample, ({5: 1, 6: 1}, NO_LIMIT))
    assert sample.to(torch.device("meta")).columns["features"].is_meta


def test_rows_with_and_without_sample_weights_do_not_mix():
    sample = sample_of([5, 6], 9)
    refused("with and without a sample weight", add, sample, [1], weighted=True)
    weighted = KeptRows(9)
    add(weighted, [1], weighted=True)
    refused("with and without a sample weight", sample.merge, weighted)


@pytest.mark.parametrize("size", [-1, 1.5, True, None, "8"])
def test_the_size_is_a_whole_number(size):
    refused("whole number of rows, 0 for none", Plan, size)


def test_several_rows_of_an_input_have_hashes_of_their_own():
    hashes = torch.randint(0, NO_LIMIT, (50,))
    several = output_hashes(hashes, 150, None)
    assert len(torch.unique(several)) == 150 and bool((several >= 0).all())
    assert torch.equal(several[30:60], output_hashes(hashes[10:20], 30, None))
    assert output_hashes(hashes, 50, None) is hashes


def test_rows_of_other_weight_are_other_rows_in_the_same_order():
    hashes = torch.randint(0, NO_LIMIT, (50,))
    ones, twos = (output_hashes(hashes, 50, torch.full((50, 2), float(w))) for w in (1, 2))
    assert not bool((ones == twos).any())
    assert torch.equal(ones.argsort(), hashes.argsort()) and torch.equal(ones >> 24, hashes >> 24)


def test_a_sample_comes_back_from_its_state():
    sample = sample_of([5, 6, 6, 9, 2], 3)
    again = KeptRows.from_state(sample.state())
    check(again, lowest([5, 6, 6, 9, 2], 3))
    assert again.size == 3
    check(merged(again, sample_of([1], 3)), lowest([5, 6, 6, 2, 1], 3, 9))


def test_a_sample_takes_no_rows_of_other_targets_or_without_residuals():
    block = block_of(torch.tensor([1]))
    for sample in (KeptRows(9), sample_of([5, 6], 9)):
        assert sample.takes(block)
    vars(block)["residual"] = torch.zeros(1, 2)
    for settled in (False, True):
        sample = sample_of([5, 6], 9)
        if settled:
            sample.settle()
        assert not sample.takes(block)
    vars(block)["residual"] = None
    assert not sample.takes(block)


def test_rows_without_targets_lose_the_sample_for_good(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    x, y = torch.randn(40, 3), torch.randn(40, 1)
    uq, whole = (rg.LastLayerRigidity(model).fit(x[:20], y[:20]) for _ in range(2))
    uq.partial_fit((x[20:30],)).partial_fit(x[30:], y[30:])
    refused("keeps no rows", uq.save, tmp_path / "uq", rows=True)
    uq.forget(x[30:], y[30:])
    refused("keeps no rows", uq.save, tmp_path / "uq", rows=True)
    with pytest.warns(UserWarning, match="keeps none"):
        whole.merge(rg.LastLayerRigidity(model).fit(x[30:], y[30:], keep_rows=0))
    refused("keeps no rows", whole.save, tmp_path / "uq", rows=True)
