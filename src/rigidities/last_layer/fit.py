"""What a fit has learnt of a model's readout, its calibration, what changes them, and files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.calibration import Calibration, Given, Wanted
from ..calibration.conformal import Groups
from ..calibration.report import CalibrationReport
from ..data.batches import Batch, BatchFormat
from ..data.feed import Feed
from ..data.sketch import fingerprint
from ..data.slots import InputName
from ..data.storage import Snapshot
from ..losses import NAMED, Loss
from ..models.calling import Source
from ..models.shadow import placement
from ..models.threads import Lock
from ..notices import NO_FIT, NotFittedError, notify
from ..posterior.gram import PrecisionLike
from ..posterior.posterior import Posterior
from ..posterior.root import gram_kind
from .accumulation import Weighing, accumulate, settled
from .checkpoint import Checkpoint
from .distributed import Job, job
from .error_bars import ErrorBars
from .gradients.loss import (
    GradientLoss,
    GradientTarget,
    calibration_loss,
    gradient_scale,
    gradient_sums,
)
from .merging import combined, identity, named, require_alike, require_apart
from .novelty import Alarm, NoveltyScale
from .readout.binding import Binding, model_fingerprint
from .readout.tap import AnyTap
from .refit import Refitted, refitted
from .statistics.parts import Plan
from .statistics.statistics import Statistics
from .validation import Validation, calibration_data, require_groups

DEFAULT_RIDGE = 1e-6
"""Ridge before calibration, relative to the Gram's mean diagonal."""

UNCALIBRATED = (
    "The error bars are not calibrated: scale 1 and a default ridge are used. Call calibrate(x, y)."
)
STALE = "Data were added or removed since the calibration. Call calibrate(x, y) again."

_LOSSES: dict[str, type[Any]] = {type(one).__name__: type(one) for one in NAMED.values()}


@dataclass(frozen=True)
class Learnt:
    """One state of a fit. It never changes, so that any number of threads may read it.

    Attributes:
        binding: the tie to the model.
        statistics: what the data left; nothing is added to it any more.
        weighing: loss and weights; None where they were functions and the fit is from a file.
        factorised: the posterior, where it is known already.
    """

    binding: Binding
    statistics: Statistics
    weighing: Weighing | None
    report: CalibrationReport | None = None
    factorised: Posterior | None = None
    _alarms: list[Alarm] = field(default_factory=list, init=False, repr=False)
    _bars: dict[torch.dtype, ErrorBars] = field(default_factory=dict, init=False, repr=False)
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)

    @property
    def calibration(self) -> Calibration:
        """What was chosen; before that, scale 1, no noise and a ridge relative to the Gram."""
        if self.report is not None:
            return self.report.calibration
        gram = self.statistics.gram
        ridge = DEFAULT_RIDGE * float(gram.diagonal.mean())
        return Calibration.unscaled(ridge, self.statistics.targets, gram.device)

    @property
    def gradient_scale(self) -> Tensor:
        """Of derivatives by the inputs: calibrated on their targets, else the scale."""
        own = None if self.report is None else self.report.gradient_scale
        return self.calibration.scale if own is None else own

    @property
    def posterior(self) -> Posterior:
        """Factorised once, when first needed."""
        with self._lock:
            if self.factorised is None:
                chosen = self.calibration
                whole = Posterior.from_gram(self.statistics.gram, ridge=chosen.ridge)
                object.__setattr__(self, "factorised", whole.with_scale(chosen.scale))
            assert self.factorised is not None
            return self.factorised

    @property
    def bars(self) -> ErrorBars:
        """Error bars in the model's precision."""
        dtype = self.binding.placement[1]
        if dtype not in self._bars:
            with self._lock:
                self._bars[dtype] = ErrorBars.of(self.posterior, self.calibration, dtype)
        return self._bars[dtype]

    def alarm(self, tap: AnyTap) -> Alarm | None:
        """What measures distances in the layers of a tap; None where the fit has watched none."""
        sums = self.statistics.layers
        if sums is None:
            return None
        with self._lock:
            if not self._alarms:
                # What enters a coarser model's layers is watched in single precision.
                double = self.binding.placement[1] == torch.float64
                dtype = torch.float64 if double else torch.float32
                self._alarms.append(Alarm.of(tap.layers, sums, dtype))
            return self._alarms[0]

    @property
    def watches(self) -> bool:
        """Whether the fit has watched what enters the layers."""
        return self.statistics.layers is not None

    def novelty_scale(self, tap: AnyTap) -> NoveltyScale | None:
        """What tells novelty; None where no rows have told yet what is usual.

        Raises:
            ValueError: the fit has not watched the layers.
        """
        alarm = self.alarm(tap)
        if alarm is None:
            raise ValueError(
                "This fit has not watched what enters the layers: call fit(x, y, novelty=True), "
                "then calibrate(x, y)."
            )
        if self.report is None or not self.report.novelty:
            return None
        usual = [self.report.novelty[name] for name in alarm.layers]
        device = self.statistics.gram.device
        return NoveltyScale(alarm, torch.tensor(usual, dtype=torch.float64, device=device))

    def identity(self, loss: Any) -> dict[str, Any]:
        """What others must agree in; `loss` stands for the loss and weights."""
        own = {name: named(one) for name, one in vars(self.binding.source).items()}
        return identity(self.binding.header() | own, self.statistics, loss)

    def known_weighing(self, name: str = "this fit") -> Weighing:
        """The loss and weights of the fit; refused where a file could not hold them."""
        if self.weighing is None:
            raise ValueError(
                f"The loss or sample weights of {name} were functions, which a file does not "
                "hold. Call set_loss(loss, sample_weight) with the same ones first."
            )
        return self.weighing

    def with_rows(self, statistics: Statistics) -> Learnt:
        """The same after rows came or went; the calibration is stale."""
        report = None if self.report is None else replace(self.report, stale=True)
        return replace(self, statistics=statistics, report=report, factorised=None)

    def to(self, device: torch.device) -> Learnt:
        """The same on another device; statistics stay float64."""
        posterior = self.factorised
        return replace(
            self,
            statistics=self.statistics.to(device),
            report=None if self.report is None else self.report.to(device),
            factorised=None if posterior is None else posterior.to(device),
        )

    def snapshot(self, *, probes: bool = True, rows: bool = False) -> Snapshot:
        """Everything but the model; `probes`: with a few inputs of the fit, `rows`: its sample."""
        if rows and self.statistics.sample is None:
            raise ValueError(
                "This fit keeps no rows: it had no targets or sample=0, or was loaded from a "
                "file without them. Call fit(x, y) again, or save with rows=False."
            )
        tie = self.binding.snapshot(probes=probes)
        statistics = self.statistics.snapshot(rows=rows)
        tensors = statistics.tensors | tie.tensors
        header = {
            "kind": "fit",
            **statistics.header,
            "loss": _loss_state(self.weighing),
            **tie.header,
        }
        if self.report is not None:
            tensors |= self.report.tensors()
            header |= self.report.header()
        return Snapshot(tensors, header)


class ReadoutFit:
    """The state behind `LastLayerRigidity`; an error or interruption leaves it as it was.

    What changes it (`fit`, `revise`, `calibrate`, `take`) runs one call after the other, whatever
    the threads; meanwhile others read the state before.

    Attributes:
        unbound: the tie to the model, without a readout.
        learnt: the state; None before a fit.
    """

    def __init__(self, binding: Binding, target: Callable[[Any], Tensor] | None) -> None:
        self.unbound, self.model, self.target = binding, binding.model, target
        self.learnt: Learnt | None = None
        self._said: set[str] = set()
        self._changing, self._swapping, self._changed = Lock(), Lock(), False

    def fit(
        self,
        train: Any,
        weighing: Weighing,
        *,
        sample: int,
        precision: PrecisionLike,
        method: str,
        novelty: bool,
        checkpoint: Checkpoint,
        process_group: Any = None,
        **options: Any,
    ) -> None:
        """Accumulate the Gram over the training data, and keep a `sample` of so many rows.

        With `novelty` what enters every layer is summed too.
        """
        plan = Plan(sample, precision=precision, gram=gram_kind(method, precision))
        choices = {
            "precision": precision,
            "method": method,
            "sample": sample,
            "novelty": novelty,
        }
        with self._alone(), self.job(process_group, "fit", weighing, **choices) as others:
            binding, begun = self._begun(checkpoint, others, weighing, choices)
            names = None if begun is None else begun.columns
            feed = self.feed(weighing)
            feed = replace(feed, format=replace(feed.format, inputs=None, kind=None, columns=names))
            options["passing"] = checkpoint.passing
            batches = feed(train, "fit", any_order=True, **_shown(options, others))
            statistics = accumulate(
                begun,
                binding.find,
                batches,
                weighing,
                plan,
                counted=checkpoint.counted,
                after_block=checkpoint.tick,
                meanwhile=binding.close,
                read_first=binding.read_first,
            )
            if others.size > 1:
                binding, statistics = self._agreed(others, binding, statistics, weighing)
            statistics = settled(statistics)
            if self.target is None:
                statistics.say_unlabelled()
            learnt = Learnt(binding, statistics, weighing)
            if learnt.watches:
                learnt.alarm(binding.current())  # which refuses what is not finite
            others.agree()
            self._swap(learnt)
            checkpoint.done()

    def _begun(
        self, checkpoint: Checkpoint, others: Job, weighing: Weighing, choices: dict[str, Any]
    ) -> tuple[Binding, Statistics | None]:
        """The tie and the statistics of an interrupted fit; a new tie and None without one."""
        tie, statistics = self.unbound.again(watching=choices["novelty"]), None
        if checkpoint.path is not None:
            asked = self._asked(weighing) | choices
            if learnt := checkpoint.resume(asked, others.part, partial(_learnt, unbound=tie)):
                tie, statistics = learnt.binding, learnt.statistics

            def snapshot(so_far: Statistics) -> Snapshot:
                rows = so_far.sample is not None
                return Learnt(tie, so_far, weighing).snapshot(rows=rows)

            checkpoint.snapshot = snapshot
        return tie, statistics

    def _agreed(
        self, others: Job, binding: Binding, found: Statistics | None, weighing: Weighing
    ) -> tuple[Binding, Statistics]:
        """The tie to the model of the first process that had data, and the rows of all."""

        def described() -> Snapshot | None:
            if found is None:
                return None
            tie = binding.snapshot()
            alike = identity(binding.header(), found, named(weighing))
            alike = json.loads(json.dumps(alike))  # as it is on other processes
            return replace(tie, header=tie.header | {"identity": alike})

        def first_tie(parts: Iterator[Snapshot | None]) -> Snapshot:
            ties = {rank: tie for rank, tie in enumerate(chain([described()], parts)) if tie}
            if not ties:
                return Snapshot({}, {"rank": None})
            alike = [tie.header["identity"] for tie in ties.values()]
            require_alike(alike, [f"Rank {rank}" for rank in ties])
            rank, tie = next(iter(ties.items()))
            return replace(tie, header=tie.header | {"rank": rank})

        tie = others.together(described, first_tie)
        whole = others.statistics(found, lambda parts: settled(combined(parts)))
        first = tie.header["rank"]
        if found is None or (others.rank != first and "probes" in tie.header):
            binding = self.unbound.taken(tie)
        binding.current()
        return binding, whole

    def revise(
        self,
        data: Any,
        *,
        remove: bool,
        check: bool = True,
        process_group: Any = None,
        **options: Any,
    ) -> None:
        """Add data, or take them out; `check` that they are in the fit."""
        what = "forget" if remove else "partial_fit"
        with self._alone(), self.job(process_group, what, options=check) as others:
            learnt, tap = self._thorough()
            weighing, own = learnt.known_weighing(), learnt.statistics
            batches = self.feed(weighing)(data, what, any_order=True, **_shown(options, others))
            alone = others.size == 1
            precision: PrecisionLike = "auto" if remove else own.gram.precision
            added = accumulate(
                own.clone() if alone and not remove else None,
                lambda _: tap,
                batches,
                weighing,
                own.plan(precision),
            )

            def fold(parts: Iterator[Statistics | None]) -> Statistics:
                new = combined(parts)
                if new is None or (alone and not remove):
                    return settled(new)
                if remove:
                    return own.without(new, check=check)
                return settled(own.clone().merge(new))

            # rows that leave are looked up one by one, so that none of them may be left out
            own = others.statistics(added, fold, trim=not remove)
            others.agree()
            self._swap(learnt.with_rows(own))

    def merge(self, others: Mapping[str, ReadoutFit], *, check: bool) -> None:
        """Add the rows of other fits, by what errors call them; see `LastLayerRigidity.merge`."""
        with self._alone():
            own = [("this fit", self.on_device())]
            rest = [(name, other.known(f" of {name}")) for name, other in others.items()]
            self._swap(_merged(own + rest, check=check))

    def calibrate(
        self,
        valid: Any,
        train: Any,
        wanted: Wanted,
        *,
        gradients: InputName,
        gradient_target: GradientTarget | None,
        conformal: Any = None,
        groups: Any = None,
        merge_groups: int | None = None,
        process_group: Any = None,
        **options: Any,
    ) -> CalibrationReport:
        """Choose ridge, scale and noise; see `LastLayerRigidity.calibrate`."""
        require_groups(groups, conformal, merge_groups)
        apart = None if conformal is None or isinstance(conformal, float) else conformal
        share = conformal if apart is None else True
        choices = named([wanted, share, groups, merge_groups, gradients, gradient_target])
        with self._alone(), self.job(process_group, "calibrate", options=choices) as others:
            weighing = self.known().known_weighing()
            if gradients is not None or gradient_target is not None:
                judged = calibration_loss(weighing.gradients, gradients, gradient_target)
                weighing = replace(weighing, gradients=judged)
            data, train = calibration_data(wanted.criterion, valid, train)
            forces = weighing.gradients
            forces = None if forces is None or forces.target is None else forces
            data = list(data) if isinstance(data, Iterator) and forces is not None else data
            learnt, tap = self._thorough()
            source = self.feed(weighing)

            def feed(data: Any) -> Iterator[Batch]:
                return source(data, "calibrate", any_order=True, **_shown(options, others))

            known, posterior = learnt.statistics, learnt.posterior
            labels = groups if callable(groups) else None
            hashed = conformal is not None or others.size > 1
            alarm = learnt.alarm(tap)
            work = Validation(tap, known, posterior, weighing, wanted, labels, hashed, alarm)
            with torch.enable_grad():
                look, compared = work.gathered, not wanted.left_out
                parts = (
                    None if data is None else look(feed(data), compared=compared),
                    None if apart is None else look(feed(apart)),
                    None if train is None else look(feed(train), compared=False),
                )
                digits = 4 * torch.finfo(placement(self.model)[1]).eps  # of a feature, a few times
                report = work.together(others, parts, conformal, groups, merge_groups, digits)
                final = posterior.with_ridge(report.ridge).with_scale(report.scale)
                if forces is not None:
                    dtype = placement(self.model)[1]
                    sums = gradient_sums(tap, feed(data), final, dtype, forces)
                    scale = _gradient_scale(others, sums)
                    report = replace(report, gradient_scale=scale.to(report.scale.device))
            others.agree()
            self._swap(replace(learnt, report=report, factorised=final))
            self._said.discard("stale")
            return report

    def refit(
        self, valid: Any, *, add: bool, process_group: Any = None, **options: Any
    ) -> tuple[ReadoutFit, Refitted]:
        """The same for a copy of the model with another readout; see `LastLayerRigidity.refit`."""
        with self.job(False if valid is None else process_group, "refit", options=add) as others:
            learnt, _ = self._thorough()
            own, weighing, rows = learnt.statistics, learnt.known_weighing(), None
            if valid is not None:
                rows = partial(self.feed(weighing), valid, "refit", any_order=True, **options)
            parts = (learnt.binding, own, learnt.posterior, weighing, rows)
            tied, own, report = refitted(*parts, add=add, others=others)
        other = ReadoutFit(tied, self.target)
        other.learnt = Learnt(tied, own, weighing)
        return other, report

    def known(self, whose: str = "") -> Learnt:
        """The state, if there is a fit."""
        if self.learnt is None:
            raise NotFittedError(NO_FIT.format(f"fit(x, y){whose}"))
        return self.learnt

    def ready(self) -> tuple[AnyTap, Learnt]:
        """The readout and the state; warns once where the bars are uncalibrated or stale."""
        learnt = self.known()
        tap = learnt.binding.current()
        if learnt.statistics.gram.device != learnt.binding.placement[0]:
            learnt = self.on_device()
            tap = learnt.binding.current()
        if learnt.report is None:
            self.say_once("uncalibrated", UNCALIBRATED)
        elif learnt.report.stale:
            self.say_once("stale", STALE)
        return tap, learnt

    def feed(self, weighing: Weighing | None = None) -> Feed:
        """How data reach the model, for the loss of the fit or another."""
        learnt = self.learnt
        weighing = learnt.weighing if weighing is None and learnt is not None else weighing
        gradients = None if weighing is None else weighing.gradients
        apart = None if gradients is None else gradients.apart
        whole = self.unbound.source.forward is not None
        batch_format = BatchFormat(whole, self.target, apart=apart)
        if learnt is not None:
            own = learnt.statistics
            batch_format = replace(
                batch_format, inputs=own.inputs, kind=own.kind, columns=own.columns
            )
        return Feed(self.model, batch_format)

    def batches(
        self,
        data: Any,
        what: str,
        batch_size: int | None,
        progress: bool | None,
        once: bool = False,
    ) -> Iterator[Batch]:
        """Batches of data whose targets are of no interest; see `Feed` for `once`."""
        feed = self.feed().unlabelled()
        return feed(data, what, batch_size=batch_size, progress=progress, once=once)

    def on_device(self) -> Learnt:
        """The state, brought to the model's device."""
        learnt, device = self.known(), placement(self.model)[0]
        if learnt.statistics.gram.device == device:
            return learnt
        with self._swapping:
            if self.learnt is learnt:  # else a change has come in between
                self.learnt = learnt.to(device)
            return self.known()

    def set_weighing(self, weighing: Weighing) -> None:
        """Give the loss again that a file does not hold; refused where it is known."""
        with self._alone():
            if self.known().weighing is not None:
                raise ValueError("The loss of this fit is known. To use another, call fit again.")
            self._swap(replace(self.known(), weighing=weighing))

    def set_functions(self, noise: Given | None, groups: Groups | None) -> None:
        """Give those of the calibration again that a file does not hold."""
        with self._alone():
            learnt = self.known()
            if learnt.report is None:
                raise ValueError("This fit is not calibrated: load it without noise= and groups=.")
            own = learnt.report.calibration.with_functions(noise, groups)
            self._swap(replace(learnt, report=replace(learnt.report, calibration=own)))

    def say_once(self, key: str, message: str) -> None:
        """Warn, unless it was said before."""
        if key not in self._said:
            self._said.add(key)
            notify(message)

    def take(self, given: Snapshot | None) -> None:
        """Take up a fit from a snapshot; None for no fit."""
        with self._alone():
            if given is None:
                return self._swap(None)
            with given.opened():
                learnt = _learnt(given, self.unbound)
            self._swap(learnt)

    def job(
        self, process_group: Any, what: str, weighing: Weighing | None = None, **choices: Any
    ) -> AbstractContextManager[Job]:
        """The processes of a call, which must agree in the model, the loss, and the fit if any."""

        def same() -> dict[str, Any]:
            if weighing is not None:
                return self._asked(weighing) | choices
            known = self.known()
            state = known.snapshot(probes=False, rows=known.statistics.sample is not None)
            report = known.report
            chosen = {} if report is None else report.tensors()
            rows = fingerprint((name, t) for name, t in state.tensors.items() if name not in chosen)
            same = known.identity(named(known.weighing)) | {"rows": rows}
            if what != "calibrate":  # which replaces it
                header = None if report is None else named(report.header())
                same["calibration"] = [fingerprint(chosen.items()), header]
            return same | choices

        return job(process_group, what, same, placement(self.model)[0])

    def _asked(self, weighing: Weighing) -> dict[str, Any]:
        """What a fit is asked for, which must be the same in all its parts."""
        own = self.unbound
        functions = {"target": self.target, **vars(own.source)}
        readout = {"layer": own.layer} | {name: named(one) for name, one in functions.items()}
        weights = model_fingerprint(self.model)
        return {"weights": weights, "readout": readout, "loss": named(weighing)}

    def _thorough(self) -> tuple[Learnt, AnyTap]:
        learnt = self.on_device()
        return learnt, learnt.binding.current(thorough=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One change after the other; one inside another would be lost, and is refused."""
        with self._changing:
            if self._changed:
                raise ValueError(
                    "fit, partial_fit, forget or calibrate was called from within another of them, "
                    "by its data or functions. Let one end before the next begins."
                )
            self._changed = True
            try:
                yield
            finally:
                self._changed = False

    def _swap(self, learnt: Learnt | None) -> None:
        with self._swapping:
            self.learnt = learnt


def merge_files(paths: Sequence[Path], out: Path, say: Callable[[str], None], check: bool) -> None:
    """Write the fit to the rows of all files' fits, without a model; `say` is told of each."""

    def read(path: Path) -> tuple[str, Learnt]:
        given = Snapshot.read(path, holds="fit")
        with given.opened():
            learnt = _learnt(given, Binding(nn.Identity(), Source(), None))
        rows, judged = learnt.statistics.gram.count, learnt.statistics.sketch.limit / (1 << 63)
        say(f"{path}: {rows:,} rows, {judged:.1%} of them known by their hashes")
        return str(path), learnt

    whole = _merged(map(read, paths), check=check)
    whole.snapshot(rows=whole.statistics.sample is not None).write(out)
    say(f"Wrote {out}: {whole.statistics.gram.count:,} rows. Load it, then calibrate(x, y).")


def _merged(fits: Iterable[tuple[str, Learnt]], *, check: bool) -> Learnt:
    """The first fit with the rows of the others, each after what errors call it."""
    name, first = next(fits := iter(fits))
    whole, sketches = first.statistics.clone(), {name: first.statistics.sketch}
    for other, learnt in fits:
        both = {name: first, other: learnt}
        alike = [own.identity(vars(own.known_weighing(called))) for called, own in both.items()]
        require_alike(alike, list(both))
        whole.merge(learnt.statistics)
        sketches[other] = learnt.statistics.sketch
    if check:
        require_apart(sketches)
    if whole.sample is None and whole.gram.square is not None:
        notify(
            "Not every part keeps a sample of its rows, so that the merged fit keeps none and "
            "calibrate() knows validation rows alone. Save parts by save(path, rows=True)."
        )
    return first.with_rows(whole)


def _learnt(given: Snapshot, unbound: Binding) -> Learnt:
    """What a snapshot holds; no weighing where the loss or weights were functions."""
    device = unbound.placement[0]
    given = given.to(device)
    header = given.header
    statistics = Statistics.from_snapshot(given, device)
    report = None
    if header.get("report") is not None:
        report = CalibrationReport.from_state(header, given.tensors)
    return Learnt(unbound.taken(given), statistics, _loss_from(header["loss"]), report)


def _gradient_scale(others: Job, sums: Tensor) -> Tensor:
    """The scale of derivatives, from the sums of all processes."""

    def folded(parts: Iterator[Snapshot | None]) -> Snapshot:
        every = [sums, *(part.tensors["sums"] for part in parts if part is not None)]
        return Snapshot({"scale": gradient_scale(part.cpu() for part in every)}, {})

    return others.together(lambda: Snapshot({"sums": sums}, {}), folded).tensors["scale"]


def _shown(options: dict[str, Any], others: Job) -> dict[str, Any]:
    if others.rank and options.get("progress") is None:
        return options | {"progress": False}
    return options


def _loss_state(weighing: Weighing | None) -> dict[str, Any] | None:
    if weighing is None:
        return None
    name, gradients = type(weighing.loss).__name__, weighing.gradients
    if weighing.sample_weight is not None or name not in _LOSSES:
        return None
    if gradients is not None and any(callable(value) for value in vars(gradients).values()):
        return None
    state = {"name": name, "settings": vars(weighing.loss)}
    return state if gradients is None else {**state, "gradients": vars(gradients)}


def _loss_from(state: dict[str, Any] | None) -> Weighing | None:
    if state is None:
        return None
    if state["name"] not in _LOSSES:
        raise ValueError(
            f"The loss {state['name']!r} of this file is not known here, only {', '.join(_LOSSES)}."
        )
    loss: Loss = _LOSSES[state["name"]](**state["settings"])
    gradients = state.get("gradients")
    return Weighing(loss, gradients=None if gradients is None else GradientLoss(**gradients))
