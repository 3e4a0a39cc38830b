"""Many processes, each with a share of the data, that end with one and the same result.

The processes of a job meet through torch.distributed when a call begins, and compare what they are
about to do. Then each goes through its own data, and nothing is exchanged. At the end of its pass a
process tells the first one that it is ready, or what went wrong, and the first one answers all of
them. If all are ready, the first takes their parts one by one, in the order of ranks, and sends the
result to everyone, so that all have the same bits.

What follows the meeting goes over a gloo group of the library's own, whatever the backend of the
job: NCCL takes no tensors of the CPU and its timeout ends the process, and one process may read its
data for longer than any timeout of the job.

`open_job` gives a `Job`: for one process by itself the base class, whose methods exchange nothing,
for several `Processes`. A `_Channel` carries the messages between them.
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
_STATUS_TAG = 1
"""Tag of these messages."""
_SNAPSHOT_TAG = 2
"""Tag of parts and results."""

R = TypeVar("R")
Fold = Callable[[Iterator[Statistics | None]], Statistics]


class Job:
    """One process by itself; `Processes` are several.

    Attributes:
        rank: The number of this process among those that make the call.
        size: How many processes make the call.
    """

    rank: int = 0
    size: int = 1

    def collected(
        self, pack: Callable[[], Snapshot | None], fold: Callable[[Iterator[Snapshot | None]], R]
    ) -> R | None:
        """What the first process makes of the parts of all others; None on the others.

        Args:
            pack: Gives this process's part. It is not called on the first process.
            fold: Called on the first process with the parts of the others, in the order of ranks.
                Each part is received when the iterator reaches it.
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
        """What the first process makes of the parts of all others, on every process.

        Args:
            pack: As in `collected`.
            fold: As in `collected`.
        """
        folded = self.collected(pack, fold)
        return self.shared(lambda: cast("Snapshot", folded))

    def statistics(self, share: Statistics | None, fold: Fold, *, trim: bool = True) -> Statistics:
        """What the first process makes of everyone's statistics, on every process.

        Args:
            share: The statistics of this process's rows; None where it had none.
            fold: Makes one of the shares of all processes, which come in the order of ranks.
            trim: Whether to send only those rows that the common sample will hold.
        """
        return fold(iter([share]))

    def agree(self) -> None:
        """Wait until all can end the call. Call it before changing anything that stays."""


@contextmanager
def open_job(
    group: Any,
    call: str,
    must_agree: Callable[[], dict[str, Any]],
    device: torch.device | str = "cpu",
) -> Iterator[Job]:
    """The processes that make one call together, this one among them.

    Args:
        group: A process group; None for that of the job, where torch.distributed is initialised;
            False for this process alone.
        call: The call's name.
        must_agree: Gives what must be equal on all processes, as `merging.identity` has it.
        device: Where tensors of other processes are brought.

    Raises:
        ValueError: Processes make different calls, or differ in what must be equal, or one of them
            refused its data.
        RuntimeError: One of them has failed with another error, or has ended.
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
    group = dist.group.WORLD if group is None else group
    processes = Processes(_meet(group, call, must_agree), call, device)
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

    Args:
        channel: The connection to the others.
        call: The call's name.
        device: Where tensors of other processes are brought.
    """

    def __init__(self, channel: _Channel, call: str, device: torch.device | str) -> None:
        self.rank = channel.rank
        self.size = channel.size
        self._channel = channel
        self._call = call
        self._device = device
        self._is_over = False  # whether all know how the call ends
        channel.catch_up()

    def collected(
        self, pack: Callable[[], Snapshot | None], fold: Callable[[Iterator[Snapshot | None]], R]
    ) -> R | None:
        """As in `Job`. Only one part at a time is in the memory of the first process."""
        if self.rank:
            message = _packed(pack())
            self._confer()
            self._send(0, message)
            return None
        self._confer()
        senders = list(self._channel.peers)

        def received() -> Iterator[Snapshot | None]:
            while senders:
                yield self._received(senders.pop(0))

        try:
            return fold(received())
        finally:
            # Whatever the fold has met, the others must not be left waiting to send.
            while senders and not self._channel.closed:
                with suppress(ProcessFailed):
                    self._received(senders.pop(0))

    def shared(self, make: Callable[[], Snapshot]) -> Snapshot:
        """As in `Job`. A process that has ended meanwhile is noticed in the next round."""
        if self.rank:
            self._confer()
            received = self._received(0)
            assert received is not None
            return received
        snapshot = make()
        message = _packed(snapshot)
        self._confer()
        for peer in self._channel.peers:
            with suppress(ProcessFailed):
                self._send(peer, message)
        return snapshot

    def statistics(self, share: Statistics | None, fold: Fold, *, trim: bool = True) -> Statistics:
        """As in `Job`. Statistics travel as snapshots."""
        if share is not None:
            share.require_finite()
        if trim:
            limit = self._sample_limit(share)
            share = None if share is None else share.trimmed(limit)

        def pack() -> Snapshot | None:
            return None if share is None else share.snapshot()

        def restored(snapshots: Iterator[Snapshot | None]) -> Iterator[Statistics | None]:
            for snapshot in snapshots:
                if snapshot is None:
                    yield None
                else:
                    yield Statistics.from_snapshot(snapshot, self._device)

        def folded(snapshots: Iterator[Snapshot | None]) -> Statistics:
            return fold(chain([share], restored(snapshots)))

        whole = self.collected(pack, folded)
        if whole is not None:  # on the first process
            self.shared(whole.snapshot)
            return whole
        return Statistics.from_snapshot(self.shared(_not_here), self._device)

    def _sample_limit(self, share: Statistics | None) -> int:
        """The limit of the common sample: rows with higher hashes need not be sent."""

        def pack() -> Snapshot | None:
            if share is None:
                return None
            if share.sample is None:  # then there is no common sample
                return Snapshot(RowSketch(limit=0).state(), {"size": 0})
            # The hashes alone, without the columns that `RowSample.state` adds.
            return Snapshot(RowSketch.state(share.sample), {"size": share.sample.size})

        def common_limit(snapshots: Iterator[Snapshot | None]) -> Snapshot:
            common: RowSketch | None = None
            for snapshot in chain([pack()], snapshots):
                if snapshot is None:
                    continue
                tensors = {name: tensor.cpu() for name, tensor in snapshot.tensors.items()}
                sketch = RowSketch.from_state(tensors)
                sketch.size = snapshot.header["size"]
                if common is None:
                    common = sketch
                else:
                    common.size = min(common.size, sketch.size)
                    common.merge(sketch)
                    common.settle()
            return Snapshot({}, {"limit": 0 if common is None else common.limit})

        return int(self.together(pack, common_limit).header["limit"])

    def agree(self) -> None:
        """The last round of a call. What fails afterwards concerns this process alone."""
        if not self._is_over:
            self._confer()
            self._is_over = True

    def fail(self, error: BaseException) -> None:
        """Tell the others of an error, unless all know it. They hear it after their own pass."""
        if self._is_over or self._channel.closed:
            return
        self._is_over = True
        if isinstance(error, ProcessFailed):
            failure = error.failure
        else:
            description = type(error).__name__
            if str(error):
                description = f"{description}: {error}"
            failure = Failure(self.rank, isinstance(error, ValueError), description)
        self._channel.leave(failure)

    def _confer(self) -> None:
        """One round: raise if any process has failed."""
        channel = self._channel
        failure: Failure | None = None
        if self.rank:
            channel.tell(0, None)
            failure = channel.hear(0)
        else:
            # All are heard before any is answered; the first failure is passed on.
            for peer in channel.peers:
                heard = channel.hear(peer)
                if failure is None:
                    failure = heard
            for peer in channel.peers:
                channel.tell(peer, failure)
        if failure is not None:
            self._is_over = True
            raise _error_for(failure, self._call)

    def _send(self, peer: int, message: list[Tensor]) -> None:
        with self._transfer(peer):
            self._channel.send(peer, message)

    def _received(self, peer: int) -> Snapshot | None:
        """The next snapshot of a peer, on this process's device."""
        with self._transfer(peer):
            snapshot = self._channel.receive(peer)
        if snapshot is None:
            return None
        tensors = {name: tensor.to(self._device) for name, tensor in snapshot.tensors.items()}
        return replace(snapshot, tensors=tensors)

    @contextmanager
    def _transfer(self, peer: int) -> Iterator[None]:
        """Send or receive one message.

        If it is broken off in the middle, nothing can follow on the connection, which is closed.
        """
        try:
            yield
        except ConnectionError as error:
            raise _error_for(_ended(peer), self._call) from error
        except BaseException:
            self._channel.close()
            raise


class Failure(NamedTuple):
    """What went wrong on a process.

    Attributes:
        rank: The number of the process.
        refused: Whether the error was a ValueError.
        description: The error's type and text.
        ended: Whether the process is no longer there.
    """

    rank: int
    refused: bool
    description: str
    ended: bool = False

    def encoded(self) -> bytes:
        """The failure as a message, whose end may be cut off."""
        return f"{self.rank} {self.refused:d} {self.ended:d} {self.description}".encode()

    @classmethod
    def decoded(cls, message: bytes) -> Failure | None:
        """The failure that was encoded; None of an empty message, which says that all is well."""
        if not message:
            return None
        rank, refused, ended, description = message.decode(errors="ignore").split(" ", 3)
        return cls(int(rank), refused == "1", description, ended == "1")


class ProcessFailed(RuntimeError):
    """The failure of another process."""

    def __init__(self, failure: Failure, call: str) -> None:
        remedy = "Fix the problem there, and make the call again on all processes."
        if failure.ended:
            remedy = "Start the job again."
        super().__init__(
            f"Rank {failure.rank} failed in {call} ({failure.description}), so the call was "
            f"cancelled on all processes and changed nothing. {remedy}"
        )
        self.failure = failure


class ProcessRefused(ProcessFailed, ValueError):
    """The failure of another process, whose data or options were refused."""


def _error_for(failure: Failure, call: str) -> ProcessFailed:
    if failure.refused:
        return ProcessRefused(failure, call)
    return ProcessFailed(failure, call)


def _not_here() -> Snapshot:
    raise AssertionError("What is shared is made by the first process.")


def _ended(rank: int) -> Failure:
    return Failure(rank, False, "its process has ended or cannot be reached", ended=True)


class _Channel:
    """How one process of a group reaches the others: the first reaches all, others the first.

    Messages about the status of a process have one size and are received into memory that waits
    for them at all times. So a process that fails can say so and end, while others read their data.

    Args:
        gloo: A group of these processes.
        ranks: Their ranks in the job, in the order of the user's group.

    Attributes:
        rank: The number of this process in the group.
        size: The number of processes in the group.
        peers: The numbers of the processes that this one reaches.
        closed: Whether the connection is lost for good.
    """

    def __init__(self, gloo: Any, ranks: list[int]) -> None:
        self.rank = ranks.index(dist.get_rank())
        self.size = len(ranks)
        self.peers = [0] if self.rank else list(range(1, len(ranks)))
        self.closed = False
        self._gloo = gloo
        self._ranks = ranks
        self._has_unheard = False  # whether messages of the last round wait to be read
        # For each peer the memory for its next status, and the request that fills it.
        self._posted: dict[int, tuple[Tensor, Any]] = {}
        for peer in self.peers:
            self._post(peer)

    def tell(self, peer: int, failure: Failure | None) -> None:
        """Say that this process is ready, or what has failed."""
        message = b"" if failure is None else failure.encoded()
        padded = message[:_STATUS_BYTES].ljust(_STATUS_BYTES, b"\0")
        with suppress(ConnectionError):  # a peer that has ended is noticed where it says nothing
            self._put(peer, torch.frombuffer(bytearray(padded), dtype=torch.uint8), _STATUS_TAG)

    def hear(self, peer: int) -> Failure | None:
        """Wait for the status of a process. One that says nothing any more has ended."""
        if peer not in self._posted:
            return _ended(peer)
        message, request = self._posted.pop(peer)
        try:
            request.wait(LONGEST)
        except RuntimeError:
            return _ended(peer)
        with suppress(RuntimeError):  # the peer may have ended after this message
            self._post(peer)
        return Failure.decoded(message.numpy().tobytes().rstrip(b"\0"))

    def leave(self, failure: Failure) -> None:
        """Tell everyone of a failure, without waiting for what they say in this round."""
        for peer in self.peers:
            self.tell(peer, failure)
        self._has_unheard = True

    def catch_up(self) -> None:
        """Read the messages of a round that this process has left."""
        if self._has_unheard:
            for peer in self.peers:
                self.hear(peer)
        self._has_unheard = False

    def send(self, peer: int, message: list[Tensor]) -> None:
        """Send a message of `_packed`."""
        for tensor in message:
            self._put(peer, tensor, _SNAPSHOT_TAG)

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
        """Provide memory for the next status of a peer."""
        message = torch.empty(_STATUS_BYTES, dtype=torch.uint8)
        source = self._ranks[peer]
        request = dist.irecv(message, source, group=self._gloo, tag=_STATUS_TAG)
        self._posted[peer] = (message, request)

    def _put(self, peer: int, tensor: Tensor, tag: int) -> None:
        """Send the bytes of a tensor. An empty one needs no message."""
        if not tensor.numel():
            return
        numbers = tensor.reshape(-1).view(torch.uint8)
        with _connected_to(peer):
            request = dist.isend(numbers, self._ranks[peer], group=self._gloo, tag=tag)
            assert request is not None
            request.wait(LONGEST)

    def _get(self, peer: int, tensor: Tensor) -> Tensor:
        """Fill a tensor with the bytes that a peer sends, and return it."""
        if not tensor.numel():
            return tensor
        numbers = tensor.view(-1).view(torch.uint8)
        with _connected_to(peer):
            request = dist.irecv(numbers, self._ranks[peer], group=self._gloo, tag=_SNAPSHOT_TAG)
            assert request is not None
            request.wait(LONGEST)
        return tensor


@contextmanager
def _connected_to(peer: int) -> Iterator[None]:
    """Tell errors of gloo apart from other RuntimeErrors, such as a lack of memory."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"The connection to rank {peer} is lost.") from error


def _packed(snapshot: Snapshot | None) -> list[Tensor]:
    """A snapshot as a message: the length of a description, the description, and the tensors."""
    tensors: dict[str, Tensor] = {}
    description = None
    if snapshot is not None:
        kinds = []
        for name, tensor in snapshot.tensors.items():
            tensors[name] = tensor.detach().cpu().contiguous()
            dtype = str(tensor.dtype).removeprefix("torch.")
            kinds.append([name, dtype, list(tensor.shape)])
        description = {"header": snapshot.header, "tensors": kinds}
    text = torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8)
    return [torch.tensor([len(text)]), text, *tensors.values()]


_CHANNELS: WeakKeyDictionary[Any, _Channel] = WeakKeyDictionary()
"""The channels by the user's group. A job that is initialised anew has another group."""


class _Introduction(NamedTuple):
    """What a process tells the others at the beginning of a call.

    Attributes:
        call: The name of its call.
        properties: What must be equal on all processes.
        failure: What kept it from telling its properties, as fields of `Failure`; None for nothing.
        groups: In how many process groups it is.
    """

    call: str
    properties: dict[str, Any]
    failure: tuple[int, bool, str] | None
    groups: int


def _meet(group: Any, call: str, must_agree: Callable[[], dict[str, Any]]) -> _Channel:
    """Compare what the processes of a group are about to do, and connect them."""
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    channel = _CHANNELS.get(group)
    properties: dict[str, Any] = {}
    error: Exception | None = None
    failure: tuple[int, bool, str] | None = None
    try:
        if channel is not None and channel.closed:
            raise RuntimeError(
                "The connection between the processes was lost in an earlier call. Start the job "
                "again."
            )
        properties = must_agree()
    except Exception as problem:  # the others are told before it is raised
        error = problem
        failure = (rank, isinstance(problem, ValueError), str(problem))
    # torch names a new group of some ranks by the number of groups in which a process is.
    groups = len(dist.distributed_c10d._world.pg_names)
    introduction = _Introduction(call, properties, failure, groups)
    introductions: list[Any] = [None] * size
    try:
        dist.all_gather_object(introductions, introduction, group=group)
    except RuntimeError as problem:
        raise RuntimeError(
            f"The processes could not meet at the beginning of {call}: one of them has ended, or "
            "made no such call within the timeout of the group. Make the same calls on all "
            "processes, or set process_group=False for a call of a single process."
        ) from problem
    if error is not None:
        raise error
    _require_same_call(introductions)
    for other in introductions:
        if other.failure is not None:
            other_rank, refused, description = other.failure
            raise _error_for(Failure(other_rank, refused, description), call)
    names = [f"Rank {number}" for number in range(size)]
    require_alike([other.properties for other in introductions], names)
    if channel is None:
        most_groups = max(other.groups for other in introductions)
        channel = _connected(group, most_groups=most_groups, groups=groups)
        _CHANNELS[group] = channel
    return channel


def _require_same_call(introductions: list[_Introduction]) -> None:
    """Refuse processes that make different calls."""
    first = introductions[0].call
    for number, introduction in enumerate(introductions):
        if introduction.call != first:
            raise ValueError(
                f"Rank 0 calls {first}, rank {number} calls {introduction.call}: all processes "
                "must make the same calls in the same order. Set process_group=False for a call "
                "of a single process."
            )


def _connected(group: Any, *, most_groups: int, groups: int) -> _Channel:
    """A channel over a new gloo group of the same processes, all of which are in this call.

    Args:
        group: The user's group.
        most_groups: The largest number of groups in which one of the processes is.
        groups: The number of groups in which this process is.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == dist.get_world_size():
        return _Channel(dist.new_group(backend="gloo", timeout=_CONNECTING), ranks)

    def new_group(members: list[int]) -> Any:
        # Without the other processes of the job, which make no such call.
        return dist.new_group(
            members, backend="gloo", timeout=_CONNECTING, use_local_synchronization=True
        )

    # Groups of this process alone make the counts equal, and with them the names; see `_meet`.
    for _ in range(most_groups - groups):
        new_group([dist.get_rank()])
    return _Channel(new_group(ranks), ranks)
