"""One pass over the training data: features, curvatures and residuals into the Gram."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..data.arrays import TARGET_KEYS, Columns, agreed
from ..data.batches import KINDS, Batch, kind_of
from ..data.finiteness import spoilt
from ..data.row_sample import RowSample, output_hashes
from ..data.sketch import NO_LIMIT, RowSketch
from ..data.storage import Snapshot, prefixed, unprefixed
from ..losses import MSE, Loss
from ..notices import notify, require, require_kinds
from ..posterior.gram import Gram, PrecisionLike, precision_for
from ..posterior.memory import require_memory
from .gradients.loss import GradientLoss
from .readout.reading import Reading, SampleWeight, read
from .readout.tap import AnyTap

_CHECK_EVERY = 32
_SMALL = 512
"""Rows of a batch that is rather copied than treated by itself."""


@dataclass
class Statistics:
    """Everything that a fit learns from the data.

    Attributes:
        sketch: hashes of the rows, to recognise them in validation data.
        targets: number of targets K.
        inputs: number of positional inputs of the model, or of a tuple that `forward=` takes.
        kind: of the batches, where known; see `data.batches.kind_of`.
        exact: whether the hashes are of inputs, not of features, which round as the batch wills.
        sample: some of the rows; None where none were asked for or their residuals are not known.
        static: whether the model writes all outputs into the same memory, so that batches are added
            one by one; kept for a fit that is resumed, which must round alike.
        columns: names of the columns of each data frame in a batch, where there were any.
    """

    gram: Gram
    sketch: RowSketch
    targets: int
    inputs: int
    kind: str | None = None
    exact: bool = True
    sample: RowSample | None = None
    static: bool = False
    columns: Columns = None

    def clone(self) -> Statistics:
        """An independent copy."""
        sample = self.sample and self.sample.clone()
        return replace(self, gram=self.gram.clone(), sketch=self.sketch.clone(), sample=sample)

    def merge(self, other: Statistics) -> Statistics:
        """Add another's rows to these, and return these; the other stays as it was."""
        mine, theirs = self.gram, other.gram
        self.columns = agreed(other.columns, self.columns)
        if mine.targets is None and theirs.targets is not None:
            mine = mine.expand(theirs.targets)
        elif mine.targets is not None and theirs.targets is None:
            theirs = theirs.expand(mine.targets)
        self.gram = mine.merge(theirs)
        self.sketch.merge(other.sketch)
        self.sketch.settle()
        if self.sample is not None and other.sample is not None:
            self.sample.size = min(self.sample.size, other.sample.size)
            self.sample.merge(other.sample.to(self.gram.device))
            self.sample.settle()
        else:
            self.sample = None
        self.exact = self.exact and other.exact
        return self

    def without(self, removed: Statistics, *, check: bool) -> Statistics:
        """What is left when rows are taken out, which must be held; `check` asks their hashes."""
        sketch, missing, judged = self.sketch.without(removed.sketch)
        if check and missing:
            share = self.sketch.limit / (1 << 63)
            some = "" if share == 1 else f" that could be judged ({share:.1%} of all)"
            raise ValueError(
                f"{missing} of {judged} rows{some} were never in the fit (or were taken out "
                "already, or had another target). Give rows as they were added, in the same "
                "dtypes, or pass check=False where they cannot be recognised."
            )
        gram, out = self.gram.without(removed.gram), removed.sample
        sample = None if self.sample is None or out is None else self.sample.without(out)[0]
        return replace(self, gram=gram, sketch=sketch, sample=sample)

    def after(self, change: Tensor) -> Statistics:
        """The same rows when the readout's weights have changed by (D, K or 1)."""
        sample = self.sample and self.sample.after(change)
        return replace(self, gram=self.gram.after(change), sample=sample)

    def trimmed(self, limit: int) -> Statistics:
        """The same with no rows in the sample whose hash is `limit` or above."""
        return replace(self, sample=self.sample and self.sample.trimmed(limit))

    def snapshot(self, *, rows: bool = True, exact: bool = False) -> Snapshot:
        """As tensors and a header, for files and other processes.

        `rows`: with the sample, where there is one; `exact`: as `Gram.state`.
        """
        tensors = prefixed("gram", self.gram.state(exact=exact))
        tensors |= prefixed("sketch", self.sketch.state())
        if rows and self.sample is not None:
            tensors |= prefixed("rows", self.sample.state())
        header: dict[str, Any] = {
            "targets": self.targets,
            "inputs": self.inputs,
            "batch": self.kind,
            "exact": self.exact,
        }
        if exact and self.static:
            header["static"] = True
        if self.columns is not None:
            header["columns"] = self.columns
        return Snapshot(tensors, header)

    @classmethod
    def from_snapshot(cls, given: Snapshot, device: torch.device | str) -> Statistics:
        """The statistics of a snapshot, which may hold more; refused where it holds none."""
        header = given.header
        tensors = {name: tensor.to(device) for name, tensor in given.tensors.items()}
        require_kinds(header, {"targets": int, "inputs": int}, "the fit")
        rows = unprefixed("rows", tensors)
        statistics = cls(
            gram=Gram.from_state(unprefixed("gram", tensors)),
            sketch=RowSketch.from_state(unprefixed("sketch", tensors)),
            targets=header["targets"],
            inputs=header["inputs"],
            kind=header.get("batch"),
            exact=header.get("exact", True),
            sample=RowSample.from_state(rows) if rows else None,
            static=header.get("static", False) is True,
            columns=header.get("columns"),
        )
        gram, sample, names = statistics.gram, statistics.sample, statistics.columns
        require(names is None or type(names) is list, "the names of columns")
        fits = gram.targets in (None, statistics.targets) and statistics.inputs >= 0
        require(fits and statistics.targets > 0, "the number of targets or inputs")
        if sample is not None:
            shape = (sample.columns["features"].shape[-1], sample.columns["mean"].shape[1])
            require(shape == (gram.width, statistics.targets), "the sample of rows")
        sound = statistics.kind in (None, *KINDS) and type(statistics.exact) is bool
        require(sound, "the kind of batches")
        return statistics

    def require_finite(self) -> None:
        """Refuse sums that have overflowed."""
        if not bool(self.gram.diagonal.isfinite().all()):
            raise ValueError(
                "Features are so large that their squares overflow. Fit with precision='double', "
                "or scale what goes into the readout."
            )

    def say_unlabelled(self) -> None:
        """Warn of batches that could have held a target, and did not where it was looked for."""
        if self.gram.cross is None and self.kind in ("mapping", "object"):
            notify(
                "The fit saw no target in its batches and went without: it looks for "
                f"{', '.join(map(repr, TARGET_KEYS))}. Say where it is with target=lambda b: ..., "
                "or that there is none with target=lambda b: None."
            )


@dataclass(frozen=True)
class Weighing:
    """The weight of a row: the loss's curvature times the user's sample weight.

    Attributes:
        sample_weight: callable(batch) -> weights, where the training loss was weighted.
        gradients: the part of the training loss that derivatives by an input had.
    """

    loss: Loss
    sample_weight: SampleWeight | None = None
    gradients: GradientLoss | None = None

    def __call__(
        self, batch: Batch, reading: Reading, target: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The weight, and the user's part in it; each (M, 1) or (M, K), None for all ones."""
        if target is None and self.loss.needs_target:
            raise ValueError("This loss needs targets: give (x, y) batches or target=.")
        given = user = reading.sample_weights(self.sample_weight, batch)
        own = reading.sample_weights(getattr(self.loss, "weight", None), batch)
        if own is not None:
            given = own if given is None else own * given
        if isinstance(self.loss, MSE):
            return given, user
        rows = reading.rows(reading.output.detach())
        curvature = self.loss.curvature(rows, target, batch.raw)
        if curvature is None:
            return given, user
        if given is not None:  # what the user masks need not have a curvature
            curvature = torch.where(given > 0, curvature, 0.0)
        _check_curvature(curvature)
        return curvature if given is None else curvature * given, user


@torch.enable_grad()  # for models that differentiate inside forward
def accumulate(
    statistics: Statistics | None,
    find: Callable[[Batch], AnyTap],
    batches: Iterable[Batch],
    weighing: Weighing,
    *,
    apart: bool = False,
    remove: bool = False,
    sample: RowSample | None = None,
    precision: PrecisionLike = "auto",
    kind: type[Gram] = Gram,
    meanwhile: Callable[[], None] = lambda: None,
    counted: int = 0,
    tick: Callable[[int, Statistics | None, Callable[[], None]], None] = lambda *_: None,
) -> Statistics | None:
    """Statistics with the batches' rows added, in place; None where no batch came.

    `find` gives the readout for the first batch; `apart` gives statistics of the batches alone, as
    are to be added to those given later, or to `remove` from them; `sample`, still empty,
    `precision` and the `kind` of Gram are those of new statistics, others have `counted` batches;
    `meanwhile` is while an accelerator works on the last ones, `tick` where none waits to be added.

    Raises:
        ValueError: NaN or infinity, shapes that do not fit, negative curvature; with the number of
            the batch, counted from 0.
    """
    known = statistics if apart or remove else None
    if known is not None:
        statistics, kind = None, type(known.gram)
        sample = known.sample and RowSample(known.sample.size, known.sample.limit)
    empty = partial(_empty, precision=precision, gram_kind=kind)
    held = known.sketch if known is not None and remove else None
    exact = known is None or known.exact
    adding, tap = _Adding(statistics, held, exact, weighing, sample, empty, counted, tick), None
    for batch in batches:
        tap = find(batch) if tap is None else tap
        adding.take(tap, batch)
    if tap is not None:
        adding.flush(tap)
        meanwhile()
        adding.look()
    return adding.statistics if tap or counted else None


def settled(statistics: Statistics | None) -> Statistics:
    """The statistics of all rows, ready to be shared by threads.

    Raises:
        ValueError: nothing was added, or nothing that could be used.
    """
    if statistics is None:
        raise ValueError("There are no data: no batch came. Pass at least one row.")
    statistics.require_finite()
    if not bool((statistics.gram.diagonal > 0).any()):
        raise ValueError(
            "The Gram is zero: all features are zero, or the loss has no curvature (an absolute "
            "error has none; use 'huber', 'log-cosh' or 'mse')."
        )
    statistics.sketch.settle()  # before threads share it; the diagonal has settled the Gram
    if statistics.sample is not None:
        statistics.sample.settle()
    return statistics


class _Piece(NamedTuple):
    """What is left of a batch: the pass, the target shaped like the output, and weights."""

    batch: Batch
    leaves: list[Any]
    reading: Reading
    target: Tensor | None
    weights: Tensor | None
    importance: Tensor | None

    def form(self) -> tuple[object, ...]:
        """Pieces can be joined whose forms are equal."""
        reading = self.reading
        parts = (reading.output, reading.inputs, reading.counts, *self[3:], *self.leaves)
        kinds = [(t.shape[1:], t.dtype) if isinstance(t, Tensor) else None for t in parts]
        return reading.ones, reading.inner[1:], reading.axis, id(reading.order), kinds

    @classmethod
    def join(cls, pieces: list[_Piece], *, inputs: bool) -> _Piece:
        """Consecutive batches as one, which keeps no batch as it was given, nor all `inputs`."""
        if len(pieces) == 1:
            return pieces[0]
        reading = Reading.join([p.reading if inputs else p.reading.bare() for p in pieces])
        leaves = [torch.cat(each) for each in zip(*(p.leaves for p in pieces), strict=True)]
        rest = zip(*(piece[3:] for piece in pieces), strict=True)
        target, weights, importance = (None if p[0] is None else torch.cat(p) for p in rest)
        batch = replace(pieces[0].batch, args=tuple(leaves), kwargs={}, target=target)
        return cls(batch, leaves, reading, target, weights, importance)

    def copied(self) -> _Piece:
        """In memory of its own, where all is tensors."""
        if not _all_tensors(self.leaves):
            return self
        leaves, reading = [leaf.clone() for leaf in self.leaves], self.reading.copied()
        target = None if self.target is None else self.target.clone()
        batch = replace(self.batch, args=tuple(leaves), kwargs={}, target=target, kept=True)
        return self._replace(batch=batch, leaves=leaves, target=target, reading=reading)

    @property
    def error(self) -> Tensor | None:
        """Target minus prediction, (M, K) in float64."""
        if self.target is None:
            return None
        return self.reading.rows(self.target.to(torch.float64) - self.reading.output)

    @property
    def sums(self) -> Tensor:
        """What NaN or infinity would spoil."""
        return _total(self.reading.inputs, _counted(self.error, self.weights))


class _Adding:
    """Batches on their way into statistics, a block of them at a time.

    An accelerator is kept waiting by many small products and by every look at a value, so batches
    are gathered until they fill a block, where nobody will write to their memory meanwhile.
    """

    def __init__(
        self,
        statistics: Statistics | None,
        held: RowSketch | None,
        exact: bool,
        weighing: Weighing,
        sample: RowSample | None,
        empty: Callable[[AnyTap, Batch, Reading], Statistics],
        counted: int,
        tick: Callable[[int, Statistics | None, Callable[[], None]], None],
    ) -> None:
        self.statistics, self._held_rows, self._weighing = statistics, held, weighing
        self._exact, self._sample, self._empty, self._tick = exact, sample, empty, tick
        self._pieces: list[_Piece] = []
        self._number, self._bytes, self._rows = counted, 0, 0
        self._form: tuple[object, ...] = ()  # of the pieces that wait
        self._sums: list[Tensor] = []
        self._first: Reading | None = None
        self._held: set[int] = set()  # memory of the pieces that wait
        self._static = statistics is not None and statistics.static
        self._looks: list[tuple[int, list[_Piece], Tensor]] = []

    def take(self, tap: AnyTap, batch: Batch) -> None:
        """Run the model on a batch, and add it, perhaps later."""
        with _named(self._number, 1):
            piece = self._piece(tap, batch)
        if (form := piece.form()) != self._form:
            self.flush(tap)
        self._form = form
        if _large(piece):
            with _named(self._number, 1):
                self._multiply(tap, piece)
        self._pieces.append(piece)
        self._number += 1
        if not self._gathers(piece):
            self.flush(tap)

    def flush(self, tap: AnyTap) -> None:
        """Add the batches that wait, as one; large ones have been multiplied already."""
        pieces, first = self._pieces, self._number - len(self._pieces)
        if not pieces:
            return
        self._pieces, self._bytes, self._rows, self._held = [], 0, 0, set()
        some = any(map(_large, pieces))
        with _named(first, len(pieces)):
            exact = self.statistics is None or self.statistics.exact
            whole = _Piece.join(pieces, inputs=not (some and exact))
            parts = pieces if some else [whole]
            for piece in parts:
                if not (some and _large(piece)):
                    self._multiply(tap, piece)
            self._recognise(whole, [piece.reading.inputs for piece in parts])
        sums, self._sums = torch.stack(self._sums).sum(0), []
        self._looks.append((first, pieces if sums.device.type == "cpu" else pieces[:1], sums))
        if sums.device.type == "cpu" or len(self._looks) == _CHECK_EVERY:
            self.look()
        if self.statistics is not None:
            self.statistics.static = self._static
        self._tick(self._number, self.statistics, self.look)

    def look(self) -> None:
        """Refuse NaN and infinity in the latest blocks; an accelerator is waited for."""
        looks, self._looks = self._looks, []
        for first, pieces, sums in looks:
            totals = sums.tolist()
            if all(map(math.isfinite, totals)):
                continue
            bad = [not bool(piece.sums.isfinite().all()) for piece in pieces]
            place = bad.index(True) if True in bad else 0
            names = sorted(spoilt(pieces[place].batch, torch.ones(0, dtype=torch.bool)) - {""})
            what = "features" + f", from {', '.join(names)} of the inputs" * bool(names)
            what = "targets or predictions" if math.isfinite(totals[0]) else what
            raise ValueError(
                f"Batch {first + place}{'' if True in bad else ' or one of the next'}: NaN or "
                f"infinity in the {what}. Clean the data, or check that the model has not diverged."
            )

    def _gathers(self, piece: _Piece) -> bool:
        reading, samples = piece.reading, len(piece.reading.output)
        self._rows += len(reading.inputs)
        alone = self._static or not piece.batch.kept or self._weighing.gradients is not None
        if alone or any(getattr(leaf, "shape", ())[:1] != (samples,) for leaf in piece.leaves):
            return False
        self._bytes += reading.inputs.nbytes + sum(leaf.nbytes for leaf in piece.leaves)
        most_rows, most_bytes = _largest_block(reading.inputs.device)
        return self._rows < most_rows and self._bytes < most_bytes

    def _piece(self, tap: AnyTap, batch: Batch) -> _Piece:
        reading = read(tap, batch)
        if not len(reading.inputs):
            raise ValueError("the batch is empty; drop it.")
        if reading.inputs.requires_grad or reading.output.requires_grad:
            reading = reading.detached()
        target, plain = batch.target, not batch.kwargs and _all_tensors(batch.args)
        leaves = list(batch.args) if plain else tree_leaves([batch.args, batch.kwargs])
        if target is not None and target.shape != reading.output.shape:
            reading.target_rows(target)  # which checks the shape
            target = target.reshape(reading.output.shape)
        squared = target is None or isinstance(self._weighing.loss, MSE)
        rows = None if squared else reading.target_rows(target)
        weights, importance = self._weighing(batch, reading, rows)
        piece = _Piece(batch, leaves, reading, target, _shared_weights(weights), importance)
        return self._own(piece)

    def _own(self, piece: _Piece) -> _Piece:
        """The piece, in memory that nobody writes to, as far as it waits for others."""
        reading = piece.reading
        if not piece.batch.kept:
            small = len(reading.inputs) < _SMALL and reading.inputs.device.type == "cpu"
            return piece.copied() if small and self._weighing.gradients is None else piece
        if self._first is None:
            self._first = reading  # held, so that nobody is given its memory again
            return piece._replace(reading=reading.copied())
        mine = {reading.output.data_ptr(), reading.inputs.data_ptr()}
        self._static |= bool(mine & {self._first.output.data_ptr(), self._first.inputs.data_ptr()})
        if mine & self._held and not self._static:
            raise ValueError(
                "the model writes what it computes into memory of an earlier pass, which was still "
                "needed. Pass the data as a list of batches, each of which is then added at once."
            )
        self._held |= mine
        return piece

    def _multiply(self, tap: AnyTap, piece: _Piece) -> None:
        """Into the Gram; what NaN would spoil is kept, not read."""
        batch, reading, weights = piece.batch, piece.reading, piece.weights
        if self.statistics is None:
            empty = self._empty(tap, batch, reading)
            self.statistics = replace(empty, exact=self._exact, sample=self._sample)
        own, gram, ones = self.statistics, self.statistics.gram, reading.ones
        rows = (reading.inputs, weights, _counted(piece.error, weights))
        features, laid, residuals = _flat(tap.layout, *rows)
        if features.shape[-1] + ones != gram.width:
            raise ValueError(
                f"the readout has {features.shape[-1] + ones} features here and {gram.width} in "
                "the data before. All batches must pass through the same readout."
            )
        if laid is not None and laid.shape[1] > 1 and gram.targets is None:
            gram = own.gram = gram.expand(laid.shape[1])
        gram.update(features, laid, residuals, ones=ones)
        cheap = ones and gram.targets is None
        self._sums.append(gram.totals if cheap else _total(features, residuals))
        if self._weighing.gradients is not None:
            for rows in self._weighing.gradients.rows(tap, batch):
                features, laid, residuals = _flat(tap.layout, *rows)
                self._sums.append(_total(features, residuals))
                gram.update(features, laid, residuals, moments=residuals is not None)

    def _recognise(self, piece: _Piece, features: list[Tensor]) -> None:
        own, held = self.statistics, self._held_rows
        assert own is not None
        hashes, own.exact = piece.reading.hashes(piece.batch, held, exact=own.exact)
        own.sketch.add(hashes)
        own.sample = _sampled(own, piece, hashes, features)


class _named:
    """Errors that name the batches; a class, since it is entered for every batch."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count = first, count

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError):
            last = self._first + self._count - 1
            some = f"Batch {last}" if self._count == 1 else f"Batches {self._first} to {last}"
            raise ValueError(f"{some}: {error}") from error


def _all_tensors(values: Iterable[Any]) -> bool:
    return all(isinstance(value, Tensor) for value in values)


def _large(piece: _Piece) -> bool:
    inputs = piece.reading.inputs
    return len(inputs) >= _SMALL if inputs.device.type == "cpu" else inputs.nbytes >= 1 << 26


def _sampled(
    statistics: Statistics, piece: _Piece, hashes: Tensor, features: list[Tensor]
) -> RowSample | None:
    """The sample with a batch's rows in it; none once rows lack residuals or differ in shape."""
    sample, own, error = statistics.sample, piece.reading, piece.error
    rows = len(own.inputs)
    alike = own.inner[own.axis] == statistics.targets and rows % len(hashes) == 0
    if sample is None or error is None or not alike:
        return None
    importance, weights, mean = piece.importance, piece.weights, own.rows(own.output)
    hashes, total = output_hashes(hashes, rows, importance), piece.batch.total
    if importance is not None or weights is not None:  # some may have no target: above every limit
        known = error.isfinite() if importance is None else error.isfinite() & (importance > 0)
        hashes, total = torch.where(known.any(1), hashes, NO_LIMIT), None
        error = torch.where(known, error, torch.nan)
    sample.add(
        hashes,
        expected=None if total is None else total * (rows // len(own.output)),
        ones=own.ones,
        features=features,
        mean=mean,
        residual=error,
        weight=torch.ones_like(error) if weights is None else weights.expand_as(error),
        importance=importance,
        counts=own.counts,
    )
    return sample


def _empty(
    tap: AnyTap, batch: Batch, reading: Reading, precision: PrecisionLike, gram_kind: type[Gram]
) -> Statistics:
    targets, inputs = reading.inner[reading.axis], reading.inputs
    own = targets if tap.layout == "separate" else None
    made = precision_for(precision if gram_kind is Gram else "double", inputs)
    width, device = inputs.shape[-1] + reading.ones, inputs.device
    require_memory(gram_kind.copies, width, own, device)
    gram = gram_kind(width, targets=own, device=device, precision=made)
    kind, raw = kind_of(batch.raw), batch.raw
    number = max(1, len(raw) - 1) if kind.startswith("tuple") else len(batch.args)
    return Statistics(gram, RowSketch(), targets, number, kind, columns=batch.columns)


def _flat(
    layout: str, features: Tensor, weights: Tensor | None, residuals: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Joint features: each target's row is a row of the one Gram."""
    if layout != "joint":
        return features, weights, residuals
    rows, targets = features.shape[:2]
    if weights is not None:
        weights = weights.expand(rows, targets).reshape(-1, 1)
    residuals = None if residuals is None else residuals.reshape(-1, 1)
    return features.flatten(0, 1), weights, residuals


def _shared_weights(weights: Tensor | None) -> Tensor | None:
    if weights is None or weights.shape[1] == 1:
        return weights
    return weights[:, :1] if torch.equal(weights, weights[:, :1].expand_as(weights)) else weights


def _check_curvature(curvature: Tensor) -> None:
    if not bool(torch.isfinite(curvature).all()):
        raise ValueError("the loss's curvature is not finite; check the targets and the loss.")
    smallest = float(curvature.min())
    if smallest < 0:
        raise ValueError(
            f"the loss has negative curvature ({smallest:.3g}) at some predictions. A rigidity "
            "needs a loss that is convex in the prediction: use 'mse', 'huber' or 'log-cosh'."
        )


@lru_cache
def _largest_block(device: torch.device) -> tuple[int, int]:
    """Rows and bytes of a block: a CPU would rather use warm memory again, others must not wait."""
    if device.type != "cuda":
        return _SMALL, 1 << 24
    return 1 << 19, min(1 << 28, torch.cuda.get_device_properties(device).total_memory >> 9)


def _counted(error: Tensor | None, weights: Tensor | None) -> Tensor | None:
    """Residuals; none of rows without a weight, which may lack a target."""
    return error if error is None or weights is None else torch.where(weights > 0, error, 0.0)


def _total(features: Tensor, residuals: Tensor | None) -> Tensor:
    """Sums of features and residuals, which NaN or infinity would spoil.

    They are not read yet, so that an accelerator runs on.
    """
    short = torch.finfo(features.dtype).bits < 32
    total = features.sum(dtype=torch.float32 if short else None).to(torch.float64)
    return torch.stack([total, total if residuals is None else residuals.sum()])
