"""Tables from files, a chunk of rows at a time: CSV as people write it, and Parquet."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

MISSING = frozenset(
    ("", "?", "-", "--", ".", "na", "n/a", "#n/a", "nan", "null", "none", "nil", "<na>", "missing")
)
"""What people write into a cell without a value, in lower case."""
_SAMPLE, _BLOCK = 1 << 17, 1 << 20
_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_CONTROL = bytes({*range(32)} - {9, 10, 12, 13, 26, 27})
_GROUPS = " \u00a0\u202f'"
_BROKEN = (OSError, EOFError, zlib.error, csv.Error, UnicodeError)


def _pattern(decimal: str, thousands: str) -> re.Pattern[str]:
    whole = rf"\d+|[1-9]\d{{0,2}}(?:[{thousands}{_GROUPS}]\d{{3}})+"
    number = rf"[+-]?(?:(?:{whole})(?:\{decimal}\d*)?|\{decimal}\d+)(?:[eE][+-]?\d+)?"
    return re.compile(rf"([$€£¥]|[A-Z]{{3}}\s)?\s*({number})\s*([^\d\s.,:/\\-].{{0,14}})?")


_NUMBERS = {".": _pattern(".", ","), ",": _pattern(",", ".")}


def number(text: str, decimal: str = ".") -> tuple[float, str] | None:
    """The number in a cell and its unit, if any; None where it holds no number.

    Examples:
        >>> number("1,234.5"), number("1.234,5 kg", ","), number("12 %"), number("2020-01-01")
        ((1234.5, ''), (1234.5, 'kg'), (12.0, '%'), None)
    """
    found = _NUMBERS[decimal].fullmatch(text.replace("\u2212", "-"))
    if found is None:
        return None
    plain = re.sub(rf"[{'.' if decimal == ',' else ','}{_GROUPS}]", "", found[2])
    return float(plain.replace(decimal, ".")), (found[1] or found[3] or "").strip()


@dataclass(frozen=True)
class Table:
    """A file with named columns.

    Attributes:
        path: of the file.
        names: of its columns, each once.
        decimal: the mark between whole and fraction of its numbers.
        notes: what is peculiar about it, in words.
        encoding: of its text; empty for Parquet.
        separator: between its columns.
        header: whether its first line holds their names.
    """

    path: Path
    names: Sequence[str]
    decimal: str = "."
    notes: list[str] = field(default_factory=list)
    encoding: str = ""
    separator: str = ""
    header: bool = True

    @classmethod
    def open(cls, path: Path) -> Table:
        """Find out how a file is written.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is empty, or no table.
        """
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {path}. Name a CSV or Parquet file.")
        with path.open("rb") as file:
            start = file.read(4)
        if start == b"PAR1":
            return cls(path, list(_parquet(path).schema_arrow.names))
        if start == b"PK\3\4":
            raise ValueError(f"{path} is a workbook or an archive. Save the table as CSV.")
        try:
            encoding = _encoding(path)
            with _opened(path, encoding) as file:
                sample = file.read(_SAMPLE)
                partial_end = bool(file.read(1))
        except _BROKEN as error:
            raise ValueError(f"Expected a table in {path}, and it is damaged ({error}).") from error
        return cls._described(path, encoding, sample, cut=partial_end)

    @classmethod
    def _described(cls, path: Path, encoding: str, sample: str, *, cut: bool) -> Table:
        separator = max(",;\t|", key=partial(_agreement, sample, cut=cut))
        first, *rows = _records(sample, separator, cut=cut) or [[]]
        if not any(cell.strip() for cell in first):
            raise ValueError(f"{path} is empty. Expected a line of names and rows below it.")
        decimal = _decimal([cell.strip() for row in rows for cell in row], separator)
        header = not all(_bare(cell, decimal) for cell in first)
        names, notes = _names(first if header else [""] * len(first))
        if not header:
            text = f"The first line holds numbers, not names: columns are called {names[0]!r} to "
            notes = [text + f"{names[-1]!r}"]
        if encoding not in ("utf-8", "utf-8-sig"):
            notes.append(f"Read as {encoding}")
        if decimal == ",":
            notes.append("Numbers have decimal commas")
        return cls(path, names, decimal, notes, encoding, separator, header)

    def chunks(self, rows: int) -> Iterator[pandas.DataFrame]:
        """Columns of text, None where a value is missing, or of Parquet's own types."""
        import pandas

        if not self.encoding:
            for batch in _parquet(self.path).iter_batches(rows):
                yield _plain(batch.rename_columns(self.names).to_pandas())
            return
        kept: list[list[str]] = []
        for row in self._rows():
            kept.append(row)
            if len(kept) == rows:
                yield pandas.DataFrame(_cleaned(kept, self.names), dtype=object)
                kept = []
        if kept:
            yield pandas.DataFrame(_cleaned(kept, self.names), dtype=object)

    def _rows(self) -> Iterator[list[str]]:
        """Of text, as wide as the header; lines may end early or in separators."""
        width = len(self.names)
        try:
            with _opened(self.path, self.encoding) as file:
                reader = csv.reader(file, delimiter=self.separator)
                for place, row in enumerate(row for row in reader if row):
                    if any(cell.strip() for cell in row[width:]):
                        raise ValueError(
                            f"Expected {width} entries in line {reader.line_num} of {self.path}, "
                            f"got {len(row)}. Quote text that holds {self.separator!r}."
                        )
                    if place or not self.header:
                        yield (row + [""] * (width - len(row)))[:width]
        except _BROKEN as error:
            raise ValueError(f"{self.path} is damaged ({error}). Write it again.") from error


def _cleaned(rows: list[list[str]], names: Sequence[str]) -> dict[str, list[str | None]]:
    return {
        name: [None if (text := cell.strip()).lower() in MISSING else text for cell in column]
        for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }


def _plain(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Numbers and dates as they are, everything else as text or None."""
    for name in frame:
        if frame[name].dtype.kind not in "iufM":
            held = (None if value is None or value != value else str(value) for value in frame[name])
            frame[name] = [
                None if text is None or text.strip().lower() in MISSING else text.strip()
                for text in held
            ]
            frame[name] = frame[name].astype(object)
    return frame


def _parquet(path: Path) -> Any:
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is a damaged Parquet file ({error}). Write it again.") from error


def _bytes(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if packed else path.open("rb")  # type: ignore[return-value]


def _opened(path: Path, encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(_bytes(path), encoding, newline="", errors="replace")


def _encoding(path: Path) -> str:
    """UTF-8 where the whole file is, else by its mark, its zeros, or Western European."""
    with _bytes(path) as file:
        head = file.read(_BLOCK)
        for mark, name in _MARKS.items():
            if head.startswith(mark):
                return name
        for name, zeros in (("utf-16-le", head[1:4096:2]), ("utf-16-be", head[0:4096:2])):
            if zeros and zeros.count(0) > 0.4 * len(zeros) and not head[:64].startswith(b"\0\0"):
                return name
        decoder, block = codecs.getincrementaldecoder("utf-8")(), head
        try:
            while block:
                if len(block.translate(None, _CONTROL)) < len(block):
                    raise ValueError(f"{path} is a binary file. Expected CSV or Parquet.")
                decoder.decode(block)
                block = file.read(_BLOCK)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return "cp1252"
    return "utf-8"


def _records(sample: str, separator: str, *, cut: bool) -> list[list[str]]:
    """The sample's lines, without one that it may have cut."""
    try:
        found = [row for row in csv.reader(io.StringIO(sample, newline=""), delimiter=separator)]
    except csv.Error:
        return []
    found = found[:-1] if cut and len(found) > 1 else found
    return [row for row in found if row]


def _agreement(sample: str, separator: str, *, cut: bool) -> tuple[float, int]:
    """Share of lines with as many columns as the first, and how many those are."""
    rows = _records(sample, separator, cut=cut)
    width = len(rows[0]) if rows else 0
    return (sum(len(row) == width for row in rows) / len(rows) if width > 1 else 0.0), width


def _decimal(cells: Sequence[str], separator: str) -> str:
    """By the cells that make sense in one way alone; unclear ones follow the separator."""
    point, comma = (_NUMBERS[mark].fullmatch for mark in ".,")
    votes = Counter((point(c) is not None, comma(c) is not None) for c in cells if c)
    clear = votes[False, True] - votes[True, False]
    if clear == 0 and separator == ";":
        clear = sum("," in c for c in cells if comma(c))
    return "," if clear > 0 else "."


def _bare(cell: str, decimal: str) -> bool:
    """Whether a cell is a number without a unit, or a missing one."""
    found = number(cell.strip(), decimal)
    return cell.strip().lower() in MISSING - {""} or (found is not None and not found[1])


def _names(cells: Sequence[str]) -> tuple[list[str], list[str]]:
    """Every column by a name of its own, and a word on those that had none."""
    names: list[str] = []
    notes = []
    for place, cell in enumerate(cells, start=1):
        name = own = " ".join(cell.split()) or f"column {place}"
        copies = (f"{own} ({n})" for n in range(2, len(cells) + 2))
        while name in names:
            name = next(copies)
        if name != own:
            notes.append(f"A second column {own!r} is called {name!r}")
        names.append(name)
    return names, notes
