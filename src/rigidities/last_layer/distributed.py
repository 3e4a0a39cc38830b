"""Many processes, each with a share of the data, that end with one and the same result.

The processes of a job meet through torch.distributed when a call begins, and compare what they are
about to do. Then each goes through its own data, however many, and holds a line to the first
process meanwhile: a process that fails or ends is noticed by all others within a second, whatever
the backend, and nothing is exchanged before all are ready. The first process then takes the parts
one by one, in the order of ranks, and gives everyone the result.
"""

from __future__ import annotations

import hmac
import io
import os
import secrets
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakSet

import torch
import torch.distributed as dist

from ..notices import notify
from .merging import require_alike

NOTICED = 60.0
"""Seconds after which a machine that does not answer counts as lost, a process that must connect as
well; a process that has ended is noticed at once."""
_LOOK, _STRANGE = 0.5, 5.0
"""Seconds between looks at the others, and for a caller to say who it is."""

P = TypeVar("P")
R = TypeVar("R")


class Job:
    """One process by itself; `Processes` are several."""

    rank, size = 0, 1
    part = 0, 1
    """Number of this process among all of the job, of which a group may be a few."""

    def check(self) -> None:
        """Raise if another process has failed; to be called now and then."""

    def checking(self, items: Iterable[P]) -> Iterator[P]:
        """The same items, with a look at the others after each."""
        for item in items:
            yield item
            self.check()

    def together(self, part: P, fold: Callable[[Iterator[P]], R]) -> R:
        """What the first process makes of everyone's part, on every process."""
        return fold(iter([part]))

    def all(self, part: P) -> list[P]:
        """Everyone's part, in the order of ranks."""
        return self.together(part, list)

    def agree(self) -> None:
        """Wait until all can end the call: to be called before what it changes is changed."""
        self.all(None)


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
            f"This process is not in the group that was given to {what}(group=). Call it on the "
            "group's processes alone, or pass group=False."
        )
    if alone or dist.get_world_size(group) == 1:
        yield Job()
        return
    processes = Processes(group, what, device)
    try:
        processes.meet(same)
        yield processes
    except BaseException as error:
        processes.fail(error)
        raise
    finally:
        processes.close()


class Processes(Job):
    """This process, of some `rank` in the group, among several, all in the same call."""

    def __init__(self, group: Any, what: str, device: torch.device | str) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.part = dist.get_rank(), dist.get_world_size()
        self._group, self._what, self._device = group, what, device
        self._lines: dict[int, Connection] = {}
        self._ready: set[int] = set()
        self._looked, self._waited = time.monotonic(), False
        _OPEN.add(self)

    def meet(self, same: Callable[[], dict[str, Any]]) -> None:
        """Compare what everyone is about to do, and connect everyone with the first process."""
        group, what = self._group, self._what
        met: list[Any] = [None] * self.size
        try:
            own: Any = same()
        except Exception as error:  # the others are told before it is raised
            dist.all_gather_object(met, (what, str(error), ""), group=group)
            raise
        dist.all_gather_object(met, (what, own, _machine()), group=group)
        names = [f"Rank {number}" for number in range(self.size)]
        for name, (other, *_) in zip(names, met, strict=True):
            if other != met[0][0]:
                raise ValueError(
                    f"Rank 0 calls {met[0][0]}, {name.lower()} calls {other}: all processes must "
                    "make the same calls in the same order. Pass group=False for a call that one "
                    "process makes for itself."
                )
        for number, (_, one, _) in enumerate(met):
            if isinstance(one, str):
                raise ProcessRefused(_Failure(one, number, True), what)
        require_alike([one for _, one, _ in met], names)
        first = 0 if group is None else dist.get_global_rank(group, 0)
        near = len({machine for *_, machine in met}) == 1
        if self.rank:
            given: list[Any] = [None]
            dist.broadcast_object_list(given, first, group)
            addresses, token = given[0]
            self._lines[0] = _connected(addresses, token, self.rank)
            return
        with _server(near) as server:
            token = secrets.token_bytes(32)
            dist.broadcast_object_list([(_addresses(server, near), token)], first, group)
            _accept(server, token, self.size, self._lines)

    def check(self) -> None:
        """Look at the lines, twice a second at most."""
        if time.monotonic() - self._looked > _LOOK:
            self._look(0.0)
            self._looked = time.monotonic()

    def together(self, part: P, fold: Callable[[Iterator[P]], R]) -> R:
        """One part at a time crosses a line: a process sends when it is asked to."""
        if self.rank:
            self._send(0, "ready")
            self._receive(0)
            self._send(0, part)
            return cast("R", self._receive(0))
        began = time.monotonic()
        while missing := self._lines.keys() - self._ready:
            if time.monotonic() - began > NOTICED and not self._waited:
                self._waited, busy = True, sorted(missing)
                notify(f"{self._what} waits for ranks {busy}, which are busy with their data.")
            self._look(_LOOK)
        result = fold(self._parts(part))
        for rank in self._lines:
            self._send(rank, result)
        self._ready.clear()
        return result

    def fail(self, error: BaseException) -> None:
        """Tell the others, as far as they can be told."""
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        failure = _Failure(said, self.rank, isinstance(error, ValueError))
        failure = error.failure if isinstance(error, ProcessFailed) else failure
        for line in self._lines.values():
            with suppress(OSError):
                _send(line, failure)

    def close(self) -> None:
        """Hang up."""
        _OPEN.discard(self)
        for line in self._lines.values():
            line.close()

    def _parts(self, own: P) -> Iterator[P]:
        yield own
        for rank in sorted(self._lines):
            self._send(rank, "go")
            yield self._receive(rank)

    def _look(self, seconds: float) -> None:
        """Read who is ready; others have failed, or ended."""
        waiting: dict[Any, int] = {self._lines[i]: i for i in self._lines.keys() - self._ready}
        for rank in [waiting[line] for line in wait(list(waiting), seconds)]:
            self._receive(rank)
            self._ready.add(rank)

    def _send(self, rank: int, message: Any) -> None:
        try:
            _send(self._lines[rank], message)
        except OSError as error:
            raise self._ended(rank) from error

    def _receive(self, rank: int) -> Any:
        try:
            packed = io.BytesIO(self._lines[rank].recv_bytes())
        except (EOFError, OSError) as error:
            raise self._ended(rank) from error
        message = torch.load(packed, map_location=self._device, weights_only=False)
        if isinstance(message, _Failure):
            raise (ProcessRefused if message.refused else ProcessFailed)(message, self._what)
        return message

    def _ended(self, rank: int) -> ProcessFailed:
        return ProcessFailed(_Failure("its process has ended", rank, False), self._what)


class _Failure(NamedTuple):
    """What went wrong on another process; `refused` where it was a ValueError."""

    said: str
    rank: int
    refused: bool


class ProcessFailed(RuntimeError):
    """The failure of another process, which is passed on as it is."""

    def __init__(self, failure: _Failure, what: str) -> None:
        super().__init__(
            f"Rank {failure.rank} failed in {what} ({failure.said}), so it was given up on all "
            "processes and changed nothing. Mend that one, and call it on all of them again."
        )
        self.failure = failure


class ProcessRefused(ProcessFailed, ValueError):
    """The same where the data or options of another process were refused."""


def _send(line: Connection, message: Any) -> None:
    packed = io.BytesIO()
    torch.save(message, packed)
    line.send_bytes(packed.getbuffer())


def _line(own: socket.socket) -> Connection:
    """A connection that notices when the other side is gone."""
    own.settimeout(None)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
    for name, value in {**limits, "TCP_USER_TIMEOUT": int(1000 * NOTICED)}.items():
        if hasattr(socket, name):  # Linux; elsewhere the system's own limits
            own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(own.detach())


def _server(near: bool) -> socket.socket:
    """Where the others call, from this machine alone where all are on it."""
    if near:
        return socket.create_server(("127.0.0.1", 0))
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=both)


def _addresses(server: socket.socket, near: bool) -> list[tuple[str, int]]:
    """Under which the first process may be known to others."""
    port, name = server.getsockname()[1], socket.gethostname()
    hosts = [os.environ.get("MASTER_ADDR", ""), name, socket.getfqdn()]
    return [(host, port) for host in (["127.0.0.1"] if near else hosts) if host]


def _machine() -> str:
    """What processes share that reach each other at 127.0.0.1."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return boot + os.readlink("/proc/self/ns/net")
    return f"{socket.gethostname()} {uuid.getnode()}"


def _accept(server: socket.socket, token: bytes, size: int, lines: dict[int, Connection]) -> None:
    """Add a line to each of the others, who prove by the token that they are of the job."""
    end = time.monotonic() + NOTICED
    while len(lines) < size - 1:
        server.settimeout(max(0.01, end - time.monotonic()))
        try:
            own, _ = server.accept()
        except OSError as error:
            missing = sorted(set(range(1, size)) - lines.keys())
            raise RuntimeError(
                f"Ranks {missing} did not connect to rank 0 within {NOTICED:.0f} s: they have "
                "ended, or cannot reach it at the address in MASTER_ADDR or by its host's name."
            ) from error
        own.settimeout(_STRANGE)
        said = bytearray()
        with suppress(OSError):
            while len(said) < len(token) + 4 and (new := own.recv(len(token) + 4 - len(said))):
                said += new
        if hmac.compare_digest(said[: len(token)], token):
            lines[int.from_bytes(said[len(token) :], "big")] = _line(own)
        own.close()  # a stranger's; of a line nothing is left here


def _connected(addresses: list[tuple[str, int]], token: bytes, rank: int) -> Connection:
    for address in addresses:
        with suppress(OSError):
            own = socket.create_connection(address, timeout=NOTICED / len(addresses))
            own.sendall(token + rank.to_bytes(4, "big"))
            return _line(own)
    tried = ", ".join(f"{host}:{port}" for host, port in addresses)
    raise RuntimeError(
        f"Rank {rank} cannot reach rank 0 (tried {tried}). Set MASTER_ADDR to an address of its "
        "machine that the others can reach."
    )


def _hang_up() -> None:
    """In a forked process (a loader's worker), whose copy of a line would outlive its owner."""
    for processes in list(_OPEN):
        processes.close()


_OPEN: WeakSet[Processes] = WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_hang_up)
