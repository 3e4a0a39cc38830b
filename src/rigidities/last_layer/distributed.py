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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ..notices import notify
from .merging import require_alike

NOTICED = 60.0
"""Seconds after which a machine that does not answer counts as lost, a process that must connect as
well; a process that has ended is noticed at once."""
_LOOK = 0.5

P = TypeVar("P")
R = TypeVar("R")


class Job:
    """One process by itself; `Processes` are several."""

    rank, size = 0, 1
    part = 0, 1
    """Number of this process among all of the job, of which a group may be a few."""

    def check(self) -> None:
        """Raise if another process has failed; to be called now and then."""

    def together(self, part: P, fold: Callable[[Iterator[P]], R]) -> R:
        """What the first process makes of everyone's part, on every process."""
        return fold(iter([part]))

    def all(self, part: P) -> list[P]:
        """Everyone's part, in the order of ranks."""
        return self.together(part, list)


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
    if group is False or not (dist.is_available() and dist.is_initialized()):
        yield Job()
        return
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"This process is not in the group that was given to {what}(group=). Call it on the "
            "group's processes alone, or pass group=False."
        )
    if dist.get_world_size(group) == 1:
        yield Job()
        return
    processes = Processes.meet(group, what, same, device)
    try:
        yield processes
    except BaseException as error:
        processes.fail(error)
        raise
    finally:
        processes.close()


class Processes(Job):
    """This process among several, all in the same call.

    Attributes:
        rank: of this process in the group.
        size: how many there are.
    """

    def __init__(
        self,
        lines: dict[int, Connection],
        rank: int,
        size: int,
        what: str,
        device: torch.device | str,
    ) -> None:
        self.rank, self.size = rank, size
        self.part = dist.get_rank(), dist.get_world_size()
        self._lines, self._what, self._device = lines, what, device
        self._ready: set[int] = set()
        self._looked, self._told = time.monotonic(), False

    @classmethod
    def meet(
        cls,
        group: Any,
        what: str,
        same: Callable[[], dict[str, Any]],
        device: torch.device | str,
    ) -> Processes:
        """Compare what everyone is about to do, and connect everyone with the first process."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        met: list[Any] = [None] * size
        try:
            own: Any = same()
        except Exception as error:  # the others are told before it is raised
            dist.all_gather_object(met, (what, str(error), ""), group=group)
            raise
        dist.all_gather_object(met, (what, own, socket.gethostname()), group=group)
        names = [f"Rank {number}" for number in range(size)]
        for name, (other, *_) in zip(names, met, strict=True):
            if other != met[0][0]:
                raise ValueError(
                    f"Rank 0 calls {met[0][0]}, {name.lower()} calls {other}: all processes must "
                    "make the same calls in the same order. Pass group=False for a call that one "
                    "process makes for itself."
                )
        for number, (_, one, _) in enumerate(met):
            if isinstance(one, str):
                raise _ToldValue(_Failure(one, number, True), what)
        require_alike([one for _, one, _ in met], names)
        first = 0 if group is None else dist.get_global_rank(group, 0)
        near = len({host for *_, host in met}) == 1
        if rank:
            told: list[Any] = [None]
            dist.broadcast_object_list(told, first, group)
            addresses, token = told[0]
            lines = _connected(addresses, token, rank)
        else:
            with _server(near) as server:
                token = secrets.token_bytes(32)
                dist.broadcast_object_list([(_addresses(server, near), token)], first, group)
                lines = _accepted(server, token, size)
        return cls(lines, rank, size, what, device)

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
            result: R = self._receive(0)
            return result
        began = time.monotonic()
        while self._lines.keys() - self._ready:
            self._look(_LOOK)
            self._say_waiting(time.monotonic() - began)
        result = fold(self._parts(part))
        for rank in self._lines:
            self._send(rank, result)
        self._ready.clear()
        return result

    def fail(self, error: BaseException) -> None:
        """Tell the others, as far as they can be told."""
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        told = _Failure(said, self.rank, isinstance(error, ValueError))
        told = error.failure if isinstance(error, _Told) else told
        for line in self._lines.values():
            with suppress(OSError):
                _send(line, told)

    def close(self) -> None:
        """Hang up."""
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
            kind = _ToldValue if message.refused else _Told
            raise kind(message, self._what)
        return message

    def _ended(self, rank: int) -> _Told:
        return _Told(_Failure("its process has ended", rank, False), self._what)

    def _say_waiting(self, seconds: float) -> None:
        missing = sorted(self._lines.keys() - self._ready)
        if missing and seconds > NOTICED and not self._told:
            self._told = True
            notify(f"{self._what} waits for ranks {missing}, which are busy with their data.")


class _Failure(NamedTuple):
    """What went wrong on another process; `refused` where it was a ValueError."""

    said: str
    rank: int
    refused: bool


class _Told(RuntimeError):
    """The failure of another process, which is passed on as it is."""

    def __init__(self, failure: _Failure, what: str) -> None:
        super().__init__(
            f"Rank {failure.rank} failed in {what} ({failure.said}), so it was given up on all "
            "processes and changed nothing. Mend that one, and call it on all of them again."
        )
        self.failure = failure


class _ToldValue(_Told, ValueError):
    """The same where the data or options of another process were refused."""


def _send(line: Connection, message: Any) -> None:
    """Until the other side has taken it."""
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


def _accepted(server: socket.socket, token: bytes, size: int) -> dict[int, Connection]:
    """A line to each of the others, who prove by the token that they are of the job."""
    lines: dict[int, Connection] = {}
    server.settimeout(NOTICED)
    while len(lines) < size - 1:
        try:
            own, _ = server.accept()
        except OSError as error:
            missing = sorted(set(range(1, size)) - lines.keys())
            raise RuntimeError(
                f"Ranks {missing} did not connect to rank 0 within {NOTICED:.0f} s: they have "
                "ended, or cannot reach it at the address in MASTER_ADDR or by its host's name."
            ) from error
        with suppress(EOFError, OSError):  # of a stranger
            line = _line(own)
            said = line.recv_bytes(len(token) + 8) if line.poll(NOTICED) else b""
            if hmac.compare_digest(said[: len(token)], token):
                lines[int(said[len(token) :])] = line
    return lines


def _connected(addresses: list[tuple[str, int]], token: bytes, rank: int) -> dict[int, Connection]:
    """A line to the first process."""
    for address in addresses:
        with suppress(OSError):
            own = socket.create_connection(address, timeout=NOTICED / len(addresses))
            line = _line(own)
            line.send_bytes(token + str(rank).encode())
            return {0: line}
    tried = ", ".join(f"{host}:{port}" for host, port in addresses)
    raise RuntimeError(
        f"Rank {rank} cannot reach rank 0 (tried {tried}). Set MASTER_ADDR to an address of its "
        "machine that the others can reach."
    )
