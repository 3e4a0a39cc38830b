"""`rigidities tabular`: from a table to a model with error bars, its report and predictions.

`train` reads a table (`tables`), makes a matrix of it (`columns`), splits its rows into those that
train, calibrate and test, trains a model (`learners`), gives it error bars, judges these on the
test rows and writes a folder. `apply` predicts new tables by the file of a model alone, without
scikit-learn. `page_again` makes the page of such a folder again.

Every printed number of rows is one of a part (`PARTS`), and the parts add up to the rows read.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor
from tqdm import tqdm

from .. import metrics, report
from .._version import __version__
from ..calibration.conformal import rows_needed
from ..calibration.methods import Full
from ..calibration.report import CalibrationReport
from ..data.storage import Snapshot, prefixed, unprefixed
from ..last_layer.rigidity import LastLayerRigidity
from ..notices import extra
from ..prediction.prediction import Prediction
from ..report.document import checked_place
from ..report.formatting import exact, number
from ..report.judgement import Judgements
from ..report.scores import TargetScores
from ..report.target_section import PlainTable
from . import learners
from .columns import (
    CURRENCIES,
    Column,
    inputs,
    lacks_unit,
    matrix,
    names_in_file,
    new_gaps,
    numbers,
    times,
)
from .logarithm import in_target_unit
from .tables import Table

if TYPE_CHECKING:
    import pandas

Say = Callable[[str], None]
"""Prints one text."""

Scores = dict[str, dict[str, float]]
"""Metrics by their name, of each kind of error bars by its name."""

Bounds = tuple[float | None, float | None]
"""The least and the largest value that the target can have, None for no bound."""

PARTS = ("train", "calibration", "conformal", "test", "unlabelled", "undated")
"""What a row is used for; the last two are not learnt from."""

RESERVED = ("row", "mean", "std", "low", "high", "centre", "split", "target")
"""Columns of the predictions; `unit` is one more if the target has a unit."""

FILES_OF_REPORT = ("model.safetensors", "predictions.csv", "summary.json")
"""Files of the folder that its page is made from."""

LEAST = 30
"""Rows with a target, at least."""

SHARE = 0.15
"""Share of the rows with a target that calibrates; as many test."""

_FACTOR = 1.5
"""By how much a part may be larger or smaller than its share before this counts as uneven."""

MOST_IMPORTANCES = 10
"""Inputs whose importance is shown, at most."""

_KINDS = {"auto": ("tree", "linear"), "tree": ("tree",), "linear": ("linear",)}
"""Kinds of learners that are compared, by the option --model; a network is compared with none."""

_KINDS_IN_WORDS = {
    "number": "numeric",
    "date": "date",
    "category": "categorical",
    "days": "days between dates",
}
"""Kinds of inputs, in words."""

_ROWS_SHUFFLED = 2_000
"""Test rows by which importances are measured, at most."""

_SUSPICIOUS = 30
"""How many times as important as the next an input must be to be remarked upon."""

_SKEWED = 0.5
"""Skewness of a positive target from which on its logarithm is tried too."""

MOST = 10_000
"""Rows that calibrate, at most, and rows that test."""

CHUNK = 20_000
"""Rows that are read at a time."""

_INPUTS_SHOWN = 12
"""Columns that the report shows of single rows, at most."""


@dataclass(frozen=True)
class TableModel:
    """A model of a table's column, with error bars: one file, without code, holds all of it.

    Attributes:
        uq: The model with its error bars.
        columns: Its inputs.
        target: Name of the column that it predicts.
        level: Of its intervals.
        identifiers: Columns that are copied to the predictions.
        decimal: The decimal mark of the training table; None of a Parquet file.
        unit: Of the target; empty where it has none.
        logarithm: Whether `uq` predicts the logarithm of the target.
        conformal: Whether intervals are those with a guarantee.
    """

    uq: LastLayerRigidity
    columns: Sequence[Column]
    target: str
    level: float
    identifiers: Sequence[str] = ()
    decimal: str | None = None
    unit: str = ""
    logarithm: bool = False
    conformal: bool = False

    def save(self, path: Path) -> None:
        """Write the file."""
        fit = self.uq.get_extra_state()
        model_tensors = prefixed("model", self.uq.model.state_dict())
        fit_tensors = prefixed("fit", fit["tensors"])
        table = {
            "target": self.target,
            "level": self.level,
            "identifiers": list(self.identifiers),
            "decimal": self.decimal,
            "columns": [asdict(column) for column in self.columns],
            "unit": self.unit,
            "logarithm": self.logarithm,
            "conformal": self.conformal,
        }
        fit_state = {"header": fit["header"], "checksum": fit["checksum"]}
        header = {"kind": "table model", "tabular": table, "fit": fit_state}
        Snapshot(model_tensors | fit_tensors, header).write(path)

    @classmethod
    def load(cls, path: Path) -> TableModel:
        """Read the file again.

        Raises:
            ValueError: The file is damaged, or of another kind.
        """
        snapshot = Snapshot.read(path, holds="table model")
        with snapshot.opened():
            table = snapshot.header["tabular"]
            columns = [Column(**column) for column in table["columns"]]
            model_state = unprefixed("model", snapshot.tensors)
            uq = LastLayerRigidity(learners.restored(model_state, _category_counts(columns)))
            fit_tensors = unprefixed("fit", snapshot.tensors)
            uq.set_extra_state({"tensors": fit_tensors, **snapshot.header["fit"]})
            return cls(
                uq=uq,
                columns=columns,
                target=table["target"],
                level=table["level"],
                identifiers=table["identifiers"],
                decimal=table["decimal"],
                unit=table["unit"],
                logarithm=table["logarithm"],
                conformal=table["conformal"],
            )

    def predict(self, x: Tensor) -> Prediction:
        """The prediction of inputs, (N, P), in the unit of the target."""
        prediction = self.uq.predict(x)
        return in_target_unit(prediction) if self.logarithm else prediction

    def interval(self, prediction: Prediction, level: float) -> tuple[Tensor, Tensor]:
        """Ends of the intervals, with the guarantee where the model has one.

        Raises:
            ValueError: The guarantee needs more rows for this level.
        """
        conformal = self.uq.calibration.conformal
        if self.conformal and conformal is not None:
            count = int(conformal.counts.max())
            if count < rows_needed(level):
                raise ValueError(
                    f"Guaranteed intervals of level {level:g} need {rows_needed(level)} conformal "
                    f"rows or more, and the model has {count}. Use a lower --level, or train with "
                    "a larger --conformal share."
                )
        return prediction.interval(level, conformal=self.conformal)

    def moved_numbers(self, x: Tensor) -> Counter[str]:
        """How many numbers of each column are out of the range that the model takes as they are."""
        encoded = next(self.uq.model.children())
        counts = Counter[str]()
        if isinstance(encoded, learners.Encoded):
            names = [column.name for column in self.columns for _ in column.widths]
            for name, count in zip(names, encoded.is_moved(x).sum(0).tolist(), strict=True):
                counts[name] += count
        return +counts  # without those of zero

    def targets(self, series: pandas.Series, decimal: str) -> Any:
        """True values in the target's unit, an array (N,), NaN where there is none.

        Nothing is read where numbers lack a unit that says how large they are.
        """
        if lacks_unit(series, self.unit, decimal):
            return math.nan
        return numbers(series, decimal, self.unit)

    def predictions(
        self, frame: pandas.DataFrame, x: Tensor, level: float, before: int = 0
    ) -> pandas.DataFrame:
        """A table of predictions.

        Args:
            frame: Some rows of a table.
            x: Their inputs, (N, P).
            level: Of the intervals.
            before: How many rows of the table come before these.
        """
        import pandas

        prediction = self.predict(x)
        low, high = self.interval(prediction, level)
        columns: dict[str, Any] = {"row": range(before + 1, before + 1 + len(frame))}
        for name in self.identifiers:
            columns[name] = frame.get(name)
        columns["mean"] = prediction.mean[:, 0].numpy()
        columns["std"] = prediction.std[:, 0].numpy()
        columns["low"] = low[:, 0].numpy()
        columns["high"] = high[:, 0].numpy()
        columns["centre"] = prediction.centre[:, 0].numpy()
        if self.unit:
            columns["unit"] = self.unit
        return pandas.DataFrame(columns, frame.index)


@dataclass(frozen=True)
class Splitting:
    """How rows are divided into parts.

    Attributes:
        seed: Of the random order.
        group: Column whose rows of one value stay together; empty for none.
        time: Column by which rows are in the order of time; empty for none.
        conformal: Share of the labelled rows that is set apart for guaranteed intervals.
    """

    seed: int = 0
    group: str = ""
    time: str = ""
    conformal: float = 0.0


@dataclass(frozen=True)
class Training:
    """A table to learn from.

    Attributes:
        table: The file.
        frame: All of its cells.
        columns: The inputs.
        notes: What is peculiar of the file and its columns, in words.
        x: Inputs, (N, P).
        y: Targets, (N, 1), NaN where missing.
        unit: Of the target; empty where it has none.
        part: Of each row one of `PARTS`, an array (N,).
        group: A number of each row, (N,); rows of one number are in one part. With `splitting.time`
            the numbers are in the order of time.
        splitting: How the rows were divided.
    """

    table: Table
    frame: pandas.DataFrame
    columns: Sequence[Column]
    notes: Sequence[str]
    x: Tensor
    y: Tensor
    unit: str
    part: Any
    group: Tensor
    splitting: Splitting

    @classmethod
    def read(
        cls,
        path: Path,
        target: str,
        left: Sequence[str],
        keep: Sequence[str],
        splitting: Splitting,
    ) -> Training:
        """Read a file.

        Args:
            path: The file.
            target: Name of the column to learn.
            left: Columns that are no inputs.
            keep: Columns that are inputs even if they number rows or give the target away.
            splitting: How rows are divided into parts.

        Raises:
            ValueError: Nothing can be learnt from the file.
        """
        table = Table.open(path)
        named_columns = Counter((target, *left, *keep))
        table.require(name for name in named_columns if name not in keep)
        table.require(name for name in (splitting.group, splitting.time) if name)
        name, count = named_columns.most_common(1)[0]
        if count > 1:
            raise ValueError(
                "Expected each column only once in --target, --id, --drop and --keep, got "
                f"{name!r} twice."
            )
        frame = _whole_frame(table)
        y, unit, target_notes = _target(frame[target], table, target)
        no_inputs = {target, *left}
        if splitting.group not in keep:
            no_inputs.add(splitting.group)
        candidates = frame.drop(columns=[name for name in table.names if name in no_inputs])
        columns, input_notes = inputs(candidates, y.numpy(), table.decimal, keep)
        # An input that is made of others, such as days between dates, can be kept too.
        made = {column.name for column in columns}
        table.require(name for name in keep if name not in made)
        if not columns:
            reasons = "; ".join(input_notes)
            raise ValueError(
                f"Expected at least one column of inputs besides {target!r} in {path}. {reasons}."
            )
        x, _ = matrix(columns, frame, table.decimal)
        group, is_known = _groups(x, frame, table, splitting)
        part = _parts(group, y, is_known, splitting)
        data = cls(
            table=table,
            frame=frame,
            columns=columns,
            notes=[*table.notes, *target_notes, *input_notes, *_uneven_parts(part, splitting)],
            x=x,
            y=y[:, None],
            unit=unit,
            part=part,
            group=group,
            splitting=splitting,
        )
        if not data.folds:  # one group, or one time, has nearly all training rows
            raise ValueError(_undivided(group[y.isfinite() & is_known], splitting))
        return data

    def rows(self, part: str) -> learners.Rows:
        """Inputs and targets of a part."""
        is_of_part = torch.tensor(self.part == part)
        return self.x[is_of_part], self.y[is_of_part]

    @property
    def labelled(self) -> Tensor:
        """All targets that are known, (M,)."""
        return self.y[self.y.isfinite()]

    @property
    def folds(self) -> learners.Folds:
        """Folds of the training rows, which respect groups and time."""
        is_train = torch.tensor(self.part == "train")
        return learners.folds_of(
            int(is_train.sum()),
            self.splitting.seed,
            group=self.group[is_train],
            in_order=bool(self.splitting.time),
        )

    @property
    def sizes(self) -> dict[str, int]:
        """How many rows each part has, of the parts that have some."""
        counts = {part: int((self.part == part).sum()) for part in PARTS}
        return {part: count for part, count in counts.items() if count}

    def account(self, target: str) -> str:
        """One line that accounts for all rows."""
        reasons = {
            "unlabelled": f" (no number in {target})",
            "undated": f" (no time in {self.splitting.time})",
        }
        terms = [f"{n:,} {part}{reasons.get(part, '')}" for part, n in self.sizes.items()]
        return f"Rows: {len(self.x):,} read = {' + '.join(terms)}"

    def opening(self, target: str) -> Iterator[str]:
        """What was read, in lines."""
        kinds = Counter(column.kind for column in self.columns)
        yield f"{self.table.path}: {len(self.x):,} rows, {len(self.table.names)} columns"
        listed = ", ".join(f"{count} {_KINDS_IN_WORDS[kind]}" for kind, count in kinds.items())
        in_unit = f" in {self.unit}" if self.unit else ""
        yield f"  Target: {target}{in_unit}. Inputs: {listed}"
        for note in self.notes:
            yield f"  {note}"
        rows_with_gaps = int(self.x.isnan().any(1).sum())
        if rows_with_gaps:
            yield (
                f"  Missing values: in {rows_with_gaps:,} of the {len(self.x):,} rows read. The "
                "model accepts them"
            )
        yield f"  {self.account(target)}"
        if kinds["date"] and self.splitting.group:
            yield "  Groups are split at random, so the scores are optimistic for future dates"
        elif kinds["date"] and not self.splitting.time:
            dates = next(column.name for column in self.columns if column.kind == "date")
            yield (
                "  Rows are split at random, so the scores are optimistic for future dates. Try "
                f"--time-split {dates!r}"
            )


@dataclass(frozen=True)
class _Learned:
    """A model after its training.

    Attributes:
        uq: The fitted model, not calibrated yet.
        trees: Boosted trees with settings that suit the table, for quantile regression.
        description: What the model is, in words.
        logarithm: Whether it predicts the logarithm of the target.
        leaderboard: The learners that were tried, the chosen one first; empty where nothing was
            compared.
    """

    uq: LastLayerRigidity
    trees: Any
    description: str
    logarithm: bool
    leaderboard: Sequence[learners.Trial] = ()

    def scale(self, y: Tensor) -> Tensor:
        """Targets as the model learns them."""
        return y.log() if self.logarithm else y

    def rows(self, data: Training, part: str) -> learners.Rows:
        """Inputs and targets of a part, as the model learns them."""
        x, y = data.rows(part)
        return x, self.scale(y)


def train(
    path: Path,
    target: str,
    out: Path,
    *,
    model: str = "auto",
    level: float = 0.9,
    seed: int = 0,
    id: Sequence[str] = (),
    drop: Sequence[str] = (),
    keep: Sequence[str] = (),
    support: Bounds | None = None,
    logarithm: bool | None = None,
    conformal: float | None = None,
    group: str | None = None,
    time_split: str | None = None,
    say: Say = print,
) -> dict[str, Any]:
    """Learn a column of a table and write a folder, as on the command line.

    Args:
        path: The table.
        target: Name of the column to learn.
        out: The folder.
        model: "auto" for the better of boosted trees and a linear model, "tree" or "linear" for
            one of these, "net" for a network.
        level: Of the intervals.
        seed: Of splits and models.
        id: Columns that are no inputs, but copied to the predictions.
        drop: Columns that are no inputs.
        keep: Columns that are inputs even if they number rows or give the target away.
        support: The least and the largest value that the target can have, None for no bound.
        logarithm: Whether to learn the logarithm of the target. By default it is tried where the
            target is positive and skewed, and taken where it does better.
        conformal: Share of the labelled rows that is set apart for guaranteed intervals.
        group: Column whose rows of one value are never split between parts.
        time_split: Column by which the oldest rows train and the newest test.
        say: Prints one text.

    Returns:
        What `summary.json` says, and the folder.

    Raises:
        ModuleNotFoundError: A package of the extra `tabular` is missing.
        ValueError: Nothing can be learnt from the table, or options do not go together.
    """
    _require("pandas", "sklearn", "plotly", "jinja2")
    begun = time.monotonic()
    identifiers = [*id, group] if group and group not in id else list(id)
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"--out {out} is a file. Pass the name of a folder.")
    _require_names_are_free(RESERVED, id, group)
    _require_columns_differ(target, group, time_split)
    splitting = Splitting(seed, group or "", time_split or "", conformal or 0.0)
    with _moved(out) as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = Training.read(path, target, [*id, *drop], keep, splitting)
        if data.unit:
            _require_names_are_free(["unit"], id, group)
        _require_usable_targets(data, target, support, logarithm)
        _require_conformal_rows(data, level)
        for line in data.opening(target):
            say(line)

        # Rows that calibrate and test need a logarithm too.
        may_try_logarithm = support is None and bool((data.labelled > 0).all())
        learned = _learned(model, data, logarithm, may_try_logarithm=may_try_logarithm)
        calibration = _calibrated(learned, data, support)
        messages = [str(warning.message) for warning in caught]
        remarks = list(dict.fromkeys([*messages, *calibration.warnings]))
        if learned.logarithm:
            remarks = [_about_logarithm(remark, target) for remark in remarks]
        say(f"  Trained in {time.monotonic() - begun:.0f} s: {learned.description}")

        table_model = TableModel(
            uq=learned.uq,
            columns=data.columns,
            target=target,
            level=level,
            identifiers=identifiers,
            decimal=data.table.decimal if data.table.separator else None,
            unit=data.unit,
            logarithm=learned.logarithm,
            conformal=bool(conformal),
        )
        predictions = table_model.predictions(data.frame, data.x, level)
        judgements = _judgements(table_model, data, model, remarks)
        scores = _scores(judgements.targets[0])
        if table_model.conformal:
            scores["conformal"] = _interval_scores(table_model, data, predictions)
        scores["quantile"] = _quantile_scores(learned, data, level, support)
        importances = _importances(table_model, data)
        tables = [
            *_leaderboard(learned.leaderboard, data, model),
            _importance_table(importances, data),
        ]
        for table in tables:
            say(table.text())
        say(_scoreboard(scores, level, data))
        say(str(judgements.verdict))
        # The verdict shows most remarks as cautions.
        cautions = [caution.text for caution in judgements.verdict.cautions]
        for remark in remarks:
            if remark not in cautions:
                say(f"  ! {remark}")
        say("")
        hints = [*_hint_of_leak(importances, target)]
        hints += _hints(data, predictions, target, support, learned)
        for hint in hints:
            say(hint)

        summary: dict[str, Any] = {
            "library": __version__,
            "data": str(path.resolve()),
            "target": target,
            "unit": data.unit,
            "model": learned.description,
            "logarithm": learned.logarithm,
            "level": level,
            "seed": seed,
            "rows": data.sizes,
            "scores": scores,
            "leaderboard": [asdict(trial) | {"name": trial.name} for trial in learned.leaderboard],
            "importances": importances,
            "tables": [asdict(table) for table in tables],
            "verdict": judgements.verdict.plain(),
            "columns": [asdict(column) for column in data.columns],
            "notes": [*data.notes, *remarks, *hints],
            "remarks": remarks,
            "options": {
                "model": model,
                "conformal": conformal,
                "group": group,
                "time_split": time_split,
                "support": support,
            },
            "seconds": time.monotonic() - begun,
        }
        _write(folder, table_model, data, predictions, judgements, tables)
        summary = _without_nan(summary)
        text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
        (folder / "summary.json").write_text(text, encoding="utf-8")
    say(f"Wrote {out}: predictions.csv, report.html, summary.json, model.safetensors")
    say(f"For new rows: rigidities tabular --apply {out / 'model.safetensors'} new.csv")
    return summary | {"out": str(out)}


def apply(
    model: Path, path: Path, out: Path, *, level: float | None = None, say: Say = print
) -> dict[str, Any]:
    """Predict a file of any size into another, as on the command line.

    Args:
        model: The file of a `TableModel`.
        path: The table.
        out: The predictions.
        level: Of the intervals; by default that of the training.
        say: Prints one text.

    Returns:
        The file, the number of its rows, and by column the number of cells that were not read.

    Raises:
        ValueError: The table does not fit the model, or a file is damaged.
    """
    _require("pandas")
    table_model = TableModel.load(model)
    table = Table.open(path, table_model.decimal)
    checked_place(out, sources=[path, model])
    kinds = {column.name: column.kind for column in table_model.columns}
    table.require(names_in_file(table_model.columns))

    for note in table.notes:
        say(f"  {note}")
    used_names = {*kinds, table_model.target, *table_model.identifiers}
    unused_names = [name for name in table.names if name not in used_names]
    if unused_names:
        say(f"  Columns that the model does not use: {', '.join(unused_names)}")

    row_count = 0
    unread_cells = Counter[str]()
    empty_cells = Counter[str]()
    moved_numbers = Counter[str]()
    has_target = table_model.target in table.names
    sums = _SumsOfScores(level or table_model.level)
    with _moved(out.parent) as folder, (folder / out.name).open("w", encoding="utf-8") as file:
        for frame in tqdm(table.chunks(CHUNK), "Predicting", leave=False, disable=None):
            x, unread_in_chunk = matrix(table_model.columns, frame, table.decimal)
            predictions = table_model.predictions(frame, x, sums.level, before=row_count)
            if has_target:
                targets = table_model.targets(frame[table_model.target], table.decimal)
                predictions = predictions.assign(split="test", target=targets)
                predictions.loc[predictions["target"].isna(), "split"] = "unlabelled"
                sums.add(predictions)
            _write_csv(predictions, file, header=row_count == 0)
            unread_cells += unread_in_chunk
            empty_cells += new_gaps(table_model.columns, frame)
            moved_numbers += table_model.moved_numbers(x)
            row_count += len(frame)
        if not row_count:
            raise ValueError(f"{path} has no rows. Expected at least one row below the names.")

    for name, cells in unread_cells.items():
        if kinds[name] == "category":
            reason = "with a category that was not in the training table"
        else:
            reason = f"without a {kinds[name]}"
        say(f"  {name}: {cells:,} cells {reason}, treated as missing")
    for name, cells in empty_cells.items():
        say(
            f"  {name}: {cells:,} cells are empty, and none was in the training table: the model "
            "learnt nothing of such rows, and their bars may be wrong"
        )
    for name, cells in moved_numbers.items():
        say(
            f"  {name}: {cells:,} numbers are more than {learners.FARTHEST:g} standard deviations "
            "from the mean of the training table; the prediction is that of this distance, with a "
            "wide bar"
        )
    in_unit = f" in {table_model.unit}" if table_model.unit else ""
    say(f"Wrote {out}: {row_count:,} predictions of {table_model.target}{in_unit}")
    summary: dict[str, Any] = {"out": str(out), "rows": row_count, "unread": dict(unread_cells)}
    if sums.rows:
        summary["scores"] = sums.scores
        say(sums.sentence(table_model.unit))
        say(f"To judge the error bars: rigidities report {out}")
    elif has_target:
        say(f"  No row has a number{in_unit} in {table_model.target}, so nothing is scored")
    return summary


class _SumsOfScores:
    """Scores of predictions whose true values are known, added up chunk by chunk.

    Args:
        level: Of the intervals.

    Attributes:
        level: Of the intervals.
        rows: How many true values there were.
    """

    def __init__(self, level: float) -> None:
        self.level = level
        self.rows = 0
        self._squared_error = 0.0
        self._of_intervals = dict.fromkeys(("coverage", "width", "interval_score"), 0.0)

    def add(self, predictions: pandas.DataFrame) -> None:
        """Add the rows of predictions that have a true value in `target`."""
        known = predictions[predictions["split"] == "test"]
        if known.empty:
            return
        columns = torch.tensor(known[["mean", "low", "high", "target"]].to_numpy(float))
        mean, low, high, target = columns.unbind(1)
        self.rows += len(known)
        self._squared_error += float((target - mean).square().sum())
        for name, value in _scores_of_intervals(low, high, target, self.level).items():
            self._of_intervals[name] += len(known) * value

    @property
    def scores(self) -> dict[str, float]:
        """The scores by name, with the number of rows they are of."""
        means = {name: total / self.rows for name, total in self._of_intervals.items()}
        return {"rows": self.rows, "rmse": (self._squared_error / self.rows) ** 0.5, **means}

    def sentence(self, unit: str) -> str:
        """The scores in words."""
        scores = self.scores
        rmse = _with_unit(number(scores["rmse"]), unit)
        width = _with_unit(number(scores["width"]), unit)
        return (
            f"{self.rows:,} rows have a true value: RMSE {rmse}. The {100 * self.level:.4g} % "
            f"intervals cover {100 * scores['coverage']:.1f} % of them, and are {width} wide on "
            "average"
        )


def training_table(folder: Path) -> Path | None:
    """Where the training table of a folder was; None for a folder that `train` did not write."""
    if not all((folder / name).is_file() for name in FILES_OF_REPORT):
        return None
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except ValueError:
        return None
    if not isinstance(summary, dict) or not summary.keys() >= {"data", "tables", "remarks"}:
        return None
    return Path(str(summary["data"]))


def page_again(
    folder: Path, out: Path, *, data: Path | None = None, title: str | None = None
) -> tuple[Path, report.Verdict]:
    """Make the page of a folder that `train` wrote again.

    It is made of the folder's model and of the table that it was trained with.

    Args:
        folder: The folder.
        out: The page.
        data: The table; by default where it was at the training.
        title: The heading; by default that of the training.

    Returns:
        The page, and the verdict.

    Raises:
        ValueError: A file is damaged, or the table is another one.
        FileNotFoundError: A file is not where it was.
    """
    _require("pandas", "plotly", "jinja2")
    import pandas

    checked_place(out, sources=[data, *(folder / name for name in FILES_OF_REPORT)])
    for name in FILES_OF_REPORT:
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} has no {name}, which `rigidities tabular` writes. Train again, or pass "
                "predictions (.csv) or a saved fit (.safetensors) instead."
            )
    model = TableModel.load(folder / "model.safetensors")
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        tables = [PlainTable(**table) for table in summary["tables"]]
        remarks = summary["remarks"]
        kind = summary["options"]["model"]
        written = pandas.read_csv(folder / "predictions.csv", usecols=["split", "target"])
        path = data or Path(summary["data"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder} is damaged, or another version wrote it. Train again."
        ) from error
    if not path.is_file():
        raise FileNotFoundError(
            f"The training table {path} is no longer there. Pass its new path with --data."
        )
    checked_place(out, sources=[path])

    table = Table.open(path, model.decimal)
    table.require([*names_in_file(model.columns), model.target])
    frame = _whole_frame(table)
    y, unit, _ = _target(frame[model.target], table, model.target)
    expected = torch.tensor(written["target"].to_numpy(float))
    if len(y) != len(expected) or not torch.allclose(y, expected, rtol=1e-8, equal_nan=True):
        raise ValueError(
            f"{path} is not the training table of {folder}: its {model.target} differs. Pass the "
            "training table with --data."
        )
    x, _ = matrix(model.columns, frame, table.decimal)
    training = Training(
        table=table,
        frame=frame,
        columns=model.columns,
        notes=(),
        x=x,
        y=y[:, None],
        unit=unit,
        part=written["split"].to_numpy(),
        group=torch.arange(len(y)),
        splitting=Splitting(),
    )
    judgements = _judgements(model, training, kind, remarks)
    text = report.page_of(judgements, title or _title(model, training), tables)
    return report.save(out, text), judgements.verdict


def _require_names_are_free(taken: Sequence[str], id: Sequence[str], group: str | None) -> None:
    """Refuse columns to copy to the predictions whose names are taken there."""
    for option, names in (("id", id), ("group", [group] if group else [])):
        clashes = sorted(set(names) & set(taken))
        if clashes:
            raise ValueError(
                f"--{option} {clashes[0]}: the predictions have a column of that name already. "
                f"Rename the column in the table, or leave it out of --{option}."
            )


def _require_columns_differ(target: str, group: str | None, time_split: str | None) -> None:
    """Refuse columns that cannot divide the rows."""
    if group and time_split:
        raise ValueError(
            "--group and --time-split cannot be combined. To split whole groups by time, pass "
            "--time-split a column with one time per group."
        )
    for option, name in (("group", group), ("time-split", time_split)):
        if name == target:
            raise ValueError(f"--{option} {name} is the target. Name another column.")


def _require_usable_targets(
    data: Training, target: str, support: Bounds | None, logarithm: bool | None
) -> None:
    """Refuse targets that the support or the logarithm does not allow; the message names a row."""
    low, high = support or (None, None)
    y = data.y[:, 0]
    if logarithm and bool((y <= 0).any()):
        row = int((y <= 0).nonzero()[0])
        raise ValueError(
            f"--log needs values above zero, got {exact(float(y[row]))} in row {row + 1} of "
            f"{target}. Leave --log out. (`--support 0,` allows zeros.)"
        )
    outside = torch.zeros_like(y, dtype=torch.bool)
    if low is not None:
        outside |= y < low
    if high is not None:
        outside |= y > high
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise ValueError(
            f"{int(outside.sum()):,} values of {target} lie outside --support. The first is "
            f"{exact(float(y[row]))} in row {row + 1}. Widen --support, or correct the values."
        )


def _require_conformal_rows(data: Training, level: float) -> None:
    """Refuse too few rows for guaranteed intervals of a level."""
    if not data.splitting.conformal:
        return
    needed = rows_needed(level)
    count = data.sizes.get("conformal", 0)
    if count < needed:
        used = sum(data.sizes.get(part, 0) for part in PARTS[:4])
        least_share = needed / used
        raise ValueError(
            f"Guaranteed intervals of level {level:g} need {needed} conformal rows or more, and "
            f"--conformal {data.splitting.conformal:g} gives {count}. Use a share of "
            f"{math.ceil(100 * least_share) / 100:g} or more, or a lower --level."
        )


def _category_counts(columns: Sequence[Column]) -> list[int]:
    """Number of categories of each column of the matrix, 0 for numbers."""
    counts: list[int] = []
    for column in columns:
        counts += column.widths
    return counts


def _whole_frame(table: Table) -> pandas.DataFrame:
    """All rows of a table; of one without rows its columns."""
    import pandas

    chunks = list(table.chunks(CHUNK))
    if not chunks:
        return pandas.DataFrame(columns=table.names, dtype=object)
    return pandas.concat(chunks, ignore_index=True)


def _learned(
    model: str, data: Training, logarithm: bool | None, *, may_try_logarithm: bool
) -> _Learned:
    """Choose and train a learner, and fit the error bars to the training rows.

    Args:
        model: As in `train`.
        data: The table.
        logarithm: As in `train`.
        may_try_logarithm: Whether the logarithm may be tried if nothing is said about it.
    """
    codes = _category_counts(data.columns)
    seed = data.splitting.seed
    x, y = data.rows("train")
    if model == "net":
        rows = (x, y.log()) if logarithm else (x, y)
        uq = LastLayerRigidity(learners.net(rows, codes, seed), progress=False).fit(rows)
        name = "network, log target" if logarithm else "network"
        return _Learned(uq, learners.unfitted(codes, seed), name, bool(logarithm))

    width = learners.encoded_width(codes)
    if model == "linear" and width > learners.WIDEST:
        raise ValueError(
            f"--model linear accepts up to {learners.WIDEST:,} encoded columns, got {width:,}. Use "
            "--model tree, or --drop columns."
        )
    scales = [bool(logarithm)]
    if logarithm is None and may_try_logarithm and _is_positive_and_skewed(y[:, 0]):
        scales = [False, True]
    tried = learners.trials((x, y), codes, data.folds, seed, kinds=_KINDS[model], logarithms=scales)
    chosen = next(trial for trial in tried if trial.kind != "mean")
    rows = (x, y.log()) if chosen.logarithm else (x, y)
    tree_settings = [trial.settings for trial in tried if trial.kind == "tree"]
    settings = tree_settings[0] if tree_settings else {**learners.CANDIDATES[1]}
    trees = learners.unfitted(codes, seed, **settings)
    description = chosen.name
    if chosen.kind == "tree":
        trees, module = learners.boosted(rows, codes, seed, chosen.settings)
        description = f"{trees.max_iter} {chosen.name}"
    else:
        module = learners.linear(rows, codes)
    uq = LastLayerRigidity(module, progress=False).fit(rows)
    leaderboard = sorted(tried, key=lambda trial: (trial != chosen, trial.error))
    return _Learned(uq, trees, description, chosen.logarithm, leaderboard)


def _is_positive_and_skewed(y: Tensor) -> bool:
    """Whether the logarithm of a target is worth a trial."""
    if not bool((y > 0).all()):
        return False
    return _skewness(y) > _SKEWED and abs(_skewness(y.log())) < _skewness(y)


def _skewness(values: Tensor) -> float:
    """Third moment about the mean, in standard deviations."""
    deviation = values - values.mean()
    spread = deviation.square().mean().sqrt()
    return float((deviation / spread).pow(3).mean())


def _calibrated(learned: _Learned, data: Training, support: Bounds | None) -> CalibrationReport:
    """Calibrate the error bars; rows for guaranteed intervals fit nothing."""
    if support is not None and learned.logarithm:
        # An exponential is above zero in any case.
        low, high = support
        low = math.log(low) if low is not None and low > 0 else None
        high = math.log(high) if high is not None else None
        support = None if low is None and high is None else (low, high)
    # The rows that calibrate have chosen nothing of the model: it was not stopped by them.
    learned.uq.calibrate(
        learned.rows(data, "calibration"), method=Full(support=support), early_stopped=False
    )
    if data.splitting.conformal:
        learned.uq.conformalize(learned.rows(data, "conformal"))
    report = learned.uq.calibration_report
    assert report is not None
    return report


def _target(series: pandas.Series, table: Table, name: str) -> tuple[Tensor, str, list[str]]:
    """Numbers of the target, (N,), its unit and remarks; refused where they teach nothing."""
    column = Column.of(name, series, table.decimal)
    values, unread = replace(column, kind="number").values(series, table.decimal)
    y = torch.tensor(values[:, 0])
    finite = y[y.isfinite()]
    target = f"the target {name!r} of {table.path}"
    if column.kind != "number":
        example = (unread if len(unread) else series.dropna()).iloc[0]
        raise ValueError(
            f"Expected numbers up to 1e100 in {target}, got {example!r}. Choose another column."
        )
    if len(finite) < LEAST:
        raise ValueError(
            f"Expected at least {LEAST} rows with a number in {target}, got {len(finite)}. Add "
            "rows."
        )
    if float(finite.max() - finite.min()) < 1e-100:
        raise ValueError(f"Expected {target} to vary, got {finite[0]:g} in every row.")
    return y, column.unit, column.remarks(unread)


def _groups(
    x: Tensor, frame: pandas.DataFrame, table: Table, splitting: Splitting
) -> tuple[Tensor, Tensor]:
    """A number of each row, (N,), and whether it is known, (N,).

    Rows of one number stay together: those of one group, of one time (the numbers are then in the
    order of time), or with equal inputs.
    """
    if splitting.time:
        values = torch.tensor(times(splitting.time, frame[splitting.time], table.decimal))
        numbers = torch.unique(values.nan_to_num(nan=-1.7e308), return_inverse=True)[1]
        return numbers, ~values.isnan()
    if splitting.group:
        codes, _ = frame[splitting.group].factorize()
        numbers = torch.tensor(codes)
        # A row without a group is a group of its own.
        is_lacking = numbers < 0
        numbers[is_lacking] = len(codes) + torch.arange(int(is_lacking.sum()))
    else:
        comparable = x.nan_to_num(nan=-1.7e308)  # NaN would not equal itself
        numbers = torch.unique(comparable, dim=0, return_inverse=True)[1]
    return numbers, torch.ones(len(x), dtype=torch.bool)


def _parts(group: Tensor, y: Tensor, is_known: Tensor, splitting: Splitting) -> Any:
    """The part of each row; rows of one group stay together.

    Groups come in a random order, or the newest first. The first groups test, the next are for
    guaranteed intervals, the next calibrate, all others train. A group that would make a part much
    too large is passed over, unless groups are in the order of time.

    Args:
        group: A number of each row, (N,).
        y: Targets, (N,), NaN where missing.
        is_known: Whether the group, or the time, of a row is known, (N,).
        splitting: How the rows are divided.

    Returns:
        An array (N,) of `PARTS`.

    Raises:
        ValueError: There are too few rows, or too few groups for the parts.
    """
    import numpy

    is_labelled = y.isfinite()
    is_used = is_labelled & is_known
    row_count = int(is_used.sum())
    if row_count < LEAST:
        raise ValueError(
            f"Expected at least {LEAST} rows with a target and a time in {splitting.time!r}, got "
            f"{row_count}: {int(is_labelled.sum()) - row_count:,} rows with a target have no time. "
            "Name another column, or add times."
        )
    number = torch.unique(group[is_used], return_inverse=True)[1]
    group_count = int(number.max()) + 1
    if splitting.time:
        number = group_count - 1 - number  # the newest first
    else:
        generator = torch.Generator().manual_seed(splitting.seed)
        number = torch.randperm(group_count, generator=generator)[number]

    rows_in_group = number.bincount().tolist()
    part_of_group = ["train"] * group_count
    sizes = _part_sizes(row_count, splitting)
    for part, size in sizes.items():
        most = math.inf if splitting.time else _FACTOR * size
        filled = 0
        for k, rows in enumerate(rows_in_group):
            if filled >= size:
                break
            if part_of_group[k] == "train" and filled + rows <= most:
                part_of_group[k] = part
                filled += rows
        if not filled and "train" in part_of_group:  # all groups are large
            free = [k for k in range(group_count) if part_of_group[k] == "train"]
            part_of_group[min(free, key=rows_in_group.__getitem__)] = part

    parts = numpy.full(len(y), "unlabelled", dtype=object)
    parts[(is_labelled & ~is_known).numpy()] = "undated"
    parts[is_used.numpy()] = numpy.array(part_of_group, dtype=object)[number.numpy()]
    if not {"train", *sizes} <= set(part_of_group):
        raise ValueError(_undivided(group[is_used], splitting))
    return parts.astype(str)


def _part_sizes(row_count: int, splitting: Splitting) -> dict[str, int]:
    """How many of the labelled rows each part but `train` should have, in the order of filling."""
    part_size = min(MOST, round(SHARE * row_count))
    sizes = {
        "test": part_size,
        "conformal": min(MOST, round(splitting.conformal * row_count)),
        "calibration": part_size,
    }
    return {part: size for part, size in sizes.items() if size}


def _uneven_parts(part: Any, splitting: Splitting) -> list[str]:
    """A note on each part that is much smaller or larger than it should be."""
    row_count = int(((part != "unlabelled") & (part != "undated")).sum())
    if splitting.group:
        shared = "one group"
    else:
        shared = "one time" if splitting.time else "equal inputs"
    notes = []
    for name, size in _part_sizes(row_count, splitting).items():
        count = int((part == name).sum())
        if not size / _FACTOR <= count <= size * _FACTOR:
            notes.append(
                f"There are {count:,} {name} rows instead of about {size:,}, because rows with "
                f"{shared} stay together"
            )
    return notes


def _undivided(group: Tensor, splitting: Splitting) -> str:
    """The message that the rows cannot be divided; `group` has a number of each labelled row."""
    counts = torch.unique(group, return_counts=True)[1]
    share = float(counts.max()) / len(group)
    if splitting.group:
        option = f"--group {splitting.group}"
        largest = "one group"
        groups = "groups"
        cure = "Name a column with more groups, or leave --group out."
    elif splitting.time:
        option = f"--time-split {splitting.time}"
        largest = "one time"
        groups = "different times"
        cure = "Name a column with finer times."
    else:
        return "Expected more rows with different inputs: too many rows are equal."
    if share > 0.5 and len(counts) > 3:
        reason = f"{option}: {largest} has {100 * share:.0f} % of the rows, too many"
    else:
        reason = f"{option} has {len(counts)} {groups}, too few"
    return f"{reason} to train, calibrate and test on different ones. {cure}"


def _about_logarithm(remark: str, target: str) -> str:
    """A warning of the calibration, whose figures are those of the logarithm that was learnt."""
    if remark.startswith("The "):
        remark = f"the {remark.removeprefix('The ')}"
    # In the unit of the target the bars do differ from row to row, so that this advice is wrong.
    remark = remark.replace(" Use them only to flag inputs far from the training data.", "")
    text = f"On the logarithmic scale that the model learnt: {remark}"
    if "one constant bar" in remark:
        text += f" In the unit of {target}, one constant bar is proportional to the prediction."
    return text


def _judgements(model: TableModel, data: Training, kind: str, remarks: Sequence[str]) -> Judgements:
    """The error bars on the test rows, beside the constant bar of the calibration rows.

    Args:
        model: The calibrated model.
        data: The table.
        kind: Which model was asked for.
        remarks: Warnings of the training.
    """
    x, y = data.rows("test")
    calibration_inputs, calibration_targets = data.rows("calibration")
    calibrated = model.predict(calibration_inputs)
    constant_bar = metrics.rmse(calibrated.mean, calibration_targets)
    frame = data.frame[data.part == "test"]
    # Identifiers first; the target has a column of its own.
    others = [name for name in frame if name not in (*model.identifiers, model.target)]
    shown = [name for name in (*model.identifiers, *others) if name in frame][:_INPUTS_SHOWN]
    return report.judge(
        model.predict(x),
        y,
        names=[_labelled(model.target, model.unit)],
        inputs={name: frame[name].astype(str).tolist() for name in shown},
        row_numbers=[row + 1 for row in frame.index],
        # The calibration of a logarithm is in other units than the page.
        calibration=None if model.logarithm else model.uq.calibration_report,
        constant=[constant_bar] if constant_bar > 0 else None,
        reference=calibrated.std,
        cautions=remarks if model.logarithm else (),
        level=model.level,
        advice=partial(_advice, kind),
    )


def _advice(kind: str, fault: str, remedy: str) -> str:
    """What the command has against a fault, in place of the library's `remedy`.

    The distribution and the noise are the best that it has already.

    Args:
        kind: The model, as in `train`.
        fault: What is wrong with the error bars.
        remedy: What helps in Python.
    """
    if fault == "centre":
        return "Use the column `centre` of the predictions instead of `mean`."
    other_kind = "tree" if kind == "net" else "net"
    return f"--model {other_kind}, other inputs or more rows may help."


def _scores(judged: TargetScores) -> Scores:
    """Scores of the error bars on the test rows, and of one constant bar."""
    scores = {"rigidities": _shown_metrics(judged.bars)}
    if judged.constant:  # an exact model leaves no constant bar
        scores["constant"] = _shown_metrics(judged.constant)
    return scores


def _shown_metrics(page_metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of the page that the console and the summary show."""
    return {
        "rmse": page_metrics["rmse"],
        "mae": page_metrics["mae"],
        "r2": page_metrics["r2"],
        "nll": page_metrics["nll"],
        "crps": page_metrics["crps"],
        "coverage": page_metrics["coverage"],
        "width": page_metrics["interval_width"],
        "interval_score": page_metrics["interval_score"],
    }


def _scores_of_intervals(low: Tensor, high: Tensor, y: Tensor, level: float) -> dict[str, float]:
    """Coverage, width and interval score of intervals; all tensors are (N,)."""
    outside = (low - y).clamp(min=0) + (y - high).clamp(min=0)
    penalty = 2 / (1 - level)
    return {
        "coverage": float((outside == 0).double().mean()),
        "width": float((high - low).mean()),
        "interval_score": float((high - low + penalty * outside).mean()),
    }


def _interval_scores(
    model: TableModel, data: Training, predictions: pandas.DataFrame
) -> dict[str, float]:
    """Scores of the intervals in the predictions, on the test rows."""
    tested = predictions[data.part == "test"]
    low = torch.tensor(tested["low"].to_numpy())
    high = torch.tensor(tested["high"].to_numpy())
    return _scores_of_intervals(low, high, data.rows("test")[1][:, 0], model.level)


def _quantile_scores(
    learned: _Learned, data: Training, level: float, support: Bounds | None
) -> dict[str, float]:
    """Scores of quantile regression on the test rows, within the support."""
    x, y = data.rows("test")
    ends = learners.quantiles(learned.trees, learned.rows(data, "train"), x, level)
    if learned.logarithm:
        ends = [end.exp() for end in ends]
    if support is not None:
        ends = [end.clamp(*support) for end in ends]
    low, high = ends
    return _scores_of_intervals(low[:, 0], high[:, 0], y[:, 0], level)


def _importances(model: TableModel, data: Training) -> list[dict[str, Any]]:
    """By how much the test rows are predicted worse with one input shuffled, the worst first.

    All columns that are made of one input are shuffled together, several times. Of many inputs each
    is shuffled less often.
    """
    x, y = data.rows("test")
    generator = torch.Generator().manual_seed(data.splitting.seed)
    if len(x) > _ROWS_SHUFFLED:  # a random choice, since the file may be sorted
        chosen = torch.randperm(len(x), generator=generator)[:_ROWS_SHUFFLED]
        x = x[chosen]
        y = y[chosen]
    variance = float((y - y.mean()).square().mean())

    def mean_square(inputs: Tensor) -> float:
        with torch.no_grad():
            output = model.uq.model(inputs)
        predicted = output.exp() if model.logarithm else output
        return float((y - predicted).square().mean())

    unshuffled = mean_square(x)
    repeats = max(1, min(10, 200 // len(model.columns)))
    found = []
    first = 0
    for column in model.columns:
        last = first + len(column.widths)
        shuffled_errors = []
        for _ in range(repeats):
            shuffled = x.clone()
            order = torch.randperm(len(x), generator=generator)
            shuffled[:, first:last] = x[order, first:last]
            shuffled_errors.append(mean_square(shuffled))
        first = last
        mean_error = sum(shuffled_errors) / repeats
        lost = (mean_error - unshuffled) / variance if variance > 0 else math.nan
        rise = mean_error**0.5 - unshuffled**0.5
        found.append({"column": column.name, "r2_lost": lost, "rmse_rise": rise})
    found.sort(key=lambda importance: -importance["rmse_rise"])
    return found


def _importance_table(importances: Sequence[Mapping[str, Any]], data: Training) -> PlainTable:
    """The inputs that matter most."""
    shown = importances[:MOST_IMPORTANCES]
    lines = []
    for importance in shown:
        lost = f"{importance['r2_lost']:.3f}"
        lines.append([importance["column"], lost, number(importance["rmse_rise"])])
    rows = f"{data.sizes['test']:,} test rows"
    if data.sizes["test"] > _ROWS_SHUFFLED:
        rows = f"{_ROWS_SHUFFLED:,} of the {rows}, drawn at random,"
    else:
        rows = f"the {rows}"
    about = (
        f"How much worse the predictions of {rows} become when one column is "
        "shuffled. Columns with the same information can replace each other, so that each of them "
        "may seem to matter little."
    )
    if len(shown) < len(importances):
        about += f" The table shows the {len(shown)} most important of {len(importances)} inputs."
    header = ["Column", "R² lost", _labelled("RMSE rises by", data.unit)]
    return PlainTable("Which columns matter", about, header, lines)


def _leaderboard(trials: Sequence[learners.Trial], data: Training, model: str) -> list[PlainTable]:
    """The learners that were tried, as a table; none where nothing was compared.

    Args:
        trials: The learners, the chosen one first.
        data: The table.
        model: As in `train`.
    """
    if not trials:
        return []
    lines = []
    for place, trial in enumerate(trials):
        name = f"{trial.name} (chosen)" if place == 0 else trial.name
        lines.append(
            [
                name,
                number(trial.rmse, 4),
                number(trial.mae, 4),
                f"{trial.r2:.3f}",
                f"{trial.seconds:.1f}",
            ]
        )
    about = _how_compared(data.folds, data.sizes["train"])
    if data.splitting.group:
        about += f", with whole groups of {data.splitting.group} left out"
    if data.splitting.time:
        about += ", always tested on later rows than those used for training"
    about += (
        ". The learner with the lowest RMSE × MAE is chosen, so that both large and typical errors "
        "count."
    )
    tried_kinds = {trial.kind for trial in trials}
    if not tried_kinds.issuperset(_KINDS[model]):
        width = learners.encoded_width(_category_counts(data.columns))
        about += (
            f" No linear model was tried: the inputs have {width:,} encoded columns, and it "
            f"accepts up to {learners.WIDEST:,}."
        )
    if any(trial.kind == "mean" and trial.error < trials[0].error for trial in trials):
        about += " No learner beats the mean alone: the inputs say little about the target."
    unit = data.unit
    header = ["Learner", _labelled("RMSE", unit), _labelled("MAE", unit), "R²", "seconds"]
    return [PlainTable("Learners tried", about, header, lines)]


def _how_compared(folds: learners.Folds, row_count: int) -> str:
    """By which of the training rows learners were compared, in words without a full stop."""
    left_out_count = sum(len(left_out) for _, left_out in folds)
    if left_out_count == row_count:
        return f"Cross-validation on the {row_count:,} training rows"
    if len(folds) > 1:
        return (
            f"Cross-validation on the {row_count:,} training rows, of which {left_out_count:,} "
            f"were left out in {len(folds)} folds"
        )
    training, left_out = folds[0]
    return (
        f"Comparison within the {row_count:,} training rows: each learner was trained on "
        f"{len(training):,} of them and tested on {len(left_out):,} others"
    )


def _labelled(name: str, unit: str) -> str:
    """A name with the unit in brackets, if there is one."""
    return f"{name} ({unit})" if unit else name


def _with_unit(text: str, unit: str) -> str:
    """A number with its unit, as people write it."""
    if not unit:
        return text
    if unit in CURRENCIES:
        return f"{unit}{text}"
    return f"{text} {unit}"


def _scoreboard(scores: Scores, level: float, data: Training) -> str:
    """The scores as a text, and how far chance may move the coverage."""
    rows = data.sizes["test"]
    labels = {
        "rmse": _labelled("RMSE", data.unit),
        "mae": _labelled("MAE", data.unit),
        "r2": "R²",
        "nll": "NLL",
        "crps": _labelled("CRPS", data.unit),
        "coverage": "coverage",
        "width": _labelled("width", data.unit),
        "interval_score": _labelled("interval score", data.unit),
    }
    lines = []
    for key, label in labels.items():
        line = [label]
        for kind in scores.values():
            value = kind.get(key)
            if value is not None and key in ("r2", "coverage"):
                line.append(f"{value:.3f}")
            else:
                line.append(number(value, 4))
        lines.append(line)
    chance = 2 * (level * (1 - level) / rows) ** 0.5  # two standard deviations
    table = PlainTable(
        f"Scores on the {rows:,} test rows, which the model was not trained or calibrated on",
        f"The level of the intervals is {level:.4g}, so coverage should be near {level:.4g}; "
        f"chance moves it by ± {chance:.2g}. R² should be near 1, and all other scores low.",
        ["", *scores],
        lines,
    )
    notes = [
        table.text(),
        "constant: one Gaussian bar for all rows, the RMS error of the calibration rows.",
        "quantile: boosted trees that were trained to predict the two ends of the intervals.",
    ]
    if "conformal" in scores:
        notes.append(
            f"conformal: the intervals guaranteed for {_guaranteed_rows(data)}. They are `low` and "
            "`high` in the predictions."
        )
    return "\n".join(notes) + "\n"


def _hint_of_leak(importances: Sequence[Mapping[str, Any]], target: str) -> Iterator[str]:
    """A word on an input that matters far more than all others; none where there is no such."""
    if len(importances) < 2:
        return
    first, second = sorted(importances, key=lambda importance: -importance["r2_lost"])[:2]
    if first["r2_lost"] > 1 and first["r2_lost"] > _SUSPICIOUS * second["r2_lost"]:
        name = first["column"]
        yield (
            f"{name} matters more than {_SUSPICIOUS} times as much as any other column. If it is "
            f"known only after {target}, it gives {target} away, and no score here means anything: "
            f"--drop {name!r}."
        )


def _guaranteed_rows(data: Training) -> str:
    """The new rows that conformal intervals are guaranteed for, in words."""
    count = f"{data.sizes['conformal']:,} conformal rows"
    if data.splitting.group:
        groups = len(torch.unique(data.group[torch.tensor(data.part == "conformal")]))
        return f"new rows of the {groups:,} groups of the {count} alone"
    if data.splitting.time:
        return f"new rows of the same times as the {count} alone"
    return f"new rows that are drawn like the {count}"


def _hints(
    data: Training,
    predictions: pandas.DataFrame,
    target: str,
    support: Bounds | None,
    learned: _Learned,
) -> list[str]:
    """What the user may want to try or to know, in sentences."""
    hints = []
    if learned.logarithm:
        typical = float(predictions["mean"].median())
        hints.append(
            f"The model learnt the logarithm of {target}. In the predictions, `mean` is the "
            "exponential of the predicted logarithm: a typical value, close to the median (over "
            f"all rows, its median is {_with_unit(number(typical), data.unit)}). `centre` is the "
            "mean, and `std` is half the distance from one bar below the prediction to one bar "
            "above it. Pass --no-log to learn the values themselves."
        )
    if data.splitting.conformal and (data.splitting.group or data.splitting.time):
        others = "other groups" if data.splitting.group else "later rows"
        hints.append(
            f"The intervals are guaranteed for {_guaranteed_rows(data)}. For {others} they are "
            "not: they cover less where errors differ there."
        )
    below_zero = int((predictions["low"] < 0).sum())
    least = float(data.labelled.min())
    if below_zero and least >= 0 and support is None:
        kind = "positive" if least > 0 else "at or above zero"
        cure = "`--support 0,` or `--log`" if least > 0 else "`--support 0,`"
        hints.append(
            f"All {len(data.labelled):,} values of {target} are {kind}, but {below_zero:,} of the "
            f"{len(predictions):,} intervals reach below zero. Try {cure}."
        )
    return hints


def _title(model: TableModel, data: Training) -> str:
    """The heading of the page."""
    return f"{model.target} of {data.table.path.name}: can the error bars be trusted?"


def _write(
    folder: Path,
    model: TableModel,
    data: Training,
    predictions: pandas.DataFrame,
    judgements: Judgements,
    tables: Sequence[PlainTable],
) -> None:
    """Write the model, all predictions, and the report on the test rows."""
    model.save(folder / "model.safetensors")
    predictions = predictions.assign(split=data.part, target=data.y[:, 0])
    _write_csv(predictions, folder / "predictions.csv", header=True)
    report.save(folder / "report.html", report.page_of(judgements, _title(model, data), tables))


def _without_nan(value: Any) -> Any:
    """Nested dicts and lists with None in place of NaN and infinities, which JSON does not know."""
    if isinstance(value, Mapping):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _write_csv(frame: pandas.DataFrame, file: Path | TextIO, *, header: bool) -> None:
    """Write predictions with ten digits, alike on all systems."""
    frame.to_csv(file, header=header, index=False, float_format="%.10g", lineterminator="\n")


@contextmanager
def _moved(folder: Path) -> Iterator[Path]:
    """A place for files that are moved into a folder at the end, unless something fails."""
    parent = folder if folder.is_dir() else folder.parent
    if not parent.is_dir():
        raise FileNotFoundError(f"There is no folder {parent} for {folder.name}. Create it.")
    with TemporaryDirectory(prefix=".rigidities-", dir=parent) as temporary:
        yield Path(temporary)
        folder.mkdir(exist_ok=True)
        for file in Path(temporary).iterdir():
            os.replace(file, folder / file.name)


def _require(*packages: str) -> None:
    """Refuse where one of these packages is not installed, with the extra that brings it."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ModuleNotFoundError(f"Tables need {' and '.join(missing)}: {extra('tabular')}.")
