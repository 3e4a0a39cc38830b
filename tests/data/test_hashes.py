"""Hashes of rows and of tensors: equal for equal values, in any order, batch or precision."""

import pytest
import torch

from rigidities.data import hashes as hashing
from rigidities.data.hashes import near_hashes, row_hashes, tensor_hashes
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
    assert hashing.fingerprint(named) == "afd2142b31d74ebe"
    monkeypatch.setattr(hashing, "_PIECE", 128)  # tensors in several parts, and apart
    assert hashing.fingerprint(named) == "54483dd9ff6fcbb3"
    assert tensor_hashes(tensors) == [tensor_hashes([tensor])[0] for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_tensor_of_no_columns_beside_others_says_nothing(dtype):
    x, none = torch.randn(5, 3), torch.empty(5, 0, dtype=dtype)
    assert torch.equal(hashes(x, none), hashes(x))
    assert len(torch.unique(hashes(none))) == 1
