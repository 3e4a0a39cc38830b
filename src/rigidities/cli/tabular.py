"""`rigidities tabular`: from a table to a model with error bars, its report and predictions."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from .. import report
from .._version import __version__
from ..data.storage import Snapshot, prefixed, unprefixed
from ..last_layer.rigidity import LastLayerRigidity
from ..prediction.prediction import Prediction
from ..report.document import checked_place
from . import learners
from .columns import Column, codes, inputs, matrix, numbers
from .tables import Table

if TYPE_CHECKING:
    import pandas

Say = Callable[[str], None]
TRAIN, CALIBRATION, TEST, UNLABELLED = range(4)
PARTS = ("train", "calibration", "test", "unlabelled")
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

    def save(self, path: Path) -> None:
        """Write the file."""
        fit, model = self.uq.get_extra_state(), self.uq.model.state_dict()
        own = {key: getattr(self, key) for key in ("target", "level", "identifiers")}
        own["columns"] = [asdict(column) for column in self.columns]
        header = {"library": __version__, "tabular": own, "fit": json.loads(fit["header"])}
        Snapshot(prefixed("model", model) | prefixed("fit", fit["tensors"]), header).write(path)

    @classmethod
    def load(cls, path: Path) -> TableModel:
        """Read it again; anything else is refused with a ValueError."""
        snapshot = Snapshot.read(path, holds="tabular")
        with snapshot.opened():
            own, fit = dict(snapshot.header["tabular"]), json.dumps(snapshot.header["fit"])
            columns = [Column(**one) for one in own.pop("columns")]
            model = learners.restored(unprefixed("model", snapshot.tensors), codes(columns))
            uq = LastLayerRigidity(model)
            uq.set_extra_state({"tensors": unprefixed("fit", snapshot.tensors), "header": fit})
            return cls(uq, columns, **own)

    def predictions(
        self, frame: pandas.DataFrame, found: Prediction, level: float, before: int = 0
    ) -> pandas.DataFrame:
        """A table of predictions, for rows after those before."""
        values = (found.mean, found.std, *found.interval(level))
        bars = zip(("mean", "std", "low", "high"), values, strict=True)
        own = frame.reindex(columns=self.identifiers).assign(
            **{n: t[:, 0].numpy() for n, t in bars}
        )
        own.insert(0, "row", range(before + 1, before + 1 + len(frame)))
        return own


@dataclass(frozen=True)
class Training:
    """A table to learn from: inputs x (N, P), targets y (N, 1), of each row a place in `PARTS`."""

    table: Table
    frame: pandas.DataFrame
    columns: Sequence[Column]
    notes: Sequence[str]
    x: Tensor
    y: Tensor
    part: Tensor

    @classmethod
    def read(
        cls, path: Path, target: str, left: Sequence[str], keep: Sequence[str], seed: int
    ) -> Training:
        """From a file; columns that are `left` are no inputs, those to `keep` are."""
        import pandas

        table = Table.open(path)
        if unknown := [name for name in (target, *left, *keep) if name not in table.names]:
            raise ValueError(
                f"Expected the column {unknown[0]!r} in {path}, got "
                f"{', '.join(map(repr, table.names))}. Name one of these."
            )
        chunks = [*table.chunks(CHUNK)] or [pandas.DataFrame(columns=table.names, dtype=object)]
        frame = pandas.concat(chunks, ignore_index=True)
        y = _target(frame[target], table, target)
        others = frame.drop(columns=[target, *left])
        columns, notes = inputs(others, y.numpy(), table.decimal, keep)
        if not columns:
            raise ValueError(f"Expected inputs beside {target!r} in {path}. {'; '.join(notes)}.")
        x, _ = matrix(columns, frame, table.decimal)
        return cls(table, frame, columns, [*table.notes, *notes], x, y[:, None], _parts(x, y, seed))

    def rows(self, part: int) -> learners.Rows:
        """Inputs and targets of a part."""
        return self.x[self.part == part], self.y[self.part == part]

    @property
    def sizes(self) -> dict[str, int]:
        """How many rows are of each part."""
        return dict(zip(PARTS, self.part.bincount(minlength=4).tolist(), strict=True))

    def opening(self, target: str) -> Iterator[str]:
        """What was read, a line each."""
        kinds = Counter(column.kind for column in self.columns)
        yield f"{self.table.path}: {len(self.x):,} rows, {len(self.table.names)} columns"
        listed = ", ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in kinds.items())
        yield f"  Target: {target}; inputs: {listed.replace('categorys', 'categories')}"
        yield from (f"  {note}" for note in self.notes)
        if gaps := int(self.x.isnan().any(1).sum()):
            yield f"  {gaps:,} rows have gaps, which the model takes as they are"
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
    _require("pandas", "sklearn", "plotly")
    begun = time.monotonic()
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"--out {out} is a file. Name a folder to write.")
    with _replacing(out) as made, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.mkdir()
        data = Training.read(path, target, [*id, *drop], keep, seed)
        for line in data.opening(target):
            say(line)
        uq, trees, what = _learned(model, data, seed)
        uq.calibrate(data.rows(CALIBRATION), progress=False)
        said = dict.fromkeys(str(warning.message) for warning in caught)
        for line in (*said, f"Trained {what} in {time.monotonic() - begun:.0f} s"):
            say(f"  {line}")
        found = uq.predict(data.x, progress=False)
        scores = _scores(data, found, trees, level)
        say(_scoreboard(scores, level, data.sizes["test"]))
        _write(made, TableModel(uq, data.columns, target, level, id), data, found)
        summary: dict[str, Any] = {"library": __version__, "data": str(path), "target": target}
        summary |= {"model": what, "level": level, "seed": seed, "rows": data.sizes}
        summary |= {"scores": scores, "columns": [asdict(column) for column in data.columns]}
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
    own, table = TableModel.load(model), Table.open(path)
    if out.exists() and any(out.samefile(other) for other in (path, model)):
        raise ValueError(f"--out {out} is a file that is read. Choose another place.")
    kinds = {column.name: column.kind for column in own.columns}
    extra = [name for name in table.names if name not in {*kinds, own.target, *own.identifiers}]
    for line in (*table.notes, *([f"Not used: {', '.join(extra)}"] if extra else [])):
        say(f"  {line}")
    unread, count = Counter[str](), 0
    with _replacing(checked_place(out)) as made, made.open("w", encoding="utf-8") as file:
        for frame in tqdm(table.chunks(CHUNK), "Predicting", leave=False, disable=None):
            x, lost = matrix(own.columns, frame, table.decimal)
            found = own.uq.predict(x, progress=False)
            part = own.predictions(frame, found, level or own.level, count)
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
    rows, kinds = data.rows(TRAIN), codes(data.columns)
    if model == "net":
        uq = LastLayerRigidity(learners.net(rows, kinds, seed)).fit(rows, progress=False)
        return uq, learners.unfitted(kinds, seed), "a net"
    trees, module = learners.boosted(rows, kinds, seed)
    # trees follow their own rows too closely to learn from residuals there
    uq = LastLayerRigidity(module).fit(rows, sample=0, progress=False)
    return uq, trees, f"{trees.max_iter} boosted trees of up to {trees.max_leaf_nodes} leaves"


def _target(series: pandas.Series, table: Table, name: str) -> Tensor:
    """Its numbers, (N,); refused where nothing can be learnt from them."""
    column, what = Column.of(name, series, table.decimal), f"the target {name!r} of {table.path}"
    y = torch.tensor(numbers(series, table.decimal, column.unit))
    known = y[y.isfinite()]
    if column.kind != "number":
        held = series.dropna().iloc[0]
        raise ValueError(f"Expected numbers in {what}, got {held!r}. Name another --target.")
    if len(known) < LEAST:
        raise ValueError(f"Expected {LEAST} rows or more with {what}, got {len(known)}. Add rows.")
    if bool((known == known[0]).all()):
        raise ValueError(f"Expected {what} to vary, got {known[0]:g} in every row.")
    return y


def _parts(x: Tensor, y: Tensor, seed: int) -> Tensor:
    """Of each row its part, at random; rows with equal inputs stay together."""
    labelled = y.isfinite()
    filled = x[labelled].nan_to_num(nan=-1.7e308)
    _, group = torch.unique(filled, dim=0, return_inverse=True)
    shuffled = torch.randperm(int(group.max()) + 1, generator=torch.Generator().manual_seed(seed))
    sizes = (group := shuffled[group]).bincount()
    begin = (sizes.cumsum(0) - sizes)[group]  # rows of the groups before
    size = min(MOST, round(SHARE * len(group)))
    found = torch.full(y.shape, UNLABELLED)
    found[labelled] = torch.where(begin < size, TEST, (begin < 2 * size).long() * CALIBRATION)
    if len(torch.unique(found[labelled])) < 3:
        raise ValueError("Expected rows that differ in their inputs, got too many equal ones.")
    return found


def _scores(data: Training, found: Prediction, trees: Any, level: float) -> dict[str, Any]:
    """Of the error bars, of one constant bar and of quantile regression, on the test rows."""
    (x, y), test, scores = data.rows(TEST), data.part == TEST, {}
    error = (found.mean - data.y)[data.part == CALIBRATION]
    constant = error.square().mean().expand(found.mean.shape)
    plain = Prediction(found.mean, 0 * constant, constant, constant)
    for name, one in {"rigidities": found, "constant": plain}.items():
        scores[name] = {
            "rmse": float((one.mean[test] - y).square().mean().sqrt()),
            "nll": -float(one.log_prob(data.y)[test].mean()),
            "crps": float(one.crps(data.y)[test].mean()),
            **_interval_scores([end[test] for end in one.interval(level)], y, level),
        }
    ends = learners.quantiles(trees, data.rows(TRAIN), x, level)
    return scores | {"quantile": _interval_scores(ends, y, level)}


def _interval_scores(ends: Sequence[Tensor], y: Tensor, level: float) -> dict[str, float]:
    low, high = ends
    outside = (low - y).clamp(min=0) + (y - high).clamp(min=0)
    score = float((high - low + 2 / (1 - level) * outside).mean())
    coverage = float((outside == 0).double().mean())
    return {"coverage": coverage, "width": float((high - low).mean()), "interval_score": score}


def _scoreboard(scores: dict[str, Any], level: float, rows: int) -> str:
    """The scores in plain ASCII, and how far chance may move the coverage."""
    line = "{:<42}{:>14}{:>14}{:>14}".format
    said = ["", line(f"{rows:,} test rows, used for nothing else:", "", "constant", "quantile")]
    said.append(line("", "rigidities", "bar", "regression"))
    for key in scores["rigidities"]:
        name = key.upper() if len(key) < 5 else f"{level:.0%} intervals: {key.replace('_', ' ')}"
        form = "{:.1%}" if key == "coverage" else "{:#.4g}"
        cells = (form.format(one[key]) if key in one else "-" for one in scores.values())
        said.append(line(f"  {name}", *cells))
    chance = 2 * (level * (1 - level) / rows) ** 0.5
    said.append(
        f"  Less is better; chance moves the coverage of so few rows by {chance:.1%} or less.\n"
    )
    return "\n".join(said)


def _write(folder: Path, model: TableModel, data: Training, found: Prediction) -> None:
    """The model, all predictions, and the report on the test rows."""
    model.save(folder / "model.safetensors")
    split = [PARTS[part] for part in data.part.tolist()]
    table = model.predictions(data.frame, found, model.level)
    table.assign(split=split, target=data.y[:, 0]).to_csv(folder / "predictions.csv", **WRITTEN)
    own = data.frame[(data.part == TEST).numpy()]
    shown = {name: own[name].astype(str).tolist() for name in [*model.identifiers, *own][:12]}
    report.write(
        folder / "report.html",
        model.uq,
        data.rows(TEST),
        reference=data.rows(CALIBRATION)[0],
        title=f"{model.target} of {data.table.path.name}: can the error bars be trusted?",
        names=[model.target],
        inputs={"row": [row + 1 for row in own.index]} | shown,
        progress=False,
    )


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A place beside the target, whose file or folder takes its place unless something fails."""
    if not target.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {target.parent} for {target.name}. Make it.")
    made = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield made
        if made.is_dir() and target.is_dir():  # which may hold other files too
            for file in made.iterdir():
                os.replace(file, target / file.name)
        else:
            os.replace(made, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)
        made.unlink(missing_ok=True)


def _require(*names: str) -> None:
    if missing := [name for name in names if find_spec(name) is None]:
        remedy = 'pip install "rigidities[tabular]"'
        raise ModuleNotFoundError(f"Tables need {' and '.join(missing)}: {remedy}.")
