"""Batches from Parquet files that do not fit into memory.

A Parquet file consists of row groups. `ParquetBatches` reads the files' metadata once, divides the
row groups among the processes of a job, and reads those of its own process batch by batch whenever
it is iterated over.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..notices import extra
from .shards import ShardSampler

__all__ = ["ParquetBatches"]


class _RowGroup(NamedTuple):
    """A row group of a file, by its number."""

    path: Path
    number: int
    rows: int


class ParquetBatches:
    """Batches (x, y) from Parquet files, one row group at a time; can be iterated over repeatedly.

    Args:
        paths: A file, a folder (all `*.parquet` below it), a glob pattern, or a list of those.
        inputs: Columns of x (n, d): numbers, or fixed-size lists, which give several columns each.
        target: The column of y (n,), or columns of y (n, k); None for x alone.
        batch_size: Rows of a batch; the last one of a row group may have fewer.
        dtype: The dtype of x and y.
        rank: The number of this process, which reads its share of the row groups; as in
            `ShardSampler`.
        ranks: How many processes share them; by default all processes if torch.distributed runs,
            else one.

    Raises:
        ValueError: Columns, files or rows are missing, or the batch size is not positive.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        inputs: str | Sequence[str],
        target: str | Sequence[str] | None = None,
        *,
        batch_size: int = 65536,
        dtype: torch.dtype = torch.float32,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.dtype = dtype
        self._input_names = _names(inputs)
        self._target_names = _names(target)
        self._flat_target = isinstance(target, str)
        groups: list[_RowGroup] = []
        for path in _files(paths):
            groups += self._row_groups(path)
        if batch_size < 1 or not self._input_names or not groups:
            raise ValueError(
                f"Expected inputs, batch_size >= 1 and files with rows, got {inputs=}, "
                f"{batch_size=} and {len(groups)} row groups in {paths}."
            )
        self._groups = [groups[number] for number in ShardSampler(groups, rank, ranks)]

    def __len__(self) -> int:
        # Rounded up for each row group: a batch never goes beyond one.
        return sum(-(-group.rows // self.batch_size) for group in self._groups)

    def __iter__(self) -> Iterator[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
        names = self._input_names + self._target_names
        for group in self._groups:
            with _opened(group.path) as file:
                for batch in file.iter_batches(self.batch_size, [group.number], names):
                    x = self._columns(batch, self._input_names)
                    if not self._target_names:
                        yield x
                        continue
                    y = self._columns(batch, self._target_names)
                    yield x, y.squeeze(1) if self._flat_target else y

    def _row_groups(self, path: Path) -> list[_RowGroup]:
        """The row groups of a file that have rows.

        Raises:
            ValueError: The file lacks a column, or has several of its name.
        """
        with _opened(path) as file:
            names = file.schema_arrow.names
            for name in self._input_names + self._target_names:
                if names.count(name) != 1:
                    raise ValueError(f"Expected one column {name!r}, got {', '.join(names)}.")
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        return [_RowGroup(path, number, rows) for number, rows in enumerate(sizes) if rows]

    def _columns(self, batch: Any, names: list[str]) -> torch.Tensor:
        """Columns of a batch side by side, (n, d)."""
        return torch.cat([self._column(batch, name) for name in names], 1)

    def _column(self, batch: Any, name: str) -> torch.Tensor:
        """A column of a batch: (n, 1) of numbers, (n, length) of fixed-size lists."""
        column = batch.column(name)
        flat = column.flatten() if hasattr(column.type, "list_size") else column
        numbers = flat.to_numpy(zero_copy_only=False)
        nulls = column.null_count or flat.null_count
        if nulls or numbers.dtype.kind not in "biuf":
            raise ValueError(f"Column {name!r} ({column.type}, {nulls} nulls), expected numbers.")
        return torch.tensor(numbers, dtype=self.dtype).reshape(len(column), -1)


def _names(columns: str | Sequence[str] | None) -> list[str]:
    """The names of columns as a list."""
    if columns is None:
        return []
    if isinstance(columns, str):
        return [columns]
    return list(columns)


def _files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Each file once, in an order that is the same in every process."""
    files: set[Path] = set()
    for path in map(Path, [paths] if isinstance(paths, (str, Path)) else paths):
        matching = {file.resolve() for file in _matching_files(path)}
        if not matching:
            raise ValueError(
                f"There is no Parquet file {path}, and no folder or pattern of that name with "
                "Parquet files."
            )
        files |= matching
    return sorted(files)


def _matching_files(path: Path) -> Iterable[Path]:
    """The file at a path, the Parquet files in a folder, or the files that match a pattern."""
    if path.is_file():
        return [path]
    if path.is_dir():
        return [file for file in path.rglob("*.parquet") if not _is_hidden(file, path)]
    return [Path(name) for name in glob.glob(str(path), recursive=True)]


def _is_hidden(file: Path, folder: Path) -> bool:
    """Whether a name on the path from a folder to a file marks an unfinished write."""
    return any(name[0] in "._" for name in file.relative_to(folder).parts)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A Parquet file, closed at the end; errors inside are raised with its name and a remedy."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ImportError(f"Parquet needs pyarrow: {extra('parquet')}.") from error
    try:
        with ParquetFile(path, buffer_size=1 << 20) as file:
            yield file
    except (ValueError, OSError, NotImplementedError) as error:  # bases of pyarrow's errors
        remedy = "Name other columns, encode text, fill or drop nulls, or write the file again."
        raise ValueError(f"{path}: {error} {remedy}") from error
