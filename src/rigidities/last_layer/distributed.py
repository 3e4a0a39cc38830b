"""Many processes, each with a share of the data, that end with one and the same result.

The processes of a job meet through torch.distributed when a call begins, and compare what they are
about to do. Then each goes through its own data, and nothing is exchanged. At the end of its pass a
process tells the first one that it is ready, or what went wrong, and the first one answers all of
them. If all are ready, the first takes their parts one by one, in the order of ranks, and sends the
result to everyone, so that all have the same bits.

What follows the meeting goes over a gloo group of the library's own, whatever the backend of the
job: NCCL takes no tensors of the CPU and its timeout ends the process, and one process may read its
data for longer than any timeout of the job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..data.sketch import RowSketch
from ..data.storage import Snapshot
from .merging import require_alike
from .statistics.statistics import Statistics

LONGEST = timedelta(days=1)
"""How long a process waits for another to go through its data."""
_CONNECTING = timedelta(minutes=5)
"""How long processes that have met may take to connect."""

_STATUS_BYTES = 4096
"""Size of a message that says ready, or what went wrong."""
_STATUS, _PART = 1, 2
"""Tags of these messages, and of parts and results."""

R = TypeVar("R")
Fold = Callable[[Iterator[Statistics | None]], Statistics]


class Job:
    """One process by itself; `Processes` are several."""

    rank, size = 0, 1
    part = 0, 1
    """Number of this process among all of the job, of which a group may be a few."""

    def collected(
        self, pack: Callable[[], Snapshot | None], fold: Callable[[Iterator[Snapshot | None]], R]
    ) -> R | None:
        """What the first process makes of the parts of all others; None on the others.

        Args:
            pack: gives this process's part; not called on the first process.
            fold: is called on the first process with the parts of the others, in the order of
                ranks, each of which is received when it is asked for.
        """
        return fold(iter(()))

    def shared(self, make: Callable[[], Snapshot]) -> Snapshot:
        """What the first process makes, on every process."""
        return make()

    def together(
        self,
        pack: Callable[[], Snapshot | None],
        fold: Callable[[Iterator[Snapshot | None]], Snapshot],
    ) -> Snapshot:
        """What the first process makes of the parts of all others, on every process."""
        folded = self.collected(pack, fold)
        return self.shared(lambda: cast("Snapshot", folded))

    def statistics(self, part: Statistics | None, fold: Fold, *, trim: bool = True) -> Statistics:
        """What the first process makes of everyone's statistics, on every process.

        Args:
            part: of this process's rows; None where it had none.
            fold: takes the parts in the order of ranks.
            trim: whether only the rows are sent that the common sample will hold.
        """
        return fold(iter([part]))

    def agree(self) -> None:
        """Wait until all can end the call: to be called before what it changes is changed."""


@contextmanager
def job(
    group: Any, what: str, same: Callable[[], dict[str, Any]], device: torch.device | str = "cpu"
) -> Iterator[Job]:
    """The processes that make one call together, this one among them.

    Args:
        group: a process group; None for that of the job, where torch.distributed is initialised;
            False for this process alone.
        what: the call's name.
        same: gives what must be equal on all, as `merging.identity` has it.
        device: where tensors of the others are brought.

    Raises:
        ValueError: processes make different calls, or differ in what must be the same; or one of
            them refused its data.
        RuntimeError: one of them has failed otherwise, or has ended.
    """
    alone = group is False or not (dist.is_available() and dist.is_initialized())
    if not alone and dist.get_rank(group) < 0:
        raise ValueError(
            f"This process is not in the group that was given to {what}(process_group=). Call it on the "
            "group's processes alone, or pass process_group=False."
        )
    if alone or dist.get_world_size(group) == 1:
        yield Job()
        return
    group = dist.group.WORLD if group is None else group
    processes = Processes(_meet(group, what, same), what, device)
    try:
        yield processes
        processes.agree()
    except BaseException as error:
        processes.fail(error)
        raise


class Processes(Job):
    """This process among several, all in the same call.

    In every round each process says once that it is ready or has failed, and the first process
    answers each of the others once. A process that fails does not wait for the answer.
    """

    def __init__(self, channel: _Channel, what: str, device: torch.device | str) -> None:
        self.rank, self.size = channel.rank, channel.size
        self.part = dist.get_rank(), dist.get_world_size()
        self._channel, self._what, self._device = channel, what, device
        self._over = False  # whether all know how the call ends
        channel.catch_up()

    def collected(
        self, pack: Callable[[], Snapshot | None], fold: Callable[[Iterator[Snapshot | None]], R]
    ) -> R | None:
        """One part at a time is in the memory of the first process, beside its own."""
        if self.rank:
            message = _packed(pack())
            self._confer()
            self._send(0, message)
            return None
        self._confer()
        senders = list(self._channel.peers)

        def parts() -> Iterator[Snapshot | None]:
            while senders:
                yield self._received(senders.pop(0))

        try:
            return fold(parts())
        finally:  # others are not left waiting to send, whatever the fold has met
            while senders and not self._channel.closed:
                with suppress(ProcessFailed):
                    self._received(senders.pop(0))

    def shared(self, make: Callable[[], Snapshot]) -> Snapshot:
        """A process that has ended meanwhile is noticed in the next round."""
        if self.rank:
            self._confer()
            received = self._received(0)
            assert received is not None
            return received
        made = make()
        message = _packed(made)
        self._confer()
        for peer in self._channel.peers:
            with suppress(ProcessFailed):
                self._send(peer, message)
        return made

    def statistics(self, part: Statistics | None, fold: Fold, *, trim: bool = True) -> Statistics:
        """By snapshots, which the first process makes statistics of again."""
        if part is not None:
            part.require_finite()
        if trim:
            limit = self._sample_limit(part)
            part = None if part is None else part.trimmed(limit)

        def folded(snapshots: Iterator[Snapshot | None]) -> Statistics:
            parts = (
                None if snapshot is None else Statistics.from_snapshot(snapshot, self._device)
                for snapshot in snapshots
            )
            return fold(chain([part], parts))

        whole = self.collected(lambda: None if part is None else part.snapshot(), folded)
        if whole is not None:  # on the first process
            self.shared(whole.snapshot)
            return whole
        return Statistics.from_snapshot(self.shared(_not_here), self._device)

    def _sample_limit(self, part: Statistics | None) -> int:
        """Rows of the common sample have hashes below it: the others need not be sent."""

        def hashes() -> Snapshot | None:
            if part is None:
                return None
            if part.sample is None:  # then there is no common sample
                return Snapshot(RowSketch(limit=0).state(), {"size": 0})
            return Snapshot(RowSketch.state(part.sample), {"size": part.sample.size})

        def common_limit(parts: Iterator[Snapshot | None]) -> Snapshot:
            lowest: RowSketch | None = None
            for snapshot in chain([hashes()], parts):
                if snapshot is None:
                    continue
                sketch = RowSketch.from_state({k: t.cpu() for k, t in snapshot.tensors.items()})
                sketch.size = snapshot.header["size"]
                if lowest is None:
                    lowest = sketch
                else:
                    lowest.size = min(lowest.size, sketch.size)
                    lowest.merge(sketch)
                    lowest.settle()
            return Snapshot({}, {"limit": 0 if lowest is None else lowest.limit})

        return int(self.together(hashes, common_limit).header["limit"])

    def agree(self) -> None:
        """The last round of a call; what fails afterwards is this process's own affair."""
        if not self._over:
            self._confer()
            self._over = True

    def fail(self, error: BaseException) -> None:
        """Tell the others, unless all know it; they hear it when they have read their data."""
        if self._over or self._channel.closed:
            return
        self._over = True
        failure = error.failure if isinstance(error, ProcessFailed) else None
        if failure is None:
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            failure = Failure(self.rank, isinstance(error, ValueError), said)
        self._channel.leave(failure)

    def _confer(self) -> None:
        """One round: raise if any process has failed."""
        channel, failure = self._channel, None
        if self.rank:
            channel.tell(0, None)
            failure = channel.hear(0)
        else:
            for heard in [channel.hear(peer) for peer in channel.peers]:
                failure = heard if failure is None else failure
            for peer in channel.peers:
                channel.tell(peer, failure)
        if failure is not None:
            self._over = True
            raise _failed(failure, self._what)

    def _send(self, peer: int, message: list[Tensor]) -> None:
        with self._transfer(peer):
            self._channel.send(peer, message)

    def _received(self, peer: int) -> Snapshot | None:
        with self._transfer(peer):
            snapshot = self._channel.receive(peer)
        if snapshot is None:
            return None
        tensors = {name: tensor.to(self._device) for name, tensor in snapshot.tensors.items()}
        return replace(snapshot, tensors=tensors)

    @contextmanager
    def _transfer(self, peer: int) -> Iterator[None]:
        """A message: where it is broken off in the middle, nothing can follow on the connection."""
        try:
            yield
        except ConnectionError as error:
            raise _failed(_ended(peer), self._what) from error
        except BaseException:
            self._channel.close()
            raise


class Failure(NamedTuple):
    """What went wrong on a process.

    Attributes:
        rank: of the process.
        refused: whether it was a ValueError.
        said: the error's type and text.
        ended: whether the process is no longer there.
    """

    rank: int
    refused: bool
    said: str
    ended: bool = False

    def encoded(self) -> bytes:
        """As text for a message, which may cut off its end."""
        return f"{self.rank} {self.refused:d} {self.ended:d} {self.said}".encode()

    @classmethod
    def decoded(cls, message: bytes) -> Failure | None:
        """What `encoded` gave; None of an empty message, which says that all is well."""
        if not message:
            return None
        rank, refused, ended, said = message.decode(errors="ignore").split(" ", 3)
        return cls(int(rank), refused == "1", said, ended == "1")


class ProcessFailed(RuntimeError):
    """The failure of another process, which is passed on as it is."""

    def __init__(self, failure: Failure, what: str) -> None:
        remedy = "Mend that one, and call it on all of them again."
        if failure.ended:
            remedy = "Start the job again; a fit with checkpoint= then goes on from its files."
        super().__init__(
            f"Rank {failure.rank} failed in {what} ({failure.said}), so it was given up on all "
            f"processes and changed nothing. {remedy}"
        )
        self.failure = failure


class ProcessRefused(ProcessFailed, ValueError):
    """The same where the data or options of another process were refused."""


def _failed(failure: Failure, what: str) -> ProcessFailed:
    return (ProcessRefused if failure.refused else ProcessFailed)(failure, what)


def _not_here() -> Snapshot:
    raise AssertionError("What is shared is made by the first process.")


def _ended(rank: int) -> Failure:
    return Failure(rank, False, "its process has ended, or cannot be reached any more", ended=True)


class _Channel:
    """How one process of a group reaches the others: the first reaches all, others the first.

    Messages about the state of a process have one size and are received into memory that waits for
    them at all times. So a process that fails can say so and end, while others read their data.

    Args:
        gloo: a group of these processes.
        ranks: their ranks in the job, in the order of the group that was given.
    """

    def __init__(self, gloo: Any, ranks: list[int]) -> None:
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        self.peers = [0] if self.rank else list(range(1, len(ranks)))
        self.closed = False
        self._gloo, self._ranks = gloo, ranks
        self._unheard = False  # whether messages of the last round wait to be read
        self._posted: dict[int, tuple[Tensor, Any]] = {}
        for peer in self.peers:
            self._post(peer)

    def tell(self, peer: int, failure: Failure | None) -> None:
        """Say that this process is ready, or what has failed."""
        message = b"" if failure is None else failure.encoded()
        padded = message[:_STATUS_BYTES].ljust(_STATUS_BYTES, b"\0")
        with suppress(ConnectionError):  # a peer that has ended is noticed where it says nothing
            self._put(peer, torch.frombuffer(bytearray(padded), dtype=torch.uint8), _STATUS)

    def hear(self, peer: int) -> Failure | None:
        """Wait for what a process says; that it has ended where it says nothing."""
        if peer not in self._posted:
            return _ended(peer)
        message, receiving = self._posted.pop(peer)
        try:
            receiving.wait(LONGEST)
        except RuntimeError:
            return _ended(peer)
        with suppress(RuntimeError):  # where it has ended after this message
            self._post(peer)
        return Failure.decoded(message.numpy().tobytes().rstrip(b"\0"))

    def leave(self, failure: Failure) -> None:
        """Tell everyone of a failure, without waiting for what they say in this round."""
        for peer in self.peers:
            self.tell(peer, failure)
        self._unheard = True

    def catch_up(self) -> None:
        """Read what was said in a round that this process has left."""
        if self._unheard:
            for peer in self.peers:
                self.hear(peer)
        self._unheard = False

    def send(self, peer: int, message: list[Tensor]) -> None:
        """Send what `_packed` gives."""
        for tensor in message:
            self._put(peer, tensor, _PART)

    def receive(self, peer: int) -> Snapshot | None:
        """Receive the snapshot that was packed into a message, on the CPU."""
        length = self._get(peer, torch.empty(1, dtype=torch.int64))
        text = self._get(peer, torch.empty(int(length), dtype=torch.uint8))
        description = json.loads(text.numpy().tobytes())
        if description is None:
            return None
        tensors = {}
        for name, dtype, shape in description["tensors"]:
            tensors[name] = self._get(peer, torch.empty(shape, dtype=getattr(torch, dtype)))
        return Snapshot(tensors, description["header"], f"The part of rank {peer}")

    def close(self) -> None:
        """End the connections, which ends the others' waiting; the channel cannot be used again."""
        self.closed = True
        self._posted.clear()
        dist.destroy_process_group(self._gloo)

    def _post(self, peer: int) -> None:
        message = torch.empty(_STATUS_BYTES, dtype=torch.uint8)
        source = self._ranks[peer]
        self._posted[peer] = message, dist.irecv(message, source, group=self._gloo, tag=_STATUS)

    def _put(self, peer: int, tensor: Tensor, tag: int) -> None:
        if tensor.numel():
            numbers = tensor.reshape(-1).view(torch.uint8)
            with _connected_to(peer):
                sending = dist.isend(numbers, self._ranks[peer], group=self._gloo, tag=tag)
                assert sending is not None
                sending.wait(LONGEST)

    def _get(self, peer: int, tensor: Tensor) -> Tensor:
        if tensor.numel():
            numbers = tensor.view(-1).view(torch.uint8)
            with _connected_to(peer):
                receiving = dist.irecv(numbers, self._ranks[peer], group=self._gloo, tag=_PART)
                assert receiving is not None
                receiving.wait(LONGEST)
        return tensor


@contextmanager
def _connected_to(peer: int) -> Iterator[None]:
    """Errors of gloo, apart from other RuntimeErrors such as a lack of memory."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"The connection to rank {peer} is lost.") from error


def _packed(snapshot: Snapshot | None) -> list[Tensor]:
    """A snapshot as a message: the length of a description, the description, and the tensors."""
    tensors: dict[str, Tensor] = {}
    description = None
    if snapshot is not None:
        tensors = {name: t.detach().cpu().contiguous() for name, t in snapshot.tensors.items()}
        kinds = [[name, str(t.dtype).split(".")[1], list(t.shape)] for name, t in tensors.items()]
        description = {"header": snapshot.header, "tensors": kinds}
    text = torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8)
    return [torch.tensor([len(text)]), text, *tensors.values()]


_CHANNELS: WeakKeyDictionary[Any, _Channel] = WeakKeyDictionary()
"""By the group that was given. A job that is initialised anew has another group."""


def _meet(group: Any, what: str, same: Callable[[], dict[str, Any]]) -> _Channel:
    """Compare what the processes of a group are about to do, and connect them."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    channel = _CHANNELS.get(group)
    properties: dict[str, Any] = {}
    error: Exception | None = None
    try:
        if channel is not None and channel.closed:
            raise RuntimeError(
                "The connection between the processes was lost in an earlier call. Start the job "
                "again."
            )
        properties = same()
    except Exception as problem:  # the others are told before it is raised
        error = problem
    failure = None if error is None else (rank, isinstance(error, ValueError), str(error))
    met: list[Any] = [None] * size
    # torch's name for a new group of some ranks is made from how many groups a process is in
    groups = len(dist.distributed_c10d._world.pg_names)
    try:
        dist.all_gather_object(met, (what, properties, failure, groups), group=group)
    except RuntimeError as problem:
        raise RuntimeError(
            f"The processes could not meet at the beginning of {what}: one of them has ended, or "
            "made no such call within the timeout of the group. Make the same calls on all "
            "processes, or pass process_group=False for a call that one makes for itself."
        ) from problem
    if error is not None:
        raise error
    names = [f"Rank {number}" for number in range(size)]
    for name, (other, *_) in zip(names, met, strict=True):
        if other != met[0][0]:
            raise ValueError(
                f"Rank 0 calls {met[0][0]}, {name.lower()} calls {other}: all processes must "
                "make the same calls in the same order. Pass process_group=False for a call that one "
                "process makes for itself."
            )
    for _, _, failure, _ in met:
        if failure is not None:
            raise _failed(Failure(*failure), what)
    require_alike([properties for _, properties, *_ in met], names)
    if channel is None:
        channel = _connected(group, most_groups=max(count for *_, count in met), groups=groups)
        _CHANNELS[group] = channel
    return channel


def _connected(group: Any, *, most_groups: int, groups: int) -> _Channel:
    """A channel over a new gloo group of the same processes, all of which are in this call."""
    ranks = dist.get_process_group_ranks(group)
    options: dict[str, Any] = {"backend": "gloo", "timeout": _CONNECTING}
    if len(ranks) == dist.get_world_size():
        return _Channel(dist.new_group(**options), ranks)
    options["use_local_synchronization"] = True  # without the other processes of the job
    for _ in range(most_groups - groups):
        dist.new_group([dist.get_rank()], **options)  # only counts: see `_meet`
    return _Channel(dist.new_group(ranks, **options), ranks)
