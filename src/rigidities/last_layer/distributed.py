"""Many processes, each with a share of the data, that end with one and the same result.

The processes of a job exchange nothing while each goes through its own data. At the end of its pass
a process waits for the others in a round of `torch.distributed.all_gather_object`: each says that
it is ready, or what went wrong, and hands over what all of them need. If one has failed, all raise.
A call consists of a few such rounds, the same ones on every process, and the last one ends it: a
process that fails between two rounds says so in the next one. Matrices are added up by
`all_reduce`, directly after a round in which all were ready. Both give every process the same bits.

Everything goes over the user's own process group and has its timeout: a process that ends without a
word is noticed by torch, through a closed connection or through the timeout.

`open_job` gives a `Job`: for one process by itself the base class, whose methods exchange nothing,
for several `Processes`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..data.storage import Snapshot
from ..notices import notify
from ..statistics.row_sketch import RowSketch
from ..statistics.statistics import Statistics
from .merging import combined, require_alike
from .novelty.novelty import Novelty

P = TypeVar("P")
"""What a process hands over in a call; anything that can be pickled."""

_MATRIX = ".matrix"
"""How the names of those tensors end that are large and sums over all rows."""


class Job:
    """One process by itself; `Processes` are several.

    Attributes:
        rank: The number of this process among those that make the call.
        size: How many processes make the call.
        properties: What must be equal on all processes, by the names in `merging.REMEDIES`. They
            are compared in every round.
    """

    rank: int = 0
    size: int = 1

    def __init__(self) -> None:
        self.properties: dict[str, Any] = {}

    def gathered(self, part: P) -> list[P]:
        """The parts of all processes, on every process, in the order of ranks."""
        return [part]

    def collected(self, part: P) -> list[P]:
        """The parts of all processes, in the order of ranks; on the first process alone.

        The list is empty on the others, whose memory it would fill.
        """
        return [part]

    def from_first(self, part: P | None) -> P:
        """The part of the first process, on every process. The others have None."""
        first = self.gathered(part)[0]
        assert first is not None
        return first

    def statistics(self, share: Statistics | None) -> Statistics | None:
        """The statistics of the rows of all processes, on every process.

        Args:
            share: The statistics of this process's rows, which are written to; None where it had
                none.

        Returns:
            The statistics; None where no process had rows.
        """
        return share

    def novelty(self, share: Novelty | None) -> Novelty | None:
        """The novelty of the rows of all processes, on every process.

        Args:
            share: The novelty of this process's rows; None where it had none.
        """
        return share

    def agree(self) -> None:
        """Wait until all can end the call. Call it before changing anything that stays."""


@contextmanager
def open_job(group: Any, call: str, device: torch.device | str = "cpu") -> Iterator[Job]:
    """The processes that make one call together, this one among them.

    Args:
        group: A process group; None for that of the job, where torch.distributed is initialised;
            False for this process alone.
        call: The call's name.
        device: Where tensors of other processes are brought.

    Raises:
        ValueError: Processes make different calls, or differ in what must be equal, or one of them
            refused its data.
        RuntimeError: One of them has failed with another error, has ended, or was not there within
            the timeout of the group.
    """
    is_alone = group is False or not (dist.is_available() and dist.is_initialized())
    if not is_alone and dist.get_rank(group) < 0:
        raise ValueError(
            f"This process is not in the group that was given as process_group=. Call {call} only "
            "on the processes of the group, or set process_group=False."
        )
    if is_alone or dist.get_world_size(group) == 1:
        yield Job()
        return
    processes = Processes(group, call, device)
    try:
        yield processes
        processes.agree()
    except BaseException as error:
        processes.fail(error)
        raise


class Processes(Job):
    """This process among several, all in the same call.

    Args:
        group: Their process group; None for that of the job.
        call: The call's name.
        device: Where tensors of other processes are brought.
    """

    def __init__(self, group: Any, call: str, device: torch.device | str) -> None:
        super().__init__()
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group: Any = dist.group.WORLD if group is None else group
        self._call = call
        self._device = torch.device(device)
        self._has_met = False  # whether there was a round, so that all have read their data
        self._is_over = False  # whether this call has no further round

    def gathered(self, part: P) -> list[P]:
        """As in `Job`. It is one round."""
        return [self._unpacked(status.part) for status in self._round(part)]

    def collected(self, part: P) -> list[P]:
        """As in `Job`. A round comes first, so that all are ready."""
        packed = _packed(part)
        self._round(None)
        parts: list[Any] | None = None
        if self.rank == 0:
            parts = [None] * self.size
        first = dist.get_global_rank(self._group, 0)
        with self._connected():
            dist.gather_object(packed, parts, dst=first, group=self._group)
        return [self._unpacked(other) for other in parts or []]

    def statistics(self, share: Statistics | None) -> Statistics | None:
        """As in `Job`. Matrices are reduced; all else is gathered, and merged by every process."""
        if share is not None:
            share.require_finite()
        descriptions = self.gathered(None if share is None else _description(share))
        part = None
        if share is not None:
            _take_common_form(share, descriptions)
            part = share.snapshot()
        shares = (
            None if other is None else Statistics.from_snapshot(other, self._device)
            for other in self._reduced(part)
        )
        return combined(shares, silent=self.rank > 0)

    def novelty(self, share: Novelty | None) -> Novelty | None:
        """As in `Job`. Matrices are reduced; all else is gathered, and merged by every process."""
        part = None if share is None else Snapshot(share.state(), share.header())
        whole: Novelty | None = None
        for other in self._reduced(part):
            if other is None:
                continue
            novelty = Novelty.from_state(other.header, other.tensors)
            whole = novelty if whole is None else whole.merge(novelty)
        return whole

    def agree(self) -> None:
        """The last round of a call. What fails afterwards concerns this process alone."""
        if not self._is_over:
            self._round(None)
            self._is_over = True

    def fail(self, error: BaseException) -> None:
        """Tell the others of an error, unless all know it. They hear it after their own pass."""
        if self._is_over:
            return
        self._is_over = True
        description = type(error).__name__
        if str(error):
            description = f"{description}: {error}"
        if not self._has_met:
            with suppress(Warning):  # the error comes in any case, where warnings are errors
                notify(
                    f"Rank {self.rank} has failed in {self._call} ({description}). It raises this "
                    "error when the other processes have come to the end of their data."
                )
        failure = _Failure(isinstance(error, ValueError), description)
        with suppress(RuntimeError):  # nobody is left to be told
            self._exchanged(_Status(self._call, self.properties, b"", failure))

    def _round(self, part: Any) -> list[_Status]:
        """Wait for all processes, and raise if one of them has failed or is not in this call."""
        statuses = self._exchanged(_Status(self._call, self.properties, _packed(part), None))
        self._has_met = True
        self._is_over = True  # if the following raises, it does so on all processes
        _require_same_call(statuses)
        for rank, status in enumerate(statuses):
            if status.failure is not None:
                raise _error_for(rank, status.failure, self._call)
        names = [f"Rank {rank}" for rank in range(self.size)]
        require_alike([status.properties for status in statuses], names)
        self._is_over = False
        return statuses

    def _exchanged(self, status: _Status) -> list[Any]:
        """What all processes say of themselves."""
        statuses: list[Any] = [None] * self.size
        with self._connected():
            dist.all_gather_object(statuses, status, group=self._group)
        return statuses

    def _summed(self, matrix: Tensor | None, shape: torch.Size) -> Tensor:
        """The sum of the matrices of all processes; None counts as zeros of that shape."""
        device = self._reducing_device()
        if matrix is None:
            matrix = torch.zeros(shape, dtype=torch.float64)
        total = matrix.to(device).contiguous()
        with self._connected():
            dist.all_reduce(total, group=self._group)
        return total.to(self._device)

    def _reducing_device(self) -> torch.device:
        """Where the group's backend takes tensors."""
        backend = dist.get_backend(self._group)
        if backend == "gloo":
            return torch.device("cpu")
        if backend == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return self._device

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Exchange something. If it is broken off, nothing can follow in this call."""
        is_over = self._is_over
        self._is_over = True
        try:
            yield
        except RuntimeError as problem:
            raise ProcessFailed(
                f"The processes could not meet in {self._call}: one of them has ended, or was not "
                "there within the timeout of the process group. The call changed nothing on this "
                "process. If a process has ended, start the job again. If one reads its data for "
                "longer than the others, pass a longer timeout= to init_process_group. If only "
                "one was to make this call, set process_group=False."
            ) from problem
        self._is_over = is_over

    def _unpacked(self, packed: bytes) -> Any:
        """A part of a process, with its tensors on this process's device."""
        return torch.load(io.BytesIO(packed), map_location=self._device, weights_only=False)

    def _reduced(self, part: Snapshot | None) -> Iterator[Snapshot | None]:
        """The parts of all processes, to be merged, in the order of ranks.

        Their matrices are summed already: the first part has the sums, the others zeros.

        Args:
            part: The part of this process; None where it had no rows.
        """
        matrices: dict[str, Tensor] = {}
        if part is not None:
            part, matrices = _without_matrices(part)
        parts = self.gathered(part)
        shapes: dict[str, torch.Size] = {}
        for other in parts:
            if other is not None:
                shapes.update(other.header["shapes"])
        sums = {name: self._summed(matrices.pop(name, None), shapes[name]) for name in shapes}
        for other in parts:
            if other is None:
                yield None
                continue
            reduced_matrices = {name: sums[name] for name in other.header["shapes"]}
            yield Snapshot({**other.tensors, **reduced_matrices}, other.header)
            for name, matrix in sums.items():
                sums[name] = matrix.new_zeros(()).expand_as(matrix)


class ProcessFailed(RuntimeError):
    """The failure of another process."""


class ProcessRefused(ProcessFailed, ValueError):
    """The failure of another process, whose data or options were refused."""


class _Failure(NamedTuple):
    """What went wrong on a process.

    Attributes:
        is_refusal: Whether the error was a ValueError.
        description: The error's type and text.
    """

    is_refusal: bool
    description: str


def _error_for(rank: int, failure: _Failure, call: str) -> ProcessFailed:
    """The error that a failure on another process raises on this one."""
    message = (
        f"Rank {rank} failed in {call} ({failure.description}), so the call was cancelled on all "
        "processes and changed nothing. Fix the problem there, and make the call again on all "
        "processes."
    )
    return ProcessRefused(message) if failure.is_refusal else ProcessFailed(message)


class _Status(NamedTuple):
    """What a process says in a round.

    Attributes:
        call: The name of its call.
        properties: What must be equal on all processes.
        part: What it hands over, packed.
        failure: What went wrong; None where the process is ready.
    """

    call: str
    properties: dict[str, Any]
    part: bytes
    failure: _Failure | None


def _require_same_call(statuses: list[_Status]) -> None:
    """Refuse processes that make different calls."""
    first = statuses[0].call
    for rank, status in enumerate(statuses):
        if status.call != first:
            raise ValueError(
                f"Rank 0 calls {first}, rank {rank} calls {status.call}: all processes must make "
                "the same calls in the same order. Set process_group=False for a call of a single "
                "process."
            )


def _packed(part: Any) -> bytes:
    """A part as it is sent.

    Torch's own exchange of objects would put tensors back on the accelerator of the process that
    sent them, and warns of `torch.load` in torch 2.4 and 2.5. It exchanges bytes as they are.
    """
    packed = io.BytesIO()
    torch.save(part, packed)
    return packed.getvalue()


def _description(share: Statistics) -> Snapshot:
    """The form of statistics, and the hashes of their sample of rows."""
    sketch = RowSketch(limit=0)  # without a sample on every process, there is no common one
    size = 0
    if share.kept_rows is not None:
        sketch = share.kept_rows
        size = sketch.size
    # The hashes alone, without the columns that `KeptRows.state` adds.
    return Snapshot(RowSketch.state(sketch), {"form": share.gram_sums.form, "size": size})


def _without_matrices(snapshot: Snapshot) -> tuple[Snapshot, dict[str, Tensor]]:
    """A snapshot with the shapes of its matrices in place of them, and the matrices by name."""
    matrices: dict[str, Tensor] = {}
    rest: dict[str, Tensor] = {}
    for name, tensor in snapshot.tensors.items():
        if name.endswith(_MATRIX):
            matrices[name] = tensor
        else:
            rest[name] = tensor
    shapes = {name: matrix.shape for name, matrix in matrices.items()}
    return Snapshot(rest, {**snapshot.header, "shapes": shapes}), matrices


def _take_common_form(share: Statistics, descriptions: list[Snapshot | None]) -> None:
    """Bring the statistics of this process into a form that fits those of all others.

    They keep only those sampled rows that the common sample will have: every process receives the
    samples of all.

    Args:
        share: The statistics, which are written to.
        descriptions: Those of all processes.
    """
    common: RowSketch | None = None
    for description in descriptions:
        if description is None:
            continue
        share.gram_sums.take_form(*description.header["form"])
        sketch = RowSketch.from_state(description.to(torch.device("cpu")).tensors)
        sketch.size = description.header["size"]
        if common is None:
            common = sketch
        else:
            common.merge(sketch)
    if share.kept_rows is not None and common is not None:
        share.kept_rows = share.kept_rows.trimmed(common.limit)
