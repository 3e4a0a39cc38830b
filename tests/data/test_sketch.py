"""Row hashes: exact on few rows, unbiased on many, and the same in any order or batch."""

import pytest
import torch

from rigidities.data import sketch
from rigidities.data.sketch import RowSketch, near_hashes, row_hashes, tensor_hashes
from rigidities.last_layer.binding import model_fingerprint as fingerprint


def hashes(*tensors):
    return row_hashes(tensors, len(tensors[0]))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]
)
@pytest.mark.parametrize("width", [1, 3, 700, 5000])
def test_equal_rows_have_equal_hashes_and_others_do_not(dtype, width):
    x = (100 * torch.rand(40, width, generator=torch.Generator().manual_seed(0))).to(dtype)
    x[7] = x[3]
    one = hashes(x)
    distinct = len(torch.unique(x, dim=0))
    assert one[7] == one[3]
    assert len(torch.unique(one)) == distinct
    assert torch.equal(one[5:9], hashes(x[5:9]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("width", [8, 9])
def test_small_whole_numbers_do_not_collide(dtype, width):
    digits = torch.cartesian_prod(*[torch.arange(4)] * 8).to(dtype)
    rows = torch.cat([digits, torch.ones(len(digits), width - 8, dtype=dtype)], 1)
    assert len(torch.unique(hashes(rows))) == len(rows) == 4**8


def test_features_of_another_pass_mostly_have_the_same_near_hash():
    g = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(5000, 30, generator=g) for _ in range(2))
    one, other = near_hashes(x, 1e-3), near_hashes(x * (1 + 1e-7 * noise), 1e-3)
    assert float((one == other).double().mean()) > 0.98
    assert not bool((one == near_hashes(x + noise, 1e-3)).any())


def test_tensors_without_plain_rows_have_no_hashes():
    x = torch.eye(3)
    assert hashes(x.to_sparse()) is None and hashes(torch.tensor(3.0)[None], x) is None
    nested = torch.nested.nested_tensor([x, x], layout=torch.jagged)
    assert row_hashes([nested], 2) is None


def test_order_and_place_of_values_matter():
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 1.0]])
    assert hashes(a) != hashes(b)
    assert hashes(a, b) != hashes(b, a)


def test_values_without_rows_have_no_hashes():
    assert row_hashes([torch.ones(3), "text"], 3) is None
    assert row_hashes([torch.ones(3)], 4) is None
    assert row_hashes([torch.tensor(1.0)], 1) is None


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
    monkeypatch.setattr(sketch, "SIZE", 1000)
    x = torch.randn(20_000, 2)
    made = sketch_of(*hashes(x).split(500))
    assert len(made.clone().hashes) == 1000
    both = torch.cat([x[:4000], torch.randn(4000, 2)])
    assert made.shared(hashes(both)) == pytest.approx(4000, rel=0.2)


def test_sketches_merge_and_forget(monkeypatch):
    monkeypatch.setattr(sketch, "SIZE", 50)
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
    monkeypatch.setattr(sketch, "SIZE", 50)
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


def test_fingerprints_tell_models_apart_but_not_lossless_casts():
    model = torch.nn.Linear(3, 2)
    one = fingerprint(model)
    assert fingerprint(model.double()) == one
    with torch.no_grad():
        model.weight[0, 0] += 1e-12
    assert fingerprint(model) != one


@pytest.mark.parametrize("part", ["real", "imag"])
def test_either_part_of_a_complex_tensor_changes_its_hash(part):
    x = torch.randn(70, dtype=torch.complex64)
    one, *others = tensor_hashes([x, x.to(torch.complex128), x.conj().resolve_conj().conj()])
    assert others == [one, one]
    getattr(x, part)[3] += 1e-3
    assert tensor_hashes([x]) != [one]


@pytest.mark.parametrize("shape", [(), (0,), (5,), (130,), (64, 64)])
def test_every_shape_has_a_hash(shape):
    x = torch.randn(shape)
    assert 0 <= tensor_hashes([x])[0] < 1 << 63
    if x.numel() > 1:
        assert tensor_hashes([x]) != tensor_hashes([x.flip(0)])


def test_hashes_and_fingerprints_are_those_of_earlier_files(monkeypatch):
    values = torch.arange(300, dtype=torch.float64) / 7  # division rounds alike everywhere
    tensors = [values, values[:5].float(), (7 * values).long(), values[:0], values[:70] > 5]
    tensors = [*tensors, torch.complex(values, -values)]
    named = [(f"layer.{i}", tensor) for i, tensor in enumerate(tensors)]
    assert sketch.fingerprint(named) == "afd2142b31d74ebe"
    monkeypatch.setattr(sketch, "_PIECE", 128)  # tensors in several parts, and apart
    assert sketch.fingerprint(named) == "54483dd9ff6fcbb3"
    assert tensor_hashes(tensors) == [tensor_hashes([tensor])[0] for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_tensor_of_no_columns_beside_others_says_nothing(dtype):
    x, none = torch.randn(5, 3), torch.empty(5, 0, dtype=dtype)
    assert torch.equal(hashes(x, none), hashes(x))
    assert len(torch.unique(hashes(none))) == 1


def test_rows_that_come_one_by_one_do_not_pile_up():
    hashes = torch.randperm(5000) + 1
    one_by_one, at_once = RowSketch(100), RowSketch(100)
    at_once.add(hashes)
    for row in hashes.split(1):
        one_by_one.add(row)
        assert one_by_one._recent is None or one_by_one._recent._filled <= 800
    for name, tensor in at_once.state().items():
        assert torch.equal(one_by_one.state()[name], tensor)


def test_an_expected_number_of_rows_saves_work_and_changes_nothing():
    hashes = hashes_of(20_000)
    told, untold = RowSketch(500), RowSketch(500)
    told.expect(20_000, hashes[:1000])
    for part in hashes.split(1000):
        told.add(part)
        untold.add(part)
    assert told._recent._filled < 800
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
