"""`rigidities tabular`: from a table to a model with error bars, its report and predictions."""

from __future__ import annotations

import csv
import json
import os
import secrets
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from ..notices import require, require_kinds
from ..prediction.prediction import Prediction
from ..report.document import checked_place
from .columns import Column, Columns, numbers
from .learners import Net, Rows, boosted, quantiles, unfitted
from .tables import Table

if TYPE_CHECKING:
    import pandas

Say = Callable[[str], None]
PARTS = ("train", "calibration", "test", "unlabelled")
LEAST = 30
"""Rows with a target below which nothing honest can be said."""
SHARE, MOST = 0.15, 10_000
"""Of the rows that calibrate, and as many that test; and how many at most."""
CHUNK = 20_000
SCORES = {
    "rmse": "RMSE",
    "nll": "NLL (less is better)",
    "crps": "CRPS (less is better)",
    "coverage": "{:.0%} intervals: coverage",
    "width": "{:.0%} intervals: mean width",
    "interval_score": "{:.0%} intervals: score (less is better)",
}


@dataclass(frozen=True)
class TableModel:
    """A model of one column of a table, with error bars; one file without code holds all of it.

    Attributes:
        uq: the fitted and calibrated model.
        columns: its inputs.
        target: the column that it predicts.
        level: of the intervals it was judged by.
        identifiers: columns that go with its predictions.
    """

    uq: LastLayerRigidity
    columns: Columns
    target: str
    level: float
    identifiers: Sequence[str] = ()

    def predict(self, frame: pandas.DataFrame, decimal: str) -> tuple[Prediction, Counter[str]]:
        """Predictions for a table's rows, and by column the cells that could not be read."""
        x, unread = self.columns.matrix(frame, decimal)
        return self.uq.predict(x, progress=False), unread

    def save(self, path: Path) -> None:
        """Write the file."""
        fit, model = self.uq.get_extra_state(), self.uq.model
        kept = {key: getattr(self, key) for key in ("target", "level", "identifiers")}
        own = kept | {"columns": self.columns.header(), "shape": model.shape}
        tensors = prefixed("model", model.state_dict()) | prefixed("fit", fit["tensors"])
        header = {"library": __version__, "tabular": own, "fit": json.loads(fit["header"])}
        Snapshot(tensors, header).write(path)

    @classmethod
    def load(cls, path: Path) -> TableModel:
        """Read it again; anything else is refused with a ValueError."""
        snapshot = Snapshot.read(path, holds="tabular")
        with snapshot.opened():
            own = snapshot.header["tabular"]
            kinds = {"target": str, "level": float, "identifiers": list, "shape": dict}
            require_kinds(own, kinds, "the table's model")
            model = Net(**own["shape"])
            model.load_state_dict(unprefixed("model", snapshot.tensors))
            uq, tensors = LastLayerRigidity(model), unprefixed("fit", snapshot.tensors)
            uq.set_extra_state({"tensors": tensors, "header": json.dumps(snapshot.header["fit"])})
            columns = Columns.from_header(own["columns"])
            require(sum(len(c.parts) or 1 for c in columns.columns) == len(columns.codes), "x")
        return cls(uq, columns, own["target"], own["level"], own["identifiers"])


@dataclass(frozen=True)
class Training:
    """A table to learn from.

    Attributes:
        table: the file.
        frame: its rows.
        columns: the inputs.
        notes: what became of the others, in words.
        x: (N, P).
        y: (N, 1), NaN where the target is missing.
        part: of each row, a place in `PARTS`.
    """

    table: Table
    frame: pandas.DataFrame
    columns: Columns
    notes: Sequence[str]
    x: Tensor
    y: Tensor
    part: Tensor

    @classmethod
    def read(
        cls, path: Path, target: str, left: Sequence[str], keep: Sequence[str], seed: int
    ) -> Training:
        """From a file; the columns that are `left` are no inputs, those to `keep` are."""
        import pandas

        table = Table.open(path)
        if unknown := [name for name in (target, *left, *keep) if name not in table.names]:
            raise ValueError(
                f"Expected the column {unknown[0]!r} in {path}, got "
                f"{', '.join(map(repr, table.names))}. Name one of these."
            )
        chunks = list(table.chunks(CHUNK))
        if not chunks:
            raise ValueError(f"{path} has no rows. Expected {LEAST} with a target, or more.")
        frame = pandas.concat(chunks, ignore_index=True)
        y = _target(frame[target], table, target)
        others = frame.drop(columns=[target, *left])
        columns, notes = Columns.of(others, y.numpy(), table.decimal, keep)
        if not columns.columns:
            raise ValueError(f"Expected inputs beside {target!r} in {path}. {'; '.join(notes)}.")
        x, _ = columns.matrix(frame, table.decimal)
        return cls(table, frame, columns, [*table.notes, *notes], x, y[:, None], _parts(x, y, seed))

    def rows(self, part: str) -> Rows:
        """Inputs and targets of one part."""
        chosen = self.part == PARTS.index(part)
        return self.x[chosen], self.y[chosen]


def train(
    path: Path,
    target: str,
    out: Path,
    *,
    model: str = "tree",
    level: float = 0.9,
    seed: int = 0,
    identifiers: Sequence[str] = (),
    drop: Sequence[str] = (),
    keep: Sequence[str] = (),
    say: Say = print,
) -> dict[str, Any]:
    """Learn a column of a table, judge on rows held out, write a folder; as on the command line.

    Returns:
        The summary, as in `summary.json`.
    """
    _require("pandas", "sklearn", "plotly")
    begun = time.monotonic()
    with _replacing(out) as made:
        made.mkdir()
        data = Training.read(path, target, [*identifiers, *drop], keep, seed)
        sizes = {part: len(data.rows(part)[0]) for part in PARTS}
        for line in _opening(data, target, sizes):
            say(line)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            uq, trees, settings = _learned(model, data, seed)
            uq.calibrate(data.rows("calibration"), progress=False)
        for warning in caught:
            say(f"  Note: {warning.message}")
        say(f"Trained {settings['what']} in {time.monotonic() - begun:.0f} s")
        found = TableModel(uq, data.columns, target, level, identifiers)
        prediction = uq.predict(data.x, progress=False)
        scores = _scores(data, prediction, trees, level)
        say(_scoreboard(scores, level, sizes["test"]))
        summary = {
            "library": __version__,
            "data": str(path),
            "target": target,
            "rows": sizes,
            "columns": data.columns.header(),
            "notes": list(data.notes) + [str(warning.message) for warning in caught],
            "model": settings,
            "level": level,
            "seed": seed,
            "scores": scores,
        }
        found.save(made / "model.safetensors")
        _write_predictions(made / "predictions.csv", found, data, prediction)
        report.save(made / "report.html", _page(path.name, found, data, prediction))
        summary["seconds"] = round(time.monotonic() - begun, 1)
        (made / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        written = ", ".join(sorted(file.name for file in made.iterdir()))
    say(f"Wrote {out}: {written}\n")
    say(f"New rows: rigidities tabular --apply {out / 'model.safetensors'} new.csv")
    return summary | {"out": str(out)}


def apply(
    model: Path, path: Path, out: Path, *, level: float | None = None, say: Say = print
) -> dict[str, Any]:
    """Predictions for the rows of a file of any size, into another file.

    Returns:
        How many rows there were, and by column the cells that could not be read.
    """
    _require("pandas")
    found = TableModel.load(model)
    table = Table.open(path)
    if out.exists() and any(out.samefile(other) for other in (path, model)):
        raise ValueError(f"--out {out} is a file that is read. Choose another place.")
    for line in table.notes:
        say(f"  {line}")
    inputs = {column.name for column in found.columns.columns}
    if extra := [n for n in table.names if n not in {*inputs, found.target, *found.identifiers}]:
        say(f"  Not used: {', '.join(extra)}")
    unread, count, level = Counter[str](), 0, level or found.level
    with _replacing(checked_place(out)) as made, made.open("w", encoding="utf-8", newline="") as to:
        writer = csv.writer(to)
        writer.writerow(["row", *found.identifiers, "mean", "std", "low", "high"])
        bar = tqdm(table.chunks(CHUNK), "Predicting", unit="chunk", leave=False, disable=None)
        for frame in bar:
            prediction, lost = found.predict(frame, table.decimal)
            unread += lost
            writer.writerows(_lines(found, frame, prediction, level, count))
            count += len(frame)
        if not count:
            raise ValueError(f"{path} has no rows. Expected one or more below its names.")
    kinds = {column.name: column.kind for column in found.columns.columns}
    for name, cells in unread.items():
        why = "unknown in training" if kinds[name] == "category" else f"no {kinds[name]}"
        say(f"  {name}: {cells:,} cells {why}, taken as missing")
    say(f"Wrote {out}: {count:,} rows")
    return {"out": str(out), "rows": count, "unread": dict(unread), "level": level}


def _learned(model: str, data: Training, seed: int) -> tuple[LastLayerRigidity, Any, Any]:
    """The fitted model, boosted trees whose settings suit the table, and what was chosen."""
    rows, codes = data.rows("train"), data.columns.codes
    if model == "net":
        net = Net.trained(rows, codes, seed=seed)
        uq = LastLayerRigidity(net, layer="head").fit(rows, progress=False)
        return uq, unfitted(codes, seed), {"kind": "net", "what": f"a net: {net}"}
    raise NotImplementedError


def _target(series: pandas.Series, table: Table, name: str) -> Tensor:
    """Its numbers, (N,); refused where nothing can be learnt from them."""
    column = Column.of(name, series, table.decimal)
    y = torch.tensor(numbers(series, table.decimal, column.unit), dtype=torch.float64)
    known = y[y.isfinite()]
    what = f"the target {name!r} of {table.path}"
    if column.kind != "number":
        held = series.dropna().iloc[0]
        raise ValueError(f"Expected numbers in {what}, got {held!r}. Name another --target.")
    if len(known) < LEAST:
        raise ValueError(f"Expected {LEAST} rows or more with {what}, got {len(known)}. Add rows.")
    if bool((known == known[0]).all()):
        raise ValueError(f"Expected {what} to vary, got {known[0]:g} in every row.")
    return y


def _parts(x: Tensor, y: Tensor, seed: int) -> Tensor:
    """Test, calibration and training rows at random; rows with equal inputs stay together."""
    labelled = y.isfinite()
    _, group = x[labelled].nan_to_num(nan=-1.7e308).unique(dim=0, return_inverse=True)
    shuffled = torch.randperm(int(group.max()) + 1, generator=torch.Generator().manual_seed(seed))
    group = shuffled[group]
    sizes = group.bincount()
    begin = (sizes.cumsum(0) - sizes)[group]  # rows of the groups before
    size = min(MOST, round(SHARE * len(group)))
    part = torch.full_like(begin, PARTS.index("train"))
    part[begin < 2 * size] = PARTS.index("calibration")
    part[begin < size] = PARTS.index("test")
    if len(part.unique()) < 3:
        raise ValueError("Expected rows that differ in their inputs, got too many equal ones.")
    found = torch.full(y.shape, PARTS.index("unlabelled"))
    found[labelled] = part
    return found


def _scores(data: Training, prediction: Prediction, trees: Any, level: float) -> dict[str, Any]:
    """Of the error bars, of one constant bar and of quantile regression, on the test rows."""
    test, held = (data.part == PARTS.index(part) for part in ("test", "calibration"))
    error = prediction.mean[held] - data.y[held]
    constant = error.square().mean().expand(prediction.mean.shape)
    plain = Prediction(prediction.mean, 0 * constant, constant, constant)
    x, y = data.rows("test")
    ends = quantiles(trees, data.rows("train"), x, level)
    found = {}
    for name, one in {"rigidities": prediction, "constant": plain}.items():
        found[name] = {
            "rmse": float((one.mean[test] - y).square().mean().sqrt()),
            "nll": -float(one.log_prob(data.y)[test].mean()),
            "crps": float(one.crps(data.y)[test].mean()),
            **_interval_scores(*(end[test] for end in one.interval(level)), y, level),
        }
    return found | {"quantile": _interval_scores(*(end[:, None] for end in ends), y, level)}


def _interval_scores(low: Tensor, high: Tensor, y: Tensor, level: float) -> dict[str, float]:
    outside = (low - y).clamp(min=0) + (y - high).clamp(min=0)
    return {
        "coverage": float((outside == 0).double().mean()),
        "width": float((high - low).mean()),
        "interval_score": float((high - low + 2 / (1 - level) * outside).mean()),
    }


def _scoreboard(scores: Mapping[str, Mapping[str, float]], level: float, rows: int) -> str:
    """The scores as a table in plain ASCII, and how far chance may move the coverage."""
    heads = ["rigidities", "constant bar", "quantile regr."]
    lines = [f"\nOn {rows:,} test rows that nothing was fitted to:", " " * 42 + "".join(f"{h:>16}" for h in heads)]
    for key, label in SCORES.items():
        form = ".1%" if key == "coverage" else "#.4g"
        cells = [f"{one[key]:{form}}" if key in one else "-" for one in scores.values()]
        lines.append(f"  {label.format(level):<40}" + "".join(f"{cell:>16}" for cell in cells))
    spread = 2 * (level * (1 - level) / rows) ** 0.5
    low, high = max(0.0, level - spread), min(1.0, level + spread)
    lines.append(f"  Of so few rows right intervals hold {low:.0%} to {high:.0%}, by chance.\n")
    return "\n".join(lines)


def _opening(data: Training, target: str, sizes: Mapping[str, int]) -> Iterator[str]:
    table = data.table
    yield f"{table.path}: {len(data.x):,} rows, {len(table.names)} columns; target {target}"
    yield f"  Inputs: {data.columns}"
    yield from (f"  {note}" for note in data.notes)
    if gaps := int(data.x.isnan().any(1).sum()):
        yield f"  {gaps:,} rows have gaps, which the model takes as they are"
    yield "  Rows: " + ", ".join(f"{n:,} {part}" for part, n in sizes.items() if n)
    if any(column.kind == "date" for column in data.columns.columns):
        yield "  Rows are split at random: of dates to come the scores below are optimistic"


def _lines(
    model: TableModel, frame: pandas.DataFrame, prediction: Prediction, level: float, before: int
) -> Iterator[list[Any]]:
    """Of a file of predictions."""
    low, high = prediction.interval(level)
    columns = [t[:, 0].tolist() for t in (prediction.mean, prediction.std, low, high)]
    own = [frame[n].tolist() if n in frame else [""] * len(frame) for n in model.identifiers]
    for place, values in enumerate(zip(*columns, strict=True)):
        numbers = [f"{value:.10g}" for value in values]
        yield [before + place + 1, *(column[place] for column in own), *numbers]


def _write_predictions(
    path: Path, model: TableModel, data: Training, prediction: Prediction
) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        names = [*model.identifiers, "mean", "std", "low", "high", "split", "target"]
        writer.writerow(["row", *names])
        lines = _lines(model, data.frame, prediction, model.level, 0)
        for line, part, y in zip(lines, data.part.tolist(), data.y[:, 0].tolist(), strict=True):
            writer.writerow([*line, PARTS[part], "" if y != y else f"{y:.10g}"])


def _page(name: str, model: TableModel, data: Training, prediction: Prediction) -> str:
    """The report on the test rows."""
    test, held = (data.part == PARTS.index(part) for part in ("test", "calibration"))
    place = test.nonzero()[:, 0]
    shown = [*model.identifiers, *(column.name for column in data.columns.columns)][:10]
    inputs = {key: data.frame[key].iloc[place.tolist()].astype(str).tolist() for key in shown}
    return report.html(
        prediction.mean[test],
        prediction.std[test],
        data.y[test],
        title=f"{model.target} of {name}: can the error bars be trusted?",
        names=[model.target],
        inputs={"row": (place + 1).tolist(), **inputs},
        calibration=model.uq.report,
        reference=prediction.std[held],
    )


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A place beside the target, whose file or folder takes its place unless something fails."""
    checked = target.parent.is_dir()
    if not checked:
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
        raise ModuleNotFoundError(
            f'Tables need {" and ".join(missing)}: pip install "rigidities[tabular]".'
        )
