"""Tables from files, a chunk of rows at a time: CSV as people write it, and Parquet.

`Table.open` finds out how a file is written: its encoding, separator, decimal mark and column
names. `Table.chunks` then gives frames of pandas: columns of text from CSV, in which `number` reads
a cell, and columns of numbers and dates too from Parquet.

CSV is read by Python's `csv` and not by `pandas.read_csv`. That one takes the first column for row
names where lines are longer than the header, or drops their last entries, and does not say which
text follows a quote that nothing closes. Here such lines are refused by number or text.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

MISSING = {
    "",
    "?",
    "-",
    "--",
    ".",
    "na",
    "n/a",
    "#n/a",
    "nan",
    "null",
    "none",
    "<na>",
    "missing",
    "inf",
    "+inf",
    "-inf",
    "infinity",
    "-infinity",
}
"""What people and programs write into a cell without a value, in lower case."""

_SAMPLE_LENGTH = 1 << 17
"""Characters that tell a file's separator; `csv` allows as many in one cell."""

_LAST_LINE = "\0end"
"""A line that is put below the last. An open quote swallows it, and is found that way."""

_THOUSANDS_MARKS = " \u00a0\u202f'\u2019"
"""What may stand between thousands, beside the mark that is no decimal mark: spaces, and the
apostrophes of Switzerland."""

_CONTROL_CHARACTER = re.compile("[\0-\x08\x0b\x0e-\x19\x1c-\x1f]")
"""Characters that no text has."""

_BYTE_ORDER_MARKS = {
    # UTF-32 comes first: its mark begins with that of UTF-16.
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}

_DAMAGE = (OSError, EOFError, zlib.error, csv.Error)
"""Errors of a file that cannot be read to its end."""

_MOST_NAMES_SHOWN = 30


def _decode_as_western(error: UnicodeError) -> tuple[str, int]:
    """Bytes that are no UTF-8, as Windows-1252: files may be of two encodings."""
    assert isinstance(error, UnicodeDecodeError)
    return error.object[error.start : error.end].decode("cp1252", "replace"), error.end


codecs.register_error("rigidities.western", _decode_as_western)


_CURRENCY = r"[$€£¥]|[A-Z]{3}\s"

_BRACKETS = re.compile(rf"({_CURRENCY})?\s*\(([^()]*)\)")
"""A cell in brackets, which are the minus of accountants; a currency may stand before them."""


def _number_pattern(decimal: str, thousands: str) -> re.Pattern[str]:
    """A sign, a currency, the number, and a unit behind it, as four groups.

    The sign is the first group where a currency follows it, and a part of the number otherwise.
    """
    # Groups of thousands come first: of 1'000 the 1 alone would be the number, '000 its unit.
    grouped = rf"[1-9]\d{{0,2}}(?:[{thousands}{_THOUSANDS_MARKS}]\d{{3}})+"
    mantissa = rf"(?:{grouped}|\d+)(?:\{decimal}\d*)?|\{decimal}\d+"
    number = rf"(?(1)|[+-]?)(?:{mantissa})(?:[eE][+-]?\d+)?"
    unit = r"(?!['\u2019]\d)[^\d\s.,:/\\-].{0,14}"
    sign = rf"([+-])(?=\s*(?:{_CURRENCY}))"
    return re.compile(rf"(?:{sign})?\s*({_CURRENCY})?\s*({number})\s*({unit})?")


_NUMBERS = {
    ".": _number_pattern(decimal=".", thousands=","),
    ",": _number_pattern(decimal=",", thousands="."),
}
"""The pattern of a number for each decimal mark."""


SCALES = {
    "k": 1e3,
    "tsd": 1e3,
    "thousand": 1e3,
    "M": 1e6,
    "mn": 1e6,
    "mio": 1e6,
    "mln": 1e6,
    "million": 1e6,
    "bn": 1e9,
    "mrd": 1e9,
    "billion": 1e9,
}
"""What units that only say how large a number is multiply it by."""


def number(text: str, decimal: str = ".") -> tuple[float, str] | None:
    """The number in a cell and its unit, if any; None where it holds no number.

    Args:
        text: The cell.
        decimal: The decimal mark; the other of point and comma may stand between thousands.

    Examples:
        >>> number("1,234.5"), number("1.234,5 kg", ","), number("12 %"), number("2020-01-01")
        ((1234.5, ''), (1234.5, 'kg'), (12.0, '%'), None)
        >>> number("1'234'567.5")
        (1234567.5, '')
        >>> number("-$5.00"), number("$-5.00"), number("(5.00)"), number("($5.00)")
        ((-5.0, '$'), (-5.0, '$'), (-5.0, ''), (-5.0, '$'))
        >>> number("(-5.00)"), number("(n)")
        (None, None)
        >>> number("1.3k"), number("1.3K"), number("300 K"), number("$1.3 mio")
        ((1.3, 'k'), (1.3, 'k'), (300.0, 'K'), (1300000.0, '$'))
    """
    match = _match_number(text, decimal)
    if match is None:
        return None
    sign, currency, digits, unit = match.groups()
    thousands = "." if decimal == "," else ","
    digits = re.sub(f"[{thousands}{_THOUSANDS_MARKS}]", "", digits)
    value = float(f"{sign or ''}{digits.replace(decimal, '.')}")
    unit = (unit or "").strip()
    if unit == "K" and not match.string[match.end(3)].isspace():
        unit = "k"  # thousands; kelvins stand behind a space
    elif len(unit) > 1 and unit.lower() in SCALES:
        unit = unit.lower()
    if currency:
        return value * SCALES.get(unit, 1), currency.strip()
    return value, unit


def _match_number(text: str, decimal: str) -> re.Match[str] | None:
    """The match of a cell with the pattern of a number, with one way to write a minus."""
    text = text.replace("\u2212", "-")  # the minus of typography
    if text.endswith(")"):
        brackets = _BRACKETS.fullmatch(text)
        if brackets is not None:
            text = f"-{brackets[1] or ''}{brackets[2].strip()}"
    return _NUMBERS[decimal].fullmatch(text)


@dataclass(frozen=True)
class Table:
    """A file with columns, each of another name.

    Attributes:
        path: The file.
        names: Of its columns.
        notes: What is peculiar of the file, in words.
        decimal: The decimal mark of its numbers.
        separator: What stands between cells; empty for Parquet.
        header: Whether the first line holds names.
    """

    path: Path
    names: Sequence[str]
    notes: Sequence[str] = ()
    decimal: str = "."
    separator: str = ""
    header: bool = True

    @classmethod
    def open(cls, path: Path, trained: str | None = None) -> Table:
        """Find out how a file is written.

        Args:
            path: The file.
            trained: The decimal mark of the table that a model was trained with, which is taken
                where no cell of this file tells.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is empty, damaged or no table.
        """
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {path}. Name a CSV or Parquet file.")
        with path.open("rb") as raw:
            signature = raw.read(4)
        if signature == b"PAR1":
            with _parquet(path) as file:
                names, notes = _unique_names(file.schema_arrow.names)
                return cls(path, names, notes)
        if signature == b"PK\3\4":
            raise ValueError(f"{path} is a workbook or an archive. Save the table as CSV.")
        return cls._open_text(path, trained)

    @classmethod
    def _open_text(cls, path: Path, trained: str | None) -> Table:
        """Find out how a text file is written."""
        notes = []
        with _text(path) as file:
            sample = file.read(_SAMPLE_LENGTH)
            is_cut = bool(file.read(1))
            encoding = file.encoding
        if encoding != "utf-8-sig":
            notes.append(f"The file is encoded in {encoding}")
        if _CONTROL_CHARACTER.search(sample):
            raise ValueError(f"{path} is a binary file. Expected CSV or Parquet.")

        separator, first_line = _separator_and_first_line(sample, is_cut)
        if not any(cell.strip() for cell in first_line):
            raise ValueError(f"{path} is empty. Expected a line of names and rows below it.")

        # All of the file tells the decimal mark: its first cells may make sense in both ways.
        lines = cls(path, first_line, separator=separator)._lines()
        decimal, decimal_note = _decimal(lines, separator, trained)
        if decimal_note:
            notes.append(decimal_note)

        has_header = _is_header(first_line, decimal)
        if not has_header:
            notes.append(
                "The first line contains numbers, not names: columns are called 'column 1' and so "
                "on"
            )
        names, name_notes = _unique_names(first_line if has_header else [""] * len(first_line))
        return cls(
            path=path,
            names=names,
            notes=notes + name_notes,
            decimal=decimal,
            separator=separator,
            header=has_header,
        )

    def require(self, names: Iterable[str]) -> None:
        """Refuse a file without these columns."""
        lacking = [name for name in names if name not in self.names]
        if not lacking:
            return
        expected = "column " if len(lacking) == 1 else "columns "
        expected += ", ".join(map(repr, lacking))
        present = ", ".join(map(repr, self.names[:_MOST_NAMES_SHOWN]))
        if len(self.names) > _MOST_NAMES_SHOWN:
            present += f" and {len(self.names) - _MOST_NAMES_SHOWN} more"
        raise ValueError(
            f"Expected the {expected} in {self.path}, which has {present}. Names must match "
            "exactly."
        )

    def chunks(self, rows: int) -> Iterator[pandas.DataFrame]:
        """The table, so many rows at a time.

        Columns hold text, None where a value is missing; those of Parquet numbers and dates too.
        """
        if self.separator:
            return self._text_chunks(rows)
        return self._parquet_chunks(rows)

    def _parquet_chunks(self, rows: int) -> Iterator[pandas.DataFrame]:
        """Of a Parquet file: numbers and dates as they are stored, all else as text."""
        import pandas

        with _parquet(self.path) as file:
            for batch in file.iter_batches(rows):
                frame = batch.to_pandas(ignore_metadata=True)  # which would hide an index
                frame.columns = self.names
                for name in frame:
                    if frame[name].dtype.kind in "iufM":
                        continue
                    cells = [None if cell is None else _clean(str(cell)) for cell in frame[name]]
                    frame[name] = pandas.Series(cells, frame.index, object)
                yield frame

    def _text_chunks(self, rows: int) -> Iterator[pandas.DataFrame]:
        """Of a text file: columns of text."""
        import pandas

        lines = self._lines()
        while chunk := list(islice(lines, rows)):
            columns = zip(*chunk, strict=True)
            cells_by_name = {}
            for name, column in zip(self.names, columns, strict=True):
                cells_by_name[name] = [_clean(cell) for cell in column]
            yield pandas.DataFrame(cells_by_name, dtype=object)

    def _lines(self) -> Iterator[list[str]]:
        """The lines below the header, as wide as it; they may end early, or in separators."""
        width = len(self.names)
        with _text(self.path) as file:
            reader = csv.reader(chain(file, [_LAST_LINE]), delimiter=self.separator)
            lines = filter(None, reader)  # without blank ones
            for line in islice(lines, int(self.header), None):
                if line == [_LAST_LINE]:
                    return
                if line[-1].endswith(_LAST_LINE):
                    text = line[-1].removesuffix(_LAST_LINE)[:40]
                    raise ValueError(
                        f"{self.path}: the quote before {text!r} is never closed. Close "
                        "or delete it."
                    )
                if any(cell.strip() for cell in line[width:]):
                    raise ValueError(
                        f"Expected {width} entries in line {reader.line_num} of {self.path}, "
                        f"got {len(line)}. Quote text that contains {self.separator!r}."
                    )
                padding = [""] * (width - len(line))
                yield (line + padding)[:width]


def _clean(cell: str) -> str | None:
    """A cell without spaces around it, None where it says that a value is missing."""
    text = cell.strip()
    return None if text.lower() in MISSING else text


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """A Parquet file, open; damaged pages are refused by the file's name."""
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            yield file
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is a damaged Parquet file ({error}). Write it again.") from error


@contextmanager
def _text(path: Path) -> Iterator[io.TextIOWrapper]:
    """A text file, open, packed by gzip or not; damage is refused by the file's name.

    A byte order mark tells the encoding. Without one it is UTF-8, and bytes that are none are read
    as Windows-1252.
    """
    try:
        with path.open("rb") as raw:
            is_packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_packed else path.open("rb") as file:
            encoding = _encoding(file.peek(4)[:4])
            yield io.TextIOWrapper(file, encoding, errors="rigidities.western", newline="")
    except _DAMAGE as error:
        raise ValueError(f"{path} is damaged ({error}). Write it again.") from error


def _encoding(start: bytes) -> str:
    """The encoding of a file by its first bytes."""
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if start.startswith(mark):
            return encoding
    return "utf-8-sig"


def _separator_and_first_line(sample: str, is_cut: bool) -> tuple[str, list[str]]:
    """The separator by which most lines are as wide as the first, and the first line.

    Args:
        sample: The beginning of a file.
        is_cut: Whether the file goes on, so that the last line may not be whole.
    """
    lines_by_separator = {}
    for separator in ",;\t|":
        lines = list(csv.reader(io.StringIO(sample, newline=""), delimiter=separator))
        if is_cut:
            lines = lines[:-1]
        lines_by_separator[separator] = [line for line in lines if line] or [[]]

    def plausibility(separator: str) -> tuple[float, bool]:
        # Where others agree as well, commas are in the text or in the numbers.
        return _agreement(lines_by_separator[separator]), separator != ","

    best = max(lines_by_separator, key=plausibility)
    return best, lines_by_separator[best][0]


def _agreement(lines: list[list[str]]) -> float:
    """Share of lines with as many columns as the first; 0 where that has one."""
    width = len(lines[0])
    if width <= 1:
        return 0.0
    return sum(len(line) == width for line in lines) / len(lines)


def _is_header(first_line: list[str], decimal: str) -> bool:
    """Whether a line holds names: some cell is no number, or one with a unit."""
    for cell in first_line:
        value_and_unit = number(cell.strip(), decimal)
        if value_and_unit is None or value_and_unit[1]:
            return True
    return False


def _unique_names(cells: Sequence[str]) -> tuple[list[str], list[str]]:
    """A name for each column, and what has become of names that are empty or taken, in words."""
    names: list[str] = []
    notes = []
    for place, cell in enumerate(cells, start=1):
        plain_name = " ".join(cell.split()) or f"column {place}"
        name = plain_name
        repetition = 1
        while name in names:
            repetition += 1
            name = f"{plain_name} ({repetition})"
        if name != plain_name:
            notes.append(f"A second column {plain_name!r} is called {name!r}")
        names.append(name)
    return names, notes


def _decimal(
    lines: Iterable[Sequence[str]], separator: str, trained: str | None
) -> tuple[str, str]:
    """The decimal mark, by the cells that make sense in one way alone, and a word about it.

    If no cell tells by itself, a column of numbers may: see `_UnclearColumn`. Otherwise it is the
    mark of the training table. Without one it is the comma for a file with semicolons that has
    commas in its numbers, otherwise the point.

    Args:
        lines: The cells of the whole file, line by line.
        separator: Of the file.
        trained: The decimal mark of the training table, if there is one.
    """
    readable_by_one_mark = Counter[str]()
    columns: dict[int, _UnclearColumn] = {}
    has_commas = False
    for line in lines:
        for place, text in enumerate(line):
            cell = text.strip()
            if "," not in cell and "." not in cell:
                if cell and _match_number(cell, "."):
                    columns.setdefault(place, _UnclearColumn()).whole_numbers += 1
                continue
            with_point = _match_number(cell, ".") is not None
            with_comma = _match_number(cell, ",") is not None
            if with_comma and "," in cell:
                has_commas = True
            if with_point and with_comma:
                columns.setdefault(place, _UnclearColumn()).add(cell)
            elif with_point:
                readable_by_one_mark["."] += 1
            elif with_comma:
                readable_by_one_mark[","] += 1

    plural = {".": "points", ",": "commas"}
    points = readable_by_one_mark["."]
    commas = readable_by_one_mark[","]
    examples = [column.example for column in columns.values() if column.example]
    if points != commas:
        decimal = "." if points > commas else ","
        if trained is not None and trained != decimal:
            note = (
                f"Numbers have decimal {plural[decimal]} here, and {plural[trained]} in the "
                f"training table: they are read with {plural[decimal]}"
            )
            return decimal, note
        return decimal, "Numbers have decimal commas" if decimal == "," else ""

    if trained is not None:
        if not examples and not points:
            return trained, ""  # there is nothing that the mark would change
        note = (
            f"No number shows which decimal mark is used: {plural[trained]} are assumed, as in the "
            "training table"
        )
        return trained, note

    telling = [column for column in columns.values() if column.thousands_mark]
    if len({column.thousands_mark for column in telling}) == 1:
        decimal = "," if telling[0].thousands_mark == "." else "."
        example = telling[0].example
        return decimal, f"{example!r} is read as {_value(example, decimal)}"

    decimal = "," if has_commas and separator == ";" else "."
    if examples and not points:
        other = "," if decimal == "." else "."
        value = _value(examples[0], decimal)
        note = (
            f"No cell shows whether {examples[0]!r} means {value} or "
            f"{_value(examples[0], other)}: it is read as {value}. If that is wrong, remove the "
            "marks between thousands from the file"
        )
        return decimal, note
    return decimal, "Numbers have decimal commas" if decimal == "," else ""


_ONE_MARK = re.compile(r"(?<![\d.,])[1-9]\d{0,2}([.,])(\d{3})(?![\d.,])")
"""A number with one mark before its last three digits."""


@dataclass
class _UnclearColumn:
    """Numbers of a column that could be read in two ways, such as 1.250.

    If some of them end in a zero, and other numbers of the column have no mark at all (935), then
    the mark stands between thousands: a decimal would be written 1.25, or 935.000 as well.

    Attributes:
        whole_numbers: How many numbers have neither a point nor a comma.
        marks: The marks of the unclear cells.
        ends_in_zero: Whether an unclear cell ends in a zero.
        example: One of the unclear cells.
    """

    whole_numbers: int = 0
    marks: set[str] = field(default_factory=set)
    ends_in_zero: bool = False
    example: str = ""

    def add(self, cell: str) -> None:
        """Count an unclear cell."""
        match = _ONE_MARK.search(cell)
        if match is None:
            return
        mark, last_digits = match.groups()
        self.marks.add(mark)
        if not self.example or (last_digits.endswith("0") and not self.ends_in_zero):
            self.example = cell
        self.ends_in_zero |= last_digits.endswith("0")

    @property
    def thousands_mark(self) -> str:
        """The mark between thousands; empty if the column does not tell."""
        if len(self.marks) == 1 and self.ends_in_zero and self.whole_numbers > 0:
            return next(iter(self.marks))
        return ""


def _value(cell: str, decimal: str) -> str:
    """The number in a cell as text, without marks between thousands."""
    found = number(cell, decimal)
    assert found is not None
    return f"{found[0]:g}"
