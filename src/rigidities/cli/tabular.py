"""`rigidities tabular`: from a table to a model with error bars, its report and predictions."""

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
from typing import TYPE_CHECKING, Any

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
Scores = dict[str, dict[str, float]]
PARTS = ("train", "calibration", "test", "unlabelled")
RESERVED = ("row", "mean", "std", "low", "high", "centre", "split", "target")
"""Columns of the predictions."""
WRITTEN: dict[str, Any] = {"index": False, "float_format": "%.10g", "lineterminator": "\n"}
LEAST, SHARE, MOST, CHUNK = 30, 0.15, 10_000, 20_000
"""Rows with a target at least; share of them that calibrates, as many test, how many at most."""


@dataclass(frozen=True)
class TableModel:
    """A model of a table's column, with error bars: one file, without code, holds all of it."""

    uq: LastLayerRigidity
    columns: Sequence[Column]
    target: str
    level: float
    identifiers: Sequence[str] = ()
    decimal: str | None = None  # of the training table; a Parquet file has none

    def save(self, path: Path) -> None:
        """Write the file."""
        fit, model = self.uq.get_extra_state(), self.uq.model.state_dict()
        table = {
            "target": self.target,
            "level": self.level,
            "identifiers": list(self.identifiers),
            "decimal": self.decimal,
            "columns": [asdict(column) for column in self.columns],
        }
        header = {"kind": "table model", "tabular": table, "fit": json.loads(fit["header"])}
        Snapshot(prefixed("model", model) | prefixed("fit", fit["tensors"]), header).write(path)

    @classmethod
    def load(cls, path: Path) -> TableModel:
        """Read it again; anything else is refused with a ValueError."""
        snapshot = Snapshot.read(path, holds="table model")
        table = snapshot.header["tabular"]
        columns = [Column(**column) for column in table["columns"]]
        widths = [width for column in columns for width in column.widths]
        model = learners.restored(unprefixed("model", snapshot.tensors), widths)
        uq = LastLayerRigidity(model)
        fit = {
            "tensors": unprefixed("fit", snapshot.tensors),
            "header": json.dumps(snapshot.header["fit"]),
        }
        with snapshot.opened():
            uq.set_extra_state(fit)
        return cls(
            uq,
            columns,
            target=table["target"],
            level=table["level"],
            identifiers=table["identifiers"],
            decimal=table["decimal"],
        )

    def predictions(
        self, frame: pandas.DataFrame, x: Tensor, level: float, before: int = 0
    ) -> pandas.DataFrame:
        """A table of predictions at x, for rows after those before."""
        import pandas

        found = self.uq.predict(x, progress=False)
        values = (found.mean, found.std, *found.interval(level), found.centre)
        own: dict[str, Any] = {"row": range(before + 1, before + 1 + len(frame))}
        own |= {name: frame.get(name) for name in self.identifiers}
        own |= {n: t[:, 0].numpy() for n, t in zip(RESERVED[1:6], values, strict=True)}
        return pandas.DataFrame(own, frame.index)


@dataclass(frozen=True)
class Training:
    """A table to learn from: inputs x (N, P), targets y (N, 1), of each row one of `PARTS`."""

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
        """From a file; columns that are `left` are no inputs, those to `keep` are."""
        import pandas

        table, named = Table.open(path), Counter((target, *left, *keep))
        table.require(named)
        if named.total() > len(named):
            what = "Expected each column once among --target, --id, --drop and --keep"
            raise ValueError(f"{what}, got {max(named, key=named.__getitem__)!r} twice.")
        chunks = [*table.chunks(CHUNK)] or [pandas.DataFrame(columns=table.names, dtype=object)]
        frame = pandas.concat(chunks, ignore_index=True)
        y, notes = _target(frame[target], table, target)
        others = frame.drop(columns=[target, *left])
        columns, said = inputs(others, y.numpy(), table.decimal, keep)
        if not columns:
            raise ValueError(f"Expected inputs beside {target!r} in {path}. {'; '.join(said)}.")
        x, _ = matrix(columns, frame, table.decimal)
        notes = [*table.notes, *notes, *said]
        return cls(table, frame, columns, notes, x, y[:, None], _parts(x, y, seed))

    def rows(self, part: str) -> learners.Rows:
        """Inputs and targets of a part."""
        own = torch.tensor(self.part == part)
        return self.x[own], self.y[own]

    @property
    def sizes(self) -> dict[str, int]:
        """How many rows are of each part."""
        return {part: int((self.part == part).sum()) for part in PARTS}

    def opening(self, target: str) -> Iterator[str]:
        """What was read, a line each."""
        kinds = Counter(column.kind for column in self.columns)
        yield f"{self.table.path}: {len(self.x):,} rows, {len(self.table.names)} columns"
        listed = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
        yield f"  Target: {target}; inputs: {listed}"
        yield from (f"  {note}" for note in self.notes)
        if gaps := int(self.x.isnan().any(1).sum()):
            yield f"  Rows with gaps, which the model takes as they are: {gaps:,}"
        yield "  Rows: " + ", ".join(f"{n:,} {part}" for part, n in self.sizes.items() if n)
        if kinds["date"]:
            yield "  Rows are split at random: for dates to come the scores are optimistic"


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
    """Learn a column of a table and write a folder, as on the command line; the summary."""
    _require("pandas", "sklearn", "plotly", "jinja2")
    begun = time.monotonic()
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"--out {out} is a file. Name a folder to write.")
    if clash := sorted({*id} & {*RESERVED}):
        raise ValueError(f"--id {clash[0]} is a column of the predictions too. Rename or drop it.")
    with _moved(out) as made, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = Training.read(path, target, [*id, *drop], keep, seed)
        for line in data.opening(target):
            say(line)
        uq, trees, what = _learned(model, data, seed)
        # the rows that calibrate chose nothing of the model
        calibrated = uq.calibrate(data.rows("calibration"), early_stopped=False, progress=False)
        said = dict.fromkeys(str(warning.message) for warning in caught)
        said |= dict.fromkeys(calibrated.warnings)
        for line in (*said, f"Trained {what} in {time.monotonic() - begun:.0f} s"):
            say(f"  {line}")
        mark = data.table.decimal if data.table.separator else None
        learned = TableModel(uq, data.columns, target, level, id, mark)
        judged = _judged(learned, data, model)
        ends = learners.quantiles(trees, data.rows("train"), data.rows("test")[0], level)
        scores = _scores(judged.targets[0], ends)
        say(_scoreboard(scores, level, data.sizes["test"]))
        say(f"{judged.verdict}\n")
        _write(made, learned, data, judged)
        summary: dict[str, Any] = {"library": __version__, "data": str(path), "target": target}
        summary |= {"model": what, "level": level, "seed": seed, "rows": data.sizes}
        summary |= {"scores": scores, "verdict": judged.verdict.plain()}
        summary |= {"columns": [asdict(column) for column in data.columns]}
        summary |= {"notes": [*data.notes, *said], "seconds": time.monotonic() - begun}
        (made / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    say(f"Wrote {out}: predictions.csv, report.html, summary.json, model.safetensors")
    say(f"For new rows: rigidities tabular --apply {out / 'model.safetensors'} new.csv")
    return summary | {"out": str(out)}


def apply(
    model: Path, path: Path, out: Path, *, level: float | None = None, say: Say = print
) -> dict[str, Any]:
    """Predict a file of any size into another; how many rows, and by column the cells unread."""
    _require("pandas")
    own = TableModel.load(model)
    table = Table.open(path, own.decimal)
    if checked_place(out).exists() and any(out.samefile(other) for other in (path, model)):
        raise ValueError(f"--out {out} is a file that is read. Choose another place.")
    kinds = {column.name: column.kind for column in own.columns}
    table.require(kinds)
    extra = [name for name in table.names if name not in {*kinds, own.target, *own.identifiers}]
    for line in (*table.notes, *([f"Not used: {', '.join(extra)}"] if extra else [])):
        say(f"  {line}")
    unread, count = Counter[str](), 0
    with _moved(out.parent) as made, (made / out.name).open("w", encoding="utf-8") as file:
        for frame in tqdm(table.chunks(CHUNK), "Predicting", leave=False, disable=None):
            x, lost = matrix(own.columns, frame, table.decimal)
            part = own.predictions(frame, x, level or own.level, count)
            part.to_csv(file, header=not count, **WRITTEN)
            unread, count = unread + lost, count + len(frame)
        if not count:
            raise ValueError(f"{path} has no rows. Expected one or more below its names.")
    for name, cells in unread.items():
        why = "unknown in training" if kinds[name] == "category" else f"without a {kinds[name]}"
        say(f"  {name}: {cells:,} cells {why}, taken as missing")
    say(f"Wrote {out}: {count:,} rows")
    return {"out": str(out), "rows": count, "unread": dict(unread)}


def _learned(model: str, data: Training, seed: int) -> tuple[LastLayerRigidity, Any, str]:
    """The fitted model, boosted trees whose settings suit the table, and what it is in words."""
    rows = data.rows("train")
    kinds = [width for column in data.columns for width in column.widths]
    if model == "net":
        uq = LastLayerRigidity(learners.net(rows, kinds, seed)).fit(rows, progress=False)
        return uq, learners.unfitted(kinds, seed), "a net"
    trees, module = learners.boosted(rows, kinds, seed)
    uq = LastLayerRigidity(module).fit(rows, progress=False)
    return uq, trees, f"{trees.max_iter} boosted trees of up to {trees.max_leaf_nodes} leaves"


def _target(series: pandas.Series, table: Table, name: str) -> tuple[Tensor, list[str]]:
    """Its numbers, (N,), and remarks; refused where nothing can be learnt from them."""
    column, what = Column.of(name, series, table.decimal), f"the target {name!r} of {table.path}"
    values, lost = replace(column, kind="number").values(series, table.decimal)
    y = torch.tensor(values[:, 0])
    known = y[y.isfinite()]
    if column.kind != "number":
        held = (lost if len(lost) else series.dropna()).iloc[0]
        raise ValueError(f"Expected numbers up to 1e100 in {what}, got {held!r}. Name another.")
    if len(known) < LEAST:
        raise ValueError(f"Expected {LEAST} rows or more with {what}, got {len(known)}. Add rows.")
    if float(known.max() - known.min()) < 1e-100:
        raise ValueError(f"Expected {what} to vary, got {known[0]:g} in every row.")
    return y, column.remarks(lost)


def _parts(x: Tensor, y: Tensor, seed: int) -> Any:
    """Of each row its part, at random; rows with equal inputs stay together."""
    import numpy

    labelled = y.isfinite()
    _, group = torch.unique(x[labelled].nan_to_num(nan=-1.7e308), dim=0, return_inverse=True)
    shuffled = torch.randperm(int(group.max()) + 1, generator=torch.Generator().manual_seed(seed))
    sizes = (group := shuffled[group]).bincount()
    begin = (sizes.cumsum(0) - sizes)[group]  # rows of the groups before
    size = min(MOST, round(SHARE * len(group)))
    place = torch.full(y.shape, PARTS.index("unlabelled"))
    place[labelled] = torch.where(begin < size, 2, (begin < 2 * size).long())
    if not place.bincount()[:3].all():
        raise ValueError("Expected rows that differ in their inputs, got too many equal ones.")
    return numpy.take(PARTS, place.numpy())


def _judged(model: TableModel, data: Training, kind: str) -> Judgements:
    """The error bars on the test rows, beside the constant bar of the calibration rows."""
    (x, y), (held, target) = data.rows("test"), data.rows("calibration")
    calibrated = model.uq.predict(held, progress=False)
    frame = data.frame[data.part == "test"]
    shown = [*model.identifiers, *frame][:12]
    spread = metrics.rmse(calibrated.mean, target)
    return report.judge(
        model.uq.predict(x, progress=False),
        y,
        names=[model.target],
        inputs={name: frame[name].astype(str).tolist() for name in shown},
        row_numbers=[row + 1 for row in frame.index],
        calibration=model.uq.calibration_report,
        constant=[spread] if spread > 0 else None,
        reference=calibrated.std,
        level=model.level,
        advice=partial(_helps, kind),
    )


def _helps(kind: str, fault: str, remedy: str) -> str:
    """What the command has against a fault; the distribution and the noise are the best that it
    has."""
    other = "net" if kind == "tree" else "tree"
    if fault == "centre":
        return "Take the column `centre` of the predictions instead of `mean`."
    return f"--model {other}, other inputs or more rows may help."


def _scores(judged: TargetScores, ends: Sequence[Tensor]) -> Scores:
    """Of the error bars, of one constant bar, and of the ends that quantile regression gives."""
    low, high = ends
    y = judged.rows.target[:, None]
    outside = (low - y).clamp(min=0) + (y - high).clamp(min=0)
    quantile = {
        "coverage": float((outside == 0).double().mean()),
        "width": float((high - low).mean()),
        "interval_score": float((high - low + 2 / (1 - judged.level) * outside).mean()),
    }
    # an exact model leaves no constant bar
    pairs = {"rigidities": judged.bars, "constant": judged.constant}
    return {name: _told(found) for name, found in pairs.items() if found} | {"quantile": quantile}


def _told(found: Mapping[str, float]) -> dict[str, float]:
    """The metrics of the page that the console and the summary tell."""
    told = {name: found[name] for name in ("rmse", "nll", "crps", "coverage")}
    return told | {"width": found["interval_width"], "interval_score": found["interval_score"]}


def _scoreboard(scores: Scores, level: float, rows: int) -> str:
    """The scores, and how far chance may move the coverage."""
    import pandas

    table = pandas.DataFrame(scores).rename(index=lambda key: key.replace("_", " "))
    shown = table.to_string(float_format="{:#.4g}".format, na_rep="-", col_space=14)
    chance = 2 * (level * (1 - level) / rows) ** 0.5
    return (
        f"\n{rows:,} test rows, used for nothing else, and their {level:.4g} intervals:\n{shown}\n"
        f"Less is better; coverage should be {level:.4g}, and chance moves it by {chance:.2g}.\n"
        "constant: one Gaussian bar for all rows, the RMS error of the calibration rows.\n"
    )


def _write(folder: Path, model: TableModel, data: Training, judged: Judgements) -> None:
    """The model, all predictions, and the report on the test rows."""
    model.save(folder / "model.safetensors")
    table = model.predictions(data.frame, data.x, model.level)
    table = table.assign(split=data.part, target=data.y[:, 0])
    table.to_csv(folder / "predictions.csv", **WRITTEN)
    title = f"{model.target} of {data.table.path.name}: can the error bars be trusted?"
    report.save(folder / "report.html", report.page_of(judged, title))


@contextmanager
def _moved(folder: Path) -> Iterator[Path]:
    """A place for files that are moved into a folder at the end, unless something fails."""
    near = folder if folder.is_dir() else folder.parent
    if not near.is_dir():
        raise FileNotFoundError(f"There is no folder {near} for {folder.name}. Make it.")
    with TemporaryDirectory(prefix=".rigidities-", dir=near) as made:
        yield Path(made)
        folder.mkdir(exist_ok=True)
        for file in Path(made).iterdir():
            os.replace(file, folder / file.name)


def _require(*names: str) -> None:
    if missing := [name for name in names if find_spec(name) is None]:
        raise ModuleNotFoundError(f"Tables need {' and '.join(missing)}: {extra('tabular')}.")
