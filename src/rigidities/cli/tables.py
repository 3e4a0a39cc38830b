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
_SAMPLE, _END = 1 << 17, "\0end"
"""Characters that tell a file's separator, as many as csv allows in one cell; a line below the
last, which an open quote swallows."""
_GROUPS = " \u00a0\u202f'\u2019"
"""What may stand between thousands, beside the mark that is no decimal mark: spaces, and the
apostrophes of Switzerland."""
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
    # Groups come first: of 1'000 the 1 alone would be the number, and '000 its unit.
    whole = rf"[1-9]\d{{0,2}}(?:[{thousands}{_GROUPS}]\d{{3}})+|\d+"
    number = rf"[+-]?(?:(?:{whole})(?:\{decimal}\d*)?|\{decimal}\d+)(?:[eE][+-]?\d+)?"
    return re.compile(
        rf"([$€£¥]|[A-Z]{{3}}\s)?\s*({number})\s*((?!['\u2019]\d)[^\d\s.,:/\\-].{{0,14}})?"
    )


_NUMBERS = {".": _pattern(".", ","), ",": _pattern(",", ".")}


def number(text: str, decimal: str = ".") -> tuple[float, str] | None:
    """The number in a cell and its unit, if any; None where it holds no number.

    Examples:
        >>> number("1,234.5"), number("1.234,5 kg", ","), number("12 %"), number("2020-01-01")
        ((1234.5, ''), (1234.5, 'kg'), (12.0, '%'), None)
        >>> number("1'234'567.5")
        (1234567.5, '')
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
    def open(cls, path: Path, trained: str | None = None) -> Table:
        """Find out how a file is written; a ValueError where it is empty or no table.

        Args:
            path: of the file.
            trained: the decimal mark of the table that a model was trained with, which holds where
                no cell of this file tells.
        """
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
        (first, *_), separator = max(tried, key=lambda one: (_agreement(*one[0]), one[1] != ","))
        if not any(cell.strip() for cell in first):
            raise ValueError(f"{path} is empty. Expected a line of names and rows below it.")
        # All of the file tells the mark: the first cells may make sense in both ways.
        lines = cls(path, first, separator=separator)._lines()
        decimal, note = _decimal(chain.from_iterable(lines), separator, trained)
        notes += note
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


def _decimal(cells: Iterable[str], separator: str, trained: str | None) -> tuple[str, list[str]]:
    """The decimal mark, by the cells that make sense in one way alone, and a word about it.

    Where no cell tells, it is that of the training table; without one, of a file with semicolons
    that has commas in its numbers, the comma.
    """
    clear, unclear, commas = Counter[str](), False, False
    for cell in map(str.strip, cells):
        if "," not in cell and "." not in cell:
            continue
        point, comma = (_NUMBERS[mark].fullmatch(cell) is not None for mark in ".,")
        commas = commas or (comma and "," in cell)
        if point != comma:
            clear["." if point else ","] += 1
        elif point:
            unclear = True
    names = {".": "points", ",": "commas"}
    if clear["."] != clear[","]:
        decimal = max(clear, key=clear.__getitem__)
        if trained not in (None, decimal):
            said = f"Its numbers have decimal {names[decimal]}, those of the training table "
            return decimal, [f"{said}{names[trained or decimal]}: they are read as its cells say"]
    elif trained is not None:
        said = f"No number tells its decimal mark: read with {names[trained]}, as in training"
        return trained, [said] if unclear or clear else []
    else:
        decimal = "," if commas and separator == ";" else "."
    return decimal, ["Its numbers have decimal commas"] if decimal == "," else []
