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
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

MISSING = {"", "?", "-", "--", ".", "na", "n/a", "#n/a", "nan", "null", "none", "<na>", "missing"}
"""What people write into a cell without a value, in lower case."""
_BLOCK, _GROUPS, _CONTROL = 1 << 18, " \u00a0\u202f'", bytes({*range(32)} - {9, 10, 12, 13, 26, 27})
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
    if (found := _NUMBERS[decimal].fullmatch(text.replace("\u2212", "-"))) is None:
        return None
    plain = re.sub(rf"[{'.' if decimal == ',' else ','}{_GROUPS}]", "", found[2])
    return float(plain.replace(decimal, ".")), (found[1] or found[3] or "").strip()


@dataclass(frozen=True)
class Table:
    """A file with columns, each of another name; `notes` say in words what is peculiar of it."""

    path: Path
    names: Sequence[str]
    notes: Sequence[str] = ()
    decimal: str = "."
    encoding: str = "parquet"
    separator: str = ""
    header: bool = True

    @classmethod
    def open(cls, path: Path) -> Table:
        """Find out how a file is written; a ValueError where it is empty or no table."""
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {path}. Name a CSV or Parquet file.")
        with path.open("rb") as raw:
            start = raw.read(4)
        if start == b"PAR1":
            return cls(path, _parquet(path).schema_arrow.names)
        if start == b"PK\3\4":
            raise ValueError(f"{path} is a workbook or an archive. Save the table as CSV.")
        try:
            encoding = _encoding(path)
            with io.TextIOWrapper(_bytes(path), encoding, "replace", "") as file:
                sample, cut = file.read(_BLOCK), bool(file.read(1))
        except _BROKEN as error:
            raise ValueError(f"Expected a table, and {path} is damaged ({error}).") from error
        tried = [(_records(sample, one, cut=cut), one) for one in ",;\t|"]
        (first, *rows), separator = max(tried, key=lambda one: (_agreement(*one[0]), one[1] != ","))
        if not any(cell.strip() for cell in first):
            raise ValueError(f"{path} is empty. Expected a line of names and rows below it.")
        decimal = _decimal([cell.strip() for row in rows for cell in row], separator)
        read = [number(cell.strip(), decimal) for cell in first]
        header = any(one is None or one[1] for one in read)
        names = [" ".join(cell.split()) if header else "" for cell in first]
        notes = [] if header else ["Its first line holds numbers: columns are 'column 1' and so on"]
        for place, name in enumerate(names):
            own = name or f"column {place + 1}"
            free = (own, *(f"{own} ({n})" for n in range(2, place + 2)))
            names[place] = next(one for one in free if one not in names[:place])
            notes += [f"A second {own!r} is called {names[place]!r}"] * (names[place] != own)
        notes += [] if encoding.startswith("utf-8") else [f"Its text is in {encoding}"]
        notes += ["Its numbers have decimal commas"] if decimal == "," else []
        return cls(path, names, notes, decimal, encoding, separator, header)

    def chunks(self, rows: int) -> Iterator[pandas.DataFrame]:
        """Columns of text, None where a value is missing; of Parquet numbers and dates too."""
        import pandas

        if self.encoding == "parquet":
            for batch in _parquet(self.path).iter_batches(rows):
                frame = batch.to_pandas()
                for name in (name for name in frame if frame[name].dtype.kind not in "iufM"):
                    texts = (None if one is None else str(one) for one in frame[name])
                    frame[name] = pandas.Series([*map(_clean, texts)], frame.index, object)
                yield frame
            return
        lines = self._lines()
        while kept := list(islice(lines, rows)):
            cells = zip(self.names, zip(*kept, strict=True), strict=True)
            yield pandas.DataFrame({name: [*map(_clean, one)] for name, one in cells}, dtype=object)

    def _lines(self) -> Iterator[list[str]]:
        """Below the header and as wide as it; a line may end early, or in separators."""
        width = len(self.names)
        try:
            with io.TextIOWrapper(_bytes(self.path), self.encoding, "replace", "") as file:
                reader = csv.reader(file, delimiter=self.separator)
                for line in islice(filter(None, reader), int(self.header), None):
                    if any(cell.strip() for cell in line[width:]):
                        raise ValueError(
                            f"Expected {width} entries in line {reader.line_num} of {self.path}, "
                            f"got {len(line)}. Quote text that holds {self.separator!r}."
                        )
                    yield (line + [""] * (width - len(line)))[:width]
        except _BROKEN as error:
            raise ValueError(f"{self.path} is damaged ({error}). Write it again.") from error


def _clean(cell: str | None) -> str | None:
    return None if cell is None or (text := cell.strip()).lower() in MISSING else text


def _parquet(path: Path) -> Any:
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is a damaged Parquet file ({error}). Write it again.") from error


def _bytes(path: Path) -> gzip.GzipFile | io.BufferedReader:
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    return gzip.open(path) if packed else path.open("rb")


def _encoding(path: Path) -> str:
    """By the file's mark; UTF-8 where all of it is, else Western European."""
    with _bytes(path) as file:
        block = file.read(_BLOCK)
        if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16"
        decoder, found = codecs.getincrementaldecoder("utf-8-sig")(), "utf-8-sig"
        while block:
            if len(block.translate(None, _CONTROL)) < len(block):
                raise ValueError(f"{path} is a binary file. Expected CSV or Parquet.")
            try:
                decoder.decode(block)
            except UnicodeDecodeError:
                found = "cp1252"
            block = file.read(_BLOCK)
    return found


def _records(sample: str, separator: str, *, cut: bool) -> list[list[str]]:
    """The sample's lines, without one that may have been cut."""
    try:
        found = list(csv.reader(io.StringIO(sample, newline=""), delimiter=separator))
    except csv.Error:
        found = []
    return [line for line in (found[:-1] if cut else found) if line] or [[]]


def _agreement(first: Sequence[str], *lines: Sequence[str]) -> float:
    """Share of lines with as many columns as the first; none where that has one."""
    same = sum(len(line) == len(first) for line in lines)
    return (len(first) > 1) * (1 + same) / (1 + len(lines))


def _decimal(cells: Sequence[str], separator: str) -> str:
    """By the cells that make sense in one way alone; unclear ones follow the separator."""
    point, comma = (_NUMBERS[mark].fullmatch for mark in ".,")
    votes = Counter((point(cell) is None, comma(cell) is None) for cell in cells)
    clear = votes[True, False] - votes[False, True]
    unclear = separator == ";" and any("," in cell for cell in cells if comma(cell))
    return "," if clear > 0 or (clear == 0 and unclear) else "."
