"""Parquet files as batches: the rows of the whole table, a row group at a time."""

import sys

import pytest
import torch
from torch import nn

import rigidities as rg
from tests.support.refusals import refused

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

COLUMNS = ["a", "b", "c"]


def table(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, 6, generator=generator, dtype=torch.float64).numpy()
    flat = pa.array(numbers[:, 3:5].reshape(-1))
    return pa.table(
        {
            "a": numbers[:, 0].astype("float32"),
            "b": (10 * numbers[:, 1]).astype("int32"),
            "c": numbers[:, 2] > 0,
            "e": pa.FixedSizeListArray.from_arrays(flat, 2),
            "y": numbers[:, 5],
            "z": numbers[:, 0] + 1,
            "word": ["w"] * rows,
        }
    )


def column(whole, name, dtype=torch.float32):
    return torch.tensor(whole[name].to_pylist(), dtype=dtype)


@pytest.fixture
def folder(tmp_path):
    """Three files of 130, 75 and 20 rows in row groups of 30, one of them a floor below."""
    (tmp_path / "more").mkdir()
    for i, (name, rows) in enumerate({"p0": 130, "p1": 75, "more/p2": 20}.items()):
        pq.write_table(table(rows, seed=i), tmp_path / f"{name}.parquet", row_group_size=30)
    return tmp_path


@pytest.fixture
def whole(folder):
    """All of it at once."""
    return pa.concat_tables(map(pq.read_table, sorted(folder.rglob("*.parquet"))))


def joined(batches):
    x, y = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(y)


def test_batches_are_the_table_in_pieces_and_come_again_in_every_pass(folder, whole):
    source = rg.ParquetBatches(folder, COLUMNS, "y", batch_size=40)
    first = list(source)
    assert len(source) == len(first) == 1 + 5 + 3  # of row groups
    assert sum(len(x) for x, _ in first) == 225
    assert [len(x) for x, _ in first] == [20, 30, 30, 30, 30, 10, 30, 30, 15]
    assert [len(x) for x, _ in rg.ParquetBatches(folder, "a", "y", batch_size=20)][:3] == [
        20,
        20,
        10,
    ]
    x, y = joined(first)
    assert x.dtype == y.dtype == torch.float32
    assert torch.equal(x, torch.stack([column(whole, name) for name in COLUMNS], 1))
    assert torch.equal(y, column(whole, "y"))
    assert torch.equal(joined(source)[0], x)


def test_targets_lists_and_precisions_are_as_asked(folder, whole):
    double = {"dtype": torch.float64}
    x, y = joined(rg.ParquetBatches(folder, ["e", "a"], ["y", "z"], **double))
    lists, a = column(whole, "e", torch.float64), column(whole, "a", torch.float64)
    assert torch.equal(x, torch.cat([lists, a[:, None]], 1))
    expected = [column(whole, name, torch.float64) for name in ("y", "z")]
    assert torch.equal(y, torch.stack(expected, 1))
    alone = list(rg.ParquetBatches(folder / "p1.parquet", "a"))
    assert [x.shape for x in alone] == [(30, 1), (30, 1), (15, 1)]


@pytest.mark.parametrize("ranks", [2, 3, 8, 12])
def test_every_row_is_read_by_exactly_one_rank(folder, whole, ranks):
    parts = [
        rg.ParquetBatches(folder, "a", "y", batch_size=50, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    shares = [list(part) for part in parts]
    assert [len(share) for share in shares] == [len(part) for part in parts]
    rows = torch.cat([y for share in shares for _, y in share])
    assert torch.equal(rows, column(whole, "y"))  # in the order of ranks


def test_a_fit_and_a_calibration_from_files_equal_those_of_the_whole_table(folder, whole):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    files = [folder / "p0.parquet", folder / "p1.parquet"]
    shape = {"batch_size": 32, "dtype": torch.float64}
    uq = rg.LastLayerRigidity(net).fit(rg.ParquetBatches(files, COLUMNS, "y", **shape))
    x = torch.stack([column(whole, name, torch.float64) for name in COLUMNS], 1)
    y = column(whole, "y", torch.float64)
    held, rest = slice(0, 20), slice(20, None)  # `more` comes before `p`
    with torch.no_grad():
        features = torch.cat([net[:-1](x[rest]), torch.ones(205, 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(uq.gram.matrix, features.mT @ features, rtol=1e-13, atol=1e-13)
    valid = rg.ParquetBatches(folder / "more", COLUMNS, "y", **shape)
    report = uq.calibrate(valid, method="paper").calibration_report
    again = rg.LastLayerRigidity(net).fit((x[rest], y[rest]))
    same = again.calibrate((x[held], y[held]), method="paper").calibration_report
    torch.testing.assert_close(report.scale, same.scale, rtol=1e-6, atol=0)
    mean = uq.predict(rg.ParquetBatches(folder / "more", COLUMNS, **shape)).mean
    torch.testing.assert_close(mean, again.predict(x[held]).mean)


def test_paths_may_be_a_pattern_or_a_list_and_name_a_file_once(folder):
    pattern = rg.ParquetBatches(str(folder / "p*.parquet"), "a")
    assert sum(map(len, pattern)) == 205
    listed = rg.ParquetBatches([folder / "p0.parquet", str(folder)], "a")
    assert sum(map(len, listed)) == 225


def test_an_empty_row_group_or_file_is_passed_over(tmp_path, folder):
    pq.write_table(table(0), folder / "p3.parquet")
    source = rg.ParquetBatches(folder, "a", rank=1, ranks=8)
    assert len(list(source)) == len(source) > 0
    (folder / "none").mkdir()
    refused("0 row groups", rg.ParquetBatches, folder / "p3.parquet", "a")
    refused("no Parquet file .*no folder or pattern", rg.ParquetBatches, folder / "none", "a")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"inputs": ["a", "q"]}, "p2.parquet: Expected one column 'q', got a, b, .*Name other"),
        ({"inputs": []}, r"Expected inputs.*inputs=\[\]"),
        ({"inputs": "a", "batch_size": 0}, "batch_size >= 1.*batch_size=0"),
        ({"inputs": "a", "rank": 2, "ranks": 2}, "Invalid rank 2"),
    ],
)
def test_what_cannot_be_read_is_refused_before_the_first_batch(folder, asked, message):
    refused(message, rg.ParquetBatches, folder, **asked)


HOLES = [1.0, None, 3.0]
UNFIT = {
    "null": (HOLES, pa.float64(), "double, 1 nulls"),
    "null list": ([[1.0, 2.0], None], pa.list_(pa.float64(), 2), None),  # pyarrow 25 itself
    "null in a list": (
        [[1.0, None], [1.0, 2.0]],
        pa.list_(pa.float64(), 2),
        "fixed_size_list.*, 1 nulls",
    ),
    "lists of any length": ([[1.0], [1.0, 2.0, 3.0]], pa.list_(pa.float64()), "list<"),
    "lists of text": ([["a"]], pa.list_(pa.string(), 1), "fixed_size_list<"),
    "text": (["1"], pa.string(), "string"),
    "times": ([0], pa.timestamp("s"), "timestamp"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_columns_that_hold_no_numbers_are_refused_with_file_and_column(tmp_path, case):
    values, kind, got = UNFIT[case]
    pq.write_table(pa.table({"q": pa.array(values, kind)}), tmp_path / "odd.parquet")
    what = "" if got is None else rf"Column 'q' \({got}.*, expected numbers"
    refused(rf"odd.parquet: {what}.*fill or drop nulls", list, rg.ParquetBatches(tmp_path, "q"))


def test_files_that_are_missing_cut_short_or_none_are_named(folder, tmp_path):
    refused("no Parquet file .*absent", rg.ParquetBatches, tmp_path / "absent.parquet", "a")
    path, content = folder / "p0.parquet", (folder / "p0.parquet").read_bytes()
    for damaged in (content[:-20], b"no Parquet", b""):
        path.write_bytes(damaged)
        refused("p0.parquet: .*write the file again", rg.ParquetBatches, path, "a")
    path.write_bytes(content)
    source = rg.ParquetBatches(path, "a")
    path.write_bytes(content[:4] + bytes(600) + content[604:])  # a hole where the pages were
    refused("(?s)p0.parquet: .*write the file again", list, source)


def test_without_pyarrow_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r'pip install "rigidities\[parquet\]"'):
        rg.ParquetBatches(folder, "a")


def test_every_path_must_name_a_file_and_each_file_is_read_once(folder, tmp_path, monkeypatch):
    refused(
        "no Parquet file .*nope", rg.ParquetBatches, [folder / "p0.parquet", "nope.parquet"], "a"
    )
    deep = rg.ParquetBatches(str(folder / "**" / "*.parquet"), "a")
    assert sum(map(len, deep)) == sum(map(len, rg.ParquetBatches(folder, "a"))) == 225
    monkeypatch.chdir(folder)
    (folder / "link.parquet").symlink_to(folder / "p0.parquet")
    twice = ["p0.parquet", folder / "p0.parquet", "link.parquet"]
    assert sum(map(len, rg.ParquetBatches(twice, "a"))) == sum(
        map(len, rg.ParquetBatches("p0.parquet", "a"))
    )


def test_a_name_like_a_pattern_is_a_name_and_unfinished_writes_are_passed_over(tmp_path):
    pq.write_table(table(5), tmp_path / "data[1].parquet")
    pq.write_table(table(3), tmp_path / "data1.parquet")
    (tmp_path / "_temporary").mkdir()
    pq.write_table(table(9), tmp_path / "_temporary" / "part.parquet")
    assert sum(map(len, rg.ParquetBatches(tmp_path / "data[1].parquet", "a"))) == 5
    assert sum(map(len, rg.ParquetBatches(tmp_path, "a"))) == 8
