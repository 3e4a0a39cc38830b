"""Tables read alike however they are written, and say what became of each column."""

import csv
import gzip
import io

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rigidities.cli.columns import MOST_CATEGORIES, Column, inputs, matrix, numbers
from rigidities.cli.tables import Table, number

DAYS = pd.date_range("2021-03-01 06:00", periods=40, freq="31h")
SIZES = np.round(np.linspace(-1234.5, 98765.25, 40), 2)
PLACES = ["Köln", "Nîmes", "Ávila, alta", 'the "Hague"'] * 10
GAPS = {3: "", 5: "NA", 8: "?", 13: "-"}


def written(separator=",", decimal=".", thousands="", day="%Y-%m-%d %H:%M", end="\n"):
    """The table as text."""
    file = io.StringIO()
    writer = csv.writer(file, delimiter=separator, lineterminator=end)
    writer.writerow(["größe", "place", "day", "note"])
    for k in range(40):
        size = f"{SIZES[k]:,.2f}".replace(",", "T").replace(".", decimal).replace("T", thousands)
        writer.writerow([GAPS.get(k, size), PLACES[k], DAYS[k].strftime(day), f"a\nb {k % 2}"])
    return file.getvalue()


WAYS = {
    "plain": written().encode(),
    "byte order mark": written().encode("utf-8-sig"),
    "utf-32": written().encode("utf-32"),
    "two encodings": written().encode().replace("Köln".encode(), "Köln".encode("cp1252"), 5),
    "months by name, noon": written(day="%B %d, %Y %I:%M %p").encode(),
    "utf-16": written(separator="\t").encode("utf-16"),
    "latin-1": written().encode("latin-1"),
    "windows lines": written(end="\r\n").encode(),
    "tabs": written(separator="\t").encode(),
    "bars": written(separator="|").encode(),
    "semicolons and decimal commas": written(";", ",", ".", "%d.%m.%Y %H:%M").encode("cp1252"),
    "thousands": written(thousands=",", day="%d/%m/%Y %H:%M").encode(),
    "apostrophes": written(thousands="'").encode(),
    "typographic apostrophes": written(";", thousands="\u2019").encode(),
    "narrow spaces": written(";", ",", "\u202f").encode(),
    "months by name": written(day="%d %b %Y %H:%M").encode(),
    "gzip": gzip.compress(written().encode()),
    "blank lines and separators at the end": written().replace("note\n", "note,\n\n").encode(),
}


def read(path, rows=1000):
    table = Table.open(path)
    return table, pd.concat(table.chunks(rows), ignore_index=True)


def file(tmp_path, text, name="data.csv"):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return tmp_path / name


def frame_of(**columns):
    return pd.DataFrame({n: pd.Series(list(c), dtype=object) for n, c in columns.items()})


@pytest.mark.parametrize("way", WAYS)
def test_a_table_reads_alike_however_it_is_written(tmp_path, way):
    table, frame = read(file(tmp_path, WAYS[way]), rows=7)
    assert list(frame)[:4] == ["größe", "place", "day", "note"]
    expected = SIZES.copy()
    expected[list(GAPS)] = np.nan
    np.testing.assert_array_equal(numbers(frame["größe"], table.decimal), expected)
    assert frame["place"].tolist() == PLACES
    assert frame["note"].tolist()[:2] == ["a\nb 0", "a\nb 1"]
    column = Column.of("day", frame["day"], table.decimal)
    assert column.parts == ["month", "day_of_year", "day_of_week", "hour", "seconds"]
    values, lost = column.values(frame["day"], table.decimal)
    oracle = [
        DAYS.month,
        DAYS.day_of_year,
        DAYS.day_of_week,
        DAYS.hour,
        (DAYS - DAYS[0]).total_seconds(),
    ]
    np.testing.assert_array_equal(values, np.stack(oracle, 1))
    assert not len(lost)


def test_parquet_keeps_its_own_kinds(tmp_path):
    own = pd.DataFrame({"size": SIZES, "whole": range(40), "place": PLACES, "day": DAYS})
    own["flag"] = [True, False] * 20
    own.loc[3, "size"], own.loc[4, "place"] = np.nan, None
    own.to_parquet(tmp_path / "data.parquet")
    table, frame = read(tmp_path / "data.parquet", rows=7)
    kinds = {name: Column.of(name, frame[name], ".").kind for name in frame}
    assert kinds == dict(
        zip(own, ["number", "number", "category", "date", "category"], strict=True)
    )
    np.testing.assert_array_equal(numbers(frame["size"], table.decimal), own["size"])
    assert frame["place"].isna().sum() == 1


def test_parquet_with_damaged_pages_is_refused(tmp_path):
    pd.DataFrame({"size": np.arange(5000.0) ** 0.5}).to_parquet(tmp_path / "data.parquet")
    content = bytearray((tmp_path / "data.parquet").read_bytes())
    content[4:2000] = bytes(1996)
    (tmp_path / "data.parquet").write_bytes(content)
    with pytest.raises(ValueError, match="is a damaged Parquet file"):
        read(tmp_path / "data.parquet")


def test_a_parquet_index_is_a_column_too(tmp_path):
    own = pd.DataFrame({"place": PLACES, "size": SIZES})
    own.set_index("place").to_parquet(tmp_path / "data.parquet")
    table, frame = read(tmp_path / "data.parquet")
    assert sorted(table.names) == sorted(frame) == ["place", "size"]
    own[own.index % 3 > 0].to_parquet(tmp_path / "data.parquet")
    _, frame = read(tmp_path / "data.parquet")
    chosen, notes = inputs(frame, np.random.default_rng(0).normal(size=len(frame)), ".")
    assert [column.name for column in chosen] == ["place", "size"]
    assert notes[0] == "Left out: __index_level_0__ (row numbers)"


def test_parquet_columns_of_one_name_get_their_own(tmp_path):
    arrays = [pa.array([1.0, 2.0]), pa.array(["a", "b"]), pa.array([3.0, 4.0])]
    twice = pa.Table.from_arrays(arrays, names=["size", "place", "size"])
    pq.write_table(twice, tmp_path / "data.parquet")
    table, frame = read(tmp_path / "data.parquet")
    assert list(table.names) == list(frame) == ["size", "place", "size (2)"]
    assert table.notes == ["A second column 'size' is called 'size (2)'"]
    assert frame["size (2)"].tolist() == [3.0, 4.0]


def test_columns_without_a_name_or_with_one_twice_get_their_own(tmp_path):
    table = Table.open(file(tmp_path, "a,,a,a\n1,2,3,4\n"))
    assert table.names == ["a", "column 2", "a (2)", "a (3)"]
    assert "'a (2)'" in " ".join(table.notes)
    table, frame = read(file(tmp_path, "1;2,5\n3;4,5\n"))
    assert table.names == ["column 1", "column 2"]
    assert numbers(frame["column 2"], table.decimal).tolist() == [2.5, 4.5]


@pytest.mark.parametrize(
    ("cells", "unit", "values"),
    [
        (["12 %", "7.5%", "3"], "%", [12, 7.5, 3]),
        (["$1,200", "$15", "$-3.5"], "$", [1200, 15, -3.5]),
        (["-$1,200", "+$15", "- $3.5"], "$", [-1200, 15, -3.5]),
        (["-USD 5", "(USD 6)", "USD (7)"], "USD", [-5, -6, -7]),
        (["($1,200.50)", "$(15)", "( $3.5 )", "$4"], "$", [-1200.5, -15, -3.5, 4]),
        (["(5.00)", "(1e-3)", "6"], "", [-5, -1e-3, 6]),
        (["--5", "-$-5", "(-5)", "((5))", "(5) (6)", "6"], "", [np.nan] * 5 + [6]),
        (["5 km/h", "6 km/h", "1e3 km/h"], "km/h", [5, 6, 1000]),
        (["\u22125", ".5", "+2."], "", [-5, 0.5, 2]),
        (["inf", "1", "2"] * 5, "", [np.nan, 1, 2] * 5),
        (["1.3k", "2K", "1e3k"], "k", [1.3, 2, 1000]),
        (["$1.3k", "$935", "($2 mio)"], "$", [1300, 935, -2e6]),
        (["300 K", "295", "1e2 K"], "K", [300, 295, 100]),
    ],
)
def test_numbers_may_carry_one_unit(cells, unit, values):
    column = Column.of("x", pd.Series(cells, dtype=object), ".")
    if unit:
        assert (column.kind, column.unit) == ("number", unit)
    np.testing.assert_array_equal(numbers(pd.Series(cells, dtype=object), ".", unit), values)


@pytest.mark.parametrize("plain", ["935", "0.9k", "$935"])
def test_thousands_by_letter_stand_beside_plain_numbers(plain):
    cells = pd.Series(["1.3k", "-2K", "1.5 M", plain], dtype=object)
    column = Column.of("x", cells, ".")
    values, unread = column.values(cells, ".")
    expected = [1300, -2000, 1.5e6, 900 if "k" in plain else 935]
    np.testing.assert_array_equal(values[:, 0], expected)
    assert column.kind == "number" and not len(unread)
    assert "M counts as 1,000,000" in column.remarks(unread)[0]
    assert "k counts as 1,000" in column.remarks(unread)[0]


def test_a_new_table_may_mix_scales_as_the_training_table_does_not():
    trained = Column.of("x", pd.Series(["1.3k", "2k"], dtype=object), ".")
    later = pd.Series(["935", "1.3k", "1M", "5 kg"], dtype=object)
    np.testing.assert_array_equal(trained.values(later, ".")[0][:, 0], [0.935, 1.3, 1000, np.nan])


@pytest.mark.parametrize(
    ("trained", "later"), [("12 %", "0.12"), ("12 %", 0.12), ("1.3k", "1300"), ("3 M", 3.0)]
)
def test_numbers_without_the_unit_that_says_how_large_they_are_are_refused(trained, later):
    column = Column.of("x", pd.Series([trained, trained], dtype=object), ".")
    frame = pd.DataFrame({"x": [later, later]})
    with pytest.raises(ValueError, match=f"Expected numbers in {column.unit} in the column 'x'"):
        matrix([column], frame, ".")
    gaps = pd.DataFrame({"x": [None, None]}, dtype=object)
    assert matrix([column], gaps, ".")[0].isnan().all()
    with_unit = pd.DataFrame({"x": [trained, None]}, dtype=object)
    assert not matrix([column], with_unit, ".")[0][0].isnan()


@pytest.mark.parametrize("mark", ["'", "\u2019"])
def test_swiss_thousands_are_numbers_and_no_units(mark):
    cells = pd.Series(
        [f"1{mark}000", f"12{mark}345{mark}678.5", "7", f"CHF 2{mark}500"], dtype=object
    )
    np.testing.assert_array_equal(numbers(cells, ".", "CHF"), [1000, 12345678.5, 7, 2500])
    wrong = pd.Series([f"1{mark}00", f"1{mark}0000"], dtype=object)
    assert np.isnan(numbers(wrong, ".")).all()


def test_the_decimal_mark_is_found_wherever_it_stands(tmp_path):
    early = "7.500;1\n" * 20_000  # more than the first 131,072 characters
    path = file(tmp_path, "size;n\n" + early + "1.234,5;2\n")
    assert path.stat().st_size > 1 << 17
    table = Table.open(path)
    assert table.decimal == "," and "Numbers have decimal commas" in table.notes
    late = file(tmp_path, "size;n\n" + "7,500;1\n" * 20_000 + "1,234.5;2\n")
    assert Table.open(late).decimal == "."


THOUSANDS = {
    "points": (
        "rent\tsize\n1.250 €\t54 m²\n935 €\t40 m²\n1.005 €\t61 m²\n",
        ",",
        [1250, 935, 1005],
    ),
    "commas": ("rent;size\n$1,250;54\n$935;40\n$1,005;61\n", ".", [1250, 935, 1005]),
    "decimals of three digits": ("rent\tsize\n1.250\t54\n0.935\t40\n", ".", [1.25, 0.935]),
}


@pytest.mark.parametrize(("text", "decimal", "expected"), THOUSANDS.values(), ids=THOUSANDS)
def test_a_mark_between_thousands_is_told_by_whole_numbers_beside_it(
    tmp_path, text, decimal, expected
):
    path = tmp_path / "rents.csv"
    path.write_text(text, encoding="utf-8")
    table = Table.open(path)
    (frame,) = table.chunks(10)
    assert table.decimal == decimal
    values = [number(cell, table.decimal)[0] for cell in frame["rent"]]
    assert values == expected
    if expected[0] == 1250:
        assert any(note.endswith("is read as 1250") for note in table.notes)


def test_a_number_that_could_be_read_in_two_ways_is_named(tmp_path):
    path = tmp_path / "rents.csv"
    path.write_text("rent,size\n1.255,54\n1.135,40\n", encoding="utf-8")
    (note,) = Table.open(path).notes
    assert "No cell shows whether '1.255' means 1.255 or 1255: it is read as 1.255" in note


def test_negative_amounts_tell_the_decimal_mark_too(tmp_path):
    table, frame = read(file(tmp_path, "cost;n\n(1.234,50);1\n-€7,25;2\n"))
    assert table.decimal == ","
    assert numbers(frame["cost"], table.decimal, "€").tolist() == [-1234.5, -7.25]


def test_the_mark_of_the_training_table_holds_where_no_cell_tells(tmp_path):
    path = file(tmp_path, "size;n\n7.500;1\n2.250;3\n")
    assert Table.open(path).decimal == "."
    german = Table.open(path, ",")
    assert (
        german.decimal == "," and "commas are assumed, as in the training table" in german.notes[0]
    )
    whole = Table.open(file(tmp_path, "size;n\n7;1\n2;3\n"), ",")
    assert whole.decimal == "," and not whole.notes


def test_cells_that_contradict_the_training_table_are_read_as_they_are_and_it_is_said(tmp_path):
    table = Table.open(file(tmp_path, "size;n\n7.55;1\n2.250;3\n"), ",")
    assert table.decimal == "."
    assert "decimal points here, and commas in the training table" in table.notes[0]


def test_several_units_are_not_numbers():
    column = Column.of("x", pd.Series(["5 kg", "500 g", "2 kg", "700 g"] * 3, dtype=object), ".")
    assert column.kind == "category"


def test_cells_without_a_number_are_missing_and_counted():
    cells = ["1.5"] * 30 + ["err", "<2"] + ["2.5"] * 8
    chosen, notes = inputs(frame_of(x=cells), np.arange(40.0), ".")
    assert [c.kind for c in chosen] == ["number"]
    assert notes == ["x: 2 cells contain no usable number and count as missing, for example 'err'"]
    x, unread = matrix(chosen, frame_of(x=cells), ".")
    assert x.isnan().sum() == 2 == unread["x"]


def columns_of_all_sorts():
    """Each column by what becomes of it."""
    rng = np.random.default_rng(0)
    y = rng.normal(size=300) * 40
    place = np.array(["north", "south"])[rng.integers(2, size=300)]
    return y, {
        "kept": y + rng.normal(size=300) * 4,
        "year": np.arange(1700, 2000),
        "place": place,
        "again": place,
        "constant": ["x"] * 300,
        "nothing": [None] * 300,
        "row": np.arange(300) + 1,
        "customerId": rng.permutation(10_000)[:300],
        "comment": [f"no {k}" for k in rng.integers(250, size=300)],
        "town": [f"town {k // 3}" for k in range(300)],
        "copy": y,
        "pounds": np.round(2.2046 * y - 7, 1),
        "exponential": np.exp(y / 50),
        "whole": np.round(y),
    }


def test_columns_that_say_nothing_or_too_much_are_left_out_with_a_word():
    y, columns = columns_of_all_sorts()
    frame = frame_of(**{n: [None if v is None else str(v) for v in c] for n, c in columns.items()})
    chosen, notes = inputs(frame, y, ".")
    assert [column.name for column in chosen] == ["kept", "year", "place"]
    said = "\n".join(notes)
    for names in (
        "constant (constant)",
        "nothing (empty)",
        "again (the same as place)",
        "row, customerId (row numbers)",
        "comment, town (text that hardly repeats)",
        "copy, pounds, exponential, whole (gives the target away",
    ):
        assert f"Left out: {names}" in said
    asked, _ = inputs(frame, y, ".", keep=["row", "whole"])
    assert {c.name for c in asked} == {"kept", "year", "place", "row", "whole"}


def test_numbers_too_large_to_be_squared_are_missing_and_tiny_ones_are_not():
    x = np.random.default_rng(0).normal(size=60)
    frame = frame_of(large=map(str, np.where(x > 1.5, x * 1e307, x)), tiny=map(str, x * 1e-310))
    frame["infinite"] = pd.to_numeric(frame["large"]) * np.where(x < 0, np.inf, 1)
    chosen, notes = inputs(frame, np.random.default_rng(1).normal(size=60), ".")
    assert [column.kind for column in chosen] == ["number"] * 3
    assert (
        f"large: {(x > 1.5).sum()} cells contain no usable number and count as missing"
        in " ".join(notes)
    )
    values, _ = matrix(chosen, frame, ".")
    assert (
        values.isnan().sum(0).numpy() == [(x > 1.5).sum(), 0, ((x > 1.5) | (x < 0)).sum()]
    ).all()


def test_a_rounded_target_is_told_from_a_coarse_input():
    rng = np.random.default_rng(1)
    y = rng.uniform(0, 12, size=400)
    frame = frame_of(
        rounded=map(str, np.round(y)), coarse=map(str, np.round(y + rng.normal(size=400)))
    )
    chosen, notes = inputs(frame, y, ".")
    assert [column.name for column in chosen] == ["coarse"]
    assert notes == ["Left out: rounded (gives the target away: it is the target, rounded)"]


def test_rare_categories_share_a_code_and_unknown_ones_are_missing():
    cells = ["a"] * 10 + ["b"] * 6 + ["c", "d", "d"]
    column = Column.of("x", pd.Series(cells, dtype=object), ".")
    assert (column.codes, column.widths) == ({"a": 0, "b": 1, "d": 2, "c": 2}, [3])
    values, lost = column.values(pd.Series(["b", "c", "d", "new", None], dtype=object), ".")
    np.testing.assert_array_equal(values[:, 0], [1, 2, 2, np.nan, np.nan])
    assert lost.tolist() == ["new"]
    many = Column.of("x", pd.Series([f"k{k % 400}" for k in range(4000)], dtype=object), ".")
    assert many.widths == [MOST_CATEGORIES]


def test_dates_may_be_written_in_another_way_later():
    first = pd.Series([d.strftime("%Y-%m-%d") for d in DAYS], dtype=object)
    later = pd.Series([d.strftime("%d.%m.%Y") for d in DAYS], dtype=object)
    column = Column.of("day", first, ".")
    for one, other in zip(*(column.values(s, ".")[0].T for s in (first, later)), strict=True):
        np.testing.assert_array_equal(one, other)


BAD = {
    "missing": (None, "There is no file"),
    "empty": (b"", "is empty"),
    "blank": (b"\n \n", "is empty"),
    "an image": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is a binary file"),
    "a workbook": (b"PK\3\4rest", "Save the table as CSV"),
    "gzip, cut": (gzip.compress(written().encode() * 9)[:-400], "is damaged"),
    "parquet, cut": (b"PAR1 and no more", "damaged Parquet"),
    "an open quote": (b'a,b\n1,2\n3,"4\n5,6\n', "the quote before '4"),
    "a huge cell": (b'a,b\n1,"' + b"x" * 300_000 + b'"\n', "is damaged"),
    "a long line": (b"a,b\n1,2\n3,4\n5,6,7\n", "Expected 2 entries in line 4"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_table_is_refused_by_name(tmp_path, name):
    content, words = BAD[name]
    path = tmp_path / "data.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=words) as caught:
        read(path)
    assert str(path) in str(caught.value)
