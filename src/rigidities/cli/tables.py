"""Tables from files, a chunk of rows at a time: CSV as people write it, and Parquet."""

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
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

MISSING = {"", "?", "-", "--", ".", "na", "n/a", "#n/a", "nan", "null", "none", "<na>", "missing"}
MISSING |= {"inf", "+inf", "-inf", "infinity", "-infinity"}
"""What people and programs write into a cell without a value, in lower case."""
_SAMPLE, _GROUPS, _END = 1 << 17, " \u00a0\u202f'", "\0end"
"""Characters that tell how a file is written, as many as csv allows in one cell; what may stand
between thousands; a line below the last, which an open quote swallows."""
_CONTROL = re.compile("[\0-\x08\x0b\x0e-\x19\x1c-\x1f]")
_MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
_MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # begins like UTF-32
_BROKEN = (OSError, EOFError, zlib.error, csv.Error)


def _western(error: UnicodeError) -> tuple[str, int]:
    """Bytes that are no UTF-8, as Windows-1252."""
    assert isinstance(error, UnicodeDecodeError)
    return error.object[error.start : error.end].decode("cp1252", "replace"), error.end


codecs.register_error("rigidities.western", _western)


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
            with _parquet(path) as file:
                return cls(path, file.schema_arrow.names)
        if start == b"PK\3\4":
            raise ValueError(f"{path} is a workbook or an archive. Save the table as CSV.")
        with _text(path) as file:
            sample, cut = file.read(_SAMPLE), bool(file.read(1))
            notes = [f"Its text is in {file.encoding}"] * (file.encoding != "utf-8-sig")
        if _CONTROL.search(sample):
            raise ValueError(f"{path} is a binary file. Expected CSV or Parquet.")
        tried = [(_records(sample, one, cut=cut), one) for one in ",;\t|"]
        (first, *rows), separator = max(tried, key=lambda one: (_agreement(*one[0]), one[1] != ","))
        if not any(cell.strip() for cell in first):
            raise ValueError(f"{path} is empty. Expected a line of names and rows below it.")
        decimal = _decimal([cell.strip() for row in rows for cell in row], separator)
        notes += ["Its numbers have decimal commas"] * (decimal == ",")
        read = [number(cell.strip(), decimal) for cell in first]
        header = any(one is None or one[1] for one in read)
        if not header:
            notes.append("Its first line holds numbers: columns are 'column 1' and so on")
        names = list[str]()
        for place, cell in enumerate(first, start=1):
            own = " ".join(cell.split()) * header or f"column {place}"
            free = (own, *(f"{own} ({n})" for n in range(2, place + 1)))
            names.append(next(one for one in free if one not in names))
            notes += [f"A second {own!r} is called {names[-1]!r}"] * (names[-1] != own)
        return cls(path, names, notes, decimal, separator, header)

    def require(self, names: Iterable[str]) -> None:
        """Refuse a file without these columns."""
        if lacking := [name for name in names if name not in self.names]:
            more = f" and {len(self.names) - 30} more" if len(self.names) > 30 else ""
            raise ValueError(
                f"Expected the column {', '.join(map(repr, lacking))} in {self.path}, got "
                f"{', '.join(map(repr, self.names[:30]))}{more}. Names must agree to the letter."
            )

    def chunks(self, rows: int) -> Iterator[pandas.DataFrame]:
        """Columns of text, None where a value is missing; of Parquet numbers and dates too."""
        import pandas

        if not self.separator:
            with _parquet(self.path) as file:
                for batch in file.iter_batches(rows):
                    frame = batch.to_pandas(ignore_metadata=True)  # which hides an index
                    for name in (one for one in frame if frame[one].dtype.kind not in "iufM"):
                        texts = (None if cell is None else str(cell) for cell in frame[name])
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
        with _text(self.path) as file:
            reader = csv.reader(chain(file, [_END]), delimiter=self.separator)
            for line in islice(filter(None, reader), int(self.header), None):
                if line == [_END]:
                    return
                if line[-1].endswith(_END):
                    text = line[-1].removesuffix(_END)[:40]
                    raise ValueError(f"{self.path}: nothing closes the quote before {text!r}.")
                if any(cell.strip() for cell in line[width:]):
                    raise ValueError(
                        f"Expected {width} entries in line {reader.line_num} of {self.path}, "
                        f"got {len(line)}. Quote text that holds {self.separator!r}."
                    )
                yield (line + [""] * (width - len(line)))[:width]


def _clean(cell: str | None) -> str | None:
    return None if cell is None or (text := cell.strip()).lower() in MISSING else text


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            yield file
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is a damaged Parquet file ({error}). Write it again.") from error


@contextmanager
def _text(path: Path) -> Iterator[io.TextIOWrapper]:
    """By the file's mark; without one UTF-8, and what is none of that as Windows-1252."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            start = file.peek(4)[:4]
            marked = (name for mark, name in _MARKS.items() if start.startswith(mark))
            encoding = next(marked, "utf-8-sig")
            yield io.TextIOWrapper(file, encoding, "rigidities.western", "")
    except _BROKEN as error:
        raise ValueError(f"{path} is damaged ({error}). Write it again.") from error


def _records(sample: str, separator: str, *, cut: bool) -> list[list[str]]:
    """The sample's lines, without one that may have been cut."""
    found = list(csv.reader(io.StringIO(sample, newline=""), delimiter=separator))
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
