"""The table of what files hold: its words, and what is said of contents that it does not allow."""

import pytest
import torch

from rigidities.data import schema
from rigidities.data.schema import Array, Finite, Kind, Part
from rigidities.data.storage import Snapshot
from tests.support.refusals import refused

HEADER = {"kind": "test", "targets": 2}


def zeros(*shape, dtype=torch.float64):
    return torch.zeros(shape, dtype=dtype)


@pytest.fixture
def check(monkeypatch):
    """Hold tensors against a table of their shapes, all of them in float64."""

    def checked(words, finite=False, **tensors):
        arrays = {name: Array("float64", shape) for name, shape in words.items()}
        kind = Kind({"targets": int}, {"": Part(arrays, needed=True)}, targets="targets")
        monkeypatch.setitem(schema.KINDS, "test", kind)
        schema.check(tensors, HEADER, finite=finite)

    return checked


@pytest.mark.parametrize(
    ("words", "right", "wrong", "expected"),
    [
        ("", [()], [(1,)], r"\(\) = \(\)"),
        ("K", [(2,)], [(), (1,), (2, 1)], r"\(K\) = \(2\)"),
        ("D D", [(3, 3), (0, 0)], [(3, 4), (3,)], r"\(D, D\)"),
        ("K 5", [(2, 5)], [(2, 4), (5, 2)], r"\(K, 5\) = \(2, 5\)"),
        ("_ _", [(3, 4)], [(3,)], r"\(_, _\)"),
        ("...", [(), (3,), (3, 4)], [], ""),
        ("D D+3", [(4, 7)], [(4, 4), (7, 4)], r"\(D, D\+3\) = \("),
        ("D+1 D-1", [(4, 2)], [(2, 4)], r"\(D\+1, D-1\) = \(2, 0\)"),
        ("T D D", [(3, 3), (2, 3, 3)], [(3, 3, 3), (3,)], r"D, D\) = "),
    ],
)
def test_words_say_which_shapes_are_right(check, words, right, wrong, expected):
    for shape in right:
        check({"a": words}, a=zeros(*shape))
    for shape in wrong:
        refused(f"'a' must have the shape .*{expected}", check, {"a": words}, a=zeros(*shape))


@pytest.mark.parametrize(
    ("words", "right", "wrong"),
    [
        ({"a": "D", "b": "D K"}, [(3,), (3, 2)], [(3,), (4, 2)]),
        ({"a": "D+3", "b": "D"}, [(5,), (2,)], [(5,), (5,)]),
        ({"a": "T D", "b": "T"}, [(2, 3), (2,)], [(2, 3), ()]),
        ({"a": "T D", "b": "T"}, [(3,), ()], [(3,), (2,)]),
        ({"a": "T D", "b": "U D"}, [(3,), (2, 3)], [(3,), (2, 4)]),
    ],
)
def test_a_word_means_the_same_in_all_of_a_file(check, words, right, wrong):
    check(words, **{name: zeros(*shape) for name, shape in zip("ab", right, strict=True)})
    others = {name: zeros(*shape) for name, shape in zip("ab", wrong, strict=True)}
    refused("'b' must have the shape", check, words, **others)


def test_names_may_be_missing_or_any(check):
    check({"a": "K", "b?": "K"}, a=zeros(2))
    refused(r"lacks the tensor .*a \(float64, \(K\)\)", check, {"a": "K", "b?": "K"}, b=zeros(2))
    check({"a*": "K"}, a1=zeros(2), a2=zeros(2))
    refused("'a2' must have", check, {"a*": "K"}, a1=zeros(2), a2=zeros(3))
    refused("a tensor 'b', which no test of this version has", check, {"a*": "K"}, b=zeros(2))


@pytest.mark.parametrize(
    ("dtype", "right", "wrong"),
    [
        ("int64", [torch.int64], [torch.int32, torch.float64]),
        ("floating", [torch.float64, torch.float32, torch.bfloat16], [torch.int64, torch.bool]),
        ("any", [torch.bool, torch.float64], []),
    ],
)
def test_dtypes_are_one_or_a_class_of_them(dtype, right, wrong):
    array = Array(dtype, "")
    assert all(array.allows_dtype(zeros(dtype=one)) for one in right)
    assert not any(array.allows_dtype(zeros(dtype=one)) for one in wrong)


@pytest.mark.parametrize(
    ("expected", "right", "wrong"),
    [
        (int, [0, 10**30], [True, 2.5, "1", None, []]),
        (float, [1, 2.5, float("nan")], [False, "1", None]),
        (Finite, [1, 2.5], [float("nan"), float("inf"), True, None]),
        (bool, [True], [1, None]),
        (str | None, ["a", None], [1, True]),
        (object, [None, True, [1], "a"], []),
    ],
)
def test_header_entries_have_types(monkeypatch, expected, right, wrong):
    monkeypatch.setitem(schema.KINDS, "test", Kind({"entry": expected}, {}))
    for value in right:
        schema.check({}, {"kind": "test", "entry": value}, finite=True)
    for value in wrong:
        header = {"kind": "test", "entry": value}
        refused("'entry' of its header must be", schema.check, {}, header, finite=True)
    refused("its header lacks 'entry'", schema.check, {}, {"kind": "test"}, finite=True)


def test_numbers_are_looked_at_where_it_is_asked_for(check, monkeypatch):
    wrong = torch.tensor([0.0, torch.nan], dtype=torch.float64)
    check({"a": "K"}, a=wrong)
    refused("'a' must be finite", check, {"a": "K"}, finite=True, a=wrong)
    loose = Kind({}, {"": Part({"a": Array("float64", "_", finite=False)})})
    monkeypatch.setitem(schema.KINDS, "test", loose)
    schema.check({"a": wrong}, {"kind": "test"}, finite=True)


def test_a_new_statistic_declares_what_it_keeps(tmp_path, monkeypatch):
    monkeypatch.setitem(schema.KINDS, "test", Kind({}, {}))
    path = tmp_path / "kept.safetensors"
    told = Snapshot({"extremes.low": zeros(3), "extremes.high": zeros(3)}, {"kind": "test"})
    refused("not written.*'extremes.high', which no test of this version has", told.write, path)
    assert not path.exists()
    part = Part({"low": Array("float64", "D"), "high": Array("float64", "D")})
    schema.declare("test", "extremes", part)
    schema.declare("test", "extremes", part)  # as a module that is imported anew
    told.write(path)
    assert set(Snapshot.read(path, holds="test").tensors) == set(told.tensors)
    refused("already has a part 'extremes'", schema.declare, "test", "extremes", Part())
    less = Snapshot({"extremes.low": zeros(3)}, {"kind": "test"})
    refused("lacks the tensor extremes.high", less.write, path)


def test_header_and_tensors_of_a_part_come_together(monkeypatch):
    part = Part({"a": Array("float64", "_")}, header={"size": int})
    monkeypatch.setitem(schema.KINDS, "test", Kind({}, {"part": part}))
    whole = {"kind": "test", "part": {"size": 3}}
    schema.check({}, {"kind": "test"}, finite=True)
    schema.check({}, {"kind": "test", "part": None}, finite=True)
    schema.check({"part.a": zeros(3)}, whole, finite=True)
    refused("lacks the tensor part.a", schema.check, {}, whole, finite=True)
    only = {"part.a": zeros(3)}
    refused("its header has no 'part'", schema.check, only, {"kind": "test"}, finite=True)
