"""Batches from Parquet files that do not fit into memory."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..notices import extra
from .shards import ShardSampler


class ParquetBatches:
    """Batches (x, y) from Parquet files, a row group at a time, as often as they are asked for.

    Args:
        paths: a file, a folder (all `*.parquet` below it), a glob pattern, or a list of those.
        inputs: columns of x (n, d): numbers, or fixed-size lists, which give several columns each.
        target: column of y (n,), or columns of y (n, k); None for x alone.
        batch_size: rows of a batch; the last one of a row group may have fewer.
        dtype: of x and y.
        rank: of this process, which reads its share of the row groups; as in `ShardSampler`.
        ranks: how many processes share them; likewise those of the job where torch.distributed
            runs, else one.
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
        self.batch_size, self.dtype, self._single = batch_size, dtype, isinstance(target, str)
        self._x, self._y = ([n] if isinstance(n, str) else [*(n or ())] for n in (inputs, target))
        groups = [group for path in _files(paths) for group in self._groups(path)]
        if batch_size < 1 or not self._x or not groups:
            raise ValueError(
                f"Expected inputs, batch_size >= 1 and files with rows, got {inputs=}, "
                f"{batch_size=} and {len(groups)} row groups in {paths}."
            )
        self._own = [groups[number] for number in ShardSampler(groups, rank, ranks)]

    def __len__(self) -> int:
        return sum(-(-rows // self.batch_size) for *_, rows in self._own)

    def __iter__(self) -> Iterator[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
        for path, group, _ in self._own:
            with _opened(path) as file:
                for batch in file.iter_batches(self.batch_size, [group], self._x + self._y):
                    x = torch.cat([self._read(batch, name) for name in self._x], 1)
                    y = [self._read(batch, name) for name in self._y]
                    yield (x, y[0].squeeze(1) if self._single else torch.cat(y, 1)) if y else x

    def _groups(self, path: Path) -> list[tuple[Path, int, int]]:
        """Number and rows of each row group in a file that must have the columns."""
        with _opened(path) as file:
            names = file.schema_arrow.names
            if lacking := [name for name in self._x + self._y if names.count(name) != 1]:
                raise ValueError(f"Expected one column {lacking[0]!r}, got {', '.join(names)}.")
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        return [(path, i, rows) for i, rows in enumerate(sizes) if rows]

    def _read(self, batch: Any, name: str) -> torch.Tensor:
        column = batch.column(name)
        flat = column.flatten() if hasattr(column.type, "list_size") else column
        numbers, missing = flat.to_numpy(zero_copy_only=False), column.null_count or flat.null_count
        if missing or numbers.dtype.kind not in "biuf":
            raise ValueError(f"Column {name!r} ({column.type}, {missing} nulls), expected numbers.")
        return torch.tensor(numbers, dtype=self.dtype).reshape(len(column), -1)


def _files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Each file once, in an order that is the same in every process."""
    found = set[Path]()
    for path in map(Path, [paths] if isinstance(paths, (str, Path)) else paths):
        several = [path] if path.is_file() else map(Path, glob.glob(str(path), recursive=True))
        if path.is_dir():  # names that begin so are of unfinished writes
            inside = ((one, one.relative_to(path).parts) for one in path.rglob("*.parquet"))
            several = [one for one, names in inside if not any(n[0] in "._" for n in names)]
        if not (files := {one.resolve() for one in several}):
            raise ValueError(f"There is no Parquet file {path}, and none in it or like it.")
        found |= files
    return sorted(found)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ImportError(f"Parquet needs pyarrow: {extra('parquet')}.") from error
    try:
        with ParquetFile(path, buffer_size=1 << 20) as file:
            yield file
    except (ValueError, OSError, NotImplementedError) as error:  # pyarrow's own are such
        remedy = "Name other columns, encode text, fill or drop nulls, or write the file again."
        raise ValueError(f"{path}: {error} {remedy}") from error
