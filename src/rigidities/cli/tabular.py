"""`rigidities tabular`: from a table to a model with error bars, its report and predictions.

`train` reads a table (`tables`), makes a matrix of it (`columns`), splits its rows into those that
train, calibrate and test, trains a model (`learners`), gives it error bars, judges these on the
test rows and writes a folder. `apply` predicts new tables by the file of a model alone, without
scikit-learn.
"""

from __future__ import annotations

import json
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
from ..data.storage import Snapshot, prefixed, unprefixed
from ..last_layer.rigidity import LastLayerRigidity
from ..notices import extra
from ..report.document import checked_place
from ..report.judgement import Judgements
from ..report.scores import TargetScores
from . import learners
from .columns import Column, inputs, matrix
from .tables import Table

if TYPE_CHECKING:
    import pandas

Say = Callable[[str], None]
"""Prints one text."""

Scores = dict[str, dict[str, float]]
"""Metrics by their name, of each kind of error bars by its name."""

PARTS = ("train", "calibration", "test", "unlabelled")
"""What a row is used for."""

RESERVED = ("row", "mean", "std", "low", "high", "centre", "split", "target")
"""Columns of the predictions."""

LEAST = 30
"""Rows with a target, at least."""

SHARE = 0.15
"""Share of the rows with a target that calibrates; as many test."""

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
    """

    uq: LastLayerRigidity
    columns: Sequence[Column]
    target: str
    level: float
    identifiers: Sequence[str] = ()
    decimal: str | None = None

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
        }
        header = {"kind": "table model", "tabular": table, "fit": json.loads(fit["header"])}
        Snapshot(model_tensors | fit_tensors, header).write(path)

    @classmethod
    def load(cls, path: Path) -> TableModel:
        """Read the file again.

        Raises:
            ValueError: The file is damaged, or of another kind.
        """
        snapshot = Snapshot.read(path, holds="table model")
        table = snapshot.header["tabular"]
        columns = [Column(**column) for column in table["columns"]]
        model_state = unprefixed("model", snapshot.tensors)
        uq = LastLayerRigidity(learners.restored(model_state, _category_counts(columns)))
        fit = {
            "tensors": unprefixed("fit", snapshot.tensors),
            "header": json.dumps(snapshot.header["fit"]),
        }
        with snapshot.opened():
            uq.set_extra_state(fit)
        return cls(
            uq=uq,
            columns=columns,
            target=table["target"],
            level=table["level"],
            identifiers=table["identifiers"],
            decimal=table["decimal"],
        )

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

        prediction = self.uq.predict(x, progress=False)
        low, high = prediction.interval(level)
        columns: dict[str, Any] = {"row": range(before + 1, before + 1 + len(frame))}
        for name in self.identifiers:
            columns[name] = frame.get(name)
        columns["mean"] = prediction.mean[:, 0].numpy()
        columns["std"] = prediction.std[:, 0].numpy()
        columns["low"] = low[:, 0].numpy()
        columns["high"] = high[:, 0].numpy()
        columns["centre"] = prediction.centre[:, 0].numpy()
        return pandas.DataFrame(columns, frame.index)


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
        part: Of each row one of `PARTS`, an array (N,).
    """

    table: Table
    frame: pandas.DataFrame
    columns: Sequence[Column]
    notes: Sequence[str]
    x: Tensor
    y: Tensor
    part: Any

    @classmethod
    def read(
        cls, path: Path, target: str, left: Sequence[str], keep: Sequence[str], seed: int
    ) -> Training:
        """Read a file.

        Args:
            path: The file.
            target: Name of the column to learn.
            left: Columns that are no inputs.
            keep: Columns that are inputs even if they number rows or give the target away.
            seed: Of the split into parts.

        Raises:
            ValueError: Nothing can be learnt from the file.
        """
        table = Table.open(path)
        named_columns = Counter((target, *left, *keep))
        table.require(named_columns)
        name, count = named_columns.most_common(1)[0]
        if count > 1:
            raise ValueError(
                "Expected each column once among --target, --id, --drop and --keep, got "
                f"{name!r} twice."
            )
        frame = _whole_frame(table)
        y, target_notes = _target(frame[target], table, target)
        candidates = frame.drop(columns=[target, *left])
        columns, input_notes = inputs(candidates, y.numpy(), table.decimal, keep)
        if not columns:
            reasons = "; ".join(input_notes)
            raise ValueError(f"Expected inputs beside {target!r} in {path}. {reasons}.")
        x, _ = matrix(columns, frame, table.decimal)
        return cls(
            table=table,
            frame=frame,
            columns=columns,
            notes=[*table.notes, *target_notes, *input_notes],
            x=x,
            y=y[:, None],
            part=_parts(x, y, seed),
        )

    def rows(self, part: str) -> learners.Rows:
        """Inputs and targets of a part."""
        is_of_part = torch.tensor(self.part == part)
        return self.x[is_of_part], self.y[is_of_part]

    @property
    def sizes(self) -> dict[str, int]:
        """How many rows are of each part."""
        return {part: int((self.part == part).sum()) for part in PARTS}

    def opening(self, target: str) -> Iterator[str]:
        """What was read, in lines."""
        kinds = Counter(column.kind for column in self.columns)
        yield f"{self.table.path}: {len(self.x):,} rows, {len(self.table.names)} columns"
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        yield f"  Target: {target}; inputs: {listed}"
        for note in self.notes:
            yield f"  {note}"
        rows_with_gaps = int(self.x.isnan().any(1).sum())
        if rows_with_gaps:
            yield f"  Rows with gaps, which the model takes as they are: {rows_with_gaps:,}"
        yield "  Rows: " + ", ".join(f"{n:,} {part}" for part, n in self.sizes.items() if n)
        if kinds["date"]:
            yield "  Rows are split at random: for dates to come the scores are optimistic"


@dataclass(frozen=True)
class _Learned:
    """A model after its training.

    Attributes:
        uq: The fitted model, not calibrated yet.
        trees: Boosted trees with settings that suit the table, for quantile regression.
        description: What the model is, in words.
    """

    uq: LastLayerRigidity
    trees: Any
    description: str


def train(
    path: Path,
    target: str,
    out: Path,
    *,
    model: str = "tree",
    level: float = 0.9,
    seed: int = 0,
    id: Sequence[str] = (),
    drop: Sequence[str] = (),
    keep: Sequence[str] = (),
    say: Say = print,
) -> dict[str, Any]:
    """Learn a column of a table and write a folder, as on the command line.

    Args:
        path: The table.
        target: Name of the column to learn.
        out: The folder.
        model: "tree" for boosted trees, "net" for a network.
        level: Of the intervals.
        seed: Of splits and models.
        id: Columns that are no inputs, but copied to the predictions.
        drop: Columns that are no inputs.
        keep: Columns that are inputs even if they number rows or give the target away.
        say: Prints one text.

    Returns:
        What `summary.json` says, and the folder.

    Raises:
        ModuleNotFoundError: A package of the extra `tabular` is missing.
        ValueError: Nothing can be learnt from the table.
    """
    _require("pandas", "sklearn", "plotly", "jinja2")
    begun = time.monotonic()
    _require_results_can_be_written(out, id)
    with _moved(out) as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = Training.read(path, target, [*id, *drop], keep, seed)
        for line in data.opening(target):
            say(line)

        learned = _learned(model, data, seed)
        # The rows that calibrate have chosen nothing of the model: it was not stopped by them.
        calibration = learned.uq.calibrate(
            data.rows("calibration"), early_stopped=False, progress=False
        )
        messages = [str(warning.message) for warning in caught]
        remarks = list(dict.fromkeys([*messages, *calibration.warnings]))  # each once, in order
        for remark in remarks:
            say(f"  {remark}")
        say(f"  Trained {learned.description} in {time.monotonic() - begun:.0f} s")

        table_model = TableModel(
            uq=learned.uq,
            columns=data.columns,
            target=target,
            level=level,
            identifiers=id,
            decimal=data.table.decimal if data.table.separator else None,
        )
        judgements = _judgements(table_model, data, model)
        test_inputs, _ = data.rows("test")
        quantile_ends = learners.quantiles(learned.trees, data.rows("train"), test_inputs, level)
        scores = _scores(judgements.targets[0], quantile_ends)
        say(_scoreboard(scores, level, data.sizes["test"]))
        say(f"{judgements.verdict}\n")

        _write(folder, table_model, data, judgements)
        summary: dict[str, Any] = {
            "library": __version__,
            "data": str(path),
            "target": target,
            "model": learned.description,
            "level": level,
            "seed": seed,
            "rows": data.sizes,
            "scores": scores,
            "verdict": judgements.verdict.plain(),
            "columns": [asdict(column) for column in data.columns],
            "notes": [*data.notes, *remarks],
            "seconds": time.monotonic() - begun,
        }
        text = json.dumps(summary, indent=2) + "\n"
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
    if checked_place(out).exists() and any(out.samefile(source) for source in (path, model)):
        raise ValueError(f"--out {out} is a file that is read. Choose another place.")
    kinds = {column.name: column.kind for column in table_model.columns}
    table.require(kinds)

    for note in table.notes:
        say(f"  {note}")
    used_names = {*kinds, table_model.target, *table_model.identifiers}
    unused_names = [name for name in table.names if name not in used_names]
    if unused_names:
        say(f"  Not used: {', '.join(unused_names)}")

    row_count = 0
    unread_cells = Counter[str]()
    with _moved(out.parent) as folder, (folder / out.name).open("w", encoding="utf-8") as file:
        for frame in tqdm(table.chunks(CHUNK), "Predicting", leave=False, disable=None):
            x, unread_in_chunk = matrix(table_model.columns, frame, table.decimal)
            chosen_level = level or table_model.level
            predictions = table_model.predictions(frame, x, chosen_level, before=row_count)
            _write_csv(predictions, file, header=row_count == 0)
            unread_cells += unread_in_chunk
            row_count += len(frame)
        if not row_count:
            raise ValueError(f"{path} has no rows. Expected one or more below its names.")

    for name, cells in unread_cells.items():
        if kinds[name] == "category":
            reason = "unknown in training"
        else:
            reason = f"without a {kinds[name]}"
        say(f"  {name}: {cells:,} cells {reason}, taken as missing")
    say(f"Wrote {out}: {row_count:,} rows")
    return {"out": str(out), "rows": row_count, "unread": dict(unread_cells)}


def _require_results_can_be_written(out: Path, id: Sequence[str]) -> None:
    """Refuse a file in place of the folder, and identifiers named like the predictions' columns."""
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"--out {out} is a file. Name a folder to write.")
    clashes = sorted(set(id) & set(RESERVED))
    if clashes:
        raise ValueError(
            f"--id {clashes[0]} is a column of the predictions too. Rename or drop it."
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


def _learned(model: str, data: Training, seed: int) -> _Learned:
    """Train a network or boosted trees, and fit the error bars to the training rows."""
    rows = data.rows("train")
    codes = _category_counts(data.columns)
    if model == "net":
        network = learners.net(rows, codes, seed)
        trees = learners.unfitted(codes, seed)
        uq = LastLayerRigidity(network).fit(rows, progress=False)
        return _Learned(uq, trees, "a net")
    trees, module = learners.boosted(rows, codes, seed)
    uq = LastLayerRigidity(module).fit(rows, progress=False)
    description = f"{trees.max_iter} boosted trees of up to {trees.max_leaf_nodes} leaves"
    return _Learned(uq, trees, description)


def _target(series: pandas.Series, table: Table, name: str) -> tuple[Tensor, list[str]]:
    """Numbers of the target, (N,), and remarks; refused where nothing can be learnt from them."""
    column = Column.of(name, series, table.decimal)
    values, unread = replace(column, kind="number").values(series, table.decimal)
    y = torch.tensor(values[:, 0])
    finite = y[y.isfinite()]
    target = f"the target {name!r} of {table.path}"
    if column.kind != "number":
        example = (unread if len(unread) else series.dropna()).iloc[0]
        raise ValueError(
            f"Expected numbers up to 1e100 in {target}, got {example!r}. Name another."
        )
    if len(finite) < LEAST:
        raise ValueError(
            f"Expected {LEAST} rows or more with {target}, got {len(finite)}. Add rows."
        )
    if float(finite.max() - finite.min()) < 1e-100:
        raise ValueError(f"Expected {target} to vary, got {finite[0]:g} in every row.")
    return y, column.remarks(unread)


def _parts(x: Tensor, y: Tensor, seed: int) -> Any:
    """The part of each row, at random; rows with equal inputs stay together.

    Groups of rows with equal inputs come in a random order. The first groups test, the next
    calibrate, all others train.

    Args:
        x: Inputs, (N, P).
        y: Targets, (N,), NaN where missing.
        seed: Of the order.

    Returns:
        An array (N,) of `PARTS`.
    """
    import numpy

    is_labelled = y.isfinite()
    comparable = x[is_labelled].nan_to_num(nan=-1.7e308)  # NaN would not equal itself
    _, group = torch.unique(comparable, dim=0, return_inverse=True)
    generator = torch.Generator().manual_seed(seed)
    new_number = torch.randperm(int(group.max()) + 1, generator=generator)
    group = new_number[group]
    group_sizes = group.bincount()
    rows_before = (group_sizes.cumsum(0) - group_sizes)[group]  # in the groups before its own

    part_size = min(MOST, round(SHARE * len(group)))
    part_number = torch.full(y.shape, PARTS.index("unlabelled"))
    calibration_or_train = torch.where(
        rows_before < 2 * part_size, PARTS.index("calibration"), PARTS.index("train")
    )
    part_number[is_labelled] = torch.where(
        rows_before < part_size, PARTS.index("test"), calibration_or_train
    )
    if not part_number.bincount()[:3].all():
        raise ValueError("Expected rows that differ in their inputs, got too many equal ones.")
    return numpy.take(PARTS, part_number.numpy())


def _judgements(model: TableModel, data: Training, kind: str) -> Judgements:
    """The error bars on the test rows, beside the constant bar of the calibration rows."""
    x, y = data.rows("test")
    calibration_inputs, calibration_targets = data.rows("calibration")
    calibrated = model.uq.predict(calibration_inputs, progress=False)
    constant_bar = metrics.rmse(calibrated.mean, calibration_targets)
    frame = data.frame[data.part == "test"]
    shown_names = [*model.identifiers, *frame][:_INPUTS_SHOWN]
    return report.judge(
        model.uq.predict(x, progress=False),
        y,
        names=[model.target],
        inputs={name: frame[name].astype(str).tolist() for name in shown_names},
        row_numbers=[row + 1 for row in frame.index],
        calibration=model.uq.calibration_report,
        constant=[constant_bar] if constant_bar > 0 else None,
        reference=calibrated.std,
        level=model.level,
        advice=partial(_advice, kind),
    )


def _advice(kind: str, fault: str, remedy: str) -> str:
    """What the command has against a fault, in place of the library's `remedy`.

    The distribution and the noise are the best that it has already.

    Args:
        kind: The model, "tree" or "net".
        fault: What is wrong with the error bars.
        remedy: What helps in Python.
    """
    if fault == "centre":
        return "Take the column `centre` of the predictions instead of `mean`."
    other_kind = "net" if kind == "tree" else "tree"
    return f"--model {other_kind}, other inputs or more rows may help."


def _scores(judged: TargetScores, quantile_ends: Sequence[Tensor]) -> Scores:
    """Scores of the error bars, of one constant bar, and of quantile regression.

    Args:
        judged: The target on the test rows.
        quantile_ends: Lower and upper ends of quantile regression, (N, 1) each.
    """
    scores = {"rigidities": _shown_metrics(judged.bars)}
    if judged.constant:  # an exact model leaves no constant bar
        scores["constant"] = _shown_metrics(judged.constant)

    low, high = quantile_ends
    y = judged.rows.target[:, None]
    outside = (low - y).clamp(min=0) + (y - high).clamp(min=0)
    penalty = 2 / (1 - judged.level)
    scores["quantile"] = {
        "coverage": float((outside == 0).double().mean()),
        "width": float((high - low).mean()),
        "interval_score": float((high - low + penalty * outside).mean()),
    }
    return scores


def _shown_metrics(page_metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of the page that the console and the summary show."""
    return {
        "rmse": page_metrics["rmse"],
        "nll": page_metrics["nll"],
        "crps": page_metrics["crps"],
        "coverage": page_metrics["coverage"],
        "width": page_metrics["interval_width"],
        "interval_score": page_metrics["interval_score"],
    }


def _scoreboard(scores: Scores, level: float, rows: int) -> str:
    """The scores as a text, and how far chance may move the coverage."""
    import pandas

    table = pandas.DataFrame(scores).rename(index=lambda key: key.replace("_", " "))
    shown = table.to_string(float_format="{:#.4g}".format, na_rep="-", col_space=14)
    chance = 2 * (level * (1 - level) / rows) ** 0.5  # two standard deviations
    return (
        f"\n{rows:,} test rows, used for nothing else, and their {level:.4g} intervals:\n{shown}\n"
        f"Less is better; coverage should be {level:.4g}, and chance moves it by {chance:.2g}.\n"
        "constant: one Gaussian bar for all rows, the RMS error of the calibration rows.\n"
    )


def _write(folder: Path, model: TableModel, data: Training, judgements: Judgements) -> None:
    """Write the model, all predictions, and the report on the test rows."""
    model.save(folder / "model.safetensors")
    predictions = model.predictions(data.frame, data.x, model.level)
    predictions = predictions.assign(split=data.part, target=data.y[:, 0])
    _write_csv(predictions, folder / "predictions.csv", header=True)
    title = f"{model.target} of {data.table.path.name}: can the error bars be trusted?"
    report.save(folder / "report.html", report.page_of(judgements, title))


def _write_csv(frame: pandas.DataFrame, file: Path | TextIO, *, header: bool) -> None:
    """Write predictions with ten digits, alike on all systems."""
    frame.to_csv(file, header=header, index=False, float_format="%.10g", lineterminator="\n")


@contextmanager
def _moved(folder: Path) -> Iterator[Path]:
    """A place for files that are moved into a folder at the end, unless something fails."""
    parent = folder if folder.is_dir() else folder.parent
    if not parent.is_dir():
        raise FileNotFoundError(f"There is no folder {parent} for {folder.name}. Make it.")
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
